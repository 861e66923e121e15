"""Learning curves and a table of final results from run folders.

    python benchmark/plot.py runs/ --out docs/results/ppo_cartpole --line random=22.0

Writes beside OUT data/NAME.csv (the points that are drawn, of each seed: env_id, script, seed, tag, step, value), with
its lines and its caption in data/figures.json, and from these two alone NAME.svg (one panel per environment, one curve
per script) and NAME.md (caption, final results). `python benchmark/redraw.py` does the latter again for all that is
published. A curve is the mean over seeds and its band the 95 % bootstrap interval of that mean [1], after interpolating
each seed onto one grid of steps. The final result of a run is the mean return of its last 100 training episodes, and
its last evaluation. Unfinished runs (no done.json) are left out. With one seed there is no interval; with two or three
it is the range of the seeds, and with a handful narrower than it should be.

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
FINAL = [f"last {LAST_EPISODES} episodes", "last evaluation"]  # tags of the results that a table has
WORDS = {RETURN: "Return of the episodes in training", "rollout/battle_won": "Share of the battles won in training"}


@dataclass
class Args:
    runs: tyro.conf.Positional[list[Path]]
    """run folders, or folders that hold some at any depth"""
    out: Path
    """where to write: FOLDER/NAME"""
    tag: str = RETURN
    """what to draw"""
    note: str = ""
    """what the caption says of settings: a clause, such as "the defaults" """
    command: str = ""
    """where the commands of the runs are, for the caption"""
    group_by: str | None = None
    """flag whose values, too, get curves of their own, such as num_envs"""
    line: list[str] = field(default_factory=list)
    """horizontal lines: LABEL=VALUE, or ENV_ID:LABEL=VALUE for one panel only"""
    unfinished: bool = False
    """take runs that were stopped, too"""


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


def read_runs(paths: list[Path], tags: list[str], group_by: str | None = None, unfinished=False) -> pd.DataFrame:
    """All finished runs below `paths` as one tidy table; runs left out are named on stderr."""
    folders = sorted({file.parent for path in paths for file in path.rglob("args.json")})
    tables, seen = [], set()
    for folder in folders:
        if not (unfinished or (folder / "done.json").exists()):
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


def thin(runs: pd.DataFrame) -> pd.DataFrame:
    """Points of one tag, interpolated for each panel and script onto GRID_POINTS steps that all of its seeds cover."""
    tables = []
    for _, of_script in runs.groupby(["env_id", "script"]):
        seeds = [run.sort_values("step") for _, run in of_script.groupby("seed")]
        first, last = max(run.step.iloc[0] for run in seeds), min(run.step.iloc[-1] for run in seeds)
        grid = np.linspace(first, last, GRID_POINTS)
        for run in seeds:
            tables.append(
                pd.concat([run[:1]] * GRID_POINTS).assign(step=grid, value=np.interp(grid, run.step, run.value))
            )
    return pd.concat(tables)


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


def final_results(data: pd.DataFrame) -> pd.DataFrame:
    """The rows of FINAL for each run, as far as it has them."""
    rows = []
    for key, run in data.groupby(["env_id", "script", "seed"]):
        evals = run[run.tag == EVAL].sort_values("step").value
        for tag, value in zip(FINAL, [last_return(run), evals.iloc[-1] if len(evals) else np.nan]):
            rows.append((*key, tag, run.step.max(), value))
    return pd.DataFrame(rows, columns=data.columns).dropna()


def summary(data: pd.DataFrame) -> pd.DataFrame:
    """Over the seeds: env_id, script, seeds, tag, step, mean, low, high. Data read back from figures are so."""
    if "mean" in data:
        return data
    tables = []
    for (env_id, script, tag), runs in data.groupby(["env_id", "script", "tag"]):
        seeds = [run for _, run in runs.groupby("seed")]
        steps = np.max([run.step for run in seeds], axis=0)
        mean, low, high = interval(np.stack([run.value for run in seeds]))
        table = {"step": steps, "mean": mean, "low": low, "high": high}
        tables.append(pd.DataFrame({"env_id": env_id, "script": script, "seeds": len(seeds), "tag": tag} | table))
    return pd.concat(tables)


def final_table(data: pd.DataFrame) -> str:
    """The final results as Markdown: mean [95 % interval] over seeds, per environment and script."""
    lines = [f"| environment | script | seeds | steps | {' | '.join(FINAL)} |", "|---|---|---:|---:|---:|---:|"]
    final = data[data.tag.isin(FINAL)]
    for (env_id, script), rows in final.groupby(["env_id", "script"]):
        cells = [env_id, script, f"{rows.seeds.max()}", f"{rows.step.max():.0f}"]
        for tag in FINAL:
            results = rows[rows.tag == tag][["mean", "low", "high"]].to_numpy()
            digits = 1 if len(results) and abs(results[0, 0]) >= 10 else 2
            mean, low, high = (f"{x:.{digits}f}" for x in results[0]) if len(results) else ("", "nan", "nan")
            cells.append(mean if low == "nan" else f"{mean} [{low}, {high}]")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def caption(data: pd.DataFrame, figure: dict) -> str:
    """What a figure shows, of how many seeds, with what settings, what its band is, and where its commands are."""
    drawn = data[data.tag == figure["tag"]]
    seeds = sorted(drawn.seeds.unique())
    means = f"mean of {seeds[0]} seeds" if len(seeds) == 1 else "mean of the seeds that the legend counts"
    band = "its 95 % bootstrap interval" + (", which for 3 seeds is their range" if seeds[0] <= 3 else "")
    parts = [
        WORDS.get(figure["tag"], f"`{figure['tag']}`") + (": one seed" if seeds == [1] else f": {means}, with {band}")
    ]
    parts += [figure["note"]] if figure["note"] else []
    dashed = [line.rpartition("=") for line in figure["lines"]]
    parts += (
        ["Dashed: " + "; ".join(f"{name.rpartition(':')[2]} {value}" for name, _, value in dashed)] if dashed else []
    )
    parts += [f"Commands: `{figure['command']}`"] if figure["command"] else []
    return ". ".join(part[0].upper() + part[1:] for part in parts) + ".\n"


def draw(data: pd.DataFrame, figure: dict, out: Path) -> None:
    """Learning curves as out.svg: one panel per environment, one colour per script."""
    drawn = data[data.tag == figure["tag"]]
    env_ids, scripts = sorted(drawn.env_id.unique()), sorted(drawn.script.unique())
    columns = min(3, len(env_ids))
    rows = -(-len(env_ids) // columns)
    plt.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "", "axes.spines.top": False, "axes.spines.right": False}
    )
    picture, axes = plt.subplots(rows, columns, figsize=(5 * columns, 3.6 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(env_ids) :]:
        axis.set_axis_off()
    for env_id, axis in zip(env_ids, axes.flat):
        for number, script in enumerate(scripts):
            curve = drawn[(drawn.env_id == env_id) & (drawn.script == script)]
            if not curve.empty:
                seeds = curve.seeds.iloc[0]
                label = f"{script} ({seeds} seed{'s' if seeds > 1 else ''})"
                axis.plot(curve.step, curve["mean"], color=f"C{number}", label=label)
                if seeds > 1:
                    axis.fill_between(curve.step, curve.low, curve.high, color=f"C{number}", alpha=0.25, linewidth=0)
        for line in figure["lines"]:
            name, _, value = line.rpartition("=")
            panel, _, label = name.rpartition(":")
            if panel in ("", env_id):
                axis.axhline(float(value), color="0.4", linestyle="--", linewidth=1)
                axis.annotate(label, (0.99, float(value)), xycoords=("axes fraction", "data"), ha="right", va="bottom")
        axis.set(title=env_id, xlabel="environment steps", ylabel=figure["tag"])
        axis.ticklabel_format(axis="x", style="sci", scilimits=(0, 5))
        axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, -0.16))  # below, clear of the curves
    save(picture, out)


def save(picture, out: Path) -> None:
    """A figure as out.svg, the same bytes each time."""
    picture.savefig(f"{out}.svg", metadata={"Date": None, "Creator": None})
    plt.close(picture)


def write_page(out: Path, caption: str, table: str) -> None:
    """out.md: the figure, its caption and its table, each of which docs/generate.py takes over."""
    Path(f"{out}.md").write_text(f"![{out.name}]({out.name}.svg)\n\n{caption}\n{table}")


def redraw(out: Path) -> str:
    """Writes out.svg and out.md from data/ beside them; returns the table of results."""
    figure = json.loads((out.parent / "data" / "figures.json").read_text())[out.name]
    data = summary(pd.read_csv(out.parent / "data" / f"{out.name}.csv"))
    draw(data, figure, out)
    table = final_table(data)
    write_page(out, caption(data, figure), table)
    return table


def main(args: Args) -> None:
    data = read_runs(args.runs, [args.tag, RETURN, NUM_EPISODES, EVAL], args.group_by, args.unfinished)
    drawn = data[data.tag == args.tag]
    if drawn.empty:
        sys.exit(f"no run has {args.tag}; there is {', '.join(sorted(data.tag.unique()))}")
    folder = args.out.parent / "data"
    folder.mkdir(parents=True, exist_ok=True)
    points = pd.concat([thin(drawn), final_results(data)])
    points = points.assign(step=points.step.map("{:.8g}".format), value=points.value.map("{:.6g}".format))
    points.to_csv(folder / f"{args.out.name}.csv", index=False)
    index = folder / "figures.json"
    figures = json.loads(index.read_text()) if index.exists() else {}
    figures[args.out.name] = {"tag": args.tag, "lines": args.line, "note": args.note, "command": args.command}
    index.write_text(json.dumps(figures, indent=2, sort_keys=True) + "\n")
    print(redraw(args.out), end="")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
