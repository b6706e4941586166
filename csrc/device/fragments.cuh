// Operands of mma.m16n8k16 from rows in shared memory. g is lane / 4 and t is lane % 4, as in the
// PTX ISA: A holds rows g and g + 8, columns 2t, 2t + 1, 2t + 8, 2t + 9; B holds rows 2t, 2t + 1,
// 2t + 8, 2t + 9 of column g; C holds rows g and g + 8, columns 2t and 2t + 1.
#pragma once

#include <cstdint>

#include "device/ptx.cuh"
#include "params.h"

namespace paged_attn {

struct FragmentA {
  uint32_t words[4];
};

struct FragmentB {
  uint32_t words[2];
};

struct FragmentC {
  float values[4] = {};
};

template <DType kOperand>
__device__ __forceinline__ void multiply(FragmentC& c, const FragmentA& a, const FragmentB& b) {
  if constexpr (kOperand == DType::kF16) {
    ptx::mma_m16n8k16_f16(c.values, a.words, b.words);
  } else {
    ptx::mma_m16n8k16_bf16(c.values, a.words, b.words);
  }
}

template <DType kOperand>
__device__ __forceinline__ uint32_t pack_pair(float first, float second) {
  return kOperand == DType::kF16 ? ptx::floats_to_f16x2(first, second)
                                 : ptx::floats_to_bf16x2(first, second);
}

// Four 8-bit values as two pairs in half precision, which holds all of them exactly.
struct HalfPairs {
  uint32_t low;
  uint32_t high;
};

// A float of 8 bits has the bits of a half whose exponent is 8 less. In the magnitude 0x7f, which
// is NaN, an addition carries into the sign; a permutation spreads that over the half.
__device__ __forceinline__ HalfPairs widen_e4m3_by_shifts(uint32_t bytes) {
  constexpr uint32_t kTwoToThe8 = 0x5c005c00u;
  const uint32_t nans = (bytes & 0x7f7f7f7fu) + 0x01010101u;
  const auto pair = [](uint32_t upper, uint32_t nan) {
    const uint32_t small = (upper & 0x80008000u) | (upper >> 1 & 0x3f803f80u);
    return ptx::multiply_f16x2(small, kTwoToThe8) | (nan & 0x7fff7fffu);
  };
  return {pair(ptx::byte_permute(bytes, 0, 0x1404), ptx::byte_permute(nans, 0, 0x9988)),
          pair(ptx::byte_permute(bytes, 0, 0x3424), ptx::byte_permute(nans, 0, 0xbbaa))};
}

// What a widened value of 1 stands for, and what widened keys are too large by: see widen().
template <DType kKv>
inline constexpr float kWideningUnit = kKv == DType::kI8 ? 0x1p24f : 1.f;
template <DType kKv>
inline constexpr float kWideningBias = kKv == DType::kI8 ? 0x1p-17f : 0.f;

// The pairs are bytes 0, 1 and 2, 3; or, kEvenOdd, bytes 0, 2 and 1, 3. An integer x becomes the
// half with the bits of x + 128, a subnormal: exactly 2^-24 of that. The 128 is subtracted, or,
// kBiased, left.
template <DType kKv, bool kEvenOdd = false, bool kBiased = false>
__device__ __forceinline__ HalfPairs widen(uint32_t bytes) {
  if constexpr (kKv == DType::kF8E4m3) {
    if constexpr (kEvenOdd) bytes = ptx::byte_permute(bytes, 0, 0x3120);
    if constexpr (ptx::kHasFp8) {
      const uint2 pairs = ptx::e4m3x4_to_f16x4(bytes);
      return {pairs.x, pairs.y};
    }
    return widen_e4m3_by_shifts(bytes);
  } else if constexpr (kKv == DType::kF8E5m2) {
    // The upper byte of a half.
    return {ptx::byte_permute(bytes, 0, kEvenOdd ? 0x2404 : 0x1404),
            ptx::byte_permute(bytes, 0, kEvenOdd ? 0x3414 : 0x3424)};
  } else {
    constexpr uint32_t kMinus128 = 0x80808080u;  // as subnormals, twice
    const uint32_t shifted = bytes ^ 0x80808080u;
    const uint32_t low = ptx::byte_permute(shifted, 0, kEvenOdd ? 0x4240 : 0x4140);
    const uint32_t high = ptx::byte_permute(shifted, 0, kEvenOdd ? 0x4341 : 0x4342);
    if constexpr (kBiased) return {low, high};
    return {ptx::add_f16x2(low, kMinus128), ptx::add_f16x2(high, kMinus128)};
  }
}

// Where a lane's row is of the four matrices that one load of keys or values brings, from the first
// token's first dimension; rows are `kPitch` bytes apart.
template <int kPitch>
__device__ __forceinline__ uint32_t key_lane_offset() {
  const int lane = threadIdx.x % ptx::kWarpSize;
  return lane % 16 * kPitch + lane / 16 * 16;
}
template <DType kKv, int kPitch>
__device__ __forceinline__ uint32_t value_lane_offset() {
  if constexpr (is_8bit(kKv)) return key_lane_offset<kPitch>();
  const int lane = threadIdx.x % ptx::kWarpSize;
  return (lane % 8 + lane / 16 * 8) * kPitch + lane / 8 % 2 * 16;
}

// K: 16 tokens x 16 dimensions (x 32 for 8 bits: two fragments), tokens on the rows of A. `row` is
// the shared address of the first token's first dimension, plus key_lane_offset.
//
// For 8 bits a lane's four bytes are four neighbouring dimensions, 4t to 4t + 3. They become
// columns 2t, 2t + 1, 2t + 8, 2t + 9: the query's fragment is permuted alike. All are too large by
// kWideningBias, which is left to whoever knows the sum of the query.
template <DType kKv>
__device__ __forceinline__ void load_keys(uint32_t row, FragmentA* fragments) {
  uint32_t words[4];
  ptx::ldmatrix(words, row);
  if constexpr (is_8bit(kKv)) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const HalfPairs upper = widen<kKv, false, true>(words[2 * half]);
      const HalfPairs lower = widen<kKv, false, true>(words[2 * half + 1]);
      fragments[half] = {{upper.low, lower.low, upper.high, lower.high}};
    }
  } else {
    fragments[0] = {{words[0], words[1], words[2], words[3]}};
  }
}

// V: 16 tokens x 16 dimensions (x 32 for 8 bits), transposed: dimensions on the rows of A. `row` is
// the shared address of the first token's first dimension, plus value_lane_offset.
//
// For 8 bits the matrices are transposed in pairs of bytes, so even dimensions come to rows 0 to 7
// and odd ones to rows 8 to 15.
template <DType kKv>
__device__ __forceinline__ void load_values(uint32_t row, FragmentA* fragments) {
  uint32_t words[4];
  ptx::ldmatrix_trans(words, row);
  if constexpr (is_8bit(kKv)) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Bytes of two tokens: even, odd, even, odd dimension.
      const HalfPairs first = widen<kKv, true>(words[2 * half]);
      const HalfPairs second = widen<kKv, true>(words[2 * half + 1]);
      fragments[half] = {{first.low, first.high, second.low, second.high}};
    }
  } else {
    fragments[0] = {{words[0], words[1], words[2], words[3]}};
  }
}

// The dimension, of the 16 of a fragment of V, on row g (+ 8 if `lower`) of A and C.
template <DType kKv>
__device__ __forceinline__ int dimension_of(int g, bool lower) {
  return is_8bit(kKv) ? 2 * g + lower : g + 8 * lower;
}

}  // namespace paged_attn
