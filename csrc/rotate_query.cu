// rotate_query: what score_rabitq needs of a query: its rotation, laid out for an integer matrix product, and its products
// with the centres.
//
// In:   query [rows, group, width]; rotation [width, width] float32; centres [rows, centre_capacity, width], of the query's
//       dtype. width is at most 256.
// Out:  digits [rows, tiles, steps, 4, 32, 4] uint32, the operand B of score_rabitq, by lane; levels [rows, group, 2],
//       of every head a float32 step and an int32 total; offsets [rows, group, count] float32, the products with the first
//       `count` centres. A tile is 4 query heads, a step 128 channels.
//
// A channel x of a head's rotated query, times `scale`, becomes the integer n = x / step, rounded: the step is such that the
// largest channel becomes 127 * 0x10101 (half of it for a width above 128), so that a sum over the width fits 32 bits. The
// total is the sum of a head's integers. `scale` is in units of log2(e), and multiplies the offsets too.
//
// A key's bit i of a byte counts 2^i there, where it lies; so the integer of its channel is multiplied by 2^(7 - i), to four
// signed bytes. Where a digit of these goes: in the products m16n8k32 number s (0 to 3) of a step, of registers b0 and b1 (u
// = 0, 1) and column halves v, lane 4g + t holds in byte j digit 2v + g % 2 of head g / 2, at channel 32t + 8j + 2s + u.
//
// Shape. Blocks of 1024 threads. One takes a tile's rotation: a thread sums a share of the width for one channel of all four
// heads. Those behind take the centres, a warp one after the other: in a step's time there is nothing else to do.
//
// Cost, predicted (H200, us): launch 2, the query 0.7, 64 KiB of the rotation from L2 1, the rest 0.8. About 4.5. Measured: 7.6.

#include "elements.cuh"
#include "warp.cuh"

namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kHeads = 4;
constexpr int kStep = 128;  // Channels.
constexpr int kWidth = 2 * kStep;
constexpr int kLargest = 127 * 0x10101;
constexpr int kAhead = 16;  // Loads that a thread has under way.

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1) rotate_query(
    const void* __restrict__ query, const float* __restrict__ rotation, const void* __restrict__ centres, long long steps_,
    long long dtype, long long rows, long long group_, long long width_, long long centre_capacity, long long count_,
    double scale, unsigned* __restrict__ digits, int2* __restrict__ levels, float* __restrict__ offsets
) {
    const int group = static_cast<int>(group_), width = static_cast<int>(width_), count = static_cast<int>(count_);
    const int tiles = (group + kHeads - 1) / kHeads, steps = static_cast<int>(steps_);
    const unsigned rotations = static_cast<unsigned>(rows) * tiles;
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;

    if (blockIdx.x >= rotations) {
        with_dtype(dtype, [&](auto type) {
            using Type = decltype(type);
            using Element = typename Type::Element;
            const long long all = rotations * count_, stride = (gridDim.x - rotations) * static_cast<long long>(kWarps);
            for (long long i = (blockIdx.x - rotations) * static_cast<long long>(kWarps) + warp; i < all; i += stride) {
                const unsigned tile_of_row = static_cast<unsigned>(i / count), c = static_cast<unsigned>(i % count);
                const long long row = tile_of_row / tiles;
                const int first = tile_of_row % tiles * kHeads, heads = min(kHeads, group - first);
                const Element* const q = static_cast<const Element*>(query) + (row * group + first) * width;
                const Element* const centre = static_cast<const Element*>(centres) + (row * centre_capacity + c) * width;
                float sum[kHeads] = {};
#pragma unroll 4
                for (int at = lane; at < width; at += 32) {
                    const float factor = static_cast<float>(scale) * Type::widen(centre[at]);
#pragma unroll
                    for (int h = 0; h < kHeads; ++h) sum[h] += factor * Type::widen(q[min(h, heads - 1) * width + at]);
                }
#pragma unroll
                for (int h = 0; h < kHeads; ++h) {
                    sum[h] = warp_sum(sum[h]);
                    if (lane == 0 && h < heads) offsets[(row * group + first + h) * count + c] = sum[h];
                }
            }
        });
        return;
    }

    const int tile = blockIdx.x % tiles;
    const long long row = blockIdx.x / tiles;
    const int heads = min(kHeads, group - tile * kHeads);
    const long long first_head = row * group + tile * kHeads;

    __shared__ float queries[kHeads][kWidth];
    __shared__ float sums[kHeads][kThreads];
    __shared__ int integers[kHeads][kWidth];

    // A thread's share of the rotation is on its way before it needs the query.
    const int channels = steps * kStep, shares = kThreads / channels;
    const int channel = thread % channels, share = thread / channels, length = (width + shares - 1) / shares;
    const int begin = share * length, end = channel < width ? min(width, begin + length) : 0;
    float factors[kAhead];
    const auto load = [&](int first) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) factors[i] = first + i < end ? rotation[(first + i) * width + channel] : 0.0f;
    };
    load(begin);
    with_dtype(dtype, [&](auto type) {
        using Type = decltype(type);
        const auto* q = static_cast<const typename Type::Element*>(query) + first_head * width;
        for (int i = thread; i < kHeads * width; i += kThreads) {
            const int head = i / width;
            queries[head][i - head * width] = head < heads ? Type::widen(q[i]) * static_cast<float>(scale) : 0.0f;
        }
    });
    __syncthreads();

    // ---- rotate ----
    float sum[kHeads] = {};
    for (int first = begin; first < end; first += kAhead) {
        if (first != begin) load(first);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (first + i >= end) break;
#pragma unroll
            for (int h = 0; h < kHeads; ++h) sum[h] += queries[h][first + i] * factors[i];
        }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) sums[h][thread] = sum[h];
    __syncthreads();

    // ---- round: a warp takes a head ----
    if (warp < kHeads) {
        float x[kWidth / 32], largest = 0;
#pragma unroll
        for (int i = 0; i < kWidth / 32; ++i) {
            const int c = i * 32 + lane;
            x[i] = 0;
            if (c < channels) {
                for (int s = 0; s < shares; ++s) x[i] += sums[warp][s * channels + c];
            }
            largest = fmaxf(largest, fabsf(x[i]));
        }
        const float most = static_cast<float>(steps == 1 ? kLargest : kLargest / 2);
        const float step = warp_max(largest) / most;
        int total = 0;
#pragma unroll
        for (int i = 0; i < kWidth / 32; ++i) {
            const int c = i * 32 + lane;
            const int integer = step > 0 ? __float2int_rn(fminf(fmaxf(x[i] / step, -most), most)) : 0;
            integers[warp][c] = integer;
            total += integer;
        }
        total = __reduce_add_sync(kAll, total);
        if (lane == 0 && warp < heads) levels[first_head + warp] = make_int2(__float_as_int(step), total);
    }
    __syncthreads();

    // ---- lay out ----
    digits += (row * tiles + tile) * steps * 512;
    for (int i = thread; i < steps * 512; i += kThreads) {
        const int u = i & 1, v = i >> 1 & 1, t = i >> 2 & 3, g = i >> 4 & 7, s = i >> 7 & 3, step = i >> 9;
        unsigned word = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            int rest = integers[g / 2][step * kStep + 32 * t + 8 * j + 2 * s + u] * (128 >> (2 * s + u));
            // The digits are balanced: what a byte takes with its sign, the next one makes good.
            int digit = 0;
#pragma unroll
            for (int d = 0; d < 4; ++d) {
                const int low = static_cast<signed char>(rest);
                if (d == 2 * v + (g & 1)) digit = low;
                rest = (rest - low) >> 8;
            }
            word |= static_cast<unsigned>(digit & 0xff) << (8 * j);
        }
        digits[i] = word;
    }
}
