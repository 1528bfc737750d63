"""The reference attention backend against softmax attention in float64, token by token."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_hisparse.backends import AttentionBackend, AutoBackend, ReferenceBackend
from hf_hisparse.backends.auto import _warn
from hf_hisparse.layout import ItemLayout
from tests.helpers import DEVICE


def attention(query, keys, values, seen, scale, softcap=None, sinks=None) -> Tensor:
    """One row, written out: `[heads, width]` queries over the tokens `seen` of `[tokens, width]` keys and values."""
    query, keys, values = query.double(), keys.double(), values.double()
    output = torch.zeros(len(query), values.shape[1], dtype=torch.float64)
    for head in range(len(query)):
        logits = {t: float(query[head] @ keys[t]) * scale for t in seen}
        if softcap is not None:
            logits = {t: softcap * math.tanh(logit / softcap) for t, logit in logits.items()}
        sink = [] if sinks is None else [float(sinks[head])]
        if not logits:
            continue
        top = max([*logits.values(), *sink])
        total = sum(math.exp(logit - top) for logit in [*logits.values(), *sink])
        for t, logit in logits.items():
            output[head] += math.exp(logit - top) / total * values[t]
    return output


class Case:
    """A history of which some items lie in a buffer, at random slots, among items that nobody asked for."""

    def __init__(self, layout: ItemLayout, tokens: int, k: int, rows: int = 3, heads: int = 4, seed: int = 0, **dtype):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(**dtype)

        self.layout, self.rows = layout, rows
        self.parts = tuple(draw(rows, tokens, width) for width in layout.widths)
        self.query = draw(rows, heads, layout.key[1])
        self.sinks = draw(rows, heads)
        self.lengths = tokens - torch.randint(0, tokens, (rows,), generator=generator)
        self.lengths[0] = tokens
        items = layout.items(tokens)
        k = min(k, items)
        self.selection = torch.stack([torch.randperm(items, generator=generator)[:k] for _ in range(rows)]).int()
        self.selection = self.selection.sort(dim=1).values
        hidden = torch.rand(rows, k, generator=generator) < 0.2
        self.selection = self.selection.masked_fill(hidden, -1)
        packed = layout.pack(self.parts)
        # Loud bytes wherever nothing valid lies: in other slots, and after the last token of a part-filled page.
        self.buffer = torch.full((rows, k + 5, layout.elements), 999.0).to(**dtype)
        self.slots = torch.stack([torch.randperm(k + 5, generator=generator)[:k] for _ in range(rows)]).int()
        self.slots = self.slots.masked_fill(hidden, -1)
        filled = layout.pack([torch.ones_like(part) for part in self.parts]).bool()
        for row in range(rows):
            for item, slot in zip(self.selection[row].tolist(), self.slots[row].tolist(), strict=True):
                if item >= 0:
                    self.buffer[row, slot] = torch.where(filled[row, item], packed[row, item], 999.0)

    def attend(self, buffer: Tensor | None = None, slots: Tensor | None = None, **options) -> Tensor:
        buffer = self.buffer if buffer is None else buffer
        slots = self.slots if slots is None else slots
        tensors = (self.query, buffer, slots, self.selection, self.lengths)
        if "sinks" in options:
            options["sinks"] = options["sinks"].to(DEVICE)
        return ReferenceBackend().attend(*(tensor.to(DEVICE) for tensor in tensors), self.layout, 0.3, **options).cpu()

    def expected(self, **options) -> Tensor:
        latent = self.layout.key[0] == self.layout.value[0]
        keys = torch.cat(self.parts, dim=-1) if latent else self.parts[0]
        values = self.parts[0] if latent else self.parts[1]
        outputs = []
        for row in range(self.rows):
            size, length = self.layout.page_size, int(self.lengths[row])
            tokens = [i * size + t for i in self.selection[row].tolist() if i >= 0 for t in range(size)]
            seen = [t for t in tokens if t < length]
            some = {name: value[row] if name == "sinks" else value for name, value in options.items()}
            outputs.append(attention(self.query[row], keys[row], values[row], seen, 0.3, **some))
        return torch.stack(outputs)


LAYOUTS = {
    "pages": ItemLayout.page_head(4, 16, 12),
    "single tokens": ItemLayout.page_head(1, 16, 16),
    "latent": ItemLayout.token(16, 8),
}


@pytest.mark.parametrize("options", [(), ("softcap",), ("sinks",), ("softcap", "sinks")], ids="+".join)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_against_float64(layout, options):
    case = Case(LAYOUTS[layout], tokens=50, k=9)
    given = {"softcap": {"softcap": 1.5}, "sinks": {"sinks": case.sinks}}
    chosen = {name: value for option in options for name, value in given[option].items()}
    torch.testing.assert_close(case.attend(**chosen), case.expected(**chosen).float())


@settings(max_examples=60)
@given(st.sampled_from(sorted(LAYOUTS)), st.integers(1, 30), st.integers(1, 12), st.integers(0, 1000))
def test_against_float64_with_random_masks(layout, tokens, k, seed):
    """Part-filled pages, rows of any length, and selections with holes."""
    case = Case(LAYOUTS[layout], tokens, k, heads=2, seed=seed)
    torch.testing.assert_close(case.attend(), case.expected().float())


def test_rows_are_gathered_in_blocks_and_may_share_a_buffer(monkeypatch):
    """As the queries of a prompt do: a row each, of which a few are gathered at a time."""
    layout, rows, k = ItemLayout.token(16, 8), 50, 7
    case = Case(layout, tokens=40, k=30, rows=1, heads=3)
    generator = torch.Generator().manual_seed(1)
    column = torch.stack([torch.randperm(30, generator=generator)[:k] for _ in range(rows)])
    query, sinks = torch.randn(rows, 3, 24, generator=generator), torch.randn(rows, 3, generator=generator)
    lengths = torch.randint(0, 41, (rows,), generator=generator)
    slots, selection = case.slots[0, column], case.selection[0, column]
    buffer = case.buffer.expand(rows, -1, -1)
    monkeypatch.setattr(ReferenceBackend, "block", 8 * k * layout.elements)
    tensors = (query, buffer, slots, selection, lengths)
    output = ReferenceBackend().attend(*(each.to(DEVICE) for each in tensors), layout, 0.3, sinks=sinks.to(DEVICE))
    latents, rotary = (part[0] for part in case.parts)
    for row in range(rows):
        seen = [t for t in selection[row].tolist() if 0 <= t < int(lengths[row])]
        expected = attention(query[row], torch.cat((latents, rotary), 1), latents, seen, 0.3, sinks=sinks[row])
        torch.testing.assert_close(output[row].cpu(), expected.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype):
    """Inputs are exact in float32 and so is the arithmetic: the output is right to its own dtype's half ulp, or so."""
    case = Case(LAYOUTS["pages"], tokens=50, k=9, dtype=dtype)
    output = case.attend()
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), case.expected(), rtol=torch.finfo(dtype).eps / 2 + 1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_where_an_item_lies_changes_no_bit(layout, dtype):
    case = Case(LAYOUTS[layout], tokens=60, k=10, dtype=dtype)
    expected = case.attend()
    generator = torch.Generator().manual_seed(7)
    for slots in (15, 40):
        for _ in range(5):
            buffer = torch.randn(3, slots, case.layout.elements, generator=generator).to(dtype)
            moved = torch.full_like(case.slots, -1)
            for row in range(3):
                places = torch.randperm(slots, generator=generator)
                for column, slot in enumerate(case.slots[row].tolist()):
                    if slot >= 0:
                        moved[row, column] = places[column]
                        buffer[row, places[column]] = case.buffer[row, slot]
            assert torch.equal(case.attend(buffer, moved), expected)


@pytest.mark.parametrize("loud", [torch.inf, torch.nan, 1e30])
def test_bytes_beyond_the_valid_tokens_do_not_matter(loud):
    case = Case(LAYOUTS["pages"], tokens=50, k=9)
    expected = case.attend()
    assert torch.equal(case.attend(case.buffer.masked_fill(case.buffer == 999, loud)), expected)


def test_a_row_that_selects_nothing_gives_zeros():
    case = Case(LAYOUTS["pages"], tokens=20, k=3)
    case.selection[1] = -1
    case.slots[1] = -1
    output = case.attend()
    assert not output[1].any()
    assert torch.equal(case.attend(sinks=case.sinks)[1], output[1])
    torch.testing.assert_close(output, case.expected().float())


def test_sinks_take_their_share():
    """A sink as large as the only logit halves the output; one that is far larger takes all of it."""
    layout = ItemLayout.page_head(1, 2, 2)
    tensor = partial(torch.tensor, device=DEVICE)
    buffer, one = tensor([[[1.0, 0.0, 3.0, 5.0]]]), tensor([[0]], dtype=torch.int32)
    args = (tensor([[[2.0, 0.0]]]), buffer, one, one, tensor([1]), layout, 0.5)
    attend = ReferenceBackend().attend
    assert attend(*args).tolist() == [[[3.0, 5.0]]]
    assert attend(*args, sinks=tensor([[1.0]])).tolist() == [[[1.5, 2.5]]]
    assert attend(*args, sinks=tensor([[200.0]])).abs().max() < 1e-30


class Recorder(ReferenceBackend):
    """The reference, counting its calls; it may fail instead."""

    def __init__(self, failure: Exception | None = None):
        self.calls, self.failure = 0, failure

    def attend(self, *args, **kwargs) -> Tensor:
        self.calls += 1
        if self.failure is not None:
            raise self.failure
        return super().attend(*args, **kwargs)


def attend_to_something(backend: AttentionBackend, device: str) -> Tensor:
    layout = ItemLayout.token(8, 4)
    generator = torch.Generator().manual_seed(0)
    query, buffer = torch.randn(2, 3, 12, generator=generator), torch.randn(2, 6, 12, generator=generator)
    slots = torch.tensor([[3, 1, 0], [2, 5, -1]], dtype=torch.int32)
    tensors = (tensor.to(device) for tensor in (query, buffer, slots, slots, torch.full((2,), 9)))
    return backend.attend(*tensors, layout, 0.5)


def test_the_cpu_takes_the_reference():
    triton = Recorder()
    expected = attend_to_something(ReferenceBackend(), "cpu")
    assert torch.equal(attend_to_something(AutoBackend(lambda: triton), "cpu"), expected)
    assert triton.calls == 0


@pytest.mark.gpu
def test_a_gpu_takes_triton():
    triton = Recorder()
    auto = AutoBackend(lambda: triton)
    for _ in range(2):
        attend_to_something(auto, "cuda")
    assert triton.calls == 2


@pytest.mark.gpu
def test_a_gpu_without_triton_takes_the_reference_and_says_why_once():
    _warn.cache_clear()
    triton = Recorder(RuntimeError("no C compiler"))
    auto = AutoBackend(lambda: triton)
    with pytest.warns(RuntimeWarning, match=r"slower.*RuntimeError: no C compiler") as caught:
        outputs = [attend_to_something(auto, "cuda") for _ in range(2)]
    assert len(caught) == 1 and triton.calls == 1
    assert all(torch.equal(output, attend_to_something(ReferenceBackend(), "cuda")) for output in outputs)


@pytest.mark.gpu
def test_running_out_of_memory_chooses_nothing():
    auto = AutoBackend(lambda: Recorder(torch.OutOfMemoryError("no memory")))
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        attend_to_something(auto, "cuda")
