// The part of the CUDA runtime that the host code uses, over the emulator.
#pragma once

#include <cstddef>
#include <cstring>

#include "core/config.h"

enum cudaError_t : int {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
};

enum cudaDeviceAttr : int {
  cudaDevAttrMaxThreadsPerBlock = 1,
  cudaDevAttrWarpSize = 10,
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};

enum cudaMemcpyKind : int {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4,
};

struct cudaFuncAttributes {
  int ptxVersion;
  int binaryVersion;
};

struct CUstream_st;
using cudaStream_t = CUstream_st*;

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "invalid argument";
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const emu::Config& config = emu::config();
  if (device != 0) return cudaErrorInvalidValue;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      return cudaSuccess;
    case cudaDevAttrWarpSize:
      *value = 32;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = config.multiprocessors;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = config.compute_capability_major;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = config.compute_capability_minor;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:  // a CTA may take all but 1 KiB of it
      *value = static_cast<int>(config.max_shared_memory) + 1024;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(config.max_shared_memory);
      return cudaSuccess;
  }
  return cudaErrorInvalidValue;
}

inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  const emu::Config& config = emu::config();
  *attributes = {config.code_arch,
                 config.compute_capability_major * 10 + config.compute_capability_minor};
  return cudaSuccess;
}

// Host and device are one, and a stream has finished whatever was put on it.
inline cudaError_t cudaMemcpyAsync(void* destination, const void* source, size_t size,
                                   cudaMemcpyKind, cudaStream_t = nullptr) {
  if (size > 0) std::memmove(destination, source, size);
  return cudaSuccess;
}
