#include "atomics.h"

#include "memory.h"
#include "shadow.h"

namespace emu {
namespace {

template <class Change>
uint32_t exchange(uint32_t* address, Change change, const Site& site) {
  on_fence();  // release
  if (hooked) {
    on_access(address, sizeof *address, Access::kWrite, Order::kAtomic, true,
              __builtin_return_address(0), &site);
  } else {
    check_access(address, sizeof *address, Access::kWrite, site);
  }
  const uint32_t old = *address;
  *address = change(old);
  on_fence();  // acquire
  return old;
}

}  // namespace

uint32_t atomic_add(uint32_t* address, uint32_t value, const Site& site) {
  return exchange(address, [value](uint32_t old) { return old + value; }, site);
}

uint32_t atomic_increment(uint32_t* address, uint32_t last, const Site& site) {
  return exchange(address, [last](uint32_t old) { return old >= last ? 0 : old + 1; }, site);
}

}  // namespace emu
