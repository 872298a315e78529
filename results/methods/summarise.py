"""Every table of this folder, computed from the `.jsonl.xz` files beside this one.

python summarise.py            prints them
python summarise.py --write    writes them into README.md and docs/methods.md
"""

import json
import lzma
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import f as fisher
from scipy.stats import t as student

from scoregram.advantages import ESTIMATORS
from scoregram.bootstrap import t_mean
from scoregram.compare.intervals import mean_over_problems, verdict
from scoregram.compare.results import ACCURACY, MethodComparison, MethodResult, RankedOutcome, RunResult
from scoregram.compare.table import accuracy_table, shown_estimate, update_table
from scoregram.exhibits import Estimate, Table, cell_text
from scoregram.reading import GREEDY_TEST, SAMPLED_TEST, RunReading
from scoregram.training import METHODS

HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs" / "methods.md"
LEVELS = {"group": "one advantage per rollout", "turn": "one per turn", "token": "one per token or step"}
TURN_PAIRS = (("turn-rloo", "rloo"), ("turn-rloo", "grpo-paper"), ("turn-mean", "turn-rloo"), ("gigpo", "grpo"))
FINER = ("ppo", "ppo-monte-carlo", "grpo-process", "vineppo", "optimal-token", "delta")
CREDIT_SCALARS = {
    "credit correlation": "credit/correlation",
    "filler share of credit": "credit/filler_share",
    "filler share of push": "push/filler_share",
}
QWEN_FILES = ("gsm8k-qwen.jsonl.xz", "gsm8k-qwen-further.jsonl.xz", "gsm8k-qwen-later.jsonl.xz")
"""The first seven methods and the control; further methods, with `grpo` again."""
UNEVEN = ("igrpo", "vineppo")
"""Methods whose runs on GSM8K do not have the noise of the others: seeds of one differ widely, one makes one update."""
NOTABLE_COST = 1.3
"""A method whose step takes this many times as long as that of `grpo` on some task has a row in the table of costs."""
MEASUREMENTS = ("push/size", "credit/correlation", "time/eval")
"""Scalars of steps whose time includes a measurement or an evaluation."""
SHOWN_UPDATES = ("method", "update signal to noise", "rank over null", "credit correlation", "credit error")
SHOWN_FILLER = ("filler share of credit", "filler share of push", "filler tokens")


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
def comparison(table: str) -> MethodComparison:
    """The comparison of one task, with the seeds that all its methods have."""
    own = [record for record in records() if record["table"] == table]
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
    """Two-way analysis of variance of `(methods, seeds)` values: methods and seeds add, the rest is noise.

    `s² = Σ (y_ms − ȳ_m − ȳ_s + ȳ)² / ((M−1)(S−1))`. The difference of two methods has the variance `2 s²/S`. All
    methods lend their seeds to one estimate of the noise, which assumes that it is the same for each. With one seed the
    noise is not known: `nan`.
    """
    methods, seeds = values.shape
    by_method, by_seed = values.mean(1, keepdims=True), values.mean(0, keepdims=True)
    if seeds == 1:
        return Spread(labels, (by_method - by_method[0]).ravel(), math.nan, math.nan, math.nan)
    rest = values - by_method - by_seed + values.mean()
    degrees = (methods - 1) * (seeds - 1)
    noise = float((rest * rest).sum()) / degrees
    between = seeds * float(((by_method - values.mean()) ** 2).sum()) / (methods - 1)
    quantile = float(student.ppf(1 - 0.05 / (2 * (methods - 1)), degrees))
    return Spread(
        labels,
        (by_method - by_method[0]).ravel(),
        quantile * math.sqrt(2 * noise / seeds),
        float(fisher.sf(between / noise, methods - 1, degrees)) if noise else math.nan,
        math.sqrt(noise),
    )


def seed_means(method: MethodResult, outcome: RankedOutcome, split: str = "") -> dict[int, float]:
    """Seed → mean outcome of the test problems after the last step."""
    return {run.seed: float(np.mean([*run.outcomes(split, outcome).values()])) for run in method.runs}


@cache
def spread(table: str) -> Spread:
    """The spread of a task's methods."""
    found = comparison(table)
    rows = [seed_means(method, found.outcome) for method in found.methods]
    values = np.array([[row[seed] for seed in sorted(row)] for row in rows])
    return spread_of([method.label for method in found.methods], found.outcome.scale * values)


# Tables


def mark(table: str, place: int) -> str:
    """`+` or `−` if the method's own interval excludes 0, `*` if its gain survives the number of methods."""
    found, gains = comparison(table), spread(table)
    if not place:
        return ""
    said = verdict(found.methods[place].gain_over(found.methods[0], found.outcome))
    survives = bool(abs(gains.gains[place]) > gains.half)
    return {"better": "+", "worse": "−"}.get(said, "") + "*" * survives


def overview_table() -> str:
    """Accuracy or mean return of every method on every task, with marks."""
    names = table_names()
    cells: dict[str, dict[str, str]] = {}
    for name in names:
        found = comparison(name)
        for place, method in enumerate(found.methods):
            value = shown_estimate(method.final(outcome=found.outcome), found.outcome).value
            digits = 1 if found.outcome.scale == 100 else 3
            label = method.label.split(":")[0]
            cells.setdefault(label, {})[name] = f"{value:.{digits}f} {mark(name, place)}".strip()
    heads = [f"{name}, {'%' if comparison(name).outcome.scale == 100 else 'return'}" for name in names]
    order = ["grpo", *(name for name in METHODS if name in cells and name != "grpo")]
    return markdown(["method", *heads], [[label, *(cells[label].get(name, "") for name in names)] for label in order])


def spread_table() -> str:
    """Each task: seeds, start, whether the methods differ at all, and how large a gain must be."""
    rows = []
    for name in table_names():
        found, gains = comparison(name), spread(name)
        start = np.mean([run.evaluations(found.outcome)[0][1] for method in found.methods for run in method.runs])
        digits = 1 if found.outcome.scale == 100 else 3
        survivors = [
            f"{label.split(':')[0]} {gain:+.{digits}f}"
            for label, gain in zip(gains.labels, gains.gains, strict=True)
            if abs(gain) > gains.half
        ]
        best = max(range(len(gains.gains)), key=lambda place: gains.gains[place])
        end = np.mean([method.final(outcome=found.outcome).value for method in found.methods])
        rows.append(
            (
                name,
                found.outcome.name,
                str(len(gains.labels)),
                str(found.setting["seeds"]),
                f"{found.setting['learning_rate']:g}",
                f"{found.outcome.scale * start:.{digits}f}",
                f"{found.outcome.scale * end:.{digits}f}",
                *(
                    "–" if math.isnan(value) else f"{value:{form}}"
                    for value, form in (
                        (gains.deviation, f".{digits}f"),
                        (gains.p_equal, ".2g"),
                        (gains.half, f".{digits}f"),
                    )
                ),
                f"{gains.labels[best].split(':')[0]} {gains.gains[best]:+.{digits}f}",
                "–" if math.isnan(gains.half) else ", ".join(survivors) or "none",
            )
        )
    heads = "task, outcome, methods, seeds, learning rate, start, end, deviation of a run, p equal, needed gain, best"
    return markdown([*heads.split(", "), "survive"], rows)


def level_of(label: str) -> str:
    """Level of a method's credit: group, turn or token."""
    return ESTIMATORS[METHODS[label.split(":")[0]].estimator].level


def level_table() -> str:
    """Mean outcome of all methods of one level of credit, and its difference to the methods with one advantage."""
    rows = []
    for name in table_names():
        found = comparison(name)
        by_level: dict[str, list[dict[int, float]]] = {}
        for method in found.methods:
            by_level.setdefault(level_of(method.label), []).append(seed_means(method, found.outcome))
        seeds = sorted(by_level["group"][0])
        means = {
            level: np.array([np.mean([own[seed] for own in all_of_them]) for seed in seeds])
            for level, all_of_them in by_level.items()
        }
        for level in LEVELS:
            if level in means:
                value = shown_estimate(t_mean(means[level].tolist()), found.outcome)
                gain = shown_estimate(t_mean((means[level] - means["group"]).tolist()), found.outcome)
                count = str(len(by_level[level]))
                shown = "" if level == "group" else cell_text(gain)
                rows.append((name, LEVELS[level], count, cell_text(value.value), shown))
    return markdown(("task", "credit", "methods", "mean outcome", "difference to one per rollout"), rows)


def turns_table() -> str:
    """Credit per turn against one advantage per rollout, on both multi-turn tasks, paired by seed and problem."""
    rows = []
    for name, (mine, theirs) in product(("calculator", "stopping"), TURN_PAIRS):
        found = comparison(name)
        by_label = {method.label: method for method in found.methods}
        gain = by_label[mine].gain_over(by_label[theirs], found.outcome)
        rows.append((name, f"{mine} over {theirs}", cell_text(gain), verdict(gain)))
    return markdown(("task", "methods", "difference of mean returns", "verdict"), rows)


def credit_table() -> str:
    """What finer credit changes on `arithmetic`: differences to grpo, paired by seed."""
    methods = {method.label: method for method in comparison("arithmetic").methods}
    readings: dict[str, Callable[[RunReading], float]] = {
        "update signal to noise": lambda run: run.update_power.signal / run.update_power.noise,
        "rank over null": lambda run: run.rank_means[0] / run.rank_means[1],
        **{shown: (lambda run, name=name: run.last_mean(name)) for shown, name in CREDIT_SCALARS.items()},
    }
    rows = []
    for label in FINER:
        cells = []
        for reading in readings.values():
            mine, theirs = ({r.seed: reading(r.run) for r in methods[one].runs} for one in (label, "grpo"))
            cells.append(cell_text(t_mean([mine[seed] - theirs[seed] for seed in mine])))
        rows.append((label, *cells))
    return markdown(("method minus grpo", *readings), rows)


def push_table() -> str:
    """Filler on `arithmetic`: share of the tokens, and what it gets of credit and push relative to that share."""
    methods = {method.label: method for method in comparison("arithmetic").methods}
    rows = []
    for label in ("grpo", "rloo", *FINER):
        runs = [one.run for one in methods[label].runs]
        tokens = [run.last_mean("credit/filler_tokens") for run in runs]
        ratios = [
            t_mean([run.last_mean(name) / share for run, share in zip(runs, tokens, strict=True)])
            for name in ("credit/filler_share", "push/filler_share")
        ]
        rows.append((label, *(cell_text(one) for one in (t_mean([100 * share for share in tokens]), *ratios))))
    return markdown(("method", "filler tokens, %", "credit of filler, over its tokens", "push, over its tokens"), rows)


def composition_gaps(label: str) -> np.ndarray:
    """One number per seed: points on held-out combinations minus points on known ones."""
    found = comparison("compositions")
    method = next(method for method in found.methods if method.label == label)
    known_sums, composed = (seed_means(method, found.outcome, split) for split in ("", "composition"))
    return np.array([100 * (composed[seed] - known_sums[seed]) for seed in sorted(known_sums)])


def composition_table() -> str:
    """Accuracy on new sums of known combinations, on held-out combinations, and the gap."""
    found = comparison("compositions")
    rows = []
    for level in ("group", "token"):
        gaps = [composition_gaps(method.label) for method in found.methods if level_of(method.label) == level]
        shown = f"mean of {len(gaps)} methods, {LEVELS[level]}"
        rows.append((shown, "", "", cell_text(t_mean(np.mean(gaps, axis=0).tolist()))))
    for method in found.methods:
        finals = [
            cell_text(shown_estimate(method.final(split, found.outcome), found.outcome))
            for split in ("", "composition")
        ]
        rows.append((method.label, *finals, cell_text(t_mean(composition_gaps(method.label).tolist()))))
    return markdown(("method", "accuracy, %", "composition, %", "composition minus known, points"), rows)


def filler_table() -> str:
    """Credit and push on filler, and how credit correlates with the true advantages, on `arithmetic`."""
    return part(update_table(comparison("arithmetic")), (*SHOWN_UPDATES, *SHOWN_FILLER))


def gsm8k_runs(*files: str, least_seeds: int = 1) -> dict[str, list[dict[str, Any]]]:
    """Method → its runs on GSM8K; methods with fewer seeds are left out."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for record in (record for file in files for record in records(file)):
        runs.setdefault(record["label"], []).append(record)
    counts = {label: len({one["seed"] for one in own}) for label, own in runs.items()}
    return {label: own for label, own in runs.items() if counts[label] >= least_seeds}


def gsm8k_table(*files: str, least_seeds: int = 1) -> str:
    """Sampled and greedy accuracy on GSM8K's test problems, and the gain over the start, paired by problem.

    `grpo` is first, then the methods from the best to the worst, the controls are last. Runs of a method with the same
    seed count as one: their mean. The rank is that of the groups of the last step.
    """
    runs = gsm8k_runs(*files, least_seeds=least_seeds)
    first = by_seed(gsm8k_runs(*files)["grpo"], SAMPLED_TEST, "rewards")
    rows = []
    for label, own in runs.items():
        after, before = (by_seed(own, SAMPLED_TEST, when) for when in ("rewards", "before"))
        greedy = by_seed(own, GREEDY_TEST, "rewards")
        gain = mean_over_problems(stacked(after) - stacked(before))
        over = mean_over_problems(np.array([after[seed] - first[seed] for seed in after if seed in first]))
        again = "" if len(own) == len(after) else f" ({len(own)} runs)"
        steps = np.mean([record["lines"][-1]["step"] for record in own])
        cells = (mean_over_problems(stacked(after)), gain, mean_over_problems(stacked(greedy)))
        texts = [cell_text(hundred(cell)) for cell in cells]
        shown = "" if label == "grpo" else cell_text(hundred(over))
        place = (label != "grpo", is_control(label), -over.value)
        seeds = f"{len(after)}{again}"
        ranks = cell_text(t_mean(last_ranks(own)))
        rows.append((place, (shown_label(label), seeds, f"{steps:.0f}", texts[0], texts[1], shown, texts[2], ranks)))
    heads = ("method", "seeds", "steps", "sampled, %", "gain over the start", "points over grpo", "greedy, %")
    return markdown((*heads, "rank over null"), [row for _, row in sorted(rows, key=lambda row: row[0])])


def is_control(label: str) -> bool:
    """Whether the rewards of a row are random in training."""
    return ":reward=" in label


def shown_label(label: str) -> str:
    """The method of a label, without options that are the same for all methods of their kind."""
    return "grpo, random rewards" if is_control(label) else label.split(":")[0]


def last_ranks(own: Sequence[Mapping[str, Any]]) -> list[float]:
    """Rank over null of every seed, the mean over its runs."""
    ratios = [(record["seed"], known(record["rank"][0]) / known(record["rank"][1])) for record in own]
    return [float(np.mean([ratio for at, ratio in ratios if at == seed])) for seed in sorted({*dict(ratios)})]


def qwen_spread_table() -> str:
    """How far sampled accuracies on GSM8K must differ if the noise of all methods is pooled, and which do."""
    every = [label for label in gsm8k_runs(*QWEN_FILES, least_seeds=3) if not is_control(label)]
    even = [label for label in every if label not in UNEVEN]
    apart = qwen_spread(even)
    level = [label for label, gain in zip(even, apart.gains, strict=True) if abs(gain) <= apart.half]
    rows = []
    for shown, labels in (
        ("all", every),
        (f"without {' and '.join(UNEVEN)}", even),
        ("of these none that survives", level),
    ):
        found = qwen_spread(labels)
        behind = [
            f"{shown_label(label)} {gain:+.1f}"
            for label, gain in zip(labels, found.gains, strict=True)
            if abs(gain) > found.half
        ]
        numbers = (f"{found.deviation:.1f}", f"{found.p_equal:.2g}", f"{found.half:.1f}")
        rows.append((f"{len(labels)}, {shown}", *numbers, ", ".join(behind) or "none"))
    return markdown(("methods", "deviation of a run", "p equal", "needed gain", "survive"), rows)


def qwen_spread(labels: Sequence[str]) -> Spread:
    """The spread of sampled accuracies, in points."""
    runs = gsm8k_runs(*QWEN_FILES, least_seeds=3)
    tests = [by_seed(runs[label], SAMPLED_TEST, "rewards") for label in labels]
    return spread_of(labels, np.array([[100 * values.mean() for values in own.values()] for own in tests]))


def by_seed(own: Sequence[Mapping[str, Any]], kind: str, when: str) -> dict[int, np.ndarray]:
    """Seed → reward of each test problem, the mean over runs with this seed."""
    tests = [(record["seed"], np.array(record["tests"][kind][when], dtype=float)) for record in own]
    return {seed: np.mean([values for at, values in tests if at == seed], axis=0) for seed in sorted({*dict(tests)})}


def stacked(values: Mapping[int, np.ndarray]) -> np.ndarray:
    """`(seeds, problems)`."""
    return np.array([*values.values()])


def hundred(estimate: Estimate) -> Estimate:
    """In percent."""
    return Estimate(*(100 * value for value in (estimate.value, estimate.low, estimate.high)))


def seconds_per_step(record: Mapping[str, Any]) -> float:
    """Median time of the steps that nothing but training takes, the first left out; `nan` if there are none."""
    plain = [line for line in record["lines"][2:] if not any(name in line for name in MEASUREMENTS)]
    times = [known(line.get("time/step")) for line in plain]
    return float(np.median(times)) if times else math.nan


@cache
def step_costs() -> dict[str, dict[str, Estimate]]:
    """Task → method → time of a step over that of grpo, over seeds. Runs of one seed are compared with grpo's."""
    tables = {name: [r for r in records() if r["table"] == name] for name in table_names()}
    tables["GSM8K"] = [record for file in QWEN_FILES for record in records(file)]
    found: dict[str, dict[str, Estimate]] = {}
    for name, own in tables.items():
        seconds: dict[str, dict[int, list[float]]] = {}
        for record in own:
            if not record["label"].startswith("grpo:"):
                place = seconds.setdefault(record["label"].split(":")[0], {}).setdefault(record["seed"], [])
                place.append(seconds_per_step(record))
        base = {seed: float(np.mean(values)) for seed, values in seconds["grpo"].items()}
        found[name] = {
            label: t_mean([float(np.mean(values)) / base[seed] for seed, values in by_seed.items()])
            for label, by_seed in seconds.items()
        }
    return found


def cost_table(*tasks: str) -> str:
    """Time of a step over that of grpo: the methods that take notably longer on a task, and the range of the others."""
    costs = {name: own for name, own in step_costs().items() if not tasks or name in tasks}
    timed = {name for own in costs.values() for name, cost in own.items() if not math.isnan(cost.value)}
    every = [name for name in METHODS if name in timed - {"grpo"}]
    notable = [n for n in every if any(own[n].value >= NOTABLE_COST for own in costs.values() if n in own)]
    rows = [(name, *(shown_cost(own.get(name)) for own in costs.values())) for name in notable]
    ranges = []
    for own in costs.values():
        rest = [own[name].value for name in every if name in own and name not in notable]
        ranges.append(f"{min(rest):.2f} to {max(rest):.2f}")
    return markdown(("method", *costs), [*rows, (f"the other {len(every) - len(notable)}", *ranges)])


def shown_cost(cost: Estimate | None) -> str:
    """A cost with two decimals; empty if it is not known."""
    if cost is None or math.isnan(cost.value):
        return ""
    ends = "" if math.isnan(cost.low) else f" [{cost.low:.2f}, {cost.high:.2f}]"
    return f"{cost.value:.2f}{ends}"


def task_tables(name: str) -> str:
    """Both tables of `scoregram compare` for one task."""
    found = comparison(name)
    accuracy, updates = accuracy_table(found), update_table(found)
    hidden = ("seeds", "minutes", "" if found.outcome is ACCURACY else "accuracy")
    cost = [column for column in accuracy.columns if column not in hidden]
    return f"{part(accuracy, cost)}\n\n{part(updates, updates.columns)}"


def tables() -> dict[str, Callable[[], str]]:
    """Name of a mark → what stands between its two ends."""
    shared: dict[str, Callable[[], str]] = {
        "overview": overview_table,
        "spread": spread_table,
        "levels": level_table,
        "turns": turns_table,
        "credit": credit_table,
        "filler": filler_table,
        "composition": composition_table,
        "gsm8k": lambda: gsm8k_table("gsm8k.jsonl.xz"),
        "gsm8k-qwen": lambda: gsm8k_table(*QWEN_FILES, least_seeds=3),
        "gsm8k-qwen-spread": qwen_spread_table,
        "push": push_table,
        "cost": lambda: cost_table("arithmetic", "calculator", "GSM8K"),
        "every cost": cost_table,
    }
    return shared | {f"task {name}": (lambda name=name: task_tables(name)) for name in table_names()}


def filled(text: str) -> str:
    """A page with every table that it has a mark for computed anew."""
    for name, make in tables().items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin in text:
            head, rest = text.split(begin)
            text = f"{head}{begin}\n{make()}\n{end}{rest.split(end)[1]}"
    return text


def main() -> None:
    """Print the tables, or write them into the pages."""
    if "--write" in sys.argv:
        for page in (HERE / "README.md", DOCS):
            page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n\n".join(f"## {name}\n\n{make()}" for name, make in tables().items()))


if __name__ == "__main__":
    main()
