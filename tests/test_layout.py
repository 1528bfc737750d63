"""How an item's bytes are laid out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_hisparse.layout import ItemLayout, distinct
from tests.helpers import DEVICE


def parts_of(layout: ItemLayout, rows: int, tokens: int) -> tuple[torch.Tensor, ...]:
    """Parts in which every element is another number, none of them zero."""
    total = rows * tokens * sum(layout.widths)
    numbers = torch.arange(1, total + 1, dtype=torch.int32, device=DEVICE)
    sizes = [rows * tokens * width for width in layout.widths]
    return tuple(
        part.view(rows, tokens, width) for part, width in zip(numbers.split(sizes), layout.widths, strict=True)
    )


LAYOUTS = st.one_of(
    st.builds(ItemLayout.page_head, st.integers(1, 9), st.integers(1, 6), st.integers(1, 6)),
    st.builds(ItemLayout.token, st.integers(1, 6), st.integers(1, 6)),
)


@given(LAYOUTS, st.integers(1, 3), st.integers(1, 40))
def test_unpack_inverts_pack(layout, rows, tokens):
    parts = parts_of(layout, rows, tokens)
    items = layout.pack(parts)
    assert items.shape == (rows, layout.items(tokens), layout.elements)
    for part, back in zip(parts, layout.unpack(items, tokens), strict=True):
        assert torch.equal(part, back)


@given(LAYOUTS, st.integers(1, 3), st.integers(1, 40))
def test_pack_keeps_every_element_once_and_pads_with_zeros(layout, rows, tokens):
    parts = parts_of(layout, rows, tokens)
    items = layout.pack(parts)
    for row in range(rows):
        given = torch.cat([part[row].flatten() for part in parts]).sort().values
        held = items[row].flatten().sort().values
        padding = held.numel() - given.numel()
        assert not held[:padding].any()
        assert torch.equal(held[padding:], given)


@given(LAYOUTS, st.integers(1, 3), st.integers(1, 40))
def test_an_item_holds_its_own_tokens(layout, rows, tokens):
    """Element by element: part `p` of token `t` lies where the docstring says."""
    parts = parts_of(layout, rows, tokens)
    items = layout.pack(parts)
    offset = 0
    for part, width in zip(parts, layout.widths, strict=True):
        for token in range(tokens):
            item, within = divmod(token, layout.page_size)
            begin = offset + within * width
            assert torch.equal(items[:, item, begin : begin + width], part[:, token])
        offset += layout.page_size * width


@given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 6), st.integers(1, 30))
def test_keys_and_values_of_pages(page_size, key_width, value_width, tokens):
    layout = ItemLayout.page_head(page_size, key_width, value_width)
    key, value = parts_of(layout, 2, tokens)
    items = layout.pack((key, value))
    keys, values = layout.keys(items), layout.values(items)
    assert keys.shape == (2, layout.items(tokens), page_size, key_width)
    assert values.shape == (2, layout.items(tokens), page_size, value_width)
    assert torch.equal(keys.flatten(1, 2)[:, :tokens], key)
    assert torch.equal(values.flatten(1, 2)[:, :tokens], value)
    assert not keys.flatten(1, 2)[:, tokens:].any() and not values.flatten(1, 2)[:, tokens:].any()


def test_keys_of_a_latent_row_are_the_whole_row_and_values_its_latent():
    layout = ItemLayout.token(5, 3)
    latent, rotary = parts_of(layout, 2, 7)
    items = layout.pack((latent, rotary))
    assert layout.page_size == 1 and layout.elements == 8
    assert torch.equal(layout.keys(items).squeeze(2), torch.cat((latent, rotary), dim=-1))
    assert torch.equal(layout.values(items).squeeze(2), latent)


@pytest.mark.parametrize(("tokens", "items"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_items_of_tokens(tokens, items):
    assert ItemLayout.page_head(4, 1, 1).items(tokens) == items


@given(st.lists(st.integers(0, 3), min_size=1, max_size=7), st.integers(0, 2), st.integers(1, 90), st.data())
def test_distinct_is_what_differs_in_a_bit(kinds, which, tokens, data):
    """Zeros of either sign differ, and the same NaN does not."""
    dtypes = (torch.float32, torch.bfloat16, torch.bool)
    parts = [torch.zeros(len(kinds), 1 + (dtype.itemsize == 4), tokens, 2, dtype=dtype) for dtype in dtypes]
    at = data.draw(st.integers(0, tokens - 1))
    values = (0.0, -0.0, float("nan"), 1.0) if which < 2 else (False, True, False, True)
    for element, kind in enumerate(kinds):
        parts[which][element, -1, at, 1] = values[kind]
    # As attention has them: heads beside each other.
    parts = [part.transpose(1, 2).contiguous().transpose(1, 2).to(DEVICE) for part in parts]
    first, found = distinct(parts)
    names = [kind % 2 if which == 2 else kind for kind in kinds]
    assert [names[element] for element in first] == list(dict.fromkeys(names))
    assert [names[first[kind]] for kind in found] == names
