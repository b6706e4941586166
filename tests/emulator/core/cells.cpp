// The state of bytes that no launch is looking at: making it, and marks from outside.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>

#include "shadow.h"

namespace emu {
namespace {

// A NaN in every floating-point format of 16 bits and more, and no number that a host is likely to
// fill a whole buffer with.
constexpr unsigned char kPattern[] = {0xfe, 0xff};

struct Fresh {
  std::mutex mutex;
  std::vector<const void*> buffers;
};

Fresh& fresh() {
  static Fresh& instance = *new Fresh;
  return instance;
}

void change_flags(Cell& cell, uint8_t flags, bool set) {
  cell.flags = static_cast<uint8_t>(set ? cell.flags | flags : cell.flags & ~flags);
}

bool holds_pattern(const unsigned char* data, size_t size) {
  if (size > 0 && data[0] != kPattern[0]) return false;
  if (size > 1 && data[1] != kPattern[1]) return false;
  return size <= 2 || std::memcmp(data, data + 2, size - 2) == 0;
}

// Whether the buffer still has marks that may be wrong. Takes them off if they are.
bool is_fresh(const Region& region) {
  if (holds_pattern(region.data, region.size)) return true;
  bool any_marked = false;
  for (size_t i = 0; i < region.size; ++i) {
    if (!(region.cells[i].flags & kUninitialised)) continue;
    any_marked = true;
    if (region.data[i] != kPattern[i % 2]) {
      for (size_t j = 0; j < region.size; ++j) change_flags(region.cells[j], kUninitialised, false);
      return false;
    }
  }
  return any_marked;
}

}  // namespace

Cell* map_cells(size_t size) {
  if (size == 0) return nullptr;
  void* cells = mmap(nullptr, size * sizeof(Cell), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (cells == MAP_FAILED) throw Error("emulator: out of memory for the state of each byte");
  return static_cast<Cell*>(cells);
}

void unmap_cells(Cell* cells, size_t size) {
  if (cells != nullptr) munmap(cells, size * sizeof(Cell));
}

void mark(const void* address, const uint8_t* mask, size_t count, size_t element_size,
          uint8_t flags, bool set) {
  const Region* region = find_region(address);
  const auto* at = static_cast<const unsigned char*>(address);
  const size_t size = count * element_size;
  if (region == nullptr || at < region->data || at + size > region->data + region->size) {
    throw Error("emulator: cannot mark " + std::to_string(size) + " bytes, " + describe(address));
  }
  if (region->cells == nullptr) return;
  Cell* cell = region->cells + (at - region->data);
  for (size_t i = 0; i < count; ++i, cell += element_size) {
    if (!mask[i]) continue;
    for (size_t j = 0; j < element_size; ++j) change_flags(cell[j], flags, set);
  }
}

void* allocate_uninitialised(size_t size, const char* name) {
  auto* data = static_cast<unsigned char*>(allocate(size, name));
  for (size_t i = 0; i < size; ++i) data[i] = kPattern[i % 2];
  if (hooked && size > 0) {
    Cell* cells = find_region(data)->cells;
    for (size_t i = 0; i < size; ++i) change_flags(cells[i], kUninitialised, true);
    Fresh& all = fresh();
    const std::scoped_lock lock(all.mutex);
    all.buffers.push_back(data);
  }
  return data;
}

void resolve_uninitialised() {
  Fresh& all = fresh();
  const std::scoped_lock lock(all.mutex);
  std::erase_if(all.buffers, [](const void* data) {
    const Region* region = find_region(data);
    return region == nullptr || region->data != data || !is_fresh(*region);
  });
}

}  // namespace emu
