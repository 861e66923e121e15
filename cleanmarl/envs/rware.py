"""Robot warehouse, `rware/<id>`: robots fetch the shelves that are requested to the goal and put them back.

`rware/rware-tiny-2ag-v2` and all other ids that the package rware registers: rware-{tiny, small, medium or large}-
{agents}ag[-easy or -hard]-v2, with 1 to 19 agents. `options` go to its constructor.

    observation     71 numbers: own column and row, carrying a shelf, direction one-hot (up, down, left, right), on a
                    highway; then for each of the 3x3 cells around (sensor_range 1), by rows: a robot there, its
                    direction one-hot, a shelf there, and whether it is requested
    action          0 none, 1 forward, 2 turn left, 3 turn right, 4 load or unload; all legal: what is blocked fails
    state           the observations of all robots one after another
    reward          1 for the robot that delivers a requested shelf; there is no other
    episode end     truncation after 500 steps (option max_steps); nothing terminates an episode
    seeds           as in `pz`

Several environments to a worker process, as in `pz`. Source: Papoudakis et al. 2021, "Benchmarking multi-agent deep
reinforcement learning algorithms in cooperative tasks" (https://arxiv.org/abs/2006.07869), whose code, EPyMARL, adds up
the rewards of all agents: compare its returns with the sum over agents.
"""

import importlib

import gymnasium as gym

from cleanmarl.envs import pz, unknown_name
from cleanmarl.envs.lbf import TupleEnv, construct, make_in_workers, need

REPORTED = ("rware-tiny-2ag-v2", "rware-tiny-4ag-v2", "rware-small-4ag-v2")  # in the paper above; there as v1


def known_names() -> list[str]:
    """Those of the paper, then all others that the package registers."""
    need("rware", "rware")
    return [*dict.fromkeys((*REPORTED, *(name for name in gym.registry if name.startswith("rware-"))))]


def make(name: str, num_envs: int = 1, num_workers: int | None = None, **options) -> pz.PettingZooVectorEnv:
    """`num_envs` copies of `rware/<name>` in `num_workers` processes (default: one per core; 0: in this process).

    Raises EnvError with one line for an unknown name, the missing package, or options that it does not take.
    """
    return make_in_workers("rware", name, parallel_env, num_envs, num_workers, options)


def parallel_env(task: str, **options) -> TupleEnv:
    need("rware", "rware")
    if task not in gym.registry or not task.startswith("rware-"):
        raise unknown_name(f"rware/{task}", known_names())
    env = construct(task, options)
    team_reward = env.reward_type == importlib.import_module("rware").RewardType.GLOBAL
    return TupleEnv(env, before_reset=lambda env: None, finished=lambda: False, team_reward=team_reward)
