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
from scoregram.gram.survey import Survey


def score_rows(
    model: nn.Module, batch: Batch, wanted: Sequence[Tensor], mode: AbstractContextManager, survey: Survey
) -> list[Tensor]:
    """Per-rollout gradients `(N, *shape)` of the wanted parameters, by one pass forth and back for each rollout.

    A sharded model needs all processes for a pass: one with fewer rollouts repeats its last one, for the others.
    """
    rows: list[list[Tensor]] = [[] for _ in wanted]
    for index in range(survey.shards.most(batch.rollouts)):
        here = min(index, batch.rollouts - 1)
        grads = loss_gradients(model, batch.at(slice(here, here + 1)), mode, survey)
        for collected, parameter in zip(rows, wanted, strict=True):
            collected.append(grads[id(parameter)])
    return [torch.stack(collected[: batch.rollouts]) for collected in rows]


def loss_gradients(model: nn.Module, batch: Batch, mode: AbstractContextManager, survey: Survey) -> dict[int, Tensor]:
    """Gradient of `Σ c log π` over the whole batch for each trained parameter, by its id, by plain autograd.

    `.grad` of the parameters must be empty (see `restore.gradients_put_aside`), and is afterwards.
    """
    parameters = list(survey.parameters.values())
    with mode, torch.enable_grad():
        logits = logits_of(model, batch)
        total = (token_log_probs(logits, batch) * batch.coefficients).sum()
        found = gradients(total, parameters) if total.requires_grad else [torch.zeros_like(p) for p in parameters]
    return {id(parameter): grad for parameter, grad in zip(parameters, found, strict=True)}
