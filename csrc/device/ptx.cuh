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

// The compute capability, major * 10 + minor, that the code is compiled for.
#ifdef __CUDA_ARCH__
inline constexpr int kArch = __CUDA_ARCH__ / 10;
#else
inline constexpr int kArch = 90;  // on the host, which asks loaded_arch()
#endif
// Whether there are the tensor cores and the asynchronous copies of sm_80.
inline constexpr bool kHasMma = kArch >= 80;
// Whether conversions from 8-bit floats are instructions.
inline constexpr bool kHasFp8 = kArch >= 89;

// ---- Synchronisation. Every thread of the CTA (or of the warp) reaches each of these. ----

__device__ __forceinline__ void cta_sync() { __syncthreads(); }
__device__ __forceinline__ void warp_sync() { __syncwarp(kFullMask); }

// ---- Fences: what this thread wrote before is seen by whoever sees what it writes after. ----

__device__ __forceinline__ void fence_cta() { __threadfence_block(); }
__device__ __forceinline__ void fence_gpu() { __threadfence(); }

// ---- Warp collectives. All 32 lanes take part. T is a 32-bit type. ----

// The value of lane (lane ^ lane_mask).
template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int lane_mask) {
  return __shfl_xor_sync(kFullMask, value, lane_mask);
}

// The value of source_lane modulo 32.
template <class T>
__device__ __forceinline__ T shuffle(T value, int source_lane) {
  return __shfl_sync(kFullMask, value, source_lane);
}

// The value of lane (lane - delta), below 0 the lane's own; delta < 32.
template <class T>
__device__ __forceinline__ T shuffle_up(T value, unsigned delta) {
  return __shfl_up_sync(kFullMask, value, delta);
}

// The value of lane (lane + delta), past 31 the lane's own; delta < 32.
template <class T>
__device__ __forceinline__ T shuffle_down(T value, unsigned delta) {
  return __shfl_down_sync(kFullMask, value, delta);
}

// Bit l: the predicate of lane l.
__device__ __forceinline__ uint32_t ballot(bool predicate) {
  return __ballot_sync(kFullMask, predicate);
}

// Whether the predicate holds in some lane; in every lane.
__device__ __forceinline__ bool any(bool predicate) { return __any_sync(kFullMask, predicate); }
__device__ __forceinline__ bool all(bool predicate) { return __all_sync(kFullMask, predicate); }

// The sum (wrapping), smallest or largest over all lanes, of int32_t or uint32_t. One instruction
// on sm_80 and later, five shuffles before.
#if __CUDA_ARCH__ >= 800
#define PAGED_ATTN_REDUCE(name, combined) return __reduce_##name##_sync(kFullMask, value)
#else
#define PAGED_ATTN_REDUCE(name, combined)     \
  for (int mask = 16; mask > 0; mask /= 2) {  \
    const T other = shuffle_xor(value, mask); \
    value = combined;                         \
  }                                           \
  return value
#endif
template <class T>
__device__ __forceinline__ T reduce_add(T value) {
  PAGED_ATTN_REDUCE(add, value + other);
}
template <class T>
__device__ __forceinline__ T reduce_min(T value) {
  PAGED_ATTN_REDUCE(min, other < value ? other : value);
}
template <class T>
__device__ __forceinline__ T reduce_max(T value) {
  PAGED_ATTN_REDUCE(max, value < other ? other : value);
}
#undef PAGED_ATTN_REDUCE

// The value itself, of unknown origin to the compiler: what depends on it is kept in registers and
// not computed again where it is used. For constants of a lane, in a prologue: a shuffle, because
// ptxas sees through everything cheaper.
template <class T>
__device__ __forceinline__ T opaque(T value) {
  return __shfl_xor_sync(kFullMask, value, 0);
}

// ---- Arithmetic with a hardware unit of its own ----

// Within 2 ulp: ::exp2f without its care for results below 2^-126, which are 0 here. Exact for 0.
__device__ __forceinline__ float exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 / x within 1 ulp; a subnormal x counts as 0, a result below 2^-126 is 0.
__device__ __forceinline__ float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ float log2(float x) { return ::log2f(x); }
__device__ __forceinline__ float tanh(float x) { return ::tanhf(x); }
// Round to nearest, ties to even, saturating at the int range; NaN gives 0.
__device__ __forceinline__ int round_to_int(float x) { return __float2int_rn(x); }
// IEEE division whatever the compiler's fast-math flags are.
__device__ __forceinline__ float divide(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
__device__ __forceinline__ uint32_t float_to_bits(float x) { return __float_as_uint(x); }

// Byte i of the result is byte (selector >> 4 i & 7) of {a, b}, a being bytes 0 to 3; if bit 3 of
// the nibble is set, the sign of that byte in all 8 bits.
__device__ __forceinline__ uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
}

// Two fp16 at a time, round to nearest even; subnormals count, NaN is 0x7fff.
__device__ __forceinline__ uint32_t add_f16x2(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
__device__ __forceinline__ uint32_t multiply_f16x2(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
// a * b + c, rounded once.
__device__ __forceinline__ uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

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

// Two floats at once: one instruction on sm_80 and later.
__device__ __forceinline__ uint32_t floats_to_f16x2(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ uint32_t floats_to_bf16x2(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Exact. One instruction on sm_89 and later, a dozen for each element before.
__device__ __forceinline__ uint32_t e4m3x2_to_f16x2(uint16_t bits) {
  const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(bits, __NV_E4M3);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ uint32_t e5m2x2_to_f16x2(uint16_t bits) {
  const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(bits, __NV_E5M2);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Four at once, where kHasFp8: the first two in x, the others in y.
__device__ __forceinline__ uint2 e4m3x4_to_f16x4(uint32_t bits) {
  uint2 pairs;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(pairs.x), "=r"(pairs.y)
      : "r"(bits));
  return pairs;
}

__device__ __forceinline__ float2 e4m3x2_to_float2(uint16_t bits) {
  return f16x2_to_float2(e4m3x2_to_f16x2(bits));
}
__device__ __forceinline__ float2 e5m2x2_to_float2(uint16_t bits) {
  return f16x2_to_float2(e5m2x2_to_f16x2(bits));
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
  __stwb(static_cast<Vector*>(address), value);  // plain assignments of vectors may be split
}

// ---- Atomics on global memory: acquire and release at the scope of the GPU; the old value ----

#define PAGED_ATTN_ATOMIC(operation, operand)                            \
  uint32_t old;                                                          \
  asm volatile("atom.acq_rel.gpu.global." operation ".u32 %0, [%1], %2;" \
               : "=r"(old)                                               \
               : "l"(__cvta_generic_to_global(address)), "r"(operand)    \
               : "memory");                                              \
  return old
// Wraps. The address is aligned to 4 bytes.
__device__ __forceinline__ uint32_t atomic_add(uint32_t* address, uint32_t value) {
  PAGED_ATTN_ATOMIC("add", value);
}
// Adds 1, or sets 0 where the old value is `last` or more. The address is aligned to 4 bytes.
__device__ __forceinline__ uint32_t atomic_increment(uint32_t* address, uint32_t last) {
  PAGED_ATTN_ATOMIC("inc", last);
}
#undef PAGED_ATTN_ATOMIC

// ---- Dynamic shared memory: the one struct that a kernel declares ----

template <class Smem>
__device__ __forceinline__ Smem& shared_memory() {
  extern __shared__ __align__(16) unsigned char raw_shared_memory[];
  return *reinterpret_cast<Smem*>(raw_shared_memory);
}

// Where instructions find it that take a shared-memory address: 32 bits, to which they add a
// constant for free.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- Asynchronous copies from global to shared memory, of 16 bytes aligned to 16, past L1 ----
//
// Each thread waits for its own; others see them after a barrier that follows its wait. Every copy
// has landed before its thread exits. Only where kHasMma, as what follows.

#define PAGED_ATTN_CP_ASYNC(...) asm volatile("cp.async." __VA_ARGS__ : "memory")
__device__ __forceinline__ void copy_async(uint32_t shared, const void* global) {
  const size_t from = __cvta_generic_to_global(global);
  PAGED_ATTN_CP_ASYNC("cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from));
}
// The first source_bytes bytes, 0 to 16, and zeroes for the rest; what is not copied is not read.
__device__ __forceinline__ void copy_async_or_zero(uint32_t shared, const void* global,
                                                   int source_bytes) {
  const size_t from = __cvta_generic_to_global(global);
  PAGED_ATTN_CP_ASYNC("cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from),
                      "r"(source_bytes));
}
// Makes a group of this thread's copies since its last one, possibly of none.
__device__ __forceinline__ void copy_async_commit() { PAGED_ATTN_CP_ASYNC("commit_group;" ::); }
// Until all of this thread's groups but the kPending newest have landed.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  PAGED_ATTN_CP_ASYNC("wait_group %0;" ::"n"(kPending));
}
// Until all of this thread's copies have landed, those in no group too.
__device__ __forceinline__ void copy_async_wait_all() { PAGED_ATTN_CP_ASYNC("wait_all;" ::); }
#undef PAGED_ATTN_CP_ASYNC

// ---- Matrices spread over the warp: fragments as the PTX ISA lays them out. All 32 lanes take
// part. With g = lane / 4 and t = lane % 4, lane holds of an 8 x 8 matrix of 16-bit elements row g,
// columns 2 t (low half) and 2 t + 1. ----

#define PAGED_ATTN_LDMATRIX(trans)                                                           \
  static_assert(kCount == 1 || kCount == 2 || kCount == 4);                                  \
  if constexpr (kCount == 1) {                                                               \
    asm volatile("ldmatrix.sync.aligned.m8n8.x1" trans ".shared.b16 {%0}, [%1];"             \
                 : "=r"(m[0])                                                                \
                 : "r"(row)                                                                  \
                 : "memory");                                                                \
  } else if constexpr (kCount == 2) {                                                        \
    asm volatile("ldmatrix.sync.aligned.m8n8.x2" trans ".shared.b16 {%0, %1}, [%2];"         \
                 : "=r"(m[0]), "=r"(m[1])                                                    \
                 : "r"(row)                                                                  \
                 : "memory");                                                                \
  } else {                                                                                   \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" trans ".shared.b16 {%0, %1, %2, %3}, [%4];" \
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])                            \
                 : "r"(row)                                                                  \
                 : "memory");                                                                \
  }                                                                                          \
  static_assert(true)
// Loads kCount (1, 2 or 4) matrices from shared memory. Lane 8 i + r gives the address of row r of
// matrix i, 16 bytes aligned to 16; lanes past 8 kCount give any (on sm_75: any valid one).
template <int kCount>
__device__ __forceinline__ void ldmatrix(uint32_t (&m)[kCount], uint32_t row) {
  PAGED_ATTN_LDMATRIX("");
}
// The same, each matrix transposed.
template <int kCount>
__device__ __forceinline__ void ldmatrix_trans(uint32_t (&m)[kCount], uint32_t row) {
  PAGED_ATTN_LDMATRIX(".trans");
}
#undef PAGED_ATTN_LDMATRIX

// The transpose of the matrix that the warp holds.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t matrix) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}

// C += A B with A 16 x 8, B 8 x 8, C 16 x 8 in fp32. Of A lane holds rows g and g + 8; of B rows
// 2 t and 2 t + 1 of column g; of C rows g (two columns from 2 t) and g + 8.
__device__ __forceinline__ void mma_m16n8k8_f16(float (&c)[4], const uint32_t (&a)[2],
                                                const uint32_t (&b)[1]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b[0]));
}

// The same with A 16 x 16, B 16 x 8: a[2], a[3] and b[1] are the second half of the depth.
#define PAGED_ATTN_MMA(type)                                                     \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type            \
               ".f32 "                                                           \
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
__device__ __forceinline__ void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4],
                                                 const uint32_t (&b)[2]) {
  PAGED_ATTN_MMA("f16");
}
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4],
                                                  const uint32_t (&b)[2]) {
  PAGED_ATTN_MMA("bf16");
}
#undef PAGED_ATTN_MMA

// ---- Launch ----

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("paged_attn: ") + what + ": " +
                             cudaGetErrorString(status));
  }
}

// kArch of the kernel's code on the current device: of the PTX, where the driver compiled that.
template <class Params>
int loaded_arch(void (*kernel)(Params)) {
  cudaFuncAttributes code;
  check(cudaFuncGetAttributes(&code, reinterpret_cast<const void*>(kernel)), "kernel attributes");
  return code.ptxVersion;
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
