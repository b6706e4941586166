// The schemas of all ops, and their CPU bodies.
#include "bindings/ops.h"

STABLE_TORCH_LIBRARY(paged_attn, library) { paged_attn::define_ops(library); }
STABLE_TORCH_LIBRARY_IMPL(paged_attn, CPU, library) { paged_attn::implement_ops(library); }
