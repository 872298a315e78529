"""The tables of the training runs in runs.json; `summarise.py` puts them into README.md.

*Area* is the mean reward of sampled test rollouts over the budget, on straight lines between evaluations: it rewards
early learning. *Final* is that reward at the end of the budget. *Best fixed* is the fixed group size with the largest
mean area, chosen in hindsight from the same runs, which favours it. *Share of its gain* is `(area - start)` over that
of the best fixed size. Differences and shares are paired by seed; intervals are 95 %, t distribution over seeds, and
only seeds that every row has are used.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from scoregram.compare.intervals import mean_over_seeds, ratio_over_seeds
from scoregram.exhibits import Estimate

RUNS = Path(__file__).parent / "runs.json"
FIXED = ("R = 2", "R = 4", "R = 8", "R = 16")
GRAM_FREE = (*FIXED, "success", "dynamic sampling")
GAIN = 0.9
"""Share of the gain of the best fixed size that the goal asks for."""

SeedValues = Mapping[str, Mapping[str, float]]
"""Row → seed → value."""


@cache
def stored_runs() -> dict[str, Any]:
    """Task → setting and runs."""
    return json.loads(RUNS.read_text(encoding="utf-8"))


def reward_at(run: Mapping[str, Any], rollouts: np.ndarray) -> np.ndarray:
    """Mean reward of sampled test rollouts at some numbers of rollouts, on straight lines between evaluations."""
    steps, rewards, _ = np.array(run["evaluations"], dtype=float).T
    return np.interp(rollouts, steps, rewards)


def area(run: Mapping[str, Any], budget: int) -> float:
    """Mean reward over the budget."""
    steps = np.array([point[0] for point in run["evaluations"]], dtype=float)
    places = np.unique([*steps[steps < budget], budget])
    return float(np.trapezoid(reward_at(run, places), places) / budget)


def final(run: Mapping[str, Any], budget: int) -> float:
    """Reward at the end of the budget; a run of dynamic sampling may end a step later."""
    return float(reward_at(run, np.array([budget]))[0])


def start(run: Mapping[str, Any], budget: int) -> float:
    """Reward before the first step."""
    return float(run["evaluations"][0][1])


def seed_values(task: str, measure: Callable[[Mapping[str, Any], int], float]) -> SeedValues:
    """A measure of every run, for the seeds that all rows have."""
    record = stored_runs()[task]
    budget, runs = record["setting"]["rollouts"], record["runs"]
    shared = set.intersection(*(set(seeds) for seeds in runs.values()))
    return {name: {s: measure(seeds[s], budget) for s in sorted(shared)} for name, seeds in runs.items()}


def best_fixed(task: str) -> str:
    """The fixed group size with the largest mean area."""
    areas = seed_values(task, area)
    return max(FIXED, key=lambda name: mean(areas[name].values()))


def difference(values: SeedValues, name: str, other: str) -> Estimate:
    """Mean over seeds of one row minus another."""
    return mean_over_seeds([values[name][seed] - values[other][seed] for seed in values[name]])


def gain_share(task: str, name: str) -> Estimate:
    """Gain in area over the start, over that of the best fixed group size."""
    areas, starts, best = seed_values(task, area), seed_values(task, start), best_fixed(task)
    own, other = ([areas[row][s] - starts[row][s] for s in areas[row]] for row in (name, best))
    return ratio_over_seeds(own, other)


def shown(estimate: Estimate, scale: float = 100.0) -> str:
    """A number and its interval."""
    value, low, high = (scale * one for one in (estimate.value, estimate.low, estimate.high))
    return f"{value:.1f} [{low:.1f}, {high:.1f}]" if scale == 100 else f"{value:.2f} [{low:.2f}, {high:.2f}]"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def task_table(task: str) -> str:
    """One row per rule: area, its difference from the best fixed group size, share of its gain, final reward."""
    areas, finals, best = seed_values(task, area), seed_values(task, final), best_fixed(task)
    rows = []
    for name in areas:
        compared = (
            ["", ""] if name == best else [shown(difference(areas, name, best)), shown(gain_share(task, name), 1)]
        )
        cells = [shown(mean_over_seeds([*areas[name].values()])), *compared]
        rows.append([name, *cells, shown(mean_over_seeds([*finals[name].values()]))])
    seeds = len(next(iter(areas.values())))
    head = [f"{task}, {seeds} seeds", "area, %", f"minus {best}", "share of its gain", "final, %"]
    return table(head, rows)


def verdict_table(tasks: list[str]) -> str:
    """For each rule that uses the Gram and each task: the difference in area to the strongest rule that does not.

    The strongest is the one whose interval reaches lowest. A rule beats every Gram-free one if even that interval lies
    above 0; `*` marks it.
    """
    rows = []
    for name in stored_runs()[tasks[0]]["runs"]:
        if name in GRAM_FREE:
            continue
        cells = []
        for task in tasks:
            areas = seed_values(task, area)
            gaps = {other: difference(areas, name, other) for other in GRAM_FREE}
            rival = min(gaps, key=lambda other: gaps[other].low)
            cells.append(f"{shown(gaps[rival])} to {rival}{' *' if gaps[rival].low > 0 else ''}")
        rows.append([name, *cells])
    return table(["rule with the Gram", *tasks], rows)
