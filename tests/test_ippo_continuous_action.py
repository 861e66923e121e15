"""ippo_continuous_action.py: the 9 details, units and bounds, padding, deaths, stacked agents against agents alone.

`# proves NAME` above a test: it fails when that detail is taken out of the script.
"""

import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import cleanmarl.envs
from cleanmarl import enjoy, ippo, ippo_continuous_action
from cleanmarl.envs import EpisodeStatistics, MultiAgentVectorEnv
from cleanmarl.ippo_continuous_action import Args
from cleanmarl.run import UsageError, evaluate, launch, load_checkpoint

SPREAD = Args.env_id
SMALL = {"total_timesteps": 400, "num_envs": 4, "num_steps": 50, "eval_episodes": 0}
LOW = np.float32([[-1, -1, 0, 0], [0, 2, -1, -3], [-np.inf, 0, -2, 0]])  # of what an agent does not have: any number
HIGH = np.float32([[1, 1, 1, 1], [1, 4, 1, 3], [np.inf, np.inf, 2, 1]])
REAL = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]], bool)


class Toy(MultiAgentVectorEnv):
    """Three agents with 2, 4 and 3 of 4 action components, episodes of 6 steps that odd environments truncate.

    Agent 1 dies after its third step, agent 2 with its last. Observations are the clock plus the agent's index, with
    outliers in the first number; rewards are of unequal scales, with outliers. `seen` keeps the actions, rewards and
    observations.
    """

    def __init__(self, num_envs):
        space = gym.spaces.Box(LOW, HIGH)
        self._set_spaces(num_envs, ("a", "b", "c"), [2, 3, 1], [2, 4, 3], 6, space)
        self.statistics = EpisodeStatistics(num_envs, 3)
        self.random, self.seen = np.random.default_rng(0), []

    def _look(self):
        obs = np.zeros((self.num_envs, 3, 3), np.float32)
        for i, size in enumerate(self.obs_sizes):
            obs[:, i, :size] = self.clock + i
        obs[..., 0] *= np.where(self.random.random((self.num_envs, 3)) < 0.003, 1e4, 1)
        mask = np.tile(self.real_actions, (self.num_envs, 1, 1))
        alive = np.ones((self.num_envs, 3), bool)
        alive[:, 1], alive[:, 2] = self.clock < 3, self.clock < 6
        obs[~alive] = 0
        return obs, {"state": obs[:, :, 0].copy(), "action_mask": mask, "agent_mask": alive}

    def reset(self, *, seed=None, options=None):
        self.clock = 0
        return self._look()

    def step(self, action):
        assert action.dtype == np.float32 and action.shape == (self.num_envs, 3, 4)
        alive = np.ones((self.num_envs, 3), bool)
        alive[:, 1], alive[:, 2] = self.clock < 3, self.clock < 6
        outlier = np.where(self.random.random((self.num_envs, 3)) < 0.01, 1e3, 1)
        reward = np.float32([1, 20, -300] * outlier * self.random.normal(1, 0.5, (self.num_envs, 3)) * alive)
        self.clock += 1
        self.seen.append((action.copy(), reward))
        ended = np.full(self.num_envs, self.clock == 6)
        odd = np.arange(self.num_envs) % 2 == 1
        self.statistics.add(reward)
        final, final_info = self._look()
        if ended.any():
            self.clock = 0
        obs, info = self._look()
        if ended.any():
            info["final_obs"], info["_final_obs"] = final, ended
            info["final_agent_mask"] = final_info["agent_mask"]
            self.statistics.end(ended, info)
        return obs, reward, ended & ~odd, ended & odd, info


@pytest.fixture
def toy(monkeypatch):
    """`toy/...` as one more environment family."""

    def make(env_id, num_envs, **options):
        return Toy(num_envs) if env_id == "toy/toy" else cleanmarl.envs.make(env_id, num_envs, **options)

    monkeypatch.setattr(ippo_continuous_action, "make", make)
    return "toy/toy"


class Quiet:
    step = 0

    def log_episodes(self, info):
        pass


def make_rollout(args, envs):
    T, N = args.num_steps, args.num_envs
    (A, D), K = envs.single_observation_space.shape, envs.real_actions.shape[1]
    masks = np.zeros((T, N, A, K), bool), np.zeros((T, N, A), bool)
    rest = np.zeros((T, N, A, K), np.float32), np.zeros((T, N, A), np.float32), np.zeros((T, N, A), bool)
    return ippo_continuous_action.Rollout(np.zeros((T, N, A, D), np.float32), *masks, *rest)


def spread_out(agent, scale=100):
    """Means that depend on what an agent sees, and deviations that differ."""
    with torch.no_grad():
        agent.actor[-1].weight *= scale
        agent.critic[-1].bias += 1  # the dead see zeros, which are to have a value
        agent.log_std.uniform_(-1, 0.5)


def collected(args, scale=100):
    """Agent, environments, rollout and batch of one rollout."""
    torch.manual_seed(0)
    envs = ippo_continuous_action.make_envs(args, args.num_envs)
    agent = ippo_continuous_action.Agent(envs, args)
    spread_out(agent, scale)
    rollout = make_rollout(args, envs)
    obs, _ = ippo_continuous_action.collect(agent, envs, envs.reset(seed=1), rollout, args, Quiet())
    return agent, envs, rollout, ippo_continuous_action.estimate(agent, rollout, obs, args)


def optimizer_for(agent, lr, **kwargs):
    rows = ippo_continuous_action.stack_parameters(agent)
    lrs = np.broadcast_to(lr, len(rows)).tolist()
    return torch.optim.Adam([{"params": [row], "lr": x} for row, x in zip(rows, lrs)], **kwargs)


def settings_of(args):
    return ippo_continuous_action.make_settings(args, torch.device("cpu"))


def curves(folder):
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [point.value for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@given(st.integers(1, 12), st.floats(0, 0.5), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_gae_is_its_definition_with_a_discount_per_agent(T, p_done, seed):
    rng = np.random.default_rng(seed)
    gamma, gae_lambda = rng.random(3), rng.random(3)
    reward, value, next_value = rng.normal(size=(T, 2, 3)), rng.normal(size=(T, 2, 3)), rng.normal(size=(2, 3))
    done = rng.random((T, 2, 3)) < p_done
    ours = ippo_continuous_action.gae(reward, value, next_value, done, gamma, gae_lambda)
    values = np.concatenate([value, next_value[None]])
    for n, a in np.ndindex(2, 3):
        for t in range(T):
            expected, weight = 0.0, 1.0
            for k in range(t, T):
                alive = 1.0 - done[k, n, a]
                expected += weight * (reward[k, n, a] + gamma[a] * alive * values[k + 1, n, a] - values[k, n, a])
                weight *= gamma[a] * gae_lambda[a] * alive
            assert ours[t, n, a] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("env_id", [SPREAD, "toy/toy"])
def test_first_ratio_is_one(env_id, shared, toy):
    args = Args(env_id=env_id, **SMALL, share_parameters=shared, normalize_value=True)
    agent, _, _, batch = collected(args)
    half = batch.alive.shape[1] // 2
    part = ippo_continuous_action.Batch(*(x[:, :half] for x in batch))
    mean = agent.actor(part.features)
    log_prob = ippo_continuous_action.gaussian_log_prob(part.action, mean, agent.log_std, part.action_mask)
    ratio = (log_prob - part.log_prob).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)
    _, stats = ippo_continuous_action.ippo_loss(agent, part, settings_of(args), True)
    assert (stats[3].abs() < 1e-6).all() and (stats[4] == 0).all()  # approx_kl, clipfrac


# proves continuous-1
@pytest.mark.parametrize("shared", [False, True])
def test_actions_are_normal_around_the_means_of_the_actor_that_learns(shared, toy):
    args = Args(env_id=toy, **SMALL | {"num_steps": 300}, share_parameters=shared)
    agent, _, _, batch = collected(args)
    with torch.no_grad():
        noise = agent.by_agent((batch.action - agent.actor(batch.features)) / agent.log_std.exp())
    noise = noise.reshape(-1, 3, 4)[:, REAL].numpy()  # (1200, 9)
    np.testing.assert_allclose(noise.mean(0), 0, atol=0.12)
    np.testing.assert_allclose(noise.std(0), 1, atol=0.1)
    assert abs((noise**4).mean() - 3) < 0.25  # a uniform distribution has 1.8
    np.testing.assert_allclose(np.corrcoef(noise.T), np.eye(9), atol=0.12)


def test_the_numpy_actor_is_the_torch_actor():
    agent = ippo_continuous_action.Agent(ippo_continuous_action.make_envs(Args(), 1), Args())
    spread_out(agent)
    agent.obs_stats.mean.normal_()
    agent.obs_stats.var.uniform_(1e-3, 2)
    features = agent.features(np.random.default_rng(0).normal(size=(7, 3, 18)).astype(np.float32))
    theirs = agent.actor(agent.normalize(torch.from_numpy(features))).detach()
    ours = torch.from_numpy(ippo_continuous_action.numpy_actor(agent)(features))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


# proves continuous-2
def test_log_std_is_a_parameter_of_each_network_and_learns(tmp_path):
    envs = ippo_continuous_action.make_envs(Args(), 1)
    for shared, shape in ((False, (3, 1, 5)), (True, (1, 1, 5))):
        log_std = ippo_continuous_action.Agent(envs, Args(share_parameters=shared)).log_std
        assert isinstance(log_std, nn.Parameter) and log_std.shape == shape and not log_std.any()
    folder = ippo_continuous_action.main(Args(**SMALL, runs_dir=str(tmp_path)))
    assert (load_checkpoint(folder)["modules"]["agent"]["log_std"] != 0).all()


# proves continuous-3
@pytest.mark.parametrize("shared", [False, True])
def test_log_prob_and_entropy_are_those_of_the_components_an_agent_has(shared, toy):
    args = Args(env_id=toy, **SMALL, share_parameters=shared)
    agent, _, _, batch = collected(args)
    mean = agent.actor(batch.features)
    policy = torch.distributions.Normal(mean, agent.log_std.exp().expand_as(mean))
    log_prob, entropy = (agent.by_agent(x) for x in (policy.log_prob(batch.action), policy.entropy()))  # (R, A, K)
    ours = agent.by_agent(batch.log_prob)
    for i, size in enumerate([2, 4, 3]):
        torch.testing.assert_close(ours[:, i], log_prob[:, i, :size].sum(-1), atol=1e-4, rtol=1e-5)
    _, stats = ippo_continuous_action.ippo_loss(agent, batch, settings_of(args), True)
    expected = torch.stack([entropy[:, i, :size].sum(-1) for i, size in enumerate([2, 4, 3])], 1)  # (R, A)
    alive = agent.by_agent(batch.alive)
    means = [(expected * alive).sum() / alive.sum()] if shared else (expected * alive).sum(0) / alive.sum(0)
    for network, value in enumerate(means):
        torch.testing.assert_close(stats[2, network], value)


# proves continuous-4
def test_policy_and_value_share_nothing(toy):
    agent, _, _, batch = collected(Args(env_id=toy, **SMALL))
    assert not {id(p) for p in agent.actor.parameters()} & {id(p) for p in agent.critic.parameters()}
    gradient = torch.autograd.grad(
        agent.critic(batch.features).sum(), list(agent.actor.parameters()), allow_unused=True
    )
    assert all(g is None for g in gradient)


def test_components_an_agent_does_not_have_learn_nothing_and_stay_zero(toy):
    args = Args(env_id=toy, **SMALL)
    agent, envs, _, batch = collected(args)
    loss, _ = ippo_continuous_action.ippo_loss(agent, batch, settings_of(Args(ent_coef=(0.1,))), True)
    for parameter in (agent.log_std, agent.actor[-1].bias):
        gradient = torch.autograd.grad(loss.sum(), parameter, retain_graph=True)[0][:, 0]
        assert (gradient[~torch.tensor(REAL)] == 0).all() and (gradient[torch.tensor(REAL)] != 0).all()
    actions = np.stack([action for action, _ in envs.seen])
    assert (actions[..., ~REAL] == 0).all() and (actions[..., REAL] != 0).any()


# proves continuous-5
def test_the_environment_gets_actions_in_its_unit_and_clipped_the_rollout_keeps_them(toy):
    args = Args(env_id=toy, **SMALL)
    agent, envs, rollout, _ = collected(args)
    actions = np.stack([action for action, _ in envs.seen])
    middle = np.float32([[0, 0, 0, 0], [0.5, 3, 0, 0], [0, 0, 0, 0]])
    half = np.float32([[1, 1, 0, 0], [0.5, 1, 1, 3], [1, 1, 2, 0]])  # 1 where a bound is infinite: the same unit
    low, high = np.where(REAL, LOW, 0), np.where(REAL, HIGH, 0)
    np.testing.assert_allclose(actions, (middle + half * rollout.action).clip(low, high), rtol=1e-6)
    outside = (np.abs(rollout.action) > 1)[..., REAL & np.isfinite(HIGH - LOW)]
    assert 0.2 < outside.mean() < 0.8
    sampled = ippo_continuous_action.make_policy(agent, greedy=False)(*envs.reset(), None)
    assert (sampled >= low).all() and (sampled <= high).all()
    means = ippo_continuous_action.make_policy(agent)(*envs.reset(), None)
    again = ippo_continuous_action.make_policy(agent)(*envs.reset(), None)
    assert (means == again).all() and (means != sampled)[:, REAL].any() and (means[:, ~REAL] == 0).all()


def test_policies_start_in_the_middle_of_the_bounds():
    args = Args()
    envs = ippo_continuous_action.make_envs(args, 4)  # [0, 1]
    agent = ippo_continuous_action.Agent(envs, args)
    actions = ippo_continuous_action.make_policy(agent)(*envs.reset(seed=1), None)
    assert abs(actions - 0.5).max() < 0.05
    minus, plus = (agent.env_action(np.full((1, 3, 5), x, np.float32)) for x in (-1, 1))
    assert (minus == 0).all() and (plus == 1).all()


# proves continuous-6, continuous-7
@pytest.mark.parametrize("shared", [False, True])
def test_observations_are_normalised_by_the_rollouts_before_and_clipped(shared, toy):
    args = Args(env_id=toy, **SMALL | {"num_steps": 300}, share_parameters=shared)
    agent, envs, rollout, batch = collected(args)
    features = agent.features(rollout.obs.reshape(-1, 3, 3))
    agent.obs_stats.update(torch.from_numpy(features), batch.alive[..., None])
    later = make_rollout(args, envs)
    obs, _ = ippo_continuous_action.collect(agent, envs, envs.reset(seed=1), later, args, Quiet())
    ours = ippo_continuous_action.estimate(agent, later, obs, args).features.numpy()

    alive = agent.by_network(rollout.agent_mask.reshape(-1, 3))
    raw = agent.features(later.obs.reshape(-1, 3, 3)).astype(np.float64)
    for m in range(len(features)):
        seen = features[m][alive[m]].astype(np.float64)  # of living agents, in all environments
        expected = (raw[m] - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8)
        assert (np.abs(expected) > 10).any()  # there were outliers
        np.testing.assert_allclose(ours[m], expected.clip(-10, 10), rtol=1e-3, atol=1e-3)


def reference_returns(rewards, done, gamma):
    """Discounted returns of the episodes under way after each step, (T, N, A), in float64."""
    running, returns = np.zeros(rewards.shape[1:]), []
    for reward, ended in zip(rewards.astype(np.float64), done):
        running = running * gamma + reward
        returns.append(running)
        running = np.where(ended, 0, running)
    return np.stack(returns)


# proves continuous-8, continuous-9
@pytest.mark.parametrize("shared", [False, True])
def test_rewards_are_scaled_by_each_agents_discounted_return_and_clipped(shared, toy):
    gamma, scale = (0.9, 0.5, 0.99), (1.0, 2.0, 0.5)
    changes = {"share_parameters": shared, "time_limit_bootstrap": False, "gamma": gamma, "reward_scale": scale}
    args = Args(env_id=toy, **SMALL | {"num_steps": 100}, **changes)
    torch.manual_seed(0)
    envs = ippo_continuous_action.make_envs(args, 4)
    agent = ippo_continuous_action.Agent(envs, args)
    start, rollouts = envs.reset(), []
    for _ in range(2):  # the second rollout goes on in the middle of episodes
        rollout = make_rollout(args, envs)
        rollouts.append(rollout)
        start = ippo_continuous_action.collect(agent, envs, start, rollout, args, Quiet())
        rewards = np.stack([reward for _, reward in envs.seen])
        done, alive = (np.concatenate([getattr(r, name) for r in rollouts]) for name in ("done", "agent_mask"))
        returns = reference_returns(rewards, done, gamma)
        deviation = [returns[..., a][alive[..., a]].std() for a in range(3)]  # of living agents, in all environments
        expected = (rewards[-100:] / np.sqrt(np.square(deviation) + 1e-8)).clip(-10, 10) * scale
        np.testing.assert_allclose(rollout.reward, expected, rtol=1e-3, atol=1e-5)
    assert (np.abs(rollout.reward / scale) == 10).any()  # there were outliers
    assert not rollout.reward[~rollout.agent_mask].any()


def test_death_and_the_end_of_an_episode_cut_and_time_limits_bootstrap(toy):
    per_agent = {"gamma": (0.9, 0.8, 0.7), "reward_scale": (1.0, 0.1, 0.5)}
    args = Args(env_id=toy, **SMALL, **per_agent, normalize_reward=False)
    agent, envs, rollout, _ = collected(args)
    time = np.arange(50) % 6
    rewards = np.stack([reward for _, reward in envs.seen]) * np.float32(args.reward_scale)
    assert (rollout.done[:, 0, 0] == (time == 5)).all()
    assert (rollout.done[:, 0, 1] == np.isin(time, [2, 5])).all()  # its death, and the end that it does not see
    np.testing.assert_allclose(rollout.reward[:, 0], rewards[:, 0])  # environment 0 terminates: nothing to add
    final_obs = torch.zeros(1, 3, 3)
    final_obs[0, 0, :2] = 6  # who died with the last step sees nothing, and has no value beyond it
    features = agent.normalize(torch.from_numpy(agent.features(final_obs.numpy())))
    added = agent.value(features).detach()[:, 0].numpy() * [0.9, 0, 0]
    np.testing.assert_allclose(rollout.reward[5, 1] - rewards[5, 1], added, rtol=1e-4, atol=1e-4)
    # Values are in the unit of the scaled rewards already.
    _, _, scaled, _ = collected(Args(env_id=toy, **SMALL, **per_agent))
    _, _, without, _ = collected(Args(env_id=toy, **SMALL, **per_agent, time_limit_bootstrap=False))
    np.testing.assert_allclose(scaled.reward[5, 1] - without.reward[5, 1], added, rtol=1e-4, atol=1e-4)


def alone(stacked, i):
    """Network i of a stack as an ordinary network."""
    layers = []
    for stack in stacked[::2]:
        layer = nn.Linear(stack.weight.shape[1], stack.weight.shape[2])
        layer.weight.data, layer.bias.data = stack.weight[i].T.detach().clone(), stack.bias[i, 0].detach().clone()
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


PER_AGENT = {
    "learning_rate": (1e-3, 5e-4, 2e-3),
    "clip_coef": (0.1, 0.2, 0.3),
    "value_clip_coef": (0.0, 0.05, 0.2),
    "ent_coef": (0.01, 0.0, 0.1),
    "vf_coef": (1.0, 0.5, 2.0),
    "max_grad_norm": (0.5, 0.05, 10.0),
    "update_epochs": (2, 4, 3),
    "target_kl": (0.0, 1e-4, 0.0),
}


@pytest.mark.parametrize("env_id", [SPREAD, "toy/toy"])
def test_stacked_agents_learn_like_agents_trained_alone(env_id, toy):
    """An update of three stacked agents against three ordinary PPO learners with Adam, on the same minibatches."""
    args = Args(env_id=env_id, **SMALL, **PER_AGENT, num_minibatches=4)
    agent, envs, _, batch = collected(args, scale=10)
    learners = [(alone(agent.actor, i), alone(agent.critic, i)) for i in range(3)]
    log_stds = [nn.Parameter(agent.log_std[i, 0, :size].detach().clone()) for i, size in enumerate(envs.action_sizes)]
    optimizer = optimizer_for(agent, args.learning_rate, eps=1e-5)
    torch.manual_seed(5)
    ippo_continuous_action.update(agent, optimizer, batch, settings_of(args), args)

    stopped_early = False
    for i, ((actor, critic), log_std) in enumerate(zip(learners, log_stds)):
        K = envs.action_sizes[i]
        parameters = [*actor.parameters(), *critic.parameters(), log_std]
        adam = torch.optim.Adam(parameters, lr=args.learning_rate[i], eps=1e-5)
        data = ippo_continuous_action.Batch(*(x[i] for x in batch))
        torch.manual_seed(5)
        stop = False
        for _ in range(args.update_epochs[i]):
            for index in torch.randperm(200).split(50):
                mb = ippo_continuous_action.Batch(*(x[index] for x in data))
                keep = mb.alive.bool()
                policy = torch.distributions.Normal(actor(mb.features)[keep, :K], log_std.exp())
                log_ratio = policy.log_prob(mb.action[keep, :K]).sum(-1) - mb.log_prob[keep]
                kl = (log_ratio.exp() - 1 - log_ratio).mean()
                if args.target_kl[i] and kl > args.target_kl[i]:
                    stop = stopped_early = True
                if stop:
                    break
                advantage = mb.advantage[keep]
                advantage = (advantage - advantage.mean()) / (advantage.std(unbiased=False) + 1e-8)
                eps, value_eps = args.clip_coef[i], args.value_clip_coef[i]
                surrogate = torch.min(advantage * log_ratio.exp(), advantage * log_ratio.exp().clip(1 - eps, 1 + eps))
                value = critic(mb.features)[keep, 0]
                if value_eps:
                    value = mb.value[keep] + (value - mb.value[keep]).clip(-value_eps, value_eps)
                loss = -surrogate.mean() + args.vf_coef[i] * (value - mb.return_[keep]).square().mean()
                loss = loss - args.ent_coef[i] * policy.entropy().sum(-1).mean()
                adam.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, args.max_grad_norm[i])
                adam.step()
        torch.testing.assert_close(agent.log_std[i, 0, :K], log_std, atol=2e-6, rtol=1e-5)
        for stacked, network in ((agent.actor, actor), (agent.critic, critic)):
            for mine, theirs in zip(alone(stacked, i).parameters(), network.parameters()):
                torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=1e-5)
    assert stopped_early, "the KL threshold was to be met in this test"


def test_dead_agents_add_nothing(toy):
    args = Args(env_id=toy, **SMALL, value_clip_coef=(0.2,), ent_coef=(0.2,))
    agent, _, _, batch = collected(args)
    assert 0 < (batch.alive[1] == 0).sum() < 200 and (batch.alive[[0, 2]] == 1).all()
    loss, stats = ippo_continuous_action.ippo_loss(agent, batch, settings_of(args), True)
    gradients = torch.autograd.grad(loss.sum(), list(agent.parameters()))
    noise = (1 - batch.alive) * 1e3
    other = batch._replace(
        features=batch.features + noise[..., None],
        advantage=batch.advantage + noise,
        return_=batch.return_ - noise,
        value=batch.value + noise,
        log_prob=batch.log_prob - noise,  # a ratio of e^1000
    )
    loss2, stats2 = ippo_continuous_action.ippo_loss(agent, other, settings_of(args), True)
    torch.testing.assert_close(loss, loss2)
    torch.testing.assert_close(stats, stats2)
    for a, b in zip(gradients, torch.autograd.grad(loss2.sum(), list(agent.parameters()))):
        torch.testing.assert_close(a, b)


def test_statistics_are_saved_used_and_frozen_at_evaluation(tmp_path):
    args = Args(**SMALL, runs_dir=str(tmp_path))
    folder = ippo_continuous_action.main(args)
    saved = load_checkpoint(folder)["modules"]["agent"]
    assert (saved["obs_stats.count"] == 400).all() and (saved["return_stats.count"] == 400).all()
    assert saved["return_stats.var"].shape == (3, 1, 1) and (saved["return_stats.var"] != 1).all()
    envs = ippo_continuous_action.make_envs(args, 4)
    agent = ippo_continuous_action.Agent(envs, args)
    agent.load_state_dict(saved)
    evaluate(envs, ippo_continuous_action.make_policy(agent), 8, seed=1)
    assert all(torch.equal(saved[key], value) for key, value in agent.state_dict().items())

    ippo_continuous_action.main(Args(**SMALL | {"total_timesteps": 600}, runs_dir=str(tmp_path), resume=folder))
    checkpoint = load_checkpoint(folder)
    assert checkpoint["step"] == 600 and (checkpoint["modules"]["agent"]["return_stats.count"] == 600).all()
    assert np.isfinite([x for values in curves(folder).values() for x in values]).all()
    metrics = enjoy.main(enjoy.Args(folder, episodes=2))
    assert metrics["eval/ep_length"] == 25 and -300 < metrics["eval/ep_reward"] < -10  # raw returns


def test_warm_up_acts_uniformly_within_the_bounds_and_does_not_learn(toy, tmp_path):
    args = Args(env_id=toy, **SMALL | {"num_steps": 300}, random_timesteps=1200, runs_dir=str(tmp_path))
    _, _, rollout, _ = collected(args, scale=1e4)
    assert np.abs(rollout.action).max() <= 1
    np.testing.assert_allclose(rollout.action.mean((0, 1)), 0, atol=0.1)
    np.testing.assert_allclose(rollout.action.std((0, 1)), 3**-0.5, atol=0.05)
    args = Args(env_id=toy, **SMALL, random_timesteps=204, runs_dir=str(tmp_path))  # the second rollout begins so
    assert not load_checkpoint(ippo_continuous_action.main(args))["modules"]["optimizer"]["state"]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("env_id", [SPREAD, "mpe/simple_speaker_listener_v4?continuous_actions=True", "toy/toy"])
def test_two_updates(env_id, shared, toy, tmp_path):
    args = Args(env_id=env_id, **SMALL, share_parameters=shared, runs_dir=str(tmp_path))
    folder = ippo_continuous_action.main(args)
    saved = load_checkpoint(folder)
    assert saved["step"] == 400
    assert all(torch.isfinite(x).all() for x in saved["modules"]["agent"].values())
    assert sorted(path.name.split(".")[0] for path in folder.iterdir()) == ["args", "checkpoint", "done", "events"]


def test_multiwalker(tmp_path):
    pytest.importorskip("pettingzoo.sisl")
    pytest.importorskip("Box2D")
    small = SMALL | {"num_envs": 2, "total_timesteps": 200}
    saved = load_checkpoint(
        ippo_continuous_action.main(Args(env_id="pz/sisl/multiwalker_v9", **small, runs_dir=str(tmp_path)))
    )
    assert saved["step"] == 200
    assert all(torch.isfinite(x).all() for x in saved["modules"]["agent"].values())


def test_same_seed_same_losses(tmp_path):
    settings_ = [{**SMALL, "seed": seed, "runs_dir": str(tmp_path)} for seed in (1, 1, 2)]
    first, second, other = (curves(ippo_continuous_action.main(Args(**s))) for s in settings_)
    losses = [key for key in first if key.startswith("train/")]
    assert len(losses) == 7
    assert all(first[key] == second[key] for key in losses)
    assert first["train/value_loss"] != other["train/value_loss"]


def refused(script, flags, tmp_path, monkeypatch, capsys):
    """The one line with which a script refuses these flags."""
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--runs-dir", str(tmp_path / "runs"), *flags.split()])
    with pytest.raises(SystemExit) as stopped:
        launch(ippo_continuous_action.main, Args)
    assert stopped.value.code == 2 and not (tmp_path / "runs").exists()
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--env-id mpe/simple_spread_v3", "are discrete; try ippo.py, or continuous_actions=True in"),
        ("--env-id matrix/penalty", "needs continuous actions and those of matrix/penalty are discrete; try ippo.py"),
        ("--num-envs 3 --num-steps 5", "15 samples of a rollout are not divisible by --num-minibatches 2"),
        ("--gamma 0.9 0.9", "--gamma takes one value or one for each of 3 agents, not 2"),
        ("--share-parameters --clip-coef 0.1 0.2 0.3", "--clip-coef takes one value with --share-parameters"),
        ("--num-steps 0", "--num-steps must be greater than 0"),
    ],
)
def test_refused(flags, text, tmp_path, monkeypatch, capsys):
    assert text in refused("ippo_continuous_action", flags, tmp_path, monkeypatch, capsys)


def test_the_discrete_script_names_this_one():
    with pytest.raises(UsageError, match=r"are continuous; try ippo_continuous_action.py"):
        ippo.make_envs(ippo.Args(env_id=SPREAD), 1)


@pytest.mark.learning
def test_learns_simple_spread_in_seconds(tmp_path):
    args = Args(total_timesteps=96_000, lr_schedule=("constant",), runs_dir=str(tmp_path), eval_episodes=0)
    folder = ippo_continuous_action.main(args)
    envs = ippo_continuous_action.make_envs(args, 32)
    agent = ippo_continuous_action.Agent(envs, args)
    untrained = evaluate(envs, ippo_continuous_action.make_policy(agent, greedy=False), 320, seed=7)
    agent.load_state_dict(load_checkpoint(folder)["modules"]["agent"])
    trained = evaluate(envs, ippo_continuous_action.make_policy(agent, greedy=False), 320, seed=7)
    error = np.hypot(untrained["eval/std_ep_reward"], trained["eval/std_ep_reward"]) / np.sqrt(320)
    assert trained["eval/ep_reward"] - untrained["eval/ep_reward"] > 5 * error
