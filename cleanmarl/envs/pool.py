"""envpool's environments (C++ threads) as a Gymnasium vector environment, for the scripts that take envpool's ids."""

import difflib
import functools
import os
import warnings
from typing import Any

from cleanmarl.envs import EnvError, EpisodeStatistics, check_memory, env_seeds

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

# of two players, zero-sum, with perfect information
GAMES = ["ConnectFour-v1", "TicTacToe-v1", "Othello-v1", "Hex-v1", "AnimalShogi-v1", "GardnerChess-v1", "Chess-v1"]
GAMES += ["Shogi-v1", "Go9x9-v1", "Go13x13-v1", "Go19x19-v1"]
GAMES += ["ChineseGo9x9-v1", "ChineseGo13x13-v1", "ChineseGo19x19-v1"]


def envpool_spec(env_id: str, **options):
    """What envpool knows of an id: its `config` (options and their defaults) and spaces.

    Raises EnvError with one line for an unknown id (naming near ones), an unknown option, or missing libraries.
    """
    warnings.filterwarnings("ignore", ".*precision lowered by casting")  # bounds in float64: each space says so twice
    try:
        import envpool  # takes a second, and is missing on some platforms

        return envpool.make_spec(env_id, **options)
    except KeyError as error:
        near = difflib.get_close_matches(env_id.removeprefix("ALE/"), envpool.list_all_envs(), n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise EnvError(f"envpool has no environment {env_id!r}{hint}") from error
    except TypeError as error:
        raise EnvError(f"envpool's {env_id} does not take these options: {error}") from error
    except ImportError as error:
        if "Qt5" in str(error):
            raise EnvError(f"{env_id} needs the system's Qt 5 libraries: apt install libqt5gui5 ({error})") from error
        raise EnvError(f"{env_id} needs a package that is missing ({error}): pip install envpool") from error


class EnvPool(gym.vector.VectorEnv):
    """N environments of one id; `options` are envpool's, and `render_mode`. Raises as `envpool_spec` does.

    Autoreset is SAME_STEP: envpool itself resets in the step after an end, ignoring the action, and so that no rollout
    holds such rows, that step is made at once, for the environments that ended only. Trajectories stay the same.
    `episode` in info is of whole games with their true scores: no lost life ends it, no clipping changes it.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, env_id: str, num_envs: int = 1, render_mode: str | None = None, **options):
        spec = envpool_spec(env_id, **options)
        import envpool

        self.env_id, self.num_envs, self.render_mode = env_id, num_envs, render_mode
        self.pool: Any = None  # of a class of this id's own
        self.single_observation_space = spec.gymnasium_observation_space
        self.single_action_space = spec.gymnasium_action_space
        space = self.single_observation_space  # a dictionary has no type of its own
        size = gym.spaces.flatdim(space) * (space.dtype.itemsize if space.dtype is not None else 4)
        check_memory(f"{env_id}: what {num_envs:,} environments show", 3.0 * num_envs * size)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # processes of torchrun share them
        options = {"num_threads": max(1, min(num_envs, cores))} | options
        options |= {"num_envs": num_envs, "render_mode": render_mode}
        self.new_pool = functools.partial(envpool.make, env_id, "gymnasium", **options)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Start an episode everywhere; without a seed, each environment's sequence of episodes goes on."""
        if seed is not None or self.pool is None:  # envpool takes seeds only when it is built
            self.close_extras()
            try:
                self.pool = self.new_pool(seed=[s % 2**31 for s in env_seeds(seed, self.num_envs)])
            except RuntimeError as error:  # Sudoku of envpool 1.2.5 lacks a file of the package's
                raise EnvError(f"{self.env_id} cannot be built: {' '.join(str(error).split())}") from error
        self.statistics = EpisodeStatistics(self.num_envs, 1)
        return self.pool.reset()

    def step(self, action: np.ndarray):
        """One step everywhere. Where an episode ended, obs and info are the next one's, info["final_obs"] its last."""
        obs, reward, termination, truncation, info = self.pool.step(action)
        self.statistics.add(info.get("reward", reward)[:, None])  # Atari's true score
        done = termination | truncation
        if done.any():
            game_over = info["terminated"].astype(bool) | truncation if "terminated" in info else done
            rows = np.flatnonzero(done)
            first_obs, _, _, _, first_info = self.pool.step(action[rows], rows)
            final_obs, obs, info = obs, replace(obs, rows, first_obs), replace(info, rows, first_info)
            info |= {"final_obs": final_obs, "_final_obs": done}
            if game_over.any():
                self.statistics.end(game_over, info)
                info["episode"]["r"] = info["episode"]["r"][:, 0]
        return obs, reward, termination, truncation, info

    def render(self) -> Any:
        """Frame (height, width, 3) uint8 of environment 0, with render_mode="rgb_array"; "human" shows it."""
        frames = self.pool.render()
        return None if frames is None else frames[0]

    def close_extras(self, **kwargs) -> None:
        if self.pool is not None:
            self.pool.close()
            self.pool = None


def replace(batch, rows: np.ndarray, new):
    """A copy of `batch`, an array (N, ...) or a dict of them, with `new` (len(rows), ...) in its `rows`."""
    if isinstance(batch, dict):
        return {key: replace(value, rows, new[key]) for key, value in batch.items()}
    batch = batch.copy()
    batch[rows] = new
    return batch


class Games(EnvPool):
    """N games of one id, all of which move, or begin anew, in each step; obs (N, D) is as the player to move sees it.

    An observation is the board (height, width, planes), flattened, and then the mask of legal moves. The reward (N,) is
    player 0's; player 1's is minus that. info["player"] (N,) is who moves: 0, 1, or -1 after the end of a game, where
    the next step only begins a new one, whatever the action (envpool 1.2.5 hangs if some of such games are stepped
    without the others). Who begins is drawn for each game. info["action_mask"] (N, K) is the mask, True = legal.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, env_id: str, num_envs: int, render_mode: str | None = None):
        # More threads than one would mix up the order of the environments in envpool 1.2.5.
        super().__init__(env_id, num_envs, render_mode, num_threads=1)
        self.board_shape = self.single_observation_space.shape
        size = gym.spaces.flatdim(self.single_observation_space) + gym.spaces.flatdim(self.single_action_space)
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Begin a game everywhere; without a seed, each environment's sequence of games goes on."""
        self.done = np.zeros(self.num_envs, bool)
        return self.seen(*super().reset(seed=seed))

    def step(self, action: np.ndarray):
        """A move in every game; info["episode"] tells player 0's result and the number of moves."""
        begins = self.done
        obs, reward, termination, truncation, info = self.pool.step(action)
        self.done = termination | truncation
        reward = reward[::2]
        obs, info = self.seen(obs, info)
        self.statistics.add(reward[:, None])
        self.statistics.lengths[begins] = 0  # that was no move
        if self.done.any():
            self.statistics.end(self.done, info)
            info["episode"]["r"] = info["episode"]["r"][:, 0]
        return obs, reward, termination, truncation, info

    def seen(self, views: np.ndarray, info: dict) -> tuple[np.ndarray, dict]:
        """Observation and info of envpool's: views (2N, ...) has a row for each player of each game."""
        player, mask = info["current_player"], info["legal_action_mask"]
        view = views[2 * np.arange(self.num_envs) + player].reshape(self.num_envs, -1)
        info = {"player": np.where(self.done, -1, player), "action_mask": mask}
        return np.concatenate([view, mask], axis=1, dtype=np.float32), info


class Against(gym.vector.VectorWrapper):
    """The games for player 0 alone: where player 1 moves, `opponent` does, a function of (obs, info, done)."""

    def __init__(self, envs: Games, opponent):
        super().__init__(envs)
        self.opponent = opponent

    def reset(self, **kwargs):
        self.last = *super().reset(**kwargs), np.ones(self.num_envs, bool)
        return self.last[:2]

    def step(self, action: np.ndarray):
        action = np.where(self.last[1]["player"] == 1, self.opponent(*self.last), action)
        obs, reward, termination, truncation, info = super().step(action)
        self.last = obs, info, termination | truncation
        return obs, reward, termination, truncation, info
