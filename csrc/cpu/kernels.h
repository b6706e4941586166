// The CPU kernels, built once for each instruction-set level: see cpu/kernels.cpp.
#pragma once

#include "cpu/plan.h"
#include "params.h"

namespace paged_attn::cpu {

// Memory of a decode call.
struct DecodeMemory {
  float* scratch;  // [Plan::scratch_floats], of this thread
  float* slots;    // [Plan::num_slots, Plan::slot_floats], shared
};

struct Kernels {
  const char* isa;  // "portable", "avx2", "avx512" or "avx512bf16"
  void (*decode)(const DecodeParams&, const Plan&, const Run&, const DecodeMemory&);
  void (*combine)(const DecodeParams&, const Plan&, const Merge&, const DecodeMemory&);
  void (*merge_states)(const MergeParams&);
  void (*write_cache)(const CacheWriteParams&);
  void (*gather_cache)(const GatherParams&);
};

const Kernels& portable_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512bf16_kernels();
#endif

}  // namespace paged_attn::cpu
