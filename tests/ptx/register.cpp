// The ops in a namespace of their own, so that no test can pass on the product's library.
#include <torch/csrc/stable/library.h>

#include "bindings/ops.h"

STABLE_TORCH_LIBRARY(paged_attn_ptx, library) { paged_attn::define_ops(library); }
STABLE_TORCH_LIBRARY_IMPL(paged_attn_ptx, CPU, library) { paged_attn::implement_ops(library); }
