"""Time relative to a plain step against tokens and rollouts."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scoregram.bench.gram import Row


def plot_ratios(rows: "Sequence[Row]", path: Path) -> None:
    """One line per way and number of rollouts over tokens; the dashed line is the plain step."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    ran = [row for row in rows if not row.skipped and row.way != "plain"]
    for way in dict.fromkeys(row.way for row in ran):
        for count in sorted({row.rollouts for row in ran}):
            line = sorted((row.tokens, row.ratio) for row in ran if row.way == way and row.rollouts == count)
            axes.plot(*zip(*line, strict=True), marker="o", label=f"{way}, N = {count}")
    axes.axhline(1.0, color="black", linestyle="--", linewidth=1)
    axes.set(xscale="log", xlabel="tokens per rollout", ylabel="time / plain forward and backward pass")
    axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
