"""128K tokens of history on a CUDA device, in layers of full width: every step has the resident oracle's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hf_hisparse import HierarchicalSparseCache
from tests.helpers import forward, make_config, random_ids, same_bits


DEVICE = "cuda"
TOKENS, STEPS = 1 << 17, 32

LLAMA_8B = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
DEEPSEEK_V32 = {
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "head_dim": 64,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
}
"""The attention of Llama 3.1 8B and of DeepSeek V3.2; all else is as small as in `helpers.CONFIGS`."""

METHODS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama-quest": ("llama", LLAMA_8B, {"top_k": 2048, "algorithm": "quest"}),
    "llama-rabitq": ("llama", LLAMA_8B, {"top_k": 2048, "algorithm": "rabitq"}),
    "deepseek": ("deepseek_v32", DEEPSEEK_V32, {}),
}


def layer_of(name: str, shape: dict[str, Any]) -> nn.Module:
    """A model of one layer, in bfloat16."""
    config = make_config(name, **shape, num_hidden_layers=1, max_position_embeddings=2 * TOKENS)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def fill(cache: HierarchicalSparseCache, model: nn.Module) -> None:
    """A random history, in two chunks, handed to the layer as its attention would: no prompt has to be computed."""
    config, coordinator = model.config, cache.layers[0].coordinator
    generator = torch.Generator(DEVICE).manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE, generator=generator)

    for tokens in (TOKENS - TOKENS // 5, TOKENS // 5):
        if hasattr(config, "kv_lora_rank"):
            position = coordinator.length + torch.arange(tokens, device=DEVICE).unsqueeze(0)
            coordinator.algorithm.extend(draw(1, tokens, config.index_head_dim), position, coordinator.length + tokens)
            heads, widths = 1, (config.kv_lora_rank, config.qk_rope_head_dim)
        else:
            heads, widths = config.num_key_value_heads, (config.head_dim, config.head_dim)
        coordinator.extend(tuple(draw(1, heads, tokens, width) for width in widths), None)
    assert cache.get_seq_length() == TOKENS


def decode(model: nn.Module, cache: HierarchicalSparseCache) -> tuple[Tensor, Tensor]:
    """The attention's output and the logits of every step. Each token comes four times, so that steps have much in
    common, and every fourth is new."""
    outputs, logits = [], []
    ids = random_ids(1, STEPS // 4).repeat_interleave(4, dim=1).to(DEVICE)
    hook = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    for t in range(STEPS):
        logits.append(forward(model, ids[:, t : t + 1], cache))
    hook.remove()
    return torch.cat(outputs, dim=1), torch.cat(logits, dim=1)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("method", METHODS)
def test_every_step_equals_the_resident_oracle(method, backend):
    if backend == "triton":
        pytest.importorskip("triton")
    name, shape, options = METHODS[method]
    model = layer_of(name, shape)
    results = []
    for offload in (True, False):
        cache = HierarchicalSparseCache(model, **options, backend=backend, offload=offload)
        fill(cache, model)
        results.append((*decode(model, cache), cache.stats(), cache.layers[0].coordinator))
    (output, logits, stats, coordinator), (expected, expected_logits, resident, _) = results
    assert output.shape[1] == STEPS and output.any()
    assert same_bits(output, expected) and same_bits(logits, expected_logits)

    memory, (layer,) = coordinator.memory, stats.layers
    assert cache.get_seq_length() == TOKENS + STEPS and resident.host_bytes == resident.misses == 0
    assert len(layer.steps) == STEPS
    assert all(hits + misses == memory.rows * coordinator.k for hits, misses in layer.steps)
    assert (layer.hits, layer.misses) == tuple(map(sum, zip(*layer.steps, strict=True)))
    # Nothing is there at first but the newest tokens, and tokens that come again find some of what they asked for.
    assert layer.hits > layer.steps[0][0] * STEPS and layer.misses > layer.steps[0][1]
    assert layer.bytes_moved == layer.misses * memory.layout.elements * memory.dtype.itemsize
    assert stats.host_bytes >= stats.dense_bytes == resident.dense_bytes
    # The device holds the buffer, what is scored, and the maps of the LRU: four bytes an item and as many a slab.
    held = memory.buffer.buffer.nbytes + coordinator.algorithm.nbytes
    assert held < layer.device_bytes < held + memory.rows * (4 * memory.store.capacity + (1 << 17))
    # Whatever the buffer holds at the end has the bytes of the history.
    items = memory.layout.pack([part.flatten(0, 1) for part in coordinator.history()])
    row, slot = (memory.buffer.slot_item >= 0).nonzero(as_tuple=True)
    item = memory.buffer.slot_item[row, slot].long()
    complete = (item + 1) * memory.layout.page_size <= coordinator.length
    assert len(row) > memory.rows * coordinator.k
    assert torch.equal(memory.buffer.buffer[row, slot][complete], items[row, item][complete])


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", [1, 4])
def test_a_prompt_of_selections_runs_in_bounded_memory(chunks):
    """A mask of every query alone would take a byte for each of 128K x 128K, and the stock indexer's scores hundreds.
    There are fewer heads than in the real layer, whose states of 128K tokens would be as large."""
    pytest.importorskip("triton")
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32, "index_n_heads": 16}
    model = layer_of("deepseek_v32", DEEPSEEK_V32 | heads)
    ids = random_ids(1, TOKENS).to(DEVICE)
    cache = HierarchicalSparseCache(model)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for chunk in ids.chunk(chunks, dim=1):
        logits = forward(model, chunk, cache)
    peak = torch.cuda.max_memory_allocated() - before
    assert bool(logits.isfinite().all()) and cache.get_seq_length() == TOKENS
    assert peak < TOKENS * TOKENS // chunks
