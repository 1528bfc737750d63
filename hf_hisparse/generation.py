"""What `enable` puts in front of a model's `generate`: a fresh cache for every call that is given none."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import GenerationConfig

from hf_hisparse.cache import HierarchicalSparseCache
from hf_hisparse.models import cache_argument


_enabling = threading.Lock()
"""Held while what is in front of a model's `generate` changes: two threads may enable one model."""

_CONTINUOUS = "init_continuous_batching"
"""The method of a model that every way to batch continuously goes through."""


def _refuse_continuous_batching(*args: Any, **kwargs: Any) -> Any:
    raise ValueError(
        "continuous batching (`generate_batch`) keeps its history in a paged cache of its own, on the device, and "
        "takes no other; call `generate`, or `hf_hisparse.disable(model)` before it"
    )


class EnabledGenerate:
    """A model's `generate`, where every call that is given no cache and asks for no other gets a fresh one of ours.

    A copy of the model has one of its own, and is enabled until that is disabled.

    Args:
        model: The model, whose `generate` this is put in front of.
    """

    def __init__(self, model: Any):
        self.model = model
        self.enabled: list[dict[str, Any]] = []
        """The options of every `enable` that is not undone yet. The latest count."""
        self._held = vars(model).get("generate")
        self._generate = model.generate
        functools.update_wrapper(self, model.generate, assigned=("__doc__",), updated=())
        vars(model).update({"generate": self, _CONTINUOUS: _refuse_continuous_batching})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        config = next((value for value in (*args, *kwargs.values()) if isinstance(value, GenerationConfig)), None)
        said = {} if config is None else vars(config)
        told = said | {name: value for name, value in kwargs.items() if value is not None}
        if self.enabled and not {"past_key_values", "cache"} & told.keys() and not _other_cache(told):
            cache = HierarchicalSparseCache(self.model, **self.enabled[-1])
            if said.get("is_assistant"):
                # Its tokens are drafts, as `generate` tells a cache that it makes itself.
                cache.activate_past_recording()
            kwargs[cache_argument(self.model)] = cache
        return self._generate(*args, **kwargs)

    def undo(self, options: dict[str, Any]) -> None:
        """Undoes the `enable` of these very options, if nothing has, and with the last of them all that this is."""
        self.enabled = [other for other in self.enabled if other is not options]
        if not self.enabled:
            self.remove()

    def remove(self) -> None:
        """Leaves the model as it was."""
        self.enabled = []
        if vars(self.model).get("generate") is self:
            del vars(self.model)["generate"]
            vars(self.model).pop(_CONTINUOUS, None)
            if self._held is not None:
                vars(self.model)["generate"] = self._held


def _other_cache(said: dict[str, Any]) -> str:
    """By which of them arguments of `generate` ask for a cache of another kind, or for none; empty if they do not."""
    # That is what some models' files say, and no version of transformers asks for anything by it any more.
    if said.get("cache_implementation") not in (None, "hybrid"):
        return f"cache_implementation={said['cache_implementation']!r}"
    return "use_cache=False" if said.get("use_cache") is False else ""


def enable(model: nn.Module, **options: Any) -> contextlib.AbstractContextManager[None]:
    """From here on, every `model.generate()` that is given no cache gets a fresh `HierarchicalSparseCache`.

    So pipelines, notebooks and evaluation harnesses need no change. A call that asks for none, or for one of another
    kind, by `use_cache=False` or a `cache_implementation`, is left alone. Continuous batching, which has a cache of its
    own, is refused for as long. Also a context manager, that undoes it at its end:

    ```python
    with hf_hisparse.enable(model, top_k=1024):
        pipeline("text-generation", model=model, tokenizer=tokenizer)(prompt)
    ```

    Args:
        model: A decoder-only transformers model.
        options: As for `HierarchicalSparseCache`.

    Raises:
        ValueError: If an option is out of range or does not fit the model, or its own `generation_config` asks for
            another cache.
    """
    defaults = vars(getattr(model, "generation_config", None) or GenerationConfig())
    if other := _other_cache(defaults):
        raise ValueError(
            f"`model.generation_config` asks for another cache, or for none, by `{other}`; set it to None there"
        )
    HierarchicalSparseCache(model, **options)
    with _enabling:
        ours = vars(model).get("generate")
        if not isinstance(ours, EnabledGenerate):
            ours = EnabledGenerate(model)
        ours.enabled.append(options)
    return _until_exit(ours, options)


@contextlib.contextmanager
def _until_exit(ours: EnabledGenerate, options: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    finally:
        with _enabling:
            ours.undo(options)


def disable(model: nn.Module) -> None:
    """Undoes every `enable`. The model stays patched; `unpatch_model` undoes that too."""
    with _enabling:
        ours = vars(model).get("generate")
        if isinstance(ours, EnabledGenerate):
            ours.remove()
