"""Packs the finished runs of `run.py` into one file: what the tables need of every run, and no text.

python collect.py OUT runs.jsonl.xz [EARLIER.jsonl.xz] [--untimed]

With earlier records, OUT adds runs and replaces those of the same task, method and seed, and so in `setting.json`.
`--untimed` leaves out the times of the runs in OUT. The tables compare times with those of `grpo`, so runs of another
machine need it.

One line per run: task, method, seed, settings, learning rate, the scalars of its steps, the greedy rewards of its last
evaluation, and the mean effective rank of its groups with its null.
"""

import argparse
import json
import lzma
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from scoregram.reading import RunReading, read_run
from scoregram.runs import open_run
from scoregram.training import METHODS

KEPT = (
    *("step", "rollouts", "reward", "skipped", "time/step", "time/eval", "groups", "live_groups", "entropy"),
    *("eval/", "gram/update_", "credit/", "push/", "turns/", "length"),
)
"""Scalars that are kept, by name or by the start of their name."""
SETTINGS = (
    "task",
    "model",
    "method",
    "seed",
    "rollouts",
    "every_rollouts",
    "batch_size",
    "group_size",
    "learning_rate",
)


def short(value: Any) -> Any:
    """A number with six digits; `nan` as null."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def kept_lines(run: RunReading) -> list[dict[str, Any]]:
    """The scalars of every step."""
    return [{name: short(value) for name, value in line.items() if name.startswith(KEPT)} for line in run.lines]


def last_rewards(run: RunReading) -> dict[str, dict[str, list[Any]]]:
    """Kind of rollouts → problems and their rewards at the first and at the last evaluation."""
    found = {}
    for kind, by_step in run.tests.items():
        if by_step:
            last = by_step[max(by_step)]
            found[kind] = {"problems": [*last], "rewards": [*last.values()]}
            if kind == "test":
                found[kind]["before"] = [*by_step[min(by_step)].values()]
    return found


def record(place: tuple[Path, str, int]) -> dict[str, Any] | None:
    """The record of one run; None if it has not used up its budget."""
    path, label, budget = place
    folder = open_run(path)
    run = read_run(folder)
    if not run.lines or run.lines[-1].get("rollouts", 0) < budget:
        return None
    return {
        "table": path.parents[2].name,
        "label": label,
        "seed": run.config["seed"],
        "settings": {name: run.config[name] for name in SETTINGS if name in run.config},
        "start": folder.environment.get("start_sha256"),
        "rank": [short(value) for value in run.rank_means],
        "tests": last_rewards(run),
        "lines": kept_lines(run),
    }


def run_places(out: Path) -> Iterator[tuple[Path, str, int]]:
    """Folder, label and budget of every run that has begun."""
    for setting_file in sorted(out.glob("compare/*/compare.json")):
        setting = json.loads(setting_file.read_text())
        for label, folder in setting["methods"].items():
            for path in sorted((setting_file.parent / "runs" / folder).glob("seed-*/metrics.jsonl")):
                yield path.parent, label, setting["rollouts"]


def name_of(run: dict[str, Any]) -> tuple[str, str, int]:
    """Table, label and seed of a run."""
    return run["table"], run["label"], run["seed"]


def without_times(run: dict[str, Any]) -> dict[str, Any]:
    """A record without the times of its steps."""
    lines = [{name: v for name, v in line.items() if not name.startswith("time/")} for line in run["lines"]]
    return {**run, "lines": lines}


def in_order(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Task by task, methods in the order of their table after `grpo`, then labels and seeds."""
    tables, methods = list(dict.fromkeys(run["table"] for run in runs)), ["grpo", *METHODS]
    labels = list(dict.fromkeys(run["label"] for run in runs))

    def place(run: dict[str, Any]) -> tuple[int, ...]:
        method = methods.index(run["label"].split(":")[0])
        return tables.index(run["table"]), method, labels.index(run["label"]), run["seed"]

    return sorted(runs, key=place)


def updated(known: Any, found: Any) -> Any:
    """The values of `found`, and those of the earlier dictionary that it lacks, in the order of the earlier one."""
    if not (isinstance(known, Mapping) and isinstance(found, Mapping)):
        return found
    return {name: updated(value, found.get(name, value)) for name, value in known.items()} | {
        name: value for name, value in found.items() if name not in known
    }


def settings_of(out: Path) -> dict[str, Any]:
    """Settings of the comparisons, learning rates, facts of the starts, and why runs failed."""
    failures = {
        str(p.relative_to(out)): p.read_text().strip().splitlines()[0][:100]
        for p in out.glob("compare/*/runs/*/*failure.txt")
    }
    settings = {p.parent.name: json.loads(p.read_text()) for p in out.glob("compare/*/compare.json")}
    rates = json.loads((out / "rates.json").read_text()) if (out / "rates.json").is_file() else {}
    starts = {p.parent.name: json.loads(p.read_text()) for p in out.glob("starts/*/start.json")}
    return {"settings": settings, "rates": rates, "starts": starts, "failures": failures}


def main() -> None:
    """Write the file, and `setting.json` beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("packed", type=Path)
    parser.add_argument("earlier", type=Path, nargs="?", help="records to add to")
    parser.add_argument("--untimed", action="store_true", help="leave out the times of the runs in OUT")
    given = parser.parse_args()
    earlier: list[dict[str, Any]] = []
    if given.earlier:
        with lzma.open(given.earlier, "rt", encoding="utf-8") as lines:
            earlier = [json.loads(line) for line in lines]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        found = [one for one in pool.map(record, run_places(given.out), chunksize=8) if one]
    found = [without_times(one) if given.untimed else one for one in found]
    replaced = {name_of(one) for one in found}
    about, setting = settings_of(given.out), given.packed.with_name("setting.json")
    if given.earlier:
        about = updated(json.loads(setting.read_text(encoding="utf-8")), about)
    runs = in_order([*(one for one in earlier if name_of(one) not in replaced), *found])
    with lzma.open(given.packed, "wt", encoding="utf-8") as file:
        for one in runs:
            file.write(json.dumps(one, separators=(",", ":")) + "\n")
    setting.write_text(json.dumps(about, indent=1), encoding="utf-8")
    print(f"{len(runs)} runs, {len(found)} of them from {given.out}")


if __name__ == "__main__":
    main()
