// The other functions of backend.h on CUDA.
#include "backend.h"
#include "cuda/grid.h"
#include "cuda/instances.h"

namespace paged_attn::backend {

void append_slots(const AppendSlotsParams& params, Stream stream) {
  launch_append_slots(params, grid_for(params.num_seqs), cuda_stream(stream));
}

void merge_states(const MergeParams& params, Stream stream) {
  launch_merge_states(params, grid_for(params.num_rows), cuda_stream(stream));
}

void write_cache(const CacheWriteParams& params, Stream stream) {
  launch_cache_write(params, grid_for(params.num_tokens * params.shape.num_kv_heads),
                     cuda_stream(stream));
}

void gather_cache(const GatherParams& params, Stream stream) {
  launch_gather(params, grid_for(params.num_tokens * params.shape.num_kv_heads),
                cuda_stream(stream));
}

void copy_blocks(const BlockCopyParams& params, Stream stream) {
  launch_block_copy(params, grid_for(params.num_pools * params.num_pairs), cuda_stream(stream));
}

}  // namespace paged_attn::backend
