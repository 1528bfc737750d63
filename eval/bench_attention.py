"""How fast each attention backend attends to a selection: `python -m eval.bench_attention`.

A step runs in a replayed CUDA graph between two CUDA events, over the buffers of several layers in turn, so that they
come from memory. Times are medians, and what a backend does besides its attention kernel is part of them. In the same
run:

- `floor`: the bytes that must be read, at the rate of a large copy;
- `empty`: an empty kernel, what a launch between two events costs. All times but the next include it;
- `back to back`: a step of a graph that runs every step, one after the other;
- `error`: the largest difference from the reference in float32, relative to the largest value.

A backend that refuses what is asked of it, or is not installed, has its reason in place of times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eval.bench_kernels import DEVICE, STEPS, Bench
from eval.bench_select import copy_rate, measure
from eval.common import environment, write_results
from hf_hisparse.backends import BACKENDS, AttentionBackend, ReferenceBackend
from hf_hisparse.layout import ItemLayout


LAYERS = 4
SCALE = 128**-0.5


class Setting(NamedTuple):
    """Rows of `heads` query heads, each of which selects `k` items."""

    name: str
    layout: ItemLayout
    heads: int
    k: int
    rows: tuple[int, ...]
    shared: int = 0
    """Items of the one buffer that all rows share, as the queries of a prompt do; 0 if each has its own."""


PAGE, PAIR, LATENT = ItemLayout.page_head(32, 128, 128), ItemLayout.page_head(2, 128, 128), ItemLayout.token(512, 64)
SETTINGS = [
    Setting("pages of 32", PAGE, 4, 64, (8, 64, 512)),
    Setting("pages of 2", PAIR, 4, 1024, (8, 64, 512)),
    Setting("latents", LATENT, 128, 2048, (1, 8, 64)),
    Setting("latents of a prompt", LATENT, 128, 2048, (512,), shared=32768),
]


class Layer:
    """A buffer of random items, and what is selected from it: items in their order, wherever they lie."""

    def __init__(self, setting: Setting, rows: int):
        layout, k = setting.layout, setting.k
        slots = setting.shared or 2 * k
        held = torch.randn(1 if setting.shared else rows, slots, layout.elements, dtype=torch.bfloat16, device=DEVICE)
        self.arguments: tuple[Any, ...] = (
            torch.randn(rows, setting.heads, layout.key[1], dtype=torch.bfloat16, device=DEVICE),
            held.expand(rows, -1, -1),
            torch.rand(rows, slots, device=DEVICE).argsort(1)[:, :k].int().contiguous(),
            torch.rand(rows, 4 * slots, device=DEVICE).argsort(1)[:, :k].sort(1).values.int().contiguous(),
            torch.full((rows,), 4 * slots * layout.page_size, device=DEVICE),
            layout,
            SCALE,
        )

    def attend(self, backend: AttentionBackend) -> Tensor:
        return backend.attend(*self.arguments)

    def expected(self) -> Tensor:
        query, buffer, *rest = self.arguments
        return ReferenceBackend().attend(query.float(), buffer, *rest)


def bench(machine: Bench, rate: float, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each setting, number of rows and backend."""
    for setting in SETTINGS:
        item_bytes = 2 * setting.layout.elements
        for rows in setting.rows:
            layers = [Layer(setting, rows) for _ in range(LAYERS)]
            read = min(rows * setting.k, setting.shared or rows * setting.k) * item_bytes
            common = {"setting": setting.name, "rows": rows, "heads": setting.heads, "k": setting.k}
            expected = layers[0].expected()
            for name in names:
                row = common | {"backend": name, "floor_us": read / rate}
                try:
                    backend = BACKENDS[name]()
                    output = layers[0].attend(backend).float()
                except ValueError as reason:
                    yield row | {"refused": str(reason)}
                    continue
                error = float((output - expected).abs().max() / expected.abs().max())
                times = measure(machine, [partial(layer.attend, backend) for layer in layers])
                yield row | times | {"error": error}


COLUMNS = {"setting": 20, "rows": 6, "heads": 6, "k": 6, "backend": 16, "us": 10, "back_to_back_us": 13}
COLUMNS |= {"floor_us": 10, "error": 10}


def show(row: dict[str, Any]) -> None:
    """Prints a row of the table."""
    cells = {name: row.get(name, "") for name in COLUMNS}
    text = {name: f"{cell:.3g}" if name == "error" and cell != "" else cell for name, cell in cells.items()}
    printed = [
        f"{cell:{width}.1f}" if isinstance(cell, float) else f"{cell:>{width}}"
        for cell, width in zip(text.values(), COLUMNS.values(), strict=True)
    ]
    print(" ".join([*printed, row.get("refused", "")]).rstrip(), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(set(BACKENDS) - {"auto"})
    parser.add_argument("--backends", nargs="+", choices=names, default=names)
    parser.add_argument("--output", type=Path, default=Path("eval/results/bench_attention.json"))
    args = parser.parse_args(arguments)
    start = time.perf_counter()
    machine = Bench(histories=1, rounds=4)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        empty = machine.time([partial(machine.empty, 1, 32, 0, 0)] * STEPS)
        rate = copy_rate(machine)
        print(f"an empty kernel {empty:.1f} us, a large copy {rate / 1e6:.2f} TB/s")
        print(" ".join(f"{name.removesuffix('_us').replace('_', ' '):>{width}}" for name, width in COLUMNS.items()))
        for row in bench(machine, rate, args.backends):
            show(row)
            rows.append(row)
            # What is measured stays, whatever comes after it.
            write_results(args.output, rows, environment=environment(DEVICE), empty_us=empty, copy_bytes_per_us=rate)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
