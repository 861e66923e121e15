"""facmac.py: the factored critic against its definition, the policy gradient of all actions at once, masks, resume."""

import copy
import dataclasses
import json
import sys

from cleanmarl import enjoy, facmac, maddpg_multienvs
from cleanmarl.cli import launch
from cleanmarl.evaluate import evaluate
from cleanmarl.facmac import Args
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_maddpg import CPU, SMALL, alone, played, world
from toys import code, double, scalars


def case(individual, **changes):
    args = Args(individual_critics=individual, **changes)
    agent, critic, buffer = played(facmac, world(3), args)
    return args, agent, critic, double(buffer.sample(5, CPU))


def test_copied_parts_are_those_of_the_parent():
    names = [
        "make_envs",
        "Agent",
        "gumbel_noise",
        "make_policy",
        "padded",
        "reward_moments",
        "reward_of_team",
        "collect",
    ]
    for name in [*names, "descend", "soft_update", "main"]:
        assert code(getattr(facmac, name)) == code(getattr(maddpg_multienvs, name)), name
    floats = "(action, alive, reward, weight, goes_on)"
    lines = [
        line.replace("floats)", f"{floats})")
        for line in code(facmac.Buffer).replace("alive, survive, reward,", "alive, reward,").splitlines()
        if "floats =" not in line
    ]
    assert lines == code(maddpg_multienvs.Buffer).splitlines()


def by_hand(critic, m, obs, state, action, alive):
    """Critic m's value of one step, written out: obs (A, D), state (S,), action (A, K), alive (A,)."""
    A = len(obs)
    network, mixer = alone(critic.utility, m), critic.mixer
    utility = []
    for i in range(A):
        x = torch.cat([obs[i], action[i], torch.eye(A, dtype=obs.dtype)[i]])
        utility.append(network(x)[0] if alive[i] else torch.zeros((), dtype=obs.dtype))
    weight1, weight2, bias2 = (alone(net, m)(state) for net in (mixer.weight1, mixer.weight2, mixer.bias2))
    hidden = alone([mixer.bias1], m)(state)
    E = len(hidden)
    for i in range(A):
        hidden = hidden + utility[i] * weight1[i * E : (i + 1) * E]
    hidden = torch.where(hidden > 0, hidden, hidden.exp() - 1)  # ELU
    return hidden @ weight2 + bias2[0]


# proves facmac-1
@pytest.mark.parametrize("individual", [False, True])
def test_a_critic_mixes_the_utilities_of_what_each_agent_sees_and_does(individual):
    _, _, critic, batch = case(individual)
    q = critic(batch.obs[:, :-1], batch.state[:, :-1], batch.action, batch.alive)
    B, T = batch.action.shape[:2]
    assert q.shape == (B, T, 3 if individual else 1) and (batch.alive[:, 3:, 1] == 0).all()
    for b, t, m in np.ndindex(q.shape):
        expected = by_hand(critic, m, batch.obs[b, t], batch.state[b, t], batch.action[b, t], batch.alive[b, t])
        torch.testing.assert_close(q[b, t, m], expected)


# proves facmac-2
def test_the_value_may_fall_where_a_utility_rises():
    """Weights of both signs, which depend on the state; QMIX's, with absolute values, could only rise."""
    _, _, critic, batch = case(False)
    state = batch.state[:, :-1]
    utility = torch.randn(*state.shape[:2], 1, 3, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(critic.mix(utility, state).sum(), utility)
    assert 0.1 < (slope < 0).double().mean() < 0.9
    with torch.no_grad():
        for last in (critic.mixer.weight1[-1], critic.mixer.weight2[-1]):
            last.weight.zero_()
            last.bias.abs_()
    (slope,) = torch.autograd.grad(critic.mix(utility, state).sum(), utility)
    assert (slope > 0).all()  # so it is these weights that decide


@pytest.mark.parametrize("individual", [False, True])
def test_critic_target_is_its_definition(individual):
    """Step by step, for next states with one legal action each, which the target policy has to take."""
    args, agent, critic, batch = case(individual)
    torch.manual_seed(3)
    only = torch.randint(2, batch.action_mask.shape[:3])
    batch = batch._replace(action_mask=F.one_hot(only, 4).bool())
    ours = facmac.critic_targets(agent, critic, batch, args.gamma)
    assert set(batch.goes_on.unique().tolist()) == {0, 1} and not ours.requires_grad
    for b, t, m in np.ndindex(ours.shape):
        next_action = F.one_hot(only[b, t + 1], 4).double()
        survive = batch.survive[b, t]
        value = by_hand(critic, m, batch.obs[b, t + 1], batch.state[b, t + 1], next_action, survive)
        expected = batch.reward[b, t, m] + (args.gamma * value if batch.goes_on[b, t, m] else 0)
        torch.testing.assert_close(ours[b, t, m], expected)


def test_who_survives_is_who_lives_in_the_next_step():
    _, _, _, batch = case(True)
    alive = torch.cat([batch.alive[:, 1:], torch.zeros_like(batch.alive[:, :1])], 1)
    lengths = batch.alive[..., 0].sum(1).long() - 1  # of agent 0, which never dies, its last step
    for b, last in enumerate(lengths):
        assert torch.equal(batch.survive[b, :last], alive[b, :last]) and (batch.survive[b, last + 1 :] == 0).all()
        ends = batch.survive[b, last].tolist()
        assert ends in ([0, 0, 0], [1, 0, 0], [1, 0, 1])  # terminated, or cut, after the deaths of one or two


@pytest.mark.parametrize("individual", [False, True])
def test_critic_loss_is_the_mean_over_the_steps_that_count(individual):
    args, agent, critic, batch = case(individual)
    target = facmac.critic_targets(agent, critic, batch, args.gamma)
    loss = facmac.critic_loss(critic, batch, target)
    q = critic(batch.obs[:, :-1], batch.state[:, :-1], batch.action, batch.alive)
    for m in range(len(loss)):
        keep = batch.weight[..., m].bool()
        torch.testing.assert_close(loss[m], F.mse_loss(q[..., m][keep], target[..., m][keep]))
    gradients = torch.autograd.grad(loss[0], list(critic.parameters()))
    assert all((g[0] != 0).any() and (g[1:] == 0).all() for g in gradients)  # nobody else learns from it


# proves facmac-3, facmac-4
def test_a_team_climbs_the_gradient_of_the_joint_action():
    """Of Q(s, pi_1(o_1), ..., pi_A(o_A)) with every action from the present policies, weighted as the loss says."""
    _, agent, critic, batch = case(False)
    parameters = list(agent.parameters())
    torch.manual_seed(7)
    ours = torch.autograd.grad(facmac.actor_loss(agent, critic, batch), parameters)
    torch.manual_seed(7)
    action = F.gumbel_softmax(agent.logits(batch.obs[:, :-1], batch.action_mask[:, :-1]), hard=True)
    q = critic(batch.obs[:, :-1], batch.state[:, :-1], action, batch.alive)[..., 0]
    theirs = torch.autograd.grad(-q.sum() / batch.alive.sum(), parameters)
    # where only some live, the dead utilities are 0; where nobody does, so is the gradient
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b)


# proves facmac-3
def test_an_agent_climbs_its_own_value_by_its_own_action_while_the_others_act_as_they_would_now():
    """The gradient of a loop over agents: action i is a leaf in Q_i, the others' are constants of the policy."""
    _, agent, critic, batch = case(True)
    parameters, state, obs = list(agent.parameters()), batch.state[:, :-1], batch.obs[:, :-1]
    torch.manual_seed(7)
    loss = facmac.actor_loss(agent, critic, batch)
    ours = torch.autograd.grad(loss, parameters)
    torch.manual_seed(7)
    action = F.gumbel_softmax(agent.logits(obs, batch.action_mask[:, :-1]), hard=True)
    total = 0
    for i in range(3):
        joint = torch.stack([action[:, :, j] if j == i else action[:, :, j].detach() for j in range(3)], 2)
        q = critic(obs, state, joint, batch.alive)[..., i]
        total = total - q[batch.alive[..., i].bool()].sum() / batch.alive.sum()
    torch.testing.assert_close(loss, total)
    for a, b in zip(ours, torch.autograd.grad(total, parameters)):
        torch.testing.assert_close(a, b)
    torch.manual_seed(7)
    other = batch._replace(action=batch.action.flip(-1))  # what was done then is no question
    torch.testing.assert_close(facmac.actor_loss(agent, critic, other), loss)


# proves maddpg-8
def test_large_logits_of_legal_actions_and_living_agents_cost():
    """A mean over the rows of the mean square of all logits, in which those of illegal actions are 0."""
    _, agent, critic, batch = case(True)
    parameters, losses = list(agent.parameters()), []
    for reg in (0.0, 0.5):
        torch.manual_seed(7)
        losses.append(facmac.actor_loss(agent, critic, batch, reg))
    logits, squares = agent.actor(batch.obs.flatten(0, 1)).view(batch.action_mask.shape), []
    for b, t, i in batch.alive.nonzero().tolist():
        squares.append(logits[b, t, i][batch.action_mask[b, t, i]].square().sum() / batch.action_mask.shape[-1])
    expected = 0.5 * torch.stack(squares).mean()
    torch.testing.assert_close(losses[1] - losses[0], expected)
    for ours, theirs in zip(*(torch.autograd.grad(x, parameters) for x in (losses[1] - losses[0], expected))):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("individual", [False, True])
def test_padding_and_the_dead_add_nothing(individual):
    """Neither what stands after the end of an episode nor what a dead agent sees, does and earns alone."""
    args, agent, critic, batch = case(individual)
    lengths = batch.alive[..., 0].sum(1, keepdim=True)
    rows = torch.arange(batch.obs.shape[1]) > lengths  # (B, T + 1), the row after the last step counts
    steps = torch.arange(batch.action.shape[1]) >= lengths
    dead = (1 - batch.alive) * ~steps[..., None]
    assert rows.any() and dead.any()
    obs = batch.obs + 1e3 * rows[..., None, None]
    obs[:, :-1] += 1e3 * dead[..., None]
    other = batch._replace(
        obs=obs,
        state=batch.state + 1e3 * rows[..., None],
        action_mask=batch.action_mask & ~rows[..., None, None],
        action=batch.action + 1e3 * steps[..., None, None] + 7 * dead[..., None],
        reward=batch.reward + 1e3 * steps[..., None] + (1e3 * dead if individual else 0),
    )
    results = []
    for each in (batch, other):
        torch.manual_seed(5)
        target = facmac.critic_targets(agent, critic, each, args.gamma)
        losses = facmac.critic_loss(critic, each, target).sum(), facmac.actor_loss(agent, critic, each)
        gradients = torch.autograd.grad(losses[0], list(critic.parameters()))
        gradients += torch.autograd.grad(losses[1], list(agent.parameters()))
        results.append([target * each.weight, *losses, *gradients])
    for ours, theirs in zip(*results):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs)


def normalised(batch):
    """With states by the mean and deviation of those of its steps; the padding, and what came last, are not counted."""
    seen = batch.state[:, :-1][(batch.weight > 0).any(-1)]
    state = (batch.state - seen.mean(0)) / (seen.var(0, correction=0) + 1e-8).sqrt()
    return batch._replace(state=state.clamp(-10, 10))


def test_states_count_as_long_as_anybody_lives():
    args, agent, critic, batch = case(True)
    batch.weight[0, :, 0] = 0
    optimizers = [torch.optim.SGD(network.parameters(), 0.0) for network in (agent, critic)]
    facmac.update(agent, critic, (agent, critic), optimizers, batch, args)
    assert critic.state_stats.count.unique().tolist() == [(batch.weight > 0).any(-1).sum()]


# proves facmac-5
@pytest.mark.parametrize("individual", [True, False])
def test_the_scale_of_the_states_makes_no_difference(individual):
    args, agent, critic, batch = case(individual)
    assert_the_scale_of_the_states_makes_no_difference(facmac, args, agent, critic, batch)


def assert_the_scale_of_the_states_makes_no_difference(script, args, agent, critic, batch):
    """An update learns the same from states of another scale."""
    results = []
    for seen in (batch, batch._replace(state=30 * batch.state - 7)):
        networks, targets = copy.deepcopy((agent, critic)), copy.deepcopy((agent, critic))
        optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in networks]
        torch.manual_seed(9)
        script.update(*networks, targets, optimizers, seen, args)
        results.append([p.detach() for network in networks for p in network.parameters()])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("clip", [-1, 0.01])
def test_update_is_two_descents_with_the_critic_first(clip):
    """Against an update written out; many of them on one batch do what the losses ask for."""
    args, agent, critic, batch = case(True, clip_gradients=clip, reg=0.01)
    targets, (agent2, critic2) = case(True)[1:3], copy.deepcopy((agent, critic))
    for network in targets:
        for p in network.parameters():
            p.data.mul_(1.5)
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-2, fused=True) for net in (agent, critic)]
    reference = [torch.optim.Adam(net.parameters(), lr=1e-2) for net in (agent2, critic2)]
    torch.manual_seed(9)
    first = facmac.update(agent, critic, targets, optimizers, batch, args)
    torch.manual_seed(9)
    batch = normalised(batch)
    target = facmac.critic_targets(*targets, batch, args.gamma)
    critic_loss = facmac.critic_loss(critic2, batch, target)
    critic_loss.sum().backward()
    norms = {"critic": clip_by_hand(critic2.utility, 3, clip), "mixer": clip_by_hand(critic2.mixer, 3, clip)}
    reference[1].step()
    loss = facmac.actor_loss(agent2, critic2, batch, args.reg)
    agent2.zero_grad()
    loss.backward()
    norms["actor"] = clip_by_hand(agent2, 1, clip)
    reference[0].step()
    for net, other in ((agent, agent2), (critic, critic2)):
        for p, q in zip(net.parameters(), other.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    assert first["train/actor_loss"] == pytest.approx(loss.item()) and first["train/num_updates"] == 1
    assert first["train/critic_loss"] == pytest.approx(critic_loss.mean().item())
    for name, norm in norms.items():
        assert first[f"train/{name}_gradients"] == pytest.approx(norm)
    args = dataclasses.replace(args, clip_gradients=Args.clip_gradients)
    for _ in range(60):
        last = facmac.update(agent, critic, targets, optimizers, batch, args)
    assert last["train/critic_loss"] < first["train/critic_loss"] / 2


def clip_by_hand(network, M, max_norm) -> float:
    """Clip the gradients of each of M networks in a stack to a norm of its own; returns the mean norm before."""
    gradients = [p.grad for p in network.parameters()]
    rows = [[g[m] for g in gradients] if M > 1 else gradients for m in range(M)]
    norms = [torch.cat([g.flatten() for g in of_one]).norm() for of_one in rows]
    for of_one, norm in zip(rows, norms):
        for g in of_one:
            g *= min(1, max_norm / norm) if max_norm > 0 else 1
    return torch.stack(norms).mean().item()


@pytest.mark.parametrize("env_id, num_envs", [("mpe/simple_spread_v3", 4), ("toy/team?varied=True", 1)])
def test_runs_resume_and_same_seed_same_losses(env_id, num_envs, toy, tmp_path):
    args = Args(env_id=env_id, **SMALL | {"total_timesteps": 40 * num_envs}, num_envs=num_envs, epochs=2)
    args = dataclasses.replace(args, runs_dir=str(tmp_path))
    folder = facmac.main(args)
    first, second, saved = scalars(folder), scalars(facmac.main(args)), load_checkpoint(folder)
    for tag in (
        "train/critic_loss",
        "train/actor_loss",
        "train/mixer_gradients",
        "rollout/ep_reward",
        "eval/ep_reward",
    ):
        assert first[tag] == second[tag]
    is_team = json.loads((folder / "args.json").read_text())["args"]["individual_critics"] is False
    assert is_team == (env_id == "toy/team?varied=True") == (len(saved["modules"]["critic"]["utility.0.weight"]) == 1)
    facmac.main(dataclasses.replace(args, resume=folder, total_timesteps=80 * num_envs))
    after = load_checkpoint(folder)
    assert after["step"] >= 80 * num_envs
    assert len(after["modules"]["buffer"]["lengths"]) == after["num_episodes"] > saved["num_episodes"]
    assert after["modules"]["critic"]["num_updates"] > saved["modules"]["critic"]["num_updates"] > 0
    assert all(np.isfinite(value) for _, value in scalars(folder)["train/critic_loss"])
    if num_envs == 4:
        assert np.isfinite(enjoy.main(enjoy.Args(folder, episodes=3, greedy=True))["eval/ep_reward"])


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--env-id mpe/simple_spread_v3?continuous_actions=True", "try a ..._continuous_action.py"),
        ("--mixing-dim 0", "--mixing-dim must be greater than 0"),
        ("--batch-size 20 --buffer-size 10", "--batch-size 20 episodes do not fit into --buffer-size 10"),
    ],
)
def test_bad_input(flags, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["facmac.py", *flags.split(), "--runs-dir", str(tmp_path / "runs")])
    with pytest.raises(SystemExit) as exit_:
        launch(facmac.main, Args)
    line = capsys.readouterr().err
    assert exit_.value.code == 2 and line.startswith("facmac: ") and text in line and line.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.learning
def test_is_better_than_the_untrained_policy_in_seconds(tmp_path):
    args = Args(env_id="mpe/simple_v3", total_timesteps=20_000, runs_dir=str(tmp_path), eval_episodes=0)
    args = dataclasses.replace(args, learning_rate_actor=1e-3, learning_rate_critic=1e-3, polyak=0.01, eval_steps=10**6)
    folder = facmac.main(args)
    envs = facmac.make_envs(args, 32)
    agent = facmac.Agent(envs, args)
    untrained = evaluate(envs, facmac.make_policy(agent, greedy=False), 320, seed=7)
    agent.load_state_dict(load_checkpoint(folder)["modules"]["agent"])
    trained = evaluate(envs, facmac.make_policy(agent, greedy=False), 320, seed=7)
    error = np.hypot(untrained["eval/std_ep_reward"], trained["eval/std_ep_reward"]) / np.sqrt(320)
    assert trained["eval/ep_reward"] - untrained["eval/ep_reward"] > 5 * error
