// The two products of a tile of tokens: query rows with keys, and weights with values. Included by
// cpu/kernels.cpp.
//
// A register tile is a few query rows by four keys, or by four vectors of a value row, so that the
// rows of a group share each load and each conversion.

// Whether keys are multiplied as they are stored, two elements at a time.
template <DType kKv>
constexpr bool kUsePairs = kHasPairProducts && kKv == DType::kBf16;

constexpr int kKeys = 4;     // of a register tile
constexpr int kVectors = 4;  // of a register tile
static_assert(kTile % kKeys == 0 && kTile % kWidth == 0);

#if defined(__AVX512BF16__)
template <int kRows>
void score_pairs(const float* query, int stride, const uint16_t* const* keys, int head_dim,
                 Prefetcher& prefetcher, int ahead, Vec (&sums)[kRows][kKeys]) {
  for (int i = 0; i < head_dim; i += kPairElements) {
    Pairs key[kKeys];
    for (int t = 0; t < kKeys; ++t) key[t] = load_pairs(keys[t] + i, head_dim - i);
    prefetcher.step(2 * ahead);
    for (int r = 0; r < kRows; ++r) {
      const auto* row = reinterpret_cast<const uint16_t*>(query + static_cast<int64_t>(r) * stride);
      const Pairs q = load_pairs(row + i, kPairElements);
      for (int t = 0; t < kKeys; ++t) sums[r][t] = add_products(sums[r][t], q, key[t]);
    }
  }
}
#endif

template <DType kKv, int kRows>
void score_floats(const float* query, int stride,
                  const typename Storage<kKv>::Type* const* keys, int head_dim,
                  Prefetcher& prefetcher, int ahead, Vec (&sums)[kRows][kKeys]) {
  const auto add = [&](int i, const Vec(&key)[kKeys]) {
    for (int r = 0; r < kRows; ++r) {
      const Vec q = load(query + static_cast<int64_t>(r) * stride + i);
      for (int t = 0; t < kKeys; ++t) sums[r][t] = fma(q, key[t], sums[r][t]);
    }
  };
  Vec key[kKeys];
  int i = 0;
  for (; i + kWidth <= head_dim; i += kWidth) {
    for (int t = 0; t < kKeys; ++t) key[t] = load_stored<kKv>(keys[t] + i);
    prefetcher.step(ahead);
    add(i, key);
  }
  if (i < head_dim) {
    for (int t = 0; t < kKeys; ++t) key[t] = load_last<kKv>(keys[t] + i);
    add(i, key);
  }
}

// scores[r * kTile + t] = query row r . key t, for kKeys keys. `stride` is that of query rows;
// `ahead` the bytes to prefetch for each vector of the keys.
template <DType kKv, int kRows>
void score_keys(const float* query, int stride, const char* const* rows, int64_t head_offset,
                int head_dim, Prefetcher& prefetcher, int ahead, float* scores) {
  using Stored = typename Storage<kKv>::Type;
  const Stored* keys[kKeys];
  for (int t = 0; t < kKeys; ++t) keys[t] = reinterpret_cast<const Stored*>(rows[t]) + head_offset;
  Vec sums[kRows][kKeys];
  for (int r = 0; r < kRows; ++r) {
    for (int t = 0; t < kKeys; ++t) sums[r][t] = splat(0.f);
  }
#if defined(__AVX512BF16__)
  if constexpr (kUsePairs<kKv>) {
    score_pairs<kRows>(query, stride, keys, head_dim, prefetcher, ahead, sums);
  } else
#endif
  {
    score_floats<kKv, kRows>(query, stride, keys, head_dim, prefetcher, ahead, sums);
  }
  for (int r = 0; r < kRows; ++r) store_sums(sums[r], scores + r * kTile);
}

struct ValueTile {
  const char* const* rows;  // of tokens
  int64_t head_offset;      // elements
  int begin;                // tokens
  int end;
};

// out[r] = out[r] * keep[r] + sum over t of weights[r * kTile + t] * value t, for kCount vectors
// (the last of 8 elements, if kHalf) from element `i` on.
template <DType kKv, int kRows, int kCount, bool kHalf>
void add_vectors(const ValueTile& tile, const float* weights, const float* keep, int stride, int i,
                 Prefetcher& prefetcher, int ahead, float* out) {
  using Stored = typename Storage<kKv>::Type;
  Vec sums[kRows][kCount];
  for (int r = 0; r < kRows; ++r) {
    const Vec factor = splat(keep[r]);
    for (int j = 0; j < kCount; ++j) {
      sums[r][j] = load(out + static_cast<int64_t>(r) * stride + i + j * kWidth) * factor;
    }
  }
  for (int t = tile.begin; t < tile.end; ++t) {
    const Stored* row = reinterpret_cast<const Stored*>(tile.rows[t]) + tile.head_offset + i;
    Vec value[kCount];
    for (int j = 0; j < kCount; ++j) {
      value[j] = kHalf && j == kCount - 1 ? load_last<kKv>(row + j * kWidth)
                                          : load_stored<kKv>(row + j * kWidth);
    }
    prefetcher.step(kCount * ahead);
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = splat(weights[r * kTile + t]);
      for (int j = 0; j < kCount; ++j) sums[r][j] = fma(weight, value[j], sums[r][j]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kCount; ++j) {
      store(out + static_cast<int64_t>(r) * stride + i + j * kWidth, sums[r][j]);
    }
  }
}

template <DType kKv, int kRows>
void add_values(const ValueTile& tile, const float* weights, const float* keep, int stride,
                int head_dim, Prefetcher& prefetcher, int ahead, float* out) {
  int i = 0;
  for (; i + kVectors * kWidth <= head_dim; i += kVectors * kWidth) {
    add_vectors<kKv, kRows, kVectors, false>(tile, weights, keep, stride, i, prefetcher, ahead,
                                             out);
  }
  for (; i + kWidth <= head_dim; i += kWidth) {
    add_vectors<kKv, kRows, 1, false>(tile, weights, keep, stride, i, prefetcher, ahead, out);
  }
  if (i < head_dim) {
    add_vectors<kKv, kRows, 1, true>(tile, weights, keep, stride, i, prefetcher, 0, out);
  }
}

// Calls function(constant) with the number of rows, 1 to kMaxRows, as a compile-time constant.
template <class Function>
void with_row_count(int rows, Function function) {
  if (rows == 1) return function(std::integral_constant<int, 1>{});
  if (rows == 2 || kMaxRows == 2) return function(std::integral_constant<int, 2>{});
  if (rows == 3) return function(std::integral_constant<int, kMaxRows == 2 ? 2 : 3>{});
  function(std::integral_constant<int, kMaxRows>{});
}
