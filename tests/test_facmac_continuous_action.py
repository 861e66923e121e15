"""facmac_continuous_action.py: targets and gradients through the actions of all agents at once, masks, resume."""

import dataclasses
import sys

from cleanmarl import enjoy, facmac, facmac_continuous_action, maddpg_continuous_action
from cleanmarl.cli import launch
from cleanmarl.facmac_continuous_action import Args
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
from test_facmac import assert_the_scale_of_the_states_makes_no_difference, by_hand
from test_maddpg import CPU, SMALL, played, world
from toys import code, double, scalars


def case(individual, **changes):
    args = Args(individual_critics=individual, **changes)
    agent, critic, buffer = played(facmac_continuous_action, world(3, continuous=True), args)
    return args, agent, critic, double(buffer.sample(5, CPU))


def test_copied_parts_are_those_of_the_parent_and_of_maddpg():
    parts = {
        facmac: ["Mixer", "Critic", "padded", "reward_moments", "reward_of_team", "critic_loss", "descend", "main"]
    }
    parts[facmac] += ["soft_update"]
    parts[maddpg_continuous_action] = ["Batch", "make_envs", "Agent", "make_policy", "collect"]
    for script, names in parts.items():
        for name in names:
            assert code(getattr(facmac_continuous_action, name)) == code(getattr(script, name)), name
    without_logits = code(facmac.update).replace("batch, args.reg)", "batch)")
    assert code(facmac_continuous_action.update) == without_logits != code(facmac.update)
    buffer = (
        code(maddpg_continuous_action.Buffer)
        .replace("on, action = (", "on = (")
        .replace(", action * alive[..., None])", ")")
    )
    assert code(facmac_continuous_action.Buffer) == buffer != code(maddpg_continuous_action.Buffer)


@pytest.mark.parametrize("individual", [False, True])
def test_critic_target_is_its_definition(individual):
    args, agent, critic, batch = case(individual)
    ours = facmac_continuous_action.critic_targets(agent, critic, batch, args.gamma)
    assert set(batch.goes_on.unique().tolist()) == {0, 1} and not ours.requires_grad
    for b, t, m in np.ndindex(2, *ours.shape[1:]):
        next_action = agent.actor(batch.obs[b, t + 1]) * torch.from_numpy(world(1).real_actions)
        value = by_hand(critic, m, batch.obs[b, t + 1], batch.state[b, t + 1], next_action, batch.survive[b, t])
        expected = batch.reward[b, t, m] + (args.gamma * value if batch.goes_on[b, t, m] else 0)
        torch.testing.assert_close(ours[b, t, m], expected)


# proves facmac-3
@pytest.mark.parametrize("individual", [False, True])
def test_actor_gradient_is_that_of_a_loop_over_agents(individual):
    """The deterministic policy gradient: dQ/da_i at the actions of all present policies, times that of agent i's."""
    _, agent, critic, batch = case(individual)
    parameters, state, obs = list(agent.parameters()), batch.state[:, :-1], batch.obs[:, :-1]
    ours = torch.autograd.grad(facmac_continuous_action.actor_loss(agent, critic, batch), parameters)
    theirs = [torch.zeros_like(p) for p in parameters]
    for i in range(3):
        policy = agent.action(obs)
        joint = policy.detach().requires_grad_()
        q = critic(obs, state, joint, batch.alive)[..., i if individual else 0]
        (dq_da,) = torch.autograd.grad((q * batch.alive[..., i]).sum(), joint)
        for total, g in zip(theirs, torch.autograd.grad((policy * dq_da)[:, :, i].sum(), parameters)):
            total -= g / batch.alive.sum()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b)


# proves facmac-5
@pytest.mark.parametrize("individual", [True, False])
def test_the_scale_of_the_states_makes_no_difference(individual):
    args, agent, critic, batch = case(individual)
    assert_the_scale_of_the_states_makes_no_difference(facmac_continuous_action, args, agent, critic, batch)


@pytest.mark.parametrize("individual", [False, True])
def test_padding_and_the_dead_add_nothing(individual):
    args, agent, critic, batch = case(individual)
    lengths = batch.alive[..., 0].sum(1, keepdim=True)
    rows = torch.arange(batch.obs.shape[1]) > lengths
    steps = torch.arange(batch.action.shape[1]) >= lengths
    dead = (1 - batch.alive) * ~steps[..., None]
    assert rows.any() and dead.any()
    obs = batch.obs + 1e3 * rows[..., None, None]
    obs[:, :-1] += 1e3 * dead[..., None]
    other = batch._replace(
        obs=obs,
        state=batch.state + 1e3 * rows[..., None],
        action=batch.action + 1e3 * steps[..., None, None] + 7 * dead[..., None],
        reward=batch.reward + 1e3 * steps[..., None] + (1e3 * dead if individual else 0),
    )
    results = []
    for each in (batch, other):
        target = facmac_continuous_action.critic_targets(agent, critic, each, args.gamma)
        losses = (
            facmac.critic_loss(critic, each, target).sum(),
            facmac_continuous_action.actor_loss(agent, critic, each),
        )
        gradients = torch.autograd.grad(losses[0], list(critic.parameters()))
        gradients += torch.autograd.grad(losses[1], list(agent.parameters()))
        results.append([target * each.weight, *losses, *gradients])
    for ours, theirs in zip(*results):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("env_id", [Args.env_id, "toy/team?varied=True&continuous=True"])
def test_runs_resume_and_same_seed_same_losses(env_id, toy, tmp_path):
    num_envs = 1 if env_id.startswith("toy") else 4
    args = Args(env_id=env_id, **SMALL | {"total_timesteps": 40 * num_envs}, num_envs=num_envs, epochs=2)
    args = dataclasses.replace(args, runs_dir=str(tmp_path))
    folder = facmac_continuous_action.main(args)
    first, second = scalars(folder), scalars(facmac_continuous_action.main(args))
    for tag in ("train/critic_loss", "train/actor_loss", "train/mixer_gradients", "eval/ep_reward"):
        assert first[tag] == second[tag]
    saved = load_checkpoint(folder)
    facmac_continuous_action.main(dataclasses.replace(args, resume=folder, total_timesteps=80 * num_envs))
    after = load_checkpoint(folder)
    assert after["modules"]["critic"]["num_updates"] > saved["modules"]["critic"]["num_updates"] > 0
    assert len(after["modules"]["buffer"]["lengths"]) == after["num_episodes"] > saved["num_episodes"]
    if num_envs == 4:
        assert np.isfinite(enjoy.main(enjoy.Args(folder, episodes=3))["eval/ep_reward"])


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--env-id mpe/simple_spread_v3", "try the script without _continuous_action"),
        ("--exploration-noise -1", "--exploration-noise must be at least 0"),
    ],
)
def test_bad_input(flags, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["facmac_continuous_action.py", *flags.split(), "--runs-dir", str(tmp_path / "r")])
    with pytest.raises(SystemExit) as exit_:
        launch(facmac_continuous_action.main, Args)
    line = capsys.readouterr().err
    assert exit_.value.code == 2 and text in line and line.count("\n") == 1
    assert not list(tmp_path.iterdir())
