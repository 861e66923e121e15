"""maddpg_continuous_action.py: deterministic policies, their unit, exploration noise, gradients through actions."""

import dataclasses
import sys

from cleanmarl import enjoy, maddpg_continuous_action
from cleanmarl.cli import launch
from cleanmarl.evaluate import evaluate
from cleanmarl.layers import as_numpy
from cleanmarl.maddpg_continuous_action import Agent, Args, Buffer
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
import torch.nn as nn
from test_maddpg import CPU, SMALL, others, played, world
from toys import HIGH, LOW, Quiet, double, scalars

SPREAD = "mpe/simple_spread_v3?continuous_actions=True"


def case(individual, **changes):
    args = Args(individual_critics=individual, **changes)
    agent, critic, buffer = played(maddpg_continuous_action, world(3, continuous=True), args)
    return args, agent, critic, double(buffer.sample(5, CPU))


def test_actions_reach_the_environment_in_its_unit():
    envs = world(2, continuous=True)
    agent, real = Agent(envs, Args()), envs.real_actions
    for unit in (-1.0, 0.0, 1.0):
        action = agent.env_action(np.full((2, 3, 4), unit) * real)
        assert (action[:, ~real] == 0).all()
        for i, a in zip(*np.nonzero(real)):
            bounded = np.isfinite(LOW[i, a])
            expected = (LOW[i, a] + HIGH[i, a]) / 2 + unit * (HIGH[i, a] - LOW[i, a]) / 2 if bounded else unit
            np.testing.assert_allclose(action[:, i, a], expected, atol=1e-6)


def test_exploration_noise_has_its_deviation_and_stays_inside():
    envs = world(2, continuous=True)
    agent = Agent(envs, Args(exploration_noise=0.25))
    torch.manual_seed(0)
    noisy = agent.explore(np.zeros((20_000, 3, 4)))
    real = envs.real_actions
    assert noisy[:, real].std() == pytest.approx(0.25, rel=0.02) and abs(noisy[:, real].mean()) < 0.005
    assert (noisy[:, ~real] == 0).all()
    noisy = agent.explore(np.full((20_000, 3, 4), 0.9))
    assert noisy.max() == 1 and (noisy[:, 1] == 1).mean() == pytest.approx(0.345, abs=0.01)  # P(noise > 0.1)
    np.testing.assert_array_equal(Agent(envs, Args(exploration_noise=0)).explore(noisy), noisy)


@pytest.mark.parametrize("num_layers", [0, 2])
def test_the_actor_that_acts_is_the_actor_that_learns(num_layers):
    envs = world(4, continuous=True)
    agent = Agent(envs, Args(actor_num_layers=num_layers))
    obs, info = envs.reset()
    theirs = agent.action(torch.from_numpy(obs)[None])[0].detach().numpy()
    ours = as_numpy(agent.actor)(obs) * envs.real_actions
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert (theirs[:, ~envs.real_actions] == 0).all() and abs(theirs).max() <= 1
    policy = maddpg_continuous_action.make_policy(agent, greedy=True)
    np.testing.assert_allclose(policy(obs, info, None), agent.env_action(theirs), rtol=1e-5, atol=1e-6)
    noisy = maddpg_continuous_action.make_policy(agent, greedy=False)(obs, info, None)
    assert (noisy != policy(obs, info, None))[:, envs.real_actions].all()


# proves maddpg-7
@pytest.mark.parametrize("individual", [False, True])
def test_critic_target_is_its_definition(individual):
    args, agent, critic, batch = case(individual)
    ours = maddpg_continuous_action.critic_targets(agent, critic, batch, args.gamma)
    assert set(batch.goes_on.unique().tolist()) == {0, 1} and not ours.requires_grad
    for b, t in np.ndindex(batch.action.shape[:2]):
        next_action = agent.actor(batch.obs[b, t + 1]) * torch.from_numpy(world(1).real_actions)
        next_action = next_action * batch.survive[b, t, :, None]  # the dead do nothing
        for m in range(ours.shape[-1]):
            x = torch.cat([batch.state[b, t + 1], *next_action])
            for layer in critic.critic:
                x = layer(x) if isinstance(layer, nn.ReLU) else x @ layer.weight[m] + layer.bias[m, 0]
            expected = batch.reward[b, t, m] + (args.gamma * x[0] if batch.goes_on[b, t, m] else 0)
            torch.testing.assert_close(ours[b, t, m], expected)


# proves maddpg-3
@pytest.mark.parametrize("individual", [False, True])
def test_actor_gradient_is_that_of_a_loop_over_agents(individual):
    """The deterministic policy gradient: agent i's action from the policy, all others from the buffer."""
    _, agent, critic, batch = case(individual)
    parameters, state = list(agent.parameters()), batch.state[:, :-1]
    loss = maddpg_continuous_action.actor_loss(agent, critic, batch)
    ours = torch.autograd.grad(loss, parameters)
    theirs = [torch.zeros_like(p) for p in parameters]
    for i in range(3):
        policy = agent.action(batch.obs[:, :-1])[:, :, i]
        leaf = policy.detach().requires_grad_()
        joint = torch.stack([leaf if j == i else batch.action[:, :, j] for j in range(3)], dim=2)
        q = critic(state, joint[:, :, None])[..., i if individual else 0]
        (dq_da,) = torch.autograd.grad((q * batch.alive[..., i]).sum(), leaf)
        for total, g in zip(theirs, torch.autograd.grad((policy * dq_da).sum(), parameters)):
            total -= g / batch.alive.sum()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b)


def test_buffer_keeps_noisy_actions_in_the_policies_unit():
    envs, run, args = world(3, continuous=True), Quiet(), Args(individual_critics=True)
    torch.manual_seed(0)
    agent, buffer = Agent(envs, args), Buffer(envs, args)
    maddpg_continuous_action.collect(agent, envs, envs.reset(), buffer, run)
    episode = buffer.episodes[0]  # environment 0 ends first
    assert episode.action.dtype == np.float32 and len(episode.action) == 5
    alive = episode.alive > 0
    played = np.stack(envs.actions)[:5, 0]
    np.testing.assert_allclose(agent.env_action(episode.action)[alive], played[alive], atol=1e-6)
    assert not alive[3:, 1].any() and (episode.action[~alive] == 0).all()  # the dead do nothing
    exact = as_numpy(agent.actor)(episode.obs[:5])
    assert 0.03 < abs(episode.action - exact)[alive][:, :2].mean() < 0.15


@pytest.mark.parametrize("env_id", [SPREAD, "toy/each?varied=True&continuous=True"])
def test_two_rounds_and_what_they_leave_behind(env_id, toy, tmp_path):
    args = Args(env_id=env_id, **SMALL | {"total_timesteps": 200}, epochs=2, runs_dir=str(tmp_path))
    folder = maddpg_continuous_action.main(args)
    saved, points = load_checkpoint(folder), scalars(folder)
    assert saved["step"] >= 200 and saved["modules"]["critic"]["num_updates"] > 0
    assert all(torch.isfinite(x).all() for x in saved["modules"]["agent"].values())
    names = ["rollout/ep_reward", "train/critic_loss", "train/actor_loss", "train/num_updates", "eval/ep_reward"]
    assert set(names) <= points.keys()


def test_same_seed_same_losses_and_resume(tmp_path):
    args = Args(**SMALL, runs_dir=str(tmp_path))
    folder = maddpg_continuous_action.main(args)
    first, second = scalars(folder), scalars(maddpg_continuous_action.main(args))
    for tag in ("train/critic_loss", "train/actor_loss", "rollout/ep_reward", "eval/ep_reward"):
        assert first[tag] == second[tag]
    maddpg_continuous_action.main(dataclasses.replace(args, resume=folder, total_timesteps=800))
    after = load_checkpoint(folder)
    assert after["step"] == 800 and len(after["modules"]["buffer"]["lengths"]) == 32
    assert np.isfinite(enjoy.main(enjoy.Args(folder, episodes=3))["eval/ep_reward"])


def test_update_lowers_the_critic_loss_and_raises_the_value():
    """Many updates on one batch with fixed targets: both networks do what their losses ask for."""
    args, agent, critic, batch = case(True, learning_rate_actor=1e-2, learning_rate_critic=1e-2)
    targets = others(agent, critic)
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-2, fused=True) for net in (agent, critic)]
    target = maddpg_continuous_action.critic_targets(*targets, batch, args.gamma)
    expected = maddpg_continuous_action.critic_loss(critic, batch, target).mean().item()
    first = maddpg_continuous_action.update(agent, critic, targets, optimizers, batch, args)
    for _ in range(100):
        last = maddpg_continuous_action.update(agent, critic, targets, optimizers, batch, args)
    assert first["train/critic_loss"] == pytest.approx(expected)
    assert last["train/critic_loss"] < first["train/critic_loss"] / 10
    assert last["train/actor_loss"] < first["train/actor_loss"]


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--env-id mpe/simple_spread_v3", "try the script without _continuous_action, or continuous_actions=True in"),
        ("--env-id matrix/climbing", "matrix/climbing has discrete actions and this script needs continuous ones"),
        ("--exploration-noise -1", "--exploration-noise must be at least 0"),
        ("--batch-size 20 --buffer-size 10", "--batch-size 20 episodes do not fit into --buffer-size 10"),
    ],
)
def test_bad_input(flags, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["maddpg_continuous_action.py", *flags.split(), "--runs-dir", str(tmp_path / "r")])
    with pytest.raises(SystemExit) as exit_:
        launch(maddpg_continuous_action.main, Args)
    line = capsys.readouterr().err
    assert exit_.value.code == 2 and text in line and line.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.learning
def test_is_better_than_the_untrained_policy_in_seconds(tmp_path):
    args = Args(env_id="mpe/simple_speaker_listener_v4?continuous_actions=True", total_timesteps=30_000)
    args = dataclasses.replace(args, learning_rate_actor=1e-3, learning_rate_critic=1e-3, eval_steps=10**6)
    folder = maddpg_continuous_action.main(dataclasses.replace(args, eval_episodes=0, runs_dir=str(tmp_path)))
    envs = maddpg_continuous_action.make_envs(args, 32)
    agent = Agent(envs, args)
    untrained = evaluate(envs, maddpg_continuous_action.make_policy(agent), 320, seed=7)
    agent.load_state_dict(load_checkpoint(folder)["modules"]["agent"])
    trained = evaluate(envs, maddpg_continuous_action.make_policy(agent), 320, seed=7)
    error = np.hypot(untrained["eval/std_ep_reward"], trained["eval/std_ep_reward"]) / np.sqrt(320)
    assert trained["eval/ep_reward"] - untrained["eval/ep_reward"] > 5 * error
