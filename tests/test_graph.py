"""Decode steps of constant shape, and their capture in a CUDA graph.

Without a GPU, two things stand for capture. `Watch` sees every operation of a step, and fails on those that read a
tensor back. `Rerun` records a step and runs it again on the same inputs, with the host's counts as they were when it
was recorded, so that a number that the step should have read on the device, and took from the host, is wrong.
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import logging
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.streamers import BaseStreamer

from hf_hisparse import HierarchicalSparseCache, graph, ops, patch_model, unpatch_model
from hf_hisparse.algorithms import KeyScoring, LightningIndexer
from hf_hisparse.algorithms.base import Representations
from hf_hisparse.coordinator import SparseCoordinator
from hf_hisparse.graph import GraphedForward, Recorder, convert
from hf_hisparse.memory import Memory, host_store, pinned
from hf_hisparse.memory.device_buffer import DeviceBuffer
from hf_hisparse.memory.host_store import HostStore
from hf_hisparse.ops.reference import softmax_mass
from tests.helpers import (
    GQA,
    METHODS,
    decode,
    generate,
    logits_of,
    make_model,
    padding,
    random_ids,
    same_bits,
)


# Newer transformers call the cache's argument `cache`; both names must work.
pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")]
gpu = pytest.mark.gpu

MODELS: dict[str, tuple[str, dict[str, Any]]] = METHODS | {
    "qwen3-rabitq": ("qwen3", GQA | {"algorithm": "rabitq"}),
    "glm": ("glm_moe_dsa", {}),
    "llama-resident": ("llama", GQA | {"offload": False}),
}


@pytest.fixture(params=MODELS)
def kind(request) -> str:
    return request.param


def model_of(name: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A model whose experts, where it has some, are multiplied as they are in a decode step on a GPU."""
    model: Any = make_model(name, dtype, **overrides)
    model.set_experts_implementation("batched_mm")
    return model


@pytest.fixture(scope="module")
def tiny() -> Callable[[str], Any]:
    """`model_of`, once a name. Leave it as it was."""
    return functools.cache(model_of)


def tensors_of(cache: HierarchicalSparseCache, host: bool = True) -> list[Tensor]:
    """Every tensor that a cache holds, on the device and, found through a table there, on the host."""
    ours = (SparseCoordinator, Memory, DeviceBuffer, HostStore, KeyScoring, LightningIndexer, Representations)
    found: dict[int, Tensor] = {}

    def walk(value: Any) -> None:
        if isinstance(value, Tensor):
            found[id(value)] = value
        elif isinstance(value, (list, tuple)):
            for part in value:
                walk(part)
        elif isinstance(value, dict):
            walk(list(value.values()))
        elif isinstance(value, ours):
            walk({name: part for name, part in vars(value).items() if host or name != "runs"})

    walk([layer.coordinator for layer in cache.layers])
    return list(found.values())


def coordinators(cache: HierarchicalSparseCache) -> list[SparseCoordinator]:
    return [layer.coordinator for layer in cache.layers]


class Rerun:
    """Records on the CPU: what is replayed runs again, knowing of the history's length what it did when recorded."""

    device_type = "cpu"

    def __init__(self, cache: HierarchicalSparseCache):
        self.cache = cache
        self.fail: Exception | None = None

    def warm_up(self, function: Callable[[], Any], device: torch.device) -> tuple[Any, str | None]:
        return function(), None

    def record(self, function: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
        if self.fail is not None:
            raise self.fail
        tensors = tensors_of(self.cache)
        before = [tensor.clone() for tensor in tensors]
        addresses = [tensor.data_ptr() for tensor in tensors_of(self.cache, host=False)]
        output = function()
        # Recording runs nothing.
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)
        lengths = [coordinator.length for coordinator in coordinators(self.cache)]
        wanted: list[Tensor] = []
        convert(output, lambda leaf: wanted.append(leaf) if isinstance(leaf, Tensor) else None)

        def replay() -> None:
            assert [tensor.data_ptr() for tensor in tensors_of(self.cache, host=False)] == addresses
            now = [coordinator.length for coordinator in coordinators(self.cache)]
            self.set_lengths(lengths)
            try:
                found: list[Tensor] = []
                convert(function(), lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None)
            finally:
                self.set_lengths(now)
            for to, value in zip(wanted, found, strict=True):
                to.copy_(value)

        return replay, output

    def set_lengths(self, lengths: list[int]) -> None:
        for coordinator, length in zip(coordinators(self.cache), lengths, strict=True):
            coordinator.length = length


def graphed(model: nn.Module, options: dict[str, Any], longest: int | None = 300) -> HierarchicalSparseCache:
    """A cache whose decode steps are recorded and run again."""
    cache = HierarchicalSparseCache(model, **options, max_cache_len=longest)
    cache.graphed = GraphedForward(Rerun(cache))
    return cache


def step(model: nn.Module, ids: Tensor, cache: Any, **kwargs: Any) -> Tensor:
    """The logits of one more token, as `generate` would ask for them."""
    positions = torch.full(ids.shape, cache.get_seq_length(), device=ids.device)
    with torch.no_grad():
        return model(ids, position_ids=positions, past_key_values=cache, use_cache=True, **kwargs).logits


def prefill(model: nn.Module, ids: Tensor, cache: Any) -> None:
    positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0) + cache.get_seq_length()
    with torch.no_grad():
        model(ids, position_ids=positions, past_key_values=cache, use_cache=True)


def twins(model: nn.Module, name: str, prompt: int = 120) -> tuple[HierarchicalSparseCache, HierarchicalSparseCache]:
    """Two caches with the same prompt, one of them graphed."""
    caches = graphed(model, MODELS[name][1]), HierarchicalSparseCache(model, **MODELS[name][1], max_cache_len=300)
    for cache in caches:
        prefill(model, random_ids(2, prompt), cache)
    return caches


def captured_and_eager(model: Any, name: str, prompt: int = 120) -> tuple[Any, Any]:
    """`twins`, of which the first captures its steps where there is a GPU."""
    if model.device.type == "cpu":
        return twins(model, name, prompt)
    options = MODELS[name][1] | {"max_cache_len": 300}
    caches = HierarchicalSparseCache(model, **options), HierarchicalSparseCache(model, **options, cuda_graph=False)
    for cache in caches:
        prefill(model, random_ids(2, prompt), cache)
    return caches


def follow(model: nn.Module, caches: tuple[Any, Any], count: int, seed: int = 1, **kwargs: Any) -> None:
    """Both caches give the same bits for the next tokens."""
    for t in range(count):
        token = random_ids(2, 1, seed=100 * seed + t)
        assert same_bits(step(model, token, caches[0], **kwargs), step(model, token, caches[1], **kwargs))


# ---- constant shapes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt, new", [(150, 30), (250, 20), (20, 40)])
def test_room_for_more_changes_no_bit(tiny, kind, prompt, new):
    """Shapes that grow with the history and shapes for a longer one: the same logits, padded rows and all."""
    name, options = MODELS[kind]
    ids, mask = random_ids(4, prompt + new), padding("mixed", 4, prompt, prompt + new)
    model, longest = tiny(name), prompt + new
    grown = decode(model, ids, HierarchicalSparseCache(model, **options), prompt, mask)
    for room in (longest, longest + 1, 2 * longest + 37, 1500):
        cache = HierarchicalSparseCache(model, **options, max_cache_len=room)
        assert same_bits(decode(model, ids, cache, prompt, mask), grown)


def test_a_history_that_outgrows_its_memory_is_captured_anew(tiny, kind, monkeypatch):
    """What `Rerun` replays must find every tensor where it was; in between, room is made and the steps are recorded."""
    monkeypatch.setattr(host_store, "SLAB_BYTES", 4096)
    monkeypatch.setattr(host_store, "GROWTH_BYTES", 4096)
    name, options = MODELS[kind]
    model = tiny(name)
    caches = graphed(model, options, None), HierarchicalSparseCache(model, **options, cuda_graph=False)
    for cache in caches:
        prefill(model, random_ids(2, 120), cache)
    rooms = set()
    for t in range(60):
        token = random_ids(2, 1, seed=t)
        assert same_bits(step(model, token, caches[0]), step(model, token, caches[1]))
        rooms.add(tuple(coordinator.room for coordinator in coordinators(caches[0])))
    runs = caches[0].graphed
    assert 1 < runs.captured <= len(rooms) and runs.replayed >= 60 - 2 * len(rooms)
    caches[0].crop(-50)
    caches[1].crop(-50)
    follow(model, caches, 5)
    other = caches[0].fork()
    follow(model, (other, caches[0].fork()), 5)
    follow(model, caches, 3, seed=2)


@pytest.mark.parametrize("n", [1, 7, 40, 257])
def test_a_selection_does_not_depend_on_what_cannot_be_selected_after_it(n):
    generator = torch.Generator().manual_seed(n)
    scores = torch.randint(-3, 4, (5, n), generator=generator).float()
    scores[0] = -torch.inf
    scores[1, ::2] = -torch.inf
    wider = torch.cat((scores, torch.full((5, 33), -torch.inf)), dim=1)
    for k in (1, 3, n, n + 5):
        assert torch.equal(ops.top_k(wider, k), ops.top_k(scores, k))


def test_mass_does_not_depend_on_what_is_masked_after_it():
    logits = 20 * torch.randn(3, 6, 500, generator=torch.Generator().manual_seed(0))
    expected = softmax_mass(logits, torch.ones(3, 500, dtype=torch.bool))
    torch.testing.assert_close(expected, logits.double().softmax(-1).sum(1).float(), rtol=1e-5, atol=1e-12)
    for more in (1, 5, 12, 700):
        wider = torch.cat((logits, torch.zeros(3, 6, more)), dim=2)
        valid = torch.arange(500 + more) < 500
        assert torch.equal(softmax_mass(wider, valid.expand(3, -1))[:, :500], expected)


class Watch(TorchDispatchMode):
    """Every operation with the shapes and numbers that it was given. One that reads a tensor back is an error.

    Our own operations are seen as such, whatever they do inside: on a CUDA device they are kernels.
    """

    READS = "_local_scalar_dense is_nonzero nonzero masked_select equal item lift_fresh bincount".split()

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.READS and "unique" not in name, f"{func} reads a tensor back"
        if name in ("index", "index_put", "index_put_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), f"{func} counts what a mask selects"
        self.seen.append((str(func), self.describe(args), self.describe(kwargs or {})))
        return func(*args, **kwargs or {})

    def describe(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return tuple(value.shape), value.stride(), value.dtype
        if isinstance(value, (list, tuple)):
            return [self.describe(part) for part in value]
        if isinstance(value, dict):
            return {name: self.describe(part) for name, part in value.items()}
        return value


def watched(model: nn.Module, cache: HierarchicalSparseCache, ids: Tensor, mask: Tensor | None) -> list[list[Any]]:
    prompt = ids.shape[1] - 4
    decode(model, ids[:, :prompt], cache, prompt - 1, None if mask is None else mask[:, :prompt])
    lists = []
    for t in range(prompt, ids.shape[1]):
        kwargs = {} if mask is None else {"attention_mask": mask[:, : t + 1]}
        token = ids[:, t : t + 1].clone()
        positions = torch.full_like(token, t)
        with torch.no_grad(), Watch() as watch:
            model(token, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1, **kwargs)
        lists.append(watch.seen)
    return lists


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_a_step_reads_nothing_back_and_is_the_same_list_of_operations(kind, padded, attention, monkeypatch):
    name, options = MODELS[kind]
    # A mask, which grows with the history, is looked at before a step, and is no part of it.
    monkeypatch.setattr(SparseCoordinator, "check_mask", lambda *args: None)
    model = model_of(name)
    model.set_attn_implementation(attention)
    ids, mask = random_ids(4, 260), padding("mixed", 4, 250, 260) if padded else None
    cache = HierarchicalSparseCache(model, **options, max_cache_len=300)
    first, *others = watched(model, cache, ids, mask)
    assert len(first) > 50
    for other in others:
        assert len(other) == len(first)
        for one, two in zip(first, other, strict=True):
            assert one == two
    names = [name for name, *_ in first]
    if options.get("offload", True):
        assert sum("hf_hisparse.swap_in" in name for name in names) == len(cache.layers)


def test_without_room_the_operations_grow(tiny, monkeypatch):
    """So that the test above can fail."""
    monkeypatch.setattr(host_store, "SLAB_BYTES", 1)
    monkeypatch.setattr(host_store, "GROWTH_BYTES", 1)
    lists = watched(tiny("llama"), HierarchicalSparseCache(tiny("llama"), **GQA), random_ids(3, 260), None)
    assert lists[0] != lists[1]


def test_nothing_moves(tiny, kind):
    """From the step that leaves the dense limit on, whatever is appended, extended and cropped back."""
    name, options = MODELS[kind]
    model = tiny(name)
    cache = HierarchicalSparseCache(model, **options, max_cache_len=300)
    prefill(model, random_ids(2, 60), cache)
    addresses = [tensor.data_ptr() for tensor in tensors_of(cache)]
    layout = cache.layout()
    for turn in range(3):
        for t in range(5):
            step(model, random_ids(2, 1, seed=t), cache)
        prefill(model, random_ids(2, 60, seed=turn), cache)
        cache.crop(-7)
        assert [tensor.data_ptr() for tensor in tensors_of(cache)] == addresses
        assert cache.layout() == layout


def test_the_longest_history_is_kept_to(tiny):
    model = tiny("llama")
    cache = HierarchicalSparseCache(model, **GQA, max_cache_len=61)
    prefill(model, random_ids(1, 60), cache)
    step(model, random_ids(1, 1), cache)
    for _ in range(2):
        with pytest.raises(ValueError, match="61 tokens in the cache and 1 new ones pass `max_cache_len=61`"):
            step(model, random_ids(1, 1), cache)
    assert cache.get_seq_length() == 61
    for bad in (0, -1, 1.5):
        with pytest.raises(ValueError, match="`max_cache_len` must be a positive integer"):
            HierarchicalSparseCache(model, max_cache_len=bad)


# ---- replay ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_generate_replays_and_gives_the_same(tiny, kind, padded):
    name, options = MODELS[kind]
    model, ids = tiny(name), random_ids(4, 90)
    mask = padding("mixed", 4, 90, 90) if padded else None
    cache = graphed(model, options)
    found = generate(model, ids, cache, 40, mask)
    expected = generate(model, ids, HierarchicalSparseCache(model, **options), 40, mask)
    assert torch.equal(found.sequences, expected.sequences)
    assert same_bits(logits_of(found), logits_of(expected))
    # The first of 39 steps is run and the second is captured.
    assert (cache.graphed.captured, cache.graphed.replayed) == (1, 38)
    assert cache.get_seq_length() == 129


def test_a_number_that_is_taken_from_the_host_is_noticed(tiny, monkeypatch):
    """So that the tests that run again can fail."""

    def retrieve(self: SparseCoordinator, query: Tensor, scale: float) -> Tensor:
        items = self.memory.layout.items(self.capacity)
        lengths = torch.full_like(self.lengths, self.length)
        return self.algorithm.retrieve_topk(query, self.k, items, scale, lengths)

    monkeypatch.setattr(SparseCoordinator, "retrieve", retrieve)
    model, ids = tiny("llama"), random_ids(2, 90)
    cache = graphed(model, GQA)
    found = generate(model, ids, cache, 30)
    expected = generate(model, ids, HierarchicalSparseCache(model, **GQA, max_cache_len=300), 30)
    assert cache.graphed.replayed == 28 and not torch.equal(logits_of(found), logits_of(expected))


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as quantised weights may be."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(arg.inner if isinstance(arg, cls) else arg for arg in args), **kwargs or {})


class Flat(Wrapped):
    """One that says what it is made of."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *args: Any) -> Flat:
        return cls(inner["inner"])


@pytest.mark.parametrize("change", ["values", "memory", "tensor", "weight"])
def test_weights_that_are_made_of_others_are_captured_and_followed(change):
    model: Any = make_model("llama")
    projection = model.model.layers[0].mlp.up_proj
    weight = Flat(projection.weight.detach().clone())
    projection._parameters["weight"] = weight
    caches = twins(model, "llama-rabitq")
    follow(model, caches, 4)
    assert replays(caches[0]) == 3
    with torch.no_grad():
        if change == "values":
            weight.inner.mul_(0.5)
        elif change == "memory":
            weight.inner.data = weight.inner * 0.5
        elif change == "tensor":
            weight.inner = weight.inner * 0.5
        else:
            projection._parameters["weight"] = Flat(weight.inner * 0.5)
    follow(model, caches, 4)
    assert caches[0].graphed.captured == (1 if change == "values" else 2) and replays(caches[0]) > 5


def test_weights_without_an_address_run_eagerly(warned):
    model: Any = make_model("llama")
    projection = model.model.layers[0].mlp.up_proj
    projection._parameters["weight"] = Wrapped(projection.weight.detach())
    eagerly(model, warned, "weights of the kind `Wrapped`, without an address")


def test_a_dense_history_is_not_captured(tiny):
    model = tiny("llama")
    cache = graphed(model, GQA)
    expected = generate(model, random_ids(2, 20), HierarchicalSparseCache(model, **GQA), 40)
    assert same_bits(logits_of(generate(model, random_ids(2, 20), cache, 40)), logits_of(expected))
    # Token 41 leaves the dense limit; 39 steps append tokens 21 to 59.
    assert (cache.graphed.captured, cache.graphed.replayed) == (1, 17)


class Kept(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        pass


def test_sampling_processors_and_streamers_work_as_ever(tiny):
    model, outputs, streamed = tiny("llama"), [], []
    ids = random_ids(1, 90)
    for cache in (graphed(model, GQA), HierarchicalSparseCache(model, **GQA)):
        torch.manual_seed(7)
        streamer = Kept()
        options: dict[str, Any] = {"do_sample": True, "top_p": 0.9, "temperature": 1.3, "repetition_penalty": 1.2}
        outputs.append(generate(model, ids, cache, 30, streamer=streamer, output_scores=True, **options))
        streamed.append(streamer.tokens)
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert streamed[0] == streamed[1] == outputs[0].sequences[0].tolist()
    for one, two in zip(outputs[0].scores, outputs[1].scores, strict=True):
        assert torch.equal(one, two)


def test_steps_statistics_count_replayed_steps(tiny):
    model = tiny("llama")
    caches = twins(model, "llama-rabitq")
    follow(model, caches, 12)
    one, two = (cache.stats() for cache in caches)
    assert (one.hits, one.misses) == (two.hits, two.misses) and len(one.layers[0].steps) == 12
    assert caches[0].graphed.replayed == 11


def test_turns_chunks_and_crops_between_replays(tiny, kind):
    model = tiny(MODELS[kind][0])
    caches = twins(model, kind)
    for turn in range(3):
        follow(model, caches, 4, seed=turn)
        for cache in caches:
            prefill(model, random_ids(2, 9, seed=turn), cache)
            cache.crop(-5)
    follow(model, caches, 4)
    # Nothing moved, so that the first graph served all along.
    assert (caches[0].graphed.captured, caches[0].graphed.replayed) == (1, 15)


def test_drafts_between_replays(tiny, kind):
    """They run eagerly, and leave the graph as it was."""
    model = tiny(MODELS[kind][0])
    caches = twins(model, kind)
    for turn in range(4):
        follow(model, caches, 3, seed=turn)
        for cache in caches:
            cache.activate_past_recording()
            prefill(model, random_ids(2, 2 + 2 * turn, seed=turn), cache)
            cache.crop(-turn)
    follow(model, caches, 3)
    assert (caches[0].graphed.captured, caches[0].graphed.replayed) == (1, 14)


def test_outputs_outlive_the_next_step(tiny):
    model = tiny("llama")
    cache, _ = twins(model, "llama-quest")
    kept = [step(model, random_ids(2, 1, seed=t), cache) for t in range(5)]
    copies = [logits.clone() for logits in kept]
    step(model, random_ids(2, 1, seed=9), cache)
    assert all(torch.equal(one, two) for one, two in zip(kept, copies, strict=True))


# ---- what makes a graph anew -----------------------------------------------------------------------------------------


def replays(cache: Any) -> int:
    return cache.graphed.replayed


def test_weights_changed_in_place_are_followed():
    model = make_model("llama")
    caches = twins(model, "llama-rabitq")
    follow(model, caches, 3)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    follow(model, caches, 3)
    assert caches[0].graphed.captured == 1


class Scaled(nn.Module):
    """What an adapter is: another module in a layer's place, and a number that only Python knows."""

    def __init__(self, base: nn.Module, scale: float):
        super().__init__()
        self.base, self.scaling, self._active_adapter = base, {"default": scale}, ["default"]

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * self.scaling["default"]


def change_weight(model: Any) -> None:
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data * 2


def change_parameter(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)


def add_adapter(model: Any) -> None:
    model.model.layers[1].mlp.up_proj = Scaled(model.model.layers[1].mlp.up_proj, 0.5).eval()


def scale_adapter(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.scaling["default"] = 3.0


def change_module(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.Tanh().eval()


def change_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.5


@pytest.mark.parametrize(
    "change", [change_weight, change_parameter, add_adapter, scale_adapter, change_module, change_buffer]
)
def test_a_model_that_changed_is_captured_anew(change):
    model: Any = make_model("llama")
    model.model.layers[1].mlp.down_proj = Scaled(model.model.layers[1].mlp.down_proj, 0.7).eval()
    caches = twins(model, "llama-rabitq")
    follow(model, caches, 4)
    before = step(model, random_ids(2, 1), copy.deepcopy(caches[1]))
    change(model)
    assert not torch.equal(step(model, random_ids(2, 1), copy.deepcopy(caches[1])), before)
    follow(model, caches, 4)
    assert (caches[0].graphed.captured, replays(caches[0])) == (2, 6)


def test_a_history_that_moved_is_captured_anew(tiny):
    model = tiny("llama")
    caches = twins(model, "llama-rabitq")
    follow(model, caches, 4)
    for cache in caches:
        cache.crop(-100)
    follow(model, caches, 30)
    for cache in caches:
        cache.reset()
        prefill(model, random_ids(2, 70), cache)
    follow(model, caches, 4)
    for cache in caches:
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0]))
    follow(model, caches, 4)
    assert caches[0].graphed.captured == 4


def test_a_reordered_batch_does_not_move(tiny, kind):
    """Beams are reordered at every step."""
    model = tiny(MODELS[kind][0])
    caches = twins(model, kind)
    follow(model, caches, 2)
    for turn, order in enumerate(([1, 0], [0, 0], [1, 1])):
        for cache in caches:
            cache.reorder_cache(torch.tensor(order))
        follow(model, caches, 2, seed=turn + 2)
    assert (caches[0].graphed.captured, replays(caches[0])) == (1, 7)


def test_forks_are_captured_apart(tiny, kind, monkeypatch):
    """A fork that is cropped to what it shares moves, and the cache that it was made of does not."""
    monkeypatch.setattr(host_store, "SLAB_BYTES", 1024)
    model = tiny(MODELS[kind][0])
    caches = twins(model, kind)
    follow(model, caches, 3)
    forks = [cache.fork() for cache in caches]
    forks[0].graphed = GraphedForward(Rerun(forks[0]))
    for turn in range(2):
        follow(model, forks, 3, seed=turn + 2)
        follow(model, caches, 3, seed=turn + 4)
    for fork in forks:
        fork.crop(-20)
    follow(model, forks, 3, seed=6)
    follow(model, caches, 3, seed=7)
    assert (caches[0].graphed.captured, replays(caches[0])) == (1, 11)
    assert (forks[0].graphed.captured, replays(forks[0])) == ((1, 8) if "resident" in kind else (2, 7))


def test_other_arguments_are_captured_anew(tiny):
    model = tiny("llama")
    caches = twins(model, "llama-rabitq")
    follow(model, caches, 3)
    follow(model, caches, 3, logits_to_keep=1)
    embedded = model.get_input_embeddings()
    for t in range(3):
        vectors = embedded(random_ids(2, 1, seed=t))
        positions = torch.full((2, 1), caches[0].get_seq_length())
        with torch.no_grad():
            found = [
                model(inputs_embeds=vectors, position_ids=positions, past_key_values=cache).logits for cache in caches
            ]
        assert same_bits(*found)
    with torch.inference_mode():
        model(random_ids(2, 1), position_ids=positions, past_key_values=caches[0])
    assert caches[0].graphed.captured == 3 and replays(caches[0]) == 6


def test_a_cast_model_is_refused_as_ever():
    model = make_model("llama")
    cache, _ = twins(model, "llama-rabitq")
    for t in range(3):
        step(model, random_ids(2, 1, seed=t), cache)
    model.to(torch.bfloat16)
    with pytest.raises(ValueError, match="the cache was filled by a model in torch.float32"):
        step(model, random_ids(2, 1), cache)
    with pytest.raises(ValueError, match="was given a batch of 1"):
        step(model.float(), random_ids(1, 1), cache)


def test_two_caches_take_turns(tiny):
    model = tiny("llama")
    caches, others = twins(model, "llama-rabitq"), twins(model, "llama-quest", prompt=80)
    for turn in range(4):
        follow(model, caches, 2, seed=turn)
        follow(model, others, 2, seed=turn + 50)
    assert replays(caches[0]) == replays(others[0]) == 7


def test_a_copy_of_a_cache_captures_for_itself(tiny):
    model = tiny("llama")
    caches = twins(model, "llama-rabitq")
    follow(model, caches, 3)
    copied, again = copy.deepcopy(caches)
    assert copied.graphed is not caches[0].graphed and copied.graphed.replayed == 0
    follow(model, caches, 3)
    copied.graphed = GraphedForward(Rerun(copied))
    follow(model, (copied, again), 3)


def test_a_cache_goes_when_it_is_dropped(tiny):
    model = tiny("llama")
    cache, _ = twins(model, "llama-rabitq")
    cache.graphed.recorder.cache = None
    step(model, random_ids(2, 1), cache)
    gone = weakref.ref(cache)
    gc.collect()
    gc.disable()
    try:
        del cache
        assert gone() is None
    finally:
        gc.enable()


# ---- what runs eagerly -----------------------------------------------------------------------------------------------


@pytest.fixture
def warned(caplog, monkeypatch):
    """The reasons warned of so far."""
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "propagate", True)
    graph.logger.warning_once.cache_clear()

    def reasons() -> list[str]:
        texts = [record.getMessage() for record in caplog.records]
        return [text.split("CUDA graph: ")[1] for text in texts if "CUDA graph: " in text]

    return reasons


def eagerly(model: nn.Module, warned: Any, reason: str, caches: tuple[Any, Any] | None = None, **kwargs: Any) -> None:
    caches = twins(model, "llama-rabitq") if caches is None else caches
    before = replays(caches[0])
    follow(model, caches, 3, **kwargs)
    assert replays(caches[0]) == before
    assert len(warned()) == 1 and reason in warned()[0]


def test_steps_that_are_recorded_run_eagerly(tiny, kind, warned):
    """And as the graph that there was before when that ends."""
    model = tiny(MODELS[kind][0])
    caches = twins(model, kind)
    follow(model, caches, 3)
    before = replays(caches[0])
    with caches[0].record_trace() as trace:
        eagerly(model, warned, "`record_trace`", caches)
    assert trace.steps == 3 and before > 0
    follow(model, caches, 3, seed=2)
    assert replays(caches[0]) == before + 3 and caches[0].graphed.captured == 1


def test_unknown_arguments_run_eagerly(tiny, warned):
    eagerly(tiny("llama"), warned, "`output_hidden_states`", output_hidden_states=True)


def test_masks_of_four_dimensions_run_eagerly(tiny, warned):
    mask = torch.ones(2, 1, 1, 1, dtype=torch.bool)
    eagerly(tiny("llama"), warned, "`attention_mask`", attention_mask=mask)


def test_steps_without_positions_run_eagerly(tiny, warned):
    model = tiny("llama")
    caches = twins(model, "llama-rabitq")
    for t in range(3):
        with torch.no_grad():
            one, two = (model(random_ids(2, 1, seed=t), past_key_values=cache).logits for cache in caches)
        assert same_bits(one, two)
    assert replays(caches[0]) == 0 and "position_ids" in warned()[0]


def test_a_model_with_hooks_runs_eagerly(warned):
    model: Any = make_model("llama")
    calls = []
    handle = model.model.layers[1].register_forward_hook(lambda *args: calls.append(1))
    caches = twins(model, "llama-rabitq")
    calls.clear()
    eagerly(model, warned, "LlamaDecoderLayer has a forward hook", caches)
    assert len(calls) == 6
    handle.remove()
    follow(model, caches, 3)
    assert replays(caches[0]) == 2


def test_a_model_in_training_runs_eagerly(warned):
    model = make_model("llama")
    caches = twins(model, "llama-rabitq")
    model.train()
    eagerly(model, warned, "training mode", caches)


def test_gradients_and_casts_run_eagerly(tiny, warned):
    model = tiny("llama")
    cache, _ = twins(model, "llama-rabitq")
    positions = torch.full((2, 1), 120)
    model(random_ids(2, 1), position_ids=positions, past_key_values=cache)
    assert "gradients are enabled" in warned()[-1]
    assert replays(cache) == 0


def test_layers_of_other_kinds_run_eagerly(warned):
    model = make_model("gemma3_text")
    cache = graphed(model, GQA)
    expected = generate(model, random_ids(2, 90), HierarchicalSparseCache(model, **GQA), 10)
    assert same_bits(logits_of(generate(model, random_ids(2, 90), cache, 10)), logits_of(expected))
    assert "layers [0] keep transformers' own caches" in warned()[0] and replays(cache) == 0


def test_what_fails_to_be_captured_runs_eagerly(tiny, warned):
    model = tiny("llama")
    caches = twins(model, "llama-rabitq")
    caches[0].graphed.recorder.fail = RuntimeError("operation not permitted when stream is capturing")
    eagerly(model, warned, "RuntimeError: operation not permitted", caches)
    assert caches[0].graphed.captured == 0


@pytest.mark.parametrize("change", [change_parameter, add_adapter, change_module])
def test_a_model_that_changed_is_captured_though_it_once_failed_to_be(change, warned):
    model = make_model("llama")
    caches = twins(model, "llama-rabitq")
    recorder = caches[0].graphed.recorder
    recorder.fail = RuntimeError("operation not permitted when stream is capturing")
    follow(model, caches, 3)
    recorder.fail = None
    follow(model, caches, 2)
    assert replays(caches[0]) == 0
    change(model)
    follow(model, caches, 3)
    assert replays(caches[0]) == 2 and caches[0].graphed.captured == 1


@pytest.mark.parametrize("change", [change_parameter, add_adapter, change_module])
def test_a_model_that_changes_before_it_is_captured_is_warmed_up_anew(change):
    model = make_model("llama")
    caches = twins(model, "llama-rabitq")
    follow(model, caches, 1)
    change(model)
    follow(model, caches, 1)
    assert caches[0].graphed.captured == 0
    follow(model, caches, 2)
    assert replays(caches[0]) == 2 and caches[0].graphed.captured == 1


def test_a_cpu_says_nothing(tiny, warned):
    model = tiny("llama")
    cache = HierarchicalSparseCache(model, **GQA, max_cache_len=300)
    generate(model, random_ids(2, 90), cache, 5)
    assert cache.graphed.replayed == 0 and not warned()


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 300}])
def test_graphs_can_be_refused(tiny, options):
    assert HierarchicalSparseCache(tiny("llama"), **GQA, **options, cuda_graph=False).graphed is None


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_a_replay_loses_no_history(tiny, kind, error):
    model = tiny(MODELS[kind][0])
    caches = twins(model, kind)
    follow(model, caches, 3)
    replay = caches[0].graphed._replay

    def fail() -> None:
        replay()
        raise error("on purpose")

    caches[0].graphed._replay = fail
    with pytest.raises(error, match="on purpose"):
        step(model, random_ids(2, 1), caches[0])
    caches[0].graphed._replay = replay
    assert caches[0].get_seq_length() == 123
    # What is taken back is represented anew, which rounds in another order than token by token.
    for coordinator in coordinators(caches[1]):
        coordinator.crop(0)
    follow(model, caches, 3)


# ---- the patch -------------------------------------------------------------------------------------------------------


def test_the_forward_looks_as_it_did_and_comes_back():
    model = make_model("llama")
    signature = inspect.signature(model.forward)
    patch_model(model)
    assert "forward" in vars(model) and inspect.signature(model.forward) == signature
    copied = copy.deepcopy(model)
    assert vars(copied)["forward"].model is copied
    unpatch_model(model)
    assert "forward" not in vars(model) and inspect.signature(model.forward) == signature


def test_a_model_within_a_patched_model_may_be_patched_too(tiny):
    model: Any = make_model("llama")
    patch_model(model.model)
    caches = twins(model, "llama-rabitq")
    assert "forward" in vars(model) and "forward" in vars(model.model)
    follow(model, caches, 6)
    assert (caches[0].graphed.captured, caches[0].graphed.replayed) == (1, 5)
    unpatch_model(model)
    assert "forward" not in vars(model) and "forward" not in vars(model.model)


def test_a_forward_that_was_replaced_before_is_kept():
    model = make_model("llama")
    calls = []

    def replaced(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return type(model).forward(model, *args, **kwargs)

    model.forward = replaced
    generate(model, random_ids(1, 50), HierarchicalSparseCache(model, **GQA), 3)
    assert len(calls) == 3
    unpatch_model(model)
    assert model.forward is replaced


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_experts_are_multiplied_at_once_in_a_step_that_may_be_captured(implementation):
    model: Any = make_model("deepseek_v32")
    model.set_experts_implementation(implementation)
    ids, seen = random_ids(2, 60), []
    experts = next(module for module in model.modules() if hasattr(module, "_apply_gate"))
    forward = type(experts).forward

    def recording(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(experts.config._experts_implementation)
        return forward(experts, *args, **kwargs)

    experts.forward = recording
    generate(model, ids, HierarchicalSparseCache(model, max_cache_len=300), 3)
    assert seen == [implementation] * 3
    seen.clear()
    generate(model, ids, graphed(model, {}), 4)
    # A prompt, a step that is run, one that is recorded and run, and one that is run.
    assert seen == [implementation] + ["batched_mm"] * 4
    assert model.config._experts_implementation == implementation
    seen.clear()
    forward_of = experts.forward
    experts.forward = lambda *args, **kwargs: 1 / 0
    cache = graphed(model, {})
    with pytest.raises(ZeroDivisionError):
        generate(model, ids, cache, 3)
    experts.forward = forward_of
    assert model.config._experts_implementation == implementation


def test_there_are_no_more_streams_than_recorders_at_a_time(monkeypatch):
    """Libraries keep memory for each."""

    class Stream:
        def __init__(self, device: torch.device):
            self.device = device

    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(Recorder, "_idle", defaultdict(list))
    one, two = torch.device("cuda", 0), torch.device("cuda", 1)
    kept = Recorder()
    first = kept._own_stream(one)
    assert kept._own_stream(one) is first
    others = set()
    for _ in range(40):
        # One that goes gives its stream back, and so does one whose model moves to another device.
        other = Recorder()
        streams = [other._own_stream(device) for device in (one, two, one)]
        assert [stream.device for stream in streams] == [one, two, one] and streams[0] is streams[2]
        others.update(streams)
        del other
    assert len(others) == 2 and first not in others and kept._own_stream(one) is first
    # Whatever the one before has left the device to do is done.
    assert waited == [one] + [one, two, one] * 39
    several = [Recorder() for _ in range(5)]
    assert len({recorder._own_stream(one) for recorder in (kept, *several)}) == 6


# ---- on a GPU --------------------------------------------------------------------------------------------------------


GPU_MODELS = pytest.mark.parametrize("kind", ["llama-rabitq", "llama-quest", "deepseek", "glm"])


def on_gpu(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    return model_of(MODELS[kind][0], dtype).cuda()


@gpu
@GPU_MODELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_256_tokens_with_and_without_a_graph(kind, dtype):
    model, ids = on_gpu(kind, dtype), random_ids(3, 200).cuda()
    mask = padding("mixed", 3, 200, 200).cuda()
    cache = HierarchicalSparseCache(model, **MODELS[kind][1], max_cache_len=500)
    found = generate(model, ids, cache, 256, mask)
    assert (cache.graphed.captured, cache.graphed.replayed) == (1, 254)
    for options in ({"cuda_graph": False}, {"offload": False}, {"buffer_size": 48}):
        other = HierarchicalSparseCache(model, **MODELS[kind][1] | options, max_cache_len=500)
        expected = generate(model, ids, other, 256, mask)
        assert torch.equal(found.sequences, expected.sequences), options
        assert same_bits(logits_of(found), logits_of(expected)), options


def warm(kind: str, steps: int) -> tuple[nn.Module, HierarchicalSparseCache]:
    model = on_gpu(kind)
    cache = HierarchicalSparseCache(model, **MODELS[kind][1], max_cache_len=1800)
    prefill(model, random_ids(2, 120).cuda(), cache)
    for t in range(steps):
        step(model, random_ids(2, 1, seed=t).cuda(), cache)
    return model, cache


@gpu
@GPU_MODELS
def test_forks_and_reordered_batches_with_and_without_a_graph(kind, monkeypatch):
    monkeypatch.setattr(host_store, "SLAB_BYTES", 1024)
    model = on_gpu(kind)
    found = []
    for cuda_graph in (True, False):
        cache = HierarchicalSparseCache(model, **MODELS[kind][1], max_cache_len=500, cuda_graph=cuda_graph)
        prefill(model, random_ids(3, 200).cuda(), cache)
        logits = [step(model, random_ids(3, 1, seed=t).cuda(), cache) for t in range(4)]
        forks = [cache, cache.fork(), copy.deepcopy(cache)]
        forks.append(forks[1].fork())
        forks[3].crop(-30)
        for t in range(30):
            for seed, fork in enumerate(forks):
                logits.append(step(model, random_ids(3, 1, seed=100 * seed + t).cuda(), fork))
                if t % 5 == 4:
                    fork.reorder_cache(torch.tensor([[1, 0, 2], [2, 2, 0], [1, 1, 1]][seed % 3]).cuda())
        if cuda_graph:
            # Reordering moves nothing.
            assert [fork.graphed.captured for fork in forks] == [1] * 4
        found.append(torch.stack(logits))
    assert same_bits(*found)


@gpu
@GPU_MODELS
@pytest.mark.parametrize("replayed", [True, False], ids=["graph", "eager"])
def test_a_step_does_not_synchronise(kind, replayed):
    model, cache = warm(kind, 3)
    if not replayed:
        cache.graphed = None
    tokens = [random_ids(2, 1, seed=t).cuda() for t in range(10)]
    positions = [torch.full((2, 1), 123 + t).cuda() for t in range(10)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            for token, position in zip(tokens, positions, strict=True):
                model(token, position_ids=position, past_key_values=cache, use_cache=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cache.get_seq_length() == 133 and (not replayed or cache.graphed.replayed == 12)


@gpu
@GPU_MODELS
def test_a_thousand_steps_allocate_nothing(kind):
    model, cache = warm(kind, 4)
    token = random_ids(2, 1).cuda()
    step(model, token, cache)
    gc.collect()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    host = cache.stats().host_bytes
    for _ in range(1000):
        step(model, token, cache)
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    assert cache.stats().host_bytes == host and cache.graphed.replayed == 1004


@gpu
@pytest.mark.parametrize("kind", ["llama-rabitq", "deepseek"])
def test_a_cache_that_is_gone_leaves_no_memory(kind):
    """Nor do 40 in turn, and 10 in threads that end: more than PyTorch has streams to give."""
    model = on_gpu(kind)

    def once() -> None:
        cache = HierarchicalSparseCache(model, **MODELS[kind][1], max_cache_len=300)
        prefill(model, random_ids(2, 120).cuda(), cache)
        for t in range(4):
            step(model, random_ids(2, 1, seed=t).cuda(), cache)
        assert cache.graphed.replayed == 3

    def in_a_thread() -> None:
        thread = threading.Thread(target=once)
        thread.start()
        thread.join()

    def held() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    # What other tests have left to be collected holds streams, for each of which every thread's cuBLAS has memory.
    held()
    for _ in range(2):
        once()
        in_a_thread()
    before = held()
    for _ in range(10):
        in_a_thread()
    for _ in range(30):
        once()
    assert held() == before


@gpu
def test_histories_are_written_while_another_thread_captures():
    """By more stores than PyTorch has streams to give."""
    device = torch.device("cuda", torch.cuda.current_device())
    stores = [HostStore(1, 16, torch.float32, device) for _ in range(40)]
    written = [torch.full((1, 8, 16), float(i), device=device) for i in range(40)]
    for store in stores:
        store.reserve(8)
    total = torch.zeros(4, device=device)

    def write() -> None:
        for store, items in zip(stores, written, strict=True):
            store.write(items, 0)

    def captured() -> None:
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
        total.add_(1)

    torch.cuda.synchronize()
    replay, _ = Recorder().record(captured, device)
    torch.cuda.synchronize()
    assert all(torch.equal(store.read(0, 8), items) for store, items in zip(stores, written, strict=True))
    for _ in range(3):
        replay()
    assert total.tolist() == [3] * 4


@gpu
@pytest.mark.parametrize("change", [change_weight, change_parameter, add_adapter, change_module, change_buffer])
def test_a_model_that_changed_is_captured_anew_on_a_gpu(change):
    model: Any = on_gpu("llama-rabitq")
    options = MODELS["llama-rabitq"][1] | {"max_cache_len": 300}
    caches = [HierarchicalSparseCache(model, **options, cuda_graph=graph) for graph in (True, False)]
    for cache in caches:
        prefill(model, random_ids(2, 120).cuda(), cache)
    for turn in range(2):
        for t in range(4):
            token = random_ids(2, 1, seed=10 * turn + t).cuda()
            assert same_bits(*(step(model, token, cache) for cache in caches))
        if turn == 0:
            change(model)
    assert (caches[0].graphed.captured, caches[0].graphed.replayed) == (2, 6)


@gpu
def test_host_memory_goes_while_a_graph_is_captured():
    """Its last reader is waited for, in a thread that does not capture."""
    device = torch.device("cuda", 0)
    x = torch.zeros(1, device=device)
    held = [pinned.allocate(1 << 20, device).tensor()]
    other = threading.Thread(target=held.clear)

    def captured() -> Tensor:
        other.start()
        other.join(0.3)
        return x.add_(1)

    replay, _ = Recorder().record(captured, device)
    other.join()
    replay()
    assert x.item() == 1 and not held


@gpu
def test_a_step_that_waits_for_the_device_runs_eagerly(warned):
    model: Any = on_gpu("llama-rabitq")
    original = type(model.model.layers[1].mlp).forward

    class Waiting(type(model.model.layers[1].mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return original(self, x) if float(x.sum()) > -1e30 else x

    model.model.layers[1].mlp.__class__ = Waiting
    cache = HierarchicalSparseCache(model, **MODELS["llama-rabitq"][1], max_cache_len=300)
    ids = random_ids(2, 120).cuda()
    found = generate(model, ids, cache, 20)
    other = HierarchicalSparseCache(model, **MODELS["llama-rabitq"][1], max_cache_len=300, cuda_graph=False)
    expected = generate(model, ids, other, 20)
    assert torch.equal(found.sequences, expected.sequences)
    assert cache.graphed.captured == 0
    (reason,) = warned()
    assert "the host waits for the device at" in reason and "test_graph.py" in reason


@gpu
def test_a_capture_that_fails_leaves_everything_as_it_was(warned):
    """What PyTorch does not notice beforehand: the capture is under way when it is refused."""
    model: Any = on_gpu("llama-rabitq")
    layer = model.model.layers[1].mlp
    original = layer.forward

    def waiting(x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().synchronize()
        return original(x)

    layer.forward = waiting
    stream, ids = torch.cuda.current_stream(), random_ids(2, 120).cuda()
    sequences = []
    for options in ({}, {"cuda_graph": False}):
        cache = HierarchicalSparseCache(model, **MODELS["llama-rabitq"][1], max_cache_len=300, **options)
        torch.manual_seed(3)
        sequences.append(generate(model, ids, cache, 20, do_sample=True).sequences)
        assert torch.cuda.current_stream() == stream
        torch.cuda.empty_cache()
    assert torch.equal(*sequences) and len(warned()) == 1
    # And the next model captures.
    layer.forward = original
    cache = HierarchicalSparseCache(model, **MODELS["llama-rabitq"][1], max_cache_len=300)
    generate(model, ids, cache, 20)
    assert cache.graphed.replayed == 18


@gpu
def test_warnings_of_the_warm_up_are_passed_on():
    with pytest.warns(UserWarning, match="of another kind"), graph.waits() as found:
        torch.ones(1, device="cuda").item()
        warnings.warn("of another kind", stacklevel=1)
    assert len(found) == 1 and torch.cuda.get_sync_debug_mode() == 0


@gpu
def test_other_threads_are_not_warned_that_they_wait():
    def wait() -> None:
        torch.ones(1, device="cuda").item()
        warnings.warn("of another kind", stacklevel=1)

    with warnings.catch_warnings(record=True) as caught, graph.waits() as found:
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
    assert found == [] and [str(each.message) for each in caught] == ["of another kind"]
