"""Where a model lies and runs: offloaded weights, several devices, several processes, several threads."""

from __future__ import annotations

import copy
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_hisparse import HierarchicalSparseCache, graph, patch_model, unpatch_model
from hf_hisparse.memory import host_store
from hf_hisparse.models import is_patched
from hf_hisparse.placement import device_of
from tests.helpers import (
    DEVICE,
    GQA,
    METHODS,
    close,
    decode,
    dense_cache,
    forward,
    generate,
    left_padding,
    logits_of,
    make_model,
    random_ids,
    same_bits,
)
from tests.test_cache_api import Fault, state_of, steps
from tests.test_graph import graphed, model_of, replays, step


# Newer transformers call the cache's argument `cache`.
pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
gpu = pytest.mark.gpu
cpu = pytest.mark.cpu

MODELS: dict[str, tuple[str, dict[str, Any]]] = METHODS | {
    "glm": ("glm_moe_dsa", {}),
    "gemma3": ("gemma3_text", GQA),
    "gpt-oss": ("gpt_oss", GQA),
}


@pytest.fixture(params=["llama-rabitq", "deepseek"])
def method(request) -> str:
    return request.param


def new(model: nn.Module, kind: str, **options: Any) -> HierarchicalSparseCache:
    return HierarchicalSparseCache(model, **MODELS[kind][1] | options)


# ---- weights that accelerate keeps elsewhere -------------------------------------------------------------------------


def on_the_cpu(model: nn.Module, folder: Path) -> None:
    cpu_offload(model, execution_device=DEVICE)


def on_disk(model: nn.Module, folder: Path) -> None:
    disk_offload(model, str(folder), execution_device=DEVICE)


def here_and_there(model: Any, folder: Path) -> None:
    """Every other layer on the disk."""
    names = [f"model.{name}" for name, _ in model.model.named_children() if name != "layers"]
    layers = {f"model.layers.{i}": "disk" if i % 2 else DEVICE for i in range(len(model.model.layers))}
    where = dict.fromkeys([*names, "lm_head"], DEVICE) | layers
    dispatch_model(model, where, main_device=DEVICE, offload_dir=str(folder))


OFFLOADED = pytest.mark.parametrize("offload", [on_the_cpu, on_disk, here_and_there])


@OFFLOADED
@pytest.mark.parametrize("kind", ["llama-rabitq", "deepseek", "gemma3", "gpt-oss"])
def test_offloaded_weights_change_no_bit(kind, offload, tmp_path):
    """Patched before they were offloaded and after, and again when they are back."""
    model, ids, mask = make_model(MODELS[kind][0]), random_ids(2, 66), left_padding(2, 66)
    expected = decode(model, ids, new(model, kind), 60, mask)
    offload(model, tmp_path)
    assert any(parameter.device.type == "meta" for parameter in model.parameters())
    for _ in range(2):
        cache = new(model, kind)
        assert same_bits(decode(model, ids, cache, 60, mask), expected)
        assert cache.stats().misses
        unpatch_model(model)
    patch_model(model)
    remove_hook_from_submodules(model)
    assert same_bits(decode(model, ids, new(model, kind), 60, mask), expected)


@OFFLOADED
@pytest.mark.parametrize("kind", ["llama-rabitq", "deepseek", "gemma3"])
def test_histories_of_offloaded_models_are_saved_and_loaded(kind, offload, tmp_path):
    """By either the offloaded model or the one that it was; and not by another."""
    here, there = make_model(MODELS[kind][0]), make_model(MODELS[kind][0])
    offload(there, tmp_path)
    ids, more, path = random_ids(2, 90), random_ids(2, 6, seed=1), tmp_path / "cache"
    for saver, loader in ((there, there), (there, here), (here, there)):
        cache = new(saver, kind)
        forward(saver, ids, cache)
        cache.save(path)
        found = HierarchicalSparseCache.load(loader, path)
        assert same_bits(steps(loader, more, found), steps(saver, more, cache))
    other: Any = make_model(MODELS[kind][0])
    with torch.no_grad():
        other.model.layers[-1].input_layernorm.weight[0] += 1
    (tmp_path / "other").mkdir()
    offload(other, tmp_path / "other")
    with pytest.raises(ValueError, match="the weights' checksum was"):
        HierarchicalSparseCache.load(other, path)
    assert not is_patched(other)


def test_a_model_that_is_loaded_with_a_device_map(tmp_path):
    make_model("llama").save_pretrained(tmp_path / "model")
    here = DEVICE.type if DEVICE.index is None else DEVICE.index
    names = ("model.embed_tokens", "model.norm", "model.rotary_emb", "model.layers.0", "lm_head")
    where = dict.fromkeys(names, here) | {"model.layers.1": "disk"}
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=where, offload_folder=tmp_path / "weights"
    )
    whole, ids = make_model("llama"), random_ids(2, 90)
    caches = [HierarchicalSparseCache(each, **GQA) for each in (model, whole)]
    found, expected = generate(model, ids, caches[0], 12), generate(whole, ids, caches[1], 12)
    assert same_bits(logits_of(found), logits_of(expected))


def test_where_a_module_runs(tmp_path):
    model: Any = make_model("llama")
    assert device_of(model) == device_of(model.model.layers[1].self_attn) == DEVICE
    assert device_of(model.to("meta")).type == "meta"
    model = make_model("llama")
    on_disk(model, tmp_path)
    assert next(model.parameters()).device.type == "meta"
    assert device_of(model) == device_of(model.model.layers[1].self_attn) == DEVICE


@cpu
def test_a_model_that_accelerate_moves_is_not_captured_and_says_so_once(caplog, monkeypatch, tmp_path):
    import logging

    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    graph.logger.warning_once.cache_clear()
    model = make_model("llama")
    here_and_there(model, tmp_path)
    cache, other = graphed(model, GQA), HierarchicalSparseCache(model, **GQA)
    for each in (cache, other):
        forward(model, random_ids(2, 60), each)
    for t in range(4):
        token = random_ids(2, 1, seed=t)
        assert same_bits(step(model, token, cache), step(model, token, other))
    assert replays(cache) == 0
    (said,) = [record.getMessage() for record in caplog.records if "CUDA graph" in record.getMessage()]
    assert "accelerate moves the model's weights or inputs" in said


# ---- processes: tensor parallelism -----------------------------------------------------------------------------------


def rank(index: int, count: int, port: int, directory: str) -> None:
    """One of `count` processes, each with the heads of its own: what a process with all of them computes."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    ids, more, mask = random_ids(2, 84), random_ids(2, 5, seed=1), left_padding(2, 90)
    for kind in ("llama-rabitq", "deepseek"):
        name, _ = METHODS[kind]
        plan = DistributedConfig(tp_plan="auto")
        part: Any = AutoModelForCausalLM.from_pretrained(f"{directory}/{name}", distributed_config=plan).eval()
        whole: Any = make_model(name)
        caches = new(part, kind), new(whole, kind)
        models = part, whole
        found, expected = (
            decode(model, ids, cache, 80, mask[:, :84]) for model, cache in zip(models, caches, strict=True)
        )
        close(found, expected)
        assert torch.equal(found.argmax(-1), expected.argmax(-1))
        # Latents are of all heads.
        heads, all_heads = (cache.layers[0].coordinator.heads for cache in caches)
        assert heads == (1 if kind == "deepseek" else all_heads // count)
        assert caches[0].stats().misses
        # Bit for bit what is resident.
        resident = new(part, kind, offload=False)
        assert same_bits(decode(part, ids, resident, 80, mask[:, :84]), found)
        path = f"{directory}/{kind}-{index}"
        caches[0].save(path)
        loaded = HierarchicalSparseCache.load(part, path)
        forks = [cache.fork() for cache in caches]
        assert same_bits(steps(part, more, loaded, mask), steps(part, more, caches[0], mask))
        for cache in forks:
            cache.crop(-30)
            cache.reorder_cache(torch.tensor([1, 0]))
        close(*(forward(model, more, cache, mask.flip(0)[:, :59]) for model, cache in zip(models, forks, strict=True)))
        torch.distributed.barrier()
        try:
            HierarchicalSparseCache.load(part, f"{directory}/{kind}-{1 - index}")
        except ValueError as error:
            assert "the weights' checksum was" in str(error)
        else:
            raise AssertionError("the heads of another process were taken for one's own")
    torch.distributed.destroy_process_group()


@cpu
def test_heads_that_are_spread_over_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("llama", "deepseek_v32"):
        make_model(name).save_pretrained(tmp_path / name)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(rank, (2, port, str(tmp_path)), nprocs=2)


# ---- threads ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def often(monkeypatch) -> Any:
    """Threads take turns as often as Python can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """The results of functions that begin together, each in a thread of its own; or their errors."""
    results: list[Any] = [None] * len(functions)
    gate = threading.Barrier(len(functions))

    def run(at: int) -> None:
        gate.wait()
        try:
            results[at] = functions[at]()
        except BaseException as error:
            results[at] = error

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_threads_share_a_model(often, tiny, method):
    """Each with a cache of its own, ours or another."""
    model = tiny(METHODS[method][0])
    make = [lambda: new(model, method), lambda: dense_cache(model)] * 2
    work = [
        lambda seed=seed, make=make: decode(model, random_ids(2, 68 + 3 * seed, seed=seed), make(), 60)
        for seed, make in enumerate(make)
    ]
    expected = [run() for run in work]
    found = at_once(*work)
    assert all(same_bits(*pair) for pair in zip(found, expected, strict=True)), found


def test_threads_with_models_of_their_own(often, method):
    models = [make_model(METHODS[method][0]) for _ in range(3)]
    ids = random_ids(2, 70)
    expected = decode(models[0], ids, new(models[0], method), 60)

    def run(model: nn.Module) -> Tensor:
        unpatch_model(model)
        return decode(model, ids, new(model, method), 60)

    found = at_once(*(lambda model=model: run(model) for model in models))
    assert all(same_bits(logits, expected) for logits in found)


@pytest.mark.parametrize("error", [RuntimeError("on purpose"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("name", ["llama", "deepseek_v32"])
def test_a_thread_that_fails_leaves_the_others_alone(name, error):
    """Also between the moment that it does and the moment that it is noticed."""
    model, options = make_model(name), GQA if name == "llama" else {}
    state, ids = state_of(model), random_ids(2, 70)
    expected = decode(model, ids, HierarchicalSparseCache(model, **options), 60)
    dense = decode(model, ids, dense_cache(model), 60)
    fault = Fault(model, error)
    main, patched = threading.get_ident(), state_of(model)

    def in_attention(module, args):
        if threading.get_ident() == main:
            raise error

    fault.middle.remove()
    fault.middle = model.model.layers[-1].self_attn.register_forward_pre_hook(in_attention)
    cache = HierarchicalSparseCache(model, **options)
    with pytest.raises(type(error)):
        forward(model, ids, cache)
    found = at_once(
        lambda: decode(model, ids, HierarchicalSparseCache(model, **options), 60),
        lambda: decode(model, ids, dense_cache(model), 60),
    )
    assert same_bits(found[0], expected) and same_bits(found[1], dense)
    fault.middle.remove()
    fault.handle.remove()
    assert same_bits(decode(model, ids, cache, 60), expected)
    assert same_bits(decode(model, ids, dense_cache(model), 60), dense)
    unpatch_model(model)
    assert state_of(model) == state and patched != state


@cpu
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_another_thread_has_its_own_experts_in_the_middle_of_a_step(implementation):
    """Prompts, and forwards over other caches, run as they do without a step of somebody else's."""
    model: Any = make_model("deepseek_v32")
    model.set_experts_implementation(implementation)
    config, ids = model.config, random_ids(2, 66)
    dense, prompt = decode(model, ids, dense_cache(model), 60), forward(model, ids, new(model, "deepseek"))
    cache, main = graphed(model, {}), threading.get_ident()
    forward(model, ids, cache)
    every = [module for module in model.modules() if hasattr(module, "_apply_gate")]
    experts, seen, found = every[1], {True: set(), False: set()}, []
    original = type(experts).forward

    def within(*args: Any, **kwargs: Any) -> Tensor:
        seen[threading.get_ident() == main] |= {module.config._experts_implementation for module in every}
        if threading.get_ident() == main:
            found.extend(
                at_once(
                    lambda: decode(model, ids, dense_cache(model), 60),
                    lambda: forward(model, ids, new(model, "deepseek")),
                )
            )
        return original(experts, *args, **kwargs)

    experts.forward = within
    for t in range(3):
        step(model, ids[:, t : t + 1], cache)
    assert seen == {True: {"batched_mm"}, False: {implementation}} and replays(cache) == 2
    assert all(same_bits(*pair) for pair in zip(found[::2], [dense] * 4, strict=True))
    assert all(same_bits(*pair) for pair in zip(found[1::2], [prompt] * 4, strict=True))
    assert all(module.config is config for module in every)


@cpu
def test_a_model_that_is_copied_in_the_middle_of_a_step_is_copied_whole():
    model: Any = make_model("deepseek_v32")
    ids, cache, copies = random_ids(2, 66), graphed(model, {}), []
    expected = decode(model, ids, new(model, "deepseek"), 60)
    forward(model, ids, cache)
    projection = model.model.layers[1].self_attn.o_proj

    def copying(x: Tensor) -> Tensor:
        if not copies:
            copies.extend(
                (
                    copy.deepcopy(model),
                    pickle.dumps([module.config for module in model.model.modules() if hasattr(module, "config")]),
                )
            )
        return type(projection).forward(projection, x)

    projection.forward = copying
    step(model, ids[:, :1], cache)
    copied, configs = copies
    assert all(type(each) is type(model.config) for each in pickle.loads(configs))
    assert {id(module.config) for module in copied.model.modules() if hasattr(module, "config")} == {id(copied.config)}
    unpatch_model(copied)
    assert same_bits(decode(copied, ids, new(copied, "deepseek"), 60), expected)


def test_a_model_is_patched_once_by_however_many_threads(often):
    for _ in range(10):
        model = make_model("llama")
        before = state_of(model)
        found = at_once(*[lambda model=model: patch_model(model)] * 6)
        assert all(patch is found[0] for patch in found)
        once = make_model("llama")
        patch_model(once)
        assert [hooks for _, _, hooks, _, _ in state_of(model).values()] == [
            hooks for _, _, hooks, _, _ in state_of(once).values()
        ]
        at_once(*[lambda model=model: unpatch_model(model)] * 6)
        assert state_of(model) == before


@cpu
def test_graphs_of_several_threads(often, method):
    """Recorded one at a time, and replayed at once."""
    model = model_of(METHODS[method][0])

    def run(seed: int, cache: HierarchicalSparseCache) -> Tensor:
        forward(model, random_ids(2, 80, seed=seed), cache)
        return torch.cat([step(model, random_ids(2, 1, seed=100 * seed + t), cache) for t in range(6)], dim=1)

    expected = [run(seed, new(model, method, max_cache_len=300, cuda_graph=False)) for seed in range(3)]
    caches = [graphed(model, METHODS[method][1]) for _ in range(3)]
    found = at_once(*(lambda seed=seed, cache=cache: run(seed, cache) for seed, cache in enumerate(caches)))
    assert all(same_bits(*pair) for pair in zip(found, expected, strict=True))
    assert [replays(cache) for cache in caches] == [5] * 3


def test_models_and_caches_take_turns(tiny):
    """Several of both, alive at once, and steps of all by turns."""
    kinds = ["llama-rabitq", "deepseek", "llama-quest"]
    models = [tiny("llama"), tiny("deepseek_v32"), make_model("llama", num_hidden_layers=3)]
    rows = list(zip(models, kinds, strict=True)) * 2
    ids = [random_ids(1 + i % 2, 66, seed=i) for i in range(len(rows))]
    caches = [new(model, kind) for model, kind in rows]
    found = [
        [forward(model, part[:, :60], cache)[:, -1]] for (model, _), part, cache in zip(rows, ids, caches, strict=True)
    ]
    for t in range(60, 66):
        for (model, _), part, cache, logits in zip(rows, ids, caches, found, strict=True):
            logits.append(forward(model, part[:, t : t + 1], cache)[:, -1])
    for (model, kind), part, logits in zip(rows, ids, found, strict=True):
        assert same_bits(torch.stack(logits, dim=1), decode(model, part, new(model, kind), 60))


# ---- several GPUs ----------------------------------------------------------------------------------------------------


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
GPU_MODELS = pytest.mark.parametrize("kind", ["llama-rabitq", "llama-quest", "deepseek", "glm"])


@pytest.fixture
def first_current() -> Any:
    """Device 0 is the current one, and stays it."""
    with torch.cuda.device(0):
        stream = torch.cuda.current_stream()
        yield
        assert torch.cuda.current_device() == 0 and torch.cuda.current_stream() == stream


def spread(model: Any) -> Any:
    """The first half of the layers on one GPU, the rest on another."""
    count = len(model.model.layers)
    where = {f"model.{name}": 0 for name, _ in model.model.named_children() if name != "layers"}
    where |= {f"model.layers.{i}": 0 if i < count // 2 else 1 for i in range(count)} | {"model.norm": 1, "lm_head": 1}
    return dispatch_model(model.cpu(), where)


def on(model: nn.Module, device: int) -> Any:
    return model.to(torch.device("cuda", device))


@gpu
@two_gpus
@pytest.mark.usefixtures("first_current")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@GPU_MODELS
def test_a_model_on_two_gpus_equals_it_on_one(kind, dtype, monkeypatch):
    monkeypatch.setattr(host_store, "SLAB_BYTES", 1024)
    name = MODELS[kind][0]
    ids, mask = random_ids(3, 200).cuda(0), left_padding(3, 200).cuda(0)
    one, two = on(make_model(name, dtype), 0), spread(make_model(name, dtype))
    caches = new(one, kind), new(two, kind)
    expected, found = (decode(model, ids, cache, 150, mask) for model, cache in zip((one, two), caches, strict=True))
    close(found.to(expected.device), expected)
    count = len(caches[1].layers)
    for index, layer in enumerate(caches[1].layers):
        coordinator, memory = layer.coordinator, layer.coordinator.memory
        device = torch.device("cuda", 0 if index < count // 2 else 1)
        held = coordinator.lengths, memory.buffer.buffer, memory.store.table
        assert {memory.device, *(tensor.device for tensor in held)} == {device}
    # Bit for bit what is resident, on the same two.
    resident = decode(two, ids, new(two, kind, offload=False), 150, mask)
    assert same_bits(found, resident)


@gpu
@two_gpus
@pytest.mark.usefixtures("first_current")
@GPU_MODELS
def test_what_is_done_with_a_cache_on_two_gpus(kind, tmp_path, monkeypatch):
    """Generation, beams, chunks, forks, crops, other batches, files; and a graph is not captured."""
    monkeypatch.setattr(host_store, "SLAB_BYTES", 1024)
    name = MODELS[kind][0]
    ids, more = random_ids(2, 100).cuda(0), random_ids(2, 9, seed=1).cuda(0)
    one, two = on(make_model(name), 0), spread(make_model(name))
    outputs = []
    for model in (one, two):
        cache = new(model, kind, max_cache_len=300, cuda_graph=model is two)
        found = [logits_of(generate(model, ids, cache, 12))]
        if model is two:
            assert cache.graphed.captured == cache.graphed.replayed == 0
        beams = generate(model, ids, new(model, kind), 6, num_beams=3, output_scores=True)
        found.append(beams.sequences_scores)
        cache = new(model, kind)
        forward(model, ids, cache)
        fork = cache.fork()
        fork.crop(-30)
        fork.batch_repeat_interleave(2)
        fork.reorder_cache(torch.tensor([3, 0, 1, 1], device="cuda:0"))
        found.append(steps(model, more.repeat(2, 1), fork))
        fork.batch_select_indices(torch.tensor([0, 2], device="cuda:0"))
        found.append(forward(model, more, fork))
        cache.save(tmp_path / "cache")
        loaded = HierarchicalSparseCache.load(model, tmp_path / "cache")
        assert same_bits(steps(model, more, loaded), steps(model, more, cache))
        found.append(steps(model, more, copy.deepcopy(cache)))
        outputs.append(found)
    for expected, found in zip(*outputs, strict=True):
        close(found.to(expected.device), expected)


@gpu
@two_gpus
@pytest.mark.usefixtures("first_current")
@pytest.mark.parametrize("options", [{}, {"backend": "reference"}, {"cuda_graph": False}], ids=["", "torch", "eager"])
@GPU_MODELS
def test_a_model_on_the_second_gpu_touches_no_other(kind, options):
    """The kernels, Triton's and ours, streams, events, graphs, and memory; with the first as the current device."""
    name = MODELS[kind][0]
    model, ids = on(make_model(name), 1), random_ids(3, 200)
    model.set_experts_implementation("batched_mm")
    torch.cuda.synchronize(0)
    before = torch.cuda.memory_allocated(0)
    cache = new(model, kind, max_cache_len=500, **options)
    found = generate(model, ids.cuda(1), cache, 64, left_padding(3, 200).cuda(1))
    if options.get("cuda_graph", True):
        assert (cache.graphed.captured, cache.graphed.replayed) == (1, 62)
    assert torch.cuda.memory_allocated(0) == before
    assert cache.layers[0].coordinator.memory.device == torch.device("cuda", 1)
    on(model, 0)
    cache = new(model, kind, max_cache_len=500, **options)
    expected = generate(model, ids.cuda(0), cache, 64, left_padding(3, 200).cuda(0))
    assert torch.equal(found.sequences.cuda(0), expected.sequences)
    close(logits_of(found).cuda(0), logits_of(expected))


@gpu
@two_gpus
@pytest.mark.usefixtures("first_current")
def test_threads_on_two_gpus():
    """A model on each, graphs and all."""
    ids = random_ids(2, 150)
    models = [on(make_model("llama"), device) for device in (0, 1)]

    def run(device: int) -> Tensor:
        cache = new(models[device], "llama-rabitq", max_cache_len=300)
        logits = logits_of(generate(models[device], ids.cuda(device), cache, 50))
        assert cache.graphed.replayed == 48
        return logits.cpu()

    expected = run(0)
    for _ in range(2):
        for found in at_once(lambda: run(0), lambda: run(1)):
            close(found, expected)


@gpu
def test_the_first_thing_that_a_thread_does_is_a_launch():
    """A thread has no context of CUDA's before it first calls something that makes one."""
    from hf_hisparse import ops

    scores = torch.rand(3, 500, device="cuda")
    expected = ops.top_k(scores, 20)
    (found,) = at_once(lambda: ops.top_k(scores, 20))
    assert torch.equal(found, expected)


@gpu
@pytest.mark.parametrize("kind", ["llama-rabitq", "deepseek"])
def test_threads_share_a_model_on_a_gpu(kind):
    """And capture their graphs while others replay theirs."""
    model = on(make_model(MODELS[kind][0]), 0)
    model.set_experts_implementation("batched_mm")
    prompts = [random_ids(2, 100 + 7 * i, seed=i).cuda(0) for i in range(4)]

    def run(ids: Tensor) -> Tensor:
        cache = new(model, kind, max_cache_len=300)
        logits = logits_of(generate(model, ids, cache, 40))
        assert cache.graphed.replayed == 38
        return logits

    expected = [run(ids) for ids in prompts]
    found = at_once(*(lambda ids=ids: run(ids) for ids in prompts))
    assert all(same_bits(*pair) for pair in zip(found, expected, strict=True)), found


@gpu
def test_weights_on_the_cpu_of_a_model_that_runs_on_a_gpu(tmp_path):
    for kind in ("llama-rabitq", "deepseek"):
        whole, offloaded = on(make_model(MODELS[kind][0]), 0), make_model(MODELS[kind][0]).cpu()
        cpu_offload(offloaded, execution_device=torch.device("cuda", 0))
        ids = random_ids(2, 110).cuda(0)
        caches = new(whole, kind), new(offloaded, kind)
        expected, found = (
            decode(model, ids, cache, 90) for model, cache in zip((whole, offloaded), caches, strict=True)
        )
        close(found, expected)
        caches[1].save(tmp_path / "cache")
        loaded = HierarchicalSparseCache.load(offloaded, tmp_path / "cache")
        assert loaded.layers[0].coordinator.memory.device == torch.device("cuda", 0)
        more = random_ids(2, 5, seed=1).cuda(0)
        assert same_bits(steps(offloaded, more, loaded), steps(offloaded, more, caches[1]))
