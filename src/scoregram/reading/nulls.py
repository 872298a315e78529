"""Spectra of many groups at once, next to null models that keep only some properties of the scores.

| null | what the scores keep |
|---|---|
| `shape` | nothing: orthogonal and of equal norm, so only `|A|` matters |
| `orthogonal` | their norms; every pair at a right angle |
| `alike` | their norms; every pair at the measured mean cosine |
| `two_kinds` | their norms, and the mean cosines among right, among wrong, and between right and wrong rollouts |
| `shuffled_means` | everything; the advantages are permuted |
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from scoregram.spectra import (
    MEASURED_RTOL,
    effective_rank,
    group_spectra,
    mean_pairwise_cosine,
    numerical_rank,
    shuffled_null,
    top1_fraction,
)

SHUFFLES = 200
"""Permutations drawn for a group that has too many distinct ones to enumerate."""


def spectrum_columns(grams: Sequence[Tensor], rewards: Sequence[Tensor]) -> dict[str, list[float]]:
    """Effective rank, top-1 fraction and nulls of groups of one size, with advantages centred by the group mean.

    `rank`, `top`, `numerical_rank` and `cosine` (mean over pairs) are measured; `shape`, `orthogonal`,
    `orthogonal_top`, `alike` and `two_kinds` are nulls. The orthogonal null is the closed form `σ_i = |A_i| √K_ii`;
    `read_group` computes it from eigenvalues, which are equal up to rounding.

    Args:
        grams: `n` Grams `(R, R)` of groups with a nonzero row.
        rewards: `n` vectors `(R,)` without missing values.
    """
    advantages = [group - group.mean() for group in rewards]
    measured = stacked_spectra(grams, advantages)
    rows = torch.stack(advantages).abs()
    orthogonal = (rows * torch.stack([gram.diagonal() for gram in grams]).sqrt()).sort(descending=True).values
    kinds = [two_kinds_gram(gram, group) for gram, group in zip(grams, rewards, strict=True)]
    cosines = [mean_pairwise_cosine(gram, rtol=MEASURED_RTOL) for gram in grams]
    alike = [equal_cosine_gram(gram, cosine) for gram, cosine in zip(grams, cosines, strict=True)]
    return {
        "rank": effective_rank(measured).tolist(),
        "top": top1_fraction(measured).tolist(),
        "numerical_rank": numerical_rank(measured).tolist(),
        "shape": effective_rank(rows).tolist(),
        "orthogonal": effective_rank(orthogonal).tolist(),
        "orthogonal_top": top1_fraction(orthogonal).tolist(),
        "alike": effective_rank(stacked_spectra(alike, advantages)).tolist(),
        "two_kinds": effective_rank(stacked_spectra(kinds, advantages)).tolist(),
        "cosine": cosines,
    }


def stacked_spectra(grams: Sequence[Tensor], advantages: Sequence[Tensor]) -> Tensor:
    """`(n, R)` singular values of the stacked matrices of `n` groups of one size."""
    return group_spectra(torch.stack([*grams]), torch.stack([*advantages]), psd_rtol=MEASURED_RTOL)


def shuffled_means(gram: Tensor, advantages: Tensor) -> tuple[float, float]:
    """Mean effective rank and top-1 fraction over permutations of the advantages."""
    metrics = shuffled_null(gram, advantages, draws=SHUFFLES, exact_up_to=SHUFFLES, psd_rtol=MEASURED_RTOL).metrics
    return metrics["effective_rank"].mean, metrics["top1_fraction"].mean


def equal_cosine_gram(gram: Tensor, cosine: float) -> Tensor:
    """The Gram of scores with the same norms, every pair at one cosine."""
    norms = gram.diagonal().clamp(min=0).sqrt()
    alike = (0.0 if math.isnan(cosine) else cosine) * torch.outer(norms, norms)
    return alike + torch.diag(gram.diagonal() - alike.diagonal())


def two_kinds_gram(gram: Tensor, rewards: Tensor) -> Tensor:
    """The Gram of a null model that keeps each rollout's norm and whether its reward is above the group mean.

    Every cosine is replaced by the mean over its kind of pair: both rewards above the mean, both not above, or one of
    each. This averages the matrix of cosines over all permutations within the two kinds, so the result is positive
    semidefinite again. Zero scores have no cosine and are left out of the means.
    """
    norms = gram.diagonal().clamp(min=0).sqrt()
    unit = torch.where(norms > 0, 1 / norms, 0.0)
    cosines = unit[:, None] * gram * unit[None, :]
    above, below = (rewards > rewards.mean()) & (norms > 0), (rewards <= rewards.mean()) & (norms > 0)
    other = ~torch.eye(len(gram), dtype=torch.bool)
    averaged = torch.diag(cosines.diagonal())
    for one, two in ((above, above), (below, below), (above, below), (below, above)):
        pairs = one[:, None] & two[None, :] & other
        if bool(pairs.any()):
            averaged[pairs] = cosines[pairs].mean()
    return norms[:, None] * averaged * norms[None, :]
