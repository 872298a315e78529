"""Exhibits on causes: why the effective rank is below the group size, factor by factor, and what predicts learning."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

from scoregram.bootstrap import bootstrap_estimate, if_enough, t_mean
from scoregram.exhibits import Cell, Estimate, Figure, Series, Table
from scoregram.reading import stacked_spectra
from scoregram.spectra import effective_rank
from scoregram.studies.grpo_rank import ABOUT_TWO
from scoregram.studies.grpo_rank.rank_exhibits import defined_mean, mean_of
from scoregram.studies.grpo_rank.readings import GREEDY_ACCURACY, Evidence, Reading

NULL_LADDER: tuple[tuple[str, Callable[[Reading], float]], ...] = (
    ("advantages", lambda r: r.shape),
    ("norms", lambda r: r.orthogonal),
    ("mean cosine", lambda r: r.alike),
    ("right against wrong", lambda r: r.two_kinds),
    ("which are alike", lambda r: r.rank),
)
"""Null models in order, each with one more property of the group than the one before; the last is the measurement."""

_ROUNDING = 1e-12
"""Differences of logarithms below this are rounding."""
SAME_TEXT = 0.9995
"""Two rollouts of a group whose scores have a larger cosine count as one text, as in `results/over-training`."""
ALL_SIZES = "all"
"""Name of the row of `trend` that pools all group sizes."""


def accounting(evidence: Evidence) -> Table:
    """Factors that, multiplied with the group size, give the effective rank; geometric means over groups."""
    rows: list[tuple[Cell, ...]] = []
    for size in evidence.sizes:
        live = evidence.live(size=size)
        if not live:
            continue
        steps = [[math.log(size), *(math.log(value(r)) for _, value in NULL_LADDER)] for r in live]
        factors = [math.exp(fmean(b - a for a, b in pairs)) for pairs in zip(*map(pairwise, steps), strict=True)]
        measured = np.array([step[-1] for step in steps])
        explained = [share_explained(measured, np.array([step[place] for step in steps])) for place in (1, 2, 4)]
        rows.append((size, *factors, mean_of(live, lambda r: r.rank), *explained))
    return Table(
        "accounting",
        "From the group size to the effective rank",
        "Each factor says what one more piece of knowledge does to the rank of a group: R × shape of |A| × unequal "
        "norms × mean cosine × cosines among right, among wrong and between × everything else = effective rank "
        "(geometric means). 1: that piece does not matter. The last columns: share of the variance between groups, "
        "in logarithms, that advantages explain, then with norms, then with the cosines of right and wrong; below 0, "
        "worse than a constant.",
        (
            "R",
            *(f"× {name}" for name, _ in NULL_LADDER),
            "effective rank",
            "explained: advantages",
            "+ norms",
            "+ right against wrong",
        ),
        tuple(rows),
    )


def share_explained(measured: np.ndarray, predicted: np.ndarray) -> float:
    """Share of variance explained, `1 - Σ(m - p - shift)²/Σ(m - mean)²`, where `shift` is the mean of `m - p`.

    The shift forgives a prediction that is off by a constant (in logarithms, a constant factor). 0 if the prediction
    does not vary; `nan` if the measurement does not.
    """
    if np.ptp(predicted) < _ROUNDING:
        return 0.0
    spread = float(((measured - measured.mean()) ** 2).sum())
    left = measured - predicted
    return 1 - float(((left - left.mean()) ** 2).sum()) / spread if spread > _ROUNDING else math.nan


def conditions(evidence: Evidence) -> Table:
    """Rank correlations, over groups, of several quantities with the effective rank relative to that of `|A|` alone."""
    rows: list[tuple[Cell, ...]] = []
    things: tuple[tuple[str, Callable[[Reading], float]], ...] = (
        ("mean cosine between rollouts", lambda r: abs(r.cosine)),
        ("unequal norms: null over shape", lambda r: r.orthogonal / r.shape),
        ("share of directions: rank/R", lambda r: r.numerical_rank / r.trial.size),
        ("mean length", lambda r: r.length),
        ("share right: |k/R - 1/2|", lambda r: abs(r.right / r.trial.size - 0.5)),
        ("step", lambda r: float(r.step)),
    )
    for size in evidence.sizes:
        live = evidence.live(size=size)
        deficit = [math.log(r.rank / r.shape) for r in live]
        clusters = [r.cluster for r in live]
        found = [spearman([value(r) for r in live], deficit, clusters=clusters) for _, value in things]
        near = [2 - ABOUT_TWO <= r.rank <= 2 + ABOUT_TWO for r in live]
        rows.append((size, len(live), fmean(near) if near else math.nan, *found))
    return Table(
        "conditions",
        "What goes with a low effective rank",
        "Spearman correlations over groups with the logarithm of the rank relative to what |A| alone would give; "
        "intervals over prompts. Negative: the more of it, the lower the rank. Near 2: share of groups between 1.75 "
        "and 2.25.",
        ("R", "groups", "near 2", *(name for name, _ in things)),
        tuple(rows),
    )


def spearman(
    x: Sequence[float],
    y: Sequence[float],
    *,
    clusters: Sequence[Hashable] | None = None,
    strata: Sequence[Hashable] | None = None,
) -> Estimate:
    """Spearman correlation of the pairs without a `nan`, with a bootstrap interval.

    A resample keeps the ranks of the whole sample: this is cheap, and close to ranking each resample.

    Args:
        x: One quantity.
        y: The other.
        clusters: Unit of resampling of each pair; each pair is its own unit if not given. With fewer units than
            `bootstrap.FEWEST` there is no interval: it would be too narrow.
        strata: Stratum of each pair. Ranks are taken within a stratum, so that a difference between strata, such as
            group sizes, does not count as a correlation.

    Returns:
        `nan` for fewer than three pairs, or if one of the two quantities does not vary.
    """
    known = [place for place, pair in enumerate(zip(x, y, strict=True)) if not any(map(math.isnan, pair))]
    owners = [place if clusters is None else clusters[place] for place in known]
    layers = [None if strata is None else strata[place] for place in known]
    u, v = (ranks_within([values[place] for place in known], layers) for values in (x, y))
    if len(known) < 3 or not u.any() or not v.any():
        return Estimate(math.nan)
    names = {name: place for place, name in enumerate(dict.fromkeys(owners))}
    sums = np.zeros((len(names), 6))
    np.add.at(sums, [names[name] for name in owners], np.stack([np.ones_like(u), u, v, u * u, v * v, u * v], axis=1))

    def correlation(drawn: np.ndarray) -> np.ndarray:
        n, a, b, aa, bb, ab = np.moveaxis(sums[drawn].sum(-2), -1, 0)
        spread = (aa - a * a / n) * (bb - b * b / n)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(spread > 1e-12, (ab - a * b / n) / np.sqrt(spread), math.nan)

    return if_enough(bootstrap_estimate(len(names), correlation), len(names))


def ranks_within(values: Sequence[float], strata: Sequence[Hashable]) -> np.ndarray:
    """Rank of each value within its stratum, scaled to lie evenly between -1/2 and 1/2."""
    ranks = np.zeros(len(values))
    for stratum in dict.fromkeys(strata):
        places = [place for place, other in enumerate(strata) if other == stratum]
        ranks[places] = rankdata([values[place] for place in places]) / (len(places) + 1) - 0.5
    return ranks


PREDICTORS = (
    ("effective rank", "group/effective_rank"),
    ("signal to noise", "gram/snr"),
    ("share of live groups", "live"),
    ("mean reward", "reward"),
)


def prediction(evidence: Evidence) -> Table:
    """Correlation of the effective rank, and of other quantities, with the next gain in accuracy."""
    spans = [
        (trial, *span) for trial in evidence.of_paper() for span in spans_of(trial.run.metrics(), evidence.accuracy)
    ]
    gains = [gain for _, gain, _ in spans]
    units = {"clusters": [trial.name for trial, *_ in spans], "strata": [trial.size for trial, *_ in spans]}
    rows: list[tuple[Cell, ...]] = []
    for title, name in PREDICTORS:
        values = [means[name] for *_, means in spans]
        known = sum(not math.isnan(value + gain) for value, gain in zip(values, gains, strict=True))
        rows.append((title, known, spearman(values, gains, **units)))
    return Table(
        "prediction",
        "What foretells the next gain in accuracy",
        "Over spans between two evaluations, all runs: Spearman correlation of a quantity in the first half of the "
        "span with the gain over the span, ranked among spans of the same R; intervals over runs. To be of use, the "
        "rank must beat the mean reward and the share of live groups.",
        ("quantity", "spans", "correlation with the gain"),
        tuple(rows),
    )


def spans_of(
    metrics: Sequence[Mapping[str, float | int]], accuracy: str = GREEDY_ACCURACY
) -> list[tuple[float, dict[str, float]]]:
    """For each span between two evaluations: the gain, and the predictors' means over the first half of its steps."""
    evaluated = [line for line in metrics if accuracy in line]
    spans = []
    for before, after in pairwise(evaluated):
        middle = before["step"] + max(1, (after["step"] - before["step"]) // 2)
        inside = [line for line in metrics if before["step"] < line["step"] <= middle]
        means = {name: defined_mean([line.get(name, math.nan) for line in inside]) for _, name in PREDICTORS}
        means["live"] = defined_mean([line["live_groups"] / line["groups"] for line in inside if line.get("groups")])
        spans.append((after[accuracy] - before[accuracy], means))
    return spans


def at_fixed_right(evidence: Evidence) -> Table:
    """Effective rank in the first and the second half of training, at the same number of right rollouts."""
    last = max((r.step for r in evidence.live()), default=0)
    rows: list[tuple[Cell, ...]] = []
    for size in evidence.sizes:
        for right in range(1, size):
            here = [r for r in evidence.live(size=size) if r.right == right and r.is_binary]
            early, late = [r for r in here if r.step <= last / 2], [r for r in here if r.step > last / 2]
            if len(early) >= 5 and len(late) >= 5:
                shown = [mean_of(half, lambda r: r.rank) for half in (early, late)]
                over_null = [mean_of(half, lambda r: r.rank / r.orthogonal) for half in (early, late)]
                rows.append((size, right, len(early), len(late), *shown, *over_null))
    return Table(
        "at-fixed-k",
        "Does the rank fall while the policy learns, at the same k?",
        "The mean over all groups also moves because k moves; here k is held, and with it σ_r. Over null: relative to "
        "orthogonal scores of the same norms.",
        ("R", "k right", "groups", "later", "first half", "second half", "over null, first", "over null, second"),
        tuple(rows),
    )


def trend_table(evidence: Evidence) -> Table:
    """Slope of the logarithm of the rank over training, at a fixed number of right rollouts, over seeds."""
    live = [r for r in evidence.live() if r.is_binary]
    rows: list[tuple[Cell, ...]] = []
    for size in (*evidence.sizes, ALL_SIZES):
        here = [r for r in live if size in (ALL_SIZES, r.trial.size)]
        whole = [trend_point(r) for r in here]
        distinct = [trend_point(r, repeats=False) for r in here]
        slopes = (seed_slopes(whole, "rank"), seed_slopes(whole, "ratio"), seed_slopes(distinct, "ratio"))
        rows.append((size, len(here), *map(t_mean, slopes)))
    return Table(
        "trend",
        "Does the rank fall over training, at the same k?",
        "Slope of the logarithm per 1,000 steps, with one constant for each R and k in each seed, so that a changing "
        "success rate makes no trend; mean over seeds with Student's interval. Over null: relative to orthogonal "
        "scores of the same norms. Repeats removed: the first of each text, where two rollouts of a group count as one "
        f"text if their cosine is above {SAME_TEXT}.",
        ("R", "groups", "log rank", "log rank over null", "the same, repeats removed"),
        tuple(rows),
    )


@dataclass(frozen=True)
class TrendPoint:
    """One live group in the regression over steps."""

    seed: int
    cell: tuple[int, int]
    """Group size and number of right rollouts: groups of one cell and seed share a constant."""
    step: int
    rank: float
    """Logarithm of the effective rank."""
    ratio: float
    """Logarithm of the effective rank over its orthogonal null."""


def trend_point(reading: Reading, *, repeats: bool = True) -> TrendPoint | None:
    """A live group of right-or-wrong rewards; without `repeats`, the first rollout of each text, None if dead."""
    rank, null, rewards = reading.rank, reading.orthogonal, (reading.advantages > 0).double()
    kept = torch.ones(reading.size, dtype=torch.bool) if repeats else first_of_each_text(reading.gram)
    if not bool(kept.all()):
        rewards, gram = rewards[kept], reading.gram[kept][:, kept]
        if not 0 < int(rewards.sum()) < len(rewards):
            return None
        advantages = rewards - rewards.mean()
        null = float(effective_rank(advantages.abs() * gram.diagonal().clamp(min=0).sqrt()))
        rank = float(effective_rank(stacked_spectra([gram], [advantages])[0]))
    cell = len(rewards), int(rewards.sum())
    return TrendPoint(reading.trial.seed, cell, reading.step, math.log(rank), math.log(rank / null))


def first_of_each_text(gram: Tensor) -> Tensor:
    """`(R,)`: whether no earlier rollout of the group has a cosine above `SAME_TEXT` with this one."""
    norms = gram.diagonal().clamp(min=torch.finfo(gram.dtype).tiny).sqrt()
    return ~(gram / norms / norms[:, None] > SAME_TEXT).tril(-1).any(-1)


def seed_slopes(points: Sequence[TrendPoint | None], name: str) -> list[float]:
    """Slope of `rank` or `ratio` per 1,000 steps of every seed; a seed whose cells span no steps is left out."""
    slopes = []
    known = [point for point in points if point is not None]
    for seed in dict.fromkeys(point.seed for point in known):
        own = [point for point in known if point.seed == seed]
        x, y = np.array([one.step / 1000 for one in own]), np.array([getattr(one, name) for one in own])
        cells = np.array([one.cell for one in own])
        for cell in np.unique(cells, axis=0):
            inside = (cells == cell).all(-1)
            x[inside] -= x[inside].mean()  # then a constant of the cell in y does not count
        if x @ x > _ROUNDING:
            slopes.append(float(x @ y / (x @ x)))
    return slopes


def figure_cosine(evidence: Evidence) -> Figure:
    """Effective rank relative to that of `|A|` alone, against the mean cosine between rollouts."""
    series = tuple(
        Series(
            f"R = {size}",
            tuple(r.cosine for r in evidence.live(size=size)),
            tuple(r.rank / r.shape for r in evidence.live(size=size)),
            points=True,
        )
        for size in evidence.sizes
    )
    return Figure(
        "figure-cosine",
        "Effective rank against the cosine between rollouts",
        "One point a group: effective rank over what |A| alone gives. 1: scores are orthogonal and of equal norms.",
        "mean cosine between rollouts of the group",
        "effective rank / (4k(R-k)/R)",
        series,
    )
