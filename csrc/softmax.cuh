// The attention that each item would draw, summed over a group's query heads: the second half of a score.
//
// In:   weights [group, items] float32, of every item 2^(logit - m), where m is the largest logit of the chunk of items that
//       it lies in (of an item of several tokens, the sum); partials [group, chunks, 2] float32, of every chunk m and the sum
//       of its weights. A chunk is a power of two of items.
// A score is the sum over heads of weight * 2^(m - M) / S, with M and S those of the whole history. A head whose sum is not
// a positive number (nothing to attend to, a NaN, +inf) counts as 0. Chunks behind the history change no bit of a score.
#pragma once

#include "warp.cuh"

// Of every head M and 1 / S, to `norms`. All threads of a block of 32 warps take part; `scratch` is of max(group, 32).
__device__ __forceinline__ void sum_partials(
    const float2* __restrict__ partials, int group, int chunks, float2* norms, float2* scratch
) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int warps = max(1, 32 / group);  // A head.
    for (int part = warp; part < group * warps; part += 32) {
        const int head = part / warps;
        const float2* const mine = partials + static_cast<long long>(head) * chunks;
        float largest = -INFINITY, sum = 0;
#pragma unroll 8
        for (int c = (part - head * warps) * 32 + lane; c < chunks; c += 32 * warps) {
            const float2 chunk = mine[c];
            const float larger = fmaxf(largest, chunk.x);
            sum = sum * power(largest, larger) + chunk.y * power(chunk.x, larger);
            largest = larger;
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

// Adds to the scores of `kCount` items, `step` apart from `first` on, what the heads give them; of those at `end` or behind
// nothing. The order is that of the heads.
template <int kCount>
__device__ __forceinline__ void add_heads(
    float (&scores)[kCount], const float* __restrict__ weights, const float2* __restrict__ partials,
    const float2* norms, int group, int items, int chunks, int chunk_shift, int first, int step, int end
) {
#pragma unroll 2
    for (int head = 0; head < group; ++head) {
        const float2 norm = norms[head];
        const float* const mine = weights + static_cast<long long>(head) * items;
        const float2* const parts = partials + static_cast<long long>(head) * chunks;
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
            const int i = first + j * step;
            if (i < end && norm.y > 0) scores[j] += mine[i] * (power(parts[i >> chunk_shift].x, norm.x) * norm.y);
        }
    }
}
