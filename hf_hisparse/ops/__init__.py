"""The operations of a decode step, as `torch.library` custom ops with a PyTorch implementation on every device.

On a CUDA device they are kernels, which are compiled when they are first used: until then nothing of CUDA or Triton is
imported.
"""

import functools
import warnings

import torch

from hf_hisparse.ops.reference import (
    append,
    encode_quest,
    encode_rabitq,
    in_pytorch,
    list_tokens,
    merge_runs,
    score_indexer,
    score_quest,
    score_rabitq,
    select_quest,
    select_rabitq,
    swap_in,
    top_k,
)


__all__ = [
    "append",
    "encode_quest",
    "encode_rabitq",
    "list_tokens",
    "merge_runs",
    "score_indexer",
    "score_quest",
    "score_rabitq",
    "select_quest",
    "select_rabitq",
    "swap_in",
    "top_k",
]


@swap_in.register_kernel("cuda")
def _swap_in(*args):
    from hf_hisparse.ops import cuda

    return cuda.swap_in(*args)


@append.register_kernel("cuda")
def _append(*args):
    from hf_hisparse.ops import cuda

    return cuda.append(*args)


@encode_quest.register_kernel("cuda")
def _encode_quest(*args):
    from hf_hisparse.ops import cuda

    return cuda.encode_quest(*args)


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


@select_quest.register_kernel("cuda")
def _select_quest(*args):
    from hf_hisparse.ops import cuda

    return cuda.select_quest(*args)


@select_rabitq.register_kernel("cuda")
def _select_rabitq(*args):
    from hf_hisparse.ops import cuda

    return cuda.select_rabitq(*args)


@functools.cache
def _unavailable(index):
    """Why Triton's kernels cannot run on a device, None where they can. The first call compiles one."""
    try:
        from hf_hisparse.ops import triton

        triton.probe(index)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Whatever it is, such as a compiler that is missing, there is another way to run.
        return f"{type(error).__name__}: {error}"
    return None


@functools.cache
def _warn(reason):
    warnings.warn(
        "the indexer's scores are computed in PyTorch on the GPU, which is slower than the Triton kernel. "
        f"The reason: {reason}",
        RuntimeWarning,
        stacklevel=3,
    )


@score_indexer.register_kernel("cuda")
def _score_indexer(query, *args):
    reason = _unavailable(query.device.index)
    if reason is None:
        from hf_hisparse.ops import triton

        if query.dtype in triton.DTYPES:
            return triton.score_indexer(query, *args)
        reason = f"it takes no {query.dtype}"
    _warn(reason)
    return in_pytorch(score_indexer, query, *args)


# Only backends that need Triton themselves ask for these two, and have found it.


@list_tokens.register_kernel("cuda")
def _list_tokens(*args):
    from hf_hisparse.ops import triton

    return triton.list_tokens(*args)


@merge_runs.register_kernel("cuda")
def _merge_runs(*args):
    from hf_hisparse.ops import triton

    return triton.merge_runs(*args)
