// All page arithmetic: from a token of a sequence to its rows in the pools.
#pragma once

#include "device/dtype.cuh"
#include "params.h"

namespace paged_attn {

// Where a token lies in every pool.
struct Slot {
  int64_t block;
  int64_t offset;
};

__device__ __forceinline__ Slot find_slot(const BlockTables& tables, int64_t seq, int64_t token,
                                          int32_t block_size) {
  return {tables.block(seq, token / block_size), token % block_size};
}

// Elements [element, element + 8) of one head's row.
template <DType kType>
__device__ __forceinline__ void load_row(const PoolView& pool, const Slot& slot, int64_t head,
                                         int element, bool aligned, float (&x)[kVector]) {
  load_floats<kType>(pool.data, pool.row(slot.block, slot.offset, head) + element, aligned, x);
}
__device__ __forceinline__ void load_row(DType type, const PoolView& pool, const Slot& slot,
                                         int64_t head, int element, bool aligned,
                                         float (&x)[kVector]) {
  with_pool_dtype(type, [&](auto t) { load_row<t.value>(pool, slot, head, element, aligned, x); });
}

__device__ __forceinline__ float scale_at(const ScaleView& scale, const Slot& slot, int64_t head) {
  return scale.at(slot.block, slot.offset, head);
}

}  // namespace paged_attn
