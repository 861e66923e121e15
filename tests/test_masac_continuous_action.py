"""masac_continuous_action.py: squashed normal samples, soft targets, gradients, the temperature, masks, resume."""

import dataclasses
import inspect
import math
import sys

from cleanmarl import enjoy, maddpg_continuous_action, masac, masac_continuous_action
from cleanmarl.cli import launch
from cleanmarl.layers import as_numpy
from cleanmarl.masac_continuous_action import Agent, Args
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_maddpg import CPU, SMALL, alone, played, world
from torch.distributions import Normal, TanhTransform, TransformedDistribution
from toys import Quiet, code, double, scalars

TEMPERATURE = [math.exp(x) for x in (-1.0, 0.5, 0.2)]


def case(individual, **changes):
    """In float64, with temperatures that differ between agents."""
    args = Args(individual_critics=individual, **changes)
    agent, critic, buffer = played(masac_continuous_action, world(3, continuous=True), args)
    agent.log_temperature.data = torch.tensor([-1.0, 0.5, 0.2], dtype=torch.float64)
    return args, agent, critic, double(buffer.sample(5, CPU))


def test_copied_parts_are_those_of_the_parent_and_of_maddpg():
    parts = {masac: ["padded", "reward_moments", "reward_of_team", "descend", "update", "soft_update", "main"]}
    parts[maddpg_continuous_action] = ["make_envs", "Batch", "Buffer"]
    for script, names in parts.items():
        for name in names:
            assert code(getattr(masac_continuous_action, name)) == code(getattr(script, name)), name
    assert inspect.getsource(Agent.env_action) == inspect.getsource(maddpg_continuous_action.Agent.env_action)


def distributions(agent, obs):
    """The policies (..., A, K) as torch has them."""
    mean, log_std = agent.actor(obs).chunk(2, -1)
    return TransformedDistribution(Normal(mean, log_std.exp()), [TanhTransform()])


# proves masac-6
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_log_probabilities_are_those_of_torchs_transformed_distribution(scale):
    """For far means, too, where tanh is nearly flat. Components that an agent does not have count for nothing."""
    _, agent, _, batch = case(True)
    with torch.no_grad():
        agent.actor[-1].bias[: len(agent.real[0])] *= scale
    torch.manual_seed(2)
    action, log_prob = agent.sample(batch.obs)
    torch.manual_seed(2)
    mean, std = agent.normal(agent.actor(batch.obs))
    x = mean + std * torch.randn_like(mean)
    transform, policy = TanhTransform(cache_size=1), Normal(mean, std)
    squashed = transform(x)  # the transformation keeps x: its inverse would be worse
    expected = TransformedDistribution(policy, [transform]).log_prob(squashed)
    torch.testing.assert_close(action, squashed * agent.real)
    torch.testing.assert_close(log_prob, (expected * agent.real).sum(-1))
    assert agent.real.sum(-1).tolist() == [2, 4, 3]


def test_what_acts_are_samples_of_the_policy():
    """Means and deviations before tanh of many samples of one observation; greedy play is without noise."""
    envs = world(4, continuous=True)
    torch.manual_seed(0)
    agent = Agent(envs, Args())
    obs, info = envs.reset()
    mean, std = (x.detach().numpy() for x in agent.normal(agent.actor(torch.from_numpy(obs))))
    output = as_numpy(agent.actor)(obs)
    many = np.arctanh(np.stack([agent.act(output, greedy=False) for _ in range(4000)]).astype(np.float64))
    real = envs.real_actions
    np.testing.assert_allclose(many.mean(0)[:, real], mean[:, real], atol=0.1)
    np.testing.assert_allclose(many.std(0)[:, real], std[:, real], rtol=0.1)
    greedy = masac_continuous_action.make_policy(agent)(obs, info, None)
    np.testing.assert_allclose(greedy, agent.env_action(np.tanh(mean) * real), rtol=1e-5, atol=1e-6)
    assert (greedy != masac_continuous_action.make_policy(agent, greedy=False)(obs, info, None))[:, real].all()


def test_deviations_have_bounds():
    """Beyond them a sample would be no number, or always at an end of tanh."""
    agent = Agent(world(1, continuous=True), Args())
    mean, std = agent.normal(torch.tensor([0.0, 1.0, 2.0, 3.0, -50.0, -3.0, 1.0, 50.0]))
    assert mean.tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(std, torch.tensor([-20.0, -3.0, 1.0, 2.0]).exp())


def test_what_is_stored_are_samples_of_the_components_that_an_agent_has():
    stored = []
    for seed in (1, 2):
        envs = world(4, continuous=True)
        torch.manual_seed(0)
        agent, buffer = Agent(envs, Args()), masac_continuous_action.Buffer(envs, Args())
        torch.manual_seed(seed)
        masac_continuous_action.collect(agent, envs, envs.reset(seed=1), buffer, Quiet())
        stored.append(buffer.episodes[0].action[0])  # (A, K) of the first step, before which nothing differed
    real = envs.real_actions
    assert (stored[0] != stored[1])[real].all() and not any(x[~real].any() for x in stored) and not real.all()


def values(critic, individual, i, state, action):
    """The smaller of both critics' values of a joint action (A, K), for agent i."""
    x = torch.cat([state, *action])
    return torch.minimum(*(alone(net, i if individual else 0)(x)[0] for net in (critic.critic, critic.critic2)))


# proves maddpg-1, masac-2, masac-3
@pytest.mark.parametrize("individual", [False, True])
def test_critic_target_is_its_definition(individual):
    """The smaller value of samples of all policies, and their entropies: one's own, or of the team's living agents."""
    args, agent, critic, batch = case(individual)
    torch.manual_seed(3)
    ours = masac_continuous_action.critic_targets(agent, critic, batch, args.gamma)
    torch.manual_seed(3)
    action, log_prob = agent.sample(batch.obs[:, 1:])
    action = action * batch.survive[..., None]  # the dead do nothing
    assert (batch.action[batch.alive == 0] == 0).all() and (batch.alive[:, :3, 1] == 1).all()
    assert set(batch.goes_on.unique().tolist()) == {0, 1} and not ours.requires_grad
    for b, t, m in np.ndindex(ours.shape):
        value = values(critic, individual, m, batch.state[b, t + 1], action[b, t])
        for i in [m] if individual else batch.survive[b, t].nonzero()[:, 0].tolist():
            value = value - TEMPERATURE[i] * log_prob[b, t, i]
        expected = batch.reward[b, t, m] + (args.gamma * value if batch.goes_on[b, t, m] else 0)
        torch.testing.assert_close(ours[b, t, m], expected)


@pytest.mark.parametrize("individual", [False, True])
def test_critic_loss_is_that_of_two_critics(individual):
    args, agent, critic, batch = case(individual)
    target = masac_continuous_action.critic_targets(agent, critic, batch, args.gamma)
    loss = masac_continuous_action.critic_loss(critic, batch, target)
    q = critic(batch.state[:, :-1], batch.action[:, :, None])
    assert loss.shape == ((3,) if individual else (1,)) and (q[0] != q[1]).all()
    for m in range(len(loss)):
        keep = batch.weight[..., m].bool()
        torch.testing.assert_close(loss[m], sum(F.mse_loss(q[k, ..., m][keep], target[..., m][keep]) for k in range(2)))


# proves maddpg-3, masac-2
@pytest.mark.parametrize("individual", [False, True])
def test_actor_gradient_is_that_of_a_loop_over_agents(individual):
    """Agent i's own sample and its log-probability; all other actions are those of the buffer."""
    _, agent, critic, batch = case(individual)
    parameters, state = list(agent.actor.parameters()), batch.state[:, :-1]
    torch.manual_seed(7)
    loss, entropy = masac_continuous_action.actor_loss(agent, critic, batch)
    *ours, of_temperature = torch.autograd.grad(loss, [*parameters, agent.log_temperature], allow_unused=True)
    assert of_temperature is None  # it has a loss of its own
    torch.manual_seed(7)
    own, log_prob = agent.sample(batch.obs[:, :-1])
    total = 0
    for i in range(3):
        joint = torch.stack([own[:, :, j] if j == i else batch.action[:, :, j] for j in range(3)], dim=2)
        q = torch.minimum(*critic(state, joint[:, :, None]))[..., i if individual else 0]
        alive = batch.alive[..., i].bool()
        total = total - (q - TEMPERATURE[i] * log_prob[..., i])[alive].sum() / batch.alive.sum()
    torch.testing.assert_close(loss, total)
    torch.testing.assert_close(entropy, -log_prob.detach())
    for a, b in zip(ours, torch.autograd.grad(total, parameters)):
        torch.testing.assert_close(a, b)


# proves masac-5
def test_the_temperature_rises_below_the_target_entropy_and_falls_above_it():
    """Whose target is -2, -4 and -3 for agents with 2, 4 and 3 components; the dead do not count."""
    args, agent, _, batch = case(True)
    target = torch.tensor([-2.0, -4.0, -3.0]).double()
    for offset in (-0.1, 0.0, 0.1):
        entropy = torch.where(batch.alive == 0, 100.0, (target + offset).expand(*batch.alive.shape))
        loss = masac_continuous_action.temperature_loss(agent, entropy, batch, args.target_entropy)
        (gradient,) = torch.autograd.grad(loss, agent.log_temperature)
        share = batch.alive.sum((0, 1)) / batch.alive.sum()
        torch.testing.assert_close(gradient, agent.temperature.detach() * share * offset)


@pytest.mark.parametrize("individual", [False, True])
def test_padding_and_the_dead_add_nothing(individual):
    args, agent, critic, batch = case(individual)
    lengths = batch.alive[..., 0].sum(1, keepdim=True)
    rows = torch.arange(batch.obs.shape[1]) > lengths
    steps = torch.arange(batch.action.shape[1]) >= lengths
    dead = (1 - batch.alive) * ~steps[..., None]
    assert rows.any() and dead.any()
    obs = batch.obs + 10 * rows[..., None, None]
    obs[:, :-1] += 10 * dead[..., None]
    other = batch._replace(
        obs=obs,
        state=batch.state + 1e3 * rows[..., None],
        action=batch.action + 1e3 * steps[..., None, None],
        reward=batch.reward + 1e3 * steps[..., None] + (1e3 * dead if individual else 0),
    )
    results = []
    for each in (batch, other):
        torch.manual_seed(5)
        target = masac_continuous_action.critic_targets(agent, critic, each, args.gamma)
        loss, entropy = masac_continuous_action.actor_loss(agent, critic, each)
        loss = loss + masac_continuous_action.temperature_loss(agent, entropy, each, -1.0)
        losses = masac_continuous_action.critic_loss(critic, each, target).sum(), loss
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
    folder = masac_continuous_action.main(args)
    first, second = scalars(folder), scalars(masac_continuous_action.main(args))
    for tag in ("train/critic_loss", "train/actor_loss", "train/temperature", "train/entropy", "eval/ep_reward"):
        assert first[tag] == second[tag]
    saved = load_checkpoint(folder)
    masac_continuous_action.main(dataclasses.replace(args, resume=folder, total_timesteps=80 * num_envs))
    after = load_checkpoint(folder)
    assert after["modules"]["critic"]["num_updates"] > saved["modules"]["critic"]["num_updates"] > 0
    assert len(after["modules"]["buffer"]["lengths"]) == after["num_episodes"] > saved["num_episodes"]
    if num_envs == 4:
        assert np.isfinite(enjoy.main(enjoy.Args(folder, episodes=3))["eval/ep_reward"])


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--env-id mpe/simple_spread_v3", "try the script without _continuous_action"),
        ("--target-entropy nan", "--target-entropy must be less than 0.69, not nan"),
        ("--target-entropy 1", "--target-entropy must be less than 0.69, not 1.0"),
    ],
)
def test_bad_input(flags, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["masac_continuous_action.py", *flags.split(), "--runs-dir", str(tmp_path / "r")])
    with pytest.raises(SystemExit) as exit_:
        launch(masac_continuous_action.main, Args)
    line = capsys.readouterr().err
    assert exit_.value.code == 2 and text in line and line.count("\n") == 1
    assert not list(tmp_path.iterdir())
