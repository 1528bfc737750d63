// Reductions over a warp, whose result every lane has.
#pragma once

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

constexpr unsigned kAll = 0xffffffffu;

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAll, x, step));
    return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(kAll, x, step);
    return x;
}

// 2^x; 0 where that is no normal number.
__device__ __forceinline__ float exp2_of(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

// 2^(x - largest), where `largest` may be -inf if every x is.
__device__ __forceinline__ float power(float x, float largest) {
    return exp2_of(x - (largest == -INFINITY ? 0.0f : largest));
}
