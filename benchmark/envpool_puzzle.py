"""What the steps in which envpool resets, and games cut short, do to PPO and to the scores that CleanRL logs.

    python benchmark/envpool_puzzle.py

Plays Breakout at random on envpool as it is: the step after an end only resets, whatever the action. Prints how many
such rows a rollout holds, how far they change the advantages of the others, and the scores that the bookkeeping of
CleanRL's ppo_atari_envpool.py logs beside those of the games. docs/algorithms/ppo_atari_envpool.md says what follows.
"""

import math
import sys
from dataclasses import dataclass

from cleanmarl.cli import PositiveInt, UsageError, check, check_ranges
from cleanmarl.ppo_atari_envpool import gae

import envpool
import numpy as np
import tyro


@dataclass
class Args:
    num_envs: PositiveInt = 8
    """environments side by side"""
    num_steps: PositiveInt = 1500
    """steps of each environment"""
    max_episode_steps: PositiveInt = 200
    """steps after which a game is cut short; envpool's default of 27,000 would take too long to see"""


def play(args: Args) -> dict[str, np.ndarray]:
    """Arrays (T, N) of a random player, and (T + 1, N) for `value`, some fixed function of what is seen."""
    options = {"episodic_life": True, "reward_clip": True, "max_episode_steps": args.max_episode_steps}
    envs = envpool.make("Breakout-v5", "gymnasium", num_envs=args.num_envs, num_threads=1, seed=1, **options)
    rng, rows = np.random.default_rng(1), []
    obs, info = envs.reset()
    done = np.zeros(args.num_envs, bool)
    for _ in range(args.num_steps):
        value, resets = value_of(obs, info), done
        obs, reward, termination, truncation, info = envs.step(rng.integers(4, size=args.num_envs))
        done = termination | truncation
        over = info["terminated"].astype(bool)
        rows.append((value, reward, info["reward"], done, resets, truncation, over, info["lives"]))
    names = ["value", "reward", "score", "done", "resets", "truncation", "over", "lives"]
    played = dict(zip(names, map(np.array, zip(*rows))))
    played["value"] = np.concatenate([played["value"], value_of(obs, info)[None]])
    return played


def value_of(obs: np.ndarray, info: dict) -> np.ndarray:
    """Some value function (N,): what is said here holds for any."""
    return obs[:, -1, ::4, ::4].mean((1, 2)) / 10 + info["lives"]


def change_of_advantages(played: dict[str, np.ndarray]) -> tuple[float, float, float]:
    """Largest change that leaving out the resets makes to the advantages of the other rows; mean and deviation of all
    advantages less those of the others, in units of that deviation."""
    value, done = played["value"], played["done"]
    with_resets = gae(played["reward"], value[:-1], value[-1], done, 0.99, 0.95)
    largest, chosen = 0.0, ~played["resets"]
    for n, rows in enumerate(chosen.T):
        without = gae(played["reward"][rows, n], value[:-1][rows, n], value[-1, n], done[rows, n], 0.99, 0.95)
        largest = max(largest, np.abs(without - with_resets[rows, n]).max())
    others = with_resets[chosen]
    return largest, (with_resets.mean() - others.mean()) / others.std(), with_resets.std() / others.std() - 1


def cleanrl_scores(played: dict[str, np.ndarray]) -> list[float]:
    """What CleanRL logs: sums of the raw reward, set to 0 at game over, logged where done and no life is left."""
    sums, logged = np.zeros(played["score"].shape[1]), []
    for score, done, over, lives in zip(played["score"], played["done"], played["over"], played["lives"]):
        sums += score
        logged += sums[done & (lives == 0)].tolist()
        sums *= ~over
    return logged


def true_scores(played: dict[str, np.ndarray]) -> list[float]:
    """The score of each game, which game over or the time limit ends."""
    sums, scores = np.zeros(played["score"].shape[1]), []
    for score, end in zip(played["score"], played["over"] | played["truncation"]):
        sums += score
        scores += sums[end].tolist()
        sums[end] = 0
    return scores


def main(args: Args) -> None:
    check_ranges(args)
    played = play(args)
    true, logged = true_scores(played), cleanrl_scores(played)
    check(bool(true and logged), "too few games ended: raise --num-steps")
    print(f"{played['resets'].mean():.2%} of {played['resets'].size} rows only reset")
    largest, mean, deviation = change_of_advantages(played)
    print(f"without them the advantages of the others change by at most {largest:.1e};")
    print(f"they shift the mean of all by {mean:+.3f} deviations, and the deviation by {deviation:+.1%}")
    cut = played["truncation"].sum()
    print(f"{len(true)} games, {cut} of them cut short after {args.max_episode_steps} steps: mean {np.mean(true):.2f}")
    print(f"{len(logged)} scores logged as CleanRL does: mean {np.mean(logged):.2f}")
    mean, deviation = 211.24, 151.84  # published: mean and deviation of three seeds
    for name, total in (("whole", 3), ("sample", 2)):  # the deviation's divisor, 3 or 2
        gap = deviation * math.sqrt(total / 6)  # two equal seeds and one apart are the least spread
        print(f"{mean} ± {deviation} ({name}): a seed below {mean - gap:.0f} and a seed above {mean + gap:.0f}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except UsageError as error:
        print(f"envpool_puzzle: {error}", file=sys.stderr)
        sys.exit(2)
