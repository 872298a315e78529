"""Exhibits about single prompts: how many rollouts and which weight each got, and which prompts help each other."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from scoregram.exhibits import Cell, Figure, Series, Table
from scoregram.reading import (
    InterferenceMap,
    RunReading,
    group_size_decisions,
    interference_map,
    recorded_recommendations,
    scalar_curve,
)
from scoregram.report.figures import Drawing, PromptMap

MOST_DECISIONS = 40
"""Decisions about the group size in the table of a page: the last ones."""
LOWEST_PAIRS = 8
"""Pairs of prompts in the table of those that cost each other most."""
LABEL_CHARACTERS = 32
"""Characters of the name of a prompt beside a map; the end of a longer name is shown."""


def control_text(config: Mapping[str, Any]) -> str:
    """Which options decided about rollouts and weights of prompts, and from what; or that nothing was applied."""
    if config.get("advise_every"):
        return f"Recommended by `attach(trainer, advise_every={config['advise_every']})`, not applied."
    allocate, draw = config.get("allocate", "uniform"), config.get("draw", "uniform")
    chosen = {
        "`--group-size auto`": config.get("group_size") == "auto",
        f"`--allocate {allocate}`": allocate != "uniform",
        f"`--draw {draw}`": draw != "uniform",
        "`--shrink`": bool(config.get("shrink")),
    }
    options = ", ".join(option for option, is_chosen in chosen.items() if is_chosen)
    return f"Decided by the run itself ({options}), from earlier steps and never from the rewards of the same step."


def control_exhibits(run: RunReading) -> Iterator[Figure | Table]:
    """Group sizes, weights and decisions of a run that chose them itself; nothing for a run without `control/…`.

    Of a run that was only advised, its recommendations.
    """
    if recorded_recommendations(run.lines):
        yield from recommendation_table(run)
        return
    if run.setting("advise_every"):  # no step was advised yet
        return
    sizes = tuple(_control_series(run, "group_size", "mean of the step"))
    if not sizes:
        return
    ends = (*_control_series(run, "smallest_group", "smallest"), *_control_series(run, "largest_group", "largest"))
    yield Figure(
        "control-group-size",
        "How many rollouts did a prompt get?",
        "Rollouts per prompt of each step" + (", and the smallest and the largest group in it." if ends else "."),
        "step",
        "rollouts per prompt",
        (*sizes, *ends),
    )
    if saved := tuple(_control_series(run, "error_of_uniform", "this division")):
        yield Figure(
            "control-error",
            "Does the division lower the error?",
            "Predicted error of the step's gradient over that of equal groups. Optimistic: the numbers that predict "
            "it also chose the division.",
            "step",
            "error / equal groups",
            (*saved, Series("equal groups", saved[0].x, (1.0,) * len(saved[0].x), role="bound")),
        )
    weights = *_control_series(run, "smallest_weight", "smallest"), *_control_series(run, "largest_weight", "largest")
    if weights:
        yield Figure(
            "control-weights",
            "Which weights did prompts have?",
            "Smallest and largest weight among the prompts of a step; with equal weights both are 1.",
            "step",
            "weight",
            weights,
        )
    yield from decision_table(run)


def _control_series(run: RunReading, name: str, shown: str) -> Iterator[Series]:
    """A scalar of the controller at each step, not smoothed: it is a decision and has no noise."""
    curve = scalar_curve(run, f"control/{name}")
    if curve:
        yield Series(shown, curve.steps, curve.raw)


def decision_table(run: RunReading) -> Iterator[Table]:
    """Every decision of `--group-size auto` with its reason in words, the same that the terminal prints."""
    decided = group_size_decisions(run.lines)
    if not decided:
        return
    moved = sum(advice.recommended != advice.current for _, advice in decided)
    is_divided = run.config.get("allocate", "uniform") != "uniform"
    told = f" The last {MOST_DECISIONS} of {len(decided)} decisions." if len(decided) > MOST_DECISIONS else ""
    rows: list[tuple[Cell, ...]] = [
        (
            step,
            _moved(advice.current, advice.recommended),
            advice.best,
            advice.error_ratio,
            advice.agreement,
            advice.words(is_divided=is_divided),
        )
        for step, advice in decided[-MOST_DECISIONS:]
    ]
    yield Table(
        "control-decisions",
        "When did the group size move, and why?",
        f"It moved at {moved} of {len(decided)} decisions. Best: the size with the least predicted error. Error: that "
        "at the best size over that at the present one. Agreement: share of resamples of the measured steps in which "
        f"the best size has less error.{told}",
        ("step", "group size", "best", "error", "agreement", "reason"),
        tuple(rows),
    )


def recommendation_table(run: RunReading) -> Iterator[Table]:
    """Every recommendation to a run of another trainer, with its reasons, the same that the terminal prints."""
    recorded = recorded_recommendations(run.lines)
    told = f" The last {MOST_DECISIONS} of {len(recorded)}." if len(recorded) > MOST_DECISIONS else ""
    sizes = ((one.step, one.group_size, one.batch_size, one) for one in recorded[-MOST_DECISIONS:])
    rows: list[tuple[Cell, ...]] = [
        (
            step,
            "–" if size is None else _moved(size.current, size.recommended),
            "–" if batch is None else _moved(batch.current, batch.recommended),
            math.nan if batch is None else batch.noise_scale,
            ", ".join(f"{count} {severity}" for severity, count in one.findings.items()) or "none",
            one.sizes,
        )
        for step, size, batch, one in sizes
    ]
    yield Table(
        "control-recommendations",
        "Which sizes were recommended, and not applied?",
        "What the noise of the last measured steps asked for; the trainer kept its own group size and rollouts per "
        f"step. Findings: those of `scoregram advise` at that step.{told}",
        ("step", "group size", "rollouts per step", "noise scale", "findings", "reason"),
        tuple(rows),
    )


def _moved(current: int, recommended: int) -> str:
    return f"{current} → {recommended}" if recommended != current else f"{current}"


def interference_exhibits(run: RunReading) -> Iterator[Drawing | Table]:
    """Products between the gradients of prompts as a map, and the lowest of them; nothing without stored batches."""
    found = interference_map(run)
    if found is None:
        return
    places = range(len(found.prompts))
    beside = [abs(found.products[i, j]) for i in places for j in places if i < j]
    yield PromptMap(
        "interference",
        "Which prompts help each other?",
        "Product of the gradients of two prompts, mean over the steps that they share: to first order, what a plain "
        "gradient step on one does to the expected reward of the other. Unbiased, in units of the mean squared score "
        "norm over R. Blue: one helps the other. Orange: it costs the other reward. On the diagonal: the prompt "
        f"itself. {_pair_counts(found)} The numbers of the columns are those of the rows.",
        "prompt",
        "prompt",
        tuple(float(place + 1) for place in places),
        tuple(f"{place + 1}: {short_name(name)}" for place, name in enumerate(found.prompts)),
        tuple(tuple(map(float, row)) for row in found.products),
        z_title="product",
        limit=max((value for value in beside if value == value), default=0.0) or 1.0,
    )
    yield lowest_pairs_table(found)


def lowest_pairs_table(found: InterferenceMap) -> Table:
    """The pairs of prompts with the lowest products, each with its interval."""
    lowest = sorted(found.pairs, key=lambda pair: found.pairs[pair].value)[:LOWEST_PAIRS]
    verdicts = {**dict.fromkeys(found.hurting, "cost each other reward"), **dict.fromkeys(found.helping, "help")}
    return Table(
        "interference-pairs",
        "Which pairs cost each other most?",
        f"The {len(lowest)} lowest products of {len(found.pairs)} pairs. Intervals of 95 % over steps, widened for the "
        "number of pairs.",
        ("prompt", "other prompt", "product", "reading"),
        tuple((*pair, found.pairs[pair], verdicts.get(pair, "not resolved")) for pair in lowest),
    )


def _pair_counts(found: InterferenceMap) -> str:
    """How many pairs have an interval beyond 0, and how many would with shuffled rewards."""
    return (
        f"Of {len(found.pairs)} pairs {len(found.helping)} have an interval above 0 and {len(found.hurting)} below; "
        f"with shuffled rewards {found.by_chance:.1f} would be beyond 0."
    )


def short_name(name: str) -> str:
    """The name of a prompt, or its end: names differ there.

    Example:
        >>> short_name("gsm8k/train/17"), len(short_name("a" * 99))
        ('gsm8k/train/17', 32)
    """
    return name if len(name) <= LABEL_CHARACTERS else "…" + name[1 - LABEL_CHARACTERS :]
