"""Command lines: the flags that every script has, ranges of flags, and one line for every mistake.

    @dataclass
    class Args(RunArgs):
        gamma: UnitFloat = 0.99
        \"""discount factor\"""

    if __name__ == "__main__":
        launch(main, Args)

`Args(gamma=2)` raises UsageError: --gamma must be in [0, 1], not 2.
"""

import ctypes
import dataclasses
import importlib
import json
import math
import os
import random
import signal
import sys
import typing
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

import annotated_types
import numpy as np
import torch
import tyro
from annotated_types import Ge, Gt, Interval, Le, Lt

from cleanmarl.envs import EnvError, WorkerError

# Ranges of flags. A float must be finite too, unless its range names infinity as its end.
PositiveInt = Annotated[int, Gt(0)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
UnitFloat = Annotated[float, Interval(ge=0, le=1)]

MOST_THREADS = 1024  # some thousands are more than a system gives to one process, and torch ends without a word


class UsageError(Exception):
    """The user asked for something impossible: shown as one line, exit status 2."""


class RunError(Exception):
    """A run cannot go on, through no fault of the command line: shown as one line, exit status 1."""


def check(condition: bool, message: str) -> None:
    """Raise UsageError(message) unless the condition holds."""
    if not condition:
        raise UsageError(message)


def tell(line: str, file: TextIO | None = None) -> None:
    """Print a line. If nobody can read it (a closed terminal or pipe, a full disk), the run goes on all the same."""
    file = sys.stdout if file is None else file
    try:
        print(line, file=file, flush=True)
    except RuntimeError:  # a signal's, in the midst of another line
        pass
    except OSError:
        with suppress(OSError), open(os.devnull, "wb") as nowhere:  # noqa: PTH123 (what comes later goes nowhere)
            os.dup2(nowhere.fileno(), file.fileno())


@dataclass
class RunArgs:
    """Flags that change no learning, but for the seed. Building it checks the declared range of every field."""

    seed: Annotated[int, Interval(ge=0, lt=2**32)] = 1
    """seed of the networks, the policies' samples, the minibatches and the environments"""
    device: str = "cpu"
    """torch device: cpu, cuda, cuda:1, mps; small networks are fastest on the CPU"""
    torch_threads: PositiveInt = 1
    """threads of torch on the CPU"""
    runs_dir: str = "runs"
    """where run folders are made"""
    checkpoint_interval: PositiveInt = 100_000
    """environment steps between two checkpoints; there is always one at the end"""
    resume: Path | None = None
    """run folder to continue; --total-timesteps may be raised"""
    eval_episodes: NonNegativeInt = 20
    """episodes of the evaluation at the end, with the most probable actions; 0 for none"""
    capture_video: bool = False
    """record an episode at the end into the run folder"""
    track: bool = False
    """log to Weights & Biases too"""
    wandb_project_name: str = "cleanmarl"
    """Weights & Biases project"""
    wandb_entity: str | None = None
    """Weights & Biases team"""

    def __post_init__(self) -> None:
        check_ranges(self)
        check(self.runs_dir.strip() != "", "--runs-dir is empty; the folder of now is --runs-dir .")


# What may differ from the arguments of the run that --resume continues: nothing that changes the learning.
RESUME_MAY_CHANGE = {field.name for field in dataclasses.fields(RunArgs)} - {"seed"}
RESUME_MAY_CHANGE |= {"total_timesteps", "num_workers", "address"}  # how long and where


def flag(name: str) -> str:
    """total_timesteps -> --total-timesteps."""
    return f"--{name.replace('_', '-')}"


def limits(hint: Any) -> list[Gt | Ge | Lt | Le]:
    """The limits in a type hint such as UnitFloat, UnitFloat | None or tuple[UnitFloat, ...]."""
    found = []
    for metadata in getattr(hint, "__metadata__", ()):
        found += metadata if isinstance(metadata, annotated_types.GroupedMetadata) else [metadata]
    for inner in typing.get_args(hint):
        found += limits(inner)
    return found


def check_ranges(args: Any) -> None:
    """Raise UsageError for the first number of a dataclass that is outside its range.

    The range that a base class declares holds where a subclass only changes the default.
    """
    for cls in type(args).__mro__[:-1]:
        for name, hint in typing.get_type_hints(cls, include_extras=True).items():
            check_range(flag(name), getattr(args, name), hint)


def check_range(name: str, value: Any, hint: Any) -> None:
    """Raise UsageError if a number, or one in a tuple of them, is not finite or outside the limits of its type hint."""
    if isinstance(value, tuple):
        for element in value:
            check_range(name, element, hint)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    low, left, high, right = -math.inf, "(", math.inf, ")"
    for limit in limits(hint):
        match limit:
            case Gt(gt=low):
                left = "("
            case Ge(ge=low):
                left = "["
            case Lt(lt=high):
                right = ")"
            case Le(le=high):
                right = "]"
    inside = (low < value or (value == low and left == "[")) and (value < high or (value == high and right == "]"))
    wanted = f"in {left}{low}, {high}{right}"
    if high == math.inf and right == ")":
        wanted = f"at least {low}" if left == "[" else f"greater than {low}"
        wanted = "finite" if math.isinf(low) or not math.isfinite(value) else wanted
    check(inside, f"{name} must be {wanted}, not {value}")


def find_device(name: str) -> torch.device:
    """The torch device called `name` (cpu, cuda, cuda:1, mps); UsageError if this machine does not have it."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # which meta has not
        check(device.type != "cpu" or not device.index, f"--device {name} is not there; --device cpu always is")
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"--device {name} is not there ({reason}); --device cpu always is") from error
    return device


def seed_everything(seed: int, torch_threads: int) -> None:
    """Seed Python, NumPy and torch, and set the number of torch's threads (more than one slows small networks down)."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (libraries draw from NumPy's global state)
    torch.manual_seed(seed)
    torch.set_num_threads(torch_threads)
    torch.backends.cudnn.deterministic = True


def set_up(args: RunArgs) -> torch.device:
    """Seed all random numbers and set torch's threads as `args` says; returns the device to learn on."""
    device = find_device(args.device)
    message = f"--torch-threads {args.torch_threads} would crash torch; this machine has {os.cpu_count()} processors"
    check(args.torch_threads <= max(MOST_THREADS, os.cpu_count()), message)
    seed_everything(args.seed, args.torch_threads)
    return device


def keep_freed_memory() -> None:
    """Let the C library keep what torch frees, instead of giving large tensors back to the kernel and asking anew.

    Each of their pages would be faulted in and cleared again at every operation: for a residual network on pictures
    that is more time than its arithmetic. glibc's `mallopt(3)`; elsewhere nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX: no mappings of their own for large blocks
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never shrink the heap


def import_optional(package: str, flag: str) -> Any:
    """The package; UsageError that says which flag needs it if it is missing."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UsageError(f"{flag} needs the package {package}: pip install {package}") from error


def read_run(folder: Path) -> dict[str, Any]:
    """The contents of a run folder's args.json; UsageError if the folder is not a run."""
    try:
        meta = json.loads((Path(folder) / "args.json").read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder} is not a run folder: it has no readable args.json") from error
    is_run = isinstance(meta, dict) and {"script", "args"} <= meta.keys() and isinstance(meta["args"], dict)
    check(is_run, f"{folder} is not a run folder: its args.json is of something else")
    return meta


def load_args(args_class: type, folder: Path, script: str) -> Any:
    """The arguments of an earlier run of `script` as an instance of `args_class` (JSON lists become tuples again)."""
    meta = read_run(folder)
    check(meta["script"] == script, f"{folder} is a run of {meta['script']}.py, not of {script}.py")
    try:
        return args_class(**{key: tuple(v) if isinstance(v, list) else v for key, v in meta["args"].items()})
    except TypeError as error:
        raise UsageError(f"{folder} is a run of another version of {script}.py ({error})") from error


def parse(args_class: type, argv: list[str], script: str) -> Any:
    """Arguments from the command line; with --resume RUN_DIR, those of that run unless the command line differs."""
    args = tyro.cli(args_class, args=argv)
    if args.resume is None:
        return args
    stored = load_args(args_class, args.resume, script)
    args = tyro.cli(args_class, args=argv, default=stored)
    for field in dataclasses.fields(args):
        new, old = getattr(args, field.name), getattr(stored, field.name)
        message = f"{flag(field.name)} {new} would change the learning of the run to resume, which has {old}"
        check(new == old or field.name in RESUME_MAY_CHANGE, message)
    return args


def launch(main: Callable[[Any], Any], args_class: type) -> None:
    """Run `main` on the command line's arguments; a mistake is one line and exit status 2, a failure one and 1."""
    script = Path(sys.argv[0]).stem
    keep_freed_memory()
    try:
        main(parse(args_class, sys.argv[1:], script))
    except (UsageError, EnvError) as error:
        tell(f"{script}: {error}", sys.stderr)
        sys.exit(2)
    except (RunError, WorkerError) as error:
        tell(f"{script}: {error}", sys.stderr)
        sys.exit(1)
    except (MemoryError, torch.OutOfMemoryError) as error:  # NumPy and torch say how much it would have been
        tell(f"{script}: not enough memory: {str(error).splitlines()[0] if str(error) else 'no details'}", sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:  # Ctrl-C before the run began, or twice
        sys.exit(128 + signal.SIGINT)
