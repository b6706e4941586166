#include "async_copy.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "config.h"
#include "counters.h"
#include "memory.h"
#include "runtime.h"
#include "shared_window.h"

namespace emu {
namespace {

// Copies are this large at least, and aligned.
constexpr size_t kUnit = 4;

struct Copy {
  unsigned char* to;
  const unsigned char* from;
  size_t size;
  size_t source_size;
  Site site;
};

// Of one thread. Groups are of consecutive copies, the oldest first.
struct Queue {
  std::vector<Copy> copies;
  std::vector<size_t> groups;  // the number of copies in each
  size_t num_committed = 0;    // copies in groups
};

struct State {
  std::vector<Queue> queues;
  size_t num_pending = 0;
  const unsigned char* shared_memory = nullptr;
  std::vector<bool> units;  // of shared memory: whether a pending copy writes there
};

State state;

Queue& queue_of_running_thread() { return state.queues[thread_rank()]; }

void mark_units(const Copy& copy, bool pending) {
  const size_t first = static_cast<size_t>(copy.to - state.shared_memory) / kUnit;
  std::fill_n(state.units.begin() + static_cast<ptrdiff_t>(first), copy.size / kUnit, pending);
}

// Any size, in parts that are powers of two, to which they are aligned if the whole was to one.
void check_source(const unsigned char* address, size_t size, const Site& site) {
  while (size > 0) {
    const size_t part = std::bit_floor(size);
    check_access(address, part, Access::kRead, site);
    address += part;
    size -= part;
  }
}

void perform(const Copy& copy) {
  mark_units(copy, false);
  --state.num_pending;
  // Now is when the write happens for whoever looks for races: readers have to be ordered after the
  // wait. As traffic it was counted when it was issued.
  const bool was_counting = std::exchange(counting, false);
  check_access(copy.to, copy.size, Access::kWrite, copy.site);
  counting = was_counting;
  std::memcpy(copy.to, copy.from, copy.source_size);
  std::memset(copy.to + copy.source_size, 0, copy.size - copy.source_size);
}

void perform_first(Queue& queue, size_t count) {
  for (size_t i = 0; i < count; ++i) perform(queue.copies[i]);
  queue.copies.erase(queue.copies.begin(), queue.copies.begin() + static_cast<ptrdiff_t>(count));
}

}  // namespace

void async_copy(uint32_t shared, const void* source, size_t size, size_t source_size,
                const Site& site) {
  require_code_for(80, "cp.async", site);
  if (source_size > size) {
    throw Error("asynchronous copy of " + std::to_string(source_size) + " bytes to a place of " +
                std::to_string(size) + ", in " + to_string(site));
  }
  if (reinterpret_cast<uintptr_t>(source) % size != 0) {
    throw Error("asynchronous copy of " + std::to_string(size) +
                " bytes from a misaligned source, " + describe(source) + ", in " + to_string(site));
  }
  const auto* from = static_cast<const unsigned char*>(source);
  check_source(from, source_size, site);
  const Copy copy{shared_pointer(shared, size, Access::kWrite, site), from, size, source_size,
                  site};
  if (in_flight(copy.to, size)) {
    throw Error("asynchronous copy to where another is pending, " + describe(copy.to) + ", in " +
                to_string(site));
  }
  count("cp.async");
  std::memset(copy.to, 0xff, size);
  mark_units(copy, true);
  ++state.num_pending;
  queue_of_running_thread().copies.push_back(copy);
}

void async_copy_commit() {
  Queue& queue = queue_of_running_thread();
  queue.groups.push_back(queue.copies.size() - queue.num_committed);
  queue.num_committed = queue.copies.size();
}

void async_copy_wait(size_t pending) {
  Queue& queue = queue_of_running_thread();
  if (queue.groups.size() <= pending) return;
  const auto end = queue.groups.end() - static_cast<ptrdiff_t>(pending);
  size_t count = 0;
  for (auto group = queue.groups.begin(); group != end; ++group) count += *group;
  queue.groups.erase(queue.groups.begin(), end);
  queue.num_committed -= count;
  perform_first(queue, count);
}

void async_copy_wait_all() {
  Queue& queue = queue_of_running_thread();
  queue.groups.clear();
  queue.num_committed = 0;
  perform_first(queue, queue.copies.size());
}

bool in_flight(const void* address, size_t size) {
  if (state.num_pending == 0 || size == 0) return false;
  const size_t offset =
      reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(state.shared_memory);
  const size_t num_units = state.units.size();
  if (offset / kUnit >= num_units) return false;
  const size_t last = std::min((offset + size - 1) / kUnit, num_units - 1);
  for (size_t unit = offset / kUnit; unit <= last; ++unit) {
    if (state.units[unit]) return true;
  }
  return false;
}

namespace async {

void start_cta(unsigned num_threads) {
  state.queues.resize(num_threads);
  // Every thread of the CTA before has waited for its copies.
  for (Queue& queue : state.queues) queue.groups.clear();
  state.shared_memory = static_cast<const unsigned char*>(shared_memory());
  state.units.resize((shared_memory_size() + kUnit - 1) / kUnit);
}

void end_launch() { state = {}; }

void exit_thread() {
  const std::vector<Copy>& copies = queue_of_running_thread().copies;
  if (!copies.empty()) {
    throw Error("exit with " + std::to_string(copies.size()) +
                " pending asynchronous copies, the oldest to " + describe(copies.front().to) +
                ", issued in " + to_string(copies.front().site));
  }
}

}  // namespace async

}  // namespace emu
