// How a fiber stops at an instruction that may not throw.
#pragma once

#include <string>

#include "error.h"

namespace emu {

// Where the compiler put a check.
struct SourcePlace {
  const char* file;
  unsigned line;
  unsigned column;
};

// Leaves the running fiber for good; the launch throws Error with this text, the place of the
// fiber in its kernel, and the calls that led to it. `site` serves where the place is not known;
// `details` get a line of their own.
[[noreturn]] void stop_fiber(const std::string& what, const Site* site, const std::string& details);
[[noreturn]] void stop_fiber(const std::string& what, const SourcePlace& place);

// The text of the error that a fiber was stopped with, once; empty if none was.
std::string take_violation();

}  // namespace emu
