#include "cpu/plan.h"

#include <algorithm>
#include <limits>

namespace paged_attn::cpu {
namespace {

// Small enough that two threads share 512 tokens, large enough that partial results, 1/256 of what
// is read of a head with 4 query heads, do not count.
constexpr int32_t kChunkSize = 256;
// Rows that share each load of K and V. More would not fit beside them in the L1 and L2 caches.
constexpr int64_t kTileRows = 32;
constexpr int64_t kMaxStateBytes = 64 << 10;  // of a run's output, in float32
constexpr int64_t kOverheadTokens = 8;        // what a row tile costs beside its keys, of each head
constexpr int64_t kMinThreadBytes = 64 << 10;  // of K and V: less is not worth waking a thread
constexpr int64_t kMaxBalancedTiles = 16;      // a thread; with more, whole heads are equal enough
constexpr int64_t kTolerance = 16;             // a thread may have 1/16 more than its share

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

class Planner {
 public:
  Planner(const DecodeParams& params, Plan& plan)
      : plan_(plan), num_kv_heads_(params.shape.num_kv_heads) {
    const int64_t num_tiles = params.num_row_tiles(plan.tile_rows);
    tiles_.reserve(num_tiles);
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const RowTile rows = whole_row_tile(params, tile, plan.tile_rows);
      if (rows.num_rows == 0) continue;
      const bool empty = rows.range.end <= rows.range.begin;
      tiles_.push_back({tile, empty ? TokenRange{0, 0} : rows.range});
      num_tokens_ += empty ? 0 : rows.range.end - rows.range.begin;
    }
  }

  int64_t num_tokens() const { return num_tokens_; }
  int64_t num_tiles() const { return static_cast<int64_t>(tiles_.size()); }

  // Deals the line of all tiles' chunks out; returns the largest load of a thread.
  int64_t deal(int64_t num_threads, int32_t heads_per_run) {
    plan_.runs.clear();
    plan_.ends.clear();
    plan_.merges.clear();
    plan_.num_slots = 0;
    plan_.max_heads = heads_per_run;
    num_threads_ = num_threads;
    const int64_t total = (num_tokens_ + kOverheadTokens * num_tiles()) * num_kv_heads_;
    position_ = thread_begin_ = max_load_ = 0;
    target_ = ceil_div(total, num_threads);
    total_ = total;
    for (const Tile& tile : tiles_) {
      for (int32_t head = 0; head < num_kv_heads_; head += heads_per_run) {
        deal_tile(tile, head, std::min(heads_per_run, num_kv_heads_ - head));
      }
    }
    while (static_cast<int64_t>(plan_.ends.size()) < num_threads) next_thread();
    return max_load_;
  }

  int64_t share(int64_t num_threads) const {
    return ceil_div((num_tokens_ + kOverheadTokens * num_tiles()) * num_kv_heads_, num_threads);
  }

 private:
  struct Tile {
    int64_t index;
    TokenRange range;
  };

  void next_thread() {
    max_load_ = std::max(max_load_, position_ - thread_begin_);
    thread_begin_ = position_;
    plan_.ends.push_back(static_cast<int64_t>(plan_.runs.size()));
    const auto done = static_cast<int64_t>(plan_.ends.size());
    // The last thread takes what is left.
    target_ = done + 1 >= num_threads_ ? std::numeric_limits<int64_t>::max()
                                       : total_ * (done + 1) / num_threads_;
  }

  // The chunk edge, or end of the range, that is nearest to `token`.
  int64_t nearest_edge(int64_t token, const TokenRange& range) const {
    const int64_t edge = (token + plan_.chunk_size / 2) / plan_.chunk_size * plan_.chunk_size;
    return std::clamp(edge, range.begin, range.end);
  }

  void deal_tile(const Tile& tile, int32_t head, int32_t num_heads) {
    position_ += kOverheadTokens * num_heads;
    int64_t begin = tile.range.begin;
    const int64_t first_slot = plan_.num_slots;
    do {
      int64_t end = tile.range.end;
      if (begin < end && target_ - position_ < (end - begin) * num_heads) {
        const int64_t wanted = std::max<int64_t>(target_ - position_, 0) / num_heads;
        end = nearest_edge(begin + wanted, tile.range);
        if (end <= begin) {
          next_thread();
          continue;
        }
      }
      const bool first = begin == tile.range.begin;
      const bool last = end == tile.range.end;
      plan_.runs.push_back({.tile = tile.index,
                            .first_head = head,
                            .num_heads = num_heads,
                            .tokens = {begin, end},
                            .first = first,
                            .last = last,
                            .slot = plan_.num_slots});
      if (!first || !last) plan_.num_slots += first ? 1 : num_chunks(begin, end);
      position_ += (end - begin) * num_heads;
      begin = end;
      if (!last) next_thread();
    } while (begin < tile.range.end);
    if (plan_.num_slots > first_slot) {
      plan_.merges.push_back(
          {tile.index, head, num_heads, first_slot, plan_.num_slots - first_slot});
    }
  }

  int64_t num_chunks(int64_t begin, int64_t end) const {
    return ceil_div(end, plan_.chunk_size) - begin / plan_.chunk_size;
  }

  Plan& plan_;
  int32_t num_kv_heads_;
  std::vector<Tile> tiles_;
  int64_t num_tokens_ = 0;
  int64_t num_threads_ = 1;
  // In tokens of one head, on the line of all tiles.
  int64_t total_ = 0;
  int64_t position_ = 0;
  int64_t thread_begin_ = 0;
  int64_t target_ = 0;
  int64_t max_load_ = 0;
};

// As many as share one call's loads, but whole groups where those are larger.
int32_t tile_rows(const DecodeParams& params) {
  const int64_t group = params.num_q_heads / params.shape.num_kv_heads;
  const int64_t tokens = params.cu_query_lens == nullptr ? params.query_len : params.num_tokens;
  return static_cast<int32_t>(
      std::min({std::max(group, kTileRows), int64_t{kMaxTileRows}, group * tokens}));
}

}  // namespace

RowTile whole_row_tile(const DecodeParams& params, int64_t index, int64_t rows) {
  return params.row_tile(index, rows, /*kv_head=*/0, /*chunk=*/0);
}

Plan make_plan(const DecodeParams& params, int32_t chunk_size, int64_t num_threads) {
  Plan plan{};
  plan.chunk_size = chunk_size > 0 ? chunk_size : kChunkSize;
  plan.tile_rows = tile_rows(params);
  Planner planner(params, plan);
  const PagedShape& shape = params.shape;
  const int64_t head_bytes = shape.head_dim * element_size(params.kv_dtype);
  const int64_t bytes = 2 * planner.num_tokens() * shape.num_kv_heads * head_bytes;
  num_threads = std::clamp<int64_t>(bytes / kMinThreadBytes, 1, std::max<int64_t>(num_threads, 1));
  const int64_t state_bytes = int64_t{4} * plan.tile_rows * shape.head_dim;
  auto heads = static_cast<int32_t>(
      std::clamp<int64_t>(kMaxStateBytes / state_bytes, 1, shape.num_kv_heads));
  const int64_t share = planner.share(num_threads);
  // Where whole chunks of all heads leave a thread with too much, runs of fewer heads are finer.
  while (planner.deal(num_threads, heads) > share + share / kTolerance && heads > 1 &&
         planner.num_tiles() <= kMaxBalancedTiles * num_threads) {
    heads = (heads + 1) / 2;
  }
  const int64_t rows = int64_t{plan.max_heads} * plan.tile_rows;
  const int64_t stride = ceil_div(shape.head_dim, kPadding) * kPadding;
  plan.slot_floats = rows * (stride + 2);
  plan.scratch_floats =
      2 * plan.slot_floats + rows * (stride + kTileTokens + 1) + 2 * kTileTokens * plan.max_heads;
  return plan;
}

}  // namespace paged_attn::cpu
