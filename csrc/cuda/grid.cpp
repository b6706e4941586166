#include "cuda/grid.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <stdexcept>
#include <string>

namespace paged_attn::backend {
namespace {

// Resident CTAs of one SM that a grid is sized for.
constexpr int64_t kCtasPerSm = 16;

int attribute(cudaDeviceAttr which) {
  int device = 0;
  int value = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&value, which, device);
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("paged_attn: device query: ") +
                             cudaGetErrorString(status));
  }
  return value;
}

}  // namespace

int64_t num_sms() { return attribute(cudaDevAttrMultiProcessorCount); }

int64_t shared_memory_per_sm() { return attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor); }

unsigned grid_for(int64_t num_items) {
  return static_cast<unsigned>(std::min(num_items, num_sms() * kCtasPerSm));
}

}  // namespace paged_attn::backend
