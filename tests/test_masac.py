"""masac.py: soft targets and losses by enumeration, pairs of critics, temperature, masks, deaths, resume."""

import copy
import dataclasses
import inspect
import json
import math
import sys

from cleanmarl import enjoy, maddpg_multienvs, masac
from cleanmarl.cli import launch
from cleanmarl.evaluate import evaluate
from cleanmarl.masac import Args
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from test_maddpg import CPU, SMALL, alone, norm_of_each, played, world
from toys import code, double, scalars


def case(individual, **changes):
    """In float64, with temperatures that differ between agents."""
    args = Args(individual_critics=individual, **changes)
    agent, critic, buffer = played(masac, world(3), args)
    agent.log_temperature.data = torch.tensor([-1.0, 0.5, 0.2], dtype=torch.float64)
    return args, agent, critic, double(buffer.sample(5, CPU))


def test_copied_parts_are_those_of_the_parent():
    names = ["make_envs", "gumbel_noise", "make_policy", "Batch", "Buffer", "padded", "reward_moments"]
    for name in [*names, "reward_of_team", "collect", "descend", "soft_update"]:
        assert code(getattr(masac, name)) == code(getattr(maddpg_multienvs, name)), name
    assert inspect.getsource(masac.Agent.logits) == inspect.getsource(maddpg_multienvs.Agent.logits)


def values(network, individual, i, state, action):
    """Values (K,) of agent i's actions in a state (S,), by one of the critics, where all do as in action (A, K)."""
    others = [torch.zeros_like(action[j]) if j == i else action[j] for j in range(len(action))]
    x = torch.cat([state, *others])
    if individual:
        return alone(network, i)(x)
    return alone(list(network)[1:], 0)(torch.cat([x, torch.eye(len(action), dtype=x.dtype)[i]]))


# proves masac-1
@pytest.mark.parametrize("individual", [False, True])
def test_critics_are_ordinary_networks_of_the_state_and_what_the_others_do(individual):
    _, _, critic, batch = case(individual)
    q = critic(batch.state[:, :-1], batch.action)
    B, T = batch.action.shape[:2]
    assert q.shape == (2, B, T, 3, 4) and (q[0] != q[1]).all()
    for b, t, i in np.ndindex(2, T, 3):
        for k, network in enumerate((critic.critic, critic.critic2)):
            expected = values(network, individual, i, batch.state[b, t], batch.action[b, t])
            torch.testing.assert_close(q[k, b, t, i], expected)
    assert len(critic.critic[-1].weight) == (3 if individual else 1)


# proves masac-2, masac-3, masac-4
@pytest.mark.parametrize("individual", [False, True])
def test_critic_target_is_a_sum_over_the_agents_own_actions(individual):
    """Of the smaller value minus the weighted log-probability. The others' actions are samples of their policies."""
    args, agent, critic, batch = case(individual)

    class Spy(nn.Module):
        def forward(self, state, action):
            self.action = action
            return critic(state, action)

    spy = Spy()
    torch.manual_seed(3)
    ours = masac.critic_targets(agent, spy, batch, args.gamma)
    mask = batch.action_mask[:, 1:]
    assert set(spy.action.unique().tolist()) == {0, 1} and (spy.action.sum(-1) == 1).all()
    assert mask[spy.action.bool() & mask.any(-1, keepdim=True)].all()
    assert not ours.requires_grad and set(batch.goes_on.unique().tolist()) == {0, 1}
    temperature = [math.exp(x) for x in (-1.0, 0.5, 0.2)]
    for b, t, i in np.ndindex(2, *ours.shape[1:]):
        if not batch.weight[b, t].any():
            continue
        m, legal = (i if individual else 0), mask[b, t, i].nonzero()[:, 0].tolist()
        probs = agent.actor(batch.obs[b, t + 1])[i, legal].softmax(-1)
        pair = [
            values(network, individual, i, batch.state[b, t + 1], spy.action[b, t])
            for network in (critic.critic, critic.critic2)
        ]
        value = sum(p * (min(q[a] for q in pair) - temperature[i] * p.log()) for p, a in zip(probs, legal))
        expected = batch.reward[b, t, m] + (args.gamma * value if batch.goes_on[b, t, m] else 0)
        torch.testing.assert_close(ours[b, t, i], expected)


def test_a_soft_target_by_hand():
    """One agent of two, two actions, logits 0 and ln 3: probabilities 1/4 and 3/4, temperature 2."""
    envs = world(1)
    agent, batch = masac.Agent(envs, Args()).double(), case(True)[3]
    agent.log_temperature.data.fill_(math.log(2))
    mask = torch.zeros_like(batch.action_mask)
    mask[..., :2] = True
    logits = torch.tensor([0, math.log(3), 50, 50], dtype=torch.float64)
    agent.actor = nn.Sequential(nn.Linear(6, 4, dtype=torch.float64))
    agent.actor[0].weight.data.zero_()
    agent.actor[0].bias.data.copy_(logits)
    agent.actor.insert(0, masac.AgentIds(3).double())

    class Two(nn.Module):
        def forward(self, state, action):
            pair = torch.tensor([[8.0, 4, 99, 99], [12, 2, 99, 99]], dtype=torch.float64)
            return pair[:, None, None, None].expand(-1, *action.shape[:3], -1)

    ours = masac.critic_targets(agent, Two(), batch._replace(action_mask=mask), 0.5)
    value = 0.25 * (8 + 2 * math.log(4)) + 0.75 * (2 + 2 * math.log(4 / 3))  # 3.5 + 2 * 0.5623
    assert value == pytest.approx(4.6247, abs=1e-4)
    torch.testing.assert_close(ours, batch.reward + 0.5 * batch.goes_on * value)


@pytest.mark.parametrize("individual", [False, True])
def test_critic_loss_is_that_of_two_critics_of_the_actions_taken(individual):
    args, agent, critic, batch = case(individual)
    target = masac.critic_targets(agent, critic, batch, args.gamma)
    loss = masac.critic_loss(critic, batch, target)
    q = critic(batch.state[:, :-1], batch.action)
    taken = q.gather(-1, batch.action.argmax(-1)[None, ..., None].expand(2, -1, -1, -1, -1))[..., 0]
    for i in range(3):
        keep = batch.weight[..., i if individual else 0].bool()
        expected = sum(F.mse_loss(taken[k, ..., i][keep], target[..., i][keep]) for k in range(2))
        torch.testing.assert_close(loss[i], expected)
    gradients = torch.autograd.grad(loss[0], list(critic.parameters()))
    if individual:
        assert all((g[0] != 0).any() and (g[1:] == 0).all() for g in gradients)  # nobody else learns from it


# proves masac-2, masac-4
@pytest.mark.parametrize("individual", [False, True])
def test_actor_loss_is_the_expectation_over_legal_actions(individual):
    """Enumerated for every living agent; the gradient is REINFORCE's, weighted by the whole value of an action."""
    _, agent, critic, batch = case(individual)
    loss, entropy = masac.actor_loss(agent, critic, batch)
    parameters = list(agent.actor.parameters())
    ours = torch.autograd.grad(loss, parameters)
    total, surrogate = 0, 0
    temperature = [math.exp(x) for x in (-1.0, 0.5, 0.2)]
    for b, t, i in np.ndindex(batch.alive.shape):
        if not batch.alive[b, t, i]:
            continue
        legal = batch.action_mask[b, t, i].nonzero()[:, 0].tolist()
        probs = agent.actor(batch.obs[b, t])[i, legal].softmax(-1)
        pair = [
            values(network, individual, i, batch.state[b, t], batch.action[b, t]).detach()
            for network in (critic.critic, critic.critic2)
        ]
        q = torch.minimum(*pair)[legal]
        soft = q - temperature[i] * probs.log()
        total = total - (probs * soft).sum() / batch.alive.sum()
        surrogate = surrogate - (probs.detach() * soft.detach() * probs.log()).sum() / batch.alive.sum()
        torch.testing.assert_close(entropy[b, t, i], -(probs * probs.log()).sum())
    torch.testing.assert_close(loss, total)
    assert not entropy.requires_grad
    for a, b in zip(ours, torch.autograd.grad(surrogate, parameters)):
        torch.testing.assert_close(a, b)
    assert (
        torch.autograd.grad(masac.actor_loss(agent, critic, batch)[0], agent.log_temperature, allow_unused=True)[0]
        is None
    )


# proves masac-5
def test_the_temperature_rises_below_the_target_entropy_and_falls_above_it():
    """And stays at it: agent 0 has two actions, agent 1 four, agent 2 two of three legal ones."""
    args, agent, _, batch = case(True, target_entropy=0.3)
    legal = torch.tensor([2.0, 4.0, 2.0]).double()
    target = 0.3 * legal.log()
    for offset, sign in ((-0.1, -1), (0.0, 0), (0.1, 1)):
        entropy = (target + offset).expand(*batch.alive.shape[:2], 3)
        dead = batch.alive == 0
        assert dead[..., 1].any()
        loss = masac.temperature_loss(agent, torch.where(dead, 100.0, entropy), batch, args.target_entropy)
        (gradient,) = torch.autograd.grad(loss, agent.log_temperature)
        share = batch.alive.sum((0, 1)) / batch.alive.sum()
        torch.testing.assert_close(gradient, agent.temperature.detach() * share * offset, rtol=1e-5, atol=1e-6)
        assert (gradient.sign() == sign).all() or sign == 0


def test_the_entropy_settles_at_its_target():
    """With fixed values: the temperature ends where softmax(q / temperature) has the entropy that was asked for."""
    args, agent, _, batch = case(True, target_entropy=0.5)

    class Fixed(nn.Module):
        def forward(self, state, action):
            return torch.tensor([0.0, 1.0, 2.0, 4.0]).double().expand(2, *action.shape)

    optimizer = torch.optim.Adam(agent.parameters(), lr=0.03)
    for _ in range(200):
        loss, entropy = masac.actor_loss(agent, Fixed(), batch)
        optimizer.zero_grad()
        (loss + masac.temperature_loss(agent, entropy, batch, args.target_entropy)).backward()
        optimizer.step()
    of_agent = (entropy * batch.alive).sum((0, 1)) / batch.alive.sum((0, 1))
    torch.testing.assert_close(of_agent, 0.5 * torch.tensor([2.0, 4.0, 2.0]).double().log(), atol=0.02, rtol=0)
    temperature = agent.temperature[1].item()
    probs = (torch.tensor([0.0, 1.0, 2.0, 4.0]) / temperature).softmax(-1)
    assert -(probs * probs.log()).sum().item() == pytest.approx(0.5 * math.log(4), abs=0.05)


@pytest.mark.parametrize("individual", [False, True])
def test_padding_and_the_dead_add_nothing(individual):
    """A team's value goes on after a death, so its critic learns from the dead: from what the others do, no more."""
    args, agent, critic, batch = case(individual)
    lengths = batch.alive[..., 0].sum(1, keepdim=True)
    rows = torch.arange(batch.obs.shape[1]) > lengths  # (B, T + 1), the row after the last step counts
    steps = torch.arange(batch.action.shape[1]) >= lengths
    dead = (1 - batch.alive) * ~steps[..., None]
    assert rows.any() and dead.any()
    mask = batch.action_mask & ~rows[..., None, None]
    obs = batch.obs + 1e3 * rows[..., None, None]
    obs[:, :-1] += 1e3 * dead[..., None]
    other = batch._replace(
        obs=obs,
        state=batch.state + 1e3 * rows[..., None],
        action_mask=mask,
        action=batch.action + 1e3 * steps[..., None, None],
        reward=batch.reward + 1e3 * steps[..., None] + (1e3 * dead if individual else 0),
    )
    results = []
    for each in (batch, other):
        torch.manual_seed(5)
        target = masac.critic_targets(agent, critic, each, args.gamma)
        loss, entropy = masac.actor_loss(agent, critic, each)
        loss = loss + masac.temperature_loss(agent, entropy, each, 0.5)
        losses = masac.critic_loss(critic, each, target).sum(), loss
        gradients = torch.autograd.grad(losses[0], list(critic.parameters()))
        gradients += torch.autograd.grad(losses[1], list(agent.parameters()))
        results.append([target * each.weight, *losses, *gradients])
    for ours, theirs in zip(*results):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs)


def test_update_is_two_descents_with_the_critics_first():
    args, agent, critic, batch = case(True)
    target_critic, (agent2, critic2) = copy.deepcopy(critic), copy.deepcopy((agent, critic))
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-2, fused=True) for net in (agent, critic)]
    reference = [torch.optim.Adam(net.parameters(), lr=1e-2) for net in (agent2, critic2)]
    torch.manual_seed(9)
    metrics = masac.update(agent, critic, target_critic, optimizers, batch, args)
    torch.manual_seed(9)
    target = masac.critic_targets(agent2, target_critic, batch, args.gamma)
    critic_loss = masac.critic_loss(critic2, batch, target)
    critic_loss.sum().backward()
    norm = norm_of_each(critic2.critic, 3).mean().item()
    reference[1].step()
    loss, entropy = masac.actor_loss(agent2, critic2, batch)
    agent2.zero_grad()
    (loss + masac.temperature_loss(agent2, entropy, batch, args.target_entropy)).backward()
    of_actor = norm_of_each(agent2.actor, 1).mean().item()
    reference[0].step()
    for net, other in ((agent, agent2), (critic, critic2)):
        for p, q in zip(net.parameters(), other.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    assert metrics["train/actor_loss"] == pytest.approx(loss.item()) and metrics["train/num_updates"] == 1
    assert metrics["train/critic_loss"] == pytest.approx(critic_loss.mean().item())
    assert metrics["train/critic_gradients"] == pytest.approx(norm)
    assert metrics["train/actor_gradients"] == pytest.approx(of_actor)
    assert metrics["train/entropy"] == pytest.approx(entropy[batch.alive.bool()].mean().item())
    assert metrics["train/temperature"] == pytest.approx(np.exp([-1, 0.5, 0.2]).mean())


def test_targets_follow_the_critics(tmp_path):
    args = Args(**SMALL | {"total_timesteps": 100}, polyak=1.0, runs_dir=str(tmp_path))
    for polyak in (1.0, 0.5):
        modules = load_checkpoint(masac.main(dataclasses.replace(args, polyak=polyak)))["modules"]
        for key, x in modules["critic"].items():
            distance = (modules["target_critic"][key] - x).abs().max()
            assert distance == 0 if polyak == 1 or key == "num_updates" else 0 < distance < 0.02


@pytest.mark.parametrize("env_id, num_envs", [("mpe/simple_spread_v3", 4), ("toy/team?varied=True", 1)])
def test_runs_resume_and_same_seed_same_losses(env_id, num_envs, toy, tmp_path):
    args = Args(env_id=env_id, **SMALL | {"total_timesteps": 40 * num_envs}, num_envs=num_envs, epochs=2)
    args = dataclasses.replace(args, runs_dir=str(tmp_path))
    folder = masac.main(args)
    first, second, saved = scalars(folder), scalars(masac.main(args)), load_checkpoint(folder)
    for tag in ("train/critic_loss", "train/actor_loss", "train/temperature", "train/entropy", "eval/ep_reward"):
        assert first[tag] == second[tag]
    is_team = json.loads((folder / "args.json").read_text())["args"]["individual_critics"] is False
    assert is_team == (env_id == "toy/team?varied=True") == (len(saved["modules"]["critic"]["critic.1.weight"]) == 1)
    assert (saved["modules"]["agent"]["log_temperature"] != 0).all()
    masac.main(dataclasses.replace(args, resume=folder, total_timesteps=80 * num_envs))
    after = load_checkpoint(folder)
    assert after["step"] >= 80 * num_envs
    assert len(after["modules"]["buffer"]["lengths"]) == after["num_episodes"] > saved["num_episodes"]
    assert after["modules"]["critic"]["num_updates"] > saved["modules"]["critic"]["num_updates"] > 0
    assert all(np.isfinite(value) for _, value in scalars(folder)["train/critic_loss"])
    if num_envs == 4:
        assert np.isfinite(enjoy.main(enjoy.Args(folder, episodes=3, greedy=True))["eval/ep_reward"])


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--env-id mpe/simple_spread_v3?continuous_actions=True", "try a ..._continuous_action.py"),
        ("--target-entropy 1", "--target-entropy must be in [0, 1), not 1.0"),
        ("--batch-size 20 --buffer-size 10", "--batch-size 20 episodes do not fit into --buffer-size 10"),
    ],
)
def test_bad_input(flags, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["masac.py", *flags.split(), "--runs-dir", str(tmp_path / "runs")])
    with pytest.raises(SystemExit) as exit_:
        launch(masac.main, Args)
    line = capsys.readouterr().err
    assert exit_.value.code == 2 and line.startswith("masac: ") and text in line and line.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.learning
def test_is_better_than_the_untrained_policy_in_seconds(tmp_path):
    args = Args(env_id="mpe/simple_speaker_listener_v4", total_timesteps=20_000, runs_dir=str(tmp_path))
    args = dataclasses.replace(args, eval_steps=10**6, eval_episodes=0)
    folder = masac.main(args)
    envs = masac.make_envs(args, 32)
    agent = masac.Agent(envs, args)
    untrained = evaluate(envs, masac.make_policy(agent, greedy=False), 320, seed=7)
    agent.load_state_dict(load_checkpoint(folder)["modules"]["agent"])
    trained = evaluate(envs, masac.make_policy(agent, greedy=False), 320, seed=7)
    error = np.hypot(untrained["eval/std_ep_reward"], trained["eval/std_ep_reward"]) / np.sqrt(320)
    assert trained["eval/ep_reward"] - untrained["eval/ep_reward"] > 5 * error
