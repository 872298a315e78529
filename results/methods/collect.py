"""Packs the finished runs of `run.py` into one file: what the tables need of every run, and no text.

python collect.py OUT runs.jsonl.xz [EARLIER.jsonl.xz]    with the runs of earlier records that OUT lacks

One line per run: task, method, seed, settings, learning rate, the scalars of its steps, the greedy rewards of its last
evaluation, and the mean effective rank of its groups with its null.
"""

import json
import lzma
import math
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from scoregram.reading import RunReading, read_run
from scoregram.runs import open_run

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


def main() -> None:
    """Write the file, and beside it why runs failed."""
    out, packed = Path(sys.argv[1]), Path(sys.argv[2])
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        found = [one for one in pool.map(record, run_places(out), chunksize=8) if one]
    for earlier in sys.argv[3:]:
        known = {name_of(one) for one in found}
        with lzma.open(earlier, "rt", encoding="utf-8") as lines:
            found += [one for one in map(json.loads, lines) if name_of(one) not in known]
    with lzma.open(packed, "wt", encoding="utf-8") as file:
        for one in found:
            file.write(json.dumps(one, separators=(",", ":")) + "\n")
    failures = {
        str(p.relative_to(out)): p.read_text().strip().splitlines()[0][:100]
        for p in out.glob("compare/*/runs/*/*failure.txt")
    }
    settings = {p.parent.name: json.loads(p.read_text()) for p in out.glob("compare/*/compare.json")}
    rates = json.loads((out / "rates.json").read_text()) if (out / "rates.json").is_file() else {}
    starts = {p.parent.name: json.loads(p.read_text()) for p in out.glob("starts/*/start.json")}
    print(f"{len(found)} runs")
    about = {"settings": settings, "rates": rates, "starts": starts, "failures": failures}
    packed.with_name("setting.json").write_text(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
