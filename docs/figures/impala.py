"""Draws the scaling model of docs/algorithms/impala_ray.md beside this file and prints its table.

python docs/figures/impala.py
"""

from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np

matplotlib.rcParams.update({"svg.hashsalt": "impala", "svg.fonttype": "none"})  # the same bytes, letters as text
matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
BANDWIDTH = 1.25e9  # bytes/s of a learner's link: 10 Gbit/s
WAIT = 0.2e-6  # s of a learner for each call that ray.wait looks at, once for every unroll
CALLS = 1.6e-3  # s of a learner for each unroll that comes through Ray: its result, the next call, the new parameters


@dataclass
class Task:
    """What was measured on one core (CPU seconds), for N unrolls of T steps at a time."""

    name: str
    batch: int  # B = N T, steps
    act: float  # a, s per step
    learn: float  # l, s per step and gradient step
    updates: int  # gradient steps for each batch
    unroll_bytes: float  # s, per step
    parameter_bytes: float  # P
    hand_over: float  # s per batch: copy the slot, write the parameters

    def limits(self, actors: float, learners: int = 1) -> dict[str, float]:
        """Steps per second that each part could do, if it were the only one that is slow."""
        per_learner = actors / learners
        batch_seconds = self.updates * self.learn * self.batch + self.hand_over + CALLS + 2 * per_learner * WAIT
        if learners > 1:  # ring all-reduce of every gradient
            batch_seconds += self.updates * 2 * self.parameter_bytes / BANDWIDTH * (learners - 1) / learners
        return {
            "actors": actors / self.act,
            "learner": learners * self.batch / batch_seconds,
            "unrolls in": learners * BANDWIDTH / self.unroll_bytes,
            "parameters out": learners * BANDWIDTH / (self.parameter_bytes / self.batch),
        }

    def lag(self, actors: float, learners: int = 1) -> float:
        """Gradient steps between acting and learning: both calls of every actor come first."""
        return 2 * actors / learners * self.updates

    def learners_needed(self, actors: int) -> int:
        """The smallest number of learners that keeps up with the actors; 0 if none does."""
        for learners in range(1, 8 * actors):
            limits = self.limits(actors, learners)
            if min(limits.values()) >= 0.999 * limits["actors"]:
                return learners
        return 0


TASKS = [
    Task("CartPole, N = 16", 320, 27.6e-6, 17.4e-6, 1, 68, 36_620, 0.13e-3),
    Task("CartPole, N = 256", 5120, 21.0e-6, 3.8e-6, 1, 68, 36_620, 0.16e-3),
    Task("Pong, shallow", 640, 825e-6, 458e-6, 1, 29_669, 2_711_772, 2.3e-3),
    Task("Pong, deep", 640, 2828e-6, 9073e-6, 1, 29_669, 4_364_124, 4.4e-3),
]


def figures(x: float) -> str:
    """Two significant digits, with thousands separated."""
    digits = 1 - int(np.floor(np.log10(x)))
    return f"{round(x, digits):,.0f}"


def table() -> str:
    lines = ["| | actor cores | actors could | one learner | unrolls in | parameters out | lag | learners to keep up |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|---:|"]
    for task in TASKS:
        for actors in (16, 256, 4096):
            limits = task.limits(actors)
            slowest = min(limits, key=limits.get)
            cells = [f"**{figures(x)}**" if name == slowest else figures(x) for name, x in limits.items()]
            needed = task.learners_needed(actors)
            cells = [task.name, f"{actors:,}", *cells, f"{task.lag(actors):,.0f}", f"{needed:,}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw() -> None:
    figure, axes = plt.subplots(1, len(TASKS), figsize=(13, 3.4), sharex=True)
    actors = 2.0 ** np.arange(0, 13.01, 0.1)
    for axis, task in zip(axes, TASKS):
        for learners, color in ((1, "#c62828"), (16, "#e08a1e"), (256, "#2e7d32")):
            rates = [min(task.limits(a, learners).values()) for a in actors]
            axis.plot(actors, rates, color=color, label=f"{learners} learner{'s' if learners > 1 else ''}")
        axis.plot(actors, actors / task.act, "--", color="#37474f", lw=1, label="actors alone")
        for mark in (16, 256, 4096):
            axis.axvline(mark, color="#cfd8dc", lw=0.8, zorder=0)
        axis.set(xscale="log", yscale="log", title=task.name, xlabel="actor cores")
        axis.set_xticks([1, 16, 256, 4096], ["1", "16", "256", "4,096"])
        axis.minorticks_off()
    axes[0].set_ylabel("environment steps per second")
    axes[0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("impala_scaling.svg"), facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    draw()
    print(table())
