"""maddpg_multienvs.py: what it adds to maddpg.py, parallel environments and several updates a round."""

import dataclasses
import sys

from cleanmarl import enjoy, maddpg, maddpg_multienvs
from cleanmarl.cli import launch
from cleanmarl.evaluate import evaluate
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
from test_maddpg import CPU, SMALL, played, world
from toys import Quiet, scalars


def episodes_of(buffer, index):
    """The stored episodes of Toy's environment `index`, whose first state tells it."""
    first = world(1, first=index).reset()[1]["state"][0]
    return [episode for episode in buffer.episodes if np.array_equal(episode.state[0], first)]


def test_every_environment_plays_as_if_it_were_alone(monkeypatch):
    """Without noise: episodes of different lengths neither wait nor mix."""
    monkeypatch.setattr(maddpg_multienvs, "gumbel_noise", lambda *shape: 0)
    args = maddpg_multienvs.Args(individual_critics=True)
    together = played(maddpg_multienvs, world(3), args, num_episodes=30, scale=3)[2]
    for i in range(3):
        alone = played(maddpg_multienvs, world(1, first=i), args, num_episodes=8, scale=3)[2]
        ours, theirs = episodes_of(together, i), episodes_of(alone, i)
        assert len(ours) >= 8 and len(theirs) >= 8
        for a, b in zip(ours, theirs):
            for x, y in zip(a, b):
                np.testing.assert_array_equal(x, y)
    assert len(episodes_of(together, 0)) > len(episodes_of(together, 2))  # the shorter ones come more often


def test_a_round_is_n_episodes():
    envs, run = world(3), Quiet()
    args = maddpg_multienvs.Args(individual_critics=True)
    agent, buffer = maddpg_multienvs.Agent(envs, args), maddpg_multienvs.Buffer(envs, args)
    now = maddpg_multienvs.collect(agent, envs, envs.reset(), buffer, run)
    assert (
        run.num_episodes == len(buffer.episodes) == 3 and run.step == 3 * 7
    )  # of 5, 6 and 7 steps; two were already going on
    for k in range(2, 40):  # what a round has too much, the next one has too little
        now = maddpg_multienvs.collect(agent, envs, now, buffer, run)
        assert 3 * k <= run.num_episodes <= 3 * k + 2


def test_losses_are_those_of_the_parent():
    args = maddpg_multienvs.Args(individual_critics=True)
    agent, critic, buffer = played(maddpg_multienvs, world(3), args)
    batch = buffer.sample(5, CPU)
    agent, critic = agent.float(), critic.float()
    results = []
    for script in (maddpg, maddpg_multienvs):
        torch.manual_seed(1)
        target = script.critic_targets(agent, critic, batch, 0.99)
        results.append([target, script.critic_loss(critic, batch, target), script.actor_loss(agent, critic, batch)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("env_id", ["mpe/simple_spread_v3", "matrix/climbing", "toy/each?varied=True"])
def test_two_rounds_and_what_they_leave_behind(env_id, toy, tmp_path):
    args = maddpg_multienvs.Args(env_id=env_id, **SMALL | {"total_timesteps": 200}, epochs=3, runs_dir=str(tmp_path))
    folder = maddpg_multienvs.main(args)
    saved, points = load_checkpoint(folder), scalars(folder)
    assert saved["step"] >= 200 and (folder / "done.json").exists()
    assert all(torch.isfinite(x).all() for x in saved["modules"]["agent"].values())
    num_updates = saved["modules"]["critic"]["num_updates"]
    assert points["train/num_updates"][-1][1] == num_updates > 0 and num_updates % 3 == 0  # epochs
    if not env_id.startswith("toy"):  # rounds of exactly four episodes
        assert num_updates == 3 * saved["num_episodes"] // 4
        assert len(points["eval/ep_reward"]) == saved["num_episodes"] // 4
    names = ["rollout/ep_reward", "rollout/ep_length", "rollout/num_episodes", "train/critic_loss", "train/actor_loss"]
    names += ["train/actor_gradients", "train/critic_gradients", "eval/std_ep_reward", "eval/ep_length", "time/SPS"]
    assert set(names) <= points.keys()


def test_target_network_update_freq_counts_updates(tmp_path):
    """With polyak 1 targets equal the networks after every second update, and not after a third one."""
    args = maddpg_multienvs.Args(**SMALL | {"total_timesteps": 100}, polyak=1.0, runs_dir=str(tmp_path))
    args = dataclasses.replace(args, target_network_update_freq=2)
    for epochs, are_equal in ((2, True), (3, False)):
        modules = load_checkpoint(maddpg_multienvs.main(dataclasses.replace(args, epochs=epochs)))["modules"]
        equal = torch.equal(modules["agent"]["actor.1.weight"], modules["target_agent"]["actor.1.weight"])
        assert equal == are_equal


def test_same_seed_same_losses_and_resume(tmp_path):
    args = maddpg_multienvs.Args(**SMALL, runs_dir=str(tmp_path))
    folder = maddpg_multienvs.main(args)
    first, second = scalars(folder), scalars(maddpg_multienvs.main(args))
    for tag in ("train/critic_loss", "train/actor_loss", "rollout/ep_reward", "eval/ep_reward"):
        assert first[tag] == second[tag]
    maddpg_multienvs.main(dataclasses.replace(args, resume=folder, total_timesteps=800))
    after = load_checkpoint(folder)
    assert after["step"] == 800 and after["num_episodes"] == len(after["modules"]["buffer"]["lengths"]) == 32
    assert after["modules"]["critic"]["num_updates"] == 32
    assert all(np.isfinite(value) for _, value in scalars(folder)["train/critic_loss"])


def test_enjoy_plays_the_run(tmp_path):
    folder = maddpg_multienvs.main(maddpg_multienvs.Args(**SMALL, runs_dir=str(tmp_path)))
    assert np.isfinite(enjoy.main(enjoy.Args(folder, episodes=3, greedy=True))["eval/ep_reward"])


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--env-id mpe/simple_spread_v3?continuous_actions=True", "try a ..._continuous_action.py"),
        ("--batch-size 20 --buffer-size 10", "--batch-size 20 episodes do not fit into --buffer-size 10"),
        ("--polyak 0", "--polyak must be in (0, 1], not 0.0"),
        ("--epochs 0", "--epochs must be greater than 0"),
    ],
)
def test_bad_input(flags, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["maddpg_multienvs.py", *flags.split(), "--runs-dir", str(tmp_path / "runs")])
    with pytest.raises(SystemExit) as exit_:
        launch(maddpg_multienvs.main, maddpg_multienvs.Args)
    line = capsys.readouterr().err
    assert exit_.value.code == 2 and line.startswith("maddpg_multienvs: ") and text in line and line.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.learning
def test_is_better_than_the_untrained_policy_in_seconds(tmp_path):
    env_id = "mpe/simple_speaker_listener_v4"
    args = maddpg_multienvs.Args(env_id=env_id, total_timesteps=30_000, runs_dir=str(tmp_path), eval_episodes=0)
    args = dataclasses.replace(args, learning_rate_actor=1e-3, learning_rate_critic=1e-3, eval_steps=10**6)
    folder = maddpg_multienvs.main(args)
    envs = maddpg_multienvs.make_envs(args, 32)
    agent = maddpg_multienvs.Agent(envs, args)
    untrained = evaluate(envs, maddpg_multienvs.make_policy(agent, greedy=False), 320, seed=7)
    agent.load_state_dict(load_checkpoint(folder)["modules"]["agent"])
    trained = evaluate(envs, maddpg_multienvs.make_policy(agent, greedy=False), 320, seed=7)
    error = np.hypot(untrained["eval/std_ep_reward"], trained["eval/std_ep_reward"]) / np.sqrt(320)
    assert trained["eval/ep_reward"] - untrained["eval/ep_reward"] > 5 * error
