"""Measure what more agents cost PPO, and what more actors give IMPALA.

    python benchmark/scaling.py agents
    python benchmark/scaling.py actors

`agents`: CPU time of an environment step of simple_spread with 3 to 30 agents, training included, of ippo.py and
mappo.py; start-up cancels out as in benchmark/speed.py. `actors`: steps per second of impala.py on CartPole with 0 to 4
actors, the share of time in which the learner waits, and the lag in gradient steps. These rates are by wall clock, so
they need cores that do nothing else. Both write docs/results/data/, of which benchmark/redraw.py makes the figures.
"""

import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cleanmarl.cli import PositiveInt, UsageError, check, check_ranges

import numpy as np
import pandas as pd
import speed
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

DATA = speed.ROOT / "docs" / "results" / "data"
NUM_AGENTS, NUM_ACTORS = (3, 6, 12, 30), (0, 1, 2, 4)
MPE = (
    "python cleanmarl/{script}.py --env-id mpe/simple_spread_v3?N={agents} --total-timesteps {{steps}} --seed {{seed}}"
)
MPE += " --runs-dir {{tmp}} --eval-episodes 0"
CARTPOLE = "python cleanmarl/impala.py --num-actors {actors} --updates-per-collect 1 --total-timesteps {{steps}}"
CARTPOLE += " --seed {{seed}} --runs-dir {{tmp}} --eval-episodes 0"


@dataclass
class Args:
    what: tyro.conf.Positional[Literal["agents", "actors"]]
    """what there are more and more of"""
    steps: PositiveInt | None = None
    """environment steps of a run, whole rollouts, as is a quarter (default: 25,600 with agents, 160,000 with actors)"""
    repeats: PositiveInt = 3
    """runs of each, with seeds from 1 on"""
    out: Path = DATA
    """folder of the table"""


def agents(steps: int, repeats: int) -> pd.DataFrame:
    """A row for each script, number of agents and repeat: microseconds of CPU time per environment step."""
    rows = []
    for seed in range(1, repeats + 1):
        for number in NUM_AGENTS:
            for script in ("ippo", "mappo"):
                of_step = microseconds(MPE.format(script=script, agents=number), steps, seed)
                rows.append({"script": script, "agents": number, "seed": seed, "microseconds": of_step})
                print(rows[-1], file=sys.stderr)
    return pd.DataFrame(rows)


def microseconds(command: str, steps: int, seed: int) -> float:
    """CPU time of a step: what a run takes longer than one of a quarter of its steps."""
    return round(1e6 / speed.measure(command, steps, 0.25, seed)["CPU-second"], 1)


def actors(steps: int, repeats: int) -> pd.DataFrame:
    """A row for each number of actors and repeat, of the last three quarters of a run."""
    rows = []
    for seed in range(1, repeats + 1):
        for number in NUM_ACTORS:
            with tempfile.TemporaryDirectory() as tmp:
                speed.run(speed.to_argv(CARTPOLE.format(actors=number), steps=steps, seed=seed, tmp=tmp))
                rows.append({"actors": number, "seed": seed} | pace(next(Path(tmp).glob("*/args.json")).parent))
            print(rows[-1], file=sys.stderr)
    return pd.DataFrame(rows)


def pace(run: Path) -> dict[str, float]:
    """Of the last three quarters of a run: steps per second, the share of waiting, mean and largest lag."""
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    names = "train/policy_lag", "time/learner_wait", "time/SPS"
    step = np.array([point.step for point in events.Scalars(names[0])])
    lag, wait, rate = (np.array([point.value for point in events.Scalars(name)]) for name in names)
    seconds, late = step / rate, step >= step[-1] / 4  # both shares are of the time since the beginning
    taken = np.ptp(seconds[late])
    check(taken > 0, f"{step[-1]:,} steps are too few to measure: raise --steps")
    return {
        "steps_per_second": round(np.ptp(step[late]) / taken),
        "learner_waits": round(np.ptp((wait * seconds)[late]) / taken, 3),
        "mean_lag": round(float(lag[late].mean()), 2),
        "largest_lag": int(lag[late].max()),
    }


def main(args: Args) -> None:
    check_ranges(args)
    args.out.mkdir(parents=True, exist_ok=True)  # before hours of measurements
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, _frame: sys.exit(128 + signum))  # so that `speed.run` ends its child
    if args.what == "agents":
        steps = args.steps or 25_600
        name, table = "mappo_agents", agents(steps, args.repeats)
    else:
        steps = args.steps or 160_000
        name, table = "impala_speed", actors(steps, args.repeats)
    table["steps"] = steps
    table["machine"] = "{cpu}, {cores} cores, Python {python}, torch {torch}".format(**speed.machine())
    table.to_csv(args.out / f"{name}.csv", index=False)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except UsageError as error:
        print(f"scaling: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # a folder that cannot be written
        sys.exit(f"scaling: {error}")
