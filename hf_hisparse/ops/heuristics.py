"""How many blocks and threads a kernel is launched with. The results do not depend on it, only the time."""

from __future__ import annotations

from typing import NamedTuple


MAX_THREADS = 1024
MAX_BLOCKS = 16
"""Blocks that may share a row: with more, the plan that each works out for itself costs more than it gains."""
ITEMS_PER_THREAD = 4
"""Selected items that a thread of the swap-in kernel holds, as `kPerThread` in its source."""


class Shape(NamedTuple):
    """`blocks` blocks of `threads` threads take a row. Both are powers of two."""

    blocks: int
    threads: int


def swap_in_shape(rows: int, k: int, slots: int) -> Shape:
    """The launch shape of the swap-in kernel.

    A thread takes two selected items and four slots, as far as a block reaches; more threads would wait for each other
    longer than they save. About 32 blocks fill the link to the host; one of several is lost to a row's state.

    Args:
        rows, k, slots: Sizes of the op's arguments.
    """
    threads = 256
    while threads < MAX_THREADS and (k > 2 * threads or slots > 4 * threads):
        threads *= 2
    blocks = 1
    while blocks < MAX_BLOCKS and 2 * blocks * rows <= 32:
        blocks *= 2
    return Shape(blocks, threads)


def append_threads(slots: int) -> int:
    """Threads of the append kernel, which takes one block a row: four slots a thread, as far as a block reaches."""
    threads = 128
    while threads < MAX_THREADS and slots > 4 * threads:
        threads *= 2
    return threads
