#include "selftest.h"

#include <map>
#include <string>

#include "core/c_api.h"

namespace selftest {
namespace {

std::map<std::string, Kernel>& kernels() {
  static std::map<std::string, Kernel> all;
  return all;
}

}  // namespace

Registration::Registration(const char* name, Kernel kernel) { kernels()[name] = kernel; }

}  // namespace selftest

// Null if all went well; otherwise the message of what was thrown, valid until the next call.
EMU_API const char* selftest_run(const char* name, void* data, int64_t size, int64_t option,
                                 unsigned num_ctas, unsigned num_threads, size_t smem_bytes) {
  static std::string message;
  try {
    paged_attn::ptx::launch(selftest::kernels().at(name), num_ctas, num_threads, smem_bytes,
                            nullptr, selftest::Args{data, size, option});
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
  }
  return message.c_str();
}

// A launch of three dimensions: data is an int of each thread, which gets its linear index.
EMU_API const char* selftest_run_3d(int* data, const unsigned* grid, const unsigned* block) {
  static std::string message;
  try {
    const emu::dim3 grid_shape(grid[0], grid[1], grid[2]),
        block_shape(block[0], block[1], block[2]);
    emu::launch({grid_shape, block_shape}, [data] {
      const unsigned cta = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
      const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
      data[cta * blockDim.count() + thread] += static_cast<int>(thread * 32 + emu::lane_id());
    });
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
  }
  return message.c_str();
}

// The conversions of core/formats.h, element by element.
EMU_API void selftest_from_float(const float* input, int64_t count, uint16_t* half,
                                 uint16_t* bfloat16, uint8_t* e4m3, uint8_t* e5m2) {
  for (int64_t i = 0; i < count; ++i) {
    half[i] = paged_attn::ptx::float_to_f16(input[i]);
    bfloat16[i] = paged_attn::ptx::float_to_bf16(input[i]);
    e4m3[i] = paged_attn::ptx::float_to_e4m3(input[i]);
    e5m2[i] = paged_attn::ptx::float_to_e5m2(input[i]);
  }
}

// All 65536 bit patterns, taken as a 16-bit float and as a pair of 8-bit ones.
EMU_API void selftest_to_float(float* half, float* bfloat16, float2* e4m3, float2* e5m2) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    half[bits] = paged_attn::ptx::f16x2_to_float2(bits << 16).y;
    bfloat16[bits] = paged_attn::ptx::bf16x2_to_float2(bits).x;
    e4m3[bits] = paged_attn::ptx::e4m3x2_to_float2(static_cast<uint16_t>(bits));
    e5m2[bits] = paged_attn::ptx::e5m2x2_to_float2(static_cast<uint16_t>(bits));
  }
}

EMU_API void selftest_round_to_int(const float* input, int64_t count, int* output) {
  for (int64_t i = 0; i < count; ++i) output[i] = paged_attn::ptx::round_to_int(input[i]);
}
