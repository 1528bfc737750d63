"""What transformers documents of generation and its caches, done side by side with the dense cache and with ours.

Within `top_k`, and for models with an indexer at several times what that selects, every mode gives the dense cache's
tokens. Beyond, a sequence of a batch gives what it gives alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import hf_hisparse
from hf_hisparse import HierarchicalSparseCache
from hf_hisparse.deferred_stop import LOOP
from tests.helpers import (
    DEVICE,
    GQA,
    close,
    dense_cache,
    forward,
    generate,
    logits_of,
    make_model,
    padding,
    random_ids,
    same_bits,
)


MODELS = ["llama", "qwen3", "gemma3_text", "gpt_oss", "deepseek_v32", "glm_moe_dsa"]
INDEXED = ["deepseek_v32", "glm_moe_dsa"]
WINDOWED = ["gemma3_text", "gpt_oss"]
"""Their windows count columns of the batch, so that padding within a sequence takes a place in them."""
PROMPT, NEW = 44, 8

SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-quest": ("llama", GQA | {"algorithm": "quest"}),
    "llama-rabitq": ("llama", GQA | {"algorithm": "rabitq"}),
    "qwen3": ("qwen3", GQA),
    "gemma3_text": ("gemma3_text", GQA),
    "gpt_oss": ("gpt_oss", GQA),
    "deepseek_v32": ("deepseek_v32", {}),
    "glm_moe_dsa": ("glm_moe_dsa", {}),
}
"""Models, and options by which a step selects a part of a prompt of 90 tokens."""


@pytest.fixture(params=MODELS)
def name(request) -> str:
    return request.param


@pytest.fixture
def model(tiny, name) -> nn.Module:
    return tiny(name)


def covering(model: Any) -> HierarchicalSparseCache:
    """A cache that attends to what the dense one does: to everything, or to what the model's own indexer selects."""
    indexed = hasattr(model.config, "index_topk")
    return HierarchicalSparseCache(model, **({} if indexed else {"top_k": 256}))


# ---- modes of `generate` ---------------------------------------------------------------------------------------------


class Even(LogitsProcessor):
    """Allows even tokens only."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.masked_fill(torch.arange(scores.shape[1], device=scores.device) % 2 == 1, -torch.inf)


class After(StoppingCriteria):
    """Stops a sequence once it ends in a token that 3 divides."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] % 3 == 0


class Kept(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def by_hand(model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, **kwargs: Any) -> Tensor:
    """A decoding loop of one's own, as `generate` takes it: it chooses the second best token."""
    kwargs.pop("generation_config", None)
    kwargs = {key: value for key, value in kwargs.items() if key not in ("synced_gpus", "streamer")}
    first = True
    for _ in range(NEW):
        inputs = model.prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=None if first else 1,
            is_first_iteration=first,
            **kwargs,
        )
        output = model(**inputs, return_dict=True)
        kwargs = model._update_model_kwargs_for_generation(output, kwargs)
        input_ids = torch.cat((input_ids, output.logits[:, -1].topk(2).indices[:, 1:]), dim=1)
        first = False
    return input_ids


SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": SAMPLING,
    "several sequences": SAMPLING | {"num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "output_scores": True},
    "sampled beams": SAMPLING | {"num_beams": 2, "output_scores": True},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": [[5], [7, 9]]},
    "a processor": {"logits_processor": LogitsProcessorList([Even()])},
    "a criterion": {"stopping_criteria": StoppingCriteriaList([After()])},
    "guidance": {"guidance_scale": 1.5},
    "chunks": {"prefill_chunk_size": 16},
    "all outputs": {"output_scores": True, "output_hidden_states": True},
    "tokens alone": {"return_dict_in_generate": False, "output_logits": False},
    "a loop by hand": {"custom_generate": by_hand},
}


def run(model: nn.Module, cache: Any, ids: Tensor, mask: Tensor | None = None, **mode: Any) -> Any:
    """The padding token is not generated: an indexer scores all tokens alike for it, as its embedding is zero."""
    torch.manual_seed(0)
    return generate(model, ids, cache, NEW, mask, suppress_tokens=[0], **mode)


def same_outputs(ours: Any, dense: Any) -> None:
    if isinstance(dense, Tensor):
        assert torch.equal(ours, dense)
        return
    assert ours.keys() == dense.keys()
    assert torch.equal(ours.sequences, dense.sequences)
    for key in ("logits", "scores", "sequences_scores", "hidden_states"):
        for a, b in zip(*(newest_of(output.get(key)) for output in (ours, dense)), strict=True):
            finite = b.isfinite()
            assert torch.equal(a.isfinite(), finite)
            close(a[finite], b[finite])


def newest_of(outputs: Any) -> list[Tensor]:
    """The tensors of an output, of hidden states those of the newest token: others may be of padding."""
    if isinstance(outputs, tuple):
        return [tensor for output in outputs for tensor in newest_of(output)]
    return [] if outputs is None else [outputs[:, -1] if outputs.ndim == 3 else outputs]


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_a_padded_batch_equals_the_dense_cache(model, mode):
    ids, mask = random_ids(2, PROMPT), padding("left", 2, PROMPT, PROMPT)
    dense = run(model, dense_cache(model), ids, mask, **MODES[mode])
    same_outputs(run(model, covering(model), ids, mask, **MODES[mode]), dense)


def test_drafts_equal_greedy(model):
    """Of a prompt in which the next tokens can be looked up, and are now and then right."""
    ids = random_ids(1, 12).repeat(1, 4)
    dense, cache = run(model, dense_cache(model), ids), covering(model)
    if not all(layer.is_croppable for layer in dense_cache(model).layers):
        pytest.skip("this transformers cannot crop windows")
    found = run(model, cache, ids, prompt_lookup_num_tokens=3)
    assert torch.equal(found.sequences, dense.sequences)
    assert cache.get_seq_length() == ids.shape[1] + NEW - 1


def test_an_assistant_gives_the_tokens_of_greedy(tiny):
    model, assistant, ids = tiny("llama"), make_model("llama", num_hidden_layers=1), random_ids(1, PROMPT)
    dense = run(model, dense_cache(model), ids)
    found = run(model, covering(model), ids, assistant_model=assistant)
    assert torch.equal(found.sequences, dense.sequences)


def test_a_streamer_is_given_every_token(model):
    kept, ids = Kept(), random_ids(1, PROMPT)
    found = run(model, covering(model), ids, streamer=kept)
    assert kept.ended and kept.tokens == found.sequences[0].tolist()
    assert torch.equal(found.sequences, run(model, dense_cache(model), ids).sequences)


def test_embeddings_in_place_of_tokens(model):
    ids, mask = random_ids(2, PROMPT), padding("left", 2, PROMPT, PROMPT)
    embeddings = model.get_input_embeddings()(ids)
    dense = run(model, dense_cache(model), ids, mask)
    found = run(model, covering(model), None, mask, inputs_embeds=embeddings)
    assert torch.equal(found.sequences, dense.sequences[:, PROMPT:])


def test_sequences_that_end_one_after_another(model):
    ids = random_ids(3, PROMPT)
    free = run(model, dense_cache(model), ids).sequences
    stops = [int(free[0, PROMPT + 1]), int(free[1, PROMPT + 4])]
    dense = run(model, dense_cache(model), ids, eos_token_id=stops).sequences
    assert dense[0, PROMPT + 2 :].eq(0).all()
    # What comes after an end is padding as the model is concerned, and its logits are of no account.
    assert torch.equal(run(model, covering(model), ids, eos_token_id=stops).sequences, dense)


def test_turns_of_a_conversation(model):
    """Each continues on the cache of the one before, and equals a run from its beginning; turns are padded, too."""
    cache, ids, mask = covering(model), random_ids(2, 0), random_ids(2, 0)
    for turn, tokens in enumerate((30, 13, 9)):
        ids = torch.cat((ids, random_ids(2, tokens, seed=turn)), dim=1)
        mask = torch.cat((mask, padding("left", 2, tokens, tokens)), dim=1)
        scratch = run(model, dense_cache(model), ids, mask)
        found = run(model, cache, ids, mask)
        assert torch.equal(found.sequences, scratch.sequences)
        close(logits_of(found), logits_of(scratch))
        ids = found.sequences
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)


# ---- what cannot be, is refused --------------------------------------------------------------------------------------


def test_attention_weights_are_refused_where_there_are_any(name):
    """With `sdpa` there are none, of any cache: then asking for them changes nothing."""
    model, ids = make_model(name), random_ids(1, PROMPT)
    if model.config._attn_implementation == "sdpa":
        dense = run(model, dense_cache(model), ids, output_attentions=True)
        assert not any(dense.attentions)
        found = run(model, covering(model), ids, output_attentions=True)
        assert torch.equal(found.sequences, dense.sequences) and not any(found.attentions)
    model.set_attn_implementation("eager")
    cache = covering(model)
    with pytest.raises(
        ValueError, match="`output_attentions=True`: attention over a hierarchical cache keeps no weights"
    ):
        run(model, cache, ids, output_attentions=True)
    assert cache.get_seq_length() == 0


def test_a_static_cache_is_not_asked_for_together_with_ours(tiny):
    model, cache = tiny("llama"), HierarchicalSparseCache(tiny("llama"), **GQA)
    with pytest.raises(ValueError, match="cache_implementation"):
        run(model, cache, random_ids(1, PROMPT), cache_implementation="static")
    assert cache.get_seq_length() == 0


def test_a_static_cache_of_an_enabled_model_is_its_own():
    model, ids = make_model("llama"), random_ids(1, 60)
    options = {"cache_implementation": "static", "disable_compile": True}
    expected = run(model, None, ids, **options)
    with hf_hisparse.enable(model, **GQA):
        assert same_bits(logits_of(run(model, None, ids, **options)), logits_of(expected))
        assert not torch.equal(logits_of(run(model, None, ids)), logits_of(expected))


def test_continuous_batching_of_an_enabled_model_is_refused():
    model, ids = make_model("llama"), [[5, 6, 7]]
    attempts: list[Callable[[], Any]] = [
        lambda: model.generate_batch(inputs=ids, progress_bar=False),
        lambda: model.generate(torch.tensor(ids, device=DEVICE), cache_implementation="paged"),
        lambda: model.init_continuous_batching(),
    ]
    held = vars(model).copy()
    with hf_hisparse.enable(model, **GQA):
        for attempt in attempts:
            with pytest.raises(ValueError, match=r"`generate_batch`.*`hf_hisparse.disable\(model\)`"):
                attempt()
        with hf_hisparse.enable(model, top_k=512):
            pass
        with pytest.raises(ValueError, match="`generate_batch`"):
            attempts[0]()
    assert vars(model).keys() - held.keys() <= {"forward", LOOP}


# ---- padding ---------------------------------------------------------------------------------------------------------


def test_any_padding_within_top_k_equals_the_dense_cache(model):
    """Also where the prompt ends in padding, for which transformers warns: the first token then comes of that."""
    ids, mask = random_ids(4, PROMPT), padding("mixed", 4, PROMPT, PROMPT)
    dense = run(model, dense_cache(model), ids, mask)
    same_outputs(run(model, covering(model), ids, mask), dense)


@pytest.mark.parametrize("case", SPARSE)
def test_a_sequence_of_a_padded_batch_is_what_it_is_alone(tiny, case):
    """Beyond `top_k`, its padding left out; where there are windows, its padding in its place."""
    name, options = SPARSE[case]
    model, tokens = tiny(name), 90
    ids, more, mask = random_ids(4, tokens), random_ids(4, NEW, seed=1), padding("mixed", 4, tokens, tokens + NEW)
    cache = HierarchicalSparseCache(model, **options)
    prompts = forward(model, ids, cache, mask[:, :tokens])
    together = [prompts]
    for t in range(NEW):
        together.append(forward(model, more[:, t : t + 1], cache, mask[:, : tokens + t + 1]))
    for row in range(4):
        at = mask[row, :tokens].bool()
        left_out = name not in WINDOWED
        seen = mask[row : row + 1, torch.cat((at, at.new_ones(NEW))) if left_out else slice(None)]
        prompt = ids[row : row + 1, at] if left_out else ids[row : row + 1]
        alone = HierarchicalSparseCache(model, **options)
        first = forward(model, prompt, alone, seen[:, : prompt.shape[1]])
        close(prompts[row, at], first[0] if left_out else first[0, at])
        for t in range(NEW):
            end = prompt.shape[1] + t + 1
            logits = forward(model, more[row : row + 1, t : t + 1], alone, seen[:, :end])
            close(together[t + 1][row : row + 1], logits)
            assert torch.equal(together[t + 1][row].argmax(-1), logits[0].argmax(-1))


@pytest.mark.parametrize("case", SPARSE)
def test_generate_gives_a_padded_sequence_the_tokens_that_it_has_alone(tiny, case):
    """Where it does not end in padding, which `generate` would go on from."""
    name, options = SPARSE[case]
    model, kind = tiny(name), "left" if name in WINDOWED else "holes"
    ids, mask = random_ids(3, 90), padding(kind, 3, 90, 90)
    for mode in ({}, {"num_beams": 2}):
        found = run(model, HierarchicalSparseCache(model, **options), ids, mask, **mode).sequences
        for row in (1, 2):
            prompt = ids[row : row + 1, mask[row].bool()]
            alone = run(model, HierarchicalSparseCache(model, **options), prompt, **mode).sequences
            assert torch.equal(found[row, 90:], alone[0, prompt.shape[1] :])


@pytest.mark.parametrize("case", ["llama-quest", "llama-rabitq", "deepseek_v32", "glm_moe_dsa"])
def test_a_padded_history_that_is_extended_cropped_and_reordered(tiny, case):
    """In chunks that are padded, too, from within `top_k` to beyond and back: each sequence as it is alone."""
    name, options = SPARSE[case]
    model = tiny(name)
    cache, alone = HierarchicalSparseCache(model, **options), [HierarchicalSparseCache(model, **options) for _ in "abc"]
    mask = torch.ones(3, 0, dtype=torch.int64, device=DEVICE)
    turn = 0

    def add(kind: str | None, tokens: int) -> None:
        nonlocal mask, turn
        turn += 1
        new = random_ids(3, tokens, seed=turn)
        seen = torch.ones_like(new) if kind is None else padding(kind, 3, tokens, tokens)
        mask = torch.cat((mask, seen), dim=1)
        found = forward(model, new, cache, mask)
        for row, one in enumerate(alone):
            at = seen[row].bool()
            history = torch.ones(1, one.get_seq_length() + int(at.sum()), dtype=torch.int64, device=DEVICE)
            close(found[row, at], forward(model, new[row : row + 1, at], one, history)[0])

    def crop(count: int) -> None:
        nonlocal mask
        gone = mask[:, -count:].sum(1).tolist()
        cache.crop(-count)
        for one, tokens in zip(alone, gone, strict=True):
            one.crop(-tokens)
        mask = mask[:, :-count]

    add("holes", 30)
    add("right", 40)
    for _ in range(3):
        add(None, 1)
    add("mixed", 30)
    crop(20)
    add(None, 1)
    cache.reorder_cache(torch.tensor([2, 0, 2], device=DEVICE))
    alone, mask = [alone[2], alone[0], alone[2].fork()], mask[[2, 0, 2]]
    cache = cache.fork()
    add(None, 1)
    add("left", 25)
    crop(75)
    add(None, 1)
    add("holes", 50)
    add(None, 1)


@pytest.mark.parametrize("case", ["llama-quest", "llama-rabitq", "deepseek_v32"])
def test_a_sequence_of_padding_alone_begins_with_its_first_decoded_token(tiny, case):
    name, options = SPARSE[case]
    model, ids, more = tiny(name), random_ids(2, 60), random_ids(2, 6, seed=1)
    mask = torch.ones(2, 66, dtype=torch.int64, device=DEVICE)
    mask[1, :60] = 0
    cache, alone = HierarchicalSparseCache(model, **options), HierarchicalSparseCache(model, **options)
    forward(model, ids, cache, mask[:, :60])
    for t in range(6):
        logits = forward(model, more[:, t : t + 1], cache, mask[:, : 61 + t])
        close(logits[1:], forward(model, more[1:, t : t + 1], alone, mask[1:, 60 : 61 + t]))


CHANGES: dict[str, tuple[Callable[[Tensor], Tensor | None], str]] = {
    "shown": (lambda mask: torch.ones_like(mask), "shows other padding among 60 tokens"),
    "hidden": (lambda mask: mask.index_fill(1, torch.tensor([9], device=DEVICE), 0), "shows other padding"),
    "moved": (lambda mask: mask.roll(1, 0), "shows other padding"),
    "none": (lambda mask: None, "no `attention_mask` is given, and of 60 tokens in the cache some are padding"),
    "short": (lambda mask: mask[:, -1:], r"of shape \[2, 1\] is for 1 tokens, and there are 6"),
}


@pytest.mark.cpu
@pytest.mark.parametrize("new", [1, 4], ids=["a step", "a chunk"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("case", ["llama-quest", "gemma3_text", "deepseek_v32"])
def test_a_mask_that_changes_is_refused(tiny, case, change, new):
    name, options = SPARSE[case]
    model, ids, more = tiny(name), random_ids(2, 60), random_ids(2, new, seed=1)
    mask = padding("holes", 2, 60, 60 + new)
    caches = [HierarchicalSparseCache(model, **options) for _ in "ab"]
    for cache in caches:
        forward(model, ids, cache, mask[:, :60])
    wrong, said = CHANGES[change]
    with pytest.raises(ValueError, match=said):
        forward(model, more, caches[0], wrong(mask))
    assert caches[0].get_seq_length() == 60
    # Nothing has changed by it.
    assert same_bits(*(forward(model, more, cache, mask) for cache in caches))


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_on_a_gpu_a_mask_that_changes_is_refused_a_step_late(cuda_graph):
    model, ids, mask = make_model("llama").cuda(), random_ids(2, 60).cuda(), padding("holes", 2, 60, 70).cuda()
    cache = HierarchicalSparseCache(model, **GQA, max_cache_len=100, cuda_graph=cuda_graph)
    forward(model, ids, cache, mask[:, :60])
    for t in range(60, 65):
        forward(model, ids[:, :1], cache, mask[:, : t + 1])
    with pytest.raises(ValueError, match="shows other padding"):
        for t in range(65, 68):
            forward(model, ids[:, :1], cache, torch.ones_like(mask[:, : t + 1]))
            torch.cuda.synchronize()


@pytest.mark.cpu
def test_a_decoded_token_that_is_hidden_is_refused(tiny):
    model, ids = tiny("llama"), random_ids(2, 50)
    cache, mask = HierarchicalSparseCache(model, **GQA), torch.ones(2, 42, dtype=torch.int64)
    mask[1, -1] = 0
    # The step that leaves the dense limit, and one after it.
    for length in (40, 41):
        forward(model, ids[:, cache.get_seq_length() : length], cache)
        with pytest.raises(ValueError, match="or hides a decoded token"):
            forward(model, ids[:, length : length + 1], cache, mask[:, -length - 1 :])
        assert cache.get_seq_length() == length


@pytest.mark.cpu
@pytest.mark.parametrize("case", ["llama-quest", "deepseek_v32"])
def test_padding_that_was_lost_stays_so(tiny, case):
    """A history that was cropped to what is attended to densely came from where padding is not stored."""
    name, options = SPARSE[case]
    model, ids, mask = tiny(name), random_ids(3, 60), padding("mixed", 3, 25, 70)
    cache, alone = HierarchicalSparseCache(model, **options), HierarchicalSparseCache(model, **options)
    forward(model, ids, cache, mask[:, :60])
    cache.crop(-31)
    cache.reorder_cache(torch.tensor([2, 1, 2]))
    mask = mask[[2, 1, 2]]
    for wrong in (torch.ones(3, 31, dtype=torch.int64), None, mask.roll(1, 0)[:, :31]):
        for new in (1, 2):
            with pytest.raises(ValueError, match=r"shows other padding among 29 tokens|no `attention_mask` is given"):
                forward(model, ids[:, :new], cache, None if wrong is None else wrong[:, : 29 + new])
    forward(model, ids[[2], :29][:, mask[0, :29].bool()], alone)
    for t in range(29, 60):
        logits = forward(model, ids[:, t : t + 1], cache.fork(), mask[:, : cache.get_seq_length() + 1])
        assert same_bits(logits, forward(model, ids[:, t : t + 1], cache, mask[:, : cache.get_seq_length() + 1]))
        close(logits[:1], forward(model, ids[:1, t : t + 1], alone))
    cache.reset()
    forward(model, ids, cache)


def test_a_mask_may_change_while_attention_is_dense(tiny):
    """As with the dense cache. What counts is what it shows when the history leaves the device."""
    model, ids = tiny("llama"), random_ids(2, 60)
    first, then = padding("left", 2, 30, 40), padding("holes", 2, 40, 60)
    cache, dense = HierarchicalSparseCache(model, **GQA), dense_cache(model)
    for each in (cache, dense):
        forward(model, ids[:, :30], each, first[:, :30])
    assert same_bits(*(forward(model, ids[:, 30:40], each, then[:, :40]) for each in (cache, dense)))
    for t in range(40, 60):
        forward(model, ids[:, t : t + 1], cache, then[:, : t + 1])
    with pytest.raises(ValueError, match="shows other padding"):
        forward(model, ids[:, :1], cache, torch.ones(2, 61, dtype=torch.int64, device=DEVICE))
        # A GPU was not waited for, and is now.
        forward(model, ids[:, :2], cache, torch.cat((then, torch.ones_like(then[:, :3])), dim=1))
    assert cache.get_seq_length() == (60 if DEVICE.type == "cpu" else 61)


@pytest.mark.gpu
def test_on_a_gpu_a_mask_that_changed_at_last_is_told_of_when_the_history_is_forgotten(caplog, monkeypatch):
    """And is held against no history to come."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model, ids, mask = make_model("llama").cuda(), random_ids(2, 60).cuda(), padding("holes", 2, 60, 70).cuda()
    cache = HierarchicalSparseCache(model, **GQA)
    for turn in range(3):
        forward(model, ids, cache, mask[:, :60])
        forward(model, ids[:, :1], cache, mask[:, :61])
        if turn == 1:
            forward(model, ids[:, :1], cache, torch.ones_like(mask[:, :62]))
        cache.reset()
        assert caplog.text.count("showed other padding") == (turn > 0)
