"""From a measured step to scalars and to the records of a run folder."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from scoregram.integrations.trl.generation import Generation
from scoregram.runs import BatchRecord, GroupRecord, RolloutRecord
from scoregram.statistics import prompt_conflict, rollout_shares, update_coherence, update_norm
from scoregram.training import Measured, group_reading, over_groups, reward_reading, step_reading

LOSS = "loss"
"""Kind of groups whose rows are gradients of the trainer's loss, weights included, and not scores."""
MARK = "check_passed"
"""Scalar of every group: 1 if the self-check of its step was within the tolerance, else 0."""


@dataclass(frozen=True)
class Rows:
    """The rollouts that were measured at a step: some or all of some generations, group by group."""

    generations: Sequence[Generation]
    chosen: Sequence[Tensor]
    """For each generation the rollouts that take part, in order."""

    def of(self, each: Sequence[Tensor]) -> Tensor:
        """Values of all rollouts of each generation → values of the rows."""
        return torch.cat([values[rows.to(values.device)] for values, rows in zip(each, self.chosen, strict=True)])

    @property
    def places(self) -> list[tuple[Generation, int]]:
        """Generation of every row, and its place there."""
        pairs = zip(self.generations, self.chosen, strict=True)
        return [(generation, int(row)) for generation, rows in pairs for row in rows.tolist()]

    @property
    def bounds(self) -> list[int]:
        """Where groups begin, and the number of rows at the end."""
        sizes = [0]
        for generation, rows in zip(self.generations, self.chosen, strict=True):
            counts = torch.bincount(rows // generation.group_size)
            sizes += [int(count) for count in counts if count]
        return torch.tensor(sizes).cumsum(0).tolist()

    @property
    def names(self) -> list[str]:
        """Prompt of every row."""
        return [generation.prompt_names[row] for generation, row in self.places]

    @property
    def prompts(self) -> list[list[int]]:
        """Prompt tokens of every row."""
        return [generation.prompt_of(row) for generation, row in self.places]

    @property
    def rewards(self) -> Tensor:
        """`(n,)`, `nan` without a reward."""
        return self.of([generation.rewards for generation in self.generations])

    @property
    def advantages(self) -> Tensor:
        """`(n,)` float64."""
        return self.of([generation.mean_advantages for generation in self.generations])

    @property
    def lengths(self) -> Tensor:
        """`(n,)` tokens that the policy chose."""
        return self.of([generation.token_lengths for generation in self.generations])


def judged(rewards: Tensor) -> Tensor:
    """Rewards with the mean of its group for a rollout that has none: it then counts as neither better nor worse."""
    means = rewards.nanmean(-1, keepdim=True).nan_to_num(0.0)
    return torch.where(rewards.isnan(), means, rewards)


def group_records(
    step: int, rows: Rows, measured: Measured, passed: bool, kind: str, tokenizer: Any
) -> list[GroupRecord]:
    """One record for every group; it carries the mark of the self-check."""
    names, rewards, lengths, advantages = rows.names, rows.rewards, rows.lengths, rows.advantages
    records = []
    bounds, prompts = rows.bounds, rows.prompts
    for start, stop in pairwise(bounds):
        here = slice(start, stop)
        gram = measured.matrix[here, here]
        pulls = torch.ones(stop - start, dtype=torch.float64) if kind == LOSS else advantages[here]
        records.append(
            GroupRecord(
                step=step,
                kind=kind,
                prompt_id=names[start],
                prompt=tokenizer.decode(prompts[start], skip_special_tokens=False),
                rewards=rewards[here],
                lengths=lengths[here],
                advantages=advantages[here],
                gram=gram,
                by_layer={layer: whole[here, here] for layer, whole in measured.by_layer.items()},
                statistics=group_reading(gram, judged(rewards[here]), pulls) | {MARK: float(passed)},
            )
        )
    return records


def batch_records(step: int, rows: Rows, measured: Measured, weights: Tensor, kind: str) -> list[BatchRecord]:
    """The whole step in one record; none if its Gram is not known between all rollouts."""
    if not bool(measured.matrix.isfinite().all()):
        return []
    bounds = torch.tensor(rows.bounds)
    names = rows.names
    return [
        BatchRecord(
            step=step,
            kind=kind,
            prompt_ids=tuple(names[start] for start in bounds[:-1].tolist()),
            sizes=bounds.diff(),
            rewards=rows.rewards,
            lengths=rows.lengths,
            weights=weights,
            gram=measured.matrix,
        )
    ]


def scalars_of(
    rows: Rows, measured: Measured, weights: Tensor, groups: Sequence[GroupRecord], kind: str
) -> dict[str, float]:
    """Scalars of a measured step, called as our own trainer calls them."""
    found = loss_reading(rows, measured.matrix) if kind == LOSS else score_reading(rows, measured.matrix, weights)
    masked = rows.of([generation.masked_out for generation in rows.generations])
    found |= {
        "masked_out": float(masked.double().mean()),
        "without_reward": float(rows.rewards.isnan().double().mean()),
        "length": float(rows.lengths.double().mean()),
    }
    readings: list[Mapping[str, float]] = [
        {name: v for name, v in group.statistics.items() if name != MARK} for group in groups
    ]
    return found | over_groups(readings)


def score_reading(rows: Rows, gram: Tensor, weights: Tensor) -> dict[str, float]:
    """What rewards, Gram and the weights of the update say."""
    size = rows.generations[0].group_size
    rewards = judged(rows.rewards.view(-1, size))
    return reward_reading(rewards, rows.advantages.view(-1, size)) | step_reading(gram, weights, rewards)


def loss_reading(rows: Rows, gram: Tensor) -> dict[str, float]:
    """What the Gram of the gradients of a loss says: they carry their weights, and groups need not be whole."""
    rewards = rows.rewards
    found = {"reward": float(rewards.nanmean()), "advantage_abs": float(rows.advantages.abs().mean())}
    names = ("update_norm", "coherence", "largest_share", "conflicting_prompts", "cancelled")
    found |= dict.fromkeys((f"gram/{name}" for name in names), math.nan)
    if not bool(gram.isfinite().all()):
        return found
    ones = torch.ones(len(gram), dtype=torch.float64)
    found |= {
        "gram/update_norm": update_norm(gram, ones),
        "gram/coherence": update_coherence(gram, ones),
        "gram/largest_share": float(rollout_shares(gram, ones).max()),
    }
    sizes = torch.tensor(rows.bounds).diff()
    if len(sizes) > 1:
        conflict = prompt_conflict(gram, ones, torch.arange(len(sizes)).repeat_interleave(sizes))
        found |= {"gram/conflicting_prompts": conflict.conflicting, "gram/cancelled": conflict.cancelled}
    return found


def rollout_records(
    step: int, rows: Rows, log_probs: Sequence[Tensor], tokenizer: Any, stop_ids: set[int], kind: str
) -> list[RolloutRecord]:
    """One record for every row.

    Args:
        step: The step.
        rows: The rollouts.
        log_probs: For every row the log-probabilities of its counted tokens, in order.
        tokenizer: To tell the text.
        stop_ids: Tokens that end a rollout.
        kind: What the rows are.
    """
    bounds = rows.bounds
    group_of = [group for group in range(len(bounds) - 1) for _ in range(bounds[group], bounds[group + 1])]
    return [
        rollout_record(step, generation, row, log_probs[place], tokenizer, stop_ids, kind, group, place - bounds[group])
        for place, ((generation, row), group) in enumerate(zip(rows.places, group_of, strict=True))
    ]


def rollout_record(
    step: int,
    generation: Generation,
    row: int,
    log_probs: Tensor,
    tokenizer: Any,
    stop_ids: set[int],
    kind: str,
    group: int,
    index: int,
) -> RolloutRecord:
    """One rollout, without padding."""
    prompt = generation.prompt_of(row)
    sampled = list(generation.sampled[row])
    counted = generation.loss_mask[row, : len(sampled)].cpu()
    ahead = torch.zeros(len(prompt))

    def aligned(values: Tensor) -> Tensor:
        return torch.cat([ahead, torch.where(counted, values[: len(sampled)].float().cpu(), 0.0)])

    scattered = torch.zeros(len(sampled)).masked_scatter(counted, log_probs.float().cpu())
    per_token = generation.advantages[row] if generation.advantages.ndim == 2 else None
    return RolloutRecord(
        step=step,
        kind=kind,
        prompt_id=generation.prompt_names[row],
        group=group,
        index=index,
        prompt=tokenizer.decode(prompt, skip_special_tokens=False),
        completion=tokenizer.decode(sampled, skip_special_tokens=True),
        token_ids=torch.tensor([*prompt, *sampled], dtype=torch.int64),
        prompt_length=len(prompt),
        completion_mask=torch.cat([ahead.bool(), counted]),
        reward=float(generation.rewards[row]),
        rewards={name: given(values[row]) for name, values in generation.by_function.items()},
        log_probs=torch.cat([ahead, scattered]),
        behaviour_log_probs=None if generation.behaviour is None else aligned(generation.behaviour[row]),
        advantage=None if per_token is not None else float(generation.advantages[row]),
        advantages=None if per_token is None else aligned(per_token),
        finished=bool(sampled) and sampled[-1] in stop_ids,
    )


def given(reward: Tensor) -> float | None:
    """A reward, None if the function gave none."""
    return None if bool(reward.isnan()) else float(reward)
