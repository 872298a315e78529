"""Four indicators of a run: does it learn, do its prompts teach, is there signal in a step, are rollouts cut off."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from scoregram.bootstrap import FEWEST, change_over_thirds, difference, line_change, mean_estimate, mean_of_many, t_mean
from scoregram.exhibits import Estimate, cell_text
from scoregram.reading.curves import Curve, complement, entropy_curve, live_curve, running_curve, scalar_curve
from scoregram.reading.run import GREEDY_TEST, SAMPLED_TEST, UNKNOWN_ESTIMATE, EvaluationRewards, RunReading

IndicatorState = Literal["good", "watch", "act", "unknown"]
"""The plain word of an indicator: nothing to do, look again later, change something, or not measured."""

LIVE_GOOD, LIVE_ACT = 0.5, 0.2
"""Share of live groups from which an indicator is good, and below which it says act."""
NOISE_ACT = 4.0
"""Factor between noise scale and batch size above which an indicator says act."""
CUT_GOOD, CUT_ACT = 0.1, 0.3
"""Share of truncated rollouts up to which an indicator is good, and above which it says act."""
SHARES, NO_SCALE = (0.0, 1.0), (math.nan, math.nan)
"""What the drawing of a share spans, and that of a quantity without natural limits."""
LEAST_FALL = 0.1
"""Part of the first third's entropy or truncation that must be gone before a page names it."""
FEWEST_STEPS = 6
"""Trained steps below which the reward of a run has no trend."""
SEEN_ERRORS = 1.96 + 0.84
"""Standard errors of a change whose 95 % interval excludes 0 in four of five repetitions."""
MOST_TIMES_LONGER = 10
"""Times the present length beyond which a longer run is no answer."""
EVALUATED = "first to the last evaluation"
"""Between which points of a run a change on test problems is."""
FEWEST_IN_A_THIRD = 3
"""Logged values in a third of a run below which its thirds are not compared: a line is fitted instead."""


@dataclass(frozen=True, kw_only=True)
class Indicator:
    """One number that tells how a run goes."""

    name: str
    state: IndicatorState
    headline: str
    """The number in words, short enough for a tile."""
    sentence: str
    """What was compared, and what would be good."""
    curve: Curve
    """The quantity over steps; without values if it was not logged."""
    change: Estimate = UNKNOWN_ESTIMATE
    """Change of what is learnt; `nan` for the other indicators."""
    quantity: str = ""
    """What is learnt, such as `test accuracy`; empty for the other indicators, and where it has no change."""
    is_test: bool = False
    """Whether the quantity is measured on test problems."""
    arrow: str = ""
    """The quantity before and after, as the headline has them: `0.25 → 0.75`; empty without a quantity."""
    span: str = ""
    """Between which points of the run the arrow goes, such as `first to the last evaluation`; empty without an arrow.
    """
    target: float = math.nan
    """Value of the curve to reach or to stay below; `nan` if there is none."""
    goal: str = ""
    """The target in words, short enough for a label."""
    scale: tuple[float, float] = (math.nan, math.nan)
    """Values that a drawing of the curve spans at least, so that small changes look small; `nan` for none."""
    curve_name: str = ""
    """What the curve is, where a second one stands beside it."""
    beside: Curve = field(default_factory=lambda: running_curve((), ()))
    """Another curve of the same kind that the sentence speaks of; without values if there is none."""
    beside_name: str = ""


@dataclass(frozen=True)
class Gain:
    """Change of a mean between two points of a run."""

    before: Estimate
    after: Estimate
    change: Estimate
    problems: int = 0
    """Test problems; 0 if not known."""


def indicators(run: RunReading) -> tuple[Indicator, ...]:
    """The four indicators of a run, always in the same order."""
    return learning_indicator(run), teaching_indicator(run), signal_indicator(run), truncation_indicator(run)


def paired_gain(tests: EvaluationRewards, kind: str) -> Gain | None:
    """Mean reward at the first and the last evaluation, over the problems of both; None without two evaluations."""
    by_step = tests.get(kind, {})
    if len(by_step) < 2:
        return None
    first, last = by_step[min(by_step)], by_step[max(by_step)]
    both = sorted(first.keys() & last.keys())
    before, after = (mean_estimate([each[name] for name in both]) for each in (first, last))
    return Gain(before, after, mean_estimate([last[name] - first[name] for name in both]), len(both))


def learning_indicator(run: RunReading) -> Indicator:
    """Change of the reward on test problems, else of the test accuracy, else of the training reward.

    If sampled rollouts get better on test problems and greedy ones do not, the indicator says `watch`: the policy may
    only have become less random.
    """
    curve, greedy = scalar_curve(run, "reward"), accuracy_gain(run)
    for kind, words in ((SAMPLED_TEST, "sampled"), (GREEDY_TEST, "greedy")):
        if gain := paired_gain(run.tests, kind):
            sentence = f"Mean over {gain.problems} problems, {words}, first and last evaluation."
            curve = evaluation_curve(run.tests, kind)
            found = _learning("test reward", gain, sentence, curve, span=EVALUATED, is_test=True)
            if greedy is None or kind != SAMPLED_TEST:
                return found
            return _beside_greedy(found, greedy, accuracy_curve(run))
    if greedy is not None:
        problems = f"{greedy.problems} test problems" if greedy.problems else "test problems"
        sentence = f"Greedy, on {problems}, first and last evaluation."
        gain = replace(greedy, problems=0)
        return _learning("test accuracy", gain, sentence, accuracy_curve(run), span=EVALUATED, is_test=True)
    _, rewards = run.series("reward")
    known = [reward for reward in rewards if not math.isnan(reward)]
    if len(known) < FEWEST_STEPS:
        sentence = f"A trend needs {FEWEST_STEPS} steps or two evaluations."
        headline = f"{len(known)} step{'s' * (len(known) != 1)}" if known else "no step yet"
        return Indicator(name="learning", state="unknown", headline=headline, sentence=sentence, curve=curve)
    if len(known) < 3 * FEWEST_IN_A_THIRD:
        gain = Gain(Estimate(known[0]), Estimate(known[-1]), line_change(known))
        sentence = f"Change {known[-1] - known[0]:.2f}, last minus first of {len(known)} logged values of the training "
        sentence += f"reward. A straight line through all of them rises by {cell_text(gain.change)}; "
        sentence += "no test problem was evaluated."
        found = _learning("training reward", gain, "", curve, span="first to the last logged value")
        return replace(found, sentence=sentence)
    third = math.ceil(len(known) / 3)
    before, after = t_mean(known[:third]), t_mean(known[-third:])
    sentence = "On training prompts, first and last third of the steps; no test problem was evaluated."
    gain = Gain(before, after, change_over_thirds(known))
    return _learning("training reward", gain, sentence, curve, span="first to the last third of the steps")


def accuracy_gain(run: RunReading) -> Gain | None:
    """Greedy accuracy on test problems at the first and the last evaluation; None without two evaluations.

    The change is paired by problem where the rewards of these evaluations are stored and each is 0 or 1. Otherwise it
    is that of two independent accuracies, whose interval is wider.
    """
    tested = run.greedy_accuracies
    if len(tested) < 2:
        return None
    before, after = tested[0].accuracy, tested[-1].accuracy
    paired = paired_gain(run.tests, GREEDY_TEST)
    is_binary = {reward for rewards in run.tests.get(GREEDY_TEST, {}).values() for reward in rewards.values()} <= {0, 1}
    change = paired.change if paired is not None and is_binary else difference(after, before)
    return Gain(before, after, change, tested[-1].problems)


def steps_to_show(run: RunReading) -> int | None:
    """Steps after which a rise of the greedy accuracy would probably show, if it rose as fast as the sampled reward.

    `S · (z_.975 + z_.8) · s / Δ` for `S` steps so far, the change `Δ` of the sampled reward on test problems and the
    standard error `s` of the change of the greedy accuracy, rounded up to two digits. None if the greedy accuracy rises
    already or the sampled reward does not, if it would take more than ten times the steps, or if either was not
    evaluated twice.
    """
    sampled, greedy = paired_gain(run.tests, SAMPLED_TEST), accuracy_gain(run)
    if not run.steps or sampled is None or greedy is None or greedy.change.low > 0 or not sampled.change.low > 0:
        return None
    error = (greedy.change.high - greedy.change.low) / (2 * 1.96)
    steps = run.steps[-1] * SEEN_ERRORS * error / sampled.change.value
    if not run.steps[-1] < steps <= MOST_TIMES_LONGER * run.steps[-1]:
        return None
    unit = 10 ** max(0, math.floor(math.log10(steps)) - 1)
    return unit * math.ceil(steps / unit)


def lost_randomness(run: RunReading) -> str:
    """How entropy and truncation fell from the first to the last third, in one sentence; empty if neither did.

    A policy that is less random samples better answers without knowing more.
    """
    entropy, finished = entropy_curve(run).raw, scalar_curve(run, "finished").raw
    told = []
    if (ends := third_means(entropy)) and ends[1] < (1 - LEAST_FALL) * ends[0]:
        told.append(f"entropy {ends[0]:.2f} → {ends[1]:.2f}")
    if (ends := third_means([1 - share for share in finished])) and ends[1] < (1 - LEAST_FALL) * ends[0]:
        told.append(f"truncated {ends[0]:.1%} → {ends[1]:.1%}")
    return f"The policy may only have become less random (first to last third: {', '.join(told)})." if told else ""


def third_means(values: Sequence[float]) -> tuple[float, float] | None:
    """Means of the first and of the last third of the known values; None below three.

    Example:
        >>> third_means([1.0, math.nan, 5.0, 2.0, 4.0]), third_means([1.0, 2.0])
        ((1.0, 4.0), None)
    """
    known = [value for value in values if not math.isnan(value)]
    third = len(known) // 3
    return (sum(known[:third]) / third, sum(known[-third:]) / third) if third else None


def evaluation_curve(tests: EvaluationRewards, kind: str) -> Curve:
    """Mean reward on test problems at every evaluation, with 95 % intervals over problems."""
    by_step = sorted(tests.get(kind, {}).items())
    made = [mean_of_many(list(rewards.values())) for _, rewards in by_step]
    curve = running_curve([step for step, _ in by_step], [one.value for one in made])
    if curve.is_smoothed:
        return curve
    return replace(curve, low=tuple(one.low for one in made), high=tuple(one.high for one in made))


def accuracy_curve(run: RunReading) -> Curve:
    """Greedy accuracy on test problems at every evaluation, with its interval where the run logged one."""
    curve = scalar_curve(run, "eval/accuracy")
    low, high = (run.series(f"eval/accuracy_{end}")[1] for end in ("low", "high"))
    is_bounded = len(low) == len(high) == len(curve.steps)
    return replace(curve, low=low, high=high) if is_bounded and not curve.is_smoothed else curve


def _beside_greedy(found: Indicator, greedy: Gain, curve: Curve) -> Indicator:
    rises = greedy.change.low > 0
    end = "" if rises else ", no rise can be shown"
    told = f"Greedy accuracy {greedy.before.value:.3f} → {greedy.after.value:.3f}{end}."
    state: IndicatorState = "watch" if found.state == "good" and not rises else found.state
    tops = [top for top in (found.scale[1], share_scale(curve)[1]) if not math.isnan(top)]
    return replace(
        found,
        state=state,
        sentence=f"{found.sentence} {told}",
        curve_name="test reward, sampled",
        beside=curve,
        beside_name="test accuracy, greedy",
        scale=(0.0, max(tops)) if len(tops) == 2 else found.scale,
    )


def _learning(quantity: str, gain: Gain, sentence: str, curve: Curve, *, span: str, is_test: bool = False) -> Indicator:
    change = gain.change
    state: IndicatorState = "watch"
    if change.low > 0:
        state = "good"
    elif change.high < 0:
        state = "act"
    digits = 3 if gain.problems and abs(change.value) < 0.05 else 2
    arrow = f"{_short(gain.before.value, digits)} → {_short(gain.after.value, digits)}"
    return Indicator(
        name="learning",
        state=state,
        headline=f"{quantity} {arrow}",
        sentence=f"Change {cell_text(change)}. {sentence}",
        curve=curve,
        change=change,
        quantity=quantity,
        is_test=is_test,
        arrow=arrow,
        span=span,
        scale=share_scale(curve),
    )


def share_scale(curve: Curve) -> tuple[float, float]:
    """From 0 to a round number above all values if these lie between 0 and 1; `nan` otherwise."""
    known = [value for _, value in curve.points]
    return (0.0, round_above(max(known))) if known and min(known) >= 0 and max(known) <= 1 else NO_SCALE


def round_above(value: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that is not below a value; 1 for 0.

    Example:
        >>> round_above(0.064), round_above(0.96), round_above(0.2)
        (0.1, 1.0, 0.2)
    """
    if not value > 0:
        return 1.0
    power = math.floor(math.log10(value))
    return next(end for end in (float(f"{digit}e{power}") for digit in (1, 2, 5, 10)) if end >= value)


def teaching_indicator(run: RunReading) -> Indicator:
    """Share of groups whose rewards differ: the others give the update nothing."""
    name, curve, live = "prompts that teach", live_curve(run), last_live_share(run)
    if math.isnan(live.value):
        sentence = "The outcome of groups is not known."
        return Indicator(name=name, state="unknown", headline="not known", sentence=sentence, curve=curve)
    is_good = live.value >= LIVE_GOOD if math.isnan(live.low) else live.low > LIVE_GOOD
    state = "good" if is_good else "act" if live.value < LIVE_ACT else "watch"
    sentence = f"Share of live groups, those whose rewards differ: {cell_text(live)}{_at_measured_steps(run)}."
    sentence += " Rewards are graded, so nearly equal ones make a group live too." if run.is_graded else ""
    sentence += " The interval includes the target." if live.value >= LIVE_GOOD and not is_good else ""
    known = {"headline": f"{live.value:.0%} of groups are live", "sentence": sentence, "curve": curve, "scale": SHARES}
    return Indicator(name=name, state=state, target=LIVE_GOOD, goal=f"target: {LIVE_GOOD:.0%} or more", **known)


def _at_measured_steps(run: RunReading) -> str:
    """At how many steps of the last third groups were counted, if not at every logged one; else empty."""
    logged = {int(step) for step in run.live_share[0]} & set(run.last_third) if run.has_whole_groups else set()
    counted = logged or {group.record.step for group in run.last_groups}
    trained = run.last_third.stop - run.last_third.start
    return f", at {len(counted)} of the {trained} steps" if 0 < len(counted) < trained else ""


def last_live_share(run: RunReading) -> Estimate:
    """Share of live groups over the last third of all logged steps, as `advise` has it; else of the stored groups."""
    last = [share for step, share in zip(*run.live_share, strict=True) if int(step) in run.last_third]
    if last and run.has_whole_groups:
        return mean_estimate(last)
    dead = run.summary.dead
    return Estimate(1 - dead.value, 1 - dead.high, 1 - dead.low)


def signal_indicator(run: RunReading) -> Indicator:
    """Noise scale beside the rollouts of a step: with that many rollouts, signal and error have equal power."""
    name, curve = "signal in a step", scalar_curve(run, "gram/snr")
    scale, batch = run.summary.noise_scale, run.batch_size
    if math.isnan(scale.value) or not math.isfinite(batch):
        why = "withheld: a self-check failed" if run.is_withheld else "not measured"
        sentence = "It needs the Gram between prompts, groups of 4 or more, and two prompts with all rewards"
        sentence += "." if run.draws_evenly else ", all drawn evenly; this run drew them by their gradients."
        return Indicator(name=name, state="unknown", headline=why, sentence=sentence, curve=curve, target=1.0)
    known = {"curve": curve, "scale": SHARES, "target": 1.0, "goal": "target: signal to noise 1"}
    if math.isnan(scale.low) or run.trust.has_few_steps:
        sentence = f"Measure more steps: whether your {batch:g} rollouts are enough takes {FEWEST} steps in the last "
        sentence += f"third of the measured ones; here are {run.trust.last_measured}."
        return Indicator(name=name, state="unknown", headline="too few measured steps", sentence=sentence, **known)
    state: IndicatorState = "watch"
    if scale.low > NOISE_ACT * batch:
        state = "act"
    elif scale.high <= batch:
        state = "good"
    sentence = f"{_asked(scale, batch)} {_signal(run.summary.snr, scale, batch)}"
    is_open = math.isinf(scale.high) and NOISE_ACT * batch >= scale.low
    told = _most_signal(run.summary.snr) if is_open else _needs(scale, batch)
    headline = f"{told}{run.trust.mark}"
    return Indicator(name=name, state=state, headline=headline, sentence=sentence, **known)


def _most_signal(snr: Estimate) -> str:
    """`signal to noise at most 0.31`, or that the interval has no upper end."""
    return (
        f"signal to noise at most {cell_text(snr.high)}" if math.isfinite(snr.high) else "signal to noise not resolved"
    )


def _signal(snr: Estimate, scale: Estimate, batch: float | int) -> str:
    """Where the number of rollouts in the headline comes from."""
    if math.isinf(scale.high) and math.isinf(snr.high):
        return (
            f"Signal to noise is estimated as {cell_text(snr.value)}, but its 95 % interval has no ends: the error of "
            "a step is too uncertain to divide by. Measure more steps."
        )
    if math.isinf(scale.high) and math.isfinite(scale.low):
        return (
            f"Signal to noise may be 0; {cell_text(snr.high)} is the upper end of its 95 % interval. For 1, a step "
            f"needs {batch:g} / {cell_text(snr.high)} = {_count(scale.low)} rollouts or more."
        )
    return f"Signal to noise is {cell_text(snr)}, about the rollouts you use over those needed."


def _asked(scale: Estimate, batch: float | int) -> str:
    """What the indicator asks of its reader."""
    if scale.low > NOISE_ACT * batch:
        return "Use more rollouts per step: they raise the signal to noise in proportion."
    if scale.high <= batch:
        return "Enough rollouts: a step has more signal than noise."
    if scale.low > batch and math.isfinite(scale.high):
        told = "More rollouts per step would help; it is urgent once the whole interval lies above"
        return f"{told} {NOISE_ACT:g} times as many."
    return "Undecided: to know whether more rollouts per step would pay takes more measured steps."


def _needs(scale: Estimate, batch: float | int) -> str:
    """`needs 220 [110, 829] rollouts, you use 64`."""
    if math.isinf(scale.value):
        return f"has no signal that {batch:g} rollouts resolve"
    if math.isinf(scale.high) and math.isfinite(scale.low):
        return f"needs at least {_count(scale.low)} rollouts, you use {batch:g}"
    ends = "" if math.isnan(scale.low) else f" [{_count(scale.low)}, {_count(scale.high)}]"
    return f"needs {_count(scale.value)}{ends} rollouts, you use {batch:g}"


def truncation_indicator(run: RunReading) -> Indicator:
    """Share of rollouts that the limit on tokens cut off, and of ratios that the objective clipped."""
    name = "truncated or clipped"
    finished, cut = run.last_values("finished"), run.last_values("completions/clipped_ratio")
    curve = complement(scalar_curve(run, "finished")) if finished else scalar_curve(run, "completions/clipped_ratio")
    share = 1 - sum(finished) / len(finished) if finished else sum(cut) / len(cut) if cut else math.nan
    clipped = [run.last_mean(key) for key in ("clip_ratio/region_mean", "clip_ratio")]
    known = [value for value in clipped if not math.isnan(value)]
    ratios = f" {known[0]:.1%} of the importance ratios were clipped." if known else f" {_unlogged_ratios(run)}."
    if math.isnan(share):
        sentence = f"The run did not log which rollouts ended by themselves.{ratios}"
        return Indicator(name=name, state="unknown", headline="not logged", sentence=sentence, curve=curve)
    state = "good" if share <= CUT_GOOD else "act" if share > CUT_ACT else "watch"
    sentence = f"Share of rollouts that the limit on tokens ended.{ratios}"
    limit = _token_limit(run) if share > CUT_GOOD else ""
    known = {
        "headline": f"{share:.0%} of rollouts truncated{limit}",
        "sentence": sentence,
        "curve": curve,
        "scale": SHARES,
    }
    return Indicator(name=name, state=state, target=CUT_GOOD, goal=f"target: {CUT_GOOD:.0%} or less", **known)


def _unlogged_ratios(run: RunReading) -> str:
    if run.setting("inner_updates", "num_iterations") == 1:
        return "With one update per batch every importance ratio is 1, so none is clipped"
    return "Clipped ratios were not logged"


def _token_limit(run: RunReading) -> str:
    limit = run.setting("max_new_tokens", "max_completion_length")
    return f" at {limit} tokens" if limit else ""


def _short(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) and abs(value) < 100 else cell_text(value)


def _count(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
