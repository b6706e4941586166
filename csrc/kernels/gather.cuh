// Packing the rows of sequences one after another, dequantising on the way. One warp a row.
#pragma once

#include "device/dtype.cuh"
#include "device/paged_kv.cuh"
#include "device/ptx.cuh"
#include "params.h"

namespace paged_attn {

inline constexpr int kGatherThreads = 128;
inline constexpr int kGatherRows = kGatherThreads / ptx::kWarpSize;

__device__ __forceinline__ void gather_row(const RowsView& rows, const PoolView& pool,
                                           const ScaleView& scale, const GatherParams& p,
                                           int64_t row, int64_t head) {
  const GatheredToken token = p.token(row);
  const int lane = threadIdx.x % ptx::kWarpSize;
  for (int element = lane * kVector; element < p.shape.head_dim;
       element += ptx::kWarpSize * kVector) {
    float x[kVector] = {};
    if (token.seq >= 0) {
      const Slot slot = find_slot(p.block_tables, token.seq, token.position, p.shape.block_size);
      load_row(p.kv_dtype, pool, slot, head, element, p.vector_aligned, x);
      const float factor = scale_at(scale, slot, head);
#pragma unroll
      for (int i = 0; i < kVector; ++i) x[i] *= factor;
    }
    store_row_floats(p.output_dtype, rows.data, rows.row(0, row, head) + element, x);
  }
}

__global__ void __launch_bounds__(kGatherThreads)
    gather_kernel(const __grid_constant__ GatherParams p) {
  const int64_t num_rows = p.num_tokens * p.shape.num_kv_heads;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kGatherRows;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kGatherRows) + threadIdx.x / ptx::kWarpSize;
       i < num_rows; i += stride) {
    const int64_t row = i / p.shape.num_kv_heads;
    const int64_t head = i % p.shape.num_kv_heads;
    gather_row(p.key, p.key_cache, p.k_scale, p, row, head);
    gather_row(p.value, p.value_cache, p.v_scale, p, row, head);
  }
}

}  // namespace paged_attn
