"""The metrics of a run: its steps and groups, read once from the folder, and its last third with intervals.

Any part of a run may be missing: steps may have no Gram, a run may have no evaluation or no groups, and its files may
still be growing.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from scoregram.bootstrap import bootstrap_estimate, mean_estimate
from scoregram.exhibits import Estimate
from scoregram.reading.group import StoredGroup
from scoregram.reading.trust import Trust, needs_gram, trust_of
from scoregram.runs import GroupRecord, Rows, Run, own_name
from scoregram.statistics import (
    NoiseComponents,
    UpdatePower,
    baseline_saving,
    group_moments,
    mixed_probability,
    noise_scale,
    optimal_group_size,
    signal_to_noise,
)

Line = Mapping[str, float | int | bool]
"""The scalars of one step, from `metrics.jsonl`."""
EvaluationRewards = Mapping[str, Mapping[int, Mapping[str, float]]]
"""Mean reward of every test problem, by kind of rollouts, step of the evaluation, and problem."""
SAMPLED_TEST, GREEDY_TEST = "test", "test, greedy"
"""Kinds of groups that hold the rewards of an evaluation."""


def split_kinds(split: str = "") -> tuple[str, str]:
    """Kinds of the sampled and of the greedy rollouts of an evaluation on a held-out split, or on the test problems.

    Example:
        >>> split_kinds("composition")
        ('test composition', 'test composition, greedy')
    """
    return (f"test {split}", f"test {split}, greedy") if split else (SAMPLED_TEST, GREEDY_TEST)


UNKNOWN_ESTIMATE = Estimate(math.nan)


@dataclass(frozen=True, eq=False)
class RunReading:
    """A run, with everything that its report, advice and table need."""

    config: Mapping[str, Any]
    notes: tuple[str, ...]
    """Remarks from reading the folder, such as a file that is still being written."""
    lines: Sequence[Line]
    groups: Sequence[StoredGroup]
    """Training groups, in order of step; if there are none, all groups but those of evaluations."""
    tests: EvaluationRewards = field(default_factory=dict)
    remarks: Mapping[str, str] = field(default_factory=dict)
    """Kind → a sentence that a reader must know before trusting the numbers, as stored with the run."""

    @cached_property
    def trust(self) -> Trust:
        """How far the numbers can be trusted; no mean includes a step in `trust.failed`."""
        return trust_of(self.lines, self.groups, self.last_third, self.remarks)

    @cached_property
    def rows(self) -> Rows:
        """What the rows of the measured Grams are: scores, or gradients of a loss, which include their weights."""
        return "loss" if any(group.record.rows == "loss" for group in self.groups) else "scores"

    @cached_property
    def has_whole_groups(self) -> bool:
        """Whether groups hold all rollouts of their prompt; a step of a loss may hold only some of them."""
        stated = self.config.get("group_size")
        return self.rows == "scores" or all(group.size == stated for group in self.groups)

    @cached_property
    def steps(self) -> list[int]:
        """Steps at which the policy was trained or a group was recorded."""
        trained = {int(line["step"]) for line in self.lines if "reward" in line or "skipped" in line}
        return sorted(trained | {group.record.step for group in self.groups})

    @cached_property
    def last_third(self) -> range:
        """Range of the steps in the last third of the run; empty for a run without steps."""
        if not self.steps:
            return range(0)
        last = self.steps[-math.ceil(len(self.steps) / 3) :]
        return range(last[0], last[-1] + 1)

    @cached_property
    def last_groups(self) -> list[StoredGroup]:
        """Groups of the last third."""
        return [group for group in self.groups if group.record.step in self.last_third]

    @cached_property
    def is_withheld(self) -> bool:
        """Whether the last third has no means from the Gram, because the self-check of one of its steps failed."""
        return any(step in self.last_third for step in self.trust.failed)

    @cached_property
    def last_measured(self) -> list[StoredGroup]:
        """Groups of the last third whose Grams may be averaged; none where these means are withheld."""
        return [] if self.is_withheld else self.last_groups

    @cached_property
    def last_lines(self) -> list[Line]:
        """Scalars of the steps in the last third."""
        return [line for line in self.lines if int(line["step"]) in self.last_third]

    @cached_property
    def group_size(self) -> int | None:
        """The most common number of rollouts per prompt, else the config's; None if neither is known."""
        sizes = Counter(group.size for group in self.groups if self.has_whole_groups)
        if sizes:
            return sizes.most_common(1)[0][0]
        stated = self.config.get("group_size")
        return stated if isinstance(stated, int) else None

    @cached_property
    def batch_size(self) -> float:
        """Mean number of rollouts per step in the last third; `nan` without groups."""
        per_step = Counter[int]()
        for group in self.last_groups:
            per_step[group.record.step] += group.size
        return sum(per_step.values()) / len(per_step) if per_step else math.nan

    @property
    def complete_prompts(self) -> int:
        """Prompts per step with every reward, which noise needs: mean over the last third, rounded; 1 if none.

        Steps with fewer than two are left out: they have no estimate of the noise.
        """
        per_step = Counter(group.record.step for group in _complete_groups(self.last_groups, self.group_size or 0))
        counts = [count for count in per_step.values() if count > 1]
        return round(sum(counts) / len(counts)) if counts else 1

    def series(self, name: str, *, failed: bool = False) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Steps that logged a scalar, and its values; both empty if no step did, or if it was never defined.

        A scalar from the Gram is given for the steps whose self-check did not fail, with `failed` for the others. If no
        line has the name, because another trainer uses it, `scoregram/NAME` is read.
        """
        key = name if any(name in line for line in self.lines) else own_name(name)
        pairs = [
            (float(line["step"]), float(line[key]))
            for line in self.lines
            if key in line and (needs_gram(name) and line["step"] in self.trust.failed) == failed
        ]
        if all(math.isnan(value) for _, value in pairs):
            return (), ()
        return tuple(step for step, _ in pairs), tuple(value for _, value in pairs)

    @cached_property
    def live_share(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Steps that logged their groups, and the share of live ones."""
        pairs = [
            (float(line["step"]), line["live_groups"] / line["groups"])
            for line in self.lines
            if line.get("groups", 0) > 0 and "live_groups" in line
        ]
        return tuple(step for step, _ in pairs), tuple(share for _, share in pairs)

    def last_values(self, name: str) -> list[float]:
        """Defined values of a scalar in the last third; none where means from the Gram are withheld."""
        if needs_gram(name) and self.is_withheld:
            return []
        values = [float(line[name]) for line in self.last_lines if name in line]
        return [value for value in values if not math.isnan(value)]

    def last_mean(self, name: str) -> float:
        """Mean of a scalar over the last third, `nan` if it is never defined there."""
        values = self.last_values(name)
        return sum(values) / len(values) if values else math.nan

    def success_rates(self) -> list[float]:
        """Success rate of every prompt of the last third, `(right + ½) / (rollouts + 1)`.

        Empty unless all rewards are 0 or 1. Without the ½, the groups of a prompt that was never or always solved
        would count as dead at every size.
        """
        seen: dict[str, list[int]] = {}
        for group in self.last_groups:
            if group.right is None:
                return []
            counts = seen.setdefault(group.record.prompt_id, [0, 0])
            counts[0] += group.right
            counts[1] += group.size
        return [(right + 0.5) / (rollouts + 1) for right, rollouts in seen.values()]

    @cached_property
    def update_power(self) -> UpdatePower:
        """Signal and noise of the run's own updates, each a mean over all measured steps; `nan` without any.

        A ratio of the two means is far less noisy than a mean of ratios: the signal of one step is often below 0.
        """
        signal, noise = (self.series(f"gram/update_{name}")[1] for name in ("signal", "noise"))
        pairs = [pair for pair in zip(signal, noise, strict=True) if not any(map(math.isnan, pair))]
        if not pairs:
            return UpdatePower(math.nan, math.nan)
        return UpdatePower(*(float(mean) for mean in np.mean(pairs, axis=0)))

    @cached_property
    def rank_means(self) -> tuple[float, float]:
        """Mean effective rank and mean of its orthogonal null, over all groups with a spectrum; `nan` without any."""
        shown = [group for group in self.groups if group.has_spectrum and group.record.step not in self.trust.failed]
        names = ("effective_rank", "effective_rank_orthogonal")
        rank, null = (float(_column(shown, name).mean()) if shown else math.nan for name in names)
        return rank, null

    @cached_property
    def summary(self) -> "RunSummary":
        """The numbers of the last third."""
        return run_summary(self)


def read_run(run: Run) -> RunReading:
    """Everything in a run folder, in one pass over it."""
    tests: list[GroupRecord] = []
    records: list[GroupRecord] = []
    for record in run.groups(layers=False):
        (tests if record.kind.startswith(SAMPLED_TEST) else records).append(record)
    trained = [record for record in records if record.kind == "train"] or records
    return RunReading(
        config=run.config,
        notes=run.notes,
        lines=run.metrics(),
        groups=[StoredGroup(record) for record in trained],
        tests=evaluation_rewards(tests),
        remarks=run.remarks,
    )


def evaluation_rewards(tests: Iterable[GroupRecord]) -> EvaluationRewards:
    """Rewards of evaluations, from groups whose kinds are those of `split_kinds`."""
    rewards: dict[str, dict[int, dict[str, float]]] = {SAMPLED_TEST: {}, GREEDY_TEST: {}}
    for group in tests:
        by_step = rewards.setdefault(group.kind, {})
        by_step.setdefault(group.step, {})[group.prompt_id] = float(group.rewards.nanmean())
    return rewards


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Metrics of the last third of a run with 95 % intervals; `nan` where the run lacks the data."""

    groups: int
    live: int
    """Groups with a spectrum."""
    noise_steps: int
    """Steps from which noise components were pooled."""
    reward: Estimate
    tested: Estimate
    """Mean reward on test problems at the last evaluation, sampled as in training."""
    dead: Estimate
    """Share of groups that are not live, among those in which some rollout has a reward."""
    equally_hard_dead: float
    """Probability of a dead group if every prompt had the overall success rate; `nan` unless rewards are 0 or 1."""
    effective_rank: Estimate
    effective_rank_null: Estimate
    rank_difference: Estimate
    """Measured minus null, per group."""
    least_rank: float
    most_rank: float
    top1: Estimate
    top1_null: Estimate
    cosine: Estimate
    baseline_saving: Estimate
    noise_scale: Estimate
    snr: Estimate
    best_group_size: Estimate
    components: NoiseComponents | None
    """Pooled over steps."""


def run_summary(run: RunReading) -> RunSummary:
    """The numbers of the last third: means over groups, noise components pooled over steps."""
    groups = run.last_measured
    live = [group for group in groups if group.has_spectrum]
    rank, null = _column(live, "effective_rank"), _column(live, "effective_rank_orthogonal")
    ends = np.array([group.possible_ranks for group in live]).reshape(-1, 2)
    rows = noise_rows(run)
    size = run.group_size or 0
    return RunSummary(
        groups=len(run.last_groups),
        live=len(live),
        noise_steps=len(rows),
        reward=_mean_reward(run),
        tested=_last_tested(run.tests),
        dead=_dead_share(run),
        equally_hard_dead=_equally_hard_dead(run),
        effective_rank=mean_estimate(rank),
        effective_rank_null=mean_estimate(null),
        rank_difference=mean_estimate(rank - null),
        least_rank=mean_estimate(ends[:, 0]).value,
        most_rank=mean_estimate(ends[:, 1]).value,
        top1=mean_estimate(_column(live, "top1_fraction")),
        top1_null=mean_estimate(_column(live, "top1_fraction_orthogonal")),
        cosine=mean_estimate(_column(groups, "cosine")),
        baseline_saving=_saving_estimate(run),
        noise_scale=_pooled_estimate(rows, lambda noise: noise_scale(noise, size)),
        snr=_pooled_estimate(rows, lambda noise: signal_to_noise(noise, run.complete_prompts, size)),
        best_group_size=_pooled_estimate(rows, lambda noise: optimal_group_size(noise).exact),
        components=NoiseComponents(*rows.mean(axis=0).tolist()) if len(rows) else None,
    )


def noise_rows(run: RunReading) -> np.ndarray:
    """`(steps, 4)`: `|g|²`, `c1`, `c2`, `c3` of every step of the last third that has a Gram between prompts."""
    by_step: dict[int, list[StoredGroup]] = {}
    for group in run.last_measured:
        by_step.setdefault(group.record.step, []).append(group)
    names = ("gram/gradient_squared", "gram/between_prompts", "gram/within_prompt")
    rows = []
    for line in run.last_lines:
        known = [float(line.get(name, math.nan)) for name in names]
        groups = by_step.get(int(line["step"]), [])
        complete = _complete_groups(groups, run.group_size or 0)
        if any(map(math.isnan, known)) or len(complete) < 2:
            continue
        moments = group_moments(*_stacked_groups(complete))
        rows.append([*known, float((moments.variance_fisher_trace + moments.gradient_squared).mean())])
    return np.array(rows).reshape(-1, 4)


def _pooled_estimate(rows: np.ndarray, quantity: Callable[[NoiseComponents], float]) -> Estimate:
    """A quantity of the components averaged over steps; the interval resamples steps."""
    if not len(rows):
        return UNKNOWN_ESTIMATE

    def statistic(drawn: np.ndarray) -> np.ndarray:
        means = rows[drawn].mean(axis=-2)  # (…, 4)
        values = [quantity(NoiseComponents(*mean)) for mean in means.reshape(-1, 4).tolist()]
        return np.array(values).reshape(means.shape[:-1])

    return bootstrap_estimate(len(rows), statistic)


def _saving_estimate(run: RunReading) -> Estimate:
    groups = _complete_groups(run.last_measured, run.group_size or 0)
    if not groups:
        return UNKNOWN_ESTIMATE
    grams, rewards = _stacked_groups(groups)
    saved = (baseline_saving(grams, rewards).per_prompt * rewards.shape[1]).numpy()
    variance = group_moments(grams, rewards).oracle_trace.numpy()

    def statistic(drawn: np.ndarray) -> np.ndarray:
        total = variance[drawn].sum(axis=-1)
        return np.where(total > 0, saved[drawn].sum(axis=-1) / np.where(total > 0, total, 1.0), math.nan)

    return bootstrap_estimate(len(groups), statistic)


def _complete_groups(groups: Sequence[StoredGroup], size: int) -> list[StoredGroup]:
    """Groups of the usual size, large enough for unbiased moments, with a Gram and every reward."""
    return [group for group in groups if group.size == size and group.is_complete] if size >= 4 else []


def _stacked_groups(groups: Sequence[StoredGroup]) -> tuple[torch.Tensor, torch.Tensor]:
    grams = [group.record.gram for group in groups if group.record.gram is not None]
    return torch.stack(grams).double(), torch.stack([group.record.rewards for group in groups]).double()


def _column(groups: Sequence[StoredGroup], name: str) -> np.ndarray:
    return np.array([getattr(group.reading, name, math.nan) for group in groups], dtype=np.float64)


def _mean_reward(run: RunReading) -> Estimate:
    means = [float(group.record.rewards.nanmean()) for group in run.last_groups]
    return mean_estimate(means or run.last_values("reward"))


def _last_tested(tests: EvaluationRewards) -> Estimate:
    by_step = tests.get(SAMPLED_TEST)
    return mean_estimate(list(by_step[max(by_step)].values())) if by_step else UNKNOWN_ESTIMATE


def _dead_share(run: RunReading) -> Estimate:
    if not run.has_whole_groups:
        return UNKNOWN_ESTIMATE
    judged = [group for group in run.last_groups if group.outcome != "unjudged"]
    if judged:
        return mean_estimate([float(not group.is_live) for group in judged])
    steps, shares = run.live_share
    return mean_estimate([1 - share for step, share in zip(steps, shares, strict=True) if step in run.last_third])


def _equally_hard_dead(run: RunReading) -> float:
    right = [group.right for group in run.last_groups]
    if not right or run.group_size is None or not run.has_whole_groups or any(one is None for one in right):
        return math.nan
    rollouts = sum(group.size for group in run.last_groups)
    return 1 - mixed_probability(sum(one or 0 for one in right) / rollouts, run.group_size)
