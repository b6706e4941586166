// Writing new rows of K and V to their slots, quantising on the way. One warp a row.
#pragma once

#include "device/dtype.cuh"
#include "device/ptx.cuh"
#include "device/softmax.cuh"
#include "device/warp.cuh"
#include "params.h"

namespace paged_attn {

inline constexpr int kCacheWriteThreads = 128;
inline constexpr int kCacheWriteRows = kCacheWriteThreads / ptx::kWarpSize;

// The scale of a row in a cache that keeps one per token and head: the largest finite magnitude
// becomes the largest value of the format. An all-zero row has scale 0.
template <int kVecs>
__device__ float row_scale(DType kv_dtype, const float (&row)[kVecs][kVector]) {
  float largest = 0.f;
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float magnitude = fabsf(row[v][i]);
      if (magnitude < kInfinity) largest = fmaxf(largest, magnitude);
    }
  }
  largest = warp_max(largest);
  constexpr float kSmallestNormal = 1.17549435e-38f;
  if (largest == 0.f) return 0.f;
  return fmaxf(ptx::divide(largest, max_value(kv_dtype)), kSmallestNormal);
}

__device__ __forceinline__ void write_row(const RowsView& rows, const PoolView& pool,
                                          const ScaleView& scale, bool compute_scale,
                                          const CacheWriteParams& p, int64_t token, int64_t head) {
  constexpr int kVecs = 2;  // 32 lanes of 2 vectors of 8: head_dim up to 512
  const int64_t slot = p.slot_mapping[token];
  if (slot < 0) return;
  const int lane = threadIdx.x % ptx::kWarpSize;
  const int64_t block = slot / p.shape.block_size;
  const int64_t offset = slot % p.shape.block_size;
  float row[kVecs][kVector] = {};
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int element = (lane + v * ptx::kWarpSize) * kVector;
    if (element < p.shape.head_dim) {
      load_row_floats(p.input_dtype, rows.data, rows.row(0, token, head) + element, row[v]);
    }
  }
  float divisor;
  if (compute_scale) {
    divisor = row_scale(p.kv_dtype, row);
    if (lane == 0) scale.data[scale.index(block, offset, head)] = divisor;
    if (divisor == 0.f) divisor = 1.f;
  } else {
    divisor = scale.at(block, offset, head);
  }
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int element = (lane + v * ptx::kWarpSize) * kVector;
    if (element < p.shape.head_dim) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) row[v][i] = ptx::divide(row[v][i], divisor);
      with_pool_dtype(p.kv_dtype, [&](auto kv) {
        store_floats<kv.value>(pool.data, pool.row(block, offset, head) + element, p.vector_aligned,
                               row[v]);
      });
    }
  }
}

__global__ void __launch_bounds__(kCacheWriteThreads)
    cache_write_kernel(const __grid_constant__ CacheWriteParams p) {
  const int64_t num_rows = p.num_tokens * p.shape.num_kv_heads;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kCacheWriteRows;
  for (int64_t row =
           blockIdx.x * static_cast<int64_t>(kCacheWriteRows) + threadIdx.x / ptx::kWarpSize;
       row < num_rows; row += stride) {
    const int64_t token = row / p.shape.num_kv_heads;
    const int64_t head = row % p.shape.num_kv_heads;
    write_row(p.key, p.key_cache, p.k_scale, p.compute_k_scale, p, token, head);
    write_row(p.value, p.value_cache, p.v_scale, p.compute_v_scale, p, token, head);
  }
}

}  // namespace paged_attn
