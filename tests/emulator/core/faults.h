// Turns a signal raised by a fiber into a value the scheduler can throw.
#pragma once

#include <signal.h>

#include <cfenv>
#include <cstdint>
#include <string>

namespace emu {

struct Fault {
  int signal = 0;  // 0: none
  int code = 0;
  const void* address = nullptr;
  bool is_write = false;
  const void* instruction = nullptr;
};

// While it lives, SIGSEGV, SIGBUS and SIGFPE of this OS thread are recorded and end in `escape`,
// which must not return. A signal that comes when `in_fiber` is false goes to the previous handler.
class FaultGuard {
 public:
  explicit FaultGuard(void (*escape)());
  ~FaultGuard();
  FaultGuard(const FaultGuard&) = delete;
  FaultGuard& operator=(const FaultGuard&) = delete;

 private:
  stack_t previous_stack_{};
  // A signal handler starts with default floating-point control words; this one is left by a jump.
  std::fenv_t floating_point_{};
};

extern volatile bool in_fiber;
extern Fault fault;

// "write 12 bytes past the end of 'key_cache' (4096 bytes)"
std::string to_string(const Fault& fault);

}  // namespace emu
