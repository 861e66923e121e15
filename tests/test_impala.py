"""impala.py against independent definitions of V-trace and loss; its processes: versions, faults, copies of it."""

import collections
import dataclasses
import importlib
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace

from cleanmarl import enjoy, impala, impala_replay
from cleanmarl.actors import Actors, Parameters, RayActor, slot_dtype
from cleanmarl.cli import RunError, launch
from cleanmarl.envs import workers
from cleanmarl.evaluate import evaluate
from cleanmarl.layers import RunningMeanStd
from cleanmarl.run import load_checkpoint

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optional import need
from test_ppo import Clock
from toys import gone, scalars, wait_for

SMALL = {"num_actors": 0, "total_timesteps": 128, "num_envs": 4, "unroll_length": 16, "eval_episodes": 0}
SMALL |= {"updates_per_collect": 1}
LINUX = pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")


class Broken(Clock):
    """Works where it is looked at, fails when it is played."""

    def step(self, action):
        raise RuntimeError("the clock is broken")


class PaysInArrays(Clock):
    """Against Gymnasium's interface."""

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, np.array([reward]), *rest


gym.register("Broken-v0", Broken)
gym.register("PaysInArrays-v0", PaysInArrays)
BROKEN = "test_impala:Broken-v0"  # actors are other processes, which import this module to find it


def learned(folder: Path) -> dict[str, list[tuple[int, float]]]:
    return {tag: points for tag, points in scalars(folder).items() if not tag.startswith("time/")}


def new_unrolls(envs, args):
    return np.zeros(args.num_envs, impala.unroll_dtype(envs, args))


def start(args, agent, envs, step=0):
    return Actors(impala.Player, args, agent, impala.unroll_dtype(envs, args), step)


def play(args, seed=0, sharp=100):
    """An agent whose policy is far from uniform, its player, and the unrolls that it played."""
    torch.manual_seed(seed)
    player = impala.Player(args, 0, 0)
    agent = impala.Agent(player.envs, args)
    with torch.no_grad():
        agent.actor[-1].weight *= sharp
    unrolls = new_unrolls(player.envs, args)
    player.play(agent, unrolls)
    return agent, player, unrolls


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


def numbers(gamma, lambda_, rho_clip, c_clip, pg_rho_clip):
    return {"gamma": gamma, "lambda_": lambda_, "rho_clip": rho_clip, "c_clip": c_clip, "pg_rho_clip": pg_rho_clip}


def random_steps(T, rng, p_done=0.0, n=3):
    """log_rho, reward, value, next_value, done: (T, n); half of the ends are truncations, whose value is not 0."""
    value, final_value = rng.normal(size=(T + 1, n)), rng.normal(size=(T, n))
    done, truncated = rng.random((T, n)) < p_done, rng.random((T, n)) < 0.5
    next_value = np.where(done, np.where(truncated, final_value, 0), value[1:])
    return rng.normal(size=(T, n)), rng.normal(size=(T, n)), value[:-1], next_value, done


# proves impala-2, impala-3, impala-4
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
    targets, advantages = impala.vtrace(*(x.copy() for x in steps), **numbers(*discounts, *clips))
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
    ours = impala.vtrace(log_rho, reward, value, next_value * ~terminated, done, **numbers(0.97, 1, 1.5, 0.9, 1.5))
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
    targets, _ = impala.vtrace(log_rho, reward, value[:-1], value[1:], never, **numbers(discount, 1, 1, 1, 1))
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
    ours = impala.vtrace(log_rho, reward, value, values[1:], done, **numbers(0.98, 0.9, 1.2, 0.8, 1.1))
    np.testing.assert_allclose(ours[0], result, atol=1e-12)
    np.testing.assert_allclose(ours[1], advantage, atol=1e-12)


@pytest.mark.parametrize("c_clip", [1.0, 2.0])
def test_on_policy_it_is_the_n_step_return(c_clip):
    _, reward, value, next_value, done = random_steps(25, np.random.default_rng(5), 0.1)
    steps = np.zeros((25, 3)), reward, value, next_value, done
    targets, advantages = impala.vtrace(*steps, **numbers(0.9, 1, 2.0, c_clip, 1.0))
    expected, following = np.zeros((25, 3)), next_value[-1]
    for t in reversed(range(25)):
        following = reward[t] + 0.9 * np.where(done[t], next_value[t], following)
        expected[t] = following
    np.testing.assert_allclose(targets, expected, atol=1e-12)
    np.testing.assert_allclose(advantages, expected - value, atol=1e-12)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("clips", [(1.0, 1.0, 1.0), (3.7, 1.1, 2.3)])
def test_a_ratio_without_bound_is_a_clipped_one(clips):
    """Actions that the policy that acted all but excluded: log ratios beyond what exp can hold."""
    rng = np.random.default_rng(0)
    log_rho, reward, value, next_value = (rng.normal(size=(9, 2)).astype(np.float32) for _ in range(4))
    log_rho[[2, 5]], log_rho[7] = 1000, -1000
    few = np.where(log_rho == 1000, np.float32(2), log_rho)
    done = np.zeros((9, 2), bool)
    ours = impala.vtrace(log_rho, reward, value, next_value, done, **numbers(0.9, 0.9, *clips))
    expected = impala.vtrace(few, reward, value, next_value, done, **numbers(0.9, 0.9, *clips))
    for x, y in zip(ours, expected):
        assert x.dtype == np.float32
        np.testing.assert_array_equal(x, y)


# ----------------------------------------------------------------------------------------------------------- the unroll


def test_unrolls_go_on_where_the_last_one_stopped():
    """Across ends too: no dummy row, the observation after an unroll begins the next, the statistics are the env's."""
    args = impala.Args(**SMALL | {"unroll_length": 40})
    agent, player, first = play(args)
    second = new_unrolls(player.envs, args)
    player.play(agent, second)
    np.testing.assert_array_equal(first["obs"][:, -1], second["obs"][:, 0])
    done = np.concatenate([u["termination"] | u["truncation"] for u in (first, second)], 1)
    ends = [np.flatnonzero(row) for row in done]
    lengths = np.concatenate([np.diff(e, prepend=-1) for e in ends])
    reported = np.concatenate([u["ep_length"] for u in (first, second)], 1)
    assert (reported[~done] == 0).all() and sorted(reported[done]) == sorted(lengths) and len(lengths) > 4
    returns = np.concatenate([u["ep_return"] for u in (first, second)], 1)
    np.testing.assert_array_equal(returns[done], reported[done])  # a reward of 1 a step

    env = gym.make("CartPole-v1").unwrapped  # the steps are those of the environment
    for n, t in np.argwhere(~done[:, :40]):
        env.reset()
        env.state = first["obs"][n, t].astype(np.float64)
        np.testing.assert_allclose(env.step(int(first["action"][n, t]))[0], first["obs"][n, t + 1], atol=1e-5)


PLAYED = dict.fromkeys(("impala", "impala_replay"), "CartPole-v1")
PLAYED |= {"impala_continuous_action": "Pendulum-v1", "impala_atari_envpool": "Breakout-v5"}


@pytest.mark.parametrize("name, env_id", PLAYED.items())
def test_actors_and_resumed_runs_play_episodes_of_their_own(name, env_id):
    """Those of another index, of a run that goes on from another step, and of another seed begin and draw otherwise."""
    need(*["envpool"] * ("envpool" in name))
    script, seen = importlib.import_module(f"cleanmarl.{name}"), []
    for seed, index, step in ((1, 0, 0), (1, 1, 0), (1, 0, 64), (2, 0, 0), (1, 0, 0)):
        player = script.Player(script.Args(env_id=env_id, num_envs=2, seed=seed), index, step)
        seen.append((player.obs.tobytes(), player.rng.random()))
    starts, draws = (set(x[:-1]) for x in zip(*seen))
    assert seen[0] == seen[-1] and len(starts) == len(draws) == 4


@pytest.mark.parametrize("name, env_id", PLAYED.items())
def test_a_run_tells_its_actors_at_which_step_it_goes_on(name, env_id, tmp_path, monkeypatch):
    """So that a resumed run plays other episodes than it has played before."""
    need(*["envpool"] * ("envpool" in name))
    script = importlib.import_module(f"cleanmarl.{name}")
    begun, Player = [], script.Player
    monkeypatch.setattr(script, "Player", lambda args, index, step: begun.append(step) or Player(args, index, step))
    flags = {"num_actors": 0, "num_envs": 2, "unroll_length": 16, "updates_per_collect": 1, "eval_episodes": 0}
    args = script.Args(env_id=env_id, **flags, total_timesteps=64, runs_dir=str(tmp_path))
    folder = script.main(args)
    script.main(dataclasses.replace(args, total_timesteps=128, resume=folder))
    assert begun == [0, 64]


def test_time_limits_are_truncations_with_their_last_observation():
    _, _, unrolls = play(impala.Args(env_id="Clock-v0", **SMALL))
    expected = np.zeros((4, 16), bool)
    expected[:, [4, 9, 14]] = True
    np.testing.assert_array_equal(unrolls["truncation"], expected)
    assert not unrolls["termination"].any()
    assert (unrolls["final_obs"][expected] == 5).all()
    np.testing.assert_array_equal(unrolls["obs"][..., 0], np.tile([*[0, 1, 2, 3, 4] * 3, 0, 1], (4, 1)))


@pytest.mark.parametrize("script", [impala, impala_replay], ids=lambda script: script.__name__)
def test_a_termination_at_the_time_limit_is_no_truncation(script):
    player = script.Player(script.Args(env_id="Bell-v0", num_envs=4, unroll_length=16), 0, 0)
    unrolls = np.zeros(4, script.unroll_dtype(player.envs, player.args))
    player.play(script.Agent(player.envs, player.args), unrolls)
    assert unrolls["termination"].sum() == 12 and not unrolls["truncation"].any()


def test_actions_are_samples_of_the_policy_and_log_probs_are_theirs():
    args = impala.Args(env_id="Clock-v0", num_actors=0, num_envs=8, unroll_length=2000)
    torch.manual_seed(0)
    player = impala.Player(args, 0, 0)
    agent = impala.Agent(player.envs, args)
    with torch.no_grad():
        agent.actor[-1].weight.zero_()
        agent.actor[-1].bias.copy_(torch.tensor([0.0, 1.0]))
    unrolls = new_unrolls(player.envs, args)
    player.play(agent, unrolls)
    action, expected = unrolls["action"], 1 / (1 + np.exp(-1))
    assert abs(action.mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / action.size)
    np.testing.assert_allclose(unrolls["log_prob"], np.log(np.where(action, expected, 1 - expected)), atol=1e-6)


@pytest.mark.parametrize("name", ["impala", "impala_replay", "impala_ray", "impala_atari_envpool"])
def test_a_draw_of_0_takes_no_action_that_the_policy_excludes(name):
    """NumPy's exponential noise is 0 once in ten million float32 numbers; its logarithm would outweigh any logit."""
    need(*["envpool"] * ("envpool" in name))
    script = importlib.import_module(f"cleanmarl.{name}")
    args = script.Args(num_envs=2, unroll_length=3)
    player = script.Player(args, 0, 0)
    agent = script.Agent(player.envs, args)
    head = [layer for layer in agent.actor.modules() if isinstance(layer, torch.nn.Linear)][-1]
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()[0] = -100
    player.rng = SimpleNamespace(
        standard_exponential=lambda shape, dtype: (np.arange(shape[-1]) > 0) * np.ones(shape, dtype)
    )
    unrolls = np.zeros(2, script.unroll_dtype(player.envs, args))
    with warnings.catch_warnings(action="error"):
        player.play(agent, unrolls)
    assert (unrolls["last_action"][:, 1:] if "last_action" in unrolls.dtype.names else unrolls["action"]).all()


# ------------------------------------------------------------------------------------------------------------- the loss


def loss_by_definition(agent, unrolls, args):
    """The loss, a sum over the batch, step by step in float64, from V-trace above; means of its parts, and how much of
    the variance of the targets the values explain."""
    agent, total, parts, all_targets, all_values = agent.double(), 0, np.zeros(3), [], []
    count = unrolls["action"].size
    for unroll in unrolls:
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
        all_targets.extend(targets)
        all_values.extend(v[:-1])
        for t in range(len(action)):
            policy = -log_prob[t] * advantages[t]
            error = 0.5 * (value[t] - targets[t]) ** 2
            entropy = -(log_probs[t].exp() * log_probs[t]).sum()
            total = total + (policy - args.ent_coef * entropy + args.vf_coef * error)
            parts += [x.item() / count for x in (policy, error, entropy)]
    explained = 1 - np.var(np.subtract(all_targets, all_values)) / np.var(all_targets)
    return total, parts, explained


def example_unrolls(seed=0):
    """20 steps of 6 environments by another policy than the agent's, with both kinds of ends."""
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
    unrolls["termination"][[0, 1], [3, 19]] = True
    unrolls["truncation"][[2, 2, 3], [0, 7, 19]] = True
    return args, agent, unrolls


# proves impala-1, impala-5
@pytest.mark.parametrize("seed", range(2))
def test_loss_and_gradient_are_their_definition(seed):
    args, agent, unrolls = example_unrolls(seed)
    loss, stats = impala.impala_loss(agent, unrolls, args)
    gradients = torch.autograd.grad(loss, list(agent.parameters()))
    expected, parts, explained = loss_by_definition(agent, unrolls, args)
    torch.testing.assert_close(loss.double(), expected, atol=1e-3, rtol=1e-5)
    np.testing.assert_allclose([stats[x] for x in ("policy_loss", "value_loss", "entropy")], parts, rtol=1e-4)
    np.testing.assert_allclose(stats["explained_variance"], explained, rtol=1e-3, atol=1e-4)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, list(agent.parameters()))):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-3, rtol=1e-4)
    log_rho = agent.float().actor(torch.from_numpy(unrolls["obs"][:, :-1])).log_softmax(-1)
    log_rho = log_rho.gather(-1, torch.from_numpy(unrolls["action"])[..., None])[..., 0].detach().numpy()
    log_rho = log_rho - unrolls["log_prob"]
    np.testing.assert_allclose(stats["approx_kl"], (np.exp(log_rho) - 1 - log_rho).mean(), rtol=1e-4)
    np.testing.assert_allclose(stats["clipfrac"], (log_rho > np.log(1.5)).mean(), rtol=1e-4)
    assert 0.1 < stats["clipfrac"] < 0.9  # the batch does test clipping
    unrolls["log_prob"] += log_rho - 1e-6  # on-policy but for a rounding
    assert impala.impala_loss(agent, unrolls, dataclasses.replace(args, rho_clip=1.0))[1]["clipfrac"] == 0


# proves impala-1
def test_ratios_are_one_for_the_policy_that_acted():
    args = impala.Args(**SMALL)
    agent, _, unrolls = play(args, sharp=2000)
    _, stats = impala.impala_loss(agent, unrolls, args)
    assert abs(stats["approx_kl"]) < 1e-6 and stats["entropy"] < 0.68  # though the policy is not uniform
    with torch.no_grad():
        agent.actor[-1].bias += torch.tensor([0.0, 1.0])
    assert impala.impala_loss(agent, unrolls, args)[1]["approx_kl"] > 0.01


# proves impala-6
def test_gradients_are_clipped_by_one_norm_over_both_networks():
    args = impala.Args(**SMALL, max_grad_norm=0.01, vf_coef=100.0)
    agent, _, unrolls = play(args)
    before = nn_vector(agent)
    impala.update(agent, torch.optim.SGD(agent.parameters(), lr=1.0), unrolls, args)
    assert (nn_vector(agent) - before).norm().item() == pytest.approx(0.01, rel=1e-3)


# proves impala-8
def test_rmsprop_is_tensorflows():
    """Its rule in float64, unlike torch's: ms <- 0.99 ms + 0.01 g^2 from 1 on, x <- x - lr g / sqrt(ms + eps)."""
    args = impala.Args(optimizer="rmsprop", learning_rate=0.01, optimizer_eps=0.1)
    x, idle = (torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0])) for _ in range(2))
    ours = impala.make_optimizer(torch.nn.ParameterDict({"x": x, "idle": idle}), args)
    expected, mean_square = np.array([1.0, -2.0, 3.0]), np.ones(3)
    for gradient in np.random.default_rng(0).normal(size=(50, 3)) * [0.01, 1, 100]:
        x.grad = torch.tensor(gradient, dtype=torch.float32)
        ours.param_groups[0]["lr"] *= 0.99  # which the loop sets before each batch
        ours.step()
        mean_square = 0.99 * mean_square + 0.01 * gradient**2
        expected -= ours.param_groups[0]["lr"] * gradient / np.sqrt(mean_square + 0.1)
    np.testing.assert_allclose(x.detach(), expected, rtol=1e-4)
    assert idle.tolist() == [1, -2, 3]  # no gradient, no step
    other = impala.make_optimizer(torch.nn.ParameterDict({"x": x, "idle": idle}), args)
    other.load_state_dict(ours.state_dict())
    torch.testing.assert_close(other.state[x]["mean_square"], torch.tensor(mean_square, dtype=torch.float32))


# proves impala-8
def test_epsilon_is_adams():
    args = impala.Args(optimizer_eps=0.5, learning_rate=0.1)
    agent, _, _ = play(impala.Args(**SMALL))
    before = nn_vector(agent)
    for p in agent.parameters():
        p.grad = torch.full_like(p, -0.5)
    impala.make_optimizer(agent, args).step()  # the first step of Adam: lr g / (|g| + eps)
    torch.testing.assert_close(nn_vector(agent) - before, torch.full_like(before, 0.05), atol=1e-6, rtol=0)


@pytest.mark.parametrize("batch_size", [2, 4, 10, 12])
def test_batches_are_parts_of_slots_or_several_of_them(batch_size, tmp_path, monkeypatch):
    """Every unroll is learned from once, in its order; what is left at the end of the run is not."""
    batches, update = [], impala.update
    monkeypatch.setattr(impala, "update", lambda *args: batches.append(args[2]) or update(*args))
    args = impala.Args(**SMALL | {"total_timesteps": 320}, batch_size=batch_size, runs_dir=str(tmp_path))  # 5 slots
    folder = impala.main(args)
    assert [len(batch) for batch in batches] == [batch_size] * (20 // batch_size)
    player, seen = impala.Player(args, 0, 0), np.concatenate(batches)
    assert np.array_equal(seen["obs"][:4, 0], player.obs)
    for first, second in zip(seen[:-4], seen[4:]):  # of the same environment
        np.testing.assert_array_equal(first["obs"][-1], second["obs"][0])
    steps = [step for step, _ in learned(folder)["train/policy_loss"]]
    assert steps == [64, 128, 192, 256, 320][-(-batch_size // 4) - 1 :]  # of the latest batch where none was full
    assert learned(folder)["train/policy_lag"][-1][0] == 320


def nn_vector(agent):
    return torch.nn.utils.parameters_to_vector(agent.parameters()).detach().clone()


def test_every_batch_is_learned_from_as_it_comes():
    args = impala.Args(**SMALL | {"updates_per_collect": 2})
    agent, _, unrolls = play(args)
    twin = impala.Agent(impala.make_envs(args, 1), args)
    twin.load_state_dict(agent.state_dict())
    ours, theirs = (torch.optim.Adam(x.parameters(), 1e-3) for x in (agent, twin))
    metrics, losses = impala.update(agent, ours, unrolls, args), []
    for _ in range(2):
        theirs.zero_grad()
        loss, stats = impala.impala_loss(twin, unrolls, args)
        losses.append(stats["value_loss"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), args.max_grad_norm)
        theirs.step()
    torch.testing.assert_close(nn_vector(agent), nn_vector(twin), atol=0, rtol=0)
    torch.testing.assert_close(metrics["train/value_loss"], torch.stack(losses).mean())


# -------------------------------------------------------------------------------------------------------------- the run


# proves impala-7
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


def test_enjoy_plays_the_run(tmp_path):
    folder = impala.main(impala.Args(**SMALL, runs_dir=str(tmp_path)))
    assert enjoy.main(enjoy.Args(folder, episodes=2))["eval/ep_length"] > 0


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--env-id CartPol-v1", "did you mean CartPole-v1"),
        ("--env-id Pendulum-v1", "has Box(-2.0, 2.0, (1,), float32); try a ..._continuous_action.py"),
        ("--env-id Blackjack-v1", "needs Box or Discrete observations"),
        ("--num-actors -1", "--num-actors must be at least 0, not -1"),
        ("--rho-clip 0.9", "--rho-clip 0.9 must be at least --c-clip 1.0"),
        ("--total-timesteps 319", "--total-timesteps 319 is less than the 320 steps of one batch"),
        ("--total-timesteps 639 --batch-size 17", "--total-timesteps 639 is less than the 640 steps of one batch"),
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
    agent, version = Constant(), 0
    parameters = Parameters(memory, agent)
    while True:
        version += 1
        agent.weight.data.fill_(version)
        parameters.write(version)
        time.sleep(0.001)


def test_parameters_are_read_whole():
    """Another process writes all the time; every read is of one version, the one it names."""
    context, agent, seen, torn = multiprocessing.get_context("spawn"), Constant(), set(), 0
    memory = context.RawArray("b", Parameters.size(agent))
    writer = context.Process(target=write_for_ever, args=(memory,), daemon=True)
    writer.start()
    parameters = Parameters(memory, agent)

    def enough():
        nonlocal torn
        version = parameters.read()
        assert (agent.weight == version).all()
        seen.add(version)
        unguarded = parameters.pairs[0][1].clone()
        torn += bool(unguarded.min() != unguarded.max())
        return len(seen) > 20 and torn > 0  # torn: the guard had something to do

    wait_for(enough)
    writer.kill()
    writer.join()


class Normalised(impala.Agent):
    """What somebody may make of the agent: running statistics of two kinds, one with a count of integers."""

    def __init__(self, envs, args):
        super().__init__(envs, args)
        self.stats = RunningMeanStd(1, 4)
        self.actor = torch.nn.Sequential(self.stats, *self.actor)
        self.critic = torch.nn.Sequential(torch.nn.BatchNorm1d(4), *self.critic).eval()
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))


def test_buffers_and_every_type_of_number_reach_the_readers():
    args = impala.Args(**SMALL)
    envs = impala.make_envs(args, 1)
    agent, reader = Normalised(envs, args), Normalised(envs, args)
    with torch.no_grad():
        agent.stats.update(torch.randn(50, 1, 4) * 3 + 1)
        agent.critic[0].train()(torch.randn(9, 4))
        agent.scale *= np.pi
    memory = bytearray(Parameters.size(agent))
    Parameters(memory, agent).write(7)
    assert Parameters(memory, reader).read() == 7
    for (name, x), y in zip(agent.state_dict().items(), reader.state_dict().values()):
        assert torch.equal(x, y), name
    assert agent.critic[0].num_batches_tracked == 1 and (reader.stats.mean != 0).all()


@pytest.mark.parametrize("agent_class", [impala.Agent, Normalised])
def test_the_log_probs_are_those_of_the_version_that_acted(agent_class):
    """A learner that changes its policy much and often: every slot is explained by its own version, and by no other."""
    args = impala.Args(**SMALL | {"num_actors": 1})
    torch.manual_seed(0)
    envs = impala.make_envs(args, 1)
    agent = agent_class(envs, args)
    published, lags = [], set()
    with start(args, agent, envs) as actors:
        for version in range(30):
            published.append({name: x.clone() for name, x in agent.state_dict().items()})
            slot = actors.take(version)
            twin = agent_class(envs, args)
            twin.load_state_dict(published[int(slot["version"])])
            stats = impala.impala_loss(twin, slot["unrolls"], args)[1]
            assert slot["actor"] == 0 and abs(stats["approx_kl"]) < 1e-6
            lags.add(version - int(slot["version"]))
            with torch.no_grad():
                agent.actor[-1].bias.copy_(torch.tensor([0.0, (version + 1) % 7 - 3.0]))
            if agent_class is Normalised:
                agent.stats.update(torch.from_numpy(slot["unrolls"]["obs"].reshape(-1, 1, 4)) * version)
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


def descendants(pid: int) -> list[int]:
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *descendants(int(child))]
    return found


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
    lines = err.splitlines()  # and no traceback
    assert lines[-1] == f"impala: actor 0 (pid {actors[0]}) died (signal 9, Killed)" and len(lines) == 2
    wait_for(lambda: all(map(gone, actors)), 60)


class Forking(impala.Player):
    """Its actor dies of SIGKILL, and what it has forked holds the actor's end of the pipe."""

    def play(self, agent, unrolls):
        if os.fork():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(40)
        os._exit(0)


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_actor_is_dead_although_what_it_has_forked_lives_on(deterministic, monkeypatch):
    monkeypatch.setattr(workers, "SILENCE", 0.5)
    monkeypatch.setattr(workers, "look_after", lambda label, pid, seconds: seconds < 30 or pytest.fail("unnoticed"))
    args = impala.Args(**SMALL | {"num_actors": 1, "deterministic": deterministic})
    envs = impala.make_envs(args, 1)
    agent = impala.Agent(envs, args)
    with (
        pytest.raises(RunError, match=r"^actor 0 \(pid \d+\) died \(signal 9, Killed\)$"),
        Actors(Forking, args, agent, impala.unroll_dtype(envs, args), 0) as actors,
    ):
        actors.take(0)


@LINUX
def test_a_killed_learner_leaves_no_actor(tmp_path):
    with started(tmp_path, "-m", "cleanmarl.impala", "--num-actors", 1) as process:
        actors = actors_of(process, 1, tmp_path)
        assert not any(map(gone, actors))
        process.kill()
        wait_for(lambda: all(map(gone, actors)), 60)
        _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL and not err and no_memory_of(process.pid, *actors)


LEARNER = """
import os, signal, sys, time
from cleanmarl import impala
from cleanmarl.actors import Actors

if __name__ == "__main__":
    args = impala.Args(num_actors=1, num_envs=4, unroll_length=16)
    envs = impala.make_envs(args, 1)
    actors = Actors(impala.Player, args, impala.Agent(envs, args), impala.unroll_dtype(envs, args), 0)
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
            wait_for(lambda: gone(actor), 60)
        finally:
            if not gone(actor):
                os.kill(actor, signal.SIGKILL)


def test_a_file_without_a_main_guard_says_what_it_lacks(tmp_path):
    """Its actors import it again: they must not begin runs of their own."""
    script = tmp_path / "sweep.py"
    script.write_text("from cleanmarl.impala import Args, main\nmain(Args(total_timesteps=640, eval_episodes=0))\n")
    environment = os.environ | {"PYTHONPATH": str(Path(impala.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and len(list((tmp_path / "runs").iterdir())) == 1
    assert 'put its call of main under if __name__ == "__main__":\n' in done.stderr
    assert "freeze_support" not in done.stderr and done.stderr.splitlines()[-1].endswith("died (exit code 1)")


@LINUX
def test_ctrl_c_leaves_nothing_and_the_run_goes_on_later(tmp_path, monkeypatch):
    with started(tmp_path, impala.__file__, "--num-actors", 1) as process:
        actors = actors_of(process, 1, tmp_path)
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the actors too
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130 and not err
    wait_for(lambda: all(map(gone, actors)), 60)
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

    class Few(Actors):
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
            Few(impala.Player, args, agent, impala.unroll_dtype(envs, args), 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert started and not multiprocessing.active_children() and not signal.pthread_sigmask(signal.SIG_BLOCK, [])


class Hanging(impala.Player):
    def play(self, agent, unrolls):
        time.sleep(600)


@LINUX
def test_who_interrupts_the_end_leaves_no_actor(monkeypatch):
    """Ctrl-C for the third time, while an actor that hangs has its two seconds; at its exit Python waits for all."""
    args = impala.Args(**SMALL | {"num_actors": 2})
    envs = impala.make_envs(args, 1)
    actors = Actors(Hanging, args, impala.Agent(envs, args), impala.unroll_dtype(envs, args), 0)
    first, join = actors.processes[0], actors.processes[0].join

    def interrupted(timeout=None):
        monkeypatch.setattr(first, "join", join)
        raise KeyboardInterrupt

    monkeypatch.setattr(first, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        actors.close()
    assert not multiprocessing.active_children()


def test_a_failing_actor_shows_its_traceback(tmp_path):
    with pytest.raises(RunError, match=r"(?s)actor 0 failed:\nTraceback.*the clock is broken"):
        impala.main(impala.Args(**SMALL | {"num_actors": 1, "env_id": BROKEN, "runs_dir": str(tmp_path)}))
    assert not multiprocessing.active_children()
    (folder,) = tmp_path.iterdir()
    assert load_checkpoint(folder)["step"] == 0


@pytest.mark.parametrize("num_actors", [0, 1])
def test_a_mistake_of_an_environment_is_the_same_line_by_actors(num_actors, tmp_path, capsys, monkeypatch):
    flags = ["--num-actors", num_actors, "--env-id", "test_impala:PaysInArrays-v0", "--runs-dir", tmp_path]
    flags += ["--total-timesteps", 128, "--num-envs", 4, "--unroll-length", 16, "--eval-episodes", 0]
    monkeypatch.setattr(sys, "argv", ["impala.py", *map(str, flags)])
    with pytest.raises(SystemExit) as end:
        launch(impala.main, impala.Args)
    line = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and "the reward of step() must be a number, not array(" in line
    assert line.startswith("impala: ") and not multiprocessing.active_children()


@pytest.mark.parametrize("edit", ["weight_norm", "wider", "float64"])
def test_an_agent_that_is_not_the_learners_does_not_act(edit):
    """Actors make the agent anew: what `main` of a copy changes of it they do not know, and would act with garbage."""
    args = impala.Args(**SMALL | {"num_actors": 1})
    envs = impala.make_envs(args, 1)
    agent = impala.Agent(envs, args)
    if edit == "weight_norm":
        torch.nn.utils.parametrizations.weight_norm(agent.actor[2])
    elif edit == "wider":
        agent.critic = torch.nn.Sequential(torch.nn.Linear(4, 99), torch.nn.Linear(99, 1))
    else:
        agent.double()
    dtype, why = impala.unroll_dtype(envs, args), "its agent is not the learner's: what main changes"
    with (
        Actors(impala.Player, args, agent, dtype, 0) as actors,
        pytest.raises(RunError, match=f"actor 0 failed:\n{why}"),
    ):
        actors.take(0)
    remote = RayActor((impala.Player, impala.Agent), args, 0, 0, slot_dtype(args, dtype))
    with pytest.raises(RunError, match=why):
        remote.play((0, [x.detach().numpy() for x in agent.parameters()]))
    own = [x.detach().numpy() for x in impala.Agent(envs, args).parameters()]
    assert remote.play((3, own))["version"] == 3


@pytest.mark.parametrize("activation", ["GELU", "ReLU"])
def test_a_copy_outside_the_package_trains_resumes_and_is_played(activation, tmp_path):
    """Actors are other processes: they act with the network of the copy, also where NumPy knows no such layer."""
    text = Path(impala.__file__).read_text()
    script = tmp_path / "my_impala.py"
    script.write_text(text.replace("nn.Tanh()", f"nn.{activation}()"))
    flags = ["--total-timesteps", 640, "--num-envs", 4, "--unroll-length", 16, "--eval-episodes", 2]
    line = [sys.executable, script, *flags, "--updates-per-collect", 1, "--runs-dir", tmp_path / "runs"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(impala.__file__).parents[1])}

    def run(*more):
        done = subprocess.run([*map(str, line), *map(str, more)], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return Path(re.search("run folder: (\\S+)", done.stdout)[1])

    folder = run("--num-actors", 1, "--deterministic")
    points = learned(folder)
    assert abs(points["train/approx_kl"][0][1]) < 1e-6 and points["train/policy_lag"][-1][1] == 1
    assert run("--resume", folder, "--num-actors", 1, "--deterministic", "--total-timesteps", 1280) == folder
    assert load_checkpoint(folder)["step"] == 1280
    assert enjoy.main(enjoy.Args(folder, episodes=1))["eval/ep_length"] > 0


def without_processes(num_actors: int) -> tuple[Actors, list]:
    """Actors of whom there are the pipes alone, and the other ends of these."""
    actors, pipes = Actors.__new__(Actors), [multiprocessing.Pipe() for _ in range(num_actors)]
    actors.processes, actors.deterministic, actors.waited = [None] * num_actors, False, 0.0
    actors.ready, actors.taken = collections.deque(), collections.deque()
    actors.heard, actors.connections = [[time.monotonic()] * 2 for _ in pipes], [ours for ours, _ in pipes]
    return actors, [theirs for _, theirs in pipes]


def test_actors_that_are_ready_take_turns():
    """Or a learner that is slower than its actors would hear the first one alone."""
    actors, theirs = without_processes(2)
    for number in range(4):
        theirs[number // 2].send(number)
    assert [actors.next_number() for _ in range(4)] == [0, 2, 1, 3]


def test_the_learner_counts_the_seconds_that_it_waits():
    actors, theirs = without_processes(2)
    threading.Timer(0.3, theirs[1].send, [2]).start()
    assert actors.next_number() == 2 and 0.2 < actors.waited < 30
    theirs[0].send(0)
    before = actors.waited
    assert actors.next_number() == 0 and actors.waited - before < 0.2


def test_deterministic_actors_get_new_parameters_when_all_of_them_wait():
    """Sooner, and it would be chance which version one of them reads."""
    actors, _ = without_processes(2)
    events, actors.deterministic = [], True
    actors.number_of = lambda i: events.append(i) or i
    actors.publish = lambda version: events.append(f"version {version}")
    actors.release = lambda number: number
    assert [actors.take(version) for version in range(3)] == [0, 1, 0]
    assert events == [0, 1, "version 0", 0, 1, "version 2"]


def test_parameters_are_not_read_while_they_are_being_written():
    agent, reader = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    memory = bytearray(Parameters.size(agent))
    writer = Parameters(memory, agent)
    writer.version[0] = -1  # half of them are there
    threading.Timer(0.2, writer.write, [5]).start()
    assert Parameters(memory, reader).read() == 5 and torch.equal(agent.weight, reader.weight)


class Drawing(impala.Player):
    """What it plays is a number from the generator of all, as an environment may draw."""

    def __init__(self, args, index, step):
        super().__init__(args, index, step)
        self.number = np.random.random()  # noqa: NPY002

    def play(self, agent, unrolls):
        unrolls["reward"] = self.number


def test_what_draws_from_the_generators_of_all_differs_between_actors():
    args = impala.Args(**SMALL | {"num_actors": 2, "deterministic": True})
    envs = impala.make_envs(args, 1)
    agent, dtype = impala.Agent(envs, args), impala.unroll_dtype(envs, args)
    with Actors(Drawing, args, agent, dtype, 0) as actors:
        one, other = (actors.take(0)["unrolls"]["reward"].max() for _ in range(2))
    parameters, drawn = [x.detach().numpy() for x in agent.parameters()], set()
    for index, step in ((0, 0), (1, 0), (0, 64)):  # those of Ray
        actor = RayActor((Drawing, impala.Agent), args, index, step, slot_dtype(args, dtype))
        drawn.add(actor.play((0, parameters))["unrolls"]["reward"].max())
    assert one != other and {one, other} < drawn and len(drawn) == 3
