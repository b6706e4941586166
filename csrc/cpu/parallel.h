// Work over torch's thread pool, without torch's headers: torch.set_num_threads is respected.
#pragma once

#include <cstdint>
#include <type_traits>

namespace paged_attn::cpu {

// torch.get_num_threads(), or 1 inside a parallel region.
int64_t num_threads();

// Calls body(begin, end, context) for disjoint ranges of at least `grain` that cover [0, count).
void parallel_for(int64_t count, int64_t grain,
                  void (*body)(int64_t begin, int64_t end, void* context), void* context);

// Bytes to move that are worth waking a thread.
inline constexpr int64_t kGrainBytes = 64 << 10;

constexpr int64_t grain_of(int64_t item_bytes) {
  return item_bytes >= kGrainBytes || item_bytes <= 0 ? 1 : kGrainBytes / item_bytes;
}

// function(i) for every i in [0, count), in parallel, at least `grain` of them on a thread.
template <class Function>
void parallel_for_each(int64_t count, int64_t grain, Function function) {
  parallel_for(
      count, grain,
      [](int64_t begin, int64_t end, void* context) {
        const Function& call = *static_cast<Function*>(context);
        for (int64_t i = begin; i < end; ++i) call(i);
      },
      &function);
}

}  // namespace paged_attn::cpu
