// 32-bit addresses of shared memory, as instructions take them that know the state space.
#pragma once

#include <cstddef>
#include <cstdint>

#include "error.h"
#include "memory.h"

namespace emu {

// The address of the first byte of the CTA's dynamic shared memory. The first KiB of the window is
// the system's, as on sm_80 and later: 0 is no valid address.
inline constexpr uint32_t kSharedWindow = 1024;

// Throws Error if the pointer does not point into the CTA's shared memory or to its end.
uint32_t shared_address(const void* pointer, const Site& site);

// Where the address points. Throws Error if the `size` bytes there, which are aligned to `size`,
// must not be accessed. Unlike a pointer such an address always is one of shared memory: anything
// else is out of bounds.
unsigned char* shared_pointer(uint32_t address, size_t size, Access access, const Site& site);

}  // namespace emu
