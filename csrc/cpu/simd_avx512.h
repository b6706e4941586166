// Vectors of 16 floats: AVX-512 F, BW, DQ and VL; with AVX512_BF16, products of bfloat16 pairs,
// too. Included by cpu/kernels.cpp inside a level's namespace; cpu/simd.h says what a level must
// define.

using Vec = __m512;
constexpr int kWidth = 16;
constexpr bool kLoadsTwo = true;
constexpr bool kE4m3IsScaled = true;
constexpr int kMaxRows = 4;              // of a register tile: 4 rows x 4 vectors, of 32 registers
constexpr float kZeroExponent = -200.f;  // scale_by_power_of_2 of it is 0

inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec larger_or_second(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec round_to_integer(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }
inline Vec scale_by_power_of_2(Vec x, Vec integer) { return _mm512_scalef_ps(x, integer); }
inline Vec where_less(Vec a, Vec b, Vec then, Vec otherwise) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), otherwise, then);
}
inline Vec copy_sign(Vec magnitude, Vec sign) {
  const Vec mask = _mm512_set1_ps(-0.f);
  return _mm512_or_ps(_mm512_andnot_ps(mask, magnitude), _mm512_and_ps(mask, sign));
}

inline __m256 fold(Vec x) {
  return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
}

inline float sum_of(Vec x) { return _mm512_reduce_add_ps(x); }
inline float max_of(Vec x) { return _mm512_reduce_max_ps(x); }

// sums[i] = the sum of the elements of the i-th vector.
inline void store_sums(Vec a, Vec b, Vec c, Vec d, float* sums) {
  const Vec ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const Vec cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m256 all =
      fold(_mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee)));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}

// 16 halves, of which those in `bits` with a full exponent are infinities and NaN.
inline Vec widen_halves(__m256i bits) { return _mm512_cvtph_ps(bits); }
inline Vec widen_bf16(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline Vec widen_i8(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
inline Vec widen_e5m2(__m128i bytes) {
  return widen_halves(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8));
}
// As halves with the exponent of e4m3, which is 2^8 too small: see kUnit.
inline __m512i e4m3_to_halves(__m256i bytes) {
  const auto all = [](uint32_t bits) { return _mm512_set1_epi16(static_cast<int16_t>(bits)); };
  const __m512i sign_filled = _mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 7);
  const __mmask32 nan =
      _mm512_cmpeq_epi16_mask(_mm512_or_si512(sign_filled, all(0xc000)), all(0xff80));
  const __m512i bits = _mm512_and_si512(sign_filled, all(0xbf80));
  return _mm512_mask_mov_epi16(bits, nan, all(0x7e00));
}
inline Vec widen_e4m3(__m128i bytes) {
  return widen_halves(_mm512_castsi512_si256(e4m3_to_halves(_mm256_zextsi128_si256(bytes))));
}

template <DType kType>
Vec load_stored(const typename Storage<kType>::Type* p) {
  if constexpr (kType == DType::kF32) {
    return load(p);
  } else if constexpr (kType == DType::kF16 || kType == DType::kBf16) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return kType == DType::kF16 ? widen_halves(bits) : widen_bf16(bits);
  } else {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return kType == DType::kI8       ? widen_i8(bytes)
           : kType == DType::kF8E5m2 ? widen_e5m2(bytes)
                                     : widen_e4m3(bytes);
  }
}

// 8 elements and 8 zeros: rows end where a vector of 16 may not read on.
template <DType kType>
Vec load_stored_half(const typename Storage<kType>::Type* p) {
  if constexpr (kType == DType::kF32) {
    return _mm512_maskz_loadu_ps(0xff, p);
  } else if constexpr (kType == DType::kF16 || kType == DType::kBf16) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m256i bits = _mm256_zextsi128_si256(half);
    return kType == DType::kF16 ? widen_halves(bits) : widen_bf16(bits);
  } else {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return kType == DType::kI8       ? widen_i8(bytes)
           : kType == DType::kF8E5m2 ? widen_e5m2(bytes)
                                     : widen_e4m3(bytes);
  }
}

// Of bfloat16 a shift and a mask, and no widening.
template <DType kType>
void load_two(const typename Storage<kType>::Type* p, Vec& first, Vec& second) {
  if constexpr (kType == DType::kBf16) {
    const __m512i words = _mm512_loadu_si512(p);
    first = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    second = _mm512_castsi512_ps(
        _mm512_and_si512(words, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u))));
  } else {
    static_assert(kType == DType::kF8E4m3);
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m512i halves = e4m3_to_halves(bytes);
    first = widen_halves(_mm512_castsi512_si256(halves));
    second = widen_halves(_mm512_extracti64x4_epi64(halves, 1));
  }
}

#if defined(__AVX512BF16__)
// Sums of products of pairs of bfloat16: 32 elements an instruction.
constexpr bool kHasPairProducts = true;
constexpr int kPairElements = 32;
struct Pairs {
  __m512i bits;
};
// `count` elements from p, a multiple of 8, and zeros.
inline Pairs load_pairs(const uint16_t* p, int count) {
  if (count >= kPairElements) return {_mm512_loadu_si512(p)};
  return {_mm512_maskz_loadu_epi16((1u << count) - 1, p)};
}
inline Vec add_products(Vec sum, Pairs a, Pairs b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a.bits),
                          reinterpret_cast<__m512bh>(b.bits));
}
#else
constexpr bool kHasPairProducts = false;
#endif
