// Vectors of 4 floats in the compiler's own vector types: SSE2 on any x86-64, NEON on aarch64.
// Included by cpu/kernels.cpp inside a level's namespace; cpu/simd.h says what a level must define.

using Vec = float __attribute__((vector_size(16)));
using Words = uint32_t __attribute__((vector_size(16)));
constexpr int kWidth = 4;
#if defined(__aarch64__)
constexpr int kMaxRows = 4;  // of a register tile: 4 rows x 4 vectors, of 32 registers
#else
constexpr int kMaxRows = 2;  // 2 rows x 4 vectors, of 16 registers
#endif
constexpr bool kHasPairProducts = false;
constexpr bool kLoadsTwo = false;
constexpr bool kE4m3IsScaled = false;
constexpr float kZeroExponent = -127.f;  // scale_by_power_of_2 of it is 0

inline Vec splat(float x) { return Vec{x, x, x, x}; }
inline Vec load(const float* p) {
  Vec x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}
inline void store(float* p, Vec x) { __builtin_memcpy(p, &x, sizeof(x)); }
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec larger_or_second(Vec a, Vec b) { return a > b ? a : b; }
// For magnitudes below 2^22, the rest is cut to them; NaN stays NaN.
inline Vec round_to_integer(Vec x) {
  const Vec magic = splat(12582912.f);  // 1.5 * 2^23: leaves no bits for a fraction
  return (x + magic) - magic;
}
// For integers from -127, which gives 0, to 127.
inline Vec scale_by_power_of_2(Vec x, Vec integer) {
  // The sum's lowest bits are the integer plus 127.
  const Words exponent = reinterpret_cast<Words>(integer + splat(12582912.f + 127.f));
  return x * reinterpret_cast<Vec>(exponent << 23);
}
inline Vec where_less(Vec a, Vec b, Vec then, Vec otherwise) { return a < b ? then : otherwise; }
inline Vec copy_sign(Vec magnitude, Vec sign) {
  return reinterpret_cast<Vec>((reinterpret_cast<Words>(magnitude) & 0x7fffffffu) |
                               (reinterpret_cast<Words>(sign) & 0x80000000u));
}

inline float sum_of(Vec x) { return (x[0] + x[2]) + (x[1] + x[3]); }
inline float max_of(Vec x) { return larger(larger(x[0], x[2]), larger(x[1], x[3])); }

// sums[i] = the sum of the elements of the i-th vector.
inline void store_sums(Vec a, Vec b, Vec c, Vec d, float* sums) {
  const Vec ab =
      __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Vec cd =
      __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
  store(sums,
        __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7));
}

// cpu/convert.h's widen(), four at a time.
template <int kExponent, int kMantissa>
Vec widen_all(Words bits) {
  constexpr int kBias = (1 << (kExponent - 1)) - 1;
  constexpr uint32_t kSign = 1u << (kExponent + kMantissa);
  constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(128 - kBias) << 23;
  const Words magnitude = (bits & (kSign - 1)) << (23 - kMantissa);
  const Vec normal = reinterpret_cast<Vec>(magnitude + (static_cast<uint32_t>(127 - kBias) << 23));
  const Vec subnormal =
      reinterpret_cast<Vec>(magnitude + kSmallestNormal) - splat(from_bits(kSmallestNormal));
  const Words value = reinterpret_cast<Words>(magnitude < (1u << 23) ? subnormal : normal);
  return reinterpret_cast<Vec>(value | (bits & kSign) << (31 - kExponent - kMantissa));
}

inline Vec widen_halves(Words bits) {
  const Words full = reinterpret_cast<Words>((bits & 0x7c00u) == 0x7c00u) & 0x7f800000u;
  return reinterpret_cast<Vec>(reinterpret_cast<Words>(widen_all<5, 10>(bits)) | full);
}

// Four stored numbers, widened to what Vec or Words have of bits. Attributes of a type that depends
// on a template parameter are ignored: hence one function a type.
inline Words load_words(const uint8_t* p) {
  uint8_t __attribute__((vector_size(4))) four;
  __builtin_memcpy(&four, p, sizeof(four));
  return __builtin_convertvector(four, Words);
}
inline Words load_words(const uint16_t* p) {
  uint16_t __attribute__((vector_size(8))) four;
  __builtin_memcpy(&four, p, sizeof(four));
  return __builtin_convertvector(four, Words);
}
inline Vec load_integers(const int8_t* p) {
  int8_t __attribute__((vector_size(4))) four;
  __builtin_memcpy(&four, p, sizeof(four));
  return __builtin_convertvector(four, Vec);
}

template <DType kType>
Vec load_stored(const typename Storage<kType>::Type* p) {
  if constexpr (kType == DType::kF32) {
    return load(p);
  } else if constexpr (kType == DType::kI8) {
    return load_integers(p);
  } else {
    const Words bits = load_words(p);
    if constexpr (kType == DType::kBf16) {
      return reinterpret_cast<Vec>(bits << 16);
    } else if constexpr (kType == DType::kF16) {
      return widen_halves(bits);
    } else if constexpr (kType == DType::kF8E5m2) {
      return widen_halves(bits << 8);
    } else {
      const Words nan = reinterpret_cast<Words>((bits & 0x7fu) == 0x7fu) & 0x7fc00000u;
      return reinterpret_cast<Vec>(reinterpret_cast<Words>(widen_all<4, 3>(bits)) | nan);
    }
  }
}
