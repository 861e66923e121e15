"""Let the two sides of a game, learned in different runs, play against each other: which side has learned more?

    python benchmark/cross_play.py runs/mappo_simple_tag_v3 runs/maddpg_multienvs_simple_tag_v3 --side 0 1 2 \\
        --names predators prey --out docs/results/mappo_tag_cross_play

Where both sides learn, a curve shows what is left between them, and not how good they are. Here every run's one side
meets the other side of every run with another seed: nobody plays against those it has learned with. Episodes are
played with the most probable actions. Writes out.svg, out.md and data/out.csv.
"""

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cleanmarl.cli import NonNegativeInt, PositiveInt, RunError, UsageError, check, check_ranges, read_run
from cleanmarl.enjoy import Policy
from cleanmarl.envs import EnvError, MultiAgentVectorEnv, WorkerError
from cleanmarl.evaluate import evaluate

import numpy as np
import pandas as pd
import redraw
import report
import torch
import tyro

RANDOM = "at random"


@dataclass
class Args:
    runs: Annotated[list[Path], tyro.conf.Positional]
    """folders that hold run folders, all of one environment"""
    side: list[int]
    """the agents of the one side, by their numbers; all others are the other side"""
    names: tuple[str, str]
    """what the two sides are called"""
    out: Path
    """docs/results/NAME of the figure and its table"""
    episodes: PositiveInt = 256
    """episodes of each pair of runs, the same for all pairs"""
    seed: NonNegativeInt = 1
    """seed of the episodes"""


def at_random(obs: np.ndarray, info: dict, done: np.ndarray) -> np.ndarray:
    """Legal actions (N, A), each as likely as the others."""
    return np.where(info["action_mask"], torch.rand(info["action_mask"].shape).numpy(), -1).argmax(-1)


def together(one: Callable, other: Callable, of_one: np.ndarray) -> Callable:
    """A policy in which the agents of the mask of_one (A,) act by `one`, and the rest by `other`."""
    return lambda *now: np.where(of_one, one(*now), other(*now))


def cross_play(policies: dict[str, list], envs: MultiAgentVectorEnv, args: Args) -> pd.DataFrame:
    """A row for each pair of names: the return of an agent of each side, mean and deviation over the pairs of runs."""
    of_one, rows = np.isin(np.arange(len(envs.real_actions)), args.side), []
    for names in itertools.product(policies, repeat=2):
        returns = []
        for one, other in itertools.product(*(policies[name] for name in names)):
            if at_random in (one, other) or one.args.seed != other.args.seed:
                metrics = evaluate(envs, together(one, other, of_one), args.episodes, args.seed)
                by_agent = np.array([metrics[f"eval/ep_reward_agent_{i}"] for i in range(len(of_one))])
                returns.append([by_agent[of_one].mean(), by_agent[~of_one].mean()])
        check(len(returns) > 0, f"{names[0]} has one seed, and nobody else to play against")
        (one_mean, other_mean), (one_std, other_std) = np.mean(returns, axis=0), np.std(returns, axis=0)
        row = dict(zip(args.names, names)) | {"pairs": len(returns), "episodes": args.episodes}
        row |= {"return": one_mean, "std": one_std, "other return": other_mean, "other std": other_std}
        rows.append(row)
    return pd.DataFrame(rows)


def load(folders: list[Path], num_envs: int) -> dict[str, list[Policy]]:
    """What the runs have learned, by script; UsageError if they cannot play together."""
    policies, seeds, of_name = {}, set(), {}
    env_ids = sorted({read_run(folder)["args"].get("env_id") for folder in folders})
    check(len(env_ids) == 1, f"the runs are of {len(env_ids)} environments: {', '.join(env_ids)}")
    for folder in folders:
        policy = Policy(folder, num_envs, greedy=True)
        name = Path(str(policy.script.__file__)).stem
        check((name, policy.args.seed) not in seeds, f"there are two runs of {name} with seed {policy.args.seed}")
        seeds.add((name, policy.args.seed))
        settings = report.settings_of(read_run(folder), folder)
        check(of_name.setdefault(name, settings) == settings, f"the runs of {name} have different settings")
        policies.setdefault(name, []).append(policy)
    return policies


def main(args: Args) -> None:
    check_ranges(args)
    check(args.names[0] != args.names[1], f"--names {args.names[0]} {args.names[1]} are the same")
    taken = {"env_id", "pairs", "episodes", "return", "std", "other return", "other std"} & set(args.names)
    check(not taken, f"--names {' '.join(args.names)}: the table has a column {', '.join(taken)} already")
    check(bool(args.out.name), f"--out {args.out} has no name for the figure: give FOLDER/NAME")
    folders = sorted(path.parent for runs in args.runs for path in runs.glob("*/done.json"))
    check(len(folders) > 0, f"no finished run in {' '.join(map(str, args.runs))}")
    policies = load(folders, min(args.episodes, 256))
    first = next(iter(policies.values()))[0]
    envs, env_id = first.envs, first.args.env_id
    is_game = isinstance(envs, MultiAgentVectorEnv) and not envs.continuous
    check(is_game, f"{env_id} is no game of several agents with discrete actions")
    agents = set(range(len(envs.real_actions)))
    check(
        set() < set(args.side) < agents, f"--side {args.side} must be some, not all, of the agents 0 to {max(agents)}"
    )

    rows = cross_play(policies | {RANDOM: [at_random]}, envs, args)
    rows.insert(0, "env_id", env_id)
    path = args.out.parent / "data" / f"{args.out.name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows.to_csv(path, index=False, float_format="%.3f")
    redraw.cross_play(args.out)
    print(Path(f"{args.out}.md").read_text())


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except (UsageError, EnvError) as error:
        print(f"cross_play: {error}", file=sys.stderr)
        sys.exit(2)
    except (OSError, WorkerError, RunError) as error:  # a folder that cannot be written; an environment's NaN
        sys.exit(f"cross_play: {error}")
