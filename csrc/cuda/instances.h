// The kernels, as host code sees them; kernels/instances.def lists their instances. Each enqueues
// its kernel on `stream` with num_ctas CTAs, any number from 1 on, and returns.
#pragma once

#include "mma_params.h"

struct CUstream_st;

namespace paged_attn {

using CudaStream = CUstream_st*;

// The compute capability, major * 10 + minor, that the kernels were compiled for, as they are
// loaded on the current device: it may be less than the device's.
int kernels_arch();

// kKv: of the pools, or DType::kAny; kVecs: 1 up to head_dim 256, 2 up to 512.
template <DType kKv, int kVecs>
void launch_decode_simt(const DecodeParams& params, unsigned num_ctas, CudaStream stream);

// kDim: 64, 128 or 256; kRows: query rows of a row tile, 8, 16 or 128.
template <DType kKv, int kDim, int kRows>
void launch_decode_mma(const DecodeMmaParams& params, unsigned num_ctas, CudaStream stream);
void launch_combine_chunks(const DecodeParams& params, unsigned num_ctas, CudaStream stream);

// One CTA; plan.num_ctas is at most 1023.
void launch_plan(const PlanParams& params, CudaStream stream);

void launch_append_slots(const AppendSlotsParams& params, unsigned num_ctas, CudaStream stream);
void launch_merge_states(const MergeParams& params, unsigned num_ctas, CudaStream stream);
void launch_cache_write(const CacheWriteParams& params, unsigned num_ctas, CudaStream stream);
void launch_gather(const GatherParams& params, unsigned num_ctas, CudaStream stream);
void launch_block_copy(const BlockCopyParams& params, unsigned num_ctas, CudaStream stream);

}  // namespace paged_attn
