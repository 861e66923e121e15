"""What there is and how fast: `python -m cleanmarl.envs list [family]`, `python -m cleanmarl.envs bench family/name`.

`list` prints every id with its number of agents and its sizes: observation, actions (how many, or "floats: 2") and
state; where agents differ, each of their sizes; of pictures height x width x colours. `masks` says whether some actions
are illegal at the first step. Of large families the list of all families has the ids that papers report. Ids that
cannot be built say why.

`bench` plays random legal actions and prints environment steps per second, resets included and sampling excluded:
of N environments, and of the original package stepped directly, one environment in one process. What runs in this
process is measured in seconds of its CPU time, so that a busy machine does not matter; worker processes, of which there
are several, in those of the clock. Options stand in the id: `?num_workers=0` does without worker processes.
"""

import argparse
import importlib
import importlib.util
import inspect
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from cleanmarl.cli import keep_freed_memory
from cleanmarl.envs import FAMILIES, EnvError, MultiAgentVectorEnv, make, split_options

import numpy as np

BACKENDS = dict.fromkeys(("mpe", "matrix", "lbf", "rware"), "NumPy") | dict.fromkeys(("jumanji", "pgx"), "envpool")
BACKENDS |= {"smax": "JAX"}  # the others: workers
Clock = Callable[[], float]
ROW = "{:<44} {:>6}  {:<20} {:<16} {:>6}  {:<5}  {}"


def list_ids(family: str | None = None) -> None:
    """Print the ids of one family, or of all. Raises EnvError for a family that does not exist."""
    if family is not None and family not in FAMILIES:
        raise EnvError(f"unknown family {family!r}; there are {', '.join(FAMILIES)}")
    print(ROW.format("id", "agents", "observation", "actions", "state", "masks", "backend"))
    for each in [family] if family else FAMILIES:
        print(f"# {each}: {FAMILIES[each]}")
        try:
            module = importlib.import_module(f"cleanmarl.envs.{each}")
            names = known_names(module)
        except (EnvError, ImportError) as error:
            print(error)
            continue
        shown = names if family else getattr(module, "REPORTED", names)
        for name in shown:
            print(describe(f"{each}/{name}", module))
        if len(shown) < len(names):
            print(f"and {len(names) - len(shown)} more: python -m cleanmarl.envs list {each}")
        for package, line in getattr(module, "INSTALL", {}).items():
            if package not in module.PETTINGZOO and importlib.util.find_spec(package) is None:
                print(f"{each}/{package}/... needs a package that is missing: {line}")


def known_names(module) -> list[str]:
    return module.known_names() if hasattr(module, "known_names") else sorted(module.SCENARIOS)


def describe(env_id: str, module) -> str:
    """One line of the list."""
    options: dict[str, Any] = {"num_workers": 0} if "num_workers" in inspect.signature(module.make).parameters else {}
    try:
        with warnings.catch_warnings(action="ignore"):
            envs = make(env_id, 1, pictures=True, **options)
            mask = envs.reset(seed=1)[1]["action_mask"]
            envs.close()
    except Exception as error:  # of whatever package
        reason = str(error) if isinstance(error, EnvError) else f"{type(error).__name__}: {error}"
        return f"{env_id:<44} {reason.partition(chr(10))[0].removeprefix(env_id).strip()}"
    masked = "yes" if (mask != envs.real_actions).any() else "no"
    backend = BACKENDS.get(env_id.partition("/")[0], "workers")
    actions = "floats: " * envs.continuous + each_size(envs.action_sizes)
    shape, state = envs.single_observation_space.shape[1:], envs.single_state_space.shape
    obs = each_size(envs.obs_sizes) if len(shape) == 1 else "x".join(map(str, shape))
    return ROW.format(env_id, envs.num_agents, obs, actions, "x".join(map(str, state)), masked, backend).rstrip()


def each_size(sizes: np.ndarray) -> str:
    """One number if all agents have the same, else those of the agents, with repetitions counted."""
    if (sizes == sizes[0]).all():
        return str(sizes[0])
    starts = np.flatnonzero(np.diff(sizes, prepend=-1))
    runs = zip(sizes[starts], np.diff([*starts, len(sizes)]))
    return " ".join(f"{count}x{size}" if count > 1 else str(size) for size, count in runs)


def bench(env_id: str, seconds: float = 1.0) -> None:
    """Print steps per second of `env_id` for several N, each measured for `seconds` of stepping."""
    make(env_id, pictures=True).close()  # for its errors
    keep_freed_memory()  # as every script does
    plain_id, options = split_options(env_id)
    family, _, name = plain_id.partition("/")
    in_process = BACKENDS.get(family, "workers") != "workers" or options.get("num_workers") == 0
    for ours in ("num_workers", "team_reward", "may_die"):
        options.pop(ours, None)
    clock = time.process_time if in_process else time.perf_counter
    steps = original(family, name, clock, **options)
    alone = steps_per_second(steps, 1, seconds) if steps else None
    sizes = (1, 8, 64, 256, 1024) if family in BACKENDS else (1, 8, 64)
    print(f"{env_id}, environment steps per {'CPU-second' if in_process else 'second'}")
    print(f"{'original':>8} {alone:>12,.0f}" if alone else "there is no original package to compare with")
    for num_envs in sizes:
        envs = make(env_id, num_envs, pictures=True)
        rate = steps_per_second(our_steps(envs, clock), num_envs, seconds)
        print(f"{'N = ' + str(num_envs):>8} {rate:>12,.0f}" + (f" {rate / alone:>8.1f}x" if alone else ""), flush=True)
        envs.close()


def steps_per_second(steps: Iterator[float], num_envs: int, seconds: float) -> float:
    """`steps` yields how long each step took."""
    for _ in range(3):
        next(steps)
    spent, count = 0.0, 0
    while spent < seconds or not count:
        spent, count = spent + next(steps), count + 1
    return num_envs * count / spent


def our_steps(envs: MultiAgentVectorEnv, clock: Clock) -> Iterator[float]:
    rng = np.random.default_rng(1)
    info = envs.reset(seed=1)[1]
    while True:
        mask = info["action_mask"]
        action = rng.random(mask.shape, np.float32) * mask
        action = action if envs.continuous else action.argmax(axis=-1)
        start = clock()
        info = envs.step(action)[-1]
        yield clock() - start


def original(family: str, name: str, clock: Clock = time.perf_counter, **options) -> Iterator[float] | None:
    """Steps of one environment of the package itself; None where there is none."""
    module = importlib.import_module(f"cleanmarl.envs.{family}")
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        if family == "mpe":
            return parallel_steps(importlib.import_module(f"mpe2.{name}").parallel_env(**options), clock)
    if family == "pz":
        return parallel_steps(module.build(name, options), clock)
    if family in ("lbf", "rware"):
        return tuple_steps(module.package_env(name, **options), clock)
    if family == "smaclite":
        options.pop("max_steps", None)  # the package has no time limit
        return battle_steps(module.package_env(name, **options), clock)
    if family == "smax":
        return jax_steps(module.Game(name, **options).env, clock)
    if family in ("jumanji", "pgx"):
        return envpool_steps(name, clock)
    return None


def parallel_steps(env, clock: Clock) -> Iterator[float]:
    """A PettingZoo parallel environment."""
    obs, _ = env.reset(seed=1)
    while True:
        action = {}
        for agent in env.agents:
            seen, space = obs[agent], env.action_space(agent)
            action[agent] = space.sample(seen["action_mask"]) if isinstance(seen, dict) else space.sample()
        start = clock()
        obs = env.step(action)[0]
        if not env.agents:
            obs, _ = env.reset()
        yield clock() - start


def tuple_steps(env, clock: Clock) -> Iterator[float]:
    """A Gymnasium environment with a tuple of action spaces."""
    env.reset(seed=1)
    while True:
        action = env.action_space.sample()
        start = clock()
        done = env.step(action)[2]
        if done:
            env.reset()
        yield clock() - start


def battle_steps(env, clock: Clock) -> Iterator[float]:
    """SMAClite."""
    rng = np.random.default_rng(1)
    env.reset(seed=1)
    while True:
        mask = np.stack(env.get_avail_actions())
        action = (rng.random(mask.shape) * mask).argmax(axis=-1).tolist()
        start = clock()
        done = env.step(action)[2]
        if done:
            env.reset()
        yield clock() - start


def jax_steps(env, clock: Clock) -> Iterator[float]:
    """JaxMARL, which resets by itself; compiled, but for one environment."""
    import jax

    step, legal, rng = jax.jit(env.step), jax.jit(env.get_avail_actions), np.random.default_rng(1)
    key = jax.random.PRNGKey(1)
    _, state = env.reset(key)
    while True:
        masks = {agent: np.asarray(mask) for agent, mask in legal(state).items()}
        action = {agent: (rng.random(mask.shape) * mask).argmax() for agent, mask in masks.items()}
        start = clock()
        key, now = jax.random.split(key)
        _, state, *_ = jax.block_until_ready(step(now, state, action))
        yield clock() - start


def envpool_steps(name: str, clock: Clock) -> Iterator[float]:
    """Jumanji shows its mask in the observation, Pgx in info, and takes the action of the player who is to move."""
    import envpool

    pool, rng = envpool.make(name, "gymnasium", num_envs=1, num_threads=1, seed=1), np.random.default_rng(1)
    obs, info = pool.reset()
    while True:
        mask = info["legal_action_mask"] if "legal_action_mask" in info else obs["action_mask"]
        action = (rng.random(mask.shape) * mask).argmax(axis=-1).astype(np.int32)
        start = clock()
        obs, *_, info = pool.step(action)
        yield clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cleanmarl.envs", description="Multi-agent environments.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("list", help="every id with its sizes")
    command.add_argument("family", nargs="?")
    command = commands.add_parser("bench", help="steps per second of one id")
    command.add_argument("id")
    command.add_argument("--seconds", type=float, default=1.0, help="of stepping, for each number")
    args = parser.parse_args()
    try:
        if args.command == "list":
            list_ids(args.family)
        else:
            bench(args.id, args.seconds)
    except BrokenPipeError:  # the reader has seen enough: `list | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its exit
    except EnvError as error:
        print(f"envs: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
