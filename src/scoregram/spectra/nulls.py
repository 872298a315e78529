"""Null models of a spectrum, and `spectrum_with_nulls`, which computes the measured spectrum with all of them.

A null model is the spectrum that the group would have if the scores, or their relation to the rewards, had no
structure:

| null | keeps | forgets |
|---|---|---|
| orthogonal | advantages, norms | every angle between scores |
| common cosine | advantages, norms, the mean cosine | which scores are closer than others |
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

from scoregram.checks import fail, lookup, require_gram, require_in_range
from scoregram.spectra.feasible import Interval, feasible_intervals
from scoregram.spectra.metrics import SPECTRUM_METRICS
from scoregram.spectra.stacked import PSD_RTOL, SpectrumSummary, require_group, row_spectra, spectrum_summary
from scoregram.types import GramMatrix, GroupAdvantages

EXACT_UP_TO = math.factorial(7)
"""Up to this many distinct assignments of advantages to rollouts are enumerated; above it, permutations are drawn."""

BATCH_ENTRIES = 2**22
"""Gram entries per batched eigendecomposition: 32 MiB."""


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

    `σ_i = |A_i| √K_ii`, if the rows are not centred. A measured rank below this null comes from the angles between
    scores.

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
    """Spectrum that scores of the measured norms would give if every pair had the same cosine.

    `K_ij = c √(K_ii K_jj)` off the diagonal. A difference from this null comes from *which* scores are similar.

    Args:
        gram: `(R, R)`. Score Gram `K`.
        advantages: `(R,)`. One weight per rollout; ones if left out.
        cosine: The shared `c`; the mean pairwise cosine of `K` if left out.
        centred: Subtract the mean row first.

    Raises:
        ScoregramError: If `c` is outside `[-1/(n-1), 1]` for the `n` nonzero scores: no `n` vectors have a smaller
            common cosine. Otherwise as `singular_values`.
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
    orthogonal on average; never below `-1/(n-1)` for `n` nonzero scores (clamped against rounding); `nan` for fewer
    than two.

    Raises:
        ScoregramError: If an entry exceeds `√(K_ii K_jj)` by more than a share `rtol`: then K is not a Gram.

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
    """Every metric over random assignments of the same advantages to the same scores.

    All permutations are equally likely, and so are all *distinct* assignments, each of which comes from the same number
    of permutations; a group of right and wrong rollouts has `C(R, k)` of them. Only `|A|` matters unless the rows are
    centred, so an even right-or-wrong group has a single assignment and shuffling does not change it. If no rollout
    pulls, the metrics are `nan`.

    Args:
        gram: `(R, R)`. Score Gram `K`.
        advantages: `(R,)`. One weight per rollout.
        centred: Subtract the mean row first.
        draws: Permutations to draw if there are more than `exact_up_to` distinct assignments.
        seed: Of the draws; the global random state is not touched.
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
    """Every distinct order of `values`, once: place each value in turn on the places that are still free."""

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
    """`(draws, size)`. Uniform permutations from a separate generator."""
    if draws < 2:
        fail("shuffled_null", "needs at least 2 draws for a standard error", draws, "Raise draws or exact_up_to.")
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(draws, size, generator=generator, dtype=torch.float64).argsort(dim=-1)


def _least_common_cosine(count: int) -> float:
    return -1 / (count - 1) if count > 1 else -1.0


@dataclass(frozen=True)
class MetricReading:
    """One metric: its measured value, its feasible interval given the top-1 fraction, its value under each null."""

    measured: float | int
    feasible: Interval
    orthogonal: float | int
    common_cosine: float | int
    shuffled: NullDistribution


@dataclass(frozen=True)
class SpectrumReading:
    """The spectrum of one group with its feasible intervals and its three null models."""

    measured: SpectrumSummary
    max_rank: int
    feasible: Mapping[str, Interval]
    """Given the measured top-1 fraction and `max_rank`."""
    orthogonal: SpectrumSummary
    common_cosine: SpectrumSummary
    cosine: float
    """The common cosine used; `nan` if fewer than two scores are nonzero."""
    shuffled: ShuffledNull

    def metric(self, name: str) -> MetricReading:
        """One metric of `SPECTRUM_METRICS`: measured, feasible and under each null."""
        lookup(SPECTRUM_METRICS, name, kind="SpectrumReading.metric")
        return MetricReading(
            measured=getattr(self.measured, name),
            feasible=self.feasible[name],
            orthogonal=getattr(self.orthogonal, name),
            common_cosine=getattr(self.common_cosine, name),
            shuffled=self.shuffled.metrics[name],
        )


def spectrum_with_nulls(
    gram: GramMatrix,
    advantages: GroupAdvantages,
    *,
    centred: bool = False,
    cosine: float | int | None = None,
    max_rank: int | None = None,
    draws: int = 1000,
    seed: int = 0,
    exact_up_to: int = EXACT_UP_TO,
    psd_rtol: float = PSD_RTOL,
) -> SpectrumReading:
    """Rank metrics of one group's stacked gradient matrix, with feasible intervals and null models.

    A group in which no rollout pulls has `nan` for its metrics and for the ends of every interval.

    Args:
        gram: `(R, R)`. Score Gram `K`.
        advantages: `(R,)`. One weight per rollout.
        centred: Subtract the mean row first, from the measured rows and from those of the nulls.
        cosine: As in `common_cosine_null`.
        max_rank: Largest rank that the rows could have. Default: the number of nonzero rows, and at most `R - 1` when
            centred. Pass less if the scores are known to lie in fewer dimensions.
        draws: As in `shuffled_null`, like `seed` and `exact_up_to`.
        seed: Of the draws.
        exact_up_to: Largest number of distinct assignments to list.
        psd_rtol: As in `singular_values`.

    Raises:
        ScoregramError: As `singular_values`; or if the spectrum has more directions than `max_rank` allows.
    """
    k, a = require_group(gram, advantages, caller="spectrum_with_nulls")
    measured = spectrum_summary(gram, advantages, centred=centred, psd_rtol=psd_rtol)
    rows = int(((a != 0) & (k.diagonal() > 0)).sum())
    most = min(rows, len(a) - 1) if centred else rows
    most = most if max_rank is None else max_rank
    if measured.numerical_rank > most:
        fail(
            "spectrum_with_nulls",
            f"the numerical rank must be at most max_rank = {most}",
            measured.numerical_rank,
            "Leave max_rank out, or check which scores went into K.",
        )
    shared = mean_pairwise_cosine(k, rtol=psd_rtol) if cosine is None else float(cosine)
    known = None if cosine is None and math.isnan(shared) else shared
    return SpectrumReading(
        measured=measured,
        max_rank=most,
        feasible=_intervals(measured, most),
        orthogonal=orthogonal_null(k, a, centred=centred),
        common_cosine=common_cosine_null(k, a, cosine=known, centred=centred),
        cosine=shared,
        shuffled=shuffled_null(
            gram, advantages, centred=centred, draws=draws, seed=seed, exact_up_to=exact_up_to, psd_rtol=psd_rtol
        ),
    )


def _intervals(measured: SpectrumSummary, max_rank: int) -> Mapping[str, Interval]:
    if math.isnan(measured.top1_fraction):
        return MappingProxyType(dict.fromkeys(SPECTRUM_METRICS, Interval(math.nan, math.nan)))
    return feasible_intervals(measured.top1_fraction, max_rank)
