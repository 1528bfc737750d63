"""Quantised weights, by bitsandbytes: what a cache keeps is in the dtype that the model computes in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_hisparse import HierarchicalSparseCache
from tests.helpers import DEVICE, METHODS, dense_cache, generate, logits_of, make_model, random_ids, same_bits
from tests.test_graph import captured_and_eager, follow


pytest.importorskip("bitsandbytes", reason="needs `pip install bitsandbytes`")


@pytest.fixture(scope="module", params=["8 bits", "4 bits"])
def model(request, tmp_path_factory) -> Any:
    path = tmp_path_factory.mktemp("model")
    # In blocks of 64 weights.
    make_model("llama", intermediate_size=128).save_pretrained(path)
    wanted = {"8 bits": {"load_in_8bit": True}, "4 bits": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
    config = BitsAndBytesConfig(**wanted[request.param])
    return AutoModelForCausalLM.from_pretrained(
        path, quantization_config=config, dtype=torch.bfloat16, device_map=str(DEVICE)
    ).eval()


@pytest.mark.parametrize("method", ["llama-quest", "llama-rabitq"])
def test_quantised_weights(method, model):
    options, ids = METHODS[method][1], random_ids(2, 120)
    whole = HierarchicalSparseCache(model, **options | {"top_k": 512, "buffer_size": 512})
    dense = generate(model, ids, dense_cache(model), 12).sequences
    assert torch.equal(generate(model, ids, whole, 12).sequences, dense)
    caches = [HierarchicalSparseCache(model, **options, offload=offload) for offload in (True, False)]
    assert same_bits(*(logits_of(generate(model, ids, cache, 12)) for cache in caches))
    assert caches[0].layers[0].coordinator.memory.dtype == torch.bfloat16


def test_graphs_of_quantised_weights(model):
    follow(model, captured_and_eager(model, "llama-rabitq"), 5)
