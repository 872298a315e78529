"""The Triton kernels. `slab` and `head` launch them, next to their plain PyTorch twins. Importing needs Triton."""

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
    first_ptr,
    end_ptr,
    rows_stride,
    sums_stride,
    rollouts,
    COUNT: tl.constexpr,
    SPAN: tl.constexpr,
    PADDED: tl.constexpr,
    VECTORS: tl.constexpr,
    STACK: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Gram of `SPAN` rows over the columns `first … end` of this program, and the weighted sums of these columns.

    Row `r` of a tile is rollout `r % PADDED` in column block `r // PADDED` of `STACK`; off-diagonal blocks of the
    product mix column blocks and are dropped later (`slab.Tile.unstacked`). The second axis of the grid runs over spans
    of rows, each with its own weights and its own `COUNT` rows of sums. `ALIGNED` says that every `end` is a multiple
    of 16, so that loads and stores can be wide.
    """
    program = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1).to(tl.int64)
    TILE: tl.constexpr = PADDED * STACK
    row = tl.arange(0, TILE)
    lane = tl.arange(0, COLUMNS)[None, :]
    rollout = (row % PADDED)[:, None]
    within = ((row // PADDED) * COLUMNS)[:, None] + lane
    read = rollout < tl.minimum(SPAN, rollouts - span * SPAN)
    offset = (span * SPAN + rollout) * rows_stride
    first = tl.multiple_of(tl.load(first_ptr + program), 16)
    end = tl.load(end_ptr + program)
    if ALIGNED:
        end = tl.multiple_of(end, 16)
    total = tl.zeros((TILE, TILE), dtype=tl.float64)
    if COUNT > 0:
        vector_row = tl.arange(0, VECTORS * STACK)
        # Columns are the rows of the product with the weights: the tensor cores of Hopper need at least 64 of them.
        vector = (vector_row % VECTORS)[None, :]
        sums_within = ((vector_row // VECTORS) * COLUMNS)[None, :] + tl.trans(lane)
        sums_offset = (span * COUNT + vector) * sums_stride
        square = (span * (VECTORS * STACK) + vector_row[None, :]) * TILE + row[:, None]
        high = tl.load(high_ptr + square)
        low = tl.load(low_ptr + square)
    blocks = tl.cdiv(end - first, COLUMNS * STACK)
    for start in range(0, blocks, BLOCKS):
        # float32 on the tensor cores for BLOCKS * COLUMNS columns, then float64: longer sums would lose digits
        gram = tl.zeros((TILE, TILE), dtype=tl.float32)
        for block in range(start, tl.minimum(start + BLOCKS, blocks)):
            here = first + block * (COLUMNS * STACK)
            column = here + within
            tile = tl.load(rows_ptr + offset + column, mask=read & (column < end), other=0.0)
            gram = tl.dot(tile, tl.trans(tile), gram)
            if COUNT > 0:
                # high + low: weights to full precision from two half-precision products
                mixed = tl.dot(tl.trans(tile), high)
                mixed = tl.dot(tl.trans(tile), low, mixed)
                column = here + sums_within
                place = sums_ptr + sums_offset + column
                tl.store(place, mixed.to(sums_ptr.dtype.element_ty), mask=(vector < COUNT) & (column < end))
        total += gram.to(tl.float64)
    partial_ptr += (span * tl.num_programs(0) + program) * (TILE * TILE)
    tl.store(partial_ptr + row[:, None] * TILE + row[None, :], total)


@triton.jit
def tile_products_kernel(
    rows_ptr,
    weights_ptr,
    products_ptr,
    sums_ptr,
    first_ptr,
    end_ptr,
    left_ptr,
    right_ptr,
    limit_ptr,
    own_tile_ptr,
    rows_stride,
    sums_stride,
    COUNT: tl.constexpr,
    VECTORS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Product of two tiles of `TILE` rows over the columns `first … end`: one program per pair of tiles and share.

    Pair `p` is of the rows from `left[p]` and those from `right[p]` on, both below `limit[p]`. Programs that read the
    same columns follow each other, so that the second one finds them in the cache. A tile is read once for its product
    with itself and for its weighted sums, `COUNT` rows of `sums` from row `COUNT · own_tile[p]` on; it is negative for
    two different tiles. The weights are `(rollouts, VECTORS)`.
    """
    pair = tl.program_id(0)
    share = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, TILE)
    lane = tl.arange(0, COLUMNS)
    limit = tl.load(limit_ptr + pair)
    left = (tl.load(left_ptr + pair) + row)[:, None]
    right = (tl.load(right_ptr + pair) + row)[:, None]
    own_tile = tl.load(own_tile_ptr + pair)
    first = tl.multiple_of(tl.load(first_ptr + share), 16)
    end = tl.load(end_ptr + share)
    if ALIGNED:
        end = tl.multiple_of(end, 16)
    left_ptr = rows_ptr + left * rows_stride
    right_ptr = rows_ptr + right * rows_stride
    product = tl.zeros((TILE, TILE), dtype=tl.float32)
    if own_tile >= 0:
        vector = tl.arange(0, VECTORS)[None, :]
        if COUNT > 0:
            weights = tl.load(weights_ptr + left * VECTORS + vector, mask=left < limit, other=0.0)
            tile_sums_ptr = sums_ptr + (own_tile * COUNT + vector) * sums_stride
        for here in range(first, end, COLUMNS):
            column = here + lane
            a = tl.load(left_ptr + column[None, :], mask=(left < limit) & (column < end)[None, :], other=0.0)
            product = tl.dot(a, tl.trans(a), product)
            if COUNT > 0:
                # columns as the rows of the product: the tensor cores of Hopper need at least 64 of them
                mixed = tl.dot(tl.trans(a), weights)
                tl.store(tile_sums_ptr + column[:, None], mixed, mask=(vector < COUNT) & (column < end)[:, None])
    else:
        for here in range(first, end, COLUMNS):
            column = (here + lane)[None, :]
            a = tl.load(left_ptr + column, mask=(left < limit) & (column < end), other=0.0)
            b = tl.load(right_ptr + column, mask=(right < limit) & (column < end), other=0.0)
            product = tl.dot(a, tl.trans(b), product)
    products_ptr += (share * tl.num_programs(0) + pair) * (TILE * TILE)
    tl.store(products_ptr + row[:, None] * TILE + row[None, :], product)


@triton.jit
def weighted_sums_kernel(
    rows_ptr,
    weights_ptr,
    sums_ptr,
    width,
    rows_stride,
    sums_stride,
    rollouts,
    COUNT: tl.constexpr,
    VECTORS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Weighted sums of rows, `COUNT` of them, for one block of columns; weights `(rollouts, COUNT)` in float32."""
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    here = column < width
    vector = tl.arange(0, VECTORS)
    total = tl.zeros((VECTORS, COLUMNS), dtype=tl.float32)
    for _ in range(rollouts):
        value = tl.load(rows_ptr + column, mask=here, other=0.0).to(tl.float32)
        weight = tl.load(weights_ptr + vector, mask=vector < COUNT, other=0.0)
        total += weight[:, None] * value[None, :]
        rows_ptr += rows_stride
        weights_ptr += COUNT
    place = vector.to(tl.int64)[:, None] * sums_stride + column[None, :]
    mask = (vector < COUNT)[:, None] & here[None, :]
    tl.store(sums_ptr + place, total.to(sums_ptr.dtype.element_ty), mask=mask)


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
