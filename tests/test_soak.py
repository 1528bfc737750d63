"""Nothing is kept that should go, however a call ends; and 200 calls leave what one leaves."""

from __future__ import annotations

import functools
import gc
import linecache
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hf_hisparse
from hf_hisparse import HierarchicalSparseCache
from hf_hisparse.memory import host_store, pinned
from tests.helpers import DEVICE, GQA, METHODS, forward, generate, logits_of, make_model, random_ids, same_bits
from tests.test_cache_api import steps
from tests.test_memory import Allocations


@pytest.fixture
def allocations(monkeypatch) -> Allocations:
    """Small slabs, and account of what they take."""
    monkeypatch.setattr(host_store, "SLAB_BYTES", 1024)
    made = Allocations()
    monkeypatch.setattr(pinned, "allocate", made)
    return made


def tensor_bytes() -> int:
    """Of all tensors that there are; on a GPU, of its memory."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize(DEVICE)
        return torch.cuda.memory_allocated(DEVICE)
    found = {}
    for value in gc.get_objects():
        if type(value) in (Tensor, torch.nn.Parameter) and value.device.type == "cpu":
            storage = value.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@pytest.mark.parametrize("room", [{}, {"max_cache_len": 140}], ids=["grows", "room"])
def test_two_hundred_calls(allocations, room):
    """Of one model, over a cache that is used again and over fresh ones, in batches and lengths of every kind."""
    model: Any = make_model("llama")
    chance = random.Random(0)
    kept = HierarchicalSparseCache(model, **GQA, **room)
    held: list[int] = []
    for call in range(50):
        batch, tokens, new = chance.randint(1, 3), chance.randint(3, 120), chance.randint(1, 6)
        ids = random_ids(batch, tokens, seed=call)
        kept.reset()
        fresh = HierarchicalSparseCache(model, **GQA, **room)
        found, expected = (logits_of(generate(model, ids, cache, new)) for cache in (kept, fresh))
        assert same_bits(found, expected)
        assert allocations.live == kept.stats().host_bytes + fresh.stats().host_bytes
        del fresh, found, expected
        assert allocations.live == kept.stats().host_bytes
        if call in (19, 34, 49):
            # Another batch needs other memory, which has grown with nothing before.
            for batch in (1, 2):
                kept.reset()
                generate(model, random_ids(batch, 100), kept, 3)
            held.append(tensor_bytes())
    # A cache of this model and length holds 40 times as much.
    assert max(held) - min(held) < 2048, held
    del kept
    assert allocations.live == 0


# ---- calls that end in an error --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["llama-rabitq", "deepseek"])
def test_an_error_in_any_module(allocations, method):
    """Of a prompt, a chunk and a step: nothing is held that was not, and the history is as it was."""
    name, options = METHODS[method]
    model: Any = make_model(name, num_hidden_layers=2)
    ids, more = random_ids(2, 60), random_ids(2, 3, seed=1)

    def fail(*args: Any) -> None:
        raise error("on purpose")

    expected = None
    for module in (model, *model.model.modules()):
        for tokens, error in ((60, RuntimeError), (60, KeyboardInterrupt), (1, RuntimeError), (1, KeyboardInterrupt)):
            cache = HierarchicalSparseCache(model, **options)
            if tokens == 1:
                forward(model, ids, cache)
            handle = module.register_forward_pre_hook(fail)
            try:
                forward(model, ids[:, :tokens], cache)
            except error:
                pass
            else:
                # It is no part of such a forward.
                cache.crop(-tokens)
            handle.remove()
            assert cache.get_seq_length() == (60 if tokens == 1 else 0)
            assert allocations.live == cache.stats().host_bytes
            del cache
            assert allocations.live == 0
        cache = HierarchicalSparseCache(model, **options)
        logits = torch.cat((forward(model, ids, cache), steps(model, more, cache)), dim=1)
        expected = logits if expected is None else expected
        assert same_bits(logits, expected)


class Interrupt:
    """Raises at the n-th line of this package that is run within it, or lists all of them."""

    package = str(Path(hf_hisparse.__file__).parent)

    def __init__(self, at: int | None = None):
        self.at, self.lines = at, list[tuple[str, int]]()

    def __enter__(self) -> Interrupt:
        self.held = sys.gettrace()
        sys.settrace(self.enter)
        return self

    def __exit__(self, *args: Any) -> None:
        sys.settrace(self.held)

    def enter(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(self.package):
            return None
        # What is raised as something goes, Python prints and drops.
        caller: FrameType | None = frame
        while caller is not None and caller.f_code.co_name != "__del__":
            caller = caller.f_back
        return self.line if caller is None else None

    def line(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        where = frame.f_code.co_filename, frame.f_lineno
        # A trace sees `with` again when its block ends, before it is left; a signal is handled before that, or after.
        if event == "line" and not linecache.getline(*where).lstrip().startswith("with "):
            self.lines.append(where)
            if len(self.lines) - 1 == self.at:
                raise KeyboardInterrupt
        return self.line


CHANGES: dict[str, tuple[int, Callable[[Any, HierarchicalSparseCache], Any]]] = {
    "prompt": (0, lambda model, cache: forward(model, random_ids(2, 60, seed=5), cache)),
    "chunk": (60, lambda model, cache: forward(model, random_ids(2, 9, seed=5), cache)),
    "step": (60, lambda model, cache: forward(model, random_ids(2, 1, seed=5), cache)),
    "outgrows": (39, lambda model, cache: forward(model, random_ids(2, 2, seed=5), cache)),
    "crop": (60, lambda model, cache: cache.crop(-7)),
    "crop to a dense history": (60, lambda model, cache: cache.crop(-33)),
    "crop later": (60, lambda model, cache: (cache.crop_later(-7), cache.crop(0))),
    "reorder": (60, lambda model, cache: cache.reorder_cache(torch.tensor([1, 0], device=DEVICE))),
    "reset": (60, lambda model, cache: cache.reset()),
}
"""How long a history is, and what is then done."""
INTERRUPTED = {
    "llama-quest": ("llama", METHODS["llama-quest"][1]),
    "deepseek": ("deepseek_v32", {}),
    "gemma3": ("gemma3_text", GQA),
}


@functools.cache
def shallow(name: str) -> Any:
    return make_model(name, num_hidden_layers=2)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", INTERRUPTED)
def test_an_interrupt_at_any_line(allocations, kind, change):
    """The history is as it was, or as it would have been, or the cache says that it is lost; and then it can be reset.
    Never is it something else."""
    name, options = INTERRUPTED[kind]
    model, (before, apply) = shallow(name), CHANGES[change]
    ids, more = random_ids(2, 60), random_ids(2, 3, seed=1)

    def begin() -> HierarchicalSparseCache:
        cache = HierarchicalSparseCache(model, **options)
        if before:
            forward(model, ids[:, :before], cache)
        return cache

    def after(cache: HierarchicalSparseCache) -> Tensor:
        return steps(model, more, cache)

    if "crop" in change and kind == "gemma3":
        pytest.skip("transformers' own windows do not crop once they slide")
    # What is done at first use alone, such as choosing the shape of a launch, is done no more.
    after(begin())
    apply(model, begin())
    cache = begin()
    with Interrupt() as seen:
        apply(model, cache)
    changed, length = after(cache), cache.get_seq_length() - 3
    unchanged = after(begin())
    first: dict[tuple[str, int], int] = {}
    for at, line in enumerate(seen.lines):
        first.setdefault(line, at)
    last = {line: at for at, line in enumerate(seen.lines)}

    @settings(max_examples=max(settings.default.max_examples // 12, 1))
    @given(st.sampled_from(sorted({*first.values(), *last.values()})))
    def interrupt(at: int) -> None:
        cache = begin()
        with pytest.raises(KeyboardInterrupt), Interrupt(at):
            apply(model, cache)
        try:
            reached = cache.get_seq_length()
            logits = after(cache)
        except ValueError as error:
            assert "call `cache.reset()`" in str(error) and change not in ("prompt", "chunk", "step", "outgrows")
            cache.reset()
            forward(model, ids[:, :before], cache)
            reached, logits = before, after(cache)
        if reached == before and same_bits(logits, unchanged):
            return
        assert reached == length and same_bits(logits, changed), seen.lines[at]

    interrupt()
