// The op bodies' device when kernels run in the emulator: CPU tensors, no streams.
#include "bindings/device.h"

#include <atomic>

namespace paged_attn::device {
namespace {

std::atomic<bool> debug{false};

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
