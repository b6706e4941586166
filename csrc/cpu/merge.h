// How two partial softmaxes combine. Included by cpu/kernels.cpp.

struct MergeWeights {
  float a;
  float b;
  float lse;
};

// Weights that sum to 1, and the joint log-sum-exp. Two empty sides (both -inf) weigh 0.
inline MergeWeights merge_weights(float lse_a, float lse_b) {
  const float max = larger(lse_a, lse_b);
  if (max == -__builtin_inff()) return {0.f, 0.f, max};
  const float a = __builtin_expf(lse_a - max);
  const float b = __builtin_expf(lse_b - max);
  const float sum = a + b;
  return {a / sum, b / sum, max + __builtin_logf(sum)};
}
