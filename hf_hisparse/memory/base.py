"""What a layer's decode step asks of the place where its history lies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import count
from typing import ClassVar

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

    _serials: ClassVar[count] = count()

    def __init__(self, rows: int, layout: ItemLayout, dtype: torch.dtype, device: torch.device):
        self.serial = next(self._serials)
        """No two memories have the same one."""
        self.rows, self.layout, self.dtype, self.device = rows, layout, dtype, device

    @abstractmethod
    def reserve(self, tokens: int) -> None:
        """Makes room for a history of `tokens` tokens. Raises `MemoryError`, with nothing changed, if there is none."""

    @abstractmethod
    def write(self, parts: Sequence[Tensor], start: int) -> None:
        """Stores `[rows, tokens, width]` parts as the history from token `start` on; `start` begins an item."""

    @abstractmethod
    def read(self, tokens: int, start: int = 0) -> tuple[Tensor, ...]:
        """The parts `[rows, tokens - start, width]` of tokens `start` to `tokens`, on the device.

        `start` begins an item.
        """

    @abstractmethod
    def append(self, token: Tensor, position: Tensor) -> None:
        """Stores one token a row: `[rows, sum(widths)]`, at the `[rows]` int64 positions."""

    @abstractmethod
    def fetch(self, selection: Tensor) -> tuple[Tensor, Tensor]:
        """Where the selected items `[rows, k]` lie: a buffer `[rows, slots, elements]` and slots `[rows, k]` int32."""

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
