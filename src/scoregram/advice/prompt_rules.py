"""The rule on prompts that have most of an update, from the shares that are stored with groups.

A prompt has more of an update than others if its rewards have a wider range, its rollouts are longer, or its scores are
larger. A step in which few prompts are live says nothing about those that are: see `reading.step_shares`.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scoregram.advice.findings import Change, RuleVerdict, RunFinding, Undecided
from scoregram.advice.gram_rules import (
    DRIVER_SHARE,
    OUTLYING,
    division_by_length,
    dominating_rollouts,
    leave_out_steps,
    shortened_text,
)
from scoregram.advice.noise_rules import ENOUGH_STEPS, prompts_per_step, trained_estimator
from scoregram.advice.settings import reward_steps
from scoregram.bootstrap import FEWEST, mean_estimate, t_mean
from scoregram.exhibits import Estimate
from scoregram.reading import (
    ONE_IN,
    OWN_TRAINER,
    TRL_TRAINER,
    PromptShare,
    RunReading,
    StepShares,
    StoredGroup,
    returning_prompts,
    step_shares,
    trainer_of,
)

LEAST_PROMPTS = 3
"""Prompts of a step below which a share of the update says little."""
TIMES_NULL = 2.0
"""How many times the share that its rewards alone give it a prompt may have."""
LONGER = 2.0
"""Ratio to the length of other rollouts from which on division by length is advised."""
_DIVIDED = {OWN_TRAINER: ": `--estimator grpo`", TRL_TRAINER: ': `scale_rewards="group"`'}


@dataclass(frozen=True, kw_only=True)
class Dominance:
    """Prompts that have most of the updates that they are part of."""

    told: str
    """Who, as a sentence."""
    label: str
    share: Estimate
    null: float
    """Mean of what their rewards alone would give them."""
    where: str
    """The steps or visits that the means are over."""
    shares: Sequence[PromptShare]
    """Their groups, the largest share first."""
    others: Sequence[StoredGroup]
    """Live groups of the same steps."""


def dominating_prompts(run: RunReading) -> RuleVerdict:
    """One prompt, or a few, make most of a step's update; or one prompt does at each of its visits."""
    steps = step_shares(run.last_measured)
    if len(steps) < FEWEST:
        return Undecided(_shares_needed(run))
    if isinstance(dominating_rollouts(run), RunFinding):
        return Undecided("first resolve “dominating rollouts”: one rollout is most of its prompt")
    found = _dominated_steps(steps) or _dominated_visits(run)
    if found is None:
        return None
    return RunFinding(
        name="dominating prompts",
        severity="warning",
        sentence=f"{found.told} {_largest_group(run, found.shares[0])}",
        number=found.share,
        label=found.label,
        evidence=f"{found.where}; scores of one norm at right angles would give {found.null:.0%}. Found if the whole "
        f"95% interval lies above {DRIVER_SHARE:.0%}, and that of the share minus {TIMES_NULL:g} times this null above "
        "0. Dead groups have no share, and a share above 1, where other prompts cancel a part, counts as 1.",
        change=_smaller_share(run, found),
        confidence="certain",
    )


def _shares_needed(run: RunReading) -> str:
    """What the shares of prompts need to be known: the first cause that keeps them unknown, as what to do."""
    groups = run.last_measured
    if run.trust.measured >= ENOUGH_STEPS and groups:
        if (most := max(prompts_per_step(groups).values())) < LEAST_PROMPTS:
            return f"sample three prompts or more in a step: here it has {most}"
        if all(math.isnan(group.update_share) for group in groups):
            return "measure the Gram between prompts with this version: no shares of prompts are stored"
    return f"measure at least {ENOUGH_STEPS} steps with three or more live prompts, with the Gram between prompts"


def _dominated_steps(steps: Sequence[StepShares]) -> Dominance | None:
    """The largest share of a step is above the threshold on average."""
    share, nulls = mean_estimate([one.share for one in steps]), np.array([one.null for one in steps])
    excess = mean_estimate(np.array([one.share for one in steps]) - TIMES_NULL * nulls)
    if not (share.low > DRIVER_SHARE and excess.low > 0):
        return None
    most = max(len(one.few) for one in steps)
    who = "One prompt alone makes" if most == 1 else f"{most} prompts, one in {ONE_IN} of the live ones, make"
    largest = sorted((one for step in steps for one in step.few), key=lambda one: -one.capped)
    name, count = Counter(step.prompts[0].group.record.prompt_id for step in steps).most_common(1)[0]
    again = f" At {count} of these {len(steps)} steps it is {name}." if count > 1 else ""
    if count > 1:
        largest = sorted(largest, key=lambda one: one.group.record.prompt_id != name)
    few = {id(one.group) for one in largest}
    return Dominance(
        told=f"{who} {share.value:.0%} of a step's squared update on average.{again}",
        label=f"largest share of {'one prompt' if most == 1 else 'these prompts'}, last third",
        share=share,
        null=float(nulls.mean()),
        where=f"{len(steps)} steps with three live prompts or more",
        shares=largest,
        others=[one.group for step in steps for one in step.prompts if id(one.group) not in few],
    )


def _dominated_visits(run: RunReading) -> Dominance | None:
    """A prompt that comes back has most of the update at its visits; corrected for the number of prompts."""
    returning = returning_prompts(run)
    shares = {name: t_mean([one.capped for one in seen], tests=len(returning)) for name, seen in returning.items()}
    excess = {
        name: t_mean([one.capped - TIMES_NULL * one.null for one in seen], tests=len(returning))
        for name, seen in returning.items()
    }
    names = [name for name, share in shares.items() if share.low > DRIVER_SHARE and excess[name].low > 0]
    if not names:
        return None
    worst = max(names, key=lambda name: shares[name].value)
    seen = sorted(returning[worst], key=lambda one: -one.capped)
    more = f", as do {len(names) - 1} others of {len(returning)} prompts" if len(names) > 1 else ""
    steps = {one.group.record.step for one in seen}
    others = [g for g in run.groups if g.record.step in steps and g.record.prompt_id != worst and g.advantage_power > 0]
    return Dominance(
        told=f"Prompt {worst} makes {shares[worst].value:.0%} of the squared update of the steps that draw it{more}.",
        label=f"share of {worst}",
        share=shares[worst],
        null=float(np.mean([one.null for one in seen])),
        where=f"{len(seen)} visits beside two live prompts or more, corrected for {len(returning)} prompts",
        shares=seen,
        others=others,
    )


def _largest_group(run: RunReading, largest: PromptShare) -> str:
    """The group with the largest share: its prompt, step, rewards, lengths and, if stored, the text of the prompt."""
    record = largest.group.record
    rewards = ", ".join(f"{one:g}" for one in record.rewards.tolist()[:8]) + (", …" if largest.group.size > 8 else "")
    told = f"The largest: prompt {record.prompt_id} at step {record.step} with {largest.share:.0%}, rewards {rewards}, "
    told += f"{float(record.lengths.double().mean()):.0f} tokens on average"
    text = record.prompt
    if text is None and run.folder is not None:
        stored = (one.prompt for one in run.folder.rollouts([record.step]) if one.prompt_id == record.prompt_id)
        text = next((one for one in stored if one), None)
    return f"{told}: “{shortened_text(text)}”" if text else f"{told}."


def _smaller_share(run: RunReading, found: Dominance) -> Change:
    """Repair the range of the rewards, divide by length, or look at the prompt, whichever the numbers point to."""
    effect = f"the share falls from {found.share.value:.0%} towards {found.null:.0%}, what its rewards give it where "
    effect += "scores have one norm. The rise in reward is unknown until a run with this change."
    own, usual = (_median_width(groups) for groups in ([one.group for one in found.shares], found.others))
    name = found.shares[0].group.record.prompt_id
    if usual > 0 and own > OUTLYING * usual and "grpo" not in trained_estimator(run.config):
        divided = _DIVIDED.get(trainer_of(run.config), "")
        return Change(
            knob="reward function",
            direction="repair",
            sentence="Give the rewards of these prompts the range of the others.",
            effect=effect,
            steps=reward_steps(
                run.config,
                f"Call it on rollouts of {name}: its rewards are {own:g} apart, those of other prompts {usual:g}.",
                "If that is a mistake, repair it. If it is meant, divide the advantages of each prompt by their "
                f"deviation{divided}.",
            ),
        )
    ratio = _mean_length([one.group for one in found.shares]) / max(_mean_length(found.others), 1.0)
    if ratio > LONGER:
        return Change(
            knob="weight of single prompts",
            direction="down",
            sentence="Read the rollouts of these prompts, and let long ones weigh less.",
            effect=effect,
            steps=(
                f"Read them: they have {ratio:.1f} times the tokens of other prompts.",
                f"If they are fine, divide by length{division_by_length(run)}.",
            ),
        )
    return Change(
        knob="prompt set",
        direction="split",
        sentence=f"Read rollouts of {name}; leave the prompt out if it is broken.",
        effect=effect,
        steps=leave_out_steps(run, list(dict.fromkeys(one.group.record.prompt_id for one in found.shares))[:5]),
    )


def _median_width(groups: Sequence[StoredGroup]) -> float:
    """Median, over groups, of the largest reward minus the smallest; 0 without groups."""
    known = [rewards[rewards.isfinite()] for rewards in (group.record.rewards.double() for group in groups)]
    return float(np.median([float(one.max() - one.min()) for one in known if len(one)] or [0.0]))


def _mean_length(groups: Sequence[StoredGroup]) -> float:
    """Mean tokens of the rollouts of some groups; 0 without groups."""
    return float(np.mean([float(group.record.lengths.double().mean()) for group in groups] or [0.0]))
