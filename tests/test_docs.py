"""The docs build without warnings, and say what the code says."""

import ast
import dataclasses
import functools
import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
import tomllib
from html import unescape
from pathlib import Path
from types import ModuleType

from cleanmarl import ppo
from cleanmarl.cli import parse
from cleanmarl.envs import EnvError, make

import numpy as np
import pytest

pytest.importorskip("sphinx")
pytest.importorskip("myst_parser")
pytest.importorskip("furo")
pytest.importorskip("latex2mathml")

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.stem for path in DOCS.glob("algorithms/*.md"))


def load_generate(docs: Path) -> ModuleType:
    """docs/generate.py, or a copy of it that works on the tree around `docs`."""
    docs.mkdir(exist_ok=True)
    path = docs / "generate.py"
    if not path.exists():
        shutil.copy(DOCS / "generate.py", path)
    spec = importlib.util.spec_from_file_location("generate", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load_generate(DOCS)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built pages."""
    out = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(out / "doctrees")]
    build = subprocess.run([*command, str(DOCS), str(out / "html")], capture_output=True, text=True)
    assert build.returncode == 0, build.stderr
    return out / "html"


def table_cells(page: Path) -> list[list[str]]:
    """The texts of the cells of all table rows of a page."""
    rows = re.findall(r"<tr\b.*?</tr>", page.read_text(), re.DOTALL)
    cells = [re.findall(r"<td\b[^>]*>(.*?)</td>", row, re.DOTALL) for row in rows]
    return [[unescape(re.sub(r"<[^>]*>", "", cell)).strip() for cell in row] for row in cells]


def links(page: Path) -> set[str]:
    """Targets inside the site that a page links to."""
    targets = {unescape(href) for href in re.findall(r'<a\b[^>]*\bhref="([^"]*)"', page.read_text())}
    return {target for target in targets if target and "://" not in target}


@functools.cache
def anchors(page: Path) -> set[str]:
    return set(re.findall(r'\b(?:id|name)="([^"]*)"', page.read_text()))


def test_benchmarks_has_every_published_result(site):
    rows = [row[1:3] for row in table_cells(site / "benchmarks.html") if len(row) == 5]
    published = 0
    for table in DOCS.glob("results/*.md"):
        for line in table.read_text().splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) == 7 and cells[1] in PAGES:  # environment, script, settings, seeds, steps, two results
                assert cells[5:] in rows, f"{table.name}: {line}"
                published += 1
    assert published >= 8


def test_every_figure_is_on_one_page_with_its_caption_and_its_table(site):
    pages = {page: page.read_text() for page in [*site.glob("algorithms/*.html"), site / "speed.html"]}
    for name, (caption, table) in generate.results().items():
        (owner,) = (page for page, text in pages.items() if f"/{name}.svg" in text)
        text = unescape(re.sub(r"<[^>]*>", "", pages[owner]))
        assert re.sub(r"[`*]", "", caption) in text, name
        last = [cell.replace("`", "").strip() for cell in table.splitlines()[-1].strip("|").split("|")]
        assert last in table_cells(owner), name


def test_results_hold_nothing_written_by_hand():
    """Every file there is made from the data: a picture, its caption and table, the page of all."""
    results = {path.name for path in (DOCS / "results").iterdir()} - {"data", "report.html"}
    assert {Path(name).suffix for name in results} == {".svg", ".md"}
    for page in (DOCS / "results").glob("*.md"):
        assert page.read_text().startswith(f"![{page.stem}]({page.stem}.svg)\n\n")
        assert any((DOCS / "results" / "data").glob(f"{page.stem}.csv")) or page.stem.startswith("coppo_matrix_")


@pytest.mark.parametrize("script", PAGES)
def test_page_has_every_flag_with_its_default(site, script):
    args_class = importlib.import_module(f"cleanmarl.{script}").Args
    rows = [row for row in table_cells(site / "algorithms" / f"{script}.html") if len(row) == 3]
    table = {row[0].split(",")[0]: row for row in rows}
    for field in dataclasses.fields(args_class):
        flag, default = f"--{field.name.replace('_', '-')}", field.default
        assert flag in table, f"{flag} is missing"
        if isinstance(default, bool | int | float):
            assert float(ast.literal_eval(table[flag][1])) == default, f"default of {flag}"
        assert table[flag][2], f"{flag} is not explained"


def test_every_link_of_the_site_leads_somewhere(site):
    """Sphinx checks its own links, but not those to lines of the source pages."""
    lines = 0
    for page in site.rglob("*.html"):
        for target in links(page):
            file, _, anchor = target.partition("#")
            goal = (page.parent / file).resolve() if file else page
            assert goal.exists(), f"{page.relative_to(site)} links to {target}"
            assert not anchor or anchor in anchors(goal), f"{page.relative_to(site)} links to {target}"
            lines += "/source/" in target
    assert lines > 20


def test_pages_need_no_network(site):
    """Nothing is loaded from elsewhere, and no equation is left as LaTeX."""
    equations = 0
    for page in site.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=[\"']?(\w+://[^\"' >]*)", text)
        assert not loaded, f"{page.relative_to(site)} loads {loaded}"
        for equation in re.findall(r"<math.*?</math>", text, flags=re.DOTALL):
            assert "\\" not in equation, f"{page.relative_to(site)}: {equation}"
            equations += 1
    assert equations > 500


@pytest.fixture(scope="module")
def tagged() -> set[str]:
    return {tag.detail for path in generate.scripts() for tag in generate.script_tags(path)}


@pytest.fixture(scope="module")
def proved() -> set[str]:
    return {tag.detail for tag in generate.test_tags()}


def test_links_to_tags_lead_to_the_tagged_lines():
    for path in generate.scripts():
        source = path.read_text().splitlines()
        for tag in generate.script_tags(path):
            assert f"detail {tag.detail}" in source[tag.line - 1]


def test_ppo_has_the_core_details_and_they_are_proved(proved):
    core = {f"core-{n}" for n in range(1, 14)}
    assert core <= {tag.detail for tag in generate.script_tags(ROOT / "cleanmarl" / "ppo.py")}
    assert core <= proved


def test_details_are_numbered_within_their_families():
    counts = dict.fromkeys(generate.FAMILIES, 0)
    for detail in generate.DETAILS:
        family, number = detail.rsplit("-", 1)
        counts[family] += 1
        assert int(number) == counts[family]
    of_the_write_up = {"core": 13, "atari": 9, "continuous": 9, "lstm": 5, "procgen": 1, "multidiscrete": 1, "aux": 4}
    assert of_the_write_up.items() <= counts.items() and all(counts.values())


@pytest.mark.parametrize("family", generate.FAMILIES)
def test_every_detail_has_a_line_and_a_test_that_proves_it(family, tagged, proved):
    details = {detail for detail in generate.DETAILS if detail.rpartition("-")[0] == family}
    assert details <= tagged, f"no script has {sorted(details - tagged)}"
    assert details <= proved, f"no test proves {sorted(details - proved)}"


def test_unknown_detail_is_an_error(tmp_path):
    generate = load_generate(tmp_path / "docs")
    (tmp_path / "cleanmarl").mkdir()
    script = tmp_path / "cleanmarl" / "new.py"
    script.write_text('"""See `detail core-99`."""\n\n# detail core-1, detail core-14: no such thing\n')
    with pytest.raises(ValueError, match=r"cleanmarl/new.py:3: there is no detail core-14"):
        generate.script_tags(script)


def test_proofs_belong_to_the_test_around_or_below(tmp_path):
    generate = load_generate(tmp_path / "docs")
    (tmp_path / "tests").mkdir()
    code = (
        "def test_a():\n    # proves core-2\n    pass\n\n\n# proves core-3\n# proves core-4\ndef helper():\n    pass\n"
    )
    code += "\n\n@mark\ndef test_b():\n    pass\n"
    (tmp_path / "tests" / "test_x.py").write_text(code)
    found = [(tag.detail, tag.test, tag.line) for tag in generate.test_tags()]
    assert found == [("core-2", "test_a", 1), ("core-3", "test_b", 13), ("core-4", "test_b", 13)]
    (tmp_path / "tests" / "test_x.py").write_text(code + "\n\n# proves core-5\n")
    with pytest.raises(ValueError, match="no test follows"):
        generate.test_tags()


def test_diffs_are_from_the_parent_that_a_docstring_names(tmp_path):
    generate = load_generate(tmp_path / "docs")
    (tmp_path / "cleanmarl").mkdir()
    a, b, c = (tmp_path / "cleanmarl" / name for name in ("a.py", "b.py", "c.py"))
    a.write_text('"""The root."""\n\nx = 1\ny = 2\n')
    b.write_text('"""As a.py.\n\nParent: a.py.\n"""\n\nx = 1  # a comment\ny = 3\nz = 4\n')
    c.write_text('"""B as in b.py, but shorter."""\n\nx = 1\ny = 3\n')
    assert [generate.lineage(path) for path in (a, b, c)] == [[a], [a, b], [a, b, c]]
    _, _, first, second = generate.diffs_table([b, c]).splitlines()
    assert first == "| [b.py](/_generated/diff/b.md) | `a.py` | +7 -3 | +2 -1 |  |"
    assert second == "| [c.py](/_generated/diff/c.md) | `b.py` | +2 -6 | +0 -1 |  |"
    page = unescape(re.sub(r"<[^>]*>", "", generate.diff_page(b)))
    assert "From a.py to b.py" in page and "\n-y = 2" in page and "\n+z = 4" in page
    b.write_text('"""Parent: nobody.py"""\n')
    with pytest.raises(ValueError, match=r"cleanmarl/b.py: there is no parent nobody.py"):
        generate.lineage(c)


def test_results_go_to_the_page_whose_name_is_longest(tmp_path):
    generate = load_generate(tmp_path / "docs")
    (tmp_path / "docs" / "results").mkdir()
    for name in ("ppo_cartpole", "ppo_atari_pong"):
        (tmp_path / "docs" / "results" / f"{name}.md").write_text(f"![{name}]({name}.svg)\n\nCaption.\n\n| {name} |\n")
    names = ["ippo", "ppo", "ppo_atari"]
    assert generate.results_of("ippo", names) == ""
    assert "| ppo_cartpole |" in generate.results_of("ppo", names) and "pong" not in generate.results_of("ppo", names)
    of_atari = generate.results_of("ppo_atari", names)
    assert "```{figure} /results/ppo_atari_pong.svg" in of_atari and "Caption." in of_atari


def test_flags_of_all_scripts_follow_those_of_the_script(tmp_path):
    generate = load_generate(tmp_path / "docs")
    of_all = 'class RunArgs:\n    seed: int = 1\n    """seed"""\n    device: str = "cpu"\n'
    (tmp_path / "cli.py").write_text(of_all + "class OnPolicyArgs(RunArgs):\n    compile: bool = False\n")
    script = tmp_path / "x.py"
    script.write_text('class Args(RunArgs):\n    gamma: float = 0.9\n    """discount"""\n    seed: int = 7\n')
    own, common = generate.flags_table(script).split("These change no learning")
    assert "| `--gamma` | `0.9` | discount |" in own and "| `--seed` | `7` | seed |" in own
    assert "| `--device` | `cpu` |" in common and "--seed" not in common and "--compile" not in common
    script.write_text(script.read_text().replace("RunArgs", "OnPolicyArgs"))
    assert "--device" in generate.flags_table(script) and "`--compile`, `--no-compile`" in generate.flags_table(script)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_all_that_is_made_of_its_script(page):
    text = (DOCS / "algorithms" / f"{page}.md").read_text()
    for part in ("idea", "flags", "details"):
        assert f"```{{include}} ../_generated/{part}_{page}.md\n```" in text


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_between_files_lead_somewhere(site, name):
    """The links that a reader of the repository follows; an anchor in a page of the docs must be there once built."""
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        assert (ROOT / file).exists(), f"{name} links to {target}"
        if anchor:
            page = site / Path(file).relative_to("docs").with_suffix(".html")
            assert anchor in anchors(page), f"{name} links to {target}"


def table_rows(page: Path) -> list[list[str]]:
    lines = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


ENVIRONMENTS = [row for row in table_rows(DOCS / "environments.md") if len(row) == 5]


@pytest.mark.parametrize("row", ENVIRONMENTS, ids=[row[0].split("`")[1] for row in ENVIRONMENTS])
def test_environment_table_is_measured(row):
    env_id, (agents, obs_sizes, actions, state) = row[0].split("`")[1], row[1:]
    options = {"num_workers": 0} if env_id.startswith("pz/") else {}
    try:
        envs = make(env_id, 1, **options)
    except EnvError as error:
        pytest.skip(str(error))
    obs, info = envs.reset(seed=1)
    envs.close()
    assert int(agents) == envs.num_agents == obs.shape[1]
    np.testing.assert_array_equal([int(x) for x in obs_sizes.split(",")], envs.obs_sizes)
    np.testing.assert_array_equal([int(x) for x in actions.split(",")], envs.action_sizes)
    assert int(state) == info["state"].shape[1]
    assert envs.continuous == ("(continuous)" in row[0])


def test_every_dependency_has_a_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = {"main": project["project"]["dependencies"], **project["dependency-groups"]}
    wanted = {(group, re.match(r"[\w.-]+", wish)[0]) for group, wishes in groups.items() for wish in wishes}

    text = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Dependencies\n")[2]
    explained = set()
    for line in text.splitlines():
        if line.startswith("| `"):
            *group, packages, reason = (cell.strip() for cell in line.strip("|").split("|"))
            assert reason
            explained |= {(group[0].strip("`") if group else "main", name) for name in re.findall("`(.+?)`", packages)}
    assert explained == wanted


def test_readme_names_every_script():
    readme = (ROOT / "README.md").read_text()
    scripts = {path.name for path in generate.scripts()}
    assert {name for name in scripts if f"[`{name}`](cleanmarl/{name})" not in readme} == set()


def test_readme_shows_the_lines_of_the_script():
    """All but the docstring, and from the left margin."""
    script = (ROOT / "cleanmarl" / "mappo.py").read_text()
    script = re.sub(r'(def mappo_loss[^\n]*\n)    """.*?"""\n', r"\1", script, flags=re.DOTALL)
    script = "\n".join(line.strip() for line in script.splitlines())
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    assert len(blocks) == 2 and blocks[0].startswith("def mappo_loss")
    for block in blocks:
        assert "\n".join(line.strip() for line in block.splitlines()) in script
    assert len(readme.splitlines()) < 182  # with the tables of results and of speed


def test_pictures_of_the_front_page_are_there():
    readme = (ROOT / "README.md").read_text()
    pictures = [ROOT / path for path in re.findall(r'<img src="(.*?)"', readme)]
    assert len(pictures) == 2 and all(path.exists() for path in pictures)
    assert (DOCS / "figures" / "simple_spread.gif").stat().st_size < 400_000


WITH_COMMANDS = [page for folder in ("docs/algorithms", "docs", ".") for page in sorted(ROOT.glob(f"{folder}/*.md"))]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda path: path.stem)
def test_commands_have_flags_that_their_scripts_have(page):
    """Every `--flag` of a command that runs a script, in a block or within a line."""
    of_class = {name: generate.flags(ROOT / "cleanmarl" / "cli.py", name) for name in ("RunArgs", "OnPolicyArgs")}
    rows = {path.stem: [*generate.flags(path), *of_class["RunArgs"]] for path in generate.scripts()}
    for path in generate.scripts():
        rows[path.stem] += of_class["OnPolicyArgs"] if "(OnPolicyArgs)" in path.read_text() else []
    text = re.sub(r"\\\n\s*", "", page.read_text())  # one line for each command
    text = re.sub(r'"[^"\s]*"', "WORD", text)  # other quotes are around whole commands
    for script, flags in re.findall(r'\bcleanmarl[/.](\w+?)(?:\.py)?((?: [^`#"\n]*)?)(?=[`#"\n])', text):
        if script in rows:
            known = {"--help", *re.findall(r"--[\w-]+", " ".join(row[0] for row in rows[script]))}
            wrong = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", flags)) - known
            assert not wrong, f"{script} has no {sorted(wrong)}"


def test_names_on_the_page_of_other_libraries(monkeypatch):
    """Flags of the tables exist, as do the names of Stable-Baselines3; peers' commands are those that are measured."""
    page = (DOCS / "coming_from.md").read_text()
    on_policy, values = (
        table for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE) if "| `--num-envs` |" in table
    )
    for table, scripts in ((on_policy, ("ppo", "mappo")), (values, ("qmix",))):
        args_classes = [importlib.import_module(f"cleanmarl.{script}").Args for script in scripts]
        known = {f"--{field.name.replace('_', '-')}" for cls in args_classes for field in dataclasses.fields(cls)}
        flags = re.findall(r"--[a-z-]+[a-z]", "".join(line.split("|")[1] for line in table.splitlines()))
        assert len(flags) > 12 and set(flags) <= known
    theirs = [line.split("|")[3] for line in on_policy.splitlines()[2:]]
    names = {name for cell in theirs for name in re.findall(r"`([a-z_]+)`", cell)} - {"n_envs"}
    monkeypatch.syspath_prepend(ROOT / "benchmark")
    import speed_pairs

    commands = re.sub(r"\\\n\s*", "", re.search(r"```sh\n(.*?)```", page, re.DOTALL)[1])
    for beside in ("CleanMARL mappo_multienvs.py", "JaxMARL ippo_ff_mpe.py"):
        (pair,) = (pair for pair in speed_pairs.PAIRS if pair.beside == beside and "--compile" not in pair.ours)
        owner, script = beside.split()
        (command,) = re.findall(rf"# {owner}'s {re.escape(script)}\b.*\n(.*)", commands)
        command = command.replace("--total-timesteps 10000000 ", "")  # measured are fewer
        own = "--total-timesteps {steps} --seed {seed} --runs-dir {tmp} --eval-episodes 0 "
        assert sorted(command.split()) == sorted(pair.ours.replace(own, "").split())

    sb3 = pytest.importorskip("stable_baselines3")
    of_sb3 = inspect.signature(sb3.PPO).parameters
    assert len(names) > 12 and names <= {*of_sb3, *inspect.signature(sb3.PPO.learn).parameters}
    (command,) = re.findall(r"# Stable-Baselines3's PPO.*\n(.*)", commands)
    ours = parse(ppo.Args, command.split()[2:], "ppo")
    same = {"num_steps": "n_steps", "update_epochs": "n_epochs", "clip_coef": "clip_range", "target_kl": "target_kl"}
    same |= {"norm_adv": "normalize_advantage"} | {name: name for name in ("learning_rate", "gamma", "gae_lambda")}
    same |= {name: name for name in ("ent_coef", "max_grad_norm")}
    assert {name: getattr(ours, name) for name in same} == {name: of_sb3[same[name]].default for name in same}
    assert ours.num_envs * ours.num_steps / ours.num_minibatches == of_sb3["batch_size"].default
    assert ours.vf_coef == 2 * of_sb3["vf_coef"].default and not ours.anneal_lr and ours.time_limit_bootstrap
    assert of_sb3["clip_range_vf"].default is None and not ours.clip_vloss
