"""What a cache's decode steps selected, recorded so that it can be replayed, simulated and plotted."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, OSError, RuntimeError, TypeError, ValueError)
"""What reading a file raises that is no trace, or not whole."""
FORMAT = "hf_hisparse trace 1"
"""What a file says that it is; the number is raised when that changes."""


@dataclass
class LayerTrace:
    """One hierarchical layer.

    Attributes:
        layer: Its index in the model.
        page_size: Tokens an item.
        item_bytes: Bytes an item.
        slots: Items a row that its device buffer held; None where the whole history was on the device.
        selections: `[steps, rows, k]` int32 item ids in order of selection, -1 for none. Rows are (sequence, KV head)
            pairs.
    """

    layer: int
    page_size: int
    item_bytes: int
    slots: int | None
    selections: np.ndarray


@dataclass
class Trace:
    """Decode steps, oldest first; `HierarchicalSparseCache.record_trace` makes them.

    Attributes:
        model, algorithm: What selected, in words.
        top_k: Tokens that a step attends to.
        batch: Sequences.
        tokens: `[steps]` int64, the length of the history at each step, its own token included. That token went to the
            device buffer before the step's selection did.
        emptied: `[steps]` bool, whether the device buffer was empty before the step: at the first, as far as is known,
            and after a prompt or several tokens at once.
        layers: What each layer selected.
    """

    model: str = ""
    algorithm: str = ""
    top_k: int = 0
    batch: int = 0
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    emptied: np.ndarray = field(default_factory=lambda: np.zeros(0, np.bool_))
    layers: list[LayerTrace] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """How many there are."""
        return len(self.tokens)

    def save(self, path: str | os.PathLike) -> None:
        """Writes a compressed `.npz` file, whole or not at all. Selections are kept as steps from item to item.

        Raises:
            OSError: If it cannot be written.
        """
        about = {name: getattr(self, name) for name in ("model", "algorithm", "top_k", "batch")}
        about["layers"] = [
            {name: value for name, value in vars(layer).items() if name != "selections"} for layer in self.layers
        ]
        arrays: dict[str, Any] = {
            f"selections.{i}": np.diff(one.selections, prepend=np.int32(0)) for i, one in enumerate(self.layers)
        }
        arrays |= {"format": FORMAT, "about": json.dumps(about), "tokens": self.tokens, "emptied": self.emptied}
        path = Path(path)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            with open(partial, "wb") as file:
                np.savez_compressed(file, **arrays)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Trace:
        """What `save` wrote.

        Raises:
            OSError: If it cannot be opened.
            ValueError: If it is not such a file, or not whole.
        """
        with open(path, "rb") as file:
            try:
                with np.load(file, allow_pickle=False) as held:
                    if (found := str(held["format"])) != FORMAT:
                        raise ValueError(f"it has the format {found!r}, and this reads {FORMAT!r}")
                    about = json.loads(str(held["about"]))
                    layers = [
                        LayerTrace(**one, selections=held[f"selections.{i}"].cumsum(-1, dtype=np.int32))
                        for i, one in enumerate(about.pop("layers"))
                    ]
                    return cls(**about, tokens=held["tokens"], emptied=held["emptied"], layers=layers)
            except DAMAGED as error:
                raise ValueError(f"{os.fspath(path)!r} is not a trace that `save` wrote: {error}") from error


class TraceRecorder:
    """Keeps what each decode step selects where it is, on the device: until `trace`, nothing waits for it."""

    def __init__(self) -> None:
        self._batch: int | None = None
        self.emptied = True
        """Whether the device buffers have been emptied since the last step."""
        self._steps: list[tuple[int, bool, list[Tensor]]] = []
        self._layers: list[dict[str, Any]] = []

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a cache records nothing."""

    def check(self, batch: int) -> None:
        """Raises `ValueError` if there are steps of another number of sequences."""
        if self._batch not in (None, batch):
            raise ValueError(
                f"`record_trace` records a batch of {self._batch} and was given a batch of {batch}; use another trace"
            )

    def add(self, tokens: int, batch: int, selections: list[Tensor], layers: list[dict[str, Any]]) -> None:
        """Adds a step.

        Args:
            tokens: The length of the history, with the step's token.
            batch: Sequences.
            selections: What every layer selected, `[rows, k]`.
            layers: What `LayerTrace` says of every layer beside that.
        """
        self._batch, self._layers = batch, layers
        self._steps.append((tokens, self.emptied, selections))
        self.emptied = False

    def fill(self, trace: Trace) -> None:
        """Puts all steps into a trace; waits for the device."""
        if not self._steps:
            return
        tokens, emptied, selections = zip(*self._steps, strict=True)
        trace.batch, trace.tokens, trace.emptied = self._batch or 0, np.array(tokens), np.array(emptied)
        trace.layers = [
            LayerTrace(**layer, selections=torch.stack(steps).cpu().numpy())
            for layer, steps in zip(self._layers, zip(*selections, strict=True), strict=True)
        ]
