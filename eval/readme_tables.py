"""Writes the tables of README.md from the files in eval/results/: `python -m eval.readme_tables`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, where NAME is one of `TABLES`. With `--check` nothing
is written, and the exit status is 1 if a table is not what its file says.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from eval import sweep
from eval.common import table


ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "eval" / "results"


def load(name: str) -> dict[str, Any]:
    """A results file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def source(names: Iterable[str], environment: dict[str, Any]) -> str:
    """Where a table's figures come from, in a line under it."""
    files = ", ".join(f"[`{name}.json`](eval/results/{name}.json)" for name in names)
    versions = f"torch {environment['torch']}, transformers {environment['transformers']}"
    return f"{environment['device']}; {versions}; {files}."


def pivot(rows: list[dict[str, Any]], label: str, budgets: list[int], cell: Callable[[dict[str, Any]], str]) -> str:
    """A table with a line for each of a column's values and a column for each budget."""
    lines: dict[str, dict[int, str]] = {}
    for row in rows:
        lines.setdefault(row[label], {})[row["budget"]] = cell(row)
    body = [[name, *(found.get(budget, "") for budget in budgets)] for name, found in lines.items()]
    return table([label, *map(str, budgets)], body)


def exactness() -> str:
    """One line for each exactness run."""
    names = sorted(path.stem for path in RESULTS.glob("exactness-*.json"))
    lines = []
    for name in names:
        run = load(name)
        dense, _, ours = run["rows"]
        step, rate = ours["first_difference"], ours["hit_rate"]
        lines.append(
            [
                run["model"],
                f"{run['context']:,} + {run['new_tokens']}",
                f"{run['top_k']:,}",
                "identical" if ours["bits_of_oracle"] else "DIFFERENT",
                "the same" if step is None else f"the same up to step {step}",
                "" if rate is None else f"{rate:.1%}",
                f"{ours['device_bytes'] / 2**20:.1f} of {dense['device_bytes'] / 2**20:.1f} MiB",
            ]
        )
    head = [
        "model",
        "tokens",
        "top-k",
        "bits of the oracle",
        "tokens of the dense cache",
        "hit rate",
        "KV on the device",
    ]
    return f"{table(head, lines)}\n\n{source(names, load(names[0])['environment'])}"


def needle(name: str = "needle") -> str:
    """Answers kept, of those that the dense cache gets right."""
    run = load(name)
    budgets = sorted({row["budget"] for row in run["rows"]})
    rows = [row | {"text and method": f"{row['text']}: {row['method']}"} for row in run["rows"]]
    body = pivot(rows, "text and method", budgets, lambda row: f"{row['kept']} of {row['dense_right']}")
    return f"{body}\n\n{source([name], run['environment'])}"


def accuracy(name: str = "accuracy-smollm2") -> str:
    """Scores by budget, means over tasks: a line for each length, kind of task and method."""
    run = load(name)
    kinds = {True: "needles", False: "variables and words"}
    scores: dict[tuple[int, str, str], dict[int | None, list[float]]] = {}
    for row in run["rows"]:
        kind = kinds[row["task"].startswith("niah")]
        of_budgets = scores.setdefault((row["length"], kind, row["method"]), {})
        of_budgets.setdefault(row["budget"], []).append(100 * row["score"])
    budgets = sorted({row["budget"] for row in run["rows"] if row["budget"] is not None})
    body = []
    for (length, kind, method), found in sorted(scores.items(), key=lambda item: item[0][:2]):
        if method != "dense":
            dense = scores[length, kind, "dense"][None]
            cells = [f"{fmean(found[budget]):.1f}" if budget in found else "" for budget in budgets]
            body.append([f"{length:,}", f"{len(dense)} of {kind}", method, f"{fmean(dense):.1f}", *cells])
    head = ["tokens", "tasks", "method", "dense", *map(str, budgets)]
    return f"{table(head, body)}\n\n{source([name], run['environment'])}"


def example() -> str:
    """What the example prints."""
    return f"```text\n{(RESULTS / 'generate.txt').read_text().strip()}\n```"


def selection() -> str:
    """Attention mass kept, by method and budget, with the default tokens always kept."""
    run = load("selection")
    rows = [
        row | {"method": f"{row['method']} ({row['gpu_bytes']:.0f} B)"}
        for row in run["rows"]
        if row["kept"] == "4 + 64"
    ]
    budgets = sorted({row["budget"] for row in rows})
    body = pivot(rows, "method", budgets, lambda row: f"{row['mass']:.3f}")
    return f"{body}\n\n{source(['selection'], run['environment'])}"


def kernels() -> str:
    """The swap-in kernel through the layers of a model in turn, at about 15% missed."""
    run = load("bench_kernels")
    rows = [
        row for row in run["rows"] if row["op"] == "swap_in" and row["layers"] == "turn" and 0.1 < row["missed"] < 0.2
    ]
    lines = [
        [
            f"{row['setting']}, {row['item_bytes']:,} B",
            row["batch"],
            f"{row['k']:,} of {row['slots']:,}",
            f"{row['missed']:.0%}",
            f"{row['us']:.0f}",
            f"{row['gather_us']:.0f}",
            f"{row['no_copy_us']:.0f}",
            f"{row['gb_per_s']:.0f}",
        ]
        for row in rows
    ]
    head = "items,batch,selected,missed,swap-in (us),its copies alone (us),without copies (us),GB/s".split(",")
    return f"{table(head, lines)}\n\n{source(['bench_kernels'], run['environment'])}"


CACHES = {
    "hierarchical": "this one, `max_cache_len`",
    "growing": "this one",
    "compiled": "this one, `compile=True`",
    "eager": "this one, no CUDA graph",
    "resident": "its selection, whole history on the GPU",
    "no-io": "this one without its copies",
    "dynamic": "`DynamicCache`",
    "offloading": "`DynamicCache(offloading=True)`",
    "static": "`StaticCache`, compiled",
    "floor": "none: a captured forward, hardly any attention",
    "compiled-floor": "none: the same, compiled",
}


def decode(name: str) -> str:
    """A whole model over each kind of cache."""
    run = load(name)
    batches = {row["batch"] for row in run["rows"]} != {1}
    lines = []
    for row in run["rows"]:
        line = [f"{row['context']:,}", *([str(row["batch"])] if batches else []), CACHES[row["cache"]]]
        if "error" in row:
            lines.append([*line, "", row["error"].partition(":")[0], *[""] * (4 if batches else 3)])
            continue
        held = row["peak_decode_bytes"] - row["weights_bytes"] if "peak_decode_bytes" in row else None
        line += [
            f"{row['ttft_s']:.2f}" if "ttft_s" in row else "",
            f"{row['tpot_ms']:.1f}",
            *([f"{1e3 * row['batch'] / row['tpot_ms']:.0f}"] if batches else []),
            "" if held is None else f"{held / 2**30:.2f}",
            f"{row['host_bytes'] / 2**30:.1f}" if row.get("host_bytes") else "",
            "" if row.get("hit_rate") is None else f"{row['hit_rate']:.0%}",
        ]
        lines.append(line)
    head = ["context", *(["batch"] if batches else []), "cache", "first token (s)", "a token (ms)"]
    head += [*(["tokens/s"] if batches else []), "GPU besides weights (GiB)", "host (GiB)", "hit rate"]
    return f"{table(head, lines)}\n\n{source([name], run['environment'])}"


def select() -> str:
    """Scores and exact top-k of one layer."""
    run = load("bench_select")
    lines = [
        [row["setting"], f"{row['items']:,} x {row['rows']}", f"{row['k']:,}", f"{row['us']:.0f}"]
        for row in run["rows"]
        if row["op"] == "retrieve"
    ]
    lines += [
        [
            "top-k alone",
            f"{row['items']:,} x {row['rows']}",
            f"{row['k']:,}",
            f"{row['us']:.0f}",
            f"{row['torch_us']:.0f}",
        ]
        for row in run["rows"]
        if row["op"] == "top_k"
    ]
    lines = [[*line, ""][:5] for line in lines]
    head = "method,candidates,selected,time (us),torch.topk (us)".split(",")
    return f"{table(head, lines)}\n\n{source(['bench_select'], run['environment'])}"


def attention() -> str:
    """Attention over a selection, by backend."""
    run = load("bench_attention")
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    names: dict[str, None] = {}
    for row in run["rows"]:
        label = row["setting"], f"{row['rows']} x {row['heads']}", f"{row['k']:,}", f"{row['floor_us']:.0f}"
        names[row["backend"]] = None
        lines.setdefault(label, {})[row["backend"]] = f"{row['us']:.0f}" if "us" in row else "refused"
    body = [[*label, *(times.get(name, "") for name in names)] for label, times in lines.items()]
    head = ["items", "rows x heads", "selected", "floor (us)", *(f"`{name}` (us)" for name in names)]
    return f"{table(head, body)}\n\n{source(['bench_attention'], run['environment'])}"


def buffer() -> str:
    """Hit rates and bytes against the size of the buffer, without times: those are of a machine."""
    run = load("sweep-smollm2")
    hidden = ("modelled_ms", "modelled_p99_ms", "measured_ms", "measured_p99_ms")
    names = {"steps": "next step", "layers": "next layer", "neighbours": "next item", "chance": "next item, by chance"}
    shares = []
    for name, label in names.items():
        values = [value for value in run["overlap"][name] if value is not None]
        shares.append([label, f"{sum(values) / len(values):.0%}", f"{min(values):.0%} to {max(values):.0%}"])
    both = f"{sweep.show(run['rows'], hidden)}\n\n{table(['of a selection, also in', 'mean', 'layers'], shares)}"
    return f"{both}\n\n{source(['sweep-smollm2'], run['environment'])}"


def trained_dsa() -> str:
    """Questions that a small model with trained indexers answers rightly, by attention."""
    run = load("train_dsa")
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for row in run["rows"]:
        found.setdefault((row["hops"], row["context"]), {})[row["attention"]] = row
    lines = []
    for (hops, context), rows in found.items():
        right = [f"{rows[name]['chains']:.1%}" for name in ("dense", "untrained", "sparse", "ours")]
        ours = rows["ours"]
        lines.append(
            [str(hops), f"{context} / {ours['top_k']}", *right, f"{ours['same']:.0%}", f"{ours['hit_rate']:.0%}"]
        )
    head = "look-ups a question,context / top-k,dense,untrained indexer,stock sparse,this cache,same answers,hit rate"
    return f"{table(head.split(','), lines)}\n\n{source(['train_dsa'], run['environment'])}"


TABLES: dict[str, Callable[[], str]] = {
    "accuracy": accuracy,
    "attention": attention,
    "buffer": buffer,
    "exactness": exactness,
    "decode": partial(decode, "bench_decode-llama-8b"),
    "decode_128k": partial(decode, "bench_decode-llama-8b-128k"),
    "decode_24gib": partial(decode, "bench_decode-llama-8b-24gib"),
    "decode_dsa": partial(decode, "bench_decode-deepseek-v32-4layer"),
    "example": example,
    "kernels": kernels,
    "needle": needle,
    "needle_alone": partial(needle, "needle-essays"),
    "select": select,
    "selection": selection,
    "trained_dsa": trained_dsa,
}


def fill(text: str) -> str:
    """The text with each of its tables made anew."""
    blocks = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return blocks.sub(lambda block: f"{block[1]}\n{TABLES[block[2]]()}\n\n{block[3]}", text)


def main() -> int:
    """Writes or checks, and returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table is out of date")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    text = readme.read_text()
    filled = fill(text)
    if filled == text:
        return 0
    if args.check:
        print("README.md: a table is not what its file in eval/results/ says; run `python -m eval.readme_tables`")
        return 1
    readme.write_text(filled)
    return 0


if __name__ == "__main__":
    sys.exit(main())
