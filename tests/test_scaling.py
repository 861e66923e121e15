"""benchmark/scaling.py on real runs, and what redraw.py makes of its tables."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from toys import wait_for

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmark"
sys.path.insert(0, str(BENCHMARK))

import redraw  # noqa: E402
import scaling  # noqa: E402

LINUX = pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")


@pytest.fixture
def data(tmp_path):
    return tmp_path / "data"  # which is not there yet


def test_more_actors_are_measured_and_drawn(data, monkeypatch):
    monkeypatch.setattr(scaling, "NUM_ACTORS", (0, 1))
    scaling.main(scaling.Args("actors", steps=9_600, repeats=1, out=data))
    runs = pd.read_csv(data / "impala_speed.csv")
    assert runs[["actors", "seed"]].to_numpy().tolist() == [[0, 1], [1, 1]]
    faster = runs.assign(seed=2, steps_per_second=runs.steps_per_second + 10)  # as if of another repeat
    runs = pd.concat([runs, faster])
    runs.to_csv(data / "impala_speed.csv", index=False)
    alone, apart = (runs[runs.actors == number] for number in (0, 1))
    assert (alone[["learner_waits", "mean_lag", "largest_lag"]] == 0).all(axis=None)
    assert (runs.steps_per_second > 100).all() and apart.learner_waits.between(0, 1).all()
    assert (apart.mean_lag > 0).all() and (apart.largest_lag >= apart.mean_lag).all()  # how far ahead, the load decides

    redraw.impala_speed(data.parent / "impala_speed")
    *_, first, second = (data.parent / "impala_speed.md").read_text().splitlines()
    assert " of 9,600 steps," in (data.parent / "impala_speed.md").read_text()
    low, high = sorted(alone.steps_per_second)
    assert first.startswith(f"| 0 | {alone.steps_per_second.median():,.0f} ({low:,}-{high:,}) | 0% (0%-0%) | 0.0 ")
    assert second.startswith("| 1 | ") and "<svg" in (data.parent / "impala_speed.svg").read_text()


def test_a_run_without_a_pace_is_one_line(tmp_path):
    line = [sys.executable, "benchmark/scaling.py", "actors", "--steps", "400", "--repeats", "1", "--out", tmp_path]
    done = subprocess.run(line, cwd=BENCHMARK.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.endswith("steps are too few to measure: raise --steps\n")
    assert done.stderr.count("\n") == 1


@LINUX
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_who_ends_it_ends_the_run_that_it_measures(signum, tmp_path):
    line = [sys.executable, "benchmark/scaling.py", "agents", "--steps", "400000000", "--out", tmp_path / "out"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # where the run has its folder
    process = subprocess.Popen(line, cwd=BENCHMARK.parent, env=env)
    try:
        wait_for(lambda: list(tmp_path.glob("*/mpe*/events*")))
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signum)
        assert process.wait(60) == 128 + signum and children
        wait_for(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("script, flag", [("scaling", "repeats"), ("matrix_games", "seeds"), ("qtran_matrix", "seeds")])
def test_a_measurement_of_nothing_is_one_line(script, flag, tmp_path):
    line = [sys.executable, BENCHMARK / f"{script}.py", *["actors"] * (script == "scaling"), "--out", tmp_path / "out"]
    done = subprocess.run([*line, f"--{flag}", "0"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (2, f"{script}: --{flag} must be greater than 0, not 0\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "script, flag", [("scaling", "out"), ("matrix_games", "runs-dir"), ("qtran_matrix", "runs-dir")]
)
def test_a_file_in_the_place_of_a_folder_is_one_line(script, flag, tmp_path):
    (tmp_path / "file").touch()
    given = {"out": tmp_path / "out", flag: tmp_path / "file"}
    flags = [word for name, path in given.items() for word in (f"--{name}", path)]
    line = [sys.executable, BENCHMARK / f"{script}.py", *["agents"] * (script == "scaling"), *flags]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith(f"{script}: [Errno ") and done.stderr.count("\n") == 1


def test_the_pace_of_a_run_is_that_of_its_last_three_quarters(tmp_path):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    seconds = 5 + np.array([0.0, 1, 2, 4, 8])  # five to begin with, then slower and slower
    waited = np.array([5.0, 5, 5, 6, 7])
    writer = EventFileWriter(str(tmp_path))
    for i, lag in enumerate([9, 0, 1, 2, 1]):
        step = 100 * (i + 1)
        values = {"train/policy_lag": lag, "time/learner_wait": waited[i] / seconds[i], "time/SPS": step / seconds[i]}
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        writer.add_event(Event(step=step, summary=summary, wall_time=seconds[i]))
    writer.close()
    expected = {"steps_per_second": 43, "learner_waits": round(2 / 7, 3), "mean_lag": 1.0, "largest_lag": 2}
    assert scaling.pace(tmp_path) == expected  # from step 200 on, an eighth second to the fifteenth


def test_the_start_of_a_run_is_not_in_the_time_of_a_step():
    work = "import time; end = time.process_time() + 1 + {steps} * 1e-4\nwhile time.process_time() < end: pass"
    command = shlex.join([sys.executable, "-c", work])
    assert 90 < scaling.microseconds(command, steps=20_000, seed=1) < 110


def test_more_agents_are_measured_and_drawn(data, monkeypatch):
    monkeypatch.setattr(scaling, "NUM_AGENTS", (2,))
    scaling.main(scaling.Args("agents", steps=51_200, repeats=1, out=data))
    runs = pd.read_csv(data / "mappo_agents.csv")
    pd.concat([runs, runs.assign(agents=6)]).to_csv(data / "mappo_agents.csv", index=False)  # as if of six agents, too
    runs = pd.read_csv(data / "mappo_agents.csv").set_index(["script", "agents"]).microseconds
    assert list(runs.index) == [("ippo", 2), ("mappo", 2), ("ippo", 6), ("mappo", 6)]
    assert runs.between(0, 5_000, inclusive="neither").all()  # far more work than start-up varies by

    redraw.mappo_agents(data.parent / "mappo_agents")
    *_, first, second = (data.parent / "mappo_agents.md").read_text().splitlines()
    assert first == f"| 2 | {runs['ippo', 2]:,.0f} | {runs['mappo', 2]:,.0f} |" and second.startswith("| 6 | ")
    assert "<svg" in (data.parent / "mappo_agents.svg").read_text()
