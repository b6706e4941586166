// Takes the arguments of a boxed call off the stack, in the order of the schema.
#pragma once

#include <torch/csrc/stable/stableivalue_conversions.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

namespace paged_attn {

class Reader {
 public:
  explicit Reader(StableIValue* stack) : next_(stack) {}

  // Braced initialisers run in order: Args{.a = in.get<A>(), .b = in.get<B>()} reads a, then b.
  template <class T>
  T get() {
    return torch::stable::detail::to<T>(*next_++);
  }
  torch::stable::Tensor tensor() { return get<torch::stable::Tensor>(); }
  std::optional<torch::stable::Tensor> optional_tensor() {
    return get<std::optional<torch::stable::Tensor>>();
  }
  std::vector<torch::stable::Tensor> tensors() { return get<std::vector<torch::stable::Tensor>>(); }
  std::optional<double> optional_float() { return get<std::optional<double>>(); }
  std::optional<int64_t> optional_int() { return get<std::optional<int64_t>>(); }

 private:
  StableIValue* next_;
};

}  // namespace paged_attn
