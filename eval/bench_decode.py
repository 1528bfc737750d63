"""How fast a model decodes over each kind of cache, and what it holds: `python -m eval.bench_decode --model llama-8b`.

`model.generate` continues a random prompt over one cache after the other, in one process:

- `hierarchical`: the history in host memory, a working set on the device, decode steps in a CUDA graph;
- `growing`: the same without a `max_cache_len`;
- `compiled`: with one and `compile=True`;
- `eager`: without a graph;
- `resident`: the same selection and attention with the whole history on the device, which is what the copies cost;
- `no-io`: the hierarchical cache without its copies (the tokens are wrong then), what the mechanism costs;
- `dynamic`, `offloading`: transformers' `DynamicCache`, and the same with every layer fetched from host memory;
- `static`: transformers' `StaticCache`, whose decode steps `generate` compiles and captures by itself;
- `floor`: no cache but the forward of one token in a CUDA graph, over a static cache so short that attention costs next
  to nothing: what is left of a step when all that a cache does is free;
- `compiled-floor`: the same of a forward that was compiled as a whole, as the layers of `compiled` are.

A step ends when its logits are there: a logits processor records a CUDA event (a few microseconds of the host; nothing
waits for it), and times are between events. The first is that of the prompt. Every row has a run to warm up, then
`--repeat` runs whose steps are pooled. Counters are of a whole run, whose first step finds an empty device buffer.
A run that fails, above all for want of memory, is a row that says why.

Peaks of memory are of what PyTorch has allocated, over the prompt and after it; `rest` is what the decode steps hold
besides weights and cache. The pools of CUDA graphs are reserved apart from that. `host_allocation_s` of the time to
the first token is spent on getting and pinning host memory.

Random weights spread their selections over the whole history as no trained model does. With `--overlap 0.85` a step's
selection is the last step's but for 15%, which are drawn afresh from the history; the algorithm still scores, so that
its time counts. One copy a step is what that costs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
)

from eval.common import DTYPES, TINY_MODELS, environment, load_model, quiet, write_results
from hf_hisparse import HierarchicalSparseCache, ops, unpatch_model
from hf_hisparse.coordinator import SparseCoordinator
from hf_hisparse.memory import Memory, pinned
from hf_hisparse.models import cache_argument, regional
from hf_hisparse.ops import cuda
from hf_hisparse.trace import Trace


_8B = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 1 << 20,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-8b": (
        "llama",
        _8B
        | {
            "vocab_size": 128256,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
    "qwen3-8b": (
        "qwen3",
        _8B
        | {
            "vocab_size": 151936,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    # Attention and indexer at full width; all four layers have the dense MLP of the first three.
    "deepseek-v32-4layer": (
        "deepseek_v32",
        {
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 4,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "head_dim": 64,
            "index_topk": 2048,
            "index_head_dim": 128,
            "index_n_heads": 64,
            "max_position_embeddings": 1 << 20,
        },
    ),
    "tiny": TINY_MODELS["llama-tiny"],
}
"""Models with random weights by name: `(model_type, config)`."""

CACHES: dict[str, Callable[[Any, int, dict[str, Any]], Cache]] = {
    "hierarchical": lambda model, length, options: HierarchicalSparseCache(model, **options, max_cache_len=length),
    "growing": lambda model, length, options: HierarchicalSparseCache(model, **options),
    "compiled": lambda model, length, options: HierarchicalSparseCache(
        model, **options, max_cache_len=length, compile=True
    ),
    "eager": lambda model, length, options: HierarchicalSparseCache(model, **options, cuda_graph=False),
    "resident": lambda model, length, options: HierarchicalSparseCache(
        model, **options, max_cache_len=length, offload=False
    ),
    "no-io": lambda model, length, options: HierarchicalSparseCache(model, **options, max_cache_len=length),
    "dynamic": lambda model, length, options: DynamicCache(config=_text_config(model)),
    "offloading": lambda model, length, options: DynamicCache(config=_text_config(model), offloading=True),
    "static": lambda model, length, options: StaticCache(config=_text_config(model), max_cache_len=length),
}
"""What makes each cache, from a model, the tokens that it is to hold, and the options of ours."""

FLOORS = {"floor": False, "compiled-floor": True}
"""Rows without a cache, and whether their forward is compiled."""

OWN = "the algorithm's"
"""The selection of a run without a script."""
WARM_TOKENS = 8
"""New tokens of the run that warms up: a compiled step is captured within them."""


def _text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def make_model(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """A model of `SHAPES` with random weights, made on the device; or whatever `eval.common.load_model` knows."""
    if name not in SHAPES:
        return load_model(name, device, dtype)[0]
    model_type, options = SHAPES[name]
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **options), dtype=dtype).eval()


# ---- what is measured ------------------------------------------------------------------------------------------------


class Clock(LogitsProcessor):
    """Marks the beginning of a run and the end of every step, and keeps the peaks of memory of prompt and decode."""

    def __init__(self, device: torch.device):
        self.device = device
        self.peaks: list[int] = []
        """Bytes allocated at most: over the prompt, and after it."""
        self._marks: list[Any] = []

    def start(self) -> None:
        self._marks, self.peaks = [], []
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        self._mark()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._mark()
        if not self.peaks:
            self._take_peak()
        return scores

    def stop(self) -> list[float]:
        """Seconds of each step, the prompt's first."""
        self._take_peak()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return [1e-3 * a.elapsed_time(b) for a, b in zip(self._marks, self._marks[1:], strict=False)]
        return [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]

    def _mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def _take_peak(self) -> None:
        if self.device.type == "cuda":
            self.peaks.append(torch.cuda.max_memory_allocated(self.device))
            torch.cuda.reset_peak_memory_stats(self.device)


class Scripted(LogitsProcessor, ABC):
    """Replaces what the algorithms select by something that is known before.

    The algorithms still score, so that their time counts. A step's selections are copied to where the decode steps
    read them before it begins, by one kernel for all layers.

    Args:
        device: Of the model.
    """

    first = 0
    """What the first forward counts as."""

    def __init__(self, device: torch.device):
        self.device = device
        self.step = 0
        self._scripts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """By rows and items that a layer selects: the selections of every step, and those of this one."""

    @property
    @abstractmethod
    def description(self) -> str:
        """What is selected, in words."""

    @abstractmethod
    def table(self, memory: Memory, tokens: int, k: int) -> Tensor:
        """The selections of every step, `[steps, layers, rows, k]` int32, both of which are taken in turn where there
        are more.

        Args:
            memory: Where a layer's history lies.
            tokens: How long that is.
            k: Items to select.
        """

    def attach(self, cache: Cache) -> None:
        """Takes the place of the algorithms of a new cache of ours."""
        self._go_to(self.first)
        coordinators = [layer.coordinator for layer in cache.layers if hasattr(layer, "coordinator")]
        for number, coordinator in enumerate(coordinators):
            own = coordinator.algorithm.retrieve_topk
            coordinator.algorithm.retrieve_topk = partial(self._select, number, coordinator, own)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._go_to(self.step + 1)
        return scores

    def _go_to(self, step: int) -> None:
        self.step = step
        for script, now in self._scripts.values():
            now.copy_(script[min(step, len(script) - 1)])

    def _select(self, layer: int, coordinator: SparseCoordinator, own: Callable[..., Tensor], *args: Any) -> Tensor:
        selection, memory = own(*args), coordinator.memory
        if memory is None or selection[..., 0].numel() != memory.rows:
            return selection  # A short history, or a prompt whose every query selects.
        k = selection.shape[-1]
        if (memory.rows, k) not in self._scripts:
            table = self.table(memory, coordinator.length, k).to(self.device)
            script = table[:, :, torch.arange(memory.rows, device=self.device) % table.shape[2]]
            self._scripts[memory.rows, k] = script, script[self.step].clone()
        _, now = self._scripts[memory.rows, k]
        return now[layer % len(now)].view(selection.shape)


class Overlapping(Scripted):
    """Windows that slide over a random order of the history, in ascending order as a top-k is.

    All rows and layers, whose histories lie apart, select the same items.

    Args:
        overlap: The share of a selection that is in the next one too.
        steps: The most tokens that a run generates.
        device: Of the model.
    """

    def __init__(self, overlap: float, steps: int, device: torch.device):
        super().__init__(device)
        self.overlap, self.steps = overlap, steps

    @property
    def description(self) -> str:
        return f"{self.overlap:.0%} kept from step to step"

    def table(self, memory: Memory, tokens: int, k: int) -> Tensor:
        items = memory.layout.items(tokens)
        first = (k - round(self.overlap * k)) * torch.arange(self.steps, device=self.device).unsqueeze(1)
        order = torch.randperm(items, dtype=torch.int32, device=self.device)
        return order[(first + torch.arange(k, device=self.device)) % items].sort(-1).values[:, None, None]


class Replaying(Scripted):
    """The selections of a trace, whose layers and rows are taken in turn where there are more.

    Args:
        trace: What is replayed.
        steps: The most tokens that a run generates.
        device: Of the model.

    Raises:
        ValueError: If the trace is of fewer steps.
    """

    first = -1

    def __init__(self, trace: Trace, steps: int, device: torch.device):
        super().__init__(device)
        if trace.steps < steps - 1:
            raise ValueError(f"the trace has {trace.steps} decode steps, and {steps - 1} are generated; record more")
        self.trace = trace

    @property
    def description(self) -> str:
        sizes = f"{len(self.trace.layers)} layers of {self.trace.layers[0].selections.shape[1]} rows"
        return f"a trace of {self.trace.model}, {self.trace.algorithm}, {sizes}, {self.trace.tokens[0] - 1} tokens"

    def table(self, memory: Memory, tokens: int, k: int) -> Tensor:
        page_size = memory.layout.page_size
        for one in self.trace.layers:
            recorded = one.selections.shape[2]
            if (recorded, one.page_size) != (k, page_size):
                raise ValueError(
                    f"the trace selects {recorded} items of {one.page_size} tokens, and the model {k} of {page_size}; "
                    f"use `--top-k {recorded * one.page_size} --page-size {one.page_size}`"
                )
        if tokens < self.trace.tokens[0] - 1:
            raise ValueError(f"the trace is of {self.trace.tokens[0] - 1} tokens; use a `--context` of that or more")
        return torch.stack([torch.from_numpy(one.selections) for one in self.trace.layers], dim=1)


@contextlib.contextmanager
def timed_allocations() -> Iterator[list[float]]:
    """Within it, the seconds that each allocation of host memory takes are appended to what it gives."""
    seconds: list[float] = []
    allocate = pinned.allocate

    def timed(nbytes: int, device: torch.device) -> pinned.Region:
        begin = time.perf_counter()
        memory = allocate(nbytes, device)
        seconds.append(time.perf_counter() - begin)
        return memory

    with mock.patch.object(pinned, "allocate", timed):
        yield seconds


def nbytes(tensors: Iterable[Any], device: torch.device) -> int:
    """Bytes of those that are tensors on a device."""
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor) and tensor.device == device)


def bytes_held(cache: Cache, device: torch.device) -> dict[str, int]:
    """Bytes of a cache: dense keys and values, representation and device buffer on the device, history on the host."""
    held = dict.fromkeys(("kv_bytes", "representation_bytes", "buffer_bytes", "host_bytes"), 0)
    for layer in cache.layers:
        coordinator = getattr(layer, "coordinator", None)
        if coordinator is None:
            held["kv_bytes"] += nbytes(vars(layer).values(), device)
            if device.type != "cpu":
                held["host_bytes"] += nbytes(vars(layer).values(), torch.device("cpu"))
            continue
        representation = coordinator.algorithm.nbytes
        history = coordinator.slots is None or coordinator.memory is None
        held["representation_bytes"] += representation
        held["kv_bytes" if history else "buffer_bytes"] += coordinator.device_bytes - representation
        held["host_bytes"] += coordinator.host_bytes
    return held


def graph_pool_bytes(device: torch.device) -> int:
    """Bytes reserved by the memory pools of CUDA graphs."""
    if device.type != "cuda":
        return 0
    segments = torch.cuda.memory_snapshot()
    return sum(part["total_size"] for part in segments if tuple(part.get("segment_pool_id", (0, 0))) != (0, 0))


def bytes_moved(name: str, cache: Any, held: dict[str, int], steps: int) -> float:
    """Bytes fetched from host memory a decode step: counted for our caches, and all that an offloading cache holds."""
    if isinstance(cache, HierarchicalSparseCache):
        return cache.stats().bytes_moved / max(steps, 1)
    return float(held["kv_bytes"] + held["host_bytes"]) if name == "offloading" else 0.0


class Bench:
    """A model, and how a run over a cache is measured.

    Args:
        model: A causal language model.
        new_tokens, repeat: Tokens that a run generates, and timed runs a row.
        options: As for `HierarchicalSparseCache`.
        script: Makes what takes the place of the algorithm's selection in a run of so many tokens; None for nothing.
        chunk: Tokens of the prompt that are read at once; None for all.
    """

    def __init__(
        self,
        model: Any,
        new_tokens: int,
        repeat: int,
        options: dict[str, Any],
        script: Callable[[int], Scripted] | None = None,
        chunk: int | None = None,
    ):
        self.model, self.new_tokens, self.repeat, self.options = model, new_tokens, repeat, options
        self.chunk = chunk
        self.device: torch.device = model.device
        self.script = script
        self.weights_bytes = nbytes((*model.parameters(), *model.buffers()), self.device)

    def row(self, name: str, context: int, batch: int) -> dict[str, Any]:
        """The measured row of one cache, or one that says why there is none."""
        self._clean()
        row = {"cache": name, "context": context, "batch": batch, "new_tokens": self.new_tokens}
        try:
            return row | (self._floor(name, batch) if name in FLOORS else self._measure(name, context, batch))
        except Exception as error:  # The rows that were measured, and those to come, do not depend on it.
            short = isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in str(error).lower()
            message = " ".join(str(error).split())[:300]
            return row | {"error": f"out of memory: {message}" if short else f"{type(error).__name__}: {message}"}

    def _floor(self, name: str, batch: int) -> dict[str, Any]:
        if self.device.type != "cuda":
            raise ValueError("a CPU has no CUDA graphs")
        length, replays = 256, 100
        cache = StaticCache(config=_text_config(self.model), max_cache_len=length)
        ids = torch.ones(batch, 1, dtype=torch.int64, device=self.device)
        position = torch.full((1, 1), length // 2, device=self.device)

        def step(forward: Callable[..., Any]) -> None:
            forward(ids, position_ids=position, use_cache=True, **{cache_argument(self.model): cache})

        stream, graph = torch.cuda.Stream(self.device), torch.cuda.CUDAGraph()
        with torch.no_grad():
            with torch.cuda.stream(stream):
                step(self.model)  # Makes what the cache holds.
                forward = torch.compile(self.model, **regional.OPTIONS) if FLOORS[name] else self.model
                for _ in range(3):
                    step(forward)
            torch.cuda.synchronize(self.device)
            with torch.cuda.graph(graph, stream=stream):
                step(forward)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize(self.device)
        times = [begin.elapsed_time(end) for begin, end in pairwise(marks)]
        return {"steps": replays, "tpot_ms": statistics.median(times), "weights_bytes": self.weights_bytes}

    def _measure(self, name: str, context: int, batch: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(0)
        vocabulary = _text_config(self.model).vocab_size
        prompt = torch.randint(3, vocabulary, (batch, context), generator=generator).to(self.device)
        steps = max(self.new_tokens, WARM_TOKENS)
        make = partial(CACHES[name], self.model, context + steps, self.options)
        clock = Clock(self.device)
        script = None if self.script is None else self.script(steps)
        cache: Any = None
        first, rest, peaks, allocations = [], [], [], []
        with self._copying(name), timed_allocations() as allocated:
            for run in range(self.repeat + 1):
                if cache is not None and name == "static":
                    cache.reset()  # Its addresses are in the captured graph.
                else:
                    cache = None
                    gc.collect()
                    cache = make()
                    if script is not None:
                        script.attach(cache)
                processors: list[LogitsProcessor] = [clock] if script is None else [clock, script]
                allocated.clear()
                clock.start()
                self._generate(prompt, cache, WARM_TOKENS if run == 0 else self.new_tokens, processors)
                seconds = clock.stop()
                if run > 0:
                    first.append(seconds[0])
                    rest += seconds[1:]
                    peaks.append(clock.peaks)
                    allocations.append(sum(allocated))
            row = self._summary(name, cache, batch, first, rest, peaks, allocations)
        if isinstance(cache, HierarchicalSparseCache):
            row["selection"] = OWN if script is None else script.description
        return row

    def _summary(
        self,
        name: str,
        cache: Any,
        batch: int,
        first: list[float],
        rest: list[float],
        peaks: list[list[int]],
        allocations: list[float],
    ) -> dict[str, Any]:
        row: dict[str, Any] = {"ttft_s": statistics.median(first), "ttft_all_s": first, "steps": len(rest)}
        if rest:
            quantiles = torch.tensor(rest, dtype=torch.float64).quantile(torch.tensor([0.5, 0.99, 0.999]).double())
            names = ("tpot_ms", "tpot_p99_ms", "tpot_p999_ms")
            row |= {name: 1e3 * value for name, value in zip(names, quantiles.tolist(), strict=True)}
            row["tokens_per_s"] = batch / statistics.fmean(rest)
        row["host_allocation_s"] = statistics.median(allocations)
        held = bytes_held(cache, self.device)
        if isinstance(cache, HierarchicalSparseCache):
            row["hit_rate"] = cache.stats().hit_rate
        row["bytes_moved_a_step"] = bytes_moved(name, cache, held, self.new_tokens - 1)
        row |= {"weights_bytes": self.weights_bytes, **held, "graph_pool_bytes": graph_pool_bytes(self.device)}
        if self.device.type == "cuda":
            prefill, decode = (max(column) for column in zip(*peaks, strict=True))
            known = ("weights_bytes", "kv_bytes", "representation_bytes", "buffer_bytes")
            row |= {"peak_prefill_bytes": prefill, "peak_decode_bytes": decode}
            row["rest_bytes"] = decode - sum(row[name] for name in known)
        return row

    def _generate(self, prompt: Tensor, cache: Cache, new_tokens: int, processors: list[LogitsProcessor]) -> None:
        self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            logits_processor=LogitsProcessorList(processors),
            prefill_chunk_size=self.chunk,
            **{cache_argument(self.model): cache},
        )

    @contextlib.contextmanager
    def _copying(self, name: str) -> Iterator[None]:
        """Without copies, for `no-io`; otherwise as it is."""
        if name != "no-io":
            yield
            return
        if self.device.type != "cuda" or cuda.unavailable(self.device.index or 0):
            raise ValueError("only the CUDA kernels can leave the copies out")
        with mock.patch.object(ops, "swap_in", cuda.swap_in_without_copy):
            yield

    def _clean(self) -> None:
        """Leaves nothing of what ran before on the model or the device: hooks, compiled steps, free memory."""
        unpatch_model(self.model)
        torch.compiler.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


# ---- what is shown ---------------------------------------------------------------------------------------------------

COLUMNS: dict[str, tuple[str, float]] = {
    "cache": ("", 0),
    "context": ("", 0),
    "batch": ("", 0),
    "ttft_s": ("s to first", 1),
    "tpot_ms": ("ms a token", 1),
    "tpot_p99_ms": ("P99", 1),
    "tpot_p999_ms": ("P999", 1),
    "tokens_per_s": ("tokens/s", 1),
    "hit_rate": ("hit rate", 1),
    "bytes_moved_a_step": ("MiB a step", 2**20),
    "peak_prefill_bytes": ("prefill GiB", 2**30),
    "peak_decode_bytes": ("decode GiB", 2**30),
    "kv_bytes": ("KV GiB", 2**30),
    "representation_bytes": ("scored GiB", 2**30),
    "buffer_bytes": ("buffer GiB", 2**30),
    "graph_pool_bytes": ("graphs GiB", 2**30),
    "host_bytes": ("host GiB", 2**30),
}
"""What is printed of a row: its heading, if it is not the field's name, and the unit it is divided by; 0 as it is."""


def show(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Prints the rows as a table while they come."""
    print(" ".join(f"{head or name:>12}" for name, (head, _) in COLUMNS.items()), flush=True)
    for row in rows:
        values = [(row.get(name), unit) for name, (_, unit) in COLUMNS.items() if "error" not in row or unit == 0]
        cells = ["" if value is None else f"{value / unit:.3f}" if unit else str(value) for value, unit in values]
        print(" ".join([*(f"{cell:>12}" for cell in cells), row.get("error", "")]).rstrip(), flush=True)
        yield row


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Time a token against context, if matplotlib is there."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = [row for row in rows if "tpot_ms" in row]
    batches = sorted({row["batch"] for row in measured})
    figure, panels = pyplot.subplots(1, len(batches) or 1, figsize=(5.5 * (len(batches) or 1), 4.5), squeeze=False)
    for panel, batch in zip(panels[0], batches, strict=False):
        for name in dict.fromkeys(row["cache"] for row in measured):
            mine = [row for row in measured if (row["cache"], row["batch"]) == (name, batch)]
            panel.plot(
                [row["context"] for row in mine], [row["tpot_ms"] for row in mine], "-o", markersize=3, label=name
            )
        panel.set(title=f"batch {batch}", xlabel="tokens of context", ylabel="ms a token", xscale="log", yscale="log")
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, and returns the exit status: 1 if a row failed otherwise than for want of memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="llama-8b", help=f"{', '.join(SHAPES)}, or any that is on the hub or on disk"
    )
    parser.add_argument("--context", type=int, nargs="+", default=[32768], help="tokens of the prompt")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3, help="timed runs a row, after one that warms up")
    parser.add_argument("--caches", nargs="+", choices=[*CACHES, *FLOORS], help="default: all that the device has")
    parser.add_argument(
        "--overlap", type=float, help="share of a selection that the next one keeps (default: the model's)"
    )
    parser.add_argument("--prefill-chunk-size", type=int, help="tokens of the prompt that are read at once")
    parser.add_argument("--trace", type=Path, help="recorded selections to replay: a file that `Trace.save` wrote")
    parser.add_argument("--memory-budget", type=float, help="GiB of the device that may be used, as of a smaller one")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--buffer-size", type=int, help="tokens on the device a KV head")
    parser.add_argument("--page-size", type=int)
    parser.add_argument("--algorithm", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument(
        "--output", type=Path, help="default: eval/results/bench_decode-MODEL.json; also names the plot"
    )
    args = parser.parse_args(arguments)
    quiet()
    if args.overlap is not None and not 0 <= args.overlap <= 1:
        parser.error(f"--overlap {args.overlap}: a share lies between 0 and 1")
    if args.overlap is not None and args.trace is not None:
        parser.error("--overlap and --trace both say what is selected; leave one out")
    if min(args.repeat, args.new_tokens, *args.context, *args.batch) < 1:
        parser.error("--repeat, --new-tokens, --context and --batch are at least 1")

    device = torch.device(args.device)
    if args.memory_budget is not None and device.type != "cuda":
        parser.error(f"--memory-budget {args.memory_budget:g} is of a CUDA device, and --device is {device}")
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
        if args.memory_budget is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, args.memory_budget * 2**30 / total), device)
    names = args.caches or (
        [*CACHES, *FLOORS] if device.type == "cuda" else ["hierarchical", "resident", "dynamic", "static"]
    )
    dtype = getattr(torch, args.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    options = {name: getattr(args, name) for name in ("top_k", "buffer_size", "page_size", "algorithm", "backend")}
    script: Callable[[int], Scripted] | None = None
    if args.overlap is not None:
        script = partial(Overlapping, args.overlap, device=device)
    if args.trace is not None:
        try:
            trace = Trace.load(args.trace)
        except (OSError, ValueError) as error:
            parser.error(f"--trace: {error}")
        script = partial(Replaying, trace, device=device)
        options["top_k"] = options["top_k"] or trace.top_k
        options["page_size"] = options["page_size"] or next((layer.page_size for layer in trace.layers), None)
    try:
        model = make_model(args.model, device, dtype)
    except torch.OutOfMemoryError as error:
        raise SystemExit(f"{args.model}: the weights alone do not fit ({error})") from error
    bench = Bench(model, args.new_tokens, args.repeat, options, script, args.prefill_chunk_size)
    print(f"{args.model}, {str(dtype).removeprefix('torch.')}: {bench.weights_bytes / 2**30:.2f} GiB of weights\n")

    settings = [(context, batch, name) for batch in args.batch for context in args.context for name in names]
    output = args.output or Path(f"eval/results/bench_decode-{Path(args.model).name}.json")
    meta = {
        "environment": environment(device),
        "model": args.model,
        "weights": "random" if args.model in SHAPES or args.model in TINY_MODELS else "pretrained",
        "dtype": str(dtype).removeprefix("torch."),
        "selection": OWN if script is None else str(args.trace or f"{args.overlap:.0%} kept from step to step"),
        "memory_budget_gib": args.memory_budget,
        "prefill_chunk_size": args.prefill_chunk_size,
        "repeat": args.repeat,
        **options,
    }
    rows: list[dict[str, Any]] = []
    for row in show(bench.row(name, context, batch) for context, batch, name in settings):
        rows.append(row)
        write_results(output, rows, **meta)  # What is measured stays, whatever comes after it.
    if len(args.context) > 1:
        plot(rows, output.with_suffix(".png"))
    return int(any("error" in row and not row["error"].startswith("out of memory") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
