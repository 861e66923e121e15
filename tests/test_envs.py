"""All families keep the contract of cleanmarl.envs under random play, and equal their originals stepped by hand."""

import importlib
import inspect
import itertools
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import cleanmarl
from cleanmarl.envs import FAMILIES, EnvError, EpisodeStatistics, env_seeds, make, make_gymnasium
from cleanmarl.envs.__main__ import BACKENDS, bench, describe, each_size, list_ids

import gymnasium as gym
import numpy as np
import pytest
from optional import needs


@pytest.fixture(scope="module", autouse=True)
def agent_by_agent(tmp_path_factory):
    """`pz/aec_only/knights`: a module with PettingZoo's agent-by-agent environment and no parallel one."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "aec_only").mkdir()
    (folder / "aec_only" / "knights.py").write_text("from pettingzoo.butterfly.knights_archers_zombies_v11 import env")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


# id, environments, steps of each, options, whether the starts are random (and so differ between environments); of every
# family at least one play of 5,000 steps over the batch
KNIGHTS = {"num_workers": 1, "spawn_delay": 5, "line_death": True, "max_cycles": 60}
PLAYS = [
    pytest.param("mpe/simple_spread_v3", 8, 700, {}, True),
    pytest.param("mpe/simple_world_comm_v3", 4, 300, {"max_cycles": 7}, True),
    pytest.param("mpe/simple_speaker_listener_v4", 4, 300, {"continuous_actions": True}, True),
    pytest.param("matrix/penalty", 8, 700, {"max_cycles": 5}, False),
    pytest.param("matrix/climbing", 8, 700, {}, False),
    pytest.param("jumanji/RobotWarehouse-v0", 8, 700, {}, False),
    pytest.param("jumanji/LevelBasedForaging-v0", 8, 700, {}, False),
    pytest.param("jumanji/Connector-v2", 8, 400, {}, False),
    pytest.param("jumanji/Cleaner-v0", 8, 700, {}, True),
    pytest.param("pgx/ConnectFour-v1", 2, 150, {}, True),  # who begins is random: two starts
    pytest.param("pgx/KuhnPoker-v1", 4, 1250, {}, True),
    pytest.param("pgx/Backgammon-v1", 2, 400, {}, True),
    pytest.param("lbf/Foraging-8x8-2p-2f-coop-v3", 4, 1250, {}, True, marks=needs("lbforaging")),
    pytest.param("lbf/Foraging-2s-10x10-3p-3f-v3", 4, 300, {}, True, marks=needs("lbforaging")),
    pytest.param("lbf/Foraging-15x15-4p-5f-v3", 2, 200, {}, True, marks=needs("lbforaging")),
    pytest.param("rware/rware-tiny-2ag-v2", 4, 1250, {"max_steps": 60}, True, marks=needs("rware")),
    pytest.param("smaclite/3m", 4, 1250, {"num_workers": 2, "max_steps": 20}, False, marks=needs("smaclite")),
    pytest.param("smaclite/2s3z", 2, 90, {"num_workers": 0}, False, marks=needs("smaclite")),
    pytest.param("smax/3m", 4, 1250, {"max_steps": 16}, True, marks=needs("jaxmarl")),
    pytest.param("pz/mpe2/simple_spread_v3", 4, 1250, {"num_workers": 2}, True),
    pytest.param("pz/mpe2/simple_tag_v3", 4, 150, {"num_workers": 0}, True),
    pytest.param("pz/mpe2/simple_speaker_listener_v4", 2, 60, {"num_workers": 0, "continuous_actions": True}, True),
    pytest.param("pz/aec_only/knights", 2, 200, KNIGHTS, False, marks=needs("pymunk")),  # agents die one by one
    pytest.param("pz/sisl/multiwalker_v9", 2, 150, {"num_workers": 2}, True, marks=needs("Box2D")),
    pytest.param("pz/sisl/pursuit_v5", 2, 40, {"num_workers": 0, "max_cycles": 15}, True, marks=needs("scipy")),
]


SEEN = ("state", "action_mask", "agent_mask")


def random_legal(envs, mask: np.ndarray, rng) -> np.ndarray:
    action = rng.random(mask.shape).astype(np.float32) * mask
    return action if envs.continuous else action.argmax(axis=-1)


def play(env_id: str, num_envs: int, steps: int, seed: int = 3, policy=None, **options):
    """The environments, still open, and [(obs, info)] + [(action, obs, reward, termination, truncation, info), ...].

    Without a policy, which takes observations, at random.
    """
    envs, rng = make(env_id, num_envs, **options), np.random.default_rng(0)
    record = [envs.reset(seed=seed)]
    for _ in range(steps):
        action = random_legal(envs, record[-1][-1]["action_mask"], rng)
        if policy:
            action = np.where(rng.random(action.shape) < 0.7, policy(record[-1][0 if len(record) == 1 else 1]), action)
        seen = record[-1][0 if len(record) == 1 else 1], *(record[-1][-1][key] for key in SEEN)
        copies = [x.copy() for x in seen]
        record.append((action, *envs.step(action)))
        assert all(map(np.array_equal, seen, copies))  # a replay buffer keeps them when the step is done
    return envs, record


def test_every_family_is_played():
    plays = [param.values[:3] for param in PLAYS]
    longest = {family: max(N * steps for id_, N, steps in plays if id_.startswith(f"{family}/")) for family in FAMILIES}
    assert min(longest.values()) >= 5000, longest


@pytest.mark.parametrize("env_id, N, steps, options, random_starts", PLAYS)
def test_contract(env_id, N, steps, options, random_starts):
    envs, record = play(env_id, N, steps, **options)
    A, K, S = envs.num_agents, int(envs.action_sizes.max()), envs.state_size
    D = int(envs.obs_sizes.max())
    assert envs.num_envs == N and len(envs.agents) == A == len(envs.obs_sizes) == len(envs.action_sizes)
    assert envs.single_observation_space.shape == (A, D) and envs.observation_space.shape == (N, A, D)
    padding = np.arange(D) >= envs.obs_sizes[:, None]

    def check_seen(obs, state, mask, rows):
        for array, shape in ((obs, (N, A, D)), (state, (N, S))):
            assert array.shape == shape and array.dtype == np.float32 and np.isfinite(array).all()
        assert mask.shape == (N, A, K) and mask.dtype == bool and mask[rows].any(-1).all()
        assert not (mask & ~envs.real_actions).any() and not obs[:, padding].any()

    everyone = np.ones(N, bool)
    obs, info = record[0]
    check_seen(obs, info["state"], info["action_mask"], everyone)
    if random_starts:
        starts = [tuple(row) for row in info["state"].reshape(N, -1).tolist()]
        assert len(set(starts)) == N
    returns, lengths, ends, time_limits = np.zeros((N, A)), np.zeros(N, int), 0, set()
    alive = info["agent_mask"]
    assert alive.shape == (N, A) and alive.dtype == bool and alive.all()
    for action, obs, reward, termination, truncation, info in record[1:]:
        assert action.shape == envs.action_space.shape
        assert reward.shape == (N, A) and reward.dtype == np.float32 and np.isfinite(reward).all()
        assert termination.shape == truncation.shape == (N,) and termination.dtype == truncation.dtype == bool
        assert not (termination & truncation).any()
        assert not reward[~alive].any()
        check_seen(obs, info["state"], info["action_mask"], everyone)
        was_alive, alive = alive, info["agent_mask"]
        assert not obs[~alive].any() and alive.any(-1).all()
        assert envs.continuous or (info["action_mask"][~alive] == (np.arange(K) == 0)).all()
        done, returns, lengths = termination | truncation, returns + reward, lengths + 1
        final = ("final_obs", "final_state", "final_action_mask", "final_agent_mask")
        ended = (*final, "_final_obs", "episode", "_episode")
        assert {key in info for key in ended} == {bool(done.any())}
        if done.any():
            np.testing.assert_array_equal(info["_final_obs"], done)
            np.testing.assert_array_equal(info["_episode"], done)
            check_seen(info["final_obs"], info["final_state"], info["final_action_mask"], done)
            np.testing.assert_array_equal(info["episode"]["l"], lengths * done)
            np.testing.assert_allclose(info["episode"]["r"], returns * done[:, None], rtol=1e-12, atol=1e-12)
            for key in final:  # of those who ended, and of nobody else
                assert not info[key][~done].any()
            assert not (info["final_agent_mask"] & ~was_alive).any()
            assert info["final_agent_mask"][truncation].any(-1).all()
            dead = ~info["final_agent_mask"] & truncation[:, None]  # what comes next has a value, of the living alone
            assert not info["final_obs"][dead].any()
            assert envs.continuous or (info["final_action_mask"][dead] == (np.arange(K) == 0)).all()
            assert info["final_state"][done].any(-1).all()  # observations may be of the dead
            time_limits |= {*lengths[truncation].tolist()}
            assert (info["episode"]["t"] >= 0).all() and (info["episode"]["t"][done] > 0).all()
            assert alive[done].all()  # the next episode has begun
            returns[done], lengths[done], ends = 0, 0, ends + done.sum()
    assert ends >= N, "too short a play to say something about ends"
    assert len(time_limits) <= 1, "a step that only begins an episode would make the later ones longer"
    envs.close()


@pytest.mark.parametrize("env_id, N, steps, options, random_starts", PLAYS)
def test_seeds(env_id, N, steps, options, random_starts):
    """The same seed gives the same play, in environments used before too; another seed, another play."""
    steps = min(steps, 60)
    envs, first = play(env_id, N, steps, **options)
    again = [envs.reset(seed=3)]
    for row in first[1:]:
        again.append((row[0], *envs.step(row[0])))
    other = envs.reset(seed=4)
    envs.close()
    for one, two in zip(first, again):
        for a, b in zip(one[:-1], two[:-1]):
            np.testing.assert_array_equal(a, b)
        for key in ("state", "action_mask", "agent_mask"):
            np.testing.assert_array_equal(one[-1][key], two[-1][key])
    assert (other[0] != first[0][0]).any() == random_starts


@pytest.mark.parametrize("env_id, N, steps, options, random_starts", PLAYS)
def test_wrong_actions(env_id, N, steps, options, random_starts):
    """Refused with a line that names environment, agent and action, and nothing moves."""
    envs = make(env_id, N, **options)
    _, info = envs.reset(seed=1)
    good = random_legal(envs, info["action_mask"], np.random.default_rng(0))
    bad = [good[:, :-1], good[0], good[..., None]]
    who = f"{env_id.split('/')[0]}/.*environment 1.*{envs.agents[-1]}"
    wrong = good.astype(np.float32)
    wrong[1, -1] = np.nan
    if envs.continuous:
        bad_values = [(wrong, who)]
        for value in (-1.25, 1.25, np.inf):  # out of the bounds of all that are played
            wrong = good.copy()
            wrong[1, -1, 1] = value
            bad_values.append((wrong, f"{who}.*{value}"))
        bad.append(good.astype(np.int64))
    else:
        bad.append(good.astype(np.float32))
        bad_values = [(wrong, "nan|integer")]
        for value in (-1, int(envs.action_sizes[-1]), 2**40):
            wrong = good.copy()
            wrong[1, -1] = value
            bad_values.append((wrong, f"{who}.*{value}"))
        if not info["action_mask"][1, -1].all():
            wrong = good.copy()
            wrong[1, -1] = info["action_mask"][1, -1].argmin()
            bad_values.append((wrong, who))
    for action, message in [*((action, "actions must|no integer") for action in bad), *bad_values]:
        with pytest.raises(EnvError, match=message):
            envs.step(action)
    obs = envs.step(good)[0]  # as if nothing had happened
    envs.reset(seed=1)
    np.testing.assert_array_equal(obs, envs.step(good)[0])
    envs.close()


# matrix: the tables, written out from the sentences of the paper


def four(name: str):
    """(joint action, reward) of every joint action of four agents with nine actions, counted from 1."""
    joint = np.array(list(itertools.product(range(9), repeat=4)))
    envs = make(f"matrix/{name}", len(joint))
    envs.reset()
    _, reward, termination, truncation, _ = envs.step(joint)
    assert (reward == reward[:, :1]).all() and termination.all() and not truncation.any()
    return {tuple(actions): r for actions, r in zip((joint + 1).tolist(), reward[:, 0].tolist())}


def most(actions) -> tuple[int, int]:
    """The action that most agents play, and how many play it."""
    return max(((a, actions.count(a)) for a in actions), key=lambda pair: pair[1])


SENTENCES = {
    # "a team reward of 50 when they have played the same action, but be punished by -50 if any three agents have acted
    # the same while the other does not. In all other cases, the reward is -40"
    "penalty": lambda a, count, actions: {4: 50, 3: -50}.get(count, -40),
    # "there is no penalty for miscoordination"
    "penalty-free": lambda a, count, actions: 50 if count == 4 else -40,
    # "the team reward becomes larger (100) when the agents play the same action"
    "penalty-100": lambda a, count, actions: {4: 100, 3: -50}.get(count, -40),
    # "the reward of 50 if agent i plays action i and -50 otherwise"
    "one-optimum": lambda a, count, actions: 50 if actions == (1, 2, 3, 4) else -50,
    # "the reward is i 10 if the agents all play action i and -40 otherwise"
    "climbing-4p": lambda a, count, actions: 10 * a if count == 4 else -40,
    # "the agents will be punished by -50 for miscoordination"
    "climbing-4p-penalty": lambda a, count, actions: {4: 10 * a, 3: -50}.get(count, -40),
    # "i.e. -i 10 for miscoordination on action i"
    "climbing-4p-rising": lambda a, count, actions: {4: 10 * a, 3: -10 * a}.get(count, -40),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_matrix_games_of_the_paper(name):
    rewards = four(name)
    assert len(rewards) == 9**4
    wrong = {actions: r for actions, r in rewards.items() if r != SENTENCES[name](*most(actions), actions)}
    assert not wrong


def test_matrix_games_of_the_paper_by_example():
    assert [four("penalty")[actions] for actions in [(9, 9, 9, 9), (2, 2, 5, 2), (2, 2, 5, 5)]] == [50, -50, -40]
    rising = four("climbing-4p-rising")
    assert [rising[actions] for actions in [(1, 1, 1, 1), (9, 9, 9, 9), (9, 1, 9, 9), (1, 1, 1, 9)]] == [
        10,
        90,
        -90,
        -10,
    ]


@pytest.mark.parametrize(
    "name, options, table",
    [
        ("climbing", {}, [[11, -30, 0], [-30, 7, 0], [0, 6, 5]]),
        ("penalty-2p", {}, [[10, 0, -100], [0, 2, 0], [-100, 0, 10]]),
        ("penalty-2p", {"k": -7.5}, [[10, 0, -7.5], [0, 2, 0], [-7.5, 0, 10]]),
        ("qtran", {}, [[8, -12, -12], [-12, 0, 0], [-12, 0, 0]]),
    ],
)
def test_matrix_games_of_two_agents(name, options, table):
    envs = make(f"matrix/{name}", 9, **options)
    envs.reset()
    reward = envs.step(np.array(list(itertools.product(range(3), repeat=2))))[1]
    assert reward[:, 0].reshape(3, 3).tolist() == table and (reward[:, 0] == reward[:, 1]).all()


def test_matrix_rounds_and_options():
    envs = make("matrix/penalty", 2, max_cycles=3)
    obs, _ = envs.reset(seed=1)
    assert (obs == 1).all()
    ends = [envs.step(np.zeros((2, 4), int))[2].tolist() for _ in range(6)]
    assert ends == [[False] * 2, [False] * 2, [True] * 2] * 2
    for name, options, message in [
        ("penlty", {}, "did you mean matrix/penalty"),
        ("penalty", {"k": -1}, "no option 'k'"),
        ("penalty-2p", {"k": 1}, "at most 0"),
        ("penalty", {"max_cycles": 0}, "at least 1"),
        ("penalty", {"render_mode": "rgb_array"}, "no pictures"),
    ]:
        with pytest.raises(EnvError, match=message):
            make(f"matrix/{name}", 1, **options)


# what the environments say of rewards and deaths


def pz_(name: str, **options):
    return f"pz/{name}", {"num_workers": 0, **options}


# id, options, environments, steps of each: enough to see rewards differ and agents die; team_reward, may_die
SAID = [
    *[("mpe/simple_v3", {}, 2, 30, True, False)],
    *[("mpe/simple_speaker_listener_v4", {}, 2, 60, True, False)],
    *[(f"mpe/simple_{name}_v3", {}, 8, 200, False, False) for name in ("adversary", "crypto", "push", "tag")],
    *[(f"mpe/simple_{name}_v3", {}, 8, 200, False, False) for name in ("world_comm", "reference", "spread")],
    *[(f"mpe/simple_{name}_v3", {"local_ratio": 0}, 8, 200, True, False) for name in ("reference", "spread")],
    *[("mpe/simple_spread_v3", {"N": 1}, 8, 60, True, False)],
    *[(*pz_("mpe2/simple_speaker_listener_v4"), 1, 60, True, False)],
    *[(*pz_(f"mpe2/simple_{name}_v3"), 2, 200, False, False) for name in ("adversary", "crypto", "push", "tag")],
    *[(*pz_(f"mpe2/simple_{name}_v3"), 4, 200, False, False) for name in ("world_comm", "reference", "spread")],
    (*pz_("mpe2/collect_treasure_v1"), 1, 60, False, False),
    *[(*pz_(f"mpe2/simple_{name}_v3", local_ratio=0.0), 2, 60, True, False) for name in ("reference", "spread")],
    *[("matrix/penalty-free", {}, 8, 60, True, False), ("matrix/climbing", {"max_cycles": 4}, 8, 60, True, False)],
    *[(f"jumanji/{name}-v0", {}, 8, 150, True, False) for name in ("RobotWarehouse", "LevelBasedForaging", "Cleaner")],
    *[("jumanji/Connector-v2", {}, 8, 150, True, False), ("pgx/KuhnPoker-v1", {}, 4, 60, False, False)],
    pytest.param("lbf/Foraging-5x5-2p-1f-v3", {}, 8, 200, False, False, marks=needs("lbforaging")),
    pytest.param("smaclite/3m", {"num_workers": 0}, 2, 150, True, True, marks=needs("smaclite")),
    pytest.param("smax/3m", {}, 4, 150, True, True, marks=needs("jaxmarl")),
    pytest.param(*pz_("butterfly/cooperative_pong_v6", pictures=True), 1, 150, True, False, marks=needs("pygame")),
    pytest.param(*pz_("butterfly/pistonball_v6", pictures=True), 1, 60, True, False, marks=needs("pymunk")),
    pytest.param(
        *pz_("butterfly/knights_archers_zombies_v11", **KNIGHTS | {"num_workers": 0, "max_cycles": 300}),
        *(2, 250, False, True),
        marks=needs("pymunk"),
    ),
    pytest.param(*pz_("sisl/pursuit_v5", n_evaders=60), 1, 60, True, False, marks=needs("scipy")),
    pytest.param(*pz_("sisl/pursuit_v5", n_evaders=60, shared_reward=False), 1, 60, False, False, marks=needs("scipy")),
    pytest.param(*pz_("sisl/multiwalker_v9"), 2, 150, True, False, marks=needs("Box2D")),
    pytest.param(*pz_("sisl/multiwalker_v9", shared_reward=False), 2, 150, False, False, marks=needs("Box2D")),
    pytest.param(*pz_("sisl/multiwalker_v9", terminate_on_fall=False), 2, 200, True, True, marks=needs("Box2D")),
]


@pytest.mark.parametrize("env_id, options, N, steps, team_reward, may_die", SAID)
def test_what_is_said_of_rewards_and_deaths_holds(env_id, options, N, steps, team_reward, may_die):
    envs, record = play(env_id, N, steps, **options)
    envs.close()
    assert (envs.team_reward, envs.may_die) == (team_reward, may_die)
    all_earn_the_same, somebody_died = True, False
    for before, (_, _, reward, _, truncation, info) in itertools.pairwise(record):
        alive = before[-1]["agent_mask"]
        most, least = np.where(alive, reward, -np.inf).max(1), np.where(alive, reward, np.inf).min(1)
        all_earn_the_same &= bool((most == least).all())
        somebody_died |= not info["agent_mask"].all()
        if not may_die and truncation.any():
            assert info["final_agent_mask"][truncation].all()
    assert (all_earn_the_same, somebody_died) == (team_reward, may_die)


@needs("rware")
def test_rware_says_whose_the_reward_is():
    from rware.warehouse import RewardType

    for kind in RewardType:
        for envs in (
            make("rware/rware-tiny-2ag-v2", 1, reward_type=kind),
            make(f"rware/rware-tiny-2ag-v2?reward_type={kind.name}", 1),
        ):
            assert (envs.team_reward, envs.may_die) == (kind == RewardType.GLOBAL, False)
            envs.close()
    for kind in (1, "TEAM"):
        with pytest.raises(EnvError, match=f"reward_type must be one of GLOBAL, .*, not {kind!r}"):
            make(f"rware/rware-tiny-2ag-v2?reward_type={kind}", 1)


# what a script needs


@pytest.mark.parametrize(
    "env_id, needs, message",
    [
        (
            "mpe/simple_spread_v3?continuous_actions=True",
            {"discrete": True},
            "mpe/simple_spread_v3 has continuous actions and this script needs discrete ones: "
            "try a ..._continuous_action.py",
        ),
        (
            "mpe/simple_spread_v3",
            {"discrete": False},
            "mpe/simple_spread_v3 has discrete actions and this script needs continuous ones: "
            "try the script without _continuous_action, or continuous_actions=True in the id",
        ),
        (
            "matrix/climbing",
            {"discrete": False},
            "matrix/climbing has discrete actions and this script needs continuous ones: "
            "try the script without _continuous_action",
        ),
    ],
)
def test_actions_that_a_script_cannot_take(env_id, needs, message):
    with pytest.raises(EnvError) as error:
        make(env_id, 2, **needs)
    assert str(error.value) == message
    assert make(env_id, 2, discrete=not needs["discrete"]).num_envs == make(env_id, 2).num_envs == 2


@pytest.mark.parametrize(
    "options, message",
    [
        ("pictures=True", "pictures is no option of an environment"),
        ("num_envs=2", "num_envs is no option of an environment"),
        ("N=3&N=4", "an option can be given once"),
        ("N", "the options of an id are name=value, joined by &"),
    ],
)
def test_options_that_an_id_cannot_have(options, message):
    with pytest.raises(EnvError, match=message):
        make(f"mpe/simple_spread_v3?{options}", 2)


class Spaces(gym.Env):
    """An environment of the spaces that are asked for."""

    def __init__(self, observation_space, action_space=None, render_mode=None):
        self.observation_space, self.action_space = observation_space, action_space or gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, True, False, {}


gym.register("Spaces-v0", entry_point=Spaces)


class OneArray(gym.Env):
    """An environment that writes every observation into one array: the step, which is 3 at its end."""

    observation_space, action_space = gym.spaces.Box(0, 9, (2,)), gym.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.obs = np.zeros(2, np.float32)

    def reset(self, *, seed=None, options=None):
        self.obs[:] = 0
        return self.obs, {}

    def step(self, action):
        self.obs += 1
        return self.obs, 0.0, False, bool(self.obs[0] == 3), {}


@pytest.mark.parametrize("vectors", [False, True])
def test_a_final_observation_is_not_that_of_the_reset(vectors):
    envs = make_gymnasium(OneArray, 2, vectors=vectors)
    envs.reset(seed=1)
    for _ in range(3):
        obs, *_, info = envs.step(np.zeros(2, int))
    assert not obs.any() and [x.min() for x in info["final_obs"]] == [3, 3]


def test_observations_outlive_the_steps_that_follow():
    """Or a copy that compares two of them would see no change, and what is recorded would be one row over and over."""
    envs = make_gymnasium("CartPole-v1", 2)
    seen = [envs.reset(seed=1)[0]]
    kept = [seen[0].copy()]
    for t in range(20):
        seen.append(envs.step(np.full(2, t % 2))[0])
        kept.append(seen[-1].copy())
    np.testing.assert_array_equal(seen, kept)
    assert (np.diff(seen, axis=0) != 0).any(-1).all()


def test_episodes_that_a_wrapper_truncates_outside_of_the_statistics_are_counted():
    """As the copies of docs/change.md have them: it changes rewards, and gives up where nothing happens any more."""

    class Stagnation(gym.Wrapper):
        def reset(self, **options):
            self.t = 0
            return self.env.reset(**options)

        def step(self, action):
            self.t += 1
            obs, reward, termination, truncation, info = self.env.step(action)
            return obs, reward / 2, termination, truncation or self.t == 9, info

    envs = make_gymnasium("CartPole-v1", 2, wrappers=[gym.wrappers.RecordEpisodeStatistics, Stagnation])
    envs.reset(seed=1)
    ends, lengths = 0, []
    for _ in range(60):
        *_, termination, truncation, info = envs.step(np.arange(2))  # the pole falls after 8 to 11 steps
        ends += (termination | truncation).sum()
        if "_episode" in info:
            episode = {key: values[info["_episode"]].tolist() for key, values in info["episode"].items()}
            assert episode["l"] == episode["r"]  # of true rewards, 1 a step
            lengths += episode["l"]
    assert len(lengths) == ends > 8 and {*lengths} == {8, 9}


class Talkative(gym.Env):
    """What it says of itself is never of one kind."""

    observation_space, action_space = gym.spaces.Box(0, 1, (2,)), gym.spaces.Discrete(2)

    def __init__(self, says, since, render_mode=None):
        self.says, self.since = iter(says), since

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(2, np.float32), {"seen": next(self.says)} if self.since == "reset" else {}

    def step(self, action):
        self.t += 1
        info = {"seen": next(self.says)} if self.since == "step" or self.t == 3 else {}
        return np.zeros(2, np.float32), 0.0, self.t == 3, False, info


@pytest.mark.parametrize("since, entry", [("reset", ""), ("step", ""), ("end", r"\['final_info'\]")])
@pytest.mark.parametrize("says", [[np.zeros(2), np.zeros(3)], [3, None], [3, "three"]])
def test_infos_that_cannot_be_stacked_are_told_of_in_one_line(says, since, entry):
    says = itertools.cycle(says)  # the environments take turns
    envs = make_gymnasium(Talkative, 2, says=says, since=since)
    message = rf"^Talkative: info{entry}\['seen'\] is of another kind or shape in one environment than in another"
    with pytest.raises(EnvError, match=message):
        envs.reset(seed=1)
        for _ in range(3):
            envs.step(np.zeros(2, int))


def test_other_errors_of_an_environment_stay_what_they_are():
    class Broken(OneArray):
        def step(self, action):
            raise ValueError("broken")

    envs = make_gymnasium(Broken, 2)
    envs.reset(seed=1)
    with pytest.raises(ValueError, match=r"^broken$"):
        envs.step(np.zeros(2, int))


def test_a_class_or_function_of_any_name_is_an_environment():
    """Those inside a function have a name that is no id of Gymnasium's."""

    class Local(Counting):
        pass

    for env in (Local, lambda **_: Counting()):
        envs = make_gymnasium(env, 2, discrete=True, vectors=True)
        assert envs.reset(seed=1)[0].shape == (2, 2)


def test_episodes_that_a_time_limit_ends_outside_of_the_statistics_are_counted():
    """Of those RecordEpisodeStatistics inside of it has no statistics, and an evaluation would wait for ever."""

    def limited(**_):
        return gym.wrappers.TimeLimit(gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1")), 15)

    envs = make_gymnasium(limited, 2)
    envs.reset(seed=1)
    ends, lengths = 0, []
    for _ in range(60):
        *_, termination, truncation, info = envs.step(np.arange(2))  # the pole falls after 8 to 11 steps
        ends += (termination | truncation).sum()
        lengths += info["episode"]["l"][info["_episode"]].tolist() if "_episode" in info else []
    assert len(lengths) == ends > 8 and max(lengths) <= 15


class Counting(Spaces):
    """An environment that calls something of its own as RecordEpisodeStatistics calls its returns."""

    def __init__(self, render_mode=None):
        super().__init__(gym.spaces.Box(0, 1, (2,)))
        self.episode_returns = []


gym.register("Counting-v0", entry_point=Counting)


def test_what_an_environment_calls_its_own_numbers_is_its_own_affair():
    envs = make_gymnasium("Counting-v0", 2)
    envs.reset(seed=1)
    info = envs.step(np.zeros(2, int))[-1]
    assert info["_episode"].all() and (info["episode"]["l"] == 1).all()


def test_an_info_of_every_step_may_be_called_episode():
    """It was taken for the statistics of an episode's end, and ended the run with a KeyError."""

    class Numbered(gym.Wrapper):
        def step(self, action):
            *transition, info = self.env.step(action)
            return *transition, info | {"episode": {"r": 7.0}}

    envs = make_gymnasium(lambda **_: Numbered(gym.make("CartPole-v1", max_episode_steps=5)), 2)
    envs.reset(seed=1)
    for t in range(1, 11):
        info = envs.step(np.zeros(2, int))[-1]
        assert ("episode" in info) == (t % 5 == 0)
    assert info["episode"]["l"].tolist() == [5, 5] == info["episode"]["r"].tolist()


def test_gymnasium_ids_of_modules_in_the_working_folder(tmp_path):
    (tmp_path / "my_tasks.py").write_text(
        "import gymnasium as gym\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
        'gym.register("Mine-v0", entry_point=CartPoleEnv, max_episode_steps=9)'
    )
    (tmp_path / "elsewhere").mkdir()
    script = tmp_path / "elsewhere" / "script.py"
    script.write_text(
        "from cleanmarl.envs import make_gymnasium\n"
        'envs = make_gymnasium("my_tasks:Mine-v0", 2, discrete=True, vectors=True)\n'
        "print(envs.reset(seed=1)[0].shape)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(cleanmarl.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("(2, 4)\n", "")


def test_observations_as_vectors():
    """Vectors stay as they are, matrices are flattened, numbers become one-hot; then come the script's wrappers."""
    for space, size in [
        (gym.spaces.Box(0, 1, (3,)), 3),
        (gym.spaces.Box(0, 1, (2, 3)), 6),
        (gym.spaces.Box(0, 255, (2, 3), np.uint8), 6),
        (gym.spaces.Discrete(4), 4),
    ]:
        seen = []
        envs = make_gymnasium(
            "Spaces-v0",
            2,
            discrete=True,
            vectors=True,
            wrappers=[lambda env, seen=seen: seen.append(env.observation_space.shape) or env],
            observation_space=space,
        )
        obs, _ = envs.reset(seed=1)
        assert obs.shape == (2, size) == envs.observation_space.shape and seen == [(size,)] * 2
        if isinstance(space, gym.spaces.Discrete):
            assert (obs.sum(1) == 1).all() and {*obs.ravel().tolist()} == {0, 1}
    assert make_gymnasium("Spaces-v0", 2, observation_space=space).single_observation_space == space


def test_environments_of_neighbouring_seeds_differ():
    """Not only at the same index, as seeds of seed + i would do; and environment i is the same one whatever N is."""

    def first(num_envs, seed):
        return make_gymnasium("CartPole-v1", num_envs).reset(seed=seed)[0].copy()

    starts = np.concatenate([first(4, seed) for seed in range(5)])
    assert len(np.unique(starts, axis=0)) == 20
    np.testing.assert_array_equal(first(2, 3), starts[12:14])
    envs = make_gymnasium("CartPole-v1", 4)
    envs.reset(seed=3)
    assert len(np.unique(np.concatenate([starts, envs.reset()[0]]), axis=0)) == 24  # without a seed they go on


@pytest.mark.parametrize(
    "needs, spaces, message",
    [
        (
            {"vectors": True},
            {"observation_space": gym.spaces.Box(0, 255, (84, 84, 3), np.uint8)},
            "Spaces-v0 has pictures (84, 84, 3) and this script needs vectors: see ppo_atari.py, which has a CNN",
        ),
        (
            {"vectors": True},
            {"observation_space": gym.spaces.Dict({"action_mask": gym.spaces.MultiBinary(2)})},
            "this script needs Box or Discrete observations and Spaces-v0 has Dict('action_mask': MultiBinary(2)): "
            "scripts for one agent read no action_mask; ippo.py does, of a PettingZoo environment with one agent",
        ),
        (
            {"vectors": True},
            {"observation_space": gym.spaces.Tuple([gym.spaces.Discrete(2)])},
            "this script needs Box or Discrete observations and Spaces-v0 has Tuple(Discrete(2)): "
            "let a function of your module return gym.wrappers.FlattenObservation(env), and name it",
        ),
        (
            {"discrete": True},
            {"action_space": gym.spaces.Box(0, 1, (2,))},
            "this script needs Discrete actions and Spaces-v0 has Box(0.0, 1.0, (2,), float32); "
            "try a ..._continuous_action.py",
        ),
        (
            {"discrete": True},
            {
                "action_space": gym.spaces.Box(0, 1, (2,)),
                "observation_space": gym.spaces.Box(0, 255, (9, 9, 3), np.uint8),
            },
            "this script needs Discrete actions and Spaces-v0 has Box(0.0, 1.0, (2,), float32)",  # and none fits
        ),
        (
            {"discrete": True},
            {"action_space": gym.spaces.Discrete(3, start=1)},
            "this script needs actions counted from 0 and Spaces-v0 has Discrete(3, start=1)",
        ),
        (
            {"discrete": False},
            {"action_space": gym.spaces.Discrete(3)},
            "this script needs Box actions (K,) of floats and Spaces-v0 has Discrete(3); "
            "try the script without _continuous_action",
        ),
        (
            {"discrete": False},
            {"action_space": gym.spaces.Box(0, 1, (2, 3))},
            "this script needs Box actions (K,) of floats and Spaces-v0 has Box(0.0, 1.0, (2, 3), float32)",
        ),
        (
            {"discrete": False},
            {"action_space": gym.spaces.Box(0, 4, (2,), np.int64)},  # which a policy's samples are not in
            "this script needs Box actions (K,) of floats and Spaces-v0 has Box(0, 4, (2,), int64)",
        ),
        (
            {"discrete": True},
            {"action_space": gym.spaces.MultiDiscrete([3, 2])},
            "this script needs Discrete actions and Spaces-v0 has MultiDiscrete([3 2]); try ppo_multidiscrete.py",
        ),
    ],
)
def test_spaces_that_a_script_cannot_take(needs, spaces, message):
    options = {"observation_space": gym.spaces.Box(0, 1, (3,)), **spaces}
    with pytest.raises(EnvError) as error:
        make_gymnasium("Spaces-v0", 2, **needs, **options)
    assert str(error.value) == message
    assert make_gymnasium("Spaces-v0", 2, **options).num_envs == 2


# jumanji: equal to envpool stepped by hand, whose own reset costs a step


@pytest.mark.parametrize("name", ["RobotWarehouse-v0", "LevelBasedForaging-v0", "Connector-v2", "Cleaner-v0"])
def test_jumanji_equals_envpool(name):
    import envpool

    N, steps = 3, 260
    envs, record = play(f"jumanji/{name}", N, steps, seed=5)
    envs.close()
    ends = 0
    for n, seed in enumerate(env_seeds(5, N)):
        pool = envpool.make(name, "gymnasium", num_envs=1, num_threads=1, seed=[seed % 2**31])
        raw = pool.reset()[0]
        for action, obs_, reward_, termination_, truncation_, info in record[1:]:
            before, raw = raw, None
            mask = before["action_mask"][0]
            assert mask[np.arange(len(mask)), action[n]][mask.any(-1)].all()  # only legal actions were played
            raw, reward, termination, truncation, _ = pool.step(action[n : n + 1].astype(np.int32))
            assert (reward_[n] == reward[0]).all()
            assert termination_[n] == termination[0] and truncation_[n] == (truncation[0] and not termination[0])
            if termination[0] or truncation[0]:
                ends += 1
                seen(name, raw, info["final_obs"][n], info["final_state"][n], info["final_action_mask"][n])
                raw = pool.step(np.zeros_like(action[n : n + 1], np.int32))[0]  # the step that begins the next episode
                assert raw["step_count"][0] == 0
            seen(name, raw, obs_[n], info["state"][n], info["action_mask"][n])
        pool.close()
    assert ends >= N


def seen(name: str, raw: dict, obs: np.ndarray, state: np.ndarray, mask: np.ndarray) -> None:
    """Compare one environment's vectors with envpool's observation, number by number as the page describes them."""
    A = len(mask)
    want = raw["action_mask"][0].astype(bool)
    want[~want.any(-1), 0] = True
    np.testing.assert_array_equal(mask, want)
    limit = {"RobotWarehouse-v0": 500, "Connector-v2": 50}.get(name, 100)
    time = np.float32(raw["step_count"][0] / limit)
    assert (obs[:, -1] == time).all() and state[-1] == time
    if "agents_view" in raw:
        np.testing.assert_array_equal(obs[:, :-1], raw["agents_view"][0])
        np.testing.assert_array_equal(state[:-1], raw["agents_view"][0].ravel())
        return
    planes = {"Connector-v2": 6, "Cleaner-v0": 4}[name]
    assert obs.shape == (A, planes * 100 + 1)
    want = np.zeros((A, planes, 10, 10))
    whole = np.zeros((3 if name == "Connector-v2" else 5, 10, 10))
    heads, targets = np.zeros((A, 2)), np.full((A, 2), -1.0)
    for row, col in itertools.product(range(10), repeat=2):
        value = int(raw["grid"][0, row, col])
        if name == "Cleaner-v0":
            want[:, 0, row, col] = whole[0, row, col] = value == 0
            want[:, 1, row, col] = whole[1, row, col] = value == 2
        elif value:
            owner, part = (value - 1) // 3, (value - 1) % 3
            whole[part, row, col] = 1
            for a in range(A):
                want[a, part if a == owner else part + 3, row, col] = 1
            if part:
                (heads if part == 1 else targets)[owner] = row, col
    if name == "Cleaner-v0":
        for a, (row, col) in enumerate(raw["agents_locations"][0]):
            whole[2 + a, row, col] = want[a, 2, row, col] = 1
            for other in range(A):
                want[other, 3, row, col] += other != a
        np.testing.assert_array_equal(state[:-1], whole.ravel())
    else:
        targets = np.where(targets < 0, heads, targets)
        places = np.concatenate([heads, targets], axis=1).astype(np.float64) / 9
        np.testing.assert_array_equal(state[:-1], np.append(whole.ravel(), places.ravel()).astype(np.float32))
    np.testing.assert_array_equal(obs[:, :-1], want.reshape(A, -1))


def test_jumanji_walled_in_agents_have_an_action():
    envs = make("jumanji/Cleaner-v0", 400)
    _, info = envs.reset(seed=1)
    walled_in = (info["action_mask"].sum(-1) == 1).all(-1) & info["action_mask"][:, :, 0].all(-1)
    assert walled_in.any()  # up is a wall for who starts in the corner: it is there because nothing else is
    envs.close()


def test_jumanji_draws():
    envs = make("jumanji/Connector-v2", 2, render_mode="rgb_array")
    envs.reset(seed=1)
    frame = envs.render()
    assert frame.ndim == 3 and frame.shape[2] == 3 and frame.dtype == np.uint8 and frame.std() > 0
    envs.close()


# pgx: equal to envpool stepped by hand, whose own reset costs a step


@pytest.mark.parametrize("name", ["ConnectFour-v1", "Othello-v1", "Backgammon-v1", "LeducHoldem-v1"])
def test_pgx_equals_envpool(name):
    import envpool

    N, steps = 3, 600
    envs, record = play(f"pgx/{name}", N, steps, seed=5)
    envs.close()
    wait, ends = record[0][1]["action_mask"].shape[-1] - 1, 0
    for n, seed in enumerate(env_seeds(5, N)):
        pool = envpool.make(name, "gymnasium", num_envs=1, num_threads=1, seed=[seed % 2**31])
        views, raw = pool.reset()
        for before, (action, obs, reward_, termination_, truncation_, info) in itertools.pairwise(record):
            mover = raw["current_player"][0]
            mask = before[-1]["action_mask"][n]
            np.testing.assert_array_equal(mask[mover], np.append(raw["legal_action_mask"][0], False))
            assert np.flatnonzero(mask[1 - mover]).tolist() == [wait] == [action[n, 1 - mover]]
            views, reward, termination, _, raw = pool.step(action[n, mover : mover + 1])
            assert reward_[n].tolist() == reward.tolist() and termination_[n] == termination[0]
            assert not truncation_[n] and (reward_[n].sum() == 0)
            if termination[0]:
                ends += 1
                np.testing.assert_array_equal(info["final_obs"][n, :, :-1], views.reshape(2, -1))
                assert not info["final_obs"][n, :, -1].any()
                assert np.flatnonzero(info["final_action_mask"][n]).tolist() == [wait, 2 * wait + 1]
                views, _, _, _, raw = pool.step(np.zeros(1, np.int64))  # the step that begins the next game
                assert raw["elapsed_step"][0] == 0
            np.testing.assert_array_equal(obs[n, :, :-1], views.reshape(2, -1))
            assert obs[n, :, -1].tolist() == [raw["current_player"][0] == 0, raw["current_player"][0] == 1]
            np.testing.assert_array_equal(info["state"][n], obs[n].ravel())
        pool.close()
    assert ends >= N


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("ConectFour-v1", {}, "did you mean pgx/ConnectFour-v1"),
        ("ConnectFour-v1", {"board": 8}, "no option 'board'"),
        ("ConnectFour-v1", {"render_mode": "human"}, "render_mode must be None or 'rgb_array'"),
    ],
)
def test_pgx_refuses(name, options, message):
    with pytest.raises(EnvError, match=message):
        make(f"pgx/{name}", 1, **options)


def test_pgx_draws():
    envs = make("pgx/ConnectFour-v1", 2, render_mode="rgb_array")
    envs.reset(seed=1)
    frame = envs.render()
    assert frame.ndim == 3 and frame.shape[2] == 3 and frame.dtype == np.uint8 and frame.std() > 0
    envs.close()


# lbf, rware: every episode equals that of the package, freshly made and stepped by hand


def fresh(name: str, options: dict):
    """The package's own class with the settings of the id."""
    if name.startswith("rware"):
        import rware.warehouse

        return rware.warehouse.Warehouse(**gym.spec(name).kwargs | options)
    import lbforaging.foraging

    return lbforaging.foraging.ForagingEnv(**gym.spec(name).kwargs | options)


def forage(obs: np.ndarray, num_foods: int) -> np.ndarray:
    """Everyone goes to the first food of the list, and loads what is beside."""
    row, column = np.moveaxis(obs[..., :2] - obs[..., 3 * num_foods :][..., :2], -1, 0)
    move = np.where(np.abs(row) > np.abs(column), np.where(row < 0, 1, 2), np.where(column < 0, 3, 4))
    return np.where(np.abs(row) + np.abs(column) == 1, 5, move)


def bustle(obs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """At random, but rather forward: robots get to all places, and into each other's way."""
    return rng.choice(5, p=[0.05, 0.5, 0.15, 0.15, 0.15], size=obs.shape[:2])


def equal_their_package(env_id: str, options: dict, time_limit: int | None, policy, steps: int) -> tuple[int, int]:
    """Episodes step for step beside those of the package; how many ended by themselves, and were rewards earned."""
    name, N = env_id.split("/")[1], 3
    envs, record = play(env_id, N, steps, seed=5, policy=policy, **options)
    envs.close()
    assert envs.time_limit == time_limit
    time_limit = time_limit or 10**9
    finished = earned = 0
    for n, seed in enumerate(env_seeds(5, N)):
        rng = np.random.default_rng(seed)
        env = fresh(name, options)
        obs = env.reset(seed=seed)[0]
        np.testing.assert_array_equal(record[0][0][n], np.stack(obs))
        length = 0
        for action, obs_, reward_, termination, truncation, info in record[1:]:
            obs, reward, done, _, _ = env.step(action[n].tolist())
            length += 1
            np.testing.assert_array_equal(reward_[n], np.float32(reward))
            earned += np.count_nonzero(reward)
            all_eaten = env_id.startswith("lbf") and not env.field.any()
            assert truncation[n] == (done and not all_eaten) and termination[n] == (done and all_eaten)
            assert done or length < time_limit
            finished += int(done and length < time_limit)
            if done:
                np.testing.assert_array_equal(info["final_obs"][n], np.stack(obs))
                env = fresh(name, options)
                obs, length = env.reset(seed=int(rng.integers(2**31)))[0], 0
            np.testing.assert_array_equal(obs_[n], np.stack(obs))
            np.testing.assert_array_equal(info["state"][n], np.concatenate(obs))
            assert info["action_mask"][n].all()
    return finished, earned


@needs("lbforaging")
@pytest.mark.parametrize(
    "name, options, time_limit",
    [
        ("Foraging-8x8-2p-2f-coop-v3", {}, 50),
        ("Foraging-8x8-4p-4f-v3", {"penalty": 0.1, "sight": 3}, 50),
        ("Foraging-5x5-2p-1f-v3", {"max_episode_steps": 200}, 200),
        ("Foraging-5x5-4p-2f-v3", {"normalize_reward": False}, 50),
        ("Foraging-2s-8x8-3p-2f-v3", {}, 50),
        ("Foraging-9x9-9p-4f-v3", {"observe_agent_levels": False}, 50),
    ],
)
def test_lbf_equals_its_package(name, options, time_limit):
    policy = partial(forage, num_foods=int(name.split("p-")[1][0]))
    finished, earned = equal_their_package(f"lbf/{name}", options, time_limit, policy, steps=2000)
    assert finished > 0 and earned > 100


SMALL_WAREHOUSE = "..x.\n.xg.\n....\nxx.g"  # where robots that act at random deliver


@needs("rware")
@pytest.mark.parametrize(
    "name, options, at_least",
    [
        ("rware-tiny-4ag-v2", {"max_steps": 500}, 0),
        ("rware-tiny-19ag-v2", {}, 1),  # a crowd
        ("rware-small-12ag-hard-v2", {"sensor_range": 3}, 0),
        ("small", {"n_agents": 1}, 10),
        ("small", {"n_agents": 4, "request_queue_size": 1}, 10),
        ("small", {"n_agents": 6, "reward_type": "GLOBAL"}, 150),
        ("small", {"n_agents": 6, "reward_type": "TWO_STAGE"}, 40),
        ("small", {"n_agents": 9, "sensor_range": 0}, 25),
        ("small", {"n_agents": 5, "sensor_range": 2, "max_inactivity_steps": 9}, 15),
        ("small", {"n_agents": 2, "max_steps": None, "max_inactivity_steps": 70, "normalised_coordinates": True}, 30),
    ],
)
@pytest.mark.filterwarnings("ignore:.*precision lowered by casting")  # of the package's coordinates
def test_rware_equals_its_package(name, options, at_least):
    import rware.warehouse

    if name == "small":
        defaults = {"layout": SMALL_WAREHOUSE, "request_queue_size": 3}
        name, options = "rware-tiny-2ag-v2", defaults | options
    if "reward_type" in options:
        options["reward_type"] = rware.warehouse.RewardType[options["reward_type"]]
    options = {"max_steps": 60} | options
    policy = partial(bustle, rng=np.random.default_rng(2))
    time_limit = options["max_steps"]
    # three times; fewer of a crowd, whose steps take the package milliseconds
    steps = 6000 // max(3, options["n_agents"]) if "n_agents" in options else 400
    finished, earned = equal_their_package(f"rware/{name}", options, time_limit, policy, steps)
    assert earned >= at_least and (finished > 0) == ("max_inactivity_steps" in options)


@pytest.mark.parametrize(
    "env_id",
    [
        "mpe/simple_spread_v3",
        "matrix/climbing?max_cycles=40",
        pytest.param("lbf/Foraging-8x8-2p-2f-v3", marks=needs("lbforaging")),
        pytest.param("rware/rware-tiny-2ag-v2", marks=needs("rware")),
    ],
)
def test_steps_change_no_snapshot(env_id):
    envs, rng = make(env_id, 3), np.random.default_rng(0)
    obs, info = envs.reset(seed=1)
    snapshot, actions = envs.snapshot(), [random_legal(envs, info["action_mask"], rng) for _ in range(30)]
    first = [envs.step(action) for action in actions]
    obs_, _ = envs.restore(snapshot)
    np.testing.assert_array_equal(obs, obs_)
    for action, step in zip(actions, first):
        again = envs.step(action)
        for x, y in zip(step[:4], again[:4]):
            np.testing.assert_array_equal(x, y)
        assert ("episode" in step[4]) == ("episode" in again[4])
    envs.close()


def test_pgx_is_over_after_close():
    envs = make("pgx/TicTacToe-v1", 2)
    _, info = envs.reset(seed=0)
    envs.close()
    with pytest.raises(EnvError, match=r"call reset\(\) before step\(\), and not after close"):
        envs.step(info["action_mask"].argmax(-1))


@needs("rware")
@pytest.mark.parametrize("more", [{}, {"reward_type": "TWO_STAGE"}, {"max_inactivity_steps": 40}])
def test_rware_goes_on_from_a_snapshot(more):
    """With the requests to come, what is in robots' hands, what was delivered and for how long nothing was."""
    from cleanmarl.checkpoint import as_arrays, as_tensors

    options = {"layout": SMALL_WAREHOUSE, "n_agents": 6, "request_queue_size": 2, "max_steps": 200, **more}
    one, other = (make("rware/rware-tiny-2ag-v2", 4, **options) for _ in range(2))
    rng = np.random.default_rng(0)
    obs, _ = one.reset(seed=3)
    for _ in range(90):
        obs = one.step(bustle(obs, rng))[0]
    obs_, _ = other.restore(as_arrays(as_tensors(one.snapshot())))
    np.testing.assert_array_equal(obs, obs_)
    earned = 0
    for _ in range(1000):
        action = bustle(obs, rng)
        for x, y in zip((step := one.step(action))[:4], other.step(action)):
            np.testing.assert_array_equal(x, y)
        obs, earned = step[0], earned + step[1].sum()
    assert earned > 10


@needs("lbforaging")
def test_foraging_goes_on_from_a_snapshot_with_food_that_was_eaten():
    """Rewards are shares of all the food that an episode began with."""
    from cleanmarl.checkpoint import as_arrays, as_tensors

    one, other = (make("lbf/Foraging-5x5-2p-2f-coop-v3", 4) for _ in range(2))
    obs, _ = one.reset(seed=3)
    for _ in range(3):
        obs = one.step(forage(obs, 2))[0]
    other.restore(as_arrays(as_tensors(one.snapshot())))
    earned = 0
    for _ in range(12):
        action = forage(obs, 2)
        for x, y in zip((step := one.step(action))[:4], other.step(action)):
            np.testing.assert_array_equal(x, y)
        obs, earned = step[0], earned + step[1].sum()
    assert earned > 0


def test_the_time_of_an_episode_is_since_the_end_of_the_one_before(monkeypatch):
    now = iter([0.0, 3.0, 5.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    statistics = EpisodeStatistics(2, 1)
    for seconds in ([3, 0], [2, 5]):
        info = {}
        statistics.end(np.array([True, seconds[1] > 0]), info)
        assert info["episode"]["t"].tolist() == seconds


@needs("rware")
@pytest.mark.parametrize(
    "name, options, message",
    [
        ("rware-tiny-19ag-easy-v2", {}, "32 shelves are too few for 38 requests at a time"),
        ("rware-tiny-2ag-v2", {"request_queue_size": 32}, "32 shelves are too few for 32 requests at a time"),
        ("rware-tiny-2ag-v2", {"msg_bits": 2}, "messages, pictures and dictionaries are not supported"),
    ],
)
def test_rware_refuses(name, options, message):
    with pytest.raises(EnvError, match=message):
        make(f"rware/{name}", 1, **options)


@needs("lbforaging")
def test_lbf_with_five_foods_is_the_task_of_four_with_one_more():
    from cleanmarl.envs.lbf import REPORTED, package_env

    four, five = (package_env(f"Foraging-15x15-3p-{f}f-v3") for f in (4, 5))
    for env in (four, five):
        env.reset(seed=1)
    assert np.count_nonzero(four.field) == 4 and np.count_nonzero(five.field) == 5
    for name in ("sight", "force_coop", "field_size", "_max_episode_steps", "max_food_level", "n_agents"):
        assert getattr(four, name) == getattr(five, name)
    for name in REPORTED:
        envs = make(f"lbf/{name}", 1)
        agents = int(name.split("p-")[0].rpartition("-")[2])
        assert envs.reset(seed=1)[0].shape[1] == agents
        envs.close()


@pytest.mark.parametrize(
    "env_id, options, message",
    [
        pytest.param("lbf/Foraging-8x8-2p-2f-cop-v3", {}, "did you mean lbf/Foraging-8x8", marks=needs("lbforaging")),
        pytest.param("lbf/CartPole-v1", {}, "unknown environment 'lbf/CartPole-v1'", marks=needs("lbforaging")),
        pytest.param("lbf/Foraging-8x8-2p-2f-v3", {"food": 1}, "cannot be built .*'food'", marks=needs("lbforaging")),
        pytest.param("lbf/Foraging-8x8-2p-2f-v3", {"sight": "x"}, "cannot be built .*'x'", marks=needs("lbforaging")),
        pytest.param(
            "lbf/Foraging-8x8-2p-2f-v3", {"field_size": (8, 9)}, "be square, not .8, 9.", marks=needs("lbforaging")
        ),
        pytest.param("rware/rware-tiny-2ag-v1", {}, "did you mean rware/rware-tiny-2ag-v2", marks=needs("rware")),
        ("jumanji/RobotWarehouse", {}, "did you mean jumanji/RobotWarehouse-v0"),
        ("jumanji/Cleaner-v0", {"size": 1}, "no option 'size'"),
        ("jumanji/Cleaner-v0", {"render_mode": "human"}, "render_mode"),
    ],
)
def test_wishes_that_cannot_be_met(env_id, options, message):
    with pytest.raises(EnvError, match=message) as error:
        make(env_id, 2, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("env_id", ["matrix/penalty", "jumanji/Cleaner-v0"])
def test_step_before_reset(env_id):
    with pytest.raises(EnvError, match="reset"):
        make(env_id).step(np.zeros((1, 4), int))


def test_statistics_keep_environments_apart():
    statistics, info = EpisodeStatistics(2, 1), {}
    for reward in (1.0, 2.0):
        statistics.add(np.array([[reward], [10 * reward]]))
    statistics.end(np.array([True, False]), info)
    assert info["episode"]["r"].tolist() == [[3], [0]] and info["episode"]["l"].tolist() == [2, 0]
    statistics.add(np.array([[5.0], [5.0]]))
    statistics.end(np.array([True, True]), info)
    assert info["episode"]["r"].tolist() == [[5], [35]] and info["episode"]["l"].tolist() == [1, 3]


# the command line


def test_list(capsys):
    list_ids("matrix")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["id", "agents", "observation", "actions", "state", "masks", "backend"]
    assert lines[1].startswith("# matrix: ")
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    assert rows["matrix/penalty"] == ["4", "1", "9", "4", "no", "NumPy"]
    assert rows["matrix/climbing"] == ["2", "1", "3", "2", "no", "NumPy"]
    list_ids("jumanji")
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[2:]}
    assert rows["jumanji/Connector-v2"] == ["10", "601", "5", "341", "yes", "envpool"] and len(rows) == 4
    list_ids("mpe")
    assert "mpe/simple_speaker_listener_v4                    2  3 11                 3 5" in capsys.readouterr().out


@pytest.mark.parametrize("family", FAMILIES)
def test_list_says_workers_where_there_are_some(family):
    made_by = importlib.import_module(f"cleanmarl.envs.{family}").make
    has_workers = "num_workers" in inspect.signature(made_by).parameters
    assert has_workers == (family not in BACKENDS) == ("worker processes" in FAMILIES[family])


@needs("pygame")
def test_list_has_the_shape_of_pictures():
    from cleanmarl.envs import pz

    row = describe("pz/butterfly/cooperative_pong_v6", pz).split()
    assert row[1:] == ["2", "280x480x3", "3", "280x480x3", "no", "workers"]


def test_list_names_what_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lbforaging", None)  # as if it were not installed
    list_ids("lbf")
    assert "pip install lbforaging" in capsys.readouterr().out


def test_sizes_are_told_shortly():
    assert each_size(np.array([18, 18, 18])) == "18" and each_size(np.array([16, 16, 14])) == "2x16 14"


def test_bench(capsys):
    bench("jumanji/LevelBasedForaging-v0", seconds=0.01)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("jumanji/LevelBasedForaging-v0") and lines[1].split()[0] == "original"
    assert [line.split("=")[1].split()[0] for line in lines[2:]] == ["1", "8", "64", "256", "1024"]
    assert all(line.endswith("x") for line in lines[2:])
    bench("pz/mpe2/simple_spread_v3?may_die=False&team_reward=False&num_workers=0", seconds=0.01)
    assert "original" in capsys.readouterr().out
    bench("matrix/penalty", seconds=0)
    assert "no original" in capsys.readouterr().out


def test_command_line():
    def run(*arguments):
        command = [sys.executable, "-m", "cleanmarl.envs", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    done = run("list", "matrix")
    assert done.returncode == 0 and done.stdout.count("matrix/") == 10 and not done.stderr
    list_some = f"{sys.executable} -m cleanmarl.envs list matrix | true"
    assert not subprocess.run(["bash", "-c", list_some], capture_output=True, timeout=60).stderr
    done = run("bench", "mpe/simple_spraed_v3")
    assert done.returncode == 2 and done.stderr.startswith("envs: unknown environment") and not done.stdout
    done = run("list", "atari")
    assert done.returncode == 2 and all(family in done.stderr for family in FAMILIES)


@pytest.mark.parametrize(
    "env_id",
    [
        "mpe/simple_spread_v3",
        "pgx/ConnectFour-v1",  # who begins is drawn
        "jumanji/Cleaner-v0",
        pytest.param("lbf/Foraging-8x8-2p-2f-v3", marks=needs("lbforaging")),
        pytest.param("rware/rware-tiny-2ag-v2", marks=needs("rware")),
    ],
)
def test_without_a_seed_each_sequence_of_episodes_goes_on(env_id):
    """It depends on the last seed and on the environment's number, and on nothing else."""
    few, many, starts = make(env_id, 8), make(env_id, 12), []
    for seed in (5, None, None):
        starts.append(few.reset(seed=seed)[0])
        np.testing.assert_array_equal(starts[-1], many.reset(seed=seed)[0][:8])
    assert all((one != two).any() for one, two in itertools.combinations(starts, 2))
    few.close(), many.close()


def test_a_snapshot_keeps_the_returns_of_its_moment():
    envs, action = make("mpe/simple_spread_v3", 2), np.ones((2, 3), int)
    envs.reset(seed=1)
    envs.step(action)
    snapshot, first = envs.snapshot(), [envs.step(action) for _ in range(24)][-1][-1]
    envs.restore(snapshot)
    again = [envs.step(action) for _ in range(24)][-1][-1]
    np.testing.assert_array_equal(first["episode"]["r"], again["episode"]["r"])
