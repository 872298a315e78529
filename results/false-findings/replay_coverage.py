"""How often the intervals of `what_if` hold the truth, in worlds whose truth is known.

python replay_coverage.py [--steps 1600]    simulate and write replay-coverage.json

A bank of steps is drawn for each law, group size and kind of steps; disjoint stretches of it are the last thirds of
runs. With `share`, the steps differ: in how hard their prompts are, and in the size of their scores. The truth is the
mean over all steps that may occur; of runs with fewer than 5 steps it is that of their own steps. It is enumerated, but
for the measured spectrum and for `reinforce++`, which couples the prompts of a step: they have the truth of
`LONG_STEPS` other steps, whose standard error is recorded.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from replay_worlds import LAWS, SPECTRUM, TAKEN, Steps, draw_groups, kinds_and_factors, larger_truths, truths

from scoregram.bootstrap import FEWEST
from scoregram.reading import REFERENCE, UNWEIGHTED
from scoregram.reading.replay import extrapolated_numbers, group_numbers, replayed_row
from scoregram.reading.replay_pooling import GroupNumbers

HERE = Path(__file__).parent
COUPLED = "reinforce++"
ROWS = (
    (REFERENCE, UNWEIGHTED),
    ("grpo", UNWEIGHTED),
    ("optimal-loo", UNWEIGHTED),
    ("reinforce", UNWEIGHTED),
    (COUPLED, UNWEIGHTED),
    (REFERENCE, "length"),
)
"""Estimators and weights."""
SHAPES = ((5, 4), (10, 4), (20, 4), (40, 4), (1, 40), (4, 16))
"""Steps of the last third of a run, and groups of each."""
QUANTITIES = (
    *("variance", "bias", "snr", "efficiency", "direction", "taken"),
    *(name + end for name in SPECTRUM for end in ("", "_null")),
)
LARGER = {"variance": "variance at 2 R", "snr": "snr at 2 R"}
"""Number of `rloo` → its name where groups have twice the rollouts of the run's."""
COLUMNS = (
    *("law", "size", "share", "steps", "prompts", "estimator", "weights", "quantity"),
    *("runs", "given", "below", "above"),
)
"""Runs, those with an interval, and intervals below and above the truth."""
LONG_STEPS = 2000
CHUNK = 500
SEED = 1000
"""Added to all seeds: the intervals were chosen on the draws of other seeds."""


@dataclass(frozen=True)
class ReplayCell:
    """The law, the group size, and whether steps differ."""

    law: str
    size: int
    share: bool

    def rng(self, use: int) -> np.random.Generator:
        """A generator of its own for each use."""
        return np.random.default_rng([SEED, list(LAWS).index(self.law), self.size, self.share, use])


CELLS = tuple(ReplayCell(*parts) for parts in product(LAWS, (4, 8), (False, True)))


def bank(
    cell: ReplayCell, steps: Steps, prompts: int, rows: Sequence[tuple[str, str]], rng: np.random.Generator
) -> dict[tuple[str, str], GroupNumbers]:
    """The numbers of the groups of these steps, for each estimator and weights."""
    found: dict[tuple[str, str], list[GroupNumbers]] = {row: [] for row in rows}
    for start in range(0, len(steps.kinds), CHUNK):
        here = Steps(steps.kinds[start : start + CHUNK], steps.factors[start : start + CHUNK])
        groups = draw_groups(rng, LAWS[cell.law], here, prompts, cell.size)
        for weights in dict.fromkeys(weights for _, weights in rows):
            names = [name for name, own in rows if own == weights]
            for name, numbers in zip(names, group_numbers(groups, names, cell.size // 2, weights), strict=True):
                found[name, weights].append(numbers)
    return {row: joined(parts) for row, parts in found.items()}


def joined(parts: Sequence[GroupNumbers]) -> GroupNumbers:
    """The numbers of all parts; steps are numbered anew, as each part counts from 1."""
    offsets = np.cumsum([0, *(part.steps.max() for part in parts)])
    return GroupNumbers(
        np.concatenate([part.steps + offset for part, offset in zip(parts, offsets, strict=False)]),
        **{name: np.concatenate([part.columns()[name] for part in parts]) for name in parts[0].columns()},
        spectrum={name: np.concatenate([part.spectrum[name] for part in parts]) for name in parts[0].spectrum},
        is_blind=any(part.is_blind for part in parts),
    )


@dataclass(frozen=True)
class LongRun:
    """Means of many steps: the numbers of the coupled estimator, and the spectrum in steps of each kind."""

    coupled: dict[str, float]
    errors: dict[str, float]
    """Their standard errors."""
    sums: dict[tuple[tuple[str, str], int, str], tuple[float, int]]
    """Row, kind of step and metric → the sum over live groups, and their number."""

    def spectrum(self, row: tuple[str, str], kinds: np.ndarray) -> dict[str, float]:
        """Mean of each metric over the live groups of steps of these kinds, all equally many."""
        found = {}
        for name in SPECTRUM:
            parts = np.array([self.sums[row, kind, name] for kind in kinds.tolist()])
            steps = np.array([self.sums[row, kind, "steps"][1] for kind in kinds.tolist()])
            found[name] = float((parts[:, 0] / steps).sum() / (parts[:, 1] / steps).sum())
        return found


def long_run(cell: ReplayCell, steps: int = LONG_STEPS) -> LongRun:
    """The truths that are not enumerated."""
    rng = cell.rng(0)
    drawn = Steps.drawn(rng, steps, share=cell.share)
    numbers = bank(cell, drawn, 4, ROWS, rng)
    row = replayed_row(COUPLED, COUPLED, numbers[COUPLED, UNWEIGHTED])
    coupled = {name: getattr(row, name) for name in QUANTITIES}
    kinds, sums = np.repeat(drawn.kinds, 4), {}
    for key, kind in product(ROWS, np.unique(drawn.kinds).tolist()):
        sums[key, kind, "steps"] = (0.0, int((drawn.kinds == kind).sum()))
        for name in SPECTRUM:
            values = numbers[key].spectrum[name][kinds == kind]
            sums[key, kind, name] = (float(np.nansum(values)), int((~np.isnan(values)).sum()))
    return LongRun(
        {name: one.value for name, one in coupled.items()},
        {name: (one.high - one.low) / (2 * 1.96) for name, one in coupled.items()},
        sums,
    )


def is_defined(row: tuple[str, str], quantity: str, *, is_blind: bool) -> bool:
    """Whether a quantity of a row is estimated, and not 0 or 1 by definition or by the size of the parts."""
    name, weights = row
    if quantity == "bias" and weights == UNWEIGHTED and name in (REFERENCE, "optimal-loo", "reinforce"):
        return False
    if quantity in ("bias", "efficiency", "direction"):
        return not is_blind and row != (REFERENCE, UNWEIGHTED)
    return quantity != "taken" or row != (TAKEN, UNWEIGHTED)


@lru_cache(maxsize=1)
def drawn_bank(cell: ReplayCell, prompts: int, steps: int) -> tuple[Steps, dict[tuple[str, str], GroupNumbers]]:
    """The steps of which runs are made; the coupled estimator only where the long run has as many groups per step."""
    rng = cell.rng(prompts)
    drawn = Steps.drawn(rng, steps, share=cell.share)
    return drawn, bank(cell, drawn, prompts, [row for row in ROWS if prompts == 4 or row[0] != COUPLED], rng)


def covered(cell: ReplayCell, shape: tuple[int, int], steps: int, long: LongRun) -> Iterator[list[Any]]:
    """A row of `COLUMNS` for each estimator and quantity, from all runs of a shape in `steps` steps."""
    count, prompts = shape
    drawn, numbers = drawn_bank(cell, prompts, steps)
    starts = range(0, steps - count + 1, count)
    for row in numbers:
        name, weights = row
        tally = {quantity: [0, 0, 0] for quantity in QUANTITIES}
        for start in starts:
            own = Steps(drawn.kinds[start : start + count], drawn.factors[start : start + count])
            over = own if count < FEWEST else kinds_and_factors(share=cell.share)
            truth = long.coupled
            if name != COUPLED:
                truth = truths(cell.law, name, weights, cell.size, over) | long.spectrum(row, over.kinds)
            part = numbers[row].part(slice(start * prompts, (start + count) * prompts))
            found = replayed_row(name, name, part, weights)
            for quantity, kept in tally.items():
                interval = getattr(found, quantity)
                kept[0] += not np.isnan(interval.low)
                kept[1] += bool(interval.high < truth[quantity] - 1e-9)
                kept[2] += bool(interval.low > truth[quantity] + 1e-9)
        for quantity, kept in tally.items():
            if is_defined(row, quantity, is_blind=numbers[row].is_blind):
                yield [cell.law, cell.size, cell.share, count, prompts, name, weights, quantity, len(starts), *kept]


def covered_larger(cell: ReplayCell, shape: tuple[int, int], steps: int) -> Iterator[list[Any]]:
    """The same for `rloo` from groups of twice the size, which follows from the components of its noise."""
    count, prompts = shape
    rng = cell.rng(prompts)
    drawn = Steps.drawn(rng, steps, share=cell.share)
    numbers = extrapolated_numbers(draw_groups(rng, LAWS[cell.law], drawn, prompts, cell.size), 2 * cell.size)
    starts, tally = range(0, steps - count + 1, count), {quantity: [0, 0, 0] for quantity in LARGER}
    for start in starts:
        own = Steps(drawn.kinds[start : start + count], drawn.factors[start : start + count])
        over = own if count < FEWEST else kinds_and_factors(share=cell.share)
        truth = larger_truths(cell.law, 2 * cell.size, over)
        part = numbers.part(slice(start * prompts, (start + count) * prompts))
        found = replayed_row(REFERENCE, REFERENCE, part)
        for quantity, kept in tally.items():
            interval = getattr(found, quantity)
            kept[0] += not np.isnan(interval.low)
            kept[1] += bool(interval.high < truth[quantity])
            kept[2] += bool(interval.low > truth[quantity])
    for quantity, kept in tally.items():
        own = [count, prompts, REFERENCE, UNWEIGHTED, LARGER[quantity], len(starts), *kept]
        yield [cell.law, cell.size, cell.share, *own]


def steps_of(shape: tuple[int, int], steps: int) -> int:
    """Steps of a bank: fewer where they have more groups."""
    return steps if shape[1] == 4 else steps // 40 if shape[0] == 1 else steps // 10


def main() -> None:
    """Simulate all cells and write the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1600)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    lines, errors = [], []
    for cell in CELLS:
        long = long_run(cell)
        for shape in SHAPES:
            number = steps_of(shape, steps)
            rows = chain(covered(cell, shape, number, long), covered_larger(cell, shape, number))
            lines += [json.dumps(row) for row in rows]
        errors += [json.dumps([cell.law, cell.size, cell.share, COUPLED, long.coupled, long.errors])]
        print(cell, flush=True)
        text = ",\n".join(lines), ",\n".join(errors)
        (HERE / "replay-coverage.json").write_text(
            f'{{"columns": {json.dumps(COLUMNS)},\n"rows": [\n{text[0]}\n],\n"long": [\n{text[1]}\n]}}\n',
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
