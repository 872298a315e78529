"""Triton kernels of `TritonDecoder`. Their plain twins are in `FusedDecoder`, which computes the same in torch."""

# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false
import triton
import triton.language as tl


@triton.jit
def attend(
    flat_ptr,
    rotations_ptr,
    position_ptr,
    column_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    capacity,
    scale,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One rollout and key head: rotate its queries and key, write key and value into the KV cache, attend to it.

    Softmax is computed online, one block of cache columns at a time, with a running maximum and a running sum.
    """
    rollout = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(position_ptr + rollout)
    column = tl.load(column_ptr)
    first = column - position  # prompts are padded on the left: the row's first token is in this column
    lane = tl.arange(0, WIDTH)
    across = (lane + WIDTH // 2) % WIDTH
    cosine = tl.load(rotations_ptr + position * 2 * WIDTH + lane).to(tl.float32)
    sine = tl.load(rotations_ptr + position * 2 * WIDTH + WIDTH + lane).to(tl.float32)
    flat_ptr += rollout * (KEY_HEADS * (SHARED + 2) * WIDTH)
    kind = keys_ptr.dtype.element_ty

    key_ptr = flat_ptr + (KEY_HEADS * SHARED + head) * WIDTH
    key = tl.load(key_ptr + lane).to(tl.float32) * cosine + tl.load(key_ptr + across).to(tl.float32) * sine
    key = key.to(kind)
    value = tl.load(flat_ptr + (KEY_HEADS * (SHARED + 1) + head) * WIDTH + lane).to(kind)
    block_start = (rollout * KEY_HEADS + head) * capacity * WIDTH
    keys_ptr += block_start
    values_ptr += block_start
    tl.store(keys_ptr + column * WIDTH + lane, key)
    tl.store(values_ptr + column * WIDTH + lane, value)

    row = tl.arange(0, ROWS)[:, None]
    real = row < SHARED
    query_ptr = flat_ptr + (head * SHARED + row) * WIDTH
    query = tl.load(query_ptr + lane[None, :], mask=real, other=0.0).to(tl.float32) * cosine[None, :]
    query += tl.load(query_ptr + across[None, :], mask=real, other=0.0).to(tl.float32) * sine[None, :]
    query = query.to(kind)

    # The new token attends to itself from registers: the loop reads only columns written in earlier steps.
    highest = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale
    total = tl.full((ROWS,), 1.0, dtype=tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), dtype=tl.float32) + value.to(tl.float32)[None, :]
    for start in range(first // BLOCK * BLOCK, column, BLOCK):
        place = start + tl.arange(0, BLOCK)
        seen = (place >= first) & (place < column)
        offset = place[:, None] * WIDTH + lane[None, :]
        block = tl.load(keys_ptr + offset, mask=seen[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(block), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        top = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - top[:, None])
        fade = tl.exp(highest - top)
        block = tl.load(values_ptr + offset, mask=seen[:, None], other=0.0)
        mixed = tl.dot(weights.to(kind), block, mixed * fade[:, None], input_precision="ieee")
        total = total * fade + tl.sum(weights, 1)
        highest = top
    out_ptr += (rollout * KEY_HEADS + head) * SHARED * WIDTH
    tl.store(out_ptr + row * WIDTH + lane[None, :], (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def add_and_norm(hidden_ptr, change_ptr, factors_ptr, out_ptr, width, epsilon, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    """One row: add a change to the hidden state in place, and write the root-mean-square norm of the sum."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    here = lane < width
    at = row * width + lane
    hidden = tl.load(hidden_ptr + at, mask=here, other=0.0).to(tl.float32)
    if ADDS:
        changed = hidden + tl.load(change_ptr + at, mask=here, other=0.0).to(tl.float32)
        changed = changed.to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + at, changed, mask=here)
        hidden = changed.to(tl.float32)
    normed = hidden * tl.rsqrt(tl.sum(hidden * hidden, 0) / width + epsilon)
    normed *= tl.load(factors_ptr + lane, mask=here, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, normed.to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def gate(both_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """A block of a row: `silu(g) u` of the two halves of `(g, u)`."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = lane < width
    opening = tl.load(both_ptr + row * 2 * width + lane, mask=here, other=0.0).to(tl.float32)
    passing = tl.load(both_ptr + row * 2 * width + width + lane, mask=here, other=0.0).to(tl.float32)
    gated = opening * tl.sigmoid(opening) * passing
    tl.store(out_ptr + row * width + lane, gated.to(out_ptr.dtype.element_ty), mask=here)
