"""How often prompts seem to differ in difficulty, where they do not and where they do, while the success rate rises.

python difficulty.py [--runs 1000]    simulate and write difficulty.json

Prompts seem to differ by the law of success rates if its concentration is finite (`SuccessLaw.of`), and by dead groups
if the 95 % interval of their share lies above the share that chance makes of equally hard prompts
(`RunReading.summary`). Both are computed within stretches of steps; beside them stand the same two with all steps taken
together.
"""

import argparse
import json
import math
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from worlds import shifted

from scoregram.reading import RunReading, StoredGroup, SuccessLaw, pairs_exceed_chance
from scoregram.reading.group import with_rewards
from scoregram.runs import GroupRecord

HERE = Path(__file__).parent
STEPS, GROUPS = 30, 4
"""Steps of the last third, and groups of a step, each of a prompt of its own."""


@dataclass(frozen=True)
class DifficultyCell:
    """A success rate at the beginning and at the end of the last third, a group size, and how prompts differ."""

    first: float
    last: float
    size: int
    gap: float
    """Half of the prompts have log odds of success that are this much lower, the others as much higher."""


RATES = ((0.06, 0.06), (0.5, 0.5), (0.1, 0.3), (0.05, 0.45), (0.3, 0.9))
CELLS = tuple(DifficultyCell(*rates, size, gap) for rates, gap, size in product(RATES, (0.0, 1.5), (4, 8)))


def drawn_third(cell: DifficultyCell, rng: np.random.Generator) -> RunReading:
    """A run whose last third has the rates of a cell."""
    rates = shifted(
        np.linspace(cell.first, cell.last, STEPS)[:, None], rng.choice([-cell.gap, cell.gap], (STEPS, GROUPS))
    )
    rewards = torch.tensor(rng.random((STEPS, GROUPS, cell.size)) < rates[..., None], dtype=torch.float64)
    records = [
        GroupRecord(
            step=2 * STEPS + step + 1,
            prompt_id=f"p/{step}/{place}",
            rewards=rewards[step, place],
            lengths=torch.ones(cell.size).long(),
            advantages=torch.zeros(cell.size, dtype=torch.float64),
        )
        for step, place in product(range(STEPS), range(GROUPS))
    ]
    lines = [{"step": step, "reward": 0.5} for step in range(1, 3 * STEPS + 1)]
    return RunReading({}, (), lines, with_rewards([StoredGroup(record) for record in records]))


def seeming_differences(run: RunReading, size: int) -> dict[str, bool]:
    """Whether prompts seem to differ, by either number, within stretches and with all steps together."""
    law, dead, counts = SuccessLaw.of(*run.success_stretches()), run.summary.dead, run.success_counts()
    rate = sum(right for right, _ in counts) / sum(rollouts for _, rollouts in counts)
    return {
        "law": law is not None and math.isfinite(law.concentration),
        "law, all steps together": pairs_exceed_chance([counts]),
        "dead groups": dead.low > run.summary.equally_hard_dead,
        "dead groups, all steps together": dead.low > rate**size + (1 - rate) ** size,
    }


def counted(cell: DifficultyCell, runs: int) -> dict[str, Any]:
    """In how many runs of a cell prompts seem to differ."""
    rng = np.random.default_rng(CELLS.index(cell))
    found = [seeming_differences(drawn_third(cell, rng), cell.size) for _ in range(runs)]
    return vars(cell) | {"runs": runs} | {name: sum(one[name] for one in found) for name in found[0]}


def main() -> None:
    """Simulate all cells and write the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=1000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text = ",\n".join(json.dumps(counted(cell, arguments.runs)) for cell in CELLS)
    (HERE / "difficulty.json").write_text(f"[\n{text}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
