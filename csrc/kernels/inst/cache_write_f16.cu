#include "kernels/cache_write.cuh"

namespace paged_attn {

template void launch_cache_write<DType::kF16, DType::kF16>(const CacheWriteParams&, unsigned,
                                                           cudaStream_t);
template void launch_cache_write<DType::kF16, DType::kF8E4m3>(const CacheWriteParams&, unsigned,
                                                              cudaStream_t);
template void launch_cache_write<DType::kF16, DType::kF8E5m2>(const CacheWriteParams&, unsigned,
                                                              cudaStream_t);
template void launch_cache_write<DType::kF16, DType::kI8>(const CacheWriteParams&, unsigned,
                                                          cudaStream_t);

}  // namespace paged_attn
