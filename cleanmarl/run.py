"""What every experiment needs and no algorithm cares about: run folder, metrics, progress, checkpoints, resume.

    with Run(args, __file__, agent=agent, optimizer=optimizer) as run:
        while run.step < args.total_timesteps:
            ...                                           # collect and learn
            run.step += num_envs * num_steps              # environment steps: the x-axis of everything
            run.log({"train/policy_loss": policy_loss})   # once per update: write, show, save if due, stop if asked
        run.evaluate(make_envs, policy)

A run folder `runs/{env_id}__{script}__{seed}__{time}` holds `args.json` (arguments, command, versions, commit), a copy
of the script, TensorBoard events, `checkpoint.pt` and, once the run is complete, `done.json`. Its file `lock` is locked
while a process writes into the folder.
"""

import dataclasses
import fcntl
import gc
import hashlib
import importlib.metadata
import json
import math
import mmap
import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from tqdm import tqdm

from cleanmarl.cli import RunError, UsageError, check, import_optional, load_args, read_run, tell
from cleanmarl.envs import EnvError, WorkerError
from cleanmarl.evaluate import evaluate, save_video

CURVE_POINTS = 1000  # a run writes about this many points per metric, however short its updates are
EVAL_SEED = 2**30  # added to the seed: training adds the step, so that evaluation meets other episodes
LINE_SECONDS = 5  # between two lines of progress where there is no terminal
FORMAT = 1  # of checkpoints: raised when an older one can no longer be read
DIGEST_SIZE = hashlib.sha256().digest_size


class NonFiniteError(RunError):
    """A loss or a number of a checkpoint is NaN or infinite: the run stops, its last checkpoint stays as it was."""


class WriteError(RunError):
    """The run folder cannot be written any more: the run stops, its last checkpoint stays as it was."""


def write_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """What torch.save writes, and its SHA-256, which torch.load passes over; OSError or RuntimeError if it cannot.

    Atomically: a crash at any moment leaves the previous file or the new one whole.
    """
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb+") as file:
            torch.save(checkpoint, file)
            file.seek(0)
            file.write(hashlib.file_digest(file, "sha256").digest())  # after all that was read
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """The latest checkpoint of a run folder, on the CPU; UsageError if it has none, or one that is not what it was."""
    path = Path(folder) / "checkpoint.pt"
    check(path.exists(), f"{folder} has no checkpoint.pt: the run ended before it saved one")
    try:
        with path.open("rb") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
                is_whole = hashlib.sha256(view[:-DIGEST_SIZE]).digest() == view[-DIGEST_SIZE:]
            check(is_whole, f"{path} is damaged, or of another version of cleanmarl")
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UsageError(f"{path} is damaged and cannot be read") from error
    is_ours = isinstance(checkpoint, dict) and checkpoint.get("format") == FORMAT
    check(is_ours, f"{path} is no checkpoint of this version of cleanmarl")
    script, wanted = checkpoint["script"], read_run(folder)["script"]
    check(script == wanted, f"{path} is a checkpoint of {script}.py, not of {wanted}.py")
    return checkpoint


def load_states(checkpoint: dict[str, Any], folder: Path, **modules: Any) -> None:
    """Give each of the modules its state in the checkpoint of a run folder; UsageError if it does not fit."""
    for name, module in modules.items():
        try:
            module.load_state_dict(checkpoint["modules"][name])
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UsageError(
                f"the {name} of {folder}/checkpoint.pt does not fit the script as it is ({reason})"
            ) from error


def not_finite(x: Any, name: str) -> str | None:
    """The name of the first part of nested dicts, lists and tensors with a number that is NaN or infinite, or None."""
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        # If a sum is finite, so are its parts: quicker than to look at each, and needs no memory in a large buffer.
        return None if x.sum().isfinite() or x.isfinite().all() else name
    if isinstance(x, dict | list | tuple):
        items = x.items() if isinstance(x, dict) else enumerate(x)
        return next(filter(None, (not_finite(value, f"{name}.{key}") for key, value in items)), None)
    return name if isinstance(x, float) and not math.isfinite(x) else None


class EventFile:
    """A new event file for TensorBoard. It writes at once, so that OSError comes where a point is added."""

    def __init__(self, folder: Path, purge_step: int | None):
        _wait_for_next_second(folder)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
        self.file = (folder / name).open("xb")
        self._add(file_version="brain.Event:2")
        if purge_step is not None:
            self._add(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def _add(self, **event) -> None:
        RecordWriter(self.file).write(Event(wall_time=time.time(), **event).SerializeToString())
        self.file.flush()

    def add(self, metrics: dict[str, float], step: int) -> None:
        """Write a point of each metric, in one event: one for each would cost a fast script a fifth of its time."""
        values = [Summary.Value(tag=key, simple_value=value) for key, value in metrics.items()]
        self._add(step=step, summary=Summary(value=values))

    def close(self) -> None:
        with suppress(OSError):  # what could not be written has been said
            self.file.close()


class Run:
    """One experiment: its folder, metrics, progress and checkpoints.

    `modules` are what a checkpoint holds: anything with a state_dict. Attributes: `folder`, and `step`, the environment
    steps so far, which the script advances. Raises UsageError, before anything is written, for a folder that cannot be
    written or resumed.
    """

    def __init__(self, args: Any, script: str, **modules: Any):
        self.args, self.modules, self.script, self.source = args, modules, Path(script).stem, Path(script).resolve()
        self.step = self.num_episodes = 0
        self.episodes = defaultdict(list)  # statistics of the episodes that ended since the last point
        self.stop_signal = self.bar = self.wandb = None
        if args.track:
            wandb = _login()
        if args.capture_video:
            import_optional("moviepy", "--capture-video")
        with ExitStack() as on_error:  # what could not begin leaves no new folder and no lock
            if args.resume is None:
                self._make_folder(on_error)
            else:
                self._resume_folder(on_error)
            resumed = f" (resumed at step {self.step:,})" if self.step else ""
            tell(f"run folder: {self.folder}{resumed}")
            if args.track:
                name, config = self.folder.name, dataclasses.asdict(args)
                where = {"project": args.wandb_project_name, "entity": args.wandb_entity, "dir": str(self.folder)}
                self.wandb = wandb.init(name=name, id=name, resume="allow", config=config, **where)

            self.last_point = self.last_checkpoint = self.last_step = self.step
            # Events written after the checkpoint come again now: purge_step tells every reader to drop the first ones.
            with self._writing():
                self.events = EventFile(self.folder, purge_step=self.step + 1 if self.step else None)
            on_error.pop_all()
        self.start_step, self.start_time = self.step, time.perf_counter()
        self.last_line = self.start_time

    def _make_folder(self, on_error: ExitStack) -> None:
        args = self.args
        env_id = re.sub(r"[^\w.=-]+", "-", args.env_id)
        name = f"{env_id}__{self.script}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
        packages = ["torch", "numpy", "gymnasium", "envpool", "pettingzoo", "mpe2", "tensorboard"]
        meta = {
            "script": self.script,
            "path": str(self.source),
            "args": dataclasses.asdict(args),
            "command": sys.argv,
            "versions": {"python": sys.version.split()[0]} | {package: _version(package) for package in packages},
            "git_commit": _git_commit(),
        }
        self.folder = Path(args.runs_dir, name)
        try:
            self.folder = _new_folder(self.folder)
            on_error.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self.lock = on_error.enter_context(_lock(self.folder))
            self._write_json("args.json", meta)
            self._keep_script()
        except OSError as error:
            reason = f"cannot write the run folder {self.folder} ({error.strerror})"
            raise UsageError(f"{reason}; choose another place with --runs-dir") from error

    def _resume_folder(self, on_error: ExitStack) -> None:
        self.folder, total = Path(self.args.resume), self.args.total_timesteps
        stored = load_args(type(self.args), self.folder, self.script)
        try:
            if not (self.folder / "lock").exists():
                on_error.callback((self.folder / "lock").unlink, missing_ok=True)
            self.lock = on_error.enter_context(_lock(self.folder))
            checkpoint = load_checkpoint(self.folder)
            complete = (self.folder / "done.json").exists() and total <= stored.total_timesteps
            check(not complete, f"{self.folder} is complete at step {checkpoint['step']:,}; raise --total-timesteps")
            self._restore(checkpoint)
            # From now on these are the run's arguments, for the next --resume as well.
            meta = read_run(self.folder) | {"args": dataclasses.asdict(self.args) | {"resume": None}}
            self._write_json("args.json", meta)
            self._keep_script()
            (self.folder / "done.json").unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(f"cannot write the run folder {self.folder} ({error.strerror})") from error

    def _keep_script(self) -> None:
        """A copy of the script as it is now: `enjoy` plays with it, and the run can be had again."""
        copy, text = self.folder / f"{self.script}.py", self.source.read_text()
        if copy.exists() and copy.read_text() != text:
            tell(f"{self.script}.py has changed since the run began; it goes on as it is now")
        if copy != self.source:
            copy.write_text(text)

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        temporary = self.folder / f"{name}.tmp"
        temporary.write_text(json.dumps(content, indent=2, default=str))
        temporary.replace(self.folder / name)

    def __enter__(self) -> "Run":
        signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup: the run goes on when its terminal is closed
            signals.remove(signal.SIGHUP)
        if threading.current_thread() is threading.main_thread():
            self.old_handlers = {s: signal.signal(s, self._on_signal) for s in signals}
        gc.collect()
        gc.freeze()  # what was imported is not searched for garbage again: a tenth of a fast script's time
        if sys.stderr.isatty():
            self.bar = tqdm(total=self.args.total_timesteps, initial=self.step, unit="step", dynamic_ncols=True)
        return self

    def __exit__(self, error_type, error, traceback) -> None:
        try:
            if error_type is None:
                self._finish()
            elif issubclass(error_type, Exception) and not issubclass(error_type, NonFiniteError | WriteError):
                self._save_before(error)
        finally:
            for signum, handler in getattr(self, "old_handlers", {}).items():
                signal.signal(signum, handler)
            gc.unfreeze()
            if self.bar is not None:
                with suppress(OSError):
                    self.bar.close()
            self.events.close()
            if self.wandb is not None:
                self.wandb.finish()
            self.lock.close()

    def _finish(self) -> None:
        self.save()
        seconds = round(time.perf_counter() - self.start_time, 1)
        with self._writing():
            self._write_json("done.json", {"step": self.step, "seconds": seconds})
        self._print(f"done: {self.step:,} steps in {timedelta(seconds=round(seconds))}, saved in {self.folder}")
        self._print(f"  curves: tensorboard --logdir {self.folder}")
        self._print(f"  play:   python -m cleanmarl.enjoy {self.folder}")

    def _save_before(self, error: Exception) -> None:
        """An environment that died should not cost the run."""
        try:
            self.save()
            tell(f"saved step {self.step:,} in {self.folder} before the error below", sys.stderr)
        except RunError as second:
            tell(f"{second} (before the error below)", sys.stderr)

    def _on_signal(self, signum: int, frame: Any) -> None:
        if self.stop_signal is None:
            self.stop_signal = signum
            self._print("stopping as soon as what is under way is saved (again to stop at once)")
        elif signum != signal.SIGHUP:  # which the kernel and the shell both send
            raise KeyboardInterrupt  # asked twice: stop at once

    def log_episodes(self, info: dict[str, Any]) -> None:
        """Count the episodes that ended (info's `episode` and `_episode`); the next point shows their mean."""
        ended = info["_episode"]
        returns = info["episode"]["r"][ended].reshape(ended.sum(), -1)  # (episodes, agents)
        if not np.isfinite(returns).all():
            episode, agent = np.argwhere(~np.isfinite(returns))[0]
            of_agent = f" of agent {agent}" if returns.shape[1] > 1 else ""
            where = f"environment {np.flatnonzero(ended)[episode]}"
            raise self._non_finite(f"the return{of_agent} in {where} is {returns[episode, agent]}")
        self.num_episodes += len(returns)
        self.episodes["rollout/ep_reward"] += returns.sum(1).tolist()
        self.episodes["rollout/ep_length"] += info["episode"]["l"][ended].tolist()
        if returns.shape[1] > 1:
            for agent, return_ in enumerate(returns.T):
                self.episodes[f"rollout/ep_reward_agent_{agent}"] += return_.tolist()
        if "battle_won" in info["episode"]:
            self.episodes["rollout/battle_won"] += info["episode"]["battle_won"][ended].tolist()

    def log(self, metrics: dict[str, Any], may_write: bool = True) -> None:
        """Once per update: check the losses, write a point of every curve if one is due, save if due, stop if asked to.

        With may_write=False no point is due.
        Raises NonFiniteError if a metric whose name ends in `_loss` is not finite, SystemExit after SIGINT or SIGTERM.
        """
        metrics = {key: float(value) for key, value in metrics.items()}
        for key, value in metrics.items():
            if key.endswith("_loss") and not math.isfinite(value):
                raise self._non_finite(f"{key} is {value}")
        total = self.args.total_timesteps
        is_last = self.step + (self.step - self.last_step) > total  # another update of this size would not fit
        self.last_step = self.step
        is_due = is_last or self.step - self.last_point >= total // CURVE_POINTS
        if (may_write and is_due) or self.stop_signal is not None:
            self.last_point = self.step
            episodes = {key: float(np.mean(values)) for key, values in self.episodes.items()}
            episodes["rollout/num_episodes"] = self.num_episodes
            self.episodes.clear()
            self.write(metrics | episodes | {"time/SPS": self._sps()})
            self._show(episodes, is_last)
        if self.stop_signal is not None:
            self.save()
            self._stop()
        if self.step - self.last_checkpoint >= self.args.checkpoint_interval:
            self.save()

    def write(self, metrics: dict[str, float]) -> None:
        """Write a point of each metric at the current step, whether or not one is due."""
        with self._writing():
            self.events.add(metrics, self.step)
        if self.wandb is not None:
            self.wandb.log(metrics, step=self.step)

    def evaluate(self, make_envs: Callable, policy: Callable, num_envs: int = 1) -> None:
        """Play --eval-episodes in `make_envs(args, num_envs)`, log the result; film one more if --capture-video."""
        args = self.args
        self.save()  # an evaluation may take long, and training is done

        def stoppable(*seen):
            if self.stop_signal is not None:
                self._stop()
            return policy(*seen)

        if args.eval_episodes > 0:
            envs = make_envs(args, num_envs)
            metrics = evaluate(envs, stoppable, args.eval_episodes, seed=args.seed + EVAL_SEED)
            envs.close()
            self.write(metrics)
            mean, std = metrics["eval/ep_reward"], metrics["eval/std_ep_reward"]
            length = f"length {metrics['eval/ep_length']:.1f}"
            self._print(f"evaluation: return {mean:.2f} ± {std:.2f}, {length}, {args.eval_episodes} episodes")
        if args.capture_video:
            try:
                envs, frames = make_envs(args, 1, render_mode="rgb_array"), []
            except (EnvError, WorkerError) as error:  # an environment without pictures should not cost the run
                self._print(f"no video: {error}")
                return
            evaluate(envs, stoppable, 1, seed=args.seed + EVAL_SEED, frames=frames)
            envs.close()
            save_video(frames, self.folder / "videos" / f"step-{self.step}.mp4")

    def _non_finite(self, what: str) -> NonFiniteError:
        return NonFiniteError(f"{what} at step {self.step:,}; {self._last_good()}")

    def _last_good(self) -> str:
        if (self.folder / "checkpoint.pt").exists():
            return f"last good checkpoint: step {self.last_checkpoint:,} in {self.folder}"
        return f"there is no checkpoint yet in {self.folder}"

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A full disk, or a folder that is gone, is one line: why, which step is lost, and what is left."""
        try:
            yield
        except (OSError, RuntimeError) as error:  # torch tells the first as the second
            reason = f"{self.folder} cannot be written ({_cause(error)}) at step {self.step:,}"
            raise WriteError(f"{reason}; {self._last_good()}") from error

    def _stop(self) -> None:
        self._print(f"stopped at step {self.step:,}; continue with --resume {self.folder}")
        raise SystemExit(128 + self.stop_signal)

    def _sps(self) -> float:
        return (self.step - self.start_step) / (time.perf_counter() - self.start_time)

    def _show(self, episodes: dict[str, float], is_last: bool) -> None:
        return_ = episodes.get("rollout/ep_reward")
        if self.bar is not None:
            with suppress(OSError):  # of a terminal that was closed
                self.bar.update(self.step - self.bar.n)
            if return_ is not None:
                self.bar.set_postfix_str(f"return {return_:.1f}", refresh=False)
        elif time.perf_counter() - self.last_line >= LINE_SECONDS or is_last:
            self.last_line, total, sps = time.perf_counter(), self.args.total_timesteps, self._sps()
            left = timedelta(seconds=max(0, round((total - self.step) / sps)))  # the last episodes may go beyond
            latest = "" if return_ is None else f"  return {return_:.1f}"
            self._print(f"step {self.step:,}/{total:,}  {self.step / total:.0%}  SPS {sps:,.0f}{latest}  ETA {left}")

    def _print(self, line: str) -> None:
        with suppress(OSError):
            if self.bar is not None:
                self.bar.clear()  # the line takes its place
        tell(line)

    def save(self) -> None:
        """Write checkpoint.pt: whole and finite, or not at all.

        Raises NonFiniteError if a number of it is NaN or infinite (losses are those before the last step of an update,
        and no loss tells of a normaliser's statistics), and WriteError if the disk is full or gone; both leave the
        checkpoint as it was.
        """
        name, keys, *numbers = np.random.get_state()  # noqa: NPY002
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        randoms = {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": cuda}
        randoms["numpy"] = (name, torch.from_numpy(keys.astype(np.int64)), *numbers)
        checkpoint = {"format": FORMAT, "script": self.script, "step": self.step, "num_episodes": self.num_episodes}
        checkpoint |= {"random": randoms, "modules": {name: x.state_dict() for name, x in self.modules.items()}}
        for name, state in checkpoint["modules"].items():
            if bad := not_finite(state, name):
                raise self._non_finite(f"{bad} is not finite")
        with self._writing():
            write_checkpoint(checkpoint, self.folder / "checkpoint.pt")
        self.last_checkpoint = self.step

    def _restore(self, checkpoint: dict[str, Any]) -> None:
        self.step, self.num_episodes, randoms = checkpoint["step"], checkpoint["num_episodes"], checkpoint["random"]
        load_states(checkpoint, self.folder, **self.modules)
        random.setstate(randoms["python"])
        torch.set_rng_state(randoms["torch"])
        if torch.cuda.is_available() and randoms["cuda"]:
            torch.cuda.set_rng_state_all(randoms["cuda"])
        name, keys, *numbers = randoms["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *numbers))  # noqa: NPY002


def _login() -> Any:
    """The package wandb, logged in (or offline, if WANDB_MODE says so); UsageError if it cannot be."""
    wandb = import_optional("wandb", "--track")
    try:
        wandb.login()
    except wandb.Error as error:
        raise UsageError(f"--track: {_cause(error)} (WANDB_MODE=offline needs no login)") from error
    return wandb


def _wait_for_next_second(folder: Path) -> None:
    """Wait until a new event file is read after those of the folder: they are read in the order of their names.

    A name begins with the second in which the file was made; what follows, pid and number, need not grow.
    """
    made = max((int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*")), default=0)
    check(made < time.time() + 60, f"{folder} has events of the future: one of two clocks is wrong")
    while time.time() < made + 1:
        time.sleep(0.01)


def _new_folder(folder: Path) -> Path:
    """Make it; two runs of one seed that start in one second get two folders."""
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            folder = folder.with_name(f"{folder.name}-again")


def _lock(folder: Path) -> TextIO:
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


def _cause(error: BaseException | None) -> str:
    """What the system said: "No space left on device"."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        error = error.__context__
    return reason


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
