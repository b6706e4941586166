// What the warps of a CTA found for the rows of a row tile, and where it goes.
#pragma once

#include "device/dtype.cuh"
#include "device/softmax.cuh"
#include "params.h"

namespace paged_attn {

template <int kWarps, int kRows, int kDim>
struct WarpResults {
  // Four words more than a row: lanes that hold neighbouring rows write to other banks.
  static constexpr int kPitch = kDim + 4;

  float max[kWarps][kRows];
  float sum[kWarps][kRows];
  float out[kWarps][kRows][kPitch];  // not normalised
};

// Writes one element of a finished row, and with the first its LSE.
__device__ __forceinline__ void write_output(const DecodeParams& p, const RowTarget& target, int d,
                                             float value, float lse) {
  store_row_float(p.query_dtype, p.out.data, p.row(p.out, target.token, target.head) + d, value);
  if (d == 0 && p.lse != nullptr) p.lse[target.token * p.num_q_heads + target.head] = lse;
}

// The same of a chunk's partial row.
__device__ __forceinline__ void write_chunk(const DecodeParams& p, const RowTarget& target,
                                            int64_t chunk, int d, float value, float lse) {
  const int64_t row = (target.token * p.num_q_heads + target.head) * p.max_chunks + chunk;
  p.partial_out[row * p.shape.head_dim + d] = value;
  if (d == 0) p.partial_lse[row] = lse;
}

// Counts the sink of a row into its softmax; what was summed must be multiplied by the result.
__device__ __forceinline__ float add_sink(const DecodeParams& p, int64_t head,
                                          SoftmaxState& softmax) {
  if (p.sinks == nullptr) return 1.f;
  const float keep = softmax.raise(p.sinks[head]);
  softmax.add(p.sinks[head]);
  return keep;
}

// Merges the warps, in order, and hands write(r, d, value, lse) each element of each row. sink(r,
// softmax) may count more into a row's softmax. All threads of the CTA take part.
template <int kWarps, int kRows, int kDim, class Sink, class Write>
__device__ void merge_warps(const WarpResults<kWarps, kRows, kDim>& results, int num_rows,
                            int head_dim, Sink sink, Write write) {
  for (int i = threadIdx.x; i < num_rows * head_dim; i += kWarps * ptx::kWarpSize) {
    const int r = i / head_dim;
    const int d = i % head_dim;
    SoftmaxState total;
    float sum = 0.f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      sum *= total.raise(results.max[warp][r]);
      const float weight = total.weight_of(results.max[warp][r]);
      total.sum += results.sum[warp][r] * weight;
      sum += results.out[warp][r][d] * weight;
    }
    sum *= sink(r, total);
    write(r, d, sum * total.inverse(), total.lse());
  }
}

}  // namespace paged_attn
