// Paged attention on a CPU: the runs and merges of a plan (cpu/plan.h). Included by
// cpu/kernels.cpp.
//
// Tiles of 16 tokens at fixed places; of each, the keys of all heads of the run, then the values of
// all heads, so that whole pages stream in the order of memory. Every row has bits of its own:
// which rows share its tile, and where the run begins, does not change them.

// What a run works on, carved from floats that the caller provides.
struct Scratch {
  float* query;        // [heads, rows, stride]; bfloat16 where keys are multiplied as pairs
  State total;         // of all chunks so far
  State chunk;         // of the current one
  float* weights;      // [heads, rows, kTile]
  float* keep;         // [heads, rows]
  TileScales* scales;  // [heads]
};

inline int padded(int head_dim) {
  return static_cast<int>((head_dim + kPadding - 1) / kPadding * kPadding);
}

inline State carve_state(float*& next, int64_t rows, int64_t stride) {
  State state;
  state.out = next;
  state.max = state.out + rows * stride;
  state.sum = state.max + rows;
  next = state.sum + rows;
  return state;
}

inline int64_t state_floats(int64_t rows, int head_dim) { return rows * (padded(head_dim) + 2); }

inline Scratch carve_scratch(float* next, int64_t heads, int64_t rows, int64_t stride) {
  Scratch s;
  s.scales = reinterpret_cast<TileScales*>(next);
  next += heads * sizeof(TileScales) / sizeof(float);
  s.query = next;
  next += rows * stride;
  s.weights = next;
  next += rows * kTile;
  s.total = carve_state(next, rows, stride);
  s.chunk = carve_state(next, rows, stride);
  s.keep = next;
  return s;
}

inline void clear(State state, int64_t rows, int64_t stride) {
  for (int64_t i = 0; i < rows * stride; ++i) state.out[i] = 0.f;
  for (int64_t r = 0; r < rows; ++r) {
    state.max[r] = kLowest;
    state.sum[r] = 0.f;
  }
}

template <DType kKv>
class RunWorker {
 public:
  RunWorker(const DecodeParams& p, const Plan& plan, const Run& run, float* scratch)
      : p_(p),
        run_(run),
        chunk_size_(plan.chunk_size),
        stride_(padded(p.shape.head_dim)),
        tile_(whole_row_tile(p, run.tile, plan.tile_rows)),
        num_rows_(tile_.num_rows),
        all_rows_(int64_t{run.num_heads} * num_rows_),
        group_(p.num_q_heads / p.shape.num_kv_heads),
        scratch_(carve_scratch(scratch, run.num_heads, all_rows_, stride_)) {}

  // Leaves the result in `out`, or in slots of partial results from `slots` on.
  void work(float* slots, int64_t floats_a_slot) {
    load_queries();
    if (!scales_by_token()) load_scales(0, kTile);
    bool started = false;
    clear(scratch_.total, all_rows_, stride_);
    if (run_.tokens.begin < run_.tokens.end) {
      const Source source{p_, tile_.seq, run_.first_head, run_.num_heads};
      Prefetcher prefetcher(source, run_.tokens.begin, run_.tokens.end);
      int64_t slot = run_.slot;
      for (int64_t begin = run_.tokens.begin; begin < run_.tokens.end;) {
        const int64_t end = smaller((begin / chunk_size_ + 1) * chunk_size_, run_.tokens.end);
        const bool separate = !run_.first;
        const State state = started || separate ? scratch_.chunk : scratch_.total;
        if (started || separate) clear(state, all_rows_, stride_);
        attend_chunk(source, prefetcher, begin, end, state);
        if (separate) {
          save(state, slots + slot++ * floats_a_slot);
        } else if (started) {
          merge(scratch_.total, state);
        }
        started = true;
        begin = end;
      }
    }
    if (run_.first && run_.last) {
      finish(scratch_.total);
    } else if (run_.first) {
      save(scratch_.total, slots + run_.slot * floats_a_slot);
    }
  }

  // The other end: merges what several runs left in their slots.
  void combine(float* slots, int64_t floats_a_slot, int64_t num_slots) {
    const State total = saved(slots);
    for (int64_t slot = 1; slot < num_slots; ++slot) {
      merge(total, saved(slots + slot * floats_a_slot));
    }
    finish(total);
  }

 private:
  int64_t element(int64_t head, int64_t row) const { return (head * num_rows_ + row) * stride_; }

  void load_queries() {
    for (int64_t i = 0; i < all_rows_ * stride_; ++i) scratch_.query[i] = 0.f;
    for (int head = 0; head < run_.num_heads; ++head) {
      for (int row = 0; row < num_rows_; ++row) load_query(head, row);
    }
  }

  void load_query(int head, int row) {
    const RowTarget target = row_target(head, row);
    const int64_t offset = p_.row(p_.query, target.token, target.head);
    float* to = scratch_.query + element(head, row);
    if constexpr (kUsePairs<kKv>) {
      const auto* from = static_cast<const uint16_t*>(p_.query.data) + offset;
      __builtin_memcpy(to, from, p_.shape.head_dim * sizeof(uint16_t));
    } else {
      float in_order[kMaxHeadDim];
      dispatch_float(p_.query_dtype, [&](auto dtype) {
        load_row<dtype.value>(p_.query.data, offset, p_.shape.head_dim, in_order);
      });
      for (int i = 0; i < p_.shape.head_dim; ++i)
        to[place<kKv>(i, p_.shape.head_dim)] = in_order[i];
    }
  }

  RowTarget row_target(int head, int row) const {
    RowTile tile = tile_;
    tile.kv_head = run_.first_head + head;
    return p_.row_target(tile, row);
  }

  void attend_chunk(const Source& source, Prefetcher& prefetcher, int64_t begin, int64_t end,
                    State state) {
    const int64_t token_bytes =
        run_.num_heads * p_.shape.head_dim * static_cast<int64_t>(element_size(kKv));
    while (begin < end) {
      const int64_t tile_end = smaller((begin / kTile + 1) * kTile, end);
      const TileRows rows = source.rows(begin, tile_end);
      const int64_t used = 2 * (begin - run_.tokens.begin) * token_bytes;
      prefetcher.reach(used);
      find_visible(begin, rows.count);
      if (scales_by_token()) load_scales(begin, rows.count);
      // A head's scores are stored in pieces and loaded as whole vectors, for which the processor
      // waits until they have left the store buffer: hence one head later.
      score_head(rows, 0, prefetcher);
      for (int head = 0; head < run_.num_heads; ++head) {
        if (head + 1 < run_.num_heads) score_head(rows, head + 1, prefetcher);
        weigh_head(begin, head, state);
      }
      prefetcher.reach(used + rows.count * token_bytes);
      for (int head = 0; head < run_.num_heads; ++head) add_head(rows, head, prefetcher, state);
      begin = tile_end;
    }
  }

  // Which of the tile's tokens each row sees.
  void find_visible(int64_t begin, int count) {
    all_visible_ = tile_.common.begin <= begin && begin + count <= tile_.common.end;
    if (all_visible_) {
      for (int row = 0; row < num_rows_; ++row) visible_[row] = {0, count};
      return;
    }
    for (int row = 0; row < num_rows_; ++row) {
      const TokenRange range =
          p_.visible({tile_.seq, (tile_.first_row + row) / group_, tile_.query_len});
      const int64_t first = range.begin - begin, last = range.end - begin;
      visible_[row].begin = static_cast<int>(first < 0 ? 0 : smaller(first, count));
      visible_[row].end = static_cast<int>(last < 0 ? 0 : smaller(last, count));
    }
  }

  void score_head(const TileRows& rows, int head, Prefetcher& prefetcher) {
    const int64_t offset = head * p_.key_cache.head_stride;
    const int64_t bytes = kKeys * p_.shape.head_dim * static_cast<int64_t>(element_size(kKv));
    for (int t = 0; t < rows.count; t += kKeys) {
      Stretch ahead = prefetcher.take(bytes);
      for (int row = 0; row < num_rows_; row += kMaxRows) {
        const float* query = scratch_.query + element(head, row);
        float* scores = scratch_.weights + (int64_t{head} * num_rows_ + row) * kTile + t;
        with_row_count(num_rows_ - row, [&](auto count) {
          score_keys<kKv, count.value>(query, stride_, rows.key + t, offset, p_.shape.head_dim,
                                       ahead, scores);
        });
        ahead.factor = 0;  // one pass over the keys asks
      }
    }
  }

  bool scales_by_token() const { return p_.k_scale.by_token() || p_.v_scale.by_token(); }

  // Of the tokens from `begin` on; the same for all tiles unless there is one scale a token.
  void load_scales(int64_t begin, int count) {
    for (int64_t head = 0; head < run_.num_heads; ++head) {
      const int64_t kv_head = run_.first_head + head;
      TileScales& scales = scratch_.scales[head];
      for (int t = 0; t < kTile; ++t) {
        int64_t block = 0, offset = 0;
        if (scales_by_token()) {
          const int64_t token = begin + (t < count ? t : count - 1);
          block = p_.block_tables.block(tile_.seq, token / p_.shape.block_size);
          offset = token % p_.shape.block_size;
        }
        scales.key[t] =
            finite_factor(p_.scale * p_.k_scale.at(block, offset, kv_head) * kUnit<kKv>);
        scales.value[t] = kUnit<kKv> * p_.v_scale.at(block, offset, kv_head);
      }
    }
  }

  void weigh_head(int64_t begin, int head, State state) {
    const TileScales& scales = scratch_.scales[head];
    for (int row = 0; row < num_rows_; ++row) {
      const int64_t index = int64_t{head} * num_rows_ + row;
      const Visible visible = visible_[row];
      if (visible.begin >= visible.end) {
        scratch_.keep[index] = 1.f;
        continue;
      }
      RowScores row_scores{visible.begin, visible.end, 0.f, 0.f};
      if (p_.alibi_slopes != nullptr) {
        const int64_t position =
            p_.seq_len(tile_.seq) - tile_.query_len + (tile_.first_row + row) / group_;
        row_scores.slope = p_.alibi_slopes[row_target(head, row).head];
        row_scores.distance = static_cast<float>(begin - position);
      }
      scratch_.keep[index] = weigh(row_scores, scales, p_.softcap, scratch_.weights + index * kTile,
                                   state.max[index], state.sum[index]);
    }
  }

  void add_head(const TileRows& rows, int head, Prefetcher& prefetcher, State state) {
    for (int row = 0; row < num_rows_;) {
      const Visible visible = visible_[row];
      int count = 1;  // rows that see the same tokens share a register tile
      while (count < kMaxRows && row + count < num_rows_ &&
             visible_[row + count].begin == visible.begin &&
             visible_[row + count].end == visible.end) {
        ++count;
      }
      if (visible.begin < visible.end) {
        const ValueTile tile{rows.value, head * p_.value_cache.head_stride, visible.begin,
                             visible.end};
        const int64_t index = int64_t{head} * num_rows_ + row;
        with_row_count(count, [&](auto constant) {
          add_values<kKv, constant.value>(
              tile, scratch_.weights + index * kTile, scratch_.keep + index, stride_,
              p_.shape.head_dim, row == 0 ? &prefetcher : nullptr, state.out + index * stride_);
        });
      }
      row += count;
    }
  }

  void merge(State total, State next) {
    for (int64_t row = 0; row < all_rows_; ++row) {
      merge_row(total, next, row, stride_, p_.shape.head_dim);
    }
  }

  State saved(float* slot) const { return carve_state(slot, all_rows_, stride_); }

  void save(State state, float* slot) const {
    __builtin_memcpy(slot, state.out, state_floats(all_rows_, p_.shape.head_dim) * sizeof(float));
  }

  void finish(State state) {
    for (int head = 0; head < run_.num_heads; ++head) {
      for (int row = 0; row < num_rows_; ++row) finish_row(state, head, row);
    }
  }

  void finish_row(State state, int head, int row) {
    const RowTarget target = row_target(head, row);
    const int64_t index = int64_t{head} * num_rows_ + row;
    const float* out = state.out + index * stride_;
    float max = state.max[index], sum = state.sum[index];
    float keep = 1.f;
    if (p_.sinks != nullptr) {
      // A logit without a value: it takes part in the denominator alone.
      const float sink = p_.sinks[target.head];
      const float with_sink = larger(max, sink);
      keep = __builtin_expf(max - with_sink);
      sum = sum * keep + __builtin_expf(sink - with_sink);
      max = with_sink;
    }
    const bool empty = sum == 0.f;
    const float factor = empty ? 0.f : keep / sum;
    float in_order[kMaxHeadDim];
    for (int i = 0; i < p_.shape.head_dim; ++i) {
      in_order[i] = factor * out[place<kKv>(i, p_.shape.head_dim)];
    }
    dispatch_float(p_.query_dtype, [&](auto dtype) {
      store_row<dtype.value>(p_.out.data, p_.row(p_.out, target.token, target.head),
                             p_.shape.head_dim, in_order);
    });
    if (p_.lse != nullptr) {
      p_.lse[target.token * p_.num_q_heads + target.head] =
          empty ? -__builtin_inff() : max + __builtin_logf(sum);
    }
  }

  struct Visible {
    int begin;
    int end;
  };

  const DecodeParams& p_;
  const Run& run_;
  const int64_t chunk_size_;
  const int64_t stride_;
  const RowTile tile_;
  const int num_rows_;
  const int64_t all_rows_;
  const int64_t group_;
  const Scratch scratch_;
  bool all_visible_ = false;
  Visible visible_[kMaxTileRows];
};
