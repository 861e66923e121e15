"""Games of a package as arrays of N environments: the package draws how an episode starts, NumPy plays it.

Starts, and so all episodes, are equal to the package's own. `lbf` and `rware` are made of it.
"""

import importlib
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from cleanmarl.envs import EnvError, EpisodeStatistics, MultiAgentVectorEnv, check_actions, env_seeds

import gymnasium as gym
import numpy as np


class BatchedVectorEnv(MultiAgentVectorEnv, ABC):
    """N environments with A agents who may do everything at any time, and all that a family need not write again.

    A subclass calls `_set_up`, names in `arrays` the attributes (N, ...) that hold its state, and has `_begin` (an
    episode's start), `_play` (one step of all environments) and `_observe` (what all agents see).
    """

    may_die = False
    env_id: str
    arrays: ClassVar[tuple[str, ...]]

    def _set_up(self, num_envs: int, num_agents: int, obs_size: int, num_actions: int) -> None:
        agents = [f"agent_{a}" for a in range(num_agents)]
        sizes = [obs_size] * num_agents, [num_actions] * num_agents
        self._set_spaces(num_envs, agents, *sizes, num_agents * obs_size)
        self.seeds = [np.random.default_rng() for _ in range(num_envs)]  # of the episodes to come
        self.statistics: EpisodeStatistics | None = None
        # nothing of this ever changes
        self.action_mask = np.ones((num_envs, num_agents, num_actions), bool)
        self.agent_mask = np.ones((num_envs, num_agents), bool)

    @abstractmethod
    def _begin(self, n: int, seed: int) -> None:
        """Start the next episode of environment n as the package does."""

    @abstractmethod
    def _play(self, action: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rewards (N, A), termination (N,), truncation (N,) of actions (N, A), after `length` (N,) steps."""

    @abstractmethod
    def _observe(self) -> np.ndarray:
        """Observations (N, A, D) float32, in an array of their own."""

    def _generators(self) -> list[np.random.Generator]:
        """All that random numbers come from."""
        return self.seeds

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Start an episode in every environment; with a seed, environment n's stream depends on it and on n alone."""
        seeds = [int(rng.integers(2**31)) for rng in self.seeds] if seed is None else env_seeds(seed, self.num_envs)
        if seed is not None:
            self.seeds = [np.random.default_rng(s) for s in seeds]
        self.statistics = EpisodeStatistics(self.num_envs, self.num_agents)
        for n, start in enumerate(seeds):
            self._begin(n, start)
        obs = self._observe()
        return obs, self._info(obs)

    def step(self, action: np.ndarray):
        """Advance every environment; action (N, A) integers. Raises EnvError for an action that does not exist."""
        if self.statistics is None:
            raise EnvError(f"{self.env_id}: call reset() before step()")
        action = check_actions(self.env_id, self.agents, action, self.action_mask)
        reward, termination, truncation = self._play(action, self.statistics.lengths)
        reward = reward.astype(np.float32)
        self.statistics.add(reward)
        done, obs = termination | truncation, self._observe()
        if not done.any():
            return obs, reward, termination, truncation, self._info(obs)

        end = {f"final_{key}": (x.T * done).T for key, x in {"obs": obs, **self._info(obs)}.items()}
        end["_final_obs"] = done.copy()
        self.statistics.end(done, end)
        for n in np.flatnonzero(done).tolist():
            self._begin(n, int(self.seeds[n].integers(2**31)))
        obs = self._observe()
        return obs, reward, termination, truncation, self._info(obs) | end

    def _info(self, obs: np.ndarray) -> dict[str, np.ndarray]:
        state = obs.reshape(self.num_envs, -1).copy()
        return {"state": state, "action_mask": self.action_mask, "agent_mask": self.agent_mask}

    def snapshot(self) -> dict:
        """Where all is, random numbers to come, returns and lengths; not before `reset`."""
        assert self.statistics is not None
        rngs = [rng.bit_generator.state for rng in self._generators()]
        arrays = {key: getattr(self, key).copy() for key in self.arrays}
        return {"arrays": arrays, "rngs": rngs, "episodes": self.statistics.snapshot()}

    def restore(self, snapshot: dict) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Go on from there; (obs, info) as they were."""
        for key in self.arrays:
            getattr(self, key)[:] = snapshot["arrays"][key]
        for rng, state in zip(self._generators(), snapshot["rngs"], strict=True):
            rng.bit_generator.state = state
        self.statistics = EpisodeStatistics(self.num_envs, self.num_agents)
        self.statistics.restore(snapshot["episodes"])
        obs = self._observe()
        return obs, self._info(obs)


def construct(name: str, options: dict):
    """The environment of a Gymnasium id, bare: gymnasium.make would keep the option max_episode_steps to itself."""
    spec: Any = gym.spec(name)
    return gym.envs.registration.load_env_creator(spec.entry_point)(**spec.kwargs | options)


def need(family: str, package: str) -> None:
    """Import the package, which registers its ids. Raises EnvError with the line that installs it."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        how = f"python bootstrap.py multiagent, or pip install {package}"
        raise EnvError(f"{family}/... needs a package that is missing ({error}): {how}") from error
