// Scales that differ from token to token, for the tiles of one warp.
#pragma once

#include "device/ptx.cuh"
#include "mma_params.h"

namespace paged_attn {

// Lane l holds the scales of tokens l, l + 32, ... of a tile.
//
// V's scales go into the probabilities, which are in half precision: as shares of the largest scale
// so far, so that none overflows and only what hardly counts loses bits.
template <class Ring>
class TokenScales {
 public:
  // Of the tile whose first token is `first`.
  __device__ void load(const DecodeParams& p, const Ring& ring, int64_t kv_head, uint32_t first) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const typename Ring::Place place = ring.locate(first + lane() + i * ptx::kWarpSize);
      key_[i] = p.k_scale.at(place.block, place.offset, kv_head);
      value_[i] = p.v_scale.at(place.block, place.offset, kv_head);
    }
  }

  __device__ float key(int token) const { return of(key_, token); }
  // After raise(): as a share of largest().
  __device__ float value(int token) const { return of(value_, token); }

  // Makes shares of V's scales. What was summed of earlier tiles must be multiplied by the result.
  __device__ float raise() {
    float max = largest_;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) max = fmaxf(max, fabsf(value_[i]));
    max = ptx::bits_to_float(ptx::reduce_max(ptx::float_to_bits(max)));
    const float inverse = max > 0.f ? 1.f / max : 0.f;
    const float keep = largest_ * inverse;
    largest_ = max;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) value_[i] *= inverse;
    return keep;
  }

  // What sums are to be multiplied by in the end.
  __device__ float largest() const { return largest_; }

 private:
  static constexpr int kSlots = Ring::kTokens > ptx::kWarpSize ? Ring::kTokens / ptx::kWarpSize : 1;

  static __device__ int lane() { return threadIdx.x % ptx::kWarpSize; }
  static __device__ float of(const float (&slots)[kSlots], int token) {
    float result = ptx::shuffle(slots[0], token);
#pragma unroll
    for (int i = 1; i < kSlots; ++i) {
      const float other = ptx::shuffle(slots[i], token);
      if (token / ptx::kWarpSize == i) result = other;
    }
    return result;
  }

  float key_[kSlots];
  float value_[kSlots];
  float largest_ = 0.f;
};

}  // namespace paged_attn
