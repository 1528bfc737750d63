"""Steps that `generate` begins before it knows that they are needed.

On the CPU, where PyTorch has no events, steps are recorded and run again by `Rerun`, and an event is over at once.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import utils
from transformers.generation.streamers import BaseStreamer

from hf_hisparse import HierarchicalSparseCache, deferred_stop, unpatch_model
from hf_hisparse.memory import host_store
from tests import helpers
from tests.helpers import GQA, METHODS, dense_cache, forward, random_ids, same_bits
from tests.test_graph import graphed, model_of


pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
gpu = pytest.mark.gpu
PROMPT, NEW, PAD = 90, 60, 0
ENDS = list(range(3, 6))
"""One token in forty or so ends a sequence."""


class Event:
    def __init__(self, **kwargs: Any):
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture(scope="module")
def tiny() -> Callable[[str], Any]:
    """`model_of`, once a name. Leave it as it was."""
    return functools.cache(model_of)


@pytest.fixture(params=METHODS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def new_cache(monkeypatch) -> Callable[..., Any]:
    """Makes caches that run ahead."""
    if helpers.DEVICE.type == "cpu":
        monkeypatch.setattr(deferred_stop, "runs_ahead", lambda cache, device: deferred_stop.hears(cache))
        monkeypatch.setattr(torch, "Event", Event)
        return lambda model, options, longest=300: graphed(model, options, longest)
    return lambda model, options, longest=300: HierarchicalSparseCache(model, **options, max_cache_len=longest)


def waiting(model: nn.Module, options: dict[str, Any]) -> Any:
    """A cache that does not."""
    return HierarchicalSparseCache(model, **options, cuda_graph=False)


on_cuda = deferred_stop.runs_ahead
"""As it is where no test stands in for it."""


class Count(LogitsProcessor):
    """Counts forwards."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.count += 1
        return scores


class Heard(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        assert not self.ended
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def say(model: Any, ids: Tensor, cache: Any, seed: int = 0, **kwargs: Any) -> tuple[Any, int]:
    """Samples until a token of `ENDS` or `NEW` tokens. Returns what `generate` does, and the forwards that it took."""
    torch.manual_seed(seed)
    count, forwards, run = Count(), Count(), getattr(cache, "run_forward", None)
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": NEW,
        "do_sample": True,
        "top_k": 0,
        "eos_token_id": ENDS,
        "pad_token_id": PAD,
        "return_dict_in_generate": True,
        "output_logits": True,
        "logits_processor": LogitsProcessorList([count]),
    }

    def counted(*args: Any) -> Any:
        forwards.count += 1
        return run(*args)

    if run is None:
        output = model.generate(ids, past_key_values=cache, **(options | kwargs))
        return output, count.count
    cache.run_forward = counted
    try:
        output = model.generate(ids, past_key_values=cache, **(options | kwargs))
    finally:
        del cache.run_forward
    # Nobody is asked of a step too many.
    assert "logits_processor" in kwargs or count.count == output.sequences.shape[1] - ids.shape[1]
    return output, forwards.count


def random_state() -> Tensor:
    """The next numbers of the generator that sampling draws from."""
    return torch.rand(4, device=helpers.DEVICE)


def the_same(one: Any, two: Any) -> None:
    assert torch.equal(one.sequences, two.sequences)
    assert len(one.logits) == len(two.logits) == one.sequences.shape[1] - PROMPT
    assert all(same_bits(a, b) for a, b in zip(one.logits, two.logits, strict=True))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_too_many_leaves_no_trace(tiny, kind, batch, new_cache):
    """Not in what is returned, in the cache, in what goes on from it, or in the random numbers that are drawn next."""
    name, options = METHODS[kind]
    model, ids, early = tiny(name), random_ids(batch, PROMPT), 0
    for seed in range(6):
        ahead, behind = new_cache(model, options), waiting(model, options)
        found, forwards = say(model, ids, ahead, seed)
        drawn = random_state()
        expected, needed = say(model, ids, behind, seed)
        the_same(found, expected)
        assert torch.equal(drawn, random_state())
        # The first step is not replayed yet; on a GPU the second may not be either.
        ended = found.sequences.shape[1] < PROMPT + NEW and ahead.graphed.replayed > 0
        assert forwards == needed + ended
        early += ended
        assert ahead.get_seq_length() == behind.get_seq_length() == found.sequences.shape[1] - 1
        for t in range(4):
            token = random_ids(batch, 1, seed=50 + t)
            assert same_bits(forward(model, token, ahead), forward(model, token, behind))
        turn = random_ids(batch, 9, seed=60)
        assert same_bits(forward(model, turn, ahead), forward(model, turn, behind))
    assert early > 0


def test_a_conversation_goes_on(tiny, kind, new_cache):
    name, options = METHODS[kind]
    model = tiny(name)
    caches = [new_cache(model, options, None), waiting(model, options)]
    texts = [random_ids(1, PROMPT)] * 2
    for turn in range(4):
        outputs = [say(model, text, cache, turn)[0] for text, cache in zip(texts, caches, strict=True)]
        assert torch.equal(outputs[0].sequences, outputs[1].sequences)
        texts = [torch.cat((output.sequences, random_ids(1, 20, seed=turn)), dim=1) for output in outputs]
        caches = [copy.deepcopy(cache) for cache in caches] if turn == 2 and helpers.DEVICE.type != "cpu" else caches


def test_the_state_before_is_what_a_step_begins_with(tiny, new_cache):
    """New tokens are no drafts after it: several at once attend densely, as ever."""
    model = tiny("llama")
    cache = new_cache(model, GQA)
    say(model, random_ids(1, PROMPT), cache)
    assert not cache._drafting


def test_streamers_hear_every_token_once(tiny, new_cache):
    model, ids = tiny("llama"), random_ids(1, PROMPT)
    lengths = set()
    for seed in range(6):
        heard = Heard()
        output, _ = say(model, ids, new_cache(model, GQA), seed, streamer=heard)
        assert heard.ended and heard.tokens == output.sequences[0].tolist()
        lengths.add(output.sequences.shape[1])
    assert len(lengths) > 1 and max(lengths) == PROMPT + NEW


def test_no_step_is_taken_in_vain_that_might_be_refused(tiny, kind, new_cache):
    """The last token that there is room for ends a sequence: the step after it would be an error."""
    name, options = METHODS[kind]
    model, ids = tiny(name), random_ids(1, PROMPT)
    for seed in range(20):
        expected, needed = say(model, ids, waiting(model, options), seed)
        if PROMPT + 4 < expected.sequences.shape[1] < PROMPT + NEW:
            break
    length = expected.sequences.shape[1] - 1
    cache = new_cache(model, options, length)
    found, forwards = say(model, ids, cache, seed)
    the_same(found, expected)
    assert forwards == needed and cache.get_seq_length() == length
    # With room for one more there is such a step.
    found, forwards = say(model, ids, new_cache(model, options, length + 1), seed)
    the_same(found, expected)
    assert forwards == needed + 1


class Full(Count):
    """Notes which tokens come when a cache has no room for one more."""

    def __init__(self, cache: Any):
        super().__init__()
        self.cache, self.at = cache, []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.count and not self.cache.has_room(1):
            self.at.append(self.count)
        return super().__call__(input_ids, scores)


def test_no_memory_is_had_in_vain(tiny, new_cache, monkeypatch):
    """Where a step needs more, it is known first whether there is to be one."""
    monkeypatch.setattr(host_store, "SLAB_BYTES", 4096)
    monkeypatch.setattr(host_store, "GROWTH_BYTES", 4096)
    model, ids, tried = tiny("llama"), random_ids(1, PROMPT), 0
    for seed in range(4):
        behind = waiting(model, GQA)
        full = Full(behind)
        expected, _ = say(model, ids, behind, seed, eos_token_id=[], logits_processor=LogitsProcessorList([full]))
        tokens = expected.sequences[0, PROMPT:].tolist()
        for last in [at for at in full.at if at > 1 and tokens[at] not in tokens[:at]]:
            ahead = new_cache(model, GQA, None)
            found, forwards = say(model, ids, ahead, seed, eos_token_id=[tokens[last]])
            assert found.sequences[0, PROMPT:].tolist() == tokens[: last + 1]
            assert forwards == last + 1 and not ahead.has_room(1)
            tried += 1
    assert tried > 0


def test_no_step_that_runs_eagerly_is_taken_in_vain(tiny, new_cache):
    """Such as where weights are offloaded, and a step takes as long as it takes to fetch them."""
    model, early = tiny("llama"), 0
    for seed in range(6):
        ids = random_ids(1, PROMPT, seed=seed)
        cache = new_cache(model, GQA)
        found, forwards = say(model, ids, cache, seed, output_hidden_states=True)
        expected, needed = say(model, ids, waiting(model, GQA), seed)
        the_same(found, expected)
        assert cache.graphed.replayed == 0 and forwards == needed
        early += found.sequences.shape[1] < PROMPT + NEW
    assert early > 0


def test_other_caches_are_left_to_transformers(tiny, new_cache):
    model, ids = tiny("llama"), random_ids(1, PROMPT)
    new_cache(model, GQA)
    made: list[Any] = []
    check = utils.StopCheck.__init__

    def noted(self: Any, *args: Any) -> None:
        made.append(type(self))
        check(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils.StopCheck, "__init__", noted)
        for cache in (dense_cache(model), waiting(model, GQA), new_cache(model, GQA)):
            say(model, ids, cache)
        with new_cache(model, GQA).record_trace():
            pass
        recorded = new_cache(model, GQA)
        with recorded.record_trace():
            say(model, ids, recorded)
    assert made == [utils.StopCheck, utils.StopCheck, deferred_stop.DeferredStopCheck, utils.StopCheck]
    for cache in (dense_cache(model), HierarchicalSparseCache(model, **GQA)):
        for device in ("cpu", "mps", "xpu"):
            asked = torch.device(device), cache, True, False
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(deferred_stop, "runs_ahead", on_cuda)
                assert utils.DeferredStopCheck.is_supported(*asked) == deferred_stop._Check.is_supported(*asked)


def test_where_transformers_defers_it_is_its_own_check(tiny, monkeypatch):
    """For any other cache: whatever it is asked, it says and does the same."""
    model, ids = tiny("llama"), random_ids(2, PROMPT)
    if helpers.DEVICE.type == "cpu":
        monkeypatch.setattr(torch, "Event", Event)
    waiting(model, GQA)
    for cls in (deferred_stop._Check, utils.DeferredStopCheck):
        monkeypatch.setattr(cls, "is_supported", staticmethod(lambda *args, **kwargs: True))
    found = []
    for cls in (deferred_stop._Check, deferred_stop.DeferredStopCheck):
        monkeypatch.setattr(utils, "DeferredStopCheck", cls)
        for seed in range(4):
            cache, heard = dense_cache(model), Heard()
            output, forwards = say(model, ids, cache, seed, streamer=heard)
            held, drawn = cache.get_seq_length(), random_state().tolist()
            found.append((output.sequences.tolist(), forwards, heard.tokens, held, drawn))
    assert found[:4] == found[4:]


# Some transformers have an unpatched model with latents keep something else.
@pytest.mark.parametrize("kind", ["llama-quest", "llama-rabitq"])
def test_a_model_that_is_patched_no_longer_finds_no_trace(kind, new_cache):
    name, options = METHODS[kind]
    model, early = model_of(name), 0
    for seed in range(6):
        caches = new_cache(model, options), waiting(model, options)
        lengths = [say(model, random_ids(1, PROMPT), cache, seed)[0].sequences.shape[1] for cache in caches]
        early += lengths[0] < PROMPT + NEW
        unpatch_model(model)
        assert caches[0].get_mask_sizes(5, 0) == caches[1].get_mask_sizes(5, 0)
        for turn in (5, 1):
            assert same_bits(*(forward(model, random_ids(1, turn, seed=60), cache) for cache in caches))
        assert caches[0].get_seq_length() == caches[1].get_seq_length() == lengths[0] + 5
    assert early > 0


class Raising(Heard):
    """Ends a generation that it has heard enough of."""

    def __init__(self, at: int):
        super().__init__()
        self.at = PROMPT + at

    def put(self, value: Tensor) -> None:
        super().put(value)
        if len(self.tokens) > self.at:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("longest", "top_k"), [(300, 40), (None, 40), (None, PROMPT + 5)])
@pytest.mark.parametrize("at", [0, 5, 30, NEW - 1])
def test_a_streamer_that_raises(tiny, new_cache, monkeypatch, at, longest, top_k):
    """The step that has begun meanwhile is undone: the last token that was heard is not in the cache yet, as ever."""
    monkeypatch.setattr(host_store, "SLAB_BYTES", 1024)
    monkeypatch.setattr(host_store, "GROWTH_BYTES", 1024)
    model, ids, options = tiny("llama"), random_ids(1, PROMPT), GQA | {"top_k": top_k}
    found = []
    caches = new_cache(model, options, longest), waiting(model, options)
    for cache in caches:
        streamer = Raising(at)
        with pytest.raises(KeyboardInterrupt):
            say(model, ids, cache, eos_token_id=[], streamer=streamer)
        drawn = random_state().tolist()
        assert cache.get_seq_length() == len(streamer.tokens) - 1 == PROMPT + at
        more, _ = say(model, torch.tensor([streamer.tokens], device=ids.device), cache, seed=1)
        found.append((streamer.tokens, drawn, more.sequences.tolist()))
    assert found[0] == found[1]
    turn = random_ids(1, 9, seed=60)
    assert same_bits(*(forward(model, turn, cache) for cache in caches))


@pytest.mark.parametrize("limit", ["max_cache_len", "max_position_embeddings"])
@pytest.mark.parametrize("room", [0, 1, 4, 20])
def test_streamers_hear_the_last_token_before_a_step_that_is_refused(tiny, new_cache, room, limit):
    model, ids, found = tiny("llama"), random_ids(1, PROMPT), []
    longest = PROMPT + room if limit == "max_cache_len" else 300
    caches = (
        new_cache(model, GQA, longest),
        HierarchicalSparseCache(model, **GQA, max_cache_len=longest, cuda_graph=False),
    )
    for cache in caches:
        if limit != "max_cache_len":
            cache._max_length = PROMPT + room
        heard = Heard()
        with pytest.raises(ValueError, match=limit):
            say(model, ids, cache, eos_token_id=[], streamer=heard)
        found.append((heard.tokens, cache.get_seq_length()))
    assert found[0] == found[1] and len(found[0][0]) == PROMPT + room + 1


@pytest.mark.parametrize("ends", [True, False])
def test_an_error_of_a_step_too_many_is_none(tiny, new_cache, ends):
    """And one of a step that is needed is raised, when the streamer has heard of the token before."""
    model, ids = tiny("llama"), random_ids(1, PROMPT)
    for seed in range(20):
        expected, _ = say(model, ids, waiting(model, GQA), seed)
        if PROMPT + 4 < expected.sequences.shape[1] < PROMPT + NEW:
            break
    tokens = expected.sequences[0].tolist()
    cache, heard = new_cache(model, GQA, len(tokens) - 1), Heard()
    cache.has_room = lambda tokens: True  # It goes on past the longest history.
    if ends:
        the_same(say(model, ids, cache, seed, streamer=heard)[0], expected)
    else:
        with pytest.raises(ValueError, match="max_cache_len"):
            say(model, ids, cache, seed, streamer=heard, eos_token_id=[])
    assert heard.tokens == tokens and cache.get_seq_length() == len(tokens) - 1


class Asking(LogitsProcessor):
    """Has another text written before every token."""

    def __init__(self, write: Callable[[int], Any]):
        self.write, self.texts = write, list[Any]()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        drawn = torch.get_rng_state()
        if len(self.texts) < 12:
            self.texts.append(self.write(len(self.texts)).sequences.tolist())
        torch.set_rng_state(drawn)
        return scores


@pytest.mark.cpu
def test_a_loop_within_a_loop(tiny, new_cache):
    """Neither keeps the other from running ahead."""
    model, ids = tiny("llama"), random_ids(1, PROMPT)
    length, seed = next(
        (length, seed)
        for seed in range(40)
        if 15 < (length := say(model, ids, waiting(model, GQA), seed)[0].sequences.shape[1] - PROMPT) < NEW
    )
    found, taken = [], []
    for make in (functools.partial(new_cache, model, GQA), functools.partial(waiting, model, GQA)):

        def write(number: int, make: Callable[[], Any] = make) -> Any:
            return say(model, random_ids(1, PROMPT, seed=number), make(), number)[0]

        asking, cache = Asking(write), make()
        output, forwards = say(model, ids, cache, seed, logits_processor=LogitsProcessorList([asking]))
        found.append((output.sequences.tolist(), asking.texts, cache.get_seq_length()))
        taken.append(forwards)
    assert found[0] == found[1] and taken == [length + 1, length]
    assert len({len(text[0]) for text in found[0][1]}) > 2


def test_the_loop_of_a_model_that_has_its_own(new_cache):
    model, entered = model_of("llama"), []

    @contextlib.contextmanager
    def own() -> Iterator[None]:
        entered.append(True)
        yield
        entered.append(False)

    vars(model)[deferred_stop.LOOP] = own
    say(model, random_ids(1, PROMPT), new_cache(model, GQA), 1)
    assert entered == [True, False]
    unpatch_model(model)
    assert vars(model).pop(deferred_stop.LOOP) is own
    new_cache(model, GQA)
    assert deferred_stop.LOOP in vars(model)
    unpatch_model(model)
    assert deferred_stop.LOOP not in vars(model)


def imported_anew() -> ModuleType:
    """The module once more, as after a reload."""
    spec = importlib.util.spec_from_file_location("deferred_stop_anew", deferred_stop.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_importing_it_anew_stacks_nothing(tiny, new_cache, monkeypatch):
    model, ids = tiny("llama"), random_ids(1, PROMPT)
    new_cache(model, GQA)
    anew = imported_anew()
    assert anew._Check is deferred_stop._Check
    monkeypatch.setattr(anew, "runs_ahead", lambda cache, device: anew.hears(cache))
    for installed in (utils.DeferredStopCheck, anew.DeferredStopCheck):
        monkeypatch.setattr(utils, "DeferredStopCheck", installed)
        anew.defer_stop_checks(model)
        assert utils.DeferredStopCheck is installed
        for seed in range(4):
            ahead, behind = new_cache(model, GQA), waiting(model, GQA)
            found, _ = say(model, ids, ahead, seed)
            drawn = random_state()
            the_same(found, say(model, ids, behind, seed)[0])
            assert torch.equal(drawn, random_state()) and ahead.get_seq_length() == behind.get_seq_length()


def test_a_transformers_without_such_checks(monkeypatch):
    monkeypatch.delattr(utils, "DeferredStopCheck")
    model = model_of("llama")
    imported_anew().defer_stop_checks(model)
    assert not hasattr(utils, "DeferredStopCheck") and deferred_stop.LOOP not in vars(model)


def test_a_check_of_somebody_else(tiny, new_cache, monkeypatch):
    """It is not replaced, and may be made of ours."""
    model, ids = tiny("llama"), random_ids(1, 3)
    new_cache(model, GQA)

    class Other(utils.DeferredStopCheck):
        pass

    monkeypatch.setattr(utils, "DeferredStopCheck", Other)
    ahead = new_cache(model, GQA)
    assert utils.DeferredStopCheck is Other
    monkeypatch.setattr(torch, "Event", Event)
    for cache in (ahead, dense_cache(model), None):
        made = [
            Other(ids, 10, cache, False, None),
            Other(input_ids=ids, max_length=10, cache=cache, cache_is_returned=False, streamer=None),
        ]
        assert all(type(check) is Other and check.max_length == 10 for check in made)


class Listening(Count):
    """Has PyTorch refuse every wait for the device, from one step on to another."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.count in (10, 40):
            torch.cuda.set_sync_debug_mode("error" if self.count == 10 else "default")
        return super().__call__(input_ids, scores)


@gpu
@pytest.mark.parametrize("streamer", [None, Heard])
def test_generate_does_not_wait_for_the_device(kind, streamer):
    name, options = METHODS[kind]
    model: Any = model_of(name).to("cuda")
    ids = torch.randint(3, 100, (1, PROMPT), device="cuda")

    def run(cache: Any) -> Any:
        given = {} if streamer is None else {"streamer": streamer()}
        processors = LogitsProcessorList([Listening()])
        return say(model, ids, cache, eos_token_id=[], logits_processor=processors, **given)[0]

    try:
        found = run(HierarchicalSparseCache(model, **options, max_cache_len=300))
        with pytest.raises(RuntimeError, match="synchronizing"):
            run(waiting(model, options))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.sequences.shape[1] == PROMPT + NEW


class Slow(Count):
    """Has the device be late with every token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        with torch.cuda.device(input_ids.device):
            torch.cuda._sleep(10_000_000)
        return super().__call__(input_ids, scores)


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_on_another_device_than_the_current_one(kind):
    name, options = METHODS[kind]
    device = torch.device("cuda", 1)
    model: Any = model_of(name).to(device)
    ids, early = random_ids(1, PROMPT).to(device), 0
    with torch.cuda.device(0):
        for seed in range(6):
            ahead = HierarchicalSparseCache(model, **options, max_cache_len=300)
            outputs, heard = [], []
            for cache in (ahead, waiting(model, options)):
                streamer = Heard()
                slow = LogitsProcessorList([Slow()])
                outputs.append(say(model, ids, cache, seed, logits_processor=slow, streamer=streamer)[0])
                heard.append(streamer.tokens)
            the_same(*outputs)
            assert heard[0] == heard[1] == outputs[0].sequences[0].tolist()
            assert ahead.get_seq_length() == outputs[0].sequences.shape[1] - 1
            early += outputs[0].sequences.shape[1] < PROMPT + NEW
    assert early > 0
