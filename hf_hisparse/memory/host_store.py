"""The full history of a layer in host memory, in slabs that never move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from hf_hisparse.memory import pinned


SLAB_BYTES = 1 << 18
"""A slab is the smallest power of two of items that fills this much: large enough to keep the table small."""


class HostStore:
    """`[row][item][elements]` in slabs of `items_per_slab` items, found through a table of addresses.

    Growing adds a chunk, one allocation with the next slabs of every row, and leaves earlier slabs where they are.

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
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._written: torch.cuda.Event | None = None

    @property
    def capacity(self) -> int:
        """Items a row that fit without growing."""
        return self.table.shape[1] * self.items_per_slab

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return sum(chunk.nbytes for chunk in self.chunks)

    def reserve(self, items: int) -> None:
        """Grows until `items` items a row fit. Raises `MemoryError` saying how much was asked for, changing nothing."""
        if items <= self.capacity:
            return
        held = self.table.shape[1]
        slabs = max(-(-items // self.items_per_slab) - held, held // 4, 1)
        shape = (self.rows, slabs * self.items_per_slab, self.elements)
        try:
            nbytes = self.rows * slabs * self.items_per_slab * self.item_bytes
            chunk = pinned.allocate(nbytes, self.device.type == "cuda")
        except MemoryError as error:
            raise MemoryError(f"{error}; {self.nbytes / 2**20:.0f} MiB are held and intact") from error
        self.chunks.append(chunk.view(self.dtype).view(shape))
        slab_bytes = self.items_per_slab * self.item_bytes
        addresses = chunk.data_ptr() + torch.arange(self.rows * slabs, dtype=torch.int64) * slab_bytes
        self.table = torch.cat((self.table, addresses.view(self.rows, slabs).to(self.device)), dim=1)

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
        if HostStore._latest is not None:
            HostStore._latest.synchronize()
            HostStore._latest = None
