"""Histories in files."""

from __future__ import annotations

import functools
import json
import os
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_hisparse import HierarchicalSparseCache, storage, unpatch_model
from hf_hisparse.algorithms import Quest
from hf_hisparse.cache import FILE_KEY
from hf_hisparse.memory import host_store
from hf_hisparse.models import is_patched
from tests.helpers import DEVICE, METHODS, decode, dense_cache, forward, make_model, padding, random_ids, same_bits
from tests.test_graph import model_of


@pytest.fixture(params=METHODS)
def method(request) -> str:
    return request.param


made = functools.cache(model_of)


@pytest.fixture
def model(method) -> Any:
    """One whose steps are rounded alike in a graph and outside. Leave it as it was."""
    return made(METHODS[method][0])


@pytest.fixture
def small_slabs(monkeypatch) -> None:
    monkeypatch.setattr(host_store, "SLAB_BYTES", 1024)


def steps(model: Any, ids: Tensor, cache: Any, mask: Tensor | None = None) -> Tensor:
    """The logits of tokens fed one at a time."""
    past = cache.get_seq_length()
    logits = [
        forward(model, ids[:, t : t + 1], cache, None if mask is None else mask[:, : past + t + 1])[:, -1]
        for t in range(ids.shape[1])
    ]
    return torch.stack(logits, dim=1)


def filled(model: Any, tokens: int = 100, **options: Any) -> HierarchicalSparseCache:
    cache = HierarchicalSparseCache(model, **options)
    forward(model, random_ids(2, tokens), cache)
    return cache


@pytest.mark.parametrize("tokens", [20, 110], ids=["dense", "sparse"])
@pytest.mark.parametrize(
    "loaded",
    [{}, {"max_cache_len": 300}, {"offload": False}, {"buffer_size": 44}],
    ids=["grows", "room", "resident", "buffer"],
)
def test_a_loaded_cache_goes_on_as_the_saved_one(small_slabs, model, method, tmp_path, tokens, loaded):
    """Also after it was cropped, over what lies in the file, and though the file is replaced meanwhile."""
    options, mask = METHODS[method][1], padding("holes", 2, tokens - 7, tokens + 60)
    cache = HierarchicalSparseCache(model, **options)
    decode(model, random_ids(2, tokens), cache, tokens - 7, mask[:, :tokens])
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    found = HierarchicalSparseCache.load(model, path, **loaded)
    assert found.get_seq_length() == tokens
    more, chunk = random_ids(2, 20, seed=1), random_ids(2, 5, seed=2)
    for turn in range(2):
        assert same_bits(steps(model, more, found, mask), steps(model, more, cache, mask))
        found.save(path)
        seen = mask[:, : tokens + 25]
        assert same_bits(forward(model, chunk, found, seen), forward(model, chunk, cache, seen))
        for each in (found, cache):
            each.crop(-45 if turn == 0 and tokens == 110 else -25)
        mask, tokens = mask.clone(), found.get_seq_length()
        mask[:, tokens:] = 1
    assert HierarchicalSparseCache.load(model, path).get_seq_length()


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next", "glm_moe_dsa"])
def test_layers_of_other_kinds_are_saved_too(tiny, tmp_path, name):
    model = tiny(name)
    options = {} if "index_topk" in model.config.to_dict() else {"top_k": 40, "page_size": 4, "recent_tokens": 6}
    cache = filled(model, 90, **options)
    cache.save(tmp_path / "cache")
    found = HierarchicalSparseCache.load(model, tmp_path / "cache")
    more = random_ids(2, 40, seed=1)
    assert same_bits(steps(model, more, found), steps(model, more, cache))


def test_dense_layers_and_bfloat16(tiny, tmp_path):
    model = tiny("llama", torch.bfloat16)
    cache = filled(model, 90, **METHODS["llama-quest"][1], dense_layers=[1])
    cache.save(tmp_path / "cache")
    found = HierarchicalSparseCache.load(model, str(tmp_path / "cache"), dense_layers={1})
    more = random_ids(2, 30, seed=1)
    assert same_bits(steps(model, more, found), steps(model, more, cache))


def test_a_history_that_was_dense_before(tiny, tmp_path):
    model = tiny("gemma3_text")
    dense = dense_cache(model)
    forward(model, random_ids(2, 90), dense)
    cache = HierarchicalSparseCache.from_dense(model, dense, top_k=40, page_size=4, recent_tokens=6)
    cache.save(tmp_path / "cache")
    found = HierarchicalSparseCache.load(model, tmp_path / "cache")
    more = random_ids(2, 30, seed=1)
    assert same_bits(steps(model, more, found), steps(model, more, cache))


def test_an_empty_cache(tiny, tmp_path):
    model = tiny("llama")
    HierarchicalSparseCache(model, top_k=64).save(tmp_path / "cache")
    found = HierarchicalSparseCache.load(model, tmp_path / "cache")
    fresh = HierarchicalSparseCache(model, top_k=64)
    ids = random_ids(2, 100)
    assert same_bits(decode(model, ids, found, 90), decode(model, ids, fresh, 90))


def test_the_file_is_mapped_and_stays_as_it_was(small_slabs, tiny, tmp_path):
    """The history of a CPU lies in the file; several caches share it, and none writes to it."""
    model, path = tiny("llama"), tmp_path / "cache"
    cache = filled(model, 1003, top_k=64)
    cache.save(path)
    before = path.read_bytes()
    found = [HierarchicalSparseCache.load(model, path) for _ in range(2)]
    if DEVICE.type == "cpu":
        for loaded in found:
            for layer in loaded.layers:
                store = layer.coordinator.memory.store
                assert store.shared == 125 and store.table.shape[1] == 126
    more = [random_ids(2, 30, seed=seed) for seed in range(2)]
    logits = [steps(model, ids, loaded) for ids, loaded in zip(more, found, strict=True)]
    assert path.read_bytes() == before
    assert same_bits(logits[0], steps(model, more[0], cache.fork()))
    assert same_bits(logits[1], steps(model, more[1], cache.fork()))


def test_a_file_is_one_that_safetensors_reads(tiny, tmp_path):
    model, path = tiny("llama"), tmp_path / "cache"
    cache = filled(model, 90, **METHODS["llama-rabitq"][1])
    cache.save(path)
    tensors = load_file(path)
    layer = cache.layers[0].coordinator
    keys, values = layer.memory.layout.unpack(tensors["layers.0.items"], 90)
    for found, part in zip((keys, values), layer.history(), strict=True):
        assert torch.equal(found.view(part.shape), part.cpu())
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()[FILE_KEY])["model"]["`model_type`"] == "llama"


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_another_model_is_refused(tiny, tmp_path):
    path = tmp_path / "cache"
    filled(tiny("llama"), 60, top_k=40).save(path)
    others = {
        "model_type": make_model("qwen2"),
        "num_hidden_layers": make_model("llama", num_hidden_layers=3),
        "rope_parameters": make_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 5000.0}),
        "the dtype was 'torch.float32' and is 'torch.bfloat16'": make_model("llama", torch.bfloat16),
    }
    changed = make_model("llama")
    with torch.no_grad():
        changed.model.layers[1].self_attn.k_proj.weight[0, 0] += 1
    others["the weights' checksum"] = changed
    for reason, model in others.items():
        with pytest.raises(ValueError, match="saved for another model") as error:
            HierarchicalSparseCache.load(model, path)
        assert reason in str(error.value)
        assert not is_patched(model)


def test_the_same_weights_are_the_same_model(tiny, tmp_path):
    cache = filled(tiny("llama"), 60, top_k=40)
    cache.save(tmp_path / "cache")
    again = make_model("llama")
    found = HierarchicalSparseCache.load(again, tmp_path / "cache")
    more = random_ids(2, 5, seed=1)
    assert same_bits(steps(again, more, found), steps(tiny("llama"), more, cache))


@pytest.mark.parametrize(
    "options", [{"top_k": 64}, {"page_size": 8}, {"algorithm": "quest"}, {"dense_layers": [0]}, {"sink_tokens": 1}]
)
def test_other_options_are_refused(tmp_path, options):
    model = make_model("llama")
    filled(model, 60, top_k=40).save(tmp_path / "cache")
    unpatch_model(model)
    with pytest.raises(ValueError, match=f"saved with other options: {next(iter(options))} was"):
        HierarchicalSparseCache.load(model, tmp_path / "cache", **options)
    with pytest.raises(ValueError, match="60 tokens were saved, more than `max_cache_len=50`"):
        HierarchicalSparseCache.load(model, tmp_path / "cache", max_cache_len=50)
    assert not is_patched(model)
    HierarchicalSparseCache.load(model, tmp_path / "cache", top_k=40)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"dense_layers": 0}, "`dense_layers` must be indices"), ({"offload": "no"}, "`offload` must be True or False")],
)
def test_options_that_cannot_be_are_refused(tmp_path, options, message):
    model = make_model("llama")
    filled(model, 60, top_k=40).save(tmp_path / "cache")
    with pytest.raises(ValueError, match=message):
        HierarchicalSparseCache.load(model, tmp_path / "cache", **options)


class Coarse(Quest):
    page_size = 4


def test_an_algorithm_that_is_a_class(tiny, tmp_path):
    """Its name is saved, and it has to be given again."""
    model, path = tiny("llama"), tmp_path / "cache"
    cache = filled(model, 60, top_k=40, algorithm=Coarse)
    cache.save(path)
    with pytest.raises(ValueError, match="was saved with `algorithm=tests.test_save.Coarse`; give that class"):
        HierarchicalSparseCache.load(model, path)
    for other in (Quest, "quest"):
        with pytest.raises(ValueError, match="other options: algorithm was 'tests.test_save.Coarse'"):
            HierarchicalSparseCache.load(model, path, algorithm=other)
    found = HierarchicalSparseCache.load(model, path, algorithm=Coarse)
    more = random_ids(2, 5, seed=1)
    assert same_bits(steps(model, more, found), steps(model, more, cache))
    filled(model, 60, top_k=40, algorithm="quest", page_size=4).save(path)
    with pytest.raises(ValueError, match="other options: algorithm was 'quest'"):
        HierarchicalSparseCache.load(model, path, algorithm=Coarse)


def test_files_of_others_are_refused(tiny, tmp_path):
    model, path = tiny("llama"), tmp_path / "cache"
    filled(model, 60, top_k=40).save(path)
    whole = path.read_bytes()
    for content in (b"", b"no", whole[:-1], whole[:100], whole + b"x", b"\xff" * 64, b"\2\0\0\0\0\0\0\0[]"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            HierarchicalSparseCache.load(model, path)
    save_file({"a": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match="holds no cache that `save` wrote"):
        HierarchicalSparseCache.load(model, path)
    with safe_open(tmp_path / "cache", "pt"):
        pass
    save_file({"a": torch.zeros(3)}, path, {FILE_KEY: json.dumps({"version": 99})})
    with pytest.raises(ValueError, match="has format version 99; this one reads 2"):
        HierarchicalSparseCache.load(model, path)
    with pytest.raises(FileNotFoundError):
        HierarchicalSparseCache.load(model, tmp_path / "nothing")


def test_a_save_that_fails_leaves_the_file_that_was_there(tiny, tmp_path, monkeypatch):
    model, path = tiny("llama"), tmp_path / "cache"
    cache = filled(model, 60, top_k=40)
    cache.save(path)
    before = path.read_bytes()
    steps(model, random_ids(2, 3), cache)

    def full(file: int) -> None:
        raise OSError("no space left on the device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        cache.save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["cache"]
    assert cache.get_seq_length() == 63


def test_pieces_are_aligned_whatever_their_dtypes(tmp_path):
    tensors = {
        "a": torch.arange(3, dtype=torch.uint8),
        "b": torch.arange(5, dtype=torch.int64),
        "c": torch.rand(3, 3).to(torch.bfloat16),
        "d": torch.rand(2, 0, 3),
        "e": torch.tensor(True),
        "f": torch.rand(7),
    }
    path = tmp_path / "file"
    storage.write(path, {name: storage.Pieces.of(tensor) for name, tensor in tensors.items()}, {"k": "v"})
    mapped = storage.Mapped(path)
    for found in (mapped.tensors(), load_file(path)):
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    assert mapped.metadata == {"k": "v"}
    assert all(tensor.data_ptr() % tensor.dtype.itemsize == 0 for tensor in mapped.tensors().values())
