"""How to attend to a selection: one kernel family a file, and their names."""

from collections.abc import Callable

from hf_hisparse.backends.auto import AutoBackend
from hf_hisparse.backends.base import AttentionBackend
from hf_hisparse.backends.reference import ReferenceBackend


def _triton() -> AttentionBackend:
    """The Triton backend. Triton is imported here, when it is chosen, and not before."""
    try:
        from hf_hisparse.backends.triton import TritonBackend
    except ImportError as error:
        raise ValueError(
            f'`backend="triton"` needs Triton ({error}): `pip install triton`, which comes with torch for CUDA on '
            'Linux, or use `backend="reference"`'
        ) from error
    return TritonBackend()


BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "auto": lambda: AutoBackend(_triton),
    "reference": ReferenceBackend,
    "triton": _triton,
}
"""What makes an attention backend, by the name that `backend=` takes. Raises ValueError where it cannot run."""

__all__ = ["BACKENDS", "AttentionBackend", "AutoBackend", "ReferenceBackend"]
