"""Sizes that no memory holds, named before training begins: a run that would die after hours does not begin."""

import math
import sys
from typing import Any

from cleanmarl.actors import SLOTS_PER_ACTOR
from cleanmarl.cli import UsageError, check, tell
from cleanmarl.envs import MultiAgentVectorEnv
from cleanmarl.machine import ACTOR_BYTES, too_large

import numpy as np


def check_memory(what: str, num_bytes: float) -> None:
    """Raise UsageError with the gigabytes that `what` would take if this machine has less memory."""
    if message := too_large(what, num_bytes):
        raise UsageError(message)


def check_rollout(rollout: tuple) -> None:
    """Raise UsageError unless there is memory for a rollout and the shuffled copy of it that is learned from.

    Arrays of zeros, as a rollout is at first, take memory only when they are written.
    """
    check_memory("a rollout of --num-envs x --num-steps", 2 * sum(x.nbytes for x in rollout))


def check_replay(envs: MultiAgentVectorEnv, args: Any) -> None:
    """Raise UsageError unless there is memory for a replay buffer of `args.buffer_size` whole episodes, and steps.

    With --save-buffer it is copied for each checkpoint. Where `envs` do not say how long an episode may be, a line
    tells what the buffer may take at most.
    """
    message = f"--total-timesteps {args.total_timesteps} ends before there are --batch-size {args.batch_size} episodes"
    check(args.total_timesteps >= args.batch_size, message)  # of a step or more
    spaces, (A, K) = (envs.single_observation_space, envs.single_state_space), envs.real_actions.shape
    one_step = sum(math.prod(space.shape) * np.dtype(space.dtype).itemsize for space in spaces)  # what is seen,
    one_step += A * (K + 4 * K + 4 * 4)  # masks and actions, and four numbers of each agent: reward, alive and so on
    limit = envs.time_limit or args.total_timesteps
    longest, copies = min(args.buffer_size * limit, args.total_timesteps), 2 if args.save_buffer else 1
    what = f"a replay buffer of --buffer-size {args.buffer_size} episodes of {limit} steps"
    what += " and its copy for a checkpoint (--no-save-buffer needs none)" if args.save_buffer else ""
    if envs.time_limit:
        check_memory(what, copies * one_step * longest)
    elif warning := too_large(what, copies * one_step * longest):
        tell(f"if episodes were as long as the run, {warning}", sys.stderr)


def check_unrolls(args: Any, unroll_dtype: np.dtype, replay_size: int = 0) -> None:
    """Raise UsageError unless there is memory for actors, for what they fill, and for a replay of unrolls.

    The replay is copied for each checkpoint. Actors of Ray are on any machine, and it counts cores for them.
    """
    if not hasattr(args, "address"):
        check_memory(f"the processes of --num-actors {args.num_actors}", float(args.num_actors * ACTOR_BYTES))
    slots = max(1, args.num_actors * SLOTS_PER_ACTOR) * args.num_envs
    what = "unrolls of --num-actors x --num-envs x --unroll-length"
    what += f" and a replay of --replay-size {replay_size}" if replay_size else ""
    check_memory(what, float(slots + 2 * replay_size) * unroll_dtype.itemsize)
