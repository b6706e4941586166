// A whole kernel in small: a ring of asynchronous copies, ldmatrix and mma. Compiled for the GPU
// too.
//
// Each CTA, of one warp, computes D = A B^T with A 16 x depth, B 8 x depth, D 16 x 8 in float. Its
// data is these three, one after another; depth is args.option, and rows are padded to a multiple
// of 8 elements, of any content.
#include "selftest.h"

using selftest::Args;
namespace ptx = selftest::ptx;

namespace {

constexpr int kTile = 16;  // of the depth
constexpr int kStages = 3;
// 16 bytes of padding: the 8 rows of a matrix lie in different banks.
constexpr int kRow = kTile + 8;

struct WarpProductSmem {
  uint16_t a[kStages][16][kRow];
  uint16_t b[kStages][8][kRow];
};

// Bytes of a half row, of 8 elements, that are within the depth.
__device__ __forceinline__ int live_bytes(int left) {
  return left < 0 ? 0 : left < 8 ? left * 2 : 16;
}

// Where this lane copies 16 bytes of each tile: half a row. Eight lanes in a row write eight rows,
// which lie in different banks, as eight halves of four rows would not.
struct Copy {
  const uint16_t* from;
  uint32_t to;  // in stage 0
  int element;  // the first, within the tile
};

template <int kRows>
__device__ __forceinline__ Copy make_copy(const uint16_t* rows, int64_t pitch,
                                          const uint16_t (&stage)[kRows][kRow]) {
  const int lane = static_cast<int>(threadIdx.x);
  const int row = lane % kRows, element = lane / kRows % 2 * 8;
  return {rows + row * pitch + element, ptx::shared_address(&stage[row][element]), element};
}

template <bool kBf16>
__device__ void multiply(const Args& args) {
  auto& smem = ptx::shared_memory<WarpProductSmem>();
  const int lane = static_cast<int>(threadIdx.x);
  const int depth = static_cast<int>(args.option);
  const int num_tiles = (depth + kTile - 1) / kTile;
  const int64_t pitch = (depth + 7) / 8 * 8;
  constexpr int64_t kResultElements = 16 * 8 * 2;  // floats, counted as elements of A
  uint16_t* a_rows =
      static_cast<uint16_t*>(args.data) + blockIdx.x * (24 * pitch + kResultElements);
  uint16_t* b_rows = a_rows + 16 * pitch;
  float* result = static_cast<float*>(static_cast<void*>(b_rows + 8 * pitch));

  const Copy a_copy = make_copy(a_rows, pitch, smem.a[0]);
  const Copy b_copy = make_copy(b_rows, pitch, smem.b[0]);  // of lanes 0 to 15
  // Always a group, if an empty one: the wait counts them.
  const auto fetch = [&](int tile) {
    if (tile < num_tiles) {
      const auto stage = static_cast<uint32_t>(tile % kStages);
      const int bytes = live_bytes(depth - tile * kTile - a_copy.element);
      ptx::copy_async_or_zero(a_copy.to + stage * static_cast<uint32_t>(sizeof smem.a[0]),
                              a_copy.from + (bytes == 0 ? 0 : tile * kTile), bytes);
      if (lane < 16) {
        const int b_bytes = live_bytes(depth - tile * kTile - b_copy.element);
        ptx::copy_async_or_zero(b_copy.to + stage * static_cast<uint32_t>(sizeof smem.b[0]),
                                b_copy.from + (b_bytes == 0 ? 0 : tile * kTile), b_bytes);
      }
    }
    ptx::copy_async_commit();
  };

  // Lane l gives row l % 8 of a quarter of A: the upper and lower eight rows of the first half of
  // the depth, then of the second. B: eight rows, first and second half.
  const uint32_t a_address = ptx::shared_address(&smem.a[0][lane % 16][lane / 16 * 8]);
  const uint32_t b_address = ptx::shared_address(&smem.b[0][lane % 8][lane / 8 % 2 * 8]);
  float c[4] = {};
  for (int tile = 0; tile < kStages; ++tile) fetch(tile);
  for (int tile = 0; tile < num_tiles; ++tile) {
    const auto stage = static_cast<uint32_t>(tile % kStages);
    ptx::copy_async_wait<kStages - 1>();
    ptx::warp_sync();  // every lane's part of the tile has landed
    uint32_t a[4], b[2];
    ptx::ldmatrix(a, a_address + stage * static_cast<uint32_t>(sizeof smem.a[0]));
    ptx::ldmatrix(b, b_address + stage * static_cast<uint32_t>(sizeof smem.b[0]));
    ptx::warp_sync();  // the stage has been read
    fetch(tile + kStages);
    if constexpr (kBf16) {
      ptx::mma_m16n8k16_bf16(c, a, b);
    } else {
      ptx::mma_m16n8k16_f16(c, a, b);
    }
  }
  // The groups that may still be pending are empty: nothing is in flight at the exit.
  float* mine = result + lane / 4 * 8 + lane % 4 * 2;
  ptx::store_global(mine, make_float2(c[0], c[1]));
  ptx::store_global(mine + 64, make_float2(c[2], c[3]));
}

}  // namespace

SELFTEST_KERNEL(warp_product_f16) { multiply<false>(args); }

SELFTEST_KERNEL(warp_product_bf16) { multiply<true>(args); }

// data goes through shared memory, where another thread than the one that fetched it picks it up.
SELFTEST_KERNEL(copy_through_shared_memory) {
  struct Smem {
    uint4 rows[128];
  };
  auto& smem = ptx::shared_memory<Smem>();
  uint4* data = static_cast<uint4*>(args.data) + blockIdx.x * blockDim.x;
  ptx::copy_async(ptx::shared_address(&smem.rows[threadIdx.x]), data + threadIdx.x);
  ptx::copy_async_wait_all();
  ptx::cta_sync();
  ptx::store_global(data + threadIdx.x, smem.rows[blockDim.x - 1 - threadIdx.x]);
}
