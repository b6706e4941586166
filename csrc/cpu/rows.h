// Writing, gathering and merging rows on a CPU. Included by cpu/kernels.cpp.

// The scale of one row of a cache that keeps one per token and head: the largest finite magnitude
// becomes the largest value of the format. An all-zero row has scale 0.
template <DType kKv>
float row_scale(const float* row, int count) {
  float largest = 0.f;
  for (int i = 0; i < count; ++i) {
    const float magnitude = from_bits(to_bits(row[i]) & 0x7fffffffu);
    if (magnitude < __builtin_inff()) largest = larger(largest, magnitude);
  }
  constexpr float kSmallestNormal = 1.17549435e-38f;
  return largest == 0.f ? 0.f : larger(largest / max_value(kKv), kSmallestNormal);
}

template <DType kInput, DType kKv>
void write_row(const RowsView& rows, const PoolView& pool, const ScaleView& scale,
               bool compute_scale, int64_t token, int64_t slot, const PagedShape& shape,
               int64_t head) {
  const int64_t block = slot / shape.block_size;
  const int64_t offset = slot % shape.block_size;
  float row[kMaxHeadDim];
  load_row<kInput>(rows.data, rows.row(0, token, head), shape.head_dim, row);
  float divisor;
  if (compute_scale) {
    divisor = row_scale<kKv>(row, shape.head_dim);
    scale.data[scale.index(block, offset, head)] = divisor;
    if (divisor == 0.f) divisor = 1.f;
  } else {
    divisor = scale.at(block, offset, head);
  }
  for (int i = 0; i < shape.head_dim; ++i) row[i] = row[i] / divisor;
  store_row<kKv>(pool.data, pool.row(block, offset, head), shape.head_dim, row);
}

// Heads of one token, byte for byte.
template <class Element>
void copy_heads(const Element* from, int64_t from_stride, Element* to, int64_t to_stride,
                const PagedShape& shape) {
  if (from_stride == shape.head_dim && to_stride == shape.head_dim) {
    __builtin_memcpy(to, from, int64_t{shape.num_kv_heads} * shape.head_dim * sizeof(Element));
    return;
  }
  for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
    __builtin_memcpy(to + head * to_stride, from + head * from_stride,
                     shape.head_dim * sizeof(Element));
  }
}

template <DType kInput, DType kKv>
void write_heads(const RowsView& rows, const PoolView& pool, const ScaleView& scale,
                 bool compute_scale, int64_t token, int64_t slot, const PagedShape& shape) {
  if constexpr (kInput == kKv) {
    if (scale.data == nullptr && scale.value == 1.f) {
      using Element = typename Storage<kKv>::Type;
      const int64_t to = pool.row(slot / shape.block_size, slot % shape.block_size, 0);
      copy_heads(static_cast<const Element*>(rows.data) + rows.row(0, token, 0), rows.head_stride,
                 static_cast<Element*>(pool.data) + to, pool.head_stride, shape);
      return;
    }
  }
  for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
    write_row<kInput, kKv>(rows, pool, scale, compute_scale, token, slot, shape, head);
  }
}

inline int64_t token_bytes(const PagedShape& shape, DType dtype) {
  return int64_t{2} * shape.num_kv_heads * shape.head_dim * element_size(dtype);
}

template <DType kInput, DType kKv>
void write_cache_typed(const CacheWriteParams& p) {
  parallel_for_each(p.num_tokens, grain_of(token_bytes(p.shape, kInput)), [&p](int64_t token) {
    const int64_t slot = p.slot_mapping[token];
    if (slot < 0) return;
    write_heads<kInput, kKv>(p.key, p.key_cache, p.k_scale, p.compute_k_scale, token, slot,
                             p.shape);
    write_heads<kInput, kKv>(p.value, p.value_cache, p.v_scale, p.compute_v_scale, token, slot,
                             p.shape);
  });
}

template <DType kKv, DType kOutput>
void gather_row(const RowsView& rows, const PoolView& pool, const ScaleView& scale, int64_t row_id,
                int64_t block, int64_t offset, const PagedShape& shape, int64_t head) {
  float row[kMaxHeadDim];
  load_row<kKv>(pool.data, pool.row(block, offset, head), shape.head_dim, row);
  const float factor = scale.at(block, offset, head);
  for (int i = 0; i < shape.head_dim; ++i) row[i] *= factor;
  store_row<kOutput>(rows.data, rows.row(0, row_id, head), shape.head_dim, row);
}

template <DType kOutput>
void clear_row(const RowsView& rows, int64_t row_id, const PagedShape& shape, int64_t head) {
  const float zeros[kMaxHeadDim] = {};
  store_row<kOutput>(rows.data, rows.row(0, row_id, head), shape.head_dim, zeros);
}

template <DType kKv, DType kOutput>
void gather_typed(const GatherParams& p) {
  parallel_for_each(p.num_tokens, grain_of(token_bytes(p.shape, kOutput)), [&p](int64_t row_id) {
    const GatheredToken token = p.token(row_id);
    for (int64_t head = 0; head < p.shape.num_kv_heads; ++head) {
      if (token.seq < 0) {
        clear_row<kOutput>(p.key, row_id, p.shape, head);
        clear_row<kOutput>(p.value, row_id, p.shape, head);
        continue;
      }
      const int64_t block = p.block_tables.block(token.seq, token.position / p.shape.block_size);
      const int64_t offset = token.position % p.shape.block_size;
      gather_row<kKv, kOutput>(p.key, p.key_cache, p.k_scale, row_id, block, offset, p.shape, head);
      gather_row<kKv, kOutput>(p.value, p.value_cache, p.v_scale, row_id, block, offset, p.shape,
                               head);
    }
  });
}

template <DType kType>
void merge_typed(const MergeParams& p) {
  const int64_t row_bytes = int64_t{3} * p.head_dim * element_size(kType);
  parallel_for_each(p.num_rows, grain_of(row_bytes), [&p](int64_t row) {
    const MergeWeights weights = merge_weights(p.lse_a[row], p.lse_b[row]);
    using Element = typename Storage<kType>::Type;
    const int64_t start = row * p.head_dim;
    const auto* a = static_cast<const Element*>(p.out_a) + start;
    const auto* b = static_cast<const Element*>(p.out_b) + start;
    auto* out = static_cast<Element*>(p.out) + start;
    for (int i = 0; i < p.head_dim; ++i) {
      // A side without weight is not read: it may hold anything.
      const float from_a = weights.a == 0.f ? 0.f : weights.a * load<kType>(a[i]);
      const float from_b = weights.b == 0.f ? 0.f : weights.b * load<kType>(b[i]);
      out[i] = store<kType>(from_a + from_b);
    }
    p.lse[row] = weights.lse;
  });
}
