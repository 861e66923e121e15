"""Level-based foraging, `lbf/<id>`: agents gather food that only enough of them together can lift.

`lbf/Foraging-8x8-2p-2f-coop-v3`: the ids of the package lbforaging, Foraging[-2s]-{size}x{size}-{agents}p-{foods}f
[-coop]-v3 with a size from 5 to 19 and 2 to 9 agents. With -2s agents see two cells far; with -coop the level of every
food is that of all agents together (of more than three, the three lowest). `options` go to its constructor. The package
has ids of up to 4 foods; for more, such as the 15x15 tasks with 5f of the paper below, its 4f task gets max_num_food.

    observation     row, column, level of every food, then of oneself, then of the other agents; -1, -1, 0 for what is
                    not there or out of sight; with -2s rows and columns count from the corner of what one sees
    action          0 none, 1 north, 2 south, 3 west, 4 east, 5 load; all legal: what cannot be done counts as none
    state           the observations of all agents one after another
    reward          an agent's own share of the food it helped to load; the shares of an episode add up to at most 1
    episode end     termination when all food is gone, truncation after 50 steps (option max_episode_steps)
    seeds           as in `pz`; an episode starts as in a freshly made environment: the package keeps new players away
                    from where players stood at the end of the last episode, so a start would depend on the past

Several environments to a worker process, as in `pz`. Source: Papoudakis et al. 2021, "Benchmarking multi-agent deep
reinforcement learning algorithms in cooperative tasks" (https://arxiv.org/abs/2006.07869), whose code, EPyMARL, adds up
the rewards of all agents: compare its returns with the sum over agents.
"""

import importlib
import re
from collections.abc import Callable
from typing import Any

from cleanmarl.envs import EnvError, draw, pz, unknown_name

import gymnasium as gym
import numpy as np

REPORTED = (  # in the paper above; there with other versions
    "Foraging-8x8-2p-2f-coop-v3",
    "Foraging-2s-8x8-2p-2f-coop-v3",
    "Foraging-10x10-3p-3f-v3",
    "Foraging-2s-10x10-3p-3f-v3",
    "Foraging-15x15-3p-5f-v3",
    "Foraging-15x15-4p-3f-v3",
    "Foraging-15x15-4p-5f-v3",
)


def known_names() -> list[str]:
    """Those of the paper, then all others that the package registers."""
    need("lbf", "lbforaging")
    return [*dict.fromkeys((*REPORTED, *(name for name in gym.registry if name.startswith("Foraging-"))))]


def make(name: str, num_envs: int = 1, num_workers: int | None = None, **options) -> pz.PettingZooVectorEnv:
    """`num_envs` copies of `lbf/<name>` in `num_workers` processes (default: one per core; 0: in this process).

    Raises EnvError with one line for an unknown name, the missing package, or options that it does not take.
    """
    return make_in_workers("lbf", name, parallel_env, num_envs, num_workers, options)


def parallel_env(task: str, **options) -> "TupleEnv":
    need("lbf", "lbforaging")
    parts = re.fullmatch(r"(Foraging(?:-2s)?-\d+x\d+-\d+p)-(\d+)f((?:-coop)?-v3)", task)
    if parts and int(parts[2]) > 4:  # an id of the package, but for the number of foods
        sibling, options = f"{parts[1]}-4f{parts[3]}", {"max_num_food": int(parts[2]), **options}
    else:
        sibling = task
    if sibling not in gym.registry or not task.startswith("Foraging"):
        raise unknown_name(f"lbf/{task}", known_names())
    env = construct(sibling, options)
    return TupleEnv(env, before_reset=forget_players, finished=lambda: not env.field.any(), picture=picture)


def picture(env, cell: int = 40) -> np.ndarray:
    """The field (H, W, 3) uint8: food as green squares, players as discs, with their levels on them."""
    rows, columns = env.field.shape
    frame = draw.canvas(rows * cell, columns * cell)
    for row, column in np.ndindex(rows, columns):
        draw.rectangle(frame, row * cell, column * cell, 1, cell, 0.8)
        draw.rectangle(frame, row * cell, column * cell, cell, 1, 0.8)
        if level := env.field[row, column]:
            draw.rectangle(frame, (row + 0.2) * cell, (column + 0.2) * cell, 0.6 * cell, 0.6 * cell, (0.3, 0.65, 0.3))
            draw.text(frame, (row + 0.5) * cell, (column + 0.5) * cell, str(level), (1, 1, 1), size=22)
    for player, color in zip(env.players, draw.hues(len(env.players))):
        row, column = (place * cell + cell / 2 for place in player.position)
        draw.disc(frame, row, column, 0.36 * cell, color)
        draw.text(frame, row, column, str(player.level), (1, 1, 1), size=22)
    return draw.finished(frame)


def forget_players(env) -> None:
    for player in env.players:
        player.position = None


# What robot warehouses share with this


class TupleEnv:
    """A Gymnasium environment with a tuple of spaces, observations and rewards, as a PettingZoo parallel environment.

    These environments report the end by one flag, at the time limit too: it is truncation unless `finished()`.
    `picture` draws one, since the packages' own drawing needs a display.
    """

    def __init__(
        self,
        env,
        before_reset: Callable,
        finished: Callable[[], bool],
        picture: Callable[[Any], np.ndarray] | None = None,
        team_reward: bool = False,
    ):
        self.env, self.before_reset, self.finished, self.picture = env, before_reset, finished, picture
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
        self.before_reset(self.env)
        return self.each(self.env.reset(seed=seed)[0]), {}

    def step(self, actions: dict):
        obs, reward, terminated, truncated, _ = self.env.step([actions[agent] for agent in self.agents])
        done = terminated or truncated
        termination = done and self.finished()
        flags = (dict.fromkeys(self.agents, flag) for flag in (termination, done and not termination))
        result = self.each(obs), self.each(reward), *flags, {}
        if done:
            self.agents = []
        return result

    def each(self, values) -> dict:
        return dict(zip(self.possible_agents, values))

    def render(self):
        is_own = self.picture is None or self.env.render_mode == "human"  # a window of the package's
        return self.env.render(mode=self.env.render_mode) if is_own else self.picture(self.env)

    def close(self) -> None:
        self.env.close()


def construct(name: str, options: dict):
    """The environment of a Gymnasium id, bare: gymnasium.make would keep the option max_episode_steps to itself."""
    spec: Any = gym.spec(name)
    return gym.envs.registration.load_env_creator(spec.entry_point)(**spec.kwargs | options)


def make_in_workers(
    family: str, name: str, build: Callable, num_envs: int, num_workers: int | None, options: dict
) -> pz.PettingZooVectorEnv:
    """Environments of `cleanmarl.envs.<family>.parallel_env`, here `build`, in the worker processes of `pz`."""
    try:  # here for its errors
        build(name, **{key: value for key, value in options.items() if key != "render_mode"}).close()
    except EnvError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise EnvError(f"{family}/{name} cannot be built with {options}: {type(error).__name__}: {reason}") from error
    envs = pz.make(f"cleanmarl.envs/{family}", num_envs, num_workers, task=name, **options)
    envs.env_id = f"{family}/{name}"
    for worker in envs.workers:
        worker.label = worker.label.replace(f"pz/cleanmarl.envs/{family}", envs.env_id)
    return envs


def need(family: str, package: str) -> None:
    """Import the package, which registers its ids. Raises EnvError with the line that installs it."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        how = f"python bootstrap.py multiagent, or pip install {package}"
        raise EnvError(f"{family}/... needs a package that is missing ({error}): {how}") from error
