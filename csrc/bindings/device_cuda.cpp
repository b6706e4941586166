// bindings/device.h for the CUDA library.
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <atomic>
#include <stdexcept>

#include "bindings/device.h"

namespace paged_attn::device {
namespace {

std::atomic<bool> debug{false};

using GetCurrentStream = AOTITorchError (*)(int32_t device_index, void** stream);

// Torch's own function, found at run time: the torch of the build may have had no CUDA to link.
GetCurrentStream get_current_stream() {
  static const GetCurrentStream function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library == nullptr ? nullptr
                              : reinterpret_cast<GetCurrentStream>(
                                    dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  if (function == nullptr) {
    throw std::runtime_error("paged_attn: this torch has no CUDA: libtorch_cuda.so is not loaded");
  }
  return function;
}

torch::stable::Device cpu() { return {torch::headeronly::DeviceType::CPU}; }

}  // namespace

bool owns(const Tensor& tensor) { return tensor.is_cuda(); }
const char* tensor_kind() { return "a CUDA tensor"; }
bool checks_values() { return debug.load(std::memory_order_relaxed); }

Tensor to_host(const Tensor& tensor) {
  return tensor.is_cpu() ? tensor : torch::stable::to(tensor, cpu());
}

// Through pinned memory: torch keeps that alive until the copy has run.
Tensor upload(const Tensor& host, const Tensor& like) {
  const std::array<int64_t, 1> size{host.numel()};
  Tensor pinned = torch::stable::empty({size.data(), size.size()}, host.scalar_type(), std::nullopt,
                                       cpu(), /*pin_memory=*/true);
  torch::stable::copy_(pinned, host);
  return torch::stable::to(pinned, like.device(), /*non_blocking=*/true);
}

struct Scope::Guard {
  torch::stable::accelerator::DeviceGuard device;
};

Scope::Scope(const Tensor& on) {
  const int32_t index = on.get_device_index();
  guard_.reset(new Guard{torch::stable::accelerator::DeviceGuard(index)});
  TORCH_ERROR_CODE_CHECK(get_current_stream()(index, &stream_));
}
Scope::~Scope() = default;

}  // namespace paged_attn::device

extern "C" __attribute__((visibility("default"))) void paged_attn_set_debug(int on) {
  paged_attn::device::debug.store(on != 0, std::memory_order_relaxed);
}
