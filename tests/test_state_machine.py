"""Whole caches under anything that is done with them, in any order, against caches that keep everything.

`pytest --hypothesis-profile long tests/test_state_machine.py` takes as long as one likes to wait.
"""

from __future__ import annotations

import copy
import functools
import gc
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from hf_hisparse import HierarchicalSparseCache
from hf_hisparse.algorithms import Quest
from hf_hisparse.coordinator import SparseCoordinator
from hf_hisparse.graph import GraphedForward
from hf_hisparse.memory import HierarchicalMemory, host_store, pinned
from hf_hisparse.ops.reference import slot_of
from tests.helpers import DEVICE, GQA, close, dense_cache, forward, make_model, random_ids, same_bits
from tests.test_graph import Rerun, model_of
from tests.test_memory import Allocations


KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "quest": ("llama", {}, GQA | {"algorithm": "quest"}),
    "rabitq": ("llama", {}, GQA | {"algorithm": "rabitq", "page_size": 2}),
    "deepseek": ("deepseek_v32", {"num_hidden_layers": 2}, {}),
    "glm": ("glm_moe_dsa", {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]}, {}),
}
"""Models, what their configs have changed, and options."""
LONGEST, WIDEST, MOST = 150, 4, 4
"""Tokens of a history, sequences of a batch, and caches that are alive."""


@functools.cache
def model(kind: str, covered: bool) -> Any:
    """Of a kind; with `covered`, one that attends to every token."""
    name, overrides, options = KINDS[kind]
    if covered and "top_k" not in options:
        overrides = overrides | {"index_topk": 2 * LONGEST}
    return model_of(name, **overrides)


@functools.cache
def first_layer(kind: str, covered: bool) -> Any:
    """The model with its first layer alone, whose keys and values depend on nothing but the tokens."""
    whole = model(kind, covered)
    cut = make_model(
        KINDS[kind][0],
        **KINDS[kind][1] | {"num_hidden_layers": 1} | ({"mlp_layer_types": ["dense"]} if kind == "glm" else {}),
    )
    cut.load_state_dict({name: whole.state_dict()[name] for name in cut.state_dict()})
    return cut


def settled(cache: HierarchicalSparseCache) -> bool:
    """Whether layers hold nothing but what counts: no rest of a forward that failed, or of a crop for later."""
    return cache._begun is None and cache._counted is None


@dataclass
class Held:
    """A cache, one that is given the same, and what both should hold."""

    cache: HierarchicalSparseCache
    twin: Any
    """A resident one, whose every bit the cache must equal; or transformers' own."""
    ids: Tensor
    mask: Tensor
    """`[batch, tokens]` each."""
    parts: tuple[Tensor, ...] = ()
    """`[batch, tokens, ...]` each: the first layer's keys and values, or latents, rotary and indexer keys."""

    def keep(self, rows: Any = slice(None), tokens: Any = slice(None)) -> None:
        """Of everything, some rows and some tokens."""
        self.ids, self.mask = self.ids[rows, tokens], self.mask[rows, tokens]
        self.parts = tuple(part[rows, tokens] for part in self.parts)

    @property
    def batch(self) -> int:
        return len(self.ids)

    @property
    def length(self) -> int:
        return self.ids.shape[1]


class Caches(RuleBasedStateMachine):
    """Caches of one model, several of which may share what they hold."""

    which, then = st.integers(0, MOST - 1), st.integers(0, 2)

    @initialize(
        kind=st.sampled_from(sorted(KINDS)),
        covered=st.sampled_from([False] * 4 + [True]),
        room=st.sampled_from([{}, {"max_cache_len": LONGEST}]),
        recording=st.booleans(),
        tokens=st.sampled_from([90, 61, 38]),
        batch=st.integers(1, 3),
        alike=st.integers(1, 3),
    )
    def begin(
        self, kind: str, covered: bool, room: dict[str, int], recording: bool, tokens: int, batch: int, alike: int
    ) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(host_store, "SLAB_BYTES", 1024)
        self.allocations = Allocations()
        self.patch.setattr(pinned, "allocate", self.allocations)
        self.folder = Path(tempfile.mkdtemp())
        self.model, self.first, self.covered = model(kind, covered), first_layer(kind, covered), covered
        self.indexed = kind in ("deepseek", "glm")
        self.options = KINDS[kind][2]
        if covered and self.options:
            self.options = self.options | {"top_k": 2 * LONGEST}
        self.room, self.recording = room, recording and DEVICE.type == "cpu"
        self.seed = 0
        self.held = [self.empty()]
        self.take(self.held[0], self.draw(batch, tokens, alike))

    # ---- what there is -----------------------------------------------------------------------------------------------

    def empty(self, **options: Any) -> Held:
        cache = self.recorded(HierarchicalSparseCache(self.model, **self.options | self.room | options))
        nothing = torch.zeros(0, 0, dtype=torch.int64, device=DEVICE)
        return Held(cache, self.empty_twin(), nothing, nothing)

    def empty_twin(self) -> Any:
        if self.covered:
            return dense_cache(self.model)
        return HierarchicalSparseCache(self.model, **self.options, offload=False)

    def recorded(self, cache: HierarchicalSparseCache) -> HierarchicalSparseCache:
        """With steps that are recorded and run again, if they are to be."""
        if self.recording:
            cache.graphed = GraphedForward(Rerun(cache))
        return cache

    def pick(self, which: int) -> Held:
        return self.held[which % len(self.held)]

    def draw(self, batch: int, tokens: int, alike: int = 1) -> Tensor:
        """The last `alike` sequences are the same."""
        self.seed += 1
        ids = random_ids(batch, tokens, seed=self.seed)
        ids[-alike:] = ids[-1].clone()
        return ids

    def take(self, held: Held, ids: Tensor) -> None:
        """Both caches take new tokens, and say the same of them."""
        mask = torch.cat((held.mask, torch.ones_like(ids)), dim=1) if held.length else torch.ones_like(ids)
        logits = [forward(self.model, ids, cache, mask) for cache in (held.cache, held.twin)]
        seen = mask[:, -ids.shape[1] :].bool()
        found, expected = (each[seen] for each in logits)
        if self.covered:
            close(found, expected)
        else:
            assert same_bits(found, expected)
        held.ids, held.mask = torch.cat((held.ids, ids), dim=1) if held.length else ids, mask
        dense: Any = dense_cache(self.first)
        forward(self.first, held.ids, dense, mask)
        layer = dense.layers[0]
        new = [layer.keys.transpose(1, 2), layer.values.transpose(1, 2)]
        if self.indexed:
            # Before transformers 5.18 or so, not latents but every head's keys and values.
            new = [*(new if layer.keys.shape[1] == 1 else []), layer.indexer_keys]
        old = held.length - ids.shape[1]
        held.parts = (
            tuple(torch.cat((part, every[:, old:]), dim=1) for part, every in zip(held.parts, new, strict=True))
            if held.parts
            else tuple(new)
        )

    # ---- what is done ------------------------------------------------------------------------------------------------

    def take_steps(self, held: Held, count: int) -> None:
        for _ in range(min(count, LONGEST - held.length)):
            self.take(held, self.draw(held.batch or 1, 1))

    @rule(which=which, count=st.integers(1, 6))
    def decode(self, which: int, count: int) -> None:
        self.take_steps(self.pick(which), count)

    @rule(which=which, tokens=st.integers(2, 60), batch=st.integers(1, 3), alike=st.integers(1, WIDEST), then=then)
    def prompt(self, which: int, tokens: int, batch: int, alike: int, then: int) -> None:
        """Also one that goes on: a chunk, a turn, a draft to verify."""
        held = self.pick(which)
        tokens = min(tokens, LONGEST - held.length)
        if tokens:
            self.take(held, self.draw(held.batch or batch, tokens, alike))
            self.take_steps(held, then)

    @rule(which=which, remove=st.one_of(st.integers(0, 9), st.integers(0, LONGEST)), later=st.booleans(), then=then)
    def crop(self, which: int, remove: int, later: bool, then: int) -> None:
        held = self.pick(which)
        # What is left has a token that is no padding.
        remove = remove if held.length - remove > WIDEST else held.length
        crop = held.cache.crop_later if later else held.cache.crop
        crop(-remove)
        held.twin.crop(-remove)
        if held.length == remove:
            self.forget(held)
        else:
            held.keep(tokens=slice(held.length - remove))
        self.take_steps(held, then)

    @rule(which=which, method=st.sampled_from(["reorder", "select", "repeat"]), data=st.data(), then=then)
    def rearrange(self, which: int, method: str, data: st.DataObject, then: int) -> None:
        """The batch."""
        held = self.pick(which)
        if not held.length:
            return
        row = st.integers(0, held.batch - 1)
        if method == "repeat":
            repeats = data.draw(st.integers(1, WIDEST // held.batch))
            rows = [row for row in range(held.batch) for _ in range(repeats)]
        elif method == "select":
            rows = data.draw(st.lists(row, min_size=1, max_size=WIDEST))
        else:
            rows = data.draw(st.lists(row, min_size=held.batch, max_size=held.batch))
        index = torch.tensor(rows, device=DEVICE)
        for cache in (held.cache, held.twin):
            if method == "repeat":
                cache.batch_repeat_interleave(repeats)
            elif method == "select":
                cache.batch_select_indices(index)
            else:
                cache.reorder_cache(index)
        held.keep(rows=index)
        self.take_steps(held, then)

    @precondition(lambda self: len(self.held) < MOST)
    @rule(which=which, how=st.sampled_from([copy.deepcopy, HierarchicalSparseCache.fork]), then=then)
    def fork(self, which: int, how: Any, then: int) -> None:
        """And the one or the other goes on first."""
        held = self.pick(which)
        self.held.append(replace(held, cache=self.recorded(how(held.cache)), twin=copy.deepcopy(held.twin)))
        self.take_steps(held if then % 2 else self.held[-1], then)

    @rule(which=which, smaller=st.booleans(), room=st.booleans(), then=then)
    def save_and_load(self, which: int, smaller: bool, room: bool, then: int) -> None:
        """In place of the cache that was saved."""
        held = self.pick(which)
        path = self.folder / "cache"
        held.cache.save(path)
        options = (self.room if room else {}) | ({"buffer_size": 48} if smaller and not self.covered else {})
        held.cache = self.recorded(HierarchicalSparseCache.load(self.model, path, **options))
        self.take_steps(held, then)

    @rule(which=which, how=st.sampled_from(["reset", "drop", "another"]))
    def begin_anew(self, which: int, how: str) -> None:
        held = self.pick(which)
        if how == "reset":
            held.cache.reset()
            held.twin = self.empty_twin()
            self.forget(held)
        elif how == "drop" and len(self.held) > 1:
            self.held.remove(held)
        elif how == "another" and len(self.held) < MOST:
            self.held.append(self.empty())

    def forget(self, held: Held) -> None:
        held.ids = held.mask = torch.zeros(0, 0, dtype=torch.int64, device=DEVICE)
        held.parts = ()
        if self.covered:
            held.twin = self.empty_twin()

    @rule(
        which=which,
        tokens=st.one_of(st.just(1), st.integers(2, 50)),
        error=st.sampled_from([RuntimeError, KeyboardInterrupt]),
        layer=st.integers(0, 2),
        part=st.sampled_from(["input_layernorm", "self_attn", "mlp"]),
        then=then,
    )
    def fail(self, which: int, tokens: int, error: type[BaseException], layer: int, part: str, then: int) -> None:
        """Midway through a forward; or before it, where the batch has another size."""
        held = self.pick(which)
        ids = self.draw(held.batch or 2, min(tokens, LONGEST - held.length))
        if not ids.numel():
            return
        if held.length:
            with pytest.raises(ValueError, match=f"holds a batch of {held.batch}"):
                forward(self.model, self.draw(held.batch + 1, tokens), held.cache)
        mask = torch.cat((held.mask, torch.ones_like(ids)), dim=1) if held.length else torch.ones_like(ids)
        layers = self.model.model.layers

        def hook(*args: Any) -> None:
            raise error("on purpose")

        handle = getattr(layers[layer % len(layers)], part).register_forward_pre_hook(hook)
        try:
            # Transformers' own caches keep what a forward that fails has left.
            for cache in (held.cache, copy.deepcopy(held.twin) if self.covered else held.twin):
                with pytest.raises(error, match="on purpose"):
                    forward(self.model, ids, cache, mask)
        finally:
            handle.remove()
        self.take_steps(held, then)

    # ---- what holds --------------------------------------------------------------------------------------------------

    @invariant()
    def counts_are_those_of_the_tokens(self) -> None:
        for held in getattr(self, "held", ()):
            assert held.cache.get_seq_length() == held.twin.get_seq_length() == held.length
            for layer in held.cache.layers:
                if held.length and settled(held.cache):
                    assert (layer.coordinator.batch, layer.coordinator.length) == (held.batch, held.length)

    @invariant()
    def what_is_held_is_what_the_tokens_make(self) -> None:
        for held in getattr(self, "held", ()):
            if not held.length or not settled(held.cache):
                continue
            coordinator, seen = held.cache.layers[0].coordinator, held.mask.bool()
            found = [part.transpose(1, 2) for part in coordinator.history()]
            if self.indexed:
                found.append(coordinator.algorithm.representations["keys"][:, : held.length])
            for part, expected in zip(found[-len(held.parts) :], held.parts, strict=True):
                close(part[seen], expected[seen])

    @invariant()
    def what_selects_is_of_what_is_held(self) -> None:
        for held in getattr(self, "held", ()):
            for layer in held.cache.layers:
                coordinator = layer.coordinator
                if coordinator.memory is None or not settled(held.cache):
                    continue
                rows = coordinator.memory.rows
                assert coordinator.lengths.tolist() == [held.length] * rows
                if isinstance(coordinator.algorithm, Quest):
                    self.check_boxes(coordinator)
                if isinstance(coordinator.memory, HierarchicalMemory):
                    self.check_buffer(coordinator)

    @staticmethod
    def check_boxes(coordinator: SparseCoordinator) -> None:
        """Every page has the bounding box of the keys in it."""
        keys, size = coordinator.history()[0].flatten(0, 1), coordinator.algorithm.page_size
        for row in range(len(keys)):
            for page in range(-(-coordinator.length // size)):
                inside = keys[row, page * size : (page + 1) * size]
                for name, bound in (("low", inside.amin(0)), ("high", inside.amax(0))):
                    assert torch.equal(coordinator.algorithm.representations[name][row, page], bound)

    @staticmethod
    def check_buffer(coordinator: SparseCoordinator) -> None:
        """A slot and the item in it name each other, and the slot holds what the history does."""
        memory: Any = coordinator.memory
        state, size = memory.buffer, memory.layout.page_size
        parts = [part.flatten(0, 1) for part in coordinator.history()]
        whole = memory.layout.pack(parts)
        for row, items in enumerate(state.slot_item.tolist()):
            there = {item: slot for slot, item in enumerate(items) if item >= 0 and item * size < coordinator.length}
            assert len(there) == sum(item >= 0 and item * size < coordinator.length for item in items)
            mapped = slot_of(state.item_slot[row])
            for item, slot in there.items():
                assert int(mapped[item]) == slot
                tokens = min(size, coordinator.length - item * size)
                for view in (memory.layout.keys, memory.layout.values):
                    assert torch.equal(view(state.buffer[row, slot])[:tokens], view(whole[row, item])[:tokens])
            assert int((mapped[: len(whole[0])] >= 0).sum()) == len(there)

    def teardown(self) -> None:
        if hasattr(self, "held"):
            shutil.rmtree(self.folder)
            self.held.clear()
            if self.recording:
                # What stands for a graph here holds the cache that it is of.
                gc.collect()
            assert self.allocations.live == 0
            self.patch.undo()


TestCaches = Caches.TestCase
# Of the default, which is 100; the long profile has more.
TestCaches.settings = settings(max_examples=max(settings.default.max_examples * 2 // 5, 1), stateful_step_count=25)
