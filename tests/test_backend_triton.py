"""The Triton attention backend against softmax attention in float64, and against itself wherever items lie.

The same tests run twice: on a CUDA device, marked `gpu`, and on the CPU under Triton's interpreter. Which of the two a
kernel is made for is settled when Triton is imported, so the interpreter has a process of its own, which
`test_under_the_interpreter` starts. To run one of its tests: `TRITON_INTERPRET=1 pytest tests/test_backend_triton.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_hisparse import HierarchicalSparseCache
from hf_hisparse.backends import BACKENDS
from hf_hisparse.layout import ItemLayout
from tests.helpers import METHODS, decode, interpret, left_padding, make_model, random_ids, same_bits
from tests.test_backends import Case


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def runs_kernels(test: Callable) -> Callable:
    """Marks a test that runs kernels: on a CUDA device, or wherever they are interpreted."""
    return needs_triton(test if INTERPRETED else pytest.mark.gpu(test))


DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(
        torch.bfloat16,
        marks=pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter multiplies bfloat16 wrongly"),
    ),
]
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of the largest value: float32 sums in another order; otherwise the weights and the output are rounded."""

LAYOUTS = {
    "pages of 1": ItemLayout.page_head(1, 128, 128),
    "pages of 2": ItemLayout.page_head(2, 96, 96),
    "pages of 3": ItemLayout.page_head(3, 20, 12),
    "pages of 4": ItemLayout.page_head(4, 192, 128),
    "pages of 16": ItemLayout.page_head(16, 256, 256),
    "pages of 32": ItemLayout.page_head(32, 64, 80),
    "latents": ItemLayout.token(512, 64),
    "narrow latents": ItemLayout.token(24, 8),
}
FEW = ["pages of 1", "pages of 3", "pages of 32", "narrow latents"]


class TritonCase(Case):
    """A case that the Triton backend attends to. Long keys are scaled down, or weights would be 0 and 1."""

    def __init__(self, layout: ItemLayout, tokens: int, k: int, **kwargs: Any):
        super().__init__(layout, tokens, k, **kwargs)
        self.query = self.query * min(1.0, 5 / layout.key[1] ** 0.5)

    def attend(self, buffer: Tensor | None = None, slots: Tensor | None = None, **options: Any) -> Tensor:
        if isinstance(options.get("sinks"), Tensor):
            options["sinks"] = options["sinks"].to(DEVICE)
        buffer = self.buffer if buffer is None else buffer
        slots = self.slots if slots is None else slots
        tensors = (self.query, buffer, slots, self.selection, self.lengths)
        output = BACKENDS["triton"]().attend(*(tensor.to(DEVICE) for tensor in tensors), self.layout, 0.3, **options)
        assert output.dtype == self.query.dtype
        return output.cpu()

    def check(self, **options: Any) -> None:
        largest = max(float(part.abs().max()) for part in self.parts)
        torch.testing.assert_close(
            self.attend(**options).double(),
            self.expected(**options),
            rtol=0,
            atol=TOLERANCE[self.query.dtype] * largest,
        )


@pytest.fixture
def many_runs(monkeypatch) -> None:
    """Splits short selections as long ones are: a tile of 16 tokens a run, and two for a row with several blocks."""
    from hf_hisparse.backends import triton

    def plan(rows, heads, tokens, *args):
        tiles = 1 if heads <= 16 else 2
        return triton.Plan(16, 16, tiles, -(-tokens // (16 * tiles)), 4, 1)

    monkeypatch.setattr(triton, "plan", plan)


# ---- what runs where -------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_under_the_interpreter():
    """Everything that runs kernels, in a process where they run on the CPU. Importing the package imports no kernel."""
    interpret(__file__, "hf_hisparse.backends.triton")


def test_without_triton(monkeypatch):
    monkeypatch.delitem(sys.modules, "hf_hisparse.backends.triton", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ValueError) as error:
        HierarchicalSparseCache(make_model("llama"), backend="triton")
    for said in ('`backend="triton"`', "pip install triton", '`backend="reference"`'):
        assert said in str(error.value)


@needs_triton
def test_without_cuda(monkeypatch):
    from hf_hisparse.backends import triton

    monkeypatch.setattr(triton, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError) as error:
        HierarchicalSparseCache(make_model("llama"), backend="triton")
    for said in ('`backend="triton"`', "CUDA", "install", '`backend="reference"`'):
        assert said in str(error.value)


# ---- right -----------------------------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_against_float64(layout, dtype):
    """Several runs a row, merged."""
    layout = LAYOUTS[layout]
    case = TritonCase(layout, tokens=400, k=300 // layout.page_size, rows=2, heads=3, dtype=dtype)
    case.check()


@runs_kernels
@pytest.mark.parametrize("options", [("softcap",), ("sinks",), ("softcap", "sinks")], ids="+".join)
@pytest.mark.parametrize("k", [40, 300])
@pytest.mark.parametrize("layout", ["pages of 1", "latents"])
def test_options_against_float64(layout, k, options):
    """Of one run a row, and of several."""
    case = TritonCase(LAYOUTS[layout], tokens=k + 10, k=k, rows=2, heads=3)
    given = {"softcap": 1.5, "sinks": case.sinks}
    case.check(**{name: given[name] for name in options})


@runs_kernels
@pytest.mark.parametrize("heads", [1, 2, 8, 16, 17, 40, 128])
@pytest.mark.parametrize("layout", ["pages of 3", "narrow latents"])
def test_any_number_of_heads(layout, heads):
    case = TritonCase(LAYOUTS[layout], tokens=70, k=40, rows=2, heads=heads)
    case.check(sinks=case.sinks)


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "k"), [(1, 300), (2, 60)])
def test_latent_attention_at_full_size(rows, k, dtype):
    case = TritonCase(LAYOUTS["latents"], tokens=320, k=k, rows=rows, heads=128, dtype=dtype)
    sample = [0, 1, 15, 16, 63, 64, 127]
    output = case.attend()[:, sample]
    case.query = case.query[:, sample]
    torch.testing.assert_close(output.double(), case.expected(), rtol=0, atol=4 * TOLERANCE[dtype])


@runs_kernels
@settings(
    deadline=None, max_examples=5 if INTERPRETED else 100, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from(FEW), st.integers(1, 60), st.integers(1, 60), st.sampled_from([1, 17]), st.integers(0, 1000))
def test_against_float64_with_random_masks(many_runs, layout, tokens, k, heads, seed):
    """Part-filled pages, padding on the left, selections with holes, and runs in which there is nothing."""
    case = TritonCase(LAYOUTS[layout], tokens, k, heads=heads, rows=2, seed=seed)
    case.check()
    case.check(softcap=2.0, sinks=case.sinks)


@runs_kernels
@pytest.mark.parametrize("layout", FEW)
def test_views_as_the_cache_passes_them(layout, many_runs):
    """A buffer that rows share, queries and sinks that are views, a selection whose columns are apart."""
    case = TritonCase(LAYOUTS[layout], tokens=90, k=-(-60 // LAYOUTS[layout].page_size), rows=3, heads=2)
    case.lengths[:] = case.lengths[0]
    case.selection, case.slots = (t[:1].expand(3, -1).contiguous() for t in (case.selection, case.slots))
    case.buffer = case.buffer[:1].repeat(3, 1, 1)
    case.sinks = case.sinks[:1].repeat(3, 1)
    expected = case.attend(sinks=case.sinks)

    def on(tensor: Tensor) -> Tensor:
        return tensor.to(DEVICE)

    apart = on(case.query).transpose(1, 2).contiguous().transpose(1, 2)
    heads_first = on(case.query).transpose(0, 1).contiguous().transpose(0, 1)
    spread = torch.stack((case.selection, case.slots), dim=-1)
    for query in (apart, heads_first):
        output = BACKENDS["triton"]().attend(
            query,
            on(case.buffer[:1]).expand(3, -1, -1),
            on(spread)[..., 1],
            on(spread)[..., 0],
            on(case.lengths[:1]).expand(3),
            case.layout,
            0.3,
            sinks=on(case.sinks[:1]).expand(3, -1),
        )
        assert torch.equal(output.cpu(), expected)


# ---- the same bits wherever items lie --------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [40, 260])
@pytest.mark.parametrize("layout", FEW)
def test_where_an_item_lies_changes_no_bit(layout, k, dtype):
    layout = LAYOUTS[layout]
    k = -(-k // layout.page_size)
    case = TritonCase(layout, tokens=k * layout.page_size + 30, k=k, rows=2, heads=2, dtype=dtype)
    expected = case.attend()
    generator = torch.Generator().manual_seed(7)
    for slots in (k, 2 * k + 1):
        buffer = torch.full((2, slots, layout.elements), torch.nan, dtype=dtype)
        moved = torch.full_like(case.slots, -1)
        for row in range(2):
            held = case.slots[row] >= 0
            places = torch.randperm(slots, generator=generator)[: len(held)].int()
            moved[row, held] = places[held]
            buffer[row, places[held].long()] = case.buffer[row, case.slots[row, held].long()]
        assert torch.equal(case.attend(buffer, moved), expected)


@runs_kernels
@pytest.mark.parametrize("loud", [torch.inf, torch.nan])
@pytest.mark.parametrize("layout", FEW)
def test_bytes_beyond_the_valid_tokens_do_not_matter(layout, loud, many_runs):
    case = TritonCase(LAYOUTS[layout], tokens=50, k=40, heads=1)
    expected = case.attend()
    assert expected.isfinite().all()
    assert torch.equal(case.attend(case.buffer.masked_fill(case.buffer == 999, loud)), expected)
    # What lies behind a shorter row is bytes like any, and nothing may see them.
    keys = case.layout.keys(case.buffer)
    for row in range(3):
        for item, slot in zip(case.selection[row].tolist(), case.slots[row].tolist(), strict=True):
            for within in range(case.layout.page_size):
                if item >= 0 and item * case.layout.page_size + within >= case.lengths[row]:
                    keys[row, slot, within] = loud
                    case.layout.values(case.buffer)[row, slot, within] = loud
    assert torch.equal(case.attend(), expected)


@runs_kernels
@pytest.mark.parametrize("k", [20, 260])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_row_that_sees_nothing_gives_zeros(k, sinks):
    case = TritonCase(LAYOUTS["pages of 1"], tokens=k + 10, k=k, heads=2)
    case.selection[0] = -1
    case.slots[0] = -1
    case.lengths[1] = 0
    options = {"sinks": case.sinks} if sinks else {}
    output = case.attend(**options)
    assert not output[:2].any()
    assert output[2].any()
    case.check(**options)


@runs_kernels
@pytest.mark.parametrize("k", [1, 60])
def test_sinks_take_their_share(k, many_runs):
    """A sink as large as the only logit halves the output; one that is far larger takes all of it."""
    layout = ItemLayout.page_head(1, 2, 2)
    one = torch.full((1, k), -1, dtype=torch.int32)
    one[0, 0] = 0
    tensors = (torch.tensor([[[2.0, 0.0]]]), torch.tensor([[[1.0, 0.0, 3.0, 5.0]]]), one, one)
    tensors += (torch.tensor([1]),)

    def attend(*sink: float) -> Tensor:
        sinks = torch.tensor([sink], device=DEVICE) if sink else None
        return BACKENDS["triton"]().attend(*(t.to(DEVICE) for t in tensors), layout, 0.5, sinks=sinks).cpu()

    assert attend().tolist() == [[[3.0, 5.0]]]
    torch.testing.assert_close(attend(1.0), torch.tensor([[[1.5, 2.5]]]))
    assert attend(200.0).abs().max() < 1e-30
    assert attend(-torch.inf).tolist() == [[[3.0, 5.0]]]


@runs_kernels
def test_offsets_beyond_32_bits():
    """The last slot of a buffer of more than 2^31 elements, of which only that slot is ever touched."""
    layout = ItemLayout.page_head(32, 128, 128)
    slots = 2**31 // layout.elements + 8
    buffer = torch.empty(2, slots, layout.elements, dtype=torch.float16, device=DEVICE)
    case = TritonCase(layout, tokens=30, k=1, rows=2, dtype=torch.float16)
    case.selection[:] = 0
    case.slots[:] = slots - 1
    packed = layout.pack(case.parts)
    buffer[:, -1] = packed[:, 0].to(DEVICE)
    torch.testing.assert_close(case.attend(buffer).double(), case.expected(), rtol=0, atol=5e-3)


@runs_kernels
@pytest.mark.parametrize("shape", [(0, 4, 9), (2, 0, 9), (2, 4, 0)])
def test_nothing_to_do(shape):
    rows, heads, k = shape
    layout = LAYOUTS["pages of 4"]
    empty = torch.zeros(rows, k, dtype=torch.int32, device=DEVICE)
    lengths = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    query = torch.ones(rows, heads, 192, device=DEVICE)
    buffer = torch.ones(rows, 3, layout.elements, device=DEVICE)
    output = BACKENDS["triton"]().attend(query, buffer, empty, empty, lengths, layout, 1.0)
    assert output.shape == (rows, heads, 128) and not output.any()


# ---- a whole model ---------------------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize("method", METHODS)
def test_a_model_equals_its_resident_oracle(method):
    """And the reference backend, but for the rounding of float32."""
    name, options = METHODS[method]
    prompt, new, overrides = 150, 20, {}
    if INTERPRETED:
        # It takes its time, above all over a prompt whose queries all have their own selection.
        prompt, new, overrides = (12, 2, {"index_topk": 8}) if name == "deepseek_v32" else (60, 3, {})
    model = make_model(name, num_hidden_layers=2, **overrides).to(DEVICE)
    ids, mask = (t.to(DEVICE) for t in (random_ids(2, prompt + new), left_padding(2, prompt + new)))

    def logits(**more: Any) -> Tensor:
        return decode(model, ids, HierarchicalSparseCache(model, **options, **more), prompt, mask)

    output = logits(backend="triton", buffer_size=40)
    assert same_bits(output, logits(backend="triton", offload=False))
    reference = logits(backend="reference")
    torch.testing.assert_close(output, reference, rtol=0, atol=1e-4 * float(reference.abs().max()))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="there is no device to wait for")
@needs_triton
@pytest.mark.parametrize("layout", ["pages of 32", "latents"])
def test_no_synchronisation_and_capture(layout):
    """The host never waits for the device, and a captured graph does the same with other tensors."""
    layout = LAYOUTS[layout]
    case = TritonCase(layout, 2100, 2048 // layout.page_size, rows=2, heads=32, dtype=torch.bfloat16)
    names = ("query", "buffer", "slots", "selection", "lengths")
    tensors = [getattr(case, name).to(DEVICE) for name in names]
    attend = BACKENDS["triton"]().attend
    expected = attend(*tensors, layout, 0.3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(*tensors, layout, 0.3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend(*tensors, layout, 0.3)
    other = torch.randn_like(tensors[0])
    for query in (tensors[0].clone(), other):
        tensors[0].copy_(query)
        graph.replay()
        assert torch.equal(output, expected if query is not other else attend(*tensors, layout, 0.3))


# ---- launch shapes ---------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_launch_shapes(layout, itemsize):
    """Every token is in one run, no run is past the end, and one sequence is split over the device."""
    from hf_hisparse.backends.triton import Device, Widths, plan

    widths = Widths.of(LAYOUTS[layout])
    assert widths.shared == ("latents" in layout)
    for shared_bytes in (232448, 166912, 101376):
        device = Device(132, shared_bytes)
        for rows in (1, 3, 8, 64, 1000):
            for heads in (1, 4, 16, 128):
                for tokens in (1, 100, 2048, 5000):
                    shape = plan(rows, heads, tokens, widths, itemsize, device)
                    size = shape.tokens * shape.tiles
                    assert (shape.splits - 1) * size < tokens <= shape.splits * size
                    assert shape.heads < 32 or shape.heads < 2 * heads
        if itemsize == 2 and shared_bytes > 200000:
            shape = plan(8, 4, 2048, widths, itemsize, device)
            assert 8 * shape.splits >= 120
    assert Widths.of(LAYOUTS["latents"])[:4] == (512, 512, 64, 512)
    assert Widths.of(LAYOUTS["pages of 4"])[:4] == (128, 128, 64, 128)


@needs_triton
def test_widths_that_do_not_fit():
    from hf_hisparse.backends.triton import Device, Widths, plan

    widths = Widths.of(ItemLayout.page_head(1, 4096, 4096))
    with pytest.raises(ValueError, match='`layout`.*8192 elements of 4 bytes.*101376 bytes.*backend="reference"'):
        plan(1, 1, 100, widths, 4, Device(132, 101376))


# ---- what is refused -------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[str, Callable[[Tensor], Tensor], list[str]]] = {
    "query of another width": ("query", lambda t: t[..., :15], ["[rows, heads, 16]", "[3, 4, 15]"]),
    "query of two dimensions": ("query", lambda t: t[0], ["[rows, heads, 16]", "[4, 16]"]),
    "query in float64": ("query", lambda t: t.double(), ["[3, 4, 16]", "torch.float32", "torch.float64"]),
    "buffer of other items": ("buffer", lambda t: t[..., 1:], ["[3, slots, 112]", "111]"]),
    "buffer of other rows": ("buffer", lambda t: t[:2], ["[3, slots, 112]", "[2, "]),
    "buffer in another dtype": ("buffer", lambda t: t.half(), ["torch.float32", "torch.float16"]),
    "buffer with gaps": ("buffer", lambda t: t[:, ::2], ["one after the other", "strides", "contiguous"]),
    "selection of other rows": ("selection", lambda t: t[:2], ["[3, k]", "[2, 9]"]),
    "selection of floats": ("selection", lambda t: t.float(), ["[3, 9]", "torch.int32", "torch.float32"]),
    "slots of another k": ("slots", lambda t: t[:, :5], ["[3, 9]", "[3, 5]"]),
    "lengths of one row": ("lengths", lambda t: t[:1], ["[3]", "[1]"]),
    "lengths of two dimensions": ("lengths", lambda t: t[:, None], ["[3]", "[3, 1]"]),
    "sinks a head": ("sinks", lambda t: t[0], ["[3, 4]", "[4]"]),
    "lengths elsewhere": ("lengths", lambda t: t.to("meta"), ["[3]", "meta", "`query`"]),
}


@runs_kernels
@pytest.mark.parametrize("wrong", WRONG)
def test_arguments_that_cannot_be(wrong):
    name, change, said = WRONG[wrong]
    case = Case(ItemLayout.page_head(4, 16, 12), tokens=50, k=9)
    names = ("query", "buffer", "slots", "selection", "lengths", "sinks")
    tensors = {name: getattr(case, name).to(DEVICE) for name in names}
    tensors[name] = change(tensors[name])
    with pytest.raises(ValueError) as error:
        BACKENDS["triton"]().attend(**tensors, layout=case.layout, scale=0.3)
    for text in (f"`{name}`", *said):
        assert text in str(error.value)


@runs_kernels
@pytest.mark.skipif(INTERPRETED, reason="kernels run on the CPU")
def test_tensors_on_the_cpu_are_refused():
    case = Case(ItemLayout.page_head(4, 16, 12), tokens=50, k=9)
    tensors = (case.query, case.buffer, case.slots, case.selection, case.lengths)
    with pytest.raises(ValueError, match='`query` .*cpu.*CUDA.*backend="reference"'):
        BACKENDS["triton"]().attend(*tensors, case.layout, 0.3)
