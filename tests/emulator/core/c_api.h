// The emulator's functions for a process that loads it as a shared library, from Python.
#pragma once

#include <cstddef>
#include <cstdint>

#define EMU_API extern "C" __attribute__((visibility("default")))

// Those that return int give 0, or 1 after leaving a message in emu_last_error().
EMU_API const char* emu_last_error();

EMU_API void* emu_allocate(size_t size, const char* name);  // null on failure
EMU_API int emu_free(void* data);
EMU_API int emu_set_read_only(void* data, int read_only);
EMU_API int emu_check_canaries();
// The text is valid until the thread's next call.
EMU_API const char* emu_describe(const void* address);

// Of a library whose kernels report their accesses; elsewhere they do nothing. A launch that reads
// marked bytes fails. A write by a kernel takes the marks off.
EMU_API int emu_hooked();
// Elements whose mask is 0 stay what they are.
EMU_API int emu_mark_undefined(void* data, const uint8_t* mask, size_t count, size_t element_size);
EMU_API int emu_mark_uninitialised(void* data, const uint8_t* mask, size_t count,
                                   size_t element_size);

// Counts of launches from the first on, as JSON; see counters.h.
EMU_API void emu_start_counting();
EMU_API void emu_stop_counting();
EMU_API const char* emu_counters();

EMU_API void emu_set_seed(uint64_t seed);
EMU_API int emu_set_schedule(const char* name);
EMU_API int emu_set_multiprocessors(int count);
EMU_API int emu_set_compute_capability(int major, int minor);
EMU_API int emu_set_code_arch(int arch);
EMU_API int emu_set_max_shared_memory(size_t size);
EMU_API uint64_t emu_seed();
EMU_API const char* emu_schedule();
