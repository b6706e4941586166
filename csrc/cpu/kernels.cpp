// All CPU kernels at one instruction-set level. The build compiles this file once per level, with
// PAGED_ATTN_ISA naming it and the compiler flags to match. Decoding is written over the vectors of
// cpu/simd*.h; rows of caches are converted by loops that the compiler vectorises.
//
// Everything that is compiled here lives in the level's own namespace and calls nothing inline
// from outside: the linker must never keep an AVX-512 copy of a function for all levels.
#include "cpu/kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <type_traits>
#include <utility>

#include "cpu/parallel.h"
#include "dispatch.h"
#include "params.h"

#define PAGED_ATTN_INLINE __attribute__((always_inline))
#define PAGED_ATTN_JOIN_(a, b) a##b
#define PAGED_ATTN_JOIN(a, b) PAGED_ATTN_JOIN_(a, b)
#define PAGED_ATTN_STRING_(a) #a
#define PAGED_ATTN_STRING(a) PAGED_ATTN_STRING_(a)

namespace paged_attn::cpu {
namespace {

constexpr int kMaxHeadDim = 512;

#include "cpu/convert.h"
#if defined(__AVX512F__)
#include "cpu/simd_avx512.h"
#elif defined(__AVX2__)
#include "cpu/simd_avx2.h"
#else
#include "cpu/simd_portable.h"
#endif
#include "cpu/merge.h"
#include "cpu/rows.h"
#include "cpu/simd.h"

// The dtypes that rows of query, key, value and output may have.
template <class Function>
void dispatch_float(DType dtype, Function function) {
  dispatch<DType::kF32, DType::kF16, DType::kBf16>(dtype, function);
}

template <class Function>
void dispatch_any(DType dtype, Function function) {
  dispatch<DType::kF32, DType::kF16, DType::kBf16, DType::kF8E4m3, DType::kF8E5m2, DType::kI8>(
      dtype, function);
}

// A cache has the dtype of the rows or one of 8 bits.
template <DType kRows, class Function>
void dispatch_kv(DType dtype, Function function) {
  dispatch<kRows, DType::kF8E4m3, DType::kF8E5m2, DType::kI8>(dtype, function);
}

// clang-format off: each needs the one before it
#include "cpu/prefetch.h"
#include "cpu/tile.h"
#include "cpu/softmax.h"
#include "cpu/decode.h"
// clang-format on

void decode(const DecodeParams& params, const Plan& plan, const Run& run,
            const DecodeMemory& memory) {
  dispatch_any(params.kv_dtype, [&](auto kv) {
    RunWorker<kv.value>(params, plan, run, memory.scratch).work(memory.slots, plan.slot_floats);
  });
}

void combine(const DecodeParams& params, const Plan& plan, const Merge& merge,
             const DecodeMemory& memory) {
  const Run run{.tile = merge.tile, .first_head = merge.first_head, .num_heads = merge.num_heads};
  dispatch_any(params.kv_dtype, [&](auto kv) {
    RunWorker<kv.value>(params, plan, run, memory.scratch)
        .combine(memory.slots + merge.first_slot * plan.slot_floats, plan.slot_floats,
                 merge.num_slots);
  });
}

void merge_states(const MergeParams& params) {
  dispatch_float(params.dtype, [&](auto dtype) { merge_typed<dtype.value>(params); });
}

void write_cache(const CacheWriteParams& params) {
  dispatch_float(params.input_dtype, [&](auto input) {
    dispatch_kv<input.value>(params.kv_dtype,
                             [&](auto kv) { write_cache_typed<input.value, kv.value>(params); });
  });
}

void gather_cache(const GatherParams& params) {
  dispatch_float(params.output_dtype, [&](auto output) {
    dispatch_any(params.kv_dtype, [&](auto kv) { gather_typed<kv.value, output.value>(params); });
  });
}

}  // namespace

const Kernels& PAGED_ATTN_JOIN(PAGED_ATTN_ISA, _kernels)() {
  static constexpr Kernels kKernels = {
      .isa = PAGED_ATTN_STRING(PAGED_ATTN_ISA),
      .decode = decode,
      .combine = combine,
      .merge_states = merge_states,
      .write_cache = write_cache,
      .gather_cache = gather_cache,
  };
  return kKernels;
}

}  // namespace paged_attn::cpu
