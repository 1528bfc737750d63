"""Quantised weights, by bitsandbytes and torchao: what a cache keeps is in the dtype that the model computes in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from hf_hisparse import HierarchicalSparseCache
from tests.helpers import DEVICE, METHODS, dense_cache, generate, logits_of, make_model, random_ids, same_bits
from tests.test_graph import captured_and_eager, follow


def quantisation(name: str) -> Any:
    library = "torchao" if name == "fp8" else "bitsandbytes"
    pytest.importorskip(library, reason=f"needs `pip install {library}`")
    if name == "fp8":
        from torchao.quantization import Float8WeightOnlyConfig

        return TorchAoConfig(Float8WeightOnlyConfig())
    return BitsAndBytesConfig(**{"8 bits": {"load_in_8bit": True}, "4 bits": {"load_in_4bit": True}}[name])


@pytest.fixture(scope="module", params=["8 bits", "4 bits", "fp8"])
def model(request, tmp_path_factory) -> Any:
    config = quantisation(request.param)
    path = tmp_path_factory.mktemp("model")
    # In blocks of 64 weights.
    make_model("llama", intermediate_size=128).save_pretrained(path)
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
