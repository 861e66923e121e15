"""qtran.py: its three losses against their definition, what they reach, and who learns from which."""

import copy
import itertools

from cleanmarl import qtran
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
from test_vdn import case, values


def joint_value(agent, batch, b, t, action):
    """Q_jt of one joint action in row t of episode b, from its network."""
    one_hot = torch.zeros(3, 4).double()
    for a in range(3):
        one_hot[a, action[a]] = float(batch.alive[b, t, a])
    return agent.joint_network(torch.cat([batch.state[b, t], one_hot.flatten()]))[0]


def best_of(q, batch, b, t):
    return [max(range(4), key=lambda k: (batch.action_mask[b, t, a, k].item(), q[b, t, a, k].item())) for a in range(3)]


# proves vdn-3
@pytest.mark.parametrize("td_lambda", [0.0, 0.6])
@pytest.mark.parametrize("double_q", [True, False])
def test_targets_are_joint_values_of_the_agents_best_actions(double_q, td_lambda):
    args, agent, target_agent, batch = case(qtran, double_q=double_q, gamma=0.9, td_lambda=td_lambda)
    q = values(agent, batch)
    ours = qtran.td_targets(q.detach(), target_agent, batch, args)
    chooser = q if double_q else values(target_agent, batch)
    for b, length in enumerate(batch.weight[..., 0].sum(1).int().tolist()):
        for t in range(length):
            following = joint_value(target_agent, batch, b, t + 1, best_of(chooser, batch, b, t + 1))
            if t + 1 < length:
                following = (1 - td_lambda) * following + td_lambda * ours[b, t + 1, 0]
            ends = not batch.alive[b, t + 1].any()
            torch.testing.assert_close(ours[b, t, 0], batch.reward[b, t, 0] + (0 if ends else 0.9 * following))


def gradients(agent, loss):
    return torch.autograd.grad(loss, list(agent.parameters()), retain_graph=True, materialize_grads=True)


# proves qtran-1, qtran-2, qtran-3, vdn-6
def test_losses_are_those_of_the_paper():
    args, agent, target_agent, batch = case(qtran)
    q = values(agent, batch)
    target = qtran.td_targets(q.detach(), target_agent, batch, args)
    td, opt, nopt = [], [], []
    for b, t in np.ndindex(batch.reward.shape[:2]):
        if not batch.weight[b, t]:
            continue
        total = {}
        best, taken = best_of(q, batch, b, t), batch.action[b, t].tolist()
        for name, action in (("best", best), ("taken", taken)):
            living = [q[b, t, a, action[a]] for a in range(3) if batch.alive[b, t, a]]
            total[name] = sum(living) + agent.state_network(batch.state[b, t])[0]
        td.append(joint_value(agent, batch, b, t, taken) - target[b, t, 0])
        opt.append(total["best"] - joint_value(agent, batch, b, t, best).detach())
        nopt.append((total["taken"] - joint_value(agent, batch, b, t, taken).detach()).clamp(max=0))
    assert min(nopt) < 0 and max(nopt) == 0
    ours = qtran.losses(agent, q, batch, target)
    for loss, errors in zip(ours, (td, opt, nopt), strict=True):
        expected = torch.stack(errors).square().mean()
        torch.testing.assert_close(loss, expected)
        for mine, theirs in zip(*(gradients(agent, x) for x in (loss, expected))):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("max_norm", [-1.0, 0.1])
def test_update_is_one_step_down_the_clipped_gradient_of_the_weighted_losses(max_norm):
    args, agent, target_agent, batch = case(qtran, opt_coef=0.3, nopt_coef=0.7, clip_gradients=max_norm)
    other = copy.deepcopy(agent)
    metrics = qtran.update(agent, target_agent, torch.optim.SGD(agent.parameters(), lr=0.1), batch, args)
    q = values(other, batch)
    td, opt, nopt = qtran.losses(other, q, batch, qtran.td_targets(q.detach(), target_agent, batch, args))
    steps = gradients(other, td + 0.3 * opt + 0.7 * nopt)
    norm = torch.cat([step.flatten() for step in steps]).norm().item()
    scale = 1 if max_norm < 0 else max_norm / norm
    for p, old, step in zip(agent.parameters(), other.parameters(), steps, strict=True):
        torch.testing.assert_close(p, old - 0.1 * scale * step, rtol=1e-5, atol=1e-8)
    named = {"value_loss": td.item(), "opt_loss": opt.item(), "nopt_loss": nopt.item(), "gradients": norm}
    assert metrics == {f"train/{key}": pytest.approx(x) for key, x in (named | {"num_updates": 1}).items()}


def test_the_conditions_hold_after_learning(tmp_path):
    """On a matrix game where no sum is the team's value: it is nowhere below it, and equal where it is largest."""
    flags = {"env_id": "matrix/climbing", "num_envs": 32, "batch_size": 128, "learning_rate": 3e-3, "hidden_dim": 32}
    args = qtran.Args(**flags, total_timesteps=12_000, epochs=2, epsilon_end=1.0, polyak=1.0, eval_episodes=0,
                      eval_steps=10**9, runs_dir=str(tmp_path))  # fmt: skip
    folder = qtran.main(args)
    envs = qtran.make_envs(args, 1)
    agent = qtran.Agent(envs, args)
    agent.load_state_dict(load_checkpoint(folder)["modules"]["agent"])
    obs, info = (torch.from_numpy(x) for x in (envs.reset()[0], envs.reset()[1]["state"]))
    with torch.no_grad():
        q, value = agent.values(obs[None])[0, 0], agent.state_network(info)[0]
        alive = torch.ones(1, 1, 2)
        for u in itertools.product(range(3), repeat=2):
            joint = agent.joint_value(info[None], torch.tensor([[u]]), alive)[0, 0]
            assert joint.item() == pytest.approx(envs.table[u].item(), abs=1.5)
            excess = (q[0, u[0]] + q[1, u[1]] + value - joint).item()
            assert excess > -1.5
            if u == tuple(q.argmax(-1).tolist()):
                assert u == (0, 0) and abs(excess) < 1.5  # 11, the best of all
