"""What the coordinator asks of a selection method, and what the methods that score keys share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from hf_hisparse import ops
from hf_hisparse.layout import select_rows
from hf_hisparse.ops.reference import valid_tokens


class Representations:
    """Named tensors `[rows, entries, ...]` on the device that grow along their second dimension."""

    def __init__(self):
        self.tensors: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def reserve(self, entries: int, like: dict[str, Tensor] | None = None) -> None:
        """Makes room for just `entries` entries, keeping what is there, shaped as that is or as in `like`.

        In all tensors or, if it ends midway, in none: a kernel takes them to have as many entries as one another.
        """
        wider = dict[str, Tensor]()
        for name, value in (self.tensors if like is None else like).items():
            held = self.tensors.get(name)
            size = 0 if held is None else held.shape[1]
            if entries > size:
                grown = value.new_zeros(value.shape[0], entries, *value.shape[2:])
                if held is not None:
                    grown[:, :size] = held
                wider[name] = grown
        self.tensors |= wider

    def first(self, entries: int) -> dict[str, Tensor]:
        """The first `entries` entries."""
        return {name: tensor[:, :entries] for name, tensor in self.tensors.items()}

    def write(self, values: dict[str, Tensor], first: int) -> None:
        """Writes `[rows, n, ...]` values to entries `first` on, growing as needed."""
        if not values:
            return
        count = next(iter(values.values())).shape[1]
        self.reserve(first + count, values)
        for name, value in values.items():
            self.tensors[name][:, first : first + count] = value

    def merge(self, values: dict[str, Tensor], first: int, stays: Tensor) -> None:
        """`write`, but for the entries `[rows, n]` that stay as they are."""
        for name, value in values.items():
            if name in self.tensors:
                old = self.tensors[name][:, first : first + value.shape[1]]
                new = value[:, : old.shape[1]]
                where = stays[:, : old.shape[1]].view(*new.shape[:2], *[1] * (new.ndim - 2))
                new.copy_(torch.where(where, old, new))
        self.write(values, first)

    def select_rows(self, index: Tensor) -> None:
        """Keeps the rows at `index`, which may repeat."""
        self.tensors = {name: select_rows(tensor, index) for name, tensor in self.tensors.items()}


class SparseAlgorithm(ABC):
    """The representation of one layer's history, always on the device, and the selection made from it.

    It deals in item ids and knows nothing of slots, hosts or kernels.
    """

    selects_prompts = False
    """Whether every token of a prompt has a selection of its own. If not, prompts are attended to densely."""
    beside = False
    """Whether a selection is the same before, while and after `update_representations` adds the newest token, which is
    selected in any case. Then both run at once."""

    def __init__(self):
        self.representations = Representations()

    @property
    def nbytes(self) -> int:
        """Bytes of representation on the device."""
        return self.representations.nbytes

    @property
    def alignment(self) -> int:
        """Tokens at multiples of which a representation can be built anew, given the keys from there on."""
        return 1

    @abstractmethod
    def construct_representations(self, keys: Tensor, start: int, lengths: Tensor, held: Tensor) -> None:
        """(Re)builds the representation of tokens from `start` on, after a prefill or when newer ones were forgotten.

        Args:
            keys: `[rows, n, width]`, the keys of tokens `start` to `start + n`, the newest of the longest row.
            start: Index of the first of them, a multiple of `alignment`: 0, or that of a token that every row has and
                that is represented already.
            lengths: `[rows]` int64, tokens that each row has.
            held: `[rows]` int64: of these, those before it are represented already: all, if a row only became shorter.
        """

    @abstractmethod
    def update_representations(self, key: Tensor, position: Tensor) -> None:
        """Adds one new token a row, for which `reserve` made room.

        Args:
            key: `[rows, width]`.
            position: `[rows]` int64, its index in the history.
        """

    def entries(self, tokens: int) -> int:
        """Entries of the representation that `tokens` tokens take."""
        return tokens

    def reserve(self, tokens: int) -> None:
        """Makes room for a history of `tokens` tokens, once there is one. Up to there nothing moves."""
        self.representations.reserve(self.entries(tokens))

    def state(self, tokens: int) -> dict[str, Tensor]:
        """All that it keeps of a history of `tokens` tokens."""
        return self.representations.first(self.entries(tokens))

    def restore(self, state: dict[str, Tensor]) -> None:
        """Takes what `state` gave."""
        self.representations.write(state, 0)

    def select_tokens(self, index: Tensor) -> None:
        """Reorders the tokens: the first `n` become those at `index` `[batch, n]`, as the history is moved.

        Nothing, where `construct_representations` or `forget` follows and needs nothing of what there was.
        """

    def forget(self) -> None:
        """The history is dense again, or was moved: it will be constructed anew."""
        self.representations = Representations()

    def select_rows(self, index: Tensor) -> None:
        """Keeps the rows at `index`, which may repeat. If they are as many as before, no tensor moves."""
        self.representations.select_rows(index)


class KeyScoring(SparseAlgorithm):
    """Scores the history's keys against a query and selects the best items.

    A method is three things: what it keeps of a few tokens' keys (`represent`), how a new token changes that (`merge`,
    only where an entry covers several tokens), and how a query scores it (`score`). Everything else is here.

    Args:
        page_size: Tokens an item.
        sink_tokens: Tokens at the start of a sequence that are always attended to (StreamingLLM, arXiv 2309.17453).
        recent_tokens: Newest tokens that are always attended to. At least the item being filled is.
    """

    page_size: int = 1
    """The default number of tokens an item."""
    sink_tokens: int = 4
    recent_tokens: int = 64

    def __init__(self, page_size: int | None = None, sink_tokens: int | None = None, recent_tokens: int | None = None):
        self.page_size = type(self).page_size if page_size is None else page_size
        self.sink_tokens = type(self).sink_tokens if sink_tokens is None else sink_tokens
        self.recent_tokens = type(self).recent_tokens if recent_tokens is None else recent_tokens
        super().__init__()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(page_size={self.page_size})"

    @property
    def alignment(self) -> int:
        return self.page_size

    @property
    def granularity(self) -> int:
        """Tokens that one entry of the representation stands for: the page, or a divisor of it."""
        return self.page_size

    @property
    def kept_items(self) -> int:
        """The most items that are always kept: the sink and the newest, wherever they lie within their pages."""
        sink, recent = max(self.sink_tokens, 1), max(self.recent_tokens, 1)
        return (sink + self.page_size - 2) // self.page_size + (recent + self.page_size - 2) // self.page_size + 2

    def represent(self, keys: Tensor, valid: Tensor) -> dict[str, Tensor]:
        """Represents keys `[rows, n, granularity, width]` as entries `[rows, n, ...]`.

        `valid` `[rows, n, granularity]` bool is False for padding, which must leave no trace. A method whose entries
        depend on more than their own keys overrides `construct_representations` and `update_representations` instead.
        """
        raise NotImplementedError

    def merge(self, old: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Tensor]:
        """The entry `[rows, 1, ...]` of the tokens of both. Needed only where `granularity > 1`."""
        raise NotImplementedError

    @abstractmethod
    def score(self, query: Tensor, items: int, scale: float, lengths: Tensor) -> Tensor:
        """Scores `[rows, items]` float32, the larger the more worth attending to.

        Args:
            query: `[rows, group, width]`, the query heads that share a row's KV head.
            items: How many items the history has.
            scale: The softmax scale of the attention.
            lengths: `[rows]` int64: the first `lengths` tokens of a row can be attended to.
        """

    @staticmethod
    def cut(keys: Tensor, start: int, lengths: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Keys `[rows, tokens, width]` from token `start` on, as `[rows, n, size, width]`, and which are valid."""
        rows, tokens, width = keys.shape
        n = -(-tokens // size)
        padded = keys.new_zeros(rows, n * size, width)
        padded[:, :tokens] = keys
        return padded.view(rows, n, size, width), valid_tokens(n * size, lengths - start).view(rows, n, size)

    def construct_representations(self, keys: Tensor, start: int, lengths: Tensor, held: Tensor) -> None:
        size = self.granularity
        self.representations.write(self.represent(*self.cut(keys, start, lengths, size)), start // size)

    def entries(self, tokens: int) -> int:
        return -(-tokens // self.granularity)

    def update_representations(self, key: Tensor, position: Tensor) -> None:
        rows = torch.arange(len(key), device=key.device)
        size = self.granularity
        entry = position // size
        valid = torch.ones(len(key), 1, 1, dtype=torch.bool, device=key.device)
        new = self.represent(key[:, None, None], valid)
        if size > 1:
            old = {name: tensor[rows, entry].unsqueeze(1) for name, tensor in self.representations.tensors.items()}
            merged = self.merge(old, new)
            opens = position % size == 0
            new = {
                name: torch.where(opens.view(-1, *[1] * (value.ndim - 1)), value, merged[name])
                for name, value in new.items()
            }
        for name, value in new.items():
            self.representations[name][rows, entry] = value.squeeze(1)

    def retrieve_topk(self, query: Tensor, k: int, items: int, scale: float, lengths: Tensor) -> Tensor:
        """Selects `k` items a row: the sink, the newest, then the best scored.

        Args:
            query: `[rows, group, width]`.
            k: Items to select.
            items: How many items there are, at least those of the longest history. More of them change no selection.
            scale: The softmax scale of the attention.
            lengths: `[rows]` int64: the first `lengths` tokens of a row can be attended to.

        Returns:
            `[rows, min(k, items)]` int32 item ids, unique and ascending, padded with -1 at the end.
        """
        sink, recent = max(self.sink_tokens, 1), max(self.recent_tokens, 1)
        return self.select(query, items, scale, lengths, min(k, items), sink, recent)

    def select(
        self,
        query: Tensor,
        items: int,
        scale: float,
        lengths: Tensor,
        k: int,
        sink_tokens: int,
        recent_tokens: int,
    ) -> Tensor:
        """`ops.top_k` of `score`. A method whose kernels do both at once overrides it beside `score`."""
        scores = self.score(query, items, scale, lengths)
        return ops.top_k(scores, k, lengths, self.page_size, sink_tokens, recent_tokens)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Who scores in its own way, or by another parent's, selects by that, and not by what a parent's kernels do at
        # once.
        first = [next(i for i, base in enumerate(cls.__mro__) if name in vars(base)) for name in ("score", "select")]
        if first[0] < first[1]:
            cls.select = KeyScoring.select  # type: ignore[method-assign]
        # Who does any of this anew, or has it done by another parent, has to say that the newest token may be added
        # meanwhile.
        says = next(base for base in cls.__mro__ if "beside" in vars(base))
        names = ("score", "select", "retrieve_topk", "update_representations")
        if any(getattr(cls, name) is not getattr(says, name, None) for name in names):
            cls.beside = False
