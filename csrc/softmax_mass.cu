// softmax_mass: completes the scores of items (softmax.cuh).
//
// In:   weights [rows, group, items] and partials [rows, group, chunks, 2] float32.
// Out:  scores [rows, items] float32.
//
// Shape. A block of 1024 threads takes an equal share of a row's items. Shared memory: 8 bytes for each of `group` and of
// max(group, 32).
//
// Cost, predicted (H200, 8 rows of 4 heads, us): launch 2; the partials of 2048 chunks 2; 8 MiB of weights, which the first
// half has left in L2, 2. About 6 for 65536 items, 5 for 4096 of 32 chunks. Where the best items are all that is wanted,
// top_k does it on its way.

#include "dependent_launch.cuh"
#include "softmax.cuh"

extern "C" __global__ void __launch_bounds__(1024, 1) softmax_mass(
    const float* __restrict__ weights, const float2* __restrict__ partials, long long group_, long long chunks_,
    long long chunk_shift, float* __restrict__ scores, long long items_, long long row_blocks
) {
    await_previous();
    const int group = static_cast<int>(group_), items = static_cast<int>(items_), chunks = static_cast<int>(chunks_);
    const unsigned row = blockIdx.x / static_cast<unsigned>(row_blocks);
    const int share = (items + static_cast<int>(row_blocks) - 1) / static_cast<int>(row_blocks);
    const int first = (blockIdx.x - row * static_cast<unsigned>(row_blocks)) * share, end = min(items, first + share);
    weights += row * group_ * items_;
    partials += row * group_ * chunks_;
    scores += row * items_;

    extern __shared__ float2 norms[];
    sum_partials(partials, group, chunks, norms, norms + group);
    for (int i = first + static_cast<int>(threadIdx.x); i < end; i += 1024) {
        const float2* const chunk = partials + (i >> static_cast<int>(chunk_shift));
        float score = 0;
#pragma unroll 4
        for (int head = 0; head < group; ++head) {
            const float weight = weights[static_cast<long long>(head) * items + i];
            const float largest = chunk[static_cast<long long>(head) * chunks].x;
            if (norms[head].y > 0) score += weight * factor_of(largest, norms[head]);
        }
        scores[i] = score;
    }
}
