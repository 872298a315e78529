"""Equal rollouts are measured once: a policy that is sure of itself writes the same text again and again.

Rollouts with the same tokens have the same score, so their rows of the Gram are copies, and in a weighted sum of scores
their weights add up. A group of eight with three different texts costs as much as a group of three.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scoregram.checks import fail
from scoregram.gram.batch import Batch
from scoregram.gram.result import Gram


@dataclass(frozen=True)
class Distinct:
    """The different rollouts of every group, and where each of the given ones stands among them."""

    batch: Batch
    """`P` groups of `group_size` rows; where a group has fewer different rollouts, its first one fills the rest."""
    group_size: int | None
    places: Tensor
    """`(N,)` row of every given rollout, on the CPU."""

    @property
    def are_all(self) -> bool:
        """Whether every given rollout has a row of its own."""
        return self.batch.rollouts == len(self.places)

    def members(self, row: int) -> list[int]:
        """The given rollouts that a row stands for."""
        return (self.places == row).nonzero().squeeze(1).tolist()

    def summed(self, weights: Tensor) -> Tensor:
        """`(M, rows)` from `(M, N)` weights: those of equal rollouts added up."""
        if self.are_all:
            return weights
        totals = weights.new_zeros(len(weights), self.batch.rollouts)
        return totals.index_add_(1, self.places.to(weights.device), weights)

    def expanded(self, gram: Gram) -> Gram:
        """What was measured of the rows, for every given rollout."""
        if self.are_all:
            return gram

        def spread(matrix: Tensor) -> Tensor:
            return matrix[self.places][:, self.places]

        return replace(
            gram,
            matrix=spread(gram.matrix),
            by_layer={layer: spread(matrix) for layer, matrix in gram.by_layer.items()},
            log_probs=gram.log_probs[self.places.to(gram.log_probs.device)],
            sketch=None if gram.sketch is None else gram.sketch[self.places.to(gram.sketch.device)],
        )


def distinct(batch: Batch, group_size: int | None) -> Distinct:
    """The different rollouts of every group of `group_size` consecutive ones, or of the whole batch.

    Two are equal if tokens, masks and coefficients are, padding included.

    Raises:
        ScoregramError: If the rollouts are no whole number of groups.
    """
    count = batch.rollouts
    size = count if group_size is None else group_size
    if size < 1 or count % size:
        requirement = f"group_size must divide the number of rollouts {count}"
        fail("measure_gram", requirement, group_size, "Pass whole groups.")
    parts = batch.input_ids, batch.attention_mask, batch.completion_mask, batch.coefficients.view(torch.int64)
    written = [row.tobytes() for row in torch.cat([part.long() for part in parts], 1).cpu().numpy()]
    found: list[dict[bytes, int]] = []  # of every group: its different rollouts, and the first that is like it
    for start in range(0, count, size):
        found.append({})
        for index in range(start, start + size):
            found[-1].setdefault(written[index], index)
    most = max(map(len, found))
    if most == size:
        return apart(batch, group_size)
    rows, places = [], []
    for group, first in enumerate(found):
        indices = list(first.values())
        rows += indices + indices[:1] * (most - len(indices))
        order = {text: group * most + place for place, text in enumerate(first)}
        places += [order[text] for text in written[group * size : (group + 1) * size]]
    chosen = torch.tensor(rows, device=batch.input_ids.device)
    return Distinct(batch.at(chosen), None if group_size is None else most, torch.tensor(places))


def apart(batch: Batch, group_size: int | None = None) -> Distinct:
    """Every rollout for itself, equal or not."""
    return Distinct(batch, group_size, torch.arange(batch.rollouts))
