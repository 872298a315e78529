"""Verdicts on the empirical claims, decided by stated rules from the exhibits alone.

A claim is *replicated* only if it holds and no null model predicts it; *replicated only as the null predicts* if it
holds and a null model predicts it too; *not replicated* if it fails beyond its interval; *undecided* if the interval
contains both answers, if there is no interval, or if these runs could not have shown the claim. The paper also asks:
a question is *answered* or *still open*, with the numbers.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any

from scoregram.checks import fail
from scoregram.exhibits import Cell, Estimate, Exhibit, Table
from scoregram.studies.grpo_rank import ABOUT_TWO, PAPER_SCALE, PRINTED_TOP1
from scoregram.studies.grpo_rank.cause_exhibits import ALL_SIZES
from scoregram.studies.grpo_rank.claims import CLAIMS
from scoregram.studies.grpo_rank.claims.rank import rates_with_printed_order
from scoregram.studies.ledger import MeasuredVerdict
from scoregram.studies.record import RECORD

MAIN_CLAIM = "abstract-effective-rank"
TINY_SCALE = "0.9 M"
"""Parameters of the embedded policy."""
LONGER_RUNS = "results/over-training"
"""Record of runs of 1,000 steps."""
HALF_DIGIT = 0.05
"""Rounding of a fraction that is printed with one digit."""
_CLOSE = 0.8
"""Two errors are close if their ratio is at least this."""
_NULL_MODELS = ("orthogonal", "shuffled", "unrelated")
RANK_NULLS = MappingProxyType({name: f"null: {name}" for name in _NULL_MODELS})
TOP_NULLS = MappingProxyType({name: f"top-1 {name}" for name in _NULL_MODELS})
"""Null model → its column in Table 1, for the effective rank and for the top-1 fraction."""


@dataclass(frozen=True)
class Effect:
    """The number that decided a verdict, with its interval and its value under the null."""

    name: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    null: float | None = None


@dataclass(frozen=True)
class JudgedClaim:
    """Measured verdict on one claim."""

    claim: str
    """Id of the claim in the ledger."""
    verdict: MeasuredVerdict
    sentence: str
    effect: Effect
    details: Mapping[str, Any] = field(default_factory=dict)


def judge_claims(exhibits: Sequence[Exhibit], *, seeds: Sequence[int], model: str, task: str) -> list[dict[str, Any]]:
    """Verdicts on all claims that the exhibits decide, as plain values."""
    tables = {one.id: one for one in exhibits if isinstance(one, Table)}
    judged = [
        judge_rank(tables["table-1"]),
        *[judge_row_at(tables["table-1"], size) for size in _column(tables["table-1"], "R")],
        judge_top1_order(tables["table-1"]),
        judge_larger_groups(tables["group-size"]),
        judge_saturation(tables["prediction"]),
        judge_fall(tables["trend"]),
        judge_gradient_error(tables["variance"]),
    ]
    where = {
        "seeds": list(seeds),
        "model": model,
        "task": task,
        "replication": "conceptual",  # neither the code nor the rollouts of the paper are public
        "scale": model_scale(model),
        "paper_scale": PAPER_SCALE,
        "success_rate": _finite(mean_success(tables["table-1"])),
    }
    return [plain_verdict(one) | _printed_statement(one.claim) | where for one in judged]


def _printed_statement(claim: str) -> dict[str, str | None]:
    """Place and statement of a claim, and the claim that it restates, from the ledger."""
    found = next((one for one in CLAIMS if one.id == claim), None)
    if found is None:  # a row of Table 1 for a group size that is not in the paper
        statement = "The effective rank is about 2 whatever the group size."
        return {"place": "Table 1, extended", "statement": statement, "restates": MAIN_CLAIM}
    return {"place": found.place, "statement": found.statement, "restates": found.restates or None}


def model_scale(model: str) -> str | None:
    """Number of parameters, from the name of a model; None if the name does not tell it.

    Example:
        >>> model_scale("SmolLM2-135M-Instruct.Q4_1.gguf"), model_scale("Qwen2.5-Coder-1.5B"), model_scale("start")
        ('135 M', '1.5 B', None)
    """
    if model == "tiny":
        return TINY_SCALE
    found = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)([MB])(?![a-zA-Z0-9])", Path(model).name, flags=re.IGNORECASE)
    return None if found is None else f"{found[1]} {found[2].upper()}"


def mean_success(table: Table) -> float:
    """Success rate of the training rollouts: mean over the group sizes of Table 1, which have as many rollouts each."""
    rates = [rate for rate in _column(table, "success rate") if _finite(rate) is not None]
    return sum(rates) / len(rates) if rates else math.nan


def plain_verdict(judged: JudgedClaim) -> dict[str, Any]:
    """A verdict as JSON values."""
    return asdict(judged) | {"verdict": str(judged.verdict), "details": dict(judged.details)}


def _not_measured(claim: str, sentence: str, effect: Effect) -> JudgedClaim:
    return JudgedClaim(claim, MeasuredVerdict.NOT_MEASURED, sentence, effect)


def _column(table: Table, name: str) -> list[Any]:
    """Cells of one column."""
    place = table.columns.index(name)
    return [row[place] for row in table.rows]


def _effect(name: str, cell: Cell, null: float | None = None) -> Effect:
    """A cell of a table as an effect."""
    if not isinstance(cell, Estimate):
        return Effect(name, _finite(cell), null=_finite(null))
    return Effect(name, _finite(cell.value), _finite(cell.low), _finite(cell.high), _finite(null))


def _finite(value: Any) -> float | None:
    """The number, or None if it is not finite."""
    return float(value) if isinstance(value, float | int) and math.isfinite(value) else None


def _digits(value: float | None, decimals: int = 2) -> str:
    """A number with so many decimals."""
    return "?" if value is None or math.isnan(value) else f"{value:.{decimals}f}"


def within(cell: Estimate, low: float, high: float) -> MeasuredVerdict:
    """Whether a number lies in a range, decided by its interval; undecided without an interval."""
    if math.isnan(cell.value):
        return MeasuredVerdict.NOT_MEASURED
    if low <= cell.low and cell.high <= high:
        return MeasuredVerdict.REPLICATED
    return MeasuredVerdict.NOT if cell.high < low or cell.low > high else MeasuredVerdict.UNDECIDED


def worst_verdict(*verdicts: MeasuredVerdict) -> MeasuredVerdict:
    """The verdict on a claim of several parts: the worst verdict on a part."""
    order = (
        MeasuredVerdict.NOT,
        MeasuredVerdict.NOT_MEASURED,
        MeasuredVerdict.UNDECIDED,
        MeasuredVerdict.AS_NULL,
        MeasuredVerdict.REPLICATED,
    )
    return next(one for one in order if one in verdicts)


def about_two(cell: Estimate) -> MeasuredVerdict:
    """Whether a rank is about 2."""
    return within(cell, 2 - ABOUT_TWO, 2 + ABOUT_TWO)


def nulls_at(table: Table, size: int, columns: Mapping[str, str]) -> dict[str, float]:
    """Null model → its value at one group size, in the given columns."""
    place = _column(table, "R").index(size)
    cells = {name: _column(table, title)[place] for name, title in columns.items()}
    return {name: cell.value if isinstance(cell, Estimate) else cell for name, cell in cells.items()}


def judge_rank_at(table: Table, size: int) -> JudgedClaim:
    """Whether the effective rank is about 2 at one group size.

    As the null predicts: if any null model is about 2 itself, and always at R = 2, where the rank is at most 2 and is a
    function of the top-1 fraction.
    """
    cell: Estimate = _column(table, "effective rank")[_column(table, "R").index(size)]
    nulls = nulls_at(table, size, RANK_NULLS)
    outcome, alike = about_two(cell), [name for name, null in nulls.items() if abs(null - 2) <= ABOUT_TWO]
    if outcome is MeasuredVerdict.REPLICATED and (size == 2 or alike):
        outcome = MeasuredVerdict.AS_NULL
    tautology = " With two rows the rank follows from the top-1 fraction alone." if size == 2 else ""
    null = nulls["orthogonal"]
    sentence = f"R = {size}: effective rank {_digits(cell.value)}, orthogonal scores of the same norms {_digits(null)}."
    details = {"nulls near 2": ", ".join(alike) or "none"}
    return JudgedClaim(
        f"table-1-r{size}", outcome, sentence + tautology, _effect("effective rank", cell, null), details
    )


def judge_row_at(table: Table, size: int) -> JudgedClaim:
    """Whether a row of Table 1 holds: effective rank about 2 and, where the paper prints one, the top-1 fraction.

    The fraction is printed with one digit, so half a digit outside its range still counts as inside.
    """
    rank = judge_rank_at(table, size)
    if size not in PRINTED_TOP1:
        return rank
    top: Estimate = _column(table, "top-1 fraction")[_column(table, "R").index(size)]
    low, high = PRINTED_TOP1[size]
    found = within(top, low - HALF_DIGIT, high + HALF_DIGIT)
    sentence = f"{rank.sentence} Top-1 fraction {_digits(top.value)}; printed {low} to {high}."
    details = {**rank.details, "effective rank": str(rank.verdict), "top-1 fraction": str(found)}
    return replace(rank, verdict=worst_verdict(rank.verdict, found), sentence=sentence, details=details)


def judge_rank(table: Table) -> JudgedClaim:
    """Whether the effective rank is about 2 at every group size of the paper.

    A single size at which the rank is not about 2 refutes the claim. A missing or undecided size leaves it undecided.
    """
    sizes = [size for size in _column(table, "R") if size <= max(PRINTED_TOP1)]
    if not sizes:
        return _not_measured(MAIN_CLAIM, "Needs R = 2, 4 and 8.", Effect("effective rank"))
    each = [judge_rank_at(table, size) for size in sizes]
    outcomes = {one.verdict for one in each}
    missing = sorted(PRINTED_TOP1.keys() - set(sizes))
    if MeasuredVerdict.NOT in outcomes:
        outcome = MeasuredVerdict.NOT
    elif missing or outcomes & {MeasuredVerdict.UNDECIDED, MeasuredVerdict.NOT_MEASURED}:
        outcome = (
            MeasuredVerdict.NOT_MEASURED if outcomes == {MeasuredVerdict.NOT_MEASURED} else MeasuredVerdict.UNDECIDED
        )
    else:
        outcome = MeasuredVerdict.AS_NULL if outcomes == {MeasuredVerdict.AS_NULL} else MeasuredVerdict.REPLICATED
    values = ", ".join(f"{_digits(one.effect.value)} at R = {size}" for size, one in zip(sizes, each, strict=True))
    nulls = ", ".join(_digits(one.effect.null) for one in each)
    sentence = f"Effective rank {values}; orthogonal scores of the same norms would give {nulls}."
    details = {f"R = {size}": str(one.verdict) for size, one in zip(sizes, each, strict=True)}
    details |= {f"R = {size}": str(MeasuredVerdict.NOT_MEASURED) for size in missing}
    return JudgedClaim(MAIN_CLAIM, outcome, sentence, each[-1].effect, details)


def judge_top1_order(table: Table) -> JudgedClaim:
    """Whether the top-1 fraction is highest at R = 4 and lowest at R = 8, and no null model has the same order.

    Even for orthogonal scores the order depends on the success rate and on norms. It is *not replicated* only if it is
    surely absent while a null model has it for the same groups. Where no null model has it, nothing is decided.
    """
    sizes = _column(table, "R")
    tops: dict[int, Estimate] = dict(zip(sizes, _column(table, "top-1 fraction"), strict=True))
    if any(size not in tops or math.isnan(tops[size].value) for size in (2, 4, 8)):
        return _not_measured("fig-2", "Needs R = 2, 4 and 8.", Effect("top-1"))
    nulls = {size: nulls_at(table, size, TOP_NULLS) for size in (2, 4, 8)}
    apart = surely_above(tops[4], tops[2]) and surely_above(tops[2], tops[8])
    refuted = surely_above(tops[2], tops[4]) or surely_above(tops[8], tops[2]) or surely_above(tops[8], tops[4])
    by_null = [name for name in TOP_NULLS if nulls[4][name] > nulls[2][name] > nulls[8][name]]
    outcome = MeasuredVerdict.UNDECIDED
    if apart:
        outcome = MeasuredVerdict.AS_NULL if by_null else MeasuredVerdict.REPLICATED
    elif refuted and by_null:
        outcome = MeasuredVerdict.NOT
    alone = {size: nulls[size]["orthogonal"] for size in nulls}
    sentence = "Top-1 fraction " + ", ".join(f"{_digits(tops[size].value)} at R = {size}" for size in (2, 4, 8))
    sentence += "; |A| and norms alone " + ", ".join(_digits(alone[size]) for size in (2, 4, 8)) + "."
    if refuted and not by_null:
        sentence += f" Not decided at this success rate: {_why_not_shown(mean_success(table))}"
    low, high = tops[4].low - tops[8].high, tops[4].high - tops[8].low
    difference = Effect(
        "top-1, R = 4 less R = 8",
        _finite(tops[4].value - tops[8].value),
        _finite(low),
        _finite(high),
        _finite(alone[4] - alone[8]),
    )
    return JudgedClaim("fig-2", outcome, sentence, difference, {"nulls in that order": ", ".join(by_null) or "none"})


def _why_not_shown(success: float) -> str:
    """Why an absent order of top-1 fractions says nothing at this success rate."""
    least, most = rates_with_printed_order()
    return (
        f"{_digits(100 * success, 0)} % of the rollouts are right, and no null model has the printed order for these "
        f"groups (orthogonal scores of equal norms have it from {100 * least:.0f} to {100 * most:.0f} % right)."
    )


def surely_above(one: Estimate, other: Estimate) -> bool:
    """Whether the interval of the first mean lies above that of the second; False if one has no interval."""
    return one.low > other.high


def judge_larger_groups(table: Table) -> JudgedClaim:
    """Whether larger groups reach a higher accuracy at the same number of rollouts.

    Replicated if the largest group size of the paper is surely above the smallest, and no smaller size is surely above
    a larger one.
    """
    ends: dict[int, Estimate] = {
        size: end
        for size, end in zip(_column(table, "R"), _column(table, "final accuracy"), strict=True)
        if size <= max(PRINTED_TOP1) and not math.isnan(end.value)
    }
    if len(ends) < 2:
        return _not_measured("fig-3", "Needs the accuracy at two group sizes.", Effect("accuracy gained", null=0.0))
    sizes = sorted(ends)
    small, large = ends[sizes[0]], ends[sizes[-1]]
    outcome = MeasuredVerdict.UNDECIDED
    if any(surely_above(ends[fewer], ends[more]) for fewer, more in combinations(sizes, 2)):
        outcome = MeasuredVerdict.NOT
    elif surely_above(large, small):
        outcome = MeasuredVerdict.REPLICATED
    values = ", ".join(f"{ends[size].value:.3f} at R = {size}" for size in sizes)
    sentence = f"Final accuracy at equal rollouts: {values}."
    gained = Effect(
        "accuracy gained",
        _finite(large.value - small.value),
        _finite(large.low - small.high),
        _finite(large.high - small.low),
        0.0,
    )
    return JudgedClaim("fig-3", outcome, sentence, gained)


def judge_saturation(table: Table) -> JudgedClaim:
    """The answer to the question whether the effective rank could serve as a signal of saturation.

    Answered if it surely predicts gains; the sentence tells whether it does so surely better than the mean reward and
    the share of live groups, which cost nothing. Open otherwise.
    """
    found = dict(zip(_column(table, "quantity"), _column(table, "correlation with the gain"), strict=True))
    rank: Estimate = found["effective rank"]
    rivals = [found["mean reward"], found["share of live groups"]]
    least = rank.low if rank.low > 0 else -rank.high if rank.high < 0 else 0.0
    beats = all(least > abs(rival.value) for rival in rivals if not math.isnan(rival.value))
    outcome = MeasuredVerdict.NOT_MEASURED if math.isnan(rank.value) else MeasuredVerdict.OPEN
    answer = ""
    if least > 0:
        outcome = MeasuredVerdict.ANSWERED
        rest = "and surely better" if beats else "but not surely better"
        answer = f"Here it predicts gains, {rest} than the mean reward and the share of live groups do. "
    known_ones = [
        f"{name} {round(cell.value, 2) + 0.0:+.2f}" for name, cell in found.items() if not math.isnan(cell.value)
    ]
    sentence = f"{answer}Correlation with the next gain in accuracy: {', '.join(known_ones) or 'none is defined'}."
    return JudgedClaim("sec-8-future-2", outcome, sentence, _effect("correlation of the rank", rank, 0.0))


def judge_fall(table: Table) -> JudgedClaim:
    """Whether the rank falls over training at the same number of right rollouts, by the slope pooled over all cells.

    Replicated if rank over null surely falls; as the null predicts if the rank surely falls and its ratio to the null
    does not; not replicated if one of the two surely rises and neither falls.
    """
    sizes = _column(table, "R")
    names = ("log rank", "log rank over null", "the same, repeats removed")
    rank, ratio, distinct = (
        _column(table, name)[sizes.index(ALL_SIZES)] if ALL_SIZES in sizes else Estimate(math.nan) for name in names
    )
    outcome = MeasuredVerdict.NOT_MEASURED if math.isnan(ratio.value) else MeasuredVerdict.UNDECIDED
    if ratio.high < 0:
        outcome = MeasuredVerdict.REPLICATED
    elif rank.high < 0:
        outcome = MeasuredVerdict.AS_NULL
    elif ratio.low > 0 or rank.low > 0:
        outcome = MeasuredVerdict.NOT
    sentence = (
        "At fixed k, where σ_r is fixed too, per 1,000 steps and over seeds: slope of log(rank / null) "
        f"{_slope(ratio)}, without repeated texts {_slope(distinct)}; of log(rank) {_slope(rank)}."
    )
    if outcome in (MeasuredVerdict.UNDECIDED, MeasuredVerdict.NOT_MEASURED):
        sentence += f" Runs of 1,000 steps are in {LONGER_RUNS}."
    details = {"without repeated texts": str(slope_verdict(distinct))}
    return JudgedClaim("sec-8-future-3", outcome, sentence, _effect("slope of log(rank / null)", ratio, 0.0), details)


def slope_verdict(slope: Estimate) -> MeasuredVerdict:
    """Whether a slope is surely negative."""
    if math.isnan(slope.value):
        return MeasuredVerdict.NOT_MEASURED
    if slope.high < 0:
        return MeasuredVerdict.REPLICATED
    return MeasuredVerdict.NOT if slope.low > 0 else MeasuredVerdict.UNDECIDED


def _slope(cell: Estimate) -> str:
    """A slope and its interval, with three decimals."""
    value, low, high = (
        "?" if math.isnan(end) else f"{round(end, 3) + 0.0:+.3f}" for end in (cell.value, cell.low, cell.high)
    )
    return f"{value} [{low}, {high}]"


def judge_gradient_error(table: Table) -> JudgedClaim:
    """Whether the error at R = 8 is near the oracle's, and largest without a baseline.

    As the null predicts: if the interval of the oracle's share contains its value for an independent reward.
    """
    name = "oracle / leave-one-out"
    sizes = _column(table, "R")
    if 8 not in sizes:
        return _not_measured("ustat-experiment-mse", "Needs batches at R = 8.", Effect(name))
    place = sizes.index(8)
    none: Estimate = _column(table, "no baseline")[place]
    oracle: Estimate = _column(table, "oracle")[place]
    null: float = _column(table, "null: independent reward")[place]
    largest = MeasuredVerdict.UNDECIDED
    if none.low > 1:
        largest = MeasuredVerdict.REPLICATED
    elif none.high < 1:
        largest = MeasuredVerdict.NOT
    near = within(oracle, _CLOSE, 1 / _CLOSE)
    outcome = worst_verdict(near, largest)
    if outcome is MeasuredVerdict.REPLICATED and oracle.low <= null <= oracle.high:
        outcome = MeasuredVerdict.AS_NULL
    sentence = (
        f"At R = 8, relative to leave-one-out: oracle {_with_interval(oracle)}, {_digits(null)} for a reward "
        f"independent of the scores; no baseline {_with_interval(none)}."
    )
    details = {"near the oracle": str(near), "largest without a baseline": str(largest)}
    return JudgedClaim("ustat-experiment-mse", outcome, sentence, _effect(name, oracle, null), details)


def _with_interval(cell: Estimate) -> str:
    """A number and its interval, with two decimals."""
    return f"{_digits(cell.value)} [{_digits(cell.low)}, {_digits(cell.high)}]"


SHIPPED = Path(__file__).parent / "shipped"
"""Copies of the records in `results/`, installed with the package."""


def measured_verdicts(records: Sequence[Path] = ()) -> Mapping[str, list[dict[str, Any]]]:
    """Claim id → verdicts of replications, from the given records or folders, or from the shipped records.

    Raises:
        ScoregramError: If a path is not a replication record.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for path in records or sorted(SHIPPED.glob("*.json")):
        for verdict in _verdicts(path / RECORD if path.is_dir() else path):
            found.setdefault(str(verdict["claim"]), []).append(verdict)
    return found


def _verdicts(path: Path) -> list[dict[str, Any]]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["content"]["verdicts"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = "Pass replication.json or its folder."
        fail("claims --measured", f"{path} must be a replication record", repr(error), remedy)
