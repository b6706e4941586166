// backend.h on CUDA: from parameters to the instance of a kernel, and the size of its grid.
#include "backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "cuda/instances.h"
#include "dispatch.h"

namespace paged_attn::backend {
namespace {

// Resident CTAs of one SM that a grid is sized for; a kernel's CTAs walk over what is left.
constexpr int64_t kCtasPerSm = 16;
// A sequence is split only where there is too little other work, and into chunks of at least this
// many tokens, so that partial results stay a small part of the traffic.
constexpr int64_t kMinChunk = 256;
constexpr int64_t kChunkAlignment = 64;
constexpr int64_t kSplitCtasPerSm = 4;

CudaStream cuda_stream(Stream stream) { return static_cast<CudaStream>(stream); }

int64_t num_sms() {
  int device = 0;
  int count = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  }
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("paged_attn: device query: ") +
                             cudaGetErrorString(status));
  }
  return count;
}

unsigned grid_for(int64_t num_items) {
  return static_cast<unsigned>(std::min(num_items, num_sms() * kCtasPerSm));
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One lane holds 8 elements of a row, or 16 past this head_dim: see kernels/decode_simt.cuh.
constexpr int32_t kOneVectorHeadDim = 256;

int64_t rows_per_item(const DecodeParams& params) {
  return params.shape.head_dim <= kOneVectorHeadDim ? 4 : 2;
}

// Work items of the decode kernel with sequences in one piece.
int64_t items_per_chunk(const DecodeParams& params) {
  const int64_t group = params.num_q_heads / params.shape.num_kv_heads;
  return params.num_tokens * params.shape.num_kv_heads * ceil_div(group, rows_per_item(params));
}

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

}  // namespace

ChunkPlan plan_chunks(const DecodeParams& params, int32_t requested) {
  constexpr int64_t kWhole = std::numeric_limits<int32_t>::max();
  const int64_t capacity =
      std::min(kWhole, params.block_tables.max_blocks * int64_t{params.shape.block_size});
  int64_t chunk_size = requested;
  if (chunk_size == 0) {
    const int64_t splits = ceil_div(num_sms() * kSplitCtasPerSm, items_per_chunk(params));
    if (splits == 1 || capacity <= kMinChunk) return {static_cast<int32_t>(kWhole), 1, false};
    chunk_size = std::max(kMinChunk,
                          ceil_div(ceil_div(capacity, splits), kChunkAlignment) * kChunkAlignment);
  }
  const int64_t chunks = std::max<int64_t>(1, ceil_div(capacity, chunk_size));
  // Of a requested size even a single chunk is a partial result, so that the width of the table
  // does not show in the bits.
  return {static_cast<int32_t>(chunk_size), static_cast<int32_t>(chunks),
          chunks > 1 || requested > 0};
}

void decode(const DecodeParams& params, Stream stream) {
  const unsigned num_ctas = grid_for(items_per_chunk(params) * params.max_chunks);
  dispatch_float(params.query_dtype, [&](auto query) {
    constexpr DType kQuery = query.value;
    dispatch_kv<kQuery>(params.kv_dtype, [&](auto kv) {
      constexpr DType kKv = kv.value;
      if (params.shape.head_dim <= kOneVectorHeadDim) {
        launch_decode_simt<kQuery, kKv, 1>(params, num_ctas, cuda_stream(stream));
      } else {
        launch_decode_simt<kQuery, kKv, 2>(params, num_ctas, cuda_stream(stream));
      }
    });
    if (params.partial_out != nullptr) {
      const int64_t num_rows = params.num_tokens * params.num_q_heads;
      launch_combine_chunks<kQuery>(params, grid_for(num_rows), cuda_stream(stream));
    }
  });
}

void merge_states(const MergeParams& params, Stream stream) {
  dispatch_float(params.dtype, [&](auto dtype) {
    launch_merge_states<dtype.value>(params, grid_for(params.num_rows), cuda_stream(stream));
  });
}

void write_cache(const CacheWriteParams& params, Stream stream) {
  const unsigned num_ctas = grid_for(params.num_tokens * params.shape.num_kv_heads);
  dispatch_float(params.input_dtype, [&](auto input) {
    constexpr DType kInput = input.value;
    dispatch_kv<kInput>(params.kv_dtype, [&](auto kv) {
      launch_cache_write<kInput, kv.value>(params, num_ctas, cuda_stream(stream));
    });
  });
}

void gather_cache(const GatherParams& params, Stream stream) {
  const unsigned num_ctas = grid_for(params.num_tokens * params.shape.num_kv_heads);
  dispatch_float(params.output_dtype, [&](auto output) {
    constexpr DType kOutput = output.value;
    dispatch<DType::kF32, DType::kF16, DType::kBf16, DType::kF8E4m3, DType::kF8E5m2, DType::kI8>(
        params.kv_dtype,
        [&](auto kv) { launch_gather<kv.value, kOutput>(params, num_ctas, cuda_stream(stream)); });
  });
}

void copy_blocks(const BlockCopyParams& params, Stream stream) {
  launch_block_copy(params, grid_for(params.num_pools * params.num_pairs), cuda_stream(stream));
}

}  // namespace paged_attn::backend
