// score_rabitq: of every item and query head, the softmax weight of what the 1-bit keys of its tokens score: the first
// half of RaBitQ's score, which softmax_mass completes.
//
// In:   query [rows, group, width]; digits and levels from rotate_query; bits [rows, capacity, width / 8] uint8, least
//       significant first; scales [rows, capacity] float16; centres [rows, centre_capacity, width], of the query's
//       dtype; starts and lengths [rows] int64.
// Out:  weights [rows, group, items] and partials [rows, group, units, 2] float32, as softmax_mass reads them; tokens
//       outside starts to lengths have weight 0. `scale` multiplies logits and is in units of log2(e).
//
// A token's logit is q . centre + scale_of_token * sum_i r_i s_i, with r the rotated query and s_i = 1 or -1.
// rotate_query has made r integers of 24 bits, in three signed bytes; with bits b_i = 0 or 1 the sum is 2 * sum_i r_i
// b_i - sum_i r_i, exactly, whatever the order. So the error is that of rounding r, 2^-24 of its largest channel, like
// that of a float32 product.
//
// How. Matrix products m16n8k32 of bytes: 16 tokens by (4 heads x 4 digits, of which one is zero) in two halves of 8
// columns. The four lanes of a group hold one 32-bit word each of a token's 128 bits; a shift and a mask make four
// bytes of it, and which channel lies where is settled in B. The columns are such that a lane ends with all digits of
// one head, for two tokens.
//
// Considered (8 rows, 4 heads, 131072 tokens, width 128; H200; us): expanding to bf16 +-1 takes twice the shifts and
// masks, and 8 columns hold only two bf16 parts of each query, 16 bits: 10. A table of nibbles in shared memory: 32
// reads of 16 bytes a token, with conflicts about 8 cycles each a warp: 37. Sign flips and adds in float32: 540 million
// of each, 35.
//
// Shape. A warp takes units of up to 128 tokens, whole items, one after the other, for 4 query heads; further heads of a
// group are further blocks. A block of 256 threads takes a run of units, as many as let all blocks run at once: what a
// block begins with, a few loads that wait for one another, is met once. The unit is the same whatever the shape, and
// so is the result.
//
// Cost, predicted for the same (us): launch 2; what a block begins with 2.5; per 16 tokens and warp 8 products, 32
// shifts and masks, some 50 instructions for logits and weights, 65536 x 90 at 3.5 a cycle and multiprocessor 7; the
// memory floor, 19 MB, is 4.5 and overlaps; the end 1. About 13. Measured: 28. Without the products it takes 21, without
// the loads 20, without both shifts and products 20: no one part bounds it, but how long a unit's steps wait for one
// another with 24 warps a multiprocessor, which is what registers allow. Two blocks instead of three: 32.

#include "elements.cuh"
#include "warp.cuh"

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kUnit = 128;         // Tokens whose weights share a maximum, as in `ops.cuda`.
constexpr int kRun = 4096;         // Tokens a block at most, as in `heuristics`.
constexpr int kHeads = 4;
constexpr int kTile = 16;          // Tokens a matrix product.
constexpr int kTiles = kUnit / kTile;
constexpr int kLeastBlock = 16;    // Tokens that share a centre.
constexpr int kCentres = (kRun + kUnit) / kLeastBlock + 1;
constexpr int kStride = kUnit + 8;  // So that the lanes of a warp write to different banks.

template <int number>
struct Constant {
    static constexpr int value = number;
};

// c += a * b: 16 tokens by 8 columns, over 32 channels.
__device__ __forceinline__ void multiply(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ unsigned combine(int first, int second, int third) {
    return static_cast<unsigned>(first) + (static_cast<unsigned>(second) << 8) + (static_cast<unsigned>(third) << 16);
}

// Word `index` of the `bytes` bytes at `from`, which are aligned whole words or not; what lies behind them is 0.
template <bool words>
__device__ __forceinline__ unsigned load_word(const unsigned char* from, int index, int bytes) {
    unsigned word = 0;
    if constexpr (words) {
        if (index * 4 < bytes) word = reinterpret_cast<const unsigned*>(from)[index];
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (index * 4 + i < bytes) word |= static_cast<unsigned>(from[index * 4 + i]) << (8 * i);
        }
    }
    return word;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 3) score_rabitq(
    const void* __restrict__ query, const uint4* __restrict__ digits, const float2* __restrict__ levels,
    const unsigned char* __restrict__ bits, const unsigned short* __restrict__ scales, const void* __restrict__ centres,
    long long steps, long long dtype, long long group_, long long width_, long long capacity, long long centre_capacity,
    long long block_shift, long long items_, long long page_size_, double scale, const long long* __restrict__ starts,
    const long long* __restrict__ lengths, float* __restrict__ weights, float2* __restrict__ partials, long long units_,
    long long run_units
) {
    const int group = static_cast<int>(group_), width = static_cast<int>(width_);
    const int page_size = static_cast<int>(page_size_), items = static_cast<int>(items_);
    const int units = static_cast<int>(units_), shift = static_cast<int>(block_shift);
    const unsigned runs = static_cast<unsigned>((units_ + run_units - 1) / run_units);
    const unsigned tiles = (group + kHeads - 1) / kHeads;
    const unsigned run = blockIdx.x % runs, head_tile = blockIdx.x / runs % tiles;
    const long long row = blockIdx.x / runs / tiles;
    const int heads = min(kHeads, group - static_cast<int>(head_tile) * kHeads);
    const long long first_head = row * group + head_tile * kHeads;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int g = lane >> 2, t = lane & 3;  // Of a product's fragments: the token, and the word or the head.

    const int unit_items = kUnit / page_size, unit_tokens = unit_items * page_size;
    const int first_unit = run * static_cast<int>(run_units);
    const int unit_end = min(units, first_unit + static_cast<int>(run_units));

    __shared__ float offsets[kCentres][kHeads];
    __shared__ float scale_of[kWarps][kUnit];         // Of the tokens of a warp's unit.
    __shared__ float weight_of[kWarps][kHeads][kStride];  // Likewise.

    const float2 level = t < heads ? levels[first_head + t] : make_float2(0.0f, 0.0f);
    const float step = level.x;
    const unsigned total = __float_as_uint(level.y);
    const int bytes = width / 8;
    const unsigned char* const row_bits = bits + row * capacity * bytes;
    const unsigned short* const row_scales = scales + row * capacity;

    const auto score = [&](auto steps_, auto words) {
        constexpr int kSteps = decltype(steps_)::value;
        constexpr int kPart = kTiles / 2 / kSteps;  // Tiles whose loads are under way while as many are scored.
        using Part = unsigned[kPart][2][kSteps];
        // What lies behind the history is read too, as far as there is room, so that no load waits for its length.
        const auto load = [&](Part& word, int first_token) {
            const auto load_token = [&](int i, int r, int token) {
                const unsigned char* const from = row_bits + static_cast<long long>(token) * bytes;
#pragma unroll
                for (int k = 0; k < kSteps; ++k) {
                    word[i][r][k] = load_word<decltype(words)::value>(from, 4 * k + t, bytes);
                }
            };
            const bool whole = first_token + kPart * kTile <= capacity;
#pragma unroll
            for (int i = 0; i < kPart; ++i) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int token = first_token + i * kTile + r * 8 + g;
                    load_token(i, r, whole ? token : min(token, static_cast<int>(capacity) - 1));
                }
            }
        };
        unsigned short next_scale[kUnit / 32];
        const auto load_scales = [&](int first_token) {
#pragma unroll
            for (int i = 0; i < kUnit / 32; ++i) {
                next_scale[i] = row_scales[min(first_token + i * 32 + lane, static_cast<int>(capacity) - 1)];
            }
        };
        Part even, odd;
        load_scales((first_unit + warp) * unit_tokens);
        load(even, (first_unit + warp) * unit_tokens);
        uint4 b[kSteps][4];
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                b[k][s] = digits[(((row * tiles + head_tile) * kSteps + k) * 4 + s) * 32 + lane];
            }
        }

        const int begin = static_cast<int>(max(starts[row], 0LL));
        const int end = static_cast<int>(min(min(lengths[row], items_ * page_size), capacity));

        // ---- q . centre, of each block of tokens that the run meets: a warp takes a centre ----
        const int first_centre = first_unit * unit_tokens >> shift;
        const int run_end = min(end, unit_end * unit_tokens);
        const int centre_count = run_end > first_unit * unit_tokens ? (run_end - 1 >> shift) - first_centre + 1 : 0;
        with_dtype(dtype, [&](auto type) {
            using Type = decltype(type);
            using Element = typename Type::Element;
            const Element* const q = static_cast<const Element*>(query) + first_head * width;
            for (int c = warp; c < centre_count; c += kWarps) {
                const Element* const centre =
                    static_cast<const Element*>(centres) + (row * centre_capacity + first_centre + c) * width;
                float sum[kHeads] = {};
#pragma unroll 4
                for (int i = lane; i < width; i += 32) {
                    const float factor = static_cast<float>(scale) * Type::widen(centre[i]);
#pragma unroll
                    for (int h = 0; h < kHeads; ++h) sum[h] += factor * Type::widen(q[min(h, heads - 1) * width + i]);
                }
#pragma unroll
                for (int h = 0; h < kHeads; ++h) {
                    sum[h] = warp_sum(sum[h]);
                    if (lane == 0) offsets[c][h] = sum[h];
                }
            }
        });
        __syncthreads();

        // ---- units: a lane has head t of tokens g and g + 8 of each tile ----
#pragma unroll 1
        for (int unit = first_unit + warp; unit < unit_end; unit += kWarps) {
            const int origin = unit * unit_tokens, stop = min(end, origin + unit_tokens);
#pragma unroll
            for (int i = 0; i < kUnit / 32; ++i) scale_of[warp][i * 32 + lane] = Float16::widen(next_scale[i]);
            __syncwarp();
            load_scales((unit + kWarps) * unit_tokens);

            // What a token's bits score, as a multiple of the step.
            float x[kTiles][2];
            const auto multiply_part = [&](const Part& word, int first_tile) {
#pragma unroll
                for (int i = 0; i < kPart; ++i) {
                    int low[4] = {}, high[4] = {};
#pragma unroll
                    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
                        for (int s = 0; s < 4; ++s) {
                            unsigned a[4];
#pragma unroll
                            for (int u = 0; u < 2; ++u) {
#pragma unroll
                                for (int r = 0; r < 2; ++r) a[2 * u + r] = word[i][r][k] >> (2 * s + u) & 0x01010101u;
                            }
                            multiply(low, a, b[k][s].x, b[k][s].y);
                            multiply(high, a, b[k][s].z, b[k][s].w);
                        }
                    }
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const unsigned product = combine(low[2 * r], low[2 * r + 1], high[2 * r]);
                        const float sum = static_cast<float>(static_cast<int>(2 * product - total));
                        x[first_tile + i][r] = sum * scale_of[warp][(first_tile + i) * kTile + r * 8 + g];
                    }
                }
            };
#pragma unroll
            for (int first_tile = 0; first_tile < kTiles; first_tile += 2 * kPart) {
                load(odd, origin + (first_tile + kPart) * kTile);
                multiply_part(even, first_tile);
                const int next = first_tile + 2 * kPart;
                load(even, next < kTiles ? origin + next * kTile : (unit + kWarps) * unit_tokens);
                multiply_part(odd, first_tile + kPart);
            }

            // ---- the unit's softmax ----
            const auto each = [&](auto body) {
#pragma unroll
                for (int i = 0; i < kTiles; ++i) {
#pragma unroll
                    for (int r = 0; r < 2; ++r) body(x[i][r], i * kTile + r * 8 + g);
                }
            };
            // Where all tokens have one centre, what it adds to their logits cancels. (A step of 0 has no other x than 0.)
            const int centre = (origin >> shift) - first_centre;
            float factor = step == 0 ? 1.0f : step, offset = offsets[centre][t];
            if (centre != (origin + kUnit - 1 >> shift) - first_centre) {
                each([&](float& logit, int i) { logit = logit * step + offsets[(origin + i >> shift) - first_centre][t]; });
                factor = 1, offset = 0;
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
            each([&](float logit, int i) {
                const float weight = exp2_of(logit * factor - top);
                weight_of[warp][t][i] = weight;
                sum += weight;
            });
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(kAll, sum, lanes);
            if (g == 0 && t < heads) {
                partials[(first_head + t) * units_ + unit] =
                    make_float2(largest == -INFINITY ? largest : top + offset, sum);
            }
            __syncwarp();

            // ---- sums over items ----
            const int first_item = unit * unit_items, count = min(unit_items, items - first_item);
            float* const out = weights + first_head * items_ + first_item;
            for (int i = lane; i < count; i += 32) {
                float item[kHeads] = {};
                for (int token = i * page_size; token < (i + 1) * page_size; ++token) {
#pragma unroll
                    for (int h = 0; h < kHeads; ++h) item[h] += weight_of[warp][h][token];
                }
#pragma unroll
                for (int h = 0; h < kHeads; ++h) {
                    if (h < heads) out[h * items_ + i] = item[h];
                }
            }
        }
    };
    if (steps == 1) {
        score(Constant<1>{}, Constant<true>{});
    } else if (width % 32 == 0) {
        score(Constant<2>{}, Constant<true>{});
    } else {
        score(Constant<2>{}, Constant<false>{});
    }
}
