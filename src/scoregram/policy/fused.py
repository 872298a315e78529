"""The forward pass of Llama-like models in a third of the operations, for sampling.

For one token per row, most of a forward pass through transformers is the cost of starting small operations. Here the
three projections of attention are one product, as are the two of the gated MLP; norms are single calls, residuals are
added inside products, and keys are turned together with queries. The numbers are those of the model up to rounding,
and `choice` verifies that before this is used.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scoregram.policy.gathered import gathered
from scoregram.policy.modes import base_of, computed_in
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


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""What tokens gather, `(n, Hq d)`, from the number of a layer, their queries, keys and values, `(n, heads, d)` each."""


class Fused(Shared):
    """`Shared` with a forward pass of its own."""

    def start(self, prompts: Sequence[Sequence[int]], repeats: int) -> Tensor:
        """As `Shared`, by the weights as they are now, joined."""
        inner: Any = base_of(self.model)
        kind = computed_in(inner.lm_head.weight)
        self.heads = inner.config.num_attention_heads, inner.config.num_key_value_heads
        self.layers = [joined_layer(layer, kind) for layer in inner.model.layers]
        self.embedding, self.norm = inner.model.embed_tokens, norm_of(inner.model.norm, kind)
        self.head = joined([inner.lm_head], kind, self.norm)
        self.turns = self.turns_of(inner, kind)
        return super().start(prompts, repeats)

    def turns_of(self, inner: Any, dtype: torch.dtype) -> Tensor:
        """`(capacity, 2, d)` cosine and sine of every position, as the model's own embedding gives them in a dtype."""
        places = torch.arange(self.capacity, device=self.embedding.weight.device)[None]
        cosine, sine = inner.model.rotary_emb(self.embedding.weight[:1, :1].to(dtype), places)
        half = sine.shape[2] // 2
        # the halves of a head swap places, the first with its sign changed: put that sign into the sine
        signed = torch.cat([-sine[0, :, :half], sine[0, :, half:]], 1)
        return torch.stack([cosine[0], signed], 1)

    def decoding(self) -> AbstractContextManager[None]:
        """Inference mode, cheaper than the absence of gradients: here nothing the model keeps is made or changed."""
        return torch.inference_mode()

    def prefill(self, ids: Tensor, positions: Tensor, first_row: int, repeats: int) -> Tensor:
        """As `Shared`, on a CPU by the forward pass of this file; a GPU runs ahead of Python over so many tokens."""
        if ids.is_cuda:
            return super().prefill(ids, positions, first_row, repeats)
        rows, length = ids.shape
        visible, shared = seen_by_prompts(positions) if self.is_padded else None, self.heads[0] // self.heads[1]

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            query, key, value = (heads.unflatten(0, ids.shape).transpose(1, 2) for heads in (query, key, value))
            self.cache.fill(index, key, value, first_row, repeats)
            if shared > 1:
                key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
            scale = self.layers[index].scale
            found = F.scaled_dot_product_attention(
                query, key, value, attn_mask=visible, is_causal=visible is None, scale=scale
            )
            return found.transpose(1, 2).reshape(rows * length, -1)

        hidden = self.hidden(ids.flatten(), self.turns[positions.clamp(min=0).flatten()], attend)
        return self.scores(hidden.view(rows, length, -1)[:, -1])

    def logits(self, token: Tensor, mask: Tensor) -> Tensor:
        """`(N, V)` logits behind `token`, by the forward pass of this file."""
        # where no row is padded, all are at one position and see every column
        together = not self.is_padded and self.cache.column is None
        hides = None if together else mask

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            key, value = self.cache.update(key.unsqueeze(2), value.unsqueeze(2), index)
            query = query.reshape(len(query), key.shape[1], -1, query.shape[2])
            return gathered(query, key, value, hides, self.layers[index].scale).reshape(len(query), -1)

        turn = self.turns[self.cache.length] if together else self.turns[self.position[:, 0]]
        return self.scores(self.hidden(token, turn, attend))

    def hidden(self, token: Tensor, turn: Tensor, attend: Attend) -> Tensor:
        """`(n, D)` last hidden states of `n` tokens, whose positions are in `turn` and which gather by `attend`."""
        hidden = F.embedding(token, self.embedding.weight)
        kind = self.head.weight.dtype
        cosine, sine = turn.unsqueeze(-2).unbind(-3)  # (n, 1, d) or (1, d)
        for index, layer in enumerate(self.layers):
            flat = layer.queries_keys_values(layer.before_attention(hidden).to(kind))
            mixed = attend(index, *self.turned(flat, layer, cosine, sine))
            hidden = layer.output.added_to(hidden, mixed)
            both = layer.gate_and_up(layer.before_mlp(hidden).to(kind))
            gate, up = both.chunk(2, 1)
            hidden = layer.down.added_to(hidden, layer.activation(gate).mul_(up))
        return hidden

    def turned(self, flat: Tensor, layer: Layer, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys turned to their positions, and values, `(n, heads, d)` each."""
        queries, keys = self.heads
        split = flat.view(len(flat), queries + 2 * keys, -1)
        both, value = split[:, : queries + keys], split[:, queries + keys :]
        if layer.head_norms is not None:
            for_query, for_key = layer.head_norms
            both = torch.cat([normed(both[:, :queries], for_query), normed(both[:, queries:], for_key)], 1)
        swapped = both.roll(both.shape[2] // 2, 2)
        both = torch.addcmul(both * cosine, swapped, sine)
        return both[:, :queries], both[:, queries:], value

    def scores(self, hidden: Tensor) -> Tensor:
        """`(n, V)` logits behind hidden states."""
        return self.head(self.norm(hidden).to(self.head.weight.dtype))


def seen_by_prompts(positions: Tensor) -> Tensor:
    """`(P, 1, T, T)`: whether a token of a prompt (third axis) sees another (fourth axis); padding sees itself."""
    width = positions.shape[1]
    before = torch.ones(width, width, dtype=torch.bool, device=positions.device).tril()
    itself = torch.eye(width, dtype=torch.bool, device=positions.device)
    return ((positions >= 0)[:, None, :] & before | itself)[:, None]


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
        activation=mlp.act_fn.forward,
        down=joined([mlp.down_proj], dtype),
    )


def normed(x: Tensor, norm: Any) -> Tensor:
    """A norm of single heads."""
    return F.rms_norm(x.to(norm.weight.dtype), norm.weight.shape, norm.weight, norm.variance_epsilon).to(x.dtype)
