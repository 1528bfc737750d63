"""RaBitQ: 1-bit keys (Gao and Long, SIGMOD 2024, arXiv 2405.12497; for sparse attention, arXiv 2606.31519)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_hisparse import ops
from hf_hisparse.algorithms.base import KeyScoring, Representations
from hf_hisparse.layout import select_rows
from hf_hisparse.ops.reference import grains, mean_of_grains, rabitq_bits


class RaBitQ(KeyScoring):
    """Keeps the signs of each centred and rotated key, and one scale.

    With c = key - centre and x = R c, it keeps sign(x) and a = |x|_2^2 / |x|_1. Then q . centre + (R q) . (a sign(x))
    is an unbiased estimate of q . key. The closer the centre, the smaller the error: a block of tokens is centred by
    the mean key of the block before it, which follows the slow turns of the rotary embedding and is known when a token
    arrives, so that bits never need recomputing. A sequence's first block is centred by its own mean.

    Keys are summed in fixed point. So a mean is that of its keys, however they came and whatever was forgotten since.

    The newest token is attended to in any case. It has no score, so that it can be encoded beside the selection.
    """

    beside = True
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
        """Sum `[rows, width]`, in grains, and number `[rows, 1]` of the keys of the newest block; and tokens `[rows]`
        that there were when the first block was centred. All int64."""

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

    def construct_representations(self, keys: Tensor, start: int, lengths: Tensor, held: Tensor) -> None:
        first = start // self.block
        blocks, valid = self.cut(keys, start, lengths, self.block)
        sums, counts = self._sums(blocks, valid), valid.sum(2).unsqueeze(-1)
        # Rows may differ in which block is their newest.
        row, newest = torch.arange(len(keys), device=keys.device), (lengths - 1).clamp(min=0) // self.block - first
        begun = torch.zeros_like(lengths) if self.filling is None else self.filling[2]
        # What is held stays, but in a first block of which some that it was centred by are forgotten, or that others
        # are added to. Once a decode step has added one it stays then too: were those others forgotten again, nobody
        # would know what it was centred by.
        last = (held - 1) // self.block
        grows = lengths.clamp(max=self.block) > held
        stays = (last > 0) | ((begun <= lengths) & ((held > begun) | ~grows))
        self._fill(sums[row, newest], counts[row, newest], torch.where(stays, begun, lengths))

        means = mean_of_grains(sums, counts)
        centres = {"centre": torch.cat((means[:, :1], means[:, :-1]), dim=1).to(keys.dtype)}
        block = first + torch.arange(blocks.shape[1], device=keys.device)
        self.centres.merge(centres, first, stays.unsqueeze(1) & (block <= last.unsqueeze(1)))
        centre = self.centres["centre"][:, first : first + blocks.shape[1]].float().unsqueeze(2)
        entries = self.encode((blocks.float() - centre).flatten(1, 2)[:, : keys.shape[1]])
        # A code whose centre is as it was stays: encoded again, beside others, it may differ by a rounding.
        token = start + torch.arange(keys.shape[1], device=keys.device)
        self.representations.merge(entries, start, stays.unsqueeze(1) & (token < held.unsqueeze(1)))

    def _sums(self, blocks: Tensor, valid: Tensor) -> Tensor:
        """The sums `[rows, n, width]`, in grains, of the valid keys of blocks `[rows, n, block, width]`."""
        # Grains are wider than keys, so only some are in flight.
        count = max(1, (1 << 24) // blocks[:, :1].numel())
        parts = zip(blocks.split(count, dim=1), valid.unsqueeze(-1).split(count, dim=1), strict=True)
        return torch.cat([grains(keys).masked_fill_(~which, 0).sum(2) for keys, which in parts], dim=1)

    def reserve(self, tokens: int) -> None:
        super().reserve(tokens)
        self.centres.reserve(-(-tokens // self.block))

    def state(self, tokens: int) -> dict[str, Tensor]:
        filling = {}
        if self.filling is not None:
            filling = dict(zip(("sum", "count", "begun"), self.filling, strict=True))
        return super().state(tokens) | self.centres.first(-(-tokens // self.block)) | filling

    def restore(self, state: dict[str, Tensor]) -> None:
        super().restore({name: state[name] for name in ("bits", "scale") if name in state})
        if "centre" in state:
            self.centres.write({"centre": state["centre"]}, 0)
            self._fill(state["sum"], state["count"], state["begun"])

    def _fill(self, *filling: Tensor) -> None:
        """Sets `filling`, where it lies once it does."""
        if self.filling is None:
            self.filling = tuple(tensor.clone() for tensor in filling)
        else:
            for held, new in zip(self.filling, filling, strict=True):
                held.copy_(new)

    def update_representations(self, key: Tensor, position: Tensor) -> None:
        ops.encode_rabitq(
            key,
            position,
            self.representations["bits"],
            self.representations["scale"],
            self.centres["centre"],
            *self.filling[:2],
            self.block,
        )

    @staticmethod
    def encode(centred: Tensor) -> dict[str, Tensor]:
        """Centred keys `[rows, n, width]` float32 as bits `[rows, n, width / 8]` uint8, scales `[rows, n]` float16."""
        bits, scale = rabitq_bits(centred)
        return {"bits": bits, "scale": scale}

    def score(self, query: Tensor, items: int, *window: Any) -> Tensor:
        return ops.score_rabitq(query, *self._codes, items, self.page_size, *window)

    def select(self, query: Tensor, items: int, scale: float, lengths: Tensor, *window: Any) -> Tensor:
        return ops.select_rabitq(query, *self._codes, items, self.page_size, scale, lengths, 1, *window)

    @property
    def _codes(self) -> tuple[Any, ...]:
        held = self.representations
        return held["bits"], held["scale"], self.centres["centre"], self.block
