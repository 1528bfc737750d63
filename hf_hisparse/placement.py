"""Where a model's modules run, and its weights wherever they are: accelerate keeps them elsewhere between forwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def hooks(module: nn.Module) -> tuple[Any, ...]:
    """accelerate's hooks on a module, which move its inputs and weights as it runs."""
    hook = getattr(module, "_hf_hook", None)
    return () if hook is None else tuple(getattr(hook, "hooks", (hook,)))


def device_of(module: nn.Module) -> torch.device:
    """Where the first of a module's parts runs. Weights that are offloaded are on no device until they are used."""
    for part in module.modules():
        for hook in hooks(part):
            device = getattr(hook, "execution_device", None)
            if device is not None:
                # That of tensors has an index.
                return torch.empty(0, device=device).device
        for parameter in part.parameters(recurse=False):
            if parameter.device.type != "meta":
                return parameter.device
    return next(module.parameters()).device


def weights(module: nn.Module) -> Iterator[Tensor]:
    """Every parameter of a module once: of those that are offloaded, what is kept; of those that are spread over
    processes, the part that is here."""
    seen: set[int] = set()
    for part in module.modules():
        kept: Any = next((hook.weights_map for hook in hooks(part) if getattr(hook, "weights_map", None)), {})
        for name, parameter in part.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                weight = kept.get(name, parameter) if parameter.device.type == "meta" else parameter
                yield weight.to_local() if hasattr(weight, "to_local") else weight
