// What every failure inside the emulator is thrown as.
#pragma once

#include <source_location>
#include <stdexcept>
#include <string>

namespace emu {

using Site = std::source_location;

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Two sites are one if they name the same place, whatever translation unit instantiated it.
bool same_site(const Site& a, const Site& b);

// "kernels/decode.cuh:120"
std::string to_string(const Site& site);

}  // namespace emu
