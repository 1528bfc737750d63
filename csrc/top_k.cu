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
// How. Scores become integers of the same order (0: not to be selected), and the k-th largest of them is found a few bits
// at a time, first 11 and then as many as are to leave few candidates, from histograms in shared memory. A block adds to
// those of all others what it has in its own, of which most bins are empty. The search ends early where all that share the
// bits known so far are needed, or where they are so few that they are told to all blocks one by one. Then every warp
// counts what it has above the threshold and at it, and writes it behind what the warps before it have.
//
// Shape. A cluster of up to 8 blocks of 1024 threads takes a row (on an architecture without clusters, one block). A
// warp owns a run of items. Up to 16384 items a block are kept in shared memory; of more, each pass reads the scores
// anew.
//
// Cost (H200, 8 rows of 65536 in 8 blocks each, of 4 heads to be completed; us). When every block fetched all bins of every
// other, empty or not, that took 2.1 in each of three rounds, and all of it 22. Predicted for telling what is not empty:
// 14. Measured: 15, of which the start 1.2, the partials 3.2, the weights and the first histogram 3.4, its sum over the
// blocks 2.5, another round 2.1, the counts 1.7, the last candidates 0.9, the output 1.

#include "cluster.cuh"
#include "dependent_launch.cuh"
#include "softmax.cuh"
#include "warp.cuh"

namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kBlocks = 8;                        // A cluster, at most: a power of two, as the number of blocks is.
constexpr int kFew = 32;                          // Candidates that are told one by one: a lane takes one.
constexpr int kBatch = 8;                         // Scores that a thread has under way at once.
constexpr int kHeld = 16384;                      // Items a block that fit shared memory, as in `heuristics`.
constexpr int kBits = 11, kBins = 1 << kBits;     // Of a histogram.
constexpr int kLeast = 6;                         // Bits of any histogram, so that there are no more than five.
static_assert(kBins == 2 * kThreads, "a thread sums two bins");

constexpr unsigned kInfinity = 0xff800000u;  // What +inf becomes.

// An integer that orders as scores do; 0 for -inf and NaN. Any other is at least 1 << 23.
__device__ __forceinline__ unsigned ordered(float score) {
    const unsigned bits = __float_as_uint(score + 0.0f);  // Of -0, too, it makes 0.
    const unsigned key = bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u);
    return score > -INFINITY ? key : 0;  // So is no NaN.
}

struct Scratch {
    alignas(8) int bins[kBins];    // Of the block's items.
    alignas(8) int all[2][kBins];  // Of those of all blocks; rounds take turns.
    alignas(8) int2 few[kBlocks][kFew];  // Of every block, its candidates, key and item, in any order.
    int listed;                          // How many of its own the block has told.
    alignas(8) int2 of_block[kBlocks];   // Of every block, its items above the threshold, and at it.
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
    __shared__ Scratch scratch;
    for (int i = threadIdx.x; i < kBins; i += kThreads) scratch.bins[i] = scratch.all[0][i] = scratch.all[1][i] = 0;
    if (threadIdx.x < kBlocks) scratch.of_block[threadIdx.x] = make_int2(0, 0);
    if (threadIdx.x == 0) scratch.listed = 0;
    cluster_arrive();
    const int n = static_cast<int>(n_), k = static_cast<int>(k_);
    const int blocks = cluster_blocks(), block = cluster_rank();
    const long long row = cluster_id();
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    selection += row * k_;

    extern __shared__ float2 shared[];
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

    // ---- the items that the calling warp owns ----
    const int run = (n + blocks * kThreads - 1) / (blocks * kThreads) * 32;
    const int begin = min(n, (block * kWarps + warp) * run), end = min(n, begin + run);
#ifdef MASS
    const int first_item = min(n - 1, block * kWarps * run), item_end = min(n, first_item + kWarps * run);
    const int first_chunk = first_item >> chunk_shift, own_chunks = ((item_end - 1) >> chunk_shift) + 1 - first_chunk;
#endif

    await_previous();
    const long long length_ = lengths ? lengths[row] : 0;  // On its way with what comes next.

#ifdef MASS
    // ---- what completes the scores ----
    float early[kBatch];  // The first weights of head 0 are on their way while partials are summed.
#pragma unroll
    for (int j = 0; j < kBatch; ++j) early[j] = begin + lane + j * 32 < end ? weights[begin + lane + j * 32] : 0.0f;
    const int own = group * own_chunks;
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

    // ---- what can be selected, and what always is ----
    int candidates = n, sink = 0, recent = n;
    if (lengths) {
        // n pages are fewer than 2^30 tokens. (A division of 64 bits takes as long as a load.)
        const unsigned length = static_cast<unsigned>(min(length_, 0x7fffffffLL));
        const unsigned page_size = static_cast<unsigned>(page_size_), newest = static_cast<unsigned>(recent_tokens);
        candidates = static_cast<int>(min((length + page_size - 1) / page_size, static_cast<unsigned>(n)));
        sink = static_cast<int>(sink_items);
        if (newest > 0) recent = static_cast<int>(min((length - min(length, newest)) / page_size, static_cast<unsigned>(n)));
    }

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
    const auto add = [&](float (&score)[kBatch], const float (&weight)[kBatch], int head, int base) {
        const float* const factor = factors + head * block_chunks - first_chunk;
        if (norms[head].y > 0) {
#pragma unroll
            for (int j = 0; j < kBatch; ++j) score[j] += weight[j] * factor[min(base + j * 32, n - 1) >> chunk_shift];
        }
    };
    const auto read = [&](float (&score)[kBatch], int base) {
#pragma unroll
        for (int j = 0; j < kBatch; ++j) score[j] = 0;
        int head = 0;
        if (base == begin + lane) add(score, early, head++, base);
#pragma unroll 2
        for (; head < group; ++head) {
            const float* const mine = weights + head * n_ + base;
            float weight[kBatch];
#pragma unroll
            for (int j = 0; j < kBatch; ++j) weight[j] = base + j * 32 < end ? mine[j * 32] : 0.0f;
            add(score, weight, head, base);
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

    // ---- the threshold: `need` of the keys whose bits from `shift` on equal it are selected, and all above ----
    int shift = 32 - kBits, need = k, selected = k, candidates_left = 0;
    unsigned threshold = 0;
    each_of(read, [&](int i, unsigned key) {
        if (kept && i < end) keep[i - begin] = key;
        atomicAdd(&scratch.bins[key >> (32 - kBits)], 1);  // Bin 0 has what is not to be selected, and nothing else.
    });
    const int bin = kBins - 2 - 2 * thread;  // From the highest on, a thread takes two.
    int bits = kBits;
    for (int round = 0;; ++round) {
        __syncthreads();
        int* const all = scratch.all[round & 1];
        if (round == 0) cluster_wait();
        // Two bins of the block for one of the others.
        for (int i = thread; i < blocks << (bits - 1); i += kThreads) {
            const int pair = i & ((1 << (bits - 1)) - 1), other = (block + (i >> (bits - 1))) & (blocks - 1);
            const int2 own = *reinterpret_cast<int2*>(scratch.bins + 2 * pair);
            if (own.x) add_shared(&all[2 * pair], other, own.x);
            if (own.y) add_shared(&all[2 * pair + 1], other, own.y);
        }
        cluster_sync();
        int2* const of_all = reinterpret_cast<int2*>(all + bin);
        const int2 counts = *of_all;
        *of_all = *reinterpret_cast<int2*>(scratch.bins + bin) = make_int2(0, 0);  // For rounds to come.
        int low = counts.x;
        const int high = counts.y;
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
        candidates_left = scratch.count;
        if (shift == 0 || candidates_left == need || candidates_left <= kFew) break;
        // As many as leave few: the fewer bins there are, the fewer have to be told.
        bits = min(shift, min(kBits, max(kLeast, 32 - __clz(candidates_left / 8))));
        shift -= bits;
        threshold <<= bits;
        each([&](int, unsigned key) {
            const unsigned offset = (key >> shift) - threshold;  // A key that is 0 shares no bits with the threshold.
            if (offset < 1u << bits) atomicAdd(&scratch.bins[offset], 1);
        });
    }

    // ---- what lies before the calling warp's items ----
    const bool few = candidates_left <= kFew && candidates_left > need;
    int above = 0, ties = 0;
    each([&](int i, unsigned key) {
        const bool is_tie = key >> shift == threshold;
        above += key >> shift > threshold;
        ties += is_tie;
        if (!few) return;
        for (unsigned left = __ballot_sync(kAll, is_tie); left; left &= left - 1) {
            const int owner = __ffs(left) - 1;
            const int2 candidate = make_int2(static_cast<int>(__shfl_sync(kAll, key, owner)), __shfl_sync(kAll, i, owner));
            const int place = __shfl_sync(kAll, lane == 0 ? atomicAdd(&scratch.listed, 1) : 0, 0);
            if (lane < blocks) store_shared(&scratch.few[block][place], lane, candidate);
        }
    });
    above = __reduce_add_sync(kAll, above);
    ties = __reduce_add_sync(kAll, ties);
    if (lane == 0) {
        scratch.above[warp] = above;
        scratch.ties[warp] = ties;
    }
    __syncthreads();
    if (warp == 0) {
        above = __reduce_add_sync(kAll, scratch.above[lane]);
        ties = __reduce_add_sync(kAll, scratch.ties[lane]);
        if (lane < blocks) store_shared(&scratch.of_block[block], lane, make_int2(above, ties));
    }
    cluster_sync();  // The last: what a block's shared memory is to hold is there.
    int above_before = (lane < warp ? scratch.above[lane] : 0) + (lane < block ? scratch.of_block[lane].x : 0);
    int ties_before = (lane < warp ? scratch.ties[lane] : 0) + (lane < block ? scratch.of_block[lane].y : 0);
    above_before = __reduce_add_sync(kAll, above_before);
    ties_before = __reduce_add_sync(kAll, ties_before);
    if (few) {
        // A lane a candidate: the threshold becomes the key of the last one that is needed.
        int2 mine = make_int2(0, 0);
        int place = lane;
#pragma unroll
        for (int other = 0; other < kBlocks; ++other) {
            const int count = scratch.of_block[other].y;
            if (0 <= place && place < count) mine = scratch.few[other][place];
            place -= count;
        }
        const unsigned key = mine.x;
        int before = 0;
#pragma unroll 4
        for (int i = 0; i < candidates_left; ++i) {
            const unsigned other = __shfl_sync(kAll, key, i);
            const int item = __shfl_sync(kAll, mine.y, i);
            before += other > key || (other == key && item < mine.y);
        }
        const unsigned last = __ballot_sync(kAll, lane < candidates_left && before == need - 1);
        threshold = __shfl_sync(kAll, key, __ffs(last) - 1);
        shift = 0;
        need -= __popc(__ballot_sync(kAll, key > threshold));
        above_before += __popc(__ballot_sync(kAll, key > threshold && mine.y < begin));
        ties_before = __popc(__ballot_sync(kAll, key == threshold && mine.y < begin));
    }

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
}
