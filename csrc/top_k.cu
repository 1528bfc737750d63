// top_k: the k best-scored items of every row, exactly, in ascending order. One launch.
//
// In:   scores [rows, n] float32; lengths [rows] int64, or null where every item is a candidate.
// Out:  selection [rows, k] int32, ascending, padded with -1 at the end.
// Where the macro MASS is defined the scores are yet to be completed (softmax.cuh), of weights [rows, group, n] and partials
// [rows, group, chunks, 2]. A block's items must then fit shared memory, and before them, of every head and of every chunk
// that a block's items may lie in, `block_chunks`, what its weights are multiplied by.
//
// An item is page_size tokens, of which there are fewer than 2^30. Candidates are the items of the first lengths tokens; of
// these, the first sink_items and those of the last recent_tokens rank as if their score were +inf. A score of -inf or NaN
// is never selected. -0 equals 0. Of equal scores the lowest items are taken. The result is a function of the scores: it
// depends on no order of threads.
//
// How. Scores become integers of the same order (0: not to be selected), and the k-th largest of them is found 11, 11
// and 10 bits at a time, from histograms in shared memory. Then every warp counts what it has above the threshold and
// at it, and writes it behind what the warps before it have. Where all that share the bits known so far are needed, the
// rest of the bits need not be found.
//
// Shape. A cluster of up to 8 blocks of 1024 threads takes a row (on an architecture without clusters, one block). A
// warp owns a run of items. Up to 16384 items a block are kept in shared memory; of more, each pass reads the scores
// anew.
//
// Cost, predicted (H200, one row of 131072 in 8 blocks, us): launch 2; 64 KiB of scores a multiprocessor and their
// first histogram 2.5; three sums over the blocks of 16 KiB each at 1; two more histograms 0.6 each; counts 0.6; a
// barrier 0.5; output 1.3. About 12. Measured: 14; of 8 rows of 65536 likewise. To complete the scores of 4 heads: their
// partials 2, three more loads an item 2; measured, 5.

#include "cluster.cuh"
#include "dependent_launch.cuh"
#include "softmax.cuh"
#include "warp.cuh"

namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kBlocks = 8;                        // A cluster, at most: a power of two, as the number of blocks is.
constexpr int kBatch = 8;                         // Scores that a thread has under way at once.
constexpr int kHeld = 16384;                      // Items a block that fit shared memory, as in `heuristics`.
constexpr int kBits = 11, kBins = 1 << kBits;     // Of a histogram.
constexpr int kRounds = 3;
static_assert(kBins == 2 * kThreads, "a thread sums two bins");

constexpr unsigned kInfinity = 0xff800000u;  // What +inf becomes.

// An integer that orders as scores do; 0 for -inf and NaN. Any other is at least 1 << 23.
__device__ __forceinline__ unsigned ordered(float score) {
    const unsigned bits = __float_as_uint(score + 0.0f);  // Of -0, too, it makes 0.
    const unsigned key = bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u);
    return score > -INFINITY ? key : 0;  // So is no NaN.
}

struct Scratch {
    alignas(8) int bins[kRounds][kBins];
    alignas(8) int taken[2];  // The block's items above the threshold, and at it.
    int sums[kWarps];
    int above[kWarps], ties[kWarps];
    int bin, need, count;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1) top_k(
#ifdef MASS
    const float* __restrict__ weights, const float2* __restrict__ partials, long long group_, long long chunks_,
    long long chunk_shift_, long long block_chunks_,
#else
    const float* __restrict__ scores,
#endif
    int* __restrict__ selection, long long n_, long long k_, const long long* __restrict__ lengths,
    long long page_size_, long long sink_items, long long recent_tokens
) {
    await_previous();
    const int n = static_cast<int>(n_), k = static_cast<int>(k_);
    const int blocks = cluster_blocks(), block = cluster_rank();
    const long long row = cluster_id();
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    selection += row * k_;

    extern __shared__ float2 shared[];
    __shared__ Scratch scratch;
#ifdef MASS
    const int group = static_cast<int>(group_), chunks = static_cast<int>(chunks_), chunk_shift = static_cast<int>(chunk_shift_);
    const int block_chunks = static_cast<int>(block_chunks_);
    weights += row * group_ * n_;
    partials += row * group_ * chunks_;
    float2* const norms = shared;
    float* const factors = reinterpret_cast<float*>(shared + group + max(group, kWarps));
    unsigned* const held = reinterpret_cast<unsigned*>(factors + group * block_chunks);
#else
    scores += row * n_;
    unsigned* const held = reinterpret_cast<unsigned*>(shared);
#endif

    // ---- what can be selected, and what always is ----
    int candidates = n, sink = 0, recent = n;
    if (lengths) {
        // n pages are fewer than 2^30 tokens. (A division of 64 bits takes as long as a load.)
        const unsigned length = static_cast<unsigned>(min(lengths[row], 0x7fffffffLL));
        const unsigned page_size = static_cast<unsigned>(page_size_), newest = static_cast<unsigned>(recent_tokens);
        candidates = static_cast<int>(min((length + page_size - 1) / page_size, static_cast<unsigned>(n)));
        sink = static_cast<int>(sink_items);
        if (newest > 0) recent = static_cast<int>(min((length - min(length, newest)) / page_size, static_cast<unsigned>(n)));
    }

    // ---- the items that the calling warp owns ----
    const int run = (n + blocks * kThreads - 1) / (blocks * kThreads) * 32;
    const int begin = min(n, (block * kWarps + warp) * run), end = min(n, begin + run);
    // Calls `body(item, key)` for each of them, a lane each, after `read` has fetched kBatch scores at once. All lanes take
    // part; what lies behind the end has key 0.
    const auto each_of = [&](auto read, auto body) {
        for (int base = begin + lane; base - lane < end; base += 32 * kBatch) {
            float score[kBatch];
            read(score, base);
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                const int i = base + j * 32;
                const bool always = i < sink || i >= recent, inside = i < candidates && i < end;
                body(i, inside ? always ? kInfinity : ordered(score[j]) : 0u);
            }
        }
    };
#ifdef MASS
    const int first_chunk = min(n, block * kWarps * run) >> chunk_shift;
    const auto read = [&](float (&score)[kBatch], int base) {
#pragma unroll
        for (int j = 0; j < kBatch; ++j) score[j] = 0;
#pragma unroll 2
        for (int head = 0; head < group; ++head) {
            const float* const mine = weights + head * n_ + base;
            const float* const factor = factors + head * block_chunks - first_chunk;
            float weight[kBatch];
#pragma unroll
            for (int j = 0; j < kBatch; ++j) weight[j] = base + j * 32 < end ? mine[j * 32] : 0.0f;
            if (norms[head].y > 0) {
#pragma unroll
                for (int j = 0; j < kBatch; ++j) score[j] += weight[j] * factor[min(base + j * 32, n - 1) >> chunk_shift];
            }
        }
    };
#else
    const auto read = [&](float (&score)[kBatch], int base) {
#pragma unroll
        for (int j = 0; j < kBatch; ++j) score[j] = base + j * 32 < end ? scores[base + j * 32] : -INFINITY;
    };
#endif
    // The same of keys that are kept in shared memory. A lane meets the items that it met before, without a barrier.
#ifdef MASS
    constexpr bool kept = true;
#else
    const bool kept = run * kWarps <= kHeld;
#endif
    unsigned* const keep = held + warp * run;
    const auto each = [&](auto body) {
        if (!kept) return each_of(read, body);
        for (int base = begin + lane; base - lane < end; base += 32 * kBatch) {
            unsigned key[kBatch];
#pragma unroll
            for (int j = 0; j < kBatch; ++j) key[j] = base + j * 32 < end ? keep[base + j * 32 - begin] : 0;
#pragma unroll
            for (int j = 0; j < kBatch; ++j) body(base + j * 32, key[j]);
        }
    };

    for (int i = thread; i < kRounds * kBins; i += kThreads) (&scratch.bins[0][0])[i] = 0;
    if (thread < 2) scratch.taken[thread] = 0;
#ifdef MASS
    const int own_chunks = min(block_chunks, chunks - first_chunk), own = group * own_chunks;
    const auto largest_of = [&](int i) {
        const int head = i / own_chunks;
        return partials[static_cast<long long>(head) * chunks + first_chunk + i - head * own_chunks].x;
    };
    float largest = thread < own ? largest_of(thread) : 0.0f;  // On its way with the others.
    sum_partials(partials, group, chunks, norms, norms + group);
    for (int i = thread; i < own; i += kThreads) {
        const int head = i / own_chunks;
        if (i != thread) largest = largest_of(i);
        factors[head * block_chunks + i - head * own_chunks] = factor_of(largest, norms[head]);
    }
#endif
    __syncthreads();

    // ---- the threshold: `need` of the keys whose bits from `shift` on equal it are selected, and all above ----
    int shift = 32 - kBits, need = k, selected = k;
    unsigned threshold = 0;
    int* const bins = scratch.bins[0];
    each_of(read, [&](int i, unsigned key) {
        if (kept && i < end) keep[i - begin] = key;
        atomicAdd(&bins[key >> (32 - kBits)], 1);  // Bin 0 has what is not to be selected, and nothing else.
    });
    for (int round = 0;; ++round) {
        cluster_sync();
        // The bins over all blocks, from the highest on: a thread takes two.
        const int bin = kBins - 2 - 2 * thread;
        int2 counts[kBlocks];
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
            counts[i] = i < blocks ? load_shared(&scratch.bins[round][bin], (block + i) & (blocks - 1)) : make_int2(0, 0);
        }
        int low = 0, high = 0;
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
            low += counts[i].x;
            high += counts[i].y;
        }
        if (round == 0 && bin == 0) low = 0;
        int before = low + high;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(kAll, before, step);
            if (lane >= step) before += other;
        }
        if (lane == 31) scratch.sums[warp] = before;
        __syncthreads();
        const int sums = scratch.sums[lane];
        if (round == 0) {
            const int total = __reduce_add_sync(kAll, sums);
            if (total <= k) {  // Every key but 0.
                shift = need = 0;
                selected = total;
                break;
            }
        }
        before += __reduce_add_sync(kAll, lane < warp ? sums : 0) - low - high;
        if (before < need && need <= before + low + high) {
            const bool in_high = need <= before + high;
            scratch.bin = bin + in_high;
            scratch.need = need - before - (in_high ? 0 : high);
            scratch.count = in_high ? high : low;
        }
        __syncthreads();
        threshold += scratch.bin;
        need = scratch.need;
        if (shift == 0 || scratch.count == need) break;
        const int bits = min(shift, kBits);
        shift -= bits;
        threshold <<= bits;
        int* const next = scratch.bins[round + 1];
        each([&](int, unsigned key) {
            const unsigned offset = (key >> shift) - threshold;  // A key that is 0 shares no bits with the threshold.
            if (offset < 1u << bits) atomicAdd(&next[offset], 1);
        });
    }

    // ---- what lies before the calling warp's items ----
    int above = 0, ties = 0;
    each([&](int, unsigned key) {
        above += key >> shift > threshold;
        ties += key >> shift == threshold;
    });
    above = __reduce_add_sync(kAll, above);
    ties = __reduce_add_sync(kAll, ties);
    if (lane == 0) {
        scratch.above[warp] = above;
        scratch.ties[warp] = ties;
        atomicAdd(&scratch.taken[0], above);
        atomicAdd(&scratch.taken[1], ties);
    }
    cluster_sync();
    int2 earlier = make_int2(0, 0);
    if (lane < block) earlier = load_shared(scratch.taken, lane);
    if (lane < warp) {
        earlier.x += scratch.above[lane];
        earlier.y += scratch.ties[lane];
    }
    int above_before = __reduce_add_sync(kAll, earlier.x), ties_before = __reduce_add_sync(kAll, earlier.y);

    // ---- write them ----
    const unsigned lanes_before = (1u << lane) - 1;
    each([&](int i, unsigned key) {
        const unsigned is_above = __ballot_sync(kAll, key >> shift > threshold);
        const unsigned is_tie = __ballot_sync(kAll, key >> shift == threshold);
        if ((is_above | is_tie) == 0) return;
        const int tie = ties_before + __popc(is_tie & lanes_before);
        if ((is_above >> lane & 1) || ((is_tie >> lane & 1) && tie < need)) {
            selection[above_before + __popc(is_above & lanes_before) + min(tie, need)] = i;
        }
        above_before += __popc(is_above);
        ties_before += __popc(is_tie);
    });
    for (int i = selected + block * kThreads + thread; i < k; i += blocks * kThreads) selection[i] = -1;
    cluster_sync();  // A block's shared memory stays until the others have read it.
}
