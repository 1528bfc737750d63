"""Which tokens of a batch are padding, and where the others lie once it is left out."""

from __future__ import annotations

import torch
from torch import Tensor


def seen_by_newest(mask: Tensor, columns: int) -> Tensor:
    """What the newest query may see of the first columns, `[batch, columns]` bool.

    Args:
        mask: `[batch, columns or more]`, or `[batch, 1, queries, columns, more or 1]`, bool, integer or additive.
        columns: How many.
    """
    if mask.ndim == 2:
        return mask[:, :columns].bool()
    newest = mask[:, 0, -1].expand(-1, columns) if mask.shape[-1] == 1 else mask[:, 0, -1, :columns]
    return newest >= 0 if mask.is_floating_point() else newest.bool()


class Padding:
    """The padding of a batch, on the left of its sequences, on the right, or within.

    A batch has columns, and some of them hold padding in some of its sequences. A history holds none: the tokens of a
    sequence lie one after the other, at the positions 0, 1, 2 and so on, as they would if it were alone. Immutable.

    Args:
        kept: `[batch, columns]` bool, False for padding. What comes after these columns are tokens.
        counts: Columns of padding in every sequence. If they are not given, this waits for the device.
    """

    def __init__(self, kept: Tensor, counts: list[int] | None = None):
        self.counts: list[int] = (kept.shape[1] - kept.sum(1)).tolist() if counts is None else counts
        self.kept = kept if any(self.counts) else kept[:, :0]

    @classmethod
    def none(cls, batch: int, device: torch.device) -> Padding:
        """That of a batch without any."""
        return cls(torch.ones(batch, 0, dtype=torch.bool, device=device), [0] * batch)

    def __bool__(self) -> bool:
        return self.kept.shape[1] > 0

    @property
    def most(self) -> int:
        """Columns of padding in the sequence that has the most."""
        return max(self.counts, default=0)

    def first(self, columns: int) -> Tensor:
        """Which of the first columns are no padding, `[batch, columns]` bool."""
        more = columns - self.kept.shape[1]
        return torch.nn.functional.pad(self.kept, (0, more), value=True) if more > 0 else self.kept[:, :columns]

    def lengths(self, columns: int) -> Tensor:
        """Tokens of every sequence among the first columns, `[batch]` int64."""
        return self.kept[:, :columns].sum(1) + max(columns - self.kept.shape[1], 0)

    def columns(self, columns: int) -> Tensor:
        """The column of each position among the first columns, `[batch, columns]` int64; last those of padding."""
        return torch.sort(self.first(columns).byte(), dim=1, descending=True, stable=True).indices

    def positions(self, columns: int) -> Tensor:
        """The position of each of the first columns, `[batch, columns]` int64; of padding, that of a token near it."""
        return (self.first(columns).cumsum(1) - 1).clamp(min=0)

    def matches(self, seen: Tensor) -> Tensor:
        """Whether all but padding is seen, `[]` bool on the device. `seen` is `[batch, columns]` bool."""
        kept = self.kept.to(seen.device)[:, : seen.shape[1]]
        padded = kept.shape[1]
        rest = seen[:, padded:].all()
        return rest & (seen[:, :padded] == kept).all() if padded else rest

    def cut(self, columns: int) -> Padding:
        """That of the first columns."""
        return Padding(self.kept[:, :columns]) if columns < self.kept.shape[1] else self

    def extended(self, columns: int, more: Padding) -> Padding:
        """That of the first columns, and behind them more."""
        if not more:
            return self
        return Padding(
            torch.cat((self.first(columns), more.kept), dim=1),
            [a + b for a, b in zip(self.counts, more.counts, strict=True)],
        )

    def select(self, index: Tensor, counted: list[int]) -> Padding:
        """That of the sequences at `index`, on the device and as numbers."""
        return Padding(self.kept.index_select(0, index), [self.counts[i] for i in counted])


def take(part: Tensor, index: Tensor, dim: int) -> Tensor:
    """`part` `[batch, ...]` with what its dimension `dim` has at `index` `[batch, n]`, for each sequence its own."""
    shape = [1] * part.ndim
    shape[0], shape[dim] = index.shape
    return torch.take_along_dim(part, index.view(shape), dim)
