"""The exact score Gram of a language model in one forward and backward pass.

`measure_gram` looks and leaves the model as it was; `backward_with_gram` is the form a training step uses: the same
single backward pass gives the Gram and leaves `Σ_i w_i ψ_i` in `.grad`. `docs/gram.md` derives the algorithm.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from scoregram.checks import fail, require_finite
from scoregram.gram.batch import Batch, make_batch, repacked
from scoregram.gram.distinct import distinct
from scoregram.gram.measurement import Measurement
from scoregram.gram.result import Gram
from scoregram.gram.sharding import is_spread
from scoregram.gram.sketch import Sketch
from scoregram.gram.verify import verify_gram


def measure_gram(
    model: nn.Module,
    input_ids: Tensor,
    completion_mask: Tensor,
    attention_mask: Tensor | None = None,
    *,
    coefficients: Tensor | None = None,
    rollout_ids: Tensor | None = None,
    group_size: int | None = None,
    temperature: float = 1.0,
    sketch: Sketch | None = None,
    verify: bool = False,
) -> Gram:
    """The Gram `K_ij = ⟨ψ_i, ψ_j⟩` of the scores of `N` rollouts, over every trainable parameter.

    `ψ_i = Σ_t c_it ∇ log π(y_it)` over the completion tokens of rollout `i`, summed, never averaged; `c = 1` gives the
    score itself, and the `c = ∂L/∂log π` of a loss gives that loss's per-rollout gradients. One forward and one
    backward pass, equal rollouts once; nothing about the model changes. A rollout with no completion token has a zero
    row.

    Args:
        model: A causal language model; only parameters that require gradients count.
        input_ids: `(N, T)` prompt and completion, padded on either side.
        completion_mask: `(N, T)`, true for the tokens whose log-probabilities count.
        attention_mask: `(N, T)`, 0 for padding; all real by default.
        coefficients: `(N, T)` factors `c`; read at completion tokens only.
        rollout_ids: For packed rollouts: the rollout `0 … N-1` of every token, negative for padding.
        group_size: Only the blocks within groups of this many consecutive rollouts; `nan` elsewhere.
        temperature: Logits are divided by it, for a policy that is sampled so.
        sketch: Also sketch every score, so that it can be compared with those of other calls.
        verify: Compare with independent plain backward passes and raise if they disagree.

    Raises:
        ScoregramError: Shapes that do not match, an empty batch, a completion token that nothing predicts, parameters
            or gradients that are not finite.
    """
    batch = make_batch(
        input_ids,
        completion_mask,
        attention_mask,
        coefficients=coefficients,
        rollout_ids=rollout_ids,
        temperature=temperature,
    )
    measurement = Measurement(model, distinct(batch, group_size), weights=None, sketch=sketch)
    measurement.run()
    gram = as_given(measurement.result(), batch, rollout_ids)
    if verify:
        with measurement.as_it_was():
            verify_gram(measurement.model, batch, gram, group_size, measurement.survey)
    return gram


def backward_with_gram(
    model: nn.Module,
    input_ids: Tensor,
    completion_mask: Tensor,
    attention_mask: Tensor | None = None,
    *,
    weights: Tensor,
    combine: Callable[[Gram], Tensor] | None = None,
    coefficients: Tensor | None = None,
    rollout_ids: Tensor | None = None,
    group_size: int | None = None,
    temperature: float = 1.0,
    sketch: Sketch | None = None,
) -> Gram:
    """The Gram as `measure_gram` gives it, and `Σ_i w_i ψ_i` added to `.grad`, from the same single backward pass.

    With several weight vectors, `combine` is called with the Gram and returns one factor for each: a baseline `b` that
    depends on `K` needs the two vectors `r` and `1` and the factors `1` and `-b`, and no second backward pass.

    Args:
        weights: `(N,)` or `(M, N)`. An optimiser that descends wants `-A_i / R`, say.
        combine: From the Gram to `(M,)` factors; needed when `M > 1`.
        model: As for `measure_gram`, like all that follow.
        input_ids: `(N, T)`.
        completion_mask: `(N, T)`.
        attention_mask: `(N, T)` or None.
        coefficients: `(N, T)` or None.
        rollout_ids: `(B, T)` or None.
        group_size: Blocks within groups only.
        temperature: Divides the logits.
        sketch: Also sketch every score.
    """
    batch = make_batch(
        input_ids,
        completion_mask,
        attention_mask,
        coefficients=coefficients,
        rollout_ids=rollout_ids,
        temperature=temperature,
    )
    if is_spread(model):
        fail(
            "backward_with_gram",
            "the model must lie whole in one process",
            "one whose gradients are averaged over processes",
            "Use measure_gram, and take the step as before.",
        )
    vectors = torch.atleast_2d(weights).to(input_ids.device)
    if vectors.ndim != 2 or vectors.shape[1] != batch.rollouts:
        fail(
            "backward_with_gram",
            f"weights must be (N,) or (M, N) with N = {batch.rollouts}",
            tuple(weights.shape),
            "Pass one weight for each rollout.",
        )
    if len(vectors) > 1 and combine is None:
        fail(
            "backward_with_gram",
            "several weight vectors need `combine`",
            f"{len(vectors)} vectors",
            "Pass a function from the Gram to one factor for each.",
        )
    require_finite(vectors, name="weights", caller="backward_with_gram")
    measurement = Measurement(model, distinct(batch, group_size), weights=vectors, sketch=sketch)
    measurement.run()
    if combine is None:
        return as_given(measurement.result_and_gradients(), batch, rollout_ids)
    gram = as_given(measurement.result(), batch, rollout_ids)
    measurement.write_gradients(combine(gram))
    return gram


def as_given(gram: Gram, batch: Batch, rollout_ids: Tensor | None) -> Gram:
    """The record with log-probabilities at the places of packed rollouts, if they were packed."""
    if rollout_ids is None:
        return gram
    return replace(gram, log_probs=repacked(gram.log_probs, batch, rollout_ids))
