"""What one new token per row gathers from the cache."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def gathered(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """`softmax(s q kᵀ + mask) v`, `(N, H, G, d)`, for `G` query heads that share a key head.

    On a CPU two batched products beat the fused kernel, which starts a task for every row and head, where there is MKL
    to compute them together: elsewhere they are one product after another. Half precision keeps to the kernel, which
    sums in float32.

    Args:
        query: `(N, H, G, d)`.
        key: `(N, H, L, d)`.
        value: `(N, H, L, d)`; its last axis may differ.
        mask: `(N, 1, 1, L)`, added to the scores; None lets every column be seen.
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
