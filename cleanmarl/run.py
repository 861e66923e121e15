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
import gc
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from cleanmarl.checkpoint import (
    FORMAT,
    as_arrays,
    as_tensors,
    checkpoint_path,
    load_checkpoint,
    load_states,
    not_finite,
    parameter_names,
    random_state,
    same_random_state,
    set_random_state,
    write_checkpoint,
)
from cleanmarl.cli import (
    RunError,
    UsageError,
    check,
    check_resumed,
    compiler_error,
    flag,
    import_optional,
    load_args,
    read_run,
    run_folder,
    tell,
)
from cleanmarl.envs import EnvError, MultiAgentVectorEnv, WorkerError, check_memory
from cleanmarl.evaluate import Film, FilmError, evaluate, pictures_per_second, save_video
from cleanmarl.finite import NonFiniteError, find_bad, find_bad_episode, is_finite
from cleanmarl.folder import (
    EventFile,
    as_json,
    as_table,
    check_flags,
    copy_file,
    git_commit,
    lock_folder,
    new_folder,
    version,
)
from cleanmarl.held import Held
from cleanmarl.machine import too_large

import numpy as np
import torch
import torch.nn as nn
from tqdm import tqdm

CURVE_POINTS = 1000  # a run writes about this many points per metric, however short its updates are
EVAL_SEED = 2**30  # added to the seed: training adds the step, so that evaluation meets other episodes
ECHO_SECONDS = 1  # in which a second SIGTERM is the first one again: systemd signals run.py and its trials, run.py too
LINE_SECONDS = 5  # between two lines of progress where there is no terminal
# of a Run, in a checkpoint
NUMBERS = ("step", "num_episodes", "last_point", "last_step", "last_evaluation", "last_film", "best")


def as_number(value: Any, name: str) -> float:
    """A point of a curve; UsageError that names the metric if it is no number."""
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)  # a loss has a gradient
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"the metric {name} must be a number, not {type(value).__name__} ({error})") from error


class WriteError(RunError):
    """The run folder cannot be written any more: the run stops, its last checkpoint stays as it was."""


class Run:
    """One experiment: its folder, metrics, progress and checkpoints.

    `modules` are what a checkpoint holds: anything with a state_dict. Attributes: `folder`, and `step`, the environment
    steps so far, which the script advances. Raises UsageError, before anything is written, for a folder that cannot be
    written or resumed.
    """

    def __init__(self, args: Any, script: str, **modules: Any):
        self.args, self.modules, self.script, self.source = args, modules, Path(script).stem, Path(script).resolve()
        self.step = self.num_episodes = self.last_point = self.last_step = self.last_checkpoint = 0
        self.last_evaluation, self.best = 0, -math.inf  # the step of the last one, the highest return of all
        self.last_film = 0
        self.episodes: dict[str, list[float]] = defaultdict(list)  # statistics of those that ended since the last point
        self.unwritten: dict[str, float] = {}  # the latest value of each metric since the last point
        self.is_best = False  # the checkpoint to be written next
        self.envs, self.carried, self.playing = None, (), None  # see start(), and what the checkpoint had of them
        self.bar = self.wandb = None
        self.stop_signal: int | None = None
        self.stop_time = 0.0
        self.has_learned = False  # from an update at least
        self.bad_returns = False  # or where the returns of the last episodes were NaN or infinite
        if args.track:
            wandb = _login()
        if args.capture_video:
            import_optional("moviepy", "--capture-video")
        self.held = Held(modules)
        with ExitStack() as on_error:  # what could not begin leaves no new folder and no lock
            if args.resume is None:
                self._make_folder(on_error)
            else:
                self._resume_folder(on_error)
            if args.track:
                name, config = self.folder.resolve().name, dataclasses.asdict(args)
                where = {"project": args.wandb_project_name, "entity": args.wandb_entity, "dir": str(self.folder)}
                try:
                    self.wandb = wandb.init(name=name, id=name, resume="allow", config=config, **where)
                except (wandb.Error, OSError) as error:
                    raise UsageError(f"--track: {_cause(error)} (WANDB_MODE=offline needs no network)") from error
            resumed = f" (resumed at step {self.step:,})" if self.step else ""
            tell(f"run folder: {self.folder}{resumed}")

            with self._writing():
                self.events = EventFile(self.folder)
                on_error.callback(Path(self.events.file.name).unlink, missing_ok=True)
                self.events.add_text("arguments", as_table(dataclasses.asdict(args)), self.step)
            if args.resume is not None:  # last: a run that cannot go on stays as it was
                self._take_over()
                with self._writing():  # the points after the checkpoint, which come again now
                    self.events.drop(self.step + 1)
            on_error.pop_all()
        self._check_classes()
        self.start_step, self.start_time = self.step, time.perf_counter()
        self.last_line = self.start_time

    def _check_classes(self) -> None:
        """Tell of a network that neither the script makes, whose copy is kept, nor a module that the script names."""
        names = set(re.findall(r"\w+", self.source.read_text(encoding="utf-8", errors="replace")))
        for name, module in self.modules.items():
            made_by = type(module).__module__
            file = getattr(sys.modules.get(made_by), "__file__", None) or "a notebook"
            is_named = made_by != "__main__" and made_by.partition(".")[0] in names
            if isinstance(module, nn.Module) and self.source != Path(file).resolve() and not is_named:
                kept = f"--resume, enjoy and load would take what {self.script}.py makes"
                tell(f"{name} is made by {file}: {kept}; edit a copy of {self.script}.py instead", sys.stderr)

    def _make_folder(self, on_error: ExitStack) -> None:
        args = self.args
        check_flags(args)
        env_id = re.sub(r"[^\w.=-]+", "-", args.env_id)
        name = f"{env_id}__{self.script}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
        packages = ["torch", "numpy", "gymnasium", "envpool", "pettingzoo", "mpe2", "tensorboard"]
        meta = {
            "script": self.script,
            "path": str(self.source),
            "folder": str(Path.cwd()),
            "args": vars(args),
            "command": sys.argv,
            "versions": {"python": sys.version.split()[0]} | {package: version(package) for package in packages},
            "git_commit": git_commit(),
        }
        self.folder = Path(args.runs_dir, name)
        try:
            self.folder = new_folder(self.folder)
            on_error.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self.lock = on_error.enter_context(lock_folder(self.folder))
            self._write_json("args.json", meta)
            self._keep_script()
        except OSError as error:
            reason = f"cannot write the run folder {self.folder} ({error.strerror})"
            raise UsageError(f"{reason}; choose another place with --runs-dir") from error

    def _resume_folder(self, on_error: ExitStack) -> None:
        path, total = Path(self.args.resume), self.args.total_timesteps
        self.folder = run_folder(path)
        check_resumed(self.args, self.folder, self.script)  # from Python; of a command line that has been done
        stored = load_args(type(self.args), self.folder, self.script)
        try:
            if not (self.folder / "lock").exists():
                on_error.callback((self.folder / "lock").unlink, missing_ok=True)
            self.lock = on_error.enter_context(lock_folder(self.folder))
            checkpoint, is_earlier = load_checkpoint(path), checkpoint_path(path).name != "checkpoint.pt"
            complete = (self.folder / "done.json").exists() and total <= stored.total_timesteps and not is_earlier
            check(not complete, f"{self.folder} is complete at step {checkpoint['step']:,}; raise --total-timesteps")
            self._restore(checkpoint)
        except OSError as error:
            raise UsageError(f"cannot write the run folder {self.folder} ({error.strerror})") from error

    def _take_over(self) -> None:
        """From now on a resumed run has these arguments, for the next --resume as well, and this checkpoint."""
        path, done = checkpoint_path(Path(self.args.resume)), self.folder / "done.json"
        was_done = done.read_text() if done.exists() else ""
        try:
            done.unlink(missing_ok=True)  # first: what is killed from here on can be resumed
            with suppress(UsageError):  # there need not be one; it may be newer than this checkpoint
                self.best = max(self.best, load_checkpoint(self.folder / "best.pt")["best"])
            if path.name != "checkpoint.pt":  # an earlier one
                copy_file(path, self.folder / "checkpoint.pt")
                self._drop_checkpoints()
            self._keep_script()
            meta = read_run(self.folder) | {"args": vars(self.args) | {"resume": None}}
            self._write_json("args.json", meta)
        except OSError as error:
            if was_done:
                done.write_text(was_done)
            raise UsageError(f"cannot write the run folder {self.folder} ({error.strerror})") from error

    def _keep_script(self) -> None:
        """A copy of the script as it is now: `enjoy` plays with it, and the run can be had again."""
        copy, text = self.folder / f"{self.script}.py", self.source.read_bytes()  # whatever the locale's encoding is
        if copy.exists() and copy.read_bytes() != text:
            kept = "with the flags of the run and the optimizer's settings of the checkpoint"
            tell(f"{self.script}.py has changed since the run began; it goes on as it is now, {kept}")
            earlier = self.folder / f"{self.script}-{self.step}.py"  # as it was until this step
            if copy != self.source and not earlier.exists():
                shutil.copyfile(copy, earlier)
        if copy != self.source:
            copy.write_bytes(text)

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        temporary = self.folder / f"{name}.tmp"
        with temporary.open("w") as file:
            json.dump(content, file, indent=2, default=as_json)
            file.flush()
            os.fsync(file.fileno())  # without args.json no checkpoint can be resumed
        temporary.replace(self.folder / name)

    def __enter__(self) -> "Run":
        signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup: the run goes on when its terminal is closed
            signals.remove(signal.SIGHUP)
        if threading.current_thread() is threading.main_thread():
            self.old_handlers = {s: signal.signal(s, self._on_signal) for s in signals}
        self.held.watch()
        gc.collect()
        gc.freeze()  # what was imported is not searched for garbage again: a tenth of a fast script's time
        if sys.stderr is not None and sys.stderr.isatty():  # None: it was closed before the start
            self.bar = tqdm(total=self.args.total_timesteps, initial=self.step, unit="step", dynamic_ncols=True)
        return self

    def __exit__(self, error_type, error, traceback) -> None:
        try:
            if error_type is None:
                self._finish()
            elif issubclass(error_type, NonFiniteError) and "checkpoint" not in str(error):  # of the environments
                error.args = (f"{error}; {self._last_good()}",)
            elif issubclass(error_type, Exception) and not issubclass(error_type, NonFiniteError | WriteError):
                self._take_back()
                if self.stop_signal is not None and compiler_error(error):  # Ctrl-C has ended the compiler, too
                    self.save()
                    self._stop()
                self._save_before_error()
            elif issubclass(error_type, SystemExit) and self.last_checkpoint < self.step:
                self.envs = None
                self.save()  # of several runs in one process another one had the signal
        finally:
            gc.unfreeze()
            self.held.close()
            if self.bar is not None:
                with suppress(OSError):
                    self.bar.close()
            self.events.close()
            try:
                if self.wandb is not None:
                    self.wandb.finish()
            finally:
                self.lock.close()
                for signum, handler in getattr(self, "old_handlers", {}).items():
                    signal.signal(signum, handler)

    def _finish(self) -> None:
        self.save()
        seconds = round(time.perf_counter() - self.start_time, 1)
        with self._writing():
            self._write_json("done.json", {"step": self.step, "seconds": seconds})
        self._print(f"done: {self.step:,} steps in {timedelta(seconds=round(seconds))}, saved in {self.folder}")
        if not self.has_learned and self.start_step == 0:
            self._print("  nothing was learned: no update took place in these steps")
        self._print(f"  curves: tensorboard --logdir {shlex.quote(str(self.folder))}")
        self._print(f"  play:   python -m cleanmarl.enjoy {shlex.quote(str(self.folder))}")

    def _take_back(self) -> None:
        """Steps that nothing was learned from: all environments begin anew, wherever those are that have not failed."""
        self.envs, self.step = None, max(self.last_step, self.start_step)

    def _save_before_error(self) -> None:
        """An environment that died should not cost the run."""
        try:
            self.save()
            tell(f"saved step {self.step:,} in {self.folder} before the error below", sys.stderr)
        except RunError as second:
            tell(f"{second} (before the error below)", sys.stderr)

    def _on_signal(self, signum: int, frame: Any) -> None:
        if self.stop_signal is None:
            self.stop_signal, self.stop_time = signum, time.monotonic()
            self._print("stopping as soon as what is under way is saved (again to stop at once)")
            return
        is_echo = signum == self.stop_signal == signal.SIGTERM and time.monotonic() - self.stop_time < ECHO_SECONDS
        if signum != signal.SIGHUP and not is_echo:  # SIGHUP comes from the kernel and from the shell
            raise KeyboardInterrupt(signum)  # asked twice: stop at once

    def start(self, envs: Any, *carried: Any) -> tuple:
        """(obs, info, *carried) to go on from: those of the checkpoint, if it has the state of the environments.

        Else, as at the beginning of a run, those of new episodes. `carried` is what a script remembers of the episodes
        that are being played, nested arrays: what a recurrent network remembers, the steps so far. A checkpoint
        holds what `run.carried` is at the time.
        """
        self.envs, self.carried = envs, carried
        if self.playing is None:
            return *envs.reset(seed=self.args.seed + self.step), *carried
        playing, self.playing = as_arrays(self.playing), None  # once: others, made later, begin new episodes
        self.carried = playing["carried"]
        return *envs.restore(playing["envs"]), *self.carried

    def check_rollout(self, rollout: Any, next_obs: np.ndarray) -> None:
        """NonFiniteError if an observation or a reward is NaN or infinite; it names environment, agent and step.

        `rollout` has obs, reward and, if any, state, arrays (T, N, ...); next_obs (N, ...) is what follows it. `step`
        is that before the rollout.
        """
        if bad := find_bad(rollout.obs, rollout.reward, next_obs, getattr(rollout, "state", None), self._suspects):
            what, n, t = bad
            raise self._non_finite(f"{what} in environment {n}", self.step + t * rollout.reward.shape[1])

    def _suspects(self, shape: tuple[int, ...]) -> np.ndarray:
        """Where (N,) or (N, A) the return of the episode under way, or of one that has just ended, is not finite."""
        statistics = getattr(self.envs, "statistics", self.envs)
        returns = getattr(statistics, "returns", getattr(statistics, "episode_returns", 0.0))
        bad = ~np.isfinite(returns) | self.bad_returns
        return bad.reshape(shape) if np.ndim(bad) else np.full(shape, bad)  # environments that do not tell which

    def check_unrolls(self, slot: np.void) -> None:
        """The same for what an actor has played (cleanmarl.actors)."""
        unrolls = slot["unrolls"]
        reward = unrolls["reward"] if "reward" in unrolls.dtype.names else unrolls["last_reward"][:, 1:]
        if bad := find_bad(unrolls["obs"].swapaxes(0, 1), reward.swapaxes(0, 1)):  # (T + 1, N, ...), (T, N)
            where = f"environment {bad[1]} of actor {slot['actor']}"
            raise self._non_finite(f"{bad[0]} in {where}", self.step + bad[2] * len(unrolls))
        if "final_obs" in unrolls.dtype.names:  # of truncated episodes it is learned from; elsewhere it is anything
            n, t = np.nonzero(unrolls["truncation"])
            if not is_finite(last := unrolls["final_obs"][n, t]):
                row, column = np.argwhere(~np.isfinite(last))[0]
                what = f"the last observation of an episode is {last[row, column]}"
                where = f"environment {n[row]} of actor {slot['actor']}"
                raise self._non_finite(f"{what} in {where}", self.step + (t[row] + 1) * len(unrolls))

    def log_episodes(self, info: dict[str, Any], episodes: Sequence = ()) -> None:
        """Count the episodes that ended (info's `episode` and `_episode`); the next point shows their mean.

        `episodes`: as a replay buffer has them, of which the latest have just ended, those of environments in their
        order; a number in them that is NaN or infinite raises NonFiniteError, as in `check_rollout`.
        """
        ended = info["_episode"]
        returns = info["episode"]["r"][ended].reshape(ended.sum(), -1)  # (episodes, agents)
        for n, episode, of_agents in zip(np.flatnonzero(ended)[::-1], reversed(episodes), returns[::-1]):
            if bad := find_bad_episode(episode, of_agents):
                step = self.step - (len(episode.reward) - bad[1]) * len(ended)
                raise self._non_finite(f"{bad[0]} in environment {n}", step)
        if not np.isfinite(returns).all():  # the next check of a rollout says which step it was
            self.bad_returns = ~np.isfinite(info["episode"]["r"])
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
        Raises NonFiniteError if a return, or a metric named `..._loss`, is not finite, SystemExit after a signal.
        """
        metrics = {key: as_number(value, key) for key, value in metrics.items()}
        self.has_learned |= bool(self.held.stepped) or any(key.endswith("_loss") for key in metrics)
        self.held.check()
        if self.bad_returns is not False:
            where = np.argwhere(self.bad_returns)[0]
            raise self._non_finite(f"the return in environment {where[0]} is not finite")
        bad = {key: value for key, value in metrics.items() if not math.isfinite(value)}
        if any(key.endswith("_loss") for key in bad):  # all of them: one bad minibatch spoils the other losses, too
            raise self._non_finite(", ".join(f"{key} is {value}" for key, value in bad.items()))
        self.unwritten |= metrics  # also those of updates without a point
        total = self.args.total_timesteps
        is_last = self.step + (self.step - self.last_step) > total  # another update of this size would not fit
        self.last_step = self.step
        is_due = is_last or self.step - self.last_point >= total // CURVE_POINTS
        if may_write and is_due:
            self.last_point = self.step
            episodes = {key: float(np.mean(values)) for key, values in self.episodes.items()}
            episodes["rollout/num_episodes"] = self.num_episodes
            self.episodes.clear()
            self.write(self.unwritten | episodes | {"time/SPS": self._sps()})
            self.unwritten = {}
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

    @property
    def evaluation_due(self) -> bool:
        """Whether --eval-interval asks for an evaluation now, or --video-interval for a film."""
        return self._to_play() or self._to_film()

    def _to_play(self) -> bool:
        interval = self.args.eval_interval if self.args.eval_episodes > 0 else 0
        return interval > 0 and self.step // interval > self.last_evaluation // interval

    def _to_film(self) -> bool:
        interval = self.args.video_interval if self.args.capture_video else 0
        return interval > 0 and self.step // interval > self.last_film // interval

    def evaluate(self, make_envs: Callable, policy: Callable, num_envs: int = 1) -> None:
        """Play --eval-episodes in `make_envs(args, num_envs)`, log the result, and keep the best one's checkpoint.

        Called when `evaluation_due`, and at the end: then what has just been played is not played again.
        --capture-video films an episode. Nothing of it changes what training draws.
        """
        # a resumed run that has no step left comes here after its loop, whatever is due
        at_end, num_episodes = not self.evaluation_due or self.step == self.start_step, self.args.eval_episodes
        to_play = num_episodes > 0 and (self._to_play() or at_end) and self.last_evaluation < self.step
        to_film = self.args.capture_video and (self._to_film() or at_end) and self.last_film < self.step
        if at_end:
            self.save()  # an evaluation may take long, and training is done

        def stoppable(*seen):
            if self.stop_signal is not None:
                raise SystemExit
            return policy(*seen)

        try:
            if to_play:
                with same_random_state():
                    envs = make_envs(self.args, min(num_envs, num_episodes))
                    seed = self.args.seed + EVAL_SEED
                    metrics = self.play(envs, stoppable, num_episodes, seed, report=self._show_evaluation)
                    envs.close()
                self._log_evaluation(metrics)
                if self.is_best or self.last_checkpoint == self.step:
                    self.save()
            if to_film:
                with same_random_state():
                    self._film(make_envs, stoppable)
        except SystemExit:
            self.save()
            self._stop()

    def play(self, envs, policy: Callable, num_episodes: int, seed: int, **seen: Any) -> dict[str, float]:
        """`evaluate`, with dropout and batch norm, which an edited network may have, as they are when it is used."""
        layers = [x for module in self.modules.values() if isinstance(module, nn.Module) for x in module.modules()]
        layers = [x for x in layers if x.training]
        try:
            for layer in layers:
                layer.training = False
            return evaluate(envs, policy, num_episodes, seed, **seen)
        finally:
            for layer in layers:
                layer.training = True

    def _show_evaluation(self, num_played: int) -> None:
        if time.perf_counter() - self.last_line >= LINE_SECONDS:
            self.last_line = time.perf_counter()
            self._print(f"evaluation at step {self.step:,}: {num_played} of {self.args.eval_episodes} episodes")

    def _log_evaluation(self, metrics: dict[str, float]) -> None:
        self.write(metrics)
        mean, std = metrics["eval/ep_reward"], metrics["eval/std_ep_reward"]
        length = f"length {metrics['eval/ep_length']:.1f}"
        self._print(f"evaluation: return {mean:.2f} ± {std:.2f}, {length}, {self.args.eval_episodes} episodes")
        self.last_evaluation = self.step
        if mean > self.best:
            self.best, self.is_best = mean, True

    def _film(self, make_envs: Callable, policy: Callable) -> None:
        frames = Film()
        self.last_film, path = self.step, self.folder / "videos" / f"step-{self.step}.mp4"
        try:
            with closing(make_envs(self.args, 1, render_mode="rgb_array")) as envs:
                self.play(envs, policy, 1, self.args.seed + EVAL_SEED, frames=frames)
            save_video(frames, path, pictures_per_second(envs))
        except (EnvError, WorkerError, FilmError) as error:  # what cannot be filmed should not cost the run
            self._print(f"no video: {' '.join(str(error).split())}")
            return
        if self.wandb is not None:
            self.wandb.log({"video": import_optional("wandb", "--track").Video(str(path))}, step=self.step)

    def _non_finite(self, what: str, step: int | None = None) -> NonFiniteError:
        return NonFiniteError(f"{what} at step {self.step if step is None else step:,}; {self._last_good()}")

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
        self._print(f"stopped at step {self.step:,}; continue with --resume {shlex.quote(str(self.folder))}")
        raise SystemExit(128 + (self.stop_signal or 0))

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
        checkpoint: dict[str, Any] = {"format": FORMAT, "script": self.script}
        checkpoint |= {name: getattr(self, name) for name in NUMBERS}
        checkpoint |= {"episodes": dict(self.episodes), "unwritten": self.unwritten, "random": random_state()}
        checkpoint["modules"] = {name: module.state_dict() for name, module in self.modules.items()}
        checkpoint["parameters"] = parameter_names(self.modules)
        snapshot = getattr(self.envs, "snapshot", lambda: None)()
        checkpoint["playing"] = None if snapshot is None else as_tensors({"envs": snapshot, "carried": self.carried})
        for name, state in {**checkpoint["modules"], "environments": checkpoint["playing"]}.items():
            if bad := not_finite(state, name):
                raise self._non_finite(f"{bad} is not finite")
        path = self.folder / "checkpoint.pt"
        with self._writing():
            if self.args.keep_checkpoints > 1 and self.last_checkpoint < self.step and path.exists():
                copy_file(path, self.folder / f"checkpoint-{self.last_checkpoint}.pt")
            if self.is_best:  # first: what is killed in between plays this evaluation again
                write_checkpoint(checkpoint, self.folder / "best.pt")
                copy_file(self.folder / "best.pt", path)
            else:
                write_checkpoint(checkpoint, path)
            self._drop_checkpoints()
        self.last_checkpoint, self.is_best = self.step, False

    def _drop_checkpoints(self) -> None:
        """Those that are too old to be kept, and those of later steps, where an earlier one has been resumed."""
        kept = {int(path.stem[11:]): path for path in self.folder.glob("checkpoint-*.pt") if path.stem[11:].isdigit()}
        earlier = sorted(step for step in kept if step < self.step)
        for step in kept.keys() - set(earlier[::-1][: self.args.keep_checkpoints - 1]):
            kept[step].unlink(missing_ok=True)

    def _restore(self, checkpoint: dict[str, Any]) -> None:
        load_states(checkpoint, self.args.resume, **self.modules)
        set_random_state(checkpoint["random"])
        for name in NUMBERS:
            setattr(self, name, checkpoint.get(name, getattr(self, name)))
        self.episodes.update(checkpoint.get("episodes", {}))
        self.unwritten = checkpoint.get("unwritten", {})
        self.last_checkpoint, self.playing = self.step, checkpoint.get("playing")


def _login() -> Any:
    """The package wandb, logged in (or offline, if WANDB_MODE says so); UsageError if it cannot be."""
    wandb = import_optional("wandb", "--track")
    try:
        wandb.login()
    except wandb.Error as error:
        raise UsageError(f"--track: {_cause(error)} (WANDB_MODE=offline needs no login)") from error
    except ValueError as error:  # of what WANDB_MODE, WANDB_BASE_URL and others say
        raise UsageError(f"--track: {' '.join(str(error).split())[:200]}") from error
    return wandb


def _cause(error: BaseException | None) -> str:
    """What the system said: "No space left on device"."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        error = error.__context__
    return reason


def check_rollout_size(rollout: tuple) -> None:
    """Raise EnvError unless there is memory for a rollout and the shuffled copy of it that is learned from.

    Arrays of zeros, as a rollout is at first, take memory only when they are written.
    """
    check_memory("a rollout of --num-envs x --num-steps", 2 * sum(x.nbytes for x in rollout))


def check_replay_size(envs: MultiAgentVectorEnv, args: Any) -> None:
    """Raise EnvError unless there is memory for a replay buffer of `args.buffer_size` whole episodes, and steps.

    With --save-buffer it is copied for each checkpoint. Where `envs` do not say how long an episode may be, a line
    tells what the buffer may take at most; where they do, one tells that the run may learn nothing.
    """
    sizes = {name: getattr(args, name, 0) for name in ("batch_size", "on_policy_episodes")}  # DOP has the second
    size = max(sizes.values())
    first = f"{flag(max(sizes, key=sizes.__getitem__))} {size} episodes"
    message = f"--total-timesteps {args.total_timesteps} ends before there are {first}"
    check(args.total_timesteps >= size, message)  # of a step or more
    if not envs.time_limit:
        tell("how long an episode may be is not known: the run learns, saves and stops between episodes", sys.stderr)
    elif args.total_timesteps < size * envs.time_limit:
        full = f"{first} of up to {envs.time_limit} steps are {size * envs.time_limit:,}"
        tell(f"--total-timesteps {args.total_timesteps:,} may end before the first update: {full}", sys.stderr)
    spaces, (A, K) = (envs.single_observation_space, envs.single_state_space), envs.real_actions.shape
    one_step = sum(math.prod(space.shape) * np.dtype(space.dtype).itemsize for space in spaces)  # what is seen,
    one_step += A * (K + 4 * K + 4 * 4)  # masks and actions, and four numbers of each agent: reward, alive and so on
    limit = envs.time_limit or args.total_timesteps
    longest, copies = min(args.buffer_size * limit, args.total_timesteps), 2 if args.save_buffer else 1
    what = f"a replay buffer of --buffer-size {args.buffer_size} episodes of {limit} steps"
    what += " and its copy for a checkpoint (--no-save-buffer needs none)" if args.save_buffer else ""
    if envs.time_limit:
        check_memory(what, copies * one_step * longest)
    elif warning := too_large(what, copies * one_step * longest):
        tell(f"if episodes were as long as the run, {warning}", sys.stderr)
