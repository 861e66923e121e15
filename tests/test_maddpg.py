"""maddpg.py: critics and gradients against loops over agents, the replay buffer, masks, deaths, resume, bad input."""

import copy
import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cleanmarl import enjoy, maddpg
from cleanmarl.envs import EpisodeStatistics, MultiAgentVectorEnv, make
from cleanmarl.run import evaluate, launch, load_checkpoint

SMALL = {"total_timesteps": 400, "batch_size": 4, "eval_episodes": 0, "eval_steps": 4, "num_eval_ep": 2, "log_every": 2}
CPU = torch.device("cpu")


class Toy(MultiAgentVectorEnv):
    """Three agents with different spaces; episodes of environment i have 4 + i % 3 steps, and are truncated for odd i.

    Agent 1 dies after its third step, agent 2 with its last; the parity of the clock forbids agent 2's action 0 or 1.
    Observations depend on all actions of the episode so far. Agent i's reward is i + 1 while it lives, or 1 with a
    shared reward.
    """

    def __init__(self, num_envs: int, first: int = 0, shared: bool = False):
        self._set_spaces(num_envs, ("a", "b", "c"), [2, 3, 1], [2, 4, 3], 6)
        self.index, self.shared = first + np.arange(num_envs), shared

    def _look(self):
        obs = np.zeros((self.num_envs, 3, 3), np.float32)
        for i, size in enumerate(self.obs_sizes):
            obs[:, i, :size] = (np.sin(self.clock + 2 * i + self.index) + 0.1 * self.past)[:, None]
        mask = np.tile(self.real_actions, (self.num_envs, 1, 1))
        mask[np.arange(self.num_envs), 2, self.clock % 2] = False
        alive = np.ones((self.num_envs, 3), bool)
        alive[:, 1], alive[:, 2] = self.clock < 3, self.clock < 6
        obs[~alive] = 0
        state = np.concatenate([obs[:, :, 0], np.cos(obs[:, :, 0])], axis=1)
        return obs, {"state": state, "action_mask": mask, "agent_mask": alive}

    def reset(self, *, seed=None, options=None):
        self.statistics = EpisodeStatistics(self.num_envs, 3)
        self.clock, self.past = np.zeros((2, self.num_envs), np.int64)
        return self._look()

    def step(self, action):
        _, before = self._look()
        legal = np.take_along_axis(before["action_mask"], action[..., None], -1)[..., 0]
        assert legal[before["agent_mask"]].all(), "an illegal action"
        reward = np.array([1.0, 1.0, 1.0] if self.shared else [1.0, 2.0, 3.0], np.float32) * before["agent_mask"]
        self.clock += 1
        self.past = (2 * self.past + action.sum(1)) % 17
        ended, odd = self.clock == 4 + self.index % 3, self.index % 2 == 1
        self.statistics.add(reward)
        final_obs, final = self._look()
        self.clock[ended] = self.past[ended] = 0
        obs, info = self._look()
        if ended.any():
            info |= {"final_obs": final_obs, "final_state": final["state"], "_final_obs": ended}
            info["final_action_mask"], info["final_agent_mask"] = final["action_mask"], final["agent_mask"]
            self.statistics.end(ended, info)
        return obs, reward, ended & ~odd, ended & odd, info


@pytest.fixture
def toy(monkeypatch):
    """`toy/toy` as an environment family."""
    monkeypatch.setattr(maddpg, "make", lambda env_id, num_envs, **options: Toy(num_envs))
    return "toy/toy"


class Counter:
    """What `collect` needs of a run."""

    def __init__(self):
        self.step = self.num_episodes = 0

    def log_episodes(self, info):
        self.num_episodes += info["_episode"].sum()


def played(script, envs, args, num_episodes=12, scale=1.0):
    """Agent, critic and a buffer with episodes, all in float64 but the buffer."""
    torch.manual_seed(0)
    agent, critic = script.Agent(envs, args), script.Critic(envs, args)
    with torch.no_grad():
        for p in agent.parameters():
            p *= scale
    buffer, run = script.Buffer(envs, args), Counter()
    now = envs.reset(seed=1)
    if hasattr(script, "first_state"):
        now = (*now, script.first_state(agent, envs.num_envs))
    while run.num_episodes < num_episodes:
        now = script.collect(agent, envs, now, buffer, run)
    return agent.double(), critic.double(), buffer


def double(batch):
    return type(batch)(*(x.double() if x.is_floating_point() else x for x in batch))


def case(individual, env=None, **changes):
    args = maddpg.Args(individual_critics=individual, **changes)
    agent, critic, buffer = played(maddpg, env or Toy(3), args)
    return args, agent, critic, double(buffer.sample(5, CPU))


def alone(stacked, m):
    """Network m of a stack as an ordinary network."""
    layers = []
    for layer in stacked:
        if isinstance(layer, maddpg.StackedLinear):
            linear = nn.Linear(layer.weight.shape[1], layer.weight.shape[2], dtype=layer.weight.dtype)
            linear.weight.data, linear.bias.data = layer.weight[m].T.detach().clone(), layer.bias[m, 0].detach().clone()
            layer = linear
        layers.append(layer)
    return nn.Sequential(*layers)


# ------------------------------------------------------------------------------------------------------------ networks


@pytest.mark.parametrize("individual", [False, True])
def test_critics_are_ordinary_networks_of_state_and_all_actions(individual):
    _, _, critic, batch = case(individual)
    q = critic(batch.state[:, :-1], batch.action)
    B, T = batch.action.shape[:2]
    assert q.shape == (B, T, 3 if individual else 1)
    for m in range(q.shape[-1]):
        network = alone(critic.network, m)
        for b, t in np.ndindex(B, T):
            x = torch.cat([batch.state[b, t], *batch.action[b, t]])
            torch.testing.assert_close(q[b, t, m], network(x)[0])


@pytest.mark.parametrize("individual", [False, True])
@pytest.mark.parametrize("num_layers", [0, 2])
def test_own_action_replaces_one_action_only(individual, num_layers):
    _, _, critic, batch = case(individual, critic_num_layers=num_layers)
    own = torch.rand_like(batch.action)
    q = critic.with_own_action(batch.state[:, :-1], batch.action, own)
    for i in range(3):
        joint = batch.action.clone()
        joint[:, :, i] = own[:, :, i]
        torch.testing.assert_close(q[..., i], critic(batch.state[:, :-1], joint)[..., i if individual else 0])


@pytest.mark.parametrize("agent_ids", [True, False])
@pytest.mark.parametrize("num_layers", [0, 1, 3])
def test_the_actor_that_acts_is_the_actor_that_learns(agent_ids, num_layers):
    args = maddpg.Args(agent_ids=agent_ids, actor_num_layers=num_layers, individual_critics=True)
    envs = Toy(4)
    agent = maddpg.Agent(envs, args)
    obs, info = envs.reset()
    mask = torch.from_numpy(info["action_mask"])
    theirs = agent.logits(torch.from_numpy(obs), mask)
    ours = maddpg.numpy_actor(agent)(obs)
    np.testing.assert_allclose(ours[info["action_mask"]], theirs[mask].detach(), rtol=1e-5, atol=1e-6)
    assert (theirs[~mask] < -1e7).all()
    x = torch.from_numpy(obs)[:, :1].expand(-1, 3, -1)  # the same observation for all agents
    logits = agent.actor(torch.cat([x, agent.ids.expand(4, -1, -1)], dim=-1))
    assert torch.equal(logits[:, 0], logits[:, 1]) == (not agent_ids)


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
            value = alone(critic.network, m)(torch.cat([batch.state[b, t + 1], *next_action]))[0]
            expected = batch.reward[b, t, m] + (0.99 * value if batch.goes_on[b, t, m] else 0)
            torch.testing.assert_close(ours[b, t, m], expected)


def test_next_actions_are_legal_hard_samples_of_the_target_policy():
    _, agent, _, batch = case(True)

    class Spy(nn.Module):
        def forward(self, state, action):
            self.action = action
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
        network, keep = alone(critic.network, m), batch.weight[..., m].bool()
        expected = F.mse_loss(network(x[keep])[:, 0], target[..., m][keep])
        torch.testing.assert_close(loss[m], expected)
        for ours, theirs in zip(gradients, torch.autograd.grad(expected, list(network.parameters()))):
            torch.testing.assert_close(ours[m].reshape(-1), theirs.t().reshape(-1))


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
        q = critic(batch.state[:, :-1], torch.stack(joint, dim=2))[..., i if individual else 0]
        alive = batch.alive[..., i].bool()
        assert i != 1 or not alive.all()
        total = total - q[alive].sum()
    total = total / batch.alive.sum()
    torch.testing.assert_close(loss, total)
    for a, b in zip(ours, torch.autograd.grad(total, parameters)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("individual", [False, True])
def test_padding_adds_nothing(individual):
    """Losses and gradients are finite and stay the same whatever stands after the end of an episode."""
    args, agent, critic, batch = case(individual)
    lengths = batch.alive.any(-1).sum(1, keepdim=True)  # agents 0 and 2 never die
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
        norm = maddpg.descend(loss, critic, torch.optim.SGD(critic.parameters(), lr=1.0), max_norm, 3)
        norms = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) * size**0.5
        torch.testing.assert_close(norm, norms.mean())
        for p, old in zip(critic.parameters(), before):
            for m in range(3):
                factor = min(1.0, max_norm / norms[m].item()) if max_norm > 0 else 1.0
                torch.testing.assert_close(
                    old[m] - p[m], torch.full_like(p[m], factor * (m + 1)), rtol=1e-5, atol=1e-12
                )


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


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "SGD"])
def test_update_is_two_descents_with_the_critic_first(optimizer):
    """Against an update written out with torch's own classes, losses and all."""
    args, agent, critic, batch = case(True, optimizer=optimizer)
    targets = copy.deepcopy(agent), copy.deepcopy(critic)
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
    maddpg.critic_loss(critic2, batch, target).sum().backward()
    reference[1].step()
    loss = maddpg.actor_loss(agent2, critic2, batch)
    agent2.zero_grad()
    loss.backward()
    reference[0].step()
    for net, other in ((agent, agent2), (critic, critic2)):
        for p, q in zip(net.parameters(), other.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    assert metrics["train/actor_loss"] == pytest.approx(loss.item()) and metrics["train/num_updates"] == 1


# -------------------------------------------------------------------------------------------------------------- buffer


def recorded(script, envs, args, num_steps, seed=0):
    """A buffer fed with random legal steps, and lists of what every finished episode was, row by row."""
    rng, buffer = np.random.default_rng(seed), script.Buffer(envs, args, num_rows=4)
    obs, info = envs.reset()
    open_, finished = [[] for _ in range(envs.num_envs)], []
    for _ in range(num_steps):
        action = np.where(info["action_mask"], rng.random(info["action_mask"].shape), -1).argmax(-1)
        next_obs, reward, termination, truncation, next_info = envs.step(action)
        buffer.add(obs, info, action, reward, termination, truncation, next_info)
        for i in range(envs.num_envs):
            row = {key: info[key][i].copy() for key in ("state", "action_mask", "agent_mask")}
            open_[i].append({"obs": obs[i].copy(), "action": action[i], "reward": reward[i], **row})
            if termination[i] or truncation[i]:
                final = {key: next_info[f"final_{key}"][i].copy() for key in ("obs", "state", "action_mask")}
                finished.append((open_[i], final, bool(termination[i])))
                open_[i] = []
        obs, info = next_obs, next_info
    return buffer, finished


@pytest.mark.parametrize("capacity", [100, 5])
def test_buffer_keeps_whole_episodes_and_forgets_the_oldest(capacity):
    args = maddpg.Args(individual_critics=True, buffer_size=capacity)
    buffer, finished = recorded(maddpg, Toy(3), args, 40)
    assert buffer.size == min(capacity, len(finished)) and len(finished) > 20
    assert buffer.episodes.obs.shape[1] == 8  # four rows were too few
    newest = finished[-buffer.size :]
    start = buffer.next if capacity == 5 else 0
    for k, (steps, final, terminated) in enumerate(newest):
        row = (start + k) % capacity
        assert buffer.lengths[row] == len(steps)
        for name in ("obs", "state", "action_mask", "agent_mask", "action", "reward"):
            stored = getattr(buffer.episodes, name)[row]
            for t, step in enumerate(steps):
                np.testing.assert_array_equal(stored[t], step[name])
        for name, value in final.items():
            np.testing.assert_array_equal(getattr(buffer.episodes, name)[row, len(steps)], value)
        expected = np.zeros(3, bool) if terminated else steps[-1]["agent_mask"]
        np.testing.assert_array_equal(buffer.episodes.agent_mask[row, len(steps)], expected)


@pytest.mark.parametrize("individual", [False, True])
def test_a_batch_knows_padding_deaths_and_ends(individual):
    """Truncated episodes go on after their last step, terminated ones do not; an agent's own ends with its death."""
    buffer, finished = recorded(maddpg, Toy(3), maddpg.Args(individual_critics=individual, buffer_size=7), 40)
    newest = finished[-7:]
    torch.manual_seed(2)
    index = torch.randint(7, (30,)).numpy()
    torch.manual_seed(2)
    batch = buffer.sample(30, CPU)
    assert batch.reward.shape[1] == max(buffer.lengths[index]) == 6
    seen = set()
    for b, row in enumerate(index):
        steps, final, terminated = newest[(row - buffer.next) % 7]
        seen.add((len(steps), terminated))
        for t in range(6):
            if t >= len(steps):
                assert batch.alive[b, t].sum() == batch.weight[b, t].sum() == batch.goes_on[b, t].sum() == 0
                continue
            step, is_last = steps[t], t == len(steps) - 1
            np.testing.assert_array_equal(batch.obs[b, t], step["obs"])
            np.testing.assert_array_equal(batch.obs[b, t + 1], final["obs"] if is_last else steps[t + 1]["obs"])
            np.testing.assert_array_equal(batch.action[b, t].argmax(-1), step["action"])
            assert (batch.action[b, t].sum(-1) == 1).all()
            alive = step["agent_mask"]
            survive = alive & ~np.full(3, terminated) if is_last else steps[t + 1]["agent_mask"]
            np.testing.assert_array_equal(batch.alive[b, t], alive)
            if individual:
                np.testing.assert_array_equal(batch.reward[b, t], step["reward"])
                np.testing.assert_array_equal(batch.weight[b, t], alive)
                np.testing.assert_array_equal(batch.goes_on[b, t], alive & survive)
            else:
                assert batch.reward[b, t, 0] == step["reward"][alive].mean()
                assert batch.weight[b, t, 0] == 1 and batch.goes_on[b, t, 0] == (not (is_last and terminated))
    assert seen == {(4, True), (5, False), (6, True)}


@pytest.mark.parametrize("individual", [False, True])
def test_normalize_reward_uses_all_rewards_that_critics_can_see(individual):
    plain = maddpg.Args(individual_critics=individual, buffer_size=7)
    scaled = dataclasses.replace(plain, normalize_reward=True)
    batches = []
    for args in (plain, scaled):
        buffer, finished = recorded(maddpg, Toy(3), args, 40)
        torch.manual_seed(2)
        batches.append(buffer.sample(20, CPU))
    rewards = [step["reward"] for steps, _, _ in finished[-7:] for step in steps]
    alive = [step["agent_mask"] for steps, _, _ in finished[-7:] for step in steps]
    means = [r[a].mean() for r, a in zip(rewards, alive)]
    for m in range(3 if individual else 1):
        values = np.array([r[m] for r, a in zip(rewards, alive) if a[m]] if individual else means, np.float64)
        keep = batches[0].weight[..., m] > 0
        expected = (batches[0].reward[..., m][keep] - values.mean()) / (values.std() + 1e-6)
        torch.testing.assert_close(batches[1].reward[..., m][keep], expected.float(), rtol=1e-4, atol=1e-4)


def test_who_dies_in_the_step_of_a_time_limit_has_no_value_beyond_it():
    args = maddpg.Args(individual_critics=True, buffer_size=1)
    envs = Toy(1)
    buffer, (obs, info) = maddpg.Buffer(envs, args), envs.reset()
    *_, next_info = envs.step(np.array([[0, 0, 1]]))
    end = {"final_obs": obs, "final_state": info["state"], "final_action_mask": info["action_mask"]}
    end["final_agent_mask"] = np.array([[True, False, True]])
    action, reward = np.zeros((1, 3), np.int64), np.ones((1, 3), np.float32)
    buffer.add(obs, info, action, reward, np.array([False]), np.array([True]), next_info | end)
    assert buffer.sample(1, CPU).goes_on.tolist() == [[[1, 0, 1]]]


def test_a_signal_stops_the_run_whatever_is_logged(tmp_path):
    flags = ["--total-timesteps", "10000000", "--log-every", "1000000", "--runs-dir", str(tmp_path)]
    with subprocess.Popen([sys.executable, "-m", "cleanmarl.maddpg", *flags], stdout=subprocess.PIPE, text=True) as run:
        folder = Path(run.stdout.readline().removeprefix("run folder: ").strip())
        time.sleep(3)
        run.send_signal(signal.SIGTERM)
        try:
            out, _ = run.communicate(timeout=30)
        finally:
            run.kill()
    assert run.returncode == 143
    assert f"stopped at step {load_checkpoint(folder)['step']:,}; continue with" in out


def test_buffer_is_saved_filled_part_only_and_goes_on_after_loading():
    args = maddpg.Args(individual_critics=True, buffer_size=50)
    envs = Toy(3)
    buffer, _ = recorded(maddpg, envs, args, 20)
    state = buffer.state_dict()
    assert state["obs"].shape == (buffer.size, 7, 3, 3) and 0 < buffer.size < 50
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in state.values())  # torch.save writes whole storages
    other = maddpg.Buffer(envs, args, num_rows=4)
    other.load_state_dict(state)
    batches = []
    for each in (buffer, other):
        torch.manual_seed(4)
        batches.append(each.sample(10, CPU))
    assert all(torch.equal(a, b) for a, b in zip(*batches))
    assert (other.size, other.next) == (buffer.size, buffer.next)


# ---------------------------------------------------------------------------------------------------------- reward kind


@pytest.mark.parametrize(
    "env_id, shared",
    [
        ("mpe/simple_spread_v3", False),  # collisions cost those who collide
        ("mpe/simple_spread_v3?local_ratio=0", True),
        ("mpe/simple_speaker_listener_v4", True),
        ("mpe/simple_adversary_v3", False),
        ("matrix/climbing", True),
    ],
)
def test_reward_kind_is_found_by_playing(env_id, shared):
    assert maddpg.have_shared_reward(make(env_id, 2), seed=1) == shared


def test_reward_kind_looks_at_the_living_and_takes_silence_for_individual():
    assert maddpg.have_shared_reward(Toy(2, shared=True), seed=1)  # the dead earn 0 there
    assert not maddpg.have_shared_reward(Toy(2), seed=1)
    silent = Toy(2, shared=True)
    step = silent.step
    silent.step = lambda action: [x * 0 if k == 1 else x for k, x in enumerate(step(action))]
    assert not maddpg.have_shared_reward(silent, seed=1)


# ---------------------------------------------------------------------------------------------------------------- runs


def curves(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize("env_id", ["mpe/simple_spread_v3", "matrix/climbing", "toy"])
def test_two_updates_and_what_they_leave_behind(env_id, toy, tmp_path, monkeypatch):
    if env_id != "toy":
        monkeypatch.setattr(maddpg, "make", make)
    args = maddpg.Args(env_id=env_id, **SMALL | {"total_timesteps": 160}, runs_dir=str(tmp_path))
    folder = maddpg.main(args)
    saved, points = load_checkpoint(folder), curves(folder)
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
    assert not torch.equal(modules["agent"]["actor.0.weight"], modules["target_agent"]["actor.0.weight"])
    initial = maddpg.Args(**SMALL | {"total_timesteps": 25}, runs_dir=str(tmp_path))
    initial = load_checkpoint(maddpg.main(initial))["modules"]
    assert not torch.equal(initial["agent"]["actor.0.weight"], modules["target_agent"]["actor.0.weight"])


def test_same_seed_same_losses(tmp_path):
    args = maddpg.Args(**SMALL, runs_dir=str(tmp_path))
    first, second = curves(maddpg.main(args)), curves(maddpg.main(args))
    other = curves(maddpg.main(dataclasses.replace(args, seed=2)))
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
    assert torch.equal(buffer["obs"][:16], before["modules"]["buffer"]["obs"])
    assert not torch.equal(
        buffer["obs"][16:], before["modules"]["buffer"]["obs"]
    )  # other episodes, not the first again
    assert after["modules"]["critic"]["num_updates"] == 29  # it learned from the first episode on
    steps = [s["step"] for s in after["modules"]["actor_optimizer"]["state"].values()]
    assert all(step == 29 for step in steps)
    assert all(np.isfinite(value) for _, value in curves(folder)["train/critic_loss"])


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
        ("--env-id mpe/simple_spread_v3?continuous_actions=True", "try maddpg_continuous_action.py"),
        ("--batch-size 20 --buffer-size 10", "--batch-size 20 episodes do not fit into --buffer-size 10"),
        ("--polyak 0", "--polyak must be in (0, 1], not 0.0"),
        ("--polyak 1.5", "--polyak must be in (0, 1], not 1.5"),
        ("--gamma 1.1", "--gamma must be in [0, 1]"),
        ("--batch-size 0", "--batch-size must be greater than 0"),
        ("--train-freq 0", "--train-freq must be greater than 0"),
        ("--learning-rate-actor 0", "--learning-rate-actor must be greater than 0"),
        ("--critic-num-layers -1", "--critic-num-layers must be 0 or more"),
        ("--eval-steps 0", "--eval-steps must be greater than 0"),
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
    args = maddpg.Args(env_id=env_id, total_timesteps=30_000, runs_dir=str(tmp_path), eval_episodes=0, eval_steps=10**6)
    args = dataclasses.replace(args, learning_rate_actor=1e-3, learning_rate_critic=1e-3, polyak=0.02)
    folder = maddpg.main(args)
    envs = maddpg.make_envs(args, 32)
    agent = maddpg.Agent(envs, args)
    untrained = evaluate(envs, maddpg.make_policy(agent, greedy=False), 320, seed=7)
    agent.load_state_dict(load_checkpoint(folder)["modules"]["agent"])
    trained = evaluate(envs, maddpg.make_policy(agent, greedy=False), 320, seed=7)
    error = np.hypot(untrained["eval/std_ep_reward"], trained["eval/std_ep_reward"]) / np.sqrt(320)
    assert trained["eval/ep_reward"] - untrained["eval/ep_reward"] > 5 * error
