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
template <DType kQuery, DType kKv, int kDim, int kColumns, class Ring>
class WarpAttention {
 public:
  static constexpr int kTokenTiles = Ring::kTokens / 16;
  static constexpr int kDimTiles = kDim / 16;
  // Scales that differ from token to token are of 8-bit pools.
  static constexpr bool kTokenScales = is_8bit(kKv);

  using Scores = FragmentC[kTokenTiles][kColumns];   // S^T
  using Weights = FragmentB[kTokenTiles][kColumns];  // P^T

  // The item's rows from `first_row` on; `rows` is what is known of them.
  __device__ WarpAttention(const DecodeMmaParams& params, const RowTile& item, int first_row,
                           const RowInfo* rows)
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
    }
    if constexpr (!Query::kCrowded) plain_ = plain_tiles();
  }

  // Scales of the tile whose first token is `first`, to be called a tile ahead.
  __device__ void load_token_scales(const Ring& ring, uint32_t first) {
    if constexpr (kTokenScales && !Query::kCrowded) {
      if (has_token_scales()) scales_.load(params_.decode, ring, item_.kv_head, first);
    }
  }

  // `key` is what the ring gave.
  __device__ void compute_scores(uint32_t key, Scores& scores) const {
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        const float (&start)[2] = query_.start_of_score(n);
        scores[m][n] = FragmentC{{start[0], start[1], start[0], start[1]}};
      }
#pragma unroll
      for (int d = 0; d < kDimTiles; d += kLoadTiles) {
        FragmentA keys[kLoadTiles];
        load_keys<kKv, Query::kBiased>(key + 16 * (m * Ring::kPitch + d * element_size(kKv)), keys);
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
    if constexpr (kTokenScales) {
      if (has_token_scales()) {
        if constexpr (Query::kCrowded) {  // not a tile ahead: it is held for a shorter time
          scales_.load(params_.decode, ring, item_.kv_head, ring.first_token());
        }
        scale_scores(scores);
      }
    }
    Factors factors;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) factors[n][c] = query_.factor(n, c);
    }
    const int first = static_cast<int>(ring.first_token());
    const Positions plain = Query::kCrowded ? plain_tiles() : plain_;
    if (first < plain.begin || first >= plain.end) [[unlikely]]
      finish_scores(first, factors, scores);
    raise_max(scores, factors);
    exponentiate(factors, scores);
    if constexpr (kTokenScales) {
      if (has_token_scales()) scale_probabilities(scores);
    }
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // A movmatrix turns the fragment of a result into one of B.
          const float* pair = &scores[m][n].values[2 * half];
          weights[m][n].words[half] = ptx::movmatrix_trans(pack_pair<kOperand>(pair[0], pair[1]));
        }
      }
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
    const float factor = kTokenScales && has_token_scales() ? scales_.largest() : 1.f;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int r = 8 * n + 2 * t() + c;
        float sum = sum_[n][c];
#pragma unroll
        for (int mask = 4; mask < ptx::kWarpSize; mask *= 2) sum += ptx::shuffle_xor(sum, mask);
        row(r, max_[n][c] * kLn2, sum);
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
  using Query = QueryRows<kQuery, kKv, kDim, kColumns>;
  static constexpr DType kOperand = Query::kOperand;
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

  // Tiles whose first token is in this range need no mask, no softcap and no ALiBi: a score is a
  // product, and the largest product the largest score.
  __device__ Positions plain_tiles() const {
    const DecodeParams& p = params_.decode;
    if (p.softcap != 0.f || p.alibi_slopes != nullptr || !(query_.factor(0, 0) > 0.f)) {
      return {0, 0};
    }
    return {static_cast<int>(item_.common.begin),
            static_cast<int>(item_.common.end) - Ring::kTokens + 1};
  }

  __device__ bool has_token_scales() const { return kTokenScales && params_.token_scales; }

  // Scale, softcap, ALiBi and mask, to base 2.
  __device__ void finish_scores(int first, Factors& factors, Scores& scores) const {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const RowInfo& row = rows_[8 * n + 2 * t() + c];
#pragma unroll
        for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& score = scores[m][n].values[2 * half + c];
            score = special_score(row, first + 16 * m + 8 * half + g(), score * factors[n][c]);
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

  // Raises the running maxima where a score exceeds one by so much that probabilities might
  // overflow half precision; mostly nothing has to be rescaled, and one vote is all it takes.
  __device__ void raise_max(const Scores& scores, const Factors& factors) {
    constexpr float kSlack = 8.f;
    float tile_max[kColumns][2];  // of this lane's tokens alone
    bool raise = false;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float max = fmaxf(scores[0][n].values[c], scores[0][n].values[2 + c]);
#pragma unroll
        for (int m = 1; m < kTokenTiles; ++m) {
          max = fmaxf(max, fmaxf(scores[m][n].values[c], scores[m][n].values[2 + c]));
        }
        tile_max[n][c] = max;
        raise = raise || fmaf(max, factors[n][c], -max_[n][c]) > kSlack;
      }
    }
    if (!ptx::any(raise)) [[likely]]
      return;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float max = tile_max[n][c] * factors[n][c];
#pragma unroll
        for (int mask = 4; mask < ptx::kWarpSize; mask *= 2) {
          max = fmaxf(max, ptx::shuffle_xor(max, mask));
        }
        max = fmaxf(max, max_[n][c]);
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

  __device__ void exponentiate(const Factors& factors, Scores& scores) {
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& score = scores[m][n].values[i];
          score = ptx::exp2(fmaf(score, factors[n][i % 2], -max_[n][i % 2]));
          sum_[n][i % 2] += score;
        }
      }
    }
  }

  // Multiplies what belongs to each token.
  template <class Factor>
  static __device__ void scale_tokens(Scores& scores, Factor factor) {
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = factor(16 * m + 8 * half + g());
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          scores[m][n].values[2 * half] *= scale;
          scores[m][n].values[2 * half + 1] *= scale;
        }
      }
    }
  }

  __device__ void scale_scores(Scores& scores) const {
    scale_tokens(scores, [&](int token) { return scales_.key(token); });
  }

  __device__ void scale_probabilities(Scores& scores) {
    const float keep = scales_.raise();
#pragma unroll
    for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        for (float& value : out_[d][n].values) value *= keep;
      }
    }
    scale_tokens(scores, [&](int token) { return scales_.value(token); });
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
