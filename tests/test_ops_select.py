"""Scores and top-k: PyTorch ops against plain computations that share no code with them, kernels against both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from hf_hisparse import ops
from hf_hisparse.algorithms import ALGORITHMS, KeyScoring, Quest, RaBitQ
from hf_hisparse.ops import cuda, heuristics
from hf_hisparse.ops.reference import rotation


gpu = pytest.mark.gpu
INF, NAN = math.inf, math.nan
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- top-k -----------------------------------------------------------------------------------------------------------


def plain_top_k(
    scores: list[float],
    k: int,
    length: int | None = None,
    page: int = 1,
    sink: int = 0,
    recent: int = 0,
) -> list[int]:
    """One row's selection, by sorting."""
    length = len(scores) * page if length is None else length
    ranked = []
    for item, score in enumerate(scores):
        first, last = item * page, item * page + page - 1
        if first >= length:
            break
        if first < sink or (recent and last >= length - recent):
            score = INF
        if score > -INF:
            ranked.append((-score, item))
    ids = sorted(item for _, item in sorted(ranked)[:k])
    return ids + [-1] * (k - len(ids))


def check_top_k(scores: Tensor, k: int, lengths: list[int] | None = None, *rest: int):
    window = () if lengths is None else (torch.tensor(lengths), *rest)
    selection = ops.top_k(scores, k, *window)
    assert selection.dtype == torch.int32 and selection.shape == (len(scores), k)
    for row, chosen in enumerate(selection.tolist()):
        own = () if lengths is None else (lengths[row], *rest)
        assert chosen == plain_top_k(scores[row].tolist(), k, *own)


SCORES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 1e-44, -1e-44, 3e38, -3e38, INF, -INF, NAN]) | st.floats(width=32)


@settings(max_examples=200)
@given(st.lists(SCORES, min_size=1, max_size=60), st.integers(0, 70))
def test_top_k_equals_sorting(scores, k):
    check_top_k(torch.tensor([scores, scores[::-1]], dtype=F32), k)


@settings(max_examples=200)
@given(st.data())
def test_top_k_of_a_window_equals_sorting(data):
    page = data.draw(st.integers(1, 5))
    items, rows = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 3))
    scores = torch.tensor(data.draw(st.lists(SCORES, min_size=rows * items, max_size=rows * items)), dtype=F32)
    lengths = data.draw(st.lists(st.integers(0, items * page), min_size=rows, max_size=rows))
    sink, recent = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
    check_top_k(scores.view(rows, items), data.draw(st.integers(1, 35)), lengths, page, sink, recent)


def adversarial(rows: int, items: int) -> dict[str, Tensor]:
    """Scores `[rows, items]` on the CPU, by what is hard about them."""
    draw = torch.randn(rows, items, generator=generator(0))
    mass = draw.mul(6).softmax(1)
    special = draw.clone()
    special[:, ::3], special[:, 1::7], special[:, 2::11] = -INF, NAN, INF
    zeros = torch.where(draw > 0, 0.0, -0.0)
    bits = torch.randint(-(1 << 31), 1 << 31, (rows, items), generator=generator(1)).to(torch.int32)
    few = torch.full_like(draw, -INF)
    few[:, items // 2 :: 97] = draw[:, items // 2 :: 97]
    return {
        "normal": draw,
        "a softmax": mass,
        "underflowing": mass.pow(8),
        "equal": torch.full_like(draw, 0.25),
        "zeros of both signs": zeros,
        "a few values": draw.mul(2).round(),
        "two neighbours": torch.where(draw > 0, 1.0, torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))),
        "denormal": bits.abs().remainder(1 << 20).view(F32),
        "any bits": bits.view(F32),
        "negative": -draw.abs(),
        "specials": special,
        "few": few,
        "none": torch.full_like(draw, -INF),
        "not a number": torch.full_like(draw, NAN),
        "ascending": torch.arange(items, dtype=F32).expand(rows, -1).contiguous(),
        "descending": -torch.arange(items, dtype=F32).expand(rows, -1).contiguous(),
    }


@pytest.mark.parametrize("kind", adversarial(1, 1))
def test_top_k_of_adversarial_scores(kind):
    scores = adversarial(2, 700)[kind]
    for k in (1, 64, 699, 700, 800):
        check_top_k(scores, k)


@gpu
@pytest.mark.parametrize("kind", adversarial(1, 1))
@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_top_k_kernel_equals_reference(kind, blocks):
    if blocks > 1 and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("no clusters")
    for rows, items, ks in [(3, 1, (1, 2)), (2, 4097, (1, 1000, 4096, 4097, 5000)), (1, 131072, (2048, 4096, 131072))]:
        scores = adversarial(rows, items)[kind]
        on_device = scores.cuda()
        for k in ks:
            selection = cuda.top_k(on_device, k, blocks=blocks)
            assert torch.equal(selection.cpu(), ops.top_k(scores, k)), (rows, items, k)


def with_candidates(items: int, count: int, shift: int, together: bool) -> tuple[Tensor, int]:
    """Scores `[1, items]`, of which `count` are alike in all bits from `shift` on, and how many are above those.

    Each of the others differs from them in one such bit.
    """
    draw = generator(count + shift)
    alike = 0x2AAAAAAA >> shift << shift
    bits = alike ^ (1 << torch.randint(shift, 30, (items,), generator=draw))
    chosen = torch.arange(items - count, items) if together else torch.randperm(items, generator=draw)[:count]
    bits[chosen] = alike
    above = int((bits > alike).sum())
    bits |= torch.randint(0, 1 << shift, (items,), generator=draw)
    return bits.to(torch.int32).view(1, items).view(F32), above


@gpu
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("count", [1, 31, 32, 33, 64])
@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_top_k_kernel_of_few_candidates(blocks, count, together):
    """As many as blocks tell each other one by one, and more; in one block or in all; in one round or in several."""
    if blocks > 1 and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("no clusters")
    for shift in (0, 2, 9, 15, 21):
        scores, above = with_candidates(10001, count, shift, together)
        on_device = scores.cuda()
        for needed in {1, count // 2 + 1, count, count + 1}:
            selection = cuda.top_k(on_device, above + needed, blocks=blocks)
            assert torch.equal(selection.cpu(), ops.top_k(scores, above + needed)), (shift, needed)


@gpu
@pytest.mark.parametrize(
    ("rows", "items"), [(1, 1 << 20), (8, 65536), (64, 20000), (1000, 700), (300, 131072 // 8 + 5)]
)
def test_top_k_kernel_at_other_sizes(rows, items):
    for seed, scores in enumerate(adversarial(rows, items)[kind] for kind in ("normal", "a softmax", "a few values")):
        for k in (1, 100, 4096):
            on_device = ops.top_k(scores.cuda(), k)
            assert torch.equal(on_device.cpu(), ops.top_k(scores, k)), (seed, k)


@gpu
@pytest.mark.parametrize("page_size", [1, 3, 32])
@pytest.mark.parametrize("items", [5, 3000, 40000])
def test_top_k_kernel_of_a_window(items, page_size):
    tokens = items * page_size
    lengths = torch.tensor([tokens, tokens - 1, tokens // 2 + 1, 3, 0])
    for kind in ("normal", "a few values", "specials", "none"):
        scores = adversarial(5, items)[kind]
        for k, sink, recent in [(1, 1, 1), (80, 4, 64), (400, 0, 0), (64, 0, 5000), (2048, 100, 0)]:
            expected = ops.top_k(scores, k, lengths, page_size, sink, recent)
            window = lengths.cuda(), page_size, sink, recent
            assert torch.equal(ops.top_k(scores.cuda(), k, *window).cpu(), expected), (kind, k, sink, recent)


@gpu
def test_top_k_kernel_of_nothing():
    assert ops.top_k(torch.zeros(0, 5, device="cuda"), 3).shape == (0, 3)
    assert ops.top_k(torch.zeros(2, 5, device="cuda"), 0).shape == (2, 0)
    assert ops.top_k(torch.zeros(2, 0, device="cuda"), 2).tolist() == [[-1, -1]] * 2


# ---- scores ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Sizes of a history and of the queries that score it."""

    method: str
    rows: int
    group: int
    width: int
    tokens: int
    page_size: int
    dtype: torch.dtype
    loudness: float = 1.0
    """What keys and queries are multiplied by."""

    def __str__(self) -> str:
        sizes = f"rows{self.rows}-group{self.group}-width{self.width}-tokens{self.tokens}-page{self.page_size}"
        return f"{self.method}-{sizes}-{str(self.dtype).removeprefix('torch.')}-x{self.loudness:g}"


CASES = [
    Case("quest", 2, 4, 128, 5000, 32, BF16),
    Case("quest", 2, 4, 128, 5000, 32, F16, 3),
    Case("quest", 2, 4, 128, 5000, 32, F32),
    Case("quest", 3, 1, 64, 1000, 1, BF16, 2),
    Case("quest", 1, 5, 16, 777, 4, F32),
    Case("quest", 2, 9, 256, 901, 7, BF16),
    Case("quest", 1, 2, 80, 4096, 16, F16),
    Case("rabitq", 2, 4, 128, 5000, 2, BF16),
    Case("rabitq", 2, 4, 128, 5000, 2, F16, 3),
    Case("rabitq", 2, 4, 128, 5000, 2, F32),
    Case("rabitq", 3, 1, 64, 1000, 1, BF16, 2),
    Case("rabitq", 2, 9, 256, 3001, 4, BF16),
    Case("rabitq", 1, 5, 192, 1023, 3, F32),
    Case("rabitq", 1, 7, 96, 1025, 32, F16),
    Case("rabitq", 2, 2, 80, 1500, 5, BF16),
    Case("rabitq", 1, 3, 16, 2500, 100, F32),
]
LARGE = [Case("quest", 2, 4, 128, 131072, 32, BF16), Case("rabitq", 2, 4, 128, 131072, 2, BF16)]


class History:
    """Keys, queries and lengths of a case, and what the scores must be."""

    def __init__(self, case: Case):
        self.case = case
        shape = (case.rows, case.tokens, case.width)
        mean = torch.randn(case.rows, 1, case.width, generator=generator(1))
        self.keys = ((torch.randn(shape, generator=generator(0)) + mean) * case.loudness).to(case.dtype)
        query = torch.randn(case.rows, case.group, case.width, generator=generator(2)) * case.loudness
        self.query = query.to(case.dtype)
        self.scale = case.width**-0.5
        self.items = -(-case.tokens // case.page_size)
        # The first row is whole, and every other shorter than the one before.
        self.lengths = case.tokens - torch.arange(case.rows) * (case.tokens // (2 * case.rows) + 1)
        self.algorithm: KeyScoring = ALGORITHMS[case.method](case.page_size)
        whole = torch.full_like(self.lengths, case.tokens)
        self.algorithm.construct_representations(self.keys, 0, whole, torch.zeros_like(whole))

    def on(self, device: str) -> History:
        """Moves everything, representations as they are."""
        for name in ("query", "lengths"):
            setattr(self, name, getattr(self, name).to(device))
        held = [self.algorithm.representations]
        if isinstance(self.algorithm, RaBitQ):
            held.append(self.algorithm.centres)
            self.algorithm.filling = tuple(tensor.to(device) for tensor in self.algorithm.filling)
        for representations in held:
            representations.tensors = {name: tensor.to(device) for name, tensor in representations.tensors.items()}
        return self

    def score(self, unscored: int = 0) -> Tensor:
        return self.algorithm.score(self.query, self.items, self.scale, self.lengths - unscored).cpu()

    @property
    def unscored(self) -> int:
        """The newest tokens that a selection knows no score of."""
        return int(self.algorithm.beside)

    def select(self, k: int) -> Tensor:
        return self.algorithm.retrieve_topk(self.query, k, self.items, self.scale, self.lengths).cpu()

    @cached_property
    def exact(self) -> tuple[np.ndarray, float]:
        """The scores in float64, and the relative error that float32 logits explain. On the CPU."""
        case, algorithm = self.case, self.algorithm
        query = self.query.double().numpy() * self.scale
        if isinstance(algorithm, Quest):
            low = algorithm.representations["low"][:, : self.items].double().numpy()
            high = algorithm.representations["high"][:, : self.items].double().numpy()
            logits = np.stack(
                [np.maximum(q[:, None] * low, q[:, None] * high).sum(-1) for q in query.swapaxes(0, 1)], 1
            )
            first = np.arange(self.items) * case.page_size
            largest = np.abs(query).sum(-1).max() * max(np.abs(low).max(), np.abs(high).max())
        else:
            bits = algorithm.representations["bits"][:, : case.tokens].numpy()
            signs = np.unpackbits(bits, axis=-1, bitorder="little").astype(np.float64) * 2 - 1
            codes = signs * algorithm.representations["scale"][:, : case.tokens, None].double().numpy()
            centres = algorithm.centres["centre"].double().numpy().repeat(algorithm.block, 1)[:, : case.tokens]
            rotated = query @ rotation(case.width, torch.device("cpu")).double().numpy()
            logits = rotated @ codes.swapaxes(1, 2) + query @ centres.swapaxes(1, 2)
            first = np.arange(case.tokens)
            largest = np.abs(rotated).sum(-1).max() * np.abs(codes).max()
            largest += np.abs(query).sum(-1).max() * np.abs(centres).max()
        logits = np.where(first < self.lengths.numpy()[:, None, None], logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        mass = (weights / weights.sum(-1, keepdims=True)).sum(1)
        mass = np.pad(
            mass, ((0, 0), (0, self.items * (case.page_size if mass.shape[1] > self.items else 1) - mass.shape[1]))
        )
        mass = mass.reshape(case.rows, self.items, -1).sum(-1)
        # An exponential's relative error is its argument's absolute error; the norm of a softmax has the same again.
        return mass, 2 * torch.finfo(F32).eps * largest


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_are_those_of_float64(case, device):
    history = History(case)
    expected, error = history.exact
    score = history.on(device).score()
    assert score.shape == expected.shape and score.dtype == F32
    assert error < 1e-3  # Or the case says nothing.
    # Below, weights underflow.
    np.testing.assert_allclose(score.numpy(), expected, rtol=error, atol=1e-36)
    assert not score[torch.from_numpy(expected == 0)].any()


@gpu
@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
def test_kernels_select_what_the_reference_selects_but_for_near_ties(case):
    history = History(case)
    on_device = History(case).on("cuda")
    k = min(history.items, max(history.algorithm.kept_items + 3, history.items // 40))
    scores = history.score(history.unscored)
    rtol = 2 * history.exact[1]
    torch.testing.assert_close(on_device.score(history.unscored), scores, rtol=rtol, atol=1e-36)
    for ours, theirs, score in zip(on_device.select(k).tolist(), history.select(k).tolist(), scores, strict=True):
        assert len(ours) == k and len(set(ours) - {-1}) == k - ours.count(-1)
        differ = sorted(set(ours) ^ set(theirs))
        assert len(differ) <= 2 + k // 100
        if differ:
            torch.testing.assert_close(score[differ], score[differ[:1]].expand(len(differ)), rtol=2 * rtol, atol=1e-36)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [*CASES, LARGE[0]], ids=str)
def test_scored_and_selected_at_once_is_the_best_of_the_scores(case, device):
    history = History(case).on(device)
    for k in (1, history.items // 3, history.items):
        if k >= history.algorithm.kept_items:
            window = history.lengths, history.algorithm.page_size, 4, 64
            expected = ops.top_k(history.score(history.unscored).to(history.query.device), k, *window)
            assert torch.equal(history.select(k), expected.cpu())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
@pytest.mark.parametrize("tokens", [511, 512, 513, 514])
@pytest.mark.parametrize("method", [name for name, method in ALGORITHMS.items() if method.beside])
def test_what_is_added_beside_a_selection_does_not_change_it(method, tokens, page_size, device):
    """Also where the newest token opens a block, or has no code yet but what lay there before."""
    history = History(Case(method, 2, 3, 32, tokens, page_size, BF16)).on(device)
    algorithm, rows = history.algorithm, torch.arange(2, device=device)
    k = algorithm.kept_items + 20
    newest = history.lengths - 1
    algorithm.filling[1].copy_((newest % algorithm.block).unsqueeze(1))
    for name, value in (("bits", 0x5A), ("scale", NAN)):
        algorithm.representations[name][rows, newest] = value
    opens = newest % algorithm.block == 0
    algorithm.centres["centre"][rows[opens], newest[opens] // algorithm.block] = NAN
    before = history.select(k)
    algorithm.update_representations(history.keys[rows.cpu(), newest.cpu()].to(device), newest)
    assert not bool(algorithm.representations["scale"].isnan().any())
    assert torch.equal(history.select(k), before)
    assert bool((before == (newest // page_size).cpu().unsqueeze(1)).any(1).all())


@gpu
@pytest.mark.parametrize("method", sorted(ALGORITHMS))
def test_scores_that_no_block_can_hold(method, monkeypatch):
    history = History(Case(method, 2, 2, 16, 40000, 1, F32)).on("cuda")
    whole = history.score(history.unscored).cuda()
    scoring = history.query, history.items, history.scale, history.lengths
    monkeypatch.setattr(cuda, "top_k_blocks", lambda *_: 1)
    for k in (90, 3000):
        expected = ops.top_k(whole, k, history.lengths, 1, 4, 64)
        assert torch.equal(history.algorithm.select(*scoring, k, 4, 64), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", sorted(ALGORITHMS))
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_query_that_is_no_number_has_no_vote(method, bad, device):
    case = Case(method, 2, 3, 64, 700, 4, F32)
    history = History(case)
    history.query[0, 1, 5] = bad
    score = history.on(device).score()
    others = History(case)
    others.query = others.query[:, [0, 2]]
    torch.testing.assert_close(score[0], others.score()[0], rtol=1e-4, atol=1e-36)
    assert score[1].sum() == pytest.approx(3, rel=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", sorted(ALGORITHMS))
def test_a_row_with_nothing_to_attend_to_scores_nothing(method, device):
    history = History(Case(method, 2, 3, 64, 700, 4, F32))
    history.lengths[1] = 0
    assert not history.on(device).score()[1].any()


@gpu
@pytest.mark.parametrize("case", [CASES[0], CASES[7], *LARGE], ids=str)
def test_selection_is_the_same_from_run_to_run_and_replayed(case):
    history = History(case).on("cuda")
    k = history.algorithm.kept_items + 20
    first = history.algorithm.score(history.query, history.items, history.scale, history.lengths)
    arguments = k, history.items, history.scale, history.lengths
    selection = history.algorithm.retrieve_topk(history.query, *arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        score = history.algorithm.score(history.query, history.items, history.scale, history.lengths)
        replayed = history.algorithm.retrieve_topk(history.query, *arguments)
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(score, first) and torch.equal(replayed, selection)
    history.query.neg_()
    graph.replay()
    assert torch.equal(replayed, history.algorithm.retrieve_topk(history.query, *arguments))
    assert not torch.equal(replayed, selection)


@gpu
def test_selection_does_not_wait_for_the_device():
    histories = [History(case).on("cuda") for case in (CASES[0], CASES[7])]
    for mode in ("default", "error"):  # Compiled and loaded first.
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for history in histories:
                history.algorithm.retrieve_topk(history.query, 90, history.items, history.scale, history.lengths)
        finally:
            torch.cuda.set_sync_debug_mode("default")


# ---- Quest's boxes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize(("rows", "width", "page_size"), [(3, 128, 16), (1, 1, 1), (2, 40, 5), (2, 1500, 32)])
def test_boxes_are_the_least_and_the_most_of_a_page(rows, width, page_size, dtype, device):
    """Of numbers, of infinite ones, and of what is no number; in rows whose pages are not as full as one another."""
    tokens, ahead, source = 3 * page_size + 2, 2, generator(width)
    keys = torch.randn(rows, tokens + ahead, width, generator=source)
    kinds = torch.rand(keys.shape, generator=source)
    keys[kinds < 0.02] = NAN
    keys[(kinds > 0.02) & (kinds < 0.04)] = INF
    keys[(kinds > 0.04) & (kinds < 0.06)] = -INF
    keys = keys.to(dtype)
    pages = (tokens + ahead) // page_size + 2
    low, high = (torch.full((rows, pages, width), value, dtype=dtype, device=device) for value in (7.0, -7.0))
    begin = torch.zeros(rows, dtype=torch.int64)
    begin[-1] = ahead // page_size * page_size
    for t in range(tokens):
        at = begin + t
        key = keys[torch.arange(rows), at]
        ops.encode_quest(key.to(device), at.to(device), low, high, page_size)
        for row in range(rows):
            last = int(at[row])
            first = last // page_size * page_size
            held = keys[row, first : last + 1].double()
            boxes = low[row, last // page_size].cpu().double(), high[row, last // page_size].cpu().double()
            torch.testing.assert_close(boxes[0], held.amin(0), rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(boxes[1], held.amax(0), rtol=0, atol=0, equal_nan=True)
    # No other page is touched.
    for row in range(rows):
        first, end = int(begin[row]) // page_size, -(-(int(begin[row]) + tokens) // page_size)
        for box, value in ((low, 7.0), (high, -7.0)):
            assert bool((box[row, :first] == value).all()) and bool((box[row, end:] == value).all())


# ---- RaBitQ's keys ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize(
    ("rows", "width", "block"), [(3, 128, 16), (2, 64, 256), (1, 40, 32), (2, 256, 16), (1, 8, 16)]
)
def test_encoded_keys_are_those_of_float64(rows, width, block, dtype, device):
    capacity, source = 2 * block + 40, generator(width)
    keys = torch.randn(capacity, rows, width, generator=source).to(dtype)
    matrix = rotation(width, torch.device("cpu"))
    held = (
        torch.full((rows, capacity, width // 8), 0xA5, dtype=torch.uint8),
        torch.full((rows, capacity), NAN, dtype=F16),
        torch.randn(rows, -(-capacity // block), width, generator=source).to(dtype),
        torch.zeros(rows, width, dtype=torch.int64),
        torch.zeros(rows, 1, dtype=torch.int64),
    )
    bits, scales, centres, total, count = (tensor.to(device) for tensor in held)
    first = held[2][:, 0].clone()
    ahead = 5  # The last row's history is longer.
    for t in range(capacity - ahead):
        position = torch.full((rows,), t)
        position[-1] += ahead
        ops.encode_rabitq(keys[t].to(device), position.to(device), bits, scales, centres, total, count, block)

    for row in range(rows):
        begin = ahead if row == rows - 1 else 0
        sums, centre, seen = [0] * width, first[row], 0
        for t in range(capacity - ahead):
            key, at = keys[t, row], begin + t
            if at % block == 0:
                # The sums are of whole numbers, and the mean is rounded to float32 and then to the key's dtype.
                centre = torch.tensor([total / max(seen, 1) / 2**32 for total in sums], dtype=F32).to(dtype)
                sums, seen = [0] * width, 0
            sums = [total + round(Fraction(value) * 2**32) for total, value in zip(sums, key.tolist(), strict=True)]
            seen += 1
            x = (key.double() - centre.double()) @ matrix.double()
            found = torch.from_numpy(np.unpackbits(bits[row, at].cpu().numpy(), bitorder="little").astype(bool))
            sure = x.abs() > 1e-5 * x.norm()
            assert torch.equal(found[sure], (x >= 0)[sure]), (row, at)
            expected = float(x.square().sum() / x.abs().sum())
            assert float(scales[row, at]) == pytest.approx(expected, rel=2**-10)
            assert torch.equal(centres[row, at // block].cpu(), centre)
        assert total[row].tolist() == sums and int(count[row]) == seen
        assert bool((bits[row, :begin] == 0xA5).all()) and bool(scales[row, :begin].isnan().all())


# ---- the ops ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    for case in (Case("quest", 2, 3, 16, 50, 4, F32), Case("rabitq", 2, 3, 16, 50, 4, F32)):
        history = History(case).on(device)
        lengths = history.lengths
        scores = history.algorithm.score(history.query, history.items, history.scale, lengths)
        opcheck(ops.top_k, (scores, 5))
        opcheck(ops.top_k, (scores, 5, lengths, 4, 1, 2))
        held = history.algorithm.representations
        if isinstance(history.algorithm, RaBitQ):
            centres = history.algorithm.centres["centre"]
            arguments = (history.query, held["bits"], held["scale"], centres, 256, history.items, 4)
            opcheck(ops.score_rabitq, (*arguments, history.scale, lengths))
            opcheck(ops.select_rabitq, (*arguments, history.scale, lengths, 1, 5, 1, 2))
            key, state = history.query[:, 0], (held["bits"], held["scale"], centres, *history.algorithm.filling[:2])
            opcheck(ops.encode_rabitq, (key, history.lengths - 1, *state, 256))
        else:
            arguments = (history.query, held["low"], held["high"], history.items, 4)
            opcheck(ops.score_quest, (*arguments, history.scale, lengths))
            opcheck(ops.encode_quest, (history.query[:, 0], lengths - 1, held["low"], held["high"], 4))
            opcheck(ops.select_quest, (*arguments, history.scale, lengths, 5, 1, 2))


@gpu
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": torch.zeros(2, 8, dtype=BF16)}, r"`scores`.*float32.*bfloat16"),
        ({"scores": torch.zeros(8, 2).T}, r"`scores`.*strides"),
        ({"lengths": torch.zeros(3, dtype=torch.int64)}, r"`lengths`.*\[2\].*\[3\]"),
        ({"lengths": torch.zeros(2, dtype=torch.int32)}, r"`lengths`.*int64.*int32"),
        ({"page_size": 0}, r"`page_size`"),
    ],
)
def test_top_k_preconditions(change, message):
    arguments = {"scores": torch.zeros(2, 8), "k": 3, "lengths": torch.full((2,), 8), "page_size": 1} | change
    arguments = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in arguments.items()}
    with pytest.raises(ValueError, match=message):
        cuda.top_k(**arguments)


@gpu
@pytest.mark.parametrize(
    ("case", "name", "value", "message"),
    [
        (CASES[0], "low", lambda low: low[:, :50], r"`low`.*strides"),
        (CASES[0], "high", lambda high: high.float(), r"`high`.*bfloat16.*float32"),
        (CASES[7], "bits", lambda bits: bits[:, :, :8], r"`bits`"),
        (CASES[7], "scale", lambda scale: scale.float(), r"`scales`.*float16.*float32"),
    ],
    ids=["low", "high", "bits", "scale"],
)
def test_score_preconditions(case, name, value, message):
    history = History(case).on("cuda")
    tensors = history.algorithm.representations.tensors
    tensors[name] = value(tensors[name])
    with pytest.raises(ValueError, match=message):
        history.score()


@gpu
def test_what_the_kernels_do_not_take_runs_as_pytorch_and_says_so():
    cuda._warn.cache_clear()
    for case, what in ((Case("quest", 1, 2, 20, 300, 4, F32), "20"), (Case("rabitq", 1, 2, 264, 300, 4, F32), "264")):
        history = History(case)
        expected, error = history.exact
        with pytest.warns(RuntimeWarning, match=what):
            score = history.on("cuda").score()
        np.testing.assert_allclose(score.numpy(), expected, rtol=max(error, 1e-5), atol=1e-36)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case("quest", 1, 2, 20, 300, 4, F32), "of a multiple of 8, at most 1024, not of 20"),
        (Case("quest", 1, 257, 8, 300, 4, F32), "at most 256 query heads a KV head, not 257"),
        (Case("rabitq", 1, 2, 264, 300, 4, F32), "heads of at most 256, not of 264"),
        (Case("rabitq", 1, 257, 8, 300, 4, F32), "at most 256 query heads a KV head, not 257"),
        (Case("rabitq", 1, 2, 16, 300, 65, F32), "pages of at most 64 tokens, not of 65"),
    ],
    ids=["quest width", "quest group", "rabitq width", "rabitq group", "rabitq page"],
)
def test_what_the_kernels_do_not_take_is_named_and_runs_as_pytorch(case, reason, monkeypatch):
    named: list[str | None] = []
    monkeypatch.setattr(cuda, "_falls_back", lambda device, reason=None: named.append(reason) or reason is not None)
    history = History(case)
    monkeypatch.setattr(ops, f"score_{case.method}", getattr(cuda, f"score_{case.method}"))
    monkeypatch.setattr(ops, f"select_{case.method}", getattr(cuda, f"select_{case.method}"))
    score = history.score()
    window = history.lengths, history.algorithm.page_size, 4, 64
    scoring = history.query, history.items, history.scale, history.lengths
    selection = history.algorithm.select(*scoring, 2, 4, 64)
    monkeypatch.undo()
    assert all(name is not None and reason in name for name in named) and len(named) == 2
    assert torch.equal(score, history.score())
    assert torch.equal(selection, ops.top_k(score, 2, *window))


@pytest.mark.parametrize("clusters", [False, True])
@pytest.mark.parametrize("multiprocessors", [20, 132, 188])
def test_launch_shapes(clusters, multiprocessors):
    for rows in (1, 3, 8, 64, 1000):
        for items in (1, 4096, 4097, 65536, 131072, 1 << 20):
            blocks = heuristics.top_k_blocks(rows, items, multiprocessors, clusters)
            assert blocks in ((1, 2, 4, 8) if clusters else (1,))
            assert blocks == 1 or blocks * rows <= multiprocessors
            shared = heuristics.top_k_shared_bytes(items, blocks)
            assert shared in (0, 4096 * -(-items // (1024 * blocks))) and shared <= 4 * heuristics.HELD_SCORES
            assert 1 <= heuristics.mass_blocks(rows, items, multiprocessors) <= -(-items // heuristics.MASS_THREADS)
            for units, unit_tokens, centre_tokens in ((-(-items // 64), 64, 256), (items, 64, 16), (items, 33, 1024)):
                blocks = heuristics.rabitq_blocks(rows, units, unit_tokens, centre_tokens, multiprocessors)
                assert 1 <= blocks <= -(-units // heuristics.RABITQ_WARPS)

                def centres(blocks, units=units, unit_tokens=unit_tokens, centre_tokens=centre_tokens):
                    units_a_warp = -(-units // (blocks * heuristics.RABITQ_WARPS))
                    return (heuristics.RABITQ_WARPS * units_a_warp * unit_tokens - 1) // centre_tokens + 2

                assert centres(blocks) <= heuristics.RABITQ_CENTRES
                if blocks > 1 and rows * blocks > heuristics.RABITQ_BLOCKS * multiprocessors:
                    assert centres(max(1, blocks // 2)) > heuristics.RABITQ_CENTRES
