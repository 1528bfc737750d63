"""The patches that let a model's own attention modules run over a hierarchical history."""

from hf_hisparse.models.attention_interface import cache_argument
from hf_hisparse.models.registry import ModelPatch, is_patched, patch_model, unpatch_model


__all__ = ["ModelPatch", "cache_argument", "is_patched", "patch_model", "unpatch_model"]
