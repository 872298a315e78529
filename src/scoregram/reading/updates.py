"""Whether steps push in the same direction: cosines between the gradients of measured steps, from their sketches.

Gradients of different steps are never in memory together, so a run keeps a sketch of each (`Run.update_sketches`). The
cosine of two sketches is that of the two gradients with an error: for gradients spread over many parameters, its
standard deviation is `(1 − c²)/√m` at the cosine `c` (`docs/gram.md`).

That error is not the null. Gradients of pure noise have cosines that differ from 0 by much more: their noise lies in
few directions. So a mean over pairs is held against the gradients themselves with random signs.
"""

import math
from dataclasses import dataclass

import numpy as np

from scoregram.runs import Run

FEWEST_PAIRS = 5
"""Pairs of steps that a mean by distance needs."""
ROWS = 512
"""Steps whose cosines with all others are in memory at a time."""


@dataclass(frozen=True)
class CosineMatrix:
    """Cosines between the gradients of some steps."""

    steps: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]
    """Symmetric, with ones on the diagonal."""
    measured: int
    """Steps to choose from: those with a gradient other than zero."""


@dataclass(frozen=True)
class CosineDecay:
    """Mean cosine between the gradients of two steps, by the distance between them. All fields are equally long."""

    distance: tuple[float, ...]
    """Mean distance of the pairs, in steps."""
    mean: tuple[float, ...]
    null_error: tuple[float, ...]
    """Standard deviation of `mean` if every gradient had a random sign, `√(Σ c²) / pairs`, which includes the error of
    the sketch."""
    pairs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class UpdateCosines:
    """The directions of the gradients of measured steps; those of zero gradients are undefined and left out."""

    steps: np.ndarray
    """`(n,)`, increasing."""
    directions: np.ndarray
    """`(n, m)` float64: each sketch divided by its norm."""

    @property
    def sketch_error(self) -> float:
        """Standard deviation of the cosine of two sketches of orthogonal gradients, `1/√m`; `nan` without a sketch."""
        return 1 / math.sqrt(self.directions.shape[1]) if self.directions.size else math.nan

    def matrix(self, most: int) -> CosineMatrix:
        """Cosines between at most `most` steps: evenly spaced if there are more, the first and the last among them."""
        count = len(self.steps)
        chosen = np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(int))
        there = self.directions[chosen]
        values = tuple(map(tuple, (there @ there.T).tolist()))
        return CosineMatrix(tuple(self.steps[chosen].tolist()), values, count)

    def decay(self) -> CosineDecay:
        """Mean cosine by distance, over all pairs of steps.

        Distances are counted in units of the median gap between measured steps, and their classes widen: 1, 2, 3, 4,
        5–6, 7–8, 9–12, 13–16, 17–24, … A class of fewer than `FEWEST_PAIRS` pairs is left out.
        """
        if len(self.steps) < 2:
            return CosineDecay((), (), (), ())
        unit, span = float(np.median(np.diff(self.steps))), int(self.steps[-1] - self.steps[0])
        ends = class_ends(math.ceil(span / unit))
        sums = np.zeros((4, len(ends) + 1))  # pairs, distances, cosines, squared cosines
        for start in range(0, len(self.steps), ROWS):
            here = slice(start, start + ROWS)
            apart = self.steps[None, :] - self.steps[here, None]
            is_pair = apart > 0
            cosines, distances = (self.directions[here] @ self.directions.T)[is_pair], apart[is_pair]
            # a pair that is closer than half a unit belongs to the first class
            place = np.searchsorted(ends, np.maximum(np.round(distances / unit), 1))
            for row, weights in enumerate((np.ones_like(cosines), distances, cosines, cosines**2)):
                sums[row] += np.bincount(place, weights, minlength=sums.shape[1])
        pairs, distances, cosines, squares = sums[:, sums[0] >= FEWEST_PAIRS]
        return CosineDecay(
            tuple((distances / pairs).tolist()),
            tuple((cosines / pairs).tolist()),
            tuple((np.sqrt(squares) / pairs).tolist()),
            tuple(pairs.astype(int).tolist()),
        )


def class_ends(largest: int) -> list[int]:
    """The last distance of every class up to one that holds `largest`.

    Example:
        >>> class_ends(20)
        [1, 2, 3, 4, 6, 8, 12, 16, 24]
    """
    ends = [1, 2, 3, 4]
    while ends[-1] < largest:
        ends.append(2 * ends[-2])
    return ends


def update_cosines(run: Run) -> UpdateCosines:
    """The directions of the gradients of a run's measured steps; without a step if the run stores no sketch."""
    steps, sketches = run.update_sketches()
    newest = {int(step): place for place, step in enumerate(steps)}  # the last part of a step that has several
    kept = sketches[list(newest.values())].astype(np.float64)
    norms = np.linalg.norm(kept, axis=1)
    is_defined = np.isfinite(norms) & (norms > 0)
    known = np.array(list(newest), dtype=np.int64)[is_defined]
    return UpdateCosines(known, kept[is_defined] / norms[is_defined, None])
