"""lm-eval's model type: the same results as its own `hf` where the selection is everything, and those of a decode."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from hf_hisparse import HierarchicalSparseCache
from hf_hisparse.models import cache_argument
from tests.helpers import DEVICE, decode, make_model


pytest.importorskip("lm_eval", reason="lm-eval is not installed: `pip install '.[eval]'`")

import lm_eval
from lm_eval.tasks import TaskManager

from hf_hisparse.lm_eval import HierarchicalLM
from tests.tokens import save_tokenizer


GENERATION = """
task: told
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/told.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["zq"], max_gen_toks: 12}}
metric_list: [{{metric: exact_match}}]
metadata: {{version: 1}}
"""
CHOICE = """
task: chosen
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/told.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list: [{{metric: acc}}]
metadata: {{version: 1}}
"""
ROLLING = """
task: read
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/told.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: byte_perplexity}}]
metadata: {{version: 1}}
"""


@pytest.fixture(scope="module", autouse=True)
def offline():
    """Nothing is asked of the hub, and data sets are kept with the test's files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        yield patch


@pytest.fixture(scope="module")
def folder(tmp_path_factory, offline) -> Path:
    """A model, its tokenizer, tasks and their data, on disk."""
    path = tmp_path_factory.mktemp("lm_eval")
    offline.setattr("datasets.config.HF_DATASETS_CACHE", path / "cache")
    make_model("llama", vocab_size=260).save_pretrained(path)
    save_tokenizer(path)
    words = "amber harbor lantern meadow cedar falcon granite violet".split()
    with (path / "told.jsonl").open("w") as file:
        for index in range(5):
            text = " ".join(words[(index * 7 + at * at) % 8] for at in range(12 + 5 * index))
            choices = [words[(index + at) % 8][: 1 + 2 * at] for at in range(3)]
            file.write(json.dumps({"text": text, "answer": "x", "choices": choices}) + "\n")
    for name, task in (("told", GENERATION), ("chosen", CHOICE), ("read", ROLLING)):
        (path / f"{name}.yaml").write_text(task.format(folder=path))
    return path


def evaluate(folder: Path, model: str, task: str, batch: int = 2, chat: bool = False, **args: Any) -> dict[str, Any]:
    """What lm-eval's own program gets, with the samples."""
    return lm_eval.simple_evaluate(
        model=model,
        model_args={"pretrained": str(folder), "dtype": "float32"} | args,
        tasks=[task],
        device=str(DEVICE),
        batch_size=batch,
        apply_chat_template=chat,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )


def responses(results: dict[str, Any], task: str) -> list[Any]:
    return [sample["resps"] for sample in sorted(results["samples"][task], key=lambda sample: sample["doc_id"])]


def test_the_model_type_is_found_by_its_name():
    """By releases of lm-eval that look for entry points, and by others once the module is imported."""
    found = importlib.metadata.entry_points(group="lm_eval.models")
    named = [entry.load() for entry in found if entry.name == "hisparse"]
    if not named:
        pytest.skip("the package is not installed")
    assert set(named) == {HierarchicalLM}
    assert lm_eval.api.registry.get_model("hisparse") is HierarchicalLM


@pytest.mark.parametrize(("batch", "chat"), [(1, False), (3, True)], ids=["text", "chat"])
def test_generation_with_everything_selected(folder, batch, chat):
    """Also contexts of several lengths in one batch."""
    expected = evaluate(folder, "hf", "told", batch, chat)
    found = evaluate(folder, "hisparse", "told", batch, chat, top_k=1024)
    assert responses(found, "told") == responses(expected, "told")
    assert found["results"]["told"] == expected["results"]["told"]
    assert len({json.dumps(said) for said in responses(found, "told")}) > 1
    usage = found["config"]["hisparse"]
    assert usage["hit_rate"] is None and usage["device_bytes"] == usage["dense_bytes"] > 0


def test_generation_over_a_selection(folder):
    """Goes through the hierarchical cache, says so beside the scores, and is what `generate` gives."""
    options = {"top_k": 40, "page_size": 4, "algorithm": "quest", "sink_tokens": 2, "recent_tokens": 6}
    found = evaluate(folder, "hisparse", "told", 1, **options)
    usage = found["config"]["hisparse"]
    assert 0 < usage["hit_rate"] < 1 and usage["misses"] > 0 and usage["host_bytes"] > 0
    assert usage["device_bytes"] > 0 and usage["bytes_moved"] == usage["misses"] * 4 * 2 * 16 * 4
    model = make_model("llama", vocab_size=260)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    for sample, said in zip(found["samples"]["told"], responses(found, "told"), strict=True):
        ids = tokenizer(sample["doc"]["text"], return_tensors="pt").input_ids.to(DEVICE)
        cache = HierarchicalSparseCache(model, **options)
        own = {cache_argument(model): cache}
        output = model.generate(ids, do_sample=False, max_new_tokens=12, pad_token_id=0, **own)
        assert said == [[tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)]]
    dense = responses(evaluate(folder, "hf", "told", 1), "told")
    assert dense != responses(found, "told")


@pytest.mark.parametrize("task", ["chosen", "read"])
def test_dense_log_likelihoods(folder, task):
    """Are those of `hf`, bit for bit, whatever the cache is."""
    assert responses(evaluate(folder, "hisparse", task, top_k=40), task) == responses(
        evaluate(folder, "hf", task), task
    )


def numbers(results: dict[str, Any], task: str) -> Tensor:
    """The log-likelihoods, in order."""

    def flat(value: Any) -> list[float]:
        if isinstance(value, (list, tuple)):
            return [number for part in value for number in flat(part)]
        return [] if isinstance(value, bool | str) else [float(value)]

    return torch.tensor(flat(responses(results, task)), dtype=torch.float64)


@pytest.mark.parametrize(("task", "batch"), [("chosen", 3), ("read", 2)])
def test_decoded_log_likelihoods_with_everything_selected(folder, task, batch):
    """Token by token, in batches, several continuations of one context: what one dense forward gives."""
    found = evaluate(folder, "hisparse", task, batch, top_k=1024, sparse_loglikelihood=True)
    expected = evaluate(folder, "hf", task, batch)
    torch.testing.assert_close(numbers(found, task), numbers(expected, task), rtol=1e-5, atol=1e-4)
    scores, wanted = (
        {k: v for k, v in run["results"][task].items() if isinstance(v, float)} for run in (found, expected)
    )
    assert scores == pytest.approx(wanted, rel=1e-4) and scores


@pytest.mark.parametrize("batch", [1, 3])
def test_decoded_log_likelihoods_over_a_selection(folder, batch):
    """Are those of a decode that is fed the continuation, one context at a time.

    Pages begin with the padding, and would not be the same: an item is one token.
    """
    options = {"top_k": 40, "page_size": 1, "algorithm": "rabitq", "sink_tokens": 2, "recent_tokens": 6}
    found = evaluate(folder, "hisparse", "chosen", batch, sparse_loglikelihood=True, **options)
    assert 0 < found["config"]["hisparse"]["hit_rate"] < 1
    model = make_model("llama", vocab_size=260)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    expected, dense = [], []
    for line in (folder / "told.jsonl").read_text().splitlines():
        entry = json.loads(line)
        context = tokenizer(entry["text"]).input_ids
        for choice in entry["choices"]:
            own = tokenizer(f" {choice}", add_special_tokens=False).input_ids
            ids = torch.tensor([context + own], device=DEVICE)
            for cache, results in ((HierarchicalSparseCache(model, **options), expected), (None, dense)):
                logits = (
                    model(ids).logits[:, len(context) - 1 :]
                    if cache is None
                    else decode(model, ids, cache, len(context) - 1)[:, 1:]
                )
                picked = logits[0].log_softmax(-1)[torch.arange(len(own)), torch.tensor(own, device=DEVICE)]
                results.append(float(picked.sum().detach()))
    torch.testing.assert_close(numbers(found, "chosen"), torch.tensor(expected).double(), rtol=1e-5, atol=1e-4)
    assert (torch.tensor(expected) - torch.tensor(dense)).abs().max() > 0.1


@pytest.mark.parametrize("backend", ["default", "causal", "reference"])
def test_a_backend_of_either_kind(folder, backend):
    """`hf`'s, the kind of model, or the attention kernels."""
    model = HierarchicalLM(str(folder), device=str(DEVICE), backend=backend)
    assert model.backend == "causal"
    assert model._cache.config.backend == (backend if backend == "reference" else "auto")


def test_a_backend_of_neither_kind(folder):
    with pytest.raises(ValueError, match="`backend` must be one of .*'reference'.*, not 'fast'"):
        HierarchicalLM(str(folder), device=str(DEVICE), backend="fast")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("top_k=abc", "`top_k` must be a positive integer, not 'abc'"),
        ("offload=no", "`offload` must be True or False, not 'no'"),
        ("sparse_loglikelihood=no", "`sparse_loglikelihood` must be True or False, not 'no'"),
        ("sparse_loglikelihood=1", "`sparse_loglikelihood` must be True or False, not 1"),
        ("dense_layers=0;1", "`dense_layers` must be indices of layers"),
    ],
)
def test_options_that_cannot_be(option, message):
    """As they come from the command line, before a model is read: here there is none."""
    with pytest.raises(ValueError) as error:
        HierarchicalLM.create_from_arg_string(f"pretrained=none,{option}", {"device": "cpu"})
    assert message in str(error.value)


def test_options_that_do_not_fit(folder):
    with pytest.raises(ValueError, match=r"`top_k` must be a positive integer"):
        HierarchicalLM(str(folder), device=str(DEVICE), top_k=0)
    with pytest.raises(ValueError, match=r"`dense_layers` names layers \[7\]"):
        HierarchicalLM(str(folder), device=str(DEVICE), dense_layers=7)


def test_the_program(folder, tmp_path):
    """`python -m hf_hisparse.lm_eval` takes lm-eval's own arguments, and writes its results."""
    arguments = (
        f"--model hisparse --model_args pretrained={folder},top_k=64,algorithm=quest,page_size=4,dtype=float32 "
        f"--tasks told --include_path {folder} --device cpu --batch_size 2 --output_path {tmp_path}"
    )
    result = subprocess.run(
        [sys.executable, "-m", "hf_hisparse.lm_eval", *arguments.split()],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert "exact_match" in result.stdout and "HierarchicalSparseCache: hit rate" in result.stderr
    (written,) = tmp_path.rglob("results_*.json")
    assert 0 < json.loads(written.read_text())["config"]["hisparse"]["hit_rate"] < 1
