// encode_rabitq: adds one new token a row to what RaBitQ keeps of the keys.
//
// In:   key [rows, width]; position [rows] int64, of the token in its history.
// Both: bits [rows, capacity, width / 8] uint8, least significant first; scales [rows, capacity] float16; centres
//       [rows, centre_capacity, width], of the key's dtype; total [rows, width] and count [rows], both int64, the sum, in
//       multiples of 2^-32, and the number of the keys of the newest block, of 2^block_shift tokens. The macro BYTES is
//       width / 8, at most 32.
//
// A token that opens a block makes the mean of the block before it the centre of its own, and begins total and count anew.
// With x = (key - centre) rotated, its bits are x >= 0 and its scale |x|_2^2 / |x|_1. Every sum has a fixed order, but that of
// the keys, which is the same in any.
//
// Shape. A warp takes a row, alone on its multiprocessor: what it costs is the number of instructions that it runs, one after
// the other.
//
// Cost, predicted (H200, us): launch 2, position and then key, centre and total 1.2, the rotation 0.4, the rest 0.3. About
// 4, in place of thirty kernels of PyTorch.

#include "dependent_launch.cuh"
#include "elements.cuh"
#include "rotate.cuh"
#include "warp.cuh"

namespace {

constexpr int kWidth = 8 * BYTES;
constexpr int kWords = BYTES <= 16 ? 4 : 8;  // Of 32 channels.
constexpr double kGrain = 1.0 / 4294967296.0, kLargest = 4194304.0;

__device__ __forceinline__ long long grains(float x) {
    return x != x ? 0 : __double2ll_rn(fmin(fmax(static_cast<double>(x), -kLargest), kLargest) / kGrain);
}

__device__ __forceinline__ float mean_of_grains(long long total, long long count) {
    return static_cast<float>(static_cast<double>(total) / static_cast<double>(max(count, 1ll)) * kGrain);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32) encode_rabitq(
    const void* __restrict__ key, const long long* __restrict__ position, unsigned char* __restrict__ bits,
    unsigned short* __restrict__ scales, void* __restrict__ centres, long long* __restrict__ total,
    long long* __restrict__ count, long long capacity, long long centre_capacity,
    long long block_shift, long long dtype
) {
    await_previous();
    const int lane = threadIdx.x;
    const long long row = blockIdx.x, at = position[row], held = count[row];
    const long long block = at >> block_shift;
    const bool opens = block << block_shift == at;

    __shared__ float scratch[32 * kWords];

    float x[kWords];
    with_dtype(dtype, [&](auto type) {
        using Type = decltype(type);
        using Element = typename Type::Element;
        Element* const centre = static_cast<Element*>(centres) + (row * centre_capacity + block) * kWidth;
#pragma unroll
        for (int j = 0; j < kWords; ++j) {
            const int c = 32 * j + lane;
            x[j] = 0;
            if (c < kWidth) {
                const float value = Type::widen(static_cast<const Element*>(key)[row * kWidth + c]);
                const long long before = total[row * kWidth + c];
                Element mean = centre[c];
                if (opens) centre[c] = mean = Type::narrow(mean_of_grains(before, held));
                total[row * kWidth + c] = (opens ? 0 : before) + grains(value);
                x[j] = value - Type::widen(mean);
            }
        }
    });
    rotate<kWidth>(x, scratch);

    float square = 0, size = 0;
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
        const unsigned signs = __ballot_sync(kAll, x[j] >= 0);
        const int byte = 4 * j + lane;
        if (lane < 4 && byte < kWidth / 8) bits[(row * capacity + at) * (kWidth / 8) + byte] = signs >> (8 * lane) & 0xff;
        square += x[j] * x[j];
        size += fabsf(x[j]);
    }
    square = warp_sum(square);
    size = warp_sum(size);
    if (lane == 0) {
        scales[row * capacity + at] = Float16::narrow(square / fmaxf(size, 1.17549435e-38f));
        count[row] = opens ? 1 : held + 1;  // Every lane has read it.
    }
}
