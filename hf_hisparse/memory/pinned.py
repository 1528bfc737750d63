"""Page-aligned anonymous host memory, registered with CUDA where there is a GPU to read it."""

from __future__ import annotations

import contextlib
import mmap
import weakref

import torch
from torch import Tensor


def allocate(nbytes: int, pin: bool) -> Tensor:
    """`nbytes` of zeroed host memory as a uint8 tensor; unregistered and unmapped when the tensor's storage is freed.

    Args:
        nbytes: At least 1.
        pin: Register it with CUDA, so that a kernel can read it and copies run at the link's speed.

    Raises:
        MemoryError: If the memory cannot be had or cannot be pinned. Nothing is held then.
    """
    try:
        region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {nbytes / 2**20:.0f} MiB of host memory for the KV history: {error}") from error
    with contextlib.suppress(OSError, AttributeError):
        region.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(region, dtype=torch.uint8)
    if pin:
        address = tensor.data_ptr()
        cudart = torch.cuda.cudart()
        status = int(cudart.cudaHostRegister(address, nbytes, 0))
        if status != 0:
            raise MemoryError(
                f"{nbytes / 2**20:.0f} MiB of host memory for the KV history could not be pinned (CUDA error {status}); "
                "raise the limit on locked memory (`ulimit -l`) or use a smaller batch or context"
            )
        weakref.finalize(tensor.untyped_storage(), cudart.cudaHostUnregister, address)
    return tensor
