// Merging partial softmaxes: of the chunks of a sequence, in order, and of two given states.
#pragma once

#include "device/dtype.cuh"
#include "device/ptx.cuh"
#include "device/softmax.cuh"
#include "params.h"

namespace paged_attn {

inline constexpr int kMergeThreads = 128;
inline constexpr int kMergeRows = kMergeThreads / ptx::kWarpSize;  // one warp a row

// Chunks left to right, so that the bits depend on the sequence and chunk_size alone.
__global__ void __launch_bounds__(kMergeThreads)
    combine_chunks_kernel(const __grid_constant__ DecodeParams p) {
  const int lane = threadIdx.x % ptx::kWarpSize;
  const int64_t num_rows = p.num_tokens * p.num_q_heads;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kMergeRows;
  for (int64_t row = blockIdx.x * static_cast<int64_t>(kMergeRows) + threadIdx.x / ptx::kWarpSize;
       row < num_rows; row += stride) {
    const int64_t token = row / p.num_q_heads;
    const int64_t head = row % p.num_q_heads;
    const QueryToken query = p.query_token(token);
    const TokenRange visible = p.visible(query);
    const int64_t size = p.chunk_tokens(query.seq);
    const int64_t first = visible.begin / size;
    const int64_t last = visible.end > visible.begin ? (visible.end - 1) / size : first - 1;

    SoftmaxState total;
    const float* lse = p.partial_lse + row * p.max_chunks;
    for (int64_t chunk = first; chunk <= last; ++chunk) {
      total.raise(lse[chunk]);
      total.add(lse[chunk]);
    }
    if (p.sinks != nullptr) {
      total.raise(p.sinks[head]);
      total.add(p.sinks[head]);
    }
    const float inverse = total.inverse();
    for (int d = lane; d < p.shape.head_dim; d += ptx::kWarpSize) {
      float value = 0.f;
      for (int64_t chunk = first; chunk <= last; ++chunk) {
        const float weight = total.weight_of(lse[chunk]);
        value += weight * p.partial_out[(row * p.max_chunks + chunk) * p.shape.head_dim + d];
      }
      store_row_float(p.query_dtype, p.out.data, p.row(p.out, token, head) + d, value * inverse);
    }
    if (lane == 0 && p.lse != nullptr) p.lse[row] = total.lse();
  }
}

__global__ void __launch_bounds__(kMergeThreads)
    merge_states_kernel(const __grid_constant__ MergeParams p) {
  const int lane = threadIdx.x % ptx::kWarpSize;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kMergeRows;
  for (int64_t row = blockIdx.x * static_cast<int64_t>(kMergeRows) + threadIdx.x / ptx::kWarpSize;
       row < p.num_rows; row += stride) {
    const float lse_a = p.lse_a[row];
    const float lse_b = p.lse_b[row];
    SoftmaxState total;
    total.raise(lse_a);
    total.raise(lse_b);
    const float weight_a = total.add(lse_a);
    const float weight_b = total.add(lse_b);
    const float inverse = total.inverse();
    for (int d = lane; d < p.head_dim; d += ptx::kWarpSize) {
      const int64_t offset = row * p.head_dim + d;
      // A side without weight is not read: it may hold anything.
      const float a = weight_a == 0.f ? 0.f : weight_a * load_row_float(p.dtype, p.out_a, offset);
      const float b = weight_b == 0.f ? 0.f : weight_b * load_row_float(p.dtype, p.out_b, offset);
      store_row_float(p.dtype, p.out, offset, (a + b) * inverse);
    }
    ptx::warp_sync();  // every lane has read lse_a and lse_b, which lse may overwrite
    if (lane == 0) p.lse[row] = total.lse();
  }
}

}  // namespace paged_attn
