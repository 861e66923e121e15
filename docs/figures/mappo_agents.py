"""Draws docs/results/mappo_agents.svg from the table in mappo_agents.md: `python docs/figures/mappo_agents.py`."""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

matplotlib.rcParams["svg.hashsalt"] = "mappo_agents"  # the same file each time
RESULTS = Path(__file__).parent.parent / "results"

lines = (RESULTS / "mappo_agents.md").read_text().partition("| agents |")[2].splitlines()[2:6]
rows = [[cell.strip().replace(",", "") for cell in line.strip("|").split("|")] for line in lines]
figure, axis = plt.subplots(figsize=(5, 3))
for column, label in ((1, "ippo"), (2, "mappo")):
    points = [(int(row[0]), int(row[column])) for row in rows if row[column]]
    axis.loglog(*zip(*points), "o-", label=label)
axis.loglog([3, 30], [166, 1660], "--", color="#999999", label="in proportion to the agents")
axis.set(xlabel="agents", ylabel="CPU time of a step, microseconds", title="simple_spread", xticks=[3, 6, 12, 30])
axis.set_xticklabels([3, 6, 12, 30])
axis.minorticks_off()
axis.legend(frameon=False)
figure.tight_layout()
figure.savefig(RESULTS / "mappo_agents.svg", facecolor="white", metadata={"Date": None})
