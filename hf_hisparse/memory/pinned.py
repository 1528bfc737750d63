"""Page-aligned anonymous host memory, registered with CUDA where there is a GPU to read it."""

from __future__ import annotations

import contextlib
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from hf_hisparse.capturing import synchronize
from hf_hisparse.memory import limits, numa


class Region(mmap.mmap):
    """A mapping that undoes its registration before it goes."""

    registered: tuple[torch.device, int] | None = None
    """With which device, and at which address."""
    used = False

    def tensor(self) -> Tensor:
        """The memory as a uint8 tensor, which holds the region. From here on a device may read it."""
        self.used = True
        return torch.frombuffer(self, dtype=torch.uint8)

    def __del__(self) -> None:
        if self.registered is None:
            return
        device, address = self.registered
        with torch.cuda.device(device):
            if self.used:
                # A kernel or copy that still reads it must end first. What was never used waits for nothing: it may go
                # in the background.
                try:
                    synchronize(device)
                except KeyboardInterrupt:
                    # Python drops what is raised here. The wait must not go with it.
                    synchronize(device)
            torch.cuda.cudart().cudaHostUnregister(address)


def require(nbytes: int, layers: int = 1) -> None:
    """Raises `MemoryError` if `nbytes` of host memory, for that many layers, are more than there are."""
    left = limits.available()
    if left is not None and nbytes > left:
        whose = f"the KV history of {layers} layers" if layers > 1 else "the KV history"
        raise MemoryError(
            f"{nbytes / 2**20:.0f} MiB of host memory for {whose} could not be had: {left / 2**20:.0f} MiB are "
            "available; use a smaller batch or a shorter context"
        )


def allocate(nbytes: int, device: torch.device) -> Region:
    """`nbytes` of zeroed host memory; unregistered and unmapped as soon as nothing holds it.

    Args:
        nbytes: At least 1.
        device: Who reads it. For a CUDA device it is near it, and registered, so that a kernel can read it and copies
            run at the link's speed.

    Raises:
        MemoryError: If the memory cannot be had or cannot be pinned. Nothing is held then.
    """
    require(nbytes)
    wanted = f"{nbytes / 2**20:.0f} MiB of host memory for the KV history"
    try:
        region = Region(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{wanted} could not be had ({error})") from error
    with contextlib.suppress(OSError, AttributeError):
        region.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(region, dtype=torch.uint8)
    address = memory.data_ptr()
    if device.type != "cuda":
        _touch(memory)
        return region
    with torch.cuda.device(device):
        node = numa.gpu_node(torch.cuda.current_device())
        if node is not None:
            numa.bind(address, nbytes, node)
        _touch(memory)
        status = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
    if status != 0:
        # Whoever keeps the error keeps this frame, which must then hold nothing.
        del memory
        region.close()
        raise MemoryError(
            f"{wanted} could not be pinned (CUDA error {status}); use a smaller batch or a shorter context"
        )
    region.registered = device, address
    return region


def _touch(memory: Tensor) -> None:
    """Has every page of it now. Registration would have them too, but under locks that kernel launches take."""
    memory[:: mmap.PAGESIZE].zero_()


_executor: ThreadPoolExecutor


def _new_executor() -> None:
    global _executor
    _executor = ThreadPoolExecutor(1, thread_name_prefix="hf_hisparse-memory")


_new_executor()
# A forked child has the executor, but not its thread.
os.register_at_fork(after_in_child=_new_executor)


def allocate_behind(nbytes: int, device: torch.device) -> Future[Region]:
    """`allocate` in the background, in the order of the calls, on the one thread of this process that allocates.

    The thread begins with the first call. Every region is registered there, whoever waits for it: CUDA keeps a thread's
    last error, and the next kernel that a thread launches after its registration failed would raise it.
    """
    return _executor.submit(allocate, nbytes, device)
