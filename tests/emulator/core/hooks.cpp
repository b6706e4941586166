// What the compiler calls before each access in code built with -fsanitize=thread. The sanitizer's
// own runtime is not linked: these are all of it that such code needs.
#include <cstddef>
#include <cstdint>

#include "shadow.h"

namespace {

using emu::Access;
using emu::Order;

// Inlined: the return address must be the kernel's.
__attribute__((always_inline)) inline void access(const void* address, size_t size, Access kind,
                                                  bool aligned) {
  emu::on_access(address, size, kind, Order::kPlain, aligned, __builtin_return_address(0));
}

}  // namespace

extern "C" {

// Called when the object files of kernels are initialised.
void __tsan_init() { emu::hooked = true; }

void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define EMU_ACCESS(size)                                                                        \
  void __tsan_read##size(void* p) { access(p, size, Access::kRead, true); }                     \
  void __tsan_write##size(void* p) { access(p, size, Access::kWrite, true); }                   \
  void __tsan_volatile_read##size(void* p) { access(p, size, Access::kRead, true); }            \
  void __tsan_volatile_write##size(void* p) { access(p, size, Access::kWrite, true); }          \
  void __tsan_unaligned_read##size(void* p) { access(p, size, Access::kRead, false); }          \
  void __tsan_unaligned_write##size(void* p) { access(p, size, Access::kWrite, false); }        \
  void __tsan_unaligned_volatile_read##size(void* p) { access(p, size, Access::kRead, false); } \
  void __tsan_unaligned_volatile_write##size(void* p) { access(p, size, Access::kWrite, false); }

EMU_ACCESS(1)
EMU_ACCESS(2)
EMU_ACCESS(4)
EMU_ACCESS(8)
EMU_ACCESS(16)
#undef EMU_ACCESS

void __tsan_read_range(void* p, size_t size) { access(p, size, Access::kRead, false); }
void __tsan_write_range(void* p, size_t size) { access(p, size, Access::kWrite, false); }

void __tsan_vptr_update(void* p, void*) { access(p, sizeof(void*), Access::kWrite, true); }
void __tsan_vptr_read(void* p) { access(p, sizeof(void*), Access::kRead, true); }

// ---- Atomic operations: all fibers share an OS thread, so that plain ones do ----

#define EMU_ATOMIC_FETCH(bits, name, expression)                                                   \
  uint##bits##_t __tsan_atomic##bits##_##name(volatile uint##bits##_t* p, uint##bits##_t v, int) { \
    emu::on_access(const_cast<uint##bits##_t*>(p), bits / 8, Access::kWrite, Order::kAtomic, true, \
                   __builtin_return_address(0));                                                   \
    const uint##bits##_t old = *p;                                                                 \
    *p = static_cast<uint##bits##_t>(expression);                                                  \
    return old;                                                                                    \
  }

#define EMU_ATOMICS(bits)                                                                          \
  EMU_ATOMIC_FETCH(bits, exchange, v)                                                              \
  EMU_ATOMIC_FETCH(bits, fetch_add, old + v)                                                       \
  EMU_ATOMIC_FETCH(bits, fetch_sub, old - v)                                                       \
  EMU_ATOMIC_FETCH(bits, fetch_and, old& v)                                                        \
  EMU_ATOMIC_FETCH(bits, fetch_or, old | v)                                                        \
  EMU_ATOMIC_FETCH(bits, fetch_xor, old ^ v)                                                       \
  EMU_ATOMIC_FETCH(bits, fetch_nand, ~(old & v))                                                   \
  uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t* p, int) {               \
    emu::on_access(const_cast<const uint##bits##_t*>(p), bits / 8, Access::kRead, Order::kAtomic,  \
                   true, __builtin_return_address(0));                                             \
    return *p;                                                                                     \
  }                                                                                                \
  void __tsan_atomic##bits##_store(volatile uint##bits##_t* p, uint##bits##_t v, int) {            \
    emu::on_access(const_cast<uint##bits##_t*>(p), bits / 8, Access::kWrite, Order::kAtomic, true, \
                   __builtin_return_address(0));                                                   \
    *p = v;                                                                                        \
  }                                                                                                \
  uint##bits##_t __tsan_atomic##bits##_compare_exchange_val(                                       \
      volatile uint##bits##_t* p, uint##bits##_t expected, uint##bits##_t desired, int, int) {     \
    emu::on_access(const_cast<uint##bits##_t*>(p), bits / 8, Access::kWrite, Order::kAtomic, true, \
                   __builtin_return_address(0));                                                   \
    const uint##bits##_t old = *p;                                                                 \
    if (old == expected) *p = desired;                                                             \
    return old;                                                                                    \
  }                                                                                                \
  int __tsan_atomic##bits##_compare_exchange_strong(                                               \
      volatile uint##bits##_t* p, uint##bits##_t* expected, uint##bits##_t desired, int, int) {    \
    emu::on_access(const_cast<uint##bits##_t*>(p), bits / 8, Access::kWrite, Order::kAtomic, true, \
                   __builtin_return_address(0));                                                   \
    const uint##bits##_t old = *p;                                                                 \
    const bool equal = old == *expected;                                                           \
    if (equal) {                                                                                   \
      *p = desired;                                                                                \
    } else {                                                                                       \
      *expected = old;                                                                             \
    }                                                                                              \
    return equal;                                                                                  \
  }                                                                                                \
  int __tsan_atomic##bits##_compare_exchange_weak(                                                 \
      volatile uint##bits##_t* p, uint##bits##_t* expected, uint##bits##_t desired, int, int)      \
      __attribute__((alias("__tsan_atomic" #bits "_compare_exchange_strong")));

EMU_ATOMICS(8)
EMU_ATOMICS(16)
EMU_ATOMICS(32)
EMU_ATOMICS(64)
#undef EMU_ATOMICS
#undef EMU_ATOMIC_FETCH

void __tsan_atomic_thread_fence(int) { emu::on_fence(); }
void __tsan_atomic_signal_fence(int) {}

}  // extern "C"
