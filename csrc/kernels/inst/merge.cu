#include "kernels/merge.cuh"

namespace paged_attn {

template void launch_combine_chunks<DType::kF32>(const DecodeParams&, unsigned, cudaStream_t);
template void launch_combine_chunks<DType::kF16>(const DecodeParams&, unsigned, cudaStream_t);
template void launch_combine_chunks<DType::kBf16>(const DecodeParams&, unsigned, cudaStream_t);
template void launch_merge_states<DType::kF32>(const MergeParams&, unsigned, cudaStream_t);
template void launch_merge_states<DType::kF16>(const MergeParams&, unsigned, cudaStream_t);
template void launch_merge_states<DType::kBf16>(const MergeParams&, unsigned, cudaStream_t);

}  // namespace paged_attn
