"""Decoders for Llama-like models with a forward pass of their own, in fewer and larger operations.

For one token per row, most of the time of a transformers forward pass goes into launching small operations.
`FusedDecoder` needs a third of them: the three projections of attention are one product, as are the two of the gated
MLP; a norm is a single call, residuals are added inside products, and queries and keys are rotated together.

`TritonDecoder` is the same on a GPU with eight kernels a layer instead of twenty: at one token per row, the time of a
captured step is proportional to its number of kernels. One Triton kernel rotates queries and keys, writes the KV cache
and attends to it, reading only columns that the row has written; one adds a residual and computes the norm after it;
one computes the gate of the MLP. The four matrix products are cuBLAS calls.

The logits are those of the model up to rounding; the sampler checks that before it uses either decoder.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scoregram import machine
from scoregram.machine import power_of_two
from scoregram.policy.decoders import SharedCacheDecoder, single_token_attention
from scoregram.policy.models import base_model, compute_dtype

LLAMA_LIKE = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Models with this forward pass: norm, attention with rotary positions, norm, gated MLP."""
MOST_COPIED_BYTES = 2**31
"""Joining weights copies them; a model with larger projections is not fused."""
KERNEL_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
"""Dtypes that the Triton kernels support."""
KERNEL_COLUMNS = 64
"""Cache columns that a program of the attention kernel reads at once."""
KERNEL_GATES = 1024
"""Elements of the gate that a program computes."""


def is_fusible(model: nn.Module) -> bool:
    """Whether a model is Llama-like in every part, without adapters and without hooks: a fused pass calls no hook."""
    if type(model).__name__ not in LLAMA_LIKE or not type(model).__module__.startswith("transformers."):
        return False
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return False
    inner: Any = model
    projections: list[Any] = []
    for layer in inner.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        projections += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        projections += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    size = sum(projection.weight.numel() * projection.weight.element_size() for projection in projections)
    return all(type(linear) is nn.Linear for linear in (*projections, inner.lm_head)) and size <= MOST_COPIED_BYTES


def supports_kernels(model: nn.Module) -> bool:
    """Whether a model is fusible, on a GPU with Triton, and the kernels support its dtype, head size and activation."""
    weight = next(model.parameters())
    if not weight.is_cuda or not machine.can_launch() or not is_fusible(model):
        return False
    inner = base_model(model)
    width = inner.model.layers[0].self_attn.head_dim
    is_supported = compute_dtype(weight) in KERNEL_DTYPES and inner.config.hidden_act == "silu"
    return is_supported and width >= 16 and width == power_of_two(width)


@dataclass(frozen=True)
class RmsNorm:
    """`x / √(mean x² + ε)` times its factors."""

    factors: Tensor | None
    epsilon: Tensor
    folded_factors: Tensor | None
    """Factors that are folded into the linear layers after the norm instead."""

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of every row, without its folded factors."""
        if self.folded_factors is None:
            return F.rms_norm(x, x.shape[-1:], self.factors, float(self.epsilon))
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(self.epsilon, length, length, value=1 / x.shape[-1]).rsqrt_()


def _rms_norm(module: Any, dtype: torch.dtype) -> RmsNorm:
    """A norm of the model; in full precision on a CPU its factors are folded, which saves half of the operations."""
    weight = module.weight
    is_folded = not weight.is_cuda and dtype == weight.dtype and dtype in (torch.float32, torch.float64)
    epsilon = torch.tensor(module.variance_epsilon, dtype=weight.dtype)
    return RmsNorm(None if is_folded else weight, epsilon, weight if is_folded else None)


def _head_norm(x: Tensor, norm: Any) -> Tensor:
    """RMSNorm over each head."""
    return F.rms_norm(x.to(norm.weight.dtype), norm.weight.shape, norm.weight, norm.variance_epsilon).to(x.dtype)


@dataclass(frozen=True)
class JoinedLinear:
    """One or several linear layers of the same input as a single product, in the compute dtype."""

    weight: Tensor
    """`(inputs, outputs)`"""
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """`x W + b`."""
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def plus_residual(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual + x W + b`, in one product where dtypes allow."""
        if residual.dtype == x.dtype and self.bias is None:
            return torch.addmm(residual, x, self.weight)
        return residual + self(x)


def _join_linear(parts: Sequence[Any], dtype: torch.dtype, norm: RmsNorm | None = None) -> JoinedLinear:
    """Linear layers side by side, times the folded factors of the norm before them.

    On a CPU the weights are copied input-major, which is faster for few rows. Rows are padded by 16: at a distance of a
    power of two they would compete for the same cache lines. On a GPU a single layer is not copied.
    """
    weights = [part.weight.to(dtype) for part in parts]
    biases = [part.bias for part in parts if part.bias is not None]
    if weights[0].is_cuda:
        weight = (weights[0] if len(weights) == 1 else torch.cat(weights)).T
    else:
        inputs, outputs = weights[0].shape[1], sum(len(weight) for weight in weights)
        weight = torch.empty(inputs, outputs + 16, dtype=dtype)[:, :outputs]
        torch.cat([part.T for part in weights], 1, out=weight)
    if norm is not None and norm.folded_factors is not None:
        weight *= norm.folded_factors[:, None]
    return JoinedLinear(weight, torch.cat(biases).to(dtype) if biases else None)


class FusedLayer:
    """The weights of one decoder layer, parallel projections joined."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention_norm = _rms_norm(layer.input_layernorm, dtype)
        self.mlp_norm = _rms_norm(layer.post_attention_layernorm, dtype)
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.queries_keys_values = _join_linear(projections, dtype, self.attention_norm)
        self.head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        self.scale: float = attention.scaling
        self.output = _join_linear([attention.o_proj], dtype)
        self.gate_and_up = _join_linear([mlp.gate_proj, mlp.up_proj], dtype, self.mlp_norm)
        self.activation = mlp.act_fn.forward
        self.down = _join_linear([mlp.down_proj], dtype)


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention output `(n, Hq d)`, from the index of a layer, and queries, keys and values, `(n, heads, d)` each."""


class FusedDecoder(SharedCacheDecoder):
    """`SharedCacheDecoder` with the forward pass of this file."""

    name = "fused"
    refusal = "the fused forward pass does not match this model's logits; the model's own is used, which is slower"

    def start(self, prompts: Sequence[Sequence[int]], repeats: int) -> Tensor:
        """As `SharedCacheDecoder`, after joining the weights as they are now."""
        inner = base_model(self.model)
        dtype = compute_dtype(inner.lm_head.weight)
        self.heads = inner.config.num_attention_heads, inner.config.num_key_value_heads
        self.layers = [FusedLayer(layer, dtype) for layer in inner.model.layers]
        self.embedding, self.norm = inner.model.embed_tokens, _rms_norm(inner.model.norm, dtype)
        self.head = _join_linear([inner.lm_head], dtype, self.norm)
        self.rotations = self.rotary_table(inner, dtype)
        return super().start(prompts, repeats)

    def rotary_table(self, inner: Any, dtype: torch.dtype) -> Tensor:
        """`(capacity, 2, d)` cosine and sine of every position, as the model's rotary embedding gives them."""
        places = torch.arange(self.capacity, device=self.embedding.weight.device)[None]
        cosine, sine = inner.model.rotary_emb(self.embedding.weight[:1, :1].to(dtype), places)
        half = sine.shape[2] // 2
        # A rotation swaps the halves of a head and negates the first: that sign goes into the sine.
        signed = torch.cat([-sine[0, :, :half], sine[0, :, half:]], 1)
        return torch.stack([cosine[0], signed], 1)

    def decoding(self) -> AbstractContextManager[None]:
        """Inference mode, which is cheaper than `no_grad`; no tensor made inside is stored on the model."""
        return torch.inference_mode()

    def prefill(self, ids: Tensor, positions: Tensor, first_row: int, repeats: int) -> Tensor:
        """As `SharedCacheDecoder`, but fused on a CPU; on a GPU, whole prompts keep the device busy without fusing."""
        if ids.is_cuda:
            return super().prefill(ids, positions, first_row, repeats)
        rows, length = ids.shape
        visible, shared = _prompt_mask(positions) if self.is_padded else None, self.heads[0] // self.heads[1]

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            query, key, value = (heads.unflatten(0, ids.shape).transpose(1, 2) for heads in (query, key, value))
            self.cache.fill(index, key, value, first_row, repeats)
            if shared > 1:
                key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
            scale = self.layers[index].scale
            mixed = F.scaled_dot_product_attention(
                query, key, value, attn_mask=visible, is_causal=visible is None, scale=scale
            )
            return mixed.transpose(1, 2).reshape(rows * length, -1)

        hidden = self.hidden(ids.flatten(), self.rotations[positions.clamp(min=0).flatten()], attend)
        return self.head_logits(hidden.view(rows, length, -1)[:, -1])

    def logits(self, token: Tensor, mask: Tensor) -> Tensor:
        """`(N, V)` logits after `token`, by the fused forward pass."""
        # Without padding all rows are at one position and see every column, so no mask is needed.
        is_aligned = not self.is_padded and self.cache.column is None
        visible = None if is_aligned else mask

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            key, value = self.cache.update(key.unsqueeze(2), value.unsqueeze(2), index)
            query = query.reshape(len(query), key.shape[1], -1, query.shape[2])
            return single_token_attention(query, key, value, visible, self.layers[index].scale).reshape(len(query), -1)

        rotation = self.rotations[self.cache.length] if is_aligned else self.rotations[self.position[:, 0]]
        return self.head_logits(self.hidden(token, rotation, attend))

    def hidden(self, token: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
        """`(n, D)` last hidden states of `n` tokens, given the rotations of their positions and their attention."""
        hidden = F.embedding(token, self.embedding.weight)
        dtype = self.head.weight.dtype
        cosine, sine = rotation.unsqueeze(-2).unbind(-3)  # (n, 1, d) or (1, d)
        for index, layer in enumerate(self.layers):
            flat = layer.queries_keys_values(layer.attention_norm(hidden).to(dtype))
            mixed = attend(index, *self.rotated_heads(flat, layer, cosine, sine))
            hidden = layer.output.plus_residual(hidden, mixed)
            both = layer.gate_and_up(layer.mlp_norm(hidden).to(dtype))
            gate, up = both.chunk(2, 1)
            hidden = layer.down.plus_residual(hidden, layer.activation(gate).mul_(up))
        return hidden

    def rotated_heads(
        self, flat: Tensor, layer: FusedLayer, cosine: Tensor, sine: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys rotated to their positions, and values, `(n, heads, d)` each."""
        queries, keys = self.heads
        split = flat.view(len(flat), queries + 2 * keys, -1)
        both, value = split[:, : queries + keys], split[:, queries + keys :]
        if layer.head_norms is not None:
            query_norm, key_norm = layer.head_norms
            both = torch.cat([_head_norm(both[:, :queries], query_norm), _head_norm(both[:, queries:], key_norm)], 1)
        swapped = both.roll(both.shape[2] // 2, 2)
        both = torch.addcmul(both * cosine, swapped, sine)
        return both[:, :queries], both[:, queries:], value

    def head_logits(self, hidden: Tensor) -> Tensor:
        """`(n, V)` logits from last hidden states."""
        return self.head(self.norm(hidden).to(self.head.weight.dtype))


def _prompt_mask(positions: Tensor) -> Tensor:
    """`(P, 1, T, T)`: whether a prompt token (third axis) sees another (fourth axis); padding sees itself.

    A row of the mask without any visible token would give NaN.
    """
    width = positions.shape[1]
    before = torch.ones(width, width, dtype=torch.bool, device=positions.device).tril()
    itself = torch.eye(width, dtype=torch.bool, device=positions.device)
    return ((positions >= 0)[:, None, :] & before | itself)[:, None]


class TritonDecoder(FusedDecoder):
    """`FusedDecoder` with Triton kernels between the matrix products."""

    name = "triton"
    refusal = "the Triton kernels do not match this model's logits; it decodes without them, which is slower"

    def start(self, prompts: Sequence[Sequence[int]], repeats: int) -> Tensor:
        """As `FusedDecoder`; the kernels read the column index from a tensor, also before a capture."""
        logits = super().start(prompts, repeats)
        self.use_column_tensor()
        return logits

    def rotary_table(self, inner: Any, dtype: torch.dtype) -> Tensor:
        """As `FusedDecoder`, in the dtype of the hidden states, which autocast does not change."""
        return super().rotary_table(inner, self.embedding.weight.dtype)

    def step(self, token: Tensor) -> Tensor:
        """As `SharedCacheDecoder`, without a mask: a row sees the columns from its first to the one it writes."""
        hidden = F.embedding(token, self.embedding.weight)
        next_norms = [*(layer.attention_norm for layer in self.layers[1:]), self.norm]
        normed = self.add_and_norm(hidden, None, self.layers[0].attention_norm)
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            mixed = self.attend(index, self.projections(layer, normed))
            normed = self.add_and_norm(hidden, layer.output(mixed), layer.mlp_norm)
            normed = self.add_and_norm(hidden, layer.down(_gate_product(layer.gate_and_up(normed))), next_norm)
        self.cache.advance()
        self.position += 1
        return self.head(normed)

    def projections(self, layer: FusedLayer, normed: Tensor) -> Tensor:
        """`(N, (Hq + 2 Hkv) d)` queries, keys and values, not rotated yet."""
        flat = layer.queries_keys_values(normed)
        if layer.head_norms is None:
            return flat
        queries, keys = self.heads
        parts = flat.view(len(flat), queries + 2 * keys, -1).split([queries, keys, keys], 1)
        heads = [_head_norm(part, norm) for part, norm in zip(parts, layer.head_norms, strict=False)]
        return torch.cat([*heads, parts[2]], 1).flatten(1).to(flat.dtype)

    def attend(self, index: int, flat: Tensor) -> Tensor:
        """`(N, Hq d)` attention output of rotated queries, after keys and values are written into the cache."""
        queries, keys = self.heads
        column, block = self.cache.column, self.cache.keys[index]
        assert column is not None
        width, shared = block.shape[3], queries // keys
        out = flat.new_empty(len(flat), queries * width)
        arrays = flat, self.rotations, self.position, column, block, self.cache.values[index], out
        _kernel("attend")[(len(flat), keys)](
            *arrays,
            self.capacity,
            self.layers[index].scale,
            KEY_HEADS=keys,
            SHARED=shared,
            ROWS=max(16, power_of_two(shared)),
            WIDTH=width,
            BLOCK=KERNEL_COLUMNS,
            num_warps=2,
        )
        return out

    def add_and_norm(self, hidden: Tensor, change: Tensor | None, norm: RmsNorm) -> Tensor:
        """The norm of the hidden states, after `change` is added to them in place."""
        width = hidden.shape[1]
        out = torch.empty_like(hidden, dtype=self.head.weight.dtype)
        arrays = hidden, hidden if change is None else change, norm.factors, out
        sizes = {"ADDS": change is not None, "BLOCK": power_of_two(width), "num_warps": 4}
        _kernel("add_and_norm")[(len(hidden),)](*arrays, width, float(norm.epsilon), **sizes)
        return out


def _gate_product(both: Tensor) -> Tensor:
    """`silu(g) u` from `(g, u)` side by side: `(N, 2 I)` to `(N, I)`."""
    rows, width = len(both), both.shape[1] // 2
    out = both.new_empty(rows, width)
    _kernel("gate")[(rows, -(-width // KERNEL_GATES))](both, out, width, BLOCK=KERNEL_GATES, num_warps=4)
    return out


def _kernel(name: str) -> Any:
    return machine.kernel("scoregram.policy.triton_kernels", name)
