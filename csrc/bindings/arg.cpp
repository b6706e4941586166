#include "bindings/arg.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "bindings/device.h"

namespace paged_attn {
namespace {

std::string device_name(const Tensor& tensor) {
  const auto device = tensor.device();
  if (device.is_cpu()) return "cpu";
  if (device.is_cuda()) return join("cuda:", device.index());
  return join("device type ", static_cast<int>(device.type()));
}

Tensor as_dtype(const Arg& arg, ScalarType dtype) {
  return arg.dtype() == dtype ? arg.tensor() : torch::stable::to(arg.tensor(), dtype);
}

}  // namespace

std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Bool:
      return "bool";
    default:
      return torch::headeronly::toString(dtype);
  }
}

std::optional<DType> row_dtype(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return DType::kF32;
    case ScalarType::Half:
      return DType::kF16;
    case ScalarType::BFloat16:
      return DType::kBf16;
    default:
      return std::nullopt;
  }
}

int32_t checked_count(const char* op, const char* name, std::optional<int64_t> count) {
  if (!count) return 0;
  if (*count < 1) fail(op, ": ", name, " must be at least 1, or None for none, got ", *count);
  return static_cast<int32_t>(std::min<int64_t>(*count, std::numeric_limits<int32_t>::max()));
}

Arg::Arg(const char* op, const char* name, Tensor tensor)
    : op_(op),
      name_(name),
      tensor_(std::move(tensor)),
      rank_(tensor_.dim()),
      sizes_(tensor_.sizes().data()),
      strides_(tensor_.strides().data()),
      dtype_(tensor_.scalar_type()) {}

int64_t Arg::numel() const {
  int64_t count = 1;
  for (int64_t i = 0; i < rank_; ++i) count *= sizes_[i];
  return count;
}

std::string Arg::shape() const {
  std::string text = "(";
  for (int64_t i = 0; i < rank_; ++i) text += join(i == 0 ? "" : ", ", sizes_[i]);
  return text + (rank_ == 1 ? ",)" : ")");
}

bool Arg::has_shape(std::initializer_list<int64_t> sizes) const {
  if (static_cast<int64_t>(sizes.size()) != rank_) return false;
  const int64_t* mine = sizes_;
  for (const int64_t size : sizes) {
    if (size != *mine++) return false;
  }
  return true;
}

bool Arg::same_shape(const Arg& other) const {
  if (rank_ != other.rank_) return false;
  for (int64_t i = 0; i < rank_; ++i) {
    if (sizes_[i] != other.sizes_[i]) return false;
  }
  return true;
}

bool Arg::one_per_row_of(const Arg& rows) const {
  if (rank_ != rows.rank_ - 1) return false;
  for (int64_t i = 0; i < rank_; ++i) {
    if (sizes_[i] != rows.sizes_[i]) return false;
  }
  return true;
}

DType Arg::kernel_dtype(bool allow_8bit) const {
  if (const std::optional<DType> dtype = row_dtype(dtype_)) return *dtype;
  if (allow_8bit) {
    switch (dtype_) {
      case ScalarType::Float8_e4m3fn:
        return DType::kF8E4m3;
      case ScalarType::Float8_e5m2:
        return DType::kF8E5m2;
      case ScalarType::Char:
        return DType::kI8;
      default:
        break;
    }
  }
  fail_rule("be float16, bfloat16",
            allow_8bit ? ", float32, float8_e4m3fn, float8_e5m2 or int8" : " or float32", ", got ",
            dtype_name(dtype_));
}

void Arg::require_on_device_of(const Arg& leader) const {
  require(device::owns(tensor_), "be ", device::tensor_kind(), ", got one on ",
          device_name(tensor_));
  require(tensor_.get_device_index() == leader.tensor_.get_device_index(),
          "be on the same device as ", leader.name_, " (", device_name(leader.tensor_), "), got ",
          device_name(tensor_));
}

void Arg::require_dense_rows() const {
  require(sizes_[rank_ - 1] <= 1 || strides_[rank_ - 1] == 1,
          "have stride 1 in its last dimension, got ", strides_[rank_ - 1]);
}

void Arg::require_pool() const {
  require(rank_ == 4, "be [num_blocks, block_size, num_kv_heads, head_dim], got ", shape());
}

void Arg::require_no_overlap() const {
  for (int64_t i = 0; i < rank_; ++i) {
    require(sizes_[i] <= 1 || strides_[i] != 0,
            "not overlap itself, as it is written: it has stride 0 in dimension ", i);
  }
}

void Arg::require_index() const {
  require(dtype_ == ScalarType::Int || dtype_ == ScalarType::Long, "be int32 or int64, got ",
          dtype_name(dtype_));
}

int64_t Arg::index_at(const Tensor& host, int64_t row, int64_t column) const {
  const int64_t offset = row * host.stride(0) + (rank_ > 1 ? column * host.stride(1) : int64_t{0});
  return dtype_ == ScalarType::Int ? static_cast<const int32_t*>(host.data_ptr())[offset]
                                   : static_cast<const int64_t*>(host.data_ptr())[offset];
}

Tensor as_int32(const Arg& arg) { return as_dtype(arg, ScalarType::Int); }
Tensor as_int64(const Arg& arg) { return as_dtype(arg, ScalarType::Long); }
Tensor as_contiguous_int32(const Arg& arg) { return torch::stable::contiguous(as_int32(arg)); }
Tensor as_contiguous_int64(const Arg& arg) { return torch::stable::contiguous(as_int64(arg)); }

}  // namespace paged_attn
