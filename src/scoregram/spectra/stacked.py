"""Singular values of one group's stacked gradient matrix, from its Gram.

Row `i` of the matrix is `v_i = A_i ψ_i`, the contribution of rollout `i` to the update. The matrix has as many columns
as the model has parameters and is never built: its singular values are the square roots of the eigenvalues of
`diag(A) K diag(A)`.

Three forms are useful, and they differ:

| form | rows | largest rank | signs of A |
|---|---|---|---|
| default | `A_i ψ_i` | number of `A_i ≠ 0` | do not matter |
| `centred=True` | `A_i ψ_i` minus their mean row (the update itself) | `R - 1` | matter |
| `centred_gram(K)` in place of `K` | `A_i (ψ_i - ψ̄)` | `R - 1` | do not matter |

Advantages that sum to zero do not lower the rank of the first form: its rows sum to the update, which is not zero.
The second form shows how the rollouts differ from the step that they make together. The third is the part of each row
that a zero-sum group uses: `Σ A_i ψ_i = Σ A_i (ψ_i - ψ̄)` if `Σ A_i = 0`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from scoregram.checks import fail, require_finite, require_gram, require_grams, require_same_shape
from scoregram.spectra.metrics import SPECTRUM_METRICS, top_fractions
from scoregram.types import Advantages, GramMatrix, GroupAdvantages, GroupGrams, Spectrum

PSD_RTOL = 1e-6
"""A negative eigenvalue counts as rounding if its size is at most this share of the energy `Σ A_i² K_ii`."""
MEASURED_RTOL = 1e-3
"""The same tolerance for a Gram measured on a model, in any precision.

In 4000 groups of SmolLM2 in bfloat16, equal texts that went through the model twice had cosines up to `1 + 2e-4`, and
their groups had eigenvalues down to `-5e-6` of the energy. A wrong K has errors as large as K itself.
"""


@dataclass(frozen=True)
class SpectrumSummary:
    """All metrics of one spectrum; each is documented under its name in `scoregram.spectra.metrics`.

    If all rows are zero, every metric is `nan` except the numerical rank, which is `0`.
    """

    rollouts: int
    centred: bool
    energy: float
    """Sum of the squared singular values: the squared Frobenius norm of the matrix."""
    singular_values: tuple[float, ...]
    """Largest first; `R` of them, zeros included."""
    top_fractions: tuple[float, ...]
    effective_rank: float
    participation_ratio: float
    entropy_rank: float
    energy_entropy_rank: float
    stable_rank: float
    nuclear_spectral_ratio: float
    numerical_rank: int
    top1_fraction: float


def spectrum_summary(
    gram: GramMatrix, advantages: GroupAdvantages | None = None, *, centred: bool = False, psd_rtol: float = PSD_RTOL
) -> SpectrumSummary:
    """All rank metrics of the stacked gradient matrix, from one eigendecomposition.

    Metrics are `nan` and the numerical rank is `0` if no rollout pulls: all advantages are zero, all scores are zero,
    or, when centred, all rows are equal.

    Args:
        gram: `(R, R)`. Score Gram `K`.
        advantages: `(R,)`. One weight per rollout; ones if left out.
        centred: Subtract the mean row first.
        psd_rtol: As in `singular_values`.

    Raises:
        ScoregramError: As `singular_values`.

    Example:
        >>> spectrum_summary(torch.eye(4), torch.tensor([0.5, 0.5, -0.5, -0.5])).effective_rank
        4.0
    """
    return summary_of(singular_values(gram, advantages, centred=centred, psd_rtol=psd_rtol), centred=centred)


def summary_of(spectrum: Spectrum, *, centred: bool = False) -> SpectrumSummary:
    """All rank metrics of singular values that are already known."""
    spectrum = spectrum.double().sort(descending=True).values
    metrics: dict[str, Any] = {name: metric.fn(spectrum).item() for name, metric in SPECTRUM_METRICS.items()}
    return SpectrumSummary(
        rollouts=spectrum.numel(),
        centred=centred,
        energy=float(spectrum.square().sum()),
        singular_values=tuple(spectrum.tolist()),
        top_fractions=tuple(top_fractions(spectrum).tolist()),
        **metrics,
    )


def singular_values(
    gram: GramMatrix, advantages: GroupAdvantages | None = None, *, centred: bool = False, psd_rtol: float = PSD_RTOL
) -> Spectrum:
    """Singular values of the stacked gradient matrix with rows `A_i ψ_i`, largest first.

    Square roots of the eigenvalues of `diag(A) K diag(A)`; of `C diag(A) K diag(A) C` with `C = I - 11ᵀ/R` when
    centred. An eigenvalue below `(R ε + ε_K) Σ A_i² K_ii` is rounding and counts as zero, with `ε` the machine epsilon
    of float64 and `ε_K` that of the Gram's own dtype. So a singular value under about `1e-8 √R` of the largest
    (`3e-4` for a Gram in float32) is reported as `0`, and so are those of a group of identical rollouts after centring.

    Args:
        gram: `(R, R)`. Score Gram `K`.
        advantages: `(R,)`. One weight per rollout; ones if left out, which gives the spectrum of the scores alone.
        centred: Subtract the mean row first.
        psd_rtol: An eigenvalue below `-psd_rtol · Σ A_i² K_ii` is an error, one above it is rounding.

    Returns:
        `(R,)`, float64.

    Raises:
        ScoregramError: If `K` is not square, symmetric, finite and positive semi-definite, or the advantages are not
            `R` finite numbers.

    Example:
        >>> singular_values(torch.eye(3), torch.tensor([1.0, -2.0, 0.0]))
        tensor([2., 1., 0.], dtype=torch.float64)
    """
    k, a = require_group(gram, advantages, caller="singular_values")
    rounding = torch.finfo(gram.dtype).eps
    return row_spectra(k, a[None], centred=centred, psd_rtol=psd_rtol, gram_eps=rounding)[0]


def group_spectra(
    grams: GroupGrams, factors: Advantages, *, psd_rtol: float = PSD_RTOL
) -> Float[Tensor, "prompts rollouts"]:
    """`singular_values` of many groups of one size, in one batched eigendecomposition.

    Args:
        grams: `(P, R, R)`. Score Grams.
        factors: `(P, R)`. The factor of each row, such as the advantage.
        psd_rtol: As in `singular_values`.

    Returns:
        `(P, R)`, float64.

    Raises:
        ScoregramError: As `singular_values`, if any group is not valid.
    """
    caller = "group_spectra"
    k = require_grams(grams, caller=caller)
    require_same_shape(factors, k[:, 0], name="factors", like_name="one row of each Gram", caller=caller)
    a = require_finite(factors.detach().double().to(k.device), name="factors", caller=caller)
    return row_spectra(k, a, centred=False, psd_rtol=psd_rtol, gram_eps=torch.finfo(grams.dtype).eps)


def centred_gram(gram: GramMatrix) -> GramMatrix:
    """Gram of the scores minus their mean, `⟨ψ_i - ψ̄, ψ_j - ψ̄⟩`.

    `C K C` with `C = I - 11ᵀ/R`; rows sum to zero and the rank is at most `R - 1`. Exactly zero if all scores are equal
    up to rounding, as in a group of one.

    Returns:
        `(R, R)`, float64.

    Raises:
        ScoregramError: If `K` is not a Gram: square, finite, symmetric, no negative diagonal.
    """
    k = require_gram(gram, caller="centred_gram")
    centred = _double_centred(k)
    if float(centred.diagonal().sum()) <= _rounding(k.shape[0], torch.finfo(gram.dtype).eps) * float(k.trace()):
        return torch.zeros_like(k)
    # Rounding may turn the zero squared norm of a score that equals the mean into -1e-17.
    return centred + torch.diag(centred.diagonal().clamp(min=0) - centred.diagonal())


def require_group(gram: Tensor, advantages: Tensor | None, *, caller: str) -> tuple[Tensor, Tensor]:
    """`K` and `A` of one group in float64; an error unless their shapes match."""
    k = require_gram(gram, caller=caller)
    if advantages is None:
        return k, torch.ones_like(k[0])
    require_same_shape(advantages, k[0], name="advantages", like_name="one row of the Gram", caller=caller)
    return k, require_finite(advantages.detach().double().to(k.device), name="advantages", caller=caller)


def row_spectra(
    gram: GramMatrix | GroupGrams,
    weights: Float[Tensor, "assignments rollouts"],
    *,
    centred: bool,
    psd_rtol: float = PSD_RTOL,
    gram_eps: float = 0.0,
    caller: str = "singular_values",
) -> Float[Tensor, "assignments rollouts"]:
    """Singular values for each row of `weights` over the same Gram, in one batched eigendecomposition.

    With as many Grams as rows, each row has its own. `gram` and `weights` must have passed `require_group`.
    """
    gram_unit, weight_unit = gram.abs().amax((-2, -1)), weights.abs().amax(-1)  # (1,) or (assignments,)
    gram_unit, weight_unit = (torch.where(unit > 0, unit, 1.0)[..., None] for unit in (gram_unit, weight_unit))
    scaled = weights / weight_unit  # advantages of 1e-200 would vanish when squared
    rows = (gram / gram_unit[..., None]) * scaled[:, :, None] * scaled[:, None, :]  # (assignments, R, R)
    # Σ A_i² K_ii before centring: the rounding of the eigenvalues is relative to it.
    energy = rows.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    eigenvalues = torch.linalg.eigvalsh(_double_centred(rows) if centred else rows).flip(-1)
    rounding = _rounding(gram.shape[-1], gram_eps)
    _require_semidefinite(eigenvalues, energy, rtol=max(psd_rtol, rounding), caller=caller)
    kept = torch.where(eigenvalues > rounding * energy, eigenvalues, 0.0)
    return kept.sqrt() * gram_unit.sqrt() * weight_unit


def _double_centred(gram: Tensor) -> Tensor:
    """`C K C`: rows and columns sum to zero."""
    for _ in range(2):  # after one pass the rounding error, relative to the mean, may exceed the result
        gram = gram - gram.mean(-1, keepdim=True)
        gram = gram - gram.mean(-2, keepdim=True)
    return (gram + gram.mT) / 2


def _rounding(size: int, gram_eps: float) -> float:
    """Share of the energy below which an eigenvalue of a `size × size` Gram is rounding."""
    return size * torch.finfo(torch.float64).eps + gram_eps


def _require_semidefinite(eigenvalues: Tensor, energy: Tensor, *, rtol: float, caller: str) -> None:
    lowest = eigenvalues.amin(-1, keepdim=True)
    negative = lowest < -rtol * energy
    if bool(negative.any()):
        fail(
            caller,
            f"a Gram must be positive semi-definite to {rtol:g} of its trace",
            f"an eigenvalue of {float((lowest / energy)[negative].min()):g} times the trace",
            "Pass K = ΨΨᵀ, or raise psd_rtol if K was measured with that much noise.",
        )
