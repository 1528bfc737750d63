"""What is done with a model and its `generate` around a cache: copies, wrappers, threads, training, odd arguments."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import hf_hisparse
from hf_hisparse import HierarchicalSparseCache
from hf_hisparse.deferred_stop import LOOP
from hf_hisparse.models import cache_argument
from tests.helpers import (
    BASE,
    DEVICE,
    GQA,
    HEAD,
    METHODS,
    close,
    dense_cache,
    forward,
    generate,
    left_padding,
    logits_of,
    make_model,
    random_ids,
    same_bits,
)


PROMPT, NEW = 60, 5


@pytest.fixture(params=METHODS)
def method(request) -> str:
    return request.param


def tokens(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    """Greedy tokens of a call that names no cache."""
    return model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0, **kwargs)


def caches_of(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list to which every cache of ours that a forward begins with is added from here on."""
    begun: list[Any] = []
    begin = HierarchicalSparseCache.begin_forward

    def noted(self: HierarchicalSparseCache, *args: Any) -> None:
        begun.append(self)
        begin(self, *args)

    monkeypatch.setattr(HierarchicalSparseCache, "begin_forward", noted)
    return begun


# ---- models that are copied and wrapped while they are enabled -------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_an_enabled_model_generates_by_its_own_weights(copied):
    model, ids = make_model("llama"), random_ids(1, PROMPT)
    with hf_hisparse.enable(model, **GQA):
        before = tokens(model, ids)
        other = copied(model)
        for parameter in other.parameters():
            parameter.data *= 0.5
        plain = make_model("llama")
        plain.load_state_dict(other.state_dict())
        expected = generate(plain, ids, HierarchicalSparseCache(plain, **GQA), NEW).sequences
        assert not torch.equal(expected, before)
        assert torch.equal(tokens(other, ids), expected)
        assert torch.equal(tokens(model, ids), before)
    # The copy is enabled by itself.
    assert "generate" not in vars(model) and "generate" in vars(other)
    with pytest.raises(ValueError, match="continuous batching"):
        other.init_continuous_batching()
    hf_hisparse.disable(other)
    assert vars(other).keys() - vars(plain).keys() == set()


def test_a_compiled_model_is_enabled(monkeypatch):
    model, ids = make_model("llama"), random_ids(1, PROMPT)
    expected = generate(model, ids, HierarchicalSparseCache(model, **GQA), NEW).sequences
    compiled: Any = torch.compile(model, backend="eager")
    assert cache_argument(compiled) == cache_argument(model)
    held, begun = set(vars(compiled)), caches_of(monkeypatch)
    with hf_hisparse.enable(compiled, **GQA):
        assert torch.equal(tokens(compiled, ids), expected) and begun
    assert set(vars(compiled)) == held and "generate" not in vars(model)


def test_a_generate_of_ones_own_is_kept():
    model, ids = make_model("llama"), random_ids(1, PROMPT)
    own, calls = model.generate, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return own(*args, **kwargs)

    model.generate = counted
    with hf_hisparse.enable(model, **GQA), hf_hisparse.enable(model, top_k=512):
        tokens(model, ids)
    assert model.generate is counted and len(calls) == 1
    assert isinstance(calls[0][cache_argument(model)], HierarchicalSparseCache)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_enabled_twice_and_undone_in_any_order(monkeypatch, order):
    """As two threads that share a model may."""
    model, ids = make_model("llama"), random_ids(1, PROMPT)
    held, begun = set(vars(model)), caches_of(monkeypatch)
    contexts = [hf_hisparse.enable(model, top_k=256), hf_hisparse.enable(model, **GQA)]
    for context in contexts:
        context.__enter__()
    for left, which in zip((1, 0), order, strict=True):
        tokens(model, ids)
        assert begun[-1].config.top_k == (GQA["top_k"] if left or order == (0, 1) else 256)
        contexts[which].__exit__(None, None, None)
    assert vars(model).keys() - held <= {"forward", LOOP}


def test_threads_that_each_enable_a_model():
    model, ids = make_model("llama"), [random_ids(1, PROMPT, seed=seed) for seed in range(3)]
    expected = [generate(model, each, HierarchicalSparseCache(model, **GQA), NEW).sequences for each in ids]
    held, wrong = set(vars(model)), []

    def work(which: int) -> None:
        for _ in range(3):
            with hf_hisparse.enable(model, **GQA):
                if not torch.equal(tokens(model, ids[which]), expected[which]):
                    wrong.append(which)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and set(vars(model)) == held


# ---- what a call asks for --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [{"use_cache": False}, {"cache_implementation": "dynamic"}])
@pytest.mark.parametrize("how", ["arguments", "keyword", "position"])
def test_a_call_that_asks_for_another_cache_has_it(monkeypatch, asked, how):
    """Whether it says so by an argument or in a config."""
    model, ids = make_model("llama"), random_ids(1, PROMPT)
    dense = tokens(model, ids)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with hf_hisparse.enable(model, **GQA):
        begun = caches_of(monkeypatch)
        if how == "arguments":
            found = tokens(model, ids, **asked)
        elif how == "keyword":
            found = model.generate(ids, generation_config=GenerationConfig(**options, **asked))
        else:
            found = model.generate(ids, GenerationConfig(**options, **asked))
        assert torch.equal(found, dense) and not begun
        # One that asks for none in particular gets ours.
        model.generate(ids, GenerationConfig(**options))
        assert begun


@pytest.mark.parametrize("asked", [{"use_cache": False}, {"cache_implementation": "static"}])
def test_a_model_that_asks_for_another_cache_cannot_be_enabled(asked):
    """Its calls would clash with it, or not be served, and say nothing."""
    model = make_model("llama")
    vars(model.generation_config).update(asked)
    with pytest.raises(ValueError, match=rf"generation_config.*{next(iter(asked))}.*set it to None"):
        hf_hisparse.enable(model, **GQA)
    assert "generate" not in vars(model)
    # What the files of some models say, and transformers takes for nothing.
    vars(model.generation_config).update(use_cache=None, cache_implementation="hybrid")
    with hf_hisparse.enable(model, **GQA):
        tokens(model, random_ids(1, PROMPT))


def test_no_cache_is_asked_for_beside_one(tiny):
    model, ids = tiny("llama"), random_ids(1, PROMPT)
    cache = HierarchicalSparseCache(model, **GQA)
    with pytest.raises(ValueError, match="`use_cache=False` is given beside"):
        generate(model, ids, cache, NEW, use_cache=False)
    assert cache.get_seq_length() == 0


# ---- drafts over a history -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [20, 50])
def test_drafts_do_not_begin_over_a_history(tiny, method, held):
    """There transformers reads the whole prompt once more, over what is held of it, and any cache would be wrong."""
    name, options = METHODS[method]
    model, ids = tiny(name), random_ids(1, 12).repeat(1, 5)
    cache = HierarchicalSparseCache(model, **options)
    forward(model, ids[:, :held], cache)
    fresh = cache.fork()
    with pytest.raises(ValueError, match=rf"drafts.*over the {held} tokens in the cache"):
        generate(model, ids, cache, NEW, prompt_lookup_num_tokens=3)
    assert cache.get_seq_length() == held
    assert same_bits(*(logits_of(generate(model, ids, each, NEW)) for each in (cache, fresh)))


def test_what_follows_drafts_is_no_draft(tiny, method):
    """A turn of which more than one logit is asked for is attended to as it is without drafts before it."""
    name, options = METHODS[method]
    model, ids = tiny(name), random_ids(1, 12).repeat(1, 5)
    logits = []
    for drafts in ({}, {"prompt_lookup_num_tokens": 3}):
        cache = HierarchicalSparseCache(model, **options, max_draft_tokens=4)
        said = generate(model, ids, cache, NEW, **drafts).sequences
        turn = torch.cat((said[:, -1:], random_ids(1, 20, seed=4)), dim=1)
        with torch.no_grad():
            logits.append(model(turn, **{cache_argument(model): cache}, logits_to_keep=10).logits)
    close(*logits)


# ---- batches that change ---------------------------------------------------------------------------------------------


def test_linear_states_are_repeated_and_selected_as_histories_are(tiny):
    """Which transformers' own cache cannot do, though beam search reorders them."""
    model, ids, mask = tiny("qwen3_next"), random_ids(3, PROMPT), left_padding(3, PROMPT)
    more = random_ids(6, NEW, seed=1)
    cache = HierarchicalSparseCache(model, **GQA)
    forward(model, ids, cache, mask)
    cache.batch_repeat_interleave(2)
    kept = torch.tensor([True, False, True, True, False, True])
    cache.batch_select_indices(kept)
    rows = torch.arange(3).repeat_interleave(2)[kept].to(DEVICE)
    fresh = HierarchicalSparseCache(model, **GQA)
    forward(model, ids[rows], fresh, mask[rows])
    for t in range(NEW):
        new, seen = more[:4, t : t + 1], torch.nn.functional.pad(mask[rows], (0, t + 1), value=1)
        close(forward(model, new, cache, seen), forward(model, new, fresh, seen))


# ---- models that change ----------------------------------------------------------------------------------------------


def test_a_cache_of_another_model_is_refused(tiny):
    """Of another type, or with more layers or fewer; one that is a copy may take over."""
    ids = random_ids(1, PROMPT)
    models = [tiny("llama"), make_model("llama", num_hidden_layers=3), tiny("qwen3"), tiny("deepseek_v32")]
    for model in models:
        for other in models:
            hf_hisparse.patch_model(other)
            cache = HierarchicalSparseCache(model, **({} if hasattr(model.config, "index_topk") else GQA))
            if other is model:
                both = [generate(each, ids, cache.fork(), NEW) for each in (model, copy.deepcopy(model))]
                assert same_bits(*(logits_of(output) for output in both))
                continue
            for held in (0, PROMPT - 1):
                if held:
                    forward(model, ids[:, :held], cache)
                with pytest.raises(ValueError, match="was made for . layers of .*make it from the model that uses it"):
                    generate(other, ids, cache, NEW)
                assert cache.get_seq_length() == held


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [None, 256])
def test_no_wrong_gradients(method, top_k):
    """A history keeps none, so there are none to be had, rather than a part of them."""
    name, options = METHODS[method]
    model, ids = make_model(name), random_ids(1, PROMPT)
    options = options | ({"top_k": top_k} if top_k and "top_k" in options else {})
    cache = HierarchicalSparseCache(model, **options)
    for new in (ids, ids[:, :1]):
        logits = model(new, **{cache_argument(model): cache}).logits
        with pytest.raises(ValueError, match="no gradients pass through a HierarchicalSparseCache"):
            logits.sum().backward()
    with torch.no_grad():
        fresh = HierarchicalSparseCache(model, **options)
        forward(model, ids, fresh)
        assert same_bits(logits.detach(), forward(model, ids[:, :1], fresh))


def test_layers_that_drop_the_cache_are_refused(method):
    """As those of which gradients are checkpointed do, whose masks are made for a history."""
    name, options = METHODS[method]
    model, ids = make_model(name), random_ids(1, PROMPT)
    model.train()
    model.gradient_checkpointing_enable()
    cache = HierarchicalSparseCache(model, **options)
    with pytest.raises(ValueError, match=r"ran without the cache.*`model.eval\(\)`"):
        model(ids, **{cache_argument(model): cache})
    assert cache.get_seq_length() == 0
    model.eval()
    fresh = HierarchicalSparseCache(model, **options)
    assert same_bits(*(logits_of(generate(model, ids, each, NEW)) for each in (cache, fresh)))


# ---- masks and modules that a selection cannot follow ----------------------------------------------------------------


@pytest.mark.parametrize("held", [0, 20, 50])
def test_masks_of_every_head_are_refused(tiny, held):
    model, ids = tiny("llama"), random_ids(2, PROMPT)
    cache = HierarchicalSparseCache(model, **GQA)
    if held:
        forward(model, ids[:, :held], cache)
    for new in (1, 4, 30):
        mask = torch.zeros(2, 4, new, held + new, device=DEVICE)
        with torch.no_grad(), pytest.raises(ValueError, match=r"one for every head.*give one of \[2, "):
            model(ids[:, :new], attention_mask=mask, **{cache_argument(model): cache})
        assert cache.get_seq_length() == held


@pytest.mark.parametrize(
    ("name", "said"),
    [("doge", "with a mask for every head"), ("diffllama", "that a module calls more than once")],
)
def test_modules_that_attend_in_a_way_of_their_own_are_refused(name, said):
    """Whose masks depend on the values of the whole history, or that attend to halves of it."""
    if name not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this transformers has no {name}")
    torch.manual_seed(0)
    options: dict[str, Any] = BASE | (HEAD if name == "diffllama" else {})
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **options)).eval().to(DEVICE)
    ids = random_ids(2, PROMPT)
    for chosen in (GQA, {"top_k": 256}):
        cache = HierarchicalSparseCache(model, **chosen)
        with pytest.raises(ValueError, match=f"{said}; name layer 0"):
            generate(model, ids, cache, NEW)
        assert cache.get_seq_length() == 0
    assert torch.equal(
        generate(model, ids, dense_cache(model), NEW).sequences, generate(model, ids, None, NEW).sequences
    )


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v32"])
@pytest.mark.parametrize("length", [8, PROMPT], ids=["dense", "sparse"])
def test_dropout_is_refused(model_type, length):
    model = make_model(model_type, attention_dropout=0.5)
    ids = random_ids(1, length + 2)
    cache = HierarchicalSparseCache(model, top_k=32)
    before = forward(model, ids[:, :length], cache)
    model.train()
    with torch.no_grad(), pytest.raises(ValueError, match=r"dropout=0\.5.*model\.eval"):
        model(ids[:, length : length + 1], **{cache_argument(model): cache})
    assert cache.get_seq_length() == length
    model.eval()
    other = HierarchicalSparseCache(model, top_k=32)
    assert same_bits(forward(model, ids[:, :length], other), before)
    last = ids[:, length : length + 1]
    assert same_bits(forward(model, last, cache), forward(model, last, other))
