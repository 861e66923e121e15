"""mappo_continuous_action.py: normal policies, units and bounds, normalised inputs, deaths; the rest is mappo.py's.

`# proves NAME` above a test: it fails when that detail is taken out of the script.
"""

import sys

from cleanmarl import enjoy, mappo_continuous_action
from cleanmarl.cli import launch
from cleanmarl.evaluate import evaluate
from cleanmarl.layers import clip_grads_
from cleanmarl.mappo_continuous_action import Args
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
from toys import Quiet, make_rollout

SPREAD = Args.env_id
SMALL = {"total_timesteps": 400, "num_envs": 4, "num_steps": 50, "eval_episodes": 0}


@pytest.fixture
def bounded(team):
    """Toy with continuous actions, whose reward is the team's."""
    return f"{team}?continuous=True"


def collected(args, scale=100):
    """Agent, environments, rollout and batch of one rollout with policies far from their first ones."""
    torch.manual_seed(0)
    envs = mappo_continuous_action.make_envs(args, args.num_envs)
    agent = mappo_continuous_action.Agent(envs, args)
    with torch.no_grad():
        agent.actor[-1].weight *= scale
        agent.log_std.normal_(-0.5, 0.2)
        if args.normalize_obs:
            agent.obs_stats.mean.normal_()
            agent.state_stats.var.uniform_(0.5, 2)
    rollout = make_rollout(mappo_continuous_action, args, envs)
    now = mappo_continuous_action.collect(agent, envs, envs.reset(seed=1), rollout, args, Quiet())
    return agent, envs, rollout, mappo_continuous_action.estimate(agent, rollout, *now, args)


def normal_policy(agent, batch):
    return torch.distributions.Normal(agent.actor(batch.obs), agent.log_std.exp().expand(3, -1))


# proves continuous-1, continuous-2, continuous-3
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("env_id", [SPREAD, "toy/team?continuous=True"])
def test_log_probabilities_and_entropy_are_those_of_independent_normals(env_id, shared, bounded):
    args = Args(env_id=env_id, **SMALL, share_parameters=shared)
    agent, envs, _, batch = collected(args)
    policy, mask = normal_policy(agent, batch), torch.from_numpy(envs.real_actions)
    expected = (policy.log_prob(batch.action) * mask).sum(-1)
    torch.testing.assert_close(batch.log_prob, expected, atol=1e-4, rtol=1e-4)
    _, stats = mappo_continuous_action.mappo_loss(agent, batch, args)
    entropy = agent.mean((policy.entropy() * mask).sum(-1), batch.alive).mean()
    torch.testing.assert_close(stats["entropy"], entropy)
    assert stats["approx_kl"].abs() < 1e-6 and stats["clipfrac"] == 0  # the ratio is 1
    z = ((batch.action - policy.mean) / policy.stddev)[:, torch.from_numpy(envs.real_actions)]
    assert z.mean().abs() < 0.1 and (z.std() - 1).abs() < 0.1  # the actions that were taken are samples of it


# proves continuous-5
def test_actions_reach_the_environment_in_its_unit_and_clipped(bounded):
    args = Args(env_id=bounded, **SMALL)
    agent, envs, rollout, _ = collected(args)
    action = np.zeros((1, 3, 4)) + np.array([-1.0, 0.5, 3.0, 0.0])
    # bounded, bounded and clipped, unbounded; 0 where there is none
    expected = [[-2, 2.5, 0, 0], [0, 0.75, 1, 0.5], [-1, 0.5, 3, 0]]
    np.testing.assert_allclose(agent.env_action(action)[0], expected)
    assert agent.env_action(action * 5)[0, 2, 0] == -5
    played = np.stack(envs.actions)
    assert (played >= envs.single_action_space.low).all() and (played <= envs.single_action_space.high).all()
    assert np.abs(rollout.action[:, :, 1]).max() > 1.5  # what is learned from is not clipped
    np.testing.assert_array_equal(played, agent.env_action(rollout.action))


# proves continuous-6, continuous-7
@pytest.mark.parametrize("shared", [True, False])
def test_inputs_are_normalised_by_the_statistics_of_living_agents(shared, bounded, tmp_path):
    args = Args(env_id=bounded, **SMALL, share_parameters=shared, runs_dir=str(tmp_path))
    seen, estimate = [], mappo_continuous_action.estimate
    with pytest.MonkeyPatch.context() as patch:
        copy = lambda rollout: type(rollout)(*(x.copy() for x in rollout))  # noqa: E731
        spy = lambda agent, rollout, *rest: (seen.append(copy(rollout)), estimate(agent, rollout, *rest))[1]  # noqa: E731
        patch.setattr(mappo_continuous_action, "estimate", spy)
        saved = load_checkpoint(mappo_continuous_action.main(args))["modules"]["agent"]
    obs, alive = (np.concatenate([getattr(r, name) for r in seen]) for name in ("obs", "agent_mask"))
    counted = alive[..., None] & (np.arange(3) < np.array([2, 3, 1])[:, None])  # padding is not
    for m, d in np.ndindex(saved["obs_stats.mean"].shape):
        agents = slice(None) if shared else m
        values = obs[:, :, agents, d][counted[:, :, agents, d]]
        mean, var = (values.mean(), values.var()) if len(values) else (0, 1)
        np.testing.assert_allclose(saved["obs_stats.mean"][m, d], mean, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(saved["obs_stats.var"][m, d], var, rtol=1e-3, atol=1e-3)
        assert saved["obs_stats.count"][m, d] == len(values)
    state = np.concatenate([r.state for r in seen]).reshape(-1, 2)
    np.testing.assert_allclose(saved["state_stats.mean"][0], state.mean(0), rtol=1e-3)
    np.testing.assert_allclose(saved["state_stats.var"][0], state.var(0), rtol=1e-2)

    envs = mappo_continuous_action.make_envs(args, 4)
    agent = mappo_continuous_action.Agent(envs, args)
    agent.load_state_dict(saved)
    evaluate(envs, mappo_continuous_action.make_policy(agent), 8, seed=1)  # frozen at evaluation
    assert all(torch.equal(saved[key], value) for key, value in agent.state_dict().items())
    obs, alive, state = torch.randn(4, 3, 3), torch.tensor([1.0, 0, 1]).expand(4, 3), torch.randn(4, 2)
    mean, std = saved["obs_stats.mean"], (saved["obs_stats.var"] + 1e-8).sqrt()
    seen = ((obs - mean) / std).clip(-10, 10)
    torch.testing.assert_close(agent.actor(obs), agent.actor[1:](seen))
    of_state = (state - saved["state_stats.mean"]) / (saved["state_stats.var"] + 1e-8).sqrt()
    parts = of_state.clip(-10, 10)[:, None] * alive[..., None], seen * alive[..., None]  # the dead see zeros
    torch.testing.assert_close(agent.normalized_value(state, obs, alive), agent.critic(parts).squeeze(-1))
    torch.testing.assert_close(agent.actor(obs * 1e8), agent.actor[1:](((obs * 1e8 - mean) / std).clip(-10, 10)))


@pytest.mark.parametrize("shared", [True, False])
def test_the_policy_that_plays_is_the_policy_that_learns(shared, bounded):
    args = Args(env_id=bounded, **SMALL, share_parameters=shared)
    agent, _, rollout, batch = collected(args)
    obs = rollout.obs.reshape(-1, 3, 3)
    mean = normal_policy(agent, batch).mean.detach().numpy()
    greedy = mappo_continuous_action.make_policy(agent)(obs, {}, None)
    np.testing.assert_allclose(greedy, agent.env_action(mean), atol=1e-4, rtol=1e-4)
    sampled = mappo_continuous_action.make_policy(agent, greedy=False)(obs, {}, None)[:, 2, 0]  # unbounded: not clipped
    std = agent.log_std.exp()[-1, 0].item()
    assert (sampled - mean[:, 2, 0]).std() == pytest.approx(std, rel=0.2)


def test_a_dead_agent_earns_what_the_living_do(bounded):
    args = Args(env_id=bounded, **SMALL, time_limit_bootstrap=False)
    _, _, rollout, _ = collected(args)
    assert not rollout.agent_mask[..., 1].all() and (rollout.reward[..., 1] > 0).all()
    assert (rollout.reward[..., 1] == rollout.reward[..., 0]).all()


def test_a_time_limit_bootstraps_from_the_final_state(bounded):
    args = Args(env_id=bounded, **SMALL, gamma=0.9, normalize_obs=False)
    agent, envs, rollout, _ = collected(args)
    _, _, without, _ = collected(Args(**{**vars(args), "time_limit_bootstrap": False}))
    assert (rollout.reward[:, 0] == without.reward[:, 0]).all()  # environment 0 terminates: nothing to add
    final_obs, final_state = envs.ends[0]
    alive = np.array([[True, False, False]])  # agent 1 is dead, agent 2 died with the last step
    seen = mappo_continuous_action.to_tensors(agent, final_state[[1]], final_obs[[1]], alive)
    expected = 0.9 * agent.value(*seen).detach().numpy()[0]
    np.testing.assert_allclose(rollout.reward[5, 1] - without.reward[5, 1], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shared", [True, False])
def test_dead_agents_and_missing_components_add_nothing_to_the_policy(shared, bounded):
    args = Args(env_id=bounded, **SMALL, share_parameters=shared, ent_coef=0.1)
    agent, envs, _, batch = collected(args)
    assert 0 < (batch.alive[:, 1] == 0).sum() < 200 and (batch.alive[:, [0, 2]] == 1).all()
    loss, stats = mappo_continuous_action.mappo_loss(agent, batch, args)
    gradients = torch.autograd.grad(loss, [agent.log_std, *agent.actor.parameters()])
    noise = (1 - batch.alive) * 1e3
    missing = 7.0 * ~torch.from_numpy(envs.real_actions)
    other = batch._replace(
        obs=batch.obs + noise[..., None],
        advantage=batch.advantage + noise,
        log_prob=batch.log_prob - noise,
        action=batch.action + missing,
    )
    loss2, stats2 = mappo_continuous_action.mappo_loss(agent, other, args)
    torch.testing.assert_close(loss, loss2)
    torch.testing.assert_close(stats, stats2)
    for a, b in zip(gradients, torch.autograd.grad(loss2, [agent.log_std, *agent.actor.parameters()])):
        torch.testing.assert_close(a, b)
    if not shared:
        assert gradients[0][2, 3] == 0 and (gradients[0][2, :3] != 0).all()  # log_std of agent 2: three components


def test_an_update_of_the_statistics_moves_no_value(bounded):
    for shared in (True, False):
        agent, _, _, batch = collected(Args(env_id=bounded, **SMALL, share_parameters=shared))
        seen = batch.state, batch.obs, batch.alive
        torch.testing.assert_close(agent.normalized_value(*seen), batch.value, atol=1e-4, rtol=1e-4)
        assert (agent.value_stats.count == (600 if shared else 200)).all()


# proves continuous-4
def test_policies_and_critics_are_separate(bounded):
    agent, _, _, batch = collected(Args(env_id=bounded, **SMALL))
    values = agent.normalized_value(batch.state, batch.obs, batch.alive)
    for output, others in ((agent.actor(batch.obs), agent.critic), (values, agent.actor)):
        gradients = torch.autograd.grad(output.sum(), list(others.parameters()), allow_unused=True)
        assert all(g is None for g in gradients)
    assert [type(layer).__name__ for layer in agent.actor][2:] == ["StackedLinear", "Tanh"] * 2 + ["StackedLinear"]


# proves continuous-2
@pytest.mark.parametrize("shared", [True, False])
def test_the_deviation_is_a_parameter_of_each_network_that_is_clipped_and_trained(shared, bounded, tmp_path):
    args = Args(env_id=bounded, **SMALL, share_parameters=shared, runs_dir=str(tmp_path), max_grad_norm=1e-9)
    agent = mappo_continuous_action.Agent(mappo_continuous_action.make_envs(args, 1), args)
    assert agent.log_std.shape == (1 if shared else 3, 4) and not agent.log_std.any()
    agent.log_std.grad = torch.ones(3, 4).index_fill(0, torch.tensor(2), 1e3)[-len(agent.log_std) :]
    clip_grads_(agent, 10.0)
    norms = agent.log_std.grad.norm(dim=1)  # of independent agents one does not shorten the others' steps
    torch.testing.assert_close(norms, torch.tensor([10.0] if shared else [2.0, 2.0, 10.0]))
    saved = load_checkpoint(mappo_continuous_action.main(args))["modules"]["agent"]
    assert 0 < saved["log_std"].abs().max() < 1e-4  # clipped to next to nothing, below Adam's epsilon


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "env_id", ["mpe/simple_speaker_listener_v4?continuous_actions=True", "toy/team?continuous=True"]
)
def test_two_updates_that_two_runs_repeat(env_id, shared, bounded, tmp_path):
    args = Args(env_id=env_id, **SMALL, share_parameters=shared, runs_dir=str(tmp_path))
    one, same = (load_checkpoint(mappo_continuous_action.main(args)) for _ in range(2))
    assert one["step"] == 400
    for key, value in one["modules"]["agent"].items():
        assert torch.isfinite(value).all() and torch.equal(value, same["modules"]["agent"][key])
    assert (one["modules"]["agent"]["log_std"] != 0).any()


def test_a_resumed_run_goes_on_and_can_be_played(tmp_path, capsys):
    folder = mappo_continuous_action.main(Args(**SMALL, runs_dir=str(tmp_path)))
    mappo_continuous_action.main(Args(**SMALL | {"total_timesteps": 600}, runs_dir=str(tmp_path), resume=folder))
    after = load_checkpoint(folder)
    assert after["step"] == 600 and (after["modules"]["agent"]["obs_stats.count"] == 1800).all()
    metrics = enjoy.main(enjoy.Args(folder, episodes=2))
    assert "mappo_continuous_action at step 600, 2" in capsys.readouterr().out and metrics["eval/ep_length"] == 25


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--env-id mpe/simple_spread_v3", "this script needs continuous ones"),
        ("--total-timesteps 99", "--total-timesteps 99 is less than one rollout of"),
    ],
)
def test_bad_input(flags, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mappo_continuous_action.py", *flags.split(), "--runs-dir", str(tmp_path / "r")])
    with pytest.raises(SystemExit) as exit_:
        launch(mappo_continuous_action.main, Args)
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and text in error and error.count("\n") == 1
    assert not (tmp_path / "r").exists()


def test_explained_variance_leaves_dead_agents_out(bounded):
    args = Args(env_id=bounded, **SMALL)
    agent, _, _, batch = collected(args)
    batch = batch._replace(value=torch.where(batch.alive > 0, batch.return_, 1e3))  # perfect for the living alone
    metrics = mappo_continuous_action.update(agent, torch.optim.SGD(agent.parameters(), 0.0), batch, args)
    assert (batch.alive == 0).any() and metrics["train/explained_variance"] == pytest.approx(1)
