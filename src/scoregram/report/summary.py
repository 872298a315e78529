"""What the last third of a run says, in numbers with intervals: the ground for the table, the lead and the advice."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from scoregram.bootstrap import bootstrap_estimate, mean_estimate
from scoregram.exhibits import Cell, Estimate, Table
from scoregram.report.facts import Facts, GroupFacts
from scoregram.report.gains import last_tested
from scoregram.statistics import (
    NoiseComponents,
    baseline_saving,
    group_moments,
    mixed_probability,
    noise_scale,
    optimal_group_size,
    signal_to_noise,
)

UNKNOWN = Estimate(math.nan)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Numbers of the last third of a run; the value is `nan` where the run does not say."""

    groups: int
    live: int
    noise_steps: int
    """Steps from which noise components were pooled."""
    reward: Estimate
    tested: Estimate
    """Of rollouts sampled as in training for test problems, at the last evaluation."""
    dead: Estimate
    equally_hard_dead: float
    """Chance of a dead group if every prompt had the success rate of all together; `nan` unless rewards are 0 or 1."""
    effective_rank: Estimate
    effective_rank_null: Estimate
    rank_difference: Estimate
    """Measured less null, pairwise."""
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


def summarised(facts: Facts) -> Summary:
    """The numbers of the last third; means over groups, noise components pooled over steps."""
    groups = facts.last_groups
    live = [group for group in groups if not math.isnan(group.reading.get("effective_rank", math.nan))]
    rank, null = _column(live, "effective_rank"), _column(live, "effective_rank_orthogonal")
    ends = np.array([group.possible_ranks for group in live]).reshape(-1, 2)
    rows = noise_rows(facts)
    size, prompts = facts.group_size or 0, _prompts(facts)
    return Summary(
        groups=len(groups),
        live=len(live),
        noise_steps=len(rows),
        reward=_reward(facts),
        tested=last_tested(facts.tests),
        dead=_dead(facts),
        equally_hard_dead=_equally_hard_dead(facts),
        effective_rank=mean_estimate(rank),
        effective_rank_null=mean_estimate(null),
        rank_difference=mean_estimate(rank - null),
        least_rank=mean_estimate(ends[:, 0]).value,
        most_rank=mean_estimate(ends[:, 1]).value,
        top1=mean_estimate(_column(live, "top1_fraction")),
        top1_null=mean_estimate(_column(live, "top1_fraction_orthogonal")),
        cosine=mean_estimate(_column(groups, "cosine")),
        baseline_saving=_saving(facts),
        noise_scale=_pooled(rows, lambda noise: noise_scale(noise, size)),
        snr=_pooled(rows, lambda noise: signal_to_noise(noise, prompts, size)),
        best_group_size=_pooled(rows, lambda noise: optimal_group_size(noise).exact),
        components=NoiseComponents(*rows.mean(axis=0).tolist()) if len(rows) else None,
    )


def summary_table(facts: Facts, summary: Summary) -> Table:
    """The summary as a table, each number beside what it has to be held against; unknown rows are left out."""
    accuracy = _accuracy(facts)
    groups, live, steps = f"{summary.groups} groups", f"{summary.live} live groups", f"{summary.noise_steps} steps"
    rewarded = groups if summary.groups else f"{len(facts.last('reward'))} steps"
    rows: list[tuple[str, Cell, Cell, str, str]] = [
        ("mean reward", summary.reward, *_beside(summary.tested, "on test problems, last"), rewarded),
        *([("test accuracy, last", *accuracy)] if accuracy else []),
        ("share of dead groups", summary.dead, summary.equally_hard_dead, "if all prompts were equally hard", rewarded),
        ("effective rank", summary.effective_rank, summary.effective_rank_null, "orthogonal scores", live),
        ("effective rank less its null", summary.rank_difference, 0, "no structure between scores", live),
        ("effective rank, least possible", summary.least_rank, None, "given the top-1 fractions", live),
        ("effective rank, most possible", summary.most_rank, None, "given the top-1 fractions", live),
        ("top-1 fraction", summary.top1, summary.top1_null, "orthogonal scores", live),
        ("cosine between rollouts", summary.cosine, 0, "orthogonal scores", groups),
        ("variance saved by the best baseline", summary.baseline_saving, 0, "the mean is as good", groups),
        ("signal to noise of a step", summary.snr, 1, "half of the power is noise", steps),
        ("noise scale, in rollouts", summary.noise_scale, _whole(facts.batch_size), "rollouts of a step", steps),
        ("best group size", summary.best_group_size, facts.group_size, "group size used", steps),
    ]
    return Table(
        id="summary",
        title="The last third in numbers",
        caption=f"Last third of the run, {_span(facts.ending)}: means with 95 % bootstrap intervals over groups. "
        "Signal, noise scale and group size come from noise components averaged over steps, which are the units "
        "resampled; ∞ means that no signal, or no difference between prompts, was resolved. Intervals over few groups "
        "or steps are too narrow, and groups of the same prompt are treated as independent.",
        columns=("quantity", "last third", "beside", "which is", "from"),
        rows=tuple(row for row in rows if not _unknown(row[1])),
    )


def noise_rows(facts: Facts) -> np.ndarray:
    """`(steps, 4)`: `|g|²`, `c1`, `c2`, `c3` of every step of the last third that resolves them between prompts."""
    size = facts.group_size or 0
    by_step: dict[int, list[GroupFacts]] = {}
    for group in facts.last_groups:
        by_step.setdefault(group.record.step, []).append(group)
    names = ("gram/gradient_squared", "gram/between_prompts", "gram/within_prompt")
    rows = []
    for line in facts.last_lines:
        known = [float(line.get(name, math.nan)) for name in names]
        groups = by_step.get(int(line["step"]), [])
        if any(map(math.isnan, known)) or not groups or len(_complete(groups, size)) < len(groups):
            continue
        moments = group_moments(*_stacked(groups))
        rows.append([*known, float((moments.variance_fisher_trace + moments.gradient_squared).mean())])
    return np.array(rows).reshape(-1, 4)


def _pooled(rows: np.ndarray, quantity: Callable[[NoiseComponents], float]) -> Estimate:
    """A quantity of the components averaged over steps, the steps being resampled."""
    if not len(rows):
        return UNKNOWN

    def of(drawn: np.ndarray) -> np.ndarray:
        means = rows[drawn].mean(axis=-2)  # (…, 4)
        values = [quantity(NoiseComponents(*mean)) for mean in means.reshape(-1, 4).tolist()]
        return np.array(values).reshape(means.shape[:-1])

    return bootstrap_estimate(len(rows), of)


def _saving(facts: Facts) -> Estimate:
    groups = _complete(facts.last_groups, facts.group_size or 0)
    if not groups:
        return UNKNOWN
    grams, rewards = _stacked(groups)
    saved = (baseline_saving(grams, rewards).per_prompt * rewards.shape[1]).numpy()
    variance = group_moments(grams, rewards).oracle_trace.numpy()

    def of(drawn: np.ndarray) -> np.ndarray:
        total = variance[drawn].sum(axis=-1)
        return np.where(total > 0, saved[drawn].sum(axis=-1) / np.where(total > 0, total, 1.0), math.nan)

    return bootstrap_estimate(len(groups), of)


def _complete(groups: Sequence[GroupFacts], size: int) -> list[GroupFacts]:
    """Groups of the usual size, large enough for unbiased moments, with a Gram and every reward."""
    if size < 4:
        return []
    whole = [group for group in groups if group.size == size and group.record.gram is not None]
    return [group for group in whole if bool(group.record.rewards.isfinite().all())]


def _stacked(groups: Sequence[GroupFacts]) -> tuple[torch.Tensor, torch.Tensor]:
    grams = [group.record.gram for group in groups if group.record.gram is not None]
    return torch.stack(grams).double(), torch.stack([group.record.rewards for group in groups]).double()


def _column(groups: Sequence[GroupFacts], name: str) -> np.ndarray:
    return np.array([group.reading.get(name, math.nan) for group in groups], dtype=np.float64)


def _reward(facts: Facts) -> Estimate:
    means = [float(group.record.rewards.nanmean()) for group in facts.last_groups]
    return mean_estimate(means or facts.last("reward"))


def _dead(facts: Facts) -> Estimate:
    judged = [group for group in facts.last_groups if bool(group.record.rewards.isfinite().any())]
    if judged:
        return mean_estimate([float(not group.alive) for group in judged])
    known = [line for line in facts.last_lines if line.get("groups", 0) > 0 and "live_groups" in line]
    return mean_estimate([1 - line["live_groups"] / line["groups"] for line in known])


def _equally_hard_dead(facts: Facts) -> float:
    right = [group.right for group in facts.last_groups]
    if not right or facts.group_size is None or any(one is None for one in right):
        return math.nan
    rollouts = sum(group.size for group in facts.last_groups)
    return 1 - mixed_probability(sum(one or 0 for one in right) / rollouts, facts.group_size)


def _accuracy(facts: Facts) -> tuple[Cell, Cell, str, str] | None:
    tested = [line for line in facts.lines if not math.isnan(line.get("eval/accuracy", math.nan))]
    if not tested:
        return None
    last, first = tested[-1], tested[0]
    ends = (float(last.get(f"eval/accuracy_{end}", math.nan)) for end in ("low", "high"))
    problems = f"{int(last['eval/problems'])} problems" if "eval/problems" in last else ""
    before = float(first["eval/accuracy"]) if first is not last else None
    return (
        Estimate(float(last["eval/accuracy"]), *ends),
        before,
        f"at step {first['step']}" if before is not None else "",
        problems,
    )


def _beside(known: Estimate, what: str) -> tuple[Cell, str]:
    return (None, "") if math.isnan(known.value) else (known, what)


def _prompts(facts: Facts) -> int:
    return max(1, round(facts.batch_size / facts.group_size)) if facts.group_size and facts.batch_size > 0 else 1


def _whole(value: float) -> Cell:
    return int(value) if math.isfinite(value) and value == round(value) else value


def _span(steps: range) -> str:
    if not steps:
        return "no step"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _unknown(cell: Cell) -> bool:
    value = cell.value if isinstance(cell, Estimate) else cell
    return isinstance(value, float) and math.isnan(value)
