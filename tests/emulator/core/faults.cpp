#include "faults.h"

#include <dlfcn.h>
#include <pthread.h>

#include <array>
#include <cstdio>
#include <cstring>

#include "error.h"
#include "fiber.h"
#include "memory.h"
#include "symbols.h"

#if defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emu {

volatile bool in_fiber = false;
Fault fault;

namespace {

constexpr std::array kSignals = {SIGSEGV, SIGBUS, SIGFPE};
std::array<struct sigaction, kSignals.size()> previous_actions;
pthread_t owner;
void (*escape_function)();

// A fault may be the overflow of the fiber's own stack.
alignas(16) unsigned char signal_stack[1 << 16];

void on_signal(int signal, siginfo_t* info, void* context) {
  if (!in_fiber || !pthread_equal(owner, pthread_self())) {
    // Not ours: the instruction faults again, into the previous handler.
    for (size_t i = 0; i < kSignals.size(); ++i) {
      if (kSignals[i] == signal) sigaction(signal, &previous_actions[i], nullptr);
    }
    return;
  }
  fault = {signal, info->si_code, info->si_addr, false, nullptr};
#if defined(__x86_64__)
  const auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  fault.is_write = signal == SIGSEGV && (registers[REG_ERR] & 2) != 0;
  fault.instruction = reinterpret_cast<const void*>(registers[REG_RIP]);
#else
  static_cast<void>(context);
#endif
  escape_function();
}

// "libkernels.so+0x1234", for addr2line, and what that says.
std::string code_location(const void* instruction) {
  Dl_info info{};
  if (instruction == nullptr || dladdr(instruction, &info) == 0 || info.dli_fname == nullptr) {
    return "";
  }
  const char* slash = std::strrchr(info.dli_fname, '/');
  char text[256];
  std::snprintf(text, sizeof text, ", code at %s+0x%zx", slash ? slash + 1 : info.dli_fname,
                static_cast<size_t>(static_cast<const char*>(instruction) -
                                    static_cast<const char*>(info.dli_fbase)));
  // find_places takes return addresses.
  const std::string place = to_string(find_places({static_cast<const char*>(instruction) + 1})[0]);
  return place.empty() ? text : text + (", in " + place);
}

std::string memory_fault(const Fault& fault) {
  if (is_stack_guard(fault.address)) return "stack overflow";
#if defined(__x86_64__)
  // The processor gives no address with a general protection fault.
  if (fault.signal == SIGSEGV && fault.code == SI_KERNEL) {
    return "misaligned vector access or wild pointer";
  }
#endif
  if (fault.signal == SIGBUS && fault.code == BUS_ADRALN) {
    return "misaligned access " + describe(fault.address);
  }
  const Region* region = find_region(fault.address);
  if (fault.is_write && region != nullptr && (region->flags & kReadOnly) &&
      fault.address >= region->data && fault.address < region->data + region->size) {
    return "write to a read-only buffer, " + describe(fault.address);
  }
  return (fault.is_write ? "write " : "read ") + describe(fault.address);
}

}  // namespace

FaultGuard::FaultGuard(void (*escape)()) {
  std::fegetenv(&floating_point_);
  owner = pthread_self();
  escape_function = escape;
  fault = {};
  stack_t stack{};
  stack.ss_sp = signal_stack;
  stack.ss_size = sizeof signal_stack;
  sigaltstack(&stack, &previous_stack_);
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  // NODEFER: the handler is left by a switch of stacks, which unblocks nothing.
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&action.sa_mask);
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], &action, &previous_actions[i]);
  }
}

FaultGuard::~FaultGuard() {
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], &previous_actions[i], nullptr);
  }
  sigaltstack(&previous_stack_, nullptr);
  if (fault.signal != 0) std::fesetenv(&floating_point_);
}

std::string to_string(const Fault& fault) {
  const std::string what = fault.signal == SIGFPE
                               ? "arithmetic fault: integer division by zero or overflow"
                               : memory_fault(fault);
  return what + code_location(fault.instruction);
}

}  // namespace emu
