// The op bodies' device when the PTX is executed here: CPU tensors, no streams; and the ops, in a
// namespace of their own, so that no test can pass on the product's library.
#include "bindings/device.h"

#include <torch/csrc/stable/library.h>

#include "bindings/ops.h"

namespace paged_attn::device {
namespace {

bool debug = false;

}  // namespace

bool owns(const Tensor& tensor) { return tensor.is_cpu(); }
const char* tensor_kind() { return "a CPU tensor"; }
bool checks_values() { return debug; }
Tensor to_host(const Tensor& tensor) { return tensor; }
Tensor upload(const Tensor& host, const Tensor&) { return host; }

struct Scope::Guard {};
Scope::Scope(const Tensor&) {}
Scope::~Scope() = default;

}  // namespace paged_attn::device

extern "C" __attribute__((visibility("default"))) void paged_attn_set_debug(int enabled) {
  paged_attn::device::debug = enabled != 0;
}

STABLE_TORCH_LIBRARY(paged_attn_ptx, library) { paged_attn::define_ops(library); }
STABLE_TORCH_LIBRARY_IMPL(paged_attn_ptx, CPU, library) { paged_attn::implement_ops(library); }
