"""maddpg_lstm_multienvs.py: recurrent states of environments whose episodes end at different times."""

import dataclasses

from cleanmarl import enjoy, maddpg_lstm_multienvs
from cleanmarl.layers import as_numpy
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
from test_maddpg import SMALL, played, world
from test_maddpg_multienvs import episodes_of
from toys import Quiet, scalars


def test_every_environment_plays_as_if_it_were_alone(monkeypatch):
    """Without noise: a state neither waits for, nor sees, nor outlives another episode."""
    monkeypatch.setattr(maddpg_lstm_multienvs, "gumbel_noise", lambda *shape: 0)
    args = maddpg_lstm_multienvs.Args(individual_critics=True)
    together = played(maddpg_lstm_multienvs, world(3), args, num_episodes=30, scale=3)[2]
    for i in range(3):
        alone = played(maddpg_lstm_multienvs, world(1, first=i), args, num_episodes=8, scale=3)[2]
        ours, theirs = episodes_of(together, i), episodes_of(alone, i)
        assert len(ours) >= 8 and len(theirs) >= 8
        for a, b in zip(ours, theirs):
            for x, y in zip(a, b):
                np.testing.assert_array_equal(x, y)


def test_memories_are_those_of_the_episodes_under_way():
    """After a round each memory is what the actor has after exactly the observations of its own life so far."""
    args = maddpg_lstm_multienvs.Args(individual_critics=True)
    envs, run = world(3), Quiet()
    agent, buffer = maddpg_lstm_multienvs.Agent(envs, args), maddpg_lstm_multienvs.Buffer(envs, args)
    now = (*envs.reset(), maddpg_lstm_multienvs.first_memory(agent, 3, 3))
    actor = as_numpy(agent.actor)
    under_way = set()
    for _ in range(5):
        now = maddpg_lstm_multienvs.collect(agent, envs, now, buffer, run)
        for i in range(3):
            memory = maddpg_lstm_multienvs.first_memory(agent, 1, 3)
            for obs, _, _, alive, *_ in buffer.playing[i]:
                _, memory = actor(obs[None], memory)
                memory[:, ~alive] = 0
            np.testing.assert_allclose(now[2][i], memory[0], atol=1e-6)
            under_way.add(len(buffer.playing[i]))
    assert 0 in under_way and len(under_way) > 2


@pytest.mark.parametrize("env_id", ["mpe/simple_spread_v3", "matrix/climbing", "toy/each?varied=True"])
def test_two_rounds_and_what_they_leave_behind(env_id, toy, tmp_path):
    args = maddpg_lstm_multienvs.Args(env_id=env_id, **SMALL | {"total_timesteps": 200}, runs_dir=str(tmp_path))
    folder = maddpg_lstm_multienvs.main(dataclasses.replace(args, epochs=2, tbptt=5))
    saved, points = load_checkpoint(folder), scalars(folder)
    num_updates = saved["modules"]["critic"]["num_updates"]
    assert saved["step"] >= 200 and num_updates > 0 and num_updates % 2 == 0
    steps = {s["step"].item() for s in saved["modules"]["actor_optimizer"]["state"].values()}
    assert steps == {num_updates.item()}
    assert all(torch.isfinite(x).all() for x in saved["modules"]["agent"].values())
    targets = saved["modules"]["target_agent"], saved["modules"]["agent"]
    assert not torch.equal(targets[0]["actor.1.weight"], targets[1]["actor.1.weight"])
    names = ["rollout/ep_reward", "train/critic_loss", "train/actor_loss", "train/num_updates", "eval/ep_reward"]
    assert set(names) <= points.keys()


def test_targets_follow(tmp_path):
    args = maddpg_lstm_multienvs.Args(**SMALL | {"total_timesteps": 100}, polyak=1.0, runs_dir=str(tmp_path))
    modules = load_checkpoint(maddpg_lstm_multienvs.main(args))["modules"]
    for name in ("agent", "critic"):
        target = modules[f"target_{name}"]
        assert all(torch.equal(x, target[key]) for key, x in modules[name].items() if key != "num_updates")


def test_same_seed_same_losses_and_resume(tmp_path):
    args = maddpg_lstm_multienvs.Args(**SMALL, runs_dir=str(tmp_path))
    folder = maddpg_lstm_multienvs.main(args)
    first, second = scalars(folder), scalars(maddpg_lstm_multienvs.main(args))
    for tag in ("train/critic_loss", "train/actor_loss", "rollout/ep_reward", "eval/ep_reward"):
        assert first[tag] == second[tag]
    maddpg_lstm_multienvs.main(dataclasses.replace(args, resume=folder, total_timesteps=800))
    after = load_checkpoint(folder)
    assert after["step"] == 800 and len(after["modules"]["buffer"]["lengths"]) == 32
    assert np.isfinite(enjoy.main(enjoy.Args(folder, episodes=3))["eval/ep_reward"])
