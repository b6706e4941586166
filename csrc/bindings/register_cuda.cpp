// The CUDA bodies of the ops that bindings/register_cpu.cpp declares.
#include "bindings/ops.h"

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CUDA, library) { paged_attn::implement_ops(library); }
