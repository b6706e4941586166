// What is known of every byte of the memory map: who wrote it last and who has read it since,
// whether it holds a value at all. With it each access is checked as it is made: bounds, alignment,
// permission, uninitialised reads, and races.
//
// Two accesses to one byte, of which one is a write, race unless one is ordered before the other:
// both are of one thread, or a CTA barrier lies between them, or a warp barrier of a mask with both
// lanes in it, or, between CTAs, a fence and an atomic operation on the writer's side, and an
// atomic operation on the same address and a fence (or the end of the launch) on the reader's.
// Shuffles and the other collectives order nothing.
//
// Only a library whose kernels were compiled with hooks (hooks.h) gets here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "error.h"
#include "memory.h"
#include "runtime.h"

namespace emu {

// Whether the kernels of this library report their accesses. Set while the library is loaded.
extern bool hooked;

enum CellFlags : uint8_t {
  kUninitialised = 1u << 0,  // until it is written
  kUndefined = 1u << 1,      // until it is written: nobody may look at what it holds
  kAtomic = 1u << 2,         // the last write was an atomic operation
};

// When, and by which thread: see Clock in shadow.cpp. 0: never.
using Stamp = uint64_t;

// Of one byte. A byte of the mapping costs as much as a cell only once it is touched.
struct Cell {
  Stamp write;
  // Since then: the latest read, and the latest by another thread, of another CTA or warp if there
  // is one. Where any read races with a write, one of these two does.
  Stamp read[2];
  uint16_t write_site;
  uint16_t read_site[2];
  uint8_t flags;
  uint8_t unused = 0;  // no padding: cells are compared as bytes
};
static_assert(sizeof(Cell) == 32);

// `size` cells that know nothing: initialised, defined, never touched.
Cell* map_cells(size_t size);
void unmap_cells(Cell* cells, size_t size);

// Sets or clears flags of a part of a device buffer: of `count` elements of `element_size` bytes,
// those for which the mask is not 0. Throws Error if the part is not in a buffer.
void mark(const void* address, const uint8_t* mask, size_t count, size_t element_size,
          uint8_t flags, bool set);

// A device buffer that is marked uninitialised. The host may write to it all the same: it is seen
// by the pattern that the buffer starts with, and then the whole buffer counts as initialised.
void* allocate_uninitialised(size_t size, const char* name);
// Looks for such buffers that the host has written to.
void resolve_uninitialised();

// ---- For code of the emulator that touches memory on behalf of a kernel ----

enum class Order : uint8_t { kPlain, kAtomic };

// An access by the running fiber, from an instruction at `pc` or, where that is no kernel's, from
// `site`. Does not return if it must not be made. Does nothing outside of a launch, for a fiber's
// own stack and for memory outside of the map.
void on_access(const void* address, size_t size, Access access, Order order, bool aligned,
               const void* pc, const Site* site = nullptr);

// A fence of the running fiber, for the whole device.
void on_fence();

// ---- For the scheduler ----

namespace shadow {

void begin_launch(const LaunchShape& shape, const Site& site);
void begin_cta();
// From now on fiber `thread` runs, on the stack that starts at `stack`.
void run_thread(unsigned thread, const void* stack, size_t stack_size);
void cta_barrier();
void warp_barrier(unsigned warp, uint32_t mask);

}  // namespace shadow

// "thread (3, 0, 0) of CTA (1, 0, 0)", of a stamp of this launch.
std::string describe(Stamp stamp);

}  // namespace emu
