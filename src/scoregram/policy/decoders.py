"""Decoders: next-token logits of many rollouts, from the forward pass of transformers with three kinds of KV cache.

| decoder | keys and values | prompts in a batch |
|---|---|---|
| `SharedCacheDecoder` | one block per layer, prefilled once per prompt for all its rollouts | any lengths |
| `ModelCacheDecoder` | the model's own cache | equal lengths |
| `UncachedDecoder` | none: every token takes a forward pass over the whole text | equal lengths |

`fused_decoders` has two more for Llama-like models. This module imports transformers, and `sampler` imports this module
when it draws the first rollout.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from scoregram.policy.models import compute_dtype, has_argument
from scoregram.rollouts import micro_batches

PREFILL_TOKENS = 32768
"""Most prompt tokens in one forward pass."""
GROUPED_ATTENTION = "scoregram_grouped"
"""Name under which transformers finds `grouped_attention`."""
REPLACED_ATTENTION = ("sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Attention implementations that compute the same numbers as `grouped_attention`; any other stays in place."""
UNUSED_ARGUMENTS = frozenset({"position_ids", "cache_position"})
"""Tensor arguments that do not change attention once the mask is prepared."""


class Decoder(ABC):
    """Decodes one batch: `start` once, then `step` after every token, `keep` whenever rollouts have ended."""

    name: ClassVar[str]
    """Short name for records."""
    mixes_lengths: ClassVar[bool] = False
    """Whether prompts of unequal lengths may share a batch."""
    is_capturable: ClassVar[bool] = False
    """Whether a step can be captured as a CUDA graph."""
    refusal: ClassVar[str] = ""
    """Warning if the model's config supports this decoder but the logits of both differ."""

    def __init__(self, model: nn.Module, capacity: int) -> None:
        """`capacity`: tokens of the longest prompt and completion together."""
        self.model, self.capacity = model, capacity

    @abstractmethod
    def start(self, prompts: Sequence[Sequence[int]], repeats: int) -> Tensor:
        """`(N, V)` logits of the first new token of `repeats` rollouts of every prompt."""

    @abstractmethod
    def step(self, token: Tensor) -> Tensor:
        """`(N, V)` logits of the next token, after one more token `(N,)` of every row."""

    @abstractmethod
    def keep(self, places: Tensor) -> None:
        """Keep only the rows at these indices."""

    def decoding(self) -> AbstractContextManager[None]:
        """Context in which every `step` must run."""
        return nullcontext()


class SharedCache(Cache):
    """A KV cache of fixed size: a block `(rows, heads, capacity, width)` of keys and of values for every layer.

    A prompt goes through the model once; `fill` copies its keys and values into the rows of all its rollouts. After
    that, every forward pass writes one column. The column index is an int, or a tensor on the device for a step that is
    captured as a CUDA graph. A captured step returns all `visible` columns, and the mask hides those not yet written.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.rows, self.capacity = rows, capacity
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.length = 0
        """Columns written so far."""
        self.column: Tensor | None = None
        self.visible = capacity

    def fill(self, index: int, keys: Tensor, values: Tensor, first_row: int, repeats: int) -> None:
        """Copy keys and values of prompts in a layer, `(P, heads, columns, width)`, into `repeats` rows each."""
        if index == len(self.keys):
            self.keys.append(self._block_like(keys))
            self.values.append(self._block_like(values))
        for block, part in ((self.keys[index], keys), (self.values[index], values)):
            rows = block[first_row : first_row + len(part) * repeats, :, : part.shape[2]]
            rows.unflatten(0, (len(part), repeats)).copy_(part[:, None])
        self.length = keys.shape[2]

    def _block_like(self, part: Tensor) -> Tensor:
        """A block for every row, in the dtype of attention: under autocast, a wider block would be cast at every step.

        Zeros on a GPU: a captured step also reads masked columns that are not written yet, and a NaN in them would
        poison the sum.
        """
        make = torch.zeros if part.is_cuda else torch.empty
        shape = self.rows, part.shape[1], self.capacity, part.shape[3]
        return make(*shape, dtype=compute_dtype(part), device=part.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write the next column of a layer and return the keys and values that its queries may see."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if self.column is not None:
            keys.index_copy_(2, self.column, key_states.to(keys.dtype))
            values.index_copy_(2, self.column, value_states.to(values.dtype))
            return keys[:, :, : self.visible], values[:, :, : self.visible]
        for block, states in ((keys, key_states), (values, value_states)):
            block.narrow(2, self.length, 1).copy_(states)
        return keys.narrow(2, 0, self.length + 1), values.narrow(2, 0, self.length + 1)

    def advance(self) -> None:
        """Move to the next column, after every layer has written this one."""
        if self.column is not None:
            self.column += 1
        else:
            self.length += 1

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows; only written columns are copied."""
        for blocks in (self.keys, self.values):
            for index, block in enumerate(blocks):
                kept = block.new_empty(len(rows), *block.shape[1:])
                torch.index_select(block[:, :, : self.length], 0, rows, out=kept[:, :, : self.length])
                blocks[index] = kept
        self.rows = len(rows)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns written so far."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of columns that a mask covers, and the index of the first."""
        return (self.visible if self.column is not None else self.length + query_length), 0


class SharedCacheDecoder(Decoder):
    """The model's forward pass with a `SharedCache`, for models whose layers are plain attention.

    Prompts are padded on the left, so every row writes the same column.
    """

    name = "shared-cache"
    mixes_lengths = True
    is_capturable = True
    refusal = (
        "this model's logits change when prompts of unequal lengths share a batch; "
        "prompts of each length are sampled in a batch of their own, which is slower"
    )

    def __init__(self, model: nn.Module, capacity: int) -> None:
        super().__init__(model, capacity)
        self.capacity = -(-capacity // 16) * 16  # some attention kernels need aligned rows of the mask

    def start(self, prompts: Sequence[Sequence[int]], repeats: int) -> Tensor:  # noqa: D102
        device = next(self.model.parameters()).device
        longest = max(map(len, prompts))
        pads = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
        positions = torch.arange(longest, device=device) - pads[:, None]
        self.is_padded = len(set(map(len, prompts))) > 1
        self.cache = SharedCache(len(prompts) * repeats, self.capacity)
        logits, chunk = [], max(1, PREFILL_TOKENS // longest)
        for here in micro_batches(len(prompts), chunk):
            logits.append(self.prefill(ids[here], positions[here], here.start * repeats, repeats))
        pads = pads.repeat_interleave(repeats)
        self.position = (longest - pads)[:, None]  # of the next token
        hidden = torch.arange(self.capacity, device=device) < pads[:, None]
        zeros = torch.zeros(hidden.shape, dtype=self.cache.keys[0].dtype, device=device)
        self.mask = zeros.masked_fill(hidden, torch.finfo(zeros.dtype).min)[:, None, None]  # (N, 1, 1, capacity)
        return torch.cat(logits).repeat_interleave(repeats, 0)

    def prefill(self, ids: Tensor, positions: Tensor, first_row: int, repeats: int) -> Tensor:
        """`(P, V)` logits after the prompts; their keys and values are copied into the rows of their rollouts.

        Args:
            ids: `(P, T)`, padded on the left.
            positions: `(P, T)`, negative for padding.
            first_row: Row of the first rollout.
            repeats: Rollouts of each prompt.
        """
        last_only = {"logits_to_keep": 1} if has_argument(self.model, "logits_to_keep") else {}
        prefilled = DynamicCache()
        out = self.model(
            input_ids=ids,
            attention_mask=(positions >= 0).long() if self.is_padded else None,
            position_ids=positions.clamp(min=0),
            past_key_values=prefilled,
            use_cache=True,
            **last_only,
        )
        layers: list[Any] = prefilled.layers
        for index, layer in enumerate(layers):
            self.cache.fill(index, layer.keys, layer.values, first_row, repeats)
        return out.logits[:, -1]

    def step(self, token: Tensor) -> Tensor:  # noqa: D102
        if self.cache.column is not None:
            self.mask.index_fill_(3, self.cache.column, 0.0)
        visible, _ = self.cache.get_mask_sizes(1, 0)
        logits = self.logits(token, self.mask[..., :visible])
        self.cache.advance()
        self.position += 1
        return logits

    def logits(self, token: Tensor, mask: Tensor) -> Tensor:
        """`(N, V)` logits after `token`."""
        out = self.model(
            input_ids=token[:, None],
            attention_mask=mask,
            position_ids=self.position,
            past_key_values=self.cache,
            use_cache=True,
        )
        return out.logits[:, -1]

    def use_column_tensor(self) -> int:
        """Keep the column index in a tensor, so that a step can be captured; returns the number of columns written."""
        written = self.cache.length
        self.cache.column = torch.tensor([written], device=self.mask.device)
        self.mask[..., written:] = torch.finfo(self.mask.dtype).min
        return written

    def decoding(self) -> AbstractContextManager[None]:  # noqa: D102
        return _grouped_heads(self.model)

    def keep(self, places: Tensor) -> None:  # noqa: D102
        self.cache.keep(places)
        self.mask, self.position = self.mask[places], self.position[places]


class ModelCacheDecoder(Decoder):
    """The model's forward pass with its own cache: sliding windows, state-space models, hybrids.

    All prompts in a batch have the same length: nothing is padded, so the model need not support padding.
    """

    name = "model-cache"

    def __init__(self, model: nn.Module, capacity: int) -> None:
        super().__init__(model, capacity)
        self.argument = "past_key_values" if has_argument(model, "past_key_values") else "cache_params"

    def start(self, prompts: Sequence[Sequence[int]], repeats: int) -> Tensor:  # noqa: D102
        ids = torch.tensor(prompts, device=next(self.model.parameters()).device)
        out = self.model(input_ids=ids, use_cache=True)
        self.cache: Any = getattr(out, self.argument)
        rows = torch.arange(len(prompts), device=ids.device).repeat_interleave(repeats)
        self.cache.reorder_cache(rows)
        return out.logits[rows, -1]

    def step(self, token: Tensor) -> Tensor:  # noqa: D102
        out = self.model(input_ids=token[:, None], use_cache=True, **{self.argument: self.cache})
        self.cache = getattr(out, self.argument)
        return out.logits[:, -1]

    def keep(self, places: Tensor) -> None:  # noqa: D102
        self.cache.reorder_cache(places)


class UncachedDecoder(Decoder):
    """A forward pass over the whole text for every token: works for any model."""

    name = "uncached"

    def start(self, prompts: Sequence[Sequence[int]], repeats: int) -> Tensor:  # noqa: D102
        ids = torch.tensor(prompts, device=next(self.model.parameters()).device)
        self.ids = ids.repeat_interleave(repeats, 0)
        return self.model(input_ids=ids, use_cache=False).logits[:, -1].repeat_interleave(repeats, 0)

    def step(self, token: Tensor) -> Tensor:  # noqa: D102
        self.ids = torch.cat([self.ids, token[:, None]], 1)
        return self.model(input_ids=self.ids, use_cache=False).logits[:, -1]

    def keep(self, places: Tensor) -> None:  # noqa: D102
        self.ids = self.ids[places]


def single_token_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None = None
) -> Tensor:
    """`softmax(s q kᵀ + mask) v`, `(N, H, G, d)`, of one new token per row, for `G` query heads that share a key head.

    On a CPU with MKL, two batched products beat the fused kernel, which starts a task for every row and head. Without
    MKL, torch computes a batched product as a loop. Half precision uses the kernel, because it sums in float32.

    Args:
        query: `(N, H, G, d)`.
        key: `(N, H, L, d)`.
        value: `(N, H, L, d)`; its last axis may differ.
        mask: `(N, 1, 1, L)`, added to the scores; None makes every column visible.
        scale: `s`, by default `d**-0.5`.
    """
    if query.is_cuda or query.dtype in (torch.float16, torch.bfloat16) or not torch.backends.mkl.is_available():
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    rows, heads, shared, width = query.shape
    factor = width**-0.5 if scale is None else scale
    flat, columns = query.reshape(rows * heads, shared, width), key.flatten(0, 1).transpose(1, 2)
    if mask is None:
        scores = torch.baddbmm(query.new_empty(1, 1, 1), flat, columns, beta=0, alpha=factor)
    else:
        bias = mask.expand(rows, heads, shared, -1).reshape(rows * heads, shared, -1)
        scores = torch.baddbmm(bias, flat, columns, alpha=factor)
    return torch.bmm(scores.softmax(2), value.flatten(0, 1)).view(rows, heads, shared, -1)


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention of one new token per row that does not copy keys and values shared by several query heads.

    `(N, Hq, 1, d)` queries are viewed as `(N, Hkv, Hq/Hkv, d)` and multiplied with the `(N, Hkv, L, d)` keys in the
    cache; sdpa would first repeat keys and values for every query head. Calls with several query positions or with
    arguments beyond a mask (capped scores, sinks, position biases) go to sdpa.
    """
    odd = any(isinstance(given, Tensor) and name not in UNUSED_ARGUMENTS for name, given in more.items())
    if query.shape[2] != 1 or odd or more.get("softcap") is not None:
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more)
    rows, heads, _, width = query.shape
    shared = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    mixed = single_token_attention(shared, key, value, attention_mask, scaling)
    return mixed.reshape(rows, 1, heads, value.shape[3]), None


AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)


@contextmanager
def _grouped_heads(model: nn.Module) -> Iterator[None]:
    """Inside, the layers of `model` use `grouped_attention` in place of sdpa or flash attention."""
    configs: dict[int, Any] = {
        id(module.config): module.config for module in model.modules() if hasattr(module, "config")
    }
    replaced = [
        (config, config._attn_implementation)
        for config in configs.values()
        if getattr(config, "_attn_implementation", None) in REPLACED_ATTENTION
    ]
    try:
        for config, _ in replaced:
            config._attn_implementation = GROUPED_ATTENTION
        yield
    finally:
        for config, name in replaced:
            config._attn_implementation = name
