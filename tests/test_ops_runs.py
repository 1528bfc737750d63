"""Lists of tokens for another library's kernels, and the merging of what comes out: the PyTorch ops against plain
expressions, and the Triton kernels against both.

The kernels' tests run twice: on a CUDA device, marked `gpu`, and on the CPU under Triton's interpreter, which has a
process of its own. To run one of them there: `TRITON_INTERPRET=1 pytest tests/test_ops_runs.py`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from hf_hisparse import ops
from tests.helpers import interpret


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def runs_kernels(test: Callable) -> Callable:
    """Marks a test that runs kernels: on a CUDA device, or wherever they are interpreted."""
    return needs_triton(test if INTERPRETED else pytest.mark.gpu(test))


def on(device: str, arguments: tuple) -> tuple:
    return tuple(each.to(device) if isinstance(each, Tensor) else each for each in arguments)


def kernel(name: str, arguments: tuple) -> Any:
    """What the Triton kernel of an op gives, on the CPU."""
    from hf_hisparse.ops import triton

    output = getattr(triton, name)(*on(DEVICE, arguments))
    return output.cpu() if isinstance(output, Tensor) else tuple(each.cpu() for each in output)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_under_the_interpreter():
    interpret(__file__, "hf_hisparse.ops.triton")


# ---- lists of tokens -------------------------------------------------------------------------------------------------


def selections(rows: int, k: int, page_size: int, run_tokens: int, seed: int, holes: float = 0.3) -> tuple:
    """Arguments of `list_tokens`: selections with holes anywhere, rows of any length, part-filled last items."""
    generator = torch.Generator().manual_seed(seed)
    items, slots = k + 4, k + 9
    selection = torch.stack([torch.randperm(items, generator=generator)[:k] for _ in range(rows)]).int()
    where = torch.stack([torch.randperm(slots, generator=generator)[:k] for _ in range(rows)]).int()
    hidden = torch.rand(rows, k, generator=generator) < holes
    lengths = torch.randint(0, items * page_size + 1, (rows,), generator=generator)
    slot_stride = 2 * page_size
    runs = -(-k * page_size // run_tokens)
    strides = slots * slot_stride, slot_stride
    return where.masked_fill(hidden, -1), selection.masked_fill(hidden, -1), lengths, page_size, *strides, runs


def listed(slots, selection, lengths, page_size, row_stride, slot_stride, runs, run_tokens) -> list[list[int]]:
    """A row's list, written out."""
    rows = []
    for row, (chosen, where) in enumerate(zip(selection.tolist(), slots.tolist(), strict=True)):
        rows.append(
            [
                row * row_stride + slot * slot_stride + within
                for item, slot in zip(chosen, where, strict=True)
                for within in range(page_size)
                if item >= 0 and item * page_size + within < lengths[row]
            ]
        )
    return rows


def check_list(output: tuple[Tensor, Tensor], arguments: tuple) -> None:
    tokens, counts = output
    runs, run_tokens = arguments[-2:]
    rows = len(arguments[0])
    assert tokens.dtype == counts.dtype == torch.int32
    assert tokens.shape == (rows, runs, run_tokens) and counts.shape == (rows, runs)
    for row, expected in enumerate(listed(*arguments)):
        assert tokens[row].flatten().tolist() == expected + [-1] * (runs * run_tokens - len(expected))
        assert counts[row].tolist() == [len(expected[i * run_tokens :][:run_tokens]) for i in range(runs)]


SIZES = st.tuples(
    st.integers(1, 3), st.integers(1, 40), st.sampled_from([1, 2, 3, 16]), st.sampled_from([1, 7, 16, 64, 1000])
)


@settings(max_examples=60)
@given(SIZES, st.integers(0, 1000), st.sampled_from([0.0, 0.3, 1.0]))
def test_list_of_tokens(sizes, seed, holes):
    rows, k, page_size, run_tokens = sizes
    arguments = (*selections(rows, k, page_size, run_tokens, seed, holes), run_tokens)
    check_list(ops.list_tokens(*arguments), arguments)


@runs_kernels
@settings(max_examples=15 if INTERPRETED else 100)
@given(SIZES, st.integers(0, 1000), st.sampled_from([0.0, 0.3, 1.0]))
def test_kernel_lists_tokens(sizes, seed, holes):
    rows, k, page_size, run_tokens = sizes
    arguments = (*selections(rows, k, page_size, run_tokens, seed, holes), run_tokens)
    check_list(kernel("list_tokens", arguments), arguments)


@runs_kernels
@pytest.mark.parametrize(("k", "page_size", "run_tokens"), [(2048, 1, 128), (1030, 2, 384), (64, 32, 2048)])
def test_kernel_lists_several_blocks_of_tokens(k, page_size, run_tokens):
    arguments = (*selections(2, k, page_size, run_tokens, 0), run_tokens)
    check_list(kernel("list_tokens", arguments), arguments)


@runs_kernels
def test_kernel_lists_tokens_of_views():
    """A selection whose columns are apart, and rows that share their length."""
    slots, selection, lengths, *rest = (*selections(3, 20, 4, 16, 1), 16)
    lengths = (lengths[:1] + 40).expand(3)
    spread = torch.stack((selection, slots), dim=-1)
    arguments = (spread[..., 1], spread[..., 0], lengths, *rest)
    check_list(kernel("list_tokens", arguments), arguments)


# ---- merging ---------------------------------------------------------------------------------------------------------


def parts(rows, runs, heads, width, dtype=torch.float32, seed=0, empty=0.3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments of `merge_runs`. What an empty run says is loud."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 100, (rows, runs), generator=generator).int()
    counts[torch.rand(rows, runs, generator=generator) < empty] = 0
    some = counts > 0
    partial = torch.randn(rows, runs, heads, width, generator=generator).to(dtype)
    weights = 30 * torch.randn(rows, runs, heads, generator=generator)
    loud = torch.where(torch.rand(rows, runs, heads, generator=generator) < 0.5, torch.inf, torch.nan)
    partial = torch.where(some[..., None, None], partial, loud.unsqueeze(-1).to(dtype))
    weights = torch.where(some.unsqueeze(-1), weights, loud)
    return partial, weights, counts, 30 * torch.randn(rows, heads, generator=generator)


def merged(partial: Tensor, weights: Tensor, counts: Tensor, sinks: Tensor | None = None) -> Tensor:
    """The same in float64, a row at a time."""
    rows = []
    for row, some in enumerate(counts > 0):
        logits, values = weights[row, some].double(), partial[row, some].double()
        if not some.any():
            rows.append(torch.zeros(partial.shape[2:], dtype=torch.float64))
            continue
        if sinks is not None:
            logits = torch.cat((logits, sinks[row].double().unsqueeze(0)))
            values = torch.cat((values, torch.zeros_like(values[:1])))
        rows.append((logits.softmax(0).unsqueeze(-1) * values).sum(0))
    return torch.stack(rows)


def check_merged(output: Tensor, arguments: tuple) -> None:
    partial = arguments[0]
    assert output.dtype == partial.dtype and output.shape == (partial.shape[0], *partial.shape[2:])
    # Logits of about 100 are exact to 1e-5 in float32, and so their exponents.
    eps = torch.finfo(partial.dtype).eps
    torch.testing.assert_close(output.double(), merged(*arguments), rtol=eps, atol=1e-4)


RUNS = st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 5), st.sampled_from([1, 8, 20, 512]))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@settings(max_examples=60)
@given(RUNS, st.sampled_from(DTYPES), st.booleans(), st.integers(0, 1000))
def test_merging(sizes, dtype, sinks, seed):
    arguments = parts(*sizes, dtype=dtype, seed=seed)[: 4 if sinks else 3]
    check_merged(ops.merge_runs(*arguments), arguments)


@runs_kernels
@settings(max_examples=15 if INTERPRETED else 100)
@given(RUNS, st.sampled_from(DTYPES), st.booleans(), st.integers(0, 1000))
def test_kernel_merges(sizes, dtype, sinks, seed):
    arguments = parts(*sizes, dtype=dtype, seed=seed)[: 4 if sinks else 3]
    check_merged(kernel("merge_runs", arguments), arguments)


@runs_kernels
@pytest.mark.parametrize("empty", [0.0, 1.0])
def test_sinks_that_take_nothing_and_everything(empty):
    partial, weights, counts, sinks = parts(2, 3, 4, 16, empty=empty)
    nothing = torch.full_like(sinks, -torch.inf)
    assert torch.equal(
        kernel("merge_runs", (partial, weights, counts, nothing)), kernel("merge_runs", (partial, weights, counts))
    )
    assert not kernel("merge_runs", (partial, weights, counts, sinks + 1000)).any()
    wide = sinks[:1].expand(2, -1)
    check_merged(kernel("merge_runs", (partial, weights, counts, wide)), (partial, weights, counts, wide))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_triton])])
def test_opcheck(device):
    opcheck(ops.list_tokens, on(device, (*selections(2, 9, 4, 16, 0), 16)))
    opcheck(ops.merge_runs, on(device, parts(2, 3, 4, 8, empty=0.0)))
