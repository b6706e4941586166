// Runs a CUDA kernel on the CPU: a fiber for each thread of a CTA, one OS thread, CTAs one after
// another in random order. A fiber runs until it blocks in a barrier or a warp collective.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "error.h"
#include "types.h"

namespace emu {

inline constexpr unsigned kWarpSize = 32;

// Of the running fiber; meaningless outside of a launch.
extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t shared_memory_bytes = 0;
};

// Why the device would refuse the launch, in CUDA's words; empty if it would not.
std::string refusal(const LaunchShape& shape);

// Runs kernel() once for each thread; returns when all have finished. Throws Error if the launch is
// refused, and for whatever goes wrong in a thread: an exception, a memory fault, a barrier or
// collective that not all reach. The emulator stays usable; objects on the stacks of the other
// threads are not destroyed.
void launch(const LaunchShape& shape, const std::function<void()>& kernel,
            const Site& site = Site::current());

// ---- For the running fiber ----

// The CTA's dynamic shared memory, uninitialised when the CTA starts.
void* shared_memory();
size_t shared_memory_size();

unsigned lane_id();
// The thread's number in its CTA.
unsigned thread_rank();

// Every thread of the CTA arrives at the same site.
void cta_barrier(const Site& site = Site::current());

// Leaves the running fiber for good. Whoever does it has left word of the reason: see run_cta().
[[noreturn]] void abandon_fiber();

// A kind of warp collective. Each lane of the mask deposits a pointer to operands of its own, on
// its stack; the last to arrive combines. operands[lane] is null outside of the mask.
struct Collective {
  const char* name;
  void (*combine)(uint32_t mask, void* const* operands);
  // Whether what the lanes did to memory before it is ordered before what they do after it.
  bool orders_memory = false;
};

// Blocks until all lanes of `mask` have come to the same kind at the same site. Disjoint masks do
// not meet. Throws Error if they cannot meet.
void rendezvous(const Collective& kind, uint32_t mask, void* operands, const Site& site);

}  // namespace emu
