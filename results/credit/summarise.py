"""The tables of this page and of docs/methods.md, from runs.json, fresh-seeds.json, warm-up.json and critics.json.

python summarise.py            print the tables
python summarise.py --write    put them between their marks in README.md and docs/methods.md

Fixed runs. `g` is the gradient, taken from the oracle per token, which is unbiased: `|g|²` is the mean product of its
gradients at different steps, and `⟨E ĝ, g⟩` that of the method's and the oracle's. Products of gradients are those of
their sketches (1,024 numbers). *Direction* is the cosine of `E ĝ` and `g`, *efficiency* is
`⟨E ĝ, g⟩² / (|g|² E|ĝ − E ĝ|²)` over that of the first row: at 2, half as many rollouts give an update that is as good.
`|E ĝ|²` itself would count a bias as signal. Both are computed from sums over seeds, with the jackknife over seeds.

Training runs. *Area* is the mean accuracy of sampled test rollouts over the budget, on straight lines between
evaluations: it rewards early learning. *Last* is the accuracy of sampled test rollouts at the end of the budget.
Differences are paired by seed.

Intervals are 95 %, Student's t over seeds. `*` marks a difference to the first row whose interval excludes 0 after
Bonferroni's correction for the other rows of the table.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from scoregram.bootstrap import t_mean
from scoregram.compare.intervals import ratio_over_seeds
from scoregram.exhibits import Cell, Estimate, cell_text

HERE = Path(__file__).parent
PAGES = (HERE / "README.md", HERE.parent.parent / "docs" / "methods.md")
FIRST = "group baseline"
"""One advantage per rollout, reward minus the mean of the other rollouts: the row that others are compared with."""
PLANNED = (("exact, per step", "exact, per rollout"), ("exact, per token", "exact, per rollout"), ("vineppo", FIRST))
"""Contrasts that were planned before the runs."""
FRESH = (("exact, per token", "exact, per rollout"), ("process rewards", FIRST), ("optimal-token", FIRST))
FRESH_TERMS, FRESH_RATE = "12", "0.0001"
"""Contrasts that the first seeds suggested at this length and rate, repeated on seeds that no table had."""
WARM_UP_TERMS, WARM_UP_ROW, COLD_ROW = "4", "critic, λ = 0.95, 10 steps of warm-up", "critic, λ = 0.95"
WARM_UP_SHARE = 10 / 50
"""A critic that learns alone for a share of the budget, compared with the same critic without that, seed by seed."""
FIXED, PERCENT = "fixed", 100.0
FEWEST_SEEDS = 3
"""A learning rate with fewer seeds is in no table."""


@cache
def stored(file: str = "runs.json") -> dict[str, Any]:
    """What `run.py` wrote."""
    return json.loads((HERE / file).read_text(encoding="utf-8"))


def records(terms: str, row: str, kind: str) -> dict[str, Mapping[str, Any]]:
    """Seed → record, of the seeds that all rows of this length and kind have."""
    rows = [one[kind] for one in stored()["runs"][terms].values() if one[kind]]
    seeds = set.intersection(*(set(one) for one in rows))
    found = stored()["runs"][terms][row][kind]
    return {seed: found[seed] for seed in sorted(seeds, key=int)} if found else {}


def lengths() -> list[str]:
    """Numbers of terms, shortest chain first."""
    return sorted(stored()["runs"], key=int)


def rates(terms: str) -> list[str]:
    """Learning rates with enough seeds, smallest first."""
    kinds = stored()["runs"][terms][FIRST]
    return sorted((kind for kind in kinds if kind != FIXED and len(kinds[kind]) >= FEWEST_SEEDS), key=float)


def sampled_at(record: Mapping[str, Any], places: np.ndarray) -> np.ndarray:
    """Accuracy of sampled test rollouts at these numbers of rollouts, on straight lines between evaluations."""
    rollouts, sampled, _ = np.array(record["evaluations"]).T
    return np.interp(places, rollouts, sampled)


def budget() -> int:
    """Rollouts of a training run."""
    return stored()["setting"]["shared"]["rollouts"]


def area(record: Mapping[str, Any]) -> float:
    """Mean sampled accuracy over the budget, in percent."""
    inside = {float(rollouts) for rollouts, *_ in record["evaluations"] if rollouts < budget()}
    places = np.array(sorted({*inside, float(budget())}))
    return PERCENT * float(np.trapezoid(sampled_at(record, places), places)) / budget()


def last(record: Mapping[str, Any]) -> float:
    """Sampled accuracy at the end of the budget, in percent."""
    return PERCENT * float(sampled_at(record, np.array([budget()]))[0])


def values(terms: str, row: str, kind: str, reading: Callable[[Mapping[str, Any]], float]) -> list[float]:
    """One number per seed."""
    return [reading(record) for record in records(terms, row, kind).values()]


def gain(
    terms: str, row: str, kind: str, reading: Callable[[Mapping[str, Any]], float], *, tests: int, other: str = FIRST
) -> tuple[Estimate, bool]:
    """Mean difference to another row, paired by seed, and whether it survives a correction for `tests` comparisons."""
    pairs = zip(values(terms, row, kind, reading), values(terms, other, kind, reading), strict=True)
    differences = [mine - theirs for mine, theirs in pairs]
    strict = t_mean(differences, tests=tests)
    return t_mean(differences), bool(strict.low > 0 or strict.high < 0)


def measured(name: str, scale: float = 1.0) -> Callable[[Mapping[str, Any]], float]:
    """A mean over the measured steps of a run; `nan` where it is undefined."""

    def reading(record: Mapping[str, Any]) -> float:
        value = record["measured"].get(name)
        return float("nan") if value is None else scale * value

    return reading


def ratio(terms: str, row: str, above: str, below: str) -> Estimate:
    """Ratio of two means over seeds, in fixed runs."""
    return ratio_over_seeds(*(values(terms, row, FIXED, measured(name)) for name in (above, below)))


def products(terms: str, row: str) -> np.ndarray:
    """`(4, seeds)`: `|E ĝ|²`, `E|ĝ − E ĝ|²`, `⟨E ĝ, g⟩` and `|g|²`."""
    found = [record["products"] for record in records(terms, row, FIXED).values()]
    return np.array([[one["cross"], one["own"] - one["cross"], one["with_oracle"], one["oracle"]] for one in found]).T


def jackknifed(count: int, statistic: Callable[[np.ndarray], float]) -> Estimate:
    """A function of which seeds are kept, with the interval of its pseudo-values."""
    everyone = np.arange(count)
    whole = statistic(everyone)
    parts = [count * whole - (count - 1) * statistic(np.delete(everyone, one)) for one in everyone]
    spread = t_mean(parts)
    half = (spread.high - spread.low) / 2
    return Estimate(whole, whole - half, whole + half)


def direction(terms: str, row: str) -> Estimate:
    """Cosine of the expected update and the gradient; above 1 by chance only."""
    table = products(terms, row)

    def cosine(kept: np.ndarray) -> float:
        own, _, along, gradient = table[:, kept].sum(axis=1)
        return float(along / np.sqrt(own * gradient))

    return jackknifed(table.shape[1], cosine)


def efficiency(terms: str, row: str) -> Estimate:
    """Squared signal along the gradient over noise, relative to that of the first row; jackknife of its logarithm."""
    mine, first = products(terms, row), products(terms, FIRST)

    def logarithm(kept: np.ndarray) -> float:
        (_, noise, along, _), (_, other_noise, other, _) = (one[:, kept].sum(axis=1) for one in (mine, first))
        return float(2 * np.log(along / other) - np.log(noise / other_noise))

    found = jackknifed(mine.shape[1], logarithm)
    return Estimate(*(float(np.exp(value)) for value in (found.value, found.low, found.high)))


def fixed_table(terms: str) -> str:
    """What the credit of every method is worth on the same rollouts of the same policy."""
    rows: list[list[Cell]] = []
    for row in rows_of(terms):
        cells: list[Cell] = [
            row,
            t_mean(values(terms, row, FIXED, measured("credit/correlation"))),
            t_mean(values(terms, row, FIXED, measured("credit/filler_share", PERCENT))),
            ratio(terms, row, "group/effective_rank", "group/effective_rank_orthogonal"),
            direction(terms, row),
            1.0 if row == FIRST else efficiency(terms, row),
        ]
        rows.append(cells)
    names = ("method", "credit correlation", "filler share, %", "rank over null", "direction", "efficiency")
    return markdown(names, rows)


def trained_table(terms: str) -> str:
    """Area and last accuracy of every method at both learning rates, as differences to the first row."""
    heads, columns = ["method"], []
    for rate in rates(terms):
        for shown, reading in (("area", area), ("last", last)):
            heads.append(f"{shown}, rate {float(rate):g}")
            columns.append((rate, reading))
    names = rows_of(terms)
    rows: list[list[Cell]] = []
    for row in names:
        cells: list[Cell] = [row]
        for rate, reading in columns:
            if row == FIRST:
                cells.append(t_mean(values(terms, row, rate, reading)))
                continue
            found, survives = gain(terms, row, rate, reading, tests=len(names) - 1)
            cells.append(f"{signed(found)}{' *' if survives else ''}")
        rows.append(cells)
    return markdown(heads, rows)


def planned_table() -> str:
    """The contrasts that were planned, by length and learning rate; the correction is for all of them."""
    rows: list[list[Cell]] = []
    tests = len(PLANNED) * sum(len(rates(terms)) for terms in lengths())
    for mine, other in PLANNED:
        for terms in lengths():
            for rate in rates(terms):
                cells: list[Cell] = [f"{mine} minus {other}", terms, f"{float(rate):g}"]
                for reading in (area, last):
                    found, survives = gain(terms, mine, rate, reading, tests=tests, other=other)
                    cells.append(f"{signed(found)}{' *' if survives else ''}")
                rows.append(cells)
    return markdown(("contrast", "terms", "rate", "area, points", "last, points"), rows)


def fresh_differences(file: str, mine: str, other: str, reading: Callable[[Mapping[str, Any]], float]) -> list[float]:
    """Difference of two rows for every seed of a file that has both."""
    runs = stored(file)["runs"][FRESH_TERMS]
    here, there = (runs[row][FRESH_RATE] for row in (mine, other))
    return [reading(here[seed]) - reading(there[seed]) for seed in sorted({*here} & {*there}, key=int)]


def fresh_table() -> str:
    """The repeated contrasts: on the seeds that suggested them and on fresh ones, corrected for their number."""
    rows: list[list[Cell]] = []
    counts = [len(fresh_differences(file, *FRESH[0], area)) for file in ("runs.json", "fresh-seeds.json")]
    for mine, other in FRESH:
        cells: list[Cell] = [f"{mine} minus {other}"]
        for file, reading in (("runs.json", area), ("fresh-seeds.json", area), ("fresh-seeds.json", last)):
            found = fresh_differences(file, mine, other, reading)
            strict = t_mean(found, tests=len(FRESH))
            survives = file != "runs.json" and (strict.low > 0 or strict.high < 0)
            cells.append(f"{signed(t_mean(found))}{' *' if survives else ''}")
        rows.append(cells)
    first, fresh = (f"{count} seeds" for count in counts)
    return markdown(("contrast", f"area, first {first}", f"area, {fresh}, fresh", f"last, {fresh}, fresh"), rows)


def warm_up_table() -> str:
    """A critic with a warm-up against the same critic without, and against the first row, paired by seed.

    Beside them the critic without a warm-up against the first row, on the same seeds. *At equal updates* compares the
    end of the run with a warm-up with the other run when it had made as many updates. The correction is for both
    contrasts of the warm-up at both rates.
    """
    warm, cold = stored("warm-up.json")["runs"][WARM_UP_TERMS][WARM_UP_ROW], stored()["runs"][WARM_UP_TERMS]
    rows: list[list[Cell]] = []
    for is_warm, other in ((True, COLD_ROW), (True, FIRST), (False, FIRST)):
        for rate in sorted(warm, key=float):
            seeds = sorted(warm[rate], key=int)
            mine = [(warm if is_warm else cold[COLD_ROW])[rate][seed] for seed in seeds]
            theirs = [cold[other][rate][seed] for seed in seeds]
            name = f"{'with' if is_warm else 'without'} a warm-up minus "
            cells: list[Cell] = [name + ("without" if other == COLD_ROW else other), f"{float(rate):g}", len(seeds)]
            for here, there in ((area, area), (last, last), (last, after_warm_up))[: 3 if is_warm else 2]:
                found = [here(one) - there(two) for one, two in zip(mine, theirs, strict=True)]
                strict = t_mean(found, tests=2 * len(warm))
                survives = is_warm and (strict.low > 0 or strict.high < 0)
                cells.append(f"{signed(t_mean(found))}{' *' if survives else ''}")
            rows.append([*cells, *[None] * (6 - len(cells))])
    return markdown(
        ("critic, λ = 0.95", "rate", "seeds", "area, points", "last, points", "at equal updates, points"), rows
    )


def after_warm_up(record: Mapping[str, Any]) -> float:
    """Sampled accuracy, in percent, after as many updates as a run with a warm-up makes in its budget."""
    return PERCENT * float(sampled_at(record, np.array([budget() * (1 - WARM_UP_SHARE)]))[0])


def critics_table() -> str:
    """Mean explained variance of nine critics, and of the true values, in the last third of a run."""
    found = stored("critics.json")["explained_variance_by_third"]
    heads = ["critic", *(f"{terms} terms" for terms in found)]
    names = list(next(iter(found.values())))
    return markdown(heads, [[name, *(f"{found[terms][name][-1]:z.2f}" for terms in found)] for name in names])


def signed(found: Estimate) -> str:
    """A difference with its sign."""
    text = cell_text(found)
    return text if text.startswith("-") else f"+{text}"


def steps_table() -> str:
    """Updates per run: methods that sample prefixes make fewer."""
    heads = ["method", *(f"{terms} terms" for terms in lengths())]
    rows = []
    for row in rows_of(lengths()[0]):
        by_length = (values(terms, row, rates(terms)[0], lambda record: record["steps"]) for terms in lengths())
        rows.append([row, *(f"{np.mean(found):.0f}" for found in by_length)])
    return markdown(heads, rows)


def rows_of(terms: str) -> list[str]:
    """Rows with records of this length, in order."""
    return [row for row in stored()["setting"]["methods"] if stored()["runs"][terms].get(row, {}).get(FIXED)]


def markdown(names: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table in Markdown."""
    lines = [list(names), ["---"] * len(names), *([cell_text(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables() -> Iterator[tuple[str, str]]:
    """Mark and table."""
    for terms in lengths():
        yield f"credit fixed {terms}", fixed_table(terms)
        yield f"credit trained {terms}", trained_table(terms)
    yield "credit planned", planned_table()
    if (HERE / "fresh-seeds.json").is_file():
        yield "credit fresh", fresh_table()
    if (HERE / "warm-up.json").is_file():
        yield "credit warm-up", warm_up_table()
    yield "credit critics", critics_table()
    yield "credit steps", steps_table()


def filled(text: str) -> str:
    """A page with every table that it has a mark for computed anew."""
    for mark, table in tables():
        begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
        if begin in text:
            head, rest = text.split(begin)
            text = f"{head}{begin}\n{table}\n{end}{rest.split(end)[1]}"
    return text


def main() -> None:
    """Print the tables, or write them into the pages."""
    if "--write" in sys.argv:
        for page in PAGES:
            page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        for mark, table in tables():
            print(f"{mark}\n\n{table}\n")


if __name__ == "__main__":
    main()
