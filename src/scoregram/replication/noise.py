"""Exhibits on noise, from whole batches: the best group size, and the gradient's error under other baselines."""

import math
from dataclasses import dataclass, field

import numpy as np

from scoregram.bootstrap import bootstrap_estimate, if_enough, mean_estimate, ratio_of_means
from scoregram.exhibits import Cell, Estimate, Table
from scoregram.replication.learning import accuracies, over_seeds
from scoregram.replication.readings import Evidence
from scoregram.statistics import (
    group_blocks,
    group_moments,
    leave_one_out_mse,
    mean_baseline_mse,
    noise_components,
    vanilla_mse,
)


@dataclass(frozen=True)
class Noise:
    """Unbiased numbers, so that means are taken before anything is divided; the first two one a batch."""

    between_prompts: list[float] = field(default_factory=list)
    """`c1`, what prompts differ by."""
    group_baseline: list[float] = field(default_factory=list)
    """`c3`, the noise that a group's own baseline brings in."""
    oracle: list[float] = field(default_factory=list)
    """Error of each prompt's gradient with its value known exactly, …"""
    none: list[float] = field(default_factory=list)
    """… without a baseline, …"""
    mean: list[float] = field(default_factory=list)
    """… with the mean of the group, …"""
    others: list[float] = field(default_factory=list)
    """… with the mean of the other rollouts."""


def pooled_noise(evidence: Evidence) -> dict[int, Noise]:
    """By group size of at least 4: the noise of every whole batch."""
    found: dict[int, Noise] = {}
    for trial, batch in evidence.batches():
        size, prompts = trial.size, len(batch.sizes)
        is_whole = bool(batch.rewards.isfinite().all()) and bool(batch.gram.isfinite().all())
        if size < 4 or prompts < 2 or not is_whole:
            continue
        rewards = batch.rewards.view(prompts, size)
        components = noise_components(batch.gram, rewards)
        moments = group_moments(group_blocks(batch.gram, size), rewards)
        noise = found.setdefault(size, Noise())
        noise.between_prompts.append(components.between_prompts)
        noise.group_baseline.append(components.group_baseline)
        noise.oracle.extend((moments.oracle_trace / size).tolist())
        noise.none.extend(vanilla_mse(moments, size).tolist())
        noise.mean.extend(mean_baseline_mse(moments, size).tolist())
        noise.others.extend(leave_one_out_mse(moments, size).tolist())
    return found


def best_size(noise: Noise) -> Estimate:
    """`R* = 1 + √(c3/c1)` of the mean components, batches being resampled; infinite where `c1` is not above zero.

    No interval for fewer than `bootstrap.FEWEST` batches.
    """
    c1, c3 = np.array(noise.between_prompts), np.array(noise.group_baseline)

    def optimum(drawn: np.ndarray) -> np.ndarray:
        between, baseline = c1[drawn].mean(axis=-1), np.maximum(c3[drawn].mean(axis=-1), 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            found = 1 + np.sqrt(np.where(between > 0, baseline / between, math.inf))
        return np.where((between <= 0) & (baseline <= 0), math.nan, found)

    return if_enough(bootstrap_estimate(len(c1), optimum), len(c1)) if len(c1) else Estimate(math.nan)


def group_size_table(evidence: Evidence) -> Table:
    """The best group size estimated from the Gram against the measured one, at equal rollouts."""
    pooled = pooled_noise(evidence)
    rows: list[tuple[Cell, ...]] = []
    for size in evidence.sizes:
        evaluated = accuracies(evidence.of_paper(size=size), evidence.accuracy)
        ends, gains = [values[-1] for values in evaluated], [values[-1] - values[0] for values in evaluated]
        noise = pooled.get(size, Noise())
        counted = len(noise.between_prompts)
        c1, c3 = (if_enough(mean_estimate(each), counted) for each in (noise.between_prompts, noise.group_baseline))
        end, gain = over_seeds(ends, least=0.0, most=1.0), over_seeds(gains, least=-1.0, most=1.0)
        rows.append((size, end, gain, counted, c1, c3, best_size(noise)))
    return Table(
        "group-size",
        "Best group size: from the Gram, and by accuracy",
        f"Accuracy on test problems, {evidence.decoding}. R* = 1 + √(c3/c1), components averaged over the stored "
        "batches (R of at least 4), intervals over batches; c1 is what prompts differ by, c3 the noise of the group's "
        "baseline. An end, or a number, that is missing: c1 was not resolved from zero: R* is open above.",
        ("R", "final accuracy", "gain", "batches", "c1", "c3", "estimated R*"),
        tuple(rows),
    )


def variance_table(evidence: Evidence) -> Table:
    """Error of a prompt's gradient under three baselines, from the stored batches."""
    rows: list[tuple[Cell, ...]] = []
    for size, noise in sorted(pooled_noise(evidence).items()):
        count = len(noise.others)
        errors = (noise.none, noise.mean, noise.oracle)
        ratios = [if_enough(ratio_of_means(error, noise.others), count) for error in errors]
        rows.append((size, len(noise.between_prompts), count, *ratios, (size - 1) / size))
    return Table(
        "variance",
        "Error of a prompt's gradient relative to leave-one-out",
        "Expected squared error from unbiased estimates over whole batches, averaged before dividing; intervals over "
        "prompts. The mean of the whole group shortens the gradient by (R-1)/R, which alone lowers this error. Oracle: "
        "the value known exactly; beside it what a reward that is independent of the scores gives.",
        ("R", "batches", "prompts", "no baseline", "group mean", "oracle", "null: independent reward"),
        tuple(rows),
    )
