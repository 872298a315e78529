"""Exhibits on learning: accuracy, reward spread and dead groups, methods side by side, the best group size."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev

import torch
from scipy.stats import t as student

from scoregram.advantages import estimate as advantages_by
from scoregram.bootstrap import clustered_mean, mean_estimate
from scoregram.exhibits import Cell, Estimate, Figure, Series, Table
from scoregram.replication.presets import METHOD
from scoregram.replication.readings import TRAIN, Census, Evidence, Reading, Trial, stacked_spectra
from scoregram.replication.spectra import mean_of, plain_mean
from scoregram.spectra import effective_rank, top1_fraction
from scoregram.statistics import (
    NoiseComponents,
    group_blocks,
    group_moments,
    leave_one_out_mse,
    mean_baseline_mse,
    noise_components,
    optimal_group_size,
    vanilla_mse,
)

ACCURACY = "eval/accuracy"


def over_seeds(values: Sequence[float]) -> Estimate:
    """Mean over seeds with the 95 % interval of Student's t; no interval for one seed."""
    if len(values) < 2:
        return Estimate(fmean(values)) if values else Estimate(math.nan)
    half = float(student.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return Estimate(fmean(values), fmean(values) - half, fmean(values) + half)


def accuracies(trials: Sequence[Trial]) -> list[list[float]]:
    """Accuracies of each run in order of step; runs that were never evaluated are left out."""
    found = ([value for value in trial.metrics(ACCURACY)[1] if not math.isnan(value)] for trial in trials)
    return [values for values in found if values]


def figure_3(evidence: Evidence) -> Figure:
    """Test accuracy by group size, over steps."""
    series = []
    for size in evidence.sizes:
        lines = [trial.metrics(ACCURACY) for trial in evidence.of_paper(size=size)]
        steps = sorted({step for found, _ in lines for step in found})
        at = [[dict(zip(*line, strict=True))[step] for line in lines if step in line[0]] for step in steps]
        low, high = tuple(map(min, at)), tuple(map(max, at))
        series.append(Series(f"R = {size}", tuple(map(float, steps)), tuple(map(fmean, at)), low, high))
    return Figure(
        "figure-3",
        "Figure 3: test accuracy by group size",
        "Greedy accuracy on test problems, mean over seeds; bands from lowest to highest. All group sizes use the same "
        "number of rollouts a step, so larger groups see fewer prompts.",
        "step",
        "accuracy",
        tuple(series),
    )


def figure_spread(evidence: Evidence) -> Figure:
    """Mean reward deviation of all groups, over steps."""
    return _census_figure(
        evidence,
        "figure-spread",
        "Reward deviation over training",
        "Mean of σ_r over all groups of a step, dead ones included.",
        "σ_r",
        lambda counted: counted.deviation,
    )


def figure_dead(evidence: Evidence) -> Figure:
    """Share of groups whose rewards are all alike, over steps."""
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
        y = tuple(plain_mean([value(c) for c in counted if c.step == step]) for step in steps)
        series.append(Series(f"R = {size}", tuple(map(float, steps)), y))
    return Figure(name, title, caption, "step", y_title, tuple(series))


ESTIMATORS = ("mean", "rloo", "grpo", "opo", "optimal", "optimal-loo")
"""Group baselines whose spectrum follows from the same Gram."""


def by_estimator(evidence: Evidence) -> Table:
    """What other baselines would make of the same rollouts: spectrum from the stored Grams."""
    size = max((s for s in evidence.sizes if s <= 8), default=0)
    live = evidence.live(size=size)
    rows: list[tuple[Cell, ...]] = []
    for name in ESTIMATORS:
        if live:
            spectra = stacked_spectra([r.gram for r in live], [other_advantages(name, r) for r in live])
            clusters = [r.cluster for r in live]
            values = (effective_rank(spectra).tolist(), top1_fraction(spectra).tolist())
            rows.append((name, *(clustered_mean(each, clusters) for each in values)))
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
    rewards = reading.advantages[None]  # shifted by the mean, which no baseline here notices
    energies = reading.gram.diagonal()[None]
    return advantages_by(name, rewards, score_energies=energies, lengths=reading.lengths[None], outcomes=rewards)[0]


def methods_table(evidence: Evidence) -> Table:
    """Accuracy and effective rank of other methods trained beside GRPO."""
    size = max((s for s in evidence.sizes if s <= 8), default=0)
    names = list(dict.fromkeys(t.method for t in evidence.trials if t.size == size))
    rows: list[tuple[Cell, ...]] = []
    for name in sorted(names, key=lambda name: (name != METHOD, name)):
        trials = [t for t in evidence.trials if t.method == name and t.size == size]
        evaluated = accuracies(trials)
        ends, areas = [values[-1] for values in evaluated], [fmean(values) for values in evaluated]
        live = evidence.live(size=size, method=name)
        rank, null = mean_of(live, lambda r: r.rank), plain_mean([r.orthogonal for r in live])
        rows.append((name, len(trials), over_seeds(ends), over_seeds(areas), rank, null))
    return Table(
        "methods",
        f"Methods trained side by side, R = {size}",
        "Accuracy at the last step and averaged over all evaluations, mean over seeds with Student's interval; "
        "effective rank of the group-mean stack along each method's own training.",
        ("method", "seeds", "final accuracy", "mean accuracy", "effective rank", "null: orthogonal"),
        tuple(rows),
    )


def pooled_noise(evidence: Evidence) -> dict[int, tuple[list[NoiseComponents], list[float], list[float], list[float]]]:
    """By group size of at least 4: noise components of every whole training batch, and errors of three baselines."""
    found: dict[int, tuple[list[NoiseComponents], list[float], list[float], list[float]]] = {}
    for trial, batch in evidence.batches(kinds=(TRAIN,)):
        size, prompts = trial.size, len(batch.sizes)
        whole = bool(batch.rewards.isfinite().all()) and bool(batch.gram.isfinite().all())
        if size < 4 or prompts < 2 or not whole:
            continue
        rewards = batch.rewards.view(prompts, size)
        components = noise_components(batch.gram, rewards)
        moments = group_moments(group_blocks(batch.gram, size), rewards)
        noise, none, mean, others = found.setdefault(size, ([], [], [], []))
        noise.append(components)
        none.append(float(vanilla_mse(moments, size).mean()))
        mean.append(float(mean_baseline_mse(moments, size).mean()))
        others.append(float(leave_one_out_mse(moments, size).mean()))
    return found


def group_size_table(evidence: Evidence) -> Table:
    """The best group size estimated from the Gram against the measured one, at equal rollouts."""
    noise = pooled_noise(evidence)
    rows: list[tuple[Cell, ...]] = []
    for size in evidence.sizes:
        evaluated = accuracies(evidence.of_paper(size=size))
        ends, gains = [values[-1] for values in evaluated], [values[-1] - values[0] for values in evaluated]
        components = noise.get(size, ([], [], [], []))[0]
        best = optimal_group_size(mean_components(components)).exact if components else math.nan
        c1 = mean_estimate([one.between_prompts for one in components])
        c3 = mean_estimate([one.group_baseline for one in components])
        rows.append((size, over_seeds(ends), over_seeds(gains), len(components), c1, c3, best))
    return Table(
        "group-size",
        "Best group size: from the Gram, and by accuracy",
        "R* = 1 + √(c3/c1), components averaged over the stored batches (R of at least 4); c1 is what prompts "
        "differ by, c3 the noise of the group's baseline. No number: c1 was not resolved from zero, and the "
        "estimate is open above.",
        ("R", "final accuracy", "gain", "batches", "c1", "c3", "estimated R*"),
        tuple(rows),
    )


def mean_components(components: Sequence[NoiseComponents]) -> NoiseComponents:
    """Average of every component."""
    names = ("gradient_squared", "between_prompts", "within_prompt", "group_baseline")
    return NoiseComponents(**{name: fmean(getattr(one, name) for one in components) for name in names})


def variance_table(evidence: Evidence) -> Table:
    """Error of a prompt's gradient under three baselines, from the stored batches."""
    rows: list[tuple[Cell, ...]] = []
    for size, (components, none, mean, others) in sorted(pooled_noise(evidence).items()):
        oracle = [one.within_prompt / size for one in components]
        base = fmean(others)
        shown = [fmean(values) / base if base > 0 else math.nan for values in (none, mean, oracle)]
        rows.append((size, len(components), *shown))
    return Table(
        "variance",
        "Error of a prompt's gradient relative to leave-one-out",
        "Expected squared error from unbiased estimates over whole batches, averaged before dividing. The mean of the "
        "whole group shortens the gradient by (R-1)/R, which alone lowers this error; oracle: the value known exactly.",
        ("R", "batches", "no baseline", "group mean", "oracle"),
        tuple(rows),
    )
