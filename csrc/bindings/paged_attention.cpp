// paged_attention, alone and after a write of new tokens: checks, then the backend's kernels.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>

#include "backend.h"
#include "bindings/arg.h"
#include "bindings/cache_write.h"
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
  std::optional<Tensor> plan;
  int64_t plan_kv_bytes;
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
          .chunk_size = in.optional_int(),
          .plan = in.optional_tensor(),
          .plan_kv_bytes = in.get<int64_t>()};
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

// A query of three dimensions has query_len 1, ragged or not: its tokens are found as sequences.
RowsView rows_view(const Arg& rows) {
  return {.data = rows.data<void>(),
          .seq_stride = rows.stride(0),
          .token_stride = rows.rank() == 4 ? rows.stride(1) : 0,
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

// `host` has their values, where those are checked.
void check_cu_query_lens(const Arg& cu, const std::optional<Tensor>& values, int64_t num_tokens) {
  if (!values) return;
  const Tensor& host = *values;
  cu.require(cu.index_at(host, 0) == 0, "start with 0, got ", cu.index_at(host, 0));
  for (int64_t i = 1; i < cu.size(0); ++i) {
    cu.require(cu.index_at(host, i) >= cu.index_at(host, i - 1), "never decrease, got ",
               cu.index_at(host, i - 1), " then ", cu.index_at(host, i), " at ", i);
  }
  const int64_t last = cu.index_at(host, cu.size(0) - 1);
  cu.require(last <= num_tokens, "end within query's ", num_tokens, " tokens, got ", last);
}

// A row of the output is written when its query has been read: they may be one tensor, but not
// overlap otherwise.
void check_results(const Arg& out, const std::optional<Arg>& lse, const Arg& query,
                   const Pools& pools) {
  out.require_on_device_of(query);
  out.require(out.same_shape(query), "have the shape of query, ", query.shape(), ", got ",
              out.shape());
  out.require(out.dtype() == query.dtype(), "have the dtype of query, ", dtype_name(query.dtype()),
              ", got ", dtype_name(out.dtype()));
  out.require_dense_rows();
  out.require_no_overlap();
  if (!out.is_same_view(query)) out.require_apart_from(query);
  out.require_apart_from(pools.key);
  out.require_apart_from(pools.value);
  if (!lse) return;
  lse->require_on_device_of(query);
  lse->require(lse->one_per_row_of(query), "have the shape of query without head_dim, got ",
               lse->shape());
  lse->require(lse->dtype() == ScalarType::Float && lse->tensor().is_contiguous(),
               "be a contiguous float32 tensor, got ", dtype_name(lse->dtype()));
}

float checked_scale(const AttentionArgs& args, int64_t head_dim) {
  const double scale = args.scale.value_or(1.0 / std::sqrt(static_cast<double>(head_dim)));
  if (!std::isfinite(static_cast<float>(scale))) {
    fail(kOp, ": scale must be finite in float32, got ", scale);
  }
  return static_cast<float>(scale);
}

// 0 stands for "off" in kernels.
float checked_softcap(const AttentionArgs& args) {
  if (!args.softcap) return 0.f;
  if (!is_positive_float(*args.softcap)) {
    fail(kOp, ": softcap must be positive and finite in float32, or None for none, got ",
         *args.softcap);
  }
  return static_cast<float>(*args.softcap);
}

// The arguments as kernels take them, with what keeps their memory alive.
struct Call {
  DecodeParams params;
  PagedSequences sequences;
  std::optional<Tensor> cu_query_lens;
  std::optional<Tensor> alibi_slopes;
  std::optional<Tensor> sinks;
};

std::optional<Arg> named(const char* name, const std::optional<Tensor>& tensor) {
  return tensor ? std::optional<Arg>(Arg(kOp, name, *tensor)) : std::nullopt;
}

void set_tensors(Call& call, const AttentionArgs& args, const Arg& query, const Pools& pools,
                 const QueryShape& shape, const std::optional<Arg>& cu_query_lens) {
  DecodeParams& params = call.params;
  params.query = rows_view(query);
  params.key_cache = pool_view(pools.key);
  params.value_cache = pool_view(pools.value);
  params.k_scale = scale_view({"k_scale", args.k_scale, args.k_scale_value}, pools, query,
                              ScaleUse::kRead, nullptr, params.scale);
  params.v_scale =
      scale_view({"v_scale", args.v_scale, args.v_scale_value}, pools, query, ScaleUse::kRead);
  params.block_tables = call.sequences.tables;
  params.seq_lens = static_cast<const int32_t*>(call.sequences.seq_lens.data_ptr());
  if (cu_query_lens) {
    call.cu_query_lens = as_contiguous_int32(*cu_query_lens);
    params.cu_query_lens = static_cast<const int32_t*>(call.cu_query_lens->data_ptr());
  }
  params.alibi_slopes =
      per_head("alibi_slopes", args.alibi_slopes, query, shape.num_heads, call.alibi_slopes);
  params.sinks = per_head("sinks", args.sinks, query, shape.num_heads, call.sinks);
}

void set_numbers(DecodeParams& params, const AttentionArgs& args, const Pools& pools,
                 const QueryShape& shape) {
  params.shape = pools.shape;
  params.kv_dtype = pools.dtype;
  params.num_tokens = shape.num_tokens;
  params.num_seqs = shape.num_seqs;
  params.query_len = static_cast<int32_t>(shape.query_len);
  params.num_q_heads = static_cast<int32_t>(shape.num_heads);
  params.causal = args.causal;
  params.vector_aligned = pools.vector_aligned();
}

Tensor new_words(const Tensor& like, int64_t count, ScalarType dtype) {
  const std::array<int64_t, 1> size{count};
  return torch::stable::new_empty(like, {size.data(), size.size()}, dtype);
}

void check_plan(const Arg& plan, const Arg& query) {
  plan.require_on_device_of(query);
  plan.require(plan.dtype() == ScalarType::Int && plan.has_shape({backend::kPlanWords}) &&
                   plan.tensor().is_contiguous(),
               "be int32 [", backend::kPlanWords, "] from plan_decode, got ", plan.shape());
}

// Gives the backend the plan and the workspace that it needs, and runs it.
void run(const DecodeParams& params, const Tensor& query, int32_t chunk_size,
         const std::optional<Arg>& given_plan, int32_t plan_kv_bytes) {
  const device::Scope scope(query);
  const int32_t kv_bytes = given_plan ? plan_kv_bytes : element_size(params.kv_dtype);
  const backend::DecodeNeeds needs = backend::decode_needs(params, chunk_size, kv_bytes);
  std::optional<Tensor> plan, workspace;
  int32_t* plan_words = given_plan ? given_plan->data<int32_t>() : nullptr;
  if (needs.plan && plan_words == nullptr) {
    plan = new_words(query, backend::kPlanWords, ScalarType::Int);
    plan_words = static_cast<int32_t*>(plan->data_ptr());
    backend::make_plan(params, kv_bytes, plan_words, scope.stream());
  }
  if (needs.workspace_floats > 0) {
    workspace = new_words(query, needs.workspace_floats, ScalarType::Float);
  }
  backend::decode({.params = params,
                   .chunk_size = chunk_size,
                   .plan = plan_words,
                   .plan_kv_bytes = kv_bytes,
                   .workspace = workspace ? static_cast<float*>(workspace->data_ptr()) : nullptr},
                  scope.stream());
}

// A call whose arguments are checked.
struct Prepared {
  Tensor query;
  Call call;
  int32_t chunk_size;
  std::optional<Arg> plan;
  int32_t plan_kv_bytes;

  void run() const {
    if (call.params.num_tokens > 0 && call.params.num_q_heads > 0) {
      paged_attn::run(call.params, query, chunk_size, plan, plan_kv_bytes);
    }
  }
};

// `new_len` of each sequence's tokens are written before.
Prepared prepare(const AttentionArgs& args, int64_t new_len) {
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
  TouchedTokens touched{
      .query_len = shape.query_len,
      .cu_query_lens = cu_query_lens,
      .sliding_window = checked_count(kOp, "sliding_window", args.sliding_window),
      .new_len = new_len,
  };
  if (cu_query_lens) {
    cu_query_lens->require_on_device_of(query);
    cu_query_lens->require_index();
    if (device::checks_values()) {
      touched.host_cu_query_lens = device::to_host(cu_query_lens->tensor());
    }
    check_cu_query_lens(*cu_query_lens, touched.host_cu_query_lens, shape.num_tokens);
  }
  Prepared prepared{.query = args.query,
                    .call = {.params = {.scale = checked_scale(args, shape.head_dim),
                                        .softcap = checked_softcap(args),
                                        .sliding_window = touched.sliding_window},
                             .sequences = PagedSequences(kOp, args.block_tables, args.seq_lens,
                                                         shape.num_seqs, pools, query, touched)}};
  DecodeParams& params = prepared.call.params;
  set_tensors(prepared.call, args, query, pools, shape, cu_query_lens);
  set_numbers(params, args, pools, shape);
  prepared.chunk_size = args.chunk_size == backend::kAutoChunk
                            ? backend::kAutoChunk
                            : checked_count(kOp, "chunk_size", args.chunk_size);
  prepared.plan = named("plan", args.plan);
  prepared.plan_kv_bytes = checked_count(kOp, "plan_kv_bytes", args.plan_kv_bytes);
  if (prepared.plan) check_plan(*prepared.plan, query);
  check_results(out, lse, query, pools);
  params.query_dtype = query_dtype;
  params.out = rows_view(out);
  params.lse = lse ? lse->data<float>() : nullptr;
  return prepared;
}

constexpr const char* kFlashAttn = "flash_attn_with_kvcache";

// Where the new tokens go, and the lengths with them.
struct Appended {
  Tensor slots;     // int64 [num_seqs * new_len]
  Tensor seq_lens;  // int32 [num_seqs]
};

Appended append(const Arg& cached_lens, const Arg& block_table, const Arg& rows,
                const Pools& pools) {
  const int64_t num_seqs = rows.size(0), new_len = rows.size(1);
  for (const Arg* arg : {&cached_lens, &block_table}) {
    arg->require_on_device_of(rows);
    arg->require_index();
  }
  cached_lens.require(cached_lens.has_shape({num_seqs}), "be [", num_seqs, "], got ",
                      cached_lens.shape());
  block_table.require(block_table.rank() == 2 && block_table.size(0) == num_seqs, "be [", num_seqs,
                      ", max_blocks], got ", block_table.shape());
  const int64_t room = block_table.size(1) * pools.shape.block_size;
  if (device::checks_values()) {
    const Tensor host = device::to_host(cached_lens.tensor());
    for (int64_t seq = 0; seq < num_seqs; ++seq) {
      const int64_t length = cached_lens.index_at(host, seq);
      cached_lens.require(length >= 0, "not be negative, got ", length, " for sequence ", seq);
      cached_lens.require(length <= room - new_len, "be at most ", room, " with the ", new_len,
                          " new tokens, the room in block_table, got ", length, " for sequence ",
                          seq);
    }
  }
  const device::Scope scope(rows.tensor());
  const Tensor lens = as_contiguous_int32(cached_lens);
  const Tensor tables = as_int32(block_table);
  Appended appended{new_words(rows.tensor(), num_seqs * new_len, ScalarType::Long),
                    new_words(rows.tensor(), num_seqs, ScalarType::Int)};
  if (num_seqs == 0) return appended;
  backend::append_slots({.block_tables = {.data = static_cast<const int32_t*>(tables.data_ptr()),
                                          .seq_stride = tables.stride(0),
                                          .block_stride = tables.stride(1),
                                          .max_blocks = tables.size(1)},
                         .cached_lens = static_cast<const int32_t*>(lens.data_ptr()),
                         .slots = static_cast<int64_t*>(appended.slots.data_ptr()),
                         .seq_lens = static_cast<int32_t*>(appended.seq_lens.data_ptr()),
                         .num_seqs = num_seqs,
                         .new_len = static_cast<int32_t>(new_len),
                         .block_size = pools.shape.block_size},
                        scope.stream());
  return appended;
}

}  // namespace

void paged_attention(StableIValue* stack, uint64_t /*num_args*/, uint64_t /*num_outputs*/) {
  prepare(read_args(stack), 0).run();
}

void flash_attn_with_kvcache(StableIValue* stack, uint64_t /*num_args*/, uint64_t /*num_outputs*/) {
  Reader in(stack);
  AttentionArgs args{.out = in.tensor(), .lse = in.optional_tensor(), .query = in.tensor()};
  const Arg k(kFlashAttn, "k", in.tensor());
  const Arg v(kFlashAttn, "v", in.tensor());
  args.key_cache = in.tensor();
  args.value_cache = in.tensor();
  args.block_tables = in.tensor();
  const Arg cached_lens(kFlashAttn, "cache_seqlens", in.tensor());
  args.scale = in.optional_float();
  args.causal = in.get<bool>();
  args.sliding_window = in.optional_int();
  args.softcap = in.optional_float();
  args.alibi_slopes = in.optional_tensor();
  args.plan_kv_bytes = 2;

  const Arg query(kFlashAttn, "q", args.query);
  for (const Arg* rows : {&k, &v}) {
    rows->require(query.rank() == 4 && rows->rank() == 4 && rows->size(0) == query.size(0),
                  "be [batch, new_len, num_kv_heads, head_dim] with q's batch, got ",
                  rows->shape());
  }
  const Tensor key = torch::stable::flatten(k.tensor(), 0, 1);
  const Tensor value = torch::stable::flatten(v.tensor(), 0, 1);
  // Everything is checked before anything is written.
  CacheWrite write(Arg(kFlashAttn, "k", key), Arg(kFlashAttn, "v", value), args.key_cache,
                   args.value_cache, {.name = "k_scale"}, {.name = "v_scale"});
  const Appended appended =
      append(cached_lens, Arg(kFlashAttn, "block_table", args.block_tables), k, write.pools());
  args.seq_lens = appended.seq_lens;
  const Prepared attention = prepare(args, k.size(1));
  write.set_slots(Arg(kFlashAttn, "slots", appended.slots));
  write.run();
  attention.run();
}

}  // namespace paged_attn
