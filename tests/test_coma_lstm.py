"""coma_lstm.py: policies that act as they learn across ends, lives and rollouts, and what coma.py has otherwise.

The estimators and losses that it shares with coma.py are copies: see test_on_policy_family.py.
"""

import sys

from cleanmarl import coma, coma_lstm, enjoy
from cleanmarl.cli import launch
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
from test_recurrent_family import LISTENER, Given, Revived, RevivedLast, actor_logits, lives
from toys import Quiet, code, make_rollout

SMALL = {"num_envs": 4, "num_steps": 20, "total_timesteps": 160, "actor_hidden_dim": 16, "eval_episodes": 0}


@pytest.fixture
def revived(monkeypatch):
    """Makes every environment a Revived one."""
    monkeypatch.setattr(coma_lstm, "make", lambda env_id, num_envs, **options: Revived(num_envs))


def make_agent(args, envs, scale=1e6):
    """An agent who does what it thinks best, more surely with a greater scale, and whose gates are not half open."""
    torch.manual_seed(0)
    agent = coma_lstm.Agent(envs, args)
    with torch.no_grad():
        agent.actor[-1].weight *= scale
        for name, parameter in agent.actor.cells[0].named_parameters():
            parameter.normal_() if "bias" in name else None
        for p in agent.critic.parameters():  # another one than the target network
            p += 0.1 * torch.randn_like(p)
    return agent


def collected(args, rollouts=1, scale=1e6):
    """Environments, agent, and (rollout, batch) of each of some rollouts in a row, with what followed the last."""
    envs = coma_lstm.make_envs(args, args.num_envs)
    agent, found = make_agent(args, envs, scale), []
    now = *envs.reset(seed=1), np.zeros((envs.num_envs, 3, agent.actor.memory_size), np.float32)
    for _ in range(rollouts):
        rollout = make_rollout(coma_lstm, args, envs)
        now = coma_lstm.collect(agent, envs, now, rollout, args, Quiet())
        found.append((rollout, coma_lstm.estimate(agent, rollout, *now, args)))
    return envs, agent, found, now


def test_settings_are_those_of_coma_plus_a_memory():
    assert vars(coma_lstm.Args()) == vars(coma.Args()) | {"cell": "gru"}


def test_updates_are_those_of_coma():
    update = code(coma_lstm.update).replace("batch[:-1]", "batch").replace("*step, batch.memory", "*step")
    assert update == code(coma.update) != code(coma_lstm.update)


# proves recurrent-1
@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("shared", [True, False])
def test_a_life_begins_with_a_fresh_memory(shared, cell, revived):
    """Whoever acts, acts as in a world that began with its life: at an episode's start, or where it came back."""
    args = coma_lstm.Args(**SMALL, share_parameters=shared, cell=cell)
    _, agent, ((rollout, _),), _ = collected(args)
    found = list(lives(rollout.done[..., 0], rollout.agent_mask))
    assert any(n == 1 and a == 1 and last - first == 2 for n, a, first, last in found)  # of 6 steps: 2, dead 2, 2
    for n, a, first, last in found:
        logits = actor_logits(agent, rollout.obs, n, a, first, last)
        best = np.where(rollout.action_mask[first:last, n, a], logits, -np.inf).argmax(-1)
        np.testing.assert_array_equal(rollout.action[first:last, n, a], best)


# proves recurrent-1, recurrent-2
@pytest.mark.parametrize("shared", [True, False])
def test_the_loss_sees_the_policy_that_acted_across_ends_lives_and_rollouts(shared, revived):
    args = coma_lstm.Args(**SMALL, share_parameters=shared)
    _, agent, found, _ = collected(args, rollouts=2)
    for _, batch in found:
        living = batch.alive > 0
        logits = agent.logits(batch.obs, batch.action_mask, batch.memory, batch.forget)
        assert torch.equal(logits.argmax(-1)[living], batch.action[living])
        assert coma_lstm.actor_loss(agent, batch, args)[1]["policy_loss"].abs() < 1e-3  # log 1: it does no other
    batch = found[1][1]  # the memories at the start of a rollout and where they are emptied both matter
    learned = agent.actor(batch.obs, batch.memory, batch.forget)[0]
    for other in (batch._replace(memory=batch.memory * 0), batch._replace(forget=batch.forget & False)):
        others = agent.actor(other.obs, other.memory, other.forget)[0]
        assert (others - learned).abs()[batch.alive > 0].max() > 0.01 * learned.abs().max()


def test_exploration_is_part_of_the_policy(revived):
    """Who is sure of one action does another one as often as the policy says, which knows the share of random ones."""
    args = coma_lstm.Args(**SMALL | {"num_envs": 2000, "num_steps": 4}, share_parameters=False)
    envs = coma_lstm.make_envs(args, args.num_envs)
    agent, rollout = make_agent(args, envs), make_rollout(coma_lstm, args, envs)
    agent.epsilon.fill_(0.5)
    now = coma_lstm.collect(agent, envs, (*envs.reset(seed=1), rollout.memory[0]), rollout, args, Quiet())
    batch = coma_lstm.estimate(agent, rollout, *now, args)
    probs = agent.logits(batch.obs, batch.action_mask, batch.memory, batch.forget).softmax(-1)
    chosen, living = coma.of_action(probs, batch.action), batch.alive > 0
    assert probs[batch.action_mask].min() >= 0.5 / probs.shape[-1] - 1e-6
    frequency, best = (batch.action == probs.argmax(-1))[living].float().mean(), probs.amax(-1)[living].mean()
    assert 0.55 < best < 0.85 and abs(frequency - best) < 0.01 and chosen[living].min() < 0.3


# proves recurrent-2
def test_a_rollout_goes_on_from_the_memories_after_the_last(revived):
    _, agent, ((first, _), (second, batch)), _ = collected(coma_lstm.Args(**SMALL), rollouts=2)
    obs, forget = (torch.from_numpy(x).flatten(0, 1) for x in (first.obs, first.forget))
    with torch.no_grad():
        _, memories = agent.actor(obs, torch.zeros(4, 3, agent.actor.memory_size), forget)
    expected = memories[-4:] * ~forget[-4:, :, None]
    assert not first.memory.any() and expected.any()
    torch.testing.assert_close(torch.from_numpy(second.memory[0]), expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(batch.memory, torch.from_numpy(second.memory[0]))


@pytest.mark.parametrize("shared", [True, False])
def test_what_follows_an_episode_or_a_rollout_is_done_with_the_memory_of_its_life(shared, team):
    """With lambda 0 a target is r + gamma Q'(next action), and here the policy leaves no doubt which one that is."""
    env_id = f"{team}?see=noise&varied=True&may_die=False"
    args = coma_lstm.Args(env_id=env_id, **SMALL, share_parameters=shared, td_lambda=0, gamma=0.9)
    envs, agent, ((rollout, batch),), (next_obs, next_info, _) = collected(args)
    final = dict(zip(np.flatnonzero(rollout.done.any((1, 2))), envs.ends))
    target, checked = batch.target.view(20, 4, 3).numpy(), 0
    for n in range(4):
        length = 5 + n % 3
        for first in range(0, 20, length):
            last = min(first + length, 20)
            mask = envs.real_actions.copy()
            mask[2, (last - first) % 2] = False
            if last < first + length:  # the rollout ends before the episode
                obs, state = next_obs[n], next_info["state"][n]
            elif n % 2 == 1:  # truncated
                obs, state = (x[n] for x in final[last - 1])
            else:
                continue
            lived = torch.from_numpy(np.concatenate([rollout.obs[first:last, n], obs[None]]))
            with torch.no_grad():
                logits = agent.actor(lived, torch.zeros(1, 3, agent.actor.memory_size))[0][-1:]
                action = logits.masked_fill(~torch.from_numpy(mask), -1e8).argmax(-1)
                others = agent.others_actions(action, torch.ones(1, 3))
                seen = torch.from_numpy(state)[None], torch.from_numpy(obs)[None], torch.ones(1, 3)
                q = coma.of_action(agent.values(agent.target_critic, *seen, others), action)[0]
            np.testing.assert_allclose(target[last - 1, n], last - first + 0.9 * q, rtol=1e-4, atol=1e-4)
            checked += 1
    assert checked == 6 + 3  # truncated in environments 1 and 3, and three whose episode the rollout cut


@pytest.mark.parametrize("shared", [True, False])
def test_targets_within_a_rollout_come_from_the_target_network(shared, team):
    """As coma's do, and the actions of the dead count as none."""
    args = coma_lstm.Args(env_id=team, **SMALL, share_parameters=shared, td_lambda=0, gamma=0.9)
    _, agent, ((rollout, batch),), _ = collected(args)
    others = agent.others_actions(batch.action, batch.alive)
    assert torch.equal(batch.others, others)
    assert (others != agent.others_actions(batch.action, torch.ones_like(batch.alive))).any()
    values = agent.values(agent.target_critic, batch.state, batch.obs, batch.alive, others)
    value, target = (x.detach().view(20, 4, 3).numpy() for x in (coma.of_action(values, batch.action), batch.target))
    expected = rollout.reward[:-1] + 0.9 * value[1:] * ~rollout.done[:-1]
    np.testing.assert_allclose(target[:-1], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("script", [coma, coma_lstm])
def test_what_follows_is_the_value_of_sampled_actions_of_the_living(script, team, monkeypatch):
    args = script.Args(env_id=team, **SMALL)
    envs = script.make_envs(args, 2)
    torch.manual_seed(0)
    agent = script.Agent(envs, args)
    obs, info = envs.reset(seed=1)
    memory = [np.zeros((2, 3, agent.actor.memory_size), np.float32)] if script is coma_lstm else []
    alive = np.array([[True, False, True]] * 2)
    given = obs, info["state"], info["action_mask"], alive, *memory
    plain, actions = script.Agent.others_actions, []
    spy = lambda self, action, living: (actions.append(action), plain(self, action, living))[1]  # noqa: E731
    monkeypatch.setattr(script.Agent, "others_actions", spy)
    found = [script.bootstrap(agent, *given) for _ in range(600)]
    state, seen, living = torch.from_numpy(given[1]), torch.from_numpy(obs), torch.from_numpy(alive).float()
    values = agent.values(agent.target_critic, state, seen, living, plain(agent, actions[-1], living))
    np.testing.assert_allclose(found[-1], coma.of_action(values, actions[-1]).detach(), rtol=1e-5)
    inputs = (torch.from_numpy(x) for x in (obs, info["action_mask"], *memory))
    probs = agent.logits(*inputs).softmax(-1)
    counts = torch.nn.functional.one_hot(torch.stack(actions), probs.shape[-1]).sum(0)
    assert (counts[info["action_mask"]] > 60).all()
    torch.testing.assert_close(counts / 600, probs, atol=0.09, rtol=0)


# proves recurrent-1
def test_who_comes_back_where_a_time_limit_is_has_a_fresh_memory_there(monkeypatch):
    """The next action, whose value follows the episode, is chosen with the memories of those who lived alone."""
    monkeypatch.setattr(coma_lstm, "make", lambda env_id, num_envs, **options: RevivedLast(num_envs))
    plain, given = coma_lstm.bootstrap, []
    monkeypatch.setattr(coma_lstm, "bootstrap", lambda *x: (given.append(x), plain(*x))[1])
    envs, _, ((rollout, _),), _ = collected(coma_lstm.Args(**SMALL))
    assert rollout.done[4, 3].all() and not rollout.agent_mask[4, 3, 1]
    _, final_obs, _, _, alive, memory = given[0]  # of the fourth environment, which is the first that is cut
    assert (final_obs == envs.ends[0][0][[3]]).all() and alive.all()
    assert not memory[0, 1].any() and memory[0, [0, 2]].all()


@pytest.mark.parametrize("shared", [True, False])
def test_the_losses_and_the_critics_steps_are_the_parents_of_what_the_policy_says(shared, revived, monkeypatch):
    args = coma_lstm.Args(**SMALL, share_parameters=shared, ent_coef=0.2, target_network_update_freq=7)
    envs, agent, ((_, batch),), _ = collected(args, scale=100)
    theirs = coma.Batch(*(getattr(batch, field) for field in coma.Batch._fields))
    logits = agent.logits(batch.obs, batch.action_mask, batch.memory, batch.forget)
    given = Given(agent, logits, None)
    given.values, given.critic = agent.values, agent.critic
    (loss, stats), (expected, expected_stats) = (
        coma_lstm.actor_loss(agent, batch, args),
        coma.actor_loss(given, theirs, args),
    )
    torch.testing.assert_close((loss, stats), (expected, expected_stats))

    twin = coma.Agent(envs, coma.Args(share_parameters=shared, actor_hidden_dim=16))
    for name in ("critic", "target_critic"):
        getattr(twin, name).load_state_dict(getattr(agent, name).state_dict())
    before = agent.actor[-2].weight_hh.clone()
    for script, who, rows in ((coma_lstm, agent, batch), (coma, twin, theirs)):
        script.update(who, torch.optim.SGD(who.parameters(), lr=0.1), rows, 3, args)
    for name in ("critic", "target_critic"):
        for ours, other in zip(getattr(agent, name).parameters(), getattr(twin, name).parameters(), strict=True):
            torch.testing.assert_close(ours, other)
    assert (agent.actor[-2].weight_hh != before).any()  # the policy gradient reaches what is remembered


@pytest.mark.parametrize("shared", [True, False])
def test_two_runs_repeat_and_one_resumes_and_is_played(shared, tmp_path, capsys):
    args = coma_lstm.Args(env_id=LISTENER, **SMALL, share_parameters=shared, runs_dir=str(tmp_path))
    folders = [coma_lstm.main(args) for _ in range(2)]
    one, same = (load_checkpoint(folder)["modules"]["agent"] for folder in folders)
    assert all(torch.isfinite(x).all() and torch.equal(x, same[key]) for key, x in one.items())
    coma_lstm.main(coma_lstm.Args(**vars(args) | {"total_timesteps": 240, "resume": folders[0]}))
    assert load_checkpoint(folders[0])["step"] == 240
    metrics = enjoy.main(enjoy.Args(folders[0], episodes=2))
    assert "coma_lstm at step 240, 2 episodes" in capsys.readouterr().out and metrics["eval/ep_length"] == 25


def test_bad_input(tmp_path, monkeypatch, capsys):
    flags = ["--total-timesteps", "9", "--runs-dir", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", ["coma_lstm.py", *flags])
    with pytest.raises(SystemExit) as stopped:
        launch(coma_lstm.main, coma_lstm.Args)
    line = capsys.readouterr().err
    assert stopped.value.code == 2 and "--total-timesteps 9 is less than one rollout of 400" in line
    assert line.count("\n") == 1 and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("script", [coma, coma_lstm])
def test_a_frozen_layer_may_learn_later(script, tmp_path, monkeypatch):
    """The optimizer has it all the same; it has no target network."""

    class Frozen(script.Agent):
        def __init__(self, *args):
            super().__init__(*args)
            self.actor[1].requires_grad_(False)

    monkeypatch.setattr(script, "Agent", Frozen)
    folder = script.main(script.Args(**SMALL, runs_dir=str(tmp_path)))
    modules = load_checkpoint(folder)["modules"]
    actors, critics = (len(group["params"]) for group in modules["optimizer"]["param_groups"])
    assert actors == sum(name.startswith("actor.") for name in modules["agent"])
    assert critics == sum(name.startswith("critic.") for name in modules["agent"])
