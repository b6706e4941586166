#include "kernels/decode_mma.cuh"

namespace paged_attn {

template void launch_decode_mma<DType::kBf16, DType::kF8E4m3, 64, 16>(const DecodeMmaParams&,
                                                                      unsigned, cudaStream_t);
template void launch_decode_mma<DType::kBf16, DType::kF8E4m3, 128, 16>(const DecodeMmaParams&,
                                                                       unsigned, cudaStream_t);
template void launch_decode_mma<DType::kBf16, DType::kF8E4m3, 256, 16>(const DecodeMmaParams&,
                                                                       unsigned, cudaStream_t);

}  // namespace paged_attn
