"""The working set on the device: slots, and the LRU state that says what they hold."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from hf_hisparse import ops
from hf_hisparse.layout import ItemLayout, select_rows
from hf_hisparse.memory.host_store import HostStore


STATE = ("slot_item", "last_used", "item_slot", "clock", "totals", "log", "progress")
"""What there is for every row, beside the buffer itself."""
LOG_STEPS = 256
"""Steps whose hits and misses are kept apart."""


class DeviceBuffer:
    """`slots` items a row, the most recently used of a `HostStore`.

    Args:
        rows, slots: Its size.
        layout: How an item is laid out.
        store: The history that it is a part of.
    """

    def __init__(self, rows: int, slots: int, layout: ItemLayout, store: HostStore):
        self.layout, self.store, self.device = layout, store, store.device
        self.buffer = torch.zeros(rows, slots, layout.elements, dtype=store.dtype, device=self.device)
        self.slot_item = self._int(rows, slots, fill=-1)
        self.last_used = self._int(rows, slots)
        self.item_slot = self._int(rows, 0, fill=-1)
        self.clock = self._int(rows)
        self.totals = torch.zeros(rows, 2, dtype=torch.int64, device=self.device)
        self.log = self._int(rows, LOG_STEPS, 2)
        self.progress = self._int(rows, 2)

    def _int(self, *shape: int, fill: int = 0) -> Tensor:
        return torch.full(shape, fill, dtype=torch.int32, device=self.device)

    @property
    def nbytes(self) -> int:
        """Bytes on the device: slots, LRU state and the store's table."""
        state = sum(getattr(self, name).nbytes for name in STATE)
        return self.buffer.nbytes + state + self.store.table.nbytes

    def reserve(self) -> None:
        """Follows the store's growth."""
        rows, held = self.item_slot.shape
        if self.store.capacity > held:
            self.item_slot = torch.cat((self.item_slot, self._int(rows, self.store.capacity - held, fill=-1)), dim=1)

    def forget(self) -> None:
        """Holds nothing any more: what the store holds was changed under it."""
        self.slot_item.fill_(-1)
        self.item_slot.fill_(-1)
        self.last_used.zero_()

    def clear(self) -> None:
        """As a new one: holds nothing, and has counted nothing."""
        self.forget()
        for tensor in (self.clock, self.totals, self.log):
            tensor.zero_()

    def fork(self, store: HostStore) -> DeviceBuffer:
        """A copy, as a part of another store with the same history."""
        new = copy.copy(self)
        new.store = store
        for name in ("buffer", *STATE):
            setattr(new, name, getattr(self, name).clone())
        new.reserve()
        return new

    def select(self, index: Tensor) -> None:
        """Keeps the rows at `index`, which may repeat."""
        for name in ("buffer", *STATE):
            setattr(self, name, select_rows(getattr(self, name), index))

    def append(self, token: Tensor, position: Tensor) -> None:
        """Writes one token a row through to the store and into the buffer; see `ops.append`."""
        ops.append(
            token,
            position,
            self.layout.page_size,
            list(self.layout.widths),
            self.store.table,
            self.store.items_per_slab,
            self.buffer,
            self.item_slot,
            self.slot_item,
            self.last_used,
            self.clock,
        )

    def swap_in(self, selection: Tensor) -> Tensor:
        """Makes `[rows, k]` selected items resident and returns their slots; see `ops.swap_in`."""
        return ops.swap_in(
            selection,
            self.store.table,
            self.store.items_per_slab,
            self.buffer,
            self.item_slot,
            self.slot_item,
            self.last_used,
            self.clock,
            self.totals,
            self.log,
            self.progress,
        )
