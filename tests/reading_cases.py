"""Readings built in memory: groups with given rewards, and noise with given numbers."""

from typing import Any

import torch

from scoregram.reading import RunNoise, RunReading, StoredGroup
from scoregram.runs import GroupRecord


def run_of(*outcomes: str, lines: Any = (), prompts: list[str] | None = None) -> RunReading:
    """One step with a group for each outcome, such as `1000`."""
    records = [
        GroupRecord(
            step=1,
            prompt_id=prompts[place] if prompts else f"p/{place}",
            rewards=torch.tensor([float(mark) for mark in outcome], dtype=torch.float64),
            lengths=torch.ones(len(outcome)).long(),
            advantages=torch.zeros(len(outcome), dtype=torch.float64),
        )
        for place, outcome in enumerate(outcomes)
    ]
    return RunReading({}, (), [{"step": 1, "reward": 0.5, **dict(lines)}], [StoredGroup(record) for record in records])


def with_noise(run: RunReading, steps: int = 8, *, phase: str = "last", **changes: Any) -> RunReading:
    """The run as if the noise of a third had been pooled to these numbers."""
    vars(run).setdefault("_noises", {})[phase] = RunNoise(steps=steps, **changes)
    return run
