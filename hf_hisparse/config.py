"""Every option of the cache, once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class HiSparseConfig:
    """Options of `HierarchicalSparseCache`.

    Args:
        top_k: Tokens that a decode step attends to, a KV head. Up to this length the context is attended to densely.
            None: 2048, or for a model with its own indexer the number that it was trained with.
        buffer_size: Tokens a KV head that the device buffer holds. It changes speed, never output. None: `2 * top_k`:
            adjacent steps share most of their selection, and a buffer of top-k alone misses three times as often.
        page_size: Tokens an item, the unit that is selected and moved. None: the algorithm's default.
        algorithm: `"quest"`, `"rabitq"`, or `"auto"`: the model's own indexer where it has one, otherwise RaBitQ.
        dense_layers: Indices of layers that stay dense, with their whole KV on the device.
        sink_tokens: First tokens of a sequence that are always attended to. None: 4.
        recent_tokens: Newest tokens that are always attended to. None: 64, or a quarter of a smaller `top_k`.
        backend: Name of the attention backend. None: the fastest one that the device has.
        max_cache_len: The longest history, prompt and new tokens together, that the cache will hold. Makes every shape
            of the decode step constant, which a CUDA graph needs; a step then scores as many tokens as there is room
            for. None: the history grows as it comes.
        cuda_graph: Where `max_cache_len` is given, on a CUDA device, decode steps are captured in a CUDA graph and
            replayed. False: never.
        offload: False keeps the whole history on the device: the resident oracle, for measurement.

    Raises:
        ValueError: On construction, if an option is out of range. The message names it.
    """

    top_k: int | None = None
    buffer_size: int | None = None
    page_size: int | None = None
    algorithm: str = "auto"
    dense_layers: Collection[int] = ()
    sink_tokens: int | None = None
    recent_tokens: int | None = None
    backend: str | None = None
    max_cache_len: int | None = None
    cuda_graph: bool = True
    offload: bool = True

    def __post_init__(self):
        for name in ("top_k", "buffer_size", "page_size", "max_cache_len"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"`{name}` must be a positive integer, not {value!r}")
        for name in ("sink_tokens", "recent_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 0):
                raise ValueError(f"`{name}` must be zero or a positive integer, not {value!r}")

    def resolve(self, page_size: int, top_k: int, kept: int) -> tuple[int, int]:
        """Items of top-k and slots of the buffer, for an algorithm's page size, top-k and always-kept items.

        Raises:
            ValueError: If `top_k` is below what is always kept, or `buffer_size` is below `top_k`.
        """
        if top_k < page_size:
            raise ValueError(f"`top_k={top_k}` is below `page_size={page_size}`; raise `top_k` or lower `page_size`")
        k = top_k // page_size
        if k < kept:
            raise ValueError(
                f"`top_k={top_k}` holds {k} items of `page_size={page_size}`, fewer than the {kept} that `sink_tokens` "
                "and `recent_tokens` always keep; raise `top_k` or lower one of these"
            )
        slots = (2 * top_k if self.buffer_size is None else self.buffer_size) // page_size
        if slots < k:
            raise ValueError(
                f"`buffer_size={self.buffer_size}` is below `top_k={top_k}`: every selected item must fit the buffer; "
                f"use `buffer_size={top_k}` or more"
            )
        return k, slots
