"""What sampling needs to know of a model, and the mode it needs it in."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


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
