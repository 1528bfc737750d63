"""The CUDA kernels against the PyTorch ops, bit for bit; and what surrounds the kernels, on any machine."""

from __future__ import annotations

import ast
import io
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from hf_hisparse import config, ops
from hf_hisparse.memory import pinned
from hf_hisparse.ops import cuda, heuristics
from hf_hisparse.ops.heuristics import SwapInShape
from hf_hisparse.ops.reference import MAX_SLOTS, ROTATION_SIGNS


gpu = pytest.mark.gpu


@dataclass(frozen=True)
class Case:
    """Sizes of a working set and its history."""

    rows: int
    k: int
    slots: int
    items: int
    page_size: int
    widths: tuple[int, ...]
    dtype: torch.dtype
    items_per_slab: int = 16
    misalign: int = 0
    """Bytes by which the history is off its page."""

    @property
    def elements(self) -> int:
        return self.page_size * sum(self.widths)

    @property
    def item_bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def __str__(self) -> str:
        off = f"-off{self.misalign}" if self.misalign else ""
        return f"{self.item_bytes}B-rows{self.rows}-k{self.k}-slots{self.slots}-items{self.items}{off}"


BF16, BYTE = torch.bfloat16, torch.uint8
LATENT, HALVES, PAGE = (512, 64), (128, 128), (32, (128, 128), BF16)
CASES = [
    # What models ask for: latent rows, pages of a KV head, a few tokens of one, quantised rows.
    Case(2, 256, 512, 4000, 1, LATENT, BF16, 256),
    Case(1, 2048, 4096, 20000, 1, LATENT, BF16, 256),
    Case(8, 64, 128, 600, *PAGE),
    Case(3, 256, 512, 2000, 4, HALVES, BF16, 128),
    Case(2, 512, 1024, 4000, 1, HALVES, BF16, 512),
    Case(2, 200, 500, 3000, 1, (656,), BYTE, 512),
    # Sizes and addresses that only narrower words divide.
    Case(2, 40, 77, 500, 1, (3,), BYTE),
    Case(1, 100, 130, 900, 1, (37,), BYTE, 3),
    Case(2, 64, 100, 600, 1, (9,), BF16, 7),
    Case(2, 33, 64, 400, 1, (3,), torch.float32, 1),
    Case(2, 64, 96, 400, 1, (4, 4), BF16),
    Case(2, 64, 96, 400, 2, (8, 8), torch.float32, misalign=8),
    Case(2, 64, 96, 400, 4, (16, 16), BF16, misalign=4),
    Case(2, 64, 96, 400, 1, (48,), BYTE, misalign=1),
    Case(2, 20, 30, 100, 3, (1, 2, 5, 4), torch.float16),
    # Limits: the whole buffer selected, the largest selection, buffer and history, one item, one slot.
    Case(2, 96, 96, 1000, 1, (32,), BF16),
    Case(1, 4096, 4096, 20000, 1, (8,), BF16),
    Case(1, 4096, 32768, 1 << 20, 1, (4,), BF16, 1 << 15),
    Case(2, 4095, 5001, 30000, 1, (8,), BF16),
    Case(3, 1, 1, 40, 1, (16,), BF16),
    Case(2, 1, 7, 40, 2, (16, 16), BF16),
    # Many rows.
    Case(200, 32, 64, 300, 1, (64,), BF16),
]


class State:
    """The arguments of the ops on a device. Equal seeds make equal histories, each in memory of its own."""

    def __init__(self, case: Case, device: str, seed: int = 0):
        self.case, self.device = case, device
        slabs = -(-case.items // case.items_per_slab)
        slab_bytes = case.items_per_slab * case.item_bytes
        self.history = pinned.allocate(case.rows * slabs * slab_bytes + case.misalign, torch.device(device)).tensor()
        generator = torch.Generator().manual_seed(seed)
        self.history.copy_(torch.randint(256, self.history.shape, dtype=BYTE, generator=generator))
        # Slabs lie in any order.
        order = torch.randperm(case.rows * slabs, generator=generator)
        addresses = self.history.data_ptr() + case.misalign + order * slab_bytes
        self.slab_table = addresses.view(case.rows, slabs).to(device)
        self.buffer = torch.zeros(case.rows, case.slots, case.elements, dtype=case.dtype, device=device)
        self.item_slot = self._int(case.rows, slabs * case.items_per_slab, fill=-1)
        self.slot_item = self._int(case.rows, case.slots, fill=-1)
        self.last_used = self._int(case.rows, case.slots)
        self.clock = self._int(case.rows)
        self.totals = torch.zeros(case.rows, 2, dtype=torch.int64, device=device)
        self.log = self._int(case.rows, 7, 2)
        self.progress = self._int(case.rows, 2)

    def _int(self, *shape: int, fill: int = 0) -> Tensor:
        return torch.full(shape, fill, dtype=torch.int32, device=self.device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that the ops change on the device."""
        return (
            self.buffer,
            self.item_slot,
            self.slot_item,
            self.last_used,
            self.clock,
            self.totals,
            self.log,
            self.progress,
        )

    def swap_in_arguments(self, selection: Tensor) -> tuple:
        return (selection.to(self.device), self.slab_table, self.case.items_per_slab, *self.tensors)

    def append_arguments(self, token: Tensor, position: Tensor) -> tuple:
        case = self.case
        return (
            token.to(self.device),
            position.to(self.device),
            case.page_size,
            list(case.widths),
            self.slab_table,
            case.items_per_slab,
            *self.tensors[:5],
        )

    def snapshot(self) -> list[Tensor]:
        """Copies on the CPU, of the history's bytes too."""
        return [bits(tensor).cpu().clone() for tensor in (*self.tensors, self.history)]


def bits(tensor: Tensor) -> Tensor:
    """The same memory as bytes: NaNs then equal themselves."""
    return tensor.view(BYTE) if tensor.numel() else tensor


class Steps:
    """Random and adversarial steps for a case: selections, and tokens to append.

    Args:
        case: The sizes.
        seed: Equal seeds give equal steps.
    """

    def __init__(self, case: Case, seed: int = 0):
        self.case, self.random = case, random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.selection = self._fresh()
        self.position = torch.zeros(case.rows, dtype=torch.int64)

    def _order(self, count: int) -> Tensor:
        """`count` different items, in any order."""
        if 4 * count < self.case.items:
            some = torch.randint(self.case.items, (3 * count,), generator=self.generator).tolist()
            different = list(dict.fromkeys(some))
            if len(different) >= count:
                return torch.tensor(different[:count])
        return torch.randperm(self.case.items, generator=self.generator)[:count]

    def _fresh(self) -> Tensor:
        return torch.stack([self._order(self.case.k) for _ in range(self.case.rows)]).to(torch.int32)

    def _drift(self) -> Tensor:
        """The last selection with some items exchanged, in another order."""
        case = self.case
        selection = self.selection.clone()
        for row in selection:
            kept = self.random.randint(0, case.k)
            stay = row[torch.randperm(case.k, generator=self.generator)[:kept]]
            known = set(stay.tolist())
            new = [item for item in self._order(min(case.items, 2 * case.k)).tolist() if item not in known]
            row[:] = torch.cat((stay, torch.tensor(new[: case.k - kept], dtype=torch.int32)))
        return selection[:, torch.randperm(case.k, generator=self.generator)].contiguous()

    def next_selection(self) -> Tensor:
        """`[rows, k]` int32."""
        kind = self.random.choice(
            ["fresh", "again", "drift", "drift", "drift", "padded", "one", "empty row", "nothing"]
        )
        if kind == "fresh":
            self.selection = self._fresh()
        elif kind != "again":
            self.selection = self._drift()
        selection = self.selection.clone()
        if kind == "padded":
            selection[torch.rand(selection.shape, generator=self.generator) < 0.3] = -1
        elif kind == "one":
            selection[:, : self.case.k // 2] = -1
            selection[:, self.case.k // 2 + 1 :] = -1
        elif kind == "empty row":
            selection[self.random.randrange(self.case.rows)] = -1
        elif kind == "nothing":
            selection.fill_(-1)
        return selection

    def next_token(self) -> tuple[Tensor, Tensor]:
        """A token `[rows, sum(widths)]` and its positions: mostly the next one, at times any, at times none."""
        case = self.case
        end = case.items * case.page_size
        if self.random.random() < 0.2:
            self.position = torch.randint(end, (case.rows,), generator=self.generator)
        position = self.position.clone()
        if self.random.random() < 0.2:
            position[self.random.randrange(case.rows)] = -1
        self.position = (self.position + 1) % end
        raw = torch.randint(
            256, (case.rows, sum(case.widths) * case.dtype.itemsize), dtype=BYTE, generator=self.generator
        )
        return raw.view(case.dtype), position


def run(case: Case, steps: int, states: list[State], swap_in: Callable[..., Tensor], seed: int = 0) -> None:
    """Takes the same steps on a CPU state and on another, the latter with `swap_in`, and compares all after each."""
    reference, tested = states
    source = Steps(case, seed)
    for step in range(steps):
        if source.random.random() < 0.6:
            selection = source.next_selection()
            expected = ops.swap_in(*reference.swap_in_arguments(selection))
            found = swap_in(*tested.swap_in_arguments(selection))
            assert torch.equal(found.cpu(), expected), f"slots of step {step}"
        else:
            token, position = source.next_token()
            ops.append(*reference.append_arguments(token, position))
            ops.append(*tested.append_arguments(token, position))
        if tested.device != "cpu":
            torch.cuda.synchronize()
        compare(reference, tested, f"step {step}")
    assert torch.equal(reference.history, tested.history)


def compare(reference: State, tested: State, when: str) -> None:
    names = ("buffer", "item_slot", "slot_item", "last_used", "clock", "totals", "log", "progress")
    for name, one, other in zip(names, reference.tensors, tested.tensors, strict=True):
        assert torch.equal(bits(one), bits(other).cpu()), f"{name} after {when}"


# ---- the kernels -----------------------------------------------------------------------------------------------------


@gpu
def test_kernels_are_available():
    assert cuda.unavailable(0) is None


@gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_reference(case):
    large = case.slots * case.item_bytes * case.rows > 1 << 20 or case.items > 1 << 16
    run(case, 60 if large else 250, [State(case, "cpu"), State(case, "cuda")], ops.swap_in)


@gpu
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[6], CASES[11], CASES[-1]], ids=str)
@pytest.mark.parametrize("movers", [32, 64, 128])
@pytest.mark.parametrize("copiers", [0, 1, 8, 200])
@pytest.mark.parametrize("threads", [128, 1024])
def test_any_launch_shape(case, movers, copiers, threads):
    if case.k > heuristics.ITEMS_PER_THREAD * threads:
        pytest.skip("more items than such a block holds")
    if movers * (heuristics.pieces(case.item_bytes)[1] + 8) > cuda._SHARED_BYTES["swap_in"]:
        pytest.skip("more shared memory than a block has")
    shape = SwapInShape(threads, movers, copiers)

    def swap_in(*arguments: Tensor) -> Tensor:
        return cuda.swap_in(*arguments, shape=shape)

    run(case, 40, [State(case, "cpu"), State(case, "cuda")], swap_in, seed=copiers)


@gpu
@pytest.mark.parametrize("copiers", [0, 8])
def test_many_launches_at_once(copiers):
    """Swap-ins of more blocks than the device runs, on several streams: none waits for one that cannot run."""
    case = Case(24, 512, 1024, 8000, 1, (512, 64), BF16, 256)
    states = [State(case, "cuda", seed) for seed in range(4)]
    expected = [State(case, "cuda", seed) for seed in range(4)]
    streams = [torch.cuda.Stream() for _ in states]
    selections = [[source.next_selection().cuda() for _ in range(20)] for source in map(Steps, [case] * 4, range(4))]
    torch.cuda.synchronize()
    for step in range(20):
        for state, stream, own in zip(states, streams, selections, strict=True):
            with torch.cuda.stream(stream):
                cuda.swap_in(*state.swap_in_arguments(own[step]), shape=SwapInShape(1024, 64, copiers))
    torch.cuda.synchronize()
    for state, other, own in zip(expected, states, selections, strict=True):
        for selection in own:
            ops.swap_in(*state.swap_in_arguments(selection))
        for one, two in zip(state.tensors, other.tensors, strict=True):
            assert torch.equal(bits(one), bits(two))


@gpu
@pytest.mark.parametrize("copiers", [0, 8])
def test_an_entry_as_old_as_its_step_can_tell(copiers):
    """65536 steps after an item came, its entry looks like this step's."""
    case = Case(2, 64, 100, 600, 1, (64,), BF16)
    reference, tested = State(case, "cpu"), State(case, "cuda")
    selection = Steps(case).next_selection()
    for _ in range(2):
        ops.swap_in(*reference.swap_in_arguments(selection))
        cuda.swap_in(*tested.swap_in_arguments(selection), shape=SwapInShape(256, 64, copiers))
        compare(reference, tested, "a step")
        for state in (reference, tested):
            state.clock += (1 << 16) - 1


@gpu
def test_old_slots():
    """Ages spread over many steps, so that the threshold takes several rounds to find."""
    case = Case(2, 64, 512, 4000, 1, (16,), BF16)
    states = [State(case, "cpu"), State(case, "cuda")]
    generator = torch.Generator().manual_seed(0)
    for spread in (10, 300, 70_000, 1 << 24, (1 << 31) - 10):
        used = torch.randint(spread, (case.rows, case.slots), dtype=torch.int32, generator=generator)
        for state in states:
            state.last_used.copy_(used)
            state.clock.fill_(spread)
        run(case, 5, states, ops.swap_in, seed=spread)


@gpu
@pytest.mark.parametrize("case", [CASES[1], CASES[2]], ids=str)
def test_same_from_run_to_run(case):
    runs = []
    for _ in range(2):
        state, source, found = State(case, "cuda"), Steps(case), []
        for _ in range(30):
            found.append(ops.swap_in(*state.swap_in_arguments(source.next_selection())))
            ops.append(*state.append_arguments(*source.next_token()))
        runs.append([*state.snapshot(), *(slots.cpu() for slots in found)])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@gpu
@pytest.mark.parametrize("case", [CASES[1], CASES[2]], ids=str)
def test_graph_replay_equals_eager(case):
    eager, captured = State(case, "cuda"), State(case, "cuda")
    source = Steps(case)
    selection, (token, position) = source.next_selection().cuda(), (part.cuda() for part in source.next_token())
    warm = State(case, "cuda")
    ops.swap_in(*warm.swap_in_arguments(selection))  # Compiled and loaded before the capture.
    ops.append(*warm.append_arguments(token, position))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ops.swap_in(*captured.swap_in_arguments(selection))
        ops.append(*captured.append_arguments(token, position))
    for step in range(30):
        selection.copy_(source.next_selection())
        for static, part in zip((token, position), source.next_token(), strict=True):
            static.copy_(part)
        graph.replay()
        assert torch.equal(found, ops.swap_in(*eager.swap_in_arguments(selection)))
        ops.append(*eager.append_arguments(token, position))
        torch.cuda.synchronize()
        for one, other in zip((*eager.tensors, eager.history), (*captured.tensors, captured.history), strict=True):
            assert torch.equal(bits(one), bits(other)), f"step {step}"


@gpu
@pytest.mark.parametrize("case", [CASES[1], CASES[2]], ids=str)
def test_a_graph_of_many_steps(case):
    """Kernels of one stream, each of which takes its place before the one before it has ended."""
    steps = 40
    expected, state, warm, source = State(case, "cpu"), State(case, "cuda"), State(case, "cuda"), Steps(case)
    given = [(source.next_selection(), *source.next_token()) for _ in range(steps)]
    on_device = [tuple(tensor.cuda() for tensor in step) for step in given]
    selection, token, position = (tensor.clone() for tensor in on_device[0])
    ops.swap_in(*warm.swap_in_arguments(selection))
    ops.append(*warm.append_arguments(token, position))
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for step in on_device:
            for static, tensor in zip((selection, token, position), step, strict=True):
                static.copy_(tensor)
            found.append(ops.swap_in(*state.swap_in_arguments(selection)))
            ops.append(*state.append_arguments(token, position))
    graph.replay()
    torch.cuda.synchronize()
    for (selection, token, position), slots in zip(given, found, strict=True):
        assert torch.equal(ops.swap_in(*expected.swap_in_arguments(selection)), slots.cpu())
        ops.append(*expected.append_arguments(token, position))
    compare(expected, state, f"{steps} steps")


@gpu
def test_on_another_stream_and_without_synchronisation():
    case = CASES[0]
    expected, state, warm, source = State(case, "cpu"), State(case, "cuda"), State(case, "cuda"), Steps(case)
    selections = [source.next_selection() for _ in range(20)]
    on_device = [selection.cuda() for selection in selections]
    ops.swap_in(*warm.swap_in_arguments(on_device[0]))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            for selection in on_device:
                ops.swap_in(*state.swap_in_arguments(selection))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    for selection in selections:
        ops.swap_in(*expected.swap_in_arguments(selection))
    compare(expected, state, "20 steps")


@gpu
def test_without_copy_does_all_but_the_copy():
    case = CASES[0]
    full, bare, source = State(case, "cuda"), State(case, "cuda"), Steps(case)
    for _ in range(20):
        selection = source.next_selection()
        expected = ops.swap_in(*full.swap_in_arguments(selection))
        assert torch.equal(cuda.swap_in_without_copy(*bare.swap_in_arguments(selection)), expected)
    for one, other in zip(full.tensors[1:], bare.tensors[1:], strict=True):
        assert torch.equal(one, other)
    assert full.buffer.view(BYTE).any() and not bare.buffer.view(BYTE).any()


# ---- the ops ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_opcheck(device):
    case = Case(2, 8, 12, 60, 2, (3, 2), torch.float32)
    state, source = State(case, device), Steps(case)
    for _ in range(3):
        opcheck(ops.swap_in, state.swap_in_arguments(source.next_selection()))
        opcheck(ops.append, state.append_arguments(*source.next_token()))
        ops.swap_in(*state.swap_in_arguments(source.selection))


@gpu
def test_without_a_compiler_pytorch_runs(monkeypatch):
    monkeypatch.setattr(cuda, "unavailable", lambda index: "a test says so")
    cuda._warn.cache_clear()
    case = CASES[10]
    with pytest.warns(RuntimeWarning, match=r"hf_hisparse\[cuda\].*a test says so") as caught:
        run(case, 20, [State(case, "cpu"), State(case, "cuda")], ops.swap_in)
    assert len(caught) == 1


@gpu
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {"selection": torch.zeros(2, 8, dtype=torch.int64)}, r"`selection`.*int32.*int64"),
        (lambda state: {"selection": torch.zeros(2, 13, dtype=torch.int32)}, r"`selection`.*\[2, 13\].*12"),
        (lambda state: {"selection": torch.zeros(8, 2, dtype=torch.int32).T}, r"`selection`.*strides"),
        (lambda state: {"last_used": state.last_used[:, :5]}, r"`last_used`.*\[2, 12\].*\[2, 5\]"),
        (lambda state: {"clock": state.clock.cpu()}, r"`clock`.*cuda.*cpu"),
        (lambda state: {"totals": state.totals.int()}, r"`totals`.*int64"),
        (lambda state: {"slab_table": state.slab_table[:1]}, r"`slab_table`"),
    ],
)
def test_preconditions(change, message):
    state = State(Case(2, 8, 12, 60, 1, (8,), BF16), "cuda")
    names = "selection slab_table items_per_slab buffer item_slot slot_item last_used clock totals log progress".split()
    selection = torch.zeros(2, 8, dtype=torch.int32)
    arguments = dict(zip(names, state.swap_in_arguments(selection), strict=True))
    changed = change(state)
    if "selection" in changed:
        changed["selection"] = changed["selection"].cuda()
    before = state.snapshot()
    with pytest.raises(ValueError, match=message):
        ops.swap_in(**(arguments | changed))
    assert all(torch.equal(one, other) for one, other in zip(before, state.snapshot(), strict=True))


# ---- what surrounds the kernels --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("multiprocessors", [20, 132, 188])
def test_launch_shapes(bulk, multiprocessors):
    for rows in (1, 3, 8, 64, 1000):
        for k in (1, 64, 1000, 2048, cuda.MAX_K):
            for slots in (k, 2 * k, MAX_SLOTS):
                for item_bytes in (1, 656, 1152, 2048, 16384):
                    shape = heuristics.swap_in_shape(rows, k, slots, item_bytes, multiprocessors, bulk)
                    assert k <= heuristics.ITEMS_PER_THREAD * shape.threads
                    assert shape.threads in (32, 64, 128, 256, 512, 1024)
                    assert shape.movers % 32 == 0 and shape.movers <= shape.threads
                    count, piece_bytes = heuristics.pieces(item_bytes)
                    assert piece_bytes % 16 == 0 and (count - 1) * piece_bytes < item_bytes <= count * piece_bytes
                    assert shape.movers * (piece_bytes + 8) <= cuda._SHARED_BYTES["swap_in"] or not bulk
                    assert shape.copiers or rows < multiprocessors * (1024 // shape.threads)


def test_limits_are_one():
    assert config.MAX_ITEMS == cuda.MAX_K and config.MAX_SLOTS == MAX_SLOTS
    assert cuda._SHARED_BYTES["swap_in"] >= 8 * cuda.MAX_K + MAX_SLOTS


@pytest.mark.parametrize("arch", ["sm_89", "sm_120"])
@pytest.mark.parametrize("kernel", [kernel for kernel in cuda.KERNELS if kernel[0] in cuda._SHARED_BYTES], ids=str)
def test_a_block_fits_the_shared_memory_of_any_device(kernel, arch):
    """These architectures have the least, with clusters and without: 99 KiB for all that a block has."""
    pytest.importorskip("cuda.core", reason="needs `pip install hf_hisparse[cuda]`")
    name, macros = kernel
    log = io.StringIO()
    cuda.compile_source((cuda.source_directory() / f"{name}.cu").read_text(), name, arch, macros, log)
    declared = re.search(r"(\d+) bytes smem", log.getvalue())
    assert declared is not None
    assert int(declared[1]) + cuda._SHARED_BYTES[name] <= 99 << 10


@pytest.mark.parametrize("name", sorted({name for name, _ in cuda.KERNELS}))
def test_every_kernel_waits_for_the_one_before(name):
    """Before it reads or writes: a kernel that did not would be wrong once in a while."""
    source = (cuda.source_directory() / f"{name}.cu").read_text()
    [(parameters, body)] = re.findall(r'extern "C".*?\((?!kT|1024|256|32)(.*?)\n\) \{\n(.*?)\n\}', source, re.DOTALL)
    before, *after = body.split("    await_previous();\n")
    assert len(after) == 1
    for pointer in re.findall(r"\*\s*(?:__restrict__ )?(\w+)", parameters):
        assert not re.search(rf"\b{pointer}\[|\*{pointer}\b|\({pointer}\b", before)


@pytest.mark.parametrize("name", ["ops/triton.py", "backends/triton.py"])
def test_every_triton_kernel_waits_for_the_one_before(name):
    tree = ast.parse((Path(cuda.__file__).parents[1] / name).read_text())
    kernels = [node for node in tree.body if isinstance(node, ast.FunctionDef) and "triton.jit" in decorators(node)]
    assert kernels and all(ast.unparse(kernel.body[0]) == "await_previous(DEPENDENT)" for kernel in kernels)
    launches = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)]
    assert len(launches) == len(kernels) and all("**dependent(" in ast.unparse(launch) for launch in launches)


def decorators(node: ast.FunctionDef) -> str:
    return " ".join(map(ast.unparse, node.decorator_list))


def test_sources_share_their_constants():
    def source(name: str) -> str:
        return (cuda.source_directory() / name).read_text()

    signs = re.search(r"kSigns\[.*?= \{(.*?)\};", source("rotate.cuh"), re.DOTALL)
    assert signs is not None
    words = [int(word, 16) for word in re.findall(r"0x\w{8}", signs[1])]
    assert words == [word for row in ROTATION_SIGNS for word in row]
    assert f"kCentres = {heuristics.RABITQ_CENTRES};" in source("score_rabitq.cu")
    assert f"kBlocks = {heuristics.MAX_CLUSTER};" in source("top_k.cu")


def test_what_kernels_cannot_take_is_refused_before_a_launch(monkeypatch):
    monkeypatch.setattr(cuda, "_falls_back", lambda *args: False)
    scores, lengths = torch.rand(1, 8), torch.ones(1, dtype=torch.int64)
    for selected in (scores, cuda.Weighed(scores.unsqueeze(1), torch.rand(1, 1, 1, 2), 8)):
        with pytest.raises(ValueError, match=r"top_k: 4 of `scores` of shape \[1, 8\] are more than 2\^30"):
            cuda._top_k(selected, 4, lengths, 1 << 27, 0, 0)
    state = torch.zeros(1, 8, 2, dtype=torch.uint8), torch.zeros(1, 8, dtype=torch.float16), torch.zeros(1, 1, 16)
    sums = torch.zeros(1, 16, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="encode_rabitq: `block` must be a power of two, not 48"):
        cuda.encode_rabitq(torch.zeros(1, 16), lengths, *state, *sums, 48)
    key, boxes = torch.zeros(1, 16), (torch.zeros(1, 8, 16), torch.zeros(1, 8, 16))
    with pytest.raises(ValueError, match="encode_quest: `page_size` must be at least 1, not 0"):
        cuda.encode_quest(key, lengths, *boxes, 0)
    with pytest.raises(ValueError, match=r"encode_quest: `high` must be contiguous .* of shape \[1, 8, 16\]"):
        cuda.encode_quest(key, lengths, boxes[0], torch.zeros(1, 7, 16), 4)


def test_append_threads():
    for slots in (1, 100, 4096, MAX_SLOTS):
        assert heuristics.append_threads(slots) in (32, 64, 128, 256, 512, 1024)


def test_compiles_and_caches(tmp_path, monkeypatch):
    pytest.importorskip("cuda.core", reason="needs `pip install hf_hisparse[cuda]`")
    monkeypatch.setenv("HF_HISPARSE_CACHE", str(tmp_path))
    monkeypatch.setattr(cuda, "_versions", lambda: (13, 0))
    compiled = []
    compile_source = cuda.compile_source
    monkeypatch.setattr(cuda, "compile_source", lambda *args: compiled.append(args) or compile_source(*args))
    source = (cuda.source_directory() / "append.cu").read_text()
    code = cuda._cached(source, "append", "sm_90", ())
    assert code.startswith(b"\x7fELF")
    assert cuda._cached(source, "append", "sm_90", ()) == code
    assert len(compiled) == 1
    for other in ((source + "\n", "sm_90", ()), (source, "sm_80", ()), (source, "sm_90", ("SOME_MACRO",))):
        cuda._cached(other[0], "append", *other[1:])
    assert len(compiled) == 4
    assert len(list(tmp_path.iterdir())) == 4 and all(path.suffix == ".cubin" for path in tmp_path.iterdir())
    monkeypatch.setenv("HF_HISPARSE_CACHE", "/dev/null/nowhere")
    assert cuda._cached(source, "append", "sm_90", ()) == code
