// A stream of K and V rows: tiles of tokens, copied to shared memory ahead of their use.
#pragma once

#include "device/fragments.cuh"
#include "device/ptx.cuh"
#include "mma_params.h"

namespace paged_attn {

// kWarps warps share a ring and stand at the same tile, every num_rings-th of an item's. Each tile
// has a K and a V buffer, which are copy groups of their own, K first. Nothing here is shared with
// warps of another ring.
//
// What only depends on the lane is computed in the constructor and made opaque: ptxas would
// otherwise compute it again for every copy, which doubles the instructions of a tile.
template <DType kKv, int kDim, int kWarps>
class TokenRing {
 public:
  static constexpr int kThreads = kWarps * ptx::kWarpSize;
  static constexpr int kRowBytes = kDim * element_size(kKv);
  // Lanes copy pieces of 16 bytes: a tile has at least one for each thread.
  static constexpr int kPieces = kRowBytes / 16;
  static constexpr int kTokens = kDim == 256 ? 16 : kPieces < kWarps ? 64 : 32;
  static constexpr int kStages = kWarps > 1 ? 4 : kTokens * kRowBytes <= 4096 ? 2 : 1;
  // 16 bytes more than a row: the 8 rows of a fragment lie in different banks.
  static constexpr int kPitch = kRowBytes + 16;
  using Tile = unsigned char[kTokens][kPitch];
  struct Stage {
    Tile key;
    Tile value;
  };
  struct alignas(16) Buffers {
    Stage stages[kStages];
    // Of the tile that is asked for next: where its rows are, see RowUnits.
    uint32_t key_rows[kTokens];
    uint32_t value_rows[kTokens];
  };

  // A token's block, and its place there.
  struct Place {
    uint32_t block;
    uint32_t offset;
  };

  __device__ TokenRing(const DecodeMmaParams& params, const RowTile& item, Buffers& buffers,
                       int ring, int num_rings)
      : params_(params),
        buffers_(buffers),
        table_(reinterpret_cast<const unsigned char*>(params.decode.block_tables.data +
                                                      (item.seq < 0 ? 0 : item.seq) *
                                                          params.decode.block_tables.seq_stride)),
        key_(piece_of_head(params.decode.key_cache, item.kv_head)),
        value_(piece_of_head(params.decode.value_cache, item.kv_head)),
        key_from_(
            ptx::opaque(ptx::shared_address(&buffers.stages[0].key) + key_lane_offset<kPitch>())),
        value_from_(is_8bit(kKv) ? key_from_
                                 : ptx::opaque(ptx::shared_address(&buffers.stages[0].key) +
                                               value_lane_offset<kKv, kPitch>())),
        copy_to_(ptx::opaque(ptx::shared_address(&buffers.stages[0].key[first_row()][0]) +
                             static_cast<uint32_t>(piece()) * 16)),
        end_(static_cast<uint32_t>(item.range.end)),
        copy_end_(ptx::opaque(piece() * 16 < params.decode.shape.head_dim * element_size(kKv) ? end_
                                                                                              : 0)),
        step_(num_rings * kTokens),
        first_(static_cast<uint32_t>(item.range.begin) + ring * kTokens) {}

  // Whether there is a tile left, and on to the next one.
  __device__ bool has_tile() const { return first_ < end_; }
  __device__ void advance() {
    first_ += step_;
    if constexpr (kStages == 2) {
      stage_ ^= sizeof(Stage);
    } else if constexpr (kStages > 2) {
      stage_ = stage_ == (kStages - 1) * sizeof(Stage) ? 0 : stage_ + sizeof(Stage);
    }
  }

  // The position of the tile's first token.
  __device__ uint32_t first_token() const { return first_; }
  __device__ uint32_t first_token_of_next() const { return first_ + step_; }

  // Starts the copies of the first tiles.
  __device__ void fill() {
    if (!has_tile()) return;
    clear_padding();
    Place places[kStages + 1];
#pragma unroll
    for (int stage = 0; stage <= kStages; ++stage) places[stage] = mine_of(first_ + stage * step_);
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      publish_rows(places[stage]);
      sync();  // every lane has published the rows of its token
      const uint32_t to = copy_to_ + stage * sizeof(Stage);
      const uint32_t first = first_ + stage * step_;
      copy(to, key_, buffers_.key_rows, params_.key_units, first);
      copy(to + sizeof(Tile), value_, buffers_.value_rows, params_.value_units, first);
      sync();  // every lane has read the rows, before the next ones are published
    }
    next_ = places[kStages];
  }

  // What load_keys and load_values take for the tile's first fragment, once it has landed.
  __device__ uint32_t wait_key() {
    wait();
    return key_from_ + stage_;
  }
  __device__ uint32_t wait_value() {
    wait();
    return value_from_ + stage_ + sizeof(Tile);
  }

  // To be called when what wait_key() gave has been read: starts the next copy there.
  __device__ void refill_key() {
    publish_rows(next_);
    sync();  // every lane has read the buffer, and published the rows of its token
    copy(copy_to_ + stage_, key_, buffers_.key_rows, params_.key_units, first_ + kStages * step_);
  }
  __device__ void refill_value() {
    sync();  // every lane has read the buffer
    copy(copy_to_ + stage_ + sizeof(Tile), value_, buffers_.value_rows, params_.value_units,
         first_ + kStages * step_);
    next_ = mine_of(first_ + (kStages + 1) * step_);
  }

  __device__ void drain() { ptx::copy_async_wait<0>(); }

  // Past the end the last token stands in, so that neither dead table entries nor dead slots are
  // touched.
  __device__ Place locate(uint32_t token) const {
    const uint32_t last = end_ - 1;
    token = token < last ? token : last;
    const uint32_t index = params_.block_size.divide(token);
    const uint64_t entry = uint64_t{index} * params_.table_step;
    const int32_t block = *reinterpret_cast<const int32_t*>(table_ + entry);
    return {static_cast<uint32_t>(block), token - index * params_.decode.shape.block_size};
  }

 private:
  // Neighbouring lanes copy neighbouring pieces of one row. All lanes of a row copy kCopies rows in
  // turn, which follow each other: 4 of their numbers are one load.
  static constexpr int kCopies = kTokens * kPieces / kThreads;
  static_assert(kCopies >= 1 && kTokens <= kThreads);

  static __device__ int thread() { return threadIdx.x % kThreads; }
  static __device__ int piece() { return threadIdx.x % kPieces; }
  static __device__ int first_row() {
    const int group = thread() / kPieces;
    // Rows of 64 bytes, two of which 8 lanes write at once: 4 apart they lie in different banks.
    if constexpr (kPieces == 4 && kCopies == 1)
      return group / 8 * 8 + group % 2 * 4 + group / 2 % 4;
    return group * kCopies;
  }

  static __device__ void sync() {
    if constexpr (kWarps == 1) {
      ptx::warp_sync();
    } else {
      ptx::cta_sync();  // all warps of the CTA are of this ring
    }
  }

  static __device__ const unsigned char* piece_of_head(const PoolView& pool, int64_t head) {
    const auto address =
        reinterpret_cast<uintptr_t>(static_cast<const unsigned char*>(pool.data) +
                                    head * pool.head_stride * element_size(kKv) + piece() * 16);
    const uint64_t high = ptx::opaque(static_cast<uint32_t>(address >> 32));
    return reinterpret_cast<const unsigned char*>(high << 32 |
                                                  ptx::opaque(static_cast<uint32_t>(address)));
  }

  // All but the newest 2 * kStages - 1 groups: what was asked for longest ago.
  __device__ void wait() {
    ptx::copy_async_wait<2 * kStages - 1>();
    sync();  // the other lanes' copies are visible, too
  }

  // The place of this lane's token of a tile, loaded a tile ahead of its use.
  __device__ Place mine_of(uint32_t first) const {
    if (kWarps > 1 && thread() >= kTokens) return {};  // it publishes none
    return locate(first + thread() % kTokens);
  }

  // Tells the other lanes where the rows of this lane's token are.
  __device__ void publish_rows(const Place& place) {
    const int token = thread();
    if (token >= kTokens) return;
    buffers_.key_rows[token] = params_.key_units.row(place.block, place.offset);
    buffers_.value_rows[token] = params_.value_units.row(place.block, place.offset);
  }

  // Of a tile whose first token is `first`. Past the end there is nothing to copy, but still a
  // group, so that groups can be counted.
  __device__ void copy(uint32_t to, const unsigned char* base, const uint32_t (&rows)[kTokens],
                       const RowUnits& units, uint32_t first) {
    // Opaque here and not once: of a number that it has widened to 64 bits before the loop, the
    // compiler does not know that the upper half is 0, and a product is 4 instructions, not 1.
    const uint32_t unit = ptx::opaque(units.bytes);
    uint32_t mine[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; i += 4) {
      if constexpr (kCopies % 4 == 0) {
        const uint4 quad = *reinterpret_cast<const uint4*>(&rows[first_row() + i]);
        mine[i] = quad.x;
        mine[i + 1] = quad.y;
        mine[i + 2] = quad.z;
        mine[i + 3] = quad.w;
      } else {
        for (int j = i; j < kCopies; ++j) mine[j] = rows[first_row() + j];
      }
    }
    if (first + kTokens <= copy_end_) [[likely]] {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        ptx::copy_async(to + i * kPitch, base + uint64_t{mine[i]} * unit);
      }
    } else if (first < copy_end_) {
      // Rows past the end take part in the products: they are 0, and nothing is read.
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const bool live = first + first_row() + i < copy_end_;
        ptx::copy_async_or_zero(to + i * kPitch, base + uint64_t{mine[i]} * unit, live ? 16 : 0);
      }
    }
    ptx::copy_async_commit();
  }

  // Dimensions past head_dim take part in the products: they are 0.
  __device__ void clear_padding() {
    const int live = params_.decode.shape.head_dim * element_size(kKv);
    if (live == kRowBytes) return;
    for (int stage = 0; stage < kStages; ++stage) {
      for (int i = thread() * 16; i < kTokens * (kRowBytes - live); i += kThreads * 16) {
        const int token = i / (kRowBytes - live);
        const int byte = live + i % (kRowBytes - live);
        for (Tile* tile : {&buffers_.stages[stage].key, &buffers_.stages[stage].value}) {
          *reinterpret_cast<uint4*>(&(*tile)[token][byte]) = make_uint4(0, 0, 0, 0);
        }
      }
    }
  }

  const DecodeMmaParams& params_;
  Buffers& buffers_;
  const unsigned char* table_;
  // The first row of the KV head, from this lane's piece on.
  const unsigned char* key_;
  const unsigned char* value_;
  // Shared addresses in the keys of the first stage: what this lane reads and copies first.
  uint32_t key_from_;
  uint32_t value_from_;
  uint32_t copy_to_;
  // Positions, unsigned: some tiles past the end do not wrap.
  uint32_t end_;
  uint32_t copy_end_;  // 0 in lanes whose piece is past head_dim
  uint32_t step_;
  uint32_t first_;      // of the tile
  uint32_t stage_ = 0;  // of the tile: bytes from the first stage
  Place next_;          // of this lane's token of the tile that is asked for next
};

}  // namespace paged_attn
