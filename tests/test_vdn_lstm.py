"""vdn_lstm.py: memories of episodes that end at different times, of the dead, and targets from whole episodes."""

from types import SimpleNamespace

from cleanmarl import qmix_lstm, vdn_lstm
from cleanmarl.layers import as_numpy

import numpy as np
import pytest
import torch
import torch.nn as nn
from test_vdn import assert_targets_are_their_definition, case, values, world
from toys import Quiet


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_values_are_those_of_torchs_own_layers(cell):
    """Of the agent that never dies."""
    _, agent, _, batch = case(vdn_lstm, cell=cell)
    q = values(agent, batch)
    stacked = agent.q_network.cells[0]
    layer = {"gru": nn.GRU, "lstm": nn.LSTM}[cell](64, 64, batch_first=True).double()
    for name in ("weight_ih", "weight_hh"):
        getattr(layer, f"{name}_l0").data = getattr(stacked, name)[0].T.detach()
        bias = name.replace("weight", "bias")
        getattr(layer, f"{bias}_l0").data = getattr(stacked, bias)[0, 0].detach()
    for b, episode in enumerate(batch.obs):
        steps = int(batch.weight[b].sum()) + 1
        last_action = torch.cat([torch.zeros(1, 4), torch.eye(4)[batch.action[b, : steps - 1, 0]]])  # first none
        x = torch.cat([episode[:steps, 0], last_action, torch.eye(3)[:1].expand(steps, -1)], -1).double()
        hidden, _ = layer(agent.q_network[2](agent.q_network[1](x))[None])
        torch.testing.assert_close(q[b, :steps, 0], agent.q_network[-1](hidden[0]))


def assert_memories_are_those_of_the_living(script):
    """After a round each memory is the last action, and what the network has of exactly its own agent's past."""
    envs, run, args = world(3), Quiet(), script.Args()
    agent, buffer = script.Agent(envs, args), script.Buffer(envs, args)
    now = (*envs.reset(), script.first_memory(agent, 3, 3))
    q_network, under_way = as_numpy(agent.q_network), set()
    for _ in range(5):
        now = script.collect(agent, envs, now, buffer, run, 0.5)
        for i in range(3):
            memory = script.first_memory(agent, 1, 3)
            for obs, _, _, alive, action, _ in buffer.playing[i]:
                _, state = q_network(np.concatenate([obs[None], memory[..., :4]], -1), memory[..., 4:])
                memory = np.concatenate([np.eye(4)[action][None], state], -1)
                memory[:, ~alive] = 0
            np.testing.assert_allclose(now[2][i], memory[0], atol=1e-6)
            under_way.add(len(buffer.playing[i]))
    assert 0 in under_way and max(under_way) > 3  # agent 1 dies after its third step


# proves recurrent-1
def test_memories_are_those_of_the_living_and_of_the_episodes_under_way():
    assert_memories_are_those_of_the_living(vdn_lstm)


@pytest.mark.parametrize("script", [vdn_lstm, qmix_lstm])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_who_comes_back_remembers_nothing(script, cell):
    agent = script.Agent(world(1), script.Args(cell=cell))
    obs, alive = torch.randn(1, 6, 3, 3), torch.ones(1, 6, 3, dtype=torch.bool)
    action = torch.randint(4, (1, 5, 3))

    def values_from(t: int, alive: torch.Tensor) -> torch.Tensor:
        return agent.values(SimpleNamespace(obs=obs[:, t:], alive=alive[:, t:], action=action[:, t:]))

    all_alive = alive.clone()
    alive[0, 2:4, 1] = False
    q = values_from(0, alive)
    torch.testing.assert_close(q[:, 4:, 1], values_from(4, alive)[:, :, 1])
    torch.testing.assert_close(q[:, :, 0], values_from(0, all_alive)[:, :, 0])


def assert_what_an_agent_did_tells_on_its_own_next_values_alone(script):
    _, agent, _, batch = case(script)
    other = batch.action.clone()
    other[:, 2, 0] = (other[:, 2, 0] + 1) % 4
    differs = (values(agent, batch) != values(agent, batch._replace(action=other))).any(-1)  # (B, T + 1, A)
    assert differs[:, 3, 0].all() and not differs[:, :3].any() and not differs[..., 1:].any()


# proves recurrent-3
def test_what_an_agent_did_tells_on_its_own_next_values_alone():
    assert_what_an_agent_did_tells_on_its_own_next_values_alone(vdn_lstm)


@pytest.mark.parametrize("td_lambda", [0.0, 0.6])
@pytest.mark.parametrize("double_q", [True, False])
def test_targets_are_their_definition(td_lambda, double_q):
    assert_targets_are_their_definition(vdn_lstm, td_lambda=td_lambda, double_q=double_q, gamma=0.9)


def test_gradients_go_back_to_the_first_step():
    _, agent, _, batch = case(vdn_lstm)
    obs = batch.obs.clone().requires_grad_()
    q = agent.values(batch._replace(obs=obs))
    (gradient,) = torch.autograd.grad(q[:, 4, 0].sum(), obs)
    assert (gradient[:, :5, 0].abs().sum(-1) > 0).all() and (gradient[:, 5:] == 0).all()
