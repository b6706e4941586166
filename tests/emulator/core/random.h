// Seeded randomness of the schedules; the same on every machine.
#pragma once

#include <bit>
#include <cstdint>

namespace emu {

constexpr uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

class Random {  // splitmix64
 public:
  explicit Random(uint64_t seed) : state_(mix(seed + 0x1234567)) {}
  uint64_t next() { return mix(state_ += 0x9e3779b97f4a7c15ull); }
  // Uniform in [0, bound), bound < 2^32.
  uint32_t below(uint32_t bound) { return static_cast<uint32_t>((next() >> 32) * bound >> 32); }

 private:
  uint64_t state_;
};

// A random order of [0, count) that needs no memory: a Feistel network over the next even number
// of bits, iterated until the result is in range.
class Permutation {
 public:
  Permutation(uint64_t count, uint64_t seed)
      : count_(count), half_bits_((std::bit_width(count - 1) + 1) / 2), seed_(seed) {}

  uint64_t operator[](uint64_t index) const {
    if (count_ <= 1) return index;
    do {
      index = encrypt(index);
    } while (index >= count_);
    return index;
  }

 private:
  uint64_t encrypt(uint64_t x) const {
    const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
    uint64_t left = x >> half_bits_, right = x & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      const uint64_t next = left ^ (mix(right + (seed_ ^ mix(round + 1))) & mask);
      left = right;
      right = next;
    }
    return left << half_bits_ | right;
  }

  uint64_t count_;
  int half_bits_;
  uint64_t seed_;
};

}  // namespace emu
