"""How hard the prompts of a run are, what chance makes of it, and what to do about groups that teach nothing."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from scoregram.advice.findings import Change, RuleVerdict, RunFinding, Undecided
from scoregram.advice.prompt_filter import EqualRewards, counted_prompts, visit_steps
from scoregram.advice.settings import (
    DYNAMIC_SAMPLING,
    OWN_TRAINER,
    PROMPTS,
    TRL_TRAINER,
    can_sample_dynamically,
    changed_count,
    draws_problems,
    stored_setting,
    trainer_of,
)
from scoregram.bootstrap import mean_estimate
from scoregram.exhibits import Estimate, cell_text
from scoregram.reading import RunReading, alike_chance, step_stretches
from scoregram.statistics import mixed_probability

WANTED_LIVE = 0.8
"""Share of live groups that a group size aims at where no Gram says more."""
LARGEST_ADVISED_GROUP = 1024
CHANCE_QUANTILE = 1.645
"""One-sided 95 % quantile of the normal law: beyond it, more groups are alike than chance makes."""
PAIR_QUANTILE = 1.751
"""One-sided 96 % quantile. The number of right pairs is skewed: at 95 % the test would err in up to 5.6 %."""


@dataclass(frozen=True)
class SuccessLaw:
    """How success rates vary between prompts: a Beta law with the mean and the spread of the observed ones.

    The rate of one prompt, from 8 rollouts, says little about groups of 32: a prompt that was never solved may have any
    small rate. Chances that follow from the law of all prompts respect what was seen: if a share `d` of groups of `R`
    is dead, groups of `nR` are dead with a chance of at least `dⁿ`. The mean is that of all steps, the spread that
    between prompts of the same steps.
    """

    mean: float
    concentration: float
    """`a + b` of the Beta law: infinite if all prompts are alike, 0 if each is always or never solved."""

    @staticmethod
    def of(*stretches: Sequence[tuple[int, int]]) -> "SuccessLaw | None":
        """The law from right rollouts and all rollouts of each prompt, in one or several stretches of steps.

        In a stretch, the share of right pairs is `E p²` for two rollouts of one prompt and `(E p)²` for two of
        different prompts, both without bias. Their difference is the spread between prompts; a success rate that
        changes from stretch to stretch does not enter it. All prompts count as alike unless more pairs of one prompt
        are right than chance makes (`pairs_exceed_chance`). None if no prompt has two rollouts.

        Example:
            >>> SuccessLaw.of([(0, 4), (4, 4)]), SuccessLaw.of([(0, 4)], [(4, 4)])
            (SuccessLaw(mean=0.5, concentration=0.0), SuccessLaw(mean=0.5, concentration=inf))
        """
        rollouts = sum(count for counts in stretches for _, count in counts)
        if not any(count > 1 for counts in stretches for _, count in counts):
            return None
        mean = sum(right for counts in stretches for right, _ in counts) / rollouts
        parts = [(sum(count for _, count in counts) / rollouts, *_spread_and_mixed(counts)) for counts in stretches]
        spread, mixed = (sum(part[0] * part[place] for part in parts) for place in (1, 2))
        differ = spread > 0 and pairs_exceed_chance(stretches)
        return SuccessLaw(mean, max(mixed, 0.0) / spread if differ else math.inf)

    def live_share(self, size: int) -> float:
        """Expected share of live groups of a size."""
        if math.isinf(self.concentration):
            return mixed_probability(self.mean, size)
        whole = self.concentration
        return max(1 - sum(rising_ratio(part, whole, size) for part in self._parts()), 0.0)

    def live_if_kept(self, size: int, left_out: str) -> float:
        """Chance that a prompt's group is live if an earlier one of this size was not `left_out`, a value of `KINDS`.

        `(ℓ - Σ_k P(live, k)) / (1 - Σ_k P(k))` over the kinds that are left out, with the live share `ℓ` and
        `P(live, all wrong) = P(wrong) - P(wrong twice) - P(wrong, then right)`. The live share if all prompts are
        alike; `nan` if every prompt would be left out.
        """
        if math.isinf(self.concentration):
            return self.live_share(size)
        whole, (right, wrong) = self.concentration, self._parts()
        if not whole:  # each prompt is always or never solved
            kept = self.mean * ("all right" not in left_out) + (1 - self.mean) * ("all wrong" not in left_out)
            return 0.0 if kept > 0 else math.nan
        mixed = rising_ratio(right, whole, size) * rising_ratio(wrong, whole + size, size)
        live, kept = self.live_share(size), 1.0
        for kind, part in (("all right", right), ("all wrong", wrong)):
            if kind in left_out:
                once = rising_ratio(part, whole, size)
                live -= once - rising_ratio(part, whole, 2 * size) - mixed
                kept -= once
        return max(live, 0.0) / kept if kept > 0 else math.nan

    def _parts(self) -> tuple[float, float]:
        """`a` and `b` of the Beta law."""
        return self.mean * self.concentration, (1 - self.mean) * self.concentration


def _spread_and_mixed(counts: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Variance of the success rates of a stretch, and the mean of `p (1 - p)`; 0 where no pair of rollouts tells."""
    right, rollouts = (sum(one) for one in zip(*counts, strict=True))
    pairs = sum(count * (count - 1) for _, count in counts)
    apart = rollouts**2 - sum(count**2 for _, count in counts)
    same = sum(one * (one - 1) for one, _ in counts) / pairs if pairs else math.nan  # E p²
    across = (right**2 - sum(one**2 for one, _ in counts)) / apart if apart else same  # (E p)²
    return (same - across, right / rollouts - same) if pairs else (0.0, 0.0)


def pairs_exceed_chance(stretches: Sequence[Sequence[tuple[int, int]]]) -> bool:
    """Whether more pairs of rollouts of one prompt are right than chance makes: a one-sided test at 5 %.

    By the exact mean and variance of their number if all prompts of a stretch are equally hard, given its right
    rollouts, a normal law (`PAIR_QUANTILE`) and half a pair of correction.
    """
    found = mean = variance = 0.0
    for counts in stretches:
        right, rollouts = (sum(one) for one in zip(*counts, strict=True))
        found += sum(one * (one - 1) for one, _ in counts) / 2
        pairs = sum(count * (count - 1) for _, count in counts) / 2
        touching = sum(count * (count - 1) * (count - 2) for _, count in counts)  # two pairs with one rollout in common
        two, three, four = (alike_chance(right, rollouts, count) for count in (2, 3, 4))
        expected = pairs * two
        mean += expected
        variance += expected + touching * three + (pairs**2 - pairs - touching) * four - expected**2
    return variance > 0 and found - 0.5 - mean > PAIR_QUANTILE * math.sqrt(variance)


def rising_ratio(part: float, whole: float, count: int) -> float:
    """`Π_{i < n} (part + i) / (whole + i)`: the chance of `n` equal outcomes in a row under a Beta law."""
    return math.prod((part + i) / (whole + i) if whole + i else 1.0 for i in range(count))


def group_size_for(law: SuccessLaw, wanted: float = WANTED_LIVE) -> int | None:
    """Least group size at which a share `wanted` of groups is expected to be live; None if none up to 1024 is.

    Example:
        >>> group_size_for(SuccessLaw(0.5, math.inf)), group_size_for(SuccessLaw(0.0, math.inf))
        (4, None)
    """
    sizes = range(2, LARGEST_ADVISED_GROUP + 1)
    return next((size for size in sizes if law.live_share(size) >= wanted), None)


HALF_RIGHT, FEWEST_HALF_RIGHT = (0.25, 0.75), 3
"""Share of right rollouts of a step that counts as about half, and how many such steps say what it is worth."""


@dataclass(frozen=True)
class HalfRight:
    """Share of live groups at steps of a run of which about half of the rollouts were right."""

    live: Estimate
    steps: int


def half_right_steps(run: RunReading) -> HalfRight | None:
    """What the run itself had where its problems were neither easy nor hard; None with fewer than three such steps.

    Only for rewards of 0 and 1: a graded reward is no share of right rollouts.
    """
    if run.is_graded or not run.has_whole_groups:
        return None
    least, most = HALF_RIGHT
    rewards = {line["step"]: float(line.get("scoregram/reward", line.get("reward", math.nan))) for line in run.lines}
    found = [share for step, share in zip(*run.live_share, strict=True) if least <= rewards.get(step, 0.0) <= most]
    known = [share for share in found if not math.isnan(share)]
    return HalfRight(mean_estimate(known), len(known)) if len(known) >= FEWEST_HALF_RIGHT else None


def live_rates(size: int, wanted: float) -> tuple[float, float] | None:
    """Least and largest success rate at which a share `wanted` of the groups of a size is live; None if none is.

    Solves `1 - p^R - (1-p)^R = wanted` by bisection. It is the same at `p` and `1 - p`.

    Example:
        >>> [round(rate, 3) for rate in live_rates(3, 0.5) or ()], live_rates(2, 0.8)
        ([0.211, 0.789], None)
    """
    if mixed_probability(0.5, size) < wanted:
        return None
    low, high = 0.0, 0.5
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if mixed_probability(middle, size) >= wanted else (middle, high)
    return high, 1 - high


@dataclass(frozen=True, kw_only=True)
class OutcomeCounts:
    """How groups of one size ended whose rewards are all 0 or 1."""

    groups: int
    size: int
    right: int
    """Right rollouts of all groups together."""
    all_wrong: int
    all_right: int
    stretches: tuple["OutcomeCounts", ...] = ()
    """The same groups by stretches of consecutive steps, if there are several. Chance is computed within each: a
    success rate that changes in time must not look like prompts that differ."""

    @property
    def success_rate(self) -> float:
        """Share of right rollouts."""
        return self.right / (self.groups * self.size)

    def chance_share(self, kind: str) -> float:
        """Share of `all wrong` or `all right` groups that chance makes if the prompts of a stretch are equally hard.

        Given `S` right rollouts among the `N` of a stretch, every arrangement is then equally likely, so a group of `R`
        has none of them with the chance `Π_{i<R} (N-S-i) / (N-i)`, about `(1-p)^R`. No success rate need be known for
        that.
        """
        return sum(part.groups * part._chance(kind, self.size) for part in self.stretches or (self,)) / self.groups

    def exceeds_chance(self, kind: str) -> bool:
        """Whether more groups are `all wrong`, or `all right`, than chance makes: a one-sided test at 5 %.

        By the exact mean and variance of their number given the right rollouts of each stretch, a normal law and half
        a group of correction.
        """
        found = {"all wrong": self.all_wrong, "all right": self.all_right}[kind]
        moments = [part._moments(kind) for part in self.stretches or (self,)]
        mean, variance = (sum(values) for values in zip(*moments, strict=True))
        return variance > 0 and found - 0.5 - mean > CHANCE_QUANTILE * math.sqrt(variance)

    def _moments(self, kind: str) -> tuple[float, float]:
        """Mean and variance of the number of groups of a kind by chance, given the right rollouts."""
        mean = self.groups * self._chance(kind, self.size)
        pairs = self.groups * (self.groups - 1) * self._chance(kind, 2 * self.size)
        return mean, mean + pairs - mean**2

    def _chance(self, kind: str, count: int) -> float:
        """Chance that `count` given rollouts are all of one kind."""
        rollouts = self.groups * self.size
        alike = rollouts - self.right if kind == "all wrong" else self.right
        return alike_chance(alike, rollouts, count)


def last_outcomes(run: RunReading) -> OutcomeCounts | None:
    """Outcomes of the groups of the last third, from every step that logged them; None unless all rewards are 0 or 1.

    None also if groups differ in size, or a stored group of the last third has a reward that is missing.
    """
    size = run.group_size
    if size is None or not run.success_counts() or any(group.size != size for group in run.last_groups):
        return None
    kinds = ("groups/all_wrong", "groups/all_right")
    lines = [line for line in run.last_lines if line.get("groups", 0) > 0 and all(kind in line for kind in kinds)]
    rewards = [float(line.get("scoregram/reward", line.get("reward", math.nan))) for line in lines]
    if not lines or any(map(math.isnan, rewards)):
        return None
    steps = [
        OutcomeCounts(
            groups=int(line["groups"]),
            size=size,
            right=round(line["groups"] * reward * size),
            all_wrong=round(line["groups"] * line["groups/all_wrong"]),
            all_right=round(line["groups"] * line["groups/all_right"]),
        )
        for line, reward in zip(lines, rewards, strict=True)
    ]
    stretches = [joined_outcomes(steps[part]) for part in step_stretches([one.groups for one in steps])]
    return replace(joined_outcomes(stretches), stretches=tuple(stretches) if len(stretches) > 1 else ())


def joined_outcomes(parts: Sequence[OutcomeCounts]) -> OutcomeCounts:
    """The outcomes of several sets of groups together, as one set."""
    return OutcomeCounts(
        size=parts[0].size,
        groups=sum(part.groups for part in parts),
        right=sum(part.right for part in parts),
        all_wrong=sum(part.all_wrong for part in parts),
        all_right=sum(part.all_right for part in parts),
    )


def divisors(batch: float | int) -> list[int]:
    """Group sizes from 2 on that divide the rollouts of a step into two prompts or more; none if they vary.

    Example:
        >>> divisors(12), divisors(12.5), divisors(math.nan)
        ([2, 3, 4, 6], [], [])
    """
    if not math.isfinite(batch) or batch != round(batch):
        return []
    rollouts = round(batch)
    return [size for size in range(2, rollouts // 2 + 1) if rollouts % size == 0]


# What to do about dead groups

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
    """What steps had of which about half of the rollouts were right; None if not known."""

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
    has_list = not draws_problems(known.config)
    filters = [_prompt_filter(known)] if has_list and known.differ is not False else []
    others = [] if known.direction == MEDIUM and filters else [_other_problems(known)]
    yield from [*others, *filters] if known.direction == HARDER else [*filters, *others]
    if not trainer_of(known.config) or can_sample_dynamically(known.config):
        yield _dynamic_sampling(known)


def _not_advised(known: DeadGroups) -> Iterator[str]:
    if known.differ is False and not draws_problems(known.config):
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
    price = f"price: {rollouts} for each prompt once{_steps_of_a_visit(known, size)}."
    if math.isnan(again):
        unknown = "How many of the remaining groups would be live cannot be said "
        unknown += "from so few stored groups." if known.law else "without stored rewards of 0 and 1."
        return Lever(told, f"{price} {unknown}", steps)
    effect = f"by the spread of the success rates, about {again:.0%} of the remaining groups would then be live, now "
    return Lever(told, f"{effect}{known.live:.0%}. {price[:1].upper()}{price[1:]}", steps)


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
    unknown = f"no {known.direction} problem was sampled"
    effect = f"{expected}. How many will be right cannot be said before one run: {unknown}."
    if not expected:
        effect = f"by how much the share of live groups ({known.live:.0%}) rises cannot be said before one run: "
        effect += f"{unknown}."
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
        return (f"Not a setting: pass a `train_dataset` of {known.direction} prompts to the trainer.",)
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
        f"Not a setting: the task {name} has no {known.direction} problems of its own. Write some, a line each "
        f'`{{"prompt": "…", "answer": "…"}}`, to `{folder}/train.jsonl` and `{folder}/test.jsonl`.',
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
