"""How fast the kernels are, and what bounds them: `python -m eval.bench_kernels`.

A step runs in a replayed CUDA graph between two CUDA events, with a selection it has not seen. Times are medians, and
the share of items missed is what the counters say. There are two ways to go through a model: `one` layer's history
replayed, which stays in the address-translation caches, and the layers of a model in `turn`. In the same run:

- `gather`: a kernel that only reads as many missed items from the same histories, through registers or in bulk copies,
  in the best of several launch shapes;
- `no copy`: the swap-in without its copy, what the mechanism costs;
- `look up`: a kernel that only looks the selection up and writes what it finds, which no swap-in can do without;
- `empty`: an empty kernel, what a launch between two events costs. All times include it;
- `back to back`: a step of a graph that swaps in every step, one after the other;
- the link: one large copy each way.

`--shapes` instead times the swap-in in every launch shape, which is what `hf_hisparse.ops.heuristics` was chosen by.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.common import environment, write_results
from hf_hisparse import ops
from hf_hisparse.layout import ItemLayout
from hf_hisparse.memory.host_store import HostStore
from hf_hisparse.ops import cuda
from hf_hisparse.ops.heuristics import SwapInShape, direct_blocks, pieces, swap_in_shape


TOKENS = 1 << 17
STEPS, LAYERS = 32, 32
WARM_STEPS = 4
GATHER_SHAPES = [(4, 1024), (8, 1024), (16, 1024), (32, 1024), (64, 1024), (132, 256), (132, 1024), (528, 256)]
BULK_SHAPES = [(4, 64), (8, 32), (16, 32), (132, 16)]
DEVICE = torch.device("cuda", 0)

SOURCE = """
#include "copy.cuh"

extern "C" __global__ void empty(long long) {}

extern "C" __global__ void wait(long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - start < nanoseconds);
}

// Looks a selection up and writes what it finds, a block a row.
extern "C" __global__ void __launch_bounds__(1024, 1)
look_up(const int* selection, const int* item_slot, int* found, long long k, long long items) {
    const long long row = blockIdx.x;
    for (long long i = row * k + threadIdx.x; i < (row + 1) * k; i += blockDim.x) {
        const int item = selection[i];
        found[i] = item < 0 ? -1 : item_slot[row * items + item];
    }
}

// Copies items of 16-byte words from and to lists of addresses: all words laid end to end, each block an equal share,
// consecutive threads consecutive words, four under way a thread.
extern "C" __global__ void __launch_bounds__(1024, 1)
gather(const unsigned long long* sources, const unsigned long long* targets, long long items, long long item_bytes) {
    const unsigned words = item_bytes / 16, all = items * words, share = (all + gridDim.x - 1) / gridDim.x;
    const unsigned end = min(all, (blockIdx.x + 1) * share);
    for (unsigned first = blockIdx.x * share + threadIdx.x; first < end; first += 4 * blockDim.x) {
        uint4 held[4];
#pragma unroll
        for (unsigned i = 0; i < 4; ++i) {
            const unsigned at = first + i * blockDim.x;
            if (at < end) held[i] = __ldg(reinterpret_cast<const uint4*>(sources[at / words]) + at % words);
        }
#pragma unroll
        for (unsigned i = 0; i < 4; ++i) {
            const unsigned at = first + i * blockDim.x;
            if (at < end) reinterpret_cast<uint4*>(targets[at / words])[at % words] = held[i];
        }
    }
}

// The same in bulk copies, `pieces` an item, one under way a thread.
extern "C" __global__ void __launch_bounds__(1024, 1)
bulk_gather(
    const unsigned long long* sources, const unsigned long long* targets, long long items, long long item_bytes,
    long long pieces, long long piece_bytes
) {
    extern __shared__ __align__(128) char shared[];
    Mover mover(
        shared + threadIdx.x * piece_bytes,
        reinterpret_cast<unsigned long long*>(shared + blockDim.x * piece_bytes) + threadIdx.x
    );
    for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < items * pieces; i += gridDim.x * blockDim.x) {
        const long long item = i / pieces, begin = i % pieces * piece_bytes;
        const unsigned bytes = min(piece_bytes, item_bytes - begin);
        mover.load(sources[item] + begin, bytes);
        mover.store(targets[item] + begin, bytes);
        mover.free();
    }
    mover.finish();
}
"""


@dataclass(frozen=True)
class Setting:
    """A shape of model: `heads` rows a sequence, each with `k` items selected from `TOKENS` tokens."""

    name: str
    layout: ItemLayout
    heads: int
    k: int
    slots: int

    @property
    def items(self) -> int:
        return self.layout.items(TOKENS)

    @property
    def item_bytes(self) -> int:
        return 2 * self.layout.elements

    @property
    def items_per_slab(self) -> int:
        return 1 << (-(-(1 << 18) // self.item_bytes) - 1).bit_length()


LATENT = Setting("latent rows", ItemLayout.token(512, 64), 1, 2048, 4096)
PAGES = Setting("pages", ItemLayout.page_head(32, 128, 128), 8, 64, 128)
TOKENS_2 = Setting("2 tokens", ItemLayout.page_head(2, 128, 128), 8, 1024, 2048)


class Bench:
    """The machine: kernels, host memory, and how a step is timed."""

    def __init__(self, histories: int, rounds: int):
        self.rounds = rounds
        reason = cuda.unavailable(DEVICE.index)
        if reason is not None:
            raise SystemExit(f"the CUDA kernels cannot be used: {reason}")
        self.empty, self.spin, self.look_up, self.gather, self.bulk_gather = (
            cuda.Kernel(SOURCE, name, DEVICE.index) for name in ("empty", "wait", "look_up", "gather", "bulk_gather")
        )
        self.bulk_gather.allow_shared(96 << 10)
        self.bulk = torch.cuda.get_device_capability(DEVICE)[0] >= 9
        # The histories of every setting lie in the same memory, one after the other.
        self.store = HostStore(histories, LATENT.layout.elements, torch.bfloat16, DEVICE)
        self.store.reserve(LATENT.items)
        self.host = torch.empty(0, dtype=torch.uint8).set_(self.store.runs[0][0].untyped_storage())
        noise = torch.randint(256, (1 << 28,), dtype=torch.uint8, device=DEVICE)
        for piece in self.host.split(len(noise)):
            piece.copy_(noise[: len(piece)], non_blocking=True)
        torch.cuda.synchronize()
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        # A pool goes with its last graph; this one keeps it.
        self._anchor = self.capture(lambda: torch.zeros(1, device=DEVICE))
        self._events = [[torch.cuda.Event(enable_timing=True) for _ in range(STEPS)] for _ in "ab"]

    def table(self, setting: Setting, rows: int, layer: int) -> Tensor:
        """`[rows, slabs]` addresses of a layer's histories. Layers share memory only where there is not enough."""
        slab_bytes = setting.items_per_slab * setting.item_bytes
        slabs = -(-setting.items // setting.items_per_slab)
        histories = len(self.host) // (slabs * slab_bytes)
        history = (layer * rows + torch.arange(rows)) % histories
        return (self.host.data_ptr() + (history.unsqueeze(1) * slabs + torch.arange(slabs)) * slab_bytes).to(DEVICE)

    def capture(self, *steps: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """The steps as one graph."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            for step in steps:
                step()
            graph.capture_end()
        return graph

    def _replay(self, graphs: list[torch.cuda.CUDAGraph]) -> list[float]:
        torch.cuda.synchronize()
        self.spin(1, 32, 0, 4_000_000)  # Until everything is queued.
        for begin, graph, end in zip(self._events[0], graphs, self._events[1], strict=False):
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [1e3 * begin.elapsed_time(end) for begin, end, _ in zip(*self._events, graphs, strict=False)]

    def time(self, steps: Sequence[Callable[[], object]], refresh: Callable[[], object] = lambda: None) -> float:
        """The median time of a step, us, each a graph of its own. `refresh` makes the inputs of a round of steps."""
        graphs = [self.capture(step) for step in steps]
        times: list[float] = []
        for _ in range(self.rounds):
            refresh()
            times += self._replay(graphs)
        return statistics.median(times)

    def time_back_to_back(self, steps: Sequence[Callable[[], object]], refresh: Callable[[], object]) -> float:
        """The median time of a step, us, when one graph runs all of them."""
        graph = self.capture(*steps)
        times = []
        for _ in range(self.rounds):
            refresh()
            times += self._replay([graph])
        return statistics.median(times) / len(steps)

    def time_stream(self, work: Callable[[], object], repeats: int = 5) -> float:
        """The median time of work on the current stream, us."""
        times = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            torch.cuda.synchronize()
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            times.append(1e3 * begin.elapsed_time(end))
        return statistics.median(times)


class Layers:
    """The working sets of some layers, and what each selects next.

    A selection is the last one with its first `misses` items exchanged for ones that no buffer still holds, shuffled.
    """

    def __init__(self, bench: Bench, setting: Setting, batch: int, layers: int):
        self.setting, self.rows, self.layers = setting, setting.heads * batch, layers
        rows, slots, k = self.rows, setting.slots, setting.k
        like = partial(torch.full, device=DEVICE, dtype=torch.int32)
        self.tables = [bench.table(setting, rows, layer) for layer in range(layers)]
        self.buffers = [
            torch.zeros(rows, slots, setting.layout.elements, dtype=torch.bfloat16, device=DEVICE)
            for _ in range(layers)
        ]
        self.item_slot = [like((rows, setting.items), -1) for _ in range(layers)]
        self.slot_item = [like((rows, slots), -1) for _ in range(layers)]
        self.last_used = [like((rows, slots), 0) for _ in range(layers)]
        self.clock = [like((rows,), 0) for _ in range(layers)]
        self.totals = [torch.zeros(rows, 2, dtype=torch.int64, device=DEVICE) for _ in range(layers)]
        self.log = [like((rows, 256, 2), 0) for _ in range(layers)]
        self.progress = [like((rows, 2), 0) for _ in range(layers)]
        self.order = torch.rand(rows, setting.items, device=DEVICE).argsort(1).int()
        self.next = [layer * setting.items // layers for layer in range(layers)]
        self.current = [self.order[:, :k]] * layers
        self.misses = 0
        # The inputs of a round of steps.
        self.selections = like((STEPS, rows, k), -1)
        self.found = like((rows, k), -1)
        self.sources, self.targets = (torch.zeros(STEPS, rows * k, dtype=torch.int64, device=DEVICE) for _ in range(2))
        for misses, steps in ((k, 2), (k // 7, WARM_STEPS)):
            self.misses = misses
            for layer in range(layers):
                for _ in range(steps):
                    self.selections[0] = self._advance(layer)
                    self.swap_in(layer, 0)

    def _advance(self, layer: int) -> Tensor:
        """A layer's next selection."""
        setting = self.setting
        at = (self.next[layer] + torch.arange(self.misses, device=DEVICE)) % setting.items
        self.next[layer] += self.misses
        selection = torch.cat((self.order[:, at], self.current[layer][:, self.misses :]), dim=1)
        self.current[layer] = selection[:, torch.randperm(setting.k, device=DEVICE)]
        return self.current[layer]

    def select(self) -> None:
        """The selections of the next round of steps."""
        for step in range(STEPS):
            self.selections[step] = self._advance(step % self.layers)

    def list_gathers(self) -> None:
        """For a round of steps, as many random items a row as are missed, and slots to put them into."""
        setting, size = self.setting, self.setting.item_bytes
        count = self.rows * self.misses
        first_slot = torch.arange(self.rows, device=DEVICE).unsqueeze(1) * setting.slots
        for step in range(STEPS):
            layer = step % self.layers
            items = self.order[:, torch.randperm(setting.items, device=DEVICE)[: self.misses]].long()
            slots = first_slot + torch.randperm(setting.slots, device=DEVICE)[: self.misses]
            slab = self.tables[layer].gather(1, items // setting.items_per_slab)
            self.sources[step, :count] = (slab + items % setting.items_per_slab * size).flatten()
            self.targets[step, :count] = (self.buffers[layer].data_ptr() + slots * size).flatten()

    def swap_in(self, layer: int, step: int, op: Callable[..., Tensor] = ops.swap_in) -> None:
        op(
            self.selections[step],
            self.tables[layer],
            self.setting.items_per_slab,
            self.buffers[layer],
            self.item_slot[layer],
            self.slot_item[layer],
            self.last_used[layer],
            self.clock[layer],
            self.totals[layer],
            self.log[layer],
            self.progress[layer],
        )

    def append(self, layer: int, token: Tensor, position: Tensor) -> None:
        ops.append(
            token,
            position,
            self.setting.layout.page_size,
            list(self.setting.layout.widths),
            self.tables[layer],
            self.setting.items_per_slab,
            self.buffers[layer],
            self.item_slot[layer],
            self.slot_item[layer],
            self.last_used[layer],
            self.clock[layer],
        )

    def steps(self, op: Callable[..., Tensor] = ops.swap_in) -> list[Callable[[], object]]:
        """A round of swap-ins."""
        return [partial(self.swap_in, step % self.layers, step, op) for step in range(STEPS)]

    def look_ups(self, bench: Bench) -> list[Callable[[], object]]:
        """A round of look-ups."""
        sizes = (self.setting.k, self.setting.items)
        return [
            partial(
                bench.look_up,
                self.rows,
                1024,
                0,
                self.selections[step].data_ptr(),
                self.item_slot[step % self.layers].data_ptr(),
                self.found.data_ptr(),
                *sizes,
            )
            for step in range(STEPS)
        ]

    def gathers(self, bench: Bench) -> Iterator[tuple[str, list[Callable[[], object]]]]:
        """Rounds of gathers of what the swap-ins miss, by the launch shape."""
        size = self.setting.item_bytes
        lists = [(self.sources[step].data_ptr(), self.targets[step].data_ptr()) for step in range(STEPS)]
        sizes = (self.rows * self.misses, size)
        for blocks, threads in GATHER_SHAPES:
            yield f"{blocks}x{threads}", [partial(bench.gather, blocks, threads, 0, *both, *sizes) for both in lists]
        count, piece_bytes = pieces(size)
        for blocks, threads in BULK_SHAPES if bench.bulk else ():
            shared = threads * (piece_bytes + 8)
            yield (
                f"bulk {blocks}x{threads}",
                [
                    partial(bench.bulk_gather, blocks, threads, shared, *both, *sizes, count, piece_bytes)
                    for both in lists
                ],
            )

    def counted(self) -> int:
        """Misses so far."""
        return sum(int(totals[:, 1].sum()) for totals in self.totals)


def bench_swap_in(
    bench: Bench, settings: Iterable[tuple[Setting, int]], rates: list[float]
) -> Iterator[dict[str, Any]]:
    empty = bench.time([partial(bench.empty, 1, 32, 0, 0)] * STEPS)
    for setting, batch in settings:
        for way, count in (("one", 1), ("turn", LAYERS)):
            layers = Layers(bench, setting, batch, count)
            for rate in rates:
                layers.misses = round(rate * setting.k)
                before = layers.counted()
                swap_in = bench.time(layers.steps(), layers.select)
                back_to_back = bench.time_back_to_back(layers.steps(), layers.select)
                no_copy = bench.time(layers.steps(cuda.swap_in_without_copy), layers.select)
                missed = (layers.counted() - before) / (3 * bench.rounds * STEPS * layers.rows * setting.k)
                row = {
                    "op": "swap_in",
                    "setting": setting.name,
                    "item_bytes": setting.item_bytes,
                    "batch": batch,
                    "rows": layers.rows,
                    "k": setting.k,
                    "slots": setting.slots,
                    "layers": way,
                    "missed": missed,
                    "us": swap_in,
                    "no_copy_us": no_copy,
                    "back_to_back_us": back_to_back,
                    "look_up_us": bench.time(layers.look_ups(bench), layers.select),
                    "empty_us": empty,
                    "to_empty": swap_in / empty,
                }
                if layers.misses:
                    gathers = {shape: bench.time(steps, layers.list_gathers) for shape, steps in layers.gathers(bench)}
                    best = min(gathers, key=lambda name: gathers[name])
                    moved = missed * layers.rows * setting.k * setting.item_bytes
                    row |= {
                        "gather_us": gathers[best],
                        "gather_shape": best,
                        "to_gather": swap_in / gathers[best],
                        "gb_per_s": moved / swap_in / 1e3,
                    }
                yield row
            del layers


def bench_shapes(bench: Bench, settings: Iterable[tuple[Setting, int]], rates: list[float]) -> Iterator[dict[str, Any]]:
    for setting, batch in settings:
        layers = Layers(bench, setting, batch, LAYERS)
        properties = torch.cuda.get_device_properties(DEVICE)
        size = setting.item_bytes
        sizes = (layers.rows, setting.k, setting.slots, size)
        chosen = swap_in_shape(*sizes, properties.multi_processor_count, bench.bulk)
        for rate in rates:
            layers.misses = round(rate * setting.k)
            for movers, copiers in ((32, 0), (64, 0), (32, 4), (64, 4), (32, 8), (64, 8), (32, 16), (32, 32)):
                shape = SwapInShape(chosen.threads, movers, copiers)
                if copiers or layers.rows * direct_blocks(setting.k, size, movers) <= 1024:
                    op = partial(cuda.swap_in, shape=shape)
                    yield {
                        "op": "swap_in",
                        "setting": setting.name,
                        "rows": layers.rows,
                        "layers": "turn",
                        "missed": rate,
                        "shape": f"{copiers or 'direct'} {movers}",
                        "chosen": "*" if shape == chosen else "",
                        "us": bench.time(layers.steps(op), layers.select),
                    }
        del layers


def bench_append(bench: Bench, settings: Iterable[tuple[Setting, int]]) -> Iterator[dict[str, Any]]:
    for setting, batch in settings:
        layers = Layers(bench, setting, batch, LAYERS)
        token = torch.randn(layers.rows, sum(setting.layout.widths), device=DEVICE).bfloat16()
        position = torch.full((layers.rows,), TOKENS // 2, dtype=torch.int64, device=DEVICE)
        steps = [partial(layers.append, layer, token, position) for layer in range(LAYERS)]
        us = bench.time(steps, partial(position.add_, 1))
        yield {
            "op": "append",
            "setting": setting.name,
            "batch": batch,
            "rows": layers.rows,
            "layers": "turn",
            "us": us,
        }
        del layers


def bench_layers(bench: Bench) -> Iterator[dict[str, Any]]:
    """A whole layer out and back, and the link itself."""
    block = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    host = bench.host[: len(block)]
    for op, to, source in (("link out", host, block), ("link in", block, host)):
        us = bench.time_stream(partial(to.copy_, source, non_blocking=True))
        yield {"op": op, "us": us, "gb_per_s": block.nbytes / us / 1e3}
    del block
    for setting, batch in ((LATENT, 1), (LATENT, 8), (PAGES, 1)):
        rows = setting.heads * batch
        store = HostStore(rows, setting.layout.elements, torch.bfloat16, DEVICE)
        store.reserve(setting.items)
        items = torch.randn(rows, setting.items, setting.layout.elements, dtype=torch.bfloat16, device=DEVICE)

        def offload(store=store, items=items) -> None:
            store.write(items, 0)
            store.settle()

        for op, work in (("offload", offload), ("load", partial(store.read, 0, setting.items))):
            us = bench.time_stream(work)
            common = {"op": op, "setting": setting.name, "batch": batch, "rows": rows}
            yield common | {"us": us, "gb_per_s": items.nbytes / us / 1e3}
        del store, items


def show(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Prints the rows as a table while they come."""
    columns = (
        "op setting batch rows layers missed shape chosen us gather_us to_gather to_empty look_up_us no_copy_us "
        "back_to_back_us gb_per_s"
    ).split()
    head: list[str] = []
    for row in rows:
        used = [name for name in columns if name in row]
        if not set(used) <= set(head):
            head = used
            print("\n" + " ".join(f"{name.removesuffix('_us').replace('_', ' '):>12}" for name in head), flush=True)
        cells = [row.get(name, "") for name in head]
        print(" ".join(f"{cell:12.2f}" if isinstance(cell, float) else f"{cell:>12}" for cell in cells), flush=True)
        yield row


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Time against miss rate, if matplotlib is there."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row["op"] == "swap_in" and row["setting"] == LATENT.name]
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for panel, way, title in zip(
        panels, ("one", "turn"), ("one layer replayed", f"{LAYERS} layers in turn"), strict=True
    ):
        for number, batch in enumerate(sorted({row["batch"] for row in rows})):
            mine = [row for row in rows if row["batch"] == batch and row["layers"] == way]
            for name, style in (("us", "-o"), ("gather_us", "--"), ("no_copy_us", ":")):
                points = [(100 * row["missed"], row[name]) for row in mine if name in row]
                label = f"batch {batch}" if name == "us" else None
                panel.plot(*zip(*points, strict=True), style, color=f"C{number}", markersize=3, label=label)
        panel.set(title=title, xlabel="items missed, %", yscale="log")
        panel.legend()
    panels[0].set_ylabel("us")
    sizes = f"{LATENT.item_bytes} B items, k {LATENT.k}, buffer {LATENT.slots}, {TOKENS // 1024}K tokens"
    figure.suptitle(f"Swap-in (dashed: pure gather; dotted: without the copy): {sizes}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rates, less host memory")
    parser.add_argument("--shapes", action="store_true", help="time the swap-in in every launch shape instead")
    parser.add_argument(
        "--output", type=Path, default=Path("eval/results/bench_kernels.json"), help="also names the plot"
    )
    arguments = parser.parse_args()
    quick = arguments.quick
    start = time.perf_counter()
    bench = Bench(histories=96 if quick else 128, rounds=3 if quick else 4)
    print(f"{bench.host.nbytes / 2**30:.1f} GiB of host memory in {time.perf_counter() - start:.1f} s")

    settings = [*((LATENT, batch) for batch in (1, 4, 16, 64)), (PAGES, 1), (TOKENS_2, 1)]
    if not quick:
        settings += [(PAGES, 8), (TOKENS_2, 8)]
    rates = [0.0, 0.15] if quick or arguments.shapes else [0.0, 0.05, 0.15, 0.3]
    with torch.no_grad():
        if arguments.shapes:
            rows = list(show(bench_shapes(bench, settings, rates)))
        else:
            rows = list(show(bench_layers(bench)))
            rows += show(bench_swap_in(bench, settings, rates))
            rows += show(bench_append(bench, settings))
    write_results(arguments.output, rows, environment=environment(DEVICE))
    if not arguments.shapes:
        plot(rows, arguments.output.with_suffix(".png"))
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
