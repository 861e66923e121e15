"""ippo.py: stacked agents against agents trained alone, masks, deaths, normalisers, schedules, per-agent settings."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st

import cleanmarl.envs
from cleanmarl import ippo
from cleanmarl.envs import EpisodeStatistics, MultiAgentVectorEnv
from cleanmarl.run import evaluate, load_checkpoint

SMALL = {"total_timesteps": 400, "num_envs": 4, "num_steps": 50, "eval_episodes": 0}

ARGS = ippo.Args(value_clip_coef=(0.2,), ent_coef=(0.2,), vf_coef=(0.2,))
SETTINGS = ippo.make_settings(ARGS, torch.device("cpu"))


class Toy(MultiAgentVectorEnv):
    """Three agents with different spaces, episodes of 6 steps (terminated in even environments, truncated in odd ones).

    Agent 1 dies after its third step, agent 2 with its last; the parity of the clock forbids agent 2's action 0 or 1.
    Observations are the clock plus the agent's index; agent i's reward is i + 1 while it lives.
    """

    def __init__(self, num_envs):
        self._set_spaces(num_envs, ("a", "b", "c"), [2, 3, 1], [2, 4, 3], 6)
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
        return obs, {"state": obs[:, :, 0].copy(), "action_mask": mask, "agent_mask": alive}

    def reset(self, *, seed=None, options=None):
        self.clock = 0
        return self._look()

    def step(self, action):
        _, before = self._look()
        legal = np.take_along_axis(before["action_mask"], action[..., None], -1)[..., 0]
        assert legal[before["agent_mask"]].all(), "an illegal action"
        reward = np.array([1.0, 2.0, 3.0], np.float32) * before["agent_mask"]
        self.clock += 1
        ended = np.full(self.num_envs, self.clock == 6)
        odd = np.arange(self.num_envs) % 2 == 1
        self.statistics.add(reward)
        final, final_info = self._look()
        if ended.any():
            self.clock = 0
        obs, info = self._look()
        if ended.any():
            info["final_obs"], info["_final_obs"] = final, ended
            info["final_agent_mask"] = final_info["agent_mask"]
            self.statistics.end(ended, info)
        return obs, reward, ended & ~odd, ended & odd, info


@pytest.fixture
def toy(monkeypatch):
    """`toy/...` as an environment family."""
    monkeypatch.setattr(ippo, "make", lambda env_id, num_envs, **o: Toy(num_envs))
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
    return ippo.Rollout(np.zeros((T, N, A, D), np.float32), *masks, *rest)


def collected(args, scale=100):
    """Agent, rollout and batch of one rollout with policies far from uniform."""
    torch.manual_seed(0)
    envs = ippo.make_envs(args, args.num_envs)
    agent = ippo.Agent(envs, args)
    with torch.no_grad():
        agent.actor[-1].weight *= scale
        agent.critic[-1].bias += 1  # the dead see zeros, which are to have a value
    rollout = make_rollout(args, envs)
    run = Quiet()
    obs, _ = ippo.collect(agent, envs, envs.reset(seed=1), rollout, args, run)
    return agent, rollout, ippo.estimate(agent, rollout, obs, args)


def optimizer_for(agent, lr, optimizer=torch.optim.Adam, **kwargs):
    rows = ippo.stack_parameters(agent)
    lrs = np.broadcast_to(lr, len(rows)).tolist()
    return optimizer([{"params": [row], "lr": x} for row, x in zip(rows, lrs)], **kwargs)


@given(st.integers(1, 12), st.floats(0, 0.5), st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_gae_is_its_definition_with_a_discount_per_agent(T, p_done, seed):
    rng = np.random.default_rng(seed)
    gamma, gae_lambda = rng.random(3), rng.random(3)
    reward, value, next_value = rng.normal(size=(T, 2, 3)), rng.normal(size=(T, 2, 3)), rng.normal(size=(2, 3))
    done = rng.random((T, 2, 3)) < p_done
    ours = ippo.gae(reward, value, next_value, done, gamma, gae_lambda)
    values = np.concatenate([value, next_value[None]])
    for n, a in np.ndindex(2, 3):
        for t in range(T):
            expected, weight = 0.0, 1.0
            for k in range(t, T):
                alive = 1.0 - done[k, n, a]
                expected += weight * (reward[k, n, a] + gamma[a] * alive * values[k + 1, n, a] - values[k, n, a])
                weight *= gamma[a] * gae_lambda[a] * alive
            assert ours[t, n, a] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("env_id", ["mpe/simple_spread_v3", "toy"])
def test_first_ratio_is_one(env_id, shared, toy, request):
    if env_id != "toy":
        ippo.make = cleanmarl.envs.make  # the fixture restores it
    args = ippo.Args(env_id=env_id, **SMALL, share_parameters=shared, normalize_obs=True, normalize_value=True)
    agent, _, batch = collected(args)
    half = batch.action.shape[1] // 2
    minibatch = ippo.Batch(*(x[:, :half] for x in batch))
    log_probs = agent.logits(minibatch.features, minibatch.action_mask).log_softmax(-1)
    ratio = (log_probs.gather(-1, minibatch.action[..., None]).squeeze(-1) - minibatch.log_prob).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)


@pytest.mark.parametrize("shared", [False, True])
def test_the_actor_that_acts_is_the_actor_that_learns(shared):
    args = ippo.Args(share_parameters=shared, normalize_obs=True)
    agent = ippo.Agent(ippo.make_envs(args, 1), args)
    with torch.no_grad():
        agent.actor[-1].weight *= 100
        agent.obs_stats.mean.normal_()
        agent.obs_stats.var.uniform_(0.1, 2)
    features = agent.features(np.random.default_rng(0).normal(size=(7, 3, 18)).astype(np.float32))
    theirs = agent.actor(agent.normalize(torch.from_numpy(features)))
    torch.testing.assert_close(torch.from_numpy(ippo.numpy_actor(agent)(features)), theirs, atol=1e-5, rtol=1e-5)
    noise = ippo.gumbel_noise(20_000, *theirs.shape)
    action = (ippo.numpy_actor(agent)(features) + noise).argmax(-1)  # (20000, M, B)
    frequency = np.stack([(action == k).mean(0) for k in range(5)], -1)
    np.testing.assert_allclose(frequency, theirs.softmax(-1).detach(), atol=0.02)


def test_the_loss_of_an_agent_has_no_gradient_on_the_parameters_of_another():
    args = ippo.Args(**SMALL)
    agent, _, batch = collected(args)
    loss, _ = ippo.ippo_loss(agent, batch, SETTINGS, True)
    for i in range(3):
        for gradient in torch.autograd.grad(loss[i], list(agent.parameters()), retain_graph=True):
            assert (gradient[i] != 0).any()
            others = [j for j in range(3) if j != i]
            assert (gradient[others] == 0).all()


def alone(stacked, i):
    """Network i of a stack as an ordinary network."""
    layers = []
    for stack in stacked[::2]:
        layer = nn.Linear(stack.weight.shape[1], stack.weight.shape[2])
        layer.weight.data, layer.bias.data = stack.weight[i].T.detach().clone(), stack.bias[i, 0].detach().clone()
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


PER_AGENT = {
    "learning_rate": (1e-3, 5e-4, 2e-3),
    "clip_coef": (0.1, 0.2, 0.3),
    "value_clip_coef": (0.0, 0.05, 0.2),
    "ent_coef": (0.01, 0.0, 0.1),
    "vf_coef": (1.0, 0.5, 2.0),
    "max_grad_norm": (0.5, 0.05, 10.0),
    "update_epochs": (2, 4, 3),
    "target_kl": (0.0, 1e-4, 0.0),
}


@pytest.mark.parametrize("env_id", ["mpe/simple_spread_v3", "toy"])
def test_stacked_agents_learn_like_agents_trained_alone(env_id, toy):
    """An update of three stacked agents against three ordinary PPO learners with Adam, on the same minibatches."""
    if env_id != "toy":
        ippo.make = cleanmarl.envs.make
    args = ippo.Args(env_id=env_id, **SMALL, **PER_AGENT, num_minibatches=4)
    agent, _, batch = collected(args, scale=10)
    learners = [(alone(agent.actor, i), alone(agent.critic, i)) for i in range(3)]
    optimizer = optimizer_for(agent, args.learning_rate, eps=1e-5)
    torch.manual_seed(5)
    ippo.update(agent, optimizer, batch, ippo.make_settings(args, torch.device("cpu")), args)

    stopped_early = False
    for i, (actor, critic) in enumerate(learners):
        parameters = [*actor.parameters(), *critic.parameters()]
        adam = torch.optim.Adam(parameters, lr=args.learning_rate[i], eps=1e-5)
        data = ippo.Batch(*(x[i] for x in batch))
        torch.manual_seed(5)
        stop = False
        for _ in range(args.update_epochs[i]):
            for index in torch.randperm(200).split(50):
                mb = ippo.Batch(*(x[index] for x in data))
                keep = mb.alive.bool()
                logits = actor(mb.features).masked_fill(~mb.action_mask, -torch.inf)
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
                value = critic(mb.features)[keep, 0]
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
            for mine, theirs in zip(alone(stacked, i).parameters(), network.parameters()):
                torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=1e-5)
    assert stopped_early, "the KL threshold was to be met in this test"


def test_dead_agents_add_nothing(toy):
    args = ippo.Args(env_id=toy, **SMALL)
    agent, _, batch = collected(args)
    assert 0 < (batch.alive[1] == 0).sum() < 200 and (batch.alive[[0, 2]] == 1).all()
    loss, stats = ippo.ippo_loss(agent, batch, SETTINGS, True)
    gradients = torch.autograd.grad(loss.sum(), list(agent.parameters()))
    noise = (1 - batch.alive) * 1e3
    other = batch._replace(
        features=batch.features + noise[..., None],
        advantage=batch.advantage + noise,
        return_=batch.return_ - noise,
        value=batch.value + noise,
        log_prob=batch.log_prob - noise.clamp(max=1),
    )
    loss2, stats2 = ippo.ippo_loss(agent, other, SETTINGS, True)
    torch.testing.assert_close(loss, loss2)
    torch.testing.assert_close(stats, stats2)
    for a, b in zip(gradients, torch.autograd.grad(loss2.sum(), list(agent.parameters()))):
        torch.testing.assert_close(a, b)


def test_explained_variance_leaves_dead_agents_out(toy):
    args = ippo.Args(env_id=toy, **SMALL)
    agent, _, batch = collected(args)
    batch = batch._replace(value=torch.where(batch.alive > 0, batch.return_, 1e3))  # perfect for the living alone
    settings_ = ippo.make_settings(args, torch.device("cpu"))
    metrics = ippo.update(agent, optimizer_for(agent, 1e-4), batch, settings_, args)
    assert metrics["train/explained_variance"] == pytest.approx(1)


def test_death_and_the_end_of_an_episode_cut_the_returns_of_an_agent(toy):
    args = ippo.Args(
        env_id=toy, **SMALL, time_limit_bootstrap=True, gamma=(0.9, 0.8, 0.7), reward_scale=(1.0, 10.0, 1.0)
    )
    agent, rollout, _ = collected(args)
    time = np.arange(50) % 6
    assert (rollout.done[:, 0, 0] == (time == 5)).all()
    assert (rollout.done[:, 0, 1] == np.isin(time, [2, 5])).all()  # its death, and the end that it does not see
    assert (rollout.reward[:, 0, 1] == np.where(time < 3, 20, 0)).all()  # environment 0 terminates: nothing to add
    final_obs = torch.zeros(1, 3, 3)
    final_obs[0, 0, :2] = 6
    final_value = agent.value(torch.from_numpy(agent.features(final_obs.numpy()))).detach()[:, 0].numpy()
    expected = np.array([1 + 0.9 * final_value[0], 0, 3])  # agent 2 died with the last step
    np.testing.assert_allclose(rollout.reward[5, 1], expected, rtol=1e-5)  # environment 1 is truncated


@pytest.mark.parametrize("shared", [False, True])
def test_the_dead_of_a_team_go_on_earning(shared, toy, monkeypatch):
    monkeypatch.setattr(Toy, "team_reward", True)
    per_agent = {"gamma": (0.9, 0.8, 0.7), "reward_scale": (1.0, 10.0, 1.0)}
    args = ippo.Args(env_id=toy, **SMALL, **per_agent, share_parameters=shared)
    agent, rollout, batch = collected(args)
    ends = np.arange(50) % 6 == 5
    assert (rollout.done == ends[:, None, None]).all()  # no death among them
    assert (rollout.reward[:, 0] == [2, 20, 2]).all()  # the mean of the living's 1, 2 and 3, or of 1 and 3
    final_obs = np.zeros((1, 3, 3), np.float32)  # as the dead see it
    final_obs[0, 0, :2] = 6
    final_value = agent.by_agent(agent.value(torch.from_numpy(agent.features(final_obs)))).detach()[0].numpy()
    np.testing.assert_allclose(rollout.reward[5, 1], [2, 20, 2] + np.array([0.9, 0.8, 0.7]) * final_value, rtol=1e-5)

    settings_, dead = ippo.make_settings(args, torch.device("cpu")), 1 - batch.alive
    assert dead.any()
    loss, stats = ippo.ippo_loss(agent, batch, settings_, True)
    other = batch._replace(advantage=batch.advantage + 1e3 * dead, log_prob=batch.log_prob - dead)
    torch.testing.assert_close(ippo.ippo_loss(agent, other, settings_, True)[0], loss)  # the policy leaves them out
    error = agent.critic(batch.features).squeeze(-1) - batch.return_
    torch.testing.assert_close(stats[1], error.square().mean(1))
    change = ((error - dead).square() - error.square()).mean(1)  # and the critic does not
    other = batch._replace(return_=batch.return_ + dead)
    torch.testing.assert_close(ippo.ippo_loss(agent, other, settings_, True)[0] - loss, change, atol=1e-5, rtol=1e-4)
    agent, *_ = collected(dataclasses.replace(args, normalize_value=True))
    assert (agent.value_stats.count == (600 if shared else 200)).all()


def test_illegal_actions_are_never_taken_and_get_no_gradient(toy):
    args = ippo.Args(env_id=toy, **SMALL)
    agent, rollout, batch = collected(args, scale=1)
    taken = np.take_along_axis(rollout.action_mask, rollout.action[..., None], -1)
    assert taken[..., 0][rollout.agent_mask].all()  # Toy.step asserts it too
    assert set(np.unique(rollout.action[:, :, 2])) == {0, 1, 2}
    log_probs = agent.logits(batch.features, batch.action_mask).log_softmax(-1)
    assert (log_probs[~batch.action_mask] < -1e7).all()
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(3, 200))
    padded = agent.actor[-1].bias  # agent 0 has two actions of four
    gradient = torch.autograd.grad((log_probs.exp() * log_probs).sum(), padded)[0]
    assert (gradient[0, 0, 2:] == 0).all() and (gradient[0, 0, :2] != 0).any()


@pytest.mark.parametrize("shared", [False, True])
def test_axes_of_agents_and_networks_convert_back_and_forth(shared):
    agent = ippo.Agent(ippo.make_envs(ippo.Args(), 1), ippo.Args(share_parameters=shared))
    x = torch.arange(5 * 3 * 2).reshape(5, 3, 2)
    assert agent.by_network(x).shape == ((1, 15, 2) if shared else (3, 5, 2))
    assert torch.equal(agent.by_agent(agent.by_network(x)), x)
    if not shared:
        assert torch.equal(agent.by_network(x)[1], x[:, 1])


def test_shared_networks_tell_agents_apart_by_id():
    agent = ippo.Agent(ippo.make_envs(ippo.Args(), 1), ippo.Args(share_parameters=True))
    assert all(len(p) == 1 for p in agent.parameters())
    features = agent.by_agent(agent.features(np.zeros((4, 3, 18), np.float32)))
    assert (features[..., 18:] == np.eye(3)).all()


def test_running_statistics_are_those_of_all_living_samples():
    rng = np.random.default_rng(0)
    stats = ippo.RunningMeanStd(2, 3)
    chunks = [rng.normal(5, 3, (2, n, 3)).astype(np.float32) for n in (7, 1, 30)]
    weights = [(rng.random((2, n, 1)) < 0.7).astype(np.float32) for n in (7, 1, 30)]
    weights[1][:] = [[[0.0]], [[1.0]]]  # nobody lives in the first network's only sample
    for x, w in zip(chunks, weights):
        stats.update(torch.from_numpy(x), torch.from_numpy(w))
    x, w = np.concatenate(chunks, 1).astype(np.float64), np.concatenate(weights, 1)[..., 0] > 0
    for m in range(2):
        np.testing.assert_allclose(stats.mean[m, 0], x[m][w[m]].mean(0), rtol=1e-5)
        np.testing.assert_allclose(stats.var[m, 0], x[m][w[m]].var(0), rtol=1e-4)
    y = torch.randn(2, 4, 3)
    torch.testing.assert_close(stats.denormalize(stats.normalize(y)), y, atol=1e-5, rtol=1e-5)


def test_statistics_are_saved_used_and_frozen_at_evaluation(tmp_path):
    args = ippo.Args(**SMALL, normalize_obs=True, normalize_value=True, runs_dir=str(tmp_path))
    saved = load_checkpoint(ippo.main(args))["modules"]["agent"]
    assert (saved["obs_stats.count"] == 400).all() and (saved["value_stats.count"] == 400).all()
    envs = ippo.make_envs(args, 4)
    agent = ippo.Agent(envs, args)
    agent.load_state_dict(saved)
    evaluate(envs, ippo.make_policy(agent), 8, seed=1)
    assert all(torch.equal(saved[key], value) for key, value in agent.state_dict().items())
    features = torch.zeros(3, 2, 18)
    torch.testing.assert_close(
        agent.normalize(features)[1, 0], (-saved["obs_stats.mean"] / (saved["obs_stats.var"] + 1e-8).sqrt())[1, 0]
    )


def test_learning_rate_schedules():
    agent = ippo.Agent(ippo.make_envs(ippo.Args(), 1), ippo.Args())
    args = ippo.Args(lr_schedule=("kl-adaptive", "constant", "kl-adaptive"), lr_kl_target=0.01)
    optimizer = optimizer_for(agent, 1e-3)
    ippo.adapt_learning_rate(optimizer, torch.tensor([0.03, 0.03, 0.001]), np.ones(3, bool), args)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([1e-3 / 1.5, 1e-3, 1.5e-3])
    ippo.adapt_learning_rate(optimizer, torch.tensor([0.015, 0.03, 0.006]), np.ones(3, bool), args)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([1e-3 / 1.5, 1e-3, 1.5e-3])
    ippo.adapt_learning_rate(optimizer, torch.tensor([0.03, 0.03, 0.001]), np.array([False, True, True]), args)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([1e-3 / 1.5, 1e-3, 1.5e-3 * 1.5])


def test_kl_adaptive_rate_follows_every_epoch(tmp_path):
    args = ippo.Args(
        **SMALL, lr_schedule=("kl-adaptive",), lr_kl_target=1e-12, update_epochs=(3,), runs_dir=str(tmp_path)
    )
    groups = load_checkpoint(ippo.main(args))["modules"]["optimizer"]["param_groups"]
    assert [g["lr"] for g in groups] == pytest.approx([5e-4 / 1.5**6] * 3)  # three epochs of two updates, all too far


def test_linear_and_constant_schedules_per_agent(tmp_path):
    schedule = ("linear", "constant", "linear")
    args = ippo.Args(**SMALL, lr_schedule=schedule, learning_rate=(1e-3, 2e-3, 3e-3), runs_dir=str(tmp_path))
    groups = load_checkpoint(ippo.main(args))["modules"]["optimizer"]["param_groups"]
    assert [g["lr"] for g in groups] == pytest.approx([0.5e-3, 2e-3, 1.5e-3])  # in the second of two updates


def test_warm_up_acts_at_random_and_does_not_learn(toy, tmp_path):
    args = ippo.Args(env_id=toy, **SMALL, random_timesteps=200, runs_dir=str(tmp_path))
    _, rollout, _ = collected(args, scale=1e4)
    for a, (actions, legal) in enumerate([(2, 2), (4, 4), (3, 2)]):
        counts = np.bincount(rollout.action[:, :, a][rollout.agent_mask[:, :, a]], minlength=actions)
        assert (counts > 0.5 * counts.sum() / actions * (2 / 3 if legal < actions else 1)).all()
    trained = {}
    for name, changes in {
        "warm-up": {"random_timesteps": 204},  # the second rollout begins at random, too
        "late": {"learning_starts": 401},
        "in time": {"learning_starts": 400},
        "neither": {},
    }.items():
        run_args = ippo.Args(env_id=toy, **SMALL, **changes, runs_dir=str(tmp_path))
        trained[name] = len(load_checkpoint(ippo.main(run_args))["modules"]["optimizer"]["state"])
    assert trained == {"warm-up": 0, "late": 0, "in time": 3, "neither": 3}  # networks that Adam has touched


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("env_id", ["mpe/simple_spread_v3", "toy"])
def test_two_updates(env_id, shared, toy, tmp_path):
    if env_id != "toy":
        ippo.make = cleanmarl.envs.make
    saved = load_checkpoint(
        ippo.main(ippo.Args(env_id=env_id, **SMALL, share_parameters=shared, runs_dir=str(tmp_path)))
    )
    assert saved["step"] == 400
    assert all(torch.isfinite(x).all() for x in saved["modules"]["agent"].values())


@pytest.mark.learning
def test_learns_simple_spread_in_seconds(tmp_path):
    args = ippo.Args(total_timesteps=64_000, learning_rate=(1e-3,), runs_dir=str(tmp_path), eval_episodes=0)
    folder = ippo.main(args)
    envs = ippo.make_envs(args, 32)
    agent = ippo.Agent(envs, args)
    untrained = evaluate(envs, ippo.make_policy(agent, greedy=False), 320, seed=7)
    agent.load_state_dict(load_checkpoint(folder)["modules"]["agent"])
    trained = evaluate(envs, ippo.make_policy(agent, greedy=False), 320, seed=7)
    error = np.hypot(untrained["eval/std_ep_reward"], trained["eval/std_ep_reward"]) / np.sqrt(320)
    assert trained["eval/ep_reward"] - untrained["eval/ep_reward"] > 5 * error
