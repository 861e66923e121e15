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

The package draws how an episode starts and which shelf is requested next; the rest are arrays of all environments,
equal to the package's step for step. Its pictures, dictionaries and messages (msg_bits) are not supported. Source:
Papoudakis et al. 2021, "Benchmarking multi-agent deep reinforcement learning algorithms in cooperative tasks"
(https://arxiv.org/abs/2006.07869), whose code, EPyMARL, adds up the rewards of all agents: compare its returns with the
sum over agents.
"""

import importlib
from typing import ClassVar

from cleanmarl.envs import EnvError, building, draw, unknown_name
from cleanmarl.envs.batch import BatchedVectorEnv, construct, need

import gymnasium as gym
import networkx as nx
import numpy as np

REPORTED = ("rware-tiny-2ag-v2", "rware-tiny-4ag-v2", "rware-small-4ag-v2")  # in the paper above; there as v1


def known_names() -> list[str]:
    """Those of the paper, then all others that the package registers."""
    need("rware", "rware")
    return [*dict.fromkeys((*REPORTED, *(name for name in gym.registry if name.startswith("rware-"))))]


def make(name: str, num_envs: int = 1, **options) -> "WarehouseVectorEnv":
    """`num_envs` copies of `rware/<name>`.

    Raises EnvError with one line for an unknown name, the missing package, or options that it does not take.
    """
    with building(f"rware/{name}", options):
        return WarehouseVectorEnv(name, num_envs, **options)


def package_env(name: str, **options):
    """The package's environment. Raises EnvError for an unknown name, and whatever its constructor raises."""
    need("rware", "rware")
    if name not in gym.registry or not name.startswith("rware-"):
        raise unknown_name(f"rware/{name}", known_names())
    if isinstance(kind := options.get("reward_type"), int | str):  # as an id has it
        kinds = importlib.import_module("rware.warehouse").RewardType.__members__
        if kind not in kinds:
            raise EnvError(f"rware/{name}: reward_type must be one of {', '.join(kinds)}, not {kind!r}")
        options = {**options, "reward_type": kinds[kind]}
    return construct(name, options)


FORWARD, LOAD = 1, 4
ONE_HOT = np.eye(4, dtype=np.float32)  # of a direction: 0 up, 1 down, 2 left, 3 right
# the direction after each action
TURNS = np.array([(0, 1, 2, 3), (0, 1, 2, 3), (2, 3, 1, 0), (3, 2, 0, 1), (0, 1, 2, 3)])


class WarehouseVectorEnv(BatchedVectorEnv):
    """N warehouses with A robots, S shelves and Q requests; the module's docstring says what is seen, done and earned.

    A cell is a number: its place, row by row, in a floor that has a wall around it, as wide as robots see. Robots and
    shelves have numbers from 1 on, as in the package, and 0 is none.
    """

    arrays: ClassVar = ("cell", "direction", "carried", "delivered", "robot", "shelf", "queue", "idle")

    def __init__(self, name: str, num_envs: int, render_mode: str | None = None, **options):
        self.env_id, self.render_mode = f"rware/{name}", render_mode
        self.game = game = package_env(name, **options)  # for the starts of episodes
        if game.msg_bits or not game.fast_obs:
            raise EnvError(f"{self.env_id}: messages, pictures and dictionaries are not supported")
        S, Q = int((game.highways == 0).sum()), game.request_queue_size
        if Q >= S:  # with which the package fails, at a start or at a delivery
            raise EnvError(f"{self.env_id}: {S} shelves are too few for {Q} requests at a time")
        game.reset(seed=0)  # for its errors
        self.time_limit, self.patience = game.max_steps, game.max_inactivity_steps
        self.team_reward, self.two_stages = (game.reward_type.name == kind for kind in ("GLOBAL", "TWO_STAGE"))
        A, sight, (height, width) = game.n_agents, max(game.sensor_range, 1), game.grid_size
        self._set_up(num_envs, A, obs_size=game.observation_space[0].shape[0], num_actions=len(TURNS))

        columns = width + 2 * sight
        self.ahead = np.array([-columns, columns, -1, 1])  # the cell in each direction
        floor = np.pad(np.arange(height * width).reshape(height, width), sight, constant_values=-1).ravel()
        self.wall = floor < 0
        self.cells = np.flatnonzero(~self.wall)  # of the package's, row by row
        self.highway = np.ones(len(floor), bool)
        self.highway[self.cells] = game.highways.ravel()
        place = np.stack([floor % width, floor // width], -1)  # column and row
        self.names = list(map(tuple, place.tolist()))
        scale = [width - 1, height - 1] if game.normalised_coordinates else [1, 1]
        self.place = (place / scale).astype(np.float32)
        self.goals = self.cells[[x + y * width for x, y in game.goals]]
        around = np.arange(-game.sensor_range, game.sensor_range + 1)
        self.around = (around[:, None] * columns + around).ravel()  # of the cells that a robot sees

        N = num_envs
        self.env, self.ids = np.arange(N)[:, None], np.arange(1, A + 1)
        self.cell, self.direction, self.carried = (np.zeros((N, A), np.int64) for _ in range(3))
        self.delivered = np.zeros((N, A), bool)  # what it carries, since it was loaded
        self.robot, self.shelf = (np.zeros((N, len(floor)), np.int64) for _ in range(2))  # who or what is where
        self.queue, self.requested = np.zeros((N, Q), np.int64), np.zeros((N, S + 1), bool)
        self.idle = np.zeros(N, np.int64)  # steps without a delivery
        self.requests = [np.random.default_rng() for _ in range(N)]  # the package's generators

    def _begin(self, n: int, seed: int) -> None:
        self.game.reset(seed=seed)
        self.requests[n] = self.game.np_random
        robots, shelves = self.game.grid
        self.robot[n, self.cells], self.shelf[n, self.cells] = robots.ravel(), shelves.ravel()
        for a, robot in enumerate(self.game.agents):
            self.cell[n, a], self.direction[n, a] = self.names.index((robot.x, robot.y)), robot.dir.value
        self.queue[n] = [shelf.id for shelf in self.game.request_queue]
        self._mark_requests(n)
        self.carried[n] = self.delivered[n] = self.idle[n] = 0

    def _mark_requests(self, n) -> None:
        self.requested[n] = (np.arange(self.requested.shape[1]) == self.queue[n, ..., None]).any(-2)

    def _generators(self) -> list[np.random.Generator]:
        return [*self.seeds, *self.requests]

    def restore(self, snapshot: dict) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Go on from there; (obs, info) as they were."""
        self.queue[:] = snapshot["arrays"]["queue"]
        self._mark_requests(slice(None))
        return super().restore(snapshot)

    def _play(self, action: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self._move(action == FORWARD)
        self.direction = TURNS[action, self.direction]
        reward = self._load(action == LOAD)
        found = self._deliver(reward)
        self.idle = np.where(found, 0, self.idle + 1)
        end = np.zeros(self.num_envs, bool)
        if self.patience:
            end |= self.idle >= self.patience
        if self.time_limit:
            end |= length + 1 >= self.time_limit
        return reward, np.zeros_like(end), end

    def _move(self, forward: np.ndarray) -> None:
        """Who wants forward (N, A) goes, unless a wall, a robot, or another shelf than its own is in its way."""
        ahead = self.cell + self.ahead[self.direction]
        wanted = np.where(forward & ~self.wall[ahead], ahead, self.cell)
        loaded = self.carried > 0
        if (loaded & (wanted != self.cell)).any():
            there = self.robot[self.env, wanted]
            under_way = (there > 0) & (self.carried[self.env, there - 1] > 0)  # the shelf that is there
            stopped = loaded & (wanted != self.cell) & (self.shelf[self.env, wanted] > 0) & ~under_way
            wanted = np.where(stopped, self.cell, wanted)
        wanted = np.where(self._may_go(wanted), wanted, self.cell)

        n, a = np.nonzero(wanted != self.cell)
        old, new, carried = self.cell[n, a], wanted[n, a], self.carried[n, a]
        self.robot[n, old] = 0
        self.robot[n, new] = a + 1
        has_shelf = carried > 0
        self.shelf[n[has_shelf], old[has_shelf]] = 0
        self.shelf[n[has_shelf], new[has_shelf]] = carried[has_shelf]
        self.cell = wanted

    def _may_go(self, wanted: np.ndarray) -> np.ndarray:
        """(N, A) whether a robot gets where it wants: a free cell, that of one who leaves, or on in a circle.

        Two cannot change places, three in a circle can. Of several who want one cell it is the one with most behind it.
        """
        first = there = self.robot[self.env, wanted] - 1  # who is where it wants to go: -1 for nobody
        going = wanted != self.cell
        circle = np.zeros_like(wanted)  # of how many robots each is a part
        if (going & (there >= 0)).any():
            for size in range(1, self.num_agents + 1):
                circle = np.where((circle == 0) & (there + 1 == self.ids), size, circle)
                there = np.where(there < 0, there, first[self.env, there])  # who is where that one wants to go
        free = there < 0  # behind a free cell
        rivals = (wanted[:, :, None] == wanted[:, None]) & (free[:, :, None] & free[:, None])
        for n in np.flatnonzero(rivals.sum((1, 2)) > free.sum(1)):
            free[n] &= self._longest(self.cell[n], wanted[n])
        return going & (free | (circle > 2))

    def _longest(self, cell: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """(A,) whether a robot is in the longest queue for a free cell, which is the package's rule, ties too."""
        here, there = ([self.names[place] for place in places] for places in (cell, wanted))
        graph, go = nx.DiGraph(zip(here, there)), set()
        for part in nx.weakly_connected_components(graph):
            queues = graph.subgraph(part).copy()
            if nx.is_directed_acyclic_graph(queues):
                go |= set(nx.dag_longest_path(queues))
        return np.array([name in go for name in here])

    def _load(self, wants: np.ndarray) -> np.ndarray:
        """Who wants (N, A) takes the shelf where it stands, or puts down its own off the highways; rewards (N, A)."""
        takes = wants & (self.carried == 0)
        puts = wants & (self.carried > 0) & ~self.highway[self.cell]
        self.carried = np.where(takes, self.shelf[self.env, self.cell], np.where(puts, 0, self.carried))
        reward = np.where(puts & self.delivered, 0.5, 0.0)  # the second half of two stages
        self.delivered &= ~puts
        return reward

    def _deliver(self, reward: np.ndarray) -> np.ndarray:
        """Pay for requested shelves that are at a goal, and request others; (N,) whether there was one."""
        at_goals = self.requested[self.env, self.shelf[:, self.goals]]  # (N, G)
        found = np.any(at_goals, axis=1)
        for n in np.flatnonzero(found):
            for goal in self.goals:  # in the package's order: what is requested next may be at the next one
                shelf, robot = self.shelf[n, goal], self.robot[n, goal]
                if not self.requested[n, shelf]:
                    continue
                others = np.flatnonzero(~self.requested[n, 1:]) + 1
                self.queue[n, self.queue[n] == shelf] = self.requests[n].choice(others)
                self._mark_requests(n)
                if self.team_reward:
                    reward[n] += 1
                else:
                    reward[n, robot - 1] += 0.5 if self.two_stages else 1
                    self.delivered[n, robot - 1] = self.two_stages
        return found

    def _observe(self) -> np.ndarray:
        """Observations (N, A, D): oneself, then the cells around."""
        N, A = self.cell.shape
        obs = np.empty((N, A, self.single_observation_space.shape[-1]), np.float32)
        obs[..., :2] = self.place[self.cell]
        obs[..., 2] = self.carried > 0
        obs[..., 3:7] = ONE_HOT[self.direction]
        obs[..., 7] = self.highway[self.cell]
        seen, env = self.cell[..., None] + self.around, self.env[..., None]  # (N, A, C)
        robot, shelf = self.robot[env, seen], self.shelf[env, seen]
        cells = obs[..., 8:].reshape(N, A, -1, 7)
        cells[..., 0] = robot > 0
        cells[..., 1:5] = ONE_HOT[np.where(robot > 0, self.direction[env, robot - 1], 0)]  # up, where there is nobody
        cells[..., 5] = shelf > 0
        cells[..., 6] = self.requested[env, shelf]
        obs[..., 8:] = cells.reshape(N, A, -1)
        return obs

    def render(self):
        """Frame (height, width, 3) uint8 of environment 0; with render_mode="human" the package's window."""
        game = self.game
        for place, shelf in enumerate(self.shelf[0].tolist()):
            if shelf:
                game.shelfs[shelf - 1].x, game.shelfs[shelf - 1].y = self.names[place]
        game.request_queue = [game.shelfs[shelf - 1] for shelf in self.queue[0]]
        for a, robot in enumerate(game.agents):
            robot.x, robot.y = self.names[self.cell[0, a]]
            robot.dir = type(robot.dir)(self.direction[0, a])
            robot.carrying_shelf = game.shelfs[self.carried[0, a] - 1] if self.carried[0, a] else None
        return game.render() if self.render_mode == "human" else picture(game)

    def close_extras(self, **kwargs) -> None:
        self.game.close()


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
