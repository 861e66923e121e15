"""What the scripts that learn values of actions have in common: copied parts, masks, checkpoints, resume."""

import copy
import dataclasses

from cleanmarl import enjoy, idqn, maddpg_multienvs, qmix, qmix_lstm, qtran, vdn, vdn_lstm
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
import torch.nn as nn
from test_maddpg_family import equal, without_memory
from test_vdn import CPU, SMALL, played, recorded, values, world
from toys import code, double, scalars

VARIANTS = [idqn, qmix, qtran, vdn_lstm, qmix_lstm]
SCRIPTS = [vdn, *VARIANTS]
OWN = {idqn: {"Buffer", "update"}, qtran: {"update"}, vdn_lstm: {"update"}, qmix: {"update"}, qmix_lstm: {"update"}}


@pytest.mark.parametrize("script", VARIANTS)
def test_copied_parts_are_those_that_the_tests_of_vdn_prove(script):
    for name in ("Batch", "Buffer", "act", "padded", "reward_moments", "reward_of_team", "update", "soft_update"):
        if (script, name) == (idqn, "reward_of_team"):
            continue  # its agents have none together
        same = code(getattr(script, name)) == code(getattr(vdn, name))
        assert same == (name not in OWN.get(script, ())), name
    parent = {vdn_lstm: vdn, qmix_lstm: qmix}.get(script, vdn)
    if script is not qtran:
        assert (code(script.value_loss) == code(parent.value_loss)) == (script in (vdn_lstm, qmix_lstm))
    if script is qmix_lstm:
        assert code(script.Mixer) == code(qmix.Mixer)
        for name in ("first_memory", "look", "remember", "make_policy", "collect", "main"):
            assert code(getattr(script, name)) == code(getattr(vdn_lstm, name)), name
    elif script is vdn_lstm:
        assert without_memory(vdn_lstm.main) == without_memory(vdn.main)
    else:
        for name in ("make_policy", "collect", "main"):
            assert code(getattr(script, name)) == code(getattr(vdn, name)), name


def test_updates_are_those_of_vdn_but_for_what_the_values_see_and_whose_they_are():
    assert code(vdn_lstm.update) == code(vdn.update).replace("agent.values(batch.obs)", "agent.values(batch)")
    assert code(idqn.update) == code(vdn.update).replace("value_loss(agent, ", "value_loss(")


def test_updates_with_a_mixing_network_are_those_without_on_normalised_states():
    for script, parent in ((qmix, vdn), (qmix_lstm, vdn_lstm)):
        lines = code(script.update).splitlines()
        extra = [line for line in lines if "state_stats" in line]
        assert len(extra) == 2 and [line for line in lines if line not in extra] == code(parent.update).splitlines()


def test_parts_that_are_maddpgs():
    for name in ("padded", "reward_moments", "reward_of_team", "soft_update"):
        assert code(getattr(vdn, name)) == code(getattr(maddpg_multienvs, name)), name
    for name in ("add", "append", "sample", "reward_statistics", "state_dict", "load_state_dict"):
        assert code_of_method(vdn, name) == code_of_method(maddpg_multienvs, name), name


def code_of_method(script, name):
    return next(part for part in code(script.Buffer).split("\n    def ") if part.startswith(f"{name}("))


def stepped(script, agent, target, batch, args):
    """The metrics of an update and the parameters after it."""
    agent = copy.deepcopy(agent)
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.1)
    metrics = script.update(agent, target, optimizer, batch, args)
    return [*metrics.values(), *agent.parameters()]


def assert_same_update(script, agent, target, args, *batches):
    for ours, theirs in zip(*(stepped(script, agent, target, batch, args) for batch in batches)):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("td_lambda", [0.0, 0.8])
@pytest.mark.parametrize("script", SCRIPTS)
def test_padding_adds_nothing(script, td_lambda):
    """An update is the same whatever stands after the end of an episode."""
    args = script.Args(td_lambda=td_lambda)
    agent, target, buffer = played(script, world(3), args)
    batch = double(buffer.sample(8, CPU))
    lengths = batch.weight[..., 0].sum(1, keepdim=True)
    rows = torch.arange(batch.obs.shape[1]) > lengths  # (B, T + 1), the row after the last step counts
    steps = torch.arange(batch.action.shape[1]) >= lengths
    assert rows.any()
    other = batch._replace(
        obs=batch.obs + 1e3 * rows[..., None, None],
        state=batch.state + 1e3 * rows[..., None],
        action=torch.where(steps[..., None], 1, batch.action),
        reward=batch.reward + 1e3 * steps[..., None],
    )
    assert_same_update(script, agent, target, args, batch, other)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_dead_add_nothing(script):
    """What a dead agent sees, and its only legal action, changes no update."""
    args = script.Args()
    agent, target, buffer = played(script, world(3), args)
    batch = double(buffer.sample(8, CPU))
    dead = ~batch.alive & batch.alive.any(-1, keepdim=True)
    assert dead[..., 1].any() and not dead[..., 0].any()
    other = batch._replace(obs=batch.obs + 1e3 * dead[..., None], action=torch.where(dead[:, :-1], 3, batch.action))
    assert_same_update(script, agent, target, args, batch, other)


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_acts_in_an_episode_is_what_learns_from_it(script):
    """The greedy policy step by step, from memory if it has one, against the values of the whole episode."""
    envs = world(4)
    agent = script.Agent(envs, script.Args(hidden_dim=16))
    for p in agent.q_network.parameters():
        p.data *= 5  # that an action remembered or forgotten changes the choice
    obs, info = envs.reset()
    policy, done, rows, actions = script.make_policy(agent), np.ones(4, bool), [], []
    for _ in range(5):  # the shortest episode
        action = policy(obs, info, done)
        rows.append((obs, info["action_mask"], info["agent_mask"]))
        actions.append(action)
        obs, _, termination, truncation, info = envs.step(action)
        done = termination | truncation
    obs, mask, alive = (torch.from_numpy(np.stack(x, 1)) for x in zip(*rows))  # (N, T, ...)
    action = torch.from_numpy(np.stack(actions, 1))
    batch = script.Batch(obs, None, mask, alive, action[:, :-1], None, None, None)
    learned = values(agent, batch).masked_fill(~mask, -torch.inf).argmax(-1)
    assert torch.equal(learned, action) and len(learned.unique()) > 1


@pytest.mark.parametrize("script", [vdn_lstm, qmix_lstm])
def test_a_policy_forgets_at_the_start_of_an_episode(script):
    """In each environment when its own episode ends: it plays as one does that begins there."""
    envs = world(4)
    agent = script.Agent(envs, script.Args(hidden_dim=16))
    for p in agent.q_network.parameters():
        p.data *= 5
    obs, info = envs.reset()
    policy, done, remembered, ends = script.make_policy(agent), np.ones(4, bool), 0, 0
    fresh = [script.make_policy(agent) for _ in range(4)]
    for _ in range(30):
        action = policy(obs, info, done)
        ends += done.sum()
        for n, began in enumerate(done):
            of_one = {key: info[key][n : n + 1] for key in ("action_mask", "agent_mask")}
            np.testing.assert_array_equal(action[n], fresh[n](obs[n : n + 1], of_one, np.array([began]))[0])
            remembered += (action[n] != script.make_policy(agent)(obs[n : n + 1], of_one, np.ones(1, bool))[0]).sum()
        obs, _, termination, truncation, info = envs.step(action)
        done = termination | truncation
    assert ends > 16 and remembered > 20  # actions that would be others without a memory


@pytest.mark.parametrize("script", [vdn, idqn])
def test_normalize_reward_uses_all_rewards_in_the_buffer(script):
    plain = script.Args(buffer_size=7, batch_size=5)
    batches = []
    for args in (plain, dataclasses.replace(plain, normalize_reward=True)):
        buffer, finished = recorded(script, world(3), args, 40)
        torch.manual_seed(2)
        batches.append(buffer.sample(20, CPU))
    assert len(finished) > 14  # many were forgotten
    episodes = list(buffer.episodes)
    for m in range(batches[0].reward.shape[-1]):
        rewards = np.concatenate([e.reward[e.weight[:, m] > 0, m] for e in episodes]).astype(np.float64)
        keep = batches[0].weight[..., m] > 0
        expected = (batches[0].reward[..., m][keep] - rewards.mean()) / (rewards.std() + 1e-6)
        torch.testing.assert_close(batches[1].reward[..., m][keep], expected.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_head_with_a_loss_of_its_own_learns(script, monkeypatch):
    args, envs = script.Args(), world(3)
    agent, target, buffer = played(script, envs, args)
    agent.head, agent.unused = nn.Linear(3, 1).double(), nn.Linear(2, 2).double()
    name = "losses" if script is qtran else "value_loss"
    plain = getattr(script, name)
    index = 0 if script is idqn else 1  # of q among the arguments
    monkeypatch.setattr(
        script, name, lambda *a: plain(*a) + agent.head(a[index + 1].obs).square().mean() + 0 * a[index].sum()
    )
    before = copy.deepcopy(agent)
    optimizer = torch.optim.SGD(agent.parameters(), lr=1e-2)
    script.update(agent, target, optimizer, double(buffer.sample(5, CPU)), args)
    for (key, p), old in zip(agent.named_parameters(), before.parameters()):
        assert torch.equal(p, old) == key.startswith("unused"), key


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_resumed_run_goes_on_with_all_that_was_learned(script, tmp_path):
    args = script.Args(**SMALL, normalize_reward=True, td_lambda=0.5, runs_dir=str(tmp_path))
    folder = script.main(args)
    first, points = load_checkpoint(folder), scalars(folder)
    assert first["modules"].keys() == {"agent", "target_agent", "optimizer", "buffer"}
    again = load_checkpoint(script.main(args))
    assert equal(first["modules"], again["modules"])  # the same seed
    script.main(dataclasses.replace(args, resume=folder, total_timesteps=600))
    after = load_checkpoint(folder)
    assert after["step"] == 600 and after["num_episodes"] == 24 == len(after["modules"]["buffer"]["lengths"])
    assert torch.equal(after["modules"]["buffer"]["obs"][: 16 * 26], first["modules"]["buffer"]["obs"])
    assert first["modules"]["agent"]["num_updates"] == 16 and after["modules"]["agent"]["num_updates"] == 24
    assert all(state["step"] == 24 for state in after["modules"]["optimizer"]["state"].values())
    assert all(np.isfinite(value) for _, value in points["train/value_loss"])
    whole = load_checkpoint(script.main(dataclasses.replace(args, total_timesteps=600)))
    assert equal(after["modules"], whole["modules"])  # as if it had never been interrupted
    assert np.isfinite(enjoy.main(enjoy.Args(folder, episodes=2))["eval/ep_reward"])


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("env_id", ["toy/each?varied=True", "toy/team", "matrix/climbing"])
def test_targets_are_copies_with_polyak_1_and_other_seeds_are_other_runs(script, env_id, toy, tmp_path):
    flags = SMALL | {"env_id": env_id, "total_timesteps": 40, "num_envs": 3, "runs_dir": str(tmp_path)}
    runs = [load_checkpoint(script.main(script.Args(**flags, polyak=1.0, seed=seed)))["modules"] for seed in (1, 2)]
    agent, target = runs[0]["agent"], runs[0]["target_agent"]
    assert agent["num_updates"] > 0 and equal(
        {key: x for key, x in agent.items() if key != "num_updates"},
        {key: x for key, x in target.items() if key != "num_updates"},
    )
    learned = [key for key in agent if key != "num_updates" and "state_stats" not in key]
    assert all((agent[key] != runs[1]["agent"][key]).any() for key in learned)


@pytest.mark.parametrize("optimizer", ["Adam", "RMSprop"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_optimizer_is_that_of_the_flags(script, optimizer, tmp_path, monkeypatch):
    plain, updates = script.update, []

    def update(agent, target_agent, ours, *rest):
        (group,) = ours.param_groups
        assert type(ours) is getattr(torch.optim, optimizer) and group["lr"] == 1e-4
        assert optimizer == "Adam" or (group["alpha"], group["eps"]) == (0.99, 1e-5)
        assert set(group["params"]) == set(agent.parameters())
        updates.append(len(updates))
        return plain(agent, target_agent, ours, *rest)

    monkeypatch.setattr(script, "update", update)
    flags = SMALL | {"env_id": "matrix/climbing", "total_timesteps": 20, "learning_rate": 1e-4}
    script.main(script.Args(**flags, optimizer=optimizer, runs_dir=str(tmp_path)))
    assert updates


def test_target_network_update_freq_counts_updates(tmp_path):
    """With polyak 1 the target equals the network after every second update, and not after a third one."""
    args = vdn.Args(**SMALL | {"total_timesteps": 100}, polyak=1.0, runs_dir=str(tmp_path))
    for epochs, are_equal in ((2, True), (3, False)):
        args = dataclasses.replace(args, epochs=epochs, target_network_update_freq=2)
        modules = load_checkpoint(vdn.main(args))["modules"]
        key = "q_network.1.weight"
        assert torch.equal(modules["agent"][key], modules["target_agent"][key]) == are_equal
