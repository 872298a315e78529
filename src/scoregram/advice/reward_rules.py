"""Rules on rewards, groups and completions that need nothing but the scalars of a run.

A rule is a function of a `RunLog`. It returns a finding, None if there is nothing to change, or `Undecided` with what
to log. Thresholds are module constants; `docs/advice.md` gives their reasons.
"""

import math
from dataclasses import replace

import numpy as np

from scoregram.advice.difficulty import EASIER, HARDER, MEDIUM, DeadGroups, prompt_change
from scoregram.advice.findings import CHECKED_STEPS, Change, RuleVerdict, RunFinding, Undecided
from scoregram.advice.logs import RunLog, ScalarSeries
from scoregram.advice.settings import (
    NEXT_VALUES,
    OWN_TRAINER,
    SETTINGS,
    TRL_TRAINER,
    assigned,
    reward_steps,
    stored_setting,
    trainer_of,
)
from scoregram.advice.trends import LEAST_STEPS, change_over_thirds, mean_ends, slope_estimate, step_correlation
from scoregram.bootstrap import mean_estimate
from scoregram.exhibits import Estimate, cell_text

DEAD_SHARE, MOSTLY_DEAD = 0.5, 0.9
KIND_SHARE = 2 / 3
"""Share of the dead groups that must be of one kind before other prompts are advised."""
FEWEST_PLAIN = 3
"""Logged values that suffice where each of them, a mean over many rollouts, shows the fault plainly."""
TRUNCATED, MOSTLY_TRUNCATED = 0.1, 0.5
PAID_SHARE, PAID_REWARD = 0.8, 0.5
"""Mean reward of truncated completions, of that of the others or by itself, from which on truncation is paid for."""
REPEATED_SHARE, MOSTLY_REPEATED = 0.5, 0.7
LENGTH_GROWTH = 1.5
LEAST_GAIN = 0.05
SPREAD_LEFT = 0.1
CEILING = 0.95
"""Mean reward from which on a run counts as solved."""


def too_few(series: ScalarSeries, otherwise: str) -> Undecided:
    """What a rule needs: more steps if some are logged, else what to log."""
    if 0 < len(series) < LEAST_STEPS:
        return Undecided(f"log at least {LEAST_STEPS} steps; here are {len(series)}")
    return Undecided(otherwise)


def after(finding: str) -> Undecided:
    """The verdict of a rule that another finding makes pointless until it is repaired."""
    return Undecided(f"first repair what “{finding}” found")


def constant_reward(log: RunLog) -> RuleVerdict:
    """Every rollout of every step has the same reward: the verifier is dead."""
    reward, dead = log.series("reward"), log.series("dead_share")
    if len(reward) < LEAST_STEPS or not len(dead):
        return too_few(reward, "log the mean reward and the share of groups without spread")
    spread = float(np.ptp(reward.last))
    if spread > 1e-9 or float(dead.last.min()) < 1:
        return None
    value = float(reward.last[-1])
    return RunFinding(
        name="constant reward",
        severity="critical",
        sentence=f"Every rollout gets the reward {value:g}: the run learns nothing.",
        since=reward.since(np.abs(reward.values - value) <= 1e-9),
        number=Estimate(value, value, value),
        label="mean reward of the last third",
        evidence=f"the reward did not change over the last {len(reward.last)} logged steps, and no group had a spread.",
        change=Change(
            knob="reward function",
            direction="repair",
            sentence="Check the reward function on one right and one wrong completion, and how it parses the answer.",
            effect="groups become live as soon as rewards differ. How much is then learnt cannot be said: a constant "
            "reward holds no sign of it.",
            steps=reward_steps(
                log.config,
                "Call it on a completion that is right and on one that is wrong: both get the reward "
                f"{value:g} now, and must get different ones.",
                "If both answers are read as missing, mend how it finds the answer in the text.",
            ),
        ),
        confidence="certain",
    )


def dead_groups(log: RunLog) -> RuleVerdict:
    """Most groups have equal rewards; which prompts to draw depends on whether they are all right or all wrong."""
    dead = log.series("dead_share")
    if len(dead) < LEAST_STEPS:
        return too_few(dead, "log the share of groups without spread (`frac_reward_zero_std` in TRL)")
    if isinstance(constant_reward(log), RunFinding):
        return after("constant reward")
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
        severity="critical" if share.low > MOSTLY_DEAD else "warning",
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
    """Shares of all-right and of all-wrong groups in the last third, or bounds on them; `nan` without either.

    Without a log of the kinds, rewards in [0, 1] bound them: the mean reward is at least the share of all-right groups.
    A bound decides which prompts are wanted; it is not printed as a share.
    """
    right, wrong = log.series("all_right"), log.series("all_wrong")
    if len(right) and len(wrong):
        return right.last_mean(), wrong.last_mean()
    dead, reward = log.series("dead_share").last_mean().value, log.series("reward")
    if not len(reward) or reward.values.min() < 0 or reward.values.max() > 1:
        return Estimate(math.nan), Estimate(math.nan)
    mean = float(reward.last.mean())
    if mean < 0.5:
        return Estimate(min(mean, dead)), Estimate(max(0.0, dead - mean))
    return Estimate(max(0.0, dead - (1 - mean))), Estimate(min(1 - mean, dead))


def wanted_prompts(share: Estimate, right: Estimate, wrong: Estimate) -> str:
    """Key of `KINDS`: easier prompts if most dead groups are all wrong, harder ones if most are all right."""
    kinds = {HARDER: right.value, EASIER: wrong.value}
    which = max(kinds, key=lambda kind: kinds[kind])
    return which if kinds[which] > KIND_SHARE * share.value else MEDIUM


def reward_against_held_out(log: RunLog) -> RuleVerdict:
    """The reward rises while the held-out score falls."""
    reward, held = log.series("reward"), held_out_gain(log)
    if len(reward) < LEAST_STEPS or held is None:
        return Undecided("evaluate on held-out prompts at least six times during the run")
    gain = change_over_thirds(reward.values)
    if not (gain.low > 0 and gain.value >= LEAST_GAIN and held.high < 0 and -held.value >= LEAST_GAIN / 2):
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
            effect="reward and held-out score rise together. By how much cannot be said: the rise so far, "
            f"{gain.value:.2g}, is of the exploited reward.",
            steps=reward_steps(
                log.config,
                "Read the rollouts with the highest reward, and write down what they are paid for.",
                "Make the function give them 0 for it.",
                "Until then, use the checkpoint of the best evaluation.",
            ),
        ),
    )


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
            return after(found.name)
    start = spread.start
    if not start > 0:
        return None
    left = Estimate(float(spread.last.mean()) / start, *(mean_ends(spread.last) / start))
    is_solved = reward.end >= CEILING and reward.values.max() <= 1
    if not left.high < SPREAD_LEFT or is_solved:
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
            sentence="Use a finer reward or harder prompts; do not divide by the standard deviation.",
            effect="advantages follow differences in quality again. How much that gains cannot be said: of the first "
            f"spread only {left.value:.0%} is left to learn from.",
            steps=reward_steps(
                log.config,
                "Stop dividing by the deviation" + _without_division(log) + ".",
                "Let it tell apart rollouts that now get equal rewards, such as by steps that are right.",
            ),
        ),
    )


def phantom_signal(log: RunLog) -> RuleVerdict:
    """One part of the reward never varies, and the others make all the advantages."""
    parts = {name: pair for name, pair in log.reward_parts().items() if len(pair[1]) >= LEAST_STEPS}
    if len(parts) < 2:
        return Undecided("log the mean and the deviation of each reward function")
    silent = [name for name, (_, std) in parts.items() if float(std.last.max()) <= 1e-9]
    loud = [name for name, (_, std) in parts.items() if float(std.last.min()) > 1e-9]
    if not silent or not loud:
        return None
    name = silent[0]
    mean, std = parts[name]
    return RunFinding(
        name="phantom signal",
        severity="critical",
        sentence=f"All advantages come from {', '.join(loud)}: {name} gives every rollout {float(mean.last[-1]):g}, "
        "so groups in which "
        "it teaches nothing still move the policy.",
        since=std.since(std.values <= 1e-9),
        number=Estimate(0.0, 0.0, 0.0),
        label=f"standard deviation of {name} in the last third",
        evidence="one reward function is constant over the last third while others vary.",
        change=Change(
            knob="reward function",
            direction="repair",
            sentence=f"Give shaped rewards only where {name} varies, lower their weight, or draw prompts that {name} "
            "can tell apart.",
            effect=f"the update follows {name}; groups in which it does not vary become dead, and visible as such. How "
            "much is then learnt cannot be said before it varies.",
            steps=reward_steps(
                log.config,
                f"Give 0 for {', '.join(loud)} in groups in which {name} does not vary"
                + _lower_weights(log, name)
                + ".",
            ),
        ),
        confidence="certain",
    )


def length_gaming(log: RunLog) -> RuleVerdict:
    """Completions grow, the reward with them, and nothing held out gains."""
    length, reward = log.series("length"), log.series("reward")
    if len(length) < 3 * LEAST_STEPS or len(reward) < 3 * LEAST_STEPS:
        return Undecided("log mean length and reward for at least 30 steps")
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
            f"{float(np.mean(length.first)):.0f} tokens while the held-out score does not fall; what the reward then "
            "is cannot be said.",
            steps=reward_steps(
                log.config,
                "Call it on one answer in a short and in a long text: if the long one gets more, it pays for length.",
                "Subtract a penalty for tokens beyond "
                f"{float(np.mean(length.first)):.0f}, the mean length at the start.",
            ),
        ),
        confidence="possible" if held is None else "likely",
    )


def cut_completions(log: RunLog) -> RuleVerdict:
    """Many completions end at the token limit."""
    cut = log.series("truncated")
    is_plain = len(cut) >= FEWEST_PLAIN and float(cut.values.min()) > MOSTLY_TRUNCATED
    if len(cut) < LEAST_STEPS and not is_plain:
        return too_few(cut, "log the share of completions that were cut off")
    share = cut.last_mean()
    level = float(cut.last.min()) if math.isnan(share.low) else share.low
    if not level > TRUNCATED:
        return None
    return RunFinding(
        name="truncation",
        severity="critical" if level > MOSTLY_TRUNCATED else "warning",
        sentence=f"{share.value:.0%} of the completions in the last third are cut off at the limit{_limit(log)}"
        f"{_paid_words(log)}.",
        since=cut.since(cut.values > TRUNCATED),
        level=f"The truncated share is above {TRUNCATED:.0%}",
        number=share,
        label="share of truncated completions in the last third",
        evidence=f"found if the whole 95 % interval lies above {TRUNCATED:.0%}.",
        change=_truncation_change(log, level > MOSTLY_TRUNCATED),
        confidence="certain",
    )


def _paid_words(log: RunLog) -> str:
    """What the reward of truncated completions means."""
    reward, is_paid = truncated_reward(log)
    if not is_paid:
        return ": the reward is of unfinished texts"
    return f", and get a mean reward of {reward}: the reward pays for unfinished texts"


def _length_penalty(log: RunLog, limit: int | None = None) -> str:
    """How to penalise length in the trainer of the run, with the present limit unless another one is given."""
    limit = limit or stored_setting(log.config, "max_completion_length")
    if trainer_of(log.config) == TRL_TRAINER and limit:
        made = f"get_soft_overlong_punishment(max_completion_len={limit}, soft_punish_cache={max(1, limit // 4)})"
        return f"penalise length, by a further function in `reward_funcs`: `trl.rewards.{made}`"
    return "penalise length in the reward function, such as by 1 for what the limit cut off"


def _no_reward_at_the_limit(log: RunLog) -> str:
    """A line of Python that gives 0 to completions which the next run cuts off; both trainers pass their token ids."""
    _, limit = _longer_limit(log)
    line = f"return [0.0 if len(ids) >= {limit or 'LIMIT'} else reward for ids, reward in zip(completion_ids, rewards)]"
    told = (
        "Give 0 to what the limit cut off: name what it returns now `rewards`, add the keyword `completion_ids`, and "
    )
    return f"{told}end with `{line}`."


def paying_for_answers(change: Change, log: RunLog) -> Change:
    """The change of a reward that pays for truncated texts which do not hold the answer.

    Half of what it pays now stays: as long as no rollout holds the answer, a reward for it alone would be constant.
    """
    longer, limit = _longer_limit(log)
    answers = str(log.config.get("answer_column") or "answer")
    is_held = r"bool(re.search(rf'(?<!\w){re.escape(str(expected))}(?!\w)', text))"
    paid = f"(reward + {is_held}) / 2 if len(ids) < {limit or 'LIMIT'} else 0.0"
    line = f"return [{paid} for ids, expected, text, reward in zip(completion_ids, {answers}, completions, rewards)]"
    told = f"Name what it returns now `rewards`, add the keywords `completion_ids` and `{answers}`, import `re`, and "
    told += f"end with `{line}`. Nothing is paid then for what the limit cut off, half for the answer as a word of its "
    told += 'own (in chats the text is `text[0]["content"]`), and half as now: as long as no rollout holds the answer, '
    told += "it alone would pay nothing."
    effect, check = _repair_effect(log, half=True)
    return replace(
        change,
        effect=effect,
        check=f"{check} Then read finished ones: do they hold the answer?" if check else check,
        sentence="Change what the reward pays for: the answer as well, and nothing that the limit cuts off"
        f"{'; and allow longer completions' if longer else ''}.",
        steps=reward_steps(log.config, told, also=longer),
    )


def _length_times(log: RunLog, factor: float) -> int | None:
    """The largest mean length of a step times a factor: for a token limit whose present value is not stored."""
    lengths = log.series("length").values
    return math.ceil(factor * float(lengths.max())) if len(lengths) else None


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


def _repaired_reward(log: RunLog) -> str:
    """What is left of the mean reward once truncated completions get 0, where it is known or bounded."""
    reward, cut, finished = (log.series(name) for name in ("reward", "truncated", "finished_reward"))
    if not len(reward) or not len(cut):
        return "the reward falls first."
    share, most = float(cut.last.mean()), 1.0 if reward.values.max() <= 1 else math.nan
    left = (1 - share) * (float(finished.last.mean()) if len(finished) else most)
    told = f"the mean reward first falls from {float(reward.last.mean()):.2f}, that of the last third,"
    if math.isnan(left):
        return f"{told} since {share:.0%} of the completions then get 0."
    return (
        f"{told} to {'about' if len(finished) else 'at most'} {left:.2f}, since {share:.0%} of the completions get 0."
    )


def _repair_effect(log: RunLog, *, half: bool = False) -> tuple[str, str]:
    """What to expect once truncated completions get 0, with a longer limit if it can be typed; and what to check.

    `half`: finished ones get half of their reward, as long as they do not hold the answer.

    The next run starts from the same model, of which a share `c` was truncated at the limit `l` in the first logged
    steps. If as many completions end per token beyond it, `c^(m/l)` are truncated at the limit `m`.
    """
    reward, cut = log.series("reward"), log.series("truncated")
    limit, (_, longer) = stored_setting(log.config, "max_new_tokens", "max_completion_length"), _longer_limit(log)
    unknown = "cannot be said: the reward so far was not of finished texts."
    if not limit or not longer or longer <= limit or not len(reward) or not len(cut):
        return f"{_repaired_reward(log)} How far it rises from there {unknown}", ""
    first, step, times = float(cut.values[0]), int(cut.steps[0]), longer / limit
    begins = first**times
    if first == 1:
        return f"{_repaired_reward(log)} How far it rises from there {unknown}", ""
    told = f"about {begins:.0%} truncated at first, and then fewer, because only finished completions are paid. "
    told += f"Basis: {first:.0%} were at step {step}, at {limit} tokens; if as many end per token, {begins:.0%} reach "
    told += f"{longer}. The mean reward starts below {(1 - begins) / (1 + half):.2f}, "
    told += "half of the finished share as long as no answer is right" if half else "the finished share"
    told += ". Without a right answer it can reach 0.5, so only what lies above is answers" * (
        half and float(reward.values.max()) <= 1
    )
    told += f"; how far it rises {unknown}"
    if begins <= TRUNCATED:
        target = f"The truncated share should stay at {TRUNCATED:.0%} or less for {CHECKED_STEPS} steps."
    else:
        target = f"The truncated share should be below {begins:.0%} after {CHECKED_STEPS} steps and go on falling to "
        target += f"{TRUNCATED:.0%} or less."
    return told, f"{target} If it is not, stop and read rollouts again."


def _longer_limit(log: RunLog) -> tuple[str, int | None]:
    """What to type for longer completions, and the limit of the next run.

    Nothing to type, and the present limit, if the trainer is not known; no limit if none is stored.
    """
    limit = stored_setting(log.config, "max_new_tokens", "max_completion_length")
    name = SETTINGS["completion length"].get(trainer_of(log.config), "")
    if not name or not limit:
        return "", limit
    longer = NEXT_VALUES["completion length", "up"](limit)
    return f"`{assigned(name, longer)}` (now {limit})", longer


def _limit(log: RunLog) -> str:
    limit = stored_setting(log.config, "max_new_tokens", "max_completion_length")
    return f" of {limit} tokens" if limit else ""


def _truncation_change(log: RunLog, is_most: bool) -> Change:
    """Give truncated completions no reward where they are paid for, else allow longer ones.

    To pay finished completions only is right whatever the truncated ones hold, as long as some completions end: those
    without an answer are not paid for, and those with one learn to end after it. Reading them decides what else to
    change. Where most completions are truncated, to mask them would leave hardly any update, so it is not advised.
    """
    reward, is_paid = truncated_reward(log)
    trainer = trainer_of(log.config)
    shown = ": `print(trainer.model.generation_config.eos_token_id, trainer.processing_class.eos_token_id)`"
    after = (
        _length_penalty(log) if is_most else "mask truncated rollouts: let the reward function return `None` for them"
    )
    if not is_most and trainer != OWN_TRAINER:
        after = "mask truncated rollouts (in TRL `mask_truncated_completions=True`)"
    ends = float(log.series("truncated").values.min()) < 1  # the model can sample its end-of-sequence token
    others = (
        *(() if ends else (f"If longer ones do not end either: {_END_TOKEN}{shown * (trainer == TRL_TRAINER)}.",)),
        f"If they hold the answer and go on after it: {after}.",
    )
    if is_paid and not ends:
        return _ending_change(log, f"{_END_TOKEN}{shown * (trainer == TRL_TRAINER)}.")
    if is_paid:
        (longer, limit), (effect, check) = _longer_limit(log), _repair_effect(log)
        return Change(
            knob="reward function",
            direction="repair",
            sentence="Give no reward to completions that the limit cuts off"
            f"{', and allow longer ones' if longer else ''}.",
            effect=effect,
            check=check,
            steps=reward_steps(log.config, _no_reward_at_the_limit(log), WHAT_ELSE, also=longer),
            others=(f"If hardly any rollout gets a reward then: do not give 0, {_length_penalty(log, limit)}.",),
        )
    known = f" Truncated ones get a mean reward of {reward}." if reward else ""
    unchecked = (
        "Read some truncated rollouts: if they hold no right answer and their reward is high anyway, repair the "
    )
    return Change(
        knob="completion length",
        direction="up",
        sentence=f"Allow longer completions.{known}",
        effect=f"fewer than {float(log.series('truncated').last.mean()):.0%} of the completions are cut off, and the "
        "reward is of whole texts. How many are left cannot be said: how long they would get is not known.",
        value=None if _limit(log) else _length_times(log, 2.0),
        others=(*others, *([] if reward else [f"{unchecked}reward function."])),
    )


_END_TOKEN = (
    "the model may have no end-of-sequence token to sample: check eos_token_id, the pad token and the chat template"
)


WHAT_ELSE = (
    "Read some truncated rollouts: they say whether that is all. A wrong answer with a high reward: let the function "
    "compare with the right answer as well. A right answer and more text after it, or no answer yet: that is all."
)
"""What truncated rollouts decide, beyond giving them 0."""


def _ending_change(log: RunLog, check: str) -> Change:
    """No completion ends: without a finished one to pay for, a repaired reward would be constant."""
    longer, _ = _longer_limit(log)
    return Change(
        knob="reward function",
        direction="repair",
        sentence="Make completions end: none did, at no step.",
        effect="some completions end, where now 0% do. How many cannot be said: not one was seen.",
        steps=(
            f"Not a setting: {check}",
            f"If it has one, allow longer completions until some end{f': {longer}' if longer else ''}.",
            *reward_steps(log.config, _no_reward_at_the_limit(log), WHAT_ELSE),
        ),
    )


def truncated_reward(log: RunLog) -> tuple[str, bool]:
    """Mean reward of truncated completions in words, empty if not known; and whether the reward pays for them.

    From stored rollouts where there are any: paid for if it is at least `PAID_SHARE` of the mean of finished ones.
    Else, or without a finished one, rewards between 0 and 1 bound it: with the mean reward m and the truncated share c
    it is at least `(m - (1 - c)) / c`, since the others have at most 1. Paid for from `PAID_REWARD` on.
    """
    cut, finished = (log.series(f"{kind}_reward") for kind in ("truncated", "finished"))
    own = float(cut.last.mean()) if len(cut) else math.nan
    other = float(finished.last.mean()) if len(finished) else math.nan
    if own > 0 and own >= PAID_SHARE * other:
        return f"{own:.2f}, finished ones {other:.2f}", True
    least = least_truncated_reward(log)
    if least >= PAID_REWARD:
        return (f"at least {least:.2f}" if math.isnan(own) else f"{own:.2f}"), True
    return ("" if math.isnan(own) else f"{own:.2f}"), False


def least_truncated_reward(log: RunLog) -> float:
    """`(m - (1 - c)) / c`, at least 0: see `truncated_reward`. `nan` without rewards, or with a mean outside [0, 1].

    Only means are logged: single rewards above 1 would go unseen, and the bound would be too high.
    """
    reward, cut = log.series("reward"), log.series("truncated")
    if not len(reward) or not len(cut) or reward.values.min() < 0 or reward.values.max() > 1:
        return math.nan
    share = float(cut.last.mean())
    return max(0.0, (float(reward.last.mean()) - (1 - share)) / share) if share > 0 else math.nan


def repetition(log: RunLog) -> RuleVerdict:
    """Completions repeat themselves."""
    repeated = log.series("repetition")
    if len(repeated) < 3:
        return Undecided("store rollouts: repetition is read from their tokens")
    share = mean_estimate(repeated.last)
    level = share.low if not math.isnan(share.low) else share.value
    if not level > REPEATED_SHARE:
        return None
    return RunFinding(
        name="repetition",
        severity="critical" if level > MOSTLY_REPEATED else "warning",
        sentence=f"{share.value:.0%} of the four-token sequences of a completion occurred in it before.",
        since=repeated.since(repeated.values > REPEATED_SHARE),
        number=share,
        label="share of repeated 4-grams",
        evidence=f"found above {REPEATED_SHARE:.0%} in the stored rollouts of the last third.",
        change=Change(
            knob="completion length",
            direction="down",
            sentence="Penalise repetition in the reward, or shorten the token limit.",
            effect=f"completions of at most half the length, and less than {share.value:.0%} repeated; by how much the "
            "reward changes cannot be said.",
            value=None if _limit(log) else _length_times(log, 0.5),
        ),
        confidence="certain",
    )
