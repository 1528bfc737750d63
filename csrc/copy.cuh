// Copies of bytes that lie anywhere, in the widest words that their alignment allows, and in bulk where the hardware can.
#pragma once

#include "warp.cuh"

// The largest word, in bytes, that divides `bits`: the bitwise or of the addresses and sizes that it must divide.
__device__ __forceinline__ unsigned word_bytes(unsigned long long bits) {
    const unsigned low = static_cast<unsigned>(bits | 16);
    return low & -low;
}

// Calls `body` with a value of the type that is `bytes` wide.
template <typename Body>
__device__ __forceinline__ void with_word(unsigned bytes, Body body) {
    switch (bytes) {
        case 16: body(uint4{}); break;
        case 8: body(uint2{}); break;
        case 4: body(0u); break;
        case 2: body(static_cast<unsigned short>(0)); break;
        default: body(static_cast<unsigned char>(0));
    }
}

// Copies `bytes` bytes by the lanes of a warp, four words under way a lane. The arguments are the same in every lane.
__device__ __forceinline__ void warp_copy(unsigned long long to, unsigned long long from, unsigned bytes) {
    constexpr unsigned kInFlight = 4;
    with_word(word_bytes(to | from | bytes), [&](auto zero) {
        using Word = decltype(zero);
        const Word* const source = reinterpret_cast<const Word*>(from);
        Word* const target = reinterpret_cast<Word*>(to);
        const unsigned words = bytes / sizeof(Word);
        for (unsigned first = threadIdx.x & 31; first < words; first += 32 * kInFlight) {
            Word held[kInFlight];
#pragma unroll
            for (unsigned i = 0; i < kInFlight; ++i) {
                if (first + 32 * i < words) held[i] = __ldg(source + first + 32 * i);
            }
#pragma unroll
            for (unsigned i = 0; i < kInFlight; ++i) {
                if (first + 32 * i < words) target[first + 32 * i] = held[i];
            }
        }
    });
}

// One thread's place in shared memory, through which it moves one piece at a time. The bytes pass by the thread's registers
// and by the L1 cache, whose loads come back in order, so that other loads do not wait for them. From compute capability 9.0
// on. Addresses and sizes are multiples of 16. All lanes of a warp make theirs together.
struct Mover {
#if __CUDA_ARCH__ >= 900
    static constexpr bool kExists = true;
    unsigned data, barrier, phase = 0;

    __device__ Mover(char* place, unsigned long long* word)
        : data(static_cast<unsigned>(__cvta_generic_to_shared(place))),
          barrier(static_cast<unsigned>(__cvta_generic_to_shared(word))) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
    }
    // Has a piece come; the place must be free.
    __device__ __forceinline__ void load(unsigned long long from, unsigned bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
            ::"r"(data), "l"(from), "r"(bytes), "r"(barrier) : "memory");
    }
    // Waits for it and has it go.
    __device__ __forceinline__ void store(unsigned long long to, unsigned bytes) {
        unsigned done = 0;
        while (!done) {
            asm volatile(
                "{\n .reg .pred done;\n mbarrier.try_wait.parity.shared.b64 done, [%1], %2;\n selp.u32 %0, 1, 0, done;\n}"
                : "=r"(done) : "r"(barrier), "r"(phase) : "memory");
        }
        phase ^= 1;
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(data), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
    // Waits until the place is free.
    __device__ __forceinline__ void free() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
    // Waits until all that was stored is written.
    __device__ __forceinline__ void finish() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
#else
    static constexpr bool kExists = false;
    __device__ Mover(char*, unsigned long long*) {}
    __device__ void load(unsigned long long, unsigned) {}
    __device__ void store(unsigned long long, unsigned) {}
    __device__ void free() {}
    __device__ void finish() {}
#endif
};
