"""One vector interface over every multi-agent environment family, chosen by `family/name`.

`make("mpe/simple_spread_v3", num_envs=8)` returns a `MultiAgentVectorEnv`: Gymnasium's vector API with an agent axis.
N = environments, A = agents, D = widest observation, K = widest action set, S = size of the global state:

    obs, info = envs.reset(seed=1)                                      # obs (N, A, D) float32
    obs, reward, termination, truncation, info = envs.step(action)      # action (N, A) int64, or (N, A, K) float32
    # reward (N, A) float32; termination, truncation (N,) bool
    info["state"]           # (N, S) float32
    info["action_mask"]     # (N, A, K) bool, True = legal
    info["agent_mask"]      # (N, A) bool, True = alive

Autoreset is SAME_STEP: where an episode ends, all of these already belong to the next one, and `info` also has

    info["final_obs"]       # (N, A, D), with final_state and both final masks: rows of the episodes that ended
    info["episode"]         # r (N, A) return per agent, l (N,) length, t (N,) seconds, battle_won (N,) where known
    info["_final_obs"]      # (N,) bool, with _episode: which environments ended an episode

Agents with different spaces are padded to the widest: observations with zeros, actions with illegal ones.

Pictures keep their shape and type where a script asks for them, `make(..., pictures=True)`: then obs and final_obs are
(N, A, H, W, C) uint8, and so is the state, (N, H, W, C). `single_observation_space` and `single_state_space` say which.
"""

import ast
import copy
import difflib
import functools
import importlib
import inspect
import math
import os
import re
import sys
import time
import traceback
import urllib.parse
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from cleanmarl.machine import too_large

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

FAMILIES = {  # family -> what it is; each is a module of this package, imported when first asked for
    "mpe": "multi-particle environments, batched in NumPy, equal to mpe2 step for step",
    "matrix": "cooperative matrix games, batched in NumPy",
    "jumanji": "multi-agent tasks of Jumanji in envpool's C++",
    "pgx": "two-player games of Pgx in envpool's C++: who is not to move waits",
    "lbf": "level-based foraging, batched in NumPy, equal to the package lbforaging step for step",
    "rware": "robot warehouse, batched in NumPy, equal to the package rware step for step",
    "smaclite": "StarCraft's micromanagement without StarCraft, the package smaclite, in worker processes",
    "smax": "StarCraft-like battles of JaxMARL, compiled by JAX on the CPU",
    "pz": "any PettingZoo parallel environment, pz/<package>/<name> or pz/my_module:MyEnv, in worker processes",
}


ENV_BYTES = 4000  # the least that a Gymnasium environment takes: CartPole with its wrappers has 5,100
BATCHED_BYTES = 100  # the same where a family steps all of them at once, without a word of what they see
MADE: weakref.WeakSet = weakref.WeakSet()  # by make and make_gymnasium


def close_all() -> None:
    """Those of a run that a signal or an error has ended: what they have started, as a simulator, ends with them."""
    for envs in list(MADE):
        with suppress(Exception):
            envs.close()  # does nothing where they are closed


class EnvError(ValueError):
    """A wish that cannot be met, in one line: unknown id, missing package, illegal action, too little memory."""


class WorkerError(RuntimeError):
    """A worker process died, which is told in one line, or failed, which comes with its traceback."""


def check_memory(what: str, num_bytes: float) -> None:
    """Raises EnvError with the gigabytes that it would take, if this machine has less."""
    if message := too_large(what, num_bytes):
        raise EnvError(message)


class MultiAgentVectorEnv(gym.vector.VectorEnv):
    """What every family implements: the interface in this module's docstring.

    No later step writes into arrays that it has returned: scripts look at what was seen before a step when it is done.

    Subclasses set the attributes below, then `observation_space` and `action_space` follow from `_set_spaces`.

    What an algorithm must know of a task it reads from two of them; nobody has to find it out by playing:

    `team_reward`: every agent's reward is the team's, so all living agents earn the same at every step. The dead have
    reward 0 in the arrays of this interface; what the team earns is what any of the living earns.
    `may_die`: agents may be gone before their episode ends, as `agent_mask` tells. If False, it is True everywhere.

    Only together do they raise the question what a death means: an agent of a team goes on earning, through the others,
    after its death (`smaclite`, `smax`); for one with a reward of its own, death is the end.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_fps": 10}  # noqa: RUF012
    single_observation_space: gym.spaces.Box  # (A, D) float32, or pictures (A, H, W, C) uint8
    agents: tuple[str, ...]  # names, in the order of the agent axis
    num_agents: int
    obs_sizes: np.ndarray  # (A,) true observation size of each agent, D is the largest; H * W * C of pictures
    action_sizes: np.ndarray  # (A,) number of actions (discrete) or action dimension (continuous) of each agent
    state_size: int
    single_state_space: gym.spaces.Box  # (S,) float32, or a picture (H, W, C) uint8
    continuous: bool = False
    team_reward: bool = False
    may_die: bool = True  # what is assumed where nothing is known
    time_limit: int | None = None  # the most steps of an episode, where it is known

    def _set_spaces(
        self,
        num_envs: int,
        agents: Sequence[str],
        obs_sizes,
        action_sizes,
        state_size: int,
        action_space: gym.spaces.Box | None = None,
        observation_space: gym.spaces.Box | None = None,
        state_space: gym.spaces.Box | None = None,
    ):
        """Common attributes; `action_space` (A, K) Box for continuous actions, else MultiDiscrete over the agents.

        `observation_space` and `state_space` are given where they are pictures.
        """
        self.num_envs, self.agents, self.num_agents = num_envs, tuple(agents), len(agents)
        self.obs_sizes, self.action_sizes = np.asarray(obs_sizes), np.asarray(action_sizes)
        self.state_size = int(state_size)
        shape = (self.num_agents, int(self.obs_sizes.max()))
        seen = sum(math.prod(space.shape) * space.dtype.itemsize for space in (observation_space, state_space) if space)
        seen = seen or 4 * (math.prod(shape) + self.state_size)
        check_memory(f"what {num_envs:,} environments with {self.num_agents:,} agents show", 3.0 * num_envs * seen)
        self.single_observation_space = observation_space or gym.spaces.Box(-np.inf, np.inf, shape, np.float32)
        self.single_state_space = state_space or gym.spaces.Box(-np.inf, np.inf, (self.state_size,), np.float32)
        self.single_action_space = action_space or gym.spaces.MultiDiscrete(self.action_sizes)
        self.continuous = isinstance(self.single_action_space, gym.spaces.Box)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        # (A, K): which actions exist for each agent; the static mask of environments without illegal actions
        self.real_actions = np.arange(self.action_sizes.max()) < self.action_sizes[:, None]

    def snapshot(self) -> dict[str, Any] | None:
        """All that decides what comes next, in nested dicts and lists of arrays and numbers; None if it cannot be had.

        It can where the state is NumPy arrays of this process, not where it lies in worker processes, in C++ or in JAX.
        """
        return None

    def restore(self, snapshot: dict[str, Any]) -> tuple[np.ndarray, dict[str, Any]]:
        """Go on from where environments of the same options were; (obs, info) as after their last step or reset."""
        raise NotImplementedError


class EpisodeStatistics:
    """Return per agent, length and wall time of the episodes under way in N environments, exact under autoreset."""

    def __init__(self, num_envs: int, num_agents: int):
        self.returns = np.zeros((num_envs, num_agents), np.float64)
        self.lengths = np.zeros(num_envs, np.int64)
        self.started = np.full(num_envs, time.perf_counter())

    def snapshot(self) -> dict[str, np.ndarray]:
        """Returns and lengths so far; the wall time of what is under way counts anew after `restore`."""
        return {"returns": self.returns.copy(), "lengths": self.lengths.copy()}

    def restore(self, snapshot: dict[str, np.ndarray]) -> None:
        self.returns[:], self.lengths[:] = snapshot["returns"], snapshot["lengths"]

    def add(self, reward: np.ndarray) -> None:
        """Count one step of every environment. reward: (N, A)."""
        self.returns += reward
        self.lengths += 1

    def end(self, done: np.ndarray, info: dict[str, Any], **extra: np.ndarray) -> None:
        """Write `episode` and `_episode` for the environments in `done` (N,) into info and start their next episode."""
        now = time.perf_counter()
        episode = {"r": self.returns, "l": self.lengths, "t": now - self.started, **extra}
        info["episode"] = {
            key: np.where(done.reshape(-1, *[1] * (np.ndim(value) - 1)), value, 0) for key, value in episode.items()
        }
        info["_episode"] = done.copy()
        self.returns[done], self.lengths[done], self.started[done] = 0, 0, now


def check_actions(env_id: str, agents: tuple[str, ...], action, mask: np.ndarray) -> np.ndarray:
    """Discrete actions (N, A) as int64, all of them legal by mask (N, A, K).

    Raises EnvError with a line that names environment, agent and action.
    """
    action = np.asarray(action)
    if action.shape != mask.shape[:2]:
        raise EnvError(f"{env_id}: actions must be integers of shape {mask.shape[:2]}, not of shape {action.shape}")
    legal, whole = ((action[..., None] == np.arange(mask.shape[-1])) & mask).any(-1), action.dtype.kind in "iu"
    if not (whole and legal.all()):
        n, a = np.unravel_index(legal.argmin(), legal.shape)
        choices = np.flatnonzero(mask[n, a]).tolist()
        why = f"illegal, legal are {choices}" if whole else f"no integer, but {action.dtype}"
        raise EnvError(f"{env_id}: environment {n}, agent {agents[a]}: action {action[n, a]} is {why}")
    return action.astype(np.int64, copy=False)


def env_seeds(seed: int | None, num_envs: int) -> list[int]:
    """One independent seed per environment; environment i gets the same one whatever `num_envs` is."""
    return [int(s) for s in np.random.SeedSequence(seed).generate_state(num_envs)]


def make(
    env_id: str | Callable, num_envs: int = 1, *, discrete: bool | None = None, pictures: bool = False, **options
) -> MultiAgentVectorEnv:
    """Build `num_envs` copies of the multi-agent environment `family/name`.

    In place of an id it takes a class or a function that returns a PettingZoo parallel environment, `MyEnv(**options)`.
    `discrete` says which actions the script needs, True or False (continuous); None takes both. With `pictures` agents
    may see pictures, obs (N, A, H, W, C) uint8; without, observations are always vectors (N, A, D) float32.
    `options` go to the environment: `max_cycles`, `continuous_actions`, `render_mode`, for `mpe/simple_spread_v3` also
    `N` and `local_ratio`, and so on; `num_workers` for the families that run in worker processes. They may stand in the
    id too, which is how a command line gives them: `mpe/simple_spread_v3?N=5&local_ratio=0`.
    Raises EnvError with one line for an unknown id (naming near ones), a missing package, an option nobody knows, or
    actions or observations that the script cannot take.
    """
    in_id: dict[str, Any] = {}
    name: str | Callable
    if isinstance(env_id, str):
        env_id, in_id = split_options(env_id)
        family, _, name = env_id.partition("/")
    else:
        family, name, env_id = "pz", env_id, called(env_id)
    options = in_id | options
    if num_envs < 1:
        raise EnvError(f"num_envs must be at least 1, not {num_envs}")
    check_memory(f"{env_id}: {num_envs:,} environments", num_envs * BATCHED_BYTES)
    for key in {"num_envs", "name", "pictures"} & in_id.keys():
        raise EnvError(f"{env_id}: {key} is no option of an environment")
    for key in {"max_cycles", "max_steps", "max_episode_steps"} & options.keys():
        value, may_be_none = options[key], family in ("pz", "rware", "smaclite")
        is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not is_number and not (value is None and may_be_none):
            raise EnvError(f"{env_id}: {key} must be an integer of at least 1, not {value!r}")
    if family not in FAMILIES:
        near = difflib.get_close_matches(family, FAMILIES, n=1)
        near = [f"{near[0]}/{name}"] if near else [f"{f}/..." for f in FAMILIES]
        near = [f"pz/{env_id}"] if ":" in env_id else near  # a class of the user's
        near = [f"mpe/{env_id}"] if env_id.startswith("simple") else near
        near = [f"pz/{env_id}"] if family in ("atari", "butterfly", "classic", "magent2", "mpe2", "sisl") else near
        hint = f"multi-agent ids are family/name; did you mean {' or '.join(near)}?"
        if env_id in gym.registry:
            raise EnvError(f"{env_id} is for one agent and this script is for many: try ppo.py")
        raise EnvError(f"unknown environment {env_id!r}: {hint}")
    envs = importlib.import_module(f"cleanmarl.envs.{family}").make(name, num_envs, **options)
    try:
        check_spaces(env_id, envs, discrete, pictures)
    except EnvError:
        envs.close()
        raise
    MADE.add(envs)
    return envs


def check_spaces(env_id: str, envs: MultiAgentVectorEnv, discrete: bool | None, pictures: bool) -> None:
    """Raises EnvError if the script that made `envs` cannot take their actions or observations, see `make`."""
    if discrete is not None and envs.continuous == discrete:
        has, needs = ("continuous", "discrete") if discrete else ("discrete", "continuous")
        hint = "a ..._continuous_action.py" if discrete else "the script without _continuous_action"
        if not discrete and env_id.startswith(("mpe/", "pz/mpe2/")):
            hint += ", or continuous_actions=True in the id"
        raise EnvError(f"{env_id} has {has} actions and this script needs {needs} ones: try {hint}")
    if len(envs.single_observation_space.shape) > 2 and not pictures:
        shape = envs.single_observation_space.shape[1:]
        hint = 'see docs/environments.md, "Pictures for many agents"'
        raise EnvError(f"{env_id} has pictures {shape} and this script needs vectors: {hint}")


def split_options(env_id: str) -> tuple[str, dict[str, Any]]:
    """ "mpe/simple_spread_v3?N=5" -> "mpe/simple_spread_v3", {"N": 5}."""
    name, mark, query = env_id.partition("?")
    try:
        pairs = urllib.parse.parse_qsl(query or mark, keep_blank_values=True, strict_parsing=True) if mark else []
    except ValueError:
        raise EnvError(f"{env_id}: the options of an id are name=value, joined by &") from None
    options = {key: _literal(value) for key, value in pairs}
    if len(options) < len(pairs):
        raise EnvError(f"{env_id}: an option can be given once")
    return name, options


def _literal(text: str) -> Any:
    """5, 0.5, True, None as Python reads them, true and false too, anything else as text."""
    try:
        return ast.literal_eval(text.title() if text in ("true", "false") else text)
    except (ValueError, SyntaxError, TypeError):  # the last: {[]: 1}
        return text


def called(env: str | Callable) -> str:
    """How messages name an environment, which may be a class or a function."""
    return env if isinstance(env, str) else getattr(env, "__qualname__", type(env).__name__)


def search_working_folder() -> None:
    """Let modules of the user be imported from the folder of the shell, last, whatever folder the script is in."""
    package = Path(__file__).resolve().parents[1]
    if sys.path and Path(sys.path[0]).resolve() == package:  # a script run by path; `envs` may be the user's
        del sys.path[0]
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def import_own(env_id: str, name: str) -> ModuleType:
    """The user's module `name`, which `env_id` needs. EnvError with one line if it is not there or fails."""
    search_working_folder()
    try:
        return importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            where = f"neither in {Path.cwd()} nor on the Python path"
            raise EnvError(f"{env_id}: there is no module {error.name}, {where}") from None
        places = [f for f in traceback.extract_tb(error.__traceback__) if "<frozen" not in f.filename]
        inside = [place for place in places if "site-packages" not in place.filename][1:]  # [0] is this function
        where = f" ({Path(inside[-1].filename).name}, line {inside[-1].lineno})" if inside else ""
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise EnvError(f"{env_id}: the module {name} cannot be imported: {reason}{where}") from error


def own_name(env_id: str, module: ModuleType, name: str) -> Callable:
    """What `name` is in a module of the user's; EnvError if there is none, with the nearest names."""
    if not callable(found := getattr(module, name, None)):
        near = difflib.get_close_matches(name, [key for key, value in vars(module).items() if callable(value)], n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise EnvError(f"{env_id}: the module {module.__name__} has no {name}{hint}")
    return found


def unknown_name(env_id: str, known) -> EnvError:
    """The error for a name that its family does not have, with the nearest known ids."""
    family = env_id.partition("/")[0]
    known = [f"{family}/{name}" for name in known]
    near = difflib.get_close_matches(env_id, known, n=3, cutoff=0.4) or sorted(known)[:5]
    return EnvError(f"unknown environment {env_id!r}; did you mean {' or '.join(near)}?")


@contextmanager
def building(env_id: str, options: dict[str, Any]) -> Iterator[None]:
    """EnvError with one line for whatever goes wrong inside, where an environment is built with these options."""
    try:
        yield
    except EnvError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise EnvError(f"{env_id} cannot be built with {options}: {type(error).__name__}: {reason}") from error


class GameStatistics(gym.vector.VectorWrapper):
    """Puts the `episode` that a RecordEpisodeStatistics among the wrappers wrote where one around them all would.

    Inside the wrappers that end an episode with a lost life or clip the reward, it sees whole games and true scores.
    """

    def step(self, action):
        *transition, info = self.env.step(action)
        final_info = info.get("final_info", {})
        return *transition, info | {key: final_info[key] for key in ("episode", "_episode") if key in final_info}


class Stacked(gym.vector.VectorWrapper):
    """Seeds of `env_seeds`, and one line for two errors whose cause is elsewhere.

    Gymnasium's own seeds, seed + i, give environment i of a run to the next run as i - 1.
    """

    def __init__(self, envs: gym.vector.VectorEnv, env_id: str):
        super().__init__(envs)
        self.env_id = env_id
        self.obs: Any = None  # the latest

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        seeds: Any = None if seed is None else env_seeds(seed, self.num_envs)  # a list, which its reset takes too
        try:
            self.obs, info = self.env.reset(seed=seeds, options=options)
        except (TypeError, ValueError) as error:
            self.check_infos(error)
            raise
        return self.obs, info

    def step(self, actions):
        try:
            self.obs, *rest = self.env.step(actions)
        except Exception as error:
            self.check_infos(error)
            self.check_numbers(actions, error)
            raise
        return self.obs, *rest

    def check_numbers(self, actions: np.ndarray, error: Exception) -> None:
        """NonFiniteError if an action was NaN or infinite since an observation was: the environment rejects the one."""
        floats = [x for x in (actions, self.obs) if isinstance(x, np.ndarray) and x.dtype.kind == "f"]
        if [np.isfinite(x).all() for x in floats] == [False, False]:
            from cleanmarl.finite import NonFiniteError  # here, since that module needs this one

            n, *place = np.argwhere(~np.isfinite(self.obs))[0]
            what = f"the observation is {self.obs[n, *place]} in environment {n}, and an action after it is no number"
            raise NonFiniteError(f"{self.env_id}: {what}") from error

    def check_infos(self, error: Exception) -> None:
        """EnvError if it was raised where Gymnasium makes one array of an entry of all environments' infos."""
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        keys = [frame.f_locals.get("key") for frame in frames if frame.f_code.co_name == "_add_info"]  # the inner last
        if keys:
            entry = "".join(f"[{key!r}]" for key in keys)
            what = f"info{entry} is of another kind or shape in one environment than in another, or than before"
            raise EnvError(f"{self.env_id}: {what} ({error})") from error


class OwnFinal(gym.Wrapper):
    """Copies the last observation of an episode: an environment may write that of the reset into the same array.

    Says what an episode was worth that a wrapper around RecordEpisodeStatistics truncates.
    """

    def __init__(self, env: gym.Env):
        super().__init__(env)
        is_box = isinstance(env.observation_space, gym.spaces.Box)
        self.shape, self.dtype = (env.observation_space.shape, env.observation_space.dtype) if is_box else (None, None)
        self.recorder: Any = recorder(env)

    def without_statistics(self, info: dict[str, Any]) -> dict[str, Any]:
        """Without what the environment calls as those are called which come where an episode ends."""
        if "episode" in info or "_episode" in info:
            return {key: value for key, value in info.items() if key not in ("episode", "_episode")}
        return info

    def check(self, method: str, obs) -> None:
        if self.shape is None:
            return
        if type(obs) is np.ndarray and obs.dtype is self.dtype and obs.shape == self.shape:  # what is usual, and fast
            return
        found: Any = np.shape(obs)
        has: Any = self.shape
        if found == has:
            found, has = np.asarray(obs).dtype, self.dtype
            if np.can_cast(found, has, "same_kind"):
                return
        name = self.spec.id if self.spec else self.env
        raise EnvError(f"{name}: {method}() gave an observation {found}, and its observation_space has {has}")

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        obs, info = self.env.reset(seed=seed, options=options)
        self.check("reset", obs)
        return obs, self.without_statistics(info)

    def step(self, action):
        obs, reward, termination, truncation, info = self.env.step(action)
        self.check("step", obs)
        if termination or truncation:
            obs = copy.deepcopy(obs)
            if truncation and self.recorder is not None and "episode" not in info:
                counted = self.recorder
                seconds = time.perf_counter() - counted.episode_start_time
                episode = {"r": counted.episode_returns, "l": counted.episode_lengths, "t": round(seconds, 6)}
                info = {**info, "episode": episode}
        elif info:
            info = self.without_statistics(info)
        return obs, reward, termination, truncation, info


def is_picture(space: gym.Space) -> bool:
    return isinstance(space, gym.spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3


def as_vectors(env: gym.Env, env_id: str) -> gym.Env:
    """`env` with observations (D,): Box flattened, Discrete one-hot. EnvError for pictures and for other spaces."""
    space = env.observation_space
    if not isinstance(space, gym.spaces.Box | gym.spaces.Discrete):
        hint = "let a function of your module return gym.wrappers.FlattenObservation(env), and name it"
        if isinstance(space, gym.spaces.Dict) and "action_mask" in space.spaces:
            hint = "scripts for one agent read no action_mask; ippo.py does, of a PettingZoo environment with one agent"
        raise EnvError(f"this script needs Box or Discrete observations and {env_id} has {space}: {hint}")
    if is_picture(space):
        hint = "see ppo_atari.py, which has a CNN"
        raise EnvError(f"{env_id} has pictures {space.shape} and this script needs vectors: {hint}")
    return env if isinstance(space, gym.spaces.Box) and len(space.shape) == 1 else Flattened(env)


class Flattened(gym.wrappers.FlattenObservation):
    """Says in one line which observation is none of its space."""

    def observation(self, observation):
        try:
            space = self.env.observation_space
            if isinstance(space, gym.spaces.Discrete) and not space.contains(observation):  # -1 would be the last one
                raise ValueError(f"it is {observation!r}")
            return super().observation(observation)
        except Exception as error:
            name, space = self.spec.id if self.spec else self.env, self.env.observation_space
            raise EnvError(f"{name}: an observation is not of its {space} ({type(error).__name__}: {error})") from error


class Checked(gym.Wrapper):
    """Says in one line which of Gymnasium's rules an environment breaks, as those for the old Gym do."""

    def __init__(self, env: gym.Env, env_id: str):
        super().__init__(env)
        self.env_id = env_id
        parameters = inspect.signature(env.unwrapped.reset).parameters.values()
        takes_all = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters)
        for name in ("seed", "options"):
            if not takes_all and name not in {x.name for x in parameters}:
                hint = "Gymnasium's is reset(*, seed=None, options=None) and returns (observation, info)"
                raise EnvError(f"{env_id}: its reset takes no {name}, as in the old Gym; {hint}")

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        returned = self.env.reset(seed=seed, options=options)
        if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], dict):
            raise EnvError(f"{self.env_id}: reset() must return (observation, info), info a dict")
        return returned

    def step(self, action):
        returned = self.env.step(action)
        try:
            _, reward, _, _, info = returned
        except (TypeError, ValueError):  # not five
            info = None
        if not isinstance(info, dict):
            names = "(observation, reward, terminated, truncated, info)"
            raise EnvError(f"{self.env_id}: step() must return {names}, info a dict")
        if type(reward) is not float and (getattr(reward, "ndim", 0) or not hasattr(reward, "__float__")):
            raise EnvError(f"{self.env_id}: the reward of step() must be a number, not {reward!r:.50}")
        return returned


def check_action_space(env: gym.Env, env_id: str, discrete: bool) -> gym.Env:
    """`env` itself. EnvError unless its actions are Discrete, counted from 0, or, if not `discrete`, Box (K,)."""
    space = env.action_space
    if discrete:
        if not isinstance(space, gym.spaces.Discrete):
            sees_pictures = len(env.observation_space.shape or ()) > 1  # for which only scripts of Discrete actions are
            hint = "" if sees_pictures else other_script(space)
            raise EnvError(f"this script needs Discrete actions and {env_id} has {space}{hint}")
        if space.start != 0:
            raise EnvError(f"this script needs actions counted from 0 and {env_id} has {space}")
    elif not is_vector(space):
        raise EnvError(f"this script needs Box actions (K,) of floats and {env_id} has {space}{other_script(space)}")
    return env


def other_script(space: gym.Space) -> str:
    """Where actions of this kind are learned, for a message."""
    if isinstance(space, gym.spaces.Discrete):
        return "; try the script without _continuous_action"
    if isinstance(space, gym.spaces.MultiDiscrete):
        return "; try ppo_multidiscrete.py"
    return "; try a ..._continuous_action.py" if is_vector(space) else ""


def is_vector(space: gym.Space) -> bool:
    """Whether it is Box (K,) of real numbers."""
    return isinstance(space, gym.spaces.Box) and len(space.shape) == 1 and np.issubdtype(space.dtype, np.floating)


def make_gymnasium(
    env_id: str | Callable,
    num_envs: int = 1,
    *,
    discrete: bool | None = None,
    vectors: bool = False,
    wrappers=(),
    **options,
) -> gym.vector.VectorEnv:
    """A Gymnasium vector environment for the single-agent scripts: SAME_STEP autoreset, `episode` statistics in info.

    `module:Id` is an id that a module of the user's registers, `module:MyEnv` a class or function in it that returns an
    environment; in Python, the class or function itself will do.
    `discrete` says which actions the script needs: True for Discrete, counted from 0, False for Box (K,); None takes
    all. With `vectors` observations are (N, D): Box ones are flattened, Discrete ones one-hot, pictures refused.
    `wrappers` are applied to each environment after that, in order; if one of them is Gymnasium's
    RecordEpisodeStatistics, the statistics are what it sees. `options` (`render_mode`, ...) go to the environment's
    constructor. Raises EnvError with one line for an unknown id (naming near ones), a missing package, or spaces that
    the script cannot take.
    """
    if num_envs < 1:
        raise EnvError(f"num_envs must be at least 1, not {num_envs}")
    wanted, env_id = env_id, called(env_id)  # an id, a class or a function
    check_memory(f"{env_id}: {num_envs:,} environments", num_envs * ENV_BYTES)
    if env_id.partition("/")[0] in FAMILIES:
        raise EnvError(f"{env_id} is for many agents and this script is for one: try ippo.py")
    if isinstance(wanted, str) and ":" in wanted:
        module, _, name = env_id.partition(":")
        if "?" in name:
            hint = "here gym.register(..., kwargs={...}) gives them, or a function of your module"
            raise EnvError(f"{env_id}: options in an id are for many agents: {hint}")
        own = import_own(env_id, module)
        wanted = name if name in gym.registry else own_name(env_id, own, name)
    spec: Any = wanted
    if not isinstance(wanted, str):  # an id has no <locals>, as the name of a class in a function has
        spec = gym.envs.registration.EnvSpec(re.sub(r"[^\w.:-]", "", env_id), entry_point=wanted)
    if env_id.startswith("ALE/"):
        try:
            ale_py = importlib.import_module("ale_py")
            gym.register_envs(ale_py)
            ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner for each environment
        except ImportError as error:
            how = "python bootstrap.py atari, or pip install ale-py"
            raise EnvError(f"{env_id} needs the package ale-py: {how}") from error
    if options.get("render_mode") == "rgb_array":
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pictures need no screen
    needed: list[Callable] = [functools.partial(Checked, env_id=env_id)]
    if discrete is not None:
        needed.append(functools.partial(check_action_space, env_id=env_id, discrete=discrete))
    if vectors:
        needed.append(functools.partial(as_vectors, env_id=env_id))
    try:
        with warnings.catch_warnings():  # where an old version is no longer there, the one line says so
            warnings.filterwarnings("ignore", ".* is out of date", DeprecationWarning)
            envs: Any = gym.make_vec(
                spec,
                num_envs,
                vectorization_mode="sync",
                vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
                wrappers=[*needed, *wrappers, OwnFinal],
                disable_env_checker=True,
                **options,
            )
    except gym.error.DependencyNotInstalled as error:
        raise EnvError(f"{env_id} needs a package that is missing: {error}") from error
    except TypeError as error:  # its constructor takes other options
        raise EnvError(f"{env_id} cannot be built with {options}: {error}") from error
    except EnvError:
        raise
    except Exception as error:
        is_known = not isinstance(wanted, str) or wanted in gym.registry
        if is_known or not isinstance(error, gym.error.Error | ImportError):
            reason = str(error).partition("\n")[0]
            raise EnvError(f"{env_id} cannot be built: {type(error).__name__}: {reason}") from error
        near = difflib.get_close_matches(env_id, gym.registry, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise EnvError(f"unknown environment {env_id!r}{hint}") from error
    record = GameStatistics if recorder(envs.envs[0]) else gym.wrappers.vector.RecordEpisodeStatistics
    MADE.add(envs)
    return record(Stacked(envs, env_id))


def recorder(env: gym.Env) -> gym.wrappers.RecordEpisodeStatistics | None:
    """The wrapper of `env` that counts its returns already, as those of games do before lives and clipped rewards."""
    while isinstance(env, gym.Wrapper):
        if isinstance(env, gym.wrappers.RecordEpisodeStatistics):
            return env
        env = env.env
    return None
