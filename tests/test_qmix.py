"""qmix.py: the mixing network's monotony, its definition, torchrl's with the same weights, targets and loss."""

from cleanmarl import qmix

import numpy as np
import optional
import pytest
import torch
import torch.nn.functional as F
from test_value_family import assert_same_update
from test_vdn import (
    assert_agents_find_the_best_joint_action,
    assert_targets_are_their_definition,
    case,
    value_of,
    values,
)


# proves qmix-1
def test_the_teams_value_rises_with_each_agents():
    torch.manual_seed(0)
    mixer = qmix.Mixer(3, 5, 8, 16).double()
    q, state = torch.randn(50, 4, 3).double().requires_grad_(), torch.randn(50, 4, 5).double()
    total = mixer(q, state)
    (gradient,) = torch.autograd.grad(total.sum(), q)
    assert total.shape == (50, 4, 1) and (gradient >= 0).all() and (gradient > 0).float().mean() > 0.9
    assert gradient.std(0).min() > 1e-3  # by how much depends on the state


def test_agents_find_the_best_joint_action():
    assert_agents_find_the_best_joint_action(qmix)


# proves qmix-2
def test_the_mixing_network_is_the_papers():
    """Two layers, whose weights are |hypernetworks of the state|; ELU between them; a last bias of two layers."""
    torch.manual_seed(0)
    mixer = qmix.Mixer(3, 5, 8, 16).double()
    q, state = torch.randn(2, 4, 3).double(), torch.randn(2, 4, 5).double()
    total = mixer(q, state)
    for b, t in np.ndindex(2, 4):
        s = state[b, t]
        weight1 = mixer.weight1(s).abs().view(3, 8)
        hidden = F.elu(q[b, t] @ weight1 + mixer.bias1(s))
        expected = hidden @ mixer.weight2(s).abs() + mixer.bias2(s)
        torch.testing.assert_close(total[b, t], expected)
    for name, sizes in {"weight1": (5, 16, 24), "weight2": (5, 16, 8), "bias2": (5, 8, 1)}.items():
        first, relu, last = getattr(mixer, name)
        assert (first.in_features, first.out_features, last.out_features) == sizes and isinstance(relu, torch.nn.ReLU)
    assert (mixer.bias1.in_features, mixer.bias1.out_features) == (5, 8)
    other = mixer(q, state.roll(1, 1))
    assert ((other - total).abs() > 1e-3).all()


@optional.needs("torchrl")
def test_the_mixing_network_is_that_of_torchrl():
    from torchrl.modules.models.multiagent import QMixer

    torch.manual_seed(0)
    theirs = QMixer(state_shape=(5,), mixing_embed_dim=8, n_agents=3, device="cpu")
    ours = qmix.Mixer(3, 5, 8, 5)
    for name, module in {"weight1": theirs.hyper_w_1, "weight2": theirs.hyper_w_final}.items():
        first, _, last = getattr(ours, name)  # theirs has one layer: the first of ours is to do nothing
        first.weight.data, first.bias.data = torch.eye(5), torch.zeros(5)
        last.load_state_dict(module.state_dict())
    ours.bias1.load_state_dict(theirs.hyper_b_1.state_dict())
    ours.bias2.load_state_dict(theirs.V.state_dict())
    q, state = torch.randn(6, 7, 3), torch.rand(6, 7, 5)  # none is negative, for the ReLU between them
    torch.testing.assert_close(ours(q, state), theirs(q[..., None], state), atol=1e-6, rtol=0)


def test_the_dead_count_as_zero():
    _, agent, _, batch = case(qmix)
    q = torch.randn(*batch.alive.shape).double()
    ours = agent.mix(q, batch.alive, batch.state)
    torch.testing.assert_close(ours, agent.mixer(q.masked_fill(~batch.alive, 0), batch.state))


# proves qmix-3
def test_the_scale_of_the_states_makes_no_difference():
    args, agent, target, batch = case(qmix)
    assert_same_update(qmix, agent, target, args, batch, batch._replace(state=30 * batch.state - 7))


def test_states_are_normalised_by_those_of_all_batches():
    args, agent, target, batch = case(qmix)
    optimizer, seen = torch.optim.SGD(agent.parameters(), lr=0.1), []
    for shift in (0, 5):
        batch = batch._replace(state=batch.state + shift)
        qmix.update(agent, target, optimizer, batch, args)
        seen.append(batch.state[:, :-1][batch.weight[..., 0] > 0])  # none of the padding, and no final state
    torch.testing.assert_close(agent.state_stats.mean[0], torch.cat(seen).mean(0))
    torch.testing.assert_close(agent.state_stats.var[0], torch.cat(seen).var(0, correction=0))


@pytest.mark.parametrize("td_lambda", [0.0, 0.6])
@pytest.mark.parametrize("double_q", [True, False])
def test_targets_are_their_definition(td_lambda, double_q):
    assert_targets_are_their_definition(qmix, td_lambda=td_lambda, double_q=double_q, gamma=0.9)


def test_loss_is_the_mean_squared_error_of_the_joint_actions_taken():
    args, agent, target_agent, batch = case(qmix)
    q = values(agent, batch)
    target = qmix.td_targets(q.detach(), target_agent, batch, args)
    errors = []
    for b, t in np.ndindex(batch.reward.shape[:2]):
        if batch.weight[b, t]:
            taken = q[b, t].gather(-1, batch.action[b, t][:, None])[:, 0]
            errors.append((value_of(agent, taken, batch, b, t) - target[b, t, 0]) ** 2)
    torch.testing.assert_close(qmix.value_loss(agent, q, batch, target), torch.stack(errors).mean())
