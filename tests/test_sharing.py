"""Histories that have a beginning in common share it: forks, copies, batches that are reordered."""

from __future__ import annotations

import copy
import gc
import logging
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor
from transformers import LogitsProcessor

from hf_hisparse import HierarchicalSparseCache, coordinator
from hf_hisparse.layout import ItemLayout
from hf_hisparse.memory import HierarchicalMemory, Memory, host_store, limits, pinned
from tests.helpers import DEVICE, METHODS, decode, forward, generate, logits_of, padding, random_ids, same_bits
from tests.test_memory import Allocations


# ---- memories against lists ------------------------------------------------------------------------------------------


LAYOUTS = [ItemLayout.page_head(4, 1, 2), ItemLayout.token(5, 3), ItemLayout.page_head(32, 1, 1)]
"""With slabs of 64 bytes or more: two pages a slab, two tokens a slab, and one page a slab."""


class Histories(RuleBasedStateMachine):
    """Memories that share what they can, and beside each the tokens that it should hold."""

    @initialize(layout=st.sampled_from(LAYOUTS), rows=st.integers(1, 3), room=st.sampled_from([0, 60]))
    def begin(self, layout: ItemLayout, rows: int, room: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(host_store, "SLAB_BYTES", 64)
        self.allocations = Allocations()
        self.patch.setattr(pinned, "allocate", self.allocations)
        self.layout, self.room = layout, room
        self.generator = torch.Generator().manual_seed(0)
        memory = HierarchicalMemory(rows, layout, torch.float32, DEVICE, slots=5)
        memory.reserve(room)
        self.held: list[tuple[Memory, Tensor]] = [(memory, torch.zeros(rows, 0, sum(layout.widths), device=DEVICE))]

    def _random(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator).to(DEVICE)

    def _pick(self, which: int) -> int:
        return which % len(self.held)

    which = st.integers(0, 5)

    @rule(which=which, count=st.integers(1, 70))
    def write(self, which: int, count: int) -> None:
        """A prompt, or a chunk of one."""
        at = self._pick(which)
        memory, tokens = self.held[at]
        first = tokens.shape[1] // self.layout.page_size * self.layout.page_size
        tokens = torch.cat((tokens, self._random(memory.rows, count, tokens.shape[2])), dim=1)
        memory.reserve(tokens.shape[1])
        memory.write(tokens[:, first:].split(list(self.layout.widths), dim=2), first)
        self.held[at] = memory, tokens

    @rule(which=which, count=st.integers(1, 70), data=st.data())
    def write_alike(self, which: int, count: int, data: st.DataObject) -> None:
        """A prompt, or a chunk of one, that rows which are the same so far may have in common."""
        at = self._pick(which)
        memory, tokens = self.held[at]
        more = self._random(memory.rows, count, tokens.shape[2])
        more = more[data.draw(st.lists(st.integers(0, memory.rows - 1), min_size=memory.rows, max_size=memory.rows))]
        start = tokens.shape[1] // memory.unit * memory.unit
        tokens = torch.cat((tokens, more), dim=1)
        rows = [row.cpu().numpy().tobytes() for row in tokens]
        first = sorted({rows.index(row) for row in rows})
        kinds = [first.index(rows.index(row)) for row in rows]
        held, before = memory.store.table, memory.store.shared
        parts = tokens[first, start:].split(list(self.layout.widths), dim=2)
        moved = memory.write_alike(parts, start, kinds, max(tokens.shape[1], self.room))
        assert moved or memory.store.table is held
        if len(first) < memory.rows:
            closed = tokens.shape[1] // self.layout.page_size // memory.store.items_per_slab
            assert memory.store.shared == max(before, closed)
            new = memory.store.table[:, start // memory.unit : closed]
            assert len(new.flatten().unique()) == len(first) * new.shape[1]
        self.held[at] = memory, tokens

    @rule(which=which, count=st.integers(1, 6))
    def append(self, which: int, count: int) -> None:
        """Decode steps."""
        at = self._pick(which)
        memory, tokens = self.held[at]
        for _ in range(count):
            token = self._random(memory.rows, tokens.shape[2])
            memory.reserve(tokens.shape[1] + 1)
            memory.append(token, torch.full((memory.rows,), tokens.shape[1], device=DEVICE))
            tokens = torch.cat((tokens, token.unsqueeze(1)), dim=1)
        self.held[at] = memory, tokens

    @rule(which=which, data=st.data())
    def fetch(self, which: int, data: st.DataObject) -> None:
        memory, tokens = self.held[self._pick(which)]
        items = self.layout.items(tokens.shape[1])
        if not items:
            return
        chosen = data.draw(st.lists(st.integers(0, items - 1), min_size=1, max_size=5, unique=True))
        selection = torch.tensor([chosen] * memory.rows, dtype=torch.int32, device=DEVICE)
        buffer, slots = memory.fetch(selection)
        expected = self.layout.pack(tokens.split(list(self.layout.widths), dim=2))
        for row in range(memory.rows):
            for item, slot in zip(chosen, slots[row].tolist(), strict=True):
                there = min(self.layout.page_size, tokens.shape[1] - item * self.layout.page_size)
                for view in (self.layout.keys, self.layout.values):
                    assert torch.equal(view(buffer[row, slot])[:there], view(expected[row, item])[:there])

    @precondition(lambda self: len(self.held) < 6)
    @rule(which=which)
    def fork(self, which: int) -> None:
        memory, tokens = self.held[self._pick(which)]
        self.held.append((memory.fork(tokens.shape[1], self.room), tokens))

    @rule(which=which, data=st.data())
    def select(self, which: int, data: st.DataObject) -> None:
        at = self._pick(which)
        memory, tokens = self.held[at]
        index = data.draw(st.lists(st.integers(0, memory.rows - 1), min_size=1, max_size=4))
        before = memory.store.table
        memory.select(index, tokens.shape[1])
        assert (memory.store.table is before) == (len(index) == len(tokens))
        self.held[at] = memory, tokens[index]

    @rule(which=which, data=st.data())
    def cut(self, which: int, data: st.DataObject) -> None:
        at = self._pick(which)
        memory, tokens = self.held[at]
        length = data.draw(st.integers(0, tokens.shape[1]))
        before = memory.store.table
        moved = memory.cut(length, self.room)
        assert moved or memory.store.table is before
        self.held[at] = memory, tokens[:, :length]

    @rule(which=which)
    def clear(self, which: int) -> None:
        at = self._pick(which)
        memory, tokens = self.held[at]
        memory.clear()
        memory.reserve(self.room)
        assert memory.counts().tolist() == [0, 0] and memory.log().tolist() == []
        self.held[at] = memory, tokens[:, :0]

    @precondition(lambda self: len(self.held) > 1)
    @rule(which=which)
    def drop(self, which: int) -> None:
        del self.held[self._pick(which)]

    @invariant()
    def every_history_is_whole(self) -> None:
        for memory, tokens in getattr(self, "held", ()):
            found = torch.cat(memory.read(tokens.shape[1]), dim=2)
            assert torch.equal(found, tokens)
            assert memory.store.capacity >= self.layout.items(self.room)

    @invariant()
    def what_may_be_written_is_held_once(self) -> None:
        held = getattr(self, "held", ())
        times = Counter(address for memory, _ in held for address in memory.store.table.flatten().tolist())
        for memory, tokens in held:
            store = memory.store
            assert store.shared <= tokens.shape[1] // self.layout.page_size // store.items_per_slab
            assert all(times[address] == 1 for address in store.table[:, store.shared :].flatten().tolist())
            for row, runs in zip(store.table.tolist(), store.runs, strict=True):
                assert row == [address for run in runs for address in addresses(store, run)]

    def teardown(self) -> None:
        if hasattr(self, "held"):
            self.held.clear()
            # First, as an example that is given up midway may still hold memory, and then nobody hears of it.
            self.patch.undo()
            assert self.allocations.live == 0


def addresses(store: host_store.HostStore, run: Tensor) -> range:
    """Of the slabs of a run."""
    nbytes = store.items_per_slab * store.item_bytes
    return range(run.data_ptr(), run.data_ptr() + run.nbytes, nbytes)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)


@pytest.fixture
def allocations(monkeypatch) -> Allocations:
    """Small slabs, and account of what they take."""
    monkeypatch.setattr(host_store, "SLAB_BYTES", 1024)
    made = Allocations()
    monkeypatch.setattr(pinned, "allocate", made)
    return made


def full_memory(tokens: int) -> tuple[HierarchicalMemory, Tensor]:
    memory = HierarchicalMemory(2, ItemLayout.token(24, 8), torch.float32, DEVICE, slots=8)
    memory.reserve(tokens)
    parts = torch.rand(2, tokens, 24, device=DEVICE), torch.rand(2, tokens, 8, device=DEVICE)
    memory.write(parts, 0)
    return memory, torch.cat(parts, dim=2)


@pytest.mark.parametrize("change", ["fork", "select", "cut"])
def test_no_memory_loses_nothing(allocations, change):
    memory, tokens = full_memory(20)
    other = memory.fork(20)
    assert allocations.live
    allocations.outcomes = [False] * 3
    # Both share two slabs of eight tokens, and each has one of its own, with four.
    with pytest.raises(MemoryError, match="held and intact"):
        if change == "fork":
            other.fork(20)
        elif change == "select":
            other.select([0, 1, 1], 20)
        else:
            other.cut(10, 20)
    for whole in (memory, other):
        assert torch.equal(torch.cat(whole.read(20), dim=2), tokens) and whole.rows == 2
    allocations.outcomes = []
    other.select([0, 1, 1], 20)
    assert torch.equal(torch.cat(other.read(20), dim=2), tokens[[0, 1, 1]])


def test_reordering_allocates_nothing(allocations):
    memory, tokens = full_memory(21)
    assert allocations.live
    allocations.sizes.clear()
    for index in ([1, 0], [0, 0], [1, 1], [0, 1]):
        memory.select(index, 21)
        tokens = tokens[index]
        assert torch.equal(torch.cat(memory.read(21), dim=2), tokens)
    assert allocations.live and not allocations.sizes


# ---- caches ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=METHODS)
def method(request) -> str:
    return request.param


@pytest.fixture
def model(tiny, method) -> Any:
    return tiny(METHODS[method][0])


def new(model: Any, method: str, **options: Any) -> HierarchicalSparseCache:
    return HierarchicalSparseCache(model, **METHODS[method][1] | options)


def steps(model: Any, ids: Tensor, cache: Any, mask: Tensor | None = None) -> Tensor:
    """The logits of tokens fed one at a time."""
    past = cache.get_seq_length()
    logits = [
        forward(model, ids[:, t : t + 1], cache, None if mask is None else mask[:, : past + t + 1])[:, -1]
        for t in range(ids.shape[1])
    ]
    return torch.stack(logits, dim=1)


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 300}, {"offload": False}], ids=["grows", "room", "resident"])
@pytest.mark.parametrize("tokens", [20, 32, 100], ids=["dense", "nearly sparse", "sparse"])
def test_forks_equal_caches_of_their_own(allocations, model, method, tokens, options):
    """However they are made, whichever goes on first, and whether they take one token or several."""
    ids, mask = random_ids(2, tokens), padding("holes", 2, tokens, tokens + 60)

    def prompt() -> HierarchicalSparseCache:
        cache = new(model, method, **options)
        forward(model, ids, cache, mask[:, :tokens])
        steps(model, random_ids(2, 5, seed=1), cache, mask)
        return cache

    first = prompt()
    shared = [first, first.fork(), copy.deepcopy(first)]
    shared.append(shared[1].fork())
    own = [prompt() for _ in shared]
    for turn in range(2):
        for seed, caches in enumerate(zip(shared, own, strict=True)):
            more, chunk = random_ids(2, 9, seed=10 + seed), random_ids(2, 6, seed=20 + seed)
            assert same_bits(*(steps(model, more, cache, mask) for cache in caches)), (turn, seed)
            seen = mask[:, : caches[0].get_seq_length() + 6]
            assert same_bits(*(forward(model, chunk, cache, seen) for cache in caches)), (turn, seed)


@pytest.mark.parametrize("keep", [10, 60, 90, 104])
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 300}], ids=["grows", "room"])
def test_a_fork_is_cropped_alone(allocations, model, method, keep, options):
    """Below where it was made, so that it goes on over what it shares."""
    caches = [new(model, method, **options) for _ in range(2)]
    for cache in caches:
        decode(model, random_ids(2, 105), cache, 100)
    fork = caches[0].fork()
    for cache in (fork, caches[1].fork()):
        steps(model, random_ids(2, 4, seed=3), cache)
    fork.crop(keep - 109)
    lone = new(model, method, **options)
    decode(model, torch.cat((random_ids(2, 105), random_ids(2, 4, seed=3)), dim=1), lone, 100)
    lone.crop(keep - 109)
    more = random_ids(2, 40, seed=4)
    assert same_bits(steps(model, more, fork), steps(model, more, lone))
    assert same_bits(steps(model, more, caches[0]), steps(model, more, caches[1]))


def test_a_fork_goes_on_without_the_cache_that_it_was_made_of(allocations, model, method):
    caches = [new(model, method) for _ in range(2)]
    for cache in caches:
        forward(model, random_ids(2, 150), cache)
    fork = caches.pop(0).fork()
    gc.collect()
    more = random_ids(2, 30, seed=4)
    assert same_bits(steps(model, more, fork), steps(model, more, caches[0]))


def test_a_fork_that_is_reset_leaves_the_others_as_they_were(allocations, model, method):
    caches = [new(model, method) for _ in range(2)]
    for cache in caches:
        forward(model, random_ids(2, 150), cache)
    fork = caches[0].fork()
    fork.reset()
    forward(model, random_ids(2, 90, seed=7), fork)
    fresh = new(model, method)
    forward(model, random_ids(2, 90, seed=7), fresh)
    more = random_ids(2, 9, seed=4)
    assert same_bits(steps(model, more, fork), steps(model, more, fresh))
    assert same_bits(steps(model, more, caches[0]), steps(model, more, caches[1]))


def test_many_questions_on_one_document(model, method):
    document, questions = random_ids(1, 120), [random_ids(1, n, seed=n) for n in (5, 17, 1)]
    cache = new(model, method)
    forward(model, document, cache)
    for question in questions:
        ids = torch.cat((document, question), dim=1)
        lone = new(model, method)
        forward(model, document, lone)
        answers = [generate(model, ids, which, 12) for which in (cache.fork(), lone)]
        assert same_bits(*map(logits_of, answers))
    assert cache.get_seq_length() == 120


def test_eight_forks_hold_one_history(allocations, tiny):
    """And a slab a row that is their own, with another that is prepared for the next tokens."""
    model = tiny("llama")
    cache = new(model, "llama-rabitq")
    forward(model, random_ids(1, 1500), cache)
    before = allocations.live
    assert before == cache.stats().host_bytes
    slabs = sum(store.rows * store.items_per_slab * store.item_bytes for store in stores(cache))
    forks = [cache.fork() for _ in range(8)]
    for seed, fork in enumerate(forks):
        steps(model, random_ids(1, 3, seed=seed), fork)
    assert before < allocations.live <= before + 8 * 2 * slabs < 1.2 * before
    del fork, forks
    gc.collect()
    assert allocations.live == before
    del cache
    gc.collect()
    assert allocations.live == 0


def test_eight_beams_hold_one_history(allocations, tiny):
    model = tiny("llama")
    cache = new(model, "llama-rabitq")
    forward(model, random_ids(1, 1500), cache)
    before = allocations.live
    slabs = sum(store.rows * store.items_per_slab * store.item_bytes for store in stores(cache))
    cache.batch_repeat_interleave(8)
    for turn in range(6):
        steps(model, random_ids(8, 1, seed=turn), cache)
        cache.reorder_cache(torch.randint(8, (8,), device=DEVICE))
    assert before < allocations.live <= before + 8 * 2 * slabs < 1.2 * before


def stores(cache: HierarchicalSparseCache) -> list[host_store.HostStore]:
    return [layer.coordinator.memory.store for layer in cache.layers]


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 300}], ids=["grows", "room"])
def test_a_batch_that_changes_equals_the_resident_oracle(allocations, model, method, options):
    mask = padding("mixed", 3, 100, 200)
    logits = []
    for offload in (True, False):
        cache = new(model, method, **options, offload=offload)
        forward(model, random_ids(3, 100), cache, mask[:, :100])
        found, seen = [], mask
        for turn, index in enumerate(([2, 0, 0], [1, 1, 0], [0, 1, 2, 0, 2], [4, 1, 1], [0], [0, 0])):
            order = torch.tensor(index, device=DEVICE)
            cache.batch_select_indices(order)
            seen = seen[order]
            found.append(steps(model, random_ids(len(index), 5, seed=turn), cache, seen).flatten())
        logits.append(torch.cat(found))
    assert same_bits(*logits)


def test_a_reordered_row_goes_on_as_it_would_have(model, method):
    """Bit for bit: its representation goes with it."""
    caches = [new(model, method) for _ in range(2)]
    for cache in caches:
        decode(model, random_ids(2, 110), cache, 100)
    caches[0].reorder_cache(torch.tensor([1, 0], device=DEVICE))
    more = random_ids(2, 20, seed=1)
    assert same_bits(steps(model, more.flip(0), caches[0]).flip(0), steps(model, more, caches[1]))


def test_reordering_warns_of_nothing(tiny, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = tiny("llama")
    cache = new(model, "llama-rabitq")
    forward(model, random_ids(2, 60), cache)
    cache.reorder_cache(torch.tensor([1, 1], device=DEVICE))
    assert not caplog.records


def test_beams_that_begin_with_one_prompt(allocations, model, method):
    """A prompt that is read once, and then held by every beam, is as good as one that every beam has read."""
    ids = random_ids(1, 150)
    caches = [new(model, method) for _ in range(2)]
    forward(model, ids[:, :-1], caches[0])
    caches[0].batch_repeat_interleave(3)
    forward(model, ids[:, :-1].expand(3, -1), caches[1])
    alike = [different(cache) for cache in caches]
    outputs = [generate(model, ids, cache, 12, num_beams=3, output_scores=True) for cache in caches]
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    torch.testing.assert_close(outputs[0].sequences_scores, outputs[1].sequences_scores)
    for cache, number in zip(caches, alike, strict=True):
        assert cache.stats().host_bytes < cache.stats().dense_bytes / 2 or max(number) > 1
    assert max(alike[0]) == 1


@pytest.mark.parametrize(
    "change", ["repeat", "repeat with room", "crop with room", "crop to a dense history with room"]
)
def test_no_memory_in_a_later_layer_leaves_all_as_they_were(allocations, model, method, change):
    options = {"max_cache_len": 300} if "room" in change else {}
    caches = [new(model, method, **options) for _ in range(2)]
    for cache in caches:
        forward(model, random_ids(2, 150), cache)
    fork, expected = caches[0].fork(), caches[1]
    held = allocations.live

    def apply(cache: HierarchicalSparseCache) -> None:
        if "repeat" in change:
            cache.batch_repeat_interleave(3)
        else:
            cache.crop(-140 if "dense" in change else -50)

    allocations.outcomes = [True] + [False] * 40
    with pytest.raises(MemoryError, match="held and intact"):
        apply(fork)
    allocations.outcomes = []
    assert {(layer.coordinator.length, layer.coordinator.batch) for layer in fork.layers} == {(150, 2)}
    if "repeat" in change:
        gc.collect()
        assert allocations.live == held
    more = random_ids(2, 9, seed=1)
    assert same_bits(steps(model, more, fork.fork()), steps(model, more, expected.fork()))
    for cache in (fork, expected):
        apply(cache)
    more = random_ids(6 if "repeat" in change else 2, 9, seed=2)
    assert same_bits(steps(model, more, fork), steps(model, more, expected))


# ---- sequences that begin alike --------------------------------------------------------------------------------------


def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes all sequences for different ones from here on."""
    monkeypatch.setattr(coordinator, "distinct", lambda parts: ([*range(len(parts[0]))],) * 2)


def copies(cache: HierarchicalSparseCache) -> list[float]:
    """How often each layer holds the slabs that are full, on average; 0 if none is shared."""
    heads = [layer.coordinator.heads for layer in cache.layers]
    shared = [store.table[:, : store.shared] for store in stores(cache)]
    return [len(table.unique()) / max(table.shape[1], 1) / count for table, count in zip(shared, heads, strict=True)]


def different(cache: HierarchicalSparseCache) -> list[int]:
    """How many sequences in each layer are not the same: of equal tokens, a product of another size may round some."""
    histories = [torch.cat(layer.coordinator.history(), dim=-1).cpu() for layer in cache.layers]
    return [len({sequence.numpy().tobytes() for sequence in history}) for history in histories]


class AfterPrompt(LogitsProcessor):
    """Looks at a cache when there are the logits of a prompt, and leaves them as they are."""

    def __init__(self, cache: HierarchicalSparseCache):
        self.cache, self.host_bytes = cache, 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if not self.host_bytes:
            self.host_bytes = self.cache.stats().host_bytes
            self.copies, self.different = copies(self.cache), different(self.cache)
        return scores


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 600}], ids=["grows", "room"])
@pytest.mark.parametrize(
    "how",
    [{"num_beams": 4}, {"num_return_sequences": 4, "do_sample": True}, {"num_beams": 4, "prefill_chunk_size": 130}],
    ids=["beams", "samples", "beams in chunks"],
)
def test_what_is_generated_of_one_prompt_holds_it_once(allocations, monkeypatch, model, method, how, options):
    """In memory for one sequence, and for what each is yet to have of its own; the tokens are as they were."""
    ids, found = random_ids(1, 500), []
    for _ in range(2):
        cache = new(model, method, **options)
        look = AfterPrompt(cache)
        torch.manual_seed(0)
        output = generate(model, ids, cache, 12, logits_processor=[look], **how)
        found.append((output.sequences, logits_of(output), look))
        apart(monkeypatch)
    (sequences, logits, look), (expected, expected_logits, unshared) = found
    assert torch.equal(sequences, expected) and same_bits(logits, expected_logits)
    assert look.host_bytes < unshared.host_bytes
    lone = new(model, method)
    forward(model, ids, lone)
    one, slabs = lone.stats().host_bytes, sum(s.rows * s.items_per_slab * s.item_bytes for s in stores(lone))
    if look.different == [1] * len(cache.layers):
        assert look.copies == [1] * len(cache.layers)
        # A slab in which a sequence goes on, another that is prepared, and what was made room for: all, or a chunk and
        # a quarter of it.
        first = how.get("prefill_chunk_size", 500)
        tokens = options["max_cache_len"] - first if options else 1.25 * min(first, 500 - first)
        assert one < look.host_bytes <= one + 4 * (one * tokens / 500 + 2 * slabs)


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 300}, {"offload": False}], ids=["grows", "room", "resident"])
@pytest.mark.parametrize("chunks", [[150], [20, 130], [60, 50, 40]], ids=str)
def test_what_is_the_same_is_held_once_until_it_differs(allocations, monkeypatch, model, method, options, chunks):
    """Sequences that are the same but for their masks differ, and each goes on as if nothing was shared."""
    kinds = torch.tensor([0, 1, 0, 2, 2, 3], device=DEVICE)
    ids, seen = random_ids(3, 150)[kinds % 3], torch.ones(6, 210, dtype=torch.int64, device=DEVICE)
    seen[5, 3:40:4] = 0
    logits = []
    for _ in range(2):
        cache, past, found = new(model, method, **options), 0, []
        for count in chunks:
            found.append(forward(model, ids[:, past : past + count], cache, seen[:, : past + count])[:, -1:])
            past += count
        # Where there was room for all of it before, there is nothing to save.
        if not logits and (not options or "max_cache_len" in options and chunks[0] > 40):
            assert different(cache)[0] == copies(cache)[0] == 4
            assert all(0 < held <= number for held, number in zip(copies(cache), different(cache), strict=True))
        found.append(steps(model, random_ids(6, 5, seed=1), cache, seen))
        fork = cache.fork()
        cache.crop(-60)
        for turn, which in enumerate((cache, fork)):
            more = random_ids(1, 30, seed=2 + turn).expand(6, -1)
            found.append(forward(model, more, which, seen[:, : 125 + 60 * turn]))
            found.append(steps(model, random_ids(6, 4, seed=4 + turn), which, seen))
        logits.append(torch.cat([each.flatten() for each in found]))
        apart(monkeypatch)
    assert same_bits(*logits)


def test_a_prompt_of_many_sequences_needs_the_memory_of_one(allocations, monkeypatch, model, method):
    """And is refused, before any of it is held, where there is less."""
    ids, needed = random_ids(1, 500).expand(8, -1), new(model, method)
    forward(model, ids, needed)
    bytes_needed = needed.stats().host_bytes
    cache = new(model, method)
    monkeypatch.setattr(limits, "available", lambda: bytes_needed - 1)
    with pytest.raises(MemoryError, match="needed in all, 0 are held and intact"):
        forward(model, ids, cache)
    assert cache.get_seq_length() == cache.stats().host_bytes == 0 and allocations.live == bytes_needed
    monkeypatch.setattr(limits, "available", lambda: bytes_needed)
    forward(model, ids, cache)
    more = random_ids(8, 9, seed=1)
    monkeypatch.setattr(limits, "available", lambda: None)
    assert same_bits(steps(model, more, cache), steps(model, more, needed))


@pytest.mark.parametrize("where", ["a layer", "first write", "second write"])
@pytest.mark.parametrize("length", [0, 20, 100], ids=["empty", "dense", "in memory"])
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 250}], ids=["grows", "room"])
def test_an_interrupted_prompt_takes_back_what_is_shared_without_memory(
    allocations, monkeypatch, model, method, length, options, where
):
    caches, ids = [new(model, method, **options) for _ in range(2)], random_ids(1, 180).expand(3, -1)
    for cache in caches:
        if length:
            forward(model, ids[:, :length], cache)

    def interrupt(*args: Any) -> None:
        allocations.outcomes = [False] * 100
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if where == "a layer":
            patch.setattr(model.model.layers[-1].mlp, "forward", interrupt)
        else:
            write = host_store.HostStore.write
            calls = iter([interrupt] if where == "first write" else [write, interrupt])
            patch.setattr(host_store.HostStore, "write", lambda *args: next(calls, write)(*args))
        with pytest.raises(KeyboardInterrupt):
            forward(model, ids[:, length:], caches[0])
    assert caches[0].get_seq_length() == length
    allocations.outcomes = []
    assert same_bits(*(forward(model, ids[:, length:], cache) for cache in caches))
    more = random_ids(3, 5, seed=1)
    assert same_bits(*(steps(model, more, cache) for cache in caches))
