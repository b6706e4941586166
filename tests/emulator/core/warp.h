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

// The bits of 32-bit values, extended to 64 bits as their type says.
struct ReduceOperands {
  int64_t value;
  int64_t result;
};

extern const Collective kShuffle;
extern const Collective kShuffleXor;
extern const Collective kShuffleUp;
extern const Collective kShuffleDown;
extern const Collective kReduceAdd;
extern const Collective kReduceMin;
extern const Collective kReduceMax;
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

template <class T>
T reduce(const Collective& kind, uint32_t mask, T value, const Site& site) {
  static_assert(std::is_integral_v<T> && sizeof(T) == sizeof(uint32_t));
  ReduceOperands operands{value, 0};
  rendezvous(kind, mask, &operands, site);
  return static_cast<T>(operands.result);
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

// The value of lane `lane_id - delta`, or the lane's own if there is none; in the mask.
template <class T>
T shuffle_up(uint32_t mask, T value, unsigned delta, const Site& site = Site::current()) {
  return detail::shuffle(detail::kShuffleUp, mask, value, delta, site);
}

// The value of lane `lane_id + delta`, or the lane's own if there is none; in the mask.
template <class T>
T shuffle_down(uint32_t mask, T value, unsigned delta, const Site& site = Site::current()) {
  return detail::shuffle(detail::kShuffleDown, mask, value, delta, site);
}

// The sum (wrapping), smallest and largest of the mask's values, of a 32-bit integer type.
template <class T>
T reduce_add(uint32_t mask, T value, const Site& site = Site::current()) {
  return detail::reduce(detail::kReduceAdd, mask, value, site);
}

template <class T>
T reduce_min(uint32_t mask, T value, const Site& site = Site::current()) {
  return detail::reduce(detail::kReduceMin, mask, value, site);
}

template <class T>
T reduce_max(uint32_t mask, T value, const Site& site = Site::current()) {
  return detail::reduce(detail::kReduceMax, mask, value, site);
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
