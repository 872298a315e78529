"""The page of one run: what it shows, what to change, how it went, and what it does not hold."""

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scoregram.advice import advice_text
from scoregram.bootstrap import mean_estimate
from scoregram.checks import fail
from scoregram.exhibits import Cell, Estimate, Figure, Table, cell_text
from scoregram.reading import GREEDY_TEST, SAMPLED_TEST, EvaluationRewards, RunReading, read_run
from scoregram.report import step_figures
from scoregram.report.page import Section, write_page
from scoregram.runs import CONFIG_FILE, REPORT, Run, open_run

SHOWN_NAMES = 8
"""Names of a folder's content that an error lists."""
EVALUATIONS = {SAMPLED_TEST: "sampled, as trained", GREEDY_TEST: "greedy"}
"""Kinds of test groups, and their labels on the page."""

DEFINITIONS = {
    "dead groups": "groups whose rollouts all have the same reward, so that every advantage is 0.",
    "effective rank": "over how many directions the gradients of a group's rollouts spread: 1 if all are parallel, at "
    "most the number of rollouts.",
    "top-1 fraction": "share of a group's gradient energy, the sum of squared norms, that lies in one direction.",
    "cosine between rollouts": "mean cosine between the scores of two rollouts of a group; a score is the gradient of "
    "a rollout's log-probability.",
    "variance saved": "share of the update's variance within prompts that the best baseline would remove.",
    "signal to noise": "power of the true gradient over the power of a step's error; power is the squared norm.",
    "noise scale": "the number of rollouts at which signal and error have equal power.",
    "best group size": "rollouts per prompt that give the smallest error of the update at the same number of rollouts.",
}
"""Quantities of the summary, and what they are in one line."""


@dataclass(frozen=True)
class RunPage:
    """What `write_page` needs."""

    title: str
    lead: str
    trust: tuple[str, ...]
    """How far the numbers can be trusted, a sentence each."""
    sections: tuple[Section, ...]


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
    if not (root / CONFIG_FILE).is_file():
        requirement = f"{root} must hold a run ({CONFIG_FILE}) or a replication (exhibits.json and verdicts.json)"
        fail("report", requirement, folder_content(root), "Choose such a folder.")
    page = run_page(open_run(root))
    path = root / REPORT if out is None else Path(out)
    if tell is not None:
        tell("\n".join(page.trust))
    redo = shlex.join(["scoregram", "report", str(root)])
    return write_page(path, title=page.title, lead=page.lead, sections=page.sections, redo=redo, trust=page.trust)


def folder_content(root: Path) -> str:
    """What a folder holds, in a few words for an error."""
    if not root.is_dir():
        return "a file" if root.exists() else "no such folder"
    names = sorted(path.name for path in root.iterdir())
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more if names else "an empty folder"


def run_page(folder: Run) -> RunPage:
    """The page of a run. It names what the run lacks; of a run in progress, it shows the complete steps."""
    run = read_run(folder)
    tables = [table for table in (summary_table(run), gain_table(run.tests)) if table.rows]
    text = "\n\n".join(part for part in (_settings(run), _definitions(tables)) if part)
    sections = [Section("What this run shows", text, tables), Section("What to change", advice_text(run))]
    for title, text, figures in _figures(run):
        if figures:
            sections.append(Section(title, text, figures))
    missing = "\n".join(f"- {line}" for line in (*_missing(run), *run.notes))
    sections += [Section("What this run does not hold", missing)] if missing else []
    return RunPage(page_title(folder), lead_sentence(run), tuple(run.trust.sentences()), tuple(sections))


def page_title(run: Run) -> str:
    """Name of the folder, and which model was trained on which task, where the config has them."""
    subject = [str(run.config[name]) for name in ("model", "task") if name in run.config]
    return f"{run.folder.resolve().name}: {' on '.join(subject)}" if subject else run.folder.resolve().name


def lead_sentence(run: RunReading) -> str:
    """One sentence: the rank beside its null, the dead groups, the accuracy, as far as they are known."""
    parts, summary = [], run.summary
    if not math.isnan(summary.effective_rank.value):
        rank, null = cell_text(summary.effective_rank), cell_text(summary.effective_rank_null)
        parts.append(f"the effective rank of a group's gradients was {rank} where {_null(run)} would give {null}")
    if not math.isnan(summary.dead.value):
        parts.append(f"{summary.dead.value:.0%} of the groups had equal rewards")
    _, accuracy = run.series("eval/accuracy")
    if len(accuracy) > 1:
        first, last = (cell_text(Estimate(value)) for value in (accuracy[0], accuracy[-1]))
        parts.append(f"test accuracy went from {first} to {last} over the run")
    elif not math.isnan(summary.reward.value):
        parts.append(f"the mean reward was {cell_text(summary.reward)}")
    if not parts:
        return "This run holds no step yet."
    doubt = f"{run.trust.mark[2:-1].capitalize()}: " if run.trust.mark else ""
    where = f"{last_third_text(run)}, " + "; ".join(parts) + "."
    return doubt + (where if doubt else where[0].upper() + where[1:])


def last_third_text(run: RunReading) -> str:
    """Where the numbers come from: `in the last third of 6 steps (5 to 6)`, or `at the last of 3 steps`."""
    steps, count = [step for step in run.steps if step in run.last_third], len(run.steps)
    if len(steps) > 1:
        return f"in the last third of {count} steps ({steps[0]} to {steps[-1]})"
    return f"at the last of {count} steps" if count > 1 else "at the only step"


def _null(run: RunReading) -> str:
    """The rows of the spectrum's null model."""
    return "orthogonal scores" if run.rows == "scores" else "orthogonal gradients"


def _settings(run: RunReading) -> str:
    names = ("model", "task", "method", "estimator", "objective", "group_size", "batch_size", "learning_rate", "seed")
    known = [f"{name.replace('_', ' ')} {run.config[name]}" for name in names if run.config.get(name) is not None]
    text = f"Settings: {', '.join(known)}." if known else ""
    if len(run.steps) > step_figures.MOST_POINTS:
        text += (
            f" Figures over steps average neighbouring ones, so that a line has at most {step_figures.MOST_POINTS} "
            "points."
        )
    return text


def _definitions(tables: Sequence[Table]) -> str:
    """A line on each quantity of the tables that has a name of its own."""
    shown = " ".join(str(row[0]) for table in tables for row in table.rows)
    return "\n".join(f"- {word}: {meaning}" for word, meaning in DEFINITIONS.items() if word in shown)


def _figures(run: RunReading) -> Iterator[tuple[str, str, tuple[Figure, ...]]]:
    yield "Learning", "", tuple(step_figures.learning(run))
    rows = (
        "the rows A_i ψ_i: ψ_i is the score of rollout i, the gradient of its log-probability, and A_i its advantage"
        if run.rows == "scores"
        else "the rows g_i: the part of the trainer's loss gradient that comes from rollout i, weights included"
    )
    text = f"The spectrum of the matrix that stacks, for each group, {rows}."
    yield f"The spectrum of a group{run.trust.mark}", text, marked_figures(step_figures.spectrum(run), run)
    text = "From the Gram between all rollouts of a step and their weights in the update."
    yield f"The update{run.trust.mark}", text, marked_figures(step_figures.update_figures(run), run)


def marked_figures(figures: Iterable[Figure], run: RunReading) -> tuple[Figure, ...]:
    """Figures from the Gram, with `trust.mark` in their titles."""
    return tuple(replace(figure, title=f"{figure.title}{run.trust.mark}") for figure in figures)


def _missing(run: RunReading) -> Iterator[str]:
    if not run.lines:
        yield "No step has been logged."
    skipped = sum(bool(line.get("skipped", 0)) for line in run.lines)
    if skipped:
        yield f"Steps skipped because a number was not finite: {skipped}."
    if not run.series("eval/accuracy")[0]:
        yield "No test accuracy: nothing was evaluated."
    if not any(group.reading for group in run.groups):
        yield "No Gram was measured, so nothing is known about spectrum, noise or baseline."
        return
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
    summary, accuracy = run.summary, _accuracy(run)
    groups, steps = f"{summary.groups} groups", f"{summary.noise_steps} steps"
    live = f"{summary.live} live groups" if run.rows == "scores" else f"{summary.live} groups"
    rewarded = groups if summary.groups else f"{len(run.last_values('reward'))} steps"
    null, mark = _null(run), run.trust.mark
    tested: tuple[Cell, str] = (None, "")
    if not math.isnan(summary.tested.value):
        tested = (summary.tested, "on test problems, last")
    rows: list[tuple[str, Cell, Cell, str, str]] = [
        ("mean reward", summary.reward, tested[0], tested[1], rewarded),
        *([("test accuracy, last", accuracy[0], accuracy[1], accuracy[2], accuracy[3])] if accuracy else []),
        ("share of dead groups", summary.dead, summary.equally_hard_dead, "if all prompts were equally hard", rewarded),
        (f"effective rank{mark}", summary.effective_rank, summary.effective_rank_null, null, live),
        (f"effective rank minus its null{mark}", summary.rank_difference, 0, null, live),
        (f"effective rank, least possible{mark}", summary.least_rank, None, "given the top-1 fractions", live),
        (f"effective rank, most possible{mark}", summary.most_rank, None, "given the top-1 fractions", live),
        (f"top-1 fraction{mark}", summary.top1, summary.top1_null, null, live),
        (f"cosine between rollouts{mark}", summary.cosine, 0, null, groups),
        (f"variance saved by the best baseline{mark}", summary.baseline_saving, 0, "the mean is as good", groups),
        (f"signal to noise of a step{mark}", summary.snr, 1, "half of the power is noise", steps),
        (f"noise scale, in rollouts{mark}", summary.noise_scale, _as_integer(run.batch_size), "batch size", steps),
        (f"best group size{mark}", summary.best_group_size, run.group_size, "group size used", steps),
    ]
    return Table(
        id="summary",
        title="The last third in numbers" if len(run.last_third) > 1 else "The last step in numbers",
        caption=f"{_step_range(run.last_third).capitalize()}: means with 95 % bootstrap intervals over "
        "groups. Signal, noise scale and group size come from noise components averaged over steps; their intervals "
        "resample steps. ∞ means that no signal, or no difference between prompts, was resolved. Intervals over few "
        "groups or steps are too narrow, and groups of the same prompt are treated as independent.",
        columns=("quantity", "value", "compare with", "which is", "from"),
        rows=tuple(row for row in rows if not _is_unknown(row[1])),
    )


def gain_table(tests: EvaluationRewards) -> Table:
    """Mean reward on test problems at the first and the last evaluation, and the difference with its interval.

    Without rows if the run did not keep the rewards of its evaluations (`eval_samples`).
    """
    rows: list[tuple[Cell, ...]] = []
    for kind, by_step in tests.items():
        if len(by_step) > 1:
            first, last = by_step[min(by_step)], by_step[max(by_step)]
            both = sorted(first.keys() & last.keys())
            gain = mean_estimate([last[name] - first[name] for name in both])
            before, after = (mean_estimate([each[name] for name in both]) for each in (first, last))
            rows.append((EVALUATIONS.get(kind, kind), len(both), before, after, gain))
    return Table(
        "test-gain",
        "Gain on test problems",
        "Mean reward at the first and the last evaluation. The gain is the mean difference per problem, and its 95 % "
        "interval is over problems. This is one run: the interval does not include the spread between seeds.",
        ("rollouts", "problems", "before", "after", "gain"),
        tuple(rows),
    )


def _accuracy(run: RunReading) -> tuple[Cell, Cell, str, str] | None:
    tested = [line for line in run.lines if not math.isnan(line.get("eval/accuracy", math.nan))]
    if not tested:
        return None
    last, first = tested[-1], tested[0]
    ends = (float(last.get(f"eval/accuracy_{end}", math.nan)) for end in ("low", "high"))
    problems = f"{int(last['eval/problems'])} problems" if "eval/problems" in last else ""
    before = float(first["eval/accuracy"]) if first is not last else None
    return (
        Estimate(float(last["eval/accuracy"]), *ends),
        before,
        f"at step {first['step']}" if before is not None else "",
        problems,
    )


def _as_integer(value: float) -> Cell:
    return int(value) if math.isfinite(value) and value == round(value) else value


def _step_range(steps: range) -> str:
    if not steps:
        return "no step"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _is_unknown(cell: Cell) -> bool:
    value = cell.value if isinstance(cell, Estimate) else cell
    return isinstance(value, float) and math.isnan(value)
