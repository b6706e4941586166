// Online softmax of one row as a value (Milakov and Gimelshein 2018, arXiv 1805.02867). Scores and
// the log-sum-exp are natural; exponentials are taken in base 2, which is one instruction.
#pragma once

#include "device/ptx.cuh"

namespace paged_attn {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kInfinity = __builtin_huge_valf();
// Below any score, and finite: a maximum that starts here never gives inf - inf.
inline constexpr float kLowest = -3.402823466e+38f;

struct SoftmaxState {
  float max = kLowest;
  float sum = 0.f;

  // Raises the maximum to cover `score`; what was summed so far must be multiplied by the result.
  __device__ __forceinline__ float raise(float score) {
    const float old = max;
    max = fmaxf(max, score);
    const float keep = ptx::exp2((old - max) * kLog2e);
    sum *= keep;
    return keep;
  }

  // The weight of a score that the maximum covers, counted into the sum.
  __device__ __forceinline__ float add(float score) {
    const float weight = weight_of(score);
    sum += weight;
    return weight;
  }

  __device__ __forceinline__ float weight_of(float score) const {
    return ptx::exp2((score - max) * kLog2e);
  }

  __device__ __forceinline__ bool empty() const { return sum == 0.f; }
  __device__ __forceinline__ float inverse() const { return empty() ? 0.f : 1.f / sum; }
  __device__ __forceinline__ float lse() const {
    return empty() ? -kInfinity : max + ptx::log2(sum) * kLn2;
  }
};

}  // namespace paged_attn
