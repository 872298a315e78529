"""Tables of the runs on GSM8K."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from packed import Spread, hundred, known, markdown, records, spread_of

from scoregram.bootstrap import t_mean
from scoregram.compare.intervals import mean_over_problems, verdict
from scoregram.exhibits import cell_text
from scoregram.reading import GREEDY_TEST, SAMPLED_TEST

QWEN_FILES = ("gsm8k-qwen.jsonl.xz", "gsm8k-qwen-further.jsonl.xz", "gsm8k-qwen-later.jsonl.xz")
"""The first seven methods and the control; further methods, with `grpo` again."""
SIGNS = {"better": "+", "worse": "−"}
"""Verdict on a difference to `grpo` → its mark."""
UNEVEN = ("igrpo", "vineppo")
"""Methods whose runs on GSM8K do not have the noise of the others, because they make few updates."""


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


def qwen_methods() -> list[str]:
    """Labels of the methods with three seeds on GSM8K, without the control."""
    return [label for label in gsm8k_runs(*QWEN_FILES, least_seeds=3) if not is_control(label)]


def qwen_cells() -> dict[str, str]:
    """Method → sampled accuracy in percent, with the marks of the table of all methods."""
    every, runs = qwen_methods(), gsm8k_runs(*QWEN_FILES)
    tests = {label: by_seed(runs[label], SAMPLED_TEST, "rewards") for label in every}
    found, cells = qwen_spread(every), {}
    for label, gain in zip(every, found.gains, strict=True):
        over = mean_over_problems(np.array([tests[label][seed] - tests["grpo"][seed] for seed in tests[label]]))
        value = f"{100 * mean_over_problems(stacked(tests[label])).value:.1f}"
        cells[shown_label(label)] = (
            value if label == "grpo" else marked(value, verdict(over), bool(abs(gain) > found.half))
        )
    return cells


def marked(value: str, said: str, survives: bool) -> str:
    """A value with `+` or `−` if its own interval decides, and `*` if it survives the number of methods."""
    return f"{value} {SIGNS.get(said, '')}{'*' * survives}".strip()


def qwen_spread_row() -> tuple[str, ...]:
    """GSM8K's row in the table of all tasks: sampled accuracies."""
    every, runs = qwen_methods(), gsm8k_runs(*QWEN_FILES)
    found, names = qwen_spread(every), [shown_label(label) for label in every]
    (rate,) = {record["settings"]["learning_rate"] for label in every for record in runs[label]}
    (seeds,) = {len(by_seed(runs[label], SAMPLED_TEST, "rewards")) for label in every}
    tests = [by_seed(runs[label], SAMPLED_TEST, when) for when in ("before", "rewards") for label in every]
    start, end = np.array([stacked(one).mean() for one in tests]).reshape(2, -1).mean(axis=1)
    levels = (f"{100 * start:.1f}", f"{100 * end:.1f}", f"{found.deviation:.1f}", f"{found.p_equal:.2g}")
    gains = [f"{name} {gain:+.1f}" for name, gain in zip(names, found.gains, strict=True)]
    behind = ", ".join(shown for shown, gain in zip(gains, found.gains, strict=True) if abs(gain) > found.half)
    setting = ("GSM8K", "accuracy", str(len(every)), str(seeds), f"{rate:g}")
    return (*setting, *levels, f"{found.half:.1f}", gains[int(found.gains.argmax())], behind or "none")


def qwen_spread_table() -> str:
    """How far sampled accuracies on GSM8K must differ if the noise of all methods is pooled, and which do."""
    every = qwen_methods()
    even = [label for label in every if label not in UNEVEN]
    apart = qwen_spread(even)
    level = [label for label, gain in zip(even, apart.gains, strict=True) if abs(gain) <= apart.half]
    rows = []
    for shown, labels in (
        ("all", every),
        (f"without {' and '.join(UNEVEN)}", even),
        ("of these within the needed gain", level),
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
