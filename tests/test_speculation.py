"""Short forwards over a history, and drafts that are verified and cropped: each token as if it had come alone."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hf_hisparse
from hf_hisparse import HierarchicalSparseCache
from hf_hisparse.algorithms import LightningIndexer, Quest, RaBitQ
from hf_hisparse.backends.reference import ReferenceBackend
from hf_hisparse.coordinator import SparseCoordinator
from hf_hisparse.layout import ItemLayout
from hf_hisparse.memory import HierarchicalMemory, host_store
from hf_hisparse.models import cache_argument
from hf_hisparse.models.dsa import select
from hf_hisparse.ops.reference import slot_of
from tests.helpers import (
    DEVICE,
    GQA,
    METHODS,
    close,
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


MODELS: dict[str, tuple[str, dict[str, Any]]] = METHODS | {
    "gemma3": ("gemma3_text", GQA | {"algorithm": "rabitq"}),
    "glm": ("glm_moe_dsa", {}),
}


@pytest.fixture(scope="module")
def double() -> Callable[[str], Any]:
    """`double(name)`: a model in float64, made once. Its experts are multiplied one by one, which can be in float64."""

    def make(name: str) -> Any:
        model: Any = make_model(name, torch.float64)
        model.set_experts_implementation("eager")
        return model

    return functools.cache(make)


@pytest.fixture(params=METHODS)
def method(request) -> str:
    return request.param


@pytest.fixture(params=MODELS)
def kind(request) -> str:
    return request.param


def new_cache(model: nn.Module, kind: str, **options: Any) -> HierarchicalSparseCache:
    return HierarchicalSparseCache(model, **MODELS[kind][1] | options)


def pieces(model: nn.Module, ids: Tensor, cache: Any, sizes: list[int], mask: Tensor | None = None) -> Tensor:
    """The logits of tokens that come in forwards of so many each."""
    logits = []
    for part in ids.split(sizes, dim=1):
        seen = None if mask is None else mask[:, : cache.get_seq_length() + part.shape[1]]
        logits.append(forward(model, part, cache, seen))
    return torch.cat(logits, dim=1)


# ---- several tokens at once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [29, 40, 90])
def test_a_short_forward_equals_its_tokens_one_by_one(double, kind, prompt):
    """From within `top_k`, across it, and beyond; with padding; whatever the pieces."""
    model, ids, mask = double(MODELS[kind][0]), random_ids(3, prompt + 32), padding("mixed", 3, prompt, prompt + 32)
    one, other = new_cache(model, kind), new_cache(model, kind)
    for cache in (one, other):
        forward(model, ids[:, :prompt], cache, mask[:, :prompt])
    a = pieces(model, ids[:, prompt:], one, [8, 1, 2, 8, 5, 3, 1, 4], mask)
    b = pieces(model, ids[:, prompt:], other, [1] * 32, mask)
    # Attention is in float32, and so is the choice of experts.
    close(a.float(), b.float())
    assert torch.equal(a.argmax(-1), b.argmax(-1))


def test_a_short_forward_equals_the_resident_oracle(tiny, kind):
    model, ids = tiny(MODELS[kind][0]), random_ids(2, 120)
    sizes = [30, 8, 8, 2, 30, 7, 1, 8, 8, 8, 3, 7]
    a, b = (pieces(model, ids, new_cache(model, kind, offload=offload), sizes) for offload in (True, False))
    assert same_bits(a, b)


@pytest.mark.parametrize("name", ["llama-quest", "llama-rabitq", "gemma3"])
@pytest.mark.parametrize(("longest", "tokens"), [(1, 2), (4, 5), (8, 9)])
def test_a_longer_forward_is_exact(double, name, longest, tokens):
    """And one that is not longer is not: it attends to selections."""
    model, ids = double(MODELS[name][0]), random_ids(1, 100 + tokens)
    cache, dense = new_cache(model, name, max_draft_tokens=longest), dense_cache(model)
    for each in (cache, dense):
        forward(model, ids[:, :100], each)
    short = cache.fork()
    exact = forward(model, ids[:, 100:], dense)
    close(forward(model, ids[:, 100:], cache), exact)
    approximate = forward(model, ids[:, 100 : 100 + longest], short)
    assert float((approximate - exact[:, :longest]).abs().max()) > 1e-3
    assert [layer.hits + layer.misses > 0 for layer in short.stats().layers] == [True] * len(short.stats().layers)


def test_every_token_of_a_draft_is_a_step_of_the_statistics(tiny, method):
    model = tiny(MODELS[method][0])
    cache = new_cache(model, method)
    pieces(model, random_ids(1, 113), cache, [100, 5, 1, 7])
    assert [len(layer.steps) for layer in cache.stats().layers] == [13] * len(cache.stats().layers)


@pytest.mark.parametrize("name", ["llama-rabitq", "deepseek", "gemma3"])
def test_a_draft_that_cannot_be_stored_is_refused(tiny, name):
    """A tree of tokens."""
    model, ids = tiny(MODELS[name][0]), random_ids(2, 110)
    cache, fresh = new_cache(model, name), new_cache(model, name)
    for each in (cache, fresh):
        forward(model, ids[:, :100], each)
    tree = torch.ones(2, 1, 6, 106, dtype=torch.bool, device=DEVICE).tril(100)
    tree[:, :, 3, 102] = False
    with pytest.raises(ValueError, match=r"`attention_mask` of shape \[2, 1, 6, 106\] shows another query"):
        model(
            ids[:, 100:106],
            attention_mask=tree,
            position_ids=torch.arange(100, 106, device=DEVICE).unsqueeze(0),
            **{cache_argument(model): cache},
        )
    assert cache.get_seq_length() == 100
    assert same_bits(*(pieces(model, ids[:, 100:], each, [6, 4]) for each in (cache, fresh)))


@pytest.mark.parametrize(("hidden", "sizes"), [([103, 105], [6]), ([100, 102], [3, 1, 1, 1])])
@pytest.mark.parametrize("prompt", [38, 100])
@pytest.mark.parametrize("name", ["llama-quest", "llama-rabitq", "deepseek", "gemma3"])
def test_tokens_up_to_the_last_padding_are_no_draft(double, name, prompt, hidden, sizes):
    """They are attended to as a turn of a conversation is, and those behind them take steps. Then all do again."""
    model, ids = double(MODELS[name][0]), random_ids(3, prompt + 20)
    mask = padding("mixed", 3, prompt, prompt + 20)
    mask[2, [column - 100 + prompt for column in hidden]] = 0
    cache, pieced = new_cache(model, name), new_cache(model, name, max_draft_tokens=1)
    seen = mask[:, prompt : prompt + 6].bool()
    a = pieces(model, ids[:, : prompt + 6], cache, [prompt, 6], mask)[:, prompt:]
    b = pieces(model, ids[:, : prompt + 6], pieced, [prompt, *sizes], mask)[:, prompt:]
    close(a[seen].float(), b[seen].float())
    a = pieces(model, ids[:, prompt + 6 :], cache, [5, 1, 8], mask)
    b = pieces(model, ids[:, prompt + 6 :], pieced, [1] * 14, mask)
    close(a.float(), b.float())


@pytest.mark.parametrize("value", [0, -1, None, 2.0])
def test_the_most_draft_tokens_are_a_positive_number(tiny, value):
    with pytest.raises(ValueError, match="`max_draft_tokens` must be a positive integer"):
        HierarchicalSparseCache(tiny("llama"), max_draft_tokens=value)


# ---- crop ------------------------------------------------------------------------------------------------------------

BATCH, TOP_K, WIDTH, BLOCK = 2, 24, 8, 16


class Layer:
    """One layer's history, given random tokens, and what each token attended to.

    Args:
        name: Of the algorithm.
        capacity: As for `SparseCoordinator`.
        padding: Tokens of the second sequence that are padding.
    """

    def __init__(self, name: str, capacity: int | None, padding: int):
        page_size, self.heads, layout, make = {
            "quest": (4, 2, partial(ItemLayout.page_head, 4), partial(Quest, 4, 2, 4)),
            "rabitq": (2, 2, partial(ItemLayout.page_head, 2), partial(RaBitQ, 2, 2, 4)),
            "dsa": (1, 1, ItemLayout.token, LightningIndexer),
        }[name]
        k = TOP_K // page_size
        self.coordinator = SparseCoordinator(TOP_K, k, k + 2, layout, make, ReferenceBackend(), capacity)
        self.padding = padding
        self.outputs: list[Tensor | None] = []

    def mask(self, tokens: int) -> Tensor:
        mask = torch.ones(BATCH, tokens, dtype=torch.bool, device=DEVICE)
        mask[1, : self.padding] = False
        return mask

    def extend(self, seed: int, tokens: int, fill: float | None = None) -> None:
        """Tokens that are attended to densely, but to know their indexer keys."""
        parts, query, keys = self._random(seed, tokens, fill)
        mask = self.mask(self.coordinator.length + tokens)
        if self.indexed:
            self._select(keys, query, mask)
        self.coordinator.extend(parts, mask)
        self.outputs += [None] * tokens

    def step(self, seed: int, fill: float | None = None) -> None:
        """One token that takes a decode step."""
        if self.coordinator.fits(1):
            self.extend(seed, 1, fill)
            return
        parts, query, keys = self._random(seed, 1, fill)
        mask = self.mask(self.coordinator.length + 1)
        if self.indexed:
            selection = self._select(keys, query, mask).squeeze(1)
            self.coordinator.append(parts, mask)
            query = query.repeat(1, 1, 1, 2)[..., : WIDTH + 4]
        else:
            self.coordinator.append(parts, mask)
        query = query.flatten(0, 1)
        if not self.indexed:
            selection = self.coordinator.retrieve(query, 0.3)
        self.outputs.append(self.coordinator.attend(query, selection, 0.3))

    def crop(self, remove: int) -> None:
        self.coordinator.crop(remove)
        del self.outputs[len(self.outputs) - remove :]

    @property
    def indexed(self) -> bool:
        return isinstance(self.coordinator.algorithm, LightningIndexer)

    def _select(self, keys: Tensor, query: Tensor, mask: Tensor) -> Tensor:
        """What the indexer selects for tokens with these keys, all of them by the same query."""
        asked = query.expand(-1, keys.shape[1], -1, -1)
        return select(self.coordinator, keys, asked, asked[..., 0], 1.0, mask, TOP_K)

    def _random(self, seed: int, tokens: int, fill: float | None) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
        """The parts of tokens, a query, and indexer keys."""
        generator = torch.Generator().manual_seed(seed)
        widths = (WIDTH, 4 if self.indexed else WIDTH)
        shapes = [(BATCH, self.heads, tokens, width) for width in widths]
        drawn = [torch.randn(*shape, generator=generator) + 1 for shape in shapes]
        query = torch.randn(BATCH, self.heads, 3, WIDTH, generator=generator).to(DEVICE)
        keys = torch.randn(BATCH, tokens, WIDTH, generator=generator)
        if fill is not None:
            drawn, keys = [part.fill_(fill) for part in drawn], keys.fill_(fill)
        one, two = (part.to(DEVICE) for part in drawn)
        return (one, two), query, keys.to(DEVICE)

    def state(self) -> dict[str, Tensor]:
        """All that what comes next depends on."""
        coordinator, length = self.coordinator, self.coordinator.length
        # What stands for padding in a dense history depends on whether that came from the memory.
        hidden = ~self.mask(length)
        state: dict[Any, Tensor] = {
            i: part.masked_fill(hidden[:, None, :, None], 0) for i, part in enumerate(coordinator.history())
        }
        representation = coordinator.algorithm.state(length)
        if coordinator.memory is None:
            return state | {name: keys.masked_fill(hidden.unsqueeze(2), 0) for name, keys in representation.items()}
        lengths = coordinator.lengths
        state |= {"lengths": lengths}
        sizes = {"centre": BLOCK, "sum": 0, "count": 0}
        for name, value in representation.items():
            if name == "begun":
                # How many tokens a crop may leave without building codes anew, and not a part of them.
                continue
            # What lies behind the end of a sequence that has padding is yet to be written.
            first = torch.arange(value.shape[1], device=DEVICE) * sizes.get(name, self.granularity)
            behind = first >= lengths.unsqueeze(1)
            state[name] = value.masked_fill(behind.view(*behind.shape, *[1] * (value.ndim - 2)), 0)
        return state

    @property
    def granularity(self) -> int:
        """Tokens that an entry of the representation is of."""
        return getattr(self.coordinator.algorithm, "granularity", 1)

    def check_buffer(self) -> None:
        """What the device buffer holds of the history is the history. An item that was cropped may lie there still: as
        it is written again, it is written there too."""
        memory = self.coordinator.memory
        if not isinstance(memory, HierarchicalMemory):
            return
        buffer, items = memory.buffer, memory.layout.items(self.coordinator.length)
        parts = memory.layout.unpack(memory.store.read(0, items), items * memory.layout.page_size)
        for row in range(memory.rows):
            held = {slot: item for slot, item in enumerate(buffer.slot_item[row].tolist()) if item >= 0}
            named = slot_of(buffer.item_slot[row]).tolist()
            assert {slot: item for item, slot in enumerate(named) if slot >= 0} == held
            for slot, item in held.items():
                low = item * memory.layout.page_size
                if low >= int(self.coordinator.lengths[row]):
                    continue
                seen = min(memory.layout.page_size, int(self.coordinator.lengths[row]) - low)
                resident = memory.layout.unpack(buffer.buffer[row, slot].view(1, 1, -1), seen)
                for here, there in zip(resident, parts, strict=True):
                    assert torch.equal(here[0], there[row, low : low + seen])


def assert_same_state(one: Layer, other: Layer) -> None:
    a, b = one.state(), other.state()
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
    one.check_buffer()


number = partial(st.integers, 1)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("steps"), number(8)),
        st.tuples(st.just("turn"), number(20)),
        st.tuples(st.just("crop"), number(20)),
        st.tuples(st.sampled_from(["rejected", "not a number", "infinite"]), number(8)),
        st.tuples(st.just("fork"), st.just(0)),
    ),
    max_size=12,
)


@pytest.mark.parametrize("name", ["quest", "rabitq", "dsa"])
@settings(max_examples=25)
@given(number(60), ACTIONS, st.integers(0, 20), st.sampled_from([None, 400]))
@example(10, [("steps", 8), ("steps", 7), ("turn", 1), ("crop", 1)], 9, None)  # A first block that is just full,
@example(11, [("steps", 8), ("steps", 6), ("turn", 1), ("crop", 1)], 10, None)  # and one that becomes so.
def test_what_was_cropped_leaves_no_trace(name, prompt, actions, padding, capacity):
    """A history that took drafts and dropped them goes on as one that never saw them, bit for bit."""
    fills = {"rejected": None, "not a number": torch.nan, "infinite": torch.inf}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RaBitQ, "block", BLOCK)
        patch.setattr(host_store, "SLAB_BYTES", 512)
        layer = Layer(name, capacity, min(padding, prompt - 1))
        layer.extend(0, prompt)
        survivors: list[tuple[str, int, int]] = [("turn", 0, prompt)]
        """What was done, with which seed, and how long the history was then."""
        for seed, (action, count) in enumerate(actions, 1):
            length = layer.coordinator.length
            if action == "turn":
                layer.extend(seed, count)
                survivors.append(("turn", seed, length + count))
            elif action == "steps":
                for t in range(count):
                    layer.step(100 * seed + t)
                    survivors.append(("step", 100 * seed + t, length + t + 1))
            elif action == "fork":
                layer = copy.deepcopy(layer)
            elif action == "crop":
                # A turn goes as a whole: half of one, cropped, is a turn that was longer.
                kept = [entry for entry in survivors[1:] if entry[2] <= length - count]
                survivors = survivors[:1] + kept
                layer.crop(length - survivors[-1][2])
            else:
                for t in range(count):
                    layer.step(100 * seed + t, fills[action])
                layer.crop(count)
            layer.check_buffer()
        fresh = Layer(name, capacity, layer.padding)
        for action, seed, length in survivors:
            if action == "turn":
                fresh.extend(seed, length - fresh.coordinator.length)
            else:
                fresh.step(seed)
        for seed in range(10):
            assert_same_state(layer, fresh)
            for each in (layer, fresh):
                each.step(-seed - 1)
        for one, other in zip(layer.outputs, fresh.outputs, strict=True):
            assert one is other is None or same_bits(one, other)


@pytest.mark.parametrize("prompt", [38, 100])
def test_a_draft_that_is_rejected_leaves_no_trace(tiny, kind, prompt):
    """Also a model's: eight tokens at a time, of which ever more are kept."""
    model, ids, mask = tiny(MODELS[kind][0]), random_ids(2, prompt + 36), left_padding(2, prompt + 60)
    drafted, fresh = new_cache(model, kind), new_cache(model, kind)

    def take(cache: Any, tokens: Tensor, kept: int) -> Tensor:
        logits = forward(model, tokens, cache, mask[:, : cache.get_seq_length() + tokens.shape[1]])[:, :kept]
        cache.crop(kept - tokens.shape[1])
        return logits

    for each in (drafted, fresh):
        each.activate_past_recording()
        take(each, ids[:, :prompt], prompt)
    low = prompt
    for kept in [*range(1, 9), *[1] * 10]:
        right = ids[:, low : low + kept] if low < ids.shape[1] else random_ids(2, kept, seed=low)
        wrong = random_ids(2, 8 - kept if kept < 8 and low < ids.shape[1] else 0, seed=kept)
        logits = take(drafted, torch.cat((right, wrong), dim=1), kept)
        # Products of another shape were made.
        close(logits, take(fresh, right, kept))
        low += kept
        assert drafted.get_seq_length() == fresh.get_seq_length() == low


@pytest.mark.parametrize("prompt", [38, 100])
def test_a_draft_that_fails_midway_leaves_no_trace(tiny, method, monkeypatch, prompt):
    model, ids = tiny(MODELS[method][0]), random_ids(2, prompt + 20)
    cache, fresh = new_cache(model, method), new_cache(model, method)
    for each in (cache, fresh):
        pieces(model, ids[:, : prompt + 3], each, [prompt, 1, 1, 1])
    append, calls = SparseCoordinator.append, []

    def fail(self: SparseCoordinator, *args: Any) -> None:
        append(self, *args)
        calls.append(self)
        if len(calls) == 9:
            raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(SparseCoordinator, "append", fail)
        with pytest.raises(InterruptedError):
            forward(model, random_ids(2, 8, seed=9), cache)
    assert cache.get_seq_length() == prompt + 3
    assert same_bits(*(pieces(model, ids[:, prompt + 3 :], each, [1] * 8 + [9]) for each in (cache, fresh)))


# ---- generate --------------------------------------------------------------------------------------------------------


NEW = 30


def lookup(model: nn.Module) -> dict[str, Any]:
    return {"prompt_lookup_num_tokens": 12, "max_matching_ngram_size": 1}


def draft_model(model: nn.Module) -> dict[str, Any]:
    """A draft model that is right now and then: the model itself, with weights that are a little off."""
    assistant = copy.deepcopy(model)
    hf_hisparse.unpatch_model(assistant)
    generator = torch.Generator().manual_seed(0)
    for parameter in assistant.parameters():
        parameter.data += (0.04 * torch.randn(parameter.shape, generator=generator)).to(parameter) * parameter.data
    assistant.generation_config.num_assistant_tokens = 12
    assistant.generation_config.assistant_confidence_threshold = 0
    return {"assistant_model": assistant}


def early_exit(model: nn.Module) -> dict[str, Any]:
    return {"assistant_early_exit": 1, "assistant_confidence_threshold": 0}


def with_crops(cache: Any) -> list[int]:
    """A list to which a cache's crops are added from here on."""
    crops: list[int] = []
    crop = cache.crop

    def counted(tokens: Any) -> None:
        crops.append(-int(tokens))
        crop(tokens)

    cache.crop = counted
    return crops


def assisted(model: nn.Module, ids: Tensor, cache: Any, **drafts: Any) -> Any:
    """Generation with drafts. Skips the test if this transformers fails with a dense cache, as some do: of windows that
    several forwards fill, and of layers that an early exit does not reach."""
    layers = model.config.num_hidden_layers
    try:
        return generate(model, ids, cache, NEW, **drafts)
    except (RuntimeError, TypeError) as error:
        # An early exit that fails leaves the model with fewer.
        model.config.num_hidden_layers = layers
        for attempt in (
            lambda: generate(model, ids, dense_cache(model), NEW, **drafts),
            lambda: dense_cache(model).crop(-1),
        ):
            try:
                attempt()
            except type(error) as other:
                model.config.num_hidden_layers = layers
                pytest.skip(f"this transformers fails with its own cache: {other}")
        raise


CASES = [(kind, 90) for kind in (*METHODS, "gemma3")] + [("llama-quest", 26)]


@pytest.mark.parametrize("drafts", [lookup, draft_model, early_exit])
@pytest.mark.parametrize(("kind", "prompt"), CASES)
def test_greedy_tokens_are_the_same_with_any_assistant(double, kind, prompt, drafts):
    """From the first token on, though the first drafts come with the prompt; and across `top_k`."""
    model = double(MODELS[kind][0])
    ids = random_ids(1, 9).repeat(1, prompt // 9 + 1)[:, :prompt]
    plain = generate(model, ids, new_cache(model, kind), NEW)
    cache = new_cache(model, kind)
    crops = with_crops(cache)
    output = assisted(model, ids, cache, **drafts(model))
    assert torch.equal(output.sequences, plain.sequences)
    close(logits_of(output).float(), logits_of(plain).float())
    # Some drafts were rejected, and some were not, but where a model with such weights says one thing over and over.
    assert kind == "gemma3" or (any(crops) and (len(crops) < NEW or drafts is early_exit))
    assert cache.get_seq_length() == prompt + NEW - 1


@pytest.mark.parametrize("drafts", [draft_model, early_exit])
@pytest.mark.parametrize("kind", ["llama-rabitq", "gemma3"])
def test_every_model_has_a_cache_of_its_own(double, kind, drafts, monkeypatch):
    """With `enable`, and a draft model whose cache is hierarchical too: the same model, if it exits early."""
    model, ids = double(MODELS[kind][0]), random_ids(1, 9).repeat(1, 10)
    plain = generate(model, ids, new_cache(model, kind), NEW)
    options = drafts(model)
    assisted(model, ids, dense_cache(model), **options)
    drafting = options.get("assistant_model", model)
    made: list[HierarchicalSparseCache] = []
    begin = HierarchicalSparseCache.begin_forward

    def noted(self: HierarchicalSparseCache, *args: Any) -> None:
        made.extend([] if any(self is other for other in made) else [self])
        begin(self, *args)

    monkeypatch.setattr(HierarchicalSparseCache, "begin_forward", noted)
    with hf_hisparse.enable(model, **MODELS[kind][1]), hf_hisparse.enable(drafting, **MODELS[kind][1]):
        output = generate(model, ids, None, NEW, **options)
    assert torch.equal(output.sequences, plain.sequences)
    draft, own = made
    assert own.get_seq_length() == 90 + NEW - 1 and draft.get_seq_length() < own.get_seq_length()
    assert draft._model() is drafting and own._model() is model
    hf_hisparse.unpatch_model(drafting)
    hf_hisparse.unpatch_model(model)


def test_a_cache_that_cannot_be_cropped_is_refused_as_a_dense_one_is(tiny):
    """Linear attention: by the same rule as that of transformers' own cache."""
    model, ids = tiny("qwen3_next"), random_ids(1, 12).repeat(1, 6)
    caches = dense_cache(model), HierarchicalSparseCache(model, **GQA)
    results = []
    for cache in caches:
        try:
            results.append(generate(model, ids, cache, 4, prompt_lookup_num_tokens=3).sequences.shape)
        except (ValueError, RuntimeError) as error:
            results.append(f"{type(error).__name__}: {error}")
    assert results[0] == results[1]
