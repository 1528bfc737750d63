"""A module's config as some threads see it: modules read what they run from a config that a whole model shares."""

from __future__ import annotations

from typing import Any


def _itself(config: Any) -> Any:
    return config


class ConfigView:
    """A config, but for what a subclass says of it. A copy of it is one of the config.

    Args:
        config: The module's own.
    """

    def __init__(self, config: Any):
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)

    def __reduce__(self) -> tuple[Any, ...]:
        # Who copies a module while a thread is within it, or after an interrupt, wants the module as it was.
        return _itself, (self._config,)
