// backend.h on a CPU: picks the instruction-set level once, then calls its kernels.
#include "backend.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/plan.h"

namespace paged_attn {
namespace {

// The levels that this machine can run, best first.
std::vector<const cpu::Kernels*> supported_levels() {
  std::vector<const cpu::Kernels*> levels;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    if (__builtin_cpu_supports("avx512bf16")) levels.push_back(&cpu::avx512bf16_kernels());
    levels.push_back(&cpu::avx512_kernels());
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    levels.push_back(&cpu::avx2_kernels());
  }
#endif
  levels.push_back(&cpu::portable_kernels());
  return levels;
}

const cpu::Kernels& choose_kernels() {
  const std::vector<const cpu::Kernels*> levels = supported_levels();
  const char* wanted = std::getenv("PAGED_ATTN_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return *levels.front();
  std::string names;
  for (const cpu::Kernels* level : levels) {
    if (std::strcmp(level->isa, wanted) == 0) return *level;
    names += names.empty() ? level->isa : std::string(", ") + level->isa;
  }
  throw std::runtime_error("paged_attn: PAGED_ATTN_CPU_ISA must be one of " + names +
                           " on this machine, got " + wanted);
}

const cpu::Kernels& kernels() {
  static const cpu::Kernels& chosen = choose_kernels();
  return chosen;
}

enum class Purpose { kScratch, kSlots };

// Memory of this thread that is kept from call to call: fresh pages would cost more than a short
// sequence. Aligned to a cache line.
template <Purpose kPurpose>
float* thread_floats(int64_t count) {
  thread_local std::vector<float> memory;
  constexpr int64_t kLine = 64 / sizeof(float);
  if (static_cast<int64_t>(memory.size()) < count + kLine) memory.resize(count + kLine);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  return memory.data() + (64 - address % 64) % 64 / sizeof(float);
}

void copy_block(const BlockRuns& runs, int64_t source, int64_t destination) {
  char* base = reinterpret_cast<char*>(runs.address);
  for (int64_t i = 0; i < runs.outer_count; ++i) {
    for (int64_t j = 0; j < runs.inner_count; ++j) {
      const int64_t offset = i * runs.outer_stride + j * runs.inner_stride;
      std::memcpy(base + destination * runs.block_stride + offset,
                  base + source * runs.block_stride + offset, runs.run_bytes);
    }
  }
}

}  // namespace

namespace backend {

// The plan costs microseconds and is made from the lengths themselves, in decode().
DecodeNeeds decode_needs(const DecodeParams& /*params*/, int32_t /*chunk_size*/,
                         int32_t /*plan_kv_bytes*/) {
  return {false, 0};
}

void make_plan(const DecodeParams& /*params*/, int32_t /*kv_bytes*/, int32_t* /*plan*/,
               Stream /*stream*/) {}

void decode(const DecodeCall& call, Stream /*stream*/) {
  DecodeParams params = call.params;
  params.chunk_size = std::numeric_limits<int32_t>::max();  // the plan knows of chunks
  const cpu::Plan plan = cpu::make_plan(params, call.chunk_size, cpu::num_threads());
  float* slots = thread_floats<Purpose::kSlots>(plan.num_slots * plan.slot_floats);
  const auto num_threads = static_cast<int64_t>(plan.ends.size());
  cpu::parallel_for_each(num_threads, 1, [&](int64_t thread) {
    const cpu::DecodeMemory memory{thread_floats<Purpose::kScratch>(plan.scratch_floats), slots};
    const int64_t begin = thread == 0 ? 0 : plan.ends[thread - 1];
    for (int64_t run = begin; run < plan.ends[thread]; ++run) {
      kernels().decode(params, plan, plan.runs[run], memory);
    }
  });
  if (plan.merges.empty()) return;
  cpu::parallel_for_each(static_cast<int64_t>(plan.merges.size()), 1, [&](int64_t merge) {
    const cpu::DecodeMemory memory{thread_floats<Purpose::kScratch>(plan.scratch_floats), slots};
    kernels().combine(params, plan, plan.merges[merge], memory);
  });
}

void append_slots(const AppendSlotsParams& params, Stream /*stream*/) {
  for (int64_t seq = 0; seq < params.num_seqs; ++seq) {
    params.seq_lens[seq] = params.seq_len(seq);
    for (int64_t i = 0; i < params.new_len; ++i) {
      params.slots[seq * params.new_len + i] = params.slot(seq, i);
    }
  }
}

void merge_states(const MergeParams& params, Stream /*stream*/) { kernels().merge_states(params); }
void write_cache(const CacheWriteParams& params, Stream /*stream*/) {
  kernels().write_cache(params);
}
void gather_cache(const GatherParams& params, Stream /*stream*/) { kernels().gather_cache(params); }

void copy_blocks(const BlockCopyParams& params, Stream /*stream*/) {
  const BlockRuns& runs = params.pools[0];
  const int64_t grain = cpu::grain_of(runs.outer_count * runs.inner_count * runs.run_bytes);
  cpu::parallel_for_each(params.num_pools * params.num_pairs, grain, [&params](int64_t item) {
    const int64_t* pair = params.pairs + item % params.num_pairs * 2;
    copy_block(params.pools[item / params.num_pairs], pair[0], pair[1]);
  });
}

}  // namespace backend
}  // namespace paged_attn

// The level in use, as PAGED_ATTN_CPU_ISA names it. Null if PAGED_ATTN_CPU_ISA is not valid here.
extern "C" __attribute__((visibility("default"))) const char* paged_attn_cpu_isa() {
  try {
    return paged_attn::kernels().isa;
  } catch (const std::exception&) {
    return nullptr;
  }
}
