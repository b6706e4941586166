// Small kernels that test the emulator, found by name from Python.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/ptx.cuh"

namespace selftest {

namespace ptx = paged_attn::ptx;

struct Args {
  void* data;
  int64_t size;    // of data, in bytes
  int64_t option;  // whatever the kernel says
};

using Kernel = void (*)(Args);

// A static object of this type makes a kernel known.
struct Registration {
  Registration(const char* name, Kernel kernel);
};

}  // namespace selftest

#ifdef __CUDACC__
// Some of the kernels are compiled for the GPU as well, where others look for them by name.
#define SELFTEST_KERNEL(name) extern "C" __global__ void name(const ::selftest::Args args)
#else
// Defines and registers a kernel.
#define SELFTEST_KERNEL(name)                                             \
  static __global__ void name(::selftest::Args args);                     \
  static const ::selftest::Registration name##_registration(#name, name); \
  static __global__ void name(const ::selftest::Args args)
#endif
