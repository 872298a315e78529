"""Rank metrics of a spectrum: eight ways to count the directions of a stacked gradient matrix.

Notation: singular values `σ_1 >= … >= σ_m >= 0`, their shares `p_i = σ_i / Σσ`, their energies `e_i = σ_i² / Σσ²`.

Every metric is invariant to the scale and the order of the singular values and is computed in float64. The last axis
is one spectrum; the axes before it are kept. For a zero matrix every metric is `nan`, except the numerical rank, which
is `0`. For any other spectrum, with `r` nonzero singular values,

    1 <= stable rank <= participation ratio <= energy entropy rank <= entropy rank <= r <= m
         stable rank <= nuclear/spectral    <= effective rank      <= entropy rank
                        participation ratio <= effective rank

and all these metrics equal `r` exactly when the nonzero singular values are equal. All but nuclear/spectral are
exponentials of Rényi entropies of `p` or `e`. A Rényi entropy falls as its order rises, and `e` is more concentrated
than `p`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Int
from torch import Tensor

from scoregram.checks import fail, require_finite
from scoregram.types import PerSpectrum, Spectra

RANK_RTOL = 1e-6
"""A singular value above this share of the largest one counts towards the numerical rank.

Square roots of float64 eigenvalues are accurate to about `1e-8` of the largest, those of a Gram accumulated in float32
to about `1e-3`: pass that `rtol` to `numerical_rank` yourself.
"""


def effective_rank(singular_values: Spectra) -> PerSpectrum:
    """Number of equal singular values that would have the same nuclear to Frobenius ratio.

    `(Σσ)² / Σσ²`, the participation ratio of the singular values. Reads: `1` one direction, `m` a flat spectrum. Small
    singular values have a strong influence: only the entropy rank and the rank itself are larger.

    Reference:
        The effective rank of arXiv:2606.29238.

    Example:
        >>> effective_rank(torch.tensor([3.0, 3.0, 0.0]))
        tensor(2., dtype=torch.float64)
    """
    sigma = _relative(singular_values, caller="effective_rank")
    return sigma.sum(-1).square() / sigma.square().sum(-1)


def participation_ratio(singular_values: Spectra) -> PerSpectrum:
    """Number of equal energies that would have the same sum of squares.

    `1 / Σe²`, the participation ratio of the Gram's eigenvalues. Reads: `1` one direction, `m` a flat spectrum.

    Example:
        >>> participation_ratio(torch.tensor([1.0, 1.0, 1.0, 1.0]))
        tensor(4., dtype=torch.float64)
    """
    return 1 / _energies(singular_values, caller="participation_ratio").square().sum(-1)


def entropy_rank(singular_values: Spectra) -> PerSpectrum:
    """Exponential of the Shannon entropy of the singular values.

    `exp(-Σ p ln p)`. Reads: `1` one direction, `m` a flat spectrum. Of the metrics here only the rank is larger.

    Reference:
        Roy and Vetterli 2007, The effective rank: a measure of effective dimensionality.
    """
    sigma = _relative(singular_values, caller="entropy_rank")
    return torch.special.entr(sigma / sigma.sum(-1, keepdim=True)).sum(-1).exp()


def energy_entropy_rank(singular_values: Spectra) -> PerSpectrum:
    """Exponential of the Shannon entropy of the energies.

    `exp(-Σ e ln e)`. Reads: `1` one direction, `m` a flat spectrum.
    """
    return torch.special.entr(_energies(singular_values, caller="energy_entropy_rank")).sum(-1).exp()


def stable_rank(singular_values: Spectra) -> PerSpectrum:
    """Total energy in units of the energy of the strongest direction.

    `Σσ² / σ_1² = 1 / e_1`. Reads: `1` one direction, `m` a flat spectrum. It is the reciprocal of the top-1 fraction.

    Reference:
        Rudelson and Vershynin 2007, Sampling from large matrices.
    """
    return _relative(singular_values, caller="stable_rank").square().sum(-1)


def nuclear_spectral_ratio(singular_values: Spectra) -> PerSpectrum:
    """Sum of the singular values in units of the largest one.

    `Σσ / σ_1`. Reads: `1` one direction, `m` a flat spectrum.
    """
    return _relative(singular_values, caller="nuclear_spectral_ratio").sum(-1)


def numerical_rank(singular_values: Spectra, *, rtol: float = RANK_RTOL) -> Int[Tensor, "*batch"]:
    """Number of singular values above `rtol` times the largest one; `0` for the zero matrix.

    Example:
        >>> numerical_rank(torch.tensor([[2.0, 1.0, 1e-9], [0.0, 0.0, 0.0]]))
        tensor([2, 0])
    """
    return (_relative(singular_values, caller="numerical_rank") > rtol).sum(-1)


def top_fractions(singular_values: Spectra) -> Spectra:
    """Share of the energy in the `k` strongest directions, for `k = 1 … m`.

    `e_1 + … + e_k`. Entry `k - 1` belongs to `k`. Rises to `1`; `nan` throughout for the zero matrix.

    Example:
        >>> top_fractions(torch.tensor([1.0, 1.0]))
        tensor([0.5000, 1.0000], dtype=torch.float64)
    """
    energies = _energies(singular_values, caller="top_fractions").sort(-1, descending=True).values
    return energies.cumsum(-1).clamp(max=1)


def top1_fraction(singular_values: Spectra) -> PerSpectrum:
    """Share of the energy in the strongest direction.

    `e_1 = σ_1² / Σσ²`. Reads: `1` one direction, `1/m` a flat spectrum.
    """
    return _energies(singular_values, caller="top1_fraction").amax(-1)


@dataclass(frozen=True)
class SpectrumMetric:
    """One way to count directions, and what it claims."""

    fn: Callable[..., Tensor]
    formula: str
    reference: str
    schur_concave: bool
    """Whether moving energy from a stronger to a weaker direction can never lower it."""


SPECTRUM_METRICS = MappingProxyType(
    {
        "effective_rank": SpectrumMetric(effective_rank, "(Σσ)² / Σσ²", "arXiv:2606.29238", schur_concave=True),
        "participation_ratio": SpectrumMetric(participation_ratio, "1 / Σe²", "", schur_concave=True),
        "entropy_rank": SpectrumMetric(entropy_rank, "exp H(p)", "Roy and Vetterli 2007", schur_concave=False),
        "energy_entropy_rank": SpectrumMetric(energy_entropy_rank, "exp H(e)", "", schur_concave=True),
        "stable_rank": SpectrumMetric(stable_rank, "1 / e_1", "Rudelson and Vershynin 2007", schur_concave=True),
        "nuclear_spectral_ratio": SpectrumMetric(nuclear_spectral_ratio, "Σσ / σ_1", "", schur_concave=True),
        "numerical_rank": SpectrumMetric(numerical_rank, "#{σ_i > rtol σ_1}", "", schur_concave=False),
        "top1_fraction": SpectrumMetric(top1_fraction, "e_1", "", schur_concave=False),
    }
)
"""The metrics that give one number per spectrum."""


def _relative(singular_values: Tensor, *, caller: str) -> Tensor:
    """Singular values in units of the largest, so that squares do not overflow; `nan` for the zero matrix."""
    sigma = require_finite(singular_values.detach().double(), name="singular values", caller=caller)
    if sigma.ndim == 0 or sigma.shape[-1] == 0:
        fail(caller, "needs at least one singular value", tuple(sigma.shape), "Pass the spectrum as the last axis.")
    if sigma.numel() and float(sigma.min()) < 0:
        fail(caller, "singular values must not be negative", float(sigma.min()), "Pass σ, not eigenvalues or A.")
    return sigma / sigma.amax(-1, keepdim=True)


def _energies(singular_values: Tensor, *, caller: str) -> Tensor:
    """Shares `σ_i² / Σσ²`, which sum to one."""
    squares = _relative(singular_values, caller=caller).square()
    return squares / squares.sum(-1, keepdim=True)
