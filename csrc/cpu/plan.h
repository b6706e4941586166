// How a decode call is cut into work for threads.
//
// A sequence is cut into chunks of a fixed size, each with a softmax of its own, which are merged
// from left to right. So its bits depend on the sequence alone: neither on the batch, nor on the
// number of threads, nor on which of them did what.
#pragma once

#include <cstdint>
#include <vector>

#include "params.h"

namespace paged_attn::cpu {

// Consecutive chunks of one row tile, for neighbouring KV heads: what one thread does in one go.
struct Run {
  int64_t tile;
  int32_t first_head;
  int32_t num_heads;
  TokenRange tokens;
  bool first;    // has the tile's first chunk: merges its chunks as it goes
  bool last;     // has the tile's last chunk; first and last: the result goes straight to `out`
  int64_t slot;  // of the first partial result otherwise: one if `first`, else one a chunk
};

// Partial results of one row tile and its heads, in order.
struct Merge {
  int64_t tile;
  int32_t first_head;
  int32_t num_heads;
  int64_t first_slot;
  int64_t num_slots;
};

inline constexpr int kMaxTileRows = 64;
// Rows of queries and of partial results have a multiple of this many elements, the last ones 0.
inline constexpr int64_t kPadding = 32;
// Tokens whose scores are kept before their values are added.
inline constexpr int64_t kTileTokens = 32;

struct Plan {
  int32_t chunk_size;
  int32_t tile_rows;  // query rows of a KV head in one tile
  int32_t max_heads;  // KV heads of one run
  std::vector<Run> runs;
  std::vector<int64_t> ends;  // thread i has the runs up to ends[i], from ends[i - 1] on
  std::vector<Merge> merges;
  int64_t num_slots;
  int64_t slot_floats;     // of one partial result
  int64_t scratch_floats;  // of one thread
};

// Equal bytes of keys and values for at most `num_threads` threads. `chunk_size` is the caller's,
// or 0; for `params` a sequence is one chunk.
Plan make_plan(const DecodeParams& params, int32_t chunk_size, int64_t num_threads);

// DecodeParams::row_tile, for code that must not emit inline functions.
RowTile whole_row_tile(const DecodeParams& params, int64_t index, int64_t rows);

}  // namespace paged_attn::cpu
