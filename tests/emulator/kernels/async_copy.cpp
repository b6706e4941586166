// When asynchronous copies land. These kernels look where they must not, to see it.
#include "core/async_copy.h"

#include "selftest.h"

namespace {

using selftest::Args;
namespace ptx = selftest::ptx;

struct SlotsSmem {
  uint4 slots[4];
};

uint32_t peek(const uint4& slot) { return *static_cast<const volatile uint32_t*>(&slot.x); }

// data: a source of 16 bytes, then what its place in shared memory holds after the issue and after
// the wait. The source changes in between.
SELFTEST_KERNEL(landing) {
  uint32_t* data = static_cast<uint32_t*>(args.data);
  auto& smem = ptx::shared_memory<SlotsSmem>();
  smem.slots[0] = make_uint4(7, 7, 7, 7);
  ptx::copy_async(ptx::shared_address(smem.slots), data);
  data[4] = peek(smem.slots[0]);
  ptx::copy_async_commit();
  data[0] = 1234;
  data[5] = peek(smem.slots[0]);
  ptx::copy_async_wait<0>();
  data[6] = peek(smem.slots[0]);
}

// Four groups of one copy each, then a wait that leaves `option`, or -1: wait_all with the last
// copy in no group. data: four sources, and for each whether it has landed, twice.
SELFTEST_KERNEL(groups) {
  uint4* sources = static_cast<uint4*>(args.data);
  uint2* landed = static_cast<uint2*>(static_cast<void*>(sources + 4));
  auto& smem = ptx::shared_memory<SlotsSmem>();
  for (int i = 0; i < 4; ++i) {
    ptx::copy_async(ptx::shared_address(smem.slots + i), sources + i);
    if (i < 3 || args.option >= 0) ptx::copy_async_commit();
  }
  if (args.option == -1) ptx::copy_async_wait_all();
  if (args.option == 0) ptx::copy_async_wait<0>();
  if (args.option == 1) ptx::copy_async_wait<1>();
  if (args.option == 2) ptx::copy_async_wait<2>();
  if (args.option == 3) ptx::copy_async_wait<3>();
  if (args.option == 4) ptx::copy_async_wait<4>();
  if (args.option == 5) ptx::copy_async_wait<5>();
  for (int i = 0; i < 4; ++i) {
    landed[i].x = peek(smem.slots[i]) == ptx::load_global<uint4>(sources + i).x;
    landed[i].y = !emu::in_flight(smem.slots + i, 16);
  }
  ptx::copy_async_wait_all();
}

// Empty groups count: one copy, and `option` empty groups after it, of which two may be pending.
SELFTEST_KERNEL(empty_groups) {
  uint32_t* data = static_cast<uint32_t*>(args.data);
  auto& smem = ptx::shared_memory<SlotsSmem>();
  ptx::copy_async_wait<0>();  // of nothing
  ptx::copy_async(ptx::shared_address(smem.slots), data);
  ptx::copy_async_commit();
  for (int64_t i = 0; i < args.option; ++i) ptx::copy_async_commit();
  ptx::copy_async_wait<2>();
  data[4] = !emu::in_flight(smem.slots, 1);
  ptx::copy_async_wait<0>();
}

// data: 32 rows of 16 bytes, of which the first threadIdx.x bytes (at most 16) are kept.
SELFTEST_KERNEL(zero_fill) {
  struct Smem {
    uint4 rows[32];
  };
  auto& smem = ptx::shared_memory<Smem>();
  uint4* data = static_cast<uint4*>(args.data) + threadIdx.x;
  const int bytes = min(static_cast<int>(threadIdx.x), 16);
  // Of a row that is not read any aligned address will do.
  const void* source = bytes == 0 ? nullptr : data;
  ptx::copy_async_or_zero(ptx::shared_address(smem.rows + threadIdx.x), source, bytes);
  ptx::copy_async_wait_all();
  ptx::store_global(data, smem.rows[threadIdx.x]);
}

// data: for each thread of a warp, whether the copies of the other threads and its own are in
// flight while they are, and what is around them.
SELFTEST_KERNEL(in_flight) {
  uint4* data = static_cast<uint4*>(args.data);
  struct Smem {
    uint4 before;
    uint4 rows[32];
    uint4 after;
  };
  auto& smem = ptx::shared_memory<Smem>();
  const unsigned t = threadIdx.x;
  ptx::copy_async(ptx::shared_address(smem.rows + t), data + t);
  ptx::warp_sync();
  uint4 seen;
  seen.x = emu::in_flight(smem.rows + (t + 1) % 32, 4);
  seen.y = emu::in_flight(&smem.rows[t].w, 4);
  seen.z = emu::in_flight(&smem.before, 16) || emu::in_flight(&smem.after, 16) ||
           emu::in_flight(data, 16) || emu::in_flight(smem.rows, 0);
  ptx::warp_sync();
  ptx::copy_async_wait_all();
  ptx::warp_sync();
  seen.w = emu::in_flight(&smem, sizeof smem);
  ptx::store_global(data + t, seen);
}

}  // namespace
