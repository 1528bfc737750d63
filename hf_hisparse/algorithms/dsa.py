"""DeepSeek sparse attention's lightning indexer (DeepSeek-V3.2): the model's own, trained selection of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_hisparse.algorithms.base import SparseAlgorithm


class LightningIndexer(SparseAlgorithm):
    """Keeps the model's indexer keys and scores them as the model does: `sum_h w_h relu(scale q_h . k)`.

    The stock indexer builds `[batch, query, heads, keys]`; here queries and keys are taken a block at a time, and only
    the sum over heads is kept, so memory grows with the context alone.
    """

    block = 1 << 24
    """Elements of `[batch, query, heads, keys]` in flight."""

    def __init__(self):
        super().__init__()
        self.tokens = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def construct_representations(self, keys: Tensor, start: int, starts: Tensor) -> None:
        """Nothing: the representation is the model's indexer keys, which `extend` is given."""

    def update_representations(self, key: Tensor, position: Tensor, tokens: int) -> None:
        """Nothing, likewise."""

    def forget(self) -> None:
        """Nothing, likewise."""

    def truncate(self, tokens: int) -> None:
        self.tokens = min(self.tokens, tokens)

    def select_batch(self, index: Tensor) -> None:
        self.representations.select_rows(index)

    def extend(self, keys: Tensor) -> None:
        """Adds the indexer keys `[batch, tokens, width]` of new tokens."""
        self.representations.write({"keys": keys}, self.tokens)
        self.tokens += keys.shape[1]

    def retrieve_topk(self, query: Tensor, weights: Tensor, scale: float, mask: Tensor, k: int) -> Tensor:
        """Selects `k` tokens for every query.

        Args:
            query: `[batch, queries, heads, width]`.
            weights: `[batch, queries, heads]` float32, the weight of each head's score.
            scale: Multiplies `q . k`.
            mask: `[batch, queries, tokens]`, bool or additive: what each query may see.
            k: How many.

        Returns:
            `[batch, queries, min(k, tokens)]` int32 token ids, ascending, padded with -1 at the end.
        """
        keys = self.representations["keys"][:, : self.tokens].float()
        batch, queries, heads, _ = query.shape
        k = min(k, self.tokens)
        selection = torch.empty(batch, queries, k, dtype=torch.int32, device=query.device)
        key_block = max(1, min(self.tokens, self.block // (batch * heads)))
        query_block = max(1, self.block // (batch * heads * key_block))
        for low in range(0, queries, query_block):
            some = slice(low, low + query_block)
            q, w, visible = query[:, some].float(), weights[:, some].unsqueeze(-2), mask[:, some]
            scores = torch.cat(
                [
                    (w @ (q @ part.transpose(1, 2).unsqueeze(1) * scale).relu()).squeeze(-2)
                    for part in keys.split(key_block, dim=1)
                ],
                dim=-1,
            )
            if visible.dtype == torch.bool:
                scores = scores.masked_fill(~visible, -torch.inf)
            else:
                scores = scores.masked_fill(visible <= torch.finfo(visible.dtype).min / 2, -torch.inf)
            best, ids = scores.topk(k, dim=-1)
            ids = ids.masked_fill(best == -torch.inf, self.tokens).sort(dim=-1).values
            selection[:, some] = ids.masked_fill(ids == self.tokens, -1)
        return selection
