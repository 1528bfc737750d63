"""What a cache has done: hits, misses and bytes, a layer and a step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class LayerStats:
    """One hierarchical layer.

    Attributes:
        layer: Its index in the model.
        hits, misses: Selected items that were and were not in the device buffer, over all rows and steps.
        bytes_moved: Bytes fetched from host memory: misses times the size of an item.
        device_bytes, host_bytes: Bytes held.
        steps: `[(hits, misses), ...]` of the latest steps, oldest first.
    """

    layer: int
    hits: int
    misses: int
    bytes_moved: int
    device_bytes: int
    host_bytes: int
    steps: list[tuple[int, int]]

    @property
    def hit_rate(self) -> float | None:
        """Hits over all selected items; None before the first."""
        return _rate(self.hits, self.misses)


@dataclass(frozen=True)
class CacheStats:
    """A whole cache: its layers, and their sums."""

    layers: list[LayerStats]
    dense_bytes: int
    """Bytes that a dense cache would hold on the device for the hierarchical layers' history."""

    def _sum(self, name: str) -> int:
        return sum(getattr(layer, name) for layer in self.layers)

    @property
    def hits(self) -> int:
        return self._sum("hits")

    @property
    def misses(self) -> int:
        return self._sum("misses")

    @property
    def bytes_moved(self) -> int:
        return self._sum("bytes_moved")

    @property
    def device_bytes(self) -> int:
        return self._sum("device_bytes")

    @property
    def host_bytes(self) -> int:
        return self._sum("host_bytes")

    @property
    def hit_rate(self) -> float | None:
        """Hits over all selected items, layers and steps; None before the first."""
        return _rate(self.hits, self.misses)

    @property
    def step_hit_rates(self) -> list[float]:
        """The hit rate of each of the latest steps, over all layers, oldest first."""
        steps = zip(*(layer.steps for layer in self.layers if layer.steps), strict=False)
        sums = [(sum(h for h, _ in step), sum(m for _, m in step)) for step in steps]
        return [hits / (hits + misses) for hits, misses in sums if hits + misses]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, for JSON."""
        return asdict(self) | {
            name: getattr(self, name)
            for name in ("hits", "misses", "bytes_moved", "device_bytes", "host_bytes", "hit_rate")
        }


def _rate(hits: int, misses: int) -> float | None:
    return hits / (hits + misses) if hits + misses else None


def layer_stats(
    layer: int, counts: Tensor | None, log: Tensor | None, item_bytes: int, held: tuple[int, int]
) -> LayerStats:
    """The stats of a layer from its memory's counters; see `Memory.counts` and `Memory.log`."""
    hits, misses = (0, 0) if counts is None else (int(count) for count in counts)
    steps = [] if log is None else [(int(h), int(m)) for h, m in log]
    return LayerStats(layer, hits, misses, misses * item_bytes, *held, steps)
