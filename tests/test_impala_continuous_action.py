"""impala_continuous_action.py: loss and statistics against their definitions; what actors get of them; the run."""

import sys
from contextlib import closing
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cleanmarl import enjoy
from cleanmarl import impala_continuous_action as impala
from cleanmarl.run import EVAL_SEED, evaluate, launch, load_checkpoint

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
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.startswith("time/")]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def new_slot(envs, args):
    return np.zeros(1, impala.slot_dtype(envs, args))[0]


def play(args):
    torch.manual_seed(0)
    player = impala.Player(args, 0, 0)
    agent = impala.Agent(player.envs, args)
    slot = new_slot(player.envs, args)
    player.play(agent, slot)
    return agent, player, slot


def test_statistics_are_those_of_all_observations_and_returns_so_far():
    args = impala.Args(**SMALL | {"unroll_length": 130})  # Pendulum's episodes take 200 steps
    agent, player, slot = play(args)
    obs, reward, done = [], [], []
    for _ in range(3):
        agent.observe(0, slot["unrolls"], 0.9)
        obs.append(slot["unrolls"]["obs"][:, :-1].copy())
        reward.append(slot["unrolls"]["reward"].copy())
        done.append(slot["unrolls"]["truncation"].copy())
        player.play(agent, slot)
    obs, reward, done = np.concatenate(obs, 1).reshape(-1, 3), np.concatenate(reward, 1), np.concatenate(done, 1)
    np.testing.assert_allclose(agent.obs_mean, obs.mean(0, np.float64), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(agent.obs_std, obs.std(0, dtype=np.float64), rtol=1e-4)
    returns = np.zeros((4, 390))
    for n in range(4):
        return_ = 0.0
        for t in range(390):
            return_ = 0.9 * return_ + reward[n, t]
            returns[n, t] = return_
            return_ *= not done[n, t]
    assert done.any() and agent.return_stats.std == pytest.approx(returns.std(), rel=1e-4)


def test_returns_of_actors_do_not_mix():
    args = impala.Args(**SMALL)
    agent, player, slot = play(args)
    twin, other = impala.Agent(player.envs, args), slot.copy()
    player.play(agent, slot)
    for actor in (0, 1):
        agent.observe(actor, other["unrolls"], 0.9)
    for actor in (1, 0):
        agent.observe(actor, slot["unrolls"], 0.9)
    unrolls = np.concatenate([other["unrolls"], slot["unrolls"]]).reshape(2, 4)
    for part in unrolls:
        twin.observe(0, np.concatenate([part, part]), 0.9)
    assert agent.return_stats.std == pytest.approx(twin.return_stats.std, rel=1e-6)


def test_log_probs_are_those_of_the_normal_distribution_and_ratios_one():
    """With statistics that matter: those of observations far from standard."""
    args = impala.Args(**SMALL | {"env_id": "Target-v0"})
    agent, player, slot = play(args)
    with torch.no_grad():
        agent.log_std.fill_(-0.7)
    agent.observe(0, slot["unrolls"], 0.99)
    player.play(agent, slot)
    unrolls = slot["unrolls"]
    obs = torch.from_numpy((unrolls["obs"][:, :-1] - agent.obs_mean.numpy()) / agent.obs_std.numpy())
    assert abs(obs.mean()) < 0.5 and 0.5 < obs.std() < 2
    normal = torch.distributions.Normal(agent.actor(obs.clamp(-10, 10)), agent.log_std.exp())
    log_prob = normal.log_prob(torch.from_numpy(unrolls["action"])).sum(-1).detach()
    np.testing.assert_allclose(unrolls["log_prob"], log_prob, atol=1e-4)
    noise = (torch.from_numpy(unrolls["action"]) - normal.mean) / normal.stddev
    assert abs(noise.mean()) < 0.3 and 0.7 < noise.std() < 1.3
    _, stats, _ = impala.impala_loss(agent, unrolls, torch.ones(4), args)
    assert abs(stats[3]) < 1e-6
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
    agent, _, slot = play(args)
    agent.observe(0, slot["unrolls"], args.gamma)
    with torch.no_grad():
        agent.actor[-1].weight *= 30
        agent.log_std += 0.1
    unrolls, weight = slot["unrolls"], torch.tensor([1.0, 0.5, 0.2, 0.7])
    loss, _, _ = impala.impala_loss(agent, unrolls, weight, args)
    gradients = torch.autograd.grad(loss, list(agent.parameters()))

    agent, total = agent.double(), 0
    mean, std, scale = agent.obs_mean.double(), agent.obs_std.double(), agent.return_stats.std
    for unroll, w in zip(unrolls, weight):
        obs, final_obs = (((torch.from_numpy(unroll[x]) - mean) / std).clamp(-10, 10) for x in ("obs", "final_obs"))
        normal = torch.distributions.Normal(agent.actor(obs[:-1]), agent.log_std.exp())
        log_prob = normal.log_prob(torch.from_numpy(unroll["action"])).sum(-1)
        value, done = agent.critic(obs)[:, 0], unroll["truncation"]
        v, final_value = value.detach().numpy(), agent.critic(final_obs)[:, 0].detach().numpy()
        log_rho = log_prob.detach().numpy() - unroll["log_prob"]
        steps = log_rho, (unroll["reward"] / scale).clip(-10, 10), v[:-1], np.where(done, final_value, v[1:]), done
        targets, advantages = (torch.from_numpy(x) for x in vtrace_by_definition(*steps, args))
        policy, error = -(log_prob * advantages).mean(), 0.5 * (value[:-1] - targets).square().mean()
        total = total + w / 4 * (policy + args.vf_coef * error)
        assert done.sum() == 1 and np.abs(log_rho).max() > 0.1
    total = total - args.ent_coef * normal.entropy()[0].sum()
    torch.testing.assert_close(loss.double(), total, atol=1e-4, rtol=1e-4)
    for ours, theirs in zip(gradients, torch.autograd.grad(total, list(agent.parameters()))):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-4, rtol=1e-3)


def test_actors_get_the_statistics_with_the_parameters():
    """Their log-probabilities are those of version and statistics that were published together."""
    args = impala.Args(**SMALL | {"num_actors": 1})
    torch.manual_seed(0)
    envs = impala.make_envs(args, 1)
    agent = impala.Agent(envs, args)
    copy = torch.nn.utils.parameters_to_vector
    published = {0: copy([*agent.parameters(), *agent.buffers()]).detach().clone()}
    with closing(impala.Actors(args, agent, envs, 0)) as actors:
        for version in range(1, 15):
            ((actor, slot),) = actors.take(version - 1)
            twin = impala.Agent(envs, args)
            state = published[int(slot["version"])]
            torch.nn.utils.vector_to_parameters(state, [*twin.parameters(), *twin.buffers()])
            assert abs(impala.impala_loss(twin, slot["unrolls"], torch.ones(4), args)[1][3]) < 1e-6
            agent.observe(actor, slot["unrolls"], args.gamma)
            with torch.no_grad():
                agent.actor[-1].weight.normal_()
            actors.publish(version)
            published[version] = copy([*agent.parameters(), *agent.buffers()]).detach().clone()
    assert not torch.equal(published[0][-6:], published[14][-6:])


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "HalfCheetah-v5"])
def test_two_updates_on(env_id, tmp_path):
    if env_id == "HalfCheetah-v5":
        pytest.importorskip("mujoco")
    flags = SMALL | {"env_id": env_id, "runs_dir": str(tmp_path)}
    folder = impala.main(impala.Args(**flags))
    checkpoint = load_checkpoint(folder)
    agent = checkpoint["modules"]["agent"]
    assert checkpoint["step"] == 128 and agent["_extra_state"]["obs"]["count"] > 128
    torch.testing.assert_close(agent["obs_mean"].double(), agent["_extra_state"]["obs"]["mean"], rtol=1e-5, atol=1e-6)
    impala.main(impala.Args(**flags | {"total_timesteps": 256, "resume": folder}))
    resumed = load_checkpoint(folder)["modules"]
    assert resumed["agent"]["_extra_state"]["obs"]["count"] > 256
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
        ("--env-id CartPole-v1", "needs Box actions and CartPole-v1 has Discrete(2); try impala.py"),
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
