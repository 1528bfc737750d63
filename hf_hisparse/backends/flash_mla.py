"""Attention over latent rows in FlashMLA's sparse kernels, on Hopper.

Of its two sparse kernels it is the one for prompts, whose queries each have a selection of their own: the one for
decoding takes FP8 latents alone. A row here is a query there.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from hf_hisparse.backends.library import HOPPER, TILE, LibraryBackend, device_of
from hf_hisparse.layout import ItemLayout


LATENT, ROTARY, HEADS = 512, 64, (64, 128)
HUB = "kernels-community/flash-mla"
HUB_VERSION = 1


def library() -> Callable[..., Any]:
    """FlashMLA's function for sparse prompts: of the package `flash_mla`, or from the hub through `kernels`.

    Raises:
        ImportError: If there is neither, or it is a build without that function.
    """
    if find_spec("flash_mla") is not None:
        from flash_mla import flash_mla_sparse_fwd as function
    else:
        from kernels import get_kernel

        function = getattr(get_kernel(HUB, version=HUB_VERSION), "flash_mla_sparse_fwd", None)
        if function is None:
            raise ImportError(f"{HUB} of version {HUB_VERSION} has no flash_mla_sparse_fwd")
    # Where one build has two generations of kernels, the older ones know Hopper and rotary keys beside the latent.
    old = "use_legacy" in inspect.signature(function).parameters
    return partial(function, use_legacy=True) if old else function


class FlashMLABackend(LibraryBackend):
    """Attends to latent rows of 512 elements and a rotary key of 64, in bfloat16, for 64 or 128 heads.

    Raises:
        ImportError: On construction, if FlashMLA is not installed.
        ValueError: On construction, if its kernels do not run on the current CUDA device.
    """

    name = "flash_mla"
    dtypes = (torch.bfloat16,)

    def __init__(self) -> None:
        self._function = library()
        device = device_of(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else None
        runs = device is not None and device.capability == HOPPER
        # Elsewhere `check` says so before anything is attended to.
        self._unit = self._probe() if runs else 1.0

    def _probe(self) -> float:
        """What a sum of exponents is the logarithm of, in nats: builds differ. Runs the kernel."""
        query = torch.zeros(1, HEADS[0], LATENT + ROTARY, dtype=torch.bfloat16, device="cuda")
        latents = query[0, :2].unsqueeze(1).contiguous()
        indices = torch.full((1, 1, TILE), -1, dtype=torch.int32, device="cuda")
        indices[..., :2] = torch.arange(2)
        try:
            weight = float(self._function(query, latents, indices, 1.0)[2][0, 0])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise self.error(f"its kernels do not run here ({type(error).__name__}: {error})") from error
        # Of two tokens whose logits are 0: in nats, or in bits.
        return 1.0 if weight < 0.9 else math.log(2)

    def refusal(self, layout: ItemLayout) -> str | None:
        if layout == ItemLayout.token(LATENT, ROTARY):
            return None
        return (
            f"it is for latent rows of {LATENT} elements and a rotary key of {ROTARY}, and the model's have keys of "
            f"{layout.key[1]} elements and values of {layout.value[1]}, in items of {layout.page_size} tokens"
        )

    def refusal_of_heads(self, heads: int, softcap: float | None) -> str | None:
        if heads not in HEADS:
            return f"it takes {' or '.join(map(str, HEADS))} heads, and the model has {heads}"
        return None if softcap is None else f"it cannot cap logits, and the model caps them at {softcap:g}"

    def programs(self, heads: int) -> int:
        return heads // HEADS[0]

    def run(
        self,
        query: Tensor,
        buffer: Tensor,
        tokens: Tensor,
        counts: Tensor,
        layout: ItemLayout,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        output, _, weights = self._function(query, buffer.unsqueeze(1), tokens.unsqueeze(1), scale)[:3]
        return output, weights if self._unit == 1.0 else weights * self._unit
