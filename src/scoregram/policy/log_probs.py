"""Log-probabilities of given tokens, with gradient."""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scoregram.checks import fail, require_same_shape
from scoregram.policy.modes import base_of
from scoregram.types import LogProbs, Mask, TokenIds


def token_log_probs(
    model: Any, input_ids: TokenIds, attention_mask: Mask, completion_mask: Mask, *, temperature: float = 1.0
) -> LogProbs:
    """`log π(y_t | y_<t)` of every completion token, 0 elsewhere; entry `t` belongs to `input_ids[:, t]`.

    `π = softmax(logits / temperature)`, normalised in float32 or wider. The head is applied only where a completion
    token is predicted, so that logits of prompts and padding are never made. Differentiable where gradients are on; the
    model is used in the mode it is in.

    Args:
        model: A causal language model of transformers, or a PEFT model around one.
        input_ids: `(N, T)` prompts and completions, padded on either side.
        attention_mask: `(N, T)`, false for padding.
        completion_mask: `(N, T)`, true for the tokens to score.
        temperature: Logits are divided by it.

    Returns:
        `(N, T)`, float32, or float64 for a model in float64.

    Raises:
        ScoregramError: Masks of another shape, a temperature that is not positive, or a completion token with no token
            before it to predict it from.
    """
    caller = "token_log_probs"
    if not 0 < temperature < float("inf"):
        fail(caller, "temperature must be positive and finite", temperature, "Pass the sampling temperature, or 1.")
    logits = completion_logits(model, input_ids, attention_mask, completion_mask, caller=caller)
    scores = logits / temperature if temperature != 1 else logits
    tokens = input_ids[completion_mask][:, None]
    found = scores.gather(1, tokens)[:, 0] - scores.logsumexp(1)
    return torch.zeros(input_ids.shape, dtype=found.dtype, device=found.device).masked_scatter(completion_mask, found)


def completion_logits(
    model: Any, input_ids: Tensor, attention_mask: Tensor, completion_mask: Tensor, *, caller: str = "completion_logits"
) -> Tensor:
    """`(n, V)` logits that predict the completion tokens, row by row, in float32 or wider."""
    for mask, name in ((attention_mask, "attention_mask"), (completion_mask, "completion_mask")):
        require_same_shape(mask, input_ids, name=name, like_name="input_ids", caller=caller)
    real = attention_mask.bool()
    predicts = F.pad(completion_mask, (0, 1))[:, 1:]  # the position before each completion token
    refuse_orphans(real, completion_mask, caller)
    inputs: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
    if bool((real[:, 1:] & ~real[:, :-1]).any()):  # not all padding is on the right, where no real token looks
        inputs["attention_mask"] = real.long()
        if "position_ids" in signature(base_of(model).forward).parameters:
            inputs["position_ids"] = (real.long().cumsum(1) - 1).clamp(min=0)
    head = model.get_output_embeddings()
    with head_only_at(head, predicts):
        logits = model(**inputs).logits
    logits = logits if head is not None else logits[predicts]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def refuse_orphans(real: Tensor, completion_mask: Tensor, caller: str) -> None:
    """Raise for a completion token that is padding or that nothing real precedes."""
    orphans = completion_mask & ~(F.pad(real, (1, 0))[:, :-1] & real)
    if bool(orphans.any()):
        row, column = orphans.nonzero()[0].tolist()
        where = f"one at row {row}, column {column}"
        fail(caller, "a completion token must follow a real token", where, "Give every rollout a prompt.")


@contextmanager
def head_only_at(head: nn.Module | None, positions: Tensor) -> Iterator[None]:
    """Inside, the head sees only the hidden states at `positions`, as rows of a matrix."""
    if head is None:
        yield
        return
    handle = head.register_forward_pre_hook(lambda _, given: (given[0][positions], *given[1:]))
    try:
        yield
    finally:
        handle.remove()
