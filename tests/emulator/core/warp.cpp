#include "warp.h"

#include <algorithm>
#include <bit>
#include <string>

namespace emu::detail {
namespace {

// `source_of(lane, argument)` is the lane that `lane` reads.
template <class SourceOf>
void combine_shuffle(uint32_t mask, void* const* operands, SourceOf source_of) {
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if (!(mask >> lane & 1u)) continue;
    auto* mine = static_cast<ShuffleOperands*>(operands[lane]);
    const unsigned source = source_of(lane, mine->argument);
    if (!(mask >> source & 1u)) {
      throw Error("shuffle: lane " + std::to_string(lane) + " reads lane " +
                  std::to_string(source) + ", which is not in the mask");
    }
    mine->result = static_cast<ShuffleOperands*>(operands[source])->value;
  }
}

void combine_shuffle_index(uint32_t mask, void* const* operands) {
  combine_shuffle(mask, operands, [](unsigned, unsigned index) { return index % kWarpSize; });
}

void combine_shuffle_xor(uint32_t mask, void* const* operands) {
  // Beyond the last lane the hardware gives a thread its own value.
  combine_shuffle(mask, operands, [](unsigned lane, unsigned lane_mask) {
    const unsigned source = lane ^ lane_mask;
    return source < kWarpSize ? source : lane;
  });
}

void combine_shuffle_up(uint32_t mask, void* const* operands) {
  combine_shuffle(mask, operands, [](unsigned lane, unsigned delta) {
    return delta <= lane ? lane - delta : lane;
  });
}

void combine_shuffle_down(uint32_t mask, void* const* operands) {
  combine_shuffle(mask, operands, [](unsigned lane, unsigned delta) {
    return delta < kWarpSize - lane ? lane + delta : lane;
  });
}

// `merge(a, b)` of all values, in every lane.
template <class Merge>
void combine_reduce(uint32_t mask, void* const* operands, Merge merge) {
  const auto of = [&](unsigned lane) { return static_cast<ReduceOperands*>(operands[lane]); };
  unsigned lane = static_cast<unsigned>(std::countr_zero(mask));
  int64_t result = of(lane)->value;
  while (++lane < kWarpSize) {
    if (mask >> lane & 1u) result = merge(result, of(lane)->value);
  }
  for (lane = 0; lane < kWarpSize; ++lane) {
    if (mask >> lane & 1u) of(lane)->result = result;
  }
}

void combine_add(uint32_t mask, void* const* operands) {
  combine_reduce(mask, operands, [](int64_t a, int64_t b) { return a + b; });
}

void combine_min(uint32_t mask, void* const* operands) {
  combine_reduce(mask, operands, [](int64_t a, int64_t b) { return std::min(a, b); });
}

void combine_max(uint32_t mask, void* const* operands) {
  combine_reduce(mask, operands, [](int64_t a, int64_t b) { return std::max(a, b); });
}

void combine_ballot(uint32_t mask, void* const* operands) {
  uint32_t votes = 0;
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if ((mask >> lane & 1u) && static_cast<VoteOperands*>(operands[lane])->predicate) {
      votes |= 1u << lane;
    }
  }
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if (mask >> lane & 1u) static_cast<VoteOperands*>(operands[lane])->result = votes;
  }
}

void combine_nothing(uint32_t, void* const*) {}

}  // namespace

const Collective kShuffle{"shuffle", combine_shuffle_index};
const Collective kShuffleXor{"shuffle_xor", combine_shuffle_xor};
const Collective kShuffleUp{"shuffle_up", combine_shuffle_up};
const Collective kShuffleDown{"shuffle_down", combine_shuffle_down};
const Collective kReduceAdd{"reduce_add", combine_add};
const Collective kReduceMin{"reduce_min", combine_min};
const Collective kReduceMax{"reduce_max", combine_max};
const Collective kBallot{"ballot", combine_ballot};
const Collective kSyncWarp{"sync_warp", combine_nothing, /*orders_memory=*/true};

}  // namespace emu::detail
