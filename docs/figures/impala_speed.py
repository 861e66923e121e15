"""Draws docs/results/impala_speed.svg from the table in impala_speed.md: `python docs/figures/impala_speed.py`."""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

matplotlib.rcParams["svg.hashsalt"] = "impala_speed"  # the same file each time
RESULTS = Path(__file__).parent.parent / "results"

lines = (RESULTS / "impala_speed.md").read_text().partition("| actors |")[2].splitlines()[2:6]
rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
actors, rates = [int(row[0]) for row in rows], [int(row[1].replace(",", "")) for row in rows]
lags = [float(row[3].partition(",")[0]) for row in rows]

figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.6))
left.plot(actors, rates, "o-", color="#1565c0")
left.set(xlabel="actors", ylabel="steps per second", ylim=(0, None), xticks=actors)
right.plot(actors, lags, "o-", color="#c62828")
right.set(xlabel="actors", ylabel="mean lag, gradient steps", ylim=(0, None), xticks=actors)
figure.suptitle("CartPole-v1 on two cores", fontsize=10)
figure.tight_layout()
figure.savefig(RESULTS / "impala_speed.svg", facecolor="white", metadata={"Date": None})
