"""maddpg.py: critics and gradients against loops over agents, the replay buffer, masks, deaths, resume, bad input."""

import copy
import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path

from cleanmarl import enjoy, maddpg, maddpg_continuous_action
from cleanmarl.cli import launch
from cleanmarl.envs import make
from cleanmarl.evaluate import evaluate
from cleanmarl.layers import StackedLinear, as_numpy
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from toys import Quiet, Toy, double, hears, scalars, wait_for

SMALL = {"total_timesteps": 400, "batch_size": 4, "eval_episodes": 0, "eval_steps": 4, "num_eval_ep": 2, "log_every": 2}
CPU = torch.device("cpu")


def world(num_envs: int, **options) -> Toy:
    """Toy environments whose episodes have 5, 6 and 7 steps, in which what agents see depends on what they did."""
    return Toy(num_envs, see="past", varied=True, **options)


def played(script, envs, args, num_episodes=12, scale=1.0):
    """Agent, critic and a buffer with episodes, all in float64 but the buffer."""
    torch.manual_seed(0)
    agent, critic = script.Agent(envs, args), script.Critic(envs, args)
    with torch.no_grad():
        for p in agent.parameters():
            p *= scale
    buffer, run = script.Buffer(envs, args), Quiet()
    now = envs.reset(seed=1)
    if hasattr(script, "first_memory"):
        now = (*now, script.first_memory(agent, *now[0].shape[:2]))
    while run.num_episodes < num_episodes:
        now = script.collect(agent, envs, now, buffer, run)
    return agent.double(), critic.double(), buffer


def case(individual, env=None, **changes):
    args = maddpg.Args(individual_critics=individual, **changes)
    agent, critic, buffer = played(maddpg, env or world(3), args)
    return args, agent, critic, double(buffer.sample(5, CPU))


def alone(stacked, m):
    """Network m of a stack as an ordinary network."""
    layers = []
    for layer in stacked:
        if isinstance(layer, StackedLinear):
            linear = nn.Linear(layer.weight.shape[1], layer.weight.shape[2], dtype=layer.weight.dtype)
            linear.weight.data, linear.bias.data = layer.weight[m].T.detach().clone(), layer.bias[m, 0].detach().clone()
            layer = linear
        layers.append(layer)
    return nn.Sequential(*layers)


# ------------------------------------------------------------------------------------------------------------ networks


# proves maddpg-1
@pytest.mark.parametrize("individual", [False, True])
def test_critics_are_ordinary_networks_of_state_and_all_actions(individual):
    _, _, critic, batch = case(individual)
    q = critic(batch.state[:, :-1], batch.action[:, :, None])
    B, T = batch.action.shape[:2]
    assert q.shape == (B, T, 3 if individual else 1)
    for m in range(q.shape[-1]):
        network = alone(critic.critic, m)
        for b, t in np.ndindex(B, T):
            x = torch.cat([batch.state[b, t], *batch.action[b, t]])
            torch.testing.assert_close(q[b, t, m], network(x)[0])


@pytest.mark.parametrize("individual", [False, True])
@pytest.mark.parametrize("num_layers", [0, 2])
@pytest.mark.parametrize("edited", [False, True])
def test_agents_may_look_at_joint_actions_of_their_own(individual, num_layers, edited):
    """Joint action i is for agent i's critic, whatever layers somebody writes."""
    _, _, critic, batch = case(individual, critic_num_layers=num_layers)
    if edited:
        size = batch.state.shape[-1] + 12
        critic.critic = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, size), nn.GELU(), *critic.critic).double()
    joint = torch.rand(*batch.action.shape[:2], 3, 3, 4).double()
    q = critic(batch.state[:, :-1], joint)
    for i in range(3):
        expected = critic(batch.state[:, :-1], joint[:, :, i : i + 1])[..., i if individual else 0]
        torch.testing.assert_close(q[..., i], expected)


@pytest.mark.parametrize("agent_ids", [True, False])
@pytest.mark.parametrize("num_layers", [0, 1, 3])
def test_the_actor_that_acts_is_the_actor_that_learns(agent_ids, num_layers):
    args = maddpg.Args(agent_ids=agent_ids, actor_num_layers=num_layers, individual_critics=True)
    envs = world(4)
    agent = maddpg.Agent(envs, args)
    obs, info = envs.reset()
    mask = torch.from_numpy(info["action_mask"])
    theirs = agent.logits(torch.from_numpy(obs)[None], mask[None])[0]
    ours = as_numpy(agent.actor)(obs)
    np.testing.assert_allclose(ours[info["action_mask"]], theirs[mask].detach(), rtol=1e-5, atol=1e-6)
    assert (theirs[~mask] < -1e7).all()
    logits = agent.actor(torch.from_numpy(obs)[:, :1].expand(-1, 3, -1))  # the same observation for all agents
    assert torch.equal(logits[:, 0], logits[:, 1]) == (not agent_ids)


# proves maddpg-2
def test_what_acts_are_samples_of_the_policy():
    agent, _, buffer = played(maddpg, world(8), maddpg.Args(buffer_size=500), num_episodes=500, scale=2.0)
    obs, mask = (
        torch.from_numpy(np.concatenate([getattr(e, x)[:-1] for e in buffer.episodes])) for x in ("obs", "action_mask")
    )
    taken, alive = (np.concatenate([getattr(e, name) for e in buffer.episodes]) for name in ("action", "alive"))
    policy = agent.logits(obs[None].double(), mask[None])[0].softmax(-1).detach().numpy()
    frequency, expected = ((x * alive[..., None]).sum(0) / alive.sum(0)[:, None] for x in (taken, policy))
    assert len(taken) > 2000 and (policy.max(-1) < 0.9).mean() > 0.5  # far from what is most probable
    np.testing.assert_allclose(frequency, expected, atol=0.03)


def test_hard_samples_have_the_probabilities_of_the_policy_and_soft_ones_are_legal():
    """The mean of a hard Gumbel-Softmax sample is the softmax, in collection (NumPy) and in training (torch)."""
    torch.manual_seed(1)
    mask = torch.tensor([True, True, False, True])
    logits = torch.tensor([0.5, -1.0, 2.0, 1.0]).masked_fill(~mask, -1e8)
    many = logits.expand(100_000, -1)
    noisy = np.where(mask, logits.numpy() + maddpg.gumbel_noise(*many.shape), -np.inf)
    collected = np.bincount(noisy.argmax(-1), minlength=4) / len(many)
    np.testing.assert_allclose(collected, logits.softmax(-1), atol=0.006)
    np.testing.assert_allclose(F.gumbel_softmax(many, hard=True).mean(0), logits.softmax(-1), atol=0.006)
    soft = F.gumbel_softmax(many, hard=False)
    assert (soft[:, 2] == 0).all() and torch.allclose(soft.sum(-1), torch.ones(len(many)))
    assert (soft.argmax(-1) == 0).float().mean() == pytest.approx(logits.softmax(-1)[0].item(), abs=0.006)


# -------------------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("individual", [False, True])
def test_critic_target_is_its_definition(individual):
    """Step by step, for next states with one legal action each, which the target policy has to take."""
    args, agent, critic, batch = case(individual)
    torch.manual_seed(3)
    only = torch.randint(2, batch.action_mask.shape[:3])
    batch = batch._replace(action_mask=F.one_hot(only, 4).bool())
    ours = maddpg.critic_targets(agent, critic, batch, args.gamma)
    assert set(batch.goes_on.unique().tolist()) == {0, 1} and not ours.requires_grad
    for b, t in np.ndindex(batch.action.shape[:2]):
        next_action = F.one_hot(only[b, t + 1], 4).double()
        for m in range(ours.shape[-1]):
            value = alone(critic.critic, m)(torch.cat([batch.state[b, t + 1], *next_action]))[0]
            expected = batch.reward[b, t, m] + (args.gamma * value if batch.goes_on[b, t, m] else 0)
            torch.testing.assert_close(ours[b, t, m], expected)


# proves maddpg-5
def test_next_actions_are_legal_hard_samples_of_the_target_policy():
    _, agent, _, batch = case(True)

    class Spy(nn.Module):
        def forward(self, state, action):
            self.action = action[:, :, 0]
            return torch.zeros(*action.shape[:2], 3)

    spy = Spy()
    maddpg.critic_targets(agent, spy, batch, 0.99)
    assert set(spy.action.unique().tolist()) == {0, 1} and (spy.action.sum(-1) == 1).all()
    mask = batch.action_mask[:, 1:]
    assert mask[spy.action.bool() & mask.any(-1, keepdim=True)].all()
    assert len(spy.action.flatten(0, 2).unique(dim=0)) == 4


@pytest.mark.parametrize("individual", [False, True])
def test_critic_loss_and_gradient_are_those_of_critics_trained_alone(individual):
    args, agent, critic, batch = case(individual)
    target = maddpg.critic_targets(agent, critic, batch, args.gamma)
    loss = maddpg.critic_loss(critic, batch, target)
    gradients = torch.autograd.grad(loss.sum(), list(critic.parameters()))
    x = torch.cat([batch.state[:, :-1], batch.action.flatten(2)], dim=-1)
    for m in range(len(loss)):
        network, keep = alone(critic.critic, m), batch.weight[..., m].bool()
        expected = F.mse_loss(network(x[keep])[:, 0], target[..., m][keep])
        torch.testing.assert_close(loss[m], expected)
        for ours, theirs in zip(gradients, torch.autograd.grad(expected, list(network.parameters()))):
            torch.testing.assert_close(ours[m].reshape(-1), theirs.t().reshape(-1))


# proves maddpg-2, maddpg-3
@pytest.mark.parametrize("individual", [False, True])
def test_actor_gradient_is_that_of_a_loop_over_agents(individual):
    """Agent i's part: only action i comes from the policy, all others from the buffer; a dead agent has no part."""
    _, agent, critic, batch = case(individual)
    torch.manual_seed(7)
    loss = maddpg.actor_loss(agent, critic, batch)
    parameters = list(agent.parameters())
    ours = torch.autograd.grad(loss, parameters)
    torch.manual_seed(7)
    own = F.gumbel_softmax(agent.logits(batch.obs[:, :-1], batch.action_mask[:, :-1]), hard=False)
    total = 0
    for i in range(3):
        joint = [own[:, :, j] if j == i else batch.action[:, :, j] for j in range(3)]
        q = critic(batch.state[:, :-1], torch.stack(joint, dim=2)[:, :, None])[..., i if individual else 0]
        alive = batch.alive[..., i].bool()
        assert i != 1 or not alive.all()
        total = total - q[alive].sum()
    total = total / batch.alive.sum()
    torch.testing.assert_close(loss, total)
    for a, b in zip(ours, torch.autograd.grad(total, parameters)):
        torch.testing.assert_close(a, b)


# proves maddpg-8
def test_large_logits_of_legal_actions_and_living_agents_cost():
    """A mean over the rows of the mean square of all logits, in which those of illegal actions are 0."""
    _, agent, critic, batch = case(True)
    parameters, losses = list(agent.parameters()), []
    for reg in (0.0, 0.5):
        torch.manual_seed(7)
        losses.append(maddpg.actor_loss(agent, critic, batch, reg))
    logits, squares = agent.actor(batch.obs.flatten(0, 1)).view(batch.action_mask.shape), []
    for b, t, i in batch.alive.nonzero().tolist():
        squares.append(logits[b, t, i][batch.action_mask[b, t, i]].square().sum() / batch.action_mask.shape[-1])
    expected = 0.5 * torch.stack(squares).mean()
    torch.testing.assert_close(losses[1] - losses[0], expected)
    for ours, theirs in zip(*(torch.autograd.grad(x, parameters) for x in (losses[1] - losses[0], expected))):
        torch.testing.assert_close(ours, theirs)


# proves maddpg-6
@pytest.mark.parametrize("individual", [False, True])
def test_padding_adds_nothing(individual):
    """Losses and gradients are finite and stay the same whatever stands after the end of an episode."""
    args, agent, critic, batch = case(individual)
    lengths = batch.alive[..., 0].sum(1, keepdim=True)  # agent 0 never dies
    rows = torch.arange(batch.obs.shape[1]) > lengths  # (B, T + 1), the row after the last step counts
    steps = torch.arange(batch.action.shape[1]) >= lengths
    assert rows.any()
    other = batch._replace(
        state=batch.state + 1e3 * rows[..., None],
        obs=batch.obs + 1e3 * rows[..., None, None],
        action_mask=batch.action_mask & ~rows[..., None, None],  # no legal action at all
        action=batch.action + 1e3 * steps[..., None, None],
        reward=batch.reward + 1e3 * steps[..., None],
    )
    assert_same_losses(args, agent, critic, batch, other)


@pytest.mark.parametrize("individual", [False, True])
def test_dead_agents_add_nothing(individual):
    """What a dead agent sees and earns changes no loss: neither its own actor's nor its own critic's."""
    args, agent, critic, batch = case(individual)
    dead = (1 - batch.alive) * batch.alive.any(-1, keepdim=True)
    assert dead[..., 1].any() and not dead[:, 0].any()
    obs = batch.obs.clone()
    obs[:, :-1] += 1e3 * dead[..., None]
    masks = batch.action_mask.clone()
    masks[..., 1, :] = torch.tensor([True, False, False, False])  # as after a death: its next action is no question
    batch = batch._replace(action_mask=masks)
    reward = batch.reward + 1e3 * dead if individual else batch.reward
    assert_same_losses(args, agent, critic, batch, batch._replace(obs=obs, reward=reward))


def assert_same_losses(args, agent, critic, *batches):
    results = []
    for batch in batches:
        torch.manual_seed(5)
        target = maddpg.critic_targets(agent, critic, batch, args.gamma)
        losses = maddpg.critic_loss(critic, batch, target).sum(), maddpg.actor_loss(agent, critic, batch)
        gradients = torch.autograd.grad(losses[0], list(critic.parameters()))
        gradients += torch.autograd.grad(losses[1], list(agent.parameters()))
        results.append([target * batch.weight, *losses, *gradients])
    for ours, theirs in zip(*results):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs)


def test_descend_clips_each_network_by_its_own_norm():
    for max_norm in (-1.0, 0.1, 1e9):
        critic = case(True)[2]
        before = [p.detach().clone() for p in critic.parameters()]
        loss = sum((p * (1 + torch.arange(3).reshape(3, 1, 1))).sum() for p in critic.parameters())
        size = sum(p[0].numel() for p in critic.parameters())
        norm = maddpg.descend(loss, critic, torch.optim.SGD(critic.parameters(), lr=1.0), max_norm)
        norms = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) * size**0.5
        torch.testing.assert_close(norm["critic"], norms.mean())
        for p, old in zip(critic.parameters(), before):
            for m in range(3):
                factor = min(1.0, max_norm / norms[m].item()) if max_norm > 0 else 1.0
                torch.testing.assert_close(
                    old[m] - p[m], torch.full_like(p[m], factor * (m + 1)), rtol=1e-5, atol=1e-12
                )


# proves maddpg-4
def test_soft_update_moves_the_share_polyak_of_the_way():
    _, agent, _, _ = case(True)
    target, before = copy.deepcopy(agent), copy.deepcopy(agent)
    with torch.no_grad():
        for p in agent.parameters():
            p += 1
    for k in range(1, 4):
        maddpg.soft_update(target, agent, 0.25)
        for t, old in zip(target.parameters(), before.parameters()):
            torch.testing.assert_close(t, old + 1 - 0.75**k)
    maddpg.soft_update(target, agent, 1.0)
    assert all(torch.equal(t, p) for t, p in zip(target.parameters(), agent.parameters()))


def others(*networks):
    """Copies with other weights."""
    copies = copy.deepcopy(networks)
    for network in copies:
        for p in network.parameters():
            p.data.mul_(1.5)
    return copies


@pytest.mark.parametrize("script", [maddpg, maddpg_continuous_action])
def test_an_update_clips_the_gradients_of_actor_and_critics(script):
    """Steps of SGD at rate 1 are as long as the clip says."""
    args = script.Args(individual_critics=True, clip_gradients=0.001)
    agent, critic, buffer = played(script, world(3, continuous=script is maddpg_continuous_action), args)
    before = copy.deepcopy((agent, critic))
    optimizers = [torch.optim.SGD(net.parameters(), lr=1.0) for net in (agent, critic)]
    script.update(agent, critic, others(agent, critic), optimizers, double(buffer.sample(5, CPU)), args)
    steps = [
        torch.cat([(p - q).reshape(M, -1) for p, q in zip(net.parameters(), old.parameters())], 1).norm(dim=1)
        for net, old, M in ((agent, before[0], 1), (critic, before[1], 3))
    ]
    torch.testing.assert_close(torch.cat(steps), torch.full((4,), 0.001, dtype=torch.float64), rtol=1e-3, atol=0)


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "SGD"])
def test_update_is_two_descents_with_the_critic_first(optimizer):
    """Against an update written out with torch's own classes, losses and all."""
    args, agent, critic, batch = case(True, optimizer=optimizer)
    targets = others(agent, critic)
    agent2, critic2 = copy.deepcopy((agent, critic))
    make_optimizer = getattr(torch.optim, optimizer)
    optimizers = [make_optimizer(net.parameters(), lr=1e-2, fused=True) for net in (agent, critic)]
    torch.manual_seed(9)
    metrics = maddpg.update(agent, critic, targets, optimizers, batch, args)
    assert {key.removeprefix("train/") for key in metrics} == {
        *("critic_loss", "actor_loss", "critic_gradients", "actor_gradients", "num_updates")
    }
    torch.manual_seed(9)
    reference = [make_optimizer(net.parameters(), lr=1e-2) for net in (agent2, critic2)]
    target = maddpg.critic_targets(*targets, batch, args.gamma)
    critic_loss = maddpg.critic_loss(critic2, batch, target)
    critic_loss.sum().backward()
    norms = {"critic": norm_of_each(critic2, 3)}
    reference[1].step()
    loss = maddpg.actor_loss(agent2, critic2, batch, args.reg)
    agent2.zero_grad()
    loss.backward()
    norms["actor"] = norm_of_each(agent2, 1)
    reference[0].step()
    for net, other in ((agent, agent2), (critic, critic2)):
        for p, q in zip(net.parameters(), other.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    assert metrics["train/actor_loss"] == pytest.approx(loss.item()) and metrics["train/num_updates"] == 1
    assert metrics["train/critic_loss"] == pytest.approx(critic_loss.mean().item())
    for name, norm in norms.items():
        assert metrics[f"train/{name}_gradients"] == pytest.approx(norm.mean().item())


def norm_of_each(network, M):
    """The norms (M,) of the gradients of M networks whose parameters are stacked, or of one."""
    return torch.cat([p.grad.reshape(M, -1) for p in network.parameters()], 1).norm(dim=1)


# -------------------------------------------------------------------------------------------------------------- buffer


def recorded(script, envs, args, num_steps, seed=0):
    """A buffer fed with random legal steps, and lists of what every finished episode was, row by row."""
    rng, buffer = np.random.default_rng(seed), script.Buffer(envs, args)
    obs, info = envs.reset()
    open_, finished = [[] for _ in range(envs.num_envs)], []
    for _ in range(num_steps):
        action = np.where(info["action_mask"], rng.random(info["action_mask"].shape), -1).argmax(-1)
        one_hot = np.eye(4, dtype=np.float32)[action]
        next_obs, reward, termination, truncation, next_info = envs.step(one_hot if envs.continuous else action)
        buffer.add(obs, info, one_hot, reward, termination, truncation, next_info)
        for i in range(envs.num_envs):
            row = {key: info[key][i].copy() for key in ("state", "action_mask", "agent_mask")}
            open_[i].append({"obs": obs[i].copy(), "action": one_hot[i], "reward": reward[i].copy(), **row})
            if termination[i] or truncation[i]:
                final = {key: next_info[f"final_{key}"][i].copy() for key in ("obs", "state", "action_mask")}
                final["agent_mask"] = next_info["final_agent_mask"][i].copy()
                finished.append((open_[i], final, bool(termination[i])))
                open_[i] = []
        obs, info = next_obs, next_info
    return buffer, finished


# proves maddpg-6
@pytest.mark.parametrize("capacity", [100, 5])
def test_buffer_keeps_whole_episodes_and_forgets_the_oldest(capacity):
    args = maddpg.Args(individual_critics=True, buffer_size=capacity, batch_size=5)
    buffer, finished = recorded(maddpg, world(3), args, 50)
    assert len(buffer.episodes) == min(capacity, len(finished)) and len(finished) > 20
    for episode, (steps, final, _) in zip(buffer.episodes, finished[-capacity:], strict=True):
        for name in ("obs", "state", "action_mask"):
            expected = [*(step[name] for step in steps), final[name]]
            np.testing.assert_array_equal(getattr(episode, name), np.stack(expected))
        for name in ("action", "reward"):
            np.testing.assert_array_equal(getattr(episode, name), np.stack([step[name] for step in steps]))
        np.testing.assert_array_equal(episode.alive, np.stack([step["agent_mask"] for step in steps]))


# proves maddpg-7
@pytest.mark.parametrize("individual, team_reward", [(False, False), (False, True), (True, False)])
def test_a_batch_knows_padding_deaths_and_ends(individual, team_reward):
    """Truncated episodes go on after their last step, terminated ones do not; an agent's own ends with its death."""
    args = maddpg.Args(individual_critics=individual, buffer_size=7, batch_size=5)
    buffer, finished = recorded(maddpg, world(4, team_reward=team_reward), args, 40)
    newest = finished[-7:]
    torch.manual_seed(2)
    index = torch.randint(7, (30,)).tolist()
    torch.manual_seed(2)
    batch = buffer.sample(30, CPU)
    assert batch.reward.shape[1] == 7
    seen = set()
    for b, k in enumerate(index):
        steps, final, terminated = newest[k]
        seen.add((len(steps), terminated))
        for t in range(7):
            if t >= len(steps):
                assert batch.alive[b, t].sum() == batch.weight[b, t].sum() == batch.goes_on[b, t].sum() == 0
                continue
            step, is_last = steps[t], t == len(steps) - 1
            following = final if is_last else steps[t + 1]
            np.testing.assert_array_equal(batch.obs[b, t], step["obs"])
            np.testing.assert_array_equal(batch.obs[b, t + 1], following["obs"])
            np.testing.assert_array_equal(batch.action[b, t], step["action"])
            alive = step["agent_mask"]
            survive = alive & following["agent_mask"] & (not (is_last and terminated))
            np.testing.assert_array_equal(batch.alive[b, t], alive)
            if individual:
                np.testing.assert_array_equal(batch.reward[b, t], step["reward"])
                np.testing.assert_array_equal(batch.weight[b, t], alive)
                np.testing.assert_array_equal(batch.goes_on[b, t], survive)
            else:
                mean = step["reward"][0] if team_reward else step["reward"][alive].sum() / 3  # no death raises it
                assert batch.reward[b, t, 0] == np.float32(mean)
                assert batch.weight[b, t, 0] == 1 and batch.goes_on[b, t, 0] == survive.any()
    assert seen == {(5, True), (6, False), (7, True), (5, False)}


@pytest.mark.parametrize("individual", [False, True])
def test_normalize_reward_uses_all_rewards_that_critics_can_see(individual):
    plain = maddpg.Args(individual_critics=individual, buffer_size=7, batch_size=5)
    scaled = dataclasses.replace(plain, normalize_reward=True)
    batches = []
    for args in (plain, scaled):
        buffer, finished = recorded(maddpg, world(3, may_die=True), args, 40)
        torch.manual_seed(2)
        batches.append(buffer.sample(20, CPU))
    assert len(finished) > 14  # many were forgotten
    rewards = [step["reward"] for steps, _, _ in finished[-7:] for step in steps]
    alive = [step["agent_mask"] for steps, _, _ in finished[-7:] for step in steps]
    means = [r[a].sum() / 3 for r, a in zip(rewards, alive)]
    for m in range(3 if individual else 1):
        values = np.array([r[m] for r, a in zip(rewards, alive) if a[m]] if individual else means, np.float64)
        keep = batches[0].weight[..., m] > 0
        expected = (batches[0].reward[..., m][keep] - values.mean()) / (values.std() + 1e-6)
        torch.testing.assert_close(batches[1].reward[..., m][keep], expected.float(), rtol=1e-4, atol=1e-4)


def test_who_dies_in_the_step_of_a_time_limit_has_no_value_beyond_it():
    args = maddpg.Args(individual_critics=True, buffer_size=1, batch_size=1)
    envs = world(1)
    buffer, (obs, info) = maddpg.Buffer(envs, args), envs.reset()
    *_, next_info = envs.step(np.array([[0, 0, 1]]))
    end = {"final_obs": obs, "final_state": info["state"], "final_action_mask": info["action_mask"]}
    end["final_agent_mask"] = np.array([[True, False, True]])
    action, reward = np.zeros((1, 3, 4), np.float32), np.ones((1, 3), np.float32)
    buffer.add(obs, info, action, reward, np.array([False]), np.array([True]), next_info | end)
    assert buffer.sample(1, CPU).goes_on.tolist() == [[[1, 0, 1]]]


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_a_signal_stops_the_run_whatever_is_logged(tmp_path):
    flags = ["--total-timesteps", "10000000", "--log-every", "1000000", "--runs-dir", str(tmp_path)]
    with subprocess.Popen([sys.executable, "-m", "cleanmarl.maddpg", *flags], stdout=subprocess.PIPE, text=True) as run:
        folder = Path(run.stdout.readline().removeprefix("run folder: ").strip())
        try:
            wait_for(lambda: hears(run.pid, signal.SIGTERM))
            run.send_signal(signal.SIGTERM)
            out, _ = run.communicate(timeout=60)
        finally:
            run.kill()
    assert run.returncode == 143
    assert f"stopped at step {load_checkpoint(folder)['step']:,}; continue with" in out


def test_buffer_is_saved_and_goes_on_after_loading():
    args = maddpg.Args(individual_critics=True, buffer_size=50, normalize_reward=True)
    buffer, _ = recorded(maddpg, world(3), args, 20)
    state, lengths = buffer.state_dict(), [len(episode.reward) for episode in buffer.episodes]
    assert state["lengths"][:, maddpg.Batch._fields.index("reward")].tolist() == lengths and len(set(lengths)) > 1
    assert len(state["reward"]) == sum(lengths) and len(state["obs"]) == sum(lengths) + len(lengths)
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in state.values())  # torch.save writes whole storages
    other, empty = maddpg.Buffer(world(3), args), maddpg.Buffer(world(3), args)
    other.load_state_dict(state)
    batches = []
    for each in (buffer, other):
        torch.manual_seed(4)
        batches.append(each.sample(10, CPU))
    assert all(torch.equal(a, b) for a, b in zip(*batches))
    empty.load_state_dict(maddpg.Buffer(world(3), args).state_dict())
    assert not empty.episodes


# ---------------------------------------------------------------------------------------------------------- reward kind


@pytest.mark.parametrize(
    "env_id, team",
    [
        ("mpe/simple_spread_v3", False),  # collisions cost those who collide
        ("mpe/simple_spread_v3?local_ratio=0", True),
        ("mpe/simple_speaker_listener_v4", True),
        ("mpe/simple_adversary_v3", False),
        ("matrix/climbing", True),
    ],
)
@pytest.mark.parametrize("flag", [None, True, False])
def test_there_is_one_critic_for_a_team(env_id, team, flag, tmp_path):
    args = maddpg.Args(**SMALL | {"total_timesteps": 4}, env_id=env_id, individual_critics=flag, runs_dir=str(tmp_path))
    folder = maddpg.main(args)
    individual = not team if flag is None else flag
    assert json.loads((folder / "args.json").read_text())["args"]["individual_critics"] is individual
    weight = load_checkpoint(folder)["modules"]["critic"]["critic.0.weight"]
    assert len(weight) == (make(env_id, 1).num_agents if individual else 1)


# ---------------------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("env_id", ["mpe/simple_spread_v3", "matrix/climbing", "toy/each?varied=True"])
def test_two_updates_and_what_they_leave_behind(env_id, toy, tmp_path):
    args = maddpg.Args(env_id=env_id, **SMALL | {"total_timesteps": 160}, runs_dir=str(tmp_path))
    folder = maddpg.main(args)
    saved, points = load_checkpoint(folder), scalars(folder)
    assert saved["step"] >= 160 and {p.name for p in folder.iterdir()} >= {"args.json", "checkpoint.pt", "done.json"}
    assert all(torch.isfinite(x).all() for x in saved["modules"]["agent"].values())
    assert json.loads((folder / "args.json").read_text())["args"]["individual_critics"] is (env_id != "matrix/climbing")
    num_episodes = saved["num_episodes"]
    assert saved["modules"]["critic"]["num_updates"] == num_episodes - 3  # one for each, once there are four
    assert points["train/num_updates"][-1][1] == num_episodes - 3
    names = ["rollout/ep_reward", "rollout/ep_length", "rollout/num_episodes", "train/critic_loss", "train/actor_loss"]
    names += ["train/actor_gradients", "train/critic_gradients"]
    names += ["eval/ep_reward", "eval/std_ep_reward", "eval/ep_length"]
    assert set(names) <= points.keys()
    assert [step for step, _ in points["eval/ep_reward"]] == [
        step for step, n in points["rollout/num_episodes"] if n % 4 == 0
    ]
    assert len(points["eval/ep_reward"]) == num_episodes // 4
    assert [n for _, n in points["rollout/num_episodes"]][:3] == [2, 4, 6]


def test_train_freq_and_target_network_update_freq(tmp_path):
    args = maddpg.Args(**SMALL, train_freq=3, target_network_update_freq=2, polyak=1.0, runs_dir=str(tmp_path))
    modules = load_checkpoint(maddpg.main(args))["modules"]
    assert modules["critic"]["num_updates"] == 4  # after episodes 6, 9, 12, 15 of 16
    same = {key: torch.equal(x, modules["target_agent"][key]) for key, x in modules["agent"].items()}
    assert all(same.values())  # copied after the fourth
    args = dataclasses.replace(args, total_timesteps=300)  # three updates
    modules = load_checkpoint(maddpg.main(args))["modules"]
    assert not torch.equal(modules["agent"]["actor.1.weight"], modules["target_agent"]["actor.1.weight"])
    initial = maddpg.Args(**SMALL | {"total_timesteps": 25}, runs_dir=str(tmp_path))
    initial = load_checkpoint(maddpg.main(initial))["modules"]
    assert not torch.equal(initial["agent"]["actor.1.weight"], modules["target_agent"]["actor.1.weight"])


def test_same_seed_same_losses(tmp_path):
    args = maddpg.Args(**SMALL, runs_dir=str(tmp_path))
    first, second = scalars(maddpg.main(args)), scalars(maddpg.main(args))
    other = scalars(maddpg.main(dataclasses.replace(args, seed=2)))
    for tag in ("train/critic_loss", "train/actor_loss", "rollout/ep_reward", "eval/ep_reward"):
        assert first[tag] == second[tag] != other[tag]


def test_resume_with_the_replay_buffer(tmp_path):
    args = maddpg.Args(**SMALL, runs_dir=str(tmp_path))
    folder = maddpg.main(args)
    before = load_checkpoint(folder)
    assert len(before["modules"]["buffer"]["lengths"]) == 16 and before["modules"]["critic"]["num_updates"] == 13
    maddpg.main(dataclasses.replace(args, resume=folder, total_timesteps=800))
    after = load_checkpoint(folder)
    assert after["step"] == 800 and after["num_episodes"] == 32
    buffer = after["modules"]["buffer"]
    assert len(buffer["lengths"]) == 32
    assert torch.equal(buffer["obs"][: 16 * 26], before["modules"]["buffer"]["obs"])
    assert not torch.equal(
        buffer["obs"][16 * 26 :], before["modules"]["buffer"]["obs"]
    )  # other episodes, not the first again
    assert after["modules"]["critic"]["num_updates"] == 29  # it learned from the first episode on
    steps = [s["step"] for s in after["modules"]["actor_optimizer"]["state"].values()]
    assert all(step == 29 for step in steps)
    assert all(np.isfinite(value) for _, value in scalars(folder)["train/critic_loss"])


def test_resume_without_the_replay_buffer_fills_a_new_one_first(tmp_path):
    args = maddpg.Args(**SMALL, save_buffer=False, runs_dir=str(tmp_path))
    folder = maddpg.main(args)
    assert "buffer" not in load_checkpoint(folder)["modules"]
    maddpg.main(dataclasses.replace(args, resume=folder, total_timesteps=800))
    assert load_checkpoint(folder)["modules"]["critic"]["num_updates"] == 13 + 13


def test_checkpoint_is_smaller_than_twice_the_buffer(tmp_path):
    args = maddpg.Args(**SMALL | {"total_timesteps": 3000}, train_freq=1000, runs_dir=str(tmp_path))
    folder = maddpg.main(args)
    state = load_checkpoint(folder)["modules"]["buffer"]
    assert (folder / "checkpoint.pt").stat().st_size < 2 * sum(x.nbytes for x in state.values())


def test_enjoy_plays_the_run(tmp_path):
    folder = maddpg.main(maddpg.Args(**SMALL, runs_dir=str(tmp_path)))
    metrics = enjoy.main(enjoy.Args(folder, episodes=3, greedy=True))
    assert np.isfinite(metrics["eval/ep_reward"]) and metrics["eval/ep_length"] == 25


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--env-id mpe/simple_spread_v3?continuous_actions=True", "try a ..._continuous_action.py"),
        ("--batch-size 20 --buffer-size 10", "--batch-size 20 episodes do not fit into --buffer-size 10"),
        ("--polyak 0", "--polyak must be in (0, 1], not 0.0"),
        ("--train-freq 0", "--train-freq must be greater than 0"),
    ],
)
def test_bad_input(flags, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["maddpg.py", *flags.split(), "--runs-dir", str(tmp_path / "runs")])
    with pytest.raises(SystemExit) as exit_:
        launch(maddpg.main, maddpg.Args)
    line = capsys.readouterr().err
    assert exit_.value.code == 2 and line.startswith("maddpg: ") and text in line and line.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.learning
def test_is_better_than_the_untrained_policy_in_seconds(tmp_path):
    env_id = "mpe/simple_speaker_listener_v4"
    args = maddpg.Args(env_id=env_id, total_timesteps=15_000, runs_dir=str(tmp_path), eval_episodes=0, eval_steps=10**6)
    args = dataclasses.replace(args, learning_rate_actor=1e-3, learning_rate_critic=1e-3, polyak=0.02)
    folder = maddpg.main(args)
    envs = maddpg.make_envs(args, 32)
    agent = maddpg.Agent(envs, args)
    untrained = evaluate(envs, maddpg.make_policy(agent, greedy=False), 320, seed=7)
    agent.load_state_dict(load_checkpoint(folder)["modules"]["agent"])
    trained = evaluate(envs, maddpg.make_policy(agent, greedy=False), 320, seed=7)
    error = np.hypot(untrained["eval/std_ep_reward"], trained["eval/std_ep_reward"]) / np.sqrt(320)
    assert trained["eval/ep_reward"] - untrained["eval/ep_reward"] > 5 * error
