// The rotation of RaBitQ: rounds of random signs and a Hadamard transform, which cost a logarithm of what a matrix would
// and leave no channel standing out either (the FHT rotator of the RaBitQ library).
#pragma once

#include "warp.cuh"

constexpr int kRounds = 4;
// Of every round, the channels that change their sign, 32 a word. As in `ops.reference`.
__constant__ constexpr unsigned kSigns[kRounds][8] = {
    {0x4a64e8a8u, 0xabf7ce3eu, 0xbe7c9446u, 0xbf342a8cu, 0xb9907bf4u, 0x96c31f65u, 0x27548474u, 0x1370462cu},
    {0x377276b7u, 0x307c2456u, 0x3c665ab9u, 0x409ce8b3u, 0x95c2ecafu, 0x40f5e438u, 0xb533afcfu, 0x69fea2a0u},
    {0x9f479a05u, 0xaec58714u, 0xa0ed2194u, 0x1feaa33au, 0x047f0c17u, 0xd8ffc64au, 0x63b76aa1u, 0x03045a67u},
    {0xf054bb76u, 0x91cb2af0u, 0x2a8f5f8du, 0x133f8c27u, 0x9cb2e35fu, 0xc198ca28u, 0x7a720844u, 0x237719d0u},
};

// Rotates a vector of kWidth channels, of which a lane of the warp has channel 32 j + lane in x[j]; those behind are and stay
// 0. The width is kOdd, which is odd, blocks of a power of two, which a cosine transform mixes. `scratch` holds kWidth floats,
// and is the warp's own.
template <int kWidth, int kWords>
__device__ __forceinline__ void rotate(float (&x)[kWords], float* scratch) {
    constexpr int kBlock = kWidth & -kWidth, kOdd = kWidth / kBlock;
    const int lane = threadIdx.x & 31;
    const float norm = rsqrtf(static_cast<float>(kBlock));
    // What runs once is bound by how fast its instructions come: a loop.
#pragma unroll 1
    for (int round = 0; round < kRounds; ++round) {
#pragma unroll
        for (int j = 0; j < kWords; ++j) {
            x[j] = __uint_as_float(__float_as_uint(x[j] * norm) ^ (kSigns[round][j] >> lane) << 31);
        }
#pragma unroll
        for (int step = 1; step < min(32, kBlock); step *= 2) {
#pragma unroll
            for (int j = 0; j < kWords; ++j) {
                const float other = __shfl_xor_sync(kAll, x[j], step);
                x[j] = lane & step ? other - x[j] : x[j] + other;
            }
        }
#pragma unroll
        for (int step = 1; 32 * step < kBlock; step *= 2) {
#pragma unroll
            for (int j = 0; j < kWords; ++j) {
                if ((j & step) == 0) {
                    const float low = x[j], high = x[j | step];
                    x[j] = low + high;
                    x[j | step] = low - high;
                }
            }
        }
        if constexpr (kOdd > 1) {
#pragma unroll
            for (int j = 0; j < kWords; ++j) {
                if (32 * j + lane < kWidth) scratch[32 * j + lane] = x[j];
            }
            __syncwarp();
#pragma unroll 1
            for (int j = 0; j < kWords; ++j) {
                const int c = 32 * j + lane, own = c / kBlock;
                float sum = 0;
                for (int other = 0; other < kOdd && c < kWidth; ++other) {
                    const float angle = (other + 0.5f) * own / kOdd;
                    sum += sqrtf((own ? 2.0f : 1.0f) / kOdd) * cospif(angle) * scratch[other * kBlock + c % kBlock];
                }
#pragma unroll
                for (int k = 0; k < kWords; ++k) {
                    if (k == j) x[k] = sum;
                }
            }
            __syncwarp();
        }
    }
}
