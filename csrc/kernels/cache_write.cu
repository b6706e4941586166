#include "kernels/cache_write.cuh"

namespace paged_attn {

void launch_cache_write(const CacheWriteParams& params, unsigned num_ctas, cudaStream_t stream) {
  ptx::launch(cache_write_kernel, num_ctas, kCacheWriteThreads, 0, stream, params);
}

}  // namespace paged_attn
