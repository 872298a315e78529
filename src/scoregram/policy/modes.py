"""What sampling needs to know of a model, and the mode it needs it in."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from scoregram.checks import fail


class PolicyWarning(UserWarning):
    """Something a policy lacked was chosen for it, or it cannot be sampled from as fast as others."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, dropout is off and no graph is kept; on leaving, also by an exception, every module has its mode back.

    Gradients are switched off by `no_grad`: what inference mode returns could not be used in a loss.
    """
    trained = [module for module in model.modules() if module.training]
    try:
        for module in trained:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module in trained:
            module.training = True
        if torch.is_autocast_enabled(next(model.parameters()).device.type):
            torch.clear_autocast_cache()  # casts made without a graph would be reused by a training pass


def hides_precision(model: nn.Module) -> bool:
    """Whether autocast makes a model compute with fewer digits than its weights have."""
    weight = next(model.parameters())
    return torch.is_autocast_enabled(weight.device.type) and weight.dtype in {torch.float32, torch.float64}


def computed_in(tensor: torch.Tensor) -> torch.dtype:
    """The dtype that products with a tensor are computed in: its own, unless autocast has another."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def without_autocast(model: nn.Module) -> AbstractContextManager[object]:
    """Inside, a model computes in the precision of its weights."""
    return torch.autocast(next(model.parameters()).device.type, enabled=False)


def recompute_layers(model: nn.Module, *, caller: str) -> None:
    """Let the layers of a model run again in the backward pass instead of keeping their activations.

    transformers does so for layers in training mode alone, so they are put into it, and nothing inside them is: dropout
    stays off. Sampling takes them out of it for its time.

    Raises:
        ScoregramError: If the model does not know how, or a layer would drop activations of its own.
    """
    base = base_of(model)
    if not getattr(base, "supports_gradient_checkpointing", False):
        fail(caller, "the model must support it", type(base).__name__, "Leave it out.")
    base.gradient_checkpointing_enable({"use_reentrant": False})  # pyright: ignore[reportCallIssue]
    for name, module in base.named_modules():
        if not vars(module).get("gradient_checkpointing", False):
            continue
        rates = {key: rate for key, rate in vars(module).items() if "drop" in key and isinstance(rate, float) and rate}
        if rates:
            fail(caller, "layers must not drop activations", f"{rates} in {name}", "Set them to 0 in its config.")
        module.training = True


def base_of(model: nn.Module) -> nn.Module:
    """The transformers model inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore[reportCallIssue, reportReturnType]


UNBOUNDED = 2**31 - 1
"""Context of a model that has no limit, such as a state-space model."""


def context_of(model: nn.Module) -> int:
    """Positions a model knows, prompt and completion together."""
    config = base_of(model).config.get_text_config()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    names = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
    given = [getattr(config, name, None) for name in names]
    return min((int(size) for size in given if isinstance(size, int) and size > 0), default=UNBOUNDED)
