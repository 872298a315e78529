"""The page of one run: what it shows, what to change, how it went, and what it does not hold."""

import math
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scoregram.advice import RunFinding, advise_run
from scoregram.checks import fail
from scoregram.exhibits import Cell, Estimate, Table
from scoregram.reading import (
    GREEDY_TEST,
    SAMPLED_TEST,
    EvaluationRewards,
    Indicator,
    RunReading,
    indicators,
    last_outcomes,
    paired_gain,
    paused_collection,
    read_run,
)
from scoregram.report import step_figures
from scoregram.report.figures import Drawing, has_null_band
from scoregram.report.first_screen import (
    NextStep,
    RunProgress,
    agreed_tiles,
    is_solved,
    learning_answer,
    next_changes,
    next_step,
    ordered_cards,
    run_facts,
    run_progress,
    step_range,
    trust_lines,
    whole_command,
    window_sentence,
)
from scoregram.report.glass import Glass, run_glass
from scoregram.report.page import LiveRun, Section, document, live_documents, write_document
from scoregram.report.prompt_exhibits import control_exhibits, control_text, interference_exhibits
from scoregram.report.replay_table import what_if_table
from scoregram.report.words import WORDS
from scoregram.runs import CONFIG_FILE, REPORT, Run, open_run, require_path

SHOWN_NAMES = 8
"""Names of a folder's content that an error lists."""
EVALUATIONS = {SAMPLED_TEST: "sampled, as trained", GREEDY_TEST: "greedy"}
"""Kinds of test groups, and their labels on the page."""


@dataclass(frozen=True, kw_only=True)
class RunPage:
    """Everything that the page of a run shows."""

    title: str
    facts: tuple[tuple[str, str], ...]
    """Label and value of what was trained, and how."""
    answers: tuple[tuple[str, str], ...]
    """The first questions of a reader, and their answers."""
    window: str
    """Which steps the numbers of the first screen are means over."""
    trust: tuple[tuple[str, str], ...]
    """How far the numbers can be trusted: the word of each sentence (`good`, `watch` or `act`) and the sentence."""
    tiles: tuple[Indicator, ...]
    cards: tuple[RunFinding, ...]
    """What to change, the most important first."""
    shown_cards: int
    """How many of them the first screen shows; the others are folded away."""
    rules: tuple[int, int]
    """How many rules cannot decide, and how many there are."""
    open_rules: str
    """What needs no change, and what the numbers do not decide."""
    sections: tuple[Section, ...]
    glass: Glass
    progress: RunProgress
    """How far the run is, and whether it is finished."""
    next_step: NextStep
    """What to do next, what to type for it, what to expect and why; its sentence is among the answers."""
    command: str = ""
    """The whole command of the next step, if its setting is an option of `scoregram train`."""

    def html(self, redo: str = "") -> str:
        """The document."""
        return document("run.html", self.sections, redo=redo, **self._shown())

    def served(self, live: LiveRun) -> tuple[str, str]:
        """The document of a server that follows the run, and its update as JSON."""
        return live_documents("run.html", self.sections, live, redo="", **self._shown())

    def _shown(self) -> dict[str, Any]:
        """Values of the template."""
        more = self.cards[self.shown_cards :]
        title = "If a longer run does not learn either" if self.next_step.is_longer else "What to change, and why"
        title = "The finding behind it" if is_solved(self.tiles[0]) and self.shown_cards else title
        summary = f"Then: {next_changes(more)}; and what the other rules say" if more else "What the other rules say"
        return {
            "title": self.title,
            "facts": self.facts,
            "answers": self.answers,
            "cards_title": title,
            "window": self.window,
            "trust": self.trust,
            "tiles": self.tiles,
            "cards": self.cards[: self.shown_cards],
            "more_cards": more,
            "open_rules": self.open_rules,
            "undecided": self.rules[0],
            "rules": self.rules[1],
            "rest_summary": summary,
            "words": WORDS,
            "has_glass": bool(self.glass.steps),
            "has_null_band": any(has_null_band(one) for section in self.sections for one in section.exhibits),
            "glass_note": self.glass.note,
            "has_texts": self.glass.has_texts,
            "glass_rows": self.glass.rows,
            "lead_finding": self.next_step.finding,
            "next_step": self.next_step,
            "command": self.command,
            "data": {"glass": self.glass.steps} if self.glass.steps else None,
        }


@paused_collection()
def write_report(
    folder: Path | str, out: Path | str | None = None, *, tell: Callable[[str], None] | None = None
) -> Path:
    """Write the page of a run folder; returns its path.

    Args:
        folder: Folder of the run.
        out: The file to write; `report.html` in the folder if not given.
        tell: Called with the lines on how far the numbers can be trusted.

    Raises:
        ScoregramError: If the folder holds no run (the message lists its content), or as for `write_page`.
    """
    root = Path(folder)
    require_run_folder(root)
    page = run_page(open_run(root))
    path = root / REPORT if out is None else Path(out)
    if tell is not None:
        tell("\n".join(sentence for _, sentence in page.trust))
    return write_document(path, page.html(redo=shlex.join(["scoregram", "report", str(root)])))


def require_run_folder(root: Path) -> None:
    """Raise ScoregramError unless the folder holds a run; the message lists its content."""
    if not (require_path(root, caller="report") / CONFIG_FILE).is_file():
        requirement = f"{root} must hold a run ({CONFIG_FILE}) or a replication (exhibits.json and verdicts.json)"
        fail("report", requirement, folder_content(root), "Choose such a folder.")


def folder_content(root: Path) -> str:
    """What a folder holds, in a few words for an error."""
    if not root.is_dir():
        return "a file" if root.exists() else "no such folder"
    names = sorted(path.name for path in root.iterdir())
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more if names else "an empty folder"


@paused_collection()
def run_page(folder: Run) -> RunPage:
    """The page of a run. It names what the run lacks; of a run in progress, it shows the complete steps."""
    run = read_run(folder)
    advice = advise_run(run)
    tiles = agreed_tiles(indicators(run), advice)
    cards, shown_cards = ordered_cards(advice.findings, is_solved(tiles[0]))
    following = next_step(run, tiles[0], advice)
    missing = "\n".join(f"- {line}" for line in (*_missing(run), *run.notes))
    tables = tuple(table for table in (summary_table(run), gain_table(run.tests)) if table.rows)
    sections = [
        *_figure_sections(run, folder),
        *([Section("Numbers", "", tables)] if tables else []),
        *([Section("What this run does not hold", missing)] if missing else []),
    ]
    return RunPage(
        title=folder.folder.resolve().name,
        facts=tuple(run_facts(run)),
        answers=(
            ("Does it learn?", learning_answer(run, tiles)),
            ("What next?", following.sentence),
        ),
        progress=run_progress(run),
        next_step=following,
        command=whole_command(run.config, following.setting),
        window=window_sentence(run, tiles[0]),
        trust=trust_lines(run, following),
        tiles=tiles,
        cards=cards,
        shown_cards=shown_cards,
        rules=(len(advice.undecided), len(advice.undecided) + len(advice.fine) + len(advice.findings)),
        open_rules=advice.open_text(),
        sections=tuple(sections),
        glass=run_glass(folder, run),
    )


def _null(run: RunReading) -> str:
    """The rows of the spectrum's null model."""
    return "orthogonal scores" if run.rows == "scores" else "orthogonal gradients"


def _figure_sections(run: RunReading, folder: Run) -> Iterator[Section]:
    ends = (float(run.steps[0]), float(run.steps[-1])) if run.steps else (0.0, 1.0)
    margin = max(1.0, (ends[1] - ends[0]) * 0.02)
    shared = (ends[0] - margin, ends[1] + margin)
    mark = run.trust.mark
    rows = (
        "its score (the gradient of its log-probability) times its advantage"
        if run.rows == "scores"
        else "its part of the gradient of the trainer's loss, weights included"
    )
    parts: tuple[tuple[str, str, Iterable[Drawing | Table]], ...] = (
        ("Learning", "", step_figures.learning_figures(run)),
        ("Prompts", "", step_figures.prompts_figures(run)),
        ("Rollouts per prompt", control_text(run.config), control_exhibits(run)),
        (
            f"Noise{mark}",
            "From the inner products between the gradients of all rollouts of a step, the Gram.",
            marked_figures(step_figures.noise_figures(run), run),
        ),
        (f"Drivers{mark}", "Which rollouts make the update.", marked_figures(step_figures.drivers_figures(run), run)),
        (
            f"Geometry{mark}",
            f"Each group is a matrix with one row per rollout: {rows}. The grey dashed null is what rollouts of the "
            "same norms and advantages would give if they had nothing in common.",
            # the trainer's own gradients: no mark for what may be wrong with the Gram
            (*marked_figures(step_figures.geometry_figures(run), run), *step_figures.update_figures(folder)),
        ),
        (
            f"Interference{mark}",
            "From the Gram between the rollouts of different prompts of a step.",
            marked_figures(interference_exhibits(run), run),
        ),
        (f"Layers{mark}", "", marked_figures(step_figures.layers_figures(folder, run), run)),
        (
            f"What if{mark}",
            "Other estimators of the advantage on the groups of the last third, without training again.",
            marked_figures(what_if_table(run), run),
        ),
    )
    for title, text, figures in parts:
        if made := tuple(figures):
            yield Section(title, text, made, x_range=shared)


def marked_figures(figures: Iterable[Drawing | Table], run: RunReading) -> tuple[Drawing | Table, ...]:
    """Exhibits from the Gram, with `trust.mark` in their titles."""
    return tuple(replace(figure, title=f"{figure.title}{run.trust.mark}") for figure in figures)


def _missing(run: RunReading) -> Iterator[str]:
    if not run.lines:
        yield "No step has been logged."
    skipped = sum(bool(line.get("skipped", 0)) for line in run.lines)
    if skipped:
        yield f"Steps skipped because a number was not finite: {skipped}."
    if not run.series("eval/accuracy")[0]:
        is_evaluated = any("eval/problems" in line for line in run.lines)
        yield f"No test accuracy: {'no test rollout has a reward' if is_evaluated else 'nothing was evaluated'}."
    if not any(group.reading for group in run.groups):
        yield "No Gram was measured, so nothing is known about spectrum, noise or baseline."
        return
    if not run.trust.errors and not run.trust.failed:
        yield "No self-check: there was no second gradient to compare with."
    if run.is_withheld:
        failed = ", ".join(str(step) for step in sorted(run.trust.failed) if step in run.last_third)
        yield (
            f"No means from the Gram over the last third: the self-check failed at step {failed}. The figures show the "
            "steps that passed, and the others as separate points."
        )
    if run.rows == "loss":
        yield (
            "The rows of the Gram are gradients of the trainer's loss, which include their weights. So there are no "
            "score norms, no cosines between scores, no noise components, no baseline and no best group size: they "
            "need scores (mode='scores')."
        )
        if not run.has_whole_groups:
            yield "No share of dead groups: the steps of this run hold parts of groups."
        return
    if not any(group.is_live for group in run.groups):
        yield "No group was live: where rewards do not differ, every advantage is 0 and the spectrum is undefined."
    if (run.group_size or 0) < 4:
        yield "No noise components and no baseline: their unbiased estimates need groups of at least 4."
    elif not run.series("gram/gradient_squared")[0] and not run.is_withheld:
        cause = (
            "no step had two prompts with equally many rollouts that all have rewards"
            if run.series("gram/update_norm")[0]
            else "the Gram between prompts was not measured"
        )
        yield f"No noise components: {cause}."


def summary_table(run: RunReading) -> Table:
    """The numbers of the last third, each beside what to compare it with; unknown rows are left out."""
    summary = run.summary
    few = ", too few to conclude" if run.trust.has_few_steps else ""
    groups, steps = f"{summary.groups} stored groups", f"{summary.noise_steps} steps{few}"
    live = f"{summary.live} live ones of them" if run.rows == "scores" else f"{summary.live} stored groups"
    rewarded = groups if summary.groups else f"{len(run.last_values('reward'))} steps"
    null, mark = _null(run), run.trust.mark
    tested: tuple[Cell, str] = (None, "")
    if not math.isnan(summary.tested.value):
        tested = (summary.tested, "on test problems, last")
    rows: list[tuple[str, Cell, Cell, str, str]] = [
        ("mean reward", summary.reward, tested[0], tested[1], rewarded),
        *_accuracy_rows(run),
        ("share of dead groups", summary.dead, *_chance_of_dead(run), rewarded),
        (f"effective rank{mark}", summary.effective_rank, summary.effective_rank_null, null, live),
        (f"effective rank minus its null{mark}", summary.rank_difference, 0, null, live),
        (f"effective rank, least possible{mark}", summary.least_rank, None, "given the top-1 fractions", live),
        (f"effective rank, most possible{mark}", summary.most_rank, None, "given the top-1 fractions", live),
        (f"top-1 fraction{mark}", summary.top1, summary.top1_null, null, live),
        (f"cosine between rollouts{mark}", summary.cosine, 0, null, groups),
        (f"variance saved by optimal-loo{mark}", summary.baseline_saving, 0, "rloo is as good", steps),
        (f"signal to noise of a step{mark}", summary.snr, 1, "half of the power is noise", steps),
        (f"noise scale, in rollouts{mark}", summary.noise_scale, _as_integer(run.batch_size), "batch size", steps),
        (f"best group size{mark}", summary.best_group_size, run.group_size, "group size used", steps),
    ]
    return Table(
        id="summary",
        title="The last third in numbers" if len(run.last_third) > 1 else "The last step in numbers",
        caption=f"{step_range(run.last_third).capitalize()}, the measured ones: means with 95 % bootstrap intervals "
        "over groups. Signal, noise scale, group size and what optimal-loo saves are ratios of means over steps, with "
        "intervals over steps. ∞ means that no signal, or no difference between prompts, was resolved. Intervals "
        "over few groups or steps are too narrow, and groups of the same prompt are treated as independent.",
        columns=("quantity", "value", "compare with", "which is", "from"),
        rows=tuple(row for row in rows if not _is_unknown(row[1])),
    )


def _chance_of_dead(run: RunReading) -> tuple[Cell, str]:
    """Share of dead groups that chance alone makes, and its basis: from the logged outcomes, as on the card on them.

    From the stored groups where outcomes were not logged.
    """
    outcomes, share = last_outcomes(run), run.summary.equally_hard_dead
    if outcomes is not None:
        share = outcomes.dead_chance_share
    return share, "by chance, if all prompts of a step were equally hard"


def gain_table(tests: EvaluationRewards) -> Table:
    """Mean reward on test problems at the first and the last evaluation, and the difference with its interval.

    Without rows if the run did not keep the rewards of its evaluations (`eval_samples`).
    """
    rows: list[tuple[Cell, ...]] = []
    for kind in tests:
        if gain := paired_gain(tests, kind):
            rows.append((EVALUATIONS.get(kind, kind), gain.problems, gain.before, gain.after, gain.change))
    return Table(
        "test-gain",
        "Gain on test problems",
        "Mean reward at the first and the last evaluation. The gain is the mean difference per problem, and its 95 % "
        "interval is over problems. This is one run: the interval does not include the spread between seeds.",
        ("rollouts", "problems", "before", "after", "gain"),
        tuple(rows),
    )


def _accuracy_rows(run: RunReading) -> Iterator[tuple[str, Cell, Cell, str, str]]:
    """The last greedy accuracy beside the first; no row if nothing was evaluated."""
    for last in run.greedy_accuracies[-1:]:
        first = run.greedy_accuracies[0]
        before, when = (first.accuracy.value, f"at step {first.step}") if first is not last else (None, "")
        yield "test accuracy, last", last.accuracy, before, when, f"{last.problems} problems" if last.problems else ""


def _as_integer(value: float) -> Cell:
    return int(value) if math.isfinite(value) and value == round(value) else value


def _is_unknown(cell: Cell) -> bool:
    value = cell.value if isinstance(cell, Estimate) else cell
    return isinstance(value, float) and math.isnan(value)
