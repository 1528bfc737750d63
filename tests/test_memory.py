"""Where the bytes are: the host store, and the hierarchical memory against the resident one."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_hisparse.layout import ItemLayout
from hf_hisparse.memory import HierarchicalMemory, ResidentMemory, host_store, pinned
from hf_hisparse.memory.host_store import HostStore
from hf_hisparse.ops.reference import host_elements


CPU = torch.device("cpu")


@pytest.fixture
def small_slabs(monkeypatch):
    """Slabs of a few items, so that short histories span many slabs and several chunks."""
    monkeypatch.setattr(host_store, "SLAB_BYTES", 64)


def at(store: HostStore, row: int, item: int) -> torch.Tensor:
    """An item, read from memory at the address that the table gives."""
    slab, within = divmod(item, store.items_per_slab)
    address = int(store.table[row, slab]) + within * store.item_bytes
    return host_elements(address, store.elements, store.dtype).clone()


# ---- host store ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slabs_never_move(small_slabs, dtype):
    store = HostStore(3, 5, dtype, CPU)
    written = torch.zeros(3, 0, 5, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for count in (1, 2, 7, 1, 30, 4, 100):
        before = store.table.clone()
        first = written.shape[1]
        store.reserve(first + count)
        assert torch.equal(store.table[:, : before.shape[1]], before)
        more = torch.randn(3, count, 5, generator=generator).to(dtype)
        store.write(more, first)
        written = torch.cat((written, more), dim=1)
        assert torch.equal(store.read(0, written.shape[1]), written)
    assert len(store.chunks) > 3
    for row in range(3):
        for item in range(0, written.shape[1], 7):
            assert torch.equal(at(store, row, item), written[row, item])


def test_slabs_do_not_overlap(small_slabs):
    store = HostStore(4, 3, torch.float32, CPU)
    for items in (1, 10, 11, 90):
        store.reserve(items)
    addresses = store.table.flatten().sort().values
    assert (addresses.diff() >= store.items_per_slab * store.item_bytes).all()
    assert store.capacity >= 90 and store.nbytes == store.table.numel() * store.items_per_slab * store.item_bytes


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=12), st.randoms())
def test_writes_and_reads_of_any_span(spans, random):
    """Spans written anywhere, over one another and across chunks, read back as from one tensor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_store, "SLAB_BYTES", 64)
        store = HostStore(2, 3, torch.float32, CPU)
        whole = torch.zeros(2, 70, 3)
        reserved = 0
        for first, count in spans:
            reserved = max(reserved, first + count)
            store.reserve(reserved)
            items = torch.rand(2, count, 3)
            store.write(items, first)
            whole[:, first : first + count] = items
            low = random.randrange(reserved)
            high = random.randrange(low, reserved) + 1
            assert torch.equal(store.read(low, high - low), whole[:, low:high])


@pytest.mark.parametrize("item_bytes", [4, 1152, 16384, 200000, 1 << 20])
def test_a_slab_is_a_power_of_two_of_items(item_bytes):
    store = HostStore(1, item_bytes // 4, torch.float32, CPU)
    assert store.items_per_slab.bit_count() == 1
    assert store.items_per_slab * item_bytes >= host_store.SLAB_BYTES
    assert store.items_per_slab == 1 or store.items_per_slab // 2 * item_bytes < host_store.SLAB_BYTES


def test_no_memory_changes_nothing(small_slabs, monkeypatch):
    store = HostStore(2, 3, torch.float32, CPU)
    store.reserve(4)
    items = torch.rand(2, 4, 3)
    store.write(items, 0)
    table, held = store.table, store.nbytes

    def no_memory(nbytes, device):
        raise MemoryError(f"no {nbytes} bytes")

    monkeypatch.setattr(pinned, "allocate", no_memory)
    with pytest.raises(MemoryError, match="held and intact"):
        store.reserve(1000)
    assert store.table is table and store.nbytes == held and torch.equal(store.read(0, 4), items)


def test_more_memory_than_there_is_is_a_memory_error():
    with pytest.raises(MemoryError, match="host memory"):
        pinned.allocate(1 << 62, CPU)


def test_memory_is_freed_with_its_store():
    store = HostStore(1, 16, torch.float32, CPU)
    store.reserve(1)
    chunk = weakref.ref(store.chunks[0].untyped_storage())
    view = store.chunks[0][0, :1]
    del store
    gc.collect()
    assert chunk() is not None and view.sum() == 0
    del view
    gc.collect()
    assert chunk() is None


# ---- hierarchical against resident -----------------------------------------------------------------------------------


class Twins:
    """A hierarchical and a resident memory that are given the same."""

    def __init__(self, rows: int, layout: ItemLayout, slots: int, dtype: torch.dtype = torch.float32, seed: int = 0):
        self.rows, self.layout, self.dtype = rows, layout, dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.hierarchical = HierarchicalMemory(rows, layout, dtype, CPU, slots)
        self.resident = ResidentMemory(rows, layout, dtype, CPU)
        self.tokens = 0

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def write(self, count: int) -> None:
        """Rewrites the history from the last item on, as a prefill of `count` more tokens does."""
        start = self.tokens // self.layout.page_size * self.layout.page_size
        kept = self.resident.read(self.tokens, start)
        parts = [torch.cat((old, self._random(self.rows, count, old.shape[2])), dim=1) for old in kept]
        self.tokens += count
        for memory in (self.hierarchical, self.resident):
            memory.reserve(self.tokens)
            memory.write(parts, start)

    def append(self) -> None:
        token = self._random(self.rows, sum(self.layout.widths))
        position = torch.full((self.rows,), self.tokens)
        self.tokens += 1
        for memory in (self.hierarchical, self.resident):
            memory.reserve(self.tokens)
            memory.append(token, position)

    def cut(self, tokens: int) -> None:
        """Forgets the newest tokens, as `crop` does: nothing is moved."""
        self.tokens -= tokens

    def fetch(self, selection: torch.Tensor) -> None:
        """Both give the same tokens for every selected item."""
        row = torch.arange(self.rows).unsqueeze(1)
        items = []
        for memory in (self.hierarchical, self.resident):
            buffer, slots = memory.fetch(selection)
            assert slots.dtype == torch.int32 and torch.equal(slots < 0, selection < 0)
            items.append(buffer[row, slots.clamp(min=0).long()])
        position = selection.unsqueeze(-1) * self.layout.page_size + torch.arange(self.layout.page_size)
        valid = ((selection >= 0).unsqueeze(-1) & (position < self.tokens)).unsqueeze(-1)
        for view in (self.layout.keys, self.layout.values):
            assert torch.equal(view(items[0]) * valid, view(items[1]) * valid)

    def read(self, start: int = 0) -> None:
        for a, b in zip(
            self.hierarchical.read(self.tokens, start), self.resident.read(self.tokens, start), strict=True
        ):
            assert a.shape[1] == self.tokens - start and torch.equal(a, b)


LAYOUTS = [ItemLayout.page_head(4, 3, 2), ItemLayout.page_head(1, 2, 2), ItemLayout.token(5, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["pages", "single tokens", "latent"])
def test_hierarchical_memory_equals_the_resident_one(small_slabs, layout, dtype):
    twins = Twins(3, layout, slots=6, dtype=dtype)
    generator = torch.Generator().manual_seed(1)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    twins.write(9)
    for _ in range(300):
        action = number(0, 10)
        if action == 0:
            twins.write(number(1, 12))
        elif action < 5:
            twins.append()
        elif action == 5 and twins.tokens > 20:
            twins.cut(number(1, 8))
        elif action == 6:
            twins.read(number(0, twins.layout.items(twins.tokens)) * layout.page_size)
        else:
            items = layout.items(twins.tokens)
            k = number(1, min(6, items) + 1)
            selection = torch.stack([torch.randperm(items, generator=generator)[:k] for _ in range(3)]).int()
            twins.fetch(selection.masked_fill(torch.rand(3, k, generator=generator) < 0.2, -1))
    twins.read()


def test_counts_and_log():
    memory = HierarchicalMemory(2, ItemLayout.token(3, 1), torch.float32, CPU, slots=4)
    memory.reserve(10)
    memory.write((torch.rand(2, 10, 3), torch.rand(2, 10, 1)), 0)
    assert memory.counts().tolist() == [0, 0] and memory.log().tolist() == []
    for selection in ([0, 1], [1, 2], [8, 9], [3, -1]):
        memory.fetch(torch.tensor([selection, selection], dtype=torch.int32))
    assert memory.log().tolist() == [[0, 4], [2, 2], [0, 4], [0, 2]]
    assert memory.counts().tolist() == [2, 12]


def test_the_log_keeps_the_latest_steps(monkeypatch):
    from hf_hisparse.memory import device_buffer

    monkeypatch.setattr(device_buffer, "LOG_STEPS", 3)
    memory = HierarchicalMemory(1, ItemLayout.token(3, 1), torch.float32, CPU, slots=4)
    memory.reserve(10)
    for count in (1, 2, 3, 4, 1):
        memory.fetch(torch.arange(count, dtype=torch.int32).unsqueeze(0))
    # Item by item: 0, then 1, then 2, then 3 are new; then 0 again.
    assert memory.log().tolist() == [[2, 1], [3, 1], [1, 0]]


def test_device_bytes_do_not_grow_with_the_history():
    """All but four bytes an item, the map from items to slots, and the table's eight bytes a slab."""
    layout = ItemLayout.page_head(4, 16, 16)
    memory = HierarchicalMemory(2, layout, torch.float32, CPU, slots=8)
    memory.reserve(1000)
    before, items = memory.device_bytes, memory.store.capacity
    memory.reserve(100000)
    grown = memory.store.capacity - items
    assert grown > 20000
    assert memory.device_bytes - before == 2 * (4 * grown + 8 * grown // memory.store.items_per_slab)
    assert memory.host_bytes == 2 * memory.store.capacity * layout.elements * 4
