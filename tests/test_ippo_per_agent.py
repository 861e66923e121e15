"""ippo_per_agent.py: stacked agents against agents trained alone, settings per agent, schedules, warm-up, moments."""

import sys

from cleanmarl import enjoy, ippo_per_agent
from cleanmarl.cli import launch
from cleanmarl.evaluate import evaluate
from cleanmarl.layers import Networks, StackedLinear
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import Quiet, make_rollout

SMALL = {"total_timesteps": 400, "num_envs": 4, "num_steps": 50, "eval_episodes": 0}
GAMMA, SCALE = (0.9, 0.8, 0.7), (1.0, 10.0, 1.0)


def collected(args, scale=100):
    """Agent, rollout and batch of one rollout with policies far from uniform."""
    torch.manual_seed(0)
    envs = ippo_per_agent.make_envs(args, args.num_envs)
    agent = ippo_per_agent.Agent(envs, args)
    with torch.no_grad():
        agent.actor[-1].weight *= scale
        agent.critic[-1].bias += 1  # the dead see zeros, which are to have a value
    rollout = make_rollout(ippo_per_agent, args, envs)
    now = ippo_per_agent.collect(agent, envs, envs.reset(seed=1), rollout, args, Quiet())
    return agent, rollout, ippo_per_agent.estimate(agent, rollout, now[0], args)


def networks_and_optimizer(agent, learning_rates, **kwargs):
    networks = Networks(agent, len(agent.actor[-1].weight))
    rates = np.broadcast_to(learning_rates, len(networks))
    groups = [{"params": parameters, "lr": float(lr)} for parameters, lr in zip(networks, rates)]
    return networks, torch.optim.Adam(groups, **kwargs)


@given(st.integers(1, 12), st.floats(0, 0.5), st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_gae_is_its_definition_with_a_discount_per_agent(T, p_done, seed):
    rng = np.random.default_rng(seed)
    gamma, gae_lambda = rng.random(3), rng.random(3)
    reward, value, next_value = rng.normal(size=(T, 2, 3)), rng.normal(size=(T, 2, 3)), rng.normal(size=(2, 3))
    done = rng.random((T, 2, 3)) < p_done
    ours = ippo_per_agent.gae(reward, value, next_value, done, gamma, gae_lambda)
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
@pytest.mark.parametrize("env_id", ["mpe/simple_spread_v3", "toy/each"])
def test_first_ratio_is_one(env_id, shared, toy):
    args = ippo_per_agent.Args(
        env_id=env_id, **SMALL, share_parameters=shared, normalize_obs=True, normalize_value=True
    )
    agent, _, batch = collected(args)
    _, stats = ippo_per_agent.ippo_loss(agent, batch, args)
    assert (stats["approx_kl"].abs() < 1e-6).all() and (stats["clipfrac"] == 0).all()


def alone(stacked, i):
    """Network i of a stack as an ordinary network."""
    layers = []
    for stack in stacked:
        if isinstance(stack, StackedLinear):
            layer = nn.Linear(*stack.weight.shape[1:])
            layer.weight.data, layer.bias.data = stack.weight[i].T.detach().clone(), stack.bias[i, 0].detach().clone()
            layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


PER_AGENT = {
    "learning_rate": (1e-3, 5e-4, 2e-3),
    "clip_coef": (0.1, 0.2, 0.3),
    "clip_predicted_values": (0.0, 0.05, 0.2),
    "ent_coef": (0.01, 0.0, 0.1),
    "vf_coef": (1.0, 0.5, 2.0),
    "max_grad_norm": (0.5, 0.05, 10.0),
    "update_epochs": (2, 4, 3),
    "target_kl": (0.0, 1e-4, 0.0),
}


@pytest.mark.parametrize("env_id", ["mpe/simple_spread_v3", "toy/each"])
def test_stacked_agents_learn_like_agents_trained_alone(env_id, toy):
    """An update of three stacked agents against three ordinary PPO learners with Adam, on the same minibatches."""
    args = ippo_per_agent.Args(env_id=env_id, **SMALL, **PER_AGENT, num_minibatches=4)
    agent, _, batch = collected(args, scale=10)
    learners = [(alone(agent.actor, i), alone(agent.critic, i)) for i in range(3)]
    networks, optimizer = networks_and_optimizer(agent, args.learning_rate, eps=1e-5)
    torch.manual_seed(5)
    ippo_per_agent.update(agent, networks, optimizer, batch, args)

    stopped_early = False
    for i, (actor, critic) in enumerate(learners):
        parameters = [*actor.parameters(), *critic.parameters()]
        adam = torch.optim.Adam(parameters, lr=args.learning_rate[i], eps=1e-5)
        data = ippo_per_agent.Batch(*(x[:, i] for x in batch))
        torch.manual_seed(5)
        stop = False
        for _ in range(args.update_epochs[i]):
            for index in torch.randperm(200).split(50):
                mb = ippo_per_agent.Batch(*(x[index] for x in data))
                keep = mb.alive.bool()
                logits = actor(mb.obs).masked_fill(~mb.action_mask, -torch.inf)
                policy = torch.distributions.Categorical(logits=logits[keep])
                log_ratio = policy.log_prob(mb.action[keep]) - mb.log_prob[keep]
                kl = (log_ratio.exp() - 1 - log_ratio).mean()
                if args.target_kl[i] and kl > args.target_kl[i]:
                    stop = stopped_early = True
                if stop:
                    break
                advantage = mb.advantage[keep]
                advantage = (advantage - advantage.mean()) / (advantage.std(unbiased=False) + 1e-8)
                eps, value_eps = args.clip_coef[i], args.clip_predicted_values[i]
                surrogate = torch.min(advantage * log_ratio.exp(), advantage * log_ratio.exp().clip(1 - eps, 1 + eps))
                value = critic(mb.obs)[keep, 0]
                if value_eps:
                    value = mb.predicted[keep] + (value - mb.predicted[keep]).clip(-value_eps, value_eps)
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


@pytest.mark.parametrize("normalize", [False, True])
def test_the_clip_of_values_is_around_what_the_critic_says(normalize):
    """Around that value in the unit of the newest returns, nothing would learn while this unit changes."""
    args = ippo_per_agent.Args(**SMALL, clip_predicted_values=(0.2,), normalize_value=normalize)
    agent, _, batch = collected(args, scale=10)
    torch.testing.assert_close(batch.predicted, agent.normalized_value(batch.obs), atol=1e-5, rtol=1e-5)
    assert ((batch.predicted - batch.value).abs() > 0.2).all() == normalize
    clipped, _ = ippo_per_agent.ippo_loss(agent, batch, args)
    without = ippo_per_agent.Args(**vars(args) | {"clip_predicted_values": (0.0,)})
    free, _ = ippo_per_agent.ippo_loss(agent, batch, without)
    parameters = list(agent.critic.parameters())
    for one, other in zip(torch.autograd.grad(clipped, parameters), torch.autograd.grad(free, parameters)):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("shared", [False, True])
def test_an_agent_beyond_its_kl_stops_and_leaves_what_adam_knows_of_it(shared):
    """A step on a gradient of zero would still move it, by its momentum."""
    args = ippo_per_agent.Args(**SMALL, share_parameters=shared, num_minibatches=1, update_epochs=(3,))
    agent, _, batch = collected(args, scale=10)
    networks, optimizer = networks_and_optimizer(agent, 1e-3)
    ippo_per_agent.update(agent, networks, optimizer, batch, args)
    weights = [p.detach().clone() for p in agent.parameters()]
    stopped = 0 if shared else 1
    target_kl = (1e-9,) if shared else (0.0, 1e-9, 0.0)
    ippo_per_agent.update(
        agent, networks, optimizer, batch, ippo_per_agent.Args(**vars(args) | {"target_kl": target_kl})
    )
    steps = [optimizer.state[network[0]]["step"].item() for network in networks]
    assert steps == ([3] if shared else [6, 3, 6])
    for before, after in zip(weights, agent.parameters()):
        moved = (before != after).flatten(1).any(1)
        assert not moved[stopped] and (shared or moved[[0, 2]].all())


# proves ippo-4
def test_dead_agents_add_nothing(toy):
    args = ippo_per_agent.Args(env_id=toy, **SMALL, clip_predicted_values=(0.2,), ent_coef=(0.2,))
    agent, _, batch = collected(args)
    assert 0 < (batch.alive[:, 1] == 0).sum() < 200 and (batch.alive[:, [0, 2]] == 1).all()
    loss, stats = ippo_per_agent.ippo_loss(agent, batch, args)
    gradients = torch.autograd.grad(loss, list(agent.parameters()))
    noise = (1 - batch.alive) * 1e3
    other = batch._replace(
        obs=batch.obs + noise[..., None],
        advantage=batch.advantage + noise,
        return_=batch.return_ - noise,
        value=batch.value + noise,
        log_prob=batch.log_prob - noise,  # a ratio that would overflow
    )
    loss2, stats2 = ippo_per_agent.ippo_loss(agent, other, args)
    torch.testing.assert_close(loss, loss2)
    torch.testing.assert_close(stats, stats2)
    for a, b in zip(gradients, torch.autograd.grad(loss2, list(agent.parameters()))):
        torch.testing.assert_close(a, b)


# proves ippo-5
def test_rewards_and_what_follows_a_time_limit_are_each_agents_own(toy):
    args = ippo_per_agent.Args(env_id=toy, **SMALL, gamma=GAMMA, reward_scale=SCALE, normalize_value=False)
    agent, rollout, _ = collected(args)
    time = np.arange(50) % 6
    assert (rollout.done[:, 0, 0] == (time == 5)).all()
    assert (rollout.done[:, 0, 1] == np.isin(time, [2, 5])).all()  # its death, and the end that it does not see
    assert (rollout.reward[:, 0, 1] == np.where(time < 3, 20, 0)).all()  # environment 0 terminates: nothing to add
    final_obs = torch.zeros(1, 3, 3)
    final_obs[0, 0, :2] = 6
    expected = [1 + 0.9 * agent.value(final_obs)[0, 0].item(), 0, 3]  # agent 2 died with the last step
    np.testing.assert_allclose(rollout.reward[5, 1], expected, rtol=1e-5)  # environment 1 is truncated


@pytest.mark.parametrize("shared", [False, True])
def test_the_dead_of_a_team_go_on_earning(shared, team):
    settings = {"gamma": GAMMA, "reward_scale": SCALE, "share_parameters": shared, "normalize_value": False}
    args = ippo_per_agent.Args(env_id=team, **SMALL, **settings)
    agent, rollout, batch = collected(args)
    time, dead = np.arange(50) % 6, 1 - batch.alive
    assert dead.any() and (rollout.done == (time == 5)[:, None, None]).all()  # no death among them
    assert (rollout.reward[:, 0] == np.outer(time + 1, SCALE)).all()  # what each of the living earns
    final_obs = torch.zeros(1, 3, 3)  # as the dead see it
    final_obs[0, 0, :2] = 6
    expected = 6 * np.array(SCALE) + np.array(GAMMA) * agent.value(final_obs)[0].detach().numpy()
    np.testing.assert_allclose(rollout.reward[5, 1], expected, rtol=1e-5)
    loss, stats = ippo_per_agent.ippo_loss(agent, batch, args)
    other = batch._replace(advantage=batch.advantage + 1e3 * dead, log_prob=batch.log_prob - dead)
    torch.testing.assert_close(ippo_per_agent.ippo_loss(agent, other, args)[0], loss)  # the policy leaves them out
    error = agent.normalized_value(batch.obs) - batch.return_
    expected = error.square().mean((0, 1))[None] if shared else error.square().mean(0)  # and the critic does not
    torch.testing.assert_close(stats["value_loss"], expected)


def test_explained_variance_leaves_dead_agents_out(toy):
    args = ippo_per_agent.Args(env_id=toy, **SMALL)
    agent, _, batch = collected(args)
    batch = batch._replace(value=torch.where(batch.alive > 0, batch.return_, 1e3))  # perfect for the living alone
    metrics = ippo_per_agent.update(agent, *networks_and_optimizer(agent, 1e-4), batch, args)
    assert metrics["train/explained_variance"] == pytest.approx(1)


def test_statistics_are_saved_used_and_frozen_at_evaluation(tmp_path):
    args = ippo_per_agent.Args(**SMALL, normalize_obs=True, normalize_value=True, runs_dir=str(tmp_path))
    saved = load_checkpoint(ippo_per_agent.main(args))["modules"]["agent"]
    assert (saved["obs_stats.count"] == 400).all() and (saved["value_stats.count"] == 400).all()
    envs = ippo_per_agent.make_envs(args, 4)
    agent = ippo_per_agent.Agent(envs, args)
    agent.load_state_dict(saved)
    evaluate(envs, ippo_per_agent.make_policy(agent), 8, seed=1)
    assert all(torch.equal(saved[key], value) for key, value in agent.state_dict().items())
    obs, mean, std = torch.randn(7, 3, 18), saved["obs_stats.mean"], (saved["obs_stats.var"] + 1e-8).sqrt()
    for network in (agent.actor, agent.critic):
        torch.testing.assert_close(network(obs), network[1:](((obs - mean) / std).clamp(-10, 10)))


def test_an_update_sees_the_statistics_that_the_rollout_acted_with(tmp_path, monkeypatch):
    """Or the first ratio of the second rollout would be another one than 1."""
    plain, kl = ippo_per_agent.ippo_loss, []
    spy = lambda *x: (kl.append((y := plain(*x))[1]["approx_kl"]), y)[1]  # noqa: E731
    monkeypatch.setattr(ippo_per_agent, "ippo_loss", spy)
    one = {"num_minibatches": 1, "update_epochs": (1,), "normalize_obs": True, "runs_dir": str(tmp_path)}
    ippo_per_agent.main(ippo_per_agent.Args(**SMALL, **one))
    assert len(kl) == 2 and torch.stack(kl).abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["each", "team"])
def test_the_dead_count_in_the_statistics_of_returns_where_they_go_on_earning(kind, toy):
    args = ippo_per_agent.Args(env_id=f"toy/{kind}", **SMALL, normalize_value=True)
    agent, _, batch = collected(args)
    living = batch.alive.sum(0)
    assert living.tolist() == [200, 104, 200]
    assert agent.value_stats.count.flatten().tolist() == (living.tolist() if kind == "each" else [200] * 3)


@pytest.mark.parametrize("shared", [True, False])
def test_neither_the_dead_nor_padding_count_in_the_statistics_of_observations(shared, toy, tmp_path):
    args = ippo_per_agent.Args(env_id=toy, **SMALL, share_parameters=shared, normalize_obs=True, runs_dir=str(tmp_path))
    counted, update = [], ippo_per_agent.update
    with pytest.MonkeyPatch.context() as patch:
        spy = lambda agent, n, o, batch, args: (counted.append(batch.alive.sum(0)), update(agent, n, o, batch, args))[1]  # noqa: E731
        patch.setattr(ippo_per_agent, "update", spy)
        saved = load_checkpoint(ippo_per_agent.main(args))["modules"]["agent"]
    expected = sum(counted)[:, None] * (torch.arange(3) < torch.tensor([2, 3, 1])[:, None])  # (A, D)
    torch.testing.assert_close(saved["obs_stats.count"], expected.sum(0, keepdim=True) if shared else expected)


def test_learning_rate_schedules():
    agent = ippo_per_agent.Agent(ippo_per_agent.make_envs(ippo_per_agent.Args(), 1), ippo_per_agent.Args())
    args = ippo_per_agent.Args(lr_schedule=("kl-adaptive", "constant", "kl-adaptive"), lr_kl_target=0.01)
    _, optimizer = networks_and_optimizer(agent, 1e-3)
    ippo_per_agent.adapt_learning_rate(optimizer, torch.tensor([0.03, 0.03, 0.001]), np.ones(3, bool), args)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([1e-3 / 1.5, 1e-3, 1.5e-3])
    ippo_per_agent.adapt_learning_rate(optimizer, torch.tensor([0.015, 0.03, 0.006]), np.ones(3, bool), args)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([1e-3 / 1.5, 1e-3, 1.5e-3])
    ippo_per_agent.adapt_learning_rate(
        optimizer, torch.tensor([0.03, 0.03, 0.001]), np.array([False, True, True]), args
    )
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([1e-3 / 1.5, 1e-3, 1.5e-3 * 1.5])
    for _ in range(20):
        ippo_per_agent.adapt_learning_rate(optimizer, torch.tensor([0.03, 0.03, 0.001]), np.ones(3, bool), args)
    assert [g["lr"] for g in optimizer.param_groups] == [1e-6, 1e-3, 1e-2]  # skrl's bounds


def test_kl_adaptive_rate_follows_every_epoch(tmp_path):
    args = ippo_per_agent.Args(
        **SMALL, lr_schedule=("kl-adaptive",), lr_kl_target=1e-12, update_epochs=(3,), runs_dir=str(tmp_path)
    )
    groups = load_checkpoint(ippo_per_agent.main(args))["modules"]["optimizer"]["param_groups"]
    assert [g["lr"] for g in groups] == pytest.approx([5e-4 / 1.5**6] * 3)  # three epochs of two updates, all too far


def test_the_rate_of_an_agent_that_has_stopped_stays():
    flags = {"lr_schedule": ("kl-adaptive",), "lr_kl_target": 1e-12, "update_epochs": (3,), "num_minibatches": 2}
    args = ippo_per_agent.Args(**SMALL, **flags, target_kl=(0.0, 1e-9, 0.0))
    agent, _, batch = collected(args)
    networks, optimizer = networks_and_optimizer(agent, 1e-3)
    ippo_per_agent.update(agent, networks, optimizer, batch, args)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == pytest.approx([1e-3 / 1.5**3, 1e-3 / 1.5, 1e-3 / 1.5**3])  # it stopped in the first epoch


def test_the_rate_follows_the_divergence_of_the_latest_epoch_alone(monkeypatch):
    args = ippo_per_agent.Args(**SMALL, lr_schedule=("kl-adaptive",), update_epochs=(3,), num_minibatches=2)
    agent, _, batch = collected(args)
    loss, minibatches, epochs = ippo_per_agent.ippo_loss, [], []

    def spy(*given):
        minibatches.append(loss(*given))
        return minibatches[-1]

    monkeypatch.setattr(ippo_per_agent, "ippo_loss", spy)
    monkeypatch.setattr(ippo_per_agent, "adapt_learning_rate", lambda optimizer, kl, *_: epochs.append(kl))
    ippo_per_agent.update(agent, *networks_and_optimizer(agent, 1e-3), batch, args)
    kl = torch.stack([stats["approx_kl"] for _, stats in minibatches]).unflatten(0, (3, 2)).mean(1)
    torch.testing.assert_close(torch.stack(epochs), kl)


def test_linear_and_constant_schedules_per_agent(tmp_path):
    schedule = ("linear", "constant", "linear")
    args = ippo_per_agent.Args(**SMALL, lr_schedule=schedule, learning_rate=(1e-3, 2e-3, 3e-3), runs_dir=str(tmp_path))
    groups = load_checkpoint(ippo_per_agent.main(args))["modules"]["optimizer"]["param_groups"]
    assert [g["lr"] for g in groups] == pytest.approx([0.5e-3, 2e-3, 1.5e-3])  # in the second of two updates


def test_a_rollout_after_the_warm_up_is_the_policys():
    """A resumed run counts its steps from the beginning, too; this rollout has one step left of the warm-up."""
    args = ippo_per_agent.Args(**SMALL, random_timesteps=404)
    envs = ippo_per_agent.make_envs(args, 4)
    torch.manual_seed(0)
    agent, rollout, run = ippo_per_agent.Agent(envs, args), make_rollout(ippo_per_agent, args, envs), Quiet()
    with torch.no_grad():
        agent.actor[-1].weight *= 1e6
    run.step = 400
    ippo_per_agent.collect(agent, envs, envs.reset(seed=1), rollout, args, run)
    with torch.no_grad():
        best = agent.actor(torch.from_numpy(rollout.obs).flatten(0, 1)).argmax(-1).view(50, 4, 3).numpy()
    assert (rollout.action[0] != best[0]).any() and (rollout.action[1:] == best[1:]).mean() > 0.98  # but for near ties


def test_warm_up_acts_at_random_and_does_not_learn(toy, tmp_path):
    args = ippo_per_agent.Args(env_id=toy, **SMALL, random_timesteps=200, runs_dir=str(tmp_path))
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
        "the last rollout follows the warm-up": {"random_timesteps": 400},
        "the last rollout is in time": {"learning_starts": 600, "total_timesteps": 799},
    }.items():
        sizes = SMALL | {"total_timesteps": 600, "update_epochs": (1,), "num_minibatches": 1} | changes
        run_args = ippo_per_agent.Args(env_id=toy, **sizes, runs_dir=str(tmp_path))
        states = load_checkpoint(ippo_per_agent.main(run_args))["modules"]["optimizer"]["state"].values()
        (trained[name],) = {int(state["step"]) for state in states}  # Adam's, of each tensor
    assert list(trained.values()) == [1, 1, 2, 3, 1, 1]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("env_id", ["mpe/simple_spread_v3", "toy/each"])
def test_two_updates_that_two_runs_repeat(env_id, shared, toy, tmp_path):
    args = ippo_per_agent.Args(env_id=env_id, **SMALL, share_parameters=shared, runs_dir=str(tmp_path))
    one, same = (load_checkpoint(ippo_per_agent.main(args)) for _ in range(2))
    assert one["step"] == 400
    for key, value in one["modules"]["agent"].items():
        assert torch.isfinite(value).all() and torch.equal(value, same["modules"]["agent"][key])


def test_evaluations_are_greedy(tmp_path, monkeypatch):
    plain, greedy = ippo_per_agent.make_policy, []
    spy = lambda agent, is_greedy=True: (greedy.append(is_greedy), plain(agent, is_greedy))[1]  # noqa: E731
    monkeypatch.setattr(ippo_per_agent, "make_policy", spy)
    settings_ = {"eval_interval": 200, "eval_episodes": 1, "runs_dir": str(tmp_path)}
    ippo_per_agent.main(ippo_per_agent.Args(**SMALL | settings_))
    assert len(greedy) == 3 and all(greedy)


def test_a_resumed_run_goes_on_and_can_be_played(tmp_path, capsys):
    settings_ = {"lr_schedule": ("constant",), "learning_rate": (1e-3, 5e-4, 2e-3), "runs_dir": str(tmp_path)}
    folder = ippo_per_agent.main(ippo_per_agent.Args(**SMALL, **settings_))
    before = load_checkpoint(folder)["modules"]
    ippo_per_agent.main(ippo_per_agent.Args(**SMALL | {"total_timesteps": 600}, **settings_, resume=folder))
    after = load_checkpoint(folder)["modules"]
    for key, x in before["agent"].items():
        assert (after["agent"][key] != x).flatten(1).any(1).all()  # every network went on
    steps = [[state["step"].item() for state in saved["optimizer"]["state"].values()] for saved in (before, after)]
    assert set(steps[1]) == {1.5 * steps[0][0]}
    metrics = enjoy.main(enjoy.Args(folder, episodes=2))
    assert "ippo_per_agent at step 600, 2 episodes" in capsys.readouterr().out and metrics["eval/ep_length"] == 25


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--gamma 0.9 0.9", "--gamma takes one value or one for each of 3 agents, not 2"),
        ("--share-parameters --clip-coef 0.1 0.2 0.3", "--clip-coef takes one value with --share-parameters, not 3"),
        ("--num-envs 3 --num-steps 5", "15 steps of a rollout must be a multiple (2+) of --num-minibatches 2"),
        ("--num-envs 1 --num-steps 2", "2 steps of a rollout must be a multiple (2+) of --num-minibatches 2"),
        ("--total-timesteps 2399 --learning-starts 1601", "more than the 1600 steps of the run: nothing"),
        ("--total-timesteps 2399 --random-timesteps 801", "more than the 800 steps before the last rollout: nothing"),
        ("--target-kl 0.1 -0.5 0.1", "--target-kl must be at least 0"),
        ("--clip-predicted-values -0.5", "--clip-predicted-values must be at least 0"),
        ("--env-id mpe/simple_spread_v3?continuous_actions=True", "this script needs discrete ones"),
    ],
)
def test_bad_input(flags, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ippo_per_agent.py", "--runs-dir", str(tmp_path / "runs"), *flags.split()])
    with pytest.raises(SystemExit) as exit_:
        launch(ippo_per_agent.main, ippo_per_agent.Args)
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and text in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["gamma", "gae_lambda", "reward_scale"])
def test_settings_of_rewards_are_each_agents_own_even_if_networks_are_shared(name, tmp_path):
    args = ippo_per_agent.Args(**SMALL, **{name: (0.9, 0.8, 0.7)}, share_parameters=True, runs_dir=str(tmp_path))
    assert load_checkpoint(ippo_per_agent.main(args))["step"] == 400


@pytest.mark.learning
def test_learns_simple_spread_in_seconds(tmp_path):
    args = ippo_per_agent.Args(total_timesteps=64_000, learning_rate=(1e-3,), runs_dir=str(tmp_path), eval_episodes=0)
    folder = ippo_per_agent.main(args)
    envs = ippo_per_agent.make_envs(args, 32)
    agent = ippo_per_agent.Agent(envs, args)
    untrained = evaluate(envs, ippo_per_agent.make_policy(agent, greedy=False), 320, seed=7)
    agent.load_state_dict(load_checkpoint(folder)["modules"]["agent"])
    trained = evaluate(envs, ippo_per_agent.make_policy(agent, greedy=False), 320, seed=7)
    error = np.hypot(untrained["eval/std_ep_reward"], trained["eval/std_ep_reward"]) / np.sqrt(320)
    assert trained["eval/ep_reward"] - untrained["eval/ep_reward"] > 5 * error
