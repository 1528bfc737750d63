"""DeepSeek sparse attention's lightning indexer (DeepSeek-V3.2): the model's own, trained selection of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_hisparse import ops
from hf_hisparse.algorithms.base import SparseAlgorithm
from hf_hisparse.padding import take


class LightningIndexer(SparseAlgorithm):
    """Keeps the model's indexer keys and scores them as the model does: `sum_h w_h relu(scale q_h . k)`.

    The stock indexer builds `[batch, query, heads, keys]`; here only the sum over heads is kept, of a block of queries
    at a time, so memory grows with the context alone. Scores are float32, as in the stock indexer: of two tokens whose
    scores differ by no more than its rounding, the other one may be selected.
    """

    selects_prompts = True
    block = 1 << 26
    """Scores `[batch, queries, tokens]` in flight: 256 MiB."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def construct_representations(self, keys: Tensor, start: int, lengths: Tensor, held: Tensor) -> None:
        """Nothing: the representation is the model's indexer keys, which `extend` is given."""

    def update_representations(self, key: Tensor, position: Tensor) -> None:
        """Nothing, likewise."""

    def forget(self) -> None:
        """Nothing, likewise."""

    def select_tokens(self, index: Tensor) -> None:
        for keys in self.representations.tensors.values():
            keys[:, : index.shape[1]] = take(keys, index, 1)

    def extend(self, keys: Tensor, position: Tensor, tokens: int) -> None:
        """Adds the indexer keys `[batch, new, width]` of tokens at `position` `[batch, new]`, the last of `tokens`."""
        self.representations.reserve(tokens, {"keys": keys})
        rows = torch.arange(len(keys), device=keys.device).unsqueeze(1)
        self.representations["keys"][rows, position] = keys

    def retrieve_topk(
        self, query: Tensor, weights: Tensor, scale: float, positions: Tensor, tokens: int, k: int
    ) -> Tensor:
        """Selects `k` tokens for every query. A row's queries are consecutive tokens, and see what is before them.

        Args:
            query: `[batch, queries, heads, width]`, of the dtype of the keys or widened from it.
            weights: `[batch, queries, heads]` float32, the weight of each head's score.
            scale: Multiplies `q . k`.
            positions: `[batch]` int64, which token a row's first query is, and the last that it sees.
            tokens: At least `positions + queries` of the longest row. More of them change no selection.
            k: How many.

        Returns:
            `[batch, queries, min(k, tokens)]` int32 token ids, ascending, padded with -1 at the end.
        """
        keys = self.representations["keys"]
        batch, queries = query.shape[:2]
        selection = torch.empty(batch, queries, min(k, tokens), dtype=torch.int32, device=query.device)
        block = max(1, self.block // (batch * tokens))
        for low in range(0, queries, block):
            some = slice(low, low + block)
            # What only later queries see is not scored.
            seen = tokens - max(0, queries - low - block)
            first = positions + low if low else positions
            asked = query[:, some].to(keys.dtype)
            scores = ops.score_indexer(asked, weights[:, some], keys, seen, scale, first)
            selection[:, some] = ops.top_k(scores.flatten(0, 1), selection.shape[-1]).unflatten(0, scores.shape[:2])
        return selection
