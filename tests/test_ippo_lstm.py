"""ippo_lstm.py: cells against torch's, replay across ends and deaths, whole sequences, agents alone, the script.

`# proves NAME` above a test: it fails when that detail is taken out of the script.
"""

import dataclasses
import sys

import numpy as np
import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import cleanmarl.envs
from cleanmarl import enjoy, ippo_lstm
from cleanmarl.envs import EpisodeStatistics, MultiAgentVectorEnv
from cleanmarl.ippo_lstm import Args
from cleanmarl.run import evaluate, launch, load_checkpoint

SPREAD, LISTENER = "mpe/simple_spread_v3", "mpe/simple_speaker_listener_v4"
SMALL = {"total_timesteps": 320, "num_envs": 4, "num_steps": 40, "hidden_dim": 16, "eval_episodes": 0}


class Toy(MultiAgentVectorEnv):
    """Three agents with different spaces; episodes of 5, 6, 7, ... steps in environments 0, 1, 2, ...

    Odd environments truncate, even ones terminate. Agent 1 dies after its third step, agent 2 with its last; the parity
    of the clock forbids agent 2's action 0 or 1. Observations are random; agent i's reward is i + 1 while it lives.
    """

    def __init__(self, num_envs):
        self._set_spaces(num_envs, ("a", "b", "c"), [2, 3, 1], [2, 4, 3], 6)
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
        return obs, {"state": obs[:, :, 0].copy(), "action_mask": mask, "agent_mask": alive}

    def reset(self, *, seed=None, options=None):
        self.clock = np.zeros(self.num_envs, int)
        self.now = self._look()
        return self.now

    def step(self, action):
        before = self.now[1]
        legal = np.take_along_axis(before["action_mask"], action[..., None], -1)[..., 0]
        assert legal[before["agent_mask"]].all(), "an illegal action"
        reward = np.array([1.0, 2.0, 3.0], np.float32) * before["agent_mask"]
        self.clock += 1
        ended, odd = self.clock == self.length, np.arange(self.num_envs) % 2 == 1
        self.statistics.add(reward)
        final, final_info = self._look()
        self.clock[ended] = 0
        obs, info = self.now = self._look()
        if ended.any():
            info["final_obs"], info["_final_obs"] = final, ended
            info["final_agent_mask"] = final_info["agent_mask"]
            self.statistics.end(ended, info)
        return obs, reward, ended & ~odd, ended & odd, info


@pytest.fixture
def toy(monkeypatch):
    """`toy/toy` as one more environment family."""

    def make(env_id, num_envs, **options):
        return Toy(num_envs) if env_id == "toy/toy" else cleanmarl.envs.make(env_id, num_envs, **options)

    monkeypatch.setattr(ippo_lstm, "make", make)
    return "toy/toy"


class Quiet:
    step = 0

    def log_episodes(self, info):
        pass


def make_rollout(args, envs):
    T, N = args.num_steps, args.num_envs
    (A, D), K = envs.single_observation_space.shape, envs.real_actions.shape[1]
    masks = np.zeros((T, N, A, K), bool), np.zeros((T, N, A), bool)
    rest = np.zeros((T, N, A), np.int64), np.zeros((T, N, A), np.float32), np.zeros((T, N, A), bool)
    ends = np.zeros((T, N, A), bool), np.full((T, N, A, D), np.nan, np.float32)
    return ippo_lstm.Rollout(np.zeros((T, N, A, D), np.float32), *masks, *rest, *ends)


def make_agent(args, envs, scale=100):
    """An agent whose actions depend on what it sees and remembers, and whose gates are not all half open."""
    torch.manual_seed(0)
    agent = ippo_lstm.Agent(envs, args)
    with torch.no_grad():
        agent.actor.head.weight *= scale
        for network in (agent.actor, agent.critic):
            network.input.bias.normal_()
            network.memory.bias.normal_()
    return agent


def collected(args, scale=100, rollouts=1):
    """Agent, and rollout and batch of each of some rollouts in a row."""
    envs = ippo_lstm.make_envs(args, args.num_envs)
    agent = make_agent(args, envs, scale)
    now, state, found = envs.reset(seed=1), agent.first_state(args.num_envs), []
    for _ in range(rollouts):
        rollout = make_rollout(args, envs)
        now = ippo_lstm.collect(agent, envs, now, state, rollout, args, Quiet())
        batch, state = ippo_lstm.estimate(agent, rollout, state, now[0], args)
        found.append((rollout, batch))
    return agent, *found


def ratio(agent, batch, **changes):
    batch = batch._replace(**changes)
    with torch.no_grad():
        logits, *_ = agent(batch.features, batch.state[:, 0], batch.done)
    log_probs = logits.masked_fill(~batch.action_mask, -1e8).log_softmax(-1)
    return (log_probs.gather(-1, batch.action[..., None]).squeeze(-1) - batch.log_prob).exp()


def settings_of(args):
    return ippo_lstm.make_settings(args, torch.device("cpu"))


def optimizer_for(agent, lr, **kwargs):
    rows = ippo_lstm.stack_parameters(agent)
    lrs = np.broadcast_to(lr, len(rows)).tolist()
    return torch.optim.Adam([{"params": [row], "lr": x} for row, x in zip(rows, lrs)], **kwargs)


def curves(folder):
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [point.value for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


class Alone(nn.Module):
    """Network i of a stack as an ordinary one, with torch's own recurrent layer."""

    def __init__(self, cell, stack, i):
        super().__init__()

        def linear(layer):
            copy = nn.Linear(layer.weight.shape[1], layer.weight.shape[2])
            copy.weight.data, copy.bias.data = layer.weight[i].T.detach().clone(), layer.bias[i, 0].detach().clone()
            return copy

        hidden = stack.encoder.weight.shape[2]
        self.encoder, self.head = linear(stack.encoder), linear(stack.head)
        self.rnn = {"lstm": nn.LSTM, "gru": nn.GRU}[cell](hidden, hidden)
        for part, layer in {"ih": linear(stack.input), "hh": linear(stack.memory)}.items():
            getattr(self.rnn, f"weight_{part}_l0").data = layer.weight.data
            getattr(self.rnn, f"bias_{part}_l0").data = layer.bias.data

    def forward(self, features, done, state):
        """One step at a time: features (T, B, D), done (T, B), state (B, S) -> (T, B, K), states (T, B, S), state."""
        outputs, states = [], []
        for t in range(len(features)):
            x = torch.tanh(self.encoder(features[t]))[None]
            if isinstance(self.rnn, nn.LSTM):
                output, both = self.rnn(x, tuple(s[None].contiguous() for s in state.chunk(2, -1)))
                state = torch.cat(both, -1)[0]
            else:
                output, state = self.rnn(x, state[None])
                state = state[0]
            outputs.append(self.head(output[0]))
            states.append(state)
            state = state * (1 - done[t])[:, None]
        return torch.stack(outputs), torch.stack(states), state


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("shared", [False, True])
def test_stacked_cells_are_those_of_torch_with_the_same_weights(cell, shared):
    args = Args(cell=cell, hidden_dim=8, share_parameters=shared)
    agent = make_agent(args, ippo_lstm.make_envs(args, 1)).double()
    M, T, B, D, S = len(agent.actor.head.weight), 7, 4, agent.actor.encoder.weight.shape[1], agent.state_size
    features, state = torch.randn(M, T, B, D).double(), torch.randn(2 * M, B, S).double()
    done = (torch.rand(M, T, B) < 0.3).double()
    logits, value, states, after = agent(features, state, done)
    gradient = torch.autograd.grad(logits.sum() + value.sum(), list(agent.parameters()))
    for role, (stack, ours) in enumerate([(agent.actor, logits), (agent.critic, value[..., None])]):
        for i in range(M):
            row, network = role * M + i, Alone(cell, stack, i).double()
            output, their_states, their_after = network(features[i], done[i], state[row])
            torch.testing.assert_close(ours[i], output, atol=1e-12, rtol=0)
            torch.testing.assert_close(states[row], their_states, atol=1e-12, rtol=0)
            torch.testing.assert_close(after[row], their_after, atol=1e-12, rtol=0)
            theirs = torch.autograd.grad(output.sum(), network.rnn.weight_hh_l0)[0]
            index = [id(p) for p in agent.parameters()].index(id(stack.memory.weight))
            torch.testing.assert_close(gradient[index][i], theirs.T, atol=1e-10, rtol=0)


@given(st.integers(1, 12), st.floats(0, 0.5), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_gae_is_its_definition_with_a_discount_per_agent(T, p_done, seed):
    rng = np.random.default_rng(seed)
    gamma, gae_lambda = rng.random(3), rng.random(3)
    reward, value, next_value = rng.normal(size=(T, 2, 3)), rng.normal(size=(T, 2, 3)), rng.normal(size=(2, 3))
    done = rng.random((T, 2, 3)) < p_done
    ours = ippo_lstm.gae(reward, value, next_value, done, gamma, gae_lambda)
    values = np.concatenate([value, next_value[None]])
    for n, a in np.ndindex(2, 3):
        for t in range(T):
            expected, weight = 0.0, 1.0
            for k in range(t, T):
                alive = 1.0 - done[k, n, a]
                expected += weight * (reward[k, n, a] + gamma[a] * alive * values[k + 1, n, a] - values[k, n, a])
                weight *= gamma[a] * gae_lambda[a] * alive
            assert ours[t, n, a] == pytest.approx(expected, abs=1e-9)


# proves lstm-3, lstm-5
@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("env_id", [SPREAD, LISTENER, "toy/toy"])
def test_first_ratio_is_one_across_episode_ends_and_deaths(env_id, shared, cell, toy):
    options = {"share_parameters": shared, "normalize_obs": True, "normalize_value": True, "cell": cell}
    args = Args(env_id=env_id, **SMALL, **options)
    agent, (_, first), (_, second) = collected(args, rollouts=2)
    for batch in (first, second):
        assert batch.done[:, :-1].any() and batch.log_prob[batch.alive > 0].std() > 0.01
        half = torch.randperm(batch.action.shape[2])[: batch.action.shape[2] // 2]
        for part in (batch, ippo_lstm.Batch(*(x[:, :, half] for x in batch))):
            r = ratio(agent, part)
            torch.testing.assert_close(r, torch.ones_like(r), atol=1e-5, rtol=0)
            _, stats = ippo_lstm.ippo_loss(agent, part, settings_of(args), True)
            assert (stats[3].abs() < 1e-6).all() and (stats[4] == 0).all()  # approx_kl, clipfrac
    # The state at the start of a rollout and the resets both matter.
    assert (ratio(agent, second, state=torch.zeros_like(second.state)) - 1).abs().max() > 1e-4
    assert (ratio(agent, second, done=torch.zeros_like(second.done)) - 1).abs().max() > 1e-4


# proves lstm-3
@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("shared", [False, True])
def test_the_policy_that_acts_is_the_policy_that_learns(shared, cell, toy):
    """Greedy actions of make_policy, step by step in NumPy, against the whole sequences in torch."""
    args = Args(env_id=toy, **SMALL, share_parameters=shared, cell=cell, normalize_obs=True)
    envs = ippo_lstm.make_envs(args, 4)
    agent = make_agent(args, envs)
    agent.obs_stats.mean.normal_()
    policy, done, ended = ippo_lstm.make_policy(agent), np.ones(4, bool), []
    obs, info = envs.reset()
    seen, masks, actions = [], [], []
    for _ in range(30):
        seen.append(obs.copy())
        masks.append(info["action_mask"])
        actions.append(policy(obs, info, done))
        obs, _, termination, truncation, info = envs.step(actions[-1])
        done = termination | truncation
        ended.append(np.tile(done[:, None], 3))
    features = agent.normalize(torch.from_numpy(agent.features(np.concatenate(seen)))).unflatten(1, (30, -1))
    ends = agent.by_network(torch.from_numpy(np.concatenate(ended))).unflatten(1, (30, -1)).float()
    with torch.no_grad():
        logits, *_ = agent(features, agent.first_state(4), ends)
    logits = agent.by_agent(logits.flatten(1, 2)).numpy().reshape(30, 4, 3, 4)
    expected = np.where(masks, logits, -np.inf)
    np.testing.assert_array_equal(np.stack(actions), expected.argmax(-1))


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_samples_follow_the_logits_of_the_whole_sequence(cell):
    args = Args(env_id=LISTENER, **SMALL | {"num_envs": 2000, "num_steps": 4}, cell=cell)
    agent, (_, batch) = collected(args, scale=1000)
    with torch.no_grad():
        logits, *_ = agent(batch.features, batch.state[:, 0], batch.done)
    probs = logits.masked_fill(~batch.action_mask, -1e8).softmax(-1)  # (M, T, B, K)
    taken = nn.functional.one_hot(batch.action, probs.shape[-1]).float()
    assert probs.std(2).max() > 0.1
    torch.testing.assert_close(taken.mean(2), probs.mean(2), atol=0.04, rtol=0)
    likely = probs > 0.5
    assert abs(taken[likely].mean() - probs[likely].mean()) < 0.03


# proves lstm-3
@pytest.mark.parametrize("shared", [False, True])
def test_collect_forgets_where_training_does(shared, toy):
    """With logits this far apart there is no chance left: the actions taken are the most probable ones in training."""
    agent, (_, batch) = collected(Args(env_id=toy, **SMALL, share_parameters=shared), scale=1e6)
    with torch.no_grad():
        logits, *_ = agent(batch.features, batch.state[:, 0], batch.done)
    likely = logits.masked_fill(~batch.action_mask, -1e8).argmax(-1)
    assert (likely == batch.action)[batch.alive > 0].float().mean() > 0.99


# proves lstm-1
def test_recurrent_weights_are_orthogonal_and_biases_zero():
    for cell, gates in (("lstm", 4), ("gru", 3)):
        args = Args(cell=cell)
        agent = ippo_lstm.Agent(ippo_lstm.make_envs(args, 1), args)
        for layer in (agent.actor.input, agent.actor.memory, agent.critic.input, agent.critic.memory):
            assert layer.weight.shape == (3, 64, gates * 64) and not layer.bias.any()
            for weight in layer.weight:
                torch.testing.assert_close(weight @ weight.T, torch.eye(64), atol=1e-5, rtol=0)


# proves lstm-2
@pytest.mark.parametrize("shared", [False, True])
def test_the_first_state_is_zero(shared):
    args = Args(env_id=SPREAD, **SMALL, share_parameters=shared)
    _, (_, batch) = collected(args)
    assert batch.state.shape == ((2, 1, 12, 32) if shared else (6, 1, 4, 32)) and not batch.state.any()


# proves lstm-3
def test_nothing_is_remembered_of_an_earlier_episode():
    args = Args(hidden_dim=8)
    agent = make_agent(args, ippo_lstm.make_envs(args, 1))
    features, state, done = torch.randn(3, 6, 2, 18), torch.randn(6, 2, 16), torch.zeros(3, 6, 2)
    done[1, 2, 0] = 1  # agent 1 in sequence 0 after step 2
    other = features.clone()
    other[:, 1] += 1
    with torch.no_grad():
        before, after = agent(features, state, done), agent(other, state, done)
    for x, y in zip(before[:2], after[:2]):
        same = (x == y).reshape(3, 6, 2, -1).all(-1)
        assert same[:, 0].all() and not same[:, 1].any()
        assert same[1, 3:, 0].all() and not same[[0, 2], 3:].any() and not same[1, 3:, 1].any()


# proves lstm-4
@pytest.mark.parametrize("shared", [False, True])
def test_minibatches_are_whole_sequences(shared, monkeypatch):
    args = Args(env_id=SPREAD, **SMALL, share_parameters=shared, update_epochs=(2,))
    agent, (_, batch) = collected(args)
    seen, loss = [], ippo_lstm.ippo_loss
    monkeypatch.setattr(ippo_lstm, "ippo_loss", lambda a, b, *rest: (seen.append(b), loss(a, b, *rest))[1])
    ippo_lstm.update(agent, optimizer_for(agent, 0.0), batch, settings_of(args), args)
    assert len(seen) == 4
    orders, num_sequences = [], 12 if shared else 4
    for minibatch in seen:
        for n in range(num_sequences // 2):
            which = [i for i in range(num_sequences) if torch.equal(minibatch.return_[:, :, n], batch.return_[:, :, i])]
            assert len(which) == 1  # a sequence of the rollout, from its first step to its last
            orders += which
            for x, whole in zip(minibatch, batch):
                assert torch.equal(x[:, :, n], whole[:, :, which[0]])
    middle = len(orders) // 2
    assert sorted(orders[:middle]) == sorted(orders[middle:]) == [*range(num_sequences)]
    assert orders[:middle] != orders[middle:]


# proves lstm-5
def test_the_second_rollout_goes_on_from_the_state_of_the_first(toy):
    for shared in (False, True):
        agent, (_, first), (_, second) = collected(Args(env_id=toy, **SMALL, share_parameters=shared), rollouts=2)
        with torch.no_grad():
            *_, state = agent(first.features, first.state[:, 0], first.done)
        torch.testing.assert_close(second.state[:, 0], state)
        ended = first.done[:, -1].repeat(2, 1) > 0
        assert not state[ended].any() and (state[~ended] != 0).any(-1).all()


@pytest.mark.parametrize("shared, team", [(False, False), (True, False), (False, True), (True, True)])
def test_values_after_a_time_limit_and_after_the_rollout_remember_the_episode(shared, team, toy, monkeypatch):
    """With lambda 0 a return is r + gamma V(next obs): V from torch's LSTM, run over one episode at a time.

    Death ends an agent's episode, unless the reward is the team's: then all earn the mean of the living's.
    """
    monkeypatch.setattr(Toy, "team_reward", team)
    gamma = (0.9, 0.8, 0.7)
    changes = {"share_parameters": shared, "gamma": gamma, "gae_lambda": (0.0,), "reward_scale": (1.0, 10.0, 1.0)}
    args = Args(env_id=toy, **SMALL, **changes, normalize_value=False)
    envs = ippo_lstm.make_envs(args, 4)
    agent, rollout = make_agent(args, envs), make_rollout(args, envs)
    state = agent.first_state(4)
    next_obs, _ = ippo_lstm.collect(agent, envs, envs.reset(), state, rollout, args, Quiet())
    batch, _ = ippo_lstm.estimate(agent, rollout, state, next_obs, args)
    return_ = agent.by_agent(batch.return_.flatten(1)).reshape(40, 4, 3).numpy()
    critics = [Alone("lstm", agent.critic, 0 if shared else a) for a in range(3)]
    for n in range(4):
        length = 5 + n
        for first in range(0, 40, length):
            last, following = min(first + length, 40), None
            if first + length > 40:  # the rollout ends before the episode
                following = next_obs[n]
            elif n % 2 == 1:  # truncated
                assert rollout.cut[last - 1, n].any()
                following = rollout.final_obs[last - 1, n]
            obs = np.stack([*rollout.obs[first:last, n], *([] if following is None else [following])])
            features = agent.by_agent(torch.from_numpy(agent.features(obs)))  # (steps, A, D)
            for a in range(3):
                lifetime, reward = (41, [2, 20, 2][a]) if team else ([40, 3, length][a], [1, 20, 3][a])
                dies = last - first >= lifetime
                x = features[:lifetime, a] if dies else features[:, a]
                with torch.no_grad():
                    value, *_ = critics[a](x[:, None], torch.zeros(len(x), 1), torch.zeros(1, 32))
                value = value[:, 0, 0].numpy()
                value = np.append(value[1:], 0) if dies or following is None else value[1:]
                ours = return_[first : first + len(value), n, a]
                np.testing.assert_allclose(ours, reward + gamma[a] * value, rtol=1e-4, atol=1e-4)


PER_AGENT = {
    "learning_rate": (1e-3, 5e-4, 2e-3),
    "clip_coef": (0.1, 0.2, 0.3),
    "value_clip_coef": (0.0, 0.05, 0.2),
    "ent_coef": (0.01, 0.0, 0.1),
    "vf_coef": (1.0, 0.5, 2.0),
    "max_grad_norm": (0.5, 0.05, 10.0),
    "update_epochs": (2, 4, 3),
    "target_kl": (0.0, 1e-6, 0.0),
}


@pytest.mark.parametrize("env_id, cell", [(SPREAD, "lstm"), ("toy/toy", "lstm"), ("toy/toy", "gru")])
def test_stacked_agents_learn_like_agents_trained_alone(env_id, cell, toy):
    """An update of three stacked agents against three ordinary recurrent PPO learners with torch's cell and Adam."""
    args = Args(env_id=env_id, cell=cell, **SMALL, **PER_AGENT, num_minibatches=2)
    agent, (_, batch) = collected(args, scale=10)
    learners = [(Alone(cell, agent.actor, i), Alone(cell, agent.critic, i)) for i in range(3)]
    optimizer = optimizer_for(agent, args.learning_rate, eps=1e-5)
    torch.manual_seed(5)
    ippo_lstm.update(agent, optimizer, batch, settings_of(args), args)

    stopped_early = False
    for i, (actor, critic) in enumerate(learners):
        parameters = [*actor.parameters(), *critic.parameters()]
        adam = torch.optim.Adam(parameters, lr=args.learning_rate[i], eps=1e-5)
        torch.manual_seed(5)
        stop = False
        for _ in range(args.update_epochs[i]):
            for index in torch.randperm(4).split(2):
                mb = ippo_lstm.Batch(*(x[i][:, index] for x in batch))
                states = batch.state[i, 0, index], batch.state[3 + i, 0, index]
                keep = mb.alive.bool()
                logits = actor(mb.features, mb.done, states[0])[0].masked_fill(~mb.action_mask, -torch.inf)
                policy = torch.distributions.Categorical(logits=logits[keep])
                log_ratio = policy.log_prob(mb.action[keep]) - mb.log_prob[keep]
                kl = (log_ratio.exp() - 1 - log_ratio).mean()
                if args.target_kl[i] and kl > args.target_kl[i]:
                    stop = stopped_early = True
                if stop:
                    break
                advantage = mb.advantage[keep]
                advantage = (advantage - advantage.mean()) / (advantage.std(unbiased=False) + 1e-8)
                eps, value_eps = args.clip_coef[i], args.value_clip_coef[i]
                surrogate = torch.min(advantage * log_ratio.exp(), advantage * log_ratio.exp().clip(1 - eps, 1 + eps))
                value = critic(mb.features, mb.done, states[1])[0][keep][:, 0]
                if value_eps:
                    value = mb.value[keep] + (value - mb.value[keep]).clip(-value_eps, value_eps)
                loss = -surrogate.mean() + args.vf_coef[i] * (value - mb.return_[keep]).square().mean()
                probs = policy.probs
                entropy = -torch.where(probs > 0, probs * probs.clamp(min=1e-30).log(), 0.0).sum(-1).mean()
                loss = loss - args.ent_coef[i] * entropy
                adam.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, args.max_grad_norm[i])
                adam.step()
        for stacked, network in ((agent.actor, actor), (agent.critic, critic)):
            mine, theirs = Alone(cell, stacked, i).state_dict(), network.state_dict()
            for name in mine:
                torch.testing.assert_close(mine[name], theirs[name], atol=5e-6, rtol=1e-4)
    assert stopped_early, "the KL threshold was to be met in this test"


def test_the_loss_of_an_agent_has_no_gradient_on_the_parameters_of_another():
    args = Args(**SMALL)
    agent, (_, batch) = collected(args)
    loss, _ = ippo_lstm.ippo_loss(agent, batch, settings_of(args), True)
    for i in range(3):
        for gradient in torch.autograd.grad(loss[i], list(agent.parameters()), retain_graph=True):
            assert (gradient[i] != 0).any()
            assert (gradient[[j for j in range(3) if j != i]] == 0).all()


def test_dead_agents_add_nothing(toy):
    args = Args(env_id=toy, **SMALL, value_clip_coef=(0.2,), ent_coef=(0.2,))
    agent, (_, batch) = collected(args)
    assert 0 < (batch.alive[1] == 0).sum() < 160 and (batch.alive[[0, 2]] == 1).all()
    loss, stats = ippo_lstm.ippo_loss(agent, batch, settings_of(args), True)
    gradients = torch.autograd.grad(loss.sum(), list(agent.parameters()))
    noise = (1 - batch.alive) * 1e3
    other = batch._replace(
        features=batch.features + noise[..., None],
        advantage=batch.advantage + noise,
        return_=batch.return_ - noise,
        value=batch.value + noise,
        log_prob=batch.log_prob - noise.clamp(max=1),
    )
    loss2, stats2 = ippo_lstm.ippo_loss(agent, other, settings_of(args), True)
    torch.testing.assert_close(loss, loss2)
    torch.testing.assert_close(stats, stats2)
    for a, b in zip(gradients, torch.autograd.grad(loss2.sum(), list(agent.parameters()))):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shared", [False, True])
def test_a_critic_learns_what_the_dead_of_a_team_earn(shared, toy, monkeypatch):
    monkeypatch.setattr(Toy, "team_reward", True)
    args = Args(env_id=toy, **SMALL, share_parameters=shared)
    agent, (_, batch) = collected(args)
    dead = 1 - batch.alive
    assert dead.any()
    loss, stats = ippo_lstm.ippo_loss(agent, batch, settings_of(args), True)
    other = batch._replace(advantage=batch.advantage + 1e3 * dead, log_prob=batch.log_prob - dead)
    torch.testing.assert_close(ippo_lstm.ippo_loss(agent, other, settings_of(args), True)[0], loss)
    error = agent(batch.features, batch.state[:, 0], batch.done)[1] - batch.return_
    torch.testing.assert_close(stats[1], error.square().mean((1, 2)))
    change = ((error - dead).square() - error.square()).mean((1, 2))
    other = batch._replace(return_=batch.return_ + dead)
    loss2, _ = ippo_lstm.ippo_loss(agent, other, settings_of(args), True)
    torch.testing.assert_close(loss2 - loss, change, atol=1e-5, rtol=1e-4)
    agent, *_ = collected(dataclasses.replace(args, normalize_value=True))
    assert (agent.value_stats.count == batch.alive.numel() / len(batch.alive)).all()


def test_statistics_are_of_living_samples_saved_and_frozen_at_evaluation(toy, tmp_path):
    args = Args(env_id=toy, **SMALL, normalize_obs=True, normalize_value=True, runs_dir=str(tmp_path))
    saved = load_checkpoint(ippo_lstm.main(args))["modules"]["agent"]
    counts = saved["obs_stats.count"].flatten()
    assert (
        counts[0] == counts[2] == 320
        and 100 < counts[1] < 250
        and torch.equal(counts, saved["value_stats.count"].flatten())
    )
    envs = ippo_lstm.make_envs(args, 4)
    agent = ippo_lstm.Agent(envs, args)
    agent.load_state_dict(saved)
    evaluate(envs, ippo_lstm.make_policy(agent), 8, seed=1)
    assert all(torch.equal(saved[key], value) for key, value in agent.state_dict().items())


def test_a_policy_starts_afresh_with_another_number_of_environments():
    args = Args(hidden_dim=8)
    agent = make_agent(args, ippo_lstm.make_envs(args, 1))
    obs = np.random.default_rng(0).normal(size=(3, 3, 18)).astype(np.float32)
    info = {"action_mask": np.ones((3, 3, 5), bool)}
    policy = ippo_lstm.make_policy(agent)
    first = policy(obs, info, np.ones(3, bool))
    policy(obs[::-1], info, np.zeros(3, bool))
    alone = policy(obs[:1], {"action_mask": info["action_mask"][:1]}, np.ones(1, bool))
    np.testing.assert_array_equal(alone, first[:1])


def test_warm_up_acts_at_random_and_remembers_but_does_not_learn(toy, tmp_path):
    args = Args(env_id=toy, **SMALL, random_timesteps=160)
    agent, (rollout, first), (_, second) = collected(args, scale=1e4, rollouts=2)
    for a, actions in enumerate([2, 4]):
        counts = np.bincount(rollout.action[:, :, a][rollout.agent_mask[:, :, a]], minlength=actions)
        assert (counts > 0.6 * counts.sum() / actions).all()
    assert second.state.any()
    torch.testing.assert_close(ratio(agent, first)[first.alive > 0], torch.ones(int(first.alive.sum())))
    args = Args(env_id=toy, **SMALL, random_timesteps=164, runs_dir=str(tmp_path))  # the second rollout begins so
    assert not load_checkpoint(ippo_lstm.main(args))["modules"]["optimizer"]["state"]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("env_id", [SPREAD, LISTENER, "matrix/penalty", "toy/toy"])
def test_two_updates(env_id, shared, toy, tmp_path):
    args = Args(env_id=env_id, **SMALL, share_parameters=shared, runs_dir=str(tmp_path))
    folder = ippo_lstm.main(args)
    saved = load_checkpoint(folder)
    assert saved["step"] == 320
    assert all(torch.isfinite(x).all() for x in saved["modules"]["agent"].values())
    assert sorted(path.name.split(".")[0] for path in folder.iterdir()) == ["args", "checkpoint", "done", "events"]


def test_same_seed_same_losses_resume_and_enjoy(tmp_path):
    settings_ = [{**SMALL, "seed": seed, "runs_dir": str(tmp_path)} for seed in (1, 1, 2)]
    folders = [ippo_lstm.main(Args(**s)) for s in settings_]
    first, second, other = map(curves, folders)
    losses = [key for key in first if key.startswith("train/")]
    assert len(losses) == 7
    assert all(first[key] == second[key] for key in losses)
    assert first["train/value_loss"] != other["train/value_loss"]

    ippo_lstm.main(
        Args(**SMALL | {"total_timesteps": 480, "eval_episodes": 2}, runs_dir=str(tmp_path), resume=folders[0])
    )
    assert load_checkpoint(folders[0])["step"] == 480
    assert np.isfinite([x for values in curves(folders[0]).values() for x in values]).all()
    metrics = enjoy.main(enjoy.Args(folders[0], episodes=2))
    assert metrics["eval/ep_length"] == 25 and -300 < metrics["eval/ep_reward"] < -10


@pytest.mark.parametrize(
    "flags, text",
    [
        (
            "--num-envs 6 --num-minibatches 4",
            "6 sequences of a rollout are not divisible by --num-minibatches 4: a mini",
        ),
        ("--num-envs 1 --share-parameters", "3 sequences of a rollout are not divisible by --num-minibatches 2"),
        (f"--env-id {SPREAD}?continuous_actions=True", "ippo_lstm.py needs discrete actions"),
        (f"--env-id {SPREAD}?continuous_actions=True", "are continuous; try ippo_continuous_action.py"),
        ("--gamma 0.9 0.9", "--gamma takes one value or one for each of 3 agents, not 2"),
        ("--hidden-dim 0", "--hidden-dim must be greater than 0"),
    ],
)
def test_refused(flags, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ippo_lstm.py", "--runs-dir", str(tmp_path / "runs"), *flags.split()])
    with pytest.raises(SystemExit) as stopped:
        launch(ippo_lstm.main, Args)
    assert stopped.value.code == 2 and not (tmp_path / "runs").exists()
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and text in line


class Recall(MultiAgentVectorEnv):
    """Two agents see a sign, each its own, in the first of 4 steps, and are to name it in the last."""

    def __init__(self, num_envs):
        self._set_spaces(num_envs, ("a", "b"), [3, 3], [2, 2], 6)
        self.statistics, self.random = EpisodeStatistics(num_envs, 2), np.random.default_rng(0)

    def _look(self):
        obs = np.zeros((self.num_envs, 2, 3), np.float32)
        obs[..., 2] = self.clock / 3
        if self.clock == 0:
            self.sign = self.random.integers(2, size=(self.num_envs, 2))
            obs[..., :2] = np.eye(2)[self.sign]
        mask = np.ones((self.num_envs, 2, 2), bool)
        return obs, {"state": obs.reshape(-1, 6), "action_mask": mask, "agent_mask": mask[..., 0]}

    def reset(self, *, seed=None, options=None):
        self.clock = 0
        return self._look()

    def step(self, action):
        self.clock += 1
        reward = np.float32(action == self.sign) * (self.clock == 4)
        self.statistics.add(reward)
        ended, end = np.full(self.num_envs, self.clock == 4), {}
        if ended.all():
            self.clock = 0
            self.statistics.end(ended, end)
        obs, info = self._look()
        if end:
            end |= {"final_obs": obs, "final_agent_mask": info["agent_mask"]}
        return obs, reward, ended, ~ended & False, info | end


@pytest.mark.learning
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_learns_what_needs_memory_in_seconds(cell, monkeypatch, tmp_path):
    monkeypatch.setattr(ippo_lstm, "make", lambda env_id, num_envs, **o: Recall(num_envs))
    sizes = {"total_timesteps": 16_384, "num_envs": 64, "num_steps": 4, "learning_rate": (3e-3,), "eval_episodes": 0}
    args = Args(env_id="recall", cell=cell, hidden_dim=16, **sizes, runs_dir=str(tmp_path))
    saved = load_checkpoint(ippo_lstm.main(args))["modules"]["agent"]
    envs = Recall(32)
    agent = ippo_lstm.Agent(envs, args)
    agent.load_state_dict(saved)
    assert evaluate(envs, ippo_lstm.make_policy(agent), 320, seed=1)["eval/ep_reward"] > 1.9  # a guess earns 1
