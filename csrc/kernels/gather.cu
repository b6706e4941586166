#include "kernels/gather.cuh"

namespace paged_attn {

void launch_gather(const GatherParams& params, unsigned num_ctas, cudaStream_t stream) {
  ptx::launch(gather_kernel, num_ctas, kGatherThreads, 0, stream, params);
}

}  // namespace paged_attn
