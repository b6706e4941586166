#include "shared_window.h"

#include <string>

#include "runtime.h"

namespace emu {

uint32_t shared_address(const void* pointer, const Site& site) {
  const auto offset =
      reinterpret_cast<uintptr_t>(pointer) - reinterpret_cast<uintptr_t>(shared_memory());
  if (offset > shared_memory_size()) {
    throw Error("not a pointer to shared memory: " + describe(pointer) + ", in " + to_string(site));
  }
  return kSharedWindow + static_cast<uint32_t>(offset);
}

unsigned char* shared_pointer(uint32_t address, size_t size, Access access, const Site& site) {
  const int64_t offset = static_cast<int64_t>(address) - kSharedWindow;
  const auto limit = static_cast<int64_t>(shared_memory_size());
  if (offset < 0 || offset > limit - static_cast<int64_t>(size)) {
    const std::string where = offset < 0 ? std::to_string(-offset) + " bytes before the start"
                                         : "at byte " + std::to_string(offset);
    throw Error((access == Access::kRead ? "read of " : "write of ") + std::to_string(size) +
                " bytes out of bounds, " + where + " of 'shared memory' (" + std::to_string(limit) +
                " bytes), in " + to_string(site));
  }
  unsigned char* pointer = static_cast<unsigned char*>(shared_memory()) + offset;
  check_access(pointer, size, access, site);
  return pointer;
}

}  // namespace emu
