"""Numbers from an environment that are none, NaN or infinite: looked for once per rollout, and named where they are."""

from collections.abc import Callable
from typing import Any

from cleanmarl.cli import RunError

import numpy as np


class NonFiniteError(RunError):
    """A number of an environment, a loss or a checkpoint is NaN or infinite: the run stops, its checkpoint stays."""


def is_finite(x: np.ndarray) -> bool:
    """Whether all numbers are finite. If their sum is, so are they: a fraction of the time of looking at each."""
    with np.errstate(all="ignore"):
        return x.dtype.kind != "f" or bool(np.isfinite(x.sum()) or np.isfinite(x).all())


def find_bad(
    obs: np.ndarray,
    reward: np.ndarray,
    next_obs: np.ndarray | None = None,
    state: np.ndarray | None = None,
    suspects: Callable[[tuple], np.ndarray] | None = None,
) -> tuple[str, int, int] | None:
    """The first observation, state or reward in T steps of N environments that is not finite: (what, n, t), or None.

    reward (T, N) or (T, N, A) is of the steps; obs and state (T, N, ...) were seen before them, and T + 1 rows of them
    after the last one too; next_obs (N, ...) stands for such a row. `suspects` says of whom, (N,) or (N, A), the return
    of an episode is not finite: where rewards were averaged or normalised, one that is none spoils all.
    `what`: "the reward of agent 1 is nan"; n: which environment; t: the number of steps until then.
    """
    T, has_agents, found = len(reward), reward.ndim > 2, []
    seen = [("observation", obs, 0)]
    seen += [] if next_obs is None else [("observation", np.asarray(next_obs)[None], T)]
    seen += [("reward", reward, 1)]  # later: the value of a bad observation may be in it
    seen += [] if state is None else [("state", state, 0)]
    for name, x, first in seen:
        if not is_finite(x):
            bad = ~np.isfinite(x)
            t = bad.reshape(len(x), -1).any(-1).argmax()
            if name == "reward" and suspects is not None:
                if (bad[t] & (own := suspects(bad[t].shape))).any():
                    bad[t] &= own
                else:  # rewards were finite: it came with the value of what a truncated episode ended in
                    name = "reward, or the last observation,"
            n, *rest = np.argwhere(bad[t])[0]
            of_agent = f" of agent {rest[0]}" if has_agents and name != "state" else ""
            found.append((t + first, n, f"the {name}{of_agent} is {x[t, n, *rest]}"))
    if not found:
        return None
    t, n, what = min(found, key=lambda bad: bad[0])
    return what, int(n), int(t)


def find_bad_episode(episode: Any, returns: np.ndarray) -> tuple[str, int] | None:
    """The same for one episode, with obs, state (T + 1, ...) and reward (T, M): (what, t), or None.

    returns: (A,), which tell whose reward it was if `reward` is the team's, M = 1.
    """
    reward = np.broadcast_to(episode.reward, (len(episode.reward), len(returns)))
    suspects = ~np.isfinite(returns)[None]
    bad = find_bad(episode.obs[:, None], reward[:, None], None, episode.state[:, None], lambda shape: suspects)
    return bad and (bad[0], bad[2])
