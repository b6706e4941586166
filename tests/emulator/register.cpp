// The ops in a namespace of their own, so that no test can pass on the product's library.
#include <torch/csrc/stable/library.h>

#include "bindings/ops.h"

// The macros of torch paste their argument before they would expand it.
#define EMULATOR_LIBRARY(name, library) STABLE_TORCH_LIBRARY(name, library)
#define EMULATOR_LIBRARY_IMPL(name, key, library) STABLE_TORCH_LIBRARY_IMPL(name, key, library)

EMULATOR_LIBRARY(EMULATOR_NAMESPACE, library) { paged_attn::define_ops(library); }

EMULATOR_LIBRARY_IMPL(EMULATOR_NAMESPACE, CPU, library) { paged_attn::implement_ops(library); }
