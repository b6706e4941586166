// A CTA's pieces of work, one after another: row tiles, or parts of them.
#pragma once

#include "device/ptx.cuh"
#include "mma_params.h"

namespace paged_attn {

struct Work {
  RowTile tile;
  enum class Result { kOutput, kChunk, kFragment } result;
  // Of a fragment: where its result goes, which of its row tile's it is, and the cut that knows how
  // many there are.
  int64_t slot;
  int32_t fragment;
  Cut cut;
};

// With a plan: from this CTA's cut to the next one. Without: chunks of row tiles, a grid apart, of
// the sequences whose row tiles are of this size.
//
// It lies in shared memory.
class WorkList {
 public:
  // To be called first, by one thread.
  __device__ void start(const DecodeMmaParams& params, int rows) {
    params_ = &params;
    rows_ = rows;
    index_ = blockIdx.x;
    if (planned()) {
      position_ = params.plan.cuts[blockIdx.x];
      end_ = params.plan.cuts[blockIdx.x + 1];
    }
  }

  // To be called by all lanes of one warp, of which lane 0 is told whether there was more.
  __device__ bool next(Work& work) {
    return planned() ? lane() == 0 && next_planned(work) : next_chunk(work);
  }

 private:
  static __device__ int lane() { return threadIdx.x % ptx::kWarpSize; }

  __device__ bool planned() const { return params_->plan.cuts != nullptr; }

  // Each lane looks at another item, for most may be none: chunks past a sequence's end, row tiles
  // of sequences that are another launch's.
  __device__ bool next_chunk(Work& work) {
    const DecodeParams& p = params_->decode;
    const int64_t heads = p.shape.num_kv_heads;
    const int64_t group = p.num_q_heads / heads;
    const int64_t count = p.num_row_tiles(rows_) * heads * p.max_chunks;
    const int64_t step = gridDim.x;
    int64_t first = index_;
    ptx::warp_sync();  // every lane has read where to begin
    for (; first < count; first += ptx::kWarpSize * step) {
      const int64_t index = first + lane() * step;
      RowTile tile = {};
      if (index < count) {
        const int64_t head = index / p.max_chunks;
        tile = p.row_tile(head / heads, rows_, head % heads, index % p.max_chunks);
      }
      // Whoever merges the chunks knows which are empty, and reads nothing of them.
      const bool live = tile.num_rows > 0 && tile.range.begin < tile.range.end &&
                        chunk_tile_rows(tile.query_len * group) == rows_;
      const uint32_t lanes = ptx::ballot(live);
      if (live && (lanes & ((1u << lane()) - 1)) == 0) {
        work.tile = tile;
        work.result = Work::Result::kChunk;
        index_ = index + step;
      }
      if (lanes != 0) return true;
    }
    return false;
  }

  __device__ bool next_planned(Work& work) {
    constexpr int64_t kStep = 16;  // as in kernels/plan.cuh
    while (before_end()) {
      RowTile tile = params_->decode.row_tile(position_.tile, rows_, position_.head, 0);
      const bool ends_inside = position_.tile == end_.tile && position_.head == end_.head;
      const int64_t start = tile.range.begin / kStep * kStep;
      const bool starts_inside = position_.inside();
      if (starts_inside) trim_begin(tile, start + position_.token);
      if (ends_inside) trim_end(tile, start + end_.token);
      work.slot = 2 * static_cast<int64_t>(blockIdx.x) + (starts_inside ? 0 : 1);
      work.cut = starts_inside ? position_ : end_;
      work.fragment = starts_inside ? static_cast<int32_t>(blockIdx.x) - work.cut.first_cut + 1 : 0;
      work.result = starts_inside || ends_inside ? Work::Result::kFragment : Work::Result::kOutput;
      advance(ends_inside);
      if (tile.num_rows == 0) continue;
      work.tile = tile;
      return true;
    }
    return false;
  }

  __device__ bool before_end() const {
    if (position_.tile != end_.tile) return position_.tile < end_.tile;
    if (position_.head != end_.head) return position_.head < end_.head;
    return position_.token < end_.token;
  }

  __device__ void advance(bool ends_inside) {
    if (ends_inside) {
      position_ = end_;
      return;
    }
    position_.token = 0;
    if (++position_.head == params_->decode.shape.num_kv_heads) {
      position_.head = 0;
      ++position_.tile;
    }
  }

  static __device__ void trim_begin(RowTile& tile, int64_t begin) {
    if (tile.range.begin < begin) tile.range.begin = begin;
    if (tile.common.begin < begin) tile.common.begin = begin;
  }
  static __device__ void trim_end(RowTile& tile, int64_t end) {
    if (tile.range.end > end) tile.range.end = end;
    if (tile.common.end > end) tile.common.end = end;
  }

  const DecodeMmaParams* params_;
  int rows_;
  int64_t index_;
  Cut position_;
  Cut end_;
};

}  // namespace paged_attn
