"""ppo_atari_lstm.py: its five details; training replays the rollout's log-probabilities across the ends of episodes."""

import copy
import dataclasses

from cleanmarl import enjoy, ppo_atari_lstm
from cleanmarl.cli import UsageError
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
from toys import Quiet, losses, make_rollout

pytest.importorskip("ale_py")
pytest.importorskip("cv2")
SMALL = {"total_timesteps": 64, "num_envs": 2, "num_steps": 16, "num_minibatches": 2, "update_epochs": 1}
SMALL |= {"eval_episodes": 0}


def make(num_envs=2):
    return ppo_atari_lstm.make_envs(ppo_atari_lstm.Args(), num_envs)


def make_agent(envs, args=None, spread=30):
    """An agent whose actions depend on what it sees and remembers."""
    torch.manual_seed(0)
    agent = ppo_atari_lstm.Agent(envs, args or ppo_atari_lstm.Args())
    with torch.no_grad():
        agent.actor.weight *= spread
    return agent


@pytest.fixture(scope="module")
def collected():
    """Arguments, agent, and rollout and batch of each of two rollouts in a row, with lost lives."""
    args = ppo_atari_lstm.Args(**SMALL | {"num_steps": 60, "num_envs": 4})
    envs = make(4)
    agent = make_agent(envs, args, spread=100)
    position = envs.reset(seed=1)[0], np.ones(4, bool), ppo_atari_lstm.first_state(agent, 4)
    found = []
    for _ in range(2):
        rollout = make_rollout(ppo_atari_lstm, args, envs)
        position = ppo_atari_lstm.collect(agent, envs, *position, rollout, args, Quiet())
        found.append((rollout, ppo_atari_lstm.estimate(agent, rollout, *position, args)))
    assert all(rollout.done[:-1].any() for rollout, _ in found)
    return args, agent, *found


def ratio(agent, batch, **changes):
    batch = batch._replace(**changes)
    with torch.no_grad():
        log_probs = agent(batch.obs, batch.lstm_state, batch.start)[0].log_softmax(-1)
    return (log_probs.gather(-1, batch.action[..., None]).squeeze(-1) - batch.log_prob).exp()


# proves lstm-3, lstm-5
def test_first_ratio_is_one_across_episode_ends(collected):
    args, agent, (_, first), (_, second) = collected
    for batch in (first, second):
        assert batch.log_prob.exp().std() > 0.01
        torch.testing.assert_close(ratio(agent, batch), torch.ones(60, 4), atol=1e-5, rtol=0)
        for some in torch.tensor([[2, 0], [3, 1]]):  # minibatches of environments
            minibatch = ppo_atari_lstm.Batch(*(x[:, some] for x in batch))
            torch.testing.assert_close(ratio(agent, minibatch), torch.ones(60, 2), atol=1e-5, rtol=0)
            _, stats = ppo_atari_lstm.ppo_loss(agent, minibatch, 0.1, args)
            assert abs(stats["approx_kl"]) < 1e-6 and stats["clipfrac"] == 0
    # The state at the start of a rollout and the resets both matter.
    assert (ratio(agent, second, lstm_state=torch.zeros(2, 4, 128)) - 1).abs().max() > 1e-4
    assert (ratio(agent, second, start=torch.zeros(60, 4, dtype=torch.bool)) - 1).abs().max() > 1e-4


# proves lstm-5
def test_the_second_rollout_goes_on_from_the_state_of_the_first(collected):
    _, agent, (rollout, first), (_, second) = collected
    with torch.no_grad():
        _, _, state = agent(first.obs, first.lstm_state, first.start)
    torch.testing.assert_close(second.lstm_state, state, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(second.start[0].numpy(), rollout.done[-1])


# proves lstm-1
def test_lstm_weights_are_orthogonal_and_biases_zero():
    agent = ppo_atari_lstm.Agent(make(1), ppo_atari_lstm.Args())
    assert agent.lstm.input_size == 512 and agent.lstm.hidden_size == 128
    for name, p in agent.lstm.named_parameters():
        if "bias" in name:
            assert (p == 0).all()
        else:
            torch.testing.assert_close(p.T @ p, torch.eye(p.shape[1]), atol=1e-5, rtol=0)


# proves lstm-2
def test_the_first_state_is_zero(collected):
    _, agent, (_, first), _ = collected
    state = ppo_atari_lstm.first_state(agent, 3)
    assert state.shape == (2, 3, 128) and (state == 0).all()
    assert (first.lstm_state == 0).all() and first.start[0].all()
    edited = make_agent(make(1), ppo_atari_lstm.Args())
    edited.lstm = torch.nn.LSTM(512, 64)
    assert ppo_atari_lstm.first_state(edited, 3).shape == (2, 3, 64)


# proves lstm-3
def test_nothing_is_remembered_of_an_earlier_episode():
    agent = make_agent(make(1))
    obs = torch.randint(0, 256, (6, 2, 1, 84, 84), dtype=torch.uint8)
    start = torch.zeros(6, 2, dtype=torch.bool)
    start[3, 0] = True
    other = obs.clone()
    other[2] = 255 - other[2]
    state = torch.randn(2, 2, 128)
    with torch.no_grad():
        before, _, state_before = agent(obs, state, start)
        after, _, state_after = agent(other, state, start)
    same = (before - after).abs().amax(-1) < 1e-7
    assert same[:2].all() and not same[2].any() and same[3:, 0].all() and not same[3:, 1].any()
    assert (state_before[:, 0] == state_after[:, 0]).all() and (state_before[:, 1] != state_after[:, 1]).any()


# proves core-11
def test_gradients_are_clipped_by_one_norm(collected):
    args, agent, (_, batch), _ = collected
    args, agent = dataclasses.replace(args, num_minibatches=1, max_grad_norm=0.01, vf_coef=100.0), copy.deepcopy(agent)
    before = torch.cat([p.detach().flatten() for p in agent.parameters()])
    ppo_atari_lstm.update(agent, torch.optim.SGD(agent.parameters(), lr=1.0), batch, 0.2, args)
    change = torch.cat([p.detach().flatten() for p in agent.parameters()]) - before
    assert change.norm().item() == pytest.approx(0.01, rel=1e-3)


def test_actions_are_never_repeated_by_chance():
    envs = make(1)
    assert envs.unwrapped.envs[0].unwrapped.spec.kwargs["repeat_action_probability"] == 0
    envs.close()


def test_a_sequence_at_once_is_its_steps_one_by_one():
    agent = make_agent(make(1))
    obs, start = torch.randint(0, 256, (7, 3, 1, 84, 84), dtype=torch.uint8), torch.rand(7, 3) < 0.3
    state = first = torch.randn(2, 3, 128)
    with torch.no_grad():
        whole = agent(obs, state, start)
        for t in range(7):
            hidden = agent.network(obs[t].float() / 255)
            state = state * (1 - start[t].float())[:, None]
            output, (h, c) = agent.lstm(hidden[None], (state[:1], state[1:]))
            state = torch.cat([h, c])
            torch.testing.assert_close(whole[0][t], agent.actor(output[0]), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(whole[1][t], agent.critic(output[0])[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(whole[2], state, atol=1e-5, rtol=1e-5)
    assert (first != 0).any()


# proves core-6, lstm-4
def test_minibatches_are_whole_sequences_of_some_environments(collected, monkeypatch):
    args, agent, (_, batch), _ = collected
    seen, loss = [], ppo_atari_lstm.ppo_loss
    monkeypatch.setattr(ppo_atari_lstm, "ppo_loss", lambda a, b, *rest: (seen.append(b), loss(a, b, *rest))[1])
    args = dataclasses.replace(args, update_epochs=2)
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.0)
    torch.manual_seed(0)
    ppo_atari_lstm.update(agent, optimizer, batch, 0.1, args)
    assert len(seen) == 4
    orders = []
    for minibatch in seen:
        for n in range(2):
            which = [i for i in range(4) if torch.equal(minibatch.return_[:, n], batch.return_[:, i])]
            assert len(which) == 1  # a column of the rollout, from its first step to its last
            orders += which
            for x, whole in zip(minibatch, batch):
                assert torch.equal(x[:, n], whole[:, which[0]])
    assert sorted(orders[:4]) == sorted(orders[4:]) == [0, 1, 2, 3] and orders[:4] != orders[4:]


def test_observations_are_single_frames():
    envs = make()
    obs, _ = envs.reset(seed=1)
    assert obs.shape == (2, 1, 84, 84) and obs.dtype == np.uint8


def test_the_policy_remembers_until_done():
    envs = make(1)
    agent = make_agent(envs)
    a, b = np.random.default_rng(0).integers(0, 256, (2, 3, 1, 84, 84), dtype=np.uint8)
    policy, chosen = ppo_atari_lstm.make_policy(agent), {}
    calls, original = [], agent.forward
    agent.forward = lambda obs, state, start: (calls.append((state.clone(), start)), original(obs, state, start))[1]
    with torch.no_grad():
        policy(a, {}, np.ones(3, bool))
        chosen = policy(b, {}, np.array([False, True, False]))
        policy(b[:1], {}, np.ones(1, bool))  # another number of environments, as in the film after an evaluation
    assert chosen.shape == (3,) and (calls[0][0] == 0).all()
    assert (calls[1][0] != 0).any(-1).all() and calls[1][1].tolist() == [[False, True, False]]
    assert calls[2][0].shape == (2, 1, 128) and (calls[2][0] == 0).all()


def test_time_limit_bootstrap_uses_the_state_of_that_moment():
    args = ppo_atari_lstm.Args(num_envs=2, num_steps=20, time_limit_bootstrap=True)
    options = {"max_num_frames_per_episode": 60}  # no-ops and FIRE included
    envs = ppo_atari_lstm.make_envs(args, 2, **options)
    agent = make_agent(envs)
    start, state = np.ones(2, bool), ppo_atari_lstm.first_state(agent, 2)
    rollout = make_rollout(ppo_atari_lstm, args, envs)
    ppo_atari_lstm.collect(agent, envs, envs.reset(seed=1)[0], start, state, rollout, args, Quiet())
    ends = np.argwhere(rollout.done)
    assert len(ends) >= 2
    replay = ppo_atari_lstm.make_envs(args, 2, **options)
    replay.reset(seed=1)
    for t in range(20):
        _, reward, _, truncation, info = replay.step(rollout.action[t])
        for n in np.flatnonzero(truncation):
            seen = torch.cat([torch.from_numpy(rollout.obs[: t + 1, n]), torch.from_numpy(info["final_obs"][n])[None]])
            begins = torch.from_numpy(np.append(rollout.start[: t + 1, n], False))
            with torch.no_grad():
                value = agent(seen[:, None], torch.zeros(2, 1, 128), begins[:, None])[1][-1]
            np.testing.assert_allclose(rollout.reward[t, n], reward[n] + 0.99 * value.item(), atol=1e-5)
            ends = ends[1:]
    assert len(ends) == 0


def test_two_updates_same_seed_same_losses_resume_and_enjoy(tmp_path):
    args = ppo_atari_lstm.Args(**SMALL, runs_dir=str(tmp_path))
    folder = ppo_atari_lstm.main(args)
    assert losses(folder) == losses(ppo_atari_lstm.main(args))
    assert losses(folder) != losses(ppo_atari_lstm.main(dataclasses.replace(args, seed=2)))
    checkpoint = load_checkpoint(folder)
    assert checkpoint["step"] == 64 and all(torch.isfinite(x).all() for x in checkpoint["modules"]["agent"].values())

    ppo_atari_lstm.main(dataclasses.replace(args, resume=folder, total_timesteps=96, eval_episodes=2))
    resumed = load_checkpoint(folder)
    updates = [c["modules"]["optimizer"]["state"][0]["step"] for c in (checkpoint, resumed)]
    assert resumed["step"] == 96 and updates == [4, 6]

    metrics = enjoy.main(enjoy.Args(run_dir=folder, episodes=1))
    assert metrics["eval/ep_reward"] >= 0 and metrics["eval/ep_length"] > 50


def test_num_envs_must_be_divisible(tmp_path):
    text = (
        "--num-envs 6 is not divisible by --num-minibatches 4: a minibatch is the whole sequences of some environments"
    )
    with pytest.raises(UsageError, match=text):
        ppo_atari_lstm.main(ppo_atari_lstm.Args(num_envs=6, runs_dir=str(tmp_path)))
    with pytest.raises(UsageError, match=r"needs an Atari game"):
        ppo_atari_lstm.main(ppo_atari_lstm.Args(env_id="CartPole-v1", runs_dir=str(tmp_path)))
    assert not list(tmp_path.iterdir())
