"""The ops on a CUDA device: compiles the kernels of `csrc/` when they are first used, and launches them.

NVRTC compiles them, through `cuda-core` (`pip install hf_hisparse[cuda]`), in a fraction of a second, and the result is
kept on disk. Nothing else is needed: no CUDA toolkit, no host compiler. Where they cannot be compiled the ops run as
PyTorch, on the same device, and a warning says why.

`python -m hf_hisparse.ops.cuda --arch sm_80 sm_90` compiles every kernel, on any machine, and reports its resources.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import io
import math
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_hisparse.ops import reference
from hf_hisparse.ops.heuristics import (
    HELD_SCORES,
    ITEMS_PER_THREAD,
    MASS_THREADS,
    MAX_THREADS,
    RABITQ_WARPS,
    SwapInShape,
    append_threads,
    direct_blocks,
    mass_blocks,
    pieces,
    rabitq_blocks,
    swap_in_shape,
    top_k_blocks,
    top_k_chunks,
    top_k_shared_bytes,
)


KERNELS = (
    ("swap_in", ()),
    ("swap_in", ("WITHOUT_COPY",)),
    ("append", ()),
    ("top_k", ()),
    ("top_k", ("MASS",)),
    ("score_quest", ()),
    ("score_rabitq", ("BYTES=16",)),
    ("score_rabitq", ("BYTES=32",)),
    ("score_rabitq", ("BYTES=10",)),
    ("softmax_mass", ()),
    ("encode_quest", ()),
    ("encode_rabitq", ("BYTES=16",)),
    ("encode_rabitq", ("BYTES=32",)),
)
"""Every kernel: its file and function, and the macros that it is compiled with. BYTES is that of any width."""
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
"""What the kernels are tested to compile for. They need compute capability 8.0."""

MAX_K = ITEMS_PER_THREAD * MAX_THREADS
MAX_PARTS = 4
_SHARED_BYTES = {"swap_in": 96 << 10, "top_k": 4 * HELD_SCORES + (17 << 9)}
"""The most dynamic shared memory of kernels that use much; every device from compute capability 8.0 on has it, beside
what they declare: 99 KiB a block. That of top-k is for keys, and for what completes them."""


# ---- compilation -----------------------------------------------------------------------------------------------------


def source_directory() -> Path:
    """Where the CUDA sources lie: inside an installed package, beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for directory in (package / "csrc", package.parent / "csrc"):
        if (directory / "swap_in.cu").is_file():
            return directory
    raise FileNotFoundError(f"the CUDA sources of hf_hisparse are neither in {package} nor beside it; install it again")


def cache_directory() -> Path:
    """Where compiled kernels are kept: `$HF_HISPARSE_CACHE`, or `hf_hisparse` in the user's cache directory."""
    if override := os.environ.get("HF_HISPARSE_CACHE"):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_hisparse"


def _cuda_core() -> Any:
    """The `cuda.core` module; under its earlier name in releases before 1.0."""
    try:
        from cuda import core

        if not hasattr(core, "Program"):
            from cuda.core import experimental as core
    except ImportError as error:
        raise ImportError(f"cuda-core is not installed ({error})") from error
    return core


def _options(arch: str, macros: Sequence[str]) -> dict[str, Any]:
    return {
        "arch": arch,
        "std": "c++17",
        "define_macro": list(macros) or None,
        "device_as_default_execution_space": True,
    }


def compile_source(
    source: str, name: str, arch: str, macros: Sequence[str] = (), log: io.StringIO | None = None
) -> bytes:
    """Compiles CUDA C++ that may include the headers of `csrc/`, and returns the machine code.

    Args:
        source: The program.
        name: What the compiler's messages call it.
        arch: As in `sm_90`.
        macros: Macros to define.
        log: Receives the compiler's messages, with each kernel's resources.
    """
    core = _cuda_core()
    options = core.ProgramOptions(
        name=name,
        include_path=str(source_directory()),
        ptxas_options=None if log is None else "-v",
        **_options(arch, macros),
    )
    return core.Program(source, "c++", options).compile("cubin", logs=log).code


def _versions() -> tuple[Any, ...]:
    """Of the compiler and the driver."""
    from cuda.bindings import driver, nvrtc

    return nvrtc.nvrtcVersion()[1:], driver.cuDriverGetVersion()[1:]


def _cached(source: str, name: str, arch: str, macros: Sequence[str]) -> bytes:
    """`compile_source`, kept on disk. Processes may do this at once: a file appears whole or not at all."""
    digest = hashlib.sha256(repr((_options(arch, macros), _versions())).encode())
    for text in (source, *(path.read_text() for path in sorted(source_directory().glob("*.cuh")))):
        digest.update(hashlib.sha256(text.encode()).digest())
    path = cache_directory() / f"{name}-{arch}-{digest.hexdigest()[:32]}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        pass
    code = compile_source(source, name, arch, macros)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    except OSError:
        pass  # A cache that cannot be written costs a compilation a process.
    return code


def compile_all(archs: Sequence[str] = ARCHITECTURES) -> None:
    """Compiles every kernel for every architecture, without the cache, and prints a line for each. Needs no GPU."""
    for name, macros in KERNELS:
        source = (source_directory() / f"{name}.cu").read_text()
        for arch in archs:
            log = io.StringIO()
            code = compile_source(source, name, arch, macros, log)
            used = re.search(r"Used (\d+) registers", log.getvalue())
            spilt = re.search(r"(\d+) bytes spill stores", log.getvalue())
            print(
                f"{' '.join((name, *macros)):24} {arch:7} {len(code):6} bytes, "
                f"{used[1] if used else '?':>3} registers, {spilt[1] if spilt else '?'} bytes spilt"
            )


# ---- launching -------------------------------------------------------------------------------------------------------


class Streams(threading.local):
    """PyTorch's streams as `cuda.core` takes them, for every thread: before its first launch one has no context."""

    def __init__(self) -> None:
        self.wrapped: dict[int, Any] = {}


class Kernel:
    """A kernel loaded on one device, all of whose parameters are 64 bits wide.

    Args:
        source: Its program.
        name: Its name.
        index: The device, which must be the current one.
        macros: Macros to define.
    """

    def __init__(self, source: str, name: str, index: int, macros: Sequence[str] = ()):
        major, minor = torch.cuda.get_device_capability(index)
        if major < 8:
            raise RuntimeError(f"the kernels need compute capability 8.0 and device {index} has {major}.{minor}")
        self._core = _cuda_core()
        self.index = index
        code = self._core.ObjectCode.from_cubin(_cached(source, name, f"sm_{major}{minor}", macros))
        self._kernel = code.get_kernel(name)
        # `csrc/dependent_launch.cuh`. Releases of `cuda-core` that cannot ask for it launch all the same.
        self._dependent = major >= 9 and hasattr(self._core.LaunchConfig, "programmatic_stream_serialization")
        self._streams = Streams()
        self._shapes: dict[tuple[int, int, int, int], Any] = {}

    def allow_shared(self, nbytes: int) -> None:
        """Lets launches use up to `nbytes` of dynamic shared memory."""
        from cuda.bindings import driver

        handle = getattr(self._kernel, "handle", None) or self._kernel._handle
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(attribute, nbytes, handle, driver.CUdevice(self.index))
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{nbytes} bytes of shared memory cannot be had ({status})")

    def __call__(self, blocks: int, threads: int, shared_bytes: int, *arguments: int | float, cluster: int = 1) -> None:
        """Launches so many blocks, or clusters of blocks, on PyTorch's current stream."""
        stream = torch.cuda.current_stream(self.index)
        streams = self._streams.wrapped
        launch_stream = streams.get(stream.cuda_stream)
        if launch_stream is None:
            launch_stream = streams[stream.cuda_stream] = self._wrap(stream)
        shape = (blocks, threads, shared_bytes, cluster)
        config = self._shapes.get(shape)
        if config is None:
            more: dict[str, Any] = {"cluster": cluster} if cluster > 1 else {}
            if self._dependent:
                more["programmatic_stream_serialization"] = True
            config = self._core.LaunchConfig(grid=blocks, block=threads, shmem_size=shared_bytes, **more)
            self._shapes[shape] = config
        self._core.launch(launch_stream, config, self._kernel, *arguments)

    def _wrap(self, stream: torch.cuda.Stream) -> Any:
        class Borrowed:
            def __cuda_stream__(self) -> tuple[int, int]:
                return 0, stream.cuda_stream

        device = self._core.Device(self.index)
        device.set_current()
        return device.create_stream(Borrowed())


def _kernel(name: str, index: int, macros: tuple[str, ...] = ()) -> Kernel:
    return _loaded(name, index, macros)


@functools.cache
def _loaded(name: str, index: int, macros: tuple[str, ...]) -> Kernel:
    with torch.cuda.device(index):
        kernel = Kernel((source_directory() / f"{name}.cu").read_text(), name, index, macros)
        if name in _SHARED_BYTES:
            kernel.allow_shared(_SHARED_BYTES[name])
    return kernel


@functools.cache
def unavailable(index: int) -> str | None:
    """Why the kernels cannot run on a device, None where they can. The first call compiles and loads them."""
    try:
        # Of every file the first variant: the others are compiled when they are wanted.
        for name, macros in dict(reversed(KERNELS)).items():
            _kernel(name, index, macros)
    except Exception as error:  # Whatever it is, there is another way to run.
        return f"{type(error).__name__}: {error}"
    return None


@functools.cache
def _warn(reason: str, remedy: str) -> None:
    warnings.warn(
        "the CUDA kernels of hf_hisparse cannot be used; its PyTorch ops, which are far slower and wait for the host, "
        f"run instead. {remedy}The reason: {reason}",
        RuntimeWarning,
        stacklevel=2,
    )


def _falls_back(device: torch.device, reason: str | None = None) -> bool:
    """Whether the op runs as PyTorch, for that reason or because there are no kernels, after a warning that says so."""
    lacking = unavailable(device.index)
    if lacking is not None:
        _warn(lacking, "`pip install hf_hisparse[cuda]` installs what the kernels need. ")
    elif reason is not None:
        _warn(reason, "")
    return lacking is not None or reason is not None


@functools.cache
def _device(index: int) -> tuple[int, bool]:
    """Multiprocessors of a device, and whether it has thread-block clusters and copies in bulk."""
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, properties.major >= 9


# ---- the ops ---------------------------------------------------------------------------------------------------------


def _check(
    op: str, name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device != device or not tensor.is_contiguous():
        layout = "" if tensor.is_contiguous() else f" with strides {tensor.stride()}"
        raise ValueError(
            f"{op}: `{name}` must be contiguous {dtype} of shape {list(shape)} on {device}, and is {tensor.dtype} of "
            f"shape {list(tensor.shape)}{layout} on {tensor.device}"
        )


def _check_row_state(
    op: str, slab_table: Tensor, buffer: Tensor, item_slot: Tensor, slot_item: Tensor, last_used: Tensor, clock: Tensor
) -> None:
    rows, slots, elements = buffer.shape
    device = buffer.device
    _check(op, "slab_table", slab_table, torch.int64, (rows, slab_table.shape[-1]), device)
    _check(op, "buffer", buffer, buffer.dtype, (rows, slots, elements), device)
    _check(op, "item_slot", item_slot, torch.int32, (rows, item_slot.shape[-1]), device)
    _check(op, "slot_item", slot_item, torch.int32, (rows, slots), device)
    _check(op, "last_used", last_used, torch.int32, (rows, slots), device)
    _check(op, "clock", clock, torch.int32, (rows,), device)
    reference.check_slots(op, buffer)


def swap_in(
    selection: Tensor,
    slab_table: Tensor,
    items_per_slab: int,
    buffer: Tensor,
    item_slot: Tensor,
    slot_item: Tensor,
    last_used: Tensor,
    clock: Tensor,
    totals: Tensor,
    log: Tensor,
    progress: Tensor,
    *,
    shape: SwapInShape | None = None,
    macros: tuple[str, ...] = (),
) -> Tensor:
    """`ops.swap_in` on a CUDA device.

    Item ids must lie within `item_slot` and, as the op says, be unique in a row. Neither is checked.

    Args:
        shape: The launch shape, for measurement; None for the one that `heuristics` gives.
        macros: Macros that the kernel is compiled with, for measurement.
    """
    if _falls_back(buffer.device):
        return reference.in_pytorch(
            reference.swap_in,
            selection,
            slab_table,
            items_per_slab,
            buffer,
            item_slot,
            slot_item,
            last_used,
            clock,
            totals,
            log,
            progress,
        )
    rows, slots, elements = buffer.shape
    k = selection.shape[-1]
    item_bytes = elements * buffer.element_size()
    _check("swap_in", "selection", selection, torch.int32, (rows, k), buffer.device)
    _check_row_state("swap_in", slab_table, buffer, item_slot, slot_item, last_used, clock)
    _check("swap_in", "totals", totals, torch.int64, (rows, 2), buffer.device)
    _check("swap_in", "log", log, torch.int32, (rows, log.shape[1], 2), buffer.device)
    _check("swap_in", "progress", progress, torch.int32, (rows, 2), buffer.device)
    most = min(MAX_K, slots)
    if k > most:
        raise ValueError(f"swap_in: `selection` of shape {[rows, k]} may select at most {most} items a row")
    if k * item_bytes >= 1 << 32:
        raise ValueError(f"swap_in: {k} items of {item_bytes} bytes are more than the 4 GiB a row that a step can copy")
    found = torch.empty_like(selection)
    if found.numel() == 0:
        return found
    index = buffer.device.index
    multiprocessors, bulk = _device(index)
    if shape is None:
        shape = swap_in_shape(rows, k, slots, item_bytes, multiprocessors, bulk and item_bytes % 16 == 0)
    count, piece_bytes = pieces(item_bytes)
    per_row = 0 if shape.copiers else direct_blocks(k, item_bytes, shape.movers)
    listed = None if per_row else torch.empty_like(selection)
    places = shape.movers * (piece_bytes + 8) if bulk else 0
    _launch(
        _kernel("swap_in", index, macros),
        rows + (rows * per_row or shape.copiers),
        shape.threads,
        max(8 * k + (slots + 3) // 4 * 4, places),
        selection.data_ptr(),
        found.data_ptr(),
        k,
        slab_table.data_ptr(),
        slab_table.shape[1],
        items_per_slab,
        buffer.data_ptr(),
        item_bytes,
        slots,
        item_slot.data_ptr(),
        item_slot.shape[1],
        slot_item.data_ptr(),
        last_used.data_ptr(),
        clock.data_ptr(),
        totals.data_ptr(),
        log.data_ptr(),
        log.shape[1],
        progress.data_ptr(),
        0 if listed is None else listed.data_ptr(),
        rows,
        count,
        piece_bytes,
        shape.movers,
        per_row,
    )
    return found


def swap_in_without_copy(*args: Any, **kwargs: Any) -> Tensor:
    """`swap_in` with all of its work but the copy of the missed bytes: what the mechanism costs, for measurement.

    The buffer then holds wrong bytes under right slots. No op and no option leads here.
    """
    return swap_in(*args, **kwargs, macros=("WITHOUT_COPY",))


def append(
    token: Tensor,
    position: Tensor,
    page_size: int,
    widths: Sequence[int],
    slab_table: Tensor,
    items_per_slab: int,
    buffer: Tensor,
    item_slot: Tensor,
    slot_item: Tensor,
    last_used: Tensor,
    clock: Tensor,
) -> None:
    """`ops.append` on a CUDA device. Positions must lie within `slab_table` and `item_slot`: that is not checked."""
    if _falls_back(buffer.device):
        return reference.in_pytorch(
            reference.append,
            token,
            position,
            page_size,
            list(widths),
            slab_table,
            items_per_slab,
            buffer,
            item_slot,
            slot_item,
            last_used,
            clock,
        )
    rows, slots, elements = buffer.shape
    _check("append", "token", token, buffer.dtype, (rows, sum(widths)), buffer.device)
    _check("append", "position", position, torch.int64, (rows,), buffer.device)
    _check_row_state("append", slab_table, buffer, item_slot, slot_item, last_used, clock)
    if len(widths) > MAX_PARTS:
        raise ValueError(f"append: `widths` {list(widths)} has more than {MAX_PARTS} parts")
    if page_size * sum(widths) != elements:
        raise ValueError(
            f"append: {page_size} tokens of `widths` {list(widths)} do not make up the {elements} elements of an item"
        )
    if rows == 0:
        return None
    index = buffer.device.index
    size = buffer.element_size()
    _launch(
        _kernel("append", index),
        rows,
        append_threads(slots),
        0,
        token.data_ptr(),
        position.data_ptr(),
        page_size,
        *(width * size for width in widths),
        *(0,) * (MAX_PARTS - len(widths)),
        slab_table.data_ptr(),
        slab_table.shape[1],
        items_per_slab,
        buffer.data_ptr(),
        elements * size,
        slots,
        item_slot.data_ptr(),
        item_slot.shape[1],
        slot_item.data_ptr(),
        last_used.data_ptr(),
        clock.data_ptr(),
    )
    return None


# ---- selection -------------------------------------------------------------------------------------------------------

_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""The numbers of dtypes in `csrc/elements.cuh`."""
_LOG2_E = math.log2(math.e)
_HEADS = 4
"""Query heads that a block scores, as `kHeads` in the sources."""
_QUEST_CHUNK = 128
"""Pages that a block scores, as `kPages` in score_quest.cu."""
_GROUP = 256
"""The most query heads a KV head for which top-k completes scores."""
_RABITQ_UNIT = 64
"""Tokens that a warp scores at once, as `kUnit` in score_rabitq.cu."""
_RABITQ_WIDTH = 256
"""The widest head whose rotation the kernels have registers for."""


class Weighed(NamedTuple):
    """Scores that are yet to be completed, as csrc/softmax.cuh says.

    Args:
        weights: `[rows, group, items]` float32.
        partials: `[rows, group, chunks, 2]` float32.
        chunk_items: Items a chunk, a power of two.
    """

    weights: Tensor
    partials: Tensor
    chunk_items: int

    def arguments(self) -> tuple[int, ...]:
        """Weights, partials, group, chunks, and log2 of the items a chunk, as kernels take them."""
        group, chunks = self.partials.shape[1:3]
        return self.weights.data_ptr(), self.partials.data_ptr(), group, chunks, self.chunk_items.bit_length() - 1

    @property
    def norm_bytes(self) -> int:
        """Shared memory in which a block of 32 warps finds the norm of every head."""
        group = self.partials.shape[1]
        return 8 * (group + max(group, 32))


def top_k(
    scores: Tensor,
    k: int,
    lengths: Tensor | None = None,
    page_size: int = 1,
    sink_tokens: int = 0,
    recent_tokens: int = 0,
    *,
    blocks: int | None = None,
) -> Tensor:
    """`ops.top_k` on a CUDA device.

    Args:
        blocks: Blocks a row, for measurement; None for what `heuristics` says.
    """
    if _falls_back(scores.device):
        return reference.in_pytorch(reference.top_k, scores, k, lengths, page_size, sink_tokens, recent_tokens)
    rows, items = scores.shape
    _check("top_k", "scores", scores, torch.float32, (rows, items), scores.device)
    if lengths is not None:
        _check("top_k", "lengths", lengths, torch.int64, (rows,), scores.device)
    if page_size < 1:
        raise ValueError(f"top_k: `page_size` must be positive, not {page_size}")
    return _top_k(scores, k, lengths, page_size, sink_tokens, recent_tokens, blocks)


def _top_k(
    scores: Tensor | Weighed,
    k: int,
    lengths: Tensor | None,
    page_size: int,
    sink_tokens: int,
    recent_tokens: int,
    blocks: int | None = None,
) -> Tensor:
    """The selection, of complete scores or of others, which are completed on the way if a block can hold them."""
    weights = scores.weights if isinstance(scores, Weighed) else scores
    rows, items, index = weights.shape[0], weights.shape[-1], weights.device.index
    if max(items * page_size, k) >= 1 << 30:
        raise ValueError(f"top_k: {k} of `scores` of shape {[rows, items]} are more than 2^30 items, or tokens of them")
    selection = torch.empty(rows, k, dtype=torch.int32, device=weights.device)
    if items == 0:
        return selection.fill_(-1)
    if selection.numel() == 0:
        return selection
    if blocks is None:
        blocks = top_k_blocks(rows, items, *_device(index))
    macros: tuple[str, ...] = ()
    shared = top_k_shared_bytes(items, blocks)
    source: tuple[int, ...] = (weights.data_ptr(),)
    if isinstance(scores, Weighed):
        group = weights.shape[1]
        chunks = top_k_chunks(items, blocks, scores.chunk_items)
        extra = scores.norm_bytes + 4 * group * chunks
        if group and shared and shared + extra <= _SHARED_BYTES["top_k"]:
            macros, shared, source = ("MASS",), shared + extra, (*scores.arguments(), chunks)
        else:
            completed = _softmax_mass(scores)
            source = (completed.data_ptr(),)
    _launch(
        _kernel("top_k", index, macros),
        rows,
        MAX_THREADS,
        shared,
        *source,
        selection.data_ptr(),
        items,
        k,
        0 if lengths is None else lengths.data_ptr(),
        page_size,
        min(-(-sink_tokens // page_size), items),
        min(recent_tokens, 1 << 30),
        cluster=blocks,
    )
    return selection


def _softmax_mass(weighed: Weighed) -> Tensor:
    """Completes scores: `[rows, items]`."""
    weights = weighed.weights
    rows, group, items = weights.shape
    scores = weights.new_empty(rows, items)
    if scores.numel() == 0 or group == 0:
        return scores.zero_()
    row_blocks = mass_blocks(rows, items, _device(weights.device.index)[0])
    _launch(
        _kernel("softmax_mass", scores.device.index),
        rows * row_blocks,
        MASS_THREADS,
        weighed.norm_bytes,
        *weighed.arguments(),
        scores.data_ptr(),
        items,
        row_blocks,
    )
    return scores


def _score(op: Any, weigh: Callable[..., Weighed | None], arguments: tuple[Any, ...]) -> Tensor:
    """An op that scores, of which `weigh` is the first half."""
    weighed = weigh(*arguments)
    return reference.in_pytorch(op, *arguments) if weighed is None else _softmax_mass(weighed)


def _select(
    op: Any, weigh: Callable[..., Weighed | None], arguments: tuple[Any, ...], page_size: int, lengths: Tensor
) -> Tensor:
    """An op that selects by scores, whose arguments come first."""
    *scoring, k, sink_tokens, recent_tokens = arguments
    weighed = weigh(*scoring)
    if weighed is None:
        return reference.in_pytorch(op, *arguments)
    return _top_k(weighed, k, lengths, page_size, sink_tokens, recent_tokens)


def _weigh_quest(
    query: Tensor,
    low: Tensor,
    high: Tensor,
    items: int,
    page_size: int,
    scale: float,
    lengths: Tensor,
) -> Weighed | None:
    """The first half of Quest's scores; None where the kernel cannot be had."""
    rows, group, width = query.shape
    reason = None
    if query.dtype not in _DTYPES or low.dtype != query.dtype:
        reason = f"score_quest takes no {query.dtype} queries with {low.dtype} keys"
    elif width % 8 or width > 1024:
        reason = f"score_quest takes heads of a multiple of 8, at most 1024, not of {width}"
    elif group > _GROUP:
        reason = f"score_quest takes at most {_GROUP} query heads a KV head, not {group}"
    if _falls_back(query.device, reason):
        return None
    device, capacity = query.device, low.shape[1]
    query = query.contiguous()
    _check("score_quest", "low", low, query.dtype, (rows, capacity, width), device)
    _check("score_quest", "high", high, query.dtype, (rows, capacity, width), device)
    _check("score_quest", "lengths", lengths, torch.int64, (rows,), device)
    if items > capacity:
        raise ValueError(
            f"score_quest: `items` is {items}, and `low` of shape {list(low.shape)} holds {capacity} pages"
        )
    if capacity * width >= 1 << 31:
        raise ValueError(f"score_quest: a row of `low` of shape {list(low.shape)} has more than 2^31 elements")
    chunks = -(-items // _QUEST_CHUNK)
    weights = torch.empty(rows, group, items, dtype=torch.float32, device=device)
    partials = torch.empty(rows, group, chunks, 2, dtype=torch.float32, device=device)
    if weights.numel():
        _launch(
            _kernel("score_quest", device.index),
            rows * -(-group // _HEADS) * chunks,
            256,
            4 * _HEADS * width,
            query.data_ptr(),
            low.data_ptr(),
            high.data_ptr(),
            _DTYPES[query.dtype],
            group,
            width,
            capacity,
            items,
            page_size,
            float(scale * _LOG2_E),
            lengths.data_ptr(),
            weights.data_ptr(),
            partials.data_ptr(),
            chunks,
        )
    return Weighed(weights, partials, _QUEST_CHUNK)


def score_quest(*arguments: Any) -> Tensor:
    """`ops.score_quest` on a CUDA device."""
    return _score(reference.score_quest, _weigh_quest, arguments)


def select_quest(*arguments: Any) -> Tensor:
    """`ops.select_quest` on a CUDA device."""
    return _select(reference.select_quest, _weigh_quest, arguments, arguments[4], arguments[6])


def encode_quest(key: Tensor, position: Tensor, low: Tensor, high: Tensor, page_size: int) -> None:
    """`ops.encode_quest` on a CUDA device. Positions must lie within `low` and `high`: that is not checked."""
    reason = None
    if key.dtype not in _DTYPES or low.dtype != key.dtype:
        reason = f"encode_quest takes no {key.dtype} keys with boxes of {low.dtype}"
    if _falls_back(key.device, reason):
        return reference.in_pytorch(reference.encode_quest, key, position, low, high, page_size)
    (rows, width), device, capacity = key.shape, key.device, low.shape[1]
    key = key.contiguous()
    _check("encode_quest", "position", position, torch.int64, (rows,), device)
    _check("encode_quest", "low", low, key.dtype, (rows, capacity, width), device)
    _check("encode_quest", "high", high, key.dtype, (rows, capacity, width), device)
    if page_size < 1:
        raise ValueError(f"encode_quest: `page_size` must be at least 1, not {page_size}")
    if key.numel():
        _launch(
            _kernel("encode_quest", device.index),
            rows,
            min(MAX_THREADS, -(-width // 32) * 32),
            0,
            key.data_ptr(),
            position.data_ptr(),
            low.data_ptr(),
            high.data_ptr(),
            width,
            capacity,
            page_size,
            _DTYPES[key.dtype],
        )
    return None


def encode_rabitq(
    key: Tensor,
    position: Tensor,
    bits: Tensor,
    scales: Tensor,
    centres: Tensor,
    total: Tensor,
    count: Tensor,
    block: int,
) -> None:
    """`ops.encode_rabitq` on a CUDA device. Positions must lie within `bits` and `centres`: that is not checked."""
    rows, width = key.shape
    reason = None
    if key.dtype not in _DTYPES or centres.dtype != key.dtype:
        reason = f"encode_rabitq takes no {key.dtype} keys with {centres.dtype} centres"
    elif width > _RABITQ_WIDTH:
        reason = f"encode_rabitq takes heads of at most {_RABITQ_WIDTH}, not of {width}"
    if _falls_back(key.device, reason):
        return reference.in_pytorch(reference.encode_rabitq, key, position, bits, scales, centres, total, count, block)
    device, capacity = key.device, bits.shape[1]
    key = key.contiguous()
    _check("encode_rabitq", "position", position, torch.int64, (rows,), device)
    _check("encode_rabitq", "bits", bits, torch.uint8, (rows, capacity, width // 8), device)
    _check("encode_rabitq", "scales", scales, torch.float16, (rows, capacity), device)
    _check("encode_rabitq", "centres", centres, key.dtype, (rows, centres.shape[1], width), device)
    _check("encode_rabitq", "total", total, torch.int64, (rows, width), device)
    _check("encode_rabitq", "count", count, torch.int64, (rows, 1), device)
    if width % 8:
        raise ValueError(f"encode_rabitq: the width of `key` of shape {list(key.shape)} must be a multiple of 8")
    if block & (block - 1):
        raise ValueError(f"encode_rabitq: `block` must be a power of two, not {block}")
    if rows:
        _launch(
            _kernel("encode_rabitq", device.index, (f"BYTES={width // 8}",)),
            rows,
            32,
            0,
            key.data_ptr(),
            position.data_ptr(),
            bits.data_ptr(),
            scales.data_ptr(),
            centres.data_ptr(),
            total.data_ptr(),
            count.data_ptr(),
            capacity,
            centres.shape[1],
            block.bit_length() - 1,
            _DTYPES[key.dtype],
        )
    return None


def _weigh_rabitq(
    query: Tensor,
    bits: Tensor,
    scales: Tensor,
    centres: Tensor,
    block: int,
    items: int,
    page_size: int,
    scale: float,
    lengths: Tensor,
    unscored: int = 0,
) -> Weighed | None:
    """The first half of RaBitQ's scores, but of the `unscored` newest tokens; None where the kernels cannot be had."""
    rows, group, width = query.shape
    reason = None
    if query.dtype not in _DTYPES or centres.dtype != query.dtype:
        reason = f"score_rabitq takes no {query.dtype} queries with {centres.dtype} keys"
    elif width > _RABITQ_WIDTH:
        reason = f"score_rabitq takes heads of at most {_RABITQ_WIDTH}, not of {width}"
    elif page_size > _RABITQ_UNIT:
        reason = f"score_rabitq takes pages of at most {_RABITQ_UNIT} tokens, not of {page_size}"
    elif group > _GROUP:
        reason = f"score_rabitq takes at most {_GROUP} query heads a KV head, not {group}"
    if _falls_back(query.device, reason):
        return None
    device, capacity = query.device, bits.shape[1]
    query = query.contiguous()
    _check("score_rabitq", "bits", bits, torch.uint8, (rows, capacity, width // 8), device)
    _check("score_rabitq", "scales", scales, torch.float16, (rows, capacity), device)
    _check("score_rabitq", "centres", centres, query.dtype, (rows, centres.shape[1], width), device)
    _check("score_rabitq", "lengths", lengths, torch.int64, (rows,), device)
    if width % 8:
        raise ValueError(f"score_rabitq: the width of `query` of shape {list(query.shape)} must be a multiple of 8")
    if block < 16 or block & (block - 1):
        raise ValueError(f"score_rabitq: `block` must be a power of two from 16 on, not {block}")
    tokens = min(items * page_size, capacity)
    if -(-tokens // block) > centres.shape[1]:
        raise ValueError(
            f"score_rabitq: `centres` of shape {list(centres.shape)} holds fewer than the {-(-tokens // block)} blocks "
            f"of {tokens} tokens"
        )
    if (items - 1) * page_size >= capacity:
        raise ValueError(
            f"score_rabitq: {items} items of {page_size} tokens are more than `bits` of shape {list(bits.shape)} holds"
        )
    if items * page_size >= 1 << 30:
        raise ValueError(f"score_rabitq: {items} items of {page_size} tokens are more than 2^30 tokens")
    chunk_items = 1 << (_RABITQ_UNIT // page_size).bit_length() - 1
    units, tiles = -(-items // chunk_items), -(-group // _HEADS)
    weights = torch.empty(rows, group, items, dtype=torch.float32, device=device)
    partials = torch.empty(rows, group, units, 2, dtype=torch.float32, device=device)
    if weights.numel() == 0:
        return Weighed(weights, partials, chunk_items)
    row_blocks = rabitq_blocks(rows * tiles, units, chunk_items * page_size, block, _device(device.index)[0])
    _launch(
        _kernel("score_rabitq", device.index, (f"BYTES={width // 8}",)),
        rows * tiles * row_blocks,
        32 * RABITQ_WARPS,
        0,
        query.data_ptr(),
        bits.data_ptr(),
        scales.data_ptr(),
        centres.data_ptr(),
        _DTYPES[query.dtype],
        group,
        capacity,
        centres.shape[1],
        block.bit_length() - 1,
        items,
        page_size,
        chunk_items,
        float(scale * _LOG2_E),
        lengths.data_ptr(),
        unscored,
        weights.data_ptr(),
        partials.data_ptr(),
        units,
        row_blocks,
    )
    return Weighed(weights, partials, chunk_items)


def score_rabitq(*arguments: Any) -> Tensor:
    """`ops.score_rabitq` on a CUDA device."""
    return _score(reference.score_rabitq, _weigh_rabitq, arguments)


def select_rabitq(*arguments: Any) -> Tensor:
    """`ops.select_rabitq` on a CUDA device."""
    return _select(reference.select_rabitq, _weigh_rabitq, arguments, arguments[6], arguments[8])


def _launch(kernel: Kernel, *arguments: Any, cluster: int = 1) -> None:
    if kernel.index == torch.cuda.current_device():
        kernel(*arguments, cluster=cluster)
    else:
        with torch.cuda.device(kernel.index):
            kernel(*arguments, cluster=cluster)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compiles every CUDA kernel of hf_hisparse. Needs no GPU.")
    parser.add_argument("--arch", nargs="+", default=list(ARCHITECTURES), help="architectures, as in sm_90")
    compile_all(parser.parse_args().arch)
