"""What to change, by stated rules from the numbers of a run. Where the numbers do not decide, nothing is said."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from scoregram.report.facts import Facts
from scoregram.report.numbers import cell_text
from scoregram.report.summary import Summary
from scoregram.statistics import mixed_probability, mse_curve

DEAD, MIXED = 0.5, 0.8
LARGEST_GROUP = 1024
FACTOR = 4.0
LEAST_GAIN = 0.05
DRIVER = 0.5
FINISHED = 0.9


@dataclass(frozen=True)
class Advice:
    """One thing to change, and why."""

    sentence: str
    rule: str
    """When this is said, with the number that led to it."""


def advice(facts: Facts, summary: Summary) -> list[Advice]:
    """All that the rules give for a run, in order of weight; empty where nothing is decided."""
    return [one for rule in RULES.values() for one in rule(facts, summary)]


def advice_text(facts: Facts, summary: Summary) -> str:
    """The advice as a list for a section of the page, and about what nothing is said."""
    found = {name: list(rule(facts, summary)) for name, rule in RULES.items()}
    said = "\n".join(f"- {one.sentence} Rule: {one.rule}" for several in found.values() for one in several)
    silent = ", ".join(name for name, several in found.items() if not several)
    rest = f"Nothing is said about {silent}: there is nothing to change, or these numbers do not decide it."
    return "\n\n".join(part for part in (said, rest if silent else "") if part)


def group_size_for(chances: list[float], mixed: float = MIXED) -> int | None:
    """Least group size at which a group is mixed with probability `mixed` on average over prompts; None up to 1024.

    Example:
        >>> group_size_for([0.5], 0.8), group_size_for([0.0, 0.5], 0.8)
        (4, None)
    """
    for size in range(2, LARGEST_GROUP + 1):
        if sum(mixed_probability(chance, size) for chance in chances) >= mixed * len(chances):
            return size
    return None


def success_rates(facts: Facts) -> list[float]:
    """Success rate of every prompt of the last third, `(right + ½) / (rollouts + 1)`.

    Empty unless all rewards are 0 or 1. The half keeps a prompt that was never solved, or always, from counting as
    one that never could be mixed.
    """
    seen: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for group in facts.last_groups:
        if group.right is None:
            return []
        seen[group.record.prompt_id][0] += group.right
        seen[group.record.prompt_id][1] += group.size
    return [(right + 0.5) / (rollouts + 1) for right, rollouts in seen.values()]


def _dead_groups(facts: Facts, summary: Summary) -> Iterator[Advice]:
    if not summary.dead.value > DEAD:
        return
    rule = f"said if more than {DEAD:.0%} of the groups of the last third are dead; {cell_text(summary.dead)} are."
    dead = [group for group in facts.last_groups if not group.alive]
    kinds = {"right": sum(g.right == g.size for g in dead), "wrong": sum(g.right == 0 for g in dead)}
    most = max(kinds, key=lambda kind: kinds[kind])
    if dead and kinds[most] > 2 / 3 * len(dead):
        which = "harder" if most == "right" else "easier"
        yield Advice(
            f"Draw {which} prompts: {kinds[most]} of the {len(dead)} dead groups are all {most}.",
            f"{rule} Of these, more than two thirds are of one kind.",
        )
    rates = success_rates(facts)
    if not rates:
        return
    size = group_size_for(rates)
    how = f"each of the {len(rates)} prompts has the success rate (right + ½) / (rollouts + 1)"
    if size is None:
        told = f"No group size up to {LARGEST_GROUP} would make {MIXED:.0%} of the groups live: change the prompts."
    elif size <= (facts.group_size or 0):
        return
    else:
        told = f"A group size of {size} in place of {facts.group_size} would make {MIXED:.0%} of the groups live."
    yield Advice(told, f"{rule} The size is the least whose mean chance of a mixed group is {MIXED}, if {how}.")


def _group_size(facts: Facts, summary: Summary) -> Iterator[Advice]:
    best, used, noise = summary.best_group_size, facts.group_size, summary.components
    if used is None or noise is None or math.isnan(best.low) or best.low <= used <= best.high:
        return
    if not math.isfinite(best.value):
        return
    wanted = max(2, round(best.value))
    error = mse_curve(noise, 1, torch.tensor([used, wanted])).tolist() if used >= 2 else [math.nan, math.nan]
    gain = 1 - error[1] / error[0] if error[0] > 0 else math.nan
    if not gain >= LEAST_GAIN:
        return
    yield Advice(
        f"Use groups of about {wanted} in place of {used}: at the same number of rollouts the error of the update "
        f"would fall by about {gain:.0%}.",
        f"said if the 95 % interval of the best group size leaves out the one used, and the estimated gain is at least "
        f"{LEAST_GAIN:.0%}; the best is {cell_text(best)}.",
    )


def _batch_size(facts: Facts, summary: Summary) -> Iterator[Advice]:
    scale, batch = summary.noise_scale, facts.batch_size
    if math.isnan(scale.low) or not math.isfinite(batch):
        return
    seen = f"it is {cell_text(scale)} against {batch:g} rollouts."
    if scale.low > FACTOR * batch:
        target = f"towards {scale.low:.0f} or more" if math.isfinite(scale.low) else "well beyond"
        yield Advice(
            f"Take more rollouts a step, {target}, or a smaller learning rate: steps of {batch:g} are mostly noise.",
            f"said if the whole 95 % interval of the noise scale lies above {FACTOR:g} times the batch; {seen}",
        )
    elif scale.high < batch / FACTOR:
        yield Advice(
            f"Fewer rollouts a step would do, towards {scale.high:.0f}: steps of {batch:g} average more than needed.",
            f"said if the whole 95 % interval of the noise scale lies below the batch divided by {FACTOR:g}; {seen}",
        )


def _baseline(facts: Facts, summary: Summary) -> Iterator[Advice]:
    saving = summary.baseline_saving
    if saving.low > LEAST_GAIN:
        yield Advice(
            f"Try the variance-minimising baseline: it would save about {saving.value:.0%} of the variance within "
            "prompts, before the cost of estimating it.",
            f"said if the whole 95 % interval of the saving lies above {LEAST_GAIN:.0%}; it is {cell_text(saving)}.",
        )


def _truncated(facts: Facts, summary: Summary) -> Iterator[Advice]:
    finished = facts.last("finished")
    share = sum(finished) / len(finished) if finished else math.nan
    if share < FINISHED:
        yield Advice(
            f"Allow longer completions: {1 - share:.0%} of the rollouts were cut off at the limit on tokens.",
            f"said if less than {FINISHED:.0%} of the rollouts of the last third ended by themselves; {share:.1%} did.",
        )


def _prompts(facts: Facts, summary: Summary) -> Iterator[Advice]:
    trained, tested = summary.reward, summary.tested
    if trained.low > tested.high and trained.value - tested.value >= LEAST_GAIN:
        yield Advice(
            f"Bring more prompts: sampled alike, the policy earns {cell_text(trained)} on the prompts "
            f"that it trains on and {cell_text(tested)} on test problems.",
            "said if the 95 % intervals leave each other out and the means differ by at least "
            f"{LEAST_GAIN:g}; it supposes that test problems are no harder.",
        )


def _driver(facts: Facts, summary: Summary) -> Iterator[Advice]:
    shares = facts.last("gram/largest_share")
    share = sum(shares) / len(shares) if shares else math.nan
    if share > DRIVER:
        yield Advice(
            f"Look at the rollouts with the largest share: one alone accounts for {share:.0%} of the squared update of "
            "a step on average. More rollouts a step, or a limit on length, would spread it.",
            f"said if the mean largest share of the last third is above {DRIVER:.0%}.",
        )


def _rank(facts: Facts, summary: Summary) -> Iterator[Advice]:
    difference = summary.rank_difference
    if difference.low <= 0 <= difference.high:
        yield Advice(
            f"Do not read redundancy into the effective rank of {cell_text(summary.effective_rank)}: orthogonal scores "
            f"of the same lengths would give {cell_text(summary.effective_rank_null)}.",
            "said if the 95 % interval of measured less null contains zero; it is "
            f"{cell_text(difference)} over {summary.live} live groups.",
        )


RULES: Mapping[str, Callable[[Facts, Summary], Iterator[Advice]]] = MappingProxyType(
    {
        "dead groups": _dead_groups,
        "group size": _group_size,
        "batch size": _batch_size,
        "baseline": _baseline,
        "length limit": _truncated,
        "prompts seen again": _prompts,
        "single rollouts": _driver,
        "effective rank": _rank,
    }
)
"""Every rule, by what it is about, in order of weight."""
