// Bugs that only the hook build sees for certain, each beside the code that is right: option 0 is
// the bug, option 1 is right. Data is poisoned or zero unless said otherwise.
#include "selftest.h"

namespace {

using selftest::Args;
namespace ptx = selftest::ptx;

float* floats(const Args& args) { return static_cast<float*>(args.data); }
bool right(const Args& args) { return args.option == 1; }

constexpr int kTile = 64;
constexpr int kMaxWarps = 4;

struct StageSmem {
  float stage[2][kTile];
};

// Copies tiles of data through a stage of shared memory and sums the neighbours' elements.
// data: tiles, then a float for each of 64 threads.
SELFTEST_KERNEL(missing_barrier_after_wait) {
  auto& smem = ptx::shared_memory<StageSmem>();
  const unsigned t = threadIdx.x;
  smem.stage[0][t] = floats(args)[t];  // site: fill of the stage
  if (right(args)) ptx::cta_sync();
  floats(args)[kTile + t] = smem.stage[0][(t + 32) % kTile];  // site: use of the stage
}

// The same, with the copy made by cp.async, and waited for.
SELFTEST_KERNEL(missing_barrier_after_async_wait) {
  auto& smem = ptx::shared_memory<StageSmem>();
  const unsigned t = threadIdx.x;
  if (t < kTile / 4) {
    ptx::copy_async(ptx::shared_address(&smem.stage[0][4 * t]), floats(args) + 4 * t);
  }
  ptx::copy_async_commit();
  ptx::copy_async_wait_all();
  if (right(args)) ptx::cta_sync();
  floats(args)[kTile + t] = smem.stage[0][(t + 32) % kTile];
}

// A thread that reads what it copied itself, without having waited.
SELFTEST_KERNEL(missing_wait) {
  auto& smem = ptx::shared_memory<StageSmem>();
  const unsigned t = threadIdx.x;
  if (t < kTile / 4) {
    ptx::copy_async(ptx::shared_address(&smem.stage[0][4 * t]), floats(args) + 4 * t);
    ptx::copy_async_commit();
    if (right(args)) ptx::copy_async_wait_all();
    floats(args)[kTile + t] = smem.stage[0][4 * t];  // site: read in flight
    ptx::copy_async_wait_all();
  }
}

// The second tile overwrites the first while others still read it.
SELFTEST_KERNEL(missing_trailing_barrier) {
  auto& smem = ptx::shared_memory<StageSmem>();
  const unsigned t = threadIdx.x;
  float sum = 0.f;
  for (int tile = 0; tile < 2; ++tile) {
    smem.stage[0][t] = floats(args)[tile * kTile + t];
    ptx::cta_sync();
    sum += smem.stage[0][kTile - 1 - t];
    if (right(args)) ptx::cta_sync();
  }
  floats(args)[2 * kTile + t] = sum;
}

// data: 64 floats that are defined and 64 that are not; each thread sums every 32nd.
SELFTEST_KERNEL(tail_mask) {
  const int length = kTile + (right(args) ? 0 : 1);
  float sum = 0.f;
  for (int i = static_cast<int>(threadIdx.x); i < length; i += 32) sum += floats(args)[i];
  floats(args)[2 * kTile + threadIdx.x] = sum;
}

// data: a table of ints, of which the first 4 are defined, at byte 0; rows of 16 floats from byte
// 64 on. The wrong one goes through an entry that is padding.
SELFTEST_KERNEL(garbage_block) {
  const int* table = static_cast<int*>(args.data);
  const int entry = right(args) ? 3 : 4;
  const int64_t block = table[entry];
  floats(args)[128 + threadIdx.x] = floats(args)[16 + block * 16 + threadIdx.x % 16];
}

// The value that was read too far is never used, but it was read.
SELFTEST_KERNEL(table_over_read) {
  const int* table = static_cast<int*>(args.data);
  const int count = 4;
  const int i = static_cast<int>(threadIdx.x);
  int next = 0;
  if (i < count + (right(args) ? 0 : 1)) next = table[i];
  next = ptx::shuffle(next, 0);
  floats(args)[16 + i] = static_cast<float>(next);
}

struct ArraysSmem {
  float first[32];
  float second[32];
};

// Past the end of one array, and still in shared memory.
SELFTEST_KERNEL(shared_array) {
  auto& smem = ptx::shared_memory<ArraysSmem>();
  const unsigned t = threadIdx.x;
  smem.second[t] = 0.f;
  smem.first[t + (right(args) ? 0 : 1)] = 1.f;
}

// The same through a pointer, past the end of all shared memory but within its last 16 bytes.
struct OddSmem {
  float values[33];
};

SELFTEST_KERNEL(shared_pointer) {
  volatile float* values = ptx::shared_memory<OddSmem>().values;
  values[threadIdx.x + (right(args) ? 1 : 2)] = 1.f;
}

// Each of 64 threads adds 1 to data[0].
SELFTEST_KERNEL(unsynchronised_sum) {
  if (right(args)) {
    ptx::atomic_add(static_cast<uint32_t*>(args.data), 1);
  } else {
    floats(args)[0] += 1.f;
  }
}

struct WarpSmem {
  float values[kMaxWarps][32];
};

SELFTEST_KERNEL(missing_warp_sync) {
  auto& values = ptx::shared_memory<WarpSmem>().values[threadIdx.x / 32];
  const unsigned lane = threadIdx.x % 32;
  values[lane] = static_cast<float>(lane);
  // A shuffle makes the lanes meet and orders nothing.
  ptx::shuffle_xor(1, 1);
  if (right(args)) ptx::warp_sync();
  floats(args)[threadIdx.x] = values[31 - lane];
}

// Lanes meet in halves: a half-warp's barrier does not order the other half.
SELFTEST_KERNEL(half_warp_sync) {
  auto& values = ptx::shared_memory<WarpSmem>().values[0];
  const unsigned lane = threadIdx.x;
  values[lane] = static_cast<float>(lane);
  emu::sync_warp(lane < 16 ? 0x0000ffffu : 0xffff0000u);
  floats(args)[lane] = values[right(args) ? lane ^ 1 : 31 - lane];
}

// Order that goes from lane to lane: 0 to 1, then 1 to 2.
SELFTEST_KERNEL(chain_of_warp_syncs) {
  auto& values = ptx::shared_memory<WarpSmem>().values[0];
  const unsigned lane = threadIdx.x;
  if (lane == 0) values[0] = 1.f;
  if (lane < 2) emu::sync_warp(0x3u);
  const uint32_t second = right(args) ? 0x6u : 0xcu;
  if (second >> lane & 1u) emu::sync_warp(second);
  if (lane == 2) floats(args)[0] = values[0];
}

struct BroadcastSmem {
  float value;
};

SELFTEST_KERNEL(missing_barrier_after_broadcast) {
  float& value = ptx::shared_memory<BroadcastSmem>().value;
  if (threadIdx.x == 0) value = 3.f;
  if (right(args)) {
    ptx::cta_sync();
  } else {
    ptx::warp_sync();  // too small: the other warps do not come
  }
  floats(args)[threadIdx.x] = value;
}

// Two reductions one after another with one scratch.
SELFTEST_KERNEL(reduction_scratch) {
  auto& scratch = ptx::shared_memory<WarpSmem>().values[0];
  const unsigned warp = threadIdx.x / 32;
  float total = 0.f;
  for (int round = 0; round < 2; ++round) {
    if (threadIdx.x % 32 == 0) scratch[warp] = static_cast<float>(round + 1);
    ptx::cta_sync();
    total += scratch[0] + scratch[1];
    if (right(args)) ptx::cta_sync();
  }
  floats(args)[threadIdx.x] = total;
}

SELFTEST_KERNEL(diverging_barrier) {
  if (right(args) || threadIdx.x < 32) ptx::cta_sync();
}

struct TailSmem {
  float values[kTile];
};

// Only the first 40 are written.
SELFTEST_KERNEL(uninitialised_shared) {
  auto& smem = ptx::shared_memory<TailSmem>();
  const unsigned t = threadIdx.x;
  if (t < 40 || right(args)) smem.values[t] = 1.f;
  ptx::cta_sync();
  floats(args)[t] = smem.values[kTile - 1 - t];
}

// data: 64 floats, uninitialised, and 64 more for the result.
SELFTEST_KERNEL(uninitialised_global) {
  const unsigned t = threadIdx.x;
  if (right(args)) floats(args)[t] = 1.f;
  floats(args)[kTile + t] = floats(args)[t];
}

// All CTAs write to one place. The right ones each have their own.
SELFTEST_KERNEL(one_destination) {
  if (threadIdx.x == 0) floats(args)[right(args) ? blockIdx.x : 0] = 1.f;
}

// A CTA reads what another writes.
SELFTEST_KERNEL(neighbour_cta) {
  if (threadIdx.x == 0) {
    floats(args)[blockIdx.x] = 1.f;
    if (!right(args)) floats(args)[64 + blockIdx.x] = floats(args)[blockIdx.x ^ 1];
  }
}

// data: a counter, 4 bytes that are not used, partial sums. The last CTA to come adds them up.
// option: 0, no fence before the atomic operation; 1, right; 2, none after it; 3, no barrier before
// it, so that it is of one thread and says nothing of the others' writes; 4, an atomic operation
// that has the fences in it, and right.
struct LastSmem {
  uint32_t is_last;
};

SELFTEST_KERNEL(last_cta) {
  uint32_t& is_last = ptx::shared_memory<LastSmem>().is_last;
  uint32_t* counter = static_cast<uint32_t*>(args.data);
  float* partial = floats(args) + 2;
  const unsigned t = threadIdx.x;
  partial[blockIdx.x * blockDim.x + t] = 1.f;  // site: partial sum
  if (args.option == 2 || args.option == 1) ptx::fence_gpu();
  if (args.option != 3) ptx::cta_sync();
  if (t == 0) {
    if (args.option == 1 || args.option == 2) ptx::fence_gpu();
    const uint32_t ticket = args.option >= 3 ? ptx::atomic_add(counter, 1)
                                             : __atomic_fetch_add(counter, 1u, __ATOMIC_RELAXED);
    if (args.option == 0 || args.option == 1) ptx::fence_gpu();
    is_last = ticket + 1 == gridDim.x;
  }
  ptx::cta_sync();
  if (!is_last) return;
  float sum = 0.f;
  for (unsigned i = t; i < gridDim.x * blockDim.x; i += blockDim.x) sum += partial[i];
  floats(args)[2 + gridDim.x * blockDim.x + t] = sum;
}

SELFTEST_KERNEL(misaligned_vector) {
  auto* from = static_cast<float4*>(static_cast<void*>(floats(args) + (right(args) ? 0 : 1)));
  if (threadIdx.x == 0) from[1] = from[0];  // site: misaligned_vector
}

// Undefined in C++ whatever memory it touches.
SELFTEST_KERNEL(overflowing_sum) {
  volatile int large = right(args) ? 1 : 0x7fffffff;
  floats(args)[threadIdx.x] = static_cast<float>(large + 1);  // site: overflowing_sum
}

inline __attribute__((always_inline)) void store_one(float* address) {
  *address = 1.f;  // site: inlined store
}

// Out of bounds in code that is inlined: both lines are named.
SELFTEST_KERNEL(inlined_store) {
  const int64_t count = args.size / 4;
  if (threadIdx.x == 1) {
    store_one(floats(args) + count - (right(args) ? 1 : 0));  // site: caller of the inlined store
  }
}

// Counts: each of 32 lanes reads a float at a stride of option floats, and writes it to shared
// memory at the same stride.
struct StridedSmem {
  float values[32 * 32];
};

SELFTEST_KERNEL(strided_copy) {
  auto& smem = ptx::shared_memory<StridedSmem>();
  const int64_t index = static_cast<int64_t>(threadIdx.x) * args.option;
  smem.values[index] = floats(args)[index];  // site: strided_copy
  ptx::cta_sync();
}

// Counts: vectors through shared memory; ptx::load_global is seen once.
struct VectorSmem {
  float4 values[32];
};

SELFTEST_KERNEL(vector_copy) {
  auto& smem = ptx::shared_memory<VectorSmem>();
  const float4* from = static_cast<const float4*>(args.data) + threadIdx.x;
  smem.values[threadIdx.x] = ptx::load_global<float4>(from);  // site: vector_copy load
  ptx::warp_sync();
  ptx::store_global(static_cast<float4*>(args.data) + 32 + threadIdx.x,
                    smem.values[31 - threadIdx.x]);
}

}  // namespace
