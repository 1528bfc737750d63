"""Recorded traces: what is in them, and that a simulation on them is what the cache does."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eval.policies import POLICIES, Rows, simulate
from hf_hisparse import HierarchicalSparseCache
from hf_hisparse.coordinator import SparseCoordinator
from hf_hisparse.trace import LayerTrace, Trace
from tests.helpers import METHODS, decode, forward, random_ids, same_bits


PROMPT, NEW = 150, 24


@pytest.fixture(params=METHODS)
def method(request) -> str:
    return request.param


@pytest.fixture
def model(tiny, method):
    return tiny(METHODS[method][0])


@pytest.fixture
def options(method) -> dict[str, Any]:
    return METHODS[method][1]


@pytest.fixture
def seen(monkeypatch) -> list[Tensor]:
    """All that is attended to by selection, in order of steps and layers."""
    found: list[Tensor] = []
    attend = SparseCoordinator.attend

    def watched(self, query, selection, *args, **kwargs):
        found.append(selection.clone())
        return attend(self, query, selection, *args, **kwargs)

    monkeypatch.setattr(SparseCoordinator, "attend", watched)
    return found


def same(a: Trace, b: Trace) -> bool:
    """Whether two traces are equal in everything, dtypes too."""
    arrays = [(a.tokens, b.tokens), (a.emptied, b.emptied)]
    for x, y in zip(a.layers, b.layers, strict=True):
        arrays.append((x.selections, y.selections))
        if {**vars(x), "selections": 0} != {**vars(y), "selections": 0}:
            return False
    facts = [(t.model, t.algorithm, t.top_k, t.batch) for t in (a, b)]
    return facts[0] == facts[1] and all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in arrays)


# ---- what is recorded ------------------------------------------------------------------------------------------------


def test_a_trace_is_what_was_attended_to(model, options, seen, tmp_path):
    """Of every decode step and layer; and recording changes no bit."""
    ids = random_ids(2, PROMPT + NEW)
    plain = decode(model, ids, HierarchicalSparseCache(model, **options), PROMPT)
    seen.clear()
    cache = HierarchicalSparseCache(model, **options)
    with cache.record_trace() as trace:
        assert same_bits(decode(model, ids, cache, PROMPT), plain)
        assert trace.steps == 0
    layers = len(cache.layers)
    assert trace.steps == NEW and len(seen) == NEW * layers and [one.layer for one in trace.layers] == [*range(layers)]
    assert trace.tokens.tolist() == list(range(PROMPT + 1, PROMPT + NEW + 1)) and trace.batch == 2
    assert trace.emptied.tolist() == [True] + [False] * (NEW - 1)
    for index, one in enumerate(trace.layers):
        coordinator = cache.layers[index].coordinator
        assert one.selections.dtype == np.int32 and one.slots == coordinator.slots
        assert (one.page_size, one.item_bytes) == (coordinator.memory.layout.page_size, coordinator.memory.item_bytes)
        assert torch.equal(torch.from_numpy(one.selections), torch.stack(seen[index::layers]).cpu())
    path = tmp_path / "trace.npz"
    trace.save(path)
    assert same(Trace.load(path), trace) and [*tmp_path.iterdir()] == [path]
    # 4 bytes an item as they are.
    assert path.stat().st_size < sum(one.selections.nbytes for one in trace.layers) / 2


def test_nothing_is_recorded_outside(model, options):
    """Before, after, of a dense history, and by a copy."""
    ids = random_ids(1, PROMPT + 3)
    cache = HierarchicalSparseCache(model, **options)
    with cache.record_trace() as trace:
        decode(model, ids[:, :20], cache, 10)
        assert all(coordinator.selected == [] for coordinator in coordinators(cache))
    assert trace.steps == 0 and trace.layers == []
    cache.reset()
    decode(model, ids, cache, PROMPT)
    with cache.record_trace() as trace:
        forward(model, ids[:, :1], cache)
        fork = cache.fork()
        forward(model, ids[:, :1], fork)
        assert all(coordinator.selected is None for coordinator in coordinators(fork))
    forward(model, ids[:, :1], cache)
    assert trace.steps == 1 and trace.tokens.tolist() == [PROMPT + 4]
    with fork.record_trace() as again:
        forward(model, ids[:, :1], fork)
    assert again.steps == 1


def coordinators(cache: HierarchicalSparseCache) -> list[SparseCoordinator]:
    return [layer.coordinator for layer in cache.layers]


def test_a_forward_that_fails_is_not_recorded(model, options, seen):
    ids = random_ids(1, PROMPT + 4)
    cache = HierarchicalSparseCache(model, **options)
    layers = len(cache.layers)
    with cache.record_trace() as trace:
        decode(model, ids[:, : PROMPT + 2], cache, PROMPT)
        last = cache.layers[-1].coordinator
        attend, last.attend = last.attend, lambda *args, **kwargs: 1 / 0
        with pytest.raises(ZeroDivisionError):
            forward(model, ids[:, PROMPT + 2 : PROMPT + 3], cache)
        last.attend = attend
        for t in (PROMPT + 2, PROMPT + 3):
            forward(model, ids[:, t : t + 1], cache)
    assert trace.tokens.tolist() == [PROMPT + t for t in (1, 2, 3, 4)]
    assert len(seen) == 5 * layers - 1
    del seen[2 * layers : 3 * layers - 1]
    for index, one in enumerate(trace.layers):
        assert torch.equal(torch.from_numpy(one.selections), torch.stack(seen[index::layers]).cpu())


def test_recording_ends_with_an_error(model, options):
    cache = HierarchicalSparseCache(model, **options)
    ids = random_ids(1, PROMPT + 2)
    with pytest.raises(KeyError), cache.record_trace() as trace:
        decode(model, ids, cache, PROMPT)
        raise KeyError
    assert trace.steps == 2
    with cache.record_trace() as again:
        forward(model, ids[:, :1], cache)
    assert again.steps == 1


def test_what_a_trace_cannot_hold_is_refused(model, options):
    ids = random_ids(2, PROMPT + 1)
    cache = HierarchicalSparseCache(model, **options)
    with cache.record_trace() as trace:
        decode(model, ids, cache, PROMPT)
        with pytest.raises(ValueError, match="recording already"), cache.record_trace():
            pass
        for change in (
            lambda: cache.reorder_cache(torch.tensor([1, 0])),
            lambda: cache.batch_repeat_interleave(2),
            lambda: cache.batch_select_indices(torch.tensor([0])),
        ):
            with pytest.raises(ValueError, match="`record_trace`.*end that first"):
                change()
        forward(model, ids[:, :1], cache)
        cache.reset()
        with pytest.raises(ValueError, match="a batch of 2 and was given a batch of 1; use another trace"):
            forward(model, ids[:1], cache)
        assert cache.get_seq_length() == 0
        decode(model, ids, cache, PROMPT)
    assert trace.steps == 3 and trace.emptied.tolist() == [True, False, True]
    cache.batch_select_indices(torch.tensor([0]))


@pytest.mark.parametrize("damage", ["cut", "other", "version", "text"])
def test_a_file_that_is_no_trace(damage, tmp_path):
    path = tmp_path / "trace.npz"
    Trace(model="a").save(path)
    assert same(Trace.load(path), Trace(model="a"))
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-30])
    elif damage == "other":
        np.savez(path.open("wb"), x=np.zeros(3))
    elif damage == "version":
        np.savez(path.open("wb"), format="hf_hisparse trace 99")
    else:
        path.write_text("not a trace")
    with pytest.raises(ValueError, match="is not a trace that `save` wrote"):
        Trace.load(path)
    with pytest.raises(FileNotFoundError):
        Trace.load(tmp_path / "none.npz")


def test_a_file_that_is_damaged_anywhere(tmp_path):
    """Is no trace, or what is damaged says nothing."""
    rng = np.random.default_rng(0)
    selections = rng.integers(0, 99, (5, 2, 8), dtype=np.int32)
    trace = Trace("m", "a", 8, 1, np.arange(5), np.zeros(5, np.bool_), [LayerTrace(0, 1, 8, None, selections)])
    path = tmp_path / "trace.npz"
    trace.save(path)
    data, refused = path.read_bytes(), 0
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 255]) + data[place + 1 :])
        try:
            assert same(Trace.load(path), trace)
        except ValueError as error:
            assert "is not a trace that `save` wrote" in str(error)
            refused += 1
    assert refused > len(data) / 2


# ---- simulation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 1.5, 2, 4])
def test_simulated_lru_counts_what_the_cache_counts(method, model, options, size):
    """Step by step, also where several tokens at once empty the buffer, and where the newest tokens are forgotten."""
    ids = random_ids(2, PROMPT + 60)
    top_k = options.get("top_k", 32)
    cache = HierarchicalSparseCache(model, **options, buffer_size=int(size * top_k), max_draft_tokens=4)
    with cache.record_trace() as trace:
        decode(model, ids[:, : PROMPT + 10], cache, PROMPT)
        forward(model, ids[:, PROMPT + 10 : PROMPT + 17], cache)
        for t in range(17, 30):
            forward(model, ids[:, PROMPT + t : PROMPT + t + 1], cache)
        cache.crop(-9)
        for t in range(21, 40):
            forward(model, ids[:, PROMPT + t : PROMPT + t + 1], cache)
    assert trace.emptied.nonzero()[0].tolist() == [0, 10]
    layers = cache.stats().layers
    hits, misses, nbytes = simulate(trace, size, POLICIES["lru"])
    counted = np.array([layer.steps for layer in layers]).transpose(2, 1, 0)
    assert np.array_equal(np.stack((hits, misses)), counted) and misses[1:].any()
    assert nbytes.sum() == cache.stats().bytes_moved


def test_simulation_after_a_crop_to_a_dense_history(tiny):
    """One token more than that takes a new, empty buffer."""
    model, (_, options) = tiny("llama"), METHODS["llama-quest"]
    ids, cache = random_ids(1, 100), HierarchicalSparseCache(model, **options)
    with cache.record_trace() as trace:
        decode(model, ids, cache, 90)
        cache.crop(cache.config.top_k - 100)
        forward(model, ids[:, :1], cache)
    assert trace.emptied.tolist() == [True] + [False] * 9 + [True]


def textbook(items: list[int], slots: int, name: str) -> list[bool]:
    """Which of single requests, one a step, hit."""
    held: OrderedDict[int, int] = OrderedDict()
    hits = []
    for item in items:
        hits.append(item in held)
        if item not in held and len(held) == slots:
            del held[min(held, key=held.__getitem__) if name == "lfu" else next(iter(held))]
        held[item] = held.get(item, 0) + 1
        if name != "fifo":
            held.move_to_end(item)
    return hits


@given(st.lists(st.integers(2, 9), min_size=1, max_size=40), st.integers(1, 5), st.sampled_from(["lru", "fifo", "lfu"]))
def test_policies_are_the_textbook_ones(items, slots, name):
    """Of requests one at a time; the tokens that are appended continue an item that nothing asks for."""
    positions = 1001 + np.arange(len(items))
    case = Rows(np.array(items, np.int32)[:, None, None], positions, np.zeros(len(items), np.bool_), 1000)
    hits, misses = case.simulate(slots, POLICIES[name])
    assert hits[:, 0].astype(bool).tolist() == textbook(items, slots, name) and (hits + misses == 1).all()


@st.composite
def histories(draw: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """What one row selects, any items that there are, of a history that is appended to; the arguments of `Rows`."""
    page_size, length, steps = draw(st.integers(1, 2)), draw(st.integers(2, 8)), draw(st.integers(1, 6))
    positions = np.arange(length, length + steps)
    selections = np.full((steps, 1, 2), -1, np.int32)
    for step, position in enumerate(positions):
        chosen = draw(st.lists(st.integers(0, int(position) // page_size), max_size=2, unique=True))
        selections[step, 0, : len(chosen)] = chosen
    return selections, positions, np.array(draw(st.lists(st.booleans(), min_size=steps, max_size=steps))), page_size


def fewest_misses(case: Rows, slots: int, step: int = 0, held: frozenset[int] = frozenset()) -> int:
    """Of all that can be evicted, tried out."""
    if step == len(case.selections):
        return 0
    held = frozenset() if case.emptied[step] else held
    new = int(case.appended[step])
    starts = [held]
    if case.opens[step] and new not in held:
        starts = [held | {new}] if len(held) < slots else [held - {gone} | {new} for gone in held]
    wanted = {int(item) for item in case.selections[step, 0] if item >= 0}
    best = []
    for held in starts:
        missed = wanted - held
        too_many = max(0, len(held) + len(missed) - slots)
        for gone in itertools.combinations(sorted(held - wanted), too_many):
            best.append(len(missed) + fewest_misses(case, slots, step + 1, held - {*gone} | missed))
    return min(best)


@given(histories(), st.integers(2, 3))
def test_belady_misses_as_few_as_any(history, slots):
    case = Rows(*history)
    misses = {name: int(case.simulate(slots, policy)[1].sum()) for name, policy in POLICIES.items()}
    assert misses["belady"] == fewest_misses(case, slots) <= min(misses.values())


def test_rows_do_not_mix():
    """Rows simulated together are rows simulated alone, whatever the policy."""
    rng = np.random.default_rng(0)
    positions, emptied = np.arange(60, 90), rng.random(30) < 0.1
    selections = np.stack([rng.permutation(30)[:5] for _ in range(30 * 3)]).reshape(30, 3, 5).astype(np.int32)
    for policy in POLICIES.values():
        together = Rows(selections, positions, emptied, 2).simulate(7, policy)
        alone = [Rows(selections[:, [row]], positions, emptied, 2).simulate(7, policy) for row in range(3)]
        assert np.array_equal(np.stack(together), np.concatenate([np.stack(one) for one in alone], axis=2))
    with pytest.raises(ValueError, match="`slots=4` is fewer than the 5"):
        Rows(selections, positions, emptied, 2).simulate(4, policy)
