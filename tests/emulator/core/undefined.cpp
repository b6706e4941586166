// What the compiler calls where code built with -fsanitize=undefined -fno-sanitize-recover does
// what the language leaves undefined. Its own runtime would end the process.
#include <cstdint>
#include <string>

#include "faults.h"
#include "violation.h"

namespace {

// Every record that the compiler leaves for a check starts with the place.
[[noreturn]] void stop(const void* record, const char* what) {
  const auto& place = *static_cast<const emu::SourcePlace*>(record);
  const std::string text = std::string("undefined behaviour: ") + what;
  if (!emu::in_fiber) {
    throw emu::Error("emulator: " + text + ", in " + place.file + ":" + std::to_string(place.line));
  }
  emu::stop_fiber(text, place);
}

}  // namespace

extern "C" {

#define EMU_HANDLER(name, what) \
  void __ubsan_handle_##name##_abort(void* record) { stop(record, what); }

EMU_HANDLER(type_mismatch_v1, "access through a null pointer, or to less than the object")
EMU_HANDLER(add_overflow, "signed overflow of an addition")
EMU_HANDLER(sub_overflow, "signed overflow of a subtraction")
EMU_HANDLER(mul_overflow, "signed overflow of a multiplication")
EMU_HANDLER(negate_overflow, "signed overflow of a negation")
EMU_HANDLER(divrem_overflow, "division by zero, or overflow of a division")
EMU_HANDLER(shift_out_of_bounds, "shift by too many bits, or by a negative number")
EMU_HANDLER(out_of_bounds, "array index out of bounds")
EMU_HANDLER(vla_bound_not_positive, "array of no positive length")
EMU_HANDLER(float_cast_overflow, "conversion of a number that the type cannot hold")
EMU_HANDLER(load_invalid_value, "bool or enumeration with a value that it cannot have")
EMU_HANDLER(invalid_builtin, "argument that a built-in function does not take")
EMU_HANDLER(nonnull_arg, "null argument that must not be null")
EMU_HANDLER(pointer_overflow, "pointer arithmetic that wraps around")
#undef EMU_HANDLER

void __ubsan_handle_builtin_unreachable(void* record) { stop(record, "unreachable code"); }
void __ubsan_handle_missing_return(void* record) { stop(record, "no return value"); }

void __ubsan_handle_nonnull_return_v1_abort(void*, void* place) { stop(place, "null result"); }

}  // extern "C"
