"""mappo_lstm.py: the network against torch's GRU, replay across ends and rollouts, whole sequences, the critics.

`# proves NAME` above a test: it fails when that detail is taken out of the script.
"""

import sys

import numpy as np
import pytest
import torch
import torch.nn as nn

import cleanmarl.envs
from cleanmarl import enjoy, mappo_lstm
from cleanmarl.envs import EpisodeStatistics, MultiAgentVectorEnv
from cleanmarl.mappo_lstm import Args
from cleanmarl.run import launch, load_checkpoint

SPREAD = "mpe/simple_spread_v3"
SMALL = {
    "total_timesteps": 320,
    "num_envs": 4,
    "num_steps": 40,
    "hidden_dim": 16,
    "update_epochs": 2,
    "eval_episodes": 0,
}


class Toy(MultiAgentVectorEnv):
    """Three agents with different spaces; episodes of 5, 6, 7, ... steps in environments 0, 1, 2, ...

    Odd environments truncate, even ones terminate. Agent 1 dies after its third step, agent 2 with its last; the parity
    of the clock forbids agent 2's action 0 or 1. Observations and the state are random. The living earn the clock.
    """

    def __init__(self, num_envs):
        self._set_spaces(num_envs, ("a", "b", "c"), [2, 3, 1], [2, 4, 3], 2)
        self.statistics = EpisodeStatistics(num_envs, 3)
        self.random, self.length = np.random.default_rng(0), 5 + np.arange(num_envs)

    def _look(self):
        obs = self.random.normal(size=(self.num_envs, 3, 3)).astype(np.float32)
        obs *= np.arange(3) < self.obs_sizes[:, None]
        mask = np.tile(self.real_actions, (self.num_envs, 1, 1))
        mask[np.arange(self.num_envs), 2, self.clock % 2] = False
        alive = np.ones((self.num_envs, 3), bool)
        alive[:, 1], alive[:, 2] = self.clock < 3, self.clock < self.length
        obs[~alive] = 0
        state = self.random.normal(size=(self.num_envs, 2)).astype(np.float32)
        return obs, {"state": state, "action_mask": mask, "agent_mask": alive}

    def reset(self, *, seed=None, options=None):
        self.clock = np.zeros(self.num_envs, int)
        self.now = self._look()
        return self.now

    def step(self, action):
        before = self.now[1]
        legal = np.take_along_axis(before["action_mask"], action[..., None], -1)[..., 0]
        assert legal[before["agent_mask"]].all(), "an illegal action"
        self.clock += 1
        reward = np.float32(self.clock[:, None] * before["agent_mask"])
        ended, odd = self.clock == self.length, np.arange(self.num_envs) % 2 == 1
        self.statistics.add(reward)
        final, final_info = self._look()
        self.clock[ended] = 0
        obs, info = self.now = self._look()
        if ended.any():
            info["final_obs"], info["_final_obs"], info["final_state"] = final, ended, final_info["state"]
            info["final_agent_mask"] = final_info["agent_mask"]
            self.statistics.end(ended, info)
        return obs, reward, ended & ~odd, ended & odd, info


@pytest.fixture
def toy(monkeypatch):
    """`toy` as one more environment family."""
    make = cleanmarl.envs.make
    ours = lambda env_id, num_envs, **o: Toy(num_envs) if env_id == "toy" else make(env_id, num_envs, **o)  # noqa: E731
    monkeypatch.setattr(mappo_lstm, "make", ours)
    return "toy"


class Quiet:
    step = 0

    def log_episodes(self, info):
        pass


def make_rollout(args, envs):
    T, N, S = args.num_steps, args.num_envs, envs.state_size
    (A, D), K = envs.single_observation_space.shape, envs.real_actions.shape[1]
    seen = np.zeros((T, N, A, D), np.float32), np.zeros((T, N, S), np.float32)
    masks = np.zeros((T, N, A, K), bool), np.zeros((T, N, A), bool)
    rest = np.zeros((T, N, A), np.int64), np.zeros((T, N, A), np.float32), np.zeros((T, N, A), bool)
    final = np.full((T, N, A, D), np.nan, np.float32), np.full((T, N, S), np.nan, np.float32)
    return mappo_lstm.Rollout(*seen, *masks, *rest, np.zeros((T, N, A), bool), *final)


def make_agent(args, envs, scale=100):
    """An agent whose actions depend on what it sees and remembers, and whose gates are not all half open."""
    torch.manual_seed(0)
    agent = mappo_lstm.Agent(envs, args)
    with torch.no_grad():
        agent.actor.head.weight *= scale
        for network in (agent.actor, agent.critic):
            network.input.bias.normal_()
            network.memory.bias.normal_()
    return agent


def collected(args, rollouts=1):
    """Agent, and (rollout, batch) of each of some rollouts in a row."""
    envs = mappo_lstm.make_envs(args, args.num_envs)
    agent, found = make_agent(args, envs), []
    now, memories = envs.reset(seed=1), (agent.first_memory(args.num_envs),) * 2
    for _ in range(rollouts):
        rollout = make_rollout(args, envs)
        now = mappo_lstm.collect(agent, envs, now, memories[0], rollout, args, Quiet())
        batch, memories = mappo_lstm.estimate(agent, rollout, memories, *now, args)
        found.append((rollout, batch))
    return agent, *found


class Alone(nn.Module):
    """Network i of a stack as an ordinary one, with torch's own recurrent layer."""

    def __init__(self, stack, i):
        super().__init__()

        def linear(layer):
            copy = nn.Linear(layer.weight.shape[1], layer.weight.shape[2])
            copy.weight.data, copy.bias.data = layer.weight[i].T.detach().clone(), layer.bias[i, 0].detach().clone()
            return copy

        hidden = stack.encoder1.weight.shape[2]
        self.encoder = nn.Sequential(linear(stack.encoder1), nn.ReLU(), linear(stack.encoder2), nn.ReLU())
        self.head, self.rnn = linear(stack.head), nn.GRU(hidden, hidden)
        for name, layer in {"ih": linear(stack.input), "hh": linear(stack.memory)}.items():
            getattr(self.rnn, f"weight_{name}_l0").data = layer.weight.data
            getattr(self.rnn, f"bias_{name}_l0").data = layer.bias.data

    def forward(self, features, done, memory):
        """One step at a time: features (T, B, D), done (T, B), memory (B, H) -> (T, B, K), memory after them."""
        outputs = []
        for t in range(len(features)):
            output, memory = self.rnn(self.encoder(features[t])[None], memory[None])
            outputs.append(self.head(output[0]))
            memory = memory[0] * (1 - done[t])[:, None]
        return torch.stack(outputs), memory


# proves lstm-3
@pytest.mark.parametrize("shared", [True, False])
def test_stacked_cells_are_those_of_torch_with_the_same_weights(shared):
    args = Args(hidden_dim=8, share_parameters=shared)
    agent = make_agent(args, mappo_lstm.make_envs(args, 1)).double()
    T, N, A = 7, 4, 3
    memory, done = torch.randn(N, A, agent.hidden).double(), (torch.rand(T, N, A) < 0.3).double()
    for stack in (agent.actor, agent.critic):
        features = torch.randn(T, N, A, stack.encoder1.weight.shape[1]).double()
        ours, memories, after = agent.run(stack, features, memory, done)
        gradient = torch.autograd.grad(ours.sum(), stack.memory.weight)[0]
        theirs = torch.zeros_like(gradient)
        for a in range(A):
            network = Alone(stack, 0 if shared else a).double()
            output, their_after = network(features[:, :, a], done[:, :, a], memory[:, a])
            torch.testing.assert_close(ours[:, :, a], output, atol=1e-12, rtol=0)
            torch.testing.assert_close(after[:, a], their_after, atol=1e-12, rtol=0)
            theirs[0 if shared else a] += torch.autograd.grad(output.sum(), network.rnn.weight_hh_l0)[0].T
        torch.testing.assert_close(gradient, theirs, atol=1e-10, rtol=0)
        torch.testing.assert_close(memories[-1] * (1 - done[-1])[..., None], after)


# proves lstm-3, lstm-5
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("env_id", [SPREAD, "toy"])
def test_first_ratio_is_one_across_episode_ends_and_rollouts(env_id, shared, toy):
    args = Args(env_id=env_id, **SMALL, share_parameters=shared)
    agent, (_, first), (_, second) = collected(args, rollouts=2)
    for batch in (first, second):
        assert batch.done[:-1].any() and batch.log_prob[batch.alive > 0].std() > 0.01
        for part in (batch, mappo_lstm.Batch(*(x[:, [2, 0]] for x in batch))):
            _, _, stats = mappo_lstm.mappo_loss(agent, part, args)
            assert stats[3].abs() < 1e-6 and stats[4] == 0  # KL divergence and clipped fraction
            logits, _, _ = agent.run(agent.actor, part.features, part.memory[0], part.done)
            log_probs = logits.masked_fill(~part.action_mask, -1e8).log_softmax(-1)
            ratio = (log_probs.gather(-1, part.action[..., None]).squeeze(-1) - part.log_prob).exp()
            torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)
    # the memories at the start of a rollout and the resets both matter
    for other in (second._replace(memory=second.memory * 0), second._replace(done=second.done * 0)):
        assert mappo_lstm.mappo_loss(agent, other, args)[2][3] > 1e-5


# proves lstm-3
@pytest.mark.parametrize("shared", [True, False])
def test_the_policy_that_plays_is_the_policy_that_learns(shared, toy):
    """Greedy actions of make_policy, step by step in NumPy, against the whole sequences in torch."""
    args = Args(env_id=toy, **SMALL, share_parameters=shared)
    envs = mappo_lstm.make_envs(args, 4)
    agent = make_agent(args, envs)
    policy, done = mappo_lstm.make_policy(agent), np.ones(4, bool)
    obs, info = envs.reset()
    seen, masks, actions, ended = [], [], [], []
    for _ in range(30):
        seen.append(agent.features(obs))
        masks.append(info["action_mask"])
        actions.append(policy(obs, info, done))
        obs, _, termination, truncation, info = envs.step(actions[-1])
        done = termination | truncation
        ended.append(np.tile(done[:, None], 3))
    features, ends = torch.from_numpy(np.stack(seen)), torch.from_numpy(np.stack(ended)).float()
    with torch.no_grad():
        logits, _, _ = agent.run(agent.actor, features, agent.first_memory(4), ends)
    expected = np.where(np.stack(masks), logits.numpy(), -np.inf)
    np.testing.assert_array_equal(np.stack(actions), expected.argmax(-1))


# proves lstm-1, lstm-2
def test_recurrent_weights_are_orthogonal_biases_and_first_memories_zero():
    args = Args(share_parameters=False)
    agent = mappo_lstm.Agent(mappo_lstm.make_envs(args, 1), args)
    for layer in (agent.actor.input, agent.actor.memory, agent.critic.input, agent.critic.memory):
        assert layer.weight.shape == (3, 64, 3 * 64) and not layer.bias.any()
        for weight in layer.weight:
            torch.testing.assert_close(weight @ weight.T, torch.eye(64), atol=1e-5, rtol=0)
    assert agent.first_memory(5).shape == (5, 3, 64) and not agent.first_memory(5).any()


# proves lstm-4
def test_minibatches_are_whole_sequences_with_all_their_agents(monkeypatch):
    args = Args(env_id=SPREAD, **SMALL | {"num_minibatches": 2})
    agent, (_, batch) = collected(args)
    seen, loss = [], mappo_lstm.mappo_loss
    monkeypatch.setattr(mappo_lstm, "mappo_loss", lambda a, b, *rest: (seen.append(b), loss(a, b, *rest))[1])
    networks = zip((agent.actor, agent.critic), (0.0, 0.0))
    groups = [{"params": [mappo_lstm.stack_parameters(network)], "lr": lr} for network, lr in networks]
    mappo_lstm.update(agent, torch.optim.Adam(groups), batch, args)
    orders = []
    for minibatch in seen:
        for n in range(2):
            which = [i for i in range(4) if torch.equal(minibatch.return_[:, n], batch.return_[:, i])]
            assert len(which) == 1
            orders += which
            for x, whole in zip(minibatch, batch):
                assert torch.equal(x[:, n], whole[:, which[0]])
    assert len(seen) == 4 and sorted(orders[:4]) == sorted(orders[4:]) == [0, 1, 2, 3]


@pytest.mark.parametrize("shared", [True, False])
def test_values_after_a_time_limit_and_after_the_rollout_remember_the_episode(shared, toy):
    """With lambda 0 a return is r + gamma V(next): V from torch's GRU, run over one episode at a time."""
    args = Args(env_id=toy, **SMALL, share_parameters=shared, gamma=0.9, gae_lambda=0.0, normalize_value=False)
    envs = mappo_lstm.make_envs(args, 4)
    agent, rollout = make_agent(args, envs), make_rollout(args, envs)
    memories = agent.first_memory(4), agent.first_memory(4)
    next_obs, next_info = mappo_lstm.collect(agent, envs, envs.reset(), memories[0], rollout, args, Quiet())
    batch, _ = mappo_lstm.estimate(agent, rollout, memories, next_obs, next_info, args)
    critics = [Alone(agent.critic, 0 if shared else a) for a in range(3)]
    for n in range(4):
        length = 5 + n
        for first in range(0, 40, length):
            last, following = min(first + length, 40), []
            if first + length > 40:  # the rollout ends before the episode
                following = [(next_info["state"][n], next_obs[n], next_info["agent_mask"][n])]
            elif n % 2 == 1:  # truncated
                alive = np.array([True, False, False])  # agent 2 died with the last step
                assert (rollout.cut[last - 1, n] == alive).all()
                following = [(rollout.final_state[last - 1, n], rollout.final_obs[last - 1, n], alive)]
            steps = [(rollout.state[t, n], rollout.obs[t, n], rollout.agent_mask[t, n]) for t in range(first, last)]
            seen = [np.stack(x) for x in zip(*steps, *following)]
            features = torch.from_numpy(agent.critic_features(*seen))  # (steps, A, S + D)
            for a in range(3):
                with torch.no_grad():
                    value, _ = critics[a](features[:, a : a + 1], torch.zeros(len(features), 1), torch.zeros(1, 16))
                value = value[1:, 0, 0].numpy()
                value = value if following else np.append(value, 0)
                expected = 1 + np.arange(last - first) + 0.9 * value
                np.testing.assert_allclose(batch.return_[first:last, n, a], expected, rtol=1e-4, atol=1e-4)


def test_an_update_of_the_statistics_moves_no_value(toy):
    for shared in (True, False):
        args = Args(env_id=toy, **SMALL, share_parameters=shared)
        agent, (_, batch) = collected(args)
        value, _, _ = agent.run(agent.critic, batch.critic_features, batch.critic_memory[0], batch.done)
        torch.testing.assert_close(value.squeeze(-1), batch.value, atol=1e-4, rtol=1e-4)
        untouched = make_agent(args, mappo_lstm.make_envs(args, 4))
        before, _, _ = untouched.run(untouched.critic, batch.critic_features, batch.critic_memory[0], batch.done)
        torch.testing.assert_close(agent.denormalize(batch.value), before.squeeze(-1), atol=1e-3, rtol=1e-3)


def test_a_dead_agent_earns_what_the_living_do(toy):
    args = Args(env_id=toy, **SMALL)
    _, (rollout, _) = collected(args)
    assert not rollout.agent_mask[..., 1].all() and (rollout.reward[..., 1] > 0).all()
    assert (rollout.reward[..., 1] == rollout.reward[..., 0]).all()


@pytest.mark.parametrize("shared", [True, False])
def test_dead_agents_add_nothing_to_the_policy_and_critics_see_them_as_zeros(shared, toy):
    args = Args(env_id=toy, **SMALL, share_parameters=shared)
    agent, (rollout, batch) = collected(args)
    dead = batch.alive == 0
    assert dead[:, :, 1].any() and not dead[:, :, [0, 2]].any()
    assert (batch.critic_features[dead][:, :5] == 0).all() and (rollout.done == rollout.done[..., :1]).all()
    loss, _, stats = mappo_lstm.mappo_loss(agent, batch, args)
    noise = (1 - batch.alive) * 1e3
    other = batch._replace(advantage=batch.advantage + noise, log_prob=batch.log_prob - noise)
    loss2, _, stats2 = mappo_lstm.mappo_loss(agent, other, args)
    torch.testing.assert_close(loss, loss2)
    torch.testing.assert_close(stats, stats2)
    living = batch.advantage[~dead] if shared else batch.advantage[:, :, 1][~dead[:, :, 1]]
    assert living.mean().abs() < 1e-5 and (living.std(correction=0) - 1).abs() < 1e-4


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("env_id", ["mpe/simple_speaker_listener_v4", "toy"])
def test_two_updates_that_two_runs_repeat(env_id, shared, toy, tmp_path):
    args = Args(env_id=env_id, **SMALL, share_parameters=shared, runs_dir=str(tmp_path))
    one, same = (load_checkpoint(mappo_lstm.main(args)) for _ in range(2))
    assert one["step"] == 320
    for key, value in one["modules"]["agent"].items():
        assert torch.isfinite(value).all() and torch.equal(value, same["modules"]["agent"][key])


def test_a_resumed_run_goes_on_and_can_be_played(tmp_path, capsys):
    folder = mappo_lstm.main(Args(**SMALL, runs_dir=str(tmp_path)))
    mappo_lstm.main(Args(**SMALL | {"total_timesteps": 480}, runs_dir=str(tmp_path), resume=folder))
    after = load_checkpoint(folder)
    assert after["step"] == 480 and after["modules"]["agent"]["value_stats.count"] == 1440
    assert {"args.json", "checkpoint.pt", "done.json"} <= {path.name for path in folder.iterdir()}
    metrics = enjoy.main(enjoy.Args(folder, episodes=2))
    assert "mappo_lstm at step 480, 2 episodes" in capsys.readouterr().out and metrics["eval/ep_length"] == 25


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--env-id mpe/simple_spread_v3?continuous_actions=True", "are continuous; try mappo_continuous_action.py"),
        ("--num-envs 3 --num-minibatches 2", "--num-envs 3 is not divisible by --num-minibatches 2: a minibatch is"),
        ("--total-timesteps 99", "--total-timesteps 99 is less than one rollout of"),
        ("--value-clip-coef -1", "--value-clip-coef must be at least 0, not -1"),
    ],
)
def test_bad_input(flags, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mappo_lstm.py", *flags.split(), "--runs-dir", str(tmp_path / "runs")])
    with pytest.raises(SystemExit) as exit_:
        launch(mappo_lstm.main, Args)
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and text in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()
