"""Run folders -> one tidy table -> curves, performance profiles, final results, and a page to look at them.

    python benchmark/report.py runs/spread runs/listener --out docs/results/mappo_mpe --note "the defaults"

Writes beside OUT data/NAME.csv: script, env_id, settings, seed, step, cpu_seconds, wall_seconds, metric, value, thinned
to what is drawn; its caption's words go to data/figures.json. From these two alone come NAME.svg (one panel per
environment, one curve per script and settings), NAME.md (caption, final results beside random and best-known scores)
and report.html, one page for all figures of the folder, which needs no network. `python benchmark/redraw.py` makes all
of docs/results anew.

- Settings are the flags that differ from the script's defaults, those that change no learning left out.
- A curve is the mean over seeds, each interpolated onto one grid of steps. Its band, and the interval behind a final
  result, is the range of the seeds if there are 2 to 4, and the 95 % t interval of the mean from 5 on.
- Final results of a run: the mean return of its last 100 training episodes, and its last evaluation, of battles with
  the share that it won.
- Runs without done.json are left out, or taken with --unfinished and marked as stopped.
- CPU and wall seconds are those that run.py measured; CPU time is spread evenly over a process's wall time. Of runs
  that it did not start, only the wall time is known; a curve's CPU time is that of the seeds that have one.
- Scores of several environments are normalised: 0 is random, 1 the best known of benchmark/yardsticks.csv. The profile
  is the share of runs above each normalised score. The interquartile mean (with its stratified bootstrap interval from
  10 runs on) and the probability of improvement [1] are given for two environments or ten runs and more.

[1] Agarwal et al. 2021, Deep reinforcement learning at the edge of the statistical precipice.
"""

import ast
import dataclasses
import fcntl
import json
import os
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cleanmarl.cli import RESUME_MAY_CHANGE, RunArgs, UsageError, check, flag
from cleanmarl.cli import read_run as read_meta

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from matplotlib.transforms import ScaledTranslation
from scipy import stats
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

matplotlib.use("Agg")  # no display needed
HERE = Path(__file__).resolve().parent
RETURN, NUM_EPISODES, EVAL = "rollout/ep_reward", "rollout/num_episodes", "eval/ep_reward"
BATTLES = "eval/battle_won"
COLUMNS = ["script", "env_id", "settings", "seed", "step", "cpu_seconds", "wall_seconds", "metric", "value"]
WHOLE = 0.95  # of the steps of a finished run have points, at least
CURVE = ["env_id", "script", "settings"]  # what a curve is of
GRID_POINTS, PAGE_POINTS = 200, 100  # of a curve in the table and in a figure, and on the page
LAST_EPISODES = 100
FINAL = [f"last {LAST_EPISODES} episodes", "last evaluation"]  # metrics of the results that a table has
WON = "last evaluation, battles won"  # another, of environments that count them
LATE = ", last tenth"  # of training: what is drawn, if that is not the return
PLANNED = "planned steps"  # metric of a run that was stopped: its --total-timesteps
ENOUGH_RUNS = 10  # for an interquartile mean of one environment, and for its interval
# of the scripts that stand in many figures, the same in each; their relatives with other endings have it, too
COLORS = {"coppo": "C0", "ippo": "C1", "mappo": "C2", "coma": "C3", "idqn": "C4", "vdn": "C5", "qmix": "C6"}
COLORS |= {"qtran": "C8", "maddpg": "C9"}
WORDS = {RETURN: "Return of the episodes in training", EVAL: "Return in evaluation"}
WORDS |= {"rollout/battle_won": "Share of the battles won in training", BATTLES: "Share of the battles won"}


@dataclass
class Args:
    runs: tyro.conf.Positional[list[Path]]
    """run folders, or folders that hold some at any depth"""
    out: Path
    """where to write: FOLDER/NAME"""
    tag: str = RETURN
    """metric to draw"""
    note: str = ""
    """what the caption says of settings: a clause, such as "the defaults" """
    command: str = ""
    """where the commands of the runs are, for the caption"""
    unfinished: bool = False
    """take runs that were stopped, too"""


# From run folders to the tidy table


def settings_of(meta: dict[str, Any], folder: Path) -> str:
    """The flags of a run that differ from its script's defaults, `the defaults` if none does.

    The defaults are read from the copy of the script in the run folder, without running it; "" if there is no script.
    Those of a class that the copy imports are not known: what its command gives of them counts.
    What a script decides by itself where its default is None, or computes (5 * 10**5), is no setting, unless its
    command has it; a run that was started from Python has no such command, and there all that differs counts.
    """
    places = [folder / f"{meta['script']}.py", HERE.parent / "cleanmarl" / f"{meta['script']}.py"]
    script = next((place for place in places if place.exists()), None)
    if script is None:
        return ""
    classes = {n.name: n for n in ast.parse(script.read_text()).body if isinstance(n, ast.ClassDef)}
    lineage = ["Args"]  # and the classes of a copy that it inherits from
    for name in lineage:
        lineage += [base.id for base in classes[name].bases if isinstance(base, ast.Name) and base.id in classes]
    body = [field for name in reversed(lineage) for field in classes[name].body]
    fields = [field for field in body if isinstance(field, ast.AnnAssign) and field.value is not None]
    defaults = {field.target.id: literal(field.value) for field in fields}
    program, *line = meta.get("command") or [""]
    given = {flag(word.partition("=")[0].lstrip("-")).replace("--no-", "--") for word in line}
    is_own = Path(program).stem == meta["script"]
    unknown = meta["args"].keys() - defaults.keys() - {field.name for field in dataclasses.fields(RunArgs)}
    defaults |= {name: dataclasses.MISSING for name in sorted(unknown) if flag(name) in given or not is_own}
    words = []
    for name, default in defaults.items():
        if default is None and is_own and flag(name) not in given:
            continue
        value = meta["args"].get(name, default)
        value = tuple(value) if isinstance(value, list) else value
        if value == default or name in RESUME_MAY_CHANGE | {"env_id", "seed"}:
            continue
        if isinstance(value, bool):
            words.append(flag(name if value else f"no_{name}"))
        else:
            words.append(f"{flag(name)} {' '.join(map(str, value)) if isinstance(value, tuple) else value}")
    return " ".join(words) or "the defaults"


def literal(value: ast.expr) -> Any:
    """The value of a default; None if it is computed."""
    try:
        return ast.literal_eval(value)
    except ValueError:
        return None


def seconds(folder: Path, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """CPU and wall seconds (P,) that a run had taken at `times` (P,), in seconds since 1970.

    By the tries in the manifest of run.py; where it lacks one, as after a kill, by the names of the event files, and
    the CPU time is NaN.
    """
    entries: Iterable[dict] = []
    with suppress(OSError, ValueError, AttributeError):  # no manifest, half of one, or something else
        entries = json.loads((folder.parent / "manifest.json").read_text()).values()
    # without its sum an entry lacks a try, or the trial is running
    entries = [e for e in entries if isinstance(e, dict) and {"tries", "wall_seconds"} <= e.keys()]
    tries = next((e["tries"] for e in entries if Path(e.get("run_folder") or "").name == folder.name), [])
    tries = [x for x in tries if x["start"] + x["wall_seconds"] >= times[0]]  # the others made folders of their own
    if not all(any(0 <= time - x["start"] <= x["wall_seconds"] for x in tries) for time in times):
        starts = np.array(sorted(int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*")))
        ends = [times[times < end].max(initial=start) for start, end in zip(starts, [*starts[1:], np.inf])]
        tries = [{"start": s, "wall_seconds": e - s, "cpu_seconds": np.nan} for s, e in zip(starts, ends)]
    start, wall, cpu = (np.array([x[key] for x in tries]) for key in ("start", "wall_seconds", "cpu_seconds"))
    i = np.clip(np.searchsorted(start, times, "right") - 1, 0, None)  # the try that each time belongs to
    part = times - start[i]
    wall_before, cpu_before = np.cumsum(wall) - wall, np.cumsum(cpu) - cpu
    return cpu_before[i] + part * cpu[i] / np.maximum(wall[i], 1e-9), wall_before[i] + part


def read_run(folder: Path, metrics: list[str]) -> pd.DataFrame:
    """One run folder as a tidy table with COLUMNS. Of points that a resumed run wrote twice, the later ones count.

    UsageError if the folder is not a run.
    """
    meta = read_meta(folder)
    args = meta["args"]
    check({"env_id", "seed"} <= args.keys(), f"{folder} has no env_id or seed among its arguments")
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()  # 0: keep every point
    known = events.Tags()["scalars"]
    last = max((events.Scalars(name)[-1].step for name in known), default=0)
    done = folder / "done.json"
    if done.exists() and last < WHOLE * (end := json.loads(done.read_text()).get("step", 0)):
        raise UsageError(f"{folder}: its event files end at step {last:,} of {end:,}, cut off or damaged")
    points = [
        (m, e.step, e.value, e.wall_time) for m in dict.fromkeys(metrics) if m in known for e in events.Scalars(m)
    ]
    table = pd.DataFrame(points, columns=["metric", "step", "value", "time"])
    if args.get("eval_steps") and not (done.exists() and args.get("eval_episodes")):
        table = table[~table.metric.isin({EVAL, BATTLES} - {metrics[0]})]  # of a few episodes each, and no last one
    table = table.assign(
        script=meta["script"], env_id=args["env_id"], settings=settings_of(meta, folder), seed=args["seed"]
    )
    order = table.time.argsort(kind="stable")
    times = table.time.to_numpy()[order]
    table["cpu_seconds"] = table["wall_seconds"] = np.nan
    if len(table):
        table.loc[table.index[order], ["cpu_seconds", "wall_seconds"]] = np.stack(seconds(folder, times), 1)
    if len(table) and not done.exists():
        stopped = table.iloc[[-1]].assign(
            metric=PLANNED, step=table.step.max(), value=args.get("total_timesteps", np.nan)
        )
        table = pd.concat([table, stopped])
    return table[COLUMNS]


def read_runs(paths: list[Path], metrics: list[str], unfinished: bool = False) -> pd.DataFrame:
    """All finished runs below `paths` as one tidy table; runs left out are named on stderr."""
    if missing := [path for path in paths if not path.exists()]:
        raise UsageError(f"there is no {missing[0]}")
    walks = [where for path in paths for where in os.walk(path, followlinks=True)]
    walks = [Path(place) for place, _, files in walks if {"args.json", "done.json"} & set(files)]
    folders = sorted({place.resolve(): place for place in walks}.values())
    tables, seen, differ = [], {}, defaultdict(set)
    for folder in folders:
        if not (unfinished or (folder / "done.json").exists()):
            print(f"left out, unfinished: {folder}", file=sys.stderr)
            continue
        try:
            table = read_run(folder, metrics)
        except UsageError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        except (AttributeError, KeyError, SyntaxError, TypeError, ValueError) as error:  # cut off, or somebody else's
            print(f"left out: {folder}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        if table.empty:
            print(f"left out, has none of {', '.join(dict.fromkeys(metrics))}: {folder}", file=sys.stderr)
            continue
        key = tuple(table.iloc[0][[*CURVE, "seed"]])
        if key in seen:  # averaging them would count the seed twice
            env_id, script, settings, seed = key
            what = f"{script} on {env_id}, seed {seed}, {settings}"
            raise UsageError(f"two runs of {what}: {seen[key]} and {folder}; pass the folders of those that count")
        seen[key] = folder
        tables.append(table)
        script = f"{table.script[0]}.py"
        differ[f"versions of {script}", key[:-1]].update(copy.read_text() for copy in folder.glob(script))
        if (folder / "done.json").exists():
            total = json.loads((folder / "args.json").read_text())["args"].get("total_timesteps")
            differ["values of --total-timesteps", key[:-1]].add(total)
    for (what, curve), found in differ.items():
        if len(found) > 1:
            print(f"one curve of {len(found)} {what}: {curve}", file=sys.stderr)
    if not tables:
        raise UsageError(f"no finished run with {metrics[0]} in {', '.join(map(str, paths)) or 'no folder'}")
    return pd.concat(tables, ignore_index=True)


def thin(runs: pd.DataFrame) -> pd.DataFrame:
    """Points of one metric, interpolated for each curve onto at most GRID_POINTS steps that all of its seeds cover.

    Half as many where there are ENOUGH_RUNS seeds: the table keeps all of them. A curve without such steps is left out.
    """
    tables = []
    for curve, of_curve in runs.groupby(CURVE, dropna=False):
        seeds = [run.sort_values("step") for _, run in of_curve.groupby("seed")]
        points = GRID_POINTS // (2 if len(seeds) >= ENOUGH_RUNS else 1)
        if len(seeds[0]) <= points and all(np.array_equal(run.step, seeds[0].step) for run in seeds):
            tables += seeds
            continue
        first, last = max(run.step.iloc[0] for run in seeds), min(run.step.iloc[-1] for run in seeds)
        if first > last:
            print(f"no curve, its seeds have no steps in common: {curve}", file=sys.stderr)
            continue
        grid = np.unique(np.linspace(first, last, points))  # one step, if they have no more in common
        for run in seeds:
            columns = {name: np.interp(grid, run.step, run[name]) for name in ("cpu_seconds", "wall_seconds", "value")}
            tables.append(pd.concat([run[:1]] * len(grid)).assign(step=grid, **columns))
    if not tables:
        raise UsageError("there is no curve to draw: pass seeds that have steps in common")
    return pd.concat(tables)


def last_return(run: pd.DataFrame, num_episodes: int = LAST_EPISODES) -> float:
    """Mean return of a run's last episodes; NaN if none ended.

    A point of RETURN is the mean over the episodes since the point before, NUM_EPISODES counts them from the start.
    """
    points = run.pivot_table(index="step", columns="metric", values="value").sort_index()
    if not {RETURN, NUM_EPISODES} <= set(points.columns):
        return np.nan
    points = points[[RETURN, NUM_EPISODES]].dropna()
    ended = points[NUM_EPISODES].diff().fillna(points[NUM_EPISODES]).to_numpy()[::-1]  # newest first
    before = np.cumsum(ended) - ended
    weight = np.clip(num_episodes - before, 0, ended)  # the oldest point counts in part
    return float(np.average(points[RETURN].to_numpy()[::-1], weights=weight)) if weight.sum() else np.nan


def final_results(data: pd.DataFrame) -> pd.DataFrame:
    """The rows of FINAL, WON and PLANNED for each run, as far as it has them."""
    rows = []
    for _, run in data.groupby([*CURVE, "seed"], dropna=False):
        last = run.loc[[run.wall_seconds.idxmax() if run.wall_seconds.notna().any() else run.step.idxmax()]]
        by_step = run.sort_values("step", kind="stable")
        ends = [by_step.value[by_step.metric == metric].tail(1) for metric in (EVAL, BATTLES, PLANNED)]
        results = [last_return(run), *(end.iloc[0] if len(end) else np.nan for end in ends)]
        rows += [last.assign(step=run.step.max(), metric=m, value=v) for m, v in zip([*FINAL, WON, PLANNED], results)]
    return pd.concat(rows).dropna(subset="value")


def last_tenth(data: pd.DataFrame) -> pd.DataFrame:
    """Means over the last tenth of training of those curves that are of something else than the return.

    Of all points in `main`, which keeps them with the curve; older data have the points of the curve alone. Without
    interval where the seeds were not kept: what is known are those of each point, which are wider.
    """
    curves = data[~data.metric.isin([RETURN, *FINAL, WON, PLANNED])]
    run = [*CURVE, "seed" if "seed" in data else "seeds", "metric"]
    late = curves[curves.step > 0.9 * curves.groupby(run, dropna=False).step.transform("max")]
    runs = late.groupby(run, dropna=False)
    means = runs.mean(numeric_only=True).assign(step=runs.step.max()).reset_index()
    means = means if "seed" in data else means.assign(low=np.nan, high=np.nan)
    return means.assign(metric=means.metric + LATE)


# Statistics


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over seeds and the ends of its interval, each (P,), from values (S, P).

    NaN ends if S = 1; the range of the seeds up to 4; the 95 % t interval of the mean from 5 on. (The percentile
    bootstrap of 3 seeds is their range, and of 5 holds the mean in 84 % of cases.)
    """
    mean, count = values.mean(0), len(values)
    if count == 1:
        return mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    if count < 5:
        return mean, values.min(0), values.max(0)
    half = stats.t.ppf(0.975, count - 1) * values.std(0, ddof=1) / count**0.5
    return mean, mean - half, mean + half


def summary(data: pd.DataFrame) -> pd.DataFrame:
    """Over the seeds: CURVE, seeds, metric, step, least_step, cpu_seconds, wall_seconds, mean, low, high.

    Data of which the seeds were not kept are so already (see data/README.md).
    """
    if "mean" in data:
        return data
    tables = []
    for (env_id, script, settings, metric), runs in data.groupby([*CURVE, "metric"], dropna=False):
        seeds = [run for _, run in runs.groupby("seed")]
        times = ("cpu_seconds", "wall_seconds")  # of those seeds of which they are known
        table = {name: pd.DataFrame([run[name].to_numpy() for run in seeds]).mean() for name in times}
        table["step"] = np.max([run.step for run in seeds], axis=0)
        table["least_step"] = np.min([run.step for run in seeds], axis=0)
        table["mean"], table["low"], table["high"] = interval(np.stack([run.value for run in seeds]))
        about = {"env_id": env_id, "script": script, "settings": settings, "seeds": len(seeds), "metric": metric}
        tables.append(pd.DataFrame(about | table))
    return pd.concat(tables, ignore_index=True)


def yardsticks() -> pd.DataFrame:
    """Scores to compare with: env_id, metric (without its rollout/ or eval/), kind (random | best | other), ..."""
    return pd.read_csv(HERE / "yardsticks.csv")


def normalised(data: pd.DataFrame) -> pd.DataFrame:
    """Final scores of runs with yardsticks, a row for each: env_id, curve, seed, score (0 random, 1 best known).

    The last evaluation is taken, or the last training episodes where some run has none.
    """
    known = yardsticks().query("metric == 'ep_reward' and kind in ('random', 'best')")
    known = known.groupby(["env_id", "kind"]).score.max().unstack().reindex(columns=["random", "best"]).dropna()
    runs = data[[*CURVE, "seed"]].drop_duplicates()
    final = data[data.metric == FINAL[1]]
    final = final if len(final) == len(runs) else data[data.metric == FINAL[0]]
    final = final.assign(curve=curve_names(data)[final.index]).merge(known, left_on="env_id", right_index=True)
    score = (final.value - final.random) / (final.best - final.random)
    return pd.DataFrame({"env_id": final.env_id, "curve": final.curve, "seed": final.seed, "score": score})


def iqm(scores: pd.DataFrame) -> tuple[float, float, float]:
    """Interquartile mean of the runs' scores and its 95 % bootstrap interval, drawn within each environment."""
    tasks, rng = [task.score.to_numpy() for _, task in scores.groupby("env_id")], np.random.default_rng(0)
    draws = np.concatenate([rng.choice(task, (2000, len(task))) for task in tasks], axis=1)
    low, high = np.percentile(stats.trim_mean(draws, 0.25, axis=1), [2.5, 97.5])
    return float(stats.trim_mean(scores.score, 0.25)), float(low), float(high)


def improvement(x: pd.DataFrame, y: pd.DataFrame) -> float:
    """The probability that a run of x scores higher than one of y, a tie counting half; mean over environments."""
    chances = []
    for env_id in sorted(set(x.env_id) & set(y.env_id)):
        a, b = (runs[runs.env_id == env_id].score.to_numpy() for runs in (x, y))
        chances.append(np.mean((a[:, None] > b) + 0.5 * (a[:, None] == b)))
    return float(np.mean(chances)) if chances else np.nan


def aggregate(data: pd.DataFrame) -> pd.DataFrame | None:
    """Normalised scores if there are enough runs to say something of all environments together, else None.

    Every curve must have the same environments, two or more, or ENOUGH_RUNS runs.
    """
    if "mean" in data:
        return None
    scores = normalised(data)
    sizes = scores.groupby("curve").env_id.agg(["nunique", "size"])
    same = len({tuple(sorted(set(runs.env_id))) for _, runs in scores.groupby("curve")}) == 1
    enough = len(sizes) > 1 and ((sizes["nunique"] > 1) | (sizes["size"] >= ENOUGH_RUNS)).all()
    return scores if same and enough else None


# What is drawn and written


def curve_names(data: pd.DataFrame) -> pd.Series:
    """The name of each row's curve: the script, and of its flags those that tell curves of some script apart."""
    settings = data.settings.fillna("")
    flags = {x: re.split(" (?=--)", x) if x else [] for x in settings.unique()}
    telling = {}  # of each script
    for script, of_script in settings.groupby(data.script):
        own = [set(flags[x]) for x in of_script.unique()]
        telling[script] = set.union(*own) - set.intersection(*own)
    of_all = {flag for words in telling.values() for flag in words if flag.startswith("--")}
    names = [
        " ".join([script, *(word for word in flags[x] if word in of_all | telling[script])])
        for script, x in zip(data.script, settings)
    ]
    return pd.Series(names, data.index, dtype=object)


def steps_words(rows: pd.DataFrame) -> str:
    """Of the final rows of a curve: how many steps its seeds had, and of how many they, or some, were stopped."""
    planned, final = rows[rows.metric == PLANNED], rows[rows.metric.isin([*FINAL, PLANNED])]
    least, most = final.get("least_step", final.step).min(), rows.step.max()
    differ = least < (most if len(planned) else WHOLE * most)  # whole episodes end some steps apart
    steps = f"{least:,.0f} to {most:,.0f}" if differ else f"{most:,.0f}"
    if planned.empty:
        return steps
    some = f"{planned.seeds.max()} " if planned.seeds.max() < rows.seeds.max() else ""
    return f"{steps} of {planned['mean'].max():,.0f}, {some}stopped"


def number(value: float, scale: float | None = None) -> str:
    return f"{value:.{1 if abs(value if scale is None else scale) >= 10 else 2}f}"


def final_table(data: pd.DataFrame, note: str = "") -> str:
    """Final results as Markdown: mean [interval] over seeds, by environment, between random and best-known scores."""
    present = data.metric.unique()
    metrics = [m for m in present if m.endswith(LATE)] + [m for m in present if m == WON] + FINAL
    head = ["environment", "script", "settings", "seeds", "steps", *metrics]
    lines = [f"| {' | '.join(head)} |", "|---|---|---|" + "---:|" * (2 + len(metrics))]
    final, known = data[data.metric.isin([*metrics, PLANNED])], yardsticks()
    names = ["battle_won" if m == WON else m.removesuffix(LATE).partition("/")[2] for m in metrics[:-2]] + ["ep_reward"]
    for env_id, of_env in final.groupby("env_id"):
        of_task = known[(known.env_id == env_id) & known.metric.isin(names)]
        for label, scores in of_task.groupby("label", sort=False):
            scores = scores.set_index("metric").score
            cells = [number(scores[name]) if name in scores else "" for name in names]
            lines.append(f"| {env_id} | *{label}* | | | | {' | '.join(cells)} | |")
        for (script, settings), rows in of_env.groupby(["script", "settings"], dropna=False):
            settings = settings if isinstance(settings, str) else note.partition(";")[0]
            settings = f"`{settings}`" if settings.startswith("--") else settings
            cells = [env_id, script, settings, f"{rows.seeds.max()}", steps_words(rows)]
            for metric in metrics:
                results = rows[rows.metric == metric][["mean", "low", "high"]].to_numpy()
                mean, low, high = results[0] if len(results) else (np.nan, np.nan, np.nan)
                text = "" if np.isnan(mean) else number(mean)
                text += "" if np.isnan(low) else f" [{number(low, mean)}, {number(high, mean)}]"
                fewer = len(results) and (n := rows[rows.metric == metric].seeds.iloc[0]) < rows.seeds.max()
                cells.append(text + (f" ({n} seed{'s' if n > 1 else ''})" if fewer else ""))
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def aggregate_table(scores: pd.DataFrame) -> str:
    """Interquartile means and probabilities of improvement over the first curve, as Markdown."""
    curves = dict(list(scores.groupby("curve")))
    first = next(iter(curves))
    head = ["script", "environments", "runs", "interquartile mean, normalised"]
    head += [f"better than {first}, probability"] if len(curves) > 1 else []
    lines = [f"| {' | '.join(head)} |", f"|---{'|---:' * (len(head) - 1)}|"]
    for name, runs in curves.items():
        mean, low, high = iqm(runs)
        score = f"{mean:.2f}" + (f" [{low:.2f}, {high:.2f}]" if len(runs) >= ENOUGH_RUNS else "")
        cells = [name, f"{runs.env_id.nunique()}", f"{len(runs)}", score]
        cells += [f"{improvement(runs, curves[first]):.2f}" if name != first else ""] if len(curves) > 1 else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def band_words(seeds: list[int], were_kept: bool) -> str:
    """What the band of a figure is."""
    words = []
    if any(1 < n < (5 if were_kept else 4) for n in seeds):
        words.append("the range of the seeds" if len(seeds) == 1 else "the range of up to 4 seeds")
    if any(n >= 5 for n in seeds) and were_kept:
        words.append("the 95 % t interval" if len(seeds) == 1 else "the 95 % t interval of 5 seeds and more")
    if any(n >= 4 for n in seeds) and not were_kept:
        words.append("the 95 % percentile bootstrap interval, which with 5 seeds holds the mean in 84 % of cases")
    return ", or ".join(words)


def caption(data: pd.DataFrame, figure: dict[str, str], were_kept: bool, has_profile: bool) -> str:
    """What a figure shows, of how many seeds, with what settings, what its band is, and where its commands are."""
    drawn = data[data.metric == figure["tag"]]
    seeds = sorted(int(n) for n in drawn.seeds.unique())
    means = f"mean of {seeds[0]} seeds" if len(seeds) == 1 else "mean of the seeds that the legend counts"
    words = WORDS.get(figure["tag"], f"`{figure['tag']}`")
    parts = [words + (": one seed" if seeds == [1] else f": {means} with {band_words(seeds, were_kept)}")]
    parts += [figure["note"]] if figure["note"] else []
    known = yardsticks()
    known = known[known.env_id.isin(drawn.env_id) & (known.metric == figure["tag"].partition("/")[2])]
    of_tasks = []
    for env_id, lines in known.groupby("env_id"):
        task = f"{env_id} " if drawn.env_id.nunique() > 1 else ""
        of_tasks.append(task + ", ".join(f"{x.label} {x.score:g} ({x.source})" for x in lines.itertuples()))
    parts += [f"Dashed: {'; '.join(of_tasks)}"] if of_tasks else []
    if has_profile:
        parts.append("Last panel: the share of runs above a normalised score, 0 random, 1 the best known")
    stopped = data.assign(curve=curve_names(data))[data.metric == PLANNED]
    for x in stopped.itertuples():
        least = getattr(x, "least_step", x.step)
        steps = f"{least:,.0f} to {x.step:,.0f}" if least < x.step else f"{x.step:,.0f}"
        parts.append(f"Stopped after {steps} of {x.mean:,.0f} steps: {x.curve}")
    parts += [f"Commands: `{figure['command']}`"] if figure["command"] else []
    return ". ".join(part[0].upper() + part[1:] for part in parts) + ".\n"


def colors_of(curves: list[str]) -> dict[str, str]:
    """A color for each name of a curve: its script's in COLORS, or the next one that no other curve has."""
    colors: dict[str, str] = {}
    for name in curves:
        wish = next((color for script, color in COLORS.items() if name.startswith(script)), None)
        if wish is not None and wish not in colors.values():
            colors[name] = wish
    free = [f"C{i}" for i in range(10) if f"C{i}" not in colors.values()]
    others = [name for name in curves if name not in colors]
    return colors | {name: free[i] if i < len(free) else f"C{i}" for i, name in enumerate(others)}


def draw(data: pd.DataFrame, scores: pd.DataFrame | None, figure: dict[str, str], out: Path) -> None:
    """Learning curves as out.svg: one panel per environment, one colour per curve; then the performance profile."""
    data = data.assign(curve=curve_names(data))  # the profile may have some that are not drawn
    drawn = data[data.metric == figure["tag"]]
    env_ids, curves = sorted(drawn.env_id.unique()), sorted(data.curve.unique())
    panels = len(env_ids) + (scores is not None)
    columns = min(3, panels)
    rows = -(-panels // columns)
    plt.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "", "axes.spines.top": False, "axes.spines.right": False}
    )
    # long labels are wrapped, and many lines of them make the picture higher: they would leave no room for the panel
    lines = sum(len(textwrap.wrap(f"{name} (9 seeds)", 60, break_on_hyphens=False)) for name in curves)
    size = 5 * columns, (3.6 + 0.5 * max(0, lines - 8)) * rows
    picture, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    colors, known = colors_of(curves), yardsticks()
    known = known[known.metric == figure["tag"].partition("/")[2]]
    for axis in axes.flat[panels:]:
        axis.set_axis_off()
    for env_id, axis in zip(env_ids, axes.flat):
        for name in curves:
            curve = drawn[(drawn.env_id == env_id) & (drawn.curve == name)]
            if not curve.empty:
                seeds = curve.seeds.iloc[0]
                label = f"{name} ({seeds} seed{'s' if seeds > 1 else ''})"
                label = textwrap.fill(label, 60, break_on_hyphens=False)
                marker = "o" if len(curve) == 1 else ""  # a line of one point cannot be seen
                axis.plot(curve.step, curve["mean"], color=colors[name], label=label, marker=marker)
                if seeds > 1:
                    axis.fill_between(curve.step, curve.low, curve.high, color=colors[name], alpha=0.25, linewidth=0)
        scale, (low, high) = known[known.env_id == env_id].sort_values("score"), axis.get_ylim()
        side = "right"
        for x in scale.assign(near=scale.score.diff() < 0.06 * (high - low)).itertuples():
            axis.axhline(x.score, color="0.4", linestyle="--", linewidth=1, zorder=1)
            side = "left" if x.near and side == "right" else "right"  # not over the one below
            box = {"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0.5}
            place = {"xycoords": ("axes fraction", "data"), "ha": side, "va": "bottom", "size": 8}
            axis.annotate(x.label, ({"left": 0.01, "right": 0.99}[side], x.score), **place, bbox=box)  # over the curves
        axis.set(title=env_id, xlabel="environment steps", ylabel=figure["tag"])
        axis.ticklabel_format(axis="x", style="sci", scilimits=(0, 5))
        size = "medium" if max(map(len, curves)) < 40 else "small"
        legend(axis, size)
    if scores is not None:
        profile(axes.flat[len(env_ids)], scores, colors)
    save(picture, out)


def profile(axis: plt.Axes, scores: pd.DataFrame, colors: dict[str, str]) -> None:
    """The share of runs above each normalised score, as steps."""
    for name, runs in scores.groupby("curve"):
        x = np.sort(runs.score)
        x = np.concatenate([[min(0.0, scores.score.min())], x, [max(1.0, scores.score.max())]])
        share = np.concatenate([1 - np.arange(len(runs) + 1) / len(runs), [0]])  # falls at each run's score
        axis.step(x, share, where="post", color=colors[name], label=f"{name} ({len(runs)} runs)")
    axis.set(title="all environments", xlabel="normalised score", ylabel="share of runs above it")
    legend(axis, "medium")


def legend(axis: plt.Axes, size: str) -> None:
    """Clear of the curves, and in inches of the label of the axis, however low the panel is."""
    below = axis.transAxes + ScaledTranslation(0, -0.4, axis.figure.dpi_scale_trans)
    axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 0), bbox_transform=below, fontsize=size)


def save(picture: plt.Figure, out: Path) -> None:
    """A figure as out.svg, the same bytes each time."""
    picture.draw_without_rendering()  # the first layout may change the ticks, which the second makes room for
    picture.savefig(f"{out}.svg", metadata={"Date": None, "Creator": None})
    plt.close(picture)


def write_page(out: Path, caption: str, table: str) -> None:
    """out.md: the figure, its caption and its table, each of which docs/generate.py takes over."""
    Path(f"{out}.md").write_text(f"![{out.name}]({quote(out.name)}.svg)\n\n{caption}\n{table}", encoding="utf-8")


def read_figure(out: Path) -> tuple[pd.DataFrame, dict[str, str]]:
    """The rows of data/NAME.csv, with those of the last tenth, and what figures.json has of the figure."""
    figure = json.loads((out.parent / "data" / "figures.json").read_text())[out.name]
    file = out.parent / "data" / f"{out.name}.csv"
    try:
        data = pd.read_csv(file)
        is_late = data.metric.str.endswith(LATE)
        return data if is_late.any() else pd.concat([data, last_tenth(data)], ignore_index=True), figure
    except ValueError as error:  # empty, or half of one
        raise UsageError(
            f"{file} is damaged ({error}): make it anew, or remove {out.name} from figures.json"
        ) from error


def redraw(out: Path) -> str:
    """Writes out.svg and out.md from data/ beside them; returns the table of results."""
    data, figure = read_figure(out)
    table, scores, were_kept = summary(data), aggregate(data), "mean" not in data
    draw(table, scores, figure, out)
    text = final_table(table, figure["note"]) + ("" if scores is None else f"\n{aggregate_table(scores)}")
    write_page(out, caption(table, figure, were_kept, scores is not None), text)
    return text


# The interactive page


def page_data(folder: Path) -> dict[str, Any]:
    """All curves and final results of a folder by environment, as report_page.html takes them."""
    envs, known = {}, yardsticks()
    for name in json.loads((folder / "data" / "figures.json").read_text()):
        data, figure = read_figure(folder / name)
        table = summary(data)
        note = figure["note"].partition(";")[0]
        for (env_id, script, settings), rows in table.groupby(CURVE, dropna=False):
            points = rows[(rows.metric == figure["tag"]) & np.isfinite(rows["mean"])]  # one may be NaN
            points = points.iloc[np.linspace(0, len(points) - 1, min(len(points), PAGE_POINTS)).astype(int)]
            settings = settings if isinstance(settings, str) else note
            curve = {"script": script, "settings": settings, "figure": name, "metric": figure["tag"]}
            curve |= {"seeds": int(rows.seeds.max())}
            if len(points) and points.seeds.max() < rows.seeds.max():
                curve["drawn"] = int(points.seeds.max())
            for column in ("step", "cpu_seconds", "wall_seconds", "mean", "low", "high"):
                values = points[column] if column in points else pd.Series(dtype=float)
                curve[column] = None if values.isna().all() else [float(f"{x:.5g}") for x in values]
            for metric in FINAL:
                final = rows[rows.metric == metric]
                numbers = final[["mean", "low", "high"]][:1].to_numpy().ravel()
                curve[metric] = [float(f"{x:.5g}") for x in numbers if not np.isnan(x)]
                if len(final) and final.seeds.max() < rows.seeds.max():
                    curve[f"{metric}, seeds"] = int(final.seeds.max())
            late = rows[rows.metric == figure["tag"] + LATE][["mean", "low", "high"]][:1].to_numpy().ravel()
            curve["late"] = [float(f"{x:.5g}") for x in late if not np.isnan(x)]
            curve |= {"steps": float(rows.step.max()), "of steps": steps_words(rows)}
            envs.setdefault(env_id, {"curves": [], "yardsticks": []})["curves"].append(curve)
    for env in envs.values():  # the table has all settings
        for curve, name in zip(env["curves"], curve_names(pd.DataFrame(env["curves"]))):
            curve["name"] = name
    for x in known.itertuples():
        if x.env_id in envs:
            about = {"metric": x.metric, "kind": x.kind, "label": x.label, "score": x.score, "source": x.source}
            envs[x.env_id]["yardsticks"].append(about)
    return envs


def write_html(folder: Path) -> None:
    """folder/report.html: one page with everything in it, from data/ alone."""
    data = json.dumps(page_data(folder), sort_keys=True, separators=(",", ":")).replace("<", "\\u003c")
    page = (HERE / "report_page.html").read_text(encoding="utf-8")
    (folder / "report.html").write_text(page.replace("/*DATA*/null", data), encoding="utf-8")


def put(path: Path, text: str) -> None:
    """Write a file of data/ by renaming: a full disk or a kill leaves what was there before."""
    with path.with_suffix(path.suffix + ".tmp").open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).replace(path)


def main(args: Args) -> None:
    if not args.out.name:
        raise UsageError(f"--out {args.out} has no name for the figure: give FOLDER/NAME")
    data = read_runs(args.runs, [args.tag, RETURN, NUM_EPISODES, EVAL, BATTLES], args.unfinished)
    drawn = data[data.metric == args.tag]
    if drawn.empty:
        walks = [walk for path in args.runs for walk in os.walk(path, followlinks=True)]
        folder = Path(min(place for place, _, files in walks if any(name.startswith("events") for name in files)))
        known = EventAccumulator(str(folder)).Reload().Tags()["scalars"]
        raise UsageError(f"no run has {args.tag}; {folder.name} has {', '.join(sorted(known))}")
    folder = args.out.parent / "data"
    folder.mkdir(parents=True, exist_ok=True)
    points = pd.concat([thin(drawn), last_tenth(drawn), final_results(data)])
    written = {"step": "{:.8g}", "cpu_seconds": "{:.5g}", "wall_seconds": "{:.5g}", "value": "{:.6g}"}
    for name, form in written.items():
        points[name] = points[name].map(form.format, na_action="ignore")
    with (folder / "figures.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # of another report into this folder
        put(folder / f"{args.out.name}.csv", points.to_csv(index=False))
        index = folder / "figures.json"
        try:
            figures = json.loads(index.read_text()) if index.exists() else {}
        except ValueError as error:
            raise UsageError(f"{index} is damaged ({error})") from error
        figures[args.out.name] = {"tag": args.tag, "note": args.note, "command": args.command}
        put(index, json.dumps(figures, indent=2, sort_keys=True) + "\n")
        print(redraw(args.out), end="")
        write_html(args.out.parent)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except UsageError as error:
        print(f"report: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # a folder that cannot be written
        sys.exit(f"report: {error}")
