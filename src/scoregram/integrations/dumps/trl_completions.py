"""TRL's `log_completions=True`: `completions/completions_NNNNN.parquet`, text without token ids or group names."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from scoregram.integrations.dumps.fields import Source
from scoregram.integrations.dumps.record import DumpedRollout, Where

TAKEN = ("step", "prompt", "completion", "advantage")
"""Columns of TRL itself; every other column of numbers is a reward function, or one that the user logged."""


def trl_completions(record: Mapping[str, Any], where: Where) -> Iterator[DumpedRollout]:
    """One row. The file does not say how TRL weighted its reward functions: the reward is their sum."""
    row = Source(record, where)
    rewards = row.scores(*TAKEN)
    yield DumpedRollout(
        where=where,
        step=row.whole("step"),
        prompt=row.text_or_messages("prompt"),
        completion=single_answer(row, "completion"),
        reward=math.fsum(rewards.values()) if rewards else math.nan,
        rewards=rewards,
        advantage=row.optional("advantage"),
    )


def single_answer(row: Source, name: str) -> str:
    """Text of a completion; of a conversation that is one answer, its content."""
    value = row.text_or_messages(name)
    if isinstance(value, str):
        return value
    content = value[0].get("content")
    if len(value) > 1 or not isinstance(content, str):
        row.refuse(f"{name} must be one answer, for text does not tell which tokens of several are the policy's", value)
    return content
