// Elements of a model's dtype, read as float32 and made of it.
#pragma once

struct BFloat16 {
    using Element = unsigned short;
    using Eight = uint4;
    static __device__ __forceinline__ float widen(Element x) { return __uint_as_float(static_cast<unsigned>(x) << 16); }
    static __device__ __forceinline__ Element narrow(float x) {
        const unsigned word = __float_as_uint(x);
        // To nearest, ties to even; a NaN stays one.
        return x != x ? 0x7fff : static_cast<Element>((word + 0x7fff + (word >> 16 & 1)) >> 16);
    }
    // Elements 2i and 2i + 1.
    static __device__ __forceinline__ float2 pair(const Eight& eight, int i) {
        const unsigned word = (&eight.x)[i];
        return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
    }
};

struct Float16 {
    using Element = unsigned short;
    using Eight = uint4;
    static __device__ __forceinline__ float widen(Element x) {
        float wide;
        asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
        return wide;
    }
    static __device__ __forceinline__ Element narrow(float x) {
        Element half;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
        return half;
    }
    static __device__ __forceinline__ float2 pair(const Eight& eight, int i) {
        const unsigned word = (&eight.x)[i];
        return make_float2(widen(static_cast<Element>(word)), widen(static_cast<Element>(word >> 16)));
    }
};

struct Float32 {
    using Element = float;
    struct Eight {
        float4 halves[2];
    };
    static __device__ __forceinline__ float widen(Element x) { return x; }
    static __device__ __forceinline__ Element narrow(float x) { return x; }
    static __device__ __forceinline__ float2 pair(const Eight& eight, int i) {
        const float4& half = eight.halves[i >> 1];
        return i & 1 ? make_float2(half.z, half.w) : make_float2(half.x, half.y);
    }
};

// Calls `body` with the dtype of that number, as numbered in `ops.cuda`.
template <typename Body>
__device__ __forceinline__ void with_dtype(long long dtype, Body body) {
    switch (dtype) {
        case 0: body(BFloat16{}); break;
        case 1: body(Float16{}); break;
        default: body(Float32{});
    }
}
