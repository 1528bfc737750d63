// append: writes one new token a row through to host memory and into the device buffer, as most recently used.
//
// In:   token [rows, width] in bytes, its parts side by side; position [rows] int64, negative for a row that takes none;
//       up to four part widths, in bytes; slab_table [rows, slabs] int64, host addresses; clock [rows] int32.
// Both: buffer [rows, slots, item_bytes]; item_slot [rows, items], slot_item and last_used [rows, slots], all int32.
// Out:  the token's bytes in host memory.
//
// The step of an entry of item_slot (entry.cuh) is here the past one, so that swap_in never takes it for its own.
//
// Within an item of page_size tokens each part is contiguous over the page. A token that opens an item that is not resident
// takes the slot used longest ago (ties: the lowest). One that continues an item that is not resident goes to host memory
// alone. The slot is stamped clock + 1, the step to come. A row without a token is not touched.
//
// Shape. One block a row; threads is a power of two from 32 to 1024.
//
// Cost, predicted (H200): position, then item_slot, last_used and the slab's address together, then the writes: three round
// trips, about 2 us. The writes to the host are posted: nothing waits for them but the end of the kernel.

#include "copy.cuh"
#include "dependent_launch.cuh"
#include "entry.cuh"

namespace {

constexpr int kNone = 0x7fffffff;

// The least last_used among `slots` slots, and the lowest slot that has it; the same to every thread of the block.
__device__ __forceinline__ int oldest_slot(const int* last_used, int slots) {
    __shared__ int warp_used[32], warp_slot[32];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int used = kNone, slot = kNone;
#pragma unroll 4
    for (int s = threadIdx.x; s < slots; s += blockDim.x) {
        const int mine = last_used[s];
        if (mine < used) used = mine, slot = s;
    }
    for (bool across_warps : {false, true}) {
        const int least = __reduce_min_sync(kAll, used);
        slot = __reduce_min_sync(kAll, used == least ? slot : kNone);
        if (across_warps) break;
        if (lane == 0) warp_used[warp] = least, warp_slot[warp] = slot;
        __syncthreads();
        const bool held = lane < blockDim.x >> 5;
        used = held ? warp_used[lane] : kNone;
        slot = held ? warp_slot[lane] : kNone;
    }
    return slot;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(1024, 1) append(
    const char* __restrict__ token, const long long* __restrict__ position, long long page_size,
    long long width0, long long width1, long long width2, long long width3,
    const long long* __restrict__ slab_table, long long slabs, long long items_per_slab,
    char* buffer, long long item_bytes, long long slots,
    int* item_slot, long long items, int* slot_item, int* last_used, const int* clock
) {
    await_previous();
    const long long row = blockIdx.x;
    const long long at = position[row];
    if (at < 0) return;
    const long long item = at / page_size, within = at - item * page_size;

    item_slot += row * items;
    slot_item += row * slots;
    last_used += row * slots;
    const long long slab = item / items_per_slab;
    char* const host = reinterpret_cast<char*>(slab_table[row * slabs + slab]) + (item - slab * items_per_slab) * item_bytes;
    const int entry = item_slot[item], past = clock[row];
    int slot = entry < 0 ? -1 : entry & kSlotMask;
    if (within == 0) {
        const int oldest = oldest_slot(last_used, static_cast<int>(slots));  // Every thread has read item_slot after it.
        if (slot < 0) {
            slot = oldest;
            if (threadIdx.x == 0) {
                const int evicted = slot_item[slot];
                if (evicted >= 0) item_slot[evicted] = -1;
                item_slot[item] = slot | brought(past);
                slot_item[slot] = static_cast<int>(item);
            }
        }
    }
    if (slot >= 0 && threadIdx.x == 0) last_used[slot] = past + 1;

    char* const device = buffer + (row * slots + max(slot, 0)) * item_bytes;
    const long long widths[] = {width0, width1, width2, width3};
    const char* from = token + row * (width0 + width1 + width2 + width3);
    const auto address = [](const char* pointer) { return reinterpret_cast<unsigned long long>(pointer); };
    const unsigned bytes =
        word_bytes(address(from) | address(host) | address(device) | width0 | width1 | width2 | width3);
    with_word(bytes, [&](auto word) {
        using Word = decltype(word);
        const Word* source = reinterpret_cast<const Word*>(from);
        long long to = 0;
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            const int words = static_cast<int>(widths[part] / sizeof(Word));
            const long long first = to / static_cast<int>(sizeof(Word)) + within * words;
            for (int i = threadIdx.x; i < words; i += blockDim.x) {
                const Word value = source[i];
                reinterpret_cast<Word*>(host)[first + i] = value;
                if (slot >= 0) reinterpret_cast<Word*>(device)[first + i] = value;
            }
            source += words;
            to += page_size * widths[part];
        }
    });
}
