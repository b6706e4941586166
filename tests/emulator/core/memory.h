// The memory map: device buffers and shared memory, each between inaccessible pages.
//
// A buffer ends at an inaccessible page, so that the first byte past its end faults. Its start is
// aligned to 16 bytes; the bytes left over before it and, where the size is no multiple of 16,
// after it hold a pattern that is compared after each launch and when the buffer is freed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "error.h"

namespace emu {

inline constexpr size_t kBufferAlignment = 16;

enum RegionFlags : uint32_t {
  kReadOnly = 1u << 0,
  kSharedMemory = 1u << 1,
};

struct Cell;

struct Region {
  std::string name;
  unsigned char* data;
  size_t size;
  unsigned char* mapping;  // with both guards
  size_t mapping_size;
  unsigned char* pages;  // the accessible part
  size_t pages_size;
  uint32_t flags;
  Cell* cells = nullptr;  // of each byte of the data; only where accesses are reported: shadow.h
};

// Maps `size` bytes. They are uninitialised in the sense of CUDA: filled with 0xff, which reads as
// NaN in every floating-point format and as -1 in every integer. Throws Error.
Region* map_region(size_t size, const std::string& name, uint32_t flags);
void unmap_region(Region* region);

// Device buffers.
void* allocate(size_t size, const char* name);
void free(void* data);
void set_read_only(void* data, bool read_only);

// The region whose mapping, guards included, contains the address; null if none does.
const Region* find_region(const void* address);

// Changes with each change of the map.
uint64_t map_generation();

// "12 bytes past the end of 'key_cache' (4096 bytes)"
std::string describe(const void* address);

// Throws Error if the pattern around a buffer, or around all device buffers, was written over.
void check_canaries(const Region& region);
void check_all_canaries();

enum class Access { kRead, kWrite };

// Whatever touches memory on behalf of a kernel calls it first: it checks bounds, alignment and
// permission. Addresses outside of the map pass: the host's own tensors. Where kernels report their
// accesses it does all that shadow.h tells, and counts the access; the report of the same access
// that follows where a kernel makes it itself is then dropped.
void check_access(const void* address, size_t size, Access access, const Site& site);

}  // namespace emu
