"""The programs of `eval`, on tiny models: they run, and say what they say they say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eval import bench_attention, bench_decode, exactness, readme_tables, sweep
from eval.common import TINY_MODELS, environment
from eval.policies import POLICIES, simulate
from hf_hisparse import HierarchicalSparseCache
from hf_hisparse.coordinator import SparseCoordinator
from hf_hisparse.memory import pinned
from hf_hisparse.trace import LayerTrace, Trace
from tests.helpers import DEVICE, METHODS, decode, forward, make_model, random_ids, same_bits


CONTEXT, NEW, BATCH = 120, 9, 2
OURS = ["hierarchical", "resident"]
# On a GPU, `generate` compiles the steps of a static cache: minutes, of which this project has no part.
THEIRS = ["dynamic", "static"] if DEVICE.type == "cpu" else ["dynamic", "offloading"]


@pytest.fixture(autouse=True)
def as_loud_as_before(monkeypatch):
    """What the program silences for its process stays as it is for the other tests."""
    for program in (bench_decode, sweep):
        monkeypatch.setattr(program, "quiet", lambda: None)


def bench(output: Path, *more: str) -> tuple[int, dict[str, Any]]:
    """The exit status, and what was written."""
    sizes = f"--model tiny --context {CONTEXT} --batch {BATCH} --new-tokens {NEW} --repeat 2 --dtype float32".split()
    ours = "--top-k 64 --page-size 4 --algorithm quest".split()
    status = bench_decode.main([*sizes, *ours, "--device", str(DEVICE), "--output", str(output), *more])
    return status, json.loads(output.read_text())


def commands() -> Iterator[tuple[str, str, list[str]]]:
    """Where a program of this project is named, which it is, and the options that it is given there."""
    root = Path(__file__).parents[1]
    sources = [*root.glob("*.md"), *root.glob("examples/*.ipynb")]
    sources += [file for folder in ("eval", "examples", "hf_hisparse") for file in root.glob(f"{folder}/**/*.py")]
    for file in sources:
        text = file.read_text().replace("\\\n", " ")
        for module, rest in re.findall(r"python -m ((?:eval|hf_hisparse)[\w.]*)([^`\n]*)", text):
            yield str(file.relative_to(root)), module, re.findall(r"(?<!\S)(--[\w-]+)", rest)


@pytest.mark.parametrize("module", sorted({module for _, module, _ in commands()}))
def test_the_commands_that_are_written_down(module):
    """Are of programs that there are, with options that they have."""
    root = Path(__file__).parents[1]
    path = root / module.rstrip(".").replace(".", "/")
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    where = [source for source, named, _ in commands() if named == module]
    assert file.is_file() and '__name__ == "__main__"' in file.read_text(), f"{where}: there is no program {module}"
    if not path.is_dir():
        # What has a folder of its own takes another program's options.
        given = {option for _, named, options in commands() if named == module for option in options}
        assert given <= {*re.findall(r'"(--[\w-]+)"', file.read_text())}, where


def test_a_commit_that_is_named_is_the_one_recorded(monkeypatch):
    """Also in a checkout, which may be of another."""
    monkeypatch.setenv("HISPARSE_COMMIT", "abc1234")
    assert environment()["commit"] == "abc1234"
    monkeypatch.delenv("HISPARSE_COMMIT")
    assert environment()["commit"] != "abc1234"


@pytest.mark.parametrize("model", TINY_MODELS)
def test_exactness(model, monkeypatch, tmp_path):
    """The random models of `eval` keep every guarantee: those with an indexer take the stock model's tokens."""
    monkeypatch.setattr(exactness, "quiet", lambda: None)
    output = tmp_path / "rows.json"
    sizes = f"--model {model} --context 400 --new-tokens 32 --batch 2 --device {DEVICE} --json {output}".split()
    monkeypatch.setattr("sys.argv", ["exactness", *sizes])
    assert exactness.main() == 0
    ours = json.loads(output.read_text())["rows"][-1]
    assert ours["bits_of_oracle"] and ours["hit_rate"] > 0


def test_bench_decode(tmp_path, capsys):
    status, written = bench(tmp_path / "rows.json", "--caches", *OURS, *THEIRS)
    assert status == 0
    assert written["model"] == "tiny" and written["weights"] == "random" and written["selection"] == "the algorithm's"
    assert written["top_k"] == 64 and written["environment"]["torch"] == torch.__version__
    rows = {row["cache"]: row for row in written["rows"]}
    assert list(rows) == [*OURS, *THEIRS]
    printed = capsys.readouterr().out
    assert all(name in printed for name in rows)
    for row in rows.values():
        assert (row["context"], row["batch"], row["new_tokens"], row["steps"]) == (CONTEXT, BATCH, NEW, 2 * (NEW - 1))
        assert min(row["ttft_all_s"]) > 0 and len(row["ttft_all_s"]) == 2
        assert 0 < row["tpot_ms"] <= row["tpot_p99_ms"] <= row["tpot_p999_ms"] and row["tokens_per_s"] > 0
        assert row["weights_bytes"] > 0 and row["host_allocation_s"] >= 0
        assert row.get("selection") == ("the algorithm's" if row["cache"] in OURS else None)
        if row["cache"] in OURS or DEVICE.type == "cpu":
            assert (row["graph_pool_bytes"] > 0) == (DEVICE.type == "cuda")
        if DEVICE.type == "cuda":
            assert row["rest_bytes"] > 0 and row["peak_prefill_bytes"] > row["weights_bytes"]
    # Keys and values of 4 layers and 2 heads, 16 wide, in float32.
    dense = 2 * 4 * BATCH * 2 * (CONTEXT + NEW - 1) * 16 * 4
    assert rows["dynamic"]["kv_bytes"] == dense <= rows["resident"]["kv_bytes"]
    ours = rows["hierarchical"]
    assert ours["kv_bytes"] == 0 and ours["host_bytes"] >= dense and ours["buffer_bytes"] > 0
    assert ours["representation_bytes"] >= rows["resident"]["representation_bytes"] > 0
    assert 0 < ours["hit_rate"] < 1
    # 16 pages of 4 tokens a layer, sequence and head, every step.
    selected = (NEW - 1) * 4 * BATCH * 2 * 16
    moved = round((1 - ours["hit_rate"]) * selected) * 4 * 2 * 16 * 4
    assert ours["bytes_moved_a_step"] == pytest.approx(moved / (NEW - 1))
    assert rows["resident"]["bytes_moved_a_step"] == rows["dynamic"]["bytes_moved_a_step"] == 0


def test_bench_decode_without_memory(tmp_path, monkeypatch):
    """A row that says so, and the others after it."""

    def none(size: int, device: object) -> None:
        raise MemoryError(f"no {size} bytes")

    monkeypatch.setattr(pinned, "allocate", none)
    status, written = bench(tmp_path / "rows.json", "--caches", *OURS)
    assert status == 0
    failed, resident = written["rows"]
    assert failed["error"].startswith("out of memory: no ") and "tpot_ms" not in failed
    assert "error" not in resident and resident["tpot_ms"] > 0


def test_bench_decode_that_fails_otherwise(tmp_path):
    status, written = bench(tmp_path / "rows.json", "--caches", *OURS, "--buffer-size", "8")
    assert status == 1 and all("ValueError: `buffer_size=8`" in row["error"] for row in written["rows"])


@pytest.mark.parametrize("overlap", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_overlapping_selections(method, overlap, monkeypatch):
    """Each step's selection shares with the last one what was asked for, and a prompt keeps its own."""
    name, options = METHODS[method]
    model, tokens, steps = make_model(name), 400, 6
    seen: list[Tensor] = []
    attend = SparseCoordinator.attend

    def recording(self, query, selection, *args, **kwargs):
        seen.append(selection.clone())
        return attend(self, query, selection, *args, **kwargs)

    monkeypatch.setattr(SparseCoordinator, "attend", recording)
    cache, plain = HierarchicalSparseCache(model, **options), HierarchicalSparseCache(model, **options)
    source = bench_decode.Overlapping(overlap, steps, DEVICE)
    source.attach(cache)
    prompt = random_ids(2, tokens)
    assert same_bits(forward(model, prompt, cache), forward(model, prompt, plain))
    for token in random_ids(1, steps)[0]:
        forward(model, token.expand(2, 1), cache)
        source(token, token)
    layers, layout = len(cache.layers), cache.layers[0].coordinator.memory.layout
    k, items = cache.layers[0].coordinator.k, layout.items(tokens)
    assert len(seen) == layers * steps and all(chosen.dtype == torch.int32 for chosen in seen)
    chosen = [[set(row) for row in selection.tolist()] for selection in seen[::layers]]
    assert all(len(row) == k and min(row) >= 0 and max(row) <= items for rows in chosen for row in rows)
    for before, after in pairwise(chosen):
        assert all(len(a & b) == round(overlap * k) for a, b in zip(before, after, strict=True))
    # A buffer of two selections keeps what the steps share: the first finds nothing, but for what was appended.
    shared = round(overlap * k) * (steps - 1) / (k * steps)
    assert cache.stats().hit_rate == pytest.approx(shared, abs=0.05)


@pytest.mark.cpu
def test_bench_attention(tmp_path, monkeypatch, capsys):
    """Every backend has its times or its reason, in the file, in what is printed and in the table of it."""

    class Machine:
        def __init__(self, **_: int):
            self.empty = lambda *_: None

        def time(self, steps: list[Any]) -> float:
            return 5.0

    def measure(machine: Machine, work: list[Any]) -> dict[str, float]:
        assert all(torch.is_tensor(attend()) for attend in work)
        return {"us": 1234.0, "back_to_back_us": 7.0}

    small = [setting._replace(k=8, rows=(2,), shared=setting.shared and 40) for setting in bench_attention.SETTINGS]
    stand_ins = {"Bench": Machine, "measure": measure, "copy_rate": lambda _: 1e6, "DEVICE": torch.device("cpu")}
    for name, value in {**stand_ins, "SETTINGS": small}.items():
        monkeypatch.setattr(bench_attention, name, value)
    bench_attention.main(["--output", str(tmp_path / "bench_attention.json")])
    rows = json.loads((tmp_path / "bench_attention.json").read_text())["rows"]
    assert len(rows) == len(small) * len({row["backend"] for row in rows})
    assert all(("us" in row and row["error"] < 1e-2) != bool(row.get("refused")) for row in rows)
    assert all("us" in row for row in rows if row["backend"] == "reference")
    assert capsys.readouterr().out.count("1234.0") == len([row for row in rows if "us" in row])
    monkeypatch.setattr(readme_tables, "RESULTS", tmp_path)
    assert readme_tables.attention().count("1234") == len([row for row in rows if "us" in row])


# ---- traces ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Of a model with other layers and rows than the one of `bench`."""
    model, tokens = make_model("llama"), 110
    cache = HierarchicalSparseCache(model, top_k=64, page_size=4, algorithm="quest")
    with cache.record_trace() as recorded:
        decode(model, random_ids(1, tokens + NEW), cache, tokens)
    assert (len(recorded.layers), recorded.layers[0].selections.shape[1]) == (2, 2)
    return recorded


def test_bench_decode_replays_a_trace(trace, tmp_path, monkeypatch):
    """Its layers and rows in turn, from its first step on; what is missed is what the simulation says."""
    trace.save(tmp_path / "trace.npz")
    seen: list[Tensor] = []
    attend = SparseCoordinator.attend

    def recording(self, query, selection, *args, **kwargs):
        seen.append(selection.clone())
        return attend(self, query, selection, *args, **kwargs)

    monkeypatch.setattr(SparseCoordinator, "attend", recording)
    more = ["--caches", "eager", "--trace", str(tmp_path / "trace.npz"), "--repeat", "1"]
    sizes = (
        f"--model tiny --context {CONTEXT} --batch {BATCH} --new-tokens {NEW} --dtype float32 --device {DEVICE}".split()
    )
    output = tmp_path / "rows.json"
    assert bench_decode.main([*sizes, *more, "--output", str(output)]) == 0
    written = json.loads(output.read_text())
    (row,) = written["rows"]
    assert "a trace of LlamaForCausalLM, Quest(page_size=4), 2 layers of 2 rows, 110 tokens" in row["selection"]
    assert written["selection"].endswith("trace.npz") and (written["top_k"], written["page_size"]) == (64, 4)
    # Of the run that is timed: 4 layers, and 2 heads of 2 sequences.
    seen = seen[-4 * (NEW - 1) :]
    for step in range(NEW - 1):
        for layer in range(4):
            recorded = torch.from_numpy(trace.layers[layer % 2].selections[step])
            assert torch.equal(seen[4 * step + layer].cpu(), recorded.repeat(2, 1))


def test_a_trace_that_does_not_fit_is_a_row_that_says_so(trace, tmp_path):
    trace.save(tmp_path / "trace.npz")
    more = ["--caches", "hierarchical", "--trace", str(tmp_path / "trace.npz")]
    for wrong, message in (
        (["--top-k", "60"], "the trace selects 16 items of 4 tokens, and the model 15 of 4; use `--top-k 64"),
        (["--context", "100"], "the trace is of 110 tokens; use a `--context` of that or more"),
        (["--new-tokens", "20"], "the trace has 9 decode steps, and 19 are generated; record more"),
    ):
        status, written = bench(tmp_path / "rows.json", *more, *wrong)
        assert status == 1 and message in written["rows"][0]["error"]
    for wrong in (["--overlap", "0.5"], ["--trace", str(tmp_path / "none.npz")]):
        with pytest.raises(SystemExit):
            bench(tmp_path / "rows.json", *more, *wrong)


def test_sweep(tmp_path, capsys):
    """Records, simulates and measures; and takes up what it recorded."""
    output, kept = tmp_path / "rows.json", tmp_path / "trace.npz"
    more = (
        f"--model llama-tiny --new-tokens {NEW} --top-k 64 --page-size 4 --device {DEVICE} --dtype float32 --repeat 1"
    )
    files = ["--output", str(output), "--save-trace", str(kept)]
    sizes = ["--sizes", "2", "1", "--context", str(CONTEXT)]
    assert sweep.main([*more.split(), *sizes, "--live", "--slowdown", "1e9", *files]) == 0
    written, printed = json.loads(output.read_text()), capsys.readouterr().out
    trace = Trace.load(kept)
    rows = {(row["eviction"], row["size"]): row for row in written["rows"]}
    assert list(rows) == [(name, size) for name in ("lru", "fifo", "lfu", "belady") for size in (1, 2)]
    assert written["trace"]["steps"] == trace.steps == NEW - 1 and written["trace"]["context"] == CONTEXT
    for (name, size), row in rows.items():
        assert row["buffer_size"] == 64 * size and row["steps"] == NEW - 2
        # Keys and values of 4 layers and 2 heads, 16 wide, in float32.
        assert row["buffer_bytes"] == 2 * 4 * 2 * 16 * 4 * 64 * size
        selected = (NEW - 2) * 4 * 2 * 16
        moved = round((1 - row["hit_rate"]) * selected) * 4 * 2 * 16 * 4
        assert row["bytes_a_step"] == pytest.approx(moved / (NEW - 2)) and row["bytes_p99"] >= row["bytes_a_step"]
        assert "modelled_ms" not in row
        assert row["hit_rate"] <= rows["belady", size]["hit_rate"] and ("measured_ms" in row) == (name == "lru")
    for size in (1, 2):
        # The first step, which misses all, is counted there.
        hits, misses, _ = simulate(trace, size, POLICIES["lru"])
        assert rows["lru", size]["measured_hit_rate"] == pytest.approx(hits.sum() / (hits + misses).sum())
    assert written["recommended"] == 64 and "buffer_size=64" in printed and "next step's too" in printed

    assert sweep.main(["--trace", str(kept), "--sizes", "1", "2", "--output", str(output)]) == 0
    again = json.loads(output.read_text())
    assert again["recommended"] is None and "`--step-ms`, or `--live`" in capsys.readouterr().out
    for row in again["rows"]:
        assert row == {name: rows[row["eviction"], row["size"]][name] for name in row}
    times = ["--step-ms", "1", "--gb-per-s", "1e-3", "--slowdown"]
    for slowdown, best in ((1e9, 64), (0, None)):
        assert (
            sweep.main(["--trace", str(kept), "--sizes", "1", "2", "--output", str(output), *times, str(slowdown)]) == 0
        )
        found = json.loads(output.read_text())
        assert found["recommended"] == best
        assert all(row["modelled_p99_ms"] == pytest.approx(1 + row["bytes_p99"] / 1e3) for row in found["rows"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--sizes 0.5", "--sizes are at least 1"),
        ("--sizes nan", "--sizes are at least 1"),
        ("--sizes 1 5000", "--sizes: a buffer holds at most 32768 items, here 2048 x top-k"),
        ("--evictions fifo", "--evictions has the cache's own, lru"),
        ("--context 0", "--context and --repeat 1"),
        ("--context 60", "`--context 60` is not longer than top-k"),
        ("--new-tokens 2", "--new-tokens is at least 3"),
        ("--new-tokens 4 --live", "--live: ValueError: the trace has 3 decode steps"),
        ("--step-ms -1", "--slowdown and --step-ms are not negative"),
        ("--slowdown -0.1", "--slowdown and --step-ms are not negative"),
        ("--dtype float12", "invalid choice: 'float12'"),
        ("--trace none.npz", "No such file or directory"),
    ],
)
def test_arguments_of_a_sweep_that_do_not_fit(more, message, tmp_path, capsys):
    sizes = f"--model llama-tiny --top-k 64 --page-size 4 --context 80 --new-tokens 9 --device {DEVICE}"
    with pytest.raises(SystemExit):
        sweep.main([*sizes.split(), "--dtype", "float32", "--output", str(tmp_path / "rows.json"), *more.split()])
    assert message in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_a_text_that_is_shorter_than_the_context(tmp_path):
    """Is not read as if it were all that was asked for."""
    path = tmp_path / "essays.json"
    path.write_text(json.dumps({"text": "One. Two three."}))
    model = SimpleNamespace(device=DEVICE)

    def tokenizer(text: str, return_tensors: str) -> SimpleNamespace:
        return SimpleNamespace(input_ids=torch.tensor([[*text.encode()]]))

    assert sweep.read(model, tokenizer, path, 10).shape == (1, 10)
    with pytest.raises(ValueError, match="`--context 11` is more than the text has, 10 tokens"):
        sweep.read(model, tokenizer, path, 11)
    path = tmp_path / "word.json"
    path.write_text('{"text": "word"}')
    with pytest.raises(ValueError, match=r"word.json has no sentence that begins after 0 characters"):
        sweep.read(model, tokenizer, path, 1)


def test_what_selections_have_in_common():
    """Two layers of one row, three steps, two items each, in pages of 2 tokens."""
    first = np.array([[[0, 1]], [[1, 2]], [[2, -1]]], np.int32)
    second = np.array([[[0, 1]], [[3, 0]], [[0, 2]]], np.int32)
    layers = [LayerTrace(i, 2, 8, 4, selections) for i, selections in enumerate((first, second))]
    trace = Trace("", "", 4, 1, np.array([7, 8, 9]), np.array([True, False, False]), layers)
    found = sweep.overlap(trace)
    assert found["steps"] == [2 / 4, 2 / 4]
    assert found["layers"] == [3 / 5, None]
    assert found["neighbours"] == [2 / 5, 1 / 6]
    # Of 4, 4 and 5 items, the last of which has none behind it.
    assert found["chance"] == pytest.approx([(1 / 3 + 1 / 3 + 0) / 3, (1 / 3 + 1 / 3 + 1 / 4) / 3])
