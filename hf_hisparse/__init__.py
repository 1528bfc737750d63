"""Long context for Hugging Face transformers: the KV history in host memory, a small working set on the GPU."""

from hf_hisparse.cache import HierarchicalSparseCache
from hf_hisparse.config import HiSparseConfig
from hf_hisparse.generation import disable, enable
from hf_hisparse.models import patch_model, unpatch_model


__version__ = "0.1.0"

__all__ = ["HiSparseConfig", "HierarchicalSparseCache", "disable", "enable", "patch_model", "unpatch_model"]
