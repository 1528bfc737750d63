"""DeepSeek sparse attention's lightning indexer (DeepSeek-V3.2): the model's own, trained selection of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_hisparse import ops
from hf_hisparse.algorithms.base import SparseAlgorithm


class LightningIndexer(SparseAlgorithm):
    """Keeps the model's indexer keys and scores them as the model does: `sum_h w_h relu(scale q_h . k)`.

    The stock indexer builds `[batch, query, heads, keys]`; here queries and keys are taken a block at a time, and only
    the sum over heads is kept, so memory grows with the context alone.
    """

    block = 1 << 24
    """Elements of `[batch, query, heads, keys]` in flight."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def construct_representations(self, keys: Tensor, start: int, starts: Tensor) -> None:
        """Nothing: the representation is the model's indexer keys, which `extend` is given."""

    def update_representations(self, key: Tensor, position: Tensor) -> None:
        """Nothing, likewise."""

    def forget(self) -> None:
        """Nothing, likewise."""

    def extend(self, keys: Tensor, position: Tensor, tokens: int) -> None:
        """Adds the indexer keys `[batch, new, width]` of tokens at `position` `[batch, new]`, the last of `tokens`."""
        self.representations.reserve(tokens, {"keys": keys})
        rows = torch.arange(len(keys), device=keys.device).unsqueeze(1)
        self.representations["keys"][rows, position] = keys

    def retrieve_topk(self, query: Tensor, weights: Tensor, scale: float, mask: Tensor, k: int) -> Tensor:
        """Selects `k` tokens for every query.

        Args:
            query: `[batch, queries, heads, width]`.
            weights: `[batch, queries, heads]` float32, the weight of each head's score.
            scale: Multiplies `q . k`.
            mask: `[batch, queries, tokens]`, bool or additive: what each query may see. More tokens that none of them
                may see change no selection.
            k: How many.

        Returns:
            `[batch, queries, min(k, tokens)]` int32 token ids, ascending, padded with -1 at the end.
        """
        tokens = mask.shape[-1]
        keys = self.representations["keys"][:, :tokens].float()
        batch, queries, heads, _ = query.shape
        k = min(k, tokens)
        selection = torch.empty(batch, queries, k, dtype=torch.int32, device=query.device)
        key_block = max(1, min(tokens, self.block // (batch * heads)))
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
            selection[:, some] = ops.top_k(scores.flatten(0, 1), k).unflatten(0, scores.shape[:2])
        return selection
