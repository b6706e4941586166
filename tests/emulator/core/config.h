// What a launch is run with, and the device that is pretended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

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
  int compute_capability_major = 8;
  int compute_capability_minor = 0;
  size_t max_shared_memory = 227 * 1024;
};

// Read once from EMU_SEED and EMU_SCHEDULE; then as set through the functions of c_api.h.
Config& config();

// "in_order", "random", "priorities", "reverse"
const char* to_string(Schedule schedule);
// False if there is no such schedule.
bool parse_schedule(const std::string& name, Schedule* schedule);

// "EMU_SEED=3 EMU_SCHEDULE=reverse"
std::string reproduction();

}  // namespace emu
