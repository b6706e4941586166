// What the tensor-core decode kernel and its plan know beside params.h.
#pragma once

#include <cstdint>

#include "params.h"

namespace paged_attn {

// Division of numbers below 2^31 by a number that the host knows (Granlund and Montgomery 1994).
struct Divider {
  uint32_t multiplier;
  uint32_t shift;

  static constexpr Divider of(uint32_t divisor) {
    uint32_t shift = 0;
    while ((uint64_t{1} << shift) < divisor) ++shift;
    const uint64_t power = uint64_t{1} << (31 + shift);
    return {static_cast<uint32_t>((power + divisor - 1) / divisor), 31 + shift};
  }
  constexpr uint32_t divide(uint32_t number) const {
    return static_cast<uint32_t>(uint64_t{number} * multiplier >> shift);
  }
};

// Where a token's row starts, in units of `bytes`, counted from the first row of its KV head.
// `bytes` divides both strides, so that 32 bits reach 2^32 units.
struct RowUnits {
  uint32_t per_block;
  uint32_t per_token;
  uint32_t bytes;

  constexpr uint32_t row(uint32_t block, uint32_t offset) const {
    return block * per_block + offset * per_token;
  }
};

// A place on the line of all row tiles' tokens: row tile and KV head (heads fastest), and a number
// of tokens into its visible keys. A CTA works from its cut to the next one's.
struct Cut {
  int32_t tile;
  int32_t head;
  int32_t token;
  // Where a cut lies inside of a row tile: the first cut that does, and the tile's fragments.
  int32_t first_cut;
  int32_t num_fragments;

  constexpr bool inside() const { return token > 0; }
};

// A row tile that several CTAs share is in fragments: one ends at the first cut inside of it, the
// others start at cuts. A CTA has at most two of them, its first and its last piece of work.
constexpr int64_t fragment_slot(const Cut& cut, int64_t fragment) {
  return fragment == 0 ? 2 * (cut.first_cut - 1) + 1 : 2 * (cut.first_cut + fragment - 1);
}

// The plan of a step.
struct PlanView {
  Cut* cuts;             // [num_ctas + 1]
  uint32_t* semaphores;  // [num_ctas], all 0 between launches
  int32_t num_ctas;

  static constexpr int64_t words(int64_t num_ctas) {
    return (num_ctas + 1) * static_cast<int64_t>(sizeof(Cut) / 4) + num_ctas;
  }
};

// Query rows of a row tile where sequences are cut into chunks: what a sequence needs for its own
// rows of one KV head. So neither its batch nor the form of the call shows in its bits.
constexpr int chunk_tile_rows(int64_t seq_rows) { return seq_rows <= 16 ? 16 : 128; }

// Shared memory of an SM (CUDA C++ Programming Guide, "Compute Capabilities"), of the first compute
// capability, major * 10 + minor, that code is for.
constexpr int64_t shared_kib_per_sm(int arch) {
  if (arch < 80) return 64;
  if (arch == 80 || arch == 87) return 164;
  return arch >= 90 && arch < 120 ? 228 : 100;
}

// Shared memory of a CTA of the tensor-core kernel, what the system takes included, at most: kDim
// and kRows are its template parameters, kv_bytes the size of an element.
constexpr int64_t smem_kib(int dim, int rows, int kv_bytes) {
  const int row_bytes = dim * kv_bytes;
  if (rows > 16) return row_bytes <= 128 ? 46 : 75;
  return row_bytes == 64 ? 43 : 75;
}

// CTAs that an SM with so much shared memory holds at once: what registers are bounded for, and
// what a plan counts on.
constexpr int resident_ctas(int dim, int rows, int kv_bytes, int64_t shared_kib) {
  const int by_registers = rows > 16    ? (dim == 64 && kv_bytes == 2 ? 2 : 1)
                           : rows == 16 ? (dim == 64    ? 4
                                           : dim == 128 ? 3
                                                        : 2)
                                        : 5;
  const int by_memory = static_cast<int>(shared_kib / smem_kib(dim, rows, kv_bytes));
  const int ctas = by_registers < by_memory ? by_registers : by_memory;
  return ctas < 1 ? 1 : ctas;
}

// Makes the plan of a step. Of `decode` only what says which keys are visible is used.
struct PlanParams {
  DecodeParams decode;
  PlanView plan;
  int32_t rows;      // of a row tile
  int32_t overhead;  // of a row tile, in tokens: its start, its query and its output
};

// What the tensor-core kernel knows beside.
struct DecodeMmaParams {
  DecodeParams decode;
  RowUnits key_units;
  RowUnits value_units;
  Divider block_size;
  uint32_t table_step;  // bytes from one entry of a sequence's table to the next
  // Without cuts the work is cut into chunks: see DecodeParams.
  PlanView plan;
  bool token_scales;    // the scales differ from token to token
  bool query_pairs;     // two elements of a query row are one aligned word
  float* fragment_out;  // ? [2 * num_ctas, rows, head_dim], each normalised
  float* fragment_lse;  // ? [2 * num_ctas, rows], natural logarithm
};

}  // namespace paged_attn
