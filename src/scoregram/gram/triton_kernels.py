"""The Triton kernels. `contract` and `head` launch them, next to their plain PyTorch twins. Importing needs Triton."""

# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false
import triton
import triton.language as tl


@triton.jit
def gram_and_sums_kernel(
    rows_ptr,
    sums_ptr,
    high_ptr,
    low_ptr,
    partial_ptr,
    width,
    rows_stride,
    sums_stride,
    rollouts,
    blocks,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    STACK: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Gram of a tile of rows, summed over this program's `blocks` column blocks, and the weighted sums of its rows.

    Row `r` of a tile is rollout `r % PADDED` in column block `r // PADDED` of `STACK`; off-diagonal blocks of the
    product mix column blocks and are dropped later (`contract.PartialGrams.take`).
    """
    program = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, TILE)
    rollout = (row % PADDED)[:, None]
    within = ((row // PADDED) * COLUMNS)[:, None] + tl.arange(0, COLUMNS)[None, :]
    square = row[:, None] * TILE + row[None, :]
    read = rollout < rollouts
    offset = rollout.to(tl.int64) * rows_stride
    sums_offset = rollout.to(tl.int64) * sums_stride
    total = tl.zeros((TILE, TILE), dtype=tl.float64)
    if COUNT > 0:
        high = tl.load(high_ptr + square)
        low = tl.load(low_ptr + square)
    for start in range(0, blocks, BLOCKS):
        # float32 on the tensor cores for BLOCKS * COLUMNS columns, then float64: longer sums would lose digits
        gram = tl.zeros((TILE, TILE), dtype=tl.float32)
        for block in range(start, tl.minimum(start + BLOCKS, blocks)):
            column = (program * blocks + block) * (COLUMNS * STACK) + within
            tile = tl.load(rows_ptr + offset + column, mask=read & (column < width), other=0.0)
            gram = tl.dot(tile, tl.trans(tile), gram)
            if COUNT > 0:
                mixed = tl.dot(high, tile)  # high + low: weights to full precision from two half-precision products
                mixed = tl.dot(low, tile, mixed).to(tile.dtype)
                tl.store(sums_ptr + sums_offset + column, mixed, mask=(rollout < COUNT) & (column < width))
        total += gram.to(tl.float64)
    tl.store(partial_ptr + program * TILE * TILE + square, total)


@triton.jit
def softmax_gradient_kernel(
    logits_ptr, tokens_ptr, factors_ptr, log_probs_ptr, normaliser_ptr, width, inverse, BLOCK: tl.constexpr
):
    """One row of logits: its log-normaliser, the log-probability of the token, and the gradient, in place.

    Threads are not synchronised, so a thread may read only elements that it will itself overwrite. The token's logit is
    therefore picked in the first loop, by the thread that holds it, and not loaded by its index.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * width
    lane = tl.arange(0, BLOCK)
    token = tl.load(tokens_ptr + row)
    factor = tl.load(factors_ptr + row)
    highest = -float("inf")
    total = 0.0
    picked = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        value = tl.load(logits_ptr + start + lane, mask=start + lane < width, other=-float("inf"))
        value = value.to(tl.float32) * inverse
        # running maximum and rescaled sum: one read of the row gives the normaliser
        top = tl.maximum(highest, tl.max(value, 0))
        total = total * tl.exp(highest - top) + tl.sum(tl.exp(value - top), 0)
        highest = top
        picked += tl.where(start + lane == token, value, 0.0)
    normaliser = highest + tl.log(total)
    tl.store(log_probs_ptr + row, tl.sum(picked, 0) - normaliser)
    tl.store(normaliser_ptr + row, normaliser)
    for start in range(0, width, BLOCK):
        here = start + lane < width
        value = tl.load(logits_ptr + start + lane, mask=here, other=-float("inf")).to(tl.float32) * inverse
        gradient = factor * (tl.where(start + lane == token, 1.0, 0.0) - tl.exp(value - normaliser))
        tl.store(logits_ptr + start + lane, gradient.to(logits_ptr.dtype.element_ty), mask=here)


@triton.jit
def logit_gradient_kernel(
    logits_ptr, tokens_ptr, factors_ptr, normaliser_ptr, width, first, inverse, BLOCK: tl.constexpr
):
    """One block of a row of logits turned into its gradient, in place, with a known log-normaliser."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = lane < width
    token = tl.load(tokens_ptr + row)
    factor = tl.load(factors_ptr + row)
    normaliser = tl.load(normaliser_ptr + row)
    value = tl.load(logits_ptr + row * width + lane, mask=here, other=-float("inf")).to(tl.float32) * inverse
    gradient = factor * (tl.where(lane + first == token, 1.0, 0.0) - tl.exp(value - normaliser))
    tl.store(logits_ptr + row * width + lane, gradient.to(logits_ptr.dtype.element_ty), mask=here)
