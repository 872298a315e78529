"""A decoding step of Llama-like models in a third of the operations.

For one token per row, most of a forward pass through transformers is the cost of starting small operations. Here the
three projections of attention are one product, as are the two of the gated MLP; norms are single calls, residuals are
added inside products, and keys are turned together with queries. The numbers are those of the model up to rounding,
and `choice` verifies that before this is used.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scoregram.policy.gathered import gathered
from scoregram.policy.modes import base_of
from scoregram.policy.ways import Shared

FAMILIES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Models with this forward pass: norm, attention with rotary positions, norm, gated MLP."""
MOST_BYTES = 2**31
"""Joined weights are copies; a model whose copies would be larger decodes without."""


def is_fusible(model: nn.Module) -> bool:
    """Whether a model is Llama-like through and through: no adapters, no hooks that a shortcut would miss."""
    if type(model).__name__ not in FAMILIES or not type(model).__module__.startswith("transformers."):
        return False
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return False
    inner: Any = model
    projections = [projection for layer in inner.model.layers for projection in projections_of(layer)]
    size = sum(projection.weight.numel() * projection.weight.element_size() for projection in projections)
    return all(type(linear) is nn.Linear for linear in (*projections, inner.lm_head)) and size <= MOST_BYTES


def projections_of(layer: Any) -> tuple[Any, ...]:
    """The seven linear maps of a layer."""
    attention, mlp = layer.self_attn, layer.mlp
    return (
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    )


@dataclass(frozen=True)
class Joined:
    """One linear map, possibly of several side by side, in the dtype of the products."""

    weight: Tensor
    """`(inputs, outputs)`"""
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """`x W + b`."""
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual + x W + b`, in one product where dtypes allow."""
        if residual.dtype == x.dtype and self.bias is None:
            return torch.addmm(residual, x, self.weight)
        return residual + self(x)


def joined(parts: Sequence[Any], dtype: torch.dtype, behind: "Norm | None" = None) -> Joined:
    """Linear layers of one input as a single map, with the factors of the norm in front of them where those are open.

    On a CPU the weights are laid out by inputs, which is faster for few rows, and with room behind each, lest their
    distance be a power of two and all fall into the same lines of a cache; on a GPU a single layer is not copied.
    """
    weights = [part.weight.to(dtype) for part in parts]
    biases = [part.bias for part in parts if part.bias is not None]
    if weights[0].is_cuda:
        weight = (weights[0] if len(weights) == 1 else torch.cat(weights)).T
    else:
        inputs, outputs = weights[0].shape[1], sum(len(weight) for weight in weights)
        weight = torch.empty(inputs, outputs + 16, dtype=dtype)[:, :outputs]
        torch.cat([part.T for part in weights], 1, out=weight)
    if behind is not None and behind.open_factors is not None:
        weight *= behind.open_factors[:, None]
    return Joined(weight, torch.cat(biases).to(dtype) if biases else None)


@dataclass(frozen=True)
class Norm:
    """A root-mean-square norm, `x / √(mean x² + ε)` times its factors."""

    factors: Tensor | None
    epsilon: Tensor
    open_factors: Tensor | None
    """Factors left to the linear maps behind the norm."""

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of every row, without its open factors."""
        if self.open_factors is None:
            return F.rms_norm(x, x.shape[-1:], self.factors, float(self.epsilon))
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(self.epsilon, length, length, value=1 / x.shape[-1]).rsqrt_()


def norm_of(module: Any, dtype: torch.dtype) -> Norm:
    """A norm of the model; in full precision on a CPU its factors are left open, which saves half of the operations."""
    weight = module.weight
    leaves_open = not weight.is_cuda and dtype == weight.dtype and dtype in (torch.float32, torch.float64)
    epsilon = torch.tensor(module.variance_epsilon, dtype=weight.dtype)
    return Norm(None if leaves_open else weight, epsilon, weight if leaves_open else None)


@dataclass(frozen=True)
class Layer:
    """What one layer needs for one token per row."""

    before_attention: Norm
    queries_keys_values: Joined
    head_norms: tuple[Any, Any] | None
    """Of queries and keys, where the family has them."""
    scale: float
    output: Joined
    before_mlp: Norm
    gate_and_up: Joined
    activation: Any
    down: Joined


class Fused(Shared):
    """`Shared` with a forward pass of its own for everything after the prompts."""

    def start(self, prompts: Sequence[Sequence[int]], repeats: int) -> Tensor:
        """As `Shared`, and the weights as they are now, joined."""
        logits = super().start(prompts, repeats)
        inner: Any = base_of(self.model)
        kind = self.cache.keys[0].dtype  # what products are computed in
        self.heads = inner.config.num_attention_heads, inner.config.num_key_value_heads
        self.layers = [joined_layer(layer, kind) for layer in inner.model.layers]
        self.embedding, self.norm = inner.model.embed_tokens, norm_of(inner.model.norm, kind)
        self.head = joined([inner.lm_head], kind, self.norm)
        places = torch.arange(self.capacity, device=logits.device)[None]
        cosine, sine = inner.model.rotary_emb(self.embedding.weight[:1, :1].to(kind), places)
        half = sine.shape[2] // 2
        # the halves of a head swap places, the first with its sign changed: put that sign into the sine
        signed = torch.cat([-sine[0, :, :half], sine[0, :, half:]], 1)
        self.turns = torch.stack([cosine[0], signed], 1)  # (capacity, 2, d)
        return logits

    def decoding(self) -> AbstractContextManager[None]:
        """Inference mode, cheaper than the absence of gradients: here nothing the model keeps is made or changed."""
        return torch.inference_mode()

    def logits(self, token: Tensor, mask: Tensor) -> Tensor:
        """`(N, V)` logits behind `token`, by the forward pass of this file."""
        hidden = F.embedding(token, self.embedding.weight)
        # where no row is padded, all are at one position and see every column
        together = not self.is_padded and self.cache.column is None
        hides = None if together else mask
        turn = self.turns[self.cache.length] if together else self.turns[self.position[:, 0]]
        cosine, sine = turn.unsqueeze(-2).unbind(-3)  # (N, 1, d) or (1, d)
        for index, layer in enumerate(self.layers):
            mixed = self.attention(index, layer, layer.before_attention(hidden), cosine, sine, hides)
            hidden = layer.output.added_to(hidden, mixed)
            both = layer.gate_and_up(layer.before_mlp(hidden).to(mixed.dtype))
            gate, up = both.chunk(2, 1)
            hidden = layer.down.added_to(hidden, layer.activation(gate).mul_(up))
        return self.head(self.norm(hidden).to(self.head.weight.dtype))

    def attention(
        self, index: int, layer: Layer, x: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor | None
    ) -> Tensor:
        """`(N, Hq d)`: what the new token gathers from all columns so far, its own included."""
        queries, keys = self.heads
        rows = len(x)
        flat = layer.queries_keys_values(x.to(self.head.weight.dtype))
        split = flat.view(rows, queries + 2 * keys, -1)
        turned, value = split[:, : queries + keys], split[:, queries + keys :]
        if layer.head_norms is not None:
            for_query, for_key = layer.head_norms
            turned = torch.cat([normed(turned[:, :queries], for_query), normed(turned[:, queries:], for_key)], 1)
        half = turned.shape[2] // 2
        swapped = torch.cat([turned[..., half:], turned[..., :half]], 2)
        turned = torch.addcmul(turned * cosine, swapped, sine)
        key, values = self.cache.update(turned[:, queries:, None], value[:, :, None], index)
        query = turned[:, :queries].reshape(rows, keys, queries // keys, -1)
        return gathered(query, key, values, mask, layer.scale).reshape(rows, -1)


def joined_layer(layer: Any, dtype: torch.dtype) -> Layer:
    """A decoder layer, its parallel projections side by side."""
    attention, mlp = layer.self_attn, layer.mlp
    first, second = norm_of(layer.input_layernorm, dtype), norm_of(layer.post_attention_layernorm, dtype)
    return Layer(
        before_attention=first,
        queries_keys_values=joined([attention.q_proj, attention.k_proj, attention.v_proj], dtype, first),
        head_norms=(attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None,
        scale=attention.scaling,
        output=joined([attention.o_proj], dtype),
        before_mlp=second,
        gate_and_up=joined([mlp.gate_proj, mlp.up_proj], dtype, second),
        activation=mlp.act_fn,
        down=joined([mlp.down_proj], dtype),
    )


def normed(x: Tensor, norm: Any) -> Tensor:
    """A norm of single heads."""
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
