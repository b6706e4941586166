#include "bindings/paged.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "bindings/device.h"

namespace paged_attn {
namespace {

constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kWideHeadDim = 512;

bool is_supported_head_dim(int64_t head_dim) {
  return (head_dim > 0 && head_dim % 8 == 0 && head_dim <= kMaxHeadDim) || head_dim == kWideHeadDim;
}

bool rows_aligned(const Arg& pool) {
  const int64_t bytes = static_cast<int64_t>(pool.tensor().element_size());
  const int64_t alignment = std::min<int64_t>(16, 8 * bytes);
  bool aligned = reinterpret_cast<uintptr_t>(pool.data<void>()) % alignment == 0;
  for (int dim = 0; dim < 3; ++dim) {
    aligned = aligned && (pool.size(dim) <= 1 || pool.stride(dim) * bytes % alignment == 0);
  }
  return aligned;
}

void check_product(const char* op, const char* name, float value, float factor) {
  if (!std::isfinite(value * factor)) {
    fail(op, ": ", name, " must be finite when multiplied by scale, ", factor, ", got ", value);
  }
}

void check_scale_values(const Arg& scale, float factor) {
  if (!device::checks_values()) return;
  const Tensor host = device::to_host(scale.tensor());
  const float* data = static_cast<const float*>(host.data_ptr());
  const int64_t count = scale.numel();
  const int64_t stride = scale.rank() == 0 ? 0 : host.stride(0);
  for (int64_t i = 0; i < count; ++i) {
    const float value = data[i * stride];
    scale.require(is_positive_float(value), "be positive and finite, got ", value, " at ", i);
    check_product(scale.op(), scale.name(), value, factor);
  }
}

void check_values(const PagedSequences& sequences, const Arg& tables, const Arg& lens,
                  const PagedShape& shape, const TouchedTokens& touched) {
  const Tensor host_tables = device::to_host(tables.tensor());
  const Tensor host_lens = device::to_host(lens.tensor());
  const int64_t capacity = sequences.tables.max_blocks * shape.block_size;
  for (int64_t seq = 0; seq < lens.size(0); ++seq) {
    const int64_t length = lens.index_at(host_lens, seq);
    lens.require(length >= 0, "not be negative, got ", length, " for sequence ", seq);
    lens.require(length <= capacity, "fit block_tables, which has room for ",
                 sequences.tables.max_blocks, " blocks of ", shape.block_size, " tokens, got ",
                 length, " for sequence ", seq);
    const int64_t used = (length + shape.block_size - 1) / shape.block_size;
    for (int64_t i = touched.first(seq, length) / shape.block_size; i < used; ++i) {
      const int64_t block = tables.index_at(host_tables, seq, i);
      tables.require(block >= 0 && block < shape.num_blocks, "name blocks of a pool of ",
                     shape.num_blocks, ", got ", block, " at (", seq, ", ", i, ")");
    }
  }
}

}  // namespace

Pools::Pools(const char* op, Tensor key_cache, Tensor value_cache, const Arg& leader,
             int64_t leader_head_dim, ScalarType row_dtype)
    : key(op, "key_cache", std::move(key_cache)), value(op, "value_cache", std::move(value_cache)) {
  key.require_on_device_of(leader);
  value.require_on_device_of(leader);
  key.require(key.rank() == 4 && key.size(3) == leader_head_dim,
              "be [num_blocks, block_size, num_kv_heads, head_dim] with head_dim ", leader_head_dim,
              " as ", leader.name(), ", got ", key.shape());
  leader.require(is_supported_head_dim(leader_head_dim),
                 "have a head_dim that is a multiple of 8 up to 256, or 512, got ",
                 leader_head_dim);
  value.require(value.same_shape(key), "have the shape of key_cache, ", key.shape(), ", got ",
                value.shape());
  dtype = key.kernel_dtype(/*allow_8bit=*/true);
  key.require(is_8bit(dtype) || key.dtype() == row_dtype, "have the dtype of ", leader.name(), ", ",
              dtype_name(row_dtype), ", or be float8_e4m3fn, float8_e5m2 or int8, got ",
              dtype_name(key.dtype()));
  value.require(value.dtype() == key.dtype(), "have the dtype of key_cache, ",
                dtype_name(key.dtype()), ", got ", dtype_name(value.dtype()));
  key.require_dense_rows();
  value.require_dense_rows();
  key.require(key.size(1) >= 1 && key.size(1) <= std::numeric_limits<int32_t>::max(),
              "have a block_size of at least 1 and less than 2^31, got ", key.size(1));
  key.require(key.size(2) >= 1 && key.size(2) <= std::numeric_limits<int32_t>::max(),
              "have at least one KV head, got ", key.shape());
  shape = {.num_blocks = key.size(0),
           .block_size = static_cast<int32_t>(key.size(1)),
           .num_kv_heads = static_cast<int32_t>(key.size(2)),
           .head_dim = static_cast<int32_t>(key.size(3))};
}

bool Pools::vector_aligned() const { return rows_aligned(key) && rows_aligned(value); }

int64_t TouchedTokens::first(int64_t seq, int64_t length) const {
  if (sliding_window == 0) return 0;
  int64_t num_queries = query_len;
  if (cu_query_lens) {
    num_queries = cu_query_lens->index_at(*host_cu_query_lens, seq + 1) -
                  cu_query_lens->index_at(*host_cu_query_lens, seq);
  }
  const int64_t seen = num_queries == 0 ? 0 : num_queries + sliding_window - 1;
  return std::max<int64_t>(0, length - std::max(seen, new_len));
}

PoolView pool_view(const Arg& pool) {
  return {.data = pool.data<void>(),
          .block_stride = pool.stride(0),
          .token_stride = pool.stride(1),
          .head_stride = pool.stride(2)};
}

ScaleView scale_view(const ScaleArg& scale, const Pools& pools, const Arg& leader, ScaleUse use,
                     bool* per_token, float factor) {
  const char* op = leader.op();
  if (per_token != nullptr) *per_token = false;
  if (!scale.tensor) {
    if (!scale.value && pools.dtype == DType::kI8) {
      fail(op, ": ", scale.name, " must be given, as an int8 cache means nothing without it");
    }
    const double value = scale.value.value_or(1.0);
    if (!is_positive_float(value)) {
      fail(op, ": ", scale.name, " must be positive and finite in float32, got ", value);
    }
    check_product(op, scale.name, static_cast<float>(value), factor);
    return {.data = nullptr, .value = static_cast<float>(value)};
  }
  const Arg arg(op, scale.name, *scale.tensor);
  arg.require_on_device_of(leader);
  arg.require(arg.dtype() == ScalarType::Float, "be float32, got ", dtype_name(arg.dtype()));
  const PagedShape& shape = pools.shape;
  ScaleView view{.data = arg.data<float>(), .value = 1.f};
  if (arg.rank() == 0) {
    check_scale_values(arg, factor);
    return view;
  }
  if (arg.has_shape({shape.num_kv_heads})) {
    check_scale_values(arg, factor);
    view.head_stride = arg.stride(0);
    return view;
  }
  arg.require(arg.has_shape({shape.num_blocks, shape.block_size, shape.num_kv_heads}),
              "be a float, or a tensor of shape (), (", shape.num_kv_heads, ",) or (",
              shape.num_blocks, ", ", shape.block_size, ", ", shape.num_kv_heads, "), got ",
              arg.shape());
  if (use == ScaleUse::kCompute) {
    arg.require(is_8bit(pools.dtype), "not be one per token, as a ", dtype_name(pools.key.dtype()),
                " cache needs none");
    arg.require_no_overlap();
  }
  if (per_token != nullptr) *per_token = true;
  view.block_stride = arg.stride(0);
  view.token_stride = arg.stride(1);
  view.head_stride = arg.stride(2);
  return view;
}

PagedSequences::PagedSequences(const char* op, Tensor block_tables_in, Tensor seq_lens_in,
                               int64_t num_seqs, const Pools& pools, const Arg& leader,
                               const TouchedTokens& touched) {
  const Arg table_arg(op, "block_tables", std::move(block_tables_in));
  const Arg lens_arg(op, "seq_lens", std::move(seq_lens_in));
  for (const Arg* arg : {&table_arg, &lens_arg}) {
    arg->require_on_device_of(leader);
    arg->require_index();
  }
  table_arg.require(table_arg.rank() == 2 && table_arg.size(0) == num_seqs,
                    "be [num_seqs, max_blocks] with num_seqs ", num_seqs, ", got ",
                    table_arg.shape());
  lens_arg.require(lens_arg.has_shape({num_seqs}), "be [num_seqs] with num_seqs ", num_seqs,
                   ", got ", lens_arg.shape());
  tables.max_blocks = table_arg.size(1);
  if (device::checks_values()) check_values(*this, table_arg, lens_arg, pools.shape, touched);
  block_tables = as_int32(table_arg);
  seq_lens = as_contiguous_int32(lens_arg);
  tables.data = static_cast<const int32_t*>(block_tables.data_ptr());
  tables.seq_stride = block_tables.stride(0);
  tables.block_stride = block_tables.stride(1);
}

}  // namespace paged_attn
