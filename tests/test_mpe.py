"""The batched MPE tasks against mpe2 itself, and the multi-agent interface around them."""

import importlib
import time

from cleanmarl.checkpoint import as_arrays, as_tensors
from cleanmarl.envs import EnvError, env_seeds, make, mpe
from cleanmarl.envs.mpe import SCENARIOS

import numpy as np
import pytest

pytest.importorskip("mpe2")


def random_actions(envs, rng, favourite=None):
    """Legal actions; half of the agents do their favourite one, so that they go somewhere and meet others."""
    if envs.continuous:
        action = rng.uniform(0, 1, envs.action_space.shape)
    else:
        action = rng.integers(0, envs.action_sizes, envs.action_space.shape)
    if favourite is not None:
        keep = rng.random(action.shape[:2]) < 0.5
        action[keep] = favourite[keep]
    return action.astype(envs.action_space.dtype)


class Mpe2:
    """N separate copies of mpe2's parallel environment, padded and stacked like ours; `reset` and `step` as there.

    Without `wrapped` the same environments are stepped inside their wrappers, which observe everything twice.
    """

    def __init__(self, name, num_envs, wrapped=True, **options):
        self.wrapped = wrapped
        package = importlib.import_module(f"mpe2.{name}")
        self.copies = [package.parallel_env(**options) for _ in range(num_envs)]
        self.agents = self.copies[0].possible_agents
        self.widths = [self.copies[0].observation_space(agent).shape[0] for agent in self.agents]
        self.spaces = [self.copies[0].action_space(agent) for agent in self.agents]

    def stack(self, observations):
        obs = np.zeros((len(self.copies), len(self.agents), max(self.widths)), np.float32)
        for i, observation in enumerate(observations):
            for a, agent in enumerate(self.agents):
                obs[i, a, : self.widths[a]] = observation[agent]
        return obs

    def reset(self, seeds=None):
        seeds = seeds or [None] * len(self.copies)
        return self.stack(env.reset(seed=seed)[0] for env, seed in zip(self.copies, seeds, strict=True))

    def step(self, action):
        results = []
        for env, row in zip(self.copies, action, strict=True):
            acts = [a[: s.shape[0]] if s.shape else int(a) for a, s in zip(row, self.spaces, strict=True)]
            if self.wrapped:
                results.append(env.step(dict(zip(self.agents, acts, strict=True))))
                continue
            raw = env.unwrapped
            for act in acts:
                raw.step(act)
            observation = {agent: raw.observe(agent) for agent in self.agents}
            results.append((observation, raw.rewards, raw.terminations, raw.truncations))
        rewards, terminations, truncations = (
            np.array([[result[k][agent] for agent in self.agents] for result in results]) for k in (1, 2, 3)
        )
        return self.stack(result[0] for result in results), rewards, terminations, truncations

    def state(self):
        return np.stack([env.state() for env in self.copies])


def equal(ours, theirs):
    assert np.isfinite(ours).all()
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def compare(name, num_envs, steps, seed=5, wrapped=True, **options):
    """Step ours and mpe2's side by side through several episodes; yields mpe2, action and reward."""
    envs, mpe2 = make(f"mpe/{name}", num_envs, **options), Mpe2(name, num_envs, wrapped, **options)
    assert list(envs.agents) == mpe2.agents and envs.obs_sizes.tolist() == mpe2.widths
    assert envs.action_sizes.tolist() == [s.shape[0] if s.shape else s.n for s in mpe2.spaces]
    rng = np.random.default_rng(seed)
    obs, info = envs.reset(seed=seed)
    equal(obs, mpe2.reset(env_seeds(seed, num_envs)))
    equal(info["state"], mpe2.state())
    favourite, ends = random_actions(envs, rng), 0
    for _ in range(steps):
        action = random_actions(envs, rng, favourite)
        obs, reward, termination, truncation, info = envs.step(action)
        their_obs, their_reward, their_termination, their_truncation = mpe2.step(action)
        equal(reward, their_reward)
        assert (termination[:, None] == their_termination).all() and (truncation[:, None] == their_truncation).all()
        yield mpe2, action, their_reward
        if truncation.any():
            ends += 1
            assert truncation.all()
            equal(info["final_obs"], their_obs)
            equal(info["final_state"], mpe2.state())
            their_obs = mpe2.reset()  # unseeded: the stream goes on
            favourite = random_actions(envs, rng)
        equal(obs, their_obs)
        equal(info["state"], np.concatenate([their_obs[:, a, :w] for a, w in enumerate(mpe2.widths)], axis=1))
    assert ends >= 2


@pytest.mark.parametrize("num_agents", [2, 3, 4, 5, 6])
def test_spread_equals_mpe2(num_agents):
    """10,000 steps for each number of agents; at local_ratio 0 and 1 the reward is mpe2's global and local one."""
    num_envs, bumps = 40, 0
    ratios = {r: make("mpe/simple_spread_v3", num_envs, N=num_agents, local_ratio=r) for r in (0, 1)}
    for envs in ratios.values():
        envs.reset(seed=5)
    for mpe2, action, mixed in compare("simple_spread_v3", num_envs, 250, wrapped=False, N=num_agents):
        raws = [env.unwrapped for env in mpe2.copies]
        shared = np.array([[raw.scenario.global_reward(raw.world)] * num_agents for raw in raws])
        local = 2 * mixed - shared  # mixed half and half
        equal(ratios[0].step(action)[1], shared)
        equal(ratios[1].step(action)[1], local)
        bumps -= local.sum()
    assert bumps > 200  # the contacts were really tried


OPTIONS = [
    ("simple_v3", {}),
    ("simple_adversary_v3", {}),
    ("simple_adversary_v3", {"N": 4}),
    ("simple_crypto_v3", {}),
    ("simple_push_v3", {}),
    ("simple_reference_v3", {"local_ratio": 0.2}),
    ("simple_speaker_listener_v4", {}),
    ("simple_spread_v3", {"local_ratio": 0.0}),
    ("simple_spread_v3", {"N": 1, "local_ratio": 1.0, "max_cycles": 7}),
    ("simple_tag_v3", {"max_cycles": 60}),
    ("simple_tag_v3", {"num_good": 2, "num_adversaries": 2, "num_obstacles": 0}),
    ("simple_tag_v3", {"num_good": 2, "num_adversaries": 4, "num_obstacles": 3}),
    ("simple_world_comm_v3", {"max_cycles": 40}),
    (
        "simple_world_comm_v3",
        {"num_good": 1, "num_adversaries": 1, "num_obstacles": 2, "num_food": 1, "num_forests": 0},
    ),
    ("simple_world_comm_v3", {"num_good": 3, "num_adversaries": 2, "num_food": 3, "num_forests": 3}),
]


@pytest.mark.parametrize("continuous", [False, True], ids=["discrete", "continuous"])
@pytest.mark.parametrize(
    ("name", "options"), OPTIONS, ids=[f"{n}-{'-'.join(map(str, o.values()))}" for n, o in OPTIONS]
)
def test_equals_mpe2(name, options, continuous):
    steps = 2 * options.get("max_cycles", 25) + 10
    num_envs = 6 if name == "simple_world_comm_v3" else 12  # mpe2 takes milliseconds for a step there
    for _ in compare(name, num_envs, steps, continuous_actions=continuous, **options):
        pass


def test_every_scenario_is_compared():
    assert {name for name, _ in OPTIONS} == set(SCENARIOS)


def test_who_says_nothing_in_crypto_makes_no_error():
    envs = make("mpe/simple_crypto_v3", 3, continuous_actions=True)
    mpe2 = Mpe2("simple_crypto_v3", 3, continuous_actions=True)
    envs.reset(seed=0), mpe2.reset(env_seeds(0, 3))
    action = np.random.default_rng(0).uniform(0, 1, (3, 3, 4)).astype(np.float32)
    action[0, 0], action[1, 1], action[2, :2] = 0, 0, 0  # Eve, Bob, both
    reward = envs.step(action)[1]
    equal(reward, mpe2.step(action)[1])
    assert reward[0, 0] == 0 and not reward[2].any()


def test_seeds_and_streams():
    few, many = make("mpe/simple_adversary_v3", 2), make("mpe/simple_adversary_v3", 5)
    rng = np.random.default_rng(0)
    few_obs, many_obs = few.reset(seed=7)[0], many.reset(seed=7)[0]
    for _ in range(60):  # more than two episodes
        np.testing.assert_array_equal(few_obs, many_obs[:2])
        assert len(np.unique(many_obs[:, 0, 0])) == 5  # no two environments run the same episode
        action = random_actions(many, rng)
        few_obs, many_obs = few.step(action[:2])[0], many.step(action)[0]
    first = few.reset(seed=7)[0]
    assert not np.array_equal(few.reset()[0], first)  # no seed: the stream goes on
    np.testing.assert_array_equal(few.reset(seed=7)[0], first)
    assert not np.array_equal(few.reset(seed=8)[0], first)
    unseeded = [make("mpe/simple_v3", 2).reset()[0] for _ in range(2)]
    assert len(np.unique(np.stack(unseeded)[..., 2])) == 4


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_interface(name, continuous):
    envs = make(f"mpe/{name}", 3, continuous_actions=continuous, max_cycles=2)
    N, A, K = 3, envs.num_agents, envs.action_sizes.max()
    D, S = envs.obs_sizes.max(), envs.obs_sizes.sum()
    obs, info = envs.reset(seed=1)
    assert envs.action_space.contains(envs.action_space.sample())
    for step in range(4):
        assert envs.observation_space.contains(obs) and obs.shape == (N, A, D)
        assert info["state"].shape == (N, S) and info["state"].dtype == np.float32 and envs.state_size == S
        assert info["action_mask"].shape == (N, A, K) and info["action_mask"].dtype == bool
        assert (info["action_mask"].sum(axis=2) == envs.action_sizes).all() and info["action_mask"][..., 0].all()
        assert info["agent_mask"].shape == (N, A) and info["agent_mask"].all()
        ended = step in (2,)
        assert ("final_obs" in info) == ("episode" in info) == ended
        if ended:
            np.testing.assert_array_equal(info["final_action_mask"], info["action_mask"])
            assert info["_final_obs"].all() and info["_episode"].all()
        obs, reward, termination, truncation, info = envs.step(envs.action_space.sample())
        assert reward.shape == (N, A) and reward.dtype == np.float32
        assert termination.shape == truncation.shape == (N,) and termination.dtype == truncation.dtype == bool


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_blocks_are_steps_of_all_together(name, continuous, monkeypatch):
    """Seven environments stepped in blocks of two, against all at once; a position that is written counts in both."""
    options = {"continuous_actions": continuous, "max_cycles": 4}
    whole = make(f"mpe/{name}", 7, **options)
    monkeypatch.setattr(mpe, "BLOCK_BYTES", 2 * 8 * whole.plus.size + 1)
    blocks = make(f"mpe/{name}", 7, **options)
    assert len(blocks.blocks) == 4
    monkeypatch.undo()
    assert len(whole.blocks) == 1
    results = whole.reset(seed=3), blocks.reset(seed=3)
    rng = np.random.default_rng(0)
    for step in range(6):
        for ours, theirs in zip(*(find_arrays(result) for result in results), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)
        for envs in (whole, blocks):
            envs.pos[4, 0] = [0.1 * step, 0.2]
        action = random_actions(whole, rng)
        results = whole.step(action), blocks.step(action)
    np.testing.assert_allclose(whole.features, blocks.features, rtol=1e-6, atol=1e-7)


def find_arrays(result) -> list[np.ndarray]:
    """Those of what reset or step returns, of its info too."""
    *arrays, info = result
    return [*arrays, *(info[key] for key in sorted(info) if isinstance(info[key], np.ndarray))]


def test_one_environment_ends_alone():
    """The other environments' rows of the final entries are zero, and their episodes and streams go on untouched."""
    staggered, plain = (make("mpe/simple_tag_v3", 3) for _ in range(2))
    staggered.reset(seed=3), plain.reset(seed=3)
    staggered.statistics.lengths[1] = 20  # as if it had started earlier
    rng = np.random.default_rng(0)
    for step in range(1, 26):
        action = random_actions(plain, rng)
        obs, reward, termination, truncation, info = staggered.step(action)
        plain_obs, plain_reward, _, _, plain_info = plain.step(action)
        assert not termination.any()
        if step < 5:
            assert not truncation.any()
        if step == 5:
            assert (
                truncation.tolist() == info["_final_obs"].tolist() == info["_episode"].tolist() == [False, True, False]
            )
            np.testing.assert_array_equal(info["final_obs"][1], plain_obs[1])
            np.testing.assert_array_equal(info["final_state"][1], plain_info["state"][1])
            for key in ("final_obs", "final_state", "final_action_mask"):
                assert not info[key][[0, 2]].any() and info[key][1].any()
            assert info["episode"]["l"].tolist() == [0, 25, 0] and not info["episode"]["r"][[0, 2]].any()
            assert (obs[1, :, :2] == 0).all() and not np.array_equal(obs[1], plain_obs[1])  # a new episode: at rest
        others = [0, 2]
        if step < 25:
            np.testing.assert_array_equal(obs[others], plain_obs[others])
            np.testing.assert_array_equal(info["state"][others], plain_info["state"][others])
        np.testing.assert_array_equal(reward[others], plain_reward[others])
    assert truncation.tolist() == [True, False, True]
    assert info["episode"]["l"].tolist() == [25, 0, 25]


def test_episode_statistics_are_the_sums_of_the_rewards():
    envs, rng = make("mpe/simple_tag_v3", 4, max_cycles=9), np.random.default_rng(0)
    started, seconds = time.perf_counter(), 0
    envs.reset(seed=0)
    total = np.zeros((4, envs.num_agents))
    for step in range(1, 28):
        _, reward, _, truncation, info = envs.step(random_actions(envs, rng))
        total += reward
        assert truncation.all() == truncation.any() == (step % 9 == 0)
        if truncation.all():
            np.testing.assert_array_equal(info["episode"]["r"], total)
            assert (info["episode"]["l"] == 9).all()
            total[:], seconds = 0, seconds + info["episode"]["t"]
            assert (info["episode"]["t"] > 0).all() and (seconds <= time.perf_counter() - started).all()
    envs.step(random_actions(envs, rng))
    envs.reset()  # in the middle of an episode: counting starts anew
    for _ in range(9):
        info = envs.step(random_actions(envs, rng))[4]
    assert (info["episode"]["l"] == 9).all()


@pytest.mark.parametrize("name", ["simple_speaker_listener_v4", "simple_spread_v3"])  # with padding and without
def test_returned_arrays_are_not_overwritten(name):
    envs, rng = make(f"mpe/{name}", 3), np.random.default_rng(0)
    obs, info = envs.reset(seed=0)
    kept = [obs, info["state"]]
    for _ in range(30):
        copies = [array.copy() for array in kept]
        *arrays, info = envs.step(random_actions(envs, rng))
        for array, copy in zip(kept, copies, strict=True):
            np.testing.assert_array_equal(array, copy)
        arrays[0][:] += 1  # what a script does to its observations reaches neither state nor simulation
        np.testing.assert_allclose(info["state"][:, :3], arrays[0][:, 0, :3] - 1, atol=1e-6)
        kept = [*arrays, info["state"]]


def test_positions_and_velocities_can_be_set():
    """One push by hand: positions move with the old velocity, which decays by a quarter and gains 5 * 0.1 per push."""
    envs = make("mpe/simple_spread_v3", 2, N=2, local_ratio=1.0)
    envs.reset(seed=0)
    envs.pos[0, :2], envs.vel[0, :2] = [[0, 0], [1, 1]], [[1, 0], [0, -0.4]]
    obs, reward = envs.step(np.array([[2, 0], [0, 0]]))[:2]
    np.testing.assert_allclose(envs.pos[0, :2], [[0.1, 0], [1, 0.96]])
    np.testing.assert_allclose(envs.vel[0, :2], [[1.25, 0], [0, -0.3]])
    np.testing.assert_allclose(obs[0, 0, :4], [1.25, 0, 0.1, 0], rtol=1e-6)
    np.testing.assert_allclose(obs[0, 0, 8:10], [0.9, 0.96], rtol=1e-6)  # the other agent, relative
    assert reward[0].tolist() == [0, 0]
    envs.pos[0, :2], envs.vel[0] = [[0, 0], [0.1, 0]], 0  # overlapping by 0.2: a force of 20 each way
    reward = envs.step(np.zeros((2, 2), int))[1]
    np.testing.assert_allclose(envs.vel[0, :2], [[-2, 0], [2, 0]], rtol=1e-6)
    assert reward[0].tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("simple_spraed_v3", {}, "unknown environment 'mpe/simple_spraed_v3'; did you mean mpe/simple_spread_v3"),
        (
            "simple_spread_v3",
            {"M": 3},
            "no option 'M'; it has N, local_ratio, max_cycles, continuous_actions, render_mode",
        ),
        ("simple_tag_v3", {"N": 3}, "no option 'N'; it has num_good, num_adversaries, num_obstacles, max_cycles"),
        ("simple_v3", {"N": 3}, "no option 'N'; it has max_cycles"),
        ("simple_spread_v3", {"N": 0}, "N must be an integer of at least 1, not 0"),
        ("simple_spread_v3", {"N": 2.0}, "N must be an integer of at least 1, not 2.0"),
        ("simple_spread_v3", {"local_ratio": 1.5}, "local_ratio must be a number from 0 to 1, not 1.5"),
        ("simple_adversary_v3", {"N": -1}, "N must be an integer of at least 1, not -1"),
        ("simple_world_comm_v3", {"num_food": 0}, "num_food must be an integer of at least 1, not 0"),
        ("simple_tag_v3", {"num_obstacles": -1}, "num_obstacles must be an integer of at least 0, not -1"),
        ("simple_v3", {"continuous_actions": "no"}, "continuous_actions must be True or False, not 'no'"),
        ("simple_v3", {"max_cycles": 0}, "max_cycles must be an integer of at least 1, not 0"),
        ("simple_v3", {"render_mode": "human"}, "render_mode must be None or 'rgb_array', not 'human'"),
        ("simple_v3", {"num_envs": 0}, "num_envs must be at least 1, not 0"),
    ],
)
def test_bad_wishes_get_one_clear_line(name, options, message):
    with pytest.raises(EnvError) as error:
        make(f"mpe/{name}", **options)
    assert message in str(error.value) and "\n" not in str(error.value)


def illegal(value, dtype=np.int64):
    action = np.zeros((2, 2), dtype)
    action[1, 0] = value
    return action


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (illegal(3), "environment 1, agent 0 (speaker_0): action 3 is not an integer from 0 to 2"),
        (illegal(-1), "environment 1, agent 0 (speaker_0): action -1 is not an integer from 0 to 2"),
        (illegal(200, np.uint8), "environment 1, agent 0 (speaker_0): action 200 is not an integer from 0 to 2"),
        (illegal(0, np.float32), "actions must be of integer type, not float32"),
        (illegal(0, bool), "actions must be of integer type, not bool"),
        (np.zeros(2, int), "actions must have shape (2, 2), not (2,)"),
        (np.zeros((2, 2, 1), int), "actions must have shape (2, 2), not (2, 2, 1)"),
    ],
)
def test_illegal_discrete_actions(action, message):
    envs = make("mpe/simple_speaker_listener_v4", 2)
    envs.reset(seed=0)
    before = envs.features.copy()
    with pytest.raises(EnvError) as error:
        envs.step(action)
    assert str(error.value) == f"mpe/simple_speaker_listener_v4: {message}"
    np.testing.assert_array_equal(envs.features, before)  # nothing moved
    for dtype in (np.int32, np.uint8):
        envs.step(np.array([[2, 4], [0, 0]], dtype))


def test_illegal_continuous_actions():
    envs = make("mpe/simple_speaker_listener_v4", 2, continuous_actions=True)
    with pytest.raises(EnvError, match=r"call reset\(\) before step\(\)"):
        envs.step(np.zeros((2, 2, 5), np.float32))
    envs.reset(seed=0)
    action = np.zeros((2, 2, 5), np.float32)
    action[0, 1, 2] = np.nan
    who = r"environment 0, agent 1 \(listener_0\)"
    before = envs.features.copy()
    with pytest.raises(EnvError, match=rf"{who}: action \[0.0, 0.0, nan, 0.0, 0.0\] is not 5 numbers from 0 to 1"):
        envs.step(action)
    for value in (-0.25, 1.5, np.inf):  # mpe2 would clip it
        action[0, 1, 2] = value
        with pytest.raises(EnvError, match=rf"{who}: action \[0.0, 0.0, {value}, 0.0, 0.0\] is not 5 numbers"):
            envs.step(action)
    np.testing.assert_array_equal(envs.features, before)  # nothing moved
    action[0, 1, 2], action[0, 0, 4] = 1, np.nan  # the speaker has three numbers, whatever the padding is
    assert np.isfinite(envs.step(action)[0]).all() and np.isfinite(envs.features).all()
    with pytest.raises(EnvError, match=r"actions must have shape \(2, 2, 5\), not \(2, 2\)"):
        envs.step(np.zeros((2, 2), np.float32))
    with pytest.raises(EnvError, match="actions must be of float type, not int64"):
        envs.step(np.zeros((2, 2, 5), np.int64))


def test_render_draws_discs_where_the_agents_are():
    envs = make("mpe/simple_tag_v3", 2, num_obstacles=0, num_adversaries=1, render_mode="rgb_array")
    envs.reset(seed=0)
    envs.pos[0] = [[0, 0], [0.6, 0.6]]  # adversary, prey
    frame = envs.render()
    assert frame.shape == (350, 350, 3) and frame.dtype == np.uint8
    red, green = frame[168, 168].astype(int), frame[83, 259].astype(int)  # y points up: the prey is in the upper half
    assert red[0] > 2 * red[1] and green[1] > 2 * green[0]
    assert (frame[10, 10] > 240).all() and (frame[262, 262] > 240).all()
    envs.pos[0] = [[0, 0], [5, 5]]  # the view widens
    frame = envs.render().astype(int)
    assert (frame[:30, -30:, 1] > 1.5 * frame[:30, -30:, 0]).any()
    with pytest.raises(EnvError, match="make it with render_mode='rgb_array'"):
        make("mpe/simple_v3", 1).render()


def test_render_tells_agents_apart():
    """Those that mpe2 draws in one colour have shades of it, the same in their names at the bottom."""
    envs = make("mpe/simple_spread_v3", 1, render_mode="rgb_array")
    envs.reset(seed=0)
    envs.pos[0, 3:] = [[0.9, 0.9]] * 3
    envs.pos[0, :3] = [[-0.6, 0], [0, 0], [0.6, 0]]
    frame = envs.render().astype(int)
    colors = [tuple(frame[165, column]) for column in (87, 175, 262)]
    assert len({*colors}) == 3 and all(color[2] > color[0] for color in colors)
    for i, color in enumerate(colors):
        name = frame[330:, round(350 * i / 4) : round(350 * (i + 1) / 4)]
        assert np.abs(name - np.array(color)).max(-1).min() < 30


def test_render_rings_the_goal_and_shows_the_words():
    envs = make("mpe/simple_speaker_listener_v4", 1, render_mode="rgb_array")
    envs.reset(seed=0)
    envs.step(np.array([[1, 0]]))
    said = envs.render()[10, 10:50:14].mean(axis=1)  # one box per word
    assert said.argmin() == 1 and said[1] < 60 < said[0] == said[2]
    frames = []
    for goal in range(3):
        envs.goals[0] = goal
        frames.append(envs.render().astype(int))
    assert all((frames[a] != frames[b]).any() for a, b in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("name", SCENARIOS)
def test_episodes_go_on_from_a_snapshot(name, continuous):
    """In environments that have not played, and in those that were elsewhere; three of them, and two blocks."""
    for num_envs in (3, 700):
        rng = np.random.default_rng(1)
        one, fresh, elsewhere = (make(f"mpe/{name}", num_envs, continuous_actions=continuous) for _ in range(3))
        one.reset(seed=3)
        elsewhere.reset(seed=4)
        for _ in range(30):  # beyond the end of the first episode
            obs, *_, info = one.step(random_actions(one, rng))
        saved = as_arrays(as_tensors(one.snapshot()))
        for other in (fresh, elsewhere):
            obs_, info_ = other.restore(saved)
            np.testing.assert_array_equal(obs, obs_)
            np.testing.assert_array_equal(info["state"], info_["state"])
        for _ in range(30):
            action = random_actions(one, rng)
            step, *others = (envs.step(action) for envs in (one, fresh, elsewhere))
            for other in others:
                for x, y in zip((*step[:4], step[4]["state"]), (*other[:4], other[4]["state"])):
                    np.testing.assert_array_equal(x, y)
