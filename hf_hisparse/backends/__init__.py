"""How to attend to a selection: one kernel family a file, and their names."""

from hf_hisparse.backends.base import AttentionBackend
from hf_hisparse.backends.reference import ReferenceBackend


BACKENDS: dict[str, type[AttentionBackend]] = {"reference": ReferenceBackend}
"""The attention backends, by the name that `backend=` takes."""

__all__ = ["BACKENDS", "AttentionBackend", "ReferenceBackend"]
