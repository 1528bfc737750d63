"""Attention over the slot table in Triton kernels, on a CUDA device.

The selection is split (flash-decoding), so that a single sequence fills the device: a program of `_attend` takes one
row, one block of its heads and one run of the selection, and leaves a maximum, a sum and a weighted sum of values;
`_combine` merges a row's runs. How many runs there are depends on shapes and on the device alone, and every order is
fixed: the result is a function of what was selected, not of where it lies, nor of when which program runs.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_hisparse.backends.base import AttentionBackend
from hf_hisparse.layout import ItemLayout
from hf_hisparse.ops.dependent_launch import await_previous, dependent


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)

# ---- launch shapes ---------------------------------------------------------------------------------------------------


class Device(NamedTuple):
    """What the launch shape depends on, besides the shapes of the arguments."""

    multiprocessors: int
    shared_bytes: int
    """Shared memory that a block can have."""


class Widths(NamedTuple):
    """How a token's key and value are cut into tiles, whose widths are powers of two; 0 for none.

    The key is a first part of `split` elements and the rest: 576 is 512 + 64 rather than 1024 of which half is padding.
    Where the value is the beginning of the same row, as in a latent row, the first part of the key is the value.
    """

    split: int
    key: int
    rest: int
    value: int
    shared: bool

    @classmethod
    def of(cls, layout: ItemLayout) -> Widths:
        (key_offset, key), (value_offset, value) = layout.key, layout.value
        shared = layout.page_size == 1 and key_offset == value_offset and value <= key
        split = value if shared else 1 << (key.bit_length() - 1)
        return cls(split, _tile(split), _tile(key - split), _tile(value), shared)

    @property
    def elements(self) -> int:
        """Elements a token, in shared memory."""
        return self.key + self.rest + (0 if self.shared else self.value)


class Plan(NamedTuple):
    """A launch shape: a program takes `heads` heads and one of `splits` runs, of `tiles` tiles of `tokens` tokens."""

    heads: int
    tokens: int
    tiles: int
    splits: int
    warps: int
    stages: int


def _tile(width: int) -> int:
    """The power of two that holds `width`, 16 at least: tensor cores take no less."""
    return 0 if width == 0 else max(16, triton.next_power_of_2(width))


@functools.lru_cache(maxsize=1024)
def plan(rows: int, heads: int, tokens: int, widths: Widths, itemsize: int, device: Device) -> Plan:
    """The launch shape of `_attend`, from shapes alone.

    Of the head blocks that fit, the one that moves the fewest bytes through the L2 cache and still fills the device.
    Every block of heads reads the row's tokens again, and every run of the selection but a row's only one writes and
    reads an accumulator of its heads in float32: large blocks cost the first less and the second more.

    Args:
        rows, heads, tokens: Rows, heads a row, and tokens that a row selects, holes included.
        widths: Of a token.
        itemsize: Bytes an element.
        device: That it runs on.

    Raises:
        ValueError: If not even the smallest tile fits into shared memory.
    """
    candidates = []
    # Float32 goes without tensor cores, which are what large blocks feed.
    for block in (16, 32, 64) if itemsize < 4 else (16,):
        if block > 16 and block >= 2 * heads:
            break
        tile = _tokens_and_stages(block, tokens, widths, itemsize, device.shared_bytes)
        if tile is None:
            continue
        size, stages, shared_bytes = tile
        blocks = -(-heads // block)
        room = device.multiprocessors * min(2, device.shared_bytes // shared_bytes)
        # As many programs as run at once, of 64 tokens or more: one tile after another waits for memory twice.
        splits = max(1, min(room // (rows * blocks), tokens // 64))
        count = -(-tokens // size)
        tiles = -(-count // splits)
        splits = -(-count // tiles)
        stages = stages if tiles > 1 else 1
        programs = rows * blocks * splits
        reads = rows * blocks * tokens * widths.elements * itemsize
        scratch = 0 if splits == 1 else 8 * programs * block * widths.value
        waves = -(-programs // room)
        idle = max(1.0, device.multiprocessors / programs) if waves == 1 else waves * room / programs
        warps = 8 if block * widths.value * itemsize >= 16384 else 4
        candidates.append(((reads + scratch) * idle, Plan(block, size, tiles, splits, warps, stages)))
    if not candidates:
        raise ValueError(
            f"`layout`: tokens of {widths.elements} elements of {itemsize} bytes do not fit the {device.shared_bytes} "
            'bytes of shared memory that a block has; use `backend="reference"`'
        )
    return min(candidates)[1]


def _tokens_and_stages(
    block: int, tokens: int, widths: Widths, itemsize: int, shared_bytes: int
) -> tuple[int, int, int] | None:
    """Tokens a tile, pipeline stages, and about how many bytes of shared memory they take; None if none fit.

    A key's address depends on a slot that is loaded first, so that every tile in flight takes two stages: 5 have two
    tiles in flight, 3 have one, and 1 waits for each. Blocks of 64 heads are multiplied asynchronously where the device
    can, which holds one tile more, and their accumulators leave no registers for 64 tokens; nor do wide float32 tiles,
    which are multiplied without tensor cores.
    """
    small = block == 64 or (itemsize == 4 and widths.elements > 256)
    for size, stages in ((64, 5), (64, 3), (32, 5), (32, 3), (16, 3), (16, 1)):
        if (size == 64 and small) or size > max(16, triton.next_power_of_2(tokens)):
            continue
        held = max(1, stages // 2) + (block == 64)
        needed = (held * size * widths.elements + block * (widths.key + widths.rest + size)) * itemsize + 4096
        if needed <= shared_bytes:
            return size, stages, needed
    return None


# ---- kernels ---------------------------------------------------------------------------------------------------------

# _attend
#
# In:   query [rows, heads, KEY_WIDTH] and, if SINKS, sinks [rows, heads], of any strides but 1 in the last dimension;
#       buffer [rows, slots, ELEMENTS], whose rows begin every `row_items` items, 0 if they share one; slots and
#       selection [rows, k], lengths [rows], contiguous.
# Out:  where a row is one run (WHOLE), output [rows, heads, VALUE_WIDTH] in its own dtype.
#       Otherwise output [rows, splits, heads, VALUE_WIDTH], top and total [rows, splits, heads], float32: with logits x
#       in units of log 2, top = max x, total = sum 2^(x - top), output = sum 2^(x - top) v. A run without a token has
#       top = NOTHING, total = 0, output = 0.
# Grid: blocks of heads, fastest, so that the programs that read the same tokens run together; then runs; then rows.
#
# A token is a column of the selection and a place within its item, in that order. What a token reads is masked, keys
# and values both: a slot that is -1, an item that is -1, and bytes from token `lengths` on are never loaded, so that
# stale bytes (0 * inf) cannot reach the sums, and where an item lies enters nothing but the address of a load.
# Offsets are 64 bits wherever a row or a slot meets a stride.
#
# The row stride of the buffer is not specialised on, and everything else that a program is compiled for is the same
# wherever items lie: buffers of any number of slots run the same instructions.
#
# Heads are padded to the 16 rows that tensor cores take. Sums are float32; float32 inputs are multiplied in float32,
# not TF32. Weights are rounded to the inputs' dtype before they meet the values, as in other flash attention.
#
# Cost: bound by memory. Reads rows * k * PAGE_SIZE * (key and value bytes) from device memory, and once more from L2
# for each further block of heads. Predicted for the 4.3 TB/s of an H200, and not measured: batch 1 of Llama-8B (8 rows,
# 2048 tokens, 512 B) is 8 MiB and 2 us; 128 heads over 2048 latents of 1152 B are 2.3 MiB and 0.6 us, but 18 MiB from
# L2 and 4 MiB of scratch, 4 us. To that come about 3 us for the launch and for loads that wait for one another: the
# slot, then the key.
#
# _combine
#
# In:   what _attend leaves, and sinks.
# Out:  output [rows, heads, VALUE_WIDTH]. A head with no token, sink or not, gives zeros.
# Grid: parts of BLOCK_VALUE values, fastest; then heads; then rows.
# Cost: reads rows * splits * heads * (VALUE_WIDTH + 2) floats, which lie in L2: 256 KiB in the first example above,
# 4 MiB in the second. Predicted, not measured: 2 to 3 us with the launch.

NOTHING = tl.constexpr(-1.0e38)
"""The maximum of no logits: finite, so that the difference of two of them is 0 and not NaN."""
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit(do_not_specialize=["row_items"])
def _attend(  # type: ignore[no-untyped-def]
    query,
    buffer,
    slots,
    selection,
    lengths,
    sinks,
    output,
    top,
    total,
    heads,
    k,
    splits,
    tiles,
    query_row,
    query_head,
    row_items,
    sinks_row,
    scale,
    cap,
    ELEMENTS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEY_OFFSET: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_OFFSET: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SHARED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    WHOLE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_previous(DEPENDENT)
    program = tl.program_id(0)
    blocks = tl.cdiv(heads, BLOCK_HEADS)
    block = program % blocks
    run = program // blocks % splits
    row = (program // (blocks * splits)).to(tl.int64)

    head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_head = head < heads
    in_key = tl.arange(0, BLOCK_KEY)
    in_value = tl.arange(0, BLOCK_VALUE)
    is_key = in_key < SPLIT
    is_value = in_value < VALUE_WIDTH

    queries = query + row * query_row + head.to(tl.int64)[:, None] * query_head
    q = tl.load(queries + in_key[None, :], mask=is_head[:, None] & is_key[None, :], other=0.0)
    if BLOCK_REST > 0:
        in_rest = tl.arange(0, BLOCK_REST)
        is_rest = in_rest < KEY_WIDTH - SPLIT
        q_rest = tl.load(queries + SPLIT + in_rest[None, :], mask=is_head[:, None] & is_rest[None, :], other=0.0)

    length = tl.load(lengths + row).to(tl.int64)
    items = buffer + row * row_items * ELEMENTS
    row_slots = slots + row * k
    row_selection = selection + row * k

    high = tl.full([BLOCK_HEADS], NOTHING, tl.float32)
    mass = tl.zeros([BLOCK_HEADS], tl.float32)
    acc = tl.zeros([BLOCK_HEADS, BLOCK_VALUE], tl.float32)
    for tile in range(run * tiles, (run + 1) * tiles):
        token = tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        column = token // PAGE_SIZE
        within = token % PAGE_SIZE
        item = tl.load(row_selection + column, mask=column < k, other=-1).to(tl.int64)
        slot = tl.load(row_slots + column, mask=column < k, other=-1).to(tl.int64)
        position = item * PAGE_SIZE + within
        valid = (item >= 0) & (slot >= 0) & (position < length)

        address = items + slot * ELEMENTS
        keys = address + KEY_OFFSET + within * KEY_WIDTH
        key = tl.load(keys[:, None] + in_key[None, :], mask=valid[:, None] & is_key[None, :], other=0.0)
        x = tl.dot(q, tl.trans(key), input_precision="ieee")
        if BLOCK_REST > 0:
            rest = tl.load(keys[:, None] + SPLIT + in_rest[None, :], mask=valid[:, None] & is_rest[None, :], other=0.0)
            x = tl.dot(q_rest, tl.trans(rest), x, input_precision="ieee")
        x *= scale
        if SOFTCAP:
            # cap * tanh, whose argument `scale` has doubled and put in units of log 2.
            x = cap * (1.0 - 2.0 / (1.0 + tl.exp2(x)))
        x = tl.where(valid[None, :], x, float("-inf"))

        high_new = tl.maximum(high, tl.max(x, axis=1))
        p = tl.exp2(x - high_new[:, None])
        shrink = tl.exp2(high - high_new)
        mass = mass * shrink + tl.sum(p, axis=1)
        high = high_new
        if SHARED:
            value = key
        else:
            values = address + VALUE_OFFSET + within * VALUE_WIDTH
            value = tl.load(values[:, None] + in_value[None, :], mask=valid[:, None] & is_value[None, :], other=0.0)
        acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")

    if WHOLE:
        if SINKS:
            sink = tl.load(sinks + row * sinks_row + head, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
            high_new = tl.maximum(high, sink)
            shrink = tl.exp2(high - high_new)
            mass = mass * shrink + tl.exp2(sink - high_new)
            acc = acc * shrink[:, None]
        acc = acc / tl.where(mass > 0.0, mass, 1.0)[:, None]
        place = row * heads + head
    else:
        place = (row * splits + run) * heads + head
        tl.store(top + place, high, mask=is_head)
        tl.store(total + place, mass, mask=is_head)
    to = output + place[:, None] * VALUE_WIDTH + in_value[None, :]
    tl.store(to, acc.to(output.dtype.element_ty), mask=is_head[:, None] & is_value[None, :])


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    partial,
    top,
    total,
    sinks,
    output,
    heads,
    splits,
    sinks_row,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    SINKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_previous(DEPENDENT)
    program = tl.program_id(0)
    parts = tl.cdiv(VALUE_WIDTH, BLOCK_VALUE)
    part = program % parts
    head = program // parts % heads
    row = (program // (parts * heads)).to(tl.int64)

    run = tl.arange(0, BLOCK_SPLITS)
    is_run = run < splits
    in_value = part * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    is_value = in_value < VALUE_WIDTH

    place = (row * splits + run) * heads + head
    high = tl.load(top + place, mask=is_run, other=NOTHING)
    mass = tl.load(total + place, mask=is_run, other=0.0)
    values = partial + place[:, None] * VALUE_WIDTH + in_value[None, :]
    acc = tl.load(values, mask=is_run[:, None] & is_value[None, :], other=0.0)

    high_all = tl.max(high, axis=0)
    if SINKS:
        sink = tl.load(sinks + row * sinks_row + head).to(tl.float32) * LOG2_E
        high_all = tl.maximum(high_all, sink)
    weight = tl.exp2(high - high_all)
    mass_all = tl.sum(mass * weight, axis=0)
    if SINKS:
        mass_all += tl.exp2(sink - high_all)
    value = tl.sum(acc * weight[:, None], axis=0) / tl.where(mass_all > 0.0, mass_all, 1.0)
    to = output + (row * heads + head) * VALUE_WIDTH + in_value
    tl.store(to, value.to(output.dtype.element_ty), mask=is_value)


# ---- the backend -----------------------------------------------------------------------------------------------------

INTERPRETED = not isinstance(_attend, triton.JITFunction)
"""Whether `TRITON_INTERPRET=1` was set when this module was imported, so that kernels run on the CPU."""


def _check(
    query: Tensor,
    buffer: Tensor,
    slots: Tensor,
    selection: Tensor,
    lengths: Tensor,
    layout: ItemLayout,
    sinks: Tensor | None,
) -> None:
    """Raises ValueError, with the name and the shape, for a tensor that is not as `AttentionBackend.attend` says."""
    rows, heads = query.shape[:2] if query.ndim == 3 else (0, 0)
    k = selection.shape[1] if selection.ndim == 2 else 0
    slot_count = buffer.shape[1] if buffer.ndim == 3 else 0
    width, elements = layout.key[1], layout.elements
    dtypes = DTYPES[::2] if INTERPRETED else DTYPES
    tensors = {
        "query": (query, (rows, heads, width), f"[rows, heads, {width}]", dtypes),
        "buffer": (buffer, (rows, slot_count, elements), f"[{rows}, slots, {elements}]", (query.dtype,)),
        "selection": (selection, (rows, k), f"[{rows}, k]", INTEGERS),
        "slots": (slots, (rows, k), f"[{rows}, {k}]", INTEGERS),
        "lengths": (lengths, (rows,), f"[{rows}]", INTEGERS),
    }
    if sinks is not None:
        tensors["sinks"] = (sinks, (rows, heads), f"[{rows}, {heads}]", DTYPES)
    for name, (tensor, shape, said, allowed) in tensors.items():
        if tensor.shape != shape:
            raise ValueError(f"`{name}` must be {said}, not {list(tensor.shape)}")
        if tensor.dtype not in allowed:
            wanted = " or ".join(str(dtype) for dtype in allowed)
            raise ValueError(f"`{name}` {list(tensor.shape)} must be {wanted}, not {tensor.dtype}")
        if tensor.device != query.device:
            raise ValueError(f"`{name}` {list(tensor.shape)} is on {tensor.device}, and `query` on {query.device}")
    if not buffer[:1].is_contiguous() or buffer.stride(0) % elements:
        raise ValueError(
            f"`buffer` {list(buffer.shape)} must hold a row's items one after the other, without gaps: its strides are "
            f"{buffer.stride()}; make it contiguous"
        )
    if not query.is_cuda and not INTERPRETED:
        raise ValueError(
            f"`query` {list(query.shape)} is on {query.device}, and Triton's kernels run on CUDA; move the model, or "
            'use `backend="reference"`'
        )


INTERPRETER = Device(132, 232448)
"""What the interpreter stands for: an H200."""


@functools.cache
def _device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    if properties.major == 10:
        # Accumulators that Triton keeps in tensor memory pass through up to 64 KiB of shared memory.
        shared_bytes -= 65536
    return Device(properties.multi_processor_count, shared_bytes)


class TritonBackend(AttentionBackend):
    """Attends in one kernel, or two where a row is split. Supports everything that the interface names.

    Float32, bfloat16 and float16, with float32 sums, on a CUDA device; on a CPU only under Triton's interpreter
    (`TRITON_INTERPRET=1`), which is for tests and multiplies bfloat16 wrongly, so that it is refused there. It neither
    synchronises with the host nor looks at data: what it allocates and launches follows from shapes.

    Raises:
        ValueError: On construction, if there is no CUDA device to run on.
    """

    def __init__(self) -> None:
        if not INTERPRETED and not torch.cuda.is_available():
            raise ValueError(
                '`backend="triton"` needs a CUDA device, and torch finds none: install a torch built for CUDA and its '
                'driver, or use `backend="reference"`'
            )

    def attend(
        self,
        query: Tensor,
        buffer: Tensor,
        slots: Tensor,
        selection: Tensor,
        lengths: Tensor,
        layout: ItemLayout,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        _check(query, buffer, slots, selection, lengths, layout, sinks)
        rows, heads, _ = query.shape
        k, value_width = selection.shape[1], layout.value[1]
        if query.numel() == 0 or k == 0:
            return query.new_zeros(rows, heads, value_width)
        if query.stride(2) != 1:
            query = query.contiguous()
        if sinks is not None and sinks.stride(1) != 1:
            sinks = sinks.contiguous()
        slots, selection, lengths = slots.contiguous(), selection.contiguous(), lengths.contiguous()

        device = INTERPRETER if INTERPRETED else _device(query.device.index)
        widths = Widths.of(layout)
        shape = plan(rows, heads, k * layout.page_size, widths, query.element_size(), device)
        output = query.new_empty(rows, heads, value_width)
        whole = shape.splits == 1
        runs = (rows, shape.splits, heads)
        partial = output if whole else query.new_empty(*runs, value_width, dtype=torch.float32)
        top, total = (None, None) if whole else query.new_empty(2, *runs, dtype=torch.float32)
        log2_e = LOG2_E.value
        with torch.cuda.device_of(query):
            _attend[(rows * -(-heads // shape.heads) * shape.splits,)](
                query,
                buffer,
                slots,
                selection,
                lengths,
                sinks,
                partial,
                top,
                total,
                heads,
                k,
                shape.splits,
                shape.tiles,
                query.stride(0),
                query.stride(1),
                buffer.stride(0) // layout.elements,
                0 if sinks is None else sinks.stride(0),
                scale * log2_e if softcap is None else scale * 2 * log2_e / softcap,
                0.0 if softcap is None else softcap * log2_e,
                ELEMENTS=layout.elements,
                PAGE_SIZE=layout.page_size,
                KEY_OFFSET=layout.key[0],
                KEY_WIDTH=layout.key[1],
                VALUE_OFFSET=layout.value[0],
                VALUE_WIDTH=value_width,
                SPLIT=widths.split,
                BLOCK_KEY=widths.key,
                BLOCK_REST=widths.rest,
                BLOCK_VALUE=widths.value,
                BLOCK_HEADS=shape.heads,
                BLOCK_TOKENS=shape.tokens,
                SHARED=widths.shared,
                SOFTCAP=softcap is not None,
                SINKS=sinks is not None,
                WHOLE=whole,
                **dependent(query.device),
                num_warps=shape.warps,
                num_stages=shape.stages,
            )
            if not whole:
                block_splits = triton.next_power_of_2(shape.splits)
                block_value = min(widths.value, max(16, 8192 // block_splits))
                _combine[(rows * heads * -(-value_width // block_value),)](
                    partial,
                    top,
                    total,
                    sinks,
                    output,
                    heads,
                    shape.splits,
                    0 if sinks is None else sinks.stride(0),
                    VALUE_WIDTH=value_width,
                    BLOCK_SPLITS=block_splits,
                    BLOCK_VALUE=block_value,
                    SINKS=sinks is not None,
                    **dependent(query.device),
                    num_warps=4,
                )
        return output
