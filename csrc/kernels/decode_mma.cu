#include "kernels/decode_mma.cuh"

namespace paged_attn {

#define DECODE_MMA(kKv, kDim, kRows) \
  template void launch_decode_mma<kKv, kDim, kRows>(const DecodeMmaParams&, unsigned, cudaStream_t);
PAGED_ATTN_INSTANCES

}  // namespace paged_attn
