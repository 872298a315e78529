"""Rules on rewards and groups that need nothing but the scalars of a run.

A rule is a function of a `RunLog`. It returns a finding, None if there is nothing to change, or `Undecided` with what
to log. Thresholds are module constants; `docs/advice.md` gives their reasons.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from scoregram.advice.difficulty import EASIER, HARDER, MEDIUM, DeadGroups, prompt_change
from scoregram.advice.findings import Alternative, Change, RuleVerdict, RunFinding, Undecided
from scoregram.advice.logs import RunLog, ScalarSeries
from scoregram.advice.settings import PROMPTS, reward_steps
from scoregram.advice.trends import LEAST_STEPS, mean_ends, slope_estimate, step_correlation
from scoregram.bootstrap import change_over_thirds
from scoregram.exhibits import Estimate, cell_text
from scoregram.reading import OWN_TRAINER, TRL_TRAINER, trainer_of

DEAD_SHARE, MOSTLY_DEAD = 0.5, 0.9
KIND_SHARE = 2 / 3
"""Share of the dead groups that must be of one kind before other prompts are advised."""
LENGTH_GROWTH = 1.5
LEAST_GAIN = 0.05
SPREAD_LEFT = 0.1
FALL, FALL_BELOW_ZERO, FALL_FROM_BEST = 0.5, 1.0, 0.75
"""Standard deviations of a rollout's reward by which the mean must fall: over thirds, there with negative rewards, and
from the best quarter (twice that with negative rewards)."""
FALL_LEFT, END_LEFT, BEST_LEFT = 0.4, 0.3, 0.25
"""Shares of a reward that is never negative that may be left: of the first third in the last, of the first tenth at the
end, of the best quarter in the last tenth. All were chosen on 400 logs whose success rate wanders."""
FEWEST_SCORES = 4
"""Held-out scores that can show that the policy did not become worse."""
CEILING = 0.95
"""Mean reward from which on a run counts as solved."""
NEAR_TOP = 0.7
"""Share of the way to its highest value that a reward has gone in the last steps before, if it was learnt."""
CHANCE = 1e-4
"""Largest probability by chance at which a stretch of equal numbers is a fault."""
ROUNDING = 1e-6
"""A deviation of at most this share of the mean is rounding: in float32 equal rewards of 0.3 have one of 3e-8."""


def too_few(series: ScalarSeries, otherwise: str, least: int = LEAST_STEPS) -> Undecided:
    """What a rule needs: more steps if some are logged, else what to log."""
    if 0 < len(series) < least:
        return Undecided(f"log at least {least} steps; here are {len(series)}")
    return Undecided(otherwise)


def deferred_verdict(finding: str) -> Undecided:
    """The verdict of a rule that another finding makes pointless until it is repaired."""
    return Undecided(f"first repair what “{finding}” found")


def constant_reward(log: RunLog) -> RuleVerdict:
    """Every rollout has the same reward at the end: the verifier is dead, has died, or the task is solved."""
    reward = log.series("reward")
    if len(reward) < LEAST_STEPS:
        return too_few(reward, "log the mean reward, and the standard deviation of rewards")
    equal = equal_steps(log)
    if not equal:
        needs = "log the standard deviation of rewards, their largest and smallest value, or the share of groups "
        return Undecided(f"{needs}without spread")
    count = constant_steps(reward, equal)
    if not count:
        return None
    before, value = reward.values[: len(reward) - count], float(reward.values[-1])
    since, is_solved = int(reward.steps[len(before)]), len(before) > 0 and is_solved_score(reward)
    is_highest = len(before) > 0 and value >= float(before.max()) > float(before.min())
    # a reward that is learnt comes near to its highest value first; a verifier that breaks jumps there
    is_highest = is_highest and float(before[-LEAST_STEPS:].mean() - before.min()) > NEAR_TOP * (value - before.min())
    has_ended = is_solved or is_highest
    told = f"Every rollout gets the reward {value:g}: "
    if is_solved:
        told += "the task is solved, and the run learns nothing more."
    elif is_highest:
        told += "it is the highest of the run, so the task is solved, or the reward function pays for any text."
    else:
        told += "the run learns nothing."
    if len(before) >= LEAST_STEPS:
        told += f" In the {len(before)} logged steps before, the mean was {float(before.mean()):.2g}."
    learnt = prompt_change(DeadGroups(live=0.0, direction=HARDER, config=log.config)) if has_ended else None
    return RunFinding(
        name="constant reward",
        severity="warning" if has_ended else "critical",
        sentence=told,
        since=since,
        number=Estimate(value, value, value),
        label="mean reward of these steps",
        evidence=f"the mean reward did not change over the last {count} logged steps, and rewards did not differ "
        f"within them; found for the whole last third, or for {LEAST_STEPS} steps or more if so many by chance have a "
        f"probability below {CHANCE:g}.",
        change=learnt or _reward_check(log, value, since if len(before) >= LEAST_STEPS else None),
        confidence="certain",
    )


def _reward_check(log: RunLog, value: float, since: int | None) -> Change:
    """Check the reward function; `since` is the step from which the reward is constant, None if it always was."""
    checks = (
        f"Call it on a completion that is right and on one that is wrong: both get the reward {value:g} now, and must "
        "get different ones.",
        "If it finds no answer in either text, fix its parser.",
    )
    sentence = "Check the reward function on one right and one wrong completion, and how it parses the answer."
    if since is not None:
        sentence = f"Check the reward function on completions from before and after step {since}: it gave different "
        sentence += "rewards before."
        checks = (
            f"Call it on a completion from before step {since}: if it gets {value:g} now, look for what the function "
            "uses and has lost, such as a sandbox, a server, a file or time.",
            f"If it gets its old reward, the texts have changed: go back to a checkpoint before step {since}, and "
            "lower the learning rate.",
        )
    return Change(
        knob="reward function",
        direction="repair",
        sentence=sentence,
        effect="groups become live as soon as rewards differ. What the run then learns is unknown: a constant reward "
        "gives no information about it.",
        steps=reward_steps(log.config, *checks),
    )


def constant_steps(reward: ScalarSeries, equal: Mapping[int, bool]) -> int:
    """Logged steps at the end with one mean reward and no spread; 0 if they are too few to be a fault.

    They are one if they cover the last third, or if they are `LEAST_STEPS` or more and `n` such steps by chance have
    `N q^n < CHANCE`, with the number `N` of logged steps and the share `q = (k + 1) / (m + 1)` of the `m` steps before
    them, of which `k` have that reward and no spread.
    """
    is_same = np.abs(reward.values - reward.values[-1]) <= rounding_error(reward)
    holds = is_same & np.array([equal.get(step, True) for step in reward.steps.tolist()])
    broken = np.flatnonzero(~holds)
    before = int(broken[-1]) + 1 if len(broken) else 0
    count = len(reward) - before
    if not any(step in equal for step in reward.steps[before:].tolist()):
        return 0
    usual = (int(holds[:before].sum()) + 1) / (before + 1)
    is_long = count >= LEAST_STEPS and len(reward) * usual**count < CHANCE
    return count if is_long or count >= len(reward.last) else 0


def rounding_error(mean: ScalarSeries) -> float:
    """The largest deviation in the last third that equal rewards with these means can have from rounding."""
    return 1e-9 + ROUNDING * float(np.abs(mean.last).max(initial=0.0))


def equal_steps(log: RunLog) -> dict[int, bool]:
    """Step → whether its rewards did not differ, in the step or within any group; without steps that do not tell.

    The deviation goes first: TRL counts a group as live if rounding gives its equal rewards a deviation above 1e-8.
    """
    error = rounding_error(log.series("reward"))
    spread, dead = log.series("reward_std").by_step(), log.series("dead_share").by_step()
    if not spread and not dead:
        most, least = log.series("reward_max").by_step(), log.series("reward_min").by_step()
        spread = {step: most[step] - least[step] for step in most.keys() & least.keys()}
    return {
        step: spread.get(step, math.inf) <= error or dead.get(step, 0.0) >= 1 for step in spread.keys() | dead.keys()
    }


def is_solved_score(score: ScalarSeries) -> bool:
    """Whether a score on the scale from 0 to 1 ends at `CEILING` or above; no other scale has a known end."""
    is_known = len(score) > 0 and score.values.min() >= 0 and score.values.max() <= 1
    return bool(is_known) and score.end >= CEILING


def dead_groups(log: RunLog) -> RuleVerdict:
    """Most groups have equal rewards; which prompts to draw depends on whether they are all right or all wrong."""
    dead = log.series("dead_share")
    if len(dead) < LEAST_STEPS:
        return too_few(dead, "log the share of groups without spread (`frac_reward_zero_std` in TRL)")
    if isinstance(constant_reward(log), RunFinding):
        return deferred_verdict("constant reward")
    share = dead.last_mean()
    if not share.low > DEAD_SHARE:
        return None if share.high <= DEAD_SHARE else Undecided("log more steps: the interval includes 50 %")
    right, wrong = dead_kinds(log)
    kinds = (
        f"Of all groups, {right.value:.0%} are all right (every reward is 1) and {wrong.value:.0%} all wrong (every "
        "reward is 0)."
        if len(log.series("all_right")) and len(log.series("all_wrong"))
        else ""
    )
    known = DeadGroups(live=1 - share.value, direction=wanted_prompts(share, right, wrong), config=log.config)
    return RunFinding(
        name="dead groups",
        severity="critical" if share.low > MOSTLY_DEAD and not is_solved_score(log.series("reward")) else "warning",
        sentence=f"In {share.value:.0%} of the groups all rewards are equal, so they add nothing to the update. "
        f"{kinds}".strip(),
        since=dead.since(dead.values > DEAD_SHARE),
        level=f"The share of dead groups is above {DEAD_SHARE:.0%}",
        number=share,
        label="share of dead groups in the last third",
        evidence=f"found if the whole 95 % interval lies above {DEAD_SHARE:.0%}.",
        change=prompt_change(known),
        confidence="certain",
    )


def dead_kinds(log: RunLog) -> tuple[Estimate, Estimate]:
    """Shares of all-right and of all-wrong groups in the last third, or lower bounds on them; `nan` without either.

    Without a log of the kinds, a mean reward `m` of rewards in [0, 1] bounds them: at most a share `m` of the groups is
    all right and at most `1 - m` all wrong. With a share `d` of dead groups, at least `d - (1 - m)` are all right and
    at least `d - m` all wrong. A bound decides which prompts are wanted; it is not printed as a share. There is none
    where one reward function gives every rollout the same, so that the total reward is that of the others.
    """
    right, wrong = log.series("all_right"), log.series("all_wrong")
    if len(right) and len(wrong):
        return right.last_mean(), wrong.last_mean()
    dead, reward = log.series("dead_share").last_mean().value, log.series("reward")
    is_bounded = len(reward) and reward.values.min() >= 0 and reward.values.max() <= 1
    if not is_bounded or isinstance(phantom_signal(log), RunFinding):
        return Estimate(math.nan), Estimate(math.nan)
    mean = float(reward.last.mean())
    return Estimate(max(0.0, dead - (1 - mean))), Estimate(max(0.0, dead - mean))


def wanted_prompts(share: Estimate, right: Estimate, wrong: Estimate) -> str:
    """Key of `KINDS`: easier prompts if most dead groups are all wrong, harder ones if most are all right."""
    kinds = {HARDER: right.value, EASIER: wrong.value}
    which = max(kinds, key=lambda kind: kinds[kind])
    return which if kinds[which] > KIND_SHARE * share.value else MEDIUM


def reward_against_held_out(log: RunLog) -> RuleVerdict:
    """The reward rises while the held-out score falls."""
    reward, held = log.series("reward"), held_out_gain(log)
    if len(reward) < LEAST_STEPS or held is None:
        count = len(log.series("held_out"))
        if held is not None:
            return too_few(reward, "log the mean reward")
        return Undecided(f"evaluate on held-out prompts at least six times during the run; here are {count}")
    gain = change_over_thirds(reward.values)
    rises = gain.low > 0 and gain.value >= LEAST_GAIN * score_unit(reward)
    if not (rises and held.high < 0 and -held.value >= LEAST_GAIN / 2 * score_unit(log.series("held_out"))):
        return None
    return RunFinding(
        name="reward against held-out score",
        severity="critical",
        sentence=f"The training reward rose by {gain.value:.2g} while the held-out score fell by {-held.value:.2g}: "
        "the policy exploits "
        "the reward, or memorises prompts.",
        number=held,
        label="change of the held-out score",
        evidence=f"found if both 95 % intervals exclude 0; the reward changed by {cell_text(gain)}.",
        change=Change(
            knob="reward function",
            direction="repair",
            sentence="Read the rollouts with the highest reward, tighten the verifier, and stop at the best "
            "evaluation.",
            effect="reward and held-out score rise together. By how much is unknown: the rise so far, "
            f"{gain.value:.2g}, is of the exploited reward.",
            steps=reward_steps(
                log.config,
                "Read the rollouts with the highest reward, and write down what they are paid for.",
                "Make the function give them 0 for it.",
                "Until then, use the checkpoint of the best evaluation.",
            ),
        ),
    )


def score_unit(score: ScalarSeries) -> float:
    """What a change of a score counts in: 1 for scores from -1 to 1, else the largest value without its sign."""
    return max(1.0, float(np.abs(score.values).max(initial=0.0)))


def held_out_gain(log: RunLog) -> Estimate | None:
    """Change of the held-out score from the first to the last third of its evaluations; None below 6 evaluations."""
    held = log.series("held_out")
    if len(held) < 6:
        return None
    return change_over_thirds(held.values) if len(held) >= 9 else _few_gain(held)


def _few_gain(held: ScalarSeries) -> Estimate:
    slope, ends = slope_estimate(held.steps.astype(float), held.values)
    width = float(held.steps[-1] - held.steps[0])
    return Estimate(slope * width, ends[0] * width, ends[1] * width)


def reward_spread_death(log: RunLog) -> RuleVerdict:
    """Rewards hardly differ any more, without being at the ceiling."""
    spread, reward = log.series("reward_std"), log.series("reward")
    if len(spread) < LEAST_STEPS or not len(reward):
        return too_few(spread, "log the standard deviation of rewards")
    for other in (constant_reward, dead_groups):
        if isinstance(found := other(log), RunFinding):
            return deferred_verdict(found.name)
    start = spread.start
    if not start > 0:
        return None
    left = Estimate(float(spread.last.mean()) / start, *(mean_ends(spread.last) / start))
    if not left.high < SPREAD_LEFT or is_solved_score(reward):
        return None
    return RunFinding(
        name="reward spread death",
        severity="warning",
        sentence=f"The spread of rewards fell to {left.value:.0%} of its first value: advantages become rounding and "
        "noise.",
        since=spread.since(spread.values < SPREAD_LEFT * start),
        number=left,
        label="spread left, of the first steps",
        evidence=f"found below {SPREAD_LEFT:.0%} if the reward is not at its ceiling.",
        change=Change(
            knob="reward function",
            direction="repair",
            sentence="Use a finer reward.",
            effect="advantages follow differences in quality again. The gain is unknown: only "
            f"{left.value:.0%} of the first spread is left to learn from.",
            steps=reward_steps(
                log.config,
                "Let it tell apart rollouts that now get equal rewards, such as by steps that are right.",
            ),
            alternatives=(
                Alternative(PROMPTS, HARDER, "Draw harder prompts."),
                Alternative(
                    "division by the deviation",
                    "off",
                    f"Do not divide advantages by the standard deviation of their group{_without_division(log)}.",
                ),
            ),
        ),
    )


def phantom_signal(log: RunLog) -> RuleVerdict:
    """One part of the reward never varies, and the others make all the advantages."""
    parts = {name: pair for name, pair in log.reward_parts().items() if min(map(len, pair)) >= LEAST_STEPS}
    if len(parts) < 2:
        return Undecided("log the mean and the deviation of each reward function")
    silent = [
        name
        for name, (mean, std) in parts.items()
        if float(std.last.max()) <= rounding_error(mean) and not _is_saturated(mean, std)
    ]
    loud = [name for name, (mean, std) in parts.items() if float(std.last.min()) > rounding_error(mean)]
    if not silent or not loud:
        return None
    name = silent[0]
    mean, std = parts[name]
    is_idle = float(np.abs(mean.values).max()) <= 0
    first = (f"If {name} is a penalty that nothing has called for yet, change nothing.",) if is_idle else ()
    return RunFinding(
        name="phantom signal",
        severity="warning" if is_idle else "critical",
        sentence=f"All advantages come from {', '.join(loud)}: {name} gives every rollout {float(mean.last[-1]):g}, "
        f"so groups in which {name} is constant still change the policy.",
        since=std.since(std.values <= rounding_error(mean)),
        number=Estimate(0.0, 0.0, 0.0),
        label=f"standard deviation of {name} in the last third",
        evidence="one reward function is constant over the last third while others vary.",
        change=Change(
            knob="reward function",
            direction="repair",
            sentence=f"Give shaped rewards only where {name} varies.",
            effect=f"the update follows {name}; groups in which it does not vary become dead, and visible as such. "
            "What the run then learns is unknown until it varies.",
            steps=reward_steps(
                log.config,
                *first,
                f"Give 0 for {', '.join(loud)} in groups in which {name} does not vary"
                + _lower_weights(log, name)
                + ".",
            ),
            alternatives=(Alternative(PROMPTS, MEDIUM, f"Draw prompts that {name} can tell apart."),),
        ),
        confidence="likely" if is_idle else "certain",
    )


def _is_saturated(mean: ScalarSeries, std: ScalarSeries) -> bool:
    """Whether a reward function varied, and rose to the highest value that it has had: every rollout earns it now."""
    error = rounding_error(mean)
    varied, rose = float(std.values.max()) > error, float(mean.values.min()) < float(mean.last.min()) - error
    return varied and rose and float(mean.last.min()) >= float(mean.values.max()) - error


def falling_reward(log: RunLog) -> RuleVerdict:
    """Most of the mean reward is lost: from the first third to the last, or from its best quarter to the end.

    None where a held-out score did not fall: the prompts have become harder, and not the policy worse.
    """
    reward, held_out = log.series("reward"), log.series("held_out")
    if len(reward) < 3 * LEAST_STEPS:
        return too_few(reward, "log the mean reward", 3 * LEAST_STEPS)
    if not _reward_deviation(log, slice(None)) > 0 and np.ptp(reward.values) > 0:
        return Undecided("log the standard deviation of rewards")
    lost = [one for one in (_lost_over_thirds(log), _lost_since_best(log)) if one is not None]
    if not lost or (len(held_out) >= FEWEST_SCORES and held_out.last.mean() >= held_out.first.mean()):
        return None
    fall, best = lost[0], highest_stretch(reward)
    return RunFinding(
        name="falling reward",
        severity="warning",
        sentence=f"The mean reward fell from {fall.start:.2g} in the {fall.since} to {fall.end:.2g} in the "
        f"{fall.until}.",
        since=reward.since(reward.values < (fall.start + fall.end) / 2),
        number=fall.change,
        label=f"mean reward of the {fall.until} minus that of the {fall.since}",
        evidence="found if the 95 % interval lies below 0 and most of the reward is lost. Prompts that become harder "
        "look the same.",
        change=Change(
            knob="learning rate",
            direction="down",
            sentence=f"Go back to a checkpoint near step {best}, where the reward was highest, and train on with half "
            "the learning rate. First check that the reward function and the prompts did not change.",
            effect=f"the mean reward stays near {fall.start:.2g} or above; how far it rises is unknown until a run "
            "with this change.",
            alternatives=(Alternative("KL weight", "up", "Raise the KL weight."),),
        ),
    )


class _Fall(NamedTuple):
    """A fall of the mean reward."""

    start: float
    end: float
    since: str
    """Which steps `start` is the mean of."""
    until: str
    """Which steps `end` is the mean of."""
    change: Estimate


def _lost_over_thirds(log: RunLog) -> _Fall | None:
    """A fall from the first third to the last, whose interval allows for drift."""
    reward = log.series("reward")
    fall, third = change_over_thirds(reward.values), math.ceil(len(reward) / 3)
    start, end = float(reward.values[:third].mean()), float(reward.values[-third:].mean())
    deviation = _reward_deviation(log, slice(0, third))
    if not (fall.high < 0 and deviation > 0):
        return None
    if reward.values.min() < 0:
        is_lost = -fall.value >= FALL_BELOW_ZERO * deviation
    else:
        is_lost = -fall.value >= FALL * deviation and end < FALL_LEFT * start and reward.end < END_LEFT * reward.start
    return _Fall(start, end, "first third", "last", fall) if is_lost else None


def _lost_since_best(log: RunLog) -> _Fall | None:
    """A fall from the best quarter of the run to its last tenth, five steps or more."""
    reward = log.series("reward")
    quarter, tenth = len(reward) // 4, max(5, len(reward) // 10)
    means = np.convolve(reward.values[:-tenth], np.full(quarter, 1 / quarter), mode="valid")
    best = int(means.argmax())
    start, ends = float(means[best]), mean_ends(reward.values[-tenth:])
    end, deviation = float(reward.values[-tenth:].mean()), _reward_deviation(log, slice(best, best + quarter))
    if reward.values.min() >= 0:
        is_lost = start - end >= FALL_FROM_BEST * deviation and end < BEST_LEFT * start
    else:
        is_lost = start - end >= 2 * FALL_FROM_BEST * deviation
    if not (is_lost and deviation > 0 and ends[1] < start):
        return None
    return _Fall(start, end, "best quarter", "last tenth", Estimate(end - start, *(ends - start)))


def _reward_deviation(log: RunLog, steps: slice) -> float:
    """Standard deviation of a rollout's reward at some steps: the logged one, or that of rewards of 0 and 1 with this
    mean if it is larger; 0 where neither is known.
    """
    reward, spread = log.series("reward"), log.series("reward_std")
    logged = spread.values[np.isin(spread.steps, reward.steps[steps])]
    mean = float(reward.values[steps].mean())
    is_share = reward.values.min() >= 0 and reward.values.max() <= 1
    return max(float(logged.mean()) if len(logged) else 0.0, math.sqrt(mean * (1 - mean)) if is_share else 0.0)


def highest_stretch(reward: ScalarSeries) -> int:
    """The step in the middle of the tenth of the log, three steps or more, with the highest mean reward."""
    width = max(3, len(reward) // 10)
    means = np.convolve(reward.values, np.full(width, 1 / width), mode="valid")
    return int(reward.steps[int(means.argmax()) + width // 2])


def length_gaming(log: RunLog) -> RuleVerdict:
    """Completions grow, the reward with them, and nothing held out gains."""
    length, reward = log.series("length"), log.series("reward")
    if len(length) < 3 * LEAST_STEPS or len(reward) < 3 * LEAST_STEPS:
        shorter = min(length, reward, key=len)
        return too_few(shorter, f"log mean length and reward for at least {3 * LEAST_STEPS} steps", 3 * LEAST_STEPS)
    growth = float(np.mean(length.last) / max(np.mean(length.first), 1e-9))
    gain = change_over_thirds(reward.values)
    held = held_out_gain(log)
    if growth < LENGTH_GROWTH or not gain.low > 0 or (held is not None and held.low > 0):
        return None
    together = step_correlation(length, reward)
    if not together.low > 0:
        return None
    told = "no held-out score was logged" if held is None else f"the held-out score changed by {cell_text(held)}"
    return RunFinding(
        name="length gaming",
        severity="warning",
        sentence=f"Completions are {growth:.1f} times as long as at the start, and longer ones earn more: the reward "
        "may pay for "
        f"length ({told}).",
        since=length.since(length.values > LENGTH_GROWTH * float(np.mean(length.first))),
        number=together,
        label="correlation between length and reward from step to step",
        evidence=f"found if the length grows {LENGTH_GROWTH:g}-fold, reward and length move together from step to "
        "step, and no "
        "held-out score rises.",
        change=Change(
            knob="completion length",
            direction="down",
            sentence="Check whether the reward rises with length for equal answers; penalise length, or normalise by "
            "it.",
            effect=f"the length returns from {float(np.mean(length.last)):.0f} towards "
            f"{float(np.mean(length.first)):.0f} tokens while the held-out score does not fall; the reward "
            "after that is unknown until a run with this change.",
            steps=reward_steps(
                log.config,
                "Call it on one answer in a short and in a long text: if the long one gets more, it pays for length.",
                "Subtract a penalty for tokens beyond "
                f"{float(np.mean(length.first)):.0f}, the mean length at the start.",
            ),
        ),
        confidence="possible" if held is None else "likely",
    )


def _without_division(log: RunLog) -> str:
    """What to type for advantages that are not divided by the deviation of their group."""
    typed = {OWN_TRAINER: "`--estimator mean`", TRL_TRAINER: '`scale_rewards="none"`'}.get(trainer_of(log.config))
    return f": {typed}" if typed else ""


def _lower_weights(log: RunLog, silent: str) -> str:
    """What to type in TRL for a tenth of the weight of all reward functions but one; empty if they are not known."""
    names = [str(name) for name in log.config.get("reward_functions") or ()]
    if silent not in names or trainer_of(log.config) != TRL_TRAINER:
        return ""
    return f", or lower their weight: `reward_weights={[1.0 if name == silent else 0.1 for name in names]}`"
