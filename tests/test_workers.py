"""Worker processes of environments that are not PettingZoo's; what is common to all is tested in test_pz.py."""

import os

import numpy as np
import pytest

from cleanmarl.envs import WorkerError
from cleanmarl.envs.workers import Worker, call, new_memory, share, stop

FIELDS = {"number": ((4,), np.int64), "flag": ((4, 3), np.bool_), "real": ((4, 2), np.float32)}

BLOCK = """
import sys
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

    def modules(self):
        return [name for name in ("torch", "pettingzoo") if name in sys.modules]
"""


@pytest.fixture
def block(tmp_path, monkeypatch):
    (tmp_path / "counting_block.py").write_text(BLOCK)
    monkeypatch.syspath_prepend(tmp_path)
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
        with pytest.raises(WorkerError, match=rf"counters 0 \(pid {pid}\) failed:\nTraceback[^$]*no attribute 'sleep'"):
            call(workers, "sleep")
    finally:
        running = [worker.process for worker in workers]
        stop(workers)
    assert not workers and all(process.returncode == 0 for process in running)


def test_a_block_that_cannot_be_built(block):
    memory = new_memory()
    share(FIELDS, memory)
    workers = [Worker("counters", block, memory, FIELDS, 3, 1)]
    os.close(memory)
    with pytest.raises(WorkerError, match="no block has so few"):
        workers[0].receive()
    stop(workers)
