"""What many tests share: a small environment of known rules, a run that only counts, rollouts, and a few finders."""

import ast
import inspect
import re
import resource
import time
from contextlib import contextmanager
from pathlib import Path

from cleanmarl.envs import EpisodeStatistics, MultiAgentVectorEnv

import numpy as np
import torch
from gymnasium import spaces
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

LOW = np.float32([[-2, -2, 0, 0], [0, 0, 0, 0], [-np.inf, -np.inf, -np.inf, 0]])  # of components an agent does not
HIGH = np.float32([[4, 4, 0, 0], [1, 1, 1, 1], [np.inf, np.inf, np.inf, 0]])  # have: 0


class Toy(MultiAgentVectorEnv):
    """Three agents with different spaces, episodes of 6 steps (terminated in even environments, truncated in odd ones).

    Agent 1 dies after its third step, agent 2 with the sixth. Rewards while they live: the clock after the step for
    all with `team_reward`, else i + 1 for agent i. The parity of the clock forbids agent 2's action 0 or 1.

    `see` is "clock": agent i sees clock + i, the state is the clock and its square; "noise": all normally distributed;
    or "past": numbers that depend on the environment, the clock and all actions of the episode so far.
    `varied`: episodes of environment n have 5 + n % 3 steps. `first`: the number n of the first environment.
    `continuous`: 2, 4 and 3 components of actions in [-2, 4], [0, 1] and without bounds.
    `picture`: agents see (12, 16, 3) uint8, in which row i and column `clock` are bright; so is the state's column.
    `actions` and `rewards` keep what has come and gone since the reset, `ends` (final_obs, final_state) where one was.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        team_reward: bool = False,
        may_die: bool = True,
        see: str = "clock",
        varied: bool = False,
        first: int = 0,
        continuous: bool = False,
        picture: bool = False,
    ):
        obs_sizes, action_sizes, more = [2, 3, 1], [2, 4, 3], {}
        if picture:
            obs_sizes = [12 * 16 * 3] * 3
            more["observation_space"] = spaces.Box(0, 255, (3, 12, 16, 3), np.uint8)
            more["state_space"] = spaces.Box(0, 255, (12, 16, 3), np.uint8)
        box = spaces.Box(LOW, HIGH) if continuous else None
        self._set_spaces(num_envs, ("a", "b", "c"), obs_sizes, action_sizes, 12 * 16 * 3 if picture else 2, box, **more)
        self.team_reward, self.may_die, self.see, self.picture = team_reward, may_die, see, picture
        self.index = first + np.arange(num_envs)
        self.length = 5 + self.index % 3 if varied else np.full(num_envs, 6)
        self.random = np.random.default_rng(0)
        self.reset()

    def reset(self, *, seed=None, options=None):
        self.statistics = EpisodeStatistics(self.num_envs, 3)
        self.clock, self.past = np.zeros((2, self.num_envs), np.int64)
        self.actions, self.rewards, self.ends = [], [], []
        self.now = self.look()
        return self.now

    def step(self, action):
        mask, alive = self.now[1]["action_mask"], self.now[1]["agent_mask"]
        if self.continuous:
            assert action.dtype == np.float32 and action.shape == mask.shape
            assert (action[:, ~self.real_actions] == 0).all(), "a component that does not exist"
            space = self.single_action_space
            assert ((action >= space.low) & (action <= space.high))[alive].all(), "beyond the bounds"
        else:
            assert np.take_along_axis(mask, action[..., None], -1)[..., 0][alive].all(), "an illegal action"
            self.past = (2 * self.past + (action * alive).sum(1)) % 17
        self.clock = self.clock + 1
        reward = self.reward(alive)
        self.actions.append(action.copy())
        self.rewards.append(reward)
        self.statistics.add(reward)
        ended, odd = self.clock == self.length, self.index % 2 == 1
        final_obs, final = self.look()
        self.clock[ended] = self.past[ended] = 0
        self.now = obs, info = self.look() if ended.any() else (final_obs, final)
        if ended.any():
            info = (
                info | {f"final_{key}": x for key, x in final.items()} | {"final_obs": final_obs, "_final_obs": ended}
            )
            for key in ("final_obs", "final_state", "final_action_mask", "final_agent_mask"):
                info[key] = info[key].copy()
                info[key][~ended] = 0
            self.ends.append((info["final_obs"], info["final_state"]))
            self.statistics.end(ended, info)
        return obs, reward, ended & ~odd, ended & odd, info

    def snapshot(self):
        random = self.random.bit_generator.state
        return {"clock": self.clock, "past": self.past, "random": random, "now": self.now} | self.statistics.snapshot()

    def restore(self, snapshot):
        self.reset()
        self.clock, self.past, self.now = snapshot["clock"], snapshot["past"], snapshot["now"]
        self.random.bit_generator.state = snapshot["random"]
        self.statistics.restore(snapshot)
        return self.now

    def look(self):
        """What agents see now, and the state with the masks; the dead see zeros and may do nothing but action 0."""
        alive = np.ones((self.num_envs, 3), bool)
        if self.may_die:
            alive[:, 1], alive[:, 2] = self.clock < 3, self.clock < 6
        mask = np.tile(self.real_actions, (self.num_envs, 1, 1))
        if not self.continuous:
            mask[np.arange(self.num_envs), 2, self.clock % 2] = False
            mask[~alive] = np.arange(4) == 0
        obs, state = self.see_pictures() if self.picture else self.see_vectors()
        obs[~alive] = 0
        return obs, {"state": state, "action_mask": mask, "agent_mask": alive}

    def see_vectors(self):
        """obs (N, 3, 3), state (N, 2)."""
        agent, clock, N = np.arange(3), self.clock[:, None], self.num_envs
        if self.see == "noise":
            obs, state = self.random.normal(size=(N, 3, 3)), self.random.normal(size=(N, 2))
        elif self.see == "past":
            index, past = self.index[:, None], self.past[:, None]
            obs = np.tile((np.sin(clock + 2 * agent + index) + 0.1 * past)[..., None], 3)
            state = np.concatenate([np.sin(clock + index), np.cos(clock + index)], 1) + 0.1 * past
        else:
            obs, state = np.tile((clock + agent)[..., None], 3), np.concatenate([clock, clock**2], 1)
        return (obs * (np.arange(3) < self.obs_sizes[:, None])).astype(np.float32), state.astype(np.float32)

    def see_pictures(self):
        """obs (N, 3, 12, 16, 3), state (N, 12, 16, 3), uint8."""
        obs = np.zeros((self.num_envs, 3, 12, 16, 3), np.uint8)
        obs[np.arange(self.num_envs), :, :, self.clock] = 200
        state = obs[:, 0].copy()
        for i in range(3):
            obs[:, i, i] = 250
        return obs, state

    def reward(self, alive):
        """(N, 3) float32, of the step that has just set the clock; `alive` (N, 3) are those who took it."""
        return np.float32((self.clock[:, None] if self.team_reward else np.arange(1, 4)) * alive)


KINDS = {"each": {}, "team": {"team_reward": True}}  # toy/each and toy/team: see the fixture `toy` in conftest.py


def make(name: str, num_envs: int, **options) -> Toy:
    """`toy/each` or `toy/team`, with the options of Toy: "toy/team?see=noise&varied=True"."""
    return Toy(num_envs, **KINDS[name], **options)


class Quiet:
    """Stands where a script's collect() expects a Run: counts the episodes that end and writes nothing."""

    def __init__(self):
        self.step = self.num_episodes = 0
        self.returns, self.lengths = [], []

    def check_rollout(self, rollout, next_obs):
        pass

    def log_episodes(self, info, episodes=()):
        ended = info["_episode"]
        self.num_episodes += int(ended.sum())
        self.returns += info["episode"]["r"][ended].tolist()
        self.lengths += info["episode"]["l"][ended].tolist()


FIELD = re.compile(r"^    (\w+): [\w.]*?(ndarray|Tensor)  # \((.*?)\),? ?(float32|int64|uint8|bool)?", re.MULTILINE)


def make_rollout(script, args, envs):
    """An empty Rollout of a script: types and shapes are what the comments of its fields say, or those of the spaces.

    final_obs and final_state, which are written only where an episode was cut, begin as NaN.
    """
    sizes = {"T": args.num_steps, "N": envs.num_envs}
    obs_space, space = envs.single_observation_space, envs.single_action_space
    if hasattr(envs, "num_agents"):
        sizes |= {"A": envs.num_agents, "K": len(envs.real_actions[0]), "D": obs_space.shape[1], "S": envs.state_size}
    else:
        sizes |= {"D": obs_space.shape[0], "K": int(space.n) if hasattr(space, "n") else space.shape[0]}
        sizes |= {"C": space.shape[0]} if space.shape else {}
    if hasattr(args, "cell"):  # what an LSTM remembers is its output and its cell
        hidden = args.hidden_dim if hasattr(args, "hidden_dim") else args.actor_hidden_dim
        sizes["H"] = hidden * {"gru": 1, "lstm": 2}[args.cell]
    given = {"obs": obs_space} if len(obs_space.shape) > 2 else {}
    if hasattr(envs, "single_state_space"):
        given = {"obs": obs_space, "state": envs.single_state_space}
    arrays = {}
    for name, kind, shape, dtype in FIELD.findall(inspect.getsource(script.Rollout)):
        shape = tuple(sizes[size] if size in sizes else int(size) for size in shape.split(", ") if size != "...")
        if kind == "ndarray" and (of := given.get(name.removeprefix("final_"))) is not None:
            shape, dtype = (*shape[:2], *of.shape), of.dtype
        fill = np.nan if name.startswith("final_") and dtype == np.float32 else 0
        array = np.full(shape, fill, dtype or np.float32)
        arrays[name] = array if kind == "ndarray" else torch.from_numpy(array)
    return script.Rollout(**arrays)


def code(thing) -> str:
    """The source of a function or class without docstrings and comments."""
    tree = ast.parse(inspect.getsource(thing))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.unparse(tree)


def find(kind, result):
    """The first instance of `kind` in nested tuples, or None."""
    if isinstance(result, kind):
        return result
    if type(result) is tuple:
        return next((x for x in (find(kind, part) for part in result) if x is not None), None)
    return None


def double(batch):
    """A NamedTuple of tensors with its floating-point ones in float64."""
    return type(batch)(*(x.double() if x.is_floating_point() else x for x in batch))


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """All points (step, value) of each metric of a run folder, as TensorBoard reads them."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def curves(folder: Path) -> dict[str, list[float]]:
    """The values of all points of each metric of a run folder."""
    return {tag: [value for _, value in points] for tag, points in scalars(folder).items()}


def losses(folder: Path) -> list[float]:
    """The losses of the policy, then those of the value, at all points of a run folder."""
    of_run = curves(folder)
    return of_run["train/policy_loss"] + of_run["train/value_loss"]


def wait_for(condition, seconds: float = 240):
    """The first true value of condition(), asked again and again: on a busy machine a start alone takes a minute."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return value


def hears(pid: int, signum: int) -> bool:
    """Whether a process has a handler of its own for a signal; reads /proc."""
    handled = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return handled is not None and bool(int(handled[1], 16) >> (signum - 1) & 1)


@contextmanager
def largest_file(size: int):
    """No file of this process can grow beyond `size` bytes: a write fails half-way, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def gone(pid: int) -> bool:
    """Whether a process has ended, even if nobody has asked for its status; reads /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
