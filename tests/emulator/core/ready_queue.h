// The runnable threads of a CTA, in the order of a schedule.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "config.h"
#include "random.h"

namespace emu {

class ReadyQueue {
 public:
  static constexpr unsigned kMaxThreads = 1024;

  // Makes all of `count` threads runnable.
  void reset(unsigned count, Schedule schedule, uint64_t seed) {
    count_ = count;
    schedule_ = schedule;
    random_ = Random(seed);
    ready_.resize(count);
    std::iota(ready_.begin(), ready_.end(), 0u);
    if (schedule == Schedule::kRandom) return;
    for (unsigned i = 0; i < count; ++i) {
      rank_[i] = schedule == Schedule::kReverse ? count - 1 - i : i;
    }
    if (schedule == Schedule::kPriorities) {
      for (unsigned i = count; i > 1; --i) std::swap(rank_[i - 1], rank_[random_.below(i)]);
    }
    bits_.fill(0);
    for (unsigned i = 0; i < count; ++i) {
      thread_[rank_[i]] = i;
      flip(i);
    }
  }

  void push(unsigned thread) {
    if (schedule_ == Schedule::kRandom) {
      ready_.push_back(thread);
      return;
    }
    if (schedule_ == Schedule::kPriorities && random_.below(16) == 0) {
      swap_ranks(thread, random_.below(count_));
    }
    flip(rank_[thread]);
  }

  // The thread to run next, or -1.
  int pop() {
    if (schedule_ == Schedule::kRandom) {
      if (ready_.empty()) return -1;
      std::swap(ready_[random_.below(static_cast<uint32_t>(ready_.size()))], ready_.back());
      const unsigned thread = ready_.back();
      ready_.pop_back();
      return static_cast<int>(thread);
    }
    for (unsigned word = 0; word * 64 < count_; ++word) {
      if (bits_[word] == 0) continue;
      const unsigned rank = word * 64 + static_cast<unsigned>(std::countr_zero(bits_[word]));
      flip(rank);
      return static_cast<int>(thread_[rank]);
    }
    return -1;
  }

 private:
  bool test(unsigned rank) const { return bits_[rank / 64] >> rank % 64 & 1u; }
  void flip(unsigned rank) { bits_[rank / 64] ^= uint64_t{1} << rank % 64; }

  // `a` is not runnable; `b` may be, and stays what it is.
  void swap_ranks(unsigned a, unsigned b) {
    if (a == b) return;
    const bool b_ready = test(rank_[b]);
    if (b_ready) flip(rank_[b]);
    std::swap(rank_[a], rank_[b]);
    thread_[rank_[a]] = a;
    thread_[rank_[b]] = b;
    if (b_ready) flip(rank_[b]);
  }

  unsigned count_ = 0;
  Schedule schedule_ = Schedule::kInOrder;
  Random random_{0};
  std::vector<unsigned> ready_;  // of kRandom, in no order
  // Of the other schedules: the set of runnable ranks; the lowest goes first.
  std::array<uint64_t, kMaxThreads / 64> bits_{};
  std::array<unsigned, kMaxThreads> rank_{};    // of a thread
  std::array<unsigned, kMaxThreads> thread_{};  // of a rank
};

}  // namespace emu
