"""How good it can get in three particle environments and in the warehouse: returns of hand-written agents.

    python benchmark/hand_written.py    # the warehouse needs the package rware

An agent plans its way to a goal: of all sequences of five actions, the one that keeps it nearest over eight steps of
mpe2's physics; of continuous actions it has nine, pushes along both axes at once, and four in a sequence. It plans no
further and avoids nobody, so the best return is a little higher. A listener that is not told the goal goes to the
middle of the three: what a pair can reach whose speaker says nothing. So do both agents of simple_reference, who tell
each other where to go. In simple_spread the agents divide the landmarks among them at the start, such that their ways
are shortest in all.

A robot of the warehouse takes the shortest way to the nearest requested shelf that no other robot is after, from there
to the nearest goal, and to the nearest free place for the shelf. Where another robot stands is a wall for it; now and
then it waits, so that two do not dodge each other for ever.
"""

import itertools
import sys
from collections import deque
from dataclasses import dataclass

from cleanmarl.cli import NonNegativeInt, PositiveInt, UsageError, check_ranges
from cleanmarl.envs import make
from cleanmarl.envs.rware import FORWARD, LOAD, TURNS, WarehouseVectorEnv

import numpy as np
import tyro

ACTIONS = np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]]) * 5.0  # forces: nothing, left, right, down, up
DAMPING, DT = 0.75, 0.1
HORIZON, COASTING = 5, 3  # steps with an action of the plan, steps without any after them
PLANS = np.array(list(itertools.product(range(len(ACTIONS)), repeat=HORIZON)))  # (P, HORIZON)
PUSHES = np.array(list(itertools.product((-1.0, 0.0, 1.0), repeat=2)))  # continuous actions: right, up; both at once
PUSH_PLANS = np.array(list(itertools.product(range(len(PUSHES)), repeat=4)))  # shorter, since there are more

WAITING = 0.03  # share of a robot's steps


@dataclass
class Args:
    num_episodes: PositiveInt = 512
    """episodes of 25 steps, all at once"""
    num_warehouse_episodes: PositiveInt = 32
    """the same for the warehouse, episodes of 500 steps"""
    seed: NonNegativeInt = 1
    """seed of the environments"""


def plan(velocity: np.ndarray, way: np.ndarray, actions: np.ndarray = ACTIONS, plans: np.ndarray = PLANS) -> np.ndarray:
    """The first action (N,) of the best of the plans (P, T) from velocity (N, 2), with `way` (N, 2) to go."""
    forces, T = actions[plans], plans.shape[1]  # (P, T, 2)
    velocity, way, cost = velocity[:, None], way[:, None], 0.0
    for t in range(T + COASTING):
        way = way - velocity * DT  # (N, P, 2): a force moves nothing before the next step
        velocity = velocity * DAMPING + (forces[:, t] * DT if t < T else 0)
        cost = cost + np.square(way).sum(-1)
    return plans[cost.argmin(1), 0]


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


def play_reference(args: Args, told: bool) -> np.ndarray:
    """The team's returns (N,) on simple_reference, of agents that tell each other the goal or not."""
    envs = make("mpe/simple_reference_v3", args.num_episodes)
    obs, info = envs.reset(seed=args.seed)
    done = np.zeros(args.num_episodes, bool)
    while not done.all():
        landmarks = obs[:, :, 2:8].reshape(-1, 2, 3, 2)
        goal = obs[:, ::-1, 8:11].argmax(-1)  # (N, A): the colour of an agent's goal is what the other one sees
        to_goal = np.take_along_axis(landmarks, goal[:, :, None, None], axis=2)[:, :, 0]
        way = to_goal if told else landmarks.mean(2)  # (N, A, 2)
        action = np.stack([plan(obs[:, i, :2], way[:, i]) for i in range(2)], axis=1)  # and the word 0
        obs, _, termination, truncation, info = envs.step(action)
        done = termination | truncation  # at the same step everywhere
    return info["episode"]["r"].sum(1)


def play_spread(args: Args, continuous: bool = False) -> np.ndarray:
    """The team's returns (N,) on simple_spread, each agent on its way to a landmark of its own."""
    envs = make(f"mpe/simple_spread_v3?continuous_actions={continuous}", args.num_episodes)
    obs, info = envs.reset(seed=args.seed)
    divisions = np.array(list(itertools.permutations(range(3))))  # (6, A): which landmark each agent takes
    ways = obs[:, :, 4:10].reshape(-1, 3, 3, 2)  # (N, A, landmarks, 2)
    distance = np.linalg.norm(ways, axis=-1)
    goal = divisions[distance[:, np.arange(3), divisions].sum(-1).argmin(1)]  # (N, A)
    done = np.zeros(args.num_episodes, bool)
    while not done.all():
        ways = obs[:, :, 4:10].reshape(-1, 3, 3, 2)
        way = np.take_along_axis(ways, goal[:, :, None, None], axis=2)[:, :, 0]  # (N, A, 2)
        if continuous:
            push = np.stack([plan(obs[:, i, :2], way[:, i], 5 * PUSHES, PUSH_PLANS) for i in range(3)], axis=1)
            right, up = np.moveaxis(PUSHES[push], -1, 0)
            action = np.stack([0 * up, -right, right, -up, up], axis=-1).clip(0).astype(np.float32)
        else:
            action = np.stack([plan(obs[:, i, :2], way[:, i]) for i in range(3)], axis=1)
        obs, _, termination, truncation, info = envs.step(action)
        done = termination | truncation  # at the same step everywhere
    return info["episode"]["r"].sum(1)


def first_step(envs: WarehouseVectorEnv, n: int, a: int, targets: set[int], walls: np.ndarray) -> tuple[int, int]:
    """The first action of robot a's shortest way to one of the cells `targets`, and which; LOAD if it is there."""
    start = int(envs.cell[n, a]), int(envs.direction[n, a])
    ways, seen = deque([(*start, LOAD)]), {start}
    while ways:
        cell, direction, first = ways.popleft()
        if cell in targets:
            return first, cell
        for action in (FORWARD, 2, 3):
            after = cell + int(envs.ahead[direction]) if action == FORWARD else cell, int(TURNS[action, direction])
            if after not in seen and not walls[after[0]]:
                seen.add(after)
                ways.append((*after, action if first == LOAD else first))
    return 0, -1


def play_warehouse(args: Args, name: str) -> np.ndarray:
    """The team's returns (N,) in a warehouse."""
    envs = make(f"rware/{name}", args.num_warehouse_episodes)
    envs.reset(seed=args.seed)
    rng, done = np.random.default_rng(args.seed), np.zeros(args.num_warehouse_episodes, bool)
    while not done.all():
        action = np.zeros(envs.cell.shape, int)
        for n, shelf in enumerate(envs.shelf):
            requested = envs.requested[n, shelf]
            taken = set()  # by robots before
            for a, carried in enumerate(envs.carried[n]):
                walls = envs.wall.copy()
                walls[np.delete(envs.cell[n], a)] = True
                if carried:
                    walls |= (shelf > 0) & (shelf != carried)
                    free = np.flatnonzero(~envs.highway & ~envs.wall & np.isin(shelf, (0, carried)))
                    targets = set(envs.goals.tolist() if envs.requested[n, carried] else free.tolist())
                else:
                    held = np.isin(shelf, envs.carried[n, envs.carried[n] > 0])
                    targets = set(np.flatnonzero(requested & ~held).tolist()) - taken
                action[n, a], target = first_step(envs, n, a, targets, walls)
                taken.add(target)
                if rng.random() < WAITING:
                    action[n, a] = 0
        _, _, _, done, info = envs.step(action)  # at the same step everywhere
    return info["episode"]["r"].sum(1)


def main(args: Args) -> None:
    check_ranges(args)
    scores = {"listener, told the goal": play(args, True), "listener, not told": play(args, False)}
    scores |= {"reference, told": play_reference(args, True), "reference, not told": play_reference(args, False)}
    scores |= {"spread": play_spread(args), "spread, continuous actions": play_spread(args, continuous=True)}
    for name in ("rware-tiny-2ag-easy-v2", "rware-tiny-2ag-v2"):
        scores[name] = play_warehouse(args, name)
    for name, returns in scores.items():
        print(f"{name}: {returns.mean():.1f} +- {returns.std() / len(returns) ** 0.5:.1f} for the team")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except UsageError as error:
        print(f"hand_written: {error}", file=sys.stderr)
        sys.exit(2)
