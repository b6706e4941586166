// The language of kernels for a compiler that does not know CUDA. There is no __shared__: kernels
// have dynamic shared memory only, through ptx::shared_memory.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/runtime.h"
#include "core/types.h"
#include "cuda_runtime_api.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))

using emu::dim3;
using emu::float2;
using emu::float4;
using emu::int2;
using emu::int4;
using emu::make_float2;
using emu::make_float4;
using emu::make_int2;
using emu::make_int4;
using emu::make_uint2;
using emu::make_uint3;
using emu::make_uint4;
using emu::uint2;
using emu::uint3;
using emu::uint4;

using emu::blockDim;
using emu::blockIdx;
using emu::gridDim;
using emu::threadIdx;

constexpr int min(int a, int b) { return b < a ? b : a; }
constexpr int max(int a, int b) { return a < b ? b : a; }
constexpr unsigned min(unsigned a, unsigned b) { return b < a ? b : a; }
constexpr unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }
constexpr int64_t min(int64_t a, int64_t b) { return b < a ? b : a; }
constexpr int64_t max(int64_t a, int64_t b) { return a < b ? b : a; }
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
