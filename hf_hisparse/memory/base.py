"""What a layer's decode step asks of the place where its history lies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_hisparse.layout import ItemLayout


class Memory(ABC):
    """The history of one layer: `rows` independent sequences of items.

    Args:
        rows: Batch elements times KV heads.
        layout: How an item is laid out.
        dtype: Of the elements.
        device: Where attention runs.
    """

    ragged = 0
    """The most tokens that a row may have fewer than it is told there are."""

    def __init__(self, rows: int, layout: ItemLayout, dtype: torch.dtype, device: torch.device):
        self.rows, self.layout, self.dtype, self.device = rows, layout, dtype, device

    @property
    def item_bytes(self) -> int:
        """Bytes an item."""
        return self.layout.elements * self.dtype.itemsize

    @property
    @abstractmethod
    def room(self) -> int:
        """Tokens that fit as it is. Up to there no tensor moves."""

    @abstractmethod
    def reserve(self, tokens: int, layers: int = 1) -> None:
        """Makes room for a history of `tokens` tokens.

        Raises `MemoryError`, with nothing lost, if there is none, or not as much again in host memory for each of
        `layers` layers.
        """

    @abstractmethod
    def write(self, parts: Sequence[Tensor], start: int) -> None:
        """Stores `[rows, tokens, width]` parts as the history from token `start` on; `start` begins an item."""

    @property
    def unit(self) -> int:
        """Tokens at multiples of which `write_alike` may begin."""
        return self.layout.page_size

    @abstractmethod
    def write_alike(
        self, parts: Sequence[Tensor], start: int, kinds: Sequence[int], room: int, layers: int = 1
    ) -> bool:
        """Makes room for `room` tokens and stores the history from `start` on, of rows some of which are the same.

        Raises `MemoryError`, as `reserve` does.

        Args:
            parts: `[kinds, tokens, width]`, each kind once.
            start: A multiple of `unit`. What comes before it stays as it is.
            kinds: Of every row. Where bytes can be shared by rows of one kind they are, until one of them is changed.
            room, layers: As for `reserve`.

        Returns:
            Whether tensors moved.
        """

    @abstractmethod
    def read(self, tokens: int, start: int = 0) -> tuple[Tensor, ...]:
        """The parts `[rows, tokens - start, width]` of tokens `start` to `tokens`, on the device.

        `start` begins an item.
        """

    def distrust(self) -> None:
        """A step may have ended midway, so that what is kept about the history is not to be relied on."""

    def settle(self) -> None:
        """Orders the device's next work, a step that is replayed for one, after what is being written."""

    @abstractmethod
    def append(self, token: Tensor, position: Tensor) -> None:
        """Stores one token a row: `[rows, sum(widths)]`, at the `[rows]` int64 positions."""

    @abstractmethod
    def fetch(self, selection: Tensor) -> tuple[Tensor, Tensor]:
        """Where the selected items `[rows, k]` lie: a buffer `[rows, slots, elements]` and slots `[rows, k]` int32."""

    @abstractmethod
    def fork(self, tokens: int, room: int = 0, layers: int = 1) -> Memory:
        """A memory of its own with the first `tokens` tokens, the whole history, and room for `room`.

        Raises `MemoryError`, as `reserve` does. Where bytes can be shared they are, until one of both is written.
        """

    @abstractmethod
    def select(self, index: Sequence[int], tokens: int, layers: int = 1) -> None:
        """Keeps the rows at `index`, which may repeat, of a history of `tokens` tokens.

        If they are as many as before, no tensor moves. Raises `MemoryError`, as `reserve` does.
        """

    def prepare_select(self, rows: int, tokens: int, layers: int = 1) -> None:
        """Has all the host memory that `select` of so many rows will need. Raises as that does, and changes nothing."""

    def prepare_cut(self, tokens: int, room: int = 0, layers: int = 1) -> None:
        """Has all the host memory that `cut` will need. Raises as that does, and changes nothing."""

    @abstractmethod
    def cut(self, tokens: int, room: int = 0, layers: int = 1) -> bool:
        """Only the first `tokens` tokens are needed from here on, and there is room for `room`. Whether tensors moved.

        Raises `MemoryError`, as `reserve` does.
        """

    @abstractmethod
    def dump(self, tokens: int) -> Iterator[Tensor]:
        """The items of a history of `tokens` tokens, row by row, in pieces on the CPU. Waits for the device."""

    @abstractmethod
    def load(self, items: Tensor, tokens: int, room: int = 0, layers: int = 1) -> None:
        """Takes `[rows, items, elements]` on the CPU as its history, of `tokens` tokens, and makes room for `room`.

        They may be a part of it from here on, and must not be written. Raises `MemoryError`, as `reserve` does.
        """

    def clear(self) -> None:
        """As a new one, but with the room that it has and shares with none."""
        self.cut(0)

    @property
    @abstractmethod
    def device_bytes(self) -> int:
        """Bytes held on the device."""

    @property
    @abstractmethod
    def host_bytes(self) -> int:
        """Bytes held in host memory."""

    def counts(self) -> Tensor | None:
        """`[2]` int64 on the CPU, hits and misses so far; None where nothing can miss."""
        return None

    def log(self) -> Tensor | None:
        """`[steps, 2]` int64 on the CPU, hits and misses of the latest steps, oldest first; None where none miss."""
        return None

    def residency(self, tokens: int) -> Tensor:
        """The share of rows that have each item of `tokens` tokens on the device, `[items]` float32 on the CPU."""
        return torch.ones(self.layout.items(tokens))
