// Work over torch's thread pool, without torch's headers: torch.set_num_threads is respected.
#pragma once

#include <cstdint>
#include <type_traits>

namespace paged_attn::cpu {

// torch.get_num_threads(), or 1 inside a parallel region.
int64_t num_threads();

// Calls body(begin, end, context) for disjoint ranges that cover [0, count).
void parallel_for(int64_t count, void (*body)(int64_t begin, int64_t end, void* context),
                  void* context);

// function(i) for every i in [0, count), in parallel.
template <class Function>
void parallel_for_each(int64_t count, Function function) {
  parallel_for(
      count,
      [](int64_t begin, int64_t end, void* context) {
        const Function& call = *static_cast<Function*>(context);
        for (int64_t i = begin; i < end; ++i) call(i);
      },
      &function);
}

}  // namespace paged_attn::cpu
