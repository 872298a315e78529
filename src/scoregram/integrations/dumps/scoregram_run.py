"""scoregram's own run folder: `rollouts/step-*.parquet`, written every `--rollouts-every` steps."""

from collections.abc import Iterator, Mapping
from typing import Any

from scoregram.integrations.dumps.fields import Source
from scoregram.integrations.dumps.record import DumpedRollout, Where
from scoregram.runs import REWARD


def scoregram_run(record: Mapping[str, Any], where: Where) -> Iterator[DumpedRollout]:
    """One row: the very tokens, rewards, advantages and log-probabilities."""
    row = Source(record, where)
    ids, start = row.ids("token_ids"), row.whole("prompt_length") or 0
    if not 0 <= start <= len(ids):
        row.refuse(f"prompt_length must lie in [0, {len(ids)}]", start)
    mask = None if record.get("completion_mask") is None else row.flags("completion_mask", len(ids))[start:]
    drawn = "behaviour_log_probs" if record.get("behaviour_log_probs") is not None else "log_probs"
    log_probs, advantages = row.floats(drawn, len(ids)), row.floats("advantages", len(ids))
    finished, prompt, completion = record.get("finished"), record.get("prompt"), record.get("completion")
    rewards = {name: row.number(name) for name in record if name.startswith(REWARD) and record[name] is not None}
    yield DumpedRollout(
        where=where,
        step=row.whole("step"),
        group=f"{record.get('kind')}/{row.whole('group')}",
        prompt_id=record.get("prompt_id"),
        prompt=prompt if isinstance(prompt, str) else None,
        completion=completion if isinstance(completion, str) else None,
        prompt_ids=ids[:start],
        completion_ids=ids[start:],
        completion_mask=mask,
        reward=row.number("reward"),
        rewards={name.removeprefix(REWARD): value for name, value in rewards.items()},
        advantage=row.optional("advantage"),
        advantages=None if advantages is None else advantages[start:],
        log_probs=None if log_probs is None else log_probs[start:],
        finished=None if finished is None else bool(finished),
        kind=record.get("kind") or "train",
    )
