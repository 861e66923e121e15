"""dop.py: the decomposed policy gradient, tree backup and TD(lambda) against their definitions, masks, deaths, runs."""

import copy
import itertools
import sys

from cleanmarl import coma, dop, enjoy, vdn
from cleanmarl.cli import launch
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_maddpg import alone
from test_vdn import recorded, world
from toys import Quiet, code, double

SMALL = {"total_timesteps": 400, "batch_size": 4, "on_policy_episodes": 4, "eval_episodes": 0, "num_eval_ep": 2}
CPU = torch.device("cpu")


def case(epsilon=0.25, **changes):
    """Arguments, agent, critic and its target of other weights, and 12 episodes, side by side; all in float64.

    The share of random actions, and that of each legal one, are exact in float32 too.
    """
    torch.manual_seed(0)
    envs, args = world(3), dop.Args(**changes)
    agent, critic, target_critic = dop.Agent(envs, args), dop.Critic(envs, args), dop.Critic(envs, args)
    agent.epsilon.fill_(epsilon)
    with torch.no_grad():
        agent.actor[-1].weight *= 20  # policies far from uniform
    buffer, run, now = dop.Buffer(envs, args), Quiet(), envs.reset(seed=1)
    while run.num_episodes < 12:
        now = dop.collect(agent, envs, now, buffer, run)
    return args, agent.double(), critic.double(), target_critic.double(), double(buffer.latest(12, CPU))


def policies(agent, batch, b, t):
    """For each agent its actions of positive probability with these, by their definition, in row t of episode b."""
    logits, mask = agent.actor(batch.obs[b])[t], batch.action_mask[b, t]
    found = []
    for logit, legal in zip(logits, mask):
        probs = (1 - agent.epsilon) * logit[legal].softmax(-1) + agent.epsilon / legal.sum()
        found.append(list(zip(legal.nonzero().flatten().tolist(), probs)))
    return found


def q_tot(critic, batch, b, t, action):
    """The value of a joint action in row t of episode b, agent by agent."""
    state, obs = batch.state[b, t], batch.obs[b, t]
    k, total = critic.k(state), critic.b(state)[0]
    q = critic.values(state[None, None], obs[None, None])[0, 0]
    for i, a in enumerate(action):
        if batch.alive[b, t, i]:
            total = total + k[i].abs() * q[i, a]
    return total


def expected_q_tot(agent, critic, batch, b, t):
    """Its mean over all joint actions, enumerated."""
    mean = 0
    for joint in itertools.product(*policies(agent, batch, b, t)):
        probability = torch.stack([p for _, p in joint]).prod()
        mean = mean + probability * q_tot(critic, batch, b, t, [a for a, _ in joint])
    return mean


# proves dop-1
def test_the_critic_is_linear_with_weights_that_are_not_negative_and_grows_with_each_of_its_parts():
    _, _, critic, _, batch = case()
    q = torch.randn(*batch.alive.shape, dtype=torch.float64, requires_grad=True)
    total = critic.mix(q, batch.state, batch.alive)
    (k,) = torch.autograd.grad(total.sum(), q)
    assert (critic.k(batch.state) < 0).any() and (k >= 0).all() and (k[batch.alive] > 0).all()
    assert not k[~batch.alive].any() and (~batch.alive).any()
    torch.testing.assert_close(total, (k * q).sum(-1, keepdim=True) + critic.b(batch.state))
    assert critic.b(batch.state).abs().min() > 0


# proves dop-2
@pytest.mark.parametrize("t", [0, 2, 3])  # agent 1 is dead in the last
def test_the_gradient_is_that_of_the_expected_value_of_all_joint_actions(t):
    """Each joint action once, weighed by its probability, in place of samples of the policy."""
    _, agent, critic, _, batch = case()
    for b in range(4):
        joints = list(itertools.product(*policies(agent, batch, b, t)))
        B, probability = len(joints), torch.stack([torch.stack([p for _, p in joint]).prod() for joint in joints])
        row = dop.Batch(*(x[b : b + 1, t : t + 2].expand(B, *[-1] * (x.ndim - 1)) for x in batch))
        action = torch.tensor([[[a for a, _ in joint]] for joint in joints])
        row = row._replace(action=action, weight=probability.detach().view(B, 1, 1))
        expected = expected_q_tot(agent, critic, batch, b, t)
        loss, parameters = dop.actor_loss(agent, critic, row), list(agent.parameters())
        for ours, definition in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters)):
            torch.testing.assert_close(ours, -definition, rtol=1e-9, atol=1e-12)
            assert definition.any()


# proves dop-5
def test_what_an_agent_cannot_change_weighs_no_action():
    """With a number added to all its values every single sample gives the same gradient, not only their mean."""
    _, agent, critic, _, batch = case()
    parameters = list(agent.parameters())
    before = torch.autograd.grad(dop.actor_loss(agent, critic, batch), parameters)
    with torch.no_grad():
        critic.critic[-1].bias += 100
    after = torch.autograd.grad(dop.actor_loss(agent, critic, batch), parameters)
    torch.testing.assert_close(after, before)
    with pytest.raises(RuntimeError):  # the policy gradient leaves the critic alone
        torch.autograd.grad(dop.actor_loss(agent, critic, batch), list(critic.critic.parameters()))


def by_definition(args, agent, critic, batch, b):
    """y_t (T,) of an episode: Q_tot + sum_l gamma^l c_l delta_t+l with c_l = prod lambda pi(a), as the paper has it."""
    T = int(batch.weight[b].sum())
    taken = [q_tot(critic, batch, b, t, batch.action[b, t]) for t in range(T)]
    expected = [expected_q_tot(agent, critic, batch, b, t) for t in range(T + 1)]
    trace = []
    for t in range(T):
        of_each = [dict(p)[int(a)] for p, a in zip(policies(agent, batch, b, t), batch.action[b, t])]
        trace.append(torch.stack([p for p, alive in zip(of_each, batch.alive[b, t]) if alive]).prod())
    following = [expected[t + 1] * batch.goes_on[b, t, 0] for t in range(T)]
    delta = [batch.reward[b, t, 0] + args.gamma * following[t] - taken[t] for t in range(T)]
    targets = []
    for t in range(T):
        target, c = taken[t], 1.0
        for later in range(t, T):
            c = c * args.tb_lambda * trace[later] if later > t else c
            target = target + args.gamma ** (later - t) * c * delta[later]
        targets.append(target)
    return torch.stack(targets)


# proves dop-3
def test_tree_backup_is_its_definition_with_all_joint_actions_enumerated():
    args, agent, critic, _, batch = case(gamma=0.9, tb_lambda=0.8)
    ours = dop.critic_targets(agent, critic, batch, False, args)[..., 0]
    lengths, ends = batch.weight[..., 0].sum(1).int(), set()
    for b in range(6):
        definition = by_definition(args, agent, critic, batch, b)
        torch.testing.assert_close(ours[b, : lengths[b]], definition, rtol=1e-9, atol=1e-9)
        ends.add(float(batch.goes_on[b, lengths[b] - 1, 0]))
    assert ends == {0.0, 1.0} and len(set(lengths.tolist())) == 3  # terminated and truncated, 5 to 7 steps


def test_tree_backup_by_hand():
    """Two steps of one agent: what was done at the second has probability 0.25 and was better than expected by 4."""
    one = lambda *x: torch.tensor(x, dtype=torch.float64).view(1, -1, 1)  # noqa: E731
    batch = dop.Batch(None, None, None, None, None, reward=one(1, 2), weight=one(1, 1), goes_on=one(1, 0))
    taken, following = one(7, -2), one(10, 99)
    # y_2 = 2, which is 4 more than -2; y_1 = 1 + 0.5 (10 + 0.5 * 0.25 * 4) = 6.25
    assert dop.lambda_return(batch, taken, following, one(0.9, 0.25), 0.5, 0.5).flatten().tolist() == [6.25, 2]


# proves dop-4
def test_on_policy_targets_are_td_lambda():
    """As coma.py has it, episode by episode; after a truncation comes the mean over joint actions."""
    args, agent, _, target_critic, batch = case(gamma=0.9, td_lambda=0.6)
    ours = dop.critic_targets(agent, target_critic, batch, True, args)[..., 0]
    lengths = batch.weight[..., 0].sum(1).int()
    for b in range(6):
        T = lengths[b]
        value = torch.stack([q_tot(target_critic, batch, b, t, batch.action[b, t]) for t in range(T)])
        last = expected_q_tot(agent, target_critic, batch, b, T) if batch.goes_on[b, T - 1] else torch.zeros(())
        reward, value, last = (x.detach().numpy() for x in (batch.reward[b, :T, 0], value, last))
        done = 1 - batch.goes_on[b, :T, 0].numpy()
        definition = coma.td_lambda(reward, value, last, done, 0.9, 0.6)
        np.testing.assert_allclose(ours[b, :T], definition, rtol=1e-9)
        alone = dop.Batch(*(x[b : b + 1, : T + x.shape[1] - ours.shape[1]] for x in batch))  # without padding
        theirs = dop.critic_targets(agent, target_critic, alone, True, args)[0, :, 0]
        torch.testing.assert_close(theirs, ours[b, :T], rtol=1e-9, atol=1e-9)


def test_losses_are_means_over_the_steps_that_count():
    """The critic's against torch's own; a batch of the same episodes twice has the same losses."""
    args, agent, critic, target_critic, batch = case()
    target, keep = dop.critic_targets(agent, target_critic, batch, True, args), batch.weight.bool()
    q = critic.values(batch.state, batch.obs)[:, :-1].gather(-1, batch.action[..., None]).squeeze(-1)
    taken = critic.mix(q, batch.state[:, :-1], batch.alive[:, :-1])
    loss = dop.critic_loss(critic, batch, target)
    torch.testing.assert_close(loss, F.mse_loss(taken[keep], target[keep]))
    twice = dop.Batch(*(torch.cat([x, x]) for x in batch))
    torch.testing.assert_close(dop.actor_loss(agent, critic, twice), dop.actor_loss(agent, critic, batch))
    torch.testing.assert_close(dop.critic_loss(critic, twice, torch.cat([target, target])), loss)
    shorter = batch._replace(weight=batch.weight[:1].expand_as(batch.weight))  # of one length, as if cut
    parts = [dop.actor_loss(agent, critic, dop.Batch(*(x[b : b + 1] for x in shorter))) for b in range(len(q))]
    torch.testing.assert_close(dop.actor_loss(agent, critic, shorter), torch.stack(parts).mean())


def test_an_agents_values_are_of_the_state_what_it_sees_and_who_it_is():
    _, _, critic, _, batch = case()
    values, ids = critic.values(batch.state, batch.obs), torch.eye(3, dtype=torch.float64)
    for b, t, i in np.ndindex(2, *batch.obs.shape[1:3]):
        x = torch.cat([batch.state[b, t], batch.obs[b, t, i], ids[i]])
        torch.testing.assert_close(values[b, t, i], alone(critic.critic[1:], 0)(x))


def test_any_of_the_episodes_is_learned_from_once_there_are_enough(tmp_path, monkeypatch):
    args = dop.Args(batch_size=5, on_policy_episodes=4)
    buffer, finished = recorded(dop, world(3), args, 30)
    torch.manual_seed(2)
    index = torch.randint(len(finished), (50,)).tolist()
    torch.manual_seed(2)
    batch = buffer.sample(50, CPU)
    assert set(index) == set(range(len(finished)))
    for b, k in enumerate(index):
        np.testing.assert_array_equal(batch.obs[b, 0], finished[k][0][0]["obs"])
    counts = []
    monkeypatch.setattr(dop, "update", lambda *given: counts.append(len(given[4].episodes)) or {})
    for fewer, more in ((3, 6), (6, 3)):
        flags = {"batch_size": fewer, "on_policy_episodes": more, "num_envs": 1, "total_timesteps": 250}
        dop.main(dop.Args(**SMALL | flags, runs_dir=str(tmp_path)))
    assert counts == 2 * [6, 7, 8, 9, 10]


# proves dop-4
@pytest.mark.parametrize("clip", [dop.Args.clip_gradients, 0.01, 0, -1])
def test_an_update_is_critic_steps_on_both_losses_and_then_one_of_the_actor(clip):
    flags = {"epochs": 3, "kappa": 0.3, "batch_size": 5, "on_policy_episodes": 4, "target_network_update_freq": 2}
    flags["clip_gradients"] = clip
    args, agent, critic, target_critic, _ = case(**flags)
    agent, critic, target_critic = (x.float() for x in (agent, critic, target_critic))
    buffer, _ = recorded(dop, world(3), args, 50)
    theirs = [copy.deepcopy(x) for x in (agent, critic, target_critic)]
    optimizers = [torch.optim.SGD(x.parameters(), lr=lr) for x, lr in ((agent, 0.5), (critic, 0.1))]
    torch.manual_seed(3)
    metrics = dop.update(agent, critic, target_critic, optimizers, buffer, args)

    actor, other, target = theirs
    torch.manual_seed(3)

    def step(network, loss, lr):
        gradients = torch.autograd.grad(loss, list(network.parameters()), materialize_grads=True)
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        for p, g in zip(network.parameters(), gradients):
            p.data -= lr * g * (min(1, clip / (norm + 1e-6)) if clip > 0 else 1)
        return norm.item()

    latest, losses, norms = buffer.latest(4, CPU), [], []
    for i in range(3):
        replayed = buffer.sample(5, CPU)
        on, off = (
            dop.critic_loss(other, batch, dop.critic_targets(actor, target, batch, on_policy, args))
            for batch, on_policy in ((latest, True), (replayed, False))
        )
        losses.append((0.3 * off + 0.7 * on).item())
        norms.append(step(other, 0.3 * off + 0.7 * on, 0.1))
        if i == 1:
            dop.soft_update(target, other, args.polyak)
    loss = dop.actor_loss(actor, other, latest)
    norm = step(actor, loss, 0.5)
    for ours, mine in zip((agent, critic, target_critic), theirs):
        for x, y in zip(ours.parameters(), mine.parameters(), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    expected = {"critic_loss": np.mean(losses), "critic_gradients": np.mean(norms)}
    expected |= {"actor_loss": loss.item(), "actor_gradients": norm, "num_updates": 3}
    assert metrics == {f"train/{name}": pytest.approx(x, rel=1e-3) for name, x in expected.items()}


# proves dop-6
def test_exploration_is_part_of_the_policy(monkeypatch):
    envs = dop.make_envs(dop.Args(env_id="matrix/penalty"), 4000)
    args = dop.Args(env_id="matrix/penalty", num_envs=4000)
    agent, buffer = dop.Agent(envs, args), dop.Buffer(envs, args)
    agent.epsilon.fill_(0.5)
    with torch.no_grad():
        agent.actor[-1].weight *= 1000  # sure of one action
    dop.collect(agent, envs, envs.reset(seed=1), buffer, Quiet())
    batch = buffer.latest(4000, CPU)
    probs = agent.logits(batch.obs, batch.action_mask)[:, :-1].softmax(-1).detach()
    frequency = F.one_hot(batch.action, 9).float().mean((0, 1))
    assert probs.min() >= 0.5 / 9 - 1e-6
    np.testing.assert_allclose(frequency, probs.mean((0, 1)), atol=0.05)
    best = (batch.action == probs.argmax(-1)).double()[:, 0]
    assert abs(best.prod(-1).mean() - best.mean(0).prod()) < 0.05  # agents explore one without the other


@pytest.mark.parametrize("on_policy", [True, False])
def test_padding_and_the_dead_add_nothing(on_policy):
    args, agent, critic, target_critic, batch = case()
    lengths = batch.weight[..., 0].sum(1, keepdim=True)
    rows = torch.arange(batch.obs.shape[1]) > lengths  # (B, T + 1), the row after the last step counts
    steps = torch.arange(batch.action.shape[1]) >= lengths
    dead = ~batch.alive & batch.alive.any(-1, keepdim=True)
    assert rows.any() and dead.any()
    other = batch._replace(
        obs=batch.obs + 1e3 * (rows[..., None] | dead)[..., None],
        state=batch.state + 1e3 * rows[..., None],
        action=torch.where(steps[..., None] | dead[:, :-1], 3, batch.action),
        reward=batch.reward + 1e3 * steps[..., None],
    )
    losses = []
    for x in (batch, other):
        target = dop.critic_targets(agent, target_critic, x, on_policy, args)
        losses.append((dop.critic_loss(critic, x, target), dop.actor_loss(agent, critic, x)))
    torch.testing.assert_close(*losses)


def test_parts_that_the_tests_of_vdn_prove():
    for name in ("make_envs", "Batch", "padded", "reward_of_team", "soft_update"):
        assert code(getattr(dop, name)) == code(getattr(vdn, name)), name
    assert code(dop.make_policy) == code(coma.make_policy) and code(dop.gumbel_noise) == code(coma.gumbel_noise)
    methods = [{part.split("(")[0]: part for part in code(x.Buffer).split("\n    def ")} for x in (dop, vdn)]
    assert methods[0]["to_episode"] == methods[1]["to_episode"]
    assert methods[0]["add"].replace("episodes.append", "append") == methods[1]["add"]


@pytest.mark.parametrize("capacity", [100, 5])
def test_the_latest_are_those_that_ended_last_and_a_checkpoint_has_all(capacity):
    args = dop.Args(buffer_size=capacity, batch_size=5, on_policy_episodes=4)
    buffer, finished = recorded(dop, world(3), args, 50)
    assert len(buffer.episodes) == min(capacity, len(finished))
    latest = buffer.latest(4, CPU)
    for i, (steps, final) in enumerate(finished[-4:]):
        rows = np.stack([*(step["obs"] for step in steps), final["obs"]])
        np.testing.assert_array_equal(latest.obs[i, : len(rows)], rows)
        assert latest.weight[i].sum() == len(steps)
    again = dop.Buffer(world(3), args)
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is shorter"):  # of a copy that loads less than it saves
        again.load_state_dict(buffer.state_dict() | {"priorities": torch.ones(3)})
    again.load_state_dict(buffer.state_dict())
    for one, other in zip(buffer.episodes, again.episodes, strict=True):
        for x, y in zip(one, other, strict=True):
            np.testing.assert_array_equal(x, y)
            assert x.dtype == y.dtype


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("env_id", ["mpe/simple_spread_v3", "toy/team?varied=True", "matrix/climbing"])
def test_two_runs_repeat_and_a_resumed_one_goes_on_as_if_it_had_not_stopped(env_id, toy, tmp_path, capsys):
    flags = SMALL | {"env_id": env_id, "total_timesteps": 60, "runs_dir": str(tmp_path)}
    if env_id.startswith("mpe"):
        flags["total_timesteps"] = 400
    whole, same = (load_checkpoint(dop.main(dop.Args(**flags)))["modules"] for _ in range(2))
    assert equal(whole, same) and whole["critic"]["num_updates"] > 0
    if env_id.startswith("mpe"):
        folder = dop.main(dop.Args(**flags | {"total_timesteps": 200}))
        dop.main(dop.Args(**flags | {"resume": folder}))
        assert equal(load_checkpoint(folder)["modules"], whole)
        metrics = enjoy.main(enjoy.Args(folder, episodes=2))
        assert "dop at step 400, 2 episodes" in capsys.readouterr().out and metrics["eval/ep_length"] == 25


def test_a_run_explores_and_learns_as_its_flags_say(tmp_path, monkeypatch):
    """Exploration falls linearly in environment steps; each network has its own rate."""
    plain, seen = dop.update, []

    def update(agent, critic, target_critic, optimizers, buffer, args):
        for optimizer, network, rate in zip(optimizers, (agent, critic), (1e-4, 2e-4), strict=True):
            (group,) = optimizer.param_groups
            assert type(optimizer) is torch.optim.Adam and group["lr"] == rate
            assert set(group["params"]) == set(network.parameters())
        seen.append(round(agent.epsilon.item(), 6))
        return plain(agent, critic, target_critic, optimizers, buffer, args)

    monkeypatch.setattr(dop, "update", update)
    flags = SMALL | {"num_envs": 4, "epsilon_start": 0.5, "epsilon_end": 0.1, "epsilon_timesteps": 200}
    dop.main(dop.Args(**flags, learning_rate_actor=1e-4, learning_rate_critic=2e-4, runs_dir=str(tmp_path)))
    assert seen == [0.5, 0.3, 0.1, 0.1]  # rounds of 4 episodes with 25 steps


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--env-id mpe/simple_spread_v3?continuous_actions=True", "try a ..._continuous_action.py"),
        ("--buffer-size 10", "--buffer-size 10 is less than the 32 episodes of a batch"),
        ("--buffer-size 10 --batch-size 4", "--buffer-size 10 is less than the 16 episodes of a batch"),
        ("--kappa 1.1", "--kappa must be in [0, 1], not 1.1"),
        ("--epsilon-start 1", "--epsilon-start must be in [0, 1), not 1"),
    ],
)
def test_bad_input(flags, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dop.py", *flags.split(), "--runs-dir", str(tmp_path / "runs")])
    with pytest.raises(SystemExit) as stopped:
        launch(dop.main, dop.Args)
    line = capsys.readouterr().err
    assert stopped.value.code == 2 and text in line and line.count("\n") == 1
    assert not (tmp_path / "runs").exists()
