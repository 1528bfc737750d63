"""The patches that let a model's own attention modules run over a hierarchical history."""

from hf_hisparse.models.attention_interface import cache_argument
from hf_hisparse.models.registry import ModelPatch, compiled_layers, is_patched, patch_model, unpatch_model


__all__ = ["ModelPatch", "cache_argument", "compiled_layers", "is_patched", "patch_model", "unpatch_model"]
