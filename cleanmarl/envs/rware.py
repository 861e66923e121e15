"""Robot warehouse, `rware/<id>`: robots fetch the shelves that are requested to the goal and put them back.

`rware/rware-tiny-2ag-v2` and all other ids that the package rware registers: rware-{tiny, small, medium or large}-
{agents}ag[-easy or -hard]-v2, with 1 to 19 agents. `options` go to its constructor.

    observation     71 numbers: own column and row, carrying a shelf, direction one-hot (up, down, left, right), on a
                    highway; then for each of the 3x3 cells around (sensor_range 1), by rows: a robot there, its
                    direction one-hot, a shelf there, and whether it is requested
    action          0 none, 1 forward, 2 turn left, 3 turn right, 4 load or unload; all legal: what is blocked fails
    state           the observations of all robots one after another
    reward          1 for the robot that delivers a requested shelf; there is no other
    episode end     truncation after 500 steps (option max_steps); nothing terminates an episode
    seeds           as in `pz`

Several environments to a worker process, as in `pz`. Source: Papoudakis et al. 2021, "Benchmarking multi-agent deep
reinforcement learning algorithms in cooperative tasks" (https://arxiv.org/abs/2006.07869), whose code, EPyMARL, adds up
the rewards of all agents: compare its returns with the sum over agents.
"""

import importlib

from cleanmarl.envs import draw, pz, unknown_name
from cleanmarl.envs.lbf import construct, need

import gymnasium as gym
import numpy as np

REPORTED = ("rware-tiny-2ag-v2", "rware-tiny-4ag-v2", "rware-small-4ag-v2")  # in the paper above; there as v1


def known_names() -> list[str]:
    """Those of the paper, then all others that the package registers."""
    need("rware", "rware")
    return [*dict.fromkeys((*REPORTED, *(name for name in gym.registry if name.startswith("rware-"))))]


def make(name: str, num_envs: int = 1, num_workers: int | None = None, **options) -> pz.PettingZooVectorEnv:
    """`num_envs` copies of `rware/<name>` in `num_workers` processes (default: one per core; 0: in this process).

    Raises EnvError with one line for an unknown name, the missing package, or options that it does not take.
    """
    return pz.make_in_workers("rware", name, parallel_env, num_envs, num_workers, options)


def parallel_env(task: str, **options) -> "Warehouse":
    need("rware", "rware")
    if task not in gym.registry or not task.startswith("rware-"):
        raise unknown_name(f"rware/{task}", known_names())
    return Warehouse(construct(task, options))


class Warehouse:
    """The package's environment, with a tuple of everything, as a PettingZoo parallel environment.

    It reports the end of an episode by one flag, and there is no end but the time limit.
    """

    def __init__(self, env):
        self.env = env
        team_reward = env.reward_type == importlib.import_module("rware").RewardType.GLOBAL
        self.metadata = {"team_reward": team_reward, "may_die": False}
        self.possible_agents = [f"agent_{a}" for a in range(len(env.action_space))]
        self.observation_spaces = dict(zip(self.possible_agents, env.observation_space))
        self.action_spaces = dict(zip(self.possible_agents, env.action_space))

    def observation_space(self, agent: str) -> gym.Space:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> gym.Space:
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict | None = None):
        self.agents = self.possible_agents
        return self.each(self.env.reset(seed=seed)[0]), {}

    def step(self, actions: dict):
        obs, reward, terminated, truncated, _ = self.env.step([actions[agent] for agent in self.agents])
        done = terminated or truncated
        flags = (dict.fromkeys(self.agents, flag) for flag in (False, done))
        result = self.each(obs), self.each(reward), *flags, {}
        if done:
            self.agents = []
        return result

    def each(self, values) -> dict:
        return dict(zip(self.possible_agents, values))

    def render(self):
        is_own = self.env.render_mode == "human"  # a window of the package's
        return self.env.render() if is_own else picture(self.env)

    def close(self) -> None:
        self.env.close()


def picture(env, cell: int = 24) -> np.ndarray:
    """The warehouse (H, W, 3) uint8: goals dark, shelves blue (requested ones red), robots discs that point ahead."""
    rows, columns = env.grid_size
    frame = draw.canvas(rows * cell, columns * cell)
    for row, column in np.ndindex(rows, columns):
        draw.rectangle(frame, row * cell, column * cell, 1, cell, 0.85)
        draw.rectangle(frame, row * cell, column * cell, cell, 1, 0.85)
    for x, y in env.goals:
        draw.rectangle(frame, y * cell, x * cell, cell, cell, 0.35)
    for shelf in env.shelfs:
        color = (0.85, 0.35, 0.3) if shelf in env.request_queue else (0.45, 0.5, 0.8)
        draw.rectangle(frame, (shelf.y + 0.1) * cell, (shelf.x + 0.1) * cell, 0.8 * cell, 0.8 * cell, color)
    for robot, color in zip(env.agents, draw.hues(len(env.agents))):
        row, column = (robot.y + 0.5) * cell, (robot.x + 0.5) * cell
        draw.disc(frame, row, column, 0.36 * cell, (0, 0, 0) if robot.carrying_shelf else color)
        draw.disc(frame, row, column, 0.26 * cell, color)
        down, right = {"UP": (-1, 0), "DOWN": (1, 0), "LEFT": (0, -1), "RIGHT": (0, 1)}[robot.dir.name]
        draw.disc(frame, row + 0.3 * cell * down, column + 0.3 * cell * right, 0.12 * cell, (1, 1, 1))
    return draw.finished(frame)
