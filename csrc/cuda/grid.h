// What the launches share: the device's size, and grids.
#pragma once

#include <cstdint>

#include "backend.h"
#include "cuda/instances.h"

namespace paged_attn::backend {

// Of the current device.
int64_t num_sms();
int64_t shared_memory_per_sm();  // bytes

// CTAs for `num_items` pieces of work; a kernel's CTAs walk over what is left.
unsigned grid_for(int64_t num_items);

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline CudaStream cuda_stream(Stream stream) { return static_cast<CudaStream>(stream); }

}  // namespace paged_attn::backend
