#include "bindings/ops.h"

namespace paged_attn {
namespace {

struct Op {
  const char* name;
  const char* schema;
  BoxedKernel* body;
};

// All ops but gather_cache, whose result is new, write into tensors that their caller gives and
// return nothing: no output ever aliases an input, and the schema says what is mutated.
constexpr Op kOps[] = {
    {"paged_attention",
     "paged_attention(Tensor(a!) out, Tensor(b!)? lse, Tensor query, Tensor key_cache, "
     "Tensor value_cache, Tensor block_tables, Tensor seq_lens, Tensor? cu_query_lens, "
     "float? scale, bool causal, int? sliding_window, float? softcap, Tensor? alibi_slopes, "
     "Tensor? sinks, Tensor? k_scale, Tensor? v_scale, float? k_scale_value, "
     "float? v_scale_value, int? chunk_size, Tensor(c!)? plan, int plan_kv_bytes) -> ()",
     paged_attention},
    {"flash_attn_with_kvcache",
     "flash_attn_with_kvcache(Tensor(a!) out, Tensor(b!)? lse, Tensor q, Tensor k, Tensor v, "
     "Tensor(c!) k_cache, Tensor(d!) v_cache, Tensor block_table, Tensor cache_seqlens, "
     "float? softmax_scale, bool causal, int? sliding_window, float? softcap, "
     "Tensor? alibi_slopes) -> ()",
     flash_attn_with_kvcache},
    {"plan_decode",
     "plan_decode(Tensor(a!) plan, Tensor seq_lens, Tensor? cu_query_lens, int num_tokens, "
     "int num_q_heads, int num_kv_heads, int head_dim, int query_len, bool causal, "
     "int? sliding_window, int kv_bytes) -> ()",
     plan_decode},
    {"merge_states",
     "merge_states(Tensor(a!) out, Tensor(b!) lse, Tensor out_a, Tensor lse_a, Tensor out_b, "
     "Tensor lse_b) -> ()",
     merge_states},
    {"reshape_and_cache",
     "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
     "Tensor slot_mapping, Tensor(c!)? k_scale, Tensor(d!)? v_scale, float? k_scale_value, "
     "float? v_scale_value) -> ()",
     reshape_and_cache},
    {"gather_cache",
     "gather_cache(Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, "
     "Tensor? k_scale, Tensor? v_scale, float? k_scale_value, float? v_scale_value, "
     "ScalarType? dtype, SymInt total_tokens) -> (Tensor, Tensor)",
     gather_cache},
    {"copy_blocks",
     "copy_blocks(Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, Tensor block_mapping) -> ()",
     copy_blocks},
    {"swap_blocks", "swap_blocks(Tensor src, Tensor(a!) dst, Tensor block_mapping) -> ()",
     swap_blocks},
};

}  // namespace

void define_ops(torch::stable::detail::StableLibrary& library) {
  for (const Op& op : kOps) library.def(op.schema);
}

void implement_ops(torch::stable::detail::StableLibrary& library) {
  for (const Op& op : kOps) library.impl(op.name, op.body);
}

}  // namespace paged_attn
