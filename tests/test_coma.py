"""coma.py: the counterfactual baseline, TD(lambda) targets, target networks, both steps, masks and deaths."""

import sys

from cleanmarl import coma, coma_lstm, enjoy
from cleanmarl.cli import launch
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import Quiet, make_rollout

SMALL = {"total_timesteps": 400, "num_envs": 4, "num_steps": 50, "eval_episodes": 0}


def collected(args, epsilon=0.3, scale=100):
    """Agent, rollout, what followed it, and batch of one rollout with policies far from uniform."""
    torch.manual_seed(0)
    envs = coma.make_envs(args, args.num_envs)
    agent = coma.Agent(envs, args)
    agent.epsilon.fill_(epsilon)
    with torch.no_grad():
        agent.actor[-1].weight *= scale
        for p in agent.critic.parameters():  # another one than the target network
            p += 0.1 * torch.randn_like(p)
    rollout = make_rollout(coma, args, envs)
    now = coma.collect(agent, envs, envs.reset(seed=1), rollout, args, Quiet())
    return agent, rollout, now, coma.estimate(agent, rollout, *now, args)


def values_of(agent, critic, batch):
    return agent.values(critic, batch.state, batch.obs, batch.alive, batch.others)


# proves coma-2
@given(st.integers(1, 10), st.floats(0, 0.5), st.floats(0, 1), st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_targets_are_the_mixture_of_all_n_step_returns(T, p_done, lambda_, seed):
    rng = np.random.default_rng(seed)
    gamma = rng.random()
    reward, value, next_value = rng.normal(size=(T, 2, 3)), rng.normal(size=(T, 2, 3)), rng.normal(size=(2, 3))
    done = rng.random((T, 2, 3)) < p_done
    ours = coma.td_lambda(reward, value, next_value, done, gamma, lambda_)
    values = np.concatenate([value, next_value[None]])
    for n, a in np.ndindex(2, 3):
        for t in range(T):
            end = next((k for k in range(t, T) if done[k, n, a]), T - 1)  # the last reward that counts
            returns = []
            for steps in range(1, end - t + 2):
                rewards = sum(gamma**k * reward[t + k, n, a] for k in range(steps))
                bootstrap = 0 if done[t + steps - 1, n, a] else gamma**steps * values[t + steps, n, a]
                returns.append(rewards + bootstrap)
            weights = [(1 - lambda_) * lambda_**k for k in range(len(returns) - 1)] + [lambda_ ** (len(returns) - 1)]
            assert ours[t, n, a] == pytest.approx(np.dot(weights, returns), abs=1e-9)


# proves coma-1
@pytest.mark.parametrize("shared", [True, False])
def test_the_baseline_is_the_enumerated_expectation(shared, team):
    """E over the own action of Q, each value taken from a rollout in which the agent did just that."""
    args = coma.Args(env_id=team, **SMALL, share_parameters=shared)
    agent, rollout, now, batch = collected(args)
    batch = batch._replace(action=batch.action.clone())  # it was the rollout's own memory
    log_probs = agent.logits(batch.obs, batch.action_mask).log_softmax(-1).detach()
    values = values_of(agent, agent.critic, batch).detach()
    advantage = coma.counterfactual_advantage(values, log_probs, batch.action)
    original = rollout.action.copy()
    for i in range(3):
        baseline, own, mean_advantage = 0, [], 0
        for k in range(4):
            rollout.action[:] = original
            rollout.action[:, :, i] = k
            other = coma.estimate(agent, rollout, *now, args)
            q = coma.of_action(values_of(agent, agent.critic, other), other.action)[:, i].detach()
            baseline = baseline + log_probs[:, i, k].exp() * q
            a = coma.counterfactual_advantage(values, log_probs, other.action)
            mean_advantage = mean_advantage + log_probs[:, i, k].exp() * a[:, i]
            own.append(other.others[:, i])
        assert all(torch.equal(own[0], features) for features in own)  # a critic does not see its agent's own action
        taken = coma.of_action(values, batch.action)[:, i]
        torch.testing.assert_close(advantage[:, i], taken - baseline, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(mean_advantage, torch.zeros(200), atol=1e-5, rtol=0)
    shifted = coma.counterfactual_advantage(values + torch.randn(200, 3, 1), log_probs, batch.action)
    torch.testing.assert_close(shifted, advantage, atol=1e-5, rtol=1e-4)  # what the own action cannot change


# proves coma-3
@pytest.mark.parametrize("shared", [True, False])
def test_critics_see_the_state_and_the_living_others_actions(shared, team):
    args = coma.Args(env_id=team, share_parameters=shared)
    agent = coma.Agent(coma.make_envs(args, 1), args)
    alive, action = torch.tensor([[1.0, 1, 0]]), torch.tensor([[3, 1, 2]])
    others = agent.others_actions(action, alive)
    assert others.view(3, 3, 4).nonzero().tolist() == [[0, 1, 1], [1, 0, 3], [2, 0, 3], [2, 1, 1]]  # whose, which
    state, obs = torch.randn(1, 2), torch.randn(1, 3, 3)
    values = agent.values(agent.critic, state, obs, alive, others)
    seen = torch.cat([state[:, None].expand(-1, 3, -1), obs, others], dim=-1) * alive[..., None]
    if shared:
        seen = torch.cat([seen, torch.eye(3)[None]], dim=-1)
    torch.testing.assert_close(agent.critic[1:](seen), values)
    assert (agent.values(agent.critic, state + 1, obs, alive, others) != values)[:, :2].all()


@pytest.mark.parametrize("shared", [True, False])
def test_losses_and_gradients_are_their_definition(shared, team):
    args = coma.Args(env_id=team, **SMALL, share_parameters=shared, ent_coef=0.2)
    agent, _, _, batch = collected(args)
    batch = coma.Batch(*(x[10:40] for x in batch))
    loss, stats = coma.actor_loss(agent, batch, args)
    critic = coma.critic_loss(agent, batch)
    logits, q = agent.actor(batch.obs), values_of(agent, agent.critic, batch)
    networks = [[(r, a) for r in range(30) for a in range(3)]]
    if not shared:
        networks = [[(r, a) for r in range(30)] for a in range(3)]
    expected, expected_critic, entropies, policies = 0, [], [], []
    for samples in networks:
        living = [sample for sample in samples if batch.alive[sample]]
        policy_terms, entropy_terms = [], []
        for r, a in living:
            legal = batch.action_mask[r, a]
            probs = 0.7 * logits[r, a][legal].softmax(-1) + 0.3 / legal.sum()
            action = legal[: batch.action[r, a]].sum()
            advantage = (q[r, a][legal][action] - (probs * q[r, a][legal]).sum()).detach()
            policy_terms.append(-advantage * probs[action].log())
            entropy_terms.append(-(probs * probs.log()).sum())
        policies.append(torch.stack(policy_terms).mean())
        entropies.append(torch.stack(entropy_terms).mean())
        expected = expected + policies[-1] - 0.2 * entropies[-1]
        errors = [(q[sample][batch.action[sample]] - batch.target[sample]) ** 2 for sample in samples]
        expected_critic.append(torch.stack(errors).mean())
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(critic, torch.stack(expected_critic), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(stats["policy_loss"], torch.stack(policies).mean(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(stats["entropy"], torch.stack(entropies).mean(), atol=1e-5, rtol=1e-4)
    theirs = torch.autograd.grad(expected, list(agent.actor.parameters()))
    for mine, reference in zip(torch.autograd.grad(loss, list(agent.actor.parameters())), theirs):
        torch.testing.assert_close(mine, reference, atol=1e-5, rtol=1e-3)
    with pytest.raises(RuntimeError):  # the policy gradient leaves the critic alone
        torch.autograd.grad(coma.actor_loss(agent, batch, args)[0], list(agent.critic.parameters()))


def test_an_update_is_a_critic_step_for_each_time_step_backwards_then_an_actor_step():
    args = coma.Args(num_envs=4, num_steps=5, target_network_update_freq=4, max_grad_norm=0.3)
    agent, _, _, batch = collected(args)
    twin = coma.Agent(coma.make_envs(args, 1), args)
    twin.load_state_dict(agent.state_dict())
    twin.epsilon.copy_(agent.epsilon)
    groups = [{"params": network.parameters(), "lr": lr} for network, lr in ((agent.actor, 0.5), (agent.critic, 0.1))]
    metrics = coma.update(agent, torch.optim.SGD(groups), batch, 2, args)
    losses, norms = [], []

    def step(network, loss, lr):
        parameters = list(network.parameters())
        gradients = torch.autograd.grad(loss.sum(), parameters)
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        losses.append(loss.mean().item())
        norms.append(norm.item())
        for p, g in zip(parameters, gradients):
            p.data -= lr * g * min(1, 0.3 / (norm + 1e-6))

    for i, t in enumerate([4, 3, 2, 1, 0]):
        step(twin.critic, coma.critic_loss(twin, coma.Batch(*(x[4 * t : 4 * t + 4] for x in batch))), 0.1)
        if i == 1:  # the 12th of all steps: 10 came before
            twin.target_critic.load_state_dict(twin.critic.state_dict())
    means = {"value_loss": np.mean(losses), "critic_gradients": np.mean(norms)}
    step(twin.actor, coma.actor_loss(twin, batch, args)[0], 0.5)
    means["actor_gradients"] = norms[-1]
    assert {name: metrics[f"train/{name}"].item() for name in means} == pytest.approx(means, rel=1e-4)
    for (name, mine), theirs in zip(agent.named_parameters(), twin.parameters()):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4, msg=name)
    assert any((a != b).any() for a, b in zip(agent.target_critic.parameters(), agent.critic.parameters()))


@pytest.mark.parametrize("script", [coma, coma_lstm])
def test_the_target_has_nothing_in_common_with_what_learns(script):
    """A copy may have a learned layer in the place of the ids, which a target that held it would freeze."""
    args = script.Args(num_envs=2)
    agent = script.Agent(script.make_envs(args, 2), args)
    targets = {*agent.target_critic.modules()}
    assert targets.isdisjoint(agent.critic.modules()) and targets.isdisjoint(agent.actor.modules())
    for ours, theirs in zip(agent.target_critic.parameters(), agent.critic.parameters()):
        assert torch.equal(ours, theirs) and not ours.requires_grad and theirs.requires_grad


def test_targets_come_from_the_target_network(team):
    args = coma.Args(env_id=team, **SMALL, td_lambda=0.0, gamma=0.9)
    agent, rollout, _, batch = collected(args)
    value = coma.of_action(values_of(agent, agent.target_critic, batch), batch.action).detach()
    value, target = value.view(50, 4, 3).numpy(), batch.target.view(50, 4, 3).numpy()
    time = np.arange(49) % 6
    expected = rollout.reward[:-1] + 0.9 * value[1:] * (time != 5)[:, None, None]
    np.testing.assert_allclose(target[:-1], expected, rtol=1e-4, atol=1e-4)
    assert (rollout.reward[5, 0] == 6).all() and (rollout.reward[5, 1] != 6).all()  # terminated, truncated
    assert (rollout.done == (np.arange(50) % 6 == 5)[:, None, None]).all()  # death is no end


def test_a_time_limit_bootstraps_from_the_final_state(team):
    args = coma.Args(env_id=team, **SMALL, gamma=0.9)
    agent, rollout, _, _ = collected(args)
    state, final_obs, alive = torch.tensor([[6.0, 36]]), torch.zeros(1, 3, 3), torch.tensor([[1.0, 0, 0]])
    final_obs[0, 0, :2] = 6  # agent 2 died with the last step
    values = []
    for action in np.ndindex(2, 1, 1):  # what the living agent could do next
        action = torch.tensor([action])
        q = agent.values(agent.target_critic, state, final_obs, alive, agent.others_actions(action, alive))
        value = coma.of_action(q, action)
        values.append(6 + 0.9 * value[0, 0].detach().numpy())
    assert np.abs(np.array(values) - rollout.reward[5, 1, 0]).min() < 1e-4


def test_what_could_be_done_next_at_a_time_limit_is_of_the_final_state(team, monkeypatch):
    """And not of the next episode, whose first state allows another action."""
    given = []
    monkeypatch.setattr(coma, "bootstrap", lambda *args: given.append(args) or np.zeros((len(args[1]), 3), np.float32))
    collected(coma.Args(env_id=f"{team}?varied=True&may_die=False", **SMALL))
    *cuts, _ = given  # the last is where the rollout ends
    assert len(cuts) > 5
    for _, _, state, action_mask, alive in cuts:
        assert alive.all()
        for length, mask in zip(state[:, 0].astype(int), action_mask):
            assert mask[2, 1 - length % 2] and not mask[2, length % 2]


def test_a_rollout_that_ends_within_an_episode_bootstraps_from_what_follows(team):
    args = coma.Args(env_id=team, **SMALL, gamma=0.9)
    agent, rollout, (next_obs, info), batch = collected(args)
    assert not rollout.done[-1].any()
    obs, state, alive = (torch.from_numpy(x).float() for x in (next_obs, info["state"], info["agent_mask"]))
    target, values = batch.target.view(50, 4, 3)[-1], []
    for action in np.ndindex(4, 4, 4):  # what the agents could do next
        action = torch.tensor([action] * 4)
        q = agent.values(agent.target_critic, state, obs, alive, agent.others_actions(action, alive))
        values.append(torch.from_numpy(rollout.reward[-1]) + 0.9 * coma.of_action(q, action).detach())
    assert (torch.stack(values) - target).abs().amax(-1).amin(0).max() < 1e-4  # one of them, in each environment


def test_dead_agents_add_nothing_to_the_policy(team):
    args = coma.Args(env_id=team, **SMALL)
    agent, _, _, batch = collected(args)
    assert 0 < (batch.alive[:, 1] == 0).sum() < 200
    loss, *_ = coma.actor_loss(agent, batch, args)
    noise = (1 - batch.alive)[..., None] * 1e3
    other = batch._replace(obs=batch.obs + noise, others=batch.others + noise)
    torch.testing.assert_close(coma.actor_loss(agent, other, args)[0], loss)


def test_exploration_is_part_of_the_policy():
    args = coma.Args(env_id="matrix/penalty", num_envs=20_000, num_steps=1, share_parameters=False)
    agent, rollout, _, batch = collected(args, epsilon=0.5, scale=1e5)  # sure of one action
    probs = agent.logits(batch.obs, batch.action_mask).softmax(-1)[0].detach()  # the same in every row
    assert probs.min() >= 0.5 / 9 - 1e-6
    frequency = np.stack([(rollout.action[0] == k).mean(0) for k in range(9)], -1)
    np.testing.assert_allclose(frequency, probs, atol=0.015)
    best = rollout.action[0] == probs.argmax(-1).numpy()
    assert abs(best.all(-1).mean() - best.mean(0).prod()) < 0.015  # agents explore one without the other


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("env_id", ["mpe/simple_speaker_listener_v4", "matrix/penalty", "toy/team"])
def test_two_updates_that_two_runs_repeat(env_id, shared, team, tmp_path):
    args = coma.Args(env_id=env_id, **SMALL, share_parameters=shared, runs_dir=str(tmp_path))
    one, same = (load_checkpoint(coma.main(args)) for _ in range(2))
    assert one["step"] == 400
    for key, value in one["modules"]["agent"].items():
        assert torch.isfinite(value).all() and torch.equal(value, same["modules"]["agent"][key])


@pytest.mark.parametrize("script", [coma, coma_lstm])
def test_a_run_explores_and_learns_as_its_flags_say(script, tmp_path, monkeypatch):
    """Exploration falls linearly in environment steps; RMSprop has a rate for each network; updates are counted."""
    plain, seen = script.update, []

    def update(agent, optimizer, batch, num_updates, args):
        seen.append((round(agent.epsilon.item(), 6), num_updates))
        actor, critic = optimizer.param_groups
        assert type(optimizer) is torch.optim.RMSprop and (actor["lr"], critic["lr"]) == (1e-4, 2e-4)
        assert all((group["alpha"], group["eps"]) == (0.99, 1e-5) for group in (actor, critic))
        for group, network in ((actor, agent.actor), (critic, agent.critic)):
            assert set(group["params"]) == set(network.parameters())
        return plain(agent, optimizer, batch, num_updates, args)

    monkeypatch.setattr(script, "update", update)
    flags = SMALL | {"total_timesteps": 800, "epsilon_start": 0.5, "epsilon_end": 0.1, "epsilon_timesteps": 400}
    script.main(script.Args(**flags, learning_rate=1e-4, critic_learning_rate=2e-4, runs_dir=str(tmp_path)))
    assert seen == [(0.5, 0), (0.3, 1), (0.1, 2), (0.1, 3)]


def test_a_resumed_run_goes_on_and_can_be_played(tmp_path, capsys):
    settings = {"target_network_update_freq": 120, "runs_dir": str(tmp_path)}
    folder = coma.main(coma.Args(**SMALL, **settings))
    before = load_checkpoint(folder)["modules"]["agent"]
    coma.main(coma.Args(**SMALL | {"total_timesteps": 600}, **settings, resume=folder))
    after = load_checkpoint(folder)
    assert after["step"] == 600 and {"args.json", "done.json"} <= {path.name for path in folder.iterdir()}
    target, changed = (f"target_critic.{name}" for name in ("1.weight", "5.weight"))
    assert all((before[key] != after["modules"]["agent"][key]).any() for key in (target, changed))  # at step 120 of 150
    metrics = enjoy.main(enjoy.Args(folder, episodes=2))
    assert "coma at step 600, 2 episodes" in capsys.readouterr().out and metrics["eval/ep_length"] == 25


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--env-id mpe/simple_spread_v3?continuous_actions=True", "this script needs discrete ones"),
        ("--epsilon-start 1", "--epsilon-start must be in [0, 1), not 1"),
        ("--total-timesteps 399", "--total-timesteps 399 is less than one rollout of 400 steps"),
    ],
)
def test_bad_input(flags, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["coma.py", *flags.split(), "--runs-dir", str(tmp_path / "runs")])
    with pytest.raises(SystemExit) as exit_:
        launch(coma.main, coma.Args)
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and text in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()
