"""A model without its dropout, whatever mode it is in."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

DROPOUTS = {torch.dropout, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}


class DropoutOff(TorchFunctionMode):
    """Runs a model without its dropout, in whatever mode it is, and remembers whether any was active."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "__get__":
            return self.read(func, args)
        if func in DROPOUTS:
            return self.without_dropout(func, args, kwargs)
        if func is F.scaled_dot_product_attention:
            args, kwargs = self.undropped_attention(args, kwargs)
        return self.run(func, args, kwargs)

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation as it is."""
        return func(*args, **kwargs)

    def read(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Read an attribute; one that is a tensor (`.T`, `.data`) is the result of an operation."""
        value = func(*args)
        return self.run(func, args, {}) if isinstance(value, Tensor) else value

    def without_dropout(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The input of a dropout."""
        bound = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
        self.dropped |= bool(bound.get("p", 0.5)) and bool(bound.get("training", bound.get("train", True)))
        return bound["input"]

    def undropped_attention(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of an attention with its dropout at zero (the fifth argument, or `dropout_p`)."""
        rate = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        self.dropped |= bool(rate)
        if len(args) > 4:
            return (*args[:4], 0.0, *args[5:]), kwargs
        return args, kwargs | {"dropout_p": 0.0}
