"""ppo.py against independent definitions: GAE, losses, Stable-Baselines3's whole update, and each of its details."""

import dataclasses

from cleanmarl import ppo
from cleanmarl.evaluate import evaluate
from cleanmarl.run import load_checkpoint

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from toys import Quiet, make_rollout

SMALL = {"total_timesteps": 512, "num_envs": 4, "num_steps": 64, "eval_episodes": 0}


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


class Bell(Clock):
    """Terminates when its time is up, too: the step is both."""

    def step(self, action):
        obs, reward, *_ = super().step(action)
        return obs, reward, self.t == 5, False, {}


gym.register("Clock-v0", Clock, max_episode_steps=5)
gym.register("Bell-v0", Bell, max_episode_steps=5)


@pytest.fixture
def collected():
    """Arguments, agent, rollout, next observation and batch: 64 steps of 4 CartPoles by a policy far from uniform."""
    args = ppo.Args(**SMALL)
    torch.manual_seed(0)
    envs = ppo.make_envs(args, 4)
    agent = ppo.Agent(envs, args)
    with torch.no_grad():
        agent.actor[-1].weight *= 100
    rollout = make_rollout(ppo, args, envs)
    obs = ppo.collect(agent, envs, envs.reset(seed=1)[0], rollout, args, Quiet()).copy()
    return args, agent, rollout, obs, ppo.estimate(agent, rollout, obs, args)


def gae_by_definition(reward, value, next_value, done, gamma, gae_lambda):
    """The double sum of equation 16 in float64, for (T,) arrays."""
    values = np.append(value, next_value).astype(np.float64)
    T = len(reward)
    delta = [reward[t] + gamma * values[t + 1] * (not done[t]) - values[t] for t in range(T)]
    advantage = np.zeros(T)
    for t in range(T):
        for k in range(t, T):
            if done[t:k].any():
                break
            advantage[t] += (gamma * gae_lambda) ** (k - t) * delta[k]
    return advantage


# proves core-5
@given(st.integers(1, 20), st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.5), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_gae_is_its_definition(T, gamma, gae_lambda, p_done, seed):
    rng = np.random.default_rng(seed)
    reward, value, next_value = rng.normal(size=(T, 3)), rng.normal(size=(T, 3)), rng.normal(size=3)
    done = rng.random((T, 3)) < p_done
    ours = ppo.gae(reward, value, next_value, done, gamma, gae_lambda)
    for n in range(3):
        theirs = gae_by_definition(reward[:, n], value[:, n], next_value[n], done[:, n], gamma, gae_lambda)
        np.testing.assert_allclose(ours[:, n], theirs, atol=1e-10)


def test_gae_is_torchrls():
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    rng = np.random.default_rng(0)
    reward, value, next_value = rng.normal(size=(50, 4)), rng.normal(size=(50, 4)), rng.normal(size=4)
    done = rng.random((50, 4)) < 0.1

    def theirs(x):  # (T, N) -> (N, T, 1)
        return torch.from_numpy(x).T[..., None]

    following = np.concatenate([value[1:], next_value[None]])
    advantage, _ = functional.generalized_advantage_estimate(
        0.97, 0.9, theirs(value), theirs(following), theirs(reward), theirs(done), theirs(done)
    )
    ours = ppo.gae(reward, value, next_value, done, 0.97, 0.9)
    np.testing.assert_allclose(ours, advantage.squeeze(-1).T.numpy(), atol=1e-5)  # its decay is float32


def test_gae_of_a_hand_worked_example():
    # gamma = lambda = 0.5; the second step ends the episode: A2 = 1 + 0.5 * 4 - 2 = 1, A1 = 1 - 3, A0 = 1 + 1.5 - 1
    advantage = ppo.gae(np.ones(3), np.array([1.0, 3.0, 2.0]), np.array(4.0), np.array([False, True, False]), 0.5, 0.5)
    np.testing.assert_allclose(advantage, [1.5 + 0.25 * -2, -2, 1])


# proves core-5
def test_returns_are_advantages_plus_values(collected):
    args, agent, rollout, obs, batch = collected
    with torch.no_grad():
        value, next_value = (
            agent.critic(torch.from_numpy(rollout.obs))[..., 0],
            agent.critic(torch.from_numpy(obs))[:, 0],
        )
    torch.testing.assert_close(batch.value, value.flatten())
    advantage, return_ = batch.advantage.reshape(64, 4), batch.return_.reshape(64, 4)
    for n in range(4):
        series = rollout.reward[:, n], value[:, n].numpy(), next_value[n].item(), rollout.done[:, n]
        expected = gae_by_definition(*series, args.gamma, args.gae_lambda)
        np.testing.assert_allclose(advantage[:, n], expected, atol=1e-4)
        np.testing.assert_allclose(return_[:, n], expected + value[:, n].numpy(), atol=1e-4)


# proves core-1
def test_rollouts_are_segments_of_fixed_length_that_episodes_cross(collected):
    args, agent, rollout, _, _ = collected
    assert rollout.obs.shape == (64, 4, 4) and rollout.done.any(0).all()
    envs = ppo.make_envs(args, 4)
    first, second, quiet = make_rollout(ppo, args, envs), make_rollout(ppo, args, envs), Quiet()
    between = ppo.collect(agent, envs, envs.reset(seed=1)[0], first, args, quiet).copy()
    ppo.collect(agent, envs, between, second, args, quiet)
    np.testing.assert_array_equal(second.obs[0], between)
    # Every reward is 1, so lengths of finished episodes are the gaps between ends, across the border too.
    done = np.concatenate([first.done, second.done])
    ends = [np.flatnonzero(done[:, n]) for n in range(4)]
    assert sorted(quiet.returns) == sorted(np.concatenate([np.diff(e, prepend=-1) for e in ends]).tolist())


# proves core-1
def test_episodes_go_on_from_one_rollout_to_the_next(tmp_path):
    sizes = {"num_envs": 3, "num_steps": 4, "num_minibatches": 1, "total_timesteps": 120, "eval_episodes": 0}
    folder = ppo.main(ppo.Args(env_id="Clock-v0", **sizes, runs_dir=str(tmp_path)))
    events = EventAccumulator(str(folder)).Reload()
    # 40 steps in each of 3 environments are 8 episodes of 5 steps, though no rollout holds a whole one.
    assert events.Scalars("rollout/num_episodes")[-1].value == 24
    assert {point.value for point in events.Scalars("rollout/ep_length")} == {5}


# proves core-2
def test_initial_weights_are_orthogonal_and_biases_zero():
    envs = ppo.make_envs(ppo.Args(), 1)
    agent = ppo.Agent(envs, ppo.Args())
    for network, last in ((agent.actor, 0.01), (agent.critic, 1.0)):
        for layer, gain in zip(network[::2], (np.sqrt(2), np.sqrt(2), last)):
            w = layer.weight.detach().double()
            gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
            torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)).double(), atol=1e-5, rtol=1e-5)
            assert (layer.bias == 0).all()


# proves core-13
def test_policy_and_value_share_nothing():
    envs = ppo.make_envs(ppo.Args(), 1)
    agent = ppo.Agent(envs, ppo.Args())
    shapes = [(64, 4), (64,), (64, 64), (64,)]
    assert [tuple(p.shape) for p in agent.actor.parameters()] == [*shapes, (2, 64), (2,)]
    assert [tuple(p.shape) for p in agent.critic.parameters()] == [*shapes, (1, 64), (1,)]
    for network in (agent.actor, agent.critic):
        assert [type(layer).__name__ for layer in network] == ["Linear", "Tanh", "Linear", "Tanh", "Linear"]
    agent.critic(torch.randn(5, 4)).sum().backward()
    assert all(p.grad is None for p in agent.actor.parameters())


def test_first_ratio_is_one(collected):
    args, agent, _, _, batch = collected
    order = torch.randperm(len(batch.obs))[:64]
    minibatch = ppo.Batch(*(x[order] for x in batch))
    log_prob = agent.actor(minibatch.obs).log_softmax(-1).gather(-1, minibatch.action[:, None]).squeeze(-1)
    torch.testing.assert_close((log_prob - minibatch.log_prob).exp(), torch.ones(64), atol=1e-5, rtol=0)
    _, stats = ppo.ppo_loss(agent, minibatch, 0.2, args)
    assert abs(stats["approx_kl"]) < 1e-6 and stats["clipfrac"] == 0


def test_actions_are_samples_of_the_policy():
    args = ppo.Args(env_id="Clock-v0", num_steps=2000, num_envs=8)
    torch.manual_seed(0)
    envs = ppo.make_envs(args, 8)
    agent = ppo.Agent(envs, args)
    with torch.no_grad():
        agent.actor[-1].weight.zero_()
        agent.actor[-1].bias.copy_(torch.tensor([0.0, 1.0]))
    rollout = make_rollout(ppo, args, envs)
    ppo.collect(agent, envs, envs.reset(seed=1)[0], rollout, args, Quiet())
    expected = 1 / (1 + np.exp(-1))
    assert abs(rollout.action.mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / rollout.action.size)


def random_batch(seed, size=32):
    g = torch.Generator().manual_seed(seed)
    obs, action = torch.randn(size, 4, generator=g), torch.randint(0, 2, (size,), generator=g)
    rest = torch.randn(4, size, generator=g)
    return ppo.Batch(obs, action, -rest[0].abs() - 0.1, rest[1], rest[2], rest[3])


def loss_by_definition(agent, batch, clip_coef, args):
    """The loss of the paper and its details in float64, sample by sample."""
    agent = agent.double()
    batch = ppo.Batch(*(x.double() if x.is_floating_point() else x for x in batch))
    advantage = (batch.advantage - batch.advantage.mean()) / (batch.advantage.std() + 1e-8)
    policy, value, entropy, kl, clipped = 0, 0, 0, 0, 0
    for i in range(len(batch.obs)):
        p = torch.softmax(agent.actor(batch.obs[i]), 0)
        ratio = p[batch.action[i]] / batch.log_prob[i].exp()
        policy -= min(ratio * advantage[i], torch.clip(ratio, 1 - clip_coef, 1 + clip_coef) * advantage[i])
        v = agent.critic(batch.obs[i])[0]
        v_clipped = torch.clip(v, batch.value[i] - clip_coef, batch.value[i] + clip_coef)
        errors = (v - batch.return_[i]) ** 2, (v_clipped - batch.return_[i]) ** 2
        value += 0.5 * (max(errors) if args.clip_vloss else errors[0])
        entropy -= (p * p.log()).sum()
        kl += ratio - 1 - ratio.log()
        clipped += float(abs(ratio - 1) > clip_coef)
    stats = torch.stack([policy, value, entropy, kl, torch.tensor(clipped)]) / len(batch.obs)
    return stats[0] - args.ent_coef * stats[2] + args.vf_coef * stats[1], stats


# proves core-7
# proves core-8
# proves core-9
# proves core-10
# proves core-12
@pytest.mark.parametrize("clip_vloss", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_their_definition(seed, clip_vloss):
    args = ppo.Args(clip_vloss=clip_vloss, ent_coef=0.1, vf_coef=0.7)
    torch.manual_seed(seed)
    agent = ppo.Agent(ppo.make_envs(args, 1), args)
    with torch.no_grad():
        agent.actor[-1].weight *= 100
    batch = random_batch(seed)
    loss, stats = ppo.ppo_loss(agent, batch, 0.2, args)
    gradients = torch.autograd.grad(loss, list(agent.parameters()))
    expected, expected_stats = loss_by_definition(agent, batch, 0.2, args)
    torch.testing.assert_close(
        torch.stack(list(stats.values())).double(), expected_stats.detach(), atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, list(agent.parameters()))):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-4)
    assert 0.2 < stats["clipfrac"] < 1  # the batch does test clipping


def test_update_is_stable_baselines3s(collected):
    """A whole update (4 epochs, full batch) from the same weights and data; SB3's value loss has no max and no 0.5."""
    sb3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.logger import configure

    _, agent, rollout, obs, _ = collected
    args = ppo.Args(**SMALL, clip_vloss=False, num_minibatches=1)
    theirs = sb3.PPO(
        "MlpPolicy",
        sb3.common.env_util.make_vec_env("CartPole-v1", 4),
        n_steps=64,
        batch_size=256,
        n_epochs=4,
        learning_rate=2.5e-4,
        ent_coef=0.01,
        vf_coef=0.25,
        policy_kwargs={"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "optimizer_kwargs": {"eps": 1e-5}},
        device="cpu",
    )
    theirs.set_logger(configure(None, []))
    policy = theirs.policy
    pairs = [
        (agent.actor[0], policy.mlp_extractor.policy_net[0]),
        (agent.actor[2], policy.mlp_extractor.policy_net[2]),
        (agent.actor[4], policy.action_net),
        (agent.critic[0], policy.mlp_extractor.value_net[0]),
        (agent.critic[2], policy.mlp_extractor.value_net[2]),
        (agent.critic[4], policy.value_net),
    ]
    for mine, other in pairs:
        other.load_state_dict(mine.state_dict())

    buffer = theirs.rollout_buffer
    buffer.reset()
    start = np.ones(4, np.float32)
    for t in range(64):
        x = torch.from_numpy(rollout.obs[t])
        with torch.no_grad():
            values, log_prob, _ = policy.evaluate_actions(x, torch.from_numpy(rollout.action[t]))
        buffer.add(rollout.obs[t], rollout.action[t][:, None], rollout.reward[t], start, values, log_prob)
        start = rollout.done[t].astype(np.float32)
    with torch.no_grad():
        buffer.compute_returns_and_advantage(policy.predict_values(torch.from_numpy(obs)), start)
    theirs._current_progress_remaining = 1.0
    theirs.train()

    batch = ppo.estimate(agent, rollout, obs, args)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    before = agent.actor[2].weight.clone()
    ppo.update(agent, optimizer, batch, 0.2, args)
    assert not torch.equal(before, agent.actor[2].weight)
    for mine, other in pairs:
        for a, b in zip(mine.parameters(), other.parameters()):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


# proves core-6
def test_every_sample_is_used_once_per_epoch_in_another_order(collected, monkeypatch):
    args, agent, _, _, batch = collected
    batch = batch._replace(return_=torch.arange(256.0))  # names the samples
    seen, true_loss = [], ppo.ppo_loss

    def spy(agent, minibatch, *rest):
        seen.append(minibatch.return_.long())
        return true_loss(agent, minibatch, *rest)

    monkeypatch.setattr(ppo, "ppo_loss", spy)
    ppo.update(agent, torch.optim.Adam(agent.parameters(), 1e-4), batch, 0.2, args)
    assert len(seen) == 16 and all(len(x) == 64 for x in seen)
    epochs = [torch.cat(seen[i : i + 4]) for i in range(0, 16, 4)]
    for epoch in epochs:
        assert torch.equal(epoch.sort().values, torch.arange(256))
    assert not torch.equal(epochs[0], epochs[1]) and not torch.equal(epochs[0], torch.arange(256))


# proves core-11
def test_gradients_are_clipped_by_one_norm_over_both_networks(collected):
    args, agent, _, _, batch = collected
    args = dataclasses.replace(args, num_minibatches=1, update_epochs=1, max_grad_norm=0.01, vf_coef=100.0)
    before = torch.cat([p.detach().flatten().clone() for p in agent.parameters()])
    ppo.update(agent, torch.optim.SGD(agent.parameters(), lr=1.0), batch, 0.2, args)
    change = torch.cat([p.detach().flatten() for p in agent.parameters()]) - before
    assert change.norm().item() == pytest.approx(0.01, rel=1e-3)


# proves aux-3
def test_epochs_stop_at_the_target_kl(collected, monkeypatch):
    args, agent, _, _, batch = collected
    calls, true_loss = [], ppo.ppo_loss

    def drifting(*inputs):
        """The loss, with a KL divergence that grows by 0.01 with each minibatch."""
        loss, stats = true_loss(*inputs)
        calls.append(torch.tensor(0.01 * (len(calls) + 1)))
        return loss, stats | {"approx_kl": calls[-1]}

    monkeypatch.setattr(ppo, "ppo_loss", drifting)
    for target_kl, minibatches in ((0.001, 4), (0.05, 8), (0.085, 12), (None, 16)):
        calls.clear()
        args = dataclasses.replace(args, target_kl=target_kl)
        ppo.update(agent, torch.optim.Adam(agent.parameters(), 1e-4), batch, 0.2, args)
        assert len(calls) == minibatches  # whole epochs of 4


def test_explained_variance(collected):
    args, agent, _, _, batch = collected
    args = dataclasses.replace(args, update_epochs=1)

    def explained(batch):
        return ppo.update(agent, torch.optim.Adam(agent.parameters()), batch, 0.2, args)["train/explained_variance"]

    expected = 1 - (batch.return_ - batch.value).var() / batch.return_.var()
    torch.testing.assert_close(explained(batch), expected, atol=1e-4, rtol=0)
    other = torch.randn(256)  # as in a copy, whose advantage may be anything
    torch.testing.assert_close(explained(batch._replace(advantage=other)), expected, atol=1e-4, rtol=0)
    same = torch.ones(256)  # there is nothing to explain
    assert explained(batch._replace(return_=same)) == explained(batch._replace(return_=same, value=same)) == 0


# proves core-3
# proves core-4
def test_optimizer_and_its_schedule(tmp_path):
    folder = ppo.main(ppo.Args(**SMALL, runs_dir=str(tmp_path)))
    group = load_checkpoint(folder)["modules"]["optimizer"]["param_groups"][0]
    assert group["eps"] == 1e-5
    assert group["lr"] == pytest.approx(2.5e-4 / 2)  # the second of two updates


# proves aux-1
def test_clip_range_is_annealed_on_demand(tmp_path, monkeypatch):
    used, true_update = [], ppo.update
    monkeypatch.setattr(ppo, "update", lambda *a: (used.append(a[3]), true_update(*a))[1])
    ppo.main(ppo.Args(**SMALL, runs_dir=str(tmp_path), anneal_clip_coef=True))
    ppo.main(ppo.Args(**SMALL, runs_dir=str(tmp_path)))
    assert used == pytest.approx([0.2, 0.1, 0.2, 0.2])


@pytest.mark.parametrize("env_id, bootstrap", [("Clock-v0", True), ("Clock-v0", False), ("Bell-v0", True)])
def test_time_limit_bootstrap_adds_the_value_of_the_final_observation(env_id, bootstrap):
    """But not if the episode terminated with that step, too."""
    args = ppo.Args(env_id=env_id, num_steps=12, num_envs=2, time_limit_bootstrap=bootstrap)
    envs = ppo.make_envs(args, 2)
    agent = ppo.Agent(envs, args)
    rollout = make_rollout(ppo, args, envs)
    ppo.collect(agent, envs, envs.reset(seed=1)[0], rollout, args, Quiet())
    expected = np.ones((12, 2), np.float32)
    if bootstrap and env_id == "Clock-v0":
        expected[[4, 9]] += 0.99 * agent.critic(torch.tensor([5.0])).item()
    np.testing.assert_allclose(rollout.reward, expected, atol=1e-6)
    assert rollout.obs[5, 0] == 0 and rollout.done[4].all() and rollout.done.sum() == 4  # no dummy row after an end


@pytest.mark.parametrize("env_id", ["CartPole-v1", "FrozenLake-v1", "Acrobot-v1"])
def test_two_updates_on(env_id, tmp_path):
    folder = ppo.main(ppo.Args(env_id=env_id, **SMALL, runs_dir=str(tmp_path)))
    checkpoint = load_checkpoint(folder)
    assert checkpoint["step"] == 512
    assert all(torch.isfinite(x).all() for x in checkpoint["modules"]["agent"].values())


@pytest.mark.learning
def test_learns_cartpole_in_seconds(tmp_path):
    args = ppo.Args(total_timesteps=40_000, learning_rate=1e-3, runs_dir=str(tmp_path), eval_episodes=0)
    folder = ppo.main(args)
    envs = ppo.make_envs(args, 4)
    agent = ppo.Agent(envs, args)
    untrained = evaluate(envs, ppo.make_policy(agent, greedy=False), 20, seed=7)["eval/ep_reward"]
    agent.load_state_dict(load_checkpoint(folder)["modules"]["agent"])
    trained = evaluate(envs, ppo.make_policy(agent, greedy=False), 20, seed=7)["eval/ep_reward"]
    assert untrained < 50 and trained > 150
