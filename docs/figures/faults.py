"""Draws the two soaks of docs/faults.md beside this file, from what benchmark/faults.py sampled.

python docs/figures/faults.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import pandas as pd

matplotlib.rcParams.update({"svg.hashsalt": "faults", "svg.fonttype": "none"})  # the same bytes, letters as text
matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
HERE = Path(__file__).resolve().parent


def main() -> None:
    figure, axes = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
    for script, color in (("maddpg_multienvs", "#1565c0"), ("impala", "#c62828")):
        rows = pd.read_csv(HERE.parent / "results" / "data" / f"faults_soak_{script}.csv")
        for axis, column in zip(axes, ("memory", "descriptors"), strict=True):
            axis.plot(rows.seconds / 60, rows[column], color=color, label=f"{script}.py")
    for axis, label in zip(axes, ("memory, MiB", "open descriptors"), strict=True):
        axis.set(xlabel="minutes", ylabel=label, xlim=(0, None), ylim=(0, None))
    axes[0].legend(frameon=False)
    figure.savefig(HERE / "faults_soak.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
