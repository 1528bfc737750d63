"""`HierarchicalSparseCache`: a transformers cache whose history lies in host memory."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
)
from transformers.utils import logging

from hf_hisparse import deferred_stop, identity, plotting, storage
from hf_hisparse.backends import BACKENDS
from hf_hisparse.config import HiSparseConfig
from hf_hisparse.coordinator import SparseCoordinator
from hf_hisparse.graph import GraphedForward, Uncapturable
from hf_hisparse.interrupts import undone
from hf_hisparse.late_check import LateCheck
from hf_hisparse.models import (
    ModelPatch,
    compiled_layers,
    is_patched,
    patch_model,
    unpatch_model,
)
from hf_hisparse.models.dsa import IndexerKeys
from hf_hisparse.padding import last_hidden, seen_by_newest
from hf_hisparse.placement import device_of
from hf_hisparse.stats import CacheStats, layer_stats
from hf_hisparse.trace import Trace, TraceRecorder


logger = logging.get_logger(__name__)

FILE_KEY, FILE_VERSION = "hf_hisparse", 2
"""In a file's metadata: where what `save` writes about a cache lies, and its version, raised when that changes."""
SAVED_OPTIONS = ("top_k", "page_size", "algorithm", "dense_layers", "sink_tokens", "recent_tokens")
"""The options that a history depends on. All others may be different when it is loaded."""


class HierarchicalLayer(CacheLayerMixin):
    """One full-attention layer: transformers' cache interface over a coordinator.

    Args:
        coordinator: Holds the layer's history.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, coordinator: SparseCoordinator):
        super().__init__()
        self.coordinator = coordinator

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """New keys and values. Within a patched attention module they are handed on as they are, and stored by it."""
        self.is_initialized = True
        if self.coordinator.attending:
            return key_states, value_states
        logger.warning_once(
            "A HierarchicalSparseCache is used by a model that is not patched: attention is dense and the whole KV "
            "stays on the device. Call `hf_hisparse.patch_model(model)`, or make the cache from the model that uses it."
        )
        keys, values = self.coordinator.extend_dense((key_states, value_states))
        return keys, values

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor | IndexerKeys:
        """New indexer keys `[batch, tokens, width]`; what the model's own indexer is to score."""
        coordinator, algorithm = self.coordinator, self.coordinator.algorithm
        keys = indexer_key_states.detach()
        if coordinator.attending:
            return IndexerKeys(coordinator, keys)
        # A module that is not patched has stored its latents before.
        length = coordinator.length
        position = torch.arange(length - keys.shape[1], length, device=keys.device).unsqueeze(0)
        algorithm.extend(keys, position, length)
        return algorithm.representations["keys"][:, :length]

    def get_seq_length(self) -> int:
        return self.coordinator.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.coordinator.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def offload(self) -> None:
        """Nothing: the history is offloaded already."""

    def prefetch(self) -> None:
        """Nothing, likewise."""

    def reset(self) -> None:
        self.coordinator.reset()
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the newest tokens: `-n` for n of them."""
        if tokens_to_remove < 0:
            self.coordinator.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.coordinator.select_batch(beam_idx)


class HierarchicalSparseCache(Cache):
    """A cache that keeps the KV history in host memory and a bounded working set on the device.

    Patches the model that it is given (see `patch_model`), and is then passed to `generate` like any other cache:

    ```python
    cache = HierarchicalSparseCache(model, top_k=1024)
    model.generate(**inputs, past_key_values=cache)
    ```

    On a CUDA device decode steps are captured in a CUDA graph and replayed, and captured anew where the history
    outgrows its memory, which with `max_cache_len` it never does. With `compile=True` the graph is of decoder layers
    that are compiled. What cannot be captured, or compiled, runs as it does without, with a warning that says why.

    Full-attention layers become hierarchical; sliding-window and linear-attention layers keep transformers' own
    classes. A prompt is attended to densely and exactly. A decode step attends to `top_k` tokens a KV head, chosen by
    `algorithm`; up to `top_k` tokens of context that is everything.

    Args:
        model: The model that will use it, a decoder-only transformers model.
        top_k, buffer_size, page_size, algorithm, dense_layers, sink_tokens, recent_tokens, max_draft_tokens,
            max_cache_len, cuda_graph, compile, backend, offload: See `HiSparseConfig`.

    Raises:
        ValueError: If an option is out of range or does not fit the model; the message names it and the fix.
    """

    def __init__(
        self,
        model: nn.Module,
        top_k: int | None = None,
        buffer_size: int | None = None,
        page_size: int | None = None,
        algorithm: str | type = "auto",
        dense_layers: Iterable[int] = (),
        **options: Any,
    ):
        self.config = HiSparseConfig(
            top_k=top_k,
            buffer_size=buffer_size,
            page_size=page_size,
            algorithm=algorithm,
            dense_layers=dense_layers,
            **options,
        )
        patched = is_patched(model)
        patch = patch_model(model)
        self._text_config = model.config.get_text_config(decoder=True)  # type: ignore[operator]
        try:
            layers = self._make_layers(model, patch)
        except Exception:
            if not patched:
                unpatch_model(model)
            raise
        self._model = weakref.ref(model)
        self._max_length = _max_length(self._text_config)
        self._parameters: tuple[torch.dtype, torch.device] | None = None
        self._begun: tuple[int, list[tuple[Any, dict[str, Any]]]] | None = None
        """While a forward is under way: the length before it, and the sliding windows as they were."""
        self._counted: int | None = None
        """How many tokens count, if not all that are held do: the others go before anything else is done."""
        self._lost = ""
        """Why the history is lost, if it is."""
        self._recording = False
        self._tracing: TraceRecorder | None = None
        self._drafting = self._drafts_begin = False
        """Whether `generate` has decoded with drafts, and whether its first forward that does is yet to come."""
        self._drafts = 0
        self._masks = LateCheck()
        """Whether the masks of decode steps were right."""
        self.graphed = GraphedForward(compiles=self.config.compile) if self.config.cuda_graph else None
        device = device_of(model)
        if self.config.compile and device.type != "cuda":
            logger.warning_once(
                f"`compile=True` does nothing on {device}: decode steps are captured, and their layers compiled, on a "
                "CUDA device."
            )
        super().__init__(layers=layers)

    def _make_layers(self, model: nn.Module, patch: ModelPatch) -> list[Any]:
        """transformers' own layers, with hierarchical ones in place of those of full attention."""
        if self.config.backend not in BACKENDS:
            raise ValueError(f"`backend` must be one of {sorted(BACKENDS)}, not {self.config.backend!r}")
        backend = BACKENDS[self.config.backend]()
        layers = DynamicCache(config=self._text_config).layers
        if bad := sorted(i for i in self.config.dense_layers if not 0 <= i < len(layers)):
            raise ValueError(f"`dense_layers` names layers {bad}, but the model has layers 0 to {len(layers) - 1}")
        leader = 0
        for index, attention in sorted(patch.layers.items()):
            if not attention.follows(attention.module):
                leader = index
            elif (index in self.config.dense_layers) != (leader in self.config.dense_layers):
                raise ValueError(
                    f"`dense_layers` names one of layers {leader} and {index}, of which the second attends to what the "
                    "first selects; name both or neither"
                )
        refused: dict[str, list[int]] = {}
        for index, layer in enumerate(layers):
            if not isinstance(layer, DynamicLayer) or layer.is_sliding or index in self.config.dense_layers:
                continue
            if type(layer) not in (DynamicLayer, DynamicIndexedLayer):
                refused.setdefault("it keeps another state beside its keys and values", []).append(index)
            elif index in patch.layers:
                attention = patch.layers[index]
                layers[index] = HierarchicalLayer(attention.make_coordinator(attention.module, self.config, backend))
            else:
                refused.setdefault(patch.refusals.get(index, "its attention is not on the interface"), []).append(index)
        if not any(isinstance(layer, HierarchicalLayer) for layer in layers):
            if refused or self.config.dense_layers:
                reason = "; ".join(refused) or "it has no full-attention layer outside `dense_layers`"
                raise ValueError(f"no layer of `model` ({type(model).__name__}) can be hierarchical: {reason}")
            logger.warning_once(
                f"{type(model).__name__} has no full-attention layer: its history is bounded, and none of it goes "
                "to host memory."
            )
        for reason, indices in refused.items():
            logger.warning_once(f"Layers {indices} of {type(model).__name__} stay dense on the device: {reason}.")
        hierarchical = [layer for layer in layers if isinstance(layer, HierarchicalLayer)]
        for index, layer in enumerate(hierarchical):
            layer.coordinator.layers = len(hierarchical) - index
        return layers

    @classmethod
    def from_dense(cls, model: nn.Module, cache: Cache, **options: Any) -> HierarchicalSparseCache:
        """Takes over the history of a dense cache, as it was filled by `model`. The dense cache must not be used again.

        Args:
            model: The model that will use it.
            cache: A `DynamicCache` filled by it.
            options: As for the constructor.
        """
        new = cls(model, **options)
        new.take_over(cache)
        return new

    def take_over(self, cache: Cache) -> None:
        """Takes over the history of a dense cache in place of its own, as `from_dense` does, in the memory that it has.

        Args:
            cache: A `DynamicCache` filled by the same model. It must not be used again.

        Raises:
            ValueError: If it holds every head's keys in place of latents, as some versions of transformers have it for
                models with an indexer of their own.
        """
        dense: Any
        for index, dense in enumerate(cache.layers):
            if getattr(dense, "indexer_keys", None) is not None and dense.keys.shape[1] != 1:
                raise ValueError(
                    f"layer {index} of the dense cache holds the keys of {dense.keys.shape[1]} heads and no latents, "
                    "which cannot be continued; read the text with a new HierarchicalSparseCache"
                )
        self.reset()
        for index, (layer, dense) in enumerate(zip(self.layers, cache.layers, strict=True)):
            if not isinstance(layer, HierarchicalLayer):
                self.layers[index] = dense
            elif dense.get_seq_length():
                layer.is_initialized = True
                layer.coordinator.extend_dense((dense.keys, dense.values))
                if getattr(dense, "indexer_keys", None) is not None:
                    layer.update_indexer(dense.indexer_keys)

    def fork(self) -> HierarchicalSparseCache:
        """A copy that goes on by itself, and shares the history in host memory: many questions on one document.

        ```python
        document = HierarchicalSparseCache(model)
        with torch.no_grad():
            model(**inputs, past_key_values=document, logits_to_keep=1)
        for question in questions:  # each the document's tokens, and its own
            model.generate(**question, past_key_values=document.fork())
        ```

        What is shared goes with the last cache that has it. `copy.deepcopy` does the same.

        Raises:
            MemoryError: If the memory for what the two will not share cannot be had.
        """
        self._settle()
        return copy.deepcopy(self)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the history and all that is needed to go on with it to a safetensors file, whole or not at all.

        Args:
            path: Where to. A file that was there is replaced.

        Raises:
            ValueError: If a layer's state cannot be written, or is lost.
            OSError: If the file cannot be written.
        """
        self._settle()
        model: Any = self._model()
        if model is None:
            raise ValueError("the model that the cache was made for is gone, and the file must name it; save earlier")
        tensors: dict[str, storage.Pieces] = {}
        states = []
        for index, layer in enumerate(self.layers):
            name = f"layers.{index}"
            if isinstance(layer, HierarchicalLayer):
                held, facts = layer.coordinator.state()
                tensors |= {f"{name}.{key}": value for key, value in held.items()}
                states.append(facts | {"is_initialized": layer.is_initialized})
                continue
            try:
                states.append(storage.encode(vars(layer), name, tensors))
            except TypeError as error:
                raise ValueError(f"layer {index} ({type(layer).__name__}) cannot be saved: {error}") from error
        options = _saved_options(vars(self.config))
        about = {
            "version": FILE_VERSION,
            "model": identity.describe(model),
            "device": device_of(model.get_decoder()).type,
            "options": options,
            "layers": self._kinds(),
            "states": states,
        }
        storage.write(path, tensors, {"format": "pt", FILE_KEY: json.dumps(about)})

    @classmethod
    def load(cls, model: nn.Module, path: str | os.PathLike, **options: Any) -> HierarchicalSparseCache:
        """A cache with the history that `save` wrote. The file is mapped, and read where it is needed.

        Args:
            model: The model that will use it, the one that filled the cache that was saved: of the same type, weights
                and dtype.
            path: What `save` wrote. It may be replaced while it is in use, and must not be written into.
            options: As for the constructor. Those that say what a history holds are as they were saved, and may be left
                out, but for an `algorithm` that is a class: `top_k`, `page_size`, `algorithm`, `dense_layers`,
                `sink_tokens`, `recent_tokens`.

        Raises:
            ValueError: If the file is not one that `save` wrote or not whole, or the model or an option does not fit;
                the message names what. Nothing has changed then.
            MemoryError: If the host memory cannot be had.
        """
        file = storage.Mapped(path)
        where = repr(os.fspath(path))
        if FILE_KEY not in file.metadata:
            raise ValueError(f"{where} holds no cache that `save` wrote")
        about = json.loads(file.metadata[FILE_KEY])
        if about["version"] != FILE_VERSION:
            raise ValueError(f"{where} has format version {about['version']}; this one reads {FILE_VERSION}")
        if differ := identity.differences(about["model"], identity.describe(model)):
            raise ValueError(f"{where} was saved for another model: {differ}; load the model that it was saved for")
        checked = HiSparseConfig(**options)
        given = _saved_options({name: getattr(checked, name) for name in options})
        if differ := identity.differences({name: about["options"][name] for name in given}, given):
            raise ValueError(f"{where} was saved with other options: {differ}; leave them out")
        if "algorithm" not in given and "." in about["options"]["algorithm"]:
            raise ValueError(f"{where} was saved with `algorithm={about['options']['algorithm']}`; give that class")
        patched = is_patched(model)
        new = cls(model, **about["options"] | options)
        try:
            if new._kinds() != about["layers"]:
                raise ValueError(f"{where} was saved with layers {about['layers']}, which are now {new._kinds()}")
            new._load(model, file.tensors(), about)
        except BaseException:
            if not patched:
                unpatch_model(model)
            raise
        return new

    def _load(self, model: Any, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Takes the state of every layer from a file."""
        length = max((state.get("length", 0) for state in about["states"]), default=0)
        longest = self.config.max_cache_len
        if longest is not None and length > longest:
            raise ValueError(f"{length} tokens were saved, more than `max_cache_len={longest}`; use a larger one")
        decoder, patch = model.get_decoder(), patch_model(model)
        for index, (layer, state) in enumerate(zip(self.layers, about["states"], strict=True)):
            device = device_of(patch.layers[index].module if index in patch.layers else decoder)
            prefix = f"layers.{index}."
            if isinstance(layer, HierarchicalLayer):
                own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
                layer.coordinator.load(own, state, device)
                layer.is_initialized = state["is_initialized"]
            else:
                vars(layer).update(storage.decode(state, tensors, device, about["device"]))
        self._parameters = _kind(decoder)

    def _kinds(self) -> list[str]:
        """What every layer is, in words."""
        kinds = []
        for layer in self.layers:
            kind = type(layer).__name__
            if isinstance(layer, HierarchicalLayer):
                method = layer.coordinator.algorithm
                kept = {name: getattr(method, name, None) for name in ("page_size", "sink_tokens", "recent_tokens")}
                kind = f"{type(method).__name__} top_k={layer.coordinator.top_k} {kept}"
            kinds.append(kind)
        return kinds

    @property
    def is_compileable(self) -> bool:
        """False: `generate` is not to compile the forward as a whole, into a graph of its own.

        A step does work on the host (it counts tokens, makes room, orders the device behind what is written), and the
        buffers that it reads may move between steps. A graph that PyTorch captures knows of neither. The graph here
        does, and `compile=True` has it run over compiled layers.
        """
        return False

    @property
    def _hierarchical(self) -> Iterator[tuple[int, HierarchicalLayer]]:
        return ((i, layer) for i, layer in enumerate(self.layers) if isinstance(layer, HierarchicalLayer))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens held. Those of a forward that is under way, or was interrupted, do not count."""
        if self._begun is not None:
            return self._begun[0]
        return super().get_seq_length(layer_idx) if self._counted is None else self._counted

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """What a mask for so many new tokens spans: all tokens, from the first."""
        self._drop_uncounted()
        return super().get_mask_sizes(query_length, layer_idx)

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """New keys and values of a layer."""
        self._drop_uncounted()
        return super().update(*args, **kwargs)

    def reset(self) -> None:
        """Forgets the history. Its memory is kept for the next one."""
        if self._masks.settle():
            logger.warning(
                "The `attention_mask` of one of the last decode steps showed other padding than when it came, or hid a "
                "decoded token; padding is not stored, so that it cannot change, and attention was as before."
            )
        lost, self._lost = self._lost, "`reset` was interrupted midway"
        for _, hierarchical in self._hierarchical:
            if lost:
                hierarchical.coordinator.lose()
        for index, fresh in enumerate(DynamicCache(config=self._text_config).layers):
            if isinstance(self.layers[index], HierarchicalLayer):
                self.layers[index].reset()
            else:
                # What transformers' own layers keep of themselves when they are reset depends on its version.
                self.layers[index] = fresh
        self._begun, self._counted, self._lost, self._drafting = None, None, "", False

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the newest tokens: `-n` for n of them."""
        # `generate` counts in tensors. One that became a length would be added to in place.
        tokens_to_remove = int(tokens_to_remove)
        if tokens_to_remove > 0:
            raise ValueError(
                f"`crop` takes the number of tokens to remove as a negative number, not {tokens_to_remove}"
            )
        self._settle()
        self._crop(tokens_to_remove)

    def _crop(self, tokens_to_remove: int) -> None:
        # In all layers, before any is changed.
        for _, hierarchical in self._hierarchical:
            hierarchical.coordinator.prepare_crop(-tokens_to_remove)
        # Windows and linear states may refuse, so they come first.
        certain = (HierarchicalLayer, DynamicLayer, DynamicIndexedLayer)
        layers = sorted(self.layers, key=lambda layer: type(layer) in certain)
        self._change(layers, lambda layer: layer.crop(tokens_to_remove))

    def crop_later(self, tokens_to_remove: int) -> None:
        """`crop`, done when the cache is next used: one that is not is spared the time of some decode steps."""
        self._settle()
        self._counted = max(self.get_seq_length() + tokens_to_remove, 0)

    def _settle(self) -> None:
        """Drops what no longer counts, or what a forward that was interrupted has left.

        Raises:
            ValueError: If the history is lost.
            MemoryError: If the memory that dropping takes cannot be had; all is as it was.
        """
        self.end_forward(failed=True)
        self._check_lost()
        self._drop_uncounted()

    def _drop_uncounted(self) -> None:
        """Drops what no longer counts. Of a model that is not patched, nothing else is heard before its forward."""
        if self._counted is not None:
            # By nothing, if all was done but this was not noted.
            self._crop(self._counted - super().get_seq_length())
            self._counted = None

    def _change(self, layers: Iterable[Any], change: Callable[[Any], None]) -> None:
        """Changes layers, of which one that comes first may refuse. If it ends between two the history is lost."""
        changed = False
        try:
            for layer in layers:
                change(layer)
                changed = True
        except BaseException as error:
            if changed or not isinstance(error, Exception):
                self._lost = "a change of all layers ended midway"
            raise

    def _prepare_batch(self, batch: int) -> None:
        """Has the memory for a batch of so many in all layers, before any is changed."""
        if self._tracing is not None:
            raise ValueError(
                "the sequences of a batch stay where they are while `record_trace` records them; end that first, and "
                "generate without beams within it"
            )
        coordinators = [layer.coordinator for _, layer in self._hierarchical]
        try:
            for coordinator in coordinators:
                coordinator.prepare_batch(batch)
        except MemoryError:
            for coordinator in coordinators:
                coordinator.prepare_batch(coordinator.batch)
            raise

    def reorder_cache(self, beam_idx: Any) -> None:
        """Keeps the sequences at `beam_idx`, which may repeat."""
        self._settle()
        self._prepare_batch(len(beam_idx))
        self._change(self.layers, lambda layer: layer.reorder_cache(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence: what they have in common is held once."""
        self.reorder_cache(torch.arange(self._batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the sequences at `indices`, which may repeat, or where a bool mask is true."""
        indices = torch.as_tensor(indices)
        self.reorder_cache(indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices)

    @property
    def _batch(self) -> int:
        """How many sequences are held."""
        held = [layer.coordinator.batch for _, layer in self._hierarchical]
        others: list[Any] = [getattr(layer, "keys", None) for layer in self.layers]
        return max(held or [len(keys) for keys in others if keys is not None], default=0)

    @property
    def untouched(self) -> bool:
        """Whether a forward that is under way has handed no layer any token."""
        if self._begun is None or self._recording:
            return False
        counting = [layer for layer in self.layers if not isinstance(layer, LinearAttentionCacheLayerMixin)]
        return {layer.get_seq_length() for layer in counting} == {self._begun[0]}

    def end_forward(self, failed: bool) -> None:
        """Called after a patched model's forward. What one that failed left in the layers before that is dropped."""
        if self._begun is None or self._recording:
            return
        length, windows = self._begun
        for _, hierarchical in self._hierarchical:
            hierarchical.coordinator.drafts = hierarchical.coordinator.prompt = 0
        if self._tracing is not None:
            self._trace(self._tracing, length, failed)
        if not failed:
            self._begun = None
            self._masks.ask()
            return
        self._masks.next = None
        # It has begun until all of it is undone, which may be interrupted too.
        if length == 0:
            self.reset()
            # Running out of it may be why the forward failed.
            for _, hierarchical in self._hierarchical:
                hierarchical.coordinator.release()
            return
        layer: Any
        for layer in self.layers:
            if isinstance(layer, HierarchicalLayer):
                layer.coordinator.undo(length)
            elif isinstance(layer, LinearAttentionCacheLayerMixin):
                self._lost = "a forward failed midway, and took the state of linear-attention layers along"
            elif type(layer) in (DynamicLayer, DynamicIndexedLayer) and layer.keys is not None:
                layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
                if getattr(layer, "indexer_keys", None) is not None:
                    layer.indexer_keys = layer.indexer_keys[:, :length]
        for layer, state in windows:
            vars(layer).update(state)
        self._begun = None

    def _check_lost(self) -> None:
        if self._lost:
            raise ValueError(
                f"the history is lost: {self._lost}; call `cache.reset()` and start again with the whole text"
            )

    def begin_forward(self, decoder: nn.Module, batch: int, tokens: int, mask: Any) -> None:
        """Called before a patched model's forward: refuses what cannot be served, before any layer changes.

        Args:
            decoder: The text decoder.
            batch, tokens: Sequences and new tokens of each.
            mask: What the decoder is given as `attention_mask`.

        Raises:
            ValueError: If the model is another one, the batch, the dtype or device of the model changed, its maximum
                position or `max_cache_len` would be passed, or the mask shows padding as tokens, or tokens as padding.
            MemoryError: If the host memory for the new tokens cannot be had; the history is intact.
        """
        if self._recording:
            return
        self._settle()
        if decoder.config is not self._text_config:
            made, here = (_kind_of(config) for config in (self._text_config, decoder.config))
            if made != here:
                raise ValueError(
                    f"the cache was made for {made}, and this is {here}; make it from the model that uses it"
                )
        coordinators = [layer.coordinator for _, layer in self._hierarchical]
        length = self.get_seq_length()
        if coordinators:
            coordinators[0].check_batch(batch)
        if self._tracing is not None:
            self._tracing.check(batch)
            self._tracing.emptied |= any(coordinator.memory is None for coordinator in coordinators)
        if self._max_length is not None and length + tokens > self._max_length:
            raise ValueError(
                f"{length} tokens in the cache and {tokens} new ones pass the model's `max_position_embeddings` of "
                f"{self._max_length}; use a shorter prompt, fewer `max_new_tokens`, or a model with scaled positions"
            )
        longest = self.config.max_cache_len
        if longest is not None and length + tokens > longest:
            raise ValueError(
                f"{length} tokens in the cache and {tokens} new ones pass `max_cache_len={longest}`; use a cache with "
                "a larger one, a shorter prompt, or fewer `max_new_tokens`"
            )
        if coordinators:
            if isinstance(mask, dict):
                mask = next((mask[kind] for kind in ("full_attention", "indexed_attention") if kind in mask), ())
            if mask is None or isinstance(mask, Tensor):
                coordinators[0].check_mask(mask, tokens, self._masks)
        parameters = _kind(decoder)
        if length and self._parameters not in (None, parameters):
            raise ValueError(
                f"the cache was filled by a model in {self._parameters[0]} on {self._parameters[1]}, which is now in "
                f"{parameters[0]} on {parameters[1]}; use a new cache after moving or casting the model"
            )
        for coordinator in coordinators:
            coordinator.reserve(tokens)
            coordinator.drafts, coordinator.prompt = self._drafts, 0
        if tokens > 1 and isinstance(mask, Tensor) and self.steps(tokens):
            prompt = last_hidden(seen_by_newest(mask, length + tokens)[:, length:])
            for coordinator in coordinators:
                coordinator.prompt = prompt
        self._parameters = parameters
        windows = [(layer, dict(vars(layer))) for layer in self.layers if getattr(layer, "is_sliding", False)]
        self._begun = length, windows

    # ---- decode steps as a graph -------------------------------------------------------------------------------------

    asked = staticmethod(deferred_stop.asked)
    """What `run_forward` asks whether its forward is one too many."""

    def run_forward(self, model: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Called in place of a patched model's forward: that, or a graph of it."""
        if self._begun is not None:
            # In a forward that is under way this is a model within a model.
            return forward(*args, **kwargs)
        if kwargs.get("use_cache") is False:
            # `generate` then gives the whole text again at every step.
            raise ValueError("`use_cache=False` is given beside a HierarchicalSparseCache; leave one of them out")
        self._settle()
        ended = self.asked(self)
        self._drafts = self._count_drafts(kwargs)
        try:
            if self.graphed is None:
                output = forward(*args, **kwargs)
            else:
                output = self.graphed(self, model, forward, args, kwargs)
        except Exception:
            if ended is not None and ended():
                raise deferred_stop.Ended from None
            raise
        finally:
            self._drafts = 0
        if ended is not None:
            needed = False
            try:
                needed = not ended()
            finally:
                if not needed:
                    self.crop_later(-1)
            if not needed:
                raise deferred_stop.Ended
        return output

    def activate_past_recording(self) -> None:
        """Called by `generate` before it decodes with drafts, of which those that it rejects are cropped."""
        self._drafting = self._drafts_begin = True
        super().activate_past_recording()

    def _count_drafts(self, kwargs: dict[str, Any]) -> int:
        """How many of a forward's last tokens are drafts of `generate`, which asks for their logits and for those of
        the one token before them: of a prompt the last, where it begins, and later the only one there is.
        """
        wanted, inputs, positions = (kwargs.get(name) for name in ("logits_to_keep", "input_ids", "position_ids"))
        inputs = kwargs.get("inputs_embeds") if inputs is None else inputs
        if not self._drafting or inputs is None:
            return 0
        begins, self._drafts_begin = self._drafts_begin, False
        length = self.get_seq_length()
        if begins and length and positions is not None and not positions.min():
            raise ValueError(
                f"`generate` with drafts reads its whole prompt, over the {length} tokens in the cache that it begins "
                "with; use a new cache, call `cache.reset()`, or generate without drafts"
            )
        drafts = wanted - 1 if isinstance(wanted, int) and wanted else 0
        return drafts if begins or drafts + 1 == inputs.shape[1] else 0

    def steps(self, tokens: int) -> int:
        """How many of `tokens` new tokens, the last ones, take decode steps, in one hierarchical layer at least."""
        return max((layer.coordinator.steps(tokens) for _, layer in self._hierarchical), default=0)

    def decodes(self, tokens: int) -> bool:
        """Whether `tokens` new tokens take decode steps from the memory, in all hierarchical layers."""
        coordinators = [layer.coordinator for _, layer in self._hierarchical]
        return bool(coordinators) and all(coordinator.decodes(tokens) for coordinator in coordinators)

    def replays(self, tokens: int, device: torch.device) -> bool:
        """Whether a forward of `tokens` new tokens on a device may be captured and replayed."""
        here = self.graphed is not None and device.type == self.graphed.recorder.device_type
        return here and tokens == 1 and self.decodes(tokens)

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may begin before it is known to be needed: it is quick then to be begun, and can be undone."""
        return self.graphed is not None and self._tracing is None and not self.has_other_layers

    def has_room(self, tokens: int) -> bool:
        """Whether so many more tokens pass no limit and need no memory that is not there yet."""
        length = self.get_seq_length() + tokens
        limits = [limit for limit in (self._max_length, self.config.max_cache_len) if limit is not None]
        return length <= min(limits, default=length) and all(
            layer.coordinator.has_room(tokens) for _, layer in self._hierarchical
        )

    def needs_masks(self, tokens: int) -> bool:
        """Whether a layer masks what `tokens` new tokens attend to: all do that attend densely. For any other it is
        enough to know the padding."""
        return self.has_other_layers or any(layer.coordinator.needs_mask(tokens) for _, layer in self._hierarchical)

    @property
    def has_other_layers(self) -> bool:
        """Whether there are layers of transformers' own."""
        return not all(isinstance(layer, HierarchicalLayer) for layer in self.layers)

    def make_room(self, tokens: int) -> None:
        """Has room for `tokens` more tokens in all layers, for which buffers may move.

        Raises:
            MemoryError: If the host memory cannot be had; the history is intact.
        """
        # Where `max_cache_len` is given there is all that will be held.
        if self.config.max_cache_len is None:
            for _, layer in self._hierarchical:
                layer.coordinator.reserve(tokens)

    def layout(self) -> Hashable:
        """Equal for as long as all buffers of a decode step lie where they are.

        Raises:
            Uncapturable: If there are layers whose buffers move at every step, or a trace is recorded.
        """
        if self._tracing is not None:
            raise Uncapturable("`record_trace` records what they select")
        if self.has_other_layers:
            others = [i for i, layer in enumerate(self.layers) if not isinstance(layer, HierarchicalLayer)]
            raise Uncapturable(f"layers {others} keep transformers' own caches, which are made anew at every step")
        return tuple(layer.coordinator.serial for _, layer in self._hierarchical)

    def advance(self) -> None:
        """Counts the token that a replayed graph has appended."""
        for _, layer in self._hierarchical:
            layer.coordinator.advance()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Within it a forward leaves what the host knows of the history as it was."""
        coordinators = [layer.coordinator for _, layer in self._hierarchical]
        lengths = [coordinator.length for coordinator in coordinators]

        def stop() -> None:
            self._recording = False
            for coordinator, length in zip(coordinators, lengths, strict=True):
                coordinator.length = length

        with undone(stop):
            self._recording = True
            yield

    def compiled(self, decoder: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Within it the decoder's hierarchical layers are run compiled, which decode steps from the memory can be."""
        return compiled_layers(decoder).serve(self)

    # ---- what it does ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def record_trace(self) -> Iterator[Trace]:
        """Within it, what every decode step selects is recorded; the trace is there when it ends.

        ```python
        with cache.record_trace() as trace:
            model.generate(**inputs, past_key_values=cache)
        trace.save("trace.npz")
        ```

        Until then a step's selections stay on the device, 4 bytes an item, layer, row and step, and nothing waits for
        them. Steps run eagerly, with a warning where they would be captured otherwise, and choose what they would have
        chosen. A forward that fails is not recorded.

        Raises:
            ValueError: If a trace is being recorded already. Within it, if the batch is reordered or changes.
        """
        if self._tracing is not None:
            raise ValueError("`record_trace` is recording already; end that first")
        self.end_forward(failed=True)
        coordinators = [layer.coordinator for _, layer in self._hierarchical]
        self._tracing = recorder = TraceRecorder()
        for coordinator in coordinators:
            coordinator.selected = []
        trace = Trace()
        if coordinators:
            model = type(self._model()).__name__
            trace = Trace(model=model, algorithm=repr(coordinators[0].algorithm), top_k=coordinators[0].top_k)
        try:
            yield trace
        finally:
            self.end_forward(failed=True)
            self._tracing = None
            for coordinator in coordinators:
                coordinator.selected = None
            recorder.fill(trace)

    def _trace(self, recorder: TraceRecorder, tokens: int, failed: bool) -> None:
        """Records a forward that ends, before which there were `tokens`."""
        coordinators = {index: layer.coordinator for index, layer in self._hierarchical}
        selected = [coordinator.selected or [] for coordinator in coordinators.values()]
        for coordinator in coordinators.values():
            coordinator.selected = []
        if failed or not selected or not all(selected):
            # The history was written anew, is dense, or is what it was before: the device buffers hold nothing.
            recorder.emptied = True
            return
        layers = []
        for index, coordinator in coordinators.items():
            memory = coordinator.memory
            about = {"page_size": memory.layout.page_size, "item_bytes": memory.item_bytes, "slots": coordinator.slots}
            layers.append({"layer": index} | about)
        # Every token of a draft is a step. What came before them was written, and emptied the buffers.
        steps = list(zip(*selected, strict=True))
        written = coordinator.length - tokens - len(steps)
        recorder.emptied |= written > 0
        for after, selections in enumerate(steps, tokens + written + 1):
            recorder.add(after, coordinator.batch, list(selections), layers)

    def stats(self) -> CacheStats:
        """Hits, misses and bytes, a layer and a step. Waits for the device."""
        layers, dense_bytes = [], 0
        for index, layer in self._hierarchical:
            coordinator = layer.coordinator
            memory = coordinator.memory
            held = (coordinator.device_bytes, coordinator.host_bytes)
            item_bytes = 0 if memory is None else memory.item_bytes
            counts, log = (None, None) if memory is None else (memory.counts(), memory.log())
            layers.append(layer_stats(index, counts, log, item_bytes, held))
            dense_bytes += coordinator.dense_bytes
        return CacheStats(layers, dense_bytes)

    def residency(self) -> Tensor:
        """Which tokens are on the device: `[layers, tokens]` float32 on the CPU, for each hierarchical layer the share
        of its rows, (sequence, KV head) pairs, that have a token there. Waits for the device."""
        length = self.get_seq_length()
        lines = [layer.coordinator.residency() for _, layer in self._hierarchical]
        return torch.stack([line[:length] for line in lines]) if lines else torch.zeros(0, length)

    def plot(self) -> Any:
        """Hit rates by layer and step, and which tokens are on the device by layer: a matplotlib `Figure`, which a
        notebook shows. Waits for the device.

        Raises:
            ImportError: If matplotlib is not installed, which `pip install 'hf-hisparse[plot]'` does.
        """
        return plotting.plot(self.stats(), self.residency())

    def _repr_html_(self) -> str:
        """What a notebook shows. Waits for the device."""
        stats = self.stats()
        coordinators = [layer.coordinator for _, layer in self._hierarchical]
        batch = max((coordinator.batch for coordinator in coordinators), default=1)
        facts = [
            ("tokens", f"{self.get_seq_length():,} x {max(batch, 1)}"),
            ("hierarchical layers", f"{len(coordinators)} of {len(self.layers)}"),
            ("selection", ", ".join({f"{each.algorithm!r}, top_k={each.top_k}" for each in coordinators}) or "none"),
            ("on the device", f"{stats.device_bytes / 2**20:.1f} MiB; dense, {stats.dense_bytes / 2**20:.1f} MiB"),
            ("in host memory", f"{stats.host_bytes / 2**20:.1f} MiB"),
        ]
        if stats.hit_rate is not None:
            moved = f"{stats.bytes_moved / 2**20:.1f} MiB fetched"
            facts.append(("hit rate", f"{stats.hit_rate:.1%} of {stats.hits + stats.misses:,} items; {moved}"))
        return plotting.html(type(self).__name__, facts, stats)

    def __repr__(self) -> str:
        hierarchical = [layer.coordinator for _, layer in self._hierarchical]
        if not hierarchical:
            return (
                f"HierarchicalSparseCache({self.get_seq_length()} tokens, 0 of {len(self.layers)} layers hierarchical)"
            )
        first = hierarchical[0]
        device = sum(coordinator.device_bytes for coordinator in hierarchical)
        host = sum(coordinator.host_bytes for coordinator in hierarchical)
        return (
            f"HierarchicalSparseCache({self.get_seq_length()} tokens x {max(first.batch, 1)}, {len(hierarchical)} of "
            f"{len(self.layers)} layers hierarchical, top_k={first.top_k}, {first.algorithm!r}, "
            f"{device / 2**20:.1f} MiB on the device, {host / 2**20:.1f} MiB on the host)"
        )


def _saved_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those of `SAVED_OPTIONS` that are given, as plain values."""
    given = {name: options[name] for name in SAVED_OPTIONS if name in options}
    if "dense_layers" in given:
        given["dense_layers"] = sorted(given["dense_layers"])
    if isinstance(method := given.get("algorithm"), type):
        given["algorithm"] = f"{method.__module__}.{method.__qualname__}"
    return given


def _kind(decoder: nn.Module) -> tuple[torch.dtype, torch.device]:
    """The dtype and the device of a decoder's first parameter."""
    return next(decoder.parameters()).dtype, device_of(decoder)


def _kind_of(config: Any) -> str:
    """What a model is, in words, as far as its cache has layers of other kinds than that of another model."""
    return f"{config.num_hidden_layers} layers of `{config.model_type}`"


def _max_length(config: Any) -> int | None:
    """The most positions that a model takes, or None where its config does not say."""
    longest = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    scaled = rope if "factor" in rope else next((r for r in rope.values() if isinstance(r, dict) and "factor" in r), {})
    original = scaled.get("original_max_position_embeddings") or longest
    if longest is None or not scaled.get("factor"):
        return longest
    return max(longest, int(original * scaled["factor"]))
