"""Where the bytes are: the host store, and the hierarchical memory against the resident one."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import threading
import warnings
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_hisparse.capturing import capturing
from hf_hisparse.layout import ItemLayout
from hf_hisparse.memory import HierarchicalMemory, ResidentMemory, host_store, limits, numa, pinned
from hf_hisparse.memory.host_store import HostStore
from hf_hisparse.ops.reference import host_elements
from tests.helpers import DEVICE


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
    store = HostStore(3, 5, dtype, DEVICE)
    written = torch.zeros(3, 0, 5, dtype=dtype, device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    for count in (1, 2, 7, 1, 30, 4, 100):
        before = store.table.clone()
        first = written.shape[1]
        store.reserve(first + count)
        assert torch.equal(store.table[:, : before.shape[1]], before)
        more = torch.randn(3, count, 5, generator=generator).to(DEVICE, dtype)
        store.write(more, first)
        written = torch.cat((written, more), dim=1)
        assert torch.equal(store.read(0, written.shape[1]), written)
    assert len(store.runs[0]) > 3
    for row in range(3):
        for item in range(0, written.shape[1], 7):
            assert torch.equal(at(store, row, item), written[row, item].cpu())


def test_slabs_do_not_overlap(small_slabs):
    store = HostStore(4, 3, torch.float32, DEVICE)
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
        store = HostStore(2, 3, torch.float32, DEVICE)
        whole = torch.zeros(2, 70, 3, device=DEVICE)
        reserved = 0
        for first, count in spans:
            reserved = max(reserved, first + count)
            store.reserve(reserved)
            items = torch.rand(2, count, 3, device=DEVICE)
            store.write(items, first)
            whole[:, first : first + count] = items
            low = random.randrange(reserved)
            high = random.randrange(low, reserved) + 1
            assert torch.equal(store.read(low, high - low), whole[:, low:high])


@pytest.mark.parametrize("item_bytes", [4, 1152, 16384, 200000, 1 << 20])
def test_a_slab_is_a_power_of_two_of_items(item_bytes):
    store = HostStore(1, item_bytes // 4, torch.float32, DEVICE)
    assert store.items_per_slab.bit_count() == 1
    assert store.items_per_slab * item_bytes >= host_store.SLAB_BYTES
    assert store.items_per_slab == 1 or store.items_per_slab // 2 * item_bytes < host_store.SLAB_BYTES


def test_no_memory_changes_nothing(small_slabs, monkeypatch):
    store = HostStore(2, 3, torch.float32, DEVICE)
    store.reserve(4)
    items = torch.rand(2, 4, 3, device=DEVICE)
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
    store = HostStore(1, 16, torch.float32, DEVICE)
    store.reserve(1)
    chunk = weakref.ref(store.runs[0][0].untyped_storage())
    view = store.runs[0][0][:1]
    del store
    gc.collect()
    assert chunk() is not None and view.sum() == 0
    del view
    gc.collect()
    assert chunk() is None


# ---- growth in the background ----------------------------------------------------------------------------------------


class Allocations:
    """Stands in for `pinned.allocate`: keeps account, waits, and fails at will.

    Args:
        outcomes: Whether each allocation succeeds, in turn; those after succeed.
    """

    def __init__(self, outcomes: list[bool] | None = None):
        self.outcomes = list(outcomes or [])
        self.real = pinned.allocate
        self.regions: weakref.WeakSet[pinned.Region] = weakref.WeakSet()
        self.sizes: list[int] = []
        self.begun, self.go = threading.Event(), threading.Event()
        self.go.set()

    def __call__(self, nbytes: int, device: torch.device) -> pinned.Region:
        self.begun.set()
        assert self.go.wait(60)
        if self.outcomes and not self.outcomes.pop(0):
            raise MemoryError(f"no {nbytes} bytes")
        region = self.real(nbytes, device)
        self.regions.add(region)
        self.sizes.append(nbytes)
        return region

    def hold(self) -> None:
        """Lets allocations begin, and not end until `go` is set."""
        self.go.clear()
        self.begun.clear()

    @property
    def live(self) -> int:
        """Bytes that are mapped now, once the worker is through with what it was given."""
        pinned._executor.submit(int).result()
        return sum(len(region) for region in self.regions)


@pytest.fixture
def allocations(monkeypatch, small_slabs):
    made = Allocations()
    monkeypatch.setattr(pinned, "allocate", made)
    yield made
    made.go.set()


def nearly_full(allocations: Allocations, device: torch.device = CPU) -> HostStore:
    """A store of some chunks, the next of which has begun and is held."""
    store = HostStore(2, 3, torch.float32, device)
    store.reserve(80)
    allocations.hold()
    store.reserve(79)
    assert allocations.begun.wait(60)
    return store


def test_a_chunk_that_comes_in_time_is_not_waited_for(allocations):
    store = HostStore(2, 3, torch.float32, CPU)
    store.reserve(75)
    assert store.capacity == 80 and allocations.live == store.nbytes == 2 * 80 * 12
    store.reserve(78)
    assert store.nbytes == 2 * 80 * 12
    store.reserve(79)
    # A quarter of ten slabs, of eight items.
    assert allocations.live == store.nbytes == 2 * 96 * 12 and store.capacity == 80
    allocations.hold()
    store.reserve(81)
    assert store.capacity == 96 and len(allocations.sizes) == 2


def test_a_step_does_not_wait_for_a_chunk_that_it_does_not_need(allocations):
    store = nearly_full(allocations)
    items = torch.rand(2, 80, 3)
    store.write(items, 0)
    for _ in range(3):
        store.reserve(80)
    assert torch.equal(store.read(0, 80), items) and store.capacity == 80 and len(allocations.sizes) == 1


def test_a_step_waits_for_a_chunk_that_it_needs(allocations):
    store = nearly_full(allocations)
    step = threading.Thread(target=store.reserve, args=(81,))
    step.start()
    step.join(0.05)
    assert step.is_alive() and store.capacity == 80
    allocations.go.set()
    step.join()
    assert store.capacity == 96 and len(allocations.sizes) == 2


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_wait_loses_nothing(allocations, monkeypatch, interrupt):
    store = nearly_full(allocations)

    def interrupted(timeout=None):
        raise interrupt

    with monkeypatch.context() as patch:
        patch.setattr(store._next, "exception", interrupted)
        with pytest.raises(interrupt):
            store.reserve(81)
    allocations.go.set()
    store.reserve(81)
    assert store.capacity == 96 and allocations.live == store.nbytes


@pytest.mark.parametrize("when", ["queued", "begun", "failing", "done"])
def test_a_store_dropped_while_its_chunk_is_prepared(allocations, when):
    assert allocations.live == 0
    store = nearly_full(allocations)
    other = None
    if when == "queued":
        other, store = store, HostStore(2, 3, torch.float32, CPU)
        store._prepare(5)
    elif when == "failing":
        allocations.outcomes = [False]
    elif when == "done":
        allocations.go.set()
        store._next.exception()
    gone = weakref.ref(store)
    del store
    assert gone() is None
    allocations.go.set()
    if when == "queued":
        assert allocations.live == other.nbytes and len(allocations.sizes) == 2
        del other
    assert allocations.live == 0


def test_failing_in_the_background_shows_when_the_room_is_needed(allocations):
    store = HostStore(2, 3, torch.float32, CPU)
    store.reserve(80)
    items = torch.rand(2, 80, 3)
    store.write(items, 0)
    allocations.outcomes = [False, False]
    for _ in range(3):
        store.reserve(80)
        assert allocations.live == store.nbytes == 2 * 80 * 12
    assert allocations.outcomes == [False]
    table = store.table
    with pytest.raises(MemoryError, match=r"no 192 bytes; .* held and intact"):
        store.reserve(81)
    assert store.table is table and allocations.live == store.nbytes and torch.equal(store.read(0, 80), items)
    store.reserve(81)
    assert store.capacity == 88 and torch.equal(store.read(0, 80), items)


@given(
    st.lists(st.tuples(st.integers(-20, 60), st.booleans()), min_size=1, max_size=30),
    st.lists(st.booleans(), max_size=20),
    st.sampled_from([64, 400, 1 << 26]),
)
def test_growth_follows_its_rule(steps, outcomes, most):
    """Against a model in numbers of slabs, whatever fails, and whether a chunk was there in time or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_store, "SLAB_BYTES", 64)
        patch.setattr(host_store, "GROWTH_BYTES", most)
        allocations = Allocations(outcomes)
        patch.setattr(pinned, "allocate", allocations)
        store = HostStore(2, 3, torch.float32, CPU)
        per_slab, slab_bytes = 8, 2 * 8 * 12
        chunks: list[int] = []
        ahead: tuple[int, bool] | None = None
        rest = list(outcomes)
        whole = torch.zeros(2, 0, 3)
        items = 0
        for more, settled in steps:
            items = max(items + more, 0)
            fails = False
            capacity = sum(chunks) * per_slab
            if items > capacity:
                if ahead is not None and ahead[1]:
                    chunks.append(ahead[0])
                ahead = None
                needed = -(-items // per_slab) - sum(chunks)
                if needed > 0:
                    fails = not (rest.pop(0) if rest else True)
                    chunks += [] if fails else [needed]
            elif ahead is None and capacity - items < 2:
                ahead = max(1, min(sum(chunks) // 4, most // slab_bytes)), rest.pop(0) if rest else True
            try:
                store.reserve(items)
            except MemoryError as error:
                assert fails and "held and intact" in str(error)
                items = whole.shape[1]
            else:
                assert not fails
            assert [len(run) // per_slab for run in store.runs[0]] == chunks
            if items > whole.shape[1]:
                new = torch.rand(2, items - whole.shape[1], 3)
                store.write(new, whole.shape[1])
                whole = torch.cat((whole, new), dim=1)
            items = min(items, whole.shape[1])
            assert torch.equal(store.read(0, whole.shape[1]), whole)
            if settled:
                held = sum(chunks) + (ahead[0] if ahead is not None and ahead[1] else 0)
                assert allocations.live == store.nbytes == held * slab_bytes
        del store
        assert allocations.live == 0


def test_memory_held_stays_near_memory_used(allocations):
    """As a history grows a token at a time, whenever its chunks come."""
    store = HostStore(2, 3, torch.float32, CPU)
    for items in range(1, 2000):
        store.reserve(items)
        assert store.nbytes <= 2 * 12 * (items * 1.25 + 2 * store.items_per_slab)
    assert len(store.runs[0]) < 30


def test_no_thread_until_it_is_needed_and_then_one():
    pinned._new_executor()
    assert not pinned._executor._threads
    stores = [HostStore(1, 4, torch.float32, CPU) for _ in range(3)]
    for store in stores:
        store.reserve(1)
        store.reserve(store.capacity)
    assert len(pinned._executor._threads) == 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_allocates_too():
    HostStore(1, 4, torch.float32, CPU).reserve(1)
    child = os.fork()
    if child == 0:
        store = HostStore(1, 4, torch.float32, CPU)
        store.reserve(1)
        os._exit(0 if store.capacity else 1)
    assert os.waitpid(child, 0)[1] == 0


# ---- what there is, and where ----------------------------------------------------------------------------------------


def make_files(root, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = "MemTotal:  900 kB\nMemFree:  100 kB\nMemAvailable:  500 kB\n"
GROUP = "sys/fs/cgroup/outer/inner/memory."


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, None),
        ({"proc/meminfo": "MemTotal: 900 kB\n"}, None),
        ({"proc/meminfo": MEMINFO}, 512000),
        # Version 1 only.
        ({"proc/meminfo": MEMINFO, "proc/self/cgroup": "4:memory:/a\n"}, 512000),
        ({GROUP + "max": "max\n", GROUP + "current": "5\n"}, 512000),
        ({GROUP + "max": "300000\n", GROUP + "current": "100000\n"}, 201000),
        ({GROUP + "max": "100000\n", GROUP + "current": "200000\n"}, 0),
        (
            {
                GROUP + "max": "max\n",
                "sys/fs/cgroup/outer/memory.max": "9000\n",
                "sys/fs/cgroup/outer/memory.current": "8000\n",
                "sys/fs/cgroup/outer/memory.stat": "active_file 1\ninactive_file 2\n",
            },
            1003,
        ),
        # The group that a container sees as the root.
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "7000\n",
                "sys/fs/cgroup/memory.current": "0\n",
                "sys/fs/cgroup/memory.stat": "active_file 0\ninactive_file 0\n",
            },
            7000,
        ),
    ],
)
def test_the_memory_that_is_left(tmp_path, files, left):
    if any(name.startswith("sys") for name in files):
        common = {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "3:cpu:/x\n0::/outer/inner\n",
            GROUP + "stat": "anon 70\nactive_file 400\ninactive_file 600\n",
        }
        files = common | files
    make_files(tmp_path, files)
    assert limits.available(tmp_path) == left


def test_more_than_is_left_is_refused_before_it_is_had(monkeypatch, allocations):
    monkeypatch.setattr(limits, "available", lambda: 5 << 20)
    with pytest.raises(MemoryError, match="6 MiB of host memory .* 5 MiB are available; use a smaller batch"):
        pinned.allocate(6 << 20, CPU)
    assert len(pinned.allocate(5 << 20, CPU)) == 5 << 20
    store = HostStore(1, 1 << 18, torch.float32, CPU)
    store.reserve(1)
    with pytest.raises(MemoryError, match="6 MiB of host memory for the KV history of 3 layers .* 1 are held and int"):
        store.reserve(3, layers=3)
    assert store.nbytes == 1 << 20
    store.reserve(3)


PCI = "0000:AB:00.0"
NUMA_NODE = f"bus/pci/devices/{PCI.lower()}/numa_node"


@pytest.mark.parametrize(
    ("nodes", "numa_node", "expected"),
    [
        (2, "1\n", 1),
        (2, "0\n", 0),
        (2, "-1\n", None),
        (2, None, None),
        (2, "?\n", None),
        (1, "0\n", None),
        (0, "1", None),
    ],
)
def test_the_node_of_a_pci_device(tmp_path, nodes, numa_node, expected):
    make_files(tmp_path, {f"devices/system/node/node{node}/cpulist": "" for node in range(nodes)})
    make_files(tmp_path, {"devices/system/node/online": "", "devices/system/node/has_cpu": ""})
    if numa_node is not None:
        make_files(tmp_path, {NUMA_NODE: numa_node})
    assert numa.node_of(PCI, tmp_path) == expected


def test_pages_of_a_bound_mapping_come_from_its_node():
    if not os.path.exists("/proc/self/numa_maps"):
        pytest.skip("this kernel has no NUMA")
    region = pinned.Region(-1, 1 << 16)
    memory = region.tensor()
    numa.bind(memory.data_ptr(), len(region), 0)
    memory.fill_(1)
    with open("/proc/self/numa_maps") as maps:
        line = next(line for line in maps if line.startswith(f"{memory.data_ptr():x} "))
    assert line.split()[1].startswith("prefer") and line.split()[1].endswith(":0") and " N0=16" in line


@pytest.mark.parametrize("machine", [None, "riscv"])
def test_a_node_that_memory_cannot_be_bound_to_warns_once(monkeypatch, machine):
    numa._warn.cache_clear()
    if machine is not None:
        monkeypatch.setattr("platform.machine", lambda: machine)
    region = pinned.Region(-1, 1 << 16)
    memory = region.tensor()
    with pytest.warns(UserWarning, match="not bound to the GPU's NUMA node 900: mbind"):
        numa.bind(memory.data_ptr(), len(region), 900)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        numa.bind(memory.data_ptr(), len(region), 900)
    assert memory.fill_(1).sum() == len(region)
    numa._warn.cache_clear()


# ---- registration ----------------------------------------------------------------------------------------------------


class FakeCuda:
    """Stands in for what `pinned` calls of CUDA, and keeps a list of the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls: list[tuple] = []
        self.status = 0
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.calls.append(("synchronize",)))
        monkeypatch.setattr(numa, "gpu_node", lambda index: index)
        monkeypatch.setattr(numa, "bind", lambda *args: self.calls.append(("bind", *args)))
        monkeypatch.setattr(pinned, "_touch", lambda memory: self.calls.append(("touch", memory.data_ptr())))

    def cudaHostRegister(self, *args) -> int:
        self.calls.append(("register", *args))
        return self.status

    def cudaHostUnregister(self, *args) -> int:
        self.calls.append(("unregister", *args))
        return 0


@pytest.mark.parametrize("used", [True, False])
def test_memory_is_bound_then_touched_then_registered(monkeypatch, used):
    cuda = FakeCuda(monkeypatch)
    region = pinned.allocate(1 << 16, torch.device("cuda", 3))
    address = torch.frombuffer(region, dtype=torch.uint8).data_ptr()
    begun = [("bind", address, 1 << 16, 3), ("touch", address), ("register", address, 1 << 16, 0)]
    assert cuda.calls == begun
    if used:
        tensor = region.tensor()
        del region
        view = tensor[5:]
        del tensor
        assert cuda.calls == begun
        del view
    else:
        del region
    assert cuda.calls == begun + [("synchronize",)] * used + [("unregister", address)]


def test_memory_that_was_read_is_waited_for_whatever_comes_between(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    wait, interrupts = torch.cuda.synchronize, [KeyboardInterrupt]

    def interrupted(device: torch.device) -> None:
        if interrupts:
            raise interrupts.pop()
        wait(device)

    monkeypatch.setattr(torch.cuda, "synchronize", interrupted)
    memory = pinned.allocate(1 << 16, torch.device("cuda", 3)).tensor()
    del memory
    assert not interrupts and [name for name, *_ in cuda.calls[-2:]] == ["synchronize", "unregister"]


def test_memory_that_was_read_stays_while_a_graph_is_captured(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    held = [pinned.allocate(1 << 16, torch.device("cuda", 3)).tensor()]
    other = threading.Thread(target=held.clear)
    with capturing:
        other.start()
        other.join(0.2)
        assert "synchronize" not in [name for name, *_ in cuda.calls]
    other.join()
    assert [name for name, *_ in cuda.calls[-2:]] == ["synchronize", "unregister"]


def test_memory_that_cannot_be_registered_is_not_held(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    cuda.status = 2
    with pytest.raises(
        MemoryError, match=r"1 MiB of host memory .* could not be pinned \(CUDA error 2\); use a smal"
    ) as error:
        pinned.allocate(1 << 20, torch.device("cuda", 3))
    regions = [value for frame in error.traceback for value in frame.frame.f_locals.values()]
    regions = [value for value in regions if isinstance(value, pinned.Region)]
    assert regions and all(region.closed for region in regions)
    assert [call[0] for call in cuda.calls] == ["bind", "touch", "register"]


def test_touching_has_every_page():
    """Also the last, of which little was asked for."""
    nbytes = 10 * mmap.PAGESIZE + 1
    memory = pinned.allocate(nbytes, CPU).tensor()
    present = ctypes.create_string_buffer(11)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(nbytes), present) == 0
    assert all(byte & 1 for byte in present.raw)


# ---- on a GPU --------------------------------------------------------------------------------------------------------


class Registrations:
    """Stands in for `torch.cuda.cudart()` and keeps account of what is registered; fails at will."""

    def __init__(self):
        self.real, self.held, self.threads, self.fail = torch.cuda.cudart(), {}, set(), False

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.threads.add(threading.current_thread())
        status = int(self.real.cudaHostRegister(address, 0 if self.fail else nbytes, flags))
        if status == 0:
            self.held[address] = nbytes
        return status

    def cudaHostUnregister(self, address: int) -> int:
        status = int(self.real.cudaHostUnregister(address))
        assert status == 0
        del self.held[address]
        return status


@pytest.fixture
def registrations(monkeypatch, allocations):
    made = Registrations()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


@pytest.mark.gpu
def test_the_driver_names_a_device_as_the_system_does():
    torch.cuda.init()
    devices = os.listdir("/sys/bus/pci/devices")
    assert all(numa.pci_of(index).lower() in devices for index in range(torch.cuda.device_count()))


@pytest.mark.gpu
def test_memory_is_registered_in_the_background_while_decoding(registrations, allocations):
    device = torch.device("cuda", 0)
    layout = ItemLayout.page_head(4, 8, 8)
    memories = [
        HierarchicalMemory(3, layout, torch.float16, device, 16),
        ResidentMemory(3, layout, torch.float16, device),
    ]
    generator = torch.Generator().manual_seed(0)
    for position in range(2000):
        token = torch.randn(3, 16, generator=generator).half().to(device)
        for memory in memories:
            memory.reserve(position + 1)
            memory.append(token, torch.full((3,), position, device=device))
        items = layout.items(position + 1)
        selection = torch.stack([torch.randperm(items, generator=generator)[:8] for _ in range(3)]).int().to(device)
        row = torch.arange(3, device=device).unsqueeze(1)
        fetched = [buffer[row, slots.long()] for buffer, slots in (memory.fetch(selection) for memory in memories)]
        # The page being filled may hold what it held before, past its tokens.
        whole = (selection < (position + 1) // 4).unsqueeze(-1)
        assert torch.equal(fetched[0] * whole, fetched[1] * whole)
    for a, b in zip(memories[0].read(2000), memories[1].read(2000), strict=True):
        assert torch.equal(a, b)
    store = memories[0].store
    assert len(store.runs[0]) > 5 and all(run.is_pinned() for runs in store.runs for run in runs)
    assert threading.current_thread() not in registrations.threads
    assert allocations.live == sum(registrations.held.values()) == store.nbytes
    del store, memory, memories
    assert allocations.live == 0 and not registrations.held


@pytest.mark.gpu
@pytest.mark.parametrize("when", ["begun", "done"])
def test_a_registered_chunk_of_a_dropped_store_is_freed(registrations, allocations, when):
    store = nearly_full(allocations, torch.device("cuda", 0))
    if when == "done":
        allocations.go.set()
        store._next.exception()
        assert len(registrations.held) == 2
    del store
    allocations.go.set()
    assert allocations.live == 0 and not registrations.held


@pytest.mark.gpu
def test_failing_to_register_breaks_nothing(registrations, allocations):
    device = torch.device("cuda", 0)
    store = HostStore(2, 3, torch.float32, device)
    store.reserve(80)
    items = torch.rand(2, 80, 3, device=device)
    store.write(items, 0)
    registrations.fail = True
    store.reserve(80)
    for _ in range(2):
        with pytest.raises(MemoryError, match=r"could not be pinned \(CUDA error .* held and intact"):
            store.reserve(81)
        assert torch.equal(store.read(0, 80) + 1, items + 1)
    assert allocations.live == sum(registrations.held.values()) == store.nbytes
    registrations.fail = False
    store.reserve(81)
    assert store.capacity == 88 and torch.equal(store.read(0, 80), items)


@pytest.mark.gpu
def test_memory_is_registered_and_freed_while_a_graph_is_captured(registrations, allocations):
    device = torch.device("cuda", 0)
    store = HostStore(2, 3, torch.float32, device)
    store.reserve(80)
    allocations.hold()
    dropped = pinned.allocate_behind(1 << 20, device)
    store.reserve(79)
    values, graph = torch.zeros(1 << 10, device=device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        values += 1
        del dropped
        allocations.go.set()
        store._next.exception()
        values *= 2
    graph.replay()
    graph.replay()
    assert values.eq(6).all()
    store.reserve(81)
    items = torch.rand(2, 96, 3, device=device)
    store.write(items, 0)
    assert store.capacity == 96 and torch.equal(store.read(0, 96), items)
    assert 1 << 20 in allocations.sizes
    assert allocations.live == sum(registrations.held.values()) == store.nbytes


# ---- hierarchical against resident -----------------------------------------------------------------------------------


class Twins:
    """A hierarchical and a resident memory that are given the same."""

    def __init__(self, rows: int, layout: ItemLayout, slots: int, dtype: torch.dtype = torch.float32, seed: int = 0):
        self.rows, self.layout, self.dtype = rows, layout, dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.hierarchical = HierarchicalMemory(rows, layout, dtype, DEVICE, slots)
        self.resident = ResidentMemory(rows, layout, dtype, DEVICE)
        self.tokens = 0

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(DEVICE, self.dtype)

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
        position = torch.full((self.rows,), self.tokens, device=DEVICE)
        self.tokens += 1
        for memory in (self.hierarchical, self.resident):
            memory.reserve(self.tokens)
            memory.append(token, position)

    def cut(self, tokens: int) -> None:
        """Forgets the newest tokens, as `crop` does: nothing is moved."""
        self.tokens -= tokens
        for memory in (self.hierarchical, self.resident):
            assert not memory.cut(self.tokens)

    def fetch(self, selection: torch.Tensor) -> None:
        """Both give the same tokens for every selected item."""
        row = torch.arange(self.rows, device=DEVICE).unsqueeze(1)
        items = []
        for memory in (self.hierarchical, self.resident):
            buffer, slots = memory.fetch(selection)
            assert slots.dtype == torch.int32 and torch.equal(slots < 0, selection < 0)
            items.append(buffer[row, slots.clamp(min=0).long()])
        within = torch.arange(self.layout.page_size, device=DEVICE)
        position = selection.unsqueeze(-1) * self.layout.page_size + within
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
            selection = selection.masked_fill(torch.rand(3, k, generator=generator) < 0.2, -1)
            twins.fetch(selection.to(DEVICE))
    twins.read()


def test_counts_and_log():
    memory = HierarchicalMemory(2, ItemLayout.token(3, 1), torch.float32, DEVICE, slots=4)
    memory.reserve(10)
    memory.write((torch.rand(2, 10, 3, device=DEVICE), torch.rand(2, 10, 1, device=DEVICE)), 0)
    assert memory.counts().tolist() == [0, 0] and memory.log().tolist() == []
    for selection in ([0, 1], [1, 2], [8, 9], [3, -1]):
        memory.fetch(torch.tensor([selection, selection], dtype=torch.int32, device=DEVICE))
    assert memory.log().tolist() == [[0, 4], [2, 2], [0, 4], [0, 2]]
    assert memory.counts().tolist() == [2, 12]


def test_the_log_keeps_the_latest_steps(monkeypatch):
    from hf_hisparse.memory import device_buffer

    monkeypatch.setattr(device_buffer, "LOG_STEPS", 3)
    memory = HierarchicalMemory(1, ItemLayout.token(3, 1), torch.float32, DEVICE, slots=4)
    memory.reserve(10)
    for count in (1, 2, 3, 4, 1):
        memory.fetch(torch.arange(count, dtype=torch.int32, device=DEVICE).unsqueeze(0))
    # Item by item: 0, then 1, then 2, then 3 are new; then 0 again.
    assert memory.log().tolist() == [[2, 1], [3, 1], [1, 0]]


def test_device_bytes_do_not_grow_with_the_history():
    """All but four bytes an item, the map from items to slots, and the table's eight bytes a slab."""
    layout = ItemLayout.page_head(4, 16, 16)
    memory = HierarchicalMemory(2, layout, torch.float32, DEVICE, slots=8)
    memory.reserve(1000)
    before, items = memory.device_bytes, memory.store.capacity
    memory.reserve(100000)
    grown = memory.store.capacity - items
    assert grown > 20000
    assert memory.device_bytes - before == 2 * (4 * grown + 8 * grown // memory.store.items_per_slab)
    assert memory.host_bytes == 2 * memory.store.capacity * layout.elements * 4
