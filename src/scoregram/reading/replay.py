"""What other estimators of advantages would have done with the stored rollouts of a run.

The groups of a run hold rewards, lengths and the Gram of their scores. From these, without the model, one can compute
the inner products of the updates that any estimator makes of the same rollouts. Disjoint parts of a group are
independent samples, so two parts give the signal and the noise of an estimator without a formula for it
(`statistics.halves`). All numbers are about the update of a single prompt, because a run stores the Gram between
prompts for few steps only. All but variance and bias do not change if an estimator multiplies its advantages by a
constant.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from scoregram.advantages import ESTIMATORS, estimate
from scoregram.bootstrap import bootstrap_estimate, mean_estimate
from scoregram.checks import fail, listed, lookup
from scoregram.exhibits import Estimate
from scoregram.reading.group import StoredGroup
from scoregram.spectra import MEASURED_RTOL, effective_rank, group_spectra
from scoregram.statistics import SplitProducts, disjoint_parts, split_products

REFERENCE = "rloo"
"""Estimator that the others are compared with: it is unbiased."""
USUAL = (
    *("rloo", "mean", "grpo", "reinforce", "reinforce++", "reinforce++-baseline"),
    *("opo", "opo-loo", "optimal", "optimal-loo", "tic"),
)
"""Estimators compared if none is named: one of each kind, and only one of the variants of `grpo` in several trainers.
"""
STORED_INPUTS = frozenset({"lengths", "score_energies", "outcomes"})
"""Inputs of estimators that a run's groups hold."""
FEW_GROUPS = 20
"""With fewer groups than this no interval is given: they are too few to know how much groups differ."""
MOST_PAIRS = 2**22
"""Pairs of rollouts that are compared at once: 32 MB in float64."""
UNKNOWN, ITSELF = Estimate(math.nan), Estimate(1.0, 1.0, 1.0)
_CALLER = "whatif"


RolloutFactors = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rewards, lengths and advantages `(P, r)` of a part of every group → factors of the advantages, `(P, r)` or `(P, 1)`.
"""
UNWEIGHTED = "uniform"
WEIGHTS: Mapping[str, RolloutFactors] = MappingProxyType(
    {
        UNWEIGHTED: lambda rewards, lengths, advantages: torch.ones_like(advantages),
        "length": lambda rewards, lengths, advantages: 1 / lengths.clamp(min=1).to(advantages.dtype),
        "right": lambda rewards, lengths, advantages: (advantages > 0).to(advantages.dtype),
        "wrong": lambda rewards, lengths, advantages: (advantages < 0).to(advantages.dtype),
        "hard": lambda rewards, lengths, advantages: 1 - rewards.mean(1, keepdim=True),
        "spread": lambda rewards, lengths, advantages: rewards.var(1, keepdim=True, unbiased=False),
    }
)
"""Reweightings and selections that can be replayed: 1 over the length of a rollout; rollouts with a positive or with a
negative advantage alone; prompts weighted by 1 minus their mean reward, or by the variance of their rewards."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The numbers of one estimator on the groups of a run."""

    estimator: str
    variance: Estimate
    """`tr Cov ĝ` of one prompt's update, mean over groups, in the units of the Gram. It scales with the advantages."""
    bias: Estimate
    """`|E ĝ - g|² / |g|²` with the unweighted `REFERENCE` for `g`; 0 where the estimator is proven unbiased. It counts
    a wrong length as well as a wrong direction. `nan` unless the intervals of both `snr` exclude 0."""
    snr: Estimate
    """Signal over noise, `|E ĝ|² / tr Cov ĝ` of one prompt's update, pooled over groups; negative by chance."""
    efficiency: Estimate
    """`snr` over that of `REFERENCE`: at 2, half as many groups give an update of the same quality. 1 for the
    unweighted `REFERENCE` itself; for others `nan` unless the intervals of both exclude 0."""
    direction: Estimate
    """Cosine between the expected update and that of `REFERENCE`, which has the true direction. It may exceed 1 by
    chance. 1 for the unweighted `REFERENCE` itself; for others `nan` unless the intervals of both `snr` exclude 0."""
    taken: Estimate
    """Cosine between the update of the whole groups and the one that the run took."""
    effective_rank: Estimate
    """Mean over live groups, whole; a group is live if it has an advantage other than 0."""
    effective_rank_null: Estimate
    """The same for orthogonal scores with the same norms."""


@dataclass(frozen=True, kw_only=True)
class ReplayedRun:
    """The numbers of several estimators on the same groups."""

    groups: int
    """Groups replayed: those of the last third with all rewards and a Gram."""
    run_size: int
    """Rollouts of each group."""
    group_size: int
    """Rollouts of each of the two parts from which signal and noise are estimated."""
    weights: str
    """Row of `WEIGHTS` that multiplies the advantages of every row but the reference."""
    rows: tuple[Replay, ...]


def replay_groups(
    stored: Sequence[StoredGroup],
    run_size: int,
    estimators: Sequence[str] = (),
    *,
    group_size: int = 0,
    weights: str = UNWEIGHTED,
) -> ReplayedRun:
    """Variance, bias, signal, direction and rank of other estimators on stored groups.

    Args:
        stored: Those with all rewards, a Gram of scores and `run_size` rollouts are replayed.
        run_size: Rollouts of each group.
        estimators: Rows of `ESTIMATORS`; `USUAL` by default.
        group_size: Rollouts of each part, at most half of `run_size`; 0 means exactly half.
        weights: Row of `WEIGHTS`: factors of the advantages.

    Raises:
        ScoregramError: If an estimator or the weights are unknown, if an estimator needs an input that a run does not
            store, if `group_size` is below the estimator's minimum or above half of the run's, or if there is no group
            to replay.
    """
    groups = replayable_groups(stored, run_size)
    size = group_size or run_size // 2
    names = list(dict.fromkeys(estimators)) or [name for name in USUAL if ESTIMATORS[name].min_group <= size]
    for name in names:
        require_replayable(name, size)
    if not 1 < size <= run_size // 2:
        requirement = f"must be from 2 to {run_size // 2}, half of the run's groups of {run_size}"
        fail(f"{_CALLER} --group-size", requirement, size, "Signal and noise need two disjoint parts of a group.")
    lookup(WEIGHTS, weights, kind=f"{_CALLER} --weights")
    parts = disjoint_parts(run_size, size)
    table, plain = (ReplayedGroups(groups, chosen) for chosen in (weights, UNWEIGHTED))
    every = [plain.advantages_of_parts(REFERENCE, parts), *(table.advantages_of_parts(name, parts) for name in names)]
    products = split_products(table.grams, torch.stack(every), parts)
    rows = tuple(replay(table, name, products, place) for place, name in enumerate(names, start=1))
    return ReplayedRun(groups=len(groups), run_size=run_size, group_size=size, weights=weights, rows=rows)


def whole_steps(groups: Sequence[StoredGroup], most: int) -> list[StoredGroup]:
    """The groups of evenly spaced steps, about `most` of them: all groups of a step, which some estimators couple.

    Args:
        groups: In order of step.
        most: Groups to keep; at least one step is kept, and all steps if they have fewer groups.
    """
    steps = sorted({group.record.step for group in groups})
    every = math.ceil(len(steps) / max(1, most * len(steps) // max(1, len(groups)))) if steps else 1
    kept = set(steps[::every])
    return [group for group in groups if group.record.step in kept]


def replayable_groups(stored: Sequence[StoredGroup], size: int) -> list[StoredGroup]:
    """The groups of `size` rollouts, at least four, that have all rewards and a Gram of scores."""
    groups = [group for group in stored if group.size == size and group.is_complete]
    if not groups or size < 4:
        got = f"{len(groups)} in the last third, of {size} rollouts"
        remedy = "Measure more steps, or larger groups."
        fail(_CALLER, "a run needs measured groups of four rollouts or more with all rewards", got, remedy)
    return groups


def can_replay(name: str) -> bool:
    """Whether the groups of a run hold every input of an estimator."""
    row = ESTIMATORS[name]
    return row.level == "group" and set(row.needs) <= STORED_INPUTS


def require_replayable(name: str, size: int) -> None:
    """Raise unless an estimator can be replayed on parts of `size` rollouts."""
    row = lookup(ESTIMATORS, name, kind=f"{_CALLER} --estimators")
    if not can_replay(name):
        missing = listed(set(row.needs) - STORED_INPUTS) or f"credit for every {row.level}"
        remedy = f"Choose among {listed(n for n in ESTIMATORS if can_replay(n))}."
        fail(
            f"{_CALLER} --estimators",
            "a run must hold what the estimator needs",
            f"{name}, which needs {missing}",
            remedy,
        )
    if row.min_group > size:
        fail(_CALLER, f"{name} needs groups of {row.min_group} or more", size, "Choose a larger --group-size.")


class ReplayedGroups:
    """The stored groups as tensors, `P` groups of `R` rollouts, and the factors of their advantages."""

    def __init__(self, groups: Sequence[StoredGroup], weights: str = UNWEIGHTED) -> None:
        records = [group.record for group in groups]
        self.weights = weights
        self.rewards = torch.stack([record.rewards.double() for record in records])  # (P, R)
        self.lengths = torch.stack([record.lengths for record in records])
        self.taken = torch.stack([record.advantages.double() for record in records])
        self.grams = torch.stack([record.gram.double() for record in records if record.gram is not None])
        self.steps = torch.tensor([record.step for record in records])

    def advantages(self, name: str, places: Tensor) -> Tensor:
        """`(P, G, r)` weighted advantages if every group consisted of its rollouts at one of the `places` `(G, r)`."""
        size = places.shape[-1]
        at_once = max(1, MOST_PAIRS // (len(self.rewards) * size**2))  # some estimators compare all pairs of rollouts
        return torch.cat([self._advantages_at(name, several) for several in places.split(at_once)], dim=1)

    def _advantages_at(self, name: str, places: Tensor) -> Tensor:
        row, count = ESTIMATORS[name], len(places)
        energies = self.grams.diagonal(dim1=1, dim2=2)
        stored = {"lengths": self.lengths, "score_energies": energies, "outcomes": self.rewards}
        inputs = {key: stored[key][:, places].flatten(0, 1) for key in row.needs}  # (P G, r)
        rewards, lengths = (values[:, places].flatten(0, 1) for values in (self.rewards, self.lengths))
        if row.couples_prompts:  # the prompts of one step meet, each with its rollouts at the same places
            _, step_of = self.steps.unique(return_inverse=True)
            batches = (step_of[:, None] * count + torch.arange(count)).flatten()
            found = row.fn(rewards, **inputs, batches=batches)
        else:
            found = estimate(name, rewards, **inputs)
        return (found * WEIGHTS[self.weights](rewards, lengths, found)).unflatten(0, (-1, count))

    def advantages_of_parts(self, name: str, parts: Tensor) -> Tensor:
        """`(P, K, 2, r)` advantages in both parts of every split `(K, 2, r)`."""
        return self.advantages(name, parts.flatten(0, 1)).unflatten(1, parts.shape[:2])

    def whole_advantages(self, name: str) -> Tensor:
        """`(P, R)` advantages in the whole groups."""
        return self.advantages(name, torch.arange(self.rewards.shape[1])[None])[:, 0]

    def effective_ranks(self, advantages: Tensor) -> tuple[list[float], list[float]]:
        """Effective rank of every group with an advantage other than 0, and the same for orthogonal scores."""
        live = advantages.any(dim=1)
        grams = self.grams[live]
        alone = torch.diag_embed(grams.diagonal(dim1=1, dim2=2))
        rank, null = (
            effective_rank(group_spectra(several, advantages[live], psd_rtol=MEASURED_RTOL)).tolist()
            for several in (grams, alone)
        )
        return rank, null


def replay(table: ReplayedGroups, name: str, products: SplitProducts, place: int) -> Replay:
    """The numbers of the estimator at index `place` of `products`; the unweighted reference is at index 0."""
    signal, noise = products.signal.numpy(), products.noise.numpy()
    across = products.across[0, place].numpy()
    whole = table.whole_advantages(name)
    dot, own, run_s = (
        torch.einsum("pi,pij,pj->p", left, table.grams, right).numpy()
        for left, right in ((whole, table.taken), (whole, whole), (table.taken, table.taken))
    )
    rank, null = table.effective_ranks(whole)

    def snr(drawn: np.ndarray, index: int) -> np.ndarray:
        return over_positive(signal[index][drawn].sum(-1), noise[index][drawn].sum(-1))

    def efficiency(drawn: np.ndarray) -> np.ndarray:
        return over_positive(snr(drawn, place), snr(drawn, 0))

    def bias(drawn: np.ndarray) -> np.ndarray:
        distance = signal[place][drawn].sum(-1) - 2 * across[drawn].sum(-1) + signal[0][drawn].sum(-1)
        return over_positive(distance, signal[0][drawn].sum(-1))

    def cosine(drawn: np.ndarray, product: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        lengths = np.maximum(first[drawn].sum(-1), 0) * np.maximum(second[drawn].sum(-1), 0)
        return over_positive(product[drawn].sum(-1), np.sqrt(lengths))

    count = len(table.rewards)
    both = [pooled(count, partial(snr, index=index)) for index in (0, place)]
    is_certain = all(found.low > 0 for found in both)
    is_unbiased = ESTIMATORS[name].unbiased and table.weights == UNWEIGHTED
    across_cosine = partial(cosine, product=across, first=signal[0], second=signal[place])
    is_reference = name == REFERENCE and table.weights == UNWEIGHTED

    def compared(statistic: Callable[[np.ndarray], np.ndarray]) -> Estimate:
        """A comparison with the reference: 1 for itself, unknown without a resolved signal."""
        return ITSELF if is_reference else pooled(count, statistic) if is_certain else UNKNOWN

    return Replay(
        estimator=name,
        variance=pooled(count, lambda drawn: noise[place][drawn].mean(-1)),
        bias=Estimate(0.0, 0.0, 0.0) if is_unbiased else pooled(count, bias) if is_certain else UNKNOWN,
        snr=both[1],
        efficiency=compared(efficiency),
        direction=compared(across_cosine),
        taken=pooled(count, partial(cosine, product=dot, first=own, second=run_s)),
        effective_rank=mean_estimate(rank),
        effective_rank_null=mean_estimate(null),
    )


def wrong_over_right_energy(groups: Sequence[StoredGroup]) -> float:
    """Mean squared score norm of the rollouts with reward 0 over that of the rollouts with reward 1.

    `mean(K_ii | r_i = 0) / mean(K_ii | r_i = 1)` over all rollouts of the groups that have a Gram and a reward. Reads:
    1, both are equally large; above 1, wrong rollouts have the larger scores. `nan` if another reward occurs, if one of
    the two kinds is missing, or if the scores of right rollouts are 0.
    """
    measured = [(group.record.rewards, group.record.gram) for group in groups if group.record.gram is not None]
    if not measured:
        return math.nan
    rewards = torch.cat([rewards.double() for rewards, _ in measured])  # (rollouts,)
    energies = torch.cat([gram.double().diagonal() for _, gram in measured])
    is_wrong, is_right = rewards == 0, rewards == 1
    if not bool((is_wrong | is_right | rewards.isnan()).all()):
        return math.nan
    wrong, right = float(energies[is_wrong].mean()), float(energies[is_right].mean())  # the mean of nothing is nan
    return wrong / right if right > 0 else math.nan


def over_positive(above: np.ndarray | np.floating, below: np.ndarray | np.floating) -> np.ndarray:
    """`above / below`, `nan` where `below` is not positive."""
    return np.where(below > 0, above / np.where(below > 0, below, 1.0), math.nan)


def pooled(count: int, statistic: Callable[[np.ndarray], np.ndarray]) -> Estimate:
    """A statistic of `count` groups with a bootstrap interval over groups; none below `FEW_GROUPS`."""
    found = bootstrap_estimate(count, statistic)
    return found if count >= FEW_GROUPS else Estimate(found.value)
