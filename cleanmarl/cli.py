"""Command lines: the flags that every script has, ranges of flags, and one line for every mistake.

    @dataclass
    class Args(RunArgs):
        gamma: UnitFloat = 0.99
        \"""discount factor\"""

    if __name__ == "__main__":
        launch(main, Args)

`Args(gamma=2)` raises UsageError: --gamma must be in [0, 1], not 2.
"""

import ast
import ctypes
import dataclasses
import errno
import importlib
import inspect
import io
import itertools
import json
import math
import os
import random
import re
import signal
import sys
import textwrap
import time
import types
import typing
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from cleanmarl.envs import EnvError, WorkerError, close_all
from cleanmarl.machine import gigabytes

import annotated_types
import numpy as np
import tyro
from annotated_types import Ge, Gt, Interval, Le, Lt

if TYPE_CHECKING:
    import torch  # at run time only where it is used: it takes seconds, and a report has no need of it

# Ranges of flags. A float must be finite too, unless its range names infinity as its end.
PositiveInt = Annotated[int, Gt(0)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
UnitFloat = Annotated[float, Interval(ge=0, le=1)]

OTHERS_WAIT = 30  # seconds that other processes of torchrun leave to the first one, to say what all have found
MOST_THREADS = 1024  # some thousands are more than a system gives to one process, and torch ends without a word


class UsageError(Exception):
    """The user asked for something impossible: shown as one line, exit status 2."""


class RunError(Exception):
    """A run cannot go on, through no fault of the command line: shown as one line, exit status 1."""


def check(condition: bool, message: str) -> None:
    """Raise UsageError(message) unless the condition holds."""
    if not condition:
        raise UsageError(message)


def memory_error(error: Exception) -> str | None:
    """What NumPy, torch or the system say of memory that they cannot give, None if it is another error."""
    line = " ".join(str(error).split())
    if found := re.search(r"allocate (\d+) bytes", line):  # torch's, on the CPU
        return f"unable to allocate {gigabytes(int(found[1]))}"
    no_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's, on a GPU
    no_memory |= isinstance(error, OSError) and error.errno == errno.ENOMEM
    # no machine has it, and so nobody tries
    too_big = "size calculation overflowed|is too big|Maximum allowed dimension|fit into a C int"
    no_memory |= re.search(too_big, line) is not None
    return (line or "no details") if no_memory else None


def tell(line: str, file: TextIO | None = None) -> None:
    """Print a line. If nobody can read it (a closed terminal or pipe, a full disk), the run goes on all the same."""
    file = sys.stdout if file is None else file
    try:
        print(line, file=file, flush=True)
    except UnicodeEncodeError:  # the locale has no "±", or not the letters of a folder's name
        tell(line.encode("ascii", "backslashreplace").decode(), file)
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
    """torch device: cpu, cuda, cuda:1, mps; small networks gain little from a GPU"""
    torch_threads: PositiveInt = 1
    """threads of torch on the CPU"""
    runs_dir: str = "runs"
    """where run folders are made"""
    checkpoint_interval: PositiveInt = 100_000
    """environment steps between two checkpoints; there is always one at the end"""
    keep_checkpoints: PositiveInt = 1
    """how many of the latest checkpoints to keep: checkpoint.pt, and older ones as checkpoint-STEP.pt"""
    resume: Path | None = None
    """run folder to continue, or a checkpoint in it (RUN/best.pt); schedules follow a raised --total-timesteps"""
    eval_episodes: NonNegativeInt = 20
    """episodes of an evaluation, with the most probable actions; 0 for none"""
    eval_interval: NonNegativeInt = 0
    """environment steps between two evaluations, of which best.pt keeps the best one; 0 for one at the end only"""
    capture_video: bool = False
    """film an episode at the end into the run folder"""
    video_interval: NonNegativeInt = 0
    """with --capture-video, environment steps between two films; 0 for one at the end only"""
    track: bool = False
    """log to Weights & Biases too"""
    wandb_project_name: str = "cleanmarl"
    """Weights & Biases project"""
    wandb_entity: str | None = None
    """Weights & Biases team"""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, np.generic):  # a number of NumPy's, as of np.linspace
                setattr(self, name, value.item())
        check_ranges(self)
        check(str(self.runs_dir).strip() != "", "--runs-dir is empty; the folder of now is --runs-dir .")


@dataclass
class OnPolicyArgs(RunArgs):
    """RunArgs, and the flag of the scripts whose losses are @compilable."""

    compile: bool = False
    """compile the loss: up to a minute longer to start, then faster; needs a C++ compiler, on a GPU Triton"""


# What may differ from the arguments of the run that --resume continues: what changes no learning, and how long it is to
# be. With another total a schedule that falls to the end of the run, as that of a learning rate, jumps to the new one.
RESUME_MAY_CHANGE = {field.name for field in dataclasses.fields(OnPolicyArgs)} - {"seed"}
RESUME_MAY_CHANGE |= {"total_timesteps", "num_workers", "address", "log_every", "eval_steps", "num_eval_ep"}

ENVIRONMENT = ("env_id", "total_timesteps", "num_envs", "num_steps")  # flags that --help shows together, apart


def flag(name: str) -> str:
    """total_timesteps -> --total-timesteps."""
    return f"--{name.replace('_', '-')}"


def limits(hint: Any) -> list[Gt | Ge | Lt | Le]:
    """The limits in a type hint such as UnitFloat, UnitFloat | None or tuple[UnitFloat, ...]."""
    found: list[Any] = []
    for metadata in getattr(hint, "__metadata__", ()):
        found += metadata if isinstance(metadata, annotated_types.GroupedMetadata) else [metadata]
    for inner in typing.get_args(hint):
        found += limits(inner)
    return found


def check_ranges(args: Any) -> None:
    """Raise UsageError for the first value of a dataclass that is outside its range, or none of its choices.

    The range that a base class declares holds where a subclass only changes the default.
    """
    for cls in type(args).__mro__[:-1]:
        for name, hint in typing.get_type_hints(cls, include_extras=True).items():
            check_range(flag(name), getattr(args, name), hint)


def check_range(name: str, value: Any, hint: Any) -> None:
    """Raise UsageError for what its type hint does not allow: no choice or number of it; also in a tuple or list."""
    allowed = choices(hint)
    if allowed and not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise UsageError(f"{name} must be {' or '.join(map(repr, allowed))}, not {value!r}")
    if isinstance(value, tuple | list):
        for element in value:
            check_range(name, element, hint)
        return
    kinds = plain_types(hint)
    if kinds & {int, float} and not isinstance(value, tuple(kinds | {int})):  # a float may be given as an integer
        raise UsageError(f"{name} must be {'a number' if float in kinds else 'an integer'}, not {value!r}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    low, left, high, right = interval(hint)
    inside = (low < value or (value == low and left == "[")) and (value < high or (value == high and right == "]"))
    wanted = range_text(hint) if high < math.inf or right == "]" or math.isfinite(value) else "finite"
    check(inside, f"{name} must be {wanted}, not {value}")


def choices(hint: Any) -> list[Any]:
    """All that a type hint allows, if they can be listed: ["adam", "rmsprop"] of a Literal, [False, True] of bool."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return [*inner]
    if origin in (typing.Union, types.UnionType):
        of_each = [choices(x) for x in inner]
        return [choice for listed in of_each for choice in listed] if all(of_each) else []
    return [False, True] if hint is bool else [None] if hint is types.NoneType else []


def plain_types(hint: Any) -> set[type]:
    """The types in a type hint: {float, NoneType} for UnitFloat | None, {int} for tuple[PositiveInt, ...]."""
    origin = typing.get_origin(hint)
    if origin is Annotated:
        return plain_types(hint.__origin__)
    if origin is typing.Literal:
        return {type(x) for x in typing.get_args(hint)}
    if origin in (tuple, list, typing.Union, types.UnionType):
        return set().union(*(plain_types(x) for x in typing.get_args(hint) if x is not ...))
    kind = origin or hint
    return {kind} if isinstance(kind, type) else set()


def interval(hint: Any) -> tuple[float, str, float, str]:
    """The range in a type hint as its lower end, "(" or "[", its upper end, ")" or "]"."""
    low: Any
    high: Any
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
    return low, left, high, right


def range_text(hint: Any) -> str:
    """in [0, 1], at least 0, greater than 0, less than 1, or finite: what a number of this type hint must be."""
    low, left, high, right = interval(hint)
    if math.isinf(low) and high < math.inf and right == ")":
        return f"less than {high}"
    if high < math.inf or right == "]":
        return f"in {left}{low}, {high}{right}"
    if math.isinf(low):
        return "finite"
    return f"at least {low}" if left == "[" else f"greater than {low}"


def find_device(name: str) -> "torch.device":
    """The torch device called `name` (cpu, cuda, cuda:1, mps); UsageError if this machine does not have it."""
    import torch

    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # which meta has not
        learners, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
        message = f"{learners} processes of torchrun need a GPU each, and this machine has {gpus}"
        check(device.type != "cuda" or learners <= gpus, message)
        check(device.type != "cpu" or not device.index, f"--device {name} is not there; --device cpu always is")
    except (RuntimeError, AssertionError, ImportError) as error:  # the last: a kind that torch has no module for
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"--device {name} is not there ({reason}); --device cpu always is") from error
    return device


def seed_everything(seed: int, torch_threads: int) -> None:
    """Seed Python, NumPy and torch, and set the number of torch's threads (more than one slows small networks down)."""
    import torch

    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (libraries draw from NumPy's global state)
    torch.manual_seed(seed)
    torch.set_num_threads(torch_threads)
    torch.backends.cudnn.deterministic = True


def set_up(args: RunArgs) -> "torch.device":
    """Seed all random numbers and set torch's threads as `args` says; returns the device to learn on."""
    from cleanmarl.layers import CompileError, compile_losses

    device = find_device(args.device)
    message = f"--torch-threads {args.torch_threads} would crash torch; this machine has {os.cpu_count()} processors"
    check(args.torch_threads <= max(MOST_THREADS, os.cpu_count() or 1), message)
    seed_everything(args.seed, args.torch_threads)
    wanted = isinstance(args, OnPolicyArgs) and args.compile
    if wanted:
        tell("compiling the loss: the first update takes up to a minute longer, and many in an _lstm script")
    try:
        compile_losses(wanted, device)
    except CompileError as error:
        needed = "a C++ compiler (such as g++: apt install g++)" if device.type == "cpu" else "Triton"
        raise UsageError(f"--compile needs {needed}: {error}") from error
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


def run_folder(path: Path) -> Path:
    """The run folder that was named, itself or by a checkpoint in it."""
    return path.parent if path.suffix == ".pt" and not path.is_dir() else path


def read_run(folder: Path) -> dict[str, Any]:
    """The contents of a run folder's args.json; UsageError if the folder is not a run, or the file is damaged."""
    try:
        meta = json.loads((Path(folder) / "args.json").read_text())
    except OSError as error:
        raise UsageError(f"{folder} is not a run folder: it has no readable args.json") from error
    except ValueError as error:
        raise UsageError(f"{Path(folder) / 'args.json'} is damaged ({error})") from error
    is_run = isinstance(meta, dict) and {"script", "args"} <= meta.keys() and isinstance(meta["args"], dict)
    check(is_run, f"{folder} is not a run folder: its args.json is of something else")
    return meta


def as_declared(value: Any, hint: Any) -> Any:
    """A value of args.json as a field of this type has it: JSON has text for a path, and lists for tuples."""
    for kind in typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else [hint]:
        if kind is Path and isinstance(value, str):
            return Path(value)
        if (container := typing.get_origin(kind) or kind) in (list, tuple) and isinstance(value, list):
            first, *others = typing.get_args(kind) or [Any]
            is_fixed = others != [...] and len(others) + 1 == len(value)  # tuple[int, Path], and not tuple[int, ...]
            kinds = [first, *others] if is_fixed else [first] * len(value)
            return container(map(as_declared, value, kinds))
    return tuple(value) if isinstance(value, list) else value


def load_args(args_class: type, folder: Path, script: str) -> Any:
    """The arguments of an earlier run of `script` as an instance of `args_class`."""
    meta = read_run(folder)
    check(meta["script"] == script, f"{folder} is a run of {meta['script']}.py, not of {script}.py")
    hints = typing.get_type_hints(args_class)
    try:
        return args_class(**{key: as_declared(value, hints.get(key)) for key, value in meta["args"].items()})
    except TypeError as error:
        raise UsageError(f"{folder} is a run of another version of {script}.py ({error})") from error


def other_words(args_class: type, word: str) -> list[str]:
    """Flags that are what `word` is called elsewhere: its parts in another order, or the name of another family."""
    families = [{"--max-grad-norm", "--clip-gradients"}, {"--update-epochs", "--epochs", "--num-epochs"}]
    families += [{"--learning-rate", "--learning-rate-actor", "--lr"}]
    names = {word}.union(*(family for family in families if word in family))
    known = [flag(field.name) for field in dataclasses.fields(args_class)]
    return [x for x in known if x != word and (x in names or sorted(x.split("-")) == sorted(word.split("-")))]


def read_flags(args_class: type, argv: list[str], **options: Any) -> Any:
    """What tyro.cli reads from a command line; UsageError where it would print a box of many lines."""
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            return tyro.cli(args_class, args=argv, **options)
    except SystemExit as stopped:
        if stopped.code != 2:  # --help
            raise
        text = "\n" + re.sub("[│|╭╮╰╯]", " ", box.getvalue())  # with or without Unicode
        _, what, more, *_ = [*re.split(r"\n.*[─-]{3,}.*", text), "", ""]  # between its lines
        near = re.findall(r"--[\w-]+", more.partition("Perhaps you meant:")[2])
        near = [name for word in re.findall(r"--[\w-]+", what) for name in other_words(args_class, word)] or near
        hint = f"; did you mean {' or '.join(dict.fromkeys(near))}?" if near else "; --help lists all flags"
        raise UsageError(" ".join(what.split()).rstrip(".") + hint) from None


def field_docs(args_class: type) -> dict[str, str]:
    """Name -> docstring of every field of a dataclass, its own or that of a base class."""
    docs = {}
    for cls in reversed(args_class.__mro__[:-1]):
        tree: Any = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        for field, below in itertools.pairwise(tree.body[0].body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                docs[ast.unparse(field.target)] = " ".join(ast.literal_eval(below.value).split())
    return docs


def show_help(args_class: Any) -> None:
    """Print all flags of a script, in three boxes and with their ranges, and exit."""
    docs, shared = field_docs(args_class), field_docs(args_class.__base__)
    groups: dict[str, list] = {"environment": [], "algorithm": [], "run": []}
    for field in dataclasses.fields(args_class):
        hints = [typing.get_type_hints(cls, include_extras=True).get(field.name) for cls in args_class.__mro__[:-1]]
        ranges = [range_text(hint) for hint in hints if limits(hint)]  # the base class's holds, too
        hint = f"({ranges[0]}; default: {{}})" if ranges else "(default: {})"
        described = tyro.conf.arg(help=docs.get(field.name, ""), help_behavior_hint=hint.format)
        group = "run" if field.name in shared else "environment" if field.name in ENVIRONMENT else "algorithm"
        default = dataclasses.field(default=field.default, default_factory=field.default_factory)
        groups[group].append((field.name, Annotated[hints[0], described], default))
    boxes = []
    for name, fields in groups.items():
        box = dataclasses.make_dataclass(name, fields)
        boxes.append((name, box, dataclasses.field(default_factory=box)))
    grouped = dataclasses.make_dataclass("Args", boxes)
    first_line = (sys.modules[args_class.__module__].__doc__ or "").partition("\n")[0]
    try:
        try:
            tyro.cli(grouped, args=["--help"], description=first_line, config=[tyro.conf.OmitArgPrefixes])
        finally:
            sys.stdout.flush()
    except OSError:  # of `| head`, which has seen enough, or a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def parse(args_class: type, argv: list[str], script: str) -> Any:
    """Arguments from the command line; with --resume RUN_DIR, those of that run unless the command line differs."""
    if {"-h", "--help"} & {*argv}:
        show_help(args_class)
    args = read_flags(args_class, argv)
    if args.resume is None:
        check(args.capture_video or not args.video_interval, "--video-interval does nothing without --capture-video")
        check(args.eval_episodes > 0 or not args.eval_interval, "--eval-interval does nothing with --eval-episodes 0")
        return args
    folder = run_folder(args.resume)
    args = read_flags(args_class, argv, default=load_args(args_class, folder, script))
    check_resumed(args, folder, script)
    return args


def check_resumed(args: Any, folder: Path, script: str) -> None:
    """UsageError if `args` would change what the run in `folder`, which goes on with them, learns."""
    stored, given = load_args(type(args), folder, script), read_run(folder)["args"]
    for field in dataclasses.fields(args):
        new, old = getattr(args, field.name), getattr(stored, field.name)
        has = f"has {old}" if field.name in given else f"was begun without it, as {old}"
        message = f"{flag(field.name)} {new} would change the learning of the run to resume, which {has}"
        check(new == old or field.name in RESUME_MAY_CHANGE, message)


def launch(main: Callable[[Any], Any], args_class: type) -> None:
    """Run `main` on the command line's arguments; a mistake is one line and exit status 2, a failure one and 1.

    Under torchrun the first process says what all have found; it ends them all when one has ended.
    """
    script, rank = Path(sys.argv[0]).stem, int(os.environ.get("RANK", 0))
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        pass  # a standard stream that is closed, as by `<&-`: no file or pipe of ours may take its number
    os.close(descriptor)
    keep_freed_memory()
    try:
        main(parse(args_class, sys.argv[1:], script))
    except KeyboardInterrupt as error:  # Ctrl-C before the run began, or a second signal, whose number it has
        sys.exit(128 + (*error.args, signal.SIGINT)[0])
    except Exception as error:
        if (said := what_to_say(error)) is None:
            raise
        if rank > 0:
            time.sleep(OTHERS_WAIT + rank)
        tell(f"{script}: {said[0]}", sys.stderr)
        sys.exit(said[1])
    except SystemExit as stopped:
        if stopped.code == 128 + signal.SIGTERM:  # another one may be on its way, see ECHO_SECONDS in run.py
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    finally:
        close_all()


def compiler_error(error: Exception) -> str:
    """What torch says where --compile has failed, and "" for other errors."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and isinstance(error, dynamo.exc.BackendCompilerFailed):
        return str(error.inner_exception).strip() or "it does not say why"
    return ""


def what_to_say(error: Exception) -> tuple[str, int] | None:
    """The line for an error and the exit status; None for one that is a mistake of the script's."""
    if isinstance(error, UsageError | EnvError):
        return str(error), 2
    if isinstance(error, RunError | WorkerError):
        return str(error), 1
    if reason := memory_error(error):
        return f"not enough memory: {reason[:200]}", 1
    if said := compiler_error(error):  # the compiler is there, and this loss is too much for it; torch has said more
        reason = said.partition("\n")[0]
        if cut_off := re.search(r"(\S+\.so): (file too short|invalid ELF header)", reason):
            return f"--compile was killed earlier, and left {cut_off[1]} unfinished: delete it and start again", 1
        return f"--compile cannot compile a loss of this script here ({reason}); run it without", 1
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        from torch.distributed import DistError

        lost = "Connection (closed|reset) by peer|Broken pipe|onnection was closed|Socket Timeout"  # gloo's and NCCL's
        if isinstance(error, DistError) or re.search(lost, str(error)):
            return "another process of this run has ended, and so does this one", 1
    return None
