"""Needles at every depth of a text: one, or several that are all asked for."""

from __future__ import annotations

import random

from eval.ruler import Needles, Sources
from eval.tasks import Reader


class NeedleGrid(Needles):
    """Needles in essays, or in generated prose where there are none, of which the first is at one depth.

    Args:
        count: How many there are. The others are spread evenly over what comes after the first.
        depth: Of the first, 0 to 1.
    """

    new_tokens = 64

    def __init__(self, count: int, depth: float, length: int, reader: Reader, sources: Sources, seed: int = 0):
        super().__init__(f"needles_{count}", length, reader, sources, seed, num_queries=count)
        self.depth = depth

    def depths(self, rng: random.Random, count: int) -> list[float]:
        assert self.depth is not None
        return [self.depth + place * (1 - self.depth) / count for place in range(count)]
