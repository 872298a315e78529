"""One measurement beside a trainer's own step: the Gram, and its rows added up against the gradient of the trainer."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from scoregram.gram import (
    Gram,
    Sketch,
    Sketcher,
    backward_with_gram,
    is_distributed,
    measure_gram,
    model_inside,
    sharded_modules,
    survey,
)
from scoregram.integrations.trl.generation import Laid
from scoregram.integrations.trl.memory import text_config
from scoregram.integrations.trl.processes import ALONE, Processes
from scoregram.training import Measured, assembled

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
    rollouts: int = 0
    """Number of rollouts whose gradient was compared."""


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


@dataclass(frozen=True)
class Pass:
    """What every pass of a measurement is told."""

    model: nn.Module
    laid: Laid
    """Rollouts, with coefficients of the size of 1."""
    weights: Tensor
    """`(n,)` such that `Σ_i w_i ψ_i` of these rows should be the trainer's gradient."""
    temperature: float

    def arguments(self, here: slice) -> dict[str, Any]:
        """For `measure_gram` and `backward_with_gram`."""
        part = self.laid.at(here)
        return {
            "model": self.model,
            "input_ids": part.input_ids,
            "completion_mask": part.completion_mask,
            "attention_mask": part.attention_mask,
            "coefficients": part.coefficients,
            "temperature": self.temperature,
        }


def measure_beside(
    model: nn.Module,
    laid: Laid,
    *,
    weights: Tensor,
    plans: Sequence[Sequence[slice]],
    temperature: float,
    precision: AbstractContextManager[Any],
    scale: float,
    processes: Processes = ALONE,
) -> Beside:
    """The Gram of rows `ψ_i = Σ_t c_it ∇log π_it`, and `Σ_i w_i ψ_i` held against `.grad`, which stays as it is.

    Args:
        model: The model, after the backward pass of the trainer and before its update.
        laid: The rollouts of all processes and their coefficients `c`.
        weights: `(n,)` such that `Σ_i w_i ψ_i` should be the trainer's gradient.
        plans: For each process the rows that go through the model together, in order; some may have none.
        temperature: Divides the logits.
        precision: The autocast that the trainer computes under.
        scale: What the trainer's gradient was multiplied with against underflow.
        processes: Those that measure; all of them get the same result.
    """
    counted = model if counts_distances(model) else AsTheTrainerCalls(model)
    # rows of the size of scores, whatever a loss weights them with: its smallest weights are beyond float32
    sizes = laid.coefficients.abs().amax(1).double().cpu()
    even = torch.where(sizes > 0, sizes, 1.0).to(laid.coefficients)
    told = Pass(counted, replace(laid, coefficients=laid.coefficients / even[:, None]), weights * sizes, temperature)
    beside = beside_a_sharded_model if sharded_modules(model) else beside_a_whole_model
    grams, error = beside(told, plans, precision, scale, processes)
    whole = assembled(grams)
    by_size = sizes[:, None] * sizes
    prefix = "" if counted is model else "model."
    by_layer = {name.removeprefix(prefix): gram * by_size for name, gram in whole.by_layer.items()}
    log_probs = torch.cat([gram.log_probs for gram in grams])
    return Beside(Measured(whole.matrix * by_size, by_layer, whole.notes), log_probs, error, rollouts=len(weights))


def beside_a_whole_model(
    told: Pass,
    plans: Sequence[Sequence[slice]],
    precision: AbstractContextManager[Any],
    scale: float,
    processes: Processes,
) -> tuple[list[Gram], float]:
    """Grams of all passes of all processes, and the error of their weighted rows, added up parameter by parameter."""
    parameters = [parameter for parameter in told.model.parameters() if parameter.requires_grad]
    theirs = [parameter.grad for parameter in parameters]

    def own_passes() -> list[Gram]:
        with precision:
            return [
                sent(backward_with_gram(**told.arguments(here), weights=told.weights[here]))
                for here in plans[processes.rank]
            ]

    for parameter in parameters:
        parameter.grad = None
    try:
        grams = processes.everyones(own_passes)
        error = relative_error(summed_gradients(parameters, processes), theirs, scale)
    finally:
        for parameter, grad in zip(parameters, theirs, strict=True):
            parameter.grad = grad
    return [gram for own in grams for gram in own], error


def summed_gradients(parameters: Sequence[Tensor], processes: Processes) -> Iterator[Tensor | None]:
    """The sum over all processes of each `.grad`, one after the other; one process has them as they are."""
    for parameter in parameters:
        if processes.count == 1:
            yield parameter.grad
            continue
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        yield processes.summed(own.detach().to(torch.promote_types(own.dtype, torch.float32)))


def beside_a_sharded_model(
    told: Pass,
    plans: Sequence[Sequence[slice]],
    precision: AbstractContextManager[Any],
    scale: float,
    processes: Processes,
) -> tuple[list[Gram], float]:
    """Grams of all passes of all processes, and the error of their weighted rows, from sketches.

    No process has room for a whole gradient. But a sketch is linear: that of `g − Σ_i w_i ψ_i` is the sketch of the
    trainer's gradient less the weighted sketches of the rows, and its norm is that of the difference within some
    percent (`gram.sketch`). All processes make as many passes as the one with most of them, as a sharded model needs.
    """
    sketch, own = Sketch(), plans[processes.rank]
    spare = next(plan[0] for plan in plans if plan)

    def own_passes() -> list[Gram]:
        grams = []
        with precision:
            for index in range(max(map(len, plans))):
                here = own[index] if index < len(own) else spare
                grams.append(sent(measure_gram(**told.arguments(here), sketch=sketch)))
        return grams[: len(own)]

    grams = [gram for made in processes.everyones(own_passes) for gram in made]
    rows = torch.cat([gram.sketch for gram in grams if gram.sketch is not None]).double()
    theirs, size = sketched_gradient(told.model, sketch)
    if theirs is None:
        return grams, math.nan
    apart = float((told.weights.double() @ rows - theirs / scale).norm())
    if size == 0:
        return grams, 0.0 if apart == 0 else math.inf
    return grams, apart / (size / scale)


def sketched_gradient(model: nn.Module, sketch: Sketch) -> tuple[Tensor | None, float]:
    """`(m,)` sketch of `.grad` of a sharded model, and its norm, one parameter gathered at a time; None without one."""
    parameters = survey(model_inside(model)).shards.sharded
    sketcher = Sketcher(sketch, parameters, 1)
    squares = 0.0
    for parameter in parameters.values():
        if parameter.grad is None:
            continue
        grad: Any = parameter.grad.detach()
        whole = grad.full_tensor() if is_distributed(grad) else grad
        squares += squared_norm(whole)
        sketcher.add_rows(parameter, whole.reshape(1, -1))
    return (sketcher.total()[0].double() if sketcher.made else None), math.sqrt(squares)


def sent(gram: Gram) -> Gram:
    """A Gram without anything on a device, for other processes."""
    return replace(gram, log_probs=gram.log_probs.cpu())


def relative_error(ours: Iterable[Tensor | None], theirs: Sequence[Tensor | None], scale: float = 1.0) -> float:
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
