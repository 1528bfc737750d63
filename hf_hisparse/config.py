"""Every option of the cache, once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


MAX_ITEMS = 4096
"""Items that a step can select, a KV head."""
MAX_SLOTS = 1 << 15
"""Items that the device buffer can hold, a KV head."""


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class HiSparseConfig:
    """Options of `HierarchicalSparseCache`.

    Args:
        top_k: Tokens that a decode step attends to, a KV head. Up to this length the context is attended to densely.
            None: 2048, or for a model with its own indexer the number that it was trained with.
        buffer_size: Tokens a KV head that the device buffer holds. It changes speed, never output. None: `2 * top_k`:
            adjacent steps share most of their selection, and a buffer of top-k alone misses three times as often.
        page_size: Tokens an item, the unit that is selected and moved. None: the algorithm's default.
        algorithm: `"quest"`, `"rabitq"`, or `"auto"`: the model's own indexer where it has one, otherwise RaBitQ. Or a
            subclass of `KeyScoring`, a method of your own.
        dense_layers: Indices of layers that stay dense, with their whole KV on the device.
        sink_tokens: First tokens of a sequence that are always attended to. None: 4.
        recent_tokens: Newest tokens that are always attended to. None: 64, or a quarter of a smaller `top_k`.
        max_draft_tokens: The most new tokens over a history that take decode steps, one after the other, each with a
            selection of its own, as a draft does that is verified. More of them, such as a turn of a conversation or a
            chunk of a prompt, are attended to densely and exactly, and so are those up to the last that is padding in
            one of a batch. The drafts of `generate` (`assistant_model`,
            `prompt_lookup_num_tokens`) take decode steps however many they are.
        max_cache_len: The longest history, prompt and new tokens together, that will be held, with drafts that are yet
            to be rejected (prompt lookup drafts beyond the last token that is asked for). Its memory is then had
            when the first tokens come, so that running out is found before anything is generated; a CUDA graph is
            captured once; and what would pass it is refused. None: the history grows as it comes.
        cuda_graph: Whether on a CUDA device decode steps are captured in a CUDA graph and replayed. A history that
            outgrows its memory is captured anew.
        compile: Whether that graph is of decoder layers compiled by `torch.compile`: one compilation for all that are
            alike, when the first step is about to be captured. It fuses the many small operations of a layer, which may
            change their results by a rounding. Prompts, and steps that are not captured, are never compiled.
        backend: The attention kernels: `"triton"`, `"reference"` (PyTorch, on any device), or `"auto"`: Triton's on a
            CUDA device where they run, otherwise PyTorch. On Hopper also those of a library that is
            installed: `"flash_attention"` (FlashAttention-4) for keys and values of heads, and `"flash_mla"` (FlashMLA)
            for latent rows; what they cannot attend to is refused at a history's first tokens.
        offload: False keeps the whole history on the device: the resident oracle, for measurement.

    Raises:
        ValueError: On construction, if an option is out of range. The message names it.
    """

    top_k: int | None = None
    buffer_size: int | None = None
    page_size: int | None = None
    algorithm: str | type = "auto"
    dense_layers: Iterable[int] = ()
    sink_tokens: int | None = None
    recent_tokens: int | None = None
    max_draft_tokens: int = 8
    max_cache_len: int | None = None
    cuda_graph: bool = True
    compile: bool = False
    backend: str = "auto"
    offload: bool = True

    def __post_init__(self):
        for name in ("top_k", "buffer_size", "page_size", "max_draft_tokens", "max_cache_len"):
            value = getattr(self, name)
            if (value is not None or name == "max_draft_tokens") and not (_is_integer(value) and value >= 1):
                raise ValueError(f"`{name}` must be a positive integer, not {value!r}")
        for name in ("sink_tokens", "recent_tokens"):
            value = getattr(self, name)
            if value is not None and not (_is_integer(value) and value >= 0):
                raise ValueError(f"`{name}` must be zero or a positive integer, not {value!r}")
        for name in ("cuda_graph", "compile", "offload"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"`{name}` must be True or False, not {value!r}")
        layers = tuple(self.dense_layers) if isinstance(self.dense_layers, Iterable) else (None,)
        if not all(map(_is_integer, layers)):
            raise ValueError(f"`dense_layers` must be indices of layers, such as (0, 1), not {self.dense_layers!r}")
        object.__setattr__(self, "dense_layers", frozenset(layers))
        if self.compile and (self.max_cache_len is None or not self.cuda_graph):
            raise ValueError(
                "`compile=True` is for decode steps that are captured in a CUDA graph; give `max_cache_len` and leave "
                "`cuda_graph` on"
            )

    def resolve(self, page_size: int, top_k: int, kept: int) -> tuple[int, int]:
        """Items of top-k and slots of the buffer, for an algorithm's page size, top-k and always-kept items.

        Raises:
            ValueError: If `top_k` is below what is always kept, `buffer_size` is below `top_k`, or either is more items
                than there is room for.
        """
        if top_k < page_size:
            raise ValueError(f"`top_k={top_k}` is below `page_size={page_size}`; raise `top_k` or lower `page_size`")
        k = top_k // page_size
        if k < kept:
            raise ValueError(
                f"`top_k={top_k}` holds {k} items of `page_size={page_size}`, fewer than the {kept} that `sink_tokens` "
                "and `recent_tokens` always keep; raise `top_k` or lower one of these"
            )
        if k > MAX_ITEMS:
            raise ValueError(
                f"`top_k={top_k}` is {k} items of `page_size={page_size}`, and a step selects at most {MAX_ITEMS}; "
                "raise `page_size` or lower `top_k`"
            )
        slots = (2 * top_k if self.buffer_size is None else self.buffer_size) // page_size
        if slots < k:
            raise ValueError(
                f"`buffer_size={self.buffer_size}` is below `top_k={top_k}`: every selected item must fit the buffer; "
                f"use `buffer_size={top_k}` or more"
            )
        if slots > MAX_SLOTS:
            raise ValueError(
                f"`buffer_size={self.buffer_size}` is {slots} items of `page_size={page_size}`, and the device buffer "
                f"holds at most {MAX_SLOTS}; raise `page_size` or lower `buffer_size`"
            )
        return k, slots
