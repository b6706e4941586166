// What a backend computes. csrc/cpu/ and csrc/cuda/ each define all of these; a library links one.
//
// Arguments are checked by the caller (csrc/bindings/). CUDA functions enqueue on `stream` and
// return; CPU functions have finished on return.
#pragma once

#include "params.h"

namespace paged_attn::backend {

// A cudaStream_t; null on CPU.
using Stream = void*;

// What a decode call needs beside its arguments. It depends on shapes alone, never on the contents
// of seq_lens, so that a captured CUDA graph replays correctly.
struct DecodeNeeds {
  bool plan;                 // a plan of kPlanWords words, made by make_plan or by an earlier call
  int64_t workspace_floats;  // may be 0
};

// int32 words of a plan, for any device and any batch.
inline constexpr int64_t kPlanWords = 8192;

// A chunk_size by each sequence's length: see DecodeParams::chunk_tokens.
inline constexpr int32_t kAutoChunk = -1;

// `chunk_size` is the caller's, or 0 to let the backend cut the sequences as it likes.
// A plan is made for pools with elements of plan_kv_bytes; others can use it, at some cost.
DecodeNeeds decode_needs(const DecodeParams& params, int32_t chunk_size, int32_t plan_kv_bytes);

// Plans the step of `params`, of which only what says which keys are visible is read.
void make_plan(const DecodeParams& params, int32_t kv_bytes, int32_t* plan, Stream stream);

struct DecodeCall {
  DecodeParams params;
  int32_t chunk_size;
  int32_t* plan;  // ? [kPlanWords]
  int32_t plan_kv_bytes;
  float* workspace;  // ? [DecodeNeeds::workspace_floats]
};

void decode(const DecodeCall& call, Stream stream);
void append_slots(const AppendSlotsParams& params, Stream stream);
void merge_states(const MergeParams& params, Stream stream);
void write_cache(const CacheWriteParams& params, Stream stream);
void gather_cache(const GatherParams& params, Stream stream);
void copy_blocks(const BlockCopyParams& params, Stream stream);

}  // namespace paged_attn::backend
