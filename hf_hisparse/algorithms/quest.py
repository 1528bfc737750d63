"""Quest (Tang et al., ICML 2024, arXiv 2406.10774): pages scored by a bound from their keys' bounding box."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_hisparse import ops
from hf_hisparse.algorithms.base import KeyScoring
from hf_hisparse.ops.reference import quest_bound


class Quest(KeyScoring):
    """Keeps the element-wise minimum and maximum of a page's keys. No key of the page scores more than the bound."""

    page_size = 32

    def represent(self, keys: Tensor, valid: Tensor) -> dict[str, Tensor]:
        valid = valid.unsqueeze(-1)
        low = keys.masked_fill(~valid, torch.inf).amin(2)
        high = keys.masked_fill(~valid, -torch.inf).amax(2)
        # A page of padding alone is never selected; finite values keep its score a number.
        empty = ~valid.any(2)
        return {"low": low.masked_fill(empty, 0), "high": high.masked_fill(empty, 0)}

    def update_representations(self, key: Tensor, position: Tensor) -> None:
        ops.encode_quest(key, position, *self._boxes, self.page_size)

    def bound(self, query: Tensor, items: int) -> Tensor:
        """The most that any key of a page can score, `[rows, group, items]` float32."""
        return quest_bound(query, self.representations["low"][:, :items], self.representations["high"][:, :items])

    def score(self, query: Tensor, items: int, *window: Any) -> Tensor:
        return ops.score_quest(query, *self._boxes, items, self.page_size, *window)

    def select(self, query: Tensor, items: int, *window: Any) -> Tensor:
        return ops.select_quest(query, *self._boxes, items, self.page_size, *window)

    @property
    def _boxes(self) -> tuple[Tensor, Tensor]:
        return self.representations["low"], self.representations["high"]
