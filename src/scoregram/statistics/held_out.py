"""Would this step help prompts it was not computed from?"""

import math
from dataclasses import dataclass

import torch

from scoregram.checks import fail, require_finite
from scoregram.statistics.blocks import require_weights, weighted_membership
from scoregram.types import BatchWeights, CrossGram, HeldPromptOf, HeldWeights, PerPrompt


@dataclass(frozen=True)
class HeldOutEffect:
    """First-order change of the held-out objective under one step."""

    total: float
    """Change of the whole held-out objective."""
    per_prompt: PerPrompt
    """`(P,)`: the part of each held-out prompt; they sum to `total`."""
    helped: float
    """Share of held-out prompts whose part is positive (a part of zero does not count)."""


def held_out_effect(
    cross_gram: CrossGram,
    weights: BatchWeights,
    held_weights: HeldWeights,
    held_prompt_of: HeldPromptOf,
    *,
    learning_rate: float | int = 1.0,
) -> HeldOutEffect:
    """First-order change of the expected held-out reward when the step `Δθ = η Σ w_i ψ_i` is taken.

    `⟨∇J_held, Δθ⟩ = η vᵀ K_held,train w`, where `Σ_j v_j ψ_j` estimates `∇J_held`. With leave-one-out advantages over
    `P·R` as `v`, it is an unbiased estimate of that inner product, because the held-out rollouts know nothing of the
    step. Reads: positive the step helps, negative it harms, `0` it is orthogonal. It speaks of a plain gradient step:
    Adam, clipping and the second order are not in it.

    The sum cancels: its absolute error is `η` times the precision of K times `Σ |v_j w_i K_ji|`. If `total` is not
    far above that, take the inner product of the two accumulated gradients instead.

    Args:
        cross_gram: `(H, N)`. Held-out scores against trained scores; need be neither square nor symmetric.
        weights: `(N,)`. Weights of the step.
        held_weights: `(H,)`. Policy-gradient weights of the held-out rollouts.
        held_prompt_of: `(H,)`. The held-out prompt of each held-out rollout, `0 … P-1`.
        learning_rate: `η`.

    Example:
        >>> cross, ones = torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.ones(2)
        >>> held_out_effect(cross, ones, ones, torch.tensor([0, 1])).per_prompt
        tensor([ 3., -1.], dtype=torch.float64)
    """
    caller = "held_out_effect"
    if cross_gram.ndim != 2 or cross_gram.shape[0] == 0:
        fail(caller, "needs a block of shape (H, N) with a held-out rollout", tuple(cross_gram.shape), "Measure one.")
    if not math.isfinite(learning_rate):
        fail(caller, "learning_rate must be finite", learning_rate, "Pass the step size.")
    k = require_finite(cross_gram.detach().double(), name="the Gram", caller=caller)
    w, v = require_weights(weights, k, caller=caller), require_weights(held_weights, k.mT, caller=caller)
    rows = weighted_membership(v, held_prompt_of, caller=caller)  # (P, H)
    per_prompt = learning_rate * (rows @ (k @ w))
    return HeldOutEffect(float(per_prompt.sum()), per_prompt, float((per_prompt > 0).to(torch.float64).mean()))
