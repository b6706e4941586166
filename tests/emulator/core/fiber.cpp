#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <vector>

#include "error.h"

#if EMU_ASSEMBLY_SWITCH
// Only what the System V ABI asks a callee to keep; the floating-point control words are the same
// for all contexts.
asm(R"(
.text
.hidden emu_switch_stack
.globl emu_switch_stack
.type emu_switch_stack, @function
emu_switch_stack:
  .cfi_startproc
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .cfi_endproc
.size emu_switch_stack, .-emu_switch_stack
)");

extern "C" void emu_switch_stack(void** save, void* restore);
#endif

namespace emu {
namespace {

// Untouched pages of it cost nothing.
constexpr size_t kStackSize = size_t{1} << 17;
// Wide, so that no frame steps over it.
constexpr size_t kStackGuardSize = size_t{1} << 16;

std::vector<Stack>& stacks() {
  static std::vector<Stack>& pool = *new std::vector<Stack>;
  return pool;
}

}  // namespace

Stack pooled_stack(unsigned index) {
  std::vector<Stack>& pool = stacks();
  while (pool.size() <= index) {
    void* mapping = mmap(nullptr, kStackSize + kStackGuardSize, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (mapping == MAP_FAILED) throw Error("emulator: out of memory for stacks");
    mprotect(mapping, kStackGuardSize, PROT_NONE);
    pool.push_back({static_cast<unsigned char*>(mapping) + kStackGuardSize, kStackSize});
  }
  return pool[index];
}

bool is_stack_guard(const void* address) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(address);
  for (const Stack& stack : stacks()) {
    const uintptr_t bottom = reinterpret_cast<uintptr_t>(stack.bottom);
    if (at < bottom && at >= bottom - kStackGuardSize) return true;
  }
  return false;
}

#if EMU_ASSEMBLY_SWITCH

void prepare(Context& context, Stack stack, void (*entry)()) {
  // What emu_switch_stack pops: six registers and the address it returns to. Above lies a null
  // return address, so that the stack pointer is 8 mod 16 on entry, as after a call.
  void** top = reinterpret_cast<void**>(stack.bottom + stack.size) - 1;
  top[0] = nullptr;
  top[-1] = reinterpret_cast<void*>(entry);
  for (int i = 2; i <= 7; ++i) top[-i] = nullptr;
  context.stack_pointer = top - 7;
}

void switch_context(Context& from, Context& to) {
  emu_switch_stack(&from.stack_pointer, to.stack_pointer);
}

#else

void prepare(Context& context, Stack stack, void (*entry)()) {
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack.bottom;
  context.state.uc_stack.ss_size = stack.size;
  context.state.uc_link = nullptr;
  makecontext(&context.state, entry, 0);
}

void switch_context(Context& from, Context& to) { swapcontext(&from.state, &to.state); }

#endif

}  // namespace emu
