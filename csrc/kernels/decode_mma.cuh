// Paged decode attention on tensor cores (sm_80 and later), for any number of query rows.
//
// The query rows that share a KV head (heads of its group, times query tokens) are taken together,
// up to kRows of them: K and V are read once for all. Few rows are every warp's, and each warp
// streams tiles of tokens of its own through a private ring in shared memory, without a CTA barrier
// until the end of an item. Many rows are divided among the warps, which share a ring.
//
// A K buffer is refilled as soon as its scores are computed, a V buffer as soon as it is
// multiplied, so that the whole ring is always in flight.
#pragma once

#include "device/fragment_merge.cuh"
#include "device/ptx.cuh"
#include "device/query_rows.cuh"
#include "device/row_results.cuh"
#include "device/softmax.cuh"
#include "device/token_ring.cuh"
#include "device/warp_attention.cuh"
#include "device/work.cuh"
#include "mma_params.h"

namespace paged_attn {

// kDim: head_dim rounded up to 64, 128 or 256. kRows: 8 or 16, with private rings, or 128.
template <DType kKv, int kDim, int kRows>
struct DecodeMma {
  static constexpr int kTileRows = kRows;
  static constexpr bool kShared = kRows > 16;
  static constexpr int kWarps = kShared ? 8 : 4;
  static constexpr int kThreads = kWarps * ptx::kWarpSize;
  static constexpr int kWarpRows = kShared ? kRows / kWarps : kRows;
  static constexpr int kRings = kShared ? 1 : kWarps;
  using Ring = TokenRing<kKv, kDim, kWarps / kRings>;
  using Results = WarpResults<kRings, kWarpRows, kDim>;
  using Warp = WarpAttention<kKv, kDim, kWarpRows / 8, Ring>;

  struct Smem {
    union {
      typename Ring::Buffers rings[kRings];
      Results results;  // once the rings have run dry
    };
    RowInfo rows[kRows];
    // The first warp's, for all to read. In registers they would be there while tiles are walked,
    // and take those of a CTA more per SM.
    WorkList list;
    Work work;
    bool has_work;
    bool last;  // see FragmentMerge
  };

  // CTAs per SM that registers must suffice for: those that a plan counts on.
  static constexpr int kMinCtas =
      resident_ctas(kDim, kRows, element_size(kKv), shared_kib_per_sm(ptx::kArch));
  static_assert(sizeof(Smem) <= smem_kib(kDim, kRows, element_size(kKv)) * 1024 - 1024);

  // Lane 0's: the compiler knows that it is the same for the whole warp.
  static __device__ int warp_index() { return ptx::shuffle(threadIdx.x / ptx::kWarpSize, 0); }

  // A warp's tiles of the item.
  static __device__ void walk_tiles(const DecodeMmaParams& p, const RowTile& item, bool has_rows,
                                    Smem& smem, Warp& warp) {
    const int index = kShared ? 0 : warp_index();
    Ring ring(p, item, smem.rings[index], index, kRings);
    ring.fill();
    if (has_rows && ring.has_tile()) warp.prepare(ring);
    for (; ring.has_tile(); ring.advance()) {
      typename Warp::Scores scores;
      typename Warp::Weights weights;
      const uint32_t key = ring.wait_key();
      if (has_rows) warp.compute_scores(key, scores);
      ring.refill_key();
      if (has_rows) warp.weigh(ring, scores, weights);
      const uint32_t value = ring.wait_value();
      if (has_rows) warp.accumulate(value, weights);
      ring.refill_value();
    }
    ring.drain();
  }

  // Where a row of an item goes.
  struct RowWriter {
    const DecodeMmaParams& p;
    const Work& work;
    float v_scale;

    __device__ RowWriter(const DecodeMmaParams& params, const Work& item)
        : p(params),
          work(item),
          v_scale(params.token_scales ? 1.f : params.decode.v_scale.at(0, 0, item.tile.kv_head)) {}

    __device__ float sink(int r, SoftmaxState& softmax) const {
      if (work.result != Work::Result::kOutput) return 1.f;  // once, by whoever merges
      return add_sink(p.decode, p.decode.row_target(work.tile, r).head, softmax);
    }

    // An element, normalised but for V's scale.
    __device__ void write(int r, int d, float value, float lse) const {
      value *= v_scale;
      if (work.result == Work::Result::kFragment) {
        const int64_t row = work.slot * kRows + r;
        p.fragment_out[row * p.decode.shape.head_dim + d] = value;
        if (d == 0) p.fragment_lse[row] = lse;
        return;
      }
      const RowTarget target = p.decode.row_target(work.tile, r);
      if (work.result == Work::Result::kChunk) {
        write_chunk(p.decode, target, work.tile.chunk, d, value, lse);
      } else {
        write_output(p.decode, target, d, value, lse);
      }
    }
  };

  // All warps have seen the same rows.
  static __device__ void merge_and_write(const RowWriter& writer, const Warp& warp, Smem& smem) {
    Results& results = smem.results;
    const int index = warp_index();
    ptx::cta_sync();  // every ring has run dry, before the results overwrite them
    warp.publish(
        [&](int r, float max, float sum) {
          if (threadIdx.x % ptx::kWarpSize / 4 != 0) return;
          results.max[index][r] = max;
          results.sum[index][r] = sum;
        },
        [&](int r, int d, float value) { results.out[index][r][d] = value; });
    ptx::cta_sync();  // every warp's result is in shared memory
    merge_warps(
        results, writer.work.tile.num_rows, writer.p.decode.shape.head_dim,
        [&](int r, SoftmaxState& softmax) { return writer.sink(r, softmax); },
        [&](int r, int d, float value, float lse) { writer.write(r, d, value, lse); });
  }

  // A warp's rows are its own.
  static __device__ void write_rows(const RowWriter& writer, const Warp& warp, int first_row) {
    float factor = 0.f;
    float lse = 0.f;
    const auto live = [&](int r) { return first_row + r < writer.work.tile.num_rows; };
    warp.publish(
        [&](int r, float max, float sum) {
          SoftmaxState softmax{max, sum};
          factor = live(r) ? writer.sink(first_row + r, softmax) : 0.f;
          factor *= softmax.inverse();
          lse = softmax.lse();
        },
        [&](int r, int d, float value) {
          if (live(r) && d < writer.p.decode.shape.head_dim) {
            writer.write(first_row + r, d, value * factor, lse);
          }
        });
  }

  static __device__ void attend(const DecodeMmaParams& p, Smem& smem) {
    const Work& work = smem.work;
    if (threadIdx.x < kRows) {
      find_row(p.decode, work.tile, threadIdx.x, smem.rows[threadIdx.x]);
    }
    const int first_row = kShared ? warp_index() * kWarpRows : 0;
    const bool has_rows = !kShared || first_row < work.tile.num_rows;
    Warp warp(p, work.tile, first_row, smem.rows + first_row, kShared || warp_index() == 0);
    ptx::cta_sync();  // smem.rows is complete
    walk_tiles(p, work.tile, has_rows, smem, warp);
    const RowWriter writer(p, work);
    if constexpr (kShared) {
      if (has_rows) write_rows(writer, warp, first_row);
    } else {
      merge_and_write(writer, warp, smem);
    }
    if (work.result == Work::Result::kFragment) {
      FragmentMerge<kThreads, kRows>(p, work, smem.last).arrive();
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kMinCtas)
    decode_mma_kernel(const __grid_constant__ DecodeMmaParams p) {
  if constexpr (ptx::kHasMma) {
    auto& smem = ptx::shared_memory<typename Kernel::Smem>();
    if (threadIdx.x == 0) smem.list.start(p, Kernel::kTileRows);
    ptx::warp_sync();  // the first warp sees it
    while (true) {
      if (threadIdx.x < ptx::kWarpSize) {
        const bool found = smem.list.next(smem.work);
        if (threadIdx.x == 0) smem.has_work = found;
      }
      ptx::cta_sync();  // smem.work is complete
      if (!smem.has_work) return;
      Kernel::attend(p, smem);
      ptx::cta_sync();  // all have read the work and the results, before the next ones
    }
  }
}

template <DType kKv, int kDim, int kRows>
void launch_decode_mma(const DecodeMmaParams& params, unsigned num_ctas, cudaStream_t stream) {
  using Kernel = DecodeMma<kKv, kDim, kRows>;
  ptx::launch(decode_mma_kernel<Kernel>, num_ctas, Kernel::kThreads, sizeof(typename Kernel::Smem),
              stream, params);
}

}  // namespace paged_attn
