// All CPU kernels at one instruction-set level. The build compiles this file once per level, with
// PAGED_ATTN_ISA naming it and the compiler flags to match; the compiler vectorises.
//
// Everything that is compiled here lives in the level's own namespace and calls nothing inline
// from outside: the linker must never keep an AVX-512 copy of a function for all levels.
#include "cpu/kernels.h"

#include "cpu/parallel.h"
#include "dispatch.h"
#include "params.h"

#define PAGED_ATTN_JOIN_(a, b) a##b
#define PAGED_ATTN_JOIN(a, b) PAGED_ATTN_JOIN_(a, b)
#define PAGED_ATTN_STRING_(a) #a
#define PAGED_ATTN_STRING(a) PAGED_ATTN_STRING_(a)

namespace paged_attn::cpu {
namespace {

#include "cpu/convert.h"
#include "cpu/decode.h"
#include "cpu/merge.h"
#include "cpu/rows.h"

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

void decode(const DecodeParams& params) {
  dispatch_float(params.query_dtype, [&](auto query) {
    dispatch_kv<query.value>(params.kv_dtype,
                             [&](auto kv) { decode_typed<query.value, kv.value>(params); });
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
    dispatch<DType::kF32, DType::kF16, DType::kBf16, DType::kF8E4m3, DType::kF8E5m2, DType::kI8>(
        params.kv_dtype, [&](auto kv) { gather_typed<kv.value, output.value>(params); });
  });
}

}  // namespace

const Kernels& PAGED_ATTN_JOIN(PAGED_ATTN_ISA, _kernels)() {
  static constexpr Kernels kKernels = {
      .isa = PAGED_ATTN_STRING(PAGED_ATTN_ISA),
      .decode = decode,
      .merge_states = merge_states,
      .write_cache = write_cache,
      .gather_cache = gather_cache,
  };
  return kKernels;
}

}  // namespace paged_attn::cpu
