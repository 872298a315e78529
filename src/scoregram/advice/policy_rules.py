"""Rules on the policy, its updates and the machine that need nothing but the scalars of a run."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from scoregram.advice.findings import Alternative, Change, RuleVerdict, RunFinding, Undecided
from scoregram.advice.logs import RunLog, ScalarSeries
from scoregram.advice.reward_rules import CHANCE, deferred_verdict, is_solved_score, too_few
from scoregram.advice.trends import LEAST_STEPS, slope_estimate
from scoregram.bootstrap import binomial_tail, bootstrap_estimate
from scoregram.exhibits import Estimate

ENTROPY_LEFT, ENTROPY_GONE, ENTROPY_WATCHED = 0.25, 0.1, 0.5
"""Shares of the first entropy: below the first it has collapsed; below the third a rule extrapolates its decline to the
second."""
KL_WINDOW = 10
"""Most logged values at the end whose median is compared: in a long run a tenth would find an explosion late."""
KL_LIMIT, KL_WATCHED, KL_ACCELERATION = 1.0, 0.3, 4.0
"""Two limits in nats per token, and the largest ratio of the end to the middle third (a steady drift doubles)."""
CLIPPED_TOKENS = 0.3
THROUGHPUT_LEFT = 0.6
REPEATS = 5
"""Steps in a row whose numbers are exactly those of earlier steps."""
FINGERPRINT_NEEDS = "log mean length and mean reward at every step"


def entropy_collapse(log: RunLog) -> RuleVerdict:
    """The entropy of the policy has fallen to a small part of its first value, or will soon; not on a solved task."""
    entropy = log.series("entropy")
    if len(entropy) < LEAST_STEPS:
        return too_few(entropy, "log the entropy of the policy")
    start, mean = entropy.start, entropy.last_mean()
    if not start > 0:
        return None
    left = Estimate(mean.value / start, mean.low / start, mean.high / start)
    fell = f"The entropy fell from {start:.3g} to {mean.value:.3g} nats per token, the mean of the last third"
    arrival = collapse_step(entropy, ENTROPY_GONE * start)
    scores = (log.series("reward"), log.series("held_out"))
    if any(map(is_solved_score, scores)):  # a solved task needs no exploration
        return None
    if left.high < ENTROPY_LEFT:
        return RunFinding(
            name="entropy collapse",
            severity="critical" if left.high < ENTROPY_GONE else "warning",
            sentence=f"{fell}: rollouts of a prompt hardly differ.",
            since=entropy.since(entropy.values < ENTROPY_LEFT * start),
            number=left,
            label="entropy of the last third, over that of the first steps",
            evidence=f"found if the last third has less than {ENTROPY_LEFT:.0%} of the first steps' entropy.",
            change=_more_entropy(log),
            confidence="certain",
        )
    if arrival is None or left.high >= ENTROPY_WATCHED or arrival > _twice_as_long(entropy):
        return None
    return RunFinding(
        name="entropy collapse",
        severity="warning",
        sentence=f"{fell}, and falls steadily: at this rate a tenth of the first value is left at step {arrival}.",
        since=entropy.since(entropy.values < ENTROPY_WATCHED * start),
        number=left,
        label="entropy of the last third, over that of the first steps",
        evidence=f"found below {ENTROPY_WATCHED:.0%} if the decline of its logarithm over the last two thirds is "
        "significant.",
        change=_more_entropy(log),
        confidence="possible",
    )


def _twice_as_long(series: ScalarSeries) -> float:
    """The step at which a log would be twice as long as it is, wherever it begins."""
    first, last = int(series.steps[0]), int(series.steps[-1])
    return last + (last - first) * len(series) / (len(series) - 1)


def _half_rate(log: RunLog) -> str:
    """` from RATE to HALF`, where the config or the log names the learning rate; else empty."""
    stored, logged = log.setting("learning_rate"), log.series("learning_rate").values
    rate = stored if isinstance(stored, float) else float(logged.max()) if len(logged) else 0.0
    return f" from {rate:g} to {rate / 2:g}" if rate > 0 else ""


def _more_entropy(log: RunLog) -> Change:
    """Half the learning rate, and a higher upper clip if tokens are clipped."""
    clipped = log.series("clipped_tokens").values
    name = "clip_ratio_high" if log.is_of_verl else "epsilon_high in TRL"
    higher = Alternative("clip range", "up", f"Raise the upper clip ({name}) from 0.2 to 0.28, as DAPO does.")
    return Change(
        knob="learning rate",
        direction="down",
        sentence=f"Halve the learning rate{_half_rate(log)}.",
        effect=f"the entropy falls about half as fast{_slower_end(log)}; the reward may rise more slowly; how much "
        "is unknown until a run with this change.",
        alternatives=(higher,) if clipped.any() else (),
    )


def _slower_end(log: RunLog) -> str:
    """Where the mean of the last third would be after as many steps if the entropy's logarithm fell half as fast."""
    entropy = log.series("entropy")
    mean = entropy.last_mean().value if len(entropy) else math.nan
    if not (mean > 0 and entropy.start > 0):
        return ""
    slower = math.sqrt(entropy.start * mean)
    return f": about {slower:.2g} nats per token in the last third of as many steps, now {mean:.2g}"


def collapse_step(entropy: ScalarSeries, level: float) -> int | None:
    """Step at which the entropy reaches a level if its logarithm goes on falling as over the last two thirds.

    None unless the decline is significant (t test of the slope over block means, which are less dependent than steps)
    and the last third still falls at half its rate or faster: a single drop is no steady decline.
    """
    tail = slice(len(entropy) // 3, None)
    steps, values = entropy.steps[tail].astype(float), entropy.values[tail]
    if len(values) < LEAST_STEPS or not (values > 0).all():
        return None
    slope, ends = slope_estimate(steps, np.log(values))
    late = slice(len(values) // 2, None)
    if not ends[1] < 0 or not float(np.polyfit(steps[late], np.log(values[late]), 1)[0]) <= slope / 2:
        return None
    now = float(np.log(values[-max(3, len(values) // 10) :]).mean())
    return int(steps[-1] + max(0.0, (math.log(level) - now) / slope))


def kl_blow_up(log: RunLog) -> RuleVerdict:
    """The policy has left the reference, or leaves it faster and faster."""
    kl = log.series("kl")
    if len(kl) < LEAST_STEPS:
        return too_few(kl, "log the KL divergence from the reference, if there is one")
    middle = float(np.median(kl.values[len(kl) // 3 : -max(3, len(kl) // 3)]))
    end = float(np.median(kl.values[-max(3, min(KL_WINDOW, len(kl) // 10)) :]))
    is_far, is_faster = end > KL_LIMIT, end > KL_WATCHED and end > KL_ACCELERATION * max(middle, 1e-6)
    if not (is_far or is_faster):
        return None
    mean = kl.last_mean()
    return RunFinding(
        name="KL blow-up",
        severity="critical" if is_far else "warning",
        sentence=f"The policy was {mean.value:.3g} nats per token away from the reference on average over the last "
        f"third{', and leaves it faster and faster.' if is_faster else '.'}",
        since=kl.since(kl.values > (KL_LIMIT if is_far else KL_WATCHED)),
        number=mean,
        label="mean KL of the last third, nats per token",
        evidence=f"the median of the last steps is {end:.3g}; found if that is above {KL_LIMIT:g}, or above "
        f"{KL_WATCHED:g} and {KL_ACCELERATION:g} times the middle third.",
        change=Change(
            knob="learning rate",
            direction="down",
            sentence=f"Lower the learning rate{_half_rate(log)}.",
            effect=f"less than {end:.3g} nats per token at the end of as many steps. How much less is unknown: the "
            "KL does not grow in proportion to the learning rate.",
            alternatives=(
                Alternative(
                    "KL weight", "up", f"Raise the KL weight ({'kl_loss_coef' if log.is_of_verl else 'beta'})."
                ),
            ),
        ),
        confidence="certain",
    )


def clip_saturation(log: RunLog) -> RuleVerdict:
    """A large share of the tokens is clipped, so that inner updates have no effect on them."""
    clipped = log.series("clipped_tokens")
    if len(clipped) < LEAST_STEPS:
        return too_few(clipped, "log the share of clipped tokens")
    share = clipped.last_mean()
    if not share.low > CLIPPED_TOKENS:
        return None
    return RunFinding(
        name="clip saturation",
        severity="warning",
        sentence=f"{share.value:.0%} of the tokens are outside the clip range: most of a further update is discarded.",
        since=clipped.since(clipped.values > CLIPPED_TOKENS),
        number=share,
        label="share of clipped tokens in the last third",
        evidence=f"found if the whole 95 % interval lies above {CLIPPED_TOKENS:.0%}.",
        change=Change(
            knob="learning rate",
            direction="down",
            sentence=f"Lower the learning rate{_half_rate(log)}.",
            effect=f"less than {share.value:.0%} of the tokens clipped; below 10% is usual. How far it falls is "
            "unknown until a run with this change.",
            alternatives=(Alternative("updates per batch", "down", "Do fewer updates on each batch."),),
        ),
    )


def idle_clipping(log: RunLog) -> RuleVerdict:
    """Several updates on each batch, and no token is ever clipped: the clip range has no effect."""
    clipped, updates = log.series("clipped_tokens"), log.setting("inner_updates", "num_iterations", "ppo_epochs")
    if updates is not None and int(updates) < 2:
        return None
    if len(clipped) < LEAST_STEPS:
        return too_few(clipped, "log the share of clipped tokens")
    if bool(clipped.values.any()):
        return None
    if updates is None:
        return Undecided("store the number of updates on each batch in the run's config")
    return RunFinding(
        name="idle clipping",
        severity="note",
        sentence=f"Each batch is used for {int(updates)} updates, and not one token was clipped in {len(clipped)} "
        "steps.",
        since=int(clipped.steps[0]),
        number=Estimate(0.0, 0.0, 3 / len(clipped)),
        label="share of steps with a clipped token",
        evidence="the ratio never left the clip range: the further updates hardly move the policy.",
        change=Change(
            knob="updates per batch",
            direction="down",
            sentence="Use one update per batch.",
            effect=f"nearly the same learning from 1 update per batch, now {int(updates)}.",
            alternatives=(Alternative("learning rate", "up", "Raise the learning rate."),),
        ),
        confidence="certain",
    )


def throughput_rot(log: RunLog) -> RuleVerdict:
    """Steps take longer and longer for the same number of tokens."""
    speed = log.series("tokens_per_second")
    if len(speed) < 3 * LEAST_STEPS:
        seconds, length = log.series("step_seconds"), log.series("length")
        is_timed = np.isin(seconds.steps, length.steps)
        if is_timed.sum() < 3 * LEAST_STEPS:
            logged = speed if len(speed) else seconds
            needs = "log tokens per second, or seconds per step beside the length at every step"
            return too_few(logged, needs, 3 * LEAST_STEPS)
        lengths = length.values[np.isin(length.steps, seconds.steps)]
        speed = ScalarSeries(seconds.steps[is_timed], lengths / np.maximum(seconds.values[is_timed], 1e-9))
    first, last = float(np.median(speed.first)), float(np.median(speed.last))
    middle = float(np.median(speed.values[len(speed.first) : -len(speed.last)]))
    _, ends = slope_estimate(speed.steps.astype(float), np.log(np.maximum(speed.values, 1e-9)))
    left = last / first if first > 0 else math.nan
    # one slowdown of the machine is no decline: the middle third must lie in between, and the slope be significant
    if not (left < THROUGHPUT_LEFT and last < middle < first and ends[1] < 0) or _has_shorter_steps(log):
        return None
    ratio = bootstrap_estimate(len(speed.last), lambda drawn: np.median(speed.last[drawn], axis=-1) / first)
    return RunFinding(
        name="throughput rot",
        severity="warning",
        sentence=f"Tokens per second fell to {left:.0%} of the first third, and still fall.",
        since=speed.since(speed.values < THROUGHPUT_LEFT * first),
        number=ratio,
        label="median of the tokens per second in the last third, over that in the first",
        evidence=f"found below {THROUGHPUT_LEFT:.0%} if the decline is steady and significant. Other work on the "
        "machine "
        "looks the same.",
        change=Change(
            knob="infrastructure",
            direction="repair",
            sentence="Look for memory that grows (caches, lists of tensors, logged tables), and restart from a "
            "checkpoint to compare.",
            effect=f"the speed of the first steps, {1 / left:.1f} times the present one, if memory is the cause.",
            steps=(
                "Log the memory of the process at every step.",
                "If it grows, look for lists of tensors, logged tables and caches that nothing empties.",
                "If it does not, restart from the last checkpoint: if the speed comes back, the process was the cause.",
            ),
        ),
        confidence="possible",
    )


def _has_shorter_steps(log: RunLog) -> bool:
    """Whether steps take no longer than at first, or, without times, texts have become shorter.

    A step has costs that do not depend on its tokens, so with shorter texts there are fewer tokens per second.
    """
    seconds, length = log.series("step_seconds"), log.series("length")
    if len(seconds) >= LEAST_STEPS:
        return float(np.median(seconds.last)) <= float(np.median(seconds.first))
    return len(length) >= LEAST_STEPS and float(length.last.mean()) < THROUGHPUT_LEFT * float(length.first.mean())


def stuck_batch(log: RunLog) -> RuleVerdict:
    """Neighbouring steps have exactly the same reward and length: the same rollouts are used again."""
    known = fingerprints(log)
    if known is None:
        return _fingerprints_needed(log)
    repeated = [step for earlier, step in pairwise(known) if known[earlier] == known[step]]
    if len(repeated) < REPEATS or not is_surprising(repeated, known, lag=1):
        return None
    found = long_stretches(repeated, list(known))
    is_regular = repeats_regularly(repeated, list(known))
    return RunFinding(
        name="stuck batch",
        severity="warning" if is_regular else "critical",
        sentence=f"{len(found)} steps have exactly the reward and the mean length of the step before: the same "
        "rollouts are "
        "used again.",
        since=found[0],
        number=Estimate(len(found) / (len(known) - 1)),
        label="share of steps that repeat the one before",
        count=f"{len(found)} of {len(known) - 1}",
        evidence=f"found for {REPEATS} or more such steps, if equal numbers by chance have a probability below 1e-4. "
        "Several updates on each batch look the same where every update is logged"
        + (", and the repeats come in stretches of one length, as they would." if is_regular else "."),
        change=Change(
            knob="data loader",
            direction="repair",
            sentence="Check that the data loader advances and that generation is not served from a cache.",
            effect="the numbers of neighbouring steps differ. What the run then learns is unknown: "
            f"{len(found)} steps used rollouts again.",
            steps=(
                *(
                    ["See how many updates each batch is used for: if as many steps repeat, change nothing."]
                    * is_regular
                ),
                "Print the first prompt and the first completion of two steps that follow each other.",
                "If the prompts are equal, the data loader does not advance: check its sampler and its resume state.",
                "If only the completions are equal, generation is served from a cache or with one seed.",
            ),
        ),
        confidence="possible" if is_regular else "likely",
    )


def lost_seed(log: RunLog) -> RuleVerdict:
    """A stretch of the run repeats an earlier one exactly: the seed was set again, as after a careless resume."""
    known = fingerprints(log)
    if known is None:
        return _fingerprints_needed(log)
    if isinstance(stuck_batch(log), RunFinding):
        return deferred_verdict("stuck batch")
    lag, repeated = most_repeated(known)
    if len(repeated) < REPEATS or not is_surprising(repeated, known, lag=lag):
        return None
    steps = long_stretches(repeated, list(known))
    return RunFinding(
        name="lost seed",
        severity="critical",
        sentence=f"{len(steps)} steps repeat the reward and the length of {lag} logged steps before: the same random "
        "numbers "
        "are drawn again.",
        since=steps[0],
        number=Estimate(len(steps) / (len(known) - lag)),
        label="share of steps that repeat the one at this distance",
        count=f"{len(steps)} of {len(known) - lag}",
        evidence=f"found for {REPEATS} or more such steps, if equal numbers by chance have a probability below 1e-4.",
        change=Change(
            knob="seed",
            direction="repair",
            sentence="Save and restore the state of the random generators and of the data loader in the checkpoint.",
            effect=f"a resumed run continues instead of repeating {len(steps)} steps.",
            steps=(
                "Store `torch.get_rng_state()`, those of numpy and random, and the position of the data "
                "loader in every checkpoint.",
                "Restore them after a resume, before the first batch is drawn.",
                f"Continue from a checkpoint before step {steps[0]}.",
            ),
        ),
        confidence="likely",
    )


Fingerprint = tuple[float, float]
"""Mean reward and mean length of a step, to the last digit."""


def fingerprints(log: RunLog) -> dict[int, Fingerprint] | None:
    """Step → mean reward and mean length; None if the log has too few of them.

    Steps of which every completion was cut off, or in which no group is live, are left out: equal numbers there say
    nothing about the rollouts.
    """
    if not log.has("reward", "length", least=LEAST_STEPS):
        return None
    reward, length = (log.series(name).by_step() for name in ("reward", "length"))
    cut, dead = (log.series(name).by_step() for name in ("truncated", "dead_share"))
    return {
        step: (reward[step], length[step])
        for step in sorted(reward.keys() & length.keys())
        if cut.get(step, 0.0) < 1 and dead.get(step, 0.0) < 1
    }


def _fingerprints_needed(log: RunLog) -> Undecided:
    shorter = min((log.series(name) for name in ("reward", "length")), key=len)
    return too_few(shorter, FINGERPRINT_NEEDS)


def long_stretches(repeated: Sequence[int], steps: Sequence[int]) -> list[int]:
    """The repeats of a fault without those by chance: of the stretches that are at least half as long as the longest.

    A single step in between does not end a stretch. Lengths are counted in repeats.

    Example:
        >>> long_stretches([5, 15, 16, 18, 19], range(1, 20))
        [15, 16, 18, 19]
    """
    places = {step: place for place, step in enumerate(steps)}
    stretches: list[list[int]] = []
    for step in repeated:
        if stretches and places[step] - places[stretches[-1][-1]] <= 2:
            stretches[-1].append(step)
        else:
            stretches.append([step])
    longest = max(map(len, stretches))
    return [step for stretch in stretches if 2 * len(stretch) >= longest for step in stretch]


def repeats_regularly(repeated: Sequence[int], steps: Sequence[int]) -> bool:
    """Whether the repeats come in three stretches or more of one length, the last one aside, with one step between.

    Example:
        >>> repeats_regularly([2, 3, 5, 6, 8, 9, 11], range(1, 12)), repeats_regularly([2, 3, 5, 9], range(1, 12))
        (True, False)
    """
    is_repeat = [step in set(repeated) for step in steps]
    fresh = [place for place, one in enumerate(is_repeat) if not one]
    gaps = [later - earlier for earlier, later in pairwise(fresh)]
    return len(gaps) >= 3 and min(gaps) == max(gaps) >= 2 and len(steps) - 1 - fresh[-1] < gaps[0]


def is_surprising(repeated: Sequence[int], known: Mapping[int, Fingerprint], lag: int) -> bool:
    """Whether the repeats at one distance are too many for chance: a binomial tail below 1e-4 over all distances.

    A run with one fingerprint throughout is stuck if it is long enough.
    """
    marks = list(known.values())
    if len(set(marks)) == 1:
        return len(marks) >= 2 * LEAST_STEPS
    return len(marks) * binomial_tail(len(repeated), len(marks) - lag, chance_agreement(marks, lag)) < CHANCE


def chance_agreement(marks: Sequence[Fingerprint], lag: int) -> float:
    """How often two steps about `lag` apart agree by chance: `(agreeing + 1) / (pairs + 1)` at distances close to it.

    The reward drifts over a run, so close steps agree more often than distant ones. Distances 2 to 5 away from `lag`
    share that, but not the fault. Left out are multiples of `lag`, at which a repeated stretch agrees again, and pairs
    within one unbroken stretch of equal steps, which are the fault if there is one.
    """
    stretch = np.cumsum([0, *(one != other for one, other in pairwise(marks))])
    distances = [one for one in range(max(1, lag - 5), lag + 6) if abs(one - lag) > 1 and (lag == 1 or one % lag)]
    agreeing = [
        marks[place] == marks[place + distance]
        for distance in distances
        for place in range(len(marks) - distance)
        if stretch[place] != stretch[place + distance]
    ]
    return (sum(agreeing) + 1) / (len(agreeing) + 1)


def most_repeated(known: dict[int, Fingerprint]) -> tuple[int, list[int]]:
    """The distance, of two or more logged steps, at which most steps repeat an earlier one, and these steps."""
    seen: dict[Fingerprint, list[int]] = {}
    by_lag: dict[int, list[int]] = {}
    for place, (step, mark) in enumerate(known.items()):
        for earlier in seen.get(mark, []):
            if place - earlier > 1:
                by_lag.setdefault(place - earlier, []).append(step)
        seen.setdefault(mark, []).append(place)
    return max(by_lag.items(), key=lambda pair: len(pair[1]), default=(0, []))
