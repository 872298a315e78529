"""Products and lookups whose backward pass hands its factors to the collector, and the weight nothing."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from scoregram.gram.collect import Collector, Slot
from scoregram.gram.layout import Layout
from scoregram.gram.outer import Factors, Lookup, Use


@dataclass
class Call:
    """What one intercepted operation has to remember for its backward pass."""

    layout: Layout
    collector: Collector
    owner: Tensor | None
    transposed: bool
    source: tuple[Tensor, Tensor] | None
    """Parameter and region of the weight, None if the weight is not trained."""
    bias: Tensor | None
    """The bias, None if it is not trained."""
    slot: Slot | None = None
    """Where the use was announced; None for an operation first seen when a layer was run again in the backward pass."""

    def blocks(self, value: Tensor) -> Tensor:
        """Rows of a tensor, one block per rollout."""
        blocks = self.layout.blocks(value, self.owner)
        assert blocks is not None, "owners were checked in the forward pass"
        return blocks

    def collect(self, x: Tensor, g: Tensor) -> None:
        """Hand factors and bias rows of a product to the collector."""
        if self.source is None and self.bias is None:
            return
        rows_g = self.blocks(g)
        if self.source is not None:
            rows_x = self.blocks(x)
            self.deliver(Factors(rows_x, rows_g) if self.transposed else Factors(rows_g, rows_x))
        if self.bias is not None:
            wide = torch.promote_types(rows_g.dtype, torch.float32)
            self.collector.rows_arrived(self.bias, rows_g.sum(1, dtype=wide))

    def deliver(self, use: Use) -> None:
        """Hand a use of the weight to the collector."""
        if self.slot is not None:
            self.collector.use_arrived(self.slot, use)
        elif self.source is not None:
            self.collector.late_use_arrived(*self.source, use)


class StreamedProduct(torch.autograd.Function):
    """`x Wᵀ + b` (or `x W + b`) whose backward pass gives its factors to the collector, and the weight nothing."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        low_weight: Tensor,
        bias: Tensor | None,
        low_bias: Tensor | None,
        call: Call,
    ) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(x, low_weight)
        return F.linear(x, low_weight.mT if call.transposed else low_weight, low_bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        (g,) = grad_outputs
        x, weight = ctx.saved_tensors  # outside: a checkpointed layer may run again here, and must be seen
        call: Call = ctx.call
        grad_x = None
        with torch._C.DisableTorchFunction():
            if ctx.needs_input_grad[0]:
                grad_x = g @ (weight.mT if call.transposed else weight)
            call.collect(x, g)
        return grad_x, None, None, None, None, None


def has_saved_tensor_hooks() -> bool:
    """Whether somebody decides what becomes of tensors saved for the backward pass, as checkpointing does."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # pyright: ignore[reportAttributeAccessIssue]


def hooked_product(x: Tensor, weight: Tensor, call: Call) -> Tensor:
    """`x Wᵀ` with a hook on the result in place of `StreamedProduct.backward`: the same at less host time.

    The input is held by the hook and let go when the gradient arrives. Under checkpointing it would be held from the
    forward pass on: there, `StreamedProduct` leaves it to autograd.
    """
    product = F.linear(x, weight)
    kept = [x.detach()]

    def arrived(g: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            call.collect(kept.pop(), g)

    product.register_hook(arrived)
    return product


class StreamedLookup(torch.autograd.Function):
    """Rows of an embedding, whose backward pass gives ids and gradients to the collector."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, counted: Tensor, rows: Tensor, weight: Tensor, call: Call) -> Tensor:  # noqa: D102
        ctx.call = call
        ctx.save_for_backward(counted, rows)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, ...]:  # noqa: D102
        (g,) = grad_outputs
        counted, rows = ctx.saved_tensors
        call: Call = ctx.call
        rollouts = call.layout.rollouts
        with torch._C.DisableTorchFunction():
            call.deliver(Lookup(counted.reshape(rollouts, -1), g.reshape(rollouts, -1, g.shape[-1]), rows))
        return None, None, None, None, None


def under_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Operands of a matrix product as autocast would hand them to it."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight.detach(), None if bias is None else bias.detach()
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)
