"""Tensors in a safetensors file: written from where they lie and at once, read where the file is mapped."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The format's names of dtypes (https://huggingface.co/docs/safetensors)."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass
class Pieces:
    """A tensor as contiguous pieces on the CPU, one after the other, so that it need not be in memory as a whole."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Iterable[Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> Pieces:
        """A whole tensor, on any device."""
        return cls(tensor.dtype, tuple(tensor.shape), (part.detach().cpu().contiguous() for part in [tensor]))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def encode(value: Any, name: str, tensors: dict[str, Pieces]) -> Any:
    """A value as JSON, its tensors put among `tensors`, by names that begin with `name`.

    Raises:
        TypeError: If there is something else in it.
    """
    if isinstance(value, Tensor):
        tensors[name] = Pieces.of(value)
        return {"tensor": name, "on": value.device.type}
    if isinstance(value, torch.dtype):
        return {"dtype": _NAMES[value]}
    if isinstance(value, torch.device):
        return {"device": value.type}
    if isinstance(value, dict):
        return {"dict": [[key, encode(part, f"{name}.{key}", tensors)] for key, part in value.items()]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{name} is of type {type(value).__name__}")


def decode(value: Any, tensors: dict[str, Tensor], device: torch.device, main: str) -> Any:
    """What `encode` was given. What was on a device of type `main` is on `device` now."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]].to(device if value["on"] == main else "cpu", copy=True)
    if "dtype" in value:
        return DTYPES[value["dtype"]]
    if "device" in value:
        return device if value["device"] == main else torch.device("cpu")
    return {key: decode(part, tensors, device, main) for key, part in value["dict"]}


def write(path: str | os.PathLike, tensors: dict[str, Pieces], metadata: dict[str, str]) -> None:
    """Writes a safetensors file, all of it or nothing: a file that was there is replaced when the new one is whole.

    Args:
        path: Where to. The new file lies beside it, with a name of its own, until it is whole.
        tensors, metadata: What it holds.

    Raises:
        OSError: If it cannot be written.
    """
    # The widest elements first, so that all are aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        dtype, shape = _NAMES[tensors[name].dtype], list(tensors[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                for piece in tensors[name].pieces:
                    if piece.numel():
                        file.write(piece.reshape(-1).view(torch.uint8).numpy().data)
            if file.tell() != 8 + len(text) + end:
                raise AssertionError("a tensor's pieces are not its shape")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()


class Mapped:
    """A safetensors file, mapped: its tensors are read from the disk where they are touched, and hold the mapping.

    Raises:
        OSError: If it cannot be opened.
        ValueError: If it is no such file, or not whole.
    """

    def __init__(self, path: str | os.PathLike):
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= size - 8:
                    raise ValueError("its header is cut off")
                header = json.loads(file.read(length))
                # Private: nothing that is written to it reaches the file.
                self._memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self._start, self._entries = 8 + length, header
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            if self._start + end != size:
                raise ValueError(f"it has {size} bytes, not {self._start + end}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{os.fspath(path)!r} is not a whole safetensors file: {error}") from error

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name, on the CPU."""
        return {name: self._tensor(**entry) for name, entry in self._entries.items()}

    def _tensor(self, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
        if not math.prod(shape):
            return torch.empty(shape, dtype=DTYPES[dtype])
        start = self._start + data_offsets[0]
        flat = torch.frombuffer(self._memory, dtype=DTYPES[dtype], count=math.prod(shape), offset=start)
        return flat.view(shape)
