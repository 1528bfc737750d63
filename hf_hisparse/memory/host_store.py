"""The full history of a layer in host memory, in slabs that never move."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from hf_hisparse.capturing import synchronize
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

    Rows and stores share what they have in common. The first `shared` slabs of a row may be any row's, of any store,
    and are not written any more; from there on they are the row's alone. Whatever makes two histories of one (`fork`,
    `select`) shares the slabs that are full and copies, at most, the one that is being filled. A chunk goes with the
    last row that has a slab of it.

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
        self.runs: list[list[Tensor]] = [[] for _ in range(rows)]
        """A row's slabs, where they lie side by side as one `[items, elements]`. They hold the memory."""
        self.shared = 0
        """Slabs at the beginning of every row that others may have too."""
        self.table = torch.zeros(rows, 0, dtype=torch.int64, device=device)
        self._next: Future[pinned.Region] | None = None
        """The chunk that is being prepared, or could not be."""
        self._next_bytes = 0
        self._spare: Tensor | None = None
        """What `select` will need for more rows, or `write_alike` for what they share."""
        # Of another priority than those that are captured on: PyTorch has 32 streams of each, which it hands out in
        # turn, and what is written on one that another thread captures on would become part of the capture.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._written: torch.cuda.Event | None = None

    @property
    def capacity(self) -> int:
        """Items a row that fit without growing."""
        return self.table.shape[1] * self.items_per_slab

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held, with those shared with other stores and those of the chunk being prepared."""
        failed = self._next is not None and self._next.done() and self._next.exception() is not None
        chunks = (run.untyped_storage() for runs in self.runs for run in runs)
        held = {chunk.data_ptr(): chunk.nbytes() for chunk in chunks}
        spare = 0 if self._spare is None else self._spare.nbytes
        return sum(held.values()) + spare + (0 if failed else self._next_bytes)

    def reserve(self, items: int, layers: int = 1) -> None:
        """`fit`, for a history that grows: where it nearly fills what there is, more is prepared.

        Raises:
            MemoryError: As `fit`.
        """
        # A quarter of a slab is 64 tokens or more, half a second of decoding.
        if items > self.capacity:
            self.fit(items, layers)
        elif self._next is None and self.capacity - items < max(self.items_per_slab // 4, 1):
            held = self.table.shape[1] - self.shared
            self._prepare(max(min(held // 4, GROWTH_BYTES // (self.rows * self._slab_bytes)), 1))

    def fit(self, items: int, layers: int = 1, besides: int = 0) -> None:
        """Grows until `items` items a row fit.

        Args:
            items: Items a row.
            layers: How many stores are about to grow as much, with this one. What is needed at once must suffice for
                all of them, so that the end of memory is found before the first has grown.
            besides: Bytes that each of them is about to need on top of that.

        Raises:
            MemoryError: If they cannot be made to fit. It says how much was asked for and is held; nothing is lost.
        """
        if items <= self.capacity:
            return
        if self._next is not None:
            # One that failed was not needed until now, and may have asked for more than is needed.
            with contextlib.suppress(MemoryError):
                self._adopt()
        slabs = -(-items // self.items_per_slab) - self.table.shape[1]
        if slabs > 0:
            self._allocate(slabs * self.rows * self._slab_bytes, layers, partial(self._grow, slabs), besides)

    def _grow(self, slabs: int) -> None:
        self._prepare(slabs)
        self._adopt()

    def _allocate(self, nbytes: int, layers: int, how: Callable[[], None], besides: int = 0) -> None:
        """Allocates so much, which each of `layers` layers will need. Says so where that fails, before or then."""
        needed = (nbytes + besides) * layers
        # No context manager: it and an error that passes through it hold each other, and so this store after its end.
        try:
            pinned.require(needed, layers)
            how()
        except MemoryError as error:
            facts = f"{needed / 2**20:.0f} MiB are needed in all, {self.nbytes / 2**20:.0f} are held and intact"
            raise MemoryError(f"{error}; {facts}") from error

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
        more, runs = self._cut_up(memory, self.rows)
        table = torch.cat((self.table, more), dim=1)
        # No interrupt comes between the two.
        self.table, self.runs = table, [[*row, run] for row, run in zip(self.runs, runs, strict=True)]

    def _cut_up(self, memory: Tensor, rows: int) -> tuple[Tensor, Sequence[Tensor]]:
        """The addresses `[rows, slabs]` and the run of each row in a chunk of so many rows."""
        slabs = memory.nbytes // (rows * self._slab_bytes)
        # The addresses are computed where the table is: a copy to the device would wait for it.
        slab = torch.arange(rows * slabs, device=self.device).view(rows, slabs)
        runs = memory.view(self.dtype).view(rows, slabs * self.items_per_slab, self.elements).unbind()
        return slab * self._slab_bytes + memory.data_ptr(), runs

    def __del__(self) -> None:
        # What has begun ends, and goes at once.
        if getattr(self, "_next", None) is not None:
            self._next.cancel()

    # ---- histories that have a beginning in common -------------------------------------------------------------------

    def fork(self, items: int, closed: int, room: int, layers: int = 1) -> HostStore:
        """A store of its own with the first `items` items, which it shares but for those of the slab being filled.

        Args:
            items: Items of the history.
            closed: Those before the one that the next token goes to.
            room: Items that the new one has room for at least.
            layers: As for `fit`.

        Raises:
            MemoryError: If the new one's memory cannot be had. This one is as it was.
        """
        new = HostStore(self.rows, self.elements, self.dtype, self.device)
        full, rest = self._split(items, closed)
        new.table, new.shared = self.table[:, :full].clone(), full
        new.runs = [self._cut(runs, 0, full) for runs in self.runs]
        new.fit(max(items, room), layers)
        self.settle()
        if rest:
            new.write(self.read(items - rest, rest), items - rest)
        self.shared = full
        return new

    def select(self, index: Sequence[int], items: int, closed: int, layers: int = 1) -> None:
        """Keeps the rows at `index`, which may repeat.

        The slab being filled and those after it are handed on from the rows that go to those that come twice, so that
        nothing is allocated unless there are more rows than before.

        Args:
            index: Rows.
            items, closed: As for `fork`.
            layers: As for `fit`.

        Raises:
            MemoryError: If there are more rows and their memory cannot be had. Nothing has changed then.
        """
        full, rest = self._split(items, closed)
        slabs = self.table.shape[1]
        own, own_table = [self._cut(runs, full, slabs) for runs in self.runs], self.table[:, full:]
        self.prepare_select(len(index), closed, layers)
        more = max(len(index) - self.rows, 0)
        if more:
            table, runs = self._cut_up(torch.empty(0, dtype=torch.uint8) if self._spare is None else self._spare, more)
            own, own_table = [*own, *([run] for run in runs)], torch.cat((own_table, table))
            self._spare = None
        # Whoever comes first keeps what is a row's alone.
        free = [row for row in range(self.rows + more) if row not in set(index)]
        owner: list[int] = []
        for row in index:
            owner.append(free.pop(0) if row in owner else row)
        if rest:
            filling = self.read(items - rest, rest)
        rows = self._on_device(index)
        table = torch.cat((self.table[:, :full].index_select(0, rows), own_table[self._on_device(owner)]), dim=1)
        self.runs = [self._cut(self.runs[row], 0, full) + own[mine] for row, mine in zip(index, owner, strict=True)]
        self.shared = full
        if len(index) == self.rows:
            self.table.copy_(table)
        else:
            self.table, self.rows = table, len(index)
            self._forget_next()
        if rest:
            copies = [row for row, mine in enumerate(owner) if mine != index[row]]
            self.write(filling.index_select(0, rows), items - rest, [(row, self.runs[row]) for row in copies])

    def write_alike(
        self, items: Tensor, first: int, kinds: Sequence[int], closed: int, room: int, layers: int = 1
    ) -> None:
        """Makes room and writes, as `fit` and `write` do, rows some of which are the same: these share full slabs.

        Those are put in before what is a row's alone, which stays as room.

        Args:
            items: `[kinds, count, elements]`, each kind once.
            first: Where they begin, and a slab does. Nothing before it is written any more.
            kinds: Of every row.
            closed, room, layers: As for `fork`.

        Raises:
            MemoryError: If the memory cannot be had. Nothing has changed then.
        """
        begin, (full, _) = first // self.items_per_slab, self._split(0, closed)
        slabs = full - begin if len(items) < self.rows else 0
        count, nbytes = slabs * self.items_per_slab, len(items) * slabs * self._slab_bytes
        if room - count > self.capacity:
            self.fit(room - count, layers, nbytes)
        if slabs:
            self._allocate(nbytes, layers, partial(self._make_spare, nbytes))
            assert self._spare is not None
            (table, runs), self._spare = self._cut_up(self._spare, len(items)), None
            self.write(items[:, :count], 0, [(kind, [run]) for kind, run in enumerate(runs)])
            # What is held already is found throughout: in what was written just now, or where it was.
            table = table[self._on_device(kinds)]
            self.table, self.runs, self.shared = (
                torch.cat((self.table[:, :begin], table, self.table[:, begin:]), dim=1),
                [
                    [*self._cut(row, 0, begin), runs[kind], *self._cut(row, begin, self.table.shape[1])]
                    for row, kind in zip(self.runs, kinds, strict=True)
                ],
                full,
            )
        assert first + count >= self.shared * self.items_per_slab, "what is shared is not written"
        self.write(items[:, count:], first + count, list(zip(kinds, self.runs, strict=True)))

    def prepare_select(self, rows: int, closed: int, layers: int = 1) -> None:
        """Has all the memory that `select` of so many rows will need, or gives back what it had for others.

        Raises:
            MemoryError: If it cannot be had. Nothing has changed then.
        """
        full, _ = self._split(0, closed)
        nbytes = max(rows - self.rows, 0) * (self.table.shape[1] - full) * self._slab_bytes
        if self._spare is not None and self._spare.nbytes != nbytes:
            self._spare = None
        if nbytes and self._spare is None:
            self._allocate(nbytes, layers, partial(self._make_spare, nbytes))

    def _make_spare(self, nbytes: int) -> None:
        self._spare = pinned.allocate_behind(nbytes, self.device).result().tensor()

    def prepare_cut(self, items: int, closed: int, room: int = 0, layers: int = 1) -> None:
        """Has all the memory that `cut` will need.

        Raises:
            MemoryError: If it cannot be had. Nothing has changed then.
        """
        full, _ = self._split(items, closed)
        if full < self.shared:
            self.fit(max(room, items) + (self.shared - full) * self.items_per_slab, layers)

    def cut(self, items: int, closed: int, room: int = 0, layers: int = 1) -> bool:
        """Only the first `items` items are needed from here on. Whether the table moved.

        What is a row's alone, behind what it shares, moves up.

        Args:
            items, closed: As for `fork`.
            room: Items that there is room for at least, afterwards.
            layers: As for `fit`.

        Raises:
            MemoryError: If there is no room to copy the slab being filled. Nothing has changed then.
        """
        full, rest = self._split(items, closed)
        if full >= self.shared:
            return False
        self.prepare_cut(items, closed, room, layers)
        if rest:
            filling = self.read(items - rest, rest)
        slabs = self.table.shape[1]
        self.table = torch.cat((self.table[:, :full], self.table[:, self.shared :]), dim=1)
        self.runs = [self._cut(runs, 0, full) + self._cut(runs, self.shared, slabs) for runs in self.runs]
        self.shared = full
        if rest:
            self.write(filling, items - rest)
        return True

    def _split(self, items: int, closed: int) -> tuple[int, int]:
        """The slabs that nothing is written to any more, and the items behind them."""
        full = closed // self.items_per_slab
        return full, items - full * self.items_per_slab

    def _cut(self, runs: Sequence[Tensor], first: int, last: int) -> list[Tensor]:
        """Slabs `first` to `last` of a row."""
        per_slab = self.items_per_slab
        spans = self._spans(runs, first * per_slab, (last - first) * per_slab)
        return [run[there] for run, there, _ in spans]

    def _on_device(self, index: Sequence[int]) -> Tensor:
        return torch.tensor(index, dtype=torch.int64).to(self.device, non_blocking=True)

    def _forget_next(self) -> None:
        """Drops the chunk that is being prepared."""
        if self._next is not None:
            self._next.cancel()
        self._next, self._next_bytes = None, 0

    # ---- reading and writing -----------------------------------------------------------------------------------------

    @staticmethod
    def _spans(runs: Sequence[Tensor], first: int, count: int) -> Iterator[tuple[Tensor, slice, slice]]:
        """The runs of a row that hold items `first` to `first + count`, with the slice of each and of the request."""
        start = 0
        for run in runs:
            low, high = max(first, start), min(first + count, start + len(run))
            if low < high:
                yield run, slice(low - start, high - start), slice(low - first, high - first)
            start += len(run)

    def write(self, items: Tensor, first: int, to: Sequence[tuple[int, Sequence[Tensor]]] | None = None) -> None:
        """Copies `[rows, count, elements]` items to item `first` on, behind whatever the device does next.

        `to` says which of them to which runs, None each to its own row's.
        """
        if to is None:
            assert first >= self.shared * self.items_per_slab, "what is shared is not written"
            to = list(enumerate(self.runs))
        if self._stream is None:
            self._write(items, first, to)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            self._write(items, first, to)
            items.record_stream(self._stream)
            self._written = torch.cuda.Event()
            self._written.record(self._stream)
        HostStore._latest = self._written

    def _write(self, items: Tensor, first: int, to: Sequence[tuple[int, Sequence[Tensor]]]) -> None:
        # One copy a row: a strided host destination would take a staging buffer.
        for row, runs in to:
            for run, there, here in self._spans(runs, first, items.shape[1]):
                run[there].copy_(items[row, here], non_blocking=True)

    def read(self, first: int, count: int) -> Tensor:
        """Items `first` to `first + count` of every row, `[rows, count, elements]`, on the device."""
        self.settle()
        items = torch.empty(self.rows, count, self.elements, dtype=self.dtype, device=self.device)
        for row, runs in enumerate(self.runs):
            for run, there, here in self._spans(runs, first, count):
                items[row, here].copy_(run[there], non_blocking=True)
        return items

    def dump(self, items: int) -> Iterator[Tensor]:
        """Items `0` to `items` of one row after the other, in pieces, where they lie. Waits for the device."""
        if self._stream is not None:
            synchronize(self.device)
        for runs in self.runs:
            for run, there, _ in self._spans(runs, 0, items):
                yield run[there]

    def load(self, items: Tensor, closed: int, room: int, layers: int = 1) -> None:
        """Takes `[rows, count, elements]` items on the CPU for its own, having none.

        Where no device reads them they stay where they are, in a mapped file for one, but for those of the slab being
        filled.

        Args:
            items: The items. They must not be written from here on.
            closed, room, layers: As for `fork`.

        Raises:
            MemoryError: If the memory for what does not stay cannot be had.
        """
        count = items.shape[1]
        if self._stream is None:
            self.shared, _ = self._split(count, closed)
            slab = torch.arange(self.shared, device=self.device) * self._slab_bytes
            first = torch.tensor([row.data_ptr() for row in items], device=self.device)
            self.table, self.runs = first.unsqueeze(1) + slab, [self._cut([row], 0, self.shared) for row in items]
        self.fit(max(count, room), layers)
        kept = self.shared * self.items_per_slab
        self._write(items[:, kept:], kept, list(enumerate(self.runs)))

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
