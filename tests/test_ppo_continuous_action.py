"""ppo_continuous_action.py: each of the 9 details on its own, the normaliser, and the script as a whole.

`# proves NAME` above a test: it fails when that detail is taken out of the script.
"""

import subprocess
import sys
from pathlib import Path

from cleanmarl import enjoy, ppo_continuous_action
from cleanmarl.cli import set_up
from cleanmarl.ppo_continuous_action import (
    Agent,
    Args,
    RunningMeanStd,
    collect,
    estimate,
    gaussian_log_prob,
    main,
    make_envs,
    make_policy,
    ppo_loss,
)
from cleanmarl.run import Run, load_checkpoint

import gymnasium as gym
import numpy as np
import pytest
import torch
from toys import curves, make_rollout

ROOT = Path(__file__).parents[1]


class Wild(gym.Env):
    """Observations and rewards of unequal scales, with an outlier now and then; episodes end both ways.

    The last observation is how far the previous action was out of its range.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = gym.spaces.Box(np.float32([-1, -0.5]), np.float32([1, 0.5]))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.length = 0, self.np_random.integers(5, 40)
        return self.observe(0.0), {}

    def observe(self, excess):
        outlier = 1e4 if self.np_random.random() < 0.005 else 1.0
        return np.append(self.np_random.normal([0, 5, -500], [0.1, 1, 100]) * outlier, excess)

    def step(self, action):
        self.t += 1
        reward = 3.0 + self.np_random.normal() * (1e4 if self.np_random.random() < 0.005 else 1.0)
        excess = float(np.abs(action - np.clip(action, self.action_space.low, self.action_space.high)).max())
        ends = self.t == self.length
        return self.observe(excess), reward, ends and self.length % 2 == 0, ends and self.length % 2 == 1, {}


gym.register("Wild-v0", Wild)


class Recorder(gym.vector.VectorWrapper):
    """Keeps what the environments returned, before any normalisation."""

    def reset(self, **options):
        self.steps = []
        self.first_obs, info = super().reset(**options)
        self.first_obs = self.first_obs.copy()
        return self.first_obs, info

    def step(self, action):
        obs, reward, termination, truncation, info = super().step(action)
        final_obs = {int(n): info["final_obs"][n].copy() for n in np.flatnonzero(termination | truncation)}
        self.steps.append((obs.copy(), reward.copy(), termination.copy(), truncation.copy(), final_obs))
        return obs, reward, termination, truncation, info


def small(tmp_path, **changes) -> Args:
    """Arguments of a run of two updates."""
    settings = {"num_steps": 128, "total_timesteps": 256, "eval_episodes": 1, "runs_dir": str(tmp_path)}
    return Args(**settings | {"num_minibatches": 4, "update_epochs": 2} | changes)


def first_rollout(args: Args, log_std=(0.0,)):
    """A fresh agent, the recorded environments, its first rollout, the observation after it, and the run."""
    set_up(args)
    envs = Recorder(make_envs(args, args.num_envs))
    agent = Agent(envs, args)
    agent.log_std.data[:] = torch.tensor(log_std)
    obs, _ = envs.reset(seed=args.seed)
    rollout = make_rollout(ppo_continuous_action, args, envs)
    agent.obs_stats.update(obs)
    with Run(args, ppo_continuous_action.__file__, agent=agent) as run:
        next_obs = collect(agent, envs, agent.normalize_obs(obs), rollout, args, run)
    return agent, envs, rollout, next_obs, run


@pytest.fixture(scope="module")
def wild(tmp_path_factory):
    """The first rollout in three Wild environments, 600 steps each."""
    args = small(tmp_path_factory.mktemp("wild"), env_id="Wild-v0", num_envs=3, num_steps=600, total_timesteps=1800)
    return args, *first_rollout(args)


def reference_obs(envs: Recorder) -> np.ndarray:
    """What VecNormalize makes of the observations, (T + 1, N, D), before clipping, from the definition in float64."""
    raw = np.stack([envs.first_obs, *(step[0] for step in envs.steps)])
    normalized = []
    for t in range(len(raw)):
        seen = raw[: t + 1].reshape(-1, raw.shape[-1])  # of all environments, this step's among them
        normalized.append((raw[t] - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8))
    return np.stack(normalized)


def reference_reward(envs: Recorder, gamma: float) -> np.ndarray:
    """What VecNormalize makes of the rewards, (T, N), before clipping, from the definition in float64."""
    running, seen, scaled = np.zeros(envs.num_envs), [], []
    for _, reward, termination, truncation, _ in envs.steps:
        running = running * gamma + reward
        seen.append(running)
        scaled.append(reward / np.sqrt(np.var(seen) + 1e-8))
        running = np.where(termination | truncation, 0, running)
    return np.stack(scaled)


# proves continuous-1
def test_actions_are_normally_distributed(wild):
    _, agent, _, rollout, _, _ = wild
    with torch.no_grad():
        mean, std = agent.actor(torch.from_numpy(rollout.obs)).numpy(), agent.log_std.exp().numpy()
    noise = ((rollout.action - mean) / std).ravel()  # 3600 samples
    assert abs(noise.mean()) < 0.05
    assert abs(noise.std() - 1) < 0.05
    assert abs((noise**4).mean() - 3) < 0.4  # a uniform distribution has 1.8
    log_std, action = torch.randn(1), torch.randn(7, 1)
    log_prob = torch.distributions.Normal(0.0, log_std.exp()).log_prob(action[:, 0])
    torch.testing.assert_close(gaussian_log_prob(action, torch.zeros(7, 1), log_std), log_prob)


# proves continuous-2
def test_log_std_is_one_parameter_for_all_states(tmp_path):
    agent = Agent(make_envs(small(tmp_path), 1), small(tmp_path))
    assert isinstance(agent.log_std, torch.nn.Parameter)
    assert agent.log_std.shape == (6,)
    assert not agent.log_std.any()
    folder = main(small(tmp_path, eval_episodes=0))
    assert load_checkpoint(folder)["modules"]["agent"]["log_std"].abs().min() > 0  # it learned


# proves continuous-3
def test_log_prob_and_entropy_equal_torch_distributions(tmp_path):
    torch.manual_seed(1)
    mean, log_std, action = (
        torch.randn(32, 6, requires_grad=True),
        torch.randn(6, requires_grad=True),
        torch.randn(32, 6),
    )
    policy = torch.distributions.Independent(torch.distributions.Normal(mean, log_std.exp()), 1)
    ours, theirs = gaussian_log_prob(action, mean, log_std), policy.log_prob(action)
    torch.testing.assert_close(ours, theirs)
    for x, y in zip(*(torch.autograd.grad(p.sum(), (mean, log_std)) for p in (ours, theirs))):
        torch.testing.assert_close(x, y)

    args = small(tmp_path, env_id="Wild-v0", ent_coef=1.0)
    agent, _, rollout, next_obs, _ = first_rollout(args, log_std=(0.3, -1.2))
    batch = estimate(agent, rollout, next_obs, args)
    _, stats = ppo_loss(agent, batch, args.clip_coef, args)
    policy = torch.distributions.Normal(agent.actor(batch.obs), agent.log_std.exp())
    torch.testing.assert_close(stats["entropy"], policy.entropy().sum(-1).mean())
    torch.testing.assert_close(batch.log_prob, policy.log_prob(batch.action).sum(-1), atol=1e-5, rtol=1e-5)


# proves core-13, continuous-4
def test_policy_and_value_share_nothing(wild):
    _, agent, *_ = wild
    shapes = [(64, 4), (64,), (64, 64), (64,)]
    assert [tuple(p.shape) for p in agent.actor.parameters()] == [*shapes, (2, 64), (2,)]
    assert [tuple(p.shape) for p in agent.critic.parameters()] == [*shapes, (1, 64), (1,)]
    for network in (agent.actor, agent.critic):
        assert [type(layer).__name__ for layer in network] == ["Linear", "Tanh", "Linear", "Tanh", "Linear"]
    assert not {id(p) for p in agent.actor.parameters()} & {id(p) for p in agent.critic.parameters()}


# proves continuous-5
def test_the_environment_clips_actions_and_the_rollout_does_not(wild):
    _, agent, envs, rollout, _, _ = wild
    outside = np.abs(rollout.action) > envs.unwrapped.envs[0].unwrapped.action_space.high
    assert outside.mean() > 0.3  # with a standard deviation of 1
    excess = np.stack([step[0][:, -1] for step in envs.steps])
    assert not excess.any()
    agent.log_std.data.fill_(2.0)
    envs.step(make_policy(agent, greedy=False)(envs.first_obs, {}, None))
    agent.log_std.data.fill_(0.0)
    assert not envs.steps.pop()[0][:, -1].any()  # in an evaluation too


# proves continuous-6
def test_observations_are_normalised_by_all_environments_together(wild):
    _, agent, envs, rollout, next_obs, _ = wild
    reference = reference_obs(envs)
    ours = np.concatenate([rollout.obs, next_obs[None]])
    inside = np.abs(reference) < 10
    np.testing.assert_allclose(ours[5:][inside[5:]], reference[5:][inside[5:]], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(ours[-1], reference[-1].clip(-10, 10), rtol=1e-4, atol=1e-4)
    assert agent.obs_stats.mean.shape == (4,)


# proves continuous-7
def test_normalised_observations_are_clipped(wild):
    _, _, envs, rollout, _, _ = wild
    reference = reference_obs(envs)[:-1]
    assert (np.abs(reference) > 10).any()  # there were outliers
    outside = np.abs(reference) > 10.1
    np.testing.assert_array_equal(rollout.obs[outside], 10 * np.sign(reference[outside]))


# proves continuous-8
def test_rewards_are_scaled_by_the_discounted_return(wild):
    args, _, envs, rollout, _, _ = wild
    reference = reference_reward(envs, args.gamma)
    assert 20 < rollout.done.sum() < 200
    np.testing.assert_allclose(rollout.reward[5:], reference[5:].clip(-10, 10), rtol=1e-4, atol=1e-4)


# proves continuous-9
def test_scaled_rewards_are_clipped(wild):
    args, _, envs, rollout, _, _ = wild
    reference = reference_reward(envs, args.gamma)
    assert (np.abs(reference) > 10).any()  # there were outliers
    assert np.abs(rollout.reward).max() == 10


def test_running_statistics_equal_the_definition_in_float64():
    random = np.random.default_rng(1)
    stats, seen = RunningMeanStd(3), []
    for num_envs in (1, 8, 3, 500):
        seen.append(random.normal(1e4, 0.1, (num_envs, 3)))  # where a sum of squares loses every digit
        stats.update(seen[-1])
    seen = np.concatenate(seen)
    # The 1e-4 observations of 0 that the official implementation begins with, counted exactly.
    mean = seen.sum(0) / (len(seen) + 1e-4)
    var = (((seen - mean) ** 2).sum(0) + 1e-4 * (1 + mean**2)) / (len(seen) + 1e-4)
    np.testing.assert_allclose(stats.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(stats.std, np.sqrt(var + 1e-8), rtol=1e-9)


def test_statistics_are_saved_and_frozen_at_evaluation(tmp_path):
    args = small(tmp_path, env_id="Wild-v0", num_envs=2)
    folder = main(args)
    state = load_checkpoint(folder)["modules"]["agent"]
    agent = Agent(make_envs(args, 1), args)
    agent.load_state_dict(state)
    # The first observation and one per step, in two environments: the evaluation's are not among them.
    assert agent.obs_stats.count == 1e-4 + 2 * (1 + 128)
    assert agent.return_stats.count == 1e-4 + 2 * 128
    obs = np.random.default_rng(1).normal([0, 5, -500, 0], [0.1, 1, 100, 1], (6, 4))
    policy = make_policy(agent)
    first, again = policy(obs, {}, None), policy(obs, {}, None)
    np.testing.assert_array_equal(first, again)
    normalized = (obs - agent.obs_stats.mean) / agent.obs_stats.std
    expected = agent.actor(torch.tensor(normalized.clip(-10, 10), dtype=torch.float32))
    np.testing.assert_allclose(first, expected.detach().numpy(), atol=1e-6)
    assert agent.obs_stats.count == 1e-4 + 2 * (1 + 128)


def test_logged_returns_are_raw(wild):
    _, _, envs, rollout, _, run = wild
    returns, running = [], np.zeros(3)
    for (_, reward, *_), done in zip(envs.steps, rollout.done):
        running += reward
        returns += running[done].tolist()
        running[done] = 0
    np.testing.assert_allclose(run.episodes["rollout/ep_reward"], returns, rtol=1e-5)


def test_time_limit_bootstrap_uses_the_normalised_final_observation(tmp_path):
    args = small(tmp_path, env_id="Wild-v0", num_envs=2, time_limit_bootstrap=True)
    agent, envs, rollout, _, _ = first_rollout(args)
    reward = reference_reward(envs, args.gamma).clip(-10, 10)
    seen, checked = [envs.first_obs], 0
    for t, (obs, _, termination, truncation, final_obs) in enumerate(envs.steps):
        seen.append(obs)
        mean, var = np.concatenate(seen).mean(0), np.concatenate(seen).var(0)
        for n in np.flatnonzero(truncation & ~termination):
            normalized = ((final_obs[n] - mean) / np.sqrt(var + 1e-8)).clip(-10, 10)
            value = agent.critic(torch.tensor(normalized, dtype=torch.float32)).item()
            assert rollout.reward[t, n] == pytest.approx(reward[t, n] + args.gamma * value, abs=1e-3)
            checked += 1
        for n in np.flatnonzero(termination):
            assert rollout.reward[t, n] == pytest.approx(reward[t, n], abs=1e-3)
    assert checked >= 3


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Pendulum-v1"])
def test_two_updates(tmp_path, env_id):
    points = curves(main(small(tmp_path, env_id=env_id, eval_episodes=0)))
    assert len(points["train/policy_loss"]) == 2
    assert all(np.isfinite(values).all() for values in points.values())


def test_ratio_is_one_on_the_first_minibatch(wild):
    args, agent, _, rollout, next_obs, _ = wild
    batch = estimate(agent, rollout, next_obs, args)
    log_prob = torch.distributions.Normal(agent.actor(batch.obs), agent.log_std.exp()).log_prob(batch.action).sum(-1)
    torch.testing.assert_close((log_prob - batch.log_prob).exp(), torch.ones(len(log_prob)), atol=1e-5, rtol=0)
    _, stats = ppo_loss(agent, batch, args.clip_coef, args)
    assert abs(stats["approx_kl"]) < 1e-6 and stats["clipfrac"] == 0


def test_same_seed_same_losses(tmp_path):
    settings = [{"env_id": "Pendulum-v1", "eval_episodes": 0, "seed": seed} for seed in (1, 1, 2)]
    first, second, other = (curves(main(small(tmp_path, **s))) for s in settings)
    losses = [key for key in first if key.startswith("train/")]
    assert len(losses) == 7
    assert all(first[key] == second[key] for key in losses)
    assert first["train/value_loss"] != other["train/value_loss"]


def test_resume_continues_and_enjoy_plays(tmp_path):
    folder = main(small(tmp_path, env_id="Pendulum-v1"))
    main(small(tmp_path, env_id="Pendulum-v1", resume=folder, total_timesteps=512))
    checkpoint = load_checkpoint(folder)
    assert checkpoint["step"] == 512
    assert checkpoint["modules"]["agent"]["_extra_state"]["return"]["count"] == pytest.approx(512)
    metrics = enjoy.main(enjoy.Args(folder, episodes=2, greedy=True))
    assert metrics["eval/ep_length"] == 200
    assert -2000 < metrics["eval/ep_reward"] < 0  # a raw return of Pendulum, not a scaled one


def test_discrete_actions_are_refused_in_one_line(tmp_path):
    runs = tmp_path / "runs"
    command = [sys.executable, "cleanmarl/ppo_continuous_action.py", "--env-id", "CartPole-v1", "--runs-dir", runs]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "needs Box actions" in result.stderr
    assert not runs.exists()
