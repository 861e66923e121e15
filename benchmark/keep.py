"""Keep what a run has learned, small enough to be given away: its networks and arguments, and the scores it has.

    python benchmark/keep.py RUN_DIR --out benchmark/agents/simple_spread
    python -m cleanmarl.enjoy benchmark/agents/simple_spread

Plays the episodes of the table in the README of the folder above, which is written anew.
"""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cleanmarl.checkpoint import load_checkpoint, write_checkpoint
from cleanmarl.cli import PositiveInt, RunError, UsageError, check, check_ranges, read_run
from cleanmarl.enjoy import Policy
from cleanmarl.envs import EnvError, WorkerError
from cleanmarl.evaluate import evaluate

import tyro

ROOT = Path(__file__).resolve().parent.parent
KEPT = ("script", "versions", "git_commit")  # of args.json, besides the arguments
OF_ONE_MACHINE = {"runs_dir": "runs", "resume": None, "device": "cpu"}
README = """# Trained agents

What `python -m cleanmarl.enjoy benchmark/agents/NAME` plays, and `cleanmarl.load` loads: networks, no optimizer,
so that they can be played, but not trained on. Return of the episodes, mean ± standard deviation, with sampled
and with the most probable actions. `python benchmark/keep.py RUN_DIR --out benchmark/agents/NAME` adds one and writes
this table.

| agent | environment | script | steps | episodes | sampled | most probable |
|---|---|---|---:|---:|---:|---:|
{rows}"""


@dataclass
class Args:
    run_dir: Annotated[Path, tyro.conf.Positional]
    """run folder of any script"""
    out: Path
    """folder of the agent"""
    checkpoint: str = "checkpoint.pt"
    """which of the run's checkpoints"""
    episodes: PositiveInt = 500
    """episodes for each of the two scores"""


def score(folder: Path, greedy: bool, episodes: int) -> tuple[float, float]:
    """Mean and standard deviation of the return."""
    policy = Policy(folder, min(episodes, 20), greedy)
    metrics = evaluate(policy.envs, policy, episodes, seed=1)
    policy.envs.close()
    return metrics["eval/ep_reward"], metrics["eval/std_ep_reward"]


def keep(run: Path, checkpoint: str, out: Path, episodes: int) -> None:
    """Write args.json, checkpoint.pt and scores.json of the run into `out`; UsageError if they cannot be."""
    meta, state = read_run(run), load_checkpoint(run / checkpoint)
    args, script = meta["args"] | OF_ONE_MACHINE, run / f"{meta['script']}.py"
    written = {"args.json", "checkpoint.pt", "checkpoint.tmp", script.name, "__pycache__"}  # before it was interrupted
    is_agent = (out / "scores.json").exists() or (out.is_dir() and {path.name for path in out.iterdir()} <= written)
    check(is_agent or not out.exists(), f"--out {out} is there, and no agent")
    out.mkdir(parents=True, exist_ok=True)
    (out / "scores.json").unlink(missing_ok=True)  # of what was kept there before
    (out / "args.json").write_text(json.dumps({key: meta[key] for key in KEPT} | {"args": args}, indent=1) + "\n")
    ours = ROOT / "cleanmarl" / script.name
    if script.exists() and not (ours.exists() and ours.read_text() == script.read_text()):
        shutil.copy(script, out)  # an edited one plays by its own networks
    else:
        (out / script.name).unlink(missing_ok=True)  # of a run that was kept there before
    slim = {key: state[key] for key in ("format", "script", "step")} | {"modules": {"agent": state["modules"]["agent"]}}
    write_checkpoint(slim, out / "checkpoint.pt")
    kinds = {"sampled": False, "most probable": True}
    scores = {kind: score(out, greedy, episodes) for kind, greedy in kinds.items()}
    about = {"env_id": args["env_id"], "script": meta["script"], "step": state["step"], "episodes": episodes}
    (out / "scores.json").write_text(json.dumps(about | scores, indent=1) + "\n")


def table(folder: Path) -> str:
    """The README of a folder of agents."""
    rows = ""
    for path in sorted(folder.glob("*/scores.json")):
        try:
            x = json.loads(path.read_text())
            digits = 1 if abs(x["sampled"][0]) >= 10 else 2
            means = (f"{mean:.{digits}f} ± {std:.{digits}f}" for mean, std in (x["sampled"], x["most probable"]))
            cells = path.parent.name, f"`{x['env_id']}`", f"`{x['script']}`", f"{x['step']:,}", f"{x['episodes']:,}"
            rows += f"| {' | '.join([*cells, *means])} |\n"
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise UsageError(f"{path} is damaged ({error}): keep this agent again, or remove it") from error
    return README.format(rows=rows)


def main(args: Args) -> None:
    check_ranges(args)
    readme = args.out.parent / "README.md"
    is_ours = not readme.exists() or readme.read_text(encoding="utf-8").startswith(README.partition("\n")[0])
    check(is_ours, f"{readme} is there, and no table of agents: --out must be in a folder of agents")
    keep(args.run_dir, args.checkpoint, args.out, args.episodes)
    text = table(args.out.parent)
    readme.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except (UsageError, EnvError) as error:
        print(f"keep: {error}", file=sys.stderr)
        sys.exit(2)
    except (OSError, WorkerError, RunError) as error:  # a folder that cannot be written; an environment's NaN
        sys.exit(f"keep: {error}")
