"""Draws the two diagrams of docs/algorithms/maddpg.md beside this file: `python docs/figures/maddpg.py`."""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

matplotlib.rcParams.update({"svg.hashsalt": "maddpg", "svg.fonttype": "none"})  # the same bytes, letters as text
DATA, ACTOR, CRITIC, LOSS = "#eceff1", "#cfe3f7", "#fbe0c4", "#e2d4f0"
INK, GRADIENT = "#37474f", "#c62828"


class Figure:
    def __init__(self, width: float, height: float, left: float = 0.0):
        self.figure = plt.figure(figsize=(width, height))
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(left, left + width), ylim=(0, height))
        self.axes.axis("off")

    def box(self, x, y, width, height, text, color, size=10.5):
        """A box around (x, y); returns (x, y, half width, half height)."""
        corner = (x - width / 2, y - height / 2)
        style = "round,pad=0,rounding_size=0.08"
        self.axes.add_patch(FancyBboxPatch(corner, width, height, style, facecolor=color, edgecolor=INK, lw=1))
        self.axes.text(x, y, text, ha="center", va="center", fontsize=size, color="black")
        return x, y, width / 2, height / 2

    def arrow(self, start, end, gradient=False, bend=0.0):
        line = {"color": GRADIENT, "lw": 1.8, "ls": (0, (4, 2))} if gradient else {"color": INK, "lw": 1.2}
        line |= {"arrowstyle": "-|>", "mutation_scale": 13, "connectionstyle": f"arc3,rad={bend}"}
        self.axes.add_patch(FancyArrowPatch(start, end, **line))

    def text(self, x, y, text, color="black", size=10, ha="center", weight="normal"):
        self.axes.text(x, y, text, ha=ha, va="center", fontsize=size, color=color, weight=weight)

    def save(self, name: str) -> None:
        path = Path(__file__).with_name(f"{name}.svg")
        self.figure.savefig(path, facecolor="white", metadata={"Date": None})
        plt.close(self.figure)


def architecture() -> None:
    """Acting on the left, learning on the right, the replay buffer between them."""
    f = Figure(11.2, 5.4, left=-0.7)
    f.text(2.3, 5.1, "acting (NumPy, no gradient)", weight="bold")
    f.text(7.9, 5.1, "learning (torch)", weight="bold")
    f.box(2.3, 0.75, 3.6, 0.6, "N environments", DATA)
    for i, (x, name) in enumerate(((0.9, "1"), (2.3, "2"), (3.7, "A"))):
        f.box(x, 2.1, 1.1, 0.55, f"$o_{name}$, id", DATA)
        f.box(x, 3.1, 1.1, 0.65, r"actor $\mu_\theta$", ACTOR)
        f.box(x, 4.2, 1.1, 0.6, f"$a_{name}$ one-hot", DATA, 9.5)
        f.arrow((x, 1.05), (x, 1.82))
        f.arrow((x, 2.38), (x, 2.77))
        f.arrow((x, 3.43), (x, 3.9))
        if i == 2:
            f.text(3.0, 3.1, "...", size=14)
    f.text(2.3, 4.7, "hard Gumbel samples, illegal actions masked", size=9, color=INK)
    f.arrow((0.3, 4.2), (0.45, 0.75), bend=0.3)
    f.box(5.35, 2.1, 1.25, 2.1, "replay:\n5,000\nepisodes\n\n$s, o, a, r$,\nmasks", DATA, 9.5)
    f.arrow((4.1, 0.75), (5.35, 1.05), bend=0.2)
    f.arrow((4.25, 4.2), (5.35, 3.15), bend=-0.2)
    f.arrow((5.98, 2.1), (6.55, 2.1))
    f.text(6.27, 2.5, "batch", size=8.5, color=INK)
    f.box(7.3, 2.1, 1.5, 2.6, "$s$\n\n$a_1$\n\n$a_2$\n...\n$a_A$", DATA, 10)
    f.box(9.25, 3.0, 1.9, 0.8, "critic $Q_1(s, a_1..a_A)$", CRITIC, 9.5)
    f.box(9.25, 1.3, 1.9, 0.8, "critic $Q_A(s, a_1..a_A)$", CRITIC, 9.5)
    f.text(9.25, 2.15, "...", size=14)
    f.arrow((8.05, 2.5), (8.3, 3.0))
    f.arrow((8.05, 1.7), (8.3, 1.3))
    f.text(7.95, 4.35, "one critic where all agents earn the same,\nelse one for each, in one batched product", size=9)
    f.text(7.95, 0.45, r"target copies $\mu_{\theta^-}$, $Q_{\phi^-}$ follow by Polyak averaging", size=9)
    f.save("maddpg_architecture")


def gradients() -> None:
    """Which path each of the two losses takes back."""
    f = Figure(10.4, 5.6)
    f.text(0.25, 5.3, "critic: temporal differences", weight="bold", ha="left")
    f.box(1.3, 4.5, 1.9, 0.6, "$s^b, a^b_1..a^b_A$", DATA)
    f.box(4.1, 4.5, 1.5, 0.7, r"$Q_\phi$", CRITIC)
    f.box(9.1, 4.0, 2.0, 0.8, "mean square\nof the difference", LOSS, 9.5)
    f.box(1.3, 3.4, 1.9, 0.6, "the next $s^b, o^b$, masks", DATA)
    f.box(4.1, 3.4, 2.4, 0.7, r"$\mu_{\theta^-}$, hard samples $\to Q_{\phi^-}$", "#f5f5f5", 9)
    f.box(6.85, 3.4, 1.6, 0.6, r"$r^b + \gamma\, Q_{\phi^-}$", DATA, 10)
    f.arrow((2.25, 4.5), (3.35, 4.5))
    f.arrow((2.25, 3.4), (2.9, 3.4))
    f.arrow((5.3, 3.4), (6.05, 3.4))
    f.arrow((4.85, 4.5), (8.1, 4.15))
    f.arrow((7.65, 3.4), (8.1, 3.75))
    f.arrow((8.1, 4.35), (4.9, 4.72), gradient=True)
    f.text(6.6, 4.85, r"gradient to $\phi$", GRADIENT, 9.5)
    f.text(6.85, 2.95, "no gradient; no value after a termination", INK, 8.5)

    f.axes.plot([0.2, 10.2], [2.65, 2.65], color="#b0bec5", lw=1)
    f.text(0.25, 2.35, "actor, the part of agent $i$", weight="bold", ha="left")
    f.box(1.3, 1.6, 1.9, 0.6, "$o^b_i$, id, mask", DATA)
    f.box(3.7, 1.6, 1.5, 0.7, r"actor $\mu_\theta$", ACTOR)
    f.box(5.85, 1.6, 1.5, 0.6, r"soft $a_i$", "#ffffff")
    f.box(5.85, 0.6, 3.0, 0.6, "$s^b$, and $a^b_j$ of all others $j \\neq i$", DATA, 9.5)
    f.box(8.25, 1.2, 1.3, 0.8, r"$Q_{\phi, i}$", CRITIC)
    f.box(9.7, 1.2, 0.9, 0.6, "$-Q_i$", LOSS)
    f.arrow((2.25, 1.6), (2.95, 1.6))
    f.arrow((4.45, 1.6), (5.1, 1.6))
    f.arrow((6.6, 1.6), (7.6, 1.32))
    f.arrow((7.35, 0.6), (7.85, 0.8))
    f.arrow((8.9, 1.2), (9.25, 1.2))
    f.arrow((9.6, 1.52), (8.45, 1.62), gradient=True, bend=0.25)
    f.arrow((8.1, 1.62), (6.4, 1.92), gradient=True, bend=0.15)
    f.arrow((5.6, 1.92), (4.2, 1.97), gradient=True, bend=0.12)
    f.text(6.9, 2.25, r"gradient to $\theta$ through $a_i$ only; $\phi$ stays as it is", GRADIENT, 9.5)
    f.text(2.3, 0.6, "all $i$ at once: A rows of one product", INK, 8.5)
    f.save("maddpg_gradients")


if __name__ == "__main__":
    architecture()
    gradients()
