"""One optimisation step as it goes by: the rollouts that the loss took, and its derivative at each token."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from scoregram.integrations.trl.generation import Generation

ROWS = "scoregram_rows"
"""Key under which a batch carries `(B, 2)`: the generation of each rollout and its place there."""


@dataclass
class MicroBatch:
    """The rollouts of one backward pass."""

    rows: Tensor
    """`(B, 2)`: generation, place."""
    coefficients: Tensor | None = None
    """`(B, C)` derivative of what was really differentiated, with respect to the log-probability of each token."""

    def catch(self, grad: Tensor) -> None:
        """Hook on the log-probabilities: called in the trainer's own backward pass."""
        self.coefficients = grad.detach() if self.coefficients is None else self.coefficients + grad.detach()


@dataclass
class Window:
    """The micro-batches of one optimisation step."""

    step: int
    """Number of the step that they lead to, counted from 1."""
    batches: list[MicroBatch] = field(default_factory=list)

    @property
    def serials(self) -> list[int]:
        """Generations that took part, in order."""
        found: set[int] = set()
        for batch in self.batches:
            found |= set(batch.rows[:, 0].tolist())
        return sorted(found)

    @property
    def is_caught(self) -> bool:
        """Whether the derivative is known for every rollout."""
        return bool(self.batches) and all(batch.coefficients is not None for batch in self.batches)

    def chosen(self, generation: Generation) -> Tensor:
        """Places of the rollouts of a generation that took part, in order."""
        places = [batch.rows[batch.rows[:, 0] == generation.serial, 1] for batch in self.batches]
        return torch.cat(places).unique()

    def coefficients(self, generation: Generation, scale: float) -> Tensor:
        """`(N, C)` derivative for every rollout of a generation; 0 for those that did not take part."""
        found = torch.zeros(
            generation.completion_ids.shape, dtype=torch.float64, device=generation.completion_ids.device
        )
        for batch in self.batches:
            if batch.coefficients is None:
                continue
            own = batch.rows[:, 0] == generation.serial
            if bool(own.any()):
                found.index_add_(0, batch.rows[own, 1].to(found.device), batch.coefficients[own].to(found) / scale)
        return torch.where(generation.loss_mask, found, 0.0)


def rows_of(generation: Generation) -> Tensor:
    """`(N, 2)` that lead back from a shuffled and split batch to the generation."""
    places = torch.arange(generation.size, device=generation.prompt_ids.device)
    return torch.stack([torch.full_like(places, generation.serial), places], 1)
