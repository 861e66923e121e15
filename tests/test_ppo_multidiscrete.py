"""ppo_multidiscrete.py: independent components, no row that the agent did not choose, and the script as a whole."""

import subprocess
import sys
from pathlib import Path

from cleanmarl import enjoy, ppo_multidiscrete
from cleanmarl.cli import set_up
from cleanmarl.envs import EnvError
from cleanmarl.ppo_multidiscrete import (
    Agent,
    Args,
    collect,
    estimate,
    main,
    make_envs,
    make_policy,
    ppo_loss,
    to_vectors,
)
from cleanmarl.run import Run, load_checkpoint

import gymnasium as gym
import numpy as np
import pytest
import torch
from toys import curves, make_rollout

ROOT = Path(__file__).parents[1]


def small(tmp_path, **changes) -> Args:
    """Arguments of a run of two updates."""
    settings = {"num_envs": 4, "num_steps": 32, "total_timesteps": 256, "eval_episodes": 1, "runs_dir": str(tmp_path)}
    return Args(**settings | changes)


def test_integers_become_one_hot_where_they_are_few():
    few, many = gym.spaces.Box(-1, 2, (2,), np.int32), gym.spaces.Box(-(2**31), 2**31 - 1, (2,), np.int32)
    space, obs = gym.spaces.Dict(few=few, many=many), np.array([[2, -1]], np.int32)
    vector = to_vectors(space, {"few": obs, "many": obs})
    assert vector.dtype == np.float32 and vector.tolist() == [[0, 0, 0, 1, 1, 0, 0, 0, 2, -1]]


def first_rollout(args: Args, spread: float = 1):
    """A fresh agent, its logits spread so many times wider, its first rollout, what is seen after it, and the run."""
    set_up(args)
    envs = make_envs(args, args.num_envs)
    agent = Agent(envs, args)
    agent.actor[-1].weight.data *= spread
    obs, _ = envs.reset(seed=args.seed)
    rollout = make_rollout(ppo_multidiscrete, args, envs)
    with Run(args, ppo_multidiscrete.__file__, agent=agent) as run:
        next_obs = collect(agent, envs, obs, rollout, args, run)
    envs.close()
    return agent, rollout, next_obs, run


# proves multidiscrete-1
@pytest.mark.parametrize("env_id", ["Cleaner-v0", "RubiksCube-v0"])
def test_components_are_independent_categoricals(tmp_path, env_id):
    args = small(tmp_path, env_id=env_id, ent_coef=1.0)
    agent, rollout, next_obs, _ = first_rollout(args, spread=100)  # unequal probabilities
    batch = estimate(agent, rollout, next_obs, args)
    _, stats = ppo_loss(agent, batch, args.clip_coef, args)
    logits = agent.actor(batch.obs)
    sizes = {"Cleaner-v0": [4, 4, 4], "RubiksCube-v0": [6, 1, 3]}[env_id]
    parts = [torch.distributions.Categorical(logits=logits[:, c, :size]) for c, size in enumerate(sizes)]
    log_prob = sum(part.log_prob(batch.action[:, c]) for c, part in enumerate(parts))
    entropy = sum(part.entropy() for part in parts).mean()
    torch.testing.assert_close(batch.log_prob, log_prob, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(stats["entropy"], entropy, rtol=1e-4, atol=1e-5)


def test_choices_that_a_component_lacks_are_never_taken(tmp_path):
    agent, rollout, next_obs, _ = first_rollout(small(tmp_path, env_id="RubiksCube-v0"))
    assert agent.actor.choices.sum(-1).tolist() == [6, 1, 3]
    assert (rollout.action < [6, 1, 3]).all()
    assert all(len(np.unique(rollout.action[..., c])) == size for c, size in enumerate([6, 1, 3]))
    assert (make_policy(agent, greedy=True)(next_obs, {}, None) < [6, 1, 3]).all()
    assert (make_policy(agent, greedy=False)(next_obs, {}, None) < [6, 1, 3]).all()


def test_observations_are_one_hot_vectors(tmp_path):
    envs = make_envs(small(tmp_path), 3)
    obs, _ = envs.reset(seed=1)
    raw = envs.env.pool.reset()[0]  # the same start for these three parts of it, whatever the room
    assert obs.shape == (3, 300 + 66 + 12 + 101)  # cells, places of 3 robots, mask, step
    np.testing.assert_array_equal(obs[:, 300:366].reshape(3, 3, 2, 11).argmax(-1), raw["agents_locations"])
    np.testing.assert_array_equal(obs[:, -101:].argmax(-1), raw["step_count"])
    np.testing.assert_array_equal(obs[:, :300].reshape(3, 100, 3).sum(-1), 1)
    envs.close()


def test_what_envpool_cannot_build_is_one_line():
    with pytest.raises(EnvError, match=r"^Sudoku-v0 cannot be built: failed to open Sudoku database"):
        make_envs(Args(env_id="Sudoku-v0"), 1).reset(seed=1)


@pytest.mark.parametrize("env_id", ["Cleaner-v0", "JobShop-v0"])
def test_two_updates(tmp_path, env_id):
    points = curves(main(small(tmp_path, env_id=env_id, eval_episodes=0)))
    assert len(points["train/policy_loss"]) == 2
    assert np.isfinite(points["train/policy_loss"] + points["train/value_loss"] + points["train/entropy"]).all()


class Lock(gym.Env):
    """Gymnasium's own MultiDiscrete: a reward for each of two dials that stands where the observation says."""

    observation_space, action_space = gym.spaces.Box(0, 4, (2,), np.float32), gym.spaces.MultiDiscrete([5, 3])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.wanted = self.np_random.integers([5, 3])
        return self.wanted.astype(np.float32), {}

    def step(self, action):
        assert action.dtype.kind == "i" and self.action_space.contains(action)
        reward = float((action == self.wanted).sum())
        return *self.reset()[:1], reward, False, False, {}


gym.register("Lock-v0", Lock, max_episode_steps=10)


class TurnsTheAction(Lock):
    """It changes the array that it is given, as an environment may."""

    def step(self, action):
        returned = super().step(action)
        action -= 1
        return returned


gym.register("TurnsTheAction-v0", TurnsTheAction, max_episode_steps=10)


def test_a_rollout_has_what_was_sampled_whatever_the_environment_does_with_it(tmp_path):
    _, rollout, _, _ = first_rollout(small(tmp_path, env_id="TurnsTheAction-v0"))
    _, same, _, _ = first_rollout(small(tmp_path, env_id="Lock-v0"))
    np.testing.assert_array_equal(rollout.action, same.action)
    assert len(np.unique(rollout.action)) == 5


def test_gymnasiums_multidiscrete_actions_are_learned(tmp_path):
    points = curves(main(small(tmp_path, env_id="Lock-v0", total_timesteps=8192, learning_rate=3e-3, eval_episodes=0)))
    rewards = points["rollout/ep_reward"]
    assert rewards[0] < 7 and np.mean(rewards[-5:]) > 11  # random: 10 * (1/5 + 1/3)


# proves multidiscrete-1
@pytest.mark.parametrize("env_id", ["Cleaner-v0", "JobShop-v0"])
def test_ratio_is_one_on_the_first_minibatch(tmp_path, env_id):
    args = small(tmp_path, env_id=env_id)
    agent, rollout, next_obs, _ = first_rollout(args, spread=100)
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
    "env_id, message",
    [("Pong-v5", "actions of several integers"), ("Cleane-v0", "Cleaner-v0"), ("CartPole-v1", "Discrete(2)")],
)
def test_other_tasks_are_refused_in_one_line(tmp_path, env_id, message):
    command = [sys.executable, "cleanmarl/ppo_multidiscrete.py", "--env-id", env_id, "--runs-dir", tmp_path / "runs"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr
    assert not (tmp_path / "runs").exists()
