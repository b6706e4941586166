// A run-time value to a compile-time constant: dispatch<1, 2>(n, [](auto constant) { ... }) calls
// the function with std::integral_constant<int, n>. A value that is not listed is a logic error of
// ours: what users may pass was checked before.
#pragma once

#include <stdexcept>
#include <type_traits>

namespace paged_attn {

template <auto... kValues, class Value, class Function>
void dispatch(Value value, Function&& function) {
  const bool found = ((value == kValues &&
                       (function(std::integral_constant<decltype(kValues), kValues>{}), true)) ||
                      ...);
  if (!found) throw std::logic_error("paged_attn: no kernel was built for this value");
}

}  // namespace paged_attn
