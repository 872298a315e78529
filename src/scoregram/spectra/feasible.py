"""Values that a rank metric can take: feasible intervals, and closed forms that need no eigenvalues.

The top-1 fraction `f` limits every rank metric. If half of the energy is in one direction, the effective rank is at
least 2 whatever the gradients are, so "effective rank about 2" adds nothing to `f = 1/2`. A measured value is
therefore shown with its feasible interval: the values that are possible given `f` and the largest possible rank `m`.

Statement:
    Among energies with `e_1 = f`, `e_i <= f`, `Σe = 1` and at most `m` of them nonzero, every metric of
    `SPECTRUM_METRICS` takes its extremes on two spectra: `concentrated_energies` (`n = ⌊1/f⌋` entries `f` and one
    remainder `1 - n f`) and `spread_energies` (`f`, and the rest in `m - 1` equal parts).

Proof:
    The concentrated spectrum majorises every feasible one, and every feasible one majorises the spread spectrum. This
    settles all Schur-concave metrics and the top-k fractions. The entropy rank `exp H(p)` is *not* Schur-concave:
    energies 16 and 16 among thirty ones have a lower entropy rank than 17 and 15. Yet its extremes are the same.

    With `s_i = √e_i`, `S = Σs` and `M = Σ p ln s` (a mean of the `ln s_i`): `∂H/∂e_i = g(s_i) / (2S)` where
    `g(s) = (M - ln s) / s`, which is positive exactly for `ln s < M` and falls as long as `ln s < 1 + M`. At an
    extreme all entries strictly between `0` and `f` share one value `λ = g(s_i)`. If `λ < 0`, all of them would lie
    above `M`, and so would the entries at `f`; then their mean `M` would lie above `M`, which is impossible. So `λ >=
    0`, where `g` is one-to-one, and the entries in between are equal. At a minimum there is at most one of them, since
    `g` falls there and moving energy between two equal entries would lower `H`: the concentrated spectrum. At a maximum
    no entry is zero, where `g` is infinite, and none but the first is at `f`, where `g < 0 <= λ` unless the spectrum is
    flat: the spread spectrum. The numerical rank ignores what is below its tolerance and is counted directly.

Checked by:
    Random search and enumeration in the tests, which never leave the interval and attain both ends.

The closed forms are for right-or-wrong rewards over orthogonal scores, and for any two rows. `k` of `R` rollouts are
right and the advantage is the reward minus the group's mean: `A_i = (R-k)/R` for the right ones and `-k/R` for the
others. With orthogonal scores of equal norm the singular values are `|A_i|`. So even without any structure in the
gradients the effective rank depends on how evenly the group is split into right and wrong, and on nothing else.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from scoregram.checks import fail, lookup, require_in_range
from scoregram.spectra.metrics import RANK_RTOL, SPECTRUM_METRICS
from scoregram.types import Spectrum

END_RTOL = 1e-9
"""A top-1 fraction outside `[1/m, 1]` by at most this share is rounding and counts as the end itself."""

WHOLE_RTOL = 8 * torch.finfo(torch.float64).eps
"""`1/f` this close to a whole number counts as whole: a remainder of `1e-16` would become `1e-8` under the root."""


@dataclass(frozen=True)
class Interval:
    """Closed interval of the values a metric can take; both ends are attained, both `nan` for the zero matrix."""

    low: float
    high: float

    def contains(self, value: float | int, *, atol: float = 1e-6) -> bool:
        """Whether `value` lies inside, up to `atol` for the rounding of `√(1 - f)`."""
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
    # At f = 1/m rounding may lift the parts above f.
    rest = min((1 - f) / (max_rank - 1), f) if max_rank > 1 else 0.0
    return torch.tensor([f] + [rest] * (max_rank - 1), dtype=torch.float64)


def effective_rank_bounds(top1_fraction: float | int, max_rank: int) -> tuple[float, float]:
    """Smallest and largest effective rank of at most `m` directions of which the strongest holds a share `f`.

    `(⌊1/f⌋ √f + √rest)²` and `(√f + √((m-1)(1-f)))²`: the effective ranks of `concentrated_energies` and
    `spread_energies`, without tensors, for callers with many groups.

    Example:
        >>> [round(rank, 3) for rank in effective_rank_bounds(0.5, 2)]
        [2.0, 2.0]
    """
    f = _require_top1_fraction(top1_fraction, max_rank, caller="effective_rank_bounds")
    is_whole = _is_whole(1 / f)
    whole = round(1 / f) if is_whole else math.floor(1 / f)
    rest = 0.0 if is_whole or whole >= max_rank else 1 - whole * f
    least = (whole * math.sqrt(f) + math.sqrt(rest)) ** 2 / (whole * f + rest)
    part = min((1 - f) / (max_rank - 1), f) if max_rank > 1 else 0.0
    most = (math.sqrt(f) + (max_rank - 1) * math.sqrt(part)) ** 2 / (f + (max_rank - 1) * part)
    return least, most


def _rank_interval(f: float, max_rank: int) -> Interval:
    """Fewest and most energies above `RANK_RTOL² f`, none above `f`, that can sum to `1`."""
    seen = RANK_RTOL**2
    fewest = math.ceil((1 / f - max_rank * seen) / (1 - seen))
    most = math.ceil((1 / f - 1) / seen)
    return Interval(float(max(1, fewest)), float(max(1, min(max_rank, most))))


def _is_whole(value: float) -> bool:
    return abs(value - round(value)) <= WHOLE_RTOL * value


def _require_top1_fraction(f: float | int, max_rank: int, *, caller: str) -> float:
    """`f` clamped to `[1/m, 1]`; an error if it is outside by more than rounding."""
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


def orthogonal_effective_rank(right: int, rollouts: int) -> float:
    """Effective rank of `k` right among `R` orthogonal, equally long scores under the mean baseline.

    `4k(R-k)/R`. Reads: `R` in an even group; `4(R-1)/R < 4` if a single rollout differs, however large the group;
    `nan` if all are right or all wrong, because no rollout pulls.

    Raises:
        ScoregramError: If not `0 <= right <= rollouts` with at least one rollout.

    Example:
        >>> [orthogonal_effective_rank(k, 8) for k in (1, 2, 4)]
        [3.5, 6.0, 8.0]
    """
    _require_count(right, rollouts, caller="orthogonal_effective_rank")
    return 4 * right * (rollouts - right) / rollouts if 0 < right < rollouts else math.nan


def orthogonal_top1_fraction(right: int, rollouts: int) -> float:
    """Top-1 fraction of `k` right among `R` orthogonal, equally long scores under the mean baseline.

    `max(k, R-k) / (R min(k, R-k))`. Reads: `1/R` in an even group; `(R-1)/R` if a single rollout differs; `nan` if all
    are right or all wrong.

    Raises:
        ScoregramError: If not `0 <= right <= rollouts` with at least one rollout.
    """
    _require_count(right, rollouts, caller="orthogonal_top1_fraction")
    fewer = min(right, rollouts - right)
    return (rollouts - fewer) / (rollouts * fewer) if fewer else math.nan


def expected_orthogonal_effective_rank(success_rate: float | int, rollouts: int) -> float:
    """Mean of `orthogonal_effective_rank` over the mixed groups of a prompt solved with probability `p`.

    `4(R-1)p(1-p) / (1 - p^R - (1-p)^R)`: groups that are all right or all wrong add nothing to `E[k(R-k)] =
    R(R-1)p(1-p)`, and the denominator leaves them out. Reads: largest at `p = 1/2`, where it is `(R-1)/(1 - 2^(1-R))`;
    it falls to `4(R-1)/R` as `p` nears `0` or `1`; `nan` there and for `R = 1`, where no group is mixed.

    Raises:
        ScoregramError: If `p` is outside `[0, 1]` or there is no rollout.

    Example:
        >>> expected_orthogonal_effective_rank(0.5, 2)
        2.0
    """
    caller = "expected_orthogonal_effective_rank"
    rare = float(require_in_range(float(success_rate), low=0.0, high=1.0, name="the success rate", caller=caller))
    _require_count(0, rollouts, caller=caller)
    rare = min(rare, 1 - rare)
    if rare == 0 or rollouts == 1:
        return math.nan
    mixed = -math.expm1(rollouts * math.log1p(-rare)) - rare**rollouts  # 1 - (1-p)^R would cancel for small p
    return 4 * (rollouts - 1) * rare * (1 - rare) / mixed


def two_row_effective_rank_from_top1(top1_fraction: float | int) -> float:
    """Effective rank of any two rows whose top-1 fraction is `f`: at `R = 2` each of the two numbers fixes the other.

    `1 + 2√(f(1-f))`. Reads: `1` at `f = 1`, `2` at `f = 1/2`.

    Raises:
        ScoregramError: If `f` is outside `[1/2, 1]`.

    Example:
        >>> two_row_effective_rank_from_top1(0.5)
        2.0
    """
    caller = "two_row_effective_rank_from_top1"
    f = require_in_range(float(top1_fraction), low=0.5, high=1.0, name="the top-1 fraction of two rows", caller=caller)
    return 1 + 2 * math.sqrt(f * (1 - f))


def _require_count(right: int, rollouts: int, *, caller: str) -> None:
    if rollouts < 1:
        fail(caller, "needs at least 1 rollout", rollouts, "Pass the group size R.")
    if not 0 <= right <= rollouts:
        fail(caller, f"the number of right rollouts must lie in [0, {rollouts}]", right, "Count them within one group.")
