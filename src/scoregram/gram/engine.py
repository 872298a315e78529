"""The entry points: the exact score Gram of a language model from one forward and one backward pass.

`measure_gram` leaves the model as it was. `backward_with_gram` is for a training step: the same single backward pass
gives the Gram and leaves `Σ_i w_i ψ_i` in `.grad`. `cross_gram` compares trained with held-out rollouts. `DeferredGram`
splits a measurement into its forward and its backward pass. `docs/gram.md` derives the algorithm.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor, nn

from scoregram.checks import fail, require_finite, require_same_shape
from scoregram.gram.batch import all_rollouts, distinct_rollouts, make_batch, require_tensors
from scoregram.gram.measurement import Measurement
from scoregram.gram.model import MeasuredModel, averages_gradients
from scoregram.gram.plain_passes import verify_gram
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
    verify: bool = False,
) -> Gram:
    """The Gram `K_ij = ⟨ψ_i, ψ_j⟩` of the scores of `N` rollouts, over every trainable parameter.

    `ψ_i = Σ_t c_it ∇ log π(y_it)` over the completion tokens of rollout `i`, summed, never averaged; `c = 1` gives the
    score itself, and the `c = ∂L/∂log π` of a loss gives that loss's per-rollout gradients. It takes one
    forward and one backward pass, with equal rollouts only once, and leaves the model unchanged, also after Ctrl-C. Two
    threads can measure two models, not one. A rollout with no completion token has a zero row.

    Args:
        model: A causal language model; only parameters that require gradients count.
        input_ids: `(N, T)` prompt and completion, padded anywhere; or a `Rollouts`, which brings both masks.
        completion_mask: `(N, T)`, true for the tokens whose log-probabilities count.
        attention_mask: `(N, T)`, 0 for padding; all real by default.
        coefficients: `(N, T)` factors `c`; read at completion tokens only.
        rollout_ids: For packed rollouts: the rollout `0 … N-1` of every token, negative for padding.
        group_size: Only the blocks within groups of this many consecutive rollouts; `nan` elsewhere.
        temperature: Logits are divided by it; pass the temperature that the policy is sampled at.
        sketch: Also sketch every score, so that it can be compared with those of other calls.
        keep_padding: Give the model the rows as they are, padding included, as a trainer does. By default padding
            before or between real tokens is moved to the right end, where a causal model does not see it.
        verify: Compare with one plain backward pass per rollout, alone and without padding, and raise if they disagree.

    Raises:
        ScoregramError: Shapes that do not match, an empty batch, masks of other values than 0 and 1, ids outside the
            vocabulary, a completion token that nothing predicts, parameters or gradients that are not finite, a
            model that shares modules or trained parameters with a measurement that is running, in this thread or
            another; with `verify`, a model whose output depends on padding or on the other rollouts.
    """
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
    rollouts = distinct_rollouts(batch, group_size)
    with Undo() as undo, undo, measured.in_use(undo):
        measurement = Measurement(measured, rollouts, sketch=sketch)
        scores = measurement.run(check_padding=not verify)
        gram = scores.gram()
        if verify:
            verify_gram(measured, batch, gram.matrix, gram.log_probs, group_size)
    return replace(gram, log_probs=batch.as_given(gram.log_probs))


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
    """The Gram as `measure_gram` gives it, and `Σ_i w_i ψ_i` added to `.grad`, from the same single backward pass.

    `weights` is `(N,)`: `-A_i / R`, for example, for an optimiser that descends. With several weight vectors `(M, N)`,
    `combine` is called with the Gram and returns one factor for each, `(M,)`: a baseline `b` that depends on `K` needs
    the two vectors `r` and `1` and the factors `1` and `-b`, and no second backward pass. All other arguments, and the
    errors, are those of `measure_gram`.
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
    require_tensors(caller, weights=weights)
    if averages_gradients(model):
        fail(
            caller,
            "the model must lie whole in one process",
            "one whose gradients are averaged over processes",
            "Use measure_gram, and take the training step as before.",
        )
    vectors = torch.atleast_2d(weights).to(batch.input_ids.device)
    if vectors.ndim != 2 or vectors.shape[1] != batch.rollouts:
        requirement = f"weights must be (N,) or (M, N) with N = {batch.rollouts}"
        fail(caller, requirement, tuple(weights.shape), "Pass one weight for each rollout.")
    if len(vectors) > 1 and combine is None:
        remedy = "Pass a function from the Gram to one factor for each."
        fail(caller, "several weight vectors need `combine`", f"{len(vectors)} vectors", remedy)
    require_finite(vectors, name="weights", caller=caller)
    rollouts = distinct_rollouts(batch, group_size)
    with Undo() as undo, undo, measured.in_use(undo):
        measurement = Measurement(measured, rollouts, weights=vectors, sketch=sketch)
        scores = measurement.run()
    gram = scores.gram_and_gradients() if combine is None else scores.gram()
    gram = replace(gram, log_probs=batch.as_given(gram.log_probs))
    if combine is not None:
        scores.write_gradients(combine(gram))
    return gram


# Trained against held-out rollouts


@dataclass(frozen=True)
class HeldOutGram:
    """Inner products of the scores of trained and held-out rollouts."""

    cross: Float[Tensor, "train held"]
    """`⟨ψ_i, ψ_j⟩` of trained `i` and held-out `j`, float64; `held_out_effect` takes its transpose."""
    train: Float[Tensor, "train train"]
    """The Gram of the trained rollouts alone, float64."""


def cross_gram(
    model: nn.Module, train: Sequence[Tensor | None], held_out: Sequence[Tensor | None], *, temperature: float = 1.0
) -> HeldOutGram:
    """The rectangular block of the Gram of trained against held-out rollouts, from one pass over both.

    Args:
        model: As for `measure_gram`.
        train: `(input_ids, completion_mask, attention_mask)`, each `(N, T)`; the last may be None or left out.
        held_out: The same with `(M, T')`; the shorter of the two is padded on the right.
        temperature: Logits are divided by it.

    Raises:
        ScoregramError: As `measure_gram`, and if a part is empty or does not have two or three tensors.
    """
    named = {"train": train, "held_out": held_out}
    tokens = max(padded_part(part, name)[0].shape[1] for name, part in named.items())
    parts = [padded_part(part, name, tokens) for name, part in named.items()]
    ids, mask, attention = (torch.cat(pair) for pair in zip(*parts, strict=True))
    matrix = measure_gram(model, ids, mask, attention, temperature=temperature).matrix
    count = len(parts[0][0])
    return HeldOutGram(cross=matrix[:count, count:], train=matrix[:count, :count])


def padded_part(part: Sequence[Tensor | None], name: str, tokens: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, completion mask and attention mask, checked, padded on the right to `tokens`."""
    caller = "cross_gram"
    if len(part) not in (2, 3) or part[0] is None or part[1] is None:
        given = [None if tensor is None else tuple(tensor.shape) for tensor in part]
        fail(caller, f"{name} must be (input_ids, completion_mask, attention_mask)", given, "The last may be None.")
    ids, mask, attention = part[0], part[1], part[2] if len(part) == 3 else None
    if ids.ndim != 2 or not ids.numel():
        remedy = "Use measure_gram for one part."
        fail(caller, f"{name} must hold at least one rollout (N, T)", tuple(ids.shape), remedy)
    attention = torch.ones_like(ids) if attention is None else attention.long()
    require_same_shape(mask, ids, name=f"completion_mask of {name}", like_name="input_ids", caller=caller)
    require_same_shape(attention, ids, name=f"attention_mask of {name}", like_name="input_ids", caller=caller)
    missing = max(tokens - ids.shape[1], 0)
    return F.pad(ids, (0, missing)), F.pad(mask.bool(), (0, missing)), F.pad(attention, (0, missing))


# Forward pass now, backward pass later


class DeferredGram:
    """A forward pass over rollouts, and later one backward pass that gives the Gram and weighted sums of its rows.

    `backward_with_gram` needs the coefficients of the log-probabilities beforehand. The loss of another library takes
    the log-probabilities first, and its coefficients `∂L/∂log π` are known only when its own backward pass reaches
    them. In between the model's graph is held, as in any training step. Nothing about the model changes, not even
    `.grad`: the caller decides what to do with the sums. The arguments are those of `measure_gram`, for a model in one
    process.
    """

    log_probs: Tensor
    """`(N, T)` log-probability of every completion token, 0 elsewhere; no gradient."""
    entropies: Tensor
    """`(N, T)` entropy of the distribution that each of them was drawn from, 0 elsewhere; no gradient."""

    def __init__(
        self,
        model: nn.Module,
        input_ids: Tensor,
        completion_mask: Tensor,
        attention_mask: Tensor | None = None,
        *,
        temperature: float = 1.0,
        keep_padding: bool = False,
    ) -> None:
        if averages_gradients(model):
            got = "one whose gradients are averaged over processes"
            fail("DeferredGram", "the model must lie whole in one process", got, "Use measure_gram.")
        self._measured = MeasuredModel(model)
        self._batch = make_batch(
            self._measured.model,
            input_ids,
            completion_mask,
            attention_mask,
            temperature=temperature,
            keep_padding=keep_padding,
        )
        # All rollouts: equal texts may get different coefficients later.
        self._measurement = Measurement(self._measured, all_rollouts(self._batch))
        with Undo() as undo, undo, self._measured.in_use(undo):
            found = self._measurement.forward()
        self.log_probs, self.entropies = map(self._batch.as_given, found)

    def finish(self, coefficients: Tensor, weights: Tensor) -> tuple[Gram, dict[Tensor, Tensor]]:
        """The Gram of `ψ_i = Σ_t c_it ∇ log π(y_it)`, and for every parameter `(M, …)` the sums `Σ_i w_mi ψ_i`.

        Can be called once. A parameter that took no part has no sums.

        Args:
            coefficients: `(N, T)` factors `c`; read at completion tokens only.
            weights: `(M, N)`.

        Raises:
            ScoregramError: If anything is not finite.
        """
        rollouts = all_rollouts(self._batch.with_coefficients(coefficients))
        weights = weights.to(self.log_probs.device)
        with Undo() as undo, undo, self._measured.in_use(undo):
            scores = self._measurement.backward(rollouts, weights)
        return replace(scores.gram(), log_probs=self.log_probs), scores.sums()
