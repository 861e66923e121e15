"""Cooperative matrix games, `matrix/<game>`: each agent picks an action, and all earn what the joint action is worth.

Four agents with nine actions each, of which agent i's action a counts as number a + 1, like the agents themselves.
"Three alike" means that exactly three agents play the same action:

    penalty               50 if all play the same action, -50 for three alike, -40 otherwise
    penalty-free          the same without the penalty: -40 for three alike, too
    penalty-100           as penalty, but 100 if all play the same action
    one-optimum           50 if agent i plays action number i, for all i, -50 otherwise
    climbing-4p           10 i if all play action number i, -40 otherwise
    climbing-4p-penalty   as climbing-4p, but -50 for three alike
    climbing-4p-rising    as climbing-4p, but -10 i for three alike that play action number i

Source: the cooperative matrix games of CoPPO (Wu et al. 2021, https://arxiv.org/abs/2111.04051), sections 4.1 and D.1.
The text leaves two things open. Without "penalty for miscoordination" three alike are read as one of its "all other
cases", -40, as in its climbing game, which has no such penalty either. And i counts from 1 to 9, as it does for agents.

Two agents with three actions each (Claus & Boutilier 1998, "The dynamics of reinforcement learning in cooperative
multiagent systems"); rows are agent 0's action, columns agent 1's:

    climbing              [[11, -30, 0], [-30, 7, 0], [0, 6, 5]]
    penalty-2p            [[10, 0, k], [0, 2, 0], [k, 0, 10]], option k at most 0, here -100

Two agents with three actions each, which no sum and no monotonic function of the agents' values describes (QTRAN, Son
et al. 2019, https://arxiv.org/abs/1905.05408, section 5.1):

    qtran                 [[8, -12, -12], [-12, 0, 0], [-12, 0, 0]]

    observation     one number, always 1: there is nothing to see. The state is the observations, A times 1
    action          one of K, all legal
    reward          every agent earns the reward of the team, so the sum over agents is A times as much
    end             a game is one step, or `max_cycles` rounds; it is over after the last (termination)
    seeds           change nothing: nothing is random
"""

from collections.abc import Callable

from cleanmarl.envs import EnvError, EpisodeStatistics, MultiAgentVectorEnv, check_actions, unknown_name

import numpy as np


def alike(same, three) -> np.ndarray:
    """Table (9, 9, 9, 9): same[a] if all four play a, three[a] if exactly three play a, else -40."""
    joint = np.indices((9, 9, 9, 9))
    table = np.full((9, 9, 9, 9), -40, np.float32)
    for a in range(9):
        count = (joint == a).sum(axis=0)
        table[count == 4] = same[a]
        table[count == 3] = three[a]
    return table


def one_optimum() -> np.ndarray:
    table = np.full((9, 9, 9, 9), -50, np.float32)
    table[0, 1, 2, 3] = 50
    return table


NUMBERS = np.arange(1, 10)
TABLES: dict[str, Callable[..., np.ndarray]] = {  # name -> its table, from the options
    "penalty": lambda: alike([50] * 9, [-50] * 9),
    "penalty-free": lambda: alike([50] * 9, [-40] * 9),
    "penalty-100": lambda: alike([100] * 9, [-50] * 9),
    "one-optimum": one_optimum,
    "climbing-4p": lambda: alike(10 * NUMBERS, [-40] * 9),
    "climbing-4p-penalty": lambda: alike(10 * NUMBERS, [-50] * 9),
    "climbing-4p-rising": lambda: alike(10 * NUMBERS, -10 * NUMBERS),
    "climbing": lambda: np.array([[11, -30, 0], [-30, 7, 0], [0, 6, 5]], np.float32),
    "penalty-2p": lambda k=-100: np.array([[10, 0, k], [0, 2, 0], [k, 0, 10]], np.float32),
    "qtran": lambda: np.array([[8, -12, -12], [-12, 0, 0], [-12, 0, 0]], np.float32),
}


def known_names() -> list[str]:
    return list(TABLES)


def make(
    name: str, num_envs: int = 1, max_cycles: int = 1, render_mode: str | None = None, **options
) -> "MatrixVectorEnv":
    """`num_envs` copies of `matrix/<name>`. Raises EnvError for an unknown name or option, or a senseless value."""
    if name not in TABLES:
        raise unknown_name(f"matrix/{name}", TABLES)
    if render_mode is not None:
        raise EnvError(f"matrix/{name} has no pictures: leave out render_mode")
    known = {"k"} if name == "penalty-2p" else set()
    if wrong := options.keys() - known:
        raise EnvError(f"matrix/{name} has no option {min(wrong)!r}; it has {', '.join(['max_cycles', *known])}")
    if "k" in options and not (isinstance(options["k"], (int, float)) and -np.inf < options["k"] <= 0):
        raise EnvError(f"matrix/{name}: k must be a number of at most 0, not {options['k']!r}")
    return MatrixVectorEnv(name, num_envs, TABLES[name](**options), max_cycles)


class MatrixVectorEnv(MultiAgentVectorEnv):
    """N plays of one game at the same time; `table` holds the reward of every joint action, one axis per agent."""

    team_reward, may_die = True, False

    def __init__(self, name: str, num_envs: int, table: np.ndarray, max_cycles: int = 1):
        self.env_id, self.table, self.max_cycles = f"matrix/{name}", table, max_cycles
        self.time_limit = max_cycles
        A = table.ndim
        self._set_spaces(num_envs, [f"agent_{a}" for a in range(A)], [1] * A, table.shape, A)
        self.statistics: EpisodeStatistics | None = None
        # nothing of this ever changes
        self.obs, self.state = np.ones((num_envs, A, 1), np.float32), np.ones((num_envs, A), np.float32)
        self.action_mask, self.agent_mask = np.ones((num_envs, A, table.shape[0]), bool), np.ones((num_envs, A), bool)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Start a game everywhere; a seed is accepted and changes nothing."""
        self.statistics = EpisodeStatistics(self.num_envs, self.num_agents)
        return self.obs.copy(), self._info()

    def step(self, action: np.ndarray):
        """One round everywhere; action (N, A) integers. Raises EnvError for an action that does not exist."""
        if self.statistics is None:
            raise EnvError(f"{self.env_id}: call reset() before step()")
        action = check_actions(self.env_id, self.agents, action, self.action_mask)
        team = self.table[tuple(action.T)]  # (N,)
        reward = np.repeat(team[:, None], self.num_agents, axis=1)
        self.statistics.add(reward)
        done, info = self.statistics.lengths >= self.max_cycles, self._info()  # everywhere or nowhere
        if done.any():
            info["final_obs"], info["final_state"] = self.obs.copy(), self.state.copy()
            info["final_action_mask"], info["final_agent_mask"] = self.action_mask, self.agent_mask
            info["_final_obs"] = done.copy()
            self.statistics.end(done, info)
        return self.obs.copy(), reward, done, np.zeros(self.num_envs, bool), info

    def snapshot(self) -> dict:
        """How long each game has been played, and its returns; not before `reset`."""
        assert self.statistics is not None
        return self.statistics.snapshot()

    def restore(self, snapshot: dict) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Go on from there; (obs, info) as they always are."""
        self.statistics = EpisodeStatistics(self.num_envs, self.num_agents)
        self.statistics.restore(snapshot)
        return self.obs.copy(), self._info()

    def _info(self) -> dict[str, np.ndarray]:
        return {"state": self.state.copy(), "action_mask": self.action_mask, "agent_mask": self.agent_mask}
