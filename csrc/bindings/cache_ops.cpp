// reshape_and_cache and gather_cache: checks, then the backend's kernels.
#include <torch/csrc/stable/ops.h>

#include <array>
#include <utility>

#include "backend.h"
#include "bindings/arg.h"
#include "bindings/cache_write.h"
#include "bindings/device.h"
#include "bindings/ops.h"
#include "bindings/paged.h"
#include "bindings/reader.h"

namespace paged_attn {
namespace {

// Rows [num_tokens, num_kv_heads, head_dim].
RowsView rows_view(const Arg& rows) {
  return {.data = rows.data<void>(),
          .seq_stride = 0,
          .token_stride = rows.stride(0),
          .head_stride = rows.stride(1)};
}

void check_rows(const Arg& rows, const Arg& leader) {
  rows.require_on_device_of(leader);
  rows.require(rows.rank() == 3, "be [num_tokens, num_kv_heads, head_dim], got ", rows.shape());
  rows.require(rows.same_shape(leader), "have the shape of ", leader.name(), ", ", leader.shape(),
               ", got ", rows.shape());
  rows.require(rows.dtype() == leader.dtype(), "have the dtype of ", leader.name(), ", ",
               dtype_name(leader.dtype()), ", got ", dtype_name(rows.dtype()));
  rows.require_dense_rows();
}

Arg checked_rows(Arg rows) {
  rows.kernel_dtype(/*allow_8bit=*/false);
  check_rows(rows, rows);
  return rows;
}

void check_heads(const Arg& rows, const PagedShape& shape) {
  rows.require(rows.size(1) == shape.num_kv_heads, "have key_cache's ", shape.num_kv_heads,
               " KV heads, got ", rows.shape());
}

Tensor cumulative_sum(const Tensor& lens) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(lens),
                                    torch::stable::detail::from(int64_t{0}),
                                    torch::stable::detail::from(std::optional(ScalarType::Long))};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::cumsum", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::contiguous(torch::stable::detail::to<Tensor>(stack[0]));
}

void check_slots(const Arg& slots, const PagedShape& shape) {
  if (!device::checks_values()) return;
  const Tensor host = device::to_host(slots.tensor());
  const int64_t num_slots = shape.num_blocks * shape.block_size;
  for (int64_t i = 0; i < slots.size(0); ++i) {
    const int64_t slot = slots.index_at(host, i);
    slots.require(slot < num_slots, "name slots of a pool of ", num_slots,
                  " (negative ones are skipped), got ", slot, " at ", i);
  }
}

// Scales that are written have memory of their own.
void check_computed(const char* op, const ScaleArg& k_scale, bool compute_k,
                    const ScaleArg& v_scale, bool compute_v) {
  if (!compute_k || !compute_v) return;
  Arg(op, k_scale.name, *k_scale.tensor).require_apart_from(Arg(op, v_scale.name, *v_scale.tensor));
}

}  // namespace

CacheWrite::CacheWrite(Arg key, Arg value, Tensor key_cache, Tensor value_cache,
                       const ScaleArg& k_scale, const ScaleArg& v_scale)
    : key_(checked_rows(std::move(key))),
      value_(std::move(value)),
      pools_(key_.op(), std::move(key_cache), std::move(value_cache), key_, key_.size(2),
             key_.dtype()) {
  check_rows(value_, key_);
  check_heads(key_, pools_.shape);
  for (const Arg* pool : {&pools_.key, &pools_.value}) {
    pool->require_no_overlap();
    pool->require_apart_from(key_);
    pool->require_apart_from(value_);
  }
  // The same rows may be written twice to the same places.
  if (!pools_.key.is_same_view(pools_.value) || !key_.is_same_view(value_)) {
    pools_.key.require_apart_from(pools_.value);
  }
  params_ = {.key = rows_view(key_),
             .value = rows_view(value_),
             .key_cache = pool_view(pools_.key),
             .value_cache = pool_view(pools_.value),
             .shape = pools_.shape,
             .input_dtype = key_.kernel_dtype(/*allow_8bit=*/false),
             .kv_dtype = pools_.dtype,
             .vector_aligned = pools_.vector_aligned()};
  params_.k_scale = scale_view(k_scale, pools_, key_, ScaleUse::kCompute, &params_.compute_k_scale);
  params_.v_scale = scale_view(v_scale, pools_, key_, ScaleUse::kCompute, &params_.compute_v_scale);
  check_computed(key_.op(), k_scale, params_.compute_k_scale, v_scale, params_.compute_v_scale);
}

void CacheWrite::set_slots(const Arg& slots) {
  slots.require_on_device_of(key_);
  slots.require_index();
  slots.require(slots.rank() == 1 && slots.size(0) <= key_.size(0), "be [n] with n at most ",
                key_.name(), "'s ", key_.size(0), " tokens, got ", slots.shape());
  check_slots(slots, pools_.shape);
  params_.num_tokens = slots.size(0);
  if (params_.num_tokens == 0) return;
  const device::Scope scope(key_.tensor());
  slots_ = as_contiguous_int64(slots);
  params_.slot_mapping = static_cast<const int64_t*>(slots_->data_ptr());
}

void CacheWrite::run() const {
  if (params_.num_tokens == 0) return;
  const device::Scope scope(key_.tensor());
  backend::write_cache(params_, scope.stream());
}

void reshape_and_cache(StableIValue* stack, uint64_t /*num_args*/, uint64_t /*num_outputs*/) {
  constexpr const char* op = "reshape_and_cache";
  Reader in(stack);
  Arg key(op, "key", in.tensor());
  Arg value(op, "value", in.tensor());
  Tensor key_cache = in.tensor();
  Tensor value_cache = in.tensor();
  const Arg slots(op, "slot_mapping", in.tensor());
  ScaleArg k_scale{.name = "k_scale", .tensor = in.optional_tensor()};
  ScaleArg v_scale{.name = "v_scale", .tensor = in.optional_tensor()};
  k_scale.value = in.optional_float();
  v_scale.value = in.optional_float();
  CacheWrite write(std::move(key), std::move(value), std::move(key_cache), std::move(value_cache),
                   k_scale, v_scale);
  write.set_slots(slots);
  write.run();
}

void gather_cache(StableIValue* stack, uint64_t /*num_args*/, uint64_t /*num_outputs*/) {
  constexpr const char* op = "gather_cache";
  Reader in(stack);
  Tensor key_cache = in.tensor();
  Tensor value_cache = in.tensor();
  Tensor block_tables = in.tensor();
  const Tensor lens = in.tensor();
  ScaleArg k_scale{.name = "k_scale", .tensor = in.optional_tensor()};
  ScaleArg v_scale{.name = "v_scale", .tensor = in.optional_tensor()};
  k_scale.value = in.optional_float();
  v_scale.value = in.optional_float();
  const auto requested_dtype = in.get<std::optional<ScalarType>>();
  const int64_t total_tokens = in.get<int64_t>();

  const Arg leader(op, "key_cache", key_cache);
  leader.require_on_device_of(leader);
  leader.require_pool();
  const Pools pools(op, std::move(key_cache), std::move(value_cache), leader, leader.size(3),
                    leader.dtype());
  const Arg lens_arg(op, "seq_lens", lens);
  lens_arg.require(lens_arg.rank() == 1, "be [num_seqs], got ", lens_arg.shape());
  const PagedSequences sequences(op, std::move(block_tables), lens, lens_arg.size(0), pools,
                                 leader);
  const ScalarType dtype =
      requested_dtype.value_or(is_8bit(pools.dtype) ? ScalarType::Float : leader.dtype());
  const std::optional<DType> output_dtype = row_dtype(dtype);
  if (!output_dtype) {
    fail(op, ": dtype must be float16, bfloat16 or float32, got ", dtype_name(dtype));
  }
  if (total_tokens < 0) fail(op, ": total_tokens must not be negative, got ", total_tokens);
  if (device::checks_values()) {
    int64_t sum = 0;
    const Tensor host = device::to_host(lens);
    for (int64_t i = 0; i < lens_arg.size(0); ++i) sum += lens_arg.index_at(host, i);
    if (total_tokens < sum) {
      fail(op, ": total_tokens must be at least the sum of seq_lens, ", sum, ", got ",
           total_tokens);
    }
  }
  GatherParams params{
      .key_cache = pool_view(pools.key),
      .value_cache = pool_view(pools.value),
      .k_scale = scale_view(k_scale, pools, leader, ScaleUse::kRead),
      .v_scale = scale_view(v_scale, pools, leader, ScaleUse::kRead),
      .block_tables = sequences.tables,
      .shape = pools.shape,
      .kv_dtype = pools.dtype,
      .output_dtype = *output_dtype,
      .num_tokens = total_tokens,
      .num_seqs = lens_arg.size(0),
      .vector_aligned = pools.vector_aligned(),
  };

  const device::Scope scope(leader.tensor());
  const std::array<int64_t, 3> size{total_tokens, leader.size(2), leader.size(3)};
  const Tensor key = torch::stable::new_empty(lens, {size.data(), size.size()}, dtype);
  const Tensor value = torch::stable::new_empty(lens, {size.data(), size.size()}, dtype);
  if (total_tokens > 0) {
    params.key = rows_view(Arg(op, "key", key));
    params.value = rows_view(Arg(op, "value", value));
    const Tensor seq_ends = cumulative_sum(lens);
    params.seq_ends = static_cast<const int64_t*>(seq_ends.data_ptr());
    backend::gather_cache(params, scope.stream());
  }
  stack[0] = torch::stable::detail::from(key);
  stack[1] = torch::stable::detail::from(value);
}

}  // namespace paged_attn
