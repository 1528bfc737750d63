"""How much host memory can still be had."""

from __future__ import annotations

import contextlib
from pathlib import Path


def available(root: Path = Path("/")) -> int | None:
    """Bytes of memory that this process can still take without swapping, or None where the system does not say.

    The least of what the kernel estimates (`MemAvailable`) and of what the limits of the process's control groups
    (version 2) leave, a container's for one: memory past these is not refused, the process is killed. The limit on
    locked memory (`ulimit -l`) is left out on purpose: CUDA's driver pins pages by itself, and they do not count
    against it.

    Args:
        root: Where `proc` and `sys` are.
    """
    left = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/meminfo").read_text().splitlines()
        left.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    top = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError, StopIteration):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        group = top / next(line for line in lines if line.startswith("0::")).removeprefix("0::").strip("/")
        for directory in (group, *group.parents):
            if not directory.is_relative_to(top):
                break
            # Without a limit the file says `max`; the root group has none.
            with contextlib.suppress(OSError, ValueError):
                limit = int((directory / "memory.max").read_text())
                used = int((directory / "memory.current").read_text())
                stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
                left.append(limit - used + int(stat["active_file"]) + int(stat["inactive_file"]))
    return max(min(left), 0) if left else None
