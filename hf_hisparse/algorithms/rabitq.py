"""RaBitQ: 1-bit keys (Gao and Long, SIGMOD 2024, arXiv 2405.12497; for sparse attention, arXiv 2606.31519)."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from hf_hisparse.algorithms.base import KeyScoring, softmax_mass


@lru_cache
def rotation(width: int, device: torch.device) -> Tensor:
    """A fixed random rotation `[width, width]`, the same on every device: after it no channel stands out."""
    generator = torch.Generator().manual_seed(0)
    q, r = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))
    return (q * r.diagonal().sign()).float().to(device)


class RaBitQ(KeyScoring):
    """Keeps the signs of each centred and rotated key, and one scale.

    With c = key - centre and x = R c, it keeps sign(x) and a = |x|_2^2 / |x|_1. Then (R q) . (a sign(x)) is an unbiased
    estimate of q . c, and q . centre is the same for every token, so that softmax does not see it. The centre is the
    mean of the first keys of the sequence, so that bits never need recomputing and do not depend on how the prompt was cut.
    """

    page_size = 4
    granularity = 1
    block = 16384
    """Tokens whose bits are unpacked at a time."""

    centre_tokens = 1024
    """Tokens whose keys are averaged."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.centre: Tensor | None = None

    def forget(self) -> None:
        super().forget()
        self.centre = None

    def construct_representations(self, keys: Tensor, start: int, starts: Tensor) -> None:
        if self.centre is None:
            position = start + torch.arange(keys.shape[1], device=keys.device)
            first = starts.unsqueeze(1)
            valid = ((position >= first) & (position < first + self.centre_tokens)).unsqueeze(-1)
            self.centre = (keys.float() * valid).sum(1, keepdim=True) / valid.sum(1, keepdim=True).clamp(min=1)
        super().construct_representations(keys, start, starts)

    def represent(self, keys: Tensor, valid: Tensor) -> dict[str, Tensor]:
        x = (keys.squeeze(2).float() - self.centre) @ rotation(keys.shape[-1], keys.device)
        scale = x.square().sum(-1) / x.abs().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
        bits = (x >= 0).unflatten(-1, (-1, 8)).to(torch.uint8) << torch.arange(8, dtype=torch.uint8, device=x.device)
        return {"bits": bits.sum(-1, dtype=torch.uint8), "scale": scale.to(torch.float16)}

    def score(self, query: Tensor, items: int, scale: float, valid: Tensor) -> Tensor:
        tokens = min(items * self.page_size, self.representations["bits"].shape[1])
        query = (query.float() * scale) @ rotation(query.shape[-1], query.device)
        logits = query.new_full((*query.shape[:2], items * self.page_size), -torch.inf)
        shifts = torch.arange(8, dtype=torch.uint8, device=query.device)
        for low in range(0, tokens, self.block):
            high = min(low + self.block, tokens)
            bits = self.representations["bits"][:, low:high].unsqueeze(-1) >> shifts & 1
            signs = bits.flatten(-2).float() * 2 - 1
            scales = self.representations["scale"][:, low:high].float().unsqueeze(1)
            logits[:, :, low:high] = query @ signs.transpose(1, 2) * scales
        return softmax_mass(logits, valid).unflatten(1, (items, self.page_size)).sum(2)
