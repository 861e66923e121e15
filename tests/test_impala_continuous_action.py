"""impala_continuous_action.py: loss and statistics against their definitions; what actors get of them; the run."""

import sys
from pathlib import Path

from cleanmarl import enjoy
from cleanmarl import impala_continuous_action as impala
from cleanmarl.actors import Actors
from cleanmarl.cli import launch
from cleanmarl.evaluate import evaluate
from cleanmarl.run import EVAL_SEED, load_checkpoint

import gymnasium as gym
import numpy as np
import pytest
import torch
from toys import scalars

SMALL = {"env_id": "Pendulum-v1", "num_actors": 0, "total_timesteps": 128, "num_envs": 4, "unroll_length": 16}
SMALL |= {"eval_episodes": 0}


class Target(gym.Env):
    """20 steps an episode; the reward is minus the distance of the action, seen clipped, to 0.5."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([100, 3], np.float32) + self.np_random.normal(size=2).astype(np.float32), {}

    def step(self, action):
        assert -1 <= action[0] <= 1
        return self.reset()[0], -float(abs(action[0] - 0.5)), False, False, {}


gym.register("Target-v0", Target, max_episode_steps=20)


def learned(folder: Path) -> dict[str, list[tuple[int, float]]]:
    return {tag: points for tag, points in scalars(folder).items() if not tag.startswith("time/")}


def play(args):
    torch.manual_seed(0)
    player = impala.Player(args, 0, 0)
    agent = impala.Agent(player.envs, args)
    unrolls = np.zeros(args.num_envs, impala.unroll_dtype(player.envs, args))
    player.play(agent, unrolls)
    return agent, player, unrolls


# proves continuous-6, continuous-8
def test_statistics_are_those_of_all_observations_and_returns_so_far():
    args = impala.Args(**SMALL | {"unroll_length": 130}, gamma=0.9)  # Pendulum's episodes take 200 steps
    agent, player, unrolls = play(args)
    obs, reward, done = [], [], []
    for _ in range(3):
        agent.observe(unrolls)
        obs.append(unrolls["obs"][:, :-1].copy())
        reward.append(unrolls["reward"].copy())
        done.append(unrolls["truncation"].copy())
        player.play(agent, unrolls)
    obs, reward, done = np.concatenate(obs, 1).reshape(-1, 3), np.concatenate(reward, 1), np.concatenate(done, 1)
    np.testing.assert_allclose(agent.obs_stats.mean[0], obs.mean(0, np.float64), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(agent.obs_stats.std[0], obs.std(0, dtype=np.float64), rtol=1e-4)
    returns = np.zeros((4, 390))
    for n in range(4):
        return_ = 0.0
        for t in range(390):
            return_ = 0.9 * return_ + reward[n, t]
            returns[n, t] = return_
            return_ *= not done[n, t]
    assert done.any() and agent.return_stats.std.item() == pytest.approx(returns.std(), rel=1e-4)
    rewards = torch.tensor([1.0, -2.0, 1e9])
    scaled = agent.scale_reward(rewards).flatten().tolist()
    assert scaled == pytest.approx([1 / returns.std(), -2 / returns.std(), 10], rel=1e-4)


# proves continuous-1, continuous-5, continuous-7
def test_log_probs_are_those_of_the_normal_distribution_and_ratios_one():
    """With statistics that matter: those of observations far from standard."""
    args = impala.Args(**SMALL | {"env_id": "Target-v0"})
    agent, player, unrolls = play(args)
    with torch.no_grad():
        agent.log_std.fill_(-0.7)
    agent.observe(unrolls)
    player.play(agent, unrolls)
    obs = torch.from_numpy((unrolls["obs"][:, :-1] - agent.obs_stats.mean.numpy()) / agent.obs_stats.std.numpy())
    assert abs(obs.mean()) < 0.5 and 0.5 < obs.std() < 2
    normal = torch.distributions.Normal(agent.actor[1:](obs.clamp(-10, 10)), agent.log_std.exp())
    log_prob = normal.log_prob(torch.from_numpy(unrolls["action"])).sum(-1).detach()
    np.testing.assert_allclose(unrolls["log_prob"], log_prob, atol=1e-4)
    noise = (torch.from_numpy(unrolls["action"]) - normal.mean) / normal.stddev
    assert abs(noise.mean()) < 0.3 and 0.7 < noise.std() < 1.3
    _, stats = impala.impala_loss(agent, unrolls, args)
    assert abs(stats["approx_kl"]) < 1e-6
    assert np.abs(unrolls["action"]).max() > 1  # as sampled, not as clipped


def vtrace_by_definition(log_rho, reward, value, next_value, done, args):
    """Equation 1 of the paper as a sum of products, and the advantage of section 4.2, in float64, for (T,) arrays."""
    T, rho = len(reward), np.exp(np.float64(log_rho))
    targets, advantages = np.zeros(T), np.zeros(T)
    for s in range(T):
        targets[s] = value[s]
        for t in range(s, T):
            if done[s:t].any():
                break
            c = np.prod([args.vtrace_lambda * min(args.c_clip, rho[i]) for i in range(s, t)])
            delta = min(args.rho_clip, rho[t]) * (reward[t] + args.gamma * next_value[t] - value[t])
            targets[s] += args.gamma ** (t - s) * c * delta
    for s in range(T):
        following = next_value[s] if done[s] or s == T - 1 else targets[s + 1]
        advantages[s] = min(args.pg_rho_clip, rho[s]) * (reward[s] + args.gamma * following - value[s])
    return targets, advantages


def test_loss_is_its_definition():
    """Step by step in float64, on a run's second unrolls, by a policy that has changed since."""
    args = impala.Args(**SMALL | {"unroll_length": 30, "env_id": "Target-v0"}, vtrace_lambda=0.9, ent_coef=0.1)
    agent, _, unrolls = play(args)
    agent.observe(unrolls)
    with torch.no_grad():
        agent.actor[-1].weight *= 30
        agent.log_std += 0.1
    loss, _ = impala.impala_loss(agent, unrolls, args)
    gradients = torch.autograd.grad(loss, list(agent.parameters()))

    scale = agent.return_stats.std.item()
    agent, total = agent.double(), 0
    mean, std = agent.obs_stats.mean[0], agent.obs_stats.std[0]
    for unroll in unrolls:
        obs, final_obs = (((torch.from_numpy(unroll[x]) - mean) / std).clamp(-10, 10) for x in ("obs", "final_obs"))
        normal = torch.distributions.Normal(agent.actor[1:](obs[:-1]), agent.log_std.exp())
        log_prob = normal.log_prob(torch.from_numpy(unroll["action"])).sum(-1)
        value, done = agent.critic[1:](obs)[:, 0], unroll["truncation"]
        v, final_value = value.detach().numpy(), agent.critic[1:](final_obs)[:, 0].detach().numpy()
        log_rho = log_prob.detach().numpy() - unroll["log_prob"]
        steps = log_rho, (unroll["reward"] / scale).clip(-10, 10), v[:-1], np.where(done, final_value, v[1:]), done
        targets, advantages = (torch.from_numpy(x) for x in vtrace_by_definition(*steps, args))
        policy, error = -(log_prob * advantages).sum(), 0.5 * (value[:-1] - targets).square().sum()
        total = total + policy + args.vf_coef * error
        assert done.sum() == 1 and np.abs(log_rho).max() > 0.1
    total = total - args.ent_coef * normal.entropy()[0].sum() * 4 * 30
    torch.testing.assert_close(loss.double(), total, atol=1e-2, rtol=1e-4)
    for ours, theirs in zip(gradients, torch.autograd.grad(total, list(agent.parameters()))):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-2, rtol=1e-3)


def test_actors_get_the_statistics_with_the_parameters():
    """Their log-probabilities are those of version and statistics that were published together."""
    args = impala.Args(**SMALL | {"num_actors": 1})
    torch.manual_seed(0)
    envs = impala.make_envs(args, 1)
    agent, published = impala.Agent(envs, args), []
    with Actors(impala.Player, args, agent, impala.unroll_dtype(envs, args), 0) as actors:
        for version in range(15):
            published.append({name: x.clone() for name, x in agent.state_dict().items()})
            slot = actors.take(version)
            twin = impala.Agent(envs, args)
            twin.load_state_dict(published[int(slot["version"])])
            assert abs(impala.impala_loss(twin, slot["unrolls"], args)[1]["approx_kl"]) < 1e-6
            agent.observe(slot["unrolls"])
            with torch.no_grad():
                agent.actor[-1].weight.normal_()
    assert slot["version"] > 5 and not torch.equal(published[0]["obs_stats.mean"], published[14]["obs_stats.mean"])


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "HalfCheetah-v5"])
def test_two_updates_on(env_id, tmp_path):
    if env_id == "HalfCheetah-v5":
        pytest.importorskip("mujoco")
    flags = SMALL | {"env_id": env_id, "runs_dir": str(tmp_path)}
    folder = impala.main(impala.Args(**flags))
    checkpoint = load_checkpoint(folder)
    agent = checkpoint["modules"]["agent"]
    assert checkpoint["step"] == 128 and (agent["obs_stats.count"] == 128).all()
    assert torch.equal(agent["obs_stats.mean"], agent["critic.0.mean"])  # one layer of both networks
    impala.main(impala.Args(**flags | {"total_timesteps": 256, "resume": folder}))
    resumed = load_checkpoint(folder)["modules"]
    assert (resumed["agent"]["obs_stats.count"] == 256).all()
    assert resumed["optimizer"]["state"][0]["step"] == 16


def test_runs_repeat_with_and_without_actors(tmp_path):
    flags = SMALL | {"runs_dir": str(tmp_path), "total_timesteps": 512, "updates_per_collect": 1}
    one, same = (learned(impala.main(impala.Args(**flags))) for _ in range(2))
    assert one == same and {lag for _, lag in one["train/policy_lag"]} == {0}
    assert max(abs(kl) for _, kl in one["train/approx_kl"]) < 1e-6  # on-policy: statistics change after the update
    flags |= {"num_actors": 1, "deterministic": True}
    one, same = (learned(impala.main(impala.Args(**flags))) for _ in range(2))
    assert one == same and {lag for _, lag in one["train/policy_lag"]} == {0, 1}


def test_greedy_play_equals_the_evaluation_of_the_run(tmp_path):
    folder = impala.main(impala.Args(**SMALL | {"eval_episodes": 1, "runs_dir": str(tmp_path)}))
    metrics = enjoy.main(enjoy.Args(folder, episodes=1, greedy=True, seed=1 + EVAL_SEED))
    of_run = {tag: points[-1][1] for tag, points in learned(folder).items() if tag.startswith("eval/")}
    assert metrics["eval/ep_length"] == of_run["eval/ep_length"] == 200
    assert metrics["eval/ep_reward"] == pytest.approx(of_run["eval/ep_reward"], rel=1e-6)


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--env-id CartPole-v1", "(K,) of floats and CartPole-v1 has Discrete(2); try the script without"),
        ("--rho-clip 0.9", "--rho-clip 0.9 must be at least --c-clip 1.0"),
        ("--total-timesteps 9", "--total-timesteps 9 is less than the"),
    ],
)
def test_refused(flags, text, tmp_path, monkeypatch, capfd):
    line = ["impala_continuous_action.py", "--env-id", "Pendulum-v1", "--runs-dir", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", [*line, *flags.split()])
    with pytest.raises(SystemExit) as stopped:
        launch(impala.main, impala.Args)
    out, err = capfd.readouterr()
    assert stopped.value.code == 2 and not out and not list(tmp_path.iterdir())
    assert err.startswith("impala_continuous_action: ") and err.count("\n") == 1 and text in err


@pytest.mark.learning
def test_learns_the_target_in_seconds(tmp_path):
    flags = {"env_id": "Target-v0", "total_timesteps": 16_000, "learning_rate": 1e-3, "updates_per_collect": 1}
    args = impala.Args(**SMALL | flags, runs_dir=str(tmp_path))
    folder = impala.main(args)
    envs = impala.make_envs(args, 4)
    agent = impala.Agent(envs, args)
    untrained = evaluate(envs, impala.make_policy(agent), 20, seed=7)["eval/ep_reward"]
    agent.load_state_dict(load_checkpoint(folder)["modules"]["agent"])
    trained = evaluate(envs, impala.make_policy(agent), 20, seed=7)["eval/ep_reward"]
    assert untrained < -9 and trained > -4
