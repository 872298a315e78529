"""One optimisation step: its micro-batches as the trainer runs them, then its rollouts from all processes.

TRL shuffles a generation and splits it into micro-batches. Every row carries a key that names its generation and
its row there. A hook on the log-probabilities records the derivative of the loss in the trainer's own backward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from scoregram.checks import fail
from scoregram.integrations.trl.generation import Generation, merged_generation
from scoregram.rollouts import Rollouts, concatenated_rollouts

ROW_KEY = "scoregram_rows"
"""Batch entry `(B, 2)`: for each rollout, the serial number of its generation and its row there."""

EVENNESS_TOLERANCE = 1e-6
"""Unevenness up to which a loss counts as weighting the tokens of a rollout alike: float32 rounding."""


@dataclass
class MicroBatch:
    """The rollouts of one backward pass."""

    rows: Tensor
    """`(B, 2)`: serial number of the generation, row."""
    coefficients: Tensor | None = None
    """`(B, C)` derivative of the scaled loss with respect to the log-probability of each token."""

    def add_gradient(self, grad: Tensor) -> None:
        """Hook on the log-probabilities; autograd calls it in the trainer's backward pass."""
        self.coefficients = grad.detach() if self.coefficients is None else self.coefficients + grad.detach()


@dataclass
class Window:
    """The micro-batches of one optimisation step in this process."""

    step: int
    """Number of the step, counted from 1."""
    batches: list[MicroBatch] = field(default_factory=list)
    """Those whose loss was computed so far, in order."""
    is_decided: bool = False
    """Whether the processes have decided if the step is fused; they do so at its first loss."""

    @property
    def serials(self) -> list[int]:
        """Serial numbers of the generations that the step uses, in order."""
        found: set[int] = set()
        for batch in self.batches:
            found |= set(batch.rows[:, 0].tolist())
        return sorted(found)

    @property
    def has_derivatives(self) -> bool:
        """Whether the derivative is known for every rollout."""
        return bool(self.batches) and all(batch.coefficients is not None for batch in self.batches)

    def is_on_policy(self, generation: Generation) -> bool:
        """Whether the policy that the step updates is the one that sampled a generation."""
        return generation.policy_step == self.step - 1

    def rows_of(self, generation: Generation) -> Tensor:
        """Rows of a generation that the step uses, in order."""
        rows = [batch.rows[batch.rows[:, 0] == generation.serial, 1] for batch in self.batches]
        return torch.cat(rows).unique()

    def derivatives(self, generation: Generation, scale: float) -> Tensor:
        """`(N, C)` derivative of the loss for every rollout of a generation; 0 for those that the step does not use.

        `scale` is the factor of the loss in the backward pass; derivatives are divided by it.
        """
        ids = generation.completion_ids
        found = torch.zeros(ids.shape, dtype=torch.float64, device=ids.device)
        for batch in self.batches:
            if batch.coefficients is None:
                continue
            own = batch.rows[:, 0] == generation.serial
            if bool(own.any()):
                found.index_add_(0, batch.rows[own, 1].to(found.device), batch.coefficients[own].to(found) / scale)
        return torch.where(generation.loss_mask, found, 0.0)


class RecentGenerations:
    """The generations of this process that a step may still use, by serial number."""

    def __init__(self) -> None:
        self.count = 0
        """Generations so far, those included whose rollouts could not be read."""
        self._by_serial: dict[int, Generation] = {}

    def next_serial(self) -> int:
        """The serial number of a generation that was just made.

        It is used up even if an error follows in this process: serial numbers must agree between processes.
        """
        self.count += 1
        return self.count - 1

    def add(self, generation: Generation) -> None:
        """Keep a generation for the steps that use it."""
        self._by_serial[generation.serial] = generation

    def forget(self, *, but_newest: bool = False) -> None:
        """Drop the generations; the newest stays with `but_newest`, because later steps may reuse it."""
        self._by_serial = {s: one for s, one in self._by_serial.items() if but_newest and s == self.count - 1}

    def used_in(self, window: Window) -> list[Generation]:
        """Generations whose rollouts the loss got; if the loss was not observed, those generated for the step."""
        if window.batches:
            return [self._by_serial[serial] for serial in window.serials]
        known = list(self._by_serial.values())
        return [one for one in known if window.is_on_policy(one)] or known

    def are_fresh(self, window: Window) -> bool:
        """Whether the policy that the step updates sampled all of its rollouts."""
        return all(window.is_on_policy(one) for one in self.used_in(window))

    def to_fuse(self, batch: MicroBatch | None, window: Window, *, is_loss: bool) -> Generation | None:
        """The generation of a micro-batch whose step may be fused; None if it is not known, not one, or has images.

        Rows that are scores, not gradients of the loss (`is_loss`), need rollouts of the policy that the step updates.
        """
        serials = [] if batch is None else sorted(set(batch.rows[:, 0].tolist()))
        generation = self._by_serial.get(serials[0]) if len(serials) == 1 else None
        if generation is None or generation.has_images:
            return None
        return generation if is_loss or window.is_on_policy(generation) else None


def row_keys(generation: Generation) -> Tensor:
    """`(N, 2)` keys that lead from a shuffled and split batch back to the generation."""
    rows = torch.arange(generation.size, device=generation.prompt_ids.device)
    return torch.stack([torch.full_like(rows, generation.serial), rows], 1)


def rollout_weights(derivatives: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """`(n,)` mean of `c = ∂L/∂log π` over the tokens of each rollout, and the unevenness of `c` within rollouts.

    Unevenness is `|c − c̄| / |c|`: 0 if the loss weights all tokens of a rollout alike, so that its gradient is a sum of
    weighted scores; also 0 if `c` is 0 everywhere. Both stay on the device, so that nothing waits for it here.
    """
    counted = mask.double()
    c = derivatives.double() * counted
    mean = c.sum(1) / counted.sum(1).clamp(min=1)
    apart = (c - mean[:, None] * counted).norm()
    return mean, apart / c.norm().clamp(min=torch.finfo(torch.float64).tiny)


@dataclass(frozen=True)
class StepSlice:
    """The part of a step that one process saw."""

    generations: Sequence[Generation]
    """Its slices of the generations that the step uses."""
    chosen: Sequence[Tensor]
    """For each slice `(n,)` bool: the rollouts that are measured."""
    weights: Sequence[Tensor]
    """For each slice `(n,)`: mean derivative of each rollout over its tokens."""
    unevenness: float
    """Largest unevenness of the derivatives within rollouts."""
    coefficients: Sequence[Tensor]
    """For each slice `(n, T)` derivatives at the tokens of its rows; empty where scores are measured."""
    has_derivatives: bool
    """Whether the derivatives are known."""
    memory_limit: float
    """Bytes that a measurement may take in this process."""


def step_slice(
    generations: Sequence[Generation], window: Window, *, scale: float, limit: float, processes: int, is_loss: bool
) -> StepSlice:
    """The part of a step that this process saw.

    With `is_loss` rows are gradients of the loss, for the rollouts of this step; else scores, for whole generations.
    The trainer takes the mean of the gradients of all processes, so derivatives are divided by their number.
    """
    chosen, derivatives = [], [window.derivatives(one, scale * processes) for one in generations]
    for generation in generations:
        here = torch.full((generation.size,), not is_loss)
        if is_loss and window.batches:
            here[window.rows_of(generation).cpu()] = True
        chosen.append(here)
    slices = list(generations)
    if processes > 1:  # to be sent to the others
        slices, derivatives = [one.to("cpu") for one in slices], [c.cpu() for c in derivatives]
    pairs = list(zip(slices, derivatives, strict=True))
    weights = [rollout_weights(c, one.loss_mask) for one, c in pairs]
    return StepSlice(
        generations=slices,
        chosen=chosen,
        weights=[mean.cpu() for mean, _ in weights],
        unevenness=max((float(uneven) for _, uneven in weights), default=0.0),
        coefficients=[one.in_rows(c) for one, c in pairs] if is_loss else [],
        has_derivatives=window.has_derivatives,
        memory_limit=limit,
    )


def reason_not_measured(parts: Sequence[StepSlice], *, is_loss: bool) -> str | None:
    """Why a step cannot be measured, None if it can."""
    generations = [one for part in parts for one in part.generations]
    if not generations:
        return "none of its rollouts was observed"
    if any(one.has_images for one in generations):
        return "its prompts have images, and measuring passes support text only"
    if is_loss and not all(part.has_derivatives for part in parts):
        return "the trainer's loss did not call its method for log-probabilities, whose derivative mode='loss' needs"
    return None


@dataclass(frozen=True, eq=False)
class ObservedStep:
    """The rollouts of a step from all processes, and the derivatives of its loss."""

    number: int
    """Number of the step."""
    generations: Sequence[Generation]
    """The whole generations that the step uses."""
    whole: Rollouts
    """Their rollouts, `N` rows."""
    chosen: Tensor
    """`(N,)` bool: the `n` rollouts that are measured."""
    rollouts: Rollouts
    """Those rollouts."""
    advantages: Tensor
    """`(n,)` float64; the mean over tokens where they differ."""
    token_advantages: Tensor | None
    """`(n, T)`; None unless tokens have their own advantages."""
    weights: Tensor
    """`(n,)` such that `Σ_i w_i ψ_i` of the scores is the gradient, if the loss weights all tokens of a rollout alike.
    Without derivatives `-A_i / n`, the likeliest weights."""
    unevenness: float
    """Largest one of all processes, see `rollout_weights`."""
    coefficients: Tensor | None
    """`(N, T)` derivatives of the loss; None where scores are measured."""
    has_derivatives: bool
    """Whether every process knows the derivatives of all its rollouts."""
    memory_limit: float
    """Bytes that a measurement may take in every process."""

    @property
    def group_bounds(self) -> list[int]:
        """First row of every group of `rollouts`, then the number of rows."""
        return [0, *(here.stop for here in self.rollouts.group_slices())]


def observed_step(number: int, parts: Sequence[StepSlice]) -> ObservedStep:
    """A step from what each process saw of it.

    Raises:
        ScoregramError: If processes saw different generations.
    """
    serials = [[one.serial for one in part.generations] for part in parts]
    if any(found != serials[0] for found in serials):
        remedy = "An earlier warning in one of the processes says why."
        fail("attach", "all processes must see the same generations", serials, remedy)
    each = range(len(serials[0]))
    generations = [merged_generation([part.generations[i] for part in parts]) for i in each]
    whole = concatenated_rollouts([one.rollouts for one in generations], pad_id=0)
    chosen = torch.cat([part.chosen[i] for i in each for part in parts])
    rollouts = whole.select(chosen)
    advantages = torch.cat([one.mean_advantages for one in generations])[chosen]
    width = whole.input_ids.shape[1]

    def stacked(values: Sequence[Tensor]) -> Tensor:
        return torch.cat([F.pad(value, (0, width - value.shape[1])) for value in values])

    token_advantages = None
    if all(one.advantages.ndim == 2 for one in generations):
        values = stacked([one.in_rows(one.advantages.detach()) for one in generations])
        token_advantages = values[chosen.to(values.device), : rollouts.input_ids.shape[1]]
    has_derivatives = all(part.has_derivatives for part in parts)
    weights = torch.cat([part.weights[i] for i in each for part in parts])[chosen]
    return ObservedStep(
        number=number,
        generations=generations,
        whole=whole,
        chosen=chosen,
        rollouts=rollouts,
        advantages=advantages,
        token_advantages=token_advantages,
        weights=weights if has_derivatives else -advantages / len(advantages),
        unevenness=max(part.unevenness for part in parts),
        coefficients=stacked([part.coefficients[i] for i in each for part in parts]) if parts[0].coefficients else None,
        has_derivatives=has_derivatives,
        memory_limit=min(part.memory_limit for part in parts),
    )
