"""The metrics of one group: its outcome, its rewards, and its spectrum next to its null model."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from scoregram.bootstrap import clustered_mean
from scoregram.checks import ScoregramError
from scoregram.exhibits import Estimate
from scoregram.runs import GroupRecord, Rows
from scoregram.spectra import (
    MEASURED_RTOL,
    SPECTRUM_METRICS,
    effective_rank_bounds,
    mean_pairwise_cosine,
    singular_values,
)
from scoregram.statistics import group_outcomes, update_coherence, update_norm
from scoregram.types import GramMatrix, GroupAdvantages, GroupRewards, Rewards

Outcome = Literal["live", "all right", "all wrong", "tied", "unjudged"]
"""The outcome of a group; every group has exactly one.

`live`: the rewards that were given differ by more than rounding. Dead groups: `all right`, `all wrong`, or `tied` at
another reward. `unjudged`: no rollout has a reward. Rollouts without a reward are ignored.
"""

SPECTRAL = ("effective_rank", "top1_fraction", "stable_rank", "participation_ratio", "numerical_rank")
"""Metrics of a group's spectrum that are stored for every measured group, each beside its orthogonal null."""
OF_SCORES = ("cosine", "update_norm", "score_norm")
"""Metrics of a group that are defined by scores: `nan` where rows are gradients of a loss, which include weights."""


@dataclass(frozen=True, kw_only=True)
class GroupReading:
    """The metrics of one measured group; `nan` where undefined, such as the rank of a dead group.

    The stacked matrix has the rows `A_i ψ_i`. `…_orthogonal` is the same number for orthogonal scores of the
    same norms: the null model. Similarity between rollouts can only lower the effective rank below it.
    """

    effective_rank: float
    """`(Σσ)² / Σσ²` of the stacked matrix: over how many directions its rows spread."""
    top1_fraction: float
    """Share of the energy in the strongest direction."""
    stable_rank: float
    participation_ratio: float
    numerical_rank: float
    effective_rank_orthogonal: float
    top1_fraction_orthogonal: float
    stable_rank_orthogonal: float
    participation_ratio_orthogonal: float
    numerical_rank_orthogonal: float
    cosine: float
    """Mean cosine between the scores of two rollouts."""
    coherence: float
    """Share of the rollouts' gradient energy that survives being summed."""
    update_norm: float
    """`|Σ A_i ψ_i / R|`."""
    score_norm: float
    """Mean of `|ψ_i|`."""
    reward_mean: float
    """Over the rollouts that have a reward."""
    reward_std: float
    """Population standard deviation over the rollouts that have a reward."""

    def scalars(self) -> dict[str, float]:
        """Name → number, as stored with a group."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def of_rows(self, rows: Rows) -> "GroupReading":
        """The same with `nan` in place of what these rows do not define."""
        return replace(self, **dict.fromkeys(OF_SCORES, math.nan)) if rows == "loss" else self


SHARE_COLUMN = "update_share"
"""Statistic of a group: its share in the squared norm of the update of its step, `⟨u_p, u⟩ / |u|²`."""
READING_NAMES = frozenset(one.name for one in fields(GroupReading))
"""Statistics that a measured group is stored with."""


def row_factors(advantages: Float[Tensor, "*prompts rollouts"], rows: Rows) -> Float[Tensor, "*prompts rollouts"]:
    """`(…, R)` factor of each row in the stacked matrix: the advantage of a score, 1 for a gradient of a loss."""
    return torch.ones_like(advantages) if rows == "loss" else advantages


def read_group(
    gram: GramMatrix, rewards: GroupRewards, advantages: GroupAdvantages, *, rows: Rows = "scores"
) -> GroupReading:
    """The metrics of one measured group.

    Args:
        gram: `(R, R)`. Score Gram `K`, or the Gram of gradients of a loss.
        rewards: `(R,)`. `nan` for a rollout without a reward.
        advantages: `(R,)`. 0 for a rollout that adds nothing to the update; not used if rows are gradients of a loss.
        rows: What the rows of `gram` are. `OF_SCORES` is `nan` for gradients of a loss.

    Raises:
        ScoregramError: If `gram` is not a Gram up to the rounding of a measurement.
    """
    both, factors = (gram, torch.diag(gram.diagonal())), row_factors(advantages, rows)
    spectra = torch.stack([singular_values(k, factors, psd_rtol=MEASURED_RTOL) for k in both])  # (2, R)
    pairs = {name: SPECTRUM_METRICS[name].fn(spectra).tolist() for name in SPECTRAL}
    judged = rewards[~rewards.isnan()]
    reading = GroupReading(
        **{name: float(measured) for name, (measured, _) in pairs.items()},
        **{f"{name}_orthogonal": float(null) for name, (_, null) in pairs.items()},
        cosine=mean_pairwise_cosine(gram, rtol=MEASURED_RTOL),
        coherence=update_coherence(gram, factors),
        update_norm=update_norm(gram, factors / len(factors), rtol=MEASURED_RTOL),
        score_norm=float(gram.diagonal().clamp(min=0).sqrt().mean()),
        reward_mean=float(judged.mean()) if len(judged) else math.nan,
        reward_std=float(judged.std(correction=0)) if len(judged) else math.nan,
    )
    return reading.of_rows(rows)


def outcomes_of(rewards: Rewards) -> list[Outcome]:
    """The outcome of every group, from `(P, R)` rewards that are `nan` where missing."""
    outcomes = group_outcomes(rewards)
    masks: Mapping[Outcome, Tensor] = {
        "live": outcomes.alive,
        "all right": outcomes.all_right,
        "all wrong": outcomes.all_wrong,
        "tied": outcomes.tied,
        "unjudged": outcomes.unjudged,
    }
    names = list(masks)
    place = torch.stack(tuple(masks.values())).to(torch.uint8).argmax(dim=0)  # each group has exactly one
    return [names[one] for one in place.tolist()]


def logged_live_share(line: Mapping[str, Any]) -> float:
    """Share of live groups among those with a reward, from the scalars of a step; `nan` if not logged, or none has one.

    Runs of an older version do not log how many groups have a reward; there all groups count.
    """
    live, judged = line.get("live_groups", math.nan), line.get("judged_groups", line.get("groups", 0))
    return live / judged if judged > 0 else math.nan


@dataclass(frozen=True, eq=False)
class StoredGroup:
    """A group read from a run folder, and everything derived from its record, computed on first access."""

    record: GroupRecord

    @cached_property
    def size(self) -> int:
        """Rollouts of the group."""
        return self.record.rewards.numel()

    @cached_property
    def outcome(self) -> Outcome:
        """The outcome of this group."""
        return outcomes_of(self.record.rewards.double()[None])[0]

    @property
    def is_live(self) -> bool:
        """Whether the rewards that were given differ."""
        return self.outcome == "live"

    @cached_property
    def right(self) -> int | None:
        """Rollouts with reward 1; None unless every rollout has a reward of 0 or 1."""
        rewards = self.record.rewards
        is_binary = len(rewards) > 0 and bool(((rewards == 0) | (rewards == 1)).all())
        return int(rewards.sum()) if is_binary else None

    @cached_property
    def mean_reward(self) -> float:
        """Mean over the rollouts that have a reward; `nan` if none has."""
        return float(self.record.rewards.nanmean())

    @cached_property
    def has_all_rewards(self) -> bool:
        """Whether every rollout has a finite reward."""
        return bool(self.record.rewards.isfinite().all())

    @property
    def is_complete(self) -> bool:
        """Whether its scores were measured and every rollout has a reward: unbiased moments need both."""
        has_scores = self.record.gram is not None and self.record.rows == "scores"
        return has_scores and self.has_all_rewards

    @cached_property
    def reading(self) -> GroupReading | None:
        """Its metrics, as stored, else from its Gram; None without a valid Gram and finite advantages."""
        record = self.record
        if record.statistics.keys() >= READING_NAMES:
            stored = {name: float(record.statistics[name]) for name in READING_NAMES}
            return GroupReading(**stored).of_rows(record.rows)
        if record.gram is None:
            return None
        try:
            return read_group(record.gram, record.rewards, record.advantages, rows=record.rows)
        except ScoregramError:  # advantages that are not finite, or a matrix that is not a Gram
            return None

    @property
    def has_spectrum(self) -> bool:
        """Whether it was measured and some rollout of it has a nonzero row."""
        return self.reading is not None and not math.isnan(self.reading.effective_rank)

    @cached_property
    def nonzero_rows(self) -> int:
        """Rollouts with a nonzero row `A_i ψ_i`: the largest rank that the stacked matrix can have."""
        record = self.record
        if record.gram is None:
            return 0
        return int(((row_factors(record.advantages, record.rows) != 0) & (record.gram.diagonal() > 0)).sum())

    def row_energies(self) -> Float[Tensor, " rollouts"]:
        """Squared norm of each row of the stacked matrix: `A_i² K_ii`, or `K_ii` of gradients of a loss.

        Empty without a Gram.
        """
        record = self.record
        if record.gram is None:
            return torch.zeros(0, dtype=torch.float64)
        return row_factors(record.advantages.double(), record.rows).square() * record.gram.diagonal().double()

    @property
    def update_share(self) -> float:
        """Its share in the squared norm of the update of its step; `nan` if K between prompts was not measured.

        As `prompt_shares`: negative if it points against the update, above 1 if others do.
        """
        return float(self.record.statistics.get(SHARE_COLUMN, math.nan))

    @cached_property
    def advantage_power(self) -> float:
        """`Σ A_i²` with the advantages, and 0 among them, scaled to a range of width 1; 0 if all of them are 0.

        The squared norm of its gradient for scores of norm 1 at right angles, whatever the scale of its rewards: with
        rewards of 0 and 1 and their mean as baseline `R p (1 - p)`, so little for a group that is nearly dead.
        """
        advantages = self.record.advantages.double()
        ends = (float(advantages.clamp(max=0).min()), float(advantages.clamp(min=0).max())) if self.size else (0.0, 0.0)
        width = ends[1] - ends[0]
        return float((advantages / width).square().sum()) if width > 0 else 0.0

    @cached_property
    def possible_ranks(self) -> tuple[float, float]:
        """Smallest and largest effective rank that top-1 fraction and number of nonzero rows allow; `nan` if unknown.

        The same as in `feasible_intervals`, but for this metric alone, to save time: a run has many groups.
        """
        reading, rows = self.reading, self.nonzero_rows
        if reading is None or math.isnan(reading.top1_fraction) or not rows or reading.numerical_rank > rows:
            return math.nan, math.nan  # the stored metrics belong to other weights than the advantages
        try:
            return effective_rank_bounds(reading.top1_fraction, rows)
        except ScoregramError:  # the stored statistics do not match the stored advantages
            return math.nan, math.nan


GROUPS_IN_A_STRETCH = 8
"""Groups that a stretch of steps needs before it ends. Difficulty is judged within stretches: a success rate that
changes in time must not look like prompts that differ."""


def step_stretches(counts: Sequence[int]) -> list[slice]:
    """Places of consecutive steps with 8 groups or more together; the last ones with fewer join those before.

    Args:
        counts: Groups of each step, in order.

    Example:
        >>> [(part.start, part.stop) for part in step_stretches([4, 4, 16, 4, 4, 4])]
        [(0, 2), (2, 3), (3, 6)]
    """
    ends, groups = [], 0
    for place, count in enumerate(counts):
        groups += count
        if groups >= GROUPS_IN_A_STRETCH:
            ends.append(place + 1)
            groups = 0
    edges = [0, *ends[:-1], len(counts)]
    return [slice(start, stop) for start, stop in pairwise(edges)] if counts else []


def alike_chance(alike: int, rollouts: int, count: int) -> float:
    """Chance that `count` of the rollouts are all among `alike` of them, whatever these `count` are.

    `Π_{i<n} (alike - i) / (rollouts - i)`: every arrangement is equally likely if all prompts are equally hard. With
    `n` independent rollouts it has the mean `pⁿ` exactly, while `(alike / rollouts)ⁿ` is larger on average.

    Example:
        >>> alike_chance(3, 6, 2)  # 3/6 · 2/5
        0.2
    """
    if count > rollouts:
        return 0.0
    return math.prod(max(alike - i, 0) / (rollouts - i) for i in range(count))


def with_rewards(groups: Sequence[StoredGroup]) -> Sequence[StoredGroup]:
    """The same groups, with all that depends on rewards alone computed at once: a run has many groups."""
    by_size: dict[int, list[StoredGroup]] = {}
    for group in groups:
        by_size.setdefault(group.record.rewards.numel(), []).append(group)
    for size, several in by_size.items():
        rewards = torch.stack([group.record.rewards for group in several]).double()  # (P, R)
        is_binary = ((rewards == 0) | (rewards == 1)).all(dim=1) & (size > 0)
        right = [
            int(count) if known else None
            for count, known in zip(rewards.nansum(1).tolist(), is_binary.tolist(), strict=True)
        ]
        finite = rewards.isfinite().all(dim=1).tolist()
        columns = outcomes_of(rewards), right, rewards.nanmean(dim=1).tolist(), finite
        for group, outcome, count, mean, has_all in zip(several, *columns, strict=True):
            # where `cached_property` keeps them
            known = {"outcome": outcome, "right": count, "mean_reward": mean, "has_all_rewards": has_all}
            group.__dict__.update(known, size=size)
    return groups


def with_nonzero_rows(groups: Sequence[StoredGroup]) -> Sequence[StoredGroup]:
    """The same groups, with `nonzero_rows` of all that have a Gram computed at once."""
    by_size: dict[tuple[int, Rows], list[StoredGroup]] = {}
    for group in groups:
        if group.record.gram is not None:
            by_size.setdefault((group.size, group.record.rows), []).append(group)
    for (_, rows), several in by_size.items():
        norms = torch.stack([group.record.gram.diagonal() for group in several if group.record.gram is not None])
        factors = row_factors(torch.stack([group.record.advantages for group in several]), rows)
        for group, count in zip(several, ((factors != 0) & (norms > 0)).sum(1).tolist(), strict=True):
            group.__dict__["nonzero_rows"] = count
    return groups


def mean_over_groups(readings: Sequence[Mapping[str, float]], *, rows: Rows = "scores") -> dict[str, float]:
    """`group/NAME` → mean over the groups in which the number is defined, `nan` if there is none.

    `OF_SCORES` is left out where rows are gradients of a loss.
    """
    absent = OF_SCORES if rows == "loss" else ()
    names = dict.fromkeys(name for reading in readings for name in reading if name not in absent)
    means = {}
    for name in names:
        values = [reading[name] for reading in readings if not math.isnan(reading.get(name, math.nan))]
        means[f"group/{name}"] = sum(values) / len(values) if values else math.nan
    return means


@dataclass(frozen=True)
class GroupCosines:
    """Mean cosines between the scores of a group's rollouts."""

    prompt: str
    right_right: float
    right_wrong: float


def mean_cosine(groups: Sequence[GroupCosines], name: str) -> Estimate:
    """Mean of `right_right` or `right_wrong` over groups, with an interval over prompts."""
    return clustered_mean([getattr(one, name) for one in groups], [one.prompt for one in groups])


def group_cosines(groups: Iterable[StoredGroup]) -> list[GroupCosines]:
    """Cosines of each measured group that has two or more right rollouts and a wrong one, and no score of zero."""
    found = []
    for group in groups:
        record = group.record
        if record.gram is None or not group.right or group.right < 2 or group.right == group.size:
            continue
        gram = record.gram.double()
        norms = gram.diagonal().clamp(min=0).sqrt()
        if bool((norms > 0).all()):
            cosine, is_right = gram / norms[:, None] / norms[None, :], record.rewards == 1
            among_right = cosine[is_right][:, is_right]
            pairs = group.right * (group.right - 1)
            right_right = float((among_right.sum() - among_right.diagonal().sum()) / pairs)
            right_wrong = float(cosine[is_right][:, ~is_right].mean())
            found.append(GroupCosines(record.prompt_id, right_right, right_wrong))
    return found
