// What a backend computes. csrc/cpu/ and csrc/cuda/ each define all of these; a library links one.
//
// Arguments are checked by the caller (csrc/bindings/). CUDA functions enqueue on `stream` and
// return; CPU functions have finished on return.
#pragma once

#include "params.h"

namespace paged_attn::backend {

// A cudaStream_t; null on CPU.
using Stream = void*;

// How a backend wants to cut the sequences of a decode call: see DecodeParams.
struct ChunkPlan {
  int32_t chunk_size;
  int32_t max_chunks;
  bool partials;  // chunks are partial results that are merged: the caller gives the workspace
};

// `requested` is the caller's chunk size, or 0 to let the backend choose. It depends on shapes
// alone, never on the contents of seq_lens, so that a captured CUDA graph replays correctly.
ChunkPlan plan_chunks(const DecodeParams& params, int32_t requested);

void decode(const DecodeParams& params, Stream stream);
void merge_states(const MergeParams& params, Stream stream);
void write_cache(const CacheWriteParams& params, Stream stream);
void gather_cache(const GatherParams& params, Stream stream);
void copy_blocks(const BlockCopyParams& params, Stream stream);

}  // namespace paged_attn::backend
