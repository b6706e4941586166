// What the op bodies ask of the device they run on. Each library links one definition:
// bindings/device_cpu.cpp, bindings/device_cuda.cpp, or the test emulator's.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <memory>

#include "backend.h"

namespace paged_attn::device {

using torch::stable::Tensor;

// Whether a tensor lives where this library's kernels run.
bool owns(const Tensor& tensor);

// "a CPU tensor", "a CUDA tensor": for messages.
const char* tensor_kind();

// Whether the contents of index tensors are checked: always on CPU, in debug mode on CUDA, where
// it costs a synchronisation.
bool checks_values();

// A tensor whose data the host can read now: the tensor itself where host and device are one.
Tensor to_host(const Tensor& tensor);

// A copy of a host tensor that kernels on `like`'s device can read, ordered on the current stream
// and never waiting for it.
Tensor upload(const Tensor& host, const Tensor& like);

// Makes `on`'s device current while it lives; `stream` is that device's current stream.
class Scope {
 public:
  explicit Scope(const Tensor& on);
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  backend::Stream stream() const { return stream_; }

 private:
  struct Guard;
  std::unique_ptr<Guard> guard_;
  backend::Stream stream_ = nullptr;
};

}  // namespace paged_attn::device
