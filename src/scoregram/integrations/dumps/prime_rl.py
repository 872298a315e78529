"""prime-rl's `trainer.enable_token_export`: `token_exports/step_N/rank_R.jsonl`, tokens without group names."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from scoregram.integrations.dumps.fields import Source
from scoregram.integrations.dumps.nemo_rl import step_in
from scoregram.integrations.dumps.record import DumpedRollout, Where, one_advantage, split_sequence


def prime_rl(record: Mapping[str, Any], where: Where) -> Iterator[DumpedRollout]:
    """One line. Rewards, if exported, stand on every token; prompts are told apart by their tokens."""
    line = Source(record, where)
    ids = line.ids("token_ids")
    mask = line.flags("loss_mask", len(ids))
    per_token = {
        "log_probs": line.floats("inference_logprobs", len(ids)),
        "advantages": line.floats("advantages", len(ids)),
        "rewards": line.floats("rewards", len(ids)) if isinstance(record.get("rewards"), list) else None,
    }
    fields = split_sequence(ids, mask, per_token)
    rewards = fields.pop("rewards")
    advantage = one_advantage(fields["advantages"], fields["completion_mask"])
    if advantage is not None or fields["advantages"] is None or bool(torch.isnan(fields["advantages"]).all()):
        fields["advantages"] = None
    shared = one_advantage(rewards, fields["completion_mask"])
    step = line.whole("export_step") if record.get("export_step") is not None else line.whole("step")
    yield DumpedRollout(
        where=where,
        step=step_in(where.file.parent.name) if step is None else step,
        reward=math.nan if shared is None else shared,
        advantage=advantage,
        **fields,
    )
