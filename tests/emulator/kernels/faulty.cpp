// One fault in each kernel. The tests look for the markers in comments to know the line that a
// message has to name.
#include <stdexcept>

#include "selftest.h"

namespace {

using selftest::Args;
namespace ptx = selftest::ptx;

float* floats(const Args& args) { return static_cast<float*>(args.data); }

SELFTEST_KERNEL(barrier_after_exit) {
  if (threadIdx.x >= 48 && args.option == 0) return;
  ptx::cta_sync();  // site: barrier_after_exit
}

SELFTEST_KERNEL(barriers_at_two_places) {
  if (threadIdx.x % 2 == args.option) {
    ptx::cta_sync();  // site: first of two barriers
  } else {
    ptx::cta_sync();  // site: second of two barriers
  }
}

SELFTEST_KERNEL(missing_lane) {
  if (threadIdx.x == 7) {
    ptx::cta_sync();  // site: missing_lane barrier
  } else {
    ptx::shuffle_xor(1, 1);  // site: missing_lane shuffle
  }
}

SELFTEST_KERNEL(lane_beside_the_barrier) {
  if (threadIdx.x == 39) {
    emu::sync_warp(1u << 6 | 1u << 7);  // never: lane 6 waits at the barrier
  }
  ptx::cta_sync();
}

// Lanes 0-15 wait for 16, which waits for 17, which waits for 0.
SELFTEST_KERNEL(cycle_of_collectives) {
  if (threadIdx.x < 16) emu::sync_warp(0x0001ffffu);
  if (threadIdx.x == 16) emu::sync_warp(0x00030000u);
  if (threadIdx.x == 17) emu::sync_warp(0x00020001u);
}

SELFTEST_KERNEL(collectives_of_two_kinds) {
  const emu::Site here = emu::Site::current();
  if (threadIdx.x % 2 == 0) {
    ptx::shuffle_xor(1, 1, here);
  } else {
    ptx::shuffle(1, 1, here);
  }
}

SELFTEST_KERNEL(collectives_at_two_places) {
  if (threadIdx.x % 2 == 0) {
    ptx::warp_sync();
  } else {
    ptx::warp_sync();
  }
}

SELFTEST_KERNEL(collectives_of_two_masks) {
  emu::sync_warp(threadIdx.x % 2 == 0 ? ptx::kFullMask : 0xffff0fffu | 1u << threadIdx.x % 32);
}

SELFTEST_KERNEL(collective_outside_of_mask) { emu::sync_warp(0xfffffff0u); }

SELFTEST_KERNEL(shuffle_from_outside_of_mask) {
  if (threadIdx.x < 16) emu::shuffle(0x0000ffffu, 1, 20);
}

SELFTEST_KERNEL(exit_before_shuffle) {
  if (threadIdx.x >= 28) return;
  ptx::shuffle_xor(1, 16);  // site: exit_before_shuffle
}

SELFTEST_KERNEL(warp_sync) { ptx::warp_sync(); }

struct ArraySmem {
  float values[10];  // 40 bytes: the end is no multiple of 16
};

// Writes values[option].
SELFTEST_KERNEL(shared_memory_index) {
  volatile float* values = ptx::shared_memory<ArraySmem>().values;
  values[args.option] = 1.f;
}

// Reads the float at byte `option` of data by an ordinary load.
SELFTEST_KERNEL(plain_read) {
  if (threadIdx.x == 5) {
    static_cast<void>(*static_cast<volatile float*>(
        static_cast<void*>(static_cast<char*>(args.data) + args.option)));
  }
}

SELFTEST_KERNEL(plain_write) {
  if (threadIdx.x == 5) {
    *static_cast<volatile float*>(static_cast<void*>(static_cast<char*>(args.data) + args.option)) =
        1.f;
  }
}

SELFTEST_KERNEL(vector_read) {
  ptx::load_global<float4>(static_cast<char*>(args.data) + args.option);  // site: vector_read
}

SELFTEST_KERNEL(vector_write) {
  ptx::store_global(static_cast<char*>(args.data) + args.option,  // site: vector_write
                    make_float4(0.f, 0.f, 0.f, 0.f));
}

SELFTEST_KERNEL(throws_exception) {
  ptx::cta_sync();
  if (threadIdx.x == 33 && blockIdx.x == 2) throw std::logic_error("thrown by the kernel");
  ptx::cta_sync();
}

SELFTEST_KERNEL(throws_integer) {
  if (threadIdx.x == 0) throw 1;
}

SELFTEST_KERNEL(division_by_zero) {
  volatile int zero = static_cast<int>(args.option);
  volatile int result = static_cast<int>(threadIdx.x + 100) / zero;
  static_cast<void>(result);
}

int recurse(volatile int* depth, const Args& args) {
  volatile char frame[4096];
  frame[0] = 1;
  ++*depth;
  return *depth < 0 ? 0 : recurse(depth, args) + frame[0];
}

SELFTEST_KERNEL(stack_overflow) {
  volatile int depth = 0;
  floats(args)[0] = static_cast<float>(recurse(&depth, args));
}

}  // namespace
