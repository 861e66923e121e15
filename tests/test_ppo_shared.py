"""ppo_shared.py: the trunk is shared, and the script runs, resumes, repeats itself and refuses what it cannot learn."""

import subprocess
import sys
from pathlib import Path

from cleanmarl import enjoy, ppo_shared
from cleanmarl.cli import set_up
from cleanmarl.ppo_shared import Agent, Args, collect, estimate, main, make_envs, ppo_loss
from cleanmarl.run import Run, load_checkpoint

import numpy as np
import pytest
import torch
from toys import curves, make_rollout

ROOT = Path(__file__).parents[1]


def small(tmp_path, **changes) -> Args:
    """Arguments of a run of two updates."""
    settings = {"num_steps": 32, "total_timesteps": 256, "eval_episodes": 1, "runs_dir": str(tmp_path)}
    return Args(**settings | changes)


def first_batch(args: Args):
    """A fresh agent and its first rollout as a batch."""
    set_up(args)
    envs = make_envs(args, args.num_envs)
    agent = Agent(envs, args)
    obs, _ = envs.reset(seed=args.seed)
    rollout = make_rollout(ppo_shared, args, envs)
    with Run(args, ppo_shared.__file__, agent=agent) as run:
        next_obs = collect(agent, envs, obs, rollout, args, run)
    return agent, estimate(agent, rollout, next_obs, args)


# proves core-13
def test_policy_and_value_learn_in_one_trunk():
    args = Args()
    agent = Agent(make_envs(args, 1), args)
    obs = torch.randn(5, 4)
    logits, value = agent.actor(obs), agent.critic(obs)
    (value.square().mean()).backward()
    with torch.no_grad():
        for parameter in agent.critic.parameters():
            parameter -= 0.1 * parameter.grad
    assert not torch.allclose(agent.actor(obs), logits)  # a step on the value alone moves the policy
    assert not torch.allclose(agent.critic(obs), value)
    w1, b1, w2, b2, *actor = agent.actor.parameters()
    *_, w, b = agent.critic.parameters()
    hidden = torch.tanh(torch.tanh(obs @ w1.T + b1) @ w2.T + b2)
    torch.testing.assert_close(agent.actor(obs), hidden @ actor[0].T + actor[1])
    torch.testing.assert_close(agent.critic(obs), hidden @ w.T + b)
    # Two layers of 64 and two heads, each counted (and stepped by the optimiser) once.
    assert sum(p.numel() for p in agent.parameters()) == (4 * 64 + 64) + (64 * 64 + 64) + (64 * 2 + 2) + (64 + 1)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1"])
def test_two_updates(tmp_path, env_id):
    folder = main(small(tmp_path, env_id=env_id, eval_episodes=0))
    points = curves(folder)
    assert len(points["train/policy_loss"]) == 2
    assert all(np.isfinite(values).all() for values in points.values())
    assert load_checkpoint(folder)["step"] == 256


def test_ratio_is_one_on_the_first_minibatch(tmp_path):
    args = small(tmp_path)
    agent, batch = first_batch(args)
    log_prob = torch.distributions.Categorical(logits=agent.actor(batch.obs)).log_prob(batch.action)
    torch.testing.assert_close((log_prob - batch.log_prob).exp(), torch.ones(len(log_prob)), atol=1e-5, rtol=0)
    _, stats = ppo_loss(agent, batch, args.clip_coef, args)
    assert abs(stats["approx_kl"]) < 1e-6 and stats["clipfrac"] == 0


def test_same_seed_same_losses(tmp_path):
    first, second, other = (curves(main(small(tmp_path, eval_episodes=0, seed=seed))) for seed in (1, 1, 2))
    losses = [key for key in first if key.startswith("train/")]
    assert len(losses) == 7
    assert all(first[key] == second[key] for key in losses)
    assert first["train/value_loss"] != other["train/value_loss"]


def test_resume_continues_and_enjoy_plays(tmp_path):
    folder = main(small(tmp_path))
    before = load_checkpoint(folder)
    main(small(tmp_path, resume=folder, total_timesteps=512))
    after = load_checkpoint(folder)
    assert (before["step"], after["step"]) == (256, 512)
    steps = [next(iter(c["modules"]["optimizer"]["state"].values()))["step"].item() for c in (before, after)]
    assert steps == [32, 64]  # 2 updates of 4 epochs of 4 minibatches, then 2 more
    metrics = enjoy.main(enjoy.Args(folder, episodes=2, greedy=True))
    assert metrics["eval/ep_length"] >= 8  # no CartPole falls faster


def test_continuous_actions_are_refused_in_one_line(tmp_path):
    command = [sys.executable, "cleanmarl/ppo_shared.py", "--env-id", "Pendulum-v1", "--runs-dir", tmp_path / "runs"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "Discrete actions" in result.stderr
    assert "_continuous_action.py" in result.stderr
    assert not (tmp_path / "runs").exists()
