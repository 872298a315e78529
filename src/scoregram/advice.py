"""Advice on what to change in a run, by stated rules.

A rule returns its advice, an empty list if there is nothing to change, and None if the numbers do not decide.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from scoregram.exhibits import cell_text
from scoregram.reading import RunReading
from scoregram.statistics import mixed_probability, mse_curve

DEAD_SHARE = 0.5
"""Share of dead groups above which other prompts or a larger group size are advised."""
WANTED_LIVE = 0.8
"""Share of live groups that a suggested group size aims at."""
LARGEST_ADVISED_GROUP = 1024
NOISE_FACTOR = 4.0
"""Factor between noise scale and batch size above which another batch size is advised."""
LEAST_GAIN = 0.05
DRIVER_SHARE = 0.5
FINISHED_SHARE = 0.9


@dataclass(frozen=True)
class Advice:
    """One thing to change, and why."""

    sentence: str
    rule: str
    """When the advice is given, with the number that led to it."""


def findings(run: RunReading) -> list[Advice]:
    """What every rule advises for a run, the most important first; empty if no rule applies."""
    return [one for verdict in rule_verdicts(run).values() for one in verdict or ()]


def rule_verdicts(run: RunReading) -> dict[str, list[Advice] | None]:
    """Name of a rule → what it advises; None where the numbers do not decide.

    Rules about noise do not decide while too few steps are measured: their intervals know the groups, not how much one
    step differs from the next.
    """
    few = run.trust.has_few_steps
    return {name: None if few and name in NOISE_RULES else rule(run) for name, rule in RULES.items()}


def advice_text(run: RunReading) -> str:
    """The advice as a list for a section of the page; then what needs no change, and what the numbers do not decide."""
    verdicts = rule_verdicts(run)
    given = "\n".join(f"- {one.sentence} Rule: {one.rule}" for several in verdicts.values() for one in several or ())
    fine = ", ".join(name for name, several in verdicts.items() if several == [])
    open_ = ", ".join(name for name, several in verdicts.items() if several is None)
    rest = (
        f"Nothing to change: {fine}." if fine else "",
        f"Cannot tell: {open_}. The run lacks the numbers, their intervals are too wide, or it has too few steps."
        if open_
        else "",
    )
    return "\n\n".join(part for part in (given, *rest) if part)


def group_size_for(chances: list[float], wanted: float = WANTED_LIVE) -> int | None:
    """Least group size at which a share `wanted` of groups is expected to be live, given the prompts' success rates.

    None if no size up to 1024 reaches it.

    Example:
        >>> group_size_for([0.5], 0.8), group_size_for([0.0, 0.5], 0.8)
        (4, None)
    """
    for size in range(2, LARGEST_ADVISED_GROUP + 1):
        if sum(mixed_probability(chance, size) for chance in chances) >= wanted * len(chances):
            return size
    return None


def _dead_groups(run: RunReading) -> list[Advice] | None:
    if math.isnan(run.summary.dead.value):
        return None
    if not run.summary.dead.value > DEAD_SHARE:
        return []
    given = []
    share = cell_text(run.summary.dead)
    rule = f"given if more than {DEAD_SHARE:.0%} of the groups of the last third are dead; {share} are."
    dead = [group for group in run.last_groups if not group.is_live]
    kinds = {"right": sum(g.right == g.size for g in dead), "wrong": sum(g.right == 0 for g in dead)}
    most = max(kinds, key=lambda kind: kinds[kind])
    if dead and kinds[most] > 2 / 3 * len(dead):
        which = "harder" if most == "right" else "easier"
        sentence = f"Draw {which} prompts: {kinds[most]} of the {len(dead)} dead groups are all {most}."
        given.append(Advice(sentence, f"{rule} Of these, more than two thirds are of one kind."))
    rates = run.success_rates()
    if not rates:
        return given or None
    size = group_size_for(rates)
    how = f"each of the {len(rates)} prompts has the success rate (right + ½) / (rollouts + 1)"
    if size is None:
        largest = LARGEST_ADVISED_GROUP
        sentence = f"No group size up to {largest} would make {WANTED_LIVE:.0%} of the groups live: change the prompts."
    elif size <= (run.group_size or 0):
        return given or None
    else:
        sentence = (
            f"A group size of {size} in place of {run.group_size} would make {WANTED_LIVE:.0%} of the groups live."
        )
    least = f"{rule} The size is the least with a mean probability of {WANTED_LIVE} of a live group, if {how}."
    return [*given, Advice(sentence, least)]


def _group_size(run: RunReading) -> list[Advice] | None:
    best, used, noise = run.summary.best_group_size, run.group_size, run.summary.components
    if used is None or noise is None or math.isnan(best.low) or not math.isfinite(best.value):
        return None
    wanted = max(2, round(best.value))
    error = mse_curve(noise, 1, torch.tensor([used, wanted])).tolist() if used >= 2 else [math.nan, math.nan]
    gain = 1 - error[1] / error[0] if error[0] > 0 else math.nan
    if math.isnan(gain):
        return None
    if gain < LEAST_GAIN:
        return []
    if best.low <= used <= best.high:
        return None  # a gain, but not resolved
    return [
        Advice(
            f"Use groups of about {wanted} in place of {used}: at the same number of rollouts the error of the update "
            f"would fall by about {gain:.0%}.",
            f"given if the 95 % interval of the best group size excludes the one used, and the estimated gain is at "
            f"least {LEAST_GAIN:.0%}; the best is {cell_text(best)}.",
        )
    ]


def _batch_size(run: RunReading) -> list[Advice] | None:
    scale, batch = run.summary.noise_scale, run.batch_size
    if math.isnan(scale.low) or not math.isfinite(batch):
        return None
    seen = f"it is {cell_text(scale)} against {batch:g} rollouts."
    if scale.low > NOISE_FACTOR * batch:
        target = f"towards {scale.low:.0f} or more" if math.isfinite(scale.low) else "well beyond"
        sentence = (
            f"Use more rollouts per step, {target}, or a smaller learning rate: steps of {batch:g} are mostly noise."
        )
        rule = (
            f"given if the whole 95 % interval of the noise scale lies above {NOISE_FACTOR:g} times the batch; {seen}"
        )
        return [Advice(sentence, rule)]
    if scale.high < batch / NOISE_FACTOR:
        sentence = (
            f"Fewer rollouts per step would be enough, towards {scale.high:.0f}: steps of {batch:g} average more than "
            "needed."
        )
        rule = (
            "given if the whole 95 % interval of the noise scale lies below the batch divided by "
            f"{NOISE_FACTOR:g}; {seen}"
        )
        return [Advice(sentence, rule)]
    return [] if batch / NOISE_FACTOR <= scale.low <= scale.high <= NOISE_FACTOR * batch else None


def _baseline(run: RunReading) -> list[Advice] | None:
    saving = run.summary.baseline_saving
    if not saving.low > LEAST_GAIN:
        return [] if saving.high <= LEAST_GAIN else None
    return [
        Advice(
            f"Try the variance-minimising baseline: it would save about {saving.value:.0%} of the variance within "
            "prompts, before the cost of estimating it.",
            f"given if the whole 95 % interval of the saving lies above {LEAST_GAIN:.0%}; it is {cell_text(saving)}.",
        )
    ]


def _truncated(run: RunReading) -> list[Advice] | None:
    share = run.last_mean("finished")
    if not share < FINISHED_SHARE:
        return None if math.isnan(share) else []
    return [
        Advice(
            f"Allow longer completions: {1 - share:.0%} of the rollouts were cut off at the token limit.",
            f"given if less than {FINISHED_SHARE:.0%} of the rollouts of the last third ended with a stop token; "
            f"{share:.1%} did.",
        )
    ]


def _prompts(run: RunReading) -> list[Advice] | None:
    trained, tested = run.summary.reward, run.summary.tested
    if not (trained.low > tested.high and trained.value - tested.value >= LEAST_GAIN):
        return None if math.isnan(trained.low) or math.isnan(tested.high) else []
    return [
        Advice(
            f"Train on more prompts: sampled in the same way, the policy earns {cell_text(trained)} on the prompts "
            f"that it trains on and {cell_text(tested)} on test problems.",
            "given if the 95 % intervals do not overlap and the means differ by at least "
            f"{LEAST_GAIN:g}; this assumes that test problems are no harder.",
        )
    ]


def _driver(run: RunReading) -> list[Advice] | None:
    share = run.last_mean("gram/largest_share")
    if not share > DRIVER_SHARE:
        return None if math.isnan(share) else []
    return [
        Advice(
            f"Look at the rollouts with the largest share: one alone accounts for {share:.0%} of the squared update of "
            "a step on average. More rollouts per step, or a length limit, would spread it.",
            f"given if the mean largest share of the last third is above {DRIVER_SHARE:.0%}.",
        )
    ]


def _rank(run: RunReading) -> list[Advice] | None:
    difference = run.summary.rank_difference
    if not difference.low <= 0 <= difference.high:
        return None if math.isnan(difference.low) else []
    return [
        Advice(
            f"Do not read redundancy into the effective rank of {cell_text(run.summary.effective_rank)}: orthogonal "
            f"rows of the same norms would give {cell_text(run.summary.effective_rank_null)}.",
            "given if the 95 % interval of measured minus null contains zero; it is "
            f"{cell_text(difference)} over {run.summary.live} live groups.",
        )
    ]


RULES: Mapping[str, Callable[[RunReading], list[Advice] | None]] = MappingProxyType(
    {
        "dead groups": _dead_groups,
        "group size": _group_size,
        "batch size": _batch_size,
        "baseline": _baseline,
        "length limit": _truncated,
        "overfitting to prompts": _prompts,
        "single rollouts": _driver,
        "effective rank": _rank,
    }
)
"""Every rule by its subject, the most important first."""

NOISE_RULES = frozenset({"group size", "batch size", "baseline", "single rollouts", "effective rank"})
"""Rules whose numbers differ a lot from step to step."""
