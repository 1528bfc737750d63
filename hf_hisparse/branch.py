"""Work that runs beside what follows it, in a CUDA graph that is being captured: a branch of the graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor


T = TypeVar("T")


@functools.cache
def _side(index: int) -> torch.cuda.Stream:
    """What a branch is captured on. Captures are made one at a time (`graph`), and of this priority's streams, which
    PyTorch deals out again and again, nobody else has one."""
    return torch.cuda.Stream(index, priority=-2)


class Branch:
    """Runs a function beside what its caller does next, where that is captured; at once, where it is not, or where
    something is run beside it already.

    A step's kernels are short, and few of them fill the device: side by side they take less time. Outside of a graph
    what launches them is slower than they are, and there would be nothing to gain.
    """

    def __init__(self) -> None:
        self._open: tuple[torch.cuda.Stream, tuple[Tensor, ...]] | None = None

    @property
    def busy(self) -> bool:
        """Whether something runs beside what is captured now."""
        return self._open is not None

    def run(self, function: Callable[..., T], *tensors: Tensor) -> T:
        """Calls `function(*tensors)`, whose work `join` waits for. Until then nothing else may write what its results
        depend on, or read those."""
        device = tensors[0].device
        if self.busy or not _captured(device):
            return function(*tensors)
        side = _side(device.index)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            result = function(*tensors)
        # Until the join, so that nobody else is given their memory.
        self._open = side, tensors
        return result

    def join(self) -> None:
        """Has what follows wait for it."""
        if self._open is not None:
            side, _ = self._open
            self._open = None
            if _captured(side.device):
                torch.cuda.current_stream(side.device).wait_stream(side)


def _captured(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
