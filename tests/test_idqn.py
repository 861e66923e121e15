"""idqn.py: every agent's own targets and loss, and whether a death ends what it earns."""

from cleanmarl import idqn
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import torch
from test_vdn import CPU, played, recorded, values, world
from toys import double


def case(team_reward, **changes):
    args = idqn.Args(**changes)
    agent, target, buffer = played(idqn, world(3, team_reward=team_reward), args)
    return args, agent, target, double(buffer.sample(8, CPU))


# proves idqn-1
@pytest.mark.parametrize("team_reward", [False, True])
def test_the_dead_go_on_earning_what_the_team_does_and_nothing_of_their_own(team_reward):
    buffer, finished = recorded(idqn, world(3, team_reward=team_reward), idqn.Args(), 30)
    seen = 0
    for episode, (steps, final) in zip(buffer.episodes, finished, strict=True):
        for t, step in enumerate(steps):
            alive = step["agent_mask"]
            after = steps[t + 1]["agent_mask"] if t + 1 < len(steps) else final["agent_mask"]
            seen += (~alive).sum()
            if team_reward:
                assert (episode.weight[t] == 1).all() and (episode.goes_on[t] == after.any()).all()
                assert (episode.reward[t] == step["reward"][0]).all()  # agent 0 never dies
            else:
                np.testing.assert_array_equal(episode.weight[t], alive)
                np.testing.assert_array_equal(episode.goes_on[t], alive & after)
                np.testing.assert_array_equal(episode.reward[t], step["reward"])
    assert seen > 5


@pytest.mark.parametrize("team_reward", [False, True])
@pytest.mark.parametrize("td_lambda", [0.0, 0.6])
@pytest.mark.parametrize("double_q", [True, False])
def test_loss_is_that_of_learners_on_their_own(team_reward, td_lambda, double_q):
    """Agent by agent and step by step, by the definition."""
    args, agent, target_agent, batch = case(team_reward, td_lambda=td_lambda, double_q=double_q, gamma=0.9)
    q, target_q = values(agent, batch), values(target_agent, batch)
    target = idqn.td_targets(q.detach(), target_agent, batch, args)
    chooser, errors = q if double_q else target_q, []
    for b, a in np.ndindex(len(q), 3):
        length, expected = int(batch.weight[b, :, a].sum()), None
        for t in reversed(range(length)):
            legal = [k for k in range(4) if batch.action_mask[b, t + 1, a, k]]
            best = max(legal, key=lambda k: chooser[b, t + 1, a, k].item()) if legal else 0
            following = target_q[b, t + 1, a, best]
            if t + 1 < length:
                following = (1 - td_lambda) * following + td_lambda * expected
            goes_on = batch.alive[b, t + 1].any() if team_reward else batch.alive[b, t + 1, a]
            expected = (batch.reward[b, t, a] + (0.9 * following if goes_on else 0)).detach()
            torch.testing.assert_close(target[b, t, a], expected)
            errors.append((q[b, t, a, batch.action[b, t, a]] - expected) ** 2)
    assert len(errors) == batch.weight.sum() < batch.weight.numel()
    torch.testing.assert_close(idqn.value_loss(q, batch, target), torch.stack(errors).mean())


def test_agents_learn_their_own_rewards(tmp_path, toy):
    """Rewards 1, 2 and 3 at every step; with gamma 0 these are the values."""
    flags = {"env_id": "toy/each?may_die=False", "total_timesteps": 3000, "batch_size": 16, "learning_rate": 5e-3}
    args = idqn.Args(**flags, gamma=0.0, polyak=1.0, eval_episodes=0, eval_steps=10**6, runs_dir=str(tmp_path))
    folder = idqn.main(args)
    envs = idqn.make_envs(args, 1)
    agent = idqn.Agent(envs, args)
    agent.load_state_dict(load_checkpoint(folder)["modules"]["agent"])
    obs, info = envs.reset()
    q = agent.values(torch.from_numpy(obs)[None])[0, 0].detach().numpy()
    for a in range(3):
        legal = info["action_mask"][0, a]
        np.testing.assert_allclose(q[a, legal], a + 1, atol=0.3)
