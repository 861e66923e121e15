"""coppo_matrix.py: exploration, counterfactual advantages, the mixing network; the objective is that of coppo.py."""

import itertools
import sys

from cleanmarl import coppo_matrix, enjoy
from cleanmarl.cli import launch
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
from test_coppo import INF, SMALL, actors_and_optimizer, equations, moved
from toys import Quiet, double, make_rollout


def collected(args, scale=100.0):
    """Agent, rollout, what followed it, and batch of one rollout with policies far from uniform."""
    torch.manual_seed(0)
    envs = coppo_matrix.make_envs(args, args.num_envs)
    agent = coppo_matrix.Agent(envs, args)
    agent.epsilon.fill_(args.epsilon_start)
    with torch.no_grad():
        agent.actor[-1].weight *= scale
    rollout = make_rollout(coppo_matrix, args, envs)
    now = coppo_matrix.collect(agent, envs, envs.reset(seed=1), rollout, args, Quiet())
    return agent, rollout, now, coppo_matrix.estimate(agent, rollout, *now, args)


# proves coppo-3
@pytest.mark.parametrize("changes", [{}, {"mix": "network", "inner_clip_coef": 0.0}])
def test_independent_agents_step_in_turn_with_the_newest_ratios(changes):
    """Algorithm 1: within an epoch, agent i's step sees the ratios of agents before it after their steps.

    Of which the mixing network, which is not linear, makes something even where their product is not used.
    """
    args = coppo_matrix.Args(
        env_id="matrix/penalty",
        num_envs=64,
        num_steps=1,
        num_minibatches=1,
        update_epochs=2,
        share_parameters=False,
        **changes,
    )
    agent, _, _, batch = collected(args)
    twin, rate = coppo_matrix.Agent(coppo_matrix.make_envs(args, 1), args), 3.0
    twin.load_state_dict(agent.state_dict())
    coppo_matrix.update(agent, *actors_and_optimizer(agent, rate), batch, args)

    def learn(in_turn):
        parameters = list(twin.actor.parameters())
        for _ in range(args.update_epochs):
            gradients = [torch.autograd.grad(coppo_matrix.actor_loss(twin, batch, args)[0], parameters)] * 4
            for i in range(4):
                if in_turn:
                    gradients[i] = torch.autograd.grad(coppo_matrix.actor_loss(twin, batch, args)[0], parameters)
                for p, g in zip(parameters, gradients[i]):
                    p.data[i] -= rate * g[i]
        return [p.detach().clone() for p in parameters]

    start = {key: value.clone() for key, value in twin.state_dict().items()}
    in_turn = learn(True)
    for mine, theirs in zip(agent.actor.parameters(), in_turn):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    twin.load_state_dict(start)
    assert max((a - b).abs().max() for a, b in zip(learn(False), in_turn)) > 1e-3


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("advantage", ["gae", "counterfactual"])
@pytest.mark.parametrize("epsilon", [0.0, 0.4])
@pytest.mark.parametrize("env_id", ["mpe/simple_spread_v3", "toy/team"])
def test_first_ratio_is_one(env_id, epsilon, advantage, shared, team):
    args = coppo_matrix.Args(
        env_id=env_id, **SMALL, share_parameters=shared, advantage=advantage, epsilon_start=epsilon
    )
    agent, _, _, batch = collected(args)
    _, stats = coppo_matrix.actor_loss(agent, batch, args)
    assert stats["approx_kl"].abs() < 1e-6 and stats["outer_clipfrac"] == stats["inner_clipfrac"] == 0
    assert stats["ratio_product_var"] < 1e-8 and stats["entropy"] > 0


# proves coppo-7
def test_exploration_is_part_of_the_policy():
    """The share of random actions is uniform over the legal ones, and the probabilities are those of the samples."""
    sizes = {"num_envs": 20_000, "num_steps": 1}
    args = coppo_matrix.Args(env_id="matrix/penalty", **sizes, share_parameters=False, epsilon_start=0.5)
    agent, rollout, _, batch = collected(args)
    probs = agent.logits(batch.obs, batch.action_mask).softmax(-1)[0].detach()  # (A, K), the same in every row
    torch.testing.assert_close(probs.sum(-1), torch.ones(4))
    assert probs.min() >= 0.5 / 9
    frequency = np.stack([(rollout.action[0] == k).mean(0) for k in range(9)], -1)
    np.testing.assert_allclose(frequency, probs, atol=0.015)
    agent.epsilon.fill_(0.0)
    greedy = agent.logits(batch.obs, batch.action_mask).softmax(-1)[0].detach()
    torch.testing.assert_close(probs, 0.5 * greedy + 0.5 / 9)
    masked = torch.arange(9) < 3
    agent.epsilon.fill_(0.5)
    probs = agent.logits(batch.obs, masked.expand(batch.action_mask.shape)).softmax(-1)
    assert (probs[..., 3:] < 1e-20).all() and (probs[..., :3] >= 0.5 / 3 - 1e-6).all()


def test_the_share_of_random_actions_falls_linearly(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(coppo_matrix.Run, "log", lambda run, metrics: seen.append(metrics["train/epsilon"]))
    exploration = {"epsilon_start": 0.9, "epsilon_end": 0.1, "epsilon_timesteps": 400}
    coppo_matrix.main(coppo_matrix.Args(**SMALL | {"total_timesteps": 800}, **exploration, runs_dir=str(tmp_path)))
    assert seen == pytest.approx([0.9, 0.5, 0.1, 0.1])


# proves coppo-5
@pytest.mark.parametrize("shared", [True, False])
def test_counterfactual_advantages_marginalise_the_own_action_alone(shared, team):
    args = coppo_matrix.Args(
        env_id=team, **SMALL, share_parameters=shared, advantage="counterfactual", norm_adv=False, normalize_value=False
    )
    agent, rollout, now, batch = collected(args)
    probs = agent.logits(batch.obs, batch.action_mask).softmax(-1).detach()
    original = rollout.action.copy()
    for i in range(3):
        expectation, own = 0, []
        for k in range(4):  # the same rollout, had agent i done k
            rollout.action[:] = original
            rollout.action[:, :, i] = k
            other = coppo_matrix.estimate(agent, rollout, *now, args)
            own.append(agent.others_actions(other.action, other.alive)[:, i])
            expectation = expectation + probs[:, i, k] * other.value[:, i]
        assert all(torch.equal(own[0], features) for features in own)  # a critic does not see its agent's own action
        torch.testing.assert_close(batch.advantage[:, i], batch.value[:, i] - expectation, atol=1e-4, rtol=1e-4)
    rollout.action[:] = original
    rollout.action[:, :, 0] = 1 - rollout.action[:, :, 0]
    other = coppo_matrix.estimate(agent, rollout, *now, args)
    alive = batch.alive[:, 1] > 0
    seen = [
        agent.others_actions(x, batch.alive)[alive, 1] for x in (other.action, torch.from_numpy(original).flatten(0, 1))
    ]
    assert (seen[0] != seen[1]).any(-1).all()  # but it sees the others'


@pytest.mark.learning
def test_critics_of_joint_actions_learn_the_rewards_of_a_game(tmp_path):
    args = coppo_matrix.Args(
        env_id="matrix/climbing",
        total_timesteps=10_000,
        num_envs=100,
        num_steps=1,
        num_minibatches=1,
        advantage="counterfactual",
        epsilon_start=0.99,
        epsilon_end=0.99,
        share_parameters=False,
        critic_learning_rate=1e-2,
        value_clip_coef=0,
        eval_episodes=0,
        runs_dir=str(tmp_path),
    )
    envs = coppo_matrix.make_envs(args, 9)
    agent = coppo_matrix.Agent(envs, args)
    agent.load_state_dict(load_checkpoint(coppo_matrix.main(args))["modules"]["agent"])
    obs, info = envs.reset()
    action = np.array([(i, j) for i in range(3) for j in range(3)])
    seen = coppo_matrix.to_tensors(agent, info["state"], obs, info["agent_mask"])
    values = agent.values(*seen, torch.from_numpy(action)).detach()
    taken = agent.of_action(values, torch.from_numpy(action))
    expected = torch.tensor([11.0, -30, 0, -30, 7, 0, 0, 6, 5])[:, None].expand(9, 2)
    torch.testing.assert_close(taken, expected, atol=2.0, rtol=0)


@pytest.mark.parametrize("advantage", ["gae", "counterfactual"])
def test_a_time_limit_bootstraps_from_the_final_state(advantage, team):
    args = coppo_matrix.Args(env_id=team, **SMALL, gamma=0.9, advantage=advantage)
    torch.manual_seed(0)
    fresh = coppo_matrix.Agent(coppo_matrix.make_envs(args, 4), args)  # the critic of the rollout
    _, rollout, _, _ = collected(args)
    assert (rollout.reward[5, 0] == 6).all()  # environment 0 terminates: nothing to add
    final_obs = np.zeros((1, 3, 3), np.float32)
    final_obs[0, 0, :2] = 6  # agent 2 died with the last step
    values = []
    for action in np.ndindex(2, 1, 1):  # what the living agent could do next
        seen = torch.tensor([[6.0, 36]]), torch.from_numpy(final_obs), torch.tensor([[1.0, 0, 0]])
        value = fresh.of_action(fresh.values(*seen, torch.tensor([action])), torch.tensor([action]))
        values.append(6 + 0.9 * value[0, 0].detach().numpy())
    error = np.abs(np.array(values) - rollout.reward[5, 1, 0])
    assert error.min() < 1e-4  # environment 1 is truncated


def test_what_follows_is_worth_what_a_sample_of_joint_actions_is():
    args = coppo_matrix.Args(env_id="matrix/climbing", advantage="counterfactual")
    torch.manual_seed(0)
    envs = coppo_matrix.make_envs(args, 1)
    agent, (obs, info), N = coppo_matrix.Agent(envs, args), envs.reset(seed=1), 4000
    seen = (obs, *(info[key] for key in ("state", "action_mask", "agent_mask")))
    drawn = coppo_matrix.bootstrap(agent, *(np.repeat(x, N, 0) for x in seen))  # (N, 2), of a policy nearly uniform
    state, obs, alive = coppo_matrix.to_tensors(agent, seen[1], obs, seen[3])
    actions = torch.tensor([*itertools.product(range(3), range(3))])
    values = agent.values(*(x.expand(9, *x.shape[1:]) for x in (state, obs, alive)), actions)
    each = agent.of_action(values, actions).detach().numpy()  # (9, 2)
    np.testing.assert_allclose(np.unique(drawn[:, 0].round(4)), np.unique(each[:, 0].round(4)), atol=2e-4)
    np.testing.assert_allclose(drawn.mean(0), each.mean(0), atol=5 * each.std() / N**0.5)


# proves coppo-6
def test_the_mixing_network_is_monotone_and_stays_as_it_is(team, tmp_path):
    args = coppo_matrix.Args(env_id=team, **SMALL, mix="network", runs_dir=str(tmp_path))
    agent, _, _, batch = collected(args)
    x = torch.randn(200, 3, requires_grad=True)
    mixed = agent.mixing(x, batch.state)
    gradient = torch.autograd.grad(mixed.sum(), x)[0]
    assert mixed.shape == (200, 1) and (gradient >= 0).all() and (gradient > 0).float().mean() > 0.9
    loss, _ = coppo_matrix.actor_loss(agent, batch, args)
    assert all((g != 0).any() for g in torch.autograd.grad(loss, list(agent.actor.parameters())))
    torch.manual_seed(1)  # as `main` does
    untouched = coppo_matrix.Agent(coppo_matrix.make_envs(args, 1), args).mixing.state_dict()
    saved = load_checkpoint(coppo_matrix.main(args))["modules"]["agent"]
    assert all(torch.equal(saved[f"mixing.{key}"], value) for key, value in untouched.items())


# proves coppo-6
@pytest.mark.parametrize("objective", ["equation", "authors"])
def test_the_loss_of_the_mixing_network_is_its_definition(objective, team):
    """QMIX's network number by number over the surrogates of `equations`; its gradient by differences of them."""
    args = coppo_matrix.Args(env_id=team, **SMALL, mix="network", objective=objective, ent_coef=0.0)
    agent, _, _, batch = collected(args)
    agent, batch = agent.double(), double(batch)
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
    loss, _ = coppo_matrix.actor_loss(agent, batch, args)
    assert loss.item() == pytest.approx(-np.mean([mixed(*row) for row in rows]), rel=1e-9)
    step = 1e-6 * np.eye(3)
    by_surrogate = np.array([[(mixed(v + d, s) - mixed(v - d, s)) / 2e-6 for d in step] for v, s in rows])
    weight = torch.from_numpy(-np.einsum("ri,rij->rj", by_surrogate, slope) / len(rows))
    log_probs = agent.logits(batch.obs, batch.action_mask).log_softmax(-1)
    log_prob = log_probs.gather(-1, batch.action[..., None]).squeeze(-1)
    parameters = list(agent.actor.parameters())
    expected = torch.autograd.grad((weight * log_prob).sum(), parameters)
    for mine, theirs in zip(torch.autograd.grad(loss, parameters), expected):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-8)


VARIANTS = {
    "defaults": {},
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
@pytest.mark.parametrize("env_id", ["mpe/simple_speaker_listener_v4", "matrix/penalty", "toy/team"])
def test_two_updates_that_two_runs_repeat(env_id, name, team, tmp_path):
    args = coppo_matrix.Args(env_id=env_id, **SMALL, **VARIANTS[name], runs_dir=str(tmp_path), update_epochs=3)
    one, same = (load_checkpoint(coppo_matrix.main(args)) for _ in range(2))
    assert one["step"] == 400
    for key, value in one["modules"]["agent"].items():
        assert torch.isfinite(value).all() and torch.equal(value, same["modules"]["agent"][key])


def test_a_resumed_run_goes_on_and_can_be_played(tmp_path, capsys):
    settings = VARIANTS["matrix games"] | {"runs_dir": str(tmp_path)}
    folder = coppo_matrix.main(coppo_matrix.Args(**SMALL, **settings))
    coppo_matrix.main(coppo_matrix.Args(**SMALL | {"total_timesteps": 600}, **settings, resume=folder))
    after = load_checkpoint(folder)
    assert after["step"] == 600 and (after["modules"]["agent"]["value_stats.count"] == 600).all()
    assert after["modules"]["optimizer"]["state"][0]["step"] == 30  # ten epochs of three updates, once per epoch
    assert {"args.json", "checkpoint.pt", "done.json"} <= {path.name for path in folder.iterdir()}
    metrics = enjoy.main(enjoy.Args(folder, episodes=2))
    assert "coppo_matrix at step 600, 2 episodes" in capsys.readouterr().out and metrics["eval/ep_length"] == 25


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--env-id mpe/simple_spread_v3?continuous_actions=True", "this script needs discrete ones"),
        ("--epsilon-start 1", "--epsilon-start must be in [0, 1), not 1"),
    ],
)
def test_bad_input(flags, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["coppo_matrix.py", *flags.split(), "--runs-dir", str(tmp_path / "runs")])
    with pytest.raises(SystemExit) as exit_:
        launch(coppo_matrix.main, coppo_matrix.Args)
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and text in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()
