"""Exhibits on learning: accuracy, dead groups, other baselines and methods, gradient noise, the best group size."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

import numpy as np
import torch
from scipy.stats import t as student

from scoregram.advantages import estimate as advantages_by
from scoregram.bootstrap import if_enough, nested_estimate, nested_mean, ratio_of_means
from scoregram.exhibits import Cell, Estimate, Figure, Series, Table
from scoregram.reading import stacked_spectra
from scoregram.spectra import effective_rank, top1_fraction
from scoregram.statistics import (
    group_blocks,
    group_moments,
    leave_one_out_mse,
    mean_baseline_mse,
    noise_components,
    vanilla_mse,
)
from scoregram.studies.grpo_rank.presets import PAPER_METHOD
from scoregram.studies.grpo_rank.rank_exhibits import defined_mean, mean_of
from scoregram.studies.grpo_rank.readings import TRAIN, Census, Evidence, Reading, Trial

_SAME = 1e-9
"""Standard deviations below this are rounding: gains are differences of counts."""


def over_seeds(values: Sequence[float], *, least: float = -math.inf, most: float = math.inf) -> Estimate:
    """Mean over seeds with the 95 % interval of Student's t, clipped to the possible range.

    One seed has no interval, and neither have several that agree exactly: accuracies are counts of problems, and
    equal counts do not show that the spread is zero.
    """
    spread = stdev(values) if len(values) > 1 else 0.0
    if spread < _SAME:
        return Estimate(fmean(values)) if values else Estimate(math.nan)
    half = float(student.ppf(0.975, len(values) - 1)) * spread / math.sqrt(len(values))
    return Estimate(fmean(values), max(fmean(values) - half, least), min(fmean(values) + half, most))


def accuracies(trials: Sequence[Trial], name: str) -> list[list[float]]:
    """Values of an accuracy metric in order of step, one list per run; runs without an evaluation are left out."""
    found = ([value for value in trial.metrics(name)[1] if not math.isnan(value)] for trial in trials)
    return [values for values in found if values]


def figure_3(evidence: Evidence) -> Figure:
    """Test accuracy by group size, over steps."""
    series = []
    for size in evidence.sizes:
        lines = [trial.metrics(evidence.accuracy) for trial in evidence.of_paper(size=size)]
        steps = sorted({step for found, _ in lines for step in found})
        at = [[dict(zip(*line, strict=True))[step] for line in lines if step in line[0]] for step in steps]
        low, high = tuple(map(min, at)), tuple(map(max, at))
        series.append(Series(f"R = {size}", tuple(map(float, steps)), tuple(map(fmean, at)), low, high))
    return Figure(
        "figure-3",
        "Figure 3: test accuracy by group size",
        f"Accuracy on test problems, {evidence.decoding}, mean over seeds; bands from lowest to highest. All group "
        "sizes use the same number of rollouts a step, so larger groups see fewer prompts.",
        "step",
        "accuracy",
        tuple(series),
    )


def figure_spread(evidence: Evidence) -> Figure:
    """Mean standard deviation of the rewards of a group, over steps."""
    return _census_figure(
        evidence,
        "figure-spread",
        "Reward deviation over training",
        "Mean of σ_r over all groups of a step, dead ones included.",
        "σ_r",
        lambda counted: counted.deviation,
    )


def figure_dead(evidence: Evidence) -> Figure:
    """Share of dead groups, over steps."""
    return _census_figure(
        evidence,
        "figure-dead",
        "Dead groups over training",
        "Share of groups in which all rewards are alike: they pull at nothing and have no spectrum.",
        "share of groups",
        lambda counted: 1 - counted.alive / counted.groups,
    )


def _census_figure(
    evidence: Evidence, name: str, title: str, caption: str, y_title: str, value: Callable[[Census], float]
) -> Figure:
    series = []
    for size in evidence.sizes:
        trials = evidence.of_paper(size=size)
        counted = [c for c in evidence.census if c.kind == TRAIN and c.trial in trials]
        steps = sorted({c.step for c in counted})
        y = tuple(defined_mean([value(c) for c in counted if c.step == step]) for step in steps)
        series.append(Series(f"R = {size}", tuple(map(float, steps)), y))
    return Figure(name, title, caption, "step", y_title, tuple(series))


BASELINES = ("mean", "rloo", "grpo", "opo", "optimal", "optimal-loo")
"""Estimators whose spectrum follows from the same Gram."""


def by_estimator(evidence: Evidence) -> Table:
    """Effective rank and top-1 fraction of the same rollouts under other baselines, from the stored Grams."""
    size = evidence.largest_paper_size
    live = evidence.live(size=size)
    rows: list[tuple[Cell, ...]] = []
    for name in BASELINES:
        if live:
            spectra = stacked_spectra([r.gram for r in live], [other_advantages(name, r) for r in live])
            nests = [r.nest for r in live]
            values = (effective_rank(spectra).tolist(), top1_fraction(spectra).tolist())
            rows.append((name, *(nested_mean(each, nests) for each in values)))
    return Table(
        "by-estimator",
        f"Other baselines on the same rollouts, R = {size}",
        "Leave-one-out and division by the deviation only scale the rows of a group: their spectrum is that of the "
        "mean. Baselines that weigh rollouts by length or score norm change the shape of |A|.",
        ("baseline", "effective rank", "top-1 fraction"),
        tuple(rows),
    )


def other_advantages(name: str, reading: Reading) -> torch.Tensor:
    """Advantages of one group under another estimator."""
    rewards = reading.advantages[None]  # rewards minus their mean: these baselines are invariant to a shift
    energies = reading.gram.diagonal()[None]
    return advantages_by(name, rewards, score_energies=energies, lengths=reading.lengths[None], outcomes=rewards)[0]


def methods_table(evidence: Evidence) -> Table:
    """Accuracy and effective rank of GRPO and of the other methods that were trained."""
    size = evidence.largest_paper_size
    names = list(dict.fromkeys(t.method for t in evidence.trials if t.size == size))
    rows: list[tuple[Cell, ...]] = []
    for name in sorted(names, key=lambda name: (name != PAPER_METHOD, name)):
        trials = [t for t in evidence.trials if t.method == name and t.size == size]
        evaluated = accuracies(trials, evidence.accuracy)
        ends, areas = [values[-1] for values in evaluated], [fmean(values) for values in evaluated]
        live = evidence.live(size=size, method=name)
        rank, null = mean_of(live, lambda r: r.rank), defined_mean([r.orthogonal for r in live])
        end, area = (over_seeds(each, least=0.0, most=1.0) for each in (ends, areas))
        rows.append((name, len(trials), end, area, rank, null))
    return Table(
        "methods",
        f"Methods trained side by side, R = {size}",
        "Accuracy at the last step and averaged over all evaluations, mean over seeds with Student's interval; "
        "effective rank of the group-mean stack along each method's own training.",
        ("method", "seeds", "final accuracy", "mean accuracy", "effective rank", "null: orthogonal"),
        tuple(rows),
    )


@dataclass(frozen=True)
class NoiseSamples:
    """Unbiased estimates, to be averaged before any division: `c1` and `c3` per batch, the others per prompt."""

    seeds: list[int] = field(default_factory=list)
    """Seed of each batch."""
    between_prompts: list[float] = field(default_factory=list)
    """`c1`: variance between prompts."""
    group_baseline: list[float] = field(default_factory=list)
    """`c3`: noise that the group's own baseline adds."""
    oracle: list[float] = field(default_factory=list)
    """Expected squared error of a prompt's gradient if its value were known exactly, …"""
    none: list[float] = field(default_factory=list)
    """… without a baseline, …"""
    mean: list[float] = field(default_factory=list)
    """… with the mean of the group, …"""
    others: list[float] = field(default_factory=list)
    """… with the mean of the other rollouts."""


def pooled_noise(evidence: Evidence) -> dict[int, NoiseSamples]:
    """Group size, at least 4 → noise of every whole batch without a missing number."""
    found: dict[int, NoiseSamples] = {}
    for trial, batch in evidence.batches():
        size, prompts = trial.size, len(batch.sizes)
        is_whole = bool(batch.rewards.isfinite().all()) and bool(batch.gram.isfinite().all())
        if size < 4 or prompts < 2 or not is_whole:
            continue
        rewards = batch.rewards.view(prompts, size)
        components = noise_components(batch.gram, rewards)
        moments = group_moments(group_blocks(batch.gram, size), rewards)
        noise = found.setdefault(size, NoiseSamples())
        noise.seeds.append(trial.seed)
        noise.between_prompts.append(components.between_prompts)
        noise.group_baseline.append(components.group_baseline)
        noise.oracle.extend((moments.oracle_trace / size).tolist())
        noise.none.extend(vanilla_mse(moments, size).tolist())
        noise.mean.extend(mean_baseline_mse(moments, size).tolist())
        noise.others.extend(leave_one_out_mse(moments, size).tolist())
    return found


def best_size(noise: NoiseSamples) -> Estimate:
    """`R* = 1 + √(c3/c1)` of the mean components, infinite unless `c1 > 0`; intervals over seeds and their batches.

    Fewer batches than `bootstrap.FEWEST` give no interval.
    """
    c1, c3 = np.array(noise.between_prompts), np.array(noise.group_baseline)

    def optimum(weights: np.ndarray) -> np.ndarray:
        total = weights.sum(axis=-1)
        between, baseline = (weights @ c1) / total, np.maximum((weights @ c3) / total, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            found = 1 + np.sqrt(np.where(between > 0, baseline / between, math.inf))
        return np.where((between <= 0) & (baseline <= 0), math.nan, found)

    return if_enough(nested_estimate(noise.seeds, optimum), len(c1)) if len(c1) else Estimate(math.nan)


def group_size_table(evidence: Evidence) -> Table:
    """Best group size as estimated from the Gram, beside the accuracy of each group size at equal rollouts."""
    pooled = pooled_noise(evidence)
    rows: list[tuple[Cell, ...]] = []
    for size in evidence.sizes:
        evaluated = accuracies(evidence.of_paper(size=size), evidence.accuracy)
        ends, gains = [values[-1] for values in evaluated], [values[-1] - values[0] for values in evaluated]
        noise = pooled.get(size, NoiseSamples())
        counted = len(noise.between_prompts)
        nests = list(zip(noise.seeds, range(counted), strict=True))
        parts = (noise.between_prompts, noise.group_baseline)
        c1, c3 = (if_enough(nested_mean(each, nests), counted) for each in parts)
        end, gain = over_seeds(ends, least=0.0, most=1.0), over_seeds(gains, least=-1.0, most=1.0)
        rows.append((size, end, gain, counted, c1, c3, best_size(noise)))
    return Table(
        "group-size",
        "Best group size: from the Gram, and by accuracy",
        f"Accuracy on test problems, {evidence.decoding}. R* = 1 + √(c3/c1), components averaged over the stored "
        "batches (R of at least 4), intervals over seeds and their batches; c1 is what prompts differ by, c3 the noise "
        "of the group's baseline. An end, or a number, that is missing: c1 was not resolved from zero: R* is open "
        "above.",
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
