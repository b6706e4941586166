// What a launch is run with, and the device that is pretended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "error.h"

namespace emu {

// Which of the runnable threads of a CTA goes on when one blocks.
enum class Schedule : uint8_t {
  kInOrder,     // the lowest index
  kRandom,      // any
  kPriorities,  // the highest of random priorities, of which two are swapped now and then
  kReverse,     // the highest index
};

struct Config {
  // Each launch is a function of these two alone, so that a failure repeats by itself.
  uint64_t seed = 0;
  Schedule schedule = Schedule::kRandom;

  int multiprocessors = 4;
  int compute_capability_major = 9;
  int compute_capability_minor = 0;
  // The compute capability, major * 10 + minor, that kernels are said to be compiled for. What runs
  // is always the same code; an instruction that compilers for less do not know fails.
  int code_arch = 90;
  size_t max_shared_memory = 227 * 1024;
};

// Read once from EMU_SEED and EMU_SCHEDULE; then as set through the functions of c_api.h.
Config& config();

// "in_order", "random", "priorities", "reverse"
const char* to_string(Schedule schedule);
// False if there is no such schedule.
bool parse_schedule(const std::string& name, Schedule* schedule);

// Throws Error unless kernels are compiled for this compute capability or more.
void require_code_for(int arch, const char* instruction, const Site& site);

// "EMU_SEED=3 EMU_SCHEDULE=reverse"
std::string reproduction();

}  // namespace emu
