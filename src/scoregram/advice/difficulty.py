"""What to do about groups that teach nothing: one change first, and the others with their price."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from scoregram.advice.findings import Change, RuleVerdict, RunFinding, Undecided
from scoregram.advice.prompt_filter import EqualRewards, counted_prompts, visit_steps
from scoregram.advice.settings import (
    DYNAMIC_SAMPLING,
    PROMPTS,
    can_sample_dynamically,
    changed_count,
    has_prompt_list,
)
from scoregram.exhibits import cell_text
from scoregram.reading import (
    HALF_RIGHT,
    OWN_TRAINER,
    TRL_TRAINER,
    HalfRight,
    OutcomeCounts,
    RunReading,
    SuccessLaw,
    divisors,
    half_right_steps,
    last_outcomes,
    stored_setting,
    trainer_of,
)
from scoregram.statistics import mixed_probability

EASIER, HARDER, MEDIUM = "easier", "harder", "medium"
"""Problems to ask for: where most dead groups are all wrong, where most are all right, and else."""
KINDS = MappingProxyType({EASIER: "all wrong", HARDER: "all right", MEDIUM: "all wrong or all right"})
FILTERS: Mapping[str, EqualRewards] = MappingProxyType({EASIER: "all-wrong", HARDER: "all-right", MEDIUM: "equal"})
"""Problems to ask for → prompts that a filter leaves out."""
REWARD_KINDS = MappingProxyType(
    {
        "all wrong": "all have the reward 0",
        "all right": "all have the reward 1",
        "all wrong or all right": "all have one reward",
    }
)
"""Key of `KINDS` → the same where rewards are graded, so that right and wrong have no meaning."""
LEAST_LIVE = 0.05
"""Share of live groups below which the cost of dynamic sampling is not extrapolated."""


@dataclass(frozen=True, kw_only=True)
class DeadGroups:
    """What is known of a run with many dead groups."""

    live: float
    """Share of live groups."""
    direction: str
    """Key of `KINDS`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    outcomes: OutcomeCounts | None = None
    law: SuccessLaw | None = None
    batch_size: float | int = math.nan
    """Rollouts of a step."""
    size_sentence: str = ""
    """What another group size would do; empty if not known."""
    size_is_advised: bool = False
    """Whether the rule on the group size asks for larger groups."""
    is_graded: bool = False
    """Whether rewards other than 0 and 1 were seen."""
    half_right: HalfRight | None = None
    """Share of live groups at the steps at which about half of the rollouts were right; None with too few of them."""

    @property
    def group_size(self) -> int | None:
        """Rollouts of a group; None if not known."""
        size = self.outcomes.size if self.outcomes else stored_setting(self.config, "group_size", "num_generations")
        return size if isinstance(size, int) else None

    @property
    def kind(self) -> str:
        """What the dead groups have in common, in words."""
        return REWARD_KINDS[KINDS[self.direction]] if self.is_graded else KINDS[self.direction]

    @property
    def differ(self) -> bool | None:
        """Whether prompts are shown to differ in difficulty; None if it cannot be tested."""
        kinds = [kind for kind in ("all wrong", "all right") if kind in KINDS[self.direction]]
        return None if self.outcomes is None else any(self.outcomes.exceeds_chance(kind) for kind in kinds)


@dataclass(frozen=True)
class Lever:
    """One thing to change, and what it brings and costs."""

    sentence: str
    effect: str
    steps: tuple[str, ...] = ()
    """What to type or do, one after the other, where no setting alone does it."""


def prompt_change(known: DeadGroups) -> Change:
    """One change for dead groups, and the others behind it, each with its price.

    A filter comes first where prompts differ: it costs one visit of each prompt, and every later step has more live
    groups. Other problems cost no rollouts, but change what is learnt; they come first where most dead groups are all
    right, since what those prompts teach is learnt, and where problems are drawn, so that there is no list to filter.
    Dynamic sampling pays for live groups at every step, and has lost against plain groups at equal rollouts
    (`docs/allocation.md`).
    """
    first, *others = _levers(known)
    told = [" ".join([one.sentence, *one.steps, f"{one.effect[:1].upper()}{one.effect[1:]}"]) for one in others]
    return Change(
        knob=PROMPTS,
        direction=known.direction,
        sentence=first.sentence,
        effect=first.effect,
        steps=first.steps,
        others=(*told, *([known.size_sentence] if known.size_is_advised else [])),
        not_advised=tuple(_not_advised(known)),
    )


def _levers(known: DeadGroups) -> Iterator[Lever]:
    has_list = has_prompt_list(known.config)
    filters = [_prompt_filter(known)] if has_list and known.differ is not False else []
    others = [] if known.direction == MEDIUM and filters else [_other_problems(known)]
    yield from [*others, *filters] if known.direction == HARDER else [*filters, *others]
    if not trainer_of(known.config) or can_sample_dynamically(known.config):
        yield _dynamic_sampling(known)


def _not_advised(known: DeadGroups) -> Iterator[str]:
    if known.differ is False and has_prompt_list(known.config):
        yield (
            "Leaving out prompts by their success rate would gain little: no more groups are "
            f"{KINDS[known.direction]} than chance makes if all are equally hard."
        )
    if known.size_sentence and not known.size_is_advised:
        yield known.size_sentence


def _dynamic_sampling(known: DeadGroups) -> Lever:
    is_own = can_sample_dynamically(known.config)
    wanted = 1 / max(known.live, LEAST_LIVE)
    rounds = (stored_setting(known.config, "dynamic_rounds") or math.inf) if is_own else math.inf
    times = f"{min(wanted, rounds):.1f} times"
    effect = f"up to {times} as many live groups in an update, for {times} the rollouts"
    effect += f" (--dynamic-rounds {rounds} allows no more)." if wanted > rounds else "."
    effect += " DAPO's estimator and loss come with it, unless --estimator and --objective keep yours." * is_own
    effect += " At equal rollouts it gained less than plain groups in our small runs (docs/allocation.md)."
    how = f"--method {DYNAMIC_SAMPLING}" if is_own else "as in DAPO"
    told = f"Sample further prompts in every step until its groups are live (dynamic sampling, {how})."
    return Lever(told, effect)


def _prompt_filter(known: DeadGroups) -> Lever:
    """Leave out prompts that one visit shows to teach nothing; in TRL by a smaller data set."""
    size = known.group_size
    rollouts = f"{size} rollouts" if size else "rollouts"
    verb = "" if known.is_graded else "were "
    told = f"Leave out prompts whose {rollouts} {verb}{known.kind}."
    told += " TRL has no dynamic sampling." * (trainer_of(known.config) == TRL_TRAINER)
    steps = visit_steps(FILTERS[known.direction], known.config)
    is_known = known.law is not None and not math.isinf(known.law.concentration)
    again = known.law.live_if_kept(size, KINDS[known.direction]) if known.law and is_known and size else math.nan
    price = f"Price: {rollouts} for each prompt once{_steps_of_a_visit(known, size)}."
    if math.isnan(again):
        unknown = f"a larger share of live groups than {known.live:.0%}. How much larger is unknown: "
        unknown += "too few groups are stored." if known.law else "no rewards of 0 and 1 are stored."
        return Lever(told, f"{unknown} {price}", steps)
    effect = f"by the spread of the success rates, about {again:.0%} of the remaining groups would then be live, now "
    return Lever(told, f"{effect}{known.live:.0%}. {price}", steps)


def _steps_of_a_visit(known: DeadGroups, size: int | None) -> str:
    """What one visit of the data set costs, in steps of this run; empty if its rollouts per step are not known."""
    batch = known.batch_size
    if not size or not batch or not batch > 0:
        return ""
    count, words = counted_prompts(known.config)
    return f", as much as {math.ceil(count * size / batch):,} steps of this run for {words}"


def _other_problems(known: DeadGroups) -> Lever:
    now = (
        f", so that about half of the rollouts are right, now {known.outcomes.success_rate:.1%}"
        if known.outcomes
        else ""
    )
    expected = "" if known.is_graded else live_expectation(known.half_right, known.live, known.group_size)
    unknown = f"is unknown until a run with this change: no {known.direction} problem was sampled."
    effect = f"{expected}. The share of right rollouts {unknown}"
    if not expected:
        effect = f"a larger share of live groups than {known.live:.0%}. How much larger {unknown}"
    effect += " It costs no rollouts, but changes what is learnt."
    return Lever(f"Take {known.direction} problems{now}.", effect, _problem_steps(known))


def live_expectation(half_right: HalfRight | None, live: float, size: int | None) -> str:
    """Share of live groups to expect where about half of the rollouts are right, and its basis; empty if unknown.

    From such steps of the run, else the largest share that groups of a size can have, `1 - 2 · 0.5^R`.
    """
    if half_right is not None:
        share, (least, most) = half_right.live, HALF_RIGHT
        ends = "" if math.isnan(share.low) else f" [{100 * share.low:.0f}, {100 * share.high:.0f}]"
        told = (
            f"about {share.value:.0%}{ends} of the groups live if {least:.0%} to {most:.0%} of the rollouts are right, "
        )
        return f"{told}as at {half_right.steps} steps of this run; now {live:.0%}"
    if size is None or size < 2:
        return ""
    most_live = f"at most {mixed_probability(0.5, size):.0%} of the groups live, now {live:.0%}, if half of the "
    return f"{most_live}rollouts are right (1 − 2 · 0.5{superscript(size)}; fewer where prompts differ)"


def superscript(number: int) -> str:
    """A natural number as an exponent.

    Example:
        >>> superscript(18)
        '¹⁸'
    """
    return str(number).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _problem_steps(known: DeadGroups) -> tuple[str, ...]:
    """How to get other problems where no setting of the task decides how hard they are."""
    trainer, task = trainer_of(known.config), str(known.config.get("task") or "")
    name, _, argument = task.partition(":")
    folder = f"data/{known.direction}"
    if trainer == TRL_TRAINER:
        return (f"Pass a `train_dataset` of {known.direction} prompts to the trainer.",)
    if trainer != OWN_TRAINER or not task or changed_count(known.direction, task) is not None:
        return ()
    if name == "reasoning-gym":
        generator = argument.partition(":")[0]
        listed = f"from reasoning_gym.factory import DATASETS; print(DATASETS['{generator}'][1]())"
        return (
            f'See the settings of {generator}: `python -c "{listed}"`',
            f"Change one that makes problems {known.direction}, and add it as `:NAME=VALUE` to `--task {task}`.",
        )
    return (
        f"There is no option for this: the task {name} has no {known.direction} problems of its own. Write some, a "
        f'line each `{{"prompt": "…", "answer": "…"}}`, to `{folder}/train.jsonl` and `{folder}/test.jsonl`.',
        f"Type `--task jsonl:{folder}` (now {task}).",
    )


def informed_finding(finding: RunFinding, run: RunReading, size: RuleVerdict) -> RunFinding:
    """The finding on dead groups with what the groups of a run folder add to its log.

    Args:
        finding: From the log.
        run: The run.
        size: What the rule on the group size says, so that both agree.
    """
    if finding.change is None:
        return finding
    outcomes, law = last_outcomes(run), SuccessLaw.of(*run.success_stretches())
    known = DeadGroups(
        live=1 - finding.number.value,
        direction=finding.change.direction,
        config=run.config,
        outcomes=outcomes,
        law=law,
        batch_size=run.batch_size,
        is_graded=run.is_graded,
        half_right=half_right_steps(run),
        size_sentence=size_sentence(run, law, size),
        size_is_advised=isinstance(size, RunFinding) and size.change is not None and size.change.direction == "up",
    )
    told = "" if outcomes is None else f" {chance_sentence(outcomes, known.direction)}"
    return replace(finding, sentence=f"{finding.sentence}{told}".strip(), change=prompt_change(known))


def chance_sentence(outcomes: OutcomeCounts, direction: str) -> str:
    """What chance would make of groups if all prompts of a step were equally hard, and what follows."""
    kind = "all right" if direction == HARDER else "all wrong"
    extreme = {"all right": "easier", "all wrong": "harder"}[kind]
    by_chance, rate = outcomes.chance_share(kind), outcomes.success_rate
    told = f"Chance would make {by_chance:.0%} {kind} if all prompts of a step were equally hard ({rate:.1%} of the "
    told += "rollouts are right)"
    if outcomes.exceeds_chance(kind):
        return f"{told}: so prompts differ, and some are {extreme} than others."
    return f"{told}: so no prompt is shown to be {extreme} than the others."


def size_sentence(run: RunReading, law: SuccessLaw | None, verdict: RuleVerdict) -> str:
    """What another group size would do for dead groups, in agreement with the rule on the group size."""
    used, batch, best = run.group_size, run.batch_size, run.noise().best_group_size
    least = run.trust.marked(f"the update has the least error with groups of {cell_text(best)}.")
    if isinstance(verdict, RunFinding) and verdict.change is not None:
        if verdict.change.direction == "down":
            return f"Larger groups: {least}"
        return f"Larger groups: {verdict.change.sentence} See “{verdict.name}”."
    if used is None or law is None or used < 2 or isinstance(verdict, Undecided):
        return ""
    twice = 2 * used
    shares = f"{law.live_share(twice):.0%} of them would be live"
    if {used, twice} <= set(divisors(batch)):
        later, now = (law.live_share(size) * batch / size for size in (twice, used))
        shares = f"a step would have about {later:.1f} live ones, now {now:.1f}"
    told = f"Groups of {twice} at the same rollouts: {shares}."
    return f"{told} {least[:1].upper()}{least[1:]}"
