// paged_attention and merge_states: checks, then the backend's kernels.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "backend.h"
#include "bindings/arg.h"
#include "bindings/device.h"
#include "bindings/ops.h"
#include "bindings/paged.h"
#include "bindings/reader.h"

namespace paged_attn {
namespace {

constexpr const char* kOp = "paged_attention";

struct AttentionArgs {
  Tensor out;
  std::optional<Tensor> lse;
  Tensor query;
  Tensor key_cache;
  Tensor value_cache;
  Tensor block_tables;
  Tensor seq_lens;
  std::optional<Tensor> cu_query_lens;
  std::optional<double> scale;
  bool causal;
  std::optional<int64_t> sliding_window;
  std::optional<double> softcap;
  std::optional<Tensor> alibi_slopes;
  std::optional<Tensor> sinks;
  std::optional<Tensor> k_scale;
  std::optional<Tensor> v_scale;
  std::optional<double> k_scale_value;
  std::optional<double> v_scale_value;
  std::optional<int64_t> chunk_size;
};

AttentionArgs read_args(StableIValue* stack) {
  Reader in(stack);
  return {.out = in.tensor(),
          .lse = in.optional_tensor(),
          .query = in.tensor(),
          .key_cache = in.tensor(),
          .value_cache = in.tensor(),
          .block_tables = in.tensor(),
          .seq_lens = in.tensor(),
          .cu_query_lens = in.optional_tensor(),
          .scale = in.optional_float(),
          .causal = in.get<bool>(),
          .sliding_window = in.optional_int(),
          .softcap = in.optional_float(),
          .alibi_slopes = in.optional_tensor(),
          .sinks = in.optional_tensor(),
          .k_scale = in.optional_tensor(),
          .v_scale = in.optional_tensor(),
          .k_scale_value = in.optional_float(),
          .v_scale_value = in.optional_float(),
          .chunk_size = in.optional_int()};
}

// A query may be [num_seqs, heads, d], [num_seqs, query_len, heads, d] or, ragged,
// [num_tokens, heads, d].
struct QueryShape {
  int64_t num_seqs;
  int64_t query_len;  // 1 where ragged
  int64_t num_tokens;
  int64_t num_heads;
  int64_t head_dim;
};

QueryShape query_shape(const Arg& query, const std::optional<Arg>& cu_query_lens) {
  if (cu_query_lens) {
    query.require(query.rank() == 3,
                  "be [num_tokens, num_q_heads, head_dim] with cu_query_lens, got ", query.shape());
    cu_query_lens->require(cu_query_lens->rank() == 1 && cu_query_lens->size(0) >= 1,
                           "be [num_seqs + 1], got ", cu_query_lens->shape());
    return {.num_seqs = cu_query_lens->size(0) - 1,
            .query_len = 1,
            .num_tokens = query.size(0),
            .num_heads = query.size(1),
            .head_dim = query.size(2)};
  }
  query.require(query.rank() == 3 || query.rank() == 4,
                "be [num_seqs, num_q_heads, head_dim] or [num_seqs, query_len, num_q_heads, "
                "head_dim], got ",
                query.shape());
  const int64_t query_len = query.rank() == 4 ? query.size(1) : 1;
  return {.num_seqs = query.size(0),
          .query_len = query_len,
          .num_tokens = query.size(0) * query_len,
          .num_heads = query.size(query.rank() - 2),
          .head_dim = query.size(query.rank() - 1)};
}

// With one token a sequence the token is found by its index, ragged or not.
RowsView rows_view(const Arg& rows) {
  const bool four = rows.rank() == 4;
  return {.data = rows.data<void>(),
          .seq_stride = four ? rows.stride(0) : 0,
          .token_stride = four ? rows.stride(1) : rows.stride(0),
          .head_stride = rows.stride(rows.rank() - 2)};
}

const float* per_head(const char* name, const std::optional<Tensor>& tensor, const Arg& query,
                      int64_t num_heads, std::optional<Tensor>& keep) {
  if (!tensor) return nullptr;
  const Arg arg(kOp, name, *tensor);
  arg.require_on_device_of(query);
  arg.require(arg.dtype() == ScalarType::Float, "be float32, got ", dtype_name(arg.dtype()));
  arg.require(arg.has_shape({num_heads}), "be [num_q_heads], (", num_heads, ",), got ",
              arg.shape());
  keep = torch::stable::contiguous(arg.tensor());
  return static_cast<const float*>(keep->data_ptr());
}

void check_cu_query_lens(const Arg& cu, int64_t num_tokens) {
  if (!device::checks_values()) return;
  const Tensor host = device::to_host(cu.tensor());
  cu.require(cu.index_at(host, 0) == 0, "start with 0, got ", cu.index_at(host, 0));
  for (int64_t i = 1; i < cu.size(0); ++i) {
    cu.require(cu.index_at(host, i) >= cu.index_at(host, i - 1), "never decrease, got ",
               cu.index_at(host, i - 1), " then ", cu.index_at(host, i), " at ", i);
  }
  const int64_t last = cu.index_at(host, cu.size(0) - 1);
  cu.require(last <= num_tokens, "end within query's ", num_tokens, " tokens, got ", last);
}

void check_results(const Arg& out, const std::optional<Arg>& lse, const Arg& query) {
  out.require_on_device_of(query);
  out.require(out.same_shape(query), "have the shape of query, ", query.shape(), ", got ",
              out.shape());
  out.require(out.dtype() == query.dtype(), "have the dtype of query, ", dtype_name(query.dtype()),
              ", got ", dtype_name(out.dtype()));
  out.require_dense_rows();
  out.require_no_overlap();
  if (!lse) return;
  lse->require_on_device_of(query);
  bool fits = lse->rank() == query.rank() - 1;
  for (int64_t i = 0; fits && i < lse->rank(); ++i) fits = lse->size(i) == query.size(i);
  lse->require(fits, "have the shape of query without head_dim, got ", lse->shape());
  lse->require(lse->dtype() == ScalarType::Float && lse->tensor().is_contiguous(),
               "be a contiguous float32 tensor, got ", dtype_name(lse->dtype()));
}

float checked_scale(const AttentionArgs& args, int64_t head_dim) {
  const double scale = args.scale.value_or(1.0 / std::sqrt(static_cast<double>(head_dim)));
  if (!std::isfinite(scale)) fail(kOp, ": scale must be finite, got ", scale);
  return static_cast<float>(scale);
}

// 0 stands for "off" in kernels.
float checked_softcap(const AttentionArgs& args) {
  if (!args.softcap) return 0.f;
  if (!(*args.softcap > 0 && std::isfinite(*args.softcap))) {
    fail(kOp, ": softcap must be positive and finite, or None for none, got ", *args.softcap);
  }
  return static_cast<float>(*args.softcap);
}

int32_t checked_count(const char* name, std::optional<int64_t> count) {
  if (!count) return 0;
  if (*count < 1) fail(kOp, ": ", name, " must be at least 1, or None for none, got ", *count);
  return static_cast<int32_t>(std::min<int64_t>(*count, std::numeric_limits<int32_t>::max()));
}

}  // namespace

void paged_attention(StableIValue* stack, uint64_t /*num_args*/, uint64_t /*num_outputs*/) {
  const AttentionArgs args = read_args(stack);
  const auto named = [](const char* name, const std::optional<Tensor>& tensor) {
    return tensor ? std::optional<Arg>(Arg(kOp, name, *tensor)) : std::nullopt;
  };
  const Arg query(kOp, "query", args.query);
  const Arg out(kOp, "out", args.out);
  const std::optional<Arg> lse = named("lse", args.lse);
  const std::optional<Arg> cu_query_lens = named("cu_query_lens", args.cu_query_lens);

  query.require_on_device_of(query);
  const DType query_dtype = query.kernel_dtype(/*allow_8bit=*/false);
  const QueryShape shape = query_shape(query, cu_query_lens);
  query.require_dense_rows();
  const Pools pools(kOp, args.key_cache, args.value_cache, query, shape.head_dim, query.dtype());
  query.require(shape.num_heads % pools.shape.num_kv_heads == 0, "have a multiple of key_cache's ",
                pools.shape.num_kv_heads, " KV heads, got ", shape.num_heads, " heads");
  const PagedSequences sequences(kOp, args.block_tables, args.seq_lens, shape.num_seqs, pools,
                                 query);
  std::optional<Tensor> cu_tensor;
  if (cu_query_lens) {
    cu_query_lens->require_on_device_of(query);
    cu_query_lens->require_index();
    check_cu_query_lens(*cu_query_lens, shape.num_tokens);
    cu_tensor = as_contiguous_int32(*cu_query_lens);
  }
  check_results(out, lse, query);
  std::optional<Tensor> slopes_tensor, sinks_tensor, partial;

  DecodeParams params{
      .query = rows_view(query),
      .out = rows_view(out),
      .lse = lse ? lse->data<float>() : nullptr,
      .key_cache = pool_view(pools.key),
      .value_cache = pool_view(pools.value),
      .k_scale =
          scale_view({"k_scale", args.k_scale, args.k_scale_value}, pools, query, ScaleUse::kRead),
      .v_scale =
          scale_view({"v_scale", args.v_scale, args.v_scale_value}, pools, query, ScaleUse::kRead),
      .block_tables = sequences.tables,
      .seq_lens = static_cast<const int32_t*>(sequences.seq_lens.data_ptr()),
      .cu_query_lens = cu_tensor ? static_cast<const int32_t*>(cu_tensor->data_ptr()) : nullptr,
      .alibi_slopes =
          per_head("alibi_slopes", args.alibi_slopes, query, shape.num_heads, slopes_tensor),
      .sinks = per_head("sinks", args.sinks, query, shape.num_heads, sinks_tensor),
      .shape = pools.shape,
      .query_dtype = query_dtype,
      .kv_dtype = pools.dtype,
      .num_tokens = shape.num_tokens,
      .num_seqs = shape.num_seqs,
      .query_len = static_cast<int32_t>(shape.query_len),
      .num_q_heads = static_cast<int32_t>(shape.num_heads),
      .scale = checked_scale(args, shape.head_dim),
      .softcap = checked_softcap(args),
      .sliding_window = checked_count("sliding_window", args.sliding_window),
      .causal = args.causal,
      .vector_aligned = pools.vector_aligned(),
  };
  const int32_t requested_chunk = checked_count("chunk_size", args.chunk_size);
  if (params.num_tokens == 0 || params.num_q_heads == 0) return;

  const device::Scope scope(args.query);
  const backend::ChunkPlan plan = backend::plan_chunks(params, requested_chunk);
  params.chunk_size = plan.chunk_size;
  params.max_chunks = plan.max_chunks;
  if (plan.partials) {
    const int64_t rows = params.num_tokens * params.num_q_heads * plan.max_chunks;
    const std::array<int64_t, 1> size{rows * (shape.head_dim + 1)};
    partial = torch::stable::new_empty(args.query, {size.data(), size.size()}, ScalarType::Float);
    params.partial_out = static_cast<float*>(partial->data_ptr());
    params.partial_lse = params.partial_out + rows * shape.head_dim;
  }
  backend::decode(params, scope.stream());
}

void merge_states(StableIValue* stack, uint64_t /*num_args*/, uint64_t /*num_outputs*/) {
  Reader in(stack);
  const char* op = "merge_states";
  const Arg out(op, "out", in.tensor());
  const Arg lse(op, "lse", in.tensor());
  const Arg out_a(op, "out_a", in.tensor());
  const Arg lse_a(op, "lse_a", in.tensor());
  const Arg out_b(op, "out_b", in.tensor());
  const Arg lse_b(op, "lse_b", in.tensor());

  const DType dtype = out_a.kernel_dtype(/*allow_8bit=*/false);
  out_a.require(out_a.rank() >= 1, "be [..., head_dim], got ", out_a.shape());
  for (const Arg* arg : {&out_a, &out_b, &out}) {
    arg->require_on_device_of(out_a);
    arg->require(arg->same_shape(out_a), "have the shape of out_a, ", out_a.shape(), ", got ",
                 arg->shape());
    arg->require(arg->dtype() == out_a.dtype(), "have the dtype of out_a, ",
                 dtype_name(out_a.dtype()), ", got ", dtype_name(arg->dtype()));
  }
  for (const Arg* arg : {&lse_a, &lse_b, &lse}) {
    arg->require_on_device_of(out_a);
    bool fits = arg->rank() == out_a.rank() - 1;
    for (int64_t i = 0; fits && i < arg->rank(); ++i) fits = arg->size(i) == out_a.size(i);
    arg->require(fits, "have the shape of out_a without head_dim, ", out_a.shape(), ", got ",
                 arg->shape());
    arg->require(arg->dtype() == ScalarType::Float, "be float32, got ", dtype_name(arg->dtype()));
  }
  out.require(out.tensor().is_contiguous(), "be contiguous");
  lse.require(lse.tensor().is_contiguous(), "be contiguous");

  const int64_t head_dim = out_a.size(out_a.rank() - 1);
  out_a.require(head_dim >= 1 && head_dim <= std::numeric_limits<int32_t>::max(),
                "have a head_dim of at least 1, got ", out_a.shape());
  if (out_a.numel() == 0) return;
  const device::Scope scope(out_a.tensor());
  const Tensor a = torch::stable::contiguous(out_a.tensor());
  const Tensor b = torch::stable::contiguous(out_b.tensor());
  const Tensor dense_lse_a = torch::stable::contiguous(lse_a.tensor());
  const Tensor dense_lse_b = torch::stable::contiguous(lse_b.tensor());
  backend::merge_states({.out = out.data<void>(),
                         .lse = lse.data<float>(),
                         .out_a = a.data_ptr(),
                         .lse_a = static_cast<const float*>(dense_lse_a.data_ptr()),
                         .out_b = b.data_ptr(),
                         .lse_b = static_cast<const float*>(dense_lse_b.data_ptr()),
                         .dtype = dtype,
                         .num_rows = out_a.numel() / head_dim,
                         .head_dim = static_cast<int32_t>(head_dim)},
                        scope.stream());
}

}  // namespace paged_attn
