"""The tables, the figure and the page of a comparison, from the runs in its folder."""

import csv
import io
import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scoregram.bootstrap import t_mean
from scoregram.checks import fail
from scoregram.compare.intervals import BETTER, UNRESOLVED, WORSE, bounded_interval, verdict
from scoregram.compare.results import (
    ACCURACY,
    CORRELATION_ENDS,
    POSITIVE_ENDS,
    SHARE_ENDS,
    MethodComparison,
    MethodResult,
    RankedOutcome,
    read_comparison,
    read_json,
)
from scoregram.exhibits import Cell, Estimate, Figure, Series, Table, cell_text, to_plain
from scoregram.report import Section, write_page
from scoregram.runs import REPORT, disk_errors, write_atomically

COMPARISON_FILE = "compare.json"
"""File with the settings of a comparison."""
SETTING_TYPES = {"methods": dict, "seeds": int, "rollouts": int, "every_rollouts": int, "batch_size": int}
"""Type of each setting that every version has written into the file of a comparison."""

STAR = " *"
"""Behind the verdict on a difference that survives the correction for the number of methods."""
ONE_SEED = "one seed"
"""Verdict on a difference without an interval."""

COLUMN_DEFINITIONS = """\
- accuracy: share of test problems whose greedy rollout is right after the last step.
- mean return: mean reward of these rollouts. It ranks the methods if some reward is neither 0 nor 1.
- rollouts: all that a run sampled for training, also those from which no update is computed. Evaluations and \
measurements do not count.
- update signal to noise: |E ĝ|² over E|ĝ − E ĝ|² of the method's own update, both averaged over measured steps. The \
scale of the advantages cancels; in the column noise it does not. `run.noise()` has that of the leave-one-out gradient \
of the rewards instead.
- rank over null: effective rank of the rows of a group over that of orthogonal rows of the same norms.
- credit correlation and error: of the advantage that the method gave to each token with its true advantage, the \
change in the probability of success. Error is a root mean square in units of reward.
- filler: tokens whose true advantage is at most 0.01 in absolute value. Filler share: their share of all credit, and \
of the change in log-probability that the update made (push). If every token gets credit of the same size, filler's \
share of credit is its share of tokens.
- measured steps: those of the last third of a run, as in the report of a run.
- verdict: better or worse if the interval of the difference excludes 0; of 20 equal methods one does so by chance. \
A star: the difference also exceeds the needed gain. Of so many equal methods, any exceeds it with a probability of \
at most 5 % (Bonferroni; the noise of a run is pooled over all methods).
- intervals: 95 %, t distribution over seeds; accuracy over seeds and problems. They are cut off where the quantity \
cannot be, such as below 0 minutes or beyond 100 points of accuracy; this does not change how often they cover it. \
That of update signal to noise is whole: the estimate itself may be below 0."""

OUTCOME_CAPTIONS = {
    "accuracy": "Accuracies in %, greedy.",
    "mean return": "Mean returns of greedy rollouts, because some rewards are neither 0 nor 1; accuracies in %.",
}


def is_comparison(folder: Path | str) -> bool:
    """Whether a folder holds a comparison."""
    return (Path(folder) / COMPARISON_FILE).is_file()


def open_comparison(folder: Path) -> MethodComparison:
    """The comparison in a folder.

    Raises:
        ScoregramError: If the file with its settings is damaged.
    """
    setting = comparison_setting(folder, caller="report", remedy="Restore it from a copy.")
    return read_comparison(folder, setting)


def comparison_setting(folder: Path, *, caller: str, remedy: str) -> Mapping[str, Any]:
    """The settings of the comparison in a folder.

    Raises:
        ScoregramError: If the file is damaged.
    """
    path = folder / COMPARISON_FILE
    try:
        setting = read_json(path)
    except ValueError as error:
        return fail(caller, f"{path} must be a JSON file", error, remedy)
    if damage := setting_damage(setting):
        fail(caller, f"{path} must be written by scoregram compare", damage, remedy)
    return setting


def setting_damage(setting: Any) -> str:
    """What is wrong with the content of a comparison's file; empty if nothing is.

    Example:
        >>> setting_damage([]), setting_damage({"methods": {"grpo": "grpo"}, "seeds": "one"})
        ('[]', "seeds 'one'")
    """
    if not isinstance(setting, dict):
        return repr(setting)[:40]
    for name, kind in SETTING_TYPES.items():
        value = setting.get(name)
        if type(value) is not kind or not value:
            return f"{name} {value!r}"[:80] if name in setting else f"no {name}"
    if not all(isinstance(folder, str) for folder in setting["methods"].values()):
        return f"methods {setting['methods']}"[:80]
    if not isinstance(setting.get("shared", {}), dict):
        return f"shared {setting['shared']!r}"[:80]
    return ""


def write_comparison(folder: Path) -> tuple[Table, Table]:
    """Write `table.json`, `table.csv` and `table.md`; returns the two tables."""
    comparison = open_comparison(folder)
    tables = accuracy_table(comparison), update_table(comparison)
    exhibits = {"setting": dict(comparison.setting), "exhibits": to_plain([*tables, accuracy_figure(comparison)])}
    contents = {
        "table.json": json.dumps(exhibits, indent=1, allow_nan=False),
        "table.csv": csv_text(tables),
        "table.md": "\n".join(map(markdown_text, tables)),
    }
    with disk_errors(folder, caller="compare"):
        for name, text in contents.items():
            write_atomically(folder / name, text.encode())
    return tables


def write_comparison_report(folder: Path | str, out: Path | str | None = None) -> Path:
    """Write the page of a comparison and return its path; `report.html` in the folder if `out` is not given."""
    root = Path(folder)
    comparison = open_comparison(root)
    sections = [
        Section(
            f"{comparison.outcome.name.capitalize()} at equal rollouts",
            "",
            (accuracy_table(comparison), accuracy_figure(comparison)),
        ),
        Section("What the updates were made of", "", (update_table(comparison),)),
        Section("How to read it", COLUMN_DEFINITIONS),
    ]
    title = f"Methods compared on {comparison.setting.get('task', 'a task')}"
    redo = shlex.join(["scoregram", "report", str(root)])
    path = root / REPORT if out is None else Path(out)
    return write_page(path, title=title, lead=verdict_sentence(comparison), sections=sections, redo=redo)


def verdict_sentence(comparison: MethodComparison) -> str:
    """Which methods are better or worse than the first, and which lack runs, in one sentence."""
    (first, *others), outcome = comparison.methods, comparison.outcome
    said: dict[str, list[str]] = {BETTER: [], WORSE: [], UNRESOLVED: [], ONE_SEED: []}
    for method in others if first.runs else ():
        if not method.runs:
            continue
        gain = method.gain_over(first, outcome)
        if math.isnan(gain.value):
            continue
        word = ONE_SEED if math.isnan(gain.low) else verdict(gain)
        said[word].append(f"{method.label} ({shown_gain(gain.value, outcome)})")
    budget = f"{comparison.setting['rollouts']:,} rollouts, {comparison.setting['seeds']} seeds"
    parts = [f"{', '.join(said[word])} {word} than {first.label}" for word in (BETTER, WORSE) if said[word]]
    if (said[BETTER] or said[WORSE]) and not math.isnan(comparison.needed_gain):
        kept = [method.label for method in others if marked_verdict(method, comparison).endswith(STAR)]
        parts.append(f"still so after a correction for {comparisons_made(comparison)}: {', '.join(kept) or 'none'}")
    if said[UNRESOLVED]:
        parts.append(f"no significant difference to {first.label} for {', '.join(said[UNRESOLVED])}")
    if said[ONE_SEED]:
        parts.append(f"one seed cannot tell {first.label} from {', '.join(said[ONE_SEED])}")
    if missing := missing_runs(comparison):
        parts.append(missing)
    return f"With {budget}: {'; '.join(parts) or first.label + ' alone'}."


def marked_verdict(method: MethodResult, comparison: MethodComparison) -> str:
    """The verdict on a method, with a star if its difference survives the correction for the number of methods."""
    gain = method.gain_over(comparison.methods[0], comparison.outcome)
    word = verdict(gain)
    return f"{word}{STAR}" if word != UNRESOLVED and abs(gain.value) > comparison.needed_gain else word


def comparisons_made(comparison: MethodComparison) -> str:
    """How many methods with a run are compared with the first one, such as `4 comparisons`."""
    return f"{sum(bool(method.runs) for method in comparison.methods[1:])} comparisons"


def shown_gain(gain: float, outcome: RankedOutcome) -> str:
    """A difference in the unit of the outcome, such as `+12.5 points` or `-0.041 return`."""
    return f"{outcome.scale * gain:+.{1 if outcome is ACCURACY else 3}f} {outcome.unit}"


def missing_runs(comparison: MethodComparison) -> str:
    """Which methods have not used up the budget with every seed, such as `rloo has 2 of 3 seeds`; empty if all have."""
    seeds, budget = comparison.setting["seeds"], f"{comparison.setting['rollouts']:,} rollouts"
    fewer = [method for method in comparison.methods if 0 < len(method.runs) < seeds]
    none = [method.label for method in comparison.methods if not method.runs]
    parts = [f"{method.label} has {len(method.runs)} of {seeds} seeds" for method in fewer]
    if none:
        parts.append(f"{', '.join(none)} {'has' if len(none) == 1 else 'have'} no run with {budget}")
    return ", ".join(parts)


def accuracy_caption(comparison: MethodComparison) -> str:
    """What the numbers of the first table are, and what this comparison lacks."""
    outcome, target = comparison.outcome, comparison.setting.get("target")
    parts = [
        f"{OUTCOME_CAPTIONS[outcome.name]} 95 % intervals over seeds and problems; differences are paired by seed and "
        "problem. Cannot tell: the interval includes 0, or there is one seed. Extra rollouts: sampled, not trained on."
    ]
    if not math.isnan(comparison.needed_gain):
        needed = shown_gain(comparison.needed_gain, outcome).lstrip("+")
        parts.append(
            f"*: the difference exceeds {needed}, the needed gain for {comparisons_made(comparison)} (Bonferroni; "
            "noise pooled over methods)."
        )
    finals = [method.final(outcome=outcome) for method in comparison.methods if method.runs]
    if any(final.low == final.high for final in finals):
        parts.append("An interval without width: all seeds and problems agree, so it cannot say how they vary.")
    if target is not None and math.isnan(comparison.target):
        parts.append(f"The target {target} is no accuracy (write 0.8 for 80 %); its column is left out.")
    if len({len(method.runs) for method in comparison.methods if method.runs}) > 1:
        parts.append("Differences use the seeds that both methods have.")
    if missing := missing_runs(comparison):
        parts.append(f"Missing: {missing}.")
    return " ".join(parts)


def accuracy_table(comparison: MethodComparison) -> Table:
    """Accuracy or mean return, its difference to the first method, and cost: one row per method."""
    first, outcome, target = comparison.methods[0], comparison.outcome, comparison.target
    level = f"{100 * target:.3g} %" if outcome is ACCURACY else cell_text(target)
    reached: dict[str, Callable[[MethodResult], Cell]] = {
        f"rollouts to {level}": lambda method: method.rollouts_to(target, outcome)
    }
    columns: dict[str, Callable[[MethodResult], Cell]] = {
        "method": lambda method: method.label,
        "seeds": lambda method: len(method.runs),
        outcome.name: final_column("", outcome),
        f"{outcome.unit} over {first.label}": gain_column(first, outcome),
        "verdict": lambda method: None if method is first else marked_verdict(method, comparison),
        **({} if outcome is ACCURACY else {"accuracy": final_column("", ACCURACY)}),
        **{f"{outcome.name}, {split}": final_column(split, outcome) for split in comparison.splits},
        **({} if math.isnan(target) else reached),
        "steps": lambda method: round(sum(run.steps for run in method.runs) / len(method.runs)),
        "extra rollouts, %": lambda method: shown_estimate(method.extra(), ACCURACY).value,
        "minutes": MethodResult.minutes,
    }
    budget = f"{comparison.setting['rollouts']:,}"
    return Table(
        id="accuracy",
        title=f"{outcome.name.capitalize()} after {budget} rollouts on {comparison.setting.get('task')}",
        caption=accuracy_caption(comparison),
        columns=tuple(columns),
        rows=table_rows(comparison.methods, columns),
    )


def final_column(split: str, outcome: RankedOutcome) -> Callable[[MethodResult], Cell]:
    """The column with the outcome after the last step, on the test problems or on a held-out split."""
    return lambda method: shown_estimate(method.final(split, outcome), outcome)


def gain_column(first: MethodResult, outcome: RankedOutcome) -> Callable[[MethodResult], Cell]:
    """The column with the difference to the first method, whose own cell is empty."""
    return lambda method: None if method is first else shown_estimate(method.gain_over(first, outcome), outcome)


def update_table(comparison: MethodComparison) -> Table:
    """Signal, noise, rank and credit of the updates of each method, means over the last third of its steps."""
    scalars = {
        "credit correlation": ("credit/correlation", CORRELATION_ENDS),
        "credit error": ("credit/error", POSITIVE_ENDS),
        "filler share of credit": ("credit/filler_share", SHARE_ENDS),
        "filler share of push": ("push/filler_share", SHARE_ENDS),
        "filler tokens": ("credit/filler_tokens", SHARE_ENDS),
        "push correlation": ("push/correlation", CORRELATION_ENDS),
    }
    columns: dict[str, Callable[[MethodResult], Cell]] = {
        "method": lambda method: method.label,
        "update signal to noise": MethodResult.signal_to_noise,
        "noise": MethodResult.noise,
        "rank over null": MethodResult.rank_over_null,
        **{shown: scalar_column(name, ends) for shown, (name, ends) in scalars.items()},
    }
    return Table(
        id="updates",
        title="What the updates were made of",
        caption="Means over the measured steps of the last third (signal to noise: the ratio of two means), 95 % "
        "intervals over seeds. A dash: not defined for this method, task or option.",
        columns=tuple(columns),
        rows=table_rows(comparison.methods, columns),
    )


def scalar_column(name: str, ends: tuple[float, float]) -> Callable[[MethodResult], Cell]:
    """The column with the mean of a scalar, whose least and largest values are `ends`."""
    return lambda method: method.mean(name, ends)


def table_rows(
    methods: Sequence[MethodResult], columns: Mapping[str, Callable[[MethodResult], Cell]]
) -> tuple[tuple[Cell, ...], ...]:
    """One row for each method that has a finished run."""
    return tuple(tuple(column(method) for column in columns.values()) for method in methods if method.runs)


def accuracy_figure(comparison: MethodComparison) -> Figure:
    """Accuracy or mean return on test problems over sampled rollouts, one line per method."""
    outcome = comparison.outcome
    every, budget = comparison.setting["every_rollouts"], comparison.setting["rollouts"]
    grid = [float(value) for value in [*range(0, budget, every), budget]]
    lines = []
    for method in comparison.methods:
        curves = [run.outcome_at(grid, outcome) for run in method.runs if run.evaluations(outcome)]
        if curves:
            means = [t_mean([float(curve[place]) for curve in curves]) for place in range(len(grid))]
            points = [bounded_interval(mean, *outcome.ends) for mean in means]
            y, low, high = (tuple(getattr(point, end) for point in points) for end in ("value", "low", "high"))
            lines.append(Series(method.label, tuple(grid), y, low, high))
    return Figure(
        id="accuracy-over-rollouts",
        title=f"{outcome.name.capitalize()} over rollouts",
        caption="Mean over seeds, on straight lines between evaluations; bands are 95 % intervals over seeds.",
        x_title="rollouts",
        y_title=f"test {outcome.name}",
        series=tuple(lines),
    )


def shown_estimate(estimate: Estimate, outcome: RankedOutcome) -> Estimate:
    """An estimate as tables show it: accuracies in percent, returns as they are."""
    return Estimate(*(outcome.scale * value for value in (estimate.value, estimate.low, estimate.high)))


def markdown_text(table: Table) -> str:
    """A table in Markdown, with its title above and its caption below."""
    head = [f"### {table.title}", "", _line(table.columns), _line(["---"] * len(table.columns))]
    rows = [_line([cell_text(cell) for cell in row]) for row in table.rows]
    return "\n".join([*head, *rows, "", table.caption, ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def csv_text(tables: Sequence[Table]) -> str:
    """Both tables as one, a row per method. An estimate has columns for its value and for the ends of its interval."""
    rows: dict[Any, dict[str, Any]] = {}
    for table in tables:
        for row in table.rows:
            own = rows.setdefault(row[0], {})
            for name, cell in zip(table.columns, row, strict=True):
                own |= _csv_cells(name, cell)
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows.values())
    return file.getvalue()


def _csv_cells(name: str, cell: Cell) -> dict[str, Any]:
    if not isinstance(cell, Estimate):
        return {name: _plain(cell)}
    return {name: _plain(cell.value), f"{name}, low": _plain(cell.low), f"{name}, high": _plain(cell.high)}


def _plain(value: Any) -> Any:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value
