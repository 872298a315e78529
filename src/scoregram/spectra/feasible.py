"""What a metric can be at all, once the top-1 fraction `f` and the largest possible rank `m` are known.

A rank metric is rarely free. Half of the energy in one direction forces an effective rank of at least 2, whatever the
gradients are, so "effective rank about 2" says nothing that `f` did not already say. A measured value therefore comes
with the interval that its own `f` leaves open.

Statement:
    Among energies with `e_1 = f`, `e_i <= f`, `Σe = 1` and at most `m` of them nonzero, every metric of
    `SPECTRUM_METRICS` takes its extremes on two spectra: `concentrated_energies` (`n = ⌊1/f⌋` entries `f` and one
    remainder `1 - n f`) and `spread_energies` (`f`, and the rest in `m - 1` equal parts).

Proof:
    The concentrated spectrum majorises every feasible one and every feasible one majorises the spread spectrum; this
    settles all Schur-concave metrics and the top-k fractions. The entropy rank `exp H(p)` is *not* Schur-concave: 16
    and 16 among thirty ones has less of it than 17 and 15. Yet its extremes are the same.

    With `s_i = √e_i`, `S = Σs` and `M = Σ p ln s` (a mean of the `ln s_i`): `∂H/∂e_i = g(s_i) / (2S)` where
    `g(s) = (M - ln s) / s`, which is positive exactly for `ln s < M` and falls as long as `ln s < 1 + M`. At an
    extreme all entries strictly between `0` and `f` share one value `λ = g(s_i)`. Were `λ < 0`, they would all lie
    above `M`, the entries at `f` too, and so would their mean `M`: impossible. So `λ >= 0`, where `g` is one-to-one,
    and the entries in between are equal. At a minimum there is at most one of them, since `g` falls there, and moving
    energy from one to another equal one would lower `H`: the concentrated spectrum. At a maximum no entry is zero,
    where `g` is infinite, and none but the first is at `f`, where `g < 0 <= λ` unless the spectrum is flat: the
    spread spectrum. The numerical rank, blind below its tolerance, is counted directly.

Checked by:
    Random search and enumeration in the tests, which never leave the interval and attain both ends.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from scoregram.checks import fail, lookup, require_in_range
from scoregram.spectra.metrics import RANK_RTOL, SPECTRUM_METRICS, top_fractions
from scoregram.types import Spectrum

END_RTOL = 1e-9
"""A top-1 fraction outside `[1/m, 1]` by no more than this share is rounding and counts as the end itself."""

WHOLE_RTOL = 8 * torch.finfo(torch.float64).eps
"""`1/f` this close to a whole number is whole: the square root of a remainder of `1e-16` would show as `1e-8`."""


@dataclass(frozen=True)
class Interval:
    """Closed interval of the values a metric can take; both ends are attained, both `nan` for the zero matrix."""

    low: float
    high: float

    def contains(self, value: float | int, *, atol: float = 1e-6) -> bool:
        """Whether `value` lies inside, with `atol` to spare for the rounding of `√(1 - f)`."""
        return self.low - atol <= value <= self.high + atol


def feasible_interval(metric: str, top1_fraction: float | int, max_rank: int) -> Interval:
    """Least and greatest value of one metric over all spectra with this top-1 fraction and at most this rank.

    With `n = ⌊1/f⌋`: effective rank from `(n√f + √(1 - nf))²` to `(√f + √((m-1)(1-f)))²`; participation ratio from
    `1/(nf² + (1-nf)²)` to `1/(f² + (1-f)²/(m-1))`; stable rank `1/f` alone. For `m = 2` every interval is one point.

    Args:
        metric: A name of `SPECTRUM_METRICS`.
        top1_fraction: Energy share `f` of the strongest direction.
        max_rank: Largest possible rank `m`, such as the number of nonzero rows.

    Raises:
        ScoregramError: If the name is unknown, `m < 1`, or `f` lies outside `[1/m, 1]` by more than rounding.

    Example:
        >>> feasible_interval("numerical_rank", 0.4, 8)
        Interval(low=3.0, high=8.0)
    """
    lookup(SPECTRUM_METRICS, metric, kind="feasible_interval")
    return feasible_intervals(top1_fraction, max_rank)[metric]


def feasible_intervals(top1_fraction: float | int, max_rank: int) -> Mapping[str, Interval]:
    """`feasible_interval` of every metric in `SPECTRUM_METRICS`, by name."""
    f = _require_top1_fraction(top1_fraction, max_rank, caller="feasible_intervals")
    extremes = torch.stack([concentrated_energies(f, max_rank), spread_energies(f, max_rank)]).sqrt()  # (2, m)
    ends = {name: sorted(metric.fn(extremes).tolist()) for name, metric in SPECTRUM_METRICS.items()}
    intervals = {name: Interval(float(low), float(high)) for name, (low, high) in ends.items()}
    return MappingProxyType(intervals | {"numerical_rank": _rank_interval(f, max_rank)})


def feasible_top_fractions(top1_fraction: float | int, max_rank: int) -> tuple[Interval, ...]:
    """Least and greatest energy share of the `k` strongest directions, for `k = 1 … m`.

    From `f + (k-1)(1-f)/(m-1)` to `min(1, k f)`.
    """
    low, high = (
        top_fractions(energies(top1_fraction, max_rank).sqrt()).tolist()
        for energies in (spread_energies, concentrated_energies)
    )
    return tuple(Interval(*ends) for ends in zip(low, high, strict=True))


def concentrated_energies(top1_fraction: float | int, max_rank: int) -> Spectrum:
    """The feasible energies on the fewest directions: `⌊1/f⌋` entries `f`, one remainder, zeros.

    Example:
        >>> concentrated_energies(0.4, 4)
        tensor([0.4000, 0.4000, 0.2000, 0.0000], dtype=torch.float64)
    """
    f = _require_top1_fraction(top1_fraction, max_rank, caller="concentrated_energies")
    energies = torch.zeros(max_rank, dtype=torch.float64)
    whole = round(1 / f) if _is_whole(1 / f) else math.floor(1 / f)
    energies[:whole] = f
    if whole < max_rank and not _is_whole(1 / f):
        energies[whole] = 1 - whole * f
    return energies


def spread_energies(top1_fraction: float | int, max_rank: int) -> Spectrum:
    """The feasible energies on the most directions: `f`, and the rest in equal parts.

    Example:
        >>> spread_energies(0.4, 4)
        tensor([0.4000, 0.2000, 0.2000, 0.2000], dtype=torch.float64)
    """
    f = _require_top1_fraction(top1_fraction, max_rank, caller="spread_energies")
    # At f = 1/m the parts may come out one rounding above f.
    rest = min((1 - f) / (max_rank - 1), f) if max_rank > 1 else 0.0
    return torch.tensor([f] + [rest] * (max_rank - 1), dtype=torch.float64)


def _rank_interval(f: float, max_rank: int) -> Interval:
    """Fewest and most energies above `RANK_RTOL² f` that can fill `1`, none above `f`."""
    seen = RANK_RTOL**2
    fewest = math.ceil((1 / f - max_rank * seen) / (1 - seen))
    most = math.ceil((1 / f - 1) / seen)
    return Interval(float(max(1, fewest)), float(max(1, min(max_rank, most))))


def _is_whole(value: float) -> bool:
    return abs(value - round(value)) <= WHOLE_RTOL * value


def _require_top1_fraction(f: float | int, max_rank: int, *, caller: str) -> float:
    """`f` brought inside `[1/m, 1]` where only rounding put it outside."""
    if max_rank < 1:
        fail(caller, "the largest rank must be at least 1", max_rank, "Pass the number of nonzero rows.")
    require_in_range(
        float(f),
        low=(1 - END_RTOL) / max_rank,
        high=1 + END_RTOL,
        name=f"the top-1 fraction of at most {max_rank} directions",
        caller=caller,
        remedy="The strongest of m directions holds at least 1/m of the energy: check max_rank.",
    )
    return min(max(float(f), 1 / max_rank), 1.0)
