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

The package draws how an episode starts; what follows are arrays of all environments, equal to the package's step for
step. Source: Papoudakis et al. 2021, "Benchmarking multi-agent deep reinforcement learning algorithms in cooperative
tasks" (https://arxiv.org/abs/2006.07869), whose code, EPyMARL, adds up the rewards of all agents: compare its returns
with the sum over agents.
"""

import re
from typing import ClassVar

from cleanmarl.envs import EnvError, building, draw, unknown_name
from cleanmarl.envs.batch import BatchedVectorEnv, construct, need

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


def make(name: str, num_envs: int = 1, **options) -> "ForagingVectorEnv":
    """`num_envs` copies of `lbf/<name>`.

    Raises EnvError with one line for an unknown name, the missing package, or options that it does not take.
    """
    with building(f"lbf/{name}", options):
        return ForagingVectorEnv(name, num_envs, **options)


def package_env(name: str, **options):
    """The package's environment. Raises EnvError for an unknown name, and whatever its constructor raises."""
    need("lbf", "lbforaging")
    parts = re.fullmatch(r"(Foraging(?:-2s)?-\d+x\d+-\d+p)-(\d+)f((?:-coop)?-v3)", name)
    if parts and int(parts[2]) > 4:  # an id of the package, but for the number of foods
        sibling, options = f"{parts[1]}-4f{parts[3]}", {"max_num_food": int(parts[2]), **options}
    else:
        sibling = name
    if sibling not in gym.registry or not name.startswith("Foraging"):
        raise unknown_name(f"lbf/{name}", known_names())
    game = construct(sibling, options)
    if game.rows != game.cols:
        bounds = "of others the package's bounds of observations are wrong"
        raise EnvError(f"lbf/{name}: field_size must be square, not {game.field_size}: {bounds}")
    return game


MOVES = np.array([(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1), (0, 0)])  # row and column of each action
LOAD = 5
NOTHING = np.array([-1, -1, 0])  # what is seen of food or players that are not there


class ForagingVectorEnv(BatchedVectorEnv):
    """N fields with A players and up to F foods; the module's docstring says what is seen, done and earned."""

    arrays: ClassVar = ("position", "level", "food", "food_level", "all_food")

    def __init__(self, name: str, num_envs: int, render_mode: str | None = None, **options):
        self.env_id, self.render_mode = f"lbf/{name}", render_mode
        self.game = game = package_env(name, **options)  # for the starts of episodes
        game.reset(seed=0)  # it looks at some options only now
        self.max_steps = self.time_limit = game._max_episode_steps
        A, F = game.n_agents, game.max_num_food
        self._set_up(num_envs, A, obs_size=game.observation_space[0].shape[0], num_actions=len(MOVES))

        self.position, self.level = np.zeros((num_envs, A, 2), np.int64), np.zeros((num_envs, A), np.int64)
        self.food, self.food_level = np.zeros((num_envs, F, 2), np.int64), np.zeros((num_envs, F), np.int64)  # 0: eaten
        self.all_food = np.zeros(num_envs, np.int64)  # the levels of all food that there was
        self.players = np.array([[a, *range(a), *range(a + 1, A)] for a in range(A)])  # as each lists them

    def _begin(self, n: int, seed: int) -> None:
        for player in self.game.players:
            player.position = None  # new ones need not keep away from them
        self.game.reset(seed=seed)
        self.position[n] = [player.position for player in self.game.players]
        self.level[n] = [player.level for player in self.game.players]
        where = np.argwhere(self.game.field)  # row by row, as agents list what they see
        self.food[n, : len(where)], self.food_level[n] = where, 0
        self.food_level[n, : len(where)] = self.game.field[tuple(where.T)]
        self.all_food[n] = self.food_level[n].sum()

    def _play(self, action: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self._move(action)
        reward = self._load(action)
        termination = (self.food_level == 0).all(1)
        return reward, termination, (length + 1 >= self.max_steps) & ~termination

    def _load(self, action: np.ndarray) -> np.ndarray:
        """Those who load and stand beside food that they can lift together earn and take it; rewards (N, A).

        No player stands beside two: the package never puts food so near to other food.
        """
        beside = np.abs(self.food[:, None] - self.position[:, :, None]).sum(-1) == 1  # (N, A, F)
        loads = beside & (self.food_level > 0)[:, None] & (action == LOAD)[..., None]
        strength = (loads * self.level[..., None]).sum(1)  # (N, F)
        taken = (strength >= self.food_level) & (self.food_level > 0)
        share = (self.level[..., None] * self.food_level[:, None]).astype(np.float64)  # (N, A, F)
        if self.game._normalize_reward:
            share /= (strength * self.all_food[:, None]).clip(1)[:, None]
        reward = np.where(loads, np.where(taken[:, None], share, -self.game.penalty), 0).sum(-1)
        self.food_level[taken] = 0
        return reward

    def _move(self, action: np.ndarray) -> None:
        """Players do not leave the field nor step on food, and of several who want to be in one cell nobody moves."""
        wanted = self.position + MOVES[action]
        outside = ((wanted < 0) | (wanted >= self.game.field_size)).any(-1)
        on_food = ((wanted[:, :, None] == self.food[:, None]).all(-1) & (self.food_level > 0)[:, None]).any(-1)
        wanted = np.where((outside | on_food)[..., None], self.position, wanted)
        alone = (wanted[:, :, None] == wanted[:, None]).all(-1).sum(-1) == 1
        self.position = np.where(alone[..., None], wanted, self.position)

    def _observe(self) -> np.ndarray:
        """Observations (N, A, D): food, then oneself, then the others, from the corner of what one sees."""
        sight, center = self.game.sight, self.position[:, :, None]  # (N, A, 1, 2)
        corner = (center - sight).clip(0)
        food = np.broadcast_to(self.food[:, None], (*self.position.shape[:2], *self.food.shape[1:]))  # (N, A, F, 2)
        near = (np.abs(food - center) <= sight).all(-1) & (self.food_level > 0)[:, None]
        foods = listed(food - corner, np.broadcast_to(self.food_level[:, None], near.shape), near)
        players = self.position[:, self.players] - corner  # (N, A, A, 2)
        near = ((players >= 0) & (players <= 2 * sight)).all(-1)
        players = listed(players, self.level[:, self.players], near)
        if not self.game._observe_agent_levels:
            players = players[..., :2]
        return np.concatenate([x.reshape(*center.shape[:2], -1) for x in (foods, players)], axis=-1, dtype=np.float32)

    def render(self):
        """Frame (height, width, 3) uint8 of environment 0; with render_mode="human" the package's window."""
        for player, position, level in zip(self.game.players, self.position[0], self.level[0]):
            player.position, player.level = tuple(position.tolist()), level
        self.game.field[:] = 0
        left = self.food_level[0] > 0
        self.game.field[tuple(self.food[0, left].T)] = self.food_level[0, left]
        return self.game.render() if self.render_mode == "human" else picture(self.game)

    def close_extras(self, **kwargs) -> None:
        self.game.close()


def listed(places: np.ndarray, levels: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """What is seen, in its order, then nothing: places (..., M, 2), levels (..., M), seen (..., M) -> (..., M, 3)."""
    rows = np.where(seen[..., None], np.concatenate([places, levels[..., None]], axis=-1), NOTHING)
    if seen.all():
        return rows
    return np.take_along_axis(rows, np.argsort(~seen, axis=-1, kind="stable")[..., None], axis=-2)


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
