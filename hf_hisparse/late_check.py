"""What a device finds out, and the host hears of without waiting for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LateCheck:
    """Whether one of several truths, found on a device one after another, is false.

    On the CPU that is known at once. A GPU is not waited for: what it found is heard of in a call or so later, or when
    it is waited for by `settle`.
    """

    def __init__(self) -> None:
        self._all: Tensor | None = None

    def __deepcopy__(self, memo: Any) -> LateCheck:
        return LateCheck()

    def failed(self, true: Tensor) -> bool:
        """Whether this one, or as far as is known by now one before it, is false. A failure is told once."""
        if not true.is_cuda:
            return not true
        if self._all is None or self._all.device != true.device:
            self._all = torch.ones_like(true)
            self._told, self._known = torch.cuda.Event(), torch.ones((), dtype=torch.bool, pin_memory=True)
        self._all.logical_and_(true)
        # While the answer before is on its way, this one waits to go with the next.
        if not self._told.query():
            return False
        failed = not self._known
        if failed:
            self._all.copy_(true)
        self._known.copy_(self._all, non_blocking=True)
        self._told.record(torch.cuda.current_stream(true.device))
        return failed

    def settle(self) -> bool:
        """Whether one is false of which nothing was told. Waits for the device, if there were any."""
        failed, self._all = self._all is not None and not self._all, None
        return failed
