"""Draw every figure and table of docs/results again from docs/results/data, and the diagrams of docs/figures.

    python benchmark/redraw.py

The same bytes come out each time on one machine. Learning curves and report.html are made by report.py; the other
figures, and README.md's table of results, are below.
"""

import json
import math
import runpy
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from cleanmarl.cli import UsageError, check

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from matplotlib.ticker import LogLocator, NullFormatter
from report import (
    COLORS,
    FINAL,
    LATE,
    PLANNED,
    number,
    read_figure,
    redraw,
    save,
    summary,
    write_html,
    write_page,
    yardsticks,
)

ROOT = Path(__file__).resolve().parent.parent
GAMES = {  # panel of the figure of the other games -> its place
    "penalty-free": (0, 0),
    "penalty-100": (0, 1),
    "one-optimum": (0, 2),
    "climbing-4p": (1, 0),
    "climbing-4p-penalty": (1, 1),
    "climbing-4p-rising": (1, 2),
}
# README.md's table: figure -> its scripts there, what their settings have in them, and its tasks there if not all
README = {
    "ppo_beside_cleanrl": ("ppo", "", "CartPole-v1", "Acrobot-v1"),
    "impala_lunarlander": ("impala", ""),
    "ppo_continuous_action_hopper": ("ppo_continuous_action", ""),
    "ppo_continuous_action_walker2d": ("ppo_continuous_action", ""),
    "ppo_continuous_action_halfcheetah": ("ppo_continuous_action", ""),
    "impala_atari_envpool_pong": (
        "impala_atari_envpool",
        "--num-actors 0 --num-envs 16 --batch-size 4 --ent-coef 0.003 --bf16 on",
    ),
    "ppo_atari_envpool_breakout": ("ppo_atari_envpool", ""),
    "impala_atari_envpool_breakout": ("impala_atari_envpool", "--batch-size 8 --bf16 on"),
    "impala_atari_envpool_spaceinvaders": ("impala_atari_envpool", "--num-actors 0"),
    "mappo_spread_long": ("mappo coppo ippo", ""),
    "vdn_spread_long": ("vdn qmix qtran", "the defaults"),
    "mappo_listener_long": ("mappo coppo ippo", ""),
    "vdn_listener_long": ("qmix vdn", ""),
    "mappo_reference_long": ("mappo coppo ippo", ""),
    "mappo_foraging_long": ("mappo coppo ippo", ""),
    "vdn_foraging_long": ("vdn qmix idqn", ""),
    "maddpg_multienvs_foraging_long": ("maddpg_multienvs", ""),
    "mappo_warehouse": ("mappo ippo", ""),
    "mappo_smax_long": ("ippo mappo coppo", ""),
    "vdn_smax_3m": ("vdn qmix idqn", ""),
}
# figures whose tasks have published scores of training: the result beside one is that of training, too
AS_PUBLISHED = ("ppo_beside", "ppo_continuous", "impala_atari", "ppo_atari")
README_START, README_END = (
    "<!-- made by benchmark/redraw.py of docs/results/data -->\n",
    "<!-- end of the results -->\n",
)


@dataclass
class Args:
    results: Path = ROOT / "docs" / "results"
    """folder of the figures, with their data in data/"""


def markdown(table: pd.DataFrame, text_columns: int) -> str:
    """A table of texts; the columns after the first `text_columns` are numbers."""
    rule = "|---" * text_columns + "|---:" * (len(table.columns) - text_columns) + "|\n"
    head, *rows = (f"| {' | '.join(row)} |\n" for row in [table.columns, *table.to_numpy()])
    return head + rule + "".join(rows)


def repeated(of_each: Any, form: str = "{:,.0f}") -> pd.Series:
    """The median of each group and, if there are several repeats, their range."""
    median, low, high = (x.map(form.format) for x in (of_each.median(), of_each.min(), of_each.max()))
    return median if of_each.size().max() == 1 else median + " (" + low + "-" + high + ")"


def impala_speed(out: Path) -> None:
    """Steps per second and lag of IMPALA over the number of actors, from what benchmark/scaling.py wrote."""
    runs = pd.read_csv(out.parent / "data" / "impala_speed.csv")
    of_each = runs.groupby("actors")
    figure, axes = plt.subplots(1, 2, figsize=(7, 2.6), layout="tight")
    words = {"steps_per_second": "steps per second", "mean_lag": "mean lag, gradient steps"}
    for axis, (name, label) in zip(axes, words.items()):
        middle, low, high = of_each[name].median(), of_each[name].min(), of_each[name].max()
        axis.plot(middle.index, middle, "o-", clip_on=False)
        axis.vlines(middle.index, low, high)
        axis.set(xlabel="actors", ylabel=label, ylim=(0, None), xticks=middle.index)
    figure.suptitle("CartPole-v1", fontsize=10)
    save(figure, out)
    caption = (
        "Speed and lag of `impala.py --updates-per-collect 1` over the number of actors: CartPole, median and range of "
        f"{of_each.size().max()} runs of {runs.steps[0]:,} steps, the last three quarters of each; lag in gradient "
        f"steps. {runs.machine[0]}. Command: `python benchmark/scaling.py actors`.\n"
    )
    table = {"steps per second": repeated(of_each["steps_per_second"])}
    table |= {"learner waits": repeated(of_each["learner_waits"], "{:.0%}")}
    table |= {"mean lag": repeated(of_each["mean_lag"], "{:.1f}"), "largest lag": repeated(of_each["largest_lag"])}
    write_page(out, caption, markdown(pd.DataFrame(table).reset_index().astype(str), 0))


def mappo_agents(out: Path) -> None:
    """CPU time of a step over the number of agents, from what benchmark/scaling.py wrote."""
    runs = pd.read_csv(out.parent / "data" / "mappo_agents.csv")
    figure, axis = plt.subplots(figsize=(5, 3), layout="tight")
    table = {}
    for script, of_script in runs.groupby("script"):
        of_each = of_script.groupby("agents").microseconds
        axis.loglog(of_each.median(), "o-", color=COLORS[script], label=script)
        table[script] = repeated(of_each)
    axis.loglog([3, 30], [60, 600], "--", color="#999999", label="in proportion to the agents")
    axis.set(xlabel="agents", ylabel="CPU time of a step, microseconds", title="simple_spread")
    axis.set_xticks(runs.agents.unique(), runs.agents.unique())
    axis.minorticks_off()
    axis.legend(frameon=False)
    save(figure, out)
    caption = (
        "Cost over the number of agents: `--env-id mpe/simple_spread_v3?N=...`, the defaults, training included, "
        f"microseconds of CPU time per environment step (what a run of {runs.steps[0]:,} steps takes longer than a "
        f"quarter of it, median and range of {runs.seed.nunique()}). {runs.machine[0]}. "
        "Command: `python benchmark/scaling.py agents`.\n"
    )
    write_page(out, caption, markdown(pd.DataFrame(table).reset_index().astype(str), 0))


def time_to_score(out: Path) -> None:
    """Return over CPU time beside peers, from what benchmark/time_to_score.py wrote."""
    runs = pd.read_csv(out.parent / "data" / "speed_time_to_score.csv", dtype={"steps": "Int64"})
    curves = pd.read_csv(out.parent / "data" / "speed_time_to_score_curves.csv")
    tasks = runs.groupby("task", sort=False).score.first()
    columns = min(len(tasks), 3)
    rows = -(-len(tasks) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4 * columns, 3.5 * rows), layout="constrained", squeeze=False)
    for axis in axes.flat[len(tasks) :]:
        axis.set_axis_off()
    for axis, (task, score) in zip(axes.flat, tasks.items()):
        axis.axhline(score, color="#999999", linestyle="--", linewidth=1)
        colors = {False: iter(["C0", "C2", "C4"]), True: iter(["C1", "C3"])}  # of ours, of peers: theirs have two words
        for by, of_script in curves[curves.task == task].groupby("by", sort=False):
            color = next(colors[" " in by])
            for seed, curve in of_script.groupby("seed"):
                label = by if seed == of_script.seed.min() else None
                axis.plot(curve.cpu_seconds, curve["return"], color=color, linewidth=1, label=label)
        label = "battles won" if task.startswith("smax/") else "return"
        axis.set(xscale="log", xlabel="CPU-seconds since the start", ylabel=label, title=task)
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.legend(frameon=False, fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    save(figure, out)
    cells = []
    for (task, by), x in runs.groupby(["task", "by"], sort=False):
        reached = x.dropna(subset="cpu_seconds")
        times = f"{reached.cpu_seconds.median():,.0f}" if len(reached) else ""
        if len(reached) > 1:
            times += f" ({reached.cpu_seconds.min():,.0f}-{reached.cpu_seconds.max():,.0f})"
        steps = f"{reached.steps.median():,.0f}" if len(reached) else ""
        budget = f"{x.all_steps.max():,} steps, {x.all_cpu_seconds.median():,.0f} CPU-seconds"
        cells.append([task, f"{x.score.iloc[0]:g}", by, times, steps, f"{len(reached)} of {len(x)}", budget])
    head = ["task", "score", "script", "CPU-seconds until then", "steps", "runs that reached it", "budget"]
    machines = runs.groupby(runs.machine.str.replace(r", load [\d.]+", "", regex=True), sort=False).task.unique()
    machines = "; ".join(f"{machine}: {', '.join(of_it)}" for machine, of_it in machines.items())
    caption = (
        "Return of the last 100 episodes of training over the CPU time of the process, with imports and compilation, "
        "one thread each, a line for each seed; dashed: the score of the table, which has the medians of the runs that "
        "reached it, and their range. Each script has the settings that its authors give, but on LunarLander both have "
        "those of RL Baselines3 Zoo, and on smax/3m ours those of JaxMARL, whose networks are recurrent, and mappo's "
        f"are not. {machines}. Command: "
        "`python benchmark/time_to_score.py --peers FOLDER`.\n"
    )
    write_page(out, caption, markdown(pd.DataFrame(cells, columns=head), 3))


def read_all(folder: Path, *names: str, **options) -> pd.DataFrame:
    """The rows of those of the files that exist."""
    return pd.concat([pd.read_csv(folder / name, **options) for name in names if (folder / name).exists()])


@plt.rc_context({"font.size": 8})
def coppo_matrix(results: Path) -> None:
    """The figures of the matrix games, from what benchmark/matrix_games.py and qtran_matrix.py wrote."""
    curves = read_all(results / "data", "coppo_matrix.csv", "coppo_matrix_opponents.csv")

    def draw(axis, panel: str, every: int = 1, **axis_settings) -> None:
        of_panel = curves[curves.panel == panel]
        for position, variant in enumerate(of_panel.variant.unique()):
            style = "-" if position < 10 else "--"  # there are ten colours
            x = of_panel[of_panel.variant == variant][::-every][::-1]  # with the last
            color = axis.plot(x.x, x["mean"], style, label=variant)[0].get_color()
            axis.fill_between(x.x, x.low, x.high, alpha=0.2, linewidth=0, color=color)
        axis.set(**axis_settings)

    steps, reward, variance = "environment steps", "reward of the team", "variance of the policy gradient"
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), layout="constrained")
    draw(axes[0, 0], "figure 1, reward", xlabel=steps, ylabel=reward)
    label = "advantage of the three alike"
    draw(axes[0, 1], "figure 1, advantage after a penalty", xlabel="penalty", ylabel=label, yscale="symlog")
    label = "change of that advantage since epoch 1"
    draw(axes[1, 0], "figure 1, advantage over the epochs", xlabel="epoch after a penalty", ylabel=label)
    draw(axes[1, 1], "figure 1, variance", xlabel=steps, ylabel=variance, yscale="log")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), frameon=False, loc="outside right upper")
    finish_games(figure, results / "coppo_matrix_penalty", "The penalty game (figure 1 of the paper)")

    figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    draw(axes[0], "figure 2, reward", xlabel=steps, ylabel=reward)
    draw(axes[1], "figure 2, variance", xlabel=steps, ylabel=variance, yscale="log")
    axes[0].legend(frameon=False)
    finish_games(figure, results / "coppo_matrix_inner_clip", "The inner clip on the penalty game (figure 2)")

    figure, axes = plt.subplots(2, 3, figsize=(11, 6), layout="constrained", sharex=True)
    for game, (row, column) in GAMES.items():
        draw(axes[row, column], f"figure 5, {game}", every=3, title=game)
        axes[row, column].set(xlabel=steps if row else "", ylabel="" if column else reward)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), frameon=False, loc="outside right upper")
    finish_games(figure, results / "coppo_matrix_games", "The six other games (figure 5)")


def qtran_matrix(out: Path) -> None:
    """Tables of joint values, from what benchmark/qtran_matrix.py wrote."""
    data = pd.read_csv(out.parent / "data" / "qtran_matrix.csv")
    labels = {("VDN", "joint"): "VDN", ("QMIX", "joint"): "QMIX"}
    labels |= {("QTRAN", "joint"): "QTRAN, joint value", ("QTRAN", "sum"): "QTRAN, sum and state's value"}
    panels = {"reward": pd.DataFrame([[8, -12, -12], [-12, 0, 0], [-12, 0, 0]], dtype=float)}
    rows = []
    for (script, table), label in labels.items():
        learned = data[(data.script == script) & (data.table == table)]
        panels[label] = learned.pivot(index="row", columns="column", values="mean")
        found = f"{learned['best found'].iloc[0]} of {learned.runs.iloc[0]}"
        rows.append([label, *(f"{x:.2f} ({d:.2f})" for x, d in zip(learned["mean"], learned["std"])), found])
    figure, axes = plt.subplots(1, len(panels), figsize=(11, 2.5), layout="constrained")
    for axis, (label, values) in zip(axes, panels.items()):
        axis.pcolormesh(values, cmap="coolwarm", vmin=-12, vmax=12)  # imshow: bytes of the machine
        for row, column in [(i, j) for i in range(3) for j in range(3)]:
            axis.text(column + 0.5, row + 0.5, f"{values.iloc[row, column]:.1f}", ha="center", va="center", fontsize=9)
        axis.set(title=label, xticks=[0.5, 1.5, 2.5], yticks=[0.5, 1.5, 2.5], ylim=(3, 0), aspect="equal")
        axis.set(xticklabels=range(3), yticklabels=range(3))
        axis.title.set_fontsize(9)
    save(figure, out)
    caption = (
        "The matrix game of QTRAN's paper, `matrix/qtran`, with full exploration (20,000 plays): what joint actions "
        f"are worth, and what was learned of them, means of {data.runs.iloc[0]} runs; in the table with the deviation "
        "between runs, and in how many of them the agents' best actions are the best joint action. Rows are the first "
        "agent's actions. Command: `benchmark/baselines.sh`.\n"
    )
    cells = [f"{i}, {j}" for i in range(3) for j in range(3)]
    write_page(out, caption, markdown(pd.DataFrame(rows, columns=["", *cells, "best found"]), 1))


def cross_play(out: Path) -> None:
    """Who learned more on which side, from what benchmark/cross_play.py wrote."""
    data = pd.read_csv(out.parent / "data" / f"{out.name}.csv")
    side, other = data.columns[1:3]
    names = list(data[side].unique())
    values, other_values = (
        data.pivot(index=side, columns=other, values=column).loc[names, names] for column in ("return", "other return")
    )
    figure, axes = plt.subplots(1, 2, figsize=(10, 1 + 0.6 * len(names)), layout="constrained")
    for axis, table, whose in ((axes[0], values, side), (axes[1], other_values, other)):
        axis.pcolormesh(table, cmap="viridis")  # imshow: bytes of the machine
        for (row, column), value in np.ndenumerate(table):
            text = {"ha": "center", "va": "center", "fontsize": 9}
            axis.text(column + 0.5, row + 0.5, number(value), **text, bbox={"fc": "white", "ec": "none", "alpha": 0.7})
        places = np.arange(len(names)) + 0.5
        axis.set(xticks=places, yticks=places, ylim=(len(names), 0), title=f"return of one agent, {whose}")
        axis.set_xticks(places, names, fontsize=8, rotation=20, ha="right", rotation_mode="anchor")
        axis.set_yticks(places, names, fontsize=8)
        axis.set(xlabel=f"{other} of", ylabel=f"{side} of")
        axis.title.set_fontsize(9)
    save(figure, out)
    caption = (
        f"`{data.env_id[0]}`: the {side} of each script against the {other} of each. {data.episodes[0]} episodes with "
        "the most probable actions for each pair of runs of different seeds, so nobody plays against those it has "
        f"learned with. Return of one agent of each side, {side} and {other}, mean (deviation over the pairs of "
        "runs). Made by `benchmark/cross_play.py`.\n"
    )
    cells = [
        f"{number(x['return'])} ({x['std']:.1f}), {number(x['other return'])} ({x['other std']:.1f})"
        for _, x in data.iterrows()
    ]
    table = data.assign(cell=cells).pivot(index=side, columns=other, values="cell").loc[names, names].reset_index()
    write_page(out, caption, markdown(table.rename(columns={side: f"{side} of, against {other} of"}), 1))


def finish_games(figure, out: Path, title: str) -> None:
    save(figure, out)
    rows = read_all(out.parent / "data", "coppo_matrix_final.csv", "coppo_matrix_opponents_final.csv", dtype=str)
    rows = rows[rows.figure == out.name].drop(columns="figure")
    rows = rows.sort_values("game", key=lambda games: games.map(list(games.unique()).index), kind="stable")
    caption = (
        f"{title}: means of the runs in the table with their 95 % bootstrap intervals (of three runs: their range); "
        "solved: the mean of the last 1,000 plays is above half of the best reward. Commands: `benchmark/coppo.sh`, "
        "`benchmark/baselines.sh`.\n"
    )
    write_page(out, caption, markdown(rows, 2))


def readme_results(results: Path) -> str:
    """README.md's table: the last evaluation, the last games of training, or battles won in its last tenth."""
    known = yardsticks().assign(battles=lambda x: x.metric == "battle_won")
    known, rows = known[known.battles | (known.metric == "ep_reward")], []
    for name, (scripts, settings, *tasks) in README.items():
        data, figure = read_figure(results / name)
        data = data[data.settings.fillna(figure["note"]).str.contains(settings, regex=False)]
        for script, task in product(scripts.split(), tasks or data.env_id.unique()):
            runs = data[(data.script == script) & (data.env_id == task)]
            is_battle = figure["tag"] == "rollout/battle_won"
            last = runs[runs.metric == FINAL[not name.startswith(AS_PUBLISHED)]]
            final = runs[runs.metric == figure["tag"] + LATE] if is_battle else last
            final = final.assign(settings=settings)  # all that have them, together
            mean, low, high = summary(final)[["mean", "low", "high"]].iloc[0]
            seeds = runs.seeds.max() if "seeds" in runs else runs.seed.nunique()
            result = number(mean) + ("" if seeds == 1 else f" [{number(low, mean)}, {number(high, mean)}]")
            minutes = runs.groupby("seed").cpu_seconds.max().mean() / 60 if "seed" in runs else math.nan
            yard = known[(known.env_id == task) & (known.battles == is_battle)].set_index("kind")
            random, best = (f"{yard.score[kind]:g}" if kind in yard.index else "" for kind in ("random", "best"))
            stopped = (runs.metric == PLANNED).sum()
            count = f"{seeds}" + (f", {stopped} stopped" if stopped else "")
            words = runs.settings.fillna(figure["note"])
            star = "" if words.str.fullmatch("the defaults( of (each script|both).*)?").all() else " *"
            rows.append([task + ", share of battles won" * is_battle, f"`{script}.py`{star}", count])
            ends = runs.groupby("seed").step.max() if "seed" in runs else runs.step
            first = f"{ends.min():,.0f} to " if stopped else ""
            rows[-1] += [f"{first}{ends.max():,.0f}", "" if math.isnan(minutes) else f"{minutes:.0f}", result, random]
            rows[-1].append(f"{best} ({yard.label['best']})" if best else "")
    head = ["task", "script", "seeds", "steps", "CPU-minutes", "result", "random", "to compare with"]
    table = pd.DataFrame(rows, columns=head).groupby(["task", "random", "to compare with"], sort=False).agg("<br>".join)
    return markdown(table.reset_index()[head], 2)


def main(args: Args) -> None:
    data = args.results / "data"
    figures = json.loads((data / "figures.json").read_text()) if (data / "figures.json").exists() else {}
    tables = {path.stem for path in data.glob("*.csv")}
    check(bool(tables), f"{data} has no table of report.py")
    for name in figures:
        redraw(args.results / name)
    if figures:
        write_html(args.results)
    for draw in (impala_speed, mappo_agents, qtran_matrix):
        if draw.__name__ in tables:
            draw(args.results / draw.__name__)
    if "speed_time_to_score" in tables:
        time_to_score(args.results / "speed_time_to_score")
    if {"coppo_matrix", "coppo_matrix_opponents"} <= tables:
        coppo_matrix(args.results)
    for path in sorted(data.glob("*_cross_play.csv")):
        cross_play(args.results / path.stem)
    if args.results == Args.results:
        before, _, rest = (ROOT / "README.md").read_text().partition(README_START)
        table = readme_results(args.results)
        (ROOT / "README.md").write_text(before + README_START + table + README_END + rest.partition(README_END)[2])
    for script in sorted((args.results.parent / "figures").glob("*.py")):
        runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except UsageError as error:
        print(f"redraw: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # a folder that cannot be written
        sys.exit(f"redraw: {error}")
