"""Attention over the slot table in FlashAttention-4's kernels (the package `flash-attn-4`), on Hopper."""

from __future__ import annotations

import torch
from flash_attn.cute import flash_attn_varlen_func
from torch import Tensor

from hf_hisparse.backends.library import LibraryBackend
from hf_hisparse.layout import ItemLayout


WIDTHS = (16, 32, 48, 64, 128)
"""Elements of a key, and of a value, in a tile of 128 tokens. With others its tiles are of 144, 112 or 80 tokens, while
it reads pages 128 at a time: with 96 elements its results were wrong (4.0.0b36, on an H200)."""


class FlashAttentionBackend(LibraryBackend):
    """Attends to pages of KV heads in float16 or bfloat16. Latent rows are too wide for it.

    Kernels are compiled when they are first used, which takes seconds: for a dtype, a size of head and a softcap.
    """

    name = "flash_attention"
    dtypes = (torch.bfloat16, torch.float16)

    def refusal(self, layout: ItemLayout) -> str | None:
        key, value = layout.key[1], layout.value[1]
        if key == value and key in WIDTHS:
            return None
        sizes = " or ".join(map(str, WIDTHS))
        return f"it is right for keys and values of one size, {sizes}, and the model's have {key} and {value} elements"

    def refusal_of_heads(self, heads: int, softcap: float | None) -> str | None:
        return None

    def programs(self, heads: int) -> int:
        return 1

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
        (key_offset, key), (value_offset, value) = layout.key, layout.value
        # The keys of a page lie `key` elements apart and so do its values, as many after them as the page has tokens.
        step = layout.elements // self.slot_stride(layout)
        pages = (buffer.numel() - value_offset - value) // step + 1
        begin = buffer.storage_offset()
        keys = buffer.as_strided((pages, 1, 1, key), (step, step, step, 1), begin + key_offset)
        values = buffer.as_strided((pages, 1, 1, value), (step, step, step, 1), begin + value_offset)
        output, weights = flash_attn_varlen_func(
            query.unsqueeze(1),
            keys,
            values,
            page_table=tokens,
            seqused_k=counts,
            softmax_scale=scale,
            softcap=softcap or 0.0,
            return_lse=True,
        )
        return output.squeeze(1), weights.squeeze(-1)
