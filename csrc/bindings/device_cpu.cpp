// bindings/device.h and cpu/parallel.h for the CPU library.
#include <torch/csrc/stable/ops.h>

#include "bindings/device.h"
#include "cpu/parallel.h"

namespace paged_attn {
namespace device {

bool owns(const Tensor& tensor) { return tensor.is_cpu(); }
const char* tensor_kind() { return "a CPU tensor"; }
bool checks_values() { return true; }
Tensor to_host(const Tensor& tensor) { return tensor; }
Tensor upload(const Tensor& host, const Tensor& /*like*/) { return host; }

struct Scope::Guard {};
Scope::Scope(const Tensor& /*on*/) {}
Scope::~Scope() = default;

}  // namespace device

namespace cpu {

int64_t num_threads() { return torch::stable::get_num_threads(); }

void parallel_for(int64_t count, int64_t grain, void (*body)(int64_t, int64_t, void*),
                  void* context) {
  torch::stable::parallel_for(0, count, grain,
                              [=](int64_t begin, int64_t end) { body(begin, end, context); });
}

}  // namespace cpu
}  // namespace paged_attn
