"""How a mixture of experts is multiplied in a decode step: every token by its experts at once.

One expert after the other, or in groups where PyTorch has no kernel for that, the host reads which are chosen. On a GPU
`generate` itself multiplies at once when it decodes. What a module of experts is run by, its config says, which the
whole model shares, and every thread that runs it: for the thread that takes a step the module has a view of it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from hf_hisparse.graph import AT_ONCE, WAITING
from hf_hisparse.models.config_view import ConfigView


_changing = threading.Lock()
"""Held while a thread begins or ends a step."""


class _ExpertsView(ConfigView):
    """A config that says `AT_ONCE` to threads that take a step, and is the module's own in everything else."""

    def __init__(self, config: Any, threads: set[int]):
        super().__init__(config)
        self._threads = threads

    @property
    def _experts_implementation(self) -> str | None:
        own = self._config._experts_implementation
        # What is traced is a compiled layer, whichever thread does it.
        if own in WAITING and (torch.compiler.is_compiling() or threading.get_ident() in self._threads):
            return AT_ONCE
        return own


class Experts:
    """The modules of a decoder whose experts can be multiplied in several ways.

    Args:
        decoder: The text decoder of a transformers model.
    """

    def __init__(self, decoder: nn.Module):
        self._modules: list[Any] = [module for module in decoder.modules() if hasattr(module, "_apply_gate")]
        self._configs: list[Any] = []
        """Of each module, while they have views."""
        self._threads: set[int] = set()
        """Those that take a step."""

    def begin(self) -> None:
        """From here on this thread has every token multiplied by its experts at once."""
        with _changing:
            self._threads.add(threading.get_ident())
            self._configs = self._configs or [module.config for module in self._modules]
            for module, config in zip(self._modules, self._configs, strict=True):
                if module.config is config:
                    module.config = _ExpertsView(config, self._threads)

    def end(self) -> None:
        """Undoes `begin`, if there is anything to undo."""
        if self._threads and threading.get_ident() in self._threads:
            with _changing:
                self._threads.discard(threading.get_ident())
                self._restore()

    def remove(self) -> None:
        """Undoes it for all threads."""
        with _changing:
            self._threads.clear()
            self._restore()

    def _restore(self) -> None:
        if not self._threads:
            for module, config in zip(self._modules, self._configs, strict=False):
                module.config = config
            self._configs = []
