"""`python -m cleanmarl`: it finds every script, runs it as by path, and ends a mistake with one line."""

import os
import subprocess
import sys
from pathlib import Path

from cleanmarl.__main__ import scripts

import pytest

ROOT = Path(__file__).parent.parent


def cleanmarl(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "cleanmarl", *argv], capture_output=True, text=True, cwd=ROOT)


def test_the_scripts_are_those_that_can_be_launched():
    launched = {path.stem for path in (ROOT / "cleanmarl").glob("*.py") if "launch(main, Args)" in path.read_text()}
    assert set(scripts()) == launched - {"cli"}
    lines = cleanmarl("list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == sorted(launched - {"cli"})
    assert any(line.startswith("mappo ") and "Multi-agent PPO (MAPPO)" in line for line in lines)


def test_train_and_enjoy_are_the_script_and_its_player(tmp_path):
    flags = ["--env-id", "matrix/penalty", "--total-timesteps", "6400", "--eval-episodes", "2", "--seed", "3"]
    done = cleanmarl("train", "ippo", *flags, "--runs-dir", str(tmp_path))
    assert done.returncode == 0 and "evaluation: return" in done.stdout, done.stderr
    [folder] = tmp_path.iterdir()
    assert folder.name.startswith("matrix-penalty__ippo__3__")
    played = cleanmarl("enjoy", str(folder), "--episodes", "2")
    assert played.returncode == 0 and "ippo at step 6,400, 2 episodes" in played.stdout
    reported = cleanmarl("report", str(folder), "--out", str(tmp_path / "report" / "penalty"))
    assert reported.returncode == 0 and "| matrix/penalty | ippo |" in reported.stdout, reported.stderr
    assert (tmp_path / "report" / "penalty.svg").exists()


def test_report_without_the_repository(tmp_path):
    package = tmp_path / "cleanmarl"
    package.mkdir()
    for name in ("__init__.py", "__main__.py"):
        (package / name).write_text((ROOT / "cleanmarl" / name).read_text() if name == "__main__.py" else "")
    command = [sys.executable, "-m", "cleanmarl", "report", "runs"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "report is benchmark/report.py of the repository" in result.stderr


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        (["train"], "train needs a script"),
        (["train", "mapo"], "did you mean mappo?"),
        (["train", "../setup"], "there is no script ../setup"),
        (["train", "cli"], "there is no script cli"),
        (["mappo"], "there is no command mappo: list, train, enjoy or report; did you mean `train mappo`?"),
        (["learn"], "there is no command learn: list, train, enjoy or report\n"),
        (["trian", "mappo"], "there is no command trian: list, train, enjoy or report; did you mean `train`?"),
        (["train", "ippo", "--gamma", "2"], "ippo: --gamma must be in [0, 1], not 2"),
    ],
)
def test_a_mistake_is_one_line(argv, fragment):
    result = cleanmarl(*argv)
    assert result.returncode == 2 and result.stdout == ""
    assert fragment in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_seen_enough_is_no_error(unbuffered):
    """The pipe is closed before anything is written, which is what `| head -1` does to the rest."""
    command = [sys.executable, "-m", "cleanmarl", "list"]
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    listing = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env)
    listing.stdout.close()
    assert listing.stderr.read() == "" and listing.wait() == 0
    listing.stderr.close()


def test_a_terminal_that_has_not_all_letters_gets_the_list(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    result = cleanmarl("list")
    assert result.returncode == 0 and "Onta\\xf1" in result.stdout and "vdn_lstm" in result.stdout


@pytest.mark.parametrize("command", ["-m cleanmarl list", "-m cleanmarl.ppo --help"])
def test_a_full_disk_is_no_error_of_the_front(command):
    with Path("/dev/full").open("w") as full:
        line = [sys.executable, *command.split()]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_help():
    for argv in ([], ["--help"]):
        assert "cleanmarl train SCRIPT" in cleanmarl(*argv).stdout
