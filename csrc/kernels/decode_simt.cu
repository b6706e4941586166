#include "kernels/decode_simt.cuh"

namespace paged_attn {

#define DECODE_SIMT(kKv, kVecs) \
  template void launch_decode_simt<kKv, kVecs>(const DecodeParams&, unsigned, cudaStream_t);
PAGED_ATTN_INSTANCES

}  // namespace paged_attn
