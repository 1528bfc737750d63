// score_rabitq: of every item and query head, the softmax weight of what the 1-bit keys of its tokens score: the first half
// of RaBitQ's score, which softmax.cuh completes.
//
// In:   query [rows, group, width]; bits [rows, capacity, width / 8] uint8, least significant first; scales [rows, capacity]
//       float16; centres [rows, centre_capacity, width], of the query's dtype; lengths [rows] int64. The macro
//       BYTES is width / 8, at most 32. `scale` multiplies logits and is in units of log2(e).
// Out:  weights [rows, group, items] and partials [rows, group, units, 2] float32, as softmax.cuh reads them; tokens from
//       lengths - unscored on have weight 0, whatever is, or is meanwhile written, where they lie.
//
// A token's logit is q . centre + scale_of_token * sum_i r_i s_i, with r the rotated query and s_i = 1 or -1. r is rounded to
// integers of 24 bits (one less for a width above 128), in steps of its largest channel's 2^-23; with bits b_i = 0 or 1 the
// sum is 2 * sum_i r_i b_i - sum_i r_i, exactly, whatever the order. So the error is that of rounding r, like that of a
// float32 product.
//
// How. Matrix products m16n8k32 of bytes: 16 tokens by (4 heads x 4 digits) in two halves of 8 columns. The four lanes of a
// group hold one 32-bit word each of a token's 128 bits; one mask makes four bytes of it, which are 0 or 2^i for bit i of a
// byte. So the integer of its channel is multiplied by 2^(7 - i), to four signed digits of a byte. In the products number s (0
// to 3) of a step of 128 channels, of registers b0 and b1 (u = 0, 1) and column halves v, lane 4g + t holds in byte j digit 2v
// + g % 2 of head g / 2, at channel 32t + 8j + 2s + u. The columns are such that a lane ends with all digits of one head, and
// the rows such that it does for two tokens that follow each other.
//
// What bounds it is how many instructions there are, and that they fit the multiprocessor's instruction cache: some 90 a
// tile, and 600 in all that is run. With shifts beside the masks, and everything unrolled over twice the tokens, 170 and
// 1500, it took twice as long. Considered (8 rows, 4 heads, 131072 tokens, width 128; H200; us): expanding to bf16 +-1 takes
// more masks, and 8 columns hold only two bf16 parts of each query, 16 bits: 10. A table of nibbles in shared memory: 32
// reads of 16 bytes a token, with conflicts about 8 cycles each a warp: 37. Sign flips and adds in float32: 540 million of
// each, 35.
//
// Shape. A warp takes units of up to 64 tokens, a power of two of whole items, that follow each other, for 4 query heads;
// further heads of a group are further blocks. A block's tokens have at most 128 centres. It begins with the rotation and
// the digits, by half of its warps, and with the products of the query and those centres, by the others, which all share;
// meanwhile the first bits are on their way. The unit is the same whatever the shape, and so is the result.
//
// Cost, predicted for the same (us): launch 2; the query 0.7, its rotation and digits 1.5; 65536 tiles of 60 instructions at
// 2.5 a cycle and multiprocessor 7; the memory floor, 19 MB, is 4.5 and overlaps. About 11. Measured: 19, and 16 back to
// back, with 90 instructions a tile; without the tiles 11. Tried without gain: blocks of 512 or 1024 threads, which rotate
// less often; loading bits after the rotation; bits brought to L2 before the kernel may read, which delays what the one
// before it still reads.

#include "dependent_launch.cuh"
#include "elements.cuh"
#include "rotate.cuh"
#include "warp.cuh"

namespace {

constexpr int kWidth = 8 * BYTES;
constexpr bool kWhole = BYTES % 4 == 0;  // Whole words.
constexpr int kSteps = BYTES <= 16 && kWhole ? 1 : 2;
constexpr int kBlocks = kSteps == 1 ? 4 : 2;  // A multiprocessor, as in `heuristics`.
constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kUnit = 64;          // Tokens whose weights share a maximum, at most, as in `ops.cuda`.
constexpr int kHeads = 4;
constexpr int kCentres = 128;      // Of a block's tokens, at most, as in `heuristics`.
constexpr int kAhead = 4;          // Centres that a warp has on their way at once.
constexpr int kTile = 16;          // Tokens a matrix product.
constexpr int kTiles = kUnit / kTile;
constexpr int kWords = 4 * kSteps;  // Of 32 channels.
constexpr int kLargest = 127 * 0x10101 / kSteps;  // So that a sum over the width fits 32 bits.
constexpr int kStride = kUnit + 8;  // So that the lanes of a warp write to different banks.
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
    if constexpr (kWhole) {
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
    const void* __restrict__ query, const unsigned char* __restrict__ bits, const unsigned short* __restrict__ scales,
    const void* __restrict__ centres, long long dtype, long long group_, long long capacity_,
    long long centre_capacity, long long block_shift, long long items_, long long page_size_, long long unit_items_,
    double scale, const long long* __restrict__ lengths, long long unscored, float* __restrict__ weights,
    float2* __restrict__ partials, long long units_, long long row_blocks
) {
    await_previous();
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
    const int index = (blockIdx.x - tile_of_row * static_cast<unsigned>(row_blocks)) * kWarps + warp;
    const int warps = static_cast<int>(row_blocks) * kWarps, share = (units + warps - 1) / warps;
    const int first_unit = index * share, unit_end = min(units, first_unit + share);

    __shared__ uint4 digits[kSteps * 4 * 32];
    __shared__ float products[kHeads][kCentres];
    __shared__ float scratch[kHeads][32 * kWords];
    __shared__ int2 levels[kHeads];                       // Of a head, its step and the sum of its integers.
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

    const int first_centre = (first_unit - warp * share) * unit_tokens >> shift;
    if (warp < kHeads) {
        // ---- the query's digits: a warp takes a head ----
        float x[kWords];
        with_dtype(dtype, [&](auto type) {
            using Type = decltype(type);
            const auto* q = static_cast<const typename Type::Element*>(query) + (row * group + head_tile * kHeads + warp) * kWidth;
#pragma unroll
            for (int j = 0; j < kWords; ++j) {
                const int c = 32 * j + lane;
                x[j] = warp < heads && c < kWidth ? Type::widen(q[c]) * static_cast<float>(scale) : 0.0f;
            }
        });
        rotate<kWidth>(x, scratch[warp]);
        float largest = 0;
#pragma unroll
        for (int j = 0; j < kWords; ++j) largest = fmaxf(largest, fabsf(x[j]));
        const float step = warp_max(largest) / kLargest;
        int total = 0;
#pragma unroll
        for (int j = 0; j < kWords; ++j) {
            const float most = static_cast<float>(kLargest);
            const int integer = step > 0 ? __float2int_rn(fminf(fmaxf(x[j] / step, -most), most)) : 0;
            total += integer;
            // Balanced: what a byte takes with its sign, the next one makes good.
            const unsigned balanced = static_cast<unsigned>(integer * (128 >> lane % 8)) + 0x80808080u ^ 0x80808080u;
#pragma unroll
            for (int d = 0; d < 4; ++d) {
                const int s = lane % 8 / 2, u = lane % 2, there = 4 * (2 * warp + d % 2) + j % 4;
                reinterpret_cast<unsigned char*>(digits + (j / 4 * 4 + s) * 32 + there)[(d / 2 * 2 + u) * 4 + lane / 8] =
                    balanced >> (8 * d) & 0xff;
            }
        }
        total = __reduce_add_sync(kAll, total);
        if (lane == 0) levels[warp] = make_int2(__float_as_int(step), total);
    } else {
        // ---- the products of all heads with the centres of the block's tokens ----
        with_dtype(dtype, [&](auto type) {
            using Type = decltype(type);
            using Element = typename Type::Element;
            const auto* q = static_cast<const Element*>(query) + (row * group + head_tile * kHeads) * kWidth;
            const auto* centre = static_cast<const Element*>(centres) + (row * centre_capacity + first_centre) * kWidth;
            // What lies behind the history is read here too.
            const int there = min(kCentres, static_cast<int>(centre_capacity) - first_centre);
            const int count = min(there, ((kWarps * share * unit_tokens - 1) >> shift) + 2);
            float x[kHeads][kWords];
#pragma unroll
            for (int j = 0; j < kWords; ++j) {
                const int c = 32 * j + lane;
#pragma unroll
                for (int h = 0; h < kHeads; ++h) {
                    x[h][j] = h < heads && c < kWidth ? Type::widen(q[h * kWidth + c]) * static_cast<float>(scale) : 0.0f;
                }
            }
            for (int first = (warp - kHeads) * kAhead; first < count; first += (kWarps - kHeads) * kAhead) {
                float sum[kAhead][kHeads] = {};
#pragma unroll
                for (int j = 0; j < kWords; ++j) {
                    const int c = 32 * j + lane;
#pragma unroll
                    for (int i = 0; i < kAhead; ++i) {
                        const float factor = first + i < count && c < kWidth ? Type::widen(centre[(first + i) * kWidth + c]) : 0.0f;
#pragma unroll
                        for (int h = 0; h < kHeads; ++h) sum[i][h] += factor * x[h][j];
                    }
                }
#pragma unroll
                for (int i = 0; i < kAhead; ++i) {
                    // Lanes with one bit in common exchange what is not theirs, until each has one head's.
                    const float low = lane & 1 ? sum[i][1] : sum[i][0], high = lane & 1 ? sum[i][3] : sum[i][2];
                    const float one = low + __shfl_xor_sync(kAll, lane & 1 ? sum[i][0] : sum[i][1], 1);
                    const float two = high + __shfl_xor_sync(kAll, lane & 1 ? sum[i][2] : sum[i][3], 1);
                    float product = (lane & 2 ? two : one) + __shfl_xor_sync(kAll, lane & 2 ? one : two, 2);
#pragma unroll
                    for (int lanes = 4; lanes < 32; lanes *= 2) product += __shfl_xor_sync(kAll, product, lanes);
                    if (lane < kHeads && first + i < count) products[lane][first + i] = product;
                }
            }
        });
    }
    __syncthreads();
    if (first_unit >= units) return;
    uint4 b[kSteps][4];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int s = 0; s < 4; ++s) b[k][s] = digits[(k * 4 + s) * 32 + lane];
    }
    const int2 level = levels[t];
    const float step = __int_as_float(level.x);
    const long long head = row * group + head_tile * kHeads + min(t, heads - 1);
    weights += head * items_;
    partials += head * units_;

    const int end = static_cast<int>(min(min(lengths[row] - unscored, items_ * page_size), capacity_));

#pragma unroll 1
    for (int unit = first_unit; unit < unit_end; ++unit) {
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
        if (unit + 1 < unit_end) load((unit + 1) * unit_tokens);

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
            const int last = (stop - 1) >> shift;
            offset = products[t][(origin >> shift) - first_centre];
            if (origin >> shift != last) {
                each([&](float& logit, int) { logit *= step; });
                for (int centre = origin >> shift; centre <= last; ++centre) {
                    const float product = products[t][centre - first_centre];
                    each([&](float& logit, int i) {
                        if (min(origin + i, stop - 1) >> shift == centre) logit += product;
                    });
                }
                factor = 1, offset = 0;
            }
        }
        if (origin + kUnit > stop) {
            each([&](float& logit, int i) {
                if (origin + i >= stop) logit = -INFINITY;
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
