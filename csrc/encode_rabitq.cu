// encode_rabitq: adds one new token a row to what RaBitQ keeps of the keys.
//
// In:   key [rows, width]; position [rows] int64, of the token in its history; rotation [width, width] float32.
// Both: bits [rows, capacity, width / 8] uint8, least significant first; scales [rows, capacity] float16; centres
//       [rows, centre_capacity, width], of the key's dtype; total [rows, width] and count [rows], both int64, the sum, in
//       multiples of 2^-32, and the number of the keys of the newest block of `block` tokens. width is a multiple of 8, at
//       most 256.
//
// A token that opens a block makes the mean of the block before it the centre of its own, and begins total and count anew.
// With x = (key - centre) rotated, its bits are x >= 0 and its scale |x|_2^2 / |x|_1. Every sum has a fixed order, but that of
// the keys, which is the same in any.
//
// Shape. A block of 512 threads takes a row: a thread sums a share of the width for one channel.
//
// Cost, predicted (H200, us): launch 2, position and then key, centre and total 1.3, 64 KiB of the rotation from L2 1, the
// rest 0.7. About 5, in place of thirty kernels of PyTorch.

#include "elements.cuh"
#include "warp.cuh"

namespace {

constexpr int kThreads = 512;
constexpr int kWidth = 256;
constexpr int kAhead = 32;  // Loads that a thread has under way.
constexpr double kGrain = 1.0 / 4294967296.0, kLargest = 4194304.0;

__device__ __forceinline__ long long grains(float x) {
    return x != x ? 0 : __double2ll_rn(fmin(fmax(static_cast<double>(x), -kLargest), kLargest) / kGrain);
}

__device__ __forceinline__ float mean_of_grains(long long total, long long count) {
    return static_cast<float>(static_cast<double>(total) / static_cast<double>(max(count, 1ll)) * kGrain);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) encode_rabitq(
    const void* __restrict__ key, const long long* __restrict__ position, const float* __restrict__ rotation,
    unsigned char* __restrict__ bits, unsigned short* __restrict__ scales, void* __restrict__ centres,
    long long* __restrict__ total, long long* __restrict__ count, long long width_, long long capacity,
    long long centre_capacity, long long block, long long dtype
) {
    const int width = static_cast<int>(width_);
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const long long row = blockIdx.x;
    // A thread's share of the rotation is on its way before it needs the key.
    const int channels = (width + 31) / 32 * 32, shares = kThreads / channels;
    const int channel = thread % channels, share = thread / channels, length = (width + shares - 1) / shares;
    const int begin = share * length, end = channel < width && share < shares ? min(width, begin + length) : 0;
    float factors[kAhead];
    const auto load = [&](int first) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) factors[i] = first + i < end ? rotation[(first + i) * width + channel] : 0.0f;
    };
    load(begin);
    const long long at = position[row];
    const bool opens = at % block == 0;

    __shared__ float centred[kWidth];
    __shared__ float sums[kThreads];
    __shared__ float squares[kWidth / 32], sizes[kWidth / 32];

    with_dtype(dtype, [&](auto type) {
        using Type = decltype(type);
        using Element = typename Type::Element;
        if (thread < width) {
            const float value = Type::widen(static_cast<const Element*>(key)[row * width + thread]);
            Element* const centre = static_cast<Element*>(centres) + (row * centre_capacity + at / block) * width + thread;
            long long* const sum = total + row * width + thread;
            const long long before = *sum;
            Element mean = *centre;
            if (opens) {
                mean = Type::narrow(mean_of_grains(before, count[row]));
                *centre = mean;
            }
            *sum = (opens ? 0 : before) + grains(value);
            centred[thread] = value - Type::widen(mean);
        }
    });
    __syncthreads();
    if (thread == 0) count[row] = opens ? 1 : count[row] + 1;

    // ---- rotate ----
    float sum = 0;
    for (int first = begin; first < end; first += kAhead) {
        if (first != begin) load(first);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (first + i < end) sum += centred[first + i] * factors[i];
        }
    }
    sums[thread] = sum;
    __syncthreads();

    // ---- signs and scale: a warp takes 32 channels ----
    if (thread < channels) {
        float x = 0;
        for (int s = 0; s < shares; ++s) x += sums[s * channels + thread];
        const unsigned signs = __ballot_sync(kAll, x >= 0);
        const int byte = warp * 4 + lane;
        if (lane < 4 && byte < width / 8) bits[(row * capacity + at) * (width / 8) + byte] = signs >> (8 * lane) & 0xff;
        const float square = warp_sum(x * x), size = warp_sum(fabsf(x));
        if (lane == 0) {
            squares[warp] = square;
            sizes[warp] = size;
        }
    }
    __syncthreads();
    if (thread == 0) {
        float square = 0, size = 0;
        for (int w = 0; w < channels / 32; ++w) {
            square += squares[w];
            size += sizes[w];
        }
        scales[row * capacity + at] = Float16::narrow(square / fmaxf(size, 1.17549435e-38f));
    }
}
