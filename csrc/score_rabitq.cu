// score_rabitq: of every item and query head, the softmax weight of what the 1-bit keys of its tokens score: the first half
// of RaBitQ's score, which softmax.cuh completes.
//
// In:   digits, levels and offsets from rotate_query; bits [rows, capacity, width / 8] uint8, least significant first; scales
//       [rows, capacity] float16; starts and lengths [rows] int64. The macro BYTES is width / 8, at most 32.
// Out:  weights [rows, group, items] and partials [rows, group, units, 2] float32, as softmax.cuh reads them; tokens outside
//       starts to lengths have weight 0.
//
// A token's logit is q . centre + scale_of_token * sum_i r_i s_i, with r the rotated query and s_i = 1 or -1. rotate_query
// has made r integers of 24 bits; with bits b_i = 0 or 1 the sum is 2 * sum_i r_i b_i - sum_i r_i, exactly, whatever the
// order. So the error is that of rounding r, 2^-24 of its largest channel, like that of a float32 product.
//
// How. Matrix products m16n8k32 of bytes: 16 tokens by (4 heads x 4 digits) in two halves of 8 columns. The four lanes of a
// group hold one 32-bit word each of a token's 128 bits; one mask makes four bytes of it, which are 0 or a power of two, and
// the digits make good which. The columns are such that a lane ends with all digits of one head, and the rows such that it
// does for two tokens that follow each other.
//
// What bounds it is how many instructions there are, and that they fit the multiprocessor's instruction cache: some 90 a
// tile, and 600 in all that is run. With shifts beside the masks, and everything unrolled over twice the tokens, 170 and
// 1500, it took twice as long. Considered (8 rows, 4 heads, 131072 tokens, width 128; H200; us): expanding to bf16 +-1 takes
// more masks, and 8 columns hold only two bf16 parts of each query, 16 bits: 10. A table of nibbles in shared memory: 32
// reads of 16 bytes a token, with conflicts about 8 cycles each a warp: 37. Sign flips and adds in float32: 540 million of
// each, 35.
//
// Shape. A warp takes units of up to 64 tokens, a power of two of whole items, for 4 query heads; further heads of a group
// are further blocks. Warps wait for nobody. The unit is the same whatever the shape, and so is the result.
//
// Cost, predicted for the same (us): launch 2; the first loads 1.5; 65536 tiles of 60 instructions at 2.5 a cycle and
// multiprocessor 7; the memory floor, 19 MB, is 4.5 and overlaps. About 11. Measured: 14, with 90 instructions a tile.

#include "elements.cuh"
#include "warp.cuh"

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kUnit = 64;          // Tokens whose weights share a maximum, at most, as in `ops.cuda`.
constexpr int kHeads = 4;
constexpr int kTile = 16;          // Tokens a matrix product.
constexpr int kTiles = kUnit / kTile;
constexpr int kStride = kUnit + 8;  // So that the lanes of a warp write to different banks.
constexpr bool kWords = BYTES % 4 == 0;
constexpr int kSteps = BYTES <= 16 && kWords ? 1 : 2;
constexpr int kBlocks = kSteps == 1 ? 4 : 2;  // A multiprocessor, as in `heuristics`.

// c += a * b: 16 tokens by 8 columns, over 32 channels; bytes of a are unsigned.
__device__ __forceinline__ void multiply(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Word `index` of a token's bits; what lies behind them is 0.
__device__ __forceinline__ unsigned load_word(const unsigned char* bits, int index) {
    unsigned word = 0;
    if constexpr (kWords) {
        if (index * 4 < BYTES) word = reinterpret_cast<const unsigned*>(bits)[index];
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (index * 4 + i < BYTES) word |= static_cast<unsigned>(bits[index * 4 + i]) << (8 * i);
        }
    }
    return word;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) score_rabitq(
    const uint4* __restrict__ digits, const int2* __restrict__ levels, const float* __restrict__ offsets,
    const unsigned char* __restrict__ bits, const unsigned short* __restrict__ scales, long long group_,
    long long capacity_, long long offset_count, long long block_shift, long long items_, long long page_size_,
    long long unit_items_, const long long* __restrict__ starts, const long long* __restrict__ lengths,
    float* __restrict__ weights, float2* __restrict__ partials, long long units_, long long row_blocks
) {
    const int group = static_cast<int>(group_), capacity = static_cast<int>(capacity_);
    const int page_size = static_cast<int>(page_size_), items = static_cast<int>(items_);
    const int units = static_cast<int>(units_), shift = static_cast<int>(block_shift);
    const int unit_items = static_cast<int>(unit_items_), unit_tokens = unit_items * page_size;
    const unsigned tiles = (group + kHeads - 1) / kHeads;
    const unsigned tile_of_row = blockIdx.x / static_cast<unsigned>(row_blocks), head_tile = tile_of_row % tiles;
    const long long row = tile_of_row / tiles;
    const int heads = min(kHeads, group - static_cast<int>(head_tile) * kHeads);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int g = lane >> 2, t = lane & 3;  // Of a product's fragments: the tokens 2g and 2g + 1, and the word or the head.
    const int first_unit = (blockIdx.x - tile_of_row * static_cast<unsigned>(row_blocks)) * kWarps + warp;
    const int stride = static_cast<int>(row_blocks) * kWarps;
    if (first_unit >= units) return;

    __shared__ float weight_of[kWarps][kHeads][kStride];  // Of the tokens of a warp's unit.

    bits += row * capacity_ * BYTES;
    scales += row * capacity_;
    unsigned word[kTiles][2][kSteps];
    unsigned short scale_of[kTiles][2];
    // What lies behind the history is read too, as far as there is room, so that no load waits for its length.
    const auto load = [&](int origin) {
        const long long first = origin + 2 * g;
        const unsigned char* const from = bits + first * BYTES;
        const int room = capacity - static_cast<int>(first);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int token = i * kTile + r;
                const bool there = token < room;
                scale_of[i][r] = there ? scales[first + token] : 0;
#pragma unroll
                for (int k = 0; k < kSteps; ++k) word[i][r][k] = there ? load_word(from + token * BYTES, 4 * k + t) : 0;
            }
        }
    };
    load(first_unit * unit_tokens);

    uint4 b[kSteps][4];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int s = 0; s < 4; ++s) b[k][s] = digits[((tile_of_row * kSteps + k) * 4 + s) * 32 + lane];
    }
    const long long head = row * group + head_tile * kHeads + min(t, heads - 1);
    const int2 level = levels[head];
    const float step = __int_as_float(level.x);
    offsets += head * offset_count;
    weights += head * items_;
    partials += head * units_;
    const int begin = static_cast<int>(max(starts[row], 0LL));
    const int end = static_cast<int>(min(min(lengths[row], items_ * page_size), capacity_));

#pragma unroll 1
    for (int unit = first_unit; unit < units; unit += stride) {
        const int origin = unit * unit_tokens, stop = min(end, origin + unit_tokens);

        // ---- what a token's bits score, as a multiple of the step ----
        float x[kTiles][2];
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            int low[4] = {}, high[4] = {};
#pragma unroll
            for (int k = 0; k < kSteps; ++k) {
#pragma unroll
                for (int s = 0; s < 4; ++s) {
                    unsigned a[4];
#pragma unroll
                    for (int u = 0; u < 2; ++u) {
#pragma unroll
                        for (int r = 0; r < 2; ++r) a[2 * u + r] = word[i][r][k] & 0x01010101u << (2 * s + u);
                    }
                    multiply(low, a, b[k][s].x, b[k][s].y);
                    multiply(high, a, b[k][s].z, b[k][s].w);
                }
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                // The digits' sum is 128 times the product; so is, but for what all higher digits count, the lowest one.
                unsigned twice = static_cast<unsigned>(low[2 * r] >> 6) + (static_cast<unsigned>(low[2 * r + 1]) << 2);
                twice += static_cast<unsigned>(high[2 * r]) << 10;
                twice += static_cast<unsigned>(high[2 * r + 1]) << 18;
                x[i][r] = static_cast<float>(static_cast<int>(twice - level.y)) * Float16::widen(scale_of[i][r]);
            }
        }
        if (unit + stride < units) load((unit + stride) * unit_tokens);

        // ---- the unit's softmax ----
        const auto each = [&](auto body) {
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
#pragma unroll
                for (int r = 0; r < 2; ++r) body(x[i][r], i * kTile + 2 * g + r);
            }
        };
        // Where all tokens have one centre, what it adds to their logits cancels. (A step of 0 has no other x than 0.)
        float factor = step == 0 ? 1.0f : step, offset = 0;
        if (stop > origin) {
            offset = offsets[origin >> shift];
            if (origin >> shift != (stop - 1) >> shift) {
                each([&](float& logit, int i) { logit = logit * step + offsets[min(origin + i, stop - 1) >> shift]; });
                factor = 1, offset = 0;
            }
        }
        if (origin < begin || origin + kUnit > stop) {
            each([&](float& logit, int i) {
                if (origin + i < begin || origin + i >= stop) logit = -INFINITY;
            });
        }
        float largest = -INFINITY, sum = 0;
        each([&](float logit, int) { largest = fmaxf(largest, logit); });
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, lanes));
        const float top = largest == -INFINITY ? 0.0f : largest * factor;
        each([&](float& logit, int) {
            logit = exp2_of(logit * factor - top);
            sum += logit;
        });
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(kAll, sum, lanes);
        if (lane < heads) partials[unit] = make_float2(largest == -INFINITY ? largest : top + offset, sum);

        // ---- sums over items: those of one or two tokens a lane has whole ----
        const int first_item = unit * unit_items, count = min(unit_items, items - first_item);
        if (page_size <= 2) {
            if (t >= heads) continue;
            float* const out = weights + first_item;
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                if (page_size == 2) {
                    const int item = i * kTile / 2 + g;
                    if (item < count) out[item] = x[i][0] + x[i][1];
                } else {
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const int item = i * kTile + 2 * g + r;
                        if (item < count) out[item] = x[i][r];
                    }
                }
            }
        } else {
            each([&](float weight, int i) { weight_of[warp][t][i] = weight; });
            __syncwarp();
            if (t < heads) {
#pragma unroll 1
                for (int item = g; item < count; item += 8) {
                    float weight = 0;
#pragma unroll 1
                    for (int i = item * page_size; i < (item + 1) * page_size; ++i) weight += weight_of[warp][t][i];
                    weights[first_item + item] = weight;
                }
            }
            __syncwarp();
        }
    }
}
