// The attention that each item would draw, summed over a group's query heads: the second half of a score.
//
// In:   weights [group, items] float32, of every item 2^(logit - m), where m is the largest logit of the chunk of items that
//       it lies in (of an item of several tokens, the sum); partials [group, chunks, 2] float32, of every chunk m and the sum
//       of its weights. A chunk is a power of two of items.
// A score is the sum over heads of weight * 2^(m - M) / S, with M and S those of the whole history. A head whose sum is not
// a positive number (nothing to attend to, a NaN, +inf) counts as 0. Chunks behind the history change no bit of a score.
#pragma once

#include "warp.cuh"

// Of every head M and 1 / S (0 for one that does not count), to `norms`. All threads of a block of 32 warps take part;
// `scratch` is of max(group, 32).
__device__ __forceinline__ void sum_partials(
    const float2* __restrict__ partials, int group, int chunks, float2* norms, float2* scratch
) {
    constexpr int kBatch = 8;  // Loads that a thread has under way.
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int warps = max(1, 32 / group), stride = 32 * warps;  // A head.
    for (int part = warp; part < group * warps; part += 32) {
        const int head = part / warps;
        const float2* const mine = partials + static_cast<long long>(head) * chunks;
        float largest = -INFINITY, sum = 0;
        for (int first = (part - head * warps) * 32 + lane; first - lane < chunks; first += kBatch * stride) {
            float2 chunk[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int c = first + i * stride;
                chunk[i] = c < chunks ? mine[c] : make_float2(-INFINITY, 0.0f);
            }
            const float before = largest;
#pragma unroll
            for (int i = 0; i < kBatch; ++i) largest = fmaxf(largest, chunk[i].x);
            sum *= power(before, largest);
#pragma unroll
            for (int i = 0; i < kBatch; ++i) sum += chunk[i].y * power(chunk[i].x, largest);
        }
        const float top = warp_max(largest);
        sum = warp_sum(sum * power(largest, top));
        if (lane == 0) scratch[part] = make_float2(top, sum);
    }
    __syncthreads();
    for (int head = threadIdx.x; head < group; head += 1024) {
        float largest = -INFINITY, sum = 0;
        for (int w = 0; w < warps; ++w) largest = fmaxf(largest, scratch[head * warps + w].x);
        for (int w = 0; w < warps; ++w) sum += scratch[head * warps + w].y * power(scratch[head * warps + w].x, largest);
        norms[head] = make_float2(largest, sum > 0 && sum < INFINITY ? 1 / sum : 0.0f);
    }
    __syncthreads();
}

// What a weight of a chunk is multiplied by.
__device__ __forceinline__ float factor_of(float largest, float2 norm) { return power(largest, norm.x) * norm.y; }
