"""Learning curves and a table of final results from run folders.

    python benchmark/plot.py runs/ --out docs/results/ppo_cartpole --line random=22.0

Writes OUT.csv (every point that went in: env_id, script, seed, tag, step, value), OUT.svg and OUT.png (one panel per
environment, one curve per script) and OUT.md (final results). A curve is the mean over seeds and its band the 95 %
bootstrap interval of that mean [1], after interpolating each seed onto one grid of steps. The final result of a run is
the mean return of its last 100 training episodes, and its last evaluation. Unfinished runs (no done.json) are left out.
With one seed there is no interval; with a handful it is narrower than it should be.

[1] Agarwal et al. 2021, Deep reinforcement learning at the edge of the statistical precipice: the stratified percentile
bootstrap over runs; with one task per panel, the plain one.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

RETURN, NUM_EPISODES, EVAL = "rollout/ep_reward", "rollout/num_episodes", "eval/ep_reward"
GRID_POINTS = 200
LAST_EPISODES = 100


@dataclass
class Args:
    runs: tyro.conf.Positional[list[Path]]
    """run folders, or folders that hold some at any depth"""
    out: Path
    """where to write, without suffix"""
    tag: str = RETURN
    """what to draw"""
    group_by: str | None = None
    """flag whose values, too, get curves of their own, such as num_envs"""
    line: list[str] = field(default_factory=list)
    """horizontal lines: LABEL=VALUE, or ENV_ID:LABEL=VALUE for one panel only"""


def read_run(folder: Path, tags: list[str], group_by: str | None = None) -> pd.DataFrame:
    """One run folder as a tidy table: env_id, script, seed, tag, step, value.

    With `group_by`, the script's name carries the value of that flag. Of the points that a resumed run wrote twice, the
    later ones count.
    """
    meta = json.loads((folder / "args.json").read_text())
    args, script = meta["args"], meta["script"]
    if group_by is not None:
        script = f"{script} {group_by}={args[group_by]}"
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})  # 0: keep every point
    events.Reload()
    known = events.Tags()["scalars"]
    rows = [(tag, e.step, e.value) for tag in dict.fromkeys(tags) if tag in known for e in events.Scalars(tag)]
    table = pd.DataFrame(rows, columns=["tag", "step", "value"])
    for position, (name, value) in enumerate(
        {"env_id": args["env_id"], "script": script, "seed": args["seed"]}.items()
    ):
        table.insert(position, name, value)
    return table


def read_runs(paths: list[Path], tags: list[str], group_by: str | None = None) -> pd.DataFrame:
    """All finished runs below `paths` as one tidy table; runs left out are named on stderr."""
    folders = sorted({file.parent for path in paths for file in path.rglob("args.json")})
    tables, seen = [], set()
    for folder in folders:
        if not (folder / "done.json").exists():
            print(f"left out, unfinished: {folder}", file=sys.stderr)
            continue
        table = read_run(folder, tags, group_by)
        if table.empty:
            print(f"left out, has none of {tags}: {folder}", file=sys.stderr)
            continue
        key = tuple(table.iloc[0][["env_id", "script", "seed"]])
        if key in seen:  # averaging them would count the seed twice
            sys.exit(f"two runs of {key}: {folder} is the second; pass one of them, or tell them apart with --group-by")
        seen.add(key)
        tables.append(table)
    if not tables:
        sys.exit(f"no finished run with {tags[0]} in {', '.join(map(str, paths))}")
    return pd.concat(tables, ignore_index=True)


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over seeds and the ends of its 95 % bootstrap interval, each (P,), from values (S, P); NaN ends if S = 1."""
    mean = values.mean(0)
    if len(values) == 1:
        return mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    draws = np.random.default_rng(0).integers(len(values), size=(2000, len(values)))  # seeds, with replacement
    low, high = np.percentile(values[draws].mean(1), [2.5, 97.5], axis=0)
    return mean, low, high


def curve(runs: pd.DataFrame) -> tuple[np.ndarray, ...]:
    """Grid of steps, mean, low, high, each (GRID_POINTS,), of one script's runs where all of them have points."""
    seeds = [run.sort_values("step") for _, run in runs.groupby("seed")]
    first, last = max(run.step.iloc[0] for run in seeds), min(run.step.iloc[-1] for run in seeds)
    grid = np.linspace(first, last, GRID_POINTS)
    return grid, *interval(np.stack([np.interp(grid, run.step, run.value) for run in seeds]))


def last_return(run: pd.DataFrame, num_episodes: int = LAST_EPISODES) -> float:
    """Mean return of a run's last episodes; NaN if none ended.

    A point of RETURN is the mean over the episodes since the point before, NUM_EPISODES counts them from the start.
    """
    points = run.pivot_table(index="step", columns="tag", values="value").sort_index()
    if not {RETURN, NUM_EPISODES} <= set(points.columns):
        return np.nan
    points = points[[RETURN, NUM_EPISODES]].dropna()
    ended = points[NUM_EPISODES].diff().fillna(points[NUM_EPISODES]).to_numpy()[::-1]  # newest first
    before = np.cumsum(ended) - ended
    weight = np.clip(num_episodes - before, 0, ended)  # the oldest point counts in part
    return float(np.average(points[RETURN].to_numpy()[::-1], weights=weight)) if weight.sum() else np.nan


def final_table(data: pd.DataFrame) -> str:
    """The final results as Markdown: mean [95 % interval] over seeds, per environment and script."""
    lines = [f"| environment | script | seeds | steps | last {LAST_EPISODES} episodes | last evaluation |"]
    lines.append("|---|---|---:|---:|---:|---:|")
    for (env_id, script), runs in data.groupby(["env_id", "script"]):
        seeds = [run for _, run in runs.groupby("seed")]
        evals = [run[run.tag == EVAL].sort_values("step").value for run in seeds]
        results = [[last_return(run) for run in seeds], [e.iloc[-1] if len(e) else np.nan for e in evals]]
        cells = [env_id, script, str(len(seeds)), str(max(run.step.max() for run in seeds))]
        for values in results:
            mean, low, high = (end[0] for end in interval(np.array(values, np.float64)[:, None]))
            digits = 1 if abs(mean) >= 10 else 2
            mean, low, high = (f"{x:.{digits}f}" for x in (mean, low, high))
            cells.append("" if mean == "nan" else mean if low == "nan" else f"{mean} [{low}, {high}]")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(data: pd.DataFrame, tag: str, lines: list[str], out: Path) -> None:
    """Learning curves of `tag` as out.svg and out.png: one panel per environment, one colour per script."""
    drawn = data[data.tag == tag]
    env_ids, scripts = sorted(drawn.env_id.unique()), sorted(drawn.script.unique())
    columns = min(3, len(env_ids))
    rows = -(-len(env_ids) // columns)
    plt.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "", "axes.spines.top": False, "axes.spines.right": False}
    )
    figure, axes = plt.subplots(rows, columns, figsize=(5 * columns, 3.6 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(env_ids) :]:
        axis.set_axis_off()
    for env_id, axis in zip(env_ids, axes.flat):
        for number, script in enumerate(scripts):
            runs = drawn[(drawn.env_id == env_id) & (drawn.script == script)]
            if not runs.empty:
                grid, mean, low, high = curve(runs)
                seeds = runs.seed.nunique()
                axis.plot(grid, mean, color=f"C{number}", label=f"{script} ({seeds} seed{'s' if seeds > 1 else ''})")
                if seeds > 1:
                    axis.fill_between(grid, low, high, color=f"C{number}", alpha=0.25, linewidth=0)
        for line in lines:
            name, _, value = line.rpartition("=")
            panel, _, label = name.rpartition(":")
            if panel in ("", env_id):
                axis.axhline(float(value), color="0.4", linestyle="--", linewidth=1)
                axis.annotate(label, (0.99, float(value)), xycoords=("axes fraction", "data"), ha="right", va="bottom")
        axis.set(title=env_id, xlabel="environment steps", ylabel=tag)
        axis.ticklabel_format(axis="x", style="sci", scilimits=(0, 5))
        axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, -0.16))  # below, clear of the curves
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(f"{out}.svg", metadata={"Date": None})
    figure.savefig(f"{out}.png", dpi=100)
    plt.close(figure)


def main(args: Args) -> None:
    data = read_runs(args.runs, [args.tag, RETURN, NUM_EPISODES, EVAL], args.group_by)
    if args.tag not in set(data.tag):
        sys.exit(f"no run has {args.tag}; there is {', '.join(sorted(data.tag.unique()))}")
    draw(data, args.tag, args.line, args.out)
    data.to_csv(f"{args.out}.csv", index=False, float_format="%.6g")
    table = final_table(data)
    Path(f"{args.out}.md").write_text(table)
    print(table, end="")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
