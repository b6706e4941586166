// Paged decode attention without tensor cores: runs everywhere and takes every shape.
//
// An item is up to kRows query heads of one query token that share a KV head, over one chunk of
// the sequence. A CTA walks its items. In a warp, a group of lanes holds one token's row, 8
// elements a lane, so that a warp reads several tokens at once where rows are short; each group
// keeps an online softmax of its own. Groups and warps meet once, at the end of the item.
#pragma once

#include "device/dtype.cuh"
#include "device/paged_kv.cuh"
#include "device/ptx.cuh"
#include "device/row_results.cuh"
#include "device/softmax.cuh"
#include "device/warp.cuh"
#include "params.h"

namespace paged_attn {

// kVecs: vectors of 8 elements that a lane holds of a row; 1 up to head_dim 256, 2 up to 512.
template <DType kKv, int kVecs>
struct DecodeSimt {
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * ptx::kWarpSize;
  static constexpr int kRows = 4 / kVecs;
  static constexpr int kMaxHeadDim = kVecs * kVector * ptx::kWarpSize;

  using Smem = WarpResults<kWarps, kRows, kMaxHeadDim>;

  struct Item {
    QueryToken query;
    TokenRange range;  // visible keys of this chunk
    int64_t token;
    int64_t chunk;
    int64_t kv_head;
    int64_t first_head;
    int num_rows;
  };

  // What a lane group knows of one row.
  struct Row {
    SoftmaxState softmax;
    float query[kVecs][kVector];
    float out[kVecs][kVector];
  };

  // How the lanes of a warp share rows.
  struct Lanes {
    int per_row;  // a power of two
    int group;
    int lane;  // within the group
  };

  static __device__ Lanes make_lanes(int head_dim) {
    int per_row = 1;
    while (per_row < ptx::kWarpSize && per_row * kVector < head_dim) per_row *= 2;
    const int lane = threadIdx.x % ptx::kWarpSize;
    return {per_row, lane / per_row, lane % per_row};
  }

  // First element of a lane's vector v.
  static __device__ int element(const Lanes& lanes, int v) {
    return (lanes.lane + v * lanes.per_row) * kVector;
  }

  static __device__ Item make_item(const DecodeParams& p, int64_t index) {
    const int64_t group = p.num_q_heads / p.shape.num_kv_heads;
    const int64_t row_tiles = (group + kRows - 1) / kRows;
    Item item;
    item.chunk = index % p.max_chunks;
    index /= p.max_chunks;
    const int64_t first_row = index % row_tiles * kRows;
    index /= row_tiles;
    item.kv_head = index % p.shape.num_kv_heads;
    item.token = index / p.shape.num_kv_heads;
    item.first_head = item.kv_head * group + first_row;
    item.num_rows = static_cast<int>(group - first_row < kRows ? group - first_row : kRows);
    item.query = p.query_token(item.token);
    const TokenRange visible = p.visible(item.query);
    const int64_t tokens = p.chunk_tokens(item.query.seq);
    const int64_t begin = item.chunk * tokens;
    const int64_t end = begin + tokens;
    item.range = {visible.begin > begin ? visible.begin : begin,
                  visible.end < end ? visible.end : end};
    return item;
  }

  static __device__ void load_query(const DecodeParams& p, const Item& item, const Lanes& lanes,
                                    Row (&rows)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // Rows past the last repeat it; their results are never written.
      const int64_t head = item.first_head + (r < item.num_rows ? r : item.num_rows - 1);
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) rows[r].query[v][i] = rows[r].out[v][i] = 0.f;
        if (element(lanes, v) < p.shape.head_dim) {
          load_row_floats(p.query_dtype, p.query.data,
                          p.row(p.query, item.token, head) + element(lanes, v), rows[r].query[v]);
        }
      }
    }
  }

  // The score of row r, from the dot product that the whole group knows.
  static __device__ float score(const DecodeParams& p, const Item& item, int r, float dot,
                                float k_scale, int64_t key_position) {
    float value = dot * finite_factor(p.scale * k_scale);
    if (p.softcap > 0.f) value = p.softcap * ptx::tanh(value / p.softcap);
    if (p.alibi_slopes != nullptr) {
      const int64_t query_position =
          p.seq_len(item.query.seq) - item.query.query_len + item.query.index;
      const int64_t head = item.first_head + (r < item.num_rows ? r : item.num_rows - 1);
      value += p.alibi_slopes[head] * static_cast<float>(key_position - query_position);
    }
    return value;
  }

  static __device__ void load(const DecodeParams& p, const PoolView& pool, const Slot& slot,
                              int64_t head, int element, float (&x)[kVector]) {
    if constexpr (kKv == DType::kAny) {
      load_row(p.kv_dtype, pool, slot, head, element, p.vector_aligned, x);
    } else {
      load_row<kKv>(pool, slot, head, element, p.vector_aligned, x);
    }
  }

  static __device__ void add_token(const DecodeParams& p, const Item& item, const Lanes& lanes,
                                   int64_t token, bool live, Row (&rows)[kRows]) {
    const Slot slot = find_slot(p.block_tables, item.query.seq, token, p.shape.block_size);
    float key[kVecs][kVector] = {};
    float value[kVecs][kVector] = {};
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      if (element(lanes, v) < p.shape.head_dim) {
        load(p, p.key_cache, slot, item.kv_head, element(lanes, v), key[v]);
        load(p, p.value_cache, slot, item.kv_head, element(lanes, v), value[v]);
      }
    }
    const float k_scale = scale_at(p.k_scale, slot, item.kv_head);
    const float v_scale = scale_at(p.v_scale, slot, item.kv_head);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float dot = 0.f;
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) dot += rows[r].query[v][i] * key[v][i];
      }
      dot = group_sum(dot, lanes.per_row);
      if (!live) continue;  // a repeat of the last token, to keep the warp together
      const float s = score(p, item, r, dot, k_scale, token);
      const float keep = rows[r].softmax.raise(s);
      const float weight = rows[r].softmax.add(s) * v_scale;
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          rows[r].out[v][i] = rows[r].out[v][i] * keep + weight * value[v][i];
        }
      }
    }
  }

  // Merges the groups of a warp: afterwards every group holds the warp's result.
  static __device__ void merge_groups(const Lanes& lanes, Row (&rows)[kRows]) {
    for (int mask = lanes.per_row; mask < ptx::kWarpSize; mask *= 2) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float other_max = ptx::shuffle_xor(rows[r].softmax.max, mask);
        const float keep = rows[r].softmax.raise(other_max);
        rows[r].softmax.sum += ptx::shuffle_xor(rows[r].softmax.sum, mask);
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            const float mine = rows[r].out[v][i] * keep;
            rows[r].out[v][i] = mine + ptx::shuffle_xor(mine, mask);
          }
        }
      }
    }
  }

  static __device__ void publish(const DecodeParams& p, const Lanes& lanes,
                                 const Row (&rows)[kRows], Smem& smem) {
    const int warp = threadIdx.x / ptx::kWarpSize;
    if (lanes.group != 0) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (lanes.lane == 0) {
        smem.max[warp][r] = rows[r].softmax.max;
        smem.sum[warp][r] = rows[r].softmax.sum;
      }
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        if (element(lanes, v) < p.shape.head_dim) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            smem.out[warp][r][element(lanes, v) + i] = rows[r].out[v][i];
          }
        }
      }
    }
  }
};

template <DType kKv, int kVecs>
__global__ void __launch_bounds__(DecodeSimt<kKv, kVecs>::kThreads, 2)
    decode_simt_kernel(const __grid_constant__ DecodeParams p) {
  using Kernel = DecodeSimt<kKv, kVecs>;
  auto& smem = ptx::shared_memory<typename Kernel::Smem>();
  const auto lanes = Kernel::make_lanes(p.shape.head_dim);
  const int64_t group = p.num_q_heads / p.shape.num_kv_heads;
  const int64_t num_items = p.num_tokens * p.shape.num_kv_heads *
                            ((group + Kernel::kRows - 1) / Kernel::kRows) * p.max_chunks;
  const int warp = threadIdx.x / ptx::kWarpSize;
  const int tokens_per_warp = ptx::kWarpSize / lanes.per_row;

  for (int64_t index = blockIdx.x; index < num_items; index += gridDim.x) {
    const auto item = Kernel::make_item(p, index);
    const bool empty = item.range.begin >= item.range.end;
    // The combine kernel knows which chunks are empty, and reads nothing of them.
    if (empty && p.partial_out != nullptr) continue;
    typename Kernel::Row rows[Kernel::kRows];
    Kernel::load_query(p, item, lanes, rows);
    for (int64_t first = item.range.begin + warp * tokens_per_warp; first < item.range.end;
         first += Kernel::kWarps * tokens_per_warp) {
      // Past the end a group repeats the last token: dead slots are never touched.
      const int64_t token = first + lanes.group;
      const bool live = token < item.range.end;
      Kernel::add_token(p, item, lanes, live ? token : item.range.end - 1, live, rows);
    }
    Kernel::merge_groups(lanes, rows);
    Kernel::publish(p, lanes, rows, smem);
    ptx::cta_sync();  // every warp's result is in shared memory
    const bool partial = p.partial_out != nullptr;
    merge_warps(
        smem, item.num_rows, p.shape.head_dim,
        [&](int r, SoftmaxState& softmax) {
          return partial ? 1.f : add_sink(p, item.first_head + r, softmax);
        },
        [&](int r, int d, float value, float lse) {
          const RowTarget target = {item.token, item.first_head + r};
          if (partial) {
            write_chunk(p, target, item.chunk, d, value, lse);
          } else {
            write_output(p, target, d, value, lse);
          }
        });
    ptx::cta_sync();  // all have read it, before the next item overwrites it
  }
}

template <DType kKv, int kVecs>
void launch_decode_simt(const DecodeParams& params, unsigned num_ctas, cudaStream_t stream) {
  using Kernel = DecodeSimt<kKv, kVecs>;
  ptx::launch(decode_simt_kernel<kKv, kVecs>, num_ctas, Kernel::kThreads,
              sizeof(typename Kernel::Smem), stream, params);
}

}  // namespace paged_attn
