"""slime's `--save-debug-rollout-data`: `*_{rollout_id}.pt`, a list of samples with token ids."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from scoregram.integrations.dumps.fields import Source
from scoregram.integrations.dumps.record import DumpedRollout, Where

FINISHED = {"completed": True, "truncated": False}


def slime_debug(record: Mapping[str, Any], where: Where) -> Iterator[DumpedRollout]:
    """One sample. A sample that slime removed from the loss keeps its place, with no token that counts."""
    sample = Source(record, where)
    ids, length = sample.ids("tokens"), sample.whole("response_length") or 0
    if not 0 <= length <= len(ids):
        sample.refuse(f"response_length must lie in [0, {len(ids)}]", length)
    mask = None if record.get("loss_mask") is None else sample.flags("loss_mask", length)
    if record.get("remove_sample"):
        mask = torch.zeros(length, dtype=torch.bool)
    reward, rewards = rewards_of(sample)
    prompt, response, group = record.get("prompt"), record.get("response"), sample.whole("group_index")
    yield DumpedRollout(
        where=where,
        step=sample.whole("rollout_step"),
        group=None if group is None else str(group),
        prompt=prompt if isinstance(prompt, str) else None,
        completion=response if isinstance(response, str) else None,
        prompt_ids=ids[: len(ids) - length],
        completion_ids=ids[len(ids) - length :],
        completion_mask=mask,
        reward=reward,
        rewards=rewards,
        log_probs=sample.floats("rollout_log_probs", length),
        finished=FINISHED.get(str(record.get("status"))),
    )


def rewards_of(sample: Source) -> tuple[float, dict[str, float]]:
    """The reward, and its parts where it is a mapping; of several parts, `score` or `reward` is the whole."""
    if not isinstance(sample.record.get("reward"), Mapping):
        return sample.number("reward"), {}
    parts = sample.within("reward").scores()
    whole = next((parts[name] for name in ("score", "reward") if name in parts), None)
    if whole is None:
        whole = next(iter(parts.values())) if len(parts) == 1 else math.nan
    return whole, parts
