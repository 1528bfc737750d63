// Programmatic dependent launch: blocks take their places while the kernel before them ends, in place of after it.
#pragma once

// The first thing that every kernel does. Behind it, all that earlier kernels wrote is there: the one before has ended, and
// it began like this one, or where what came before it had ended. Nothing may be read or written before it. In return the
// next kernel may take its place as soon as all blocks of this one have theirs, so no block may wait for one that has none.
__device__ __forceinline__ void await_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
