"""mappo.py: the centralised critic, PopArt, the losses, death masking, shared and independent networks."""

import sys

from cleanmarl import coppo, coppo_lstm, enjoy, mappo, mappo_lstm
from cleanmarl.cli import launch
from cleanmarl.evaluate import evaluate
from cleanmarl.layers import AgentIds, StackedLinear, Tanh
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ippo import optimizer_for
from toys import Quiet, double, make_rollout

SMALL = {"total_timesteps": 400, "num_envs": 4, "num_steps": 50, "eval_episodes": 0}


def collected(args, scale=100):
    """Agent, rollout and batch of one rollout with policies far from uniform."""
    torch.manual_seed(0)
    envs = mappo.make_envs(args, args.num_envs)
    agent = mappo.Agent(envs, args)
    with torch.no_grad():
        agent.actor[-1].weight *= scale
    rollout = make_rollout(mappo, args, envs)
    now = mappo.collect(agent, envs, envs.reset(seed=1), rollout, args, Quiet())
    return agent, rollout, mappo.estimate(agent, rollout, *now, args)


def seen_by_critics(agent, batch):
    """What the critics' first layer multiplies, written out: the state beside the own observation, 0 for the dead."""
    alive = batch.alive[..., None]
    seen = torch.cat([batch.state[:, None] * alive, batch.obs * alive], dim=-1)  # (R, A, S + D)
    ids = [m for m in agent.critic if isinstance(m, AgentIds)]
    return torch.cat([seen, torch.eye(3).expand(len(seen), 3, 3)], dim=-1) if ids else seen


def layers(network):
    return [m for m in network if isinstance(m, StackedLinear)]


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
def test_the_last_step_bootstraps_from_the_state_after_the_rollout(shared, team):
    """With lambda 0 the return of the last step is r + gamma V(next state and observation)."""
    args = mappo.Args(env_id=team, **SMALL, share_parameters=shared, gamma=0.9, gae_lambda=0.0, normalize_value=False)
    _, rollout, batch = collected(args)
    torch.manual_seed(0)
    fresh = mappo.Agent(mappo.make_envs(args, 4), args)  # the critic of the rollout
    obs = torch.tensor([[[2.0, 2, 0], [3, 3, 3], [4, 0, 0]]])  # after 50 steps the clock is at 2
    expected = rollout.reward[-1] + 0.9 * fresh.value(torch.tensor([[2.0, 4]]), obs, torch.ones(1, 3)).detach().numpy()
    np.testing.assert_allclose(batch.return_.view(50, 4, 3)[-1], expected, rtol=1e-5)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("env_id", ["mpe/simple_spread_v3", "toy/team"])
def test_first_ratio_is_one(env_id, shared, team):
    args = mappo.Args(env_id=env_id, **SMALL, share_parameters=shared)
    agent, _, batch = collected(args)
    minibatch = mappo.Batch(*(x[:100] for x in batch))
    log_probs = agent.logits(minibatch.obs, minibatch.action_mask).log_softmax(-1)
    ratio = (log_probs.gather(-1, minibatch.action[..., None]).squeeze(-1) - minibatch.log_prob).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)
    _, stats = mappo.mappo_loss(agent, minibatch, args)
    assert stats["approx_kl"].abs() < 1e-6 and stats["clipfrac"] == 0


@pytest.mark.parametrize("shared, activation", [(True, "tanh"), (False, "tanh"), (True, "relu"), (False, "relu")])
def test_actions_are_samples_of_the_policy_that_learns(shared, activation, team):
    args = mappo.Args(env_id=team, share_parameters=shared, activation=activation)
    envs = mappo.make_envs(args, 1)
    agent = mappo.Agent(envs, args)
    kinds = [type(layer) for network in (agent.actor, agent.critic) for layer in network[2:5:2]]
    assert kinds == [{"tanh": Tanh, "relu": torch.nn.ReLU}[activation]] * 4
    with torch.no_grad():
        agent.actor[-1].weight *= 100
    obs, info = envs.reset()
    theirs = agent.logits(torch.from_numpy(obs), torch.from_numpy(info["action_mask"])).softmax(-1).detach().numpy()
    done, many = np.zeros(20_000, bool), np.repeat(obs, 20_000, 0)
    action = mappo.make_policy(agent, greedy=False)(many, {"action_mask": info["action_mask"]}, done)
    frequency = np.stack([(action == k).mean(0) for k in range(4)], -1)
    np.testing.assert_allclose(frequency, theirs[0], atol=0.02)
    assert (mappo.make_policy(agent)(many, info, done) == theirs.argmax(-1)).all()


@pytest.mark.parametrize("shared", [True, False])
def test_critics_see_the_state_and_actors_do_not(shared, team):
    args = mappo.Args(env_id=team, share_parameters=shared)
    envs = mappo.make_envs(args, 4)
    agent = mappo.Agent(envs, args)
    D, S, ids = 3, 2, 3 if shared else 0
    assert layers(agent.actor)[0].weight.shape[1] == D + ids and layers(agent.critic)[0].weight.shape[1] == S + D + ids
    state, obs, alive = torch.randn(4, S), torch.randn(4, 3, D), torch.ones(4, 3)
    value = agent.value(state, obs, alive)
    assert (agent.value(state + 1, obs, alive) != value).all() and (agent.value(state, obs + 1, alive) != value).all()
    other = obs.clone()
    other[:, 1] += 1
    assert ((agent.value(state, other, alive) != value) == torch.tensor([False, True, False])).all()


# proves mappo-2, mappo-3
@pytest.mark.parametrize("shared", [True, False])
def test_values_are_those_of_the_state_beside_what_each_agent_sees(shared, team):
    agent, _, batch = collected(mappo.Args(env_id=team, **SMALL, share_parameters=shared))
    assert (batch.alive == 0).any() and batch.state.abs().max() > 1
    agent.double()
    batch = double(batch)
    value = agent.normalized_value(batch.state, batch.obs, batch.alive)
    plain = agent.critic[1:](seen_by_critics(agent, batch)).squeeze(-1)  # without the layer that appends ids
    torch.testing.assert_close(value, plain)
    parameters, weight = list(agent.critic.parameters()), torch.randn_like(value)
    ours, theirs = (torch.autograd.grad((x * weight).sum(), parameters) for x in (value, plain))
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b)


# proves mappo-1
def test_popart_preserves_outputs_and_normalises_returns():
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    layer, stats = StackedLinear(2, 8, 1).double(), mappo.PopArt(2, 1).double()
    x, seen = torch.randn(50, 2, 8, dtype=torch.float64), []
    before = stats.denormalize(layer(x))  # (50, 2, 1)
    for scale, count in ((1, 7), (300, 40), (0.1, 20)):  # returns that change their scale
        seen.append(rng.normal(scale, 3 * scale, (count, 2)))
        stats.update(torch.from_numpy(seen[-1]), layer)
        torch.testing.assert_close(stats.denormalize(layer(x)), before, rtol=1e-10, atol=1e-10)
    every = np.concatenate(seen)
    np.testing.assert_allclose(stats.mean[:, 0], every.mean(0))
    np.testing.assert_allclose(stats.var[:, 0], every.var(0))
    normalized = stats.normalize(torch.from_numpy(every)[..., None])
    np.testing.assert_allclose(normalized.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(normalized.std(0, correction=0), 1)
    torch.testing.assert_close(stats.denormalize(normalized)[..., 0], torch.from_numpy(every))


# proves mappo-1
def test_popart_preserves_the_outputs_of_an_ordinary_linear_layer():
    layer, stats, x = nn.Linear(8, 3), mappo.PopArt(1, 1), torch.randn(50, 8)
    before = stats.denormalize(layer(x))
    stats.update(5 + 3 * torch.randn(40, 1), layer)
    assert stats.std > 2
    torch.testing.assert_close(stats.denormalize(layer(x)), before, rtol=1e-4, atol=1e-4)


def test_popart_takes_returns_that_are_all_alike_for_a_tenth_apart():
    layer, stats = nn.Linear(8, 1), mappo.PopArt(1, 1)
    stats.update(torch.full((40, 1), 3.0), layer)
    assert stats.var == 0 and stats.std == pytest.approx(0.1)


# proves mappo-1
@pytest.mark.parametrize("shared", [True, False])
def test_an_update_of_the_statistics_moves_no_value(shared, team):
    """In the script's own data flow: the values after `estimate` are those before it, in the unit of the returns."""
    args = mappo.Args(env_id=team, **SMALL, share_parameters=shared)
    agent, _, batch = collected(args)
    stats = agent.value_stats
    assert (stats.count == (600 if shared else 200)).all() and (stats.std > 1.5).all()
    seen = batch.state, batch.obs, batch.alive
    torch.testing.assert_close(agent.normalized_value(*seen), batch.value, atol=1e-4, rtol=1e-4)
    torch.manual_seed(0)
    untouched = mappo.Agent(mappo.make_envs(args, 4), args)
    torch.testing.assert_close(
        stats.denormalize(batch.value[..., None])[..., 0], untouched.value(*seen), atol=1e-3, rtol=1e-4
    )
    return_ = batch.return_ if shared else batch.return_.T
    for of_network in return_.reshape(1, -1) if shared else return_:
        assert of_network.mean().abs() < 1e-4 and (of_network.std() - 1).abs() < 0.01


def reference_losses(agent, batch, args):
    """The losses of each network, as the paper has them, in float64 and with loops."""
    agent.double()
    logits = agent.actor(batch.obs.double())
    value = agent.critic[1:](seen_by_critics(agent, batch).double())[..., 0]
    networks = [[(r, a) for r in range(len(value)) for a in range(3)]]
    if not args.share_parameters:
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


# proves mappo-4, mappo-5
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("value_clip_coef, huber_delta", [(0.2, 0.5), (0.0, 0.0), (0.05, 0.0), (0.0, 0.3)])
def test_losses_and_gradients_are_their_definition(value_clip_coef, huber_delta, shared, team):
    args = mappo.Args(
        env_id=team,
        **SMALL,
        share_parameters=shared,
        value_clip_coef=value_clip_coef,
        huber_delta=huber_delta,
        ent_coef=0.2,
    )
    agent, _, batch = collected(args)
    batch = mappo.Batch(*(x[10:40] for x in batch))
    assert 0 < batch.alive.sum() < batch.alive.numel()
    batch.return_[0] += 30  # a squared error where others would be linear
    with torch.no_grad():  # away from the policy and the critic that acted
        for p in agent.parameters():
            p += 0.05 * torch.randn_like(p)
    loss, stats = mappo.mappo_loss(agent, batch, args)
    ours = torch.autograd.grad(loss, list(agent.parameters()))
    assert 0 < stats["clipfrac"] < 1, "some ratios were to be clipped"
    expected = reference_losses(agent, batch, args)
    networks = 1 if shared else 3
    torch.testing.assert_close(loss.double(), sum(expected), atol=1e-5, rtol=1e-5)
    policy_loss = stats["policy_loss"] - args.ent_coef * stats["entropy"]  # means over the networks
    torch.testing.assert_close(policy_loss.double() * networks, expected[0].detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(stats["value_loss"].double() * networks, expected[1].detach(), atol=1e-5, rtol=1e-5)
    for mine, reference in zip(ours, torch.autograd.grad(sum(expected), list(agent.parameters()))):
        torch.testing.assert_close(mine.double(), reference, atol=1e-5, rtol=1e-4)


def test_independent_networks_get_no_gradient_from_one_another():
    args = mappo.Args(**SMALL, share_parameters=False)
    agent, _, batch = collected(args)
    for i in range(3):
        nothing = torch.zeros_like(batch.alive)
        nothing[:, i] = 1
        loss, _ = mappo.mappo_loss(agent, batch._replace(alive=nothing), args)
        for gradient in torch.autograd.grad(loss, list(agent.actor.parameters())):
            assert (gradient[i] != 0).any() and (gradient[[j for j in range(3) if j != i]] == 0).all()


# proves mappo-7, mappo-8
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
            loss, _ = mappo.mappo_loss(twin, mappo.Batch(*(x[index] for x in batch)), args)
            for parameters in parts:
                gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
                for m in range(len(gradients[0])):  # the norm of each network, over all its parameters
                    norm = torch.cat([g[m].flatten() for g in gradients]).norm()
                    norms.append(norm)
                    for g in gradients:
                        g[m] *= min(1, 0.5 / (norm + 1e-6))
                for p, g in zip(parameters, gradients):
                    p.grad = g
            for adam in adams:
                adam.step()
    for mine, theirs in zip(agent.parameters(), twin.parameters()):
        torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=1e-5)
    assert max(norms) > 0.5 > min(norms)
    mean_norm = (metrics["train/actor_gradients"] + metrics["train/critic_gradients"]) / 2
    assert mean_norm == pytest.approx(torch.stack(norms).mean().item(), rel=1e-4)


# proves ippo-4, mappo-6
@pytest.mark.parametrize("shared", [True, False])
def test_dead_agents_add_nothing_to_the_policy(shared, team):
    args = mappo.Args(env_id=team, **SMALL, share_parameters=shared)
    agent, _, batch = collected(args)
    assert 0 < (batch.alive[:, 1] == 0).sum() < 200 and (batch.alive[:, [0, 2]] == 1).all()
    loss, stats = mappo.mappo_loss(agent, batch, args)
    gradients = torch.autograd.grad(loss, list(agent.actor.parameters()))
    noise = (1 - batch.alive) * 1e3
    other = batch._replace(
        obs=batch.obs + noise[..., None],
        advantage=batch.advantage + noise,
        log_prob=batch.log_prob - noise,  # a ratio that would overflow
    )
    loss2, stats2 = mappo.mappo_loss(agent, other, args)
    torch.testing.assert_close(loss, loss2)
    torch.testing.assert_close(stats, stats2)
    for a, b in zip(gradients, torch.autograd.grad(loss2, list(agent.actor.parameters()))):
        torch.testing.assert_close(a, b)
    living = batch.advantage[batch.alive > 0] if shared else batch.advantage[:, 1][batch.alive[:, 1] > 0]
    assert living.mean().abs() < 1e-5 and (living.std(correction=0) - 1).abs() < 1e-4  # normalised without the dead


# proves mappo-3
def test_death_masking(team):
    """The critic of a dead agent sees its id alone, and what the team earns later still counts for the agent."""
    args = mappo.Args(env_id=team, **SMALL, norm_adv=False, normalize_value=False, gamma=0.9, gae_lambda=1.0)
    agent, rollout, batch = collected(args)
    value = agent.value(batch.state, batch.obs + 7 * (1 - batch.alive[..., None]), batch.alive)
    of_id = agent.critic[1:](torch.tensor([[0.0] * 5 + [0, 1, 0]])[None]).item()  # all that distinguishes it
    assert (batch.alive == 0).any() and torch.allclose(value[batch.alive == 0], torch.tensor(of_id))
    assert (rollout.done == (np.arange(50) % 6 == 5)[:, None, None]).all()  # death is no end
    # in environment 0, which terminates, with lambda = 1, the returns are those of the whole episode
    expected = sum(0.9**k * (k + 1) for k in range(6))
    np.testing.assert_allclose(batch.return_.view(50, 4, 3)[0, 0], expected, rtol=1e-4)


# proves mappo-9
@pytest.mark.parametrize("script", [coppo, coppo_lstm, mappo, mappo_lstm])
def test_critics_see_states_of_one_scale(script, team, tmp_path, monkeypatch):
    """By the mean and deviation of all states so far, which are saved with the agent."""
    sizes = SMALL | {"num_steps": 52, "total_timesteps": 624, "num_minibatches": 1, "update_epochs": 1}
    args = script.Args(env_id=team, **sizes, normalize_state=True, runs_dir=str(tmp_path))
    rollouts, agents, seen, estimate = [], [], [], script.estimate

    def spy(agent, rollout, *rest):
        if not agents:
            agents.append(agent)
            agent.critic.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].detach().clone()))
        rollouts.append(type(rollout)(*(x.copy() for x in rollout)))
        return estimate(agent, rollout, *rest)

    monkeypatch.setattr(script, "estimate", spy)
    saved = load_checkpoint(script.main(args))["modules"]["agent"]
    states = [rollout.state.reshape(-1, 2) for rollout in rollouts]
    mean, std = np.concatenate(states).mean(0), np.concatenate(states).std(0)
    np.testing.assert_allclose(saved["state_stats.mean"][0], mean, rtol=1e-5)
    np.testing.assert_allclose(saved["state_stats.var"][0], std**2, rtol=1e-4)
    assert (saved["state_stats.count"] == 3 * 208).all()

    alive = rollouts[2].agent_mask.reshape(-1, 3, 1)  # the dead see zeros
    np.testing.assert_allclose(seen[-1], ((states[2] - mean) / std)[:, None] * alive, rtol=1e-3, atol=1e-4)


def test_a_time_limit_bootstraps_from_the_final_state(team):
    args = mappo.Args(env_id=team, **SMALL, gamma=0.9)
    torch.manual_seed(0)
    fresh = mappo.Agent(mappo.make_envs(args, 4), args)  # the critic of the rollout
    _, rollout, _ = collected(args)
    assert (rollout.reward[5, 0] == 6).all()  # environment 0 terminates: nothing to add
    final_obs = torch.zeros(1, 3, 3)
    final_obs[0, 0, :2] = 6  # agent 2 died with the last step
    value = fresh.value(torch.tensor([[6.0, 36]]), final_obs, torch.tensor([[1.0, 0, 0]]))
    np.testing.assert_allclose(rollout.reward[5, 1], 6 + 0.9 * value[0].detach().numpy(), rtol=1e-5)  # 1 is truncated


# proves mappo-9
@pytest.mark.parametrize("script", [coppo, mappo])
def test_a_final_state_is_seen_in_the_scale_of_those_before_it(script, team):
    """Already in the first rollout: raw ones would have values that PopArt begins with."""
    args = script.Args(env_id=team, **SMALL, gamma=0.9, normalize_state=True)
    torch.manual_seed(0)
    envs = script.make_envs(args, 4)
    agent, rollout = script.Agent(envs, args), make_rollout(script, args, envs)
    script.collect(agent, envs, envs.reset(seed=1), rollout, args, Quiet())
    agent.state_stats = agent.state_stats.__class__(1, 2)
    agent.state_stats.update(torch.from_numpy(rollout.state[:6].reshape(-1, 1, 2)))
    final_obs = torch.zeros(1, 3, 3)
    final_obs[0, 0, :2] = 6  # agent 2 died with the last step
    value = agent.value(torch.tensor([[6.0, 36]]), final_obs, torch.tensor([[1.0, 0, 0]]))
    np.testing.assert_allclose(rollout.reward[5, 1], 6 + 0.9 * value[0].detach().numpy(), rtol=1e-4)


def test_explained_variance_leaves_dead_agents_out(team):
    args = mappo.Args(env_id=team, **SMALL)
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
@pytest.mark.parametrize("env_id", ["mpe/simple_speaker_listener_v4", "matrix/penalty", "toy/team"])
def test_two_updates_that_two_runs_repeat(env_id, shared, team, tmp_path):
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
        (
            "--env-id mpe/simple_spread_v3?continuous_actions=True",
            "has continuous actions and this script needs discrete ones",
        ),
        ("--num-envs 3 --num-steps 5 --num-minibatches 2", "15 steps of a rollout are not divisible by"),
        ("--total-timesteps 3199", "--total-timesteps 3199 is less than one rollout of 3200 steps"),
    ],
)
def test_bad_input(flags, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mappo.py", *flags.split(), "--runs-dir", str(tmp_path / "runs")])
    with pytest.raises(SystemExit) as exit_:
        launch(mappo.main, mappo.Args)
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
