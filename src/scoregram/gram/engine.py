"""The entry points: the exact score Gram of a language model from one forward and one backward pass.

`measure_gram` leaves the model as it was. `backward_with_gram` is for a training step: the same single backward pass
gives the Gram and leaves `Σ_i w_i ψ_i` in `.grad`. `cross_gram` compares trained with held-out rollouts. `DeferredGram`
splits a measurement into its forward and its backward pass. All enter `Undo` twice, so that Ctrl-C cannot skip it.
`docs/gram.md` derives the algorithm.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor, nn

from scoregram.checks import fail, require_finite, require_same_shape
from scoregram.gram.batch import (
    Batch,
    DistinctRollouts,
    all_rollouts,
    distinct_rollouts,
    make_batch,
    require_complete_groups,
    require_tensors,
    weight_vectors,
    zeros_and_ones,
)
from scoregram.gram.in_passes import PassPlan, run_in_passes
from scoregram.gram.measurement import Measurement
from scoregram.gram.model import MeasuredModel, averages_gradients, sharded_modules, sharding_processes
from scoregram.gram.plain_passes import verify_gram
from scoregram.gram.preconditioner import Diagonal
from scoregram.gram.result import Gram
from scoregram.gram.sketch import Sketch
from scoregram.gram.undo import Undo
from scoregram.rollouts import Rollouts


def measure_gram(
    model: nn.Module,
    input_ids: Tensor | Rollouts,
    completion_mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    coefficients: Tensor | None = None,
    rollout_ids: Tensor | None = None,
    group_size: int | None = None,
    temperature: float = 1.0,
    sketch: Sketch | None = None,
    keep_padding: bool = False,
    plan: PassPlan | Literal["auto"] | None = None,
    preconditioner: Mapping[Tensor, Tensor] | None = None,
    verify: bool = False,
) -> Gram:
    """The Gram `K_ij = ⟨ψ_i, ψ_j⟩` of the scores of `N` rollouts, over every trainable parameter.

    `ψ_i = Σ_t c_it ∇ log π(y_it)` is summed, not averaged, over the completion tokens of rollout `i`. `c = 1` gives the
    score; `c = ∂L/∂log π` of a loss gives the per-rollout gradients of that loss. The call takes one forward and one
    backward pass over the distinct rollouts. It leaves the model unchanged, also after Ctrl-C. Two threads can measure
    two models at once, but not the same model. A rollout without completion tokens has a zero row.

    Args:
        model: A causal language model; only parameters that require gradients count.
        input_ids: `(N, T)` prompt and completion, padded anywhere; or a `Rollouts`, which has its own masks.
        completion_mask: `(N, T)`, true for the tokens whose log-probabilities count.
        attention_mask: `(N, T)`, 0 for padding; by default there is no padding.
        coefficients: `(N, T)` coefficients `c`, 1 by default; only those of completion tokens are read.
        rollout_ids: For packed rollouts, in the shape of `input_ids`: the rollout `0 … N-1` of every token, negative
            for padding.
        group_size: Measure only the blocks within groups of this many consecutive rollouts; the rest of `K` is `nan`.
        temperature: The sampling temperature of the policy; logits are divided by it.
        sketch: Also return a sketch of every score, which can be compared with the sketches of other calls.
        keep_padding: Leave the padding of the rows where it is, as a trainer does. By default the engine moves padding
            to the right end of a row, where a causal model does not attend to it.
        plan: Measure the rollouts in several passes, as a `plan_passes` says; `"auto"` plans for the memory that is
            free. The Gram is the same; the last of its `notes` tells the cost. By default there is one pass.
        preconditioner: A diagonal `D`: for every trainable parameter a tensor of its shape, with entries of 0 or more,
            as from `adam_preconditioner`. The Gram is then `⟨ψ_i, D ψ_j⟩`, and so are the Grams of the layers.
        verify: Compare `K` with one plain backward pass per rollout, alone and without padding, and raise if they
            disagree.

    Raises:
        ScoregramError: If shapes differ, the batch is empty, a mask has values other than 0 and 1, a token id is not in
            the vocabulary, a completion token is the first token of its rollout, a parameter or gradient is not finite,
            or another measurement, in any thread, is using one of the modules or trainable parameters; with `verify`,
            also if the model's output depends on padding or on the other rollouts. With a preconditioner, also if it
            lacks a parameter, a shape differs, an entry is negative or not finite, the model is sharded, or there is a
            sketch.
    """
    measured = MeasuredModel(model)
    require_sketch(sketch)
    if plan is not None:
        refuse_several_passes(measured.model, plan, group_size, sketch)
    if preconditioner is not None:
        require_preconditioner(measured.model, preconditioner, sketch)

    def checked_batch() -> tuple[Batch, DistinctRollouts]:
        batch = make_batch(
            measured.model,
            input_ids,
            completion_mask,
            attention_mask,
            coefficients=coefficients,
            rollout_ids=rollout_ids,
            temperature=temperature,
            keep_padding=keep_padding,
        )
        return batch, distinct_rollouts(batch, group_size)

    # A process that raised alone would leave the others waiting in the first pass.
    batch, rollouts = sharding_processes(measured.model).each(checked_batch)
    with Undo() as undo, undo, measured.in_use(undo):
        diagonal = None if preconditioner is None else Diagonal(preconditioner, measured.parameters)
        if plan is None:
            measurement = Measurement(measured, rollouts, sketch=sketch, diagonal=diagonal)
            scores = measurement.run(check_padding=not verify)
        else:
            scores = run_in_passes(measured, rollouts, None if isinstance(plan, str) else plan, diagonal)
        gram = scores.gram()
        if verify:
            verify_gram(measured, batch, gram.matrix, gram.log_probs, group_size, diagonal)
    return replace(gram, log_probs=batch.as_given(gram.log_probs))


def require_sketch(sketch: object) -> None:
    """Raise unless this is a `Sketch` or None."""
    if not isinstance(sketch, Sketch | None):
        fail("measure_gram", "sketch must be a Sketch or None", repr(sketch), "Pass for example Sketch(features=1024).")


def require_preconditioner(model: nn.Module, preconditioner: object, sketch: Sketch | None) -> None:
    """Raise unless a preconditioner is a mapping, and a measurement with one is possible."""
    caller = "measure_gram"
    if not isinstance(preconditioner, Mapping) or not all(isinstance(key, Tensor) for key in preconditioner):
        remedy = "Make one with adam_preconditioner(optimizer)."
        fail(caller, "preconditioner must map parameters to tensors", type(preconditioner).__name__, remedy)
    if sketch is not None:
        remedy = "Sketches are of plain scores; measure them in a call of their own."
        fail(caller, "a preconditioner excludes a sketch", "both", remedy)
    if sharded_modules(model):
        fail(caller, "preconditioner needs a model that is whole", "a sharded model", "Measure it on one process.")


def refuse_several_passes(
    model: nn.Module, plan: PassPlan | str, group_size: int | None, sketch: Sketch | None
) -> None:
    """Raise if a measurement in several passes is not possible with these settings."""
    caller = "measure_gram"
    if plan != "auto" and not isinstance(plan, PassPlan):
        fail(caller, "plan must be 'auto' or a PassPlan", repr(plan), "Make one with plan_passes.")
    if group_size is not None or sketch is not None:
        got = f"group_size {group_size} and {'a' if sketch else 'no'} sketch"
        remedy = "Measure the groups in calls of their own: blocks and sketches need no second pass."
        fail(caller, "plan is for the whole Gram alone", got, remedy)
    if sharded_modules(model):
        fail(caller, "plan needs a model that is whole", "a sharded model", "Measure whole groups.")


def backward_with_gram(
    model: nn.Module,
    input_ids: Tensor | Rollouts,
    completion_mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    weights: Tensor,
    combine: Callable[[Gram], Tensor] | None = None,
    coefficients: Tensor | None = None,
    rollout_ids: Tensor | None = None,
    group_size: int | None = None,
    temperature: float = 1.0,
    sketch: Sketch | None = None,
    keep_padding: bool = False,
) -> Gram:
    """The Gram of `measure_gram`; the same backward pass adds `Σ_i w_i ψ_i` to `.grad`.

    `weights` is `(N,)`, for example `-A_i / R` for an optimiser that minimises. It can also be several vectors,
    `(M, N)`; then `combine` takes the Gram and returns one factor per vector, `(M,)`. So a baseline `b` that depends on
    `K` needs no second backward pass: pass the vectors `r` and `1`, and return the factors `1` and `-b`. The other
    arguments and the errors are those of `measure_gram`.
    """
    caller = "backward_with_gram"
    measured = MeasuredModel(model)
    batch = make_batch(
        measured.model,
        input_ids,
        completion_mask,
        attention_mask,
        coefficients=coefficients,
        rollout_ids=rollout_ids,
        temperature=temperature,
        keep_padding=keep_padding,
    )
    require_sketch(sketch)
    if weights is None:
        fail(caller, "weights must be a tensor", "None", "Pass one weight per rollout, or use measure_gram.")
    require_tensors(caller, weights=weights)
    if averages_gradients(model):
        fail(
            caller,
            "the model must be in one process",
            "a model whose gradients are averaged over processes",
            "Use measure_gram, and keep your own training step.",
        )
    vectors = torch.atleast_2d(weights).to(batch.input_ids.device)
    if vectors.ndim != 2 or vectors.shape[1] != batch.rollouts:
        requirement = f"weights must be (N,) or (M, N) with N = {batch.rollouts}"
        fail(caller, requirement, tuple(weights.shape), "Pass one weight per rollout.")
    if len(vectors) > 1 and combine is None:
        remedy = "Pass a function that takes the Gram and returns one factor per vector."
        fail(caller, "several weight vectors need `combine`", f"{len(vectors)} vectors", remedy)
    require_finite(vectors, name="weights", caller=caller)
    rollouts = distinct_rollouts(batch, group_size)
    with Undo() as undo, undo, measured.in_use(undo):
        measurement = Measurement(measured, rollouts, weights=vectors, sketch=sketch)
        scores = measurement.run()
    gram = scores.gram_and_gradients() if combine is None else scores.gram()
    gram = replace(gram, log_probs=batch.as_given(gram.log_probs))
    if combine is not None:
        scores.write_gradients(combined_factors(combine(gram), len(vectors)))
    return gram


def combined_factors(factors: object, count: int) -> Tensor:
    """What `combine` returned. Raises unless it is one finite factor for each of `count` weight vectors."""
    if not isinstance(factors, Tensor) or factors.shape != (count,):
        got = tuple(factors.shape) if isinstance(factors, Tensor) else type(factors).__name__
        remedy = "Return a tensor with one factor per vector; `.grad` was not changed."
        fail("backward_with_gram", f"combine must return ({count},) factors", got, remedy)
    remedy = "Repair the function; `.grad` was not changed."
    return require_finite(factors, name="factors of combine", caller="backward_with_gram", remedy=remedy)


# Trained against held-out rollouts


@dataclass(frozen=True)
class HeldOutGram:
    """Inner products of the scores of trained and held-out rollouts."""

    cross: Float[Tensor, "train held"]
    """`⟨ψ_i, ψ_j⟩` of trained `i` and held-out `j`, float64; `held_out_effect` takes its transpose.

    With a preconditioner both fields are `⟨ψ_i, D ψ_j⟩`.
    """
    train: Float[Tensor, "train train"]
    """The Gram of the trained rollouts alone, float64."""


def cross_gram(
    model: nn.Module,
    train: Sequence[Tensor | None],
    held_out: Sequence[Tensor | None],
    *,
    temperature: float = 1.0,
    preconditioner: Mapping[Tensor, Tensor] | None = None,
) -> HeldOutGram:
    """Inner products of the scores of trained rollouts with those of held-out rollouts, from one pass over both.

    Args:
        model: As for `measure_gram`.
        train: `(input_ids, completion_mask, attention_mask)`, each `(N, T)`; the last is optional and may be None.
        held_out: The same, each `(M, T')`; the shorter of the two parts is padded on the right.
        temperature: Logits are divided by it.
        preconditioner: A diagonal `D`, as for `measure_gram`: a step `η D Σ_i w_i ψ_i` changes `log π` of held-out
            rollout `j` by `η Σ_i w_i ⟨ψ_i, D ψ_j⟩` to first order.

    Raises:
        ScoregramError: As `measure_gram`, and if a part is empty or does not have two or three tensors.
    """
    named_parts = {"train": train, "held_out": held_out}
    tokens = max(padded_part(part, name)[0].shape[1] for name, part in named_parts.items())
    parts = [padded_part(part, name, tokens) for name, part in named_parts.items()]
    ids, mask, attention = (torch.cat(pair) for pair in zip(*parts, strict=True))
    options: dict[str, Any] = {"temperature": temperature, "preconditioner": preconditioner}
    matrix = measure_gram(model, ids, mask, attention, **options).matrix
    count = len(parts[0][0])
    return HeldOutGram(cross=matrix[:count, count:], train=matrix[:count, :count])


def padded_part(part: Sequence[Tensor | None], name: str, tokens: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """The checked ids, completion mask and attention mask of one part, padded on the right to `tokens`."""
    caller = "cross_gram"
    if len(part) not in (2, 3) or part[0] is None or part[1] is None:
        given = [None if tensor is None else tuple(tensor.shape) for tensor in part]
        fail(caller, f"{name} must be (input_ids, completion_mask, attention_mask)", given, "The last may be None.")
    ids, mask, attention = part[0], part[1], part[2] if len(part) == 3 else None
    require_tensors(caller, **{f"{name}[{place}]": tensor for place, tensor in enumerate(part)})
    if ids.ndim != 2 or not ids.numel():
        remedy = "To measure one part alone, use measure_gram."
        fail(caller, f"{name} must be (N, T) with at least one rollout", tuple(ids.shape), remedy)
    attention = torch.ones_like(ids) if attention is None else attention.long()
    require_same_shape(mask, ids, name=f"completion_mask of {name}", like_name="input_ids", caller=caller)
    require_same_shape(attention, ids, name=f"attention_mask of {name}", like_name="input_ids", caller=caller)
    zeros_and_ones(mask, ids, name=f"completion_mask of {name}", remedy="Mark completion tokens with 1.")
    if len(part) == 3 and part[2] is not None:
        zeros_and_ones(part[2], ids, name=f"attention_mask of {name}", remedy="Pass 1 for real tokens.")
    missing = max(tokens - ids.shape[1], 0)
    return F.pad(ids, (0, missing)), F.pad(mask.bool(), (0, missing)), F.pad(attention, (0, missing))


# Forward pass now, backward pass later


class DeferredGram:
    """A measurement in two calls: the forward pass now, the backward pass when the coefficients are known.

    `backward_with_gram` needs the coefficients before the forward pass. The loss of another library takes the
    log-probabilities first, and its backward pass then gives the coefficients `∂L/∂log π`. Between the two calls this
    object holds the autograd graph, as every training step does. It does not change the model, not even `.grad`: the
    caller decides what to do with the sums. The arguments are those of `measure_gram`; the model must be in one
    process.
    """

    log_probs: Tensor
    """`(N, T)` log-probability of every completion token, 0 elsewhere; no gradient."""
    entropies: Tensor
    """`(N, T)` entropy of the model's distribution at every completion token, 0 elsewhere; no gradient."""

    def __init__(
        self,
        model: nn.Module,
        input_ids: Tensor,
        completion_mask: Tensor,
        attention_mask: Tensor | None = None,
        *,
        group_size: int | None = None,
        temperature: float = 1.0,
        keep_padding: bool = False,
    ) -> None:
        if averages_gradients(model):
            got = "a model whose gradients are averaged over processes"
            fail("DeferredGram", "the model must be in one process", got, "Use measure_gram.")
        self._is_finished = False
        self._measured = MeasuredModel(model)
        self._batch = make_batch(
            self._measured.model,
            input_ids,
            completion_mask,
            attention_mask,
            temperature=temperature,
            keep_padding=keep_padding,
        )
        require_complete_groups(self._batch, group_size, caller="DeferredGram")
        self._group_size = group_size
        # Duplicates stay: equal rollouts may get different coefficients later.
        self._measurement = Measurement(self._measured, all_rollouts(self._batch, group_size))
        with Undo() as undo, undo, self._measured.in_use(undo):
            found = self._measurement.forward()
        self.log_probs, self.entropies = map(self._batch.as_given, found)

    def finish(self, coefficients: Tensor, weights: Tensor) -> tuple[Gram, dict[Tensor, Tensor]]:
        """The Gram of `ψ_i = Σ_t c_it ∇ log π(y_it)`, and the sums `Σ_i w_mi ψ_i`, `(M, *shape)` for each parameter.

        Call it once. A parameter that was not used has no entry.

        Args:
            coefficients: `(N, T)` coefficients `c`; only those of completion tokens are read.
            weights: `(M, N)`.

        Raises:
            ScoregramError: If weights or coefficients have another shape, or if a weight, a coefficient, a parameter or
                a gradient is not finite.
        """
        if self._is_finished:
            fail("DeferredGram.finish", "can be called once", "a second call", "Make a new DeferredGram.")
        weights = weight_vectors(weights, self._batch.rollouts, caller="DeferredGram.finish")
        weights = weights.to(self.log_probs.device)
        rollouts = all_rollouts(self._batch.with_coefficients(coefficients), self._group_size)
        self._is_finished = True  # the backward pass frees the graph
        with Undo() as undo, undo, self._measured.in_use(undo):
            scores = self._measurement.backward(rollouts, weights)
        return replace(scores.gram(), log_probs=self.log_probs), scores.sums
