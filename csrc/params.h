// The contract between host and device code: plain structs, passed to kernels by value.
//
// Every pointer carries its shape; `?` marks one that may be null. Strides count elements, not
// bytes; the last dimension always has stride 1. A "block" is a KV block, a "slot" is
// block * block_size + offset, a "chunk" is a range of tokens of one sequence.
#pragma once

#include <cstdint>

namespace paged_attn {

// kAny stands for a dtype that a kernel finds at run time.
enum class DType : int32_t { kF32, kF16, kBf16, kF8E4m3, kF8E5m2, kI8, kAny };

constexpr int element_size(DType dtype) {
  return dtype == DType::kF32 ? 4 : dtype == DType::kF16 || dtype == DType::kBf16 ? 2 : 1;
}

constexpr bool is_8bit(DType dtype) { return element_size(dtype) == 1; }

// The largest finite value of an 8-bit dtype: what a per-token scale maps the largest |x| to.
constexpr float max_value(DType dtype) {
  return dtype == DType::kF8E4m3 ? 448.f : dtype == DType::kF8E5m2 ? 57344.f : 127.f;
}

// All K or all V of one layer.
struct PoolView {
  void* data;  // [num_blocks, block_size, num_kv_heads, head_dim]
  int64_t block_stride;
  int64_t token_stride;
  int64_t head_stride;

  constexpr int64_t row(int64_t block, int64_t token, int64_t head) const {
    return block * block_stride + token * token_stride + head * head_stride;
  }
};

// A factor that is a product of scales, kept finite: where it overflows, a score of 0 stays 0.
constexpr float finite_factor(float product) {
  constexpr float kLargest = 3.402823466e+38f;
  return product > kLargest ? kLargest : product < -kLargest ? -kLargest : product;
}

// value = stored * scale. All three kinds of scale are this view: per tensor has three zero
// strides, per head only a head stride; without `data` the scale is `value` everywhere.
struct ScaleView {
  float* data;  // ? [num_blocks, block_size, num_kv_heads]
  float value;
  int64_t block_stride;
  int64_t token_stride;
  int64_t head_stride;

  constexpr int64_t index(int64_t block, int64_t token, int64_t head) const {
    return block * block_stride + token * token_stride + head * head_stride;
  }
  constexpr float at(int64_t block, int64_t token, int64_t head) const {
    return data == nullptr ? value : data[index(block, token, head)];
  }
  // Whether it differs from token to token.
  constexpr bool by_token() const {
    return data != nullptr && (block_stride != 0 || token_stride != 0);
  }
};

// Rows of query or output: [num_seqs, query_len, num_heads, head_dim], or, with query_len 1,
// [num_tokens, num_heads, head_dim], which a token finds by seq_stride. Rows of key and value have
// one token after another: [num_tokens, num_heads, head_dim] by token_stride.
struct RowsView {
  void* data;
  int64_t seq_stride;
  int64_t token_stride;
  int64_t head_stride;

  constexpr int64_t row(int64_t seq, int64_t token, int64_t head) const {
    return seq * seq_stride + token * token_stride + head * head_stride;
  }
};

struct BlockTables {
  const int32_t* data;  // [num_seqs, max_blocks]
  int64_t seq_stride;
  int64_t block_stride;
  int64_t max_blocks;

  constexpr int64_t block(int64_t seq, int64_t index) const {
    return data[seq * seq_stride + index * block_stride];
  }
};

// Tokens [begin, end) of one sequence.
struct TokenRange {
  int64_t begin;
  int64_t end;
};

// The keys that query token `index` of `query_len` sees in a sequence of seq_len tokens, the
// query's own included. Queries are the last positions; one before the first token sees nothing
// if causal. A window bounds the past alone.
constexpr TokenRange visible_keys(int64_t seq_len, int64_t query_len, int64_t index, bool causal,
                                  int32_t sliding_window) {
  const int64_t position = seq_len - query_len + index;
  const int64_t end = causal ? position + 1 : seq_len;
  const int64_t oldest = sliding_window > 0 ? position + 1 - sliding_window : 0;
  const int64_t begin = oldest > 0 ? oldest : 0;
  return {begin, end > begin ? end : begin};
}

// What the entries of the pools mean, shared by every kernel that goes through a block table.
struct PagedShape {
  int64_t num_blocks;
  int32_t block_size;
  int32_t num_kv_heads;
  int32_t head_dim;
};

// A query token: its sequence, its place among the sequence's query tokens, and their number.
// `seq` is -1 for a token that belongs to no sequence (padding after the last one).
struct QueryToken {
  int64_t seq;
  int64_t index;
  int64_t query_len;
};

// A row of the output.
struct RowTarget {
  int64_t token;
  int64_t head;
};

// Neighbouring query rows that share a KV head, over one chunk of their sequence. Row r of the
// tile is row first_row + r of the sequence: query token row / group, head row % group of the KV
// head's group.
struct RowTile {
  int64_t seq;          // -1: padding, which sees nothing
  int64_t first_token;  // of the sequence, among all query tokens
  int64_t query_len;
  int64_t kv_head;
  int64_t chunk;
  int64_t first_row;
  int32_t num_rows;   // 0: no work
  TokenRange range;   // keys of the chunk that any row sees
  TokenRange common;  // keys of the chunk that every row sees
};

inline constexpr int64_t kMinAutoChunk = 512;
inline constexpr int64_t kMaxAutoChunks = 64;

// Paged attention of num_tokens query tokens, each with num_q_heads rows.
struct DecodeParams {
  RowsView query;
  RowsView out;
  float* lse;  // ? [num_tokens, num_q_heads], natural logarithm
  PoolView key_cache;
  PoolView value_cache;
  ScaleView k_scale;
  ScaleView v_scale;
  BlockTables block_tables;
  const int32_t* seq_lens;       // [num_seqs], the tokens of this call included
  const int32_t* cu_query_lens;  // ? [num_seqs + 1]; null: query_len tokens each
  const float* alibi_slopes;     // ? [num_q_heads]
  const float* sinks;            // ? [num_q_heads]

  PagedShape shape;
  DType query_dtype;
  DType kv_dtype;
  int64_t num_tokens;
  int64_t num_seqs;
  int32_t query_len;
  int32_t num_q_heads;
  float scale;             // of query . key
  float softcap;           // 0: off
  int32_t sliding_window;  // visible keys, the query's own included; 0: off
  bool causal;
  bool vector_aligned;  // 8 elements of a pool row can be moved as whole vectors

  // Split-KV: chunk c of a sequence is its tokens [c * n, (c + 1) * n) with n = chunk_tokens().
  // Without partial_out there is one chunk, the whole sequence, and rows go straight to `out`.
  int32_t chunk_size;  // 0: by the sequence's length
  int32_t max_chunks;
  float* partial_out;  // ? [num_tokens, num_q_heads, max_chunks, head_dim], each normalised
  float* partial_lse;  // ? [num_tokens, num_q_heads, max_chunks], natural logarithm

  constexpr QueryToken query_token(int64_t token) const {
    if (cu_query_lens == nullptr) return {token / query_len, token % query_len, query_len};
    if (token >= cu_query_lens[num_seqs]) return {-1, 0, 0};
    int64_t low = 0;  // the last sequence that starts at or before the token
    for (int64_t high = num_seqs; high - low > 1;) {
      const int64_t middle = (low + high) / 2;
      (cu_query_lens[middle] <= token ? low : high) = middle;
    }
    const int64_t start = cu_query_lens[low];
    return {low, token - start, cu_query_lens[low + 1] - start};
  }

  // The length of a sequence, kept within its table whatever a device tensor says.
  constexpr int64_t seq_len(int64_t seq) const {
    const int64_t capacity = block_tables.max_blocks * shape.block_size;
    const int64_t length = seq_lens[seq];
    return length < 0 ? 0 : length > capacity ? capacity : length;
  }

  // Tokens of a chunk of a sequence. By its length: the smallest power of two from kMinAutoChunk on
  // with at most kMaxAutoChunks chunks.
  constexpr int64_t chunk_tokens(int64_t seq) const {
    if (chunk_size > 0) return chunk_size;
    int64_t tokens = kMinAutoChunk;
    if (seq < 0) return tokens;
    const int64_t length = seq_len(seq);
    while (tokens * kMaxAutoChunks < length) tokens *= 2;
    return tokens;
  }

  // The visible keys of a query token; none for padding.
  constexpr TokenRange visible(const QueryToken& token) const {
    if (token.seq < 0) return {0, 0};
    return visible_keys(seq_len(token.seq), token.query_len, token.index, causal, sliding_window);
  }

  // Tiles of at most `rows` query rows, for one KV head: an upper bound where sequences are ragged,
  // known without reading their lengths.
  constexpr int64_t num_row_tiles(int64_t rows) const {
    const int64_t group = num_q_heads / shape.num_kv_heads;
    if (cu_query_lens == nullptr) return num_seqs * ((query_len * group + rows - 1) / rows);
    return num_tokens * group / rows + num_seqs + 1;
  }

  // Ragged, sequence s has the tiles from cu_query_lens[s] * group / rows + s on, which is at least
  // as many as it needs; padding counts as one more sequence.
  constexpr RowTile row_tile(int64_t index, int64_t rows, int64_t kv_head, int64_t chunk) const {
    const int64_t group = num_q_heads / shape.num_kv_heads;
    RowTile tile = {};
    if (cu_query_lens == nullptr) {
      const int64_t tiles = (query_len * group + rows - 1) / rows;
      tile.seq = index / tiles;
      tile.first_row = index % tiles * rows;
      tile.first_token = tile.seq * query_len;
      tile.query_len = query_len;
    } else {
      int64_t low = 0;
      for (int64_t high = num_seqs + 1; high - low > 1;) {
        const int64_t middle = (low + high) / 2;
        (cu_query_lens[middle] * group / rows + middle <= index ? low : high) = middle;
      }
      tile.first_token = cu_query_lens[low];
      tile.query_len = (low < num_seqs ? cu_query_lens[low + 1] : num_tokens) - tile.first_token;
      tile.first_row = (index - tile.first_token * group / rows - low) * rows;
      tile.seq = low < num_seqs ? low : -1;
    }
    const int64_t left = tile.query_len * group - tile.first_row;
    tile.num_rows = static_cast<int32_t>(left < 0 ? 0 : left < rows ? left : rows);
    tile.kv_head = kv_head;
    tile.chunk = chunk;
    if (tile.num_rows == 0) return tile;
    const int64_t last_row = tile.first_row + tile.num_rows - 1;
    const TokenRange first = visible({tile.seq, tile.first_row / group, tile.query_len});
    const TokenRange last = visible({tile.seq, last_row / group, tile.query_len});
    const int64_t tokens = chunk_tokens(tile.seq);
    const int64_t begin = chunk * tokens;
    const int64_t end = begin + tokens;
    tile.range = {first.begin > begin ? first.begin : begin, last.end < end ? last.end : end};
    tile.common = {last.begin > begin ? last.begin : begin, first.end < end ? first.end : end};
    return tile;
  }

  constexpr RowTarget row_target(const RowTile& tile, int64_t r) const {
    const int64_t group = num_q_heads / shape.num_kv_heads;
    const int64_t row = tile.first_row + r;
    return {tile.first_token + row / group, tile.kv_head * group + row % group};
  }

  // Rows of query and out are found the same way; where ragged, query_len is 1.
  constexpr int64_t row(const RowsView& rows, int64_t token, int64_t head) const {
    return query_len == 1 ? rows.row(token, 0, head)
                          : rows.row(token / query_len, token % query_len, head);
  }
};

// out = (out_a e^lse_a + out_b e^lse_b) / (e^lse_a + e^lse_b), row by row.
struct MergeParams {
  void* out;           // [num_rows, head_dim]
  float* lse;          // [num_rows]
  const void* out_a;   // [num_rows, head_dim]
  const float* lse_a;  // [num_rows]
  const void* out_b;   // [num_rows, head_dim]
  const float* lse_b;  // [num_rows]
  DType dtype;
  int64_t num_rows;
  int32_t head_dim;
};

// Writes num_tokens rows of key and value to their slots, quantising on the way.
struct CacheWriteParams {
  RowsView key;    // [num_tokens, num_kv_heads, head_dim]
  RowsView value;  // [num_tokens, num_kv_heads, head_dim]
  PoolView key_cache;
  PoolView value_cache;
  ScaleView k_scale;
  ScaleView v_scale;
  bool compute_k_scale;         // per token and head: computed here and written
  bool compute_v_scale;         // per token and head: computed here and written
  const int64_t* slot_mapping;  // [num_tokens]; negative: skip
  PagedShape shape;
  DType input_dtype;
  DType kv_dtype;
  int64_t num_tokens;
  bool vector_aligned;
};

// Where new_len tokens that follow each sequence's cached ones go, and the lengths with them.
struct AppendSlotsParams {
  BlockTables block_tables;
  const int32_t* cached_lens;  // [num_seqs]
  int64_t* slots;              // [num_seqs, new_len]; -1: nowhere
  int32_t* seq_lens;           // [num_seqs]
  int64_t num_seqs;
  int32_t new_len;
  int32_t block_size;

  // A sequence of negative length has no tokens and gets none; nor does one without room.
  constexpr int64_t slot(int64_t seq, int64_t index) const {
    if (cached_lens[seq] < 0) return -1;
    const int64_t position = cached_lens[seq] + index;
    const int64_t number = position / block_size;
    if (number >= block_tables.max_blocks) return -1;
    const int64_t block = block_tables.block(seq, number);
    return block < 0 ? -1 : block * block_size + position % block_size;
  }
  constexpr int32_t seq_len(int64_t seq) const {
    const int64_t capacity = block_tables.max_blocks * block_size;
    const int64_t length = int64_t{cached_lens[seq]} + new_len;
    return cached_lens[seq] < 0 ? 0 : static_cast<int32_t>(length < capacity ? length : capacity);
  }
};

// Token `position` of sequence `seq`; seq is -1 for none.
struct GatheredToken {
  int64_t seq;
  int64_t position;
};

// Packs the rows of sequences one after another, dequantising on the way.
struct GatherParams {
  RowsView key;    // [num_tokens, num_kv_heads, head_dim], contiguous
  RowsView value;  // [num_tokens, num_kv_heads, head_dim], contiguous
  PoolView key_cache;
  PoolView value_cache;
  ScaleView k_scale;
  ScaleView v_scale;
  BlockTables block_tables;
  const int64_t* seq_ends;  // [num_seqs], inclusive prefix sums of the lengths
  PagedShape shape;
  DType kv_dtype;
  DType output_dtype;
  int64_t num_tokens;  // rows of key and value; those past the last sequence become 0
  int64_t num_seqs;
  bool vector_aligned;

  // What belongs in a packed row: the first sequence that ends after it.
  constexpr GatheredToken token(int64_t row) const {
    int64_t low = 0;
    for (int64_t high = num_seqs; low < high;) {
      const int64_t middle = (low + high) / 2;
      if (seq_ends[middle] > row) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    if (low == num_seqs) return {-1, 0};
    const int64_t position = row - (low == 0 ? 0 : seq_ends[low - 1]);
    const bool fits = position < block_tables.max_blocks * shape.block_size;
    return {fits ? low : -1, position};
  }
};

// The bytes of one block as two levels of equally spaced runs: run (i, j) of block b starts at
// address + b * block_stride + i * outer_stride + j * inner_stride. All in bytes.
struct BlockRuns {
  int64_t address;  // of block 0
  int64_t block_stride;
  int64_t outer_count;
  int64_t outer_stride;
  int64_t inner_count;
  int64_t inner_stride;
  int64_t run_bytes;
  int64_t vector_bytes;  // widest access that fits every run: 16, 8, 4, 2 or 1
};

// In each pool, and for each pair, block pair[1] becomes a copy of block pair[0].
struct BlockCopyParams {
  const BlockRuns* pools;  // [num_pools]
  const int64_t* pairs;    // [num_pairs, 2] source, destination
  int64_t num_pools;
  int64_t num_pairs;
};

}  // namespace paged_attn
