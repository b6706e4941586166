// From an instruction to the source lines that it came from.
#pragma once

#include <string>
#include <vector>

#include "error.h"

namespace emu {

// One line of code and those it is inlined into, innermost first: "kernels/a.cuh:12". Lines of the
// emulator itself are left out. Needs addr2line; without it, or without debug information, it is
// "library.so+0x1234".
using Place = std::vector<std::string>;

// Results are kept. Many at once cost little more than one.
std::vector<Place> find_places(const std::vector<const void*>& instructions);

// "a.cuh:12 < b.cuh:30"
std::string to_string(const Place& place);

// ---- Sites: a number for each place in the code that touches memory ----

// `site` counts only where pc is not in a kernel; it may be null.
uint16_t intern_site(const void* pc, const Site* site);
std::vector<Place> site_places(const std::vector<uint16_t>& sites);
std::string site_to_string(uint16_t site);

}  // namespace emu
