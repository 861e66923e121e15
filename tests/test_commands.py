"""Every block of code in the README and the docs: each command can be given, and a walk through a page is taken.

The blocks of own_environment.md, load.md and change.md are run by the tests of those names.
"""

import importlib
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from cleanmarl import enjoy, ppo
from cleanmarl.cli import parse
from cleanmarl.envs import make

import numpy as np
import pytest
import torch
import tyro
from optional import need
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    path for folder in (".", "docs", "docs/algorithms", "benchmark/agents") for path in ROOT.glob(f"{folder}/*.md")
]
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(PAGES) if path.stem != "CHANGELOG"}
NOT_RUN = {  # the beginning of a command, and why no test gives it
    "source .venv/bin/activate": "changes the shell that it is given in",
    "RUN=": "the shell's: the newest run folder, which the tests know",
    "cp cleanmarl/": "a copy of a script: the tests of docs/change.md train several",
    "python -m cleanmarl.envs ": "seconds to minutes: test_envs.py lists a family and measures an environment",
    "tensorboard --logdir runs": "a server, which does not end",
    "poetry install": "another installer, which the tests do not need",
    "uv ": "another installer, which the tests do not need; its file is held by test_requirements.py",
    "pip install ": "installs into the environment that the tests run in",
    ".venv/bin/pip install ": "installs into the environment that the tests run in",
    "apt install ": "changes the machine",
    "bash benchmark/peers/setup.sh": "downloads the peers",
    "bash benchmark/peers/monobeast.sh": "needs the peers",
}
PYTHON_ELSEWHERE = {  # the beginning of a block of Python, and the test that has it
    "def mappo_loss": "test_docs.py: lines of the script",
    "now = collect(": "test_docs.py: lines of the script",
    "class SmallPong": "test_pz.py and test_change.py",
    "import pandas as pd": "test_curves_as_a_table, below",
    "SummaryWriter(run.folder)": "test_a_histogram_of_ones_own, below",
    "# overcooked.py": "test_overcooked, below",
    "# vmas_task.py": "none: VMAS is in no group, because it would bring another torch",
    "gym_microrts": "none: needs Java and a package for an old gym, which are not installed here",
}
UNFIT = {  # scripts that no page's command is trained of here, and why; their own tests train all of them
    "ppo_atari": "pictures: seconds a rollout",
    "ppo_atari_envpool": "pictures",
    "ppo_atari_lstm": "pictures",
    "ppo_atari_multigpu": "pictures, in several processes",
    "ppo_procgen": "pictures",
    "ppo_selfplay": "pictures of a board",
    "impala_atari_envpool": "pictures",
    "impala_ray": "starts Ray",
}


def blocks(page: str, *languages: str) -> list[str]:
    """The texts of the fenced blocks of a page in these languages."""
    found = re.findall(r"^( *)```([^\n`]*)\n(.*?)^\1```$", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    return [text for _, language, text in found if language in languages]


def commands(page: str) -> Iterator[list[str]]:
    """The words of each command of a page, in order."""
    for text in blocks(page, "sh"):
        for line in re.sub(r"\\\n\s*", " ", text).splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def script_of(words: list[str]) -> tuple[str, list[str]]:
    """(script, flags) of a command that trains; ("", []) of another."""
    found = re.fullmatch(
        r"(?:torchrun --nproc-per-node 2|python) (?:cleanmarl/|-m cleanmarl\.|my_)(\w+?)(?:\.py)?( .*)?",
        shlex.join(words),
    )
    if not found or found[1] in ("enjoy", "envs"):
        return "", []
    return found[1], shlex.split(found[2] or "")


def without_resume(flags: list[str]) -> list[str]:
    """Flags without `--resume $RUN`, for which there must be a run."""
    at = flags.index("--resume") if "--resume" in flags else len(flags)
    return flags[:at] + flags[at + 2 :]


def load(path: Path):
    spec = importlib.util.spec_from_file_location(f"command_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(words: list[str]) -> None:
    """Raise, or end with what the command would say, if it is not one that can be given."""
    line = " ".join(words)
    script, flags = script_of(words)
    if script:
        parse(importlib.import_module(f"cleanmarl.{script}").Args, without_resume(flags), script)
    elif words[:3] == ["python", "-m", "cleanmarl.enjoy"]:
        tyro.cli(enjoy.Args, args=words[3:])
    elif words[0] == "make":
        subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
    elif words[:2] == ["python3", "bootstrap.py"]:
        groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
        assert {*words[2:]} <= {*groups}, line
    elif words[0] == "python" and words[1].startswith("benchmark/"):
        drawn = ["matplotlib", "pandas"]
        packages = {"tune.py": ["optuna"], "report.py": drawn, "cross_play.py": drawn}
        need("tyro", *packages.get(Path(words[1]).name, []))
        own, of_script = parts(words[2:])
        args = tyro.cli(load(ROOT / words[1]).Args, args=own)
        if getattr(args, "command", ""):
            check([*shlex.split(args.command), "--env-id", args.env_ids[0], *of_script])
    elif words[0] == "python" and words[1].endswith(".py"):
        assert (ROOT / words[1]).exists() and not words[2:], line
    else:
        assert any(line.startswith(start) for start in NOT_RUN), f"neither known nor in NOT_RUN: {line}"


def parts(words: list[str]) -> tuple[list[str], list[str]]:
    """A benchmark's own flags, and those of the script that it runs."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands(page))])
def test_commands_can_be_given(page, monkeypatch):
    """By the scripts' own parsers: flags, values and their ranges."""
    monkeypatch.syspath_prepend(ROOT / "benchmark")  # its scripts import each other
    for words in commands(page):
        check(words)


def small(script: str, flags: list[str], sofar: int = 0) -> list[str]:
    """The same flags for two updates more than `sofar`, with what happens once in a while happening once."""
    args = importlib.import_module(f"cleanmarl.{script}").Args
    known = parse(args, without_resume(flags), script)
    steps = getattr(known, "num_envs", 1) * getattr(known, "num_steps", getattr(known, "unroll_length", 50))
    flags = [*flags, "--total-timesteps", str(sofar + 2 * steps), "--eval-episodes", "1"]
    for name in ("checkpoint", "eval", "video"):
        if f"--{name}-interval" in flags:
            flags += [f"--{name}-interval", str(steps)]
    return flags


WALKS = ["README.md", "docs/installation.md", "docs/continue.md", "docs/howto.md", "docs/coming_from.md"]


@pytest.mark.parametrize("page", WALKS)
def test_walks(page, tmp_path, monkeypatch, capsys):
    """The commands of a page one after another, in one folder, for two updates each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for module in ("meeting", "corridor"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    for text in blocks("docs/own_environment.md", "python"):
        if name := re.match(r"# (\w+\.py)\n", text):
            Path(name[1]).write_text(text)
    shutil.copytree(ROOT / "benchmark" / "agents" / "simple_spread", "benchmark/agents/simple_spread")
    folder, steps, done = Path(), 0, 0
    for words in commands(page):
        line = shlex.join(words).replace("pz/my_module:MyEnv", "pz/meeting:Meeting")
        line = line.replace("my_module:MyEnv", "corridor:Corridor")
        last = max(folder.glob("checkpoint-*.pt"), default=folder / "checkpoint.pt")
        line = line.replace("'$RUN/checkpoint-STEP.pt'", str(last)).replace("$RUN", str(folder)).replace("'", "")
        words = shlex.split(line)
        script, flags = script_of(words)
        if "--capture-video" in flags:
            need("moviepy")
        if script:
            module = importlib.import_module(f"cleanmarl.{script}")
            args = parse(module.Args, small(script, flags, steps if "--resume" in flags else 0), script)
            folder = module.main(args)
            steps = args.total_timesteps
        elif words[:3] == ["python", "-m", "cleanmarl.enjoy"]:
            words = [word for word in words if word != "--render"]  # which asks for a display
            assert enjoy.main(tyro.cli(enjoy.Args, args=[*words[3:], "--episodes", "1"]))
        else:
            continue
        done += 1
    assert done >= 3
    capsys.readouterr()


TRAINED = [page for page in PAGES if page.startswith("docs/algorithms/") and Path(page).stem not in UNFIT]


@pytest.mark.parametrize("page", TRAINED, ids=lambda page: Path(page).stem)
def test_first_command_of_a_page_trains(page, tmp_path, monkeypatch):
    """Two rollouts of it, and an episode of evaluation."""
    monkeypatch.chdir(tmp_path)
    script, flags = script_of(next(commands(page)))
    assert script == Path(page).stem
    module = importlib.import_module(f"cleanmarl.{script}")
    if "HalfCheetah-v5" in flags:
        need("mujoco")
    args = parse(module.Args, small(script, flags), script)
    assert (module.main(args) / "checkpoint.pt").exists()


def test_blocks_of_python():
    """Each is run, here or by the test that is named."""
    run = 0
    for page in PAGES:
        if page in ("docs/own_environment.md", "docs/load.md"):
            continue
        for text in blocks(page, "python"):
            if not any(start in text for start in PYTHON_ELSEWHERE):
                exec(text, {})
                run += 1
    assert run >= 1


def test_curves_as_a_table(tmp_path):
    need("pandas")
    (code,) = (text for text in blocks("docs/howto.md", "python") if "import pandas" in text)
    folder = ppo.main(ppo.Args(total_timesteps=1024, num_envs=2, eval_episodes=0, runs_dir=str(tmp_path)))
    there: dict = {}
    exec(code.replace("RUN_DIR", str(folder)), there)
    assert [*there["curve"]] == ["wall_time", "step", "value"] and len(there["curve"]) == 4


def test_a_histogram_of_ones_own(tmp_path):
    (code,) = (text for text in blocks("docs/howto.md", "python") if "SummaryWriter(run.folder)" in text)
    exec(code, {"run": SimpleNamespace(folder=tmp_path, step=3), "agent": torch.nn.Linear(2, 2)})
    (event,) = EventAccumulator(str(tmp_path)).Reload().Histograms("own/weights")
    assert event.step == 3 and event.histogram_value.num == 4


def test_overcooked(tmp_path, monkeypatch):
    """The class of the page is an environment for many agents, whose episodes end by their time alone."""
    need("jaxmarl")
    (code,) = (text for text in blocks("docs/environments.md", "python") if text.startswith("# overcooked.py"))
    (tmp_path / "overcooked.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    envs = make("pz/overcooked:Overcooked?layout=coord_ring&max_steps=5", 2, discrete=True, num_workers=0)
    obs, _ = envs.reset(seed=1)
    assert obs.shape[:2] == (2, 2) and envs.team_reward and [*envs.action_sizes] == [6, 6]
    assert envs.time_limit == 5
    ends = [envs.step(np.full((2, 2), step % 6))[2:4] for step in range(10)]
    assert not any(termination.any() for termination, _ in ends)
    assert [truncation.all() for _, truncation in ends] == [step % 5 == 4 for step in range(10)]
