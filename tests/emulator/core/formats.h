// Conversions between float and the 16-bit and 8-bit floating-point formats, bit-equal to the
// host paths of the CUDA headers: round to nearest even, one canonical positive NaN.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace emu {

inline constexpr uint32_t kFloatInfinity = 0x7f800000u;
inline constexpr uint32_t kFloatNan = 0x7fffffffu;

// The magnitude (no sign) of a finite float in a format with `mantissa_bits` stored mantissa bits
// and this exponent bias, rounded to nearest even. The exponent is unbounded above: the caller
// compares the result with its largest finite encoding.
constexpr uint32_t round_magnitude(uint32_t float_magnitude, int mantissa_bits, int bias) {
  const int exponent_field = static_cast<int>(float_magnitude >> 23);
  uint32_t significand = float_magnitude & 0x7fffffu;
  if (exponent_field != 0) significand |= 0x800000u;
  const int float_exponent = exponent_field == 0 ? -126 : exponent_field - 127;
  // A subnormal result has the exponent of the smallest normal one and fewer significant bits.
  const bool subnormal = float_exponent < 1 - bias;
  const int dropped = 23 - mantissa_bits + (subnormal ? 1 - bias - float_exponent : 0);
  if (dropped > 24) return 0;  // below half of the smallest subnormal
  const uint32_t half = 1u << (dropped - 1);
  const uint32_t odd = (significand >> dropped) & 1u;
  const uint32_t rounded = (significand + half - 1 + odd) >> dropped;
  if (subnormal) return rounded;
  // `rounded` includes the implicit bit; a carry out of it increments the exponent.
  return (static_cast<uint32_t>(float_exponent + bias - 1) << mantissa_bits) + rounded;
}

// The float of a finite magnitude in a format of this kind; exact.
constexpr float expand_magnitude(uint32_t magnitude, int mantissa_bits, int bias) {
  // Shifted so that the mantissa is where float has it, the exponent is off by the difference of
  // the biases.
  const uint32_t shifted = magnitude << (23 - mantissa_bits);
  const uint32_t rebias = static_cast<uint32_t>(127 - bias) << 23;
  if (magnitude >> mantissa_bits != 0) return std::bit_cast<float>(shifted + rebias);
  // A subnormal has no implicit bit: take it as one of the smallest normals, which has, and
  // subtract that.
  const uint32_t smallest_normal = rebias + (1u << 23);
  return std::bit_cast<float>(shifted + smallest_normal) - std::bit_cast<float>(smallest_normal);
}

inline float half_to_float(uint16_t bits) {
  const uint32_t magnitude = bits & 0x7fffu;
  if (magnitude > 0x7c00u) return std::bit_cast<float>(kFloatNan);
  const float value = magnitude == 0x7c00u ? std::numeric_limits<float>::infinity()
                                           : expand_magnitude(magnitude, 10, 15);
  return bits & 0x8000u ? -value : value;
}

inline uint16_t float_to_half(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > kFloatInfinity) return 0x7fffu;
  uint32_t result = magnitude == kFloatInfinity ? 0x7c00u : round_magnitude(magnitude, 10, 15);
  if (result > 0x7c00u) result = 0x7c00u;
  return static_cast<uint16_t>(result | ((bits >> 16) & 0x8000u));
}

inline float bfloat16_to_float(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

inline uint16_t float_to_bfloat16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > kFloatInfinity) return 0x7fffu;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// E4M3 has no infinity and one NaN per sign.
inline float e4m3_to_float(uint8_t bits) {
  const uint32_t magnitude = bits & 0x7fu;
  if (magnitude == 0x7fu) return std::bit_cast<float>(kFloatNan);
  const float value = expand_magnitude(magnitude, 3, 7);
  return bits & 0x80u ? -value : value;
}

// E5M2 is the upper half of an fp16.
inline float e5m2_to_float(uint8_t bits) { return half_to_float(static_cast<uint16_t>(bits << 8)); }

// Saturating: what lies beyond the largest finite value, infinities too, becomes it.
inline uint8_t float_to_fp8(float x, int mantissa_bits, int bias, uint32_t largest) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > kFloatInfinity) return 0x7fu;
  uint32_t result =
      magnitude == kFloatInfinity ? largest : round_magnitude(magnitude, mantissa_bits, bias);
  if (result > largest) result = largest;
  return static_cast<uint8_t>(result | ((bits >> 24) & 0x80u));
}

inline uint8_t float_to_e4m3(float x) { return float_to_fp8(x, 3, 7, 0x7eu); }
inline uint8_t float_to_e5m2(float x) { return float_to_fp8(x, 2, 15, 0x7bu); }

// Round to nearest even, saturating at the range of int; NaN gives 0.
inline int float_to_int_rn(float x) {
  if (std::isnan(x)) return 0;
  if (x >= 2147483648.f) return std::numeric_limits<int>::max();
  if (x < -2147483648.f) return std::numeric_limits<int>::min();
  return static_cast<int>(std::nearbyint(x));
}

}  // namespace emu
