"""Norms without the mode: most modules that own a small parameter scale their input with it, and do nothing else.

Watching every operation of a norm costs more host time than the norm itself. So a module without children is watched
once; if its parameters were only cast, shifted or scaled by numbers and then broadcast against its input, it is run
from then on as it is, with one copy of each parameter per rollout in the parameter's place. A layer norm takes its
weight inside a fused operation instead: the classes known to do that are listed, with what they add to the weight.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scoregram.gram.leaves import BROADCASTS, Leaves, aligned_leaf

BROADCASTING: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Modules that were seen to broadcast their parameters against an input of so many axes."""
LAYER_NORMS = MappingProxyType(
    {
        "torch.nn.modules.normalization.LayerNorm": 0.0,
        "transformers.models.nemotron.modeling_nemotron.NemotronLayerNorm1P": 1.0,
    }
)
"""Layer norms by class, and what is added to the weight."""
CASTS = {Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.type, Tensor.type_as}
HARMLESS_READS = {
    getattr(Tensor, name).__get__ for name in ("dtype", "device", "requires_grad", "is_cuda", "is_leaf", "layout")
}
"""Attributes that are the same for a parameter and for its copies."""


@dataclass
class Watch:
    """What was seen of the parameters while a module ran."""

    only_broadcast: bool = True
    axes: set[int] = field(default_factory=set)
    """Numbers of axes of what the parameters were broadcast against."""

    def saw(self, func: Callable[..., Any], tensors: list[Tensor], result: Any, *, meets: bool) -> None:
        """Note an operation in which a parameter took part; it `meets` the activations or stays on its side."""
        kept_shape = isinstance(result, Tensor) and result.shape == max(tensors, key=Tensor.dim).shape
        if not kept_shape or func not in (BROADCASTS if meets else BROADCASTS | CASTS):
            self.only_broadcast = False
        elif meets:
            self.axes.add(result.ndim)

    def read(self, func: Callable[..., Any]) -> None:
        """Note that an attribute of a parameter was read."""
        self.only_broadcast &= func in HARMLESS_READS

    def remember(self, module: nn.Module, x: Tensor) -> None:
        """Remember a module of which nothing was seen but broadcasting against something of the rank of its input."""
        if self.only_broadcast and self.axes == {x.ndim} and not module._modules:
            BROADCASTING[module] = x.ndim


def with_copies(module: nn.Module, forward: Callable[..., Any], x: Tensor, leaves: Leaves) -> Any:
    """The forward pass of a broadcasting module, with one copy of each trained parameter per rollout.

    None if the input is not what the module was seen with.
    """
    if x.ndim != BROADCASTING[module] or x.shape[0] != leaves.layout.rollouts:
        return None
    trained = {name: p for name, p in module._parameters.items() if p is not None and p.requires_grad}
    copies = {name: aligned_leaf(leaves.of(parameter), x, leaves.layout) for name, parameter in trained.items()}
    if any(copy is None for copy in copies.values()):
        return None
    inside = module.__dict__
    inside.update(copies)  # found before the parameters of the same name
    try:
        return forward(x)
    finally:
        for name in copies:
            del inside[name]


def layer_norm(module: Any, shift: float, x: Tensor, leaves: Leaves) -> Tensor | None:
    """A layer norm with one copy of weight and bias per rollout; None if it is not the usual case."""
    weight, bias, layout = module.weight, module.bias, leaves.layout
    if weight is None or not weight.requires_grad or torch.is_autocast_enabled(x.device.type):
        return None
    scale = aligned_leaf(leaves.of(weight), x, layout)
    if scale is None:
        return None
    if shift:
        scale = scale + shift
    normed = F.layer_norm(x, module.normalized_shape, None, None, module.eps)
    if bias is None:
        return normed * scale
    offset = aligned_leaf(leaves.of(bias), x, layout) if bias.requires_grad else bias
    return None if offset is None else torch.addcmul(offset, normed, scale)


def class_path(module: nn.Module) -> str:
    """Where the class of a module is defined."""
    return f"{type(module).__module__}.{type(module).__qualname__}"
