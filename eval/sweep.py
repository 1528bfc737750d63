"""How large a device buffer should be: `python -m eval.sweep --essays essays.json`.

A trace of what a model's decode steps select (`--trace FILE`, or recorded here while the model goes on with a text) is
run through buffers of several sizes, by several rules of eviction. `lru` is what the cache does, `belady` knows the
future, which no rule can do better than. Steps that find an empty buffer, the first one above all, miss everything
whatever its size, and are left out.

With `--live` times are measured: `generate` over the cache with each size, the trace's selections replayed
(`eval.bench_decode`), on the model of `--model`, which may be another than the one that the trace is of. With
`--step-ms`, what a step takes without misses, they are modelled: that, and the bytes at `--gb-per-s`.

The buffer recommended is the smallest whose step is no more than `--slowdown` slower than one without misses, or where
times are measured than the fastest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eval.bench_decode import Bench, Replaying, make_model
from eval.common import DTYPES, environment, load_model, quiet, table, write_results
from eval.policies import POLICIES, simulate
from eval.texts import essays
from hf_hisparse import HierarchicalSparseCache
from hf_hisparse.config import MAX_SLOTS
from hf_hisparse.models import cache_argument
from hf_hisparse.trace import Trace


def record(model: Any, ids: torch.Tensor, new_tokens: int, options: dict[str, Any]) -> Trace:
    """What `generate` selects as it goes on greedily with a prompt `[batch, tokens]`.

    Raises:
        ValueError: If the prompt is not longer than top-k.
    """
    cache = HierarchicalSparseCache(model, **options)
    with cache.record_trace() as trace:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **{cache_argument(model): cache},
        )
    if trace.steps < new_tokens - 1:
        raise ValueError(f"`--context {ids.shape[1]}` is not longer than top-k: there is nothing to select")
    return trace


def read(model: Any, tokenizer: Any, path: Path | None, context: int) -> torch.Tensor:
    """A prompt of so many tokens: prose, or random tokens for a random model.

    Raises:
        ValueError: If there is less prose.
    """
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        return torch.randint(3, vocabulary, (1, context), generator=generator).to(model.device)
    prose = essays(path, start=0, characters=8 * context)
    ids = tokenizer(prose, return_tensors="pt").input_ids[:, :context]
    if ids.shape[1] < context:
        raise ValueError(f"`--context {context}` is more than the text has, {ids.shape[1]} tokens; use a longer text")
    return ids.to(model.device)


# ---- what selections have in common ----------------------------------------------------------------------------------


def overlap(trace: Trace) -> dict[str, list[float | None]]:
    """How much of a selection is found elsewhere too, a layer; means over steps and rows.

    Returns:
        `steps`: the share that is in the next step's too; `layers`: in the next layer's, None where that has other
        rows; `neighbours`: whose next item is selected too; `chance`: that share if the items were drawn at random.
    """
    found: dict[str, list[float | None]] = {"steps": [], "layers": [], "neighbours": [], "chance": []}
    items = [int((trace.tokens.max(initial=1) - 1) // layer.page_size) + 2 for layer in trace.layers]
    following: np.ndarray | None = None
    for layer, count in zip(reversed(trace.layers), reversed(items), strict=True):
        steps, rows, _ = layer.selections.shape
        chosen = np.zeros((steps, rows, count), np.bool_)
        # The last item is there for what is none, and never selected.
        np.put_along_axis(chosen, np.where(layer.selections < 0, count - 1, layer.selections), True, axis=2)
        chosen[..., -1] = False
        total = chosen.sum()
        within = chosen[:-1].sum()
        found["steps"].append(float((chosen[:-1] & chosen[1:]).sum() / within) if within else None)
        both = None if following is None or following.shape != chosen.shape else (chosen & following).sum()
        found["layers"].append(float(both / total) if both is not None and total else None)
        found["neighbours"].append(float((chosen[..., :-1] & chosen[..., 1:]).sum() / total) if total else None)
        there = (trace.tokens - 1) // layer.page_size + 1
        found["chance"].append(float(np.mean((chosen.sum(2) - 1) / np.maximum(there - 1, 1)[:, None])))
        following = chosen
    return {name: values[::-1] for name, values in found.items()}


# ---- sizes -----------------------------------------------------------------------------------------------------------


def simulated(trace: Trace, size: float, name: str) -> tuple[dict[str, Any], np.ndarray]:
    """The row of one size, in multiples of what a step selects, and one rule; and the bytes that each step moves."""
    hits, misses, nbytes = simulate(trace, size, POLICIES[name])
    warm = ~trace.emptied
    warm[0] = False
    moved = nbytes[warm].sum(1)
    slots = [round(size * layer.selections.shape[2]) for layer in trace.layers]
    held = [n * layer.selections.shape[1] * layer.item_bytes for n, layer in zip(slots, trace.layers, strict=True)]
    row = {
        "eviction": name,
        "size": size,
        "buffer_size": slots[0] * trace.layers[0].page_size,
        "buffer_bytes": sum(held),
        "steps": int(warm.sum()),
        "hit_rate": float(hits[warm].sum() / (hits[warm] + misses[warm]).sum()),
        "bytes_a_step": float(moved.mean()),
        "bytes_p99": float(np.quantile(moved, 0.99)),
    }
    return row, moved


def modelled(moved: np.ndarray, step_ms: float, gb_per_s: float) -> dict[str, float]:
    """What steps take that move so many bytes."""
    times = step_ms + moved / (1e6 * gb_per_s)
    return {"modelled_ms": float(np.median(times)), "modelled_p99_ms": float(np.quantile(times, 0.99))}


class Live:
    """Times of `generate` that replays a trace.

    Args:
        model: Which generates.
        trace: What it selects.
        repeat: Timed runs a size.
        algorithm: What scores, though the trace selects.
    """

    def __init__(self, model: Any, trace: Trace, repeat: int, algorithm: str):
        self.model, self.trace, self.repeat = model, trace, repeat
        self.options = {"top_k": trace.top_k, "page_size": trace.layers[0].page_size, "algorithm": algorithm}

    def size(self, buffer_size: int) -> dict[str, Any]:
        """What is measured of one size: times of all steps, the first one too, and what the cache counted.

        Raises:
            ValueError: If it cannot be measured.
        """
        script = partial(Replaying, self.trace, device=self.model.device)
        options = self.options | {"buffer_size": buffer_size}
        bench = Bench(self.model, self.trace.steps + 1, self.repeat, options, script)
        row = bench.row("hierarchical", int(self.trace.tokens[0]) - 1, self.trace.batch)
        if "error" in row:
            raise ValueError(row["error"])
        names = {"tpot_ms": "ms", "tpot_p99_ms": "p99_ms", "hit_rate": "hit_rate", "bytes_moved_a_step": "bytes_a_step"}
        return {f"measured_{name}": row[theirs] for theirs, name in names.items()}


def recommend(rows: Sequence[dict[str, Any]], slowdown: float, step_ms: float | None) -> dict[str, Any] | None:
    """The row of the smallest buffer that is fast enough; None if none is, or no time is known."""
    ours = sorted((row for row in rows if row["eviction"] == "lru"), key=lambda row: row["size"])
    if all("measured_ms" in row for row in ours):
        name, fastest = "measured_ms", min(row["measured_ms"] for row in ours)
    elif step_ms is not None:
        name, fastest = "modelled_ms", step_ms
    else:
        return None
    return next((row for row in ours if row[name] <= (1 + slowdown) * fastest), None)


# ---- what is shown ---------------------------------------------------------------------------------------------------

COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "size": ("x top-k", "{:g}".format),
    "buffer_size": ("tokens", "{:,}".format),
    "buffer_bytes": ("buffer (MiB)", lambda value: f"{value / 2**20:.1f}"),
    "bytes_a_step": ("moved a step (MiB)", lambda value: f"{value / 2**20:.2f}"),
    "bytes_p99": ("P99", lambda value: f"{value / 2**20:.2f}"),
    "modelled_ms": ("modelled (ms)", "{:.1f}".format),
    "modelled_p99_ms": ("P99", "{:.1f}".format),
    "measured_ms": ("measured (ms)", "{:.1f}".format),
    "measured_p99_ms": ("P99", "{:.1f}".format),
}
"""What is shown of a size: its heading, and how it is written."""


def show(rows: Sequence[dict[str, Any]], hidden: Sequence[str] = ()) -> str:
    """A table with a line for each size: the cache's own rule, and the hit rates of all."""
    ours = [row for row in rows if row["eviction"] == "lru"]
    names = [name for name in COLUMNS if name in ours[0] and name not in hidden]
    rules = list(dict.fromkeys(row["eviction"] for row in rows))
    rates = {(row["eviction"], row["size"]): f"{row['hit_rate']:.1%}" for row in rows}
    lines = [
        [*(COLUMNS[name][1](row[name]) for name in names), *(rates.get((rule, row["size"]), "") for rule in rules)]
        for row in ours
    ]
    return table([*(COLUMNS[name][0] for name in names), *(f"hits, {rule}" for rule in rules)], lines)


def in_words(common: dict[str, list[float | None]]) -> Iterator[str]:
    """What selections have in common, a line each."""
    heads = {
        "steps": "of a step's selection are in the next step's too",
        "layers": "are in the next layer's too",
        "neighbours": "have their next item selected too",
        "chance": "would have, were they drawn at random",
    }
    for name, head in heads.items():
        values = [value for value in common[name] if value is not None]
        if values:
            yield f"{np.mean(values):.0%} {head} (layers: {min(values):.0%} to {max(values):.0%})"


def plot(rows: Sequence[dict[str, Any]], common: dict[str, list[float | None]], path: Path) -> None:
    """Hit rates, bytes and times against size, and what selections have in common, if matplotlib is there."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed; `pip install 'hf-hisparse[plot]'`")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [kind for kind in ("modelled", "measured") if any(f"{kind}_ms" in row for row in rows)]
    panels = 4 if timed else 3
    figure, (rates, moved, shared, *more) = pyplot.subplots(1, panels, figsize=(4.8 * panels, 4.2))
    for name in dict.fromkeys(row["eviction"] for row in rows):
        mine = [row for row in rows if row["eviction"] == name]
        sizes = [row["size"] for row in mine]
        rates.plot(sizes, [100 * row["hit_rate"] for row in mine], "-o", markersize=3, label=name)
        line = moved.plot(sizes, [row["bytes_a_step"] / 2**20 for row in mine], "-o", markersize=3, label=name)[0]
        moved.plot(sizes, [row["bytes_p99"] / 2**20 for row in mine], ":", color=line.get_color())
    for times in more:
        mine = [row for row in rows if row["eviction"] == "lru"]
        sizes = [row["size"] for row in mine]
        for kind in timed:
            line = times.plot(sizes, [row[f"{kind}_ms"] for row in mine], "-o", markersize=3, label=f"lru, {kind}")[0]
            times.plot(sizes, [row[f"{kind}_p99_ms"] for row in mine], ":", color=line.get_color())
        times.set(xlabel="buffer, x top-k", ylabel="ms a token (dotted: P99)", ylim=(0, None))
    labels = {"steps": "next step", "layers": "next layer", "neighbours": "next item", "chance": "next item, by chance"}
    for name, label in labels.items():
        shared.plot([np.nan if value is None else 100 * value for value in common[name]], label=label)
    size = "buffer, x top-k"
    rates.set(xlabel=size, ylabel="hit rate, %")
    moved.set(xlabel=size, ylabel="MiB a step (dotted: P99)", ylim=(0, None))
    shared.set(xlabel="layer", ylabel="of a selection, %", ylim=(0, 100))
    for panel in figure.axes:
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweeps, prints, writes, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as for eval.bench_decode")
    parser.add_argument("--trace", type=Path, help="a file that `Trace.save` wrote (default: record one)")
    parser.add_argument("--save-trace", type=Path, help="where to keep the trace that is recorded")
    parser.add_argument("--essays", type=Path, help="JSON file with the text to read; without it, generated prose")
    parser.add_argument("--context", type=int, default=6144)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--page-size", type=int)
    parser.add_argument("--algorithm", default="auto")
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 1.5, 2, 3, 4, 6, 8], help="multiples of top-k")
    parser.add_argument("--evictions", nargs="+", choices=POLICIES, default=[*POLICIES])
    parser.add_argument("--step-ms", type=float, help="what a step without misses takes: gives modelled times")
    parser.add_argument("--gb-per-s", type=float, default=50.0, help="what the link moves (default: 50, PCIe 5 x16)")
    parser.add_argument("--slowdown", type=float, default=0.05, help="the share that a step may be slower by")
    parser.add_argument("--live", action="store_true", help="measure `generate` with each size as well")
    parser.add_argument("--repeat", type=int, default=3, help="timed runs a size")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--output", type=Path, help="default: eval/results/sweep-MODEL.json; also names the plot")
    args = parser.parse_args(arguments)
    quiet()
    if not all(size >= 1 for size in args.sizes) or "lru" not in args.evictions:
        parser.error("--sizes are at least 1, since a selection must fit, and --evictions has the cache's own, lru")
    if args.new_tokens < 3 or min(args.context, args.repeat) < 1 or args.gb_per_s <= 0:
        parser.error("--new-tokens is at least 3, --context and --repeat 1, and --gb-per-s more than 0")
    if min(args.slowdown, args.step_ms or 0) < 0:
        parser.error("--slowdown and --step-ms are not negative")

    device = torch.device(args.device)
    dtype = getattr(torch, args.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    options = {name: getattr(args, name) for name in ("top_k", "page_size", "algorithm")}
    model = None
    try:
        if args.save_trace is not None:
            args.save_trace.parent.mkdir(parents=True, exist_ok=True)
        if args.trace is None:
            model, tokenizer = load_model(args.model, device, dtype)
            trace = record(model, read(model, tokenizer, args.essays, args.context), args.new_tokens, options)
        else:
            trace = Trace.load(args.trace)
        if args.save_trace is not None:
            trace.save(args.save_trace)
        if args.live and model is None:
            model = make_model(args.model, device, dtype)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if trace.steps < 2:
        parser.error(f"--trace {args.trace}: there are {trace.steps} steps in it; record at least 2")
    widest = max(layer.selections.shape[2] for layer in trace.layers)
    if max(args.sizes) * widest > MAX_SLOTS:
        parser.error(f"--sizes: a buffer holds at most {MAX_SLOTS} items, here {MAX_SLOTS / widest:g} x top-k")

    step_ms = args.step_ms
    live = Live(model, trace, args.repeat, args.algorithm) if args.live else None
    rows = []
    for rule in args.evictions:
        for size in sorted({*args.sizes}):
            row, moved = simulated(trace, size, rule)
            if step_ms is not None:
                row |= modelled(moved, step_ms, args.gb_per_s)
            if live is not None and rule == "lru":
                try:
                    row |= live.size(row["buffer_size"])
                except ValueError as error:
                    parser.error(f"--live: {error}")
            rows.append(row)
    common, best = overlap(trace), recommend(rows, args.slowdown, step_ms)

    what = f"{trace.steps} steps of {trace.model} with {trace.algorithm}, top_k={trace.top_k}"
    print(f"{what}, after {trace.tokens[0] - 1:,} tokens\n\n{show(rows)}\n")
    print("\n".join(in_words(common)))
    if best is None and step_ms is None and live is None:
        print("\nFor times, and the smallest buffer that is fast enough: `--step-ms`, or `--live`.")
    elif best is None:
        print(f"\nNo buffer is within {args.slowdown:.0%}; try larger --sizes.")
    else:
        print(f"\nThe smallest buffer within {args.slowdown:.0%}: buffer_size={best['buffer_size']}")
    output = args.output or Path(f"eval/results/sweep-{Path(args.model).name}.json")
    facts = {name: getattr(trace, name) for name in ("model", "algorithm", "top_k", "batch", "steps")}
    meta = {
        "environment": environment(device),
        "trace": facts | {"context": int(trace.tokens[0]) - 1, "page_size": trace.layers[0].page_size},
        "measured_on": args.model if args.live else None,
        "step_ms": step_ms,
        "gb_per_s": args.gb_per_s,
        "slowdown": args.slowdown,
        "recommended": None if best is None else best["buffer_size"],
        "overlap": common,
    }
    write_results(output, rows, **meta)
    plot(rows, common, output.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
