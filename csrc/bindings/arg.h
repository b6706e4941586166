// A tensor argument that knows its name: metadata read once, and messages of one form,
// "op: name must <what it must be>, got <what it is>".
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "params.h"

namespace paged_attn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw std::runtime_error(join(parts...));
}

// "float16", as Python prints it without the "torch.".
std::string dtype_name(ScalarType dtype);

// The dtype of rows (query, key, value, output) as kernels know it, if it is one: float16,
// bfloat16 or float32.
std::optional<DType> row_dtype(ScalarType dtype);

// A count of at least 1; 0 for None, which in kernels stands for "off".
// Whether a number is positive and finite as the float that kernels have of it.
bool is_positive_float(double value);

int32_t checked_count(const char* op, const char* name, std::optional<int64_t> count);

class Arg {
 public:
  Arg(const char* op, const char* name, Tensor tensor);

  const Tensor& tensor() const { return tensor_; }
  const char* op() const { return op_; }
  const char* name() const { return name_; }
  int64_t rank() const { return rank_; }
  int64_t size(int64_t dim) const { return sizes_[dim]; }
  int64_t stride(int64_t dim) const { return strides_[dim]; }
  int64_t numel() const;
  ScalarType dtype() const { return dtype_; }
  std::string shape() const;
  bool has_shape(std::initializer_list<int64_t> sizes) const;
  bool same_shape(const Arg& other) const;
  // Whether this has one element for each row of `rows`: its shape without the last dimension.
  bool one_per_row_of(const Arg& rows) const;
  // The address behind the last element.
  uintptr_t end_address() const;

  template <class T>
  T* data() const {
    return static_cast<T*>(tensor_.data_ptr());
  }

  // The dtype as kernels know it; an error unless it is one of float16, bfloat16, float32, and,
  // where `allow_8bit`, float8_e4m3fn, float8_e5m2, int8.
  DType kernel_dtype(bool allow_8bit) const;

  // Throws "op: name must <rule>".
  template <class... Parts>
  [[noreturn]] void fail_rule(const Parts&... rule) const {
    paged_attn::fail(op_, ": ", name_, " must ", rule...);
  }

  template <class... Parts>
  void require(bool holds, const Parts&... rule) const {
    if (!holds) fail_rule(rule...);
  }

  // What every tensor argument must satisfy: it is where this library's kernels run, and on the
  // same device as `query` (or whichever argument leads).
  void require_on_device_of(const Arg& leader) const;
  // Rows are moved as vectors: elements of the last dimension lie side by side.
  void require_dense_rows() const;
  // [num_blocks, block_size, num_kv_heads, head_dim].
  void require_pool() const;
  // A tensor that is written must not overlap itself, as an expanded one does.
  void require_no_overlap() const;
  // A tensor that is written shares no byte with `other`.
  void require_apart_from(const Arg& other) const;
  // Whether this is the same memory in the same order.
  bool is_same_view(const Arg& other) const;
  bool overlaps(const Arg& other) const;

  // An index tensor: int32 or int64, one dimension or two.
  void require_index() const;
  int64_t index_at(const Tensor& host, int64_t row, int64_t column = 0) const;

 private:
  const char* op_;
  const char* name_;
  Tensor tensor_;
  int64_t rank_;
  const int64_t* sizes_;
  const int64_t* strides_;
  ScalarType dtype_;
};

// The index tensor with the element type kernels read; a new tensor only if it has another one.
Tensor as_int32(const Arg& arg);
Tensor as_int64(const Arg& arg);
// The same, with elements side by side.
Tensor as_contiguous_int32(const Arg& arg);
Tensor as_contiguous_int64(const Arg& arg);

}  // namespace paged_attn
