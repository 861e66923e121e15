"""impala.py against independent definitions (V-trace, loss, replay, cutting); its processes: versions, faults."""

import dataclasses
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from multiprocessing import resource_tracker
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cleanmarl import enjoy, impala
from cleanmarl.run import evaluate, launch, load_checkpoint

SMALL = {"num_actors": 0, "total_timesteps": 128, "num_envs": 4, "unroll_length": 16, "eval_episodes": 0}
SMALL |= {"updates_per_collect": 1}
LINUX = pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")


class Clock(gym.Env):
    """Counts to its time limit, reward 1 a step; never terminates."""

    observation_space = gym.spaces.Box(0, 100, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(1, self.t, np.float32), 1.0, False, False, {}


class Broken(Clock):
    """Works where it is looked at, fails when it is played."""

    def step(self, action):
        raise RuntimeError("the clock is broken")


gym.register("Clock-v0", Clock, max_episode_steps=5)
gym.register("Broken-v0", Broken)
BROKEN = "test_impala:Broken-v0"  # actors are other processes, which import this module to find it


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def learned(folder: Path) -> dict[str, list[tuple[int, float]]]:
    return {tag: points for tag, points in scalars(folder).items() if not tag.startswith("time/")}


def new_slot(envs, args):
    return np.zeros(1, impala.slot_dtype(envs, args))[0]


def play(args, seed=0, sharp=100):
    """An agent whose policy is far from uniform, its player, and a slot that it filled."""
    torch.manual_seed(seed)
    player = impala.Player(args, 0, 0)
    agent = impala.Agent(player.envs, args)
    with torch.no_grad():
        agent.actor[-1].weight *= sharp
    slot = new_slot(player.envs, args)
    player.play(agent, slot)
    return agent, player, slot


# -------------------------------------------------------------------------------------------------------------- V-trace


def vtrace_by_definition(log_rho, reward, value, next_value, done, gamma, lambda_, rho_clip, c_clip, pg_rho_clip):
    """Equation 1 of the paper as a sum of products, and the advantage of section 4.2, in float64, for (T,) arrays."""
    T, rho = len(reward), np.exp(np.float64(log_rho))
    targets, advantages = np.zeros(T + 1), np.zeros(T)
    for s in range(T):
        targets[s] = value[s]
        for t in range(s, T):
            if done[s:t].any():
                break
            c = np.prod([lambda_ * min(c_clip, rho[i]) for i in range(s, t)])
            delta = min(rho_clip, rho[t]) * (reward[t] + gamma * next_value[t] - value[t])
            targets[s] += gamma ** (t - s) * c * delta
    for s in range(T):
        following = next_value[s] if done[s] or s == T - 1 else targets[s + 1]
        advantages[s] = min(pg_rho_clip, rho[s]) * (reward[s] + gamma * following - value[s])
    return targets[:T], advantages


def random_steps(T, rng, p_done=0.0, n=3):
    """log_rho, reward, value, next_value, done: (T, n); half of the ends are truncations, whose value is not 0."""
    value, final_value = rng.normal(size=(T + 1, n)), rng.normal(size=(T, n))
    done, truncated = rng.random((T, n)) < p_done, rng.random((T, n)) < 0.5
    next_value = np.where(done, np.where(truncated, final_value, 0), value[1:])
    return rng.normal(size=(T, n)), rng.normal(size=(T, n)), value[:-1], next_value, done


@given(
    st.integers(1, 20),
    st.tuples(*[st.floats(0, 1)] * 2),
    st.tuples(*[st.floats(0.1, 3)] * 3),
    st.floats(0, 0.5),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=100, deadline=None)
def test_vtrace_is_its_definition(T, discounts, clips, p_done, seed):
    steps = random_steps(T, np.random.default_rng(seed), p_done)
    targets, advantages = impala.vtrace(*(x.copy() for x in steps), *discounts, *clips)
    for n in range(3):
        expected = vtrace_by_definition(*(x[:, n] for x in steps), *discounts, *clips)
        np.testing.assert_allclose(targets[:, n], expected[0], atol=1e-10)
        np.testing.assert_allclose(advantages[:, n], expected[1], atol=1e-10)


def test_vtrace_is_torchrls():
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    log_rho, reward, value, _, done = random_steps(40, np.random.default_rng(0), 0.1)
    next_value = np.concatenate([value[1:], np.random.default_rng(1).normal(size=(1, 3))])
    terminated = done & (np.random.default_rng(2).random(done.shape) < 0.5)

    def theirs(x):  # (T, N) -> (N, T, 1)
        return torch.from_numpy(x).T[..., None]

    steps = *map(theirs, (log_rho, np.zeros_like(log_rho), value, next_value, reward, done, terminated)), 1.5, 0.9
    advantage, target = functional.vtrace_advantage_estimate(0.97, *steps)
    ours = impala.vtrace(log_rho, reward, value, next_value * ~terminated, done, 0.97, 1.0, 1.5, 0.9, 1.5)
    np.testing.assert_allclose(ours[0], target.squeeze(-1).T.numpy(), atol=1e-5)  # its discount is float32
    # Its advantage takes the target of the next episode's first step after a truncation: compare where nothing ended.
    whole = ~done
    np.testing.assert_allclose(ours[1][whole], advantage.squeeze(-1).T.numpy()[whole], atol=1e-5)


def test_vtrace_is_rlaxs():
    """The example in rlax's tests: two sequences of four steps, their discounts as gamma and ends."""
    reward = np.array([[-1.3, -1.3, 2.3, 42.0], [1.3, 5.3, -3.3, -5.0]]).T
    discount = np.array([[0.0, 0.89, 0.85, 0.99], [0.88, 1.0, 0.83, 0.95]]).T
    value = np.array([[2.1, 1.1, -3.1, 0.0, 8.4], [3.1, 0.1, -1.1, 7.4, -1.2]]).T
    behaviour = np.array(
        [[[8.9, 0.7], [5.0, 1.0], [0.6, 0.1], [-0.9, -0.1]], [[0.3, -5], [1, -8], [0.3, 1.7], [4.7, 3.3]]]
    )
    target = np.array([[[0.4, 0.5], [9.2, 8.8], [0.7, 4.4], [7.9, 1.4]], [[1, 0.9], [1, -1], [-4.3, 8.7], [0.8, 0.3]]])
    action = np.array([[0, 1, 0, 0], [1, 0, 0, 1]])

    def log_prob(logits):
        return (
            torch.from_numpy(logits).log_softmax(-1).gather(-1, torch.from_numpy(action)[..., None])[..., 0].numpy().T
        )

    log_rho = log_prob(target) - log_prob(behaviour)
    never = np.zeros((4, 2), bool)  # their ends are discounts of 0
    targets, _ = impala.vtrace(log_rho, reward, value[:-1], value[1:], never, discount, 1, 1, 1, 1)
    expected = [[-1.6155143, -3.4973226, 1.8670533, 50.316002], [1.4662437, 3.6116405, -8.33e-5, -13.54]]
    np.testing.assert_allclose((targets - value[:-1]).T, expected, rtol=1e-3)


def test_vtrace_with_lambda_is_di_engines():
    """Their published recursion: one gamma, no ends, lambda next to every c."""
    log_rho, reward, value, _, done = random_steps(30, np.random.default_rng(3))
    values = np.concatenate([value, np.random.default_rng(4).normal(size=(1, 3))])
    rho = np.exp(log_rho)
    result, item = values[:-1].copy(), 0.0
    deltas = np.minimum(rho, 1.2) * (reward + 0.98 * values[1:] - values[:-1])
    for t in reversed(range(30)):
        item = deltas[t] + 0.98 * 0.9 * np.minimum(rho[t], 0.8) * item
        result[t] += item
    advantage = np.minimum(rho, 1.1) * (reward + 0.98 * np.concatenate([result[1:], values[-1:]]) - values[:-1])
    ours = impala.vtrace(log_rho, reward, value, values[1:], done, 0.98, 0.9, 1.2, 0.8, 1.1)
    np.testing.assert_allclose(ours[0], result, atol=1e-12)
    np.testing.assert_allclose(ours[1], advantage, atol=1e-12)


@pytest.mark.parametrize("c_clip", [1.0, 2.0])
def test_on_policy_it_is_the_n_step_return(c_clip):
    _, reward, value, next_value, done = random_steps(25, np.random.default_rng(5), 0.1)
    targets, advantages = impala.vtrace(np.zeros((25, 3)), reward, value, next_value, done, 0.9, 1, 2.0, c_clip, 1.0)
    expected, following = np.zeros((25, 3)), next_value[-1]
    for t in reversed(range(25)):
        following = reward[t] + 0.9 * np.where(done[t], next_value[t], following)
        expected[t] = following
    np.testing.assert_allclose(targets, expected, atol=1e-12)
    np.testing.assert_allclose(advantages, expected - value, atol=1e-12)


# ----------------------------------------------------------------------------------------------------------- the unroll


def test_unrolls_go_on_where_the_last_one_stopped():
    """Across ends too: no dummy row, the observation after an unroll begins the next, the statistics are the env's."""
    args = impala.Args(**SMALL | {"unroll_length": 40})
    agent, player, first = play(args)
    first, second = first.copy(), new_slot(player.envs, args)
    player.play(agent, second)
    np.testing.assert_array_equal(first["unrolls"]["obs"][:, -1], second["unrolls"]["obs"][:, 0])
    done = np.concatenate([s["unrolls"]["termination"] | s["unrolls"]["truncation"] for s in (first, second)], 1)
    ends = [np.flatnonzero(row) for row in done]
    lengths = np.concatenate([np.diff(e, prepend=-1) for e in ends])
    reported = np.concatenate([s["ep_length"].T for s in (first, second)], 1)
    assert (reported[~done] == 0).all() and sorted(reported[done]) == sorted(lengths) and len(lengths) > 4
    returns = np.concatenate([s["ep_return"].T for s in (first, second)], 1)
    np.testing.assert_array_equal(returns[done], reported[done])  # a reward of 1 a step

    env = gym.make("CartPole-v1").unwrapped  # the steps are those of the environment
    unrolls = first["unrolls"]
    for n, t in np.argwhere(~done[:, :40]):
        env.reset()
        env.state = unrolls["obs"][n, t].astype(np.float64)
        np.testing.assert_allclose(env.step(int(unrolls["action"][n, t]))[0], unrolls["obs"][n, t + 1], atol=1e-5)


def test_time_limits_are_truncations_with_their_last_observation():
    _, _, slot = play(impala.Args(env_id="Clock-v0", **SMALL))
    unrolls, expected = slot["unrolls"], np.zeros((4, 16), bool)
    expected[:, [4, 9, 14]] = True
    np.testing.assert_array_equal(unrolls["truncation"], expected)
    assert not unrolls["termination"].any() and unrolls["mask"].all()
    assert (unrolls["final_obs"][expected] == 5).all()
    np.testing.assert_array_equal(unrolls["obs"][..., 0], np.tile([*[0, 1, 2, 3, 4] * 3, 0, 1], (4, 1)))


def test_actions_are_samples_of_the_policy_and_log_probs_are_theirs():
    args = impala.Args(env_id="Clock-v0", num_actors=0, num_envs=8, unroll_length=2000)
    torch.manual_seed(0)
    player = impala.Player(args, 0, 0)
    agent = impala.Agent(player.envs, args)
    with torch.no_grad():
        agent.actor[-1].weight.zero_()
        agent.actor[-1].bias.copy_(torch.tensor([0.0, 1.0]))
    slot = new_slot(player.envs, args)
    player.play(agent, slot)
    action, expected = slot["unrolls"]["action"], 1 / (1 + np.exp(-1))
    assert abs(action.mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / action.size)
    np.testing.assert_allclose(slot["unrolls"]["log_prob"], np.log(np.where(action, expected, 1 - expected)), atol=1e-6)


# ------------------------------------------------------------------------------------------------------------- the loss


def loss_by_definition(agent, unrolls, weight, args):
    """The losses step by step in float64, from the definition of V-trace above."""
    agent, total, parts, priorities = agent.double(), 0, np.zeros(3), []
    count = unrolls["mask"].sum()
    for unroll, w in zip(unrolls, weight.double()):
        obs = torch.from_numpy(unroll["obs"]).double()
        action = torch.from_numpy(unroll["action"])
        log_probs = torch.log(torch.softmax(agent.actor(obs[:-1]), -1))
        log_prob, value = log_probs[range(len(action)), action], agent.critic(obs)[:, 0]
        v = value.detach().numpy()
        next_value = v[1:].copy()
        for t in range(len(action)):
            if unroll["termination"][t]:
                next_value[t] = 0
            elif unroll["truncation"][t]:
                next_value[t] = agent.critic(torch.from_numpy(unroll["final_obs"][t]).double()).item()
        log_rho = log_prob.detach().numpy() - unroll["log_prob"]
        done = unroll["termination"] | unroll["truncation"]
        clips = args.rho_clip, args.c_clip, args.pg_rho_clip
        targets, advantages = vtrace_by_definition(
            log_rho, unroll["reward"], v[:-1], next_value, done, args.gamma, args.vtrace_lambda, *clips
        )
        real = np.flatnonzero(unroll["mask"])
        priorities.append(np.abs(targets - v[:-1])[real].mean())
        for t in real:
            policy = -log_prob[t] * advantages[t]
            error = 0.5 * (value[t] - targets[t]) ** 2
            entropy = -(log_probs[t].exp() * log_probs[t]).sum()
            total = total + w * (policy - args.ent_coef * entropy + args.vf_coef * error) / count
            parts += [x.item() * w.item() / count for x in (policy, error, entropy)]
    return total, parts, priorities


def example_unrolls(seed=0):
    """12 steps of 6 environments by another policy than the agent's, with both kinds of ends and empty steps."""
    args = impala.Args(rho_clip=1.5, c_clip=1.1, pg_rho_clip=1.3, vtrace_lambda=0.9, ent_coef=0.1, vf_coef=0.7)
    torch.manual_seed(seed)
    envs = impala.make_envs(args, 1)
    agent = impala.Agent(envs, args)
    with torch.no_grad():
        agent.actor[-1].weight *= 100
    rng, unrolls = np.random.default_rng(seed), np.zeros(6, impala.unroll_dtype(envs, args))
    for name in ("obs", "final_obs", "reward"):
        unrolls[name] = rng.normal(size=unrolls[name].shape)
    unrolls["action"] = rng.integers(2, size=unrolls["action"].shape)
    unrolls["log_prob"] = -rng.exponential(size=unrolls["action"].shape)
    unrolls["mask"] = True
    unrolls["termination"][[0, 1], [3, 19]] = True
    unrolls["truncation"][[2, 2, 3], [0, 7, 19]] = True
    unrolls["termination"][4, 6], unrolls["mask"][4, 7:] = True, False
    return args, agent, unrolls, torch.from_numpy(rng.random(6, dtype=np.float32))


@pytest.mark.parametrize("seed", range(2))
def test_loss_and_gradient_are_their_definition(seed):
    args, agent, unrolls, weight = example_unrolls(seed)
    loss, stats, priority = impala.impala_loss(agent, unrolls, weight, args)
    gradients = torch.autograd.grad(loss, list(agent.parameters()))
    expected, parts, priorities = loss_by_definition(agent, unrolls, weight, args)
    torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(stats[:3], parts, rtol=1e-4)
    np.testing.assert_allclose(priority, priorities, rtol=1e-4)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, list(agent.parameters()))):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-4)
    log_rho = agent.float().actor(torch.from_numpy(unrolls["obs"][:, :-1])).log_softmax(-1)
    log_rho = log_rho.gather(-1, torch.from_numpy(unrolls["action"])[..., None])[..., 0].detach().numpy()
    log_rho = (log_rho - unrolls["log_prob"])[unrolls["mask"]]
    np.testing.assert_allclose(stats[3], (np.exp(log_rho) - 1 - log_rho).mean(), rtol=1e-4)
    np.testing.assert_allclose(stats[4], (log_rho > np.log(1.5)).mean(), rtol=1e-4)
    assert 0.1 < stats[4] < 0.9  # the batch does test clipping


def test_empty_steps_take_no_part():
    args, agent, unrolls, weight = example_unrolls()
    before = impala.impala_loss(agent, unrolls, weight, args)
    for name in ("obs", "final_obs"):
        unrolls[name][4, 8:] = 7
    unrolls["reward"][4, 7:] = 100
    unrolls["log_prob"][4, 7:] = -5
    after = impala.impala_loss(agent, unrolls, weight, args)
    for a, b in zip(before, after):
        assert torch.equal(a, b)


def test_ratios_are_one_for_the_policy_that_acted():
    args = impala.Args(**SMALL)
    agent, _, slot = play(args, sharp=2000)
    _, stats, _ = impala.impala_loss(agent, slot["unrolls"], torch.ones(4), args)
    assert abs(stats[3]) < 1e-6 and stats[2] < 0.68  # approx_kl is 0, though the policy is not uniform
    with torch.no_grad():
        agent.actor[-1].bias += torch.tensor([0.0, 1.0])
    assert impala.impala_loss(agent, slot["unrolls"], torch.ones(4), args)[1][3] > 0.01


def test_gradients_are_clipped_by_one_norm_over_both_networks():
    args = impala.Args(**SMALL, max_grad_norm=0.01, vf_coef=100.0)
    agent, player, slot = play(args)
    before = nn_vector(agent)
    replay = impala.Replay(args, impala.unroll_dtype(player.envs, args))
    impala.update(agent, torch.optim.SGD(agent.parameters(), lr=1.0), replay, slot["unrolls"], args)
    assert (nn_vector(agent) - before).norm().item() == pytest.approx(0.01, rel=1e-3)


def nn_vector(agent):
    return torch.nn.utils.parameters_to_vector(agent.parameters()).detach().clone()


# --------------------------------------------------------------------------------------------------- cutting, replaying


def numbered(T, ends, slots):
    """Slots (slots, 1) of unrolls of one environment whose steps are numbered from 1; episodes end after `ends`."""
    args = impala.Args(unroll_length=T, num_envs=1)
    unrolls = np.zeros((slots, 1), impala.unroll_dtype(impala.make_envs(args, 1), args))
    steps = np.arange(1, slots * T + 1).reshape(slots, T)
    unrolls["reward"][:, 0] = unrolls["action"][:, 0] = steps
    unrolls["obs"][:, 0, :, 0] = np.concatenate([steps, steps[:, -1:] + 1], 1)
    unrolls["termination"][:, 0], unrolls["mask"] = np.isin(steps, ends), True
    return unrolls


@pytest.mark.parametrize(
    "how, expected",
    [
        # episodes of 6, 3, 4 and 11 steps, unrolls of 4; _ is an empty step
        ("keep", "1234 5678 9abc defg hijk lmno"),
        ("drop", "1234 abcd efgh ijkl"),
        ("last", "1234 3456 789_ abcd efgh ijkl lmno"),
        ("null_padding", "1234 56__ 789_ abcd efgh ijkl mno_"),
    ],
)
def test_remainders(how, expected):
    slots = numbered(4, [6, 9, 13, 24], 6)
    before = slots.copy()
    cutter = impala.Cutter(impala.Args(remainder=how))
    cut = [unroll for slot in slots for batch in cutter.cut(0, slot) for unroll in batch]
    names = np.array(list("_123456789abcdefghijklmno"))
    assert ["".join(names[unroll["action"]]) for unroll in cut] == expected.split()
    for unroll in cut:
        real = unroll["reward"] > 0
        np.testing.assert_array_equal(unroll["mask"], real)
        np.testing.assert_array_equal(unroll["reward"], unroll["action"])
        np.testing.assert_array_equal(unroll["termination"], np.isin(unroll["reward"], [6, 9, 13, 24]))
        steps = unroll["reward"][real]
        np.testing.assert_array_equal(unroll["obs"][: len(steps) + 1, 0], [*steps, steps[-1] + 1])
    np.testing.assert_array_equal(slots, before)


def test_batches_of_cut_unrolls_have_full_size_and_actors_do_not_mix():
    """Two actors of 3 environments that play together what one of 6 plays: the same unrolls, in batches of 3."""
    args = impala.Args(**SMALL | {"num_envs": 6, "unroll_length": 8}, remainder="last")
    agent, player, slot = play(args)
    slots = [slot.copy()["unrolls"]]
    for _ in range(20):
        player.play(agent, slot)
        slots.append(slot.copy()["unrolls"])
    alone, cutter = impala.Cutter(args), impala.Cutter(args)
    one = [unroll.tobytes() for unrolls in slots for batch in alone.cut(0, unrolls) for unroll in batch]
    two = []
    for unrolls in slots:
        for actor in (0, 1):
            for batch in cutter.cut(actor, unrolls[3 * actor : 3 * actor + 3]):
                assert len(batch) == 3
                two += [unroll.tobytes() for unroll in batch]
    two += [unroll.tobytes() for unroll in cutter.complete]
    one += [unroll.tobytes() for unroll in alone.complete]
    assert sorted(one) == sorted(two) and len(one) > 100 and len(cutter.complete) < 3


def new_replay(size=10, **flags):
    args = impala.Args(num_envs=4, unroll_length=1, replay_size=size, **flags)
    dtype = impala.unroll_dtype(impala.make_envs(args, 1), args)
    unrolls = np.zeros(25, dtype)
    unrolls["reward"][:, 0] = np.arange(25)
    return impala.Replay(args, dtype), unrolls


def test_replay_keeps_the_latest_and_draws_evenly():
    torch.manual_seed(0)
    replay, unrolls = new_replay()
    replay.add(unrolls[:4])
    assert set(replay.sample()[0]["reward"].ravel()) <= {0, 1, 2, 3}
    for first in range(4, 24, 4):
        replay.add(unrolls[first : first + 4])
    counts = np.zeros(25)
    for _ in range(2000):
        drawn, where, weight = replay.sample()
        np.testing.assert_array_equal(replay.unrolls[where.numpy()], drawn)
        np.add.at(counts, drawn["reward"].ravel().astype(int), 1)
        assert (weight == 1).all()
    assert (counts[:14] == 0).all() and counts[24] == 0 and counts.sum() == 8000
    assert np.abs(counts[14:24] - 800).max() < 4 * np.sqrt(800)


@pytest.mark.parametrize("is_weight", [False, True])
def test_replay_draws_by_priority(is_weight):
    torch.manual_seed(0)
    replay, unrolls = new_replay(priority=True, priority_is_weight=is_weight)
    replay.add(unrolls[:8])
    assert (replay.priority[:8] == 1).all()
    replay.priority[:8] = torch.tensor([1.0, 2, 4, 8, 1, 1, 1, 1])
    replay.add(unrolls[8:9])
    assert replay.priority[8] == 8  # new ones are as likely as any
    share = replay.priority[:9].numpy() ** 0.6
    share /= share.sum()
    counts = np.zeros(9)
    for _ in range(2000):
        _, where, weight = replay.sample()
        np.add.at(counts, where.numpy(), 1)
        largest = ((9 * share[where]) ** -0.4).max()
        expected = (9 * share[where]) ** -0.4 / largest if is_weight else np.ones(4)
        np.testing.assert_allclose(weight, expected, rtol=1e-5)
    assert (np.abs(counts - 8000 * share) < 4 * np.sqrt(8000 * share)).all()


def test_updates_draw_from_the_replay_and_set_priorities():
    args = impala.Args(**SMALL | {"updates_per_collect": 3}, replay_size=8, priority=True)
    agent, player, slot = play(args)
    replay = impala.Replay(args, slot["unrolls"].dtype)
    optimizer = torch.optim.Adam(agent.parameters(), 1e-3)
    for _ in range(2):
        impala.update(agent, optimizer, replay, slot["unrolls"], args)
        player.play(agent, slot)
    steps = {int(state["step"]) for state in optimizer.state.values()}
    assert steps == {6} and replay.count == 8
    touched = replay.priority != 1
    assert touched.any() and (replay.priority[touched] > 0).all()
    torch.manual_seed(5)
    _, where, _ = replay.sample()
    torch.manual_seed(5)
    one = dataclasses.replace(args, updates_per_collect=1)
    expected = impala.impala_loss(agent, replay.unrolls[where], torch.ones(4), args)[2]
    still = torch.optim.SGD(agent.parameters(), 0.0)
    replay.add = lambda unrolls: None
    impala.update(agent, still, replay, slot["unrolls"], one)
    torch.testing.assert_close(replay.priority[where], expected + 1e-6)


def test_without_replay_every_batch_is_learned_from_as_it_comes():
    args = impala.Args(**SMALL | {"updates_per_collect": 2})
    agent, _, slot = play(args)
    optimizer = torch.optim.Adam(agent.parameters(), 1e-3)
    twin = impala.Agent(impala.make_envs(args, 1), args)
    twin.load_state_dict(agent.state_dict())
    impala.update(agent, optimizer, None, slot["unrolls"], args)
    theirs = torch.optim.Adam(twin.parameters(), 1e-3)
    for _ in range(2):
        theirs.zero_grad()
        impala.impala_loss(twin, slot["unrolls"], torch.ones(4), args)[0].backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), args.max_grad_norm)
        theirs.step()
    torch.testing.assert_close(nn_vector(agent), nn_vector(twin), atol=0, rtol=0)


# -------------------------------------------------------------------------------------------------------------- the run


@pytest.mark.parametrize("env_id", ["CartPole-v1", "FrozenLake-v1", "Acrobot-v1"])
def test_two_updates_on(env_id, tmp_path):
    folder = impala.main(impala.Args(env_id=env_id, **SMALL, runs_dir=str(tmp_path)))
    checkpoint = load_checkpoint(folder)
    assert checkpoint["step"] == 128
    assert all(torch.isfinite(x).all() for x in checkpoint["modules"]["agent"].values())
    train = ["policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "explained_variance"]
    tags = {f"train/{name}" for name in [*train, "policy_lag", "learning_rate"]}
    tags |= {"time/SPS", "time/learner_wait", "rollout/num_episodes"}
    points = scalars(folder)
    assert tags <= set(points) <= tags | {"rollout/ep_reward", "rollout/ep_length"}
    assert [step for step, _ in points["train/policy_loss"]] == [64, 128]
    np.testing.assert_allclose([lr for _, lr in points["train/learning_rate"]], [1e-3, 5e-4], rtol=1e-6)


@pytest.mark.parametrize("remainder", ["drop", "last", "null_padding"])
def test_runs_with_remainders_repeat_and_resume(remainder, tmp_path):
    flags = SMALL | {"total_timesteps": 640, "remainder": remainder, "replay_size": 8, "priority": True}
    flags |= {"priority_is_weight": True, "updates_per_collect": 2, "runs_dir": str(tmp_path)}
    folder, again = (impala.main(impala.Args(**flags)) for _ in range(2))
    assert learned(folder) == learned(again) and "train/policy_loss" in learned(folder)
    half = load_checkpoint(folder)
    impala.main(impala.Args(**flags | {"total_timesteps": 1280, "resume": folder}))
    whole = load_checkpoint(folder)
    assert whole["step"] == 1280 and half["step"] == 640
    assert half["modules"]["replay"]["count"] < whole["modules"]["replay"]["count"]
    assert int(whole["modules"]["optimizer"]["state"][0]["step"]) > int(
        half["modules"]["optimizer"]["state"][0]["step"]
    )
    assert [step for step, _ in scalars(folder)["train/learning_rate"]] == list(range(64, 1281, 64))


def test_a_checkpoint_holds_the_replay():
    replay, unrolls = new_replay(priority=True)
    replay.add(unrolls[:7])
    replay.priority[3] = 5
    other, _ = new_replay(priority=True)
    other.load_state_dict(replay.state_dict())
    np.testing.assert_array_equal(other.unrolls, replay.unrolls)
    assert torch.equal(other.priority, replay.priority) and other.count == 7


def test_enjoy_plays_the_run(tmp_path):
    folder = impala.main(impala.Args(**SMALL, runs_dir=str(tmp_path)))
    assert enjoy.main(enjoy.Args(folder, episodes=2))["eval/ep_length"] > 0


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--env-id CartPol-v1", "did you mean CartPole-v1"),
        ("--env-id Pendulum-v1", "Pendulum-v1 has Box(-2.0, 2.0, (1,), float32); try impala_continuous_action.py"),
        ("--env-id Blackjack-v1", "needs Box or Discrete observations"),
        ("--num-actors -1", "--num-actors must be at least 0, not -1"),
        ("--num-envs 0", "--num-envs must be greater than 0"),
        ("--unroll-length 0", "--unroll-length must be greater than 0"),
        ("--updates-per-collect 0", "--updates-per-collect must be greater than 0"),
        ("--rho-clip 0", "--rho-clip must be greater than 0"),
        ("--rho-clip 0.9", "--rho-clip 0.9 must be at least --c-clip 1.0"),
        ("--gamma 1.1", "--gamma and --vtrace-lambda must be in [0, 1]"),
        ("--vtrace-lambda -0.1", "--gamma and --vtrace-lambda must be in [0, 1]"),
        ("--replay-size 15", "--replay-size 15 is less than a batch of --num-envs 16 unrolls"),
        ("--priority", "--priority needs a replay: --replay-size"),
        ("--replay-size 99 --priority-is-weight", "--priority-is-weight needs --priority"),
        ("--total-timesteps 319", "--total-timesteps 319 is less than the 320 steps of one batch"),
        ("--device nonsense", "--device nonsense is not there"),
    ],
)
def test_refused(flags, text, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["impala.py", "--runs-dir", str(tmp_path / "runs"), *flags.split()])
    with pytest.raises(SystemExit) as stopped:
        launch(impala.main, impala.Args)
    out, err = capfd.readouterr()
    assert stopped.value.code == 2 and not out and not list(tmp_path.iterdir())
    assert err.startswith("impala: ") and err.count("\n") == 1 and text in err


@pytest.mark.learning
@pytest.mark.parametrize("num_actors", [0, 2])
def test_learns_cartpole_in_seconds(num_actors, tmp_path):
    flags = {"num_actors": num_actors, "deterministic": True, "total_timesteps": 40_000, "eval_episodes": 0}
    args = impala.Args(**flags, runs_dir=str(tmp_path))
    folder = impala.main(args)
    envs = impala.make_envs(args, 4)
    agent = impala.Agent(envs, args)
    untrained = evaluate(envs, impala.make_policy(agent, greedy=False), 20, seed=7)["eval/ep_reward"]
    agent.load_state_dict(load_checkpoint(folder)["modules"]["agent"])
    trained = evaluate(envs, impala.make_policy(agent, greedy=False), 20, seed=7)["eval/ep_reward"]
    assert untrained < 50 and trained > 150


# -------------------------------------------------------------------------------------------------------- the processes


class Constant(torch.nn.Module):
    """An agent of two million equal parameters: a torn read shows two values."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2_000_000))


def write_for_ever(memory) -> None:
    parameters, agent, version = impala.Parameters(memory), Constant(), 0
    while True:
        version += 1
        agent.weight.data.fill_(version)
        parameters.write(agent, version)
        time.sleep(0.001)


def test_parameters_are_read_whole():
    """Another process writes all the time; every read is of one version, the one it names."""
    context = multiprocessing.get_context("spawn")
    memory = context.RawArray("b", 8 + 4 * 2_000_000)
    writer = context.Process(target=write_for_ever, args=(memory,), daemon=True)
    writer.start()
    parameters, agent, seen, torn = impala.Parameters(memory), Constant(), set(), 0

    def enough():
        nonlocal torn
        version = parameters.read(agent)
        assert (agent.weight == version).all()
        seen.add(version)
        unguarded = parameters.flat.copy()
        torn += unguarded.min() != unguarded.max()
        return len(seen) > 20 and torn > 0  # torn: the guard had something to do

    wait_for(enough)
    writer.kill()
    writer.join()


def test_the_log_probs_are_those_of_the_version_that_acted():
    """A learner that changes its policy much and often: every slot is explained by its own version, and by no other."""
    args = impala.Args(**SMALL | {"num_actors": 1})
    torch.manual_seed(0)
    envs = impala.make_envs(args, 1)
    agent = impala.Agent(envs, args)
    published, lags = {0: nn_vector(agent)}, set()
    with closing(impala.Actors(args, agent, envs, 0)) as actors:
        for version in range(1, 30):
            ((actor, slot),) = actors.take(version - 1)
            unrolls = slot["unrolls"]
            twin = impala.Agent(envs, args)
            torch.nn.utils.vector_to_parameters(published[int(slot["version"])], twin.parameters())
            stats = impala.impala_loss(twin, unrolls, torch.ones(4), args)[1]
            assert actor == 0 and abs(stats[3]) < 1e-6
            lags.add(version - 1 - int(slot["version"]))
            with torch.no_grad():
                agent.actor[-1].bias.copy_(torch.tensor([0.0, version % 7 - 3.0]))
            actors.publish(version)
            published[version] = nn_vector(agent)
    assert max(lags) > 0 and min(lags) >= 0


def test_deterministic_runs_with_actors_repeat(tmp_path):
    flags = SMALL | {"num_actors": 2, "deterministic": True, "total_timesteps": 1000, "runs_dir": str(tmp_path)}
    one, same = (learned(impala.main(impala.Args(**flags))) for _ in range(2))
    assert one == same and len(one["train/policy_loss"]) == 15  # the second actor's last unroll would be too much
    assert one["train/learning_rate"][-1][1] > 0
    # the second round of unrolls was played while the learner still learned from the first
    assert [lag for _, lag in one["train/policy_lag"]] == [0, 1] + [2, 3] * 6 + [2]


def test_one_process_repeats_and_has_no_lag(tmp_path):
    flags = SMALL | {"total_timesteps": 640, "runs_dir": str(tmp_path)}
    one, same, other = (learned(impala.main(impala.Args(**flags, seed=seed))) for seed in (1, 1, 2))
    assert one == same and one["train/value_loss"] != other["train/value_loss"]
    assert {lag for _, lag in one["train/policy_lag"]} == {0}
    assert max(abs(kl) for _, kl in one["train/approx_kl"]) < 1e-6  # on-policy


@contextmanager
def started(tmp_path, *command):
    """A run in a session of its own, as a terminal starts it, without an end; killed at the end at the latest."""
    flags = ["--total-timesteps", 10**8, "--num-envs", 4, "--checkpoint-interval", 1000, "--runs-dir", tmp_path]
    flags += ["--updates-per-collect", 1]
    process = subprocess.Popen(
        [sys.executable, *map(str, [*command, *flags])],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(condition, seconds: float = 60):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
    return value


def descendants(pid: int) -> list[int]:
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *descendants(int(child))]
    return found


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def actors_of(process, number: int, runs_dir: Path) -> list[int]:
    """The actors of a run that has learned something, and the resource tracker of multiprocessing behind them."""
    wait_for(lambda: list(runs_dir.glob("*/checkpoint.pt")) or process.poll() is not None)
    children = descendants(process.pid)
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children]
    actors = [pid for pid, command in zip(children, commands) if "spawn_main" in command]
    assert len(actors) == number, process.communicate()
    return actors + [pid for pid in children if pid not in actors]


def no_memory_of(*pids) -> bool:
    return not [file for file in Path("/dev/shm").iterdir() if any(str(pid) in file.name for pid in pids)]


@LINUX
def test_a_killed_actor_ends_the_run_with_a_checkpoint(tmp_path):
    with started(tmp_path, "-m", "cleanmarl.impala", "--num-actors", 1) as process:
        actors = actors_of(process, 1, tmp_path)
        os.kill(actors[0], signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    (folder,) = tmp_path.iterdir()
    step = load_checkpoint(folder)["step"]
    assert process.returncode == 1 and step > 0 and not (folder / "done.json").exists()
    assert f"saved step {step:,} in {folder}" in err
    assert err.endswith(f"RuntimeError: actor 0 (pid {actors[0]}) died (exit code -9)\n")
    wait_for(lambda: all(map(gone, actors)), 10)


@LINUX
def test_a_killed_learner_leaves_no_actor(tmp_path):
    with started(tmp_path, "-m", "cleanmarl.impala", "--num-actors", 1) as process:
        actors = actors_of(process, 1, tmp_path)
        assert not any(map(gone, actors))
        process.kill()
        wait_for(lambda: all(map(gone, actors)), 20)
        _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL and not err and no_memory_of(process.pid, *actors)


LEARNER = """
import os, signal, sys, time
from cleanmarl import impala

if __name__ == "__main__":
    args = impala.Args(num_actors=1, num_envs=4, unroll_length=16)
    envs = impala.make_envs(args, 1)
    actors = impala.Actors(args, impala.Agent(envs, args), envs, 0)
    actors.take(0)
    print(actors.processes[0].pid, flush=True)
    actors.parameters.version[0] = -1  # it dies while it writes parameters,
    time.sleep(0.5)  # which the actor begins to read
    os.kill(os.getpid(), signal.SIGKILL)
"""


@LINUX
def test_a_learner_killed_while_it_writes_leaves_no_actor(tmp_path):
    script = tmp_path / "learner.py"
    script.write_text(LEARNER)
    environment = os.environ | {"PYTHONPATH": str(Path(impala.__file__).parents[1])}
    with subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True) as process:
        actor = int(process.stdout.readline())
        assert process.wait(timeout=60) == -signal.SIGKILL
        try:
            wait_for(lambda: gone(actor), 10)
        finally:
            if not gone(actor):
                os.kill(actor, signal.SIGKILL)


@LINUX
def test_ctrl_c_leaves_nothing_and_the_run_goes_on_later(tmp_path, monkeypatch):
    with started(tmp_path, impala.__file__, "--num-actors", 1) as process:
        actors = actors_of(process, 1, tmp_path)
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the actors too
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130 and not err
    wait_for(lambda: all(map(gone, actors)), 10)
    assert no_memory_of(process.pid, *actors)
    (folder,) = tmp_path.iterdir()
    step = load_checkpoint(folder)["step"]
    assert f"stopped at step {step:,}; continue with --resume {folder}" in out
    adam = load_checkpoint(folder)["modules"]["optimizer"]["state"][0]["step"]

    flags = ["--resume", str(folder), "--total-timesteps", str(step + 160), "--eval-episodes", "0"]
    monkeypatch.setattr(sys, "argv", ["impala.py", *flags])
    launch(impala.main, impala.Args)
    assert load_checkpoint(folder)["step"] == step + 160 and (folder / "done.json").exists()
    assert load_checkpoint(folder)["modules"]["optimizer"]["state"][0]["step"] == adam + 2


@LINUX
def test_actors_that_cannot_start_end_the_others():
    """Too many files: an error, and no run that hangs with its signals blocked."""
    started = []

    class Actors(impala.Actors):
        def close(self):
            started.extend(self.processes)
            super().close()

    args = impala.Args(**SMALL | {"num_actors": 9})
    envs = impala.make_envs(args, 1)
    agent = impala.Agent(envs, args)
    resource_tracker.ensure_running()
    used = {int(fd.name) for fd in Path("/proc/self/fd").iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, ([fd for fd in range(1000) if fd not in used][14], hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            Actors(args, agent, envs, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert started and not multiprocessing.active_children() and not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_failing_actor_shows_its_traceback(tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)actor 0 failed:\nTraceback.*the clock is broken"):
        impala.main(impala.Args(**SMALL | {"num_actors": 1, "env_id": BROKEN, "runs_dir": str(tmp_path)}))
    assert not multiprocessing.active_children()
    (folder,) = tmp_path.iterdir()
    assert load_checkpoint(folder)["step"] == 0
