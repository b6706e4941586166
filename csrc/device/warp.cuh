// Reductions over the lanes of a warp. All 32 lanes take part.
#pragma once

#include "device/ptx.cuh"

namespace paged_attn {

// The sum over each aligned group of `width` lanes, a power of two, in every lane of the group.
__device__ __forceinline__ float group_sum(float value, int width) {
  for (int mask = width / 2; mask > 0; mask /= 2) value += ptx::shuffle_xor(value, mask);
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int mask = ptx::kWarpSize / 2; mask > 0; mask /= 2) {
    value = fmaxf(value, ptx::shuffle_xor(value, mask));
  }
  return value;
}

}  // namespace paged_attn
