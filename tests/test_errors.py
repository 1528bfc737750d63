"""Bad arguments and uses: each an error that names the argument and the fix, and leaves everything as it was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BertConfig, T5Config

from hf_hisparse import HierarchicalSparseCache, HiSparseConfig, patch_model, unpatch_model
from hf_hisparse.algorithms import LightningIndexer, Quest
from hf_hisparse.backends import ReferenceBackend
from hf_hisparse.coordinator import SparseCoordinator
from hf_hisparse.layout import ItemLayout
from hf_hisparse.memory import host_store, limits, pinned
from tests.helpers import (
    DEVICE,
    GQA,
    close,
    decode,
    dense_cache,
    forward,
    generate,
    logits_of,
    make_model,
    random_ids,
    same_bits,
)
from tests.test_cache_api import state_of, steps
from tests.test_graph import model_of


# ---- options ---------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "top_k zero": ({"top_k": 0}, ["`top_k`", "positive integer", "0"]),
    "top_k negative": ({"top_k": -4}, ["`top_k`", "positive integer", "-4"]),
    "top_k float": ({"top_k": 64.0}, ["`top_k`", "positive integer", "64.0"]),
    "top_k below a page": (
        {"top_k": 16, "algorithm": "quest", "page_size": 32},
        ["`top_k=16`", "`page_size=32`", "raise `top_k` or lower `page_size`"],
    ),
    "top_k below what is kept": (
        {"top_k": 40, "sink_tokens": 20, "recent_tokens": 30, "page_size": 4},
        ["`top_k=40`", "`sink_tokens`", "`recent_tokens`", "raise `top_k`"],
    ),
    "buffer under top_k": (
        {"top_k": 64, "buffer_size": 32, "page_size": 4},
        ["`buffer_size=32`", "`top_k=64`", "use `buffer_size=64` or more"],
    ),
    "buffer zero": ({"buffer_size": 0}, ["`buffer_size`", "positive integer"]),
    "page zero": ({"page_size": 0}, ["`page_size`", "positive integer"]),
    "more items than a step selects": (
        {"top_k": 16384, "page_size": 2},
        ["`top_k=16384`", "8192 items", "`page_size=2`", "at most 4096", "raise `page_size` or lower `top_k`"],
    ),
    "more items than a buffer holds": (
        {"top_k": 64, "buffer_size": 65538, "page_size": 2},
        ["`buffer_size=65538`", "32769 items", "at most 32768", "raise `page_size` or lower `buffer_size`"],
    ),
    "max_cache_len zero": ({"max_cache_len": 0}, ["`max_cache_len`", "positive integer", "0"]),
    "max_cache_len float": ({"max_cache_len": 1e6}, ["`max_cache_len`", "positive integer", "1000000.0"]),
    "sink negative": ({"sink_tokens": -1}, ["`sink_tokens`", "zero or a positive integer", "-1"]),
    "recent negative": ({"recent_tokens": -1}, ["`recent_tokens`", "zero or a positive integer", "-1"]),
    "top_k a bool": ({"top_k": True, "page_size": 1}, ["`top_k`", "positive integer", "True"]),
    "sink a bool": ({"sink_tokens": False}, ["`sink_tokens`", "zero or a positive integer", "False"]),
    **{
        f"{name} {value!r}": ({name: value}, [f"`{name}`", "True or False", repr(value)])
        for name in ("cuda_graph", "compile", "offload")
        for value in ("no", 0, None)
    },
    **{
        f"dense layers {value!r}": ({"dense_layers": value}, ["`dense_layers`", "such as (0, 1)", repr(value)])
        for value in (1, "1", ["1"], [None], [[0]], None, [1.0], [True])
    },
    "unknown algorithm": ({"algorithm": "fastest"}, ["`algorithm`", "'fastest'", "'auto'", "'quest'", "'rabitq'"]),
    "algorithm no KeyScoring": ({"algorithm": LightningIndexer}, ["`algorithm`", "`KeyScoring`", "LightningIndexer"]),
    "algorithm an instance": (
        {"algorithm": Quest()},
        ["`algorithm`", "subclass of `KeyScoring`", "Quest(page_size=32)"],
    ),
    "unknown backend": ({"backend": "magic"}, ["`backend`", "'magic'", "'reference'"]),
    "dense layer too large": ({"dense_layers": [0, 2]}, ["`dense_layers`", "[2]", "layers 0 to 1"]),
    "dense layer negative": ({"dense_layers": [-1]}, ["`dense_layers`", "[-1]", "layers 0 to 1"]),
    "every layer dense": ({"dense_layers": [0, 1]}, ["`dense_layers`", "no full-attention layer"]),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_cannot_be(case):
    options, said = OPTIONS[case]
    model = make_model("llama")
    before = state_of(model)
    with pytest.raises(ValueError) as error:
        HierarchicalSparseCache(model, **options)
    for words in said:
        assert words in str(error.value)
    assert state_of(model) == before


def test_a_refusal_leaves_a_patched_model_patched():
    model = make_model("llama")
    cache = HierarchicalSparseCache(model, **GQA)
    before = state_of(model)
    with pytest.raises(ValueError, match="`algorithm` must be"):
        HierarchicalSparseCache(model, algorithm="fastest")
    assert state_of(model) == before
    assert decode(model, random_ids(1, 60), cache, 50).isfinite().all() and cache.stats().misses


def test_an_option_that_there_is_not():
    with pytest.raises(TypeError, match="topk"):
        HierarchicalSparseCache(make_model("llama"), topk=64)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"top_k": 64}, ["`top_k=64`", "`index_topk=32`", "leave `top_k` out"]),
        ({"algorithm": "quest"}, ["`algorithm='quest'`", "its own indexer", "use `algorithm='auto'`"]),
        ({"algorithm": Quest}, ["Quest", "its own indexer", "use `algorithm='auto'`"]),
        ({"page_size": 4}, ["`page_size=4`", "single tokens", "leave `page_size` out"]),
        ({"buffer_size": 16}, ["`buffer_size=16`", "`top_k=32`", "use `buffer_size=32` or more"]),
    ],
)
def test_options_of_a_model_that_selects_by_itself(options, said):
    with pytest.raises(ValueError) as error:
        HierarchicalSparseCache(make_model("deepseek_v32"), **options)
    for words in said:
        assert words in str(error.value)
    HierarchicalSparseCache(make_model("deepseek_v32"), top_k=32, page_size=1)


def test_a_config_cannot_be_changed_behind_its_back():
    with pytest.raises(AttributeError):
        HiSparseConfig().top_k = 3


# ---- models ----------------------------------------------------------------------------------------------------------


def t5() -> nn.Module:
    shape = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return AutoModelForSeq2SeqLM.from_config(T5Config(**shape))


def bert() -> nn.Module:
    shape = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return AutoModelForCausalLM.from_config(BertConfig(**shape, intermediate_size=16, is_decoder=True))


def mamba() -> nn.Module:
    from transformers import MambaConfig

    return AutoModelForCausalLM.from_config(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1))


MODELS = {
    "encoder-decoder": (t5, ["`model`", "encoder-decoder", "T5ForConditionalGeneration", "use a decoder-only model"]),
    "no attention": (mamba, ["`model`", "MambaForCausalLM", "attention interface"]),
    "not of transformers": (partial(nn.Linear, 2, 2), ["`model`", "transformers model", "Linear"]),
}


@pytest.mark.parametrize("make", [HierarchicalSparseCache, patch_model])
@pytest.mark.parametrize("case", MODELS)
def test_models_that_cannot_be_served(case, make):
    build, said = MODELS[case]
    model = build()
    before = state_of(model)
    with pytest.raises(ValueError) as error:
        make(model)
    for words in said:
        assert words in str(error.value)
    assert state_of(model) == before


# ---- uses, and the cache as it was afterwards ------------------------------------------------------------------------


class Kept:
    """A model, and a cache with a history that must come through whatever is tried on it."""

    def __init__(self, name: str = "llama", tokens: int = 60, **overrides: Any):
        self.model = make_model(name, **overrides)
        self.options = GQA if name == "llama" else {}
        self.ids, self.more = random_ids(2, tokens), random_ids(2, 5, seed=1)
        self.cache = self.fresh()

    def fresh(self) -> HierarchicalSparseCache:
        cache = HierarchicalSparseCache(self.model, **self.options)
        forward(self.model, self.ids, cache)
        return cache

    def refused(self, error: type[Exception], said: list[str], attempt: Callable[[], Any]) -> None:
        before = state_of(self.model)
        with pytest.raises(error) as raised:
            attempt()
        for words in said:
            assert words in str(raised.value)
        assert state_of(self.model) == before
        assert self.cache.get_seq_length() == self.ids.shape[1]

    def intact(self) -> None:
        a, b = (steps(self.model, self.more, cache) for cache in (self.cache, self.fresh()))
        assert same_bits(a, b)


@pytest.fixture(params=["llama", "deepseek_v32"])
def kept(request) -> Kept:
    return Kept(request.param)


@pytest.mark.parametrize("tokens", [20, 60], ids=["dense", "sparse"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("new", [1, 4])
def test_a_batch_of_another_size(tokens, batch, new):
    kept = Kept(tokens=tokens)
    said = ["a batch of 2", f"given a batch of {batch}", "use a new cache", "cache.batch_select_indices"]
    kept.refused(ValueError, said, lambda: forward(kept.model, random_ids(batch, new), kept.cache))
    kept.intact()


def test_a_batch_of_another_size_in_generate(kept):
    ids = random_ids(3, 70)
    kept.refused(ValueError, ["batch of 2", "batch of 3"], lambda: generate(kept.model, ids, kept.cache, 4))
    kept.intact()


def test_another_dtype(kept):
    tensors = [*kept.model.parameters(), *kept.model.buffers()]
    held = [tensor.data for tensor in tensors]
    kept.model.to(torch.bfloat16)
    said = ["torch.float32", "torch.bfloat16", "use a new cache"]
    kept.refused(ValueError, said, lambda: forward(kept.model, kept.more, kept.cache))
    kept.model.to(torch.float32)
    for tensor, data in zip([*kept.model.parameters(), *kept.model.buffers()], held, strict=True):
        tensor.data = data
    kept.intact()


@pytest.mark.parametrize("tokens", [3, 20], ids=["dense", "sparse"])
def test_another_device_or_dtype_in_a_layer(tokens):
    """What a model spread over devices would hand to a layer, one of them having moved."""
    layout = partial(ItemLayout.page_head, 4)
    coordinator = SparseCoordinator(8, 2, 4, layout, partial(Quest, 4, 1, 1), ReferenceBackend())
    parts = tuple(torch.rand(2, 2, tokens, 8, device=DEVICE) for _ in "kv")
    coordinator.extend(parts, None)
    said = f"on {DEVICE} and was given .*use a new cache after moving or casting"
    for other in (lambda part: part.to("meta"), lambda part: part.half()):
        for extend in (coordinator.extend, coordinator.append):
            with pytest.raises(ValueError, match=said):
                extend(tuple(other(part[:, :, :1]) for part in parts), None)
    assert coordinator.length == tokens
    assert all(torch.equal(a, b) for a, b in zip(coordinator.history(), parts, strict=True))


def test_a_position_past_the_models_maximum():
    kept = Kept(max_position_embeddings=64)
    for attempt in (
        lambda: forward(kept.model, random_ids(2, 5), kept.cache),
        lambda: generate(kept.model, torch.cat((kept.ids, random_ids(2, 9)), dim=1), kept.cache, 2),
    ):
        said = ["60 tokens in the cache", "`max_position_embeddings` of 64", "shorter prompt", "`max_new_tokens`"]
        kept.refused(ValueError, said, attempt)
    kept.more = kept.more[:, :4]
    kept.intact()
    with pytest.raises(ValueError, match="64 tokens in the cache and 1 new ones"):
        forward(kept.model, random_ids(2, 1), kept.cache)


def test_a_prompt_past_the_models_maximum():
    model = make_model("llama", max_position_embeddings=64)
    cache = HierarchicalSparseCache(model, **GQA)
    with pytest.raises(ValueError, match="`max_position_embeddings` of 64"):
        forward(model, random_ids(1, 65), cache)
    assert cache.get_seq_length() == 0
    assert forward(model, random_ids(1, 64), cache).isfinite().all()


def test_scaled_positions_reach_further():
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    model = make_model("llama", max_position_embeddings=64, rope_parameters=yarn)
    cache = HierarchicalSparseCache(model, **GQA)
    forward(model, random_ids(1, 256), cache)
    with pytest.raises(ValueError, match="`max_position_embeddings` of 256"):
        forward(model, random_ids(1, 1), cache)


@pytest.mark.parametrize("dense_layers", [[1], [2], [0, 1]])
def test_layers_that_share_a_selection_are_dense_together(dense_layers):
    model, ids = make_model("glm_moe_dsa"), random_ids(2, 60)
    assert model.config.indexer_types == ["full", "full", "shared", "full"]
    with pytest.raises(ValueError, match="`dense_layers` names one of layers 1 and 2.*name both or neither"):
        HierarchicalSparseCache(model, dense_layers=dense_layers)
    cache, dense = HierarchicalSparseCache(model, dense_layers=[1, 2]), generate(model, ids, dense_cache(model), 12)
    close(logits_of(generate(model, ids, cache, 12)), logits_of(dense))


@pytest.mark.parametrize("longest", [30, 64], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", ["llama", "deepseek_v32"])
def test_a_history_past_the_longest(name, longest):
    model, options = model_of(name), GQA if name == "llama" else {}
    cache = HierarchicalSparseCache(model, **options, max_cache_len=longest)
    with pytest.raises(ValueError, match=f"0 tokens in the cache and {longest + 1} new ones pass `max_cache_len="):
        forward(model, random_ids(1, longest + 1), cache)
    assert cache.get_seq_length() == 0 and cache.stats().host_bytes == 0
    ids = random_ids(2, longest)
    forward(model, ids[:, :-5], cache)
    state = state_of(model)
    with pytest.raises(ValueError, match=r"use a cache with a larger one, a shorter prompt, or fewer `max_new_tokens`"):
        forward(model, random_ids(2, 6), cache)
    assert cache.get_seq_length() == longest - 5 and state_of(model) == state
    other = HierarchicalSparseCache(model, **options)
    forward(model, ids[:, :-5], other)
    assert same_bits(steps(model, ids[:, -5:], cache), steps(model, ids[:, -5:], other))
    with pytest.raises(
        ValueError, match=f"{longest} tokens in the cache and 1 new ones pass `max_cache_len={longest}`"
    ):
        forward(model, ids[:, :1], cache)


def every_query(change: Callable[[Tensor], object] = lambda mask: None) -> Tensor:
    """A causal mask for 60 queries, but for a change."""
    mask = torch.ones(2, 1, 60, 60, dtype=torch.bool, device=DEVICE).tril()
    change(mask)
    return mask


PROMPT_MASKS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "short": (
        lambda: torch.ones(2, 50, device=DEVICE),
        r"\[2, 50\] is for 50 tokens, and there are 60: 0 in the cache",
    ),
    "prefix": (lambda: every_query(lambda mask: mask[:, :, :20, :20].fill_(True)), "another query than the newest"),
    "window": (lambda: every_query(lambda mask: mask.logical_and_(mask.triu(-20))), "another query than the newest"),
    "additive": (lambda: torch.zeros(2, 1, 60, 60, device=DEVICE), "another query than the newest"),
}


@pytest.mark.parametrize("case", PROMPT_MASKS)
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_masks_that_a_prompt_of_selections_cannot_have(case):
    """Models that select for every token of a prompt know of causality and of padding, and of no other mask."""
    make, message = PROMPT_MASKS[case]
    model, ids = make_model("deepseek_v32"), random_ids(2, 60)
    cache = HierarchicalSparseCache(model)
    with pytest.raises(ValueError, match=f"`attention_mask` .*({message})"), torch.no_grad():
        model(ids, attention_mask=make(), past_key_values=cache)
    assert cache.get_seq_length() == 0
    expected = decode(model, ids, HierarchicalSparseCache(model), 50)
    assert same_bits(decode(model, ids, cache, 50), expected)


def test_an_attention_implementation_that_cannot_serve(kept):
    before = kept.model.config._attn_implementation
    kept.model.config._attn_implementation = "paged|sdpa"
    said = ["`attn_implementation='paged|sdpa'`", "model.set_attn_implementation", "eager", "sdpa"]
    kept.refused(ValueError, said, lambda: forward(kept.model, kept.more, kept.cache))
    kept.model.config._attn_implementation = before
    kept.intact()


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_attention_weights_that_are_not_there(kept):
    kept.model.set_attn_implementation("eager")
    for attempt in (
        lambda: kept.model(kept.more, past_key_values=kept.cache, output_attentions=True),
        lambda: generate(kept.model, torch.cat((kept.ids, kept.more), 1), kept.cache, 2, output_attentions=True),
    ):
        kept.refused(ValueError, ["`output_attentions=True`", "use another cache"], attempt)
    shape = kept.model(random_ids(1, 5), output_attentions=True, use_cache=False).attentions[0].shape
    assert shape == (1, kept.model.config.num_attention_heads, 5, 5)
    kept.model.set_attn_implementation("sdpa")
    kept.intact()


def test_a_crop_to_a_length_instead_of_by_one(kept):
    kept.refused(ValueError, ["`crop`", "negative", "20"], lambda: kept.cache.crop(20))
    kept.intact()


def test_a_history_of_latents_that_a_patched_model_would_expand():
    """Unpatched, such a model caches latents; patched, its attention function is handed keys and values."""
    model, ids = make_model("deepseek_v3"), random_ids(2, 30)
    cache, dense = HierarchicalSparseCache(model, **GQA), dense_cache(model)
    unpatch_model(model)
    assert same_bits(forward(model, ids, cache), forward(model, ids, dense))
    patch_model(model)
    if dense.layers[0].keys.shape[1] == 1:
        with pytest.raises(ValueError, match="filled by a model that was not patched, .*use a new cache"):
            forward(model, ids[:, :1], cache)
        unpatch_model(model)
    assert same_bits(forward(model, ids[:, :1], cache), forward(model, ids[:, :1], dense))


# ---- no memory -------------------------------------------------------------------------------------------------------


def fails_at(monkeypatch: pytest.MonkeyPatch, call: int, regions: weakref.WeakSet | None = None) -> list[int]:
    """Lets `call` allocations of host memory pass, and none after. Returns their sizes; they go into `regions`."""
    allocate, made = pinned.allocate, []

    def limited(nbytes: int, device: torch.device) -> pinned.Region:
        if len(made) == call:
            raise MemoryError(f"no {nbytes} bytes of host memory")
        made.append(nbytes)
        region = allocate(nbytes, device)
        if regions is not None:
            regions.add(region)
        return region

    monkeypatch.setattr(pinned, "allocate", limited)
    return made


@pytest.mark.parametrize(("before", "new"), [(0, 60), (20, 40), (32, 9), (40, 1)], ids=str)
@pytest.mark.parametrize("call", [0, 1, 3])
@pytest.mark.parametrize("name", ["llama", "deepseek_v32", "glm_moe_dsa"])
def test_no_memory_for_a_history_that_outgrows_top_k(name, call, before, new):
    """In the first layer or in a later one, of a prompt, a chunk or a step."""
    overrides = {"num_hidden_layers": 4} if name == "llama" else {"index_topk": 40}
    model, options = make_model(name, **overrides), GQA if name == "llama" else {}
    ids, more = random_ids(2, 60), random_ids(2, 5, seed=1)

    def run(cache: Any, fail: bool) -> Tensor:
        if before:
            forward(model, ids[:, :before], cache)
        state = state_of(model)
        if fail:
            with pytest.MonkeyPatch.context() as patch:
                made = fails_at(patch, call)
                with pytest.raises(MemoryError, match=r"host memory.* are held and intact"):
                    forward(model, ids[:, before : before + new], cache)
                assert len(made) == call
            assert cache.get_seq_length() == before and state_of(model) == state
        last = forward(model, ids[:, before : before + new], cache)
        return torch.cat((last, steps(model, more, cache)), dim=1)

    expected = run(HierarchicalSparseCache(model, **options), fail=False)
    assert same_bits(run(HierarchicalSparseCache(model, **options), fail=True), expected)


@pytest.mark.parametrize("new", [1, 30])
def test_no_memory_for_a_history_to_grow(kept, monkeypatch, new):
    monkeypatch.setattr(host_store, "SLAB_BYTES", 64)
    kept.cache = kept.fresh()
    with pytest.MonkeyPatch.context() as patch:
        fails_at(patch, 1)
        grown = random_ids(2, new)
        for _ in range(20):
            try:
                forward(kept.model, grown, kept.cache)
            except MemoryError as error:
                assert "held and intact" in str(error)
                break
        else:
            pytest.fail("the history never had to grow")
        length = kept.cache.get_seq_length()
    assert length >= 60
    kept.cache.crop(60 - length)
    kept.intact()


FOUR_LAYERS = {
    "llama": ({"num_hidden_layers": 4}, GQA, 4 << 18),
    # A slab is 2048 items of 48 float32.
    "deepseek_v32": ({}, {}, 2 * 2048 * 192),
}
"""Models, options, and the bytes of a slab for each row of two sequences, all that a short prompt needs in a layer."""


@pytest.mark.parametrize("name", FOUR_LAYERS)
@pytest.mark.parametrize("longest", [None, 200])
def test_a_prompt_that_does_not_fit_is_refused_before_any_of_it_is_held(monkeypatch, name, longest):
    """Where there is memory for three layers of four."""
    overrides, options, layer = FOUR_LAYERS[name]
    model, ids = make_model(name, **overrides), random_ids(2, 60)
    cache = HierarchicalSparseCache(model, **options, max_cache_len=longest)
    made, state = fails_at(monkeypatch, 4), state_of(model)
    monkeypatch.setattr(limits, "available", lambda: 3 * layer + 1000)
    with pytest.raises(MemoryError) as error:
        forward(model, ids, cache)
    for words in (
        f"{4 * layer / 2**20:.0f} MiB of host memory for the KV history of 4 layers",
        f"{3 * layer / 2**20:.0f} MiB are available",
        "use a smaller batch or a shorter context",
        "0 are held and intact",
    ):
        assert words in str(error.value)
    assert made == [] and state_of(model) == state
    assert cache.get_seq_length() == cache.stats().host_bytes == cache.stats().device_bytes == 0
    monkeypatch.setattr(limits, "available", lambda: 4 * layer)
    forward(model, ids, cache)
    assert made == [layer] * 4 and cache.stats().host_bytes == 4 * layer


def test_a_history_that_does_not_fit_any_more_has_grown_in_no_layer(monkeypatch):
    model = make_model("llama", num_hidden_layers=4)
    cache, ids = HierarchicalSparseCache(model, **GQA), random_ids(2, 60)
    monkeypatch.setattr(host_store, "SLAB_BYTES", 4096)
    forward(model, ids, cache)
    held = cache.stats().host_bytes
    with pytest.MonkeyPatch.context() as patch:
        made = fails_at(patch, 0)
        patch.setattr(limits, "available", lambda: 10 * 4096)
        with pytest.raises(MemoryError, match="KV history of 4 layers"):
            forward(model, random_ids(2, 30), cache)
        assert made == [] and cache.stats().host_bytes == held and cache.get_seq_length() == 60
    other = HierarchicalSparseCache(model, **GQA)
    forward(model, ids, other)
    assert same_bits(steps(model, ids[:, :9], cache), steps(model, ids[:, :9], other))


@pytest.mark.parametrize("prompt", [20, 60], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", ["llama", "deepseek_v32"])
def test_the_longest_history_has_its_memory_from_the_beginning(monkeypatch, name, prompt):
    monkeypatch.setattr(host_store, "SLAB_BYTES", 256)
    model, options = model_of(name), GQA if name == "llama" else {}
    ids, grown = random_ids(2, 100), HierarchicalSparseCache(model, **options)
    expected = decode(model, ids, grown, prompt)
    grown.crop(-80)
    again = steps(model, ids[:, 20:], grown)
    layers = len(model.model.layers)
    made = fails_at(monkeypatch, layers)
    cache = HierarchicalSparseCache(model, **options, max_cache_len=100)
    first = forward(model, ids[:, :prompt], cache)[:, -1:]
    held = cache.stats().host_bytes
    assert len(made) == layers and sum(made) == held
    used = 2 * 100 * (2 * 2 * 16 if name == "llama" else 48) * 4 * layers
    assert used <= held < used + layers * 4 * 512
    assert same_bits(torch.cat((first, steps(model, ids[:, prompt:], cache)), dim=1), expected)
    # Back to a dense history, and again: the memory stays, and what it held before leaves no trace.
    cache.crop(-80)
    assert same_bits(steps(model, ids[:, 20:], cache), again)
    assert len(made) == layers and cache.stats().host_bytes == held
    cache.reset()
    assert same_bits(forward(model, ids[:, :prompt], cache)[:, -1:], first)
    assert len(made) == layers and cache.stats().host_bytes == held


@pytest.mark.parametrize("prompt", [20, 90], ids=["dense", "sparse"])
def test_no_memory_is_had_beyond_the_longest_history(monkeypatch, prompt):
    monkeypatch.setattr(host_store, "SLAB_BYTES", 256)
    asked, allocate = [], pinned.allocate_behind
    monkeypatch.setattr(pinned, "allocate_behind", lambda *args: asked.append(args) or allocate(*args))
    model, ids = make_model("llama"), random_ids(2, 100)
    cache = HierarchicalSparseCache(model, **GQA, max_cache_len=100)
    for _ in range(2):
        forward(model, ids[:, :prompt], cache)
        steps(model, ids[:, prompt:], cache)
        assert len(asked) == len(cache.layers)
        cache.reset()


def test_steps_score_no_more_than_the_longest_history():
    """Though its slabs have room for more."""
    model = make_model("llama")
    cache = HierarchicalSparseCache(model, **GQA, max_cache_len=100)
    forward(model, random_ids(2, 90), cache)
    assert all(layer.coordinator.memory.room > layer.coordinator.room == 100 for layer in cache.layers)


@pytest.mark.parametrize("call", [0, 1, 3])
@pytest.mark.parametrize("prompt", [20, 60], ids=["dense", "sparse"])
def test_no_memory_for_the_longest_history(prompt, call):
    model, ids = make_model("llama", num_hidden_layers=4), random_ids(2, 60)
    cache = HierarchicalSparseCache(model, **GQA, max_cache_len=100)
    regions: weakref.WeakSet[pinned.Region] = weakref.WeakSet()
    with pytest.MonkeyPatch.context() as patch:
        made = fails_at(patch, call, regions)
        with pytest.raises(MemoryError, match="held and intact"):
            forward(model, ids[:, :prompt], cache)
        assert len(made) == call
    assert cache.get_seq_length() == cache.stats().host_bytes == 0
    gc.collect()
    assert not regions
    expected = decode(model, ids, HierarchicalSparseCache(model, **GQA), prompt)
    assert same_bits(decode(model, ids, cache, prompt), expected)


@pytest.mark.parametrize("longest", [None, 100])
def test_no_memory_for_another_batch(kept, longest):
    """The history of a layer that cannot change its batch is as it was; one of the same size needs no memory."""
    kept.options = kept.options | {"max_cache_len": longest}
    kept.cache = kept.fresh()
    coordinator = kept.cache.layers[0].coordinator
    before = [part.clone() for part in coordinator.history()]
    memory = coordinator.memory
    with pytest.MonkeyPatch.context() as patch:
        fails_at(patch, 0)
        kept.cache.reorder_cache(torch.tensor([1, 0]))
        assert coordinator.memory is memory
        kept.cache.reorder_cache(torch.tensor([1, 0]))
        with pytest.raises(MemoryError, match="held and intact"):
            kept.cache.batch_repeat_interleave(2)
    assert all(torch.equal(*pair) for pair in zip(coordinator.history(), before, strict=True))
    kept.intact()


def test_the_indexers_keys_are_taken_back_too():
    """A step that fails between the indexer and the attention has given its keys to one and not to the other."""
    model, ids = make_model("deepseek_v32"), random_ids(2, 40)
    cache = HierarchicalSparseCache(model)
    forward(model, ids, cache)
    with pytest.MonkeyPatch.context() as patch:

        def fail(self, *args):
            raise RuntimeError("on purpose")

        patch.setattr(LightningIndexer, "retrieve_topk", fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="on purpose"):
                forward(model, ids[:, :1], cache)
    assert all(layer.coordinator.length == 40 for layer in cache.layers)
    fresh = HierarchicalSparseCache(model)
    forward(model, ids, fresh)
    assert same_bits(steps(model, ids[:, :9], cache), steps(model, ids[:, :9], fresh))


def test_layers_with_another_state_are_refused(tiny):
    with pytest.raises(ValueError, match="another state beside its keys and values"):
        HierarchicalSparseCache(tiny("falcon_h1"))
