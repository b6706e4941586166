// Indices and masks as messages show them.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

#include "runtime.h"
#include "types.h"

namespace emu {

inline std::string coordinates(uint3 index) {
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " +
         std::to_string(index.z) + ")";
}

inline std::string coordinates(dim3 extent) {
  return coordinates(uint3{extent.x, extent.y, extent.z});
}

inline std::string hexadecimal(uint32_t mask) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%08x", mask);
  return text;
}

// "0-3, 7"
inline std::string lanes_to_string(uint32_t mask) {
  std::string text;
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if (!(mask >> lane & 1u)) continue;
    unsigned last = lane;
    while (last + 1 < kWarpSize && (mask >> (last + 1) & 1u)) ++last;
    text += (text.empty() ? "" : ", ") + std::to_string(lane);
    if (last > lane) text += "-" + std::to_string(last);
    lane = last;
  }
  return text;
}

}  // namespace emu
