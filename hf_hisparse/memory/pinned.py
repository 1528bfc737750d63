"""Page-aligned anonymous host memory, registered with CUDA where there is a GPU to read it."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor


class _Region(mmap.mmap):
    """A mapping that undoes its registration before it goes. The tensor over it holds it."""

    registered: int | None = None

    def __del__(self) -> None:
        if self.registered is not None:
            # A kernel or copy that still reads it must end first.
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self.registered)


def allocate(nbytes: int, pin: bool) -> Tensor:
    """`nbytes` of zeroed host memory as a uint8 tensor; unregistered and unmapped as soon as nothing views it.

    Args:
        nbytes: At least 1.
        pin: Register it with CUDA, so that a kernel can read it and copies run at the link's speed.

    Raises:
        MemoryError: If the memory cannot be had or cannot be pinned. Nothing is held then.
    """
    wanted = f"{nbytes / 2**20:.0f} MiB of host memory for the KV history"
    try:
        region = _Region(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{wanted} could not be had ({error})") from error
    with contextlib.suppress(OSError, AttributeError):
        region.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(region, dtype=torch.uint8)
    if pin:
        status = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), nbytes, 0))
        if status != 0:
            raise MemoryError(
                f"{wanted} could not be pinned (CUDA error {status}); raise the limit on locked memory (`ulimit -l`), "
                "or use a smaller batch or context"
            )
        region.registered = tensor.data_ptr()
    return tensor
