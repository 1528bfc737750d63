"""Models with latent attention and an indexer of their own: DeepSeek sparse attention and its relatives.

The model's own attention forward runs, with three things replaced for the call: the expansion of latents to per-head
keys and values (they stay latent), the indexer's view of its cached keys (its scores are never `[batch, query, heads,
keys]`), and the attention function, which is handed the selection, swaps in just those latents, and attends to them,
the up-projections absorbed into the query and the output (DeepSeek-V2, arXiv 2405.04434). The tokens of a prompt, whose
latents are all on the device, each attend to a selection of their own in the same way, a block of them at a time: no
tensor of a prompt is as large as `[queries, tokens]`, not even a mask.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch
from torch import Tensor, nn

from hf_hisparse.algorithms import LightningIndexer
from hf_hisparse.config import HiSparseConfig
from hf_hisparse.coordinator import SparseCoordinator
from hf_hisparse.layout import ItemLayout
from hf_hisparse.models.attention_interface import AttentionPatch
from hf_hisparse.padding import take


def select(
    coordinator: SparseCoordinator,
    keys: Tensor,
    query: Tensor,
    weights: Tensor,
    scale: float,
    mask: Tensor | None,
    k: int,
) -> Tensor:
    """Adds the indexer keys of new tokens to those of a layer, and selects `k` tokens for each of them.

    Args:
        coordinator: Of the layer.
        keys: `[batch, new, width]`.
        query, weights, scale: As for `LightningIndexer.retrieve_topk`.
        mask: As for `SparseCoordinator.window`.

    Returns:
        `[batch, new, k]` int32.
    """
    algorithm, new = coordinator.algorithm, keys.shape[1]
    first, tokens, padding = coordinator.window(new, mask)
    if padding is not None:
        newest = query[:, -1:], weights[:, -1:]
        # A sequence's queries are then consecutive tokens. Those of padding come after them, and see whatever there is.
        order = padding.columns(new)
        keys, query, weights = (take(part, order, 1) for part in (keys, query, weights))
    algorithm.extend(keys, first.unsqueeze(1) + torch.arange(new, device=keys.device), tokens)
    selection = algorithm.retrieve_topk(query, weights, scale, first, tokens, k)
    if padding is not None:
        selection = take(selection, order.argsort(1), 1)
        # The newest sees its sequence, also where it is padding: `generate` goes on from what it attends to.
        last = first + padding.lengths(new) - 1
        selection[:, -1:] = algorithm.retrieve_topk(*newest, scale, last, tokens, k)
    return selection


class IndexerKeys:
    """What the stock indexer sees of its cached keys: it records the score expression and computes it only at `topk`.

    The expression is `topk(mask(weights @ relu(q @ k^T * scale)))`. Anything else is an error that names the operation.

    Args:
        coordinator: Of the layer, whose algorithm holds the keys.
        new: `[batch, tokens, width]`, those of new tokens.
    """

    def __init__(self, coordinator: SparseCoordinator, new: Tensor):
        self.coordinator, self.new = coordinator, new
        self.query: Tensor | None = None
        self.weights: Tensor | None = None
        self.mask: Tensor | None = None
        self.scale = 1.0

    @property
    def shape(self) -> torch.Size:
        rows = self.query.shape[:2] if self.query is not None else ()
        return torch.Size((*rows, self.coordinator.length + self.new.shape[1]))

    def _same(self, *args: Any, **kwargs: Any) -> IndexerKeys:
        return self

    transpose = float = unsqueeze = squeeze = _same

    def __mul__(self, scale: Any) -> IndexerKeys:
        self.scale *= scale
        return self

    def __add__(self, mask: Tensor) -> IndexerKeys:
        self.mask = mask
        return self

    def masked_fill(self, hidden: Tensor, value: Any) -> IndexerKeys:
        self.mask = ~hidden[:, -1:]
        return self

    def topk(self, k: int, dim: int = -1) -> IndexerKeys:
        assert self.query is not None and self.weights is not None and self.mask is not None
        asked = self.query, self.weights.squeeze(-2), self.scale
        self.indices = select(self.coordinator, self.new, *asked, self.mask.unsqueeze(1), k)
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> IndexerKeys:
        if function is torch.matmul and isinstance(args[1], cls):
            keys = args[1]
            if keys.query is None:
                keys.query = args[0]
            else:
                keys.weights = args[0]
            return keys
        if function is nn.functional.relu:
            return args[0]
        name = getattr(function, "__name__", str(function))
        raise TypeError(f"the model's indexer scores its keys with `{name}`, which is unsupported; use `dense_layers`")


class LatentPatch(AttentionPatch):
    """The patch of an attention module that has latents to expand and an indexer, its own or the previous layer's."""

    bases = ("eager", "sdpa")
    block = 1 << 26
    """Elements of absorbed queries `[batch, queries, heads, latent + rotary]` in flight."""

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        parts = ("expand_kv", "kv_b_proj", "kv_lora_rank", "indexer")
        return super().matches(module) and all(hasattr(module, part) for part in parts)

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        forward = inspect.unwrap(type(module).forward)
        if getattr(module, "is_kv_shared_layer", False) or getattr(module, "store_full_length_kv", False):
            return "it shares its latents with other layers"
        keywords = {name for const in forward.__code__.co_consts if isinstance(const, tuple) for name in const}
        if "indices" not in keywords:
            return "its indexer does not hand its selection to the attention function"
        return None

    @staticmethod
    def follows(module: Any) -> bool:
        return module.indexer is None

    @staticmethod
    def make_coordinator(module: Any, config: HiSparseConfig, backend: Any) -> SparseCoordinator:
        native = module.config.index_topk
        if config.top_k not in (None, native):
            raise ValueError(
                f"`top_k={config.top_k}`: the model selects `index_topk={native}` tokens itself; leave `top_k` out"
            )
        if config.algorithm != "auto":
            raise ValueError(f"`algorithm={config.algorithm!r}`: the model has its own indexer; use `algorithm='auto'`")
        if config.page_size not in (None, 1):
            raise ValueError(f"`page_size={config.page_size}`: the model selects single tokens; leave `page_size` out")
        k, held = config.resolve(1, native, 0)
        slots = held if config.offload else None
        return SparseCoordinator(
            native, k, slots, ItemLayout.token, LightningIndexer, backend, config.max_cache_len, config.max_draft_tokens
        )

    def __init__(self, module: Any):
        super().__init__(module)
        # Its own, but there: what is replaced for a call then changes nothing that another thread's graph depends on.
        module.expand_kv = module.expand_kv
        self._own_expansion = module.expand_kv

    def remove(self) -> None:
        super().remove()
        del self.module.expand_kv

    def _replace(self) -> None:
        super()._replace()
        self.module.expand_kv = self._expand

    def _restore(self) -> None:
        self.module.expand_kv = self._own_expansion
        super()._restore()

    def _expand(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Leaves latents as they are to threads that have entered the module."""
        if torch.compiler.is_compiling() or threading.get_ident() in self._entered:
            return latent, rotary
        return self._own_expansion(latent, rotary)

    def _up_projections(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """The key and value halves of `kv_b_proj`, `[heads, width, latent]` each, for such latents."""
        project = self.module.kv_b_proj
        weight = getattr(project, "weight", None)
        if type(project) is not nn.Linear or type(weight) is not nn.Parameter or weight.device != latent.device:
            # Quantised, adapted, a part of a tensor that is spread over devices, or offloaded: what the module does to
            # each unit vector is its weight, whatever it is stored as and wherever.
            unit = torch.eye(self.module.kv_lora_rank, dtype=latent.dtype, device=latent.device)
            weight = project(unit).t()
        weight = weight.view(-1, self.module.qk_nope_head_dim + self.module.v_head_dim, self.module.kv_lora_rank)
        return weight.split([self.module.qk_nope_head_dim, self.module.v_head_dim], dim=1)

    def attend(
        self,
        coordinator: SparseCoordinator,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        s_aux: Tensor | None = None,
        indices: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of new tokens over the selected latents of the history.

        Args:
            query: `[batch, heads, new, nope + rotary]`.
            key, value: The new tokens' latents `[batch, 1, new, latent]` and rotary keys `[batch, 1, new, rotary]`.
            attention_mask: What the dense steps are masked by.
            scaling, s_aux: The softmax scale and the sink logits of the heads.
            indices: `[batch, new, k]` int32, the selection of each query, -1 for none.

        Returns:
            `[batch, new, heads, value_width]`.
        """
        batch, heads, new, _ = query.shape
        sinks = None if s_aux is None else s_aux.unsqueeze(0)
        if coordinator.fits(new):
            latent, rotary = coordinator.extend((key, value), attention_mask)
            key, value = self._own_expansion(latent, rotary)
            optional = {} if s_aux is None else {"s_aux": s_aux}
            return self.dense_function()(
                self.module, query, key, value, attention_mask, scaling=scaling, **optional, **kwargs
            )[0]

        assert scaling is not None and indices is not None
        up_key, up_value = self._up_projections(key)
        if coordinator.steps(new) == new:
            sinks = None if sinks is None else sinks.expand(batch, -1)
            outputs = []
            for t in range(new):
                coordinator.append((key[:, :, t : t + 1], value[:, :, t : t + 1]), attention_mask)
                absorbed = self._absorb(query[:, :, t : t + 1], up_key)[:, 0]
                attended = coordinator.attend(absorbed, indices[:, t].contiguous(), scaling, sinks=sinks)
                outputs.append(self._project(attended.unsqueeze(1), up_value))
            return outputs[0] if new == 1 else torch.cat(outputs, dim=1)

        # Every query is a row of the backend's, and the latents of the whole batch are one buffer, which rows share.
        buffer = torch.cat(coordinator.extend((key, value), attention_mask), dim=-1).flatten(1, 2)
        tokens, padding = buffer.shape[1], coordinator.padding
        columns = padding.columns(tokens) if padding else torch.arange(tokens, device=indices.device).expand(batch, -1)
        places = (columns + torch.arange(batch, device=indices.device).unsqueeze(1) * tokens).to(torch.int32)
        lengths = torch.full((batch * new,), buffer.shape[1], device=indices.device)
        buffer = buffer.flatten(0, 1).unsqueeze(0)
        output = query.new_empty(batch, new, heads, up_value.shape[1])
        block = max(1, self.block // (batch * heads * buffer.shape[2]))
        for low in range(0, new, block):
            some = slice(low, low + block)
            absorbed = self._absorb(query[:, :, some], up_key).flatten(0, 1)
            selection = indices[:, some]
            slots = take(places, selection.clamp(min=0).flatten(1).long(), 1).view_as(selection)
            slots = torch.where(selection < 0, selection, slots).flatten(0, 1)
            rows = len(slots)
            attended = coordinator.backend.attend(
                absorbed,
                buffer.expand(rows, -1, -1),
                slots,
                selection.flatten(0, 1),
                lengths[:rows],
                coordinator.memory.layout,
                scaling,
                sinks=None if sinks is None else sinks.expand(rows, -1),
            )
            output[:, some] = self._project(attended.unflatten(0, selection.shape[:2]), up_value)
        return output

    def _absorb(self, query: Tensor, up_key: Tensor) -> Tensor:
        """Queries `[batch, heads, n, nope + rotary]` as queries on latent rows `[batch, n, heads, latent + rotary]`."""
        nope, rotary = query.split([self.module.qk_nope_head_dim, self.module.qk_rope_head_dim], dim=-1)
        return torch.cat((nope @ up_key, rotary), dim=-1).transpose(1, 2)

    @staticmethod
    def _project(output: Tensor, up_value: Tensor) -> Tensor:
        """Attention output `[batch, n, heads, latent]` as values, `[batch, n, heads, value_width]`."""
        return torch.einsum("bnhl,hvl->bnhv", output, up_value)
