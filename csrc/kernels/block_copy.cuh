// Copying blocks within pools: all pools and all pairs in one launch. A CTA copies one block of
// one pool; its threads walk the block's vectors.
#pragma once

#include "device/ptx.cuh"
#include "params.h"

namespace paged_attn {

inline constexpr int kBlockCopyThreads = 256;

template <class Vector>
__device__ __forceinline__ void copy_block(const BlockRuns& runs, int64_t source,
                                           int64_t destination) {
  char* base = reinterpret_cast<char*>(runs.address);
  const char* from = base + source * runs.block_stride;
  char* to = base + destination * runs.block_stride;
  for (int64_t outer = 0; outer < runs.outer_count; ++outer) {
    for (int64_t inner = 0; inner < runs.inner_count; ++inner) {
      const int64_t run = outer * runs.outer_stride + inner * runs.inner_stride;
      for (int64_t i = threadIdx.x * sizeof(Vector); i < runs.run_bytes;
           i += kBlockCopyThreads * sizeof(Vector)) {
        ptx::store_global(to + run + i, ptx::load_global<Vector>(from + run + i));
      }
    }
  }
}

static __global__ void __launch_bounds__(kBlockCopyThreads)
    block_copy_kernel(const __grid_constant__ BlockCopyParams p) {
  const int64_t num_items = p.num_pools * p.num_pairs;
  for (int64_t item = blockIdx.x; item < num_items; item += gridDim.x) {
    const BlockRuns& runs = p.pools[item / p.num_pairs];
    const int64_t source = p.pairs[item % p.num_pairs * 2];
    const int64_t destination = p.pairs[item % p.num_pairs * 2 + 1];
    switch (runs.vector_bytes) {
      case 16:
        copy_block<uint4>(runs, source, destination);
        break;
      case 8:
        copy_block<uint2>(runs, source, destination);
        break;
      case 4:
        copy_block<uint32_t>(runs, source, destination);
        break;
      case 2:
        copy_block<uint16_t>(runs, source, destination);
        break;
      default:
        copy_block<uint8_t>(runs, source, destination);
        break;
    }
  }
}

}  // namespace paged_attn
