"""What all five scripts of MADDPG have in common: copied parts, seeds, targets, and what a checkpoint holds."""

import copy
import dataclasses
from typing import NamedTuple

from cleanmarl import (
    facmac_continuous_action,
    maddpg,
    maddpg_continuous_action,
    maddpg_lstm,
    maddpg_lstm_multienvs,
    maddpg_multienvs,
    masac,
    masac_continuous_action,
)
from cleanmarl.layers import AgentIds
from cleanmarl.run import Run, UsageError, load_checkpoint

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn as nn
from test_maddpg import CPU, SMALL, recorded, world
from toys import code

VARIANTS = [maddpg_multienvs, maddpg_lstm, maddpg_lstm_multienvs, maddpg_continuous_action]
SCRIPTS = [maddpg, *VARIANTS]
FAST = SMALL | {"total_timesteps": 200}
MODULES = {"agent", "critic", "target_agent", "target_critic", "actor_optimizer", "critic_optimizer", "buffer"}


def without_memory(main) -> list[str]:
    """Its lines, but for those in which recurrent scripts carry their memory along."""
    apart = ("metrics = {}", "first_memory", "run.start", "run.carried")
    return [line for line in code(main).splitlines() if not any(word in line for word in apart)]


@pytest.mark.parametrize("script", VARIANTS)
def test_copied_parts_are_those_that_the_tests_of_maddpg_prove(script):
    names = ["Critic", "padded", "reward_moments", "reward_of_team", "critic_loss", "descend", "soft_update"]
    if script is not maddpg_continuous_action:
        names += ["Batch", "Buffer", "gumbel_noise", "update"]
    for name in names:
        assert code(getattr(script, name)) == code(getattr(maddpg, name)), name
    if script is not maddpg_continuous_action:  # memories need to know who is dead
        actor_loss = code(script.actor_loss).replace("_mask[:, :-1], batch.alive)", "_mask[:, :-1])")
        assert actor_loss == code(maddpg.actor_loss)
    if script is maddpg_lstm_multienvs:
        assert without_memory(script.main) == without_memory(maddpg_multienvs.main)
    assert code(maddpg_continuous_action.main) == code(maddpg_multienvs.main)
    without_logits = code(maddpg.update).replace("batch, args.reg)", "batch)")
    assert code(maddpg_continuous_action.update) == without_logits != code(maddpg.update)


@pytest.mark.parametrize("individual", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_the_buffer_of_continuous_actions_is_that_of_one_hot_ones(individual, normalize):
    flags = {"individual_critics": individual, "normalize_reward": normalize, "buffer_size": 7, "batch_size": 5}
    batches = []
    for script in (maddpg_continuous_action, maddpg):
        buffer, _ = recorded(script, world(3), script.Args(**flags), 40)
        torch.manual_seed(2)
        batches.append(buffer.sample(30, CPU))
    ours, theirs = batches
    assert set(theirs._fields) ^ set(ours._fields) == {"action_mask", "survive"}
    for name in set(theirs._fields) & set(ours._fields):
        x = getattr(theirs, name)
        torch.testing.assert_close(getattr(ours, name), x * ours.alive[..., None] if name == "action" else x)
    assert (ours.alive == 0).any() and torch.equal(ours.survive[:, :-1] * ours.alive[:, 1:], ours.alive[:, 1:])


@pytest.mark.parametrize("script", [maddpg, maddpg_continuous_action])
def test_a_loaded_buffer_goes_on_like_the_one_that_was_saved(script):
    args = script.Args(individual_critics=True, normalize_reward=True, buffer_size=9, batch_size=5)
    buffer, _ = recorded(script, world(3), args, 40)
    loaded = script.Buffer(world(3), args)
    loaded.load_state_dict(buffer.state_dict())
    buffer.playing = [[] for _ in buffer.playing]  # a resumed run starts new episodes
    batches = []
    for each in (buffer, loaded):
        envs = world(3)
        obs, info = envs.reset()
        for _ in range(7):
            action = info["action_mask"].argmax(-1)
            next_obs, reward, termination, truncation, next_info = envs.step(action)
            stored = np.eye(4, dtype=np.float32)[action]
            each.add(obs, info, stored, 10 * reward, termination, truncation, next_info)
            obs, info = next_obs, next_info
        torch.manual_seed(4)
        batches.append(each.sample(30, CPU))
    assert all(torch.equal(a, b) for a, b in zip(*batches))
    assert not np.allclose(loaded.reward_statistics()[0], [1, 2, 3])  # old and new rewards


def test_a_field_that_a_copy_adds_comes_back_with_the_buffer_whatever_its_length(monkeypatch):
    """As the return of an episode, which it has once."""

    class Batch(NamedTuple):
        obs: np.ndarray
        reward: np.ndarray
        weight: np.ndarray
        ep_return: np.ndarray

    monkeypatch.setattr(maddpg, "Batch", Batch)
    args = maddpg.Args()
    buffer, loaded = maddpg.Buffer(world(3), args), maddpg.Buffer(world(3), args)
    for T in (1, 4, 2):
        reward = np.random.default_rng(T).random((T, 1), np.float32)
        buffer.append(Batch(np.arange(T + 1.0), reward, np.ones_like(reward), reward.sum(0)))
    loaded.load_state_dict(buffer.state_dict())
    for before, after in zip(buffer.episodes, loaded.episodes, strict=True):
        assert all(map(np.array_equal, before, after))


def test_what_a_copy_saves_with_the_buffer_and_does_not_load_is_refused():
    """As priorities: a resumed run would go on without them, in silence."""
    buffer, _ = recorded(maddpg, world(3), maddpg.Args(), 40)
    state = buffer.state_dict() | {"priorities": torch.ones(len(buffer.episodes))}
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is shorter"):
        maddpg.Buffer(world(3), maddpg.Args()).load_state_dict(state)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_head_with_a_loss_of_its_own_learns(script, monkeypatch):
    """Added to the actor's loss it moves with the actor; the actor's loss leaves the critics alone."""
    continuous = script is maddpg_continuous_action
    args, envs = script.Args(individual_critics=True), world(3, continuous=continuous)
    torch.manual_seed(0)
    agent, critic = script.Agent(envs, args), script.Critic(envs, args)
    agent.head, agent.unused = nn.Sequential(AgentIds(3), nn.Linear(6, 1)), nn.Linear(2, 2)
    buffer, _ = recorded(script, world(3), args, 40)
    batch, plain_loss = buffer.sample(5, CPU), script.actor_loss

    def with_head(agent, critic, batch, *rest):
        return plain_loss(agent, critic, batch, *rest) + agent.head(batch.obs.flatten(0, 1)).square().mean()

    monkeypatch.setattr(script, "actor_loss", with_head)
    targets, before = copy.deepcopy((agent, critic)), copy.deepcopy((agent, critic))
    optimizers = [torch.optim.SGD(network.parameters(), lr=1e-2) for network in (agent, critic)]
    script.update(agent, critic, targets, optimizers, batch, args)
    assert all((p != old).any() for p, old in zip(agent.head.parameters(), before[0].head.parameters()))
    assert all((p != old).any() for p, old in zip(agent.actor.parameters(), before[0].actor.parameters()))
    assert all(torch.equal(p, old) for p, old in zip(agent.unused.parameters(), before[0].unused.parameters()))
    torch.manual_seed(1)
    target = script.critic_targets(*targets, batch, args.gamma)
    with torch.random.fork_rng():
        script.descend(script.actor_loss(agent, critic, batch), agent, optimizers[0], -1.0)
    fresh = copy.deepcopy(critic)  # no gradient of the actor's loss is left in the critics
    script.descend(script.critic_loss(critic, batch, target).sum(), critic, optimizers[1], -1.0)
    fresh.zero_grad()
    script.critic_loss(fresh, batch, target).sum().backward()
    for p, q in zip(critic.parameters(), fresh.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


def equal(a, b) -> bool:
    """Whether two nested states hold the same numbers."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_checkpoint_holds_everything_that_has_learned(script, tmp_path, monkeypatch):
    """What a resumed run begins with is what the first one ended with: networks, targets, optimisers, episodes."""
    loaded = {}

    class Spy(Run):
        def __enter__(self):
            loaded.update(copy.deepcopy({name: module.state_dict() for name, module in self.modules.items()}))
            return super().__enter__()

    args = script.Args(**FAST, normalize_reward=True, runs_dir=str(tmp_path))
    folder = script.main(args)
    saved = load_checkpoint(folder)["modules"]
    assert saved.keys() == MODULES and saved["critic"]["num_updates"] > 0
    monkeypatch.setattr(script, "Run", Spy)
    script.main(dataclasses.replace(args, resume=folder, total_timesteps=400))
    assert equal(loaded, saved) and not equal(loaded["agent"], load_checkpoint(folder)["modules"]["agent"])


@pytest.mark.parametrize("script", SCRIPTS)
def test_another_seed_has_other_networks_and_other_episodes(script, tmp_path):
    """In a run that is too short to learn."""
    args = script.Args(**FAST | {"total_timesteps": 100, "batch_size": 50}, runs_dir=str(tmp_path))
    ours, other = (load_checkpoint(script.main(dataclasses.replace(args, seed=seed)))["modules"] for seed in (1, 2))
    assert all((ours["agent"][key] != x).any() for key, x in other["agent"].items())
    assert (ours["buffer"]["obs"][:, 0] != other["buffer"]["obs"][:, 0]).any()


@pytest.mark.parametrize("script", SCRIPTS)
def test_targets_follow_the_networks(script, tmp_path):
    """All the way with polyak 1; else somewhere between where both began and where the network is."""
    args = script.Args(**FAST, runs_dir=str(tmp_path))
    for polyak in (1.0, 0.5):
        modules = load_checkpoint(script.main(dataclasses.replace(args, polyak=polyak)))["modules"]
        for name in ("agent", "critic"):
            weights = {key: x for key, x in modules[name].items() if x.is_floating_point()}
            distance = [(modules[f"target_{name}"][key] - x).abs().max() for key, x in weights.items()]
            assert all(d == 0 for d in distance) if polyak == 1 else all(0 < d < 0.01 for d in distance)


@pytest.mark.parametrize("script", [*SCRIPTS, masac])
def test_each_network_learns_at_the_rate_of_its_flag(script, tmp_path, monkeypatch):
    plain, updates = script.update, []

    def update(agent, critic, targets, optimizers, *rest):
        for optimizer, network, rate in zip(optimizers, (agent, critic), (1e-4, 2e-4), strict=True):
            (group,) = optimizer.param_groups
            assert type(optimizer) is torch.optim.AdamW and group["lr"] == rate
            assert set(group["params"]) == set(network.parameters())
        updates.append(len(updates))
        return plain(agent, critic, targets, optimizers, *rest)

    monkeypatch.setattr(script, "update", update)
    flags = FAST | {"optimizer": "AdamW", "learning_rate_actor": 1e-4, "learning_rate_critic": 2e-4}
    script.main(script.Args(**flags, runs_dir=str(tmp_path)))
    assert updates


def test_recurrent_train_freq(tmp_path):
    args = maddpg_lstm.Args(**SMALL, train_freq=3, runs_dir=str(tmp_path))
    assert load_checkpoint(maddpg_lstm.main(args))["modules"]["critic"]["num_updates"] == 4  # after 6, 9, 12, 15 of 16


def test_targets_take_statistics_as_they_are():
    network, target = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    network(torch.randn(20, 3) * 5 + 2)
    maddpg.soft_update(target, network, 0.01)
    assert torch.equal(target.running_mean, network.running_mean) and (target.running_mean != 0).all()


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("kind", ["each", "team"])
def test_the_environment_says_whether_a_team_shares_its_reward(script, kind, toy, tmp_path):
    env_id = f"toy/{kind}" + "?continuous=True" * (script is maddpg_continuous_action)
    folder = script.main(script.Args(env_id=env_id, **FAST | {"total_timesteps": 40}, runs_dir=str(tmp_path)))
    assert len(load_checkpoint(folder)["modules"]["critic"]["critic.0.weight"]) == (3 if kind == "each" else 1)


@pytest.mark.parametrize("script", [facmac_continuous_action, maddpg_continuous_action, masac_continuous_action])
@pytest.mark.parametrize("low, high", [(2.0, np.inf), (-np.inf, 2.0)])
def test_actions_with_a_bound_on_one_side_are_refused(script, low, high):
    """They would stand on the bound, whatever the policy does."""
    envs = world(2, continuous=True)
    box = gym.spaces.Box(*(np.full((3, 4), bound, np.float32) for bound in (low, high)))
    envs._set_spaces(2, envs.agents, envs.obs_sizes, envs.action_sizes, 2, box)
    with pytest.raises(UsageError, match="a bound on one side only"):
        script.Agent(envs, script.Args())


@pytest.mark.parametrize("low, high", [(99.9, 100.0), (-np.inf, np.inf), (-1e-3, 1e3)])
def test_continuous_actions_stay_within_their_bounds(low, high):
    envs = world(2, continuous=True)
    box = gym.spaces.Box(*(np.full((3, 4), bound, np.float32) for bound in (low, high)))
    envs._set_spaces(2, envs.agents, envs.obs_sizes, envs.action_sizes, 2, box)
    agent = maddpg_continuous_action.Agent(envs, maddpg_continuous_action.Args())
    for unit in np.linspace(-1, 1, 101):
        action = agent.env_action(np.full((2, 3, 4), unit) * envs.real_actions)
        assert action.dtype == np.float32 and (action[:, ~envs.real_actions] == 0).all()
        assert ((action >= box.low) & (action <= box.high))[:, envs.real_actions].all()
