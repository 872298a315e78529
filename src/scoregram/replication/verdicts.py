"""What the measurement says about each empirical claim: decided by stated rules from the exhibits alone.

A claim is *replicated* only if it holds and the null model does not already predict it; *replicated only as the null
predicts* if both hold; *not replicated* if it fails beyond its interval; *undecided* if the interval leaves it open.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from scoregram.exhibits import Cell, Estimate, Exhibit, Table
from scoregram.theory.claims import CLAIMS


class Outcome(StrEnum):
    """The verdict on an empirical claim."""

    REPLICATED = "replicated"
    AS_NULL = "replicated only as the null predicts"
    NOT = "not replicated"
    UNDECIDED = "undecided"
    NOT_MEASURED = "not measured"


NEAR = 0.25
"""An effective rank within this distance of 2 is about 2."""


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
        *[rank_at(tables["table-1"], size) for size in column(tables["table-1"], "R")],
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


def about_two(cell: Estimate) -> Outcome:
    """Whether a rank is about 2, as far as its interval tells."""
    low, high = 2 - NEAR, 2 + NEAR
    ends = (cell.value if math.isnan(cell.low) else cell.low, cell.value if math.isnan(cell.high) else cell.high)
    if low <= ends[0] and ends[1] <= high:
        return Outcome.REPLICATED
    return Outcome.NOT if ends[1] < low or ends[0] > high else Outcome.UNDECIDED


def rank_at(table: Table, size: int) -> Judged:
    """Whether the effective rank is about 2 at one group size."""
    place = column(table, "R").index(size)
    cell: Estimate = column(table, "effective rank")[place]
    null: float = column(table, "null: orthogonal")[place]
    outcome = about_two(cell)
    if outcome is Outcome.REPLICATED and (size == 2 or abs(null - 2) <= NEAR):
        outcome = Outcome.AS_NULL
    tautology = " With two rows the rank follows from the top-1 fraction alone." if size == 2 else ""
    said = f"R = {size}: effective rank {cell.value:.2f}, orthogonal scores of the same norms {null:.2f}.{tautology}"
    return Judged(f"table-1-r{size}", outcome, said, effect("effective rank", cell, null))


def effective_rank(table: Table) -> Judged:
    """Whether the effective rank is about 2 at every group size of the paper."""
    sizes = [size for size in column(table, "R") if size <= 8]
    each = [rank_at(table, size) for size in sizes]
    outcomes = {one.verdict for one in each}
    if Outcome.NOT in outcomes:
        outcome = Outcome.NOT
    elif Outcome.UNDECIDED in outcomes:
        outcome = Outcome.UNDECIDED
    else:
        outcome = Outcome.AS_NULL if outcomes == {Outcome.AS_NULL} else Outcome.REPLICATED
    largest = each[-1]
    cells = column(table, "effective rank")[: len(sizes)]
    values = ", ".join(f"{cell.value:.2f} at R = {size}" for size, cell in zip(sizes, cells, strict=True))
    nulls = ", ".join(f"{null:.2f}" for null in column(table, "null: orthogonal")[: len(sizes)])
    said = f"Effective rank {values}; orthogonal scores of the same norms would give {nulls}."
    details = {f"R = {size}": str(one.verdict) for size, one in zip(sizes, each, strict=True)}
    return Judged("abstract-effective-rank", outcome, said, largest.effect, details)


def top_order(table: Table) -> Judged:
    """Whether the top-1 fraction is highest at R = 4 and lowest at R = 8."""
    sizes = column(table, "R")
    if not {2, 4, 8} <= set(sizes):
        return Judged("fig-2", Outcome.NOT_MEASURED, "Needs R = 2, 4 and 8.", Effect("top-1", None, None, None))
    tops = dict(zip(sizes, column(table, "top-1 fraction"), strict=True))
    nulls = dict(zip(sizes, column(table, "top-1 orthogonal"), strict=True))
    apart = surely_above(tops[4], tops[2]) and surely_above(tops[2], tops[8])
    refuted = surely_above(tops[2], tops[4]) or surely_above(tops[8], tops[2]) or surely_above(tops[8], tops[4])
    by_null = nulls[4] > nulls[2] > nulls[8]
    outcome = Outcome.UNDECIDED
    if apart:
        outcome = Outcome.AS_NULL if by_null else Outcome.REPLICATED
    elif refuted:
        outcome = Outcome.NOT
    said = "Top-1 fraction " + ", ".join(f"{tops[size].value:.2f} at R = {size}" for size in (2, 4, 8))
    said += "; |A| and norms alone " + ", ".join(f"{nulls[size]:.2f}" for size in (2, 4, 8)) + "."
    difference = Effect(
        "top-1, R = 4 less R = 8", known(tops[4].value - tops[8].value), None, None, nulls[4] - nulls[8]
    )
    return Judged("fig-2", outcome, said, difference)


def surely_above(one: Estimate, other: Estimate) -> bool:
    """Whether the intervals of two means do not touch and the first is the higher."""
    return one.low > other.high


def larger_groups(table: Table) -> Judged:
    """Whether larger groups end higher at the same number of rollouts."""
    sizes, ends = column(table, "R"), column(table, "final accuracy")
    small, large = ends[0], ends[sizes.index(max(size for size in sizes if size <= 8))]
    low = large.low - small.high
    high = large.high - small.low
    outcome = Outcome.UNDECIDED
    if low > 0:
        outcome = Outcome.REPLICATED
    elif high < 0:
        outcome = Outcome.NOT
    values = ", ".join(f"{end.value:.3f} at R = {size}" for size, end in zip(sizes, ends, strict=True))
    said = f"Final accuracy at equal rollouts: {values}."
    return Judged(
        "fig-3",
        outcome,
        said,
        Effect("accuracy gained", known(large.value - small.value), known(low), known(high), 0.0),
    )


def saturation(table: Table) -> Judged:
    """Whether the effective rank foretells gains better than the reward and the share of live groups do."""
    found = dict(zip(column(table, "quantity"), column(table, "correlation with the gain"), strict=True))
    rank: Estimate = found["effective rank"]
    rivals = [found["mean reward"], found["share of live groups"]]
    resolved = rank.low > 0 or rank.high < 0
    beats = all(abs(rank.value) > abs(rival.value) for rival in rivals if not math.isnan(rival.value))
    outcome = Outcome.UNDECIDED
    if resolved:
        outcome = Outcome.REPLICATED if beats else Outcome.AS_NULL
    said = "Correlation with the next gain in accuracy: " + ", ".join(
        f"{name} {cell.value:+.2f}" for name, cell in found.items() if not math.isnan(cell.value)
    )
    return Judged("sec-8-future-2", outcome, said + ".", effect("correlation of the rank", rank, 0.0))


def falls_with_spread(table: Table) -> Judged:
    """Whether the rank falls over training at the same number of right rollouts."""
    before, after = column(table, "first half"), column(table, "second half")
    falls = sum(surely_above(one, two) for one, two in zip(before, after, strict=True))
    rises = sum(surely_above(two, one) for one, two in zip(before, after, strict=True))
    over = list(zip(column(table, "over null, first"), column(table, "over null, second"), strict=True))
    beyond = sum(surely_above(one, two) for one, two in over)
    changes = [two.value - one.value for one, two in zip(before, after, strict=True)]
    mean = sum(changes) / len(changes) if changes else math.nan
    outcome = Outcome.UNDECIDED
    if falls and not rises:
        outcome = Outcome.REPLICATED if beyond else Outcome.AS_NULL
    elif rises and not falls:
        outcome = Outcome.NOT
    said = (
        f"At fixed k, where σ_r is fixed too, {falls} of {len(changes)} cells fall and {rises} rise beyond their "
        f"intervals; {beyond} fall further than orthogonal scores of the same norms would."
    )
    return Judged("sec-8-future-3", outcome, said, Effect("mean change at fixed k", known(mean), None, None, 0.0))


def gradient_error(table: Table) -> Judged:
    """Whether the error at R = 8 is near the oracle's, and largest without a baseline."""
    sizes = column(table, "R")
    if 8 not in sizes:
        return Judged(
            "ustat-experiment-mse", Outcome.NOT_MEASURED, "Needs batches at R = 8.", Effect("error", None, None, None)
        )
    place = sizes.index(8)
    none, oracle = column(table, "no baseline")[place], column(table, "oracle")[place]
    said = f"At R = 8, relative to leave-one-out: oracle {oracle:.2f}, no baseline {none:.2f}; no interval yet."
    return Judged(
        "ustat-experiment-mse",
        Outcome.UNDECIDED,
        said,
        Effect("oracle / leave-one-out", known(oracle), None, None, 1.0),
    )
