"""What the measurement says about each empirical claim: decided by stated rules from the exhibits alone.

A claim is *replicated* only if it holds and no null model already predicts it; *replicated only as the null predicts*
if both hold; *not replicated* if it fails beyond its interval; *undecided* if the interval leaves it open, or if there
is none.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import combinations
from types import MappingProxyType
from typing import Any

from scoregram.exhibits import Cell, Estimate, Exhibit, Table
from scoregram.theory import CLAIMS


class Outcome(StrEnum):
    """The verdict on an empirical claim."""

    REPLICATED = "replicated"
    AS_NULL = "replicated only as the null predicts"
    NOT = "not replicated"
    UNDECIDED = "undecided"
    NOT_MEASURED = "not measured"


NEAR = 0.25
"""An effective rank within this distance of 2 is about 2."""
PRINTED_TOP = MappingProxyType({2: (0.6, 0.7), 4: (0.7, 0.8), 8: (0.5, 0.6)})
"""Group sizes of the paper's Table 1, and the top-1 fractions that it prints."""
HALF_DIGIT = 0.05
CLOSE = 0.8
"""An error is close to another one from this share of it on."""
MODELS = ("orthogonal", "shuffled", "unrelated")
RANK_NULLS = MappingProxyType({name: f"null: {name}" for name in MODELS})
TOP_NULLS = MappingProxyType({name: f"top-1 {name}" for name in MODELS})
"""Null model → its column in Table 1."""


@dataclass(frozen=True)
class Effect:
    """The number that decided, with its interval."""

    name: str
    value: float | None
    low: float | None
    high: float | None
    null: float | None = None


@dataclass(frozen=True)
class Judged:
    """A claim of the ledger with what was measured."""

    claim: str
    """Its id in `scoregram claims`."""
    verdict: Outcome
    sentence: str
    effect: Effect
    details: Mapping[str, Any] = field(default_factory=dict)


def judge(exhibits: Sequence[Exhibit], *, seeds: Sequence[int], model: str, task: str) -> list[dict[str, Any]]:
    """Verdicts on all claims that the exhibits bear on, as plain values."""
    tables = {one.id: one for one in exhibits if isinstance(one, Table)}
    judged = [
        effective_rank(tables["table-1"]),
        *[row_at(tables["table-1"], size) for size in column(tables["table-1"], "R")],
        top_order(tables["table-1"]),
        larger_groups(tables["group-size"]),
        saturation(tables["prediction"]),
        falls_with_spread(tables["at-fixed-k"]),
        gradient_error(tables["variance"]),
    ]
    where = {"seeds": list(seeds), "model": model, "task": task}
    return [plain(one) | said_in_paper(one.claim) | where for one in judged]


def said_in_paper(claim: str) -> dict[str, str]:
    """Where and what the paper says, in our words, from the ledger."""
    found = next((one for one in CLAIMS if one.id == claim), None)
    if found is None:  # a group size that the paper does not have
        return {"place": "Table 1, extended", "statement": "The effective rank is about 2 whatever the group size."}
    return {"place": found.place, "statement": found.statement}


def plain(judged: Judged) -> dict[str, Any]:
    """A verdict as JSON takes it."""
    return asdict(judged) | {"verdict": str(judged.verdict), "details": dict(judged.details)}


def column(table: Table, name: str) -> list[Any]:
    """Cells of one column."""
    place = table.columns.index(name)
    return [row[place] for row in table.rows]


def effect(name: str, cell: Cell, null: float | None = None) -> Effect:
    """A cell as the effect of a verdict."""
    if not isinstance(cell, Estimate):
        return Effect(name, known(cell), None, None, known(null))
    return Effect(name, known(cell.value), known(cell.low), known(cell.high), known(null))


def known(value: Any) -> float | None:
    """A number, or None where there is none."""
    return float(value) if isinstance(value, float | int) and math.isfinite(value) else None


def number(value: float | None) -> str:
    """Two digits for people."""
    return "?" if value is None or math.isnan(value) else f"{value:.2f}"


def within(cell: Estimate, low: float, high: float) -> Outcome:
    """Whether a number lies in a range, as far as its interval tells; nothing is decided without an interval."""
    if math.isnan(cell.value):
        return Outcome.NOT_MEASURED
    if low <= cell.low and cell.high <= high:
        return Outcome.REPLICATED
    return Outcome.NOT if cell.high < low or cell.low > high else Outcome.UNDECIDED


def both(*outcomes: Outcome) -> Outcome:
    """The verdict on several things claimed at once: the worst of them."""
    order = (Outcome.NOT, Outcome.NOT_MEASURED, Outcome.UNDECIDED, Outcome.AS_NULL, Outcome.REPLICATED)
    return next(one for one in order if one in outcomes)


def about_two(cell: Estimate) -> Outcome:
    """Whether a rank is about 2."""
    return within(cell, 2 - NEAR, 2 + NEAR)


def nulls_at(table: Table, size: int, columns: Mapping[str, str]) -> dict[str, float]:
    """Null model → what it gives at one group size, in the columns of one quantity."""
    place = column(table, "R").index(size)
    return {name: column(table, title)[place] for name, title in columns.items()}


def rank_at(table: Table, size: int) -> Judged:
    """Whether the effective rank is about 2 at one group size.

    As the null predicts: where any of the null models is about 2 by itself, and at R = 2, where the rank can be no
    larger and says what the top-1 fraction says.
    """
    cell: Estimate = column(table, "effective rank")[column(table, "R").index(size)]
    nulls = nulls_at(table, size, RANK_NULLS)
    outcome, alike = about_two(cell), [name for name, null in nulls.items() if abs(null - 2) <= NEAR]
    if outcome is Outcome.REPLICATED and (size == 2 or alike):
        outcome = Outcome.AS_NULL
    tautology = " With two rows the rank follows from the top-1 fraction alone." if size == 2 else ""
    null = nulls["orthogonal"]
    said = f"R = {size}: effective rank {number(cell.value)}, orthogonal scores of the same norms {number(null)}."
    details = {"nulls near 2": ", ".join(alike) or "none"}
    return Judged(f"table-1-r{size}", outcome, said + tautology, effect("effective rank", cell, null), details)


def row_at(table: Table, size: int) -> Judged:
    """Whether a row of Table 1 holds: effective rank about 2 and, where the paper prints one, the top-1 fraction.

    Printed with one digit, a fraction counts up to half a digit outside its range.
    """
    rank = rank_at(table, size)
    if size not in PRINTED_TOP:
        return rank
    top: Estimate = column(table, "top-1 fraction")[column(table, "R").index(size)]
    low, high = PRINTED_TOP[size]
    found = within(top, low - HALF_DIGIT, high + HALF_DIGIT)
    said = f"{rank.sentence} Top-1 fraction {number(top.value)}; printed {low} to {high}."
    details = {**rank.details, "effective rank": str(rank.verdict), "top-1 fraction": str(found)}
    return replace(rank, verdict=both(rank.verdict, found), sentence=said, details=details)


def effective_rank(table: Table) -> Judged:
    """Whether the effective rank is about 2 at every group size of the paper.

    One size at which it is not refutes it. Sizes that are missing, or undecided, leave it undecided.
    """
    sizes = [size for size in column(table, "R") if size <= max(PRINTED_TOP)]
    if not sizes:
        empty = Effect("effective rank", None, None, None)
        return Judged("abstract-effective-rank", Outcome.NOT_MEASURED, "Needs R = 2, 4 and 8.", empty)
    each = [rank_at(table, size) for size in sizes]
    outcomes = {one.verdict for one in each}
    missing = sorted(PRINTED_TOP.keys() - set(sizes))
    if Outcome.NOT in outcomes:
        outcome = Outcome.NOT
    elif missing or outcomes & {Outcome.UNDECIDED, Outcome.NOT_MEASURED}:
        outcome = Outcome.NOT_MEASURED if outcomes == {Outcome.NOT_MEASURED} else Outcome.UNDECIDED
    else:
        outcome = Outcome.AS_NULL if outcomes == {Outcome.AS_NULL} else Outcome.REPLICATED
    values = ", ".join(f"{number(one.effect.value)} at R = {size}" for size, one in zip(sizes, each, strict=True))
    nulls = ", ".join(number(one.effect.null) for one in each)
    said = f"Effective rank {values}; orthogonal scores of the same norms would give {nulls}."
    details = {f"R = {size}": str(one.verdict) for size, one in zip(sizes, each, strict=True)}
    details |= {f"R = {size}": str(Outcome.NOT_MEASURED) for size in missing}
    return Judged("abstract-effective-rank", outcome, said, each[-1].effect, details)


def top_order(table: Table) -> Judged:
    """Whether the top-1 fraction is highest at R = 4 and lowest at R = 8, and in no null model anyway."""
    sizes = column(table, "R")
    tops: dict[int, Estimate] = dict(zip(sizes, column(table, "top-1 fraction"), strict=True))
    if any(size not in tops or math.isnan(tops[size].value) for size in (2, 4, 8)):
        return Judged("fig-2", Outcome.NOT_MEASURED, "Needs R = 2, 4 and 8.", Effect("top-1", None, None, None))
    nulls = {size: nulls_at(table, size, TOP_NULLS) for size in (2, 4, 8)}
    apart = surely_above(tops[4], tops[2]) and surely_above(tops[2], tops[8])
    refuted = surely_above(tops[2], tops[4]) or surely_above(tops[8], tops[2]) or surely_above(tops[8], tops[4])
    by_null = [name for name in TOP_NULLS if nulls[4][name] > nulls[2][name] > nulls[8][name]]
    outcome = Outcome.UNDECIDED
    if apart:
        outcome = Outcome.AS_NULL if by_null else Outcome.REPLICATED
    elif refuted:
        outcome = Outcome.NOT
    alone = {size: nulls[size]["orthogonal"] for size in nulls}
    said = "Top-1 fraction " + ", ".join(f"{number(tops[size].value)} at R = {size}" for size in (2, 4, 8))
    said += "; |A| and norms alone " + ", ".join(number(alone[size]) for size in (2, 4, 8)) + "."
    low, high = tops[4].low - tops[8].high, tops[4].high - tops[8].low
    difference = Effect(
        "top-1, R = 4 less R = 8",
        known(tops[4].value - tops[8].value),
        known(low),
        known(high),
        known(alone[4] - alone[8]),
    )
    return Judged("fig-2", outcome, said, difference, {"nulls in that order": ", ".join(by_null) or "none"})


def surely_above(one: Estimate, other: Estimate) -> bool:
    """Whether the intervals of two means do not touch and the first is the higher; never without both intervals."""
    return one.low > other.high


def larger_groups(table: Table) -> Judged:
    """Whether larger groups end higher at the same number of rollouts: the largest of the paper surely above the
    smallest, and no two the other way round.
    """
    ends: dict[int, Estimate] = {
        size: end
        for size, end in zip(column(table, "R"), column(table, "final accuracy"), strict=True)
        if size <= max(PRINTED_TOP) and not math.isnan(end.value)
    }
    if len(ends) < 2:
        empty = Effect("accuracy gained", None, None, None, 0.0)
        return Judged("fig-3", Outcome.NOT_MEASURED, "Needs the accuracy at two group sizes.", empty)
    sizes = sorted(ends)
    small, large = ends[sizes[0]], ends[sizes[-1]]
    outcome = Outcome.UNDECIDED
    if any(surely_above(ends[fewer], ends[more]) for fewer, more in combinations(sizes, 2)):
        outcome = Outcome.NOT
    elif surely_above(large, small):
        outcome = Outcome.REPLICATED
    values = ", ".join(f"{ends[size].value:.3f} at R = {size}" for size in sizes)
    said = f"Final accuracy at equal rollouts: {values}."
    gained = Effect(
        "accuracy gained",
        known(large.value - small.value),
        known(large.low - small.high),
        known(large.high - small.low),
        0.0,
    )
    return Judged("fig-3", outcome, said, gained)


def saturation(table: Table) -> Judged:
    """Whether the effective rank foretells gains, and surely better than the reward and the share of live groups do."""
    found = dict(zip(column(table, "quantity"), column(table, "correlation with the gain"), strict=True))
    rank: Estimate = found["effective rank"]
    rivals = [found["mean reward"], found["share of live groups"]]
    least = rank.low if rank.low > 0 else -rank.high if rank.high < 0 else 0.0
    beats = all(least > abs(rival.value) for rival in rivals if not math.isnan(rival.value))
    outcome = Outcome.NOT_MEASURED if math.isnan(rank.value) else Outcome.UNDECIDED
    if least > 0:
        outcome = Outcome.REPLICATED if beats else Outcome.AS_NULL
    known_ones = [
        f"{name} {round(cell.value, 2) + 0.0:+.2f}" for name, cell in found.items() if not math.isnan(cell.value)
    ]
    said = f"Correlation with the next gain in accuracy: {', '.join(known_ones) or 'none is defined'}."
    return Judged("sec-8-future-2", outcome, said, effect("correlation of the rank", rank, 0.0))


def falls_with_spread(table: Table) -> Judged:
    """Whether the rank falls over training at the same number of right rollouts.

    Replicated if most cells surely fall and none surely rises, and most of them further than their null.
    """
    halves = list(zip(column(table, "first half"), column(table, "second half"), strict=True))
    over = list(zip(column(table, "over null, first"), column(table, "over null, second"), strict=True))
    fallen = [surely_above(one, two) for one, two in halves]
    beyond = sum(fell and surely_above(one, two) for fell, (one, two) in zip(fallen, over, strict=True))
    falls, rises = sum(fallen), sum(surely_above(two, one) for one, two in halves)
    changes = [two.value - one.value for one, two in halves]
    outcome = Outcome.UNDECIDED if changes else Outcome.NOT_MEASURED
    if 2 * falls > len(changes) and not rises:
        outcome = Outcome.REPLICATED if 2 * beyond > len(changes) else Outcome.AS_NULL
    elif rises and not falls:
        outcome = Outcome.NOT
    said = (
        f"At fixed k, where σ_r is fixed too, {falls} of {len(changes)} cells fall and {rises} rise beyond their "
        f"intervals; {beyond} fall further than orthogonal scores of the same norms would."
    )
    mean = sum(changes) / len(changes) if changes else math.nan
    return Judged("sec-8-future-3", outcome, said, Effect("mean change at fixed k", known(mean), None, None, 0.0))


def gradient_error(table: Table) -> Judged:
    """Whether the error at R = 8 is near the oracle's, and largest without a baseline.

    As the null predicts: where the oracle's share is that of a reward which has nothing to do with the scores.
    """
    name = "oracle / leave-one-out"
    sizes = column(table, "R")
    if 8 not in sizes:
        empty = Effect(name, None, None, None)
        return Judged("ustat-experiment-mse", Outcome.NOT_MEASURED, "Needs batches at R = 8.", empty)
    place = sizes.index(8)
    none: Estimate = column(table, "no baseline")[place]
    oracle: Estimate = column(table, "oracle")[place]
    null: float = column(table, "null: independent reward")[place]
    largest = Outcome.NOT if none.high < 1 else Outcome.REPLICATED if none.low > 1 else Outcome.UNDECIDED
    near = within(oracle, CLOSE, 1 / CLOSE)
    outcome = both(near, largest)
    if outcome is Outcome.REPLICATED and oracle.low <= null <= oracle.high:
        outcome = Outcome.AS_NULL
    said = (
        f"At R = 8, relative to leave-one-out: oracle {interval(oracle)}, {number(null)} for a reward independent of "
        f"the scores; no baseline {interval(none)}."
    )
    details = {"near the oracle": str(near), "largest without a baseline": str(largest)}
    return Judged("ustat-experiment-mse", outcome, said, effect(name, oracle, null), details)


def interval(cell: Estimate) -> str:
    """A number with its interval for people."""
    return f"{number(cell.value)} [{number(cell.low)}, {number(cell.high)}]"
