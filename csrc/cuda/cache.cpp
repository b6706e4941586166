// The other functions of backend.h on CUDA.
#include "backend.h"
#include "cuda/grid.h"
#include "cuda/instances.h"
#include "dispatch.h"

namespace paged_attn::backend {

void append_slots(const AppendSlotsParams& params, Stream stream) {
  launch_append_slots(params, grid_for(params.num_seqs), cuda_stream(stream));
}

void merge_states(const MergeParams& params, Stream stream) {
  dispatch_float(params.dtype, [&](auto dtype) {
    launch_merge_states<dtype.value>(params, grid_for(params.num_rows), cuda_stream(stream));
  });
}

void write_cache(const CacheWriteParams& params, Stream stream) {
  const unsigned num_ctas = grid_for(params.num_tokens * params.shape.num_kv_heads);
  dispatch_float(params.input_dtype, [&](auto input) {
    constexpr DType kInput = input.value;
    dispatch_kv<kInput>(params.kv_dtype, [&](auto kv) {
      launch_cache_write<kInput, kv.value>(params, num_ctas, cuda_stream(stream));
    });
  });
}

void gather_cache(const GatherParams& params, Stream stream) {
  const unsigned num_ctas = grid_for(params.num_tokens * params.shape.num_kv_heads);
  dispatch_float(params.output_dtype, [&](auto output) {
    constexpr DType kOutput = output.value;
    dispatch<DType::kF32, DType::kF16, DType::kBf16, DType::kF8E4m3, DType::kF8E5m2, DType::kI8>(
        params.kv_dtype,
        [&](auto kv) { launch_gather<kv.value, kOutput>(params, num_ctas, cuda_stream(stream)); });
  });
}

void copy_blocks(const BlockCopyParams& params, Stream stream) {
  launch_block_copy(params, grid_for(params.num_pools * params.num_pairs), cuda_stream(stream));
}

}  // namespace paged_attn::backend
