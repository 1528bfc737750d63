// Thread-block clusters; on an architecture without them, the same words for a block that is alone.
#pragma once

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ unsigned cluster_id() {
    unsigned id;
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(id));
    return id;
}
__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ unsigned cluster_blocks() {
    unsigned blocks;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    return blocks;
}
// Waits for every thread of the cluster; what they wrote before, to shared memory too, is then seen by all.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
// Two ints that lie in another block's shared memory where `address`, which is 8-byte aligned, lies in this one's.
__device__ __forceinline__ int2 load_shared(const int* address, unsigned rank) {
    const unsigned here = static_cast<unsigned>(__cvta_generic_to_shared(address));
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    int2 value;
    asm volatile("ld.shared::cluster.v2.s32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(there) : "memory");
    return value;
}
#else
__device__ __forceinline__ unsigned cluster_id() { return blockIdx.x; }
__device__ __forceinline__ unsigned cluster_rank() { return 0; }
__device__ __forceinline__ unsigned cluster_blocks() { return 1; }
__device__ __forceinline__ void cluster_sync() { __syncthreads(); }
__device__ __forceinline__ int2 load_shared(const int* address, unsigned) {
    return *reinterpret_cast<const int2*>(address);
}
#endif
