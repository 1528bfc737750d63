"""Attention over the slot table in plain PyTorch, in float32, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_hisparse.backends.base import AttentionBackend
from hf_hisparse.layout import ItemLayout


class ReferenceBackend(AttentionBackend):
    """Gathers the selected items and attends to them densely. Supports everything that the interface names."""

    block = 1 << 24
    """Elements of items that are gathered at a time."""

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
        output = query.new_empty(*query.shape[:2], layout.value[1])
        block = max(1, self.block // max(1, selection.shape[1] * layout.elements))
        for low in range(0, len(query), block):
            some = slice(low, low + block)
            output[some] = self._attend(
                query[some],
                buffer[some],
                slots[some],
                selection[some],
                lengths[some],
                layout,
                scale,
                softcap,
                None if sinks is None else sinks[some],
            )
        return output

    @staticmethod
    def _attend(
        query: Tensor,
        buffer: Tensor,
        slots: Tensor,
        selection: Tensor,
        lengths: Tensor,
        layout: ItemLayout,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        rows = torch.arange(len(query), device=query.device).unsqueeze(1)
        items = buffer[rows, slots.clamp(min=0).long()]
        keys = layout.keys(items).flatten(1, 2).float()
        values = layout.values(items).flatten(1, 2).float()

        within = torch.arange(layout.page_size, device=query.device)
        position = selection.long().unsqueeze(-1) * layout.page_size + within
        valid = ((position < lengths.view(-1, 1, 1)) & (selection >= 0).unsqueeze(-1)).flatten(1)

        logits = query.float() @ keys.transpose(1, 2) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~valid.unsqueeze(1), -torch.inf)
        if sinks is not None:
            logits = torch.cat((logits, sinks.float().unsqueeze(-1)), dim=-1)
        # A row with nothing to attend to (padding) gives zeros, not NaN.
        weights = logits.softmax(dim=-1).nan_to_num(0.0)[..., : keys.shape[1]]
        # What a slot holds beyond the valid tokens is another item's; 0 * inf would be NaN.
        values = values.masked_fill(~valid.unsqueeze(-1), 0)
        return (weights @ values).to(query.dtype)
