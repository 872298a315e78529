"""The Gram of more rollouts than one pass can hold, exactly, from several passes.

`K_ij` needs the gradients of rollouts `i` and `j` at the same time. There are two ways:

- **Kept gradients.** Each pass keeps the per-rollout gradients of its rollouts, and the Gram is taken when all have
  arrived. `N` gradients of all parameters rarely fit into memory, so the parameters are divided into parts, and all
  rollouts run through the model once for each part. A round without weight gradients is two thirds of a full one, so
  `S` parts take `(2S + 1)/3` times the work of one pass over all rollouts. This is the way for adapters and small
  models.
- **Pairs.** The rollouts are divided into blocks of half a pass, and every pair of blocks takes one pass, so that any
  two rollouts meet. `B` blocks take `B - 1` times the work, and no memory beyond that of a pass. This is the way for
  large models.

`plan_passes` estimates the memory of both and takes the one with less work; the largest passes, if there are several.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scoregram.checks import fail
from scoregram.gram.batch import Batch, DistinctRollouts, all_rollouts
from scoregram.gram.kept import KeptRows
from scoregram.gram.measurement import Measurement
from scoregram.gram.memory import MEMORY_SHARE, bytes_of_pass, free_bytes
from scoregram.gram.model import MeasuredModel, model_inside, trainable_parameters
from scoregram.gram.preconditioner import Diagonal
from scoregram.gram.result import CollectedScores, layer_of
from scoregram.rollouts import micro_batches

MOST_PARTS = 32
"""Most parts of the parameters that a plan considers."""
GENEROSITY = 1.5
"""Factor by which the estimate of a pass may exceed its true memory."""

# The plan


@dataclass(frozen=True)
class PassPlan:
    """How the Gram of a batch is measured in passes."""

    rollouts: int
    per_pass: int
    """Most rollouts in one pass; at least 2 without kept gradients."""
    parts: int = 1
    """Parts of the parameters whose gradients are kept in turn; 0: none are kept, and pairs of blocks meet instead."""
    bytes: int = 0
    """Estimated peak memory beside the model; 0: unknown."""

    def __post_init__(self) -> None:
        least = 1 if self.parts or self.rollouts == 1 else 2
        if min(self.rollouts, 1 + self.parts) < 1 or self.per_pass < least:
            got = f"{self.rollouts} rollouts, {self.per_pass} per pass, {self.parts} parts"
            fail("PassPlan", f"needs rollouts, and at least {least} per pass", got, "Make a plan with plan_passes.")

    @property
    def is_single(self) -> bool:
        """Whether one pass holds all rollouts."""
        return self.per_pass >= self.rollouts

    @property
    def passes(self) -> int:
        """Number of passes."""
        if self.is_single:
            return 1
        return self.parts * math.ceil(self.rollouts / self.per_pass) if self.parts else math.comb(self._blocks, 2)

    @property
    def work(self) -> float:
        """Operations of all passes, in units of one pass over all rollouts."""
        if self.is_single:
            return 1.0
        return (2 * self.parts + 1) / 3 if self.parts else float(self._blocks - 1)

    @property
    def _blocks(self) -> int:
        return math.ceil(self.rollouts / (self.per_pass // 2))

    def __str__(self) -> str:
        if self.is_single:
            way = "one pass"
        elif self.parts:
            share = "" if self.parts == 1 else f" of one part in {self.parts} of the parameters at a time"
            way = f"{self.passes} passes of {self.per_pass}, keeping the gradients{share}"
        else:
            way = f"{self.passes} passes of {self.per_pass}, so that every two rollouts meet"
        size = f", {self.bytes / 1e9:.3g} GB" if self.bytes else ""
        return f"{self.rollouts} rollouts in {way}: {self.work:.3g} times the work of one pass{size}"


def plan_passes(
    model: nn.Module, rollouts: int, tokens: int, *, per_pass: int | None = None, memory_gb: float | None = None
) -> PassPlan:
    """The plan with the least work that fits into memory; among equals the one with the largest passes.

    If none fits by the estimate, which is generous, it is the plan that needs the least memory.

    Args:
        model: A causal language model with its trainable parameters.
        rollouts: Number `N` of rollouts.
        tokens: Length of the longest.
        per_pass: Rollouts in a pass; None: chosen here.
        memory_gb: Memory that the passes may take, in GB; None: 80 % of what is free on the model's device.
    """
    for name, given in (("rollouts", rollouts), ("tokens", tokens), ("per_pass", per_pass)):
        if given is not None and given < 1:
            fail("plan_passes", f"{name} must be at least 1", given, "Pass the size of the batch.")
    if memory_gb is not None and not memory_gb > 0:
        fail("plan_passes", "memory_gb must be positive", memory_gb, "Leave it out for 80 % of what is free.")
    inside = model_inside(model)
    parameters = trainable_parameters(inside)
    limit = MEMORY_SHARE * free_bytes(inside) if memory_gb is None else memory_gb * 1e9
    kept = largest_parts([kept_bytes(parameter) for parameter in parameters])
    plans = [
        plan
        for size in ([per_pass] if per_pass else halvings(rollouts))
        for plan in plans_of_size(
            rollouts, size, bytes_of_pass(inside, min(size, rollouts), tokens, parameters=parameters), kept
        )
    ]
    fitting = [plan for plan in plans if plan.bytes <= limit]
    if not fitting:
        return min(plans, key=lambda plan: plan.bytes)
    return min(fitting, key=lambda plan: (plan.work, plan.passes))


def halvings(rollouts: int) -> list[int]:
    """`N`, `N/2`, `N/4`, … 1, rounded up.

    Example:
        >>> halvings(12)
        [12, 6, 3, 2, 1]
    """
    sizes = [rollouts]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def plans_of_size(rollouts: int, per_pass: int, pass_bytes: int, kept: Sequence[int]) -> Iterator[PassPlan]:
    """All plans with passes of one size; `kept` has the bytes of a rollout's largest part, for 1, 2, … parts."""
    if per_pass >= rollouts:
        yield PassPlan(rollouts, per_pass, bytes=pass_bytes)
        return
    if per_pass > 1:
        yield PassPlan(rollouts, per_pass, parts=0, bytes=pass_bytes)
    for parts, largest in enumerate(kept, 1):
        yield PassPlan(rollouts, per_pass, parts, pass_bytes + rollouts * largest)


def largest_parts(sizes: Sequence[int]) -> list[int]:
    """Size of the largest part if `sizes` are divided into 1, 2, … `MOST_PARTS` parts."""
    counts = range(1, min(MOST_PARTS, len(sizes)) + 1)
    return [max(sum(sizes[index] for index in part) for part in parts_of(sizes, count)) for count in counts]


def kept_bytes(parameter: Tensor) -> int:
    """Bytes of one rollout's gradient of a parameter: a matrix has the dtype of its products under autocast."""
    device = parameter.device.type
    if parameter.ndim > 1 and torch.is_autocast_enabled(device):
        return parameter.numel() * torch.get_autocast_dtype(device).itemsize
    return parameter.nbytes


def parts_of(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Indices of `sizes` in at most `count` parts of consecutive ones, about equally large.

    Example:
        >>> parts_of([4, 1, 1, 1, 1], 2)
        [[0], [1, 2, 3, 4]]
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    total, before = sum(sizes), 0
    for index, size in enumerate(sizes):  # by the middle of each
        parts[min(int((before + size / 2) / max(total, 1) * count), count - 1)].append(index)
        before += size
    return [part for part in parts if part]


# The passes


def run_in_passes(
    measured: MeasuredModel, rollouts: DistinctRollouts, given: PassPlan | None, diagonal: Diagonal | None = None
) -> CollectedScores:
    """The scores of all rollouts, from the passes of a plan; inside `MeasuredModel.in_use`.

    Without a given plan, if the device runs out of memory after all, passes of half the size follow.
    """
    count, tokens = rollouts.batch.input_ids.shape
    plan = first_plan(measured.model, count, tokens) if given is None else replace(given, rollouts=count)
    while True:
        try:
            return scores_of_plan(measured, rollouts, plan, diagonal)
        except torch.OutOfMemoryError:
            if given is not None or plan.per_pass == 1:
                raise
        torch.cuda.empty_cache()  # outside the handler, whose traceback holds the tensors of the pass
        plan = plan_passes(measured.model, count, tokens, per_pass=-(-plan.per_pass // 2))


def first_plan(model: nn.Module, rollouts: int, tokens: int) -> PassPlan:
    """The plan to try first: on a GPU, which survives a failed attempt, one pass if it might fit after all."""
    plan = plan_passes(model, rollouts, tokens)
    if plan.is_single or not survives_exhaustion(model):
        return plan
    single = PassPlan(rollouts, rollouts, bytes=bytes_of_pass(model, rollouts, tokens))
    return single if single.bytes <= GENEROSITY * free_bytes(model) else plan


def survives_exhaustion(model: nn.Module) -> bool:
    """Whether a pass that needs too much memory raises an error; a CPU's operating system ends the process instead."""
    return next(model.parameters()).is_cuda


def scores_of_plan(
    measured: MeasuredModel, rollouts: DistinctRollouts, plan: PassPlan, diagonal: Diagonal | None = None
) -> CollectedScores:
    """The scores of all rollouts from the passes of `plan`."""
    if plan.is_single:
        return Measurement(measured, rollouts, diagonal=diagonal).run()
    # Rollouts of about the same length share a pass, which then has little padding.
    order = rollouts.batch.attention_mask.sum(1).argsort(stable=True)
    passes = (KeptPasses if plan.parts else PairedPasses)(measured, rollouts.batch.at(order), plan, diagonal)
    grams = passes.grams()
    back = order.argsort().cpu()
    blocks = torch.stack([*grams.values()])[:, back][:, :, back] if grams else torch.zeros(0, *2 * (len(back),))
    return CollectedScores(
        measured,
        rollouts,
        tuple(grams),
        blocks.unsqueeze(1),
        {},
        None,
        passes.log_probs[back.to(passes.log_probs.device)],
        tuple(passes.replayed),
        (*passes.notes, str(plan)),
    )


class SeveralPasses:
    """Passes over some rollouts at a time, and what they have in common."""

    def __init__(self, measured: MeasuredModel, batch: Batch, plan: PassPlan, diagonal: Diagonal | None) -> None:
        self.measured = measured
        self.batch = batch
        self.plan = plan
        self.diagonal = diagonal
        self.log_probs = torch.zeros_like(batch.coefficients)
        self.replayed: dict[str, None] = {}
        self.notes: dict[str, None] = {}

    def measure(self, rows: Tensor, kept: KeptRows | None = None) -> CollectedScores:
        """One pass over some rows, without the columns in which all of them are padding."""
        batch = self.batch.at(rows)
        width = batch.input_ids.shape[1]
        if not batch.keeps_padding:
            width = max(int(batch.attention_mask.sum(1).max()), 1)
        batch = replace(
            batch,
            input_ids=batch.input_ids[:, :width],
            attention_mask=batch.attention_mask[:, :width],
            completion_mask=batch.completion_mask[:, :width],
            coefficients=batch.coefficients[:, :width],
        )
        scores = Measurement(self.measured, all_rollouts(batch), kept=kept, diagonal=self.diagonal).run()
        self.log_probs = self.log_probs.to(scores.log_probs)
        self.log_probs[rows] = F.pad(scores.log_probs, (0, self.log_probs.shape[1] - width))
        self.replayed |= dict.fromkeys(scores.replayed)
        self.notes |= dict.fromkeys(scores.notes)
        return scores

    def rows(self, here: slice) -> Tensor:
        """Row numbers on the device of the batch."""
        return torch.arange(here.start, here.stop, device=self.batch.input_ids.device)


class KeptPasses(SeveralPasses):
    """Passes that keep the gradients of one part of the parameters after the other."""

    def grams(self) -> dict[str, Tensor]:
        """`(N, N)` float64 Gram of every layer with a gradient, on the CPU."""
        named = list(self.measured.parameters.items())
        sizes = [kept_bytes(parameter) for _, parameter in named]
        totals: dict[str, Tensor] = {}
        for part in parts_of(sizes, self.plan.parts):
            for layer, gram in self.grams_of([named[index] for index in part]).items():
                totals[layer] = totals[layer] + gram if layer in totals else gram
        return totals

    def grams_of(self, part: Sequence[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """The Grams of one part of the parameters, from one pass after the other over all rollouts."""
        count = self.batch.rollouts
        kept = KeptRows([parameter for _, parameter in part], count, self.diagonal)
        for here in micro_batches(count, self.plan.per_pass):
            kept.begin_pass(here)
            self.measure(self.rows(here), kept)
        layer_by_id = {id(parameter): layer_of(name) for name, parameter in part if id(parameter) in kept.owners}
        place = {layer: index for index, layer in enumerate(dict.fromkeys(layer_by_id.values()))}
        grams = kept.take_grams({owner: place[layer] for owner, layer in layer_by_id.items()}, len(place))
        return dict(zip(place, grams.cpu().unbind(), strict=True))


class PairedPasses(SeveralPasses):
    """Passes over every pair of blocks of rollouts."""

    def grams(self) -> dict[str, Tensor]:
        """`(N, N)` float64 Gram of every layer with a gradient, on the CPU."""
        count, size = self.batch.rollouts, self.plan.per_pass // 2
        blocks = [self.rows(here) for here in micro_batches(count, size)]
        totals: dict[str, Tensor] = {}
        for pair in combinations(blocks, 2):
            rows = torch.cat(pair)
            scores = self.measure(rows)
            places = rows.cpu()
            for layer, gram in zip(scores.layers, scores.blocks[:, 0].cpu().unbind(), strict=True):
                whole = totals.setdefault(layer, torch.zeros(count, count, dtype=torch.float64))
                whole[places[:, None], places] = gram
        return totals
