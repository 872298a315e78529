"""verl's `trainer.rollout_data_dir`: `{step}.jsonl`, decoded text without special tokens."""

from collections.abc import Iterator, Mapping
from typing import Any

from scoregram.integrations.dumps.fields import Source
from scoregram.integrations.dumps.record import DumpedRollout, Where

TAKEN = ("input", "output", "gts", "score", "step", "uid", "request_id")


def verl_jsonl(record: Mapping[str, Any], where: Where) -> Iterator[DumpedRollout]:
    """One line. `uid` reads `{sample}_{rollout}_{output}` in newer versions; in older ones there is none."""
    line = Source(record, where)
    step = line.whole("step")
    if step is None and where.file.stem.isdigit():
        step = int(where.file.stem)
    uid = record.get("uid")
    yield DumpedRollout(
        where=where,
        step=step,
        group=sample_of(uid) if isinstance(uid, str) else None,
        prompt=line.text("input"),
        completion=line.text("output"),
        reward=line.number("score"),
        rewards=line.scores(*TAKEN),
    )


def sample_of(uid: str) -> str:
    """The part of a `uid` that the rollouts of one prompt share.

    Example:
        >>> sample_of("5f1c-9a_3_0"), sample_of("5f1c-9a")
        ('5f1c-9a', '5f1c-9a')
    """
    parts = uid.rsplit("_", 2)
    return parts[0] if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit() else uid
