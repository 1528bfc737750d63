"""Waiting for a whole device, which breaks the capture of a graph: not only in the thread that captures."""

from __future__ import annotations

import threading

import torch


capturing = threading.RLock()
"""Held by the thread that captures a graph."""


def synchronize(device: torch.device) -> None:
    """Waits for all that a CUDA device has to do, once no graph is being captured."""
    with capturing:
        torch.cuda.synchronize(device)
