"""Checkpoints: whole and finite or not written at all; nested arrays as tensors, which weights_only loading takes."""

import hashlib
import math
import mmap
import os
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from cleanmarl.cli import UsageError, check, read_run, run_folder

import numpy as np
import torch

FORMAT = 1  # raised when an older one can no longer be read
DIGEST_SIZE = hashlib.sha256().digest_size
# NumPy's numbers and arrays, which weights_only loading takes if it is told of them: a learning rate by np.cos is one
NUMPY: list[Any] = [np.float64(0).__reduce__()[0], np.empty(0).__reduce__()[0], np.ndarray, np.dtype]
NUMPY += [getattr(np.dtypes, name) for name in np.dtypes.__all__]


def write_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """What torch.save writes, and its SHA-256, which torch.load passes over; OSError or RuntimeError if it cannot.

    Atomically: a crash at any moment leaves the previous file or the new one whole. UsageError if nobody could read it.
    """
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb+") as file:
            torch.save(checkpoint, file)
            file.seek(0)
            file.write(hashlib.file_digest(file, "sha256").digest())  # after all that was read
            file.flush()
            os.fsync(file.fileno())  # or the new name may outlive a power cut, and what it names not
        check_kinds(temporary)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def check_kinds(file: Path | BytesIO) -> None:
    """UsageError if torch.save wrote what nobody could read."""
    with torch.serialization.safe_globals(NUMPY):
        strange = ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file)))
    message = f"no checkpoint holds a {strange}: a state is numbers, text, tensors and arrays, in dicts and lists"
    check(not strange, message)


def checkpoint_path(path: Path) -> Path:
    """The file itself, or checkpoint.pt, the latest one, of a run folder."""
    return path / "checkpoint.pt" if run_folder(path) == path else path


def load_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint, or the latest one of a run folder, on the CPU; UsageError if there is none, or it is damaged."""
    folder, path = run_folder(Path(path)), checkpoint_path(Path(path))
    there = sorted(folder.glob("*.pt"))
    if not path.exists():
        has = f"it has {', '.join(file.name for file in there)}" if there else "the run ended before it saved one"
        raise UsageError(f"{folder} has no {path.name}: {has}")
    others = []
    for other in there:
        with suppress(FileNotFoundError):  # a run that is going on has dropped it by now
            others += [] if other.samefile(path) else [other.name]  # one may be a second name of this
    has = f"; {folder} has {', '.join(others)} too" if others else ""
    try:
        with path.open("rb") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
                is_whole = hashlib.sha256(view[:-DIGEST_SIZE]).digest() == view[-DIGEST_SIZE:]
            check(is_whole, f"{path} is damaged, or of another version of cleanmarl{has}")
            with torch.serialization.safe_globals(NUMPY):
                checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UsageError(f"{path} is damaged and cannot be read{has}") from error
    is_ours = isinstance(checkpoint, dict) and checkpoint.get("format") == FORMAT
    check(is_ours, f"{path} is no checkpoint of this version of cleanmarl")
    script, wanted = checkpoint["script"], read_run(folder)["script"]
    check(script == wanted, f"{path} is a checkpoint of {script}.py, not of {wanted}.py")
    return checkpoint


def load_states(checkpoint: dict[str, Any], path: Path, **modules: Any) -> None:
    """Give each of the modules its state in a checkpoint, read from `path`; UsageError if it does not fit."""
    file = checkpoint_path(Path(path))
    for name, module in modules.items():
        missing = f"{file} has no {name}: it is of another version of the script, or was kept (keep.py) to be played"
        check(name in checkpoint["modules"], missing)
        state = checkpoint["modules"][name]
        if isinstance(module, torch.optim.Optimizer):
            state = in_order(state, checkpoint.get("parameters", {}).get(name), parameter_names(modules)[name])
            settings = list(module.defaults)  # torch adds to them as it loads
        try:
            module.load_state_dict(state)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            hint = "; make in Agent.__init__ what main changes of it" if "_orig_mod." in reason else ""  # torch.compile
            raise UsageError(f"the {name} of {file} does not fit the script as it is ({reason}){hint}") from error
        if isinstance(module, torch.optim.Optimizer):  # torch takes the state of any, and fails at the first step
            lacks = sorted({key for group in module.param_groups for key in settings if key not in group})
            message = f"the {name} of {file} is of another class, without {', '.join(lacks)}"
            check(not lacks, f"{message}: take that class again, or begin a new run")


def parameter_names(modules: dict[str, Any]) -> dict[str, list[list[str]]]:
    """The names of the parameters in each group of each optimizer among the modules, in the optimizer's order."""
    networks = {name: module for name, module in modules.items() if isinstance(module, torch.nn.Module)}
    names = {p: f"{name}.{key}" for name, network in networks.items() for key, p in network.named_parameters()}
    optimizers = {name: module for name, module in modules.items() if isinstance(module, torch.optim.Optimizer)}
    return {
        name: [[names.get(p, "") for p in group["params"]] for group in optimizer.param_groups]
        for name, optimizer in optimizers.items()
    }


def in_order(state: dict[str, Any], saved: list[list[str]] | None, now: list[list[str]]) -> dict[str, Any]:
    """An optimizer's state, saved with the parameters in another order: those of a set have one of each process.

    torch goes by the order alone: moments of another parameter would be taken, even of another shape.
    """
    if saved is None or list(map(sorted, saved)) != list(map(sorted, now)):
        return state
    groups = state["param_groups"]
    place = {name: i for names, group in zip(saved, groups) for name, i in zip(names, group["params"])}
    if len(place) < sum(map(len, saved)):  # some have no name
        return state
    ordered = [group | {"params": [place[name] for name in names]} for names, group in zip(now, groups)]
    return state | {"param_groups": ordered}


def not_finite(x: Any, name: str) -> str | None:
    """The name of the first part of nested dicts, lists and tensors with a number that is NaN or infinite, or None."""
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        # If a sum is finite, so are its parts: quicker than to look at each, and needs no memory in a large buffer.
        return None if x.sum().isfinite() or x.isfinite().all() else name
    if isinstance(x, dict | list | tuple):
        items = x.items() if isinstance(x, dict) else enumerate(x)
        return next(filter(None, (not_finite(value, f"{name}.{key}") for key, value in items)), None)
    if isinstance(x, np.ndarray | np.generic):
        return name if x.dtype.kind == "f" and not np.isfinite(x).all() else None
    return name if isinstance(x, float) and not math.isfinite(x) else None


def as_tensors(x: Any) -> Any:
    """Nested dicts, lists and tuples with their arrays as tensors."""
    return of_each(lambda x: torch.from_numpy(x.copy()) if isinstance(x, np.ndarray) else x, x)


def as_arrays(x: Any) -> Any:
    """Nested dicts, lists and tuples with their tensors as arrays."""
    return of_each(lambda x: x.numpy() if isinstance(x, torch.Tensor) else x, x)


def of_each(function: Callable[[Any], Any], x: Any) -> Any:
    """`function` of each thing in nested dicts, lists and tuples, in the same nest."""
    if isinstance(x, dict):
        return {key: of_each(function, value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return (list if isinstance(x, list) else tuple)(of_each(function, value) for value in x)
    return function(x)


def random_state() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's global generators."""
    state: Any = np.random.get_state()  # noqa: NPY002
    name, keys, *numbers = state
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    randoms = {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": cuda}
    return randoms | {"numpy": (name, torch.from_numpy(keys.astype(np.int64)), *numbers)}


def set_random_state(randoms: dict[str, Any]) -> None:
    random.setstate(randoms["python"])
    torch.set_rng_state(randoms["torch"])
    if torch.cuda.is_available() and randoms["cuda"]:
        torch.cuda.set_rng_state_all(randoms["cuda"][: torch.cuda.device_count()])  # here may be fewer GPUs
    name, keys, *numbers = randoms["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *numbers))  # noqa: NPY002


@contextmanager
def same_random_state() -> Iterator[None]:
    """What is drawn inside changes nothing of what is drawn afterwards."""
    randoms = random_state()
    try:
        yield
    finally:
        set_random_state(randoms)
