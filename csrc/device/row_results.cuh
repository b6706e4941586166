// What the warps of a CTA found for the rows of an item, and how it becomes output.
#pragma once

#include "device/dtype.cuh"
#include "device/softmax.cuh"
#include "params.h"

namespace paged_attn {

template <int kWarps, int kRows, int kDim>
struct WarpResults {
  static constexpr int kNumWarps = kWarps;
  // Four words more than a row: lanes that hold neighbouring rows write to other banks.
  static constexpr int kPitch = kDim + 4;

  float max[kWarps][kRows];
  float sum[kWarps][kRows];
  float out[kWarps][kRows][kPitch];  // not normalised
};

// Merges the warps in order and writes the rows: to `out`, or as partial results of the chunk.
// target_of(r) tells where row r goes; out_scale multiplies the values.
template <DType kQuery, int kWarps, int kRows, int kDim, class TargetOf>
__device__ void write_rows(const DecodeParams& p, const WarpResults<kWarps, kRows, kDim>& results,
                           int num_rows, int64_t chunk, float out_scale, TargetOf target_of) {
  const bool partial = p.partial_out != nullptr;
  const int head_dim = p.shape.head_dim;
  for (int i = threadIdx.x; i < num_rows * head_dim; i += kWarps * ptx::kWarpSize) {
    const int r = i / head_dim;
    const int d = i % head_dim;
    const RowTarget target = target_of(r);
    SoftmaxState total;
    float sum = 0.f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      sum *= total.raise(results.max[warp][r]);
      const float weight = total.weight_of(results.max[warp][r]);
      total.sum += results.sum[warp][r] * weight;
      sum += results.out[warp][r][d] * weight;
    }
    if (!partial && p.sinks != nullptr) {
      sum *= total.raise(p.sinks[target.head]);
      total.add(p.sinks[target.head]);
    }
    const float value = sum * total.inverse() * out_scale;
    const int64_t row = target.token * p.num_q_heads + target.head;
    if (partial) {
      const int64_t slot = row * p.max_chunks + chunk;
      p.partial_out[slot * head_dim + d] = value;
      if (d == 0) p.partial_lse[slot] = total.lse();
    } else {
      store_float<kQuery>(p.out.data, p.row(p.out, target.token, target.head) + d, value);
      if (d == 0 && p.lse != nullptr) p.lse[row] = total.lse();
    }
  }
}

}  // namespace paged_attn
