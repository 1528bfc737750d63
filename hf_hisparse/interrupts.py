"""Interrupts, which come between any two lines, also between those that clean up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def undone(undo: Callable[[], object]) -> Iterator[None]:
    """Calls `undo` when it ends, and again: an interrupt may come in its way once."""
    try:
        try:
            yield
        finally:
            undo()
    finally:
        undo()
