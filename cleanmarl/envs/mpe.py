"""Multi-particle environments, batched in NumPy over N environments and equal to mpe2 1.1.1 step for step.

`cleanmarl.envs.make("mpe/simple_spread_v3", num_envs=8)`. Agents are discs on a plane: each step (0.1 s) an action
pushes every agent, discs that touch push each other apart, velocities decay. Some agents also speak: others observe
what they said. Numbers below are those of the default options; a place is two numbers, relative to the observer.

    simple_v3                   obs (4) own velocity, the landmark's place; reward -(distance to it)^2
    simple_adversary_v3         agents (10): the goal's place, both landmarks', both others'; the adversary (8) does not
                                see the goal. Reward of an agent: the adversary's distance to the goal minus that of the
                                nearest agent; of the adversary: minus its distance
    simple_crypto_v3            Alice (8): message and key, one-hot (4 each); Bob (8): the key, what Alice said; Eve
                                (4): what Alice said. Reward: Eve's error minus Bob's for Alice and Bob, minus her error
                                for Eve; an error is the squared distance to the message, 0 for who says nothing
    simple_push_v3              agent (19): velocity, the goal's place, own colour (3), both landmarks' places and
                                colours (6), the other's place; adversary (8): velocity, landmarks' places, the other's.
                                Reward: minus its distance to the goal; of the adversary: the agent's minus its own
    simple_reference_v3         obs (21): velocity, three landmarks' places, the colour of the other's goal (3), what
                                the other said (10). Reward: minus the other's distance to that goal, and the mean of
                                both agents' rewards, mixed by local_ratio
    simple_speaker_listener_v4  speaker (3): the goal's colour; listener (11): velocity, three landmarks' places, what
                                the speaker said (3). Reward of both: -(the listener's distance to the goal)^2
    simple_spread_v3            obs (18): velocity, position, three landmarks' places, both others', zeros (4). Reward:
                                minus the sum of each landmark's distance to the nearest agent, for all, and -1 per
                                agent that one touches, mixed by local_ratio
    simple_tag_v3               velocity, position, both obstacles' places, three others', velocities of the good agents
                                but oneself: 16 for adversaries, 14 for the good. Reward: 10 to all adversaries for a
                                catch, -10 to who is caught, minus up to 10 per axis to the good who leave the arena
    simple_world_comm_v3        velocity, position, places of obstacle, food (2), forests (2), five others; adversaries
                                (34) then see velocities of the good (4), in which forests they are (2, 1 or -1), what
                                the leader said (4); the good (28) in which forests they are, the other good's velocity.
                                Agents see each other (else zeros) if both are in one forest or both in none; the leader
                                sees all. Reward: 5 to all adversaries for a catch, minus 0.1 of the distance to one's
                                nearest prey; to the good 2 for food, -5 if caught, minus 0.05 of the distance to the
                                nearest food, minus twice the penalty of simple_tag for leaving the arena

    action          0 stay, 1 left, 2 right, 3 down, 4 up; who also speaks: 5 * word + move; who stays: the word.
                    With continuous_actions numbers from 0 to 1: a push for each of those five (the first does nothing),
                    then one for each word; numbers outside are an error, where mpe2 clips them
    state           the observations of all agents one after another, without the padding, as mpe2's own state()
    reward          each agent's own; where all get the same, the sum over agents is A times as much
    episode end     truncation after max_cycles (option, 25) steps; nothing terminates an episode, and nobody dies
    seeds           reset(seed=s) starts, in environment i, the episodes that mpe2 starts after
                    reset(seed=env_seeds(s, N)[i]): each environment has a generator and draws in mpe2's order

How it is batched: one column of numbers, the features, describes one environment: the coordinates of the entities
(agents, then landmarks) and of the goals, the velocities of the agents, what they say, what a scenario adds, a zero.
Every number that an agent observes is one feature minus another, so two lookups and one subtraction give the
observations of all agents in all environments. Inside, the axis of the environments comes last: rows are contiguous.

For experiments, write into the views `pos` (N, E, 2), `vel` (N, A, 2) and `goals` (N, G) between steps. Sources: Lowe
et al. 2017 (https://arxiv.org/abs/1706.02275) and https://mpe2.farama.org, which describes every scenario.
"""

import copy
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cleanmarl.envs import EnvError, EpisodeStatistics, MultiAgentVectorEnv, check_memory, draw, env_seeds, unknown_name

import gymnasium as gym
import numpy as np
import numpy.typing as npt

DT = 0.1  # seconds per step
DAMPING = 0.25  # share of the velocity lost per step
CONTACT_FORCE, CONTACT_MARGIN = 100.0, 0.001  # stiffness of a contact, width of its soft edge
BLOCK_BYTES = 2**19  # of a block's observations: larger arrays leave the cache
MOVES = np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]], np.float64)  # stay, left, right, down, up

GRAY, RED, GREEN, BLUE = (0.25, 0.25, 0.25), (0.85, 0.35, 0.35), (0.35, 0.85, 0.35), (0.35, 0.35, 0.85)
PLACE_COLORS = ((0.75, 0.25, 0.25), (0.25, 0.75, 0.25), (0.25, 0.25, 0.75))  # of the landmarks that are named by colour

Rows = list[tuple[int, int]]  # observed numbers: feature row `plus` minus feature row `minus`


@dataclass(frozen=True)
class Body:
    """One disc: an agent, or (with the defaults) a landmark."""

    name: str
    size: float = 0.05  # radius
    color: Sequence[float] = GRAY  # for render
    collide: bool = False
    movable: bool = False
    speaks: bool = False
    accel: float = 5.0  # force of a full push; every mass is 1
    max_speed: float = np.inf
    spread: float = 1.0  # starts uniformly in [-spread, spread]²


class Pairs:
    """A list of entity pairs (i, j), the distances at which they touch and those between them in every environment."""

    def __init__(self, pairs, sizes: list[float]):
        self.pairs = np.array(list(pairs), np.int64).reshape(-1, 2)
        self.first, self.second = (np.stack([2 * p, 2 * p + 1], axis=1) for p in self.pairs.T)  # rows of x and y
        self.touching = np.array(sizes)[self.pairs].sum(axis=1)[:, None]  # (P, 1)

    def measure(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """position of i - position of j (P, 2, N), and its length (P, N)."""
        delta = features.take(self.first, axis=0)
        delta -= features.take(self.second, axis=0)
        square = delta * delta
        return delta, np.sqrt(square[:, 0] + square[:, 1])


class ParticleEnv(MultiAgentVectorEnv):
    """Physics, actions, observations and episodes; a scenario adds who there is, what they see and what they earn."""

    name: str
    may_die = False
    num_goals = 0  # landmarks drawn at reset, before the positions: `goals` (N, G)
    drawn_twice = 0  # the last so many landmarks: mpe2 places them, then places them again

    def __init__(
        self,
        num_envs: int,
        agents: list[Body],
        landmarks: list[Body],
        num_words: int = 0,  # size of what a speaker says
        goal_codes: npt.ArrayLike | None = None,  # (landmarks, C): how a goal looks to the agents that see which it is
        num_extra: int = 0,  # features that the scenario adds
        *,
        max_cycles: int = 25,
        continuous_actions: bool = False,
        render_mode: str | None = None,
    ):
        if render_mode not in (None, "rgb_array"):
            raise EnvError(f"mpe/{self.name}: render_mode must be None or 'rgb_array', not {render_mode!r}")
        self.max_cycles = self.time_limit = max_cycles
        self.render_mode, self.bodies = render_mode, agents + landmarks
        self.num_agents = A = len(agents)
        self.landmark_ids = range(A, len(self.bodies))
        E = len(self.bodies)
        self.goal_ids = range(E, E + self.num_goals)  # goals are entities too, on top of their landmarks
        self.speakers = [i for i, agent in enumerate(agents) if agent.speaks]
        self.goal_codes = np.zeros((len(landmarks), 0)) if goal_codes is None else np.asarray(goal_codes)

        # the features (F, N); the last row stays zero
        self.shapes = shapes = {
            "xy": (E, 2),
            "goal_xy": (self.num_goals, 2),
            "vxy": (A, 2),
            "said": (len(self.speakers), num_words),
            "seen_goal": (self.num_goals, self.goal_codes.shape[1]),
            "extra": (num_extra,),
        }
        start = np.cumsum([0] + [int(np.prod(shape)) for shape in shapes.values()])
        self.first_row, self.zero = dict(zip(shapes, start.tolist(), strict=False)), int(start[-1])
        self._look_at(np.zeros((self.zero + 1, num_envs)), np.zeros((num_envs, self.num_goals), np.int64))

        self.rngs = [np.random.default_rng() for _ in range(num_envs)]
        self.statistics: EpisodeStatistics | None = None  # None until the first reset

        # physics: who can touch whom, and on whom (+1, -1) the force of each pair acts; landmarks stay
        solid = [i for i, body in enumerate(self.bodies) if body.collide]
        num_pairs = sum(i < A for i in solid) * len(solid) / 2  # about, or half of them
        check_memory(f"mpe/{self.name}: the contacts of {A:,} agents", 8 * num_pairs * (A + 6 * num_envs))
        self.contacts = self.pairs((i, j) for i in solid for j in solid if i < j and i < A)
        first, second = self.contacts.pairs.T
        who = np.arange(A)[:, None]
        self.contact_sign = (who == first) - (who == second).astype(np.float64)  # (A, P)
        self.accel = np.array([agent.accel if agent.movable else 0.0 for agent in agents])
        self.max_speed = np.array([agent.max_speed for agent in agents])[:, None]
        self.speed_limited = np.isfinite(self.max_speed).any()
        self.spread = np.array([body.spread for body in self.bodies])[:, None]
        self.draws = np.zeros((num_envs, E + self.drawn_twice, 2))

        sizes = self._tabulate_actions(num_words, continuous_actions)
        obs_sizes = self._tabulate_views()
        space = gym.spaces.Box(0.0, 1.0, (A, int(sizes.max())), np.float32) if continuous_actions else None
        self._set_spaces(num_envs, [agent.name for agent in agents], obs_sizes, sizes, obs_sizes.sum(), space)
        # every agent and its actions are there at every step: one array serves all infos
        self.action_mask = np.repeat(self.real_actions[None], num_envs, axis=0)
        self.agent_mask = np.ones((num_envs, A), bool)
        self.action_limit = self.action_sizes.astype(np.uint64)

    def _look_at(self, features: np.ndarray, goals: np.ndarray) -> None:
        """Be the environments of features (F, N) and goals (N, G), of which there are views by name."""
        self.features, self.goals, N = features, goals, features.shape[1]
        parts = np.split(features, [*self.first_row.values(), self.zero][1:])
        views = (part.reshape(*shape, N) for part, shape in zip(parts, self.shapes.values(), strict=False))
        self.xy, self.goal_xy, self.vxy, self.said, self.seen_goal, self.extra = views
        self.pos, self.vel = self.xy.transpose(2, 0, 1), self.vxy.transpose(2, 0, 1)

    @functools.cached_property
    def blocks(self) -> list[tuple[slice, "ParticleEnv"]]:
        """Which environments, and a copy that is only these and shares their memory: its arrays fit into the cache."""
        size = max(1, BLOCK_BYTES // (self.features.itemsize * self.plus.size))
        if size >= self.num_envs:
            return [(slice(None), self)]
        blocks = []
        for start in range(0, self.num_envs, size):
            envs, block = slice(start, start + size), copy.copy(self)
            block._look_at(self.features[:, envs], self.goals[envs])
            block.num_envs = len(block.goals)
            blocks.append((envs, block))
        return blocks

    def _tabulate_actions(self, num_words: int, continuous: bool) -> np.ndarray:
        """What each action pushes and says. Discrete ones are word * 5 + move, or the word for those who stay."""
        agents = self.bodies[: self.num_agents]
        moves = np.array([5 if agent.movable else 0 for agent in agents])
        words = np.array([num_words if agent.speaks else 0 for agent in agents])
        sizes = moves + words if continuous else np.maximum(moves, 1) * np.maximum(words, 1)
        self.first_word = moves[self.speakers]  # continuous: after the moves
        K = sizes.max()
        number = np.arange(K)
        move = np.where(moves[:, None] > 0, number % 5, 0)
        self.push = (self.accel[:, None, None] * MOVES[move]).swapaxes(1, 2).ravel()  # (A, 2, K) flat
        self.push_start = np.arange(2 * len(agents)).reshape(-1, 2, 1) * K
        word = np.where(moves[:, None] > 0, number // 5, number)[self.speakers]
        self.word = (word[:, None] == np.arange(num_words)[:, None]).astype(np.float64).ravel()  # (speakers, words, K)
        self.word_start = np.arange(self.word.size // K).reshape(len(self.speakers), num_words, 1) * K

        return sizes

    def _tabulate_views(self) -> np.ndarray:
        """For every observed number, which row minus which row; padded with zero minus zero."""
        views = [self.view(i) for i in range(self.num_agents)]
        obs_sizes = np.array([len(view) for view in views])
        rows = np.full((self.num_agents, max(obs_sizes), 2), self.zero)
        for i, view in enumerate(views):
            rows[i, : len(view)] = view
        self.plus, self.minus = rows.reshape(-1, 2).T.copy()
        real = np.arange(max(obs_sizes)) < obs_sizes[:, None]
        self.state_columns = None if real.all() else np.flatnonzero(real)
        return obs_sizes

    # What a scenario fills in

    def view(self, i: int) -> Rows:
        """What agent i observes, put together from the helpers below."""
        raise NotImplementedError

    def reward(self) -> np.ndarray:
        """Rewards of all agents in the present state, (A, N)."""
        raise NotImplementedError

    def add_features(self) -> None:
        """Write `extra` (X, N), features that follow from the state."""

    def hide(self, obs: np.ndarray) -> None:
        """Blank in place what is not to be seen in obs (A * D, N)."""

    # Helpers for views

    def part(self, name: str, start: int, stop: int) -> Rows:
        """Rows start to stop of the features `name`."""
        return [(self.first_row[name] + k, self.zero) for k in range(start, stop)]

    def own(self, i: int) -> Rows:
        return self.velocity(i) + self.part("xy", 2 * i, 2 * i + 2)

    def velocity(self, i: int) -> Rows:
        return self.part("vxy", 2 * i, 2 * i + 2)

    def relative(self, entities, i: int) -> Rows:
        """Positions of the entities as seen from agent i."""
        return [(2 * j + axis, 2 * i + axis) for j in entities for axis in (0, 1)]

    def words(self, i: int) -> Rows:
        """What agent i said in this step; zeros if it is silent."""
        num_words = self.said.shape[1]
        if i not in self.speakers:
            return [(self.zero, self.zero)] * num_words
        start = self.speakers.index(i) * num_words
        return self.part("said", start, start + num_words)

    def goal_code(self, k: int) -> Rows:
        """Which landmark goal k is."""
        size = self.goal_codes.shape[1]
        return self.part("seen_goal", k * size, (k + 1) * size)

    def others(self, i: int) -> list[int]:
        return [j for j in range(self.num_agents) if j != i]

    def pairs(self, pairs) -> Pairs:
        return Pairs(pairs, [body.size for body in self.bodies] + [0.0] * self.num_goals)

    def distance(self, pairs: Pairs) -> np.ndarray:
        """Distances (P, N)."""
        return pairs.measure(self.features)[1]

    # Episodes

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Start an episode in every environment; with a seed, environment i's stream depends on it and on i alone."""
        if seed is not None:
            self.rngs = [np.random.default_rng(s) for s in env_seeds(seed, self.num_envs)]
        self.statistics = EpisodeStatistics(self.num_envs, self.num_agents)
        self._start_episodes(np.arange(self.num_envs))
        obs, state = self._observe()
        return obs, self._info(state)

    def step(self, action: np.ndarray):
        """Advance every environment; action (N, A) integers, or (N, A, K) floats from 0 to 1.

        Raises EnvError for any other, before anything moves.
        """
        if self.statistics is None:
            raise EnvError(f"mpe/{self.name}: call reset() before step()")
        action = self._check(np.asarray(action))
        reward = np.empty((self.num_envs, self.num_agents), np.float32)
        for envs, block in self.blocks:
            block._move(block._act(action[envs]))
            block._follow()
            reward[envs] = block.reward().T
        self.statistics.add(reward)
        obs, state = self._observe()
        termination, truncation = np.zeros(self.num_envs, bool), self.statistics.lengths >= self.max_cycles
        if not truncation.any():
            return obs, reward, termination, truncation, self._info(state)

        end = {
            "final_obs": np.where(truncation[:, None, None], obs, np.float32(0)),
            "final_state": np.where(truncation[:, None], state, np.float32(0)),
            "final_action_mask": self.action_mask & truncation[:, None, None],
            "final_agent_mask": self.agent_mask & truncation[:, None],
            "_final_obs": truncation.copy(),
        }
        self.statistics.end(truncation, end)
        self._start_episodes(np.flatnonzero(truncation))
        obs, state = self._observe()
        return obs, reward, termination, truncation, self._info(state) | end

    def snapshot(self) -> dict:
        """Positions, velocities, words and goals, random numbers to come, returns and lengths; not before `reset`."""
        assert self.statistics is not None
        rngs = [rng.bit_generator.state for rng in self.rngs]
        arrays = {"features": self.features.copy(), "goals": self.goals.copy()}
        return {**arrays, "rngs": rngs, "episodes": self.statistics.snapshot()}

    def restore(self, snapshot: dict) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Go on from there; (obs, info) as they were."""
        self.features[:], self.goals[:] = snapshot["features"], snapshot["goals"]
        for _, block in self.blocks:
            block._follow()
        for rng, state in zip(self.rngs, snapshot["rngs"], strict=True):
            rng.bit_generator.state = state
        self.statistics = EpisodeStatistics(self.num_envs, self.num_agents)
        self.statistics.restore(snapshot["episodes"])
        obs, state = self._observe()
        return obs, self._info(state)

    def _info(self, state: np.ndarray) -> dict[str, np.ndarray]:
        return {"state": state, "action_mask": self.action_mask, "agent_mask": self.agent_mask}

    def _start_episodes(self, envs: np.ndarray) -> None:
        for i in envs:  # the only loop over environments: each draws from its own stream, in mpe2's order
            for k in range(self.num_goals):
                self.goals[i, k] = self.rngs[i].integers(len(self.landmark_ids))
            self.rngs[i].random(out=self.draws[i])
        place, E = self.draws[envs], len(self.bodies)
        place[:, E - self.drawn_twice : E] = place[:, E:]
        self.features[:, envs] = 0
        self.pos[envs] = -self.spread + 2 * self.spread * place[:, :E]
        for _, block in self.blocks:
            block._follow()

    def _follow(self) -> None:
        """Bring the features that follow from positions and goals up to date."""
        if self.num_goals:
            goals = self.goals.T  # (G, N)
            self.goal_xy[:] = self.pos[np.arange(self.num_envs), self.num_agents + goals].swapaxes(1, 2)
            self.seen_goal[:] = self.goal_codes[goals].swapaxes(1, 2)
        self.add_features()

    def _observe(self) -> tuple[np.ndarray, np.ndarray]:
        """Observations (N, A, D) and the state (N, S), which is the same without the padding; float32."""
        obs = np.empty((self.num_envs, self.plus.size), np.float32)
        for envs, block in self.blocks:
            seen = block.features.take(self.plus, axis=0)
            seen -= block.features.take(self.minus, axis=0)
            block.hide(seen)
            obs[envs] = seen.T
        state = obs.copy() if self.state_columns is None else obs.take(self.state_columns, axis=1)
        return obs.reshape(self.num_envs, self.num_agents, -1), state

    # Actions and physics

    def _check(self, action: np.ndarray) -> np.ndarray:
        """The actions, integers as int64; EnvError if one is wrong."""
        if not self.continuous:
            if action.dtype.kind not in "iu" or action.shape != self.agent_mask.shape:
                self._reject(action)
            action = action.astype(np.int64, copy=False)
            if not (action.view(np.uint64) < self.action_limit).all():  # read without its sign, -1 is huge
                self._reject(action)
        elif action.dtype.kind != "f" or action.shape != self.action_mask.shape or self._outside(action).any():
            self._reject(action)
        return action

    def _act(self, action: np.ndarray) -> np.ndarray:
        """Let the speakers speak, and return the agents' pushes (A, 2, N)."""
        if not self.continuous:
            number = action.T[:, None]  # (A, 1, N)
            if self.speakers:
                self.word.take(number[self.speakers] + self.word_start, out=self.said)
            return self.push.take(number + self.push_start)

        action = np.where(self.real_actions, action, 0).transpose(1, 2, 0)  # (A, K, N)
        for k, (i, start) in enumerate(zip(self.speakers, self.first_word, strict=True)):
            self.said[k] = action[i, start : start + self.said.shape[1]]
        force = np.zeros(self.vxy.shape)
        if self.accel.any():
            force[:, 0] = action[:, 2] - action[:, 1]
            force[:, 1] = action[:, 4] - action[:, 3]
            force *= self.accel[:, None, None]  # 0 for those who cannot move
        return force

    def _move(self, force: np.ndarray) -> None:
        """One physics step under the agents' pushes (A, 2, N): contacts where all stand, then all move at once."""
        if len(self.contacts.pairs):
            delta, distance = self.contacts.measure(self.features)
            overlap = (self.contacts.touching - distance) / CONTACT_MARGIN
            overlap = np.logaddexp(0, overlap) * CONTACT_MARGIN  # a soft max(0, overlap)
            delta *= (CONTACT_FORCE * overlap / distance)[:, None]
            force += self.contact_sign.dot(delta.reshape(len(delta), -1)).reshape(force.shape)
        self.xy[: self.num_agents] += self.vxy * DT
        self.vxy *= 1 - DAMPING
        force *= DT
        self.vxy += force
        if self.speed_limited:
            speed = np.sqrt(np.square(self.vxy[:, 0]) + np.square(self.vxy[:, 1]))
            self.vxy /= np.maximum(1, speed / self.max_speed)[:, None]

    def _outside(self, action: np.ndarray) -> np.ndarray:
        """(N, A, K): which numbers are not from 0 to 1, or no numbers at all; what is padding may be anything."""
        return ~((action >= 0) & (action <= 1)) & self.real_actions

    def _reject(self, action: np.ndarray) -> None:
        """Raise the error that says which action is wrong and what was expected."""
        expected = self.action_mask.shape if self.continuous else self.agent_mask.shape
        kind = "float" if self.continuous else "integer"
        if action.shape != expected:
            raise EnvError(f"mpe/{self.name}: actions must have shape {expected}, not {action.shape}")
        if action.dtype.kind not in ("f" if self.continuous else "iu"):
            raise EnvError(f"mpe/{self.name}: actions must be of {kind} type, not {action.dtype}")
        wrong = self._outside(action) if self.continuous else (action < 0) | (action >= self.action_sizes)
        env, agent = np.argwhere(wrong)[0][:2]
        size = self.action_sizes[agent]
        need = f"{size} numbers from 0 to 1" if self.continuous else f"an integer from 0 to {size - 1}"
        got = action[env, agent].tolist()
        who = f"environment {env}, agent {agent} ({self.agents[agent]})"
        raise EnvError(f"mpe/{self.name}: {who}: action {got} is not {need}")

    def render(self, size: int = 350) -> Any:
        """Environment 0 as a picture (size, size, 3) uint8: landmarks, agents, rings around goals, boxes for words.

        An agent has its number on it, and its name at the bottom, in its colour: agents alike have shades of one.
        """
        if self.render_mode is None:
            raise EnvError(f"mpe/{self.name}: to render, make it with render_mode='rgb_array'")
        half_width = max(1.2, np.abs(self.pos[0]).max() + 0.1)  # of the plane that is shown
        pixels = size / (2 * half_width)  # of one unit
        column, row = ((self.pos[0] * [1, -1] + half_width) * pixels).T  # y points up
        frame, A = draw.canvas(size, size), self.num_agents
        colors: list = draw.shades([body.color for body in self.bodies[:A]])
        colors += [0.5 + 0.5 * np.array(body.color) for body in self.bodies[A:]]
        for i in [*self.landmark_ids, *range(A)]:  # agents on top
            radius = self.bodies[i].size * pixels
            draw.disc(frame, row[i], column[i], radius, 0.5 * np.array(colors[i]))
            draw.disc(frame, row[i], column[i], radius - 1.5, colors[i])
        for i, name in enumerate(self.agents):
            draw.text(frame, row[i], column[i], str(i), (1, 1, 1), size=18)
            if A <= 8:
                draw.text(frame, size - 8 - 14 * (i // 4), (i % 4 + 0.5) * size / 4, f"{i} {name}", colors[i], size=14)
        for goal in self.goals[0]:
            radius = self.bodies[A + goal].size * pixels + 6
            draw.disc(frame, row[A + goal], column[A + goal], radius, (0.1, 0.1, 0.1), radius - 1.5)
        for k, words in enumerate(self.said[..., 0]):
            for w, said in enumerate(words):
                frame[6 + 14 * k : 16 + 14 * k, 6 + 14 * w : 16 + 14 * w] = 0.85 - 0.75 * said
        return draw.finished(frame)


class Simple(ParticleEnv):
    """One agent goes to a landmark."""

    name = "simple_v3"
    team_reward = True  # a team of one

    def __init__(self, num_envs: int, **common):
        super().__init__(num_envs, [Body("agent_0", movable=True)], [Body("landmark_0", color=RED)], **common)
        self.to_landmark = self.pairs([(0, 1)])

    def view(self, i):
        return self.velocity(i) + self.relative(self.landmark_ids, i)

    def reward(self):
        return -np.square(self.distance(self.to_landmark))


class Adversary(ParticleEnv):
    """N good agents know which landmark is the goal and want one of them there; the adversary has to guess it."""

    name = "simple_adversary_v3"
    num_goals = 1

    def __init__(self, num_envs: int, N: int = 2, **common):
        check_count(self.name, "N", N, 1)
        agents = [Body("adversary_0", 0.15, RED, movable=True)]
        agents += [Body(f"agent_{i}", 0.15, BLUE, movable=True) for i in range(N)]
        super().__init__(num_envs, agents, [Body(f"landmark_{i}", 0.08) for i in range(N)], **common)
        self.to_goal = self.pairs((i, self.goal_ids[0]) for i in range(N + 1))

    def view(self, i):
        goal = [] if i == 0 else self.goal_ids
        return self.relative([*goal, *self.landmark_ids, *self.others(i)], i)

    def reward(self):
        distance = self.distance(self.to_goal)
        reward = np.repeat((distance[0] - distance[1:].min(axis=0))[None], self.num_agents, axis=0)
        reward[0] = -distance[0]
        return reward


class Crypto(ParticleEnv):
    """Alice tells Bob which landmark she means, in a code that only they have the key of; Eve listens. Nobody moves."""

    name = "simple_crypto_v3"
    num_goals = 2  # the message and the key

    def __init__(self, num_envs: int, **common):
        agents = [Body("eve_0", color=RED, speaks=True), Body("bob_0", speaks=True), Body("alice_0", speaks=True)]
        landmarks = [Body(f"landmark_{i}", color=PLACE_COLORS[i + 1]) for i in range(2)]
        super().__init__(num_envs, agents, landmarks, num_words=4, goal_codes=np.eye(2, 4), **common)

    def view(self, i):
        message, key, heard = self.goal_code(0), self.goal_code(1), self.words(2)
        return (heard, key + heard, message + key)[i]

    def reward(self):
        error = np.square(self.said[:2] - self.seen_goal[0]).sum(axis=1)
        eve, bob = np.where(self.said[:2].any(axis=1), error, 0)  # who says nothing makes no error
        return np.stack([-eve, eve - bob, eve - bob])


class Push(ParticleEnv):
    """The agent goes to a goal that the adversary does not know, but may push it away from."""

    name = "simple_push_v3"
    num_goals = 1
    landmark_colors = np.array([[0.1, 0.9, 0.1], [0.1, 0.1, 0.9]])

    def __init__(self, num_envs: int, **common):
        agents = [Body("adversary_0", color=RED, collide=True, movable=True)]
        agents += [Body("agent_0", color=BLUE, collide=True, movable=True)]
        landmarks = [Body(f"landmark_{i}", color=tuple(self.landmark_colors[i])) for i in range(2)]
        agent_colors = [[0.25, 0.75, 0.25], [0.25, 0.25, 0.75]]  # the agent wears the colour of its goal
        super().__init__(num_envs, agents, landmarks, num_words=2, goal_codes=agent_colors, num_extra=6, **common)
        self.to_goal = self.pairs((i, self.goal_ids[0]) for i in range(2))

    def view(self, i):
        goal = self.relative(self.goal_ids, i) + self.goal_code(0)
        landmarks, colors = self.relative(self.landmark_ids, i), self.part("extra", 0, 6)
        other = self.relative(self.others(i), i)
        return self.velocity(i) + (landmarks + other if i == 0 else goal + landmarks + colors + other)

    def add_features(self):
        self.extra[:] = self.landmark_colors.reshape(6, 1)

    def reward(self):
        adversary, agent = self.distance(self.to_goal)
        return np.stack([agent - adversary, -agent])


class Reference(ParticleEnv):
    """Each of two agents wants to be at a landmark that only the other one knows: both move and both speak."""

    name = "simple_reference_v3"
    num_goals = 2  # goal k is known to agent k and meant for the other one

    def __init__(self, num_envs: int, local_ratio: float = 0.5, **common):
        self.local_ratio = check_ratio(self.name, local_ratio)
        agents = [Body(f"agent_{i}", movable=True, speaks=True) for i in range(2)]
        landmarks = [Body(f"landmark_{i}", color=PLACE_COLORS[i]) for i in range(3)]
        super().__init__(num_envs, agents, landmarks, num_words=10, goal_codes=PLACE_COLORS, **common)
        self.team_reward = self.local_ratio == 0
        self.to_goal = self.pairs([(1, self.goal_ids[0]), (0, self.goal_ids[1])])

    def view(self, i):
        return self.velocity(i) + self.relative(self.landmark_ids, i) + self.goal_code(i) + self.words(1 - i)

    def reward(self):
        own = -self.distance(self.to_goal)
        return own.mean(axis=0) * (1 - self.local_ratio) + own * self.local_ratio


class SpeakerListener(ParticleEnv):
    """The speaker sees which landmark is the goal and cannot move; the listener moves and only hears the speaker."""

    name = "simple_speaker_listener_v4"
    team_reward = True
    num_goals = 1

    def __init__(self, num_envs: int, **common):
        agents = [Body("speaker_0", 0.075, speaks=True), Body("listener_0", 0.075, BLUE, movable=True)]
        colors = [[0.65, 0.15, 0.15], [0.15, 0.65, 0.15], [0.15, 0.15, 0.65]]
        landmarks = [Body(f"landmark_{i}", 0.04, tuple(color)) for i, color in enumerate(colors)]
        super().__init__(num_envs, agents, landmarks, num_words=3, goal_codes=colors, **common)
        self.to_goal = self.pairs([(1, self.goal_ids[0])])

    def view(self, i):
        if i == 0:
            return self.goal_code(0)
        return self.velocity(i) + self.relative(self.landmark_ids, i) + self.words(0)

    def reward(self):
        return np.repeat(-np.square(self.distance(self.to_goal)), 2, axis=0)


class Spread(ParticleEnv):
    """N agents cover N landmarks without bumping into each other."""

    name = "simple_spread_v3"

    def __init__(self, num_envs: int, N: int = 3, local_ratio: float = 0.5, **common):
        check_count(self.name, "N", N, 1)
        self.local_ratio = check_ratio(self.name, local_ratio)
        agents = [Body(f"agent_{i}", 0.15, BLUE, collide=True, movable=True) for i in range(N)]
        super().__init__(num_envs, agents, [Body(f"landmark_{i}") for i in range(N)], num_words=2, **common)
        self.team_reward = self.local_ratio == 0 or N == 1
        to_landmark = [(i, j) for i in range(N) for j in self.landmark_ids]
        self.judged = self.pairs([*self.contacts.pairs, *to_landmark])
        self.in_contact = np.abs(self.contact_sign)

    def view(self, i):
        said = [row for j in self.others(i) for row in self.words(j)]  # all are silent: zeros
        return self.own(i) + self.relative([*self.landmark_ids, *self.others(i)], i) + said

    def reward(self):
        distance, bumps = self.distance(self.judged), len(self.contacts.pairs)
        own = -self.in_contact.dot(distance[:bumps] < self.contacts.touching)
        nearest = distance[bumps:].reshape(self.num_agents, -1, self.num_envs).min(axis=0)  # agent to each landmark
        return -nearest.sum(axis=0) * (1 - self.local_ratio) + own * self.local_ratio


class Tag(ParticleEnv):
    """Slow adversaries chase fast good agents around obstacles."""

    name = "simple_tag_v3"

    def __init__(self, num_envs: int, num_good: int = 1, num_adversaries: int = 3, num_obstacles: int = 2, **common):
        for option, value in (("num_good", num_good), ("num_adversaries", num_adversaries)):
            check_count(self.name, option, value, 1)
        check_count(self.name, "num_obstacles", num_obstacles, 0)
        self.num_adversaries, self.good = num_adversaries, range(num_adversaries, num_adversaries + num_good)
        agents = [hunter(f"adversary_{i}") for i in range(num_adversaries)]
        agents += [prey(f"agent_{i}", 0.05) for i in range(num_good)]
        landmarks = [Body(f"landmark_{i}", 0.2, collide=True, spread=0.9) for i in range(num_obstacles)]
        super().__init__(num_envs, agents, landmarks, **common)
        self.chases = self.pairs((i, j) for i in self.good for j in range(num_adversaries))

    def view(self, i):
        good_velocities = [row for j in self.good if j != i for row in self.velocity(j)]
        return self.own(i) + self.relative([*self.landmark_ids, *self.others(i)], i) + good_velocities

    def reward(self):
        caught = self.distance(self.chases) < self.chases.touching
        caught = caught.reshape(len(self.good), self.num_adversaries, -1).sum(axis=1)
        reward = np.empty((self.num_agents, self.num_envs))
        reward[: self.num_adversaries] = 10 * caught.sum(axis=0)  # all adversaries share every catch
        reward[self.num_adversaries :] = -10 * caught - out_of_bounds(self.xy[self.good])
        return reward


class WorldComm(ParticleEnv):
    """Tag with food to reach and forests to hide in; the adversaries' leader sees everything and tells the others."""

    name = "simple_world_comm_v3"

    def __init__(
        self,
        num_envs: int,
        num_good: int = 2,
        num_adversaries: int = 4,
        num_obstacles: int = 1,
        num_food: int = 2,
        num_forests: int = 2,
        **common,
    ):
        for option, value in (("num_good", num_good), ("num_adversaries", num_adversaries), ("num_food", num_food)):
            check_count(self.name, option, value, 1)
        for option, value in (("num_obstacles", num_obstacles), ("num_forests", num_forests)):
            check_count(self.name, option, value, 0)
        self.num_adversaries, self.num_forests = num_adversaries, num_forests
        A, first_food = num_adversaries + num_good, num_adversaries + num_good + num_obstacles
        self.good = range(num_adversaries, A)
        self.forests = range(first_food + num_food, first_food + num_food + num_forests)
        self.drawn_twice = num_food + num_forests
        agents = [hunter("leadadversary_0", speaks=True, color=(0.65, 0.15, 0.15))]
        agents += [hunter(f"adversary_{i}") for i in range(num_adversaries - 1)]
        agents += [prey(f"agent_{i}", 0.045) for i in range(num_good)]
        landmarks = [Body(f"landmark_{i}", 0.2, collide=True, spread=0.9) for i in range(num_obstacles)]
        landmarks += [Body(f"food_{i}", 0.03, (0.15, 0.15, 0.65), spread=0.9) for i in range(num_food)]
        landmarks += [Body(f"forest_{i}", 0.3, (0.6, 0.9, 0.6), spread=0.9) for i in range(num_forests)]
        super().__init__(num_envs, agents, landmarks, num_words=4, num_extra=A * num_forests, **common)

        self.chases = self.pairs((i, j) for i in self.good for j in range(num_adversaries))
        self.meals = self.pairs((i, j) for i in self.good for j in range(first_food, first_food + num_food))
        self.to_forest = self.pairs((i, j) for i in range(A) for j in self.forests)
        # for each observed number, the row of `visible` that decides: whose it is and who looks; the last is always 1
        owner = np.full(self.zero + 1, -1)
        for j in range(A):
            owner[[row for row, _ in self.own(j)]] = j
        looker, owner = np.repeat(np.arange(A), self.plus.size // A), owner[self.plus]
        self.visible_row = np.where((owner >= 0) & (owner != looker), looker * A + owner, A * A)

    def view(self, i):
        seen = self.own(i) + self.relative([*self.landmark_ids, *self.others(i)], i)
        velocities = [row for j in self.good if j != i for row in self.velocity(j)]
        in_forest = self.part("extra", i * self.num_forests, (i + 1) * self.num_forests)
        return seen + (in_forest + velocities if i in self.good else velocities + in_forest + self.words(0))

    def add_features(self):
        inside = self.distance(self.to_forest) < self.to_forest.touching
        self.sheltered = inside.reshape(self.num_agents, self.num_forests, self.num_envs)  # agent is in forest
        self.extra[:] = 2.0 * inside - 1

    def hide(self, obs):
        together = (self.sheltered[:, None] & self.sheltered[None]).any(axis=2)  # (A, A, N): in the same forest
        outside = ~self.sheltered.any(axis=1)
        visible = together | (outside[:, None] & outside[None])
        visible[0] = True  # the leader sees all
        visible = np.concatenate([visible.reshape(-1, self.num_envs), np.ones((1, self.num_envs), bool)])
        obs *= visible.take(self.visible_row, axis=0)

    def reward(self):
        to_prey = self.distance(self.chases)
        caught = (to_prey < self.chases.touching).reshape(len(self.good), self.num_adversaries, -1).sum(axis=1)
        to_prey = to_prey.reshape(len(self.good), self.num_adversaries, -1)
        to_food = self.distance(self.meals)
        eaten = (to_food < self.meals.touching).reshape(len(self.good), -1, self.num_envs).sum(axis=1)
        to_food = to_food.reshape(len(self.good), -1, self.num_envs)
        reward = np.empty((self.num_agents, self.num_envs))
        reward[: self.num_adversaries] = 5 * caught.sum(axis=0) - 0.1 * to_prey.min(axis=0)
        reward[self.num_adversaries :] = 2 * eaten - 5 * caught - 0.05 * to_food.min(axis=1)
        reward[self.num_adversaries :] -= 2 * out_of_bounds(self.xy[self.good])
        return reward


def hunter(name: str, speaks: bool = False, color=RED) -> Body:
    return Body(name, 0.075, color, collide=True, movable=True, speaks=speaks, accel=3.0, max_speed=1.0)


def prey(name: str, size: float) -> Body:
    return Body(name, size, GREEN, collide=True, movable=True, accel=4.0, max_speed=1.3)


def out_of_bounds(xy: np.ndarray) -> np.ndarray:
    """Penalty for leaving the arena, per axis 0 below 0.9 and at most 10, summed. (G, 2, N) -> (G, N)."""
    x = np.abs(xy)
    beyond = np.minimum(np.exp(2 * np.minimum(x, 3) - 2), 10)  # 10 is reached at 2.2
    return np.where(x < 0.9, 0, np.where(x < 1, 10 * (x - 0.9), beyond)).sum(axis=1)


SCENARIOS = {
    env.name: env for env in (Simple, Adversary, Crypto, Push, Reference, SpeakerListener, Spread, Tag, WorldComm)
}


def check_count(name: str, option: str, value, least: int) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
        raise EnvError(f"mpe/{name}: {option} must be an integer of at least {least}, not {value!r}")
    if option != "num_envs":
        check_memory(f"mpe/{name}: {option}={value}", 1000.0 * value)  # a Python object each


def check_ratio(name: str, local_ratio) -> float:
    """The share of an agent's own reward; the rest of its weight is on the shared reward."""
    if not isinstance(local_ratio, (int, float)) or not 0 <= local_ratio <= 1:
        raise EnvError(f"mpe/{name}: local_ratio must be a number from 0 to 1, not {local_ratio!r}")
    return local_ratio


def make(name: str, num_envs: int = 1, **options) -> ParticleEnv:
    """Build `num_envs` copies of the MPE task `name`, e.g. "simple_spread_v3".

    All take max_cycles=25, continuous_actions=False and render_mode=None (or "rgb_array"); scenarios add mpe2's own:
    N, local_ratio, num_good, num_adversaries, num_obstacles, num_food, num_forests.
    Raises EnvError for an unknown name, an unknown option, or a value that makes no sense.
    """
    if name not in SCENARIOS:
        raise unknown_name(f"mpe/{name}", SCENARIOS)
    scenario = SCENARIOS[name]
    check_count(name, "num_envs", num_envs, 1)
    known = [p for p in inspect.signature(scenario.__init__).parameters if p not in ("self", "num_envs", "common")]
    known += [p.name for p in inspect.signature(ParticleEnv.__init__).parameters.values() if p.kind == p.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise EnvError(f"mpe/{name} has no option {option!r}; it has {', '.join(known)}")
    if not isinstance(continuous := options.get("continuous_actions", False), bool):
        raise EnvError(f"mpe/{name}: continuous_actions must be True or False, not {continuous!r}")
    return scenario(num_envs, **options)
