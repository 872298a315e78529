"""Draw rollouts from a language model."""

from collections.abc import Sequence
from typing import Any

import torch

from scoregram.policy.config import SamplingConfig
from scoregram.policy.rollouts import Rollouts


def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    rollouts_per_prompt: int,
    sampling: SamplingConfig,
    stop_ids: Sequence[int],
    pad_id: int,
    generator: torch.Generator | None = None,
) -> Rollouts:
    """`R` completions of every prompt, with the exact log-probability of every token."""
    raise NotImplementedError
