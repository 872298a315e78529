"""What all processes saw of a step, brought together: each has a slice of every generation, which may cut a group."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from scoregram.checks import fail
from scoregram.integrations.trl.generation import Generation, Laid, laid_out, together
from scoregram.integrations.trl.measuring import rollout_weights
from scoregram.integrations.trl.window import Window


@dataclass(frozen=True)
class Part:
    """What one process saw of a step."""

    slices: Sequence[Generation]
    """Its rollouts of every generation that takes part."""
    derivatives: Sequence[Tensor]
    """For each slice `(n, C)`: `∂L/∂log π` of the loss whose gradient the step takes; 0 for what takes no part."""
    chosen: Sequence[Tensor]
    """For each slice `(n,)` bool: which rollouts take part in the step."""
    is_caught: bool
    """Whether these derivatives are known."""
    limit: float
    """Bytes that a measurement may take here."""


@dataclass(frozen=True)
class Gathered:
    """A generation from all processes."""

    generation: Generation
    slices: Sequence[Generation]
    derivatives: Sequence[Tensor]
    chosen: Tensor
    """Places of the rollouts that take part in the step, in order."""

    def laid(self, *, with_derivatives: bool, compact: bool) -> Laid:
        """All rollouts as one batch, with their derivatives as coefficients or without."""
        return laid_together(self.slices, self.derivatives if with_derivatives else None, compact=compact)

    def mean_derivatives(self) -> tuple[Tensor, float]:
        """`(N,)` mean derivative of each rollout over its tokens, and how uneven it is within rollouts."""
        pairs = zip(self.slices, self.derivatives, strict=True)
        found = [rollout_weights(c, part.loss_mask) for part, c in pairs]
        return torch.cat([mean.cpu() for mean, _ in found]), max(uneven for _, uneven in found)


def laid_together(slices: Sequence[Generation], coefficients: Sequence[Tensor] | None, *, compact: bool) -> Laid:
    """The slices of a generation as one batch, each as its process pads it: positions may depend on that."""
    each = [None] * len(slices) if coefficients is None else coefficients
    return together([laid_out(part, c, compact=compact) for part, c in zip(slices, each, strict=True)])


def part_of(
    generations: Sequence[Generation], window: Window, *, scale: float, limit: float, processes: int, only_chosen: bool
) -> Part:
    """What this process saw of a step; several processes take the mean of their gradients.

    Args:
        generations: Those that take part, as this process has them.
        window: The step.
        scale: What the loss was multiplied with.
        limit: Bytes that a measurement may take here.
        processes: How many there are.
        only_chosen: Measure the rollouts of the step alone, and not their whole generations.
    """
    chosen = []
    for generation in generations:
        here = torch.full((generation.size,), not only_chosen)
        if only_chosen and window.batches:
            here[window.chosen(generation).cpu()] = True
        chosen.append(here)
    slices, derivatives = list(generations), [window.coefficients(g, scale * processes) for g in generations]
    if processes > 1:  # on their way to others
        slices, derivatives = [g.on(torch.device("cpu")) for g in slices], [c.cpu() for c in derivatives]
    return Part(slices, derivatives, chosen, window.is_caught, limit)


def gathered(parts: Sequence[Part]) -> list[Gathered]:
    """The generations of a step from what each process saw of them.

    Raises:
        ScoregramError: If processes saw different generations.
    """
    serials = [[part.serial for part in one.slices] for one in parts]
    if any(found != serials[0] for found in serials):
        fail("attach", "all processes must see the same generations", serials, "Look for an earlier warning.")
    found = []
    for index in range(len(serials[0])):
        slices = [one.slices[index] for one in parts]
        chosen = torch.cat([one.chosen[index] for one in parts]).nonzero().squeeze(1)
        found.append(Gathered(merged(slices), slices, [one.derivatives[index] for one in parts], chosen))
    return found


def merged(slices: Sequence[Generation]) -> Generation:
    """The slices of one generation under each other: prompts padded on the left, completions on the right.

    All rollouts of a group are called after the first one.

    Raises:
        ScoregramError: If they are not whole groups together.
    """
    first = slices[0]
    whole = first if len(slices) == 1 else under_each_other(slices)
    if whole.size % first.group_size:
        got = f"{whole.size} rollouts"
        fail("attach", f"a generation must hold whole groups of {first.group_size}", got, "Change the batch size.")
    names = [whole.prompt_names[row - row % first.group_size] for row in range(whole.size)]
    return replace(whole, prompt_names=names)


def under_each_other(slices: Sequence[Generation]) -> Generation:
    """Several slices as one generation."""
    ahead = max(part.prompt_ids.shape[1] for part in slices)
    behind = max(part.completion_ids.shape[1] for part in slices)

    def left(values: Sequence[Tensor]) -> Tensor:
        return torch.cat([F.pad(value, (ahead - value.shape[1], 0)) for value in values])

    def right(values: Sequence[Tensor]) -> Tensor:
        if values[0].ndim == 1:
            return torch.cat(list(values))
        return torch.cat([F.pad(value, (0, behind - value.shape[1])) for value in values])

    first = slices[0]
    behaviours = [part.behaviour for part in slices if part.behaviour is not None]
    return Generation(
        serial=first.serial,
        policy_step=first.policy_step,
        group_size=first.group_size,
        prompt_ids=left([part.prompt_ids for part in slices]),
        prompt_mask=left([part.prompt_mask for part in slices]),
        completion_ids=right([part.completion_ids for part in slices]),
        completion_mask=right([part.completion_mask for part in slices]),
        loss_mask=right([part.loss_mask for part in slices]),
        advantages=right([part.advantages for part in slices]),
        rewards=torch.cat([part.rewards for part in slices]),
        by_function={name: torch.cat([part.by_function[name] for part in slices]) for name in first.by_function},
        sampled=[ids for part in slices for ids in part.sampled],
        prompt_names=[name for part in slices for name in part.prompt_names],
        behaviour=right(behaviours) if len(behaviours) == len(slices) else None,
        has_pictures=any(part.has_pictures for part in slices),
    )


def dealt(bounds: Sequence[int], processes: int, *, between_prompts: bool) -> list[list[int]]:
    """The groups of each process, as `bounds` of its own: shares of consecutive groups, or all of them to the first.

    Example:
        >>> dealt([0, 4, 8, 12], 2, between_prompts=False)
        [[0, 4], [4, 8, 12]]
        >>> dealt([0, 4, 8, 12], 2, between_prompts=True)
        [[0, 4, 8, 12], [0]]
    """
    if between_prompts:
        return [list(bounds), *([bounds[0]] for _ in range(processes - 1))]
    groups = len(bounds) - 1
    return [
        list(bounds[groups * rank // processes : groups * (rank + 1) // processes + 1]) for rank in range(processes)
    ]
