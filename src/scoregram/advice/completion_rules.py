"""Rules on completions that are cut off or repeat themselves, from the scalars of a run.

What to change about truncation depends on whether the reward pays for truncated completions.
"""

import math
from dataclasses import replace

from scoregram.advice.findings import CHECKED_STEPS, Alternative, Change, RuleVerdict, RunFinding, Undecided
from scoregram.advice.logs import RunLog
from scoregram.advice.reward_rules import too_few
from scoregram.advice.settings import NEXT_VALUES, SETTINGS, reward_steps, typed_option
from scoregram.advice.trends import LEAST_STEPS
from scoregram.bootstrap import mean_estimate
from scoregram.reading import OWN_TRAINER, TRL_TRAINER, stored_setting, trainer_of

FEWEST_PLAIN = 3
"""Logged values that suffice where each of them, a mean over many rollouts, shows the fault plainly."""
TRUNCATED, MOSTLY_TRUNCATED = 0.1, 0.5
PAID_SHARE, PAID_REWARD = 0.8, 0.5
"""Mean reward of truncated completions, of that of the others or by itself, from which on truncation is paid for."""
REPEATED_SHARE, MOSTLY_REPEATED = 0.5, 0.7


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
    return "penalise length in the reward function, for example subtract 1 from every truncated completion"


def _no_reward_at_the_limit(log: RunLog) -> str:
    """A line of Python that gives 0 to completions which the next run cuts off; both trainers pass their token ids."""
    _, limit = _longer_limit(log)
    line = f"return [0.0 if len(ids) >= {limit or 'LIMIT'} else reward for ids, reward in zip(completion_ids, rewards)]"
    told = "Give truncated completions a reward of 0: store the current return value in `rewards`, add the argument "
    return f"{told}`completion_ids`, and end the function with `{line}`."


def paying_for_answers(change: Change, log: RunLog) -> Change:
    """The change of a reward that pays for truncated texts which do not hold the answer.

    Half of what it pays now stays: as long as no rollout holds the answer, a reward for it alone would be constant.
    """
    longer, limit = _longer_limit(log)
    answers = str(log.config.get("answer_column") or "answer")
    is_held = r"bool(re.search(rf'(?<!\w){re.escape(str(expected))}(?!\w)', text))"
    paid = f"(reward + {is_held}) / 2 if len(ids) < {limit or 'LIMIT'} else 0.0"
    line = f"return [{paid} for ids, expected, text, reward in zip(completion_ids, {answers}, completions, rewards)]"
    told = f"Store the current return value in `rewards`, add the arguments `completion_ids` and `{answers}`, import "
    told += f"`re`, and end the function with `{line}`. A truncated completion then gets 0, a finished one half of the "
    told += "current reward, and half for the answer as a word of its own (in chats the text is "
    told += '`text[0]["content"]`). The first half stays, because a reward for the answer alone would be 0 as long as '
    told += "no rollout holds it."
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
    unknown = "is unknown: the reward so far was not of finished texts."
    if not limit or not longer or longer <= limit or not len(reward) or not len(cut):
        return f"{_repaired_reward(log)} How far it rises from there {unknown}", ""
    first, step, times = float(cut.values[0]), int(cut.steps[0]), longer / limit
    begins = first**times
    if first == 1:
        return f"{_repaired_reward(log)} How far it rises from there {unknown}", ""
    told = f"about {begins:.0%} truncated at first, and then fewer, because only finished completions are paid. "
    told += f"Basis: {first:.0%} were at step {step}, at {limit} tokens; if as many end per token, {begins:.0%} reach "
    told += f"{longer}."
    if reward.values.max() <= 1:
        told += f" The mean reward starts below {(1 - begins) / (1 + half):.2f}, "
        told += "half of the finished share as long as no answer is right" if half else "the finished share"
        told += ". Without a right answer it can reach 0.5, so only what lies above is answers" * half
    told += f" How far it rises {unknown}" if reward.values.max() > 1 else f"; how far it rises {unknown}"
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
    return f"`{typed_option(name, longer)}` (now {limit})", longer


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
    if not is_most and log.is_of_verl:
        after = "mask truncated rollouts: set their part of `response_mask` to 0"
    elif not is_most and trainer != OWN_TRAINER:
        after = "mask truncated rollouts (in TRL `mask_truncated_completions=True`)"
    ends = float(log.series("truncated").values.min()) < 1  # the model can sample its end-of-sequence token
    others = (
        *(() if ends else (f"If longer ones do not end either: {_END_TOKEN}{shown * (trainer == TRL_TRAINER)}.",)),
        f"If truncated completions already hold the answer: {after}.",
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
        "reward is of whole texts. How many are left is unknown: no completion of this run is longer than the limit.",
        value=None if _limit(log) else _length_times(log, 2.0),
        others=(*others, *([] if reward else [f"{unchecked}reward function."])),
    )


_END_TOKEN = (
    "the model may have no end-of-sequence token to sample: check eos_token_id, the pad token and the chat template"
)


WHAT_ELSE = (
    "Read some truncated rollouts: they show whether another change is needed. If a wrong answer has a high reward, "
    "let the function compare with the right answer as well. If there is a right answer with more text after it, or "
    "no answer yet, no other change is needed."
)
"""What truncated rollouts decide, beyond giving them 0."""


def _ending_change(log: RunLog, check: str) -> Change:
    """No completion ends: without a finished one to pay for, a repaired reward would be constant."""
    longer, _ = _longer_limit(log)
    return Change(
        knob="reward function",
        direction="repair",
        sentence="Make completions end: none did, at no step.",
        effect="some completions end, where now 0% do. How many is unknown: none ended in this run.",
        steps=(
            f"{check[:1].upper()}{check[1:]}",
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


WITHOUT_ROLLOUTS = Undecided("store rollouts: repetition is read from their tokens")


def repetition(log: RunLog) -> RuleVerdict:
    """Completions repeat themselves."""
    repeated = log.series("repetition")
    if len(repeated) < FEWEST_PLAIN:
        return too_few(repeated, WITHOUT_ROLLOUTS.needs, FEWEST_PLAIN)
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
        change=_repetition_change(log, share.value),
        confidence="certain",
    )


def _repetition_change(log: RunLog, repeated: float) -> Change:
    """Shorten the limit; where it already cuts many completions off, it would cut off more, so the reward changes."""
    unknown = "the change of the reward is unknown until a run with this change."
    if isinstance(cut_completions(log), RunFinding):
        return Change(
            knob="reward function",
            direction="repair",
            sentence="Penalise repetition in the reward.",
            effect=f"less than {repeated:.0%} repeated, and completions that end before the limit; {unknown}",
            steps=reward_steps(
                log.config,
                "Subtract the share of the four-token sequences of a completion that occurred in it before.",
            ),
            not_advised=("A shorter limit: it would cut off more completions.",),
        )
    return Change(
        knob="completion length",
        direction="down",
        sentence="Shorten the token limit.",
        alternatives=(Alternative("reward function", "repair", "Penalise repetition in the reward."),),
        effect=f"completions of at most half the length, and less than {repeated:.0%} repeated; {unknown}",
        value=None if _limit(log) else _length_times(log, 0.5),
    )
