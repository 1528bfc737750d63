"""Low-rank adapters by PEFT: which one is active may change between any two calls, also within a conversation."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch

from hf_hisparse import HierarchicalSparseCache, enable
from tests.helpers import METHODS, dense_cache, generate, logits_of, make_model, random_ids, same_bits
from tests.test_graph import captured_and_eager, follow, replays


peft = pytest.importorskip("peft", reason="needs `pip install peft`")

PROMPT, NEW = 120, 12


def adapted(name: str) -> Any:
    """A model with the adapters "one", which is active, and "two"."""
    model: Any = make_model(name)
    if name != "llama":
        model.set_experts_implementation("batched_mm")  # As in a graph: to the same bits.
    adapters = (peft.LoraConfig(r=r, target_modules="all-linear", init_lora_weights=False) for r in (4, 2))
    model = peft.get_peft_model(model, next(adapters), "one")
    model.add_adapter("two", next(adapters))
    return model.eval()


@contextlib.contextmanager
def state(model: Any, name: str) -> Any:
    """Within it an adapter is active, or with "none" none is."""
    if name == "none":
        with model.disable_adapter():
            yield
    else:
        model.set_adapter(name)
        yield


@pytest.mark.parametrize("method", METHODS)
def test_adapters_that_change_between_calls(method):
    """Against the dense cache where all is selected, and against the whole history on the device where it is not."""
    name, options = METHODS[method]
    model, ids = adapted(name), random_ids(2, PROMPT)
    found = {}
    for active in ("one", "two", "none", "one"):
        with state(model, active):
            if name == "llama":
                whole = HierarchicalSparseCache(model, **options | {"top_k": 512, "buffer_size": 512})
                assert torch.equal(
                    generate(model, ids, whole, NEW).sequences, generate(model, ids, dense_cache(model), NEW).sequences
                )
            caches = (HierarchicalSparseCache(model, **options, offload=offload) for offload in (True, False))
            ours, oracle = (logits_of(generate(model, ids, cache, NEW)) for cache in caches)
            assert same_bits(ours, oracle) and same_bits(ours, found.setdefault(active, ours))
    assert not torch.equal(found["one"], found["two"]) and not torch.equal(found["one"], found["none"])


@pytest.mark.parametrize("method", ["llama-rabitq", "deepseek"])
def test_adapters_that_change_within_a_conversation(method):
    """The graph of one adapter is not replayed for another."""
    model = adapted(METHODS[method][0])
    caches = captured_and_eager(model, method, PROMPT)
    for turn, active in enumerate(("one", "two", "none", "one")):
        before = replays(caches[0])
        with state(model, active):
            follow(model, caches, 4, seed=turn)
        assert replays(caches[0]) > before


def test_a_merged_adapter():
    model, ids = adapted("llama"), random_ids(1, PROMPT)
    merged = copy.deepcopy(model).merge_and_unload()
    options = METHODS["llama-rabitq"][1]
    found, expected = (
        logits_of(generate(each, ids, HierarchicalSparseCache(each, **options), NEW)) for each in (merged, model)
    )
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_enabling_an_adapted_model():
    model, ids = adapted("llama"), random_ids(1, PROMPT)
    options = METHODS["llama-rabitq"][1]
    expected = generate(model, ids, HierarchicalSparseCache(model, **options), NEW).sequences
    with enable(model, **options):
        found = generate(model, ids, None, NEW)
        assert isinstance(found.past_key_values, HierarchicalSparseCache)
        assert torch.equal(found.sequences, expected)
