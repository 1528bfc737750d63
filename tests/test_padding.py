"""Padding anywhere in a batch: every sequence is kept, selected from and attended to as if it were alone."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from hf_hisparse.algorithms import Quest
from hf_hisparse.backends import ReferenceBackend
from hf_hisparse.coordinator import SparseCoordinator
from hf_hisparse.late_check import LateCheck
from hf_hisparse.layout import ItemLayout
from hf_hisparse.memory import host_store
from hf_hisparse.padding import Padding, seen_by_newest, take
from tests.helpers import DEVICE, same_bits


masks = st.integers(1, 4).flatmap(
    lambda batch: st.integers(0, 9).flatmap(
        lambda columns: st.lists(
            st.lists(st.booleans(), min_size=columns, max_size=columns), min_size=batch, max_size=batch
        )
    )
)


def tensor(rows: list[list[bool]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.bool, device=DEVICE).view(len(rows), -1)


@settings(max_examples=150)
@given(masks, st.integers(0, 12), st.data())
def test_padding_against_lists(rows, columns, data):
    padding = Padding(tensor(rows))
    assert bool(padding) == any(not kept for row in rows for kept in row)
    rows = [row + [True] * 12 for row in rows]
    held = [[column for column in range(columns) if row[column]] for row in rows]
    assert padding.first(columns).tolist() == [row[:columns] for row in rows]
    assert padding.lengths(columns).tolist() == [len(tokens) for tokens in held]
    for row, (tokens, order, positions) in enumerate(
        zip(held, padding.columns(columns).tolist(), padding.positions(columns).tolist(), strict=True)
    ):
        assert order[: len(tokens)] == tokens and sorted(order) == list(range(columns))
        assert all(positions[column] == position for position, column in enumerate(tokens))
        assert all(0 <= position < max(len(tokens), 1) for position in positions)
        assert padding.counts[row] == sum(not kept for kept in rows[row])
    assert padding.most == max(padding.counts)
    cut = padding.cut(columns)
    assert cut.first(20).tolist() == [row[:columns] + [True] * (20 - columns) for row in rows]
    assert cut.counts == [columns - len(tokens) for tokens in held]
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=5))
    chosen = padding.select(torch.tensor(index, device=DEVICE), index)
    assert chosen.first(12).tolist() == [rows[row][:12] for row in index]
    assert chosen.counts == [padding.counts[row] for row in index]
    more = data.draw(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=len(rows), max_size=len(rows)))
    longer = padding.extended(12, Padding(tensor(more)))
    expected = [row[:12] + new for row, new in zip(rows, more, strict=True)]
    assert longer.first(15).tolist() == expected
    assert longer.counts == [sum(not kept for kept in row) for row in expected]
    seen = tensor(expected)
    assert longer.matches(seen)
    row, column = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(0, 14))
    seen[row, column] = ~seen[row, column]
    assert not longer.matches(seen)


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32, "bool of every query", "additive"])
def test_what_the_newest_query_sees(kind):
    expected = tensor([[True, False, True, True], [False, True, True, True]])
    if isinstance(kind, torch.dtype):
        mask = expected.to(kind)
    else:
        mask = (expected.unsqueeze(1) & torch.ones(4, 4, dtype=torch.bool, device=DEVICE).tril()).unsqueeze(1)
        if kind == "additive":
            mask = torch.zeros(mask.shape, device=DEVICE).masked_fill(~mask, torch.finfo(torch.float32).min)
    for columns in (4, 3, 0):
        assert torch.equal(seen_by_newest(mask, columns), expected[:, :columns])


def test_a_mask_of_one_column_shows_them_all():
    mask = tensor([[True], [False]]).view(2, 1, 1, 1)
    assert seen_by_newest(mask, 3).tolist() == [[True] * 3, [False] * 3]


def test_tokens_of_any_dimension_are_taken():
    index = torch.tensor([[2, 0], [1, 1]], device=DEVICE)
    for shape, dim in (((2, 3), 1), ((2, 3, 5), 1), ((2, 4, 3, 5), 2), ((2, 3, 4, 5), 1)):
        part = torch.rand(*shape, device=DEVICE)
        expected = torch.stack([row.index_select(dim - 1, at) for row, at in zip(part, index, strict=True)])
        assert torch.equal(take(part, index, dim), expected)


def told(check: LateCheck, true: Tensor) -> bool:
    """Whether it has heard of a failure when the next truth is asked for."""
    check.next = lambda: true
    failed = check.failed()
    check.ask()
    return failed


@pytest.mark.gpu
def test_a_late_check_hears_of_a_failure_without_waiting():
    check = LateCheck()
    true, false = torch.tensor([True, False], device="cuda")
    assert not any(told(check, true) for _ in range(5))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        heard = [told(check, each) for each in (true, false, true)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(2):
        torch.cuda.synchronize()
        heard.append(told(check, true))
    assert sum(heard) == 1
    torch.cuda.synchronize()
    assert not check.failed()


@pytest.mark.gpu
def test_a_late_check_that_is_waited_for_tells_what_was_not_told():
    check = LateCheck()
    true, false = torch.tensor([True, False], device="cuda")
    assert not check.settle()
    for truths in ([true], [false], [true, false, true], [false] * 5, [true] * 5):
        torch.cuda._sleep(1_000_000)
        heard = sum(told(check, each) for each in truths)
        settled = check.settle()
        # Each is told at the latest then, and nothing twice.
        assert (heard > 0 or settled) == any(each is false for each in truths)
        assert heard <= sum(each is false for each in truths)
        assert not check.settle() and not told(check, true)
        torch.cuda.synchronize()
        assert not check.failed() and not check.settle()


def test_a_late_check_of_which_nothing_was_asked():
    check = LateCheck()
    check.ask()
    assert not check.failed() and not check.settle()


# ---- a batch against its sequences -----------------------------------------------------------------------------------


class Batch(RuleBasedStateMachine):
    """A coordinator with a padded batch, and for every sequence one that has it alone.

    Whatever is done to the batch, what a step selects and attends to is bit for bit what it is alone.
    """

    top_k, k, group = 6, 3, 2

    @initialize(
        batch=st.integers(1, 3),
        heads=st.sampled_from([1, 2]),
        page_size=st.sampled_from([1, 2]),
        offload=st.booleans(),
        capacity=st.sampled_from([None, 60]),
    )
    def begin(self, batch: int, heads: int, page_size: int, offload: bool, capacity: int | None) -> None:
        self.patch = pytest.MonkeyPatch()
        # A page a slab: histories share slabs that begin to differ at once.
        self.patch.setattr(host_store, "SLAB_BYTES", 64)
        self.generator = torch.Generator().manual_seed(0)
        self.heads, self.batch, self.length = heads, batch, 0
        self.make = lambda: self.coordinator(page_size, 4 if offload else None, capacity)
        self.together = self.make()
        self.alone = [self.make() for _ in range(batch)]
        self.mask = torch.ones(batch, 0, dtype=torch.bool, device=DEVICE)

    def coordinator(self, page_size: int, slots: int | None, capacity: int | None) -> SparseCoordinator:
        layout, method = partial(ItemLayout.page_head, page_size), partial(Quest, page_size, 1, 1)
        backend = ReferenceBackend()
        # A row at a time: how many there are in a product may choose the order of its sums.
        backend.block = 1
        return SparseCoordinator(self.top_k, self.k, slots, layout, method, backend, capacity)

    def teardown(self) -> None:
        self.patch.undo()

    def parts(self, tokens: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(self.batch, self.heads, tokens, 4, generator=self.generator).to(DEVICE) for _ in "kv")

    def add(self, seen: Tensor, alike: Any = slice(None)) -> tuple[tuple[Tensor, ...], list[Any]]:
        """New tokens as the batch has them, and as each sequence does: those of the sequences `alike`."""
        parts = tuple(part[alike] for part in self.parts(seen.shape[1]))
        self.mask = torch.cat((self.mask, seen), dim=1)
        self.length += seen.shape[1]
        return parts, [tuple(part[row : row + 1][:, :, at] for part in parts) for row, at in enumerate(seen)]

    @precondition(lambda self: self.length < 40)
    @rule(data=st.data(), tokens=st.integers(2, 11))
    def prompt(self, data: Any, tokens: int) -> None:
        rows = [data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)) for _ in range(self.batch)]
        # Sequences that are the same so far share what they hold, and others never do.
        alike = data.draw(st.lists(st.integers(0, self.batch - 1), min_size=self.batch, max_size=self.batch))
        parts, own = self.add(tensor([rows[row] for row in alike]), alike)
        self.together.extend(parts, self.mask)
        for coordinator, some in zip(self.alone, own, strict=True):
            if some[0].shape[2]:
                coordinator.extend(some, None)

    @precondition(lambda self: self.length >= self.top_k)
    @rule()
    def step(self) -> None:
        parts, own = self.add(torch.ones(self.batch, 1, dtype=torch.bool, device=DEVICE))
        self.together.append(parts, self.mask)
        query = torch.randn(self.batch, self.heads, self.group, 4, generator=self.generator).to(DEVICE)
        selection = self.together.retrieve(query.flatten(0, 1), 0.5)
        output = self.together.attend(query.flatten(0, 1), selection, 0.5).unflatten(0, (self.batch, self.heads))
        for row, (coordinator, some) in enumerate(zip(self.alone, own, strict=True)):
            if coordinator.memory is None and coordinator.length < self.top_k:
                # What is short is dense when it is alone: all of it is attended to.
                coordinator.extend(some, None)
                keys, values = coordinator.history()
                if coordinator.length <= self.k * self.together.memory.layout.page_size - 1:
                    weights = (query[row : row + 1] @ keys.transpose(2, 3) * 0.5).softmax(-1)
                    torch.testing.assert_close(output[row : row + 1], weights @ values)
                continue
            coordinator.append(some, None)
            chosen = coordinator.retrieve(query[row], 0.5)
            mine = selection.view(self.batch, self.heads, -1)[row]
            width = min(chosen.shape[1], mine.shape[1])
            assert torch.equal(chosen[:, :width], mine[:, :width])
            assert (chosen[:, width:] < 0).all() and (mine[:, width:] < 0).all()
            assert same_bits(coordinator.attend(query[row], chosen, 0.5), output[row])

    @precondition(lambda self: self.length)
    @rule(remove=st.integers(0, 8))
    def crop(self, remove: int) -> None:
        remove = min(remove, self.length)
        gone = self.mask[:, self.length - remove :].sum(1).tolist()
        self.together.prepare_crop(remove)
        self.together.crop(remove)
        for coordinator, count in zip(self.alone, gone, strict=True):
            coordinator.prepare_crop(count)
            coordinator.crop(count)
        self.length -= remove
        self.mask = self.mask[:, : self.length]

    @rule(data=st.data(), count=st.integers(1, 4))
    def select(self, data: Any, count: int) -> None:
        index = [data.draw(st.integers(0, self.batch - 1)) for _ in range(count)]
        if self.length:
            self.together.prepare_batch(count)
            self.together.select_batch(torch.tensor(index, device=DEVICE))
        self.alone = [copy.deepcopy(self.alone[row]) for row in index]
        self.mask, self.batch = self.mask[index], count

    @rule()
    def fork(self) -> None:
        """Goes on with the copy, while the one that it shares with changes."""
        other, self.together = self.together, self.together.fork()
        if other.memory is not None:
            for _ in range(3):
                other.append(self.parts(1), None)

    @rule()
    def save_and_load(self) -> None:
        tensors, facts = self.together.state()
        loaded = self.make()
        held = {}
        for name, pieces in tensors.items():
            flat = [piece.reshape(-1) for piece in pieces.pieces]
            whole = torch.cat(flat) if flat else torch.empty(0)
            held[name] = whole.to(pieces.dtype).view(pieces.shape)
        loaded.load(held, facts, DEVICE)
        self.together = loaded

    @invariant()
    def holds_the_tokens_of_each(self) -> None:
        if not self.length or not hasattr(self, "together"):
            return
        assert self.together.length == self.length
        for row, coordinator in enumerate(self.alone):
            at = self.mask[row]
            assert coordinator.length == int(at.sum())
            for all_of_it, own in zip(self.together.history(), coordinator.history(), strict=False):
                assert torch.equal(all_of_it[row][:, at], own[0])


TestBatch = Batch.TestCase
TestBatch.settings = settings(max_examples=60, stateful_step_count=25)
