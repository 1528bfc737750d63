"""The lightning indexer's scores: the PyTorch op against float64, and the Triton kernel against both.

The kernel's tests run twice: on a CUDA device, marked `gpu`, and on the CPU under Triton's interpreter, which has a
process of its own. To run one of them there: `TRITON_INTERPRET=1 pytest tests/test_ops_triton.py`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from hf_hisparse import ops
from hf_hisparse.ops import reference
from tests.helpers import interpret


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def runs_kernels(test: Callable) -> Callable:
    """Marks a test that runs kernels: on a CUDA device, or wherever they are interpreted."""
    return needs_triton(test if INTERPRETED else pytest.mark.gpu(test))


def kernel(*arguments: Any) -> Tensor:
    """The Triton kernel's scores, on the CPU."""
    from hf_hisparse.ops import triton

    return triton.score_indexer(*(each.to(DEVICE) if isinstance(each, Tensor) else each for each in arguments)).cpu()


class Case(NamedTuple):
    """The op's arguments."""

    query: Tensor
    weights: Tensor
    keys: Tensor
    tokens: int
    scale: float
    positions: Tensor

    @classmethod
    def random(
        cls, batch=1, queries=1, heads=4, width=16, tokens=40, spare=0, dtype=torch.float32, seed=0, positions=None
    ) -> Case:
        """Random arguments. Every row but the first ends before the tokens do."""
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        positions = positions or [tokens - queries - row for row in range(batch)]
        query, keys = draw(batch, queries, heads, width), draw(batch, tokens + spare, width)
        return cls(
            query.to(dtype),
            draw(batch, queries, heads),
            keys.to(dtype),
            tokens,
            width**-0.5,
            torch.tensor(positions),
        )

    def expected(self) -> tuple[Tensor, Tensor]:
        """The scores in float64, and the sums of their terms' sizes, which rounding is relative to."""
        keys = self.keys[:, : self.tokens].double()
        products = torch.einsum("bqhd,bkd->bqhk", self.query.double(), keys)
        sizes = torch.einsum("bqhd,bkd->bqhk", self.query.double().abs(), keys.abs())
        weights = self.weights.double().unsqueeze(-1) * self.scale
        scores, sizes = (weights * products.relu()).sum(2), (weights.abs() * sizes).sum(2)
        token = torch.arange(self.tokens)
        last = (self.positions.unsqueeze(1) + torch.arange(self.query.shape[1])).unsqueeze(-1)
        return scores.masked_fill(token > last, -torch.inf), sizes

    def check(self, scores: Tensor) -> None:
        expected, sizes = self.expected()
        assert scores.dtype == torch.float32 and scores.shape == expected.shape
        seen = expected > -torch.inf
        assert torch.equal(scores > -torch.inf, seen) and not scores.isnan().any()
        # A sum of `heads * width` products, in float32 and in any order.
        terms = self.query.shape[2] * self.query.shape[3]
        bound = sizes * torch.finfo(torch.float32).eps * (4 + terms**0.5)
        assert bool(((scores - expected)[seen].abs() <= bound[seen]).all())


# ---- the PyTorch op --------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.data())
def test_scores_equal_the_plain_expression(data):
    batch, tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 50))
    queries = data.draw(st.integers(1, 9))
    positions = [data.draw(st.integers(-1, tokens)) for _ in range(batch)]
    heads, width, seed = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 20)), data.draw(st.integers(0, 1000))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    case = Case.random(batch, queries, heads, width, tokens, 3, dtype, seed, positions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "PRODUCTS", data.draw(st.sampled_from([1, 60, 1 << 24])))
        case.check(ops.score_indexer(*case))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_opcheck(device):
    case = Case.random(2, 3, spare=4)
    opcheck(ops.score_indexer, tuple(each.to(device) if isinstance(each, Tensor) else each for each in case))


# ---- the kernel ------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_under_the_interpreter():
    interpret(__file__, "hf_hisparse.ops.triton")


DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(
        torch.bfloat16,
        marks=pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter multiplies bfloat16 wrongly"),
    ),
]
SHAPES: dict[str, dict[str, Any]] = {
    "a decode step": {"heads": 64, "width": 128, "tokens": 700, "spare": 68},
    "a batch of decode steps": {"batch": 3, "heads": 32, "width": 128, "tokens": 300},
    "a prompt": {"queries": 200, "heads": 8, "width": 64, "tokens": 200},
    "prompts of a batch": {"batch": 3, "queries": 70, "heads": 4, "width": 32, "tokens": 70},
    "a chunk": {"batch": 2, "queries": 33, "heads": 16, "width": 128, "tokens": 290, "spare": 1},
    "one token": {"tokens": 1, "width": 8, "heads": 1},
    "odd sizes": {"batch": 2, "queries": 5, "heads": 5, "width": 20, "tokens": 131},
    "many heads": {"queries": 2, "heads": 100, "width": 96, "tokens": 140},
    "wide": {"queries": 3, "heads": 3, "width": 300, "tokens": 90},
}


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_against_float64(shape, dtype):
    case = Case.random(**SHAPES[shape], dtype=dtype)
    case.check(kernel(*case))


@runs_kernels
@settings(max_examples=25)
@given(st.data())
def test_kernel_of_random_positions(data):
    """Rows that end before the tokens do, and queries that see nothing or everything."""
    queries, tokens = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 300))
    positions = [data.draw(st.integers(-1, tokens)), data.draw(st.integers(-1, tokens))]
    case = Case.random(2, queries, 2, 8, tokens, seed=queries, positions=positions)
    case.check(kernel(*case))


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_query_scores_the_same_bits_whatever_else_is_asked(dtype):
    """In a prompt, in a chunk of one, alone in a decode step, beside other rows, and with room for more tokens."""
    case = Case.random(2, 40, 8, 64, 150, 50, dtype)
    scores = kernel(*case)
    for low, high in ((0, 1), (7, 40), (39, 40)):
        query, weights = case.query[:, low:high], case.weights[:, low:high]
        for tokens in (150, 173):
            some = kernel(query, weights, case.keys, tokens, case.scale, case.positions + low)
            assert torch.equal(some[..., :150], scores[:, low:high])
            alone = (each[1:] for each in (query, weights, case.keys))
            assert torch.equal(kernel(*alone, tokens, case.scale, case.positions[1:] + low), some[1:])


@runs_kernels
@pytest.mark.parametrize("loud", [torch.inf, torch.nan])
def test_kernel_ignores_keys_beyond_the_tokens(loud):
    case = Case.random(2, 3, 4, 16, 100, 60)
    scores = kernel(*case)
    case.keys[:, 100:] = loud
    assert torch.equal(kernel(*case), scores)


@runs_kernels
def test_kernel_takes_views():
    """Queries of a longer prompt and other layouts, as the indexer and the model make them."""
    case = Case.random(2, 20, 4, 16, 60)
    expected = kernel(*case._replace(query=case.query[:, 5:9].clone(), weights=case.weights[:, 5:9].clone()))
    assert torch.equal(kernel(*case._replace(query=case.query[:, 5:9], weights=case.weights[:, 5:9])), expected)
    turned = {
        "query": case.query[:, 5:9].transpose(1, 2).contiguous().transpose(1, 2),
        "weights": case.weights[:, 5:9].transpose(1, 2).contiguous().transpose(1, 2),
        "keys": case.keys.transpose(1, 2).contiguous().transpose(1, 2),
    }
    assert torch.equal(kernel(*case._replace(**turned)), expected)


@runs_kernels
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.zeros(2, 60, 8)}, r"`keys`.*\[2, 60, 16\].*\[2, 60, 8\]"),
        ({"keys": torch.zeros(2, 60, 16, dtype=torch.float16)}, r"`keys`.*float32.*float16"),
        ({"weights": torch.zeros(2, 3, 5)}, r"`weights`.*\[2, 3, 4\].*\[2, 3, 5\]"),
        ({"weights": torch.zeros(2, 3, 4, dtype=torch.float16)}, r"`weights`.*float32.*float16"),
        ({"positions": torch.zeros(2, dtype=torch.int32)}, r"`positions`.*int64.*int32"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, r"`positions`.*\[2\].*\[3\]"),
        ({"query": torch.zeros(2, 3, 4, 16, dtype=torch.float64)}, r"`query`.*float64"),
        ({"tokens": 61}, r"`tokens` is 61.*\[2, 60, 16\]"),
        ({"tokens": 0}, r"`tokens` is 0"),
        ({"scale": -1.0}, r"`scale` must be positive, not -1.0"),
    ],
)
def test_arguments_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        kernel(*Case.random(2, 3, tokens=60)._replace(**change))


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize(("queries", "tokens"), [(1, 131072), (300, 131072), (300, 9001)])
def test_kernel_equals_the_op_at_full_size(queries, tokens):
    """64 heads of 128, as DeepSeek-V3.2's, in bfloat16. And what is selected differs in near-ties alone."""
    case = Case.random(1, queries, 64, 128, tokens, dtype=torch.bfloat16)
    arguments = [each.cuda() if isinstance(each, Tensor) else each for each in case]
    scores = ops.score_indexer(*arguments)[0]
    with ops.score_indexer.set_kernel_enabled("cuda", enabled=False):
        expected = ops.score_indexer(*arguments)[0]
    seen = expected > -torch.inf
    assert torch.equal(scores > -torch.inf, seen)
    tolerance = 1e-5 * float(expected[seen].abs().max())
    assert float((scores - expected)[seen].abs().max()) <= tolerance
    chosen, wanted = (ops.top_k(each, 2048) for each in (scores, expected))
    assert torch.equal((chosen >= 0).sum(1), (wanted >= 0).sum(1))
    worst = expected.gather(1, wanted.clamp(min=0).long()).masked_fill(wanted < 0, torch.inf).amin(1)
    found = expected.gather(1, chosen.clamp(min=0).long()).masked_fill(chosen < 0, torch.inf).amin(1)
    assert bool((found >= worst - 2 * tolerance).all())


@pytest.mark.gpu
@needs_triton
def test_offsets_beyond_32_bits():
    """Scores of more than 2^31 elements, and keys whose rows begin beyond as many."""
    tokens, tail, queries = 1 << 21, 2048, 1100
    case = Case.random(1, queries, 1, 16, tail, dtype=torch.float16)
    keys = torch.zeros(1, tokens, 16, dtype=torch.float16)
    keys[:, -tail:] = case.keys
    large = case._replace(keys=keys, tokens=tokens, positions=case.positions + tokens - tail)
    scores, small = (
        ops.score_indexer(*(each.cuda() if isinstance(each, Tensor) else each for each in one)) for one in (large, case)
    )
    assert scores.numel() > 1 << 31
    # Keys of zeros score zero, and every query sees them.
    assert torch.equal(scores[..., -tail:], small) and not scores[..., :-tail].any()


@pytest.mark.gpu
@needs_triton
def test_no_synchronisation_and_capture():
    """The host never waits for the device, and a captured graph scores other queries at other positions."""
    case = Case.random(2, 1, 64, 128, 3000, dtype=torch.bfloat16)
    arguments = [each.cuda() if isinstance(each, Tensor) else each for each in case]
    ops.score_indexer(*arguments)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.score_indexer(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = ops.score_indexer(*arguments)
    for _ in range(2):
        graph.replay()
        assert torch.equal(output, ops.score_indexer(*arguments))
        arguments[0].copy_(torch.randn_like(arguments[0]))
        arguments[-1].sub_(700)


@pytest.fixture
def dispatch() -> Any:
    """The module that chooses between kernel and PyTorch, as when neither was ever called."""
    import hf_hisparse.ops as module

    for cached in (module._unavailable, module._warn):
        cached.cache_clear()
    yield module
    for cached in (module._unavailable, module._warn):
        cached.cache_clear()


def scored_in_pytorch(score: Callable[..., Tensor], case: Case, device: str) -> str:
    """Scores a case twice, and in threads, and returns what the one warning says."""
    arguments = [each.to(device) if isinstance(each, Tensor) else each for each in case]
    expected = reference.in_pytorch(ops.score_indexer, *arguments)
    case.check(expected.cpu())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [score(*arguments) for _ in range(2)]
        with ThreadPoolExecutor(4) as threads:
            found += threads.map(lambda _: score(*arguments), range(40))
    assert all(torch.equal(each, expected) for each in found)
    (warning,) = [each for each in caught if "indexer's scores are computed in PyTorch" in str(each.message)]
    assert warning.category is RuntimeWarning
    # For others the kernel is there as before.
    assert not ops.score_indexer._disabled_kernel
    return str(warning.message)


@pytest.mark.gpu
def test_a_gpu_without_triton_scores_in_pytorch_and_says_why_once(dispatch, monkeypatch):
    def fails(index):
        raise RuntimeError("no compiler, on purpose")

    if importlib.util.find_spec("triton") is not None:
        monkeypatch.setattr("hf_hisparse.ops.triton.probe", fails)
    said = scored_in_pytorch(ops.score_indexer, Case.random(2, 3), "cuda")
    assert "no compiler, on purpose" in said or importlib.util.find_spec("triton") is None


@needs_triton
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_dtype_that_the_kernel_does_not_take_is_scored_in_pytorch_and_says_so_once(dispatch, monkeypatch, device):
    if device == "cpu":
        monkeypatch.setattr(dispatch, "_unavailable", functools.cache(lambda index: None))
    score = ops.score_indexer if device == "cuda" else dispatch._score_indexer
    assert "float64" in scored_in_pytorch(score, Case.random(2, 3, dtype=torch.float64), device)
