"""Log-probabilities of given tokens, with gradient."""

from typing import Any

from scoregram.types import LogProbs, Mask, TokenIds


def token_log_probs(
    model: Any, input_ids: TokenIds, attention_mask: Mask, completion_mask: Mask, *, temperature: float = 1.0
) -> LogProbs:
    """`log π(y_t | y_<t)` of every completion token, 0 elsewhere; entry `t` belongs to `input_ids[:, t]`."""
    raise NotImplementedError
