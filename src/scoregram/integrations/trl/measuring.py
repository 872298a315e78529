"""One measurement beside a trainer's own step: the Gram, and its rows added up against the gradient of the trainer."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from scoregram.gram import Gram, backward_with_gram
from scoregram.integrations.trl.generation import Laid
from scoregram.integrations.trl.memory import text_config
from scoregram.training.update import Measured, assembled

RELATIVE_POSITIONS = ("rope_parameters", "rope_theta", "rope_scaling", "rotary_dim", "rotary_pct", "alibi")
"""Settings of models to which only the distance between tokens matters."""


@dataclass(frozen=True)
class Beside:
    """What was measured beside a step of the trainer."""

    measured: Measured
    log_probs: Tensor
    """`(n, T)` of the tokens that count, 0 elsewhere."""
    error: float
    """`|g − ĝ| / |g|` of the trainer's gradient `g` and the sum `ĝ` of the weighted rows; `nan` without `g`."""


class AsTheTrainerCalls(nn.Module):
    """A model that is given no positions, because the trainer gives it none: it counts them as it always does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """What the model says to ids and mask alone."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)

    @property
    def config(self) -> Any:
        """That of the model."""
        return self.model.config

    def get_output_embeddings(self) -> Any:
        """The head of the model."""
        return self.model.get_output_embeddings()  # pyright: ignore[reportCallIssue]


def counts_distances(model: nn.Module) -> bool:
    """Whether only distances between tokens matter to a model, so that padding may be moved."""
    config = text_config(model)
    return any(getattr(config, name, None) for name in RELATIVE_POSITIONS)


def measure_beside(
    model: nn.Module,
    laid: Laid,
    *,
    weights: Tensor,
    passes: Sequence[slice],
    temperature: float,
    precision: AbstractContextManager[Any],
    scale: float,
) -> Beside:
    """The Gram of rows `ψ_i = Σ_t c_it ∇log π_it`, and `Σ_i w_i ψ_i` held against `.grad`, which stays as it is.

    Args:
        model: The model, after the backward pass of the trainer and before its update.
        laid: The rollouts and their coefficients `c`.
        weights: `(n,)` such that `Σ_i w_i ψ_i` should be the trainer's gradient.
        passes: Rows that go through the model together.
        temperature: Divides the logits.
        precision: The autocast that the trainer computes under.
        scale: What the trainer's gradient was multiplied with against underflow.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    theirs = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    counted = model if counts_distances(model) else AsTheTrainerCalls(model)
    # rows of the size of scores, whatever a loss weights them with: its smallest weights are beyond float32
    sizes = laid.coefficients.abs().amax(1).double().cpu()
    even = torch.where(sizes > 0, sizes, 1.0).to(laid.coefficients)
    laid = replace(laid, coefficients=laid.coefficients / even[:, None])
    grams: list[Gram] = []
    try:
        with precision:
            for here in passes:
                part = laid.at(here)
                gram = backward_with_gram(
                    counted,
                    part.input_ids,
                    part.completion_mask,
                    part.attention_mask,
                    weights=(weights * sizes)[here],
                    coefficients=part.coefficients,
                    temperature=temperature,
                )
                grams.append(gram)
        error = relative_error([parameter.grad for parameter in parameters], theirs, scale)
    finally:
        for parameter, grad in zip(parameters, theirs, strict=True):
            parameter.grad = grad
    whole = assembled(grams)
    by_size = sizes[:, None] * sizes
    prefix = "" if counted is model else "model."
    by_layer = {name.removeprefix(prefix): gram * by_size for name, gram in whole.by_layer.items()}
    log_probs = torch.cat([gram.log_probs for gram in grams])
    return Beside(Measured(whole.matrix * by_size, by_layer, whole.notes), log_probs, error)


def relative_error(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None], scale: float = 1.0) -> float:
    """`|ours − theirs / scale| / |theirs / scale|` over all parameters; 0 if both vanish, `nan` without `theirs`."""
    if all(grad is None for grad in theirs):
        return math.nan
    apart, size = 0.0, 0.0
    for own, their in zip(ours, theirs, strict=True):
        if their is not None:
            size += squared_norm(their) / scale**2
        if own is None and their is not None:
            apart += squared_norm(their) / scale**2
        elif own is not None:
            apart += squared_norm(own if their is None else own - their.to(own.dtype) / scale)
    if size == 0:
        return 0.0 if apart == 0 else math.inf
    return math.sqrt(apart / size)


def squared_norm(value: Tensor) -> float:
    """`|v|²`, added up in float64."""
    return float(torch.linalg.vector_norm(value.detach(), dtype=torch.float64)) ** 2


def rollout_weights(coefficients: Tensor, mask: Tensor) -> tuple[Tensor, float]:
    """`(n,)` mean of `∂L/∂log π` over the tokens of each rollout, and how far single tokens are from it.

    The second is `|c − c̄| / |c|`: 0 where the loss weights all tokens of a rollout alike, so that its gradient is a sum
    of weighted scores. 0 too if nothing pulls.
    """
    counted = mask.double()
    c = coefficients.double() * counted
    mean = c.sum(1) / counted.sum(1).clamp(min=1)
    apart = (c - mean[:, None] * counted).norm()
    return mean, float(apart / c.norm()) if bool(c.any()) else 0.0


def likely_causes(trainer: Any, notes: Sequence[str], unevenness: float, mode: str) -> list[str]:
    """Why the rows may not add up to the trainer's gradient, the likeliest first."""
    facts: Mapping[str, bool] = {
        "active dropout: the trainer's pass drew masks that the measurement leaves out": any(
            "dropout" in note for note in notes
        ),
        "the loss weights the tokens of a rollout differently (KL term, clipping, masks); mode='loss' is exact there": (
            mode == "scores" and unevenness > 1e-6
        ),
        "an entropy bonus, whose gradient is not one of log-probabilities": bool(
            getattr(trainer, "_entropy_bonus_enabled", False)
        ),
        "a router's auxiliary loss": bool(getattr(trainer, "aux_loss_enabled", False)),
        f"autocast to {trainer.accelerator.mixed_precision}": trainer.accelerator.mixed_precision in ("bf16", "fp16"),
        "the model's own low precision": any(
            p.dtype in (torch.bfloat16, torch.float16) for p in trainer.model.parameters() if p.requires_grad
        ),
    }
    return [cause for cause, holds in facts.items() if holds]
