"""Run one command for several environments and seeds, a few trials at a time; run it again to do what is missing.

    python benchmark/run.py --command "python cleanmarl/ppo.py" --env-ids CartPole-v1 Acrobot-v1 --num-seeds 5 \\
        --workers 2 -- --total-timesteps 500000

Everything after ` -- ` goes to every trial. A trial is its command line: the same command, environment, seed and flags
are the same trial. A finished one (its run folder has done.json) is skipped, an interrupted one (it has checkpoint.pt)
continues with --resume, any other starts anew; one that fails is tried once more, but for wrong input (status 2), and
one that another program runs is waited for. `RUNS_DIR/manifest.json` says of every trial what ran, when, where, at
which commit, what it took and how it ended; its output is appended to a file in `RUNS_DIR/logs`. Exit status 0 means
all finished. SIGINT and SIGTERM are passed on to the trials as SIGTERM, so that they save; a second one makes them stop
at once, and a third ends them with SIGKILL.

The same grid on several machines that share the folder, each with this Python at the same path:

    --backend ray --address HOST:6379   tasks of one CPU each on a Ray cluster that is there
    --backend slurm                     writes RUNS_DIR/grid.sbatch, an array job of what is missing, and submits it;
                                        sbatch reads SBATCH_PARTITION, SBATCH_TIMELIMIT, SBATCH_ACCOUNT
"""

import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import tyro
from speed import machine, refuse, to_argv  # benchmark/speed.py

TRIES = 2  # of a trial that fails
MISUSED = 2  # exit status of a script that cannot run as it was asked to: another try would end like it
OF_THE_GRID = {"--env-id", "--seed", "--runs-dir", "--resume"}  # flags of the script that are not the user's to give
OF_THE_END = ("end", "exit_status", "wall_seconds", "cpu_seconds")  # what an entry has of a trial that ended
PACKAGES = ("cleanmarl", "numpy", "torch", "gymnasium", "envpool", "pettingzoo", "mpe2")
SBATCH = """#!/bin/bash
#SBATCH --job-name=cleanmarl
#SBATCH --array={array}%{workers}
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=1
#SBATCH --output="{output}"
cd {folder}
exec {command}
"""


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
    backend: Literal["local", "ray", "slurm"] = "local"
    """where trials run: processes of this machine, tasks of a Ray cluster, or a Slurm array job"""
    address: str = "auto"
    """of the Ray cluster, HOST:PORT; auto: the one that this machine belongs to"""
    index: int | None = None
    """run this trial of the grid only, counted from 0"""


def git_commit() -> str | None:
    """The commit of the working folder, with `-dirty` if files differ from it; None outside a repository."""
    argv = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(argv, capture_output=True, text=True).stdout.strip() or None
    except OSError:  # no git
        return None


def versions() -> dict[str, str]:
    """Of the packages that the results depend on, as far as they are installed."""
    found = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def spelled_alike(words: list[str]) -> list[str]:
    """Words of a command line, the same for --a_b=c and --a-b c: these are one trial."""
    alike = []
    for word in words:
        name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        alike += [name.replace("_", "-") if word.startswith("--") else name, *([value] if equals else [])]
    return alike


def in_one_order(words: list[str]) -> list[str]:
    """Flags and their values by the names of the flags, so that another order makes no other trial.

    Where a flag is given twice, or with and without no-, the last one still counts.
    """
    flags: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not flags:
            flags.append([word])
        else:
            flags[-1].append(word)
    flags.sort(key=lambda flag: flag[0].removeprefix("--").removeprefix("no-"))
    return [word for flag in flags for word in flag]


class Trial:
    """One command line, its log, its run folder and its entry in the manifest."""

    def __init__(self, command: str, env_id: str, seed: int, flags: list[str], runs_dir: Path):
        self.about = {"command": command, "env_id": env_id, "seed": seed, "flags": flags}
        first = [*shlex.split(command), "--env-id", env_id, "--seed", str(seed)]
        self.words = [*first, *flags]
        self.key = shlex.join([*spelled_alike(first), *in_one_order(spelled_alike(flags))])
        self.command, self.runs_dir = command, runs_dir
        digest = hashlib.sha256(self.key.encode()).hexdigest()[:8]  # flags differ, names do not
        self.log = runs_dir / "logs" / f"{env_id.replace('/', '-')}__{seed}__{digest}.txt"

    def __str__(self) -> str:
        return f"{self.about['env_id']} seed {self.about['seed']}"

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def folder(self) -> Path | None:
        """The run folder that the trial named last; its log knows it even if this program was killed.

        Where the log is no longer there, the manifest knows it.
        By its name in `runs_dir`: the path was relative to the folder of then, and all of it may have moved. A line may
        begin with other output (a bar of progress), and one that only speaks of a run folder names none that is there.
        """
        found = re.findall(r"run folder: (.+?)(?: \(resumed at step [\d,]+\))?$", self.output(), re.MULTILINE)
        if not found and (known := read_manifest(self.runs_dir).get(self.key, {}).get("run_folder")):  # no log any more
            found = [known]
        folders = [self.runs_dir / Path(path).name for path in reversed(found)]
        return next((folder for folder in folders if folder.is_dir()), None)

    def folder_name(self) -> str | None:
        return None if (folder := self.folder()) is None else str(folder)

    def state(self) -> str:
        """finished | interrupted (can be resumed) | new."""
        folder = self.folder()
        if folder is not None and (folder / "done.json").exists():
            return "finished"
        return "interrupted" if folder is not None and (folder / "checkpoint.pt").exists() else "new"

    def other_version(self) -> str:
        """`diff A B` of the run folder's copy of the script and the script as it is now, if they differ; else ""."""
        with suppress(OSError, ValueError, KeyError):  # no such copy, or no script that is there now
            meta = json.loads((self.folder() / "args.json").read_text())
            copy, script = self.folder() / f"{meta['script']}.py", Path(meta["path"])
            if copy.read_bytes() != script.read_bytes():
                return shlex.join(["diff", str(copy), str(script)])
        return ""

    def progress(self) -> float:
        """The share of the trial that is done, by the last line of progress in its log."""
        shares = re.findall(r"^step .*?(\d+)%", self.output(), re.MULTILINE)
        return int(shares[-1]) / 100 if shares else 0.0

    def tail(self) -> str:
        return "".join(f"    {line}\n" for line in self.output().splitlines()[-5:])

    def run(self, stops: Callable[[], int] = lambda: 0) -> str:
        """Run or resume it to its end, a second time if it fails; returns finished | interrupted | failed.

        `stops()` is how often it was asked to stop; each time the process gets a SIGTERM, the third time, and all that
        it has started, a SIGKILL. Waits while another program runs the trial, and returns "finished" without a process
        if there is nothing to do.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as log:
            is_told = False
            while not lock(log):
                if stops():
                    return "interrupted"
                if not is_told:
                    say(f"{self}: another program or trial runs it, which is waited for: {self.log}\n")
                    is_told = True
                time.sleep(0.1)
            entry = read_manifest(self.runs_dir).get(self.key, {})
            before, status, tries = entry.get("tries", []), self.state(), 0
            # not where a try has no end, as of a trial that was killed with its runner
            is_known = entry.get("status") != "running" and (not before or "wall_seconds" in entry)
            if status == "finished" and is_open(entry):  # it went on without this program, and nobody knows until when
                known = {key: value for key, value in entry.items() if key not in OF_THE_END}
                write_manifest(self.runs_dir, self.key, known | {"status": status, "run_folder": self.folder_name()})
            while status != "finished" and tries < TRIES and not stops():
                entry = {**self.about, "start": now(), "status": "running", "log": str(self.log)}
                entry |= {"git_commit": git_commit(), "machine": machine(), "versions": versions()}
                write_manifest(self.runs_dir, self.key, {**entry, "tries": before})
                tries, attempt = tries + 1, self._attempt(log, stops)
                finished = self.state() == "finished"  # whatever its exit status: a library may crash after the end
                status = "finished" if finished else "interrupted" if stops() else "failed"
                before = [*before, attempt]
                entry |= {"end": now(), "status": status, "exit_status": attempt["exit_status"]}
                if is_known:
                    entry |= {key: round(sum(t[key] for t in before), 2) for key in ("wall_seconds", "cpu_seconds")}
                entry |= {"run_folder": self.folder_name(), "tries": before}
                write_manifest(self.runs_dir, self.key, entry)
                if attempt["exit_status"] == MISUSED:
                    break
        return status if status in ("finished", "failed") else "interrupted"

    def _attempt(self, log: Any, stops: Callable[[], int]) -> dict[str, Any]:
        """One process, to its end: when it began, its seconds of wall and CPU time (with its children's), its exit."""
        argv = [*to_argv(shlex.join(self.words)), "--runs-dir", str(self.runs_dir)]
        if self.state() == "interrupted":
            argv = [*to_argv(self.command), "--resume", str(self.folder())]
        print(f"$ {shlex.join(argv)}", file=log, flush=True)
        begin, clock, asked, pid = time.time(), time.monotonic(), 0, 0
        # It inherits the lock with its output. In a session of its own Ctrl-C reaches it once, through us, not twice.
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=env, start_new_session=True)
        while pid == 0:
            if stops() > asked:
                asked += 1
                if asked < 3:
                    os.kill(process.pid, signal.SIGTERM)
                else:  # it hangs
                    os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.05)
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        process.returncode = os.waitstatus_to_exitcode(status)
        return {
            "start": begin,  # seconds since 1970, as in the event files
            "wall_seconds": round(time.monotonic() - clock, 2),
            "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
            "exit_status": process.returncode,
        }


def lock(file: Any) -> bool:
    """Lock a file until it is closed here and in whoever inherits it; False if another program holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_manifest(runs_dir: Path) -> dict[str, dict]:
    """OSError if it is cut off, as after a crash of the machine: its trials need only their logs and run folders."""
    path = runs_dir / "manifest.json"
    try:
        manifest = json.loads(path.read_text()) if path.exists() else {}
        if not isinstance(manifest, dict) or not all(isinstance(entry, dict) for entry in manifest.values()):
            raise ValueError("no table of trials")
        return manifest
    except ValueError as error:
        raise OSError(f"{path} is damaged ({error}); move it away, finished trials are skipped all the same") from error


def is_open(entry: dict) -> bool:
    """Whether an entry of the manifest says that its trial has not finished; no entry says nothing."""
    return entry.get("status", "finished") != "finished"


def write_manifest(runs_dir: Path, key: str, entry: dict) -> None:
    """Set one trial's entry in runs_dir/manifest.json, under a lock and by renaming: no reader sees half a file."""
    path = runs_dir / "manifest.json"
    with (runs_dir / "manifest.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        entries = read_manifest(runs_dir) | {key: entry}
        with path.with_suffix(".tmp").open("w") as new:
            new.write(json.dumps(entries, indent=2))
            new.flush()
            os.fsync(new.fileno())  # on the disk before it takes its name
        path.with_suffix(".tmp").replace(path)


def say(text: str) -> None:
    """Print. If nobody reads it any more, as after `| head`, the trials go on all the same."""
    try:
        print(text, end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Progress:
    """One line for the whole grid. On a terminal it stays in its place; elsewhere it follows each trial that ends."""

    def __init__(self, trials: list[Trial]):
        self.trials, self.begin, self.is_terminal = trials, time.time(), sys.stdout.isatty()
        self.outcomes: dict[str, str] = {}  # key of a trial -> how it ended
        self.before = {trial.key: trial.progress() for trial in trials}  # what earlier calls have done
        self.shown = 0.0

    def ended(self, trial: Trial, outcome: str, seconds: float | None) -> None:
        """seconds: None if nobody knows them, as of a trial whose own runner was killed."""
        self.outcomes[trial.key] = outcome
        after = "" if seconds is None else f" after {timedelta(seconds=round(seconds))}"
        text = f"{trial}: {outcome}{after}, {trial.folder() or 'no run folder yet'}"
        if not self.is_terminal or outcome == "failed":
            say(f"{self._clear()}{text} | {self.line()}\n")
        if outcome == "failed":
            status = read_manifest(trial.runs_dir).get(trial.key, {}).get("exit_status") or 0
            killed = f"killed by signal {-status}; " if status < 0 else ""  # of which its output says nothing
            say(f"    {killed}the end of {trial.log}:\n{trial.tail()}")

    def show(self) -> None:
        if self.is_terminal and time.time() - self.shown > 1:
            self.shown = time.time()
            line = self.line()[: shutil.get_terminal_size().columns - 1]  # of a second row nothing would be cleared
            say(f"{self._clear()}{line}")

    def line(self) -> str:
        manifest = read_manifest(self.trials[0].runs_dir)
        begin = datetime.fromtimestamp(self.begin - 1).astimezone().isoformat(timespec="seconds")
        open_trials = [trial for trial in self.trials if trial.key not in self.outcomes]
        under_way = {key: entry for key, entry in manifest.items() if entry.get("status") == "running"}
        of_now = {key for key, entry in under_way.items() if entry["start"] >= begin}
        running = [trial for trial in open_trials if trial.key in of_now]
        ended = list(self.outcomes.values())
        counts = f"{ended.count('finished')} of {len(self.trials)} done, {len(running)} running"
        work_done = sum(1 - self.before[key] for key in self.outcomes)
        work_done += sum(trial.progress() - self.before[trial.key] for trial in running)
        work_left = len(self.trials) - sum(self.before.values()) - work_done
        left = (time.time() - self.begin) * work_left / max(work_done, 1e-9)
        eta = f", ETA {timedelta(seconds=round(left))}" if work_done > 0 and open_trials else ""
        return f"{counts}, {ended.count('failed')} failed{eta}"

    def _clear(self) -> str:
        return "\r\x1b[K" if self.is_terminal else ""


def argv_of(args: Args, flags: list[str], index: str) -> list[str]:
    """This program's command line for one trial of the grid."""
    argv = [sys.executable, str(Path(__file__).resolve()), "--command", args.command, "--env-ids", *args.env_ids]
    argv += ["--num-seeds", str(args.num_seeds), "--runs-dir", str(args.runs_dir.absolute()), "--index", index]
    return [*argv, "--", *flags]


@contextmanager
def local(args: Args, flags: list[str], stops: Callable[[], int]) -> Iterator[Callable[[int, Trial], Future]]:
    """Trials are processes of this machine."""
    with ThreadPoolExecutor(args.workers) as pool:
        yield lambda index, trial: pool.submit(trial.run, stops)


@contextmanager
def on_ray(args: Args, flags: list[str], stops: Callable[[], int]) -> Iterator[Callable[[int, Trial], Future]]:
    """Trials are tasks of a Ray cluster: each is this program with --index, in this folder, on any node."""
    import ray

    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    host, _, port = (args.address or "").removeprefix("ray://").rpartition(":")
    try:
        if host:
            socket.create_connection((host, int(port)), timeout=5).close()  # Ray itself would try for minutes
        ray.init(address=args.address, log_to_driver=False, logging_level="error")
    except (OSError, ValueError):
        hint = "begin one: ray start --head"
        token = Path.home() / ".ray" / "auth_token"  # every local ray.init() leaves it, every `ray start` asks for it
        if token.exists() and os.environ.get("RAY_AUTH_MODE") != "token":
            hint += f"; if it wants the token {token}: export RAY_AUTH_MODE=token"
        refuse(f"there is no Ray cluster at --address {args.address}; {hint}")
    for signum, handler in handlers.items():  # which ray replaces
        signal.signal(signum, handler)

    def run_index(argv: list[str], folder: str) -> str:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a cancellation; a cluster begun by nohup ignores it
        process = subprocess.Popen(argv, cwd=folder, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            while process.poll() is None:
                time.sleep(0.2)  # a cancellation comes between two of these: it does not end a wait()
        except BaseException:  # cancelled: the trial saves
            process.terminate()
            return "finished" if process.wait() == 0 else "interrupted"
        return "finished" if process.returncode == 0 else "failed"

    task, folder = ray.remote(num_cpus=1, max_retries=TRIES - 1)(run_index), str(Path.cwd())
    with ThreadPoolExecutor(args.workers) as pool:

        def wait(index: int, trial: Trial) -> str:
            if stops():
                return "interrupted"
            ref = task.remote(argv_of(args, flags, str(index)), folder)
            while not ray.wait([ref], timeout=0.2)[0]:
                if stops():
                    ray.cancel(ref)
                    break
            try:
                return ray.get(ref)
            except ray.exceptions.RayError:
                return "interrupted" if stops() else "failed"

        yield lambda index, trial: pool.submit(wait, index, trial)
    ray.shutdown()


def run_all(args: Args, flags: list[str], trials: dict[int, Trial]) -> int:
    """Run the trials (by their index in the grid), with one line of progress; returns the exit status."""
    signals: list[int] = []
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, _frame: signals.append(signum))
    progress, backend = Progress(list(trials.values())), {"local": local, "ray": on_ray}[args.backend]
    with backend(args, flags, lambda: len(signals)) as submit:
        pending = {}
        for index, trial in trials.items():
            if trial.state() == "finished":
                progress.outcomes[trial.key], progress.before[trial.key] = "finished", 1.0
                if diff := trial.other_version():
                    say(f"{trial}: finished before by another version of the script ({diff}); skipped\n")
                else:
                    say(f"{trial}: finished before, skipped: {trial.folder()}\n")
            else:
                pending[submit(index, trial)] = trial
        while pending:
            for future in [future for future in pending if future.done()]:
                trial = pending.pop(future)
                entry = read_manifest(args.runs_dir).get(trial.key, {})
                if future.result() != "interrupted" or "end" in entry:
                    progress.ended(trial, future.result(), entry.get("wall_seconds"))
            progress.show()
            time.sleep(0.1)
    ended = list(progress.outcomes.values())
    manifest = args.runs_dir / "manifest.json"
    say(f"{progress._clear()}{ended.count('finished')} of {len(trials)} trials finished; {manifest}\n")
    if signals:
        return 128 + signals[0]
    return 0 if ended.count("finished") == len(trials) else 1


def submit_slurm(args: Args, flags: list[str], trials: dict[int, Trial]) -> int:
    """Write RUNS_DIR/grid.sbatch, whose array has the trials that are not finished, and submit it."""
    missing = [index for index, trial in trials.items() if trial.state() != "finished"]
    if not missing:
        print(f"all {len(trials)} trials are finished")
        return 0
    (args.runs_dir / "logs").mkdir(parents=True, exist_ok=True)
    script = args.runs_dir / "grid.sbatch"
    command = shlex.join(argv_of(args, flags, "INDEX")).replace("--index INDEX", '--index "$SLURM_ARRAY_TASK_ID"', 1)
    folder = str(args.runs_dir.absolute()).replace("%", "%%")  # Slurm fills in what follows a single one
    output = f"{folder}/logs/slurm-%A_%a.txt"
    places = {"array": ",".join(map(str, missing)), "workers": args.workers, "output": output}
    script.write_text(SBATCH.format(**places, folder=shlex.quote(str(Path.cwd())), command=command))
    if shutil.which("sbatch") is None:
        submit = shlex.join(["sbatch", str(script)])
        print(f"wrote {script}; this machine has no sbatch: where there is one, `{submit}` submits it")
        return 0
    return subprocess.run(["sbatch", str(script)]).returncode


def main(args: Args, flags: list[str]) -> int:
    """Run what is missing; returns the exit status."""
    program = to_argv(args.command)[0]
    if shutil.which(program) is None or min(args.num_seeds, args.workers) < 1:
        print(f"run: there must be a program {program}, and at least one seed and one worker", file=sys.stderr)
        return 2
    if given := {flag.partition("=")[0].replace("_", "-") for flag in [*to_argv(args.command), *flags]} & OF_THE_GRID:
        message = f"run: {' '.join(sorted(given))} is the grid's: give --num-seeds, --env-ids, --runs-dir, before --"
        print(f"{message}; the same call again resumes what was interrupted", file=sys.stderr)
        return 2
    if not args.env_ids:
        print("run: --env-ids has no environment", file=sys.stderr)
        return 2
    seeds = range(1, args.num_seeds + 1)
    env_ids = dict.fromkeys(args.env_ids)  # each once
    grid = [Trial(args.command, env_id, seed, flags, args.runs_dir) for env_id in env_ids for seed in seeds]
    trials = dict(enumerate(grid))
    if args.index is not None:
        if args.index not in trials:
            print(f"run: --index must be from 0 to {len(grid) - 1}, not {args.index}", file=sys.stderr)
            return 2
        trials = {args.index: trials[args.index]}
    args.runs_dir.mkdir(parents=True, exist_ok=True)
    entries = read_manifest(args.runs_dir)
    for trial in trials.values():
        if is_open(entries.get(trial.key, {})) and trial.state() == "finished":
            trial.run()
    return submit_slurm(args, flags, trials) if args.backend == "slurm" else run_all(args, flags, trials)


if __name__ == "__main__":
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__, args=argv[:cut]), argv[cut + 1 :]))
    except OSError as error:  # a folder that cannot be written
        sys.exit(f"run: {error}")
