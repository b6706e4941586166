// The only file that knows the compiler: instructions, built-in conversions, dynamic shared memory
// and kernel launches. Device code uses these names and nothing below them, so that a twin of this
// file (tests/emulator/include/device/ptx.cuh) can execute every kernel on a CPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace paged_attn::ptx {

inline constexpr unsigned kFullMask = 0xffffffffu;
inline constexpr int kWarpSize = 32;

// ---- Synchronisation. Every thread of the CTA (or of the warp) reaches each of these. ----

__device__ __forceinline__ void cta_sync() { __syncthreads(); }
__device__ __forceinline__ void warp_sync() { __syncwarp(kFullMask); }

// ---- Warp collectives, always with the full mask. T is a 32-bit type. ----

template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int lane_mask) {
  return __shfl_xor_sync(kFullMask, value, lane_mask);
}

template <class T>
__device__ __forceinline__ T shuffle(T value, int source_lane) {
  return __shfl_sync(kFullMask, value, source_lane);
}

// ---- Arithmetic with a hardware unit of its own ----

__device__ __forceinline__ float exp2(float x) { return ::exp2f(x); }
__device__ __forceinline__ float log2(float x) { return ::log2f(x); }
__device__ __forceinline__ float tanh(float x) { return ::tanhf(x); }
// Round to nearest, ties to even, saturating at the int range; NaN gives 0.
__device__ __forceinline__ int round_to_int(float x) { return __float2int_rn(x); }
// IEEE division whatever the compiler's fast-math flags are.
__device__ __forceinline__ float divide(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
__device__ __forceinline__ uint32_t float_to_bits(float x) { return __float_as_uint(x); }

// ---- Conversions on raw bits. The lower half of a packed pair is the first element. ----

__device__ __forceinline__ float2 f16x2_to_float2(uint32_t bits) {
  const __half2_raw raw{static_cast<unsigned short>(bits), static_cast<unsigned short>(bits >> 16)};
  return __half22float2(__half2(raw));
}

__device__ __forceinline__ uint16_t float_to_f16(float x) {
  return __half_as_ushort(__float2half_rn(x));
}

__device__ __forceinline__ float2 bf16x2_to_float2(uint32_t bits) {
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}

__device__ __forceinline__ uint16_t float_to_bf16(float x) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

__device__ __forceinline__ float2 e4m3x2_to_float2(uint16_t bits) {
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(bits, __NV_E4M3)));
}

__device__ __forceinline__ float2 e5m2x2_to_float2(uint16_t bits) {
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(bits, __NV_E5M2)));
}

// Saturating: values beyond the largest finite one, infinities too, become it; NaN stays NaN.
__device__ __forceinline__ uint8_t float_to_e4m3(float x) {
  return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ uint8_t float_to_e5m2(float x) {
  return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2);
}

// ---- Global memory, one access of the named width; the address is aligned to it ----

template <class Vector>
__device__ __forceinline__ Vector load_global(const void* address) {
  return *static_cast<const Vector*>(address);
}

template <class Vector>
__device__ __forceinline__ void store_global(void* address, Vector value) {
  *static_cast<Vector*>(address) = value;
}

// ---- Dynamic shared memory: the one struct that a kernel declares ----

template <class Smem>
__device__ __forceinline__ Smem& shared_memory() {
  extern __shared__ __align__(16) unsigned char raw_shared_memory[];
  return *reinterpret_cast<Smem*>(raw_shared_memory);
}

// ---- Launch ----

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("paged_attn: ") + what + ": " +
                             cudaGetErrorString(status));
  }
}

// Launches kernel(params) on `stream` with a one-dimensional grid of `num_ctas` CTAs of
// `num_threads` threads and `smem_bytes` bytes of dynamic shared memory. Never synchronises.
// Throws std::runtime_error when the launch is refused.
template <class Params>
void launch(void (*kernel)(Params), unsigned num_ctas, unsigned num_threads, size_t smem_bytes,
            cudaStream_t stream, const Params& params) {
  constexpr size_t kSmemWithoutOptIn = 48 * 1024;
  const void* entry = reinterpret_cast<const void*>(kernel);
  if (smem_bytes > kSmemWithoutOptIn) {
    check(cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(smem_bytes)),
          "shared memory opt-in");
  }
  void* arguments[] = {const_cast<Params*>(&params)};
  check(cudaLaunchKernel(entry, dim3(num_ctas), dim3(num_threads), arguments, smem_bytes, stream),
        "kernel launch");
}

}  // namespace paged_attn::ptx
