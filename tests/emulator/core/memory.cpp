#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "shadow.h"

namespace emu {
namespace {

constexpr unsigned char kCanary = 0xa5;
constexpr unsigned char kPoison = 0xff;
// Wide, so that a wrong row or block stride still lands in the guard and is named.
constexpr size_t kGuardSize = size_t{1} << 18;

struct MemoryMap {
  std::mutex mutex;
  std::map<uintptr_t, std::unique_ptr<Region>> by_mapping;
  // Incremented by each change: invalidates the access cache.
  std::atomic<uint64_t> generation{1};
};

// Never destroyed: tensors may be freed after static destructors have run.
MemoryMap& memory_map() {
  static MemoryMap& map = *new MemoryMap;
  return map;
}

uintptr_t to_integer(const void* address) { return reinterpret_cast<uintptr_t>(address); }

Region* find_locked(MemoryMap& map, const void* address) {
  auto after = map.by_mapping.upper_bound(to_integer(address));
  if (after == map.by_mapping.begin()) return nullptr;
  Region* region = std::prev(after)->second.get();
  return to_integer(address) < to_integer(region->mapping) + region->mapping_size ? region
                                                                                  : nullptr;
}

Region* find_by_data(void* data) {
  MemoryMap& map = memory_map();
  const std::scoped_lock lock(map.mutex);
  Region* region = find_locked(map, data);
  if (region == nullptr || region->data != data || (region->flags & kSharedMemory)) {
    throw Error("emulator: not the address of a device buffer");
  }
  return region;
}

std::string bytes(size_t count) {
  return std::to_string(count) + (count == 1 ? " byte" : " bytes");
}

std::string hexadecimal(const void* address) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%zx", static_cast<size_t>(to_integer(address)));
  return text;
}

std::string describe_in(const Region& region, const void* address) {
  const uintptr_t at = to_integer(address), start = to_integer(region.data);
  const std::string name = "'" + region.name + "' (" + bytes(region.size) + ")";
  if (at < start) return bytes(start - at) + " before the start of " + name;
  if (at >= start + region.size) {
    return bytes(at - start - region.size) + " past the end of " + name;
  }
  return "at byte " + std::to_string(at - start) + " of " + name;
}

void check_canary_range(const Region& region, const unsigned char* begin,
                        const unsigned char* end) {
  // All bytes are the first one if each is its successor.
  if (begin == end || (*begin == kCanary && std::memcmp(begin, begin + 1, end - begin - 1) == 0)) {
    return;
  }
  for (const unsigned char* at = begin; at < end; ++at) {
    if (*at != kCanary) {
      const std::string where = describe_in(region, at);
      // Report an overwritten byte once, not at every later launch.
      std::memset(const_cast<unsigned char*>(begin), kCanary, end - begin);
      throw Error("write out of bounds, " + where + ", found after the fact");
    }
  }
}

}  // namespace

bool same_site(const Site& a, const Site& b) {
  return a.line() == b.line() && a.column() == b.column() &&
         (a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0);
}

std::string to_string(const Site& site) {
  return std::string(site.file_name()) + ":" + std::to_string(site.line());
}

Region* map_region(size_t size, const std::string& name, uint32_t flags) {
  static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t padded = (size + kBufferAlignment - 1) / kBufferAlignment * kBufferAlignment;
  const size_t pages_size = (padded + page - 1) / page * page;
  const size_t mapping_size = pages_size + 2 * kGuardSize;
  if (size > (size_t{1} << 46)) throw Error("emulator: out of memory for '" + name + "'");
  void* mapping =
      mmap(nullptr, mapping_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) throw Error("emulator: out of memory for '" + name + "'");
  unsigned char* pages = static_cast<unsigned char*>(mapping) + kGuardSize;
  if (pages_size > 0 && mprotect(pages, pages_size, PROT_READ | PROT_WRITE) != 0) {
    munmap(mapping, mapping_size);
    throw Error("emulator: out of memory for '" + name + "'");
  }
  unsigned char* data = pages + pages_size - padded;
  std::memset(pages, kCanary, data - pages);
  std::memset(data, kPoison, size);
  std::memset(data + size, kCanary, padded - size);

  auto region = std::make_unique<Region>(
      Region{name, data, size, static_cast<unsigned char*>(mapping), mapping_size, pages,
             pages_size, flags, hooked ? map_cells(size) : nullptr});
  Region* result = region.get();
  MemoryMap& map = memory_map();
  const std::scoped_lock lock(map.mutex);
  map.by_mapping.emplace(to_integer(mapping), std::move(region));
  ++map.generation;
  return result;
}

void unmap_region(Region* region) {
  MemoryMap& map = memory_map();
  const std::scoped_lock lock(map.mutex);
  ++map.generation;
  unmap_cells(region->cells, region->size);
  munmap(region->mapping, region->mapping_size);
  map.by_mapping.erase(to_integer(region->mapping));
}

void* allocate(size_t size, const char* name) { return map_region(size, name, 0)->data; }

void free(void* data) {
  Region* region = find_by_data(data);
  std::string damage;
  try {
    check_canaries(*region);
  } catch (const Error& error) {
    damage = error.what();
  }
  unmap_region(region);
  if (!damage.empty()) throw Error("emulator: " + damage + ", when it was freed");
}

void set_read_only(void* data, bool read_only) {
  Region* region = find_by_data(data);
  if (region->pages_size > 0 && mprotect(region->pages, region->pages_size,
                                         read_only ? PROT_READ : PROT_READ | PROT_WRITE) != 0) {
    throw Error("emulator: mprotect failed on '" + region->name + "'");
  }
  region->flags = read_only ? region->flags | kReadOnly : region->flags & ~kReadOnly;
}

const Region* find_region(const void* address) {
  MemoryMap& map = memory_map();
  const std::scoped_lock lock(map.mutex);
  return find_locked(map, address);
}

uint64_t map_generation() { return memory_map().generation.load(std::memory_order_relaxed); }

std::string describe(const void* address) {
  if (const Region* region = find_region(address)) return describe_in(*region, address);
  if (to_integer(address) < 65536) return "at null pointer + " + bytes(to_integer(address));
  const std::string unknown = "at " + hexadecimal(address) + ", in no buffer";
  MemoryMap& map = memory_map();
  const std::scoped_lock lock(map.mutex);
  const Region* nearest = nullptr;
  uintptr_t distance = ~uintptr_t{0};
  for (const auto& [start, region] : map.by_mapping) {
    const uintptr_t begin = to_integer(region->data), at = to_integer(address);
    const uintptr_t end = begin + region->size;
    const uintptr_t away = at < begin ? begin - at : at - end;
    if (away < distance) {
      distance = away;
      nearest = region.get();
    }
  }
  return nearest ? unknown + "; the nearest: " + describe_in(*nearest, address) : unknown;
}

void check_canaries(const Region& region) {
  if (region.flags & kReadOnly) return;  // its pages cannot be written at all
  check_canary_range(region, region.pages, region.data);
  check_canary_range(region, region.data + region.size, region.pages + region.pages_size);
}

void check_all_canaries() {
  MemoryMap& map = memory_map();
  const std::scoped_lock lock(map.mutex);
  for (const auto& [start, region] : map.by_mapping) check_canaries(*region);
}

void check_access(const void* address, size_t size, Access access, const Site& site) {
  if (hooked) {
    on_access(address, size, access, Order::kPlain, true, __builtin_return_address(0), &site);
    return;
  }
  struct CacheLine {
    uintptr_t page = 0;
    uint64_t generation = 0;
    const Region* region = nullptr;
  };
  // Only the thread that runs a launch comes here, and launches exclude each other.
  static std::array<CacheLine, 1024> cache;

  const auto fail = [&](const std::string& what) {
    throw Error(std::string(access == Access::kRead ? "read" : "write") + " of " + bytes(size) +
                " " + what + ", in " + to_string(site));
  };
  const uintptr_t at = to_integer(address);
  if (at % size != 0) {
    fail("misaligned: address " + hexadecimal(address) + ", " + describe(address));
  }
  const uintptr_t page = at >> 12;
  CacheLine& line = cache[page % cache.size()];
  const uint64_t generation = map_generation();
  if (line.page != page || line.generation != generation) {
    line = {page, generation, find_region(address)};
  }
  const Region* region = line.region;
  if (region == nullptr) return;
  const uintptr_t start = to_integer(region->data);
  if (at < start || at + size > start + region->size) {
    fail("out of bounds, " + describe_in(*region, address));
  }
  if (access == Access::kWrite && (region->flags & kReadOnly)) {
    fail("to a read-only buffer, " + describe_in(*region, address));
  }
}

}  // namespace emu
