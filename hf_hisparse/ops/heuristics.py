"""How many blocks and threads a kernel is launched with. The results do not depend on it, only the time."""

from __future__ import annotations

from typing import NamedTuple


MAX_THREADS = 1024
MAX_CLUSTER = 8
"""Blocks a cluster that every device with clusters can run."""
ITEMS_PER_THREAD = 4
"""Selected items that a thread of the swap-in kernel holds, as `kPerThread` in its source."""
HELD_SCORES = 16384
"""Scores that a block of the top-k kernel keeps in shared memory, as `kHeld` in its source."""


class Shape(NamedTuple):
    """`blocks` blocks of `threads` threads take a row. Both are powers of two."""

    blocks: int
    threads: int


def swap_in_shape(rows: int, k: int, slots: int, multiprocessors: int, clusters: bool) -> Shape:
    """The launch shape of the swap-in kernel.

    A thread takes two selected items and four slots, as far as a block reaches; more threads would wait for each other
    longer than they save. One block cannot fill the link to the host, four can, and eight have a row's first misses
    under way sooner; every block of a row repeats the row's plan, so they must all run at once. Half the device is
    left free, since a cluster has to fit into one of its partitions.

    Args:
        rows, k, slots: Sizes of the op's arguments.
        multiprocessors: Of the device.
        clusters: Whether the device has thread-block clusters. Without them a row takes one block.
    """
    threads = 256
    while threads < MAX_THREADS and (k > 2 * threads or slots > 4 * threads):
        threads *= 2
    blocks = 1
    if clusters:
        room = multiprocessors * (MAX_THREADS // threads) // 2
        while blocks < MAX_CLUSTER and 2 * blocks * rows <= room:
            blocks *= 2
    return Shape(blocks, threads)


def append_threads(slots: int) -> int:
    """Threads of the append kernel, which takes one block a row: four slots a thread, as far as a block reaches."""
    threads = 128
    while threads < MAX_THREADS and slots > 4 * threads:
        threads *= 2
    return threads


def top_k_shape(rows: int, items: int, multiprocessors: int, clusters: bool) -> Shape:
    """The launch shape of the top-k kernel, whose blocks have as many threads as there can be.

    More blocks read a row sooner but wait for each other five times; a thread takes at least four scores. All the
    blocks of a cluster must run at once.

    Args:
        rows, items: The shape of the scores.
        multiprocessors: Of the device.
        clusters: Whether the device has thread-block clusters. Without them a row takes one block.
    """
    blocks = 1
    if clusters:
        while blocks < MAX_CLUSTER and 2 * blocks * rows <= multiprocessors and 4 * MAX_THREADS * blocks < items:
            blocks *= 2
    return Shape(blocks, MAX_THREADS)


def top_k_shared_bytes(items: int, blocks: int) -> int:
    """Dynamic shared memory of the top-k kernel: its scores, if they fit."""
    each = -(-items // (blocks * MAX_THREADS)) * MAX_THREADS
    return 4 * each if each <= HELD_SCORES else 0
