"""The optimiser, its learning rate as a function of the step, and a look at the gradient before it is used."""

import math
from typing import Any

import torch

from scoregram.checks import fail, not_finite
from scoregram.training.config import TrainConfig


def make_optimizer(model: Any, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimiser of everything that requires gradients."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    shared: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    try:
        if config.optimizer == "sgd":
            return torch.optim.SGD(parameters, momentum=config.momentum, **shared)
        return torch.optim.AdamW(parameters, betas=config.adam_betas, fused=True, **shared)
    except ValueError as error:
        fail("train --optimizer", f"{config.optimizer} must accept its settings", error, "Choose others.")


def learning_rate(step: int, config: TrainConfig) -> float:
    """Learning rate of step `1 … steps`: a linear rise over the warm-up, then constant or falling to 0."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / (config.warmup_steps + 1)
    after = config.steps - config.warmup_steps
    done = (step - config.warmup_steps - 1) / max(after, 1)
    shape = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
    return config.learning_rate * shape[config.lr_schedule]


def apply_gradient(optimizer: torch.optim.Optimizer, model: Any, rate: float, max_norm: float) -> float:
    """Norm of the gradient; the update is done with it, clipped to `max_norm` if that is positive.

    Raises:
        NotFiniteError: If the gradient is not finite; nothing is updated then, and it names the parameters.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in trained])
    length = float(norm)
    if not math.isfinite(length):
        refuse_gradient(model)
    if 0 < max_norm < length:
        torch.nn.utils.clip_grads_with_norm_(trained, max_norm, norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return length


def refuse_gradient(model: Any) -> None:
    """Raise with the parameters whose gradient is not finite."""
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    broken = [name for name, gradient in named.items() if not bool(gradient.isfinite().all())]
    shown = ", ".join(broken[:3]) + (f" and {len(broken) - 3} more" if len(broken) > 3 else "")
    not_finite(
        "train", "gradients must be finite", f"nan or inf in {shown or 'their norm'}", "Lower the learning rate."
    )
