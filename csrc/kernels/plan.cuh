// The plan of a step: cuts the work of all row tiles into equal pieces, one for each CTA.
//
// All row tiles lie on one line, each as long as it costs; a cut is a binary search in the prefix
// sums. Whole row tiles if that is balanced already, else cuts anywhere, moved to the end of a tile
// where they come close to it. One CTA, all in integers: the same input gives the same plan.
#pragma once

#include "device/ptx.cuh"
#include "mma_params.h"

namespace paged_attn {

inline constexpr int kPlanThreads = 1024;
inline constexpr int kMaxPlanCtas = kPlanThreads - 1;

struct Planner {
  // Cuts and the lines of tokens are multiples of this, the tokens of one product.
  static constexpr int64_t kStep = 16;
  static constexpr int64_t kEmptyCost = 16;
  // Work below this many tokens is not worth a CTA of its own.
  static constexpr int64_t kMinTokens = 128;
  static constexpr int64_t kNoSplit = int64_t{1} << 62;

  struct Smem {
    int64_t costs[kPlanThreads];     // inclusive prefix sums over segments of tiles, for one head
    int64_t tiles[kPlanThreads];     // the same, of tiles that have rows
    int64_t position[kPlanThreads];  // of each cut on the line
    int64_t loads[kPlanThreads];     // of each CTA
    Cut cuts[kPlanThreads];
  };

  struct Row {
    int64_t cost;
    int64_t tokens;
  };

  static __device__ Row row_of(const PlanParams& p, int64_t tile) {
    const RowTile rows = p.decode.row_tile(tile, p.rows, 0, 0);
    if (rows.num_rows == 0) return {0, 0};
    const int64_t begin = rows.range.begin / kStep * kStep;
    const int64_t tokens = rows.range.end > rows.range.begin ? rows.range.end - begin : 0;
    return {tokens > 0 ? tokens + p.overhead : kEmptyCost, tokens};
  }

  // Row tiles of a thread's segment.
  static __device__ TokenRange segment(int64_t num_tiles, int thread) {
    const int64_t size = (num_tiles + kPlanThreads - 1) / kPlanThreads;
    const int64_t begin = thread * size < num_tiles ? thread * size : num_tiles;
    return {begin, begin + size < num_tiles ? begin + size : num_tiles};
  }

  static __device__ void scan(int64_t (&values)[kPlanThreads]) {
    for (int distance = 1; distance < kPlanThreads; distance *= 2) {
      const int thread = threadIdx.x;
      ptx::cta_sync();  // the values of the last step are complete
      const int64_t before = thread >= distance ? values[thread - distance] : 0;
      ptx::cta_sync();  // all have read them
      values[thread] += before;
    }
    ptx::cta_sync();  // the sums are complete
  }

  // The first segment whose sum, over all heads, exceeds x.
  static __device__ int find_segment(const Smem& smem, int64_t heads, int64_t x) {
    int low = 0;
    for (int high = kPlanThreads - 1; low < high;) {
      const int middle = (low + high) / 2;
      if (smem.costs[middle] * heads > x) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }

  // Cut `index` of `count`, at x on the line. Within `tolerance` tokens of a tile's start or end it
  // is moved there.
  static __device__ void make_cut(const PlanParams& p, Smem& smem, int64_t num_tiles, int64_t x,
                                  int64_t total, int64_t tolerance) {
    const int index = threadIdx.x;
    const int64_t heads = p.decode.shape.num_kv_heads;
    smem.cuts[index] = {static_cast<int32_t>(num_tiles), 0, 0, 0, 0};
    smem.position[index] = total;
    if (x >= total) return;
    if (x == 0) {  // from the very start, though the first rows may be empty
      smem.cuts[index] = {};
      smem.position[index] = 0;
      return;
    }
    const int owner = find_segment(smem, heads, x);
    int64_t start = owner == 0 ? 0 : smem.costs[owner - 1] * heads;
    int64_t tile = segment(num_tiles, owner).begin;
    Row row = row_of(p, tile);
    while (x >= start + row.cost * heads) {
      start += row.cost * heads;
      row = row_of(p, ++tile);
    }
    int64_t head = (x - start) / row.cost;
    start += head * row.cost;
    int64_t token = x - start - p.overhead;
    token = row.tokens == 0 || token < 0 ? 0 : token / kStep * kStep;
    if (row.tokens - token < tolerance && token >= row.tokens - token) {
      start += row.cost;
      token = 0;
      if (++head == heads) {
        head = 0;
        ++tile;
      }
    } else if (token < tolerance) {
      token = 0;
    }
    smem.cuts[index] = {static_cast<int32_t>(tile), static_cast<int32_t>(head),
                        static_cast<int32_t>(token), 0, 0};
    smem.position[index] = start + (token > 0 ? token + p.overhead : 0);
  }

  // Cuts the line for `count` CTAs; returns the heaviest one's load.
  static __device__ int64_t cut_line(const PlanParams& p, Smem& smem, int64_t num_tiles,
                                     int64_t total, int64_t count, int64_t tolerance) {
    const int index = threadIdx.x;
    ptx::cta_sync();  // what the last try left has been read
    if (index <= p.plan.num_ctas) {
      // The product may exceed 64 bits only beyond 2^53 tokens.
      make_cut(p, smem, num_tiles, index >= count ? total : index * total / count, total,
               tolerance);
    }
    ptx::cta_sync();  // the cuts are complete
    smem.loads[index] = index >= p.plan.num_ctas ? 0
                                                 : smem.position[index + 1] - smem.position[index] +
                                                       (smem.cuts[index].inside() ? p.overhead : 0);
    for (int half = kPlanThreads / 2; half > 0; half /= 2) {
      ptx::cta_sync();  // the maxima of the last step are complete
      if (index < half && smem.loads[index + half] > smem.loads[index]) {
        smem.loads[index] = smem.loads[index + half];
      }
    }
    ptx::cta_sync();  // the maximum of all is complete
    return smem.loads[0];
  }

  // The first cut past a token of a row tile.
  static __device__ int first_beyond(const Smem& smem, const Cut& place, int64_t token, int count) {
    int low = 0;
    for (int high = count; low < high;) {
      const int middle = (low + high) / 2;
      const Cut& cut = smem.cuts[middle];
      const bool beyond = cut.tile != place.tile   ? cut.tile > place.tile
                          : cut.head != place.head ? cut.head > place.head
                                                   : cut.token > token;
      if (beyond) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }

  // Completes a cut that lies inside of a row tile.
  static __device__ Cut with_fragments(const PlanParams& p, const Smem& smem, Cut cut) {
    if (!cut.inside()) return cut;
    const int count = p.plan.num_ctas + 1;
    const int first = first_beyond(smem, cut, 0, count);
    const int end = first_beyond(smem, cut, int64_t{1} << 40, count);
    cut.first_cut = first;
    cut.num_fragments = end - first + 1;
    return cut;
  }
};

static __global__ void __launch_bounds__(kPlanThreads, 1)
    plan_kernel(const __grid_constant__ PlanParams p) {
  auto& smem = ptx::shared_memory<Planner::Smem>();
  const int thread = threadIdx.x;
  const int64_t heads = p.decode.shape.num_kv_heads;
  const int64_t num_tiles = p.decode.num_row_tiles(p.rows);
  const TokenRange mine = Planner::segment(num_tiles, thread);
  int64_t cost = 0;
  int64_t rows = 0;
  for (int64_t tile = mine.begin; tile < mine.end; ++tile) {
    const int64_t one = Planner::row_of(p, tile).cost;
    cost += one;
    rows += one > 0;
  }
  smem.costs[thread] = cost;
  smem.tiles[thread] = rows;
  Planner::scan(smem.costs);
  Planner::scan(smem.tiles);
  const int64_t total = smem.costs[kPlanThreads - 1] * heads;
  const int64_t num_rows = smem.tiles[kPlanThreads - 1] * heads;

  // Small work takes fewer CTAs, but never fewer than it has rows.
  const int64_t worth = total / (Planner::kMinTokens + p.overhead);
  int64_t splits = num_rows > worth ? num_rows : worth;
  splits = splits < p.plan.num_ctas ? splits : p.plan.num_ctas;
  splits = splits < 1 ? 1 : splits;
  const int64_t rows_each = (num_rows + splits - 1) / splits;
  const int64_t whole = rows_each == 0 ? 1 : (num_rows + rows_each - 1) / rows_each;
  const int64_t load = Planner::cut_line(p, smem, num_tiles, total, whole, Planner::kNoSplit);
  // Whole row tiles will do if the heaviest CTA has at most 6 % more than its share.
  if (load * splits * 100 > total * 106) {
    const int64_t tolerance = total / splits / 64;
    Planner::cut_line(p, smem, num_tiles, total, splits, tolerance > 32 ? tolerance : 32);
  }
  if (thread <= p.plan.num_ctas) {
    p.plan.cuts[thread] = Planner::with_fragments(p, smem, smem.cuts[thread]);
  }
  if (thread < p.plan.num_ctas) p.plan.semaphores[thread] = 0;
}

}  // namespace paged_attn
