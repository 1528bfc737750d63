"""How fast a step selects, and what bounds it: `python -m eval.bench_select`.

A step runs in a replayed CUDA graph between two CUDA events, over the representations of several layers in turn, so
that they come from memory. Times are medians. In the same run:

- `torch`: what is replaced, the same op in PyTorch: for the top-k `torch.topk` alone, without the masks and the sort
  that a selection needs besides;
- `floor`: the bytes that must be read, at the rate of a large copy;
- `empty`: an empty kernel, what a launch between two events costs. All times but the next include it;
- `back to back`: a step of a graph that runs every step, one after the other;
- the kernels of a score, each alone.

`--shapes` instead times the top-k in every launch shape, which is what `hf_hisparse.ops.heuristics` was chosen by.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.bench_kernels import DEVICE, STEPS, Bench
from eval.common import environment, write_results
from hf_hisparse import ops
from hf_hisparse.algorithms import ALGORITHMS, KeyScoring, LightningIndexer
from hf_hisparse.ops import cuda, reference
from hf_hisparse.ops.heuristics import MAX_CLUSTER, top_k_blocks


TOKENS = 1 << 17
TOP_K = 2048
KV_HEADS, GROUP, WIDTH = 8, 4, 128
INDEX_HEADS = 64
"""Of DeepSeek-V3.2's indexer, whose width is the same."""
LAYERS = 4
"""Their representations exceed the L2 cache."""

TOP_K_SIZES = [(1, TOKENS, 2048), (8, TOKENS // 32, 64), (8, TOKENS // 2, 1024), (64, TOKENS // 2, 1024)]
"""Rows, items and k: the DSA indexer's, Quest's, RaBitQ's, and RaBitQ's at batch 8."""
COMPLETE, SELECT = ("softmax_mass", ()), ("top_k", ("MASS",))
KERNELS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "quest": (("score_quest", ()),),
    "rabitq": (("score_rabitq", (f"BYTES={WIDTH // 8}",)),),
}
"""Of the first half of a score."""


@contextlib.contextmanager
def only(name: str, macros: tuple[str, ...]) -> Iterator[list[str]]:
    """Leaves all kernels out but one, whose name is in what it gives as often as it was launched."""
    launch, wanted, launched = cuda._launch, cuda._kernel(name, DEVICE.index, macros), list[str]()

    def launch_one(kernel: cuda.Kernel, *arguments: Any, cluster: int = 1) -> None:
        if kernel is wanted:
            launched.append(name)
            launch(kernel, *arguments, cluster=cluster)

    cuda._launch = launch_one
    try:
        yield launched
    finally:
        cuda._launch = launch


class Layer:
    """One layer's representation of random keys, and its queries."""

    def __init__(self, method: str, batch: int):
        rows = KV_HEADS * batch
        self.algorithm: KeyScoring = ALGORITHMS[method]()
        keys = torch.randn(rows, TOKENS, WIDTH, dtype=torch.bfloat16, device=DEVICE)
        self.lengths = torch.full((rows,), TOKENS, device=DEVICE)
        self.query = 2 * torch.randn(rows, GROUP, WIDTH, dtype=torch.bfloat16, device=DEVICE)
        self.items = TOKENS // self.algorithm.page_size
        for row in range(rows):  # A row at a time: a construction holds float32 keys.
            one = ALGORITHMS[method]()
            length = self.lengths[:1]
            one.construct_representations(keys[row : row + 1], 0, length, torch.zeros_like(length))
            self._write(one, row)

    def _write(self, one: KeyScoring, row: int) -> None:
        for name in ("representations", "centres"):
            for key, tensor in getattr(getattr(one, name, None), "tensors", {}).items():
                held = getattr(self.algorithm, name).tensors
                if key not in held:
                    held[key] = tensor.new_empty(len(self.lengths), *tensor.shape[1:])
                held[key][row] = tensor[0]

    def score(self) -> Tensor:
        return self.algorithm.score(self.query, self.items, WIDTH**-0.5, self.lengths)

    def retrieve(self) -> Tensor:
        k = TOP_K // self.algorithm.page_size
        return self.algorithm.retrieve_topk(self.query, k, self.items, WIDTH**-0.5, self.lengths)


class IndexedLayer:
    """One layer's indexer keys, and the queries of a step as the model's indexer makes them, in float32."""

    def __init__(self, batch: int):
        self.algorithm = LightningIndexer()
        keys = torch.randn(batch, TOKENS, WIDTH, dtype=torch.bfloat16, device=DEVICE)
        self.algorithm.representations.write({"keys": keys}, 0)
        self.query = torch.randn(batch, 1, INDEX_HEADS, WIDTH, device=DEVICE).bfloat16().float()
        self.weights = torch.randn(batch, 1, INDEX_HEADS, device=DEVICE)
        self.positions = torch.full((batch,), TOKENS - 1, device=DEVICE)
        self.asked = self.query.bfloat16()

    def score(self) -> Tensor:
        keys = self.algorithm.representations["keys"]
        return ops.score_indexer(self.asked, self.weights, keys, TOKENS, WIDTH**-0.5, self.positions)

    def retrieve(self) -> Tensor:
        return self.algorithm.retrieve_topk(self.query, self.weights, WIDTH**-0.5, self.positions, TOKENS, TOP_K)


def measure(bench: Bench, work: Sequence[Callable[[], object]]) -> dict[str, float]:
    """The times of steps that take turns."""
    for step in work:
        step()
    steps = [work[i % len(work)] for i in range(STEPS)]
    return {"us": bench.time(steps), "back_to_back_us": bench.time_back_to_back(steps, lambda: None)}


def bench_top_k(bench: Bench, rate: float) -> Iterator[dict[str, Any]]:
    for rows, items, k in TOP_K_SIZES:
        scores = [torch.randn(rows, items, device=DEVICE).mul(4).softmax(1) for _ in range(LAYERS)]
        plain = measure(bench, [partial(torch.topk, each, k, sorted=False) for each in scores])
        common = {"op": "top_k", "rows": rows, "items": items, "k": k}
        floor = scores[0].nbytes / rate
        yield (
            common
            | measure(bench, [partial(ops.top_k, each, k) for each in scores])
            | {
                "torch_us": plain["us"],
                "floor_us": floor,
            }
        )


def bench_shapes(bench: Bench) -> Iterator[dict[str, Any]]:
    multiprocessors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    for rows, items, k in TOP_K_SIZES:
        scores = [torch.randn(rows, items, device=DEVICE).mul(4).softmax(1) for _ in range(LAYERS)]
        chosen = top_k_blocks(rows, items, multiprocessors, True)
        blocks = 1
        while blocks <= MAX_CLUSTER:
            times = measure(bench, [partial(cuda.top_k, each, k, blocks=blocks) for each in scores])
            yield {"op": "top_k", "rows": rows, "items": items, "k": k, "blocks": blocks, **times} | {
                "chosen": "*" if blocks == chosen else ""
            }
            blocks *= 2


def bench_scores(bench: Bench, rate: float, batches: Iterable[int]) -> Iterator[dict[str, Any]]:
    slow = {"quest": reference.score_quest, "rabitq": reference.score_rabitq}
    for method in KERNELS:
        for batch in batches:
            layers = [Layer(method, batch) for _ in range(LAYERS if batch == 1 else 1)]
            common = {"setting": method, "rows": KV_HEADS * batch, "items": layers[0].items}
            floor = layers[0].algorithm.nbytes / rate
            scores = [layer.score for layer in layers]
            with slow[method].set_kernel_enabled("cuda", enabled=False):
                plain = measure(bench, scores)["us"]
            yield common | {"op": "score"} | measure(bench, scores) | {"torch_us": plain, "floor_us": floor}
            retrieve = [layer.retrieve for layer in layers]
            parts = [(*kernel, scores) for kernel in (*KERNELS[method], COMPLETE)] + [(*SELECT, retrieve)]
            for name, macros, work in parts:
                with only(name, macros) as launched:
                    times = measure(bench, work)
                if launched:  # Where a block cannot hold what it completes, other kernels do that.
                    yield common | {"op": "complete and select" if work is retrieve else name} | times
            k = TOP_K // layers[0].algorithm.page_size
            times = measure(bench, retrieve)
            yield common | {"op": "retrieve", "k": k, "floor_us": floor} | times
            del layers, scores, retrieve, parts


def bench_indexer(bench: Bench, rate: float, batches: Iterable[int]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        layers = [IndexedLayer(batch) for _ in range(LAYERS)]
        common = {"setting": "indexer", "rows": batch, "items": TOKENS, "floor_us": layers[0].algorithm.nbytes / rate}
        scores = [layer.score for layer in layers]
        with ops.score_indexer.set_kernel_enabled("cuda", enabled=False):
            plain = measure(bench, scores)["us"]
        yield common | {"op": "score"} | measure(bench, scores) | {"torch_us": plain}
        times = measure(bench, [layer.retrieve for layer in layers])
        yield common | {"op": "retrieve", "k": TOP_K} | times


def show(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Prints the rows as a table while they come."""
    columns = "op setting rows items k blocks chosen us back_to_back_us torch_us floor_us".split()
    print(" ".join(f"{name.removesuffix('_us').replace('_', ' '):>12}" for name in columns))
    for row in rows:
        cells = [row.get(name, "") for name in columns]
        print(" ".join(f"{cell:12.1f}" if isinstance(cell, float) else f"{cell:>12}" for cell in cells), flush=True)
        yield row


def copy_rate(bench: Bench) -> float:
    """Bytes a microsecond that a large copy on the device reads and writes."""
    source = torch.zeros(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / bench.time_stream(partial(target.copy_, source))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="batch 1 only")
    parser.add_argument("--shapes", action="store_true", help="time the top-k in every launch shape instead")
    parser.add_argument("--output", type=Path, default=Path("eval/results/bench_select.json"))
    arguments = parser.parse_args()
    start = time.perf_counter()
    bench = Bench(histories=1, rounds=4)
    torch.manual_seed(0)
    with torch.no_grad():
        empty = bench.time([partial(bench.empty, 1, 32, 0, 0)] * STEPS)
        rate = copy_rate(bench)
        print(f"an empty kernel {empty:.1f} us, a large copy {rate / 1e6:.2f} TB/s")
        if arguments.shapes:
            rows = list(show(bench_shapes(bench)))
        else:
            rows = list(show(bench_top_k(bench, rate)))
            batches = (1,) if arguments.quick else (1, 8)
            rows += show(bench_scores(bench, rate, batches))
            rows += show(bench_indexer(bench, rate, batches))
    write_results(arguments.output, rows, environment=environment(DEVICE), empty_us=empty, copy_bytes_per_us=rate)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
