"""What a run folder needs: a name of its own, a lock, second names of files, events that are read in their order."""

import fcntl
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import time
import typing
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from cleanmarl.cli import UsageError, as_declared, check

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

CANNOT_HOLD = "args.json cannot hold {!r}: a flag is a number, text, a path, or a tuple"


def new_folder(folder: Path) -> Path:
    """Make it; two runs of one seed that start in one second get two folders."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            folder = folder.with_name(f"{folder.name}-again")


def lock_folder(folder: Path) -> TextIO:
    """Lock the folder until the file that it returns is closed, or this process is gone; UsageError if it is locked."""
    file = (folder / "lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise UsageError(f"{folder} is being written by another process: wait until it ends, or stop it") from error
    except OSError:
        pass  # a file system without locks
    return file


def check_flags(args: Any) -> None:
    """UsageError for a flag that args.json would give back as something else, as an Enum or a named tuple."""
    hints = typing.get_type_hints(type(args))
    for name, value in vars(args).items():
        again = as_declared(json.loads(json.dumps(value, default=as_json)), hints.get(name))
        check(is_same(value, again), CANNOT_HOLD.format(value))


def is_same(x: Any, again: Any) -> bool:
    """Whether a value has come back, of its type; a list may be a tuple, and a path its text."""
    if isinstance(x, Path) or isinstance(again, Path):
        return str(x) == str(again)
    if type(x) in (list, tuple):
        return len(x) == len(again) and all(map(is_same, x, again))
    if isinstance(x, dict):
        return x.keys() == again.keys() and all(is_same(value, again[key]) for key, value in x.items())
    x = x.item() if isinstance(x, np.generic) else x
    return type(x) is type(again) and (x == again or x != x)


def as_json(x: Any) -> Any:
    """What json.dumps asks for where it knows no form: a path is text, and what could not be read back is refused."""
    check(isinstance(x, Path | np.generic), CANNOT_HOLD.format(x))
    return str(x) if isinstance(x, Path) else x.item()


def copy_file(path: Path, name: Path) -> None:
    """Give a file a second name, atomically; it takes no space, as checkpoints are replaced and never written into."""
    temporary = name.with_suffix(".tmp")
    try:
        temporary.unlink(missing_ok=True)
        try:
            os.link(path, temporary)
        except OSError:  # a file system without links
            shutil.copyfile(path, temporary)
        temporary.replace(name)
    finally:
        temporary.unlink(missing_ok=True)  # still there if both were one file already


def as_table(values: dict[str, Any]) -> str:
    """A table in Markdown."""
    rows = [f"| {key} | {str(value).replace('|', chr(92) + '|')} |" for key, value in values.items()]
    return "\n".join(["| argument | value |", "|---|---|", *rows])


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


class EventFile:
    """A new event file for TensorBoard. It writes at once, so that OSError comes where a point is added."""

    def __init__(self, folder: Path):
        wait_for_next_second(folder)
        # "-": not the name that a SummaryWriter(folder) of this process and second takes, and read before it: a resumed
        # run's file begins by dropping what was read before
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}-cleanmarl"
        self.file = (folder / name).open("xb")
        self._add(file_version="brain.Event:2")

    def _add(self, **event) -> None:
        RecordWriter(self.file).write(Event(wall_time=time.time(), **event).SerializeToString())
        self.file.flush()

    def drop(self, step: int) -> None:
        """Tell every reader to drop the points of this step and of later ones that it has read so far."""
        self._add(step=step, session_log=SessionLog(status=SessionLog.START))

    def add(self, metrics: dict[str, float], step: int) -> None:
        """Write a point of each metric, in one event: one for each would cost a fast script a fifth of its time."""
        values = [Summary.Value(tag=key, simple_value=value) for key, value in metrics.items()]
        self._add(step=step, summary=Summary(value=values))

    def add_text(self, tag: str, text: str, step: int) -> None:
        """Write a text in Markdown, for the tab TEXT."""
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode(errors="backslashreplace")])
        plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        self._add(step=step, summary=Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=plugin)]))

    def close(self) -> None:
        with suppress(OSError):  # what could not be written has been said
            self.file.close()


def wait_for_next_second(folder: Path) -> None:
    """Wait until a new event file is read after those of the folder: they are read in the order of their names.

    A name begins with the second in which the file was made; what follows, host and pid, need not grow.
    """
    made = max((int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*")), default=0)
    check(made < time.time() + 60, f"{folder} has events of the future: one of two clocks is wrong")
    while time.time() < made + 1:
        time.sleep(0.01)
