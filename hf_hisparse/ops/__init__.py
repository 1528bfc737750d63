"""The operations of a decode step, as `torch.library` custom ops with a PyTorch implementation on every device.

On a CUDA device they are kernels, which are compiled when they are first used: until then nothing of CUDA is imported.
"""

from hf_hisparse.ops.reference import append, encode_rabitq, score_quest, score_rabitq, swap_in, top_k


__all__ = ["append", "encode_rabitq", "score_quest", "score_rabitq", "swap_in", "top_k"]


@swap_in.register_kernel("cuda")
def _swap_in(*args):
    from hf_hisparse.ops import cuda

    return cuda.swap_in(*args)


@append.register_kernel("cuda")
def _append(*args):
    from hf_hisparse.ops import cuda

    return cuda.append(*args)


@encode_rabitq.register_kernel("cuda")
def _encode_rabitq(*args):
    from hf_hisparse.ops import cuda

    return cuda.encode_rabitq(*args)


@top_k.register_kernel("cuda")
def _top_k(*args):
    from hf_hisparse.ops import cuda

    return cuda.top_k(*args)


@score_quest.register_kernel("cuda")
def _score_quest(*args):
    from hf_hisparse.ops import cuda

    return cuda.score_quest(*args)


@score_rabitq.register_kernel("cuda")
def _score_rabitq(*args):
    from hf_hisparse.ops import cuda

    return cuda.score_rabitq(*args)
