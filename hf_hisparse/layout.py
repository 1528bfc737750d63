"""How one item's bytes are laid out. The only place where the strides of a page or of a latent row are written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes: of them equal ones are the same bits, zeros and NaNs too."""


def select_rows(tensor: Tensor, index: Tensor) -> Tensor:
    """The rows of a tensor at `index`, which may repeat; in its place if they are as many, so that it does not move."""
    selected = tensor.index_select(0, index)
    return tensor.copy_(selected) if len(selected) == len(tensor) else selected


def distinct(parts: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Which batch elements there are, each once, and which of these every element is, bit for bit.

    If there are several, this waits for the device.

    Args:
        parts: `[batch, heads, tokens, width]` each, of any dtypes.

    Returns:
        The first element of each kind, in order, and for every element the index of its own in these.
    """
    bits = [part.view(BITS[part.dtype.itemsize]) for part in parts]
    if len(bits[0]) == 1:
        return [0], [0]
    # What differs mostly does so at its end, also where it begins alike: only what ends alike is compared.
    endings = bits[0][:, :, -64:].cpu()
    first: list[int] = []
    kinds: list[int] = []
    ending_alike: dict[bytes, list[int]] = {}
    for element, ending in enumerate(endings):
        alike = ending_alike.setdefault(ending.numpy().tobytes(), [])
        same = (kind for kind in alike if all(torch.equal(part[first[kind]], part[element]) for part in bits))
        kind = next(same, len(first))
        if kind == len(first):
            first.append(element)
            alike.append(kind)
        kinds.append(kind)
    return first, kinds


@dataclass(frozen=True)
class ItemLayout:
    """The layout of an item: `page_size` tokens of one row, as one contiguous run of elements.

    A token arrives as one or more parts (a key and a value; a latent and a rotary key). Within an item each part is
    contiguous over the page, `[part][token][width]`, so that the keys of a page are one matrix and so are its values.

    Args:
        page_size: Tokens an item.
        widths: Elements a token in each part.
        key: `(offset, width)` of the keys within an item: the matrix `[page_size, width]` that starts at `offset`.
        value: The same for the values. They may overlap the keys, as they do for latent rows.
    """

    page_size: int
    widths: tuple[int, ...]
    key: tuple[int, int]
    value: tuple[int, int]

    @classmethod
    def page_head(cls, page_size: int, key_width: int, value_width: int) -> ItemLayout:
        """A page of one KV head: the keys of its tokens, then their values."""
        return cls(page_size, (key_width, value_width), (0, key_width), (page_size * key_width, value_width))

    @classmethod
    def token(cls, latent_width: int, rotary_width: int) -> ItemLayout:
        """One token's MLA row, `[latent, rotary key]`: the keys are the whole row, the values its latent part."""
        return cls(1, (latent_width, rotary_width), (0, latent_width + rotary_width), (0, latent_width))

    @property
    def elements(self) -> int:
        """Elements an item."""
        return self.page_size * sum(self.widths)

    def items(self, tokens: int) -> int:
        """Items that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        """Packs parts of shape `[rows, tokens, width]` into items `[rows, items, elements]`, the last maybe in part.

        Padding is zeros, never uninitialised memory: a masked value still meets a multiplication by zero.
        """
        rows, tokens = parts[0].shape[:2]
        items = self.items(tokens)
        packed = parts[0].new_zeros(rows, items, self.elements)
        offset = 0
        full = tokens // self.page_size
        for part, width in zip(parts, self.widths, strict=True):
            span = self.page_size * width
            packed[:, :full, offset : offset + span] = part[:, : full * self.page_size].reshape(rows, full, span)
            if full < items:
                rest = part[:, full * self.page_size :].flatten(1)
                packed[:, full, offset : offset + rest.shape[1]] = rest
            offset += span
        return packed

    def unpack(self, items: Tensor, tokens: int) -> tuple[Tensor, ...]:
        """The inverse of `pack`: parts of shape `[rows, tokens, width]`."""
        rows, count = items.shape[:2]
        parts = []
        offset = 0
        for width in self.widths:
            span = self.page_size * width
            part = items[:, :, offset : offset + span].reshape(rows, count * self.page_size, width)
            parts.append(part[:, :tokens])
            offset += span
        return tuple(parts)

    def keys(self, items: Tensor) -> Tensor:
        """The keys of items `[..., elements]`, as `[..., page_size, width]`."""
        return self._matrix(items, *self.key)

    def values(self, items: Tensor) -> Tensor:
        """The values of items `[..., elements]`, as `[..., page_size, width]`."""
        return self._matrix(items, *self.value)

    def _matrix(self, items: Tensor, offset: int, width: int) -> Tensor:
        span = self.page_size * width
        return items[..., offset : offset + span].unflatten(-1, (self.page_size, width))
