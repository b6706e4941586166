// One warp's stream of K and V rows: tiles of tokens, copied to shared memory ahead of their use.
#pragma once

#include "device/ptx.cuh"
#include "mma_params.h"

namespace paged_attn {

// A warp takes every num_warps-th tile of an item's tokens. Each tile has a K and a V buffer, which
// are copy groups of their own, K first. Nothing here is shared with other warps.
template <DType kKv, int kDim>
class TokenRing {
 public:
  static constexpr int kRowBytes = kDim * element_size(kKv);
  static constexpr int kTokens = kRowBytes == 512 ? 16 : 32;
  static constexpr int kStages = kRowBytes <= 128 ? 2 : 1;
  // 16 bytes more than a row: the 8 rows of a fragment lie in different banks.
  static constexpr int kPitch = kRowBytes + 16;
  using Tile = unsigned char[kTokens][kPitch];
  struct alignas(16) Stage {
    Tile key;
    Tile value;
  };
  struct Buffers {
    Stage stages[kStages];
  };

  __device__ TokenRing(const DecodeMmaParams& params, const RowTile& item, Buffers& buffers,
                       int warp, int num_warps)
      : params_(params),
        buffers_(buffers),
        tables_(params.decode.block_tables.data +
                (item.seq < 0 ? 0 : item.seq) * params.decode.block_tables.seq_stride),
        key_(head_base(params.decode.key_cache, item.kv_head)),
        value_(head_base(params.decode.value_cache, item.kv_head)),
        begin_(static_cast<int>(item.range.begin) + warp * kTokens),
        end_(static_cast<int>(item.range.end)),
        step_(num_warps * kTokens),
        num_tiles_(end_ > begin_ ? (end_ - begin_ + step_ - 1) / step_ : 0) {}

  // Tiles of this warp.
  __device__ int num_tiles() const { return num_tiles_; }
  __device__ int first_token(int tile) const { return begin_ + tile * step_; }

  // Starts the copies of the first tiles.
  __device__ void fill() {
    clear_padding();
    for (int stage = 0; stage < kStages; ++stage) {
      locate(stage);
      resolve();
      copy(buffers_.stages[stage].key, key_, key_row_, params_.key_units, stage);
      copy(buffers_.stages[stage].value, value_, value_row_, params_.value_units, stage);
    }
    locate(kStages);
  }

  // The shared address of a tile's keys, once they have landed.
  __device__ uint32_t wait_key(int tile) {
    wait();
    return ptx::shared_address(&buffers_.stages[tile % kStages].key);
  }
  __device__ uint32_t wait_value(int tile) {
    wait();
    return ptx::shared_address(&buffers_.stages[tile % kStages].value);
  }

  // To be called when the whole warp has read what wait_key(tile) gave: starts the next copy there.
  __device__ void refill_key(int tile) {
    resolve();
    ptx::warp_sync();  // every lane has read the buffer
    copy(buffers_.stages[tile % kStages].key, key_, key_row_, params_.key_units, tile + kStages);
  }
  __device__ void refill_value(int tile) {
    ptx::warp_sync();  // every lane has read the buffer
    copy(buffers_.stages[tile % kStages].value, value_, value_row_, params_.value_units,
         tile + kStages);
    locate(tile + kStages + 1);
  }

  __device__ void drain() { ptx::copy_async_wait<0>(); }

 private:
  static constexpr int kPieces = kRowBytes / 16;
  static constexpr int kRowsAtOnce = ptx::kWarpSize / kPieces;

  static __device__ const unsigned char* head_base(const PoolView& pool, int64_t head) {
    return static_cast<const unsigned char*>(pool.data) +
           head * pool.head_stride * element_size(kKv);
  }

  // All but the newest 2 * kStages - 1 groups: what was asked for longest ago.
  __device__ void wait() {
    ptx::copy_async_wait<2 * kStages - 1>();
    ptx::warp_sync();  // the other lanes' copies are visible, too
  }

  // Loads the block of this lane's token of a tile, a tile ahead of its use. Past the end the last
  // token stands in, so that neither dead table entries nor dead slots are touched.
  __device__ void locate(int tile) {
    if (tile >= num_tiles_) return;
    int token = first_token(tile) + threadIdx.x % kTokens;
    token = token < end_ ? token : end_ - 1;
    const uint32_t index = params_.block_size.divide(token);
    offset_ = token - index * params_.decode.shape.block_size;
    block_ = tables_[index * params_.decode.block_tables.block_stride];
  }

  // The rows of the located token, in units that fit 32 bits: see RowUnits.
  __device__ void resolve() {
    key_row_ = params_.key_units.row(block_, offset_);
    value_row_ = params_.value_units.row(block_, offset_);
  }

  // Lanes copy pieces of 16 bytes, neighbouring lanes neighbouring pieces of one row. Commits a
  // group in any case, so that groups can be counted.
  __device__ void copy(Tile& tile, const unsigned char* base, uint32_t row, const RowUnits& units,
                       int index) {
    if (index < num_tiles_) {
      const int lane = threadIdx.x % ptx::kWarpSize;
      const int piece = lane % kPieces;
      const bool live = piece * 16 < params_.decode.shape.head_dim * element_size(kKv);
      const uint32_t to =
          ptx::shared_address(&tile[lane / kPieces][0]) + static_cast<uint32_t>(piece) * 16;
      const unsigned char* from = base + piece * 16;
#pragma unroll
      for (int first = 0; first < kTokens; first += kRowsAtOnce) {
        const uint64_t unit = ptx::shuffle(row, first + lane / kPieces);
        if (live) ptx::copy_async(to + first * kPitch, from + unit * units.bytes);
      }
    }
    ptx::copy_async_commit();
  }

  // Dimensions past head_dim take part in the products: they are 0.
  __device__ void clear_padding() {
    const int live = params_.decode.shape.head_dim * element_size(kKv);
    if (live == kRowBytes) return;
    const int lane = threadIdx.x % ptx::kWarpSize;
    for (int stage = 0; stage < kStages; ++stage) {
      for (int i = lane * 16; i < kTokens * (kRowBytes - live); i += ptx::kWarpSize * 16) {
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
  const int32_t* tables_;
  const unsigned char* key_;
  const unsigned char* value_;
  int begin_;
  int end_;
  int step_;
  int num_tiles_;
  int32_t block_ = 0;
  uint32_t offset_ = 0;
  uint32_t key_row_ = 0;
  uint32_t value_row_ = 0;
};

}  // namespace paged_attn
