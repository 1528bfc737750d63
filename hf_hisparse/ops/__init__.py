"""The operations of a decode step, as `torch.library` custom ops with a PyTorch implementation on every device."""

from hf_hisparse.ops.reference import append, swap_in


__all__ = ["append", "swap_in"]
