"""Work that runs beside what follows it, in a CUDA graph that is being captured: a branch of the graph."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


@functools.cache
def _side(index: int) -> torch.cuda.Stream:
    """What a branch is captured on. Captures are made one at a time (`graph`), and of this priority's streams, which
    PyTorch deals out again and again, nobody else has one."""
    return torch.cuda.Stream(index, priority=-2)


class Branch:
    """Runs a function beside what its caller does next, where that is captured; at once, where it is not.

    A step's kernels are short, and few of them fill the device: side by side they take less time. Outside of a graph
    what launches them is slower than they are, and there would be nothing to gain.
    """

    def __init__(self) -> None:
        self._open: tuple[torch.cuda.Stream, tuple[Tensor, ...]] | None = None

    def run(self, function: Callable[..., None], *tensors: Tensor) -> None:
        """Calls `function(*tensors)`, whose work `join` waits for. Until then nothing else may write what its results
        depend on."""
        device = tensors[0].device
        if not _captured(device):
            function(*tensors)
            return
        side = _side(device.index)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            function(*tensors)
        # Until the join, so that nobody else is given their memory.
        self._open = side, tensors

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
