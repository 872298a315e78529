"""What other estimators of advantages would have done with the stored rollouts of a run.

The groups of a run hold rewards, lengths and the Gram of their scores. From these, without the model, one can compute
the inner products of the updates that any estimator makes of the same rollouts. Disjoint parts of a group are
independent samples, so two parts give the signal and the noise of an estimator without a formula for it
(`statistics.halves`). All numbers are about the update of a single prompt, because a run stores the Gram between
prompts for few steps only. All but variance and bias do not change if an estimator multiplies its advantages by a
constant. `replay_pooling` has the intervals.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from scoregram.advantages import ESTIMATORS, estimate
from scoregram.checks import fail, listed, lookup
from scoregram.exhibits import Estimate
from scoregram.reading.group import StoredGroup
from scoregram.reading.replay_pooling import UNKNOWN, GroupNumbers, pooled_numbers, unit_of
from scoregram.spectra import MEASURED_RTOL, effective_rank, group_spectra, stable_rank, top1_fraction
from scoregram.statistics import disjoint_parts, group_moments, leave_one_out_mse, split_products

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
MOST_PAIRS = 2**22
"""Pairs of rollouts that are compared at once: 32 MB in float64."""
AT_ONCE = 256
"""Groups whose parts are compared at once: larger tensors leave the cache, which is slower."""
PROPORTIONAL = 1e-9
"""Advantages that differ from a multiple of others by no more than this share of their norm are that multiple."""
ITSELF = Estimate(1.0, 1.0, 1.0)
SPECTRUM = MappingProxyType(
    {"effective_rank": effective_rank, "top1_fraction": top1_fraction, "stable_rank": stable_rank}
)
_CALLER = "whatif"


RolloutFactors = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rewards, lengths and advantages `(P, r)` of a part of every group → factors of the advantages, `(P, r)` or `(P, 1)`.
A mask, which keeps some rollouts, is one too.
"""
RolloutAdvantages = Callable[[Tensor], Tensor]
"""Rewards `(P, r)` → advantages `(P, r)`, each row from its own rewards alone."""
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
    """The same for orthogonal scores with the same norms; likewise below."""
    top1_fraction: Estimate = UNKNOWN
    """Share of the energy in the largest direction."""
    top1_fraction_null: Estimate = UNKNOWN
    stable_rank: Estimate = UNKNOWN
    stable_rank_null: Estimate = UNKNOWN


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
    """Row of `WEIGHTS`, or name of the function, that multiplies the advantages of every row but the reference."""
    rows: tuple[Replay, ...]
    unit: str = ""
    """What the intervals are over: `steps`, or `groups` with fewer than 5 steps; empty if there are none."""
    is_extrapolated: bool = False
    """Whether variance and signal to noise follow from the components of the noise of `REFERENCE`: the parts would be
    larger than half a group."""


def replay_groups(
    stored: Sequence[StoredGroup],
    run_size: int,
    estimators: Sequence[str | RolloutAdvantages] = (),
    *,
    group_size: int = 0,
    weights: str | RolloutFactors = UNWEIGHTED,
) -> ReplayedRun:
    """Variance, bias, signal, direction and spectrum of other estimators on stored groups.

    Args:
        stored: Those with all rewards, a Gram of scores and `run_size` rollouts are replayed.
        run_size: Rollouts of each group.
        estimators: Rows of `ESTIMATORS` or functions from rewards `(P, R)` to advantages `(P, R)`; `USUAL` by default.
        group_size: Rollouts of each part, at most half of `run_size`; 0 means exactly half. `REFERENCE` alone, without
            weights, may have any size.
        weights: Row of `WEIGHTS`, or a function of rewards, lengths and advantages: factors of the advantages.

    Raises:
        ScoregramError: If an estimator or the weights are unknown, if an estimator needs an input that a run does not
            store, if `group_size` is below the estimator's minimum or above half of the run's, if a function returns
            something else than one finite number for each rollout, or if there is no group to replay.
    """
    groups = replayable_groups(stored, run_size)
    size = group_size or run_size // 2
    chosen = list(dict.fromkeys(estimators))
    if size > run_size // 2 and chosen == [REFERENCE] and weights == UNWEIGHTED:
        return extrapolated_reference(groups, run_size, size)
    for name in chosen:
        require_replayable(name, size)
    if not 1 < size <= run_size // 2:
        requirement = f"must be from 2 to {run_size // 2}, half of the run's groups of {run_size}"
        remedy = (
            "Signal and noise need two disjoint parts of a group. "
            f"{REFERENCE} alone has them at any size: --estimators {REFERENCE}; run.noise() has its best size."
        )
        fail(f"{_CALLER} --group-size", requirement, size, remedy)
    if isinstance(weights, str):
        lookup(WEIGHTS, weights, kind=f"{_CALLER} --weights")
    every = chosen or [name for name in USUAL if ESTIMATORS[name].min_group <= size]
    labels = labels_of(every)
    found = group_numbers(groups, every, size, weights)
    rows = tuple(
        replayed_row(label, one, numbers, weights) for label, one, numbers in zip(labels, every, found, strict=True)
    )
    label = weights if isinstance(weights, str) else _name_of(weights, "weights")
    unit = unit_of([group.record.step for group in groups])
    return ReplayedRun(groups=len(groups), run_size=run_size, group_size=size, weights=label, rows=rows, unit=unit)


def _name_of(function: Callable[..., Tensor], otherwise: str) -> str:
    name = getattr(function, "__name__", otherwise)
    return otherwise if name == "<lambda>" else name


def labels_of(estimators: Sequence[str | RolloutAdvantages]) -> list[str]:
    """Names of rows and functions, told apart by numbers where they are equal.

    Example:
        >>> labels_of(["rloo", torch.sign, lambda rewards: rewards, lambda rewards: -rewards])
        ['rloo', 'sign', 'function', 'function 2']
    """
    labels: list[str] = []
    for one in estimators:
        name = one if isinstance(one, str) else _name_of(one, "function")
        taken = {*labels, *(ESTIMATORS if not isinstance(one, str) else ())}
        numbered = (f"{name} {number}" for number in range(2, len(estimators) + 3))
        labels.append(name if name not in taken else next(label for label in numbered if label not in taken))
    return labels


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
        others = sum(group.size != size for group in stored)
        got = f"{len(groups)} in the last third, of {size} rollouts{f', and {others} of other sizes' * (others > 0)}"
        remedy = "Measure more steps, or larger groups."
        fail(_CALLER, "a run needs measured groups of four rollouts or more with all rewards", got, remedy)
    return groups


def can_replay(name: str) -> bool:
    """Whether the groups of a run hold every input of an estimator."""
    row = ESTIMATORS[name]
    return row.level == "group" and set(row.needs) <= STORED_INPUTS


def require_replayable(name: str | RolloutAdvantages, size: int) -> None:
    """Raise unless an estimator can be replayed on parts of `size` rollouts; functions are checked when called."""
    if callable(name):
        return
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

    def __init__(self, groups: Sequence[StoredGroup], weights: str | RolloutFactors = UNWEIGHTED) -> None:
        records = [group.record for group in groups]
        self.factors = WEIGHTS[weights] if isinstance(weights, str) else weights
        self.rewards = torch.stack([record.rewards.double() for record in records])  # (P, R)
        self.lengths = torch.stack([record.lengths for record in records])
        self.taken = torch.stack([record.advantages.double() for record in records])
        self.grams = torch.stack([record.gram.double() for record in records if record.gram is not None])
        self.steps = torch.tensor([record.step for record in records])

    def advantages(self, name: str | RolloutAdvantages, places: Tensor) -> Tensor:
        """`(P, G, r)` weighted advantages if every group consisted of its rollouts at one of the `places` `(G, r)`."""
        size = places.shape[-1]
        at_once = max(1, MOST_PAIRS // (len(self.rewards) * size**2))  # some estimators compare all pairs of rollouts
        return torch.cat([self._advantages_at(name, several) for several in places.split(at_once)], dim=1)

    def _advantages_at(self, name: str | RolloutAdvantages, places: Tensor) -> Tensor:
        count = len(places)
        rewards, lengths = (values[:, places].flatten(0, 1) for values in (self.rewards, self.lengths))
        found = checked_advantages(name, rewards) if callable(name) else self._estimated(name, rewards, places)
        factors = checked_factors(self.factors(rewards.clone(), lengths.clone(), found.clone()), found)
        return (found * factors).unflatten(0, (-1, count))

    def _estimated(self, name: str, rewards: Tensor, places: Tensor) -> Tensor:
        row, count = ESTIMATORS[name], len(places)
        energies = self.grams.diagonal(dim1=1, dim2=2)
        stored = {"lengths": self.lengths, "score_energies": energies, "outcomes": self.rewards}
        inputs = {key: stored[key][:, places].flatten(0, 1) for key in row.needs}  # (P G, r)
        if not row.couples_prompts:
            return estimate(name, rewards, **inputs)
        _, step_of = self.steps.unique(return_inverse=True)  # prompts of one step meet, with rollouts at equal places
        batches = (step_of[:, None] * count + torch.arange(count)).flatten()
        return row.fn(rewards, **inputs, batches=batches)

    def advantages_of_parts(self, name: str | RolloutAdvantages, parts: Tensor) -> Tensor:
        """`(P, K, 2, r)` advantages in both parts of every split `(K, 2, r)`."""
        return self.advantages(name, parts.flatten(0, 1)).unflatten(1, parts.shape[:2])

    def whole_advantages(self, name: str | RolloutAdvantages) -> Tensor:
        """`(P, R)` advantages in the whole groups."""
        return self.advantages(name, torch.arange(self.rewards.shape[1])[None])[:, 0]

    def spectrum(self, advantages: Tensor) -> dict[str, Tensor]:
        """`(P,)` metrics of the groups and those of orthogonal scores; `nan` without an advantage other than 0."""
        live = advantages.any(dim=1)
        grams, found = self.grams[live], {}
        for end, several in (("", grams), ("_null", torch.diag_embed(grams.diagonal(dim1=1, dim2=2)))):
            spectra = group_spectra(several, advantages[live], psd_rtol=MEASURED_RTOL)
            for name, metric in SPECTRUM.items():
                values = torch.full((len(live),), torch.nan, dtype=torch.float64)
                values[live] = metric(spectra).double()
                found[name + end] = values
        return found


def checked_advantages(function: RolloutAdvantages, rewards: Tensor) -> Tensor:
    """What a function makes of rewards `(P, r)`.

    Raises:
        ScoregramError: If it does not return `(P, r)` finite advantages, or if a row depends on other rows.
    """
    words = f"the estimator {_name_of(function, 'function')} must return"
    found, half = _numbers(function(rewards.clone()), rewards.shape, words), len(rewards) // 2
    if half and not torch.allclose(function(rewards[half:].clone()).double(), found[half:], rtol=1e-9):
        remedy = "Compare the rollouts of a row among themselves: use dim=1 in means and deviations."
        fail(_CALLER, "an estimator must make each row of advantages from the same row of rewards", "others", remedy)
    return found


def checked_factors(factors: object, advantages: Tensor) -> Tensor:
    """Factors or a mask of the advantages `(P, r)`, in float64.

    Raises:
        ScoregramError: If they are not finite, or neither `(P, r)` nor `(P, 1)`.
    """
    return _numbers(factors, advantages.shape, "weights must return", or_column=True)


def _numbers(found: object, shape: Sequence[int], requirement: str, *, or_column: bool = False) -> Tensor:
    shapes = [tuple(shape), *([(shape[0], 1)] if or_column else [])]
    words = f"{requirement} a tensor {' or '.join(map(str, shapes))}"
    remedy = "Return one number for each rollout."
    if not isinstance(found, Tensor):
        return fail(_CALLER, words, type(found).__name__, remedy)
    if tuple(found.shape) not in shapes:
        fail(_CALLER, words, tuple(found.shape), remedy)
    if not bool(found.isfinite().all()):
        fail(_CALLER, f"{requirement} finite numbers", "nan or inf", remedy)
    return found.double()


def group_numbers(
    groups: Sequence[StoredGroup],
    estimators: Sequence[str | RolloutAdvantages],
    size: int,
    weights: str | RolloutFactors = UNWEIGHTED,
) -> list[GroupNumbers]:
    """What the numbers of each estimator are pooled from, with parts of `size` rollouts."""
    table, plain = ReplayedGroups(groups, weights), ReplayedGroups(groups)
    parts = disjoint_parts(table.rewards.shape[1], size)
    every = torch.stack(
        [plain.advantages_of_parts(REFERENCE, parts), *(table.advantages_of_parts(one, parts) for one in estimators)]
    )
    several = [
        split_products(grams, advantages, parts)
        for grams, advantages in zip(table.grams.split(AT_ONCE), every.split(AT_ONCE, dim=1), strict=True)
    ]
    signal = torch.cat([one.signal for one in several], dim=1).numpy()
    noise = torch.cat([one.noise for one in several], dim=1).numpy()
    across = torch.cat([one.across[0] for one in several], dim=1).numpy()
    found, base = [], plain.whole_advantages(REFERENCE)
    for place, one in enumerate(estimators, start=1):
        whole = table.whole_advantages(one)
        is_blind = is_multiple(every[place], every[0]) and not is_multiple(whole, base)
        with_taken, squared, taken_squared = (
            torch.einsum("pi,pij,pj->p", left, table.grams, right).numpy()
            for left, right in ((whole, table.taken), (whole, whole), (table.taken, table.taken))
        )
        found.append(
            GroupNumbers(
                steps=table.steps.numpy(),
                signal=signal[place],
                noise=noise[place],
                across=across[place],
                reference_signal=signal[0],
                reference_noise=noise[0],
                with_taken=with_taken,
                squared=squared,
                taken_squared=taken_squared,
                spectrum={name: values.numpy() for name, values in table.spectrum(whole).items()},
                is_blind=is_blind,
            )
        )
    return found


def is_multiple(values: Tensor, others: Tensor) -> bool:
    """Whether `values` are the same multiple of `others` everywhere."""
    a, b = values.flatten(), others.flatten()
    energy = float(b @ b)
    return energy > 0 and float((a - (a @ b) / energy * b).norm()) <= PROPORTIONAL * float(a.norm())


def replayed_row(
    label: str, estimator: str | RolloutAdvantages, numbers: GroupNumbers, weights: str | RolloutFactors = UNWEIGHTED
) -> Replay:
    """The row of an estimator: a comparison with the reference is 1 for itself, and unknown without a signal."""
    found, is_plain = pooled_numbers(numbers), weights == UNWEIGHTED
    is_unbiased = is_plain and isinstance(estimator, str) and ESTIMATORS[estimator].unbiased
    is_reference = is_plain and estimator == REFERENCE
    is_compared = found.is_resolved and not numbers.is_blind
    return Replay(
        estimator=label,
        variance=found.variance,
        bias=Estimate(0.0, 0.0, 0.0) if is_unbiased else found.bias if found.is_resolved else UNKNOWN,
        snr=found.snr,
        efficiency=ITSELF if is_reference else found.efficiency if is_compared else UNKNOWN,
        direction=ITSELF if is_reference else found.direction if found.is_resolved else UNKNOWN,
        taken=found.taken,
        **found.spectrum,
    )


def extrapolated_reference(groups: Sequence[StoredGroup], run_size: int, size: int) -> ReplayedRun:
    """`REFERENCE` from groups of any size, by the moments of its error in place of two parts of a group."""
    numbers = extrapolated_numbers(groups, size)
    return ReplayedRun(
        groups=len(groups),
        run_size=run_size,
        group_size=size,
        weights=UNWEIGHTED,
        rows=(replayed_row(REFERENCE, REFERENCE, numbers),),
        unit=unit_of(numbers.steps),
        is_extrapolated=True,
    )


def extrapolated_numbers(groups: Sequence[StoredGroup], size: int) -> GroupNumbers:
    """What the numbers of `REFERENCE` from groups of any `size` are pooled from.

    The signal is the U-statistic of `|g(x)|²`, the noise `leave_one_out_mse`; both hold on-policy. What is about whole
    groups stays that of the run's groups.
    """
    (numbers,) = group_numbers(groups, (REFERENCE,), 2)
    table = ReplayedGroups(groups)
    moments = group_moments(table.grams, table.rewards)
    signal, noise = moments.gradient_squared.numpy(), leave_one_out_mse(moments, size).numpy()
    return replace(numbers, signal=signal, noise=noise, across=signal, reference_signal=signal, reference_noise=noise)


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
