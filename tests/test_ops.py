"""The ops of a decode step against an LRU written the slow way: contents, slots, victims, counters and log."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hisparse import ops
from hf_hisparse.memory import pinned
from tests.helpers import DEVICE


class SlowRow:
    """One row: an `OrderedDict` of slots, the one used longest ago first, and plain copies of both memories."""

    def __init__(self, items: int, slots: int, elements: int):
        self.order = OrderedDict((slot, None) for slot in range(slots))
        self.item_of = [None] * slots
        self.slot_of: dict[int, int] = {}
        self.came: dict[int, int] = {}
        """The step that brought an item."""
        self.coming: set[int] = set()
        """Slots that were appended to since the last step: they count as used in the coming one."""
        self.steps = self.hits = self.misses = 0
        self.log: dict[int, tuple[int, int]] = {}
        self.host = np.zeros((items, elements), np.int64)
        self.buffer = np.zeros((slots, elements), np.int64)
        self.used = [0] * slots

    def _touch(self, slots: set[int]) -> None:
        # Slots used in the same step are of the same age; among them the lowest goes first.
        for slot in sorted(slots):
            self.order.move_to_end(slot)

    def _put(self, item: int, slot: int) -> None:
        if self.item_of[slot] is not None:
            del self.slot_of[self.item_of[slot]]
        self.item_of[slot], self.slot_of[item], self.came[item] = item, slot, self.steps

    def entry(self, item: int) -> int:
        """What `item_slot` is to say."""
        return self.slot_of[item] + 32768 * (self.came[item] % 65536) if item in self.slot_of else -1

    def swap_in(self, selection: list[int]) -> list[int]:
        wanted = [item for item in selection if item >= 0]
        if not wanted:
            return [-1] * len(selection)
        self.steps += 1
        hit = {self.slot_of[item] for item in wanted if item in self.slot_of}
        missing = [item for item in wanted if item not in self.slot_of]
        victims = sorted([slot for slot in self.order if slot not in hit][: len(missing)])
        for item, slot in zip(missing, victims, strict=True):
            self._put(item, slot)
            self.buffer[slot] = self.host[item]
        self._touch(hit | set(victims) | self.coming)
        for slot in hit | set(victims) | self.coming:
            self.used[slot] = self.steps
        self.coming = set()
        self.hits += len(hit)
        self.misses += len(missing)
        self.log[self.steps] = (len(hit), len(missing))
        return [self.slot_of[item] if item >= 0 else -1 for item in selection]

    def append(self, position: int, token: list[np.ndarray], page_size: int) -> None:
        item, within = divmod(position, page_size)
        slot = self.slot_of.get(item)
        if within == 0 and slot is None:
            slot = next(iter(self.order))
            self._put(item, slot)
        offset = 0
        for part in token:
            begin = offset + within * len(part)
            self.host[item, begin : begin + len(part)] = part
            if slot is not None:
                self.buffer[slot, begin : begin + len(part)] = part
            offset += page_size * len(part)
        if slot is not None:
            self.coming.add(slot)
            self._touch(self.coming)
            self.used[slot] = self.steps + 1


class Both:
    """The ops and the slow rows, given the same and compared after everything that they are given."""

    def __init__(
        self,
        rows: int,
        items: int,
        slots: int,
        page_size: int = 1,
        widths: tuple[int, ...] = (3, 2),
        items_per_slab: int = 4,
        dtype: torch.dtype = torch.float32,
        log_steps: int = 8,
        seed: int = 0,
    ):
        self.rows, self.items, self.slots, self.page_size, self.widths = rows, items, slots, page_size, widths
        self.items_per_slab, self.dtype, self.log_steps = items_per_slab, dtype, log_steps
        self.rng = np.random.default_rng(seed)
        elements = page_size * sum(widths)
        slabs = -(-items // items_per_slab)
        # Slabs lie anywhere, in any order, and belong to whichever row.
        nbytes = rows * slabs * items_per_slab * elements * dtype.itemsize
        self.slab = pinned.allocate(nbytes, DEVICE).tensor().view(dtype).view(-1, items_per_slab, elements)
        self.where = self.rng.permutation(rows * slabs).reshape(rows, slabs)
        self.table = torch.tensor([[self.slab[i].data_ptr() for i in row] for row in self.where], device=DEVICE)
        self.slow = [SlowRow(items, slots, elements) for _ in range(rows)]
        for row, slow in enumerate(self.slow):
            slow.host[:] = self.numbers(items * elements).reshape(items, elements)
            for item in range(items):
                self.slab[self.where[row, item // items_per_slab]][item % items_per_slab] = self.tensor(slow.host[item])
        self.buffer = torch.zeros(rows, slots, elements, dtype=dtype, device=DEVICE)
        self.item_slot = torch.full((rows, items), -1, dtype=torch.int32, device=DEVICE)
        self.slot_item = torch.full((rows, slots), -1, dtype=torch.int32, device=DEVICE)
        self.last_used = torch.zeros(rows, slots, dtype=torch.int32, device=DEVICE)
        self.clock = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        self.totals = torch.zeros(rows, 2, dtype=torch.int64, device=DEVICE)
        self.log = torch.zeros(rows, log_steps, 2, dtype=torch.int32, device=DEVICE)
        self.progress = torch.zeros(rows, 2, dtype=torch.int32, device=DEVICE)

    def numbers(self, count: int) -> np.ndarray:
        """Whole numbers that every dtype holds exactly."""
        return self.rng.integers(1, 256, count)

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.dtype)

    def swap_in(self, selection: list[list[int]]) -> None:
        found = ops.swap_in(
            torch.tensor(selection, dtype=torch.int32, device=DEVICE),
            self.table,
            self.items_per_slab,
            self.buffer,
            self.item_slot,
            self.slot_item,
            self.last_used,
            self.clock,
            self.totals,
            self.log,
            self.progress,
        )
        assert found.dtype == torch.int32
        assert found.tolist() == [slow.swap_in(some) for slow, some in zip(self.slow, selection, strict=True)]
        self.compare()

    def append(self, positions: list[int]) -> None:
        """One new token a row, at its position; negative for none."""
        tokens = self.numbers(self.rows * sum(self.widths)).reshape(self.rows, -1)
        ops.append(
            self.tensor(tokens).to(DEVICE),
            torch.tensor(positions, device=DEVICE),
            self.page_size,
            list(self.widths),
            self.table,
            self.items_per_slab,
            self.buffer,
            self.item_slot,
            self.slot_item,
            self.last_used,
            self.clock,
        )
        for slow, position, token in zip(self.slow, positions, tokens, strict=True):
            if position >= 0:
                slow.append(position, np.split(token, np.cumsum(self.widths)[:-1]), self.page_size)
        self.compare()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that the ops change on the device."""
        return (self.buffer, self.item_slot, self.slot_item, self.last_used, self.clock, self.totals, self.log)

    def compare(self) -> None:
        # The copies wait for the device, and so for what it writes to host memory.
        buffer, item_slot, slot_item, last_used, clock, totals, log = (tensor.cpu() for tensor in self.tensors)
        for row, slow in enumerate(self.slow):
            assert slot_item[row].tolist() == [-1 if item is None else item for item in slow.item_of]
            assert item_slot[row].tolist() == [slow.entry(item) for item in range(self.items)]
            assert last_used[row].tolist() == slow.used
            assert clock[row] == slow.steps
            assert totals[row].tolist() == [slow.hits, slow.misses]
            for step in range(max(1, slow.steps - self.log_steps + 1), slow.steps + 1):
                assert tuple(log[row, step % self.log_steps].tolist()) == slow.log[step]
            assert torch.equal(buffer[row], self.tensor(slow.buffer))
            assert torch.equal(self.slab[self.where[row]].flatten(0, 1)[: self.items], self.tensor(slow.host))


def random_selection(rng: np.random.Generator, items: int, k: int, recent: list[int]) -> list[int]:
    """Up to `k` items, some of them chosen before, with -1 anywhere, and now and then nothing at all."""
    count = 0 if rng.random() < 0.1 else int(rng.integers(0, min(k, items) + 1))
    again = [item for item in recent if item >= 0 and rng.random() < 0.6][:count]
    fresh = [int(item) for item in rng.permutation(items) if item not in again][: count - len(again)]
    selection = again + fresh + [-1] * (k - count)
    return [selection[i] for i in rng.permutation(k)] if rng.random() < 0.5 else selection


@pytest.mark.parametrize(
    ("rows", "items", "slots", "k", "page_size", "widths", "dtype"),
    [
        (1, 40, 8, 8, 1, (3, 2), torch.float32),
        (3, 40, 16, 8, 1, (3, 2), torch.bfloat16),
        (4, 24, 7, 5, 4, (2, 2), torch.float32),
        (2, 12, 12, 3, 3, (1, 4), torch.float16),
        (2, 9, 1, 1, 2, (1, 1), torch.float32),
    ],
)
def test_random_steps(rows, items, slots, k, page_size, widths, dtype):
    """1500 steps of each shape: selections, and tokens appended where a history ends, or anywhere after it was cut."""
    both = Both(rows, items, slots, page_size, widths, dtype=dtype)
    rng = np.random.default_rng(1)
    recent = [[] for _ in range(rows)]
    length = [items * page_size // 2] * rows
    for _ in range(1500):
        if rng.random() < 0.5:
            recent = [random_selection(rng, items, k, row) for row in recent]
            both.swap_in(recent)
        else:
            positions = []
            for row in range(rows):
                if length[row] == items * page_size or rng.random() < 0.05:
                    length[row] = int(rng.integers(0, items * page_size))
                takes = rng.random() < 0.9
                positions.append(length[row] if takes else -1)
                length[row] += takes
            both.append(positions)


@st.composite
def scripts(draw) -> tuple[dict, list[tuple[str, list]]]:
    """A shape, and a short list of steps for it."""
    rows, slots, page_size = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    items, k = draw(st.integers(1, 12)), draw(st.integers(1, slots))
    ids = st.lists(st.integers(0, items - 1), max_size=k, unique=True)
    selection = ids.map(lambda some: some + [-1] * (k - len(some))).flatmap(st.permutations)
    position = st.integers(-1, items * page_size - 1)
    step = st.one_of(
        st.tuples(st.just("swap_in"), st.lists(selection, min_size=rows, max_size=rows)),
        st.tuples(st.just("append"), st.lists(position, min_size=rows, max_size=rows)),
    )
    shape = {"rows": rows, "items": items, "slots": slots, "page_size": page_size, "log_steps": draw(st.integers(1, 4))}
    return shape, draw(st.lists(step, min_size=1, max_size=20))


@settings(max_examples=120)
@given(scripts())
def test_any_steps(script):
    shape, steps = script
    both = Both(items_per_slab=2, **shape)
    for name, argument in steps:
        getattr(both, name)(argument)


def same(k: int, items: int) -> Iterator[list[int]]:
    while True:
        yield list(range(k))


def disjoint(k: int, items: int) -> Iterator[list[int]]:
    step = 0
    while True:
        yield [(step * k + i) % items for i in range(k)]
        step += 1


def sweeping(k: int, items: int) -> Iterator[list[int]]:
    step = 0
    while True:
        yield [(step + i) % items for i in range(k)]
        step += 1


def alternating(k: int, items: int) -> Iterator[list[int]]:
    """Asks for just what an LRU has dropped: one item more than there are slots, round and round."""
    step = 0
    while True:
        yield sorted((step * (k - 1) + i) % (k + 1) for i in range(k))
        step += 1


@pytest.mark.parametrize("slots_per_k", [1, 2, 4])
@pytest.mark.parametrize("pattern", [same, disjoint, sweeping, alternating])
def test_adversarial_selections(pattern, slots_per_k):
    k, items = 6, 30
    both = Both(2, items, slots_per_k * k)
    for _, selection in zip(range(40), pattern(k, items), strict=False):
        both.swap_in([selection, selection[::-1]])
        both.append([items - 1, -1])


def test_hits_of_known_selections():
    """Counts by hand, not by the slow model."""
    both = Both(1, 30, 4)
    both.swap_in([[0, 1, 2, 3]])
    assert both.totals.tolist() == [[0, 4]]
    both.swap_in([[3, 2, 1, 0]])
    assert both.totals.tolist() == [[4, 4]]
    both.swap_in([[4, 3, -1, -1]])
    # Items 0, 1 and 2 were last used in the same step: the lowest slot went.
    assert both.totals.tolist() == [[5, 5]]
    assert both.slot_item.tolist() == [[4, 1, 2, 3]]
    both.swap_in([[5, 6, -1, -1]])
    assert both.slot_item.tolist() == [[4, 5, 6, 3]]
    both.swap_in([[7, 3, -1, -1]])
    # Item 4 and item 3 are of the same age, but 3 is hit in this very step.
    assert both.slot_item.tolist() == [[7, 5, 6, 3]]
    assert both.log[0, 1:6].tolist() == [[0, 4], [4, 0], [1, 1], [0, 2], [1, 1]]


def test_every_selected_item_fits_a_buffer_of_k():
    both = Both(1, 20, 5)
    for first in (0, 5, 10, 3):
        both.swap_in([[first + i for i in range(5)]])
        assert sorted(both.slot_item[0].tolist()) == [first + i for i in range(5)]


def test_a_row_that_selects_nothing_is_not_touched():
    both = Both(2, 10, 4)
    both.swap_in([[0, 1], [0, 1]])
    held = [tensor[1].clone() for tensor in both.tensors]
    both.swap_in([[2, 3], [-1, -1]])
    assert all(torch.equal(a, b[1]) for a, b in zip(held, both.tensors, strict=True))


def test_append_of_a_page_that_is_not_resident_writes_to_the_host_alone():
    both = Both(1, 6, 2, page_size=4, widths=(2, 1))
    both.append([0])
    both.swap_in([[3, 4]])
    before = both.buffer.clone()
    both.append([1])
    assert torch.equal(both.buffer, before)
    both.swap_in([[0, -1]])
    assert both.slot_item.tolist() == [[0, 4]]


def test_an_appended_page_is_the_last_to_go():
    both = Both(1, 10, 3)
    both.swap_in([[0, 1, 2]])
    both.append([9])
    assert both.slot_item.tolist() == [[9, 1, 2]]
    both.swap_in([[5, 6, -1]])
    assert both.slot_item.tolist() == [[9, 5, 6]]
    both.swap_in([[9, -1, -1]])
    assert both.totals.tolist() == [[1, 5]]


def test_more_slots_than_an_entry_can_name_are_refused():
    both = Both(1, 4, 32769, widths=(1, 1))
    before = [tensor.clone() for tensor in both.tensors]
    for step in (lambda: both.swap_in([[0]]), lambda: both.append([0])):
        with pytest.raises(ValueError, match="`buffer` holds 32769 items a row; 32768 is the most"):
            step()
    assert all(torch.equal(*pair) for pair in zip(before, both.tensors, strict=True))
