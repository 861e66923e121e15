"""ppo_atari_envpool.py and its environments: resets in the same step, scores, lives, options, agreement with ALE."""

import dataclasses
import importlib.util
import os
import sys
from pathlib import Path

from cleanmarl import enjoy, ppo_atari, ppo_atari_envpool
from cleanmarl.cli import UsageError
from cleanmarl.envs import EnvError, env_seeds
from cleanmarl.envs.pool import EnvPool, envpool_spec
from cleanmarl.evaluate import evaluate, pictures_per_second
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
from toys import Quiet, losses, make_rollout

envpool = pytest.importorskip("envpool")
ROOT = Path(__file__).resolve().parent.parent
SMALL = {"total_timesteps": 64, "num_envs": 2, "num_steps": 16, "num_minibatches": 2, "update_epochs": 1}
SMALL |= {"eval_episodes": 0}
LIVES = {"episodic_life": True, "reward_clip": True}


def make(game="Breakout", num_envs=1):
    return ppo_atari_envpool.make_envs(ppo_atari_envpool.Args(env_id=f"{game}-v5"), num_envs)


def collect(args, envs, agent):
    rollout, quiet = make_rollout(ppo_atari_envpool, args, envs), Quiet()
    obs = ppo_atari_envpool.collect(agent, envs, envs.reset(seed=1)[0], rollout, args, quiet)
    return rollout, obs, quiet


def test_steps_that_reset_change_no_other_advantage_and_cleanrls_scores_hold_points_of_games_cut_short():
    """What benchmark/envpool_puzzle.py shows."""
    spec = importlib.util.spec_from_file_location("envpool_puzzle", ROOT / "benchmark" / "envpool_puzzle.py")
    envpool_puzzle = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(envpool_puzzle)
    for flags, line in (
        ({"num_steps": 0}, "--num-steps must be greater than 0, not 0"),
        ({"num_steps": 3}, "too few games ended: raise --num-steps"),
    ):
        with pytest.raises(UsageError, match=line):
            envpool_puzzle.main(envpool_puzzle.Args(**flags))
    played = envpool_puzzle.play(envpool_puzzle.Args(num_envs=3, num_steps=600, max_episode_steps=190))
    assert 0.01 < played["resets"].mean() < 0.05 and played["truncation"].any()
    assert envpool_puzzle.change_of_advantages(played)[0] < 1e-6
    num_scores, num_games, points = 0, 0, 0
    for n in range(3):
        one = {name: x[:, n : n + 1] for name, x in played.items()}
        (ends,) = np.nonzero((one["done"] & (one["lives"] == 0))[:, 0])
        until_last = {name: x[: ends[-1] + 1] for name, x in one.items()}
        logged, true = envpool_puzzle.cleanrl_scores(until_last), envpool_puzzle.true_scores(until_last)
        assert sum(logged) == sum(true) == until_last["score"].sum()
        num_scores, num_games, points = num_scores + len(logged), num_games + len(true), points + sum(logged)
    assert 3 <= num_scores < num_games and points > 0


@pytest.mark.parametrize("game, options", [("Breakout-v5", LIVES), ("Pong-v5", {"max_episode_steps": 60, **LIVES})])
def test_trajectories_are_envpools_without_the_steps_that_reset(game, options):
    """envpool's own autoreset, with the steps after each end taken out, gives the same observations and rewards."""
    ours = EnvPool(game, 3, **options)
    seeds = [s % 2**31 for s in env_seeds(5, 3)]
    theirs = envpool.make(game, "gymnasium", num_envs=3, num_threads=1, seed=seeds, **options)
    rngs = [np.random.default_rng(n) for n in range(3)]
    tape = [[] for _ in range(3)]  # (obs, reward, termination, truncation, action that follows)
    obs, _ = theirs.reset()
    outcome, done = [np.zeros(3)] * 3, np.zeros(3, bool)
    for _ in range(300):
        action = np.array([rng.integers(4) for rng in rngs])
        for n in range(3):
            tape[n].append((obs[n], *(x[n] for x in outcome), done[n], action[n]))
        obs, *outcome, _ = theirs.step(action)
        done = outcome[1] | outcome[2]
    obs, info = ours.reset(seed=5)
    position, ends = [0, 0, 0], 0
    for _ in range(200):
        action = np.zeros(3, np.int64)
        for n in range(3):
            np.testing.assert_array_equal(obs[n], tape[n][position[n]][0])
            action[n] = tape[n][position[n]][-1]
        obs, reward, termination, truncation, info = ours.step(action)
        for n in range(3):
            position[n] += 1
            expected = tape[n][position[n]]
            assert (reward[n], termination[n], truncation[n]) == expected[1:4]
            if expected[4]:
                ends += 1
                assert info["_final_obs"][n]
                np.testing.assert_array_equal(info["final_obs"][n], expected[0])
                position[n] += 1  # the step that only resets
    assert ends >= 6


def test_processes_of_torchrun_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    threads = []
    for processes in (None, 2, 99):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes or 1))
        envs = EnvPool("Breakout-v5", 4)
        envs.reset(seed=1)
        threads.append(envs.pool.config["num_threads"])
    assert threads == [4, 3, 1]


# proves atari-3
def test_five_lives_are_one_game_and_its_score():
    envs, quiet, lost, score, length = make("Breakout", 2), Quiet(), 0, 0, 0
    rng = np.random.default_rng(0)
    envs.reset(seed=1)
    info = {}
    while not info.get("_episode", [False])[0]:
        _, reward, termination, _, info = envs.step(rng.integers(4, size=2))
        score, length, lost = score + reward[0], length + 1, lost + termination[0]
        if "_episode" in info:
            quiet.log_episodes(info)
    assert lost == 5 and length in quiet.lengths and score in quiet.returns  # Breakout's first bricks are worth 1


def test_a_time_limit_ends_the_game():
    envs = EnvPool("Breakout-v5", 2, max_episode_steps=15, **LIVES)
    envs.reset(seed=1)
    for t in range(1, 31):
        _, _, termination, truncation, info = envs.step(np.zeros(2, np.int64))
        assert truncation.all() == (t % 15 == 0) and not termination.any()
        assert ("_episode" in info) == (t % 15 == 0)
    assert info["episode"]["l"].tolist() == [15, 15]


def test_a_game_cut_short_is_logged_with_its_own_score():
    """With lives left, too; CleanRL's statistics leave it out and add its points to the next game's."""
    envs, quiet, rng = EnvPool("Breakout-v5", 4, max_episode_steps=60, **LIVES), Quiet(), np.random.default_rng(0)
    envs.reset(seed=1)
    points, expected = np.zeros(4), []  # Breakout's first bricks are worth 1, which no clipping changes
    for _ in range(180):
        _, reward, termination, truncation, info = envs.step(rng.integers(4, size=4))
        points += reward
        if "_episode" in info:
            assert (info["_episode"] == truncation).all() and not (truncation & termination).any()
            quiet.log_episodes(info)
            expected += points[truncation].tolist()
            points[truncation] = 0
    assert quiet.returns == expected and quiet.lengths == [60] * 12 and max(expected) > 0


# proves atari-1
def test_games_begin_after_different_numbers_of_no_ops():
    obs, _ = make("Seaquest", 6).reset(seed=1)  # where everything moves
    assert len(np.unique(obs.reshape(6, -1), axis=0)) > 3


# proves atari-2, atari-4
def test_fire_starts_the_game_and_a_step_is_four_frames():
    envs, ends = make("Breakout"), []
    envs.reset(seed=1)
    for t in range(100):  # the paddle does not move, the ball does, and is lost after a second and a half
        if envs.step(np.zeros(1, np.int64))[2][0]:
            ends.append(t)
    assert len(ends) >= 3 and max(np.diff(ends)) < 30


# proves atari-5, atari-7
def test_observations_are_the_last_four_grey_frames():
    envs = make("Pong")
    obs, _ = envs.reset(seed=1)
    assert obs.shape == (1, 4, 84, 84) and obs.dtype == np.uint8 and (obs == obs[:, :1]).all()
    for _ in range(20):
        after = envs.step(np.zeros(1, np.int64))[0]
        np.testing.assert_array_equal(after[:, :3], obs[:, 1:])
        obs = after


# proves atari-6
def test_the_learner_sees_signs_and_the_statistics_see_scores():
    envs, quiet, rewards = make("SpaceInvaders", 2), Quiet(), set()
    rng = np.random.default_rng(0)
    envs.reset(seed=1)
    while not quiet.returns:
        _, reward, _, _, info = envs.step(rng.integers(6, size=2))
        rewards |= set(reward.tolist())
        if "_episode" in info:
            quiet.log_episodes(info)
    assert rewards == {0, 1} and quiet.returns[0] % 5 == 0 and quiet.returns[0] > 0


def test_agrees_with_the_wrappers_of_ppo_atari():
    """Same shapes, ranges and actions, pictures of the same brightness; lives last about as long, games have 5."""
    pytest.importorskip("ale_py")
    both = [ppo_atari.make_envs(ppo_atari.Args(), 6), make("Breakout", 6)]
    assert both[0].single_observation_space == both[1].single_observation_space
    assert both[0].single_action_space.n == both[1].single_action_space.n
    means, lives = [], []
    for envs in both:
        rng, lost, quiet = np.random.default_rng(0), np.zeros(6, int), Quiet()
        obs, _ = envs.reset(seed=1)
        assert obs.shape == (6, 4, 84, 84) and obs.dtype == np.uint8
        means.append(obs.mean())
        for _ in range(250):
            _, reward, termination, _, info = envs.step(rng.integers(4, size=6))
            assert set(reward.tolist()) <= {0, 1}
            lost += termination
            if "_episode" in info:
                assert (lost[info["_episode"]] % 5 == 0).all()
                quiet.log_episodes(info)
        assert len(quiet.returns) == (lost // 5).sum() > 0
        lives.append(lost.sum())
    assert abs(means[0] - means[1]) < 1 and 0.5 < lives[0] / lives[1] < 2


def test_seeds():
    envs = make("Seaquest", 2)
    first, same, other = (envs.reset(seed=seed)[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, same)
    assert (first != other).any()
    more = make("Seaquest", 3).reset(seed=1)[0]  # environment i has the same games whatever their number
    np.testing.assert_array_equal(more[:2], first)


# proves atari-8
def test_policy_and_value_share_the_nature_cnn():
    agent = ppo_atari_envpool.Agent(make(), ppo_atari_envpool.Args())
    shapes = [(32, 4, 8, 8), (32,), (64, 32, 4, 4), (64,), (64, 64, 3, 3), (64,), (512, 3136), (512,)]
    assert [tuple(p.shape) for p in agent.network.parameters()] == shapes
    obs = torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8)
    x, p = obs / 255, list(agent.network.parameters())
    for i, stride in enumerate((4, 2, 1)):
        x = torch.conv2d(x, *p[2 * i : 2 * i + 2], stride=stride).relu()
    hidden = (x.flatten(1) @ p[6].T + p[7]).relu()
    expected = agent.actor(hidden), agent.critic(hidden)[:, 0]
    torch.testing.assert_close(agent(obs), expected, atol=1e-5, rtol=1e-4)
    for head in range(2):
        agent.zero_grad()
        agent(obs)[head].sum().backward()
        assert all(p.grad.abs().sum() > 0 for p in agent.network.parameters())


# proves atari-9
def test_pixels_are_scaled():
    agent = ppo_atari_envpool.Agent(make(), ppo_atari_envpool.Args())
    obs = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    logits, value = agent(obs)
    hidden = agent.network(obs.double().div(255).float())
    torch.testing.assert_close(logits, agent.actor(hidden))
    torch.testing.assert_close(value, agent.critic(hidden)[:, 0])


def test_first_ratio_is_one():
    args = ppo_atari_envpool.Args(**SMALL | {"num_steps": 60})
    torch.manual_seed(3)
    envs = make(num_envs=2)
    agent = ppo_atari_envpool.Agent(envs, args)
    with torch.no_grad():
        agent.actor.weight *= 10
    rollout, obs, _ = collect(args, envs, agent)
    batch = ppo_atari_envpool.estimate(agent, rollout, obs, args)
    assert rollout.done.any()
    for part in torch.randperm(len(batch.obs)).split(20):
        minibatch = ppo_atari_envpool.Batch(*(x[part] for x in batch))
        log_prob = agent(minibatch.obs)[0].log_softmax(-1).gather(-1, minibatch.action[:, None]).squeeze(-1)
        torch.testing.assert_close((log_prob - minibatch.log_prob).exp(), torch.ones(20), atol=1e-5, rtol=0)


def test_time_limit_bootstrap_adds_the_value_of_the_final_observation():
    args = ppo_atari_envpool.Args(num_envs=2, num_steps=8, time_limit_bootstrap=True)
    envs = EnvPool("Breakout-v5", 2, max_episode_steps=5, **LIVES)
    torch.manual_seed(0)
    agent = ppo_atari_envpool.Agent(envs, args)
    rollout, _, quiet = collect(args, envs, agent)
    assert rollout.done.sum(1).tolist() == [0, 0, 0, 0, 2, 0, 0, 0] and quiet.lengths == [5, 5]
    replay = EnvPool("Breakout-v5", 2, max_episode_steps=5, **LIVES)
    replay.reset(seed=1)
    for t in range(5):
        _, reward, _, _, info = replay.step(rollout.action[t])
    with torch.no_grad():
        value = agent(torch.from_numpy(info["final_obs"]))[1].numpy()
    np.testing.assert_allclose(rollout.reward[4], reward + 0.99 * value, atol=1e-5)


def test_bf16_is_close_to_fp32():
    torch.manual_seed(0)
    agent = ppo_atari_envpool.Agent(make(), ppo_atari_envpool.Args())
    obs = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    exact = agent(obs)
    agent.bf16 = True
    close = agent(obs)
    assert close[0].dtype == close[1].dtype == torch.float32 and (close[1] != exact[1]).any()
    torch.testing.assert_close(close, exact, atol=0.02, rtol=0.02)


def test_two_updates_same_seed_same_losses_resume_and_enjoy(tmp_path):
    args = ppo_atari_envpool.Args(**SMALL, runs_dir=str(tmp_path))
    folder = ppo_atari_envpool.main(args)
    assert losses(folder) == losses(ppo_atari_envpool.main(args))
    assert losses(folder) != losses(ppo_atari_envpool.main(dataclasses.replace(args, seed=2, bf16="on")))
    checkpoint = load_checkpoint(folder)
    assert checkpoint["step"] == 64 and all(torch.isfinite(x).all() for x in checkpoint["modules"]["agent"].values())

    ppo_atari_envpool.main(dataclasses.replace(args, resume=folder, total_timesteps=96))
    resumed = load_checkpoint(folder)
    updates = [c["modules"]["optimizer"]["state"][0]["step"] for c in (checkpoint, resumed)]
    assert resumed["step"] == 96 and updates == [4, 6]

    metrics = enjoy.main(enjoy.Args(run_dir=folder, episodes=1))
    assert metrics["eval/ep_reward"] >= 0 and metrics["eval/ep_length"] > 50


def test_evaluation_films_games():
    envs = ppo_atari_envpool.make_envs(ppo_atari_envpool.Args(), 1, render_mode="rgb_array")
    frames = []
    metrics = evaluate(envs, lambda obs, info, done: np.zeros(1, np.int64), 1, seed=1, frames=frames)
    end = pictures_per_second(envs) // 2  # pictures of the return
    assert len(frames) == metrics["eval/ep_length"] + end > 80 and frames[0].shape == (210, 160, 3)


@pytest.mark.parametrize(
    "env_id, error, text",
    [
        ("CartPole-v1", UsageError, "needs an Atari game, such as Breakout-v5, and CartPole-v1 is none"),
        ("Brekout-v5", EnvError, "envpool has no environment 'Brekout-v5'; did you mean Breakout-v5"),
        ("ALE/Breakout-v5", EnvError, "did you mean Breakout-v5"),
    ],
)
def test_other_ids_are_refused(env_id, error, text, tmp_path):
    with pytest.raises(error, match=text):
        ppo_atari_envpool.main(ppo_atari_envpool.Args(env_id=env_id, **SMALL, runs_dir=str(tmp_path)))
    assert not list(tmp_path.iterdir())


def test_unknown_options_and_missing_packages(monkeypatch):
    with pytest.raises(EnvError, match=r"envpool's CartPole-v1 does not take these options: .*noop_max"):
        EnvPool("CartPole-v1", 1, noop_max=30)
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(EnvError, match=r"Breakout-v5 needs a package that is missing .*: pip install envpool"):
        envpool_spec("Breakout-v5")


def test_without_a_seed_each_sequence_of_games_goes_on():
    few, many, starts = EnvPool("CartPole-v1", 2), EnvPool("CartPole-v1", 3), []
    for seed in (5, None, None):
        starts.append(few.reset(seed=seed)[0].copy())
        np.testing.assert_array_equal(starts[-1], many.reset(seed=seed)[0][:2])
    assert len(np.unique(np.concatenate(starts), axis=0)) == 6
