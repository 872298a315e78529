"""One update `Σ w_i ψ_i`: its norm and coherence, the shares of rollouts and prompts, its effect on held-out prompts.

Every number here is a quadratic form in the Gram. Its absolute error is the precision of K times `Σ |w_i w_j K_ij|`,
so a form that is much smaller than this sum has few correct digits; take `|Σ w_i ψ_i|` from the accumulated gradient
instead. `rtol` is the share of `Σ |w_i w_j K_ij|` below which a form counts
as zero; its default is what a Gram in float32 can resolve.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from scoregram.checks import fail, require_finite, require_gram, require_tensor
from scoregram.types import (
    BatchGram,
    BatchWeights,
    CrossGram,
    HeldPromptOf,
    HeldWeights,
    PerPrompt,
    PromptGram,
    PromptOf,
)


def update_norm(gram: BatchGram, weights: BatchWeights, *, rtol: float = 1e-6) -> float:
    """Length of the update: `|Σ w_i ψ_i| = sqrt(wᵀKw)`.

    Reads: `0` the rollouts cancel or all weights are zero; there is no upper bound. A negative form within
    `rtol · Σ |w_i w_j K_ij|` is rounding of K and gives `0`.

    Raises:
        ScoregramError: If `wᵀKw` is further below zero than rounding explains: then K is not a Gram.

    Example:
        >>> update_norm(torch.eye(2), torch.tensor([3.0, -4.0]))
        5.0
    """
    form = _quadratic_form(gram, weights, caller="update_norm")
    if form.energy < -rtol * form.magnitude:
        remedy = "Pass K = ΨΨᵀ, or raise rtol if K was measured with that much noise."
        fail("update_norm", "wᵀKw must not be negative", f"{form.energy:g}", remedy)
    return math.sqrt(max(form.energy, 0.0))


def update_coherence(gram: BatchGram, weights: BatchWeights) -> float:
    """Share of the rollouts' gradient energy that survives being summed into one update.

    `|Σ v_i|² / (N Σ |v_i|²)` with `v_i = w_i ψ_i`, that is `wᵀKw / (N Σ w_i² K_ii)`.
    Reads: `1` all pull the same way; `1/N` orthogonal pulls of equal size; `0` they cancel; `nan` no rollout pulls.

    Example:
        >>> update_coherence(torch.eye(4), torch.ones(4))
        0.25
    """
    k, w = require_gram(gram, caller="update_coherence"), _require_weights(weights, gram, caller="update_coherence")
    energy = float((w.square() * k.diagonal()).sum())  # Σ |v_i|²
    return math.nan if energy <= 0 else max(float(w @ k @ w), 0.0) / (w.numel() * energy)


def rollout_shares(gram: BatchGram, weights: BatchWeights, *, rtol: float = 1e-6) -> BatchWeights:
    """Share of each rollout in the squared norm of the update: `w_i (Kw)_i / wᵀKw`. The shares sum to one.

    The share is the projection of `w_i ψ_i` on the update, in units of the update. Reads: `1/N` everywhere if all
    rollouts contribute equally; negative for a rollout that pulls against the update (without it the step would be
    longer); above one if others pull against the update; `nan` everywhere if the update is zero to within `rtol`.

    Example:
        >>> rollout_shares(torch.tensor([[1.0, -0.5], [-0.5, 1.0]]), torch.tensor([2.0, 1.0]))
        tensor([1., 0.], dtype=torch.float64)
    """
    form = _quadratic_form(gram, weights, caller="rollout_shares")
    return form.share(form.weights * form.scores_on_update, rtol)


def prompt_shares(gram: BatchGram, weights: BatchWeights, prompt_of: PromptOf, *, rtol: float = 1e-6) -> PerPrompt:
    """Share of each prompt in the squared norm of the update: the sum of its rollouts' shares. They sum to one.

    Reads as `rollout_shares`: negative if the prompt's own update points against the batch's; `0` for a dead group;
    `nan` everywhere if the whole update is zero.
    """
    form = _quadratic_form(gram, weights, caller="prompt_shares")
    rows = _weighted_membership(form.weights, prompt_of, caller="prompt_shares")  # (P, N)
    return form.share(rows @ form.scores_on_update, rtol)


def cosine_matrix(gram: BatchGram, *, rtol: float = 1e-6) -> BatchGram:
    """Cosine between every two scores: `K_ij / sqrt(K_ii K_jj)`.

    Reads: `1` on the diagonal; in `[-1, 1]` elsewhere (clamped against rounding); `nan` in the row and column of a
    zero score, which has no direction.

    Raises:
        ScoregramError: If an entry exceeds `sqrt(K_ii K_jj)` by more than a share `rtol`: then K is not a Gram.

    Example:
        >>> cosine_matrix(torch.tensor([[4.0, 1.0], [1.0, 1.0]]))[0, 1]
        tensor(0.5000, dtype=torch.float64)
    """
    cosines = _cosines(require_gram(gram, caller="cosine_matrix"))
    worst = float(cosines.abs().nan_to_num().max())
    if worst > 1 + rtol:
        remedy = "Pass K = ΨΨᵀ, or raise rtol if K was measured with that much noise."
        fail("cosine_matrix", "cosines must lie in [-1, 1]", f"{worst:g}", remedy)
    return cosines.clamp(-1.0, 1.0)


def prompt_update_gram(gram: BatchGram, weights: BatchWeights, prompt_of: PromptOf) -> PromptGram:
    """Inner products between the updates that each prompt alone would make.

    `U_pq = ⟨u_p, u_q⟩ = Σ_{i∈p, j∈q} w_i w_j K_ij` with `u_p = Σ_{i∈p} w_i ψ_i`. Groups may differ in size.
    The sum of all entries is `|Σ w_i ψ_i|²`. The result is a Gram, so every function of a Gram applies to prompts too.

    Args:
        gram: `(N, N)`.
        weights: `(N,)`. The weight of each score in the update.
        prompt_of: `(N,)`. The prompt of each rollout, `0 … P-1`. A prompt without rollouts has a zero update.

    Returns:
        `(P, P)`, float64.

    Raises:
        ScoregramError: If a prompt number is negative or not below `N`.
    """
    k, w = require_gram(gram, caller="prompt_update_gram"), _require_weights(weights, gram, caller="prompt_update_gram")
    rows = _weighted_membership(w, prompt_of, caller="prompt_update_gram")  # (P, N)
    u = rows @ k @ rows.mT
    return (u + u.mT) / 2


@dataclass(frozen=True)
class UpdatePower:
    """Signal and noise of an update `ĝ`, in units of its squared norm."""

    signal: float
    """`|E ĝ|²`; an estimate can be negative."""
    noise: float
    """`E|ĝ − E ĝ|²`: the trace of the covariance."""


def update_power(gram: BatchGram, weights: BatchWeights, prompt_of: PromptOf) -> UpdatePower:
    """Unbiased estimates of signal and noise of the update `ĝ = Σ_p u_p` of `P` independent prompts, for any method.

    With `m` the mean of `⟨u_p, u_q⟩` over pairs of different prompts and `d` the mean of `|u_p|²`: `signal = P² m`,
    `noise = P (d − m)`. They sum to `|ĝ|²`. The updates of the prompts must be independent and alike in distribution;
    an estimator that shares statistics between prompts, such as the standard deviation of the batch, violates this
    slightly. `nan` for one prompt.

    Args:
        gram: `(N, N)`.
        weights: `(N,)`. The weight of each row in the update.
        prompt_of: `(N,)`. The prompt of each rollout, `0 … P-1`.

    Example:
        >>> import torch
        >>> update_power(torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.ones(2), torch.tensor([0, 1]))
        UpdatePower(signal=4.0, noise=2.0)
    """
    inner = prompt_update_gram(gram, weights, prompt_of)
    prompts = int(prompt_of.max()) + 1 if len(prompt_of) else 0
    if prompts < 2:
        return UpdatePower(math.nan, math.nan)
    own = float(inner.diagonal().sum())
    between = (float(inner.sum()) - own) / (prompts * (prompts - 1))
    return UpdatePower(prompts**2 * between, own - prompts * between)


@dataclass(frozen=True)
class PromptConflict:
    """Agreement between the updates `u_p` of single prompts."""

    cosines: PromptGram
    """`(P, P)`: cosine between `u_p` and `u_q`; `nan` for a prompt that does not pull."""
    conflicting: float
    """Share of the pairs of pulling prompts with a negative cosine; `nan` with fewer than two pulling prompts."""
    cancelled: float
    """Share of the energy that opposed prompts cancel; `nan` if no prompt pulls."""


def prompt_conflict(
    gram: BatchGram, weights: BatchWeights, prompt_of: PromptOf, *, rtol: float = 1e-6
) -> PromptConflict:
    """Conflict between the prompts of one update: cosines, share of opposed pairs, energy they cancel.

    With `U_pq = ⟨u_p, u_q⟩`, the squared update norm is `Σ U = E₊ - E₋`, where
    `E₊ = Σ_p U_pp + Σ_{p≠q} max(U_pq, 0)` and `E₋ = Σ_{p≠q} max(-U_pq, 0)`; `cancelled = E₋ / E₊`.
    Reads: `0` no two prompts disagree; `1` the prompts cancel each other and the update is zero. Under independent
    noise about half of the pairs conflict, so compare `conflicting` with `1/2`, not with zero.

    A prompt pulls if its own squared norm exceeds `rtol` times `Σ_{i,j∈p} |w_i w_j K_ij|`. Two prompts conflict if
    their cosine is below `-rtol`: rounding does not count as a direction.

    Example:
        >>> weights, prompt_of = torch.tensor([1.0, 1.0]), torch.tensor([0, 1])
        >>> prompt_conflict(torch.tensor([[1.0, -0.5], [-0.5, 1.0]]), weights, prompt_of).cancelled
        0.5
    """
    u = prompt_update_gram(gram, weights, prompt_of)
    magnitude = prompt_update_gram(gram.abs(), weights.abs(), prompt_of).diagonal()  # (P,): Σ_{i,j∈p} |w_i w_j K_ij|
    pulls = u.diagonal() > rtol * magnitude
    u = u * (pulls[:, None] & pulls[None, :])
    cosines = _cosines(u).clamp(-1.0, 1.0)  # a nearly cancelled update of rounded K may leave the range
    rows, columns = torch.triu_indices(*u.shape, offset=1)
    pairs = cosines[rows, columns]
    pairs = pairs[~pairs.isnan()]
    opposed = 2 * float(u[rows, columns].clamp(max=0.0).neg().sum())
    aligned = float(u.diagonal().sum()) + 2 * float(u[rows, columns].clamp(min=0.0).sum())
    return PromptConflict(
        cosines=cosines,
        conflicting=float((pairs < -rtol).double().mean()) if pairs.numel() else math.nan,
        cancelled=min(opposed / aligned, 1.0) if aligned > 0 else math.nan,
    )


@dataclass(frozen=True)
class HeldOutEffect:
    """First-order change of the held-out objective under one step."""

    total: float
    """Change of the whole held-out objective."""
    per_prompt: PerPrompt
    """`(P,)`: change of each held-out prompt's part; the parts sum to `total`."""
    helped: float
    """Share of held-out prompts whose part rises (a change of zero does not count)."""


def held_out_effect(
    cross_gram: CrossGram,
    weights: BatchWeights,
    held_weights: HeldWeights,
    held_prompt_of: HeldPromptOf,
    *,
    learning_rate: float | int = 1.0,
) -> HeldOutEffect:
    """First-order change of the expected held-out reward under the step `Δθ = η Σ w_i ψ_i`.

    `⟨∇J_held, Δθ⟩ = η vᵀ K_held,train w`, where `Σ_j v_j ψ_j` estimates `∇J_held`. With leave-one-out advantages over
    `P·R` as `v`, it is an unbiased estimate of that inner product, because the held-out rollouts are independent of
    the step. Reads: positive the step helps, negative it harms, `0` it is orthogonal. It describes a plain gradient
    step, without Adam, clipping or second-order terms.

    The terms of the sum cancel: its absolute error is `η` times the precision of K times `Σ |v_j w_i K_ji|`. If
    `total` is not far above that, take the inner product of the two accumulated gradients instead.

    Args:
        cross_gram: `(H, N)`. Inner products of held-out scores with trained scores.
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
        got = tuple(cross_gram.shape)
        fail(caller, "needs a block of shape (H, N) with a held-out rollout", got, "Measure held-out rollouts too.")
    if not math.isfinite(learning_rate):
        fail(caller, "learning_rate must be finite", learning_rate, "Pass the step size.")
    k = require_finite(cross_gram.detach().double(), name="the Gram", caller=caller)
    w, v = _require_weights(weights, k, caller=caller), _require_weights(held_weights, k.mT, caller=caller)
    rows = _weighted_membership(v, held_prompt_of, caller=caller)  # (P, H)
    per_prompt = learning_rate * (rows @ (k @ w))
    return HeldOutEffect(float(per_prompt.sum()), per_prompt, float((per_prompt > 0).to(torch.float64).mean()))


@dataclass(frozen=True)
class _QuadraticForm:
    """`wᵀKw` and its parts."""

    scores_on_update: Tensor  # (N,): (Kw)_i, the projection of ψ_i on the update, times its length
    weights: Tensor  # (N,), float64
    energy: float  # wᵀKw
    magnitude: float  # Σ |w_i w_j K_ij|

    def share(self, parts: Tensor, rtol: float) -> Tensor:
        """`parts / wᵀKw`, or `nan` where the form is zero to within `rtol`."""
        is_zero = self.energy <= rtol * self.magnitude
        return torch.full_like(parts, math.nan) if is_zero else parts / self.energy


def _quadratic_form(gram: Tensor, weights: Tensor, *, caller: str) -> _QuadraticForm:
    k, w = require_gram(gram, caller=caller), _require_weights(weights, gram, caller=caller)
    kw = k @ w
    return _QuadraticForm(kw, w, energy=float(w @ kw), magnitude=float(w.abs() @ k.abs() @ w.abs()))


def _cosines(gram: Tensor) -> Tensor:
    """Cosines of a Gram without checks or clamping; `nan` for a zero score."""
    norms = gram.diagonal().sqrt()
    no_direction = (norms[:, None] == 0) | (norms[None, :] == 0)
    return (gram / norms[:, None] / norms[None, :]).masked_fill(no_direction, math.nan)


def _weighted_membership(weights: Tensor, prompt_of: Tensor, *, caller: str) -> Tensor:
    """`(P, N)`: the weight of rollout `i` in the row of its prompt, zero in the other rows."""
    if prompt_of.shape != weights.shape:
        fail(
            caller,
            f"prompt_of must name one prompt for each of {weights.numel()} rollouts",
            tuple(prompt_of.shape),
            "Pass one integer per rollout.",
        )
    lowest, highest = int(prompt_of.min()), int(prompt_of.max())
    if lowest < 0 or highest >= weights.numel():
        fail(
            caller,
            f"prompt numbers must lie in 0 … {weights.numel() - 1}",
            f"{lowest} … {highest}",
            "Renumber them with torch.unique(ids, return_inverse=True)[1].",
        )
    rows = torch.zeros(highest + 1, weights.numel(), dtype=weights.dtype, device=weights.device)
    return rows.scatter(0, prompt_of.long()[None], weights[None])


def _require_weights(weights: Tensor, gram: Tensor, *, caller: str) -> Tensor:
    """The weights in float64, finite and one for each rollout of the Gram."""
    require_tensor(weights, name="weights", caller=caller)
    if weights.shape != gram.shape[-1:]:
        fail(caller, f"needs one weight for each of {gram.shape[-1]} rollouts", tuple(weights.shape), "Flatten them.")
    return require_finite(weights.detach().double(), name="weights", caller=caller)
