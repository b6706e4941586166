// What launches did to memory, and which instructions they issued: for each launch, and for each
// place in the code and buffer. Nothing is counted until it is asked for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "error.h"
#include "memory.h"
#include "runtime.h"

namespace emu {

extern bool counting;

// Adds to a count of the running launch, by the name of an instruction: "mma", "cp.async".
// Barriers, and warp collectives by their own names, are counted already.
void count(const char* instruction, uint64_t amount = 1);

// From here on launches are counted, and what was counted before is forgotten.
void start_counting();
void stop_counting();

// Every launch since start_counting(), as JSON.
std::string counters_as_json();

// ---- For the emulator itself ----

// An access by the running fiber, to be paired with those that the other lanes of its warp make by
// the same instruction between the same two points where the warp meets.
void count_access(const Region& region, const void* address, size_t size, Access access,
                  uint16_t site);

void begin_counters(const LaunchShape& shape, const Site& site);
// The warp, or every warp, has met.
void flush_counters(unsigned warp);
void flush_counters();

}  // namespace emu
