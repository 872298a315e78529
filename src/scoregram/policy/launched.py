"""The forward pass of `fused` on a GPU with eight kernels a layer in place of twenty.

At one token per row a captured step is as long as its kernels are many. Turning queries and keys, writing the cache and
gathering from it are one kernel here, which reads only the columns that a row has written; a residual and the norm
behind it are another; the gate of the MLP is the third. The four products stay with the vendor's library.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scoregram import machine
from scoregram.machine import power_of_two
from scoregram.policy.fused import Fused, Layer, Norm, is_fusible, normed
from scoregram.policy.modes import base_of, computed_in

KINDS = frozenset({torch.bfloat16, torch.float16, torch.float32})
"""Dtypes of products that the kernels are made for."""
COLUMNS = 64
"""Columns of the cache that a program reads at once."""
GATED = 1024
"""Elements of a gate that a program computes."""


def kernel(name: str) -> Any:
    """A kernel of this room by its name."""
    return machine.kernel("scoregram.policy.triton_kernels", name)


def is_launchable(model: nn.Module) -> bool:
    """Whether a model is fusible, on a GPU, of a kind and shape that the kernels take, with the gate that they know."""
    weight = next(model.parameters())
    if not weight.is_cuda or not machine.can_launch() or not is_fusible(model) or computed_in(weight) not in KINDS:
        return False
    inner: Any = base_of(model)
    width = inner.model.layers[0].self_attn.head_dim
    return inner.config.hidden_act == "silu" and width >= 16 and width == power_of_two(width)


class Launched(Fused):
    """`Fused` by kernels of our own."""

    def start(self, prompts: Sequence[Sequence[int]], repeats: int) -> Tensor:
        """As `Fused`; a tensor says which column is written from the first step on."""
        logits = super().start(prompts, repeats)
        self.use_columns()
        return logits

    def turns_of(self, inner: Any, dtype: torch.dtype) -> Tensor:
        """As the model turns them: in the dtype of its hidden states, which autocast leaves alone."""
        return super().turns_of(inner, self.embedding.weight.dtype)

    def step(self, token: Tensor) -> Tensor:
        """As `Shared`, without a mask: a row sees the columns from its first to the one it writes."""
        logits = self.scores_behind(token)
        self.cache.advance()
        self.position += 1
        return logits

    def scores_behind(self, token: Tensor) -> Tensor:
        """`(N, V)` logits behind `token`."""
        hidden = F.embedding(token, self.embedding.weight)
        behind = [*(layer.before_attention for layer in self.layers[1:]), self.norm]
        ready = self.added(hidden, None, self.layers[0].before_attention)
        for index, (layer, next_norm) in enumerate(zip(self.layers, behind, strict=True)):
            mixed = self.attended(index, self.projected(layer, ready))
            ready = self.added(hidden, layer.output(mixed), layer.before_mlp)
            ready = self.added(hidden, layer.down(gated(layer.gate_and_up(ready))), next_norm)
        return self.head(ready)

    def projected(self, layer: Layer, ready: Tensor) -> Tensor:
        """`(N, (Hq + 2 Hkv) d)` queries, keys and values, not turned yet."""
        flat = layer.queries_keys_values(ready)
        if layer.head_norms is None:
            return flat
        queries, keys = self.heads
        parts = flat.view(len(flat), queries + 2 * keys, -1).split([queries, keys, keys], 1)
        heads = [normed(part, norm) for part, norm in zip(parts, layer.head_norms, strict=False)]
        return torch.cat([*heads, parts[2]], 1).flatten(1).to(flat.dtype)

    def attended(self, index: int, flat: Tensor) -> Tensor:
        """`(N, Hq d)` gathered by turned queries, after keys and values have gone into the cache."""
        queries, keys = self.heads
        column = self.cache.column
        assert column is not None
        block = self.cache.keys[index]
        width, shared = block.shape[3], queries // keys
        out = flat.new_empty(len(flat), queries * width)
        kernel("attend")[(len(flat), keys)](
            flat,
            self.turns,
            self.position,
            column,
            block,
            self.cache.values[index],
            out,
            self.capacity,
            self.layers[index].scale,
            KEY_HEADS=keys,
            SHARED=shared,
            ROWS=max(16, power_of_two(shared)),
            WIDTH=width,
            BLOCK=COLUMNS,
            num_warps=2,
        )
        return out

    def added(self, hidden: Tensor, change: Tensor | None, norm: Norm) -> Tensor:
        """The norm of hidden states, to which a change is added in place first."""
        width = hidden.shape[1]
        out = torch.empty_like(hidden, dtype=self.head.weight.dtype)
        kernel("add_and_norm")[(len(hidden),)](
            hidden,
            hidden if change is None else change,
            norm.factors,
            out,
            width,
            float(norm.epsilon),
            ADDS=change is not None,
            BLOCK=power_of_two(width),
            num_warps=4,
        )
        return out


def gated(both: Tensor) -> Tensor:
    """`silu(g) u` of gates and what they let pass, side by side: `(N, 2 I)` to `(N, I)`."""
    rows, width = len(both), both.shape[1] // 2
    out = both.new_empty(rows, width)
    kernel("gate")[(rows, -(-width // GATED))](both, out, width, BLOCK=GATED, num_warps=4)
    return out
