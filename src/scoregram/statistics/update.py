"""What one update `Σ w_i ψ_i` is made of: its norm, its coherence, and who drives it.

Every number here is a quadratic form in the Gram. Its absolute error is the precision of K times
`Σ |w_i w_j K_ij|`, so a form that nearly cancels has few right digits left: `update_cancellation` says how few.
When it is small, take `|Σ w_i ψ_i|` from the accumulated gradient instead. `rtol` is the share of
`Σ |w_i w_j K_ij|` below which a form counts as zero; its default is what a Gram in float32 can resolve.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from scoregram.checks import fail, require_gram
from scoregram.statistics.blocks import require_weights, weighted_membership
from scoregram.types import BatchGram, BatchWeights, PerPrompt, PromptOf


def update_norm(gram: BatchGram, weights: BatchWeights, *, rtol: float = 1e-6) -> float:
    """Length of the update: `|Σ w_i ψ_i| = sqrt(wᵀKw)`.

    Reads: `0` the rollouts cancel or no weight is set; there is no upper end. A form below zero by no more than
    `rtol · Σ |w_i w_j K_ij|` is rounding of K and gives `0`.

    Raises:
        ScoregramError: If `wᵀKw` is further below zero than rounding explains: K is then no Gram.

    Example:
        >>> update_norm(torch.eye(2), torch.tensor([3.0, -4.0]))
        5.0
    """
    form = _quadratic_form(gram, weights, caller="update_norm")
    if form.energy < -rtol * form.magnitude:
        remedy = "Pass K = ΨΨᵀ, or raise rtol if K was measured with that much noise."
        fail("update_norm", "wᵀKw must not be negative", f"{form.energy:g}", remedy)
    return math.sqrt(max(form.energy, 0.0))


def update_cancellation(gram: BatchGram, weights: BatchWeights) -> float:
    """How much of the absolute terms of `wᵀKw` is left after they cancel: `wᵀKw / Σ |w_i w_j K_ij|`.

    Reads: `1` nothing cancels; near `0` the update is a small rest of large terms, and the relative error of its
    squared norm is the relative precision of K divided by this number. `nan` no rollout pulls at all.
    """
    form = _quadratic_form(gram, weights, caller="update_cancellation")
    return form.energy / form.magnitude if form.magnitude > 0 else math.nan


def cosine_matrix(gram: BatchGram, *, rtol: float = 1e-6) -> BatchGram:
    """Cosine between every two scores: `K_ij / sqrt(K_ii K_jj)`.

    Reads: `1` on the diagonal; in `[-1, 1]` elsewhere (held there against rounding); `nan` in the row and column of
    a zero score, which has no direction.

    Raises:
        ScoregramError: If an entry exceeds `sqrt(K_ii K_jj)` by more than a share `rtol`: K is then no Gram.

    Example:
        >>> cosine_matrix(torch.tensor([[4.0, 1.0], [1.0, 1.0]]))[0, 1]
        tensor(0.5000, dtype=torch.float64)
    """
    cosines = cosines_unchecked(require_gram(gram, caller="cosine_matrix"))
    worst = float(cosines.abs().nan_to_num().max())
    if worst > 1 + rtol:
        remedy = "Pass K = ΨΨᵀ, or raise rtol if K was measured with that much noise."
        fail("cosine_matrix", "cosines must lie in [-1, 1]", f"{worst:g}", remedy)
    return cosines.clamp(-1.0, 1.0)


def cosines_unchecked(gram: Tensor) -> Tensor:
    """Cosines of a matrix that is known to be a Gram, rounding and all."""
    norms = gram.diagonal().sqrt()
    no_direction = (norms[:, None] == 0) | (norms[None, :] == 0)
    return (gram / norms[:, None] / norms[None, :]).masked_fill(no_direction, math.nan)


def update_coherence(gram: BatchGram, weights: BatchWeights) -> float:
    """Share of the rollouts' gradient energy that survives being summed into one update.

    `|Σ v_i|² / (N Σ |v_i|²)` with `v_i = w_i ψ_i`, that is `wᵀKw / (N Σ w_i² K_ii)`.
    Reads: `1` all pull the same way; `1/N` orthogonal pulls of equal size; `0` they cancel; `nan` no rollout pulls.

    Example:
        >>> update_coherence(torch.eye(4), torch.ones(4))
        0.25
    """
    k, w = require_gram(gram, caller="update_coherence"), require_weights(weights, gram, caller="update_coherence")
    energy = float((w.square() * k.diagonal()).sum())  # Σ |v_i|²
    return math.nan if energy <= 0 else max(float(w @ k @ w), 0.0) / (w.numel() * energy)


def rollout_shares(gram: BatchGram, weights: BatchWeights, *, rtol: float = 1e-6) -> BatchWeights:
    """Share of each rollout in the squared norm of the update: `w_i (Kw)_i / wᵀKw`. The shares sum to one.

    It is the projection of `w_i ψ_i` on the update, in units of the update. Reads: `1/N` everywhere if all drive
    alike; negative for a rollout that pulls against the update (without it the step would be longer); above one
    where others pull back. `nan` everywhere if the update is zero to within `rtol`.

    Example:
        >>> rollout_shares(torch.tensor([[1.0, -0.5], [-0.5, 1.0]]), torch.tensor([2.0, 1.0]))
        tensor([1., 0.], dtype=torch.float64)
    """
    form = _quadratic_form(gram, weights, caller="rollout_shares")
    return form.share(form.weights * form.scores_on_update, rtol)


def prompt_shares(gram: BatchGram, weights: BatchWeights, prompt_of: PromptOf, *, rtol: float = 1e-6) -> PerPrompt:
    """Share of each prompt in the squared norm of the update: its rollouts' shares added up. They sum to one.

    Reads as `rollout_shares`: negative means that the prompt's own update points against the batch's; `0` for a
    dead group; `nan` everywhere if the whole update is zero.
    """
    form = _quadratic_form(gram, weights, caller="prompt_shares")
    rows = weighted_membership(form.weights, prompt_of, caller="prompt_shares")  # (P, N)
    return form.share(rows @ form.scores_on_update, rtol)


@dataclass(frozen=True)
class _QuadraticForm:
    """`wᵀKw` with what it is made of."""

    scores_on_update: Tensor  # (N,): (Kw)_i, the projection of ψ_i on the update, times its length
    weights: Tensor  # (N,), float64
    energy: float  # wᵀKw
    magnitude: float  # Σ |w_i w_j K_ij|

    def share(self, parts: Tensor, rtol: float) -> Tensor:
        """`parts / wᵀKw`, or `nan` where the form is zero to within `rtol`."""
        is_zero = self.energy <= rtol * self.magnitude
        return torch.full_like(parts, math.nan) if is_zero else parts / self.energy


def _quadratic_form(gram: Tensor, weights: Tensor, *, caller: str) -> _QuadraticForm:
    k, w = require_gram(gram, caller=caller), require_weights(weights, gram, caller=caller)
    kw = k @ w
    return _QuadraticForm(kw, w, energy=float(w @ kw), magnitude=float(w.abs() @ k.abs() @ w.abs()))
