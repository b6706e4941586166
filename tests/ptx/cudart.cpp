// A CUDA runtime that knows no device: it hands each launch of the code that nvcc compiled to a
// callback, with the name of the kernel and the addresses of its arguments. It also reports the
// tensors that the op bodies make, for they are what kernels may touch besides the arguments.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <cstring>
#include <map>
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Dim3 {
  unsigned x, y, z;
};

// The first members of cudaFuncAttributes.
struct FuncAttributes {
  size_t shared_bytes, const_bytes, local_bytes;
  int max_threads, num_registers, ptx_version, binary_version;
};

using OnLaunch = int (*)(const char* kernel, unsigned ctas, unsigned threads, size_t shared_bytes,
                         void** arguments);
using OnTensor = void (*)(const char* op, void* data, int64_t num_bytes);

constexpr int kFailed = 999;
constexpr int kMultiprocessorCount = 16;  // of cudaDeviceAttr
constexpr int kSharedMemoryPerSm = 81;

OnLaunch on_launch = nullptr;
OnTensor on_tensor = nullptr;
std::string error;  // of the last call that failed
int multiprocessors = 1;
int arch = 80;  // of the device, and of the kernels

std::map<const void*, std::string>& kernels() {
  static std::map<const void*, std::string> names;
  return names;
}

int fail(const char* message) {
  error = message;
  return kFailed;
}

}  // namespace

EXPORT void ptx_set_callbacks(OnLaunch launch, OnTensor tensor) {
  on_launch = launch;
  on_tensor = tensor;
}
EXPORT void ptx_set_error(const char* message) { error = message; }
EXPORT void ptx_set_device(int sms, int new_arch) {
  multiprocessors = sms;
  arch = new_arch;
}

extern "C" {

void** __cudaRegisterFatBinary(void* binary) { return static_cast<void**>(binary); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*,
                            void*, void*, int*) {
  kernels()[host] = name;
}

int cudaLaunchKernel(const void* entry, Dim3 grid, Dim3 block, void** arguments,
                     size_t shared_bytes, void*) {
  const auto kernel = kernels().find(entry);
  if (kernel == kernels().end()) return fail("no such kernel");
  if (grid.y * grid.z * block.y * block.z != 1) return fail("only one dimension is modelled");
  if (grid.x == 0 || block.x == 0) return fail("an empty grid");
  if (on_launch == nullptr) return fail("no interpreter");
  return on_launch(kernel->second.c_str(), grid.x, block.x, shared_bytes, arguments);
}

// The bodies of host stubs, which launches by cudaLaunchKernel never reach.
int __cudaGetKernel(const void** kernel, const void* entry) {
  *kernel = entry;
  return 0;
}
int __cudaLaunchKernel(const void* entry, Dim3 grid, Dim3 block, void** arguments,
                       size_t shared_bytes, void* stream) {
  return cudaLaunchKernel(entry, grid, block, arguments, shared_bytes, stream);
}
int __cudaPopCallConfiguration(Dim3*, Dim3*, size_t*, void*) { return fail("no <<<>>>"); }

const char* cudaGetErrorString(int) { return error.c_str(); }
int cudaFuncSetAttribute(const void*, int, int) { return 0; }
int cudaFuncGetAttributes(FuncAttributes* attributes, const void*) {
  attributes->ptx_version = attributes->binary_version = arch;
  return 0;
}
int cudaGetDevice(int* device) {
  *device = 0;
  return 0;
}
int cudaDeviceGetAttribute(int* value, int attribute, int) {
  if (attribute == kMultiprocessorCount) {
    *value = multiprocessors;
  } else if (attribute == kSharedMemoryPerSm) {
    *value = (arch == 80 ? 164 : 228) * 1024;
  } else {
    return fail("an unknown device attribute");
  }
  return 0;
}

// The linker sends the calls of the op bodies here (--wrap).
AOTITorchError __real_torch_call_dispatcher(const char* op, const char* overload,
                                            StableIValue* stack, uint64_t version);
AOTITorchError __wrap_torch_call_dispatcher(const char* op, const char* overload,
                                            StableIValue* stack, uint64_t version) {
  const AOTITorchError status = __real_torch_call_dispatcher(op, overload, stack, version);
  bool makes_tensor = false;
  for (const char* name : {"empty", "empty_like", "new_empty", "zeros", "new_zeros", "clone",
                           "contiguous", "to", "cumsum"}) {
    makes_tensor |= std::strcmp(op, (std::string("aten::") + name).c_str()) == 0;
  }
  if (status != AOTI_TORCH_SUCCESS || !makes_tensor || on_tensor == nullptr) return status;
  AtenTensorHandle tensor;
  std::memcpy(&tensor, stack, sizeof(tensor));
  void* data = nullptr;
  int64_t offset = 0;
  int64_t num_bytes = 0;
  if (aoti_torch_get_data_ptr(tensor, &data) != AOTI_TORCH_SUCCESS ||
      aoti_torch_get_storage_offset(tensor, &offset) != AOTI_TORCH_SUCCESS ||
      aoti_torch_get_storage_size(tensor, &num_bytes) != AOTI_TORCH_SUCCESS) {
    return AOTI_TORCH_FAILURE;
  }
  // With an offset it is a view of an argument.
  if (offset == 0) on_tensor(op, data, num_bytes);
  return status;
}

}  // extern "C"
