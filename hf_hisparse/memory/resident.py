"""The whole history on the device: the resident oracle, which the hierarchical memory must equal bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_hisparse.layout import select_rows
from hf_hisparse.memory.base import Memory


class ResidentMemory(Memory):
    """A device buffer with a slot for every item, so that an item's slot is its id."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.buffer = torch.zeros(self.rows, 0, self.layout.elements, dtype=self.dtype, device=self.device)

    @property
    def room(self) -> int:
        return self.buffer.shape[1] * self.layout.page_size

    def reserve(self, tokens: int, layers: int = 1) -> None:
        items = self.layout.items(tokens)
        held = self.buffer.shape[1]
        if items > held:
            grown = self.buffer.new_zeros(self.rows, max(items, held + held // 4), self.layout.elements)
            grown[:, :held] = self.buffer
            self.buffer = grown

    def write(self, parts: Sequence[Tensor], start: int) -> None:
        items = self.layout.pack(parts)
        first = start // self.layout.page_size
        self.buffer[:, first : first + items.shape[1]] = items

    def write_alike(
        self, parts: Sequence[Tensor], start: int, kinds: Sequence[int], room: int, layers: int = 1
    ) -> bool:
        held = self.room
        self.reserve(room)
        if len(parts[0]) < self.rows:
            parts = [torch.stack([part[kind] for kind in kinds]) for part in parts]
        self.write(parts, start)
        return self.room > held

    def read(self, tokens: int, start: int = 0) -> tuple[Tensor, ...]:
        first = start // self.layout.page_size
        return self.layout.unpack(self.buffer[:, first : self.layout.items(tokens)], tokens - start)

    def append(self, token: Tensor, position: Tensor) -> None:
        page_size = self.layout.page_size
        rows = torch.arange(self.rows, device=self.device)
        offset = 0
        for part, width in zip(token.split(list(self.layout.widths), dim=1), self.layout.widths, strict=True):
            start = offset + position % page_size * width
            columns = start.unsqueeze(1) + torch.arange(width, device=self.device)
            self.buffer[rows.unsqueeze(1), (position // page_size).unsqueeze(1), columns] = part
            offset += page_size * width

    def fetch(self, selection: Tensor) -> tuple[Tensor, Tensor]:
        return self.buffer, selection

    def fork(self, tokens: int, room: int = 0, layers: int = 1) -> Memory:
        new = type(self)(self.rows, self.layout, self.dtype, self.device)
        new.buffer = self.buffer.clone()
        return new

    def select(self, index: Sequence[int], tokens: int, layers: int = 1) -> None:
        self.buffer = select_rows(self.buffer, torch.tensor(index, device=self.device))
        self.rows = len(index)

    def cut(self, tokens: int, room: int = 0, layers: int = 1) -> bool:
        return False

    def dump(self, tokens: int) -> Iterator[Tensor]:
        items = self.layout.items(tokens)
        return (row[:items].cpu() for row in self.buffer)

    def load(self, items: Tensor, tokens: int, room: int = 0, layers: int = 1) -> None:
        self.reserve(max(tokens, room))
        self.buffer[:, : items.shape[1]] = items.to(self.device)

    @property
    def device_bytes(self) -> int:
        return self.buffer.nbytes

    @property
    def host_bytes(self) -> int:
        return 0
