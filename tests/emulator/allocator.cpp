// CPU tensors that torch makes while a test wants it lie in the emulator's memory, uninitialised:
// those that ops and their callers make for results too.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Device.h>

#include <cstdio>
#include <cstring>
#include <exception>
#include <string>

#include "core/c_api.h"
#include "core/shadow.h"

namespace {

thread_local bool capturing = false;
c10::Allocator* torch_allocator = nullptr;

void release(void* data) {
  // Some of torch frees what it took without a word of who gave it.
  if (emu::find_region(data) == nullptr) return torch_allocator->raw_deleter()(data);
  try {
    emu::free(data);
  } catch (const std::exception& error) {
    // Nobody expects the end of a tensor to throw.
    std::fprintf(stderr, "%s\n", error.what());
    std::terminate();
  }
}

class CapturingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    if (!capturing || size == 0) return torch_allocator->allocate(size);
    const std::string name = "tensor of " + std::to_string(size) + " bytes made by torch";
    void* data = emu::allocate_uninitialised(size, name.c_str());
    return {data, data, release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return release; }

  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};

}  // namespace

// For the calling thread.
EMU_API void emu_capture_tensors(int on) {
  // Never destroyed: tensors may outlive everything. One of its priority replaces torch's own.
  static const bool installed = [] {
    constexpr uint8_t kPriority = 255;
    torch_allocator = c10::GetCPUAllocator();
    c10::SetCPUAllocator(new CapturingAllocator, kPriority);
    return true;
  }();
  static_cast<void>(installed);
  capturing = on != 0;
}
