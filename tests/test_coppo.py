"""coppo.py: the objective against the paper's equations, its limits PPO and MAPPO, turns, counterfactual advantages."""

import dataclasses
import sys

import numpy as np
import pytest
import torch

import cleanmarl.envs
from cleanmarl import coppo, enjoy, mappo
from cleanmarl.envs import EpisodeStatistics, MultiAgentVectorEnv
from cleanmarl.run import evaluate, load_checkpoint

SMALL = {"total_timesteps": 400, "num_envs": 4, "num_steps": 50, "num_minibatches": 1, "eval_episodes": 0}
INF = float("inf")


class Toy(MultiAgentVectorEnv):
    """Three agents with different spaces, episodes of 6 steps (terminated in even environments, truncated in odd ones).

    Agent 1 dies after its third step, agent 2 with its last; the parity of the clock forbids agent 2's action 0 or 1.
    Observations are the clock plus the agent's index, the state is the clock and its square. The living earn the clock.
    """

    def __init__(self, num_envs):
        self._set_spaces(num_envs, ("a", "b", "c"), [2, 3, 1], [2, 4, 3], 2)
        self.statistics = EpisodeStatistics(num_envs, 3)

    def _look(self):
        obs = np.zeros((self.num_envs, 3, 3), np.float32)
        for i, size in enumerate(self.obs_sizes):
            obs[:, i, :size] = self.clock + i
        mask = np.tile(self.real_actions, (self.num_envs, 1, 1))
        mask[:, 2, self.clock % 2] = False
        alive = np.ones((self.num_envs, 3), bool)
        alive[:, 1], alive[:, 2] = self.clock < 3, self.clock < 6
        obs[~alive] = 0
        state = np.tile(np.array([self.clock, self.clock**2], np.float32), (self.num_envs, 1))
        return obs, {"state": state, "action_mask": mask, "agent_mask": alive}

    def reset(self, *, seed=None, options=None):
        self.clock = 0
        return self._look()

    def step(self, action):
        _, before = self._look()
        legal = np.take_along_axis(before["action_mask"], action[..., None], -1)[..., 0]
        assert legal[before["agent_mask"]].all(), "an illegal action"
        self.clock += 1
        reward = np.float32(self.clock * before["agent_mask"])
        ended = np.full(self.num_envs, self.clock == 6)
        odd = np.arange(self.num_envs) % 2 == 1
        self.statistics.add(reward)
        final, final_info = self._look()
        if ended.any():
            self.clock = 0
        obs, info = self._look()
        if ended.any():
            info["final_obs"], info["_final_obs"], info["final_state"] = final, ended, final_info["state"]
            info["final_agent_mask"] = final_info["agent_mask"]
            info["final_action_mask"] = final_info["action_mask"]
            self.statistics.end(ended, info)
        return obs, reward, ended & ~odd, ended & odd, info


@pytest.fixture
def toy(monkeypatch):
    """`toy` as an environment family."""
    monkeypatch.setattr(
        coppo,
        "make",
        lambda env_id, num_envs, **o: Toy(num_envs) if env_id == "toy" else cleanmarl.envs.make(env_id, num_envs, **o),
    )
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
    return coppo.Rollout(*seen, *masks, *rest)


def collected(args, scale=100.0, epsilon=0.0):
    """Agent, rollout, what followed it, and batch of one rollout with policies far from uniform."""
    torch.manual_seed(0)
    envs = coppo.make_envs(args, args.num_envs)
    agent = coppo.Agent(envs, args)
    agent.epsilon = epsilon
    with torch.no_grad():
        agent.actor[-1].weight *= scale
    rollout = make_rollout(args, envs)
    now = coppo.collect(agent, envs, envs.reset(seed=1), rollout, args, Quiet())
    return agent, rollout, now, coppo.estimate(agent, rollout, *now, args)


def moved(agent, batch, seed=0, spread=0.15, advantage_scale=3.0):
    """The batch as if the policies had moved by random ratios, with advantages of both signs; the ratios (R, A)."""
    rng = np.random.default_rng(seed)
    log_probs = agent.logits(batch.features, batch.action_mask).log_softmax(-1).detach()
    log_prob = log_probs.gather(-1, batch.action[..., None]).squeeze(-1)
    log_ratio = torch.from_numpy(rng.normal(0, spread, log_prob.shape))
    advantage = torch.from_numpy(rng.normal(0, advantage_scale, log_prob.shape))
    return batch._replace(log_prob=log_prob - log_ratio, advantage=advantage), log_ratio.exp().numpy()


def clip(x, eps):
    return min(max(x, 1 - eps), 1 + eps)


def equations(ratio, advantage, alive, eps1, eps2, separately=False, authors=False):
    """Each agent's objective in each row (R, A), and its derivatives by the log-ratios (R, A, A), number by number.

    Equation 10; with eps2 = inf it is equation 8, of which equation 7 is the case of a common advantage. `authors`:
    min(product of all A, clip(g r) A), differentiated by all ratios.
    """
    value, slope = np.zeros(ratio.shape), np.zeros((*ratio.shape, ratio.shape[1]))
    for row, i in np.argwhere(alive):
        A, r = advantage[row, i], ratio[row]
        others = [j for j in range(len(r)) if j != i and alive[row, j]]
        product = g = 1.0
        for j in others:
            product *= r[j]
            g *= clip(r[j], eps2)
        inside = {j: separately and clip(r[j], eps2) == r[j] for j in others}
        if not separately:
            g = clip(product, eps2)
            inside = dict.fromkeys(others, g == product)
        inner = g * r[i]
        outer = clip(inner, eps1)
        first = product * r[i] if authors else inner
        value[row, i] = min(first * A, outer * A)
        if first * A < outer * A or (not authors and inner == outer):
            slope[row, i, i] = first * A
            for j in others:
                slope[row, i, j] = first * A if authors else 0
        elif inner == outer:
            slope[row, i, i] = inner * A
            for j in others:
                slope[row, i, j] = inner * A * inside[j]
    return value, slope


def check_against_equations(agent, args, batch, ratio):
    """Loss and gradient of the script against those of `equations`, all in float64."""
    alive = batch.alive.bool().numpy()
    value, slope = equations(
        ratio,
        batch.advantage.numpy(),
        alive,
        args.clip_coef,
        args.inner_clip_coef,
        args.clip_separately,
        args.objective == "authors",
    )
    samples = np.array([[alive.sum()]]) if agent.shared else alive.sum(0, keepdims=True)
    loss, _ = coppo.actor_loss(agent, batch, args)
    assert loss.item() == pytest.approx(-(value / samples).sum(), rel=1e-9)
    ours = torch.autograd.grad(loss, list(agent.actor.parameters()))
    weight = torch.from_numpy(-(slope / samples[..., None]).sum(1))  # of each agent's log-probability
    log_probs = agent.logits(batch.features, batch.action_mask).log_softmax(-1)
    log_prob = log_probs.gather(-1, batch.action[..., None]).squeeze(-1)
    theirs = torch.autograd.grad((weight * log_prob).sum(), list(agent.actor.parameters()))
    for mine, expected in zip(ours, theirs):
        torch.testing.assert_close(mine, expected, rtol=1e-8, atol=1e-10)
    return value


def in_float64(agent, batch):
    return agent.double(), coppo.Batch(*(x.double() if x.is_floating_point() else x for x in batch))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("inner_clip_coef", [0.0, 0.1, INF])
@pytest.mark.parametrize("num_agents", range(1, 7))
def test_loss_and_gradient_are_equations_8_and_10(num_agents, inner_clip_coef, shared):
    args = coppo.Args(
        env_id=f"mpe/simple_spread_v3?N={num_agents}",
        num_envs=4,
        num_steps=25,
        share_parameters=shared,
        inner_clip_coef=inner_clip_coef,
        ent_coef=0.0,
    )
    agent, _, _, batch = collected(args)
    agent, batch = in_float64(agent, batch)
    batch, ratio = moved(agent, batch, seed=num_agents)
    value = check_against_equations(agent, args, batch, ratio)
    clipped = np.clip(ratio, 0.8, 1.2) * batch.advantage.numpy()
    ppo = np.minimum(ratio * batch.advantage.numpy(), clipped)
    if num_agents == 1 or inner_clip_coef == 0:
        np.testing.assert_allclose(value, ppo, rtol=1e-12)  # PPO for one agent, MAPPO for g = 1
    else:
        assert np.abs(value - ppo).max() > 0.01


@pytest.mark.parametrize("separately", [True, False])
@pytest.mark.parametrize("objective", ["equation", "authors"])
@pytest.mark.parametrize("shared", [True, False])
def test_both_objectives_with_dead_agents(shared, objective, separately, toy):
    args = coppo.Args(
        env_id=toy, **SMALL, share_parameters=shared, objective=objective, clip_separately=separately, ent_coef=0.0
    )
    agent, _, _, batch = collected(args)
    agent, batch = in_float64(agent, batch)
    batch, ratio = moved(agent, batch)
    assert 0 < (batch.alive[:, 1] == 0).sum() < 200
    check_against_equations(agent, args, batch, ratio)
    # the ratio of a dead agent is none of the others' business
    loss, stats = coppo.actor_loss(agent, batch, args)
    loud = batch._replace(log_prob=batch.log_prob - (1 - batch.alive) * 1e3)
    loss2, stats2 = coppo.actor_loss(agent, loud, args)
    torch.testing.assert_close(loss, loss2)
    torch.testing.assert_close(stats, stats2)


@pytest.mark.parametrize("shared", [True, False])
def test_agents_whose_peers_stand_still_learn_by_mappo(shared):
    """All r_j = 1 for j != i: the gradient of agent i's samples is that of mappo.py, whatever the inner clip."""
    args = coppo.Args(**SMALL, share_parameters=shared)
    agent, _, _, batch = collected(args)
    still, _ = moved(agent, batch, spread=0.0)
    for i in range(3):
        log_prob = still.log_prob.clone()
        log_prob[:, i] -= 0.3 * torch.randn(len(log_prob))
        advantage = torch.zeros_like(still.advantage)
        advantage[:, i] = still.advantage[:, i]  # the others learn nothing
        ours = still._replace(log_prob=log_prob.float(), advantage=advantage.float())
        theirs = mappo.Batch(*(getattr(ours, name) for name in mappo.Batch._fields))
        loss, _ = coppo.actor_loss(agent, ours, args)
        mappo_args = mappo.Args(**SMALL, share_parameters=shared)
        critics_of_mappo = mappo.Agent(mappo.make_envs(mappo_args, 1), mappo_args)
        critics_of_mappo.load_state_dict(agent.state_dict())
        reference, *_ = mappo.mappo_loss(critics_of_mappo, theirs, mappo_args)
        torch.testing.assert_close(loss, reference)
        gradients = torch.autograd.grad(reference, list(critics_of_mappo.actor.parameters()))
        for a, b in zip(torch.autograd.grad(loss, list(agent.actor.parameters())), gradients):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_without_inner_clip_range_a_run_is_a_run_of_mappo(shared, tmp_path):
    settings = SMALL | {"share_parameters": shared, "num_minibatches": 2, "runs_dir": str(tmp_path)}
    ours = load_checkpoint(coppo.main(coppo.Args(**settings, inner_clip_coef=0.0)))["modules"]["agent"]
    theirs = load_checkpoint(mappo.main(mappo.Args(**settings)))["modules"]["agent"]
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, atol=1e-5, rtol=1e-4)
    other = load_checkpoint(coppo.main(coppo.Args(**settings)))["modules"]["agent"]
    assert any((other[key] - value).abs().max() > 1e-4 for key, value in theirs.items())


def optimizer_for(agent, lr):
    parameters = [list(coppo.stack_parameters(agent.actor).split(1)), [coppo.stack_parameters(agent.critic)]]
    return torch.optim.SGD([{"params": p, "lr": lr} for p in parameters])


@pytest.mark.parametrize("changes", [{}, {"mix": "network", "inner_clip_coef": 0.0}])
def test_independent_agents_step_in_turn_with_the_newest_ratios(changes):
    """Algorithm 1: within an epoch, agent i's step sees the ratios of agents before it after their steps.

    Of which the mixing network, which is not linear, makes something even where their product is not used.
    """
    args = coppo.Args(env_id="matrix/penalty", num_envs=64, num_steps=1, num_minibatches=1, update_epochs=2, **changes)
    args = dataclasses.replace(args, share_parameters=False)
    agent, _, _, batch = collected(args)
    twin, rate = coppo.Agent(coppo.make_envs(args, 1), args), 3.0
    twin.load_state_dict(agent.state_dict())
    coppo.update(agent, optimizer_for(agent, rate), batch, args)

    def learn(in_turn):
        parameters = list(twin.actor.parameters())
        for _ in range(args.update_epochs):
            gradients = [torch.autograd.grad(coppo.actor_loss(twin, batch, args)[0], parameters)] * 4
            for i in range(4):
                if in_turn:
                    gradients[i] = torch.autograd.grad(coppo.actor_loss(twin, batch, args)[0], parameters)
                for p, g in zip(parameters, gradients[i]):
                    p.data[i] -= rate * g[i]
        return [p.detach().clone() for p in parameters]

    start = twin.state_dict() | {}
    start = {key: value.clone() for key, value in start.items()}
    in_turn = learn(True)
    for mine, theirs in zip(agent.actor.parameters(), in_turn):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    twin.load_state_dict(start)
    assert max((a - b).abs().max() for a, b in zip(learn(False), in_turn)) > 1e-3


@pytest.mark.parametrize("separately", [False, True])
def test_diagnostics_of_the_clips(separately):
    args = coppo.Args(**SMALL, clip_separately=separately)
    agent, _, _, batch = collected(args)
    batch, ratio = moved(agent, batch)
    _, (*_, outer_clipfrac, inner_clipfrac, product_var) = coppo.actor_loss(agent, batch, args)
    others = np.stack([np.delete(ratio, i, axis=1) for i in range(3)], axis=1)  # (R, A, A - 1)
    product = others.prod(2)
    assert product_var.item() == pytest.approx(product.var(), rel=1e-4)
    is_clipped = (np.abs(others - 1) > 0.1).any(2) if separately else np.abs(product - 1) > 0.1
    assert inner_clipfrac.item() == pytest.approx(is_clipped.mean(), abs=1e-6)
    inner = (others.clip(0.9, 1.1).prod(2) if separately else product.clip(0.9, 1.1)) * ratio
    assert outer_clipfrac.item() == pytest.approx((np.abs(inner - 1) > 0.2).mean(), abs=2e-3)
    assert 0 < inner_clipfrac < 1 and 0 < outer_clipfrac < 1


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("advantage", ["gae", "counterfactual"])
@pytest.mark.parametrize("epsilon", [0.0, 0.4])
@pytest.mark.parametrize("env_id", ["mpe/simple_spread_v3", "toy"])
def test_first_ratio_is_one(env_id, epsilon, advantage, shared, toy):
    args = coppo.Args(env_id=env_id, **SMALL, share_parameters=shared, advantage=advantage)
    agent, _, _, batch = collected(args, epsilon=epsilon)
    _, (_, entropy, kl, outer_clipfrac, inner_clipfrac, product_var) = coppo.actor_loss(agent, batch, args)
    assert abs(kl) < 1e-6 and outer_clipfrac == inner_clipfrac == 0 and product_var < 1e-8 and entropy > 0
    minibatch = coppo.Batch(*(x[:100] for x in batch))
    log_probs = agent.logits(minibatch.features, minibatch.action_mask).log_softmax(-1)
    ratio = (log_probs.gather(-1, minibatch.action[..., None]).squeeze(-1) - minibatch.log_prob).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)


def test_a_dead_agent_earns_what_the_living_do(toy):
    args = coppo.Args(env_id=toy, **SMALL, time_limit_bootstrap=False)
    _, rollout, _, _ = collected(args)
    assert not rollout.agent_mask[..., 1].all() and (rollout.reward[..., 1] > 0).all()
    assert (rollout.reward[..., 1] == rollout.reward[..., 0]).all()


@pytest.mark.parametrize("activation, layer", [("tanh", torch.nn.Tanh), ("relu", torch.nn.ReLU)])
def test_the_actor_that_acts_is_the_actor_that_learns(activation, layer):
    args = coppo.Args(activation=activation)
    agent = coppo.Agent(coppo.make_envs(args, 1), args)
    assert all(isinstance(x, layer) for network in (agent.actor, agent.critic) for x in network[1:4:2])
    features = agent.features(np.random.default_rng(0).normal(size=(7, 3, 18)).astype(np.float32))
    theirs = agent.by_agent(agent.actor(agent.by_network(torch.from_numpy(features))))
    torch.testing.assert_close(torch.from_numpy(coppo.numpy_actor(agent)(features)), theirs, atol=1e-5, rtol=1e-5)


def test_exploration_is_part_of_the_policy():
    """The share of random actions is uniform over the legal ones, and the probabilities are those of the samples."""
    args = coppo.Args(env_id="matrix/penalty", num_envs=20_000, num_steps=1, share_parameters=False)
    agent, rollout, _, batch = collected(args, epsilon=0.5)
    probs = agent.logits(batch.features, batch.action_mask).softmax(-1)[0].detach()  # (A, K), the same in every row
    torch.testing.assert_close(probs.sum(-1), torch.ones(4))
    assert probs.min() >= 0.5 / 9
    frequency = np.stack([(rollout.action[0] == k).mean(0) for k in range(9)], -1)
    np.testing.assert_allclose(frequency, probs, atol=0.015)
    agent.epsilon = 0.0
    greedy = agent.logits(batch.features, batch.action_mask).softmax(-1)[0].detach()
    torch.testing.assert_close(probs, 0.5 * greedy + 0.5 / 9)
    masked = torch.arange(9) < 3
    agent.epsilon = 0.5
    probs = agent.logits(batch.features, masked.expand(batch.action_mask.shape)).softmax(-1)
    assert (probs[..., 3:] < 1e-20).all() and (probs[..., :3] >= 0.5 / 3 - 1e-6).all()


def test_the_share_of_random_actions_falls_linearly(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(coppo.Run, "log", lambda run, metrics: seen.append(metrics["train/epsilon"]))
    exploration = {"epsilon_start": 0.9, "epsilon_end": 0.1, "epsilon_timesteps": 400}
    coppo.main(coppo.Args(**SMALL | {"total_timesteps": 800}, **exploration, runs_dir=str(tmp_path)))
    assert seen == pytest.approx([0.9, 0.5, 0.1, 0.1])


@pytest.mark.parametrize("shared", [True, False])
def test_counterfactual_advantages_marginalise_the_own_action_alone(shared, toy):
    args = coppo.Args(
        env_id=toy, **SMALL, share_parameters=shared, advantage="counterfactual", norm_adv=False, normalize_value=False
    )
    agent, rollout, now, batch = collected(args)
    probs = agent.logits(batch.features, batch.action_mask).softmax(-1).detach()
    original = rollout.action.copy()
    for i in range(3):
        expectation, own = 0, []
        for k in range(4):  # the same rollout, had agent i done k
            rollout.action[:] = original
            rollout.action[:, :, i] = k
            other = coppo.estimate(agent, rollout, *now, args)
            own.append(other.critic_features[:, i])
            expectation = expectation + probs[:, i, k] * other.value[:, i]
        assert all(torch.equal(own[0], features) for features in own)  # a critic does not see its agent's own action
        torch.testing.assert_close(batch.advantage[:, i], batch.value[:, i] - expectation, atol=1e-4, rtol=1e-4)
    rollout.action[:] = original
    rollout.action[:, :, 0] = 1 - rollout.action[:, :, 0]
    other = coppo.estimate(agent, rollout, *now, args)
    alive = batch.alive[:, 1] > 0
    assert (other.critic_features[alive, 1] != batch.critic_features[alive, 1]).any(-1).all()  # but it sees the others'


@pytest.mark.learning
def test_critics_of_joint_actions_learn_the_rewards_of_a_game(tmp_path):
    args = coppo.Args(
        env_id="matrix/climbing",
        total_timesteps=20_000,
        num_envs=100,
        num_steps=1,
        advantage="counterfactual",
        epsilon_start=0.99,
        epsilon_end=0.99,
        share_parameters=False,
        critic_learning_rate=3e-3,
        value_clip_coef=0,
        eval_episodes=0,
        runs_dir=str(tmp_path),
    )
    envs = coppo.make_envs(args, 9)
    agent = coppo.Agent(envs, args)
    agent.load_state_dict(load_checkpoint(coppo.main(args))["modules"]["agent"])
    obs, info = envs.reset()
    action = np.array([(i, j) for i in range(3) for j in range(3)])
    values = agent.values(*agent.critic_input(info["state"], obs, info["agent_mask"], action)).detach()
    taken = agent.of_action(values, torch.from_numpy(action))
    expected = torch.tensor([11.0, -30, 0, -30, 7, 0, 0, 6, 5])[:, None].expand(9, 2)
    torch.testing.assert_close(taken, expected, atol=3.0, rtol=0)


@pytest.mark.parametrize("advantage", ["gae", "counterfactual"])
def test_a_time_limit_bootstraps_from_the_final_state(advantage, toy):
    args = coppo.Args(env_id=toy, **SMALL, gamma=0.9, advantage=advantage)
    torch.manual_seed(0)
    fresh = coppo.Agent(coppo.make_envs(args, 4), args)  # the critic of the rollout
    _, rollout, _, _ = collected(args)
    assert (rollout.reward[5, 0] == 6).all()  # environment 0 terminates: nothing to add
    final_obs = np.zeros((1, 3, 3), np.float32)
    final_obs[0, 0, :2] = 6  # agent 2 died with the last step
    values = []
    for action in np.ndindex(2, 1, 1):  # what the living agent could do next
        seen = fresh.critic_input(
            np.array([[6, 36]], np.float32), final_obs, np.array([[True, False, False]]), np.array([action])
        )
        value = fresh.of_action(fresh.values(*seen), torch.tensor([action]))
        values.append(6 + 0.9 * value[0, 0].detach().numpy())
    error = np.abs(np.array(values) - rollout.reward[5, 1, 0])
    assert error.min() < 1e-4  # environment 1 is truncated


def test_the_mixing_network_is_monotone_and_stays_as_it_is(toy, tmp_path):
    args = coppo.Args(env_id=toy, **SMALL, mix="network", runs_dir=str(tmp_path))
    agent, _, _, batch = collected(args)
    x = torch.randn(200, 3, requires_grad=True)
    mixed = agent.mixing(x, batch.state)
    gradient = torch.autograd.grad(mixed.sum(), x)[0]
    assert mixed.shape == (200, 1) and (gradient >= 0).all() and (gradient > 0).float().mean() > 0.9
    loss, _ = coppo.actor_loss(agent, batch, args)
    assert all((g != 0).any() for g in torch.autograd.grad(loss, list(agent.actor.parameters())))
    torch.manual_seed(1)  # as `main` does
    untouched = coppo.Agent(coppo.make_envs(args, 1), args).mixing.state_dict()
    saved = load_checkpoint(coppo.main(args))["modules"]["agent"]
    assert all(torch.equal(saved[f"mixing.{key}"], value) for key, value in untouched.items())


@pytest.mark.parametrize("objective", ["equation", "authors"])
def test_the_loss_of_the_mixing_network_is_its_definition(objective, toy):
    """QMIX's network number by number over the surrogates of `equations`; its gradient by differences of them."""
    args = coppo.Args(env_id=toy, **SMALL, mix="network", objective=objective, ent_coef=0.0)
    agent, _, _, batch = collected(args)
    agent, batch = in_float64(agent, batch)
    batch, ratio = moved(agent, batch)
    alive = batch.alive.bool().numpy()
    value, slope = equations(
        ratio, batch.advantage.numpy(), alive, 0.2, args.inner_clip_coef, False, objective == "authors"
    )
    weights = {key: x.numpy() for key, x in agent.mixing.state_dict().items()}

    def linear(name, x):
        return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]

    def mixed(surrogate, state):
        total = linear("bias2.2", np.maximum(linear("bias2.0", state), 0))[0]
        weight1, bias1, weight2 = (
            np.abs(linear("weight1", state)),
            linear("bias1", state),
            np.abs(linear("weight2", state)),
        )
        for h in range(32):
            hidden = bias1[h] + sum(surrogate[i] * weight1[i * 32 + h] for i in range(3))
            total += weight2[h] * (hidden if hidden > 0 else np.exp(hidden) - 1)
        return total

    rows = list(zip(value, batch.state.numpy()))
    loss, _ = coppo.actor_loss(agent, batch, args)
    assert loss.item() == pytest.approx(-np.mean([mixed(*row) for row in rows]), rel=1e-9)
    step = 1e-6 * np.eye(3)
    by_surrogate = np.array([[(mixed(v + d, s) - mixed(v - d, s)) / 2e-6 for d in step] for v, s in rows])
    weight = torch.from_numpy(-np.einsum("ri,rij->rj", by_surrogate, slope) / len(rows))
    log_probs = agent.logits(batch.features, batch.action_mask).log_softmax(-1)
    log_prob = log_probs.gather(-1, batch.action[..., None]).squeeze(-1)
    parameters = list(agent.actor.parameters())
    expected = torch.autograd.grad((weight * log_prob).sum(), parameters)
    for mine, theirs in zip(torch.autograd.grad(loss, parameters), expected):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-8)


VARIANTS = {
    "defaults": {},
    "independent": {"share_parameters": False},
    "matrix games": {
        "share_parameters": False,
        "advantage": "counterfactual",
        "optimizer": "rmsprop",
        "epsilon_start": 0.9,
    },
    "authors": {"objective": "authors", "mix": "network"},
    "no double clipping": {"inner_clip_coef": INF, "clip_separately": True},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("env_id", ["mpe/simple_speaker_listener_v4", "matrix/penalty", "toy"])
def test_two_updates_that_two_runs_repeat(env_id, name, toy, tmp_path):
    args = coppo.Args(env_id=env_id, **SMALL, **VARIANTS[name], runs_dir=str(tmp_path), update_epochs=3)
    one, same = (load_checkpoint(coppo.main(args)) for _ in range(2))
    assert one["step"] == 400
    for key, value in one["modules"]["agent"].items():
        assert torch.isfinite(value).all() and torch.equal(value, same["modules"]["agent"][key])


def test_a_resumed_run_goes_on_and_can_be_played(tmp_path, capsys):
    settings = VARIANTS["matrix games"] | {"runs_dir": str(tmp_path)}
    folder = coppo.main(coppo.Args(**SMALL, **settings))
    coppo.main(coppo.Args(**SMALL | {"total_timesteps": 600}, **settings, resume=folder))
    after = load_checkpoint(folder)
    assert after["step"] == 600 and after["modules"]["agent"]["value_stats.count"] == 600
    assert after["modules"]["optimizer"]["state"][0]["step"] == 30  # ten epochs of three updates, once per epoch
    assert {"args.json", "checkpoint.pt", "done.json"} <= {path.name for path in folder.iterdir()}
    metrics = enjoy.main(enjoy.Args(folder, episodes=2))
    assert "coppo at step 600, 2 episodes" in capsys.readouterr().out and metrics["eval/ep_length"] == 25


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--env-id mpe/simple_spread_v3?continuous_actions=True", "are continuous; try mappo_continuous_action.py"),
        ("--inner-clip-coef -0.1", "--inner-clip-coef must be at least 0, not -0.1"),
        ("--epsilon-start 1", "--epsilon-start must be in [0, 1), not 1"),
        ("--epsilon-timesteps 0", "--epsilon-timesteps must be greater than 0, not 0"),
        ("--critic-hidden-dim 0", "--critic-hidden-dim must be greater than 0, not 0"),
    ],
)
def test_bad_input(flags, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["coppo.py", *flags.split(), "--runs-dir", str(tmp_path / "runs")])
    with pytest.raises(SystemExit) as exit_:
        coppo.launch(coppo.main, coppo.Args)
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and text in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.learning
def test_learns_simple_spread_in_seconds(tmp_path):
    args = coppo.Args(total_timesteps=160_000, runs_dir=str(tmp_path), eval_episodes=0)
    folder = coppo.main(args)
    envs = coppo.make_envs(args, 32)
    agent = coppo.Agent(envs, args)
    untrained = evaluate(envs, coppo.make_policy(agent, greedy=False), 320, seed=7)
    agent.load_state_dict(load_checkpoint(folder)["modules"]["agent"])
    trained = evaluate(envs, coppo.make_policy(agent, greedy=False), 320, seed=7)
    error = np.hypot(untrained["eval/std_ep_reward"], trained["eval/std_ep_reward"]) / np.sqrt(320)
    assert trained["eval/ep_reward"] - untrained["eval/ep_reward"] > 5 * error


@pytest.mark.parametrize("shared", [True, False])
def test_the_state_read_once_gives_the_values_of_the_state_read_by_every_agent(shared, toy):
    agent, _, _, batch = collected(coppo.Args(env_id=toy, **SMALL, share_parameters=shared))
    assert (batch.alive == 0).any() and batch.state.abs().max() > 1
    rows = torch.cat([batch.state[:, None] * batch.alive[..., None], batch.critic_features], dim=-1)
    plain = agent.by_agent(agent.critic(agent.by_network(rows)))
    values = agent.normalized_values(batch.state, batch.critic_features, batch.alive)
    torch.testing.assert_close(values, plain, atol=1e-4, rtol=1e-4)
