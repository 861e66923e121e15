"""Write docs/_generated from the code: flags, details, source pages, diffs, results and speed. conf.py calls `main`.

Nothing is imported from cleanmarl: scripts and tests are parsed, so that the docs build without torch. A tag is a
comment, `# detail core-5: ...` in a script and `# proves core-5` in or right above a test function.
"""

import ast
import csv
import difflib
import functools
import io
import json
import re
import tokenize
from dataclasses import dataclass
from html import escape
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import DiffLexer, PythonLexer

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
OUT = DOCS / "_generated"

PPO = "Huang et al. (2022), in their order; code: openai/baselines, `ppo2`"
# The families of details, in the order of docs/details.md: title and source.
FAMILIES = {
    "core": ("PPO: core", PPO),
    "atari": ("PPO: Atari", PPO),
    "continuous": ("PPO: continuous actions", PPO),
    "lstm": ("PPO: recurrent policies", PPO),
    "procgen": ("PPO: Procgen", PPO),
    "multidiscrete": ("PPO: multi-discrete actions", PPO),
    "aux": ("PPO: auxiliary", PPO),
    "ippo": ("IPPO", "de Witt et al. (2020); code: EPyMARL"),
    "mappo": ("MAPPO", "Yu et al. (2021) and their code, marlbenchmark/on-policy"),
    "coppo": ("CoPPO", "Wu et al. (2021) and their code, Coordinated-PPO; 5 and 7 are of matrix games, 6 of StarCraft"),
    "coma": ("COMA", "Foerster et al. (2018)"),
    "dop": ("DOP", "Wang et al. (2021), section 4.1; code: TonghanWang/DOP"),
    "recurrent": ("Recurrent agents", "Yu et al. (2021); Hausknecht and Stone (2015)"),
    "maddpg": ("MADDPG", "Lowe et al. (2017); discrete actions and whole episodes as in CleanMARL"),
    "facmac": ("FACMAC", "Peng et al. (2021) and their code, oxwhirl/facmac"),
    "masac": ("MASAC", "Haarnoja et al. (2018); Christodoulou (2019) for discrete actions"),
    "vdn": ("VDN and its relatives", "Sunehag et al. (2017); van Hasselt et al. (2016); whole episodes as in PyMARL"),
    "idqn": ("Independent Q-learning", "Tampuu et al. (2017)"),
    "qmix": ("QMIX", "Rashid et al. (2018)"),
    "qtran": ("QTRAN", "Son et al. (2019)"),
    "impala": ("IMPALA", "Espeholt et al. (2018); code: deepmind/scalable_agent, TorchBeast"),
}
DETAILS = {
    "core-1": "Several environments are stepped side by side, and rollouts have a fixed length",
    "core-2": "Orthogonal weights, zero biases; output layers scaled by 0.01 (policy) and 1 (value)",
    "core-3": "Adam's epsilon is 1e-5",
    "core-4": "The learning rate falls linearly to 0",
    "core-5": "Generalized advantage estimation; returns are advantages plus values",
    "core-6": "Shuffled minibatches that use every sample once per epoch",
    "core-7": "Advantages are normalised within each minibatch",
    "core-8": "The surrogate objective is clipped",
    "core-9": "The value loss is clipped",
    "core-10": "One loss: policy, value and an entropy bonus",
    "core-11": "One norm limits the gradient of all parameters together",
    "core-12": "Debug variables: losses, entropy, approximate KL divergence, clipped fraction",
    "core-13": "Policy and value network: two tanh layers of 64 units, shared or separate",
    "atari-1": "A game starts with a random number of no-ops",
    "atari-2": "An action is repeated for 4 frames; the observation is the maximum of the last two",
    "atari-3": "The loss of a life ends the episode, for learning",
    "atari-4": "FIRE is pressed after a reset in games that wait for it",
    "atari-5": "Frames are grey and 84 x 84 pixels",
    "atari-6": "Rewards are replaced by their sign",
    "atari-7": "An observation is a stack of the last 4 frames",
    "atari-8": "One convolutional network serves policy and value",
    "atari-9": "Pixels are scaled to [0, 1]",
    "continuous-1": "Actions come from a normal distribution",
    "continuous-2": "The log standard deviation is a parameter, the same in every state, 0 at first",
    "continuous-3": "The components of an action are independent",
    "continuous-4": "Policy and value have separate networks",
    "continuous-5": "The environment gets the action clipped to its bounds, the learner the one that was sampled",
    "continuous-6": "Observations are normalised by their running mean and variance",
    "continuous-7": "Normalised observations are clipped to [-10, 10]",
    "continuous-8": "Rewards are divided by the deviation of a running discounted return",
    "continuous-9": "Scaled rewards are clipped to [-10, 10]",
    "lstm-1": "LSTM weights are orthogonal with scale 1, biases 0",
    "lstm-2": "The LSTM state is 0 at first",
    "lstm-3": "The LSTM state is reset where an episode ends",
    "lstm-4": "Minibatches are whole sequences of some environments",
    "lstm-5": "Training replays the LSTM states from those at the start of the rollout",
    "procgen-1": "The residual network of IMPALA",
    "multidiscrete-1": "The components of a multi-discrete action are independent",
    "aux-1": "The clip range falls linearly to 0",
    "aux-2": "Gradients are computed by several processes in parallel",
    "aux-3": "The epochs stop early once the policy has moved too far",
    "aux-4": "Illegal actions are masked out",
    "ippo-1": "One network serves all agents and an id tells them apart, or each agent has its own",
    "ippo-2": "The critic sees what its agent observes",
    "ippo-3": "Illegal actions are masked out",
    "ippo-4": "The dead add nothing to the policy's loss (as in MAPPO's code)",
    "ippo-5": "A time limit is no end: gamma V(final observation) is added to the reward",
    "mappo-1": "Values are normalised by running statistics that the critic's last layer follows (PopArt)",
    "mappo-2": "The critic sees the global state beside the agent's observation",
    "mappo-3": "Death masking: the critic of a dead agent sees zeros and the agent's id",
    "mappo-4": "The value loss is Huber's",
    "mappo-5": "Values are clipped by the pessimistic maximum of two losses",
    "mappo-6": "Advantages are normalised over the rollout",
    "mappo-7": "Actor and critic are clipped by norms of their own",
    "mappo-8": "Few epochs and large minibatches; here the agents of a step stay together",
    "mappo-9": "Critics may see states of one scale, by their running mean and deviation",
    "coppo-1": "The product of the others' ratios enters the objective (equation 10)",
    "coppo-2": "Double clipping: that product is clipped before the agent's own ratio is",
    "coppo-3": "Agents are updated in turn, with the newest ratios of the others (algorithm 1)",
    "coppo-4": "The objective of the authors' code",
    "coppo-5": "Counterfactual advantages",
    "coppo-6": "A network mixes the agents' objectives",
    "coppo-7": "Epsilon-greedy exploration, whose mixture is the policy",
    "coma-1": "The counterfactual baseline: what the agent's other actions would have been worth",
    "coma-2": "The critic's targets are TD(lambda)",
    "coma-3": "The critic sees the actions of the other agents",
    "dop-1": "The critic is linear in the values of each agent's own action, with weights that are not negative",
    "dop-2": "The policy gradient is a sum over agents: weight, gradient of the log probability, value",
    "dop-3": "Off-policy targets by tree backup, whose mean over joint actions is taken agent by agent",
    "dop-4": "On-policy targets by TD(lambda); the critic's loss is a mixture of both",
    "dop-5": "Each agent's mean value under its policy is its baseline",
    "dop-6": "A share of uniformly random actions is part of the policy",
    "recurrent-1": "Memories are emptied where an episode begins and when an agent comes back to life",
    "recurrent-2": "Sequences are replayed from the states that were stored at their start",
    "recurrent-3": "Agents see what they did last beside what they observe",
    "maddpg-1": "Critics see all, actors what their agent observes",
    "maddpg-2": "Gumbel-softmax: hard samples act and train the critics, soft ones train the actor",
    "maddpg-3": "The others' actions in the actor's loss are those of the buffer",
    "maddpg-4": "Target networks follow by Polyak averaging",
    "maddpg-5": "Targets take samples of the target policies",
    "maddpg-6": "The buffer holds whole episodes; padding is masked out",
    "maddpg-7": "A truncation is no termination",
    "maddpg-8": "The mean square of the logits is a part of the actor's loss",
    "facmac-1": "A utility sees what one agent observes and does; one network serves all agents",
    "facmac-2": "A network whose weights depend on the state, and may have any sign, mixes the utilities",
    "facmac-3": "The actor's loss takes the present actions of all agents at once",
    "facmac-4": "Its samples are hard, and their gradient is that of soft ones (straight-through Gumbel-softmax)",
    "facmac-5": "Hypernetworks see states normalised by their running mean and deviation",
    "masac-1": "A critic of discrete actions sees the others' actions, and values each of its agent's",
    "masac-2": "Of two critics the smaller value counts",
    "masac-3": "The entropy belongs to the value of what follows",
    "masac-4": "Expectations over an agent's own discrete actions are sums",
    "masac-5": "The temperature follows the entropy of the living, with a target in proportion to what an agent can do",
    "masac-6": "Continuous actions are normal samples squashed by tanh, which changes their density",
    "vdn-1": "The value of a joint action is the sum of its parts; the dead add nothing",
    "vdn-2": "Epsilon-greedy exploration among the legal actions",
    "vdn-3": "Double Q-learning: the network that learns chooses, the target network values",
    "vdn-4": "Targets are TD(lambda) along the episode, as in Peng's Q(lambda)",
    "vdn-5": "Target networks follow by Polyak averaging, or as copies now and then",
    "vdn-6": "The buffer holds whole episodes; padding is masked out",
    "vdn-7": "A truncation is no termination",
    "idqn-1": "With a team's reward the dead go on earning what the team does",
    "qmix-1": "No weight of the mixing network is negative",
    "qmix-2": "Hypernetworks make its weights and biases of the state",
    "qmix-3": "Hypernetworks see states normalised by their running mean and deviation",
    "qtran-1": "At the agents' best actions their sum and the state's value are the joint value",
    "qtran-2": "Nowhere are they less",
    "qtran-3": "The joint value learns from rewards alone",
    "impala-1": "Actors collect with parameters that lag behind the learner's",
    "impala-2": "V-trace targets",
    "impala-3": "The weights rho and c are clipped apart",
    "impala-4": "The policy's gradient has a clipped rho and the target v of the next state",
    "impala-5": "One loss: policy, value and an entropy bonus with their weights",
    "impala-6": "The norm of the gradient is clipped (at 40 for Atari)",
    "impala-7": "The learning rate falls linearly to 0",
    "impala-8": "RMSProp as TensorFlow has it, epsilon inside the root; or Adam",
    "impala-9": "Rewards are clipped (Atari)",
    "impala-10": "The networks of the paper: shallow, deep, with an LSTM",
}

# The families of scripts, as in README.md, and their algorithms; a script belongs to the one its name begins with.
SCRIPTS = {
    "One agent": ("ppo",),
    "Many agents, on-policy": ("ippo", "mappo", "coppo", "coma"),
    "Many agents, off-policy": ("maddpg", "facmac", "masac", "dop", "idqn", "vdn", "qmix", "qtran"),
    "Actors and a learner": ("impala",),
}

# Lines of code that the same write-up changes in the parent for a variant.
WRITE_UP = {
    "ppo_shared": "10",
    "ppo_atari": "40",
    "ppo_continuous_action": "25",
    "ppo_atari_lstm": "60",
    "ppo_atari_envpool": "60",
    "ppo_multidiscrete": "36, of `ppo_atari.py`",
    "ppo_multidiscrete_mask": "30",
}


@dataclass
class Tag:
    """Where a detail is: file (relative to the repository), line, and, in a test file, the test function."""

    detail: str
    file: str
    line: int
    test: str = ""


def scripts() -> list[Path]:
    """The algorithms: modules of cleanmarl with Args and make_envs, ordered by name."""
    needed = ("\nclass Args", "\ndef make_envs")
    return [p for p in sorted(ROOT.glob("cleanmarl/*.py")) if all(word in p.read_text() for word in needed)]


def comments(path: Path, start: str) -> list[tuple[int, list[str]]]:
    """(line, detail ids) of the comments that begin with `start`; raises ValueError for ids that do not exist."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type != tokenize.COMMENT or not token.string.startswith(start):
            continue
        line, ids = token.start[0], re.findall(r"\b[a-z]+-\d+\b", token.string.partition(":")[0])
        for detail in ids:
            if detail not in DETAILS:
                raise ValueError(f"{path.relative_to(ROOT)}:{line}: there is no detail {detail}")
        found.append((line, ids))
    return found


def script_tags(path: Path) -> list[Tag]:
    return [
        Tag(detail, str(path.relative_to(ROOT)), line) for line, ids in comments(path, "# detail ") for detail in ids
    ]


def test_tags() -> list[Tag]:
    """The tests that prove details; raises ValueError for a mark that belongs to no test."""
    found = []
    for path in sorted(ROOT.glob("tests/test_*.py")):
        marks = comments(path, "# proves ")
        tests = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]
        tests = sorted((n for n in tests if n.name.startswith("test_")), key=lambda n: n.lineno) if marks else []
        for line, ids in marks:
            test = next((n for n in tests if n.end_lineno >= line), None)  # around the mark, or next below it
            if test is None:
                raise ValueError(f"{path.relative_to(ROOT)}:{line}: no test follows this mark")
            found += [Tag(detail, str(path.relative_to(ROOT)), test.lineno, test.name) for detail in ids]
    return found


def link(tag: Tag, text: str, up: str) -> str:
    """A link to a line of a source page, from a page whose way to the root of the docs is `up`."""
    page = f"{up}_generated/source/{Path(tag.file).stem}.html"
    return f'<a href="{page}#L-{tag.line}">{escape(text).replace("_", "_<wbr>")}</a>'  # <wbr>: a line may break there


def details_table(ids, tags: list[Tag], tests: list[Tag], up: str) -> str:
    """A table of details: where each script has it, and the tests that prove it."""
    rows = ["| detail | what | where | proved by |", "|---|---|---|---|"]
    for detail in ids:
        where = {}
        for tag in tags:
            if tag.detail == detail:
                name = Path(tag.file).stem
                where.setdefault(name, [name.replace("_", "_<wbr>")]).append(link(tag, str(tag.line), up))
        proofs = {(t.file, t.test): link(t, t.test, up) for t in tests if t.detail == detail}
        name = f'<span style="white-space: nowrap">{detail}</span>'
        lines = ", ".join(" ".join(of_script) for of_script in where.values())
        rows.append(f"| {name} | {DETAILS[detail]} | {lines} | {'<br>'.join(proofs.values())} |")
    return "\n".join(rows) + "\n"


def details_page(tags: list[Tag], tests: list[Tag]) -> str:
    """All details by family, each family with its source."""
    parts = []
    for family, (title, source) in FAMILIES.items():
        ids = [detail for detail in DETAILS if detail.rpartition("-")[0] == family]
        parts.append(f"## {title}\n\nSource: {source}.\n\n{details_table(ids, tags, tests, '')}")
    return "\n".join(parts)


@functools.cache
def flags(path: Path, name: str = "Args") -> list[tuple[str, str, str]]:
    """(flag, default, help) of every field of a class of arguments, as they stand in its source."""
    source = path.read_text()
    body = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name).body
    lines, rows = source.splitlines(), []
    for field, doc in zip(body, [*body[1:], None]):
        if not isinstance(field, ast.AnnAssign):
            continue
        name, kind = field.target.id.replace("_", "-"), ast.unparse(field.annotation)
        # Of one line each. `ast.get_source_segment` would split the whole source once more for every one of them.
        values = field.value.elts if isinstance(field.value, ast.Tuple) else [field.value]  # of each agent, all alike
        default = " ".join(lines[value.lineno - 1][value.col_offset : value.end_col_offset] for value in values)
        flag = f"`--{name}`, `--no-{name}`" if kind == "bool" else f"`--{name}`"
        is_doc = isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
        text = " ".join(doc.value.value.split()) if is_doc else ""
        rows.append((flag, default.strip("\"'"), text))
    return rows


def flags_table(path: Path) -> str:
    """The flags of a script, and those that it shares with all others, or with all of its kind."""
    own = [*flags(path)]
    tables = [own]
    if found := re.search(r"class Args\((\w+)\)", path.read_text()):
        classes = dict.fromkeys(["RunArgs", found[1]])
        shared = {row[0]: row for name in classes for row in flags(path.with_name("cli.py"), name)}
        own[:] = [(flag, default, text or shared[flag][2]) for flag, default, text in own]  # a default of its own
        tables.append([row for flag, row in shared.items() if flag not in {row[0] for row in own}])
    texts = []
    for rows in tables:
        lines = [f"| {flag} | `{default}` | {text.replace('|', chr(92) + '|')} |" for flag, default, text in rows]
        texts.append("\n".join(["| flag | default | meaning |", "|---|---|---|", *lines]) + "\n")
    return "\nThese change no learning, but for the seed, and other scripts have them too:\n\n".join(texts)


def source_page(path: Path, marked: list[int]) -> str:
    """A page with the source, an anchor L-n at each line n, and the tagged lines highlighted."""
    formatter = HtmlFormatter(linenos="inline", lineanchors="L", hl_lines=marked, wrapcode=True)
    code = highlight(path.read_text(), PythonLexer(), formatter)
    fence = "`" * 6  # longer than any fence in the code
    return f"---\norphan: true\n---\n# {path.relative_to(ROOT)}\n\n{fence}{{raw}} html\n{code}{fence}\n"


def lineage(path: Path) -> list[Path]:
    """A script and those it descends from, itself last. A docstring says `Parent: ppo.py`, or `as in ppo.py, but`."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    found = re.search(r"\bParent: (\w+\.py)", text) or re.search(r"\bas in (\w+\.py), but", text)
    if found is None:
        return [path]
    if not path.with_name(found[1]).exists():
        raise ValueError(f"{path.relative_to(ROOT)}: there is no parent {found[1]}")
    return [*lineage(path.with_name(found[1])), path]


def code_lines(path: Path) -> list[str]:
    """The lines of a script without its comments and docstrings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [x for x in node.body if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]
    return ast.unparse(tree).splitlines()


def changes(old: list[str], new: list[str]) -> str:
    """How many lines a diff adds and removes, as +12 -3."""
    lines = list(difflib.unified_diff(old, new, n=0, lineterm=""))[2:]  # without the names of the files
    return f"+{sum(line.startswith('+') for line in lines)} -{sum(line.startswith('-') for line in lines)}"


def diffs_table(variants: list[Path]) -> str:
    """Every variant, its parent, and how many lines differ."""
    rows = ["| script | parent | lines | of code | write-up |", "|---|---|---|---|---|"]
    for path in variants:
        parent = lineage(path)[-2]
        lines = changes(parent.read_text().splitlines(), path.read_text().splitlines())
        code = changes(code_lines(parent), code_lines(path))
        name = f"[{path.name}](/_generated/diff/{path.stem}.md)"
        rows.append(f"| {name} | `{parent.name}` | {lines} | {code} | {WRITE_UP.get(path.stem, '')} |")
    return "\n".join(rows) + "\n"


def diff_page(path: Path) -> str:
    """A page with the unified diff from a script's parent to it."""
    parent = lineage(path)[-2]
    texts = parent.read_text().splitlines(), path.read_text().splitlines()
    lines = difflib.unified_diff(*texts, parent.name, path.name, lineterm="")
    html = highlight("\n".join(lines), DiffLexer(), HtmlFormatter(wrapcode=True))
    fence = "`" * 6  # longer than any fence in the code
    return f"---\norphan: true\n---\n# From {parent.name} to {path.name}\n\n{fence}{{raw}} html\n{html}{fence}\n"


def results() -> dict[str, tuple[str, str]]:
    """(caption, table) of every figure in docs/results, by name; its .md holds picture, caption and table."""
    pages = {page.stem: page.read_text().split("\n\n", 2)[1:] for page in sorted(DOCS.glob("results/*.md"))}
    return {name: (caption.strip(), table) for name, (caption, table) in pages.items()}


def place_of_result(result: tuple[str, tuple[str, str]]) -> tuple[bool, bool]:
    """For the order on a page: learning curves first, those of the longest budget before the others."""
    name, (_, table) = result
    return not table.startswith("| environment |"), not name.endswith("_long")


def results_of(script: str, pages: list[str]) -> str:
    """The figures and tables of a page: those in docs/results whose names begin with its name and no longer one."""
    parts = []
    for name, (caption, table) in sorted(results().items(), key=place_of_result):
        owners = [page for page in pages if name.startswith(f"{page}_")]
        if max(owners, key=len, default=None) == script:
            parts.append(f"```{{figure}} /results/{name}.svg\n:alt: {name}\n:name: {name}\n\n{caption}\n```\n\n{table}")
    return "\n".join(parts)


def not_run(env_id: str, ran: set[str]) -> str:
    """The scripts for such an environment of many agents of which there is no curve, as a line; "" for one agent."""
    if "/" not in env_id or env_id.startswith("ALE/"):
        return ""
    ends = "_continuous_action" if "continuous" in env_id or "multiwalker" in env_id else ""
    fitting = [path.stem for path in scripts() if family_of(path.stem)[0].startswith("Many agents")]
    fitting = [x for x in fitting if x.endswith("_continuous_action") == bool(ends) and x != "coppo_matrix"]
    missing = [f"`{script}`" for script in fitting if script not in ran]
    return f"\nNo curves of {', '.join(missing)}.\n" if missing else ""


def benchmarks_tables(pages: list[str]) -> str:
    """The rows of the tables that benchmark/report.py wrote, by environment, each with its settings."""
    figures = json.loads((DOCS / "results" / "data" / "figures.json").read_text())
    rows = {}  # environment -> (script, steps, settings) -> results by the names of their columns
    for name, (_, table) in results().items():
        owner = max((page for page in pages if name.startswith(f"{page}_")), key=len, default=None)
        lines = table.partition("\n\n")[0].splitlines()  # a second table is of all environments together
        lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        for env_id, script, settings, seeds, steps, *ends in lines[2:] if name in figures and owner else []:
            if seeds:  # without them it is a random or best-known score, the same in every figure
                script = f"[{script.replace('_', '_<wbr>')}](/algorithms/{script}.md)" if script in pages else script
                settings, steps = f"[{settings}](/algorithms/{owner}.md#{name})", f"{seeds} x {steps}"
            of_row = rows.setdefault(env_id, {}).setdefault((script, steps, settings), {})
            of_row |= zip(lines[0][5:], ends)
    tables = []
    for env_id, of_env in sorted(rows.items()):
        columns = sorted(
            {column for cells in of_env.values() for column in cells}, key=lambda name: (name.startswith("last"), name)
        )
        head = ["script", *columns, "seeds x steps", "settings"]
        tables.append(f"### {env_id}\n\n| {' | '.join(head)} |\n|---|{'---:|' * (len(columns) + 1)}---|\n")
        ran = {script.partition("(/algorithms/")[2].partition(".md)")[0] for script, *_ in of_env}
        # Scores to compare with first: their names are in italics.
        for (script, steps, settings), cells in sorted(of_env.items(), key=lambda row: not row[0][0].startswith("*")):
            values = [cells.get(column, "") for column in columns]
            tables[-1] += f"| {' | '.join([script, *values, steps, settings])} |\n"
        tables[-1] += not_run(env_id, ran)
    return "\n".join(tables)


def family_of(script: str) -> tuple[str, int]:
    """The family of a script, and its place there: that of the algorithm whose name is the longest part of its own."""
    places = [(root, title, i) for title, roots in SCRIPTS.items() for i, root in enumerate(roots)]
    found = [place for place in places if script == place[0] or script.startswith(f"{place[0]}_")]
    if not found:
        raise ValueError(f"{script}.py belongs to no family of SCRIPTS in docs/generate.py")
    return max(found, key=lambda place: len(place[0]))[1:]


def scripts_table() -> str:
    """The scripts by family, each with its page if it has one and the first sentence of its docstring; the sidebar."""
    parts = []
    for title in SCRIPTS:
        rows, pages = [f"### {title}\n", "| script | algorithm |", "|---|---|"], []
        of_family = [path for path in scripts() if family_of(path.stem)[0] == title]
        for path in sorted(of_family, key=lambda path: (family_of(path.stem)[1], path.stem)):
            name = path.stem
            has_page = (DOCS / "algorithms" / f"{name}.md").exists()
            pages += [f"{name}.py <algorithms/{name}>"] if has_page else []
            script = f"[{path.name}](/algorithms/{name}.md)" if has_page else f"`{path.name}`"
            rows.append(f"| {script} | {idea(path)} |")
        toctree = ["```{toctree}", f":caption: {title}", ":hidden:", "", *pages, "```"]
        parts.append("\n".join([*rows, "", *toctree]))
    return "\n\n".join(parts) + "\n"


def speed_tables() -> str:
    """What benchmark/speed.py measured beside peers: the rates, then the settings of both sides."""
    path = DOCS / "results" / "data" / "speed.csv"
    if not path.exists():
        return ""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    rates = ["| script | beside | ours | the peer's | ratio (range) | goal | n |", "|---|---|---:|---:|---:|---:|---:|"]
    settings = ["| script, beside | both | ours | the peer's |", "|---|---|---|---|"]
    for row in rows:
        ours, peer = (f"{int(row[side]):,}" for side in ("ours", "peer"))
        ratio = f"{float(row['ratio']):.2f} ({float(row['ratio_min']):.2f}-{float(row['ratio_max']):.2f})"
        cells = [
            f"`{row['script']}`",
            row["beside"],
            ours,
            peer,
            ratio,
            f"{float(row['goal']):g}" if row["goal"] else "-",
            row["n"],
        ]
        rates.append(f"| {' | '.join(cells)} |")
        cells = [f"`{row['script']}`, {row['beside']}", row["settings"], row["ours_differs"], row["peer_differs"]]
        settings += [f"| {' | '.join(cells)} |"] if not row["script"].endswith(" --compile") else []
    machines = "; ".join(dict.fromkeys(row["machine"] for row in rows))
    parts = ["\n".join(rates), f"Measured on: {machines}.", "### Settings of both sides", "\n".join(settings)]
    return "\n\n".join(parts) + "\n"


def idea(path: Path) -> str:
    """The first sentence of a script's docstring, the scripts in it linked to their pages."""
    first = ast.get_docstring(ast.parse(path.read_text())).partition("\n")[0].removesuffix(":").removesuffix(".")
    return re.sub(r"\b(\w+)\.py\b", r"[\1.py](/algorithms/\1.md)", first) + "."


def environment_page(path: Path) -> str:
    """The docstring of a family's module, as it stands: what its environments show, take, pay and when they end."""
    return f"```text\n{ast.get_docstring(ast.parse(path.read_text()))}\n```\n"


def main() -> None:
    pages = {"scripts.md": scripts_table()}
    for path in sorted((ROOT / "cleanmarl" / "envs").glob("[!_]*.py")):
        pages[f"environment_{path.stem}.md"] = environment_page(path)
    all_tags, tests = [], test_tags()
    documented = [path.stem for path in sorted(DOCS.glob("algorithms/*.md"))]
    pages["benchmarks.md"] = benchmarks_tables(documented)
    pages["speed.md"] = speed_tables()
    pages["results_speed.md"] = results_of("speed", ["speed"])
    for path in scripts():
        tags = script_tags(path)
        all_tags += tags
        ids = [detail for detail in DETAILS if detail in {tag.detail for tag in tags}]
        pages[f"flags_{path.stem}.md"] = flags_table(path)
        pages[f"details_{path.stem}.md"] = f"## Details\n\n{details_table(ids, tags, tests, '../')}" if ids else ""
        pages[f"results_{path.stem}.md"] = results_of(path.stem, documented)
        pages[f"idea_{path.stem}.md"] = idea(path) + "\n"
        pages[f"source/{path.stem}.md"] = source_page(path, [tag.line for tag in tags])
    variants = sorted((path for path in scripts() if len(lineage(path)) > 1), key=lineage)
    pages["diffs.md"] = diffs_table(variants)
    pages |= {f"diff/{path.stem}.md": diff_page(path) for path in variants}
    for file in sorted({tag.file for tag in tests}):
        pages[f"source/{Path(file).stem}.md"] = source_page(ROOT / file, [t.line for t in tests if t.file == file])
    pages["details.md"] = details_page(all_tags, tests)

    for old in OUT.rglob("*.md"):
        if str(old.relative_to(OUT)) not in pages:
            old.unlink()
    for name, text in pages.items():
        page = OUT / name
        if not page.exists() or page.read_text() != text:  # an unchanged page is not built again
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(text)


if __name__ == "__main__":
    main()
