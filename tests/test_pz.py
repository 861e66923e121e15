"""PettingZoo environments in worker processes: equal to stepping them by hand, and nothing left when they fail."""

import gc
import importlib
import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
import time
import warnings
from contextlib import closing, nullcontext
from pathlib import Path
from typing import ClassVar

import cleanmarl
from cleanmarl.envs import EnvError, env_seeds, make
from cleanmarl.finite import NonFiniteError

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from pettingzoo import ParallelEnv
from pettingzoo.utils import BaseParallelWrapper

PROC = Path("/proc")
LINUX = pytest.mark.skipif(not PROC.exists(), reason="reads /proc")

TOY = '''
"""Three unlike agents that die on schedule; an observation tells the step and the action that arrived."""
import os
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

class Toy(ParallelEnv):
    metadata = {"name": "toy"}
    possible_agents = ["dict", "one_hot", "image"]

    def __init__(self, deaths=None, truncate=6, fail_at=None, exit_at=None, keep_dead=False, respawn=None):
        self.deaths, self.truncate, self.fail_at, self.exit_at = deaths or {}, truncate, fail_at, exit_at
        self.keep_dead, self.respawn = keep_dead, respawn

    def observation_space(self, agent):
        masked = {"observation": spaces.Box(-9, 9, (2,)), "action_mask": spaces.MultiBinary(3)}
        image = spaces.Box(0, 255, (2, 3), np.uint8)
        return {"dict": spaces.Dict(masked), "one_hot": spaces.Discrete(4), "image": image}[agent]

    def action_space(self, agent):
        return {"dict": spaces.Discrete(3), "one_hot": spaces.Discrete(2, start=5), "image": spaces.Discrete(4)}[agent]

    def observe(self):
        mask = np.array([self.t % 2, 0, 1])
        obs = {
            "dict": {"observation": np.array([self.t, self.got.get("dict", -1)]), "action_mask": mask},
            "one_hot": self.got.get("one_hot", 5) - 4,
            "image": np.full((2, 3), 10 * self.t + self.got.get("image", 0), np.uint8),
        }
        info = {agent: {} for agent in self.agents}
        if "image" in info:
            info["image"]["action_mask"] = np.array([0, 0, 0, self.t < 3], np.int8)
        return {agent: obs[agent] for agent in self.agents}, info

    def reset(self, seed=None, options=None):
        self.t, self.got, self.agents = 0, {}, list(self.possible_agents)
        return self.observe()

    def step(self, actions):
        assert set(actions) == {a for a in self.agents if self.deaths.get(a, 99) > self.t}, actions
        assert "one_hot" not in actions or actions["one_hot"] in (5, 6)
        self.t, self.got = self.t + 1, actions
        if self.t == self.fail_at:
            raise ZeroDivisionError("the toy broke")
        if self.t == self.exit_at:
            os._exit(3)
        term = {a: self.deaths.get(a) == self.t for a in self.agents}
        trunc = {a: self.t == self.truncate for a in self.agents}
        reward = {a: 1.0 + i for i, a in enumerate(self.possible_agents) if a in self.agents}
        if self.t == self.respawn:
            self.agents, self.deaths = list(self.possible_agents), {}
        obs, info = self.observe()
        if not self.keep_dead:
            self.agents = [a for a in self.agents if not (term.get(a) or trunc.get(a))]
        return obs, reward, term, trunc, info

parallel_env = Toy
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """`pz/pz_toys/toy`, found through sys.path, in this process and in the workers."""
    (tmp_path / "pz_toys").mkdir()
    (tmp_path / "pz_toys" / "__init__.py").touch()
    (tmp_path / "pz_toys" / "toy.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    yield "pz/pz_toys/toy"
    for name in ("pz_toys", "pz_toys.toy"):
        sys.modules.pop(name, None)


def gone(pid: int) -> bool:
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not condition():
        time.sleep(0.02)
    return condition()


def pids(envs) -> list[int]:
    return [worker.process.pid for worker in envs.workers]


def play(env_id: str, num_envs: int, steps: int, seed: int = 7, **options) -> list:
    """Random legal actions: [(obs, info)] + [(action, obs, reward, termination, truncation, info), ...]."""
    envs, rng = make(env_id, num_envs, **options), np.random.default_rng(0)
    record = [envs.reset(seed=seed)]
    for _ in range(steps):
        mask = record[-1][-1]["action_mask"]
        action = rng.uniform(0, 1, mask.shape).astype(np.float32) * mask
        if not envs.continuous:
            action = action.argmax(-1)
        record.append((action, *envs.step(action)))
    envs.close()
    return record


def by_hand(module: str, num_envs: int, record: list, seed: int = 7, **options) -> int:
    """Replay a record on environments stepped directly and compare everything. Returns the number of episodes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        parallel_env = importlib.import_module(module).parallel_env
    episodes = 0
    for n, first_seed in enumerate(env_seeds(seed, num_envs)):
        env, seeds = parallel_env(**options), np.random.default_rng(first_seed)
        names = list(env.possible_agents)
        sizes = [int(np.prod(env.observation_space(a).shape)) for a in names]

        def rows(obs, alive, names=names, sizes=sizes):
            out = np.zeros((len(names), max(sizes)), np.float32)
            for a, agent in enumerate(names):
                if agent in alive:
                    out[a, : sizes[a]] = obs[agent].reshape(-1)
            return out

        obs, _ = env.reset(seed=first_seed)
        np.testing.assert_array_equal(record[0][0][n], rows(obs, names))
        returns, length = np.zeros(len(names)), 0
        for action, obs_, reward_, termination, truncation, info in record[1:]:
            alive, actions = list(env.agents), {}
            for agent in alive:
                a = names.index(agent)
                shape = env.action_space(agent).shape
                actions[agent] = action[n, a, : shape[0]] if shape else action[n, a]
            obs, reward, term, trunc, _ = env.step(actions)
            want = np.array([reward[a] if a in alive else 0 for a in names])
            np.testing.assert_array_equal(reward_[n], want.astype(np.float32))
            returns, length, done = returns + reward_[n], length + 1, not env.agents
            assert termination[n] == (done and not any(trunc[a] and not term[a] for a in alive))
            assert truncation[n] == (done and not termination[n])
            if done:
                episodes += 1
                np.testing.assert_array_equal(info["final_obs"][n], rows(obs, alive))
                assert info["_final_obs"][n] and info["_episode"][n] and info["episode"]["l"][n] == length
                np.testing.assert_allclose(info["episode"]["r"][n], returns, rtol=1e-12)
                if trunc[alive[0]]:
                    np.testing.assert_array_equal(info["final_state"][n], np.ravel(env.state()).astype(np.float32))
                obs, _ = env.reset(seed=int(seeds.integers(2**31)))
                returns, length = np.zeros(len(names)), 0
            elif "_episode" in info:
                assert not info["_episode"][n] and not info["final_obs"][n].any() and not info["episode"]["r"][n].any()
            np.testing.assert_array_equal(obs_[n], rows(obs, env.agents))
            np.testing.assert_array_equal(info["agent_mask"][n], [a in env.agents for a in names])
            np.testing.assert_array_equal(info["state"][n], np.ravel(env.state()).astype(np.float32))
            for a, agent in enumerate(names):
                space = env.action_space(agent)
                legal = (space.shape[0] if space.shape else space.n) if agent in env.agents else 1
                assert info["action_mask"][n, a].tolist() == [k < legal for k in range(info["action_mask"].shape[-1])]
        env.close()
    return episodes


@pytest.mark.parametrize("num_envs, num_workers", [(3, 0), (4, 1), (5, 2)])
def test_spread_equals_mpe2(num_envs, num_workers):
    record = play("pz/mpe2/simple_spread_v3", num_envs, 20, num_workers=num_workers, max_cycles=6)
    assert by_hand("mpe2.simple_spread_v3", num_envs, record, max_cycles=6) == 3 * num_envs


@pytest.mark.parametrize("name", ["simple_tag_v3", "simple_speaker_listener_v4"])
@pytest.mark.parametrize("continuous", [False, True])
def test_unlike_agents_equal_mpe2(name, continuous):
    options = {"max_cycles": 6, "continuous_actions": continuous}
    record = play(f"pz/mpe2/{name}", 3, 14, num_workers=2, **options)
    assert by_hand(f"mpe2.{name}", 3, record, **options) == 6


def test_agent_by_agent_environments_are_converted(toy):
    """A module that has only PettingZoo's AEC environment plays as the parallel one does, deaths included."""
    toys = Path(importlib.import_module("pz_toys").__file__).parent
    for package, name, options in [
        ("mpe2", "simple_spread_v3", {"max_cycles": 6}),
        ("pettingzoo.butterfly", "knights_archers_zombies_v11", {"spawn_delay": 5, "line_death": True}),
    ]:
        (toys / f"only_{name}.py").write_text(f"from {package}.{name} import env")
        converted = play(f"pz/pz_toys/only_{name}", 2, 60, num_workers=1, **options)
        assert by_hand(f"{package}.{name}", 2, converted, **options) >= 2 * (package == "mpe2")
    assert not np.all([row[-1]["agent_mask"] for row in converted])


def test_dying_agents_equal_knights_archers_zombies():
    """Agents of this game are killed one after another, and it ends when all of them are."""
    options = {"spawn_delay": 5, "line_death": True}
    record = play("pz/butterfly/knights_archers_zombies_v11", 2, 250, num_workers=2, **options)
    assert by_hand("pettingzoo.butterfly.knights_archers_zombies_v11", 2, record, **options) >= 2
    alive = np.array([row[-1]["agent_mask"].sum(-1) for row in record])
    assert 0 < alive.min() < alive.max() == 4


def test_pursuit_equals_pettingzoo():
    record = play("pz/sisl/pursuit_v5", 2, 9, num_workers=1, max_cycles=4)
    assert by_hand("pettingzoo.sisl.pursuit_v5", 2, record, max_cycles=4) == 4


def test_multiwalker_falls():
    """Continuous actions; its state() fails once a walker fell, and then the state before stands in."""
    record = play("pz/sisl/multiwalker_v9", 2, 150, num_workers=2)
    ends = [row for row in record[1:] if row[3].any()]
    assert ends
    for row in ends:
        n = int(np.flatnonzero(row[3])[0])
        before = record[[r is row for r in record].index(True) - 1]
        np.testing.assert_array_equal(row[-1]["final_state"][n], before[-1]["state"][n])
        assert row[-1]["final_obs"][n].any() and row[-1]["agent_mask"].all()


def test_the_state_goes_on_after_a_walker_has_fallen():
    """PettingZoo's fails from then on: the observations of all stand in for it, in such games from the start."""
    envs = make("pz/sisl/multiwalker_v9", 1, num_workers=0, terminate_on_fall=False)
    obs, info = envs.reset(seed=1)
    rng, last, steps = np.random.default_rng(0), None, 0
    for _ in range(300):
        obs, _, _, _, info = envs.step(rng.uniform(-1, 1, envs.action_space.shape).astype(np.float32))
        np.testing.assert_array_equal(info["state"], obs.reshape(1, -1))
        if last is not None and not info["agent_mask"].all():
            assert (info["state"] != last).any()
            steps += 1
        last = info["state"].copy()
    assert steps > 50
    envs.close()


@pytest.mark.parametrize("options", [{}, {"terminate_on_fall": False}, {"terminate_on_fall": False, "n_walkers": 2}])
def test_multiwalker_ends_at_its_limit_by_truncation(options):
    """PettingZoo's says that all have terminated there, and nothing of who fell in that step."""
    num_limits = 0
    for max_cycles in range(2, 90, 4):
        envs = make("pz/sisl/multiwalker_v9", 1, num_workers=0, max_cycles=max_cycles, **options)
        game = envs.block.envs[0].unwrapped.env
        rng, (_, info) = np.random.default_rng(max_cycles), envs.reset(seed=max_cycles)
        begin, dones, length = game.reset, [], 0
        game.reset = lambda: (dones.extend(game.last_dones), begin())  # noqa: B023 (as it was when the episode ended)
        while not dones:
            alive, length = info["agent_mask"][0], length + 1
            action = rng.uniform(-1, 1, envs.action_space.shape).astype(np.float32)
            _, _, termination, truncation, info = envs.step(action)
        dones = np.array(dones, bool)
        at_limit = length == max_cycles and not dones.all()
        assert truncation[0] == at_limit and termination[0] == (not at_limit)
        np.testing.assert_array_equal(info["final_agent_mask"][0], alive & ~dones if at_limit else alive & False)
        assert not at_limit or info["final_obs"][0][alive & ~dones].any(-1).all()
        num_limits += at_limit
        envs.close()
    assert num_limits > 5


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("keep_dead", [False, True])
def test_masks_padding_and_death(toy, num_workers, keep_dead):
    if keep_dead:  # an environment that goes on listing those who are done
        options = {"deaths": {"dict": 2, "image": 4}, "keep_dead": True}
    else:
        options = {"deaths": {"dict": 2, "image": 4}}
    envs = make(toy, 1, num_workers=num_workers, truncate=5, **options)
    obs, info = envs.reset(seed=1)
    assert obs.shape == (1, 3, 6) and envs.obs_sizes.tolist() == [2, 4, 6] and envs.action_sizes.tolist() == [3, 2, 4]
    assert obs[0].tolist() == [[0, -1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0] * 6]
    assert info["action_mask"][0].tolist() == [
        [False, False, True, False],
        [True, True, False, False],
        [False] * 3 + [True],
    ]
    assert info["state"].tolist() == [obs.reshape(-1).tolist()]  # it has no state()

    obs, reward, term, trunc, info = envs.step(np.array([[2, 1, 3]]))
    assert obs[0].tolist() == [[1, 2, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [13] * 6]
    assert reward.tolist() == [[1, 2, 3]] and info["action_mask"][0, 0].tolist() == [True, False, True, False]

    obs, reward, term, trunc, info = envs.step(np.array([[0, 0, 3]]))  # the first agent dies: paid once more
    assert reward.tolist() == [[1, 2, 3]] and info["agent_mask"].tolist() == [[False, True, True]]
    assert not obs[0, 0].any() and info["action_mask"][0, 0].tolist() == [True, False, False, False]
    assert not term.any() and not trunc.any() and "final_obs" not in info

    for action in ([[99, 0, 3]], [[-1, 0, 0]]):  # what dead agents say is ignored; without a legal action, 0 is
        obs, reward, term, trunc, info = envs.step(np.array(action))
        assert reward.tolist() == [[0, 2, 3]]
        assert info["action_mask"][0, 2].tolist() == [True, False, False, False]
    assert info["agent_mask"].tolist() == [[False, True, False]]

    obs, reward, term, trunc, info = envs.step(np.array([[0, 1, 0]]))
    assert trunc.tolist() == [True] and term.tolist() == [False]
    assert info["final_obs"][0].tolist() == [[0] * 6, [0, 0, 1, 0, 0, 0], [0] * 6]
    assert info["final_state"][0].tolist() == info["final_obs"].reshape(-1).tolist()
    assert info["final_action_mask"][0].tolist() == [
        [True] + [False] * 3,
        [True, True, False, False],
        [True] + [False] * 3,
    ]
    assert info["final_agent_mask"].tolist() == [[False, True, False]]
    assert info["episode"]["r"].tolist() == [[2, 10, 12]] and info["episode"]["l"].tolist() == [5]
    assert info["agent_mask"].all() and obs[0, 0].tolist() == [0, -1, 0, 0, 0, 0]
    envs.close()


PICTURES = '''
"""Two agents with cameras, of which the second dies on schedule; every pixel tells step, row, column and colour."""
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

class Cameras(ParallelEnv):
    metadata = {"name": "cameras", "team_reward": True, "may_die": True}
    possible_agents = ["left", "right"]

    def __init__(self, deaths=2, shapes=((2, 3, 3), (2, 3, 3)), dtype=np.uint8, state=None, masked=False):
        self.shapes = dict(zip(self.possible_agents, shapes))
        self.deaths, self.dtype, self.masked = deaths, dtype, masked
        if state == "picture":
            self.state = lambda: np.full((4, 5, 3), 100 + self.t, np.uint8)
        elif state == "vector":
            self.state = lambda: np.array([self.t, 0.5])

    def observation_space(self, agent):
        picture = spaces.Box(0, 255, self.shapes[agent], self.dtype)
        return spaces.Dict({"observation": picture, "action_mask": spaces.MultiBinary(2)}) if self.masked else picture

    def action_space(self, agent):
        return spaces.Discrete(2)

    def observe(self):
        obs = {}
        for a, agent in enumerate(self.agents):
            picture = 100 * a + 20 * self.t + np.arange(np.prod(self.shapes[agent])).reshape(self.shapes[agent])
            picture = picture.astype(self.dtype)
            obs[agent] = {"observation": picture, "action_mask": np.array([0, 1])} if self.masked else picture
        return obs, {}

    def reset(self, seed=None, options=None):
        self.t, self.agents = 0, list(self.possible_agents)
        return self.observe()

    def step(self, actions):
        self.t += 1
        agents = self.agents
        obs, info = self.observe()
        term = {agent: agent == "right" and self.t == self.deaths for agent in agents}
        trunc = dict.fromkeys(agents, self.t == 3)
        self.agents = [agent for agent in agents if not (term[agent] or trunc[agent])]
        return obs, dict.fromkeys(agents, 1.0), term, trunc, info

parallel_env = Cameras
'''


@pytest.fixture
def cameras(toy):
    Path(importlib.import_module("pz_toys").__file__).with_name("cameras.py").write_text(PICTURES)
    importlib.invalidate_caches()
    yield "pz/pz_toys/cameras"
    sys.modules.pop("pz_toys.cameras", None)


def picture(a: int, t: int) -> list:
    return (100 * a + 20 * t + np.arange(18).reshape(2, 3, 3)).tolist()


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_pictures_keep_shape_and_type(cameras, num_workers, masked):
    envs = make(cameras, 2, pictures=True, num_workers=num_workers, masked=masked)
    space = envs.single_observation_space
    assert space.shape == (2, 2, 3, 3) and space.dtype == np.uint8 and (space.low.min(), space.high.max()) == (0, 255)
    assert envs.observation_space.shape == (2, 2, 2, 3, 3) and envs.obs_sizes.tolist() == [18, 18]
    assert envs.single_state_space.shape == (2, 3, 6) and envs.state_size == 36  # it has no state()
    obs, info = envs.reset(seed=1)
    blank = np.zeros((2, 3, 3), int).tolist()
    for t in range(3):
        seen = [picture(0, t), picture(1, t) if t < 2 else blank]  # the second agent is dead
        assert obs.dtype == info["state"].dtype == np.uint8
        assert obs.tolist() == [seen] * 2
        np.testing.assert_array_equal(info["state"], np.concatenate([obs[:, 0], obs[:, 1]], axis=-1))
        assert info["agent_mask"].tolist() == [[True, t < 2]] * 2
        assert info["action_mask"][:, 0].tolist() == [[not masked, True]] * 2
        obs, _, _, truncation, info = envs.step(np.array([[1, 1 - t // 2]] * 2))
    assert truncation.all() and info["final_obs"].dtype == np.uint8
    assert info["final_obs"].tolist() == [[picture(0, 3), blank]] * 2
    assert info["final_state"].shape == (2, 2, 3, 6) and info["final_state"][1, ..., :3].tolist() == picture(0, 3)
    assert obs.tolist() == [[picture(0, 0), picture(1, 0)]] * 2
    envs.close()


def test_states_of_environments_with_pictures(cameras):
    """A state that is a picture stays one; a vector is float32, as everywhere."""
    envs = make(cameras, 1, pictures=True, num_workers=0, state="picture")
    assert envs.single_state_space == gym.spaces.Box(0, 255, (4, 5, 3), np.uint8) and envs.state_size == 60
    envs.reset(seed=1)
    state = envs.step(np.zeros((1, 2), int))[-1]["state"]
    assert state.shape == (1, 4, 5, 3) and state.dtype == np.uint8 and (state == 101).all()
    envs = make(cameras, 1, pictures=True, num_workers=0, state="vector")
    state = envs.reset(seed=1)[1]["state"]
    assert envs.single_state_space.shape == (2,) and state.dtype == np.float32 and state.tolist() == [[0, 0.5]]


def test_what_is_no_picture_is_a_vector(cameras):
    """Numbers that are no bytes, and matrices; pictures are wanted, so vectors are welcome too."""
    for options, size in [({"dtype": np.float32}, 18), ({"shapes": ((2, 3), (4, 5))}, 20)]:
        for wish in ({}, {"pictures": True}):
            envs = make(cameras, 1, num_workers=0, **wish, **options)
            obs, info = envs.reset(seed=1)
            assert obs.shape == (1, 2, size) and obs.dtype == info["state"].dtype == np.float32
            assert info["state"].shape == (1, 2 * size) == (1, *envs.single_state_space.shape)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_pictures_that_a_script_cannot_take(cameras, num_workers):
    line = rf"{cameras} has pictures \(2, 3, 3\) and this script needs vectors: see .*Pictures for many agents"
    with pytest.raises(EnvError, match=line):
        make(cameras, 1, num_workers=num_workers)
    for first, seen in [((2, 3, 3), "(2, 3, 3), (4, 4, 3)"), ((2, 3), "no picture, (4, 4, 3)")]:
        with pytest.raises(EnvError) as error:
            make(cameras, 1, num_workers=num_workers, pictures=True, shapes=(first, (4, 4, 3)))
        assert f"all agents need pictures of one shape, or none, not {seen}" in str(error.value)


class Masked(ParallelEnv):
    """One agent of three actions that says which are legal by `masks`: of its observations, or of its info."""

    metadata: ClassVar = {"name": "masked"}
    possible_agents: ClassVar = ["a"]

    def __init__(self, key="observation", seen=False, size=3, legal=1):
        self.key, self.seen, self.mask, self.agents = key, seen, np.full(size, legal), ["a"]

    def observation_space(self, agent):
        box = gym.spaces.Box(0, 1, (2,))
        return gym.spaces.Dict({self.key: box, "action_mask": gym.spaces.MultiBinary(3)}) if self.seen else box

    def action_space(self, agent):
        return gym.spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        obs = np.zeros(2, np.float32)
        obs = {self.key: obs, "action_mask": self.mask} if self.seen else obs
        return {"a": obs}, {"a": {} if self.seen else {"action_mask": self.mask}}


class Shrinking(ParallelEnv):
    """Two agents of which one dies after a step and both are done after two; the state is of those who are left."""

    metadata: ClassVar = {"name": "shrinking"}
    possible_agents: ClassVar = ["a", "b"]

    def __init__(self, dies=True):
        self.dies = dies

    def observation_space(self, agent):
        return gym.spaces.Box(0, 9, (2,))

    def action_space(self, agent):
        return gym.spaces.Discrete(2)

    def observe(self, agents):
        return dict.fromkeys(agents, np.full(2, self.t, np.float32)), {agent: {} for agent in agents}

    def reset(self, seed=None, options=None):
        self.agents, self.t = ["a", "b"], 0
        return self.observe(self.agents)

    def step(self, actions):
        self.t += 1
        before, late = self.agents, self.t == 2
        self.agents = [] if late else ["a"] if self.dies else before
        obs, info = self.observe(before)
        term, trunc = ({agent: agent not in self.agents and x for agent in before} for x in (not late, late))
        return obs, dict.fromkeys(before, 0.0), term, trunc, info

    def state(self):
        return np.full(2 * len(self.agents), self.t)


def test_a_state_that_shrinks_with_the_team_is_refused():
    """Once nobody is left the state before stands in; while others play on it would be wrong."""
    envs = make(Shrinking, 1, num_workers=0, dies=False)
    envs.reset(seed=1)
    assert envs.step(np.zeros((1, 2), int))[-1]["state"].tolist() == [[1, 1, 1, 1]]
    info = envs.step(np.zeros((1, 2), int))[-1]
    assert info["final_state"].tolist() == [[1, 1, 1, 1]] and info["state"].tolist() == [[0, 0, 0, 0]]
    envs = make(Shrinking, 1, num_workers=0)
    envs.reset(seed=1)
    with pytest.raises(EnvError, match=r"Shrinking: state\(\) is of size 2, and was of 4 after the first reset\(\)"):
        envs.step(np.zeros((1, 2), int))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"key": "obs", "seen": True}, r"a sees \['action_mask', 'obs'\]: a mask stands beside 'observation' alone"),
        ({"seen": True, "size": 5}, r"a has 3 actions and an action_mask \(5,\)"),
        ({"size": 1}, r"a has 3 actions and an action_mask \(1,\)"),
        ({"legal": -np.inf}, r"Masked: the action_mask of agent a must be of 0 and 1, not \[-inf, -inf, -inf\]"),
    ],
)
def test_masks_of_another_form_are_refused(options, line):
    with pytest.raises(EnvError, match=line):
        make(Masked, 1, num_workers=0, **options)
    assert make(Masked, 1, num_workers=0, seen=options.get("seen", False)).reset()[1]["action_mask"].all()


def test_cooperative_pong_equals_pettingzoo():
    """Every picture, state and reward of the game that renders: the other one shows nothing but black."""
    name, options = "butterfly/cooperative_pong_v6", {"max_cycles": 60}
    envs = make(f"pz/{name}", 2, discrete=True, pictures=True, num_workers=2, **options)
    assert envs.single_observation_space.shape == (2, 280, 480, 3) and envs.single_state_space.shape == (280, 480, 3)
    assert envs.team_reward and not envs.may_die
    seeds, module = env_seeds(3, 2), importlib.import_module(f"pettingzoo.{name.replace('/', '.')}")
    originals = [module.parallel_env(render_mode="rgb_array", **options) for _ in seeds]
    rngs, ends, obs_and_info = [np.random.default_rng(seed) for seed in seeds], 0, envs.reset(seed=3)
    want = [env.reset(seed=seed)[0] for env, seed in zip(originals, seeds)]
    rng = np.random.default_rng(0)
    for _ in range(150):
        obs, info = obs_and_info
        for n, env in enumerate(originals):
            np.testing.assert_array_equal(obs[n], np.stack([want[n][agent] for agent in env.possible_agents]))
            np.testing.assert_array_equal(info["state"][n], env.state())
        action = rng.integers(3, size=(2, 2))
        obs, reward, termination, truncation, info = envs.step(action)
        obs_and_info = obs, info
        for n, env in enumerate(originals):
            want[n], rewards, term, trunc, _ = env.step(dict(zip(env.possible_agents, action[n])))
            assert reward[n].tolist() == [np.float32(rewards[agent]) for agent in env.possible_agents]
            assert termination[n] == term["paddle_0"] and truncation[n] == (trunc["paddle_0"] and not termination[n])
            if not env.agents:
                ends += 1
                last = np.stack([want[n][agent] for agent in env.possible_agents])
                np.testing.assert_array_equal(info["final_obs"][n], last)
                np.testing.assert_array_equal(info["final_state"][n], env.state())
                want[n] = env.reset(seed=int(rngs[n].integers(2**31)))[0]
        assert (obs.reshape(4, -1) > 0).any(-1).all()  # paddles and ball
    assert ends > 2
    envs.close()


def test_the_wrapper_of_the_page_shows_small_pictures(toy):
    """The code of docs/environments.md, as a file of the user."""
    page = (Path(__file__).parents[1] / "docs" / "environments.md").read_text()
    (code,) = [block.partition("```")[0] for block in page.split("```python\n")[1:] if "class SmallPong" in block]
    Path(importlib.import_module("pz_toys").__file__).with_name("small_pong.py").write_text(code)
    importlib.invalidate_caches()
    options = {"discrete": True, "pictures": True, "num_workers": 0}
    small = make("pz/pz_toys.small_pong:SmallPong?max_cycles=40", 2, **options)
    whole = make("pz/butterfly/cooperative_pong_v6?max_cycles=40", 2, **options)
    assert small.single_observation_space == gym.spaces.Box(0, 255, (2, 70, 120, 1), np.uint8)
    assert (small.team_reward, small.may_die) == (whole.team_reward, whole.may_die) == (True, False)
    (obs, info), (whole_obs, whole_info) = small.reset(seed=1), whole.reset(seed=1)
    rng = np.random.default_rng(0)
    for _ in range(60):
        for ours, theirs in ((obs, whole_obs), (info["state"], whole_info["state"])):
            brightest = theirs.reshape(*theirs.shape[:-3], 70, 4, 120, 4, 3).max((-4, -2, -1))
            np.testing.assert_array_equal(ours[..., 0], brightest)
        action = rng.integers(3, size=(2, 2))
        obs, reward, *_, info = small.step(action)
        whole_obs, whole_reward, *_, whole_info = whole.step(action)
        np.testing.assert_array_equal(reward, whole_reward)
    sys.modules.pop("pz_toys.small_pong")


def test_modules_of_the_working_folder(tmp_path, toy):
    """A script elsewhere finds them, and so do its workers; by the name of a class, too."""
    (tmp_path / "elsewhere").mkdir()
    script = tmp_path / "elsewhere" / "script.py"
    script.write_text("""
import sys
from cleanmarl.envs import make
for env_id in sys.argv[1:]:
    for num_workers in (0, 1):
        envs = make(env_id, 1, pictures=True, num_workers=num_workers)
        print(envs.reset(seed=1)[0].shape)
        envs.close()
""")
    (tmp_path / "my_cameras.py").write_text(PICTURES)

    def run(*env_ids):
        command = [sys.executable, str(script), *env_ids]
        root = Path(cleanmarl.__file__).parents[1]
        env = {**os.environ, "PYTHONPATH": str(root)}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)

    done = run("pz/my_cameras:Cameras", toy)
    assert done.stdout.splitlines() == ["(1, 2, 2, 3, 3)"] * 2 + ["(1, 3, 6)"] * 2 and not done.stderr
    assert "pz/my_cameras:Camera: the module my_cameras has no Camera" in run("pz/my_cameras:Camera").stderr
    assert "pz/my_camera:Cameras: there is no module my_camera" in run("pz/my_camera:Cameras").stderr


def test_what_is_known_of_reward_and_death(cameras, toy, monkeypatch):
    """The options go before what an environment says of itself, and where nothing is known nothing good is assumed."""
    for env_id, options, expected in [
        (toy, {}, (False, True)),
        (f"{toy}?team_reward=True", {}, (True, True)),
        (toy, {"team_reward": True, "may_die": False}, (True, False)),
        (cameras, {}, (True, True)),
        (f"{cameras}?team_reward=false&may_die=false", {}, (False, False)),
        ("pz/mpe2/simple_spread_v3?may_die=True", {}, (False, True)),
        ("pz/mpe2/simple_formation_v1", {}, (True, False)),
        ("pz/mpe2/simple_line_v1", {}, (True, False)),
        ("pz/mpe2/simple_tag_v3", {}, (False, False)),
        ("pz/sisl/pursuit_v5", {}, (True, False)),
        ("pz/sisl/pursuit_v5?shared_reward=0.5", {}, (False, False)),
    ]:
        envs = make(env_id, 1, pictures=True, num_workers=0, **options)
        assert (envs.team_reward, envs.may_die) == expected
        envs.close()
    with pytest.raises(EnvError, match="team_reward must be True or False, not 'yes'"):
        make(f"{toy}?team_reward=yes", 1)
    monkeypatch.setitem(importlib.import_module("pz_toys.toy").Toy.metadata, "team_reward", "yes")
    with pytest.raises(EnvError, match=r"the metadata of .*: team_reward must be True or False, not 'yes'"):
        make(toy, 1)


def test_an_agent_that_dies_at_the_time_limit_is_not_among_the_living(toy):
    envs = make(toy, 1, num_workers=0, truncate=3, deaths={"dict": 3})
    _, info = envs.reset()
    for _ in range(3):
        assert info["agent_mask"].all()
        _, _, term, trunc, info = envs.step(info["action_mask"].argmax(-1))
    assert trunc.tolist() == [True] and term.tolist() == [False]
    assert info["final_agent_mask"].tolist() == [[False, True, True]] and info["agent_mask"].all()
    # a critic that values what comes next sees it as in the rows after an earlier death
    assert not info["final_obs"][0, 0].any() and info["final_obs"][0, 1].any()
    assert info["final_state"].tolist() == [info["final_obs"].ravel().tolist()]
    assert info["final_action_mask"][0, 0].tolist() == [True, False, False, False]
    assert info["final_action_mask"][0, 1].tolist() == [True, True, False, False]
    envs.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_death_where_none_was_promised_is_said(toy, num_workers):
    """Critics showed what a dead agent had seen as if it were alive."""
    with closing(make(toy, 2, num_workers=num_workers, may_die=False, deaths={"one_hot": 2})) as envs:
        _, info = envs.reset()
        *_, info = envs.step(info["action_mask"].argmax(-1))
        with pytest.raises(EnvError, match="toy: one_hot is gone, or not there yet, and may_die is False"):
            envs.step(info["action_mask"].argmax(-1))


class Paid(ParallelEnv):
    """Two agents with these rewards; the third is gone after the first step."""

    metadata = {"team_reward": True}  # noqa: RUF012

    def __init__(self, first=1.0, second=1.0):
        self.possible_agents, self.rewards = ["first", "second", "third"], [first, second, second]

    def observation_space(self, agent):
        return FIVE

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents = [*self.possible_agents]
        return dict.fromkeys(self.agents, np.ones(5, np.float32)), {key: {} for key in self.agents}

    def step(self, actions):
        acted, self.agents = self.agents, ["first", "second"]
        obs, ends = dict.fromkeys(acted, np.ones(5, np.float32)), {agent: agent == "third" for agent in acted}
        return obs, dict(zip(acted, self.rewards)), ends, dict.fromkeys(acted, False), {key: {} for key in acted}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_team_whose_agents_do_not_earn_the_same_is_said(num_workers):
    """Learners took the mean of rewards that were each agent's own."""
    action = np.zeros((2, 3), np.int64)
    for first, second in ((1.0, 1.0), (1e6, 1e6 + 1), (0.1 + 0.2, 0.3)):  # but for roundings
        with closing(make(Paid, 2, num_workers=num_workers, first=first, second=second)) as envs:
            envs.reset()
            rewards = [envs.step(action)[1][0].tolist() for _ in range(3)]
            assert [len([x for x in row if x]) for row in rewards] == [3, 2, 2]  # the dead earn nothing
    for first, second in ((1.0, 2.0), (0.0, 0.01), (-1e6, -1e6 + 200)):
        with closing(make(Paid, 2, num_workers=num_workers, first=first, second=second)) as envs:
            envs.reset()
            line = r"Paid: environment 0: first earns \S+ and second \S+ in one step, and team_reward is True$"
            with pytest.raises(EnvError, match=line):
                envs.step(action)
        options = {"first": first, "second": second, "team_reward": False}
        with closing(make(Paid, 2, num_workers=num_workers, **options)) as envs:
            envs.reset()
            envs.step(action)


def test_who_is_among_the_agents_again_is_alive_again(toy):
    """As an environment does it that lets units respawn: their death is a termination."""
    envs = make(toy, 1, num_workers=0, deaths={"dict": 2}, respawn=4)
    _, info = envs.reset()
    alive, rewards = [], []
    for _ in range(6):
        alive.append(bool(info["agent_mask"][0, 0]))
        obs, reward, _, trunc, info = envs.step(info["action_mask"].argmax(-1))
        rewards.append(reward[0, 0])
        if len(alive) == 4:
            assert obs[0, 0, 0] == 4 and info["action_mask"][0, 0].tolist() == [False, False, True, False]
    assert alive == [True, True, False, False, True, True] and rewards == [1, 1, 0, 0, 1, 1]
    assert trunc.tolist() == [True] and info["final_agent_mask"].all()


def test_last_agent_terminated(toy):
    """Everyone is terminated, the last one in the step of the time limit: that is a termination."""
    envs = make(toy, 1, num_workers=0, truncate=3, deaths={"dict": 1, "one_hot": 3, "image": 3})
    _, info = envs.reset()
    for step in range(3):
        _, _, term, trunc, info = envs.step(info["action_mask"].argmax(-1))
        assert (term.tolist(), trunc.tolist()) == ([step == 2], [False])


def test_seeds():
    """Same seed, same episodes, whatever the number of workers and of environments; without a seed, they go on."""
    options = {"max_cycles": 3}
    a, b, c = (play("pz/mpe2/simple_spread_v3", n, 8, num_workers=w, **options) for n, w in [(3, 0), (3, 2), (2, 1)])
    other = play("pz/mpe2/simple_spread_v3", 3, 8, seed=8, num_workers=0, **options)
    for x, y in zip(a, b):
        np.testing.assert_array_equal(x[-1]["state"], y[-1]["state"])
    np.testing.assert_array_equal(a[0][0][:2], c[0][0])
    assert not np.array_equal(a[0][0], other[0][0]) and not np.array_equal(a[0][0][0], a[0][0][1])
    starts = []
    for num_workers in (0, 2):
        envs = make("pz/mpe2/simple_spread_v3", 2, num_workers=num_workers)
        starts.append([envs.reset(seed=1)[0], envs.reset()[0], envs.reset()[0], envs.reset(seed=1)[0]])
        envs.close()
    np.testing.assert_array_equal(starts[0], starts[1])
    one, two, three, again = starts[0]
    assert not np.array_equal(one, two) and not np.array_equal(two, three) and np.array_equal(one, again)


def test_results_stay_as_they_were():
    """What step returned is not overwritten by the next step."""
    envs = make("pz/mpe2/simple_spread_v3", 2, num_workers=2)
    obs, info = envs.reset(seed=1)
    kept = obs.copy(), info["state"].copy()
    envs.step(np.ones((2, 3), np.int64))
    np.testing.assert_array_equal(obs, kept[0])
    np.testing.assert_array_equal(info["state"], kept[1])
    envs.close()


@LINUX
def test_workers_do_without_torch():
    """It would take each of them two seconds and 200 MB."""
    envs = make("pz/mpe2/simple_spread_v3", 2, num_workers=2)
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in [os.getpid(), *pids(envs)]]
    assert ["libtorch" in text for text in maps] == [True, False, False]
    envs.close()


@LINUX
def test_close_leaves_nothing():
    envs = make("pz/mpe2/simple_spread_v3", 3, num_workers=2)
    envs.reset(seed=1)
    running = pids(envs)
    assert len(running) == 2 and "memfd:cleanmarl" in Path("/proc/self/maps").read_text()
    envs.close()
    envs.close()
    gc.collect()
    assert all(map(gone, running)) and "memfd:cleanmarl" not in Path("/proc/self/maps").read_text()
    with pytest.raises(EnvError, match="closed"):
        envs.reset()
    with pytest.raises(EnvError, match="close"):
        envs.step(np.zeros((3, 3), np.int64))

    envs = make("pz/mpe2/simple_spread_v3", 2, num_workers=1)
    running = pids(envs)
    del envs
    gc.collect()
    assert wait_for(lambda: all(map(gone, running)), 60)


@LINUX
def test_killed_worker():
    """SIGKILL between two steps: an error that names the worker, within seconds, and no process left."""
    envs = make("pz/mpe2/simple_spread_v3", 4, num_workers=2)
    envs.reset(seed=1)
    running = pids(envs)
    os.kill(running[1], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(
        RuntimeError, match=rf"worker 1 \(pid {running[1]}, environments 2 to 3\) died \(signal 9"
    ) as caught:
        for _ in range(3):
            envs.step(np.zeros((4, 3), np.int64))
    assert time.monotonic() - start < 60 and "\n" not in str(caught.value)
    assert all(map(gone, running)) and envs.closed


@LINUX
def test_worker_that_raises_or_exits(toy):
    envs = make(toy, 3, num_workers=2, fail_at=2)
    _, info = envs.reset()
    running = pids(envs)
    _, _, _, _, info = envs.step(info["action_mask"].argmax(-1))
    with pytest.raises(RuntimeError) as caught:
        envs.step(info["action_mask"].argmax(-1))
    for text in (f"worker 0 (pid {running[0]}, environments 0 to 0)", "Traceback", "ZeroDivisionError: the toy broke"):
        assert text in str(caught.value)
    assert "in environment 0 of pz/pz_toys/toy" in str(caught.value) and all(map(gone, running))

    envs = make(toy, 2, num_workers=2, exit_at=1)
    _, info = envs.reset()
    with pytest.raises(RuntimeError, match=r"worker 0 .* died \(exit status 3\)"):
        envs.step(info["action_mask"].argmax(-1))


@LINUX
def test_workers_end_with_their_parent():
    """kill -9 of the main process, in the middle of its steps."""
    script = """
import numpy as np
from cleanmarl.envs import make
envs = make("pz/mpe2/simple_spread_v3", 4, num_workers=2)
envs.reset(seed=1)
print(*[w.process.pid for w in envs.workers], flush=True)
while True:
    envs.step(np.zeros((4, 3), np.int64))
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    running = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(running) == 2 and not any(map(gone, running))
    time.sleep(0.2)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_for(lambda: all(map(gone, running)), 60)


@LINUX
def test_workers_ignore_ctrl_c_and_need_no_main_guard(tmp_path):
    """SIGINT leaves the workers alone, they do not run the script again, and the end of the interpreter ends them."""
    script = tmp_path / "script.py"
    script.write_text("""
import os, signal
import numpy as np
from cleanmarl.envs import make
print("running", flush=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
envs = make("pz/mpe2/simple_spread_v3", 2, num_workers=2)
envs.reset(seed=1)
pids = [w.process.pid for w in envs.workers]
for pid in pids:
    os.kill(pid, signal.SIGINT)
envs.step(np.zeros((2, 3), np.int64))
print(*pids, flush=True)
""")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "running" and len(lines) == 2 and not done.stderr
    assert wait_for(lambda: all(gone(int(pid)) for pid in lines[1].split()), 60)


def test_illegal_actions(toy):
    envs = make("pz/mpe2/simple_speaker_listener_v4", 2, num_workers=0)
    with pytest.raises(EnvError, match="reset"):
        envs.step(np.zeros((2, 2), np.int64))
    envs.reset(seed=1)
    before = envs.arrays["obs"].copy()
    for action, text in [
        (np.zeros((2, 3), np.int64), r"integers of shape \(2, 2\), not int64 of shape \(2, 3\)"),
        (np.zeros((2, 2)), "integers of shape"),
        (np.array([[0, 0], [3, 0]]), r"environment 1, agent speaker_0: action 3 is illegal, legal are \[0, 1, 2\]"),
        (np.array([[0, -1], [0, 0]]), "environment 0, agent listener_0: action -1 is illegal"),
        (np.array([[0, 0], [0, 9]]), "environment 1, agent listener_0: action 9 is illegal"),
    ]:
        with pytest.raises(EnvError, match=text):
            envs.step(action)
    np.testing.assert_array_equal(envs.arrays["obs"], before)
    assert envs.step(np.zeros((2, 2), np.int64))[1].shape == (2, 2)  # it goes on

    envs = make("pz/mpe2/simple_speaker_listener_v4", 2, num_workers=0, continuous_actions=True)
    envs.reset(seed=1)
    assert envs.continuous and envs.single_action_space.high.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    action = np.zeros((2, 2, 5), np.float32)
    action[0, 0, 4] = np.nan  # an action that the speaker does not have
    envs.step(action)
    for value in (np.nan, -0.5, 1.001):
        action[1, 1, 2] = value
        text = rf"environment 1, agent listener_0: action .*{value}.* out of bounds: number 2 must be from 0.0 to 1.0"
        with pytest.raises(EnvError, match=text):
            envs.step(action)
    envs.arrays["obs"][1, 1, 3] = np.inf  # what the environment has done, and not the policy
    text = r"^pz/.*: the observation of agent 1 is inf in environment 1, and its action is \[.*1\.001.*\]$"
    with pytest.raises(NonFiniteError, match=text):
        envs.step(action)
    envs.arrays["obs"][1, 1, 3] = 0
    action[1, 1, 2] = np.nextafter(np.float32(1), np.float32(2))  # a rounding is forgiven
    envs.step(action)
    with pytest.raises(EnvError, match="actions must be floats of shape"):
        envs.step(np.zeros((2, 2, 5), np.int64))

    envs = make(toy, 1, num_workers=0)
    envs.reset()
    with pytest.raises(EnvError, match=r"environment 0, agent dict: action 0 is illegal, legal are \[2\]"):
        envs.step(np.array([[0, 0, 3]]))


@pytest.mark.parametrize(
    "env_id, options, text",
    [
        ("pz/mpe2/simple_sprad_v3", {}, "did you mean pz/mpe2/simple_spread_v3"),
        ("pz/mpe/simple_spread_v3", {}, "did you mean pz/mpe2/simple_spread_v3"),
        ("pz/sisl/pursuit_v4", {}, "did you mean pz/sisl/pursuit_v5"),
        ("pz/simple_spread_v3", {}, "did you mean pz/mpe2/simple_spread_v3"),
        ("pz/no_such_package/game_v0", {}, "unknown environment"),
        ("sisl/pursuit_v5", {}, "did you mean pz/sisl/pursuit_v5?"),
        ("pz/os/path", {}, "has no parallel_env and no env"),
        ("pz/classic/connect_four_v3", {}, "take turns, here all agents act at once; ppo_selfplay.py plays games of"),
        ("pz/mpe2/simple_spread_v3", {"landmarks": 2}, "unexpected keyword argument 'landmarks'"),
        ("pz/mpe2/simple_spread_v3", {"local_ratio": 5}, "cannot be built with {'local_ratio': 5}"),
        ("pz/mpe2/simple_spread_v3", {"num_workers": -1}, "num_workers must be an integer, 0 (no worker"),
        ("pz/mpe2/simple_spread_v3?num_workers=True", {}, "num_workers must be an integer, 0 (no worker"),
        ("pz/mpe2/simple_spread_v3?max_cycles=True", {}, "max_cycles must be an integer of at least 1, not True"),
        ("pz/mpe2/simple_spread_v3?may_die=0", {}, "may_die must be True or False, not 0"),
    ],
)
def test_wishes_that_cannot_be_met(env_id, options, text):
    with pytest.raises(EnvError) as caught:
        make(env_id, 2, **options)
    assert text in str(caught.value) and "\n" not in str(caught.value)


FIVE = spaces.Box(-1, 1, (5,), np.float32)


class Scouts(ParallelEnv):
    """Two agents that see ones; `mistakes` change what reset() and step() return."""

    def __init__(self, mistakes, space=FIVE):
        self.possible_agents, self.space = ["scout", "medic"], space
        self.mistakes = {"reset": [], "step": []} | mistakes

    def observation_space(self, agent):
        return self.space

    def action_space(self, agent):
        return spaces.Discrete(2)

    def returned(self, method, *values):
        returned = [dict.fromkeys(self.possible_agents, value) for value in values]
        for i, agent, value in self.mistakes[method]:
            if value is None:
                del returned[i][agent]
            else:
                returned[i][agent] = value
        return returned

    def reset(self, seed=None, options=None):
        self.agents = [*self.possible_agents]
        return self.returned("reset", np.ones(self.space.shape, self.space.dtype), {})

    def step(self, actions):
        return self.returned("step", np.ones(self.space.shape, self.space.dtype), 1.0, False, False, {})


class Late(Scouts):
    """One of two joins at the second step."""

    def reset(self, seed=None, options=None):
        returned = super().reset(seed, options)
        self.agents = self.agents[:1]
        return returned


def test_who_comes_later_where_none_may_be_missing_is_said():
    envs = make(Late, 1, num_workers=0, may_die=False, mistakes={})
    with closing(envs), pytest.raises(EnvError, match="is gone, or not there yet, and may_die is False"):
        envs.reset(seed=1)


def mistake_of(mistakes: dict, num_workers: int, **options) -> str:
    """The line of the EnvError: of reset() when environments are made, of step() when they are played."""
    options |= {"num_workers": num_workers, "mistakes": mistakes}
    if "reset" in mistakes:
        with pytest.raises(EnvError) as caught:
            make(Scouts, 2, **options)
    else:
        with closing(make(Scouts, 2, **options)) as envs, pytest.raises(EnvError) as caught:
            envs.reset(seed=1)
            envs.step(np.zeros((2, 2), np.int64))
    return str(caught.value)


@pytest.mark.parametrize(
    "other, hint",
    [(gym.make("CartPole-v1"), ""), (make("matrix/qtran", 2), ": a copy of a script returns it from make_envs")],
)
def test_what_is_no_parallel_environment_is_one_line(other, hint):
    line = f"is no parallel environment of PettingZoo, without possible_agents{hint}"
    with pytest.raises(EnvError, match=f"{line}$"):
        make(lambda: other, 2)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "mistakes, text",
    [
        ({"reset": [(0, "scout", None), (0, "scout_0", np.ones(5))]}, "reset() returns observations of 'scout_0'"),
        ({"step": [(0, "scout", None), (0, "scout_0", np.ones(5))]}, "step() returns observations of 'scout_0'"),
        ({"step": [(1, "scout", None), (1, "scout_0", 1.0)]}, "step() returns rewards of 'scout_0'"),
        ({"step": [(2, "scout", None), (2, "__all__", False)]}, "step() returns terminations of '__all__'"),
        ({"step": [(3, "medic", None), (3, 0, False)]}, "step() returns truncations of 0"),
    ],
)
def test_agents_by_another_name_are_an_error(mistakes, text, num_workers):
    line = f"Scouts: {text}; possible_agents are ['scout', 'medic']"
    assert mistake_of(mistakes, num_workers) == line


def test_more_than_the_agents_is_no_error():
    """PettingZoo allows it, and RLlib's environments have it."""
    more = {"reset": [(0, "common", np.ones(9)), (1, "common", {})]}
    more["step"] = [
        *more["reset"][:1],
        (1, "__all__", 0.0),
        (2, "__all__", False),
        (3, "__all__", False),
        (4, "common", {}),
    ]
    with closing(make(Scouts, 2, num_workers=0, mistakes=more)) as envs:
        envs.reset(seed=1)
        assert envs.step(np.zeros((2, 2), np.int64))[0].shape == (2, 2, 5)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("method", ["reset", "step"])
@pytest.mark.parametrize("value", [0.5, np.ones(1), np.ones(6), np.ones((5, 2))])
def test_an_observation_of_another_size_is_an_error(value, method, num_workers):
    """One number was broadcast."""
    line = f"Scouts: the observation of agent medic is of size {np.size(value)}, its space of 5"
    assert mistake_of({method: [(0, "medic", value)]}, num_workers) == line


@pytest.mark.parametrize("method", ["reset", "step"])
@pytest.mark.parametrize(
    "space, value, what",
    [
        (FIVE, {"seen": 1, "action_mask": 2}, f"a dict with 'seen', 'action_mask', not numbers of its space {FIVE}"),
        (FIVE, "north", f"a str, not numbers of its space {FIVE}"),
        (FIVE, np.ones(5, complex), f"an array of complex128, not numbers of its space {FIVE}"),
        (FIVE, [[1], [2, 3]], "not of its space (ValueError: setting an array element with a sequence."),
        (spaces.Discrete(2), 7, "not of its space (ValueError: it is 7)"),
        (spaces.Discrete(2), -1, "not of its space (ValueError: it is -1)"),
    ],
)
def test_an_observation_of_another_kind_is_an_error(space, value, what, method):
    others = [(0, agent, 0) for agent in ("scout", "medic")] if isinstance(space, spaces.Discrete) else []
    mistakes = {"reset": others, "step": others}
    mistakes = mistakes | {method: [*others, (0, "medic", value)]}
    line = re.escape(f"Scouts: the observation of agent medic is {what}")
    with pytest.raises(EnvError, match=line):
        envs = make(Scouts, 1, num_workers=0, mistakes=mistakes, space=space)
        envs.reset(seed=1)
        envs.step(np.zeros((1, 2), np.int64))


class Odd(Scouts):
    """`change` is applied to all that a method returns."""

    def __init__(self, mistakes, method, change):
        super().__init__(mistakes)
        self.method, self.change = method, change

    def returned(self, method, *values):
        returned = super().returned(method, *values)
        return self.change(returned) if method == self.method else returned


@pytest.mark.parametrize(
    "method, change, text",
    [
        ("reset", lambda x: x[0], "reset() must return (observations, infos), each a dict by agent"),
        ("reset", lambda x: [x[0], None], "reset() returns infos that are a NoneType, not a dict by agent"),
        ("reset", lambda x: [np.ones((2, 5)), {}], "reset() returns observations that are an array of float64, not"),
        (
            "step",
            lambda x: x[:4],
            "step() must return (observations, rewards, terminations, truncations, infos), each a",
        ),
        (
            "step",
            lambda x: None,
            "step() must return (observations, rewards, terminations, truncations, infos), each a",
        ),
        ("step", lambda x: [x[0], 1.0, *x[2:]], "step() returns rewards that are a float, not a dict by agent"),
        ("step", lambda x: [*x[:2], False, *x[3:]], "step() returns terminations that are a bool, not a dict by agent"),
        ("step", lambda x: [*x[:4], None], "step() returns infos that are a NoneType, not a dict by agent"),
        ("step", lambda x: [x[0], x[1] | {"medic": None}, *x[2:]], "the reward of agent medic is a NoneType, not a nu"),
        ("step", lambda x: [x[0], x[1] | {"medic": "much"}, *x[2:]], "the reward of agent medic is a str, not a nu"),
        ("step", lambda x: [x[0], dict.fromkeys(x[1], np.ones(1)), *x[2:]], "the reward of agent scout is an array of"),
        ("step", lambda x: [*x[:2], x[2] | {"medic": np.zeros(2)}, *x[3:]], "the termination of agent medic is an arr"),
        ("step", lambda x: [*x[:3], x[3] | {"medic": np.zeros(2)}, x[4]], "the truncation of agent medic is an arr"),
        ("step", lambda x: [*x[:4], {"scout": 3, "medic": {}}], "the info of agent scout is a int, not a dict"),
        ("reset", lambda x: [x[0], {"scout": {}, "medic": [1]}], "the info of agent medic is a list"),
    ],
)
def test_what_is_returned_in_another_form_is_one_line(method, change, text):
    with pytest.raises(EnvError, match=re.escape(f"Odd: {text}")):
        envs = make(Odd, 1, num_workers=0, mistakes={}, method=method, change=change)
        envs.reset(seed=1)
        envs.step(np.zeros((1, 2), np.int64))


def test_the_info_of_an_agent_may_be_none():
    silent = lambda x: [*x[:-1], dict.fromkeys(x[-1])]  # noqa: E731
    for method in ("reset", "step"):
        with closing(make(Odd, 1, num_workers=0, mistakes={}, method=method, change=silent)) as envs:
            envs.reset(seed=1)
            assert envs.step(np.zeros((1, 2), np.int64))[-1]["action_mask"].all()


@pytest.mark.parametrize("shape", [(3, 2, 3), (18,), (1, 3, 3)])
def test_a_picture_of_another_shape_is_an_error(shape):
    """Of the same number of pixels, or one that would be broadcast."""
    mistakes, space = {"step": [(0, "medic", np.ones(shape, np.uint8))]}, spaces.Box(0, 255, (2, 3, 3), np.uint8)
    line = f"Scouts: the observation of agent medic is of size {shape}, its space of (2, 3, 3)"
    assert mistake_of(mistakes, 0, pictures=True, space=space) == line


@pytest.mark.parametrize("num_workers", [0, 2])
def test_who_plays_sees_and_earns_something(num_workers):
    """One that is left out, but is one of env.agents, would see zeros and earn nothing."""
    line = "Scouts: reset() returns no observation of 'medic', which is one of its agents"
    assert mistake_of({"reset": [(0, "medic", None)]}, num_workers) == line
    line = "Scouts: step() returns no observations of 'medic', which plays on"
    assert mistake_of({"step": [(0, "medic", None)]}, num_workers) == line
    line = "Scouts: step() returns no rewards of 'medic', which acted"
    assert mistake_of({"step": [(1, "medic", None)]}, num_workers) == line
    silent = {"reset": [(1, "medic", None)], "step": [(i, "medic", None) for i in (2, 3, 4)]}  # ends nothing
    with closing(make(Scouts, 2, num_workers=num_workers, mistakes=silent)) as envs:
        envs.reset(seed=1)
        obs, reward, *_ = envs.step(np.zeros((2, 2), np.int64))
    assert obs.sum(-1).tolist() == [[5, 5]] * 2 and reward.tolist() == [[1, 1]] * 2


class Nobody(Scouts):
    def reset(self, seed=None, options=None):
        returned = super().reset(seed, options)
        self.agents = []
        return returned


class NoneAtAll(Scouts):
    def __init__(self, mistakes):
        super().__init__(mistakes)
        self.possible_agents = []


class InNoOrder(Scouts):
    def __init__(self, mistakes):
        super().__init__(mistakes)
        self.possible_agents = {"scout", "medic"}


class OwnState(Scouts):
    """`state` is what the environment has of this name, or what it returns or raises."""

    def __init__(self, mistakes, state):
        super().__init__(mistakes)
        self.state = state


class Wrapped(BaseParallelWrapper):
    """Its state() is that of the environment inside, whatever that is."""

    def __init__(self, mistakes, **state):
        super().__init__(OwnState(mistakes, **state) if state else Scouts(mistakes))


class TakesTurns(Scouts):
    def agent_iter(self):
        return iter(self.agents)


class Converts(TakesTurns):
    @property
    def metadata(self):
        return {"is_parallelizable": True}


def test_what_nobody_could_play_is_one_line():
    for cls, line in (
        (Nobody, r"Nobody: nobody plays after reset\(\): its agents are empty"),
        (NoneAtAll, r"NoneAtAll has no possible_agents"),
        (InNoOrder, r"InNoOrder: possible_agents is a set, whose order differs between processes: make it a list"),
        (TakesTurns, r"TakesTurns is an AECEnv, whose agents take turns, .* return .*turn_based_aec_to_parallel"),
        (Converts, r"Converts is an AECEnv, whose agents take turns, .* return .*conversions\.aec_to_parallel"),
    ):
        with pytest.raises(EnvError, match=line):
            make(cls, 1, num_workers=0, mistakes={})


class NoMetadata(Scouts):
    metadata = None


class Levers(Scouts):
    """Its actions are whole numbers in a Box."""

    def action_space(self, agent):
        return spaces.Box(0, 4, (2,), np.int64)


class Switches(Scouts):
    """An agent has two switches."""

    def action_space(self, agent):
        return spaces.MultiDiscrete([2, 2])


def test_box_actions_must_be_of_floats():
    """What a policy of real numbers samples is not in the space."""
    with pytest.raises(EnvError, match=r"Box actions must be of floats, not \['Box\(0, 4, \(2,\), int64\)'"):
        make(Levers, 1, num_workers=0, mistakes={})


class Exact(Scouts):
    """Its bounds of float64 have no equals in float32, and it checks its actions."""

    def action_space(self, agent):
        return spaces.Box(np.array(-0.3), np.array(0.1), (), np.float64)

    def step(self, actions):
        for agent, action in actions.items():
            assert isinstance(action, np.ndarray) and self.action_space(agent).contains(action), action
        return super().step(actions)


def test_an_action_at_a_bound_of_float64_is_within_it():
    with closing(make(Exact, 1, num_workers=0, mistakes={})) as envs:
        envs.reset(seed=1)
        for bound in (envs.single_action_space.low, envs.single_action_space.high):
            assert float(bound[0, 0]) not in (-0.3, 0.1)
            envs.step(bound[None])


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("cls", [Scouts, NoMetadata])
def test_metadata_may_be_missing(cls, num_workers):
    make(cls, 1, num_workers=num_workers, mistakes={}).close()


def raises(error):
    raise error


@pytest.mark.parametrize(
    "cls, state",
    [
        (OwnState, {"state": {"hp": 3}}),
        (OwnState, {"state": lambda: raises(NotImplementedError)}),
        (Wrapped, {"state": {"hp": 3}}),  # as in PettingZoo's classic/rps_v2
        (Wrapped, {}),
    ],
)
def test_without_a_state_of_its_own_it_is_the_observations(cls, state):
    with closing(make(cls, 1, num_workers=0, mistakes={}, **state)) as envs:
        obs, info = envs.reset(seed=1)
        np.testing.assert_array_equal(info["state"], obs.reshape(1, -1))


@pytest.mark.parametrize(
    "state, line",
    [
        (lambda: raises(AttributeError("no walls")), r"cannot be built with .*: AttributeError: no walls"),
        (lambda: np.ones(4) + None, r"cannot be built with .*: TypeError: unsupported operand"),
        (lambda: "abc", r"OwnState: state\(\) returns a str: it must be an array of numbers, or raise NotImpl"),
        (lambda: {"hp": 3}, r"OwnState: state\(\) returns a dict with 'hp': it must be an array of numbers"),
    ],
)
def test_a_state_that_is_wrong_is_not_passed_over(state, line):
    """A critic of the observations would be trained, and nobody would know."""
    for cls in (OwnState, Wrapped):
        with pytest.raises(EnvError, match=line.replace("OwnState", cls.__name__)):
            make(cls, 1, num_workers=0, mistakes={}, state=state)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "at_reset, at_step, why",
    [
        ([0, 1], [0, 1], None),
        ([0, 1], None, "is there at some steps and not at others: it must always be there, or never"),
        (None, [0, 1], "is there at some steps and not at others: it must always be there, or never"),
        ([0, 1], [0, -np.inf], "must be of 0 and 1, not [0.0, -inf]"),
    ],
)
def test_a_mask_is_one_at_every_step(at_reset, at_step, why, num_workers):
    """Without one all actions were legal, and one that is added to logits was read the other way round."""
    masks = {"reset": [(1, "medic", {"action_mask": at_reset})], "step": [(4, "medic", {"action_mask": at_step})]}
    with closing(make(Scouts, 1, num_workers=num_workers, mistakes=masks)) as envs:
        envs.reset(seed=1)
        line = re.escape(f"Scouts: the action_mask of agent medic {why}")
        with pytest.raises(EnvError, match=line) if why else nullcontext():
            assert envs.step(np.ones((1, 2), np.int64))[-1]["action_mask"].tolist() == [[[True] * 2, [False, True]]]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("end", [2, 3])
def test_the_last_mask_may_be_missing_after_a_termination_but_not_at_a_time_limit(end, num_workers):
    """There a value follows, which was that of the best of all actions, never tried ones among them."""
    ends = [(end, agent, True) for agent in ("scout", "medic")]
    masks = {"reset": [(1, "medic", {"action_mask": [0, 1]})], "step": ends}
    with closing(make(Scouts, 1, num_workers=num_workers, mistakes=masks)) as envs:
        envs.reset(seed=1)
        line = "the action_mask of agent medic is there at some steps and not at others"
        with pytest.raises(EnvError, match=line) if end == 3 else nullcontext():
            assert envs.step(np.ones((1, 2), np.int64))[2].all()


class Infiltrated(Scouts):
    """A third agent, which possible_agents does not name, is there from step `since` on; 0 is reset()."""

    def __init__(self, mistakes, since):
        super().__init__(mistakes)
        self.since = since

    def reset(self, seed=None, options=None):
        self.steps, returned = 0, super().reset()
        self.agents += ["spy"] if self.since == 0 else []
        return returned

    def step(self, actions):
        self.steps += 1
        self.agents = ["scout", "medic"] + ["spy"] * (self.steps >= self.since)
        return super().step(actions)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("since", [0, 2])
def test_an_agent_that_nobody_knows_is_an_error(since, num_workers):
    """Nobody would act for it, and an episode in which it alone plays on was over."""
    line = r"Infiltrated: 'spy' is in agents, and not in possible_agents, which are \['scout', 'medic'\]"
    with pytest.raises(EnvError, match=line):
        envs = make(Infiltrated, 1, num_workers=num_workers, mistakes={}, since=since)
        with closing(envs):
            envs.reset(seed=1)
            envs.step(np.zeros((1, 2), np.int64))
            envs.step(np.zeros((1, 2), np.int64))


class OneList(Scouts):
    """The medic leaves in the first step; the agents are a list of their own or that of the possible ones."""

    def __init__(self, mistakes, shared):
        super().__init__(mistakes)
        self.shared = shared

    def reset(self, seed=None, options=None):
        returned = super().reset(seed, options)
        self.agents = self.possible_agents if self.shared else self.agents
        return returned

    def step(self, actions):
        over = "medic" not in actions
        returned = {agent: over or agent == "medic" for agent in actions}
        if not over:
            self.agents.remove("medic")
        else:
            self.agents = []
        seen = dict.fromkeys(actions, np.ones(5, np.float32))
        return seen, dict.fromkeys(actions, 1.0), returned, dict.fromkeys(actions, False), {a: {} for a in actions}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_agents_that_are_the_list_of_the_possible_ones_are_an_error(num_workers):
    """The medic would be dead in all episodes but the first."""
    for shared in (False, True):
        with closing(make(OneList, 1, num_workers=num_workers, mistakes={}, shared=shared)) as envs:
            envs.reset(seed=1)
            envs.step(np.zeros((1, 2), np.int64))
            if shared:
                line = "OneList: 'medic' is no longer in possible_agents; its agents are the same list"
                with pytest.raises(EnvError, match=line):
                    envs.step(np.zeros((1, 2), np.int64))
            else:
                assert envs.step(np.zeros((1, 2), np.int64))[-1]["agent_mask"].all()


class Twins(Scouts):
    def __init__(self, mistakes):
        super().__init__(mistakes)
        self.possible_agents = ["scout", "scout"]


class OldSpaces(Scouts):
    def __init__(self, mistakes):
        super().__init__(mistakes)
        self.action_space = dict.fromkeys(self.possible_agents, spaces.Discrete(2))


@pytest.mark.parametrize(
    "cls, options, line",
    [
        (Twins, {}, r"Twins: two of its possible_agents have one name: \['scout', 'scout'\]"),
        (OldSpaces, {}, r"OldSpaces: action_space must be a method, action_space\(agent\)"),
        (Scouts, {"space": spaces.Box(-1, 1, (0,))}, r"^\S*Scouts: nobody observes anything"),
        (
            Switches,
            {},
            r"^\S*Switches: all agents need Discrete or all need Box actions, not \['MultiDiscrete\(.*; a Discrete",
        ),
    ],
)
def test_what_cannot_be_played_is_one_line(cls, options, line):
    with pytest.raises(EnvError, match=line):
        make(cls, 1, num_workers=0, mistakes={}, **options)


@pytest.mark.parametrize("seen", [np.full((2, 3, 3), 0.5), np.full((2, 3, 3), 300)])
def test_pictures_are_of_bytes(seen):
    """Numbers from 0 to 1 were black."""
    space = spaces.Box(0, 255, (2, 3, 3), np.uint8)
    line = f"the observation of agent medic is an array of {seen.dtype}, its space of uint8"
    mistakes = {"reset": [(0, agent, np.zeros((2, 3, 3), np.uint8)) for agent in ("scout", "medic")]}
    mistakes["step"] = [(0, "medic", seen)]
    envs = make(Scouts, 1, num_workers=0, pictures=True, mistakes=mistakes, space=space)
    with closing(envs), pytest.raises(EnvError, match=line):
        envs.reset(seed=1)
        envs.step(np.zeros((1, 2), np.int64))


class Careless(Scouts):
    """It draws from what all of a process draw from."""

    def reset(self, seed=None, options=None):
        self.agents = [*self.possible_agents]
        drawn = np.array([np.random.uniform(), random.uniform(0, 1), 0, 0, 0])  # noqa: NPY002
        return dict.fromkeys(self.agents, drawn), {agent: {} for agent in self.agents}


def test_workers_repeat_what_draws_from_the_generators_of_all():
    """As in the main process, which a run seeds."""
    seen = []
    for seed in (1, 1, 2):
        with closing(make(Careless, 4, num_workers=2, mistakes={})) as envs:
            seen.append(envs.reset(seed=seed)[0][:, 0, :2])
    assert (seen[0] == seen[1]).all() and (seen[0] != seen[2]).all()
    assert len(np.unique(seen[0])) == 8  # no two environments, or workers, alike


class Leaving(Scouts):
    """The first leaves at step 1 and the other at step 2, the time limit, which the last step returns as `mistakes`."""

    def step(self, actions):
        returned = [dict.fromkeys(actions, value) for value in (np.ones(self.space.shape), 1.0, False, False, {})]
        returned[3 if self.agents == ["medic"] else 2][self.agents[0]] = True
        for i, agent, _ in self.mistakes["step"]:
            returned[i].pop(agent, None)
        self.agents = self.agents[1:]
        return returned


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "mistake, what",
    [
        ((1, "scout"), "rewards of 'scout', which acted"),
        ((1, "medic"), "rewards of 'medic', which acted"),
        ((2, "medic"), "terminations of 'medic', whose last step it was"),
        ((3, "medic"), "truncations of 'medic', whose last step it was"),
        ((0, "medic"), "observations of 'medic', which plays on"),
        (None, None),
    ],
)
def test_nothing_of_a_last_step_is_lost(mistake, what, num_workers):
    """Dictionaries of those who are left had no last reward, and a time limit without a flag was a termination."""
    mistakes = {"step": [(*mistake, None)] if mistake else []}
    with closing(make(Leaving, 1, num_workers=num_workers, mistakes=mistakes)) as envs:
        envs.reset(seed=1)
        line = rf"Leaving: step\(\) returns no {what}"
        with pytest.raises(EnvError, match=line) if what else nullcontext():
            envs.step(np.zeros((1, 2), np.int64))
            *_, truncation, info = envs.step(np.zeros((1, 2), np.int64))
            assert what is None and truncation.all() and info["episode"]["r"].tolist() == [[1, 2]]


@pytest.mark.parametrize(
    "package, env_id, text",
    [
        ("pymunk", "pz/butterfly/pistonball_v6", "python bootstrap.py multiagent"),
        ("chess", "pz/classic/chess_v6", 'pip install "pettingzoo[classic]"'),
    ],
)
def test_missing_package(package, env_id, text):
    """In an interpreter that cannot find the package, installed here or not."""
    script = f"import sys; sys.modules[{package!r}] = None; from cleanmarl.envs import make; make({env_id!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("cleanmarl.envs.EnvError") and package in last and last.endswith(text)


@pytest.mark.skipif(importlib.util.find_spec("magent2") is not None, reason="magent2 is installed")
def test_missing_package_of_its_own():
    with pytest.raises(EnvError, match=r"pip install magent2$"):
        make("pz/magent2/battle_v4")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_render(num_workers):
    envs = make("pz/mpe2/simple_spread_v3", 2, num_workers=num_workers, render_mode="rgb_array")
    envs.reset(seed=1)
    first = envs.render()
    for _ in range(3):
        envs.step(np.array([[1, 1, 1], [0, 0, 0]]))
    assert envs.render_mode == "rgb_array" and first.dtype == np.uint8 and first.ndim == 3 and first.shape[2] == 3
    assert not np.array_equal(first, envs.render())
    envs.close()
