"""Any PettingZoo parallel environment, `pz/<package>/<name>`, several to a worker process, over shared memory.

`pz/sisl/pursuit_v5` is `pettingzoo.sisl.pursuit_v5.parallel_env`, `pz/mpe2/simple_spread_v3` that of the package mpe2,
`pz/my_package/my_env` that of a module of yours, and `pz/my_module:MyEnv` what your `MyEnv(**options)` returns; modules
are found in the folder you work in, too. A module that has only `env`, PettingZoo's agent-by-agent kind, goes through
PettingZoo's own conversion if its metadata say "is_parallelizable"; agents that really take turns, as in chess, cannot
act at once. In Python `make` takes the class or function itself, too. What the interface of this package leaves open:

    observation     flattened to float32; Discrete is one-hot; {observation, action_mask} is taken apart; where all
                    agents see pictures (H, W, C) uint8 of one shape, they stay such pictures
    action          Discrete: counted from 0; Box: flattened, an error where it leaves its bounds
    action_mask     from there or from info[agent]["action_mask"]; an agent without a legal action has action 0
    state           env.state() flattened to float32 (the last one, where it fails without agents that are done, or has
                    another size when nobody is left; an error where others play on and it has another size); where
                    there is none, or it raises NotImplementedError, the padded observations one after another. Where
                    agents see pictures, a state() that is one stays one, and else it is theirs, one behind the other:
                    (H, W, A * C) uint8
    reward          the environment's own, for each agent; whether it is the team's and whether agents may die is what
                    the environment's metadata say, {"team_reward": True, "may_die": False}, or the options of that
                    name; nothing is known of it (False, True) but in the environments of RULES below
    dead agent      done, or not in env.agents: observation and reward 0, only action 0 is legal, and is not passed on;
                    who had left env.agents and is there again is alive again;
                    who is truncated alone, while others play on, is dead too, and nobody learns a value of its last
                    observation: PettingZoo's time limits end all agents at once (multiwalker's says that they have
                    terminated, and is put right here)
    episode end     no agent is left: truncation if one that lived until then was truncated and not terminated;
                    battle_won where the environment has an attribute of that name
    seeds           reset(seed=s) gives env_seeds(s, N)[i] to environment i, each later episode the next number of a
                    generator seeded with that: runs repeat even where reset(seed=None) would draw from entropy
"""

import importlib
import importlib.util
import itertools
import math
import os
import pickle
import pkgutil
import random
import re
import reprlib
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import Any, SupportsFloat

from cleanmarl.envs import (
    EnvError,
    EpisodeStatistics,
    MultiAgentVectorEnv,
    building,
    called,
    check_memory,
    env_seeds,
    import_own,
    is_picture,
    own_name,
    search_working_folder,
    unknown_name,
)
from cleanmarl.envs.workers import Worker, call, new_memory, share, stop
from cleanmarl.machine import WORKER_BYTES

import cloudpickle
import numpy as np
from gymnasium import spaces
from pettingzoo.utils import BaseParallelWrapper
from pettingzoo.utils.conversions import aec_to_parallel

PETTINGZOO = ("atari", "butterfly", "classic", "sisl")  # packages inside pettingzoo; others stand by themselves
INSTALL = {
    "mpe2": "pip install mpe2",
    "magent2": "pip install magent2",
    "atari": 'pip install "pettingzoo[atari]"',
    "classic": 'pip install "pettingzoo[classic]"',
    "butterfly": "python bootstrap.py multiagent",
    "sisl": "python bootstrap.py multiagent",
}
BLIND = ("butterfly/cooperative_pong_v6",)  # agents see nothing but black unless it renders (PettingZoo 1.27)
MASKS = frozenset({0, 1})  # what a mask may hold; False and True are equal to them
RULES = {  # options -> (team_reward, may_die), of environments that do not say it themselves
    "butterfly/cooperative_pong_v6": lambda options: (True, False),
    "butterfly/pistonball_v6": lambda options: (True, False),
    "sisl/multiwalker_v9": lambda options: (
        options.get("shared_reward", True) == 1,  # it may be a share, too
        not options.get("terminate_on_fall", True),
    ),
    "sisl/pursuit_v5": lambda options: (options.get("shared_reward", True) == 1, False),
    "mpe2": lambda options: (False, False),  # all others of this package
    "mpe2/simple_formation_v1": lambda options: (True, False),
    "mpe2/simple_line_v1": lambda options: (True, False),
    "mpe2/simple_v3": lambda options: (True, False),
    "mpe2/simple_reference_v3": lambda options: (options.get("local_ratio", 0.5) == 0, False),
    "mpe2/simple_speaker_listener_v4": lambda options: (True, False),
    "mpe2/simple_spread_v3": lambda options: (options.get("local_ratio", 0.5) == 0, False),
}


def make(
    name: str | Callable,
    num_envs: int = 1,
    num_workers: int | None = None,
    team_reward: bool | None = None,
    may_die: bool | None = None,
    **options,
) -> "PettingZooVectorEnv":
    """`num_envs` copies of `pz/<name>` in `num_workers` processes (default: one per core; 0: in this process).

    `team_reward` and `may_die` say what MultiAgentVectorEnv means by them where the environment does not, or says it
    wrongly. Raises EnvError with one line for an unknown name, a missing package, options that the constructor does not
    take, actions that are neither Discrete nor Box, pictures of several shapes, and agents that take turns.
    """
    env_id = f"pz/{name}" if isinstance(name, str) else called(name)
    num_workers = min(num_envs, os.cpu_count() or 1) if num_workers is None else num_workers
    if not isinstance(num_workers, int) or isinstance(num_workers, bool) or num_workers < 0:
        raise EnvError(f"num_workers must be an integer, 0 (no worker processes) or more, not {num_workers!r}")
    num_workers = min(num_workers, num_envs)
    check_memory(f"{env_id}: {num_workers:,} worker processes", num_workers * WORKER_BYTES)
    check_flags(env_id, team_reward=team_reward, may_die=may_die)
    # with workers, the environment built here only shows its spaces, and needs no window
    shown = {key: value for key, value in options.items() if num_workers == 0 or key != "render_mode"}
    with building(env_id, options):
        env = build(name, shown)
        if not hasattr(env, "possible_agents"):
            hint = ": a copy of a script returns it from make_envs" if isinstance(env, MultiAgentVectorEnv) else ""
            raise EnvError(f"{env_id} is no parallel environment of PettingZoo, without possible_agents{hint}")
        if hasattr(env, "agent_iter"):
            is_safe = (getattr(env, "metadata", None) or {}).get("is_parallelizable")
            convert = "aec_to_parallel" if is_safe else "turn_based_aec_to_parallel"
            hint = f"return pettingzoo.utils.conversions.{convert}(env)"
            raise EnvError(f"{env_id} is an AECEnv, whose agents take turns, and here all act at once: {hint}")
        if not env.possible_agents:
            raise EnvError(f"{env_id} has no possible_agents")
        if isinstance(env.possible_agents, set | frozenset):
            hint = "whose order differs between processes: make it a list"
            raise EnvError(f"{env_id}: possible_agents is a set, {hint}")
        if len({*env.possible_agents}) < len(env.possible_agents):
            raise EnvError(f"{env_id}: two of its possible_agents have one name: {env.possible_agents}")
        for name_ in ("observation_space", "action_space"):
            if not callable(getattr(env, name_, None)):
                raise EnvError(f"{env_id}: {name_} must be a method, {name_}(agent)")
        layout = Layout(env_id, env)
    rules = (RULES.get(name) or RULES.get(name.partition("/")[0])) if isinstance(name, str) else None
    known = dict(zip(("team_reward", "may_die"), rules(options))) if rules else {}
    said = getattr(env, "metadata", None) or {}
    known |= {key: said[key] for key in ("team_reward", "may_die") if key in said}
    check_flags(f"the metadata of {env_id}", **known)
    envs = PettingZooVectorEnv(env_id, name, env, layout, num_envs, num_workers, options)
    envs.team_reward = known.get("team_reward", False) if team_reward is None else team_reward
    envs.may_die = known.get("may_die", True) if may_die is None else may_die
    envs.time_limit = time_limit(env)
    return envs


def check_flags(where: str, **flags) -> None:
    for key, value in flags.items():
        if not isinstance(value, bool | None):
            raise EnvError(f"{where}: {key} must be True or False, not {value!r}")


def time_limit(env) -> int | None:
    """The most steps of an episode, if the environment, or one that it wraps, tells it by one of the usual names."""
    for _ in range(10):  # as deep as wrappers go
        for name in ("max_cycles", "max_steps", "max_episode_steps", "_max_episode_steps"):
            if isinstance(steps := getattr(env, name, None), int) and steps > 0:
                return steps
        inner = getattr(env, "unwrapped", env)
        env = getattr(env, "env", None) if inner is env else inner
    return None


def known_names() -> list[str]:
    """`<package>/<name>` of every environment in the packages that are installed."""
    names = []
    for package in INSTALL:
        spec = importlib.util.find_spec(f"pettingzoo.{package}" if package in PETTINGZOO else package)
        modules = pkgutil.iter_modules(spec.submodule_search_locations) if spec else []
        names += [f"{package}/{module.name}" for module in modules if re.search(r"_v\d+$", module.name)]
    return names


def build(name: str | Callable, options: dict):
    """One PettingZoo ParallelEnv. Raises EnvError as `make` says, and whatever its constructor raises."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    if options.get("render_mode") != "human":
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # images are drawn without a display, too
    if callable(name):
        return name(**options)
    package = name.partition("/")[0]
    path, _, factory = f"{'pettingzoo.' * (package in PETTINGZOO)}{name.replace('/', '.')}".partition(":")
    if not re.fullmatch(r"\w[\w.]*/\w+|\w[\w.]*:\w+", name):
        raise unknown_name(f"pz/{name}", known_names())
    if factory:
        return own_name(f"pz/{name}", import_own(f"pz/{name}", path), factory)(**options)
    search_working_folder()
    if name in BLIND and options.get("render_mode") is None:
        options = {**options, "render_mode": "rgb_array"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # PettingZoo's, for importing by module
            module = importlib.import_module(path)
    except ImportError as error:
        not_there = error.name and f"{path}.".startswith(f"{error.name}.")
        if not_there and not (package in INSTALL and error.name == package):
            raise unknown_name(f"pz/{name}", known_names()) from None
        hint = INSTALL.get(package, f"pip install {error.name}")
        raise EnvError(f"pz/{name} needs a package that is missing ({error}): {hint}") from error
    if name == "sisl/multiwalker_v9":
        return Multiwalker(module.parallel_env(**options))
    if hasattr(module, "parallel_env"):
        return module.parallel_env(**options)
    if not hasattr(module, "env"):
        raise EnvError(f"pz/{name} is no environment of PettingZoo: the module has no parallel_env and no env")
    env = module.env(**options)
    if not env.metadata.get("is_parallelizable"):
        env.close()
        hint = "ppo_selfplay.py plays games of pgx; a function of yours may return turn_based_aec_to_parallel(env())"
        raise EnvError(f"pz/{name} has no parallel_env: its agents take turns, here all agents act at once; {hint}")
    return aec_to_parallel(env)


class Multiwalker(BaseParallelWrapper):
    """multiwalker with a time limit that truncates; its own says of all walkers that they fell (PettingZoo 1.27)."""

    def step(self, actions: dict):
        obs, reward, termination, truncation, info = super().step(actions)
        game: Any = self.unwrapped
        if game.env.frames >= game.env.max_cycles:
            fell = dict(zip(self.possible_agents, map(bool, game.env.last_dones)))
            termination = {agent: fell[agent] for agent in termination}
            truncation = {agent: not fell[agent] for agent in termination}
        return obs, reward, termination, truncation, info

    def state(self) -> np.ndarray:
        game: Any = self.unwrapped
        if game.env.remove_on_fall and not game.env.terminate_on_fall:
            raise NotImplementedError("its own fails once a walker has fallen, and the others walk on")
        return super().state()


class Layout:
    """Agents, spaces and sizes of an environment, and the arrays that N of them share; letters as in cleanmarl.envs."""

    def __init__(self, env_id, env):
        self.env_id = env_id
        self.agents = tuple(env.possible_agents)  # a copy: some environments change theirs while they run
        self.names = frozenset(self.agents)
        self.observations = [env.observation_space(agent) for agent in self.agents]
        keys = [{*space} if isinstance(space, spaces.Dict) else set() for space in self.observations]
        for agent, seen in zip(self.agents, keys):
            if "action_mask" in seen and seen != {"observation", "action_mask"}:
                raise EnvError(f"{env_id}: {agent} sees {sorted(seen)}: a mask stands beside 'observation' alone")
        self.masked = ["action_mask" in seen for seen in keys]
        self.observations = [s["observation"] if masked else s for s, masked in zip(self.observations, self.masked)]
        self.obs_sizes = [spaces.flatdim(space) for space in self.observations]
        shapes = [s.shape if is_picture(s) else None for s in self.observations]
        self.has_pictures = shapes[0] is not None
        if len({*shapes}) > 1:
            seen = ", ".join(str(shape or "no picture") for shape in dict.fromkeys(shapes))
            raise EnvError(f"{env_id}: all agents need pictures of one shape, or none, not {seen}")
        A, size = len(self.agents), max(self.obs_sizes)
        if size == 0:
            raise EnvError(f"{env_id}: nobody observes anything")
        self.observation_space = (
            pictures(A, *shapes[0]) if self.has_pictures else spaces.Box(-np.inf, np.inf, (A, size), np.float32)
        )
        self.actions = [env.action_space(agent) for agent in self.agents]
        self.continuous = isinstance(self.actions[0], spaces.Box)
        if not all(isinstance(s, spaces.Box if self.continuous else spaces.Discrete) for s in self.actions):
            all_discrete = "all agents need Discrete or all need Box actions"
            hint = "a Discrete space can number the combinations of a MultiDiscrete"
            raise EnvError(f"{env_id}: {all_discrete}, not {[*map(str, self.actions)]}; {hint}")
        if self.continuous and not all(np.issubdtype(s.dtype, np.floating) for s in self.actions):
            raise EnvError(f"{env_id}: Box actions must be of floats, not {[*map(str, self.actions)]}")
        self.action_sizes = [math.prod(s.shape) if self.continuous else int(s.n) for s in self.actions]
        self.real_actions = np.arange(max(self.action_sizes)) < np.array(self.action_sizes)[:, None]  # (A, K)
        self.has_battles = hasattr(env, "battle_won")
        self.bounds = None  # of continuous actions (A, K); an action that an agent does not have is 0
        if self.continuous:
            low, high = np.zeros((2, *self.real_actions.shape), np.float32)
            low[self.real_actions] = np.concatenate([space.low.ravel() for space in self.actions])
            high[self.real_actions] = np.concatenate([space.high.ravel() for space in self.actions])
            self.bounds = spaces.Box(low, high, dtype=np.float32)
        self.says_legal = {}  # whether an agent, by number, has masks; not yet of those who come later
        obs, info = self.check_reset(env, env.reset(seed=0))
        for a, agent in enumerate(self.agents):
            if agent in obs:
                self.seen(a, obs[agent])
                self.legal(a, obs[agent], info)
        inner = getattr(env, "unwrapped", env)
        if getattr(inner, "metadata", None) is None:
            inner.metadata = {}  # that there is no state(), PettingZoo says with a name from there
        self.has_state = callable(getattr(env, "state", None))
        try:
            seen = env.state() if self.has_state else None
        except NotImplementedError:  # PettingZoo's own, where an environment has none
            self.has_state = False
        except (TypeError, AttributeError):  # a wrapper's state() calls what the environment inside has by this name
            if callable(getattr(inner, "state", None)):
                raise
            self.has_state = False
        state = np.asarray(seen) if self.has_state else self.joint(np.zeros_like(self.observation_space.low))
        if state.dtype.kind not in "biuf":
            hint = "it must be an array of numbers, or raise NotImplementedError"
            raise EnvError(f"{env_id}: state() returns {form_of(seen)}: {hint}")
        is_kept = self.has_pictures and state.dtype == np.uint8 and state.ndim == 3
        self.state_space = pictures(*state.shape) if is_kept else spaces.Box(-np.inf, np.inf, (state.size,), np.float32)

    def check_present(self, agents: Collection[str]) -> None:
        """EnvError where env.agents has one that possible_agents has not: nobody would act for it."""
        if not self.names.issuperset(agents):
            wrong = next(agent for agent in agents if agent not in self.names)
            here = reprlib.repr([*self.agents])
            raise EnvError(f"{self.env_id}: {wrong!r} is in agents, and not in possible_agents, which are {here}")

    def check_agents(self, method: str, needed: Collection[str], **returned: dict) -> None:
        """EnvError where an agent is missing and a stranger is there: nobody would look under another name."""
        for what, of_agents in returned.items():
            if not of_agents.keys() >= {*needed} and (strangers := of_agents.keys() - self.names):
                wrong, agents = next(iter(strangers)), reprlib.repr([*self.agents])
                raise EnvError(f"{self.env_id}: {method}() returns {what} of {wrong!r}; possible_agents are {agents}")

    def check_all(self, agents: Collection[str], who: str, **returned: dict) -> None:
        """EnvError where step() returns nothing of one of these agents: it would earn 0, or see zeros."""
        for what, of_agents in returned.items():
            if not of_agents.keys() >= {*agents}:
                missing = next(agent for agent in agents if agent not in of_agents)
                raise EnvError(f"{self.env_id}: step() returns no {what} of {missing!r}, {who}")

    def check_reset(self, env, returned: tuple[dict, dict]) -> tuple[dict, dict]:
        """The same for what reset() returns; those who play see something."""
        self.check_form("reset", returned, "observations", "infos")
        obs, _ = returned
        self.check_agents("reset", env.agents, observations=obs)
        self.check_present(env.agents)
        lost = [agent for agent in self.agents if agent not in env.agents]
        if lost and env.agents is env.possible_agents:  # who left an episode would be dead in all that follow
            hint = "its agents are the same list, and need one of their own: self.agents = [*self.possible_agents]"
            raise EnvError(f"{self.env_id}: {lost[0]!r} is no longer in possible_agents; {hint}")
        if not env.agents:
            raise EnvError(f"{self.env_id}: nobody plays after reset(): its agents are empty")
        if not obs.keys() >= {*env.agents}:
            unseen = next(agent for agent in env.agents if agent not in obs)
            raise EnvError(f"{self.env_id}: reset() returns no observation of {unseen!r}, which is one of its agents")
        return returned

    def check_form(self, method: str, returned, *names: str) -> None:
        """EnvError where a method returns something else than so many dictionaries by agent."""
        if not isinstance(returned, tuple | list) or len(returned) != len(names):
            raise EnvError(f"{self.env_id}: {method}() must return ({', '.join(names)}), each a dict by agent")
        for what, of_agents in zip(names, returned):
            if not isinstance(of_agents, Mapping):
                has = form_of(of_agents)
                raise EnvError(f"{self.env_id}: {method}() returns {what} that are {has}, not a dict by agent")

    def check_step(self, returned) -> None:
        """EnvError for what was the matter with that which step() returned, if it was its form."""
        self.check_form("step", returned, "observations", "rewards", "terminations", "truncations", "infos")
        for agent, reward in returned[1].items():
            if agent in self.names and (np.ndim(reward) or not isinstance(reward, SupportsFloat)):
                raise EnvError(f"{self.env_id}: the reward of agent {agent} is {form_of(reward)}, not a number")
        for what, of_agents in (("termination", returned[2]), ("truncation", returned[3])):
            for agent, ended in of_agents.items():
                if agent in self.names and np.ndim(ended):
                    raise EnvError(f"{self.env_id}: the {what} of agent {agent} is {form_of(ended)}, not True or False")

    def seen(self, a: int, value) -> np.ndarray:
        """An observation of agent a as it is kept: flat (D,), or a picture. EnvError if it is of another kind."""
        space, size, agent = self.observations[a], self.obs_sizes[a], self.agents[a]
        try:
            value = value["observation"] if self.masked[a] else value
            if isinstance(space, spaces.Discrete) and not space.contains(value):  # -1 would be the last one
                raise ValueError(f"it is {reprlib.repr(value)}")
            seen: Any = value if isinstance(space, spaces.Box) else spaces.flatten(space, value)
            seen = np.asarray(seen) if self.has_pictures else np.ravel(seen)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise EnvError(f"{self.env_id}: the observation of agent {agent} is not of its space ({reason})") from error
        if seen.dtype.kind not in "biuf":
            why = f"is {form_of(value)}, not numbers of its space {space}"
            raise EnvError(f"{self.env_id}: the observation of agent {agent} {why}")
        if self.has_pictures and seen.dtype != np.uint8:  # numbers from 0 to 1 would all be 0
            raise EnvError(f"{self.env_id}: the observation of agent {agent} is {form_of(seen)}, its space of uint8")
        has, declared = (seen.shape, space.shape) if self.has_pictures else (seen.size, size)
        if has != declared:
            raise EnvError(f"{self.env_id}: the observation of agent {agent} is of size {has}, its space of {declared}")
        return seen

    def legal(self, a: int, obs, info: dict, needed: bool = True) -> np.ndarray | None:
        """The mask of agent a, None where it has none. EnvError if it is no mask, or comes and goes."""
        agent, size = self.agents[a], self.action_sizes[a]
        holder, where = (obs, "observation") if self.masked[a] else (info.get(agent) or {}, "info")
        if not isinstance(holder, Mapping):
            raise EnvError(f"{self.env_id}: the {where} of agent {agent} is {form_of(holder)}, not a dict")
        mask = holder.get("action_mask")
        if self.says_legal.setdefault(a, self.masked[a] or mask is not None) is (mask is None) and needed:
            why = "is there at some steps and not at others: it must always be there, or never"
            raise EnvError(f"{self.env_id}: the action_mask of agent {agent} {why}")
        if mask is None:
            return None
        mask = np.asarray(mask)
        if mask.shape != (size,):
            raise EnvError(f"{self.env_id}: agent {agent} has {size} actions and an action_mask {mask.shape}")
        if not MASKS.issuperset(mask.tolist()):  # 0 and -inf would be read the other way round
            has = reprlib.repr(mask.tolist())
            raise EnvError(f"{self.env_id}: the action_mask of agent {agent} must be of 0 and 1, not {has}")
        return mask

    def joint(self, obs: np.ndarray) -> np.ndarray:
        """The state of environments that have none, from obs (A, D) or pictures (A, H, W, C)."""
        return np.concatenate(obs, axis=-1) if self.has_pictures else obs.ravel()  # (H, W, A * C) or (A * D,)

    def fields(self, num_envs: int) -> dict[str, tuple]:
        """Shape and type of all that N environments read and write."""
        N, A, K = num_envs, len(self.agents), max(self.action_sizes)
        obs, state = self.observation_space, self.state_space
        return {
            "action": ((N, A, K), np.float32) if self.continuous else ((N, A), np.int64),
            **dict.fromkeys(("obs", "final_obs"), ((N, *obs.shape), obs.dtype)),
            **dict.fromkeys(("state", "final_state"), ((N, *state.shape), state.dtype)),
            **dict.fromkeys(("action_mask", "final_action_mask"), ((N, A, K), np.bool_)),
            **dict.fromkeys(("agent_mask", "final_agent_mask"), ((N, A), np.bool_)),
            "reward": ((N, A), np.float32),
            **dict.fromkeys(("termination", "truncation", "battle_won"), ((N,), np.bool_)),
        }


def form_of(value) -> str:
    """What a value is that should be numbers, for a message."""
    if isinstance(value, dict):
        return f"a dict with {', '.join(map(repr, value))}"
    return f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


def pictures(*shape: int) -> spaces.Box:
    return spaces.Box(0, 255, shape, np.uint8)


def open_block(memory: int, pickled: bytes, options: dict, num_envs: int, first: int, last: int) -> "Block":
    """What a worker works on: environments first to last - 1 of N, of the name or the class that is pickled."""
    name = pickle.loads(pickled)
    env_id = f"pz/{name}" if isinstance(name, str) else called(name)
    with building(env_id, options):
        envs = [build(name, options) for _ in range(first, last)]
    layout = Layout(env_id, envs[0])
    return Block(envs, layout, share(layout.fields(num_envs), memory), first, in_worker=True)


class Block:
    """Environments first, first + 1, ... of N, stepped one after another on their rows of the shared arrays."""

    action: np.ndarray  # these are what Layout.fields says
    obs: np.ndarray
    final_obs: np.ndarray
    state: np.ndarray
    final_state: np.ndarray
    action_mask: np.ndarray
    final_action_mask: np.ndarray
    agent_mask: np.ndarray
    final_agent_mask: np.ndarray
    reward: np.ndarray
    termination: np.ndarray
    truncation: np.ndarray
    battle_won: np.ndarray

    def __init__(self, envs: list, layout: Layout, arrays: dict[str, np.ndarray], first: int, in_worker: bool = False):
        self.envs, self.layout, self.first, self.in_worker = envs, layout, first, in_worker
        for key, array in arrays.items():
            setattr(self, key, array[first : first + len(envs)])
        self.ended = np.zeros_like(self.agent_mask)  # agents that are done while the episode goes on
        self.listed = np.zeros_like(self.agent_mask)  # those in env.agents
        self.rngs = [np.random.default_rng() for _ in envs]

    def reset(self, seeds: list[int] | None) -> None:
        if seeds is not None and self.in_worker:  # environments that draw from these repeat, too
            random.seed(seeds[self.first])
            np.random.seed(seeds[self.first] % 2**32)  # noqa: NPY002
        for i in range(len(self.envs)):
            if seeds is not None:
                self.rngs[i] = np.random.default_rng(seeds[self.first + i])
            self.begin(i, None if seeds is None else seeds[self.first + i])

    def step(self) -> None:
        for i, env in enumerate(self.envs):
            try:
                self.step_env(i, env)
            except Exception as error:
                error.add_note(f"in environment {self.first + i} of {self.layout.env_id}")
                raise

    def render(self):
        return self.envs[0].render()

    def close(self) -> None:
        with ExitStack() as stack:  # all of them, whatever is wrong with one
            for env in self.envs:
                stack.callback(env.close)

    def begin(self, i: int, seed: int | None = None) -> None:
        """Start the next episode of environment i."""
        returned = self.envs[i].reset(seed=int(self.rngs[i].integers(2**31)) if seed is None else seed)
        obs, info = self.layout.check_reset(self.envs[i], returned)
        self.ended[i] = False
        self.agent_mask[i] = self.listed[i] = [agent in self.envs[i].agents for agent in self.layout.agents]
        self.write(i, self.obs, self.state, self.action_mask, obs, info)

    def step_env(self, i: int, env) -> None:
        agents, alive = self.layout.agents, self.agent_mask[i].copy()
        actions = {agents[a]: self.env_action(i, a) for a in np.flatnonzero(alive).tolist()}
        returned = env.step(actions)
        try:
            self.take(i, env, actions, alive, returned)
        except Exception:
            self.layout.check_step(returned)
            raise

    def take(self, i: int, env, actions: dict, alive: np.ndarray, returned) -> None:
        """Write what step() returned into row i, and begin the next episode where this one ends."""
        agents = self.layout.agents
        obs, reward, termination, truncation, info = returned
        ends = {"terminations": termination, "truncations": truncation}
        self.layout.check_agents("step", actions, rewards=reward, **ends)
        self.layout.check_agents("step", env.agents, observations=obs)
        self.layout.check_present(env.agents)
        self.layout.check_all(actions, "which acted", rewards=reward)
        gone = [agent for agent in actions if agent not in env.agents]
        self.layout.check_all(gone, "whose last step it was", **({} if env.agents else ends))
        self.reward[i] = [reward.get(agent, 0) * was for agent, was in zip(agents, alive)]
        terminated = np.array([bool(termination.get(agent)) for agent in agents])
        truncated = np.array([bool(truncation.get(agent)) for agent in agents])
        listed, before = np.array([agent in env.agents for agent in agents]), self.listed[i].copy()
        self.ended[i] &= before | ~listed  # who was gone and is there again is alive again
        self.ended[i] |= terminated | truncated
        self.listed[i] = listed
        living = listed & ~self.ended[i]
        done = not living.any()
        cut_off = alive & truncated & ~terminated  # whose last observations have a value
        self.truncation[i] = done and cut_off.any()
        self.termination[i] = done and not self.truncation[i]
        if done and self.layout.has_battles:
            self.battle_won[i] = env.battle_won
        if done:  # agent_mask still has those who lived until now: they have a last observation
            last = [agents[a] for a in np.flatnonzero(cut_off)]
            self.layout.check_all(last, "whose last step it was", observations=obs)
            self.final_agent_mask[i] = alive & ~terminated
            if self.truncation[i]:  # who dies in its last step is as dead to critics as who died before
                self.agent_mask[i] = self.final_agent_mask[i]
            self.write(i, self.final_obs, self.final_state, self.final_action_mask, obs, info)
            self.begin(i)
        else:
            self.layout.check_all([agents[a] for a in np.flatnonzero(living)], "which plays on", observations=obs)
            self.agent_mask[i] = living
            self.write(i, self.obs, self.state, self.action_mask, obs, info)

    def env_action(self, i: int, a: int):
        space = self.layout.actions[a]
        if not self.layout.continuous:
            return int(self.action[i, a]) + int(space.start)
        action = self.action[i, a, : self.layout.action_sizes[a]].reshape(space.shape).astype(space.dtype)
        return np.clip(action, space.low, space.high, out=action)  # a bound of float64, rounded, may lie outside

    def write(self, i: int, obs_rows, state_rows, mask_rows, obs: dict, info: dict) -> None:
        """Fill row i with what the agents in agent_mask see; the others see zeros."""
        lay, alive = self.layout, self.agent_mask[i].tolist()
        needed = mask_rows is self.action_mask or self.truncation[i]  # after a termination it may be left out
        mask_rows[i] = lay.real_actions
        for a, agent in enumerate(lay.agents):
            if not alive[a] or agent not in obs:
                obs_rows[i, a], mask_rows[i, a], mask_rows[i, a, 0] = 0, False, True
                continue
            mask = lay.legal(a, obs[agent], info, needed)
            value = lay.seen(a, obs[agent])
            if lay.has_pictures:
                obs_rows[i, a] = value
            else:
                obs_rows[i, a, : lay.obs_sizes[a]] = value
            if mask is not None:
                mask_rows[i, a, : lay.action_sizes[a]] = mask
                mask_rows[i, a, 0] |= not mask_rows[i, a].any()
        try:
            state = self.envs[i].state() if lay.has_state else lay.joint(obs_rows[i])
        except Exception:  # multiwalker has no state() of walkers that fell
            if not self.ended[i].any():
                raise
            state = self.state[i]
        if (has := np.size(state)) != (first := state_rows[i].size):
            if (self.listed[i] & ~self.ended[i]).any():  # a critic would see the last one until the episode ends
                raise EnvError(f"{lay.env_id}: state() is of size {has}, and was of {first} after the first reset()")
            state = self.state[i]  # nobody is left whom it could be of
        state_rows[i] = np.reshape(state, lay.state_space.shape)


class PettingZooVectorEnv(MultiAgentVectorEnv):
    """N copies of a PettingZoo environment; see the module's docstring.

    A worker that raises or dies ends all workers and raises WorkerError, with its traceback or a line that names it.
    `close()` may be called twice; garbage collection calls it, and workers end with this process, however it ends.
    """

    def __init__(
        self, env_id: str, name: str | Callable, env, layout: Layout, num_envs: int, num_workers: int, options: dict
    ):
        self.env_id, self.render_mode = env_id, options.get("render_mode")
        self.block: Block | None = None
        self.statistics: EpisodeStatistics | None = None
        self.workers: list[Worker] = []
        self.has_battles = layout.has_battles
        agents = tuple(map(str, layout.agents))
        sizes = layout.obs_sizes, layout.action_sizes, math.prod(layout.state_space.shape)
        self._set_spaces(num_envs, agents, *sizes, layout.bounds, layout.observation_space, layout.state_space)
        if self.continuous:
            low, high = (bound.astype(np.float64) for bound in (layout.bounds.low, layout.bounds.high))
            slack = np.where(np.isfinite(high - low), 1e-6 * (high - low), 0)  # for roundings of other units
            self.lowest, self.highest = low - slack, high + slack  # (A, K)
        if num_workers == 0:
            envs = [env, *(build(name, options) for _ in range(num_envs - 1))]
            self.arrays = share(layout.fields(num_envs))
            self.block = Block(envs, layout, self.arrays, 0)
            return
        env.close()
        try:
            pickled = cloudpickle.dumps(name)
        except Exception as error:  # of any kind: it holds a file, a lock, ...
            raise EnvError(f"{env_id} cannot be sent to workers ({error}); num_workers=0 does without") from error
        memory = new_memory()
        cuts = [num_envs * w // num_workers for w in range(num_workers + 1)]
        try:
            self.arrays = share(layout.fields(num_envs), memory)
            for w, (first, last) in enumerate(itertools.pairwise(cuts)):
                label = f"{env_id}: worker {w} (pid {{pid}}, environments {first} to {last - 1})"
                arguments = pickled, options, num_envs, first, last
                self.workers.append(Worker(label, "cleanmarl.envs.pz:open_block", memory, *arguments))
            for worker in self.workers:
                worker.receive()
        except BaseException:
            self.close()
            raise
        finally:
            os.close(memory)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Start an episode everywhere; without a seed, each environment's sequence of episodes goes on."""
        self._call("reset", None if seed is None else env_seeds(seed, self.num_envs))
        self._check_alive()
        self.statistics = EpisodeStatistics(self.num_envs, self.num_agents)
        return self.arrays["obs"].copy(), self._info()

    def step(self, action: np.ndarray):
        """One step everywhere. Raises EnvError for an action that cannot be taken, before any environment moves."""
        if self.statistics is None:
            raise EnvError(f"{self.env_id}: call reset() before step(), and not after close()")
        self.arrays["action"][:] = self._checked(action)
        alive = self.arrays["agent_mask"].copy()
        self._call("step")
        reward, termination, truncation = (self.arrays[key].copy() for key in ("reward", "termination", "truncation"))
        self.statistics.add(reward)
        info, done = self._info(), termination | truncation
        self._check_alive()
        if self.team_reward:
            self._check_team(reward, alive)
        if done.any():
            for key in ("final_obs", "final_state", "final_action_mask", "final_agent_mask"):
                info[key] = np.zeros_like(self.arrays[key])
                info[key][done] = self.arrays[key][done]
            info["_final_obs"] = done.copy()
            battles = {"battle_won": self.arrays["battle_won"].copy()} if self.has_battles else {}
            self.statistics.end(done, info, **battles)
        return self.arrays["obs"].copy(), reward, termination, truncation, info

    def render(self):
        """Frame (height, width, 3) uint8 of environment 0 with render_mode="rgb_array"; None with "human"."""
        return self._call("render", only=1)

    def close_extras(self, **kwargs) -> None:
        stop(self.workers)
        if self.block is not None:
            self.block.close()
        self.arrays = {}  # the shared memory goes with the last view of it
        self.block = self.statistics = None

    def _info(self) -> dict[str, np.ndarray]:
        return {key: self.arrays[key].copy() for key in ("state", "action_mask", "agent_mask")}

    def _call(self, command: str, *arguments, only: int | None = None):
        """Have all blocks, or the first `only`, carry out a command at the same time; the reply of the first."""
        if self.closed:
            raise EnvError(f"{self.env_id}: it is closed")
        if self.block is not None:
            return getattr(self.block, command)(*arguments)
        try:
            return call(self.workers[:only], command, *arguments)
        except BaseException:  # an answer may be under way, so the workers are of no more use
            self.close()
            raise

    def _check_alive(self) -> None:
        """EnvError where an agent is not there though none may die: learners would take it for a living one."""
        missing = ~self.arrays["agent_mask"].all(0)
        if missing.any() and not self.may_die:
            agent = self.agents[missing.argmax()]
            raise EnvError(f"{self.env_id}: {agent} is gone, or not there yet, and may_die is False")

    def _check_team(self, reward: np.ndarray, alive: np.ndarray) -> None:
        """EnvError where agents that were alive (N, A) do not earn the same: learners would take the mean of it."""
        least, most = (np.where(alive, reward, x) for x in (np.inf, -np.inf))
        differ = most.max(-1) - least.min(-1) > 1e-4 * np.abs(np.where(alive, reward, 0)).max(-1).clip(1)
        if differ.any():
            n = differ.argmax()
            a, b = least[n].argmin(), most[n].argmax()
            earn = f"{self.agents[a]} earns {reward[n, a]} and {self.agents[b]} {reward[n, b]}"
            raise EnvError(f"{self.env_id}: environment {n}: {earn} in one step, and team_reward is True")

    def _checked(self, action) -> np.ndarray:
        """`action` with zeros for dead agents and for actions that an agent does not have."""
        action, shape = np.asarray(action), self.arrays["action"].shape
        alive, legal = self.arrays["agent_mask"], self.arrays["action_mask"]
        if action.shape != shape or action.dtype.kind not in ("f" if self.continuous else "iu"):
            want = f"{'floats' if self.continuous else 'integers'} of shape {shape}"
            raise EnvError(f"{self.env_id}: actions must be {want}, not {action.dtype} of shape {action.shape}")
        if self.continuous:
            taken = alive[..., None] & self.real_actions
            action = np.where(taken, action, 0)
            outside = taken & ~(np.isfinite(action) & (action >= self.lowest) & (action <= self.highest))
            wrong = outside.any(-1)
        else:
            action = np.where(alive, action, 0)
            wrong = ~((action[..., None] == np.arange(legal.shape[-1])) & legal).any(-1)
        if wrong.any():
            from cleanmarl.finite import NonFiniteError, is_finite  # it imports torch, which workers do without

            n, a = np.argwhere(wrong)[0]
            if not is_finite(obs := self.arrays["obs"][n, a]):  # the next check of a rollout would come too late
                what = f"the observation of agent {a} is {obs[~np.isfinite(obs)][0]} in environment {n}"
                raise NonFiniteError(f"{self.env_id}: {what}, and its action is {action[n, a]}")
            if self.continuous:
                k = outside[n, a].argmax()
                space: Any = self.single_action_space
                why = f"not finite or out of bounds: number {k} must be from {space.low[a, k]} to {space.high[a, k]}"
            else:
                why = f"illegal, legal are {np.flatnonzero(legal[n, a]).tolist()}"
            raise EnvError(f"{self.env_id}: environment {n}, agent {self.agents[a]}: action {action[n, a]} is {why}")
        return action
