"""Which patch fits which attention module, and the hooks that a patched model carries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hf_hisparse.models.attention_interface import AttentionPatch, given_cache
from hf_hisparse.models.dsa import LatentPatch


PATCHES: tuple[type[AttentionPatch], ...] = (LatentPatch, AttentionPatch)
"""The model families, the most particular first."""

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
        self._handles = [
            decoder.register_forward_pre_hook(self._before, with_kwargs=True),
            decoder.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    @staticmethod
    def _before(decoder: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        begin: Callable | None = getattr(given_cache(args, kwargs), "begin_forward", None)
        if begin is None:
            return
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
        if inputs is not None:
            begin(decoder, *inputs.shape[:2])

    @staticmethod
    def _after(decoder: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        end: Callable | None = getattr(given_cache(args, kwargs), "end_forward", None)
        if end is not None:
            end(failed=output is None)

    def remove(self) -> None:
        """Takes every hook off."""
        for handle in self._handles:
            handle.remove()
        for patch in self.layers.values():
            patch.remove()


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
    if _ATTRIBUTE in decoder.__dict__:
        return decoder.__dict__[_ATTRIBUTE]
    patch = ModelPatch(decoder)
    if not patch.layers:
        patch.remove()
        reasons = sorted(set(patch.refusals.values())) or ["no layer is on transformers' attention interface"]
        raise ValueError(f"`model` ({type(model).__name__}) cannot be patched: {'; '.join(reasons)}")
    decoder.__dict__[_ATTRIBUTE] = patch
    return patch


def is_patched(model: nn.Module) -> bool:
    """Whether `patch_model` was called for a model, and not undone."""
    return hasattr(model, "get_decoder") and _ATTRIBUTE in model.get_decoder().__dict__  # type: ignore[operator]


def unpatch_model(model: nn.Module) -> None:
    """Takes the hooks of `patch_model` off. Nothing happens if there are none."""
    patch = model.get_decoder().__dict__.pop(_ATTRIBUTE, None)  # type: ignore[operator]
    if patch is not None:
        patch.remove()
