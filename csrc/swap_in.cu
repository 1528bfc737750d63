// swap_in: makes every selected item resident in the device buffer and says where. One LRU step a row, in one launch.
//
// In:   selection [rows, k] int32, unique in a row, -1 for none; slab_table [rows, slabs] int64, host addresses.
// Both: buffer [rows, slots, item_bytes]; item_slot [rows, items] (entry.cuh), slot_item and last_used [rows, slots],
//       clock [rows], log [rows, steps, 2], all int32; totals [rows, 2] int64.
// Out:  found [rows, k] int32, the slot of each selected item, -1 where the selection is -1.
// Work: progress [rows, 2] int32, zero before and after; listed [rows, k] int32, any.
//
// Invariants. item_slot and slot_item are inverse to each other, and last_used <= clock + 1. So an evicted item is never a
// selected one, and the writes of the two to item_slot never meet. A row that selects nothing is not touched. Results
// depend on no order of threads: misses are numbered in order of selection and victims in order of slot, both by counting.
//
// Shape. The first `rows` blocks plan, one a row: hits, victims and state. The others copy, by `movers` threads each that
// have one piece of an item under way: `pieces` pieces of `piece_bytes` make an item. threads is a power of two from 32 to
// 1024, and k <= 4 * threads. There are two ways to hand out the copies.
//   Direct (per_row > 0 copying blocks a row): a thread a piece of a selected item. It looks the item up for itself and, if
//   it is missed, has its bytes under way before anybody knows its place, which the planner then writes to item_slot. A
//   thread that comes so late that it finds the place there knows a miss by the step in the entry. (An entry 65536 steps
//   old looks the same; the item is then copied over itself.) The clock, which that needs, is moved by whichever block of
//   the row is last to have looked. Of a hit the thread brings the bytes to L2.
//   Listed (per_row = 0): planners publish what they missed, and a few blocks work through the lists of all rows, whatever
//   the misses of each. With histories of many GiB, translation of host addresses bounds the copies once more than a few
//   hundred items are under way, so that more of them at once are slower.
// Planners wait for nobody and are first in the grid, and copiers wait for planners alone: all blocks end, however few run
// at once.
//
// Cost, as predicted (H200, us). Direct, one row, 307 misses of 1152 B: launch 2.8, selection 0.6, look-up 0.8, first byte 2,
// the rest of 354 KB over PCIe 5 7.5, out of shared memory 0.5; the plan (2.5) and its writes (0.7) lie behind the bytes:
// 14.2, and 13.8 measured. Listed: 2 more to publish and read the lists, then 48 GB/s.
//
// With WITHOUT_COPY defined the bytes are not copied and all else is done: what the mechanism costs, for measurement.

#include "copy.cuh"
#include "dependent_launch.cuh"
#include "entry.cuh"

namespace {

constexpr int kPerThread = 4;  // Selected items a thread of a planner holds.
constexpr int kSlots = 4;      // Slots whose last_used a thread holds, where that is enough of them.
constexpr unsigned kLine = 128;  // Bytes of a line of the L2 cache.
constexpr int kBinBits = 8, kBins = 1 << kBinBits;  // Of the histogram of last_used.

// What other blocks of the launch write and read meanwhile.
__device__ __forceinline__ int peek(const int* word) {
    int value;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}
__device__ __forceinline__ int peek_acquire(const int* word) {
    int value;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}
__device__ __forceinline__ void post(int* word, int value) {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ __forceinline__ void post_release(int* word, int value) {
    asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// What the planner and the copiers of one row share.
struct Row {
    const int* selection;
    const long long* slab_table;
    char* buffer;
    int *item_slot, *clock, *progress;
    int* listed;
};

// For one thread of each block of a row, `blocks` in all, once the block has read the clock and looked items up. The last of
// them moves the clock to `now` if the planner says that it `steps`.
__device__ __forceinline__ void arrive(const Row& row, int blocks, int now, bool steps) {
    const int mine = 1 + (steps ? 1 << 16 : 0);
    const int all = atomicAdd(row.progress, mine) + mine;
    if ((all & 0xffff) == blocks) {
        if (all >> 16) post(row.clock, now);
        post(row.progress, 0);
    }
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

// ---- planning --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void plan(
    const Row& row, int k, int slots, int* found, int* slot_item, int* last_used, unsigned long long* totals, int* log, int steps,
    int per_row, char* shared
) {
    const int thread = threadIdx.x, threads = blockDim.x;
    const int warp = thread >> 5, lane = thread & 31;
    const unsigned lanes_before = (1u << lane) - 1;
    int* const item_slot = row.item_slot;

    int* const miss_item = reinterpret_cast<int*>(shared);                       // [k]
    int* const victim = miss_item + k;                                           // [k]
    unsigned char* const is_hit = reinterpret_cast<unsigned char*>(victim + k);  // [slots], rounded up to words
    __shared__ Scratch scratch;

    // ---- read the selection and look every item up, all loads at once ----
    const Run columns(k), own(slots);
    int item[kPerThread], slot[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        const int column = columns.begin + i * 32 + lane;
        item[i] = column < columns.end ? row.selection[column] : -1;
    }
    const int now = peek(row.clock) + 1;
    int used[kSlots];
    const bool kept = slots <= kSlots * threads;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
        const int s = own.begin + i * 32 + lane;
        used[i] = kept && s < own.end ? last_used[s] : 0x7fffffff;
    }
#pragma unroll 1
    for (int i = thread; i < (slots + 3) / 4; i += threads) reinterpret_cast<int*>(is_hit)[i] = 0;
#pragma unroll 1
    for (int i = thread; i < kBins; i += threads) scratch.bins[i] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) slot[i] = item[i] >= 0 ? item_slot[item[i]] : -1;

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
    unsigned missed[kPerThread], selected = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        const bool miss = item[i] >= 0 && slot[i] < 0;
        if (slot[i] >= 0) is_hit[slot[i] &= kSlotMask] = 1;
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

    // The counters, and the slots found with this step's stamp on those hit.
    const auto finish = [&]() {
        if (thread == 0) {
            if (per_row > 0) {
                arrive(row, per_row + 1, now, selected != 0);
            } else if (selected != 0) {
                post(row.clock, now);
            }
            if (selected != 0) {
                atomicAdd(&totals[0], static_cast<unsigned long long>(hits));
                atomicAdd(&totals[1], static_cast<unsigned long long>(misses));
                int* const entry = log + now % steps * 2;
                entry[0] = hits;
                entry[1] = misses;
            }
        }
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
    };

    if (misses == 0) {
        if (per_row == 0 && thread == 0) post_release(row.progress + 1, 1);
        finish();
        return;
    }

    // ---- number the misses in order of selection, count the slots by age ----
    int rank = sum_before(scratch.selected) & 0xffff;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        if (item[i] >= 0 && slot[i] < 0) {
            const int mine = rank + __popc(missed[i] & lanes_before);
            miss_item[mine] = item[i];
            if (per_row == 0) row.listed[mine] = item[i];
            slot[i] = -2 - mine;  // Stands for the victim of that number until it is known.
        }
        rank += __popc(missed[i]);
    }
    if (per_row == 0) {
        // Bytes can be under way before it is known where they go.
        __syncthreads();
        if (thread == threads - 1) post_release(row.progress + 1, misses + 1);
    }
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

    // ---- write the state, and first of all where the misses go ----
#pragma unroll 1
    for (int i = thread; i < misses; i += threads) {
        const int taken = victim[i];
        post(item_slot + miss_item[i], taken | brought(now));
        const int evicted = slot_item[taken];
        if (evicted >= 0) item_slot[evicted] = -1;
        slot_item[taken] = miss_item[i];
        last_used[taken] = now;
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        if (slot[i] < -1) slot[i] = victim[-2 - slot[i]];
    }
    finish();
}

// ---- copying ---------------------------------------------------------------------------------------------------------

struct Pieces {
    int count;                 // An item.
    unsigned bytes;            // A piece; the last of an item may be shorter.
    unsigned item_bytes;
    unsigned items_per_slab;

    __device__ __forceinline__ unsigned begin(int piece) const { return piece * bytes; }
    __device__ __forceinline__ unsigned size(int piece) const { return min(bytes, item_bytes - piece * bytes); }
    __device__ __forceinline__ unsigned long long source(const Row& row, int item, int piece) const {
        const unsigned slab = static_cast<unsigned>(item) / items_per_slab;
        return row.slab_table[slab] + (item - slab * items_per_slab) * static_cast<unsigned long long>(item_bytes) + begin(piece);
    }
    __device__ __forceinline__ unsigned long long target(const Row& row, int slot, int piece) const {
        return reinterpret_cast<unsigned long long>(row.buffer) + slot * static_cast<unsigned long long>(item_bytes) +
               begin(piece);
    }
    // Whether bulk copies take every piece that `source` is part of.
    __device__ __forceinline__ bool bulk(const Row& row, unsigned long long source) const {
        const unsigned long long bits = source | reinterpret_cast<unsigned long long>(row.buffer) | item_bytes | bytes;
        return Mover::kExists && (bits & 15) == 0;
    }
};

// Has the lanes of a warp copy what each has to, one after the other.
__device__ __forceinline__ void copy_by_warp(bool mine, unsigned long long to, unsigned long long from, unsigned bytes) {
    for (unsigned left = __ballot_sync(kAll, mine); left != 0; left &= left - 1) {
        const int lane = __ffs(left) - 1;
        warp_copy(__shfl_sync(kAll, to, lane), __shfl_sync(kAll, from, lane), __shfl_sync(kAll, bytes, lane));
    }
}

__device__ __forceinline__ void copy_direct(const Row& row, const Pieces& pieces, int k, int per_row, int block, int movers, Mover mover) {
    const int at = block * movers + threadIdx.x;
    const int column = at / pieces.count, piece = at - column * pieces.count;
    const int item = column < k ? row.selection[column] : -1;
    const int now = peek(row.clock) + 1;
    const unsigned long long from = item >= 0 ? pieces.source(row, item, piece) : 0;
    int entry = item >= 0 ? peek(row.item_slot + item) : 0;
    const bool missed = item >= 0 && (entry < 0 || (entry & ~kSlotMask) == brought(now));
    const unsigned bytes = pieces.size(piece);
    const bool bulk = __all_sync(kAll, !missed || pieces.bulk(row, from));
#ifndef WITHOUT_COPY
    if (bulk && missed) mover.load(from, bytes);
#endif
    if (item >= 0 && !missed) {
        // The misses keep the link busy, not the device's memory: what attention reads next comes to L2 meanwhile.
        const unsigned long long there = pieces.target(row, entry & kSlotMask, piece);
        for (unsigned byte = 0; byte < bytes; byte += kLine) prefetch(reinterpret_cast<const void*>(there + byte));
    }
    // Only the block's movers are here. What was read has come: it decided what was done.
    asm volatile("bar.sync 1, %0;" ::"r"(movers) : "memory");
    if (threadIdx.x == 0) arrive(row, per_row + 1, now, false);
    if (missed) {
        while (entry < 0) entry = peek(row.item_slot + item);
    }
#ifndef WITHOUT_COPY
    const unsigned long long to = pieces.target(row, entry & kSlotMask, piece);
    if (!bulk) {
        copy_by_warp(missed, to, from, bytes);
    } else if (missed) {
        mover.store(to, bytes);
        mover.finish();
    }
#endif
}

// `row_at(r)` is the r-th row; `warp` of `warps` is the calling one among all that copy.
template <typename RowAt>
__device__ __forceinline__ void copy_listed(RowAt row_at, const Pieces& pieces, int rows, int warp, int warps, Mover mover) {
    const int lane = threadIdx.x & 31;
    const auto place = [](const int* entry) {
        int value;
        do value = peek(entry);
        while (value < 0);
        return value & kSlotMask;
    };
    // What the thread has under way: its item's entry, which says the slot, and where the piece goes in slot 0.
    const int* pending = nullptr;
    unsigned long long pending_to = 0;
    unsigned pending_bytes = 0;
    const auto complete = [&]() {
        if (pending != nullptr) {
            mover.store(pending_to + place(pending) * static_cast<unsigned long long>(pieces.item_bytes), pending_bytes);
            mover.free();
        }
        pending = nullptr;
    };
    // Every warp reads every row's progress; the last to have read makes it zero again, once it is known which that is.
    int *read = nullptr, readers = 0;
    const auto settle = [&]() {
        if (read != nullptr && readers == warps - 1) {
            post(read, 0);
            post(read + 1, 0);
        }
        read = nullptr;
    };
    int turn = warp;  // Warps take turns of 32 pieces, over all rows, so that each has as many as any other.
    for (int first = 0; first < rows; first += 32) {
        // A lane a row: how much its planner missed.
        int count = 0;
        settle();
        if (first + lane < rows) {
            read = row_at(first + lane).progress;
            do count = peek_acquire(read + 1);
            while (count == 0);
            readers = atomicAdd(read, 1);
            count = (count - 1) * pieces.count;
        }
        __syncwarp();
        int before = count;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(kAll, before, step);
            if (lane >= step) before += other;
        }
        const int total = __shfl_sync(kAll, before, 31);
        before -= count;
        for (; turn * 32 < total; turn += warps) {
            const int at = min(turn * 32 + lane, total - 1);
            int owner = 0;  // The last row that begins at or before `at`.
#pragma unroll
            for (int step = 16; step > 0; step /= 2) {
                if (__shfl_sync(kAll, before, owner + step) <= at) owner += step;
            }
            const int within = at - __shfl_sync(kAll, before, owner);
            const Row row = row_at(first + owner);
            const int miss = within / pieces.count, piece = within - miss * pieces.count;
            const int item = __ldcg(row.listed + miss);
            const unsigned long long from = pieces.source(row, item, piece), to = pieces.target(row, 0, piece);
            const unsigned bytes = pieces.size(piece);
            const bool mine = turn * 32 + lane < total;
#ifndef WITHOUT_COPY
            if (__all_sync(kAll, pieces.bulk(row, from))) {
                complete();
                if (mine) {
                    mover.load(from, bytes);
                    pending = row.item_slot + item;
                    pending_to = to;
                    pending_bytes = bytes;
                }
            } else {
                copy_by_warp(mine, to + place(row.item_slot + item) * static_cast<unsigned long long>(pieces.item_bytes), from, bytes);
            }
#endif
        }
        turn -= (total + 31) / 32;
    }
    settle();
    complete();
    mover.finish();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(1024, 1) swap_in(
    const int* __restrict__ selection, int* __restrict__ found, long long k_,
    const long long* __restrict__ slab_table, long long slabs, long long items_per_slab,
    char* buffer, long long item_bytes, long long slots_,
    int* item_slot, long long items, int* slot_item, int* last_used, int* clock,
    unsigned long long* totals, int* log, long long steps,
    int* progress, int* listed, long long rows_, long long pieces_, long long piece_bytes, long long movers_, long long per_row_
) {
    await_previous();
    const int k = static_cast<int>(k_), slots = static_cast<int>(slots_), rows = static_cast<int>(rows_);
    const int movers = static_cast<int>(movers_), per_row = static_cast<int>(per_row_);
    const auto row_at = [&](long long row) {
        return Row{
            selection + row * k, slab_table + row * slabs, buffer + row * slots * item_bytes, item_slot + row * items,
            clock + row, progress + row * 2, listed + row * k,
        };
    };
    extern __shared__ __align__(128) char shared[];

    const int block = blockIdx.x;
    if (block < rows) {
        const long long row = block;
        plan(
            row_at(row), k, slots, found + row * k, slot_item + row * slots, last_used + row * slots, totals + row * 2,
            log + row * steps * 2, static_cast<int>(steps), per_row, shared
        );
        return;
    }
    if (threadIdx.x >= movers) return;
    const Pieces pieces{
        static_cast<int>(pieces_), static_cast<unsigned>(piece_bytes), static_cast<unsigned>(item_bytes),
        static_cast<unsigned>(items_per_slab),
    };
    const Mover mover(
        shared + threadIdx.x * piece_bytes, reinterpret_cast<unsigned long long*>(shared + movers * piece_bytes) + threadIdx.x
    );
    const int copier = block - rows;
    if (per_row > 0) {
        const int row = copier / per_row;
        copy_direct(row_at(row), pieces, k, per_row, copier - row * per_row, movers, mover);
    } else {
        const int warps = movers / 32;
        copy_listed(row_at, pieces, rows, copier * warps + threadIdx.x / 32, (gridDim.x - rows) * warps, mover);
    }
}
