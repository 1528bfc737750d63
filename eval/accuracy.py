"""Answers of the dense cache and of this one, side by side: `python -m eval.accuracy --tasks ruler --lengths 4K`.

Tasks are those of RULER, of LongBench, and grids of needles by depth and length. A prompt is read once, by the dense
cache; every setting goes on from a copy of that, so that only the decode steps differ. What is measured goes to
`OUTPUT.jsonl` batch by batch: the same command, given again after an interruption, does only what is missing. The
results are then in `OUTPUT.json`, as tables in `OUTPUT.md`, and as plots.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import Cache, DynamicCache

from eval import longbench, report, ruler, texts
from eval.common import DTYPES, environment, load_model, quiet, write_results
from eval.needle import NeedleGrid
from eval.records import Records
from eval.tasks import Reader, Sample, Task
from hf_hisparse import HierarchicalSparseCache, unpatch_model
from hf_hisparse.cache import HierarchicalLayer
from hf_hisparse.models import cache_argument


KEY = ("task", "length", "depth", "first", "count", "method", "budget")
"""What tells a record from every other one: a batch of a task, and a setting."""


@dataclass(frozen=True)
class Setting:
    """A cache to compare.

    Attributes:
        method: Its name in the tables, which with `budget` tells it from every other one.
        budget: Its top-k; None for the dense cache.
        options: Arguments of `HierarchicalSparseCache`; None for the dense cache.
    """

    method: str
    budget: int | None
    options: dict[str, Any] | None


DENSE = Setting("dense", None, None)


def make_settings(
    model: Any, algorithms: Sequence[str], page_sizes: Sequence[int | None], budgets: Sequence[int | None]
) -> tuple[list[Setting], list[str]]:
    """The dense cache and every combination, and why the combinations are left out that cannot be."""
    found, refused = [DENSE], []
    for algorithm, page_size, budget in product(algorithms, page_sizes, budgets):
        method = algorithm if page_size is None else f"{algorithm}, pages of {page_size}"
        options: dict[str, Any] = {"algorithm": algorithm, "page_size": page_size, "top_k": budget}
        try:
            cache = HierarchicalSparseCache(model, **options)
        except ValueError as error:
            refused.append(f"{method}, top-k {budget}: {error}")
        else:
            # Where none is given it is the algorithm's, or the model's own.
            resolved = (layer.coordinator.top_k for layer in cache.layers if isinstance(layer, HierarchicalLayer))
            found.append(Setting(method, next(resolved, budget), options))
    return found, refused


class Batch:
    """Prompts that are read together, padded on the left.

    Args:
        model: Reads them.
        samples: The prompts.
        padding: The id of the padding token.
    """

    def __init__(self, model: Any, samples: Sequence[Sample], padding: int):
        self.model = model
        longest = max(len(sample.ids) for sample in samples)
        rows = [[padding] * (longest - len(sample.ids)) + sample.ids for sample in samples]
        seen = [[0] * (longest - len(sample.ids)) + [1] * len(sample.ids) for sample in samples]
        self.ids = torch.tensor(rows, device=model.device)
        self.mask = torch.tensor(seen, device=model.device)

    def _forward(self, ids: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        given = {"attention_mask": mask, "position_ids": positions, "use_cache": True, "logits_to_keep": 1}
        return self.model(ids, **given, **{cache_argument(self.model): cache}).logits[:, -1]

    @torch.no_grad()
    def read(self) -> DynamicCache:
        """A dense cache that holds all but the last token of every prompt."""
        cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        self._forward(self.ids[:, :-1], self.mask[:, :-1], cache)
        return cache

    @torch.no_grad()
    def answer(self, cache: Cache, new_tokens: int, stops: set[int]) -> list[list[int]]:
        """Goes on greedily from such a cache, to a token of `stops`, which is left out, or so many new ones."""
        token, mask = self.ids[:, -1:], self.mask
        stop = torch.tensor(sorted(stops), device=token.device)
        done = torch.zeros(len(token), dtype=torch.bool, device=token.device)
        said: list[Tensor] = []
        while len(said) < new_tokens and not bool(done.all()):
            token = self._forward(token, mask, cache).argmax(-1, keepdim=True)
            mask = torch.cat((mask, torch.ones_like(token)), dim=1)
            done |= torch.isin(token.squeeze(1), stop)
            said.append(token)
        rows = torch.cat(said, dim=1).tolist()
        return [row[: next((at for at, token in enumerate(row) if token in stops), None)] for row in rows]


class Evaluation:
    """Measures what is missing in the records.

    Args:
        model: The model.
        reader: With its tokenizer.
        settings: The caches to compare.
        records: Where the measurements go.
    """

    def __init__(self, model: Any, reader: Reader, settings: Sequence[Setting], records: Records):
        self.model, self.reader, self.settings, self.records = model, reader, settings, records
        self.tokenizer = reader.tokenizer
        own = getattr(model.generation_config, "eos_token_id", None)
        ends = own if isinstance(own, list) else [own]
        self.stops = {token for token in (*ends, self.tokenizer.eos_token_id) if token is not None}
        self.padding = next((t for t in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id) if t is not None), 0)
        self._caches: dict[tuple[str, int | None], HierarchicalSparseCache] = {}
        self._length = 0

    def run(self, tasks: Iterable[Task], samples: int, batch: int) -> list[dict[str, Any]]:
        """All records of so many samples of the tasks."""
        jobs = [(task, part) for task in tasks for part in batches(min(samples, task.available or samples), batch)]
        total = sum(len(part) for _, part in jobs) * len(self.settings)
        found = []
        with tqdm(total=total, desc="answers", unit="", smoothing=0) as bar:
            for task, part in jobs:
                bar.set_postfix_str(f"{task.name} at {task.length:,}")
                keys = [self.key(task, part, setting) for setting in self.settings]
                if not all(key in self.records for key in keys):
                    self._measure(task, part, keys, bar)
                else:
                    bar.update(len(part) * len(keys))
                found += [self.records.held[self.records.key(key)] for key in keys]
        return found

    @staticmethod
    def key(task: Task, part: range, setting: Setting) -> dict[str, Any]:
        """The entries that tell a record from every other one."""
        values = (task.name, task.length, task.depth, part.start, len(part), setting.method, setting.budget)
        return dict(zip(KEY, values, strict=True))

    def _measure(self, task: Task, part: range, keys: Sequence[dict[str, Any]], bar: Any) -> None:
        samples = [task.sample(index) for index in part]
        prompts = Batch(self.model, samples, self.padding)
        history = prompts.read()
        for setting, key in zip(self.settings, keys, strict=True):
            if key not in self.records:
                begin = time.perf_counter()
                cache = self._cache(setting, task.length, copy.deepcopy(history))
                tokens = prompts.answer(cache, task.new_tokens, self.stops)
                said = [self.tokenizer.decode(row, skip_special_tokens=True) for row in tokens]
                answers = [
                    {
                        "tokens": len(sample.ids),
                        "score": task.score(text, sample),
                        "said": text,
                        "expected": sample.answers,
                    }
                    for text, sample in zip(said, samples, strict=True)
                ]
                seconds = round(time.perf_counter() - begin, 3)
                self.records.add(key | {"answers": answers} | held(cache) | {"seconds": seconds})
            bar.update(len(part))

    def _cache(self, setting: Setting, length: int, history: DynamicCache) -> Cache:
        """A cache of that setting with a history. Its memory is had once for all prompts of one length."""
        if setting.options is None:
            return history
        if length != self._length:
            self._caches.clear()
            self._length = length
        name = (setting.method, setting.budget)
        if name not in self._caches:
            # Where the length is known a graph of a step is captured once.
            self._caches[name] = HierarchicalSparseCache(self.model, **setting.options, max_cache_len=length)
        self._caches[name].take_over(history)
        return self._caches[name]


def batches(count: int, size: int) -> Iterator[range]:
    """The numbers below `count`, in runs of `size`."""
    return (range(first, min(first + size, count)) for first in range(0, count, size))


def held(cache: Cache) -> dict[str, Any]:
    """Hits, misses, and bytes held by a cache, of all its sequences."""
    if isinstance(cache, HierarchicalSparseCache):
        stats = cache.stats()
        names = ("hits", "misses", "bytes_moved", "device_bytes", "host_bytes", "dense_bytes")
        return {name: getattr(stats, name) for name in names}
    layers: list[Any] = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    return {"hits": 0, "misses": 0, "bytes_moved": 0, "device_bytes": nbytes, "host_bytes": 0, "dense_bytes": nbytes}


# ---- the program -----------------------------------------------------------------------------------------------------


def tokens(text: str) -> int:
    """A number of tokens: 4096, or 4K."""
    digits = text.upper().removesuffix("K")
    if not (digits.isdecimal() and int(digits)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, such as 4096 or 4K")
    return int(digits) * (1 if digits == text else 1024)


def make_tasks(args: argparse.Namespace, reader: Reader) -> tuple[list[Task], list[str]]:
    """The tasks that are asked for, and why members of a group of them are left out.

    Raises:
        ValueError: If one that is named is unknown, or its data is not there.
    """
    sources = ruler.Sources(args.essays, args.questions)
    found: list[Task] = []
    refused: list[str] = []
    for name in args.tasks:
        if name == "ruler":
            members = [*ruler.TASKS]
        else:
            members = longbench.datasets(args.longbench) if name == "longbench" else [name]
        for task in members:
            if reason := ruler.missing(task, sources) or longbench.missing(task):
                if task == name:
                    raise ValueError(reason)
                refused.append(reason)
            elif task in ruler.TASKS:
                found += [ruler.TASKS[task](task, length, reader, sources, args.seed) for length in args.lengths]
            elif task == "needles":
                grid = product(args.needles, args.lengths, args.depths)
                found += [NeedleGrid(count, depth, length, reader, sources, args.seed) for count, length, depth in grid]
            elif task in longbench.METRICS:
                found.append(longbench.LongBench(task, max(args.lengths), reader, args.longbench))
            else:
                known = ["ruler", "needles", "longbench", *ruler.TASKS, *longbench.METRICS]
                raise ValueError(f"`--tasks` names {task!r}, which is none of {', '.join(known)}")
    if not found:
        raise ValueError("; ".join(refused) or f"there are no data sets in {args.longbench}")
    different = {(task.name, task.length, task.depth): task for task in found}
    # All of one length in turn: their memory is had once.
    return sorted(different.values(), key=lambda task: task.length), refused


def digest(path: Path | None) -> str | None:
    """What tells a file, or the files of a folder, from others."""
    if path is None:
        return None
    files = sorted(file for file in path.rglob("*.json*") if file.is_file()) if path.is_dir() else [path]
    found = hashlib.sha256()
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, and returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", default="smollm2", help="smollm2, or any on the hub or on disk")
    add("--tasks", nargs="+", default=["needles"], help="ruler, needles, longbench, or single tasks of them")
    add("--lengths", type=tokens, nargs="+", default=[4096], help="tokens of a prompt and its answer: 4096, or 4K")
    add("--samples", type=int, default=20, help="of each task, and of each cell of the grid of needles")
    add("--depths", type=float, nargs="+", default=[0, 0.25, 0.5, 0.75, 1], help="of needles, 0 to 1")
    add("--needles", type=int, nargs="+", default=[1, 4], help="how many are hidden, and asked for")
    add("--algorithm", nargs="+", default=["auto"])
    add("--top-k", type=int, nargs="+", default=[None], help="tokens that a decode step attends to")
    add("--page-size", type=int, nargs="+", default=[None], help="default: the algorithm's")
    add("--batch", type=int, default=1, help="prompts read at once")
    add("--chat", action=argparse.BooleanOptionalAction, help="the tokenizer's chat template; default: if it has one")
    add("--seed", type=int, default=0, help="of the prompts")
    essays = os.environ.get("HISPARSE_ESSAYS")
    add("--essays", type=Path, default=essays and Path(essays), help="JSON file with the essays, or $HISPARSE_ESSAYS")
    add("--questions", type=Path, help="folder with squad.json and hotpotqa.json")
    add("--longbench", type=Path, help="folder with LongBench's files")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 on a CPU")
    add("--output", type=Path, default=Path("eval/results/accuracy"), help="results, without a suffix")
    args = parser.parse_args(argv)
    quiet()

    dtype = args.dtype or ("float32" if torch.device(args.device).type == "cpu" else "bfloat16")
    model, tokenizer = load_model(args.model, args.device, getattr(torch, dtype))
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    try:
        if min(args.samples, args.batch) < 1:
            raise ValueError("`--samples` and `--batch` must be at least 1")
        if min(args.needles) < 1 or not all(0 <= depth <= 1 for depth in args.depths):
            raise ValueError("`--needles` must be at least 1, and `--depths` must lie between 0 and 1")
        if longest and max(args.lengths) > longest:
            raise ValueError(f"`--lengths` has {max(args.lengths)}, and the model takes {longest} positions")
        for path in (args.essays, args.questions, args.longbench):
            if path is not None and not path.exists():
                raise ValueError(f"there is no {path}")
        if args.essays is not None:
            texts.read(args.essays)
        if tokenizer is None:
            raise ValueError(f"`--model {args.model}` has no tokenizer; name one that has")
        reader = Reader(tokenizer, args.chat)
        tasks, left_out = make_tasks(args, reader)
        settings, refused = make_settings(model, args.algorithm, args.page_size, args.top_k)
        if len(settings) == 1:
            raise ValueError("no cache to compare: " + "; ".join(refused))
        where = environment(args.device)
        run = {name: value for name, value in where.items() if name != "command"} | {
            "model": args.model,
            "dtype": dtype,
            "chat": reader.chat,
            "seed": args.seed,
            "batch": args.batch,
            "essays": digest(args.essays),
            "questions": digest(args.questions),
            "longbench": digest(args.longbench),
        }
        records = Records(Path(f"{args.output}.jsonl"), run, KEY)
        for reason in left_out + refused:
            print(f"Left out: {reason}")
        found = Evaluation(model, reader, settings, records).run(tasks, args.samples, args.batch)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    finally:
        unpatch_model(model)

    rows, summary = report.rows(found), report.summary(found)
    common = {name: run[name] for name in ("model", "dtype", "chat", "seed", "batch")}
    write_results(
        f"{args.output}.json", rows, environment=where, **common, left_out=left_out + refused, summary=summary
    )
    print(f"\n{report.write(rows, summary, args.output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
