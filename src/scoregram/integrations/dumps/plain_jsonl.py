"""Anybody's JSONL: `prompt`, `completion` and `reward`, or token ids in their place."""

from collections.abc import Iterator, Mapping
from typing import Any

from scoregram.integrations.dumps.fields import Source
from scoregram.integrations.dumps.record import DumpedRollout, Where
from scoregram.integrations.dumps.trl_completions import single_answer


def plain_jsonl(record: Mapping[str, Any], where: Where) -> Iterator[DumpedRollout]:
    """One line. With `prompt_ids` and `completion_ids` it is exact; everything but these or the texts is optional."""
    line = Source(record, where)
    has_ids = "prompt_ids" in record and "completion_ids" in record
    completion = line.ids("completion_ids") if has_ids else None
    length = 0 if completion is None else len(completion)
    group, rewards, finished = record.get("group"), record.get("rewards"), record.get("finished")
    yield DumpedRollout(
        where=where,
        step=line.whole("step"),
        group=None if group is None else str(group),
        prompt=line.text_or_messages("prompt") if not has_ids or "prompt" in record else None,
        completion=single_answer(line, "completion") if not has_ids or "completion" in record else None,
        prompt_ids=line.ids("prompt_ids") if has_ids else None,
        completion_ids=completion,
        completion_mask=line.flags("completion_mask", length) if has_ids and "completion_mask" in record else None,
        tokens=line.whole("tokens"),
        reward=line.number("reward"),
        rewards=line.within("rewards").scores() if rewards is not None else {},
        advantage=line.optional("advantage"),
        log_probs=line.floats("log_probs", length) if has_ids else None,
        finished=None if finished is None else bool(finished),
    )
