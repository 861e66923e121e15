"""Play a policy: its returns over some episodes, and their pictures in a film or in a window."""

import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cleanmarl.checkpoint import same_random_state
from cleanmarl.cli import RunError, UsageError, check, import_optional
from cleanmarl.envs import draw
from cleanmarl.finite import NonFiniteError, find_bad

import numpy as np
import torch


class FilmError(RunError):
    """Pictures that cannot be had or written: a missing display, a missing file. It never costs a run."""


def evaluate(
    envs,
    policy: Callable,
    num_episodes: int,
    seed: int | None = None,
    frames: Any = None,
    report: Callable[[int], None] | None = None,
) -> dict[str, float]:
    """Play `num_episodes` and return their eval/ep_reward, eval/std_ep_reward, eval/ep_length (and eval/battle_won).

    `policy(obs, info, done)` returns the actions of all environments; done (N,) marks those at the start of an episode,
    where a recurrent policy forgets. Every environment plays its share of the episodes, so that short ones do not count
    more often. With several agents ep_reward is the team's sum, ep_reward_agent_i the return of agent i. Training's
    random numbers are left alone. `frames`, a list, a Film or a Window, receives the pictures (H, W, 3) of environment
    0, and at the end of an episode half a second of the last one with the return; `report` is told at each step how
    many episodes have been played. Raises FilmError if there are no pictures, and NonFiniteError.
    """
    check(num_episodes > 0, f"an evaluation plays 1 episode or more, not {num_episodes}")
    num_envs = envs.num_envs
    share = np.full(num_envs, num_episodes // num_envs)
    share[: num_episodes % num_envs] += 1
    returns, lengths, battles_won = [], [], []
    with torch.no_grad(), same_random_state():
        if seed is not None:
            torch.manual_seed(seed)
        obs, info = envs.reset(seed=seed)
        done, reward, step = np.ones(num_envs, bool), np.zeros(num_envs), 0
        while share.any():
            if bad := find_bad(obs[None], np.asarray(reward)[None]):  # or actions would be of no policy
                raise NonFiniteError(f"{bad[0]} in environment {bad[1]} at step {step} of the evaluation")
            if frames is not None:
                frame = picture(envs)
                frames.append(frame)
            obs, reward, termination, truncation, info = envs.step(policy(obs, info, done))
            step += 1
            done = termination | truncation
            for i in np.flatnonzero(info.get("_episode", False) & (share > 0)):  # a lost life is done, but no episode
                share[i] -= 1
                returns.append(info["episode"]["r"][i])
                lengths.append(info["episode"]["l"][i])
                battles_won += [info["episode"]["battle_won"][i]] if "battle_won" in info["episode"] else []
            if frames is not None and "_episode" in info and info["_episode"][0]:
                end = caption(frame, f"return {np.sum(info['episode']['r'][0]):.2f}")
                for _ in range(pictures_per_second(envs) // 2):
                    frames.append(end)
            if report is not None:
                report(len(returns))
    by_agent = np.array(returns, np.float64).reshape(num_episodes, -1)  # (episodes, agents)
    if not np.isfinite(by_agent).all():
        raise NonFiniteError("a return of the evaluation is NaN or infinite")
    metrics = {"eval/ep_reward": by_agent.sum(1).mean(), "eval/std_ep_reward": by_agent.sum(1).std()}
    metrics["eval/ep_length"] = np.mean(lengths)
    if battles_won:
        metrics["eval/battle_won"] = np.mean(battles_won)
    if by_agent.shape[1] > 1:
        metrics |= {f"eval/ep_reward_agent_{i}": r for i, r in enumerate(by_agent.mean(0))}
    return {key: float(value) for key, value in metrics.items()}


def pictures_per_second(envs) -> int:
    """How fast an environment says that it is to be shown."""
    return int(envs.metadata.get("render_fps") or 30)


def picture(envs) -> np.ndarray:
    """Environment 0 as (H, W, 3) uint8; FilmError, one line, whatever its package raises."""
    try:
        frame = envs.render()
    except Exception as error:
        said = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise FilmError(f"no picture of the environment: {said[-1].strip()}") from error  # of a traceback the last line
    frame = frame[0] if isinstance(frame, tuple | list) else frame
    if frame is None:
        raise FilmError("no picture of the environment: it draws none")
    frame = np.array(frame)  # a copy: an environment may draw all pictures into one array
    if frame.ndim != 3 or frame.shape[2] not in (3, 4) or frame.dtype != np.uint8:
        drawn = f"{frame.dtype} of shape {frame.shape}"
        raise FilmError(f"no picture of the environment: it draws {drawn}, and not uint8 of shape (height, width, 3)")
    return frame[..., :3]  # without the fourth channel, as of Matplotlib's canvas


def caption(frame: np.ndarray, words: str) -> np.ndarray:
    """A picture that is paler, with words in its middle."""
    pale = 0.6 + 0.4 * frame / 255
    draw.text(pale, frame.shape[0] / 2, frame.shape[1] / 2, words, size=max(14, frame.shape[1] // 12))
    return draw.finished(pale)


class Film(list):
    """A list of pictures (H, W, 3) uint8 that keeps them compressed: a minute of raw ones may take gigabytes."""

    def append(self, frame: np.ndarray) -> None:
        super().append((frame.shape, zlib.compress(frame.tobytes(), 1)))

    def __getitem__(self, i):
        shape, data = super().__getitem__(i)
        return np.frombuffer(zlib.decompress(data), np.uint8).reshape(shape)

    def __iter__(self):
        return map(self.__getitem__, range(len(self)))


def save_video(frames: list[np.ndarray], path: Path, fps: int) -> None:
    """Write frames (H, W, 3) uint8, a list or a Film, as an .mp4 or .gif.

    UsageError if the package that does it is missing, FilmError if it fails.
    """
    moviepy = import_optional("moviepy", "a video")
    try:
        clip = moviepy.ImageSequenceClip(frames, fps=fps)
        path.parent.mkdir(parents=True, exist_ok=True)
        write = clip.write_gif if path.suffix == ".gif" else clip.write_videofile
        write(str(path), logger=None)
    except Exception as error:  # of the disk, of ffmpeg
        raise FilmError(f"{path} cannot be written: {' '.join(str(error).split())[:200]}") from error


class Window:
    """A window that shows pictures, in place of the list that a film is made of; who closes it stops the program.

    Open it before environments are made: some ask pygame to do without a display. UsageError if there is none.
    """

    def __init__(self, title: str):
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
        self.pygame, self.fps, self.shown = import_optional("pygame", "--render"), 30, 0.0
        display, hint = self.pygame.display, "--video FILM.gif films the episodes instead"
        try:
            display.init()
        except self.pygame.error as error:
            raise UsageError(f"--render finds no display ({error}); {hint}") from error
        is_seen = display.get_driver() not in ("offscreen", "dummy") or "SDL_VIDEODRIVER" in os.environ
        check(is_seen, f"--render finds no display; {hint}")
        display.set_caption(title)

    def append(self, frame: np.ndarray) -> None:
        """Show a picture (H, W, 3) uint8 when it is due, 1 / `fps` seconds after the last one."""
        size, screen = frame.shape[1::-1], self.pygame.display.get_surface()
        if screen is None or screen.get_size() != size:
            screen = self.pygame.display.set_mode(size)
        time.sleep(max(0.0, self.shown + 1 / self.fps - time.monotonic()))
        self.shown = time.monotonic()
        screen.blit(self.pygame.surfarray.make_surface(frame.swapaxes(0, 1)), (0, 0))
        self.pygame.display.flip()
        if any(event.type == self.pygame.QUIT for event in self.pygame.event.get()):
            raise KeyboardInterrupt
