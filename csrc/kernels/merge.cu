#include "kernels/merge.cuh"

namespace paged_attn {

void launch_combine_chunks(const DecodeParams& params, unsigned num_ctas, cudaStream_t stream) {
  ptx::launch(combine_chunks_kernel, num_ctas, kMergeThreads, 0, stream, params);
}

void launch_merge_states(const MergeParams& params, unsigned num_ctas, cudaStream_t stream) {
  ptx::launch(merge_states_kernel, num_ctas, kMergeThreads, 0, stream, params);
}

}  // namespace paged_attn
