"""Draws docs/figures/methods.svg: how far every method is from `grpo`, in units of the gain that each task could show.

python figure.py
"""

import hashlib
import json
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt
import numpy as np
from gsm8k import qwen_methods, qwen_spread, shown_label
from matplotlib.axes import Axes
from packed import HERE, Spread, level_of, table_names
from summarise import LEVELS, spread

OUT = HERE.parent.parent / "docs" / "figures" / "methods.svg"
COLOURS = {"group": "#0072B2", "turn": "#E69F00", "token": "#CC3311"}
"""Level of credit → colour of its methods."""
NAMED = 1.0
"""Methods that are farther from `grpo` than this many needed gains are named."""
WIDTH = 0.30
"""Half the width over which the methods of a task are spread, so that their points do not hide each other."""


def points() -> dict[str, list[tuple[str, str, float]]]:
    """Task → method, level of credit, and difference to `grpo` over the needed gain."""
    spreads: dict[str, Spread] = {name: spread(name) for name in table_names()}
    spreads["GSM8K"] = qwen_spread(qwen_methods())
    return {
        name: [
            (shown_label(label), level_of(label), round(float(gain / found.half), 4))
            for label, gain in zip(found.labels, found.gains, strict=True)
            if label != "grpo"
        ]
        for name, found in spreads.items()
    }


def digest() -> str:
    """Hash of what the figure shows, which it carries: a test notices a figure that is out of date."""
    return hashlib.sha256(json.dumps(points(), sort_keys=True).encode()).hexdigest()


def draw_task(axes: Axes, place: int, own: list[tuple[str, str, float]]) -> None:
    """The methods of one task in one column; those outside the band have their names beside them."""
    ranked = sorted(own, key=lambda point: point[2])
    near = [point for point in ranked if abs(point[2]) <= NAMED]
    shifts = dict(zip((name for name, _, _ in near), np.linspace(-WIDTH, WIDTH, len(near)), strict=True))
    free = np.inf
    for name, level, gain in reversed(ranked):
        x = place + float(shifts.get(name, -WIDTH))
        axes.scatter(x, gain, s=18, color=COLOURS[level], linewidths=0, zorder=3)
        if name not in shifts:
            height = min(gain, free)  # names do not overlap
            free = height - 0.17
            line = {"arrowstyle": "-", "lw": 0.5, "color": "0.6", "shrinkA": 0, "shrinkB": 2}
            axes.annotate(name, (x, gain), (x + 0.1, height), fontsize=8, va="center", arrowprops=line)


def draw(path: Path) -> None:
    """All tasks side by side, the band of what they could not have shown in grey."""
    shown, axes = plt.subplots(figsize=(11, 5.2), layout="constrained")
    found = points()
    axes.axhspan(-1, 1, color="0.92", zorder=0)
    axes.axhline(0, color="0.4", lw=0.8, zorder=1)
    for place, own in enumerate(found.values()):
        draw_task(axes, place, own)
    for level, colour in COLOURS.items():
        axes.scatter([], [], s=18, color=colour, label=LEVELS[level])
    axes.legend(loc="lower left", fontsize=8, frameon=False, title="advantages", title_fontsize=8, alignment="left")
    axes.set_xlim(-0.5, len(found) - 0.3)
    axes.set_xticks(range(len(found)), [f"{name}\n{len(own)} methods" for name, own in found.items()], fontsize=9)
    axes.tick_params(length=0)
    axes.set_ylabel("difference to grpo ÷ needed gain")
    axes.text(len(found) - 0.32, 0.94, "not resolved", fontsize=8, color="0.4", ha="right", va="top")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    shown.savefig(path, metadata={"Date": None, "Description": digest()})
    plt.close(shown)


if __name__ == "__main__":
    mpl.rcParams["svg.hashsalt"] = "scoregram"
    draw(OUT)
