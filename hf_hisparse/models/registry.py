"""Which patch fits which attention module, and the hooks that a patched model carries."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_hisparse.deferred_stop import LOOP, DecodingLoop, defer_stop_checks
from hf_hisparse.models.attention_interface import AttentionPatch, given_cache, transformers_model
from hf_hisparse.models.dsa import LatentPatch
from hf_hisparse.models.experts import Experts
from hf_hisparse.models.regional import CompiledLayers


PATCHES: tuple[type[AttentionPatch], ...] = (LatentPatch, AttentionPatch)
"""The model families, the most particular first."""

_patching = threading.Lock()
"""Held while a model is patched or unpatched: two threads may make the first two caches of a model at once."""

_ATTRIBUTE = "_hisparse_patch"
"""Where a decoder carries its patch, so that a copy of the model has its own, and models that share it share one."""


class ModelPatch:
    """The hooks on a model's decoder and on its attention modules.

    Args:
        decoder: The text decoder of a transformers model.
    """

    def __init__(self, decoder: nn.Module):
        self.layers: dict[int, AttentionPatch] = {}
        self.refusals: dict[int, str] = {}
        module: Any
        for module in decoder.modules():
            family = next((patch for patch in PATCHES if patch.matches(module)), None)
            if family is None:
                continue
            reason = family.refusal(module)
            if reason is None:
                self.layers[module.layer_idx] = family(module)
            else:
                self.refusals[module.layer_idx] = reason
        self.compiled: CompiledLayers | None = None
        """Its layers compiled, once that was asked for."""
        self._experts = Experts(decoder)
        self._handles = [
            decoder.register_forward_pre_hook(self._before, with_kwargs=True),
            decoder.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def _before(self, decoder: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        # An interrupt, unlike an error, calls no hook: a step may have been left without its end.
        self._experts.end()
        cache: Any = given_cache(args, kwargs)
        if not hasattr(cache, "begin_forward"):
            return None
        wanted = kwargs.get("output_attentions")
        wanted = getattr(decoder.config, "output_attentions", False) if wanted is None else wanted
        if wanted and decoder.config._attn_implementation == "eager":
            raise ValueError(
                "`output_attentions=True`: attention over a hierarchical cache keeps no weights; leave it out, or use "
                "another cache"
            )
        inputs = kwargs.get("inputs_embeds")
        if inputs is None:
            inputs = kwargs.get("input_ids", args[0] if args else None)
        if inputs is None:
            return None
        batch, tokens = inputs.shape[:2]
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        cache.begin_forward(decoder, batch, tokens, mask)
        if cache.replays(tokens, inputs.device):
            self._experts.begin()
        mask = kwargs.get("attention_mask", ())
        if tokens > 1 and isinstance(mask, Tensor) and cache.steps(tokens):
            # The tokens of a draft are stored one by one, each as far as it sees those before it.
            newest_mask(mask, batch, cache.get_seq_length(), tokens, inputs.device)
        if (
            (mask is None or isinstance(mask, Tensor))
            and not cache.needs_masks(tokens)
            # Some models count positions by the mask, though none that selects for every token of a prompt.
            and (tokens > 1 or kwargs.get("position_ids") is not None)
        ):
            if cache.decodes(tokens):
                # Padding is part of the history: the mask of a decode step only repeats it. Making one would take
                # kernels whose shapes change at every step, and a wait for the device.
                mask = inputs.new_ones((batch, 1, 1, 1), dtype=torch.bool)
            else:
                mask = newest_mask(mask, batch, cache.get_seq_length(), tokens, inputs.device)
            kwargs = kwargs | {"attention_mask": mask}
        return args, kwargs

    def _after(self, decoder: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        self._experts.end()
        cache: Any = given_cache(args, kwargs)
        if not hasattr(cache, "end_forward"):
            return
        unused = output is not None and cache.untouched
        cache.end_forward(failed=output is None)
        if unused:
            raise ValueError(
                "the model's layers ran without the cache, as they do in training mode where gradients are "
                "checkpointed; call `model.eval()` or `model.gradient_checkpointing_disable()`"
            )

    def remove(self) -> None:
        """Takes every hook off."""
        self._experts.remove()
        for handle in self._handles:
            handle.remove()
        for patch in self.layers.values():
            patch.remove()


def newest_mask(mask: Tensor | None, batch: int, length: int, tokens: int, device: torch.device) -> Tensor:
    """What the newest query sees, `[batch, 1, 1, length + tokens]` bool, where every other one sees what of that is not
    after itself. A mask of four dimensions is passed on by a model as it is.

    Making the mask of every query would take memory that grows with the square of a prompt.

    Args:
        mask: As the model is given it: None, `[batch, length + tokens]`, or `[batch, 1, tokens, length + tokens]`.
        batch, length, tokens: Sequences, tokens in the cache, and new ones.
        device: Of the inputs.

    Raises:
        ValueError: If a query sees anything else.
    """
    total = length + tokens
    if mask is None:
        return torch.ones(batch, 1, 1, total, dtype=torch.bool, device=device)
    mask = mask.to(device)
    additive = mask.ndim > 2 and mask.is_floating_point()
    seen = mask >= 0 if additive else mask.bool()
    seen = seen[:, None, None] if mask.ndim == 2 else seen
    if seen.shape[-1] != total:
        raise ValueError(
            f"`attention_mask` of shape {list(mask.shape)} is for {mask.shape[-1]} tokens, and there are {total}: "
            f"{length} in the cache and {tokens} new ones; give one of [{batch}, {total}]"
        )
    newest = seen[:, :, -1:]
    if seen.shape[2] > 1:
        position = torch.arange(total, device=device)
        if not torch.equal(seen, newest & (position <= position[length:].unsqueeze(1))):
            raise ValueError(
                f"`attention_mask` of shape {list(mask.shape)} shows another query than the newest something else than "
                "the same tokens up to itself, and where every token has a selection there is no other mask; give a "
                f"padding mask of [{batch}, {total}]"
            )
    return newest.expand(batch, -1, -1, -1)


class PatchedForward:
    """A model's forward, which a cache of ours may run in a way of its own. With any other it is the model's.

    Args:
        model: The model, whose `forward` this replaces.
    """

    def __init__(self, model: nn.Module):
        self.model, self.held = model, vars(model).get("forward")
        functools.update_wrapper(self, model.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = functools.partial(type(self.model).forward, self.model) if self.held is None else self.held
        run = getattr(given_cache(args, kwargs), "run_forward", None)
        return forward(*args, **kwargs) if run is None else _run(run, self.model, forward, args, kwargs)


@torch.compiler.disable(reason="a forward over a HierarchicalSparseCache is compiled by `compile=True`, layer by layer")
def _run(run: Callable[..., Any], *args: Any) -> Any:
    """A forward over a cache of ours: what it does on the host is not to be traced, nor fixed in compiled code."""
    return run(*args)


def patch_forward(model: nn.Module) -> None:
    """Puts a `PatchedForward` in front of a transformers model, or of the one that an adapter's wrapper holds, and a
    `DecodingLoop` around its decoding."""
    model = transformers_model(model)
    if not isinstance(vars(model).get("forward"), PatchedForward):
        vars(model)["forward"] = PatchedForward(model)
    defer_stop_checks(model)


def unpatch_forward(model: nn.Module) -> None:
    """Undoes `patch_forward`."""
    for module in model.modules():
        for name in ("forward", LOOP):
            ours = vars(module).get(name)
            if isinstance(ours, (PatchedForward, DecodingLoop)):
                del vars(module)[name]
                if ours.held is not None:
                    vars(module)[name] = ours.held


def patch_model(model: nn.Module) -> ModelPatch:
    """Lets a model's attention run over a hierarchical cache. With any other cache the model stays as it was.

    Idempotent, and undone by `unpatch_model`.

    Raises:
        ValueError: If the model is an encoder-decoder, or not on transformers' attention interface.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_decoder"):
        raise ValueError(f"`model` must be a transformers model, not {type(model).__name__}")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"`model` is an encoder-decoder ({type(model).__name__}), whose cross-attention a hierarchical cache "
            "cannot serve; use a decoder-only model"
        )
    decoder = model.get_decoder()  # type: ignore[operator]
    with _patching:
        patch = decoder.__dict__.get(_ATTRIBUTE)
        if patch is None:
            patch = ModelPatch(decoder)
            if not patch.layers:
                patch.remove()
                reasons = sorted(set(patch.refusals.values())) or ["no layer is on transformers' attention interface"]
                raise ValueError(f"`model` ({type(model).__name__}) cannot be patched: {'; '.join(reasons)}")
            decoder.__dict__[_ATTRIBUTE] = patch
        patch_forward(model)
    return patch


def compiled_layers(decoder: nn.Module) -> CompiledLayers:
    """The layers of a patched model's decoder, compiled when they are first run."""
    patch = decoder.__dict__[_ATTRIBUTE]
    if patch.compiled is None:
        patch.compiled = CompiledLayers(decoder, patch.layers)
    return patch.compiled


def is_patched(model: nn.Module) -> bool:
    """Whether `patch_model` was called for a model, and not undone."""
    return hasattr(model, "get_decoder") and _ATTRIBUTE in model.get_decoder().__dict__  # type: ignore[operator]


def unpatch_model(model: nn.Module) -> None:
    """Takes the hooks of `patch_model` off. Nothing happens if there are none."""
    with _patching:
        patch = model.get_decoder().__dict__.pop(_ATTRIBUTE, None)  # type: ignore[operator]
        if patch is not None:
            patch.remove()
            unpatch_forward(model)
