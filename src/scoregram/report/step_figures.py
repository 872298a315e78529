"""Figures over the steps of a run."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from scoregram.bootstrap import mean_estimate
from scoregram.exhibits import Estimate, Figure, Role, Series
from scoregram.reading import RunReading, StoredGroup
from scoregram.spectra import orthogonal_effective_rank

MOST_POINTS = 400
"""Most points of a line; with more steps, neighbouring ones are averaged."""
FAILED = "self-check failed"
"""Suffix, in the name of a series, for steps whose self-check failed."""


def learning(run: RunReading) -> Iterator[Figure]:
    """Reward and test accuracy; shares of live and dead groups."""
    steps, accuracy = run.series("eval/accuracy")
    low, high = (run.series(f"eval/accuracy_{end}")[1] for end in ("low", "high"))
    bounded = len(low) == len(high) == len(steps)
    tested = (
        (Series("test accuracy", steps, accuracy, low if bounded else (), high if bounded else ()),) if steps else ()
    )
    yield from _figure(
        "learning",
        "Reward and test accuracy",
        "Reward: mean over the rollouts of a step, sampled from the prompts of that step; in a run of another trainer, "
        "as that trainer logged it. Test accuracy: greedy, on problems never trained on; the band is its 95 % Wilson "
        "interval.",
        "mean reward, accuracy",
        (*_scalar(run, "reward", "reward"), *tested),
    )
    yield from _figure(
        "groups",
        "Live and dead groups",
        "A group is live if its rewards differ. A group that is all right or all wrong has no group-relative advantage "
        "and adds nothing to the update.",
        "share of groups",
        (
            *_line("live", *run.live_share),
            *_scalar(run, "groups/all_right", "all right"),
            *_scalar(run, "groups/all_wrong", "all wrong"),
        ),
    )


def spectrum(run: RunReading) -> Iterator[Figure]:
    """Effective rank and top-1 fraction with their null and their feasible interval, over steps and by outcome."""
    measured = [group for group in run.groups if group.reading is not None]
    failed = [group for group in measured if group.record.step in run.trust.failed]
    passed = [group for group in measured if group.record.step not in run.trust.failed]
    live = [group for group in passed if group.has_spectrum]
    yield from _figure(
        "effective-rank",
        "Effective rank over steps",
        "Mean over the live groups of a step, with a 95 % bootstrap interval over them. Dashed: what orthogonal rows "
        "of the same norms would give. Dotted: the least and the most that the measured top-1 fractions allow. "
        "A value on the dashed line is no evidence of similarity between rollouts.",
        "effective rank",
        (
            *_over_groups(live, "effective rank", _reading("effective_rank")),
            *_over_groups(failed, f"effective rank, {FAILED}", _reading("effective_rank"), points=True),
            *_over_groups(live, "effective rank, orthogonal", _reading("effective_rank_orthogonal"), "null"),
            *_over_groups(live, "effective rank, least possible", lambda group: group.possible_ranks[0], "bound"),
            *_over_groups(live, "effective rank, most possible", lambda group: group.possible_ranks[1], "bound"),
        ),
    )
    yield from _figure(
        "top1-fraction",
        "Top-1 fraction over steps",
        "Share of the energy (sum of squared norms) of a group's rows that lies in one direction. Dashed: orthogonal "
        "rows of the same norms. Dotted: 1/m, the least that m nonzero rows can have.",
        "top-1 fraction",
        (
            *_over_groups(live, "top-1 fraction", _reading("top1_fraction")),
            *_over_groups(failed, f"top-1 fraction, {FAILED}", _reading("top1_fraction"), points=True),
            *_over_groups(live, "top-1 fraction, orthogonal", _reading("top1_fraction_orthogonal"), "null"),
            *_over_groups(live, "top-1 fraction, least possible", _least_top1, "bound"),
        ),
    )
    yield from _figure(
        "rank-by-right",
        "Effective rank by number of right rollouts",
        "All steps together. If scores are orthogonal and of equal norm, k right rollouts of R give 4k(R-k)/R under "
        "the mean baseline: the effective rank then shows only how evenly the group is split.",
        "effective rank",
        tuple(_by_right(live)) if run.rows == "scores" else (),
        x_title="right rollouts k",
    )
    yield from _figure(
        "cosine",
        "Cosine between the scores of a group",
        "Mean over pairs of rollouts of one prompt, dead groups included. Zero: no common direction.",
        "mean cosine",
        (
            *_over_groups(passed, "cosine", _reading("cosine")),
            *_over_groups(failed, f"cosine, {FAILED}", _reading("cosine"), points=True),
        ),
    )


def update_figures(run: RunReading) -> Iterator[Figure]:
    """The update as a whole: its norm, how much of it is signal, and which rollouts drive it."""
    yield from _figure(
        "update-norm",
        "Norm of the update",
        "Norm of the gradient before clipping and before the optimiser.",
        "norm",
        _scalar(run, "gram/update_norm", "update norm"),
        y_log=True,
    )
    yield from _figure(
        "coherence",
        "Coherence of the update",
        "Coherence: squared norm of the sum of the N rows, over N times the sum of their squared norms. 1 if all rows "
        "are equal, 0 if they cancel. Dashed: 1/N, that of orthogonal rows of equal norm.",
        "coherence",
        (
            *_scalar(run, "gram/coherence", "coherence"),
            *_constant(run, "gram/coherence", "coherence, orthogonal", 1 / run.batch_size, "null"),
        ),
    )
    yield from _figure(
        "snr",
        "Signal to noise of one step",
        "Estimated power (squared norm) of the true gradient over the power of the step's error. At 1, half of the "
        "step is noise. A single step is a poor estimate, hence points; below zero, no signal was resolved. The "
        "table above pools steps.",
        "signal to noise",
        (
            *_scalar(run, "gram/snr", "signal to noise", points=True),
            *_constant(run, "gram/snr", "half of the step is noise", 1.0, "bound"),
        ),
    )
    yield from _figure(
        "noise-scale",
        "Noise scale and batch size",
        "Noise scale: the number of rollouts at which signal and error have equal power. At points above the "
        "dotted line, the batch is smaller than that. Steps without a resolved signal have no point.",
        "rollouts",
        (
            *_scalar(run, "gram/noise_scale", "noise scale", points=True),
            *_constant(run, "gram/noise_scale", "batch size", run.batch_size, "bound"),
        ),
        y_log=True,
    )
    yield from _figure(
        "drivers",
        "Which rollouts drive the update",
        "Largest share: part of the squared update that one rollout accounts for. Conflicting prompts: share of pairs "
        "of prompts whose updates oppose each other; independent noise gives one half.",
        "share",
        (
            *_scalar(run, "gram/largest_share", "largest share of a rollout"),
            *_scalar(run, "gram/conflicting_prompts", "conflicting prompts"),
            *_constant(run, "gram/conflicting_prompts", "conflicting prompts, independent", 0.5, "null"),
        ),
    )


def chunks(places: Sequence[float]) -> list[range]:
    """Index ranges of a sorted sequence, one per point of a line: one value each, or several if there are many."""
    starts = [i for i, place in enumerate(places) if i == 0 or place != places[i - 1]]
    per_point = math.ceil(len(starts) / MOST_POINTS)
    edges = [*starts[:: max(per_point, 1)], len(places)]
    return [range(a, b) for a, b in pairwise(edges)]


def _figure(
    name: str,
    title: str,
    caption: str,
    y_title: str,
    series: tuple[Series, ...],
    *,
    x_title: str = "step",
    y_log: bool = False,
) -> Iterator[Figure]:
    """The figure, if it has a measured series."""
    if any(one.role == "measured" for one in series):
        yield Figure(name, title, caption, x_title, y_title, series, y_log=y_log)


def _reading(name: str) -> Callable[[StoredGroup], float]:
    return lambda group: getattr(group.reading, name, math.nan)


def _least_top1(group: StoredGroup) -> float:
    return 1 / group.nonzero_rows if group.nonzero_rows else math.nan


def _scalar(run: RunReading, name: str, shown: str, *, points: bool = False) -> tuple[Series, ...]:
    """A scalar over steps; those whose self-check failed are points of their own."""
    failed = _line(f"{shown}, {FAILED}", *run.series(name, failed=True), points=True)
    return (*_line(shown, *run.series(name), points=points), *failed)


def _line(
    name: str, steps: tuple[float, ...], values: tuple[float, ...], *, points: bool = False
) -> tuple[Series, ...]:
    if not steps:
        return ()
    parts = chunks(steps)
    x = tuple(sum(steps[i] for i in part) / len(part) for part in parts)
    return (Series(name, x, tuple(_mean([values[i] for i in part]) for part in parts), points=points),)


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _constant(run: RunReading, beside: str, name: str, value: float, role: Role) -> tuple[Series, ...]:
    """A horizontal line over the steps at which a scalar was logged."""
    steps, _ = run.series(beside)
    if not steps or not math.isfinite(value):
        return ()
    ends = tuple(dict.fromkeys((steps[0], steps[-1])))
    return (Series(name, ends, (value,) * len(ends), role=role),)


def _over_groups(
    groups: Sequence[StoredGroup],
    name: str,
    quantity: Callable[[StoredGroup], float],
    role: Role = "measured",
    *,
    points: bool = False,
) -> tuple[Series, ...]:
    """Mean of a quantity over the groups of each step; measured quantities have an interval over groups."""
    values = [quantity(group) for group in groups]
    if all(map(math.isnan, values)):
        return ()
    places = [float(group.record.step) for group in groups]
    parts = chunks(places)
    x = tuple(_mean([places[i] for i in part]) for part in parts)
    return (replace(_with_intervals(name, x, [[values[i] for i in part] for part in parts], role), points=points),)


def _with_intervals(name: str, x: tuple[float, ...], values: Sequence[Sequence[float]], role: Role) -> Series:
    if role != "measured":
        return Series(name, x, tuple(map(_mean, values)), role=role)
    made: list[Estimate] = [mean_estimate(part) for part in values]
    y, low, high = (tuple(getattr(one, field) for one in made) for field in ("value", "low", "high"))
    return Series(name, x, y, low, high)


def _by_right(live: Sequence[StoredGroup]) -> Iterator[Series]:
    for size in sorted({group.size for group in live if group.right is not None}):
        here = [group for group in live if group.size == size and group.right is not None and 0 < group.right < size]
        counts = sorted({group.right for group in here if group.right is not None})
        if not counts:
            continue
        x = tuple(map(float, counts))
        shown: tuple[tuple[str, str, Role], ...] = (
            (f"R = {size}", "effective_rank", "measured"),
            (f"R = {size}, orthogonal", "effective_rank_orthogonal", "null"),
        )
        for name, key, role in shown:
            values = [[getattr(group.reading, key, math.nan) for group in here if group.right == k] for k in counts]
            if not all(math.isnan(value) for part in values for value in part):
                yield _with_intervals(name, x, values, role)
        every = tuple(range(1, size))
        ranks = tuple(orthogonal_effective_rank(k, size) for k in every)
        yield Series(f"R = {size}, 4k(R-k)/R", tuple(map(float, every)), ranks, role="null")
