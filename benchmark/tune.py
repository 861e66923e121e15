"""Search the settings of any script with Optuna; run it again to go on, after a kill or with more trials.

    python benchmark/tune.py --command "python cleanmarl/mappo.py" --env-ids mpe/simple_spread_v3 \\
        --params learning_rate=1e-4..1e-2 update_epochs=1..15 activation=tanh,relu norm_adv \\
        --num-trials 30 --workers 2 --runs-dir runs/tune -- --total-timesteps 400000 --eval-interval 40000

A parameter is a field of the script's `Args`: NAME=LOW..HIGH (on a log scale if HIGH is ten times LOW or more, as rates
are), NAME=A,B,C, or NAME alone if its annotation says all of its values (a bool, a Literal, a UnitFloat). A range must
lie in that of the annotation. The first trial has the script's defaults, if the ranges hold them.

A trial runs every environment and seed, one after the other, as `benchmark/run.py` does: with logs, a manifest, a
second try, and with --resume for what was interrupted. Its score is the mean of their last evaluations; with several
environments each is scaled so that 0 is random and 1 the best known of benchmark/yardsticks.csv. Evaluations on the way
(--eval-interval) decide whether a trial's best one so far is worse than the median of the others at that step: then it
is stopped. The study is RUNS_DIR/study.db (SQLite), its table RUNS_DIR/trials.csv; a folder is for one search.
"""

import dataclasses
import hashlib
import importlib.util
import json
import math
import shlex
import signal
import statistics
import sys
import threading
import time
import typing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from cleanmarl.cli import UsageError, check, check_range, flag, interval

import optuna
import tyro
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState
from report import EVAL, yardsticks  # benchmark/report.py
from run import OF_THE_GRID, Trial, lock  # benchmark/run.py
from speed import to_argv  # benchmark/speed.py
from sqlalchemy import URL
from sqlalchemy.exc import SQLAlchemyError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

START_UP = 5  # trials before any is compared with the median
RUN_PLACES = 1_000_000  # more than a curve has: the second run of a trial is compared with the second of another
POLL_SECONDS = 2.0
LOCK_SECONDS = 600  # that another program, as a dashboard or a backup, may lock the study


class RunFailed(Exception):
    """A run of a trial ended twice with an error, or has nothing to judge it by."""


@dataclass
class Args:
    command: str
    """command of a script; `python` is the interpreter that runs this program"""
    env_ids: list[str]
    """environments"""
    params: list[str]
    """what to search: NAME=LOW..HIGH, NAME=A,B,C or NAME"""
    num_trials: int = 20
    """trials in all, with those of earlier calls"""
    num_seeds: int = 1
    """every trial runs each environment with the seeds 1 to this"""
    workers: int = 1
    """trials at a time"""
    metric: str = EVAL
    """what is maximised"""
    runs_dir: Path = Path("runs/tune")
    """where the study, the run folders, the manifest and the logs go"""


def script_of(command: str) -> ModuleType:
    """The script that a command runs, by path or with -m, as a module; it has a class Args."""
    argv = to_argv(command)
    spec = None
    path = next((word for word in argv if word.endswith(".py")), None)
    folder = str(Path(path).parent.resolve() if path else Path.cwd())  # for what the script imports, as Python does
    sys.path.insert(0, folder)
    try:
        if "-m" in argv[:-1]:
            with suppress(ModuleNotFoundError):  # of its package
                spec = importlib.util.find_spec(argv[argv.index("-m") + 1])
        elif path and Path(path).exists():
            spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        check(spec is not None, f"there is no script in: {command}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where dataclasses look for annotations
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            raise UsageError(f"{spec.origin} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)
    check(hasattr(module, "Args"), f"{spec.origin} has no Args")
    return module


def plain(hint: Any) -> Any:
    """The type in a hint without its limits and without None: float for UnitFloat | None."""
    if typing.get_origin(hint) is typing.Annotated:
        return plain(typing.get_args(hint)[0])
    inner = [x for x in typing.get_args(hint) if x is not type(None)]
    return plain(inner[0]) if type(None) in typing.get_args(hint) else hint


def name_of(text: str) -> str:
    """The field of Args that a word of --params is about, written as in Python or as on a command line."""
    return text.partition("=")[0].lstrip("-").replace("-", "_")


def read_param(text: str, args_class: type) -> BaseDistribution:
    """NAME=LOW..HIGH | NAME=A,B,C | NAME -> a distribution inside the range of the annotation, or UsageError."""
    name, values = name_of(text), text.partition("=")[2]
    hint = typing.get_type_hints(args_class, include_extras=True).get(name)
    check(hint is not None, f"--params {text}: the script has no {flag(name)}")
    kind = plain(hint)
    if kind is bool or typing.get_origin(kind) is Literal:
        listed = [False, True] if kind is bool else list(typing.get_args(kind))
        chosen = [value for value in listed if str(value) in values.split(",")] if values else listed
        check(len(chosen) == len(values.split(",")) or not values, f"--params {text}: there are only {listed}")
        return CategoricalDistribution(chosen)
    check(kind in (int, float), f"--params {text}: {flag(name)} is no number, bool or Literal")
    low, dots, high = values.partition("..")
    try:
        if values and not dots:
            ends = [kind(word) for word in values.split(",")]
        elif values:
            ends = [kind(low), kind(high)]
        else:
            least, _, most, _ = interval(hint)
            ends = [least, most]
            message = f"--params {name} needs a range, {name}=LOW..HIGH: its annotation has no two ends"
            check(all(map(math.isfinite, ends)), message)
    except ValueError as error:
        raise UsageError(f"--params {text}: {error}") from error
    for end in ends if values else ():
        check_range(flag(name), end, hint)
    if values and not dots:
        return CategoricalDistribution(ends)
    low, high = ends
    check(low < high, f"--params {text}: the range is empty")
    make = IntDistribution if kind is int else FloatDistribution
    return make(low, high, log=low > 0 and high >= 10 * low)


def default_params(args_class: type, space: dict[str, BaseDistribution]) -> dict[str, Any] | None:
    """The script's defaults of the parameters, if the space has them."""
    params = {field.name: field.default for field in dataclasses.fields(args_class) if field.name in space}
    for name, distribution in space.items():
        if isinstance(distribution, CategoricalDistribution):
            inside = params[name] in distribution.choices
        else:
            inside = params[name] is not None and distribution.low <= params[name] <= distribution.high
        if not inside:
            return None
    return params


def to_flags(params: dict[str, Any]) -> list[str]:
    """Parameters as words of a command line, the same for the same parameters, so that a run is found again."""
    words = []
    for name, value in params.items():
        if isinstance(value, bool):
            words.append(flag(name if value else f"no_{name}"))
        else:
            words += [flag(name), f"{value:.6g}" if isinstance(value, float) else str(value)]
    return words


def scales(env_ids: list[str], metric: str) -> dict[str, tuple[float, float]]:
    """Random and best-known score of each environment; of a single one (0, 1), which changes nothing."""
    if len(env_ids) == 1:
        return {env_ids[0]: (0.0, 1.0)}
    known = yardsticks()
    known = known[known.metric == metric.partition("/")[2]]
    known = known.pivot_table(index="env_id", columns="kind", values="score")
    known = known.reindex(index=env_ids, columns=["random", "best"])
    missing = known.index[known.isna().any(axis=1)]
    check(not len(missing), f"benchmark/yardsticks.csv has no random and best {metric} of {', '.join(missing)}")
    return {env_id: (row.random, row.best) for env_id, row in known.iterrows()}


class Search:
    """A study and what its trials need. A trial is a run of each environment and seed; its value their mean score."""

    def __init__(self, args: Args, flags: list[str], stops: Callable[[], int]):
        numbers = min(args.num_seeds, args.workers, args.num_trials)
        check(numbers > 0, "--num-seeds, --workers and --num-trials must be at least 1")
        check(bool(args.env_ids), "--env-ids has no environment")
        names = [name_of(text) for text in args.params]
        twice = {flag(name) for name in names if names.count(name) > 1}
        check(not twice, f"--params has {', '.join(sorted(twice))} twice")
        args.env_ids = list(dict.fromkeys(args.env_ids))  # each once
        given = {word.partition("=")[0].replace("_", "-") for word in [*to_argv(args.command), *flags]}
        own = (given | set(map(flag, names))) & OF_THE_GRID
        message = f"{' '.join(sorted(own))} is the search's: give --num-seeds, --env-ids, --runs-dir, before --"
        check(not own, f"{message}; the same call again resumes what was interrupted")
        self.args, self.flags, self.stops = args, flags, stops
        module = script_of(args.command)
        self.script, self.digest = module.Args, hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()
        self.space = {name_of(text): read_param(text, self.script) for text in args.params}
        both = given & {form for name in self.space for form in (flag(name), flag(f"no_{name}"))}
        check(not both, f"{' '.join(sorted(both))} is given, and --params searches it")
        fields = {field.name for field in dataclasses.fields(self.script)}
        # off-policy scripts evaluate a few episodes now and then, too: too noisy to stop a trial by
        self.fixed = ["--eval-steps", "0"] if "eval_steps" in fields and "--eval-steps" not in given else []
        self.scales = scales(args.env_ids, args.metric)
        args.runs_dir.mkdir(parents=True, exist_ok=True)
        self.file = (args.runs_dir / "study.lock").open("a")
        check(lock(self.file), f"another program is searching in {args.runs_dir}")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        database = URL.create("sqlite", database=str(args.runs_dir / "study.db"))
        patience = {"connect_args": {"timeout": LOCK_SECONDS}}
        self.study = optuna.create_study(
            storage=optuna.storages.RDBStorage(str(database), engine_kwargs=patience),
            study_name="tune",
            direction="maximize",
            pruner=optuna.pruners.MedianPruner(n_startup_trials=START_UP, n_warmup_steps=0),
            load_if_exists=True,
        )
        # of its own for each call: with the same one again the next trials would be the first ones again
        self.study.sampler = optuna.samplers.TPESampler(seed=1 + len(self.study.trials))
        self.check_same()
        if not self.study.trials:
            if (params := default_params(self.script, self.space)) is not None:
                self.study.enqueue_trial(params)
            else:
                print("no trial has the defaults: one of them is outside the range that --params gives", flush=True)
        for trial in self.study.get_trials(states=[TrialState.RUNNING]):  # of a call that was killed: first of all
            self.study.tell(trial.number, state=TrialState.FAIL)
            self.study.enqueue_trial(trial.params)
        self.num_open, self.lock = args.num_trials - len(self.ended()), threading.Lock()

    def check_same(self) -> None:
        """UsageError if the trials of the folder are of another search: their scores cannot be compared."""
        args, held = self.args, self.study.user_attrs
        search = {"--command": args.command, "--env-ids": args.env_ids, "--params": args.params}
        search |= {"--num-seeds": args.num_seeds, "--metric": args.metric, "flags after --": self.flags}
        for name, value in search.items():
            words = shlex.join(value) if isinstance(value, list) else str(value)
            message = f"{args.runs_dir} holds a search with {name} '{held.get(name)}', not '{words}'"
            check(held.get(name, words) == words, f"{message}; choose another --runs-dir")
            self.study.set_user_attr(name, words)
        if held.get("script", self.digest) != self.digest:
            print("the script has changed since the trials before: their scores are of another version", flush=True)
        self.study.set_user_attr("script", self.digest)

    def ended(self) -> list[optuna.trial.FrozenTrial]:
        """The trials that count: complete, stopped early, or failed by themselves."""
        states = (TrialState.COMPLETE, TrialState.PRUNED)
        return [trial for trial in self.study.trials if trial.state in states or "error" in trial.user_attrs]

    def work(self) -> None:
        """Run trials until there are enough."""
        while not self.stops():
            with self.lock:
                if self.num_open <= 0:
                    return
                self.num_open -= 1
                trial = self.study.ask(self.space)
            value, state = None, None
            try:
                value = self.value(trial)
            except optuna.TrialPruned:
                state = TrialState.PRUNED
            except RunFailed as error:
                trial.set_user_attr("error", str(error))
                state = TrialState.FAIL
            with self.lock:  # so that two that end at once are counted one after the other
                if value is not None or state is not None:  # else it was interrupted
                    self.study.tell(trial, value, state)
                self.show(trial)

    def value(self, trial: optuna.Trial) -> float | None:
        """The mean score of the runs; None if they were interrupted. Raises TrialPruned, RunFailed."""
        scores: list[float] = []  # of the runs that are over
        for seed in range(1, self.args.num_seeds + 1):
            for env_id in self.args.env_ids:
                flags = [*self.flags, *self.fixed, *to_flags(trial.params)]
                run = Trial(self.args.command, env_id, seed, flags, self.args.runs_dir)
                curve = self.play(run, trial, scores)
                if curve is None:
                    return None
                scores.append(curve[-1])
        return statistics.mean(scores)

    def play(self, run: Trial, trial: optuna.Trial, scores: list[float]) -> list[float] | None:
        """One run to its end, each evaluation told to the study; its curve, or None if it was interrupted."""
        curve: list[float] = []
        last, looked, is_pruned = -1, 0.0, False

        def look() -> None:
            nonlocal last
            for step, score in self.curve(run)[len(curve) :]:
                curve.append(score)
                place = step // self.interval(run)  # rollouts of other lengths end a little later: the same place
                if place > last:
                    last = place
                    trial.report(statistics.mean([*scores, score]), len(scores) * RUN_PLACES + place)

        def stops() -> int:
            nonlocal looked, is_pruned
            if not is_pruned and time.monotonic() - looked > POLL_SECONDS:
                look()
                looked, is_pruned = time.monotonic(), trial.should_prune()
            return is_pruned + self.stops()

        status = run.run(stops)
        if is_pruned:
            raise optuna.TrialPruned
        if status == "interrupted":
            return None
        look()
        if status == "failed" or not curve:
            raise RunFailed(f"no {self.args.metric}, the end of {run.log}:\n{run.tail()}")
        if not math.isfinite(curve[-1]):
            raise RunFailed(f"{self.args.metric} is {curve[-1]} in {run.folder()}")
        return curve

    def interval(self, run: Trial) -> int:
        """Environment steps between two places of a run's curve at which trials are compared."""
        path = run.folder() / "args.json"
        args = json.loads(path.read_text())["args"] if path.exists() else {}
        total = args.get("total_timesteps", 1)
        if self.args.metric == EVAL and "eval_interval" in args:
            return args["eval_interval"] or 2 * total  # without any on the way its end is the one place
        return math.ceil(total / 100)

    def curve(self, run: Trial) -> list[tuple[int, float]]:
        """The steps and scores of a run's evaluations so far."""
        folder = run.folder()
        if folder is None:
            return []
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        points = events.Scalars(self.args.metric) if self.args.metric in events.Tags()["scalars"] else []
        random, best = self.scales[run.about["env_id"]]
        return [(point.step, (point.value - random) / (best - random)) for point in points]

    def show(self, trial: optuna.Trial) -> None:
        """A line for a trial that ended, and the table of all."""
        frozen = self.study.trials[trial.number]
        at = " at" if frozen.state == TrialState.PRUNED else ""  # its score of then, and so far
        score = "" if frozen.value is None else f"{at} {frozen.value:.4g}"
        state = "interrupted" if frozen.state == TrialState.RUNNING else frozen.state.name.lower()
        words = shlex.join(to_flags(trial.params))
        print(f"{len(self.ended())} of {self.args.num_trials}: {state}{score}: {words}", flush=True)
        if "error" in frozen.user_attrs:
            print(frozen.user_attrs["error"], end="", flush=True)
        columns = ("number", "state", "value", "duration", "params")
        table = self.study.trials_dataframe(columns)
        table.loc[table.state != "COMPLETE", "value"] = math.nan  # of fewer steps, or environments
        table.to_csv(self.args.runs_dir / "trials.csv", index=False)


def main(args: Args, flags: list[str]) -> int:
    """Search until there are enough trials; returns the exit status."""
    signals: list[int] = []
    try:
        search = Search(args, flags, lambda: len(signals))
    except UsageError as error:
        print(f"tune: {error}", file=sys.stderr)
        return 2
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, _frame: signals.append(signum))
    with ThreadPoolExecutor(args.workers) as pool:
        for worker in [pool.submit(search.work) for _ in range(args.workers)]:
            worker.result()
    if signals:
        return 128 + signals[0]
    if not search.study.get_trials(states=[TrialState.COMPLETE]):
        return 1
    best, env_id = search.study.best_trial, args.env_ids[0] if len(args.env_ids) == 1 else "ENV_ID"
    line = shlex.join(["--env-id", env_id, *flags, *to_flags(best.params)])
    print(f"best: {best.value:.4g}, trial {best.number} of trials.csv: {args.command} {line}")
    return 0


if __name__ == "__main__":
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__, args=argv[:cut]), argv[cut + 1 :]))
    except OSError as error:  # a folder that cannot be written
        sys.exit(f"tune: {error}")
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:  # a full disk, or a damaged file
        sys.exit(f"tune: study.db cannot be read or written ({' '.join(str(error).split())[:200]})")
