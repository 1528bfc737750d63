"""What a device finds out, and the host hears of without waiting for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class LateCheck:
    """Whether one of several truths, found on a GPU one after another, is false.

    The GPU is not waited for: what it found is heard of in a call or so later, or when it is waited for by `settle`.
    """

    def __init__(self) -> None:
        self.next: Callable[[], Tensor] | None = None
        """Gives the truth that `ask` is to find out, `[]` bool on the device."""
        self._all: Tensor | None = None

    def __deepcopy__(self, memo: Any) -> LateCheck:
        return LateCheck()

    def ask(self) -> None:
        """Has the device find out the next truth, if there is one."""
        check, self.next = self.next, None
        if check is None:
            return
        true = check()
        if self._all is None or self._all.device != true.device:
            self._all = torch.ones_like(true)
            self._told, self._known = torch.cuda.Event(), torch.ones((), dtype=torch.bool, pin_memory=True)
        self._all.logical_and_(true)
        # While the answer before is on its way, this one waits to go with the next.
        if self._told.query():
            self._known.copy_(self._all, non_blocking=True)
            self._told.record(torch.cuda.current_stream(true.device))

    def failed(self) -> bool:
        """Whether one is false, as far as is known by now. A failure is told once."""
        if self._all is None or not self._told.query() or self._known:
            return False
        self._all.fill_(True)
        self._known.fill_(True)
        return True

    def settle(self) -> bool:
        """Whether one is false of which nothing was told. Waits for the device, if any were asked."""
        failed, self._all = self._all is not None and not self._all, None
        return failed
