"""mappo_lstm.py: what the critics see, and values that no update of the statistics moves.

What it shares with ippo_lstm.py and coppo_lstm.py is in test_recurrent_family.py.
"""

from cleanmarl import mappo, mappo_lstm
from cleanmarl.mappo_lstm import Args

import pytest
import test_recurrent_family as family
import torch

SMALL = family.SMALL
NOISE = "toy/team?see=noise&varied=True"


def collected(args):
    return family.collected(mappo_lstm, args)


def test_settings_are_those_of_mappo_plus_a_memory():
    assert vars(Args()) == vars(mappo.Args()) | {"cell": "gru", "activation": "relu"}


# proves mappo-1
@pytest.mark.parametrize("shared", [True, False])
def test_an_update_of_the_statistics_moves_no_value(shared, team):
    """In the script's own data flow: the values after `estimate` are those of the rollout, in the unit of returns."""
    _, agent, ((rollout, batch),), _ = collected(Args(env_id=NOISE, **SMALL, share_parameters=shared))
    stats = agent.value_stats
    assert (stats.count == (240 if shared else 80)).all() and (stats.std != 1).all()
    with torch.no_grad():
        seen = batch.state, batch.obs, batch.alive, batch.critic_memory, batch.forget
        value = agent.normalized_value(*seen)[0]
    torch.testing.assert_close(value, batch.value, atol=1e-4, rtol=1e-4)
    before = torch.from_numpy(rollout.value).flatten(0, 1)
    torch.testing.assert_close(stats.denormalize(value[..., None]).squeeze(-1), before, atol=1e-4, rtol=1e-4)


# proves mappo-2, mappo-3
@pytest.mark.parametrize("shared", [True, False])
def test_critics_see_the_state_and_of_the_dead_zeros(shared, team):
    _, agent, ((_, batch),), _ = collected(Args(env_id=NOISE, **SMALL, share_parameters=shared))
    rest = batch.critic_memory, batch.forget
    with torch.no_grad():
        value, _ = agent.normalized_value(batch.state, batch.obs, batch.alive, *rest)
        dead = (1 - batch.alive)[..., None]
        assert dead.any()
        other, _ = agent.normalized_value(batch.state, batch.obs + 9 * dead, batch.alive, *rest)
        assert torch.equal(value, other)
        other, _ = agent.normalized_value(batch.state + 1, batch.obs, batch.alive, *rest)
        assert (value[:4] != other[:4]).all() and (batch.alive[:4] == 1).all()  # the first step
        state = batch.state.clone()
        state[12:16] += 1  # the fourth step, in which agent 1 is dead
        other, _ = agent.normalized_value(state, batch.obs, batch.alive, *rest)
        assert torch.equal(value[:16, 1], other[:16, 1]) and (value[12:16, 0] != other[12:16, 0]).all()


@pytest.mark.parametrize("shared", [True, False])
def test_dead_agents_add_nothing_to_the_policy_but_to_the_critics(shared, team):
    args = Args(env_id=NOISE, **SMALL, share_parameters=shared)
    _, agent, ((_, batch),), _ = collected(args)
    noise = (1 - batch.alive) * 1e3
    other = batch._replace(advantage=batch.advantage + noise, log_prob=batch.log_prob - noise)
    (loss, stats), (loss2, stats2) = (mappo_lstm.mappo_loss(agent, b, args) for b in (batch, other))
    torch.testing.assert_close(loss, loss2)
    torch.testing.assert_close(stats, stats2)
    _, stats2 = mappo_lstm.mappo_loss(agent, batch._replace(return_=batch.return_ + noise), args)
    assert stats2["value_loss"] > stats["value_loss"] + 1 and stats2["policy_loss"] == stats["policy_loss"]
