#include "shadow.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <unordered_map>

#include "counters.h"
#include "faults.h"
#include "symbols.h"
#include "violation.h"

#if __has_include("async_copy.h")
#include "async_copy.h"
#endif

namespace emu {

bool hooked = false;

namespace {

// A stamp is, from the highest bit: an epoch, which counts CTA barriers and starts of CTAs through
// all launches; the clock of the thread, which counts its warp barriers and fences within a CTA;
// and the number of the thread.
constexpr int kThreadBits = 10, kClockBits = 22;

uint32_t epoch_of(Stamp stamp) { return static_cast<uint32_t>(stamp >> 32); }
unsigned thread_of(Stamp stamp) { return stamp & ((1u << kThreadBits) - 1); }
uint32_t clock_of(Stamp stamp) { return stamp >> kThreadBits & ((1u << kClockBits) - 1); }

using WarpClock = std::array<uint32_t, kWarpSize>;

// What a fence orders before what follows: everything of older epochs of its CTA, what its warp's
// lanes did up to these clocks, and what the thread itself had been told of other CTAs.
struct Release {
  uint32_t first_epoch;  // of the CTA
  uint32_t epoch;
  unsigned warp;
  WarpClock known;
};

using Releases = std::multimap<uint32_t, Release>;  // by the first epoch of the CTA

struct Acquired {
  Stamp stamp;
  Releases releases;
};

struct ThreadState {
  uint32_t clock = 1;
  WarpClock known{};  // the last clock of each lane of the warp that is ordered before now
  bool has_fenced = false;
  Release fence{};
  Releases fenced_releases;  // of other CTAs, known at the fence
  Releases seen;             // by atomic operations since the last fence
};

struct Clock {
  uint32_t epoch = 0;
  uint32_t cta_epoch = 0;     // the first of the CTA that runs
  uint32_t launch_epoch = 0;  // the first of the launch
  unsigned thread = 0;
  Stamp now = 0;
  uintptr_t stack = 0;
  size_t stack_size = 0;
  bool busy = false;  // the emulator's own code may carry hooks
  // What check_access saw just now, before the instruction itself.
  const void* announced = nullptr;
  size_t announced_size = 0;
  Access announced_access = Access::kRead;

  std::vector<ThreadState> threads;
  std::vector<Acquired> acquired;                    // by threads of this CTA
  std::unordered_map<uintptr_t, Releases> released;  // of this launch, by the atomic's address
  std::map<uint32_t, uint3> ctas;                    // of this launch, by first epoch
};

Clock state;

void set_now() {
  state.now = Stamp{state.epoch} << 32 | Stamp{state.threads[state.thread].clock} << kThreadBits |
              state.thread;
}

bool covers(const Releases& releases, Stamp stamp) {
  const auto cta = std::prev(state.ctas.upper_bound(epoch_of(stamp)));
  const auto [first, last] = releases.equal_range(cta->first);
  return std::any_of(first, last, [&](const auto& entry) {
    const Release& release = entry.second;
    return epoch_of(stamp) < release.epoch ||
           (thread_of(stamp) / kWarpSize == release.warp &&
            clock_of(stamp) <= release.known[thread_of(stamp) % kWarpSize]);
  });
}

// Of an access of this launch and of another thread or CTA.
bool ordered_slowly(Stamp stamp) {
  if (epoch_of(stamp) < state.cta_epoch) {
    return std::any_of(state.acquired.begin(), state.acquired.end(), [&](const Acquired& entry) {
      return (thread_of(entry.stamp) == state.thread || epoch_of(entry.stamp) < state.epoch ||
              ordered_slowly(entry.stamp)) &&
             covers(entry.releases, stamp);
    });
  }
  return thread_of(stamp) / kWarpSize == state.thread / kWarpSize &&
         state.threads[state.thread].known[thread_of(stamp) % kWarpSize] >= clock_of(stamp);
}

// Whether an access lies before what the running fiber does now.
bool ordered(Stamp stamp) {
  const uint32_t epoch = epoch_of(stamp);
  if (epoch < state.launch_epoch) return true;
  if (epoch >= state.cta_epoch && (epoch < state.epoch || thread_of(stamp) == state.thread)) {
    return true;
  }
  return ordered_slowly(stamp);
}

bool of_this_cta(Stamp stamp) { return epoch_of(stamp) >= state.cta_epoch; }

void note_read(Cell& cell, uint16_t site) {
  Stamp& last = cell.read[0];
  Stamp& other = cell.read[1];
  const unsigned warp = state.thread / kWarpSize;
  const bool same_thread = of_this_cta(last) && thread_of(last) == state.thread;
  // Another thread of the same warp says less than a thread of another warp or CTA.
  const bool keep_other = of_this_cta(last) && thread_of(last) / kWarpSize == warp &&
                          epoch_of(other) >= state.launch_epoch &&
                          (!of_this_cta(other) || (epoch_of(other) == state.epoch &&
                                                   thread_of(other) / kWarpSize != warp));
  if (!same_thread && !keep_other) {
    other = last;
    cell.read_site[1] = cell.read_site[0];
  }
  last = state.now;
  cell.read_site[0] = site;
}

struct Accessed {
  const Region* region;
  const unsigned char* address;
  size_t size;
  Access access;
  Order order;
  const void* pc;
  const Site* site;
};

std::string count_bytes(size_t count) {
  return std::to_string(count) + (count == 1 ? " byte" : " bytes");
}

std::string what_is(const Accessed& it) {
  return std::string(it.order == Order::kAtomic   ? "atomic operation on "
                     : it.access == Access::kRead ? "read of "
                                                  : "write of ") +
         count_bytes(it.size);
}

[[noreturn]] void stop(const Accessed& it, const std::string& what) {
  stop_fiber(what_is(it) + " " + what, it.site, "");
}

[[noreturn]] void stop_for_race(const Accessed& it, const void* at, Stamp stamp, uint16_t site,
                                const char* other) {
  const bool within = of_this_cta(stamp);
  stop_fiber((within ? "race: " : "race between CTAs: ") + what_is(it) + " " + describe(at),
             it.site,
             std::string("not ordered after the ") + other + " by " + describe(stamp) + ", in " +
                 site_to_string(site));
}

// What becomes of the cell of one byte.
Cell check_cell(const Accessed& it, const unsigned char* at, const Cell& cell, uint16_t site) {
  const bool shared = (it.region->flags & kSharedMemory) != 0;
  if (it.access == Access::kRead || it.order == Order::kAtomic) {
    if (cell.flags & kUndefined) stop(it, "marked undefined, " + describe(at));
    if ((cell.flags & kUninitialised) || (shared && !of_this_cta(cell.write))) {
      stop(it, "that are uninitialised, " + describe(at));
    }
  }
  const auto races = [shared](Stamp stamp) {
    // Each CTA has a shared memory of its own.
    return !(shared && !of_this_cta(stamp)) && !ordered(stamp);
  };
  const bool both_atomic = it.order == Order::kAtomic && (cell.flags & kAtomic);
  if (!both_atomic && races(cell.write)) {
    stop_for_race(it, at, cell.write, cell.write_site, "write");
  }
  if (it.access == Access::kRead) {
    Cell after = cell;
    // An atomic operation that writes does not race with one that reads.
    if (it.order == Order::kPlain) note_read(after, site);
    return after;
  }
  for (int r = 0; r < 2; ++r) {
    if (races(cell.read[r])) stop_for_race(it, at, cell.read[r], cell.read_site[r], "read");
  }
  const uint8_t flags = it.order == Order::kAtomic ? kAtomic : 0;
  return {state.now, {0, 0}, site, {0, 0}, flags};
}

void check_cells(const Accessed& it) {
  Cell* cell = it.region->cells + (it.address - it.region->data);
  const uint16_t site = intern_site(it.pc, it.site);
  Cell before{}, after{};
  for (size_t i = 0; i < it.size; ++i, ++cell) {
    // Bytes that lie together mostly have the same past.
    if (i == 0 || std::memcmp(cell, &before, sizeof before) != 0) {
      before = *cell;
      after = check_cell(it, it.address + i, before, site);
    }
    *cell = after;
  }
}

bool is_in_flight([[maybe_unused]] const void* address, [[maybe_unused]] size_t size) {
#if __has_include("async_copy.h")
  return in_flight(address, size);
#else
  return false;
#endif
}

// Atomic operations on one address form a chain: each learns what those before it had fenced.
void exchange_releases(uintptr_t address) {
  ThreadState& thread = state.threads[state.thread];
  Releases& released = state.released[address];
  thread.seen.insert(released.begin(), released.end());
  if (!thread.has_fenced) return;
  released.emplace(thread.fence.first_epoch, thread.fence);
  released.insert(thread.fenced_releases.begin(), thread.fenced_releases.end());
}

const Region* find_cached(uintptr_t address) {
  struct CacheLine {
    uintptr_t page = 0;
    uint64_t generation = 0;
    const Region* region = nullptr;
  };
  static std::array<CacheLine, 4096> cache;
  const uintptr_t page = address >> 12;
  CacheLine& line = cache[page % cache.size()];
  if (line.page != page || line.generation != map_generation()) {
    line = {page, map_generation(), find_region(reinterpret_cast<const void*>(address))};
  }
  return line.region;
}

void check(const Accessed& it, bool aligned) {
  const auto at = reinterpret_cast<uintptr_t>(it.address);
  if (aligned && at % it.size != 0 && (it.size & (it.size - 1)) == 0) {
    stop(it, "misaligned, " + describe(it.address));
  }
  const auto start = reinterpret_cast<uintptr_t>(it.region->data);
  if (at < start || at + it.size > start + it.region->size) {
    stop(it, "out of bounds, " + describe(it.address));
  }
  if (it.access == Access::kWrite && (it.region->flags & kReadOnly)) {
    stop(it, "to a read-only buffer, " + describe(it.address));
  }
  if ((it.region->flags & kSharedMemory) && is_in_flight(it.address, it.size)) {
    stop(it, "that an asynchronous copy has yet to write, " + describe(it.address));
  }
  check_cells(it);
  if (it.order == Order::kAtomic) exchange_releases(at);
  if (counting) {
    count_access(*it.region, it.address, it.size, it.access, intern_site(it.pc, it.site));
  }
}

}  // namespace

void on_access(const void* address, size_t size, Access access, Order order, bool aligned,
               const void* pc, const Site* site) {
  if (!in_fiber || state.busy || size == 0) return;
  const auto at = reinterpret_cast<uintptr_t>(address);
  if (at - state.stack < state.stack_size) return;
  const Region* region = find_cached(at);
  if (region == nullptr) return;
  if (state.announced == address && state.announced_size == size &&
      state.announced_access == access && site == nullptr) {
    state.announced = nullptr;
    return;
  }
  state.busy = true;
  check({region, static_cast<const unsigned char*>(address), size, access, order, pc, site},
        aligned);
  state.announced = site == nullptr ? nullptr : address;
  state.announced_size = size;
  state.announced_access = access;
  state.busy = false;
}

void on_fence() {
  if (!hooked || !in_fiber) return;
  ThreadState& thread = state.threads[state.thread];
  const unsigned lane = state.thread % kWarpSize;
  // Acquire: what atomic operations saw before the fence is known after it.
  if (!thread.seen.empty()) {
    state.acquired.push_back({state.now, std::move(thread.seen)});
    thread.seen.clear();
  }
  // Release: what is known now goes to whoever sees a later atomic operation of this thread.
  thread.fence = {state.cta_epoch, state.epoch, state.thread / kWarpSize, thread.known};
  thread.fence.known[lane] = thread.clock;
  thread.fenced_releases.clear();
  for (const Acquired& entry : state.acquired) {
    if (ordered(entry.stamp)) {
      thread.fenced_releases.insert(entry.releases.begin(), entry.releases.end());
    }
  }
  thread.has_fenced = true;
  ++thread.clock;
  set_now();
}

namespace shadow {

void begin_launch(const LaunchShape& shape, const Site& site) {
  state.launch_epoch = ++state.epoch;
  state.threads.resize(shape.block.count());
  state.released.clear();
  state.ctas.clear();
  resolve_uninitialised();
  begin_counters(shape, site);
}

void begin_cta() {
  state.cta_epoch = ++state.epoch;
  state.ctas.emplace(state.cta_epoch, blockIdx);
  state.acquired.clear();
  for (ThreadState& thread : state.threads) thread = {};
  state.busy = false;
}

void run_thread(unsigned thread, const void* stack, size_t stack_size) {
  state.thread = thread;
  state.stack = reinterpret_cast<uintptr_t>(stack);
  state.stack_size = stack_size;
  state.announced = nullptr;
  set_now();
}

void cta_barrier() {
  ++state.epoch;
  set_now();
}

void warp_barrier(unsigned warp, uint32_t mask) {
  ThreadState* lanes = state.threads.data() + warp * kWarpSize;
  WarpClock joined{};
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if (!(mask >> lane & 1u)) continue;
    lanes[lane].known[lane] = lanes[lane].clock++;
    for (unsigned i = 0; i < kWarpSize; ++i) {
      joined[i] = std::max(joined[i], lanes[lane].known[i]);
    }
  }
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if (mask >> lane & 1u) lanes[lane].known = joined;
  }
  set_now();
}

}  // namespace shadow

std::string describe(Stamp stamp) {
  const auto cta = std::prev(state.ctas.upper_bound(epoch_of(stamp)))->second;
  const unsigned thread = thread_of(stamp), row = thread / blockDim.x;
  const auto triple = [](unsigned x, unsigned y, unsigned z) {
    return "(" + std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) + ")";
  };
  return "thread " + triple(thread % blockDim.x, row % blockDim.y, row / blockDim.y) + " of CTA " +
         triple(cta.x, cta.y, cta.z);
}

}  // namespace emu
