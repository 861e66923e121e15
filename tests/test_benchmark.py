"""The benchmark tools on real processes: the runner, the speed harness and what runs its peers."""

import importlib.util
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from cleanmarl import ppo

import numpy as np
import pytest
import tyro
from optional import need, needs

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmark"
LINUX = pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
sys.path.insert(0, str(BENCHMARK))
import hand_written  # noqa: E402
import report  # noqa: E402
import speed  # noqa: E402

sys.path.remove(str(BENCHMARK))  # its run.py must not stand in for another module of that name


def cli(script: str, *argv, cwd: Path, **kwargs) -> subprocess.CompletedProcess:
    argv = [sys.executable, str(BENCHMARK / script), *map(str, argv)]
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=120, **kwargs)


# run.py

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path

arg = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = Path(arg["--resume"]) if "--resume" in arg else (
    Path(arg["--runs-dir"]) / f"{arg['--env-id'].replace('/', '-')}__toy__{arg['--seed']}__{time.time_ns()}")
print(f"run folder: {folder}" + (" (resumed at step 1,000)" if "--resume" in arg else ""), flush=True)
folder.mkdir(parents=True, exist_ok=True)
if "--resume" not in arg:
    (folder / "toy.py").write_text(Path(__file__).read_text())
    meta = {"script": "toy", "path": str(Path(__file__).resolve()), "args": arg}
    meta["threads"] = os.environ["OMP_NUM_THREADS"]
    (folder / "args.json").write_text(json.dumps(meta))
args = json.loads((folder / "args.json").read_text())["args"]

def stop(*_):
    (folder / "checkpoint.pt").write_text("saved")
    sys.exit(143)

signal.signal(signal.SIGTERM, stop)
if Path("crash").exists() and args["--seed"] == "2":
    raise RuntimeError("the environment died")
(folder / "started").touch()
if Path("slow").exists():
    time.sleep(float(Path("slow").read_text() or 60))
(folder / "checkpoint.pt").write_text("saved")
(folder / "done.json").write_text("{}")
if Path("late").exists():
    os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.fixture
def toy(tmp_path):
    (tmp_path / "toy.py").write_text(SCRIPT)
    return tmp_path


def run_cli(toy: Path, *flags, num_seeds=2, env_ids=("a/b",)) -> subprocess.CompletedProcess:
    argv = ["--command", "python toy.py", "--env-ids", *env_ids, "--num-seeds", num_seeds, "--workers", 2]
    return cli("run.py", *argv, *(["--", *flags] if flags else []), cwd=toy)


GRID = ["--command", "python toy.py", "--env-ids", "e"]


def manifest(toy: Path) -> dict:
    return json.loads((toy / "runs" / "manifest.json").read_text())


def folders(toy: Path) -> list[Path]:
    return sorted(path.parent for path in (toy / "runs").glob("*/args.json"))


def test_runner_runs_every_trial_once(toy):
    result = run_cli(toy, "--lr", "0.1", env_ids=("a/b", "c"))
    assert result.returncode == 0, result.stderr
    assert "4 of 4 trials finished" in result.stdout and result.stdout.count(": finished after") == 4
    metas = [json.loads((folder / "args.json").read_text()) for folder in folders(toy)]
    assert {(m["args"]["--env-id"], m["args"]["--seed"]) for m in metas} == {(e, s) for e in ("a/b", "c") for s in "12"}
    assert all(m["args"]["--lr"] == "0.1" and m["threads"] == "1" for m in metas)
    entry = manifest(toy)["python toy.py --env-id a/b --seed 2 --lr 0.1"]
    assert (entry["command"], entry["env_id"], entry["seed"]) == ("python toy.py", "a/b", 2)
    assert (entry["flags"], entry["status"], entry["exit_status"]) == (["--lr", "0.1"], "finished", 0)
    assert Path(toy / entry["run_folder"], "done.json").exists() and entry["start"] <= entry["end"]
    assert {"git_commit", "machine"} <= set(entry) and entry["machine"]["cores"] >= 1
    assert "run folder: " in (toy / entry["log"]).read_text()

    (attempt,) = entry["tries"]
    assert attempt["exit_status"] == 0 and attempt["wall_seconds"] > 0 and 0 < attempt["cpu_seconds"] < 60
    assert entry["wall_seconds"] == attempt["wall_seconds"] and entry["versions"]["torch"]
    assert "4 of 4 done, 0 running, 0 failed" in result.stdout

    again = run_cli(toy, "--lr", "0.1", env_ids=("a/b", "c"))
    assert again.returncode == 0 and again.stdout.count("skipped") == 4 and len(folders(toy)) == 4
    other_flags = run_cli(toy, "--lr", "0.2")
    assert other_flags.returncode == 0 and "skipped" not in other_flags.stdout and len(folders(toy)) == 6


def test_a_trial_is_the_same_however_its_flags_are_spelled(toy):
    assert run_cli(toy, "--learning-rate", "-1e-3", "--size", "3").returncode == 0
    for flags in (["--learning_rate=-1e-3", "--size", "3"], ["--learning-rate", "-1e-3", "--size=3"]):
        again = run_cli(toy, *flags)
        assert again.returncode == 0 and again.stdout.count("finished before, skipped") == 2, again.stdout


def test_a_trial_is_the_same_in_whatever_order_its_flags_are(toy):
    assert run_cli(toy, "--size", "3", "4", "--anneal", "--lr", "-1e-3").returncode == 0
    again = run_cli(toy, "--anneal", "--lr=-1e-3", "--size", "3", "4")
    assert again.returncode == 0 and again.stdout.count("finished before, skipped") == 2, again.stdout
    others = ["--size", "4", "3", "--anneal"], ["--size", "3", "--size", "4"], ["--size", "4", "--size", "3"]
    others += ["--anneal", "--no-anneal"], ["--no-anneal", "--anneal"]  # the last one counts
    for flags in others:
        other = run_cli(toy, *flags)
        assert other.returncode == 0 and "skipped" not in other.stdout, other.stdout


@pytest.mark.parametrize("left", ["", '{"python toy.py', "[]", '{"a": 3}'])
def test_a_manifest_that_a_crash_left_damaged_is_one_line(left, toy):
    assert run_cli(toy).returncode == 0
    (toy / "runs" / "manifest.json").write_text(left)
    result = run_cli(toy, num_seeds=3)
    line = r"run: runs/manifest.json is damaged \(.*\); move it away, finished trials are skipped all the same\n"
    assert result.returncode == 1 and re.fullmatch(line, result.stderr), result.stderr
    (toy / "runs" / "manifest.json").unlink()
    result = run_cli(toy, num_seeds=3)
    assert result.returncode == 0 and result.stdout.count("skipped") == 2 and len(folders(toy)) == 3


def test_the_line_of_progress_is_no_wider_than_the_terminal(toy):
    (toy / "slow").write_text("1")
    ours, theirs = pty.openpty()
    argv = [sys.executable, BENCHMARK / "run.py", *GRID, "--num-seeds", "1"]
    with subprocess.Popen(argv, cwd=toy, stdout=theirs, env={**os.environ, "COLUMNS": "20"}) as runner:
        os.close(theirs)
        said = b""
        with suppress(OSError):  # what Linux says at the end
            while part := os.read(ours, 4096):
                said += part
    os.close(ours)
    assert runner.returncode == 0
    lines = [part for part in said.decode().split("\r\x1b[K") if part and "\n" not in part]
    assert max(map(len, lines)) == 19, lines


def test_trials_go_on_when_nobody_reads_what_is_said_of_them(toy):
    argv = [sys.executable, BENCHMARK / "run.py", *GRID, "--num-seeds", "2"]
    runner = subprocess.Popen(argv, cwd=toy, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    runner.stdout.close()
    assert runner.stderr.read() == "" and runner.wait(60) == 0 and len(folders(toy)) == 2
    runner.stderr.close()


def test_a_grid_is_known_from_another_folder_and_after_it_has_moved(toy):
    (toy / "slow").touch()
    runner = subprocess.Popen([sys.executable, BENCHMARK / "run.py", *GRID, "--num-seeds", "1"], cwd=toy)
    wait_for(lambda: len(list((toy / "runs").glob("*/started"))) == 1)
    runner.terminate()
    assert runner.wait(timeout=30) == 128 + signal.SIGTERM
    (toy / "slow").unlink()
    (folder,) = folders(toy)
    (toy / "runs").rename(toy / "moved")
    (toy / "elsewhere").mkdir()
    (toy / "elsewhere" / "toy.py").write_text(SCRIPT)
    for cwd, runs_dir in [(toy, "moved"), (toy / "elsewhere", "../moved"), (toy / "elsewhere", toy / "moved")]:
        result = cli("run.py", *GRID, "--num-seeds", "1", "--runs-dir", runs_dir, cwd=cwd)
        assert result.returncode == 0 and f" {runs_dir}/{folder.name}" in result.stdout, result.stdout
        assert [done.parent.name for done in (toy / "moved").glob("*/done.json")] == [folder.name]
        assert ("finished before, skipped" in result.stdout) == (runs_dir != "moved")  # at first it was resumed


def test_the_time_left_is_by_what_this_call_has_done(tmp_path):
    """What a resumed trial had done before took none of this call's time."""
    spec = importlib.util.spec_from_file_location("runner", BENCHMARK / "run.py")
    sys.path.insert(0, str(BENCHMARK))
    spec.loader.exec_module(runner := importlib.util.module_from_spec(spec))
    sys.path.remove(str(BENCHMARK))
    trial = runner.Trial("python toy.py", "e", 1, [], tmp_path)
    trial.log.parent.mkdir()
    trial.log.write_text("step 90/100  90%\n")
    progress = runner.Progress([trial])
    start = datetime.now().astimezone().isoformat(timespec="seconds")
    (tmp_path / "manifest.json").write_text(json.dumps({trial.key: {"status": "running", "start": start}}))
    assert progress.line() == "0 of 1 done, 1 running, 0 failed"  # nothing done yet: nobody knows
    trial.log.write_text("step 91/100  91%\n")
    progress.begin -= 60
    assert re.fullmatch(r"0 of 1 done, 1 running, 0 failed, ETA 0:09:\d\d", progress.line())


def test_a_run_folder_is_found_in_the_midst_of_a_line_and_not_where_one_is_spoken_of(toy):
    script = SCRIPT.replace('print(f"run folder', 'print("loading ", end="")\nprint(f"run folder')
    (toy / "toy.py").write_text(f"{script}\nprint('toy: x is not a run folder: it has no readable args.json')\n")
    for words in ("1 of 1 trials finished", "finished before, skipped"):
        result = run_cli(toy, num_seeds=1)
        assert result.returncode == 0 and words in result.stdout and len(folders(toy)) == 1, result.stdout


def test_runner_says_which_trials_another_version_of_the_script_finished(toy):
    run_cli(toy, num_seeds=1)
    (first,), script = folders(toy), toy / "toy.py"
    script.write_text(SCRIPT + "# another learning rate\n")
    again = run_cli(toy, num_seeds=2)
    diff = f"diff {first.relative_to(toy)}/toy.py {script}"
    line = f"a/b seed 1: finished before by another version of the script ({diff}); skipped\n"
    assert again.returncode == 0 and line in again.stdout and len(folders(toy)) == 2
    third = run_cli(toy, num_seeds=2)
    assert third.stdout.count("by another version") == 1 and "a/b seed 2: finished before, skipped" in third.stdout
    script.unlink()  # what is not there cannot be compared
    assert run_cli(toy, num_seeds=2).stdout.count("finished before, skipped") == 2


def test_runner_tries_a_trial_that_fails_twice_and_later_repeats_only_that_one(toy):
    (toy / "crash").touch()
    result = run_cli(toy, num_seeds=3)
    assert result.returncode == 1
    assert "seed 2: failed" in result.stdout and "the environment died" in result.stdout
    entries = manifest(toy)
    assert {e["seed"]: e["status"] for e in entries.values()} == {1: "finished", 2: "failed", 3: "finished"}
    failed = entries["python toy.py --env-id a/b --seed 2"]
    assert failed["exit_status"] == 1 and [t["exit_status"] for t in failed["tries"]] == [1, 1]
    (toy / "crash").unlink()
    again = run_cli(toy, num_seeds=3)
    assert again.returncode == 0 and again.stdout.count("skipped") == 2
    assert len(folders(toy)) == 5  # without a checkpoint it started anew, and the broken folders stay
    entry = manifest(toy)["python toy.py --env-id a/b --seed 2"]
    assert [t["exit_status"] for t in entry["tries"]] == [1, 1, 0] and entry["status"] == "finished"
    assert entry["cpu_seconds"] == pytest.approx(sum(t["cpu_seconds"] for t in entry["tries"]), abs=0.01)


def test_a_trial_that_crashes_after_its_end_is_not_run_again(toy):
    """As a library may that is taken down: the run is complete, and a second one would count its seed twice."""
    (toy / "late").touch()
    result = run_cli(toy, num_seeds=1)
    assert result.returncode == 0 and "1 of 1 trials finished" in result.stdout and len(folders(toy)) == 1
    (entry,) = manifest(toy).values()
    assert (entry["status"], entry["exit_status"]) == ("finished", -signal.SIGSEGV)


def test_a_trial_that_a_signal_ended_is_said_to_be(toy):
    """By the kernel where memory is short: its output says nothing of it."""
    (toy / "toy.py").write_text("import os\nos.kill(os.getpid(), 9)")
    result = run_cli(toy, num_seeds=1)
    assert result.returncode == 1 and "    killed by signal 9; the end of runs/logs/" in result.stdout


def test_a_trial_is_found_again_without_its_log(toy):
    assert run_cli(toy, num_seeds=1).returncode == 0
    shutil.rmtree(toy / "runs" / "logs")
    again = run_cli(toy, num_seeds=1)
    assert again.returncode == 0 and "finished before, skipped" in again.stdout and len(folders(toy)) == 1


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_runner_passes_a_signal_on_and_resumes(toy, signum):
    (toy / "slow").touch()
    argv = [sys.executable, BENCHMARK / "run.py", "--command", "python toy.py", "--env-ids", "e", "--num-seeds", "3"]
    runner = subprocess.Popen([*argv, "--workers", "2"], cwd=toy, stdout=subprocess.PIPE, text=True)
    wait_for(lambda: len(list((toy / "runs").glob("*/started"))) == 2)
    second = subprocess.Popen([*argv[:-1], "1"], cwd=toy, stdout=subprocess.PIPE, text=True)  # waits for seed 1
    assert "another program or trial runs it" in second.stdout.readline() and len(folders(toy)) == 2
    second.terminate()
    assert second.wait(timeout=30) == 128 + signal.SIGTERM
    os.kill(runner.pid, signum)
    output, _ = runner.communicate(timeout=30)
    assert runner.returncode == 128 + signum, output
    entries = manifest(toy)
    assert sorted((e["seed"], e["status"], e["exit_status"]) for e in entries.values()) == [
        (1, "interrupted", 143),
        (2, "interrupted", 143),
    ]
    interrupted = folders(toy)
    assert all((folder / "checkpoint.pt").exists() for folder in interrupted)  # each had the time to save

    (toy / "slow").unlink()
    result = cli("run.py", "--command", "python toy.py", "--env-ids", "e", "--num-seeds", "3", cwd=toy)
    assert result.returncode == 0, result.stdout
    assert len(folders(toy)) == 3 and all((folder / "done.json").exists() for folder in interrupted)
    assert {e["status"] for e in manifest(toy).values()} == {"finished"}


def test_a_third_signal_ends_a_trial_that_hangs(toy):
    """Such a one and its runner went on for ever, and had to be found and killed by hand."""
    (toy / "slow").touch()
    (toy / "toy.py").write_text(SCRIPT.replace("signal.SIGTERM, stop", "signal.SIGTERM, signal.SIG_IGN"))
    argv = [sys.executable, BENCHMARK / "run.py", *GRID, "--num-seeds", "1"]
    runner = subprocess.Popen(argv, cwd=toy, stdout=subprocess.PIPE, text=True)
    wait_for(lambda: len(list((toy / "runs").glob("*/started"))) == 1)
    for _ in range(3):
        assert runner.poll() is None
        runner.terminate()
        time.sleep(0.3)
    output, _ = runner.communicate(timeout=30)
    assert runner.returncode == 128 + signal.SIGTERM, output
    (entry,) = manifest(toy).values()
    assert (entry["status"], entry["exit_status"]) == ("interrupted", -signal.SIGKILL)


def test_a_trial_whose_runner_was_killed_is_waited_for(toy):
    (toy / "slow").write_text("3")
    runner = subprocess.Popen([sys.executable, BENCHMARK / "run.py", *GRID, "--num-seeds", "1"], cwd=toy)
    wait_for(lambda: len(list((toy / "runs").glob("*/started"))) == 1)
    runner.kill()
    runner.wait()
    result = cli("run.py", *GRID, "--num-seeds", "1", cwd=toy)
    assert result.returncode == 0 and len(folders(toy)) == 1, result.stdout  # its process went on and finished
    assert "finished after" not in result.stdout and ("finished, runs" in result.stdout or "skipped" in result.stdout)
    ((key, entry),) = manifest(toy).items()
    assert (entry["status"], toy / entry["run_folder"]) == ("finished", folders(toy)[0])
    assert entry["tries"] == [] and not {"end", "wall_seconds"} & set(entry)  # of which nobody knows

    for backend in ("local", "slurm"):  # the same if it finished before the command was run again
        interrupted = {**entry, "status": "interrupted", "run_folder": "None", "exit_status": 143, "wall_seconds": 1.0}
        (toy / "runs" / "manifest.json").write_text(json.dumps({key: interrupted}))
        result = cli("run.py", *GRID, "--num-seeds", "1", "--backend", backend, cwd=toy)
        assert result.returncode == 0 and "finished" in result.stdout and manifest(toy) == {key: entry}


@LINUX
def test_seconds_of_a_trial_that_was_killed_with_its_runner_are_not_known(toy):
    """Those of its later tries alone stood for all."""
    argv = [sys.executable, BENCHMARK / "run.py", *GRID, "--num-seeds", "1"]
    (toy / "slow").touch()
    runner = subprocess.Popen(argv, cwd=toy)
    wait_for(lambda: len(list((toy / "runs").glob("*/started"))) == 1)
    threads = Path(f"/proc/{runner.pid}/task").glob("*/children")
    (trial,) = (pid for thread in threads for pid in thread.read_text().split())
    runner.kill()
    runner.wait()
    os.kill(int(trial), signal.SIGKILL)
    runner = subprocess.Popen(argv, cwd=toy, stdout=subprocess.PIPE, text=True)  # a second try, which is stopped
    wait_for(lambda: len(list((toy / "runs").glob("*/started"))) == 2)
    runner.terminate()
    output, _ = runner.communicate(timeout=30)
    assert "e seed 1: interrupted, runs" in output
    (toy / "slow").unlink()
    result = cli("run.py", *GRID, "--num-seeds", "1", cwd=toy)
    assert result.returncode == 0 and "e seed 1: finished, runs" in result.stdout, result.stdout
    (entry,) = manifest(toy).values()
    assert (entry["status"], len(entry["tries"])) == ("finished", 2)
    assert "end" in entry and not {"wall_seconds", "cpu_seconds"} & set(entry)


def test_a_trial_that_ends_before_its_folder_is_there_has_none(toy):
    (toy / "toy.py").write_text("import time\ntime.sleep(60)")
    argv = [sys.executable, BENCHMARK / "run.py", *GRID, "--num-seeds", "1"]
    runner = subprocess.Popen(argv, cwd=toy, stdout=subprocess.PIPE, text=True)
    wait_for(lambda: (toy / "runs" / "manifest.json").exists())
    runner.terminate()
    output, _ = runner.communicate(timeout=30)
    assert re.search(r"e seed 1: interrupted after \S+, no run folder yet \| ", output), output
    (entry,) = manifest(toy).values()
    assert entry["run_folder"] is None
    assert cli("report.py", "runs", "--out", "out/x", cwd=toy).returncode == 2  # and no traceback


def test_slurm_script_runs_one_trial_for_each_index(toy):
    assert run_cli(toy, "--lr", "0.1", num_seeds=1).returncode == 0
    argv = ["--command", "python toy.py", "--env-ids", "a/b", "c d", "a/b", "--num-seeds", "2", "--workers", "3"]
    result = cli("run.py", *argv, "--backend", "slurm", "--", "--lr", "0.1", cwd=toy, env=without_slurm(toy))
    assert result.returncode == 0 and "sbatch runs/grid.sbatch" in result.stdout, result.stderr
    script = toy / "runs" / "grid.sbatch"
    assert "#SBATCH --array=1,2,3%3\n" in script.read_text()  # the first is finished
    assert f'--output="{toy}/runs/logs/slurm-%A_%a.txt"' in script.read_text()
    for index in ("1", "2", "3"):
        subprocess.run(["bash", script], env={**os.environ, "SLURM_ARRAY_TASK_ID": index}, check=True, cwd="/")
    entries = manifest(toy).values()
    assert {(e["env_id"], e["seed"]) for e in entries} == {(e, s) for e in ("a/b", "c d") for s in (1, 2)}
    assert {e["status"] for e in entries} == {"finished"} and len(folders(toy)) == 4

    (toy / "bin").mkdir()
    (toy / "bin" / "sbatch").write_text("#!/bin/sh\ntouch submitted\n")
    (toy / "bin" / "sbatch").chmod(0o755)
    path = f"{toy / 'bin'}{os.pathsep}{os.environ['PATH']}"
    argv[-3] = "3"  # one more seed of each
    result = cli("run.py", *argv, "--backend", "slurm", "--", "--lr", "0.1", cwd=toy, env={**os.environ, "PATH": path})
    assert result.returncode == 0 and (toy / "submitted").exists() and "--array=2,5%3" in script.read_text()


def without_slurm(toy: Path) -> dict:
    """An environment whose PATH has no sbatch."""
    folders = [f for f in os.environ["PATH"].split(os.pathsep) if not Path(f, "sbatch").exists()]
    return {**os.environ, "PATH": os.pathsep.join(folders)}


def wait_for(condition, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.05)


def test_a_grid_without_git_and_in_a_folder_with_the_name_of_a_placeholder(toy):
    argv = ["--command", "python toy.py", "--env-ids", "e", "--num-seeds", "1", "--runs-dir", "INDEX of 5%j runs"]
    result = cli("run.py", *argv, "--backend", "slurm", cwd=toy, env={**os.environ, "PATH": ""})
    assert result.returncode == 0, result.stderr
    script = toy / "INDEX of 5%j runs" / "grid.sbatch"
    assert "`sbatch 'INDEX of 5%j runs/grid.sbatch'`" in result.stdout  # as one would paste it
    assert "INDEX of 5%%j runs/logs/slurm-%A_%a.txt" in script.read_text()  # %% is a % to Slurm, %j a number
    subprocess.run(["bash", script], env={**os.environ, "SLURM_ARRAY_TASK_ID": "0"}, check=True, cwd="/")
    assert len(list((toy / "INDEX of 5%j runs").glob("*/done.json"))) == 1
    result = cli("run.py", *argv[:-2], cwd=toy, env={**os.environ, "PATH": str(toy)})
    assert result.returncode == 0, result.stderr


def test_runner_refuses_what_cannot_run(toy):
    result = cli("run.py", "--command", "no-such-program x.py", "--env-ids", "e", cwd=toy)
    assert result.returncode == 2 and "no-such-program" in result.stderr and not (toy / "runs").exists()
    result = cli("run.py", "--command", "python toy.py", "--env-ids", "e", "--workers", "0", cwd=toy)
    assert result.returncode == 2 and not (toy / "runs").exists()


def test_runner_gives_each_trial_its_seed_itself(toy):
    result = cli("run.py", "--command", "python toy.py", "--env-ids", "e", "--", "--seed", "7", cwd=toy)
    given = "is the grid's: give --num-seeds, --env-ids, --runs-dir, before --"
    own = f"run: --seed {given}; the same call again resumes what was interrupted\n"
    assert (result.returncode, result.stderr) == (2, own) and not (toy / "runs").exists()
    result = cli("run.py", "--command", "python toy.py --seed=7", "--env-ids", "e", cwd=toy)
    assert (result.returncode, result.stderr) == (2, own) and not (toy / "runs").exists()
    result = cli("run.py", "--command", "python toy.py", "--env-ids", "e", "--", "--resume", "runs/a", cwd=toy)
    assert (result.returncode, result.stderr) == (2, own.replace("--seed", "--resume"))


def test_a_grid_of_nothing_is_no_success(toy):
    result = cli("run.py", "--command", "python toy.py", "--env-ids", cwd=toy)
    assert (result.returncode, result.stderr) == (2, "run: --env-ids has no environment\n")


@pytest.mark.parametrize(
    ("command", "why"), [("", "the command is empty"), ("python 'x", "no command: python 'x (No closing quotation)")]
)
def test_what_is_no_command_is_one_line(command, why, toy):
    result = cli("run.py", "--command", command, "--env-ids", "e", cwd=toy)
    assert (result.returncode, result.stderr) == (2, f"run: {why}\n")


# signals


def of_session(pid: int) -> list[str]:
    """The processes that live in the session of `pid`, which began it."""
    texts = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            texts.append(path.read_text())
    fields = [text.rpartition(")")[2].split() for text in texts]
    return [text for text, (state, _, _, session, *_) in zip(texts, fields) if int(session) == pid and state != "Z"]


@LINUX
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", ["matrix_games", "mutate_details"])
def test_who_ends_a_program_ends_its_processes(name, signum, tmp_path):
    need(*{"matrix_games": ["matplotlib"], "mutate_details": ["pygments"]}[name])
    flags = ["--runs-dir", tmp_path, "--out", tmp_path] if name == "matrix_games" else ["core-3", "--workers", "1"]
    argv = [sys.executable, BENCHMARK / f"{name}.py", *map(str, flags)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        wait_for(lambda: len(of_session(process.pid)) >= 4)  # with a resource tracker, and a fork server or two workers
        process.send_signal(signum)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, "Traceback" in err) == (128 + signum, "", False), err
        wait_for(lambda: not of_session(process.pid))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@LINUX
@pytest.mark.parametrize("name", ["report", "redraw"])
def test_ctrl_c_is_no_traceback_while_a_program_starts(name):
    need("matplotlib")
    process = subprocess.Popen(
        [sys.executable, BENCHMARK / f"{name}.py", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # it may be ignored here
    )
    wait_for(lambda: "_multiarray" in Path(f"/proc/{process.pid}/maps").read_text())  # NumPy; the rest takes a second
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == (b"", b"") and process.returncode == -signal.SIGINT


# speed.py

BUSY = """
import subprocess, sys, time
def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
if sys.argv[1] == "child":
    burn(float(sys.argv[2]))
else:
    burn(0.5)  # start-up, which must cancel out
    subprocess.run([sys.executable, __file__, "child", str(float(sys.argv[1]) / float(sys.argv[2]))], check=True)
"""


def test_speed_cancels_start_up_and_counts_children(tmp_path):
    (tmp_path / "busy.py").write_text(BUSY)
    rates = speed.measure(f"python {tmp_path / 'busy.py'} {{steps}} 1000", steps=2400, short=0.05, seed=1)
    assert 800 < rates["CPU-second"] < 1200  # 1000 steps per CPU-second, burnt by a grandchild
    assert rates["CPU-second, end to end"] < 830  # 2.4 s of work + 0.5 s of start-up


# The longer run takes ten times as long: were it twice, a machine that is less busy then would make it the shorter one.
BRIEF, SHORT = BUSY.replace("burn(0.5)", "burn(0)"), 0.05


def test_speed_compares_two_commands(tmp_path):
    (tmp_path / "busy.py").write_text(BRIEF)
    argv = ["--ours", "python busy.py {steps} 1000", "--peer", "python busy.py {steps} 250", "--steps", "1200"]
    result = cli("speed.py", *argv, "--peer-steps", "300", "--short", SHORT, "--repeats", "2", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    cells = {
        line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-1]]
        for line in result.stdout.splitlines()[:5]
    }
    assert cells["ours"][0] == "1200" and cells["peer"][0] == "300"
    per_cpu_second = cells["steps per"].index("CPU-second")
    assert 2.5 < float(cells["ours / peer"][per_cpu_second].split()[0]) < 6
    order = [line.split()[2] for line in result.stderr.splitlines() if line.startswith("repeat")]
    assert order == ["ours:", "peer:", "peer:", "ours:"]
    assert "2 cores" in result.stdout or f"{os.cpu_count()} cores" in result.stdout


def a_pair(script: str, beside: str = "a peer", **changes) -> speed.Pair:
    return speed.Pair(script, beside, **{"goal": 3.0, "settings": "equal work", **changes})


def test_speed_measures_a_pair_for_the_tables(tmp_path, monkeypatch, capsys):
    """Its row replaces an earlier one of the same pair, and the README's table is made of it."""
    (tmp_path / "busy.py").write_text(BRIEF)
    (tmp_path / "peer.sh").write_text(f"exec {sys.executable} {tmp_path / 'busy.py'} $1 250\n")
    work = {"ours": f"python {tmp_path / 'busy.py'} {{steps}} 1000", "steps": 600}
    work |= {"peer": "bash {peers}/peer.sh {steps}", "peer_steps": 150}
    pairs = [a_pair("busy", "another", **work), a_pair("busy", **work), a_pair("busy --compile", **work)]
    monkeypatch.setattr(speed, "PAIRS", pairs)
    monkeypatch.setattr(speed, "TABLE", tmp_path / "speed.csv")
    monkeypatch.setattr(speed, "README", tmp_path / "README.md")
    (tmp_path / "README.md").write_text(f"before\n{speed.README_START}old\n{speed.README_END}after\n")
    for repeats in (1, 2):
        only = {"only": ("busy --compile",), "short": SHORT}
        speed.measure_table(speed.Args(table=True, peers=tmp_path, repeats=repeats, **only))
    (row,) = speed.read_table()
    assert row["n"] == "2" and 2 < float(row["ratio_min"]) <= float(row["ratio"]) <= float(row["ratio_max"]) < 8
    assert int(row["peer_min"]) <= int(row["peer"]) <= int(row["peer_max"]) < int(row["ours_min"])
    assert row["goal"] == "3.0" and row["peer_command"] == work["peer"]
    for given, line in (
        ({}, "--table needs --peers"),
        ({"peers": tmp_path, "only": ("bussy",)}, "busy, busy --compile, another, a peer"),
        ({"peers": tmp_path / "none"}, "there is no folder --peers"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit, match="2"):
            speed.measure_table(speed.Args(table=True, **given))
        assert line in capsys.readouterr().err

    whole = speed.TABLE.read_text()
    speed.TABLE.write_text(whole[:-100])
    with pytest.raises(SystemExit, match="2"):
        speed.measure_table(speed.Args(table=True, peers=tmp_path))
    assert capsys.readouterr().err.endswith("speed.csv is damaged\n") and speed.TABLE.read_text() == whole[:-100]

    speed.write_table([row, row | {"script": "busy", "ratio": "31.44"}, row | {"script": "gone"}])
    assert [r["script"] for r in speed.read_table()] == ["busy", "busy --compile"]  # in the order of the pairs
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("before\n<!--") and text.endswith(f"{speed.README_END}after\n") and "old" not in text
    (line,) = (line for line in text.splitlines() if line.startswith("| `busy.py`"))
    assert line.split(" | ")[1:] == ["a peer", speed.with_range(row | {"ratio": "31.44"}), f"{speed.with_range(row)} |"]


def test_readme_and_docs_have_the_numbers_of_the_table():
    rows = speed.read_table()
    _, _, rest = (BENCHMARK.parent / "README.md").read_text().partition(speed.README_START)
    assert rest.startswith(speed.readme_table(rows) + speed.README_END)
    assert len({(row["script"], row["beside"]) for row in rows}) == len(rows) > 0
    pytest.importorskip("pygments")
    spec = importlib.util.spec_from_file_location("generate", BENCHMARK.parent / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    lines = generate.speed_tables().splitlines()
    for row in rows:
        (line,) = (line for line in lines if line.startswith(f"| `{row['script']}` | {row['beside']} |"))
        assert f" | {int(row['ours']):,} | {int(row['peer']):,} | {float(row['ratio']):.2f} (" in line
        goal = f"{float(row['goal']):g}" if row["goal"] else "-"
        assert line.endswith(f"| {goal} | {row['n']} |")
        assert any(row["settings"] in line and row["ours_differs"] in line for line in lines)


def test_the_published_table_says_of_a_pair_what_the_pairs_say():
    """Where its commands are still those that were measured."""
    pairs, texts = (
        {(pair.script, pair.beside): pair for pair in speed.PAIRS},
        ("settings", "ours_differs", "peer_differs"),
    )
    rows = speed.read_table()
    assert len(rows) == len(pairs)
    for row in rows:
        pair = pairs[row["script"], row["beside"]]
        is_same = (row["ours_command"], row["peer_command"]) == (pair.ours, pair.peer)
        assert not is_same or [row[name] for name in texts] == [getattr(pair, name) for name in texts]


@pytest.mark.parametrize("pair", speed.PAIRS, ids=lambda pair: f"{pair.script} / {pair.beside}")
def test_commands_of_the_pairs_are_ones_that_their_scripts_take(pair, tmp_path):
    argv = speed.to_argv(pair.ours, steps=round(pair.steps / 4), seed=1, tmp=tmp_path)
    assert argv[1] == f"cleanmarl/{pair.script.split()[0]}.py" and ("--compile" in argv) == ("--compile" in pair.script)
    args = tyro.cli(importlib.import_module(f"cleanmarl.{Path(argv[1]).stem}").Args, args=argv[2:])
    assert args.eval_episodes == 0
    script = Path(pair.peer.split()[1])
    assert script.parent == Path("benchmark/peers") and (BENCHMARK.parent / script).exists()
    rollout = getattr(args, "num_envs", 1) * getattr(args, "num_steps", 25)
    assert pair.steps / 4 >= rollout  # the shorter run learns at least once
    at_a_time = int(re.search(r"TOTAL_TIMESTEPS=(\d+)|$", pair.peer)[1] or 1)
    assert pair.peer_steps / 4 % at_a_time == 0  # JaxMARL's program is run a whole number of times
    assert not any("|" in text for text in (pair.settings, pair.ours_differs, pair.peer_differs))


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--ours", "python -c pass"], "--ours and --peer need {steps}"),
        (["--ours", "python x {steps}", "--peer", "python x"], "--ours and --peer need {steps}"),
        (["--ours", "python x {steps}", "--repeats", "0"], "--repeats be at least 1"),
        (["--ours", "python -m x {steps}", "--profile"], "--profile needs `python SCRIPT.py ...`, not: python -m x"),
        (["--ours", "no-such-program {steps}"], "no-such-program cannot be run: No such file or directory"),
    ],
)
def test_speed_says_in_a_line_what_it_cannot_measure(flags, why, tmp_path):
    result = cli("speed.py", *flags, cwd=tmp_path)
    assert result.returncode == 2 and why in result.stderr and result.stderr.count("\n") == 1


def test_speed_stops_at_a_command_that_fails(tmp_path):
    (tmp_path / "bad.py").write_text("raise ValueError('no such flag')")
    result = cli("speed.py", "--ours", "python bad.py {steps}", cwd=tmp_path)
    assert result.returncode == 1 and "no such flag" in result.stderr


# peers/: what runs the scripts of others, here with scripts that need what those do


def run_peer(script: str, *argv, peers: Path, work: Path) -> subprocess.CompletedProcess:
    work.mkdir(exist_ok=True)
    command = ["bash", BENCHMARK / "peers" / script, peers, work, *argv]
    env = {**os.environ, "PEERS_PYTHON": sys.executable}
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120, env=env)


AS_CLEANRL = """
import sys
import gymnasium as gym
env = lambda: gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1", max_episode_steps=3))
envs = gym.vector.SyncVectorEnv([env, env])
obs, _ = envs.reset(seed=1)
episodes = []
for step in range(6):
    obs, reward, termination, truncation, infos = envs.step([0, 1])
    assert reward.all()  # no dummy step
    for info in infos.get("final_info", ()):
        if info and "episode" in info:
            episodes.append((step, float(info["episode"]["r"]), int(info["episode"]["l"])))
open("written", "w").write(repr((sys.argv, episodes)))
"""


def test_cleanrl_runs_with_the_resets_that_it_was_written_for(tmp_path):
    script = tmp_path / "peers folder" / "cleanrl" / "cleanrl" / "toy.py"
    script.parent.mkdir(parents=True)
    script.write_text(AS_CLEANRL)
    result = run_peer("cleanrl.sh", "toy", 100, 7, "--x", peers=script.parents[2], work=tmp_path / "work")
    assert result.returncode == 0, result.stderr
    argv, episodes = eval((tmp_path / "work" / "written").read_text())
    assert argv == [str(script), "--total-timesteps", "100", "--seed", "7", "--x"]
    assert episodes == [(2, 3.0, 3), (2, 3.0, 3), (5, 3.0, 3), (5, 3.0, 3)]


LOGS_AS_CLEANRL = """
import sys
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter("runs/toy")
for step, value in ((100, 1.0), (512, 3.0), (513, 7.0), (1700, 9.0)):
    writer.add_scalar("charts/episodic_return", value, step, walltime=1000 + step)
writer.close()
"""


def test_a_run_of_cleanrl_becomes_a_run_folder(tmp_path):
    """run.py starts and skips it, report.py reads it: the mean return of each 512 steps, with the times it had."""
    (script := tmp_path / "toy.py").write_text(LOGS_AS_CLEANRL)
    command = f"python {BENCHMARK / 'peers' / 'run_cleanrl.py'} {script}"
    grid = ["--command", command, "--env-ids", "a/b", "--num-seeds", "2", "--runs-dir", tmp_path / "runs"]
    for finished in ("seed 2: finished after", "2 of 2 trials finished"):  # the second time there is nothing to do
        argv = [sys.executable, BENCHMARK / "run.py", *grid, "--", "--total-timesteps", "2000"]
        result = subprocess.run([*map(str, argv)], capture_output=True, text=True, timeout=120, cwd=tmp_path)
        assert result.returncode == 0 and finished in result.stdout, result.stdout + result.stderr
    data = report.read_runs([tmp_path / "runs"], [report.RETURN, report.NUM_EPISODES])
    assert set(data.script) == {"CleanRL's toy"} and set(data.settings) == {""} and set(data.seed) == {1, 2}
    returns = data[(data.metric == report.RETURN) & (data.seed == 1)]
    assert returns[["step", "value"]].to_numpy().tolist() == [[512, 2.0], [1024, 7.0], [2048, 9.0]]
    assert np.diff(returns.wall_seconds).tolist() == [1, 1187]
    assert report.last_return(data[data.seed == 1], 4) == 5.0  # (9 + 7 + 3 + 1) / 4


AS_CLEANMARL = """
import importlib, sys
import lbforaging, smaclite
from env.wrapper import NAME
if __name__ == "__main__":
    env = importlib.import_module("pettingzoo.mpe.simple_spread_v3").parallel_env()
    env.reset()
    open("written", "w").write(repr((sys.argv, NAME, env.num_agents, env.unwrapped.max_cycles)))
"""


def test_cleanmarl_finds_the_packages_that_have_moved(tmp_path):
    script = tmp_path / "cleanmarl" / "cleanmarl" / "toy.py"
    (script.parent / "env").mkdir(parents=True)
    (script.parent / "env" / "wrapper.py").write_text("NAME = 'theirs'")
    script.write_text(AS_CLEANMARL)
    result = run_peer("cleanmarl.sh", "toy", 100, 7, "--eval_steps", 5, peers=tmp_path, work=tmp_path / "work")
    assert result.returncode == 0, result.stderr
    argv, *rest = eval((tmp_path / "work" / "written").read_text())
    task = ["--env_type", "pz", "--env_family", "mpe", "--env_name", "simple_spread_v3"]
    assert rest == ["theirs", 3, 25] and argv[0] == str(script)
    assert argv[1:] == ["--total_timesteps", "100", "--seed", "7", *task, "--eval_steps", "5"]


def test_cleanmarl_plays_another_task(tmp_path):
    script = tmp_path / "cleanmarl" / "cleanmarl" / "toy.py"
    (script.parent / "env").mkdir(parents=True)
    (script.parent / "env" / "wrapper.py").write_text("NAME = 'theirs'")
    script.write_text(AS_CLEANMARL)
    task = ["--env_type", "lbf", "--env_name", "Foraging-8x8-2p-2f-coop-v3"]
    result = run_peer("cleanmarl.sh", "toy", 100, 7, *task, peers=tmp_path, work=tmp_path / "work")
    assert result.returncode == 0, result.stderr
    argv, *_ = eval((tmp_path / "work" / "written").read_text())
    assert argv[1:] == ["--total_timesteps", "100", "--seed", "7", *task]


AS_JAXMARL = """
import jax
def make_train(config):
    updates = config["TOTAL_TIMESTEPS"] // config["NUM_STEPS"] // config["NUM_ENVS"]
    def train(key):
        jax.experimental.io_callback(lambda x: open("metrics", "a"), None, key)
        jax.debug.callback(lambda seed: open("runs", "a").write(f"{config['NAME']} {updates} {seed[1]};"), key)
        return key
    return train
"""


@needs("jaxmarl")
def test_jaxmarl_trains_again_and_again(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mappo_homogenous_rnn_toy.yaml").write_text("{NUM_ENVS: 2, NUM_STEPS: 4, NAME: it}")
    (tmp_path / "mappo_rnn_toy.py").write_text(AS_JAXMARL)
    argv = [sys.executable, BENCHMARK / "peers" / "run_jaxmarl.py", tmp_path / "mappo_rnn_toy.py"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run([*map(str, argv), "48", "7", "TOTAL_TIMESTEPS=16"], check=True, timeout=120, env=env, cwd=tmp_path)
    assert (tmp_path / "runs").read_text() == "it 2 7;it 2 8;it 2 9;" and not (tmp_path / "metrics").exists()
    odd = [*map(str, argv), "50", "7", "TOTAL_TIMESTEPS=16"]
    result = subprocess.run(odd, capture_output=True, text=True, timeout=120, env=env, cwd=tmp_path)
    assert result.returncode == 1 and "50 steps are no multiple" in result.stderr


ROLLOUT = """
import gymnasium as gym, json, numpy as np, time
from pathlib import Path
took = dict.fromkeys(("imports", "env", "forward", "update", "other"), 0.0)
def burn(part, seconds):
    start = time.perf_counter()
    while time.perf_counter() < start + seconds:
        pass
    took[part] += time.perf_counter() - start
class Env(gym.Env):
    observation_space = action_space = gym.spaces.Discrete(2)
    part = "env"
    def reset(self, **kwargs):
        return 0, {}
    def step(self, action):
        burn(Env.part, 0.1)  # long beside what a busy machine takes away at a time
        return 0, 0.0, False, False, {}
def collect(envs):
    for _ in range(4):
        burn("forward", 0.05)
        envs.step(np.zeros(1, int))
def update():
    burn("update", 0.2)
def main():
    envs = gym.vector.SyncVectorEnv([Env])
    envs.reset()
    collect(envs)
    update()
    Env.part = "other"
    for _ in range(2):  # an evaluation, 0.2 s: neither env nor forward
        envs.step(np.zeros(1, int))
burn("imports", 0.3)  # not counted
if __name__ == "__main__":
    main()
    Path(__file__).with_name("took.json").write_text(json.dumps(took))
"""


def test_profile_splits_the_time_of_main(tmp_path):
    script = tmp_path / "rollout.py"
    script.write_text(ROLLOUT)
    spent = speed.split_time(f"python {script} {{steps}}", steps=1)
    took = json.loads((tmp_path / "took.json").read_text())  # on a busy machine more than was asked for
    assert took.pop("imports") >= 0.3 and spent == pytest.approx(took, abs=0.1)

    script.write_text(ROLLOUT.replace("def collect", "def gather").replace("collect(envs)", "gather(envs)"))
    spent = speed.split_time(f"python {script} {{steps}}", steps=1)
    assert spent["forward"] == 0 and spent["env"] > 0.3  # no function named collect: env is still known


@pytest.mark.parametrize("script, flag", [("hand_written", "num-episodes"), ("hand_written", "num-warehouse-episodes")])
def test_no_episode_is_no_score(script, flag, tmp_path):
    result = cli(f"{script}.py", f"--{flag}", "0", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (2, f"{script}: --{flag} must be greater than 0, not 0\n")


def test_hand_written_listener_goes_where_the_speaker_knows():
    still, way = np.zeros((4, 2)), np.array([[-1.0, 0], [1, 0], [0, -1], [0, 1]])
    assert hand_written.plan(still, way).tolist() == [1, 2, 3, 4]
    told, not_told = (hand_written.play(hand_written.Args(num_episodes=64), told) for told in (True, False))
    assert told.shape == (64,)
    assert -40 < not_told.mean() < -25 < told.mean() < -10  # a random pair has -79.5


def test_hand_written_pair_refers():
    told, not_told = (hand_written.play_reference(hand_written.Args(num_episodes=48), told) for told in (True, False))
    assert -40 < not_told.mean() < -28 < -18 < told.mean() < -10  # a random pair has -56.5


def test_hand_written_agents_spread():
    returns = hand_written.play_spread(hand_written.Args(num_episodes=32))
    assert returns.shape == (32,) and -30 < returns.mean() < -15  # a random team has -79.3
    both_axes = hand_written.play_spread(hand_written.Args(num_episodes=32), continuous=True)
    assert returns.mean() + 1 < both_axes.mean() < -12  # the same places, and more pushes to choose from


def test_hand_written_robots_deliver():
    need("rware")
    returns = hand_written.play_warehouse(hand_written.Args(num_warehouse_episodes=2), "rware-tiny-2ag-easy-v2")
    assert returns.shape == (2,) and returns.min() > 20  # a random team has 0.07


def test_hand_written_listener_knows_the_physics():
    envs = hand_written.make("mpe/simple_speaker_listener_v4", 5)
    obs, _ = envs.reset(seed=1)
    action = np.stack([np.zeros(5, int), np.arange(5)], axis=1)
    for _ in range(3):
        before, (obs, *_) = obs, envs.step(action)
        velocity = before[:, 1, :2] * hand_written.DAMPING + hand_written.ACTIONS * hand_written.DT
        np.testing.assert_allclose(obs[:, 1, :2], velocity, atol=1e-6)
        way, way_before = obs[:, 1, 2:4], before[:, 1, 2:4]
        np.testing.assert_allclose(way, way_before - before[:, 1, :2] * hand_written.DT, atol=1e-6)


@pytest.mark.parametrize("tool", ["run", "tune", "report"])
def test_a_folder_that_cannot_be_written_is_one_line(tool, tmp_path):
    if tool != "run":
        need("pandas")
        need("optuna" if tool == "tune" else "matplotlib")
    flags = ["--command", f"{sys.executable} {BENCHMARK.parent / 'cleanmarl/ppo.py'}", "--env-ids", "CartPole-v1"]
    flags += ["--params", "learning_rate=1e-4..1e-2"] if tool == "tune" else []
    flags += ["--runs-dir", "/proc/nowhere"]
    if tool == "report":
        ppo.main(ppo.Args(total_timesteps=1000, runs_dir=str(tmp_path), eval_episodes=1))
        flags = [tmp_path, "--out", "/proc/nowhere/x"]
    done = cli(f"{tool}.py", *flags, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith(f"{tool}: [Errno 2] No such file or directory: '/proc/")
    assert done.stderr.count("\n") == 1


def test_a_ray_cluster_that_is_not_there_is_one_line(toy):
    need("ray")
    flags = ["--command", "python toy.py", "--env-ids", "e", "--backend", "ray", "--address", "127.0.0.1:1"]
    result = cli("run.py", *flags, cwd=toy)
    line = "run: there is no Ray cluster at --address 127.0.0.1:1; begin one: ray start --head"  # more with a token
    assert (result.returncode, result.stderr.count("\n")) == (2, 1) and result.stderr.startswith(line)
