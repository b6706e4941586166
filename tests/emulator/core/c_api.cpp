#include "c_api.h"

#include <string>

#include "config.h"
#include "counters.h"
#include "error.h"
#include "memory.h"
#include "shadow.h"

namespace {

thread_local std::string error_text;
thread_local std::string description;

template <class Function>
int report_errors(Function function) {
  try {
    function();
    return 0;
  } catch (const std::exception& error) {
    error_text = error.what();
    return 1;
  }
}

void require(bool condition, const char* message) {
  if (!condition) throw emu::Error(message);
}

}  // namespace

const char* emu_last_error() { return error_text.c_str(); }

void* emu_allocate(size_t size, const char* name) {
  void* data = nullptr;
  report_errors([&] { data = emu::allocate(size, name); });
  return data;
}

int emu_free(void* data) {
  return report_errors([&] { emu::free(data); });
}

int emu_set_read_only(void* data, int read_only) {
  return report_errors([&] { emu::set_read_only(data, read_only != 0); });
}

int emu_check_canaries() { return report_errors(emu::check_all_canaries); }

const char* emu_describe(const void* address) {
  description = emu::describe(address);
  return description.c_str();
}

int emu_hooked() { return emu::hooked; }

int emu_mark_undefined(void* data, const uint8_t* mask, size_t count, size_t element_size) {
  return report_errors([&] { emu::mark(data, mask, count, element_size, emu::kUndefined, true); });
}

int emu_mark_uninitialised(void* data, const uint8_t* mask, size_t count, size_t element_size) {
  return report_errors(
      [&] { emu::mark(data, mask, count, element_size, emu::kUninitialised, true); });
}

void emu_start_counting() { emu::start_counting(); }

void emu_stop_counting() { emu::stop_counting(); }

const char* emu_counters() {
  description = emu::counters_as_json();
  return description.c_str();
}

void emu_set_seed(uint64_t seed) { emu::config().seed = seed; }

int emu_set_schedule(const char* name) {
  return report_errors([&] {
    require(emu::parse_schedule(name, &emu::config().schedule),
            "emulator: schedule must be in_order, random, priorities or reverse");
  });
}

int emu_set_multiprocessors(int count) {
  return report_errors([&] {
    require(count > 0, "emulator: the number of multiprocessors must be positive");
    emu::config().multiprocessors = count;
  });
}

int emu_set_compute_capability(int major, int minor) {
  return report_errors([&] {
    require(major > 0 && minor >= 0, "emulator: no such compute capability");
    emu::config().compute_capability_major = major;
    emu::config().compute_capability_minor = minor;
  });
}

int emu_set_code_arch(int arch) {
  return report_errors([&] {
    require(arch > 0, "emulator: no such architecture");
    emu::config().code_arch = arch;
  });
}

int emu_set_max_shared_memory(size_t size) {
  return report_errors([&] { emu::config().max_shared_memory = size; });
}

uint64_t emu_seed() { return emu::config().seed; }

const char* emu_schedule() { return emu::to_string(emu::config().schedule); }
