"""Figures over the steps of a run: the value of each step pale behind its running mean, beside its null."""

import math
from collections.abc import Callable, Iterator, Sequence

from scoregram.advice import LAYER_ALONE, LAYER_GROWTH, LAYER_SHARE, least_error_size
from scoregram.bootstrap import mean_of_many
from scoregram.exhibits import Estimate, Figure, Role, Series
from scoregram.reading import (
    SAMPLED_TEST,
    Curve,
    RunReading,
    StoredGroup,
    bounded_band,
    complement,
    entropy_curve,
    geometric_curve,
    group_curve,
    layer_shares,
    live_curve,
    mse_by_group_size,
    scalar_curve,
    spectrum_energies,
    update_cosines,
)
from scoregram.report.figures import CosineMap, Drawing, HeatMap, StackedFigure
from scoregram.runs import Run

MOST_LAYER_STEPS = 20
"""Steps whose per-layer Grams are read: they are the largest part of a run."""
MOST_MAP_STEPS, FEWEST_MAP_STEPS = 60, 3
"""Steps on the map of cosines between gradients: evenly spaced if there are more, no map if there are fewer."""
FAILED = "self-check failed"
"""Suffix, in the name of a series, for steps whose self-check failed."""
ANY, SHARE = (-math.inf, math.inf), (0.0, 1.0)
"""Limits of a quantity that can have any value, and of a share."""
WIDE_RANGE = 20.0
"""Largest over smallest positive value from which a figure gets a logarithmic axis."""
STEP_SUFFIX = "each step"
"""Suffix, in the name of a series, for the values behind a running mean."""


def learning_figures(run: RunReading) -> Iterator[Figure]:
    """Reward, test accuracy, and what tells how the policy changes."""
    greedy, sampled = _test_accuracy(run), _test_rewards(run)
    tested = {
        "Test reward: sampled, on problems never trained on.": bool(sampled),
        "Test accuracy: greedy, on problems never trained on.": bool(greedy),
        "No test was made.": not (sampled or greedy),
    }
    _, rewards = run.series("reward")
    is_share = all(0 <= reward <= 1 for reward in rewards if not math.isnan(reward))
    yield from _figure(
        "learning",
        "Does it learn? Reward" + (" on training and test problems" if sampled or greedy else " on training prompts"),
        " ".join(
            ["Training reward: mean over the rollouts of a step.", *(told for told, is_so in tested.items() if is_so)]
        ),
        "mean reward" + (", accuracy" if greedy else ""),
        (*_scalar(run, "reward", "training reward", limits=SHARE if is_share else ANY), *sampled, *greedy),
    )
    yield from _figure(
        "length",
        "How long are the rollouts?",
        "Mean number of completion tokens. A length that grows while the reward does not is often length gaming.",
        "tokens",
        _scalar(run, "length", "length", "completions/mean_length"),
    )
    cut = complement(scalar_curve(run, "finished"))
    yield from _figure(
        "truncated",
        "How many rollouts are cut off?",
        "Share of rollouts that the limit on tokens ended: their reward is of an unfinished text.",
        "share of rollouts",
        _drawn(cut or scalar_curve(run, "completions/clipped_ratio"), "truncated", limits=SHARE),
    )
    is_logged = bool(run.series("entropy")[0])
    yield from _figure(
        "entropy",
        "Does the policy keep exploring? Entropy",
        ("As the trainer logged it. " if is_logged else "Estimate: mean of −log π over the sampled tokens. ")
        + "0 means that no other token could be drawn; a steep fall towards 0 is a collapse.",
        "nats per token",
        _drawn(entropy_curve(run), "entropy", limits=(0.0, math.inf)),
    )
    yield from _figure(
        "kl",
        "How far is the policy from its start?",
        "KL divergence from the reference, as the trainer logged it.",
        "kl",
        _scalar(run, "kl", "kl"),
    )
    yield from _figure(
        "clip",
        "How many importance ratios are clipped?",
        "Share of tokens whose ratio the objective clipped: 0 means that clipping never acts.",
        "share of tokens",
        _scalar(run, "clip_ratio/region_mean", "clipped", "clip_ratio", limits=SHARE),
    )


def _test_accuracy(run: RunReading) -> tuple[Series, ...]:
    """Greedy accuracy on test problems, with its Wilson interval if the run logged one."""
    steps, accuracy = run.series("eval/accuracy")
    low, high = (run.series(f"eval/accuracy_{end}")[1] for end in ("low", "high"))
    ends = (low, high) if len(low) == len(high) == len(steps) else ((), ())
    return (Series("test accuracy, greedy", steps, accuracy, *ends),) if steps else ()


def _test_rewards(run: RunReading) -> tuple[Series, ...]:
    """Mean reward of sampled rollouts on test problems at every evaluation, with intervals over problems."""
    by_step = sorted(run.tests.get(SAMPLED_TEST, {}).items())
    if not by_step:
        return ()
    made = [mean_of_many(list(rewards.values())) for _, rewards in by_step]
    y, low, high = (tuple(getattr(one, end) for one in made) for end in ("value", "low", "high"))
    return (Series("test reward, sampled", tuple(float(step) for step, _ in by_step), y, low, high),)


def prompts_figures(run: RunReading) -> Iterator[Figure]:
    """Outcomes of groups over steps, and the success rates of prompts."""
    right, wrong = (scalar_curve(run, f"groups/all_{end}") for end in ("right", "wrong"))
    live = live_curve(run)
    if right.steps == wrong.steps == live.steps and live:
        rest = [1 - sum(shares) for shares in zip(right.mean, wrong.mean, live.mean, strict=True)]
        areas = [Series(name, one.steps, one.mean) for name, one in _outcomes(run, wrong, live, right)]
        tied = "other equal rewards, or none" if run.is_graded else "tied or unjudged"
        ties = [Series(tied, live.steps, tuple(rest))] if max(rest) > 1e-9 else []
        yield StackedFigure(
            "groups",
            "Which prompts teach? Outcomes of groups",
            "Only live groups, whose rewards differ, change the policy. "
            + ("The others have equal rewards." if run.is_graded else "All right: every reward is 1; all wrong: 0.")
            + _running(live),
            "step",
            "share of groups",
            (*areas, *ties),
        )
    elif live:
        yield from _figure(
            "groups", "Which prompts teach?", "Share of live groups.", "share of groups", _drawn(live, "live")
        )
    rates = sorted(run.success_rates())
    if len(rates) > 1:
        order = tuple((place + 0.5) / len(rates) for place in range(len(rates)))
        yield Figure(
            "success",
            "How hard are the prompts?",
            f"Share of right rollouts of {len(rates)} prompts, sorted: those whose groups are stored, "
            f"{_stored_steps(run)} of the last third. At 0 and 1 a prompt made no live group.",
            "share of prompts",
            "success rate",
            (Series("success rate", order, tuple(rates)),),
        )


def _stored_steps(run: RunReading) -> str:
    count = len({group.record.step for group in run.last_groups})
    return "at 1 step" if count == 1 else f"at {count} steps"


def _outcomes(run: RunReading, wrong: Curve, live: Curve, right: Curve) -> Iterator[tuple[str, Curve]]:
    """Names of outcomes and their shares; graded rewards are neither right nor wrong, so the names give the reward."""
    yield "live", live
    yield "all rewards 0" if run.is_graded else "all wrong", wrong
    yield "all rewards 1" if run.is_graded else "all right", right


def noise_figures(run: RunReading) -> Iterator[Figure]:
    """How much of a step is signal, and which group size would have the least error."""
    yield from _figure(
        "snr",
        "How much of a step is signal?",
        "Power of the true gradient over that of the error. Values below zero mean that no signal was resolved."
        + _running(scalar_curve(run, "gram/snr")),
        "signal to noise",
        (
            *_scalar(run, "gram/snr", "signal to noise"),
            *_constant(run, "gram/snr", "1: half is noise", 1.0, "bound"),
        ),
    )
    yield from _figure(
        "noise-scale",
        "How many rollouts would a step need?",
        _noise_scale_caption(run),
        "rollouts",
        (
            *_scalar(run, "gram/noise_scale", "noise scale", points=True),
            *_constant(run, "gram/noise_scale", f"rollouts you use: {run.batch_size:g}", run.batch_size, "bound"),
        ),
        y_log=True,
    )
    curve = mse_by_group_size(run)
    if curve is not None:
        best = run.summary.best_group_size
        yield Figure(
            "mse",
            "Which group size R has the least error?",
            "Error of the update at the same number of rollouts, relative to the size used. "
            + (_best_size(run, curve.used) if math.isfinite(best.low) else "Too few measured steps for a best R."),
            "R",
            "relative error",
            (
                Series("error", curve.sizes, curve.errors),
                Series("you use", (float(curve.used),), (1.0,), points=True, role="paper"),
            ),
            x_log=True,
        )


def _noise_scale_caption(run: RunReading) -> str:
    """Which steps the figure shows, and where a pooled number is if there is one."""
    measured, shown = (len(run.series(f"gram/{name}")[0]) for name in ("gradient_squared", "noise_scale"))
    known = [scale for scale in run.series("gram/noise_scale")[1] if math.isfinite(scale)]
    above = sum(scale > run.batch_size for scale in known)
    told = (
        f"Noise scale of the {len(known)} of {max(measured, shown)} measured steps whose signal is estimated above 0 "
        f"(of pure noise, about half would be); {above} of them need more rollouts than you use. "
    )
    if math.isnan(run.summary.noise_scale.low) or run.trust.has_few_steps:
        return told + "Single steps are too noisy for a conclusion; the tile “signal in a step” says what it needs."
    return told + "The tile “signal in a step” pools the last third of the measured steps, also those without a signal."


def _best_size(run: RunReading, used: int) -> str:
    """The group size with the least error, and the one to set."""
    best, batch = run.summary.best_group_size, run.batch_size
    told = f"Least error at R = {_interval(best)}"
    if best.low <= used <= best.high:
        return f"{told}, which includes the {used} you use."
    size = least_error_size(run.noise(), used, batch)
    fitting = f": of the sizes that divide {batch:g} rollouts and can be measured, 4 and more, the best"
    return f"{told}. Set {size}{fitting if batch % size == 0 else ''}."


def _interval(best: Estimate) -> str:
    def text(value: float) -> str:
        return "∞" if math.isinf(value) else f"{value:.1f}"

    ends = "" if math.isnan(best.low) else f" [{text(best.low)}, {text(best.high)}]"
    return text(best.value) + ends if not math.isnan(best.value) else "unknown"


def drivers_figures(run: RunReading) -> Iterator[Figure]:
    """The update as a whole: its norm, what survives of it, and which rollouts drive it."""
    yield from _figure(
        "drivers",
        "Does one rollout or one prompt drive the update?",
        "Largest share of the update of a step that one rollout, and one prompt, accounts for. Some shares are "
        "negative, so one can exceed 1.",
        "share of the step's update",
        (
            *_scalar(run, "gram/largest_share", "largest share of a rollout", limits=(0.0, math.inf)),
            *_scalar(run, "gram/largest_prompt_share", "largest share of a prompt", limits=(0.0, math.inf)),
        ),
    )
    yield from _figure(
        "conflict",
        "Do prompts pull against each other?",
        f"Share of the pairs of live prompts of a step whose updates oppose each other{_pair_counts(run)}. Null: one "
        "half; unrelated, noisy updates oppose each other as often as not.",
        "share of pairs",
        (
            *_scalar(run, "gram/conflicting_prompts", "conflicting prompts", limits=SHARE),
            *_constant(run, "gram/conflicting_prompts", "null: if unrelated", 0.5, "null"),
        ),
    )
    yield from _figure(
        "coherence",
        "How much of the gradient survives the sum?",
        "Coherence of the update of a step of N rollouts. Null: 1/N, that of orthogonal gradients of equal norm.",
        "coherence",
        (
            *_scalar(run, "gram/coherence", "coherence", limits=SHARE),
            *_constant(run, "gram/coherence", "null: if unrelated", 1 / run.batch_size, "null"),
        ),
    )
    norms = _scalar(run, "gram/update_norm", "update norm", limits=(0.0, math.inf))
    is_log = _spans_decades(norms)
    if is_log:
        norms = (
            *_drawn(geometric_curve(run, "gram/update_norm"), "update norm"),
            *_drawn(geometric_curve(run, "gram/update_norm", failed=True), f"update norm, {FAILED}", points=True),
        )
    yield from _figure(
        "update-norm",
        "How large is the update?",
        "Norm of the gradient before clipping and before the optimiser."
        + (" Running geometric mean, since the axis is logarithmic." if is_log else ""),
        "norm",
        norms,
        y_log=is_log,
    )


def _pair_counts(run: RunReading) -> str:
    """How many pairs of prompts with an update a step has: `L (L - 1) / 2` of `L` live groups; empty if not known."""
    measured = set(run.series("gram/conflicting_prompts")[0])
    live = [count for step, count in zip(*run.series("live_groups"), strict=True) if step in measured and count >= 2]
    pairs = [round(count * (count - 1) / 2) for count in live]
    if not pairs:
        return ""
    told = f"{pairs[0]}" if min(pairs) == max(pairs) else f"{min(pairs)} to {max(pairs)}"
    return f": {told} pairs a step, {sum(pairs) / len(pairs):.0f} on average, so single steps jump"


def geometry_figures(run: RunReading) -> Iterator[Drawing]:
    """Rank, top-1 fraction and spectrum of a group's gradients beside their null, and the cosine between scores."""
    measured = [group for group in run.groups if group.reading is not None]
    failed = [group for group in measured if group.record.step in run.trust.failed]
    passed = [group for group in measured if group.record.step not in run.trust.failed]
    live = [group for group in passed if group.has_spectrum]
    yield from _figure(
        "effective-rank",
        "Do the rollouts of a group share directions? Rank over null",
        "Effective rank of a group's gradients divided by its null, orthogonal rows of the same norms: 1 means no "
        "shared direction is visible, less means similar gradients.",
        "effective rank / null",
        (
            *_drawn(group_curve(live, *_rank_over_null()), "rank over null"),
            *_drawn(group_curve(failed, *_rank_over_null()), f"rank over null, {FAILED}", points=True),
            *_level(live, "null: if unrelated", 1.0, "null"),
        ),
    )
    yield from _figure(
        "top1-fraction",
        "How much lies in one direction?",
        "Top-1 fraction of a group's gradients. Null: orthogonal gradients of the same norms, which vary from step to "
        "step. Where the dashes lie on the line, advantages and norms alone explain it.",
        "top-1 fraction",
        (
            *_drawn(group_curve(live, _reading("top1_fraction")), "top-1 fraction", limits=SHARE),
            *_drawn(group_curve(failed, _reading("top1_fraction")), f"top-1 fraction, {FAILED}", points=True),
            *_null(group_curve(live, _reading("top1_fraction_orthogonal")), "null: if unrelated"),
        ),
    )
    yield from _figure(
        "cosine",
        "Do the scores of a prompt point the same way?",
        "Mean cosine between the scores of two rollouts of a prompt, dead groups included. Null: 0, no common "
        "direction; scores average to zero, so a cosine near 0 is usual.",
        "mean cosine",
        (
            *_drawn(group_curve(passed, _reading("cosine")), "cosine", limits=(-1.0, 1.0)),
            *_drawn(group_curve(failed, _reading("cosine")), f"cosine, {FAILED}", points=True),
            *(_level(passed, "null: if unrelated", 0.0, "null") if run.rows == "scores" else ()),
        ),
    )
    yield from _figure(
        "rank-by-right",
        "Is the rank only a matter of how many were right?",
        "All steps. Where the line follows the null, unrelated scores of the same norms, the rank shows only how "
        "evenly the group is split.",
        "effective rank",
        tuple(_by_right(live)) if run.rows == "scores" else (),
        x_title="right rollouts k",
    )
    spectrum = spectrum_energies(live)
    if spectrum.steps:
        yield HeatMap(
            "spectrum",
            "How is the energy spread over directions?",
            "Share of a group's gradient energy in its first, second, … direction, mean over live groups.",
            "step",
            "direction",
            spectrum.steps,
            tuple(f"{place + 1}" for place in range(len(spectrum.shares))),
            spectrum.shares,
            z_title="share of the group's energy",
        )


def update_figures(folder: Run) -> Iterator[Drawing]:
    """Cosines between the gradients of measured steps, from their sketches; nothing if the run stores none."""
    cosines = update_cosines(folder)
    shown, decay = cosines.matrix(MOST_MAP_STEPS), cosines.decay()
    if len(shown.steps) < FEWEST_MAP_STEPS:
        return
    thinned = f" {len(shown.steps)} of {shown.measured} measured steps, evenly spaced."
    apart = [[math.nan if i == j else c for j, c in enumerate(row)] for i, row in enumerate(shown.values)]
    largest = max(abs(c) for row in apart for c in row if not math.isnan(c))
    yield CosineMap(
        "update-cosines",
        "Do steps push in the same direction?",
        "Cosine between the gradients of two steps, before the optimiser. Blue: they agree, which is signal. No "
        "colour: near 0, each is mostly noise or their prompts differ. Orange: they oppose each other. Null: 0, "
        f"± {cosines.sketch_error:.2f} from the sketch, a random projection of each gradient to "
        f"{cosines.directions.shape[1]:,} numbers, and more from noise: so read regions and not single cells."
        + (thinned if len(shown.steps) < shown.measured else ""),
        "step",
        "step",
        tuple(map(float, shown.steps)),
        tuple(map(str, shown.steps)),
        tuple(map(tuple, apart)),
        z_title="cosine",
        limit=min(1.0, max(largest, 4 * cosines.sketch_error)),
    )
    distances, band = tuple(float(round(d)) for d in decay.distance), tuple(2 * error for error in decay.null_error)
    if len(distances) > 1:
        yield Figure(
            "cosine-decay",
            "How long does a direction last?",
            "Mean cosine between the gradients of all pairs of measured steps, by their distance. Null: 0, with a band "
            "of two standard errors if every gradient had a random sign. Above the band steps share a signal, below it "
            "they oppose each other.",
            "distance in steps",
            "mean cosine",
            (
                Series("mean cosine", distances, decay.mean),
                Series(
                    "null: if unrelated",
                    distances,
                    (0.0,) * len(band),
                    tuple(-end for end in band),
                    band,
                    role="null",
                ),
            ),
            x_log=True,
        )


def layers_figures(folder: Run, run: RunReading) -> Iterator[HeatMap]:
    """Where in the model the scores are; steps whose self-check failed are left out."""
    measured = run.usable_steps
    every = max(1, math.ceil(len(measured) / MOST_LAYER_STEPS))
    found = layer_shares(folder, measured[::every])
    rows = "scores" if run.rows == "scores" else "gradients of the loss"
    if found.steps:
        yield HeatMap(
            "layers",
            "Which layers does the gradient go to?",
            f"Share of the squared norms of the {rows} of a step in each layer. {_layer_warning()}",
            "step",
            "layer",
            found.steps,
            tuple(name.removeprefix("model.") for name in found.layers),
            found.shares,
            z_title="share of the step",
        )


def _layer_warning() -> str:
    """From which share on a layer is a finding of `advise`."""
    return (
        "A high share is no fault by itself. A rule on the whole update, not on this map, warns of a layer with more "
        f"than {LAYER_SHARE:.0%} of it and {LAYER_GROWTH:g} times its share at the start, or more than "
        f"{LAYER_ALONE:.0%}; it is silent where too few steps are measured."
    )


def _running(curve: Curve) -> str:
    """That a curve is a running mean, if it is."""
    return f" Running mean of {curve.window} steps." if curve.is_smoothed else ""


def _spans_decades(series: Sequence[Series]) -> bool:
    """Whether positive values differ by more than a factor of 20, so that a linear axis would hide the small ones."""
    known = [y for one in series for y in one.y if y > 0]
    return bool(known) and max(known) > WIDE_RANGE * min(known)


def _rank_over_null() -> tuple[Callable[[StoredGroup], float], Callable[[StoredGroup], float]]:
    return _reading("effective_rank"), _reading("effective_rank_orthogonal")


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


def _scalar(
    run: RunReading, name: str, shown: str, *others: str, points: bool = False, limits: tuple[float, float] = ANY
) -> tuple[Series, ...]:
    """A scalar over steps; those whose self-check failed are points of their own."""
    failed = _drawn(scalar_curve(run, name, *others, failed=True), f"{shown}, {FAILED}", points=True)
    return (*_drawn(scalar_curve(run, name, *others), shown, points=points, limits=limits), *failed)


def _drawn(curve: Curve, name: str, *, points: bool = False, limits: tuple[float, float] = ANY) -> tuple[Series, ...]:
    """The running mean of a curve with its band, and behind it the value of every step; or its values as points.

    `limits` are the least and the largest value that the quantity can have.
    """
    curve = bounded_band(curve, *limits)
    if not curve:
        return ()
    if points:
        return (Series(name, curve.steps, curve.raw, points=True),)
    if not curve.is_smoothed:
        return (Series(name, curve.steps, curve.raw),)
    behind = Series(f"{name}, {STEP_SUFFIX}", curve.steps, curve.raw, role="raw")
    return (behind, Series(name, curve.steps, curve.mean, curve.low, curve.high))


def _null(curve: Curve, name: str) -> tuple[Series, ...]:
    return (Series(name, curve.steps, curve.mean, role="null"),) if curve else ()


def _constant(run: RunReading, beside: str, name: str, value: float, role: Role) -> tuple[Series, ...]:
    """A horizontal line over the steps at which a scalar was logged."""
    steps, _ = run.series(beside)
    return _horizontal(steps, name, value, role)


def _level(groups: Sequence[StoredGroup], name: str, value: float, role: Role) -> tuple[Series, ...]:
    """A horizontal line over the steps of some groups."""
    return _horizontal([group.record.step for group in groups], name, value, role)


def _horizontal(steps: Sequence[float | int], name: str, value: float, role: Role) -> tuple[Series, ...]:
    if not steps or not math.isfinite(value):
        return ()
    ends = tuple(dict.fromkeys((float(steps[0]), float(steps[-1]))))
    return (Series(name, ends, (value,) * len(ends), role=role),)


def _by_right(live: Sequence[StoredGroup]) -> Iterator[Series]:
    for size in sorted({group.size for group in live if group.right is not None}):
        here = [group for group in live if group.size == size and group.right is not None and 0 < group.right < size]
        counts = sorted({group.right for group in here if group.right is not None})
        if not counts:
            continue
        x = tuple(map(float, counts))
        shown: tuple[tuple[str, str, Role], ...] = (
            (f"R = {size}", "effective_rank", "measured"),
            (f"R = {size}, null: if unrelated", "effective_rank_orthogonal", "null"),
        )
        for name, key, role in shown:
            values = [[getattr(group.reading, key, math.nan) for group in here if group.right == k] for k in counts]
            if not all(math.isnan(value) for part in values for value in part):
                yield _with_intervals(name, x, values, role)


def _with_intervals(name: str, x: tuple[float, ...], values: Sequence[Sequence[float]], role: Role) -> Series:
    made: list[Estimate] = [mean_of_many(part) for part in values]
    y, low, high = (tuple(getattr(one, field) for one in made) for field in ("value", "low", "high"))
    return Series(name, x, y, low, high) if role == "measured" else Series(name, x, y, role=role)
