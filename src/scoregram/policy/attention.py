"""Attention of one new token per row, without copying keys and values that several query heads share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from scoregram.policy.gathered import gathered

NAME = "scoregram_grouped"
REPLACED = ("sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Implementations that compute the same numbers; any other stays in place."""
KNOWN_TENSORS = frozenset({"position_ids", "cache_position"})
"""Further tensor arguments that attention to a prepared mask has no use for."""


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
    """Attention where the query heads that share a key head stand in for query positions.

    `(N, Hq, 1, d)` queries are read as `(N, Hkv, Hq/Hkv, d)`: one product with the `(N, Hkv, L, d)` keys as they lie in
    the cache, where the usual way first repeats keys and values for every query head. Anything beyond a single query
    position and a mask (capped scores, sinks, position biases) is left to the usual way.
    """
    odd = any(isinstance(given, Tensor) and name not in KNOWN_TENSORS for name, given in more.items())
    if query.shape[2] != 1 or odd or more.get("softcap") is not None:
        usual = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return usual(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more)
    rows, heads, _, width = query.shape
    shared = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    return gathered(shared, key, value, attention_mask, scaling).reshape(rows, 1, heads, value.shape[3]), None


AttentionInterface.register(NAME, grouped_attention)


@contextmanager
def grouped_heads(model: nn.Module) -> Iterator[None]:
    """Inside, the layers of `model` use `grouped_attention`; a model that computes attention its own way is left so."""
    configs: dict[int, Any] = {
        id(module.config): module.config for module in model.modules() if hasattr(module, "config")
    }
    before = [
        (config, config._attn_implementation)
        for config in configs.values()
        if getattr(config, "_attn_implementation", None) in REPLACED
    ]
    try:
        for config, _ in before:
            config._attn_implementation = NAME
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name
