"""maddpg_lstm.py and what maddpg_lstm_multienvs.py shares with it: LSTM, truncated back-propagation, states at ends."""

import dataclasses
import sys

from cleanmarl import enjoy, maddpg_lstm, maddpg_lstm_multienvs
from cleanmarl.cli import launch
from cleanmarl.evaluate import evaluate
from cleanmarl.layers import as_numpy
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_maddpg import CPU, SMALL, played, world
from test_recurrent_family import Revived
from toys import double, scalars

SCRIPTS = [maddpg_lstm, maddpg_lstm_multienvs]


def case(script, individual=True, **changes):
    args = script.Args(individual_critics=individual, **changes)
    agent, critic, buffer = played(script, world(3), args, scale=3)
    return args, agent, critic, double(buffer.sample(5, CPU))


def step_by_step(agent, obs, alive, tbptt):
    """Outputs (B, T, A, K) of the actor by torch.lstm_cell, one agent, one step and one layer after another."""
    ids, first, relu, *lstms, _, last = agent.actor
    outputs = []
    for a in range(obs.shape[2]):
        state = [obs.new_zeros(2, len(obs), lstm.size_hidden) for lstm in lstms]
        for t in range(obs.shape[1]):
            if t % tbptt == 0:
                state = [s.detach() for s in state]
            x = relu(first(ids(obs[:, t])[:, a]))
            for k, lstm in enumerate(lstms):
                weights = lstm.weight_ih[0].T, lstm.weight_hh[0].T, lstm.bias_ih[0, 0], lstm.bias_hh[0, 0]
                state[k] = torch.stack(torch.lstm_cell(x, tuple(state[k]), *weights))
                x, state[k] = state[k][0], state[k] * alive[:, t, a, None]  # the dead forget
            outputs.append(last(x.relu()))
    return torch.stack(outputs).unflatten(0, (obs.shape[2], -1)).permute(2, 1, 0, 3)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("tbptt", [1, 2, 4, 100])
def test_truncated_back_propagation_is_that_of_a_loop_over_time(script, num_layers, tbptt):
    _, agent, critic, batch = case(script, actor_num_layers=num_layers, tbptt=tbptt)
    obs, mask, alive = batch.obs[:, :-1], batch.action_mask[:, :-1], batch.alive
    assert obs.shape[1] >= 5
    torch.manual_seed(1)
    ours = script.actor_loss(agent, critic, batch)
    logits = step_by_step(agent, obs, alive, tbptt).masked_fill(~mask, -1e8)
    torch.testing.assert_close((agent.logits(obs, mask, alive) - logits) * alive[..., None], torch.zeros_like(logits))
    torch.manual_seed(1)
    own, total = F.gumbel_softmax(logits), 0
    for i in range(3):
        joint = torch.stack([(own if j == i else batch.action)[:, :, j] for j in range(3)], dim=2)
        total += (critic(batch.state[:, :-1], joint[:, :, None])[..., i] * alive[..., i]).sum()
    theirs = -total / alive.sum()
    torch.testing.assert_close(ours, theirs)
    parameters = list(agent.parameters())
    for a, b in zip(torch.autograd.grad(ours, parameters), torch.autograd.grad(theirs, parameters)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("script", SCRIPTS)
def test_chunks_as_long_as_the_episode_are_full_back_propagation(script):
    """The gradient of tbptt >= T is that of whole episodes, that of tbptt < T is not."""
    _, agent, _, batch = case(script)
    obs, mask = batch.obs[:, :-1], batch.action_mask[:, :-1]
    alive = torch.ones_like(batch.alive)
    parameters, weight = list(agent.parameters()), torch.rand_like(batch.action)
    logits = step_by_step(agent, obs, alive, 1000)
    full = torch.autograd.grad((logits.masked_fill(~mask, 0) * weight).sum(), parameters)
    for tbptt, is_full in ((obs.shape[1], True), (10, True), (obs.shape[1] - 1, False), (1, False)):
        agent.tbptt = tbptt
        loss = (agent.logits(obs, mask, alive).masked_fill(~mask, 0) * weight).sum()
        gradients = torch.autograd.grad(loss, parameters)
        assert all(torch.allclose(a, b) for a, b in zip(gradients, full)) == is_full


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_actor_that_acts_is_the_actor_that_learns(script, num_layers):
    _, agent, _, batch = case(script, actor_num_layers=num_layers)
    everyone = torch.ones(batch.obs.shape[:3])
    learner = agent.logits(batch.obs, torch.ones_like(batch.action_mask), everyone).detach()
    actor, memory = as_numpy(agent.actor), script.first_memory(agent, 5, 3).astype(np.float64)
    assert memory.shape == (5, 3, 2 * num_layers * 32)
    for t in range(batch.obs.shape[1]):
        logits, memory = actor(batch.obs[:, t].numpy(), memory)
        np.testing.assert_allclose(logits, learner[:, t], rtol=1e-9)
    assert abs(memory).max() > 0.1


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("script", SCRIPTS)
def test_target_actor_sees_the_first_observation(script, back, monkeypatch):
    """The target of step t takes the action that the target actor takes at t + 1 after all observations up to there.

    Who is dead in a step has no memory after it: also who comes `back` in the last observation, and nobody before.
    """
    _, agent, critic, batch = case(script, tbptt=100 if back else 2)
    if back:
        batch.alive[:], batch.goes_on[:], batch.action_mask[:] = 1, 1, True
        batch.alive[:, -1, 1] = 0
        monkeypatch.setattr(F, "gumbel_softmax", lambda logits, hard: logits.softmax(-1))  # samples hide small errors
    logits = step_by_step(agent, batch.obs, F.pad(batch.alive, (0, 0, 0, 1)), 100).masked_fill(~batch.action_mask, -1e8)
    torch.manual_seed(1)
    ours = script.critic_targets(agent, critic, batch, 0.99)
    torch.manual_seed(1)
    q = critic(batch.state[:, 1:], F.gumbel_softmax(logits[:, 1:], hard=True)[:, :, None])
    torch.testing.assert_close(ours, batch.reward + 0.99 * batch.goes_on * q)


@pytest.mark.parametrize("script", SCRIPTS)
def test_padding_and_dead_agents_add_nothing(script):
    args, agent, critic, batch = case(script)
    alive = batch.alive
    lengths = alive[..., 0].sum(1, keepdim=True)
    rows = torch.arange(batch.obs.shape[1]) > lengths
    dead = (1 - alive) * alive.any(-1, keepdim=True)
    obs = batch.obs + 1e3 * rows[..., None, None]
    obs[:, :-1] += 1e3 * dead[..., None]
    masks = batch.action_mask.clone()
    masks[..., 1, :] = torch.tensor([True, False, False, False])  # as after a death: its next action is no question
    batch = batch._replace(action_mask=masks)
    other = batch._replace(obs=obs, action_mask=masks & ~rows[..., None, None], reward=batch.reward + 1e3 * dead)
    assert rows.any() and dead.any()
    results = []
    for b in (batch, other):
        torch.manual_seed(5)
        target = script.critic_targets(agent, critic, b, args.gamma)
        losses = script.critic_loss(critic, b, target).sum(), script.actor_loss(agent, critic, b)
        results.append([target * b.weight, *losses, *torch.autograd.grad(losses[1], list(agent.parameters()))])
    for ours, theirs in zip(*results):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("script", SCRIPTS)
def test_policy_forgets_at_the_start_of_an_episode(script):
    _, agent, _, _ = case(script)
    agent = agent.float()
    envs = world(4)
    obs, info = envs.reset()
    actor = as_numpy(agent.actor)
    policy, rng = script.make_policy(agent), np.random.default_rng(0)
    memory = script.first_memory(agent, 4, 3)
    done = np.ones(4, bool)
    for _ in range(20):
        obs = rng.normal(size=obs.shape).astype(np.float32)
        living = np.ones((4, 3), bool)
        living[:, 2] = rng.random(4) < 0.7
        action = policy(obs, info | {"agent_mask": living}, done)
        for i in np.flatnonzero(done):
            memory[i] = 0
        logits, memory = actor(obs, memory)
        memory[:, 2] *= living[:, 2, None]
        np.testing.assert_array_equal(action, np.where(info["action_mask"], logits, -np.inf).argmax(-1))
        done = rng.random(4) < 0.3
    two = {name: info[name][:2] for name in ("action_mask", "agent_mask")}
    assert policy(obs[:2], two, np.ones(2, bool)).shape == (2, 3)


# proves recurrent-1
@pytest.mark.parametrize("tbptt", [1, 3, 100])
@pytest.mark.parametrize("script", SCRIPTS)
def test_who_comes_back_remembers_nothing(script, tbptt):
    _, agent, _, batch = case(script, tbptt=tbptt)
    obs, alive = batch.obs[:, :5], torch.ones_like(batch.alive[:, :5])
    mask = torch.ones_like(batch.action_mask[:, :5])
    alive[:, 1:3, 1] = 0
    logits = agent.logits(obs, mask, alive)
    torch.testing.assert_close(logits[:, 3:, 1], agent.logits(obs[:, 3:], mask[:, 3:], alive[:, 3:])[:, :, 1])
    remembered = agent.logits(obs, mask, torch.ones_like(alive))
    torch.testing.assert_close(logits[:, :, 0], remembered[:, :, 0])
    assert (logits - remembered)[:, 3:, 1].abs().min() > 1e-6
    torch.testing.assert_close(logits, step_by_step(agent, obs, alive, tbptt))


# proves recurrent-1
@pytest.mark.parametrize("script", SCRIPTS)
def test_what_acts_in_an_episode_is_what_learns_from_it(script, monkeypatch):
    """Agent 1 is dead in the third and fourth step, and comes back."""
    monkeypatch.setattr(script, "gumbel_noise", lambda *shape: 0)
    envs = Revived(1 if script is maddpg_lstm else 3)
    agent, _, buffer = played(script, envs, script.Args(individual_critics=True), scale=3)
    for episode in buffer.episodes:
        obs, mask, alive = (torch.from_numpy(x)[None] for x in (episode.obs, episode.action_mask, episode.alive))
        acted = agent.logits(obs[:, :-1].double(), mask[:, :-1], alive.double())[0].argmax(-1)
        living = alive[0] > 0
        assert not living[2:4, 1].any() and living[4, 1]
        assert (acted == torch.from_numpy(episode.action).argmax(-1))[living].all()


def test_state_is_zero_where_an_episode_begins(monkeypatch):
    """Without noise, all episodes of Toy are alike to a policy that has forgotten the last one."""
    monkeypatch.setattr(maddpg_lstm, "gumbel_noise", lambda *shape: 0)
    _, _, buffer = played(maddpg_lstm, world(1), maddpg_lstm.Args(individual_critics=True), num_episodes=3, scale=3)
    first, *others = (episode.action for episode in buffer.episodes)
    assert len(others) == 2 and all(np.array_equal(action, first) for action in others)


@pytest.mark.parametrize("env_id", ["mpe/simple_spread_v3", "matrix/climbing", "toy/each?varied=True"])
def test_two_updates_and_what_they_leave_behind(env_id, toy, tmp_path):
    args = maddpg_lstm.Args(env_id=env_id, **SMALL | {"total_timesteps": 150}, tbptt=3, runs_dir=str(tmp_path))
    folder = maddpg_lstm.main(args)
    saved, points = load_checkpoint(folder), scalars(folder)
    num_updates = saved["num_episodes"] - 3
    assert saved["step"] >= 150 and saved["modules"]["critic"]["num_updates"] == num_updates > 0
    # one step of the optimizer for a whole batch of episodes, whatever tbptt is
    steps = {s["step"].item() for s in saved["modules"]["actor_optimizer"]["state"].values()}
    assert steps == {num_updates}
    assert all(torch.isfinite(x).all() for x in saved["modules"]["agent"].values())
    names = ["rollout/ep_reward", "train/critic_loss", "train/actor_loss", "train/actor_gradients", "eval/ep_reward"]
    assert set(names) <= points.keys()


def test_same_seed_same_losses_and_resume(tmp_path):
    args = maddpg_lstm.Args(**SMALL, runs_dir=str(tmp_path))
    folder = maddpg_lstm.main(args)
    first, second = scalars(folder), scalars(maddpg_lstm.main(args))
    for tag in ("train/critic_loss", "train/actor_loss", "rollout/ep_reward", "eval/ep_reward"):
        assert first[tag] == second[tag]
    maddpg_lstm.main(dataclasses.replace(args, resume=folder, total_timesteps=800))
    after = load_checkpoint(folder)
    assert after["step"] == 800 and len(after["modules"]["buffer"]["lengths"]) == 32
    assert after["modules"]["critic"]["num_updates"] == 29
    assert np.isfinite(enjoy.main(enjoy.Args(folder, episodes=3))["eval/ep_reward"])


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--env-id mpe/simple_spread_v3?continuous_actions=True", "try a ..._continuous_action.py"),
        ("--tbptt 0", "--tbptt must be greater than 0, not 0"),
        ("--actor-num-layers 0", "--actor-num-layers must be greater than 0"),
        ("--batch-size 20 --buffer-size 10", "--batch-size 20 episodes do not fit into --buffer-size 10"),
    ],
)
@pytest.mark.parametrize("script", SCRIPTS)
def test_bad_input(script, flags, text, tmp_path, monkeypatch, capsys):
    name = script.__name__.rpartition(".")[2]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *flags.split(), "--runs-dir", str(tmp_path / "runs")])
    with pytest.raises(SystemExit) as exit_:
        launch(script.main, script.Args)
    line = capsys.readouterr().err
    assert exit_.value.code == 2 and line.startswith(f"{name}: ") and text in line and line.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.learning
@pytest.mark.parametrize("script", SCRIPTS)
def test_is_better_than_the_untrained_policy_in_seconds(script, tmp_path):
    env_id = "mpe/simple_speaker_listener_v4"
    args = script.Args(env_id=env_id, total_timesteps=12_000, runs_dir=str(tmp_path), eval_episodes=0, eval_steps=10**6)
    args = dataclasses.replace(args, learning_rate_actor=1e-3, learning_rate_critic=1e-3, polyak=0.02)
    folder = script.main(args)
    envs = script.make_envs(args, 32)
    agent = script.Agent(envs, args)
    untrained = evaluate(envs, script.make_policy(agent, greedy=False), 320, seed=7)
    agent.load_state_dict(load_checkpoint(folder)["modules"]["agent"])
    trained = evaluate(envs, script.make_policy(agent, greedy=False), 320, seed=7)
    error = np.hypot(untrained["eval/std_ep_reward"], trained["eval/std_ep_reward"]) / np.sqrt(320)
    assert trained["eval/ep_reward"] - untrained["eval/ep_reward"] > 5 * error
