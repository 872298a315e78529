"""What other estimators would have made of the rollouts of the last third: on the page, and for `scoregram whatif`."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType

from rich.console import Console

from scoregram.advice import trained_estimator
from scoregram.bootstrap import FEWEST
from scoregram.checks import ScoregramError
from scoregram.exhibits import Cell, Estimate, Table, cell_text, json_value
from scoregram.reading import (
    POOLED,
    REFERENCE,
    UNWEIGHTED,
    Replay,
    ReplayedRun,
    RunReading,
    read_run,
    what_if,
    wrong_over_right_energy,
)
from scoregram.report.terminal import show_table
from scoregram.runs import open_run, require_run

MOST_REPLAYED = 150
"""Groups of the last third on which other estimators are replayed, evenly spaced if there are more."""
OWN_MARK = " (this run)"
"""Behind the name of the estimator that the run was trained with."""
ESTIMATOR_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "grpo": "reward minus the group's mean, over its standard deviation",
        "grpo-trl": "as grpo, with TRL's eps",
        "mean": "reward minus the group's mean",
        "opo": "reward minus the group's mean weighted by length",
        "opo-loo": "as opo, with the mean of the other rollouts",
        "optimal": "reward minus the group's mean weighted by squared score norms",
        "optimal-loo": "as optimal, with the mean of the other rollouts",
        "reinforce": "the reward itself, no baseline",
        "reinforce++": "reward minus the step's mean, over its standard deviation",
        "reinforce++-baseline": "reward minus the group's mean, over the step's standard deviation",
        "rloo": "reward minus the mean of the other rollouts",
        "tic": "as grpo, with the reward per token",
    }
)
"""Estimator → its advantage in a few words."""
REPLAY_COLUMNS = ("estimator", "advantage", "signal to noise of one prompt", "efficiency", "direction")
TERMINAL_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "variance": "variance",
        "bias": "bias",
        "signal / noise of one prompt": "snr",
        f"efficiency, {REFERENCE} = 1": "efficiency",
        "direction": "direction",
        "as taken": "taken",
        "rank": "effective_rank",
        "null": "effective_rank_null",
    }
)
"""Column of `scoregram whatif` → field of `Replay`."""
DIRECTION_LIMIT = "its estimate, a ratio of noisy means, can exceed 1 and is then shown as 1"
"""What a caption says of the cosines that `shown_direction` cuts off."""


def what_if_table(run: RunReading) -> Iterator[Table]:
    """Signal to noise and direction that other estimators would have had; the run's own is marked.

    Columns without a number are left out, and the caption says why.
    """
    replayed = _replayed(run)
    if replayed is None:
        return
    own = trained_estimator(run.config)
    order = sorted(replayed.rows, key=lambda row: -row.snr.value if math.isfinite(row.snr.value) else math.inf)
    cells: list[tuple[Cell, ...]] = [
        (
            row.estimator + OWN_MARK * (row.estimator == own),
            ESTIMATOR_WORDS.get(row.estimator, ""),
            row.snr,
            concluded(row.efficiency),
            shown_direction(concluded(row.direction)),
        )
        for row in order
    ]
    kept = [place for place in range(len(REPLAY_COLUMNS)) if not all(_is_empty(row[place]) for row in cells)]
    yield Table(
        "what-if",
        "Would another estimator see more signal?",
        " ".join(_caption(run, replayed, own, "efficiency" in [REPLAY_COLUMNS[place] for place in kept])),
        tuple(REPLAY_COLUMNS[place] for place in kept),
        tuple(tuple(row[place] for place in kept) for row in cells),
    )


def _replayed(run: RunReading) -> ReplayedRun | None:
    """The usual estimators and that of the run; None without a complete group, or without a signal to noise."""
    try:
        replayed = what_if(run, most_groups=MOST_REPLAYED)
    except ScoregramError:  # no complete group, or groups too small to be halved
        return None
    if not any(math.isfinite(row.snr.value) for row in replayed.rows):
        return None
    own = trained_estimator(run.config)
    if not own or any(row.estimator == own for row in replayed.rows):
        return replayed
    try:
        (added,) = what_if(run, (own,), most_groups=MOST_REPLAYED).rows
    except ScoregramError:  # an estimator that stored groups do not suffice for
        return replayed
    # TRL's grpo differs from grpo by its eps only: one row for both
    rows = [row for row in replayed.rows if not (own.startswith("grpo-") and row.estimator == "grpo")]
    return replace(replayed, rows=(*rows, added))


def _caption(run: RunReading, replayed: ReplayedRun, own: str, has_efficiency: bool) -> Iterator[str]:
    """How to read the table, and why it lacks a column."""
    size, half = replayed.run_size, replayed.group_size
    yield (
        f"Signal to noise of one prompt's update from {half} rollouts: each group of {size} is compared as two halves, "
        f"which tells signal from noise. {replayed.groups} groups of evenly spaced steps of the last third."
    )
    if all(math.isnan(row.snr.low) for row in replayed.rows):
        yield "They are too few for intervals, so the order of the rows means nothing."
    else:
        yield f"95 % intervals over {replayed.unit}; where they overlap, the order of the rows means nothing."
    if has_efficiency:
        yield (
            "Efficiency: signal to noise over that of rloo, 2 means half as many groups. Direction: cosine with the "
            f"true gradient; {DIRECTION_LIMIT}. –: the interval of the signal to noise includes 0, that of the number "
            f"has no ends, or parts of {half} rollouts cannot tell the estimator from rloo."
        )
    else:
        yield (
            "Efficiency and direction are left out: they compare with rloo, whose signal is not resolved on these "
            "groups."
        )
    if told := left_out_text(run, size):
        yield told
    if told := _why_no_baseline(run, replayed.rows, own):
        yield told


def _why_no_baseline(run: RunReading, rows: Sequence[Replay], own: str) -> str:
    """Why `reinforce` has more signal than the estimator of the run, if their intervals say so; empty otherwise.

    It gives a reward of 0 the weight 0. If right rollouts have much smaller scores than wrong ones, that is near the
    baseline with the least variance, `E[|ψ|² r] / E[|ψ|²]`.
    """
    snr = {row.estimator: row.snr for row in rows}
    other = own if own in snr else "rloo"
    if "reinforce" not in snr or other not in snr or not snr["reinforce"].low > snr[other].high:
        return ""
    ratio = wrong_over_right_energy(run.last_measured)
    told = f"reinforce is above {other} on these groups"
    if not ratio > 1:
        return f"{told}; it pushes in groups with equal rewards too, where {other} does not."
    return (
        f"{told} because wrong rollouts have {cell_text(ratio)} times the squared score norm of right ones: reinforce "
        "gives a reward of 0 no weight, and so leaves out the largest part of the noise. This need not hold at other "
        "success rates."
    )


def _is_empty(cell: Cell) -> bool:
    return isinstance(cell, Estimate) and math.isnan(cell.value)


def left_out_text(run: RunReading, size: int) -> str:
    """How many of the measured groups of the last third have `size` rollouts, and why the others are not replayed.

    Empty if all of them have that size and all rewards.
    """
    measured = [group for group in run.last_measured if group.record.rows == "scores" and group.record.gram is not None]
    others = [group.size for group in measured if group.size != size]
    incomplete = sum(group.size == size and not group.is_complete for group in measured)
    if not others and not incomplete:
        return ""
    told = f"{len(measured) - len(others) - incomplete} of the {len(measured)} measured groups of the last third can "
    told += "be replayed: "
    reasons = []
    if others:
        least, most = min(others), max(others)
        sizes = f"{least}" if least == most else f"{least} to {most}"
        divided = run.config.get("allocate", "uniform")
        why = f"`--allocate {divided}` gave them others" if divided != "uniform" else "the run changed the size"
        reasons.append(
            f"estimators are compared in groups of one size, {size} rollouts, and {len(others)} have another "
            f"({sizes}; {why})"
        )
    if incomplete:
        reasons.append(f"{incomplete} lack{'s' * (incomplete == 1)} a reward")
    return f"{told}{'; '.join(reasons)}."


def concluded(estimate: Estimate) -> Estimate:
    """An estimate, or `nan` if its interval has no ends: then the data say nothing about it."""
    has_no_ends = estimate.low == -math.inf and estimate.high == math.inf
    return Estimate(math.nan) if has_no_ends else estimate


def shown_direction(estimate: Estimate) -> Estimate:
    """An estimate of a cosine with its interval, cut off at -1 and 1."""
    return Estimate(*(max(-1.0, min(1.0, x)) if x == x else x for x in (estimate.value, estimate.low, estimate.high)))


def show_replay(
    folder: Path,
    estimators: Sequence[str] = (),
    *,
    group_size: int = 0,
    weights: str = UNWEIGHTED,
    as_json: bool = False,
) -> int:
    """Print the comparison as a table or as strict JSON, with the run's trust, and return the exit status 0.

    The line above the table is `noise()`: the signal and the noise of a step. The JSON has it as `noise`, and the
    estimates as they are, directions above 1 too.
    """
    run = read_run(open_run(require_run(folder, caller="whatif")))
    found = what_if(run, estimators, group_size=group_size, weights=weights)
    if as_json:
        trust = {"mark": run.trust.mark.strip(" ()"), "trust": run.trust.sentences()}
        noise = {"noise": json_value({name: asdict(getattr(run.noise(), name)) for name in POOLED})}
        left_out = {"left_out": left_out_text(run, found.run_size) or None}
        print(json.dumps(json_value(asdict(found)) | noise | trust | left_out, indent=1, allow_nan=False))
        return 0
    console = Console()
    if sentence := run.noise().sentence():
        console.print(f"The update of a step with {REFERENCE}: {sentence}.")
    show_table(estimator_table(found, run.trust.mark), console)
    if sentence := left_out_text(run, found.run_size):
        console.print(sentence)
    for sentence in run.trust.sentences():
        console.print(sentence, style="dim")
    return 0


def estimator_table(found: ReplayedRun, mark: str) -> Table:
    """Every number of the estimators, the largest signal to noise first; `mark` is that of the run's trust."""
    weighted = "" if found.weights == UNWEIGHTED else f", weights {found.weights}"
    parts = "at" if found.is_extrapolated else "in parts of"
    rows = sorted(found.rows, key=lambda row: -row.snr.value if math.isfinite(row.snr.value) else math.inf)
    return Table(
        "what-if",
        f"{found.groups} groups of {found.run_size}, {parts} {found.group_size}{weighted}{mark}",
        f"Signal over noise is that of one prompt's update from {found.group_size} rollouts; variance is the trace of "
        f"that update's covariance. {_extrapolated_text(found)}Bias is |E ĝ - g|² / |g|² with {REFERENCE} for g, a "
        f"wrong length included. Direction is the cosine between E ĝ and g; {DIRECTION_LIMIT}. As taken is the cosine "
        f"between the update of the whole groups and the run's own. {_reference_text(found)}–: the data cannot tell. "
        f"Groups of the last third; {_interval_text(found)}.",
        ("estimator", *TERMINAL_FIELDS),
        tuple((row.estimator, *_terminal_cells(row)) for row in rows),
    )


def _extrapolated_text(found: ReplayedRun) -> str:
    if not found.is_extrapolated:
        return ""
    return (
        f"Both are extrapolated from the components of the noise of {REFERENCE} in groups of {found.run_size}; the "
        "other columns are those of these groups. "
    )


def _interval_text(found: ReplayedRun) -> str:
    if not found.unit:
        return "too few of them for 95 % intervals"
    few = f", because there are fewer than {FEWEST} steps" if found.unit == "groups" else ""
    return f"95 % intervals over {found.unit}{few}"


def _reference_text(found: ReplayedRun) -> str:
    is_shown = found.weights == UNWEIGHTED and any(row.estimator == REFERENCE for row in found.rows)
    return f"Efficiency and direction of {REFERENCE} are 1 by definition. " if is_shown else ""


def _terminal_cells(row: Replay) -> Iterator[Estimate]:
    for field in TERMINAL_FIELDS.values():
        cell = concluded(getattr(row, field))
        yield shown_direction(cell) if field == "direction" else cell
