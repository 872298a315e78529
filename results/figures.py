"""Figures of the committed replications as SVG, drawn from `results/*/exhibits.json`.

python results/figures.py    draw them into results/*/figures

A figure carries the hash of its data, so that a test notices a figure that is out of date.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
STYLES = {"measured": "-", "null": ":", "bound": "--", "paper": "-."}
"""Role of a series → style of its line."""


def figures(folder: Path) -> list[dict[str, Any]]:
    """The figures among the exhibits of a replication."""
    exhibits = json.loads((folder / "exhibits.json").read_text(encoding="utf-8"))["exhibits"]
    return [one for one in exhibits if one["kind"] == "figure"]


def digest(figure: dict[str, Any]) -> str:
    """Hash of the data of a figure."""
    return hashlib.sha256(json.dumps(figure, sort_keys=True).encode()).hexdigest()


def draw(figure: dict[str, Any], path: Path) -> None:
    """Draw one figure into a file: a series and its null in one colour, intervals as bands."""
    shown, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    names = list(dict.fromkeys(one["name"].partition(",")[0] for one in figure["series"]))
    for one in figure["series"]:
        colour = f"C{names.index(one['name'].partition(',')[0])}"
        x, y = numbers(one["x"]), numbers(one["y"])
        if one["points"]:
            axes.scatter(x, y, s=10, color=colour, alpha=0.6, label=one["name"])
            continue
        axes.plot(x, y, STYLES[one["role"]], color=colour, label=one["name"])
        if one["low"]:
            axes.fill_between(x, numbers(one["low"]), numbers(one["high"]), color=colour, alpha=0.12, linewidth=0)
    axes.set(title=figure["title"], xlabel=figure["x_title"], ylabel=figure["y_title"])
    if figure["y_log"]:
        axes.set_yscale("log")
    shown.legend(loc="outside right upper", fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    shown.savefig(path, metadata={"Date": None, "Description": digest(figure)})
    plt.close(shown)


def numbers(values: list[float | None]) -> list[float]:
    """Values with `nan`, which matplotlib leaves out, for undefined numbers."""
    return [float("nan") if value is None else value for value in values]


def draw_all(folder: Path) -> None:
    """Draw every figure of a replication into its folder."""
    mpl.rcParams["svg.hashsalt"] = "scoregram"
    for figure in figures(folder):
        draw(figure, folder / "figures" / f"{figure['id']}.svg")


if __name__ == "__main__":
    for exhibits in sorted(HERE.glob("*/exhibits.json")):
        draw_all(exhibits.parent)
