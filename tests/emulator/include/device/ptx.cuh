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

#include "core/arithmetic.h"
#include "core/async_copy.h"
#include "core/atomics.h"
#include "core/formats.h"
#include "core/memory.h"
#include "core/runtime.h"
#include "core/shadow.h"
#include "core/shared_window.h"
#include "core/tensor_core.h"
#include "core/warp.h"

namespace paged_attn::ptx {

inline constexpr unsigned kFullMask = 0xffffffffu;
inline constexpr int kWarpSize = 32;
inline constexpr int kArch = 90;
inline constexpr bool kHasMma = true;
inline constexpr bool kHasFp8 = true;

// ---- Synchronisation ----

inline void cta_sync(const emu::Site& site = emu::Site::current()) { emu::cta_barrier(site); }

inline void warp_sync(const emu::Site& site = emu::Site::current()) {
  emu::sync_warp(kFullMask, site);
}

// ---- Fences ----

// A CTA's threads see each other's writes after a barrier, with a fence or without: nothing to do.
inline void fence_cta() {}
inline void fence_gpu() { emu::on_fence(); }

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

template <class T>
T shuffle_up(T value, unsigned delta, const emu::Site& site = emu::Site::current()) {
  static_assert(sizeof(T) == 4);
  return emu::shuffle_up(kFullMask, value, delta, site);
}

template <class T>
T shuffle_down(T value, unsigned delta, const emu::Site& site = emu::Site::current()) {
  static_assert(sizeof(T) == 4);
  return emu::shuffle_down(kFullMask, value, delta, site);
}

inline uint32_t ballot(bool predicate, const emu::Site& site = emu::Site::current()) {
  return emu::ballot(kFullMask, predicate, site);
}

inline bool any(bool predicate, const emu::Site& site = emu::Site::current()) {
  return emu::any(kFullMask, predicate, site);
}

inline bool all(bool predicate, const emu::Site& site = emu::Site::current()) {
  return emu::all(kFullMask, predicate, site);
}

template <class T>
T reduce_add(T value, const emu::Site& site = emu::Site::current()) {
  return emu::reduce_add(kFullMask, value, site);
}

template <class T>
T reduce_min(T value, const emu::Site& site = emu::Site::current()) {
  return emu::reduce_min(kFullMask, value, site);
}

template <class T>
T reduce_max(T value, const emu::Site& site = emu::Site::current()) {
  return emu::reduce_max(kFullMask, value, site);
}

template <class T>
T opaque(T value, const emu::Site& site = emu::Site::current()) {
  return shuffle_xor(value, 0, site);
}

// ---- Arithmetic ----

inline float exp2(float x) { return emu::flush_to_zero(std::exp2(x)); }
inline float reciprocal(float x) { return emu::flush_to_zero(1.f / emu::flush_to_zero(x)); }
inline float log2(float x) { return std::log2(x); }
inline float tanh(float x) { return std::tanh(x); }
inline int round_to_int(float x) { return emu::float_to_int_rn(x); }
inline float divide(float a, float b) { return a / b; }
inline float bits_to_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t float_to_bits(float x) { return std::bit_cast<uint32_t>(x); }

inline uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
  return emu::byte_permute(a, b, selector);
}

inline uint32_t add_f16x2(uint32_t a, uint32_t b) {
  return emu::for_each_half(emu::half_add, a, b);
}

inline uint32_t multiply_f16x2(uint32_t a, uint32_t b) {
  return emu::for_each_half(emu::half_multiply, a, b);
}

inline uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  return emu::for_each_half(emu::half_fma, a, b, c);
}

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

inline uint32_t floats_to_f16x2(float low, float high) {
  return static_cast<uint32_t>(float_to_f16(high)) << 16 | float_to_f16(low);
}

inline uint32_t floats_to_bf16x2(float low, float high) {
  return static_cast<uint32_t>(float_to_bf16(high)) << 16 | float_to_bf16(low);
}

inline uint32_t e4m3x2_to_f16x2(uint16_t bits) {
  return floats_to_f16x2(emu::e4m3_to_float(static_cast<uint8_t>(bits)),
                         emu::e4m3_to_float(static_cast<uint8_t>(bits >> 8)));
}

inline uint32_t e5m2x2_to_f16x2(uint16_t bits) {
  return floats_to_f16x2(emu::e5m2_to_float(static_cast<uint8_t>(bits)),
                         emu::e5m2_to_float(static_cast<uint8_t>(bits >> 8)));
}

inline uint2 e4m3x4_to_f16x4(uint32_t bits) {
  return make_uint2(e4m3x2_to_f16x2(static_cast<uint16_t>(bits)),
                    e4m3x2_to_f16x2(static_cast<uint16_t>(bits >> 16)));
}

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

// Inlined as on the GPU: of a call whose result goes to memory no compiler reports that write.
template <class Vector>
__forceinline__ Vector load_global(const void* address,
                                   const emu::Site& site = emu::Site::current()) {
  emu::check_access(address, sizeof(Vector), emu::Access::kRead, site);
  return *static_cast<const Vector*>(address);
}

template <class Vector>
void store_global(void* address, Vector value, const emu::Site& site = emu::Site::current()) {
  emu::check_access(address, sizeof(Vector), emu::Access::kWrite, site);
  *static_cast<Vector*>(address) = value;
}

// ---- Atomics ----

inline uint32_t atomic_add(uint32_t* address, uint32_t value,
                           const emu::Site& site = emu::Site::current()) {
  return emu::atomic_add(address, value, site);
}

inline uint32_t atomic_increment(uint32_t* address, uint32_t last,
                                 const emu::Site& site = emu::Site::current()) {
  return emu::atomic_increment(address, last, site);
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

inline uint32_t shared_address(const void* pointer, const emu::Site& site = emu::Site::current()) {
  return emu::shared_address(pointer, site);
}

// ---- Asynchronous copies ----

inline void copy_async(uint32_t shared, const void* global,
                       const emu::Site& site = emu::Site::current()) {
  emu::async_copy(shared, global, 16, 16, site);
}

inline void copy_async_or_zero(uint32_t shared, const void* global, int source_bytes,
                               const emu::Site& site = emu::Site::current()) {
  emu::async_copy(shared, global, 16, static_cast<size_t>(source_bytes), site);
}

inline void copy_async_commit() { emu::async_copy_commit(); }

template <int kPending>
void copy_async_wait() {
  static_assert(kPending >= 0);
  emu::async_copy_wait(kPending);
}

inline void copy_async_wait_all() { emu::async_copy_wait_all(); }

// ---- Matrices spread over the warp ----

template <int kCount>
void ldmatrix(uint32_t (&m)[kCount], uint32_t row, const emu::Site& site = emu::Site::current()) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4);
  emu::load_matrices(m, kCount, /*transpose=*/false, row, site);
}

template <int kCount>
void ldmatrix_trans(uint32_t (&m)[kCount], uint32_t row,
                    const emu::Site& site = emu::Site::current()) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4);
  emu::load_matrices(m, kCount, /*transpose=*/true, row, site);
}

inline uint32_t movmatrix_trans(uint32_t matrix, const emu::Site& site = emu::Site::current()) {
  return emu::transpose_matrix(matrix, site);
}

inline void mma_m16n8k8_f16(float (&c)[4], const uint32_t (&a)[2], const uint32_t (&b)[1],
                            const emu::Site& site = emu::Site::current()) {
  emu::mma_m16n8k8_f16(c, a, b, site);
}

inline void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                             const emu::Site& site = emu::Site::current()) {
  emu::mma_m16n8k16_f16(c, a, b, site);
}

inline void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                              const emu::Site& site = emu::Site::current()) {
  emu::mma_m16n8k16_bf16(c, a, b, site);
}

// ---- Launch ----

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("paged_attn: ") + what + ": " +
                             cudaGetErrorString(status));
  }
}

template <class Params>
int loaded_arch(void (*kernel)(Params)) {
  cudaFuncAttributes code;
  check(cudaFuncGetAttributes(&code, reinterpret_cast<const void*>(kernel)), "kernel attributes");
  return code.ptxVersion;
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
