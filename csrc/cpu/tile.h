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

// function(constant) for 0 to kCount - 1: a loop that is unrolled before the compiler decides what
// lives in registers, as loops over arrays of sums would not be.
template <int kCount, class Function>
PAGED_ATTN_INLINE inline void unrolled(Function function) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) PAGED_ATTN_INLINE {
    (function(std::integral_constant<int, kIndex>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

// Asks for the lines of step `i`, kBytes a step.
template <int kBytes>
void prefetch_step(const Stretch& ahead, int i) {
  for (int line = 0; line < kBytes || line == 0; line += kLineBytes) {
    prefetch(ahead.begin + (static_cast<int64_t>(i) * kBytes + line) * ahead.factor);
  }
}

#if defined(__AVX512BF16__)
template <int kRows>
void score_pairs(const float* query, int64_t stride, const uint16_t* const* keys, int head_dim,
                 const Stretch& ahead, Vec (&sums)[kRows * kKeys]) {
  const auto* pairs = reinterpret_cast<const uint16_t*>(query);
  for (int i = 0; i < head_dim; i += kPairElements) {
    Pairs key[kKeys];
    unrolled<kKeys>([&](auto t)
                        PAGED_ATTN_INLINE { key[t] = load_pairs(keys[t] + i, head_dim - i); });
    prefetch_step<kKeys * kPairElements * 2>(ahead, i / kPairElements);
    unrolled<kRows>([&](auto r) PAGED_ATTN_INLINE {
      const Pairs q = load_pairs(pairs + r * stride * 2 + i, kPairElements);
      unrolled<kKeys>([&](auto t) PAGED_ATTN_INLINE {
        sums[r * kKeys + t] = add_products(sums[r * kKeys + t], q, key[t]);
      });
    });
  }
}
#endif

// kLoadVectors<kKv> vectors of a row.
template <DType kKv, int kCount>
PAGED_ATTN_INLINE inline void load_vectors(const typename Storage<kKv>::Type* p, Vec* vectors) {
  if constexpr (kCount == 2) {
    load_two<kKv>(p, vectors[0], vectors[1]);
  } else {
    vectors[0] = load_stored<kKv>(p);
  }
}

template <DType kKv, int kRows>
void score_floats(const float* query, int64_t stride,
                  const typename Storage<kKv>::Type* const* keys, int head_dim,
                  const Stretch& ahead, Vec (&sums)[kRows * kKeys]) {
  constexpr int kCount = kLoadVectors<kKv>;
  constexpr int kStep = kCount * kWidth;
  Vec key[kKeys * kCount];  // [keys, vectors]
  const auto add = [&](int i, int vector) PAGED_ATTN_INLINE {
    unrolled<kRows>([&](auto r) PAGED_ATTN_INLINE {
      const Vec q = load(query + r * stride + i);
      unrolled<kKeys>([&](auto t) PAGED_ATTN_INLINE {
        sums[r * kKeys + t] = fma(q, key[t * kCount + vector], sums[r * kKeys + t]);
      });
    });
  };
  int i = 0;
  for (; i + kStep <= head_dim; i += kStep) {
    unrolled<kKeys>([&](auto t) PAGED_ATTN_INLINE {
      load_vectors<kKv, kCount>(keys[t] + i, key + t * kCount);
    });
    prefetch_step<kKeys * kStep * element_size(kKv)>(ahead, i / kStep);
    unrolled<kCount>([&](auto j) PAGED_ATTN_INLINE { add(i + j * kWidth, j); });
  }
  for (; i < head_dim; i += kWidth) {
    unrolled<kKeys>([&](auto t) PAGED_ATTN_INLINE {
      key[t * kCount] =
          i + kWidth <= head_dim ? load_stored<kKv>(keys[t] + i) : load_last<kKv>(keys[t] + i);
    });
    add(i, 0);
  }
}

// scores[r * kTile + t] = query row r . key t, for kKeys keys. `stride` is that of query rows.
template <DType kKv, int kRows>
__attribute__((noinline)) void score_keys(const float* query, int64_t stride,
                                          const char* const* rows, int64_t head_offset,
                                          int head_dim, Stretch ahead, float* scores) {
  using Stored = typename Storage<kKv>::Type;
  const Stored* keys[kKeys];
  unrolled<kKeys>([&](auto t) PAGED_ATTN_INLINE {
    keys[t] = reinterpret_cast<const Stored*>(rows[t]) + head_offset;
  });
  Vec sums[kRows * kKeys];
  unrolled<kRows * kKeys>([&](auto n) PAGED_ATTN_INLINE { sums[n] = splat(0.f); });
#if defined(__AVX512BF16__)
  if constexpr (kUsePairs<kKv>) {
    score_pairs<kRows>(query, stride, keys, head_dim, ahead, sums);
  } else
#endif
  {
    score_floats<kKv, kRows>(query, stride, keys, head_dim, ahead, sums);
  }
  unrolled<kRows>([&](auto r) PAGED_ATTN_INLINE {
    const Vec* row = sums + r * kKeys;
    store_sums(row[0], row[1], row[2], row[3], scores + r * kTile);
  });
}

struct ValueTile {
  const char* const* rows;  // of tokens
  int64_t head_offset;      // elements
  int begin;                // tokens
  int end;
};

// out[r] = out[r] * keep[r] + sum over t of weights[r * kTile + t] * value t, for kCount vectors
// (one of 8 elements, if kHalf) from element `i` on.
template <DType kKv, int kRows, int kCount, bool kHalf>
__attribute__((noinline)) void add_vectors(const ValueTile& tile, const float* weights,
                                           const float* keep, int64_t stride, int i, Stretch ahead,
                                           float* out) {
  using Stored = typename Storage<kKv>::Type;
  const int64_t offset = tile.head_offset + i;
  const int begin = tile.begin, end = tile.end;
  const char* const* rows = tile.rows;
  out += i;
  Vec sums[kRows * kCount];
  unrolled<kRows * kCount>([&](auto n) PAGED_ATTN_INLINE {
    sums[n] = load(out + n / kCount * stride + n % kCount * kWidth) * splat(keep[n / kCount]);
  });
  for (int t = begin; t < end; ++t) {
    const Stored* row = reinterpret_cast<const Stored*>(rows[t]) + offset;
    Vec value[kCount];
    if constexpr (kHalf) {
      static_assert(kCount == 1);
      value[0] = load_last<kKv>(row);
    } else {
      constexpr int kLoad = kCount % 2 == 0 ? kLoadVectors<kKv> : 1;
      unrolled<kCount / kLoad>([&](auto j) PAGED_ATTN_INLINE {
        load_vectors<kKv, kLoad>(row + j * kLoad * kWidth, value + j * kLoad);
      });
    }
    prefetch_step<kCount * kWidth * element_size(kKv)>(ahead, t - begin);
    unrolled<kRows>([&](auto r) PAGED_ATTN_INLINE {
      const Vec weight = splat(weights[r * kTile + t]);
      unrolled<kCount>([&](auto j) PAGED_ATTN_INLINE {
        sums[r * kCount + j] = fma(weight, value[j], sums[r * kCount + j]);
      });
    });
  }
  unrolled<kRows * kCount>([&](auto n) PAGED_ATTN_INLINE {
    store(out + n / kCount * stride + n % kCount * kWidth, sums[n]);
  });
}

// Lines are prefetched meanwhile if `prefetcher` is not null.
template <DType kKv, int kRows>
void add_values(const ValueTile& tile, const float* weights, const float* keep, int64_t stride,
                int head_dim, Prefetcher* prefetcher, float* out) {
  constexpr int kVectorBytes = kWidth * element_size(kKv);
  const auto ahead = [&](int vectors) {
    const int bytes = (tile.end - tile.begin) * vectors * kVectorBytes;
    return prefetcher == nullptr ? Stretch::none(tile.rows[0]) : prefetcher->take(bytes);
  };
  int i = 0;
  for (; i + kVectors * kWidth <= head_dim; i += kVectors * kWidth) {
    add_vectors<kKv, kRows, kVectors, false>(tile, weights, keep, stride, i, ahead(kVectors), out);
  }
  for (; kLoadVectors<kKv> == 2 && i + 2 * kWidth <= head_dim; i += 2 * kWidth) {
    add_vectors<kKv, kRows, 2, false>(tile, weights, keep, stride, i, ahead(2), out);
  }
  for (; i + kWidth <= head_dim; i += kWidth) {
    add_vectors<kKv, kRows, 1, false>(tile, weights, keep, stride, i, ahead(1), out);
  }
  if (i < head_dim) {
    add_vectors<kKv, kRows, 1, true>(tile, weights, keep, stride, i, Stretch::none(tile.rows[0]),
                                     out);
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
