"""Exhibits on learning: accuracy, reward spread and dead groups, methods side by side, the best group size."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev

import torch
from scipy.stats import t as student

from scoregram.advantages import estimate as advantages_by
from scoregram.bootstrap import clustered_mean
from scoregram.exhibits import Cell, Estimate, Figure, Series, Table
from scoregram.replication.presets import METHOD
from scoregram.replication.readings import TRAIN, Census, Evidence, Reading, Trial, stacked_spectra
from scoregram.replication.spectra import mean_of, plain_mean
from scoregram.spectra import effective_rank, top1_fraction

SAME = 1e-9
"""Spread below which values differ by their rounding alone: gains are differences of counts."""


def over_seeds(values: Sequence[float], *, least: float = -math.inf, most: float = math.inf) -> Estimate:
    """Mean over seeds with the 95 % interval of Student's t, cut at the least and the largest value there can be.

    No interval for one seed, nor for several that agree exactly: accuracies are counts of problems, and a spread below
    one of them is not known to be zero.
    """
    spread = stdev(values) if len(values) > 1 else 0.0
    if spread < SAME:
        return Estimate(fmean(values)) if values else Estimate(math.nan)
    half = float(student.ppf(0.975, len(values) - 1)) * spread / math.sqrt(len(values))
    return Estimate(fmean(values), max(fmean(values) - half, least), min(fmean(values) + half, most))


def accuracies(trials: Sequence[Trial], name: str) -> list[list[float]]:
    """Accuracies of each run, by their name, in order of step; runs that were never evaluated are left out."""
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
        evaluated = accuracies(trials, evidence.accuracy)
        ends, areas = [values[-1] for values in evaluated], [fmean(values) for values in evaluated]
        live = evidence.live(size=size, method=name)
        rank, null = mean_of(live, lambda r: r.rank), plain_mean([r.orthogonal for r in live])
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
