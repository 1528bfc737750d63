"""How to attend to a selection: one kernel family a file, and their names."""

from collections.abc import Callable
from importlib import import_module

from hf_hisparse.backends.auto import AutoBackend
from hf_hisparse.backends.base import AttentionBackend
from hf_hisparse.backends.reference import ReferenceBackend


def _imported(name: str, cls: str, needs: str, *packages: str) -> Callable[[], AttentionBackend]:
    """Makes the backend of the module of its name, which is imported, with what it needs, when it is chosen."""

    def make() -> AttentionBackend:
        try:
            for package in packages:
                import_module(package)
            return getattr(import_module(f"hf_hisparse.backends.{name}"), cls)()
        except (ImportError, OSError) as error:  # An extension that finds no driver is an OSError.
            raise ValueError(
                f'`backend="{name}"` needs {needs}, or use `backend="reference"`. What failed: {error}'
            ) from error

    return make


_triton = _imported(
    "triton", "TritonBackend", "Triton: `pip install triton`, which comes with torch for CUDA on Linux", "triton"
)

BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "auto": lambda: AutoBackend(_triton),
    "flash_attention": _imported(
        "flash_attention", "FlashAttentionBackend", "FlashAttention-4: `pip install --pre flash-attn-4`", "triton"
    ),
    "flash_mla": _imported(
        "flash_mla",
        "FlashMLABackend",
        "FlashMLA: `pip install sgl-flash-mla`, or `pip install kernels` to have it from the hub",
        "triton",
    ),
    "reference": ReferenceBackend,
    "triton": _triton,
}
"""What makes an attention backend, by the name that `backend=` takes. Raises ValueError where it cannot run."""

__all__ = ["BACKENDS", "AttentionBackend", "AutoBackend", "ReferenceBackend"]
