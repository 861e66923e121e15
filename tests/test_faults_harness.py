"""The harness of faults: some real kills, and that it sees every kind of fault when there is one."""

import csv
import fcntl
import os
import signal
import sys
from pathlib import Path

from cleanmarl import ppo
from cleanmarl.checkpoint import load_checkpoint, write_checkpoint

import pytest
import torch

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmark"
sys.path.insert(0, str(BENCHMARK))
import faults  # noqa: E402

sys.path.remove(str(BENCHMARK))

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux's /proc")
SHORT = {"total_timesteps": 64, "num_envs": 2, "num_steps": 16, "num_minibatches": 2, "eval_episodes": 0}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A complete run, at step 64."""
    return ppo.main(ppo.Args(runs_dir=str(tmp_path / "runs"), **SHORT))


def test_all_scripts_are_found_and_get_only_flags_that_they_have():
    scripts = faults.find_scripts()
    assert {"ppo", "maddpg_lstm_multienvs", "impala_ray"} <= set(scripts) and len(scripts) >= 39
    assert not {"enjoy", "run", "cli"} & set(scripts)
    flags = faults.tiny_flags("ppo")
    assert flags["--num-envs"] == 4 and "--num-actors" not in flags and "--num-actors" in faults.tiny_flags("impala")
    assert faults.with_workers("mpe/x") == "pz/mpe2/x?num_workers=2" and faults.with_workers("CartPole-v1") is None


def test_a_handful_of_kills(tmp_path, monkeypatch, capsys):
    """Of processes as users start them; what is in the table is not done again."""
    monkeypatch.setattr(faults, "WINDOW", {"start": 3, "training": 2, "end": 2})
    args = faults.Args(tmp_path / "kills", kills=5, scripts=["ippo"])
    assert faults.kill_all(args) == 0, capsys.readouterr().out
    with (tmp_path / "kills.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5 and {row["script"] for row in rows} == {"ippo"}
    assert all(row[fault] == "0" for row in rows for fault in faults.FAULTS)
    # at moments of their own (the clock is looked at every 20 ms: two may be equal)
    assert len({row["seconds"] for row in rows}) > 2 and any(int(row["step_after"] or 0) > 0 for row in rows)
    monkeypatch.setattr(faults.Victim, "kill", lambda victim: pytest.fail("it was done before"))
    assert faults.kill_all(args) == 0
    assert "| `ippo` | 5 |" in (tmp_path / "kills.md").read_text()


FAKE = """
import os, signal, subprocess, sys, time
what, folder, other = sys.argv[1:]
path = os.path.join(folder, "checkpoint.pt")
if what == "goes back":
    os.replace(other, path)
if what == "deletes":
    os.remove(path)
if what == "cuts":
    os.truncate(path, 1000)
if what == "leaves a process":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
if what == "leaves shared memory":
    shared = open(other, "w")
if what == "leaves a file":
    open(path[:-2] + "tmp", "w").close()
if what == "does not end":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if what == "boasts":
    print("stopped at step 1,000; continue with --resume ...")
if what == "refuses":
    sys.exit(1)
if what == "raises":
    signal.signal(signal.SIGTERM, lambda *_: 1 / 0)
print("run folder:", folder, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    "what, fault",
    [
        ("nothing", None),
        ("goes back", "lost"),
        ("deletes", "lost"),
        ("boasts", "lost"),
        ("refuses", "lost"),
        ("cuts", "bad"),
        ("leaves a process", "processes"),
        ("leaves shared memory", "shared"),
        ("leaves a file", "untidy"),
        ("does not end", "untidy"),
        ("raises", "untidy"),
    ],
)
def test_every_fault_is_seen(what, fault, folder, tmp_path, monkeypatch):
    """A run that only pretends, and spoils something before it is killed."""
    (tmp_path / "fake.py").write_text(FAKE)
    other = Path("/dev/shm", tmp_path.name + str(os.getpid())) if "shared" in what else tmp_path / "old.pt"
    if what == "goes back":
        write_checkpoint(load_checkpoint(folder) | {"step": 32}, other)
    monkeypatch.setattr(faults, "MOMENTS", {"training": 1})
    monkeypatch.setattr(faults, "SIGNALS", {"SIGTERM": 1})
    monkeypatch.setattr(faults, "TARGETS", {"group": 1})
    monkeypatch.setattr(faults, "WINDOW", {"training": 0.3})
    # short where there is nothing to wait for
    monkeypatch.setattr(faults, "PATIENCE", 1 if what == "does not end" else 60)
    monkeypatch.setattr(faults, "SECONDS_TO_VANISH", 0.5 if what in ("does not end", "leaves a process") else 60)
    victim = faults.Victim("ppo", 0, 1, tmp_path)
    victim.start = lambda steps, fork: faults.Started([tmp_path / "fake.py", what, folder, other], tmp_path, fork)
    try:
        row = victim.kill()
    finally:
        if "shared" in what:
            other.unlink()
    seen = {name for name in faults.FAULTS if row[name]}
    assert fault in seen if fault else not seen, row
    assert row["step_before"] == 64 and bool(row["note"]) == bool(seen)


def test_numbers_that_are_not_finite_are_seen_wherever_they_are(folder):
    checkpoint = load_checkpoint(folder)
    assert faults.look(folder.parent) == {"bad": [], "tmp": [], "locked": [], "step": {folder: 64}}
    for part in ("modules", "playing"):
        write_checkpoint(checkpoint | {part: {"a": [{"b": torch.tensor([0.0, torch.nan])}]}}, folder / "best.pt")
        assert faults.look(folder.parent)["bad"] == [f"best.pt.{int(part == 'playing')}.a.0.b is not finite"]


def test_a_lock_that_is_held_is_seen(folder):
    with (folder / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert faults.look(folder.parent)["locked"] == [folder]
    assert not faults.is_locked(folder)


def test_a_script_that_does_not_run_here_is_left_out_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "MOMENTS", {"end": 1})
    monkeypatch.setattr(faults, "tiny_flags", lambda script: {"--env-id": "CartPol-v1", "--num-envs": 1})
    assert faults.kill_all(faults.Args(tmp_path / "kills", kills=1, scripts=["ppo"])) == 1
    assert "`ppo` was left out: ppo: unknown environment" in (tmp_path / "kills.md").read_text()


def test_only_what_it_started_is_ended(tmp_path):
    with faults.Started(["-c", "import time; time.sleep(60)"], tmp_path) as one:
        other = faults.Started(["-c", "import time; time.sleep(60)"], tmp_path)
        assert faults.wait_for(lambda: faults.marked(other.mark) == [other.process.pid], 60)
        assert len(other.end(patience=0)) == 1 and other.process.returncode == -signal.SIGKILL
        assert one.process.poll() is None and faults.marked(one.mark) == [one.process.pid]
    assert one.process.returncode == -signal.SIGKILL


def test_a_sample_counts_what_a_process_holds(tmp_path):
    script = "import sys, threading, time; x = bytearray(2 * 10**7); files = [open('/dev/null') for _ in range(7)]; "
    script += "threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); print('step 1,000/9'); "
    with faults.Started(["-c", f"{script}sys.stdout.flush(); time.sleep(60)"], tmp_path) as started:
        assert faults.wait_for(lambda: "step" in started.out.read_text(), 60)
        row = faults.sample(started)
    assert (row["processes"], row["threads"], row["descriptors"], row["step"]) == (1, 2, 10, 1000)
    assert 20 < row["memory"] < 60 and row["shared"] == 0


def test_what_grows_is_not_flat():
    samples = [{"seconds": 10.0 * i, "processes": 1, "threads": 4, "shared": 0.0} for i in range(180)]
    quiet = [row | {"memory": 300 + i % 2, "descriptors": 5 + (i % 10 == 0)} for i, row in enumerate(samples)]
    assert all(flat for *_, flat in faults.verdict(quiet).values())
    leaking = [row | {"memory": row["memory"] + i / 15} for i, row in enumerate(quiet)]
    assert [name for name, (*_, flat) in faults.verdict(leaking).items() if not flat] == ["memory"]
    leaking = [row | {"descriptors": 5 + i // 60} for i, row in enumerate(quiet)]
    assert [name for name, (*_, flat) in faults.verdict(leaking).items() if not flat] == ["descriptors"]
    begins = [row | {"memory": row["memory"] - max(0, 80 - i)} for i, row in enumerate(quiet)]  # until a buffer is full
    assert faults.verdict(begins)["memory"][-1]
