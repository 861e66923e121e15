"""mappo_continuous_action.py: normal policies, units and bounds, normalised inputs, the centralised critic, the script.

`# proves NAME` above a test: it fails when that detail is taken out of the script.
"""

import sys

import numpy as np
import pytest
import torch
from gymnasium import spaces

import cleanmarl.envs
from cleanmarl import enjoy, mappo_continuous_action
from cleanmarl.envs import EpisodeStatistics, MultiAgentVectorEnv
from cleanmarl.mappo_continuous_action import Args
from cleanmarl.run import evaluate, launch, load_checkpoint

SPREAD = "mpe/simple_spread_v3?continuous_actions=True"
SMALL = {"total_timesteps": 400, "num_envs": 4, "num_steps": 50, "update_epochs": 4, "eval_episodes": 0}


class Toy(MultiAgentVectorEnv):
    """Three agents with 2, 3, 1 components of actions, in [-2, 4], [0, 1] and unbounded; episodes of 6 steps.

    Terminated in even environments, truncated in odd ones; agent 1 dies after step 3, agent 2 with its last; the living
    earn the clock. `actions` and `ends` (final observations and states) are kept.
    """

    def __init__(self, num_envs):
        low, high = np.full((3, 3), -np.inf, np.float32), np.full((3, 3), np.inf, np.float32)
        low[0, :2], high[0, :2], low[1], high[1] = -2, 4, 0, 1
        self._set_spaces(num_envs, ("a", "b", "c"), [2, 3, 1], [2, 3, 1], 2, spaces.Box(low, high))
        self.statistics, self.random = EpisodeStatistics(num_envs, 3), np.random.default_rng(0)

    def _look(self):
        obs = (5 + 10 * self.random.normal(size=(self.num_envs, 3, 3))).astype(np.float32)
        obs *= np.arange(3) < self.obs_sizes[:, None]
        alive = np.ones((self.num_envs, 3), bool)
        alive[:, 1], alive[:, 2] = self.clock < 3, self.clock < 6
        obs[~alive] = 0
        state = (100 + 7 * self.random.normal(size=(self.num_envs, 2))).astype(np.float32)
        mask = np.tile(self.real_actions, (self.num_envs, 1, 1))
        return obs, {"state": state, "action_mask": mask, "agent_mask": alive}

    def reset(self, *, seed=None, options=None):
        self.clock, self.actions, self.ends = 0, [], []
        return self._look()

    def step(self, action):
        self.actions.append(action)
        alive = np.array([True, self.clock < 3, True])
        self.clock += 1
        reward = np.tile(np.float32(self.clock * alive), (self.num_envs, 1))
        ended, odd = np.full(self.num_envs, self.clock == 6), np.arange(self.num_envs) % 2 == 1
        self.statistics.add(reward)
        final, final_info = self._look()
        self.clock %= 6
        obs, info = self._look()
        if ended.any():
            info["final_obs"], info["_final_obs"], info["final_state"] = final, ended, final_info["state"]
            info["final_agent_mask"] = final_info["agent_mask"]
            self.ends.append((final, final_info["state"]))
            self.statistics.end(ended, info)
        return obs, reward, ended & ~odd, ended & odd, info


@pytest.fixture
def toy(monkeypatch):
    """`toy` as one more environment family."""
    make = cleanmarl.envs.make
    ours = lambda env_id, num_envs, **o: Toy(num_envs) if env_id == "toy" else make(env_id, num_envs, **o)  # noqa: E731
    monkeypatch.setattr(mappo_continuous_action, "make", ours)
    return "toy"


class Quiet:
    step = 0

    def log_episodes(self, info):
        pass


def collected(args, scale=100):
    """Agent, environments, rollout and batch of one rollout with policies far from their first ones."""
    torch.manual_seed(0)
    envs = mappo_continuous_action.make_envs(args, args.num_envs)
    agent = mappo_continuous_action.Agent(envs, args)
    with torch.no_grad():
        agent.actor[-1].weight *= scale
        agent.actor.log_std.normal_(-0.5, 0.2)
        if args.normalize_obs:
            agent.obs_stats.mean.normal_()
            agent.state_stats.var.uniform_(0.5, 2)
    T, N, S = args.num_steps, args.num_envs, envs.state_size
    (A, D), K = envs.single_observation_space.shape, envs.real_actions.shape[1]
    seen = np.zeros((T, N, A, D), np.float32), np.zeros((T, N, S), np.float32)
    masks = np.zeros((T, N, A, K), bool), np.zeros((T, N, A), bool)
    rest = np.zeros((T, N, A, K), np.float32), np.zeros((T, N, A), np.float32), np.zeros((T, N, A), bool)
    rollout = mappo_continuous_action.Rollout(*seen, *masks, *rest)
    now = mappo_continuous_action.collect(agent, envs, envs.reset(seed=1), rollout, args, Quiet())
    return agent, envs, rollout, mappo_continuous_action.estimate(agent, rollout, *now, args)


def normal_policy(agent, batch):
    mean = agent.by_agent(agent.actor(agent.by_network(batch.features)))
    return torch.distributions.Normal(mean, agent.actor.log_std.exp().expand(3, -1))


# proves continuous-1, continuous-2, continuous-3
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("env_id", [SPREAD, "toy"])
def test_log_probabilities_and_entropy_are_those_of_independent_normals(env_id, shared, toy):
    args = Args(env_id=env_id, **SMALL, share_parameters=shared)
    agent, envs, _, batch = collected(args)
    policy, mask = normal_policy(agent, batch), torch.from_numpy(envs.real_actions)
    expected = (policy.log_prob(batch.action) * mask).sum(-1)
    torch.testing.assert_close(batch.log_prob, expected, atol=1e-4, rtol=1e-4)
    _, _, stats = mappo_continuous_action.mappo_loss(agent, batch, args)
    entropy = agent.mean((policy.entropy() * mask).sum(-1), batch.alive).mean()
    torch.testing.assert_close(stats[2], entropy)
    assert stats[3].abs() < 1e-5 and stats[4] == 0  # KL divergence and clipped fraction: the ratio is 1
    z = ((batch.action - policy.mean) / policy.stddev)[:, torch.from_numpy(envs.real_actions)]
    assert z.mean().abs() < 0.1 and (z.std() - 1).abs() < 0.1  # the actions that were taken are samples of it


# proves continuous-5
def test_actions_reach_the_environment_in_its_unit_and_clipped(toy):
    args = Args(env_id=toy, **SMALL)
    agent, envs, rollout, _ = collected(args)
    action = np.zeros((1, 3, 3)) + np.array([-1.0, 0.5, 3.0])
    expected = [
        [-2, 2.5, 0],
        [0, 0.75, 1],
        [-1, 0, 0],
    ]  # bounded, bounded and clipped, unbounded; 0 where there is none
    np.testing.assert_allclose(agent.env_action(action)[0], expected)
    assert agent.env_action(action * 5)[0, 2, 0] == -5
    played = np.stack(envs.actions)
    assert (played >= envs.single_action_space.low).all() and (played <= envs.single_action_space.high).all()
    assert np.abs(rollout.action[:, :, 1]).max() > 1.5  # what is learned from is not clipped
    np.testing.assert_array_equal(played, agent.env_action(rollout.action))


# proves continuous-6, continuous-7
@pytest.mark.parametrize("shared", [True, False])
def test_inputs_are_normalised_by_the_statistics_of_living_agents(shared, toy, tmp_path):
    args = Args(env_id=toy, **SMALL, share_parameters=shared, runs_dir=str(tmp_path))
    seen, estimate = [], mappo_continuous_action.estimate
    with pytest.MonkeyPatch.context() as patch:
        copy = lambda rollout: type(rollout)(*(x.copy() for x in rollout))  # noqa: E731
        spy = lambda agent, rollout, *rest: (seen.append(copy(rollout)), estimate(agent, rollout, *rest))[1]  # noqa: E731
        patch.setattr(mappo_continuous_action, "estimate", spy)
        saved = load_checkpoint(mappo_continuous_action.main(args))["modules"]["agent"]
    obs, alive = (np.concatenate([getattr(r, name) for r in seen]) for name in ("obs", "agent_mask"))
    groups = [obs[alive]] if shared else [obs[:, :, a][alive[:, :, a]] for a in range(3)]
    for m, group in enumerate(groups):
        np.testing.assert_allclose(saved["obs_stats.mean"][m], group.mean(0), rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(saved["obs_stats.var"][m], group.var(0), rtol=1e-3, atol=1e-3)
        assert saved["obs_stats.count"][m] == len(group)
    state = np.concatenate([r.state for r in seen]).reshape(-1, 2)
    np.testing.assert_allclose(saved["state_stats.mean"][0], state.mean(0), rtol=1e-3)
    np.testing.assert_allclose(saved["state_stats.var"][0], state.var(0), rtol=1e-2)

    envs = mappo_continuous_action.make_envs(args, 4)
    agent = mappo_continuous_action.Agent(envs, args)
    agent.load_state_dict(saved)
    evaluate(envs, mappo_continuous_action.make_policy(agent), 8, seed=1)  # frozen at evaluation
    assert all(torch.equal(saved[key], value) for key, value in agent.state_dict().items())
    obs, info = envs.reset()
    alive = np.array([[True, False, True]] * 4)
    features, (state, critic_features, _) = agent.features(obs), agent.critic_input(info["state"], obs, alive)
    mean, std = saved["obs_stats.mean"].numpy(), (saved["obs_stats.var"] + 1e-8).sqrt().numpy()
    np.testing.assert_allclose(features[..., :3], ((obs - mean) / std).clip(-10, 10), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(critic_features[:, [0, 2]], features[:, [0, 2]])
    assert (critic_features[:, 1, :3] == 0).all()
    of_state = (info["state"] - saved["state_stats.mean"].numpy()) / (saved["state_stats.var"] + 1e-8).sqrt().numpy()
    np.testing.assert_allclose(state, of_state.clip(-10, 10), rtol=1e-4, atol=1e-5)
    assert np.abs(agent.features(obs * 1e6)[..., :3]).max() == 10


@pytest.mark.parametrize("shared", [True, False])
def test_the_policy_that_plays_is_the_policy_that_learns(shared, toy):
    args = Args(env_id=toy, **SMALL, share_parameters=shared)
    agent, _, rollout, batch = collected(args)
    obs = rollout.obs.reshape(-1, 3, 3)
    mean = normal_policy(agent, batch).mean.detach().numpy()
    greedy = mappo_continuous_action.make_policy(agent)(obs, {}, None)
    np.testing.assert_allclose(greedy, agent.env_action(mean), atol=1e-4, rtol=1e-4)
    sampled = mappo_continuous_action.make_policy(agent, greedy=False)(obs, {}, None)[:, 2, 0]  # unbounded: not clipped
    std = agent.actor.log_std.exp()[-1, 0].item()
    assert (sampled - mean[:, 2, 0]).std() == pytest.approx(std, rel=0.2)


def test_a_dead_agent_earns_what_the_living_do(toy):
    args = Args(env_id=toy, **SMALL, time_limit_bootstrap=False)
    _, _, rollout, _ = collected(args)
    assert not rollout.agent_mask[..., 1].all() and (rollout.reward[..., 1] > 0).all()
    assert (rollout.reward[..., 1] == rollout.reward[..., 0]).all()


def test_a_time_limit_bootstraps_from_the_final_state(toy):
    args = Args(env_id=toy, **SMALL, gamma=0.9, normalize_obs=False)
    agent, envs, rollout, _ = collected(args)
    _, _, without, _ = collected(Args(**{**vars(args), "time_limit_bootstrap": False}))
    assert (rollout.reward[:, 0] == without.reward[:, 0]).all()  # environment 0 terminates: nothing to add
    final_obs, final_state = envs.ends[0]
    alive = np.array([[True, False, False]])  # agent 1 is dead, agent 2 died with the last step
    seen = agent.critic_input(final_state[[1]], final_obs[[1]], alive)
    expected = 0.9 * agent.value(*seen).detach().numpy()[0]
    np.testing.assert_allclose(rollout.reward[5, 1] - without.reward[5, 1], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shared", [True, False])
def test_dead_agents_and_missing_components_add_nothing_to_the_policy(shared, toy):
    args = Args(env_id=toy, **SMALL, share_parameters=shared, ent_coef=0.1)
    agent, envs, _, batch = collected(args)
    assert 0 < (batch.alive[:, 1] == 0).sum() < 200 and (batch.alive[:, [0, 2]] == 1).all()
    loss, _, stats = mappo_continuous_action.mappo_loss(agent, batch, args)
    gradients = torch.autograd.grad(loss, list(agent.actor.parameters()))
    noise = (1 - batch.alive) * 1e3
    missing = 7.0 * ~torch.from_numpy(envs.real_actions)
    other = batch._replace(
        features=batch.features + noise[..., None],
        advantage=batch.advantage + noise,
        log_prob=batch.log_prob - noise,
        action=batch.action + missing,
    )
    loss2, _, stats2 = mappo_continuous_action.mappo_loss(agent, other, args)
    torch.testing.assert_close(loss, loss2)
    torch.testing.assert_close(stats, stats2)
    for a, b in zip(gradients, torch.autograd.grad(loss2, list(agent.actor.parameters()))):
        torch.testing.assert_close(a, b)
    if not shared:
        assert (gradients[0][2, 1:] == 0).all() and gradients[0][2, 0] != 0  # log_std of agent 2: one component


def test_an_update_of_the_statistics_moves_no_value(toy):
    for shared in (True, False):
        agent, _, _, batch = collected(Args(env_id=toy, **SMALL, share_parameters=shared))
        seen = batch.state, batch.critic_features, batch.alive
        torch.testing.assert_close(agent.normalized_value(*seen), batch.value, atol=1e-4, rtol=1e-4)
        assert agent.value_stats.count == (600 if shared else 200)


# proves continuous-4
def test_policies_and_critics_are_separate(toy):
    agent, _, _, batch = collected(Args(env_id=toy, **SMALL))
    actor_loss, critic_loss, _ = mappo_continuous_action.mappo_loss(agent, batch, Args())
    for loss, others in ((actor_loss, agent.critic), (critic_loss, agent.actor)):
        gradients = torch.autograd.grad(loss, list(others.parameters()), retain_graph=True, allow_unused=True)
        assert all(g is None for g in gradients)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("env_id", ["mpe/simple_speaker_listener_v4?continuous_actions=True", "toy"])
def test_two_updates_that_two_runs_repeat(env_id, shared, toy, tmp_path):
    args = Args(env_id=env_id, **SMALL, share_parameters=shared, runs_dir=str(tmp_path))
    one, same = (load_checkpoint(mappo_continuous_action.main(args)) for _ in range(2))
    assert one["step"] == 400
    for key, value in one["modules"]["agent"].items():
        assert torch.isfinite(value).all() and torch.equal(value, same["modules"]["agent"][key])
    assert (one["modules"]["agent"]["actor.log_std"] != 0).any()


def test_a_resumed_run_goes_on_and_can_be_played(tmp_path, capsys):
    folder = mappo_continuous_action.main(Args(**SMALL, runs_dir=str(tmp_path)))
    mappo_continuous_action.main(Args(**SMALL | {"total_timesteps": 600}, runs_dir=str(tmp_path), resume=folder))
    after = load_checkpoint(folder)
    assert after["step"] == 600 and after["modules"]["agent"]["obs_stats.count"] == 1800
    metrics = enjoy.main(enjoy.Args(folder, episodes=2))
    assert "mappo_continuous_action at step 600, 2" in capsys.readouterr().out and metrics["eval/ep_length"] == 25


@pytest.mark.parametrize(
    "flags, text",
    [
        (
            "--env-id mpe/simple_spread_v3",
            "are discrete; try mappo.py, or continuous_actions=True in",
        ),
        ("--total-timesteps 99", "--total-timesteps 99 is less than one rollout of"),
        ("--huber-delta -1", "--huber-delta must be at least 0, not -1"),
    ],
)
def test_bad_input(flags, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mappo_continuous_action.py", *flags.split(), "--runs-dir", str(tmp_path / "r")])
    with pytest.raises(SystemExit) as exit_:
        launch(mappo_continuous_action.main, Args)
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and text in error and error.count("\n") == 1
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("shared", [True, False])
def test_the_state_read_once_gives_the_values_of_the_state_read_by_every_agent(shared, toy):
    agent, _, _, batch = collected(Args(env_id=toy, **SMALL, share_parameters=shared))
    assert (batch.alive == 0).any() and batch.state.abs().max() > 0
    rows = torch.cat([batch.state[:, None] * batch.alive[..., None], batch.critic_features], dim=-1)
    plain = agent.by_agent(agent.critic(agent.by_network(rows))).squeeze(-1)
    value = agent.normalized_value(batch.state, batch.critic_features, batch.alive)
    torch.testing.assert_close(value, plain, atol=1e-4, rtol=1e-4)
