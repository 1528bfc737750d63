"""Where the bytes of a layer's history are."""

from hf_hisparse.memory.base import Memory
from hf_hisparse.memory.hierarchical import HierarchicalMemory
from hf_hisparse.memory.resident import ResidentMemory


__all__ = ["HierarchicalMemory", "Memory", "ResidentMemory"]
