"""The backends over other libraries' kernels, against softmax attention in float64 and against themselves.

The same tests run twice: with the library itself, on a CUDA device where it is installed, and on the CPU with a
stand-in for its function, which does what the library documents and checks what it asks for.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_hisparse import HierarchicalSparseCache
from hf_hisparse.backends import BACKENDS, AttentionBackend, library
from hf_hisparse.layout import ItemLayout
from tests.helpers import decode, forward, left_padding, make_model, random_ids, same_bits
from tests.test_backends import Case


CARD = library.Device(9, 6)
"""What the stand-ins run on. So few multiprocessors that there are one, two and several runs."""

# ---- stand-ins -------------------------------------------------------------------------------------------------------


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor, seqused_k: Tensor, softmax_scale, softcap, return_lse
) -> tuple[Tensor, Tensor]:
    """FlashAttention-4's function: one query a sequence over pages of one token."""
    batch, heads, width = q.shape[0], q.shape[2], q.shape[3]
    pages = k.shape[0]
    assert q.shape == (batch, 1, heads, width) and q.dtype in (torch.bfloat16, torch.float16)
    assert k.shape == (pages, 1, 1, width) and v.shape[:3] == (pages, 1, 1) and k.dtype == v.dtype == q.dtype
    assert page_table.dtype == seqused_k.dtype == torch.int32 and return_lse
    assert width % 16 == v.shape[3] % 16 == 0
    assert page_table.is_contiguous() and seqused_k.is_contiguous()
    assert seqused_k.shape == (batch,) and page_table.shape[0] == batch
    for tensor in (q, k, v):
        # What is not so, the library copies.
        steps = (*tensor.stride()[:-1], tensor.storage_offset())
        assert tensor.stride(-1) == 1 and all(step * tensor.element_size() % 16 == 0 for step in steps)
    output = q.new_zeros(batch, 1, heads, v.shape[3])
    weights = torch.full((batch, heads, 1), -torch.inf)
    for i, count in enumerate(seqused_k.tolist()):
        if count:
            used = page_table[i, :count].long()
            logits = q[i, 0].float() @ k[used, 0, 0].float().T * softmax_scale
            if softcap:
                logits = softcap * torch.tanh(logits / softcap)
            output[i, 0] = logits.softmax(-1) @ v[used, 0, 0].float()
            weights[i, :, 0] = logits.logsumexp(-1)
    return output, weights


def flash_mla_sparse_fwd(q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """FlashMLA's function for sparse prompts."""
    queries, heads, width = q.shape
    assert width == 576 and heads in (64, 128) and q.stride(2) == 1
    assert kv.shape[1:] == (1, 576) and kv.stride(2) == 1 and q.dtype == kv.dtype == torch.bfloat16
    assert indices.shape[:2] == (queries, 1) and indices.shape[2] % 128 == 0 and indices.dtype == torch.int32
    output, weights = q.new_zeros(queries, heads, 512), torch.full((queries, heads), torch.inf)
    for i in range(queries):
        used = indices[i, 0][indices[i, 0] >= 0].long()
        if len(used):
            latents = kv[used, 0].float()
            logits = q[i].float() @ latents.T * sm_scale
            output[i] = logits.softmax(-1) @ latents[:, :512]
            weights[i] = logits.logsumexp(-1)
    return output, weights, weights


def old_sparse_fwd(q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, use_legacy: bool = False) -> Any:
    """The same of a build with two generations of kernels."""
    assert use_legacy
    return flash_mla_sparse_fwd(q, kv, indices, sm_scale)


LIBRARIES: dict[str, tuple[str, Callable]] = {
    "flash_attention": ("flash_attn.cute", flash_attn_varlen_func),
    "flash_mla": ("flash_mla", flash_mla_sparse_fwd),
}
"""The module and the function that a backend takes from it."""


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable | None = None) -> None:
    """Puts a stand-in in the place of a backend's library, on a device where it would run."""
    module, found = LIBRARIES[name]
    parts = module.split(".")
    for i in range(1, len(parts) + 1):
        path = ".".join(parts[:i])
        package = ModuleType(path)
        package.__spec__, package.__path__ = ModuleSpec(path, None, is_package=True), []
        monkeypatch.setitem(sys.modules, path, package)
    setattr(sys.modules[module], found.__name__, function or found)
    if "triton" not in sys.modules and importlib.util.find_spec("triton") is None:
        monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.delitem(sys.modules, f"hf_hisparse.backends.{name}", raising=False)
    monkeypatch.setattr(library, "device_of", lambda device: CARD)


def missing(name: str) -> bool:
    module = LIBRARIES[name][0]
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    """Where the backends run: on the CPU with stand-ins, on a CUDA device with what is installed."""
    return request.param


@pytest.fixture
def backend(device, monkeypatch) -> Callable[[str], AttentionBackend]:
    """Makes a backend."""

    def make(name: str) -> AttentionBackend:
        if device == "cpu":
            stand_in(monkeypatch, name)
        elif missing(name):
            pytest.skip(f"{LIBRARIES[name][0]} is not installed")
        return BACKENDS[name]()

    return make


# ---- right -----------------------------------------------------------------------------------------------------------

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of the largest value: weights, what a run gives, and the output are rounded."""

PAGES = {
    "pages of 1": ItemLayout.page_head(1, 128, 128),
    "pages of 2": ItemLayout.page_head(2, 128, 128),
    "pages of 3": ItemLayout.page_head(3, 48, 48),
    "pages of 16": ItemLayout.page_head(16, 128, 128),
    "pages of 32": ItemLayout.page_head(32, 64, 64),
}
LATENTS = ItemLayout.token(512, 64)
KINDS = {name: ("flash_attention", layout) for name, layout in PAGES.items()} | {"latents": ("flash_mla", LATENTS)}
FEW = ["pages of 1", "pages of 3", "pages of 32", "latents"]


class LibraryCase(Case):
    """A case that a library attends to. Long keys are scaled down, or weights would be 0 and 1."""

    def __init__(self, kind: str, tokens: int, k: int, make: Callable, device: str, **kwargs: Any):
        name, layout = KINDS[kind]
        kwargs = {"dtype": torch.bfloat16, "heads": 64 if kind == "latents" else 4} | kwargs
        super().__init__(layout, tokens, -(-k // layout.page_size), **kwargs)
        self.query = self.query * min(1.0, 5 / layout.key[1] ** 0.5)
        self.backend, self.device = make(name), device

    def attend(self, buffer: Tensor | None = None, slots: Tensor | None = None, **options: Any) -> Tensor:
        if isinstance(options.get("sinks"), Tensor):
            options["sinks"] = options["sinks"].to(self.device)
        buffer = self.buffer if buffer is None else buffer
        slots = self.slots if slots is None else slots
        tensors = (self.query, buffer, slots, self.selection, self.lengths)
        output = self.backend.attend(*(tensor.to(self.device) for tensor in tensors), self.layout, 0.3, **options)
        assert output.dtype == self.query.dtype
        return output.cpu()

    def check(self, **options: Any) -> None:
        largest = max(float(part.abs().max()) for part in self.parts)
        tolerance = TOLERANCE[self.query.dtype] * largest
        torch.testing.assert_close(self.attend(**options).double(), self.expected(**options), rtol=0, atol=tolerance)


@pytest.mark.parametrize("k", [40, 300, 900])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_against_float64(kind, dtype, k, backend, device):
    """A run a row, and several."""
    if kind == "latents" and dtype != torch.bfloat16:
        pytest.skip("FlashMLA takes bfloat16 alone")
    LibraryCase(kind, k + 50, k, backend, device, rows=2, dtype=dtype).check()


@pytest.mark.parametrize("options", [("softcap",), ("sinks",), ("softcap", "sinks")], ids="+".join)
@pytest.mark.parametrize("k", [40, 300])
@pytest.mark.parametrize("kind", ["pages of 2", "latents"])
def test_options_against_float64(kind, k, options, backend, device):
    if kind == "latents" and "softcap" in options:
        pytest.skip("FlashMLA cannot cap logits")
    case = LibraryCase(kind, k + 10, k, backend, device, rows=2)
    given = {"softcap": 1.5, "sinks": case.sinks}
    case.check(**{name: given[name] for name in options})


@pytest.mark.parametrize(
    ("kind", "heads"), [("pages of 2", 1), ("pages of 2", 7), ("pages of 2", 16), ("pages of 2", 150), ("latents", 128)]
)
def test_heads(kind, heads, backend, device):
    case = LibraryCase(kind, 300, 260, backend, device, rows=2, heads=heads)
    case.check(sinks=case.sinks)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(FEW), st.integers(1, 400), st.integers(1, 400), st.integers(0, 1000))
def test_against_float64_with_random_masks(backend, device, kind, tokens, k, seed):
    """Part-filled pages, rows of any length, selections with holes, and runs in which there is nothing."""
    case = LibraryCase(kind, tokens, k, backend, device, rows=2, seed=seed, **{} if kind == "latents" else {"heads": 2})
    case.check()
    case.check(sinks=case.sinks)


@pytest.mark.parametrize("kind", FEW)
def test_views_as_the_cache_passes_them(kind, backend, device):
    """A buffer that rows share or that has room for more, queries and sinks that are views, a selection whose columns
    are apart."""
    case = LibraryCase(kind, 300, 200, backend, device, rows=3)
    case.lengths[:] = case.lengths[0]
    case.selection, case.slots = (t[:1].expand(3, -1).contiguous() for t in (case.selection, case.slots))
    case.buffer = case.buffer[:1].repeat(3, 1, 1)
    case.sinks = case.sinks[:1].repeat(3, 1)
    expected = case.attend(sinks=case.sinks)
    query, buffer, selection, slots, lengths, sinks = (
        getattr(case, name).to(device) for name in "query buffer selection slots lengths sinks".split()
    )
    roomy = torch.cat((buffer, torch.full_like(buffer, torch.nan)), dim=1)[:, : buffer.shape[1]]
    apart = query.transpose(1, 2).contiguous().transpose(1, 2)
    heads_first = query.transpose(0, 1).contiguous().transpose(0, 1)
    spread = torch.stack((selection, slots), dim=-1)
    lengths = lengths[:1].expand(3)
    for asked in (query, apart, heads_first):
        for held in (buffer[:1].expand(3, -1, -1), roomy):
            columns = spread[..., 1], spread[..., 0]
            output = case.backend.attend(
                asked, held, *columns, lengths, case.layout, 0.3, sinks=sinks[:1].expand(3, -1)
            )
            assert torch.equal(output.cpu(), expected)


# ---- the same bits wherever items lie --------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [40, 600])
@pytest.mark.parametrize("kind", FEW)
def test_where_an_item_lies_changes_no_bit(kind, k, backend, device):
    case = LibraryCase(kind, k + 50, k, backend, device, rows=2)
    expected = case.attend()
    generator = torch.Generator().manual_seed(7)
    count = case.selection.shape[1]
    for slots in (count, 2 * count + 1):
        buffer = torch.full((2, slots, case.layout.elements), torch.nan, dtype=torch.bfloat16)
        moved = torch.full_like(case.slots, -1)
        for row in range(2):
            held = case.slots[row] >= 0
            places = torch.randperm(slots, generator=generator)[: len(held)].int()
            moved[row, held] = places[held]
            buffer[row, places[held].long()] = case.buffer[row, case.slots[row, held].long()]
        assert torch.equal(case.attend(buffer, moved), expected)


@pytest.mark.parametrize("loud", [torch.inf, torch.nan])
@pytest.mark.parametrize("kind", FEW)
def test_bytes_beyond_the_valid_tokens_do_not_matter(kind, loud, backend, device):
    case = LibraryCase(kind, 350, 300, backend, device)
    expected = case.attend()
    assert expected.isfinite().all()
    assert torch.equal(case.attend(case.buffer.masked_fill(case.buffer == case.buffer.max(), loud)), expected)
    # What lies behind a shorter row is bytes like any, and nothing may see them.
    keys, values, size = case.layout.keys(case.buffer), case.layout.values(case.buffer), case.layout.page_size
    for row in range(3):
        for item, slot in zip(case.selection[row].tolist(), case.slots[row].tolist(), strict=True):
            for within in range(size):
                if item >= 0 and item * size + within >= case.lengths[row]:
                    keys[row, slot, within] = values[row, slot, within] = loud
    assert torch.equal(case.attend(), expected)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("k", [70, 500])
@pytest.mark.parametrize("kind", FEW)
def test_a_row_that_sees_nothing_gives_zeros(kind, k, sinks, backend, device):
    case = LibraryCase(kind, k + 10, k, backend, device)
    case.selection[0] = case.slots[0] = -1
    case.lengths[1], case.lengths[2] = 0, case.lengths[0]
    options = {"sinks": case.sinks} if sinks else {}
    output = case.attend(**options)
    assert not output[:2].any()
    assert output[2].any()
    case.check(**options)


@pytest.mark.parametrize("shape", [(0, 64, 9), (2, 64, 0)])
@pytest.mark.parametrize("kind", ["pages of 16", "latents"])
def test_nothing_to_do(kind, shape, backend, device):
    rows, heads, k = shape
    name, layout = KINDS[kind]
    empty = torch.zeros(rows, k, dtype=torch.int32, device=device)
    lengths = torch.zeros(rows, dtype=torch.int64, device=device)
    query = torch.ones(rows, heads, layout.key[1], dtype=torch.bfloat16, device=device)
    buffer = torch.ones(rows, 3, layout.elements, dtype=torch.bfloat16, device=device)
    output = backend(name).attend(query, buffer, empty, empty, lengths, layout, 1.0)
    assert output.shape == (rows, heads, layout.value[1]) and not output.any()


def test_runs_are_whole_tiles_that_fill_the_device(backend):
    for name in LIBRARIES:
        one = backend(name)
        where = torch.device("cuda", 0)
        multiprocessors = library.device_of(where).multiprocessors
        for rows in (1, 2, 3, 8, 64, 1000):
            for tokens in (1, 100, 128, 129, 2048, 5000):
                runs, run_tokens = one.plan(rows, 128, tokens, where)
                assert run_tokens % 128 == 0 and (runs - 1) * run_tokens < tokens <= runs * run_tokens
                assert runs == 1 or runs * rows * one.programs(128) <= multiprocessors


# ---- builds of FlashMLA ----------------------------------------------------------------------------------------------


@pytest.mark.cpu
def test_two_generations_of_flash_mla(monkeypatch):
    """The one that knows latents with a rotary key is asked for."""
    stand_in(monkeypatch, "flash_mla", old_sparse_fwd)
    LibraryCase("latents", 300, 200, lambda name: BACKENDS[name](), "cpu").check()


# ---- a whole model ---------------------------------------------------------------------------------------------------

MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "quest": ("flash_attention", "llama", {}, {"top_k": 32, "page_size": 4, "algorithm": "quest"}),
    "rabitq": ("flash_attention", "llama", {}, {"top_k": 32, "page_size": 2, "algorithm": "rabitq"}),
    "indexer": (
        "flash_mla",
        "deepseek_v32",
        {
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "index_head_dim": 128,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
        },
        {},
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_equals_its_resident_oracle(kind, backend, device):
    """And the reference backend, but for the rounding of bfloat16."""
    name, model_name, overrides, options = MODELS[kind]
    backend(name)
    prompt, new = 60, 6
    model = make_model(model_name, torch.bfloat16, num_hidden_layers=2, **overrides).to(device)
    ids, mask = (t.to(device) for t in (random_ids(2, prompt + new), left_padding(2, prompt + new)))

    def logits(**more: Any) -> Tensor:
        return decode(model, ids, HierarchicalSparseCache(model, **options, **more), prompt, mask).float()

    output = logits(backend=name, buffer_size=40)
    assert same_bits(output, logits(backend=name, offload=False))
    reference = logits(backend="reference")
    # Of bfloat16's eps, through two layers and the head.
    assert float((output - reference).abs().mean()) < 4 * 2**-8 * float(reference.abs().mean())


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["pages of 2", "pages of 32", "latents"])
def test_no_synchronisation_and_capture(kind, device, backend):
    """The host never waits for the device, and a captured graph does the same with other tensors."""
    case = LibraryCase(kind, 2100, 2048, backend, device, rows=2)
    names = ("query", "buffer", "slots", "selection", "lengths")
    tensors = [getattr(case, name).to(device) for name in names]
    attend, layout = case.backend.attend, case.layout
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
    graph.replay()
    assert torch.equal(output, expected)
    # Other queries, and rows of which less can be seen.
    tensors[0].copy_(torch.randn_like(tensors[0]))
    tensors[4].copy_(torch.tensor([700, 0]))
    graph.replay()
    assert torch.equal(output, attend(*tensors, layout, 0.3)) and not output[1].any()


# ---- what is refused -------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, ItemLayout, dict[str, Any], list[str]]] = {
    "float32": ("flash_attention", PAGES["pages of 2"], {"dtype": torch.float32}, ["torch.bfloat16", "torch.float32"]),
    "float16 latents": ("flash_mla", LATENTS, {"dtype": torch.float16}, ["torch.bfloat16", "torch.float16"]),
    "heads of 96": ("flash_attention", ItemLayout.page_head(1, 96, 96), {}, ["64 or 128", "96"]),
    "wide heads": ("flash_attention", ItemLayout.page_head(4, 256, 256), {}, ["64 or 128", "256"]),
    "two sizes": ("flash_attention", ItemLayout.page_head(1, 128, 64), {}, ["one size", "128 and 64"]),
    "latents": ("flash_attention", LATENTS, {}, ["576 and 512"]),
    "pages": ("flash_mla", PAGES["pages of 1"], {}, ["latent", "512", "128", "items of 1"]),
    "narrow latents": ("flash_mla", ItemLayout.token(32, 16), {}, ["latent", "512", "48", "32"]),
    "another device": ("flash_attention", PAGES["pages of 2"], {"card": 8}, ["9.x", "8.x"]),
    "few heads": ("flash_mla", LATENTS, {"heads": 16}, ["64 or 128 heads", "16"]),
    "capped logits": ("flash_mla", LATENTS, {"heads": 64, "softcap": 30.0}, ["cap", "30"]),
}


@pytest.mark.cpu
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what, monkeypatch):
    name, layout, options, said = REFUSED[what]
    stand_in(monkeypatch, name)
    monkeypatch.setattr(library, "device_of", lambda device: library.Device(options.get("card", 9), 132))
    case = Case(layout, 30, 5, heads=options.get("heads", 64), dtype=options.get("dtype", torch.bfloat16))
    tensors = (case.query, case.buffer, case.slots, case.selection, case.lengths)
    backend = BACKENDS[name]()
    with pytest.raises(ValueError) as error:
        backend.attend(*tensors, layout, 0.3, softcap=options.get("softcap"))
    for text in (f'`backend="{name}"`', 'use `backend="auto"`', *said):
        assert text in str(error.value)


@pytest.mark.cpu
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_model_that_is_refused_is_so_before_anything_changes(name, monkeypatch):
    """At its first tokens, however few."""
    stand_in(monkeypatch, name)
    model = make_model("llama" if name == "flash_attention" else "deepseek_v32")
    cache = HierarchicalSparseCache(model, backend=name)
    with pytest.raises(ValueError, match=f'`backend="{name}"`.*torch.float32'):
        forward(model, random_ids(1, 5), cache)
    assert cache.get_seq_length() == 0


@pytest.mark.cpu
@pytest.mark.parametrize("name", LIBRARIES)
def test_without_a_cuda_device(name, monkeypatch):
    device_of = library.device_of
    stand_in(monkeypatch, name)
    monkeypatch.setattr(library, "device_of", device_of)
    layout = LATENTS if name == "flash_mla" else PAGES["pages of 2"]
    with pytest.raises(ValueError, match=f'`backend="{name}"`.*CUDA device.*cpu.*`backend="auto"`'):
        BACKENDS[name]().check(layout, torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize(("name", "package"), [("flash_attention", "flash-attn-4"), ("flash_mla", "sgl-flash-mla")])
def test_without_the_library(name, package, monkeypatch):
    monkeypatch.delitem(sys.modules, f"hf_hisparse.backends.{name}", raising=False)
    for module in ("flash_attn.cute", "flash_attn", "flash_mla", "kernels"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(ValueError) as error:
        HierarchicalSparseCache(make_model("llama"), backend=name)
    for said in (f'`backend="{name}"`', f"{package}`", '`backend="reference"`'):
        assert said in str(error.value)


@pytest.mark.gpu
@pytest.mark.skipif(missing("flash_mla"), reason="flash_mla is not installed")
def test_the_unit_of_flash_mla():
    """What it says of two tokens that weigh the same."""
    backend = BACKENDS["flash_mla"]()
    assert backend._unit in (1.0, math.log(2))
