"""Binds host memory to the NUMA node of the GPU that reads it, so that no fetch crosses from one socket to another."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import warnings
from pathlib import Path


_MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of the system call, which libc does not wrap."""
_MPOL_PREFERRED = 1
"""Pages come from the node while it has any, and then from another: a full node is slower, never an error."""


def node_of(pci: str, sysfs: Path = Path("/sys")) -> int | None:
    """The NUMA node of a PCI device; None if it is unknown or the machine has but one.

    Args:
        pci: Its address, `domain:bus:device.function` in hexadecimal.
        sysfs: Where sysfs is mounted.
    """
    if len(list(sysfs.glob("devices/system/node/node[0-9]*"))) < 2:
        return None
    try:
        node = int((sysfs / "bus/pci/devices" / pci.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    # The firmware of many machines leaves it unset, -1.
    return node if node >= 0 else None


def pci_of(index: int) -> str | None:
    """The PCI address of a CUDA device, or None if the driver does not say. CUDA must be initialised."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, pci = ctypes.c_int(), ctypes.create_string_buffer(32)
    if driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetPCIBusId(pci, len(pci), device):
        return None
    return pci.value.decode()


@functools.cache
def gpu_node(index: int) -> int | None:
    """The NUMA node of a CUDA device, as `node_of`. CUDA must be initialised."""
    pci = pci_of(index)
    return None if pci is None else node_of(pci)


def bind(address: int, nbytes: int, node: int) -> None:
    """Lets the pages of a mapping, none of them touched yet, come from a node. Where that fails, warns once.

    Args:
        address: Where the mapping begins, page-aligned.
        nbytes: Its size.
        node: The NUMA node.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return _warn(node, f"unknown on {platform.machine()}")
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than it is told of.
    arguments = (ctypes.c_ulong(nbytes), _MPOL_PREFERRED, mask, ctypes.c_ulong(len(mask) * bits + 1), 0)
    if libc.syscall(ctypes.c_long(number), ctypes.c_void_p(address), *arguments) != 0:
        _warn(node, os.strerror(ctypes.get_errno()))


@functools.cache
def _warn(node: int, reason: str) -> None:
    warnings.warn(f"Host memory is not bound to the GPU's NUMA node {node}: mbind: {reason}.", stacklevel=3)
