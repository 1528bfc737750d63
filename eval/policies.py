"""Which items a device buffer of some size would have held, by which rule of eviction: simulated on a recorded trace.

The buffer here is the one of `hf_hisparse`, slot for slot: with `lru` the hits of every step are those that the cache
counts. The other rules differ in one number a slot, its priority, of which the lowest goes first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from hf_hisparse.trace import LayerTrace, Trace


NEVER = np.iinfo(np.int64).max
EMPTY = np.iinfo(np.int64).min
"""The priority of a slot that holds nothing."""


class Policy(ABC):
    """What a slot's priority becomes. Arrays are of one entry a slot: `old` priorities, and the step at which its item
    is used next."""

    @abstractmethod
    def brought(self, step: int, next_use: np.ndarray) -> np.ndarray | int:
        """When an item comes to it."""

    @abstractmethod
    def used(self, old: np.ndarray, step: int, next_use: np.ndarray) -> np.ndarray | int:
        """When its item is used again."""


class LRU(Policy):
    """Least recently used: what the cache does."""

    def brought(self, step: int, next_use: np.ndarray) -> int:
        return step

    def used(self, old: np.ndarray, step: int, next_use: np.ndarray) -> int:
        return step


class FIFO(LRU):
    """First in, first out."""

    def used(self, old: np.ndarray, step: int, next_use: np.ndarray) -> np.ndarray:  # type: ignore[override]
        return old


class LFU(Policy):
    """Least frequently used since it came, and of those the least recently."""

    steps = 1 << 32

    def brought(self, step: int, next_use: np.ndarray) -> int:
        return self.steps + step

    def used(self, old: np.ndarray, step: int, next_use: np.ndarray) -> np.ndarray:
        return (old // self.steps + 1) * self.steps + step


class Belady(Policy):
    """The item whose next use is farthest (Belady, IBM Systems Journal 1966): no other rule misses less."""

    def brought(self, step: int, next_use: np.ndarray) -> np.ndarray:
        return -next_use

    def used(self, old: np.ndarray, step: int, next_use: np.ndarray) -> np.ndarray:
        return -next_use


POLICIES: dict[str, Policy] = {"lru": LRU(), "fifo": FIFO(), "lfu": LFU(), "belady": Belady()}


class Rows:
    """The selections of rows that have the same shape.

    Args:
        selections: `[steps, rows, k]` int32, -1 for none.
        positions: `[steps]`, the token that is appended at each step.
        emptied: `[steps]` bool, whether the buffer is empty before it.
        page_size: Tokens an item.
    """

    def __init__(self, selections: np.ndarray, positions: np.ndarray, emptied: np.ndarray, page_size: int):
        self.selections, self.emptied = selections.astype(np.int64), emptied
        self.appended, self.opens = positions // page_size, positions % page_size == 0
        self.items = int(max(selections.max(initial=0), self.appended.max(initial=0))) + 1
        self._look_ahead()

    @classmethod
    def of(cls, trace: Trace, layers: list[LayerTrace]) -> Rows:
        """The rows of layers of one page size and one `k`, layer after layer."""
        joined = np.concatenate([layer.selections for layer in layers], axis=1)
        return cls(joined, trace.tokens - 1, trace.emptied, layers[0].page_size)

    def _look_ahead(self) -> None:
        """When what is selected, and what is appended, is selected next before the buffer is emptied."""
        rows = self.selections.shape[1]
        self.next_use = np.empty_like(self.selections)
        self.next_appended = np.empty((len(self.selections), rows), np.int64)
        following = np.full((rows, self.items + 1), NEVER)
        for step in range(len(self.selections) - 1, -1, -1):
            chosen = self.selections[step]
            self.next_use[step] = np.take_along_axis(following, chosen, axis=1)
            np.put_along_axis(following, chosen, step, axis=1)
            following[:, -1] = NEVER
            self.next_appended[step] = following[:, self.appended[step]]
            if self.emptied[step]:
                following[:] = NEVER

    def simulate(self, slots: int, policy: Policy) -> tuple[np.ndarray, np.ndarray]:
        """Hits and misses, `[steps, rows]` each, of a buffer of `slots` items, empty at first.

        Raises:
            ValueError: If a selection does not fit.
        """
        steps, rows, k = self.selections.shape
        if slots < k:
            raise ValueError(f"`slots={slots}` is fewer than the {k} items of a selection")
        hits, misses = np.zeros((2, steps, rows), np.int64)
        row = np.arange(rows)[:, None]
        for step, chosen in enumerate(self.selections):
            if step == 0 or self.emptied[step]:
                # The last column is of the item -1.
                item_slot = np.full((rows, self.items + 1), -1, np.int64)
                slot_item = np.full((rows, slots), -1, np.int64)
                priority = np.full((rows, slots), EMPTY)
            self._append(step, policy, item_slot, slot_item, priority)

            found, wanted = item_slot[row, chosen], chosen >= 0
            hit, miss = wanted & (found >= 0), wanted & (found < 0)
            hits[step], misses[step] = hit.sum(1), miss.sum(1)
            r, c = hit.nonzero()
            priority[r, found[r, c]] = policy.used(priority[r, found[r, c]], step, self.next_use[step][r, c])

            # Of the slots without a hit, those of the lowest priority; the lowest slot where they are equal.
            order = priority.copy()
            order[r, found[r, c]] = NEVER
            order = order.argsort(axis=1, kind="stable")
            victim = np.zeros((rows, slots), np.bool_)
            np.put_along_axis(victim, order, np.arange(slots) < misses[step][:, None], axis=1)
            r, slot = victim.nonzero()
            c = miss.nonzero()[1]
            item_slot[r, slot_item[r, slot]] = -1
            item_slot[r, chosen[r, c]] = slot
            slot_item[r, slot] = chosen[r, c]
            priority[r, slot] = policy.brought(step, self.next_use[step][r, c])
        return hits, misses

    def _append(
        self, step: int, policy: Policy, item_slot: np.ndarray, slot_item: np.ndarray, priority: np.ndarray
    ) -> None:
        """A new token: a use of its item where that is resident. One that opens an item brings it."""
        item, next_use = self.appended[step], self.next_appended[step]
        slot = item_slot[:, item].copy()
        r = (slot >= 0).nonzero()[0]
        priority[r, slot[r]] = policy.used(priority[r, slot[r]], step, next_use[r])
        if self.opens[step]:
            r = (slot < 0).nonzero()[0]
            s = priority[r].argmin(1)
            item_slot[r, slot_item[r, s]] = -1
            item_slot[r, item] = s
            slot_item[r, s] = item
            priority[r, s] = policy.brought(step, next_use[r])


def simulate(trace: Trace, size: float, policy: Policy) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hits, misses and bytes, `[steps, layers]` each, of buffers of `size` times what a step selects."""
    counts = np.zeros((2, trace.steps, len(trace.layers)), np.int64)
    for group in alike(trace):
        layers = [trace.layers[index] for index in group]
        slots = round(size * layers[0].selections.shape[2])
        found = np.stack(Rows.of(trace, layers).simulate(slots, policy))
        counts[:, :, group] = found.reshape(2, trace.steps, len(group), -1).sum(3)
    return counts[0], counts[1], counts[1] * np.array([layer.item_bytes for layer in trace.layers])


def alike(trace: Trace) -> list[list[int]]:
    """The indices of layers whose rows, selections and pages are of the same size."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, layer in enumerate(trace.layers):
        groups.setdefault((*layer.selections.shape[1:], layer.page_size), []).append(index)
    return list(groups.values())
