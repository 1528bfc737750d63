"""Programmatic dependent launch in Triton kernels: `csrc/dependent_launch.cuh`, of which they keep the same rule."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def await_previous(DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first thing that a kernel does."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def dependent(device: torch.device) -> dict[str, Any]:
    """What a kernel that begins with `await_previous(DEPENDENT)` is launched with on a device."""
    return _dependent(device.index) if device.type == "cuda" else {"DEPENDENT": False}


@functools.cache
def _dependent(index: int) -> dict[str, Any]:
    able = torch.cuda.get_device_capability(index)[0] >= 9 and hasattr(tl.extra.cuda, "gdc_wait")
    return {"DEPENDENT": True, "launch_pdl": True} if able else {"DEPENDENT": False}
