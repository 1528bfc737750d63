// Programmatic dependent launch: blocks take their places while the kernel before them ends, in place of after it.
#pragma once

// Every kernel calls it before it reads or writes any memory but its blocks' shared memory. Behind it, all that earlier
// kernels wrote is there: the one before has ended, and it began like this one, or where what came before it had ended. In
// return the next kernel may take its place as soon as all blocks of this one have theirs, so no block may wait for one that
// has none.
__device__ __forceinline__ void await_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Brings a line to the L2 cache. It reads nothing, and may so be called while earlier kernels still write there.
__device__ __forceinline__ void prefetch(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }
