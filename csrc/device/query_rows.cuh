// The query rows of an item as operands, and what is known of each.
#pragma once

#include "device/fragments.cuh"
#include "device/ptx.cuh"
#include "device/softmax.cuh"
#include "mma_params.h"

namespace paged_attn {

// A row's visible keys within the item, its position and its ALiBi slope; rows past the item's
// last see nothing. And what its products are too large by: see WarpAttention.
struct RowInfo {
  int begin;
  int end;
  int position;
  float slope;
  float bias;
};

// All but the bias, which is found by other lanes.
__device__ __forceinline__ void find_row(const DecodeParams& p, const RowTile& item, int r,
                                         RowInfo& row) {
  row.begin = 0;
  row.end = 0;
  row.position = 0;
  row.slope = 0.f;
  if (r >= item.num_rows) return;
  const int64_t group = p.num_q_heads / p.shape.num_kv_heads;
  const int64_t index = (item.first_row + r) / group;
  const TokenRange visible = p.visible({item.seq, index, item.query_len});
  const int64_t begin = visible.begin > item.range.begin ? visible.begin : item.range.begin;
  const int64_t end = visible.end < item.range.end ? visible.end : item.range.end;
  const int64_t position = item.seq < 0 ? 0 : p.seq_len(item.seq) - item.query_len + index;
  row.begin = static_cast<int>(begin);
  row.end = static_cast<int>(end);
  row.position = static_cast<int>(position);
  if (p.alibi_slopes != nullptr) row.slope = p.alibi_slopes[p.row_target(item, r).head];
}

template <DType kKv, int kDim, int kColumns>
class QueryRows {
 public:
  // 8-bit values are exact in half precision, whatever the query is. With 16 bits the query has the
  // keys' dtype.
  static constexpr DType kOperand = is_8bit(kKv) ? DType::kF16 : kKv;

  // Many fragments leave few registers for anything else.
  static constexpr bool kCrowded = kDim / 16 * kColumns > 8;

  FragmentB fragments[kDim / 16][kColumns];

  // What a score is multiplied by: scale, K's scale and log2(e), for row 2t + c of column tile n.
  __device__ float factor(int n, int c) const { return kRescaled ? factors_[n][c] : scale_; }

  // The part of the factors that all rows have.
  __device__ float scale() const { return scale_; }

  // The sum of row g of column tile n, of the elements as the products have them.
  __device__ float sum_of_row(int n) const {
    float sum = 0.f;
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
#pragma unroll
      for (const uint32_t word : fragments[d][n].words) {
        const float2 pair = ptx::f16x2_to_float2(word);
        sum += pair.x + pair.y;
      }
    }
    sum += ptx::shuffle_xor(sum, 1);
    return sum + ptx::shuffle_xor(sum, 2);
  }

  // From row `first_row` of the item on. `k_scale` is that of all keys.
  __device__ void load(const DecodeMmaParams& params, const RowTile& item, int first_row,
                       float k_scale) {
    const DecodeParams& p = params.decode;
    scale_ = finite_factor(p.scale * k_scale * kLog2e * kWideningUnit<kKv>);
    const int g = threadIdx.x % ptx::kWarpSize / 4;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const int r = first_row + 8 * n + g;
      const bool live = r < item.num_rows;
      const RowTarget target = p.row_target(item, live ? r : 0);
      const int64_t offset = p.row(p.query, target.token, target.head);
      if constexpr (kRescaled) {
        const bool halves = p.query_dtype == DType::kF16;
        const float row_scale = halves ? 1.f : power_of_two(largest(params, offset, live));
        load_row(params, offset, live, n, row_scale);
        // This lane's rows of a result are 2t and 2t + 1; lane 4g knows row g.
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int row = 2 * (threadIdx.x % 4) + c;
          const float inverse = 1.f / ptx::shuffle(row_scale, 4 * row);  // a power of two
          factors_[n][c] = finite_factor(scale_ * inverse);
        }
      } else {
        load_row(params, offset, live, n, 1.f);
      }
    }
  }

 private:
  // With 8 bits the query's dtype is known at run time: bfloat16 rows, which become half precision,
  // are scaled by a power of two each, which is exact.
  static constexpr bool kRescaled = is_8bit(kKv);
  // 8-bit keys come with their dimensions permuted within 16: see load_keys.
  static constexpr bool kPermuted = is_8bit(kKv);

  float scale_;
  float factors_[kColumns][2];  // of rows that are rescaled

  // Two neighbouring elements as a word; 0 past head_dim and past the last row.
  static __device__ uint32_t load_word(const DecodeMmaParams& p, int64_t offset, int element,
                                       bool live) {
    if (!live || element >= p.decode.shape.head_dim) return 0;
    const uint16_t* address = static_cast<const uint16_t*>(p.decode.query.data) + offset + element;
    if (p.query_pairs) return ptx::load_global<uint32_t>(address);
    return ptx::load_global<uint16_t>(address) |
           static_cast<uint32_t>(ptx::load_global<uint16_t>(address + 1)) << 16;
  }

  static __device__ float2 load_pair(const DecodeMmaParams& p, int64_t offset, int element,
                                     bool live) {
    const uint32_t word = load_word(p, offset, element, live);
    return p.decode.query_dtype == DType::kF16 ? ptx::f16x2_to_float2(word)
                                               : ptx::bf16x2_to_float2(word);
  }

  __device__ void load_row(const DecodeMmaParams& p, int64_t offset, bool live, int n,
                           float row_scale) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int element = 16 * d + (kPermuted ? 4 * t + 2 * half : 2 * t + 8 * half);
        uint32_t& word = fragments[d][n].words[half];
        if constexpr (!kRescaled) {
          word = load_word(p, offset, element, live);
        } else {
          const float2 pair = load_pair(p, offset, element, live);
          word = pack_pair<kOperand>(pair.x * row_scale, pair.y * row_scale);
        }
      }
    }
  }

  // The largest magnitude of the row that lanes 4g to 4g + 3 share.
  static __device__ float largest(const DecodeMmaParams& p, int64_t offset, bool live) {
    float max = 0.f;
    for (int element = 2 * (threadIdx.x % 4); element < p.decode.shape.head_dim; element += 8) {
      const float2 pair = load_pair(p, offset, element, live);
      max = fmaxf(max, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
    max = fmaxf(max, ptx::shuffle_xor(max, 1));
    return fmaxf(max, ptx::shuffle_xor(max, 2));
  }

  // The power of two that brings x to [1, 2); 1 for 0, subnormals and infinity.
  static __device__ float power_of_two(float x) {
    const uint32_t exponent = ptx::float_to_bits(x) >> 23;
    return exponent == 0 || exponent > 253 ? 1.f : ptx::bits_to_float((254 - exponent) << 23);
  }
};

}  // namespace paged_attn
