"""How often the pooled intervals of a run hold the truth, in worlds whose truth is known in closed form.

python coverage.py [--steps 12000] [--workers 2]    simulate and write coverage.json

A bank of independent steps is drawn for each law; disjoint stretches of it are the last thirds of runs, which
`run_noise` pools. No prompt comes back. With memory, success rates and the size of scores drift: then the truth is that
of the steps that were pooled, since the policy of each step is another one, and also that of the stationary law.
"""

import argparse
import json
import math
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from worlds import (
    LAYERS,
    NOISE_SCALARS,
    WIDTH,
    Law,
    draw_prompts,
    draw_rollouts,
    drift,
    law_with,
    noise_scalars,
    saved_variance,
    truths,
)

from scoregram.reading import POOLED, run_noise
from scoregram.reading.noise import MEASURED

HERE = Path(__file__).parent
UNITS = (5, 10, 20, 67)
"""Steps that are pooled: the last third of 15, 30, 60 and 200 measured steps."""
LEVELS = (0.9, 0.95)
CHUNK = 500


@dataclass(frozen=True)
class CoverageCell:
    """A law by its noise scale over the batch and its best group size, and the shape of a step."""

    scale: float
    """Noise scale over the rollouts of a step; infinite without a signal."""
    best: float
    right: float
    """Variance of the scores of right rollouts over that of wrong ones."""
    size: int
    prompts: int
    memory: float

    def law(self) -> Law:
        """The law with these truths."""
        if math.isinf(self.scale):
            return Law(right=self.right)
        scale = self.scale * self.size * self.prompts
        return law_with(noise_scale=scale, best_group_size=self.best, size=self.size, right=self.right)


LAWS = ((math.inf, math.inf, 1.0), (8.0, 8.0, 1.0), (1.0, 4.0, 1.0), (1.0, 16.0, 3.0), (0.25, 8.0, 3.0))
CELLS = tuple(
    CoverageCell(*law, size, prompts, memory)
    for law, size, prompts, memory in product(LAWS, (4, 8), (4, 16), (0.0, 0.9))
    if not (memory and prompts == 16)
)


def bank(cell: CoverageCell, steps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """`(steps, 6)` scalars of independent steps, and the true moments of each, `(steps, 5)`."""
    rng, law = np.random.default_rng(seed), cell.law()
    drifts = [0.3 * drift(rng, steps, cell.memory) * bool(cell.memory) for _ in range(2)]
    found = []
    for start in range(0, steps, CHUNK):
        shift, scale = (np.repeat(series[start : start + CHUNK], cell.prompts) for series in drifts)
        prompts, sizes = draw_prompts(rng, len(shift), law, "p"), np.full(len(shift), cell.size)
        drawn = draw_rollouts(rng, prompts, sizes, law, shift=shift, scale=scale)
        shape = (-1, cell.prompts, cell.size)
        found.append(noise_scalars(drawn.rewards.reshape(shape), drawn.scores.reshape(*shape, LAYERS * WIDTH)))
    moments = np.array([law.moments(shift) for shift in drifts[0]])
    exact = np.column_stack([moments, saved_variance(law, cell.size, drifts[0])])
    return np.concatenate(found), exact * np.exp(2 * drifts[1])[:, None]


def third_as_lines(rows: np.ndarray, prompts: int) -> list[dict[str, float]]:
    """Scalars of a run whose last third has these rows."""
    empty = [{"step": step, MEASURED: 1.0} for step in range(2 * len(rows))]
    known = [dict(zip(NOISE_SCALARS, row, strict=True)) for row in rows.tolist()]
    last = [{"step": len(empty) + place, MEASURED: 1.0, **line} for place, line in enumerate(known)]
    return [*empty, *({**line, "gram/complete_prompts": prompts} for line in last)]


def covered(cell: CoverageCell, steps: int) -> Iterator[dict[str, Any]]:
    """For each number of units, level and quantity: runs, intervals below the truth, and above it."""
    torch.set_num_threads(1)
    rows, exact = bank(cell, steps, seed=CELLS.index(cell))
    stationary = exact.mean(axis=0)
    for units, level in product(UNITS, LEVELS):
        counts = {(name, of): [0, 0, 0] for name, of in product(POOLED, ("window", "stationary"))}
        for start in range(0, steps - units + 1, units):
            here = slice(start, start + units)
            noise = run_noise(third_as_lines(rows[here], cell.prompts), cell.size, level=level)
            for of, moments in (("window", exact[here].mean(axis=0)), ("stationary", stationary)):
                for name, truth in truths(moments, cell.prompts, cell.size).items():
                    interval, count = getattr(noise, name), counts[name, of]
                    count[0] += 1
                    count[1] += bool(interval.high < truth)
                    count[2] += bool(interval.low > truth)
        for (name, of), (runs, below, above) in counts.items():
            if of == "window" or cell.memory:
                own = {"quantity": name, "truth": of, "units": units, "level": level}
                yield vars(cell) | own | {"runs": runs, "below": below, "above": above}


def all_covered(cell: CoverageCell, steps: int) -> list[dict[str, Any]]:
    """`covered` as a list, for another process."""
    return list(covered(cell, steps))


def main() -> None:
    """Simulate all cells and write the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(all_covered, cell, arguments.steps) for cell in CELLS]
        rows = [row for job in jobs for row in job.result()]
    text = ",\n".join(json.dumps(row) for row in rows).replace("Infinity", '"inf"')
    (HERE / "coverage.json").write_text(f"[\n{text}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
