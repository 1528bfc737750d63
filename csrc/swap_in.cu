// swap_in: makes every selected item resident in the device buffer and says where. One LRU step a row, in one launch.
//
// In:   selection [rows, k] int32, unique in a row, -1 for none; slab_table [rows, slabs] int64, host addresses.
// Both: buffer [rows, slots, item_bytes]; item_slot [rows, items], slot_item and last_used [rows, slots], clock [rows],
//       log [rows, steps, 2], all int32; totals [rows, 2] int64.
// Out:  found [rows, k] int32, the slot of each selected item, -1 where the selection is -1.
//
// Invariants. item_slot and slot_item are inverse to each other, and last_used <= clock + 1. So an evicted item is never a
// selected one, and the writes of the two to item_slot never meet. A row that selects nothing is not touched. Results
// depend on no order of threads: misses are numbered in order of selection and victims in order of slot, both by counting.
//
// Shape. A cluster of blocks takes a row (on an architecture without clusters, one block). Every block works the whole plan
// out for itself, from the same state. The first block alone writes state, the others copy a share of the missed bytes each,
// after all have read it. threads is a power of two from 32 to 1024, and k <= 4 * threads.
//
// The chain for one row of 2048 items in 4096 slots, 307 misses, as predicted (H200, us):
//   read the selection 0.6; look it up in item_slot 0.8; number the misses 0.1; issue their loads -> 2 to the first byte,
//   7.5 for the bytes over PCIe 5. Victims (histogram 0.2, threshold 0.1, numbering 0.2) and the state (0.5) are worked
//   out while those loads are under way. Without misses: 1.4, then the stamps and slots 0.3.
//
// With WITHOUT_COPY defined the bytes are not copied and all else is done: what the mechanism costs, for measurement.

#include "copy.cuh"

namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kPerThread = 4;  // Selected items a thread holds.
constexpr int kSlots = 4;      // Slots whose last_used a thread holds, where that is enough of them.
constexpr int kBinBits = 8, kBins = 1 << kBinBits;  // Of the histogram of last_used.

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ unsigned cluster_id() {
    unsigned id;
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(id));
    return id;
}
__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ unsigned cluster_blocks() {
    unsigned blocks;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    return blocks;
}
// Orders no memory, so that it does not wait for loads under way: what it separates is reads already used from writes.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
#else
__device__ __forceinline__ unsigned cluster_id() { return blockIdx.x; }
__device__ __forceinline__ unsigned cluster_rank() { return 0; }
__device__ __forceinline__ unsigned cluster_blocks() { return 1; }
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
#endif

// Brings a line near; nobody waits for it.
__device__ __forceinline__ void touch(const void* address) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(address));
}

// What the calling warp owns of `n` things: a run of a multiple of 32, so that counting by ballots keeps their order.
struct Run {
    int begin, end;
    __device__ explicit Run(int n) {
        const int threads = blockDim.x;  // A power of two.
        const int length = (n + threads - 1) >> (31 - __clz(threads)) << 5;
        begin = min(n, static_cast<int>(threadIdx.x >> 5) * length);
        end = min(n, begin + length);
    }
};

// Over the warps before the calling one: the sum of what each wrote to `counts`.
__device__ __forceinline__ unsigned sum_before(const unsigned* counts) {
    const unsigned lane = threadIdx.x & 31;
    return __reduce_add_sync(kAll, lane < threadIdx.x >> 5 ? counts[lane] : 0);
}

struct Scratch {
    int bins[kBins];
    unsigned selected[32];  // A warp: items selected << 16 | misses.
    unsigned victims[32];   // A warp: slots at the threshold << 16 | older slots.
    int oldest[32];         // A warp: its least last_used.
    int bin, need;
    unsigned address_bits;
};

// Finds the bin in which the running total reaches `need`, and how many of it are needed. For one warp.
__device__ __forceinline__ void find_bin(Scratch& scratch, int need) {
    constexpr int kEach = kBins / 32;
    const int lane = threadIdx.x & 31;
    int count[kEach], total = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) total += count[i] = scratch.bins[lane * kEach + i];
    int before = total;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(kAll, before, step);
        if (lane >= step) before += other;
    }
    before -= total;
    if (before < need && need <= before + total) {
        int bin = lane * kEach;
#pragma unroll
        for (int i = 0; i < kEach - 1; ++i) {
            if (before + count[i] >= need) break;
            before += count[i];
            ++bin;
        }
        scratch.bin = bin;
        scratch.need = need - before;
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(1024, 1) swap_in(
    const int* __restrict__ selection, int* __restrict__ found, long long k_,
    const long long* __restrict__ slab_table, long long slabs, long long items_per_slab,
    char* __restrict__ buffer, long long item_bytes, long long slots_,
    int* item_slot, long long items, int* slot_item, int* last_used, int* clock,
    unsigned long long* totals, int* log, long long steps
) {
    const int k = static_cast<int>(k_), slots = static_cast<int>(slots_);
    const unsigned blocks = cluster_blocks(), block = cluster_rank();
    const long long row = cluster_id();
    const int thread = threadIdx.x, threads = blockDim.x;
    const int warp = thread >> 5, lane = thread & 31;
    const unsigned lanes_before = (1u << lane) - 1;

    selection += row * k;
    found += row * k;
    slab_table += row * slabs;
    buffer += row * slots * item_bytes;
    item_slot += row * items;
    slot_item += row * slots;
    last_used += row * slots;

    extern __shared__ unsigned long long shared_memory[];
    unsigned long long* const miss_address = shared_memory;                        // [k]
    int* const miss_item = reinterpret_cast<int*>(miss_address + k);               // [k]
    int* const victim = miss_item + k;                                             // [k]
    unsigned char* const is_hit = reinterpret_cast<unsigned char*>(victim + k);    // [slots], rounded up to words
    __shared__ Scratch scratch;

    // ---- read the selection and look every item up, all loads at once ----
    const Run columns(k), own(slots);
    int item[kPerThread], slot[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        const int column = columns.begin + i * 32 + lane;
        item[i] = column < columns.end ? selection[column] : -1;
    }
    const int now = clock[row] + 1;
    if (thread * 16 < slabs) touch(slab_table + thread * 16);
#pragma unroll 1
    for (int i = thread; i < (slots + 3) / 4; i += threads) reinterpret_cast<int*>(is_hit)[i] = 0;
#pragma unroll 1
    for (int i = thread; i < kBins; i += threads) scratch.bins[i] = 0;
    if (thread == 0) scratch.address_bits = 0;
    __syncthreads();

#pragma unroll
    for (int i = 0; i < kPerThread; ++i) slot[i] = item[i] >= 0 ? item_slot[item[i]] : -1;

    // Loads come back in order: one that is asked for behind a read of host memory waits for it. So what the plan needs is
    // read before the first of those, and kept.
    const bool kept = slots <= kSlots * threads;
    int used[kSlots];
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
        const int s = own.begin + i * 32 + lane;
        used[i] = kept && s < own.end ? last_used[s] : 0x7fffffff;
    }
    // Calls `body(slot, last_used)` for the warp's slots, a lane each; slots from own.end on are none.
    const auto each_slot = [&](auto body) {
        if (kept) {
#pragma unroll
            for (int i = 0; i < kSlots; ++i) body(own.begin + i * 32 + lane, used[i]);
        } else {
#pragma unroll 2
            for (int s = own.begin + lane; s - lane < own.end; s += 32) body(s, s < own.end ? last_used[s] : 0x7fffffff);
        }
    };
    int oldest = 0x7fffffff;
    each_slot([&](int, int last) { oldest = min(oldest, last); });
    oldest = __reduce_min_sync(kAll, oldest);

    // ---- mark the hits, count the misses ----
    const unsigned per_slab = static_cast<unsigned>(items_per_slab);
    unsigned long long address[kPerThread];
    unsigned missed[kPerThread], selected = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        const bool miss = item[i] >= 0 && slot[i] < 0;
        if (slot[i] >= 0) is_hit[slot[i]] = 1;
        if (miss) address[i] = slab_table[item[i] / per_slab];
        missed[i] = __ballot_sync(kAll, miss);
        selected += __popc(missed[i]) + (__popc(__ballot_sync(kAll, item[i] >= 0)) << 16);
    }
    if (lane == 0) {
        scratch.selected[warp] = selected;
        scratch.oldest[warp] = oldest;
    }
    __syncthreads();

    const bool held = lane < threads >> 5;  // Whether the lane-th warp exists.
    selected = __reduce_add_sync(kAll, held ? scratch.selected[lane] : 0);
    const int misses = selected & 0xffff, hits = (selected >> 16) - misses;

    // For the first block: the slots found, this step's stamp on the slots hit, the counters.
    const auto finish = [&]() {
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
            const int column = columns.begin + i * 32 + lane;
            if (column < columns.end) found[column] = slot[i];
        }
        if (selected == 0) return;
#pragma unroll 4
        for (int s = own.begin + lane; s < own.end; s += 32) {
            if (is_hit[s]) last_used[s] = now;
        }
        if (thread == 0) {
            clock[row] = now;
            atomicAdd(&totals[row * 2], static_cast<unsigned long long>(hits));
            atomicAdd(&totals[row * 2 + 1], static_cast<unsigned long long>(misses));
            int* const entry = log + (row * steps + now % static_cast<int>(steps)) * 2;
            entry[0] = hits;
            entry[1] = misses;
        }
    };

    if (misses == 0) {  // The other blocks read no more that this one writes.
        if (block == 0) finish();
        return;
    }

    if (kept) cluster_arrive();  // This block has read its state.

    // ---- number the misses in order of selection, count the slots by age ----
    int rank = sum_before(scratch.selected) & 0xffff;
    unsigned address_bits = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        if (item[i] >= 0 && slot[i] < 0) {
            const int mine = rank + __popc(missed[i] & lanes_before);
            miss_item[mine] = item[i];
            address[i] += item[i] % per_slab * static_cast<unsigned long long>(item_bytes);
            miss_address[mine] = address[i];
            address_bits |= static_cast<unsigned>(address[i] & 15);
            slot[i] = -2 - mine;  // Stands for the victim of that number until it is known.
        }
        rank += __popc(missed[i]);
    }
    if (address_bits) atomicOr(&scratch.address_bits, address_bits);
    oldest = __reduce_min_sync(kAll, held ? scratch.oldest[lane] : 0x7fffffff);
    unsigned low = 0;  // What is searched lies at oldest + low and above.
    int shift = max(0, 32 - __clz(now - oldest) - kBinBits);
    const auto count_ages = [&]() {
        each_slot([&](int s, int last) {
            const unsigned bin = (static_cast<unsigned>(last - oldest) - low) >> shift;
            if (s < own.end && !is_hit[s] && bin < kBins) atomicAdd(&scratch.bins[bin], 1);
        });
    };
    count_ages();
    __syncthreads();

#ifndef WITHOUT_COPY
    // ---- the misses are listed: have their bytes under way while their places are worked out ----
    const auto source = [&](unsigned i) { return miss_address[i]; };
    const auto target = [&](unsigned i) { return buffer + victim[i] * item_bytes; };
    const unsigned bytes = word_bytes(reinterpret_cast<unsigned long long>(buffer) | item_bytes | scratch.address_bits);
    // The first of several blocks copies nothing: the state that it reads and writes would wait for its copies.
    const unsigned copiers = max(blocks - 1, 1u);
    const auto start = [&]() {
        Walk walk(misses, static_cast<unsigned>(item_bytes) / bytes, blocks == 1 ? 0 : block - 1, copiers);
        if (block == 0 && blocks > 1) walk.end = 0;
        return walk;
    };
    uint4 ahead[kInFlight];
    if (bytes == 16) load_words(ahead, start(), source);
#endif

    // ---- the victims: all slots older than a threshold, and `need` of those at it ----
    int need = misses;
    while (true) {
        if (warp == 0) find_bin(scratch, need);
        __syncthreads();
        low += static_cast<unsigned>(scratch.bin) << shift;
        need = scratch.need;
        if (shift == 0) break;
        shift = max(0, shift - kBinBits);
#pragma unroll 1
        for (int i = thread; i < kBins; i += threads) scratch.bins[i] = 0;
        __syncthreads();
        count_ages();
        __syncthreads();
    }
    const int threshold = oldest + static_cast<int>(low);

    // ---- number them in order of slot ----
    unsigned older, ties, counts = 0;
    const auto classify = [&](int s, int last) {
        const bool free = s < own.end && !is_hit[s];
        older = __ballot_sync(kAll, free && last < threshold);
        ties = __ballot_sync(kAll, free && last == threshold);
    };
    each_slot([&](int s, int last) {
        classify(s, last);
        counts += __popc(older) + (__popc(ties) << 16);
    });
    if (lane == 0) scratch.victims[warp] = counts;
    __syncthreads();
    counts = sum_before(scratch.victims);
    int older_before = counts & 0xffff, ties_before = counts >> 16;
    each_slot([&](int s, int last) {
        classify(s, last);
        const int tie = ties_before + __popc(ties & lanes_before);
        if ((older >> lane & 1) || ((ties >> lane & 1) && tie < need)) {
            victim[older_before + __popc(older & lanes_before) + min(tie, need)] = s;
        }
        older_before += __popc(older);
        ties_before += __popc(ties);
    });
    __syncthreads();
    if (!kept) cluster_arrive();
    cluster_wait();  // Every block of the row has read its state.

    if (block == 0) {
#pragma unroll 1
        for (int i = thread; i < misses; i += threads) {
            const int taken = victim[i], evicted = slot_item[taken];
            if (evicted >= 0) item_slot[evicted] = -1;
            item_slot[miss_item[i]] = taken;
            slot_item[taken] = miss_item[i];
            last_used[taken] = now;
        }
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
            if (slot[i] < -1) slot[i] = victim[-2 - slot[i]];
        }
        finish();
    }

#ifndef WITHOUT_COPY
    Walk walk = start();
    if (bytes == 16) {
        store_words(ahead, walk, target);
        copy_words<uint4>(walk, source, target);
    } else {
        with_word(bytes, [&](auto word) { copy_words<decltype(word)>(walk, source, target); });
    }
#endif
}
