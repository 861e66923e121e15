"""SMAClite, `smaclite/<map>`: the StarCraft Multi-Agent Challenge without StarCraft, in NumPy and worker processes.

`smaclite/3m`, `smaclite/2s3z`, ...: all 23 maps of SMAC. The package has 12 of them; the other 11 are described here in
its map format. Their units are SMAC's; starts and terrain are those of the package's 2s3z or, where there must be room
to run, of its 3s_vs_5z; the hydralisks of 6h_vs_8z are ours, too. `smaclite/custom?map_file=my_map.json` plays a map
of yours. Other `options` go to the package's constructor.

    observation     as SMAC's: possible moves (4); for each enemy in sight: can be shot, distance, x, y (over the sight
                    range, 9), health, shield if it has one, type one-hot if the map has several; the same for the other
                    allies; then one's own health, shield, type
    action          0 nothing (the dead), 1 stop, 2 north, 3 south, 4 east, 5 west (see the package's Direction),
                    6 + e shoot enemy e, or 6 + a heal ally a (medivacs); the mask says who is in range (6)
    state           SMAC's: all units' health, cooldown or energy, x, y, shield, type; then the last actions
    reward          the team's, for each ally that was alive: damage done, 10 for a kill, 200 for a win, scaled so that
                    20 is the most an episode can bring; the mean over living allies is what the package gives to all
    dead agent      observation and reward 0; only action 0 is legal
    episode end     termination when a team is dead, truncation after SMAC's time limit of the map (option max_steps;
                    the package has none; 200 for a map of yours); battle_won when all enemies are dead
    seeds           as in `pz`; units always start at the same places, and the seed only decides the order in which they
                    act: two battles with the same actions are mostly the same battle, so that the episodes of a greedy
                    evaluation hardly differ

150 to 1,000 steps/s a core, 1.2 to 4 times the package's own, whose trees of neighbours are replaced by arithmetic that
finds the same. `smax/*` is faster still, though not the same game. Several environments to a worker process, as in
`pz`. The package is on no registry and asks for an rtree that does not run on Python 3.11 and later, so the group
`smaclite` has what it needs, and pip installs it without its requirements:

    python3 bootstrap.py smaclite
    pip install --no-deps git+https://github.com/uoe-agents/smaclite@0d6abbea1334011984ae4704a0ef7a33c36057d6

Source: Michalski, Christianos and Albrecht 2023, "SMAClite: A Lightweight Environment for Multi-Agent Reinforcement
Learning" (https://arxiv.org/abs/2305.05566), https://github.com/uoe-agents/smaclite
"""

import contextlib
import importlib
import io
import json
import math
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from cleanmarl.envs import EnvError, building, pz, unknown_name
from cleanmarl.envs.batch import construct

import gymnasium as gym
import numpy as np

INSTALLING = (
    "python bootstrap.py smaclite && pip install --no-deps "
    "git+https://github.com/uoe-agents/smaclite@0d6abbea1334011984ae4704a0ef7a33c36057d6"
)
MAX_STEPS = {  # SMAC's time limits, in steps
    **{"3m": 60, "8m": 120, "25m": 150, "5m_vs_6m": 70, "8m_vs_9m": 120, "10m_vs_11m": 150, "27m_vs_30m": 180},
    **{"MMM": 150, "MMM2": 180, "2s3z": 120, "3s5z": 150, "3s5z_vs_3s6z": 170, "3s_vs_3z": 150, "3s_vs_4z": 200},
    **{"3s_vs_5z": 250, "1c3s5z": 180, "2m_vs_1z": 150, "corridor": 400, "6h_vs_8z": 150, "2s_vs_1sc": 300},
    **{"so_many_baneling": 100, "bane_vs_bane": 200, "2c_vs_64zg": 400},
}
REPORTED = tuple(MAX_STEPS)
OPTIONS = ("map_file", "render_mode", "use_cpp_rvo2")  # of the package
MAPS = {  # that the package lacks: allies, enemies, terrain of the package
    "3m": ({"MARINE": 3}, {"MARINE": 3}, "SIMPLE"),
    "8m": ({"MARINE": 8}, {"MARINE": 8}, "SIMPLE"),
    "25m": ({"MARINE": 25}, {"MARINE": 25}, "SIMPLE"),
    "5m_vs_6m": ({"MARINE": 5}, {"MARINE": 6}, "SIMPLE"),
    "8m_vs_9m": ({"MARINE": 8}, {"MARINE": 9}, "SIMPLE"),
    "2m_vs_1z": ({"MARINE": 2}, {"ZEALOT": 1}, "ALL_GREEN"),
    "3s_vs_3z": ({"STALKER": 3}, {"ZEALOT": 3}, "ALL_GREEN"),
    "3s_vs_4z": ({"STALKER": 3}, {"ZEALOT": 4}, "ALL_GREEN"),
    "1c3s5z": ({"COLOSSUS": 1, "STALKER": 3, "ZEALOT": 5}, {"COLOSSUS": 1, "STALKER": 3, "ZEALOT": 5}, "SIMPLE"),
    "6h_vs_8z": ({"HYDRALISK": 6}, {"ZEALOT": 8}, "SIMPLE"),
    "so_many_baneling": ({"ZEALOT": 7}, {"BANELING": 32}, "SIMPLE"),
}
PROTOSS = {"STALKER", "ZEALOT", "COLOSSUS"}  # units with shields
HYDRALISK = {  # not among the package's units; numbers of Legacy of the Void, as the package's own are
    **{"hp": 90, "armor": 0, "damage": 12, "cooldown": 0.59, "speed": 3.15, "attack_range": 5, "size": 1.25},
    **{"attributes": ["LIGHT", "BIOLOGICAL"], "valid_targets": ["GROUND", "AIR"], "hp_regen": 0.38},
}


def known_names() -> list[str]:
    """The maps of SMAC, then all others that the package registers."""
    need_smaclite()
    registered = [name.removeprefix("smaclite/").removesuffix("-v0") for name in gym.registry if "smaclite/" in name]
    return [*dict.fromkeys((*MAX_STEPS, *registered))]


def make(name: str, num_envs: int = 1, num_workers: int | None = None, **options) -> pz.PettingZooVectorEnv:
    """`num_envs` copies of `smaclite/<name>` in `num_workers` processes (default: one per core; 0: in this process).

    Raises EnvError with one line for an unknown name, the missing package, or options that it does not take.
    """
    with building(f"smaclite/{name}", options):  # here for its errors
        parallel_env(name, **{key: value for key, value in options.items() if key != "render_mode"}).close()
    envs = pz.make("cleanmarl.envs/smaclite", num_envs, num_workers, task=name, **options)
    envs.env_id = f"smaclite/{name}"
    for worker in envs.workers:
        worker.label = worker.label.replace("pz/cleanmarl.envs/smaclite", envs.env_id)
    return envs


def parallel_env(task: str, max_steps: int | None = None, **options) -> "Battle":
    if task not in known_names():
        raise unknown_name(f"smaclite/{task}", known_names())
    env = package_env(task, **options)
    quicken(env)
    return Battle(env, max_steps or MAX_STEPS.get(task, 200))


def package_env(task: str, **options):
    """The package's environment as it is, on a map of its own or on one of those described here."""
    if wrong := options.keys() - set(OPTIONS):  # the package ignores what it does not know
        raise EnvError(f"smaclite/{task} has no option {min(wrong)!r}; it has max_steps, {', '.join(OPTIONS)}")
    options = {"render_mode": None, **options}  # the package would open a window
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):  # it prints at each start
        if task not in MAPS:
            return construct(f"smaclite/{task}-v0", options)
        Path(folder, "HYDRALISK.json").write_text(json.dumps(HYDRALISK))
        Path(folder, "map.json").write_text(json.dumps(describe(task, folder)))
        return construct("smaclite/custom-v0", {"map_file": f"{folder}/map.json", **options})


def describe(name: str, folder: str) -> dict:
    """A map in the package's format; its units are the package's, or described in `folder`."""
    allies, enemies, terrain = MAPS[name]
    types = sorted(allies) if len(allies) > 1 else []  # as in SMAC, only armies of several kinds see kinds
    return {
        "name": name,
        "custom_unit_path": folder,
        "num_allied_units": sum(allies.values()),
        "num_enemy_units": sum(enemies.values()),
        "groups": [
            {"x": 9, "y": 16, "faction": "ALLY", "units": dict(allies)},
            {"x": 23, "y": 16, "faction": "ENEMY", "units": dict(enemies)},
        ],
        "attack_point": [9, 16],
        "terrain_preset": terrain,
        "num_unit_types": len(types),
        "unit_type_ids": {kind: i for i, kind in enumerate(types)},
        "ally_has_shields": not PROTOSS.isdisjoint(allies),
        "enemy_has_shields": not PROTOSS.isdisjoint(enemies),
    }


class Neighbours:
    """The package's finder of units within a radius by plain arithmetic: the same units in the same order.

    At each of the eight ticks of a step the package builds trees of scikit-learn, whose checks of their arguments took
    half of its time. A tree of up to 80 points is a list that is gone through, as here.
    """

    def __init__(self, planes: set):
        self.planes = planes
        self.units: dict[int, Any] = {}
        self.found: dict[Any, list[tuple]] = {}  # plane -> (unit, x, y)

    def set_all_units(self, units: dict[int, Any]) -> None:
        self.units = units  # the dead will be taken from it
        self.update()

    def update(self) -> None:
        """Look where the units are now: within a tick the package goes on asking where they were."""
        if self.units:  # when the last has died, the package goes on finding it
            self.found = {}
        for unit in self.units.values():
            self.found.setdefault(unit.plane, []).append((unit, *unit.pos.tolist()))

    def query_radius(self, units, radius, return_distance=False, same_plane_only=False, targetting_mode=False) -> list:
        """For each of the units those within its radius, with return_distance as pairs (unit, distance)."""
        radii = radius if isinstance(radius, list) else [radius] * len(units)
        result = []
        for asking, r in zip(units, radii):
            x, y = asking.pos.tolist()
            near = []
            for plane in self.planes:
                if same_plane_only and plane != asking.plane:
                    continue
                if targetting_mode and plane not in asking.valid_targets and plane.name != "COLOSSUS":
                    continue
                for unit, its_x, its_y in self.found.get(plane, ()):
                    dx, dy = its_x - x, its_y - y
                    square = dx * dx + dy * dy  # as the tree has it: dx**2 may differ in the last digit
                    if square <= r * r:
                        near.append((unit, math.sqrt(square)) if return_distance else unit)
            result.append(near)
        return result


class Obstacles:
    """The package's finder of obstacles near a unit, which asks a tree for all of them and then looks at each."""

    def __init__(self, finder):
        self.obstacles = [finder.index_mapping[i] for i in finder.index.intersection((-100, -100, 100, 100))]

    def query(self, unit) -> list:
        radius = unit.radius + unit.max_velocity  # of a second
        return [obstacle for obstacle in self.obstacles if obstacle.is_within_range(unit, radius, radius**2)]


def quicken(env) -> None:
    """Give the package's environment finders that find the same, quicker."""
    planes = importlib.import_module("smaclite.env.rvo2.neighbour_finder").ALL_PLANES
    for army in ("ally", "enemy", "all"):
        setattr(env, f"neighbour_finder_{army}", Neighbours(planes))
    updater = env.velocity_updater
    if hasattr(updater, "obstacle_finder"):  # not so in C++
        updater.kd_tree, updater.obstacle_finder = env.neighbour_finder_all, Obstacles(updater.obstacle_finder)


class Battle:
    """The package's environment as a PettingZoo parallel environment whose agents die, with a time limit."""

    metadata: ClassVar[dict[str, Any]] = {"team_reward": True, "may_die": True}

    def __init__(self, env, max_steps: int):
        self.env, self.max_steps = env, max_steps
        self.possible_agents = [f"ally_{a}" for a in range(env.n_agents)]
        self.battle_won = False

    def observation_space(self, agent: str) -> gym.Space:
        return self.env.observation_space[self.possible_agents.index(agent)]

    def action_space(self, agent: str) -> gym.Space:
        return gym.spaces.Discrete(self.env.n_actions)  # its own leaves out the last ally of a medivac

    def reset(self, seed: int | None = None, options: dict | None = None):
        self.env.last_actions[:] = 0  # part of the state, and the package would show the last episode's
        obs, _ = self.env.reset(seed=seed)
        self.steps, self.agents = 0, self.possible_agents
        return self.seen(obs)

    def step(self, actions: dict):
        with np.errstate(divide="ignore", invalid="ignore"):  # a colossus fires straight up
            obs, reward, ended, _, info = self.env.step([actions.get(agent, 0) for agent in self.possible_agents])
        self.steps, self.battle_won = self.steps + 1, info["battle_won"]
        living = [agent for a, agent in enumerate(self.possible_agents) if a in self.env.agents]
        cut = self.steps == self.max_steps and not ended
        rewards = dict.fromkeys(self.agents, reward)
        termination = {agent: ended or agent not in living for agent in self.agents}
        truncation = dict.fromkeys(self.agents, cut)
        self.agents = [] if ended or cut else living
        obs, infos = self.seen(obs)
        return obs, rewards, termination, truncation, infos

    def seen(self, obs) -> tuple[dict, dict]:
        infos = [{"action_mask": mask} for mask in self.env.get_avail_actions()]
        return dict(zip(self.possible_agents, obs)), dict(zip(self.possible_agents, infos))

    def state(self) -> np.ndarray:
        return self.env.get_state()

    def render(self):
        return self.env.render() if self.env.render_mode else None

    def close(self) -> None:
        self.env.close()


def need_smaclite() -> None:
    """Import the package, which registers its ids. Raises EnvError with the line that installs it."""
    try:
        importlib.import_module("smaclite")
    except ImportError as error:
        raise EnvError(f"smaclite/... needs a package that is missing ({error}): {INSTALLING}") from error
