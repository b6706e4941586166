// One fault in each kernel; see faulty.cpp.
#include "selftest.h"

namespace {

using selftest::Args;
namespace ptx = selftest::ptx;

struct RowsSmem {
  uint4 rows[32];
};

uint32_t first_row() { return ptx::shared_address(ptx::shared_memory<RowsSmem>().rows); }

SELFTEST_KERNEL(exit_with_pending_copy) {
  const uint32_t to = first_row() + threadIdx.x * 16;
  ptx::copy_async(to, args.data);  // site: exit_with_pending_copy
  ptx::copy_async_commit();
  if (threadIdx.x != 9) ptx::copy_async_wait<0>();
}

// Without a wait the data is not there.
SELFTEST_KERNEL(missing_copy_wait) {
  auto& smem = ptx::shared_memory<RowsSmem>();
  float4* data = static_cast<float4*>(args.data) + threadIdx.x;
  ptx::copy_async(first_row() + threadIdx.x * 16, data);
  if (args.option != 0) ptx::copy_async_wait_all();
  const uint4 row = smem.rows[threadIdx.x];  // site: missing_copy_wait
  ptx::copy_async_wait_all();
  ptx::store_global(static_cast<uint4*>(static_cast<void*>(data)), row);
}

// The bytes of data from option on.
SELFTEST_KERNEL(copy_source) {
  const char* source = static_cast<const char*>(args.data) + args.option;
  ptx::copy_async(first_row(), source);  // site: copy_source
  ptx::copy_async_wait_all();
}

SELFTEST_KERNEL(copy_destination) {
  const uint32_t to = first_row() + static_cast<uint32_t>(args.option);
  ptx::copy_async(to, args.data);  // site: copy_destination
  ptx::copy_async_wait_all();
}

SELFTEST_KERNEL(copy_too_many_bytes) {
  const int bytes = static_cast<int>(args.option);
  ptx::copy_async_or_zero(first_row(), args.data, bytes);  // site: copy_too_many_bytes
  ptx::copy_async_wait_all();
}

SELFTEST_KERNEL(two_copies_to_one_place) {
  for (int i = 0; i < 2; ++i) {
    ptx::copy_async(first_row(), args.data);  // site: two_copies_to_one_place
    ptx::copy_async_commit();
  }
  ptx::copy_async_wait<0>();
}

// Lane 3 is off by option bytes.
SELFTEST_KERNEL(matrix_row) {
  uint32_t m[4];
  auto& smem = ptx::shared_memory<RowsSmem>();
  smem.rows[threadIdx.x] = make_uint4(0, 0, 0, 0);
  ptx::warp_sync();
  const uint32_t off = threadIdx.x == 3 ? static_cast<uint32_t>(args.option) : 0;
  ptx::ldmatrix(m, first_row() + threadIdx.x * 16 + off);  // site: matrix_row
}

SELFTEST_KERNEL(matrices_of_two_kinds) {
  const emu::Site here = emu::Site::current();
  uint32_t m[1];
  const uint32_t row = first_row();
  if (threadIdx.x < 16) {
    ptx::ldmatrix(m, row, here);
  } else {
    ptx::ldmatrix_trans(m, row, here);
  }
}

SELFTEST_KERNEL(lane_without_mma) {
  float c[4] = {};
  if (threadIdx.x != 17) ptx::mma_m16n8k8_f16(c, {0, 0}, {0});  // site: lane_without_mma
}

SELFTEST_KERNEL(shared_address_of_global_memory) {
  ptx::shared_address(args.data);  // site: shared_address_of_global_memory
}

SELFTEST_KERNEL(misaligned_atomic) {
  void* counter = static_cast<char*>(args.data) + args.option;
  ptx::atomic_add(static_cast<uint32_t*>(counter), 1);  // site: misaligned_atomic
}

}  // namespace
