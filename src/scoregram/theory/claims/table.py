"""Table 1: do the numbers of a row fit each other, and what would chance give?"""

from scoregram.spectra import (
    Interval,
    expected_orthogonal_effective_rank,
    feasible_interval,
    two_row_effective_rank_from_top1,
)
from scoregram.theory.claims.bench import advantages, binary_group
from scoregram.theory.claims.ledger import Claim, Finding, corrected, refuted
from scoregram.theory.theorems import (
    expected_orthogonal_top1_fraction,
    largest_stacked_rank,
    most_energy_outside_top_two,
)

ABOUT_TWO = Interval(1.5, 2.5)
"""What may be printed as "~2"."""


def _possible(fraction: tuple[float, float], max_rank: int) -> Interval:
    """Effective ranks that some spectrum has whose top-1 fraction lies in the printed range."""
    ends = [feasible_interval("effective_rank", f, max_rank) for f in fraction]
    return Interval(min(end.low for end in ends), max(end.high for end in ends))


def _met(size: int) -> int:
    """Largest rank of a right-or-wrong group of this size, from the advantages themselves."""
    return max(largest_stacked_rank(advantages("mean", binary_group(k, size))) for k in range(1, size))


def row_two() -> Finding:
    """Rank one against the printed numbers; then rank two, where the one number is a function of the other."""
    alone = feasible_interval("effective_rank", 1.0, 1)
    forced = [two_row_effective_rank_from_top1(f) for f in (0.6, 0.7)]
    as_interval = [feasible_interval("effective_rank", f, 2) for f in (0.6, 0.7)]
    agree = max(abs(i.low - x) + abs(i.high - x) for i, x in zip(as_interval, forced, strict=True))
    return refuted(
        printed=alone.high > ABOUT_TWO.low,
        truth=alone.low == alone.high == 1 and agree < 1e-9 and _met(2) == 2,
        evidence={
            "printed max rank": 1,
            "effective rank and top-1 fraction at rank 1": alone.high,
            "max rank": _met(2),
            "effective rank forced by top-1 0.6": forced[0],
            "effective rank forced by top-1 0.7": forced[1],
            "null, orthogonal scores": expected_orthogonal_effective_rank(0.9, 2),
        },
        correction="The row contradicts itself: at rank 1 both numbers are exactly 1. At the true largest rank 2 the "
        "effective rank is 1 + 2√(f(1-f)), fixed by the top-1 fraction, so 'about 2' is no finding: any two rows that are "
        "far from parallel give it.",
    )


def _row(size: int, fraction: tuple[float, float], *, printed_rank: int) -> Finding:
    as_printed_rank, possible = _possible(fraction, printed_rank), _possible(fraction, size)
    outside = max(most_energy_outside_top_two(f, ABOUT_TWO.high, size) for f in fraction)
    tight = max(most_energy_outside_top_two(f, 2.1, size) for f in fraction)
    fits = as_printed_rank.low <= ABOUT_TWO.high and as_printed_rank.high >= ABOUT_TWO.low
    null = [expected_orthogonal_effective_rank(p, size) for p in (0.5, 0.9)]
    return corrected(
        printed=_met(size) == printed_rank,
        truth=fits and _met(size) == size and possible.low > ABOUT_TWO.low and min(null) > ABOUT_TWO.high,
        evidence={
            "printed max rank": printed_rank,
            "max rank": _met(size),
            "effective rank, least possible": possible.low,
            "most possible": possible.high,
            "most energy outside two directions, effective rank 2.1": tight,
            "the same, effective rank 2.5": outside,
            "null effective rank, p = 0.5": null[0],
            "null, p = 0.9": null[1],
            "null top-1, p = 0.9": expected_orthogonal_top1_fraction(0.9, size),
        },
        correction=f"The largest rank is {size}, not {printed_rank}. The other two numbers fit each other, but 'about 2' is the "
        f"floor that the top-1 fraction forces ({possible.low:.2f}); to say more, the row needs the number of groups, their "
        "k, an error and the null.",
    )


def row_four() -> Finding:
    """Top-1 fraction 0.7-0.8 with an effective rank of about two, at rank 3 and 4."""
    return _row(4, (0.7, 0.8), printed_rank=3)


def row_eight() -> Finding:
    """Top-1 fraction 0.5-0.6 with an effective rank of about two, at rank 7 and 8."""
    return _row(8, (0.5, 0.6), printed_rank=7)


TABLE: tuple[Claim, ...] = (
    Claim("table-1-r2", "Table 1, row R = 2", "Max rank 1, effective rank about 2, top-1 fraction 0.6-0.7.", row_two),
    Claim("table-1-r4", "Table 1, row R = 4", "Max rank 3, effective rank about 2, top-1 fraction 0.7-0.8.", row_four),
    Claim("table-1-r8", "Table 1, row R = 8", "Max rank 7, effective rank about 2, top-1 fraction 0.5-0.6.", row_eight),
)
