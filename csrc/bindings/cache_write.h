// A write of new tokens' rows to a cache: checks, then the backend's kernel.
#pragma once

#include <optional>

#include "bindings/arg.h"
#include "bindings/paged.h"
#include "params.h"

namespace paged_attn {

class CacheWrite {
 public:
  // Checks all but where the rows go. `key` and `value` are [num_tokens, num_kv_heads, head_dim].
  CacheWrite(Arg key, Arg value, Tensor key_cache, Tensor value_cache, const ScaleArg& k_scale,
             const ScaleArg& v_scale);

  const Pools& pools() const { return pools_; }

  // slot_mapping, checked here; its memory is kept.
  void set_slots(const Arg& slots);

  void run() const;

 private:
  Arg key_;
  Arg value_;
  Pools pools_;
  std::optional<Tensor> slots_;
  CacheWriteParams params_;
};

}  // namespace paged_attn
