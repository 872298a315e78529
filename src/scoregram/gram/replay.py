"""The exact route for any parameter: one backward pass per rollout.

Slow and plain. It serves parameters that some operation hides from the rules (a fused kernel, a scan), and it is the
independent twin with which `verify=True` compares.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from scoregram.gram.backward import gradients
from scoregram.gram.batch import Batch, logits_of, token_log_probs


def score_rows(
    model: nn.Module, batch: Batch, parameters: Sequence[Tensor], mode: AbstractContextManager
) -> list[Tensor]:
    """Per-rollout gradients `(N, *shape)` of each parameter, by one forward and backward pass for each rollout."""
    rows: list[list[Tensor]] = [[] for _ in parameters]
    for index in range(batch.rollouts):
        grads = loss_gradients(model, batch.only(index), parameters, mode)
        for collected, grad in zip(rows, grads, strict=True):
            collected.append(grad)
    return [torch.stack(collected) for collected in rows]


def loss_gradients(
    model: nn.Module, batch: Batch, parameters: Sequence[Tensor], mode: AbstractContextManager
) -> list[Tensor]:
    """Gradient of `Σ c log π` over the whole batch for each parameter, by plain autograd."""
    with mode, torch.enable_grad():
        logits = logits_of(model, batch)
        total = (token_log_probs(logits, batch) * batch.coefficients).sum()
        if not total.requires_grad:
            return [torch.zeros_like(parameter) for parameter in parameters]
        return gradients(total, parameters)
