"""Draw docs/figures/effective_rank.svg from the package: `.venv/bin/python docs/figures/effective_rank.py`.

Left: the effective rank that a paper reports for its stacked gradient matrices, beside what its own top-1 fractions
leave possible and what orthogonal scores would give. Right: the top-1 fractions themselves, beside the same null.
Every number but the printed ones comes from a function of `scoregram`; no model is run.
"""

from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from scoregram.spectra import expected_orthogonal_effective_rank, feasible_interval
from scoregram.theory.theorems import expected_orthogonal_top1_fraction

OUT = Path(__file__).parent / "effective_rank.svg"
PRINTED_TOP1 = {2: (0.6, 0.7), 4: (0.7, 0.8), 8: (0.5, 0.6)}
"""Table 1 of arXiv:2606.29238; the effective rank beside each row is printed as about 2."""
PRINTED_RANK = 2.0
COLOURS = {2: "#7a7a7a", 4: "#c2571a", 8: "#1f5fa8"}
RATES = np.linspace(0.02, 0.98, 193)


def draw_effective_rank(axes: Axes) -> None:
    """Printed value, feasible interval and null at each group size."""
    for place, (rollouts, fractions) in enumerate(PRINTED_TOP1.items()):
        ends = [feasible_interval("effective_rank", f, rollouts) for f in fractions]
        low, high = min(end.low for end in ends), max(end.high for end in ends)
        axes.bar(place - 0.16, high - low, bottom=low, width=0.2, color="#c9d8ea", label="possible, given top-1")
        nulls = [expected_orthogonal_effective_rank(p, rollouts) for p in (0.9, 0.5)]
        axes.plot([place + 0.16] * 2, nulls, "-", color="#333333", lw=1)
        axes.plot(
            [place + 0.16] * 2, nulls, "_", color="#333333", ms=12, label="null: orthogonal scores, p = 0.9 and 0.5"
        )
        for rate, null in zip((0.9, 0.5), nulls, strict=True):
            if nulls[1] - nulls[0] > 0.1:
                axes.annotate(f"p = {rate}", (place + 0.26, null), va="center", fontsize=8, color="#333333")
        axes.plot(place - 0.16, PRINTED_RANK, "o", color="#b3261e", ms=6, label="printed: about 2")
        axes.annotate(f"{low:.2f} to {high:.2f}", (place - 0.16, low - 0.45), ha="center", fontsize=8, color="#1f5fa8")
    axes.set_xticks(range(len(PRINTED_TOP1)), [f"R = {rollouts}" for rollouts in PRINTED_TOP1])
    axes.set(ylim=(0, 8), xlim=(-0.5, 2.75), ylabel="effective rank (Σσ)² / Σσ²")
    axes.set_title("“About 2” is the floor its own top-1 fractions force", fontsize=10, loc="left")
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), frameon=False, fontsize=8, loc="upper left")


def draw_top1_fraction(axes: Axes) -> None:
    """Null curve over the success rate and printed range at each group size."""
    for rollouts, (low, high) in PRINTED_TOP1.items():
        null = np.array([expected_orthogonal_top1_fraction(float(p), rollouts) for p in RATES])
        axes.plot(RATES, null, color=COLOURS[rollouts], lw=1.6)
        axes.plot([1.04, 1.04], [low, high], color=COLOURS[rollouts], lw=5, solid_capstyle="butt", clip_on=False)
        axes.annotate(f"R = {rollouts}", (1.07, (low + high) / 2), va="center", fontsize=8, color=COLOURS[rollouts],
                      annotation_clip=False)  # fmt: skip
    order = [p for p in RATES if in_printed_order(float(p))]
    axes.axvspan(min(order), max(order), color="#f2efe6", zorder=0)
    axes.annotate("null has the printed\norder 4 > 2 > 8", (0.5, 0.92), ha="center", va="top", fontsize=8)
    axes.annotate("printed", (1.1, 0.83), ha="center", fontsize=8, annotation_clip=False)
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="success rate p of the prompt", ylabel="top-1 fraction of the energy")
    axes.set_title("The printed order of top-1 fractions needs only |A|", fontsize=10, loc="left")


def in_printed_order(p: float) -> bool:
    """Whether orthogonal scores give R = 4 the largest and R = 8 the smallest top-1 fraction."""
    two, four, eight = (expected_orthogonal_top1_fraction(p, rollouts) for rollouts in (2, 4, 8))
    return four > two > eight


def main() -> None:
    """Draw both panels and write the file, the same bytes every time."""
    plt.rcParams.update({"svg.hashsalt": "scoregram", "svg.fonttype": "path", "font.size": 9, "axes.spines.top": False,
                         "axes.spines.right": False})  # fmt: skip
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.9), gridspec_kw={"wspace": 0.25})
    draw_effective_rank(left)
    draw_top1_fraction(right)
    figure.savefig(OUT, bbox_inches="tight", facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main()
