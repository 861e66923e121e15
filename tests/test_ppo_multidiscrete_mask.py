"""ppo_multidiscrete_mask.py: invalid actions are masked, no row that the agent did not choose, and the whole."""

import subprocess
import sys
from pathlib import Path

from cleanmarl import enjoy, ppo_multidiscrete_mask
from cleanmarl.cli import set_up
from cleanmarl.ppo_multidiscrete_mask import (
    Agent,
    Args,
    collect,
    estimate,
    main,
    make_envs,
    make_policy,
    ppo_loss,
)
from cleanmarl.run import Run, load_checkpoint

import numpy as np
import pytest
import torch
from toys import curves, make_rollout

ROOT = Path(__file__).parents[1]


def small(tmp_path, **changes) -> Args:
    """Arguments of a run of two updates."""
    settings = {"num_envs": 4, "num_steps": 32, "total_timesteps": 256, "eval_episodes": 1, "runs_dir": str(tmp_path)}
    return Args(**settings | changes)


def first_rollout(args: Args):
    """A fresh agent, its first rollout, the observation after it, and the run."""
    set_up(args)
    envs = make_envs(args, args.num_envs)
    agent = Agent(envs, args)
    obs, _ = envs.reset(seed=args.seed)
    rollout = make_rollout(ppo_multidiscrete_mask, args, envs)
    with Run(args, ppo_multidiscrete_mask.__file__, agent=agent) as run:
        next_obs = collect(agent, envs, obs, rollout, args, run)
    envs.close()
    return agent, rollout, next_obs, run


# proves aux-4
def test_invalid_actions_have_no_probability_and_no_gradient(tmp_path):
    args = small(tmp_path, num_steps=64)
    agent, rollout, next_obs, _ = first_rollout(args)
    mask = rollout.obs[..., -12:].reshape(64, 4, 3, 4).astype(bool)
    assert 0.2 < mask.mean() < 0.9
    assert np.take_along_axis(mask, rollout.action[..., None], -1).all()  # all 768 actions were legal
    batch = estimate(agent, rollout, next_obs, args)
    legal = torch.from_numpy(mask).flatten(0, 1)
    logits = agent.actor(batch.obs)
    policy = torch.distributions.Categorical(logits=torch.where(legal, logits, -torch.inf))
    assert (policy.probs[~legal] == 0).all()
    torch.testing.assert_close(logits.softmax(-1), policy.probs)
    _, stats = ppo_loss(agent, batch, args.clip_coef, args)
    p = policy.probs[legal]
    assert stats["entropy"].item() == pytest.approx(-(p * p.log()).sum().item() / len(legal), rel=1e-4)

    raw = []
    agent.actor[-1].register_forward_hook(lambda layer, inputs, output: (raw.append(output), output.retain_grad())[1])
    ppo_loss(agent, batch, args.clip_coef, args)[0].backward()
    gradient = raw[0].grad.unflatten(-1, (3, 4))
    assert (gradient[~legal] == 0).all()
    several = legal & (legal.sum(-1, keepdim=True) > 1)
    assert (gradient[several] != 0).float().mean() > 0.9


def test_mask_is_the_environments(tmp_path):
    envs = make_envs(small(tmp_path), 5)
    envs.reset(seed=1)
    raw = envs.env.pool.reset()[0]
    obs = envs.vectors(raw)
    np.testing.assert_array_equal(obs[:, -12:].reshape(5, 3, 4), raw["action_mask"])
    raw["action_mask"][2, 1] = False  # a robot that is walled in
    np.testing.assert_array_equal(envs.vectors(raw)[2, -12:].reshape(3, 4)[1], [1, 0, 0, 0])
    envs.close()


def test_what_an_episode_ended_in_is_of_its_own_environment(tmp_path, monkeypatch):
    envs = make_envs(small(tmp_path), 5)
    envs.reset(seed=1)
    raw = envs.env.pool.reset()[0]
    monkeypatch.setattr(envs.env, "step", lambda action: (raw, 0, 0, 0, {"final_obs": raw}))
    obs, *_, info = envs.step(None)
    assert (obs[0] != obs[4]).any() and (info["final_obs"] == obs).all()
    envs.close()


def test_policy_obeys_the_mask(tmp_path):
    args = small(tmp_path)
    agent = Agent(make_envs(args, 1), args)
    torch.nn.init.normal_(agent.actor[-1].weight, std=10)
    obs = torch.randn(200, 300 + 66 + 101 + 12)
    mask = torch.rand(200, 3, 4) < 0.3
    mask[..., 3] |= ~mask.any(-1)
    obs[:, -12:] = mask.flatten(1).float()
    for greedy in (True, False):
        action = make_policy(agent, greedy)(obs.numpy(), {}, None)
        assert np.take_along_axis(mask.numpy(), action[..., None], -1).all()


@pytest.mark.parametrize("env_id", ["Cleaner-v0", "JobShop-v0"])
def test_two_updates(tmp_path, env_id):
    points = curves(main(small(tmp_path, env_id=env_id, eval_episodes=0)))
    assert len(points["train/policy_loss"]) == 2
    assert np.isfinite(points["train/policy_loss"] + points["train/value_loss"] + points["train/entropy"]).all()


@pytest.mark.parametrize("env_id", ["Cleaner-v0", "JobShop-v0"])
def test_ratio_is_one_on_the_first_minibatch(tmp_path, env_id):
    args = small(tmp_path, env_id=env_id)
    agent, rollout, next_obs, _ = first_rollout(args)
    batch = estimate(agent, rollout, next_obs, args)
    components = torch.distributions.Categorical(logits=agent.actor(batch.obs)).log_prob(batch.action)
    ratio = (components.sum(-1) - batch.log_prob).exp()
    torch.testing.assert_close(ratio, torch.ones(len(ratio)), atol=1e-5, rtol=0)
    _, stats = ppo_loss(agent, batch, args.clip_coef, args)
    assert abs(stats["approx_kl"]) < 1e-6 and stats["clipfrac"] == 0


def test_no_row_of_a_rollout_is_the_environments_own(tmp_path):
    _, rollout, _, run = first_rollout(small(tmp_path, num_steps=64, env_id="JobShop-v0"))
    # Every step of JobShop costs 1 or 10; the step in which envpool resets by itself would have a reward of 0.
    assert rollout.done.sum() > 20
    assert set(np.unique(rollout.reward)) <= {-1.0, -10.0}
    complete = [rollout.reward[: np.flatnonzero(done)[-1] + 1, n].sum() for n, done in enumerate(rollout.done.T)]
    assert sum(run.episodes["rollout/ep_reward"]) == pytest.approx(sum(complete))
    assert run.num_episodes == rollout.done.sum()


def test_same_seed_same_losses(tmp_path):
    first, second, other = (curves(main(small(tmp_path, eval_episodes=0, seed=seed))) for seed in (1, 1, 2))
    losses = [key for key in first if key.startswith("train/")]
    assert len(losses) == 7
    assert all(first[key] == second[key] for key in losses)
    assert first["train/value_loss"] != other["train/value_loss"]


def test_resume_continues_and_enjoy_plays(tmp_path):
    folder = main(small(tmp_path))
    main(small(tmp_path, resume=folder, total_timesteps=512))
    checkpoint = load_checkpoint(folder)
    assert checkpoint["step"] == 512
    assert next(iter(checkpoint["modules"]["optimizer"]["state"].values()))["step"] == 64  # 4 updates of 16 minibatches
    assert enjoy.main(enjoy.Args(folder, episodes=2, greedy=True))["eval/ep_length"] >= 1


@pytest.mark.parametrize(
    "env_id, message", [("Pong-v5", "actions of several integers"), ("RubiksCube-v0", "needs a mask")]
)
def test_other_tasks_are_refused_in_one_line(tmp_path, env_id, message):
    command = [
        sys.executable,
        "cleanmarl/ppo_multidiscrete_mask.py",
        "--env-id",
        env_id,
        "--runs-dir",
        tmp_path / "runs",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr
    assert not (tmp_path / "runs").exists()
