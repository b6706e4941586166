#include "kernels/decode_simt.cuh"

namespace paged_attn {

template void launch_decode_simt<DType::kF16, DType::kF8E4m3, 1>(const DecodeParams&, unsigned,
                                                                 cudaStream_t);
template void launch_decode_simt<DType::kF16, DType::kF8E4m3, 2>(const DecodeParams&, unsigned,
                                                                 cudaStream_t);

}  // namespace paged_attn
