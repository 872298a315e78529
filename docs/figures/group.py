"""Draw docs/figures/group.svg, one real group under the glass: `.venv/bin/python docs/figures/group.py`.

Left: cosines between the scores of the 16 rollouts of one GSM8K prompt, right ones first. Middle: the share of each
rollout in the GRPO update. Right: the effective rank of the group and of its sub-blocks of 2, 4 and 8, beside the null.
The Gram is stored in results/fixed-policies; no model is run.
"""

from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
import numpy as np
import pyarrow.parquet as pq
import torch
from matplotlib.axes import Axes

from scoregram.advantages import estimate
from scoregram.reading import read_group
from scoregram.statistics import rollout_shares

ROOT = Path(__file__).parents[2]
DATA = ROOT / "results" / "fixed-policies" / "qwen2.5-coder-1.5b" / "t1-p1.parquet"
OUT = Path(__file__).parent / "group.svg"
RIGHT, WRONG, NULL = "#0072B2", "#D55E00", "#808080"
RIGHT_WANTED = 6
"""Number of right rollouts of the group that is drawn: the first such group in the file."""


def chosen_group() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Gram `(16, 16)` and rewards `(16,)` of the group, right rollouts first, and the line of its prompt."""
    table = pq.read_table(DATA, columns=["k", "rewards", "prompt_index"]).to_pylist()
    row = next(row for row in table if sum(row["rewards"]) == RIGHT_WANTED)
    rewards = torch.tensor(row["rewards"], dtype=torch.float64)
    order = (-rewards).argsort(stable=True)
    gram = torch.tensor(row["k"], dtype=torch.float64).view(16, 16)[order][:, order]
    return gram, rewards[order], int(row["prompt_index"])


def draw_cosines(axes: Axes, gram: torch.Tensor, right: int) -> None:
    """Heat map of cosines, the diagonal left out."""
    norms = gram.diagonal().sqrt()
    cosines = (gram / torch.outer(norms, norms)).fill_diagonal_(float("nan")).numpy()
    limit = float(np.nanmax(np.abs(cosines)))
    image = axes.imshow(cosines, cmap="RdBu_r", vmin=-limit, vmax=limit)
    axes.axhline(right - 0.5, color="black", lw=0.8)
    axes.axvline(right - 0.5, color="black", lw=0.8)
    ticks = [(right - 1) / 2, (right + 15) / 2]
    axes.set_xticks(ticks, [f"{right} right", f"{16 - right} wrong"])
    axes.set_yticks(ticks, ["right", "wrong"], rotation=90, va="center")
    axes.tick_params(length=0)
    plt.colorbar(image, ax=axes, fraction=0.046, pad=0.03)
    axes.set_title("Cosines between scores", fontsize=10, loc="left")


def draw_shares(axes: Axes, gram: torch.Tensor, advantages: torch.Tensor, right: int) -> None:
    """Share of each rollout in the squared norm of the update; they add up to one."""
    shares = rollout_shares(gram, advantages / 16).numpy()
    colours = [RIGHT] * right + [WRONG] * (16 - right)
    axes.barh(range(16), shares * 100, color=colours)
    axes.axvline(100 / 16, color=NULL, ls="--", lw=1)
    axes.annotate("equal shares", (100 / 16, 15.4), fontsize=8, color=NULL, ha="left", va="bottom", xytext=(3, 0),
                  textcoords="offset points")  # fmt: skip
    axes.set(ylim=(15.6, -0.6), yticks=[], xlabel="% of the update")
    axes.set_title("Share of each rollout", fontsize=10, loc="left")


def draw_ranks(axes: Axes, gram: torch.Tensor, rewards: torch.Tensor) -> None:
    """Effective rank of random sub-groups and of the whole, beside orthogonal scores of the same norms."""
    generator = torch.Generator().manual_seed(0)
    measured, null = [], []
    for size in (2, 4, 8, 16):
        readings = []
        while len(readings) < (1 if size == 16 else 200):
            rows = torch.randperm(16, generator=generator)[:size]
            if rewards[rows].unique().numel() > 1:
                a = rewards[rows] - rewards[rows].mean()
                readings.append(read_group(gram[rows][:, rows], rewards[rows], a))
        measured.append(float(np.mean([reading.effective_rank for reading in readings])))
        null.append(float(np.mean([reading.effective_rank_orthogonal for reading in readings])))
    axes.plot(range(4), null, "--", color=NULL, marker="_", ms=14, label="null: orthogonal scores")
    axes.plot(range(4), measured, "o", color=RIGHT, label="measured")
    axes.axhline(2, color="#CC79A7", lw=1, ls="-.")
    axes.annotate("paper: about 2", (3.2, 2.15), fontsize=8, color="#CC79A7", ha="right")
    axes.set_xticks(range(4), ["2", "4", "8", "16"])
    axes.set(ylim=(0, None), xlim=(-0.4, 3.4), xlabel="group size R", ylabel="effective rank")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    axes.set_title("Directions of the group", fontsize=10, loc="left")


def main() -> None:
    """Draw the three panels and write the file, the same bytes every time."""
    plt.rcParams.update({"svg.hashsalt": "scoregram", "svg.fonttype": "path", "font.size": 9, "axes.spines.top": False,
                         "axes.spines.right": False})  # fmt: skip
    gram, rewards, prompt = chosen_group()
    advantages = estimate("grpo", rewards[None])[0]
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.5), gridspec_kw={"wspace": 0.32, "width_ratios": [1.15, 1, 1]})
    draw_cosines(panels[0], gram, RIGHT_WANTED)
    draw_shares(panels[1], gram, advantages, RIGHT_WANTED)
    draw_ranks(panels[2], gram, rewards)
    figure.savefig(OUT, bbox_inches="tight", facecolor="white", metadata={"Date": None})
    shares = rollout_shares(gram, advantages / 16)
    off = ~torch.eye(16, dtype=torch.bool)
    norms = gram.diagonal().sqrt()
    cosines = (gram / torch.outer(norms, norms))[off]
    reading = read_group(gram, rewards, advantages)
    print(f"prompt {prompt}; shares {shares.min():.1%} to {shares.max():.1%}; right {shares[:RIGHT_WANTED].sum():.0%}")
    print(f"cosines rms {cosines.square().mean().sqrt():.3f}, {cosines.min():.3f} to {cosines.max():.3f}")
    print(f"rank {reading.effective_rank:.2f}, null {reading.effective_rank_orthogonal:.2f}")


if __name__ == "__main__":
    main()
