"""NeMo-RL's `train_data_step*.jsonl`: padded token ids, masks, advantages and log-probabilities for each token."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from scoregram.integrations.dumps.fields import Source
from scoregram.integrations.dumps.record import DumpedRollout, Where, one_advantage, split_sequence

UNPACKED = ("idx",)
"""The fields that are not written as a batch of one."""


def nemo_rl(record: Mapping[str, Any], where: Where) -> Iterator[DumpedRollout]:
    """One line. Every value is a list of one element, because a batch of one is logged at a time."""
    line = Source({name: value if name in UNPACKED else only(value) for name, value in record.items()}, where)
    whole = line.ids("token_ids")
    length = line.whole("input_lengths") or len(whole)
    if not 0 <= length <= len(whole):
        line.refuse(f"input_lengths must lie in [0, {len(whole)}]", length)
    mask = line.flags("token_loss_mask", len(whole))[:length]
    drawn = {name: line.floats(name, len(whole)) for name in ("generation_logprobs", "prev_logprobs")}
    log_probs = drawn["generation_logprobs"] if drawn["generation_logprobs"] is not None else drawn["prev_logprobs"]
    advantages = line.floats("advantages", len(whole))
    per_token = {"log_probs": log_probs, "advantages": advantages}
    cut = {name: None if value is None else value[:length] for name, value in per_token.items()}
    fields = split_sequence(whole[:length], mask, cut)
    advantage = one_advantage(fields["advantages"], fields["completion_mask"])
    masked_out = line.number("sample_loss_mask") == 0
    filtered = line.number("filtered_rewards")  # with dynamic sampling, those of the rollouts that were trained on
    yield DumpedRollout(
        where=where,
        step=step_in(where.file.stem),
        reward=line.number("rewards") if math.isnan(filtered) else filtered,
        advantage=0.0 if masked_out else advantage,
        **({**fields, "advantages": None} if masked_out or advantage is not None else fields),
    )


def only(value: Any) -> Any:
    """The element of a list of one; anything else as it is."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def step_in(name: str) -> int | None:
    """The number after the last `step` in a file name.

    Example:
        >>> step_in("train_data_step12"), step_in("data")
        (12, None)
    """
    found = re.findall(r"step_?(\d+)", name)
    return int(found[-1]) if found else None
