"""Multi-agent tasks of Jumanji, `jumanji/<id>`, as envpool's C++ plays them, stepped all at once in this process.

Rows and columns are cells of the grid, counted from 0; every observation ends with t = step / time limit.

    RobotWarehouse-v0       4 agents, 5 actions: stay, forward, left, right, load or unload; 500 steps
      obs (67)              agents_view as envpool gives it (66; as Jumanji describes it: own row, column, carrying,
                            direction one-hot (4), on a highway, then the cells around: another agent and its direction
                            (5 each), shelf and whether it is requested (2 each)), t
      state (265)           the agents_view of all agents, t
    LevelBasedForaging-v0   2 agents, 6 actions: stay, up, down, left, right, load; 100 steps
      obs (13)              row, column, level of both foods (-1, -1, 0 once eaten), then of oneself, of the other, t
      state (25)            the views of both agents, t
    Connector-v2            10 agents, 5 actions: stay, up, right, down, left; 50 steps on 10x10 cells
      obs (601)             6 planes of 100 cells, 1 where there is: own path, own head, own target, a path, a head, a
                            target of the others; t
      state (341)           3 planes: paths, heads, targets of all; for each agent row and column of its head and its
                            target, over 9 (a target that is reached is its head); t
    Cleaner-v0              3 agents, 4 actions: up, right, down, left; 100 steps on 10x10 cells
      obs (401)             4 planes: dirty, wall, oneself, number of others in the cell; t
      state (501)           5 planes: dirty, wall, agent 0, agent 1, agent 2; t

    action_mask     the environment's; an agent without a legal action (walled in, in Cleaner) has action 0
    reward          one number for the team, given to every agent: the sum over agents is A times as much
    episode end     termination and truncation are the environment's: it terminates at the time limit, which t shows,
                    except LevelBasedForaging, which truncates
    seeds           reset(seed=s) gives env_seeds(s, N)[i] modulo 2^31 to environment i, for all its episodes
    autoreset       envpool's would cost a step per episode; here the environments that ended are reset in the same step

What envpool 1.2.5 plays under these names (its newer sources differ) is not always what Jumanji does: Cleaner has
scattered walls instead of a maze, and some starts are walled in; the other three begin every episode alike.
RobotWarehouse has no shelves: agents walk on 8x8 cells, up, right, down, left (actions 1 to 4), and nothing can be
earned, only lost by a collision, which ends the episode (-1). In Connector every agent reaches its target by going
right nine times, and the reward is 1 when all have, else -0.03. Compare numbers with envpool's, not with Jumanji's;
`lbf/*` and `rware/*` are the tasks in full. Sources: https://envpool.readthedocs.io, https://instadeepai.github.io/jumanji
"""

import functools
from collections.abc import Callable
from typing import Any

from cleanmarl.envs import EnvError, EpisodeStatistics, MultiAgentVectorEnv, check_actions, env_seeds, unknown_name

import numpy as np

Raw = dict[str, np.ndarray]  # observation of envpool for n environments


def views(raw: Raw) -> tuple[np.ndarray, np.ndarray]:
    """RobotWarehouse and LevelBasedForaging: the agents' vectors (n, A, D), and all of them as state (n, S)."""
    view = raw["agents_view"]
    return view, view.reshape(len(view), -1)


def connector(raw: Raw) -> tuple[np.ndarray, np.ndarray]:
    """A cell holds 1 + 3 a for the path of agent a, 2 + 3 a for its head, 3 + 3 a for its target, 0 if empty."""
    n, A = raw["action_mask"].shape[:2]
    owner, part = np.divmod(raw["grid"].reshape(n, 1, -1) - 1, 3)  # (n, 1, C); an empty cell belongs to nobody, -1
    parts = (part == np.arange(3)[:, None]) & (owner >= 0)  # (n, 3, C)
    own = parts[:, None] & (owner == np.arange(A)[:, None])[:, :, None]  # (n, A, 3, C)
    obs = np.concatenate([own, parts[:, None] & ~own], axis=2)
    head, target = own[:, :, 1].argmax(-1), own[:, :, 2].argmax(-1)  # (n, A)
    target = np.where(own[:, :, 2].any(-1), target, head)
    places = np.stack(np.divmod(np.stack([head, target], axis=-1), 10), axis=-1) / 9
    state = np.concatenate([parts.reshape(n, -1), places.reshape(n, -1)], axis=1)
    return obs.reshape(n, A, -1), state


def cleaner(raw: Raw) -> tuple[np.ndarray, np.ndarray]:
    n, A = raw["action_mask"].shape[:2]
    grid, cell = raw["grid"].reshape(n, 1, -1), raw["agents_locations"] @ [10, 1]
    ground = np.concatenate([grid == 0, grid == 2], axis=1)  # (n, 2, C): dirty, wall
    place = cell[..., None] == np.arange(grid.shape[-1])  # (n, A, C)
    others = place.sum(axis=1, keepdims=True) - place
    obs = np.concatenate([np.repeat(ground.reshape(n, 1, -1), A, axis=1), place, others], axis=-1)
    return obs, np.concatenate([ground, place], axis=1).reshape(n, -1)


TASKS: dict[str, Callable[[Raw], tuple[np.ndarray, np.ndarray]]] = {
    "RobotWarehouse-v0": views,
    "LevelBasedForaging-v0": views,
    "Connector-v2": connector,
    "Cleaner-v0": cleaner,
}


def known_names() -> list[str]:
    return list(TASKS)


def make(name: str, num_envs: int = 1, render_mode: str | None = None, **options) -> "JumanjiVectorEnv":
    """`num_envs` copies of `jumanji/<name>`; render_mode "rgb_array" for pictures.

    Raises EnvError with one line for an unknown name, an option (there are none) or a missing package.
    """
    if name not in TASKS:
        raise unknown_name(f"jumanji/{name}", TASKS)
    if options:
        raise EnvError(f"jumanji/{name} has no option {min(options)!r}; it has only render_mode")
    if render_mode not in (None, "rgb_array"):
        raise EnvError(f"jumanji/{name}: render_mode must be None or 'rgb_array', not {render_mode!r}")
    return JumanjiVectorEnv(name, num_envs, render_mode)


class JumanjiVectorEnv(MultiAgentVectorEnv):
    """N copies of one task in an envpool, with one thread: a step takes less time than to wake another thread."""

    team_reward, may_die = True, False

    def __init__(self, name: str, num_envs: int, render_mode: str | None = None):
        try:
            import envpool  # takes a second, and is missing on some platforms
            from envpool.python.envpool import EnvPoolMixin
        except ImportError as error:
            raise EnvError(f"jumanji/{name} needs a package that is missing ({error}): pip install envpool") from error
        self.env_id, self.render_mode = f"jumanji/{name}", render_mode
        self.pool: Any = None  # of a class of this task's own
        spec = envpool.make_spec(name)
        self.time_limit = spec.config.max_episode_steps
        options = {"num_envs": num_envs, "num_threads": 1, "render_mode": render_mode}
        self.new_pool = functools.partial(envpool.make, name, "gymnasium", **options)
        self.bare_recv = EnvPoolMixin.recv
        self.observe = TASKS[name]
        spaces = {key: space for key, space in spec.observation_space.items() if key != "step_count"}
        empty = {key: np.zeros((1, *space.shape), space.dtype) for key, space in spaces.items()}
        obs, state = self._vectors(empty | {"step_count": np.zeros(1)})
        _, A, K = empty["action_mask"].shape
        agents = [f"agent_{a}" for a in range(A)]
        self._set_spaces(num_envs, agents, [obs.shape[-1]] * A, [K] * A, state.shape[-1])
        self.agent_mask = np.ones((num_envs, A), bool)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Start an episode everywhere; without a seed, each environment's sequence of episodes goes on."""
        if seed is not None or self.pool is None:  # envpool takes seeds only when it is built, which takes milliseconds
            self.close_extras()
            self.pool = self.new_pool(seed=[s % 2**31 for s in env_seeds(seed, self.num_envs)])
        raw, _ = self.pool.reset()
        self.statistics = EpisodeStatistics(self.num_envs, self.num_agents)
        obs, state = self._vectors(raw)
        self.action_mask = legal(raw)
        return obs, self._info(state)

    def step(self, action: np.ndarray):
        """One step everywhere; action (N, A) integers. Raises EnvError for an illegal one, before anything moves."""
        if self.pool is None:
            raise EnvError(f"{self.env_id}: call reset() before step()")
        action = check_actions(self.env_id, self.agents, action, self.action_mask)
        raw, team, termination, truncation, _ = self._play(action.astype(np.int32))
        reward = np.repeat(team.astype(np.float32)[:, None], self.num_agents, axis=1)
        truncation = truncation & ~termination
        self.statistics.add(reward)
        obs, state = self._vectors(raw)
        self.action_mask = legal(raw)
        done, end = termination | truncation, {}
        if done.any():
            end = {f"final_{key}": (x.T * done).T for key, x in {"obs": obs, **self._info(state)}.items()}
            end["_final_obs"] = done.copy()
            self.statistics.end(done, end)
            raw, _ = self.pool.reset(np.flatnonzero(done).astype(np.int32))
            obs[done], state[done] = self._vectors(raw)
            self.action_mask[done] = legal(raw)
        return obs, reward, termination, truncation, self._info(state) | end

    def render(self) -> Any:
        """Frame (height, width, 3) uint8 of environment 0, with render_mode="rgb_array"."""
        if self.render_mode is None or self.pool is None:
            raise EnvError(f"{self.env_id}: to render, make it with render_mode='rgb_array' and reset it")
        return self.pool.render(env_ids=[0])[0]

    def close_extras(self, **kwargs) -> None:
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    def _play(self, action: np.ndarray):
        """pool.step, but it copies all observations for a later render(), twice and in Python: 80% of its time."""
        if self.render_mode is not None:
            return self.pool.step(action)
        self.pool.send(action)
        return self.bare_recv(self.pool)

    def _vectors(self, raw: Raw) -> tuple[np.ndarray, np.ndarray]:
        """obs (n, A, D) and state (n, S) of n environments, float32; both end with the share of time that is used."""
        obs, state = self.observe(raw)
        time = raw["step_count"] / self.time_limit  # (n,)
        of_agents = np.broadcast_to(time[:, None, None], (*obs.shape[:2], 1))
        obs = np.concatenate([obs, of_agents], axis=-1, dtype=np.float32)
        return obs, np.concatenate([state, time[:, None]], axis=-1, dtype=np.float32)

    def _info(self, state: np.ndarray) -> dict[str, np.ndarray]:
        return {"state": state, "action_mask": self.action_mask.copy(), "agent_mask": self.agent_mask}


def legal(raw: Raw) -> np.ndarray:
    """The action mask (n, A, K); where an agent has no legal action, action 0 counts as one."""
    mask = raw["action_mask"].astype(bool)
    mask[..., 0] |= ~mask.any(axis=-1)
    return mask
