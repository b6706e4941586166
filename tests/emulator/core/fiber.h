// Execution contexts that switch in user space: one for each CUDA thread of a CTA.
#pragma once

#include <cstddef>

// EMU_UCONTEXT asks for the fallback where it is not needed.
#if defined(__x86_64__) && !defined(EMU_UCONTEXT)
#define EMU_ASSEMBLY_SWITCH 1
#else
#define EMU_ASSEMBLY_SWITCH 0
#include <ucontext.h>
#endif

namespace emu {

// Where a suspended context continues.
struct Context {
#if EMU_ASSEMBLY_SWITCH
  void* stack_pointer = nullptr;
#else
  ucontext_t state;
#endif
};

// A stack of the pool; stack i is made on first use and kept. Inaccessible pages lie below it.
struct Stack {
  unsigned char* bottom;
  size_t size;
};

Stack pooled_stack(unsigned index);

// Whether the address is in the inaccessible pages below a pooled stack: stack overflow.
bool is_stack_guard(const void* address);

// Makes `context` run entry() on `stack` when it is first switched to. entry never returns.
void prepare(Context& context, Stack stack, void (*entry)());

// Suspends the running context in `from` and continues `to`.
void switch_context(Context& from, Context& to);

}  // namespace emu
