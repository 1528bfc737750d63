"""Regional compilation: decoder layers run by `torch.compile`, all that are alike by one compilation.

A decode step is many small kernels: norms, rotary embeddings, activations, additions. Compiled, each run of them
between two matrix products is one. What a layer does with its history cannot be traced, and need not be: it is one
operation of its own, `hf_hisparse::layer_attention`, opaque to the compiler, and for a model with an indexer another,
`hf_hisparse::layer_selection`. Whose history that is, the compiled code does not know: `CompiledLayers` says so before
it calls a layer. So nothing in the code of a layer depends on which layer it is.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_hisparse.coordinator import SparseCoordinator
from hf_hisparse.interrupts import undone
from hf_hisparse.models.attention_interface import (
    COMPILED,
    UNSERVED,
    AttentionPatch,
    coordinator_of,
    refuse_dropout,
    softmax_scale,
)
from hf_hisparse.models.dsa import IndexerKeys, select


class SelectFirst(CustomGraphPass):
    """Puts what a selection does not need behind it, so that it runs beside that: the projections of key and value, or
    of a query that its indexer does not ask with."""

    def __call__(self, graph: fx.Graph) -> None:
        ops = torch.ops.hf_hisparse
        selections = graph.find_nodes(op="call_function", target=ops.layer_retrieval.default)
        for node in graph.find_nodes(op="call_function", target=ops.layer_selection.default):
            # Whoever else looked at the selection would have to wait for it.
            readers = {user.target for user in node.users} - {"output"}
            if readers == {ops.layer_attention.default}:
                node.update_kwarg("beside", True)
                selections.append(node)
        for selection in selections:
            nodes, needed = list(graph.nodes), {selection}
            for node in reversed(nodes[: nodes.index(selection) + 1]):
                if node in needed:
                    needed.update(node.all_input_nodes)
                elif node.op != "placeholder":
                    selection.append(node)

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))


OPTIONS: dict[str, Any] = {
    "fullgraph": True,
    # Fused operations round where single ones do, so that a low precision gives the same.
    "options": {"emulate_precision_casts": True, "post_grad_custom_post_pass": SelectFirst()},
}
"""Arguments of `torch.compile`."""


class _Running(NamedTuple):
    """The layer that is being run."""

    patch: AttentionPatch
    coordinator: SparseCoordinator
    thread: int
    """Which may run it. To others the layer is as it was."""


_running: ContextVar[_Running] = ContextVar("_running")


@torch.library.custom_op("hf_hisparse::layer_attention", mutates_args=())
def layer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    value_width: int,
    scaling: float | None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
) -> Tensor:
    """The decode step of the layer that is being run: appends one token to its history, and attends to a selection.

    Args:
        query, key, value, scaling, softcap, s_aux, indices: As for the `attend` of the layer's patch.
        value_width: Elements of a head's output.

    Returns:
        `[batch, 1, heads, value_width]`.
    """
    running = _running.get()
    # What a new token may attend to is known without a mask.
    output = running.patch.attend(
        running.coordinator, query, key, value, None, scaling=scaling, softcap=softcap, s_aux=s_aux, indices=indices
    )
    return output.contiguous()


@layer_attention.register_fake
def _(query, key, value, value_width, scaling, softcap=None, s_aux=None, indices=None):
    batch, heads, new, _ = query.shape
    return query.new_empty(batch, new, heads, value_width)


@torch.library.custom_op("hf_hisparse::layer_retrieval", mutates_args=())
def layer_retrieval(query: Tensor, scaling: float | None) -> Tensor:
    """Has the layer that is being run begin its selection, of which the projections of key and value are no part.

    Args:
        query, scaling: As for `layer_attention`.

    Returns:
        The query, for `layer_attention`: a copy, since the memory of an argument may be another's as soon as this
        returns, and the selection still reads it.
    """
    query, coordinator = query.clone(memory_format=torch.contiguous_format), _running.get().coordinator
    coordinator.retrieve_ahead(coordinator.grouped(query), softmax_scale(query, scaling))
    return query


@layer_retrieval.register_fake
def _(query, scaling):
    return query.new_empty(query.shape)


@torch.library.custom_op("hf_hisparse::layer_selection", mutates_args=())
def layer_selection(
    keys: Tensor, query: Tensor, weights: Tensor, scale: float, k: int, *, beside: bool = False
) -> Tensor:
    """The selection of the layer that is being run, by the model's own indexer.

    Args:
        keys: `[batch, 1, width]`, the indexer key of the new token.
        query: `[batch, 1, heads, width]`.
        weights, scale: As for `LightningIndexer.retrieve_topk`.
        k: How many tokens.
        beside: Whether nothing reads the selection before `layer_attention` does, so that it may be made until then.

    Returns:
        `[batch, 1, k]` int32.
    """
    coordinator = _running.get().coordinator

    def selected(keys: Tensor, query: Tensor, weights: Tensor) -> Tensor:
        return select(coordinator, keys, query, weights, scale, None, k)

    if not beside:
        return selected(keys, query, weights)
    # Of copies, as in `layer_retrieval`.
    return coordinator.beside(selected, keys.clone(), query.clone(), weights.clone())


@layer_selection.register_fake
def _(keys, query, weights, scale, k, *, beside=False):
    return query.new_empty(query.shape[0], query.shape[1], k, dtype=torch.int32)


class TracedKeys(IndexerKeys):
    """What a compiled indexer sees of its keys.

    Args:
        keys: `[batch, 1, width]`, that of the new token.
    """

    def __init__(self, keys: Tensor):
        self.keys = keys
        self.query = self.weights = self.mask = None
        self.scale = 1.0

    @property
    def shape(self) -> Any:
        # A selection is made from more tokens than it has.
        return (1 << 62,)

    def topk(self, k: int, dim: int = -1) -> IndexerKeys:
        self.indices = layer_selection(self.keys, self.query, self.weights.squeeze(-2), self.scale, k)
        return self


class TracedCache:
    """What a compiled layer is given for a cache, whichever layer it is: new states are handed on to its attention."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, *args: Any) -> TracedKeys:
        return TracedKeys(indexer_key_states)


def compiled_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of a module within a compiled layer; see `AttentionPatch.attend`."""
    refuse_dropout(kwargs)
    for name in UNSERVED:
        if kwargs.get(name) is not None:
            raise ValueError(f"a hierarchical layer cannot serve attention with `{name}`")
    if indices is None:
        query, width = layer_retrieval(query, scaling), value.shape[-1]
    else:
        # With an indexer's selection come latents, which are wider than what they expand to.
        width = module.v_head_dim
    return layer_attention(query, key, value, width, scaling, softcap, s_aux, indices), None


ALL_ATTENTION_FUNCTIONS.register(COMPILED, compiled_attention_forward)


@contextlib.contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """Within it a module has no hooks. Each has a number of its own, which compiled code would depend on."""
    held = {name: vars(module)[name] for name in ("_forward_hooks", "_forward_pre_hooks")}
    with undone(lambda: vars(module).update(held)):
        vars(module).update({name: OrderedDict() for name in held})
        yield


def _run(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


class CompiledLayers:
    """The decoder layers around a model's patched attention modules.

    Args:
        decoder: The text decoder.
        patches: The patch of each of its attention modules, by layer.

    Raises:
        ValueError: If one of them lies in no layer: in no member of a `ModuleList`.
    """

    def __init__(self, decoder: nn.Module, patches: dict[int, AttentionPatch]):
        lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
        around: dict[int, nn.Module] = {}
        for block in chain.from_iterable(lists):
            for module in block.modules():
                around.setdefault(id(module), block)
        if outside := [index for index, patch in patches.items() if id(patch.module) not in around]:
            raise ValueError(f"the attention of layers {outside} is in no `ModuleList`")
        self._layers = [(around[id(patch.module)], patch) for patch in patches.values()]
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self._cache = TracedCache()

    def __getstate__(self) -> dict[str, Any]:
        """A copy compiles for itself."""
        return vars(self) | {"_compiled": {}}

    @contextlib.contextmanager
    def serve(self, cache: Any) -> Iterator[None]:
        """Within it the hierarchical layers of a cache are run compiled. Only for decode steps from the memory.

        Raises:
            ValueError: If a layer's `forward` was replaced.
        """
        served: list[nn.Module] = []
        with undone(lambda: [vars(layer).pop("forward", None) for layer in served]):
            for layer, patch in self._layers:
                coordinator = coordinator_of(cache, patch.module.layer_idx)
                if coordinator is None:
                    continue
                if "forward" in vars(layer):
                    raise ValueError(f"a {type(layer).__name__} has a `forward` of its own")
                served.append(layer)
                running = _Running(patch, coordinator, threading.get_ident())
                vars(layer)["forward"] = partial(self._forward, layer, running)
            yield

    def _forward(self, layer: nn.Module, running: _Running, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != running.thread:
            return _run(layer, *args, **kwargs)
        args = tuple(self._traced(value) for value in args)
        kwargs = {name: self._traced(value) for name, value in kwargs.items()}
        token = _running.set(running)
        running.patch.enter(running.coordinator, COMPILED)
        try:
            with without_hooks(running.patch.module):
                return self._compile(layer)(layer, *args, **kwargs)
        finally:
            running.patch.leave()
            _running.reset(token)

    def _compile(self, layer: nn.Module) -> Callable[..., Any]:
        """What runs a layer compiled, the same for all that are alike."""
        kind = tuple((name, type(module)) for name, module in layer.named_modules())
        if kind not in self._compiled:
            # PyTorch keeps compilations by code, and only a few of each: for other shapes, for other settings.
            code = _run.__code__.replace(co_name=type(layer).__name__)
            self._compiled[kind] = torch.compile(types.FunctionType(code, globals()), **OPTIONS)
        return self._compiled[kind]

    def _traced(self, value: Any) -> Any:
        return self._cache if isinstance(value, Cache) else value
