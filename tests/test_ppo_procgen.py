"""ppo_procgen.py: the residual network, the scaled rewards, and the environments."""

import dataclasses
import importlib

from cleanmarl import enjoy, ppo_procgen
from cleanmarl.cli import UsageError
from cleanmarl.envs import EnvError
from cleanmarl.envs.pool import EnvPool
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
from optional import needs
from toys import Quiet, losses, make_rollout

SMALL = {"total_timesteps": 64, "num_envs": 2, "num_steps": 16, "num_minibatches": 2, "update_epochs": 1}
SMALL |= {"eval_episodes": 0}
needs_qt = needs("Qt 5")


def make(num_envs=2):
    return ppo_procgen.make_envs(ppo_procgen.Args(), num_envs)


@pytest.fixture(scope="module")
def collected():
    """Agent, rollout, batch and returns: 60 steps of 4 games by a policy that is not uniform."""
    args = ppo_procgen.Args(num_envs=4, num_steps=60)
    torch.manual_seed(0)
    envs = make(4)
    agent = ppo_procgen.Agent(envs, args)
    with torch.no_grad():
        agent.actor.weight *= 30
    rollout, quiet = make_rollout(ppo_procgen, args, envs), Quiet()
    obs = ppo_procgen.collect(agent, envs, envs.reset(seed=1)[0], rollout, args, quiet)
    return agent, rollout, ppo_procgen.estimate(agent, rollout, obs, args), quiet.returns


def residual(x, p):
    y = torch.conv2d(torch.relu(x), *p[:2], padding=1)
    return x + torch.conv2d(torch.relu(y), *p[2:4], padding=1)


# proves procgen-1, atari-9
@needs_qt
def test_the_network_is_impalas():
    agent = ppo_procgen.Agent(make(), ppo_procgen.Args())
    obs = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    p = list(agent.network.parameters())
    assert [len(x) for x in p[::2]] == [16] * 5 + [32] * 10 + [256] and p[-2].shape == (256, 2048)
    x = obs.float() / 255
    for _ in range(3):  # convolution, pooling, two residual blocks, as in figure 3 of Espeholt et al. 2018
        x = torch.max_pool2d(torch.conv2d(x, *p[:2], padding=1), 3, stride=2, padding=1)
        x = residual(residual(x, p[2:6]), p[6:10])
        p = p[10:]
    hidden = torch.relu(torch.relu(x.flatten(1)) @ p[0].T + p[1])
    logits, value = agent(obs)
    torch.testing.assert_close(logits, agent.actor(hidden), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(value, agent.critic(hidden)[:, 0], atol=1e-5, rtol=1e-4)


# proves continuous-8, continuous-9
@needs_qt
def test_rewards_are_divided_by_the_deviation_of_the_discounted_return():
    agent = ppo_procgen.Agent(make(3), ppo_procgen.Args())
    rng = np.random.default_rng(0)
    running, returns = np.zeros(3), []
    for _ in range(200):
        reward, done = rng.exponential(size=3) * (rng.random(3) < 0.1), rng.random(3) < 0.05
        running = 0.999 * running + reward
        returns += running.tolist()
        running[done] = 0
        scaled = agent.scale_reward(reward, done, 0.999)
    np.testing.assert_allclose(scaled, reward / np.std(returns), rtol=1e-3, atol=1e-9)
    assert (agent.scale_reward(np.full(3, 1e9), done, 0.999) <= 10).all()


@needs_qt
def test_returns_are_the_games_own(collected):
    _, rollout, _, returns = collected
    assert rollout.done.sum() == len(returns) > 0
    assert all(r == int(r) for r in returns)  # Starpilot pays 1 per hit
    assert set(np.unique(rollout.reward[rollout.reward > 0]) == 1) != {True}  # and the learner sees something else


@needs_qt
def test_first_ratio_is_one(collected):
    agent, _, batch, _ = collected
    for part in torch.randperm(240).split(60):
        log_prob = agent(batch.obs[part])[0].log_softmax(-1).gather(-1, batch.action[part, None]).squeeze(-1)
        torch.testing.assert_close((log_prob - batch.log_prob[part]).exp(), torch.ones(60), atol=1e-5, rtol=0)


def test_defaults_are_those_of_the_paper():
    args = ppo_procgen.Args()
    assert not args.anneal_lr and args.gamma == 0.999 and args.learning_rate == 5e-4 and args.clip_coef == 0.2
    assert (args.num_envs, args.num_steps, args.num_minibatches, args.update_epochs) == (64, 256, 8, 3)


@needs_qt
def test_two_updates_same_seed_same_losses_resume_and_enjoy(tmp_path):
    args = ppo_procgen.Args(**SMALL, runs_dir=str(tmp_path))
    folder = ppo_procgen.main(args)
    assert losses(folder) == losses(ppo_procgen.main(args))
    checkpoint = load_checkpoint(folder)["modules"]
    assert all(torch.isfinite(x).all() for name, x in checkpoint["agent"].items() if name != "_extra_state")
    assert checkpoint["agent"]["_extra_state"]["return"]["count"].round() == 64

    ppo_procgen.main(dataclasses.replace(args, resume=folder, total_timesteps=96))
    resumed = load_checkpoint(folder)["modules"]
    assert resumed["agent"]["_extra_state"]["return"]["count"].round() == 96  # the statistics went on
    assert [c["optimizer"]["state"][0]["step"] for c in (checkpoint, resumed)] == [4, 6]

    metrics = enjoy.main(enjoy.Args(run_dir=folder, episodes=1))
    assert metrics["eval/ep_reward"] >= 0 and metrics["eval/ep_length"] > 5


@needs_qt
def test_other_ids_are_refused(tmp_path):
    for env_id, error, text in [
        (
            "Breakout-v5",
            UsageError,
            "needs a Procgen game, such as StarpilotEasy-v0, and Breakout-v5 is",
        ),
        ("StarpilotEasi-v0", EnvError, "did you mean StarpilotEasy-v0"),
    ]:
        with pytest.raises(error, match=text):
            ppo_procgen.main(ppo_procgen.Args(env_id=env_id, **SMALL, runs_dir=str(tmp_path)))
    assert not list(tmp_path.iterdir())


def test_missing_qt_is_one_clear_line(tmp_path, monkeypatch):
    """What the loader says where the libraries are missing."""
    registry = importlib.import_module("envpool.registration").registry
    _, *rest = registry.specs["StarpilotEasy-v0"]
    (tmp_path / "without_qt.py").write_text("raise ImportError('libQt5Gui.so.5: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(registry.specs, "StarpilotEasy-v0", ("without_qt", *rest))
    with pytest.raises(
        EnvError, match="StarpilotEasy-v0 needs the system's Qt 5 libraries: apt install libqt5gui5"
    ) as e:
        EnvPool("StarpilotEasy-v0", 1)
    assert "\n" not in str(e.value)
