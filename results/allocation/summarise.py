"""How much a division of rollouts by past rollouts lowers the error of a gradient, from the Grams in ../fixed-policies.

python summarise.py            print the tables
python summarise.py --write    put them between their marks in README.md

Each prompt has 16 rollouts. The first `m` play the past visit: a rule predicts from them the noise of every prompt, and
divides 8 rollouts per prompt among the prompts so that the predicted error is least. The last 8 rollouts judge it:
they give unbiased estimates of the noises `s` and `k` of each prompt, and hence of the error of the division,
`Σ_p s_p/R_p + k_p/(R_p(R_p-1))`, which they had no part in. The ratio is that error over the error of 8 rollouts for
each prompt.
Intervals are 95 % percentile intervals over 1000 bootstrap resamples of prompts.

Training runs, from runs.json. *Area* is the mean reward of sampled test rollouts over the budget, on straight lines
between evaluations: it rewards early learning. *Gain* is area minus the reward at the start. *Best fixed* is the fixed
group size with the largest mean area, chosen in hindsight from the same runs, which favours it. *Share* is the gain
over the mean gain of the best fixed size; its interval is that of the differences by seed, and takes the mean gain of
the best fixed size as known. Only seeds that every row of a task has are used. Intervals are 95 %, t distribution;
their units are the seeds of a task, or pairs of task and seed.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from scoregram.bootstrap import t_mean
from scoregram.exhibits import Estimate
from scoregram.statistics import GroupMoments, allocated_rollouts, group_moments

HERE = Path(__file__).parent
GRAMS = HERE.parent / "fixed-policies"
MODELS = ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "smollm2-135m-taught")
SIZE = 8
"""Rollouts per prompt on average, and rollouts that judge."""
RESAMPLES = 1000
PRIORS = (2.0, 8.0, 32.0)
"""Rollouts that the mean over all prompts counts for; 8 is that of `scoregram train`."""


@cache
def stored(model: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Grams `(P, 16, 16)` and rewards `(P, 16)`."""
    with np.load(GRAMS / model / "t1-p1.npz") as file:
        gram, rewards = torch.tensor(file["k"]).double(), torch.tensor(file["rewards"]).double()
    return (gram + gram.mT) / 2, rewards


@cache
def moments(model: str, start: int, stop: int) -> GroupMoments:
    """Moments of every prompt from some of its rollouts."""
    gram, rewards = stored(model)
    return group_moments(gram[:, start:stop, start:stop], rewards[:, start:stop])


def noises(model: str, start: int, stop: int) -> torch.Tensor:
    """`(2, P)` unbiased `s = tr Σ_oracle` and `k = σ² tr F + |g|²`."""
    of = moments(model, start, stop)
    return torch.stack([of.oracle_trace, of.variance_fisher_trace + of.gradient_squared])


def shrunk(values: torch.Tensor, past: int, prior: float) -> torch.Tensor:
    """`(n₀ v̄ + m v̂) / (n₀ + m)`, as `scoregram train` predicts; not negative."""
    mean = values.mean(-1, keepdim=True)
    return ((prior * mean + past * values) / (prior + past)).clamp(min=0)


def predictions(model: str, past: int) -> dict[str, torch.Tensor]:
    """Rule → predicted noises `(2, P)`."""
    rewards = stored(model)[1][:, :past]
    p, variance, norms = rewards.mean(1), rewards.var(1), moments(model, 0, past).fisher_trace
    smooth = (rewards.sum(1) + 1) / (past + 2)
    rules = {
        "p(1 − p), as observed": p * (1 - p),
        "p(1 − p), one success and one failure added": smooth * (1 - smooth),
        "mean squared norm": norms,
        "the same p(1 − p) · mean squared norm": smooth * (1 - smooth) * norms,
    }
    both = {name: values.expand(2, -1) for name, values in rules.items()}
    for prior in PRIORS:
        both[f"success: reward variance, prior {prior:g}"] = shrunk(variance, past, prior).expand(2, -1)
    for prior in PRIORS:
        both[f"measured: noise, prior {prior:g}"] = shrunk(noises(model, 0, past), past, prior)
    return both


def judged(model: str, predicted: torch.Tensor, least: int) -> tuple[float, float, float]:
    """Error of a division over that of equal groups, and its interval."""
    single, pair = noises(model, 16 - SIZE, 16).numpy()
    # Many prompts have the same past rewards. Rounded, they tie on every machine; else the last bit decides who gains.
    even_ties = torch.tensor(np.array([[float(f"{value:.12g}") for value in row] for row in predicted.tolist()]))
    sizes = allocated_rollouts(even_ties[0], even_ties[1], SIZE * len(single), least=least, most=64).numpy()
    own, even = (single / r + pair / (r * (r - 1)) for r in (sizes, np.full(len(sizes), SIZE)))
    draw = np.random.default_rng(0).integers(len(own), size=(RESAMPLES, len(own)))
    low, high = np.percentile(own[draw].sum(1) / even[draw].sum(1), [2.5, 97.5])
    return float(own.sum() / even.sum()), float(low), float(high)


def rules_table(past: int, least: int) -> str:
    """The ratio of every rule for every policy."""
    names = list(predictions(MODELS[0], past))
    rows = [
        [name, *("{:.3f} [{:.3f}, {:.3f}]".format(*judged(m, predictions(m, past)[name], least)) for m in MODELS)]
        for name in names
    ]
    return table(["rule", *MODELS], rows)


def ceiling_table() -> str:
    """What equal groups lose against perfect knowledge, if the noise of a prompt were proportional to `p(1 − p)`.

    Success rates are taken as Beta-distributed, with the mean and the variance that all 16 rollouts give. Neyman's
    error over that of equal groups is `(E√v)² / E v`.
    """
    rows = []
    for model in MODELS:
        rewards = stored(model)[1]
        count = rewards.shape[1]
        p = rewards.mean(1)
        mean = float(p.mean())
        between = float(p.var()) - float(rewards.var(1).mean()) / count  # without the sampling noise of p
        total = mean * (1 - mean) / between - 1
        draws = np.random.default_rng(0).beta(mean * total, (1 - mean) * total, size=1_000_000)
        noise = draws * (1 - draws)
        rows.append([model, f"{mean:.3f}", f"{between**0.5:.3f}", f"{np.sqrt(noise).mean() ** 2 / noise.mean():.2f}"])
    return table(["policy", "mean of p", "deviation of p", "least error over that of equal groups"], rows)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


# Training runs

RUNS = HERE / "runs.json"
"""Seeds 0 to 7, all rows."""
FRESH = HERE / "fresh-seeds.json"
"""Seeds 8 to 15, fixed sizes and `auto` with another start."""
LARGE = HERE / "gsm8k.json"
"""Qwen2.5-Coder-0.5B on GSM8K, seeds 0 to 2, evaluated before the first and after the last step."""
FIXED = ("R = 2", "R = 4", "R = 8", "R = 16")
STARTING = "R = 8"
"""Group size of `success`, `measured` and dynamic sampling, and the one that `auto` starts with in `RUNS`."""

SeedValues = Mapping[str, Mapping[str, float]]
"""Row → seed → value."""


@cache
def stored_runs() -> dict[str, Any]:
    """Task → setting and runs; `fresh(task)` and `pooled(task)` are keys as well."""
    first, second = (json.loads(file.read_text(encoding="utf-8")) for file in (RUNS, FRESH))
    both = {
        task: {
            "setting": record["setting"],
            "runs": {name: first[task]["runs"][name] | record["runs"][name] for name in FIXED},
        }
        for task, record in second.items()
    }
    later = {fresh(task): record for task, record in second.items()}
    large = json.loads(LARGE.read_text(encoding="utf-8"))
    return first | later | {pooled(task): record for task, record in both.items()} | large


def fresh(task: str) -> str:
    """Key of a task's runs with fresh seeds."""
    return f"{task}, fresh"


def pooled(task: str) -> str:
    """Key of a task's runs of fixed sizes with all seeds."""
    return f"{task}, all"


def reward_at(run: Mapping[str, Any], rollouts: np.ndarray) -> np.ndarray:
    """Mean reward of sampled test rollouts at some numbers of rollouts, on straight lines between evaluations."""
    steps, rewards, _ = np.array(run["evaluations"], dtype=float).T
    return np.interp(rollouts, steps, rewards)


def area(run: Mapping[str, Any], budget: int) -> float:
    """Mean reward over the budget."""
    steps = np.array([point[0] for point in run["evaluations"]], dtype=float)
    places = np.unique([*steps[steps < budget], budget])
    return float(np.trapezoid(reward_at(run, places), places) / budget)


def start(run: Mapping[str, Any], budget: int) -> float:
    """Reward before the first step."""
    return float(run["evaluations"][0][1])


def seed_values(task: str, measure: Callable[[Mapping[str, Any], int], float]) -> SeedValues:
    """A measure of every run, for the seeds that all rows have."""
    record = stored_runs()[task]
    budget, runs = record["setting"]["rollouts"], record["runs"]
    shared = set.intersection(*(set(seeds) for seeds in runs.values()))
    return {name: {s: measure(seeds[s], budget) for s in sorted(shared)} for name, seeds in runs.items()}


def best_fixed(task: str) -> str:
    """The fixed group size with the largest mean area."""
    areas = seed_values(task, area)
    return max((name for name in FIXED if name in areas), key=lambda name: mean(areas[name].values()))


def gains(task: str) -> SeedValues:
    """Area minus the reward at the start."""
    areas, starts = seed_values(task, area), seed_values(task, start)
    return {name: {seed: areas[name][seed] - starts[name][seed] for seed in areas[name]} for name in areas}


def best_share(task: str, name: str) -> Estimate:
    """Mean gain over that of the best fixed group size; the interval is 1 + that of the differences by seed."""
    found = gains(task)
    best = found[best_fixed(task)]
    usual = mean(best.values())
    against = t_mean([(value - best[seed]) / usual for seed, value in found[name].items()])
    return Estimate(1 + against.value, 1 + against.low, 1 + against.high)


def relative_gains(tasks: Sequence[str]) -> dict[str, list[float]]:
    """Row → for every task and seed, the gain over the mean gain of the fixed group sizes with that seed."""
    rows: dict[str, list[float]] = {}
    for task in tasks:
        found = gains(task)
        for seed in found[FIXED[0]]:
            usual = mean(found[name][seed] for name in FIXED)
            for name in found:
                rows.setdefault(name, []).append(found[name][seed] / usual)
    return rows


def area_table(tasks: Sequence[str]) -> str:
    """One row per rule: for each task the mean area in %, then the share of the best fixed size's gain."""
    areas = {task: seed_values(task, area) for task in tasks}
    best = {task: best_fixed(task) for task in tasks}
    rows = [[name, *(area_cell(task, name, areas[task][name]) for task in tasks)] for name in areas[tasks[0]]]
    heads = [f"{task}, best {best[task]}, {len(areas[task][best[task]])} seeds" for task in tasks]
    return table(["rule", *heads], rows)


def area_cell(task: str, name: str, areas: Mapping[str, float]) -> str:
    """Mean area and share; the best fixed size has no interval, since it is compared with itself."""
    written = f"{100 * mean(areas.values()):.1f}"
    return f"{written}; 1" if name == best_fixed(task) else f"{written}; {shown(best_share(task, name))}"


def pooled_table(tasks: Sequence[str]) -> str:
    """One row per rule: mean relative gain over tasks and seeds, and its difference from groups of 8."""
    found = relative_gains(tasks)
    rows = []
    for name, values in found.items():
        against = [value - other for value, other in zip(values, found[STARTING], strict=True)]
        rows.append([name, shown(t_mean(values)), "" if name == STARTING else shown(t_mean(against))])
    pairs = len(found[STARTING])
    return table([f"rule, {pairs} pairs of task and seed", "gain, fixed sizes = 1", f"minus {STARTING}"], rows)


def final_table(task: str) -> str:
    """One row per rule: updates, sampled and greedy accuracy after the last step, and the gain of sampled accuracy.

    The last columns compare the gain with that of the best fixed size, by seed.
    """
    runs, found = stored_runs()[task]["runs"], seed_values(task, final_gain)
    best = found[best_fixed(task)]
    usual = mean(best.values())
    rows = []
    for name, gains_here in found.items():
        records = [runs[name][seed] for seed in gains_here]
        sampled, greedy = (100 * mean(record["evaluations"][-1][place] for record in records) for place in (1, 2))
        minus_best = [100 * (gain - best[seed]) for seed, gain in gains_here.items()]
        difference = t_mean(minus_best)
        share = Estimate(*(1 + v / (100 * usual) for v in (difference.value, difference.low, difference.high)))
        compared = ["", "1"] if name == best_fixed(task) else [shown(difference, 1), shown(share)]
        gain = t_mean([100 * value for value in gains_here.values()])
        updates = f"{mean(record['steps'] for record in records):.0f}"
        rows.append([name, updates, f"{sampled:.1f}", f"{greedy:.1f}", shown(gain, 1), *compared])
    heads = ["rule, 3 seeds", "updates", "sampled, %", "greedy, %", "gain, points"]
    return table([*heads, f"minus {best_fixed(task)}, points", "share of its gain"], rows)


def final_gain(run: Mapping[str, Any], budget: int) -> float:
    """Sampled accuracy after the last step minus that before the first."""
    return float(run["evaluations"][-1][1]) - start(run, budget)


def shown(estimate: Estimate, digits: int = 2) -> str:
    """A number and its interval."""
    return f"{estimate.value:.{digits}f} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"


TASKS = ("arithmetic", "compositions", "spell_backward", "rotate_matrix")
TABLES = {
    "past8": lambda: rules_table(8, 4),
    "past4": lambda: rules_table(4, 4),
    "ceiling": ceiling_table,
    "areas": lambda: area_table(TASKS),
    "pooled": lambda: pooled_table(TASKS),
    "fresh": lambda: area_table([fresh(task) for task in TASKS]),
    "fixed": lambda: area_table([pooled(task) for task in TASKS]),
    "gsm8k": lambda: final_table("gsm8k"),
    "fixed-pooled": lambda: pooled_table([pooled(task) for task in TASKS]),
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
