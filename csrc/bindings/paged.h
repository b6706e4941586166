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
// head.
ScaleView scale_view(const ScaleArg& scale, const Pools& pools, const Arg& leader, ScaleUse use,
                     bool* per_token = nullptr);

// Table and lengths as kernels read them, with the tensors that keep them alive.
struct PagedSequences {
  Tensor block_tables;
  Tensor seq_lens;
  BlockTables tables;

  // Checks shapes, dtypes and device, and where device::checks_values() holds also that lengths
  // fit the table and that every table entry in use names a block.
  PagedSequences(const char* op, Tensor block_tables, Tensor seq_lens, int64_t num_seqs,
                 const Pools& pools, const Arg& leader);
};

}  // namespace paged_attn
