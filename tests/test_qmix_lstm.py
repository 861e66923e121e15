"""qmix_lstm.py: the recurrent network of vdn_lstm.py with the mixing network of qmix.py."""

from cleanmarl import qmix, qmix_lstm, vdn_lstm

import pytest
import torch
from test_value_family import assert_same_update
from test_vdn import assert_agents_find_the_best_joint_action, assert_targets_are_their_definition, case, values
from test_vdn_lstm import (
    assert_memories_are_those_of_the_living,
    assert_what_an_agent_did_tells_on_its_own_next_values_alone,
)


def test_agents_find_the_best_joint_action():
    assert_agents_find_the_best_joint_action(qmix_lstm)


# proves recurrent-1
def test_memories_are_those_of_the_living_and_of_the_episodes_under_way():
    assert_memories_are_those_of_the_living(qmix_lstm)


# proves recurrent-3
def test_what_an_agent_did_tells_on_its_own_next_values_alone():
    assert_what_an_agent_did_tells_on_its_own_next_values_alone(qmix_lstm)


@pytest.mark.parametrize("td_lambda", [0.0, 0.6])
def test_targets_are_their_definition(td_lambda):
    assert_targets_are_their_definition(qmix_lstm, td_lambda=td_lambda, gamma=0.9)


# proves qmix-3
def test_the_scale_of_the_states_makes_no_difference():
    args, agent, target, batch = case(qmix_lstm)
    assert_same_update(qmix_lstm, agent, target, args, batch, batch._replace(state=30 * batch.state - 7))


def test_it_is_both_its_relatives():
    """Values as in vdn_lstm.py, mixed as in qmix.py."""
    _, agent, _, batch = case(qmix_lstm)
    _, relative, _, _ = case(vdn_lstm)
    relative.q_network.load_state_dict(agent.q_network.state_dict())
    q = values(agent, batch)
    torch.testing.assert_close(q, values(relative, batch))
    taken = q[..., 0]
    torch.testing.assert_close(
        agent.mix(taken, batch.alive, batch.state), qmix.Mixer.forward(agent.mixer, taken * batch.alive, batch.state)
    )
