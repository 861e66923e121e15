"""Two-player games of Pgx, `pgx/<id>`, as envpool's C++ plays them: two agents who take turns, with legal-move masks.

    id                 moves   obs of an agent             id                 moves   obs of an agent
    ConnectFour-v1         7   6 x 7 x 2                   Go9x9-v1              82   9 x 9 x 17
    TicTacToe-v1           9   3 x 3 x 2                   Go13x13-v1           170   13 x 13 x 17
    Othello-v1            65   8 x 8 x 2                   Go19x19-v1           362   19 x 19 x 17
    Hex-v1               122   11 x 11 x 4                 GardnerChess-v1     1225   5 x 5 x 115
    Backgammon-v1        156   34                          Chess-v1            4672   8 x 8 x 119
    KuhnPoker-v1           2   7, with hidden cards        AnimalShogi-v1       132   4 x 3 x 194
    LeducHoldem-v1         3   34, with hidden cards       Shogi-v1            2187   9 x 9 x 119

    obs             the game as the agent sees it (its own pieces first), flattened, and then 1 if it is to move, else 0
    state           the observations of both agents
    action, mask    0 ... K - 2 are the game's moves, K - 1 is to wait. Who is to move has the legal moves and may
                    not wait; the other can only wait. After the end of a game (`final_action_mask`) both wait.
    agent_mask      both are alive all the time: a waiting agent gets its reward, too
    reward          0 until the end; then 1 for the winner and -1 for the loser, or 0 for both (in backgammon up to 3,
                    in poker the stakes)
    episode end     termination; who begins is drawn for each game, as are cards and dice
    seeds           reset(seed=s) gives env_seeds(s, N)[i] modulo 2^31 to environment i, for all its games
    autoreset       envpool's would cost a step per game; here the next game begins in the step that ends the one before

Waiting is how PettingZoo turns such games into parallel ones. envpool 1.2.5 hangs when some environments of such a pool
are stepped without the others, and mixes up their order with several threads, so every environment is a pool of its
own. ppo_selfplay.py, where both sides are one network, steps one pool as a whole and is faster.
Sources: https://envpool.readthedocs.io, https://github.com/sotetsuk/pgx
"""

import functools
from typing import Any

from cleanmarl.envs import EnvError, EpisodeStatistics, MultiAgentVectorEnv, check_actions, env_seeds, unknown_name

import numpy as np

GAMES = ["ConnectFour-v1", "TicTacToe-v1", "Othello-v1", "Hex-v1", "Backgammon-v1", "KuhnPoker-v1", "LeducHoldem-v1"]
GAMES += ["Go9x9-v1", "Go13x13-v1", "Go19x19-v1", "GardnerChess-v1", "Chess-v1", "AnimalShogi-v1", "Shogi-v1"]


def known_names() -> list[str]:
    return GAMES


def make(name: str, num_envs: int = 1, render_mode: str | None = None, **options) -> "PgxVectorEnv":
    """`num_envs` copies of `pgx/<name>`; render_mode "rgb_array" for pictures.

    Raises EnvError with one line for an unknown name, an option (there are none) or a missing package.
    """
    if name not in GAMES:
        raise unknown_name(f"pgx/{name}", GAMES)
    if options:
        raise EnvError(f"pgx/{name} has no option {min(options)!r}; it has only render_mode")
    if render_mode not in (None, "rgb_array"):
        raise EnvError(f"pgx/{name}: render_mode must be None or 'rgb_array', not {render_mode!r}")
    return PgxVectorEnv(name, num_envs, render_mode)


class PgxVectorEnv(MultiAgentVectorEnv):
    """N copies of one game, each in an envpool of its own."""

    team_reward, may_die = False, False

    def __init__(self, name: str, num_envs: int, render_mode: str | None = None):
        try:
            import envpool  # takes a second, and is missing on some platforms
        except ImportError as error:
            raise EnvError(f"pgx/{name} needs a package that is missing ({error}): pip install envpool") from error
        self.env_id, self.render_mode = f"pgx/{name}", render_mode
        self.pools: list[Any] = []
        options = {"num_envs": 1, "num_threads": 1, "render_mode": render_mode}
        self.new_pool = functools.partial(envpool.make, name, "gymnasium", **options)
        spec = envpool.make_spec(name)
        D, K = int(np.prod(spec.gymnasium_observation_space.shape)) + 1, int(spec.gymnasium_action_space.n) + 1
        self._set_spaces(num_envs, ["player_0", "player_1"], [D, D], [K, K], 2 * D)
        self.agent_mask = np.ones((num_envs, 2), bool)
        self.obs = np.zeros((num_envs, 2, D), np.float32)
        self.mask = np.zeros((num_envs, 2, K), bool)
        self.player = np.zeros(num_envs, np.int64)  # who is to move

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Begin a game everywhere; without a seed, each environment's sequence of games goes on."""
        if seed is not None or not self.pools:  # envpool takes seeds only when it is built
            self.close_extras()
            self.pools = [self.new_pool(seed=[s % 2**31]) for s in env_seeds(seed, self.num_envs)]
        for n, pool in enumerate(self.pools):
            self._see(n, *pool.reset())
        self.statistics = EpisodeStatistics(self.num_envs, 2)
        return self.obs.copy(), self._info()

    def step(self, action: np.ndarray):
        if not self.pools:
            raise EnvError(f"{self.env_id}: call reset() before step(), and not after close()")
        action = check_actions(self.env_id, self.agents, action, self.mask)
        moves = action[np.arange(self.num_envs), self.player]
        reward, done = np.zeros((self.num_envs, 2), np.float32), np.zeros(self.num_envs, bool)
        final: dict[str, np.ndarray] = {"final_obs": np.zeros_like(self.obs)}
        final["final_action_mask"] = np.zeros_like(self.mask)
        for n, pool in enumerate(self.pools):
            views, reward[n], done[n : n + 1], _, info = pool.step(moves[n : n + 1])
            self._see(n, views, info)
            if done[n]:
                final["final_obs"][n, :, :-1] = self.obs[n, :, :-1]  # nobody is to move
                final["final_action_mask"][n, :, -1] = True
                self._see(n, *pool.reset())
        self.statistics.add(reward)
        info = self._info()
        if done.any():
            final["final_state"] = final["final_obs"].reshape(self.num_envs, -1)
            final["final_agent_mask"] = np.repeat(done[:, None], 2, axis=1)
            info |= final | {"_final_obs": done.copy()}
            self.statistics.end(done, info)
        return self.obs.copy(), reward, done, np.zeros(self.num_envs, bool), info

    def render(self) -> Any:
        """Frame (height, width, 3) uint8 of environment 0, with render_mode="rgb_array"."""
        if self.render_mode is None or not self.pools:
            raise EnvError(f"{self.env_id}: to render, make it with render_mode='rgb_array' and reset it")
        return self.pools[0].render()[0]

    def close_extras(self, **kwargs) -> None:
        for pool in self.pools:
            pool.close()
        self.pools = []

    def _see(self, n: int, views: np.ndarray, info: dict) -> None:
        """Take what environment n shows: views (2, ...) has a row for each player."""
        player = self.player[n] = info["current_player"][0]
        self.obs[n, :, :-1] = views.reshape(2, -1)
        self.obs[n, :, -1] = np.arange(2) == player
        self.mask[n, player, :-1], self.mask[n, player, -1] = info["legal_action_mask"][0], False
        self.mask[n, 1 - player, :-1], self.mask[n, 1 - player, -1] = False, True

    def _info(self) -> dict[str, np.ndarray]:
        state = self.obs.reshape(self.num_envs, -1).copy()
        return {"state": state, "action_mask": self.mask.copy(), "agent_mask": self.agent_mask}
