"""The operations of a decode step, as `torch.library` custom ops with a PyTorch implementation on every device.

On a CUDA device they are kernels, which are compiled when they are first used: until then nothing of CUDA is imported.
"""

from hf_hisparse.ops.reference import append, swap_in


__all__ = ["append", "swap_in"]


@swap_in.register_kernel("cuda")
def _swap_in(*args):
    from hf_hisparse.ops import cuda

    return cuda.swap_in(*args)


@append.register_kernel("cuda")
def _append(*args):
    from hf_hisparse.ops import cuda

    return cuda.append(*args)
