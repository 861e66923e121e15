"""Play a policy: its returns over some episodes, and their pictures."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from cleanmarl.cli import import_optional


def evaluate(envs, policy: Callable, num_episodes: int, seed: int | None = None, frames: list | None = None) -> dict:
    """Play `num_episodes` and return their eval/ep_reward, eval/std_ep_reward, eval/ep_length (and eval/battle_won).

    `policy(obs, info, done)` returns the actions of all environments; done (N,) marks those at the start of an episode,
    where a recurrent policy forgets. Every environment plays its share of the episodes, so that short ones do not count
    more often. With several agents ep_reward is the team's sum, ep_reward_agent_i the return of agent i. Training's
    random numbers are left alone. `frames`, if given, receives the pictures (H, W, 3) of environment 0.
    """
    num_envs = envs.num_envs
    share = np.full(num_envs, num_episodes // num_envs)
    share[: num_episodes % num_envs] += 1
    returns, lengths, battles_won = [], [], []
    with torch.no_grad(), torch.random.fork_rng():
        if seed is not None:
            torch.manual_seed(seed)
        obs, info = envs.reset(seed=seed)
        done = np.ones(num_envs, bool)
        while share.any():
            if frames is not None:
                frame = envs.render()
                frames.append(frame[0] if isinstance(frame, tuple | list) else frame)
            obs, _, termination, truncation, info = envs.step(policy(obs, info, done))
            done = termination | truncation
            for i in np.flatnonzero(info.get("_episode", False) & (share > 0)):  # a lost life is done, but no episode
                share[i] -= 1
                returns.append(info["episode"]["r"][i])
                lengths.append(info["episode"]["l"][i])
                battles_won += [info["episode"]["battle_won"][i]] if "battle_won" in info["episode"] else []
    returns = np.array(returns, np.float64).reshape(num_episodes, -1)  # (episodes, agents)
    metrics = {"eval/ep_reward": returns.sum(1).mean(), "eval/std_ep_reward": returns.sum(1).std()}
    metrics["eval/ep_length"] = np.mean(lengths)
    if battles_won:
        metrics["eval/battle_won"] = np.mean(battles_won)
    if returns.shape[1] > 1:
        metrics |= {f"eval/ep_reward_agent_{i}": r for i, r in enumerate(returns.mean(0))}
    return {key: float(value) for key, value in metrics.items()}


def save_video(frames: list[np.ndarray], path: Path, fps: int = 30) -> None:
    """Write frames (H, W, 3) uint8 as an .mp4 or .gif; UsageError if the package that does it is missing."""
    clip = import_optional("moviepy", "a video").ImageSequenceClip(frames, fps=fps)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gif":
        clip.write_gif(str(path), logger=None)
    else:
        clip.write_videofile(str(path), logger=None)
