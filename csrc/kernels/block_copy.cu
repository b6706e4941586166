#include "kernels/block_copy.cuh"

namespace paged_attn {

void launch_block_copy(const BlockCopyParams& params, unsigned num_ctas, cudaStream_t stream) {
  ptx::launch(block_copy_kernel, num_ctas, kBlockCopyThreads, 0, stream, params);
}

}  // namespace paged_attn
