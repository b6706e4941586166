// Mathematics over the vectors of an instruction-set level. A level's file (simd_avx512.h,
// simd_avx2.h, simd_portable.h) defines Vec, its loads and arithmetic, and how stored numbers are
// widened; everything above is written once. Included by cpu/kernels.cpp.

// Both polynomials are minimax fits by iteratively reweighted least squares.

// 2^x to a relative error of 2e-7 for x <= 127; 0 below 2^-126 or so. NaN stays NaN.
inline Vec exp2_of(Vec x) {
  const Vec clamped = larger_or_second(splat(kZeroExponent), x);
  const Vec integer = round_to_integer(clamped);
  const Vec f = clamped - integer;
  Vec p = splat(0.00015353362f);
  p = fma(p, f, splat(0.0013398875f));
  p = fma(p, f, splat(0.009618437f));
  p = fma(p, f, splat(0.055503324f));
  p = fma(p, f, splat(0.24022648f));
  p = fma(p, f, splat(0.6931472f));
  p = fma(p, f, splat(1.f));
  return scale_by_power_of_2(p, integer);
}

constexpr float kLog2E = 1.44269504f;

inline Vec exp_of(Vec x) { return exp2_of(x * splat(kLog2E)); }

// tanh to a relative error of 3e-7. Up to 0.625 an odd polynomial, lest 1 - 1 cancel.
inline Vec tanh_of(Vec x) {
  const Vec square = x * x;
  Vec p = splat(-0.005704986f);
  p = fma(p, square, splat(0.020639086f));
  p = fma(p, square, splat(-0.053739715f));
  p = fma(p, square, splat(0.13331442f));
  p = fma(p, square, splat(-0.33333281f));
  const Vec near_zero = fma(x * square, p, x);
  const Vec magnitude = copy_sign(x, splat(0.f));
  const Vec bounded = where_less(splat(10.f), magnitude, splat(10.f), magnitude);  // NaN stays
  const Vec far = splat(1.f) - splat(2.f) / (exp_of(bounded + bounded) + splat(1.f));
  return where_less(magnitude, splat(0.625f), near_zero, copy_sign(far, x));
}

// What a loaded value must be multiplied by.
template <DType kType>
constexpr float kUnit = kE4m3IsScaled && kType == DType::kF8E4m3 ? 256.f : 1.f;

// Two vectors at a time, where that is cheaper than twice one. Of bfloat16 they are the elements
// with even and with odd places.
template <DType kType>
constexpr int kLoadVectors =
    kLoadsTwo && (kType == DType::kBf16 || kType == DType::kF8E4m3) ? 2 : 1;
template <DType kType>
constexpr bool kInterleaved = kLoadsTwo && kType == DType::kBf16;
template <DType kType>
void load_two(const typename Storage<kType>::Type* p, Vec& first, Vec& second);

// 8 elements of a row, and zeros where a vector is wider.
template <DType kType>
Vec load_last(const typename Storage<kType>::Type* p) {
  if constexpr (kWidth == 16) {
    return load_stored_half<kType>(p);
  } else {
    return load_stored<kType>(p);  // head_dim is a multiple of 8: there is no rest
  }
}

// Stored element i of a row is at place(i) of queries and outputs: where vectors are loaded two at
// a time as even and odd places, whole pairs of vectors have that order, too.
template <DType kType>
constexpr int place(int i, int head_dim) {
  constexpr int kPair = 2 * kWidth;
  if (!kInterleaved<kType> || i >= head_dim / kPair * kPair) return i;
  return i / kPair * kPair + i % 2 * kWidth + i % kPair / 2;
}
