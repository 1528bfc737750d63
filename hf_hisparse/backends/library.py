"""What the backends over other libraries' kernels share.

Those kernels take a table of a sequence's tokens and how many it has. Here a KV head is a sequence of its own, and its
table what its selection sees, holes and padding left out (`ops.list_tokens`). A page of the table is one token, so that
items of any size will do, and a first or last one that counts only in part.

A single sequence leaves most of a device idle, so the list of a row is cut into runs, each a sequence to the library,
and what comes out is merged (`ops.merge_runs`). How many runs there are depends on shapes and on the device alone, and
what is in one on the selection alone: where an item lies changes no bit.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from hf_hisparse import ops
from hf_hisparse.backends.base import AttentionBackend
from hf_hisparse.layout import ItemLayout


HOPPER = 9
"""The first number of the compute capability that the backends are made for."""
TILE = 128
"""Tokens that the libraries' kernels take at a time, and a multiple of which is a run."""


class Device(NamedTuple):
    """What the kernels and the number of runs depend on."""

    capability: int
    """The first number of the compute capability."""
    multiprocessors: int


@functools.cache
def device_of(device: torch.device) -> Device | None:
    """A CUDA device; None if it is another."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return Device(properties.major, properties.multi_processor_count)


class LibraryBackend(AttentionBackend):
    """Attends through a function of another library."""

    name: str
    """What `backend=` takes."""
    dtypes: tuple[torch.dtype, ...]

    @abstractmethod
    def refusal(self, layout: ItemLayout) -> str | None:
        """Why such items cannot be attended to, or None."""

    @abstractmethod
    def refusal_of_heads(self, heads: int, softcap: float | None) -> str | None:
        """Why queries of so many heads cannot attend, or None."""

    @abstractmethod
    def programs(self, heads: int) -> int:
        """Thread blocks a sequence. Of any kernel here a multiprocessor holds one."""

    @abstractmethod
    def run(
        self,
        query: Tensor,
        buffer: Tensor,
        tokens: Tensor,
        counts: Tensor,
        layout: ItemLayout,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Attends to sequences of tokens.

        Args:
            query: `[sequences, heads, width]`.
            buffer: `[items, elements]`, the items of all rows.
            tokens: `[sequences, run_tokens]` int32: `i` is token `i % s` of item `i // s`, where `s` is the slot stride
                of the layout. See `ops.list_tokens`.
            counts: `[sequences]` int32, how many of them there are.
            layout, scale, softcap: See `attend`.

        Returns:
            `[sequences, heads, value_width]`, zeros for a sequence without tokens, and the log of the sum of the
            exponents of the logits, `[sequences, heads]` float32.
        """

    def plan(self, rows: int, heads: int, tokens: int, device: torch.device) -> tuple[int, int]:
        """How many runs there are, and of how many tokens, where a row selects `tokens`: as many as run at once."""
        runs = device_of(device).multiprocessors // (rows * self.programs(heads))
        run_tokens = -(-tokens // (max(1, min(runs, tokens // TILE)) * TILE)) * TILE
        return -(-tokens // run_tokens), run_tokens

    @staticmethod
    def slot_stride(layout: ItemLayout) -> int:
        """Addresses an item. They are as far apart as the keys of its tokens: a page of `n` keys and as many values of
        their size has `2 n`, of which the first `n` are tokens."""
        return 1 if layout.page_size == 1 else layout.elements // layout.key[1]

    def check(self, layout: ItemLayout, dtype: torch.dtype, device: torch.device) -> None:
        found = device_of(device)
        reason: str | None
        if found is None:
            reason = f"it runs on a CUDA device, and the model is on {device}"
        elif found.capability != HOPPER:
            reason = f"it is for compute capability {HOPPER}.x, and {device} has {found.capability}.x"
        elif dtype not in self.dtypes:
            reason = f"it takes {' or '.join(map(str, self.dtypes))}, and the model is in {dtype}"
        else:
            reason = self.refusal(layout)
        if reason is not None:
            raise self.error(reason)

    def error(self, reason: str) -> ValueError:
        """What is raised for something that cannot be attended to."""
        return ValueError(f'`backend="{self.name}"`: {reason}; use `backend="auto"`')

    def attend(
        self,
        query: Tensor,
        buffer: Tensor,
        slots: Tensor,
        selection: Tensor,
        lengths: Tensor,
        layout: ItemLayout,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        self.check(layout, query.dtype, query.device)
        rows, heads, _ = query.shape
        if (reason := self.refusal_of_heads(heads, softcap)) is not None:
            raise self.error(reason)
        count = selection.shape[1] * layout.page_size
        if query.numel() == 0 or count == 0:
            return query.new_zeros(rows, heads, layout.value[1])
        if not buffer[:1].is_contiguous() or buffer.stride(0) % layout.elements:
            raise ValueError(
                f"`buffer` {list(buffer.shape)} must hold a row's items one after the other, without gaps: its strides "
                f"are {buffer.stride()}; make it contiguous"
            )
        row_items = buffer.stride(0) // layout.elements if rows > 1 else 0
        items = buffer.as_strided((row_items * (rows - 1) + buffer.shape[1], layout.elements), (layout.elements, 1))
        slot_stride = self.slot_stride(layout)
        if len(items) * slot_stride >= 1 << 31:
            raise self.error(f"`buffer` {list(buffer.shape)} has more tokens than 32 bits can name")

        runs, run_tokens = self.plan(rows, heads, count, query.device)
        tokens, counts = ops.list_tokens(
            slots,
            selection,
            lengths,
            layout.page_size,
            row_items * slot_stride,
            slot_stride,
            runs,
            run_tokens,
        )
        if query.stride(2) != 1:
            query = query.contiguous()
        # Every run of a row asks for the same: a copy, unless there is one run.
        query = query.unsqueeze(1).expand(-1, runs, -1, -1).flatten(0, 1)
        with torch.cuda.device_of(query):
            partial, weights = self.run(query, items, tokens.flatten(0, 1), counts.flatten(), layout, scale, softcap)
        if runs == 1 and sinks is None:
            return partial
        return ops.merge_runs(partial.unflatten(0, (rows, runs)), weights.unflatten(0, (rows, runs)), counts, sinks)
