"""A measured spectrum together with all that it has to be held against."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from scoregram.checks import fail, lookup
from scoregram.spectra.feasible import Interval, feasible_intervals
from scoregram.spectra.metrics import SPECTRUM_METRICS
from scoregram.spectra.nulls import (
    EXACT_UP_TO,
    NullDistribution,
    ShuffledNull,
    common_cosine_null,
    mean_pairwise_cosine,
    orthogonal_null,
    shuffled_null,
)
from scoregram.spectra.stacked import PSD_RTOL, SpectrumSummary, require_group, spectrum_summary
from scoregram.types import GramMatrix, GroupAdvantages


@dataclass(frozen=True)
class MetricReading:
    """One metric, never alone: measured, what its top-1 fraction leaves open, and under each null model."""

    measured: float | int
    feasible: Interval
    orthogonal: float | int
    common_cosine: float | int
    shuffled: NullDistribution


@dataclass(frozen=True)
class SpectrumReading:
    """The spectrum of one group beside its feasible intervals and its three null models."""

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
        """One metric of `SPECTRUM_METRICS` across all of them."""
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
        centred: Subtract the mean row first, from the measured stack and from the nulls alike.
        cosine: As in `common_cosine_null`.
        max_rank: Largest rank the stack could have; the number of nonzero rows if left out, and at most `R - 1` when
            centred. Pass less if the scores are known to live in fewer dimensions.
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
            f"a stack of largest rank {most} cannot have more directions than that",
            f"a numerical rank of {measured.numerical_rank}",
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
