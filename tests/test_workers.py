"""Worker processes of environments that are not PettingZoo's; what is common to all is tested in test_pz.py."""

import os
import re
import signal
import sys
import time
from pathlib import Path

from cleanmarl.envs import WorkerError, workers
from cleanmarl.envs.workers import Worker, call, new_memory, share, stop

import numpy as np
import pytest
from toys import gone

FIELDS = {"number": ((4,), np.int64), "flag": ((4, 3), np.bool_), "real": ((4, 2), np.float32)}

BLOCK = """
import os
import signal
import sys
import threading
import time
from cleanmarl.envs.workers import share

class Counters:
    def __init__(self, memory, fields, first, last):
        if first > last:
            raise ValueError("no block has so few")
        self.arrays, self.rows = share(fields, memory), slice(first, last)

    def step(self, by=1):
        self.arrays["number"][self.rows] += by
        self.arrays["flag"][self.rows, 1] = True
        return self.arrays["number"][self.rows].tolist()

    def sleep(self, seconds):
        time.sleep(seconds)
        return seconds

    def die(self):
        if os.fork():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        os._exit(0)

    def leave(self):
        threading.Thread(target=time.sleep, args=(60,)).start()
        sys.exit(3)

    def modules(self):
        return [name for name in ("torch", "pettingzoo") if name in sys.modules]
"""


@pytest.fixture
def block(tmp_path, monkeypatch):
    (tmp_path / "counting_block.py").write_text(BLOCK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # a Path, which Python passes over
    return "counting_block:Counters"


def test_arrays_of_one_process_start_at_zero_and_do_not_overlap():
    arrays = share(FIELDS)
    for i, (key, (shape, dtype)) in enumerate(FIELDS.items()):
        assert arrays[key].shape == shape and arrays[key].dtype == dtype and not arrays[key].any()
        arrays[key][:] = i + 1
    assert [array.ravel()[0].item() for array in arrays.values()] == [1, True, 3.0]


def test_a_block_of_any_kind(block):
    memory = new_memory()
    arrays = share(FIELDS, memory)
    blocks = ((0, 1), (1, 4))
    workers = [Worker(f"counters {first} (pid {{pid}})", block, memory, FIELDS, first, last) for first, last in blocks]
    os.close(memory)
    try:
        assert [worker.receive() for worker in workers] == [None, None]
        assert call(workers, "step") == [1] and call(workers[1:], "step", 10) == [11, 11, 11]
        assert arrays["number"].tolist() == [1, 11, 11, 11] and arrays["flag"].tolist() == [[False, True, False]] * 4
        assert call(workers, "modules") == []  # they start in the time that NumPy and Gymnasium take
        pid = workers[0].process.pid
        with pytest.raises(WorkerError, match=rf"counters 0 \(pid {pid}\) failed:\nTraceback[^$]*no attribute 'jump'"):
            call(workers, "jump")
    finally:
        running = [worker.process for worker in workers]
        stop(workers)
    assert not workers and all(process.returncode == 0 for process in running)


def test_a_module_in_the_folder_of_now_takes_no_other_ones_place(block, tmp_path, monkeypatch):
    """The main process has imported its own before; so must the workers."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "signal.py").write_text("raise ImportError('a signal to buy')")
    monkeypatch.chdir(tmp_path / "here")
    memory = new_memory()
    share(FIELDS, memory)
    workers = [Worker("counters", block, memory, FIELDS, 0, 4)]
    os.close(memory)
    assert workers[0].receive() is None and call(workers, "step") == [1, 1, 1, 1]
    stop(workers)


def test_a_block_that_cannot_be_built(block):
    memory = new_memory()
    share(FIELDS, memory)
    workers = [Worker("counters", block, memory, FIELDS, 3, 1)]
    os.close(memory)
    with pytest.raises(WorkerError, match="no block has so few"):
        workers[0].receive()
    stop(workers)


@pytest.fixture
def pair(block, monkeypatch):
    """Two workers that have been built; half a second is a long silence."""
    memory = new_memory()
    share(FIELDS, memory)
    pair = [Worker(f"counters {i} (pid {{pid}})", block, memory, FIELDS, i, i + 1) for i in range(2)]
    os.close(memory)
    [worker.receive() for worker in pair]
    monkeypatch.setattr(workers, "SILENCE", 0.5)
    yield pair
    stop(pair)


@pytest.mark.skipif(not Path("/proc").exists(), reason="only Linux says that a process is stopped")
def test_a_stopped_worker_is_told_after_a_silence_and_ended(pair):
    first, second = (worker.process.pid for worker in pair)
    os.kill(second, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(WorkerError) as error:
        call(pair, "step")
    assert time.monotonic() - start >= 0.5
    assert str(error.value).startswith(f"counters 1 (pid {second}) is stopped and was silent for ")
    assert "\n" not in str(error.value)
    start = time.monotonic()
    stop(pair)
    assert gone(first) and gone(second) and time.monotonic() - start < 30


def test_a_worker_that_was_stopped_for_a_while_is_not_lost(pair):
    """As at Ctrl-Z and fg: it is running when somebody looks."""
    os.kill(pair[1].process.pid, signal.SIGSTOP)
    pair[1].send("step")
    os.kill(pair[1].process.pid, signal.SIGCONT)
    assert pair[1].receive() == [1]


def test_a_slow_worker_is_waited_for(pair, capfd):
    """However long it takes; a line tells which one it is."""
    assert call(pair[:1], "sleep", 3) == 3
    lines = capfd.readouterr().err.splitlines()
    line = rf"counters 0 \(pid {pair[0].process.pid}\) has been silent for \d+ seconds; waiting for it"
    assert len(lines) > 1 and all(re.fullmatch(line, said) for said in lines)


def test_a_worker_is_dead_although_what_it_has_forked_lives_on(pair, monkeypatch):
    """And holds the worker's end of the pipe, which does not close."""
    monkeypatch.setattr(workers, "look_after", lambda label, pid, seconds: seconds < 30 or pytest.fail("unnoticed"))
    pid = pair[1].process.pid
    pair[1].send("die")
    with pytest.raises(WorkerError, match=rf"^counters 1 \(pid {pid}\) died \(signal 9, Killed\)$"):
        pair[1].receive()
    os.killpg(pid, signal.SIGKILL)


def test_a_worker_that_ends_and_does_not_come_to_an_end(pair):
    """It called sys.exit, closed its pipe, and waits for a thread."""
    pair[1].send("leave")
    with pytest.raises(WorkerError, match=r"^counters 1 \(pid \d+\) died \(it closed its pipe\)$"):
        pair[1].receive()


def test_who_interrupts_the_end_leaves_no_worker(pair, monkeypatch):
    """Ctrl-C for the third time, while a worker that is busy has its two seconds."""
    pair[0].send("sleep", 60)
    pids, wait = [worker.process.pid for worker in pair], pair[0].process.wait

    def interrupted(timeout=None):
        monkeypatch.setattr(pair[0].process, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(pair[0].process, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stop(pair)
    assert not pair and all(map(gone, pids))
