"""The backend that is used when none is named."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_hisparse.backends.base import AttentionBackend
from hf_hisparse.backends.reference import ReferenceBackend


@functools.cache
def _warn(reason: str) -> None:
    warnings.warn(
        f"attention runs in PyTorch on the GPU, which is slower than Triton's kernels. The reason: {reason}",
        RuntimeWarning,
        stacklevel=4,
    )


class AutoBackend(AttentionBackend):
    """Triton's kernels on a CUDA device, PyTorch anywhere else; and, with one warning, where those kernels do not run.

    Args:
        triton: Makes the Triton backend; raises if it cannot.
    """

    def __init__(self, triton: Callable[[], AttentionBackend]):
        self._triton, self._reference = triton, ReferenceBackend()
        self._chosen: dict[Any, AttentionBackend] = {}

    def attend(self, query: Tensor, buffer: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if query.device.type != "cuda":
            return self._reference.attend(query, buffer, *args, **kwargs)
        # What may be refused: a dtype, or items too wide for the device's shared memory.
        kind = (query.device, query.dtype, buffer.shape[2])
        backend = self._chosen.get(kind)
        if backend is not None:
            return backend.attend(query, buffer, *args, **kwargs)
        try:
            backend = self._triton()
            output = backend.attend(query, buffer, *args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Whatever it is, such as a compiler that is missing, there is another way to run.
            _warn(f"{type(error).__name__}: {error}")
            backend = self._reference
            output = backend.attend(query, buffer, *args, **kwargs)
        self._chosen[kind] = backend
        return output
