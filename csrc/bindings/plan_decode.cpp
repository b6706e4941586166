// plan_decode: checks, then the backend's planner.
#include <torch/csrc/stable/ops.h>

#include <limits>
#include <optional>

#include "backend.h"
#include "bindings/arg.h"
#include "bindings/device.h"
#include "bindings/ops.h"
#include "bindings/reader.h"

namespace paged_attn {

void plan_decode(StableIValue* stack, uint64_t /*num_args*/, uint64_t /*num_outputs*/) {
  constexpr const char* op = "plan_decode";
  Reader in(stack);
  const Arg plan(op, "plan", in.tensor());
  const Arg lens(op, "seq_lens", in.tensor());
  const std::optional<Tensor> cu = in.optional_tensor();
  const int64_t num_tokens = in.get<int64_t>();
  const int32_t num_q_heads = checked_count(op, "num_q_heads", in.get<int64_t>());
  const int32_t num_kv_heads = checked_count(op, "num_kv_heads", in.get<int64_t>());
  const int32_t head_dim = checked_count(op, "head_dim", in.get<int64_t>());
  const int32_t query_len = checked_count(op, "query_len", in.get<int64_t>());
  const bool causal = in.get<bool>();
  const int32_t sliding_window = checked_count(op, "sliding_window", in.optional_int());
  const int32_t kv_bytes = checked_count(op, "kv_bytes", in.get<int64_t>());

  lens.require_on_device_of(lens);
  lens.require_index();
  lens.require(lens.rank() == 1, "be [num_seqs], got ", lens.shape());
  plan.require_on_device_of(lens);
  plan.require(plan.dtype() == ScalarType::Int && plan.has_shape({backend::kPlanWords}) &&
                   plan.tensor().is_contiguous(),
               "be a contiguous int32 tensor of ", backend::kPlanWords, " elements, got ",
               plan.shape());
  if (num_q_heads % num_kv_heads != 0) {
    fail(op, ": num_q_heads must be a multiple of num_kv_heads, ", num_kv_heads, ", got ",
         num_q_heads);
  }
  const Tensor dense_lens = as_contiguous_int32(lens);
  DecodeParams params{};
  // Lengths are taken as they are; a call holds them to its table.
  params.block_tables.max_blocks = std::numeric_limits<int32_t>::max();
  params.shape = {
      .num_blocks = 0, .block_size = 1, .num_kv_heads = num_kv_heads, .head_dim = head_dim};
  params.seq_lens = static_cast<const int32_t*>(dense_lens.data_ptr());
  params.num_seqs = lens.size(0);
  params.query_len = query_len;
  params.num_tokens = params.num_seqs * query_len;
  params.num_q_heads = num_q_heads;
  params.causal = causal;
  params.sliding_window = sliding_window;
  std::optional<Tensor> dense_cu;
  if (cu) {
    const Arg arg(op, "cu_query_lens", *cu);
    arg.require_on_device_of(lens);
    arg.require_index();
    arg.require(arg.has_shape({params.num_seqs + 1}), "be [num_seqs + 1], (", params.num_seqs + 1,
                ",), got ", arg.shape());
    dense_cu = as_contiguous_int32(arg);
    params.cu_query_lens = static_cast<const int32_t*>(dense_cu->data_ptr());
    params.query_len = 1;
    params.num_tokens = num_tokens;
  }
  if (params.num_tokens == 0) return;
  const device::Scope scope(lens.tensor());
  backend::make_plan(params, kv_bytes, plan.data<int32_t>(), scope.stream());
}

}  // namespace paged_attn
