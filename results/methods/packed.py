"""The packed runs of this folder, as `scoregram compare` reads runs, and one noise level for many methods."""

import json
import lzma
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import f as fisher

from scoregram.advantages import ESTIMATORS
from scoregram.compare.intervals import method_noise
from scoregram.compare.results import MethodComparison, MethodResult, RankedOutcome, RunResult
from scoregram.exhibits import Estimate, Table, cell_text
from scoregram.reading import RunReading
from scoregram.training import METHODS

HERE = Path(__file__).parent


@dataclass(frozen=True, eq=False)
class PackedRun(RunReading):
    """A run whose groups were packed into their mean rank and its null."""

    packed_rank: tuple[float, float] = (math.nan, math.nan)

    @cached_property
    def rank_means(self) -> tuple[float, float]:
        """Mean rank and mean null, as packed."""
        return self.packed_rank


@cache
def records(file: str = "runs.jsonl.xz") -> list[dict[str, Any]]:
    """One record per run, as `collect.py` wrote them."""
    with lzma.open(HERE / file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def known(value: float | None) -> float:
    """A packed number: null is `nan`."""
    return math.nan if value is None else value


def packed_run(record: Mapping[str, Any]) -> RunResult:
    """A record as the run that `scoregram compare` would read."""
    lines = [{name: known(value) for name, value in line.items()} for line in record["lines"]]
    last = int(lines[-1]["step"])
    tests = {
        kind: {last: dict(zip(found["problems"], map(known, found["rewards"]), strict=True))}
        for kind, found in record["tests"].items()
    }
    rank, null = map(known, record["rank"])
    run = PackedRun(record["settings"], (), lines, [], tests=tests, packed_rank=(rank, null))
    return RunResult(record["seed"], run)


@cache
def comparison(table: str, file: str = "runs.jsonl.xz") -> MethodComparison:
    """The comparison of one task, with the seeds that all its methods have."""
    own = [record for record in records(file) if record["table"] == table]
    seeds = set.intersection(*({r["seed"] for r in own if r["label"] == label} for label in {r["label"] for r in own}))
    runs: dict[str, list[RunResult]] = {}
    for record in own:
        if record["seed"] in seeds:
            runs.setdefault(record["label"], []).append(packed_run(record))
    first = own[0]["settings"]
    setting = {**first, "seeds": len(seeds), "target": None}
    return MethodComparison(setting, [MethodResult(label, found) for label, found in runs.items()])


def table_names() -> list[str]:
    """The tasks, in the order of the runs."""
    order = ("arithmetic", "compositions", "calculator", "stopping")
    found = dict.fromkeys(record["table"] for record in records())
    return [*(name for name in order if name in found), *(name for name in found if name not in order)]


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def part(table: Table, columns: Sequence[str]) -> str:
    """Some columns of a table in Markdown."""
    places = [table.columns.index(name) for name in columns if name in table.columns]
    return markdown([table.columns[p] for p in places], [[cell_text(row[p]) for p in places] for row in table.rows])


# Multiplicity


@dataclass(frozen=True)
class Spread:
    """Differences between methods with one noise level for all of them."""

    labels: Sequence[str]
    gains: np.ndarray
    """`(M,)` mean over seeds minus that of the first method."""
    half: float
    """Half width of an interval for one gain, at 95 % over all `M - 1` gains together (Bonferroni)."""
    p_equal: float
    """p-value of the F test that all methods have the same mean."""
    deviation: float
    """Standard deviation of one run, without the means of its method and of its seed."""


def spread_of(labels: Sequence[str], values: np.ndarray) -> Spread:
    """Two-way analysis of variance of `(methods, seeds)` values, with the noise and needed gain of `method_noise`."""
    methods, seeds = values.shape
    pooled, by_method = method_noise(values), values.mean(1)
    gains, noise = by_method - by_method[0], pooled.deviation**2
    if math.isnan(noise):
        return Spread(labels, gains, math.nan, math.nan, math.nan)
    between = seeds * float(((by_method - values.mean()) ** 2).sum()) / (methods - 1)
    p_equal = float(fisher.sf(between / noise, methods - 1, (methods - 1) * (seeds - 1))) if noise else math.nan
    return Spread(labels, gains, pooled.needed_gain, p_equal, pooled.deviation)


def seed_means(method: MethodResult, outcome: RankedOutcome, split: str = "") -> dict[int, float]:
    """Seed → mean outcome of the test problems after the last step."""
    return {run.seed: float(np.mean([*run.outcomes(split, outcome).values()])) for run in method.runs}


def level_of(label: str) -> str:
    """Level of a method's credit: group, turn or token."""
    return ESTIMATORS[METHODS[label.split(":")[0]].estimator].level


def hundred(estimate: Estimate) -> Estimate:
    """In percent."""
    return Estimate(*(100 * value for value in (estimate.value, estimate.low, estimate.high)))


def composition_gaps(method: MethodResult, outcome: RankedOutcome) -> np.ndarray:
    """One number per seed: points on held-out combinations minus points on known ones."""
    known_sums, composed = (seed_means(method, outcome, split) for split in ("", "composition"))
    return np.array([100 * (composed[seed] - known_sums[seed]) for seed in sorted(known_sums)])
