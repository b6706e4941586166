#include "kernels/decode_simt.cuh"

namespace paged_attn {

template void launch_decode_simt<DType::kBf16, DType::kBf16, 1>(const DecodeParams&, unsigned,
                                                                cudaStream_t);
template void launch_decode_simt<DType::kBf16, DType::kBf16, 2>(const DecodeParams&, unsigned,
                                                                cudaStream_t);

}  // namespace paged_attn
