"""The comparisons that docs/methods.md states in words and no other table holds."""

from collections.abc import Collection, Sequence
from itertools import product

import numpy as np
from gsm8k import QWEN_FILES, UNEVEN, by_seed, gsm8k_runs, shown_label
from packed import comparison, composition_gaps, hundred, level_of, markdown, packed_run, records, seed_means
from run import FIRST, FRESH, FRESH_SEEDS, REPEATED

from scoregram.bootstrap import t_mean
from scoregram.compare.intervals import mean_over_problems, verdict
from scoregram.compare.results import MethodResult
from scoregram.compare.table import shown_estimate
from scoregram.exhibits import Estimate, cell_text
from scoregram.reading import SAMPLED_TEST
from scoregram.training import METHODS

UNDIVIDED = tuple(name for name in FRESH["stopping"] if name != FIRST)
"""Methods with a group baseline that do not divide by the deviation of the group, without the copies of `rloo`."""
UNDIVIDED_FURTHER = ("reinforce", "reinforce-baseline", "reinforce-critic", "remax")
"""Methods with another baseline, or none, that do not divide either."""
FIRST_LOSSES = (
    *(("arithmetic", "vineppo"), ("compositions", "vineppo"), ("spell_backward", "vineppo")),
    *(("spell_backward", "igrpo"), ("rotate_matrix", "agro"), ("spell_backward", "agro")),
)
"""Task and method of the losses by both criteria with seeds 0 to 2."""
FIRST_FILE, FRESH_FILE = "runs.jsonl.xz", "fresh.jsonl.xz"
LAMBDA_FILE = "lambda.jsonl.xz"
"""`ppo-whitened:gae_lambda=1` with the seeds of the table."""


def contrasts_table() -> str:
    """Every comparison with its interval; accuracies in points."""
    sampled, alone = "GSM8K, sampled", "one advantage per rollout"
    rows = [
        (sampled, f"{mine} minus ppo", qwen_difference(mine, "ppo")) for mine in ("ppo-whitened", "ppo-monte-carlo")
    ]
    rows.append(("GSM8K, greedy", "grpo, last minus first", greedy_gain()))
    for name, (which, file) in product(
        ("remax", "agro", "delta"), (("first", QWEN_FILES[0]), ("later", QWEN_FILES[1]))
    ):
        rows.append((sampled, f"{name} minus the {which} runs of grpo, seeds 0 and 1", batch_difference(name, file)))
    for task in ("arithmetic", "compositions", "calculator", "stopping", "rotate_matrix", "spell_backward"):
        rows.append((task, "ppo-whitened minus ppo", difference(task, "ppo-whitened", "ppo")))
    for names in (UNDIVIDED, UNDIVIDED + UNDIVIDED_FURTHER):
        rows.append(("stopping", f"mean of {', '.join(names)}, minus grpo", mean_difference(names)))
    for task in ("arithmetic", "compositions", "calculator", "rotate_matrix", "spell_backward"):
        rows.append((task, "mean of the same nine, minus grpo", mean_difference(UNDIVIDED, task=task)))
    for (task, name), seeds in product(FIRST_LOSSES, (range(3), range(3, 6))):
        what = f"{name} minus grpo, seeds {seeds[0]} to {seeds[-1]}"
        rows.append((task, what, difference(task, name, "grpo", seeds)))
    for task in ("arithmetic", "compositions", "rotate_matrix"):
        rows.append((task, f"finer credit minus {alone}, without {' and '.join(UNEVEN)}", level_difference(task)))
    what = f"held-out minus known combinations, finer credit minus {alone}"
    rows.append(("compositions", what, composition_difference()))
    return markdown(
        ("task", "comparison", "difference"), [(task, what, cell_text(found)) for task, what, found in rows]
    )


def planned_table() -> str:
    """The comparisons of `FRESH` with the first seeds and with fresh ones, and those of each method on `stopping`."""
    files = ((FIRST_FILE, range(6)), (FRESH_FILE, FRESH_SEEDS))
    methods, seeds = FRESH["compositions"], [f"seeds {own[0]} to {own[-1]}" for _, own in files]
    gap = f"held-out minus known, finer credit minus one per rollout, {len(methods)} methods"
    rows = [
        ("stopping", "mean of the nine minus grpo", "yes", *(mean_difference(UNDIVIDED, file) for file, _ in files)),
        ("compositions", gap, "yes", *(composition_difference(methods, file) for file, _ in files)),
    ]
    pairs = [("spell_backward", "ppo-whitened", "ppo", "yes"), ("spell_backward", "ppo-whitened", FIRST, "no")]
    for task, mine, theirs, planned in (*pairs, *(("stopping", name, FIRST, "no") for name in UNDIVIDED)):
        both = (difference(task, mine, theirs, own, file) for file, own in files)
        rows.append((task, f"{mine} minus {theirs}", planned, *both))
    cells = [[cell_text(cell) for cell in row] for row in rows]
    return markdown(("task", "comparison", "planned", *seeds), cells)


def repeated_table() -> str:
    """The losses to `grpo` by both criteria with the first seeds, and the same differences with fresh ones."""
    rows = []
    for task, names in REPEATED.items():
        for name in names:
            first = difference(task, name, FIRST)
            again = difference(task, name, FIRST, FRESH_SEEDS, FRESH_FILE)
            rows.append((task, name, cell_text(first), cell_text(again), verdict(again)))
    seeds = f"seeds {FRESH_SEEDS[0]} to {FRESH_SEEDS[-1]}"
    return markdown(("task", f"minus {FIRST}", "seeds 0 to 5", seeds, f"verdict, {seeds}"), rows)


def lambda_table() -> str:
    """`ppo-whitened` with λ = 1: its outcome, and its difference to the same method with λ = 0.95 and to `grpo`."""
    rows = []
    for task in ("spell_backward", "arithmetic"):
        found = comparison(task)
        runs = [packed_run(record) for record in records(LAMBDA_FILE) if record["table"] == task]
        mine = MethodResult("ppo-whitened, λ = 1", runs)
        others = {method.label: method for method in found.methods}
        cells = [mine.final(outcome=found.outcome)]
        cells += [mine.gain_over(others[name], found.outcome) for name in ("ppo-whitened", FIRST)]
        rows.append((task, str(len(runs)), *(cell_text(shown_estimate(cell, found.outcome)) for cell in cells)))
    return markdown(("task", "seeds", "at the end", "minus ppo-whitened", f"minus {FIRST}"), rows)


def difference(
    task: str, mine: str, theirs: str, seeds: Collection[int] = range(6), file: str = FIRST_FILE
) -> Estimate:
    """Difference of two methods, paired by seed and problem."""
    found = comparison(task, file)
    both = [
        MethodResult(method.label, [run for run in method.runs if run.seed in seeds])
        for name in (mine, theirs)
        for method in found.methods
        if method.label.split(":")[0] == name
    ]
    return shown_estimate(both[0].gain_over(both[1], found.outcome), found.outcome)


def mean_difference(names: Sequence[str], file: str = FIRST_FILE, task: str = "stopping") -> Estimate:
    """Mean of some methods minus `grpo`, over seeds."""
    found = comparison(task, file)
    means = {method.label: seed_means(method, found.outcome) for method in found.methods}
    gains = [float(np.mean([means[n][s] - means[FIRST][s] for n in names])) for s in means[FIRST]]
    return shown_estimate(t_mean(gains), found.outcome)


def level_difference(task: str) -> Estimate:
    """Credit per token or step minus one advantage per rollout, means over methods, over seeds."""
    found = comparison(task)
    levels: dict[str, list[dict[int, float]]] = {}
    for method in found.methods:
        if method.label.split(":")[0] not in UNEVEN:
            levels.setdefault(level_of(method.label), []).append(seed_means(method, found.outcome))
    token, group = (np.array([[*own.values()] for own in levels[level]]).mean(0) for level in ("token", "group"))
    return shown_estimate(t_mean((token - group).tolist()), found.outcome)


def composition_difference(names: Collection[str] = tuple(METHODS), file: str = FIRST_FILE) -> Estimate:
    """The gap between held-out and known combinations: methods with finer credit minus the others, over seeds."""
    found = comparison("compositions", file)
    own = [method for method in found.methods if method.label in names]
    token, group = (
        np.mean([composition_gaps(method, found.outcome) for method in own if level_of(method.label) == level], axis=0)
        for level in ("token", "group")
    )
    return t_mean((token - group).tolist())


def qwen_outcomes(name: str, *files: str) -> dict[int, np.ndarray]:
    """Seed → sampled accuracy of every test problem; the control is no run of `grpo`."""
    own = [run for label, runs in gsm8k_runs(*files).items() if shown_label(label) == name for run in runs]
    return by_seed(own, SAMPLED_TEST, "rewards")


def qwen_difference(mine: str, theirs: str) -> Estimate:
    """Difference of sampled accuracies on GSM8K, in points, paired by seed and problem."""
    first, second = (qwen_outcomes(name, *QWEN_FILES) for name in (mine, theirs))
    return hundred(mean_over_problems(np.array([first[seed] - second[seed] for seed in first if seed in second])))


def batch_difference(name: str, file: str) -> Estimate:
    """A method minus the runs of `grpo` in one file, with seeds 0 and 1, in points; without an interval."""
    mine, theirs = qwen_outcomes(name, *QWEN_FILES), qwen_outcomes("grpo", file)
    return Estimate(100 * float(np.mean([mine[seed].mean() - theirs[seed].mean() for seed in (0, 1)])))


def greedy_gain() -> Estimate:
    """Gain of the greedy accuracy of `grpo` on GSM8K, in points, over seeds: greedy starts are stored as a mean."""
    gains: dict[int, list[float]] = {}
    for run in gsm8k_runs(*QWEN_FILES)["grpo"]:
        first, last = (run["lines"][place]["eval/accuracy"] for place in (0, -1))
        gains.setdefault(run["seed"], []).append(100 * (last - first))
    return t_mean([float(np.mean(own)) for own in gains.values()])
