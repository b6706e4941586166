// Kernels without a fault, unless option says otherwise.
#include "selftest.h"

namespace {

using selftest::Args;
namespace ptx = selftest::ptx;

constexpr int kThreads = 128;

struct ReductionSmem {
  float partial[kThreads];
};

// data[blockIdx.x] becomes the sum over threads of thread + blockIdx.x. option 1 leaves out the
// barrier between the writes of the partial sums and the first read of another thread's.
SELFTEST_KERNEL(block_reduction) {
  float* partial = ptx::shared_memory<ReductionSmem>().partial;
  const unsigned t = threadIdx.x;
  partial[t] = static_cast<float>(t + blockIdx.x);
  if (args.option != 1) ptx::cta_sync();
  for (unsigned width = kThreads / 2; width > 0; width /= 2) {
    if (t < width) partial[t] += partial[t + width];
    ptx::cta_sync();
  }
  if (t == 0) static_cast<float*>(args.data)[blockIdx.x] = partial[0];
}

// data: for each thread an int4 of what it got from each shuffle.
SELFTEST_KERNEL(shuffles) {
  const int t = static_cast<int>(threadIdx.x), lane = t % 32;
  const int neighbour = ptx::shuffle_xor(t, 5);
  const int next = ptx::shuffle(t, lane + 1);
  const float reversed = ptx::shuffle(static_cast<float>(t), 31 - lane);
  // The halves of a warp on their own, at different places.
  int in_half;
  if (lane < 16) {
    in_half = emu::shuffle(0x0000ffffu, t, 3);
  } else {
    in_half = emu::shuffle(0xffff0000u, t, 19);
  }
  ptx::warp_sync();
  ptx::store_global(static_cast<int4*>(args.data) + t,
                    make_int4(neighbour, next, static_cast<int>(reversed), in_half));
}

// data: for each thread a uint4 of ballot, any and all of two predicates.
SELFTEST_KERNEL(votes) {
  const unsigned t = threadIdx.x;
  const uint32_t odd = emu::ballot(ptx::kFullMask, t % 2 == 1);
  const bool any = emu::any(ptx::kFullMask, t == 40);
  const bool all = emu::all(ptx::kFullMask, t < 40);
  ptx::store_global(static_cast<uint4*>(args.data) + t, make_uint4(odd, any, all, 0));
}

// data: a counter, then the CTAs (option 0) or the threads before and after a barrier (option 1) in
// the order in which they ran.
SELFTEST_KERNEL(record_order) {
  int* counter = static_cast<int*>(args.data);
  int* order = counter + 1;
  order[(*counter)++] = static_cast<int>(args.option == 0 ? blockIdx.x : threadIdx.x);
  if (args.option == 1) {
    ptx::cta_sync();
    order[(*counter)++] = static_cast<int>(threadIdx.x);
  }
}

struct OneFloatSmem {
  float value;
};

// data[blockIdx.x]: what shared memory holds when the CTA starts; then it is written.
SELFTEST_KERNEL(uninitialised_shared_memory) {
  float& value = ptx::shared_memory<OneFloatSmem>().value;
  static_cast<float*>(args.data)[blockIdx.x] = value;
  value = 1.f;
}

// data[0] += the number of threads, by a reduction of each warp.
SELFTEST_KERNEL(count_threads) {
  int sum = 1;
  for (int mask = 16; mask > 0; mask /= 2) sum += ptx::shuffle_xor(sum, mask);
  if (threadIdx.x % 32 == 0) *static_cast<int64_t*>(args.data) += sum;
}

// option barriers in every thread.
SELFTEST_KERNEL(barriers) {
  for (int64_t i = 0; i < args.option; ++i) ptx::cta_sync();
}

// Copies the first half of data to the second, float4 by float4, and one float past it at option.
SELFTEST_KERNEL(copy_vectors) {
  const int64_t half = args.size / 2 / 16;
  float4* data = static_cast<float4*>(args.data);
  for (int64_t i = threadIdx.x; i < half; i += blockDim.x) {
    ptx::store_global(data + half + i, ptx::load_global<float4>(data + i));
  }
}

}  // namespace
