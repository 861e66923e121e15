"""Worker processes for environments: each steps its block of them on arrays that all processes share.

    memory = new_memory()
    arrays = share({"obs": ((N, A, D), np.float32), ...}, memory)
    workers = [Worker(label, "my_module:MyBlock", memory, ...), ...]
    call(workers, "step")                               # MyBlock(memory, ...).step() in every worker, at the same time
    stop(workers)

The arrays carry what changes at every step; the pipes carry names of methods, their few arguments, and errors.

A worker that is silent for a minute is looked at. If it is stopped (SIGSTOP, a debugger), nobody would ever hear of it
again: WorkerError. If it is merely slow, a line says so, every minute, and the run waits: who knows how long a reset
takes.

Why not Gymnasium's AsyncVectorEnv: one process per environment, rewards (N,) instead of (N, A), infos pickled at every
step. Workers here are fresh interpreters, as with multiprocessing's spawn, but they do not import the script again:
that takes seconds and the memory of torch in each of them, and a `__main__` guard in the script.
"""

import importlib
import math
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from cleanmarl.envs import EnvError, WorkerError
from cleanmarl.machine import is_stopped

import numpy as np

END = int(signal.SIGUSR1)  # ends a process that is busy, but not before it has closed its environments
CLOSING = 10.0  # seconds that it has for this
SILENCE = 60.0  # seconds without a word from a process, after which one looks what is the matter


def new_memory() -> int:
    """Descriptor of a file without a name: nothing is left whoever dies, and the size of /dev/shm is no limit."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("cleanmarl")
    with tempfile.TemporaryFile() as file:  # macOS
        return os.dup(file.fileno())


def share(fields: dict[str, tuple], memory: int | None = None) -> dict[str, np.ndarray]:
    """Arrays of these (shape, dtype), zeros at first, in the file `memory` (made large enough) or in this process.

    Whoever calls it with the same fields and the same file has the same arrays.
    """
    sizes = [-(-math.prod(shape) * np.dtype(dtype).itemsize // 64) * 64 for shape, dtype in fields.values()]
    if memory is not None:
        os.truncate(memory, sum(sizes))
    buffer = mmap.mmap(-1 if memory is None else memory, sum(sizes))
    starts = np.cumsum([0, *sizes])
    return {
        key: np.ndarray(shape, dtype, buffer, start) for (key, (shape, dtype)), start in zip(fields.items(), starts)
    }


class Worker:
    """A process with what `target` (module:callable) makes of the shared memory and `arguments`, as others see it.

    `label` names it in errors; "{pid}" in it becomes its process id.
    """

    def __init__(self, label: str, target: str, memory: int, *arguments):
        self.connection, theirs = Pipe()
        paths = [path for path in sys.path if isinstance(path, str)]  # Python passes over all others
        script = (
            f"import sys; sys.path[:] = {paths}; "  # first of all: the folder of now may have a signal.py
            # Ctrl-C is for the main process; SIG_IGN would be that of all that an environment starts, too
            "import signal; signal.signal(signal.SIGINT, lambda *_: None); "
            "signal.signal(signal.SIGTERM, signal.SIG_DFL); "
            f"signal.signal({END}, lambda *_: sys.exit()); "
            f"from cleanmarl.envs.workers import serve; serve({theirs.fileno()}, {memory})"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), memory),
            env={"OMP_NUM_THREADS": "1", **os.environ},  # workers share the cores already
            start_new_session=True,  # a signal to the process group ends the main process, which ends the workers
        )
        theirs.close()  # so that the pipe ends with the process
        self.poller = select.poll()
        self.poller.register(self.connection, select.POLLIN)
        self.label = label.replace("{pid}", str(self.process.pid))
        self.send("open", target, *arguments)

    def send(self, command: str, *arguments) -> None:
        with suppress(OSError):  # a dead worker is noticed by receive
            self.connection.send((command, arguments))

    def receive(self):
        """What the command that was sent returned. WorkerError if it raised, or if the process died or is stopped.

        An EnvError that it raised is raised as it is.
        """
        start = time.monotonic()
        while not self.poller.poll(1000 * SILENCE):
            if self.process.poll() is not None:  # and what it has forked holds its end of the pipe
                raise WorkerError(f"{self.label} died ({self.end()})")
            look_after(self.label, self.process.pid, time.monotonic() - start)
        try:
            error, reply = self.connection.recv()
        except (EOFError, OSError):
            raise WorkerError(f"{self.label} died ({self.end()})") from None
        if isinstance(error, EnvError):
            raise error
        if error:
            raise WorkerError(f"{self.label} failed:\n{error}")
        return reply

    def end(self) -> str:
        """How the process ended; what closed its end of the pipe may still be ending, as where it waits for threads."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        status = self.process.returncode
        if status is None:
            return "it closed its pipe"
        return f"exit status {status}" if status >= 0 else f"signal {-status}, {signal.strsignal(-status)}"


def look_after(label: str, pid: int, seconds: float) -> None:
    """A process has been silent for so long: WorkerError if it is stopped, else a line that we wait for it."""
    if is_stopped(pid):
        time.sleep(min(1, SILENCE))  # unless somebody has just let all of a stopped job go on
        if is_stopped(pid):
            hint = "kill -CONT would have let it go on; now it is ended, continue with --resume"
            raise WorkerError(f"{label} is stopped and was silent for {seconds:.0f} seconds: {hint}")
    with suppress(OSError):  # a closed terminal
        print(f"{label} has been silent for {seconds:.0f} seconds; waiting for it", file=sys.stderr, flush=True)


def call(workers: list[Worker], command: str, *arguments):
    """Have all workers carry out a command at the same time; the reply of the first."""
    for worker in workers:
        worker.send(command, *arguments)
    first, *_ = [worker.receive() for worker in workers]
    return first


def stop(workers: list[Worker]) -> None:
    """End all workers: the closed connection tells them, who is busy for two more seconds a signal, then a kill."""
    for worker in workers:
        worker.connection.close()
    try:
        for seconds in (2, CLOSING):
            end = time.monotonic() + seconds
            for worker in workers:
                with suppress(subprocess.TimeoutExpired):
                    worker.process.wait(max(0, end - time.monotonic()))
                    continue
                if seconds == 2:
                    worker.process.send_signal(END)
                    worker.process.send_signal(signal.SIGCONT)  # or one that is stopped would not hear of it
    finally:  # if Ctrl-C was pressed once more, at once
        for worker in workers:
            worker.process.kill()
            worker.process.wait()
        workers.clear()


def serve(descriptor: int, memory: int) -> None:
    """The life of a worker: answer each (command, arguments) with (EnvError or traceback or None, result)."""
    connection, block = Connection(descriptor), None
    try:
        while True:
            command, arguments = connection.recv()
            error = reply = None
            try:
                if command == "open":
                    module, _, name = arguments[0].partition(":")
                    block = getattr(importlib.import_module(module), name)(memory, *arguments[1:])
                else:
                    reply = getattr(block, command)(*arguments)
            except Exception as raised:
                error = raised if isinstance(raised, EnvError) else traceback.format_exc()
            connection.send((error, reply))
    except (EOFError, OSError):
        pass  # the main process closed its end or died, even by SIGKILL
    finally:
        signal.signal(END, signal.SIG_IGN)
        if block is not None:
            with suppress(Exception):  # a simulator that has failed does once more
                block.close()
