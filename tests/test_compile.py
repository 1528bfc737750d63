"""Decode steps over compiled decoder layers.

Most tests compile with a backend that runs what was traced as it is, so that the same bits are expected, and that
counts compilations and runs. Without a GPU, `Rerun` stands for a graph (see `test_graph`).
"""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import re
import shutil
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.codegen import cpp
from torch._inductor.utils import run_and_get_code
from transformers import CompileConfig, StaticCache

from hf_hisparse import HierarchicalSparseCache, graph, patch_model, unpatch_model
from hf_hisparse.branch import Branch
from hf_hisparse.coordinator import SparseCoordinator
from hf_hisparse.graph import GraphedForward
from hf_hisparse.models import regional
from tests.helpers import (
    DEVICE,
    GQA,
    close,
    decode,
    dense_cache,
    forward,
    generate,
    logits_of,
    make_model,
    padding,
    random_ids,
    same_bits,
)
from tests.test_graph import (
    MODELS,
    Rerun,
    Scaled,
    add_adapter,
    change_buffer,
    change_module,
    change_parameter,
    change_weight,
    follow,
    model_of,
    prefill,
    scale_adapter,
    step,
)
from tests.test_soak import Interrupt


# Newer transformers call the cache's argument `cache`; both names must work.
pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")]
gpu = pytest.mark.gpu
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")

KINDS = {"llama-quest": 1, "llama-rabitq": 1, "qwen3-rabitq": 1, "llama-resident": 1, "deepseek": 2, "glm": 3}
"""How many kinds of layer a model has: dense or with experts, with an indexer or without."""


class Backend:
    """Runs what was traced as it is, and counts."""

    def __init__(self) -> None:
        self.compilations = self.runs = 0
        self.fail: Exception | None = None

    def __call__(self, traced: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        if self.fail is not None:
            raise self.fail
        self.compilations += 1

        def run(*args: Tensor) -> Any:
            self.runs += 1
            return traced.forward(*args)

        return run


@pytest.fixture
def backend(monkeypatch) -> Backend:
    backend = Backend()
    monkeypatch.setattr(regional, "OPTIONS", {"fullgraph": True, "backend": backend})
    return backend


@pytest.fixture
def warned(caplog, monkeypatch):
    """The warnings so far."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    graph.logger.warning_once.cache_clear()
    return lambda: [record.getMessage() for record in caplog.records]


def compiled(model: nn.Module, options: dict[str, Any], longest: int = 300) -> HierarchicalSparseCache:
    """A cache whose decode steps are recorded, over compiled layers, and run again."""
    cache = HierarchicalSparseCache(model, **options, max_cache_len=longest, compile=True)
    cache.graphed = GraphedForward(Rerun(cache), cache.graphed.compiles)
    return cache


def twins(model: nn.Module, name: str, prompt: int = 120) -> tuple[HierarchicalSparseCache, HierarchicalSparseCache]:
    """Two caches with the same prompt, one of them compiled."""
    options = MODELS[name][1]
    caches = compiled(model, options), HierarchicalSparseCache(model, **options, max_cache_len=300)
    for cache in caches:
        prefill(model, random_ids(2, prompt), cache)
    return caches


def is_as_it_was(model: nn.Module) -> bool:
    """Whether no module has a forward of its own, but the patched model."""
    return [module for module in model.modules() if "forward" in vars(module)] == [model]


# ---- the same results ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("kind", MODELS)
def test_compiled_layers_give_the_same(kind, padded, backend):
    name, options = MODELS[kind]
    model, ids = model_of(name), random_ids(3, 90)
    mask = padding("mixed", 3, 90, 90) if padded else None
    cache = compiled(model, options)
    found = generate(model, ids, cache, 40, mask)
    expected = generate(model, ids, HierarchicalSparseCache(model, **options), 40, mask)
    assert torch.equal(found.sequences, expected.sequences)
    assert same_bits(logits_of(found), logits_of(expected))
    assert (cache.graphed.captured, cache.graphed.replayed) == (1, 38)
    assert backend.compilations == KINDS[kind]
    # One step that runs, one that is recorded, and here each that is run again.
    assert backend.runs == 40 * len(cache.layers)


@needs_compiler
@pytest.mark.parametrize("kind", ["llama-rabitq", "deepseek"])
def test_layers_compiled_by_inductor_give_the_same_tokens(kind):
    name, options = MODELS[kind]
    model, ids = model_of(name), random_ids(2, 90)
    cache = compiled(model, options)
    found = generate(model, ids, cache, 40)
    expected = generate(model, ids, HierarchicalSparseCache(model, **options), 40)
    assert cache.graphed.compiles and cache.graphed.replayed == 38
    assert torch.equal(found.sequences, expected.sequences)
    close(logits_of(found), logits_of(expected))


def layers_by_inductor(kind: str) -> list[str]:
    """The code that Inductor makes of each kind of layer of a decode step."""
    model = model_of(MODELS[kind][0])
    cache, _ = twins(model, kind)
    _, codes = run_and_get_code(lambda: step(model, random_ids(2, 1), cache))
    return [code[code.index("def call") :] for code in codes]


@needs_compiler
@pytest.mark.parametrize("kind", ["llama-rabitq", "qwen3-rabitq"])
def test_a_selection_begins_before_key_and_value_are_projected(kind):
    [code] = layers_by_inductor(kind)
    named = re.findall(r"extern_kernels\.(mm|addmm)|hf_hisparse\.(layer_\w+)\.default\(", code)
    order = ["projection" if projection else op for projection, op in named]
    assert order[:5] == ["projection", "layer_retrieval", "projection", "projection", "layer_attention"]
    # The selection may still read its query when it has begun, which is why the attention takes that.
    names = set(re.findall(r"(\w+) = torch\.ops\.hf_hisparse\.layer_retrieval\.default", code))
    for new, old in re.findall(r"^ *(\w+) = (\w+)\b(?:  #.*)?$", code, re.MULTILINE):
        names |= {new} if old in names else set()
    [query] = re.findall(r"layer_attention\.default\((\w+)", code)
    assert query in names


@needs_compiler
@pytest.mark.parametrize("kind", ["deepseek", "glm"])
def test_an_indexer_selects_before_its_layer_projects_the_query(kind):
    codes = [code for code in layers_by_inductor(kind) if "layer_selection.default(" in code]
    assert codes
    for code in codes:
        begin, between = code.split("layer_selection.default(", 1)
        call, between = between.split("\n", 1)
        between, _ = between.split("layer_attention.default(", 1)
        assert call.endswith("beside=True)")
        # Of its own query, of its keys, of the heads' weights, and of what both queries are made from.
        assert begin.count("extern_kernels.") in (4, 5) and 1 <= between.count("extern_kernels.") <= 2


@pytest.mark.parametrize("read", [False, True])
def test_a_selection_that_is_read_before_it_is_attended_to_is_waited_for(read):
    ops = torch.ops.hf_hisparse
    traced = torch.fx.Graph()
    keys, query, weights, states = map(traced.placeholder, ("keys", "query", "weights", "states"))
    other = traced.call_function(torch.ops.aten.neg.default, (states,))
    selection = traced.call_function(ops.layer_selection.default, (keys, query, weights, 0.5, 8))
    last = traced.call_function(torch.ops.aten.abs.default, (selection,)) if read else selection
    attention = traced.call_function(ops.layer_attention.default, (other, keys, keys, 8, 0.5), {"indices": selection})
    traced.output((attention, last))
    regional.SelectFirst()(traced)
    traced.lint()
    assert selection.kwargs == ({} if read else {"beside": True})
    nodes = list(traced.nodes)
    assert (nodes.index(selection) < nodes.index(other)) != read


def test_what_begins_to_be_selected_reads_no_memory_that_compiled_code_may_use_again(monkeypatch):
    model: Any = model_of(MODELS["deepseek"][0])
    cache, _ = twins(model, "deepseek")
    coordinator, read = cache.layers[0].coordinator, []
    monkeypatch.setattr(coordinator, "beside", lambda function, *tensors: read.extend(tensors) or function(*tensors))
    patch = patch_model(model).layers[0]
    running = regional._running.set(regional._Running(patch, coordinator, 0))
    try:
        indexer = model.config.index_n_heads, model.config.index_head_dim
        given = torch.randn(2, 1, indexer[1]), torch.randn(2, 1, *indexer), torch.randn(2, 1, indexer[0])
        coordinator.enter()
        found = regional.layer_selection(*given, 0.5, 32, beside=True)
        assert torch.equal(found, regional.layer_selection(*given, 0.5, 32))
    finally:
        coordinator.leave()
        regional._running.reset(running)
    assert len(read) == 3 and all(same_bits(a, b) for a, b in zip(read, given, strict=True))
    assert not {part.data_ptr() for part in read} & {part.data_ptr() for part in given}


class LateBranch(Branch):
    """Runs as late as a branch of a graph may, at the join: until then, a result that is there already is not to be
    read, and what it is made from not to be written."""

    late = 0
    """Results that were then what they had been at once."""

    def __init__(self) -> None:
        super().__init__()
        self._begun: Any = None

    @property
    def busy(self) -> bool:
        return self._begun is not None

    def run(self, function: Callable[..., Any], *tensors: Tensor) -> Any:
        if self.busy:
            return function(*tensors)
        result = expected = None
        if function.__annotations__.get("return") != "None":
            result = function(*tensors)
            expected = result.clone()
            result.fill_(-1)
        self._begun = function, tensors, result, expected
        return result

    def join(self) -> None:
        if self.busy:
            (function, tensors, result, expected), self._begun = self._begun, None
            found = function(*tensors)
            if result is not None:
                LateBranch.late += int(torch.equal(found, expected))
                result.copy_(found)


@needs_compiler
@pytest.mark.parametrize("kind, layers", [("llama-rabitq", 2), ("deepseek", 4), ("glm", 3)])
def test_a_selection_may_be_made_until_it_is_attended_to(kind, layers, monkeypatch):
    """Of every layer that selects."""
    monkeypatch.setattr(LateBranch, "late", 0)
    model = model_of(MODELS[kind][0])
    cache, other = twins(model, kind)
    for t in range(4):
        token = random_ids(2, 1, seed=t)
        expected = step(model, token, other)
        with monkeypatch.context() as patched:
            patched.setattr("hf_hisparse.coordinator.Branch", LateBranch)
            close(step(model, token, cache), expected)
    assert cache.graphed.compiles and cache.graphed.replayed == 3
    # One step that ran, one that was recorded, and each that was run again.
    assert LateBranch.late == 5 * layers


@pytest.mark.parametrize("compiles", [True, False], ids=["compiled", "eager"])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("method", ["append", "_store_token", "advance", "retrieve", "attend", "_count_one"])
def test_a_selection_that_began_ends_with_its_forward(method, layer, compiles, backend, monkeypatch):
    """Wherever the step that it was for ends, and however the next one is run."""
    model = make_model("llama")
    cache, other = twins(model, "llama-rabitq")
    failing = cache.layers[layer].coordinator

    def fail(*args: Any, **kwargs: Any) -> None:
        assert (failing.ahead is None) == (method in ("attend", "_count_one"))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(failing, method, fail)
        with pytest.raises(KeyboardInterrupt):
            step(model, random_ids(2, 1), cache)
    assert failing.ahead is None
    for untouched in other.layers:
        untouched.coordinator.crop(0)
    cache.graphed.compiles = compiles
    follow(model, (cache, other), 4)


@needs_compiler
@pytest.mark.skipif(
    DEVICE.type == "cpu" and "emulate_precision_casts" not in inspect.getsource(cpp),
    reason="what this PyTorch compiles for a CPU rounds only results",
)
def test_a_low_precision_is_rounded_where_it_was():
    model = make_model("llama", torch.bfloat16)
    caches = twins(model, "llama-rabitq")
    for t in range(6):
        token = random_ids(2, 1, seed=t)
        close(*(step(model, token, cache) for cache in caches))
    assert caches[0].graphed.compiles


@needs_compiler
def test_smollm2_gives_the_same_tokens(smollm2):
    model, tokenizer = smollm2
    text = "Once upon a time there was a library by the sea, and every book in it was about another sea. " * 6
    ids = tokenizer(text, return_tensors="pt").input_ids.to(model.device)
    options = {"top_k": 64, "page_size": 2}
    try:
        cache = compiled(model, options)
        found = generate(model, ids, cache, 48)
        expected = generate(model, ids, HierarchicalSparseCache(model, **options), 48)
    finally:
        unpatch_model(model)
    assert cache.graphed.compiles and cache.graphed.replayed == 46
    assert torch.equal(found.sequences, expected.sequences)


# ---- how often -------------------------------------------------------------------------------------------------------


def test_any_number_of_layers_is_compiled_once(backend):
    model = make_model("llama", num_hidden_layers=12)
    follow(model, twins(model, "llama-rabitq"), 4)
    assert backend.compilations == 1


def test_prompts_are_not_compiled(backend):
    model = make_model("llama")
    cache, other = twins(model, "llama-rabitq")
    assert backend.compilations == 0
    follow(model, (cache, other), 3)
    runs = backend.runs
    for each in (cache, other):
        prefill(model, random_ids(2, 9), each)
    assert runs == backend.runs
    follow(model, (cache, other), 3)
    assert backend.compilations == 1 and cache.graphed.captured == 1


def test_batches_of_any_size_share_three_compilations(backend):
    """For the first size, for one sequence, and for any number."""
    model = make_model("llama")
    for batch in (3, 1, 2, 4, 5, 6):
        ids = random_ids(batch, 60)
        found = generate(model, ids, compiled(model, GQA), 6)
        expected = generate(model, ids, HierarchicalSparseCache(model, **GQA), 6)
        assert same_bits(logits_of(found), logits_of(expected))
    assert backend.compilations <= 3


def test_models_do_not_share_a_count(backend):
    """PyTorch compiles a function eight times, and no more."""
    for width in range(96, 96 + 8 * 10, 8):
        model = make_model("llama", intermediate_size=width)
        cache = compiled(model, GQA)
        generate(model, random_ids(2, 60), cache, 4)
        assert cache.graphed.compiles and cache.graphed.replayed == 2
    assert backend.compilations == 10


def test_what_pytorch_forgot_is_compiled_again(backend):
    model = make_model("llama")
    follow(model, twins(model, "llama-rabitq"), 3)
    torch.compiler.reset()
    caches = twins(model, "llama-rabitq")
    follow(model, caches, 3)
    assert backend.compilations == 2 and caches[0].graphed.compiles


# ---- what it is not for ----------------------------------------------------------------------------------------------


def test_other_caches_and_the_model_are_as_they_were(backend):
    model: Any = make_model("llama")
    ids = random_ids(2, 140)
    expected = decode(model, ids, dense_cache(model), 120)
    tables = [vars(module)["_forward_hooks"] for module in model.modules()]
    caches = twins(model, "llama-rabitq")
    assert is_as_it_was(model)
    follow(model, caches, 4)
    assert is_as_it_was(model)
    for module, table in zip(model.modules(), tables, strict=True):
        assert vars(module)["_forward_hooks"] is table
    runs = backend.runs
    assert same_bits(decode(model, ids, dense_cache(model), 120), expected)
    uncompiled = HierarchicalSparseCache(model, **GQA)
    decode(model, ids, uncompiled, 120)
    assert runs == backend.runs > 0
    unpatch_model(model)
    assert not [module for module in model.modules() if "forward" in vars(module)]
    assert not any(vars(module)["_forward_hooks"] for module in model.modules())
    assert "_hisparse_patch" not in vars(model.model)
    assert same_bits(decode(model, ids, dense_cache(model), 120), expected)


def test_what_is_not_captured_is_not_compiled(backend, warned):
    model: Any = make_model("llama")
    caches = twins(model, "llama-rabitq")
    follow(model, caches, 3)
    calls: list[int] = []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *args: calls.append(1))
    # That the model changed is found when the graph has been replayed once more, which is undone.
    follow(model, caches, 1)
    runs = backend.runs
    follow(model, caches, 2)
    assert len(calls) == 6 and backend.runs == runs
    handle.remove()
    model.train()
    follow(model, caches, 3)
    assert backend.runs == runs
    model.eval()
    follow(model, caches, 3)
    assert backend.runs > runs


@pytest.mark.parametrize(
    "change", [change_weight, change_parameter, add_adapter, scale_adapter, change_module, change_buffer]
)
def test_a_model_that_changed_is_followed(change, backend):
    model: Any = make_model("llama")
    model.model.layers[1].mlp.down_proj = Scaled(model.model.layers[1].mlp.down_proj, 0.7).eval()
    caches = twins(model, "llama-rabitq")
    follow(model, caches, 4)
    before = step(model, random_ids(2, 1), copy.deepcopy(caches[1]))
    change(model)
    assert not torch.equal(step(model, random_ids(2, 1), copy.deepcopy(caches[1])), before)
    runs = backend.runs
    follow(model, caches, 4)
    assert caches[0].graphed.captured == 2 and caches[0].graphed.compiles and backend.runs > runs


def test_a_copy_of_a_model_compiles_for_itself(backend):
    model = make_model("llama")
    follow(model, twins(model, "llama-rabitq"), 3)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.lm_head.weight.mul_(0.5)
        copied.model.layers[0].mlp.up_proj.weight.mul_(2)
    follow(copied, twins(copied, "llama-rabitq"), 3)
    follow(model, twins(model, "llama-rabitq"), 3)
    assert backend.compilations == 2


def test_sliding_layers_run_as_ever(backend, warned):
    model = make_model("gemma3_text")
    cache = compiled(model, GQA)
    expected = generate(model, random_ids(2, 90), HierarchicalSparseCache(model, **GQA), 10)
    assert same_bits(logits_of(generate(model, random_ids(2, 90), cache, 10)), logits_of(expected))
    assert backend.runs == 0 and any("keep transformers' own caches" in text for text in warned())


# ---- what fails ------------------------------------------------------------------------------------------------------


def test_layers_that_do_not_compile_are_captured_as_they_are(backend, warned):
    model = make_model("llama")
    caches = twins(model, "llama-rabitq")
    backend.fail = RuntimeError("no compiler here")
    # What a step that failed appended is taken back, and represented anew, which rounds in another order.
    for coordinator in (layer.coordinator for layer in caches[1].layers):
        coordinator.crop(0)
    follow(model, caches, 4)
    assert caches[0].graphed.replayed == 3 and not caches[0].graphed.compiles
    (text,) = [text for text in warned() if "not compiled" in text]
    assert "no compiler here" in text
    assert is_as_it_was(model)


def test_a_layer_whose_forward_was_replaced_is_not_compiled(backend, warned):
    model: Any = make_model("llama")
    layer = model.model.layers[1]
    replaced = layer.forward
    layer.forward = lambda *args, **kwargs: replaced(*args, **kwargs)
    follow(model, twins(model, "llama-rabitq"), 3)
    assert backend.runs == 0
    assert any("not compiled" in text and "LlamaDecoderLayer has a `forward` of its own" in text for text in warned())


def test_a_step_that_is_refused_is_no_failure_to_compile(backend, warned):
    model = make_model("llama")
    cache = compiled(model, GQA, longest=61)
    prefill(model, random_ids(2, 61), cache)
    with pytest.raises(ValueError, match="pass `max_cache_len=61`"):
        step(model, random_ids(2, 1), cache)
    assert cache.graphed.compiles and not any("not compiled" in text for text in warned())


@pytest.mark.parametrize("kind", ["llama-rabitq", "deepseek"])
def test_an_interrupt_in_a_compiled_layer_loses_no_history(kind, backend, monkeypatch):
    model: Any = model_of(MODELS[kind][0])
    caches = twins(model, kind)
    patch = patch_model(model).layers[1]

    def interrupt(*args: Any, **kwargs: Any) -> Tensor:
        raise KeyboardInterrupt("on purpose")

    with monkeypatch.context() as patched:
        patched.setattr(patch, "attend", interrupt)
        with pytest.raises(KeyboardInterrupt, match="on purpose"):
            step(model, random_ids(2, 1), caches[0])
    assert is_as_it_was(model)
    assert not any(layer.coordinator.attending for layer in caches[0].layers)
    assert caches[0].get_seq_length() == 120
    for coordinator in (layer.coordinator for layer in caches[1].layers):
        coordinator.crop(0)
    follow(model, caches, 4)
    assert caches[0].graphed.compiles


@pytest.mark.parametrize("before", [0, 1], ids=["compiled", "captured"])
def test_an_interrupt_at_any_line_leaves_the_model_as_it_was(before, backend):
    """Of what runs the layers compiled, or has them captured."""
    model, token = make_model("llama"), random_ids(2, 1)
    cache, other = twins(model, "llama-rabitq")
    # Where the step was over when it was interrupted, the next one follows it.
    expected = {length: step(model, token, other) for length in range(120, 123)}
    tables = [(vars(module)["_forward_hooks"], vars(module)["_forward_pre_hooks"]) for module in model.modules()]

    def begin() -> HierarchicalSparseCache:
        copied = copy.deepcopy(cache)
        copied.graphed = GraphedForward(Rerun(copied), True)
        for _ in range(before):
            step(model, token, copied)
        return copied

    step(model, token, begin())
    watched = begin()
    with Interrupt() as seen:
        step(model, token, watched)
    lines, first = inspect.getsourcelines(HierarchicalSparseCache.recording)
    recording = range(first, first + len(lines))
    last = {
        (file, line): at
        for at, (file, line) in enumerate(seen.lines)
        if file == regional.__file__ or (file == inspect.getfile(HierarchicalSparseCache) and line in recording)
    }
    assert len(last) > 20
    for at in sorted({*last.values(), *map(seen.lines.index, last)}):
        interrupted = begin()
        with pytest.raises(KeyboardInterrupt), Interrupt(at):
            step(model, token, interrupted)
        assert is_as_it_was(model)
        for module, (hooks, pre_hooks) in zip(model.modules(), tables, strict=True):
            assert vars(module)["_forward_hooks"] is hooks and vars(module)["_forward_pre_hooks"] is pre_hooks
        reached = interrupted.get_seq_length()
        close(step(model, token, interrupted), expected[reached])
        assert interrupted.get_seq_length() == reached + 1 and interrupted.graphed.compiles


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 300, "cuda_graph": False}])
def test_compilation_is_of_graphs(options):
    with pytest.raises(ValueError, match="`compile=True` .* give `max_cache_len` and leave `cuda_graph` on"):
        HierarchicalSparseCache(make_model("llama"), **options, compile=True)


def test_compilation_on_a_cpu_says_that_there_is_none(warned):
    HierarchicalSparseCache(make_model("llama").cpu(), **GQA, max_cache_len=300, compile=True)
    assert any("`compile=True` does nothing on cpu" in text for text in warned())


def test_a_copy_of_a_cache_compiles_too(backend):
    model = make_model("llama")
    caches = twins(model, "llama-rabitq")
    copied = copy.deepcopy(caches[0])
    assert copied.graphed.compiles and not copy.deepcopy(caches[1]).graphed.compiles
    copied.graphed = GraphedForward(Rerun(copied), copied.graphed.compiles)
    follow(model, (copied, caches[1]), 3)
    assert backend.compilations == 1


def test_caches_and_models_go_when_they_are_dropped(backend):
    model = make_model("llama")
    cache, other = twins(model, "llama-rabitq")
    follow(model, (cache, other), 3)
    cache.graphed.recorder.cache = None
    gone = weakref.ref(cache), weakref.ref(model)
    del cache, other
    gc.collect()
    assert gone[0]() is None
    del model
    gc.collect()
    assert gone[1]() is None


# ---- a forward that is compiled as a whole ---------------------------------------------------------------------------


def test_generate_does_not_compile_the_forward_by_itself(backend, warned):
    model, ids = make_model("llama"), random_ids(2, 60)
    expected = generate(model, ids, HierarchicalSparseCache(model, **GQA), 8)
    cache = compiled(model, GQA)
    assert not cache.is_compileable
    config = CompileConfig(backend=backend, mode=None)
    config._compile_all_devices = True
    found = generate(model, ids, cache, 8, compile_config=config)
    assert same_bits(logits_of(found), logits_of(expected))
    assert backend.compilations == 1 and "_compiled_call" not in vars(model)
    assert any("Compilation will be skipped" in text for text in warned())


@pytest.mark.parametrize("kind", ["llama-rabitq", "deepseek"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_that_is_compiled_as_a_whole_gives_the_same(kind, in_place, backend):
    name, options = MODELS[kind]
    model, ids = model_of(name), random_ids(2, 90)
    expected = generate(model, ids, HierarchicalSparseCache(model, **options), 12)
    whole = Backend()
    called: Any = model
    if in_place:
        model.compile(backend=whole)
    else:
        called = torch.compile(model, backend=whole)
    cache = compiled(called, options)
    found = generate(called, ids, cache, 12)
    assert same_bits(logits_of(found), logits_of(expected))
    # Nothing of it is compiled but its layers, for the graph.
    assert (whole.compilations, backend.compilations, cache.graphed.replayed) == (0, KINDS[kind], 10)


def test_another_cache_compiles_with_a_patched_model_as_with_any():
    ids, logits, counts = random_ids(2, 40), [], []
    for patched in (False, True):
        model: Any = make_model("llama")
        if patched:
            patch_model(model)
        backend = Backend()
        cache = StaticCache(config=model.config, max_cache_len=64)
        forward(model, ids, cache)
        run = torch.compile(model.__call__, backend=backend, fullgraph=True)
        with torch.no_grad():
            for t in range(6):
                positions = torch.full((2, 1), 40 + t, device=ids.device)
                logits.append(run(random_ids(2, 1, seed=t), position_ids=positions, past_key_values=cache).logits)
        counts.append((backend.compilations, backend.runs))
    assert counts[0] == counts[1] and counts[0][1] == 6
    assert all(same_bits(one, two) for one, two in zip(logits[:6], logits[6:], strict=True))


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("kind", ["llama-rabitq", "llama-quest", "deepseek", "glm"])
def test_256_tokens_of_compiled_layers_in_a_graph(kind):
    model, ids = model_of(MODELS[kind][0]).cuda(), random_ids(3, 200).cuda()
    mask = padding("mixed", 3, 200, 200).cuda()
    cache = HierarchicalSparseCache(model, **MODELS[kind][1], max_cache_len=500, compile=True)
    found = generate(model, ids, cache, 256, mask)
    assert cache.graphed.compiles and cache.graphed.captured == 1 and cache.graphed.replayed >= 253
    for options in ({"cuda_graph": False}, {}):
        other = HierarchicalSparseCache(model, **MODELS[kind][1], max_cache_len=500, **options)
        expected = generate(model, ids, other, 256, mask)
        assert torch.equal(found.sequences, expected.sequences), options
        close(logits_of(found), logits_of(expected))


@gpu
def test_256_tokens_of_smollm2(smollm2):
    model, tokenizer = smollm2
    model = copy.deepcopy(model).cuda()
    text = "Once upon a time there was a library by the sea, and every book in it was about another sea. " * 40
    ids = tokenizer(text, return_tensors="pt").input_ids.cuda()
    options: dict[str, Any] = {"top_k": 256, "max_cache_len": ids.shape[1] + 256}
    sequences = []
    for more in ({"cuda_graph": False}, {}, {"compile": True}):
        cache = HierarchicalSparseCache(model, **options, **more)
        sequences.append(generate(model, ids, cache, 256).sequences)
    assert cache.graphed.compiles and cache.graphed.replayed >= 253
    whole = torch.compile(model)
    cache = HierarchicalSparseCache(whole, **options)
    sequences.append(generate(whole, ids, cache, 256).sequences)
    assert all(torch.equal(sequence, sequences[0]) for sequence in sequences)


@gpu
def test_a_step_over_compiled_layers_allocates_nothing():
    model = model_of("llama").cuda()
    cache = HierarchicalSparseCache(model, **GQA, max_cache_len=1800, compile=True)
    prefill(model, random_ids(2, 120).cuda(), cache)
    token = random_ids(2, 1).cuda()
    for _ in range(5):
        step(model, token, cache)
    before = torch.cuda.memory_allocated()
    for _ in range(200):
        step(model, token, cache)
    assert torch.cuda.memory_allocated() == before and cache.graphed.replayed >= 203


@gpu
@pytest.mark.parametrize(
    "kind, method", [("llama-rabitq", "append"), ("llama-rabitq", "retrieve"), ("deepseek", "append")]
)
def test_a_capture_that_ends_beside_a_selection(kind, method, monkeypatch):
    """It runs eagerly what it could not capture, and the next capture is made as if there had been none."""
    model, ids = model_of(MODELS[kind][0]).cuda(), random_ids(2, 120).cuda()
    options = MODELS[kind][1] | {"max_cache_len": 300, "compile": True}
    whole = getattr(SparseCoordinator, method)

    def refuse(self: SparseCoordinator, *args: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            assert self._branch.busy
            raise RuntimeError("a test says so")
        return whole(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(SparseCoordinator, method, refuse)
        cache = HierarchicalSparseCache(model, **options)
        found = generate(model, ids, cache, 20)
    assert cache.graphed.captured == 0
    cache = HierarchicalSparseCache(model, **options)
    assert torch.equal(generate(model, ids, cache, 20).sequences, found.sequences)
    assert cache.graphed.replayed == 18
