// Copies of items whose bytes lie anywhere, in the widest words that their alignment allows.
#pragma once

constexpr int kInFlight = 4;  // Words that a thread has under way at once.

// The largest word, in bytes, that divides `bits`: the bitwise or of the addresses and sizes that it must divide.
__device__ __forceinline__ unsigned word_bytes(unsigned long long bits) {
    const unsigned low = static_cast<unsigned>(bits | 16);
    return low & -low;
}

// Calls `body` with a value of the type that is `bytes` wide.
template <typename Body>
__device__ __forceinline__ void with_word(unsigned bytes, Body body) {
    switch (bytes) {
        case 16: body(uint4{}); break;
        case 8: body(uint2{}); break;
        case 4: body(0u); break;
        case 2: body(static_cast<unsigned short>(0)); break;
        default: body(static_cast<unsigned char>(0));
    }
}

// Reads host memory once, past the L1 cache. No kernel writes what it reads this way in the same launch.
__device__ __forceinline__ uint4 load_once(const uint4* from) {
    uint4 word;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
                 : "l"(from));
    return word;
}

template <typename Word>
__device__ __forceinline__ Word load_once(const Word* from) {
    return __ldg(from);
}

// The words of a list of items that one thread of a block copies. The block takes words `begin` to `end` of the list laid
// end to end, consecutive threads consecutive words, so that an item is read by one block and in whole lines.
struct Walk {
    unsigned index, end;          // The thread's next word, and the block's last plus one.
    unsigned item, word;          // The same word as a place in the list and a word of that item.
    unsigned words;               // Words an item.
    unsigned step_items, step_words;

    __device__ Walk(unsigned items, unsigned words, unsigned block, unsigned blocks) : words(words) {
        const unsigned share = (items * words + blocks - 1) / blocks;
        index = block * share + threadIdx.x;
        end = min(items * words, (block + 1) * share);
        item = index / words;
        word = index - item * words;
        step_items = blockDim.x / words;
        step_words = blockDim.x - step_items * words;
    }

    __device__ __forceinline__ bool done() const { return index >= end; }

    __device__ __forceinline__ void next() {
        index += blockDim.x;
        item += step_items;
        word += step_words;
        if (word >= words) {
            word -= words;
            ++item;
        }
    }
};

// Issues the loads of a thread's next `kInFlight` words. `source(i)` is the address of the list's item `i`.
template <typename Word, typename Source>
__device__ __forceinline__ void load_words(Word (&held)[kInFlight], Walk walk, Source source) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
        if (!walk.done()) held[i] = load_once(reinterpret_cast<const Word*>(source(walk.item)) + walk.word);
        walk.next();
    }
}

// Stores what `load_words` loaded and moves on. `target(i)` is the address that the list's item `i` goes to.
template <typename Word, typename Target>
__device__ __forceinline__ void store_words(const Word (&held)[kInFlight], Walk& walk, Target target) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
        if (!walk.done()) reinterpret_cast<Word*>(target(walk.item))[walk.word] = held[i];
        walk.next();
    }
}

// Copies the rest of a thread's words.
template <typename Word, typename Source, typename Target>
__device__ __forceinline__ void copy_words(Walk walk, Source source, Target target) {
    while (!walk.done()) {
        Word held[kInFlight];
        load_words(held, walk, source);
        store_words(held, walk, target);
    }
}
