"""ippo_continuous_action.py: normal policies, units and bounds, scaled rewards, deaths; the rest is ippo.py's.

`# proves NAME` above a test: it fails when that detail is taken out of the script.
"""

import sys

from cleanmarl import enjoy, ippo_continuous_action
from cleanmarl.cli import launch
from cleanmarl.evaluate import evaluate
from cleanmarl.ippo_continuous_action import Args
from cleanmarl.layers import clip_grads_
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
from toys import HIGH, LOW, Quiet, make_rollout

SPREAD = Args.env_id
SMALL = {"total_timesteps": 400, "num_envs": 4, "num_steps": 50, "eval_episodes": 0}
REAL = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]], bool)


@pytest.fixture
def bounded(toy):
    """Toy with continuous actions, each agent with a reward of its own."""
    return f"{toy}?continuous=True"


def collected(args, scale=100):
    """Agent, environments, rollout and batch of one rollout with policies far from their first ones."""
    torch.manual_seed(0)
    envs = ippo_continuous_action.make_envs(args, args.num_envs)
    agent = ippo_continuous_action.Agent(envs, args)
    with torch.no_grad():
        agent.actor[-1].weight *= scale
        agent.critic[-1].bias += 1  # the dead see zeros, which are to have a value
        agent.log_std.normal_(-0.5, 0.2)
        if args.normalize_obs:
            agent.obs_stats.mean.normal_()
    rollout = make_rollout(ippo_continuous_action, args, envs)
    now = ippo_continuous_action.collect(agent, envs, envs.reset(seed=1), rollout, args, Quiet())
    return agent, envs, rollout, ippo_continuous_action.estimate(agent, rollout, now[0], args)


def normal_policy(agent, batch):
    return torch.distributions.Normal(agent.actor(batch.obs), agent.log_std.exp().expand(3, -1))


# proves continuous-1, continuous-2, continuous-3
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("env_id", [SPREAD, "toy/each?continuous=True"])
def test_log_probabilities_and_entropy_are_those_of_independent_normals(env_id, shared, bounded):
    args = Args(env_id=env_id, **SMALL, share_parameters=shared)
    agent, envs, _, batch = collected(args)
    policy, mask = normal_policy(agent, batch), torch.from_numpy(envs.real_actions)
    expected = (policy.log_prob(batch.action) * mask).sum(-1)
    torch.testing.assert_close(batch.log_prob, expected, atol=1e-4, rtol=1e-4)
    _, stats = ippo_continuous_action.ippo_loss(agent, batch, args)
    entropy = agent.mean((policy.entropy() * mask).sum(-1), batch.alive).mean()
    torch.testing.assert_close(stats["entropy"], entropy)
    assert stats["approx_kl"].abs() < 1e-6 and stats["clipfrac"] == 0  # the ratio is 1
    z = ((batch.action - policy.mean) / policy.stddev)[:, torch.from_numpy(envs.real_actions)]
    assert z.mean().abs() < 0.1 and (z.std() - 1).abs() < 0.1  # the actions that were taken are samples of it


# proves continuous-5
def test_the_environment_gets_actions_in_its_unit_and_clipped_the_rollout_keeps_them(bounded):
    _, envs, rollout, _ = collected(Args(env_id=bounded, **SMALL))
    actions = np.stack(envs.actions)
    middle = np.float32([[1, 1, 0, 0], [0.5] * 4, [0] * 4])
    half = np.float32([[3, 3, 0, 0], [0.5] * 4, [1, 1, 1, 0]])  # 1 where a bound is infinite: the same unit
    np.testing.assert_allclose(actions, (middle + half * rollout.action).clip(LOW, HIGH), rtol=1e-5, atol=1e-6)
    outside = (np.abs(rollout.action) > 1)[..., REAL & np.isfinite(HIGH - LOW)]
    assert 0.05 < outside.mean() < 0.9


def test_policies_start_in_the_middle_of_the_bounds():
    args = Args()
    envs = ippo_continuous_action.make_envs(args, 4)  # [0, 1]
    agent = ippo_continuous_action.Agent(envs, args)
    actions = ippo_continuous_action.make_policy(agent)(*envs.reset(seed=1), None)
    assert abs(actions - 0.5).max() < 0.05
    minus, plus = (agent.env_action(np.full((1, 3, 5), x, np.float32)) for x in (-1, 1))
    assert (minus == 0).all() and (plus == 1).all()


# proves continuous-6, continuous-7
@pytest.mark.parametrize("shared", [True, False])
def test_observations_are_normalised_by_the_rollouts_before_and_clipped(shared, bounded, tmp_path):
    args = Args(env_id=bounded, **SMALL, share_parameters=shared, runs_dir=str(tmp_path))
    seen, estimate = [], ippo_continuous_action.estimate
    with pytest.MonkeyPatch.context() as patch:
        copy = lambda rollout: type(rollout)(*(x.copy() for x in rollout))  # noqa: E731
        spy = lambda agent, rollout, *rest: (seen.append(copy(rollout)), estimate(agent, rollout, *rest))[1]  # noqa: E731
        patch.setattr(ippo_continuous_action, "estimate", spy)
        saved = load_checkpoint(ippo_continuous_action.main(args))["modules"]["agent"]
    obs, alive = (np.concatenate([getattr(r, name) for r in seen]) for name in ("obs", "agent_mask"))
    counted = alive[..., None] & (np.arange(3) < np.array([2, 3, 1])[:, None])  # padding is not
    for m, d in np.ndindex(saved["obs_stats.mean"].shape):
        agents = slice(None) if shared else m
        values = obs[:, :, agents, d][counted[:, :, agents, d]]
        mean, var = (values.mean(), values.var()) if len(values) else (0, 1)
        np.testing.assert_allclose(saved["obs_stats.mean"][m, d], mean, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(saved["obs_stats.var"][m, d], var, rtol=1e-3, atol=1e-3)
        assert saved["obs_stats.count"][m, d] == len(values)
    envs = ippo_continuous_action.make_envs(args, 4)
    agent = ippo_continuous_action.Agent(envs, args)
    agent.load_state_dict(saved)
    evaluate(envs, ippo_continuous_action.make_policy(agent), 8, seed=1)  # frozen at evaluation
    assert all(torch.equal(saved[key], value) for key, value in agent.state_dict().items())
    mean, std = saved["obs_stats.mean"], (saved["obs_stats.var"] + 1e-8).sqrt()
    for obs in (torch.randn(4, 3, 3), torch.randn(4, 3, 3) * 1e8):
        for network in (agent.actor, agent.critic):
            torch.testing.assert_close(network(obs), network[1:](((obs - mean) / std).clip(-10, 10)))


def reference_returns(rewards, done, gamma):
    """Discounted returns of the episodes under way after each step, (T, N, A), in float64."""
    running, returns = np.zeros(rewards.shape[1:]), []
    for reward, ended in zip(rewards.astype(np.float64), done):
        running = running * gamma + reward
        returns.append(running)
        running = np.where(ended, 0, running)
    return np.stack(returns)


# proves continuous-8, continuous-9
@pytest.mark.parametrize("shared", [True, False])
def test_rewards_are_scaled_by_each_agents_discounted_return_and_clipped(shared, bounded, monkeypatch):
    """Rewards of unequal scales, with outliers."""
    rng, reward_of = (
        np.random.default_rng(0),
        ippo_continuous_action.make_envs(Args(env_id=bounded), 1).__class__.reward,
    )

    def uneven(envs, alive):
        outlier = np.where(rng.random(alive.shape) < 0.01, 1e3, 1)
        return np.float32(reward_of(envs, alive) * [1, 20, -300] * outlier * rng.normal(1, 0.5, alive.shape))

    args = Args(
        env_id=bounded,
        **SMALL | {"num_steps": 100},
        share_parameters=shared,
        time_limit_bootstrap=False,
        normalize_reward=True,
        gamma=0.9,
    )
    torch.manual_seed(0)
    envs = ippo_continuous_action.make_envs(args, 4)
    monkeypatch.setattr(type(envs), "reward", uneven)
    agent = ippo_continuous_action.Agent(envs, args)
    start, rollouts = envs.reset(), []
    for _ in range(2):  # the second rollout goes on in the middle of episodes
        rollout = make_rollout(ippo_continuous_action, args, envs)
        rollouts.append(rollout)
        start = ippo_continuous_action.collect(agent, envs, start, rollout, args, Quiet())
        rewards = np.stack(envs.rewards)
        done, alive = (np.concatenate([getattr(r, name) for r in rollouts]) for name in ("done", "agent_mask"))
        returns = reference_returns(rewards, done, 0.9)
        deviation = [returns[..., a][alive[..., a]].std() for a in range(3)]  # of living agents, in all environments
        expected = (rewards[-100:] / np.sqrt(np.square(deviation) + 1e-8)).clip(-10, 10)
        np.testing.assert_allclose(rollout.reward, expected, rtol=1e-3, atol=1e-5)
    assert (np.abs(rollout.reward) == 10).any()  # there were outliers
    assert not rollout.reward[~rollout.agent_mask].any()


# proves ippo-5
@pytest.mark.parametrize("normalize_reward", [True, False])
def test_death_cuts_and_time_limits_bootstrap_in_the_unit_of_the_values(normalize_reward, bounded):
    args = Args(env_id=bounded, **SMALL, gamma=0.9, normalize_reward=normalize_reward, normalize_value=False)
    agent, _, rollout, _ = collected(args)
    _, _, without, _ = collected(Args(**vars(args) | {"time_limit_bootstrap": False}))
    time = np.arange(50) % 6
    assert (rollout.done[:, 0, 0] == (time == 5)).all()
    assert (rollout.done[:, 0, 1] == np.isin(time, [2, 5])).all()  # its death, and the end that it does not see
    assert (rollout.reward[:, 0] == without.reward[:, 0]).all()  # environment 0 terminates: nothing to add
    final_obs = torch.zeros(1, 3, 3)
    final_obs[0, 0, :2] = 6  # who died with the last step sees nothing, and has no value beyond it
    added = [0.9 * agent.value(final_obs)[0, 0].item(), 0, 0]
    np.testing.assert_allclose(rollout.reward[5, 1] - without.reward[5, 1], added, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shared", [True, False])
def test_the_policy_that_plays_is_the_policy_that_learns(shared, bounded):
    args = Args(env_id=bounded, **SMALL, share_parameters=shared)
    agent, _, rollout, batch = collected(args)
    obs = rollout.obs.reshape(-1, 3, 3)
    mean = normal_policy(agent, batch).mean.detach().numpy()
    greedy = ippo_continuous_action.make_policy(agent)(obs, {}, None)
    np.testing.assert_allclose(greedy, agent.env_action(mean), atol=1e-4, rtol=1e-4)
    sampled = ippo_continuous_action.make_policy(agent, greedy=False)(obs, {}, None)[:, 2, 0]  # unbounded: not clipped
    std = agent.log_std.exp()[-1, 0].item()
    assert (sampled - mean[:, 2, 0]).std() == pytest.approx(std, rel=0.2)


@pytest.mark.parametrize("shared", [True, False])
def test_dead_agents_and_missing_components_add_nothing_to_the_policy(shared, bounded):
    args = Args(env_id=bounded, **SMALL, share_parameters=shared, ent_coef=0.1)
    agent, envs, _, batch = collected(args)
    assert 0 < (batch.alive[:, 1] == 0).sum() < 200 and (batch.alive[:, [0, 2]] == 1).all()
    loss, stats = ippo_continuous_action.ippo_loss(agent, batch, args)
    gradients = torch.autograd.grad(loss, [agent.log_std, *agent.actor.parameters()])
    noise = (1 - batch.alive) * 1e3
    missing = 7.0 * ~torch.from_numpy(envs.real_actions)
    other = batch._replace(
        obs=batch.obs + noise[..., None],
        advantage=batch.advantage + noise,
        return_=batch.return_ - noise,
        value=batch.value + noise,
        log_prob=batch.log_prob - noise,
        action=batch.action + missing,
    )
    loss2, stats2 = ippo_continuous_action.ippo_loss(agent, other, args)
    torch.testing.assert_close(loss, loss2)
    torch.testing.assert_close(stats, stats2)
    for a, b in zip(gradients, torch.autograd.grad(loss2, [agent.log_std, *agent.actor.parameters()])):
        torch.testing.assert_close(a, b)
    if not shared:
        assert gradients[0][2, 3] == 0 and (gradients[0][2, :3] != 0).all()  # log_std of agent 2: three components


# proves continuous-4
def test_policies_and_critics_are_separate(bounded):
    agent, _, _, batch = collected(Args(env_id=bounded, **SMALL))
    for network, other in ((agent.actor, agent.critic), (agent.critic, agent.actor)):
        gradients = torch.autograd.grad(network(batch.obs).sum(), list(other.parameters()), allow_unused=True)
        assert all(g is None for g in gradients)
    assert [type(layer).__name__ for layer in agent.actor][2:] == ["StackedLinear", "Tanh"] * 2 + ["StackedLinear"]


# proves continuous-2
@pytest.mark.parametrize("shared", [True, False])
def test_the_deviation_is_a_parameter_of_each_network_that_is_clipped_and_trained(shared, bounded, tmp_path):
    args = Args(env_id=bounded, **SMALL, share_parameters=shared, runs_dir=str(tmp_path), max_grad_norm=1e-9)
    agent = ippo_continuous_action.Agent(ippo_continuous_action.make_envs(args, 1), args)
    assert agent.log_std.shape == (1 if shared else 3, 4) and not agent.log_std.any()
    agent.log_std.grad = torch.ones(3, 4).index_fill(0, torch.tensor(2), 1e3)[-len(agent.log_std) :]
    clip_grads_(agent, 10.0)
    norms = agent.log_std.grad.norm(dim=1)  # of independent agents one does not shorten the others' steps
    torch.testing.assert_close(norms, torch.tensor([10.0] if shared else [2.0, 2.0, 10.0]))
    saved = load_checkpoint(ippo_continuous_action.main(args))["modules"]["agent"]
    assert 0 < saved["log_std"].abs().max() < 1e-4  # clipped to next to nothing, below Adam's epsilon


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "env_id", ["mpe/simple_speaker_listener_v4?continuous_actions=True", "toy/each?continuous=True"]
)
def test_two_updates_that_two_runs_repeat(env_id, shared, bounded, tmp_path):
    args = Args(env_id=env_id, **SMALL, share_parameters=shared, runs_dir=str(tmp_path))
    one, same = (load_checkpoint(ippo_continuous_action.main(args)) for _ in range(2))
    assert one["step"] == 400
    for key, value in one["modules"]["agent"].items():
        assert torch.isfinite(value).all() and torch.equal(value, same["modules"]["agent"][key])
    assert (one["modules"]["agent"]["log_std"] != 0).any()


def test_multiwalker(tmp_path):
    pytest.importorskip("pettingzoo.sisl")
    pytest.importorskip("Box2D")
    small = SMALL | {"num_envs": 2, "total_timesteps": 200}
    folder = ippo_continuous_action.main(Args(env_id="pz/sisl/multiwalker_v9", **small, runs_dir=str(tmp_path)))
    assert load_checkpoint(folder)["step"] == 200


def test_a_resumed_run_goes_on_and_can_be_played(tmp_path, capsys):
    folder = ippo_continuous_action.main(Args(**SMALL, runs_dir=str(tmp_path)))
    ippo_continuous_action.main(Args(**SMALL | {"total_timesteps": 600}, runs_dir=str(tmp_path), resume=folder))
    after = load_checkpoint(folder)
    assert after["step"] == 600 and (after["modules"]["agent"]["obs_stats.count"] == 1800).all()
    metrics = enjoy.main(enjoy.Args(folder, episodes=2))
    assert "ippo_continuous_action at step 600, 2" in capsys.readouterr().out and metrics["eval/ep_length"] == 25


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--env-id mpe/simple_spread_v3", "this script needs continuous ones"),
        ("--total-timesteps 99", "--total-timesteps 99 is less than one rollout of"),
    ],
)
def test_bad_input(flags, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ippo_continuous_action.py", *flags.split(), "--runs-dir", str(tmp_path / "r")])
    with pytest.raises(SystemExit) as exit_:
        launch(ippo_continuous_action.main, Args)
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and text in error and error.count("\n") == 1
    assert not (tmp_path / "r").exists()


@pytest.mark.learning
def test_learns_simple_spread_in_seconds(tmp_path):
    args = Args(total_timesteps=96_000, runs_dir=str(tmp_path), eval_episodes=0)
    folder = ippo_continuous_action.main(args)
    envs = ippo_continuous_action.make_envs(args, 32)
    agent = ippo_continuous_action.Agent(envs, args)
    untrained = evaluate(envs, ippo_continuous_action.make_policy(agent, greedy=False), 320, seed=7)
    agent.load_state_dict(load_checkpoint(folder)["modules"]["agent"])
    trained = evaluate(envs, ippo_continuous_action.make_policy(agent, greedy=False), 320, seed=7)
    error = np.hypot(untrained["eval/std_ep_reward"], trained["eval/std_ep_reward"]) / np.sqrt(320)
    assert trained["eval/ep_reward"] - untrained["eval/ep_reward"] > 5 * error
