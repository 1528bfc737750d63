// softmax_mass: the attention that each item would draw, summed over a group's query heads: the second half of a score.
//
// In:   weights [rows, group, items] float32, of every item 2^(logit - m), where m is the largest logit of the chunk of
//       items that it lies in (of an item of several tokens, the sum); partials [rows, group, chunks, 2] float32, of
//       every chunk m and the sum of its weights.
// Out:  scores [rows, items] float32: the sum over heads of weight * 2^(m - M) / S, with M and S those of the whole
//       history.
//
// A head whose sum is not a positive number (nothing to attend to, a NaN, +inf) counts as 0.
//
// Shape. A block of 256 threads takes an equal share of a row's items. Shared memory: 8 bytes a query head, and 8 for each
// of its warps.
//
// Cost, predicted (H200, 8 rows of 4 heads, us): launch 2; the partials of 1024 chunks 1.5; 8 MiB of weights, which the
// first half has left in L2, 2. About 6 for 65536 items, 5 for 4096 of 32 chunks.

#include "warp.cuh"

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) softmax_mass(
    const float* __restrict__ weights, const float2* __restrict__ partials, float* __restrict__ scores,
    long long group_, long long items_, long long chunk_items, long long chunks_, long long row_blocks
) {
    const int group = static_cast<int>(group_), items = static_cast<int>(items_), chunks = static_cast<int>(chunks_);
    const unsigned row = blockIdx.x / static_cast<unsigned>(row_blocks);
    const int share = (items + static_cast<int>(row_blocks) - 1) / static_cast<int>(row_blocks);
    const int first = (blockIdx.x - row * static_cast<unsigned>(row_blocks)) * share;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    weights += row * group_ * items_;
    partials += row * group_ * chunks_;
    scores += row * items_;

    // Of every head M and 1 / S; behind them, of every warp that sums a share of a head's chunks, its own M and S.
    extern __shared__ float2 norms[];
    float2* const parts = norms + group;
    const int warps = max(1, kWarps / group);  // A head.
    for (int part = warp; part < group * warps; part += kWarps) {
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
        if (lane == 0) parts[part] = make_float2(top, sum);
    }
    __syncthreads();
    for (int head = threadIdx.x; head < group; head += kThreads) {
        float largest = -INFINITY, sum = 0;
        for (int w = 0; w < warps; ++w) largest = fmaxf(largest, parts[head * warps + w].x);
        for (int w = 0; w < warps; ++w) sum += parts[head * warps + w].y * power(parts[head * warps + w].x, largest);
        norms[head] = make_float2(largest, sum > 0 && sum < INFINITY ? 1 / sum : 0.0f);
    }
    __syncthreads();

    const int end = min(items, first + share);
    for (int i = first + threadIdx.x; i < end; i += kThreads) {
        const int chunk = i / static_cast<int>(chunk_items);
        float score = 0;
#pragma unroll 4
        for (int head = 0; head < group; ++head) {
            const float weight = weights[static_cast<long long>(head) * items + i];
            const float largest = partials[static_cast<long long>(head) * chunks + chunk].x;
            const float2 norm = norms[head];
            if (norm.y > 0) score += weight * (power(largest, norm.x) * norm.y);
        }
        scores[i] = score;
    }
}
