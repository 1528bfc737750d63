"""RaBitQ: 1-bit keys (Gao and Long, SIGMOD 2024, arXiv 2405.12497; for sparse attention, arXiv 2606.31519)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hf_hisparse import ops
from hf_hisparse.algorithms.base import KeyScoring, Representations
from hf_hisparse.layout import select_rows
from hf_hisparse.ops.reference import rabitq_bits


@lru_cache
def rotation(width: int, device: torch.device) -> Tensor:
    """A fixed random rotation `[width, width]`, the same on every device: after it no channel stands out."""
    generator = torch.Generator().manual_seed(0)
    q, r = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))
    return (q * r.diagonal().sign()).float().contiguous().to(device)


class RaBitQ(KeyScoring):
    """Keeps the signs of each centred and rotated key, and one scale.

    With c = key - centre and x = R c, it keeps sign(x) and a = |x|_2^2 / |x|_1. Then q . centre + (R q) . (a sign(x))
    is an unbiased estimate of q . key. The closer the centre, the smaller the error: a block of tokens is centred by
    the mean key of the block before it, which follows the slow turns of the rotary embedding and is known when a token
    arrives, so that bits never need recomputing. A sequence's first block is centred by its own mean.
    """

    page_size = 2
    granularity = 1
    block = 256
    """Tokens a block."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.forget()

    def forget(self) -> None:
        super().forget()
        self.centres = Representations()
        self.filling: Any = None
        """Sum `[rows, width]` float32 and number `[rows, 1]` int64 of the keys of the newest block."""

    def select_rows(self, index: Tensor) -> None:
        super().select_rows(index)
        self.centres.select_rows(index)
        if self.filling is not None:
            self.filling = tuple(select_rows(tensor, index) for tensor in self.filling)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.centres.nbytes

    @property
    def alignment(self) -> int:
        return self.block

    def construct_representations(self, keys: Tensor, start: int, starts: Tensor, lengths: Tensor) -> None:
        blocks, valid = self.cut(keys, start, starts, lengths, self.block)
        sums = blocks.masked_fill(~valid.unsqueeze(-1), 0).sum(2, dtype=torch.float32)
        counts = valid.sum(2).unsqueeze(-1)
        means = sums / counts.clamp(min=1)
        first = start // self.block
        if first:
            # The block before this one is whole, and its mean centred the block that is built anew.
            before, begun = self.centres["centre"][:, first : first + 1].float(), torch.ones_like(counts[:, :1])
        else:
            before, begun = means[:, :1], torch.zeros_like(counts[:, :1])
        before = torch.cat((before, means[:, :-1]), dim=1)
        begun = torch.cat((begun, counts[:, :-1]), dim=1)
        self.centres.write({"centre": torch.where(begun > 0, before, means).to(keys.dtype)}, first)
        # Rows may differ in which block is their newest.
        row, newest = torch.arange(len(keys), device=keys.device), ((lengths - 1).clamp(min=0) // self.block - first)
        self._fill(sums[row, newest], counts[row, newest])
        centre = self.centres["centre"][:, first : first + blocks.shape[1]].float().unsqueeze(2)
        entries = self.encode((blocks.float() - centre).flatten(1, 2)[:, : keys.shape[1]])
        self.representations.write(entries, start)

    def reserve(self, tokens: int) -> None:
        super().reserve(tokens)
        self.centres.reserve(-(-tokens // self.block))

    def state(self, tokens: int) -> dict[str, Tensor]:
        filling = {} if self.filling is None else {"sum": self.filling[0], "count": self.filling[1]}
        return super().state(tokens) | self.centres.first(-(-tokens // self.block)) | filling

    def restore(self, state: dict[str, Tensor]) -> None:
        super().restore({name: state[name] for name in ("bits", "scale") if name in state})
        if "centre" in state:
            self.centres.write({"centre": state["centre"]}, 0)
            self._fill(state["sum"], state["count"])

    def _fill(self, total: Tensor, count: Tensor) -> None:
        """Sets `filling`, where it lies once it does."""
        if self.filling is None:
            self.filling = total.clone(), count.clone()
        else:
            self.filling[0].copy_(total)
            self.filling[1].copy_(count)

    def update_representations(self, key: Tensor, position: Tensor) -> None:
        ops.encode_rabitq(
            key,
            position,
            rotation(key.shape[-1], key.device),
            self.representations["bits"],
            self.representations["scale"],
            self.centres["centre"],
            *self.filling,
            self.block,
        )

    @staticmethod
    def encode(centred: Tensor) -> dict[str, Tensor]:
        """Centred keys `[rows, n, width]` float32 as bits `[rows, n, width / 8]` uint8, scales `[rows, n]` float16."""
        bits, scale = rabitq_bits(centred, rotation(centred.shape[-1], centred.device))
        return {"bits": bits, "scale": scale}

    def score(self, query: Tensor, items: int, scale: float, starts: Tensor, lengths: Tensor) -> Tensor:
        return ops.score_rabitq(
            query,
            rotation(query.shape[-1], query.device),
            self.representations["bits"],
            self.representations["scale"],
            self.centres["centre"],
            self.block,
            items,
            self.page_size,
            scale,
            starts,
            lengths,
        )
