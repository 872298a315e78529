"""The page of one ordinary run: what it says, what to change, and how it went."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from scoregram.exhibits import Estimate, Figure
from scoregram.report import steps
from scoregram.report.advice import advice_text
from scoregram.report.facts import Facts, read_facts
from scoregram.report.gains import gain_table
from scoregram.report.numbers import cell_text
from scoregram.report.page import Section
from scoregram.report.summary import Summary, summarised, summary_table
from scoregram.runs import Run


@dataclass(frozen=True)
class RunPage:
    """What `write_page` needs."""

    title: str
    lead: str
    sections: tuple[Section, ...]


def run_page(run: Run) -> RunPage:
    """Everything that the run in a folder shows, whatever it lacks; a run in progress shows what is complete."""
    facts = read_facts(run)
    summary = summarised(facts)
    tables = (summary_table(facts, summary), gain_table(facts.tests))
    sections = [
        Section("What this run says", _about(facts), tuple(table for table in tables if table.rows)),
        Section("What to change", advice_text(facts, summary)),
    ]
    for title, text, figures in _figures(facts):
        if figures:
            sections.append(Section(title, text, figures))
    missing = "\n".join(f"- {line}" for line in (*_missing(facts), *facts.notes))
    sections += [Section("What this run does not hold", missing)] if missing else []
    return RunPage(page_title(run), lead_sentence(facts, summary), tuple(sections))


def page_title(run: Run) -> str:
    """Name of the folder, and what was trained on what, where the run says it."""
    said = [str(run.config[name]) for name in ("model", "task") if name in run.config]
    return f"{run.folder.resolve().name}: {' on '.join(said)}" if said else run.folder.resolve().name


def lead_sentence(facts: Facts, summary: Summary) -> str:
    """One sentence: the rank beside its null, the dead groups, the accuracy, as far as they are known."""
    parts = []
    if not math.isnan(summary.effective_rank.value):
        rank, null = cell_text(summary.effective_rank), cell_text(summary.effective_rank_null)
        parts.append(f"the effective rank of a group's gradients was {rank} where orthogonal scores would give {null}")
    if not math.isnan(summary.dead.value):
        parts.append(f"{summary.dead.value:.0%} of the groups taught nothing")
    _, accuracy = facts.series("eval/accuracy")
    if len(accuracy) > 1:
        parts.append(f"test accuracy went from {_shown(accuracy[0])} to {_shown(accuracy[-1])} over the run")
    elif not math.isnan(summary.reward.value):
        parts.append(f"the mean reward was {cell_text(summary.reward)}")
    if not parts:
        return "This run holds no step yet."
    return f"In the last third of {len(facts.steps)} step{'s' * (len(facts.steps) != 1)}, " + "; ".join(parts) + "."


def _shown(value: float) -> str:
    return cell_text(Estimate(value))


def _about(facts: Facts) -> str:
    names = ("model", "task", "method", "estimator", "objective", "group_size", "batch_size", "learning_rate", "seed")
    said = [f"{name.replace('_', ' ')} {facts.config[name]}" for name in names if facts.config.get(name) is not None]
    settings = f"Settings: {', '.join(said)}." if said else ""
    if len(facts.steps) > steps.MOST_POINTS:
        settings += (
            f" Figures over steps average neighbouring ones, so that a line has at most {steps.MOST_POINTS} points."
        )
    return settings


def _figures(facts: Facts) -> Iterator[tuple[str, str, tuple[Figure, ...]]]:
    yield "Learning", "", tuple(steps.learning(facts))
    text = "The spectrum of each group's stacked gradients, rows A_i ψ_i, from its score Gram."
    yield "The spectrum of a group", text, tuple(steps.spectrum(facts))
    text = "From the Gram between all rollouts of a step and their weights in the update."
    yield "The update", text, tuple(steps.update(facts))


def _missing(facts: Facts) -> Iterator[str]:
    if not facts.lines:
        yield "No step has been logged."
    skipped = sum(bool(line.get("skipped", 0)) for line in facts.lines)
    if skipped:
        yield f"Steps passed over because a number was not finite: {skipped}."
    if not facts.series("eval/accuracy")[0]:
        yield "No test accuracy: nothing was evaluated."
    if not any(group.reading for group in facts.groups):
        yield "No Gram was measured, so nothing is known about spectrum, noise or baseline."
        return
    if not any(group.alive for group in facts.groups):
        yield "No group was live: without a difference in rewards no rollout pulls, and the spectrum is undefined."
    if (facts.group_size or 0) < 4:
        yield "No noise components and no baseline: their unbiased estimates need groups of at least 4."
    elif not facts.series("gram/gradient_squared")[0]:
        yield "No noise components: the Gram between prompts was not measured, or every step had one prompt."
