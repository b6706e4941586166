// Paged decode attention on tensor cores (sm_80 and later), for any number of query rows.
//
// The problem is transposed: S^T = K Q^T and O^T = V^T P^T. Tokens, then dimensions, lie on the 16
// rows of an m16n8k16 tile, and the query rows that share a KV head (heads of its group, times
// query tokens) on its 8 columns: K and V are read once for all of them.
//
// Each warp streams tiles of tokens of its own through a private ring in shared memory, without a
// CTA barrier until the end of an item. A K buffer is refilled as soon as its scores are computed,
// a V buffer as soon as it is multiplied, so that the whole ring is always in flight.
#pragma once

#include "device/fragments.cuh"
#include "device/ptx.cuh"
#include "device/query_rows.cuh"
#include "device/row_results.cuh"
#include "device/softmax.cuh"
#include "device/token_ring.cuh"
#include "device/work.cuh"
#include "mma_params.h"

namespace paged_attn {

// kDim: head_dim rounded up to 64, 128 or 256. kColumns: tiles of 8 query rows.
template <DType kQuery, DType kKv, int kDim, int kColumns>
struct DecodeMma {
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * ptx::kWarpSize;
  static constexpr int kRows = 8 * kColumns;
  static constexpr int kDimTiles = kDim / 16;
  // Dimensions of one fragment load: 32 bytes of a row.
  static constexpr int kLoadTiles = is_8bit(kKv) ? 2 : 1;
  using Ring = TokenRing<kKv, kDim>;
  static constexpr int kTokenTiles = Ring::kTokens / 16;
  using Results = WarpResults<kWarps, kRows, kDim>;
  using Query = QueryRows<kQuery, kKv, kDim, kColumns>;
  static constexpr DType kOperand = Query::kOperand;

  struct Smem {
    union {
      typename Ring::Buffers rings[kWarps];
      Results results;  // once the rings have run dry
    };
    RowInfo rows[kRows];
    // Thread 0's, for all to read. In registers they would be there while tiles are walked, and
    // take those of a CTA more per SM.
    WorkList list;
    Work work;
    bool has_work;
    bool merges;  // whether this CTA merges the fragments of its row tile
  };

  // CTAs per SM that registers must suffice for: those of a plan, see cuda/decode.cpp.
  static constexpr int kMinCtas = 2;

  // A lane's share of S^T or P^T: tokens g and g + 8 of each token tile, rows 2t and 2t + 1 of each
  // column tile.
  using Scores = FragmentC[kTokenTiles][kColumns];

  // What each is still to be multiplied by: query.factor, or 1 once it is final.
  using Factors = float[kColumns][2];

  // What a lane knows of its rows, 2t and 2t + 1 of each column tile.
  struct State {
    // Base 2, and finite from the start: no inf - inf.
    float max[kColumns][2];
    float sum[kColumns][2];  // of this lane's tokens alone
    FragmentC out[kDimTiles][kColumns];
  };

  static __device__ void reset(State& state) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        state.max[n][c] = -1e30f;
        state.sum[n][c] = 0.f;
      }
#pragma unroll
      for (int d = 0; d < kDimTiles; ++d) state.out[d][n] = FragmentC{};
    }
  }

  static __device__ void compute_scores(uint32_t key, const Query& query, Scores& scores) {
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
            multiply<kOperand>(scores[m][n], keys[i], query.fragments[d + i][n]);
          }
        }
      }
    }
  }

  // Scale, softcap, ALiBi and mask, to base 2. `first` is the position of the tile's first token.
  static __device__ void finish_scores(const DecodeParams& p, const RowInfo (&rows)[kRows],
                                       int first, Factors& factors, Scores& scores) {
    const int g = threadIdx.x % ptx::kWarpSize / 4;
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const RowInfo& row = rows[8 * n + 2 * t + c];
#pragma unroll
        for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& score = scores[m][n].values[2 * half + c];
            score = special_score(p, row, first + 16 * m + 8 * half + g, score * factors[n][c]);
          }
        }
        factors[n][c] = 1.f;
      }
    }
  }

  static __device__ float special_score(const DecodeParams& p, const RowInfo& row, int position,
                                        float score) {
    if (position < row.begin || position >= row.end) return -kInfinity;
    if (p.softcap > 0.f) {
      score = p.softcap * kLog2e * ptx::tanh(score * kLn2 / p.softcap);
    }
    return score + row.slope * kLog2e * static_cast<float>(position - row.position);
  }

  // Raises the running maxima where a score exceeds one by so much that probabilities might
  // overflow half precision; mostly nothing has to be rescaled, and one vote is all it takes.
  static __device__ void raise_max(const Scores& scores, const Factors& factors, State& state) {
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
        raise = raise || fmaf(max, factors[n][c], -state.max[n][c]) > kSlack;
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
        max = fmaxf(max, state.max[n][c]);
        const float keep = ptx::exp2(state.max[n][c] - max);
        state.max[n][c] = max;
        state.sum[n][c] *= keep;
#pragma unroll
        for (int d = 0; d < kDimTiles; ++d) {
          state.out[d][n].values[c] *= keep;
          state.out[d][n].values[2 + c] *= keep;
        }
      }
    }
  }

  // P^T of 16 tokens as an operand: a movmatrix turns the fragment of a result into one of B.
  static __device__ void make_probabilities(Scores& scores, const Factors& factors, State& state,
                                            FragmentB (&weights)[kTokenTiles][kColumns]) {
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float* pair = &scores[m][n].values[2 * half];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            pair[c] = ptx::exp2(fmaf(pair[c], factors[n][c], -state.max[n][c]));
            state.sum[n][c] += pair[c];
          }
          weights[m][n].words[half] = ptx::movmatrix_trans(pack_pair<kOperand>(pair[0], pair[1]));
        }
      }
    }
  }

  static __device__ void accumulate(uint32_t value,
                                    const FragmentB (&weights)[kTokenTiles][kColumns],
                                    State& state) {
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
            multiply<kOperand>(state.out[d + i][n], values[i], weights[m][n]);
          }
        }
      }
    }
  }

  // Tiles whose first token is in [begin, end) need no mask, no softcap and no ALiBi: a score is a
  // product, and the largest product the largest score.
  static __device__ TokenRange plain_tiles(const DecodeParams& p, const RowTile& item,
                                           const Query& query) {
    if (p.softcap != 0.f || p.alibi_slopes != nullptr || !(query.factor(0, 0) > 0.f)) return {0, 0};
    return {item.common.begin, item.common.end - Ring::kTokens + 1};
  }

  // A warp's tiles of the item: warp, warp + kWarps, ...
  static __device__ void walk_tiles(const DecodeMmaParams& p, const RowTile& item,
                                    const Query& query, Smem& smem, State& state) {
    // Lane 0's: the compiler knows that it is the same for the whole warp.
    const int warp = ptx::shuffle(threadIdx.x / ptx::kWarpSize, 0);
    const TokenRange plain = plain_tiles(p.decode, item, query);
    const int plain_begin = static_cast<int>(plain.begin);
    const int plain_end = static_cast<int>(plain.end);
    Ring ring(p, item, smem.rings[warp], warp, kWarps);
    for (ring.fill(); ring.has_tile(); ring.advance()) {
      const int first = static_cast<int>(ring.first_token());
      Scores scores;
      compute_scores(ring.wait_key(), query, scores);
      ring.refill_key();
      Factors factors;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        for (int c = 0; c < 2; ++c) factors[n][c] = query.factor(n, c);
      }
      if (first < plain_begin || first >= plain_end) [[unlikely]] {
        finish_scores(p.decode, smem.rows, first, factors, scores);
      }
      raise_max(scores, factors, state);
      FragmentB weights[kTokenTiles][kColumns];
      make_probabilities(scores, factors, state, weights);
      accumulate(ring.wait_value(), weights, state);
      ring.refill_value();
    }
    ring.drain();
  }

  static __device__ void publish(const State& state, Results& results) {
    const int warp = threadIdx.x / ptx::kWarpSize;
    const int g = threadIdx.x % ptx::kWarpSize / 4;
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = 8 * n + 2 * t + c;
        float sum = state.sum[n][c];
#pragma unroll
        for (int mask = 4; mask < ptx::kWarpSize; mask *= 2) sum += ptx::shuffle_xor(sum, mask);
        if (g == 0) {
          results.max[warp][row] = state.max[n][c] * kLn2;
          results.sum[warp][row] = sum;
        }
#pragma unroll
        for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            results.out[warp][row][16 * d + dimension_of<kKv>(g, half != 0)] =
                state.out[d][n].values[2 * half + c];
          }
        }
      }
    }
  }

  static __device__ void write(const DecodeMmaParams& p, const Work& work, const Smem& smem) {
    const DecodeParams& decode = p.decode;
    const int head_dim = decode.shape.head_dim;
    const float v_scale = decode.v_scale.at(0, 0, work.tile.kv_head);
    merge_warps(
        smem.results, work.tile.num_rows, head_dim,
        [&](int r, SoftmaxState& softmax) {
          if (work.result != Work::Result::kOutput) return 1.f;  // once, by whoever merges
          return add_sink(decode, decode.row_target(work.tile, r).head, softmax);
        },
        [&](int r, int d, float value, float lse) {
          value *= v_scale;
          if (work.result == Work::Result::kFragment) {
            const int64_t row = work.slot * kRows + r;
            p.fragment_out[row * head_dim + d] = value;
            if (d == 0) p.fragment_lse[row] = lse;
            return;
          }
          const RowTarget target = decode.row_target(work.tile, r);
          if (work.result == Work::Result::kChunk) {
            write_chunk(decode, target, work.tile.chunk, d, value, lse);
          } else {
            write_output<kQuery>(decode, target, d, value, lse);
          }
        });
  }

  // Whoever finishes the last fragment of a row tile merges all of them, in their order. Nobody
  // waits.
  static __device__ void finish_fragment(const DecodeMmaParams& p, const Work& work, Smem& smem) {
    ptx::fence_gpu();
    ptx::cta_sync();  // every thread's part of the fragment is written and fenced
    if (threadIdx.x == 0) {
      const uint32_t last = work.cut.num_fragments - 1;
      // Wraps to 0 at the last arrival, ready for the next launch.
      smem.merges = ptx::atomic_increment(&p.plan.semaphores[work.cut.first_cut], last) == last;
    }
    ptx::cta_sync();  // all know whether this was the last
    if (!smem.merges) return;
    ptx::fence_gpu();
    const DecodeParams& decode = p.decode;
    const int head_dim = decode.shape.head_dim;
    for (int i = threadIdx.x; i < work.tile.num_rows * head_dim; i += kThreads) {
      const int r = i / head_dim;
      const int d = i % head_dim;
      SoftmaxState total;
      float sum = 0.f;
      for (int fragment = 0; fragment < work.cut.num_fragments; ++fragment) {
        const int64_t row = fragment_slot(work.cut, fragment) * kRows + r;
        sum *= total.raise(p.fragment_lse[row]);
        sum += total.add(p.fragment_lse[row]) * p.fragment_out[row * head_dim + d];
      }
      const RowTarget target = decode.row_target(work.tile, r);
      sum *= add_sink(decode, target.head, total);
      write_output<kQuery>(decode, target, d, sum * total.inverse(), total.lse());
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kMinCtas)
    decode_mma_kernel(const __grid_constant__ DecodeMmaParams p) {
  auto& smem = ptx::shared_memory<typename Kernel::Smem>();
  if (threadIdx.x == 0) smem.list.start(p, Kernel::kRows);
  while (true) {
    if (threadIdx.x == 0) smem.has_work = smem.list.next(smem.work);
    ptx::cta_sync();  // smem.work is complete
    if (!smem.has_work) return;
    const Work& work = smem.work;
    if (threadIdx.x < Kernel::kRows) {
      smem.rows[threadIdx.x] = make_row_info(p.decode, work.tile, threadIdx.x);
    }
    typename Kernel::Query query;
    query.load(p.decode, work.tile);
    typename Kernel::State state;
    Kernel::reset(state);
    ptx::cta_sync();  // smem.rows is complete
    Kernel::walk_tiles(p, work.tile, query, smem, state);
    ptx::cta_sync();  // every ring has run dry, before the results overwrite them
    Kernel::publish(state, smem.results);
    ptx::cta_sync();  // every warp's result is in shared memory
    Kernel::write(p, work, smem);
    if (work.result == Work::Result::kFragment) Kernel::finish_fragment(p, work, smem);
    ptx::cta_sync();  // all have read the work and the results, before the next ones
  }
}

template <DType kQuery, DType kKv, int kDim, int kColumns>
void launch_decode_mma(const DecodeMmaParams& params, unsigned num_ctas, cudaStream_t stream) {
  using Kernel = DecodeMma<kQuery, kKv, kDim, kColumns>;
  ptx::launch(decode_mma_kernel<Kernel>, num_ctas, Kernel::kThreads, sizeof(typename Kernel::Smem),
              stream, params);
}

}  // namespace paged_attn
