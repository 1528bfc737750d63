"""What is attended to: every method against a float64 computation that shares no code with it."""

from __future__ import annotations

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_hisparse import HierarchicalSparseCache, enable
from hf_hisparse.algorithms import ALGORITHMS, KeyScoring, LightningIndexer, Quest, RaBitQ
from hf_hisparse.algorithms.base import Representations
from hf_hisparse.ops import reference
from hf_hisparse.ops.reference import rotation, softmax_mass
from tests.helpers import DEVICE, decode, generate, random_ids, same_bits


WIDTH = 16
SCALE = WIDTH**-0.5

tensor, full = partial(torch.tensor, device=DEVICE), partial(torch.full, device=DEVICE)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def zeros(rows: int) -> Tensor:
    return torch.zeros(rows, dtype=torch.int64, device=DEVICE)


def filled(algorithm: KeyScoring, keys: Tensor, lengths: Tensor | None = None, built: int | None = None) -> KeyScoring:
    """The algorithm after a prefill, of `lengths` or the first `built` keys and then a token at a time."""
    rows, tokens, _ = keys.shape
    built = tokens if built is None else built
    algorithm.construct_representations(
        keys[:, :built], 0, zeros(rows) + built if lengths is None else lengths, zeros(rows)
    )
    for t in range(built, tokens):
        algorithm.reserve(t + 1)
        algorithm.update_representations(keys[:, t], full((rows,), t))
    return algorithm


def decoded(algorithm: RaBitQ, tokens: int) -> Tensor:
    """The keys as their bits and scales say, `[rows, tokens, width]` float64, centred and rotated."""
    bits = algorithm.representations["bits"][:, :tokens].cpu().numpy()
    signs = np.unpackbits(bits, axis=-1, bitorder="little").astype(np.float64) * 2 - 1
    return torch.from_numpy(signs).to(DEVICE) * algorithm.representations["scale"][:, :tokens].double().unsqueeze(-1)


def mass(logits: np.ndarray) -> np.ndarray:
    """Softmax over the last axis, summed over the group, in float64."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)).sum(1)


# ---- Quest -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("built", [1, 7, 64, 101])
def test_the_bound_bounds_every_product(dtype, built):
    keys, query = draw(3, 101, WIDTH, dtype=dtype), draw(3, 4, WIDTH, seed=1, dtype=dtype)
    algorithm = filled(Quest(page_size=8), keys, built=built)
    items = 13
    bound = algorithm.bound(query, items).double()
    products = query.double() @ keys.double().transpose(1, 2)
    products = torch.nn.functional.pad(products, (0, items * 8 - 101), value=-torch.inf).unflatten(-1, (items, 8))
    # Both are sums of `WIDTH` float32 products; only their rounding may come between them.
    slack = WIDTH * torch.finfo(torch.float32).eps * (query.double().abs().sum(-1) * keys.abs().max()).unsqueeze(-1)
    assert (bound + slack >= products.amax(-1)).all()
    # The bound is that of the box and no larger: every coordinate is some key's.
    pages = torch.nn.functional.pad(keys.double(), (0, 0, 0, items * 8 - 101), value=torch.nan).unflatten(1, (items, 8))
    low, high = pages.nan_to_num(torch.inf).amin(2), pages.nan_to_num(-torch.inf).amax(2)
    q = query.double().unsqueeze(2)
    box = torch.maximum(q * low.unsqueeze(1), q * high.unsqueeze(1)).sum(-1)
    assert (bound - box).abs().le(slack).all()


@settings(max_examples=50)
@given(st.integers(1, 9), st.integers(1, 60), st.integers(0, 10_000))
def test_the_bound_bounds_for_any_page_size(page_size, tokens, seed):
    keys, query = draw(2, tokens, 4, seed=seed), draw(2, 1, 4, seed=seed + 1)
    built = 1 + seed % tokens
    algorithm = filled(Quest(page_size=page_size), keys, built=built)
    items = -(-tokens // page_size)
    bound = algorithm.bound(query, items)
    for token in range(tokens):
        product = (query[:, 0] * keys[:, token]).sum(-1)
        assert (bound[:, 0, token // page_size] >= product - 1e-5).all()


def test_pages_of_one_token_score_their_product():
    keys, query = draw(2, 30, WIDTH), draw(2, 3, WIDTH, seed=1)
    algorithm = filled(Quest(page_size=1), keys)
    products = query.double() @ keys.double().transpose(1, 2)
    torch.testing.assert_close(algorithm.bound(query, 30), products.float())


def test_quest_scores_are_the_softmax_of_the_bound():
    keys, query = draw(2, 50, WIDTH) * 3, draw(2, 4, WIDTH, seed=1) * 3
    lengths = tensor([50, 29])
    algorithm = filled(Quest(page_size=8), keys, lengths)
    score = algorithm.score(query, 7, SCALE, lengths)
    for row, length in enumerate(lengths.tolist()):
        logits = np.full((1, 4, 7), -np.inf)
        for page in range(-(-length // 8)):
            held = keys[row, page * 8 : min(page * 8 + 8, length)].double().cpu().numpy()
            q = query[row].double().cpu().numpy()[:, None]
            logits[0, :, page] = np.maximum(q * held.min(0), q * held.max(0)).sum(-1)[:, 0] * SCALE
        np.testing.assert_allclose(score[row].cpu().numpy(), mass(logits)[0], rtol=1e-4, atol=1e-6)


# ---- the newest token ------------------------------------------------------------------------------------------------


def test_who_does_anything_anew_is_run_beside_a_selection_only_if_it_says_so():
    for name in ("score", "select", "retrieve_topk", "update_representations"):
        anew = type("Anew", (RaBitQ,), {name: lambda self, *args: None})
        assert not anew.beside and not type("Child", (anew,), {}).beside
        assert type("Says", (RaBitQ,), {name: lambda self, *args: None, "beside": True}).beside
        other = type("Other", (), {name: lambda self, *args: None})
        assert not type("Both", (other, RaBitQ), {}).beside and type("Behind", (RaBitQ, other), {}).beside
    assert RaBitQ.beside and type("Wider", (RaBitQ,), {"block": 512}).beside and not Quest.beside


@pytest.mark.parametrize("mixed", [False, True], ids=["subclass", "mixin"])
@pytest.mark.parametrize("parent", ALGORITHMS.values())
def test_who_scores_anew_selects_by_that(parent, mixed):
    def oldest(self, query, items, scale, lengths):
        return -torch.arange(items, dtype=torch.float32, device=query.device).expand(len(query), -1)

    member = {"score": oldest}
    method = type("Ours", (type("Mixin", (), member), parent), {}) if mixed else type("Ours", (parent,), member)
    algorithm = filled(method(page_size=4, sink_tokens=1, recent_tokens=1), draw(2, 40, WIDTH))
    selection = algorithm.retrieve_topk(draw(2, 3, WIDTH, seed=1), 4, 10, SCALE, tensor([40, 40]))
    assert selection.tolist() == [[0, 1, 2, 9]] * 2


# ---- RaBitQ ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [16, 64, 128])
def test_the_rotation_is_one(width):
    matrix = rotation(width, DEVICE)
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(width, device=DEVICE))
    assert torch.equal(matrix, rotation(width, DEVICE))
    # No channel of the input stands out in any channel of the output.
    assert matrix.abs().max() < 6 / math.sqrt(width)


def centre_of(algorithm: RaBitQ, tokens: int) -> Tensor:
    """The centre of each token's block, `[rows, tokens, width]` float64."""
    return algorithm.centres["centre"].double().repeat_interleave(algorithm.block, dim=1)[:, :tokens]


@pytest.mark.parametrize("tokens", [7, 8, 9, 16, 23, 40])
def test_a_block_is_centred_by_the_mean_of_the_block_before_and_the_first_by_its_own(monkeypatch, tokens):
    monkeypatch.setattr(RaBitQ, "block", 8)
    keys = draw(2, tokens, WIDTH) + 3
    lengths = tensor([tokens, tokens - 5])
    centre = centre_of(filled(RaBitQ(), keys, lengths), tokens)
    for row, length in enumerate(lengths.tolist()):
        for block in range(-(-length // 8)):
            source = max(block - 1, 0) * 8
            mean = keys[row, source : min(source + 8, length)].double().mean(0)
            torch.testing.assert_close(centre[row, block * 8], mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("filled_first", [16, 21, 39])
def test_blocks_that_fill_in_decoding_equal_blocks_that_were_constructed(monkeypatch, filled_first):
    monkeypatch.setattr(RaBitQ, "block", 8)
    keys = draw(2, 50, WIDTH) + 3
    whole = filled(RaBitQ(), keys)
    grown = filled(RaBitQ(), keys[:, :filled_first])
    for token in range(filled_first, 50):
        grown.reserve(token + 1)
        grown.update_representations(keys[:, token], full((2,), token))
    rebuilt = filled(RaBitQ(), keys[:, :filled_first])
    start = (filled_first - 1) // 8 * 8
    rebuilt.construct_representations(keys[:, start:], start, zeros(2) + 50, zeros(2) + filled_first)
    for other in (grown, rebuilt):
        torch.testing.assert_close(centre_of(other, 50), centre_of(whole, 50), rtol=1e-5, atol=1e-5)
        # Sums in another order may turn the sign of a coordinate that is next to nothing.
        torch.testing.assert_close(decoded(other, 50).abs(), decoded(whole, 50).abs(), rtol=2e-3, atol=1e-5)
        assert (decoded(other, 50).sign() != decoded(whole, 50).sign()).double().mean() < 0.01


def test_codes_are_the_signs_and_the_scale_of_centred_rotated_keys():
    keys = draw(2, 200, 64) + 5 * draw(2, 1, 64, seed=1)
    algorithm = filled(RaBitQ(), keys)
    centre = centre_of(algorithm, 200)
    x = (keys.double() - centre) @ rotation(64, DEVICE).double()
    code = decoded(algorithm, 200)
    # Float32 may round a coordinate that is next to nothing to the other side.
    assert ((code > 0) == (x > 0))[x.abs() > 1e-4].all()
    scale = x.square().sum(-1) / x.abs().sum(-1)
    half = torch.finfo(torch.float16).eps
    torch.testing.assert_close(code.abs().amax(-1), scale, rtol=half, atol=0)


def errors(width: int, alike: float) -> tuple[Tensor, Tensor, Tensor]:
    """Exact centred products, their estimates, and the standard deviation that the paper gives for the difference.

    `alike` is the share of the key in its query: 0 for queries that know nothing of the keys.
    """
    keys = draw(4, 1500, width) * (1 + draw(1, 1, width, seed=1).abs() * 3)
    algorithm = filled(RaBitQ(), keys)
    matrix = rotation(width, DEVICE).double()
    c = keys.double() - centre_of(algorithm, 1500)
    noise = draw(4, 1500, width, seed=2).double()
    query = alike * c + (1 - alike) * noise * c.square().mean(-1, keepdim=True).sqrt()
    exact = (query * c).sum(-1)
    estimate = ((query @ matrix) * decoded(algorithm, 1500)).sum(-1)
    x = c @ matrix
    aligned = x.abs().sum(-1) / (math.sqrt(width) * x.square().sum(-1).sqrt())
    along = exact / c.square().sum(-1).sqrt()
    across = (query.square().sum(-1) - along.square()).clamp(min=0).sqrt()
    deviation = c.square().sum(-1).sqrt() * across * (1 / aligned.square() - 1).sqrt() / math.sqrt(width - 1)
    return exact, estimate, deviation


@pytest.mark.parametrize("alike", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("width", [64, 128])
def test_the_estimate_is_unbiased_and_within_the_papers_bound(width, alike):
    exact, estimate, deviation = errors(width, alike)
    error = (estimate - exact) / deviation
    count = error.numel()
    # Over many keys and queries the error's mean is that of noise, and its spread is what Theorem 3.2 says.
    assert error.mean().abs() < 4 / math.sqrt(count)
    assert 0.95 < error.std() < 1.05
    # epsilon_0 = 1.9, the paper's choice, and one that hardly anything passes.
    assert (error.abs() < 1.9).double().mean() > 0.93
    assert (error.abs() < 4).double().mean() > 0.999


def test_the_estimate_of_a_keys_product_with_itself_is_exact():
    exact, estimate, _ = errors(64, 1.0)
    torch.testing.assert_close(estimate, exact, rtol=torch.finfo(torch.float16).eps, atol=0)


def test_estimates_correlate_with_the_exact_products():
    keys, query = draw(1, 1500, 128), draw(1, 1, 128, seed=3)
    algorithm = filled(RaBitQ(), keys)
    exact = (keys.double() @ query[0, 0].double())[0]
    estimate = (decoded(algorithm, 1500) @ (query[0, 0] @ rotation(128, DEVICE)).double())[0]
    correlation = np.corrcoef(exact.cpu(), estimate.cpu())[0, 1]
    # sqrt(2 / pi), what the signs of a Gaussian vector keep of it.
    assert correlation == pytest.approx(math.sqrt(2 / math.pi), abs=0.03)


def test_rabitq_scores_are_the_softmax_of_the_estimate():
    keys, query = draw(2, 50, 64) * 2, draw(2, 4, 64, seed=1) * 2
    lengths = tensor([50, 37])
    algorithm = filled(RaBitQ(page_size=4), keys, lengths)
    score = algorithm.score(query, 13, 0.125, lengths)
    rotated = query.double() @ rotation(64, DEVICE).double() * 0.125
    logits = (rotated @ decoded(algorithm, 50).transpose(1, 2)).cpu().numpy()
    logits = np.pad(logits, ((0, 0), (0, 0), (0, 2)), constant_values=-np.inf)
    logits = np.where(np.arange(52) < lengths.view(2, 1, 1).cpu().numpy(), logits, -np.inf)
    expected = mass(logits).reshape(2, 13, 4).sum(-1)
    np.testing.assert_allclose(score.cpu().numpy(), expected, rtol=1e-4, atol=1e-6)


def test_bits_are_unpacked_a_block_at_a_time(monkeypatch):
    monkeypatch.setattr(RaBitQ, "block", 16)
    keys, query = draw(2, 50, WIDTH), draw(2, 4, WIDTH, seed=1)
    algorithm = filled(RaBitQ(page_size=4), keys)
    lengths = tensor([50, 50])
    whole = algorithm.score(query, 13, SCALE, lengths)
    monkeypatch.setattr(reference, "TOKENS_UNPACKED", 8)
    torch.testing.assert_close(algorithm.score(query, 13, SCALE, lengths), whole)


def test_keys_that_are_all_the_same_are_no_trouble():
    keys = draw(1, 1, WIDTH).expand(1, 40, WIDTH)
    algorithm = filled(RaBitQ(sink_tokens=1, recent_tokens=1), keys)
    selection = algorithm.retrieve_topk(draw(1, 2, WIDTH, seed=1), 4, 10, SCALE, tensor([40]))
    assert sorted(set(selection[0].tolist())) == selection[0].tolist() and len(selection[0]) == 4


# ---- every method that scores keys -----------------------------------------------------------------------------------


@pytest.fixture(params=sorted(ALGORITHMS))
def method(request) -> type[KeyScoring]:
    return ALGORITHMS[request.param]


def assert_same_representation(a: KeyScoring, b: KeyScoring, entries: int) -> None:
    """Equal but for what a float32 matrix product's rounding explains."""
    assert a.representations.tensors.keys() == b.representations.tensors.keys()
    for name, tensor in a.representations.tensors.items():
        left, right = tensor[:, :entries], b.representations[name][:, :entries]
        if name == "bits":
            differ = np.unpackbits((left ^ right).cpu().numpy()).mean()
            assert differ < 1e-3
        else:
            torch.testing.assert_close(left, right, rtol=2 * torch.finfo(left.dtype).eps, atol=0)


@pytest.mark.parametrize("built", [4, 5, 16, 39])
def test_token_by_token_equals_a_prefill(method, built, monkeypatch):
    monkeypatch.setattr(RaBitQ, "block", 4)
    keys = draw(3, 40, WIDTH)
    whole, grown = filled(method(page_size=4), keys), filled(method(page_size=4), keys, built=built)
    assert_same_representation(whole, grown, 40 // whole.granularity)


@settings(max_examples=40)
@given(st.sampled_from(sorted(ALGORITHMS)), st.integers(1, 6), st.lists(st.integers(1, 15), min_size=1, max_size=5))
def test_chunks_equal_a_prefill(name, page_size, chunks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RaBitQ, "block", 1)
        tokens = sum(chunks)
        keys = draw(2, tokens, WIDTH)
        whole, grown = filled(ALGORITHMS[name](page_size), keys), ALGORITHMS[name](page_size)
        length = 0
        for chunk in chunks:
            # A chunk begins with the page of the last token, as the coordinator hands it over.
            start, held = max(length - 1, 0) // page_size * page_size, zeros(2) + length
            length += chunk
            grown.construct_representations(keys[:, start:length], start, zeros(2) + length, held)
        assert_same_representation(whole, grown, -(-tokens // whole.granularity))


def test_a_rewritten_tail_leaves_no_trace(method, monkeypatch):
    """After a cut, the page that is being filled is constructed anew, without the tokens that went."""
    monkeypatch.setattr(RaBitQ, "block", 8)
    keys, other = draw(2, 40, WIDTH), draw(2, 40, WIDTH, seed=1) * 10
    algorithm = filled(method(page_size=8), torch.cat((keys[:, :19], other[:, 19:]), dim=1))
    algorithm.construct_representations(keys[:, 16:19], 16, zeros(2) + 19, zeros(2) + 19)
    for t in range(19, 40):
        algorithm.reserve(t + 1)
        algorithm.update_representations(keys[:, t], full((2,), t))
    assert_same_representation(filled(method(page_size=8), keys), algorithm, 40 // algorithm.granularity)


def test_rows_of_any_length_are_represented_as_each_alone(method, monkeypatch):
    """Built, then a token at a time, then built anew from the shortest row's end, whatever lies behind a row's end."""
    monkeypatch.setattr(RaBitQ, "block", 8)
    lengths = tensor([40, 17, 16, 9, 1])
    keys, new = draw(5, 40, WIDTH), draw(5, 20, WIDTH, seed=1)
    together = method(page_size=4)
    together.construct_representations(keys, 0, lengths, zeros(5))
    together.reserve(60)
    for t in range(20):
        together.update_representations(new[:, t], lengths + t)
    whole = [torch.cat((keys[row, :length], new[row])) for row, length in enumerate(lengths.tolist())]
    alone = [
        filled(method(page_size=4), one.unsqueeze(0), built=length)
        for one, length in zip(whole, lengths.tolist(), strict=True)
    ]
    padded = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True, padding_value=1000)
    start = (21 - 1) // 8 * 8
    rebuilt = copy.deepcopy(together)
    rebuilt.construct_representations(padded[:, start:], start, lengths + 20, lengths + 20)
    for row, one in enumerate(alone):
        tokens = len(whole[row])
        for each in (together, rebuilt):
            mine = copy.deepcopy(each)
            mine.select_rows(tensor([row]))
            if not isinstance(mine, RaBitQ):
                assert_same_representation(one, mine, -(-tokens // one.granularity))
                continue
            assert torch.equal(centre_of(mine, tokens), centre_of(one, tokens))
            assert torch.equal(mine.filling[0], one.filling[0]) and torch.equal(mine.filling[1], one.filling[1])
            torch.testing.assert_close(decoded(mine, tokens).abs(), decoded(one, tokens).abs(), rtol=2e-3, atol=1e-5)
            assert (decoded(mine, tokens).sign() != decoded(one, tokens).sign()).double().mean() < 0.01


def test_what_a_row_holds_stays_whatever_the_others_hold(monkeypatch):
    """A chunk is built from where the shortest row ends: what others hold by then, steps have centred otherwise."""
    monkeypatch.setattr(RaBitQ, "block", 8)
    prompts, grown, held = tensor([3, 6, 1, 20]), 12, tensor([15, 18, 1, 32])
    keys = draw(4, 60, WIDTH)
    together = RaBitQ()
    together.construct_representations(keys[:, :20], 0, prompts, zeros(4))
    together.reserve(60)
    for t in range(grown):
        together.update_representations(keys[torch.arange(4), prompts + t], prompts + t)
    # One row was cropped to a single token since.
    together.construct_representations(keys[:, :32], 0, held, held)
    together.construct_representations(keys[:, :45], 0, held + 13, held)
    for row, (prompt, end) in enumerate(zip(prompts.tolist(), held.tolist(), strict=True)):
        mine, alone, one = copy.deepcopy(together), RaBitQ(), keys[row : row + 1]
        mine.select_rows(tensor([row]))
        alone.construct_representations(one[:, :prompt], 0, zeros(1) + prompt, zeros(1))
        alone.reserve(60)
        for t in range(grown):
            alone.update_representations(one[:, prompt + t], full((1,), prompt + t))
        low = (end - 1) // 8 * 8
        alone.construct_representations(one[:, low:end], low, zeros(1) + end, zeros(1) + end)
        alone.construct_representations(one[:, low : end + 13], low, zeros(1) + end + 13, zeros(1) + end)
        assert torch.equal(centre_of(mine, end + 13), centre_of(alone, end + 13))
        assert torch.equal(mine.filling[0], alone.filling[0]) and torch.equal(mine.filling[1], alone.filling[1])
        if end > 1:
            held_codes = (decoded(each, end) for each in (mine, alone))
            torch.testing.assert_close(*held_codes, rtol=0, atol=0)
        torch.testing.assert_close(decoded(mine, end + 13).abs(), decoded(alone, end + 13).abs(), rtol=2e-3, atol=1e-5)


def test_padding_leaves_no_trace(method):
    keys, query = draw(2, 40, WIDTH), draw(2, 3, WIDTH, seed=1)
    lengths = tensor([40, 19])
    loud = keys.clone()
    loud[1, 19:] = 1000
    quiet = filled(method(page_size=4), keys, lengths)
    shouted = filled(method(page_size=4), loud, lengths)
    score = shouted.score(query, 10, SCALE, lengths)
    assert torch.equal(quiet.score(query, 10, SCALE, lengths), score)
    assert not score[1, 5:].any() and score.isfinite().all()


def chosen(algorithm: KeyScoring, scores: Tensor, k: int, lengths: Tensor) -> list[dict]:
    """What must be selected, said plainly: a row's kept items, and how high the others have to score."""
    rows = []
    size = algorithm.page_size
    for row, length in enumerate(lengths.tolist()):
        inside = sorted({t // size for t in range(length)})
        kept = {t // size for t in range(min(max(algorithm.sink_tokens, 1), length))}
        kept |= {t // size for t in range(max(0, length - max(algorithm.recent_tokens, 1)), length)}
        others = sorted((float(scores[row, i]) for i in inside if i not in kept), reverse=True)
        count = min(k, len(inside))
        free = count - len(kept)
        rows.append({"inside": inside, "kept": kept, "count": count, "least": others[free - 1] if free else math.inf})
    return rows


@settings(max_examples=80)
@given(st.data())
def test_the_selection_is_the_kept_items_and_the_best_of_the_rest(data):
    name = data.draw(st.sampled_from(sorted(ALGORITHMS)))
    page_size, tokens = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 60))
    algorithm = ALGORITHMS[name](page_size, data.draw(st.integers(0, 6)), data.draw(st.integers(0, 9)))
    rows, seed = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 1000))
    lengths = tensor(data.draw(st.lists(st.integers(1, tokens), min_size=rows, max_size=rows)))
    k = data.draw(st.integers(algorithm.kept_items, algorithm.kept_items + 6))
    keys, query = draw(rows, tokens, WIDTH, seed=seed), draw(rows, 2, WIDTH, seed=seed + 1)
    filled(algorithm, keys, lengths)
    items = -(-tokens // page_size)
    selection = algorithm.retrieve_topk(query, k, items, SCALE, lengths)
    scores = algorithm.score(query, items, SCALE, lengths - int(algorithm.beside)).cpu()

    assert selection.dtype == torch.int32 and selection.shape == (rows, min(k, items))
    for row, expected in enumerate(chosen(algorithm, scores, k, lengths)):
        ids = [i for i in selection[row].tolist() if i >= 0]
        assert selection[row].tolist() == ids + [-1] * (selection.shape[1] - len(ids))
        assert ids == sorted(set(ids)) and set(ids) <= set(expected["inside"])
        assert len(ids) == expected["count"] and expected["kept"] <= set(ids)
        assert len(expected["kept"]) <= algorithm.kept_items
        assert all(scores[row, i] >= expected["least"] for i in set(ids) - expected["kept"])


@pytest.mark.parametrize("parent", [Quest, RaBitQ])
def test_a_method_with_scores_of_its_own_selects_by_them(parent):
    class Backwards(parent):
        def score(self, query, items, scale, lengths):
            return -super().score(query, items, scale, lengths)

    class Same(parent):
        pass

    keys, query, lengths = draw(1, 400, WIDTH), draw(1, 2, WIDTH, seed=1), tensor([400])
    chosen = []
    for kind in (parent, Same, Backwards):
        algorithm = kind(page_size=4, sink_tokens=1, recent_tokens=1)
        algorithm.construct_representations(keys, 0, lengths, zeros(1))
        chosen.append(set(algorithm.retrieve_topk(query, 30, 100, SCALE, lengths)[0].tolist()))
    assert chosen[0] == chosen[1]
    assert chosen[0] & chosen[2] == {0, 99}


def test_everything_is_selected_while_it_fits(method):
    keys = draw(2, 30, WIDTH)
    algorithm = filled(method(page_size=4, sink_tokens=1, recent_tokens=1), keys)
    selection = algorithm.retrieve_topk(draw(2, 2, WIDTH, seed=1), 20, 8, SCALE, tensor([30, 30]))
    assert selection.tolist() == [list(range(8))] * 2


def test_a_key_that_stands_out_is_found(method):
    """A page with one key far along the query is selected, wherever it lies."""
    query = draw(1, 1, WIDTH, seed=5)
    for needle in range(8, 90, 9):
        keys = draw(1, 100, WIDTH)
        keys[0, needle] = 4 * query[0, 0]
        algorithm = filled(method(page_size=4, sink_tokens=4, recent_tokens=4), keys)
        selection = algorithm.retrieve_topk(query, 6, 25, SCALE, tensor([100]))
        assert needle // 4 in selection[0].tolist()


def test_rows_are_independent(method):
    keys, query = draw(4, 50, WIDTH), draw(4, 2, WIDTH, seed=1)
    lengths = tensor([50, 45, 17, 50])
    algorithm = filled(method(4, 1, 1), keys, lengths)
    together = algorithm.retrieve_topk(query, 6, 13, SCALE, lengths)
    for row in range(4):
        some = slice(row, row + 1)
        alone = filled(method(4, 1, 1), keys[some], lengths[some])
        assert torch.equal(alone.retrieve_topk(query[some], 6, 13, SCALE, lengths[some]), together[some])


def test_heads_are_normalised_before_they_are_summed():
    """A head with large logits has one vote, like any other."""
    logits = tensor([[[1000.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]])
    score = softmax_mass(logits, torch.ones(1, 3, dtype=torch.bool, device=DEVICE))
    assert score.argmax() == 1
    assert float(score.sum()) == pytest.approx(4)


def test_a_row_of_padding_has_no_mass():
    score = softmax_mass(torch.zeros(2, 3, 5, device=DEVICE), tensor([[True] * 5, [False] * 5]))
    assert float(score[0].sum()) == pytest.approx(3) and not score[1].any()


# ---- the lightning indexer -------------------------------------------------------------------------------------------


def indexer(batch: int, tokens: int, width: int = 8, seed: int = 0) -> tuple[LightningIndexer, Tensor]:
    keys = draw(batch, tokens, width, seed=seed)
    algorithm = LightningIndexer()
    for position in torch.arange(tokens, device=DEVICE).split(7):
        algorithm.extend(keys[:, position], position.unsqueeze(0), int(position[-1]) + 1)
    return algorithm, keys


@settings(max_examples=80)
@given(st.data())
def test_the_indexer_selects_by_the_plain_expression(data):
    """Against `sum_h w_h relu(scale q_h . k)`, written out as `[batch, query, heads, keys]` in float64."""
    batch, tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40))
    queries = data.draw(st.integers(1, min(6, tokens)))
    heads, seed, k = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 1000)), data.draw(st.integers(1, 50))
    algorithm, keys = indexer(batch, tokens, seed=seed)
    algorithm.block = data.draw(st.sampled_from([1, 5, 64, 1 << 24]))
    query, weights = draw(batch, queries, heads, 8, seed=seed + 1), draw(batch, queries, heads, seed=seed + 2)
    # The longest row ends with its last query, others before; some queries are padding.
    room = st.integers(0, tokens - queries)
    positions = [tokens - queries] + [data.draw(room) for _ in range(batch - 1)]
    token, query_of = torch.arange(tokens), torch.arange(queries).unsqueeze(1)
    visible = torch.stack([token <= first + query_of for first in positions])

    selection = algorithm.retrieve_topk(query, weights, 0.3, tensor(positions), tokens, k)
    products = torch.einsum("bqhd,bkd->bqhk", query.double(), keys.double())
    scores = (weights.double().unsqueeze(-1) * (0.3 * products).relu()).sum(2).cpu()
    assert selection.dtype == torch.int32 and selection.shape == (batch, queries, min(k, tokens))
    for b in range(batch):
        for q in range(queries):
            ids = [i for i in selection[b, q].tolist() if i >= 0]
            seen = visible[b, q].nonzero().squeeze(1).tolist()
            assert selection[b, q].tolist() == ids + [-1] * (min(k, tokens) - len(ids))
            assert ids == sorted(set(ids)) and set(ids) <= set(seen) and len(ids) == min(k, len(seen))
            left = [scores[b, q, i] for i in set(seen) - set(ids)]
            if left:
                assert min(scores[b, q, i] for i in ids) >= max(left) - 1e-5


def test_the_indexer_overwrites_what_was_cut():
    algorithm, keys = indexer(2, 30)
    more = draw(2, 5, 8, seed=9)
    algorithm.extend(more, torch.arange(11, 16, device=DEVICE).unsqueeze(0), 16)
    assert torch.equal(algorithm.representations["keys"][:, :16], torch.cat((keys[:, :11], more), dim=1))


@pytest.mark.parametrize("contiguous", [True, False])
def test_the_indexer_puts_the_keys_of_every_sequence_where_its_own_tokens_are(contiguous):
    algorithm, keys = indexer(3, 30)
    more, position = draw(3, 4, 8, seed=9), tensor([[0, 1, 2, 3], [12, 13, 14, 15], [26, 27, 28, 29]])
    algorithm.extend(more if contiguous else more.transpose(0, 2).contiguous().transpose(0, 2), position, 30)
    for held, new, first in zip(keys, more, position[:, 0].tolist(), strict=True):
        held[first : first + 4] = new
    assert torch.equal(algorithm.representations["keys"], keys)


def test_the_indexer_follows_its_batch():
    algorithm, keys = indexer(3, 20)
    algorithm.select_rows(tensor([2, 0, 0, 1]))
    assert torch.equal(algorithm.representations["keys"][:, :20], keys[[2, 0, 0, 1]])


def test_the_indexer_computes_in_float32():
    """Bfloat16 keys and queries are scored exactly: a bfloat16 product would tie these two."""
    algorithm = LightningIndexer()
    keys = tensor([[[256.0, 1.0], [256.0, 0.0]]], dtype=torch.bfloat16)
    algorithm.extend(keys, torch.arange(2, device=DEVICE).unsqueeze(0), 2)
    query = tensor([[[[1.0, 1.0]]]], dtype=torch.bfloat16)
    weights, window = torch.ones(1, 1, 1, device=DEVICE), (tensor([1]), 2)
    # The stock indexer widens its queries before they meet the keys.
    for widened in (query, query.float()):
        assert algorithm.retrieve_topk(widened, weights, 1.0, *window, 1).item() == 0
        assert algorithm.retrieve_topk(widened, -weights, 1.0, *window, 1).item() == 1


def test_a_query_of_the_indexer_selects_the_same_whatever_else_is_asked():
    """Rows of a batch, queries of a block, and room for more tokens."""
    algorithm, _ = indexer(3, 60)
    query, weights = draw(3, 20, 4, 8, seed=1), draw(3, 20, 4, seed=2)
    positions = tensor([40, 30, 40])
    together = algorithm.retrieve_topk(query, weights, 0.3, positions, 60, 7)
    for one in range(20):
        some = slice(one, one + 1)
        alone = algorithm.retrieve_topk(query[:, some], weights[:, some], 0.3, positions + one, 60, 7)
        assert torch.equal(alone, together[:, some])


# ---- a method of one's own -------------------------------------------------------------------------------------------


class Oldest(KeyScoring):
    """Prefers what lies at the beginning."""

    page_size = 4
    recent_tokens = 3

    def represent(self, keys: Tensor, valid: Tensor) -> dict[str, Tensor]:
        return {"nothing": keys.new_zeros(*keys.shape[:2], 1)}

    def merge(self, old: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Tensor]:
        return old

    def score(self, query: Tensor, items: int, scale: float, lengths: Tensor) -> Tensor:
        return -torch.arange(items, device=query.device).float().expand(len(query), items).contiguous()


def test_a_class_is_an_algorithm(tiny):
    """With the defaults that it names, over the hierarchical cache as over the resident oracle, by `enable` too."""
    model, ids = tiny("llama"), random_ids(2, 90)
    cache, resident = (HierarchicalSparseCache(model, top_k=32, algorithm=Oldest, offload=o) for o in (True, False))
    with cache.record_trace() as trace:
        logits = decode(model, ids, cache, 80)
    assert same_bits(logits, decode(model, ids, resident, 80))
    assert repr(cache.layers[0].coordinator.algorithm) == trace.algorithm == "Oldest(page_size=4)"
    for step, tokens in enumerate(range(81, 91)):
        newest = sorted({(tokens - back) // 4 for back in (1, 2, 3)})
        assert trace.layers[0].selections[step, 0].tolist() == [*range(8 - len(newest)), *newest]
    chosen = generate(model, ids, cache := HierarchicalSparseCache(model, top_k=32, algorithm=Oldest), 5)
    assert cache.stats().misses
    with enable(model, top_k=32, algorithm=Oldest):
        assert torch.equal(generate(model, ids, None, 5).sequences, chosen.sequences)
    with pytest.raises(TypeError, match="abstract"):
        HierarchicalSparseCache(model, algorithm=KeyScoring)


# ---- growth ----------------------------------------------------------------------------------------------------------


class Fails(TorchDispatchMode):
    """Raises at the n-th operation within it."""

    def __init__(self, at: int):
        super().__init__()
        self.at = at

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.at -= 1
        if self.at < 0:
            raise torch.OutOfMemoryError("no memory")
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("entries", [5, 6, 40])
def test_growth_that_ends_midway_changes_nothing(entries):
    """Kernels are given one capacity for all tensors of a representation."""
    held = {name: torch.randn(2, 5, width) for name, width in (("low", 3), ("high", 3), ("scale", 1))}
    for at in range(100):
        representations = Representations()
        representations.write({name: value.clone() for name, value in held.items()}, 0)
        try:
            with Fails(at):
                representations.reserve(entries)
        except torch.OutOfMemoryError:
            capacity = 5
        else:
            capacity = entries
        assert {tensor.shape[1] for tensor in representations.tensors.values()} == {capacity}
        assert all(torch.equal(representations.first(5)[name], value) for name, value in held.items())
        if capacity == entries:
            break
    assert at == 0 if entries == 5 else at > 5
