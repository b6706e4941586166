// Scores to weights for one tile of tokens, with an online softmax (Milakov and Gimelshein 2018,
// arXiv 1805.02867). Included by cpu/kernels.cpp.

// Below any score, and finite: a maximum that starts here never gives inf - inf.
constexpr float kLowest = -3.402823466e+38f;

// Of query rows, by KV head: the weights are relative to e^max and sum to `sum`.
struct State {
  float* out;  // [heads, rows, stride], not normalised
  float* max;  // [heads, rows]
  float* sum;  // [heads, rows]
};

// What one row needs to turn its scores into weights.
struct RowScores {
  int begin;  // of the tokens that the row sees
  int end;
  float slope;     // of ALiBi, 0: none
  float distance;  // of the tile's first token from the query
};

// Scales of one KV head for the tokens of a tile, what loaded values must be multiplied by
// included.
struct TileScales {
  float key[kTile];
  float value[kTile];
};

alignas(64) constexpr float kIota[kTile] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10,
                                            11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                            22, 23, 24, 25, 26, 27, 28, 29, 30, 31};

// Replaces a row's scores by weights, scaled for the values; returns what the row's old sums must
// be multiplied by.
inline float weigh(const RowScores& row, const TileScales& scales, float softcap, float* scores,
                   float& max, float& sum) {
  constexpr int kCount = kTile / kWidth;
  const Vec minus_infinity = splat(-__builtin_inff());
  Vec score[kCount];
  Vec largest = splat(kLowest);
  for (int j = 0; j < kCount; ++j) {
    score[j] = load(scores + j * kWidth) * load(scales.key + j * kWidth);
    if (softcap > 0.f) score[j] = splat(softcap) * tanh_of(score[j] / splat(softcap));
    const Vec token = load(kIota + j * kWidth);
    if (row.slope != 0.f) {
      score[j] = fma(splat(row.slope), token + splat(row.distance), score[j]);
    }
    if (row.begin > 0 || row.end < kTile) {
      score[j] = where_less(token, splat(static_cast<float>(row.begin)), minus_infinity, score[j]);
      score[j] = where_less(token, splat(static_cast<float>(row.end)), score[j], minus_infinity);
    }
    largest = larger_or_second(score[j], largest);
  }
  const float new_max = larger(max_of(largest), max);
  float keep = 1.f;
  if (new_max != max) {  // rare after the first tiles
    float factor[kWidth];
    store(factor, exp_of(splat(max - new_max)));
    keep = factor[0];
    max = new_max;
  }
  Vec total = splat(0.f);
  for (int j = 0; j < kCount; ++j) {
    const Vec weight = exp_of(score[j] - splat(max));
    total = total + weight;
    store(scores + j * kWidth, weight * load(scales.value + j * kWidth));
  }
  sum = sum * keep + sum_of(total);
  return keep;
}

// Appends `next` to `state`, for one row. A side without keys, whose sum is 0 as the largest weight
// of any other is 1, leaves the other's bits as they are.
inline void merge_row(State state, State next, int64_t row, int stride, int head_dim) {
  float* out = state.out + row * stride;
  const float* more = next.out + row * stride;
  if (next.sum[row] == 0.f) return;
  const bool empty = state.sum[row] == 0.f;
  const float max = larger(state.max[row], next.max[row]);
  const float keep = empty ? 0.f : __builtin_expf(state.max[row] - max);
  const float take = empty ? 1.f : __builtin_expf(next.max[row] - max);
  state.max[row] = max;
  state.sum[row] = empty ? next.sum[row] : state.sum[row] * keep + next.sum[row] * take;
  for (int i = 0; i < head_dim; ++i) out[i] = empty ? more[i] : out[i] * keep + more[i] * take;
}
