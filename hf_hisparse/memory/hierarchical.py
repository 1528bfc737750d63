"""The history in host memory and a bounded LRU working set on the device."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_hisparse.layout import ItemLayout
from hf_hisparse.memory.base import Memory
from hf_hisparse.memory.device_buffer import DeviceBuffer
from hf_hisparse.memory.host_store import HostStore


class HierarchicalMemory(Memory):
    """A `HostStore` and the `DeviceBuffer` over it.

    Args:
        rows, layout, dtype, device: As for `Memory`.
        slots: Items a row that the device buffer holds.
    """

    def __init__(self, rows: int, layout: ItemLayout, dtype: torch.dtype, device: torch.device, slots: int):
        super().__init__(rows, layout, dtype, device)
        self.store = HostStore(rows, layout.elements, dtype, device)
        self.buffer = DeviceBuffer(rows, slots, layout, self.store)

    @property
    def room(self) -> int:
        return self.store.capacity * self.layout.page_size

    def reserve(self, tokens: int, layers: int = 1) -> None:
        self.store.reserve(self.layout.items(tokens), layers)
        self.buffer.reserve()

    def write(self, parts: Sequence[Tensor], start: int) -> None:
        self.store.wait()
        self.store.write(self.layout.pack(parts), start // self.layout.page_size)
        self.buffer.forget()

    @property
    def unit(self) -> int:
        return self.store.items_per_slab * self.layout.page_size

    def write_alike(
        self, parts: Sequence[Tensor], start: int, kinds: Sequence[int], room: int, layers: int = 1
    ) -> bool:
        table = self.store.table
        if len(parts[0]) == self.rows:
            # Memory is had while what was written last is still on its way.
            if room > self.room:
                self.reserve(room, layers)
            self.write(parts, start)
        else:
            self.store.wait()
            first, (_, closed) = start // self.layout.page_size, self._items(start + parts[0].shape[1])
            self.store.write_alike(self.layout.pack(parts), first, kinds, closed, self.layout.items(room), layers)
            self.buffer.reserve()
            self.buffer.forget()
        return self.store.table is not table

    def read(self, tokens: int, start: int = 0) -> tuple[Tensor, ...]:
        first = start // self.layout.page_size
        return self.layout.unpack(self.store.read(first, self.layout.items(tokens) - first), tokens - start)

    def distrust(self) -> None:
        self.buffer.forget()

    def settle(self) -> None:
        self.store.settle()

    def append(self, token: Tensor, position: Tensor) -> None:
        self.settle()
        self.buffer.append(token, position)

    def fetch(self, selection: Tensor) -> tuple[Tensor, Tensor]:
        self.settle()
        return self.buffer.buffer, self.buffer.swap_in(selection)

    def fork(self, tokens: int, room: int = 0, layers: int = 1) -> Memory:
        new = copy.copy(self)
        new.store = self.store.fork(*self._items(tokens), self.layout.items(room), layers)
        new.buffer = self.buffer.fork(new.store)
        return new

    def select(self, index: Sequence[int], tokens: int, layers: int = 1) -> None:
        self.store.select(index, *self._items(tokens), layers)
        self.buffer.select(torch.tensor(index, device=self.device))
        self.rows = len(index)

    def prepare_select(self, rows: int, tokens: int, layers: int = 1) -> None:
        self.store.prepare_select(rows, self._items(tokens)[1], layers)

    def prepare_cut(self, tokens: int, room: int = 0, layers: int = 1) -> None:
        self.store.prepare_cut(*self._items(tokens), self.layout.items(room), layers)
        self.buffer.reserve()

    def cut(self, tokens: int, room: int = 0, layers: int = 1) -> bool:
        moved = self.store.cut(*self._items(tokens), self.layout.items(room), layers)
        self.buffer.reserve()
        return moved

    def dump(self, tokens: int) -> Iterator[Tensor]:
        return self.store.dump(self.layout.items(tokens))

    def load(self, items: Tensor, tokens: int, room: int = 0, layers: int = 1) -> None:
        self.store.load(items, self._items(tokens)[1], self.layout.items(room), layers)
        self.buffer.reserve()
        self.buffer.forget()

    def clear(self) -> None:
        super().clear()
        self.buffer.clear()

    def _items(self, tokens: int) -> tuple[int, int]:
        """The items that `tokens` tokens take, and how many of them are full in every row."""
        return self.layout.items(tokens), max(tokens - self.ragged, 0) // self.layout.page_size

    @property
    def device_bytes(self) -> int:
        return self.buffer.nbytes

    @property
    def host_bytes(self) -> int:
        return self.store.nbytes

    def counts(self) -> Tensor:
        return self.buffer.totals.sum(0).cpu()

    def log(self) -> Tensor:
        steps = int(self.buffer.clock.max()) if self.rows else 0
        log = self.buffer.log.sum(0).cpu()
        held = min(steps, len(log))
        return log[torch.arange(steps - held + 1, steps + 1) % len(log)]

    def residency(self, tokens: int) -> Tensor:
        items = self.layout.items(tokens)
        held = self.buffer.slot_item.flatten().long().cpu()
        # Items of a history that was longer may lie there still.
        held = held[(held >= 0) & (held < items)]
        return torch.bincount(held, minlength=items) / self.rows
