// Paged attention on a CPU, plain and clear: one pass over the visible keys of a query token for
// up to kRowTile query heads of one KV head, with an online softmax (Milakov and Gimelshein 2018,
// arXiv 1805.02867) in fp32. Included by cpu/kernels.cpp.

constexpr int kMaxHeadDim = 512;
constexpr int kRowTile = 8;
// Below any score, and finite: a maximum that starts here never gives inf - inf.
constexpr float kLowest = -3.402823466e+38f;

struct RowState {
  float max;
  float sum;
  float query[kMaxHeadDim];
  float out[kMaxHeadDim];
};

inline float dot(const float* a, const float* b, int count) {
  float lanes[8] = {};
  for (int i = 0; i < count; i += 8) {
    for (int lane = 0; lane < 8; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  }
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
         ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

inline void accumulate(RowState& row, float score, const float* value, float v_scale, int count) {
  if (score > row.max) {  // a new maximum: what was summed so far shrinks
    const float keep = __builtin_expf(row.max - score);
    row.max = score;
    row.sum *= keep;
    for (int i = 0; i < count; ++i) row.out[i] *= keep;
  }
  const float weight = __builtin_expf(score - row.max);
  row.sum += weight;
  const float scaled = weight * v_scale;
  for (int i = 0; i < count; ++i) row.out[i] += scaled * value[i];
}

// The scores of one KV head's query heads against one key, after scale, softcap and ALiBi.
inline float score_of(const DecodeParams& p, const RowState& row, const float* key, float k_scale,
                      int64_t head, int64_t distance) {
  float score = dot(row.query, key, p.shape.head_dim) * (p.scale * k_scale);
  if (p.softcap > 0) score = p.softcap * __builtin_tanhf(score / p.softcap);
  if (p.alibi_slopes != nullptr) {
    score += p.alibi_slopes[head] * static_cast<float>(distance);
  }
  return score;
}

template <DType kQuery>
void finish_row(const DecodeParams& p, RowState& row, int64_t token, int64_t head) {
  if (p.sinks != nullptr) {
    // A logit without a value: it takes part in the denominator alone.
    const float max = larger(row.max, p.sinks[head]);
    const float keep = __builtin_expf(row.max - max);
    row.sum = row.sum * keep + __builtin_expf(p.sinks[head] - max);
    row.max = max;
    for (int i = 0; i < p.shape.head_dim; ++i) row.out[i] *= keep;
  }
  const bool empty = row.sum == 0.f;
  const float inverse = empty ? 0.f : 1.f / row.sum;
  for (int i = 0; i < p.shape.head_dim; ++i) row.out[i] *= inverse;
  store_row<kQuery>(p.out.data, p.row(p.out, token, head), p.shape.head_dim, row.out);
  if (p.lse != nullptr) {
    p.lse[token * p.num_q_heads + head] =
        empty ? -__builtin_inff() : row.max + __builtin_logf(row.sum);
  }
}

template <DType kQuery, DType kKv>
void decode_rows(const DecodeParams& p, int64_t token, int64_t kv_head, int64_t first_head,
                 int num_rows) {
  RowState rows[kRowTile];
  const int head_dim = p.shape.head_dim;
  for (int r = 0; r < num_rows; ++r) {
    rows[r].max = kLowest;
    rows[r].sum = 0.f;
    load_row<kQuery>(p.query.data, p.row(p.query, token, first_head + r), head_dim, rows[r].query);
    for (int i = 0; i < head_dim; ++i) rows[r].out[i] = 0.f;
  }
  const QueryToken query = p.query_token(token);
  const TokenRange visible = p.visible(query);
  float key[kMaxHeadDim], value[kMaxHeadDim];
  for (int64_t t = visible.begin; t < visible.end; ++t) {
    const int64_t block = p.block_tables.block(query.seq, t / p.shape.block_size);
    const int64_t offset = t % p.shape.block_size;
    load_row<kKv>(p.key_cache.data, p.key_cache.row(block, offset, kv_head), head_dim, key);
    load_row<kKv>(p.value_cache.data, p.value_cache.row(block, offset, kv_head), head_dim, value);
    const float k_scale = p.k_scale.at(block, offset, kv_head);
    const float v_scale = p.v_scale.at(block, offset, kv_head);
    const int64_t distance = t - (p.seq_len(query.seq) - query.query_len + query.index);
    for (int r = 0; r < num_rows; ++r) {
      const float score = score_of(p, rows[r], key, k_scale, first_head + r, distance);
      accumulate(rows[r], score, value, v_scale, head_dim);
    }
  }
  for (int r = 0; r < num_rows; ++r) finish_row<kQuery>(p, rows[r], token, first_head + r);
}

template <DType kQuery, DType kKv>
void decode_typed(const DecodeParams& p) {
  const int64_t group = p.num_q_heads / p.shape.num_kv_heads;
  parallel_for_each(p.num_tokens * p.shape.num_kv_heads, [&p, group](int64_t item) {
    const int64_t token = item / p.shape.num_kv_heads;
    const int64_t kv_head = item % p.shape.num_kv_heads;
    for (int64_t row = 0; row < group; row += kRowTile) {
      const int count = static_cast<int>(group - row < kRowTile ? group - row : kRowTile);
      decode_rows<kQuery, kKv>(p, token, kv_head, kv_head * group + row, count);
    }
  });
}
