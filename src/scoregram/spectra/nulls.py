"""What the spectrum would be if the scores, or their tie to the rewards, had no structure: three null models.

| null | keeps | forgets |
|---|---|---|
| orthogonal | advantages, norms | every angle between scores |
| common cosine | advantages, norms, the mean cosine | which scores lie closer than others |
| shuffled | the Gram, the advantages as a set | which rollout got which advantage |
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from scoregram.checks import fail, require_gram, require_in_range
from scoregram.spectra.metrics import SPECTRUM_METRICS
from scoregram.spectra.stacked import PSD_RTOL, SpectrumSummary, require_group, row_spectra, spectrum_summary
from scoregram.types import GramMatrix, GroupAdvantages

EXACT_UP_TO = math.factorial(7)
"""Distinct assignments of advantages to rollouts that are still listed one by one."""

BATCH_ENTRIES = 2**22
"""Gram entries decomposed at a time: 32 MiB."""


@dataclass(frozen=True)
class NullDistribution:
    """One metric under a null model; all but `undefined` are `nan` if no assignment has a value."""

    mean: float
    spread: float
    """Standard deviation over assignments: of all of them if exact (`ddof=0`), of the draws otherwise (`ddof=1`)."""
    standard_error: float
    """Of the mean: `spread / √draws`, and `0` if exact."""
    low: float
    high: float
    undefined: float
    """Share of assignments where the metric is `nan`; they are left out of the other fields."""


@dataclass(frozen=True)
class ShuffledNull:
    """Every metric over reassignments of the same advantages to the same scores."""

    exact: bool
    assignments: int
    """Distinct assignments listed if exact, permutations drawn otherwise."""
    metrics: Mapping[str, NullDistribution]


def orthogonal_null(
    gram: GramMatrix, advantages: GroupAdvantages | None = None, *, centred: bool = False
) -> SpectrumSummary:
    """Spectrum that orthogonal scores of the measured norms would give.

    `σ_i = |A_i| √K_ii`, as long as the rows are not centred. What is below it is owed to the angles between scores.

    Raises:
        ScoregramError: As `singular_values`.
    """
    k, a = require_group(gram, advantages, caller="orthogonal_null")
    return spectrum_summary(torch.diag(k.diagonal()), a, centred=centred)


def common_cosine_null(
    gram: GramMatrix,
    advantages: GroupAdvantages | None = None,
    *,
    cosine: float | int | None = None,
    centred: bool = False,
) -> SpectrumSummary:
    """Spectrum that scores of the measured norms would give if every pair met at the same angle.

    `K_ij = c √(K_ii K_jj)` off the diagonal. What differs from it is owed to *which* scores are alike.

    Args:
        gram: `(R, R)`. Score Gram `K`.
        advantages: `(R,)`. One weight per rollout; ones if left out.
        cosine: The shared `c`; the mean pairwise cosine of `K` if left out.
        centred: Subtract the mean row first.

    Raises:
        ScoregramError: If `c` is outside `[-1/(n-1), 1]` for the `n` nonzero scores: no `n` vectors are all further
            apart than that. Otherwise as `singular_values`.
    """
    k, a = require_group(gram, advantages, caller="common_cosine_null")
    norms = k.diagonal().sqrt()
    if cosine is None:
        cosine = mean_pairwise_cosine(k)
        cosine = 0.0 if math.isnan(cosine) else cosine  # no pair of nonzero scores: `c` multiplies zeros only
    low = _least_common_cosine(int((norms > 0).sum()))
    c = require_in_range(
        float(cosine), low=low, high=1.0, name="the common cosine of the nonzero scores", caller="common_cosine_null"
    )
    alike = c * torch.outer(norms, norms)
    return spectrum_summary(alike + torch.diag(k.diagonal() - alike.diagonal()), a, centred=centred)


def mean_pairwise_cosine(gram: GramMatrix, *, rtol: float = PSD_RTOL) -> float:
    """Mean cosine between two different scores of the group.

    `Σ_{i≠j} K_ij / √(K_ii K_jj)` over the number of ordered pairs, zero scores left out. Reads: `1` all parallel, `0`
    orthogonal on average; never below `-1/(n-1)` for `n` nonzero scores, and brought back there from rounding; `nan`
    for fewer than two.

    Raises:
        ScoregramError: If an entry exceeds `√(K_ii K_jj)` by more than a share `rtol`: K is then no Gram.

    Example:
        >>> mean_pairwise_cosine(torch.tensor([[4.0, 1.0], [1.0, 1.0]]))
        0.5
    """
    k = require_gram(gram, caller="mean_pairwise_cosine")
    nonzero = k.diagonal() > 0
    count = int(nonzero.sum())
    if count < 2:
        return math.nan
    unit = torch.where(nonzero, k.diagonal().rsqrt(), 0.0)
    cosines = unit[:, None] * k * unit[None, :]
    worst = float(cosines.abs().max())
    if worst > 1 + rtol:
        remedy = "Pass K = ΨΨᵀ, or raise rtol if K was measured with that much noise."
        fail("mean_pairwise_cosine", "cosines must lie in [-1, 1]", f"{worst:g}", remedy)
    mean = float(cosines.sum() - cosines.diagonal().sum()) / (count * (count - 1))
    return min(max(mean, _least_common_cosine(count)), 1.0)


def shuffled_null(
    gram: GramMatrix,
    advantages: GroupAdvantages,
    *,
    centred: bool = False,
    draws: int = 1000,
    seed: int = 0,
    exact_up_to: int = EXACT_UP_TO,
    psd_rtol: float = PSD_RTOL,
) -> ShuffledNull:
    """Every metric when the same advantages are handed to the same scores at random.

    All permutations are equally likely, hence all *distinct* assignments too, each standing for the same number of
    permutations; `C(R, k)` of them in a group of right and wrong rollouts. Only `|A|` matters unless the rows are
    centred, so an even right-or-wrong group has a single one: shuffling cannot change it. Where no rollout pulls, the
    metrics are `nan`.

    Args:
        gram: `(R, R)`. Score Gram `K`.
        advantages: `(R,)`. One weight per rollout.
        centred: Subtract the mean row first.
        draws: Permutations to draw if there are too many distinct assignments to list.
        seed: Of the draws; the global random state is left alone.
        exact_up_to: Largest number of distinct assignments to list. The default covers every group of seven.
        psd_rtol: As in `singular_values`.

    Raises:
        ScoregramError: If `draws < 2` where draws are needed; otherwise as `singular_values`.
    """
    k, a = require_group(gram, advantages, caller="shuffled_null")
    weights = a if centred else a.abs()
    exact = _distinct_assignments(weights.tolist()) <= exact_up_to
    if exact:
        assigned = torch.tensor(list(_assignments(weights.tolist())), dtype=torch.float64, device=k.device)
    else:
        assigned = weights[_permutations(len(weights), draws=draws, seed=seed).to(k.device)]
    chunks = assigned.split(max(1, BATCH_ENTRIES // k.numel()))
    settings = {"centred": centred, "psd_rtol": psd_rtol, "gram_eps": torch.finfo(gram.dtype).eps}
    spectra = torch.cat([row_spectra(k, weights, **settings, caller="shuffled_null") for weights in chunks])
    metrics = {name: _distribution(metric.fn(spectra), exact=exact) for name, metric in SPECTRUM_METRICS.items()}
    return ShuffledNull(exact=exact, assignments=len(assigned), metrics=MappingProxyType(metrics))


def _distribution(values: Tensor, *, exact: bool) -> NullDistribution:
    defined = values[~values.isnan()].double()
    count, ddof = defined.numel(), 0 if exact else 1
    undefined = 1 - count / values.numel()
    if count <= ddof:
        mean = float(defined.mean()) if count else math.nan
        return NullDistribution(mean, math.nan, math.nan, mean, mean, undefined)
    spread = float(defined.std(correction=ddof))
    error = 0.0 if exact else spread / math.sqrt(count)
    return NullDistribution(float(defined.mean()), spread, error, float(defined.min()), float(defined.max()), undefined)


def _distinct_assignments(values: Sequence[float]) -> int:
    """Number of different orders of `values`: `R! / Π multiplicity!`."""
    return math.factorial(len(values)) // math.prod(math.factorial(n) for n in Counter(values).values())


def _assignments(values: Sequence[float]) -> Iterator[list[float]]:
    """Every different order of `values`, once: place one value after the other on the places still free."""

    def placed(groups: list[tuple[float, int]], free: tuple[int, ...]) -> Iterator[dict[int, float]]:
        if not groups:
            yield {}
            return
        (value, count), rest = groups[0], groups[1:]
        for chosen in itertools.combinations(free, count):
            for others in placed(rest, tuple(i for i in free if i not in chosen)):
                yield dict.fromkeys(chosen, value) | others

    for by_place in placed(list(Counter(values).items()), tuple(range(len(values)))):
        yield [by_place[i] for i in range(len(values))]


def _permutations(size: int, *, draws: int, seed: int) -> Tensor:
    """`(draws, size)`. Uniform permutations from a generator of their own."""
    if draws < 2:
        fail("shuffled_null", "needs at least 2 draws to know its own error", draws, "Raise draws or exact_up_to.")
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(draws, size, generator=generator, dtype=torch.float64).argsort(dim=-1)


def _least_common_cosine(count: int) -> float:
    return -1 / (count - 1) if count > 1 else -1.0
