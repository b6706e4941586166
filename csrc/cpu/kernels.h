// The CPU kernels, built once for each instruction-set level: see cpu/kernels.cpp.
#pragma once

#include "params.h"

namespace paged_attn::cpu {

struct Kernels {
  const char* isa;  // "portable", "avx2" or "avx512"
  void (*decode)(const DecodeParams&);
  void (*merge_states)(const MergeParams&);
  void (*write_cache)(const CacheWriteParams&);
  void (*gather_cache)(const GatherParams&);
};

const Kernels& portable_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
#endif

}  // namespace paged_attn::cpu
