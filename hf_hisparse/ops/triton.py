"""The ops whose kernels are in Triton, on a CUDA device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_hisparse.ops.dependent_launch import await_previous, dependent


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUERIES = 32
"""Queries that a program scores its tokens for: each loads a tile of keys once."""
TILE = {4: 1 << 12, 2: 1 << 14}
"""Elements of keys that a program holds, and of a query half as many, by the bytes of one. With three queries in flight
they fit the shared memory of any device: 80 KiB. Float32 goes without tensor cores, and its operands into registers."""

# _score_indexer
#
# In:   query [batch, queries, heads, width] and weights [batch, queries, heads], whose first two dimensions have any
#       stride; keys [batch, capacity, width]; positions [batch].
# Out:  scores [batch, queries, tokens] float32, contiguous: sum_h w_h relu(q_h . k), where the weights carry the scale;
#       -inf where a query does not see a token.
# Grid: tiles of tokens, fastest, so that the programs that read the same queries run together; then parts of the
#       queries; then rows.
#
# A program holds the keys of its tile and goes over its queries: a product of [tokens, width] and [width, heads], of
# which only the sum over heads leaves the registers. Tokens are the rows of the product, so that the sum runs within a
# warp. A query before a tile writes -inf and computes nothing.
#
# Sums are float32; float32 inputs are multiplied in float32, not TF32. A score is one order of operations whatever the
# number of queries, tokens and rows: a prompt and a decode step give the same token the same bits.
#
# Cost: 2 * heads * width operations a visible (query, token) pair, and 4 bytes written. Of a decode step, one read of
# the keys: predicted for 64 heads of 128 and 131072 bfloat16 keys on an H200, 32 MiB and 8 us, and 3 us for the launch.
# Of a prompt, heads * width bytes from L2 a query and tile, 16 KiB for 2 million operations: predicted to be bound by
# tensor cores, and not measured.


@triton.jit(do_not_specialize=["queries", "tokens"])
def _score_indexer(  # type: ignore[no-untyped-def]
    query,
    weights,
    keys,
    positions,
    scores,
    queries,
    tokens,
    query_row,
    query_one,
    weights_row,
    weights_one,
    keys_row,
    scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_previous(DEPENDENT)
    program = tl.program_id(0)
    tiles = tl.cdiv(tokens, BLOCK_TOKENS)
    parts = tl.cdiv(queries, QUERIES)
    first = program % tiles * BLOCK_TOKENS
    part = program // tiles % parts
    row = (program // (tiles * parts)).to(tl.int64)

    position = tl.load(positions + row)
    low = part * QUERIES
    high = tl.minimum(low + QUERIES, queries)
    # The first query that sees some of the tile.
    seeing = tl.minimum(tl.maximum(first - position, low), high).to(tl.int32)

    token = first + tl.arange(0, BLOCK_TOKENS)
    is_token = token < tokens
    in_width = tl.arange(0, BLOCK_WIDTH)
    is_width = in_width < WIDTH
    in_heads = tl.arange(0, BLOCK_HEADS)
    row_scores = scores + row * queries * tokens + token
    row_queries = query + row * query_row
    row_weights = weights + row * weights_row

    nothing = tl.full([BLOCK_TOKENS], float("-inf"), tl.float32)
    for one in range(low, seeing):
        tl.store(row_scores + tl.cast(one, tl.int64) * tokens, nothing, mask=is_token)

    row_keys = keys + row * keys_row + token.to(tl.int64)[:, None] * WIDTH + in_width[None, :]
    key = tl.load(row_keys, mask=(is_token & (seeing < high))[:, None] & is_width[None, :], other=0.0)
    for one in range(seeing, high):
        at = tl.cast(one, tl.int64)
        score = tl.zeros([BLOCK_TOKENS], tl.float32)
        for block in tl.static_range(0, HEADS, BLOCK_HEADS):
            head = block + in_heads
            is_head = head < HEADS
            q = tl.load(
                row_queries + at * query_one + head[:, None] * WIDTH + in_width[None, :],
                mask=is_head[:, None] & is_width[None, :],
                other=0.0,
            )
            w = tl.load(row_weights + at * weights_one + head, mask=is_head, other=0.0) * scale
            x = tl.dot(key, tl.trans(q), input_precision="ieee")
            score += tl.sum(tl.maximum(x, 0.0) * w[None, :], axis=1)
        tl.store(row_scores + at * tokens, tl.where(token <= position + at, score, float("-inf")), mask=is_token)


INTERPRETED = not isinstance(_score_indexer, triton.JITFunction)
"""Whether `TRITON_INTERPRET=1` was set when this module was imported, so that kernels run on the CPU."""


def _power(count: int, most: int) -> int:
    """The power of two that holds `count`, from 16 on, since tensor cores take no less, to `most`."""
    return max(16, min(triton.next_power_of_2(count), most))


def score_indexer(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    tokens: int,
    scale: float,
    positions: Tensor,
) -> Tensor:
    """`ops.score_indexer` on a CUDA device, or anywhere under Triton's interpreter.

    Raises:
        ValueError: For a tensor that is not as the op says, with its name and shape.
    """
    batch, queries, heads, width = query.shape
    expected = {
        "query": (query, query.shape, DTYPES[::2] if INTERPRETED else DTYPES),
        "weights": (weights, (batch, queries, heads), (torch.float32,)),
        "keys": (keys, (batch, keys.shape[1], width), (query.dtype,)),
        "positions": (positions, (batch,), (torch.int64,)),
    }
    for name, (tensor, shape, dtypes) in expected.items():
        if tensor.shape != shape or tensor.dtype not in dtypes or tensor.device != query.device:
            wanted = " or ".join(map(str, dtypes))
            raise ValueError(
                f"score_indexer: `{name}` must be {list(shape)}, {wanted}, on {query.device}, and is "
                f"{list(tensor.shape)}, {tensor.dtype}, on {tensor.device}"
            )
    if not 0 < tokens <= keys.shape[1]:
        raise ValueError(f"score_indexer: `tokens` is {tokens}, and `keys` of shape {list(keys.shape)} holds fewer")
    if not scale > 0:
        raise ValueError(f"score_indexer: `scale` must be positive, not {scale}")
    if query.stride()[2:] != (width, 1):
        query = query.contiguous()
    if weights.stride(2) != 1:
        weights = weights.contiguous()
    keys, positions = keys.contiguous(), positions.contiguous()

    scores = query.new_empty(batch, queries, tokens, dtype=torch.float32)
    block_width = _power(width, 1 << 20)
    tile = TILE[query.element_size()] // block_width
    block_tokens = _power(128, tile)
    grid = batch * -(-queries // QUERIES) * -(-tokens // block_tokens)
    if grid:
        with torch.cuda.device_of(query):
            _score_indexer[(grid,)](
                query,
                weights,
                keys,
                positions,
                scores,
                queries,
                tokens,
                query.stride(0),
                query.stride(1),
                weights.stride(0),
                weights.stride(1),
                keys.stride(0),
                scale,
                HEADS=heads,
                WIDTH=width,
                QUERIES=QUERIES,
                BLOCK_HEADS=_power(heads, tile // 2),
                BLOCK_WIDTH=block_width,
                BLOCK_TOKENS=block_tokens,
                **dependent(query.device),
                num_warps=4,
                # One query leaves nothing to overlap, and its shared memory to other programs.
                num_stages=min(queries, 3),
            )
    return scores


# _list_tokens
#
# In:   slots and selection [rows, k], lengths [rows], contiguous.
# Out:  tokens [rows, columns] int32, those that are seen first, in the order of the selection, then -1; counts
#       [rows, runs] int32, how many of them lie in each run of `run_tokens` columns.
# Grid: a program a row, which goes over its tokens in blocks and keeps count.


@triton.jit(do_not_specialize=["k", "columns", "runs", "run_tokens", "row_stride"])
def _list_tokens(  # type: ignore[no-untyped-def]
    slots,
    selection,
    lengths,
    tokens,
    counts,
    k,
    columns,
    runs,
    run_tokens,
    row_stride,
    slot_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int64)
    row_slots = slots + row * k
    row_selection = selection + row * k
    row_tokens = tokens + row * columns
    within_block = tl.arange(0, BLOCK)

    count = tl.full([], 0, tl.int32)
    for first in range(0, k * PAGE_SIZE, BLOCK):
        token = first + within_block
        column = token // PAGE_SIZE
        within = token % PAGE_SIZE
        item = tl.load(row_selection + column, mask=column < k, other=-1).to(tl.int64)
        slot = tl.load(row_slots + column, mask=column < k, other=-1).to(tl.int64)
        position = item * PAGE_SIZE + within
        seen = (item >= 0) & (slot >= 0) & (position < length)
        ones = seen.to(tl.int32)
        place = count + tl.cumsum(ones, axis=0) - ones
        address = row * row_stride + slot * slot_stride + within
        tl.store(row_tokens + place, address.to(tl.int32), mask=seen)
        count += tl.sum(ones, axis=0)

    nothing = tl.full([BLOCK], -1, tl.int32)
    for first in range(0, columns, BLOCK):
        place = first + within_block
        tl.store(row_tokens + place, nothing, mask=(place >= count) & (place < columns))

    run = tl.arange(0, BLOCK_RUNS)
    of_run = tl.minimum(tl.maximum(count - run * run_tokens, 0), run_tokens)
    tl.store(counts + row * runs + run, of_run, mask=run < runs)


def list_tokens(
    slots: Tensor,
    selection: Tensor,
    lengths: Tensor,
    page_size: int,
    row_stride: int,
    slot_stride: int,
    runs: int,
    run_tokens: int,
) -> tuple[Tensor, Tensor]:
    """`ops.list_tokens` on a CUDA device, or anywhere under Triton's interpreter."""
    rows, k = selection.shape
    tokens = selection.new_empty(rows, runs, run_tokens, dtype=torch.int32)
    counts = selection.new_empty(rows, runs, dtype=torch.int32)
    if rows:
        block = max(16, min(1024, triton.next_power_of_2(k * page_size)))
        with torch.cuda.device_of(selection):
            _list_tokens[(rows,)](
                slots.contiguous(),
                selection.contiguous(),
                lengths.contiguous(),
                tokens,
                counts,
                k,
                runs * run_tokens,
                runs,
                run_tokens,
                row_stride,
                slot_stride,
                PAGE_SIZE=page_size,
                BLOCK=block,
                BLOCK_RUNS=triton.next_power_of_2(runs),
                **dependent(selection.device),
                num_warps=8 if block == 1024 else 4,
            )
    return tokens, counts


# _merge_runs
#
# In:   partial [rows, runs, heads, WIDTH], weights [rows, runs, heads] float32, counts [rows, runs], contiguous; sinks
#       [rows, heads] if SINKS, whose rows are `sinks_row` apart.
# Out:  output [rows, heads, WIDTH].
# Grid: a program takes BLOCK_WIDTH elements of a head of a row, of all of its runs.


@triton.jit
def _merge_runs(  # type: ignore[no-untyped-def]
    partial,
    weights,
    counts,
    sinks,
    output,
    heads,
    runs,
    sinks_row,
    WIDTH: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    SINKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_previous(DEPENDENT)
    program = tl.program_id(0)
    parts = tl.cdiv(WIDTH, BLOCK_WIDTH)
    part = program % parts
    head = program // parts % heads
    row = (program // (parts * heads)).to(tl.int64)

    run = tl.arange(0, BLOCK_RUNS)
    in_width = part * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    is_width = in_width < WIDTH
    some = tl.load(counts + row * runs + run, mask=run < runs, other=0) > 0
    place = (row * runs + run) * heads + head
    weight = tl.load(weights + place, mask=some, other=float("-inf"))
    value = tl.load(
        partial + place[:, None] * WIDTH + in_width[None, :], mask=some[:, None] & is_width[None, :], other=0.0
    )

    high = tl.max(weight, axis=0)
    if SINKS:
        sink = tl.load(sinks + row * sinks_row + head).to(tl.float32)
        high = tl.maximum(high, sink)
    # Finite, so that the difference of two of them is never NaN.
    high = tl.maximum(high, -1.0e38)
    share = tl.exp(weight - high)
    total = tl.sum(share, axis=0)
    if SINKS:
        total += tl.exp(sink - high)
    merged = tl.sum(value.to(tl.float32) * share[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    to = output + (row * heads + head) * WIDTH + in_width
    tl.store(to, merged.to(output.dtype.element_ty), mask=is_width)


def merge_runs(partial: Tensor, weights: Tensor, counts: Tensor, sinks: Tensor | None = None) -> Tensor:
    """`ops.merge_runs` on a CUDA device, or anywhere under Triton's interpreter."""
    rows, runs, heads, width = partial.shape
    output = partial.new_empty(rows, heads, width)
    if sinks is not None and sinks.stride(1) != 1:
        sinks = sinks.contiguous()
    if output.numel():
        block_runs = triton.next_power_of_2(runs)
        block_width = min(triton.next_power_of_2(width), max(16, 8192 // block_runs))
        with torch.cuda.device_of(partial):
            _merge_runs[(rows * heads * -(-width // block_width),)](
                partial.contiguous(),
                weights.contiguous(),
                counts.contiguous(),
                sinks,
                output,
                heads,
                runs,
                0 if sinks is None else sinks.stride(0),
                WIDTH=width,
                BLOCK_RUNS=block_runs,
                BLOCK_WIDTH=block_width,
                SINKS=sinks is not None,
                **dependent(partial.device),
                num_warps=4,
            )
    return output


def probe(index: int) -> None:
    """Compiles and runs a kernel on a CUDA device. Raises what stands in the way."""
    one = torch.ones(1, 1, 1, 16, device=f"cuda:{index}")
    none = torch.zeros(1, dtype=torch.int64, device=one.device)
    score_indexer(one, one[..., 0], one[0], 1, 1.0, none)
