"""The full history of a layer in host memory, in slabs that never move."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from typing import ClassVar

import torch
from torch import Tensor

from hf_hisparse.memory import pinned


SLAB_BYTES = 1 << 18
"""A slab is the smallest power of two of items that fills this much: large enough to keep the table small."""

GROWTH_BYTES = 1 << 26
"""The most that a store grows by ahead of need, unless a slab a row is more. It takes some 20 ms, so that the stores of
a whole model are ready within a second, and hold a few GiB that they do not use at most."""


class HostStore:
    """`[row][item][elements]` in slabs of `items_per_slab` items, found through a table of addresses.

    Growing adds a chunk, one allocation with the next slabs of every row, and leaves earlier slabs where they are. What
    is needed at once is allocated to the slab. When a step leaves little room, the next chunk, a quarter of what is
    held, is prepared in the background, and becomes part of the store at the step that needs it.

    Args:
        rows, elements, dtype: The shape of the history: `rows` sequences of items of `elements` elements.
        device: The device that reads it. Memory is pinned if that is a CUDA device.
    """

    _latest: ClassVar[torch.cuda.Event | None] = None
    """The latest write of any store. Writers wait for it, so that a prefill holds the layer being computed and the
    layer being written, and never more."""

    def __init__(self, rows: int, elements: int, dtype: torch.dtype, device: torch.device):
        self.rows, self.elements, self.dtype, self.device = rows, elements, dtype, device
        self.item_bytes = elements * dtype.itemsize
        self.items_per_slab = 1 << (-(-SLAB_BYTES // self.item_bytes) - 1).bit_length()
        self.chunks: list[Tensor] = []
        self.table = torch.zeros(rows, 0, dtype=torch.int64, device=device)
        self._next: Future[pinned.Region] | None = None
        """The chunk that is being prepared, or could not be."""
        self._next_bytes = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._written: torch.cuda.Event | None = None

    @property
    def capacity(self) -> int:
        """Items a row that fit without growing."""
        return self.table.shape[1] * self.items_per_slab

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held, with those of the chunk being prepared."""
        failed = self._next is not None and self._next.done() and self._next.exception() is not None
        return sum(chunk.nbytes for chunk in self.chunks) + (0 if failed else self._next_bytes)

    def reserve(self, items: int, layers: int = 1) -> None:
        """Grows until `items` items a row fit, and prepares to grow further when they nearly fill it.

        Args:
            items: Items a row.
            layers: How many stores are about to grow as much, with this one. What is needed at once must suffice for
                all of them, so that the end of memory is found before the first has grown.

        Raises:
            MemoryError: If they cannot be made to fit. It says how much was asked for and is held; nothing is lost.
        """
        held = self.table.shape[1]
        if items <= self.capacity:
            # A quarter of a slab is 64 tokens or more, half a second of decoding.
            if self._next is None and self.capacity - items < max(self.items_per_slab // 4, 1):
                self._prepare(max(min(held // 4, GROWTH_BYTES // (self.rows * self._slab_bytes)), 1))
            return
        if self._next is not None:
            # One that failed was not needed until now, and may have asked for more than is needed.
            with contextlib.suppress(MemoryError):
                self._adopt()
        slabs = -(-items // self.items_per_slab) - self.table.shape[1]
        if slabs > 0:
            nbytes = slabs * self.rows * self._slab_bytes
            try:
                pinned.require(nbytes * layers, layers)
                self._prepare(slabs)
                self._adopt()
            except MemoryError as error:
                needed, has = nbytes * layers / 2**20, self.nbytes / 2**20
                raise MemoryError(
                    f"{error}; {needed:.0f} MiB are needed in all, {has:.0f} are held and intact"
                ) from error

    @property
    def _slab_bytes(self) -> int:
        return self.items_per_slab * self.item_bytes

    def _prepare(self, slabs: int) -> None:
        """Begins to allocate the next `slabs` slabs of every row."""
        self._next_bytes = self.rows * slabs * self._slab_bytes
        self._next = pinned.allocate_behind(self._next_bytes, self.device)

    def _adopt(self) -> None:
        """Adds the chunk that was prepared, once it is there. Raises `MemoryError` if it could not be had."""
        chunk = self._next
        # An interrupted wait leaves it to the next.
        chunk.exception()
        self._next, self._next_bytes = None, 0
        try:
            memory = chunk.result().tensor()
        finally:
            # It holds its error, and the error this frame: a cycle, that would keep the store after its end.
            del chunk
        slabs = memory.nbytes // (self.rows * self._slab_bytes)
        # The addresses are computed where the table is: a copy to the device would wait for it.
        slab = torch.arange(self.rows * slabs, device=self.device).view(self.rows, slabs)
        self.table = torch.cat((self.table, slab * self._slab_bytes + memory.data_ptr()), dim=1)
        self.chunks.append(memory.view(self.dtype).view(self.rows, slabs * self.items_per_slab, self.elements))

    def __del__(self) -> None:
        # What has begun ends, and goes at once.
        if getattr(self, "_next", None) is not None:
            self._next.cancel()

    def _spans(self, first: int, count: int) -> Iterator[tuple[Tensor, slice, slice]]:
        """The chunks that hold items `first` to `first + count`, with the slice of each and of the request."""
        start = 0
        for chunk in self.chunks:
            low, high = max(first, start), min(first + count, start + chunk.shape[1])
            if low < high:
                yield chunk, slice(low - start, high - start), slice(low - first, high - first)
            start += chunk.shape[1]

    def write(self, items: Tensor, first: int) -> None:
        """Copies `[rows, count, elements]` items to item `first` on, behind whatever the device does next."""
        if self._stream is None:
            for chunk, there, here in self._spans(first, items.shape[1]):
                chunk[:, there] = items[:, here]
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for chunk, there, here in self._spans(first, items.shape[1]):
                # One copy a row: a strided host destination would take a staging buffer.
                for row in range(self.rows):
                    chunk[row, there].copy_(items[row, here], non_blocking=True)
            items.record_stream(self._stream)
            self._written = torch.cuda.Event()
            self._written.record(self._stream)
        HostStore._latest = self._written

    def read(self, first: int, count: int) -> Tensor:
        """Items `first` to `first + count` of every row, `[rows, count, elements]`, on the device."""
        self.settle()
        items = torch.empty(self.rows, count, self.elements, dtype=self.dtype, device=self.device)
        for chunk, there, here in self._spans(first, count):
            for row in range(self.rows):
                items[row, here].copy_(chunk[row, there], non_blocking=True)
        return items

    def settle(self) -> None:
        """Orders the device's next work after the latest write."""
        if self._written is not None:
            torch.cuda.current_stream(self.device).wait_event(self._written)
            self._written = None

    @staticmethod
    def wait() -> None:
        """Waits on the host until the latest write has landed, whatever store made it, so that its source is free."""
        # Another thread may end its wait, or begin a write, at any point here.
        latest, HostStore._latest = HostStore._latest, None
        if latest is not None:
            latest.synchronize()
