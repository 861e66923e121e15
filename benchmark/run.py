"""Run one command for several environments and seeds, a few trials at a time; run it again to do what is missing.

    python benchmark/run.py --command "python cleanmarl/ppo.py" --env-ids CartPole-v1 Acrobot-v1 --num-seeds 5 \\
        --workers 2 -- --total-timesteps 500000

Everything after ` -- ` goes to every trial. A trial is its command line: the same command, environment, seed and flags
are the same trial. A finished one (its run folder has done.json) is skipped, an interrupted one (it has checkpoint.pt)
continues with --resume, any other starts anew. `RUNS_DIR/manifest.json` says of every trial what ran, when, where, at
which commit, and how it ended; its output is appended to a file in `RUNS_DIR/logs`. Exit status 0 means all finished.
SIGINT and SIGTERM are passed on to the trials as SIGTERM, so that they save; a second one makes them stop at once.
"""

import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import tyro
from speed import machine, to_argv  # benchmark/speed.py


@dataclass
class Args:
    command: str
    """command of a script that keeps run folders; `python` is the interpreter that runs this program"""
    env_ids: list[str]
    """environments"""
    num_seeds: int = 3
    """every environment is run with the seeds 1 to this"""
    workers: int = 1
    """trials at a time, each with OMP_NUM_THREADS=1"""
    runs_dir: Path = Path("runs")
    """where the run folders, the manifest and the logs go"""


def git_commit() -> str | None:
    """The commit of the working folder, with `-dirty` if files differ from it; None outside a repository."""
    argv = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    result = subprocess.run(argv, capture_output=True, text=True)
    return result.stdout.strip() or None


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


class Trial:
    """One command line, its log and its run folder."""

    def __init__(self, command: str, env_id: str, seed: int, flags: list[str], runs_dir: Path):
        self.about = {"command": command, "env_id": env_id, "seed": seed, "flags": flags}
        self.key = shlex.join([*shlex.split(command), "--env-id", env_id, "--seed", str(seed), *flags])
        self.command, self.runs_dir = command, runs_dir
        digest = hashlib.sha256(self.key.encode()).hexdigest()[:8]  # flags differ, names do not
        self.log = runs_dir / "logs" / f"{env_id.replace('/', '-')}__{seed}__{digest}.txt"

    def folder(self) -> Path | None:
        """The run folder that the trial named last; its log knows it even if this program was killed."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        found = re.findall(r"^run folder: (.+?)(?: \(resumed at step [\d,]+\))?$", text, re.MULTILINE)
        return Path(found[-1]) if found else None

    def state(self) -> str:
        """finished | interrupted (can be resumed) | new."""
        folder = self.folder()
        if folder is not None and (folder / "done.json").exists():
            return "finished"
        return "interrupted" if folder is not None and (folder / "checkpoint.pt").exists() else "new"

    def start(self) -> None:
        """Start or resume the process; BlockingIOError if the trial is running already, from whichever program."""
        argv = [*to_argv(self.key), "--runs-dir", str(self.runs_dir)]
        if self.state() == "interrupted":
            argv = [*to_argv(self.command), "--resume", str(self.folder())]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as log:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the trial inherits the lock with its output
            print(f"$ {shlex.join(argv)}", file=log, flush=True)
            self.begin = time.time()
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            # In a session of its own Ctrl-C reaches it once, through us, and not twice.
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, env=env, start_new_session=True)

    def tail(self) -> str:
        return "".join(f"    {line}\n" for line in self.log.read_text(errors="replace").splitlines()[-5:])


def write_manifest(runs_dir: Path, key: str, entry: dict) -> None:
    """Set one trial's entry in runs_dir/manifest.json, under a lock and by renaming: no reader sees half a file."""
    path = runs_dir / "manifest.json"
    with (runs_dir / "manifest.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = json.loads(path.read_text()) if path.exists() else {}
        entries[key] = entry
        path.with_suffix(".tmp").write_text(json.dumps(entries, indent=2))
        path.with_suffix(".tmp").replace(path)


def main(args: Args, flags: list[str]) -> int:
    """Run what is missing; returns the exit status."""
    program = to_argv(args.command)[0]
    if shutil.which(program) is None or min(args.num_seeds, args.workers) < 1:
        print(f"run: there must be a program {program}, and at least one seed and one worker", file=sys.stderr)
        return 2
    args.runs_dir.mkdir(parents=True, exist_ok=True)
    about = {"git_commit": git_commit(), "machine": machine()}
    seeds = range(1, args.num_seeds + 1)
    trials = [Trial(args.command, env_id, seed, flags, args.runs_dir) for env_id in args.env_ids for seed in seeds]
    waiting, running, num_failed = deque(trials), [], 0
    signals = []
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, _frame: signals.append(signum))
    num_passed_on = 0

    def report(trial: Trial, outcome: str) -> None:
        name = f"{trial.about['env_id']} seed {trial.about['seed']}"
        print(f"[{trials.index(trial) + 1}/{len(trials)}] {name}: {outcome}", flush=True)

    while running or (waiting and not signals):
        while waiting and len(running) < args.workers and not signals:
            trial = waiting.popleft()
            if trial.state() == "finished":
                report(trial, f"finished before, skipped: {trial.folder()}")
                continue
            try:
                trial.start()
            except BlockingIOError:
                num_failed += 1
                report(trial, f"already running, see {trial.log}")
                continue
            running.append(trial)
            trial.entry = {**trial.about, **about, "start": now(), "status": "running", "log": str(trial.log)}
            write_manifest(args.runs_dir, trial.key, trial.entry)
        time.sleep(0.1)
        if len(signals) > num_passed_on:
            num_passed_on = len(signals)
            for trial in running:
                trial.process.terminate()
        for trial in [t for t in running if t.process.poll() is not None]:
            running.remove(trial)
            exit_status, folder = trial.process.returncode, trial.folder()
            finished = exit_status == 0 and trial.state() == "finished"
            status = "finished" if finished else "interrupted" if signals else "failed"
            num_failed += status == "failed"
            trial.entry |= {"end": now(), "exit_status": exit_status, "status": status, "run_folder": str(folder)}
            write_manifest(args.runs_dir, trial.key, trial.entry)
            report(trial, f"{status} after {time.time() - trial.begin:.0f} s: {folder}")
            if status == "failed":
                print(f"    exit status {exit_status}, the end of {trial.log}:\n{trial.tail()}", end="", flush=True)
    if signals:
        return 128 + signals[0]
    print(f"{len(trials) - num_failed} of {len(trials)} trials finished; {args.runs_dir / 'manifest.json'}")
    return 1 if num_failed else 0


if __name__ == "__main__":
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    sys.exit(main(tyro.cli(Args, description=__doc__, args=argv[:cut]), argv[cut + 1 :]))
