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
import os
import re
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_hisparse.ops import reference
from hf_hisparse.ops.heuristics import (
    ITEMS_PER_THREAD,
    MAX_THREADS,
    Shape,
    append_threads,
    direct_blocks,
    pieces,
    swap_in_shape,
)


KERNELS = (("swap_in", ()), ("swap_in", ("WITHOUT_COPY",)), ("append", ()))
"""Every kernel: the file and function that it is, and the macros that it is compiled with."""
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
"""What the kernels are tested to compile for. They need compute capability 8.0."""

MAX_K = ITEMS_PER_THREAD * MAX_THREADS
MAX_PARTS = 4
_SHARED_BYTES = 96 << 10
"""Dynamic shared memory that a swap-in may take; every device from compute capability 8.0 on has it."""


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
        self._streams: dict[int, Any] = {}
        self._shapes: dict[tuple[int, int, int], Any] = {}

    def allow_shared(self, nbytes: int) -> None:
        """Lets launches use up to `nbytes` of dynamic shared memory."""
        from cuda.bindings import driver

        handle = getattr(self._kernel, "handle", None) or self._kernel._handle
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(attribute, nbytes, handle, driver.CUdevice(self.index))
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{nbytes} bytes of shared memory cannot be had ({status})")

    def __call__(self, blocks: int, threads: int, shared_bytes: int, *arguments: int) -> None:
        """Launches it on PyTorch's current stream."""
        stream = torch.cuda.current_stream(self.index)
        launch_stream = self._streams.get(stream.cuda_stream)
        if launch_stream is None:
            launch_stream = self._streams[stream.cuda_stream] = self._wrap(stream)
        shape = (blocks, threads, shared_bytes)
        config = self._shapes.get(shape)
        if config is None:
            config = self._core.LaunchConfig(grid=blocks, block=threads, shmem_size=shared_bytes)
            self._shapes[shape] = config
        self._core.launch(launch_stream, config, self._kernel, *arguments)

    def _wrap(self, stream: torch.cuda.Stream) -> Any:
        class Borrowed:
            def __cuda_stream__(self) -> tuple[int, int]:
                return 0, stream.cuda_stream

        device = self._core.Device(self.index)
        device.set_current()
        return device.create_stream(Borrowed())


@functools.cache
def _kernel(name: str, index: int, macros: tuple[str, ...] = ()) -> Kernel:
    with torch.cuda.device(index):
        kernel = Kernel((source_directory() / f"{name}.cu").read_text(), name, index, macros)
        if name == "swap_in":
            kernel.allow_shared(_SHARED_BYTES)
    return kernel


@functools.cache
def unavailable(index: int) -> str | None:
    """Why the kernels cannot run on a device, None where they can. The first call compiles and loads them."""
    try:
        for name in ("swap_in", "append"):
            _kernel(name, index)
    except Exception as error:  # Whatever it is, there is another way to run.
        return f"{type(error).__name__}: {error}"
    return None


@functools.cache
def _warn(reason: str) -> None:
    warnings.warn(
        "the CUDA kernels of hf_hisparse cannot be used; its PyTorch ops, which are far slower and wait for the host, "
        f"run instead. `pip install hf_hisparse[cuda]` installs what the kernels need. The reason: {reason}",
        RuntimeWarning,
        stacklevel=2,
    )


def _falls_back(device: torch.device) -> bool:
    reason = unavailable(device.index)
    if reason is not None:
        _warn(reason)
    return reason is not None


@functools.cache
def _device(index: int) -> tuple[int, bool]:
    """Multiprocessors of a device, and whether it copies in bulk."""
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
    shape: Shape | None = None,
    macros: tuple[str, ...] = (),
) -> Tensor:
    """`ops.swap_in` on a CUDA device.

    Item ids must lie within `item_slot` and, as the op says, be unique in a row. Neither is checked.

    Args:
        shape: The launch shape, for measurement; None for the one that `heuristics` gives.
        macros: Macros that the kernel is compiled with, for measurement.
    """
    if _falls_back(buffer.device):
        with reference.swap_in.set_kernel_enabled("cuda", enabled=False):
            return reference.swap_in(
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
        with reference.append.set_kernel_enabled("cuda", enabled=False):
            return reference.append(
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


def _launch(kernel: Kernel, *arguments: int) -> None:
    if kernel.index == torch.cuda.current_device():
        kernel(*arguments)
    else:
        with torch.cuda.device(kernel.index):
            kernel(*arguments)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compiles every CUDA kernel of hf_hisparse. Needs no GPU.")
    parser.add_argument("--arch", nargs="+", default=list(ARCHITECTURES), help="architectures, as in sm_90")
    compile_all(parser.parse_args().arch)
