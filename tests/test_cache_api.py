"""Everything that transformers does with a cache, done with a hierarchical one."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import logging
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import StaticCache

import hf_hisparse
from hf_hisparse import HierarchicalSparseCache, patch_model, unpatch_model
from tests.helpers import (
    DEVICE,
    GQA,
    METHODS,
    close,
    decode,
    dense_cache,
    forward,
    generate,
    left_padding,
    logits_of,
    make_model,
    random_ids,
    same_bits,
)


TOP_K = {"llama-quest": 40, "llama-rabitq": 40, "deepseek": 32}


@pytest.fixture(params=METHODS)
def method(request) -> str:
    return request.param


@pytest.fixture
def model(tiny, method) -> nn.Module:
    return tiny(METHODS[method][0])


@pytest.fixture
def new_cache(model, method) -> Callable[..., HierarchicalSparseCache]:
    def make(**options: Any) -> HierarchicalSparseCache:
        return HierarchicalSparseCache(model, **METHODS[method][1] | options)

    return make


def steps(model: nn.Module, ids: Tensor, cache: Any, mask: Tensor | None = None) -> Tensor:
    """The logits of tokens fed one at a time."""
    past = cache.get_seq_length()
    logits = []
    for t in range(ids.shape[1]):
        seen = None if mask is None else mask[:, : past + t + 1]
        logits.append(forward(model, ids[:, t : t + 1], cache, seen)[:, -1])
    return torch.stack(logits, dim=1)


# ---- crop ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 10, 31, 32, 33, 39, 40, 41, 58, 90, 99])
def test_crop_and_go_on_equals_a_fresh_run(model, new_cache, keep):
    """From above `top_k`, to within the prompt: below `top_k`, at it, amid a page."""
    ids, more = random_ids(2, 110), random_ids(2, 30, seed=1)
    cache, fresh = new_cache(), new_cache()
    decode(model, ids, cache, 100)
    cache.crop(keep - 110)
    assert cache.get_seq_length() == keep
    forward(model, ids[:, :keep], fresh)
    close(steps(model, more, cache), steps(model, more, fresh))


@pytest.mark.parametrize("keep", [101, 104, 105, 109])
def test_crop_of_decoded_tokens_leaves_no_trace(model, new_cache, keep):
    ids, more = random_ids(2, 110), random_ids(2, 30, seed=1)
    cropped, fresh = new_cache(), new_cache()
    decode(model, ids, cropped, 100)
    cropped.crop(keep - 110)
    decode(model, ids[:, :keep], fresh, 100)
    assert same_bits(steps(model, more, cropped), steps(model, more, fresh))


@pytest.mark.parametrize("keep", [10, 58, 105])
def test_crop_equals_the_resident_oracle(model, new_cache, keep):
    ids, more = random_ids(2, 110), random_ids(2, 30, seed=1)
    logits = []
    for offload in (True, False):
        cache = new_cache(offload=offload)
        decode(model, ids, cache, 100)
        cache.crop(keep - 110)
        logits.append(torch.cat((steps(model, more, cache), forward(model, ids[:, :20], cache)), dim=1))
    assert same_bits(*logits)


def test_crop_to_nothing_and_of_nothing(model, new_cache):
    ids = random_ids(2, 60)
    cache, fresh = new_cache(), new_cache()
    cache.crop(-3)
    assert cache.get_seq_length() == 0
    first = forward(model, ids, cache)
    cache.crop(0)
    assert cache.get_seq_length() == 60
    cache.crop(-1000)
    assert cache.get_seq_length() == 0
    assert same_bits(forward(model, ids, cache), first)
    assert same_bits(forward(model, ids, fresh), first)


def test_crop_by_a_tensor(model, new_cache):
    """As assisted decoding crops: lengths stay numbers, of which no two layers share one."""
    ids, more = random_ids(2, 60), random_ids(2, 20, seed=1)
    caches = [new_cache(), new_cache()]
    logits = []
    for cache, remove in zip(caches, (-3, torch.tensor(-3, device=DEVICE)), strict=True):
        forward(model, ids, cache)
        cache.crop(remove)
        one = steps(model, more[:, :10], cache)
        cache.crop(remove * 0)
        logits.append(torch.cat((one, steps(model, more[:, 10:], cache)), dim=1))
        assert type(cache.get_seq_length()) is int and cache.get_seq_length() == 77
    assert same_bits(*logits)


@pytest.mark.parametrize("name", ["ministral", "gemma3_text"])
def test_crop_of_windows(tiny, name):
    """Transformers' own windows can be cropped until they slide. Then they refuse, and nothing is cropped."""
    model, ids, more = tiny(name), random_ids(2, 60), random_ids(2, 6, seed=1)
    cache, fresh = HierarchicalSparseCache(model, **GQA), HierarchicalSparseCache(model, **GQA)
    forward(model, ids[:, :25], cache)
    cache.crop(-7)
    forward(model, ids[:, :18], fresh)
    close(steps(model, more, cache), steps(model, more, fresh))
    for each in (cache, fresh):
        forward(model, ids, each)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-7)
    assert cache.get_seq_length() == 84
    close(steps(model, more, cache), steps(model, more, fresh))


def test_crop_with_padding(model, new_cache):
    ids, more, mask = random_ids(3, 100), random_ids(3, 10, seed=1), left_padding(3, 110)
    cache, fresh = new_cache(), new_cache()
    forward(model, ids, cache, mask[:, :100])
    cache.crop(-45)
    forward(model, ids[:, :55], fresh, mask[:, :55])
    close(steps(model, more, cache, mask), steps(model, more, fresh, mask))


# ---- the batch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [20, 100], ids=["dense", "sparse"])
def test_batch_repeat_interleave(model, new_cache, tokens):
    ids, more, mask = random_ids(2, tokens), random_ids(4, 8, seed=1), left_padding(2, tokens + 8)
    cache, fresh = new_cache(), new_cache()
    forward(model, ids, cache, mask[:, :tokens])
    cache.batch_repeat_interleave(2)
    mask = mask.repeat_interleave(2, 0)
    forward(model, ids.repeat_interleave(2, 0), fresh, mask[:, :tokens])
    close(steps(model, more, cache, mask), steps(model, more, fresh, mask))


@pytest.mark.parametrize("tokens", [20, 100], ids=["dense", "sparse"])
@pytest.mark.parametrize("as_mask", [False, True], ids=["indices", "mask"])
def test_batch_select_indices(model, new_cache, tokens, as_mask):
    ids, more, mask = random_ids(4, tokens), random_ids(2, 8, seed=1), left_padding(4, tokens + 8)
    kept = torch.tensor([1, 3], device=DEVICE)
    cache, fresh = new_cache(), new_cache()
    forward(model, ids, cache, mask[:, :tokens])
    which = torch.tensor([False, True, False, True], device=DEVICE)
    cache.batch_select_indices(which if as_mask else kept)
    forward(model, ids[kept], fresh, mask[kept, :tokens])
    close(steps(model, more, cache, mask[kept]), steps(model, more, fresh, mask[kept]))


@pytest.mark.parametrize("tokens", [20, 100], ids=["dense", "sparse"])
def test_reorder_cache(model, new_cache, tokens):
    ids, more = random_ids(3, tokens), random_ids(3, 8, seed=1)
    order = torch.tensor([2, 0, 0], device=DEVICE)
    cache, fresh = new_cache(), new_cache()
    forward(model, ids, cache)
    cache.reorder_cache(order)
    forward(model, ids[order], fresh)
    close(steps(model, more, cache), steps(model, more, fresh))


def test_reorder_of_nothing(new_cache):
    cache = new_cache()
    cache.reorder_cache(torch.tensor([1, 0], device=DEVICE))
    assert cache.get_seq_length() == 0


def test_beam_search_equals_the_resident_oracle(model, new_cache):
    ids, mask = random_ids(2, 80), left_padding(2, 80)
    outputs = [
        generate(model, ids, new_cache(offload=offload), 10, mask, num_beams=3, output_scores=True)
        for offload in (True, False)
    ]
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert same_bits(outputs[0].sequences_scores, outputs[1].sequences_scores)


def test_sampling_of_several_sequences(model, new_cache):
    outputs = []
    for offload in (True, False):
        torch.manual_seed(0)
        cache = new_cache(offload=offload)
        outputs.append(generate(model, random_ids(2, 60), cache, 10, do_sample=True, num_return_sequences=3))
    assert outputs[0].sequences.shape == (6, 70)
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert same_bits(logits_of(outputs[0]), logits_of(outputs[1]))


# ---- more than one call ----------------------------------------------------------------------------------------------


def test_reset_and_use_again(model, new_cache):
    ids = random_ids(2, 70)
    cache = new_cache()
    first = generate(model, ids, cache, 12)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.stats().hits == cache.stats().misses == 0
    addresses = [layer.coordinator._reserved.store.table for layer in cache.layers]
    again = generate(model, ids, cache, 12)
    assert same_bits(logits_of(again), logits_of(first))
    # In the same host memory.
    assert all(a is layer.coordinator.memory.store.table for a, layer in zip(addresses, cache.layers, strict=True))
    cache.reset()
    other = generate(model, ids[:1], cache, 12)
    assert same_bits(logits_of(other), logits_of(generate(model, ids[:1], new_cache(), 12)))


@pytest.mark.parametrize("name", ["llama", "ministral", "gemma3_text", "qwen3_next"])
def test_reset_of_other_layers(tiny, name):
    model, ids = tiny(name), random_ids(2, 70)
    options = GQA | {"dense_layers": [1] if name == "llama" else []}
    cache = HierarchicalSparseCache(model, **options)
    first = decode(model, ids, cache, 60)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert same_bits(decode(model, ids, cache, 60), first)
    cache.reset()
    assert same_bits(
        decode(model, ids[:1], cache, 60), decode(model, ids[:1], HierarchicalSparseCache(model, **options), 60)
    )


@pytest.mark.parametrize("cuts", [[20, 100], [50, 100], [41, 61, 100], [33, 66, 100]])
def test_a_prompt_in_chunks_equals_a_prompt(model, new_cache, cuts):
    ids, more, mask = random_ids(3, 100), random_ids(3, 10, seed=1), left_padding(3, 110)
    whole, chunked = new_cache(), new_cache()
    expected = forward(model, ids, whole, mask[:, :100])
    low = 0
    for high in cuts:
        last = forward(model, ids[:, low:high], chunked, mask[:, :high])
        close(last[mask[:, low:high].bool()], expected[:, low:high][mask[:, low:high].bool()])
        low = high
    close(steps(model, more, chunked, mask), steps(model, more, whole, mask))


def test_chunks_and_steps_by_turns_equal_the_resident_oracle(model, new_cache):
    ids = random_ids(2, 120)
    logits = []
    for offload in (True, False):
        cache = new_cache(offload=offload)
        cuts = [0, 17, 18, 38, 39, 40, 41, 42, 60, 61, 64, 65, 66, 67, 90, 91, 93, 120]
        parts = [forward(model, ids[:, low:high], cache) for low, high in pairwise(cuts)]
        logits.append(torch.cat(parts, dim=1))
    assert same_bits(*logits)


def test_prefill_chunk_size(model, new_cache):
    ids = random_ids(2, 90)
    whole = generate(model, ids, new_cache(), 10)
    chunked = generate(model, ids, new_cache(), 10, prefill_chunk_size=32)
    assert torch.equal(whole.sequences, chunked.sequences)
    close(logits_of(chunked), logits_of(whole))


def conversation(model: nn.Module, cache: Any, turns: list[Tensor], new: int) -> tuple[Tensor, list[Tensor]]:
    """Generates after every turn, on one cache; the tokens, and each turn's logits."""
    ids, logits = turns[0][:, :0], []
    for turn in turns:
        ids = torch.cat((ids, turn), dim=1)
        output = generate(model, ids, cache, new)
        ids = output.sequences
        logits.append(logits_of(output))
    return ids, logits


def test_a_conversation_over_linear_states_equals_a_run_from_scratch(tiny):
    model = tiny("qwen3_next")
    turns = [random_ids(2, tokens, seed=tokens) for tokens in (30, 21, 17)]
    _, logits = conversation(model, HierarchicalSparseCache(model, top_k=128), turns, 9)
    ids = turns[0][:, :0]
    for turn, given in zip(turns, logits, strict=True):
        scratch = generate(model, torch.cat((ids, turn), dim=1), dense_cache(model), 9)
        ids = scratch.sequences
        close(given, logits_of(scratch))
        assert torch.equal(given.argmax(-1), ids[:, -9:])


def test_a_conversation_of_prompts_equals_a_run_from_scratch(model, new_cache):
    """Beyond `top_k`: of a turn that decodes one token, nothing but the prompt was attended to."""
    turns = [random_ids(2, tokens, seed=tokens) for tokens in (50, 33, 17)]
    cache = new_cache()
    ids, logits = conversation(model, cache, turns, 1)
    scratch = generate(model, ids[:, :-1], new_cache(), 1)
    close(logits[-1], logits_of(scratch))
    more = random_ids(2, 10)
    fresh = new_cache()
    forward(model, ids[:, :-1], fresh)
    close(steps(model, more, cache), steps(model, more, fresh))


def test_a_conversation_equals_the_resident_oracle(model, new_cache):
    turns = [random_ids(2, tokens, seed=tokens) for tokens in (60, 13, 2, 9)]
    one, other = (conversation(model, new_cache(offload=offload), turns, 7) for offload in (True, False))
    assert torch.equal(one[0], other[0])
    assert all(same_bits(a, b) for a, b in zip(one[1], other[1], strict=True))


# ---- ways to decode --------------------------------------------------------------------------------------------------


def repetitive(batch: int, tokens: int) -> Tensor:
    """A prompt in which the next tokens can be looked up, and are now and then right."""
    return random_ids(batch, 12).repeat(1, tokens // 12 + 1)[:, :tokens]


def test_prompt_lookup_equals_the_resident_oracle(model, new_cache):
    ids = repetitive(1, 80)
    outputs = [
        generate(model, ids, new_cache(offload=offload), 16, prompt_lookup_num_tokens=3) for offload in (True, False)
    ]
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert same_bits(logits_of(outputs[0]), logits_of(outputs[1]))


def test_a_stop_token_in_one_row_of_a_batch(model, new_cache):
    ids = random_ids(2, 60)
    free = generate(model, ids, new_cache(), 12)
    stop = int(free.sequences[0, 62])
    outputs = [
        generate(model, ids, new_cache(offload=offload), 12, eos_token_id=stop).sequences for offload in (True, False)
    ]
    assert torch.equal(*outputs)
    assert outputs[0][0, 63:].eq(0).all()


@pytest.mark.parametrize("argument", ["past_key_values", "cache"])
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_both_names_of_the_argument(model, new_cache, argument):
    if argument not in inspect.signature(inspect.unwrap(type(model).forward)).parameters and argument == "cache":
        pytest.skip("this transformers calls it past_key_values")
    ids, cache = random_ids(2, 60), new_cache()
    expected = decode(model, ids, new_cache(), 50)
    with torch.no_grad():
        first = model(ids[:, :50], **{argument: cache}).logits[:, -1]
        rest = [model(ids[:, t : t + 1], **{argument: cache}).logits[:, -1] for t in range(50, 60)]
    assert same_bits(torch.stack([first, *rest], dim=1), expected)
    assert cache.get_seq_length() == 60 and cache.stats().misses


def test_what_a_cache_says_of_itself(model, new_cache):
    cache = new_cache()
    assert len(cache) == model.config.num_hidden_layers
    assert not cache.is_compileable and cache.is_croppable and not any(cache.is_sliding)
    assert cache.get_max_length() == -1
    assert cache.get_seq_length() == 0 and not cache.is_initialized
    for length, tokens in ((20, 20), (50, 30), (51, 1)):
        assert cache.get_mask_sizes(tokens, 0) == (length, 0)
        forward(model, random_ids(1, tokens), cache)
        assert [cache.get_seq_length(layer) for layer in range(len(cache))] == [length] * len(cache)
    assert cache.is_initialized


# ---- a patched model with any other cache ----------------------------------------------------------------------------


def static_cache(model: nn.Module) -> StaticCache:
    return StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=128)


OTHERS: dict[str, Callable[[nn.Module], Any]] = {"dynamic": dense_cache, "static": static_cache}


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "deepseek_v32", "glm_moe_dsa", "qwen3_next"])
@pytest.mark.parametrize("other", OTHERS)
def test_other_caches_give_the_bits_of_an_unpatched_model(name, other):
    if name == "qwen3_next" and other == "static":
        pytest.skip("linear attention takes no static cache of its own here")
    model, ids, mask = make_model(name), random_ids(2, 90), left_padding(2, 90)
    expected = decode(model, ids, OTHERS[other](model), 80, mask)
    patch_model(model)
    assert same_bits(decode(model, ids, OTHERS[other](model), 80, mask), expected)
    # Also after it was used with a cache of ours.
    generate(model, ids, HierarchicalSparseCache(model), 4)
    assert same_bits(decode(model, ids, OTHERS[other](model), 80, mask), expected)


@pytest.mark.parametrize("name", ["llama", "deepseek_v32"])
def test_no_cache_gives_the_bits_of_an_unpatched_model(name):
    model, ids = make_model(name), random_ids(2, 60)
    with torch.no_grad():
        alone = model(ids, use_cache=False).logits
        chosen = generate(model, ids, None, 6)
        uncached = generate(model, ids, None, 6, use_cache=False)
        patch_model(model)
        assert same_bits(model(ids, use_cache=False).logits, alone)
    assert same_bits(logits_of(generate(model, ids, None, 6)), logits_of(chosen))
    assert same_bits(logits_of(generate(model, ids, None, 6, use_cache=False)), logits_of(uncached))


def test_gradients_of_a_patched_model():
    model, ids = make_model("llama"), random_ids(2, 30)
    model(ids, labels=ids, use_cache=False).loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    patch_model(model)
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


# ---- patching --------------------------------------------------------------------------------------------------------


def state_of(model: nn.Module) -> dict[str, tuple]:
    """Everything that a module holds apart from its tensors and children: names, hooks, config."""
    state = {}
    for name, module in model.named_modules():
        hooks = tuple(len(value) for key, value in sorted(vars(module).items()) if "hooks" in key)
        state[name] = (
            type(module),
            frozenset(vars(module)),
            hooks,
            id(getattr(module, "config", None)),
            type(module).forward,
        )
    return state


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v32", "mistral_large4"])
def test_unpatching_restores_everything(name):
    model = make_model(name)
    before = state_of(model)
    patch = patch_model(model)
    patched = state_of(model)
    assert patched != before
    assert patch_model(model) is patch and state_of(model) == patched
    HierarchicalSparseCache(model)
    assert state_of(model) == patched
    generate(model, random_ids(1, 50), HierarchicalSparseCache(model), 4)
    assert state_of(model) == patched
    unpatch_model(model)
    assert state_of(model) == before
    unpatch_model(model)
    assert state_of(model) == before


def test_a_model_can_be_patched_again():
    model, ids = make_model("llama"), random_ids(2, 60)
    first = decode(model, ids, HierarchicalSparseCache(model, **GQA), 50)
    unpatch_model(model)
    assert same_bits(decode(model, ids, HierarchicalSparseCache(model, **GQA), 50), first)


def test_a_patched_model_is_freed():
    model = make_model("llama")
    cache = HierarchicalSparseCache(model, **GQA)
    generate(model, random_ids(1, 60), cache, 4)
    freed = weakref.ref(model), weakref.ref(cache.layers[0].coordinator.memory)
    del model, cache
    gc.collect()
    assert [ref() for ref in freed] == [None, None]


def test_a_copy_of_a_patched_model_is_its_own():
    model, ids = make_model("llama"), random_ids(2, 60)
    expected = decode(model, ids, HierarchicalSparseCache(model, **GQA), 50)
    twin = copy.deepcopy(model)
    unpatch_model(model)
    dense = decode(model, ids, dense_cache(model), 50)
    assert same_bits(decode(twin, ids, HierarchicalSparseCache(twin, **GQA), 50), expected)
    assert same_bits(decode(twin, ids, dense_cache(twin), 50), dense)


def test_a_cache_serves_the_base_model_too(tiny):
    """Whether the cache is made from the model with its head or from its decoder."""
    model, ids = tiny("llama"), random_ids(2, 60)
    cache = HierarchicalSparseCache(model.model, **GQA)
    assert same_bits(decode(model, ids, cache, 50), decode(model, ids, HierarchicalSparseCache(model, **GQA), 50))


def test_the_attention_implementation_can_be_changed_between_runs():
    model, ids = make_model("llama"), random_ids(2, 60)
    sdpa = decode(model, ids, HierarchicalSparseCache(model, **GQA), 50)
    model.set_attn_implementation("eager")
    close(decode(model, ids, HierarchicalSparseCache(model, **GQA), 50), sdpa)
    model.set_attn_implementation("sdpa")
    assert same_bits(decode(model, ids, HierarchicalSparseCache(model, **GQA), 50), sdpa)


# ---- an unpatched model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v32", "glm_moe_dsa"])
def test_an_unpatched_model_is_dense_and_warns_once(name, caplog, monkeypatch):
    from hf_hisparse import cache as module

    warned = []
    monkeypatch.setattr(module.logger, "warning_once", warned.append)
    model, ids = make_model(name), random_ids(2, 80)
    cache = HierarchicalSparseCache(model)
    unpatch_model(model)
    expected = generate(model, ids, dense_cache(model), 8)
    output = generate(model, ids, cache, 8)
    assert torch.equal(output.sequences, expected.sequences)
    assert same_bits(logits_of(output), logits_of(expected))
    assert cache.get_seq_length() == 87 and cache.stats().host_bytes == 0
    assert warned and set(warned) == {warned[0]} and "hf_hisparse.patch_model(model)" in warned[0]


def test_the_warning_is_given_once(caplog):
    from transformers.utils import logging as transformers_logging

    model = make_model("llama")
    cache = HierarchicalSparseCache(model, **GQA)
    unpatch_model(model)
    logger = logging.getLogger("hf_hisparse.cache")
    logger.propagate, level = True, logger.level
    hf_hisparse.cache.logger.warning_once.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="hf_hisparse.cache"):
            forward(model, random_ids(1, 10), cache)
            forward(model, random_ids(1, 10), cache)
    finally:
        logger.setLevel(level)
    assert sum("not patched" in record.message for record in caplog.records) == 1
    assert transformers_logging is not None


def test_a_history_that_began_unpatched_goes_on_patched(tiny):
    """And one that began patched goes on unpatched: dense either way while it is short."""
    ids = random_ids(2, 60)
    model = make_model("llama")
    expected = decode(model, ids, dense_cache(model), 50)
    for first in (patch_model, unpatch_model):
        cache = HierarchicalSparseCache(model, top_k=128)
        first(model)
        one = forward(model, ids[:, :50], cache)[:, -1:]
        (unpatch_model if first is patch_model else patch_model)(model)
        assert same_bits(torch.cat((one, steps(model, ids[:, 50:], cache)), dim=1), expected)


# ---- from a dense cache ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [20, 100], ids=["dense", "sparse"])
def test_from_dense(model, method, new_cache, tokens):
    ids, more, mask = random_ids(3, tokens), random_ids(3, 12, seed=1), left_padding(3, tokens + 12)
    dense = dense_cache(model)
    forward(model, ids, dense, mask[:, :tokens])
    if method == "deepseek" and dense.layers[0].keys.shape[1] != 1:
        # Before transformers 5.18 or so, a dense cache held every head's keys and values in place of latents.
        with pytest.raises(ValueError, match=r"layer 0 of the dense cache .* no latents, .* a new HierarchicalSparse"):
            HierarchicalSparseCache.from_dense(model, dense, **METHODS[method][1])
        return
    taken = HierarchicalSparseCache.from_dense(model, dense, **METHODS[method][1])
    assert taken.get_seq_length() == tokens
    fresh = new_cache()
    forward(model, ids, fresh, mask[:, :tokens])
    # A stock prompt attends to the same keys as ours, in another order of arithmetic where the model is sparse.
    close(steps(model, more, taken, mask), steps(model, more, fresh, mask))


def test_take_over_in_place_of_another_history(model, method, new_cache):
    """What was there before leaves no trace, in the history or in what is counted."""
    ids, more, mask = random_ids(3, 100), random_ids(3, 12, seed=1), left_padding(3, 112)
    dense = dense_cache(model)
    forward(model, ids, dense, mask[:, :100])
    if method == "deepseek" and dense.layers[0].keys.shape[1] != 1:
        pytest.skip("a dense cache of this transformers holds no latents")
    cache = new_cache()
    decode(model, random_ids(3, 130, seed=2), cache, 120)
    cache.take_over(copy.deepcopy(dense))
    taken = HierarchicalSparseCache.from_dense(model, dense, **METHODS[method][1])
    assert cache.get_seq_length() == 100
    assert same_bits(steps(model, more, cache, mask), steps(model, more, taken, mask))
    assert cache.stats() == taken.stats() and cache.stats().hits > 0


def test_from_dense_takes_windows_over(tiny):
    model, ids = tiny("gemma3_text"), random_ids(2, 100)
    dense = dense_cache(model)
    forward(model, ids[:, :80], dense)
    taken = HierarchicalSparseCache.from_dense(model, dense, **GQA)
    fresh = HierarchicalSparseCache(model, **GQA)
    forward(model, ids[:, :80], fresh)
    assert same_bits(steps(model, ids[:, 80:], taken), steps(model, ids[:, 80:], fresh))


def test_from_an_empty_dense_cache(model, method, new_cache):
    ids = random_ids(2, 60)
    taken = HierarchicalSparseCache.from_dense(model, dense_cache(model), **METHODS[method][1])
    assert same_bits(decode(model, ids, taken, 50), decode(model, ids, new_cache(), 50))


# ---- enable ----------------------------------------------------------------------------------------------------------


def uses_ours(model: nn.Module, **kwargs: Any) -> bool:
    """Whether `generate` of the model, given no cache, goes through a hierarchical one."""
    made = []
    make = HierarchicalSparseCache.begin_forward

    def recording(self, *args, **kwargs):
        made.append(self)
        return make(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HierarchicalSparseCache, "begin_forward", recording)
        model.generate(
            random_ids(1, 60), max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None, **kwargs
        )
    return bool(made)


def test_enable_and_disable():
    model, ids = make_model("llama"), random_ids(2, 60)
    before = state_of(model)
    dense = generate(model, ids, None, 10)
    expected = generate(model, ids, HierarchicalSparseCache(model, **GQA), 10)
    unpatch_model(model)
    assert not uses_ours(model)
    hf_hisparse.enable(model, **GQA)
    assert uses_ours(model)
    for _ in range(2):
        assert same_bits(logits_of(generate(model, ids, None, 10)), logits_of(expected))
    hf_hisparse.disable(model)
    assert not uses_ours(model)
    assert same_bits(logits_of(generate(model, ids, None, 10)), logits_of(dense))
    hf_hisparse.disable(model)
    unpatch_model(model)
    assert state_of(model) == before


def test_enable_as_a_context():
    model = make_model("llama")
    with hf_hisparse.enable(model, **GQA):
        assert uses_ours(model)
    assert not uses_ours(model)
    with pytest.raises(RuntimeError, match="on purpose"), hf_hisparse.enable(model, **GQA):
        raise RuntimeError("on purpose")
    assert not uses_ours(model)


def test_enable_twice_takes_the_latest_options():
    model, ids = make_model("llama"), random_ids(1, 90)
    expected = generate(model, ids, HierarchicalSparseCache(model, **GQA), 6)
    hf_hisparse.enable(model, top_k=512)
    hf_hisparse.enable(model, **GQA)
    assert same_bits(logits_of(generate(model, ids, None, 6)), logits_of(expected))
    hf_hisparse.disable(model)
    assert not uses_ours(model)


def test_enable_within_enable():
    model, ids = make_model("llama"), random_ids(1, 90)
    outer = generate(model, ids, HierarchicalSparseCache(model, top_k=512), 6)
    with hf_hisparse.enable(model, top_k=512):
        with hf_hisparse.enable(model, **GQA):
            inner = generate(model, ids, None, 6)
        assert same_bits(logits_of(generate(model, ids, None, 6)), logits_of(outer))
    assert not same_bits(logits_of(inner), logits_of(outer))
    assert not uses_ours(model)


def test_enable_leaves_a_given_cache_alone():
    model, ids = make_model("llama"), random_ids(1, 60)
    with hf_hisparse.enable(model, **GQA):
        dense = dense_cache(model)
        generate(model, ids, dense, 4)
        assert dense.get_seq_length() == 63
        assert not uses_ours(model, use_cache=False)
        assert not uses_ours(model, cache_implementation="dynamic")
        assert uses_ours(model)


def test_enable_refuses_at_once():
    model = make_model("llama")
    with pytest.raises(ValueError, match="buffer_size"):
        hf_hisparse.enable(model, **GQA, buffer_size=8)
    assert "generate" not in vars(model)


def test_enable_in_a_pipeline(smollm2):
    from transformers import pipeline

    model, tokenizer = smollm2[0], copy.deepcopy(smollm2[1])
    # Some versions of transformers ask for one before they make batches.
    tokenizer.pad_token_id = tokenizer.eos_token_id
    run = pipeline("text-generation", model=model, tokenizer=tokenizer, device=DEVICE)
    options = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False, "batch_size": 2}
    prompts = ["The grass is green. The sky is", "One, two,"]
    dense = run(prompts, **options)
    made = []
    with hf_hisparse.enable(model, top_k=64), pytest.MonkeyPatch.context() as patch:
        begin = HierarchicalSparseCache.begin_forward
        patch.setattr(
            HierarchicalSparseCache, "begin_forward", lambda self, *args: (made.append(self), begin(self, *args))[1]
        )
        output = run(prompts, **options)
    assert output == dense and len(made) == 6


# ---- stats -----------------------------------------------------------------------------------------------------------


def test_stats_add_up(tiny):
    model, cache = tiny("llama"), None
    cache = HierarchicalSparseCache(model, **GQA, algorithm="quest")
    stats = cache.stats()
    assert stats.hit_rate is None and stats.hits == stats.misses == stats.bytes_moved == 0
    assert stats.device_bytes == stats.host_bytes == stats.dense_bytes == 0 and stats.step_hit_rates == []
    generate(model, random_ids(2, 100), cache, 21)
    stats = cache.stats()
    rows, items, item_bytes = 2 * 2, 40 // 4, 4 * 2 * 16 * 4
    assert [layer.layer for layer in stats.layers] == [0, 1]
    for layer in stats.layers:
        # The first of 21 tokens comes of the prompt.
        assert len(layer.steps) == 20
        assert all(hits + misses == rows * items for hits, misses in layer.steps)
        assert (layer.hits, layer.misses) == tuple(map(sum, zip(*layer.steps, strict=True)))
        assert layer.bytes_moved == layer.misses * item_bytes
        assert layer.hit_rate == layer.hits / (layer.hits + layer.misses)
        # The first step finds nothing but the page of its own token.
        assert layer.steps[0][0] <= rows
    assert stats.hits == sum(layer.hits for layer in stats.layers)
    assert len(stats.step_hit_rates) == 20
    assert stats.dense_bytes == 2 * 2 * rows * 120 * 16 * 4
    assert stats.host_bytes >= stats.dense_bytes
    plain = json.loads(json.dumps(stats.to_dict()))
    assert plain["hits"] == stats.hits and plain["hit_rate"] == stats.hit_rate and len(plain["layers"]) == 2


def test_a_prompt_counts_for_nothing(model, new_cache):
    cache = new_cache()
    forward(model, random_ids(2, 100), cache)
    assert cache.stats().hits == cache.stats().misses == 0
    forward(model, random_ids(2, 17), cache)
    assert cache.stats().hits == cache.stats().misses == 0


def test_the_device_holds_a_buffer_and_a_representation(model, new_cache):
    """Of a history four times as long the device holds what it held, but for the representation and the item map."""
    held = []
    for tokens in (400, 1600):
        cache = new_cache()
        forward(model, random_ids(1, tokens), cache)
        forward(model, random_ids(1, 1), cache)
        stats = cache.stats()
        coordinator = cache.layers[0].coordinator
        memory = coordinator.memory
        held.append(memory.buffer.buffer.nbytes)
        layer = stats.layers[0]
        state = layer.device_bytes - memory.buffer.buffer.nbytes - coordinator.algorithm.nbytes
        assert state <= memory.rows * (4 * memory.store.capacity + 8 * memory.store.table.shape[1] + 12 * 80 + 4096)
        assert coordinator.recent is None
    assert held[0] == held[1]


def test_repr_says_what_it_holds(model, new_cache, method):
    cache = new_cache()
    assert repr(cache).startswith("HierarchicalSparseCache(0 tokens")
    forward(model, random_ids(3, 100), cache)
    text = repr(cache)
    assert "100 tokens x 3" in text and f"top_k={TOP_K[method]}" in text
    layers = model.config.num_hidden_layers
    assert f"{layers} of {layers} layers hierarchical" in text and len(text) < 300


# ---- a forward that fails --------------------------------------------------------------------------------------------


class Fault:
    """Makes the last layer's MLP raise, once armed: by then every layer but none of the output is done."""

    def __init__(self, model: nn.Module, error: BaseException):
        self.error, self.armed = error, False
        layer = model.model.layers[-1]
        self.handle = layer.mlp.register_forward_pre_hook(self)
        self.middle = layer.self_attn.register_forward_pre_hook(self.in_attention)
        self.in_attention_armed = False

    def __call__(self, module, args):
        if self.armed:
            raise self.error

    def in_attention(self, module, args):
        if self.in_attention_armed:
            raise self.error


FAILING = {
    "llama": GQA,
    "llama with a dense layer": GQA | {"dense_layers": [0]},
    "ministral": GQA,
    "deepseek_v32": {},
    "glm_moe_dsa": {},
}


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("in attention", RuntimeError("on purpose")),
        ("after attention", RuntimeError("on purpose")),
        ("in attention", KeyboardInterrupt()),
    ],
    ids=["in attention", "after attention", "interrupted"],
)
@pytest.mark.parametrize(("before", "new"), [(0, 60), (20, 1), (60, 1), (60, 9), (35, 9)])
@pytest.mark.parametrize("name", FAILING)
def test_a_forward_that_fails_leaves_the_history_as_it_was(name, before, new, where, error):
    model, options = make_model(name.split()[0]), FAILING[name]
    ids, more = random_ids(2, before + new), random_ids(2, 6, seed=1)

    def run(cache: Any, fault: Fault | None = None) -> Tensor:
        if before:
            forward(model, ids[:, :before], cache)
        if fault is not None:
            fault.armed, fault.in_attention_armed = where == "after attention", where == "in attention"
            with pytest.raises(type(error)):
                forward(model, ids[:, before:], cache)
            fault.armed = fault.in_attention_armed = False
            assert cache.get_seq_length() == before
            # No hook runs after an interrupt: what it leaves is put right when the model is next used.
            if isinstance(error, Exception):
                assert state_of(model) == state
                assert not any(layer.coordinator.attending for layer in cache.layers if hasattr(layer, "coordinator"))
        last = forward(model, ids[:, before:], cache)
        return torch.cat((last, steps(model, more, cache)), dim=1)

    expected = run(HierarchicalSparseCache(model, **options))
    dense = decode(model, ids, dense_cache(model), max(before, 1))
    fault = Fault(model, error)
    state = state_of(model)
    assert same_bits(run(HierarchicalSparseCache(model, **options), fault), expected)
    # The model itself is as it was, for any cache.
    assert state_of(model) == state
    assert same_bits(decode(model, ids, dense_cache(model), max(before, 1)), dense)


def test_generate_again_after_a_failure(tiny):
    model, ids = make_model("llama"), random_ids(2, 60)
    expected = generate(model, ids, HierarchicalSparseCache(model, **GQA), 8)
    cache = HierarchicalSparseCache(model, **GQA)
    fault = Fault(model, RuntimeError("on purpose"))
    fault.armed = True
    with pytest.raises(RuntimeError, match="on purpose"):
        generate(model, ids, cache, 8)
    fault.armed = False
    assert same_bits(logits_of(generate(model, ids, cache, 8)), logits_of(expected))


@pytest.mark.parametrize("name", ["llama", "deepseek_v32"])
def test_an_interrupted_model_serves_any_cache(name):
    """The module that was interrupted, still as it was entered, may next be called with any cache, or be unpatched."""
    model, ids = make_model(name), random_ids(2, 60)
    state = state_of(model)
    expected = decode(model, ids, dense_cache(model), 50)
    for first in (lambda: None, lambda: unpatch_model(model)):
        patch_model(model)
        fault = Fault(model, KeyboardInterrupt())
        fault.in_attention_armed = True
        with pytest.raises(KeyboardInterrupt):
            forward(model, ids, HierarchicalSparseCache(model, **GQA if name == "llama" else {}))
        fault.handle.remove()
        fault.middle.remove()
        first()
        assert same_bits(decode(model, ids, dense_cache(model), 50), expected)
    assert state_of(model) == state


def test_crop_after_an_interrupt():
    model, ids, more = make_model("llama"), random_ids(2, 70), random_ids(2, 6, seed=1)
    cache, fresh = (HierarchicalSparseCache(model, **GQA, algorithm="quest") for _ in range(2))
    fault = Fault(model, KeyboardInterrupt())
    forward(model, ids[:, :60], cache)
    fault.armed = True
    with pytest.raises(KeyboardInterrupt):
        forward(model, ids[:, 60:], cache)
    fault.armed = False
    cache.crop(-5)
    forward(model, ids[:, :60], fresh)
    fresh.crop(-5)
    assert cache.get_seq_length() == 55
    assert same_bits(steps(model, more, cache), steps(model, more, fresh))


def test_a_linear_state_that_is_lost_is_not_used():
    """It is overwritten in place, so a forward that fails midway takes it along: start again, and it is all right."""
    model, ids = make_model("qwen3_next"), random_ids(1, 60)
    expected = decode(model, ids, HierarchicalSparseCache(model, **GQA), 50)
    cache, fault = HierarchicalSparseCache(model, **GQA), Fault(model, RuntimeError("on purpose"))
    for before in (0, 50):
        if before:
            forward(model, ids[:, :before], cache)
        fault.armed = True
        with pytest.raises(RuntimeError, match="on purpose"):
            forward(model, ids[:, before:], cache)
        fault.armed = False
    with pytest.raises(ValueError, match=r"call `cache.reset\(\)`"):
        forward(model, ids[:, 50:51], cache)
    cache.reset()
    assert same_bits(decode(model, ids, cache, 50), expected)
