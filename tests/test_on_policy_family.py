"""What IPPO, MAPPO, CoPPO and COMA have in common: whose reward it is, what follows a rollout, who is counted."""

import itertools

import numpy as np
import pytest
import test_coma
import test_coppo
import test_coppo_lstm
import test_ippo
import test_ippo_continuous_action
import test_mappo
import test_mappo_continuous_action
import test_mappo_lstm
import torch

from cleanmarl import (
    coma,
    coppo,
    coppo_lstm,
    ippo,
    ippo_continuous_action,
    ippo_lstm,
    mappo,
    mappo_continuous_action,
    mappo_lstm,
)
from cleanmarl.run import UsageError

TEAMS = [
    (coma, test_coma),
    (coppo, test_coppo),
    (coppo_lstm, test_coppo_lstm),
    (mappo, test_mappo),
    (mappo_lstm, test_mappo_lstm),
    (mappo_continuous_action, test_mappo_continuous_action),
]


def find(kind, result):
    """The first instance of `kind` in nested tuples."""
    if isinstance(result, kind):
        return result
    if type(result) is tuple:
        return next((x for x in (find(kind, part) for part in result) if x is not None), None)
    return None


def play(monkeypatch, script, tests, args):
    """What the `collected` of a script's tests gives, and the agent, environments and rollout with what followed it."""
    monkeypatch.setattr(script, "make", lambda env_id, num_envs, **options: tests.Toy(num_envs))
    seen, collect = [], script.collect

    def spy(agent, envs, *rest):
        now = collect(agent, envs, *rest)
        seen.append((agent, envs, find(script.Rollout, rest), now))
        return now

    monkeypatch.setattr(script, "collect", spy)
    result = tests.collected(args)
    monkeypatch.setattr(script, "collect", collect)
    return result, *seen[0]


@pytest.mark.parametrize("script, tests", TEAMS)
def test_the_living_earn_their_own_rewards_and_the_dead_the_mean_of_theirs(script, tests, monkeypatch):
    step = tests.Toy.step

    def unequal(envs, action):
        obs, reward, *rest = step(envs, action)
        return obs, reward * np.float32([1, 2, 4]), *rest  # the living earn the clock

    monkeypatch.setattr(tests.Toy, "step", unequal)
    options = {} if script is coma else {"time_limit_bootstrap": False}
    _, _, _, rollout, _ = play(monkeypatch, script, tests, script.Args(env_id="toy", **tests.SMALL, **options))
    ends = rollout.done[..., 0] if script is coma else np.zeros_like(rollout.done[..., 0])  # it always bootstraps
    clock, alive = rollout.reward[..., 0], rollout.agent_mask
    expected = clock[..., None] * np.where(alive, [1, 2, 4], [1, 2.5, 4])
    assert not alive.all() and (clock[~ends] % 1 == 0).all()
    np.testing.assert_allclose(rollout.reward[~ends], expected[~ends])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "script, tests, options",
    [
        (ippo, test_ippo, {"gae_lambda": (0.0,), "gamma": (0.9, 0.8, 0.7)}),
        (
            ippo_continuous_action,
            test_ippo_continuous_action,
            {"gae_lambda": (0.0,), "gamma": (0.9, 0.8, 0.7), "normalize_obs": False, "normalize_reward": False},
        ),
        (mappo, test_mappo, {"gae_lambda": 0.0, "gamma": 0.9, "normalize_value": False}),
        (coppo, test_coppo, {"gae_lambda": 0.0, "gamma": 0.9, "normalize_value": False, "advantage": "gae"}),
        (
            mappo_continuous_action,
            test_mappo_continuous_action,
            {"gae_lambda": 0.0, "gamma": 0.9, "normalize_value": False, "normalize_obs": False},
        ),
    ],
)
def test_the_last_step_bootstraps_from_what_follows_the_rollout(script, tests, options, shared, monkeypatch):
    """With lambda 0 its return is r + gamma V, where V is the value of the first step of the rollout that follows."""
    args = script.Args(env_id="toy", **tests.SMALL | {"num_steps": 52}, share_parameters=shared, **options)
    result, agent, envs, rollout, now = play(monkeypatch, script, tests, args)
    later = type(rollout)(*(np.zeros_like(x) for x in rollout))
    then = script.collect(agent, envs, now, later, args, test_mappo.Quiet())
    then = then[:1] if script in (ippo, ippo_continuous_action) else then
    batch, next_batch = find(script.Batch, result), script.estimate(agent, later, *then, args)

    def by_step(x):
        return (agent.by_agent(x) if script in (ippo, ippo_continuous_action) else x).reshape(52, 4, 3).numpy()

    assert not later.agent_mask[0, :, 1].any() and not rollout.done[-1].any()
    value = by_step(next_batch.value)[0]
    expected = rollout.reward[-1] + np.array(args.gamma) * value
    np.testing.assert_allclose(by_step(batch.return_)[-1], expected, rtol=1e-4, atol=1e-5)
    assert (abs(value[:, [0, 2]]) > 1e-3).all()  # the dead see zeros, which may be worth nothing


@pytest.mark.parametrize("script, tests", [(coma, test_coma), (coppo, test_coppo)])
def test_critics_of_joint_actions_bootstrap_from_legal_ones(script, tests, monkeypatch):
    """The value after a rollout is that of some joint action that is legal there, and not always of the same one."""
    name = "td_lambda" if script is coma else "gae_lambda"
    options = {name: 0.0} if script is coma else {name: 0.0, "normalize_value": False, "advantage": "counterfactual"}
    args = script.Args(env_id="toy", **tests.SMALL | {"num_steps": 52, "num_envs": 32}, gamma=0.9, **options)
    monkeypatch.setattr(tests, "collected", lambda args, collected=tests.collected: collected(args, 1.0))
    result, agent, _, rollout, (next_obs, next_info) = play(monkeypatch, script, tests, args)
    batch = find(script.Batch, result)
    assert not next_info["agent_mask"][:, 1].any()
    target = (batch.target if script is coma else batch.return_).reshape(52, 32, 3)[-1].numpy()
    following = (target - rollout.reward[-1]) / 0.9  # (32, 3)
    legal = [np.flatnonzero(mask) for mask in next_info["action_mask"][0]]
    values = []
    for action in itertools.product(*legal):
        action = np.tile(action, (32, 1))
        seen = next_info["state"], next_obs, next_info["agent_mask"], action
        if script is coma:
            q = agent.values(agent.target_critic, torch.from_numpy(agent.critic_features(*seen)))
            values.append(coma.of_action(q, torch.from_numpy(action)).detach().numpy())
        else:
            values.append(agent.of_action(agent.values(*agent.critic_input(*seen)), torch.from_numpy(action)))
            values[-1] = values[-1].detach().numpy()
    error = abs(np.stack(values) - following).max(-1)  # (joint actions, 32)
    assert (error.min(0) < 1e-3).all() and len(set(error.argmin(0))) > 3
    assert len(legal[2]) == 2 < tests.Toy(1).action_sizes[2]  # one of agent 2's actions is forbidden


@pytest.mark.parametrize("script", [ippo, ippo_lstm, ippo_continuous_action])
@pytest.mark.parametrize("name", ["value_clip_coef", "target_kl"])
def test_negative_thresholds_are_refused(script, name, tmp_path):
    args = script.Args(**{name: (0.1, -0.5, 0.1)}, runs_dir=str(tmp_path / "runs"))
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} must be at least 0"):
        script.main(args)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", [ippo, ippo_lstm, ippo_continuous_action])
def test_who_was_dead_for_a_whole_rollout_leaves_no_trace_in_the_statistics(script):
    stats = script.RunningMeanStd(2, 1)
    x = torch.full((2, 10, 1), 5.0)
    first, second = torch.ones(2, 10, 1), torch.ones(2, 10, 1)
    first[0], second[1] = 0, 0  # one has died before the first sample, one after ten
    stats.update(x, first)
    assert stats.count.flatten().tolist() == [0, 10] and stats.var.flatten().tolist() == [1, 0]
    stats.update(x, second)
    assert stats.count.flatten().tolist() == [10, 10]
    assert stats.mean.flatten().tolist() == [5, 5] and stats.var.flatten().tolist() == [0, 0]


def test_the_same_in_mappo_continuous_action():
    stats = mappo_continuous_action.RunningMeanStd(2, 1)
    x, alive = np.full((10, 2, 1), 5, np.float32), np.ones((10, 2), bool)
    stats.update(x, alive & [False, True])
    assert stats.count.flatten().tolist() == [0, 10] and stats.var.flatten().tolist() == [1, 0]
    stats.update(x, alive & [True, False])
    assert stats.count.flatten().tolist() == [10, 10]
    assert stats.mean.flatten().tolist() == [5, 5] and stats.var.flatten().tolist() == [0, 0]
