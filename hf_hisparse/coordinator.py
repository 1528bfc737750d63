"""One layer's history and its decode step: append, retrieve, swap in, attend."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_hisparse.algorithms import SparseAlgorithm
from hf_hisparse.backends import AttentionBackend
from hf_hisparse.branch import Branch
from hf_hisparse.late_check import LateCheck
from hf_hisparse.layout import ItemLayout, distinct
from hf_hisparse.memory import HierarchicalMemory, Memory, ResidentMemory
from hf_hisparse.padding import Padding, seen_by_newest, take
from hf_hisparse.storage import Pieces


class SparseCoordinator:
    """The history of one layer, and how a new token attends to it.

    Up to `top_k` tokens the history is dense, on the device, padding and all. Beyond, it lies in a `Memory`, without
    its padding, an algorithm keeps a representation of it on the device, and a decode step attends to the `k` items
    that the algorithm selects.

    Tokens arrive as parts, `[batch, heads, tokens, width]` each: the key and value states, or for latent attention the
    latent and the rotary key. A row is a (batch element, head) pair.

    Args:
        top_k: Tokens up to which the history is dense.
        k: Items that a decode step attends to.
        slots: Items a row that the device buffer holds; None keeps the whole history on the device.
        layout: Makes the item layout from the widths of the parts.
        algorithm: Makes the layer's selection method.
        backend: How to attend.
        capacity: Tokens that there is room for as soon as the history goes to a memory. None: room for the present
            length, which grows.
        max_draft_tokens: The most new tokens over a history that take decode steps, one after the other.
    """

    drafts = 0
    """How many of the last new tokens of the forward under way are drafts: at least these take decode steps."""
    prompt = 0
    """So many of the first new tokens of the forward under way take no steps: the last is padding in a sequence."""

    layers = 1
    """How many layers grow alike, this one and those whose turn comes after it."""
    serial = -1
    """Changes whenever a decode step finds its tensors elsewhere; no two coordinators have the same one."""
    _serials: ClassVar[count] = count()

    def __init__(
        self,
        top_k: int,
        k: int,
        slots: int | None,
        layout: Callable[..., ItemLayout],
        algorithm: Callable[[], SparseAlgorithm],
        backend: AttentionBackend,
        capacity: int | None = None,
        max_draft_tokens: int = 1,
    ):
        self.max_draft_tokens = max_draft_tokens
        self.top_k, self.k, self.slots, self.backend = top_k, k, slots, backend
        self.capacity = capacity or 0
        self._make_layout, self._make_algorithm = layout, algorithm
        self.attending = False
        """Whether the layer's attention module is running and will hand its new tokens to this coordinator."""
        self.ahead: Tensor | None = None
        """What the module that is running has selected for a token that is yet to be appended."""
        self.selected: list[Tensor] | None = None
        """While a trace is recorded, what the forward under way has selected."""

        self.memory: Memory | None = None
        self._reserved: Memory | None = None
        """An empty memory: for a history that is still dense but may become `capacity` tokens long, or the next one."""
        self.length = self.batch = self.heads = 0
        self.room = 0
        """Tokens up to which no tensor of a decode step moves or changes its shape."""
        self.padding = Padding.none(0, torch.device("cpu"))
        """Of a history in the memory; of one that is dense, what was lost as it came from there."""
        self.recent: tuple[Tensor, ...] | None = None
        self.algorithm: Any = algorithm()
        self._counts: Any = None
        """`[2, rows]` int64: each row's tokens, and one more: the position of the token that comes next, and the tokens
        that there are with it. So a step need not count before it begins, and does so beside the swap-in."""
        self._branch = Branch()

    def reset(self) -> None:
        """Forgets the history. Its memory is kept for the next one."""
        self.length = self.batch = self.heads = self.room = 0
        self.padding = Padding.none(0, torch.device("cpu"))
        self.recent = None
        self.memory, self._reserved = None, self.memory or self._reserved
        if self._reserved is not None:
            self._reserved.clear()
        self.algorithm = self._make_algorithm()

    def release(self) -> None:
        """Gives back the memory that is kept for a history to come."""
        self._reserved = None

    def lose(self) -> None:
        """Drops the history with its memory, neither of which is to be relied on."""
        self.memory = self._reserved = None

    def fork(self) -> SparseCoordinator:
        """A coordinator with the same history, which shares what lies in host memory until one of both changes it.

        Raises:
            MemoryError: If the memory for what cannot be shared, the end of the history and what there is to be room
                for, cannot be had.
        """
        new = copy.copy(self)
        new.leave()
        new.selected = new._counts = None
        new.algorithm = copy.deepcopy(self.algorithm)
        new._reserved = None
        if self._reserved is not None and self.capacity:
            new._reserved = self._reserved.fork(0, self.capacity, self.layers)
        if self.memory is not None:
            new.memory = self.memory.fork(self.length, self.capacity, self.layers)
            new._counts = self._counts.clone()
            new._make_room(self.length)
        return new

    def state(self) -> tuple[dict[str, Pieces], dict[str, Any]]:
        """The history as tensors and as plain values: all that `load` needs. Waits for the device as it is read."""
        tensors: dict[str, Pieces] = {}
        facts: dict[str, Any] = {"length": self.length, "batch": self.batch, "heads": self.heads}
        kept = {f"representation.{name}": value for name, value in self.algorithm.state(self.length).items()}
        kept["kept"] = self.padding.kept
        if self.recent is not None:
            kept |= {f"recent.{i}": part for i, part in enumerate(self.recent)}
        if self.memory is not None:
            layout = self.memory.layout
            facts["widths"] = list(layout.widths)
            kept["lengths"] = self.lengths
            shape = (self.memory.rows, layout.items(self.length), layout.elements)
            tensors["items"] = Pieces(self.memory.dtype, shape, self.memory.dump(self.length))
        return tensors | {name: Pieces.of(value) for name, value in kept.items()}, facts

    def load(self, tensors: dict[str, Tensor], facts: dict[str, Any], device: torch.device) -> None:
        """Takes what `state` gave as the history of a coordinator that has none.

        Args:
            tensors: On the CPU. The items may stay where they are, and must not be written.
            facts: The plain values.
            device: Where attention runs.

        Raises:
            MemoryError: If the host memory cannot be had.
        """
        moved = {name: value.to(device, copy=True) for name, value in tensors.items() if name != "items"}
        self.padding = Padding(moved["kept"])
        if "items" in tensors:
            shape = (facts["batch"], facts["heads"], facts["length"])
            like = torch.empty((), dtype=tensors["items"].dtype, device=device)
            memory = self._empty_memory(tuple(like.expand(*shape, width) for width in facts["widths"]))
            memory.ragged = self.padding.most
            memory.load(tensors["items"], facts["length"], self.capacity, self.layers)
            self._reserved, self.memory = None, memory
            self._count(moved["lengths"])
        elif facts["length"]:
            self.recent = tuple(moved[name] for name in sorted(moved) if name.startswith("recent."))
            if self.capacity > self.top_k:
                self._reserved = self._make_memory(self.recent)
        prefix = "representation."
        self.algorithm.restore({k.removeprefix(prefix): v for k, v in moved.items() if k.startswith(prefix)})
        if self.memory is not None:
            self._make_room(facts["length"])
        self.length, self.batch, self.heads = facts["length"], facts["batch"], facts["heads"]

    def __deepcopy__(self, memo: Any) -> SparseCoordinator:
        return self.fork()

    # ---- the history -------------------------------------------------------------------------------------------------

    def check_batch(self, batch: int) -> None:
        """Raises `ValueError` if there is a history, of another number of sequences than `batch`."""
        if self.length and batch != self.batch:
            raise ValueError(
                f"the cache holds a batch of {self.batch} and was given a batch of {batch}; use a new cache, or "
                "`cache.batch_select_indices` or `cache.batch_repeat_interleave` to change the batch"
            )

    def check_mask(self, mask: Tensor | None, tokens: int, steps: LateCheck) -> None:
        """Refuses a mask that shows padding which is not kept, or hides a token that is stored or decoded.

        While attention is dense it is masked by itself, as ever.

        Args:
            mask: As for `seen_by_newest`, or None for everything.
            tokens: How many new tokens it is for, with those that are held.
            steps: What a GPU finds out of the masks of single tokens, once the step is on its way: the host hears of
                it a step late, and does not wait for it before several come.

        Raises:
            ValueError: If it is such a mask, or has too few columns.
        """
        stored, total = self.memory is not None, self.length + tokens
        decoded = tokens == 1 and not self.fits(tokens)
        fix = f"give one of [{self.batch}, {total}] that shows the same of them as before, and a 1 for a decoded token"
        other = (
            f"`attention_mask` shows other padding among {self.length} tokens in the cache than when they came, or "
            "hides a decoded token; padding is not stored, so that it cannot change (on a GPU this may be found a step "
            f"late): {fix}"
        )
        if mask is not None and mask.ndim == 4 and mask.shape[1] > 1:
            raise ValueError(
                f"`attention_mask` of shape {list(mask.shape)} has one for every head, and a selection is made by one "
                f"for all; give one of [{len(mask)}, {total}]"
            )
        if tokens > 1 and steps.settle():
            raise ValueError(other)
        if not (stored or decoded or self.padding):
            return
        if mask is None:
            if self.padding:
                raise ValueError(
                    f"no `attention_mask` is given, and of {self.length} tokens in the cache some are padding; {fix}"
                )
            return
        if mask.shape[-1] < total and (mask.ndim == 2 or mask.shape[-1] > 1):
            raise ValueError(
                f"`attention_mask` of shape {list(mask.shape)} is for {mask.shape[-1]} tokens, and there are {total}: "
                f"{self.length} in the cache and {tokens} new ones; {fix}"
            )
        held = (total if decoded else self.length) if stored else self.padding.kept.shape[1]

        def same() -> Tensor:
            seen = seen_by_newest(mask, total)
            matches = self.padding.matches(seen[:, :held])
            return matches & seen[:, -1].all() if decoded and not stored else matches

        late = tokens == 1 and mask.is_cuda
        if late:
            steps.next = same
        if steps.failed() if late else not same():
            raise ValueError(other)

    def _check(self, parts: Sequence[Tensor]) -> None:
        if self.length == 0:
            return
        batch, heads = parts[0].shape[:2]
        self.check_batch(batch)
        held = self.recent
        dtype, device = (held[0].dtype, held[0].device) if held else (self.memory.dtype, self.memory.device)
        if (parts[0].dtype, parts[0].device) != (dtype, device):
            raise ValueError(
                f"the cache holds {dtype} on {device} and was given {parts[0].dtype} on {parts[0].device}; use a new "
                "cache after moving or casting the model"
            )
        widths = tuple(part.shape[-1] for part in (held or ())) or self.memory.layout.widths
        if heads != self.heads or tuple(part.shape[-1] for part in parts) != widths:
            raise ValueError(
                "the cache was filled by a model that was not patched, in a layout that a patched one cannot continue; "
                "use a new cache"
            )

    def fits(self, tokens: int) -> bool:
        """Whether the history is still short enough to be dense with `tokens` more tokens."""
        return self.length + tokens <= self.top_k

    def steps(self, tokens: int) -> int:
        """How many of `tokens` more tokens, the last ones, take decode steps. Those before are a prompt: all attend
        densely, or if the algorithm selects prompts, to a selection each, as do steps."""
        drafts = min(self.drafts, tokens - 1)
        if self.length and tokens - drafts <= self.max_draft_tokens:
            drafts = tokens
        return max(0, min(drafts, tokens - self.prompt, self.length + tokens - self.top_k))

    def decodes(self, tokens: int) -> bool:
        """Whether `tokens` more all take decode steps from the memory. The device takes such a step alone: all that it
        asks of the host is to be counted (`advance`)."""
        return self.memory is not None and (tokens == 1 or self.steps(tokens) == tokens)

    def needs_mask(self, tokens: int) -> bool:
        """Whether to know the padding is not enough for `tokens` more tokens: dense attention is masked by itself."""
        return self.fits(tokens) or (tokens > 1 and not self.algorithm.selects_prompts)

    def has_room(self, tokens: int) -> bool:
        """Whether so many more tokens need no memory that is not there yet."""
        return self.length + tokens <= (self.top_k if self.memory is None else self.room)

    def reserve(self, tokens: int) -> None:
        """Makes room for `tokens` more. Raises `MemoryError`, with the history intact, if there is none."""
        if self.memory is not None:
            self.memory.settle()
            self._reserve(self.length + tokens)

    def _reserve(self, tokens: int) -> None:
        # There is memory for `capacity` tokens from the beginning.
        if tokens > self.capacity:
            self.memory.reserve(tokens, self.layers)
        if tokens > self.room:
            self._make_room(tokens)

    def _make_room(self, tokens: int) -> None:
        """Fixes the shapes of decode steps, which score all that there is room for: `capacity` tokens, or where
        `tokens` are more, those and as many more as there happens to be memory for, up to a quarter."""
        wanted = self.capacity if tokens <= self.capacity else tokens + tokens // 4
        room = min(self.memory.room, wanted)
        self.algorithm.reserve(room)
        self.room, self.serial = room, next(self._serials)

    def extend(self, parts: Sequence[Tensor], mask: Tensor | None) -> tuple[Tensor, ...]:
        """Adds any number of tokens and returns the whole history with them, `[batch, heads, tokens, width]` parts.

        What does not fit the dense limit is on its way to the memory when this returns. The parts are the only device
        copy of a longer history, and go when the caller drops them.
        """
        self._check(parts)
        if self.length == 0:
            self._layout(parts)
        new = parts[0].shape[2]
        if self.memory is None:
            full = self._join(self.recent, parts)
            if self.length + new > self.top_k:
                self._spill(full, mask)
            else:
                if self.length == 0 and self.capacity > self.top_k:
                    self._reserved = self._make_memory(parts)
                self.recent = full
        else:
            held = self.length - self.padding.most
            more = self._padding_of(self.length, self.length + new, mask, self.batch, self.memory.device)
            full = self._join(self.history(), parts)
            self._reserve(self.length + new)
            if self._store(self.memory, full, held, self.padding.extended(self.length, more)):
                self._make_room(self.length + new)
        self.batch, self.heads = parts[0].shape[:2]
        self.length += new
        return full

    def extend_dense(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Adds tokens and keeps the whole history on the device, whatever its length: what an unpatched model needs."""
        self._check(parts)
        full = self._join(self.history() if self.length else None, parts)
        self._drop_memory()
        self.recent = full
        self.batch, self.heads = parts[0].shape[:2]
        self.length += parts[0].shape[2]
        return full

    def history(self) -> tuple[Tensor, ...]:
        """The whole history on the device, parts `[batch, heads, tokens, width]`. Padding is there, as any tokens."""
        if self.memory is None:
            return self.recent or ()
        parts = tuple(part.unflatten(0, (self.batch, self.heads)) for part in self.memory.read(self.length))
        if not self.padding:
            return parts
        positions = self.padding.positions(self.length)
        return tuple(take(part, positions, 2) for part in parts)

    @staticmethod
    def _join(old: Sequence[Tensor] | None, new: Sequence[Tensor]) -> tuple[Tensor, ...]:
        new = tuple(part.detach() for part in new)
        if old is None:
            return new
        return tuple(torch.cat(pair, dim=2) for pair in zip(old, new, strict=True))

    def _padding_of(self, first: int, columns: int, mask: Tensor | None, batch: int, device: torch.device) -> Padding:
        """The padding among columns `first` to `columns`, as far as the newest query may see what a mask shows."""
        if mask is None:
            return Padding.none(batch, device)
        return Padding(seen_by_newest(mask, columns)[:, first:].to(device).expand(batch, -1))

    def _spill(self, parts: Sequence[Tensor], mask: Tensor | None) -> None:
        """Moves a dense history, given whole, into a new memory."""
        batch, heads, tokens = parts[0].shape[:3]
        padding = self._padding_of(0, tokens, mask, batch, parts[0].device)
        memory = self._empty_memory(parts)
        self.batch, self.heads = batch, heads
        self._count(torch.zeros(memory.rows, dtype=torch.int64, device=memory.device))
        self._store(memory, parts, 0, padding)
        self._make_room(tokens)
        if padding:
            self.algorithm.select_tokens(padding.columns(self.length))
        # If it ends before this, the dense history is what there is (`undo`).
        self.recent = self._reserved = None

    def _make_memory(self, parts: Sequence[Tensor]) -> Memory:
        """An empty memory for a history of such parts, with room for them and for `capacity` tokens.

        Raises `MemoryError` if there is none.
        """
        memory = self._empty_memory(parts)
        room = max(parts[0].shape[2], self.capacity)
        if room > memory.room:
            memory.reserve(room, self.layers)
        return memory

    def _layout(self, parts: Sequence[Tensor]) -> ItemLayout:
        """The layout of items of such parts. Raises `ValueError` if the backend cannot attend to them."""
        layout = self._make_layout(*(part.shape[-1] for part in parts))
        self.backend.check(layout, parts[0].dtype, parts[0].device)
        return layout

    def _empty_memory(self, parts: Sequence[Tensor]) -> Memory:
        """An empty memory for a history of such parts: the one of the history before, if that was of the same kind."""
        batch, heads = parts[0].shape[:2]
        layout = self._layout(parts)
        args = (batch * heads, layout, parts[0].dtype, parts[0].device)
        memory = self._reserved
        if memory is None or (memory.rows, memory.layout, memory.dtype, memory.device) != args:
            # What cannot be used goes before another is made.
            self._reserved = memory = None
            memory = ResidentMemory(*args) if self.slots is None else HierarchicalMemory(*args, self.slots)
        return memory

    def _store(self, memory: Memory, parts: Sequence[Tensor], held: int, padding: Padding) -> bool:
        """Takes a history, given whole, of which every sequence's first `held` tokens are in a memory already.

        Sequences that are the same, as beams are to begin with, are written once. Whether tensors of the memory moved.
        Raises `MemoryError`, with the history as it was, if there is no room.
        """
        tokens = parts[0].shape[2]
        first = kinds = list(range(self.batch))
        if not tokens <= self.capacity <= memory.room:
            # There is no room yet that each may fill by itself.
            first, kinds = distinct((*parts, padding.kept[:, None, :, None]))
        if padding:
            # What there is of padding comes last, where tokens to come will lie.
            columns = padding.columns(tokens)
            parts = tuple(take(part, columns, 2) for part in parts)
        rows = tuple(part.flatten(0, 1) for part in parts)
        start = held // memory.unit * memory.unit
        written = tuple(part[:, start:] for part in rows)
        if len(first) < self.batch:
            written = tuple(torch.stack([part[row] for row in self._rows(first)]) for part in written)
        memory.ragged = padding.most
        moved = memory.write_alike(written, start, self._rows(kinds), max(tokens, self.capacity), self.layers)
        self.memory, self.padding = memory, padding
        before = self.lengths.clone()
        self._count(padding.lengths(tokens).repeat_interleave(self.heads))
        start = self._aligned(max(held - 1, 0))
        self.algorithm.construct_representations(rows[0][:, start:], start, self.lengths, before)
        return moved

    def _rows(self, elements: Sequence[int]) -> list[int]:
        """The rows of batch elements."""
        return [element * self.heads + head for element in elements for head in range(self.heads)]

    @property
    def lengths(self) -> Tensor:
        """`[rows]` int64, tokens that each row has, without one that was appended but is not attended to yet."""
        return self._counts[0]

    def _count(self, lengths: Tensor) -> None:
        """Sets `lengths`, where they lie if there are as many."""
        counts = torch.stack((lengths, lengths + 1))
        if self._counts is not None and self._counts.shape == counts.shape and self._counts.device == counts.device:
            self._counts.copy_(counts)
        else:
            self._counts = counts

    def _aligned(self, token: int) -> int:
        """The last token at or before `token` that begins both an item and a unit of the representation."""
        unit = math.lcm(self.memory.layout.page_size, self.algorithm.alignment)
        return token // unit * unit

    def _drop_memory(self) -> None:
        if self.memory is not None:
            if self.capacity > self.top_k:
                # What it lacks of that, having shared it, it gets when it is needed: `undo` must not fail.
                self.memory.cut(0)
                self._reserved = self.memory
            self.memory, self.room = None, 0
            if self.padding:
                self.algorithm.select_tokens(self.padding.positions(self.length))
            self.algorithm.forget()

    # ---- the decode step ---------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """The layer's attention module begins to run."""
        self.leave()
        self.attending = True

    def leave(self) -> None:
        """It ends, maybe midway, and leaves nothing that it began."""
        self.attending, self.ahead, self._branch = False, None, Branch()

    def append(self, parts: Sequence[Tensor], mask: Tensor | None) -> None:
        """Adds one token `[batch, heads, 1, width]` to a history that is, or now becomes, longer than `top_k`.

        Args:
            parts: The token.
            mask: As for `seen_by_newest`, of this token and maybe of others after it.
        """
        self._check(parts)
        if self.memory is None:
            self._spill(self.history(), mask)
        self._reserve(self.length + 1)
        rows = [part.detach().flatten(0, 2).contiguous() for part in parts]
        position, _ = self._counts
        # The selection does not depend on where the token lies, and is the longer part of the step.
        self._branch.run(self._store_token, position, *rows)
        if not self.algorithm.beside:
            self.algorithm.update_representations(rows[0], position)
        self.advance()

    def _store_token(self, position: Tensor, *rows: Tensor) -> None:
        self.memory.append(torch.cat(rows, dim=-1), position)
        if self.algorithm.beside:
            self.algorithm.update_representations(rows[0], position)

    def advance(self) -> None:
        """What a decode step changes on the host: everything that a graph, replayed, does not do."""
        self.length += 1

    def window(self, tokens: int, mask: Tensor | None) -> tuple[Tensor, int, Padding | None]:
        """What `tokens` new tokens that are yet to be stored may attend to, each as far as itself.

        A history that no longer is to be dense leaves the device here.

        Args:
            tokens: How many there are.
            mask: As for `seen_by_newest`. Decode steps do not look at it, and may have None.

        Returns:
            `[batch]` int64, the first new one of each sequence; how many tokens there are with the new ones, or there
            is room for; and the padding among the new ones, or None if there is none.
        """
        dense = self.fits(tokens)
        if self.memory is None and self.length and not dense:
            self._spill(self.history(), mask)
        if self.decodes(tokens):
            return self.lengths, max(self.room, self.length + tokens), None
        assert mask is not None
        total = self.length + tokens
        first = torch.full((len(mask),), self.length, device=mask.device) if self.memory is None else self.lengths
        # Where attention is dense it is masked by itself.
        padding = self._padding_of(self.length, total, None if dense else mask, len(mask), mask.device)
        return first, total, padding or None

    def grouped(self, query: Tensor) -> Tensor:
        """The queries `[batch, heads, 1, width]` of one token by what they attend to, `[rows, group, width]`."""
        return query.reshape(self.batch * self.heads, -1, query.shape[-1]).contiguous()

    def beside(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """What `function(*tensors)` selects for a token that is yet to be appended, beside what is done until then.

        Nothing may read it, or write the tensors, before `attend`.
        """
        return self._branch.run(function, *tensors)

    def retrieve_ahead(self, query: Tensor, scale: float) -> None:
        """Begins `retrieve` before the token is appended, if the algorithm can."""
        if self.algorithm.beside:
            self.ahead = self.beside(lambda query: self._retrieve(query, scale), query)

    def retrieve(self, query: Tensor, scale: float) -> Tensor:
        """The selection `[rows, k]` for the queries `[rows, heads, width]` of the token that was appended."""
        ahead, self.ahead = self.ahead, None
        return self._retrieve(query, scale) if ahead is None else ahead

    def _retrieve(self, query: Tensor, scale: float) -> Tensor:
        items = self.memory.layout.items(max(self.room, self.length))
        return self.algorithm.retrieve_topk(query, self.k, items, scale, self._counts[1])

    def attend(self, query: Tensor, selection: Tensor, scale: float, **kwargs: Any) -> Tensor:
        """Swaps the selection in and attends to it; see `AttentionBackend.attend`. The token counts from here on."""
        if self.selected is not None:
            self.selected.append(selection)
        self._branch.join()
        self._branch.run(self._count_one, self._counts)
        buffer, slots = self.memory.fetch(selection)
        self._branch.join()
        return self.backend.attend(query, buffer, slots, selection, self.lengths, self.memory.layout, scale, **kwargs)

    @staticmethod
    def _count_one(counts: Tensor) -> None:
        counts += 1

    # ---- what transformers does with a cache -------------------------------------------------------------------------

    def prepare_crop(self, remove: int) -> None:
        """Has the memory that `crop` will need. Raises `MemoryError`, with nothing changed, if there is none."""
        length = max(0, self.length - remove)
        if self.memory is not None and length:
            self.memory.prepare_cut(length if length > self.top_k else 0, self.capacity, self.layers)

    def prepare_batch(self, batch: int) -> None:
        """Has the memory that `select_batch` of so many will need. Raises as `prepare_crop` does."""
        if self.memory is not None:
            self.memory.prepare_select(batch * self.heads, self.length, self.layers)

    def crop(self, remove: int) -> None:
        """Forgets the newest `remove` tokens."""
        length = max(0, self.length - remove)
        if length == 0:
            self.reset()
            return
        self.length, self.padding = length, self.padding.cut(length)
        if self.memory is None:
            self.recent = tuple(part[:, :, :length] for part in self.recent)
            return
        if length <= self.top_k:
            self.recent = self.history()
            self._drop_memory()
            return
        if self.memory.cut(length, self.capacity, self.layers):
            self._make_room(length)
        start = self._aligned(max(length - self.padding.most - 1, 0))
        keys = self.memory.read(length, start)[0]
        self._count(self.padding.lengths(length).repeat_interleave(self.heads))
        self.algorithm.construct_representations(keys, start, self.lengths, self.lengths)

    def undo(self, length: int) -> None:
        """Goes back to the first `length` tokens, all that there were before a forward that ended midway.

        Also where there are no more: the device may have appended what the host has not counted yet, or looked for what
        it then did not copy.
        """
        if self.recent is not None:
            # It may have been on its way to the memory.
            self._drop_memory()
            if self._reserved is not None:
                self._reserved.clear()
        self.crop(self.length - length)
        if self.memory is not None:
            self.memory.distrust()

    def select_batch(self, index: Tensor) -> None:
        """Keeps the batch elements at `index`, which may repeat: what is the same in two of them is held once.

        Raises:
            MemoryError: If there are more of them, and the memory in which they will differ cannot be had.
        """
        if self.length == 0:
            return
        index = index.to(self.memory.device if self.recent is None else self.recent[0].device)
        rows = (index.unsqueeze(1) * self.heads + torch.arange(self.heads, device=index.device)).flatten()
        chosen = index.tolist() if self.memory is not None or self.padding else []
        if self.recent is not None:
            self.recent = tuple(part.index_select(0, index) for part in self.recent)
        else:
            self.memory.select(self._rows(chosen), self.length, self.layers)
            self._count(self.lengths[rows])
            if len(index) != self.batch:
                self.serial = next(self._serials)
        if chosen:
            self.padding = self.padding.select(index, chosen)
        self.algorithm.select_rows(rows)
        self.batch = len(index)

    @property
    def device_bytes(self) -> int:
        """Bytes on the device: the device buffer and its LRU state, or the dense history, and the representation."""
        held = sum(part.nbytes for part in self.recent) if self.recent is not None else 0
        memory = self.memory or self._reserved
        return held + self.algorithm.nbytes + (memory.device_bytes if memory is not None else 0)

    @property
    def dense_bytes(self) -> int:
        """Bytes that the history would take on the device, dense."""
        if self.memory is None:
            return sum(part.nbytes for part in self.recent) if self.recent is not None else 0
        layout = self.memory.layout
        return self.memory.rows * self.length * sum(layout.widths) * self.memory.dtype.itemsize

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        memory = self.memory or self._reserved
        return memory.host_bytes if memory is not None else 0

    def residency(self) -> Tensor:
        """The share of rows that have each token on the device, `[tokens]` float32 on the CPU."""
        if self.memory is None:
            return torch.ones(self.length)
        page_size = self.memory.layout.page_size
        return self.memory.residency(self.length).repeat_interleave(page_size)[: self.length]
