"""The page of several runs: what differs, by how much, and the same curves on shared axes."""

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from scoregram.checks import fail
from scoregram.exhibits import Cell, Estimate, Figure, Series, Table, cell_text
from scoregram.reading import (
    FROM_GRAM,
    Curve,
    RunReading,
    RunSet,
    compared_quantities,
    complement,
    group_curve,
    live_curve,
    mean_curve,
    read_run,
    run_sets,
    scalar_curve,
)
from scoregram.report.page import Section, page, write_document
from scoregram.report.run_page import require_run_folder
from scoregram.runs import open_run

SEVERAL_REPORT = "runs.html"
"""File that is written in the current folder if no other is given."""


def rank_curve(run: RunReading) -> Curve:
    """Effective rank over its null, in the steps whose self-check did not fail."""
    live = [group for group in run.groups if group.has_spectrum and group.record.step not in run.trust.failed]
    return group_curve(
        live,
        lambda group: getattr(group.reading, "effective_rank", math.nan),
        lambda group: getattr(group.reading, "effective_rank_orthogonal", math.nan),
    )


CURVES: Mapping[str, tuple[str, str, str, Callable[[RunReading], Curve]]] = {
    "reward": ("Which run learns?", "Mean reward of a step.", "reward", lambda run: scalar_curve(run, "reward")),
    "accuracy": (
        "Which run is right on test problems?",
        "Test accuracy, greedy.",
        "accuracy",
        lambda run: scalar_curve(run, "eval/accuracy"),
    ),
    "live": ("Whose prompts teach?", "Share of live groups.", "share of groups", live_curve),
    "length": (
        "Whose rollouts grow?",
        "Mean number of completion tokens.",
        "tokens",
        lambda run: scalar_curve(run, "length", "completions/mean_length"),
    ),
    "truncated": (
        "Whose rollouts are cut off?",
        "Share of rollouts that the limit on tokens ended.",
        "share of rollouts",
        lambda run: complement(scalar_curve(run, "finished")),
    ),
    "snr": (
        "Whose steps hold more signal?",
        "Signal to noise of a step.",
        "signal to noise",
        lambda run: scalar_curve(run, "gram/snr"),
    ),
    "rank": (
        "Whose rollouts share directions?",
        "Effective rank over its null; 1 means that no shared direction is visible.",
        "effective rank / null",
        rank_curve,
    ),
    "norm": (
        "Whose updates are larger?",
        "Norm of the gradient before clipping.",
        "norm",
        lambda run: scalar_curve(run, "gram/update_norm", "grad_norm"),
    ),
}
"""Name → title, caption, axis and curve of every figure."""
FROM_GRAM_CURVES: Mapping[str, str] = {"snr": "gram/snr", "rank": "group/effective_rank", "norm": "gram/update_norm"}
"""Figures whose curves come from Grams, and their scalar; the norm is the trainer's own where no Gram has it."""


def write_several_report(folders: Sequence[Path | str], out: Path | str | None = None) -> Path:
    """Write the page of several runs and return its path; `runs.html` in the current folder if `out` is not given.

    Raises:
        ScoregramError: If a folder holds no run or is given twice, or as for `write_page`.
    """
    roots = [Path(folder) for folder in folders]
    for root in roots:
        require_run_folder(root)
    if len({root.resolve() for root in roots}) < len(roots):
        fail("report", "every run must be given once", ", ".join(map(str, roots)), "Leave out the second mention.")
    runs = {name: read_run(open_run(root)) for name, root in zip(run_names(roots), roots, strict=True)}
    redo = shlex.join(["scoregram", "report", *map(str, roots)])
    path = Path(SEVERAL_REPORT) if out is None else Path(out)
    return write_document(path, several_page(runs, redo=redo))


def run_names(roots: Sequence[Path]) -> list[str]:
    """A name for every run: its folder, with the folder above it where that is not unique.

    Example:
        >>> run_names([Path("a/run"), Path("b/run"), Path("c")])
        ['a/run', 'b/run', 'c']
    """
    names = [root.resolve().name for root in roots]
    return [
        f"{root.resolve().parent.name}/{name}" if names.count(name) > 1 else name
        for root, name in zip(roots, names, strict=True)
    ]


def several_page(runs: Mapping[str, RunReading], *, redo: str = "") -> str:
    """The document, from a name and a reading for each run."""
    sets = run_sets(runs)
    steps = [step for run in runs.values() for step in run.steps]
    ends = (float(min(steps)), float(max(steps))) if steps else (0.0, 1.0)
    margin = max(1.0, (ends[1] - ends[0]) * 0.02)
    doubts = [
        (state, f"{name}: {sentence}") for name, run in runs.items() for state, sentence in run.trust.judged_sentences()
    ]
    sections = [
        Section("Differences", _unit_text(sets), (runs_table(runs, sets), difference_table(sets))),
        Section("Over steps", "", tuple(several_figures(sets)), x_range=(ends[0] - margin, ends[1] + margin)),
    ]
    shown = [one for one in sections if one.exhibits]
    title = f"{len(runs)} runs side by side"
    return page(title=title, lead=lead_of_sets(sets), sections=shown, redo=redo, trust=doubts, broad=True)


def lead_of_sets(sets: Sequence[RunSet]) -> str:
    """How much the last reward of the other sets differs from that of the first, in one sentence."""
    rows = {row.name: row for row in compared_quantities(sets)}
    row = rows.get("test accuracy, last") or rows.get("reward")
    if row is None or len(sets) < 2:
        return f"{sum(one.seeds for one in sets)} runs of the same settings: bands are over seeds."
    said = [
        f"{one.name} {cell_text(gap)} ({_verdict(gap)})"
        for one, gap in zip(sets[1:], row.differences, strict=True)
        if math.isfinite(gap.value)
    ]
    return f"{row.name.capitalize()}, compared with {sets[0].name}: {'; '.join(said) or 'not known'}."


def _verdict(gap: Estimate) -> str:
    if gap.low > 0:
        return "higher"
    return "lower" if gap.high < 0 else "cannot tell"


def _unit_text(sets: Sequence[RunSet]) -> str:
    if all(one.seeds > 1 for one in sets):
        return "Runs that differ in their seed alone form a set. Intervals are 95 %, t distribution over seeds."
    return (
        "Runs that differ in their seed alone form a set. With one seed, intervals are over groups or steps and do not "
        "include the spread between seeds: a difference between two such runs may be luck."
    )


def runs_table(runs: Mapping[str, RunReading], sets: Sequence[RunSet]) -> Table:
    """Which run is in which set."""
    set_of = {id(run): one.name for one in sets for run in one.runs}
    rows: list[tuple[Cell, ...]] = [
        (name, set_of[id(run)], str(run.config.get("seed", "")), len(run.steps), run.trust.measured)
        for name, run in runs.items()
    ]
    return Table("runs", "The runs", "", ("run", "set", "seed", "steps", "measured"), tuple(rows))


def difference_table(sets: Sequence[RunSet]) -> Table:
    """Every quantity in every set, and its difference from the first set."""
    rows: list[tuple[Cell, ...]] = []
    for row in compared_quantities(sets):
        gaps: list[Cell] = [None, *row.differences]
        for place, (one, value, gap) in enumerate(zip(sets, row.values, gaps, strict=True)):
            name = f"{one.name}{one.mark}" if row.name in FROM_GRAM else one.name
            rows.append((row.name if place == 0 else "", name, value, gap))
    return Table(
        "differences",
        "What differs, and by how much?",
        "Last third of each run. Brackets after a set say what is in doubt or left out in numbers from the Gram. "
        "The interval of a difference follows from those of its two values (MOVER).",
        ("quantity", "set", "value", f"minus {sets[0].name}" if sets else "difference"),
        tuple(rows),
    )


def _curve_name(one: RunSet, figure: str) -> str:
    """The name of a set, with its mark where the curve comes from Grams."""
    scalar = FROM_GRAM_CURVES.get(figure)
    return f"{one.name}{one.mark}" if scalar and any(run.series(scalar)[0] for run in one.runs) else one.name


def several_figures(sets: Sequence[RunSet]) -> Iterator[Figure]:
    """One figure for every quantity that some run logged: one line for each set."""
    for name, (title, caption, axis, curve_of) in CURVES.items():
        series = [
            Series(_curve_name(one, name), curve.steps, curve.mean, curve.low, curve.high)
            for one in sets
            if (curve := mean_curve([curve_of(run) for run in one.runs]))
        ]
        if series:
            bands = " Bands: 95 %, over seeds, or over neighbouring steps for a set of one run."
            yield Figure(name, title, caption + bands, "step", axis, tuple(series))
