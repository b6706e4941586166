#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "async_copy.h"
#include "config.h"
#include "counters.h"
#include "faults.h"
#include "fiber.h"
#include "memory.h"
#include "random.h"
#include "ready_queue.h"
#include "runtime.h"
#include "shadow.h"
#include "text.h"
#include "violation.h"

namespace emu {

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace {

enum class State : uint8_t { kRunnable, kAtBarrier, kInCollective, kExited };

struct Thread {
  Context context;
  uint3 index;
  State state = State::kRunnable;
  const Collective* collective = nullptr;  // of kInCollective
  uint32_t mask = 0;                       // of kInCollective
  Site site{};                             // of the last synchronisation
};

// A collective for which lanes of the mask are still missing.
struct Rendezvous {
  const Collective* kind;
  Site site;
  uint32_t mask;
  uint32_t arrived;
  void* operands[kWarpSize];
};

struct Warp {
  uint32_t exited;  // lanes, those the CTA does not have included
  std::vector<Rendezvous> pending;
};

// The CTA that runs, and what is kept from one to the next.
struct Machine {
  const std::function<void()>* kernel = nullptr;
  unsigned num_threads = 0;
  const Region* shared_memory = nullptr;

  Context scheduler;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  ReadyQueue ready;
  unsigned running = 0;
  unsigned num_exited = 0;
  unsigned num_at_barrier = 0;
  std::exception_ptr error;
};

// Launches exclude each other, and all fibers of one share an OS thread.
std::mutex launch_mutex;
Machine machine;

Thread& current() { return machine.threads[machine.running]; }

std::string describe_state(const Thread& thread) {
  switch (thread.state) {
    case State::kAtBarrier:
      return "wait at the CTA barrier in " + to_string(thread.site);
    case State::kInCollective:
      return std::string("wait in ") + thread.collective->name + " of mask " +
             hexadecimal(thread.mask) + " in " + to_string(thread.site);
    case State::kExited:
      return "have exited";
    case State::kRunnable:
      return "are not waiting";
  }
  return "";
}

// What each lane of each warp does, a line for each state.
std::string state_table() {
  std::string table;
  for (unsigned first = 0; first < machine.num_threads; first += kWarpSize) {
    std::map<std::string, uint32_t> lanes_by_state;
    for (unsigned i = first; i < std::min(first + kWarpSize, machine.num_threads); ++i) {
      lanes_by_state[describe_state(machine.threads[i])] |= 1u << (i - first);
    }
    for (const auto& [state, lanes] : lanes_by_state) {
      table += "\n  warp " + std::to_string(first / kWarpSize) + ": lanes " +
               lanes_to_string(lanes) + " " + state;
    }
  }
  return table;
}

// Blocks the running fiber in `state` until another makes it runnable.
void block(State state, const Site& site) {
  Thread& thread = current();
  thread.state = state;
  thread.site = site;
  switch_context(thread.context, machine.scheduler);
}

void make_runnable(unsigned index) {
  machine.threads[index].state = State::kRunnable;
  machine.ready.push(index);
}

// A lane that exits will never come to the collectives that wait for it.
void check_exit(const Warp& warp, unsigned lane) {
  for (const Rendezvous& waiting : warp.pending) {
    if (waiting.mask >> lane & 1u) {
      throw Error("collective with an exited lane: lane " + std::to_string(lane) + " exits while " +
                  waiting.kind->name + " in " + to_string(waiting.site) + " waits for it" +
                  state_table());
    }
  }
}

// The first function of every fiber.
void run_thread() {
  try {
    (*machine.kernel)();
    async::exit_thread();
    current().state = State::kExited;
    check_exit(machine.warps[machine.running / kWarpSize], lane_id());
  } catch (...) {
    machine.error = std::current_exception();
  }
  machine.warps[machine.running / kWarpSize].exited |= 1u << lane_id();
  ++machine.num_exited;
  switch_context(current().context, machine.scheduler);
}

std::string thread_location() {
  return "\n  in thread " + coordinates(current().index) + " (warp " +
         std::to_string(machine.running / kWarpSize) + ", lane " + std::to_string(lane_id()) +
         ") of CTA " + coordinates(blockIdx);
}

[[noreturn]] void rethrow_with_location(const std::exception_ptr& error) {
  std::string what = "unknown exception";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    what = exception.what();
  } catch (...) {
  }
  throw Error(what + thread_location());
}

void start_cta(uint64_t seed) {
  if (hooked) shadow::begin_cta();
  machine.num_exited = 0;
  machine.num_at_barrier = 0;
  machine.error = nullptr;
  async::start_cta(machine.num_threads);
  for (unsigned i = 0; i < machine.num_threads; ++i) {
    Thread& thread = machine.threads[i];
    thread.state = State::kRunnable;
    prepare(thread.context, pooled_stack(i), run_thread);
  }
  for (unsigned w = 0; w < machine.warps.size(); ++w) {
    const unsigned lanes = machine.num_threads - w * kWarpSize;
    machine.warps[w].exited = lanes >= kWarpSize ? 0 : ~0u << lanes;
    machine.warps[w].pending.clear();
  }
  machine.ready.reset(machine.num_threads, config().schedule, seed);
}

void run_cta(uint64_t seed) {
  start_cta(seed);
  for (int next; (next = machine.ready.pop()) >= 0;) {
    machine.running = static_cast<unsigned>(next);
    threadIdx = current().index;
    if (hooked) {
      const Stack stack = pooled_stack(machine.running);
      shadow::run_thread(machine.running, stack.bottom, stack.size);
    }
    in_fiber = true;
    switch_context(machine.scheduler, current().context);
    in_fiber = false;
    if (fault.signal != 0) throw Error(to_string(fault) + thread_location());
    if (machine.error) rethrow_with_location(machine.error);
    if (const std::string what = take_violation(); !what.empty()) {
      throw Error(what + thread_location());
    }
  }
  if (machine.num_exited != machine.num_threads) {
    throw Error((machine.num_at_barrier > 0 ? "divergent barrier" : "deadlock") +
                std::string(" in CTA ") + coordinates(blockIdx) + ": " +
                std::to_string(machine.num_exited) + " of " + std::to_string(machine.num_threads) +
                " threads have exited, none can go on" + state_table());
  }
}

class SharedMemory {
 public:
  explicit SharedMemory(size_t size) : region_(map_region(size, "shared memory", kSharedMemory)) {
    machine.shared_memory = region_;
  }
  ~SharedMemory() {
    async::end_launch();
    machine.shared_memory = nullptr;
    unmap_region(region_);
  }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  void poison() { std::fill_n(region_->data, region_->size, 0xff); }
  void check() {
    try {
      check_canaries(*region_);
    } catch (const Error& error) {
      throw Error(error.what() + std::string(" in CTA ") + coordinates(blockIdx));
    }
  }

 private:
  Region* region_;
};

void run_grid(const LaunchShape& shape, const std::function<void()>& kernel, const Site& site) {
  machine.kernel = &kernel;
  machine.num_threads = static_cast<unsigned>(shape.block.count());
  gridDim = shape.grid;
  blockDim = shape.block;
  machine.threads.resize(machine.num_threads);
  machine.warps.resize((machine.num_threads + kWarpSize - 1) / kWarpSize);
  for (unsigned i = 0; i < machine.num_threads; ++i) {
    const unsigned row = i / shape.block.x;
    machine.threads[i].index = {i % shape.block.x, row % shape.block.y, row / shape.block.y};
  }
  SharedMemory memory(shape.shared_memory_bytes);
  const FaultGuard faults(abandon_fiber);
  if (hooked) shadow::begin_launch(shape, site);
  const Permutation order(shape.grid.count(), mix(config().seed));
  Random seeds(config().seed);
  for (uint64_t i = 0; i < shape.grid.count(); ++i) {
    const uint64_t cta = order[i];
    const uint64_t row = cta / shape.grid.x;
    blockIdx = {static_cast<unsigned>(cta % shape.grid.x),
                static_cast<unsigned>(row % shape.grid.y),
                static_cast<unsigned>(row / shape.grid.y)};
    if (i > 0) memory.poison();
    run_cta(seeds.next());
    memory.check();
    flush_counters();
  }
  check_all_canaries();
}

}  // namespace

std::string refusal(const LaunchShape& shape) {
  const dim3 grid = shape.grid, block = shape.block;
  if (grid.count() == 0 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535 ||
      block.count() == 0 || block.x > 1024 || block.y > 1024 || block.z > 64 ||
      block.count() > 1024 || shape.shared_memory_bytes > config().max_shared_memory) {
    return "invalid configuration argument: grid " + coordinates(grid) + ", block " +
           coordinates(block) + ", " + std::to_string(shape.shared_memory_bytes) +
           " bytes of shared memory, of " + std::to_string(config().max_shared_memory);
  }
  return "";
}

void launch(const LaunchShape& shape, const std::function<void()>& kernel, const Site& site) {
  if (const std::string reason = refusal(shape); !reason.empty()) throw Error(reason);
  const std::scoped_lock lock(launch_mutex);
  try {
    run_grid(shape, kernel, site);
  } catch (const Error& error) {
    throw Error("emulator: " + std::string(error.what()) + "\n  launched in " + to_string(site) +
                " with grid " + coordinates(shape.grid) + ", block " + coordinates(shape.block) +
                "\n  " + reproduction());
  }
}

void* shared_memory() { return machine.shared_memory->data; }

size_t shared_memory_size() { return machine.shared_memory->size; }

unsigned thread_rank() { return machine.running; }

void abandon_fiber() {
  Context lost;
  switch_context(lost, machine.scheduler);
  __builtin_unreachable();
}

unsigned lane_id() { return machine.running % kWarpSize; }

void cta_barrier(const Site& site) {
  if (machine.num_at_barrier + 1 < machine.num_threads) {
    ++machine.num_at_barrier;
    block(State::kAtBarrier, site);
    return;
  }
  Thread& last = current();
  last.state = State::kAtBarrier;
  last.site = site;
  for (const Thread& thread : machine.threads) {
    if (!same_site(thread.site, site)) {
      throw Error("divergent barrier: the threads of a CTA wait at different barriers" +
                  state_table());
    }
  }
  last.state = State::kRunnable;
  machine.num_at_barrier = 0;
  count("cta_barrier");
  flush_counters();
  if (hooked) shadow::cta_barrier();
  for (unsigned i = 0; i < machine.num_threads; ++i) {
    if (i != machine.running) make_runnable(i);
  }
}

void rendezvous(const Collective& kind, uint32_t mask, void* operands, const Site& site) {
  const unsigned lane = lane_id();
  Warp& warp = machine.warps[machine.running / kWarpSize];
  const auto here = [&] {
    return std::string(kind.name) + " of mask " + hexadecimal(mask) + " in " + to_string(site);
  };
  if (!(mask >> lane & 1u)) {
    throw Error("mismatched collective: lane " + std::to_string(lane) + " calls " + here() +
                " and is not in the mask");
  }
  if (mask & warp.exited) {
    throw Error("collective with an exited lane: " + here() + " waits for lanes " +
                lanes_to_string(mask & warp.exited) + ", which have exited or do not exist" +
                state_table());
  }
  auto pending = warp.pending.begin();
  for (; pending != warp.pending.end(); ++pending) {
    if (!(pending->mask >> lane & 1u)) continue;
    if (pending->mask == mask && pending->kind == &kind && same_site(pending->site, site)) break;
    // Other collectives may be under way, for lanes that come to this one later; but not one in
    // which a lane of this mask waits for this very lane.
    if (pending->arrived & mask) {
      throw Error("mismatched collective: lane " + std::to_string(lane) + " calls " + here() +
                  " while others wait elsewhere" + state_table());
    }
  }
  if (pending == warp.pending.end()) {
    pending = warp.pending.insert(pending, Rendezvous{&kind, site, mask, 0, {}});
  }
  pending->arrived |= 1u << lane;
  pending->operands[lane] = operands;
  if (pending->arrived != mask) {
    current().collective = &kind;
    current().mask = mask;
    block(State::kInCollective, site);
    return;
  }
  const Rendezvous complete = *pending;
  warp.pending.erase(pending);
  kind.combine(mask, complete.operands);
  const unsigned warp_index = machine.running / kWarpSize;
  count(kind.name);
  if ((mask | warp.exited) == ~0u) flush_counters(warp_index);
  if (hooked && kind.orders_memory) shadow::warp_barrier(warp_index, mask);
  for (unsigned other = 0; other < kWarpSize; ++other) {
    if (other != lane && (mask >> other & 1u)) {
      make_runnable(machine.running / kWarpSize * kWarpSize + other);
    }
  }
}

}  // namespace emu
