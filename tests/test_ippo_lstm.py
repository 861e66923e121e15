"""ippo_lstm.py: deaths without a team, and a task that nobody solves without a memory.

What it shares with mappo_lstm.py and coppo_lstm.py is in test_recurrent_family.py.
"""

from cleanmarl import ippo, ippo_lstm
from cleanmarl.envs import EpisodeStatistics, MultiAgentVectorEnv
from cleanmarl.evaluate import evaluate
from cleanmarl.ippo_lstm import Args
from cleanmarl.run import load_checkpoint

import numpy as np
import pytest
import test_recurrent_family as family
from toys import Toy

SMALL = family.SMALL


def test_what_a_copy_pays_the_dead_is_not_what_the_team_earns(team, monkeypatch):
    monkeypatch.setattr(Toy, "reward", lambda envs, alive: np.float32(np.where(alive, envs.clock[:, None], 100)))
    args = Args(env_id=team, **SMALL, time_limit_bootstrap=False)
    _, _, ((rollout, _),), _ = family.collected(ippo_lstm, args)
    assert not rollout.agent_mask.all() and set(rollout.reward.ravel()) == {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize("shared", [True, False])
def test_death_ends_what_an_agent_earns_but_not_what_a_team_does(shared, toy, team):
    """Agent 1 dies with its third step; with lambda 0 the return of that step is what it earned, or r + gamma V."""
    options = SMALL | {"gamma": 0.9, "gae_lambda": 0.0, "normalize_value": False, "share_parameters": shared}
    for env_id in (toy, team):
        _, _, ((rollout, batch),), _ = family.collected(ippo_lstm, Args(env_id=f"{env_id}?see=noise", **options))
        return_, dead = batch.return_.view(20, 4, 3).numpy(), ~rollout.agent_mask[:, :, 1]
        assert dead[3].all() and dead[9].all() and not dead[[0, 1, 2, 6, 7, 8]].any()
        for t in (2, 8):
            following = 0.9 * rollout.value[t + 1, :, 1] if env_id == team else 0
            np.testing.assert_allclose(return_[t, :, 1], rollout.reward[t, :, 1] + following, rtol=1e-4, atol=1e-5)
        earns = batch.earns.view(20, 4, 3)[:, :, 1].numpy()
        assert (earns == 1).all() if env_id == team else (earns == ~dead).all()
        assert not rollout.forget[:5].any() and rollout.forget[5].all()  # who stays dead has nothing to forget


class Recall(MultiAgentVectorEnv):
    """Two agents see a sign, each its own, in the first of 4 steps, and are to name it in the last."""

    team_reward = may_die = False

    def __init__(self, num_envs):
        self._set_spaces(num_envs, ("a", "b"), [3, 3], [2, 2], 6)
        self.statistics, self.random = EpisodeStatistics(num_envs, 2), np.random.default_rng(0)

    def look(self):
        obs = np.zeros((self.num_envs, 2, 3), np.float32)
        obs[..., 2] = self.clock / 3
        if self.clock == 0:
            self.sign = self.random.integers(2, size=(self.num_envs, 2))
            obs[..., :2] = np.eye(2)[self.sign]
        mask = np.ones((self.num_envs, 2, 2), bool)
        return obs, {"state": obs.reshape(-1, 6), "action_mask": mask, "agent_mask": mask[..., 0]}

    def reset(self, *, seed=None, options=None):
        self.clock = 0
        return self.look()

    def step(self, action):
        self.clock += 1
        reward = np.float32(action == self.sign) * (self.clock == 4)
        self.statistics.add(reward)
        ended, end = np.full(self.num_envs, self.clock == 4), {}
        if ended.all():
            self.clock = 0
            self.statistics.end(ended, end)
        obs, info = self.look()
        if end:
            end |= {"final_obs": obs, "final_agent_mask": info["agent_mask"]}
        return obs, reward, ended, ~ended & False, info | end


@pytest.mark.learning
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_learns_what_needs_memory_in_seconds(cell, monkeypatch, tmp_path):
    monkeypatch.setattr(ippo_lstm, "make", lambda env_id, num_envs, **options: Recall(num_envs))
    sizes = {
        "total_timesteps": 16_384,
        "num_envs": 64,
        "num_steps": 4,
        "actor_hidden_dim": 16,
        "critic_hidden_dim": 16,
        "eval_episodes": 0,
    }
    rates = {"learning_rate": 3e-3, "critic_learning_rate": 3e-3}
    args = Args(env_id="recall", cell=cell, **sizes, **rates, runs_dir=str(tmp_path))
    saved = load_checkpoint(ippo_lstm.main(args))["modules"]["agent"]
    envs = Recall(32)
    agent = ippo_lstm.Agent(envs, args)
    agent.load_state_dict(saved)
    assert evaluate(envs, ippo_lstm.make_policy(agent), 320, seed=1)["eval/ep_reward"] > 1.9  # a guess earns 1


def test_settings_are_those_of_ippo_plus_a_memory():
    assert vars(Args()) == vars(ippo.Args()) | {"cell": "lstm"}
