// The decode functions of backend.h on CUDA: which kernel, how much work, which instance.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "backend.h"
#include "cuda/grid.h"
#include "cuda/instances.h"
#include "mma_params.h"

namespace paged_attn::backend {
namespace {

// A sequence is split only where there is too little other work, and into chunks of at least this
// many tokens, so that partial results stay a small part of the traffic.
constexpr int64_t kMinChunk = 256;
constexpr int64_t kChunkAlignment = 64;
constexpr int64_t kSplitCtasPerSm = 4;

// The first compute capability whose tensor cores and asynchronous copies the kernel needs.
// Compiled for less, it is empty.
constexpr int kMmaArch = 80;
constexpr int32_t kMmaMaxHeadDim = 256;
constexpr int64_t kCopyBytes = 16;

// One lane of the SIMT kernel holds 8 elements of a row, or 16 past this head_dim.
constexpr int32_t kOneVectorHeadDim = 256;

// The kernel for a call.
struct Choice {
  bool mma;
  int arch;  // mma: that the kernels were compiled for
};

// Whether every piece of 16 bytes of a pool is aligned.
bool pieces_aligned(const PoolView& pool, const DecodeParams& params) {
  const int64_t bytes = element_size(params.kv_dtype);
  return reinterpret_cast<uintptr_t>(pool.data) % kCopyBytes == 0 &&
         pool.block_stride * bytes % kCopyBytes == 0 &&
         pool.token_stride * bytes % kCopyBytes == 0 &&
         pool.head_stride * bytes % kCopyBytes == 0 &&
         params.shape.head_dim * bytes % kCopyBytes == 0;
}

// Whether every two elements of a row, of 16 bits each, are an aligned word.
bool words_aligned(const RowsView& rows) {
  const int64_t strides = rows.seq_stride | rows.token_stride | rows.head_stride;
  return reinterpret_cast<uintptr_t>(rows.data) % 4 == 0 && strides % 2 == 0;
}

// The largest unit that divides both strides; false if a row may lie beyond 2^32 of them.
bool make_units(const PoolView& pool, const DecodeParams& params, RowUnits& units) {
  const int64_t bytes = element_size(params.kv_dtype);
  const int64_t block = params.shape.num_blocks > 1 ? pool.block_stride * bytes : 0;
  const int64_t token = params.shape.block_size > 1 ? pool.token_stride * bytes : 0;
  const int64_t unit = std::max(std::gcd(block, token), kCopyBytes);
  const int64_t last = (params.shape.num_blocks - 1) * (block / unit) +
                       (params.shape.block_size - 1) * (token / unit);
  constexpr int64_t kLimit = std::numeric_limits<uint32_t>::max();
  if (unit > kLimit || last > kLimit) return false;
  units = {static_cast<uint32_t>(block / unit), static_cast<uint32_t>(token / unit),
           static_cast<uint32_t>(unit)};
  return true;
}

// What the tensor-core kernel knows beside of a call; false if the pools or tables are out of its
// reach.
bool make_mma_params(const DecodeParams& params, DecodeMmaParams& mma) {
  const BlockTables& tables = params.block_tables;
  const int64_t step = tables.max_blocks > 1 ? tables.block_stride * int64_t{sizeof(int32_t)} : 0;
  if (step > std::numeric_limits<uint32_t>::max()) return false;
  mma.table_step = static_cast<uint32_t>(step);
  mma.query_pairs = words_aligned(params.query);
  mma.token_scales = params.k_scale.by_token() || params.v_scale.by_token();
  mma.block_size = Divider::of(static_cast<uint32_t>(params.shape.block_size));
  return make_units(params.key_cache, params, mma.key_units) &&
         make_units(params.value_cache, params, mma.value_units);
}

int rounded_head_dim(int32_t head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }

int64_t group_size(const DecodeParams& params) {
  return params.num_q_heads / params.shape.num_kv_heads;
}

// Query rows of a planned row tile: as many as a sequence has for one KV head, where ragged on
// average.
int plan_rows(const DecodeParams& params) {
  const int64_t tokens = ceil_div(params.num_tokens, std::max<int64_t>(params.num_seqs, 1));
  const int64_t rows = tokens * group_size(params);
  return rows <= 8 ? 8 : rows <= 16 ? 16 : 128;
}

// Fills `mma`, but for the call and its plan, where it chooses the tensor-core kernel.
Choice choose(const DecodeParams& params, DecodeMmaParams& mma) {
  const bool fits = params.query_dtype != DType::kF32 && params.shape.head_dim <= kMmaMaxHeadDim &&
                    pieces_aligned(params.key_cache, params) &&
                    pieces_aligned(params.value_cache, params) && make_mma_params(params, mma) &&
                    (is_8bit(params.kv_dtype) || !mma.token_scales);
  const int arch = fits ? kernels_arch() : 0;
  return {arch >= kMmaArch, arch};
}

int64_t simt_rows(const DecodeParams& params) {
  return params.shape.head_dim <= kOneVectorHeadDim ? 4 : 2;
}

// Work items of the SIMT kernel with sequences in one piece.
int64_t simt_items(const DecodeParams& params) {
  return params.num_tokens * params.shape.num_kv_heads *
         ceil_div(group_size(params), simt_rows(params));
}

// Sequences cut into chunks of one size, whose partial results a second kernel merges.
struct Chunks {
  int32_t size;
  int32_t count;  // of the longest sequence that the table has room for
  bool partial;   // false: one chunk, and no second kernel
};

Chunks make_chunks(const DecodeParams& params, int32_t requested) {
  constexpr int64_t kWhole = std::numeric_limits<int32_t>::max();
  const int64_t capacity =
      std::min(kWhole, params.block_tables.max_blocks * int64_t{params.shape.block_size});
  int64_t size = requested;
  if (requested == kAutoChunk) {
    const int64_t most = ceil_div(capacity, kMinAutoChunk);
    return {0, static_cast<int32_t>(std::clamp<int64_t>(most, 1, kMaxAutoChunks)), true};
  }
  if (size == 0) {
    const int64_t splits = ceil_div(num_sms() * kSplitCtasPerSm, simt_items(params));
    if (splits == 1 || capacity <= kMinChunk) return {static_cast<int32_t>(kWhole), 1, false};
    size = std::max(kMinChunk,
                    ceil_div(ceil_div(capacity, splits), kChunkAlignment) * kChunkAlignment);
  }
  // Of a requested size even a single chunk is a partial result, so that the width of the table
  // does not show in the bits.
  const int64_t count = std::max<int64_t>(1, ceil_div(capacity, size));
  return {static_cast<int32_t>(size), static_cast<int32_t>(count), count > 1 || requested > 0};
}

bool is_planned(const Choice& choice, int32_t chunk_size) { return choice.mma && chunk_size == 0; }

int64_t num_chunk_rows(const DecodeParams& params, const Chunks& chunks) {
  return params.num_tokens * params.num_q_heads * chunks.count;
}

// CTAs of a plan for pools with elements of kv_bytes: those that are resident at once, of kernels
// whose registers were bounded for an SM of `arch`.
int32_t plan_ctas(const DecodeParams& params, int32_t kv_bytes, int arch) {
  constexpr int64_t kMost = 1023;  // see kernels/plan.cuh
  const int64_t shared_kib = std::min(shared_memory_per_sm() / 1024, shared_kib_per_sm(arch));
  const int ctas = resident_ctas(rounded_head_dim(params.shape.head_dim), plan_rows(params),
                                 kv_bytes, shared_kib);
  return static_cast<int32_t>(std::min(kMost, num_sms() * ctas));
}

PlanView plan_view(int32_t* words, int32_t num_ctas) {
  Cut* cuts = reinterpret_cast<Cut*>(words);
  return {cuts, reinterpret_cast<uint32_t*>(cuts + num_ctas + 1), num_ctas};
}
static_assert(PlanView::words(1023) <= kPlanWords);

[[noreturn]] void fail_instance() {
  throw std::logic_error("paged_attn: no kernel was built for this call");
}

void launch_mma(const DecodeMmaParams& params, int rows, unsigned num_ctas, CudaStream stream) {
  const DType kv = params.decode.kv_dtype;
  const int dim = rounded_head_dim(params.decode.shape.head_dim);
#define DECODE_MMA(kKv, kDim, kRows)                                      \
  if (kv == kKv && dim == kDim && rows == kRows) {                        \
    return launch_decode_mma<kKv, kDim, kRows>(params, num_ctas, stream); \
  }
#include "kernels/instances.def"
  fail_instance();
}

void launch_planned(const DecodeCall& call, const Choice& choice, DecodeMmaParams& mma,
                    CudaStream stream) {
  const int rows = plan_rows(mma.decode);
  mma.plan = plan_view(call.plan, plan_ctas(mma.decode, call.plan_kv_bytes, choice.arch));
  mma.fragment_out = call.workspace;
  mma.fragment_lse =
      call.workspace + 2 * int64_t{mma.plan.num_ctas} * rows * mma.decode.shape.head_dim;
  launch_mma(mma, rows, mma.plan.num_ctas, stream);
}

// Ragged, only the device knows how many rows a sequence has: each launch takes the sequences whose
// row tiles are of its size.
void launch_chunks(const DecodeMmaParams& mma, CudaStream stream) {
  const DecodeParams& params = mma.decode;
  const bool ragged = params.cu_query_lens != nullptr;
  const int64_t group = group_size(params);
  const int fewest = chunk_tile_rows(ragged ? group : params.query_len * group);
  const int most = chunk_tile_rows((ragged ? params.num_tokens : params.query_len) * group);
  for (const int rows : {fewest, most}) {
    const int64_t items =
        params.num_row_tiles(rows) * params.shape.num_kv_heads * params.max_chunks;
    launch_mma(mma, rows, grid_for(items), stream);
    if (fewest == most) break;
  }
}

void launch_simt(const DecodeParams& params, CudaStream stream) {
  const unsigned num_ctas = grid_for(simt_items(params) * params.max_chunks);
  const int vecs = params.shape.head_dim <= kOneVectorHeadDim ? 1 : 2;
#define DECODE_SIMT(kKv, kVecs)                                          \
  if (vecs == kVecs && (kKv == DType::kAny || kKv == params.kv_dtype)) { \
    return launch_decode_simt<kKv, kVecs>(params, num_ctas, stream);     \
  }
#include "kernels/instances.def"
  fail_instance();
}

// Returns the call's parameters with its chunks, if it is not planned.
DecodeParams with_chunks(const DecodeCall& call, bool planned) {
  DecodeParams params = call.params;
  params.chunk_size = std::numeric_limits<int32_t>::max();
  params.max_chunks = 1;
  if (planned) return params;
  const Chunks chunks = make_chunks(params, call.chunk_size);
  params.chunk_size = chunks.size;
  params.max_chunks = chunks.count;
  if (chunks.partial) {
    params.partial_out = call.workspace;
    params.partial_lse = call.workspace + num_chunk_rows(params, chunks) * params.shape.head_dim;
  }
  return params;
}

}  // namespace

DecodeNeeds decode_needs(const DecodeParams& params, int32_t chunk_size, int32_t plan_kv_bytes) {
  DecodeMmaParams unused{};
  const Choice choice = choose(params, unused);
  const int64_t row_floats = params.shape.head_dim + 1;
  if (is_planned(choice, chunk_size)) {
    const int64_t num_ctas = plan_ctas(params, plan_kv_bytes, choice.arch);
    return {true, 2 * num_ctas * plan_rows(params) * row_floats};
  }
  const Chunks chunks = make_chunks(params, chunk_size);
  return {false, chunks.partial ? num_chunk_rows(params, chunks) * row_floats : 0};
}

void make_plan(const DecodeParams& params, int32_t kv_bytes, int32_t* plan, Stream stream) {
  // Tokens that a row tile costs beside its keys: about a microsecond of one CTA.
  constexpr int32_t kOverhead = 40;
  PlanParams plan_params{.decode = params,
                         .plan = plan_view(plan, plan_ctas(params, kv_bytes, kernels_arch())),
                         .rows = plan_rows(params),
                         .overhead = kOverhead};
  plan_params.decode.chunk_size = std::numeric_limits<int32_t>::max();
  launch_plan(plan_params, cuda_stream(stream));
}

void decode(const DecodeCall& call, Stream stream_pointer) {
  const CudaStream stream = cuda_stream(stream_pointer);
  DecodeMmaParams mma{};
  const Choice choice = choose(call.params, mma);
  const bool planned = is_planned(choice, call.chunk_size);
  const DecodeParams params = with_chunks(call, planned);
  if (choice.mma) {
    mma.decode = params;
    planned ? launch_planned(call, choice, mma, stream) : launch_chunks(mma, stream);
  } else {
    launch_simt(params, stream);
  }
  if (params.partial_out != nullptr) {
    launch_combine_chunks(params, grid_for(params.num_tokens * params.num_q_heads), stream);
  }
}

}  // namespace paged_attn::backend
