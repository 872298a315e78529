"""open-instruct's saved rollouts: `{run}_rollouts_NNNNNN.jsonl`, token ids of prompt and response."""

from collections.abc import Iterator, Mapping
from typing import Any

from scoregram.integrations.dumps.fields import Source
from scoregram.integrations.dumps.record import DumpedRollout, Where


def open_instruct(record: Mapping[str, Any], where: Where) -> Iterator[DumpedRollout]:
    """One line. Tokens of tools are not marked in the file: they count as the policy's."""
    line = Source(record, where)
    response, group, reason = line.ids("response_tokens"), line.whole("prompt_idx"), record.get("finish_reason")
    yield DumpedRollout(
        where=where,
        step=line.whole("step"),
        group=None if group is None else str(group),
        prompt_ids=line.ids("prompt_tokens"),
        completion_ids=response,
        reward=line.number("reward"),
        advantage=line.optional("advantage"),
        log_probs=line.floats("logprobs", len(response)),
        finished=reason == "stop" if isinstance(reason, str) else None,
    )
