"""mappo.py: the centralised critic, PopArt, the losses, death masking, shared and independent networks."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cleanmarl.envs
from cleanmarl import enjoy, mappo
from cleanmarl.envs import EpisodeStatistics, MultiAgentVectorEnv
from cleanmarl.run import evaluate, load_checkpoint

SMALL = {"total_timesteps": 400, "num_envs": 4, "num_steps": 50, "eval_episodes": 0}


class Toy(MultiAgentVectorEnv):
    """Three agents with different spaces, episodes of 6 steps (terminated in even environments, truncated in odd ones).

    Agent 1 dies after its third step, agent 2 with its last; the parity of the clock forbids agent 2's action 0 or 1.
    Observations are the clock plus the agent's index, the state is the clock and its square. The living earn the clock.
    """

    def __init__(self, num_envs):
        self._set_spaces(num_envs, ("a", "b", "c"), [2, 3, 1], [2, 4, 3], 2)
        self.statistics = EpisodeStatistics(num_envs, 3)

    def _look(self):
        obs = np.zeros((self.num_envs, 3, 3), np.float32)
        for i, size in enumerate(self.obs_sizes):
            obs[:, i, :size] = self.clock + i
        mask = np.tile(self.real_actions, (self.num_envs, 1, 1))
        mask[:, 2, self.clock % 2] = False
        alive = np.ones((self.num_envs, 3), bool)
        alive[:, 1], alive[:, 2] = self.clock < 3, self.clock < 6
        obs[~alive] = 0
        state = np.tile(np.array([self.clock, self.clock**2], np.float32), (self.num_envs, 1))
        return obs, {"state": state, "action_mask": mask, "agent_mask": alive}

    def reset(self, *, seed=None, options=None):
        self.clock = 0
        return self._look()

    def step(self, action):
        _, before = self._look()
        legal = np.take_along_axis(before["action_mask"], action[..., None], -1)[..., 0]
        assert legal[before["agent_mask"]].all(), "an illegal action"
        self.clock += 1
        reward = np.float32(self.clock * before["agent_mask"])
        ended = np.full(self.num_envs, self.clock == 6)
        odd = np.arange(self.num_envs) % 2 == 1
        self.statistics.add(reward)
        final, final_info = self._look()
        if ended.any():
            self.clock = 0
        obs, info = self._look()
        if ended.any():
            info["final_obs"], info["_final_obs"], info["final_state"] = final, ended, final_info["state"]
            info["final_agent_mask"] = final_info["agent_mask"]
            self.statistics.end(ended, info)
        return obs, reward, ended & ~odd, ended & odd, info


@pytest.fixture
def toy(monkeypatch):
    """`toy` as an environment family."""
    monkeypatch.setattr(
        mappo,
        "make",
        lambda env_id, num_envs, **o: Toy(num_envs) if env_id == "toy" else cleanmarl.envs.make(env_id, num_envs, **o),
    )
    return "toy"


class Quiet:
    step = 0

    def log_episodes(self, info):
        pass


def make_rollout(args, envs):
    T, N, S = args.num_steps, args.num_envs, envs.state_size
    (A, D), K = envs.single_observation_space.shape, envs.real_actions.shape[1]
    seen = np.zeros((T, N, A, D), np.float32), np.zeros((T, N, S), np.float32)
    masks = np.zeros((T, N, A, K), bool), np.zeros((T, N, A), bool)
    rest = np.zeros((T, N, A), np.int64), np.zeros((T, N, A), np.float32), np.zeros((T, N, A), bool)
    return mappo.Rollout(*seen, *masks, *rest)


def collected(args, scale=100):
    """Agent, rollout and batch of one rollout with policies far from uniform."""
    torch.manual_seed(0)
    envs = mappo.make_envs(args, args.num_envs)
    agent = mappo.Agent(envs, args)
    with torch.no_grad():
        agent.actor[-1].weight *= scale
    rollout = make_rollout(args, envs)
    now = mappo.collect(agent, envs, envs.reset(seed=1), rollout, args, Quiet())
    return agent, rollout, mappo.estimate(agent, rollout, *now, args)


def optimizer_for(agent, *lrs, **kwargs):
    networks = zip((agent.actor, agent.critic), lrs)
    return torch.optim.Adam([{"params": [mappo.stack_parameters(n)], "lr": lr} for n, lr in networks], **kwargs)


@given(st.integers(1, 12), st.floats(0, 0.5), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_gae_is_its_definition(T, p_done, seed):
    rng = np.random.default_rng(seed)
    gamma, gae_lambda = rng.random(2)
    reward, value, next_value = rng.normal(size=(T, 2, 3)), rng.normal(size=(T, 2, 3)), rng.normal(size=(2, 3))
    done = rng.random((T, 2, 3)) < p_done
    ours = mappo.gae(reward, value, next_value, done, gamma, gae_lambda)
    values = np.concatenate([value, next_value[None]])
    for n, a in np.ndindex(2, 3):
        for t in range(T):
            expected, weight = 0.0, 1.0
            for k in range(t, T):
                alive = 1.0 - done[k, n, a]
                expected += weight * (reward[k, n, a] + gamma * alive * values[k + 1, n, a] - values[k, n, a])
                weight *= gamma * gae_lambda * alive
            assert ours[t, n, a] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("shared", [True, False])
def test_the_last_step_bootstraps_from_the_state_after_the_rollout(shared, toy):
    """With lambda 0 the return of the last step is r + gamma V(next state and observation)."""
    args = mappo.Args(env_id=toy, **SMALL, share_parameters=shared, gamma=0.9, gae_lambda=0.0, normalize_value=False)
    _, rollout, batch = collected(args)
    torch.manual_seed(0)
    fresh = mappo.Agent(mappo.make_envs(args, 4), args)  # the critic of the rollout
    obs = np.array([[[2, 2, 0], [3, 3, 3], [4, 0, 0]]], np.float32)  # after 50 steps the clock is at 2
    seen = fresh.critic_input(np.array([[2, 4]], np.float32), obs, np.ones((1, 3), bool))
    expected = rollout.reward[-1] + 0.9 * fresh.value(*seen).detach().numpy()
    np.testing.assert_allclose(batch.return_.view(50, 4, 3)[-1], expected, rtol=1e-5)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("env_id", ["mpe/simple_spread_v3", "toy"])
def test_first_ratio_is_one(env_id, shared, toy):
    args = mappo.Args(env_id=env_id, **SMALL, share_parameters=shared)
    agent, _, batch = collected(args)
    minibatch = mappo.Batch(*(x[:100] for x in batch))
    log_probs = agent.logits(minibatch.features, minibatch.action_mask).log_softmax(-1)
    ratio = (log_probs.gather(-1, minibatch.action[..., None]).squeeze(-1) - minibatch.log_prob).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)
    _, _, stats = mappo.mappo_loss(agent, minibatch, args)
    assert stats[3].abs() < 1e-6 and stats[4] == 0  # KL divergence and clipped fraction


@pytest.mark.parametrize("shared, activation", [(True, "tanh"), (False, "tanh"), (True, "relu"), (False, "relu")])
def test_the_actor_that_acts_is_the_actor_that_learns(shared, activation):
    args = mappo.Args(share_parameters=shared, activation=activation)
    agent = mappo.Agent(mappo.make_envs(args, 1), args)
    kinds = [type(layer) for network in (agent.actor, agent.critic) for layer in network[1:4:2]]
    assert kinds == [{"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}[activation]] * 4
    with torch.no_grad():
        agent.actor[-1].weight *= 100
    features = agent.features(np.random.default_rng(0).normal(size=(7, 3, 18)).astype(np.float32))
    mask = torch.ones(7, 3, 5, dtype=torch.bool)
    theirs = agent.logits(torch.from_numpy(features), mask)
    torch.testing.assert_close(torch.from_numpy(mappo.numpy_actor(agent)(features)), theirs, atol=1e-5, rtol=1e-5)
    action = (mappo.numpy_actor(agent)(features) + mappo.gumbel_noise(20_000, *theirs.shape)).argmax(-1)
    frequency = np.stack([(action == k).mean(0) for k in range(5)], -1)
    np.testing.assert_allclose(frequency, theirs.softmax(-1).detach(), atol=0.02)


@pytest.mark.parametrize("shared", [True, False])
def test_critics_see_the_state_and_actors_do_not(shared):
    args = mappo.Args(share_parameters=shared)
    envs = mappo.make_envs(args, 4)
    agent = mappo.Agent(envs, args)
    obs, info = envs.reset(seed=1)
    state, features, alive = agent.critic_input(info["state"], obs, info["agent_mask"])
    S, D = info["state"].shape[1], obs.shape[2]
    assert features.shape == (4, 3, D + (3 if shared else 0)) and features.dtype == torch.float32
    assert (state.numpy() == info["state"]).all() and (features[..., :D].numpy() == obs).all() and (alive == 1).all()
    if shared:
        assert (features[..., D:].numpy() == np.eye(3)).all() and (agent.features(obs)[..., D:] == np.eye(3)).all()
    assert (agent.features(obs)[..., :D] == obs).all() and agent.actor[0].weight.shape[1] == D + 3 * shared
    assert agent.critic[0].weight.shape[1] == S + D + 3 * shared
    assert (agent.value(state + 1, features, alive) != agent.value(state, features, alive)).all()


def critic_rows(batch):
    """What the critic's first layer multiplies, written out: the state beside each agent's features, 0 for the dead."""
    state = batch.state[:, None] * batch.alive[..., None]  # (R, A, S)
    return torch.cat([state, batch.critic_features], dim=-1)


@pytest.mark.parametrize("shared", [True, False])
def test_the_state_read_once_gives_the_values_of_the_state_read_by_every_agent(shared, toy):
    agent, _, batch = collected(mappo.Args(env_id=toy, **SMALL, share_parameters=shared))
    assert (batch.alive == 0).any() and batch.state.abs().max() > 1
    agent.double()
    value = agent.normalized_value(batch.state.double(), batch.critic_features.double(), batch.alive.double())
    plain = agent.by_agent(agent.critic(agent.by_network(critic_rows(batch).double()))).squeeze(-1)
    torch.testing.assert_close(value, plain)
    parameters = list(agent.critic.parameters())
    weight = torch.randn_like(value)
    ours, theirs = (torch.autograd.grad((x * weight).sum(), parameters) for x in (value, plain))
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shared", [True, False])
def test_axes_of_agents_and_networks_convert_back_and_forth(shared):
    args = mappo.Args(share_parameters=shared)
    agent = mappo.Agent(mappo.make_envs(args, 1), args)
    x = torch.arange(5 * 3 * 2).reshape(5, 3, 2)
    assert agent.by_network(x).shape == ((1, 15, 2) if shared else (3, 5, 2))
    assert torch.equal(agent.by_agent(agent.by_network(x)), x)


def test_popart_preserves_outputs_and_normalises_returns():
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    layer, stats = mappo.StackedLinear(2, 8, 1).double(), mappo.PopArt(2).double()
    x, seen = torch.randn(2, 50, 8, dtype=torch.float64), []
    before = stats.denormalize(layer(x).squeeze(-1).T)  # (50, 2)
    for scale, count in ((1, 7), (300, 40), (0.1, 20)):  # returns that change their scale
        seen.append(rng.normal(scale, 3 * scale, (count, 2)))
        new = torch.from_numpy(seen[-1])
        stats.update(new.mean(0, keepdim=True), new.var(0, correction=0, keepdim=True), count, layer)
        after = stats.denormalize(layer(x).squeeze(-1).T)
        torch.testing.assert_close(after, before, rtol=1e-10, atol=1e-10)
    every = np.concatenate(seen)
    np.testing.assert_allclose(stats.mean[0], every.mean(0))
    np.testing.assert_allclose(stats.var[0], every.var(0))
    normalized = stats.normalize(torch.from_numpy(every))
    np.testing.assert_allclose(normalized.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(normalized.std(0, correction=0), 1)
    torch.testing.assert_close(stats.denormalize(normalized), torch.from_numpy(every))


@pytest.mark.parametrize("shared", [True, False])
def test_an_update_of_the_statistics_moves_no_value(shared, toy):
    """In the script's own data flow: the values after `estimate` are those before it, in the unit of the returns."""
    args = mappo.Args(env_id=toy, **SMALL, share_parameters=shared)
    agent, _, batch = collected(args)
    stats = agent.value_stats
    assert (stats.count == (600 if shared else 200)) and (stats.std > 1.5).all()
    seen = batch.state, batch.critic_features, batch.alive
    torch.testing.assert_close(agent.normalized_value(*seen), batch.value, atol=1e-4, rtol=1e-4)
    torch.manual_seed(0)
    untouched = mappo.Agent(mappo.make_envs(args, 4), args)
    torch.testing.assert_close(stats.denormalize(batch.value), untouched.value(*seen), atol=1e-3, rtol=1e-4)
    return_ = batch.return_ if shared else batch.return_.T
    for of_network in return_.reshape(1, -1) if shared else return_:
        assert of_network.mean().abs() < 1e-4 and (of_network.std() - 1).abs() < 0.01


def reference_losses(agent, batch, args):
    """The losses of each network, as the paper has them, in float64 and with loops."""
    actor, critic = agent.actor.double(), agent.critic.double()
    logits = agent.by_agent(actor(agent.by_network(batch.features.double())))
    value = agent.by_agent(critic(agent.by_network(critic_rows(batch).double())))[..., 0]
    networks = [[(r, a) for r in range(len(value)) for a in range(3)]]
    if not agent.shared:
        networks = [[(r, a) for r in range(len(value))] for a in range(3)]
    huber = lambda e, d: e * e / 2 if not d or abs(e) <= d else d * (abs(e) - d / 2)  # noqa: E731
    actor_loss = critic_loss = 0
    for samples in networks:
        living = [sample for sample in samples if batch.alive[sample]]
        for r, a in living:
            legal = batch.action_mask[r, a]
            policy = torch.distributions.Categorical(logits=logits[r, a][legal])
            action = legal[: batch.action[r, a]].sum()
            ratio = (policy.log_prob(action) - batch.log_prob[r, a].double()).exp()
            advantage, eps = batch.advantage[r, a].double(), args.clip_coef
            surrogate = torch.min(ratio * advantage, ratio.clip(1 - eps, 1 + eps) * advantage)
            actor_loss = actor_loss - (surrogate + args.ent_coef * policy.entropy()) / len(living)
        for sample in samples:
            old, target = batch.value[sample].double(), batch.return_[sample].double()
            error = huber(value[sample] - target, args.huber_delta)
            if args.value_clip_coef:
                near = old + (value[sample] - old).clip(-args.value_clip_coef, args.value_clip_coef)
                error = torch.max(error, huber(near - target, args.huber_delta))
            critic_loss = critic_loss + error / len(samples)
    return actor_loss, critic_loss


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("value_clip_coef, huber_delta", [(0.2, 0.5), (0.0, 0.0), (0.2, 0.0), (0.0, 0.3)])
def test_losses_and_gradients_are_their_definition(value_clip_coef, huber_delta, shared, toy):
    args = mappo.Args(
        env_id=toy,
        **SMALL,
        share_parameters=shared,
        value_clip_coef=value_clip_coef,
        huber_delta=huber_delta,
        ent_coef=0.2,
    )
    agent, _, batch = collected(args)
    batch = mappo.Batch(*(x[10:40] for x in batch))
    assert 0 < batch.alive.sum() < batch.alive.numel()
    with torch.no_grad():  # away from the policy and the critic that acted
        for p in agent.parameters():
            p += 0.05 * torch.randn_like(p)
    actor_loss, critic_loss, stats = mappo.mappo_loss(agent, batch, args)
    ours = [
        *torch.autograd.grad(actor_loss, list(agent.actor.parameters())),
        *torch.autograd.grad(critic_loss, list(agent.critic.parameters())),
    ]
    assert 0 < stats[4] < 1, "some ratios were to be clipped"
    expected = reference_losses(agent, batch, args)
    torch.testing.assert_close(actor_loss.double(), expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(critic_loss.double(), expected[1], atol=1e-5, rtol=1e-5)
    theirs = torch.autograd.grad(sum(expected), [*agent.actor.parameters(), *agent.critic.parameters()])
    for mine, reference in zip(ours, theirs):
        torch.testing.assert_close(mine.double(), reference, atol=1e-5, rtol=1e-4)


def test_independent_networks_get_no_gradient_from_one_another():
    args = mappo.Args(**SMALL, share_parameters=False)
    agent, _, batch = collected(args)
    for i in range(3):
        nothing = torch.zeros_like(batch.alive)
        nothing[:, i] = 1
        actor_loss, _, _ = mappo.mappo_loss(agent, batch._replace(alive=nothing), args)
        for gradient in torch.autograd.grad(actor_loss, list(agent.actor.parameters())):
            assert (gradient[i] != 0).any() and (gradient[[j for j in range(3) if j != i]] == 0).all()


@pytest.mark.parametrize("shared", [True, False])
def test_an_update_is_two_adams_with_a_norm_for_each_network(shared):
    """Against torch.optim.Adam and clip_grad_norm_ on ordinary parameters, on the same minibatches."""
    args = mappo.Args(
        **SMALL,
        share_parameters=shared,
        num_minibatches=4,
        update_epochs=2,
        max_grad_norm=0.5,
        critic_learning_rate=2e-3,
    )
    agent, _, batch = collected(args, scale=10)
    twin = mappo.Agent(mappo.make_envs(args, 1), args)
    twin.load_state_dict(agent.state_dict())
    parts = [list(network.parameters()) for network in (twin.actor, twin.critic)]
    adams = [torch.optim.Adam(p, lr=lr, eps=1e-5) for p, lr in zip(parts, (7e-4, 2e-3))]
    optimizer = optimizer_for(agent, 7e-4, 2e-3, eps=1e-5)
    torch.manual_seed(5)
    metrics = mappo.update(agent, optimizer, batch, args)

    torch.manual_seed(5)
    norms = []
    for _ in range(2):
        for index in torch.randperm(200).split(50):
            losses = mappo.mappo_loss(twin, mappo.Batch(*(x[index] for x in batch)), args)
            for parameters, adam, loss in zip(parts, adams, losses):
                gradients = torch.autograd.grad(loss, parameters)
                for m in range(len(gradients[0])):  # the norm of each network, over all its parameters
                    norm = torch.cat([g[m].flatten() for g in gradients]).norm()
                    norms.append(norm)
                    for g in gradients:
                        g[m] *= min(1, 0.5 / (norm + 1e-6))
                for p, g in zip(parameters, gradients):
                    p.grad = g
                adam.step()
    for mine, theirs in zip(agent.parameters(), twin.parameters()):
        torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=1e-5)
    assert max(norms) > 0.5 > min(norms)
    mean_norm = (metrics["train/actor_gradients"] + metrics["train/critic_gradients"]) / 2
    assert mean_norm == pytest.approx(torch.stack(norms).mean().item(), rel=1e-4)


@pytest.mark.parametrize("shared", [True, False])
def test_dead_agents_add_nothing_to_the_policy(shared, toy):
    args = mappo.Args(env_id=toy, **SMALL, share_parameters=shared)
    agent, _, batch = collected(args)
    assert 0 < (batch.alive[:, 1] == 0).sum() < 200 and (batch.alive[:, [0, 2]] == 1).all()
    loss, _, stats = mappo.mappo_loss(agent, batch, args)
    gradients = torch.autograd.grad(loss, list(agent.actor.parameters()))
    noise = (1 - batch.alive) * 1e3
    other = batch._replace(
        features=batch.features + noise[..., None],
        advantage=batch.advantage + noise,
        log_prob=batch.log_prob - noise,  # a ratio that would overflow
    )
    loss2, _, stats2 = mappo.mappo_loss(agent, other, args)
    torch.testing.assert_close(loss, loss2)
    torch.testing.assert_close(stats, stats2)
    for a, b in zip(gradients, torch.autograd.grad(loss2, list(agent.actor.parameters()))):
        torch.testing.assert_close(a, b)
    living = batch.advantage[batch.alive > 0] if shared else batch.advantage[:, 1][batch.alive[:, 1] > 0]
    assert living.mean().abs() < 1e-5 and (living.std(correction=0) - 1).abs() < 1e-4  # normalised without the dead


def test_death_masking(toy):
    """The critic of a dead agent sees its id alone, and what the team earns later still counts for the agent."""
    args = mappo.Args(env_id=toy, **SMALL, norm_adv=False, normalize_value=False, gamma=0.9, gae_lambda=1.0)
    _, rollout, batch = collected(args)
    dead = batch.critic_features[batch.alive == 0]
    assert len(dead) and (dead == torch.tensor([0.0] * 3 + [0, 1, 0])).all()
    assert (critic_rows(batch)[batch.alive == 0][:, :5] == 0).all()
    assert (rollout.done == (np.arange(50) % 6 == 5)[:, None, None]).all()  # death is no end
    # in environment 0, which terminates, with lambda = 1, the returns are those of the whole episode
    expected = sum(0.9**k * (k + 1) for k in range(6))
    np.testing.assert_allclose(batch.return_.view(50, 4, 3)[0, 0], expected, rtol=1e-4)


def test_a_time_limit_bootstraps_from_the_final_state(toy):
    args = mappo.Args(env_id=toy, **SMALL, gamma=0.9)
    torch.manual_seed(0)
    fresh = mappo.Agent(mappo.make_envs(args, 4), args)  # the critic of the rollout
    _, rollout, _ = collected(args)
    assert (rollout.reward[5, 0] == 6).all()  # environment 0 terminates: nothing to add
    final_obs = np.zeros((1, 3, 3), np.float32)
    final_obs[0, 0, :2] = 6  # agent 2 died with the last step
    seen = fresh.critic_input(np.array([[6, 36]], np.float32), final_obs, np.array([[True, False, False]]))
    expected = 6 + 0.9 * fresh.value(*seen).detach().numpy()[0]
    np.testing.assert_allclose(rollout.reward[5, 1], expected, rtol=1e-5)  # environment 1 is truncated


def test_explained_variance_leaves_dead_agents_out(toy):
    args = mappo.Args(env_id=toy, **SMALL)
    agent, _, batch = collected(args)
    batch = batch._replace(value=torch.where(batch.alive > 0, batch.return_, 1e3))  # perfect for the living alone
    metrics = mappo.update(agent, optimizer_for(agent, 1e-4, 1e-4), batch, args)
    assert metrics["train/explained_variance"] == pytest.approx(1)


def test_statistics_are_saved_used_and_frozen_at_evaluation(tmp_path):
    args = mappo.Args(**SMALL, runs_dir=str(tmp_path))
    saved = load_checkpoint(mappo.main(args))["modules"]["agent"]
    assert saved["value_stats.count"] == 1200 and saved["value_stats.mean"] < 0
    envs = mappo.make_envs(args, 4)
    agent = mappo.Agent(envs, args)
    agent.load_state_dict(saved)
    evaluate(envs, mappo.make_policy(agent), 8, seed=1)
    assert all(torch.equal(saved[key], value) for key, value in agent.state_dict().items())


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("env_id", ["mpe/simple_speaker_listener_v4", "matrix/penalty", "toy"])
def test_two_updates_that_two_runs_repeat(env_id, shared, toy, tmp_path):
    args = mappo.Args(env_id=env_id, **SMALL, share_parameters=shared, runs_dir=str(tmp_path))
    one, same = (load_checkpoint(mappo.main(args)) for _ in range(2))
    assert one["step"] == 400
    for key, value in one["modules"]["agent"].items():
        assert torch.isfinite(value).all() and torch.equal(value, same["modules"]["agent"][key])
    envs = mappo.make_envs(args, 1)
    assert {len(p) for p in mappo.Agent(envs, args).parameters()} == {1 if shared else envs.num_agents}


def test_the_learning_rates_fall_where_asked_to(tmp_path):
    for anneal, expected in ((False, [7e-4, 1e-3]), (True, [3.5e-4, 5e-4])):  # in the second of two updates
        args = mappo.Args(**SMALL, anneal_lr=anneal, critic_learning_rate=1e-3, runs_dir=str(tmp_path))
        groups = load_checkpoint(mappo.main(args))["modules"]["optimizer"]["param_groups"]
        assert [g["lr"] for g in groups] == pytest.approx(expected)


def test_a_resumed_run_goes_on_and_can_be_played(tmp_path, capsys):
    folder = mappo.main(mappo.Args(**SMALL, runs_dir=str(tmp_path)))
    before = load_checkpoint(folder)
    mappo.main(mappo.Args(**SMALL | {"total_timesteps": 600}, runs_dir=str(tmp_path), resume=folder))
    after = load_checkpoint(folder)
    assert after["step"] == 600 and after["modules"]["agent"]["value_stats.count"] == 1800
    assert after["modules"]["optimizer"]["state"][0]["step"] == 1.5 * before["modules"]["optimizer"]["state"][0]["step"]
    assert {"args.json", "checkpoint.pt", "done.json"} <= {path.name for path in folder.iterdir()}
    metrics = enjoy.main(enjoy.Args(folder, episodes=2))
    assert "mappo at step 600, 2 episodes" in capsys.readouterr().out and metrics["eval/ep_length"] == 25


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--env-id mpe/simple_spread_v3?continuous_actions=True", "are continuous; try mappo_continuous_action.py"),
        ("--num-envs 3 --num-steps 5 --num-minibatches 2", "15 steps of a rollout are not divisible by"),
        ("--total-timesteps 3199", "--total-timesteps 3199 is less than one rollout of 3200 steps"),
        ("--gamma 1.5", "--gamma must be in [0, 1], not 1.5"),
        ("--huber-delta -1", "--huber-delta must be at least 0, not -1"),
        ("--critic-learning-rate 0", "--critic-learning-rate must be greater than 0, not 0"),
    ],
)
def test_bad_input(flags, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mappo.py", *flags.split(), "--runs-dir", str(tmp_path / "runs")])
    with pytest.raises(SystemExit) as exit_:
        mappo.launch(mappo.main, mappo.Args)
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and text in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.learning
def test_learns_simple_spread_in_seconds(tmp_path):
    args = mappo.Args(total_timesteps=64_000, runs_dir=str(tmp_path), eval_episodes=0)
    folder = mappo.main(args)
    envs = mappo.make_envs(args, 32)
    agent = mappo.Agent(envs, args)
    untrained = evaluate(envs, mappo.make_policy(agent, greedy=False), 320, seed=7)
    agent.load_state_dict(load_checkpoint(folder)["modules"]["agent"])
    trained = evaluate(envs, mappo.make_policy(agent, greedy=False), 320, seed=7)
    error = np.hypot(untrained["eval/std_ep_reward"], trained["eval/std_ep_reward"]) / np.sqrt(320)
    assert trained["eval/ep_reward"] - untrained["eval/ep_reward"] > 5 * error
