// encode_quest: widens the bounding box of the page that each row's new token lies in.
//
// In:   key [rows, width]; position [rows] int64, of the token in its history.
// Both: low and high [rows, capacity, width], of the key's dtype.
//
// A token that opens a page is its box, whatever was there. What is no number makes its channel's bounds none, and they
// stay so, as in torch.minimum.
//
// Shape. A block takes a row, a thread a channel or several that are blockDim apart.
//
// Cost, predicted (H200, us): launch 2, position, and then the key and the box together, 1.2. About 3, in place of
// twenty-five kernels of PyTorch.

#include "dependent_launch.cuh"
#include "elements.cuh"

extern "C" __global__ void __launch_bounds__(1024) encode_quest(
    const void* __restrict__ key, const long long* __restrict__ position, void* __restrict__ low,
    void* __restrict__ high, long long width, long long capacity, long long page_size, long long dtype
) {
    await_previous();
    const long long row = blockIdx.x, at = position[row], page = at / page_size;
    const bool opens = page * page_size == at;
    with_dtype(dtype, [&](auto type) {
        using Type = decltype(type);
        using Element = typename Type::Element;
        const Element* const token = static_cast<const Element*>(key) + row * width;
        const long long box = (row * capacity + page) * width;
        Element *const lows = static_cast<Element*>(low) + box, *const highs = static_cast<Element*>(high) + box;
        for (long long i = threadIdx.x; i < width; i += blockDim.x) {
            const Element element = token[i];
            const float value = Type::widen(element), least = Type::widen(lows[i]), most = Type::widen(highs[i]);
            const bool always = opens || value != value;
            if (always || value < least) lows[i] = element;
            if (always || value > most) highs[i] = element;
        }
    });
}
