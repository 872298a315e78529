"""From a step to the records of its run folder."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from scoregram.policy import Policy
from scoregram.runs import BatchRecord, GroupRecord, RolloutRecord
from scoregram.training.collecting import Collected
from scoregram.training.readings import group_reading
from scoregram.training.update import Gradient


def group_records(
    step: int,
    collected: Collected,
    gradient: Gradient,
    *,
    kind: str = "train",
    keep_prompts: bool = True,
    layers: Literal["each", "kinds", "none"] = "each",
) -> list[GroupRecord]:
    """One record for every group of the step; with its Gram and what follows from it, if that was measured."""
    size, lengths = collected.group_size, collected.lengths
    whole_layers = gradient.measured.by_layer if gradient.measured and layers != "none" else {}
    whole_layers = kinds_of_layers(whole_layers) if layers == "kinds" else whole_layers
    records = []
    for place, problem in enumerate(collected.problems):
        here = slice(place * size, (place + 1) * size)
        rewards = torch.where(collected.observed[place], collected.rewards[place], torch.nan)
        advantages = gradient.advantages[place].double()
        gram, by_layer, statistics = None, {}, {}
        if gradient.measured is not None:
            gram = gradient.measured.matrix[here, here]
            by_layer = {layer: whole[here, here] for layer, whole in whole_layers.items()}
            statistics = group_reading(gram, collected.rewards[place], advantages)
        records.append(
            GroupRecord(
                step=step,
                kind=kind,
                prompt_id=problem.id,
                prompt=problem.prompt if keep_prompts else None,
                rewards=rewards,
                lengths=lengths[place],
                advantages=advantages,
                gram=gram,
                by_layer=by_layer,
                statistics=statistics,
            )
        )
    return records


def batch_record(step: int, collected: Collected, gradient: Gradient, *, kind: str = "train") -> list[BatchRecord]:
    """The whole step in one record; none if its Gram is not known between all rollouts."""
    if gradient.measured is None or not bool(gradient.measured.matrix.isfinite().all()):
        return []
    rewards = torch.where(collected.observed, collected.rewards, torch.nan)
    return [
        BatchRecord(
            step=step,
            kind=kind,
            prompt_ids=tuple(problem.id for problem in collected.problems),
            sizes=torch.full((len(rewards),), collected.group_size),
            rewards=rewards.flatten(),
            lengths=collected.lengths.flatten(),
            weights=gradient.weights.double(),
            gram=gradient.measured.matrix,
        )
    ]


def kinds_of_layers(by_layer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Grams of layers that differ by their depth alone, added up: `layers.3.mlp` belongs to `layers.*.mlp`."""
    merged: dict[str, Tensor] = {}
    for name, gram in by_layer.items():
        kind = ".".join("*" if part.isdigit() else part for part in name.split("."))
        merged[kind] = merged[kind] + gram if kind in merged else gram
    return merged


def rollout_records(step: int, policy: Policy, collected: Collected, gradient: Gradient) -> list[RolloutRecord]:
    """One record for every rollout of the step."""
    rollouts, size = collected.rollouts, collected.group_size
    lengths = rollouts.attention_mask.sum(1).tolist()
    prompt_lengths, finished = rollouts.prompt_lengths.tolist(), rollouts.finished.tolist()
    ids, log_probs = rollouts.input_ids.cpu(), gradient.log_probs.detach().float().cpu()
    behaviour = rollouts.behaviour_log_probs.float().cpu()
    rewards = torch.where(collected.observed, collected.rewards, torch.nan).flatten().tolist()
    advantages = gradient.advantages.flatten().tolist()
    texts = [policy.decode(ids[row, : prompt_lengths[row]].tolist()) for row in range(0, len(ids), size)]
    return [
        RolloutRecord(
            step=step,
            prompt_id=collected.problems[row // size].id,
            group=row // size,
            index=row % size,
            prompt=texts[row // size],
            completion=collected.completions[row],
            token_ids=ids[row, : lengths[row]],
            prompt_length=prompt_lengths[row],
            reward=rewards[row],
            log_probs=log_probs[row, : lengths[row]],
            behaviour_log_probs=behaviour[row, : lengths[row]],
            advantage=advantages[row],
            finished=finished[row],
        )
        for row in range(len(ids))
    ]


def statistics_of(records: list[GroupRecord]) -> list[Mapping[str, float]]:
    """The scalars of every group that was measured."""
    return [record.statistics for record in records if record.gram is not None]
