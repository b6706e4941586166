#include "kernels/gather.cuh"

namespace paged_attn {

template void launch_gather<DType::kF32, DType::kBf16>(const GatherParams&, unsigned, cudaStream_t);
template void launch_gather<DType::kF16, DType::kBf16>(const GatherParams&, unsigned, cudaStream_t);
template void launch_gather<DType::kBf16, DType::kBf16>(const GatherParams&, unsigned,
                                                        cudaStream_t);
template void launch_gather<DType::kF8E4m3, DType::kBf16>(const GatherParams&, unsigned,
                                                          cudaStream_t);
template void launch_gather<DType::kF8E5m2, DType::kBf16>(const GatherParams&, unsigned,
                                                          cudaStream_t);
template void launch_gather<DType::kI8, DType::kBf16>(const GatherParams&, unsigned, cudaStream_t);

}  // namespace paged_attn
