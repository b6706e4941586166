#include "kernels/decode_mma.cuh"

namespace paged_attn {

template void launch_decode_mma<DType::kBf16, DType::kF8E5m2, 64, 16>(const DecodeMmaParams&,
                                                                      unsigned, cudaStream_t);
template void launch_decode_mma<DType::kBf16, DType::kF8E5m2, 128, 16>(const DecodeMmaParams&,
                                                                       unsigned, cudaStream_t);
template void launch_decode_mma<DType::kBf16, DType::kF8E5m2, 256, 16>(const DecodeMmaParams&,
                                                                       unsigned, cudaStream_t);

}  // namespace paged_attn
