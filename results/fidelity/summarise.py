"""The tables of this page and of docs/methods.md, from runs.json.

python summarise.py            print the tables
python summarise.py --write    put them between their marks in README.md and docs/methods.md

A unit is a turn, a segment or a token; `c` is its credit, `a` its true advantage, known up to noise of the mean
variance `s²`. *Correlation* is `cov(c, a) / (sd(c) √(var(a) − s²))` and *error* is `√(mean (c − a)² − s²)`, both over
all units of a policy: 1 and 0 if the credit is the true advantage. *Explained* is the share of `mean a² − s²` that the
best multiple of the credit explains, `(mean ca)² / (mean c² (mean a² − s²))` in percent: 100 for the truth, 0 for
credit that says nothing. It does not depend on the scale of the credit; the error does. The error of no credit at all
is `√(mean a² − s²)`, in the first table.

Intervals are 95 %, Student's t: over seeds where there are three, each with a policy of its own; else for the one
policy, with the jackknife over steps, or over prompts (GSM8K). `*` marks a difference to grpo whose interval excludes
0 after Bonferroni's correction for the other rows of the table.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from scoregram.bootstrap import t_mean
from scoregram.exhibits import Cell, Estimate, cell_text

HERE = Path(__file__).parent
PAGES = (HERE / "README.md", HERE.parent.parent / "docs" / "methods.md")
FIRST = "grpo"
LEAST_SHOWN = 5e-3
"""Differences of correlations below it have no mark in the overview, and below a tenth of it they are shown as 0."""
UNITS = {
    "arithmetic": "tokens, exact",
    "compositions": "tokens, exact",
    "calculator": "turns",
    "stopping": "turns",
    "rotate_matrix": "segments of 4 tokens",
    "spell_backward": "segments of 4 tokens",
    "gsm8k-qwen": "lines",
}
"""Task → what a unit is, in the order of the tables."""

Sums = np.ndarray
"""`(clusters, 7)`: `M, Σa, Σa², Σs², Σc, Σc², Σca` of the units of each cluster."""


@cache
def stored() -> dict[str, list[dict[str, Any]]]:
    """Task → the records of its seeds, as `run.py` wrote them."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in json.loads((HERE / "runs.json").read_text(encoding="utf-8")):
        found.setdefault(run["task"], []).append(run)
    return {name: found[name] for name in UNITS if name in found}


def sums(record: Mapping[str, Any], row: str) -> Sums:
    """The sums of every step, or prompt, of a record."""
    return np.hstack([np.array(record["truth"]), np.array(record["credit"][row])])


def correlation(table: Sums) -> float:
    """Pearson correlation of credit and true advantage, corrected for the noise; `nan` if either does not vary."""
    units, a, aa, noise, c, cc, ca = table.sum(0)
    spreads = (cc / units - (c / units) ** 2, aa / units - (a / units) ** 2 - noise / units)
    return float((ca / units - c * a / units**2) / np.sqrt(spreads[0] * spreads[1])) if min(spreads) > 0 else np.nan


def error(table: Sums) -> float:
    """Root mean square of credit minus true advantage, corrected for the noise, in units of reward."""
    units, _, aa, noise, _, cc, ca = table.sum(0)
    return float(np.sqrt(max((cc - 2 * ca + aa - noise) / units, 0.0)))


def explained(table: Sums) -> float:
    """Share of the true advantages' mean square that the best multiple of the credit explains, in percent."""
    _, _, aa, noise, _, cc, ca = table.sum(0)
    power = aa - noise
    return float(100 * ca**2 / cc / power) if cc > 0 and power > 0 else np.nan


def advantage_size(table: Sums) -> float:
    """Root mean square of the true advantages, corrected for the noise: the error of no credit at all."""
    units, _, aa, noise, *_ = table.sum(0)
    return float(np.sqrt(max((aa - noise) / units, 0.0)))


Reading = Callable[[Sums], float]


def pseudo_values(task: str, reading: Callable[[Mapping[str, Any]], float]) -> list[float]:
    """One number per seed; for a task with one seed, one jackknife pseudo-value per step or prompt."""
    records = stored()[task]
    if len(records) > 1:
        return [reading(record) for record in records]
    (record,) = records
    count, whole = len(record["truth"]), reading(record)
    return [count * whole - (count - 1) * reading(without(record, place)) for place in range(count)]


def without(record: Mapping[str, Any], place: int) -> dict[str, Any]:
    """A record without one of its clusters."""

    def rest(lines: list[Any]) -> list[Any]:
        return lines[:place] + lines[place + 1 :]

    credit = {row: rest(lines) for row, lines in record["credit"].items()}
    return {**record, "truth": rest(record["truth"]), "credit": credit}


def estimate(task: str, row: str, reading: Reading) -> Estimate:
    """A number of one row with its interval."""
    return centred(task, pseudo_values(task, lambda record: reading(sums(record, row))), row, reading)


def centred(task: str, values: list[float], row: str, reading: Reading, other: str = "") -> Estimate:
    """The mean of the values; for one policy the number itself, with the interval of its pseudo-values."""
    found = t_mean(values)
    if len(stored()[task]) > 1:
        return found
    (record,) = stored()[task]
    whole = reading(sums(record, row)) - (reading(sums(record, other)) if other else 0.0)
    half = (found.high - found.low) / 2
    return Estimate(whole, whole - half, whole + half)


def difference(task: str, row: str, reading: Reading, *, tests: int) -> str:
    """A row minus the first one, paired by seed or prompt, with a mark if it survives a correction for `tests`."""

    def both(record: Mapping[str, Any]) -> float:
        return reading(sums(record, row)) - reading(sums(record, FIRST))

    values = pseudo_values(task, both)
    strict, found = t_mean(values, tests=tests), centred(task, values, row, reading, FIRST)
    half = (strict.high - strict.low) / 2
    if max(abs(found.low), abs(found.high)) < LEAST_SHOWN / 10:
        return "0"
    survives = half > 0 and abs(found.value) > half
    text = cell_text(found)
    return f"{text if text.startswith('-') else f'+{text}'}{' *' if survives else ''}"


@cache
def rows_of(task: str) -> list[tuple[str, str]]:
    """Row → the methods that it stands for: correlation and error agree to three decimals with every seed."""
    records = stored()[task]
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in records[0]["credit"]:
        tables = [sums(record, row) for record in records if row in record["credit"]]
        if len(tables) == len(records):
            key = tuple(f"{reading(table):.3f}" for table in tables for reading in (correlation, error))
            groups.setdefault(key, []).append(row)
    named = {
        rows[0]: ", ".join(name for row in rows for name in records[0]["methods"][row]) for rows in groups.values()
    }
    order = sorted(named, key=lambda row: -np.nan_to_num(estimate(task, row, correlation).value))
    return sorted([(row, named[row]) for row in order], key=lambda pair: FIRST not in pair[1].split(", "))


def task_table(task: str) -> str:
    """Every row of one task: correlation, its difference to grpo, error, explained share."""
    rows: list[list[Cell]] = []
    found = rows_of(task)
    for row, names in found:
        is_first = FIRST in names.split(", ")
        cells: list[Cell] = [
            names,
            estimate(task, row, correlation),
            "" if is_first else difference(task, row, correlation, tests=len(found) - 1),
            estimate(task, row, error),
            estimate(task, row, explained),
        ]
        rows.append(cells)
    return markdown(("methods", "correlation", "minus grpo", "error", "explained, %"), rows)


def overview_table() -> str:
    """Correlation of every method with the true advantages on every task; `*` if its difference to grpo survives."""
    tasks = list(stored())
    cells: dict[str, dict[str, str]] = {}
    for task in tasks:
        found = rows_of(task)
        first = estimate(task, found[0][0], correlation).value
        for row, names in found:
            value = estimate(task, row, correlation).value
            mark = ""
            if FIRST not in names.split(", "):
                text = difference(task, row, correlation, tests=len(found) - 1)
                is_shown = text.endswith("*") and abs(value - first) >= LEAST_SHOWN
                mark = {"+": " +*", "-": " −*"}[text[0]] if is_shown else ""
            for name in names.split(", "):
                cells.setdefault(name, {})[task] = ("–" if np.isnan(value) else f"{value:.2f}") + mark
    order = [FIRST, *(name for name in cells if name != FIRST)]
    return markdown(("method", *tasks), [[name, *(cells[name].get(task, "") for task in tasks)] for name in order])


def setting_table() -> str:
    """What was measured on each task."""
    rows: list[list[Cell]] = []
    for task, records in stored().items():
        facts = [record["facts"] for record in records]
        rollouts = [sum(one["rollouts"]) for one in facts]
        fresh = [sum(one["truth_rollouts"]) for one in facts]
        units = [sum(line[0] for line in record["truth"]) for record in records]
        noise = [np.sqrt(sum(line[3] for line in r["truth"]) / n) for r, n in zip(records, units, strict=True)]
        sizes = [advantage_size(sums(record, rows_of(task)[0][0])) for record in records]
        rewards = [sum(one["reward"]) / n for one, n in zip(facts, rollouts, strict=True)]
        shown = [
            f"{len(records)}",
            *(f"{np.mean(values):,.0f}" for values in (rollouts, units, fresh)),
            *(" ".join(f"{value:.3f}" for value in values) for values in (rewards, sizes, noise)),
        ]
        rows.append([task, UNITS[task], *shown])
    heads = ("task", "unit", "seeds", "rollouts", "units", "fresh rollouts")
    return markdown((*heads, "mean reward", "rms true advantage", "its standard error"), rows)


def left_out_table() -> str:
    """Methods without a row on a task, and why."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for task, (record, *_) in stored().items():
        for name, reason in record["left_out"].items():
            reasons.setdefault((name, reason.split(". ")[0]), []).append(task)
    return markdown(("method", "tasks", "reason"), [(n, ", ".join(t), reason) for (n, reason), t in reasons.items()])


def offset_table() -> str:
    """Eq. (23) of arXiv:2606.29238, turn by turn: mean and deviation of the error, as `turn_offset.py` summed them.

    Intervals are the jackknife over steps. The deviation is 0 at the first turn, where the error is 0 by definition.
    """
    rows: list[Sequence[Cell]] = []
    for task, steps in json.loads((HERE / "turn-offset.json").read_text(encoding="utf-8")).items():
        returns = np.array([step["returns"] for step in steps])
        for turn in sorted({int(name) for step in steps for name in step if name != "returns"}):
            table = np.hstack([np.array([step.get(str(turn), [0.0] * 4) for step in steps]), returns])
            shown = (jackknifed(table, reading) for reading in (going, offset_mean, offset_deviation, offset_share))
            rows.append((task, str(turn + 1), *shown))
    names = ("task", "turn", "still going, %", "mean error", "its deviation", "over the deviation of the return")
    return markdown(names, rows)


def going(table: Sums) -> float:
    """Episodes that reach the turn, in percent."""
    return 100 * table[:, 0].sum() / table[:, 4].sum()


def offset_mean(table: Sums) -> float:
    """Mean error of the advantage at the turn."""
    return table[:, 1].sum() / table[:, 0].sum()


def offset_deviation(table: Sums) -> float:
    """Deviation of the error, less the noise of the values that it is computed from."""
    count, total, squares, noise = table[:, :4].sum(0)
    return float(np.sqrt(max(0.0, squares / count - (total / count) ** 2 - noise / count)))


def offset_share(table: Sums) -> float:
    """The same over the deviation of the return."""
    count, total, squares = table[:, 4:].sum(0)
    return offset_deviation(table) / float(np.sqrt(squares / count - (total / count) ** 2))


def jackknifed(table: Sums, reading: Callable[[Sums], float]) -> Estimate:
    """A number of all rows, with Tukey's interval over them."""
    count, whole = len(table), reading(table)
    left_out = [reading(np.delete(table, place, axis=0)) for place in range(count)]
    found = t_mean([count * whole - (count - 1) * one for one in left_out])
    half = found.high - found.value
    return Estimate(whole, whole - half, whole + half)


def markdown(names: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table in Markdown."""
    lines = [list(names), ["---"] * len(names), *([cell_text(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables() -> Iterator[tuple[str, Callable[[], str]]]:
    """Mark and table."""
    yield "fidelity setting", setting_table
    yield "fidelity overview", overview_table
    yield "fidelity left out", left_out_table
    yield "turn offset", offset_table
    for task in stored():
        yield f"fidelity {task}", lambda task=task: task_table(task)


def filled(text: str) -> str:
    """A page with every table that it has a mark for computed anew."""
    for mark, table in tables():
        begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
        if begin in text:
            head, rest = text.split(begin)
            text = f"{head}{begin}\n{table()}\n{end}{rest.split(end)[1]}"
    return text


def main() -> None:
    """Print the tables, or write them into the pages."""
    if "--write" in sys.argv:
        for page in PAGES:
            page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        for mark, table in tables():
            print(f"{mark}\n\n{table()}\n")


if __name__ == "__main__":
    main()
