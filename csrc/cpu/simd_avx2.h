// Vectors of 8 floats: AVX2, FMA and F16C. Included by cpu/kernels.cpp inside a level's namespace;
// cpu/simd.h says what a level must define.

using Vec = __m256;
constexpr int kWidth = 8;
constexpr int kMaxRows = 2;  // of a register tile: 2 rows x 4 vectors, of 16 registers
constexpr bool kHasPairProducts = false;
constexpr bool kLoadsTwo = false;
constexpr bool kE4m3IsScaled = true;
constexpr float kZeroExponent = -127.f;  // scale_by_power_of_2 of it is 0

inline Vec splat(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec larger_or_second(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec round_to_integer(Vec x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// For integers from -127, which gives 0, to 127.
inline Vec scale_by_power_of_2(Vec x, Vec integer) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(integer), _mm256_set1_epi32(127));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
inline Vec where_less(Vec a, Vec b, Vec then, Vec otherwise) {
  return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
inline Vec copy_sign(Vec magnitude, Vec sign) {
  const Vec mask = _mm256_set1_ps(-0.f);
  return _mm256_or_ps(_mm256_andnot_ps(mask, magnitude), _mm256_and_ps(mask, sign));
}

inline float sum_of(Vec x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline float max_of(Vec x) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}

// sums[i] = the sum of the elements of the i-th vector.
inline void store_sums(Vec a, Vec b, Vec c, Vec d, float* sums) {
  const Vec all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}

inline Vec widen_bf16(__m128i bits) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
// As halves with the exponent of e4m3, which is 2^8 too small: see kUnit.
inline Vec widen_e4m3(__m128i bytes) {
  const __m128i sign_filled = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);
  const __m128i bits = _mm_and_si128(sign_filled, _mm_set1_epi16(static_cast<int16_t>(0xbf80)));
  const __m128i nan =
      _mm_cmpeq_epi16(_mm_or_si128(bits, _mm_set1_epi16(static_cast<int16_t>(0x8000))),
                      _mm_set1_epi16(static_cast<int16_t>(0xbf80)));
  return _mm256_cvtph_ps(_mm_or_si128(bits, _mm_and_si128(nan, _mm_set1_epi16(0x7e00))));
}

template <DType kType>
Vec load_stored(const typename Storage<kType>::Type* p) {
  if constexpr (kType == DType::kF32) {
    return load(p);
  } else if constexpr (kType == DType::kF16 || kType == DType::kBf16) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return kType == DType::kF16 ? _mm256_cvtph_ps(bits) : widen_bf16(bits);
  } else {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    if constexpr (kType == DType::kI8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    if constexpr (kType == DType::kF8E4m3) return widen_e4m3(bytes);
    return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 8));
  }
}
