// Arguments that several ops share, from checked tensors to the views that kernels take.
#pragma once

#include <optional>

#include "bindings/arg.h"
#include "params.h"

namespace paged_attn {

// Key and value pools of one layer.
struct Pools {
  Arg key;
  Arg value;
  PagedShape shape;
  DType dtype;

  // Checks all of §pools: equal shapes and dtypes, dense rows, `leader`'s device and head_dim, and
  // a dtype that is `row_dtype` or one of 8 bits.
  Pools(const char* op, Tensor key_cache, Tensor value_cache, const Arg& leader,
        int64_t leader_head_dim, ScalarType row_dtype);

  // Whether 8 elements of every row can be moved in whole vectors.
  bool vector_aligned() const;
};

PoolView pool_view(const Arg& pool);

// The scale of K or of V as it was given: a tensor, a float, or neither.
struct ScaleArg {
  const char* name;
  std::optional<Tensor> tensor;
  std::optional<double> value;
};

enum class ScaleUse {
  kRead,    // every kind of scale is read
  kCompute  // a scale per token and head is computed and written
};

// Checks a scale against its pool. `per_token`, if given, tells whether it is one per token and
// head. `factor` is what it will be multiplied by.
ScaleView scale_view(const ScaleArg& scale, const Pools& pools, const Arg& leader, ScaleUse use,
                     bool* per_token = nullptr, float factor = 1.f);

// Which tokens of a sequence a call touches, where values are checked.
struct TouchedTokens {
  int64_t query_len = 0;  // of every sequence, unless ragged
  std::optional<Arg> cu_query_lens;
  std::optional<Tensor> host_cu_query_lens;  // where the host can read them
  int32_t sliding_window = 0;                // 0: all tokens are touched
  int64_t new_len = 0;                       // the last ones are written before

  // The first of `length` tokens of sequence `seq` that is touched.
  int64_t first(int64_t seq, int64_t length) const;
};

// Table and lengths as kernels read them, with the tensors that keep them alive.
struct PagedSequences {
  Tensor block_tables;
  Tensor seq_lens;
  BlockTables tables;

  // Checks shapes, dtypes and device, and where device::checks_values() holds also that lengths
  // fit the table and that every table entry of a token that is touched names a block.
  PagedSequences(const char* op, Tensor block_tables, Tensor seq_lens, int64_t num_seqs,
                 const Pools& pools, const Arg& leader, const TouchedTokens& touched = {});
};

}  // namespace paged_attn
