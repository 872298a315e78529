"""Runs of noise through `scoregram advise`: which findings it gives where there is nothing to find.

python run.py OUT [--runs 20] [--workers 2] [--first 0]    simulate what is missing, one line per run in OUT
python run.py OUT --logs --runs 150                         the same for logs without Grams
python run.py OUT --again "stuck batch"                    decide a rule that was changed on every stored run again
python run.py OUT --write                                  write runs.json from OUT

`read_run` reads each run as it reads a folder, and `advise_run` applies every rule; nothing is written to disk, which
would take longer than all rules. A cell of the design is a
world, a group size, a length, equal or unequal groups, and steps that do or do not depend on each other.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import torch
from worlds import Law, World, draw_log, draw_run, law_with

from scoregram.advice import GRAM_RULES, LOG_RULES, RunFinding, RunLog, advise_log, advise_run, run_log
from scoregram.reading import RunReading, read_run

HERE = Path(__file__).parent
PROMPTS = 4
LONG, LONG_EVERY = 200, 4
"""Runs of this many steps take three times as long, so only every fourth seed has them."""
METHODS = ("rloo", "mean")
"""Estimators of the runs in turn: with groups of one size they differ by a factor, so none has less error."""


@dataclass(frozen=True)
class Cell:
    """One cell of the design."""

    world: str
    size: int
    steps: int
    is_uneven: bool
    memory: float

    @property
    def name(self) -> str:
        """Such as `balanced, R = 8, 60 steps, equal groups, independent steps`."""
        groups = "unequal" if self.is_uneven else "equal"
        return f"{self.world}, R = {self.size}, {self.steps} steps, {groups} groups, memory {self.memory:g}"


RUN_CELLS = tuple(
    Cell(*values) for values in product(("no signal", "balanced"), (4, 8), (60, 200), (False, True), (0.0, 0.9))
)
LOG_CELLS = tuple(Cell(*values) for values in product(("wandering",), (4, 8), (60, 200), (False,), (0.95,)))
CELLS = RUN_CELLS + LOG_CELLS


@cache
def law_of(world: str, size: int) -> Law:
    """`balanced`: batch and group size are the best ones, and signal equals noise. Otherwise every gradient is zero."""
    if world != "balanced":
        return Law()
    return law_with(noise_scale=PROMPTS * size, best_group_size=size, size=size)


def drawn_run(cell: Cell, seed: int) -> RunReading | RunLog:
    """The run of a cell and a seed, as the rules read it."""
    torch.set_num_threads(1)
    own_seed = 1_000_003 * CELLS.index(cell) + seed
    world = World(
        law=law_of(cell.world, cell.size),
        size=cell.size,
        steps=cell.steps,
        prompts=PROMPTS,
        is_uneven=cell.is_uneven,
        memory=cell.memory,
    )
    if cell in LOG_CELLS:
        return run_log("log", draw_log(world, own_seed), {"inner_updates": 2})
    return read_run(draw_run(world, own_seed, METHODS[seed % len(METHODS)]))


def simulate(cell: Cell, seed: int) -> dict[str, Any]:
    """The verdicts of all rules on one run: findings with the direction of their change, and open questions."""
    drawn = drawn_run(cell, seed)
    found = advise_log(drawn) if isinstance(drawn, RunLog) else advise_run(drawn)
    findings = {one.name: direction(one) for one in found.findings}
    return {"cell": cell.name, "seed": seed, "findings": findings, "undecided": sorted(found.undecided)}


def direction(finding: RunFinding) -> str:
    """Direction of the change that a finding advises; empty without one."""
    return "" if finding.change is None else finding.change.direction


def decided_again(row: Mapping[str, Any], rules: Sequence[str]) -> dict[str, Any]:
    """A stored run with the present verdicts of some rules; the others need no second simulation."""
    drawn = drawn_run(next(cell for cell in CELLS if cell.name == row["cell"]), row["seed"])
    findings = {name: change for name, change in row["findings"].items() if name not in rules}
    undecided = {name for name in row["undecided"] if name not in rules}
    for name in rules:
        is_log_rule = name in LOG_RULES
        log = drawn if isinstance(drawn, RunLog) else run_log("", list(drawn.lines), drawn.config)
        if not is_log_rule and isinstance(drawn, RunLog):
            continue
        verdict = LOG_RULES[name](log) if is_log_rule else GRAM_RULES[name](cast("RunReading", drawn))
        if isinstance(verdict, RunFinding):
            findings[name] = direction(verdict)
        elif verdict is not None:
            undecided.add(name)
    return {**row, "findings": findings, "undecided": sorted(undecided)}


def decide_again(out: Path, rules: Sequence[str], workers: int) -> None:
    """The present verdicts of some rules for every stored run."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        rows = list(pool.map(partial(decided_again, rules=rules), stored_rows(out), chunksize=8))
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def simulate_missing(out: Path, cells: Sequence[Cell], runs: range, workers: int) -> None:
    """Every run that is not in the file yet, seed by seed, so that all cells grow together."""
    known = {(row["cell"], row["seed"]) for row in stored_rows(out)}
    wanted = [(cell, seed) for seed in runs for cell in cells if cell.steps < LONG or seed % LONG_EVERY == 0]
    queue = [(cell, seed) for cell, seed in wanted if (cell.name, seed) not in known]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool, out.open("a", encoding="utf-8") as file:
        for done in as_completed([pool.submit(simulate, cell, seed) for cell, seed in queue]):
            print(json.dumps(done.result()), file=file, flush=True)


def stored_rows(out: Path) -> list[dict[str, Any]]:
    """The lines that were written so far."""
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []


def main() -> None:
    """Simulate, or write the record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--logs", action="store_true")
    parser.add_argument("--again", nargs="+", default=[], choices=[*LOG_RULES, *GRAM_RULES])
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.write:
        rows = sorted(stored_rows(arguments.out), key=lambda row: (row["cell"], row["seed"]))
        text = ",\n".join(json.dumps(row) for row in rows)
        (HERE / "runs.json").write_text(f"[\n{text}\n]\n", encoding="utf-8")
    elif arguments.again:
        decide_again(arguments.out, arguments.again, arguments.workers)
    else:
        cells = LOG_CELLS if arguments.logs else RUN_CELLS
        seeds = range(arguments.first, arguments.first + arguments.runs)
        simulate_missing(arguments.out, cells, seeds, arguments.workers)


if __name__ == "__main__":
    main()
