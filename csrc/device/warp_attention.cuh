// Attention of one warp's query rows over tiles of tokens in shared memory, on tensor cores.
//
// The problem is transposed: S^T = K Q^T and O^T = V^T P^T. Tokens, then dimensions, lie on the 16
// rows of an m16n8k16 tile, query rows on its 8 columns. A lane, with g = lane / 4 and t = lane %
// 4, holds query rows 2t and 2t + 1 of each column tile; of S^T and P^T tokens g and g + 8 of each
// token tile, of O^T dimensions g and g + 8 of each dimension tile.
#pragma once

#include "device/fragments.cuh"
#include "device/ptx.cuh"
#include "device/query_rows.cuh"
#include "device/softmax.cuh"
#include "device/token_scales.cuh"
#include "mma_params.h"

namespace paged_attn {

// kColumns: tiles of 8 query rows.
template <DType kKv, int kDim, int kColumns, class Ring>
class WarpAttention {
 public:
  static constexpr int kTokenTiles = Ring::kTokens / 16;
  static constexpr int kDimTiles = kDim / 16;
  // Scales that differ from token to token are of 8-bit pools.
  static constexpr bool kTokenScales = is_8bit(kKv);

  using Scores = FragmentC[kTokenTiles][kColumns];   // S^T
  using Weights = FragmentB[kTokenTiles][kColumns];  // P^T

  // The item's rows from `first_row` on; `rows` is what is known of them, after the next barrier.
  // The warp that `owns` them adds the bias.
  __device__ WarpAttention(const DecodeMmaParams& params, const RowTile& item, int first_row,
                           RowInfo* rows, bool owns)
      : params_(params), item_(item), rows_(rows) {
    query_.load(params, item, first_row,
                has_token_scales() ? 1.f : params.decode.k_scale.at(0, 0, item.kv_head));
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        max_[n][c] = -1e30f;
        sum_[n][c] = 0.f;
      }
#pragma unroll
      for (int d = 0; d < kDimTiles; ++d) out_[d][n] = FragmentC{};
      if constexpr (kBiased) {
        const float bias = kWideningBias<kKv> * query_.sum_of_row(n);
        if (owns && t() == 0) rows[8 * n + g()].bias = bias;
      }
    }
    if constexpr (!Query::kCrowded) plain_ = plain_tiles();
  }

  // To be called before the first tile.
  __device__ void prepare(const Ring& ring) {
    if constexpr (!Query::kCrowded) load_token_scales(ring, ring.first_token());
  }

  // `key` is what the ring gave.
  __device__ void compute_scores(uint32_t key, Scores& scores) const {
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) scores[m][n] = FragmentC{};
#pragma unroll
      for (int d = 0; d < kDimTiles; d += kLoadTiles) {
        FragmentA keys[kLoadTiles];
        load_keys<kKv>(key + 16 * (m * Ring::kPitch + d * element_size(kKv)), keys);
#pragma unroll
        for (int i = 0; i < kLoadTiles; ++i) {
#pragma unroll
          for (int n = 0; n < kColumns; ++n) {
            multiply<kOperand>(scores[m][n], keys[i], query_.fragments[d + i][n]);
          }
        }
      }
    }
  }

  // Scores of the ring's tile to probabilities, as an operand.
  __device__ void weigh(const Ring& ring, Scores& scores, Weights& weights) {
    const int first = static_cast<int>(ring.first_token());
    const Positions plain = Query::kCrowded ? plain_tiles() : plain_;
    Factors factors;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) factors[n][c] = query_.factor(n, c);
    }
    if (first >= plain.begin && first < plain.end) [[likely]] {
      exponentiate(factors, scores, weights, [](int) { return 1.f; });
      return;
    }
    if (!has_token_scales()) {
      finish_scores(first, factors, scores);
      exponentiate(factors, scores, weights, [](int) { return 1.f; });
      return;
    }
    if constexpr (kTokenScales) {
      // Crowded, scales are not loaded a tile ahead: they are held for a shorter time.
      if constexpr (Query::kCrowded) load_token_scales(ring, ring.first_token());
      scale_scores(scores);
      finish_scores(first, factors, scores);
      rescale(scales_.raise());
      exponentiate(factors, scores, weights, [&](int token) { return scales_.value(token); });
      if constexpr (!Query::kCrowded) load_token_scales(ring, ring.first_token_of_next());
    }
  }

  // `value` is what the ring gave.
  __device__ void accumulate(uint32_t value, const Weights& weights) {
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
      for (int d = 0; d < kDimTiles; d += kLoadTiles) {
        FragmentA values[kLoadTiles];
        load_values<kKv>(value + 16 * (m * Ring::kPitch + d * element_size(kKv)), values);
#pragma unroll
        for (int i = 0; i < kLoadTiles; ++i) {
#pragma unroll
          for (int n = 0; n < kColumns; ++n) {
            multiply<kOperand>(out_[d + i][n], values[i], weights[m][n]);
          }
        }
      }
    }
  }

  // Hands each row and its softmax to row(r, max, sum), where `max` is natural, and each element to
  // element(r, d, value): not normalised, and not multiplied by a V scale of all tokens. All lanes
  // call row() for their rows, each before its elements.
  template <class Row, class Element>
  __device__ void publish(Row row, Element element) const {
    const float factor = kWideningUnit<kKv> * (has_token_scales() ? scales_.largest() : 1.f);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int r = 8 * n + 2 * t() + c;
        float sum = sum_[n][c];
#pragma unroll
        for (int mask = 4; mask < ptx::kWarpSize; mask *= 2) sum += ptx::shuffle_xor(sum, mask);
        row(r, (max_[n][c] - shift(n, c)) * kLn2, sum);
#pragma unroll
        for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            element(r, 16 * d + dimension_of<kKv>(g(), half != 0),
                    out_[d][n].values[2 * half + c] * factor);
          }
        }
      }
    }
  }

 private:
  using Query = QueryRows<kKv, kDim, kColumns>;
  static constexpr DType kOperand = Query::kOperand;
  static constexpr bool kBiased = kWideningBias<kKv> != 0.f;
  // Dimension tiles of one fragment load: 32 bytes of a row.
  static constexpr int kLoadTiles = is_8bit(kKv) ? 2 : 1;

  // What each score is still to be multiplied by: query.factor, or 1 once it is final.
  using Factors = float[kColumns][2];

  static __device__ int g() { return threadIdx.x % ptx::kWarpSize / 4; }
  static __device__ int t() { return threadIdx.x % 4; }

  struct Positions {
    int begin;
    int end;
  };

  // Tiles whose first token is in this range need no mask, no softcap, no ALiBi and no scales of
  // their tokens: a score is a product, and the largest product the largest score.
  __device__ Positions plain_tiles() const {
    const DecodeParams& p = params_.decode;
    if (p.softcap != 0.f || p.alibi_slopes != nullptr || has_token_scales() ||
        !(query_.scale() > 0.f)) {
      return {0, 0};
    }
    return {static_cast<int>(item_.common.begin),
            static_cast<int>(item_.common.end) - Ring::kTokens + 1};
  }

  __device__ bool has_token_scales() const { return kTokenScales && params_.token_scales; }

  __device__ void load_token_scales(const Ring& ring, uint32_t first) {
    if constexpr (kTokenScales) {
      if (has_token_scales()) scales_.load(params_.decode, ring, item_.kv_head, first);
    }
  }

  // What products of this lane's rows are too large by.
  __device__ float bias(int n, int c) const {
    return kBiased ? rows_[8 * n + 2 * t() + c].bias : 0.f;
  }

  // What finished scores are too large by, the maxima with them. It is the same for all tokens of a
  // row, and so for no probability; but where the tokens have scales, it is taken back.
  __device__ float shift(int n, int c) const {
    return kBiased && !has_token_scales() ? bias(n, c) * query_.factor(n, c) : 0.f;
  }

  // Scale, softcap, ALiBi and mask, to base 2.
  __device__ void finish_scores(int first, Factors& factors, Scores& scores) const {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const RowInfo& row = rows_[8 * n + 2 * t() + c];
        const float excess = shift(n, c);
#pragma unroll
        for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& score = scores[m][n].values[2 * half + c];
            score = special_score(row, first + 16 * m + 8 * half + g(),
                                  fmaf(score, factors[n][c], -excess)) +
                    excess;
          }
        }
        factors[n][c] = 1.f;
      }
    }
  }

  __device__ float special_score(const RowInfo& row, int position, float score) const {
    const DecodeParams& p = params_.decode;
    if (position < row.begin || position >= row.end) return -kInfinity;
    if (p.softcap > 0.f) {
      score = p.softcap * kLog2e * ptx::tanh(score * kLn2 / p.softcap);
    }
    return score + row.slope * kLog2e * static_cast<float>(position - row.position);
  }

  // Probabilities of a tile, each multiplied by what `scale` says of its token, as an operand.
  //
  // They are taken with the maxima so far, and only where a sum of them shows that one may be too
  // large for half precision is its row's maximum raised: mostly one vote of all rows is all it
  // takes.
  template <class Scale>
  __device__ void exponentiate(const Factors& factors, const Scores& scores, Weights& weights,
                               Scale scale) {
    float sums[kColumns][2];  // of this lane's tokens alone
    try_exponentiate(factors, scores, weights, sums, scale);
    if (ptx::any(any_too_large(sums))) [[unlikely]] {
      raise_max(factors, scores, sums);
      try_exponentiate(factors, scores, weights, sums, scale);
    }
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) sum_[n][c] += sums[n][c];
    }
  }

  static __device__ bool too_large(float sum) { return sum > 256.f; }

  static __device__ bool any_too_large(const float (&sums)[kColumns][2]) {
    bool found = false;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) found = found || too_large(sums[n][c]);
    }
    return found;
  }

  template <class Scale>
  __device__ void try_exponentiate(const Factors& factors, const Scores& scores, Weights& weights,
                                   float (&sums)[kColumns][2], Scale scale) const {
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float token_scale = scale(16 * m + 8 * half + g());
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          float pair[2];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const float score = scores[m][n].values[2 * half + c];
            const float weight = ptx::exp2(fmaf(score, factors[n][c], -max_[n][c]));
            sums[n][c] = m + half == 0 ? weight : sums[n][c] + weight;
            pair[c] = weight * token_scale;
          }
          // A movmatrix turns the fragment of a result into one of B.
          weights[m][n].words[half] = ptx::movmatrix_trans(pack_pair<kOperand>(pair[0], pair[1]));
        }
      }
    }
  }

  // Raises the running maxima to those of the tile, of rows that need it: what the other rows of
  // the warp are does not show in a row's bits.
  __device__ void raise_max(const Factors& factors, const Scores& scores,
                            const float (&sums)[kColumns][2]) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float max = scores[0][n].values[c];
#pragma unroll
        for (int m = 0; m < kTokenTiles; ++m) {
          max = fmaxf(max, fmaxf(scores[m][n].values[c], scores[m][n].values[2 + c]));
        }
        max *= factors[n][c];
        float largest_sum = sums[n][c];
#pragma unroll
        for (int mask = 4; mask < ptx::kWarpSize; mask *= 2) {
          max = fmaxf(max, ptx::shuffle_xor(max, mask));
          largest_sum = fmaxf(largest_sum, ptx::shuffle_xor(largest_sum, mask));
        }
        max = too_large(largest_sum) ? fmaxf(max, max_[n][c]) : max_[n][c];
        const float keep = ptx::exp2(max_[n][c] - max);
        max_[n][c] = max;
        sum_[n][c] *= keep;
#pragma unroll
        for (int d = 0; d < kDimTiles; ++d) {
          out_[d][n].values[c] *= keep;
          out_[d][n].values[2 + c] *= keep;
        }
      }
    }
  }

  // Multiplies scores by what belongs to their tokens, and takes back what they are too large by.
  __device__ void scale_scores(Scores& scores) const {
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = scales_.key(16 * m + 8 * half + g());
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& score = scores[m][n].values[2 * half + c];
            score = (score - bias(n, c)) * scale;
          }
        }
      }
    }
  }

  // What was summed of values.
  __device__ void rescale(float keep) {
#pragma unroll
    for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        for (float& value : out_[d][n].values) value *= keep;
      }
    }
  }

  const DecodeMmaParams& params_;
  const RowTile& item_;
  const RowInfo* rows_;
  Positions plain_;
  Query query_;
  TokenScales<Ring> scales_;
  // Base 2, and finite from the start: no inf - inf.
  float max_[kColumns][2];
  float sum_[kColumns][2];  // of this lane's tokens alone
  FragmentC out_[kDimTiles][kColumns];
};

}  // namespace paged_attn
