"""Kill runs of every script at random moments and see that nothing is lost; or run one for long and see nothing grow.

    python benchmark/faults.py --kills 200 --out runs/faults/kills
    python benchmark/faults.py --soak maddpg_multienvs --minutes 30 --out runs/faults/soak -- --total-timesteps 20000000

A run with tiny settings and a checkpoint after every update is killed at a random moment: while it starts, trains, or
ends; SIGKILL or a signal that lets it save; its process group, its main process, or one worker or actor alone. After
each kill its files are looked at, and `--resume` starts it for the next kill. After some kills it has to run to its
end. What is to be killed while it starts is started as a user starts it; all else is forked from this program, which
has imported torch already: a tenth of the time. What would be a fault is counted:

    lost         a checkpoint that is gone or older than it was, or a run that --resume refuses or does not complete
    bad          a checkpoint that cannot be read, whose checksum is wrong, or with a number that is not finite
    processes    processes that are still there two minutes later
    shared       files in /dev/shm that the run had open when it was killed, and that nobody has now
    untidy       a traceback or many lines, another exit status than the signal's, a lock that is held, a .tmp file that
                 stays, an end that does not come

OUT.csv has one row per kill, OUT.md a table by script and signal. What is in OUT.csv is not done again, and scripts
with few kills come first, so that new scripts are taken in by themselves. A script that refuses to start, since a
package is missing, is named and left out. Only processes that this program started are ended, found by a mark in their
environment. Linux only: it reads /proc. Exit status 1 if there was a fault, or fewer kills.
"""

import csv
import dataclasses
import fcntl
import hashlib
import importlib
import math
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
MARK = "CLEANMARL_FAULTS"  # environment variable of all processes of a run
KILLS_PER_RUN = 5
SHORT = 200  # steps of a run that ends by itself
PATIENCE = 120  # seconds that a run has to save and end after a signal
SECONDS_TO_VANISH = 120  # that its workers and actors have then; Ray's own agents take more than a minute
MOMENTS = {"start": 3, "training": 14, "end": 3}  # how often each is drawn, as below
WINDOW = {"start": 8, "training": 4, "end": 4}  # seconds after the start, or after there is a run folder
SIGNALS = {"SIGKILL": 11, "SIGTERM": 3, "SIGINT": 3, "SIGHUP": 3}
TARGETS = {"group": 2, "main": 1, "child": 2}
FAULTS = ["lost", "bad", "processes", "shared", "untidy"]
COLUMNS = ["commit", "run", "script", "env_id", "moment", "seconds", "signal", "target", "exit_status"]
COLUMNS += ["step_before", "step_after", *FAULTS, "note"]

# What MuJoCo and Ray write on stderr of their own accord, with empty lines between.
LOGS = r"\s*$|WARNING: compiler|\d{4}-\d\d-\d\d [\d:,]+\s+(INFO|WARNING) |(\x1b\[\d+m)?\((raylet|RayActor|pid)\b"

# Settings by which a run is tiny; a script gets those that it has. What does not suit one stands below.
TINY = {"num_envs": 4, "num_steps": 8, "unroll_length": 8, "num_minibatches": 2, "update_epochs": 2, "num_actors": 2}
TINY |= {"buffer_size": 64, "batch_size": 8, "replay_size": 16, "eval_episodes": 2, "match_games": 2}
TINY |= {"checkpoint_interval": 32, "keep_checkpoints": 2, "eval_interval": 512}
TINY_OF = {"ppo_selfplay": {"num_steps": 16}}


@dataclass
class Args:
    out: Path
    """where to write: FOLDER/NAME"""
    kills: int = 200
    """kills in OUT.csv when it is done"""
    scripts: list[str] | None = None
    """scripts to kill (default: all)"""
    seed: int = 1
    """seed of the moments, signals and targets"""
    soak: str | None = None
    """run this script for long instead"""
    minutes: float = 30
    """how long the soak takes"""
    interval: float = 10
    """seconds between two samples of a soak"""


# ----------------------------------------------------------------------------------------------------------- processes


def processes() -> dict[int, tuple[int, int]]:
    """pid -> (parent's pid, time of its start) of all processes that live; zombies do not."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, *fields = (path / "stat").read_text().rpartition(")")[2].split()
            if state not in "ZX":
                found[int(path.name)] = int(fields[0]), int(fields[18])
    return found


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found, parents = [pid], {child: parent for child, (parent, _) in processes().items()}
    for parent in found:  # which grows
        found += [child for child in parents if parents[child] == parent]
    return found


def read_proc(pid: int, name: str) -> str:
    """A file of /proc/PID; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().replace(b"\0", b"\n").decode(errors="replace")
    except OSError:
        return ""


def marked(mark: str) -> list[int]:
    """All living processes that were started, directly or not, with this mark in their environment."""
    return [pid for pid in processes() if f"{MARK}={mark}" in read_proc(pid, "environ").splitlines()]


def is_player(pid: int) -> bool:
    """Whether it is a worker of environments or an actor, and no helper of Python, git or Ray."""
    return re.search(r"spawn_main|forkserver import|import serve|^ray::\w*Actor", read_proc(pid, "cmdline")) is not None


def shared_files(pid: int) -> set[Path]:
    """The files in /dev/shm that a process has open or mapped; those without a name nobody can leave behind."""
    held = read_proc(pid, "maps")
    with suppress(OSError):
        held += "".join(f"{fd.readlink()}\n" for fd in Path(f"/proc/{pid}/fd").iterdir())
    return set(map(Path, re.findall(r"/dev/shm/.+(?<!\(deleted\))$", held, re.MULTILINE)))


def nobodys(files: set[Path]) -> set[Path]:
    """Those files that still exist and that no process has open or mapped."""
    files = {path for path in files if path.exists()}
    return files - {path for pid in (processes() if files else ()) for path in shared_files(pid)}


def hear_signals() -> None:
    """In the background or under nohup signals are ignored: what is started here must not inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def wait_for(condition: Callable[[], Any], seconds: float) -> bool:
    """Whether the condition came true within so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)
    return True


class Fork:
    """A Python script in a fork of this process, in a session of its own; what is used of Popen is the same."""

    def __init__(self, argv: list[str], cwd: Path, env: dict[str, str], out: Path, err: Path):
        self.returncode, self.pid = None, os.fork()
        if self.pid > 0:
            return
        status = 1
        try:
            os.setsid()
            hear_signals()
            os.chdir(cwd)
            os.environ.update(env)
            for path, number in ((os.devnull, 0), (out, 1), (err, 2)):
                os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            sys.argv = argv
            sys.path.insert(0, str(Path(argv[0]).parent))
            runpy.run_path(argv[0], run_name="__main__")
            status = 0
        except SystemExit as stopped:
            status = stopped.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)  # nothing of this program is to be done twice

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, seconds: float = math.inf) -> int:
        if not wait_for(lambda: self.poll() is not None, seconds):
            raise subprocess.TimeoutExpired("a fork", seconds)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)


class Started:
    """A command, with all its descendants. `folder`: where its output and temporary files go. `fork`: see Fork."""

    def __init__(self, argv: list, folder: Path, fork: bool = False):
        self.mark, self.folder, self.others, self.shared = uuid.uuid4().hex, folder, {}, set()
        self.out, self.err, tmp = folder / "out.txt", folder / "err.txt", folder / "tmp"
        tmp.mkdir(exist_ok=True)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), MARK: self.mark, "TMPDIR": str(tmp)}
        self.begin = time.monotonic()
        with self.out.open("w") as out, self.err.open("w") as err:
            if fork:
                self.process = Fork(list(map(str, argv)), folder, env, self.out, self.err)
                return
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            argv = [sys.executable, *map(str, argv)]
            self.process = subprocess.Popen(
                argv, cwd=folder, env=env, start_new_session=True, preexec_fn=hear_signals, **streams
            )

    def run_folder(self) -> Path | None:
        """What it has said of its run folder, with which it has begun."""
        found = re.search(r"^run folder: (.+?)(?: \(resumed .*\))?$", self.out.read_text(), re.MULTILINE)
        return Path(found[1]) if found else None

    def players(self) -> list[int]:
        """Its workers and actors."""
        return [pid for pid in family(self.process.pid)[1:] if is_player(pid)]

    def remember(self) -> None:
        """Keep in mind who belongs to it: orphans cannot be traced, and Ray's overwrite their environment."""
        known, pids = processes(), family(self.process.pid)
        self.others |= {pid: known[pid] for pid in pids[1:] if pid in known}
        self.shared |= {path for pid in pids for path in shared_files(pid)}

    def left(self) -> set[int]:
        """Its processes that still live."""
        known = processes()
        remembered = {pid for pid, (_, start) in self.others.items() if pid in known and known[pid][1] == start}
        return remembered | set(marked(self.mark)) | ({self.process.pid} if self.process.poll() is None else set())

    def end(self, patience: float | None = None) -> list[str]:
        """Kill whoever is left; returns who that was after so many seconds (default: SECONDS_TO_VANISH)."""
        wait_for(lambda: not self.left(), SECONDS_TO_VANISH if patience is None else patience)
        left = [f"{' '.join(read_proc(pid, 'cmdline').split())[:100]} is left" for pid in self.left()]
        while self.left():
            for pid in self.left():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self.process.wait()
        return left

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *error) -> None:
        self.end(patience=0)


# --------------------------------------------------------------------------------------------------------------- files


def read_checkpoint(path: Path) -> tuple[dict, str]:
    """What a checkpoint holds, and what is wrong with it (empty: nothing); none of cleanmarl's own code is asked."""
    content = path.read_bytes()
    if hashlib.sha256(content[:-32]).digest() != content[-32:]:
        return {}, f"{path.name}: wrong checksum"
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever it is
        return {}, f"{path.name}: {type(error).__name__}"
    if not {"format", "script", "step", "modules"} <= checkpoint.keys():
        return {}, f"{path.name}: not of a run"
    bad = next(not_finite([checkpoint["modules"], checkpoint.get("playing")], path.name), "")
    return checkpoint, f"{bad} is not finite" if bad else ""


def not_finite(x: Any, name: str):
    """Yields the names of numbers in nested containers that are NaN or infinite."""
    if isinstance(x, dict | list | tuple):
        for key, value in x.items() if isinstance(x, dict) else enumerate(x):
            yield from not_finite(value, f"{name}.{key}")
    elif isinstance(x, torch.Tensor | np.ndarray):
        x = torch.as_tensor(x)
        if x.is_floating_point() and not x.isfinite().all():
            yield name
    elif isinstance(x, float) and not math.isfinite(x):
        yield name


def is_locked(folder: Path) -> bool:
    if not (folder / "lock").exists():
        return False
    with (folder / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def look(runs_dir: Path) -> dict[str, Any]:
    """All run folders: notes of bad checkpoints, .tmp files, folders with a lock that is held, folder -> its step."""
    bad, tmp, locked, step = [], [], [], {}
    for folder in sorted(runs_dir.glob("*/")):
        for path in folder.glob("*.pt"):
            checkpoint, flaw = read_checkpoint(path)
            bad += [flaw] if flaw else []
            if path.name == "checkpoint.pt":
                step[folder] = checkpoint.get("step", -1)
        tmp += folder.rglob("*.tmp")
        locked += [folder] if is_locked(folder) else []
    return {"bad": bad, "tmp": tmp, "locked": locked, "step": step}


# --------------------------------------------------------------------------------------------------------------- kills


def find_scripts() -> list[str]:
    """All scripts, by name: files with arguments of a run."""
    files = sorted((ROOT / "cleanmarl").glob("*.py"))
    return [path.stem for path in files if "\nclass Args(" in path.read_text()]


def tiny_flags(script: str) -> dict[str, Any]:
    """Flags that make a run of a script tiny."""
    fields = {field.name for field in dataclasses.fields(importlib.import_module(f"cleanmarl.{script}").Args)}
    settings = {name: value for name, value in (TINY | TINY_OF.get(script, {})).items() if name in fields}
    return {f"--{name.replace('_', '-')}": value for name, value in settings.items()}


def with_workers(env_id: str) -> str | None:
    """The same environment in two worker processes; None if it cannot be had so."""
    if not env_id.startswith("mpe/"):
        return None
    return f"pz/mpe2/{env_id.removeprefix('mpe/')}{'&' if '?' in env_id else '?'}num_workers=2"


def draw(rng: random.Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


class Victim:
    """A run of one script, in a folder of its own, that is killed, resumed, and killed again."""

    def __init__(self, script: str, number: int, seed: int, folder: Path):
        self.script, self.number, self.folder = script, number, folder
        self.rng = random.Random(f"{seed} {script} {number}")
        self.runs_dir, self.run_folder, self.step, self.refused = folder / "runs", None, 0, ""
        self.env_id = importlib.import_module(f"cleanmarl.{script}").Args.env_id
        self.flags = tiny_flags(script) | {"--runs-dir": self.runs_dir}
        if self.rng.random() < 0.5 and (env_id := with_workers(self.env_id)):
            self.env_id = self.flags["--env-id"] = env_id
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, steps: int, fork: bool = True) -> Started:
        """Begin or resume, with so many steps to go."""
        where = self.flags if self.run_folder is None else {"--resume": self.run_folder}
        flags = where | {"--total-timesteps": self.step + steps}
        command = [ROOT / "cleanmarl" / f"{self.script}.py", *(str(word) for pair in flags.items() for word in pair)]
        return Started(command, self.folder, fork)

    def complete(self) -> str:
        """Run to the end; returns what went wrong, empty if nothing."""
        with self.start(SHORT) as started:
            with suppress(subprocess.TimeoutExpired):
                started.process.wait(10 * PATIENCE)
            status, folder, left = started.process.poll(), started.run_folder(), started.end()
        if status != 0:
            return f"exit status {status}: {' '.join(started.err.read_text().split())[-300:]}"
        found = look(self.runs_dir)
        wrong = found["bad"] + [f"lock of {path.name} is held" for path in found["locked"]]
        wrong += [f"{path.name} is left" for path in found["tmp"] if path.parent == folder]
        wrong += left
        is_complete = (folder / "done.json").exists() and found["step"].get(folder, -1) > self.step
        return "; ".join(wrong + ([] if is_complete else ["it is not complete"]))

    def kill(self) -> dict[str, Any] | None:
        """Start, strike at a random moment, look; returns the row of the kill, None if the run had ended by then.

        If it ended by itself and should not have, the row's target is "none".
        """
        rng = self.rng
        moment, signal_name, target = draw(rng, MOMENTS), draw(rng, SIGNALS), draw(rng, TARGETS)
        delay = rng.uniform(0, WINDOW[moment])
        row = {"run": self.number, "script": self.script, "env_id": self.env_id, "moment": moment}
        row |= {"signal": signal_name, "target": "none"}
        before = look(self.runs_dir)
        with self.start(SHORT if moment == "end" else 1_000_000, fork=moment != "start") as started:
            if moment != "start":
                wait_for(lambda: started.run_folder() or started.process.poll() is not None, 10 * PATIENCE)
            with suppress(subprocess.TimeoutExpired):
                started.process.wait(delay)
            if started.process.poll() is None:
                started.remember()
                for folder, step in self.saved().items():
                    before["step"][folder] = max(step, before["step"].get(folder, -1))
                row["seconds"] = round(time.monotonic() - started.begin, 3)
                row["target"] = self.strike(started, getattr(signal, signal_name), target)
            row["exit_status"] = self.wait(started, row)
            left = started.end()
        return self.judge(row, started, before, left)

    def strike(self, started: Started, signum: int, target: str) -> str:
        """Send the signal; returns whom it reached: without workers and actors the main process takes their place."""
        players = started.players() if target == "child" else []
        with suppress(ProcessLookupError):
            if target == "group":
                os.killpg(started.process.pid, signum)
            elif players:
                os.kill(self.rng.choice(players), signum)
            else:
                started.process.send_signal(signum)
        return "main" if target == "child" and not players else target

    def saved(self) -> dict[Path, int]:
        """The step of each folder's checkpoint, whole at every moment, also while its writer lives."""
        return {path.parent: read_checkpoint(path)[0].get("step", -1) for path in self.runs_dir.glob("*/checkpoint.pt")}

    def wait(self, started: Started, row: dict[str, Any]) -> int | None:
        """The exit status; a run that need not end, since an actor ignores a signal or is replaced, is asked to."""
        process = started.process
        if row["target"] == "child":
            wait_for(lambda: process.poll() is not None or started.err.stat().st_size, 5)
            if process.poll() is None and not started.err.stat().st_size:
                started.remember()
                process.send_signal(signal.SIGTERM)
                row["target"] = "child, then main"
        with suppress(subprocess.TimeoutExpired):
            return process.wait(PATIENCE)
        return None

    def judge(self, row: dict[str, Any], started: Started, before: dict[str, Any], left: list) -> dict | None:
        """Fill in the faults, and take note where to go on."""
        found, out, err = look(self.runs_dir), started.out.read_text(), started.err.read_text()
        status, target, folder = row["exit_status"], row["target"], started.run_folder()
        err = "".join(line for line in err.splitlines(True) if not re.match(LOGS, line))
        words = " ".join(err.split())[-300:]

        lost = [f"step {step} is lost" for path, step in before["step"].items() if found["step"].get(path, -1) < step]
        if said := re.search(r"^(?:stopped at|saved) step ([\d,]+)", out + err, re.MULTILINE):
            step = int(said[1].replace(",", ""))
            lost += [] if found["step"].get(folder) == step else [f"step {step} is lost, which was said to be saved"]
        if target == "none" and status != 0:
            lost += [f"nobody killed it, exit status {status}: {words}"]
        if status == 0 and not (folder and (folder / "done.json").exists()):
            lost += ["exit status 0, and it is not complete"]

        untidy = [f"lock of {path.name} is held" for path in found["locked"]]
        if row["signal"] != "SIGKILL" or target.startswith("child"):  # it could clean up
            untidy += [f"{path.name} is left" for path in set(found["tmp"]) - set(before["tmp"])]
        untidy += ["it does not end"] if status is None else []
        if "Traceback" in err or err.count("\n") > (2 if target.startswith("child") else 1):
            untidy += [f"{err.count(chr(10))} lines: {words}"]
        signum = signal.SIGTERM if target == "child, then main" else getattr(signal, row["signal"])
        usual = {0} | ({1} if target.startswith("child") else set())
        usual |= {-signum, 128 + signum} if target != "child" else set()
        if target != "none" and status is not None and status not in usual:
            untidy += [f"exit status {status}: {words}"]

        shared = [f"{path} is left" for path in nobodys(started.shared)]
        what = {"lost": lost, "bad": found["bad"], "processes": left, "shared": shared, "untidy": untidy}
        row |= {fault: len(notes) for fault, notes in what.items()}
        row["note"] = "; ".join(note for notes in what.values() for note in notes)
        row["step_before"], row["step_after"] = (max(x["step"].values(), default="") for x in (before, found))

        folder = folder or self.run_folder
        self.run_folder = folder if folder in found["step"] else None  # else the next one begins anew
        self.step = found["step"].get(folder, 0)
        if status == 2 and not found["step"]:
            self.refused = words
        return row if target != "none" or any(row[fault] for fault in FAULTS) else None


def git_commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def num_kills(rows: list[dict[str, Any]]) -> int:
    return sum(row["target"] != "none" for row in rows)


def kill_often(victim: Victim, kills: int) -> list[dict[str, Any]]:
    """Kill a run so many times and let it complete; one row for each kill."""
    rows = []
    for _ in range(3 * kills):  # starts at most
        if num_kills(rows) < kills and not victim.refused and (row := victim.kill()) is not None:
            rows.append(row)
    if rows and not victim.refused and (wrong := victim.complete()):
        rows[-1] |= {"lost": rows[-1]["lost"] + 1, "note": f"{rows[-1]['note']}; at the end: {wrong}"}
    return rows


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of an earlier call; counts are integers again."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [row | {fault: int(row[fault]) for fault in FAULTS} for row in csv.DictReader(file)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.with_suffix(".new").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    path.with_suffix(".new").replace(path)


def table(rows: list[dict[str, Any]], left_out: dict[str, str]) -> str:
    """Kills by script and signal, and by target, with all faults, as Markdown."""

    def line(name: str, some: list[dict[str, Any]]) -> str:
        signals = Counter(row["signal"] for row in some if row["target"] != "none")
        of_child = sum(row["target"].startswith("child") for row in some)
        counts = [num_kills(some), *(signals[name] for name in SIGNALS), of_child]
        return f"| {name} | {' | '.join(map(str, counts + [sum(row[fault] for row in some) for fault in FAULTS]))} |\n"

    head = ["script", "kills", *SIGNALS, "of a child", "lost", "bad checkpoint", "processes left", "shared memory left"]
    text = f"| {' | '.join([*head, 'untidy'])} |\n|---{'|---:' * len(head)}|\n"
    for script in sorted({row["script"] for row in rows}):
        text += line(f"`{script}`", [row for row in rows if row["script"] == script])
    text += line("all", rows)
    for script, why in left_out.items():
        text += f"\n`{script}` was left out: {why}\n"
    return text


def kill_all(args: Args) -> int:
    """Kill until OUT.csv has enough rows; returns the exit status."""
    path, left_out = args.out.with_suffix(".csv"), {}
    path.parent.mkdir(parents=True, exist_ok=True)
    rows, commit = read_rows(path), git_commit()
    while num_kills(rows) < args.kills:
        scripts = [script for script in args.scripts or find_scripts() if script not in left_out]
        if not scripts:
            break
        kills = Counter(row["script"] for row in rows)
        script = min(scripts, key=lambda script: kills[script])
        number = len({row["run"] for row in rows if row["script"] == script})
        with tempfile.TemporaryDirectory(prefix="faults") as tmp:
            victim = Victim(script, number, args.seed, Path(tmp, "run"))
            new = kill_often(victim, min(KILLS_PER_RUN, args.kills - num_kills(rows)))
            if victim.refused:
                left_out[script] = victim.refused
                print(f"{script} is left out: {victim.refused}", flush=True)
                continue
            rows += [row | {"commit": commit} for row in new]
            if any(row[fault] for row in new for fault in FAULTS):  # to be looked at
                shutil.copytree(tmp, path.parent / f"{script}_{number}", ignore=shutil.ignore_patterns("tmp"))
        write_rows(path, rows)
        faults = "; ".join(row["note"] for row in new if row["note"]) or "no faults"
        print(f"{num_kills(rows)}/{args.kills} {script}: {faults}", flush=True)
    args.out.with_suffix(".md").write_text(table(rows, left_out))
    print(table(rows, left_out))
    return 1 if num_kills(rows) < args.kills or any(row[fault] for row in rows for fault in FAULTS) else 0


# ---------------------------------------------------------------------------------------------------------------- soak


def sample(started: Started) -> dict[str, float]:
    """What all processes of a run hold together, memory in MiB, and its latest step.

    Memory is the sum of what is resident: pages that processes share count for each of them.
    """
    pids = family(started.process.pid)
    status = [read_proc(pid, "status") for pid in pids]

    def total(key: str) -> int:
        return sum(int(found[1]) for text in status if (found := re.search(rf"^{key}:\s+(\d+)", text, re.MULTILINE)))

    descriptors = 0
    for pid in pids:
        with suppress(OSError):
            descriptors += len(list(Path(f"/proc/{pid}/fd").iterdir()))
    steps = re.findall(r"^step ([\d,]+)/", started.out.read_text(), re.MULTILINE)
    return {
        "seconds": round(time.monotonic() - started.begin, 1),
        "step": int(steps[-1].replace(",", "")) if steps else 0,
        "processes": len(pids),
        "threads": total("Threads"),
        "descriptors": descriptors,
        "memory": round(total("VmRSS") / 1024, 2),
        "shared": round(total("RssShmem") / 1024, 2),
    }


def growth(rows: list[dict[str, float]], column: str) -> float:
    """By how much a line through the second half of the samples rises from its beginning to its end."""
    half = rows[len(rows) // 2 :]
    x, y = np.array([row["seconds"] for row in half]), np.array([row[column] for row in half])
    slope = np.polyfit(x - x[0], y, 1)[0]
    return float(slope * (x[-1] - x[0]))


def verdict(rows: list[dict[str, float]]) -> dict[str, tuple[float, float, float, bool]]:
    """column -> mean of the second half, its largest value, its growth, and whether it is flat.

    Flat: the line grows by less than 1 % of the mean and half a MiB; for things that are counted, by less than a half.
    """
    found = {}
    for column in ("memory", "shared", "descriptors", "threads", "processes"):
        values = [row[column] for row in rows[len(rows) // 2 :]]
        mean, grown = float(np.mean(values)), growth(rows, column)
        found[column] = mean, max(values), grown, grown < (0.01 * mean + 0.5 if column in ("memory", "shared") else 0.5)
    return found


def soak_table(script: str, rows: list[dict[str, float]], status: int) -> str:
    """The verdict as Markdown."""
    units = {"memory": "memory, MiB", "shared": "shared memory, MiB"}
    text = "| second half | mean | most | growth | flat |\n|---|---:|---:|---:|---|\n"
    for column, (mean, most, grown, flat) in verdict(rows).items():
        numbers = f"{mean:,.1f} | {most:,.1f} | {grown + 0:+,.2f}".replace("-0.00", "+0.00")
        text += f"| {units.get(column, column)} | {numbers} | {'yes' if flat else 'no'} |\n"
    minutes, steps = rows[-1]["seconds"] / 60, rows[-1]["step"]
    return f"{text}\n`{script}.py`, {minutes:.0f} minutes, {steps:,} steps, exit status {status} after SIGTERM.\n"


def soak(args: Args, flags: list[str]) -> int:
    """Run a script for so many minutes, sample what it holds, and ask it to end; returns the exit status."""
    path = args.out.with_suffix(".csv")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="soak") as tmp, path.open("w", newline="") as file:
        command = [ROOT / "cleanmarl" / f"{args.soak}.py", "--runs-dir", Path(tmp, "runs"), *flags]
        rows = []
        with Started(command, Path(tmp)) as started:
            while started.process.poll() is None and time.monotonic() - started.begin < 60 * args.minutes:
                time.sleep(args.interval)
                started.remember()
                rows.append(sample(started))
                if len(rows) == 1:
                    writer = csv.DictWriter(file, rows[0], lineterminator="\n")
                    writer.writeheader()
                writer.writerow(rows[-1])
                file.flush()
            is_early = started.process.poll() is not None
            started.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                started.process.wait(PATIENCE)
            status, left = started.process.poll(), started.end()
        found = look(Path(tmp, "runs"))
        error = started.err.read_text()
    text = soak_table(args.soak, rows, status)
    args.out.with_suffix(".md").write_text(text)
    faults = found["bad"] + found["tmp"] + found["locked"] + left
    print(text, *faults, error, sep="\n")
    is_flat = all(flat for *_, flat in verdict(rows).values())
    is_good = is_flat and not is_early and status == 128 + signal.SIGTERM
    return 0 if is_good and not faults else 1


def main(args: Args, flags: list[str]) -> int:
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, _frame: sys.exit(128 + signum))
    torch.set_num_threads(1)  # before it forks
    return soak(args, flags) if args.soak else kill_all(args)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    sys.exit(main(tyro.cli(Args, description=__doc__, args=argv[:cut]), argv[cut + 1 :]))
