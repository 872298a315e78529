"""The table of other estimators: what each would have made of the rollouts of the last third."""

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from scoregram.advice import trained_estimator
from scoregram.checks import ScoregramError
from scoregram.exhibits import Cell, Estimate, Table, cell_text
from scoregram.reading import Replay, ReplayedRun, RunReading, what_if

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
REPLAY_COLUMNS = ("estimator", "advantage", "signal to noise", "efficiency", "direction")


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
            row.efficiency,
            _as_cosine(row.direction),
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
    return ReplayedRun(
        groups=replayed.groups,
        run_size=replayed.run_size,
        group_size=replayed.group_size,
        weights=replayed.weights,
        rows=(*rows, added),
    )


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
        yield "95 % intervals over groups; where they overlap, the order of the rows means nothing."
    if has_efficiency:
        yield (
            "Efficiency: signal to noise over that of rloo, 2 means half as many groups. Direction: cosine with the "
            "true gradient; its estimate, a ratio of noisy means, can exceed 1 and is then shown as 1. –: the interval "
            "of the signal to noise includes 0."
        )
    else:
        yield (
            "Efficiency and direction are left out: they compare with rloo, whose signal is not resolved on these "
            "groups."
        )
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
    ratio = wrong_over_right_energy(run)
    told = f"reinforce is above {other} on these groups"
    if not ratio > 1:
        return f"{told}; it pushes in groups with equal rewards too, where {other} does not."
    return (
        f"{told} because wrong rollouts have {cell_text(ratio)} times the squared score norm of right ones: reinforce "
        "gives a reward of 0 no weight, and so leaves out the largest part of the noise. This need not hold at other "
        "success rates."
    )


def wrong_over_right_energy(run: RunReading) -> float:
    """Mean squared score norm of rollouts with the reward 0 over that of rollouts with 1, in the last third.

    `nan` if rewards are graded or one of the two is missing.
    """
    energies: dict[float, list[float]] = {0.0: [], 1.0: []}
    for group in run.last_measured:
        if group.record.gram is None or run.is_graded:
            continue
        for reward, energy in zip(group.record.rewards.tolist(), group.record.gram.diagonal().tolist(), strict=True):
            energies.setdefault(reward, []).append(energy)
    wrong, right = (sum(energies[kind]) / len(energies[kind]) if energies[kind] else math.nan for kind in (0.0, 1.0))
    return wrong / right if right > 0 else math.nan


def _is_empty(cell: Cell) -> bool:
    return isinstance(cell, Estimate) and math.isnan(cell.value)


def _as_cosine(estimate: Estimate) -> Estimate:
    """An estimate of a cosine, cut at -1 and 1."""
    return Estimate(*(max(-1.0, min(1.0, x)) if x == x else x for x in (estimate.value, estimate.low, estimate.high)))
