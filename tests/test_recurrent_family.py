"""What ippo_lstm.py, mappo_lstm.py and coppo_lstm.py have in common: the memory, where it is emptied and replayed.

`# proves NAME` above a test: it fails when that detail is taken out of the scripts.
"""

import sys

from cleanmarl import coppo, coppo_lstm, enjoy, ippo, ippo_lstm, mappo, mappo_lstm
from cleanmarl.cli import launch
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
from toys import Quiet, Toy, make_rollout

SCRIPTS = [ippo_lstm, mappo_lstm, coppo_lstm]
LISTENER = "mpe/simple_speaker_listener_v4"
SMALL = {"num_envs": 4, "num_steps": 20, "total_timesteps": 160, "update_epochs": 2}
SMALL |= {"actor_hidden_dim": 16, "critic_hidden_dim": 16}
SMALL |= {"num_minibatches": 2, "eval_episodes": 0}


class Revived(Toy):
    """Random observations, episodes of 5, 6, 7 and 5 steps; agent 1 is dead in the third and fourth and comes back."""

    dead = (2, 3)  # by the clock

    def __init__(self, num_envs):
        super().__init__(num_envs, team_reward=True, see="noise", varied=True)

    def look(self):
        self.may_die = False
        obs, info = super().look()
        self.may_die = True
        info["agent_mask"][:, 1] = ~np.isin(self.clock, self.dead)
        info["action_mask"][~info["agent_mask"]] = np.arange(4) == 0
        return obs, info


class RevivedLast(Revived):
    """Agent 1 is dead in the last two steps of the fourth environment, and comes back where its time limit is."""

    dead = (3, 4)


@pytest.fixture
def revived(monkeypatch):
    """Makes every environment a Revived one."""
    for script in SCRIPTS:
        monkeypatch.setattr(script, "make", lambda env_id, num_envs, **options: Revived(num_envs))


def make_agent(script, args, envs):
    """An agent whose actions depend on what it sees and remembers, and whose gates are not all half open."""
    torch.manual_seed(0)
    agent = script.Agent(envs, args)
    with torch.no_grad():
        agent.actor[-1].weight *= 100
        for network in (agent.actor, agent.critic):
            for name, parameter in network.cells[0].named_parameters():
                parameter.normal_() if "bias" in name else None
    return agent


def collected(script, args, rollouts=1):
    """Environments, agent, and (rollout, batch) of each of some rollouts in a row, with what followed the last."""
    envs = script.make_envs(args, args.num_envs)
    agent, found = make_agent(script, args, envs), []
    rollout = make_rollout(script, args, envs)
    now = *envs.reset(seed=1), (rollout.memory[0], rollout.critic_memory[0])
    for _ in range(rollouts):
        rollout = make_rollout(script, args, envs)
        now = script.collect(agent, envs, now, rollout, args, Quiet())
        following = (now[0], now[2]) if script is ippo_lstm else now  # whose critics see no state
        found.append((rollout, script.estimate(agent, rollout, *following, args)))
    return envs, agent, tuple(found), now


def ratio_of(agent, batch):
    log_probs = agent.logits(batch.obs, batch.action_mask, batch.memory, batch.forget).log_softmax(-1)
    return (log_probs.gather(-1, batch.action[..., None]).squeeze(-1) - batch.log_prob).exp()[batch.alive > 0]


def lives(done, alive):
    """(n, a, first, last + 1) of each life in the steps of done (T, N), alive (T, N, A): an episode, or part of one."""
    for n, a in np.ndindex(alive.shape[1:]):
        first = None
        for t in range(len(done)):
            first = t if first is None and alive[t, n, a] else first
            over = done[t, n] or t + 1 == len(done) or not alive[t + 1, n, a]
            if first is not None and over:
                yield n, a, first, t + 1
                first = None


def actor_logits(agent, obs, n, a, first, last):
    """Logits (steps, K) of one agent in one life, which begins with nothing in memory."""
    memory = torch.zeros(1, 3, agent.actor.memory_size)
    with torch.no_grad():
        return agent.actor(torch.from_numpy(obs[first:last, n]), memory)[0][:, a]


# proves recurrent-1
@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_life_begins_with_a_fresh_memory_in_training_and_in_evaluation(script, shared, cell, revived):
    """Whoever acts, acts as in a world that began with its life: at an episode's start, or where it came back."""
    args = script.Args(**SMALL, share_parameters=shared, cell=cell)
    _, agent, ((rollout, _),), _ = collected(script, args)
    found = list(lives(rollout.forget.all(-1), rollout.agent_mask))
    assert any(n == 1 and a == 1 and last - first == 2 for n, a, first, last in found)  # of 6 steps: 2, dead 2, 2
    for n, a, first, last in found:
        logits = actor_logits(agent, rollout.obs, n, a, first, last)
        logits = logits.masked_fill(~torch.from_numpy(rollout.action_mask[first:last, n, a]), -1e8)
        action = torch.from_numpy(rollout.action[first:last, n, a])
        expected = logits.log_softmax(-1).gather(-1, action[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.from_numpy(rollout.log_prob[first:last, n, a]), expected, atol=1e-4, rtol=1e-4)

    envs = script.make_envs(args, 4)
    policy, (obs, info), ended, seen = script.make_policy(agent), envs.reset(), np.ones(4, bool), []
    for _ in range(20):
        action = policy(obs, info, ended)
        seen.append([obs, info["agent_mask"].copy(), info["action_mask"], action])
        obs, _, termination, truncation, info = envs.step(action)
        ended = termination | truncation
        seen[-1].append(ended)
    obs, alive, mask, action, ended = map(np.stack, zip(*seen))
    for n, a, first, last in lives(ended, alive):
        logits = np.where(mask[first:last, n, a], actor_logits(agent, obs, n, a, first, last), -np.inf)
        np.testing.assert_array_equal(action[first:last, n, a], logits.argmax(-1))


# proves recurrent-1, recurrent-2
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("script", SCRIPTS)
def test_first_ratio_is_one_across_ends_lives_and_rollouts(script, shared, revived):
    args = script.Args(**SMALL, share_parameters=shared)
    _, agent, found, _ = collected(script, args, rollouts=2)
    for _, batch in found:
        assert batch.log_prob[batch.alive > 0].std() > 0.01 and batch.forget.any() and (batch.alive == 0).any()
        torch.testing.assert_close(ratio_of(agent, batch), torch.ones(int(batch.alive.sum())), atol=1e-5, rtol=0)
        loss = script.actor_loss if script is coppo_lstm else getattr(script, script.__name__[10:-5] + "_loss")
        assert loss(agent, batch, args)[1]["approx_kl"].abs() < 1e-6
    batch = found[1][1]  # the memories at the start of a rollout and where they are emptied both matter
    for other in (batch._replace(memory=batch.memory * 0), batch._replace(forget=batch.forget & False)):
        assert (ratio_of(agent, other) - 1).abs().max() > 1e-3


# proves recurrent-2
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_rollout_goes_on_from_the_memories_after_the_last(script, revived):
    _, agent, ((first, _), (second, batch)), _ = collected(script, script.Args(**SMALL), rollouts=2)
    assert not first.memory.any() and not first.critic_memory.any()
    obs, forget = (torch.from_numpy(x).flatten(0, 1) for x in (first.obs, first.forget))
    with torch.no_grad():
        _, memories = agent.actor(obs, torch.zeros(4, 3, agent.actor.memory_size), forget)
    expected = memories[-4:] * ~forget[-4:, :, None]
    torch.testing.assert_close(torch.from_numpy(second.memory[0]), expected, atol=1e-5, rtol=1e-4)
    assert expected.any() and second.critic_memory.any()
    assert torch.equal(batch.memory, torch.from_numpy(second.memory[0]))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("script", SCRIPTS)
def test_critics_remember_the_episode_at_its_time_limit_and_after_the_rollout(script, shared, toy):
    """With lambda 0 a return is r + gamma V(next), from a critic that is asked once more for every whole episode."""
    options = SMALL | {"gamma": 0.9, "gae_lambda": 0.0, "normalize_value": False}
    args = script.Args(env_id="toy/team?see=noise&varied=True", **options, share_parameters=shared)
    envs, agent, ((rollout, batch),), (next_obs, next_info, _) = collected(script, args)
    return_ = batch.return_.view(20, 4, 3).numpy()
    living = np.stack(envs.rewards).sum(-1) / rollout.agent_mask.sum(-1)  # what each of them earned
    ended_at = np.flatnonzero(rollout.done.all(-1).any(-1))
    for n in range(4):
        length = 5 + n % 3
        ends = [ends for t, ends in zip(ended_at, envs.ends) if (t + 1) % length == 0]
        for i, first in enumerate(range(0, 20, length)):
            last = min(first + length, 20)
            states = rollout.state[first:last, n] if hasattr(rollout, "state") else [None] * 20
            steps = [*zip(rollout.agent_mask[first:last, n], rollout.obs[first:last, n], states)]
            if first + length > 20:  # the rollout ends before the episode
                steps.append((next_info["agent_mask"][n], next_obs[n], next_info["state"][n]))
            elif n % 2 == 1:  # truncated
                steps.append((np.array([True, False, length < 6]), ends[i][0][n], ends[i][1][n]))
            memory, values = torch.zeros(1, 3, agent.critic.memory_size), []
            for alive, obs, state in steps:
                seen = [obs] if script is ippo_lstm else [state, obs, alive.astype(np.float32)]
                with torch.no_grad():
                    value, memory = agent.value(*(torch.from_numpy(x)[None] for x in seen), memory)
                values.append(value[0].numpy())
            values = np.stack(values + [np.zeros(3)] * (len(steps) == last - first))
            np.testing.assert_allclose(rollout.value[first:last, n], values[: last - first], rtol=1e-4, atol=1e-5)
            expected = living[first:last, n, None] + 0.9 * values[1:]
            np.testing.assert_allclose(return_[first:last, n], expected, rtol=1e-4, atol=1e-4)


# proves recurrent-1
@pytest.mark.parametrize("script", SCRIPTS)
def test_who_comes_back_where_a_time_limit_is_has_a_fresh_memory_there(script, monkeypatch):
    """With lambda 0 its last return is r + gamma V(final), of a critic that remembers nothing."""
    monkeypatch.setattr(script, "make", lambda env_id, num_envs, **options: RevivedLast(num_envs))
    args = script.Args(**SMALL, gamma=0.9, gae_lambda=0.0, normalize_value=False)
    envs, agent, ((rollout, batch),), _ = collected(script, args)
    assert rollout.done[4, 3].all() and not rollout.agent_mask[4, 3, 1]
    final_obs, final_state = (torch.from_numpy(x[3])[None] for x in envs.ends[0])
    seen = [final_obs] if script is ippo_lstm else [final_state, final_obs, torch.ones(1, 3)]
    with torch.no_grad():
        fresh, _ = agent.value(*seen, torch.zeros(1, 3, agent.critic.memory_size))
    return_ = batch.return_.view(20, 4, 3)[4, 3]
    torch.testing.assert_close(return_[1], 5 + 0.9 * fresh[0, 1], atol=1e-4, rtol=1e-4)
    assert (return_ - 5 - 0.9 * fresh[0]).abs()[[0, 2]].min() > 1e-3  # the others remember


# proves mappo-8
@pytest.mark.parametrize("script", SCRIPTS)
def test_minibatches_are_whole_sequences_with_all_their_agents(script, monkeypatch, revived):
    args = script.Args(**SMALL)
    _, agent, ((_, batch),), _ = collected(script, args)
    name = {ippo_lstm: "ippo_loss", mappo_lstm: "mappo_loss", coppo_lstm: "critic_loss"}[script]
    seen, loss = [], getattr(script, name)
    monkeypatch.setattr(script, name, lambda a, b, *rest: (seen.append(b), loss(a, b, *rest))[1])
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.0)
    actors = [script.Networks(agent.actor, 1)] if script is coppo_lstm else []
    script.update(agent, *actors, optimizer, batch, args)
    orders = []
    for minibatch in seen:
        assert [len(x) for x in minibatch] == [len(x) // 2 for x in batch]
        parts, whole = ([x.unflatten(0, (-1, n)) for x in b] for b, n in ((minibatch, 2), (batch, 4)))
        for n in range(2):
            which = [i for i in range(4) if all(torch.equal(x[:, n], y[:, i]) for x, y in zip(parts, whole))]
            assert len(which) == 1  # all steps of one environment, from the first to the last, and its memories
            orders += which
    assert len(seen) == 4 and sorted(orders[:4]) == sorted(orders[4:]) == [0, 1, 2, 3]
    assert orders[:4] != orders[4:]


class Given:
    """An agent that says what it was told to say, whatever it is asked."""

    def __init__(self, agent, logits, value):
        self.mean = agent.mean
        self.logits, self.normalized_value = (lambda *seen: logits), (lambda *seen: value)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("script, parent", [(ippo_lstm, ippo), (mappo_lstm, mappo), (coppo_lstm, coppo)])
def test_the_loss_is_the_parents_of_what_the_networks_say(script, parent, shared, revived):
    args = script.Args(**SMALL, share_parameters=shared, huber_delta=0.5, ent_coef=0.2)
    _, agent, ((_, batch),), _ = collected(script, args)
    batch = batch._replace(log_prob=batch.log_prob + 0.2 * torch.randn(batch.log_prob.shape))
    theirs = parent.Batch(*(getattr(batch, field) for field in parent.Batch._fields))
    with torch.no_grad():
        logits = agent.logits(batch.obs, batch.action_mask, batch.memory, batch.forget)
        seen = [batch.obs] if script is ippo_lstm else [batch.state, batch.obs, batch.alive]
        given = Given(agent, logits, agent.normalized_value(*seen, batch.critic_memory, batch.forget)[0])
        names = ["actor_loss", "critic_loss"] if script is coppo_lstm else [script.__name__[10:-5] + "_loss"]
        for name in names:
            ours, expected = getattr(script, name)(agent, batch, args), getattr(parent, name)(given, theirs, args)
            torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("cell, gates", [("lstm", 4), ("gru", 3)])
@pytest.mark.parametrize("script", SCRIPTS)
def test_recurrent_weights_are_orthogonal_and_biases_zero(script, cell, gates, revived):
    args = script.Args(**SMALL, share_parameters=False, cell=cell)
    agent = script.Agent(script.make_envs(args, 1), args)
    for network in (agent.actor, agent.critic):
        for name, parameter in network.cells[0].named_parameters():
            assert parameter.shape == (3, 1 if "bias" in name else 16, gates * 16)
            if "bias" in name:
                assert not parameter.any()
            else:
                identity = torch.eye(16).expand(3, 16, 16)
                torch.testing.assert_close(parameter @ parameter.mT, identity, atol=1e-5, rtol=0)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_policy_starts_afresh_with_another_number_of_environments(script, revived):
    args = script.Args(**SMALL)
    envs = script.make_envs(args, 4)
    policy, (obs, info) = script.make_policy(make_agent(script, args, envs)), envs.reset()
    first = policy(obs, info, np.ones(4, bool))
    policy(obs[::-1], info, np.zeros(4, bool))
    one = {key: x[:1] for key, x in info.items()}
    np.testing.assert_array_equal(policy(obs[:1], one, np.ones(1, bool)), first[:1])


@pytest.mark.parametrize("script, shared", [(ippo_lstm, False), (mappo_lstm, True), (coppo_lstm, False)])
def test_two_runs_repeat_and_one_resumes_and_is_played(script, shared, tmp_path, capsys):
    args = script.Args(env_id=LISTENER, **SMALL, share_parameters=shared, runs_dir=str(tmp_path))
    folders = [script.main(args) for _ in range(2)]
    one, same = (load_checkpoint(folder)["modules"]["agent"] for folder in folders)
    assert all(torch.isfinite(x).all() and torch.equal(x, same[key]) for key, x in one.items())
    script.main(script.Args(**vars(args) | {"total_timesteps": 240, "resume": folders[0]}))
    assert load_checkpoint(folders[0])["step"] == 240
    metrics = enjoy.main(enjoy.Args(folders[0], episodes=2))
    assert f"{script.__name__[10:]} at step 240, 2 episodes" in capsys.readouterr().out
    assert metrics["eval/ep_length"] == 25


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--num-envs 3 --num-minibatches 2", "--num-envs 3 is not divisible by --num-minibatches 2"),
        ("--total-timesteps 9", "--total-timesteps 9 is less than one rollout of"),
        (
            "--env-id mpe/simple_spread_v3?continuous_actions=True",
            "has continuous actions and this script needs",
        ),
    ],
)
@pytest.mark.parametrize("script", SCRIPTS)
def test_bad_input(script, flags, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script.py", *flags.split(), "--runs-dir", str(tmp_path / "runs")])
    with pytest.raises(SystemExit) as stopped:
        launch(script.main, script.Args)
    line = capsys.readouterr().err
    assert stopped.value.code == 2 and text in line and line.count("\n") == 1
    assert not (tmp_path / "runs").exists()
