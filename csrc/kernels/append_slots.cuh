// The slots of tokens that follow those in the cache.
#pragma once

#include "device/ptx.cuh"
#include "params.h"

namespace paged_attn {

inline constexpr int kAppendThreads = 128;

__global__ void __launch_bounds__(kAppendThreads)
    append_slots_kernel(const __grid_constant__ AppendSlotsParams p) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kAppendThreads;
  const int64_t first = blockIdx.x * static_cast<int64_t>(kAppendThreads) + threadIdx.x;
  for (int64_t seq = first; seq < p.num_seqs; seq += stride) p.seq_lens[seq] = p.seq_len(seq);
  for (int64_t i = first; i < p.num_seqs * p.new_len; i += stride) {
    p.slots[i] = p.slot(i / p.new_len, i % p.new_len);
  }
}

}  // namespace paged_attn
