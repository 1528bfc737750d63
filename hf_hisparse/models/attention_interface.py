"""Any model on transformers' attention interface: its attention modules, run over a hierarchical history.

No model code is copied and nothing shared is changed. A forward pre-hook on the attention module acts only when the
cache is ours: for that one call it names our attention function in the module's view of its config, and hands it the
layer's coordinator through a keyword argument, which attention modules pass on. With any other cache, or none, the
hook does nothing and the module runs as it always did, also in one thread while another is within a call of ours.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_hisparse.algorithms import ALGORITHMS, AUTO, KeyScoring
from hf_hisparse.config import HiSparseConfig
from hf_hisparse.coordinator import SparseCoordinator
from hf_hisparse.layout import ItemLayout
from hf_hisparse.models.config_view import ConfigView


NAME = "hisparse"
"""The name that our attention function is registered under, and of the keyword argument that reaches it."""
COMPILED = "hisparse_compiled"
"""The name of the attention function of a module within a compiled layer."""

UNSERVED = ("sliding_window", "position_bias")
"""Arguments of an attention function that a hierarchical layer has no meaning for."""

_changing = threading.Lock()
"""Held while a thread enters or leaves a module."""


def hisparse_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The attention function of a patched module: passes the call to the patch that the pre-hook named."""
    attend = kwargs.pop(NAME)
    refuse_dropout(kwargs)
    output = attend(query, key, value, attention_mask, **kwargs)
    if torch.is_grad_enabled() and any(states.requires_grad for states in (query, key, value)):
        output = _NoBackward.apply(output.detach(), query, key, value)
    return output, None


def softmax_scale(query: Tensor, scaling: float | None) -> float:
    """What the logits of queries `[..., width]` are multiplied by: None stands for the usual scale."""
    return query.shape[-1] ** -0.5 if scaling is None else scaling


def refuse_dropout(kwargs: dict[str, Any]) -> None:
    """Raises `ValueError` if an attention function is given a rate of dropout, as it is in training mode."""
    if kwargs.get("dropout"):
        raise ValueError(
            f"attention over a HierarchicalSparseCache drops nothing out, and is given dropout={kwargs['dropout']}; "
            "call `model.eval()`"
        )


class _NoBackward(torch.autograd.Function):
    """Attention whose gradients cannot be had: a history keeps none, and those of what is left would be wrong."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *states: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ValueError(
            "no gradients pass through a HierarchicalSparseCache, whose history keeps none; give a forward that "
            "`backward` follows another cache, or none"
        )


ALL_ATTENTION_FUNCTIONS.register(NAME, hisparse_attention_forward)


class _AttentionView(ConfigView):
    """A config that names an attention function of ours to threads that have entered the module, each its own, and is
    the module's own in everything else."""

    def __init__(self, config: Any, entered: dict[int, tuple[weakref.ref[SparseCoordinator], str]]):
        super().__init__(config)
        self._entered = entered

    @property
    def _attn_implementation(self) -> str:
        # What is traced is a compiled layer, whichever thread does it.
        if torch.compiler.is_compiling():
            return COMPILED
        _, name = self._entered.get(threading.get_ident(), (None, None))
        return name or self._config._attn_implementation


def given_cache(args: tuple, kwargs: dict[str, Any]) -> Cache | None:
    """The cache among a forward's arguments, whatever its name: `cache`, `past_key_values`, `layer_past`."""
    return next((value for value in (*kwargs.values(), *args) if isinstance(value, Cache)), None)


def cache_argument(model: nn.Module) -> str:
    """The keyword that a model takes the cache by. Before transformers 5.22: `past_key_values`."""
    parameters = inspect.signature(transformers_model(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def transformers_model(model: nn.Module) -> nn.Module:
    """The transformers model that an adapter or `torch.compile` has wrapped, or that it is."""
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)


def coordinator_of(cache: Any, layer_idx: int) -> SparseCoordinator | None:
    """The coordinator of a layer, if the cache is ours and the layer is hierarchical."""
    layers = getattr(cache, "layers", ())
    return getattr(layers[layer_idx], "coordinator", None) if layer_idx < len(layers) else None


class AttentionPatch:
    """The hooks on one attention module, and the attention function that they lead to.

    Args:
        module: An attention module for which `refusal` is None.
    """

    bases: tuple[str, ...] = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")
    """Attention implementations that can serve the dense steps."""

    def __init__(self, module: nn.Module):
        self.module: Any = module
        self.config: Any = module.config
        self._entered: dict[int, tuple[weakref.ref[SparseCoordinator], str]] = {}
        """Whose new tokens, and the name of the attention function, for every thread that is within the module. What an
        interrupt has left here is to hold no history."""
        self._handles = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after, always_call=True),
        ]

    # ---- what it applies to ------------------------------------------------------------------------------------------

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        """Whether this is the patch for such a module: the first match in the registry is taken."""
        forward = inspect.unwrap(type(module).forward)
        on_interface = "ALL_ATTENTION_FUNCTIONS" in getattr(getattr(forward, "__code__", None), "co_names", ())
        return isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "config") and on_interface

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        """Why a module that matches cannot be patched, or None."""
        forward = inspect.unwrap(type(module).forward)
        parameters = inspect.signature(forward).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return "its attention takes no extra keyword arguments"
        if getattr(module, "is_kv_shared_layer", False) or getattr(module, "store_full_length_kv", False):
            return "it shares its keys and values with other layers"
        if getattr(module, "indexer", None) is not None:
            return "its indexer does not hand its selection to the attention function"
        return None

    @staticmethod
    def follows(module: nn.Module) -> bool:
        """Whether such a module attends to what the layer before it selected."""
        return False

    @staticmethod
    def make_coordinator(module: nn.Module, config: HiSparseConfig, backend: Any) -> SparseCoordinator:
        """A coordinator for the layer of such a module."""
        name = AUTO if config.algorithm == "auto" else config.algorithm
        method = ALGORITHMS.get(name) if isinstance(name, str) else name
        if not (isinstance(method, type) and issubclass(method, KeyScoring)):
            raise ValueError(
                f"`algorithm` must be 'auto', one of {sorted(ALGORITHMS)} or a subclass of `KeyScoring`, not {name!r}"
            )
        top_k = 2048 if config.top_k is None else config.top_k
        recent = min(method.recent_tokens, top_k // 4) if config.recent_tokens is None else config.recent_tokens

        def algorithm() -> KeyScoring:
            return method(config.page_size, config.sink_tokens, recent)

        example = algorithm()
        page_size = example.page_size
        k, held = config.resolve(page_size, top_k, example.kept_items)
        layout = partial(ItemLayout.page_head, page_size)
        slots = held if config.offload else None
        return SparseCoordinator(
            top_k, k, slots, layout, algorithm, backend, config.max_cache_len, config.max_draft_tokens
        )

    # ---- the hooks ---------------------------------------------------------------------------------------------------

    def _before(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        # An interrupt, unlike an error, calls no hook: the module may still be as it was entered.
        self.leave()
        coordinator = coordinator_of(given_cache(args, kwargs), module.layer_idx)
        if coordinator is None:
            return None
        base = self.config._attn_implementation
        if base not in self.bases:
            raise ValueError(
                f"`attn_implementation={base!r}` cannot serve the dense steps of a hierarchical cache; "
                f"use `model.set_attn_implementation` with one of {self.bases}"
            )
        self.enter(coordinator)
        return args, {**kwargs, NAME: partial(self.attend, coordinator)}

    def enter(self, coordinator: SparseCoordinator, name: str = NAME) -> None:
        """From here on this thread's new tokens go to a coordinator, by the attention function of that name."""
        self.leave()
        coordinator.enter()
        with _changing:
            if not self._entered:
                self._replace()
            self._entered[threading.get_ident()] = weakref.ref(coordinator), name

    def leave(self) -> None:
        """Undoes `enter`, if there is anything to undo."""
        if self._entered and threading.get_ident() in self._entered:
            with _changing:
                entered = self._entered.pop(threading.get_ident())
                if not self._entered:
                    self._restore()
            self._stop(entered)

    @staticmethod
    def _stop(entered: tuple[weakref.ref[SparseCoordinator], str]) -> None:
        coordinator = entered[0]()
        if coordinator is not None:
            coordinator.leave()

    def _replace(self) -> None:
        """Changes of the module what its forward, run by a thread that has entered it, is to find changed."""
        self.module.config = _AttentionView(self.config, self._entered)

    def _restore(self) -> None:
        """Undoes `_replace`."""
        self.module.config = self.config

    def _after(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.leave()

    def remove(self) -> None:
        """Takes the hooks off, and undoes what an interrupt has left."""
        with _changing:
            for entered in self._entered.values():
                self._stop(entered)
            if self._entered:
                self._entered.clear()
                self._restore()
        for handle in self._handles:
            handle.remove()

    # ---- attention ---------------------------------------------------------------------------------------------------

    def dense_function(self) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """The attention function that the module would have used."""
        eager = inspect.unwrap(type(self.module).forward).__globals__.get("eager_attention_forward")
        return ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)

    def attend(
        self,
        coordinator: SparseCoordinator,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of new tokens over the layer's history and themselves.

        Args:
            query: `[batch, heads, new, width]`.
            key, value: `[batch, kv_heads, new, width]`, of the new tokens alone.
            attention_mask: What the dense steps are masked by, as transformers made it.
            scaling, softcap, s_aux: The softmax scale, the logits' cap, and the sink logits of the heads.

        Returns:
            `[batch, new, heads, value_width]`.
        """
        unserved = [f"with `{name}`" for name in UNSERVED if kwargs.get(name) is not None]
        if attention_mask is not None and attention_mask.ndim == 4 and attention_mask.shape[1] > 1:
            unserved.append("with a mask for every head")
        if not coordinator.attending:
            unserved.append("that a module calls more than once")
        if unserved:
            raise ValueError(
                f"a hierarchical layer cannot serve attention {unserved[0]}; name layer {self.module.layer_idx} in "
                "`dense_layers`"
            )
        coordinator.attending = False
        new = query.shape[2]
        prompt = new - coordinator.steps(new)
        outputs = []
        if prompt:
            mask = attention_mask
            if mask is not None and prompt < new:
                mask = (mask if mask.ndim == 2 else mask[:, :, :prompt])[..., : coordinator.length + prompt]
            optional = {"softcap": softcap, "s_aux": s_aux}
            kwargs |= {name: value for name, value in optional.items() if value is not None}
            q, k, v = (states[:, :, :prompt] for states in (query, key, value))
            outputs.append(self._attend_densely(coordinator, q, k, v, mask, scaling=scaling, **kwargs))
        # One after the other, since the selections of two tokens together may be more than the buffer holds, and each
        # is made from what is represented up to its token.
        for t in range(prompt, new):
            q, k, v = (states[:, :, t : t + 1] for states in (query, key, value))
            outputs.append(self._step(coordinator, q, k, v, attention_mask, scaling, softcap, s_aux))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _attend_densely(
        self,
        coordinator: SparseCoordinator,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of new tokens over the whole history and themselves."""
        key, value = coordinator.extend((key, value), mask)
        return self.dense_function()(self.module, query, key, value, mask, **kwargs)[0]

    @staticmethod
    def _step(
        coordinator: SparseCoordinator,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        softcap: float | None,
        s_aux: Tensor | None,
    ) -> Tensor:
        """The decode step of one token."""
        batch, heads = query.shape[:2]
        scaling = softmax_scale(query, scaling)
        coordinator.append((key, value), mask)
        grouped = coordinator.grouped(query)
        selection = coordinator.retrieve(grouped, scaling)
        sinks = None if s_aux is None else s_aux.view(coordinator.heads, -1).repeat(batch, 1)
        output = coordinator.attend(grouped, selection, scaling, softcap=softcap, sinks=sinks)
        return output.view(batch, 1, heads, -1)
