#include "bindings/arg.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "bindings/device.h"

namespace paged_attn {
namespace {

std::string device_name(const Tensor& tensor) {
  const auto device = tensor.device();
  if (device.is_cpu()) return "cpu";
  if (device.is_cuda()) return join("cuda:", device.index());
  return join("device type ", static_cast<int>(device.type()));
}

// `count` numbers, `stride` apart from one another, from 0 on.
struct Progression {
  int64_t count;
  int64_t stride;
};

// The dimensions of a tensor in bytes, an element's own among them.
std::vector<Progression> progressions(const Arg& arg) {
  const auto bytes = static_cast<int64_t>(arg.tensor().element_size());
  std::vector<Progression> found{{bytes, 1}};
  for (int64_t i = 0; i < arg.rank(); ++i) {
    if (arg.size(i) > 1) found.push_back({arg.size(i), arg.stride(i) * bytes});
  }
  return found;
}

int64_t largest_sum(const std::vector<Progression>& terms, size_t from = 0) {
  int64_t sum = 0;
  for (size_t i = from; i < terms.size(); ++i) sum += (terms[i].count - 1) * terms[i].stride;
  return sum;
}

// Whether `target` is a sum of one number of each of the terms from number `from` on. Where strides
// are nested, as in tensors that do not overlap themselves, few branches are open; after `budget`
// steps the answer is yes.
bool is_sum(const std::vector<Progression>& terms, size_t from, int64_t target, int& budget) {
  if (target < 0 || --budget < 0) return budget < 0;
  if (from == terms.size()) return target == 0;
  const auto [count, stride] = terms[from];
  const int64_t rest = largest_sum(terms, from + 1);
  if (stride == 0) return is_sum(terms, from + 1, target, budget);
  const int64_t least = target > rest ? (target - rest + stride - 1) / stride : 0;
  for (int64_t i = std::min(count - 1, target / stride); i >= least; --i) {
    if (is_sum(terms, from + 1, target - i * stride, budget)) return true;
  }
  return false;
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

bool is_positive_float(double value) {
  const auto rounded = static_cast<float>(value);
  return rounded > 0 && std::isfinite(rounded);
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

// Each stride must reach past all that lies within the smaller ones.
void Arg::require_no_overlap() const {
  const auto next =
      [this](int64_t below) {  // the dimension with the smallest stride of at least that
        int64_t found = -1;
        for (int64_t i = 0; i < rank_; ++i) {
          if (sizes_[i] <= 1 || strides_[i] < below) continue;
          if (found < 0 || strides_[i] < strides_[found]) found = i;
        }
        return found;
      };
  for (int64_t i = 0; i < rank_; ++i) {
    if (sizes_[i] == 0) return;
  }
  int64_t reach = 0;
  int64_t count = 0;
  for (int64_t dim = next(0); dim >= 0; dim = next(strides_[dim] + 1), ++count) {
    require(strides_[dim] > reach, "not overlap itself, as it is written: it has stride ",
            strides_[dim], " in dimension ", dim);
    reach += (sizes_[dim] - 1) * strides_[dim];
  }
  for (int64_t i = 0; i < rank_; ++i) count -= sizes_[i] > 1;
  require(count == 0, "not overlap itself, as it is written: two dimensions have one stride");
}

uintptr_t Arg::end_address() const {
  int64_t last = 0;
  for (int64_t i = 0; i < rank_; ++i) {
    if (sizes_[i] == 0) return reinterpret_cast<uintptr_t>(data<void>());
    last += (sizes_[i] - 1) * strides_[i];
  }
  return reinterpret_cast<uintptr_t>(data<void>()) +
         (last + 1) * static_cast<int64_t>(tensor_.element_size());
}

bool Arg::is_same_view(const Arg& other) const {
  if (data<void>() != other.data<void>() || dtype_ != other.dtype_ || !same_shape(other)) {
    return false;
  }
  for (int64_t i = 0; i < rank_; ++i) {
    if (sizes_[i] > 1 && strides_[i] != other.strides_[i]) return false;
  }
  return true;
}

// An element here and one there share a byte if i - j = distance for two offsets i and j; counted
// from its end, j is added.
bool Arg::overlaps(const Arg& other) const {
  const auto begin = reinterpret_cast<uintptr_t>(data<void>());
  const auto other_begin = reinterpret_cast<uintptr_t>(other.data<void>());
  const uintptr_t end = end_address();
  const uintptr_t other_end = other.end_address();
  if (begin == end || other_begin == other_end || end <= other_begin || other_end <= begin) {
    return false;
  }
  std::vector<Progression> terms = progressions(*this);
  const std::vector<Progression> theirs = progressions(other);
  const int64_t target = static_cast<int64_t>(other_begin - begin) + largest_sum(theirs);
  for (const Progression& term : theirs) {
    // Numbers of the same stride are one progression more.
    const auto same = std::find_if(terms.begin(), terms.end(), [&](const Progression& mine) {
      return mine.stride == term.stride;
    });
    if (same == terms.end()) {
      terms.push_back(term);
    } else {
      same->count += term.count - 1;
    }
  }
  std::sort(terms.begin(), terms.end(),
            [](const Progression& a, const Progression& b) { return a.stride > b.stride; });
  int budget = 10000;
  return is_sum(terms, 0, target, budget);
}

void Arg::require_apart_from(const Arg& other) const {
  require(!overlaps(other), "not share memory with ", other.name_, ", as it is written");
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
