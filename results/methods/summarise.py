"""Every table of this folder, computed from the `.jsonl.xz` files beside this one.

python summarise.py            prints them
python summarise.py --write    writes them into README.md and docs/methods.md
"""

import math
import sys
from collections.abc import Callable, Mapping
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from contrasts import contrasts_table, lambda_table, planned_table, repeated_table
from gsm8k import QWEN_FILES, gsm8k_table, marked, qwen_cells, qwen_spread_row, qwen_spread_table
from packed import (
    HERE,
    Spread,
    comparison,
    composition_gaps,
    known,
    level_of,
    markdown,
    part,
    records,
    seed_means,
    spread_of,
    table_names,
)

from scoregram.bootstrap import t_mean
from scoregram.compare.intervals import verdict
from scoregram.compare.results import ACCURACY
from scoregram.compare.table import accuracy_table, shown_estimate, update_table
from scoregram.exhibits import Estimate, cell_text
from scoregram.reading import RunReading
from scoregram.training import METHODS

DOCS = HERE.parent.parent / "docs" / "methods.md"
LEVELS = {"group": "one advantage per rollout", "turn": "one per turn", "token": "one per token or step"}
TURN_PAIRS = (("turn-rloo", "rloo"), ("turn-rloo", "grpo-paper"), ("turn-mean", "turn-rloo"), ("gigpo", "grpo"))
FINER = ("ppo", "ppo-monte-carlo", "grpo-process", "vineppo", "optimal-token", "delta")
CREDIT_SCALARS = {
    "credit correlation": "credit/correlation",
    "filler share of credit": "credit/filler_share",
    "filler share of push": "push/filler_share",
}
NOTABLE_COST = 1.3
"""A method whose step takes this many times as long as that of `grpo` on some task has a row in the table of costs."""
MEASUREMENTS = ("push/size", "credit/correlation", "time/eval")
"""Scalars of steps whose time includes a measurement or an evaluation."""
SHOWN_UPDATES = ("method", "update signal to noise", "rank over null", "credit correlation", "credit error")
SHOWN_FILLER = ("filler share of credit", "filler share of push", "filler tokens")


@cache
def spread(table: str) -> Spread:
    """The spread of a task's methods."""
    found = comparison(table)
    rows = [seed_means(method, found.outcome) for method in found.methods]
    values = np.array([[row[seed] for seed in sorted(row)] for row in rows])
    return spread_of([method.label for method in found.methods], found.outcome.scale * values)


# Tables


def task_cells(table: str) -> dict[str, str]:
    """Method → accuracy or mean return on a task, with marks for its difference to `grpo`."""
    found, gains, cells = comparison(table), spread(table), {}
    for place, method in enumerate(found.methods):
        value = shown_estimate(method.final(outcome=found.outcome), found.outcome).value
        shown = f"{value:.{1 if found.outcome.scale == 100 else 3}f}"
        said = verdict(method.gain_over(found.methods[0], found.outcome))
        survives = bool(abs(gains.gains[place]) > gains.half)
        cells[method.label.split(":")[0]] = marked(shown, said, survives) if place else shown
    return cells


def overview_table() -> str:
    """Accuracy or mean return of every method on every task, with marks."""
    names = table_names()
    heads = [f"{name}, {'%' if comparison(name).outcome.scale == 100 else 'return'}" for name in names]
    columns = [*map(task_cells, names), qwen_cells()]
    order = ["grpo", *(name for name in METHODS if name != "grpo" and any(name in own for own in columns))]
    rows = [[label, *(own.get(label, "") for own in columns)] for label in order]
    return markdown(["method", *heads, "GSM8K, %"], rows)


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
    return markdown([*heads.split(", "), "survive"], [*rows, qwen_spread_row()])


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


def composition_table() -> str:
    """Accuracy on new sums of known combinations, on held-out combinations, and the gap."""
    found = comparison("compositions")
    rows = []
    for level in ("group", "token"):
        gaps = [composition_gaps(own, found.outcome) for own in found.methods if level_of(own.label) == level]
        shown = f"mean of {len(gaps)} methods, {LEVELS[level]}"
        rows.append((shown, "", "", cell_text(t_mean(np.mean(gaps, axis=0).tolist()))))
    for method in found.methods:
        finals = [
            cell_text(shown_estimate(method.final(split, found.outcome), found.outcome))
            for split in ("", "composition")
        ]
        rows.append((method.label, *finals, cell_text(t_mean(composition_gaps(method, found.outcome).tolist()))))
    return markdown(("method", "accuracy, %", "composition, %", "composition minus known, points"), rows)


def filler_table() -> str:
    """Credit and push on filler, and how credit correlates with the true advantages, on `arithmetic`."""
    return part(update_table(comparison("arithmetic")), (*SHOWN_UPDATES, *SHOWN_FILLER))


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
        "contrasts": contrasts_table,
        "planned": planned_table,
        "repeated": repeated_table,
        "lambda": lambda_table,
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
