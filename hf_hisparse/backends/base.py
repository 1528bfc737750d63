"""What a layer's decode step asks of an attention kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from hf_hisparse.layout import ItemLayout


class AttentionBackend(ABC):
    """Attention of one query a row over selected items, found in a buffer through a slot table.

    Items are visited in the order of the selection, never of the slots: the result depends on what was selected and not
    on where it happens to lie, which is what makes it bit-identical whatever the size of the buffer.
    """

    def check(self, layout: ItemLayout, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ValueError, with the reason, if items of a kind cannot be attended to. Before a history begins."""

    @abstractmethod
    def attend(
        self,
        query: Tensor,
        buffer: Tensor,
        slots: Tensor,
        selection: Tensor,
        lengths: Tensor,
        layout: ItemLayout,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attends to the selection.

        Args:
            query: `[rows, heads, width]`, the query heads of a row.
            buffer: `[rows, slots, elements]`. Rows may share one, with a stride of 0: the queries of a prompt do.
            slots: `[rows, k]` int32, where each selected item lies; -1 for none.
            selection: `[rows, k]` int32, which item that is; -1 for none.
            lengths: `[rows]` int64: the first `lengths` tokens of a row can be attended to.
            layout: How an item is laid out.
            scale: Multiplies `q . k`.
            softcap: Caps logits at `softcap * tanh(logit / softcap)`, if given.
            sinks: `[rows, heads]`, a logit a head that takes part in the softmax and has no value, if given.

        Returns:
            `[rows, heads, value_width]` in the query's dtype.
        """
