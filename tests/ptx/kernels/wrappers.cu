// What device/ptx.cuh wraps beyond the kernels' needs of today, each used once: its asm is then
// executed as nvcc emits it.
#include "device/fragments.cuh"
#include "device/ptx.cuh"

namespace paged_attn {
namespace {

constexpr int kTile = 16;    // rows of A, and the depth of a tile
constexpr int kColumns = 8;  // of B
constexpr int kRow = 24;     // 16-bit elements of a padded row in shared memory
constexpr int kStages = 2;

struct MatmulParams {
  const uint16_t* a;  // [num_tiles, kTile, kTile]; if transposed, depth first
  const uint16_t* b;  // [num_tiles, kColumns, kTile], depth last
  float* c;           // [kTile, kColumns], the sum over tiles
  int32_t num_tiles;
  int32_t live_rows;  // of each tile of `a` in memory; the others count as zero
};

struct Smem {
  uint16_t a[kStages][kTile][kRow];
  uint16_t b[kStages][kColumns][kRow];
};

__device__ void load_tile(const MatmulParams& p, Smem& smem, int tile) {
  const int lane = threadIdx.x;
  const int row = lane / 2;
  const int column = lane % 2 * 8;
  const int stage = tile % kStages;
  const int live = row < p.live_rows ? row : 0;
  ptx::copy_async_or_zero(ptx::shared_address(&smem.a[stage][row][column]),
                          p.a + (tile * kTile + live) * kTile + column, row < p.live_rows ? 16 : 0);
  if (row < kColumns) {
    ptx::copy_async(ptx::shared_address(&smem.b[stage][row][column]),
                    p.b + (tile * kColumns + row) * kTile + column);
  }
}

// One warp: C = sum of A B over the tiles, through a ring of two stages.
template <bool kBf16, bool kTransposed>
__device__ void matmul(const MatmulParams& p) {
  auto& smem = ptx::shared_memory<Smem>();
  const int lane = threadIdx.x;
  float c[4] = {};
  for (int tile = 0; tile < kStages - 1; ++tile) {
    if (tile < p.num_tiles) load_tile(p, smem, tile);
    ptx::copy_async_commit();
  }
  for (int tile = 0; tile < p.num_tiles; ++tile) {
    if (tile + kStages - 1 < p.num_tiles) load_tile(p, smem, tile + kStages - 1);
    ptx::copy_async_commit();
    ptx::copy_async_wait<kStages - 1>();
    ptx::warp_sync();  // every lane's part of the tile has landed
    const int stage = tile % kStages;
    uint32_t a[4];
    uint32_t b[2];
    const int half = lane / 8 % 2 * 8;
    const int depth = lane / 16 * 8;
    if constexpr (kTransposed) {
      ptx::ldmatrix_trans(a, ptx::shared_address(&smem.a[stage][depth + lane % 8][half]));
    } else {
      ptx::ldmatrix(a, ptx::shared_address(&smem.a[stage][half + lane % 8][depth]));
    }
    ptx::ldmatrix(b, ptx::shared_address(&smem.b[stage][lane % 8][half]));
    if constexpr (kBf16) {
      ptx::mma_m16n8k16_bf16(c, a, b);
    } else if (tile % 2 == 0) {
      ptx::mma_m16n8k16_f16(c, a, b);
    } else {
      ptx::mma_m16n8k8_f16(c, {a[0], a[1]}, {b[0]});
      ptx::mma_m16n8k8_f16(c, {a[2], a[3]}, {b[1]});
    }
    ptx::warp_sync();  // all have read the stage, before the next copies overwrite it
  }
  ptx::copy_async_wait_all();
  for (int i = 0; i < 4; ++i) {
    p.c[(lane / 4 + i / 2 * 8) * kColumns + lane % 4 * 2 + i % 2] = c[i];
  }
}

}  // namespace

extern "C" __global__ void matmul_f16(const __grid_constant__ MatmulParams p) {
  matmul<false, false>(p);
}
extern "C" __global__ void matmul_f16_trans(const __grid_constant__ MatmulParams p) {
  matmul<false, true>(p);
}
extern "C" __global__ void matmul_bf16(const __grid_constant__ MatmulParams p) {
  matmul<true, false>(p);
}

// out[i] of each lane, i counting the wrappers below; `counter` is one word.
extern "C" __global__ void wrappers(const float* x, uint32_t* out, uint32_t* counter) {
  const int lane = threadIdx.x;
  const float low = x[2 * lane];
  const float high = x[2 * lane + 1];
  const uint32_t bits = ptx::float_to_bits(low);
  const uint32_t pair = ptx::floats_to_f16x2(low, high);
  const uint16_t codes = static_cast<uint16_t>(ptx::float_to_e4m3(low) | lane << 8);
  // Lane by lane, all codes there are.
  const HalfPairs every[2] = {widen<DType::kF8E4m3>(lane * 0x08080808u + 0x03020100u),
                              widen<DType::kF8E4m3>(lane * 0x08080808u + 0x07060504u)};
  const uint32_t results[] = {
      pair,
      ptx::floats_to_bf16x2(low, high),
      ptx::byte_permute(bits, lane, 0x5410),
      ptx::add_f16x2(pair, pair),
      ptx::multiply_f16x2(pair, pair),
      ptx::fma_f16x2(pair, pair, pair),
      ptx::e4m3x2_to_f16x2(codes),
      ptx::e5m2x2_to_f16x2(codes),
      ptx::float_to_e5m2(high),
      ptx::reduce_add(bits),
      static_cast<uint32_t>(ptx::reduce_min(static_cast<int32_t>(bits))),
      ptx::reduce_max(bits),
      ptx::ballot(low > high),
      static_cast<uint32_t>(ptx::any(low > 2.f) + 2 * ptx::all(low > -100.f)),
      ptx::shuffle_up(bits, 3),
      ptx::shuffle_down(bits, 3),
      ptx::shuffle(bits, lane + 1),
      ptx::movmatrix_trans(pair),
      ptx::float_to_bits(ptx::exp2(low)),
      ptx::float_to_bits(ptx::reciprocal(high)),
      every[0].low,
      every[0].high,
      every[1].low,
      every[1].high,
  };
  constexpr int kResults = sizeof(results) / sizeof(results[0]);
  for (int i = 0; i < kResults; ++i) out[lane * kResults + i] = results[i];
  ptx::fence_gpu();
  if (ptx::atomic_increment(counter, 31) == 31) ptx::atomic_add(counter, 5);
}

}  // namespace paged_attn
