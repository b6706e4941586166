#include "config.h"

#include <cstdlib>

namespace emu {
namespace {

constexpr const char* kScheduleNames[] = {"in_order", "random", "priorities", "reverse"};

Config read_environment() {
  Config result;
  if (const char* seed = std::getenv("EMU_SEED")) result.seed = std::strtoull(seed, nullptr, 0);
  if (const char* name = std::getenv("EMU_SCHEDULE")) {
    if (!parse_schedule(name, &result.schedule)) {
      throw Error("emulator: EMU_SCHEDULE must be in_order, random, priorities or reverse, got " +
                  std::string(name));
    }
  }
  return result;
}

}  // namespace

Config& config() {
  static Config instance = read_environment();
  return instance;
}

const char* to_string(Schedule schedule) { return kScheduleNames[static_cast<int>(schedule)]; }

bool parse_schedule(const std::string& name, Schedule* schedule) {
  for (int i = 0; i < 4; ++i) {
    if (name == kScheduleNames[i]) {
      *schedule = static_cast<Schedule>(i);
      return true;
    }
  }
  return false;
}

void require_code_for(int arch, const char* instruction, const Site& site) {
  const int compiled = config().code_arch;
  if (compiled >= arch) return;
  throw Error(std::string(instruction) + " is of sm_" + std::to_string(arch) +
              " and later, the code is for sm_" + std::to_string(compiled) + ", in " +
              to_string(site));
}

std::string reproduction() {
  return "EMU_SEED=" + std::to_string(config().seed) +
         " EMU_SCHEDULE=" + to_string(config().schedule);
}

}  // namespace emu
