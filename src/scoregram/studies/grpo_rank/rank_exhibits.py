"""Exhibits on the rank: Table 1 and Figures 1 and 2 of the paper beside null models; by k, temperature and layer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from scoregram.bootstrap import nested_estimate, nested_mean
from scoregram.exhibits import Cell, Estimate, Figure, Series, Table
from scoregram.reading import stacked_spectra
from scoregram.runs import FIXED_PROBE, BatchRecord
from scoregram.spectra import (
    MEASURED_RTOL,
    concentrated_energies,
    effective_rank,
    mean_pairwise_cosine,
    orthogonal_effective_rank,
    spread_energies,
    top1_fraction,
)
from scoregram.studies.grpo_rank import PRINTED_TOP1
from scoregram.studies.grpo_rank.readings import TRAIN, Census, Evidence, Reading
from scoregram.training import seeded_generator

UNRELATED_DRAWS = 4
"""Groups of unrelated scores that are drawn for every live group of a batch."""
_FORBIDDEN = 1e6
"""Cost of a match that is not allowed, far above the cost of any number of allowed ones."""


def mean_of(readings: Sequence[Reading], value: Callable[[Reading], float]) -> Estimate:
    """Mean over groups, with a bootstrap interval over seeds and, inside them, prompts."""
    return nested_mean([value(reading) for reading in readings], [reading.nest for reading in readings])


def defined_mean(values: Sequence[float]) -> float:
    """Mean of the values that are not `nan`; `nan` if there are none."""
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else math.nan


def table_1(evidence: Evidence) -> Table:
    """Effective rank and top-1 fraction by group size, beside the paper's numbers and three null models."""
    unrelated = unrelated_spectra(evidence)
    rows: list[tuple[Cell, ...]] = []
    for size in evidence.sizes:
        live = evidence.live(size=size)
        counted = [c for c in evidence.census if c.kind == TRAIN and c.trial in evidence.of_paper(size=size)]
        low, high = PRINTED_TOP1.get(size, (None, None))
        strange = unrelated.get(size, [])
        nulls = [unrelated_mean(live, strange, name) for name in ("rank", "top")]
        rows.append(
            (
                size,
                f"{len(live)} of {sum(c.groups for c in counted)}",
                success_rate(counted),
                "~2" if low else None,
                mean_of(live, lambda r: r.rank),
                *feasible_ranks(live, size),
                defined_mean([r.orthogonal for r in live]),
                defined_mean([r.shuffled for r in live]),
                nulls[0],
                max((r.numerical_rank for r in live), default=0),
                f"{low}–{high}" if low else None,
                mean_of(live, lambda r: r.top),
                defined_mean([r.orthogonal_top for r in live]),
                defined_mean([r.shuffled_top for r in live]),
                nulls[1],
                f"{len(strange)} of {len(live)}",
            )
        )
    return Table(
        id="table-1",
        title="Table 1: spectrum of stacked per-rollout gradients",
        caption="Training groups whose rewards differ, all measured steps and seeds; intervals at 95 %, seeds and then "
        "prompts resampled. Success rate: share of right rollouts, dead groups included. Possible: what the top-1 "
        "fractions leave open, on average. Null "
        "models: orthogonal scores of the measured norms (a ceiling: no scores of these norms have a higher rank); the "
        "same scores with advantages shuffled; scores of other prompts with the same rewards, measured where the whole "
        "batch is stored and other prompts have enough rollouts of each reward, and scaled to all groups of the row "
        "by the ratio to the same groups' own values. At its null, a value says nothing beyond advantages and norms.",
        columns=(
            "R",
            "live groups",
            "success rate",
            "rank, paper",
            "effective rank",
            "least possible",
            "most possible",
            "null: orthogonal",
            "null: shuffled",
            "null: unrelated",
            "largest rank seen",
            "top-1, paper",
            "top-1 fraction",
            "top-1 orthogonal",
            "top-1 shuffled",
            "top-1 unrelated",
            "groups with unrelated",
        ),
        rows=tuple(rows),
    )


def success_rate(counted: Sequence[Census]) -> float:
    """Share of right rollouts in all groups of one size, dead groups included; `nan` without a group."""
    groups = sum(one.groups for one in counted)
    return math.fsum(one.success * one.groups for one in counted) / groups if groups else math.nan


def feasible_ranks(live: Sequence[Reading], size: int) -> tuple[float, float]:
    """Least and largest effective rank that are possible at the groups' top-1 fractions, on average."""
    if not live:
        return math.nan, math.nan
    energies = [[shape(r.top, size) for r in live] for shape in (concentrated_energies, spread_energies)]
    least, most = (defined_mean(effective_rank(torch.stack(each).sqrt()).tolist()) for each in energies)
    return least, most


@dataclass(frozen=True)
class UnrelatedReading:
    """One group of Table 1, and the mean spectrum of its stand-ins from other prompts."""

    own: Reading
    rank: float
    top: float


def unrelated_spectra(evidence: Evidence) -> dict[int, list[UnrelatedReading]]:
    """Group size → groups of Table 1 whose batch is stored, each with the mean over its draws of unrelated scores."""
    own = {(r.trial.name, r.step, r.kind, r.prompt_id): r for r in evidence.readings}
    found: dict[int, list[UnrelatedReading]] = {}
    for trial, batch in evidence.batches():
        for prompt, drawn in unrelated_groups(batch, seed=trial.seed).items():
            reading = own.get((trial.name, batch.step, batch.kind, batch.prompt_ids[prompt]))
            if reading is None or reading.kind != TRAIN:
                continue
            spectra = stacked_spectra([gram for gram, _ in drawn], [advantages for _, advantages in drawn])
            means = [float(metric(spectra).mean()) for metric in (effective_rank, top1_fraction)]
            found.setdefault(trial.size, []).append(UnrelatedReading(reading, *means))
    return found


def unrelated_mean(live: Sequence[Reading], drawn: Sequence[UnrelatedReading], name: str) -> Estimate:
    """Mean of the unrelated null over the groups of Table 1: their own mean, times the ratio of null to own mean.

    The ratio is that of the groups whose batch is stored; it corrects for their other numbers of right rollouts.
    """
    if not drawn or not live:
        return Estimate(math.nan)
    null = np.array([getattr(one, name) for one in drawn])
    own = np.array([getattr(one.own, name) for one in drawn])
    mean = defined_mean([getattr(reading, name) for reading in live])
    return nested_estimate([one.own.trial.seed for one in drawn], lambda w: mean * (w @ null) / (w @ own))


STEP_BINS = 12
"""Points of a curve over steps."""


def over_steps(evidence: Evidence, size: int, value: Callable[[Reading], float]) -> Series:
    """Mean over the live groups of neighbouring steps, with its interval, as one series."""
    live = evidence.live(size=size)
    steps = sorted({reading.step for reading in live})
    width = max(1, math.ceil(len(steps) / STEP_BINS))
    parts = [steps[start : start + width] for start in range(0, len(steps), width)]
    means = [mean_of([r for r in live if r.step in part], value) for part in parts]
    return Series(
        f"R = {size}",
        tuple(fmean(part) for part in parts),
        tuple(mean.value for mean in means),
        tuple(mean.low for mean in means),
        tuple(mean.high for mean in means),
    )


def null_line(evidence: Evidence, size: int, value: Callable[[Reading], float], name: str) -> Series:
    """Mean of a null model over steps, without an interval."""
    line = over_steps(evidence, size, value)
    return Series(f"R = {size}, {name}", line.x, line.y, role="null")


def figure_1(evidence: Evidence) -> Figure:
    """Effective rank over training steps."""
    steps = [float(reading.step) for reading in evidence.live()] or [0.0]
    series = [over_steps(evidence, size, lambda r: r.rank) for size in evidence.sizes]
    series += [null_line(evidence, size, lambda r: r.orthogonal, "orthogonal") for size in evidence.sizes]
    series.append(Series("paper, every R", (min(steps), max(steps)), (2.0, 2.0), role="paper"))
    return Figure(
        "figure-1",
        "Figure 1: effective rank over training",
        "Mean over live groups; bands are 95 % intervals over seeds and prompts. Dashed: orthogonal scores of the same "
        "norms.",
        "step",
        "effective rank",
        tuple(series),
    )


def figure_2(evidence: Evidence) -> Figure:
    """Top-1 fraction over training steps."""
    series = [over_steps(evidence, size, lambda r: r.top) for size in evidence.sizes]
    series += [null_line(evidence, size, lambda r: r.orthogonal_top, "orthogonal") for size in evidence.sizes]
    return Figure(
        "figure-2",
        "Figure 2: top-1 fraction over training",
        "Share of the strongest direction in the energy of a group's stack, mean over live groups.",
        "step",
        "top-1 fraction",
        tuple(series),
    )


def by_right(evidence: Evidence) -> Table:
    """Effective rank by the number `k` of right rollouts."""
    rows: list[tuple[Cell, ...]] = []
    for size in evidence.sizes:
        for right in range(1, size):
            here = [r for r in evidence.live(size=size) if r.right == right and r.is_binary]
            if here:
                rank, null = mean_of(here, lambda r: r.rank), orthogonal_effective_rank(right, size)
                others = (
                    defined_mean([getattr(r, name) for r in here]) for name in ("orthogonal", "cosine", "deviation")
                )
                rows.append((size, right, len(here), rank, null, *others))
    return Table(
        "by-right",
        "Effective rank by the number of right rollouts",
        "Groups of right-or-wrong rewards: orthogonal scores of equal norms give 4k(R-k)/R, the shape of |A| alone. "
        "At a fixed k the reward's deviation is fixed too, so the rank cannot follow it except through k.",
        ("R", "k right", "groups", "effective rank", "4k(R-k)/R", "null: orthogonal", "mean cosine", "σ_r"),
        tuple(rows),
    )


def by_temperature(evidence: Evidence) -> Table:
    """Probes of fixed prompts at several temperatures, scored at the sampling and at the training temperature."""
    kinds = sorted(
        {r.kind for r in evidence.readings if r.kind.startswith(FIXED_PROBE)}, key=lambda kind: (len(kind), kind)
    )
    rows: list[tuple[Cell, ...]] = []
    for size in evidence.sizes:
        for kind in kinds:
            here = evidence.live(size=size, kind=kind)
            if here:
                label = "as trained" if kind == FIXED_PROBE else kind.removeprefix(f"{FIXED_PROBE}, ")
                rank, top, cosine = (mean_of(here, attrgetter(name)) for name in ("rank", "top", "cosine"))
                rows.append((size, label, len(here), rank, defined_mean([r.orthogonal for r in here]), top, cosine))
    return Table(
        "by-temperature",
        "Fixed prompts, by temperature",
        "The same test prompts, probed during training. Scores average to zero only at the temperature that rollouts "
        "were sampled at; scored at another one, all share a direction that comes from the sampler.",
        ("R", "rollouts", "groups", "effective rank", "null: orthogonal", "top-1 fraction", "mean cosine"),
        tuple(rows),
    )


def by_layer(evidence: Evidence) -> Table:
    """Effective rank of the stack restricted to each kind of layer, at the largest group size of the paper."""
    size = evidence.largest_paper_size
    probed = [r for r in evidence.live(size=size, kind=FIXED_PROBE) if r.by_layer]
    names = list(dict.fromkeys(name for r in probed for name in r.by_layer))
    rows: list[tuple[Cell, ...]] = []
    for name in names:
        here = [r for r in probed if name in r.by_layer]
        grams, advantages = [r.by_layer[name] for r in here], [r.advantages for r in here]
        energy = [float(gram.trace() / r.gram.trace()) for gram, r in zip(grams, here, strict=True)]
        ranks = effective_rank(stacked_spectra(grams, advantages)).tolist()
        nulls = effective_rank(stacked_spectra([gram.diagonal().diag() for gram in grams], advantages)).tolist()
        cosines = [mean_pairwise_cosine(gram, rtol=MEASURED_RTOL) for gram in grams]
        values = nested_mean(ranks, [r.nest for r in here])
        rows.append((name, defined_mean(energy), values, defined_mean(nulls), defined_mean(cosines)))
    return Table(
        "by-layer",
        f"Effective rank by kind of layer, R = {size}",
        "Layers of one kind added up over depth; fixed prompts. Energy: share in the squared norms of the scores.",
        ("layer", "energy", "effective rank", "null: orthogonal", "mean cosine"),
        tuple(sorted(rows, key=lambda row: -float(row[1]) if isinstance(row[1], float) else 0.0)),
    )


def unrelated_groups(batch: BatchRecord, *, seed: int) -> dict[int, list[tuple[Tensor, Tensor]]]:
    """Place of a live group in its batch → Gram and advantages of groups with its rewards and other prompts' scores.

    Every rollout of the group is replaced by one with the same reward from another prompt of the batch, and the
    replacements come from as many different prompts as the batch allows. A group is left out if the other prompts have
    too few rollouts of one of its rewards. The same batch and seed give the same groups.
    """
    sizes = batch.sizes.tolist()
    prompt_of = torch.arange(len(sizes)).repeat_interleave(batch.sizes)
    stream = seeded_generator(seed, "unrelated", batch.step)
    groups: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for prompt in range(len(sizes)):
        rewards, others = batch.rewards[prompt_of == prompt], (prompt_of != prompt).nonzero().flatten()
        pool = batch.rewards[others]
        if not bool(rewards.max() > rewards.min()):
            continue
        if any(int((pool == reward).sum()) < int((rewards == reward).sum()) for reward in rewards.unique()):
            continue
        for _ in range(UNRELATED_DRAWS):
            places = others[matching_rollouts(rewards, pool, prompt_of[others], stream)]
            groups.setdefault(prompt, []).append((batch.gram[places][:, places], rewards - rewards.mean()))
    return groups


def matching_rollouts(rewards: Tensor, pool: Tensor, prompt_of: Tensor, stream: torch.Generator) -> Tensor:
    """For each reward, the index in `pool` of a rollout with that reward, from as many prompts as possible.

    No index is used twice. Each round assigns rollouts to prompts at random, every prompt at most once, until every
    reward has its rollout.
    """
    prompts = int(prompt_of.max()) + 1
    chosen = torch.full((len(rewards),), -1)
    while bool((chosen < 0).any()):
        left = (chosen < 0).nonzero().flatten()  # rewards without a rollout yet
        free = torch.ones(len(pool), dtype=torch.bool)
        free[chosen[chosen >= 0]] = False
        fits = (pool[None] == rewards[left, None]) & free  # (rollouts left, places)
        open_to = torch.zeros(len(left), prompts).index_add(1, prompt_of, fits.float()) > 0
        costs = torch.rand(len(left), prompts, generator=stream) + _FORBIDDEN * ~open_to
        for row, prompt in zip(*linear_sum_assignment(costs.numpy()), strict=True):
            if bool(open_to[row, prompt]):
                places = (fits[row] & (prompt_of == prompt)).nonzero().flatten()
                chosen[left[row]] = places[int(torch.randint(len(places), (), generator=stream))]
    return chosen
