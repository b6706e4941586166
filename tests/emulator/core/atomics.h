// Atomic operations of the running thread on global memory: acquire and release at the scope of the
// GPU. All threads share an OS thread: there is nothing to make atomic but what is known of memory.
#pragma once

#include <cstdint>

#include "error.h"

namespace emu {

// Adds `value`, wrapping; gives the old value.
uint32_t atomic_add(uint32_t* address, uint32_t value, const Site& site = Site::current());

// Adds 1, or sets 0 where the old value is `last` or more; gives the old value.
uint32_t atomic_increment(uint32_t* address, uint32_t last, const Site& site = Site::current());

}  // namespace emu
