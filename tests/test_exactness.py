"""The output does not change: against the resident oracle bit for bit, against the dense cache, against stock DSA."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from hf_hisparse import HierarchicalSparseCache, ops
from hf_hisparse.algorithms import LightningIndexer, Quest, RaBitQ
from hf_hisparse.backends import ReferenceBackend
from hf_hisparse.cache import HierarchicalLayer
from hf_hisparse.coordinator import SparseCoordinator
from hf_hisparse.layout import ItemLayout
from hf_hisparse.models.dsa import LatentPatch
from hf_hisparse.ops import reference
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
    padding,
    random_ids,
    same_bits,
)


# ---- the resident oracle, bit for bit --------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "padded"), [(1, False), (4, False), (4, True)], ids=["1", "4", "4 padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("method", METHODS)
def test_every_step_equals_the_resident_oracle(tiny, method, dtype, batch, padded):
    name, options = METHODS[method]
    model = tiny(name, dtype)
    ids = random_ids(batch, 170)
    mask = padding("mixed", batch, 150, 170) if padded else None
    resident = HierarchicalSparseCache(model, **options, offload=False)
    expected = decode(model, ids, resident, 150, mask)
    assert resident.stats().host_bytes == 0
    k = resident.layers[0].coordinator.top_k
    misses = []
    for buffer in (k, 2 * k, 4 * k):
        cache = HierarchicalSparseCache(model, **options, buffer_size=buffer)
        assert same_bits(decode(model, ids, cache, 150, mask), expected)
        stats = cache.stats()
        assert stats.hits and stats.misses and stats.host_bytes
        misses.append(stats.misses)
    # A larger buffer changes what is fetched, and nothing else.
    assert misses[0] > misses[2]


@pytest.mark.parametrize("method", METHODS)
def test_a_context_that_outgrows_top_k_while_decoding(tiny, method):
    name, options = METHODS[method]
    model, ids, mask = tiny(name), random_ids(4, 70), padding("mixed", 4, 25, 70)
    resident = decode(model, ids, HierarchicalSparseCache(model, **options, offload=False), 25, mask)
    cache = HierarchicalSparseCache(model, **options)
    assert same_bits(decode(model, ids, cache, 25, mask), resident)
    assert cache.stats().misses


@pytest.mark.parametrize(
    "name", ["qwen3", "phi3", "smollm3", "ministral", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3"]
)
def test_every_family_equals_the_resident_oracle(tiny, name):
    model, ids = tiny(name), random_ids(2, 120)
    resident = decode(model, ids, HierarchicalSparseCache(model, **GQA, offload=False), 100)
    cache = HierarchicalSparseCache(model, **GQA)
    assert same_bits(decode(model, ids, cache, 100), resident)
    assert cache.stats().misses


@pytest.mark.parametrize("dense_layers", [[0], [1], [0, 2], {1, 2}])
def test_dense_layers_stay_dense(dense_layers):
    model, ids = make_model("llama", num_hidden_layers=3), random_ids(2, 120)
    resident = decode(model, ids, HierarchicalSparseCache(model, **GQA, dense_layers=dense_layers, offload=False), 100)
    cache = HierarchicalSparseCache(model, **GQA, dense_layers=dense_layers)
    assert same_bits(decode(model, ids, cache, 100), resident)
    for index, layer in enumerate(cache.layers):
        assert (getattr(layer, "coordinator", None) is None) == (index in dense_layers)
    assert {layer.layer for layer in cache.stats().layers} == set(range(3)) - set(dense_layers)


# ---- a coordinator, whatever is selected -----------------------------------------------------------------------------


def chosen_at_random(k: int, items: int) -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randperm(items, generator=generator)[:k].sort().values.tolist()


def the_same(k: int, items: int) -> Iterator[list[int]]:
    while True:
        yield list(range(3, 3 + k))


def disjoint(k: int, items: int) -> Iterator[list[int]]:
    step = 0
    while True:
        yield sorted((step * k + i) % items for i in range(k))
        step += 1


def sweeping(k: int, items: int) -> Iterator[list[int]]:
    step = 0
    while True:
        yield sorted((step + i) % items for i in range(k))
        step += 1


def ragged(k: int, items: int) -> Iterator[list[int]]:
    for step, selection in enumerate(chosen_at_random(k, items)):
        count = step % (k + 1)
        yield selection[:count] + [-1] * (k - count)


PAGES = (partial(ItemLayout.page_head, 4), partial(Quest, 4), (2, 16, 16))
TOKENS = (partial(ItemLayout.page_head, 1), partial(RaBitQ, 1), (2, 16, 16))
LATENTS = (ItemLayout.token, LightningIndexer, (1, 32, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("pattern", [chosen_at_random, the_same, disjoint, sweeping, ragged])
@pytest.mark.parametrize("kind", [PAGES, TOKENS, LATENTS], ids=["pages", "tokens", "latents"])
def test_any_selections_equal_the_resident_oracle(kind, pattern, batch, dtype):
    layout, algorithm, (heads, key_width, value_width) = kind
    k, first, steps, group = 8, 150, 25, 3
    coordinators = [
        SparseCoordinator(k, k, slots, layout, algorithm, ReferenceBackend()) for slots in (None, k, 2 * k, 4 * k)
    ]
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    prompt = draw(batch, heads, first, key_width), draw(batch, heads, first, value_width)
    for coordinator in coordinators:
        coordinator.extend(prompt, None)
    page_size = coordinators[0].memory.layout.page_size
    width = coordinators[0].memory.layout.key[1]
    # Each row is a step behind the one before it, so that rows do not move in step.
    patterns = [pattern(k, first // page_size) for _ in range(batch * heads)]
    for row, selections in enumerate(patterns):
        for _ in range(row):
            next(selections)
    for _ in range(steps):
        token = draw(batch, heads, 1, key_width), draw(batch, heads, 1, value_width)
        query = draw(batch * heads, group, width)
        selection = torch.tensor([next(each) for each in patterns], dtype=torch.int32, device=DEVICE)
        outputs = []
        for coordinator in coordinators:
            coordinator.append(token, None)
            outputs.append(coordinator.attend(query, selection, 0.25))
        assert all(same_bits(output, outputs[0]) for output in outputs[1:])
        assert outputs[0].any() or pattern is ragged


# ---- the sparse steps, against masks over the dense cache ------------------------------------------------------------


@pytest.mark.parametrize("prompt", [100, 30])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("algorithm", ["quest", "rabitq"])
def test_a_step_attends_to_its_selection_and_nothing_else(name, algorithm, prompt, monkeypatch):
    """Records what every layer selects, and runs the stock model with the rest masked, over the dense cache."""
    model = make_model(name)
    # Not every kind of attention can cap its logits, as Gemma 2 does.
    model.set_attn_implementation("eager")
    ids, mask = random_ids(4, prompt + 30), padding("mixed", 4, prompt, prompt + 30)
    selections: list[tuple[Tensor, int]] = []
    attend = SparseCoordinator.attend

    def recording(self, query, selection, scale, **kwargs):
        selections.append((selection.clone(), self.memory.layout.page_size))
        return attend(self, query, selection, scale, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(SparseCoordinator, "attend", recording)
        # A step that is replayed runs no Python, which is to record it.
        cache = HierarchicalSparseCache(model, **GQA, algorithm=algorithm, cuda_graph=False)
        sparse = decode(model, ids, cache, prompt, mask)
    # The first sequence is not padded, and ten pages hold a part of it only.
    assert selections and all((selection[:2] >= 0).sum(1).tolist() == [10, 10] for selection, _ in selections)
    queue = iter(selections)

    def masked(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **kwargs):
        batch, heads, new, _ = query.shape
        group = heads // key.shape[1]
        key, value = key.repeat_interleave(group, 1).double(), value.repeat_interleave(group, 1).double()
        logits = query.double() @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        if new == 1 and key.shape[2] > GQA["top_k"] and kwargs.get("sliding_window") is None:
            selection, size = next(queue)
            kept = torch.zeros(len(selection), key.shape[2], dtype=torch.bool, device=key.device)
            for row, items in enumerate(selection.tolist()):
                # Pages are of tokens, without the padding between them.
                tokens = visible[row * batch // len(selection), 0, 0].nonzero().squeeze(1)
                for item in items:
                    if item >= 0:
                        kept[row, tokens[item * size : (item + 1) * size]] = True
            kept = kept.view(batch, -1, 1, key.shape[2]).repeat_interleave(group, 1)
            visible = visible & kept
        logits = logits.masked_fill(~visible, -torch.inf)
        if s_aux is not None:
            logits = torch.cat((logits, s_aux.double().view(1, -1, 1, 1).expand(batch, -1, new, 1)), dim=-1)
        weights = logits.softmax(-1).nan_to_num(0)[..., : key.shape[2]]
        return (weights @ value).transpose(1, 2).to(query.dtype), None

    AttentionInterface.register("masked", masked)
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionMaskInterface.register("masked", eager_mask)
    model.set_attn_implementation("masked")
    expected = decode(model, ids, dense_cache(model), prompt, mask)
    assert next(queue, None) is None
    close(sparse, expected)


# ---- a context that top_k covers -------------------------------------------------------------------------------------

LATENT = ["deepseek_v3"]
DENSE = [
    "llama",
    "qwen2",
    "qwen3",
    "phi",
    "phi3",
    "smollm3",
    "mistral",
    "ministral",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "qwen3_next",
    "deepseek_v3",
    "gpt_neox",
]


@pytest.mark.parametrize("name", DENSE)
def test_a_covered_context_equals_the_dense_cache(tiny, name):
    """The same attention function over the same keys: not a bit differs."""
    model, ids = tiny(name), random_ids(2, 60)
    dense = generate(model, ids, dense_cache(model), 24)
    cache = HierarchicalSparseCache(model, top_k=128)
    output = generate(model, ids, cache, 24)
    assert torch.equal(output.sequences, dense.sequences)
    if name in LATENT:
        # The dense cache keeps latents, of which the model makes all keys and values anew at every step, and ours the
        # keys and values made of each: products of other shapes, which may be summed in another order.
        close(logits_of(output), logits_of(dense))
    else:
        assert same_bits(logits_of(output), logits_of(dense))
    assert cache.stats().host_bytes == 0


@pytest.mark.parametrize("name", DENSE)
def test_every_full_attention_layer_goes_through_its_coordinator(tiny, name):
    """Whatever a model calls the cache that it hands on: no layer is left to attend densely, as if unpatched."""
    model = tiny(name)
    cache = HierarchicalSparseCache(model, **GQA)
    generate(model, random_ids(2, 60), cache, 4)
    layers = [layer.coordinator for layer in cache.layers if isinstance(layer, HierarchicalLayer)]
    assert all(coordinator.memory is not None for coordinator in layers)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "gpt_oss"])
def test_a_covered_context_in_bfloat16_with_padding(tiny, name):
    model, ids = tiny(name, torch.bfloat16), random_ids(4, 60)
    dense = generate(model, ids, dense_cache(model), 16, left_padding(4, 60))
    output = generate(model, ids, HierarchicalSparseCache(model, top_k=128), 16, left_padding(4, 60))
    assert torch.equal(output.sequences, dense.sequences)
    assert same_bits(logits_of(output), logits_of(dense))


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_a_covered_context_of_latents_equals_the_dense_cache(name):
    model, ids = make_model(name, index_topk=128), random_ids(2, 60)
    dense = generate(model, ids, dense_cache(model), 24)
    output = generate(model, ids, HierarchicalSparseCache(model), 24)
    assert torch.equal(output.sequences, dense.sequences)
    close(logits_of(output), logits_of(dense))


# ---- models with their own indexer -----------------------------------------------------------------------------------

INDEXED = ["deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "mistral_large4", "dots3_note_text"]


def as_stock(model: Any, ids: Tensor, new: int, mask: Tensor | None = None) -> HierarchicalSparseCache:
    """Asserts that the hierarchical cache gives the stock model's greedy tokens and logits, and returns it.

    The padding token is not generated: its embedding is zero, so that as a query it scores all tokens the same, and of
    equals the stock model selects what `torch.topk` happens to, this one those that came first.
    """
    stock = generate(model, ids, dense_cache(model), new, mask, suppress_tokens=[0])
    cache = HierarchicalSparseCache(model)
    output = generate(model, ids, cache, new, mask, suppress_tokens=[0])
    assert torch.equal(output.sequences, stock.sequences)
    close(logits_of(output), logits_of(stock))
    assert cache.stats().misses
    return cache


@pytest.mark.parametrize("name", INDEXED)
def test_sparse_models_generate_what_the_stock_model_does(tiny, name):
    """Contexts of five to seven times `index_topk`."""
    as_stock(tiny(name), random_ids(2, 160), 64)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_models_with_padding(tiny, name):
    as_stock(tiny(name), random_ids(4, 100), 32, padding("mixed", 4, 100, 100))


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_models_whose_context_outgrows_the_selection(tiny, name):
    as_stock(tiny(name), random_ids(2, 10), 64)


def test_sparse_models_with_eager_attention():
    model = make_model("deepseek_v32")
    model.set_attn_implementation("eager")
    as_stock(model, random_ids(2, 100), 32)


def test_layers_that_share_a_selection(tiny):
    model = tiny("glm_moe_dsa")
    cache = as_stock(model, random_ids(1, 100), 16)
    held = [len(layer.coordinator.algorithm.representations.tensors) for layer in cache.layers]
    assert 0 in held and 1 in held


def test_layers_that_share_latents_stay_dense():
    model = make_model("mistral_large4", kv_source_layers=[0, 0, 2, 3])
    cache = as_stock(model, random_ids(2, 100), 32)
    assert [hasattr(layer, "coordinator") for layer in cache.layers] == [False, False, True, True]


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    """Prompts of a few hundred tokens are taken in several blocks, as long ones are."""
    monkeypatch.setattr(reference, "PRODUCTS", 1 << 17)
    monkeypatch.setattr(LightningIndexer, "block", 1 << 15)
    monkeypatch.setattr(LatentPatch, "block", 1 << 15)
    monkeypatch.setattr(ReferenceBackend, "block", 1 << 16)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("chunks", [(200,), (120, 80), (20, 30, 149, 1)], ids=str)
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_every_logit_of_a_prompt(tiny, small_blocks, name, chunks, padded):
    """In chunks that begin the prompt, within `index_topk` tokens, and beyond. With these ids, every query's last
    selected score and the next one differ by 2e-5 of themselves or more, so that rounding changes no selection."""
    model, ids = tiny(name), random_ids(2, sum(chunks), seed=8)
    mask = padding("holes", 2, sum(chunks), sum(chunks)) if padded else None
    stock, ours = dense_cache(model), HierarchicalSparseCache(model)
    start = 0
    for chunk in chunks:
        end = start + chunk
        so_far = None if mask is None else mask[:, :end]
        seen = slice(None) if mask is None else mask[:, start:end].bool()
        expected = forward(model, ids[:, start:end], stock, so_far)[seen]
        close(forward(model, ids[:, start:end], ours, so_far)[seen], expected)
        start = end


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_every_logit_of_a_prompt_in_low_precision(small_blocks, name, dtype):
    """Of one layer, whose indexer is given the very bits that the stock one is: after it their rounding differs, and
    near-ties with it."""
    options: dict[str, Any] = {"num_hidden_layers": 1}
    if name == "glm_moe_dsa":
        options["mlp_layer_types"] = ["dense"]
    model, ids, mask = make_model(name, dtype, **options), random_ids(2, 200), left_padding(2, 200)
    stock, ours = (forward(model, ids, new(model), mask)[mask.bool()] for new in (dense_cache, HierarchicalSparseCache))
    close(ours, stock)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_a_causal_mask_of_every_query_is_its_padding(tiny):
    """A mask that is made already, bool or additive, for a prompt and for a chunk."""
    model, ids, padding = tiny("deepseek_v32"), random_ids(2, 100), left_padding(2, 100)
    token = torch.arange(100, device=DEVICE)
    mask = padding.bool()[:, None, None] & (token <= token.unsqueeze(1))
    additive = torch.zeros(mask.shape, device=DEVICE).masked_fill(~mask, torch.finfo(torch.float32).min)
    expected = decode(model, ids, HierarchicalSparseCache(model), 90, padding)
    for every in (mask, additive):
        cache = HierarchicalSparseCache(model)
        positions = (padding.cumsum(-1) - 1).clamp(min=0)
        for low, high in ((0, 60), (60, 90), (90, 91)):
            some = slice(low, high)
            with torch.no_grad():
                logits = model(
                    ids[:, some],
                    attention_mask=every[:, :, some, :high],
                    position_ids=positions[:, some],
                    past_key_values=cache,
                ).logits
            if high >= 90:
                close(logits[:, -1], expected[:, high - 90])


class Largest(TorchDispatchMode):
    """Records how many bytes the largest tensor has that is made within it, also by our ops."""

    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        namespace, name = function.name().split("::")
        if namespace == "hf_hisparse":
            # An op is one function to PyTorch: what it is made of is not dispatched to a mode.
            with self:
                result = getattr(ops, name)._init_fn(*args, **(kwargs or {}))
        else:
            result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the ops are kernels there")
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_the_memory_of_a_prompt_does_not_grow_with_its_square(small_blocks, name):
    """No tensor is made that has two bits for every query and token, nor, by a step, the expanded history."""
    options = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 16, "max_position_embeddings": 8192}
    model = make_model(name, **options)
    padding = left_padding(1, 3000)
    padding[:, :100] = 0

    def largest(cache: Any, chunks: list[Tensor], mask: Tensor | None = None) -> int:
        seen, length = Largest(), 0
        for chunk in chunks:
            length += chunk.shape[1]
            with seen:
                forward(model, chunk, cache, None if mask is None else mask[:, :length])
        return seen.nbytes

    ids = random_ids(1, 3000)
    assert largest(dense_cache(model), [ids[:, :800]]) >= 800 * 800 * 4
    for sizes, mask in (([3000], None), ([1500, 1500], padding)):
        assert largest(HierarchicalSparseCache(model), list(ids.split(sizes, dim=1)), mask) < 3000 * 3000 / 4
    # Of steps, without what the CPU sees of the host's memory. The first makes room for more.
    cache = HierarchicalSparseCache(model, offload=False)
    largest(cache, [ids, ids[:, :1]])
    assert largest(cache, [ids[:, :1]]) < 3000 * 4 * (16 + 16 + 24) * 4 / 2


@pytest.mark.parametrize("name", ["glm5_next", "qwen4_exp_text"])
def test_indexers_that_cannot_be_served_are_refused(name):
    model, ids = make_model(name), random_ids(2, 80)
    before = generate(model, ids, dense_cache(model), 4)
    with pytest.raises(ValueError, match="cannot be patched: its indexer does not hand its selection to the attention"):
        HierarchicalSparseCache(model)
    after = generate(model, ids, dense_cache(model), 4)
    assert same_bits(logits_of(after), logits_of(before))


# ---- SmolLM2 ---------------------------------------------------------------------------------------------------------


def filler(tokenizer: Any, tokens: int) -> Tensor:
    text = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. " * 100
    return tokenizer(text, return_tensors="pt").input_ids[:, :tokens].to(DEVICE)


def test_smollm2_within_top_k_equals_the_dense_cache(smollm2):
    model, tokenizer = smollm2
    ids = filler(tokenizer, 200)
    dense = generate(model, ids, dense_cache(model), 16)
    output = generate(model, ids, HierarchicalSparseCache(model), 16)
    assert torch.equal(output.sequences, dense.sequences)
    assert same_bits(logits_of(output), logits_of(dense))


@pytest.mark.parametrize("algorithm", ["quest", "rabitq"])
def test_smollm2_beyond_top_k_equals_the_resident_oracle(smollm2, algorithm):
    model, tokenizer = smollm2
    ids = filler(tokenizer, 450)
    options = {"top_k": 256, "algorithm": algorithm}
    resident = generate(model, ids, HierarchicalSparseCache(model, **options, offload=False), 10)
    cache = HierarchicalSparseCache(model, **options)
    output = generate(model, ids, cache, 10)
    assert same_bits(logits_of(output), logits_of(resident))
    assert cache.stats().misses


def test_smollm2_finds_a_needle(smollm2):
    model, tokenizer = smollm2
    sentence = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
    needle = "One of the special magic numbers for stamps is: 4831725. "
    question = "What is the special magic number for stamps mentioned in the provided text?"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": sentence * 12 + needle + sentence * 20 + question}],
        tokenize=False,
        add_generation_prompt=True,
    )
    text += "The special magic number for stamps mentioned in the provided text is"
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids.to(DEVICE)
    cache = HierarchicalSparseCache(model, top_k=256)
    output = generate(model, ids, cache, 10)
    assert "4831725" in tokenizer.decode(output.sequences[0, ids.shape[1] :])
    stats = cache.stats()
    assert stats.misses and ids.shape[1] > 700
