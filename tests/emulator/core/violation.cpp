#include "violation.h"

#include <unwind.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "runtime.h"
#include "symbols.h"

namespace emu {
namespace {

struct Violation {
  std::string what;
  std::string place;  // where no instruction tells
  std::string details;
  std::vector<const void*> stack;
};

std::optional<Violation> violation;

_Unwind_Reason_Code add_frame(_Unwind_Context* context, void* stack) {
  auto& frames = *static_cast<std::vector<const void*>*>(stack);
  const uintptr_t instruction = _Unwind_GetIP(context);
  constexpr size_t kMaxFrames = 64;
  if (instruction == 0 || frames.size() == kMaxFrames) return _URC_END_OF_STACK;
  frames.push_back(reinterpret_cast<const void*>(instruction));
  return _URC_NO_REASON;
}

[[noreturn]] void stop(Violation reason) {
  _Unwind_Backtrace(add_frame, &reason.stack);
  violation = std::move(reason);
  abandon_fiber();
}

}  // namespace

void stop_fiber(const std::string& what, const Site* site, const std::string& details) {
  stop({what, site ? to_string(*site) : "", details, {}});
}

void stop_fiber(const std::string& what, const SourcePlace& place) {
  stop({what, std::string(place.file) + ":" + std::to_string(place.line), "", {}});
}

std::string take_violation() {
  if (!violation) return "";
  const Violation reason = *std::exchange(violation, std::nullopt);
  std::string where;
  for (const Place& place : find_places(reason.stack)) {
    if (place.empty()) continue;
    where += (where.empty() ? ", in " : "\n  called in ") + to_string(place);
  }
  if (where.empty() && !reason.place.empty()) where = ", in " + reason.place;
  return reason.what + where + (reason.details.empty() ? "" : "\n  " + reason.details);
}

}  // namespace emu
