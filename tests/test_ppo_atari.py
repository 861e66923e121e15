"""ppo_atari.py: its environments against Stable-Baselines3's wrappers frame by frame, scores, lives, each detail."""

import dataclasses
import sys

from cleanmarl import enjoy, ppo_atari
from cleanmarl.cli import UsageError
from cleanmarl.envs import EnvError, env_seeds, make_gymnasium
from cleanmarl.evaluate import evaluate
from cleanmarl.run import load_checkpoint

import gymnasium as gym
import numpy as np
import pytest
import torch
from toys import Quiet, losses, make_rollout

pytest.importorskip("ale_py")
pytest.importorskip("cv2")
SMALL = {"total_timesteps": 64, "num_envs": 2, "num_steps": 16, "num_minibatches": 2, "update_epochs": 1}
SMALL |= {"eval_episodes": 0}


def make(game="Breakout", num_envs=1):
    return ppo_atari.make_envs(ppo_atari.Args(env_id=f"ALE/{game}-v5"), num_envs)


def no_ops(num_envs=1):
    return np.zeros(num_envs, np.int64)


@pytest.fixture(scope="module")
def collected():
    """Arguments, agent and batch: 60 steps of 2 games, with a lost life, by a policy that is not uniform."""
    args = ppo_atari.Args(**SMALL | {"num_steps": 60})
    torch.manual_seed(0)
    envs = make(num_envs=2)
    agent = ppo_atari.Agent(envs, args)
    with torch.no_grad():
        agent.actor.weight *= 30
    rollout = make_rollout(ppo_atari, args, envs)
    obs = ppo_atari.collect(agent, envs, envs.reset(seed=1)[0], rollout, args, Quiet())
    assert rollout.done.any()
    return args, agent, rollout, ppo_atari.estimate(agent, rollout, obs, args)


# proves atari-1, atari-2, atari-3, atari-4, atari-5, atari-6, atari-7
@pytest.mark.parametrize("game, steps", [("Breakout", 400), ("BeamRider", 150), ("Qbert", 150), ("Asterix", 150)])
def test_environments_are_stable_baselines3s_frame_by_frame(game, steps):
    wrappers = pytest.importorskip("stable_baselines3.common.atari_wrappers")
    envs = make(game)
    reference = gym.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0)
    reference = gym.wrappers.TransformObservation(wrappers.AtariWrapper(reference), lambda x: x[..., 0], None)
    reference.observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)
    reference = gym.wrappers.FrameStackObservation(reference, 4)

    rng, ends = np.random.default_rng(0), 0
    ours, theirs = envs.reset(seed=5)[0], reference.reset(seed=env_seeds(5, 1)[0])[0]
    for _ in range(steps):
        np.testing.assert_array_equal(ours[0], theirs)
        action = rng.integers(envs.single_action_space.n)
        ours, reward, termination, truncation, _ = envs.step(np.array([action]))
        theirs, *outcome, _ = reference.step(action)
        assert [reward[0], termination[0], truncation[0]] == outcome
        if termination[0]:
            ends += 1
            theirs = reference.reset()[0]
    assert ends > 0 or game != "Breakout"


# proves atari-1
def test_games_begin_after_1_to_30_no_ops():
    envs = make("Asterix")  # where no FIRE follows
    envs.reset(seed=1)
    frames = {int(envs.reset()[1]["episode_frame_number"][0]) for _ in range(60)}
    assert min(frames) >= 1 and max(frames) <= 30 and len(frames) > 15


# proves atari-2
def test_a_step_is_four_frames():
    envs = make("Asterix")
    before = envs.reset(seed=1)[1]["episode_frame_number"][0]
    assert envs.step(no_ops())[-1]["episode_frame_number"][0] == before + 4


# proves atari-3
def test_a_lost_life_ends_the_episode_but_neither_the_game_nor_its_score():
    envs = make("Breakout", 2)
    raw = gym.wrappers.RecordEpisodeStatistics(gym.make("ALE/Breakout-v5", frameskip=1, repeat_action_probability=0.0))
    raw = gym.wrappers.AtariPreprocessing(raw, 30, 4)
    raw.reset(seed=env_seeds(5, 2)[0])
    for action in (1, 2):
        raw.step(action)
    rng, lives, ends, game, steps = np.random.default_rng(2), 5, [], None, 0
    envs.reset(seed=5)
    while game is None:
        action = rng.integers(4)
        _, _, termination, _, info = envs.step(np.array([action, 0]))
        *_, over, _, raw_info = raw.step(action)
        steps += 1
        if termination[0]:
            ends.append(bool(info.get("_episode", [False])[0]))
            if over:
                game = raw_info["episode"]
            else:  # what a reset does in a game that goes on
                for action in (0, 1, 2):
                    raw.step(action)
                assert info["lives"][0] == lives - 1 and info["episode_frame_number"][0] > 10
        lives = info["lives"][0]
    assert ends == [False] * 4 + [True]
    assert info["episode"]["r"][0] == game["r"] > 0  # of all lives
    assert info["episode"]["l"][0] == steps + 2 + 4 * 3  # with those of the resets


def test_an_episode_goes_on_without_lives_until_the_game_is_over():
    """As in Qbert for some frames."""

    class LastLife(gym.Env):
        observation_space, action_space = gym.spaces.Box(0, 255, (1,), np.uint8), gym.spaces.Discrete(2)

        def reset(self, **kwargs):
            self.steps = 0
            return np.zeros(1, np.uint8), {"lives": 1}

        def step(self, action):
            self.steps += 1
            return np.zeros(1, np.uint8), 0.0, self.steps == 3, False, {"lives": 0}

    env = ppo_atari.EpisodicLife(LastLife())
    env.reset()
    assert [env.step(0)[2] for _ in range(3)] == [False, False, True]


def test_a_seeded_reset_begins_a_new_game():
    """So that a policy which was loaded is evaluated alike, whatever it has played before."""
    envs = make(num_envs=2)
    games = []
    for _ in range(2):
        obs, info = envs.reset(seed=7)
        begins, steps = obs.copy(), 0
        while "_episode" not in info:
            *_, info = envs.step(no_ops(2))
            steps += 1
        games.append((begins, steps, info["episode"]["l"]))
        for _ in range(20):  # into the next game
            envs.step(np.array([1, 3]))
    for first, second in zip(*games):
        np.testing.assert_array_equal(first, second)


# proves atari-4
def test_fire_starts_the_game():
    envs, lost = make("Breakout"), False
    envs.reset(seed=1)
    for _ in range(60):  # the paddle does not move, the ball does
        lost |= envs.step(no_ops())[2][0]
    assert lost


# proves atari-6
def test_the_learner_sees_signs_and_the_statistics_see_scores():
    envs, quiet = make("SpaceInvaders", 2), Quiet()
    rng = np.random.default_rng(0)
    envs.reset(seed=1)
    rewards = set()
    while not quiet.returns:
        _, reward, _, _, info = envs.step(rng.integers(6, size=2))
        rewards |= set(reward.tolist())
        if "_episode" in info:
            quiet.log_episodes(info)
    assert rewards == {0, 1} and quiet.returns[0] % 5 == 0 and quiet.returns[0] >= 50


# proves atari-7
def test_observations_are_the_last_four_frames():
    envs = make("Asterix")
    obs = envs.reset(seed=1)[0].copy()
    assert obs.shape == (1, 4, 84, 84) and obs.dtype == np.uint8
    assert (obs == obs[:, :1]).all()
    for _ in range(20):
        after = envs.step(no_ops())[0].copy()
        np.testing.assert_array_equal(after[:, :3], obs[:, 1:])
        obs = after


# proves atari-8
def test_policy_and_value_share_the_nature_cnn():
    agent = ppo_atari.Agent(make(), ppo_atari.Args())
    shapes = [(32, 4, 8, 8), (32,), (64, 32, 4, 4), (64,), (64, 64, 3, 3), (64,), (512, 3136), (512,)]
    assert [tuple(p.shape) for p in agent.network.parameters()] == shapes
    assert [m.stride for m in agent.network if isinstance(m, torch.nn.Conv2d)] == [(4, 4), (2, 2), (1, 1)]
    assert tuple(agent.actor.weight.shape) == (4, 512) and tuple(agent.critic.weight.shape) == (1, 512)
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
    for layer in (agent.network[0], agent.network[7]):
        w = layer.weight.detach().flatten(1)
        torch.testing.assert_close(w @ w.T, 2 * torch.eye(len(w)), atol=1e-4, rtol=0)


# proves atari-9
def test_pixels_are_scaled():
    agent = ppo_atari.Agent(make(), ppo_atari.Args())
    obs = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    hidden = agent.network(obs.double().div(255).float())
    logits, value = agent(obs)
    torch.testing.assert_close(logits, agent.actor(hidden))
    torch.testing.assert_close(value, agent.critic(hidden)[:, 0])


def test_first_ratio_is_one(collected):
    args, agent, _, batch = collected
    assert batch.log_prob.exp().std() > 0.01  # far from uniform, else any two policies would agree
    for part in torch.randperm(len(batch.obs)).split(20):
        minibatch = ppo_atari.Batch(*(x[part] for x in batch))
        log_prob = agent(minibatch.obs)[0].log_softmax(-1).gather(-1, minibatch.action[:, None]).squeeze(-1)
        torch.testing.assert_close((log_prob - minibatch.log_prob).exp(), torch.ones(20), atol=1e-5, rtol=0)
        _, stats = ppo_atari.ppo_loss(agent, minibatch, 0.1, args)
        assert abs(stats["approx_kl"]) < 1e-6 and stats["clipfrac"] == 0


def test_advantages_stop_at_a_lost_life(collected):
    _, _, rollout, batch = collected
    value, advantage = rollout.value, batch.advantage.reshape(rollout.done.shape).numpy()
    end = rollout.done
    np.testing.assert_allclose(advantage[end], rollout.reward[end] - value[end], atol=1e-6)


def test_evaluation_counts_games_not_lives():
    envs = make("Breakout", 2)
    ends = []

    def policy(obs, info, done):
        ends.append(done.copy())
        return no_ops(2)

    metrics = evaluate(envs, policy, 2, seed=1)
    assert np.sum(ends[1:]) >= 8 and metrics["eval/ep_length"] > 100  # 5 lives a game; the last ends are not seen


def test_two_updates_same_seed_same_losses_resume_and_enjoy(tmp_path):
    args = ppo_atari.Args(**SMALL, runs_dir=str(tmp_path))
    folder = ppo_atari.main(args)
    assert losses(folder) == losses(ppo_atari.main(args)) != losses(ppo_atari.main(dataclasses.replace(args, seed=2)))
    checkpoint = load_checkpoint(folder)
    assert checkpoint["step"] == 64 and all(torch.isfinite(x).all() for x in checkpoint["modules"]["agent"].values())

    ppo_atari.main(dataclasses.replace(args, resume=folder, total_timesteps=96))
    resumed = load_checkpoint(folder)
    assert resumed["step"] == 96
    assert [
        checkpoint["modules"]["optimizer"]["state"][0]["step"],
        resumed["modules"]["optimizer"]["state"][0]["step"],
    ] == [4, 6]

    metrics = enjoy.main(enjoy.Args(run_dir=folder, episodes=1))
    assert metrics["eval/ep_reward"] >= 0 and metrics["eval/ep_length"] > 50


@pytest.mark.parametrize(
    "env_id, error, text",
    [
        (
            "CartPole-v1",
            UsageError,
            "needs an Atari game, such as ALE/Breakout-v5, and CartPole-v1 is none",
        ),
        ("ALE/Brekout-v5", EnvError, "unknown environment 'ALE/Brekout-v5'; did you mean ALE/Breakout-v5"),
    ],
)
def test_other_ids_are_refused(env_id, error, text, tmp_path):
    with pytest.raises(error, match=text.replace("?", ".")):
        ppo_atari.main(ppo_atari.Args(env_id=env_id, **SMALL, runs_dir=str(tmp_path)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "package, text", [("ale_py", "pip install ale-py"), ("cv2", "opencv-python package not installed")]
)
def test_missing_extra(package, text, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(EnvError, match=text):
        make()


def test_statistics_of_other_environments_stay_as_they_were():
    envs = make_gymnasium("CartPole-v1", 2)
    envs.reset(seed=1)
    while "_episode" not in (info := envs.step(no_ops(2))[-1]):
        pass
    assert info["episode"]["r"][info["_episode"]][0] == info["episode"]["l"][info["_episode"]][0] > 5
