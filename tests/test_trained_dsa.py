"""A small model that has learned to look things up with DeepSeek sparse attention, and the program that taught it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from eval import train_dsa
from eval.train_dsa import ASK, HOPS, answer, indexers, make_batch, overlap, select, selections, vocabulary
from hf_hisparse import HierarchicalSparseCache, unpatch_model
from tests.helpers import DEVICE


CHECKPOINT = Path(__file__).parent / "data" / "dsa-recall"


def generator(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).to(DEVICE).eval()


@pytest.mark.parametrize("hops", HOPS)
def test_answers(model, hops):
    """The answers under this cache are those under the stock one, and right; selections of trained indexers persist."""
    top_k = model.config.index_topk
    tokens, context, answers = make_batch(17, top_k, hops, top_k, generator=generator(hops), device=DEVICE)
    assert context > 8 * top_k
    with selections(model) as seen:
        stock = answer(model, tokens, context, answers, DynamicCache(config=model.config))
    cache = HierarchicalSparseCache(model)
    ours = answer(model, tokens, context, answers, cache)
    unpatch_model(model)
    assert torch.equal(ours, stock)
    right = (ours == tokens[:, answers].cpu()).float().mean()
    # One of the names or values in the context is right one time in 2 * top_k or so.
    assert right > 0.9, right
    persistence = [overlap(layer) for layer in seen]
    chance = top_k / context
    assert min(persistence) > 2 * chance and sum(persistence) / len(persistence) > 3 * chance, persistence
    assert cache.stats().hit_rate > 4 * chance


@pytest.mark.parametrize("hops", HOPS)
@pytest.mark.parametrize("repeat", [False, True])
def test_a_question_is_answered_by_the_context_alone(hops, repeat):
    pairs, words = 8, 16
    tokens, context, answers = make_batch(5, pairs, hops, words, repeat, generator(0), DEVICE)
    filler, names, values = vocabulary(words)
    for row in tokens.tolist():
        assert len(row) == train_dsa.length(pairs)
        follows = [
            (a, b) for a, b in zip(row[:context], row[1:context], strict=False) if a in names and b not in filler
        ]
        assert len(follows) == len(dict(follows)) == pairs
        asked = []
        for chain in answers.tolist():
            name = row[chain[0] - 1]
            asked.append(name)
            assert row[chain[0] - 2] == ASK
            for position in chain:
                name = dict(follows)[name]
                assert row[position] == name
            assert name in values
        assert repeat or len(set(asked)) == pairs // hops


def test_the_indexer_in_training_is_the_stock_one():
    """Its selections are, and what it leaves of its scores are those of what is selected."""
    torch.manual_seed(0)
    model = train_dsa.make_model(4, 32, 2).to(DEVICE)
    tokens, *_ = make_batch(3, 4, 1, 4, generator=generator(0), device=DEVICE)
    stock = model(tokens, use_cache=False).logits
    for indexer in indexers(model):
        indexer.forward = partial(select, indexer)
    trained = model(tokens, use_cache=False, output_attentions=True)
    assert torch.equal(trained.logits, stock)
    for indexer, attention in zip(indexers(model), trained.attentions, strict=True):
        selected = indexer.scores > -1e4
        assert torch.equal(selected.sum(-1)[0], torch.arange(1, tokens.shape[1] + 1, device=DEVICE).clamp(max=4))
        assert torch.equal(selected, attention.sum(1) > 0)
        target = attention.mean(1)
        expected = target * (target.log() - indexer.scores.softmax(-1).log())
        torch.testing.assert_close(
            train_dsa.divergence(indexer.scores, attention), expected.masked_fill(~selected, 0).sum(-1).mean()
        )


def test_training(tmp_path, monkeypatch):
    """However short the time, every phase is had, and what is left is a model and its results."""
    monkeypatch.setattr(train_dsa, "quiet", lambda: None)
    sizes = "--seconds 1 --pairs 4 --hidden 32 --layers 2 --batch 4 --prompts 2".split()
    monkeypatch.setattr("sys.argv", ["train_dsa", *sizes, "--device", str(DEVICE), "--output", str(tmp_path)])
    train_dsa.main()
    written = json.loads((tmp_path / "results.json").read_text())
    assert [phase["phase"] for phase in written["phases"]] == ["dense", "warm-up", "sparse"]
    assert [row["hops"] for row in written["rows"][::4]] == list(HOPS)
    assert all(0 <= row["chains"] <= row["tokens"] <= 1 for row in written["rows"])
    assert all(row["same"] == 1 for row in written["rows"] if row["attention"] == "ours")
