"""How many blocks and threads a kernel is launched with. The results do not depend on it, only the time."""

from __future__ import annotations

from typing import NamedTuple


MAX_THREADS = 1024
ITEMS_PER_THREAD = 4
"""Selected items that a planning thread of the swap-in kernel holds, as `kPerThread` in its source."""
PIECE_BYTES = 1280
"""What one thread has under way at most: 64 of them, and what else a block needs, fit any device's shared memory."""
DIRECT_MOVERS = 64
"""Copying threads a block where each has one selected item or piece: few enough to spread over the whole device."""
COPIERS = 8
"""Blocks that work through lists of misses: more of them reach more translation caches and miss in each."""
MOVERS = 32
"""Copying threads of such a block where each has a piece under way: 256 in all, which just fills the link."""
WARPS = 16
"""Copying warps of such a block where a whole warp copies an item: as many bytes under way."""
MAX_CLUSTER = 8
"""Blocks a cluster that every device with clusters can run."""
RABITQ_BLOCKS = 4
"""Blocks of the RaBitQ scoring kernel that run on a multiprocessor at once, as `kBlocks` in its source."""
RABITQ_WARPS = 8
"""Warps of such a block, each of which takes a unit at a time."""
RABITQ_CENTRES = 128
"""Centres that the tokens of such a block may have, as `kCentres` in its source."""
MASS_THREADS = 1024
"""Threads of a block of the kernel that completes a score: each block reads all partial sums of its row."""
HELD_SCORES = 16384
"""Scores that a block of the top-k kernel keeps in shared memory, as `kHeld` in its source."""


class SwapInShape(NamedTuple):
    """How the swap-in kernel is launched; see its source.

    Args:
        threads: Of every block, a power of two.
        movers: Threads of a copying block that copy, a multiple of 32.
        copiers: Copying blocks; 0 for the direct way, in which each piece of a selected item has its own thread.
    """

    threads: int
    movers: int
    copiers: int


def pieces(item_bytes: int) -> tuple[int, int]:
    """Pieces that an item is copied in, and bytes a piece: whole 128-byte lines, without which bulk copies are slow."""
    count = -(-item_bytes // PIECE_BYTES)
    return count, -(-item_bytes // (128 * count)) * 128


def direct_blocks(k: int, item_bytes: int, movers: int) -> int:
    """Copying blocks a row in the direct way."""
    return -(-k * pieces(item_bytes)[0] // movers)


def swap_in_shape(rows: int, k: int, slots: int, item_bytes: int, multiprocessors: int, bulk: bool) -> SwapInShape:
    """The launch shape of the swap-in kernel.

    A planning thread takes two selected items and four slots, as far as a block reaches; more threads would wait for
    each other longer than they save. The direct way has the first bytes under way sooner, and is taken where all of its
    blocks run at once.

    Args:
        rows, k, slots, item_bytes: Sizes of the op's arguments.
        multiprocessors: Of the device.
        bulk: Whether the device and the items' alignment allow bulk copies.
    """
    threads = 256
    while threads < MAX_THREADS and (k > 2 * threads or slots > 4 * threads):
        threads *= 2
    if rows * (1 + direct_blocks(k, item_bytes, DIRECT_MOVERS)) <= multiprocessors * (MAX_THREADS // threads):
        return SwapInShape(threads, DIRECT_MOVERS, 0)
    return SwapInShape(threads, MOVERS if bulk else min(threads, 32 * WARPS), COPIERS)


def append_threads(slots: int) -> int:
    """Threads of the append kernel, which takes one block a row: four slots a thread, as far as a block reaches."""
    threads = 128
    while threads < MAX_THREADS and slots > 4 * threads:
        threads *= 2
    return threads


def top_k_blocks(rows: int, items: int, multiprocessors: int, clusters: bool) -> int:
    """Blocks a row of the top-k kernel, a cluster, of as many threads as there can be.

    More blocks read a row sooner but wait for each other three to seven times; a thread takes at least four scores. All
    the blocks of a cluster must run at once.

    Args:
        rows, items: The shape of the scores.
        multiprocessors: Of the device.
        clusters: Whether the device has thread-block clusters. Without them a row takes one block.
    """
    blocks = 1
    if clusters:
        while blocks < MAX_CLUSTER and 2 * blocks * rows <= multiprocessors and 4 * MAX_THREADS * blocks < items:
            blocks *= 2
    return blocks


def top_k_items(items: int, blocks: int) -> int:
    """Items that a block of the top-k kernel takes: of each of its 32 warps a multiple of 32."""
    return -(-items // (blocks * MAX_THREADS)) * MAX_THREADS


def top_k_shared_bytes(items: int, blocks: int) -> int:
    """Dynamic shared memory of the top-k kernel: its scores, if they fit."""
    each = top_k_items(items, blocks)
    return 4 * each if each <= HELD_SCORES else 0


def top_k_chunks(items: int, blocks: int, chunk_items: int) -> int:
    """Chunks that the items of a block may lie in."""
    return (top_k_items(items, blocks) - 1) // chunk_items + 2


def rabitq_blocks(rows: int, units: int, unit_tokens: int, centre_tokens: int, multiprocessors: int) -> int:
    """Blocks a row of the RaBitQ scoring kernel: as many as run at once, of a unit a warp or more; more of them where
    their tokens would have more centres than they take.

    Args:
        rows: Rows, times the blocks that a row's query heads take.
        units: Units of a row.
        unit_tokens: Tokens of a unit, at most 64.
        centre_tokens: Tokens that share a centre, at least 16.
        multiprocessors: Of the device.
    """
    most = RABITQ_WARPS * max(1, (RABITQ_CENTRES - 2) * centre_tokens // (RABITQ_WARPS * unit_tokens))
    least = -(-units // most)
    return max(least, min(-(-units // RABITQ_WARPS), RABITQ_BLOCKS * multiprocessors // rows))


def mass_blocks(rows: int, items: int, multiprocessors: int) -> int:
    """Blocks a row of the kernel that completes a score: enough to fill the device, of an item a thread or more."""
    return max(1, min(-(-items // MASS_THREADS), 2 * multiprocessors // rows))
