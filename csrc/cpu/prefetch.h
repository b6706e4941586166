// Rows of a tile of tokens, found through the block table, and their prefetch. Included by
// cpu/kernels.cpp.

constexpr int kTile = kTileTokens;
constexpr int64_t kLineBytes = 64;
// How far ahead of its use a line is asked for. Less does not cover the latency of memory, more
// drops lines from the L1 and L2 caches before their use.
constexpr int64_t kAheadBytes = 64 << 10;

// The rows of KV head first_head of up to kTile tokens; past `count` the last token's again, so
// that reading them is harmless.
struct TileRows {
  const char* key[kTile];
  const char* value[kTile];
  int count;
};

struct Source {
  const DecodeParams& p;
  int64_t seq;
  int64_t first_head;
  int64_t num_heads;

  TileRows rows(int64_t begin, int64_t end) const {
    TileRows rows;
    rows.count = static_cast<int>(end - begin);
    const int64_t bytes = element_size(p.kv_dtype);
    const int64_t block_size = p.shape.block_size;
    int64_t index = begin / block_size;
    int64_t offset = begin % block_size;
    int64_t block = p.block_tables.block(seq, index);
    for (int t = 0; t < rows.count; ++t) {
      rows.key[t] = static_cast<const char*>(p.key_cache.data) +
                    p.key_cache.row(block, offset, first_head) * bytes;
      rows.value[t] = static_cast<const char*>(p.value_cache.data) +
                      p.value_cache.row(block, offset, first_head) * bytes;
      if (++offset == block_size && t + 1 < rows.count) {
        offset = 0;
        block = p.block_tables.block(seq, ++index);
      }
    }
    for (int t = rows.count; t < kTile; ++t) {
      rows.key[t] = rows.key[rows.count - 1];
      rows.value[t] = rows.value[rows.count - 1];
    }
    return rows;
  }
};

// To L2: measured on two processors, to L1 or past the caches gains nothing over not asking.
inline void prefetch(const char* line) { __builtin_prefetch(line, 0, 2); }

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Lines for a kernel to ask for. With factor 0 it asks for one that is there: nearly free, and no
// branch in its loop.
struct Stretch {
  const char* begin;
  int64_t factor;

  static Stretch none(const char* line) { return {line, 0}; }
};

// Walks the rows of a run of tokens in the order of memory: of each tile the keys, then the values.
// Every line: every second one is worse than none. The processor's own prefetcher stops at every
// page and cannot know the next block.
class Prefetcher {
 public:
  Prefetcher(const Source& source, int64_t begin, int64_t end)
      : source_(source), next_tile_(begin), end_(end) {
    const int64_t bytes = element_size(source.p.kv_dtype);
    row_bytes_ = source.p.shape.head_dim * bytes;
    enter_tile();
  }

  // Makes the line asked for last lie at least kAheadBytes past what has been used.
  void reach(int64_t used_bytes) {
    while (asked_bytes_ < used_bytes + kAheadBytes && !done_) ask();
  }

  // What a kernel that is about to use `bytes` should ask for, spread over its own loads. Of what
  // does not lie in one piece, all but the last piece is asked for at once.
  Stretch take(int64_t bytes) {
    while (segment_end_ - line_ < bytes && !done_) {
      bytes -= segment_end_ - line_;
      for (const char* end = segment_end_; line_ < end;) prefetch_line();
      next_segment();
      if (bytes <= 0) return Stretch::none(line_);
    }
    if (done_) return Stretch::none(line_);
    const Stretch stretch{line_, 1};
    const int64_t advance = (bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
    asked_bytes_ += advance;
    line_ += advance;
    if (line_ >= segment_end_) next_segment();
    return stretch;
  }

 private:
  void prefetch_line() {
    prefetch(line_);
    line_ += kLineBytes;
    asked_bytes_ += kLineBytes;
  }

  void ask() {
    prefetch_line();
    if (line_ >= segment_end_) next_segment();
  }

  __attribute__((noinline)) void next_segment() {
    if (done_) return;
    if (++segment_ == num_segments_) {
      if (values_) {
        enter_tile();
        return;
      }
      values_ = true;
      enter_pool(source_.p.value_cache);
    }
    set_segment();
  }

  void enter_tile() {
    if (next_tile_ >= end_) {
      done_ = true;
      line_ -= kLineBytes;  // some line that has been asked for
      segment_end_ = line_;
      return;
    }
    const int64_t tile_end = smaller((next_tile_ / kTile + 1) * kTile, end_);
    rows_ = source_.rows(next_tile_, tile_end);
    next_tile_ = tile_end;
    values_ = false;
    enter_pool(source_.p.key_cache);
    set_segment();
  }

  // A segment is all heads of a token where those lie side by side (NHD), all tokens of a head in
  // one block where those do (HND), else one row. HND goes block by block, though a tile may have
  // several: memory is faster in one stream than in two that take turns.
  void enter_pool(const PoolView& pool) {
    const char* const* rows = values_ ? rows_.value : rows_.key;
    const int64_t count = rows_.count;
    const int64_t block = smaller(count, source_.p.shape.block_size);
    const int64_t begin = next_tile_ - count;
    head_bytes_ = pool.head_stride * element_size(source_.p.kv_dtype);
    segment_ = 0;
    const bool heads_joined = head_bytes_ == row_bytes_;
    const bool tokens_joined = !heads_joined && count % block == 0 && begin % block == 0 &&
                               rows[block - 1] - rows[0] == (block - 1) * row_bytes_;
    tokens_inside_ = !tokens_joined && pool.head_stride > pool.token_stride;
    heads_a_segment_ = heads_joined ? source_.num_heads : 1;
    tokens_a_segment_ = tokens_joined ? block : 1;
    num_segments_ = count / tokens_a_segment_ * (source_.num_heads / heads_a_segment_);
  }

  void set_segment() {
    const int64_t tokens = rows_.count / tokens_a_segment_;
    const int64_t heads = source_.num_heads / heads_a_segment_;
    const int64_t token =
        (tokens_inside_ ? segment_ % tokens : segment_ / heads) * tokens_a_segment_;
    const int64_t head = tokens_inside_ ? segment_ / tokens : segment_ % heads;
    const char* begin = (values_ ? rows_.value : rows_.key)[token] + head * head_bytes_;
    const char* end = begin + heads_a_segment_ * tokens_a_segment_ * row_bytes_;
    // A line that holds the end of the last row and the beginning of this one is not asked twice.
    const bool follows = begin < line_ && begin >= line_ - kLineBytes && end > line_;
    if (!follows) line_ = begin - reinterpret_cast<uintptr_t>(begin) % kLineBytes;
    segment_end_ = end;
  }

  const Source& source_;
  TileRows rows_;
  int64_t next_tile_;
  const int64_t end_;
  int64_t row_bytes_;
  int64_t head_bytes_ = 0;
  int64_t segment_ = 0;
  int64_t num_segments_ = 0;
  int64_t heads_a_segment_ = 1;
  int64_t tokens_a_segment_ = 1;
  bool tokens_inside_ = false;
  bool values_ = false;
  bool done_ = false;
  const char* line_ = nullptr;
  const char* segment_end_ = nullptr;
  int64_t asked_bytes_ = 0;
};
