"""What IPPO, MAPPO, CoPPO, COMA and their variants have in common: copied parts, whose reward it is, what follows."""

import ast
import inspect
import itertools
import textwrap

from cleanmarl import (
    coma,
    coma_lstm,
    coppo,
    coppo_lstm,
    coppo_matrix,
    ippo,
    ippo_continuous_action,
    ippo_lstm,
    ippo_per_agent,
    mappo,
    mappo_continuous_action,
    mappo_lstm,
)
from cleanmarl.layers import StackedCell, StackedLinear

import numpy as np
import pytest
import torch
from toys import Quiet, Toy, code, curves, make_rollout

SMALL = {"total_timesteps": 400, "num_envs": 4, "num_steps": 52, "eval_episodes": 0}
CONTINUOUS = [ippo_continuous_action, mappo_continuous_action]
TEAMS = [coma, coppo, coppo_matrix, mappo, mappo_continuous_action]
REMEMBER = [coma_lstm, coppo_lstm, mappo_lstm]
INDEPENDENT = [ippo, ippo_continuous_action, ippo_per_agent]
CLIPPED = [coppo, coppo_matrix, *INDEPENDENT, mappo, mappo_continuous_action]


@pytest.mark.parametrize(
    "scripts, names",
    [
        ([*TEAMS, *INDEPENDENT], ["layer_init", "to_tensors", "Agent.mean"]),
        ([coma, coppo, coppo_matrix, ippo, ippo_per_agent, mappo], ["make_envs", "make_policy", "gumbel_noise"]),
        (CONTINUOUS, ["make_envs", "make_policy", "gaussian_log_prob", "Agent.env_action"]),
        ([ippo, ippo_continuous_action], ["PopArt", "estimate", "Agent.value"]),
        ([mappo, mappo_continuous_action, coppo, coppo_matrix], ["PopArt"]),
        ([ippo, ippo_per_agent], ["Agent.logits", "Agent.value", "Agent.normalized_value"]),
        ([mappo, coppo], ["Agent", "Rollout", "Batch", "collect", "estimate", "make_policy"]),
        ([mappo, mappo_continuous_action], ["estimate", "Agent.value"]),
        ([coppo, coppo_matrix], ["Rollout", "Batch", "ratio_of_others", "update"]),
        ([coma, coppo_matrix, coma_lstm], ["Agent.others_actions"]),
        ([coma, coma_lstm], ["td_lambda", "of_action", "counterfactual_advantage", "critic_loss", "to_tensors"]),
        ([coma, coma_lstm], ["Agent.values", "Agent.mean", "make_envs", "gumbel_noise"]),
        ([mappo_lstm, coma_lstm], ["layer_init", "make_policy", "forgets"]),
        ([s for s in CLIPPED if s is not ippo_per_agent], ["gae"]),
    ],
)
def test_copies_are_copies(scripts, names):
    """So that a test of one of them is a test of all."""
    for name in names:
        first, *_ = parts = name.split(".")
        things = [getattr(script, first) if len(parts) == 1 else getattr(script.Agent, parts[1]) for script in scripts]
        assert len({dedented(thing) for thing in things}) == 1, name


def dedented(thing) -> str:
    """Its code without docstrings and comments, of a method too; names of losses do not count."""
    if thing.__qualname__ == thing.__name__:
        text = code(thing)
    else:
        tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
        tree.body[0].body = tree.body[0].body[1:] if ast.get_docstring(tree.body[0]) else tree.body[0].body
        text = ast.unparse(tree)
    return text.replace("ippo_loss", "loss").replace("mappo_loss", "loss")


def play(script, args, scale=100.0, reward=None):
    """Agent, environments, rollout, and what followed it; policies far from uniform."""
    torch.manual_seed(0)
    envs = script.make_envs(args, args.num_envs)
    if reward is not None:
        envs.reward = lambda alive: reward(envs, alive)
    agent = script.Agent(envs, args)
    with torch.no_grad():
        agent.actor[-1].weight *= scale
        agent.critic[-1].bias += 1  # the dead see zeros, which are to have a value
    rollout, start = make_rollout(script, args, envs), envs.reset(seed=1)
    if script in REMEMBER:
        memory, critic_memory = rollout.memory[0], getattr(rollout, "critic_memory", None)
        start = *start, (memory if critic_memory is None else (memory, critic_memory[0]))
    return agent, envs, rollout, script.collect(agent, envs, start, rollout, args, Quiet())


def toy_id(script, family):
    return f"{family}?continuous=True" if script in CONTINUOUS else family


def following(script, now):
    """What estimate() is given of what followed a rollout."""
    return now[:1] if script in INDEPENDENT else now


@pytest.mark.parametrize("script", [*TEAMS, *INDEPENDENT, coma_lstm, coppo_lstm, ippo_lstm, mappo_lstm])
def test_actors_and_critics_have_sizes_of_their_own(script, team):
    args = script.Args(env_id=toy_id(script, team), actor_hidden_dim=5, critic_hidden_dim=7)
    agent = script.Agent(script.make_envs(args, 1), args)
    for network, size in ((agent.actor, 5), (agent.critic, 7)):
        layers = [layer for layer in network if isinstance(layer, StackedLinear)]
        assert [layer.weight.shape[2] for layer in layers[:-1]] == [size, size]
        assert layers[-1].weight.shape[1] == size
        assert all(layer.size_hidden == size for layer in network if isinstance(layer, StackedCell))


@pytest.mark.parametrize("family", ["toy/each", "toy/team"])
@pytest.mark.parametrize("script", [*TEAMS, *REMEMBER])
def test_the_living_earn_their_own_rewards_and_the_dead_of_a_team_the_mean_of_theirs(script, family, toy):
    """Where agents have rewards of their own the dead earn nothing, so that no agent gains by its death."""
    bootstraps = script in (coma, coma_lstm)  # always
    options = {} if bootstraps else {"time_limit_bootstrap": False}
    args = script.Args(env_id=toy_id(script, family), **SMALL, **options)
    unequal = lambda envs, alive: np.float32(envs.clock[:, None] * [1, 2, 4] * alive)  # noqa: E731
    _, _, rollout, _ = play(script, args, reward=unequal)
    ends = rollout.done[..., 0] & bootstraps
    clock, alive = rollout.reward[..., 0], rollout.agent_mask
    expected = clock[..., None] * np.where(alive, [1, 2, 4], [1, 2.5 if family == "toy/team" else 0, 4])
    assert not alive.all() and (clock[~ends] % 1 == 0).all()
    np.testing.assert_allclose(rollout.reward[~ends], expected[~ends])


@pytest.mark.parametrize("family", ["toy/each", "toy/team"])
@pytest.mark.parametrize("script", [*TEAMS, *REMEMBER])
def test_critics_of_rewards_of_their_own_tell_the_dead_from_those_who_see_zeros(script, family, toy):
    """As the dead earn nothing there: the value of death was that of a life in which zeros are seen."""
    args = script.Args(env_id=toy_id(script, family))
    torch.manual_seed(0)
    agent = script.Agent(envs := script.make_envs(args, 1), args)
    state, obs = torch.zeros(2, envs.state_size), torch.zeros(2, 3, 3)
    seen = state, obs, torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
    if script in (coma, coma_lstm):
        value = agent.values(agent.critic, *seen, torch.zeros(2, 3, 3 * agent.num_actions))
    elif script is coppo_matrix:
        value = agent.values(*seen, torch.zeros(2, 3, dtype=torch.int64))
    elif script in REMEMBER:
        value, _ = agent.value(*seen, torch.zeros(2, 3, agent.critic.memory_size))
    else:
        value = agent.value(*seen)
    differs = (value[0] != value[1]).view(3, -1).any(1)
    assert differs.tolist() == [False, family == "toy/each", False]


@pytest.mark.parametrize("script", INDEPENDENT)
def test_what_a_copy_pays_the_dead_is_not_what_the_team_earns(script, team):
    """A reward that an edit adds in `collect` to all agents is worth the same, however many of them live."""
    paid = lambda envs, alive: np.float32(np.where(alive, envs.clock[:, None], 100))  # noqa: E731
    args = script.Args(env_id=toy_id(script, team), **SMALL, time_limit_bootstrap=False)
    _, _, rollout, _ = play(script, args, reward=paid)
    assert not rollout.agent_mask.all() and set(rollout.reward.ravel()) == {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("script", CLIPPED)
def test_the_last_step_bootstraps_from_what_follows_the_rollout(script, shared, toy, team):
    """With lambda 0 its return is r + gamma V, where V is the value of the first step of the rollout that follows."""
    options = {"gae_lambda": 0.0, "gamma": 0.9, "normalize_value": False, "num_minibatches": 1}
    if script is ippo_per_agent:
        options |= {"gae_lambda": (0.0,), "gamma": (0.9, 0.8, 0.7)}
    env_id = toy_id(script, toy if script in INDEPENDENT else team)
    args = script.Args(env_id=env_id, **SMALL, share_parameters=shared, **options)
    agent, envs, rollout, now = play(script, args)
    batch = script.estimate(agent, rollout, *following(script, now), args)
    later = type(rollout)(*(np.zeros_like(x) for x in rollout))
    then = script.collect(agent, envs, now, later, args, Quiet())
    value = script.estimate(agent, later, *following(script, then), args).value.view(52, 4, 3)[0].numpy()
    assert not later.agent_mask[0, :, 1].any() and not rollout.done[-1].any()
    expected = rollout.reward[-1] + np.array(args.gamma) * value
    np.testing.assert_allclose(batch.return_.view(52, 4, 3)[-1], expected, rtol=1e-4, atol=1e-5)
    assert (abs(value) > 1e-3).all()


@pytest.mark.parametrize("script", [coma, coppo_matrix])
def test_critics_of_joint_actions_bootstrap_from_legal_ones(script, team):
    """The value after a rollout is that of some joint action that is legal there, and not always of the same one."""
    options = {"gae_lambda": 0.0, "normalize_value": False, "advantage": "counterfactual"}
    options = {"td_lambda": 0.0} if script is coma else options
    args = script.Args(env_id=team, **SMALL | {"num_envs": 32}, gamma=0.9, **options)
    agent, envs, rollout, (next_obs, next_info) = play(script, args, scale=1.0)
    batch = script.estimate(agent, rollout, next_obs, next_info, args)
    assert not next_info["agent_mask"][:, 1].any()
    target = (batch.target if script is coma else batch.return_).reshape(52, 32, 3)[-1].numpy()
    following = (target - rollout.reward[-1]) / 0.9  # (32, 3)
    legal = [np.flatnonzero(mask) for mask in next_info["action_mask"][0]]
    state, obs, alive = script.to_tensors(agent, next_info["state"], next_obs, next_info["agent_mask"])
    values = []
    for action in itertools.product(*legal):
        action = torch.tensor(action).expand(32, 3)
        if script is coma:
            q = agent.values(agent.target_critic, state, obs, alive, agent.others_actions(action, alive))
            values.append(coma.of_action(q, action).detach().numpy())
        else:
            values.append(agent.of_action(agent.values(state, obs, alive, action), action).detach().numpy())
    error = abs(np.stack(values) - following).max(-1)  # (joint actions, 32)
    assert (error.min(0) < 1e-3).all() and len(set(error.argmin(0))) > 3
    assert len(legal[2]) == 2 < envs.action_sizes[2]  # one of agent 2's actions is forbidden


@pytest.mark.parametrize("script", [ippo, ippo_continuous_action, ippo_lstm, ippo_per_agent, mappo, coppo, coma])
def test_a_team_whose_last_member_is_dead_earns_nothing_until_its_episode_ends(script, team, monkeypatch, tmp_path):
    look = Toy.look

    def nobody_lives_from_the_fifth_step_on(self):
        obs, info = look(self)
        info["agent_mask"][self.clock >= 4] = False
        return obs, info

    monkeypatch.setattr(Toy, "look", nobody_lives_from_the_fifth_step_on)
    env_id = f"{team}?continuous=True" if script in CONTINUOUS else team
    folder = script.main(script.Args(**SMALL, env_id=env_id, runs_dir=str(tmp_path)))
    losses = {name: curve for name, curve in curves(folder).items() if name.startswith("train/")}
    assert len(losses) > 3 and all(np.isfinite(curve).all() for curve in losses.values())
    assert set(curves(folder)["rollout/ep_reward_agent_0"]) == {1 + 2 + 3 + 4}
