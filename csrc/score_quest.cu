// score_quest: of every page and query head, the softmax weight of the most that a key within the page's bounding box
// scores: the first half of Quest's score, which softmax_mass completes.
//
// In:   query [rows, group, width]; low and high [rows, capacity, width], of the same dtype; lengths [rows] int64.
// Out:  weights [rows, group, pages] and partials [rows, group, chunks, 2] float32, as softmax_mass reads them; a page
//       of none of the first lengths tokens has weight 0. `scale` multiplies logits and is in units of log2(e).
//
// The bound is the sum over the width of max(q, 0) * high + min(q, 0) * low, in float32. width is a multiple of 8.
//
// Shape. 256 threads take a chunk of 128 pages of a row, for 4 query heads; further heads of a group are further
// blocks. Eight lanes share a page, eight elements a lane at a time; a lane has four pages under way, so that a
// multiprocessor's two blocks have 64 KiB under way. Shared memory: 16 bytes an element of the width.
//
// Cost, predicted (H200, 8 rows of 4 heads, 4096 pages of width 128 in bf16, us): launch 2; 16 MiB from memory 4; 2 FMA
// an element and head, a conversion an element and a quarter of a clamp, which overlap it but for the last of each
// block, 1; the softmax of a chunk 0.7. About 8.

#include "dependent_launch.cuh"
#include "elements.cuh"
#include "warp.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kPages = 128;  // A block, as in `ops.cuda`.
constexpr int kHeads = 4;
constexpr int kLanes = 8;    // That share a page.
constexpr int kEach = 4;     // Pages a lane.
static_assert(kThreads / kLanes * kEach == kPages, "");

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 2) score_quest(
    const void* __restrict__ query, const void* __restrict__ low, const void* __restrict__ high, long long dtype,
    long long group_, long long width_, long long capacity, long long pages_, long long page_size, double scale,
    const long long* __restrict__ lengths, float* __restrict__ weights, float2* __restrict__ partials, long long chunks_
) {
    await_previous();
    const int group = static_cast<int>(group_), width = static_cast<int>(width_), pages = static_cast<int>(pages_);
    const unsigned chunks = static_cast<unsigned>(chunks_), tiles = (group + kHeads - 1) / kHeads;
    const unsigned chunk = blockIdx.x % chunks, tile = blockIdx.x / chunks % tiles;
    const long long row = blockIdx.x / chunks / tiles;
    const int heads = min(kHeads, group - static_cast<int>(tile) * kHeads);
    const long long first_head = row * group + tile * kHeads;
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const int first = chunk * kPages;

    extern __shared__ float4 shared_memory[];
    float* const queries = reinterpret_cast<float*>(shared_memory);  // [kHeads, width]
    __shared__ float logits[kHeads][kPages];

    const long long length = lengths[row];
    const int present = static_cast<int>(min(pages_, capacity));

    with_dtype(dtype, [&](auto type) {
        using Type = decltype(type);
        using Eight = typename Type::Eight;
        const int eights = width / 8, part = lane % kLanes;
        const int own = (thread / kLanes) * kEach;  // The lane's first page within the chunk.
        const Eight* const low_row = static_cast<const Eight*>(low) + row * capacity * eights;
        const Eight* const high_row = static_cast<const Eight*>(high) + row * capacity * eights;
        Eight lows[kEach], highs[kEach];
        const auto load = [&](int e) {
#pragma unroll
            for (int p = 0; p < kEach; ++p) {
                const int at = min(first + own + p, present - 1) * eights + e;
                lows[p] = low_row[at];
                highs[p] = high_row[at];
            }
        };
        load(min(part, eights - 1));  // Before anything waits.
        const auto* q = static_cast<const typename Type::Element*>(query) + first_head * width;
        for (int i = thread; i < kHeads * width; i += kThreads) {
            queries[i] = i < heads * width ? Type::widen(q[i]) : 0.0f;
        }
        __syncthreads();

        float bound[kEach][kHeads] = {};
        for (int e = part; e < eights; e += kLanes) {
            if (e != part) load(e);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float2 up[kHeads], down[kHeads];
#pragma unroll
                for (int h = 0; h < kHeads; ++h) {
                    const float2 two = *reinterpret_cast<const float2*>(queries + h * width + e * 8 + i * 2);
                    up[h] = make_float2(two.x < 0 ? 0.0f : two.x, two.y < 0 ? 0.0f : two.y);  // A NaN stays one.
                    down[h] = make_float2(two.x - up[h].x, two.y - up[h].y);
                }
#pragma unroll
                for (int p = 0; p < kEach; ++p) {
                    const float2 l = Type::pair(lows[p], i), u = Type::pair(highs[p], i);
#pragma unroll
                    for (int h = 0; h < kHeads; ++h) {
                        bound[p][h] += up[h].x * u.x;
                        bound[p][h] += up[h].y * u.y;
                        bound[p][h] += down[h].x * l.x;
                        bound[p][h] += down[h].y * l.y;
                    }
                }
            }
        }
#pragma unroll
        for (int p = 0; p < kEach; ++p) {
            const long long page = first + own + p;
            const bool valid = page < present && page * page_size < length;
#pragma unroll
            for (int h = 0; h < kHeads; ++h) {
                float sum = bound[p][h];
#pragma unroll
                for (int step = 1; step < kLanes; step *= 2) sum += __shfl_xor_sync(kAll, sum, step);
                if (part == p) logits[h][own + p] = valid ? sum * static_cast<float>(scale) : -INFINITY;
            }
        }
    });
    __syncthreads();

    if (warp >= heads) return;
    float logit[kPages / 32], largest = -INFINITY, sum = 0;
#pragma unroll
    for (int j = 0; j < kPages / 32; ++j) {
        logit[j] = logits[warp][lane + j * 32];
        largest = fmaxf(largest, logit[j]);
    }
    largest = warp_max(largest);
    const long long head = first_head + warp;
#pragma unroll
    for (int j = 0; j < kPages / 32; ++j) {
        const int page = first + lane + j * 32;
        const float weight = power(logit[j], largest);
        sum += weight;
        if (page < pages) weights[head * pages_ + page] = weight;
    }
    sum = warp_sum(sum);
    if (lane == 0) partials[head * chunks_ + chunk] = make_float2(largest, sum);
}
