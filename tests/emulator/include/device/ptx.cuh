// The twin of csrc/device/ptx.cuh, found before it on the emulator's include path: the same names,
// executed on a CPU. Where a failure has to name a place, a function takes the caller's as a
// default argument.
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "core/formats.h"
#include "core/memory.h"
#include "core/runtime.h"
#include "core/warp.h"

namespace paged_attn::ptx {

inline constexpr unsigned kFullMask = 0xffffffffu;
inline constexpr int kWarpSize = 32;

// ---- Synchronisation ----

inline void cta_sync(const emu::Site& site = emu::Site::current()) { emu::cta_barrier(site); }

inline void warp_sync(const emu::Site& site = emu::Site::current()) {
  emu::sync_warp(kFullMask, site);
}

// ---- Warp collectives ----

template <class T>
T shuffle_xor(T value, int lane_mask, const emu::Site& site = emu::Site::current()) {
  static_assert(sizeof(T) == 4);
  return emu::shuffle_xor(kFullMask, value, lane_mask, site);
}

template <class T>
T shuffle(T value, int source_lane, const emu::Site& site = emu::Site::current()) {
  static_assert(sizeof(T) == 4);
  return emu::shuffle(kFullMask, value, source_lane, site);
}

// ---- Arithmetic ----

inline float exp2(float x) { return std::exp2(x); }
inline float log2(float x) { return std::log2(x); }
inline float tanh(float x) { return std::tanh(x); }
inline int round_to_int(float x) { return emu::float_to_int_rn(x); }
inline float divide(float a, float b) { return a / b; }
inline float bits_to_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t float_to_bits(float x) { return std::bit_cast<uint32_t>(x); }

// ---- Conversions ----

inline float2 f16x2_to_float2(uint32_t bits) {
  return make_float2(emu::half_to_float(static_cast<uint16_t>(bits)),
                     emu::half_to_float(static_cast<uint16_t>(bits >> 16)));
}

inline uint16_t float_to_f16(float x) { return emu::float_to_half(x); }

inline float2 bf16x2_to_float2(uint32_t bits) {
  return make_float2(emu::bfloat16_to_float(static_cast<uint16_t>(bits)),
                     emu::bfloat16_to_float(static_cast<uint16_t>(bits >> 16)));
}

inline uint16_t float_to_bf16(float x) { return emu::float_to_bfloat16(x); }

inline float2 e4m3x2_to_float2(uint16_t bits) {
  return make_float2(emu::e4m3_to_float(static_cast<uint8_t>(bits)),
                     emu::e4m3_to_float(static_cast<uint8_t>(bits >> 8)));
}

inline float2 e5m2x2_to_float2(uint16_t bits) {
  return make_float2(emu::e5m2_to_float(static_cast<uint8_t>(bits)),
                     emu::e5m2_to_float(static_cast<uint8_t>(bits >> 8)));
}

inline uint8_t float_to_e4m3(float x) { return emu::float_to_e4m3(x); }
inline uint8_t float_to_e5m2(float x) { return emu::float_to_e5m2(x); }

// ---- Global memory ----

template <class Vector>
Vector load_global(const void* address, const emu::Site& site = emu::Site::current()) {
  emu::check_access(address, sizeof(Vector), emu::Access::kRead, site);
  return *static_cast<const Vector*>(address);
}

template <class Vector>
void store_global(void* address, Vector value, const emu::Site& site = emu::Site::current()) {
  emu::check_access(address, sizeof(Vector), emu::Access::kWrite, site);
  *static_cast<Vector*>(address) = value;
}

// ---- Dynamic shared memory ----

template <class Smem>
Smem& shared_memory(const emu::Site& site = emu::Site::current()) {
  static_assert(alignof(Smem) <= emu::kBufferAlignment);
  if (sizeof(Smem) > emu::shared_memory_size()) {
    throw emu::Error("the kernel's shared memory is " + std::to_string(sizeof(Smem)) +
                     " bytes, the launch gave it " + std::to_string(emu::shared_memory_size()) +
                     ", in " + emu::to_string(site));
  }
  return *static_cast<Smem*>(emu::shared_memory());
}

// ---- Launch ----

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("paged_attn: ") + what + ": " +
                             cudaGetErrorString(status));
  }
}

template <class Params>
void launch(void (*kernel)(Params), unsigned num_ctas, unsigned num_threads, size_t smem_bytes,
            cudaStream_t, const Params& params, const emu::Site& site = emu::Site::current()) {
  const emu::LaunchShape shape{dim3(num_ctas), dim3(num_threads), smem_bytes};
  if (const std::string reason = emu::refusal(shape); !reason.empty()) {
    throw std::runtime_error("paged_attn: kernel launch: " + reason);
  }
  // A copy, as parameters are to a kernel: a launch does not see what happens to the caller's.
  emu::launch(shape, [kernel, params] { kernel(params); }, site);
}

}  // namespace paged_attn::ptx
