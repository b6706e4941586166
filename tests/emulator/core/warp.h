// Warp collectives.
#pragma once

#include <cstring>
#include <type_traits>

#include "runtime.h"

namespace emu {

namespace detail {

struct ShuffleOperands {
  uint64_t value;
  unsigned argument;
  uint64_t result;
};

struct VoteOperands {
  bool predicate;
  uint32_t result;
};

extern const Collective kShuffle;
extern const Collective kShuffleXor;
extern const Collective kBallot;
extern const Collective kSyncWarp;

template <class T>
T shuffle(const Collective& kind, uint32_t mask, T value, unsigned argument, const Site& site) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(uint64_t));
  ShuffleOperands operands{0, argument, 0};
  std::memcpy(&operands.value, &value, sizeof value);
  rendezvous(kind, mask, &operands, site);
  std::memcpy(&value, &operands.result, sizeof value);
  return value;
}

}  // namespace detail

// The value of `source_lane` modulo 32, which must be in the mask.
template <class T>
T shuffle(uint32_t mask, T value, int source_lane, const Site& site = Site::current()) {
  return detail::shuffle(detail::kShuffle, mask, value, static_cast<unsigned>(source_lane), site);
}

// The value of lane `lane_id ^ lane_mask`, which must be in the mask.
template <class T>
T shuffle_xor(uint32_t mask, T value, int lane_mask, const Site& site = Site::current()) {
  return detail::shuffle(detail::kShuffleXor, mask, value, static_cast<unsigned>(lane_mask), site);
}

// Bit l: the predicate of lane l of the mask.
inline uint32_t ballot(uint32_t mask, bool predicate, const Site& site = Site::current()) {
  detail::VoteOperands operands{predicate, 0};
  rendezvous(detail::kBallot, mask, &operands, site);
  return operands.result;
}

inline bool any(uint32_t mask, bool predicate, const Site& site = Site::current()) {
  return ballot(mask, predicate, site) != 0;
}

inline bool all(uint32_t mask, bool predicate, const Site& site = Site::current()) {
  return ballot(mask, predicate, site) == mask;
}

inline void sync_warp(uint32_t mask, const Site& site = Site::current()) {
  rendezvous(detail::kSyncWarp, mask, nullptr, site);
}

}  // namespace emu
