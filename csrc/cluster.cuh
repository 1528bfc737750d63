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
// A barrier in two halves: `cluster_wait` waits until every thread of the cluster has arrived. What they wrote before, to
// shared memory too, is then seen by all.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
// Where in the cluster's shared memory another block has what lies at `address` in this one's.
__device__ __forceinline__ unsigned shared_of(const void* address, unsigned rank) {
    const unsigned here = static_cast<unsigned>(__cvta_generic_to_shared(address));
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    return there;
}
// Adds to an int of another block.
__device__ __forceinline__ void add_shared(int* address, unsigned rank, int value) {
    asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;"
                 ::"r"(shared_of(address, rank)), "r"(value) : "memory");
}
// Writes two ints, 8-byte aligned, of another block.
__device__ __forceinline__ void store_shared(int2* address, unsigned rank, int2 value) {
    asm volatile("st.shared::cluster.v2.s32 [%0], {%1, %2};"
                 ::"r"(shared_of(address, rank)), "r"(value.x), "r"(value.y) : "memory");
}
#else
__device__ __forceinline__ unsigned cluster_id() { return blockIdx.x; }
__device__ __forceinline__ unsigned cluster_rank() { return 0; }
__device__ __forceinline__ unsigned cluster_blocks() { return 1; }
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() { __syncthreads(); }
__device__ __forceinline__ void add_shared(int* address, unsigned, int value) { atomicAdd(address, value); }
__device__ __forceinline__ void store_shared(int2* address, unsigned, int2 value) { *address = value; }
#endif
__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}
