// What the launches share: the device's size, grids, and dispatch over dtypes.
#pragma once

#include <cstdint>

#include "backend.h"
#include "cuda/instances.h"
#include "dispatch.h"

namespace paged_attn::backend {

// Of the current device.
int64_t num_sms();
int64_t shared_memory_per_sm();  // bytes

// CTAs for `num_items` pieces of work; a kernel's CTAs walk over what is left.
unsigned grid_for(int64_t num_items);

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline CudaStream cuda_stream(Stream stream) { return static_cast<CudaStream>(stream); }

// The dtypes that rows of query, key, value and output may have.
template <class Function>
void dispatch_float(DType dtype, Function function) {
  dispatch<DType::kF32, DType::kF16, DType::kBf16>(dtype, function);
}

// A cache has the dtype of the rows or one of 8 bits.
template <DType kRows, class Function>
void dispatch_kv(DType dtype, Function function) {
  dispatch<kRows, DType::kF8E4m3, DType::kF8E5m2, DType::kI8>(dtype, function);
}

}  // namespace paged_attn::backend
