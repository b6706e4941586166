#include "kernels/append_slots.cuh"

namespace paged_attn {

void launch_append_slots(const AppendSlotsParams& params, unsigned num_ctas, cudaStream_t stream) {
  ptx::launch(append_slots_kernel, num_ctas, kAppendThreads, 0, stream, params);
}

}  // namespace paged_attn
