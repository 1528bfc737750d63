// Entries of item_slot: the slot that holds an item in the low 15 bits and, above it, the low 16 bits of the step that
// brought the item; negative for none. As in `ops.reference`.
#pragma once

constexpr int kSlotBits = 15, kSlotMask = (1 << kSlotBits) - 1;

// The part of an entry that says when the item came.
__device__ __forceinline__ int brought(int step) { return (step & 0xffff) << kSlotBits; }
