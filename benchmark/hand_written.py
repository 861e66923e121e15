"""How good it can get on simple_speaker_listener and simple_spread: the returns of hand-written agents.

    python benchmark/hand_written.py

An agent plans its way to a goal: of all sequences of five actions, the one that keeps it nearest over eight steps of
mpe2's physics. It plans no further and avoids nobody, so the best return is a little higher. A listener that is not
told the goal goes to the middle of the three: what a pair can reach whose speaker says nothing. In simple_spread the
agents divide the landmarks among them at the start, such that their ways are shortest in all.
"""

import itertools
from dataclasses import dataclass

from cleanmarl.envs import make

import numpy as np
import tyro

ACTIONS = np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]]) * 5.0  # forces: nothing, left, right, down, up
DAMPING, DT = 0.75, 0.1
HORIZON, COASTING = 5, 3  # steps with an action of the plan, steps without any after them
PLANS = np.array(list(itertools.product(range(len(ACTIONS)), repeat=HORIZON)))  # (P, HORIZON)


@dataclass
class Args:
    num_episodes: int = 512
    """episodes of 25 steps, all at once"""
    seed: int = 1
    """seed of the environments"""


def plan(velocity: np.ndarray, way: np.ndarray) -> np.ndarray:
    """The first action (N,) of the best plan from velocity (N, 2), with `way` (N, 2) to go."""
    forces = ACTIONS[PLANS]  # (P, HORIZON, 2)
    velocity, way, cost = velocity[:, None], way[:, None], 0.0
    for t in range(HORIZON + COASTING):
        way = way - velocity * DT  # (N, P, 2): a force moves nothing before the next step
        velocity = velocity * DAMPING + (forces[:, t] * DT if t < HORIZON else 0)
        cost = cost + np.square(way).sum(-1)
    return PLANS[cost.argmin(1), 0]


def play(args: Args, told: bool) -> np.ndarray:
    """The team's returns (N,), of a listener that is told the goal or not."""
    envs = make("mpe/simple_speaker_listener_v4", args.num_episodes)
    obs, info = envs.reset(seed=args.seed)
    action = np.zeros((args.num_episodes, 2), int)  # the speaker says always the same
    done = np.zeros(args.num_episodes, bool)
    while not done.all():
        goal = obs[:, 0, :3].argmax(1)  # the speaker sees its colour, the listener where the landmarks are
        landmarks = obs[:, 1, 2:8].reshape(-1, 3, 2)
        way = landmarks[np.arange(len(obs)), goal] if told else landmarks.mean(1)
        action[:, 1] = plan(obs[:, 1, :2], way)
        obs, _, termination, truncation, info = envs.step(action)
        done = termination | truncation  # at the same step everywhere
    return info["episode"]["r"].sum(1)


def play_spread(args: Args) -> np.ndarray:
    """The team's returns (N,) on simple_spread, each agent on its way to a landmark of its own."""
    envs = make("mpe/simple_spread_v3", args.num_episodes)
    obs, info = envs.reset(seed=args.seed)
    divisions = np.array(list(itertools.permutations(range(3))))  # (6, A): which landmark each agent takes
    ways = obs[:, :, 4:10].reshape(-1, 3, 3, 2)  # (N, A, landmarks, 2)
    distance = np.linalg.norm(ways, axis=-1)
    goal = divisions[distance[:, np.arange(3), divisions].sum(-1).argmin(1)]  # (N, A)
    done = np.zeros(args.num_episodes, bool)
    while not done.all():
        ways = obs[:, :, 4:10].reshape(-1, 3, 3, 2)
        way = np.take_along_axis(ways, goal[:, :, None, None], axis=2)[:, :, 0]  # (N, A, 2)
        action = np.stack([plan(obs[:, i, :2], way[:, i]) for i in range(3)], axis=1)
        obs, _, termination, truncation, info = envs.step(action)
        done = termination | truncation  # at the same step everywhere
    return info["episode"]["r"].sum(1)


if __name__ == "__main__":
    args = tyro.cli(Args)
    scores = {"listener, told the goal": play(args, True), "listener, not told": play(args, False)}
    for name, returns in (scores | {"spread": play_spread(args)}).items():
        print(f"{name}: {returns.mean():.1f} +- {returns.std() / len(returns) ** 0.5:.1f} for the team")
