// Eight consecutive elements of a row, the unit in which rows are moved and converted.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/ptx.cuh"
#include "params.h"

namespace paged_attn {

inline constexpr int kVector = 8;

// What one element is in memory.
template <DType kType>
using Storage = std::conditional_t<element_size(kType) == 4, uint32_t,
                                   std::conditional_t<element_size(kType) == 2, uint16_t, uint8_t>>;

// Eight elements as they lie in memory, the first in the lowest bits.
template <DType kType>
struct Packed {
  static constexpr int kWords = kVector * element_size(kType) / 4;
  uint32_t words[kWords];
};

// `aligned`: the address is a multiple of 16 bytes, or of 8 for 8-bit elements.
template <DType kType>
__device__ __forceinline__ Packed<kType> load_packed(const void* base, int64_t offset,
                                                     bool aligned) {
  using Element = Storage<kType>;
  const Element* from = static_cast<const Element*>(base) + offset;
  Packed<kType> packed = {};
  if (aligned) {
    if constexpr (Packed<kType>::kWords == 2) {
      const uint2 pair = ptx::load_global<uint2>(from);
      packed.words[0] = pair.x;
      packed.words[1] = pair.y;
    } else {
#pragma unroll
      for (int i = 0; i < Packed<kType>::kWords; i += 4) {
        const uint4 quad = ptx::load_global<uint4>(from + i * 4 / sizeof(Element));
        packed.words[i] = quad.x;
        packed.words[i + 1] = quad.y;
        packed.words[i + 2] = quad.z;
        packed.words[i + 3] = quad.w;
      }
    }
    return packed;
  }
  constexpr int kPerWord = 4 / sizeof(Element);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const uint32_t element = ptx::load_global<Element>(from + i);
    packed.words[i / kPerWord] |= element << (i % kPerWord * 32 / kPerWord);
  }
  return packed;
}

template <DType kType>
__device__ __forceinline__ void store_packed(void* base, int64_t offset, bool aligned,
                                             const Packed<kType>& packed) {
  using Element = Storage<kType>;
  Element* to = static_cast<Element*>(base) + offset;
  if (aligned) {
    if constexpr (Packed<kType>::kWords == 2) {
      ptx::store_global(to, make_uint2(packed.words[0], packed.words[1]));
    } else {
#pragma unroll
      for (int i = 0; i < Packed<kType>::kWords; i += 4) {
        ptx::store_global(to + i * 4 / sizeof(Element),
                          make_uint4(packed.words[i], packed.words[i + 1], packed.words[i + 2],
                                     packed.words[i + 3]));
      }
    }
    return;
  }
  constexpr int kPerWord = 4 / sizeof(Element);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const uint32_t element = packed.words[i / kPerWord] >> (i % kPerWord * 32 / kPerWord);
    ptx::store_global(to + i, static_cast<Element>(element));
  }
}

template <DType kType>
__device__ __forceinline__ void unpack(const Packed<kType>& packed, float (&x)[kVector]) {
#pragma unroll
  for (int i = 0; i < Packed<kType>::kWords; ++i) {
    const uint32_t word = packed.words[i];
    if constexpr (kType == DType::kF32) {
      x[i] = ptx::bits_to_float(word);
    } else if constexpr (kType == DType::kF16 || kType == DType::kBf16) {
      const float2 pair =
          kType == DType::kF16 ? ptx::f16x2_to_float2(word) : ptx::bf16x2_to_float2(word);
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    } else if constexpr (kType == DType::kI8) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        x[4 * i + j] = static_cast<float>(static_cast<int8_t>(word >> (8 * j)));
      }
    } else {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint16_t half = static_cast<uint16_t>(word >> (16 * j));
        const float2 pair =
            kType == DType::kF8E4m3 ? ptx::e4m3x2_to_float2(half) : ptx::e5m2x2_to_float2(half);
        x[4 * i + 2 * j] = pair.x;
        x[4 * i + 2 * j + 1] = pair.y;
      }
    }
  }
}

// One element from a float: round to nearest even; 8 bits saturate.
template <DType kType>
__device__ __forceinline__ Storage<kType> to_storage(float x) {
  if constexpr (kType == DType::kF32) {
    return ptx::float_to_bits(x);
  } else if constexpr (kType == DType::kF16) {
    return ptx::float_to_f16(x);
  } else if constexpr (kType == DType::kBf16) {
    return ptx::float_to_bf16(x);
  } else if constexpr (kType == DType::kF8E4m3) {
    return ptx::float_to_e4m3(x);
  } else if constexpr (kType == DType::kF8E5m2) {
    return ptx::float_to_e5m2(x);
  } else {
    const int rounded = ptx::round_to_int(x);
    return static_cast<uint8_t>(rounded < -128 ? -128 : rounded > 127 ? 127 : rounded);
  }
}

template <DType kType>
__device__ __forceinline__ Packed<kType> pack(const float (&x)[kVector]) {
  constexpr int kPerWord = 4 / element_size(kType);
  Packed<kType> packed = {};
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    packed.words[i / kPerWord] |= static_cast<uint32_t>(to_storage<kType>(x[i]))
                                  << (i % kPerWord * 32 / kPerWord);
  }
  return packed;
}

template <DType kType>
__device__ __forceinline__ void load_floats(const void* base, int64_t offset, bool aligned,
                                            float (&x)[kVector]) {
  unpack(load_packed<kType>(base, offset, aligned), x);
}

template <DType kType>
__device__ __forceinline__ void store_floats(void* base, int64_t offset, bool aligned,
                                             const float (&x)[kVector]) {
  store_packed(base, offset, aligned, pack<kType>(x));
}

template <DType kType>
__device__ __forceinline__ float load_float(const void* base, int64_t offset) {
  const auto* from = static_cast<const Storage<kType>*>(base) + offset;
  Packed<kType> packed = {};
  packed.words[0] = ptx::load_global<Storage<kType>>(from);
  float x[kVector];
  unpack(packed, x);
  return x[0];
}

template <DType kType>
__device__ __forceinline__ void store_float(void* base, int64_t offset, float x) {
  ptx::store_global(static_cast<Storage<kType>*>(base) + offset, to_storage<kType>(x));
}

// ---- The same for a dtype that is known at run time, the same for all threads: a branch beside
// the access. ----

// Calls function(std::integral_constant<DType, type>) if the type is listed.
template <DType... kTypes, class Function>
__device__ __forceinline__ void with_dtype(DType type, Function function) {
  ((type == kTypes ? function(std::integral_constant<DType, kTypes>{}) : void()), ...);
}

// Rows of query, key, value and output.
template <class Function>
__device__ __forceinline__ void with_row_dtype(DType type, Function function) {
  with_dtype<DType::kF32, DType::kF16, DType::kBf16>(type, function);
}

// Rows of a pool.
template <class Function>
__device__ __forceinline__ void with_pool_dtype(DType type, Function function) {
  with_dtype<DType::kF32, DType::kF16, DType::kBf16, DType::kF8E4m3, DType::kF8E5m2, DType::kI8>(
      type, function);
}

// One element of a row.
__device__ __forceinline__ float load_row_float(DType type, const void* base, int64_t offset) {
  float x = 0.f;
  with_row_dtype(type, [&](auto t) { x = load_float<t.value>(base, offset); });
  return x;
}
__device__ __forceinline__ void store_row_float(DType type, void* base, int64_t offset, float x) {
  with_row_dtype(type, [&](auto t) { store_float<t.value>(base, offset, x); });
}

// Eight elements of a row, which may lie at any address.
__device__ __forceinline__ void load_row_floats(DType type, const void* base, int64_t offset,
                                                float (&x)[kVector]) {
  with_row_dtype(type, [&](auto t) { load_floats<t.value>(base, offset, false, x); });
}
__device__ __forceinline__ void store_row_floats(DType type, void* base, int64_t offset,
                                                 const float (&x)[kVector]) {
  with_row_dtype(type, [&](auto t) { store_floats<t.value>(base, offset, false, x); });
}

}  // namespace paged_attn
