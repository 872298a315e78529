"""From a step to the records of its run folder."""

from collections.abc import Mapping

import torch

from scoregram.policy.load import Policy
from scoregram.runs.records import GroupRecord, RolloutRecord
from scoregram.training.collecting import Collected
from scoregram.training.readings import group_reading
from scoregram.training.update import Gradient


def group_records(step: int, collected: Collected, gradient: Gradient) -> list[GroupRecord]:
    """One record for every group of the step; with its Gram and what follows from it, if that was measured."""
    size = collected.group_size
    records = []
    for place, problem in enumerate(collected.problems):
        here = slice(place * size, (place + 1) * size)
        rewards = torch.where(collected.observed[place], collected.rewards[place], torch.nan)
        advantages = gradient.advantages[place].double()
        gram, by_layer, statistics = None, {}, {}
        if gradient.measured is not None:
            gram = gradient.measured.matrix[here, here]
            by_layer = {layer: whole[here, here] for layer, whole in gradient.measured.by_layer.items()}
            statistics = group_reading(gram, collected.rewards[place], advantages)
        records.append(
            GroupRecord(
                step=step,
                prompt_id=problem.id,
                prompt=problem.prompt,
                rewards=rewards,
                lengths=collected.lengths[place],
                advantages=advantages,
                gram=gram,
                by_layer=by_layer,
                statistics=statistics,
            )
        )
    return records


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
