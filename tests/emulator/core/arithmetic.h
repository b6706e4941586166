// Operations that a GPU has and C++ has not.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "formats.h"

namespace emu {

// A subnormal becomes a zero of its sign.
inline float flush_to_zero(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.f, x) : x;
}

// Byte i of the result is the one that nibble i of the selector names: bits 0 to 2 its index in
// {a, b}, a being bytes 0 to 3; with bit 3 it is the sign of that byte, eight times.
constexpr uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> 4 * i & 15u;
    uint32_t byte = static_cast<uint32_t>(bytes >> 8 * (nibble & 7u)) & 0xffu;
    if (nibble & 8u) byte = byte & 0x80u ? 0xffu : 0u;
    result |= byte << 8 * i;
  }
  return result;
}

// a * b + c of three halves, rounded once.
inline uint16_t half_fma(uint16_t a, uint16_t b, uint16_t c) {
  const double addend = half_to_float(c);
  // Exact: a product of halves has 22 significant bits.
  const double product = static_cast<double>(half_to_float(a)) * half_to_float(b);
  const double sum = product + addend;
  if (!std::isfinite(sum)) return float_to_half(static_cast<float>(sum));
  // Rounding twice gives the same as rounding once if the first rounds to odd: toward zero, and a
  // discarded part sets the last bit kept.
  const double product_part = sum - addend;
  const double lost = (product - product_part) + (addend - (sum - product_part));
  uint64_t bits = std::bit_cast<uint64_t>(sum);
  if (lost != 0 && (lost < 0) != (sum < 0)) --bits;
  // The 29 bits of a double's mantissa that a float has not.
  constexpr uint64_t kBelowFloat = (uint64_t{1} << 29) - 1;
  const bool inexact = lost != 0 || (bits & kBelowFloat) != 0;
  bits &= ~kBelowFloat;
  const uint32_t odd =
      std::bit_cast<uint32_t>(static_cast<float>(std::bit_cast<double>(bits))) | (inexact ? 1 : 0);
  return float_to_half(std::bit_cast<float>(odd));
}

inline uint16_t half_multiply(uint16_t a, uint16_t b) {
  return float_to_half(half_to_float(a) * half_to_float(b));
}

inline uint16_t half_add(uint16_t a, uint16_t b) { return half_fma(a, 0x3c00u, b); }

// An operation on both halves of packed pairs.
template <class Operation, class... Pairs>
uint32_t for_each_half(Operation operation, Pairs... pairs) {
  const uint32_t low = operation(static_cast<uint16_t>(pairs)...);
  const uint32_t high = operation(static_cast<uint16_t>(pairs >> 16)...);
  return high << 16 | low;
}

}  // namespace emu
