// The ops: schemas and bodies, the same for every backend.
#pragma once

#include <torch/csrc/stable/library.h>

namespace paged_attn {

// Declares the schemas of all ops in `library`'s namespace.
void define_ops(torch::stable::detail::StableLibrary& library);
// Registers the bodies for `library`'s dispatch key.
void implement_ops(torch::stable::detail::StableLibrary& library);

// A boxed kernel, as the stable ABI calls it.
using BoxedKernel = void(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);

BoxedKernel paged_attention;
BoxedKernel flash_attn_with_kvcache;
BoxedKernel plan_decode;
BoxedKernel merge_states;
BoxedKernel reshape_and_cache;
BoxedKernel gather_cache;
BoxedKernel copy_blocks;
BoxedKernel swap_blocks;

}  // namespace paged_attn
