"""What all five scripts of MADDPG have in common: copied parts, seeds, targets, and what a checkpoint holds."""

import ast
import copy
import dataclasses
import inspect

import gymnasium as gym
import numpy as np
import pytest
import torch
from test_maddpg import CPU, SMALL, Toy, recorded
from test_maddpg_continuous_action import ContinuousToy

from cleanmarl import maddpg, maddpg_continuous_action, maddpg_lstm, maddpg_lstm_multienvs, maddpg_multienvs
from cleanmarl.run import Run, load_checkpoint

VARIANTS = [maddpg_multienvs, maddpg_lstm, maddpg_lstm_multienvs, maddpg_continuous_action]
SCRIPTS = [maddpg, *VARIANTS]
FAST = SMALL | {"total_timesteps": 200}
MODULES = {"agent", "critic", "target_agent", "target_critic", "actor_optimizer", "critic_optimizer", "buffer"}


def code(thing) -> str:
    """Its source without docstrings and comments."""
    tree = ast.parse(inspect.getsource(thing))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.unparse(tree)


@pytest.mark.parametrize("script", VARIANTS)
def test_copied_parts_are_those_that_the_tests_of_maddpg_prove(script):
    names = ["StackedLinear", "Critic", "mean_of_living", "critic_loss", "descend", "update", "soft_update"]
    if script is not maddpg_continuous_action:
        names += ["Episodes", "Batch", "Buffer", "actor_loss", "have_shared_reward", "gumbel_noise"]
    for name in names:
        assert code(getattr(script, name)) == code(getattr(maddpg, name)), name


def batches_of(script, args, envs_class, num_samples):
    """Samples of a buffer with 7 of the episodes of 40 steps of a toy; the same episodes whatever the script."""
    buffer = script.Buffer(envs_class(3), args, num_rows=4)
    add = buffer.add
    if script is maddpg_continuous_action:  # the actions of `recorded` are discrete
        buffer.add = lambda obs, info, action, *rest: add(obs, info, np.eye(4, dtype=np.float32)[action], *rest)

    class Script:
        Buffer = staticmethod(lambda *_, **__: buffer)

    recorded(Script, Toy(3), args, 40)
    torch.manual_seed(2)
    return buffer, buffer.sample(num_samples, CPU)


@pytest.mark.parametrize("individual", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_the_buffer_of_continuous_actions_is_that_of_one_hot_ones(individual, normalize):
    flags = {"individual_critics": individual, "normalize_reward": normalize, "buffer_size": 7}
    _, ours = batches_of(maddpg_continuous_action, maddpg_continuous_action.Args(**flags), ContinuousToy, 30)
    _, theirs = batches_of(maddpg, maddpg.Args(**flags), Toy, 30)
    for name in ours._fields:
        a, b = getattr(ours, name), getattr(theirs, name)
        if name == "action":  # the padding is no action in the one, the first action in the other
            a, b = a * ours.alive[..., None], b * theirs.alive[..., None]
        assert torch.equal(a, b), name
    assert set(theirs._fields) - set(ours._fields) == {"action_mask"}


@pytest.mark.parametrize("script, envs_class", [(maddpg, Toy), (maddpg_continuous_action, ContinuousToy)])
def test_a_loaded_buffer_goes_on_like_the_one_that_was_saved(script, envs_class):
    args = script.Args(individual_critics=True, normalize_reward=True, buffer_size=9)
    buffer, _ = batches_of(script, args, envs_class, 1)
    loaded = script.Buffer(envs_class(3), args, num_rows=4)
    loaded.load_state_dict(buffer.state_dict())
    for each in (buffer, loaded):
        each.t[:] = 0
        envs = Toy(3)
        obs, info = envs.reset()
        for _ in range(6):
            action = info["action_mask"].argmax(-1)
            next_obs, reward, termination, truncation, next_info = envs.step(action)
            stored = np.eye(4, dtype=np.float32)[action] if script is maddpg_continuous_action else action
            type(each).add(each, obs, info, stored, 10 * reward, termination, truncation, next_info)
            obs, info = next_obs, next_info
    batches = []
    for each in (buffer, loaded):
        torch.manual_seed(4)
        batches.append(each.sample(30, CPU))
    assert all(torch.equal(a, b) for a, b in zip(*batches))
    seen = loaded.reward_moments[: loaded.size, 0].sum(0)
    assert (seen > 0).all() and not np.allclose(loaded.reward_statistics()[0], [1, 2, 3])  # old and new rewards


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
    assert all((ours["agent"][key] != x).any() for key, x in other["agent"].items() if key not in ("ids", "real"))
    assert (ours["buffer"]["obs"][:, 0] != other["buffer"]["obs"][:, 0]).any()


@pytest.mark.parametrize("script", SCRIPTS)
def test_targets_follow_the_networks(script, tmp_path):
    """All the way with polyak 1; else somewhere between where both began and where the network is."""
    args = script.Args(**FAST, runs_dir=str(tmp_path))
    for polyak in (1.0, 0.5):
        modules = load_checkpoint(script.main(dataclasses.replace(args, polyak=polyak)))["modules"]
        for name in ("agent", "critic"):
            weights = {
                key: x for key, x in modules[name].items() if x.is_floating_point() and key not in ("ids", "real")
            }
            distance = [(modules[f"target_{name}"][key] - x).abs().max() for key, x in weights.items()]
            assert all(d == 0 for d in distance) if polyak == 1 else all(0 < d < 0.01 for d in distance)


def test_recurrent_train_freq(tmp_path):
    args = maddpg_lstm.Args(**SMALL, train_freq=3, runs_dir=str(tmp_path))
    assert load_checkpoint(maddpg_lstm.main(args))["modules"]["critic"]["num_updates"] == 4  # after 6, 9, 12, 15 of 16


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_team_shares_its_reward_whatever_it_earns(script):
    envs = (ContinuousToy if script is maddpg_continuous_action else Toy)(2)
    envs.step = lambda action: pytest.fail("nothing has to be played")
    envs.team_reward = True
    assert script.have_shared_reward(envs, seed=1)


@pytest.mark.parametrize("low, high", [(99.9, 100.0), (0.0, np.inf), (-np.inf, 2.0), (-1e-3, 1e3)])
def test_continuous_actions_stay_within_their_bounds(low, high):
    envs = ContinuousToy(2)
    box = gym.spaces.Box(*(np.full((3, 4), bound, np.float32) for bound in (low, high)))
    envs._set_spaces(2, envs.agents, envs.obs_sizes, envs.action_sizes, 6, box)
    agent = maddpg_continuous_action.Agent(envs, maddpg_continuous_action.Args())
    for unit in np.linspace(-1, 1, 101):
        action = agent.env_action(np.full((2, 3, 4), unit) * envs.real_actions)
        assert action.dtype == np.float32 and (action[:, ~envs.real_actions] == 0).all()
        assert ((action >= box.low) & (action <= box.high))[:, envs.real_actions].all()
