"""benchmark/defaults.py: a row of the table is a run that was watched, and what cannot be made is a line."""

import subprocess
import sys
from pathlib import Path

import pytest

DEFAULTS = Path(__file__).resolve().parent.parent / "benchmark" / "defaults.py"
PAGE = "A page.\n\n| script | environment | steps | approx_kl |\n|---|---|---:|---:|\n| `coma` | x | 1 | - |\n"


def cli(*argv) -> subprocess.CompletedProcess:
    argv = [sys.executable, str(DEFAULTS), *map(str, argv)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120)


def test_a_short_run_is_a_row_and_the_other_rows_stay(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    result = cli("--scripts", "coppo_matrix", "--total-timesteps", 6400, "--page", page)
    assert result.returncode == 0, result.stderr
    before, row, last = page.read_text().removesuffix("\n").rsplit("\n", 2)
    assert before + "\n" == PAGE.partition("| `coma`")[0] and last == "| `coma` | x | 1 | - |"
    script, environment, steps, approx_kl, *_, actor, critic, least = row.strip("| ").split(" | ")
    assert (script, environment, steps) == ("`coppo_matrix`", "mpe/simple_spread_v3", "6,400")
    assert 0 < float(approx_kl) < 1 and float(actor) > 0 and float(critic.replace(",", "")) > 0
    assert least.endswith(("(actor)", "(critic)"))


@pytest.mark.parametrize(
    "argv, status, message",
    [
        (["--scripts", "ppo", "nosuch"], 2, "--scripts nosuch: choose from ppo, "),
        (["--scripts", "ppo", "--page", "README.md"], 2, "README.md has no table of scripts"),
        (["--scripts", "ppo", "--page", "nosuch.md"], 1, "nosuch.md"),
    ],
)
def test_what_cannot_be_made_is_said_before_a_run(tmp_path, argv, status, message):
    (tmp_path / "README.md").write_text("A page without one.\n")
    argv = [tmp_path / arg if arg.endswith(".md") else arg for arg in argv]
    result = cli(*argv)
    assert result.returncode == status and message in result.stderr and result.stderr.count("\n") == 1, result.stderr
