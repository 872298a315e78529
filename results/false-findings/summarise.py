"""Tables of runs.json, coverage.json, replay-coverage.json and difficulty.json.

python summarise.py            print the tables
python summarise.py --write    put them between their marks in README.md

Intervals of shares are Wilson's, 95 %. `TRUE_FINDINGS` lists what is true in a world and therefore no false finding.
"""

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from scoregram.advice import GRAM_RULES, LOG_RULES

HERE = Path(__file__).parent
Z = 1.959963984540054
TRUE_FINDINGS: Mapping[str, frozenset[tuple[str, str]]] = {
    "no signal": frozenset({("batch size", "up"), ("group size", "up")}),
    "balanced": frozenset(),
    "wandering": frozenset({("dead groups", "harder"), ("dead groups", "easier"), ("dead groups", "medium")}),
}
"""World → findings with the direction of their change. Without a signal every batch is too small, and as prompts do not
differ, so is every group. Where the success rate wanders, most groups of some thirds are dead indeed."""


@cache
def stored_runs() -> list[dict[str, Any]]:
    """One mapping per run."""
    return json.loads((HERE / "runs.json").read_text(encoding="utf-8"))


@cache
def stored_coverage() -> list[dict[str, Any]]:
    """One mapping per cell, number of steps, level and quantity."""
    return json.loads((HERE / "coverage.json").read_text(encoding="utf-8"))


@cache
def stored_replays() -> list[dict[str, Any]]:
    """One mapping per law, group size, shape of a run, estimator and quantity of `what_if`."""
    record = json.loads((HERE / "replay-coverage.json").read_text(encoding="utf-8"))
    return [dict(zip(record["columns"], row, strict=True)) for row in record["rows"]]


@cache
def stored_difficulty() -> list[dict[str, Any]]:
    """One mapping per cell."""
    return json.loads((HERE / "difficulty.json").read_text(encoding="utf-8"))


def false_findings(run: Mapping[str, Any]) -> set[str]:
    """Rules whose finding is not true in the world of a run."""
    world = run["cell"].split(",")[0]
    return {name for name, change in run["findings"].items() if (name, change) not in TRUE_FINDINGS[world]}


def wilson(count: int, total: int) -> tuple[float, float]:
    """95 % interval of a share."""
    share, z2 = count / total, Z * Z / total
    middle = (share + z2 / 2) / (1 + z2)
    half = Z * math.sqrt(share * (1 - share) / total + z2 / (4 * total)) / (1 + z2)
    return max(0.0, middle - half), min(1.0, middle + half)


def share_text(count: int, total: int) -> str:
    """`2.0 % [1.1, 3.6]`."""
    low, high = wilson(count, total)
    return f"{100 * count / total:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def among(*words: str) -> list[dict[str, Any]]:
    """Runs whose cell has all of these parts."""
    return [run for run in stored_runs() if {*words} <= {*run["cell"].split(", ")}]


SLICES = {
    "no signal": ("no signal",),
    "balanced": ("balanced",),
    "groups of 4": ("R = 4",),
    "groups of 8": ("R = 8",),
    "60 steps": ("60 steps",),
    "200 steps": ("200 steps",),
    "equal groups": ("equal groups",),
    "no signal, equal groups": ("no signal", "equal groups"),
    "balanced, equal groups": ("balanced", "equal groups"),
    "unequal groups": ("unequal groups",),
    "independent steps": ("memory 0",),
    "drifting steps": ("memory 0.9",),
}


def overall_table() -> str:
    """Share of runs with any false finding: all, and by each property; then the logs that wander."""
    runs = [run for run in stored_runs() if not run["cell"].startswith("wandering")]
    rows = [["**all runs**", runs]]
    rows += [[name, [run for run in among(*words) if run in runs]] for name, words in SLICES.items()]
    rows += [["wandering logs, 60 steps", among("wandering", "60 steps")]]
    rows += [["wandering logs, 200 steps", among("wandering", "200 steps")]]
    cells = [[name, str(len(some)), share_text(count_wrong(some), len(some))] for name, some in rows]
    return table(["runs", "number", "with a false finding"], cells)


def count_wrong(runs: Iterable[Mapping[str, Any]]) -> int:
    """Runs with a false finding."""
    return sum(bool(false_findings(run)) for run in runs)


def rules_table() -> str:
    """For each rule: in how many runs it decided, and in how many of all its finding was false."""
    runs = [run for run in stored_runs() if not run["cell"].startswith("wandering")]
    wandering = among("wandering")
    rows = []
    for name in (*LOG_RULES, *GRAM_RULES):
        decided = sum(name not in run["undecided"] for run in runs)
        wrong, logs = (sum(name in false_findings(run) for run in some) for some in (runs, wandering))
        rows.append([name, str(decided), str(wrong), str(logs) if name in LOG_RULES else ""])
    return table(["rule", f"decided, of {len(runs)}", "false", f"false, of {len(wandering)} wandering logs"], rows)


LABELS = {
    "snr": "signal to noise",
    "noise_scale": "noise scale",
    "best_group_size": "best group size",
    "baseline_saving": "saving",
}


def coverage_table(level: float, truth: str, memory: float) -> str:
    """Share of intervals that hold the truth, by quantity and number of steps; pooled over laws and shapes."""
    chosen = [row for row in stored_coverage() if (row["level"], row["truth"], row["memory"]) == (level, truth, memory)]
    units = sorted({row["units"] for row in chosen})
    rows = []
    for name, label in LABELS.items():
        cells = []
        for count in units:
            some = [row for row in chosen if row["quantity"] == name and row["units"] == count]
            missed, total = (sum(row["below"] + row["above"] for row in some), sum(row["runs"] for row in some))
            cells.append(share_text(total - missed, total))
        rows.append([label, *cells])
    return table([f"{level:.0%}", *(f"{count} steps" for count in units)], rows)


REPLAY_LABELS = {
    "variance": "variance",
    "bias": "bias",
    "snr": "signal / noise",
    "efficiency": "efficiency",
    "direction": "direction",
    "taken": "as taken",
    "effective_rank": "effective rank",
    "effective_rank_null": "its null",
    "top1_fraction": "top-1 fraction",
    "top1_fraction_null": "its null",
    "stable_rank": "stable rank",
    "stable_rank_null": "its null",
    "variance at 2 R": "variance at 2 R",
    "snr at 2 R": "signal / noise at 2 R",
}
LEAST_GIVEN = 60
"""Intervals of a cell that is listed as one of the worst."""


def replay_table(*, share: bool) -> str:
    """Share of the intervals of `what_if` that hold the truth, by quantity and shape; pooled over laws and estimators.

    Rows of one run are not independent, so the interval of the simulation counts each run once.
    """
    chosen = [row for row in stored_replays() if row["share"] == share]
    shapes = list(dict.fromkeys((row["steps"], row["prompts"]) for row in chosen))
    rows = []
    for name, label in REPLAY_LABELS.items():
        cells = []
        for shape in shapes:
            some = [row for row in chosen if row["quantity"] == name and (row["steps"], row["prompts"]) == shape]
            share_held, given = held_share(some)
            rows_per_run = len({(row["estimator"], row["weights"]) for row in some})
            runs = round(given / rows_per_run)
            cells.append(share_text(round(share_held * runs), runs))
        rows.append([label, *cells])
    return table(["95%", *(f"{steps} × {prompts}" for steps, prompts in shapes)], rows)


def held_share(rows: Iterable[Mapping[str, Any]]) -> tuple[float, int]:
    """Share of the given intervals that hold the truth, and their number."""
    several = list(rows)
    missed, given = (sum(row["below"] + row["above"] for row in several), sum(row["given"] for row in several))
    return 1 - missed / given, given


def worst_replays_table() -> str:
    """For each quantity, the estimator and law with the lowest coverage over all shapes of runs and kinds of steps."""
    rows = []
    for name, label in REPLAY_LABELS.items():
        cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in stored_replays():
            if row["quantity"] == name:
                cells.setdefault(tuple(row[key] for key in ("law", "size", "estimator", "weights")), []).append(row)
        large = {key: some for key, some in cells.items() if held_share(some)[1] >= LEAST_GIVEN}
        key = min(large, key=lambda key: held_share(large[key])[0])
        share, given = held_share(large[key])
        above = sum(row["above"] for row in large[key]) / given
        law, size, estimator, weights = key
        weighted = "" if weights == "uniform" else f", weights {weights}"
        told = share_text(round(share * given), given)
        rows.append([label, law, str(size), f"{estimator}{weighted}", told, f"{100 * above:.1f} %"])
    return table(["quantity", "law", "R", "estimator", "hold the truth", "lie above it"], rows)


def sides_table() -> str:
    """By law, at 95 % and 20 steps: shares of intervals below and above the truth."""
    rows = []
    chosen = [row for row in stored_coverage() if (row["level"], row["units"], row["memory"]) == (0.95, 20, 0.0)]
    for cell in dict.fromkeys(tuple(row[name] for name in ("scale", "best", "right", "size")) for row in chosen):
        own = [row for row in chosen if tuple(row[name] for name in ("scale", "best", "right", "size")) == cell]
        cells = []
        for name in LABELS:
            some = [row for row in own if row["quantity"] == name]
            total = sum(row["runs"] for row in some)
            cells.append(
                "; ".join(f"{100 * sum(row[side] for row in some) / total:.1f}" for side in ("below", "above"))
            )
        rows.append([*map(shown, cell), *cells])
    heads = ["noise scale over batch", "best group size", "right over wrong", "R"]
    return table([*heads, *LABELS.values()], rows)


def difficulty_table(*, differ: bool) -> str:
    """Share of runs in which prompts seem to differ, by the success rate and the group size."""
    names = ("law", "law, all steps together", "dead groups", "dead groups, all steps together")
    rows = []
    for row in (row for row in stored_difficulty() if bool(row["gap"]) == differ):
        rate = f"{row['first']:.0%} to {row['last']:.0%}" if row["first"] < row["last"] else f"{row['first']:.0%}"
        rows.append([rate, str(row["size"]), *(share_text(row[name], row["runs"]) for name in names)])
    return table(["success rate", "R", *names], rows)


def shown(value: float | str) -> str:
    """A number, `∞` where it has no end."""
    return "∞" if value == "inf" else f"{value:g}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


TABLES: Mapping[str, Callable[[], str]] = {
    "overall": overall_table,
    "rules": rules_table,
    "coverage95": lambda: coverage_table(0.95, "window", 0.0),
    "coverage90": lambda: coverage_table(0.9, "window", 0.0),
    "drift": lambda: coverage_table(0.95, "window", 0.9),
    "stationary": lambda: coverage_table(0.95, "stationary", 0.9),
    "sides": sides_table,
    "replays": lambda: replay_table(share=False),
    "replays-shared": lambda: replay_table(share=True),
    "replays-worst": worst_replays_table,
    "alike": lambda: difficulty_table(differ=False),
    "differ": lambda: difficulty_table(differ=True),
}


def filled(text: str) -> str:
    """The page with every table computed anew between its marks."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{make()}\n{end}{rest.split(end)[1]}"
    return text


def main() -> None:
    """Print the tables, or write them into README.md."""
    page = HERE / "README.md"
    if "--write" in sys.argv:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n\n".join(f"## {name}\n\n{make()}" for name, make in TABLES.items()))


if __name__ == "__main__":
    main()
